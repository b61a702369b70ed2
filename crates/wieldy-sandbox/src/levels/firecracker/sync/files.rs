//! Checks of paths in a workspace, the transfer of file contents, and the temporary names of files that are being
//! written.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::Pid;

use crate::levels::firecracker::frames::{self, CONTENT_BYTES_MAX, Kind, invalid};

/// Returns true if a path is one of these or below one.
pub(super) fn contains(list: &[String], path: &str) -> bool {
    list.iter()
        .any(|outer| path.strip_prefix(outer.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// Returns true if one of these is below a path.
pub(super) fn leads_to(list: &[String], path: &str) -> bool {
    list.iter().any(|inner| inner.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
}

/// Returns true if a path is relative and has only plain names between single slashes.
pub(super) fn is_plain(path: &str) -> bool {
    const PATH_BYTES_MAX: usize = 4096;
    path.len() < PATH_BYTES_MAX
        && !path.contains('\0')
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// Sends the content of a file to its end.
pub(super) fn send_content(stream: &mut impl Write, file: OwnedFd) -> io::Result<()> {
    let (mut file, mut buffer) = (std::fs::File::from(file), vec![0; CONTENT_BYTES_MAX]);
    loop {
        // A read error ends the content here. If the file was changed meanwhile, its next stamp shows that.
        let count = file.read(&mut buffer).unwrap_or(0);
        frames::send(stream, Kind::Content, buffer.get(..count).unwrap_or_default())?;
        if count == 0 {
            return Ok(());
        }
    }
}

/// The content of a file that is being received.
pub(super) struct Content<'a, R> {
    pub(super) stream: &'a mut R,
    /// The number of bytes that this sync may still receive.
    pub(super) room: &'a mut u64,
    /// Maximum size of the file.
    pub(super) bytes_max: u64,
    pub(super) is_over: bool,
}

impl<R: Read> Content<'_, R> {
    pub(super) fn copy_to(&mut self, file: &mut impl Write) -> io::Result<()> {
        let mut left = self.bytes_max;
        while let Some(bytes) = self.next()? {
            let full = || io::Error::other("the limit `disk_bytes` of the sandbox is reached");
            left = left.checked_sub(bytes.len() as u64).ok_or_else(full)?;
            file.write_all(&bytes)?;
        }
        Ok(())
    }

    /// Reads and discards the rest of the content.
    pub(super) fn pass_over(&mut self) -> io::Result<()> {
        while self.next()?.is_some() {}
        Ok(())
    }

    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.is_over {
            return Ok(None);
        }
        let bytes = frames::receive(self.stream)?.expect(Kind::Content)?.bytes;
        self.is_over = bytes.is_empty();
        let left = self.room.checked_sub(bytes.len() as u64);
        *self.room = left.ok_or_else(|| invalid("more than there is room for"))?;
        Ok((!self.is_over).then_some(bytes))
    }
}

/// The temporary name of a file that is being written: the process id of the writer, and a number.
pub(super) struct Aside {
    process: u32,
    number: u64,
}

/// The number of the next temporary file of this process.
static NEXT_ASIDE: AtomicU64 = AtomicU64::new(0);

impl Aside {
    pub(super) fn next() -> String {
        format!(".wieldy-{}-{:x}", std::process::id(), NEXT_ASIDE.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        let (process, number) = name.strip_prefix(".wieldy-")?.split_once('-')?;
        Some(Self { process: process.parse().ok()?, number: u64::from_str_radix(number, 16).ok()? })
    }

    /// Returns true if the writer is dead. An earlier process may have had our process id: then the number is one that
    /// we have not reached.
    pub(super) fn is_left(&self) -> bool {
        if self.process == std::process::id() {
            return self.number >= NEXT_ASIDE.load(Ordering::Relaxed);
        }
        let process = i32::try_from(self.process).ok().and_then(Pid::from_raw);
        process.is_none_or(|process| rustix::process::test_kill_process(process) == Err(Errno::SRCH))
    }
}

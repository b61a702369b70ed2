//! The content of files, in frames.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use crate::firecracker::frames::{self, CONTENT_BYTES_MAX, Kind, invalid};

/// Sends a file to its end.
pub(super) fn send_content(stream: &mut impl Write, file: OwnedFd) -> io::Result<()> {
    let (mut file, mut buffer) = (std::fs::File::from(file), vec![0; CONTENT_BYTES_MAX]);
    loop {
        // What cannot be read further ends here; that it is not whole, its next stamp will show.
        let count = file.read(&mut buffer).unwrap_or(0);
        frames::send(stream, Kind::Content, buffer.get(..count).unwrap_or_default())?;
        if count == 0 {
            return Ok(());
        }
    }
}

/// The content of a file that comes.
pub(super) struct Content<'a, R> {
    pub(super) stream: &'a mut R,
    /// How much may still come.
    pub(super) room: &'a mut u64,
    /// How long the file may be.
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

    /// Reads what is left of it for nobody.
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

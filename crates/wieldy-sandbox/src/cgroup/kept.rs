//! Files of a group that are read or written for each call: opened when first needed, and then kept open.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use super::folder;

/// A file that stays open, or that is known not to be there.
#[derive(Default)]
pub(super) struct Kept(OnceLock<Option<File>>);

/// Enough for the figures of some hundred disks, the longest of these files.
pub(super) type Buffer = [MaybeUninit<u8>; 16 * 1024];

impl Kept {
    /// The first of these files that is there.
    pub(super) fn file(&self, folder: &Path, names: &[&str]) -> Option<&File> {
        let open = || {
            names.iter().find_map(|name| {
                let path = folder.join(name);
                // To be written to as well, if that is allowed: some peaks are forgotten that way.
                OpenOptions::new().read(true).write(true).open(&path).or_else(|_| File::open(&path)).ok()
            })
        };
        self.0.get_or_init(open).as_ref()
    }

    /// What the file says.
    pub(super) fn read<'b>(&self, folder: &Path, names: &[&str], buffer: &'b mut Buffer) -> Option<&'b [u8]> {
        let (text, _) = rustix::io::pread(self.file(folder, names)?, &mut buffer[..], 0).ok()?;
        Some(text)
    }

    /// The number that is all the file says.
    pub(super) fn number(&self, folder: &Path, names: &[&str], buffer: &mut Buffer) -> Option<u64> {
        self.read(folder, names, buffer).and_then(number)
    }

    /// Writes a value to the file.
    pub(super) fn write(&self, folder: &Path, name: &str, value: &str) -> io::Result<()> {
        match self.file(folder, &[name]).map(|file| file.write_at(value.as_bytes(), 0)) {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(folder::unwritten(error, folder, name, value)),
            // Tells why it could not be opened.
            None => folder::write(folder, name, value),
        }
    }
}

/// The number that a text begins with.
pub(super) fn number(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(text.get(..digits)?).ok()?.parse().ok()
}

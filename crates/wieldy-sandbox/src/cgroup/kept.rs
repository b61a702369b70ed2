//! Keeps files of a group open that are read or written for each call, from their first use until the group is idle.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::folder;

/// A file that stays open, or that is known to be missing.
#[derive(Default)]
pub(super) struct Kept(Mutex<State>);

#[derive(Default)]
enum State {
    #[default]
    Closed,
    Missing,
    Open(File),
}

/// A buffer for a file. It holds the figures of some hundred disks, the longest of these files.
pub(super) type Buffer = [MaybeUninit<u8>; 16 * 1024];

impl Kept {
    /// Passes the first of these files that exists to `work`.
    pub(super) fn with<T>(&self, folder: &Path, names: &[&str], work: impl FnOnce(&File) -> T) -> Option<T> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Closed) {
            let found = names.iter().find_map(|name| {
                let path = folder.join(name);
                // Opened for writing as well, if that is allowed: some peaks are reset by a write.
                OpenOptions::new().read(true).write(true).open(&path).or_else(|_| File::open(&path)).ok()
            });
            *state = found.map_or(State::Missing, State::Open);
        }
        match &*state {
            State::Open(file) => Some(work(file)),
            State::Closed | State::Missing => None,
        }
    }

    /// Closes the file until it is needed again.
    pub(super) fn close(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Open(_)) {
            *state = State::Closed;
        }
    }

    /// Returns the content of the file.
    pub(super) fn read<'b>(&self, folder: &Path, names: &[&str], buffer: &'b mut Buffer) -> Option<&'b [u8]> {
        let (text, _) = self.with(folder, names, |file| rustix::io::pread(file, &mut buffer[..], 0).ok())??;
        Some(text)
    }

    /// Returns the number that is the file's whole content.
    pub(super) fn number(&self, folder: &Path, names: &[&str], buffer: &mut Buffer) -> Option<u64> {
        self.read(folder, names, buffer).and_then(number)
    }

    /// Writes a value to the file.
    pub(super) fn write(&self, folder: &Path, name: &str, value: &str) -> io::Result<()> {
        match self.with(folder, &[name], |file| file.write_at(value.as_bytes(), 0)) {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(folder::unwritten(error, folder, name, value)),
            // Returns the error of opening it.
            None => folder::write(folder, name, value),
        }
    }
}

/// Returns the number that a text begins with.
pub(super) fn number(text: &[u8]) -> Option<u64> {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(text.get(..digits)?).ok()?.parse().ok()
}

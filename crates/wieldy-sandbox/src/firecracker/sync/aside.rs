//! The names of files that are being written beside those that they will replace.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::Pid;

/// The name of a file that is being written: who writes it, and a number.
pub(super) struct Aside {
    process: u32,
    number: u64,
}

/// The number of the next one that this process writes.
static NEXT_ASIDE: AtomicU64 = AtomicU64::new(0);

impl Aside {
    pub(super) fn next() -> String {
        format!(".wieldy-{}-{:x}", std::process::id(), NEXT_ASIDE.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        let (process, number) = name.strip_prefix(".wieldy-")?.split_once('-')?;
        Some(Self { process: process.parse().ok()?, number: u64::from_str_radix(number, 16).ok()? })
    }

    /// Whether whoever wrote it is no more. An earlier process may have had our own number, but we know how far we came.
    pub(super) fn is_left(&self) -> bool {
        if self.process == std::process::id() {
            return self.number >= NEXT_ASIDE.load(Ordering::Relaxed);
        }
        let process = i32::try_from(self.process).ok().and_then(Pid::from_raw);
        process.is_none_or(|process| rustix::process::test_kill_process(process) == Err(Errno::SRCH))
    }
}

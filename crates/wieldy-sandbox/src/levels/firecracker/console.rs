//! Stores the last output of a guest's console, for the error of a guest that does not start.

use std::sync::{Mutex, PoisonError};

use wieldy_core::{OutputSink, Stream};

/// The last output of Firecracker and of the guest's kernel.
#[derive(Default)]
pub(super) struct Console(Mutex<Vec<u8>>);

impl Console {
    /// Returns the last line that is not empty.
    pub(super) fn last(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned();
        let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
        Some(line.chars().filter(|c| !c.is_control()).collect())
    }
}

impl OutputSink for Console {
    fn write(&self, _stream: Stream, bytes: &[u8]) {
        const KEPT_BYTES: usize = 4096;
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.extend_from_slice(bytes);
        let surplus = said.len().saturating_sub(KEPT_BYTES);
        said.drain(..surplus);
    }
}

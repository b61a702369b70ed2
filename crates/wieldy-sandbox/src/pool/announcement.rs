//! The announcement of a sandbox to the listener of its pool.

use std::sync::Arc;

use wieldy_core::{SandboxChange, SandboxRef};

/// A listener that is called when a sandbox is made or gone.
pub(crate) type Listener = Arc<dyn Fn(SandboxChange) + Send + Sync>;

/// A sandbox that the listener knows. Dropping it tells the listener that the sandbox is gone, so each sandbox that was
/// announced is announced as gone once, also if its pool or its runtime ends first.
pub(super) struct Announcement {
    made: SandboxRef,
    listener: Listener,
}

impl Announcement {
    /// Tells the listener that the sandbox was made.
    pub(super) fn new(made: SandboxRef, listener: &Listener) -> Self {
        listener(SandboxChange::Created(made.clone()));
        Self { made, listener: Arc::clone(listener) }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        (self.listener)(SandboxChange::Destroyed(self.made.clone()));
    }
}

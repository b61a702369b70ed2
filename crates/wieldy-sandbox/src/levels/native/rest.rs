//! Takes the placeholders of an idle sandbox out of the workspace, and puts them back before its next command.
//!
//! Removing a placeholder also removes the mount that masks it, and the sandbox itself has no right to mount. So the
//! fork server makes the placeholders again and mounts over them from outside, through the sandbox's mount namespace.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::sandbox::{NativeSandbox, lock};
use crate::pool::Live;
use crate::supervise::protocol::ForkServerOrder;
use crate::view::placeholders::Placeholder;
use crate::view::plan::{Step, masks_of};

/// The placeholders of a sandbox, which are removed while it is idle.
pub(super) struct Rests {
    placeholders: Vec<Placeholder>,
    /// The steps that mount over the placeholders.
    steps: Vec<Step>,
    /// The sandbox's mount namespace.
    namespace: OwnedFd,
    is_resting: tokio::sync::Mutex<bool>,
}

impl Rests {
    /// Returns nothing if there are no placeholders, or one of them carries a mount that could not be mounted again.
    pub(super) fn new(placeholders: Vec<Placeholder>, steps: &[Step], namespace: OwnedFd) -> Option<Self> {
        let steps = masks_of(steps, &placeholders).filter(|_| !placeholders.is_empty())?;
        Some(Self { placeholders, steps, namespace, is_resting: tokio::sync::Mutex::new(false) })
    }
}

impl NativeSandbox {
    /// Removes the placeholders of an idle sandbox until [`wake`](Self::wake), and closes files that only commands
    /// need.
    pub(super) async fn rest(&self) {
        self.close_files();
        let Some(rests) = &self.rests else { return };
        let mut is_resting = rests.is_resting.lock().await;
        // A command that begins counts itself before it waits for this lock.
        if *is_resting || self.record().idle_since().is_none() {
            return;
        }
        *is_resting = true;
        self.count_placeholders(rests, false);
        let places = rests.placeholders.iter().map(|held| held.path.clone()).collect();
        // If the fork server is gone, so is the sandbox.
        let _ = self.fork_server.ask(&ForkServerOrder::Rest { child: self.init_pid.as_raw_pid(), places }).await;
    }

    /// Puts up the placeholders again and covers them, if the sandbox rests.
    pub(super) async fn put_placeholders_back(&self) -> io::Result<()> {
        let Some(rests) = &self.rests else { return Ok(()) };
        let mut is_resting = rests.is_resting.lock().await;
        if !*is_resting {
            return Ok(());
        }
        let (child, placeholders) = (self.init_pid.as_raw_pid(), rests.placeholders.clone());
        let order = ForkServerOrder::Wake { child, placeholders, steps: rests.steps.clone() };
        self.fork_server.ask_with(&order, rests.namespace.as_fd()).await?;
        self.count_placeholders(rests, true);
        *is_resting = false;
        Ok(())
    }

    /// Adds the placeholders to the masked paths if they `are_there`, and else removes them.
    fn count_placeholders(&self, rests: &Rests, are_there: bool) {
        let mut masked = lock(&self.masked);
        *masked = Arc::new(masked.with_placeholders(&rests.placeholders, are_there));
    }
}

//! Periodically ends containers that were idle for too long, and removes those that have ended.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::container::Container;
use super::{Shared, lock};

impl Shared {
    /// Starts the task that looks for unused containers, unless it runs already.
    pub(super) fn employ_janitor(self: &Arc<Self>) {
        if self.has_janitor.set(()).is_err() {
            return;
        }
        let (shared, idle_max) = (Arc::downgrade(self), self.options.idle_max);
        let every = (idle_max / 4).clamp(Duration::from_millis(50), Duration::from_secs(30));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = Weak::upgrade(&shared) else { return };
                for container in shared.unused(idle_max) {
                    shared.end(container).await;
                }
            }
        });
    }

    /// Removes ended and unused containers from the pool and returns them. A container with others in it is in use.
    fn unused(&self, idle_max: Duration) -> Vec<Arc<Container>> {
        let is_stale = |one: &Container| one.idle_since().is_some_and(|since| since + idle_max < Instant::now());
        let outer: Vec<_> = lock(&self.kept).values().filter_map(|cell| cell.get()?.within.clone()).collect();
        self.forget(|one| one.is_gone() || is_stale(one) && !outer.contains(&one.made().id))
    }
}

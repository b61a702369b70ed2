//! Periodically ends idle sandboxes, and sandboxes with a masked path that was replaced on the host.
//!
//! A mount masks a file and not a name: if a person replaces a hidden or protected file by another, as editors do when
//! they save, the new file is visible in every running sandbox. The next call gets a new sandbox, but processes in the
//! old one could read the new secret, or write files that programs outside execute. So the old sandbox is ended, within
//! [`LOOK_EVERY`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use wieldy_core::SandboxChange;

use super::lock;
use super::sandbox::NativeSandbox;
use super::{Key, Shared};

/// Longest interval between two checks of the sandboxes in which a command runs.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The idle time after which the next check removes a sandbox's placeholders, so that they are gone within two seconds.
const REST_AFTER: Duration = Duration::from_millis(900);

impl Shared {
    /// Starts the task that checks the sandboxes, unless it runs already.
    pub(super) fn employ_janitor(self: &Arc<Self>) {
        if self.has_janitor.set(()).is_err() {
            return;
        }
        let (shared, idle_max) = (Arc::downgrade(self), self.options.idle_max);
        let every = (idle_max / 4).clamp(Duration::from_millis(50), LOOK_EVERY);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = Weak::upgrade(&shared) else { return };
                shared.end_open().await;
                shared.end_stale(idle_max).await;
                shared.rest_idle().await;
            }
        });
    }

    /// Removes the placeholders of idle sandboxes.
    async fn rest_idle(&self) {
        let mut idle: Vec<Arc<NativeSandbox>> =
            lock(&self.kept).values().filter_map(|cell| cell.get().cloned()).collect();
        idle.extend(lock(&self.warm_sandboxes).values().flatten().cloned());
        idle.retain(|one| one.idle_since().is_some_and(|since| since + REST_AFTER < Instant::now()));
        for one in idle {
            one.rest().await;
        }
    }

    /// Removes sandboxes from the pool, with those that were made within them. The inner ones come first.
    pub(super) fn forget(&self, which: impl Fn(&Key, &NativeSandbox) -> bool) -> Vec<Arc<NativeSandbox>> {
        let mut kept = lock(&self.kept);
        let mut take = |which: &dyn Fn(&Key, &NativeSandbox) -> bool| {
            let taken = kept.extract_if(|key, cell| cell.get().is_some_and(|sandbox| which(key, sandbox)));
            taken.filter_map(|(_, cell)| cell.get().cloned()).collect::<Vec<_>>()
        };
        let mut forgotten = Vec::new();
        let mut found = take(&which);
        while !found.is_empty() {
            let outer: Vec<_> = found.iter().map(|outer| outer.made().id.clone()).collect();
            forgotten.append(&mut found);
            found = take(&|_, one| one.within().is_some_and(|within| outer.contains(within)));
        }
        forgotten.reverse();
        forgotten
    }

    /// Ends sandboxes and warm inits that were not used for `idle_max`. A sandbox with others in it is in use.
    async fn end_stale(&self, idle_max: Duration) {
        let is_stale = |one: &NativeSandbox| one.idle_since().is_some_and(|since| since + idle_max < Instant::now());
        let outer: Vec<_> = lock(&self.kept).values().filter_map(|cell| cell.get()?.within().cloned()).collect();
        let mut stale = self.forget(|_, one| is_stale(one) && !outer.contains(&one.made().id));
        for warm_sandboxes in lock(&self.warm_sandboxes).values_mut() {
            let (old, fresh) = std::mem::take(warm_sandboxes).into_iter().partition(|warm| is_stale(warm));
            *warm_sandboxes = fresh;
            stale.extend::<Vec<_>>(old);
        }
        lock(&self.warm_sandboxes).retain(|_, warm_sandboxes| !warm_sandboxes.is_empty());
        lock(&self.warm_inits).retain(|warm_init| warm_init.since() + idle_max >= Instant::now());
        for sandbox in stale {
            self.end(sandbox).await;
        }
    }

    /// Ends the idle sandboxes of sessions that exceed the limits.
    pub(super) async fn end_surplus(self: &Arc<Self>) {
        let end = |surplus| {
            let shared = Arc::clone(self);
            async move { shared.end(surplus).await }
        };
        self.eviction.end_surplus(&self.kept, |key| &key.place, end).await;
    }

    /// Ends busy sandboxes with a replaced masked path. Idle ones are checked when they are next used.
    async fn end_open(&self) {
        let mut busy: Vec<Arc<NativeSandbox>> =
            lock(&self.kept).values().filter_map(|cell| cell.get().cloned()).collect();
        busy.retain(|one| one.idle_since().is_none());
        busy.extend(lock(&self.in_use).iter().cloned());
        if busy.is_empty() {
            return;
        }
        // On a blocking thread: there may be many sandboxes, and each check makes several system calls.
        let look = move || busy.into_iter().filter(|one| !one.is_intact()).collect::<Vec<_>>();
        for open in tokio::task::spawn_blocking(look).await.unwrap_or_default() {
            self.give_up(open).await;
        }
    }

    /// Ends a sandbox that is lost or has a replaced masked path, and the sandboxes within it.
    pub(super) async fn give_up(&self, sandbox: Arc<NativeSandbox>) {
        sandbox.note_replaced();
        let made = sandbox.made().clone();
        let (own, inner): (Vec<_>, Vec<_>) =
            self.forget(|_, other| *other.made() == made).into_iter().partition(|one| *one.made() == made);
        for inner in inner {
            self.end(inner).await;
        }
        let was_known = !own.is_empty();
        drop(own);
        sandbox.end(false).await;
        if was_known {
            self.tell(SandboxChange::Destroyed(made));
        }
    }
}

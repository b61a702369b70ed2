//! Looks from time to time for sandboxes that nobody uses, and for those whose walls no longer hold.
//!
//! A mount covers a file, not a name: where a person replaces a file that is hidden or protected by another, as editors do when they save, the new one
//! lies open in every sandbox that stands. The next call gets a new sandbox; but what still runs in the old one could read the new
//! secret, or write what programs outside execute. So it is ended, which is noticed within [`LOOK_EVERY`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use wieldy_core::SandboxChange;

use super::lock;
use super::sandbox::NativeSandbox;
use super::{Key, Shared};

/// How often sandboxes are looked at in which something runs.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The idle time after which the next look takes a sandbox's placeholders away: within two seconds they are gone.
const REST_AFTER: Duration = Duration::from_millis(900);

impl Shared {
    /// Has somebody look from time to time.
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

    /// Takes the placeholders of idle sandboxes away.
    async fn rest_idle(&self) {
        let mut idle: Vec<Arc<NativeSandbox>> =
            lock(&self.kept).values().filter_map(|cell| cell.get().cloned()).collect();
        idle.extend(lock(&self.warm_sandboxes).values().flatten().cloned());
        idle.retain(|one| one.idle_since().is_some_and(|since| since + REST_AFTER < Instant::now()));
        for one in idle {
            one.rest().await;
        }
    }

    /// Takes sandboxes out of the books, with those that were made within them, which come first.
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

    /// Ends what nobody has used for so long. One with others in it is in use.
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

    /// Ends idle sandboxes of sessions of which there are too many.
    pub(super) async fn end_surplus(self: &Arc<Self>) {
        let end = |surplus| {
            let shared = Arc::clone(self);
            async move { shared.end(surplus).await }
        };
        self.eviction.end_surplus(&self.kept, |key| &key.place, end).await;
    }

    /// Ends what runs in sandboxes whose walls no longer hold. The others are looked at when they are next used.
    async fn end_open(&self) {
        let mut busy: Vec<Arc<NativeSandbox>> =
            lock(&self.kept).values().filter_map(|cell| cell.get().cloned()).collect();
        busy.retain(|one| one.idle_since().is_none());
        busy.extend(lock(&self.in_use).iter().cloned());
        if busy.is_empty() {
            return;
        }
        // There may be many, and each look is some system calls.
        let look = move || busy.into_iter().filter(|one| !one.is_intact()).collect::<Vec<_>>();
        for open in tokio::task::spawn_blocking(look).await.unwrap_or_default() {
            self.give_up(open).await;
        }
    }

    /// Ends a sandbox that is lost, or whose walls no longer hold, and everything in it.
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

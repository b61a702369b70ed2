//! The janitor of a pool: ends sandboxes that are idle for too long, that are lost, and those in which something runs
//! although a file that they hide or protect was replaced.
//!
//! A mount masks a file and not a name: where a person replaces such a file, as editors do when they save, the new one
//! lies open in every sandbox that exists. The next call gets a new sandbox, and programs that still run in the old
//! one are ended within [`LOOK_EVERY`].

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Backend, Live, Pool, end, lock};

/// The longest time until a sandbox in which something runs is checked again.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The longest time until lost sandboxes are looked for again.
const LOOK_FOR_LOST_EVERY: Duration = Duration::from_secs(30);

impl<B: Backend> Pool<B> {
    /// Starts the janitor, unless there is one. It ends with the pool.
    pub(super) fn employ_janitor(self: &Arc<Self>) {
        if self.has_janitor.set(()).is_err() {
            return;
        }
        let (pool, idle_max) = (Arc::downgrade(self), self.backend.idle_max());
        let every = (idle_max / 4).clamp(Duration::from_millis(50), LOOK_EVERY);
        let lost_every = (idle_max / 4).clamp(every, LOOK_FOR_LOST_EVERY);
        tokio::spawn(async move {
            let mut looked_for_lost = Instant::now();
            loop {
                tokio::time::sleep(every).await;
                let Some(pool) = Weak::upgrade(&pool) else { return };
                pool.end_replaced().await;
                let for_lost = looked_for_lost.elapsed() >= lost_every;
                if for_lost {
                    looked_for_lost = Instant::now();
                }
                pool.end_stale(idle_max, for_lost).await;
                pool.backend.tidy(pool.all()).await;
            }
        });
    }

    /// Ends sandboxes that were idle for this time, and lost ones. One with others in it is in use.
    pub(super) async fn end_stale(&self, idle_max: Duration, for_lost: bool) {
        let outer: Vec<_> = self.all().iter().filter_map(|live| live.record().outer.clone()).collect();
        let stale = self.take(|live, is_wanted| {
            let record = live.record();
            let is_stale = !is_wanted && record.is_idle_for(idle_max) && !outer.contains(record.id());
            is_stale || for_lost && record.idle_since().is_some() && !live.is_alive()
        });
        for live in stale {
            end(live, false).await;
        }
    }

    /// Ends everything that runs in sandboxes which no longer mask what they should. Idle ones are checked when they
    /// are next used.
    async fn end_replaced(&self) {
        let mut busy = self.all();
        busy.retain(|live| live.record().idle_since().is_none());
        busy.extend(lock(&self.own).iter().cloned());
        if busy.is_empty() {
            return;
        }
        // There may be many, and each look is some system calls.
        let look = move || busy.into_iter().filter(|live| !live.is_intact()).collect::<Vec<_>>();
        for open in tokio::task::spawn_blocking(look).await.unwrap_or_default() {
            self.give_up(&open).await;
        }
    }

    /// Ends a sandbox that is lost, or no longer masks what it should, and everything in it.
    pub(super) async fn give_up(&self, live: &Arc<B::Live>) {
        if let Some(path) = live.replaced() {
            let reason = format!(
                "`{}` was replaced on the machine, and the sandbox hides or protects it, so its commands were ended; call again for a new one",
                path.display()
            );
            let _ = live.record().ended_because.set(reason);
        }
        let made = live.record().made();
        let taken = self.take(|other, _| other.record().made() == made);
        for inner in taken.into_iter().filter(|other| other.record().made() != made) {
            end(inner, false).await;
        }
        end(Arc::clone(live), false).await;
    }
}

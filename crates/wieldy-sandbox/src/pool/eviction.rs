//! The eviction of idle sandboxes of which a pool has too many, least recently used first.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Semaphore;
use wieldy_core::Place;

use super::{Entries, Live, lock};

/// The limits of idle sandboxes that are kept for the next call of their session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleLimits {
    /// The maximum for all tenants together.
    pub sandboxes_max: usize,
    /// The maximum for one tenant.
    pub per_tenant_max: usize,
}

impl Default for IdleLimits {
    fn default() -> Self {
        Self { sandboxes_max: 256, per_tenant_max: 128 }
    }
}

impl IdleLimits {
    /// No more than the process has descriptors for; half of them are for everything else.
    fn affordable(self) -> Self {
        const DESCRIPTORS_EACH: u64 = 16; // while it runs; an idle one holds about five
        let open_files_max = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let affordable = usize::try_from(open_files_max / 2 / DESCRIPTORS_EACH).unwrap_or(usize::MAX).max(1);
        Self { sandboxes_max: self.sandboxes_max.min(affordable), ..self }
    }
}

/// The slots for ending surplus sandboxes; a call that makes another sandbox waits for one.
const ENDINGS_MAX: usize = 8;

/// The eviction of idle sandboxes of sessions, of which there may be only so many.
pub(super) struct Eviction {
    limits: IdleLimits,
    endings: Arc<Semaphore>,
}

impl Eviction {
    pub(super) fn new(limits: IdleLimits) -> Self {
        Self { limits: limits.affordable(), endings: Arc::new(Semaphore::new(ENDINGS_MAX)) }
    }

    /// Ends the idle sandboxes of which there are too many, in the background, a few at once. One with others in it is
    /// in use.
    pub(super) async fn end_surplus<K: Clone + Eq + Hash, V: Live, F: Future<Output = ()> + Send + 'static>(
        &self,
        entries: &Entries<K, V>,
        place: impl Fn(&K) -> &Place,
        end: impl Fn(Arc<V>) -> F,
    ) {
        let outer = {
            let entries = lock(entries);
            if entries.len() <= self.limits.sandboxes_max.min(self.limits.per_tenant_max) {
                return;
            }
            entries.values().filter_map(|cell| cell.get()?.record().outer.clone()).collect::<Vec<_>>()
        };
        let idle = |key: &K, one: &V| match place(key) {
            Place::Session(session) if !outer.contains(one.record().id()) => {
                Some((session.tenant.clone(), one.record().idle_since()?))
            }
            _ => None,
        };
        for surplus in surplus(entries, self.limits, idle) {
            let slot = Arc::clone(&self.endings).acquire_owned().await;
            let ending = end(surplus);
            tokio::spawn(async move {
                ending.await;
                drop(slot);
            });
        }
    }
}

/// Takes the idle sandboxes of which there are too many out of the pool, those first that were not used for longest.
/// `idle` says of those of sessions for which tenant and since when they are idle, where they are.
fn surplus<K: Clone + Eq + Hash, V>(
    entries: &Entries<K, V>,
    limits: IdleLimits,
    idle: impl Fn(&K, &V) -> Option<(Option<String>, Instant)>,
) -> Vec<Arc<V>> {
    let mut entries = lock(entries);
    // A call that has the cell is about to use the sandbox.
    let unheld = entries.iter().filter(|(_, cell)| Arc::strong_count(cell) == 1);
    let found = unheld.filter_map(|(key, cell)| Some((idle(key, cell.get()?)?, key)));
    let mut all: Vec<((Option<String>, Instant), K)> = found.map(|(idle, key)| (idle, key.clone())).collect();
    all.sort_unstable_by_key(|((_, since), _)| std::cmp::Reverse(*since));
    let (mut kept, mut of_tenants) = (0, HashMap::<Option<String>, usize>::new());
    let mut surplus = Vec::new();
    for ((tenant, _), key) in all {
        let of_tenant = of_tenants.entry(tenant).or_default();
        if kept < limits.sandboxes_max && *of_tenant < limits.per_tenant_max {
            kept += 1;
            *of_tenant += 1;
        } else {
            surplus.extend(entries.remove(&key).and_then(|cell| cell.get().cloned()));
        }
    }
    surplus
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::kept_or_built;
    use super::*;

    #[tokio::test]
    async fn above_the_maximum_the_least_recently_used_sandboxes_go() {
        let (entries, begin) = (Entries::<(&str, u64), u64>::default(), Instant::now());
        for key in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 0), ("c", 5), ("c", 9)] {
            kept_or_built(&entries, key, async { Ok(Arc::new(key.1)) }, |built| built).await.unwrap();
        }
        // The sandbox at 9 is busy.
        let idle =
            |key: &(&str, u64), at: &u64| (*at < 9).then(|| (Some(key.0.to_owned()), begin + Duration::from_secs(*at)));
        let gone = |sandboxes_max, per_tenant_max| {
            let mut gone: Vec<u64> =
                surplus(&entries, IdleLimits { sandboxes_max, per_tenant_max }, idle).iter().map(|one| **one).collect();
            gone.sort_unstable();
            gone
        };
        assert_eq!(gone(100, 100), [0_u64; 0]);
        assert_eq!(gone(100, 2), [1]);
        assert_eq!(gone(3, 2), [0, 2]);
        assert_eq!(gone(0, 0), [3, 4, 5]);
        assert_eq!(entries.lock().unwrap().keys().collect::<Vec<_>>(), [&("c", 9)]);
    }
}

//! The books of a backend: the sandboxes that it keeps, each built once by whoever needs it first, and how many of them may be idle.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::{OnceCell, Semaphore};
use wieldy_core::{Place, SandboxError, SandboxId};

/// Sandboxes by what they are made for; those without a value are being built.
pub(crate) type Books<K, V> = Mutex<HashMap<K, Arc<OnceCell<Arc<V>>>>>;

/// What is kept for this, which is built if there is none. Of those who need it at once one builds it, and if that fails the next.
pub(crate) async fn kept_or_built<K: Clone + Eq + Hash, V>(
    books: &Books<K, V>,
    key: K,
    build: impl Future<Output = Result<Arc<V>, SandboxError>>,
) -> Result<Arc<V>, SandboxError> {
    let cell = Arc::clone(books.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default());
    let made = cell.get_or_try_init(|| build).await.cloned();
    if made.is_err() {
        let mut books = books.lock().unwrap_or_else(PoisonError::into_inner);
        drop(cell);
        // Whoever else has it is about to build in it, or has done so.
        let is_of_nobody = |cell: &Arc<OnceCell<_>>| Arc::strong_count(cell) == 1 && !cell.initialized();
        if books.get(&key).is_some_and(is_of_nobody) {
            books.remove(&key);
        }
    }
    made
}

/// The limits of idle sandboxes that are kept for the next call of their session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleLimits {
    /// All together.
    pub sandboxes_max: usize,
    /// Those of one tenant.
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

/// A sandbox in the books.
pub(crate) trait Kept: Send + Sync + 'static {
    /// Returns its id.
    fn id(&self) -> &SandboxId;
    /// Returns the id of the sandbox that it was made within, if it was.
    fn outer(&self) -> Option<&SandboxId>;
    /// Returns when the last command in it ended; nothing while one runs.
    fn idle_since(&self) -> Option<Instant>;
}

/// The slots for ending surplus sandboxes; a call that makes another sandbox waits for one.
const ENDINGS_MAX: usize = 8;

/// The eviction of idle sandboxes of sessions, of which there may be only so many.
pub(crate) struct Eviction {
    limits: IdleLimits,
    endings: Arc<Semaphore>,
}

impl Eviction {
    pub(crate) fn new(limits: IdleLimits) -> Self {
        Self { limits: limits.affordable(), endings: Arc::new(Semaphore::new(ENDINGS_MAX)) }
    }

    /// Ends the idle sandboxes of which there are too many, in the background, a few at once. One with others in it is in use.
    pub(crate) async fn end_surplus<K: Clone + Eq + Hash, V: Kept, F: Future<Output = ()> + Send + 'static>(
        &self,
        books: &Books<K, V>,
        place: impl Fn(&K) -> &Place,
        end: impl Fn(Arc<V>) -> F,
    ) {
        let outer = {
            let books = books.lock().unwrap_or_else(PoisonError::into_inner);
            if books.len() <= self.limits.sandboxes_max.min(self.limits.per_tenant_max) {
                return;
            }
            books.values().filter_map(|cell| cell.get()?.outer().cloned()).collect::<Vec<_>>()
        };
        let idle = |key: &K, one: &V| match place(key) {
            Place::Session(session) if !outer.contains(one.id()) => Some((session.tenant.clone(), one.idle_since()?)),
            _ => None,
        };
        for surplus in surplus(books, self.limits, idle) {
            let slot = Arc::clone(&self.endings).acquire_owned().await;
            let ending = end(surplus);
            tokio::spawn(async move {
                ending.await;
                drop(slot);
            });
        }
    }
}

/// Takes the idle sandboxes out of the books of which there are too many, those first that were not used for longest. `idle` says
/// of those of sessions for which tenant and since when they are idle, where they are.
fn surplus<K: Clone + Eq + Hash, V>(
    books: &Books<K, V>,
    limits: IdleLimits,
    idle: impl Fn(&K, &V) -> Option<(Option<String>, Instant)>,
) -> Vec<Arc<V>> {
    let mut books = books.lock().unwrap_or_else(PoisonError::into_inner);
    // One that a call has got hold of, or is about to, will be used.
    let is_unheld = |one: &&Arc<V>| Arc::strong_count(one) == 1;
    let unheld = books.iter().filter(|(_, cell)| Arc::strong_count(cell) == 1);
    let found = unheld.filter_map(|(key, cell)| Some((idle(key, cell.get().filter(is_unheld)?)?, key)));
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
            surplus.extend(books.remove(&key).and_then(|cell| cell.get().cloned()));
        }
    }
    surplus
}

pub(crate) fn of_another_shape(id: &SandboxId) -> SandboxError {
    let reason = format!(
        "the sandbox `{}` was made for another workspace, other files or another network than this call asks for",
        id.0
    );
    SandboxError::Creation { reason }
}

pub(crate) fn no_longer_intact(id: &SandboxId) -> SandboxError {
    let reason = format!(
        "what the sandbox `{}` hides or protects was replaced on the machine; destroy it and make a new one",
        id.0
    );
    SandboxError::Creation { reason }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn of_too_many_those_go_that_were_not_used_for_longest() {
        let (books, begin) = (Books::<(&str, u64), u64>::default(), Instant::now());
        for key in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 0), ("c", 5), ("c", 9)] {
            kept_or_built(&books, key, async { Ok(Arc::new(key.1)) }).await.unwrap();
        }
        // The sandbox at 9 is busy.
        let idle =
            |key: &(&str, u64), at: &u64| (*at < 9).then(|| (Some(key.0.to_owned()), begin + Duration::from_secs(*at)));
        let gone = |sandboxes_max, per_tenant_max| {
            let mut gone: Vec<u64> =
                surplus(&books, IdleLimits { sandboxes_max, per_tenant_max }, idle).iter().map(|one| **one).collect();
            gone.sort_unstable();
            gone
        };
        assert_eq!(gone(100, 100), [0_u64; 0]);
        assert_eq!(gone(100, 2), [1]);
        assert_eq!(gone(3, 2), [0, 2]);
        assert_eq!(gone(0, 0), [3, 4, 5]);
        assert_eq!(books.lock().unwrap().keys().collect::<Vec<_>>(), [&("c", 9)]);
    }

    fn failure() -> SandboxError {
        SandboxError::Creation { reason: "no".into() }
    }

    #[tokio::test]
    async fn what_the_next_one_builds_after_a_failure_is_in_the_books() {
        let (books, steps) = (Books::<u32, &str>::default(), tokio::sync::Notify::new());
        let fails = async {
            let build = async {
                steps.notified().await;
                Err(failure())
            };
            let failed = kept_or_built(&books, 7, build).await;
            steps.notify_one();
            failed
        };
        // It takes until the first one has been told.
        let builds = kept_or_built(&books, 7, async {
            steps.notified().await;
            Ok(Arc::new("a sandbox"))
        });
        let beginning = async {
            tokio::task::yield_now().await;
            steps.notify_one();
        };
        let (failed, built, ()) = tokio::join!(fails, builds, beginning);
        assert_eq!((failed.is_err(), built.unwrap()), (true, Arc::new("a sandbox")));
        let known = books.lock().unwrap().get(&7).and_then(|cell| cell.get().cloned());
        assert_eq!(known, Some(Arc::new("a sandbox")));
        assert!(kept_or_built(&books, 8, async { Err(failure()) }).await.is_err());
        assert_eq!(books.lock().unwrap().len(), 1, "of what failed for all, nothing is left");
    }
}

//! The answer cache: returns stored answers, and lets callers of the same call share one run (single flight).
//!
//! The result cache and the idempotency keys use the same mechanism with different keys. Each tenant has a share of the
//! space: when it is full, the tenant with the largest share loses its oldest answer. So no tenant can evict the
//! answers of a smaller one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use jiff::Timestamp;
use lru::LruCache;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::build::FOR_EVER;
use crate::call::{Call, Caller, Content};
use crate::error::CallError;
use crate::event::{CallState, Keyed};
use crate::flight::Flight;
use crate::footprint::Touches;
use crate::input::{Input, canonical};
use crate::outcome::Outcome;
use crate::registry::Registered;

/// The key of a stored answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    /// The owner of the share that holds the answer: the hash of a tenant, or `None` for callers without one.
    tenant: Option<blake3::Hash>,
    hash: blake3::Hash,
}

impl CacheKey {
    /// Returns the key for the same caller, arguments and context, and the same definition of the tool.
    pub(crate) fn of_call(tool: &Registered, input: &Input, call: &Call) -> Self {
        let (mut bytes, caller) = (tool.hash.as_bytes().to_vec(), &call.caller);
        canonical(input.value(), &mut bytes);
        let who = json!([caller.tenant, caller.agent, caller.user, caller.scopes, caller.permissions]);
        canonical(&who, &mut bytes);
        if let Some(context) = &call.context {
            canonical(context, &mut bytes);
        }
        Self { tenant: caller.tenant_hashed(), hash: blake3::hash(&bytes) }
    }

    /// Returns the same key for calls whose clients sent the same notes, which the tool passes on.
    pub(crate) fn with_notes(self, call: &Call) -> Self {
        let Some(notes) = &call.notes else { return self };
        let mut bytes = self.hash.as_bytes().to_vec();
        canonical(notes, &mut bytes);
        Self { hash: blake3::hash(&bytes), ..self }
    }

    /// Returns the key for the same idempotency key, caller, tool and workspace.
    pub(crate) fn of_idempotency_key(tool: &Registered, key: &str, caller: &Caller, workspace: &Path) -> Self {
        let mut bytes = Vec::new();
        canonical(&json!([tool.name, key, caller.tenant, caller.agent, workspace.to_string_lossy()]), &mut bytes);
        Self { tenant: caller.tenant_hashed(), hash: blake3::hash(&bytes) }
    }
}

/// The stored answers and the runs that callers may join.
pub(crate) struct AnswerCache {
    entries: Mutex<Entries>,
    answers_max: usize,
    bytes_max: u64,
    /// True if an answer that is too large is stored in brief, so that its call never runs again.
    stores_all: bool,
}

#[derive(Default)]
struct Entries {
    /// The answers by tenant. No share is empty.
    shares: HashMap<Option<blake3::Hash>, TenantShare>,
    /// The runs that other callers may wait for.
    running: HashMap<CacheKey, SharedRun>,
    runs: u64,
}

/// The answers of one tenant.
struct TenantShare {
    answers: LruCache<CacheKey, StoredAnswer>,
    bytes: u64,
}

struct StoredAnswer {
    outcome: Outcome,
    fingerprint: CacheKey,
    expires: Instant,
    touches: Touches,
    bytes: u64,
}

struct SharedRun {
    run: u64,
    touches: Touches,
    over: watch::Receiver<()>,
}

/// The result of a lookup.
pub(crate) enum Lookup<'a> {
    /// The stored answer.
    Hit(Box<Outcome>),
    /// The idempotency key belongs to a different call.
    OtherCall,
    /// No answer: the caller must run it, and others wait for that run. Boxed because few calls need it, to keep every
    /// call's future small.
    Leader(Box<Leader<'a>>),
}

/// The leader of a single flight: runs the call for all waiting callers. If it is dropped without an answer, the next
/// caller becomes the leader.
pub(crate) struct Leader<'a> {
    cache: &'a AnswerCache,
    key: CacheKey,
    fingerprint: CacheKey,
    run: u64,
    /// Dropping the sender wakes the waiting callers.
    _over: watch::Sender<()>,
}

impl AnswerCache {
    pub(crate) fn new(answers_max: usize, bytes_max: u64) -> Self {
        Self { entries: Mutex::default(), answers_max, bytes_max, stores_all: false }
    }

    /// Makes the cache store every answer, even if only in brief: for calls that must not run twice.
    pub(crate) fn storing_all(self) -> Self {
        Self { stores_all: true, ..self }
    }

    /// Returns the stored answer, or waits for that of a running call, or makes the caller the leader. `fingerprint`
    /// distinguishes different calls with the same key. `touches` holds the paths whose change invalidates the answer.
    pub(crate) async fn get(&self, key: CacheKey, fingerprint: CacheKey, touches: &Touches) -> Lookup<'_> {
        loop {
            let mut over = {
                let mut entries = self.lock();
                if let Some(stored) = entries.fresh(&key) {
                    if stored.fingerprint != fingerprint {
                        return Lookup::OtherCall;
                    }
                    return Lookup::Hit(Box::new(stored.outcome.clone()));
                }
                match entries.running.get(&key) {
                    Some(running) => running.over.clone(),
                    None => return Lookup::Leader(Box::new(self.start_run(&mut entries, key, fingerprint, touches))),
                }
            };
            // An error means that the run is over: look again.
            let _ = over.changed().await;
        }
    }

    fn start_run(&self, entries: &mut Entries, key: CacheKey, fingerprint: CacheKey, touches: &Touches) -> Leader<'_> {
        let (over_sender, over) = watch::channel(());
        entries.runs += 1;
        let run = entries.runs;
        entries.running.insert(key, SharedRun { run, touches: touches.clone(), over });
        Leader { cache: self, key, fingerprint, run, _over: over_sender }
    }

    /// Stores an answer that an earlier executor gave. `tenant` is the hash of the callers' tenant.
    pub(crate) fn restore(&self, keyed: &Keyed, tenant: Option<&str>, outcome: &Outcome) {
        let ttl = time_left(keyed);
        let read = |hex: &str| blake3::Hash::from_hex(hex);
        let (Ok(tenant), Ok(key), Ok(fingerprint)) =
            (tenant.map(read).transpose(), read(&keyed.key), read(&keyed.fingerprint))
        else {
            return;
        };
        let mut entries = self.lock();
        let (key, fingerprint) = (CacheKey { tenant, hash: key }, CacheKey { tenant, hash: fingerprint });
        let leader = self.start_run(&mut entries, key, fingerprint, &Touches::nothing());
        drop(entries);
        leader.store(outcome, ttl);
    }

    /// Drops every answer that the written paths may have changed, including those still being computed.
    pub(crate) fn invalidate(&self, written: &Touches) {
        let mut entries = self.lock();
        entries.running.retain(|_, running| !written.invalidates(&running.touches));
        let stored = entries.shares.values().flat_map(|share| share.answers.iter());
        let invalidated: Vec<CacheKey> =
            stored.filter(|(_, stored)| written.invalidates(&stored.touches)).map(|(key, _)| *key).collect();
        for key in invalidated {
            entries.forget(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().expect("no code panics while it holds the entries")
    }
}

impl Entries {
    fn fresh(&mut self, key: &CacheKey) -> Option<&StoredAnswer> {
        if self.shares.get(&key.tenant)?.answers.peek(key)?.expires <= Instant::now() {
            self.forget(key);
        }
        self.shares.get_mut(&key.tenant)?.answers.get(key)
    }

    fn add(&mut self, key: CacheKey, stored: StoredAnswer) {
        self.forget(&key);
        let share = self.shares.entry(key.tenant).or_insert_with(TenantShare::new);
        share.bytes += stored.bytes;
        share.answers.push(key, stored);
    }

    fn forget(&mut self, key: &CacheKey) {
        let Some(share) = self.shares.get_mut(&key.tenant) else { return };
        if let Some(stored) = share.answers.pop(key) {
            share.bytes -= stored.bytes;
        }
        if share.answers.is_empty() {
            self.shares.remove(&key.tenant);
        }
    }

    /// Drops the oldest answers of the largest share, by `size`, until all shares together are at most `max`.
    fn shrink(&mut self, max: u64, size: impl Fn(&TenantShare) -> u64) {
        while self.shares.values().map(&size).sum::<u64>() > max {
            let largest = self.shares.values().max_by_key(|share| size(share));
            let Some(oldest) = largest.and_then(|share| share.answers.peek_lru()).map(|(key, _)| *key) else { return };
            self.forget(&oldest);
        }
    }
}

impl TenantShare {
    fn new() -> Self {
        Self { answers: LruCache::unbounded(), bytes: 0 }
    }
}

impl Leader<'_> {
    /// Returns the key by which other executors know the run.
    pub(crate) fn key(&self) -> String {
        self.key.hash.to_hex().to_string()
    }

    /// Returns true if an earlier answer under the same key was to the same call.
    pub(crate) fn is_same_call(&self, keyed: &Keyed) -> bool {
        keyed.fingerprint == self.fingerprint.hash.to_hex().as_str()
    }

    /// Stores the answer for later callers, unless a write has invalidated it meanwhile.
    pub(crate) fn store(self, outcome: &Outcome, ttl: Duration) {
        let (mut outcome, mut bytes) = (Cow::Borrowed(outcome), bytes(outcome));
        if bytes > self.cache.bytes_max && self.cache.stores_all {
            outcome = Cow::Owned(outcome.in_brief(bytes));
            bytes = self::bytes(&outcome);
        }
        let mut entries = self.cache.lock();
        let Some(running) = entries.running.get(&self.key).filter(|running| running.run == self.run) else {
            return;
        };
        if ttl.is_zero() || bytes > self.cache.bytes_max {
            return;
        }
        let touches = running.touches.clone();
        let stored = StoredAnswer {
            outcome: outcome.into_owned(),
            fingerprint: self.fingerprint,
            expires: Instant::now() + ttl.min(FOR_EVER),
            touches,
            bytes,
        };
        entries.add(self.key, stored);
        entries.shrink(self.cache.bytes_max, |share| share.bytes);
        entries.shrink(self.cache.answers_max as u64, |share| share.answers.len() as u64);
    }
}

/// Returns the time until the key expires.
pub(crate) fn time_left(keyed: &Keyed) -> Duration {
    let left = Timestamp::now().until(keyed.expires_at).ok().and_then(|span| span.total(jiff::Unit::Second).ok());
    Duration::try_from_secs_f64(left.unwrap_or_default()).unwrap_or_default()
}

/// Returns the size of an answer in bytes.
fn bytes(outcome: &Outcome) -> u64 {
    let structured = outcome.structured.as_ref().map_or(0, |value| value.to_string().len() as u64);
    let passed_on = outcome.passed_on.as_ref().map_or(0, |passed_on| passed_on.bytes());
    outcome.content.iter().map(Content::bytes).sum::<u64>() + structured + passed_on + 512
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let mut entries = self.cache.lock();
        if entries.running.get(&self.key).is_some_and(|running| running.run == self.run) {
            entries.running.remove(&self.key);
        }
    }
}

/// A guard for calls with an idempotency key, which must take effect only once. Dropped during a run because the caller
/// went away, it stores "outcome unknown" under the key, so that a retry with the key does not run the call again.
pub(crate) struct IdempotencyGuard<'a> {
    pub(crate) leader: Option<Box<Leader<'a>>>,
    pub(crate) flight: &'a Flight,
    pub(crate) tool: &'a Registered,
    pub(crate) ttl: Duration,
}

impl IdempotencyGuard<'_> {
    /// Notes the idempotency key on the flight, so that the history records it.
    pub(crate) fn note(&self) {
        if let Some(leader) = &self.leader {
            let expires_at = Timestamp::now().checked_add(self.ttl).unwrap_or(Timestamp::MAX);
            let (key, fingerprint) = (leader.key(), leader.fingerprint.hash.to_hex().to_string());
            let _ = self.flight.keyed.set(Arc::new(Keyed { key, fingerprint, expires_at }));
        }
    }
}

impl Drop for IdempotencyGuard<'_> {
    fn drop(&mut self) {
        let Some(leader) = self.leader.take() else { return };
        let runs = matches!(self.flight.state(), CallState::Running { .. });
        if runs && !self.tool.spec.annotations.repeatable() {
            leader.store(&Outcome::default().failed(CallError::outcome_unknown()), self.ttl);
        }
    }
}

/// A guard that invalidates cached answers for the paths a run writes: when it starts and, for answers read meanwhile,
/// when it ends or is dropped.
pub(crate) struct InvalidationGuard<'a> {
    cache: &'a AnswerCache,
    touches: &'a Touches,
}

impl<'a> InvalidationGuard<'a> {
    pub(crate) fn new(cache: &'a AnswerCache, touches: &'a Touches) -> Option<Self> {
        let spoiling = touches.writes_anything().then(|| Self { cache, touches })?;
        cache.invalidate(touches);
        Some(spoiling)
    }
}

impl Drop for InvalidationGuard<'_> {
    fn drop(&mut self) {
        self.cache.invalidate(self.touches);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::ToolSpec;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(text: &str) -> CacheKey {
        CacheKey { tenant: None, hash: blake3::hash(text.as_bytes()) }
    }

    fn reads(path: &str) -> Touches {
        Touches::of(&ToolSpec::new("r", "").read_only().reads("path"), &json!({ "path": path }))
    }

    fn writes(path: &str) -> Touches {
        Touches::of(&ToolSpec::new("w", "").writes("path"), &json!({ "path": path }))
    }

    fn new_cache() -> AnswerCache {
        AnswerCache::new(2, 10_000)
    }

    async fn leader_of<'a>(cache: &'a AnswerCache, name: &str) -> Option<Leader<'a>> {
        match cache.get(key(name), key(name), &reads(name)).await {
            Lookup::Leader(leader) => Some(*leader),
            _ => None,
        }
    }

    async fn store(cache: &AnswerCache, name: &str) {
        leader_of(cache, name).await.expect("no answer is cached").store(&Outcome::text(name), SECOND);
    }

    // Shows: A9.1
    #[tokio::test(start_paused = true)]
    async fn an_answer_expires_and_the_least_recently_used_is_evicted_first() {
        let cache = new_cache();
        store(&cache, "a").await;
        store(&cache, "b").await;
        assert!(leader_of(&cache, "a").await.is_none(), "kept");
        store(&cache, "c").await;
        assert!(leader_of(&cache, "b").await.is_some(), "pushed out");
        tokio::time::advance(SECOND).await;
        assert!(leader_of(&cache, "a").await.is_some(), "expired");
    }

    fn key_of(tenant: &str, name: &str) -> CacheKey {
        CacheKey { tenant: Some(blake3::hash(tenant.as_bytes())), ..key(name) }
    }

    /// Stores an answer for a tenant.
    async fn store_for(cache: &AnswerCache, tenant: &str, name: &str) {
        let key = key_of(tenant, name);
        let Lookup::Leader(leader) = cache.get(key, key, &Touches::nothing()).await else {
            panic!("no answer is cached")
        };
        leader.store(&Outcome::text(name), SECOND);
    }

    /// Returns, for each name, true if the tenant's answer is stored.
    fn stored_for(cache: &AnswerCache, tenant: &str, names: [&str; 3]) -> [bool; 3] {
        names.map(|name| cache.lock().fresh(&key_of(tenant, name)).is_some())
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_with_many_answers_evicts_only_its_own() {
        let by_count = AnswerCache::new(3, 1_000_000);
        let by_bytes = AnswerCache::new(1_000, 3 * 513);
        for cache in [by_count, by_bytes] {
            store_for(&cache, "quiet", "a").await;
            for name in ["a", "b", "c", "d"] {
                store_for(&cache, "loud", name).await;
            }
            assert_eq!(stored_for(&cache, "quiet", ["a", "b", "c"]), [true, false, false]);
            assert_eq!(stored_for(&cache, "loud", ["b", "c", "d"]), [false, true, true]);
            assert_eq!(cache.lock().shares.values().map(|share| share.bytes).sum::<u64>(), 3 * 513);
            tokio::time::advance(SECOND).await;
            assert_eq!(stored_for(&cache, "quiet", ["a", "b", "c"]), [false; 3]);
            assert_eq!(cache.lock().shares.len(), 1, "who has nothing left has no share");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_too_large_to_store_is_stored_in_brief_under_its_key() {
        let large = Outcome { artifact: Some(crate::ArtifactId::next()), ..Outcome::text("x".repeat(9_500)) };
        let large = large.structured(json!({"paid": true}));
        let store =
            async |cache: &AnswerCache| leader_of(cache, "a").await.expect("no answer is cached").store(&large, SECOND);
        let cache = new_cache();
        store(&cache).await;
        assert!(leader_of(&cache, "a").await.is_some(), "cached values are computed again");
        let keys = new_cache().storing_all();
        store(&keys).await;
        let Lookup::Hit(again) = keys.get(key("a"), key("a"), &reads("a")).await else {
            panic!("it must not run again")
        };
        let message = "this call was run before, and its answer of 10025 bytes was too large to be kept; its artifact has the whole";
        assert_eq!(*again, Outcome { partial: true, artifact: large.artifact, ..Outcome::text(message) });
    }

    #[tokio::test(start_paused = true)]
    async fn equal_calls_share_one_run_and_the_next_takes_over_a_failed_one() {
        let cache = new_cache();
        let first = leader_of(&cache, "a").await.expect("the first");
        let second = leader_of(&cache, "a");
        tokio::pin!(second);
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        let second = second.await.expect("it takes over");
        let third = leader_of(&cache, "a");
        tokio::pin!(third);
        assert!(futures_util::poll!(&mut third).is_pending());
        second.store(&Outcome::text("x"), SECOND);
        assert!(third.await.is_none(), "it got the answer of the second");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_invalidates_stored_answers_and_running_reads() {
        let cache = new_cache();
        store(&cache, "a/x").await;
        store(&cache, "b").await;
        let reading = leader_of(&cache, "c").await.expect("no answer is cached");
        cache.invalidate(&writes("a"));
        cache.invalidate(&writes("c"));
        assert!(leader_of(&cache, "a/x").await.is_some(), "spoiled");
        assert!(leader_of(&cache, "b").await.is_none(), "untouched");
        let fresh = leader_of(&cache, "c").await.expect("who comes after the write does not wait for a read before it");
        reading.store(&Outcome::text("old"), SECOND);
        drop(fresh);
        assert!(leader_of(&cache, "c").await.is_some(), "an answer from before the write is not cached");
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_reused_for_another_call_is_noticed() {
        let cache = new_cache();
        store(&cache, "a").await;
        assert!(matches!(cache.get(key("a"), key("other"), &reads("a")).await, Lookup::OtherCall));
    }
}

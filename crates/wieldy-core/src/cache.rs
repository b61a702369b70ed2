//! Recall: returns cached answers, and lets callers of the same call share one run (single flight).
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
use crate::call::{Caller, Content};
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
    /// Returns the key for the same caller, the same arguments, and the same definition of the tool.
    pub(crate) fn of_call(tool: &Registered, input: &Input, caller: &Caller) -> Self {
        let mut bytes = tool.hash.as_bytes().to_vec();
        canonical(input.value(), &mut bytes);
        let who = json!([caller.tenant, caller.agent, caller.user, caller.scopes, caller.permissions]);
        canonical(&who, &mut bytes);
        Self { tenant: caller.tenant_hashed(), hash: blake3::hash(&bytes) }
    }

    /// Returns the key for the same idempotency key, caller, tool and workspace.
    pub(crate) fn of_idempotency_key(tool: &Registered, key: &str, caller: &Caller, workspace: &Path) -> Self {
        let mut bytes = Vec::new();
        canonical(&json!([tool.name, key, caller.tenant, caller.agent, workspace.to_string_lossy()]), &mut bytes);
        Self { tenant: caller.tenant_hashed(), hash: blake3::hash(&bytes) }
    }
}

/// The stored answers and the runs that callers may join.
pub(crate) struct Recall {
    shelf: Mutex<Shelf>,
    answers_max: usize,
    bytes_max: u64,
    /// True if an answer that is too large is stored in brief, so that its call never runs again.
    keeps_all: bool,
}

#[derive(Default)]
struct Shelf {
    /// The answers by tenant. No share is empty.
    shares: HashMap<Option<blake3::Hash>, Share>,
    /// The runs that other callers may wait for.
    under_way: HashMap<CacheKey, UnderWay>,
    runs: u64,
}

/// The answers of one tenant.
struct Share {
    kept: LruCache<CacheKey, Kept>,
    bytes: u64,
}

struct Kept {
    outcome: Outcome,
    fingerprint: CacheKey,
    expires: Instant,
    touches: Touches,
    bytes: u64,
}

struct UnderWay {
    run: u64,
    touches: Touches,
    over: watch::Receiver<()>,
}

/// The result of a lookup.
pub(crate) enum Recalled<'a> {
    /// The stored answer.
    Hit(Box<Outcome>),
    /// The idempotency key belongs to a different call.
    OtherCall,
    /// No answer: the caller must run it, and others wait for that run. Boxed because few calls need it, to keep every
    /// call's future small.
    Lead(Box<Lead<'a>>),
}

/// The leader of a single flight: runs the call for all waiting callers. If it is dropped without an answer, the next
/// caller becomes the leader.
pub(crate) struct Lead<'a> {
    recall: &'a Recall,
    key: CacheKey,
    fingerprint: CacheKey,
    run: u64,
    /// Dropping the sender wakes the waiting callers.
    _over: watch::Sender<()>,
}

impl Recall {
    pub(crate) fn new(answers_max: usize, bytes_max: u64) -> Self {
        Self { shelf: Mutex::default(), answers_max, bytes_max, keeps_all: false }
    }

    /// Makes the store keep every answer, even if only in brief: for calls that must not run twice.
    pub(crate) fn keeping_all(self) -> Self {
        Self { keeps_all: true, ..self }
    }

    /// Returns the stored answer, or waits for that of a running call, or makes the caller the leader. `fingerprint`
    /// distinguishes different calls with the same key. `touches` holds the paths whose change invalidates the answer.
    pub(crate) async fn get(&self, key: CacheKey, fingerprint: CacheKey, touches: &Touches) -> Recalled<'_> {
        loop {
            let mut over = {
                let mut shelf = self.lock();
                if let Some(kept) = shelf.fresh(&key) {
                    if kept.fingerprint != fingerprint {
                        return Recalled::OtherCall;
                    }
                    return Recalled::Hit(Box::new(kept.outcome.clone()));
                }
                match shelf.under_way.get(&key) {
                    Some(under_way) => under_way.over.clone(),
                    None => return Recalled::Lead(Box::new(self.lead(&mut shelf, key, fingerprint, touches))),
                }
            };
            // An error means that the run is over: look again.
            let _ = over.changed().await;
        }
    }

    fn lead(&self, shelf: &mut Shelf, key: CacheKey, fingerprint: CacheKey, touches: &Touches) -> Lead<'_> {
        let (over_sender, over) = watch::channel(());
        shelf.runs += 1;
        let run = shelf.runs;
        shelf.under_way.insert(key, UnderWay { run, touches: touches.clone(), over });
        Lead { recall: self, key, fingerprint, run, _over: over_sender }
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
        let mut shelf = self.lock();
        let (key, fingerprint) = (CacheKey { tenant, hash: key }, CacheKey { tenant, hash: fingerprint });
        let lead = self.lead(&mut shelf, key, fingerprint, &Touches::nothing());
        drop(shelf);
        lead.keep(outcome, ttl);
    }

    /// Drops every answer that the written paths may have changed, including those still being computed.
    pub(crate) fn spoil(&self, written: &Touches) {
        let mut shelf = self.lock();
        shelf.under_way.retain(|_, under_way| !written.spoils(&under_way.touches));
        let kept = shelf.shares.values().flat_map(|share| share.kept.iter());
        let spoiled: Vec<CacheKey> =
            kept.filter(|(_, kept)| written.spoils(&kept.touches)).map(|(key, _)| *key).collect();
        for key in spoiled {
            shelf.forget(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().expect("no code panics while it holds the shelf")
    }
}

impl Shelf {
    fn fresh(&mut self, key: &CacheKey) -> Option<&Kept> {
        if self.shares.get(&key.tenant)?.kept.peek(key)?.expires <= Instant::now() {
            self.forget(key);
        }
        self.shares.get_mut(&key.tenant)?.kept.get(key)
    }

    fn add(&mut self, key: CacheKey, kept: Kept) {
        self.forget(&key);
        let share = self.shares.entry(key.tenant).or_insert_with(Share::new);
        share.bytes += kept.bytes;
        share.kept.push(key, kept);
    }

    fn forget(&mut self, key: &CacheKey) {
        let Some(share) = self.shares.get_mut(&key.tenant) else { return };
        if let Some(kept) = share.kept.pop(key) {
            share.bytes -= kept.bytes;
        }
        if share.kept.is_empty() {
            self.shares.remove(&key.tenant);
        }
    }

    /// Drops the oldest answers of the largest share, by `size`, until all shares together are at most `max`.
    fn shrink(&mut self, max: u64, size: impl Fn(&Share) -> u64) {
        while self.shares.values().map(&size).sum::<u64>() > max {
            let largest = self.shares.values().max_by_key(|share| size(share));
            let Some(oldest) = largest.and_then(|share| share.kept.peek_lru()).map(|(key, _)| *key) else { return };
            self.forget(&oldest);
        }
    }
}

impl Share {
    fn new() -> Self {
        Self { kept: LruCache::unbounded(), bytes: 0 }
    }
}

impl Lead<'_> {
    /// Returns the key by which other executors know the run.
    pub(crate) fn key(&self) -> String {
        self.key.hash.to_hex().to_string()
    }

    /// Returns true if an earlier answer under the same key was to the same call.
    pub(crate) fn is_same_call(&self, keyed: &Keyed) -> bool {
        keyed.fingerprint == self.fingerprint.hash.to_hex().as_str()
    }

    /// Stores the answer for later callers, unless a write has invalidated it meanwhile.
    pub(crate) fn keep(self, outcome: &Outcome, ttl: Duration) {
        let (mut outcome, mut bytes) = (Cow::Borrowed(outcome), bytes(outcome));
        if bytes > self.recall.bytes_max && self.recall.keeps_all {
            outcome = Cow::Owned(outcome.in_brief(bytes));
            bytes = self::bytes(&outcome);
        }
        let mut shelf = self.recall.lock();
        let Some(under_way) = shelf.under_way.get(&self.key).filter(|under_way| under_way.run == self.run) else {
            return;
        };
        if ttl.is_zero() || bytes > self.recall.bytes_max {
            return;
        }
        let touches = under_way.touches.clone();
        let kept = Kept {
            outcome: outcome.into_owned(),
            fingerprint: self.fingerprint,
            expires: Instant::now() + ttl.min(FOR_EVER),
            touches,
            bytes,
        };
        shelf.add(self.key, kept);
        shelf.shrink(self.recall.bytes_max, |share| share.bytes);
        shelf.shrink(self.recall.answers_max as u64, |share| share.kept.len() as u64);
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

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut shelf = self.recall.lock();
        if shelf.under_way.get(&self.key).is_some_and(|under_way| under_way.run == self.run) {
            shelf.under_way.remove(&self.key);
        }
    }
}

/// A guard for calls with an idempotency key, which must take effect only once. Dropped during a run because the caller
/// went away, it stores "outcome unknown" under the key, so that a retry with the key does not run the call again.
pub(crate) struct Promise<'a> {
    pub(crate) lead: Option<Box<Lead<'a>>>,
    pub(crate) flight: &'a Flight,
    pub(crate) tool: &'a Registered,
    pub(crate) ttl: Duration,
}

impl Promise<'_> {
    /// Notes the idempotency key on the flight, so that the history records it.
    pub(crate) fn note(&self) {
        if let Some(lead) = &self.lead {
            let expires_at = Timestamp::now().checked_add(self.ttl).unwrap_or(Timestamp::MAX);
            let (key, fingerprint) = (lead.key(), lead.fingerprint.hash.to_hex().to_string());
            let _ = self.flight.keyed.set(Arc::new(Keyed { key, fingerprint, expires_at }));
        }
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        let Some(lead) = self.lead.take() else { return };
        let runs = matches!(self.flight.state(), CallState::Running { .. });
        if runs && !self.tool.spec.annotations.repeatable() {
            lead.keep(&Outcome::default().failed(CallError::left_alone()), self.ttl);
        }
    }
}

/// A guard that invalidates cached answers for the paths a run writes: when it starts and, for answers read meanwhile,
/// when it ends or is dropped.
pub(crate) struct Spoiling<'a> {
    cache: &'a Recall,
    touches: &'a Touches,
}

impl<'a> Spoiling<'a> {
    pub(crate) fn new(cache: &'a Recall, touches: &'a Touches) -> Option<Self> {
        let spoiling = touches.writes_anything().then(|| Self { cache, touches })?;
        cache.spoil(touches);
        Some(spoiling)
    }
}

impl Drop for Spoiling<'_> {
    fn drop(&mut self) {
        self.cache.spoil(self.touches);
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

    fn recall() -> Recall {
        Recall::new(2, 10_000)
    }

    async fn led<'a>(recall: &'a Recall, name: &str) -> Option<Lead<'a>> {
        match recall.get(key(name), key(name), &reads(name)).await {
            Recalled::Lead(lead) => Some(*lead),
            _ => None,
        }
    }

    async fn keep(recall: &Recall, name: &str) {
        led(recall, name).await.expect("nobody has it").keep(&Outcome::text(name), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_kept_for_its_time_and_the_least_used_goes_first() {
        let recall = recall();
        keep(&recall, "a").await;
        keep(&recall, "b").await;
        assert!(led(&recall, "a").await.is_none(), "kept");
        keep(&recall, "c").await;
        assert!(led(&recall, "b").await.is_some(), "pushed out");
        tokio::time::advance(SECOND).await;
        assert!(led(&recall, "a").await.is_some(), "expired");
    }

    fn key_of(tenant: &str, name: &str) -> CacheKey {
        CacheKey { tenant: Some(blake3::hash(tenant.as_bytes())), ..key(name) }
    }

    /// Stores an answer for a tenant.
    async fn keep_for(recall: &Recall, tenant: &str, name: &str) {
        let key = key_of(tenant, name);
        let Recalled::Lead(lead) = recall.get(key, key, &Touches::nothing()).await else { panic!("nobody has it") };
        lead.keep(&Outcome::text(name), SECOND);
    }

    /// Returns, for each name, true if the tenant's answer is stored.
    fn kept_for(recall: &Recall, tenant: &str, names: [&str; 3]) -> [bool; 3] {
        names.map(|name| recall.lock().fresh(&key_of(tenant, name)).is_some())
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_with_many_answers_pushes_out_its_own_and_nobody_elses() {
        let by_count = Recall::new(3, 1_000_000);
        let by_bytes = Recall::new(1_000, 3 * 513);
        for recall in [by_count, by_bytes] {
            keep_for(&recall, "quiet", "a").await;
            for name in ["a", "b", "c", "d"] {
                keep_for(&recall, "loud", name).await;
            }
            assert_eq!(kept_for(&recall, "quiet", ["a", "b", "c"]), [true, false, false]);
            assert_eq!(kept_for(&recall, "loud", ["b", "c", "d"]), [false, true, true]);
            assert_eq!(recall.lock().shares.values().map(|share| share.bytes).sum::<u64>(), 3 * 513);
            tokio::time::advance(SECOND).await;
            assert_eq!(kept_for(&recall, "quiet", ["a", "b", "c"]), [false; 3]);
            assert_eq!(recall.lock().shares.len(), 1, "who has nothing left has no share");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn of_an_answer_too_large_to_be_kept_a_key_knows_that_it_was_given() {
        let large = Outcome { artifact: Some(crate::ArtifactId::next()), ..Outcome::text("x".repeat(9_500)) };
        let large = large.structured(json!({"paid": true}));
        let keep = async |recall: &Recall| led(recall, "a").await.expect("nobody has it").keep(&large, SECOND);
        let cache = recall();
        keep(&cache).await;
        assert!(led(&cache, "a").await.is_some(), "what is only cached is made again");
        let keys = recall().keeping_all();
        keep(&keys).await;
        let Recalled::Hit(again) = keys.get(key("a"), key("a"), &reads("a")).await else {
            panic!("it must not run again")
        };
        let told = "this call was run before, and its answer of 10025 bytes was too large to be kept; its artifact has the whole";
        assert_eq!(*again, Outcome { partial: true, artifact: large.artifact, ..Outcome::text(told) });
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_ask_the_same_wait_for_one_run_and_the_next_takes_over_a_failed_one() {
        let recall = recall();
        let first = led(&recall, "a").await.expect("the first");
        let second = led(&recall, "a");
        tokio::pin!(second);
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        let second = second.await.expect("it takes over");
        let third = led(&recall, "a");
        tokio::pin!(third);
        assert!(futures_util::poll!(&mut third).is_pending());
        second.keep(&Outcome::text("x"), SECOND);
        assert!(third.await.is_none(), "it got the answer of the second");
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_spoils_what_was_read_and_what_is_being_read() {
        let recall = recall();
        keep(&recall, "a/x").await;
        keep(&recall, "b").await;
        let reading = led(&recall, "c").await.expect("nobody has it");
        recall.spoil(&writes("a"));
        recall.spoil(&writes("c"));
        assert!(led(&recall, "a/x").await.is_some(), "spoiled");
        assert!(led(&recall, "b").await.is_none(), "untouched");
        let fresh = led(&recall, "c").await.expect("who comes after the write does not wait for a read before it");
        reading.keep(&Outcome::text("old"), SECOND);
        drop(fresh);
        assert!(led(&recall, "c").await.is_some(), "what was read before the write is not kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_used_for_something_else_is_noticed() {
        let recall = recall();
        keep(&recall, "a").await;
        assert!(matches!(recall.get(key("a"), key("other"), &reads("a")).await, Recalled::OtherCall));
    }
}

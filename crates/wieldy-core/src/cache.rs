//! Recall: an answer that was given before is given again, and callers who ask the same at once share one run.
//!
//! The result cache and the idempotency keys are the same mechanism with different keys.

use std::collections::HashMap;
use std::num::NonZeroUsize;
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
use crate::registry::Registered;
use crate::tool::Outcome;

/// What an answer is found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey(blake3::Hash);

impl CacheKey {
    /// The same tool, promising the same, with the same arguments, for the same caller.
    pub(crate) fn of_call(tool: &Registered, input: &Input, caller: &Caller) -> Self {
        let mut bytes = tool.hash.as_bytes().to_vec();
        canonical(input.value(), &mut bytes);
        let who = json!([caller.tenant, caller.agent, caller.user, caller.scopes, caller.permissions]);
        canonical(&who, &mut bytes);
        Self(blake3::hash(&bytes))
    }

    /// The same key, given by the same caller for the same tool.
    pub(crate) fn of_idempotency_key(tool: &Registered, key: &str, caller: &Caller) -> Self {
        let mut bytes = Vec::new();
        canonical(&json!([tool.name, key, caller.tenant, caller.agent]), &mut bytes);
        Self(blake3::hash(&bytes))
    }
}

/// Answers that may be given again.
pub(crate) struct Recall {
    shelf: Mutex<Shelf>,
    bytes_max: u64,
}

struct Shelf {
    kept: LruCache<CacheKey, Kept>,
    bytes: u64,
    /// Runs that others may wait for.
    under_way: HashMap<CacheKey, UnderWay>,
    runs: u64,
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

/// What there is to a key.
pub(crate) enum Recalled<'a> {
    /// The answer.
    Hit(Box<Outcome>),
    /// The key was used for something else.
    OtherArguments,
    /// Nothing: the asker runs it, and others wait for that.
    Lead(Lead<'a>),
}

/// The right to run something for all who wait for it. Dropped without an answer, the next one gets the right.
pub(crate) struct Lead<'a> {
    recall: &'a Recall,
    key: CacheKey,
    fingerprint: CacheKey,
    run: u64,
    /// Dropping it wakes those who wait.
    _over: watch::Sender<()>,
}

impl Recall {
    pub(crate) fn new(answers_max: NonZeroUsize, bytes_max: u64) -> Self {
        let shelf = Shelf { kept: LruCache::new(answers_max), bytes: 0, under_way: HashMap::new(), runs: 0 };
        Self { shelf: Mutex::new(shelf), bytes_max }
    }

    /// The kept answer, or that of a run under way, or the right to run it. `fingerprint` tells different calls with
    /// the same key apart; `touches` says what would spoil the answer.
    pub(crate) async fn get(&self, key: CacheKey, fingerprint: CacheKey, touches: &Touches) -> Recalled<'_> {
        loop {
            let mut over = {
                let mut shelf = self.lock();
                if let Some(kept) = shelf.fresh(&key) {
                    if kept.fingerprint != fingerprint {
                        return Recalled::OtherArguments;
                    }
                    return Recalled::Hit(Box::new(kept.outcome.clone()));
                }
                match shelf.under_way.get(&key) {
                    Some(under_way) => under_way.over.clone(),
                    None => return Recalled::Lead(self.lead(&mut shelf, key, fingerprint, touches)),
                }
            };
            // An error here says that the run is over: look again.
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

    /// Takes in an answer that an earlier executor gave.
    pub(crate) fn restore(&self, keyed: &Keyed, outcome: &Outcome) {
        let remaining =
            Timestamp::now().until(keyed.expires_at).ok().and_then(|span| span.total(jiff::Unit::Second).ok());
        let ttl = Duration::try_from_secs_f64(remaining.unwrap_or_default()).unwrap_or_default();
        let (Ok(key), Ok(fingerprint)) =
            (blake3::Hash::from_hex(&keyed.key), blake3::Hash::from_hex(&keyed.fingerprint))
        else {
            return;
        };
        let mut shelf = self.lock();
        let lead = self.lead(&mut shelf, CacheKey(key), CacheKey(fingerprint), &Touches::nothing());
        drop(shelf);
        lead.keep(outcome, ttl);
    }

    /// Forgets every answer that what is written may have changed, those too that are just being made.
    pub(crate) fn spoil(&self, written: &Touches) {
        let mut shelf = self.lock();
        shelf.under_way.retain(|_, under_way| !written.spoils(&under_way.touches));
        let spoiled: Vec<CacheKey> =
            shelf.kept.iter().filter(|(_, kept)| written.spoils(&kept.touches)).map(|(key, _)| *key).collect();
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
        if self.kept.peek(key)?.expires <= Instant::now() {
            self.forget(key);
        }
        self.kept.get(key)
    }

    fn forget(&mut self, key: &CacheKey) {
        if let Some(kept) = self.kept.pop(key) {
            self.bytes -= kept.bytes;
        }
    }
}

impl Lead<'_> {
    /// Keeps the answer for all who ask the same, unless something was written meanwhile that spoils it.
    pub(crate) fn keep(self, outcome: &Outcome, ttl: Duration) {
        let structured = outcome.structured.as_ref().map_or(0, |value| value.to_string().len() as u64);
        let bytes = outcome.content.iter().map(Content::bytes).sum::<u64>() + structured + 512;
        let mut shelf = self.recall.lock();
        let Some(under_way) = shelf.under_way.get(&self.key).filter(|under_way| under_way.run == self.run) else {
            return;
        };
        if ttl.is_zero() || bytes > self.recall.bytes_max {
            return;
        }
        let touches = under_way.touches.clone();
        let kept = Kept {
            outcome: outcome.clone(),
            fingerprint: self.fingerprint,
            expires: Instant::now() + ttl.min(FOR_EVER),
            touches,
            bytes,
        };
        if let Some((_, previous)) = shelf.kept.push(self.key, kept) {
            shelf.bytes -= previous.bytes;
        }
        shelf.bytes += bytes;
        while shelf.bytes > self.recall.bytes_max {
            let Some((_, oldest)) = shelf.kept.pop_lru() else { break };
            shelf.bytes -= oldest.bytes;
        }
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        let mut shelf = self.recall.lock();
        if shelf.under_way.get(&self.key).is_some_and(|under_way| under_way.run == self.run) {
            shelf.under_way.remove(&self.key);
        }
    }
}

/// That a call with an idempotency key has its effect once. Dropped in the middle of a run, because nobody waits any more, it
/// remembers that nobody knows what came of it: whoever comes back with the key must not do it again.
pub(crate) struct Promise<'a> {
    pub(crate) lead: Option<Lead<'a>>,
    pub(crate) flight: &'a Flight,
    pub(crate) tool: &'a Registered,
    pub(crate) ttl: Duration,
}

impl Promise<'_> {
    /// Notes on the flight which key it runs under, so that the history knows it too.
    pub(crate) fn note(&self) {
        if let Some(lead) = &self.lead {
            let expires_at = Timestamp::now().checked_add(self.ttl).unwrap_or(Timestamp::MAX);
            let (key, fingerprint) = (lead.key.0.to_hex().to_string(), lead.fingerprint.0.to_hex().to_string());
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

/// What a run writes spoils kept answers: before it, and when it is over or left alone, those read meanwhile.
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
        CacheKey(blake3::hash(text.as_bytes()))
    }

    fn reads(path: &str) -> Touches {
        Touches::of(&ToolSpec::new("r", "").read_only().reads("path"), &json!({ "path": path }))
    }

    fn writes(path: &str) -> Touches {
        Touches::of(&ToolSpec::new("w", "").writes("path"), &json!({ "path": path }))
    }

    fn recall() -> Recall {
        Recall::new(NonZeroUsize::new(2).expect("two"), 10_000)
    }

    async fn led<'a>(recall: &'a Recall, name: &str) -> Option<Lead<'a>> {
        match recall.get(key(name), key(name), &reads(name)).await {
            Recalled::Lead(lead) => Some(lead),
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
        assert!(matches!(recall.get(key("a"), key("other"), &reads("a")).await, Recalled::OtherArguments));
    }
}

//! READ THIS FIRST. The path of a call, from the first event to the last.
//!
//! [`Executor::call`] is the one function that every door leads into. It opens the call's entry in the journal;
//! `walk` takes it through [`Executor::steps`] and closes the entry, whatever happened in between. `steps` may leave
//! early at every `?`; `walk` sees every exit. Each step returns the proof that it was passed, and what depends
//! on it asks for the proof, so a step that is left out does not compile.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::Instant;

use crate::attempt::{self, Clock, Clocks, Ended, Ready};
use crate::breaker::verdict;
use crate::build::Inner;
use crate::cache::{CacheKey, Lead, Promise, Recall, Recalled, Spoiling};
use crate::call::{Call, Content, Status, Timing, ToolResult};
use crate::confirm::Consent;
use crate::error::{CallError, Code, duration_ms};
use crate::event::{Body, CallState, Closing};
use crate::flight::{BatchFlight, CancelCause, Flight};
use crate::footprint::Touches;
use crate::input::{Input, Violations, check_size};
use crate::journal::Receipt;
use crate::policy::{self, Grant};
use crate::redact::Redacted;
use crate::registry::Registered;
use crate::run::Run;
use crate::sandbox::{Confinement, Level};
use crate::tool::Outcome;

/// How long an answer waits for its record to be safe before it is given all the same.
const CLOSING_PATIENCE: Duration = Duration::from_secs(5);

/// Runs tools for agents. Cheap to clone; all clones are the same executor.
#[derive(Clone)]
pub struct Executor {
    pub(crate) inner: Arc<Inner>,
}

impl Executor {
    /// Runs one call. Whatever its fate, the caller gets a result and the journal an opening and a closing event.
    pub async fn call(&self, call: Call) -> ToolResult {
        let entry = self.open(call, None);
        self.walk(entry).await
    }

    pub(crate) async fn call_in_batch(&self, call: Call, batch: &Arc<BatchFlight>) -> ToolResult {
        let entry = self.open(call, Some(batch));
        self.walk(entry).await
    }

    /// Records a call that is not even begun.
    pub(crate) async fn refuse(&self, call: Call, why: CallError, batch: Option<&Arc<BatchFlight>>) -> ToolResult {
        self.open(call, batch).close(Err(why), Tally::default()).await
    }

    /// Takes the call between its opening, which has happened, and its closing, which always will.
    pub(crate) async fn walk(&self, mut entry: Box<Entry>) -> ToolResult {
        let mut tally = Tally::default();
        let ended = match entry.refused.take() {
            None => self.steps(&entry.call, &entry.flight, &mut tally).await,
            Some(refused) => Err(*refused),
        };
        entry.close(ended, tally).await
    }

    /// The pipeline.
    async fn steps(&self, call: &Call, flight: &Arc<Flight>, tally: &mut Tally) -> Result<Outcome, CallError> {
        let engine = &*self.inner;
        let tool = engine.registry.find(&call.tool, &call.caller)?; // 1. resolve: only what this caller may see
        tally.tool = Some(Arc::clone(&tool));
        let entry = engine.policy.enter(flight.id, &call.caller, &tool.spec)?; // 2. authorize: permissions, plan
        let terms = self.terms(call, flight, &tool)?;
        let input = Input::check(flight.id, &tool.input, &call.arguments)?; // 3. validate
        tally.arguments = Some(Arc::clone(input.shared()));
        let grant = self.judge(call, flight, &tool, entry, &input, &terms).await?; //    and judge exactly what will run
        let repeated = match self.repeated(call, flight, &tool, &input, &terms).await? {
            Known::Already(outcome) => return tally.recalled(*outcome),
            Known::NotYet(lead) => Promise { lead, flight, tool: &tool, ttl: engine.idempotency_ttl },
        };
        let consent = self.consent(call, flight, &tool, &grant, &input, &terms).await?; // 4. confirm
        let cached = match self.cached(call, flight, &tool, &input, &terms).await? {
            Known::Already(outcome) => return tally.recalled(*outcome), // 5. recall
            Known::NotYet(lead) => lead,
        };
        let outcome = self.attempts(call, flight, &tool, &grant, &input, &consent, &terms, tally).await; // 6. admit, run, time, retry
        remember(repeated, cached, &outcome, &tool);
        outcome
    }

    /// Runs the tool until it succeeds or must not be tried again. A slot lives for one attempt: a call that waits
    /// for its next one holds none, so that failing calls do not keep out those that might have worked.
    #[expect(clippy::too_many_arguments, reason = "the proofs are passed one by one, so that none can be left out")]
    async fn attempts(
        &self,
        call: &Call,
        flight: &Arc<Flight>,
        tool: &Registered,
        grant: &Grant,
        input: &Input,
        consent: &Consent,
        terms: &Terms,
        tally: &mut Tally,
    ) -> Result<Outcome, CallError> {
        let (engine, spec, clocks) = (&*self.inner, &tool.spec, &terms.clocks);
        let touches = Touches::of(spec, input.value());
        engine.rates.count(&call.caller, &tool.name)?;
        for attempt in 1.. {
            let passage = engine.breakers.enter(&tool.name)?;
            let slots = spec.constraints.concurrency_max;
            let slot =
                engine.admission.admit(consent, flight, &tool.name, slots, call.options.priority, clocks).await?;
            tally.queued += slot.waited();
            self.start(flight, attempt, terms, spec.annotations.read_only).await?;
            tally.attempts = attempt;
            let run = self.run(flight, attempt, terms, spec.constraints.output_bytes_max);
            let spoiling = Spoiling::new(&engine.cache, &touches);
            let began = engine.timings.is_some().then(Instant::now);
            let ready = Ready::new(grant, input, &slot);
            let ended = attempt::attempt(ready, &*tool.tool, spec.annotations, &run, flight, clocks).await;
            drop(spoiling);
            let ended = self.settle(ended, tool, &run);
            drop(slot);
            passage.tell(verdict(ended.outcome.failure.as_deref()));
            let Some(error) = &ended.outcome.failure else {
                self.learn(tool, began);
                if attempt > 1 {
                    flight.record(Body::RetrySuccess { attempts: attempt });
                }
                return Ok(ended.outcome);
            };
            let repeatable = spec.annotations.repeatable() || !ended.effect_possible;
            let delay = attempt::next_delay(&terms.retry, &call.options, error, repeatable, attempt, clocks.deadline);
            let Some(delay) = delay else { return Ok(give_up(flight, attempt, ended.outcome, repeatable)) };
            Box::pin(self.pause(flight, attempt + 1, terms, delay, error)).await?;
        }
        unreachable!("a number of attempts is finite")
    }

    /// Opens the call's entry. From here on it is in flight, can be observed and cancelled, and will be closed.
    pub(crate) fn open(&self, call: Call, batch: Option<&Arc<BatchFlight>>) -> Box<Entry> {
        let engine = &*self.inner;
        let flight = Arc::new(Flight::new(&call, &engine.recorder, batch));
        engine.flights.add(Arc::clone(&flight));
        // Arguments that are too large to be looked at are not written down either.
        let size = check_size(&call.arguments);
        let marked = engine.registry.sensitive(&call.tool);
        let arguments = match &size {
            Ok(()) => Redacted::new(Arc::clone(&call.arguments), marked),
            Err(_) => Value::Null.into(),
        };
        let opened = flight.record_at(Body::CallPending { arguments }, flight.opened_at);
        let refused = match (opened, size) {
            (Receipt::Refused(error), _) => Some(error.into()),
            (_, Err(too_large)) => Some(too_large.into()),
            _ if engine.stopping.load(Ordering::Acquire) => Some(CancelCause::Shutdown.error()),
            _ => None,
        };
        Box::new(Entry { executor: self.clone(), call, flight, refused: refused.map(Box::new), closed: false })
    }

    /// What the call runs under: the clocks, how it is retried, where its processes run.
    fn terms(&self, call: &Call, flight: &Flight, tool: &Registered) -> Result<Terms, CallError> {
        let (engine, options, spec) = (&*self.inner, &call.options, &tool.spec);
        let zero = [
            ("timeout", options.timeout),
            ("queue_timeout", options.queue_timeout),
            ("deadline", options.deadline),
            ("silence", options.silence),
        ];
        let zero = zero.into_iter().filter(|(_, clock)| *clock == Some(Duration::ZERO)).map(|(name, _)| name);
        if let Some(name) = zero.chain(options.limits.zeroes()).next() {
            return Err(Violations::one("", format!("the option `{name}` is 0, so nothing could ever run")).into());
        }
        let level = options.isolation.unwrap_or(engine.isolation);
        if !level.is_at_least(engine.isolation) {
            return Err(CallError::new(
                Code::PermissionDenied,
                format!("the isolation level `{level}` is weaker than this executor's `{}`", engine.isolation),
            )
            .suggest("leave the isolation level to the executor"));
        }
        let learnt = engine.timings.as_ref().and_then(|timings| timings.timeout(&tool.name));
        let mut retry = spec.retry.unwrap_or(engine.retry);
        retry.retries = options.retries.unwrap_or(retry.retries);
        Ok(Terms {
            clocks: Clocks::new(options, spec, &engine.clocks, learnt, flight.opened),
            retry,
            level,
            confinement: self.confinement(call, tool),
        })
    }

    /// What the call's processes may do; the executor's own where neither call nor tool says anything.
    fn confinement(&self, call: &Call, tool: &Registered) -> Arc<Confinement> {
        let (own, options) = (&self.inner.confinement, &call.options);
        let limits = options.limits.or(tool.spec.limits).or(own.limits).within(self.inner.limits_max);
        if options.network.is_none() && limits == own.limits {
            return Arc::clone(own);
        }
        let network = options.network.clone().unwrap_or_default();
        Arc::new(Confinement { network, limits, ..Confinement::clone(own) })
    }

    async fn judge(
        &self,
        call: &Call,
        flight: &Flight,
        tool: &Registered,
        entry: policy::Entry,
        input: &Input,
        terms: &Terms,
    ) -> Result<Grant, CallError> {
        let policy = &self.inner.policy;
        let judged = policy.judge(entry, &call.caller, &tool.spec, input);
        // Without checks nobody has to be waited for.
        if policy.has_checks() {
            return Ok(unless_stopped(flight, &terms.clocks, Box::pin(judged)).await??);
        }
        Ok(judged.await?)
    }

    /// The result of an earlier call with the same idempotency key.
    async fn repeated(
        &self,
        call: &Call,
        flight: &Flight,
        tool: &Registered,
        input: &Input,
        terms: &Terms,
    ) -> Result<Known<'_>, CallError> {
        let Some(key) = &call.options.idempotency_key else { return Ok(Known::NotYet(None)) };
        let key = CacheKey::of_idempotency_key(tool, key, &call.caller);
        let fingerprint = CacheKey::of_call(tool, input, &call.caller);
        self.known(&self.inner.keys, flight, terms, key, fingerprint, &Touches::nothing()).await
    }

    /// The kept result of the same call, where the tool lets results be kept.
    async fn cached(
        &self,
        call: &Call,
        flight: &Flight,
        tool: &Registered,
        input: &Input,
        terms: &Terms,
    ) -> Result<Known<'_>, CallError> {
        let spec = &tool.spec;
        if spec.cache.is_none() || !spec.annotations.read_only || call.options.fresh {
            return Ok(Known::NotYet(None));
        }
        let key = CacheKey::of_call(tool, input, &call.caller);
        self.known(&self.inner.cache, flight, terms, key, key, &Touches::of(spec, input.value())).await
    }

    async fn known<'a>(
        &self,
        recall: &'a Recall,
        flight: &Flight,
        terms: &Terms,
        key: CacheKey,
        fingerprint: CacheKey,
        touches: &Touches,
    ) -> Result<Known<'a>, CallError> {
        let answer = Box::pin(recall.get(key, fingerprint, touches));
        match unless_stopped(flight, &terms.clocks, answer).await? {
            Recalled::Hit(outcome) => Ok(Known::Already(outcome)),
            Recalled::Lead(lead) => Ok(Known::NotYet(Some(lead))),
            Recalled::OtherArguments => {
                let told = "the idempotency key was used before for a call with other arguments";
                Err(Violations::one("", told.into()).into())
            }
        }
    }

    async fn consent(
        &self,
        call: &Call,
        flight: &Flight,
        tool: &Registered,
        grant: &Grant,
        input: &Input,
        terms: &Terms,
    ) -> Result<Consent, CallError> {
        let (engine, options) = (&*self.inner, &call.options);
        if let Some(consent) = Consent::not_needed(grant, &tool.spec, options) {
            return Ok(consent);
        }
        let confirmer = options.confirmer.as_ref().or(engine.confirmer.as_ref());
        // Few calls are asked about: their future need not be part of everybody's.
        let expires_in = engine.confirmation_timeout;
        let asked = Box::pin(Consent::ask(flight, grant, &tool.spec, input, options, confirmer, expires_in));
        unless_stopped(flight, &terms.clocks, asked).await?
    }

    /// Records that an attempt starts. What may change something is safe in the history before it runs.
    async fn start(&self, flight: &Flight, attempt: u32, terms: &Terms, read_only: bool) -> Result<(), CallError> {
        // Somebody may have cancelled while the call was handed its slot.
        if let Some(cause) = flight.cancelled() {
            return Err(cause.error());
        }
        let started = flight.record(Body::CallStarted {
            attempt,
            attempts_max: terms.retry.retries.saturating_add(1),
            timeout_ms: u64::try_from(terms.clocks.attempt.as_millis()).unwrap_or(u64::MAX),
            read_only,
        });
        match started {
            Receipt::Refused(error) => Err(error.into()),
            _ if read_only => Ok(()),
            Receipt::Kept => Ok(()),
            receipt => Ok(unless_stopped(flight, &terms.clocks, Box::pin(receipt.kept())).await??),
        }
    }

    fn run(&self, flight: &Arc<Flight>, attempt: u32, terms: &Terms, output_bytes_max: Option<u64>) -> Run {
        let engine = &*self.inner;
        let inline_max = output_bytes_max.unwrap_or(engine.output_bytes_max);
        let sandbox = engine.sandboxes.get(&terms.level).cloned();
        Run::new(
            Arc::clone(flight),
            attempt,
            Arc::clone(&terms.confinement),
            terms.level,
            sandbox,
            inline_max,
            Arc::clone(&engine.artifacts),
        )
    }

    /// Makes an outcome fit to be returned: as its schema promises, and not larger than a result may be.
    fn settle(&self, mut ended: Ended, tool: &Registered, run: &Run) -> Ended {
        let outcome = &mut ended.outcome;
        if let (Some(schema), None) = (&tool.output, &outcome.failure) {
            let structured = outcome.structured.as_ref().unwrap_or(&Value::Null);
            if let Some(error) = schema.validator().iter_errors(structured).next() {
                let told = format!(
                    "the tool's answer does not fit its output schema at `{}`: {}",
                    error.instance_path(),
                    error.masked()
                );
                outcome.failure = Some(Box::new(CallError::new(Code::OutputSchemaMismatch, told)));
            }
        }
        // An artifact store is foreign code: it may fail the call, not the caller.
        if std::panic::catch_unwind(AssertUnwindSafe(|| run.fit(outcome))).is_err() {
            let told = "the answer is too large for a result, and the artifact store panicked";
            *outcome = Outcome::default().failed(CallError::new(Code::ExecutionError, told));
        }
        ended
    }

    fn learn(&self, tool: &Registered, began: Option<Instant>) {
        if let (Some(timings), Some(began)) = (&self.inner.timings, began) {
            timings.learn(&tool.name, began.elapsed());
        }
    }

    /// Waits for the next attempt.
    async fn pause(
        &self,
        flight: &Flight,
        attempt: u32,
        terms: &Terms,
        delay: Duration,
        error: &CallError,
    ) -> Result<(), CallError> {
        let attempts_max = terms.retry.retries.saturating_add(1);
        let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        // An attempt that was not announced could not be recorded either.
        flight
            .record(Body::RetryAttempt { attempt, attempts_max, delay_ms, error: Box::new(error.clone()) })
            .taken()?;
        unless_stopped(flight, &terms.clocks, tokio::time::sleep(delay)).await
    }
}

/// A call in flight costs its future: a step that makes it much larger should be noticed here, not in production.
const _: () = assert!(future_bytes(&Executor::call) <= 2 * 1024);

const fn future_bytes<'a, F: Future>(_: &impl Fn(&'a Executor, Call) -> F) -> usize {
    size_of::<F>()
}

/// What a call runs under.
struct Terms {
    clocks: Clocks,
    retry: attempt::RetryPolicy,
    level: Level,
    confinement: Arc<Confinement>,
}

/// What is known of a call before it runs.
enum Known<'a> {
    Already(Box<Outcome>),
    NotYet(Option<Lead<'a>>),
}

/// What is counted on the way.
#[derive(Default)]
pub(crate) struct Tally {
    tool: Option<Arc<Registered>>,
    arguments: Option<Arc<Value>>,
    attempts: u32,
    queued: Duration,
    cached: bool,
}

impl Tally {
    fn recalled(&mut self, outcome: Outcome) -> Result<Outcome, CallError> {
        self.cached = true;
        Ok(outcome)
    }
}

/// Waits for `work`, unless the call is cancelled or its deadline passes.
async fn unless_stopped<T>(flight: &Flight, clocks: &Clocks, work: impl Future<Output = T>) -> Result<T, CallError> {
    let deadline = async {
        match clocks.deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    if let Some(cause) = flight.cancelled() {
        return Err(cause.error());
    }
    tokio::select! {
        biased;
        done = work => Ok(done),
        error = flight.stopped() => Err(error),
        () = deadline => Err(Clock::Total.error(flight.opened.elapsed(), false)),
    }
}

/// Ends a call whose last attempt failed. That an error is safe to repeat is said only where it is.
fn give_up(flight: &Flight, attempts: u32, mut outcome: Outcome, repeatable: bool) -> Outcome {
    if let Some(error) = &mut outcome.failure {
        error.retryable &= repeatable;
        if attempts > 1 {
            flight.record(Body::RetryExhausted { attempts, error: error.clone() });
        }
    }
    outcome
}

/// Keeps the outcome for those who ask the same: a good one in the cache, one that ran under its idempotency key.
fn remember(
    mut repeated: Promise<'_>,
    cached: Option<Lead<'_>>,
    outcome: &Result<Outcome, CallError>,
    tool: &Registered,
) {
    let lead = repeated.lead.take();
    let Ok(outcome) = outcome else { return };
    if let (Some(lead), Some(policy), None) = (cached, tool.spec.cache, &outcome.failure) {
        lead.keep(outcome, policy.ttl);
    }
    // A failure that is safe to repeat is not worth keeping: the next call with the key may do better.
    if let Some(lead) = lead.filter(|_| outcome.failure.as_ref().is_none_or(|error| !error.retryable)) {
        lead.keep(outcome, repeated.ttl);
    }
}

/// A call's entry in the journal, open. Dropped without being closed, it closes as cancelled: nobody waits any more.
pub(crate) struct Entry {
    executor: Executor,
    call: Call,
    pub(crate) flight: Arc<Flight>,
    refused: Option<Box<CallError>>,
    closed: bool,
}

impl Entry {
    /// Writes the closing event and makes the result. What happened is told even if it cannot be written.
    async fn close(mut self: Box<Self>, ended: Result<Outcome, CallError>, tally: Tally) -> ToolResult {
        let outcome = ended.unwrap_or_else(|error| Outcome::default().failed(error));
        let (flight, error) = (Arc::clone(&self.flight), outcome.failure.map(|error| *error));
        let result = ToolResult {
            execution_id: flight.id,
            call_id: self.call.call_id.take(),
            tool: tally.tool.as_ref().map_or_else(|| Arc::clone(&self.call.tool), |tool| tool.name.shared()),
            provider: tally.tool.as_ref().map(|tool| Arc::clone(&tool.provider)).unwrap_or_default(),
            status: error.as_ref().map_or(Status::Success, CallError::status),
            content: outcome.content,
            structured: outcome.structured,
            error,
            attempts: tally.attempts,
            cached: tally.cached,
            partial: outcome.partial,
            artifact: outcome.artifact,
            timing: Timing {
                queued_ms: duration_ms(tally.queued),
                duration_ms: flight.elapsed_ms(),
                started_at: flight.opened_at,
                completed_at: Timestamp::now(),
            },
            usage: outcome.usage,
            sandbox: outcome.sandbox,
            labels: std::mem::take(&mut self.call.options.labels),
            arguments: tally.arguments.unwrap_or_else(|| Arc::clone(&self.call.arguments)),
        };
        if flight.state() == CallState::Unknown {
            flight.abandon(result.status);
        }
        let closing = Body::closed(Closing {
            status: result.status,
            duration_ms: result.timing.duration_ms,
            queued_ms: result.timing.queued_ms,
            attempts: result.attempts,
            cached: result.cached,
            output_bytes: result.content.iter().map(Content::bytes).sum(),
            artifact: result.artifact,
            usage: result.usage,
            error: result.error.clone().map(Box::new),
        });
        let closed = flight.record_at(closing, result.timing.completed_at);
        self.over();
        // The answer is true even where its record cannot be kept; recovery closes the entry later.
        if matches!(closed, Receipt::Pending(_)) {
            let _ = tokio::time::timeout(CLOSING_PATIENCE, closed.kept()).await;
        }
        result
    }

    fn over(&mut self) {
        self.closed = true;
        self.executor.inner.flights.over(self.flight.id);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        let error = CancelCause::CallerGone.error();
        self.flight.cancel(CancelCause::CallerGone);
        let attempts = match self.flight.state() {
            CallState::Running { attempt } => attempt,
            CallState::Waiting { next_attempt } => next_attempt - 1,
            _ => 0,
        };
        self.flight.record(Body::closed(Closing {
            status: error.status(),
            duration_ms: self.flight.elapsed_ms(),
            queued_ms: 0.0,
            attempts,
            cached: false,
            output_bytes: 0,
            artifact: None,
            usage: None,
            error: Some(Box::new(error)),
        }));
        self.over();
    }
}

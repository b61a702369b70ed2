//! READ THIS FIRST. The pipeline: takes a call from its first event to its last.
//!
//! A program starts a call with [`Executor::call`], [`Executor::spawn`] (in the background), [`Executor::begin`] (may
//! become a task) or as part of a batch. All of these share two functions: `open` opens the call's entry in the
//! journal, and `walk` takes the call through [`Executor::steps`] and closes the entry. `steps` may return early at
//! every `?`; `walk` sees every exit. Each step returns a proof that it was passed, and later code takes that proof as
//! an argument. So code that leaves out a step does not compile.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::admit::WantedSlot;
use crate::attempt::{self, Ready};
use crate::breaker::verdict;
use crate::build::Inner;
use crate::cache::{AnswerCache, CacheKey, IdempotencyGuard, InvalidationGuard, Leader, Lookup, time_left};
use crate::call::{Call, ToolResult};
use crate::clock::Clock;
use crate::confirm::Consent;
use crate::entry::{CLOSING_PATIENCE, Entry, Tally};
use crate::error::{CallError, Code};
use crate::event::Body;
use crate::flight::{BatchFlight, Flight};
use crate::footprint::Touches;
use crate::input::{Input, too_costly};
use crate::journal::{Claim, Claimed, Receipt};
use crate::outcome::Outcome;
use crate::policy::{Authorized, Grant};
use crate::registry::{NotFound, Registered};
use crate::resume::outcome_of;
use crate::run::{Destination, Run};
use crate::schema::{Allowance, Measured, Spent};
use crate::terms::Terms;
use crate::tool::Annotations;

/// Runs tools for agents. Cheap to clone; all clones are the same executor.
#[derive(Clone)]
pub struct Executor {
    pub(crate) inner: Arc<Inner>,
}

impl Executor {
    /// Runs one call. However it ends, the caller gets a result, and the journal an opening and a closing event.
    pub async fn call(&self, call: Call) -> ToolResult {
        let entry = self.open(call, None, false);
        let result = self.walk(entry).await;
        self.confirm_notes(&result.notes);
        result
    }

    /// Records a call that is refused before it begins. Returns its result, and the record to wait for before
    /// answering.
    pub(crate) fn refuse(
        &self,
        call: Call,
        why: CallError,
        batch: Option<&Arc<BatchFlight>>,
    ) -> (ToolResult, Option<Receipt>) {
        self.close(self.open(call, batch, false), Err(why), Tally::default())
    }

    /// Takes an open call through the pipeline and closes its entry, however the pipeline ends.
    pub(crate) async fn walk(&self, mut entry: Box<Entry>) -> ToolResult {
        let mut tally = Tally::default();
        let ended = match entry.refused.take() {
            None => self.steps(&entry, &mut tally).await,
            Some(refused) => Err(*refused),
        };
        let (result, record) = self.close(entry, ended, tally);
        if record.is_some() {
            Box::pin(self.wait_until_stored(record)).await;
        }
        result
    }

    pub(crate) fn close(
        &self,
        entry: Box<Entry>,
        ended: Result<Box<Outcome>, CallError>,
        tally: Tally,
    ) -> (ToolResult, Option<Receipt>) {
        let read_only = entry.is_read_only();
        let (result, closing) = entry.close(ended, tally);
        let waits = self.inner.durability.waits_to_answer(&closing, read_only);
        (result, waits.then_some(closing))
    }

    /// Waits until the record, and so every earlier one, is safe. The answer is true even if its record cannot be
    /// written: so after a time limit it is returned anyway, and recovery closes the entry later.
    pub(crate) async fn wait_until_stored(&self, record: Option<Receipt>) {
        if let Some(record) = record {
            let _ = tokio::time::timeout(CLOSING_PATIENCE, self.inner.recorder.wait_until_stored(record)).await;
        }
    }

    /// Takes the call through the steps in order, and leaves at the first that ends it.
    async fn steps(&self, entry: &Entry, tally: &mut Tally) -> Result<Box<Outcome>, CallError> {
        let (engine, Entry { call, flight, tool, size, .. }) = (&self.inner, entry);
        let tool = tool.as_ref().map_err(NotFound::clone)?; // 1. resolve: only tools that this caller may see
        let authorized = engine.policy.authorize(flight.id, &call.caller, &tool.spec)?; // 2. authorize: permissions, plan
        let terms = self.terms(call, flight, tool)?;
        let walk = Walk { engine, call, flight, tool, terms: &terms };
        let input = walk.validate(*size).await?; // 3. validate
        tally.arguments = Some(Arc::clone(input.shared()));
        let grant = walk.judge(authorized, &input).await?; //   and judge the exact input that will run
        let repeated = match walk.recall_by_key(&input).await? {
            Recalled::Answer(outcome) => return tally.recalled(outcome),
            Recalled::Missing(leader) => IdempotencyGuard { leader, flight, tool, ttl: engine.idempotency_ttl },
        };
        repeated.note();
        let consent = walk.consent(&grant, &input).await?; // 4. confirm
        let cached = match walk.recall_cached(&input).await? {
            Recalled::Answer(outcome) => return tally.recalled(outcome), // 5. recall a cached answer
            Recalled::Missing(leader) => leader,
        };
        let outcome = walk.attempts(&grant, &input, &consent, tally).await; // 6. admit, run, time, retry
        remember(repeated, cached, &outcome, tool);
        outcome
    }
}

/// The facts of one call that its steps read. The proofs are not among them: they are passed one by one, so that none
/// can be left out.
struct Walk<'a> {
    engine: &'a Arc<Inner>,
    call: &'a Call,
    flight: &'a Arc<Flight>,
    tool: &'a Arc<Registered>,
    terms: &'a Terms,
}

impl<'a> Walk<'a> {
    /// Runs the tool until it succeeds or must not be retried. A slot is held for one attempt only: a call that waits
    /// for its next attempt holds none, so failing calls do not block others that might succeed.
    async fn attempts(
        &self,
        grant: &Grant,
        input: &Input,
        consent: &Consent,
        tally: &mut Tally,
    ) -> Result<Box<Outcome>, CallError> {
        let Walk { engine, call, flight, tool, terms } = *self;
        let (spec, clocks) = (&tool.spec, &terms.clocks);
        let touches = if spec.annotations.read_only {
            Touches::nothing()
        } else {
            Touches::by(tool, input.value(), &engine.confinement)
        };
        engine.rates.count(&call.caller, &tool.name)?;
        for attempt in flight.next_attempt().. {
            let passage = engine.breakers.enter(&tool.name)?;
            let slot = engine.admission.admit(consent, flight, self.wanted_slot(), clocks).await?;
            tally.queued += slot.waited();
            self.start(attempt).await?;
            tally.attempts = attempt;
            let run = self.run(attempt);
            let invalidation = InvalidationGuard::new(&engine.cache, &touches);
            let began = engine.timings.is_some().then(Instant::now);
            let ready = Ready::new(grant, input, &slot);
            let in_batch = flight.run_in_batch();
            let mut ended = attempt::attempt(ready, &*tool.tool, spec.annotations, &run, flight, clocks).await;
            drop((in_batch, invalidation));
            self.settle(&mut ended.outcome, &run).await;
            drop(slot);
            passage.report(verdict(ended.outcome.failure.as_deref()));
            let Some(error) = &ended.outcome.failure else {
                self.learn_duration(began);
                if attempt > 1 {
                    flight.record(Body::RetrySuccess { attempts: attempt });
                }
                return Ok(ended.outcome);
            };
            let repeatable = spec.annotations.repeatable() || !ended.effect_possible;
            let delay =
                attempt::delay_if_repeatable(&terms.retry, &call.options, error, repeatable, attempt, clocks.deadline);
            let Some(delay) = delay else { return Ok(give_up(flight, attempt, ended.outcome, repeatable)) };
            Box::pin(self.pause(attempt + 1, delay, error.clone())).await?;
        }
        unreachable!("a number of attempts is finite")
    }

    fn wanted_slot(&self) -> WantedSlot<'a> {
        WantedSlot {
            tool: &self.tool.name,
            tool_max: self.tool.spec.constraints.concurrency_max,
            agent_max: self.engine.agent_slots(&self.call.caller),
            priority: self.call.options.priority,
        }
    }

    /// Validates the arguments. An expensive check runs on another thread; meanwhile the call can be cancelled, and its
    /// deadline holds.
    async fn validate(&self, size: Measured) -> Result<Input, CallError> {
        let (id, arguments) = (self.flight.id, &self.call.arguments);
        let checked = match Input::check(id, &self.tool.input, arguments, size, Allowance::IN_PLACE) {
            Err(Spent) => {
                let (tool, arguments) = (Arc::clone(self.tool), Arc::clone(arguments));
                let check = move || Input::check(id, &tool.input, &arguments, size, Allowance::ON_WORKER);
                self.unless_stopped(Box::pin(self.on_worker(check))).await?
            }
            in_place => in_place,
        };
        Ok(checked.map_err(|Spent| too_costly())??)
    }

    /// Runs long work on another thread. A semaphore bounds how much of it runs at once.
    async fn on_worker<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let permit =
            Arc::clone(&self.engine.worker_permits).acquire_owned().await.expect("the semaphore is never closed");
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit; // held until the work ends, even if the caller goes away
            work()
        });
        done.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    /// Asks the policy's checks. Meanwhile the call can be cancelled, and its deadline holds.
    async fn judge(&self, authorized: Authorized, input: &Input) -> Result<Grant, CallError> {
        let policy = &self.engine.policy;
        if let Some(grant) = policy.unasked(&authorized, input) {
            return Ok(grant); // there are no checks
        }
        let judged = Box::pin(policy.judge(authorized, &self.call.caller, &self.tool.spec, input));
        Ok(self.unless_stopped(judged).await??)
    }

    /// Returns the result of an earlier call with the same idempotency key, or the right to run this one.
    async fn recall_by_key(&self, input: &Input) -> Result<Recalled<'a>, CallError> {
        let Walk { engine, call, tool, .. } = *self;
        let Some(key) = &call.options.idempotency_key else { return Ok(Recalled::Missing(None)) };
        let key = CacheKey::of_idempotency_key(tool, key, &call.caller, &engine.confinement.workspace);
        let fingerprint = CacheKey::of_call(tool, input, call);
        match self.recall(&engine.keys, key, fingerprint, &Touches::nothing()).await? {
            Recalled::Missing(Some(leader)) => Box::pin(self.claim_key(leader)).await,
            recalled => Ok(recalled),
        }
    }

    /// Claims the idempotency key among all executors of the same history. Waits while another executor runs a call
    /// with it.
    async fn claim_key(&self, leader: Box<Leader<'a>>) -> Result<Recalled<'a>, CallError> {
        let claim = Claim { key: leader.key(), execution: self.flight.id };
        let claiming = async {
            let mut pause = CLAIM_PAUSE_MIN;
            loop {
                match self.engine.recorder.claim(claim.clone()).await? {
                    Claimed::Taken => tokio::time::sleep(pause).await,
                    claimed => return Ok::<_, CallError>(claimed),
                }
                pause = (pause * 2).min(CLAIM_PAUSE_MAX);
            }
        };
        let patience = self.patience();
        match self.unless_stopped(tokio::time::timeout(patience, claiming)).await? {
            Err(_) => Err(Clock::Shared.error(patience, patience, true)),
            Ok(Err(error)) => Err(error),
            Ok(Ok(Claimed::Answered(answer))) => {
                let Some(keyed) = answer.keyed.as_ref().filter(|keyed| leader.is_same_call(keyed)) else {
                    return Err(other_call());
                };
                let outcome = Box::new(outcome_of(&answer.result));
                leader.store(&outcome, time_left(keyed));
                Ok(Recalled::Answer(outcome))
            }
            Ok(Ok(_)) => Ok(Recalled::Missing(Some(leader))),
        }
    }

    /// Returns the cached result of the same call, if the tool allows caching, or the right to run this one.
    async fn recall_cached(&self, input: &Input) -> Result<Recalled<'a>, CallError> {
        let Walk { engine, call, tool, .. } = *self;
        let spec = &tool.spec;
        if spec.cache.is_none() || !spec.annotations.read_only || call.options.fresh {
            return Ok(Recalled::Missing(None));
        }
        let key = CacheKey::of_call(tool, input, call).with_notes(call);
        let touches = Touches::by(tool, input.value(), &engine.confinement);
        self.recall(&engine.cache, key, key, &touches).await
    }

    async fn recall(
        &self,
        cache: &'a AnswerCache,
        key: CacheKey,
        fingerprint: CacheKey,
        touches: &Touches,
    ) -> Result<Recalled<'a>, CallError> {
        let patience = self.patience();
        let lookup = Box::pin(tokio::time::timeout(patience, cache.get(key, fingerprint, touches)));
        match self.unless_stopped(lookup).await? {
            Ok(Lookup::Hit(outcome)) => Ok(Recalled::Answer(outcome)),
            Ok(Lookup::Leader(leader)) => Ok(Recalled::Missing(Some(leader))),
            Ok(Lookup::OtherCall) => Err(other_call()),
            Err(_) => Err(Clock::Shared.error(patience, patience, true)),
        }
    }

    async fn consent(&self, grant: &Grant, input: &Input) -> Result<Consent, CallError> {
        let Walk { engine, call, flight, tool, terms } = *self;
        let options = &call.options;
        if let Some(consent) = Consent::not_needed(grant, &tool.spec, options) {
            return Ok(consent);
        }
        // A consent given to an earlier executor does not cover another run.
        if flight.next_attempt() > 1 {
            return Err(CallError::interrupted(false));
        }
        // Few calls need a confirmation, so its future is boxed to keep every call's future small.
        let asked = Box::pin(Consent::ask(engine, flight, grant, tool, input, options, terms));
        self.unless_stopped(asked).await?
    }

    /// Records that an attempt starts. A tool that may change something runs only once that record is safe.
    async fn start(&self, attempt: u32) -> Result<(), CallError> {
        let Walk { engine, flight, terms, .. } = *self;
        let Annotations { read_only, idempotent, .. } = self.tool.spec.annotations;
        // The call may have been cancelled while it waited for its slot.
        if let Some(cause) = flight.cancelled() {
            return Err(cause.error());
        }
        let started = flight.record(Body::CallStarted {
            attempt,
            attempts_max: terms.retry.retries.saturating_add(1),
            timeout_ms: u64::try_from(terms.clocks.attempt.as_millis()).unwrap_or(u64::MAX),
            read_only,
            idempotent: idempotent && !read_only,
            keyed: flight.keyed.get().cloned(),
        });
        match started {
            Receipt::Refused(error) => Err(error.into()),
            taken if engine.durability.waits_to_run(&taken, read_only) => {
                Ok(self.unless_stopped(Box::pin(engine.recorder.wait_until_stored(taken))).await??)
            }
            _ => Ok(()),
        }
    }

    fn run(&self, attempt: u32) -> Run {
        let Walk { engine, flight, tool, terms, .. } = *self;
        let destination = Destination {
            inline_max: tool.spec.constraints.output_bytes_max.unwrap_or(engine.output_bytes_max),
            artifacts: Arc::clone(&engine.artifacts),
            live: engine.output.clone(),
        };
        let sandbox = engine.sandboxes.get(&terms.level).cloned();
        let confinement = terms.confinement.as_ref().unwrap_or(&engine.confinement);
        Run::new(Arc::clone(flight), attempt, Arc::clone(confinement), terms.level, sandbox, destination, engine)
    }

    /// Makes an outcome fit to return: checks it against the output schema, and moves a too large answer to an
    /// artifact.
    async fn settle(&self, outcome: &mut Outcome, run: &Run) {
        if let (Some(schema), None) = (&self.tool.output, &outcome.failure) {
            let structured = outcome.structured.as_ref().unwrap_or(&Value::Null);
            let misfit = match schema.misfit(structured, Allowance::IN_PLACE) {
                Err(Spent) => Box::pin(self.misfit_on_worker(outcome)).await,
                in_place => in_place,
            };
            let misfit = misfit.unwrap_or_else(|Spent| Some("or is too complex to check".into()));
            outcome.failure = misfit.map(|misfit| {
                let message = format!("the tool's answer does not fit its output schema {misfit}");
                let advice =
                    "report it as a bug of the tool or its output schema; it has run, so do not simply repeat it";
                Box::new(CallError::new(Code::OutputSchemaMismatch, message).suggest(advice))
            });
        }
        // An artifact store is foreign code: its panic fails the call, not the caller.
        if std::panic::catch_unwind(AssertUnwindSafe(|| run.fit(outcome))).is_err() {
            let message = "the answer is too large for a result, and the artifact store panicked";
            let advice = "ask for less at once; the operator has to find out why the artifact store fails";
            *outcome = Outcome::default().failed(CallError::new(Code::ExecutionError, message).suggest(advice));
        }
        if let Some(error) = &mut outcome.failure {
            run.explain(error);
        }
    }

    /// Checks a large answer against the tool's output schema on another thread.
    async fn misfit_on_worker(&self, outcome: &mut Outcome) -> Result<Option<String>, Spent> {
        let (tool, structured) = (Arc::clone(self.tool), outcome.structured.take());
        let compared = self.on_worker(move || {
            let schema = tool.output.as_ref();
            let answer = structured.as_ref().unwrap_or(&Value::Null);
            let misfit = schema.map_or(Ok(None), |schema| schema.misfit(answer, Allowance::ON_WORKER));
            (structured, misfit)
        });
        let (structured, misfit) = compared.await;
        outcome.structured = structured;
        misfit
    }

    fn learn_duration(&self, began: Option<Instant>) {
        if let (Some(timings), Some(began)) = (&self.engine.timings, began) {
            timings.learn(&self.tool.name, began.elapsed());
        }
    }

    /// Waits before the next attempt.
    async fn pause(&self, attempt: u32, delay: Duration, error: Box<CallError>) -> Result<(), CallError> {
        let attempts_max = self.terms.retry.retries.saturating_add(1);
        let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        // Without this event the next attempt could not be recorded, so a refusal ends the call.
        self.flight.record(Body::RetryAttempt { attempt, attempts_max, delay_ms, error }).taken()?;
        self.unless_stopped(tokio::time::sleep(delay)).await
    }

    /// Returns the longest wait for the run of another call: the time this call would have for a slot and a run of its
    /// own.
    fn patience(&self) -> Duration {
        self.terms.clocks.queue + self.terms.clocks.attempt
    }

    /// Waits for `work`, unless the call is cancelled or its deadline passes first.
    async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, CallError> {
        let flight = self.flight;
        let deadline = async {
            match self.terms.clocks.deadline {
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
            error = flight.wait_until_cancelled() => Err(error),
            () = deadline => {
                let limit = self.terms.clocks.deadline.unwrap_or_else(Instant::now) - flight.opened;
                Err(Clock::Total.error(flight.opened.elapsed(), limit, false))
            }
        }
    }
}

/// Every call in flight keeps its future in memory, so a step that makes the future much larger must fail the build.
const _: () = assert!(future_bytes(&Executor::call) <= 2 * 1024);

const fn future_bytes<'a, F: Future>(_: &impl Fn(&'a Executor, Call) -> F) -> usize {
    size_of::<F>()
}

/// The first and the longest pause between two attempts to claim a key that another executor holds.
const CLAIM_PAUSE_MIN: Duration = Duration::from_millis(10);
const CLAIM_PAUSE_MAX: Duration = Duration::from_millis(200);

/// Returns the error of a call whose idempotency key belongs to a different call.
fn other_call() -> CallError {
    let message = "the idempotency key was used before for another call: with other arguments, in another \
                   context, for another user, with other scopes or permissions, or with an earlier definition of the tool";
    let advice = "use another key, or call it exactly as before to get the first result";
    CallError::new(Code::ValidationFailed, message).suggest(advice)
}

/// The answer of an earlier identical call, if one is stored; or else the leadership of the run, if it can be shared.
enum Recalled<'a> {
    Answer(Box<Outcome>),
    Missing(Option<Box<Leader<'a>>>),
}

/// Ends a call whose last attempt failed. Its error stays retryable only if a repetition is safe.
fn give_up(flight: &Flight, attempts: u32, mut outcome: Box<Outcome>, repeatable: bool) -> Box<Outcome> {
    if let Some(error) = &mut outcome.failure {
        error.retryable &= repeatable;
        if attempts > 1 {
            flight.record(Body::RetryExhausted { attempts, error: error.clone() });
        }
    }
    outcome
}

/// Stores the outcome for later calls: a success in the cache, any run under its idempotency key.
fn remember(
    mut repeated: IdempotencyGuard<'_>,
    cached: Option<Box<Leader<'_>>>,
    outcome: &Result<Box<Outcome>, CallError>,
    tool: &Registered,
) {
    let leader = repeated.leader.take();
    let Ok(outcome) = outcome else { return };
    if let (Some(leader), Some(policy), None) = (cached, tool.spec.cache, &outcome.failure) {
        leader.store(outcome, policy.ttl);
    }
    // A failure that is safe to retry is not stored: the next call with the key may succeed.
    if let Some(leader) = leader.filter(|_| !outcome.is_worth_another_run()) {
        leader.store(outcome, repeated.ttl);
    }
}

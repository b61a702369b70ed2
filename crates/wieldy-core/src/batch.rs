//! Batches: several calls submitted together, ordered by their dependencies and by the paths they read and write.
//!
//! [`BatchPlan::make`] is pure: it computes the dependency graph of the calls. [`Executor::batch`] runs the calls along
//! it.

use std::collections::{BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::call::{BatchId, Call, Caller, Status, ToolResult};
use crate::concurrency::{BatchMode, Concurrency, ConcurrencyLimit, LimitedTools};
use crate::error::{CallError, Code, duration_ms};
use crate::event::Body;
use crate::executor::Executor;
use crate::flight::BatchFlight;
use crate::footprint::Touches;
use crate::input::{ARGUMENTS_BYTES_MAX, check_size, too_large};
use crate::notes::Point;
use crate::order::{ReadyQueue, TouchedPaths, UnstartedCalls, WaitsFor, predecessors};
use crate::present::shown_in_line;
use crate::references::{ReferenceFiller, referred_ids};
use crate::schema::Spent;
use crate::spelling::spell;

/// Maximum number of bytes that all references of a batch may expand to. Arguments stay in memory until the batch is
/// over.
const REFERENCES_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Several calls to run together.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The calls, in the order of a sequential run.
    pub calls: Vec<BatchCall>,
    /// The caller of all calls. The callers set on the single calls are ignored.
    pub caller: Arc<Caller>,
    /// The ordering of the calls; [`BatchMode::Smart`] if `None`.
    pub mode: Option<BatchMode>,
    /// Maximum number of calls that run at once; [`Batch::MAX_CONCURRENCY`] if `None`. The caller's plan and slots may
    /// hold fewer: then the summary says so, if the number was given.
    pub max_concurrency: Option<usize>,
    /// True if no further call starts once one has failed. Running calls are left to finish.
    pub stop_on_error: bool,
}

/// One call of a batch.
#[derive(Debug, Clone)]
pub struct BatchCall {
    /// The call. Other calls refer to it by its `call_id`.
    pub call: Call,
    /// The ids of calls that must have succeeded before this one starts.
    pub after: Vec<String>,
}

impl Batch {
    /// Maximum number of calls at once, if a batch does not say.
    pub const MAX_CONCURRENCY: usize = 5;

    /// Creates a batch in smart order with at most five calls at once.
    pub fn new(calls: impl IntoIterator<Item = Call>) -> Self {
        let calls: Vec<BatchCall> = calls.into_iter().map(|call| BatchCall { call, after: Vec::new() }).collect();
        let caller = calls.first().map_or_else(|| Arc::new(Caller::local()), |first| Arc::clone(&first.call.caller));
        Self { calls, caller, mode: None, max_concurrency: None, stop_on_error: false }
    }
}

/// The result of a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchResult {
    /// The executor's id of the batch.
    pub batch_id: BatchId,
    /// One result per call, in the order of the calls.
    pub results: Vec<ToolResult>,
    /// The counts of the batch.
    pub summary: BatchSummary,
}

/// The counts of a batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchSummary {
    /// The number of calls.
    pub total: usize,
    /// The number of calls that were started, including those refused for their arguments.
    pub executed: usize,
    /// The number of calls that were not started, because of an error, a cancellation or a failed dependency.
    pub skipped: usize,
    /// The number of calls that succeeded.
    pub succeeded: usize,
    /// The number of started calls that did not succeed.
    pub failed: usize,
    /// The number of calls that cannot change anything.
    pub read_only: usize,
    /// The number of calls that may change something.
    pub mutating: usize,
    /// The greatest number of calls that ran at once.
    #[serde(default)]
    pub most_at_once: usize,
    /// The duration of the batch, in milliseconds.
    pub duration_ms: f64,
    /// Maximum number of calls that could run at once.
    #[serde(default)]
    pub max_concurrency: usize,
    /// The number that was asked for, if it was more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<usize>,
    /// The limit that held fewer calls at once than were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<ConcurrencyLimit>,
}

impl BatchSummary {
    /// Returns a line that says which limit held fewer calls at once than were asked for. `plan` is the caller's plan.
    pub fn note_on_concurrency(&self, plan: Option<&str>) -> Option<String> {
        let (asked, held_by, max) = (self.asked?, self.held_by?, self.max_concurrency);
        let key = |name: &str| format!("plans.{}.{name}", plan.map(shown_in_line).unwrap_or_default());
        let limit = match held_by {
            ConcurrencyLimit::PlanParallelMax => format!("`{}` is {max}", key("parallel-max")),
            ConcurrencyLimit::PlanSlots => format!("`{}` is {max}", key("slots")),
            ConcurrencyLimit::CallsRunningPerAgentMax => format!("`limits.calls-running-per-agent-max` is {max}"),
            ConcurrencyLimit::CallsRunningMax => format!("`limits.calls-running-max` is {max}"),
            ConcurrencyLimit::ToolConcurrencyMax => "its tools run no more at once".to_owned(),
        };
        Some(match max {
            1 => format!("note: the calls ran one after the other, not {asked} at once: {limit}"),
            max => format!("note: {max} calls could run at once, not {asked}: {limit}"),
        })
    }
}

/// The reason why a batch cannot run at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Two calls have the same id.
    #[error("two calls have the id `{0}`")]
    DoubleId(String),
    /// A call depends on an id that does not exist in the batch.
    #[error("the call `{call}` needs `{needs}`, and there is no call with that id{hint}")]
    UnknownId {
        /// The dependent call.
        call: String,
        /// The missing id.
        needs: String,
        /// A suggestion of a similar id.
        hint: String,
    },
    /// Calls depend on each other in a cycle.
    #[error("the calls {} wait for each other", .0.join(", "))]
    Cycle(Vec<String>),
}

impl From<BatchError> for CallError {
    fn from(error: BatchError) -> Self {
        CallError::new(Code::ValidationFailed, error.to_string())
            .suggest("correct the batch; none of its calls was run")
    }
}

/// The dependency graph of a batch. Calls are identified by their position in the batch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BatchPlan {
    /// For each call, the calls that must be over before it starts.
    pub(crate) waits_for: WaitsFor,
    /// For each call, the calls that must have succeeded.
    pub(crate) needs: Vec<BTreeSet<usize>>,
}

impl BatchPlan {
    /// Orders calls by their dependencies and, in smart order, by their conflicts. A call that does not depend on later
    /// ones keeps its place before all later calls that it conflicts with.
    pub(crate) fn make(calls: &[BatchCall], touches: &[Touches], mode: BatchMode) -> Result<Self, BatchError> {
        let needs = needs(calls)?;
        let order = topological(calls, &needs)?;
        let mut waits_for = needs.clone();
        match mode {
            BatchMode::Parallel => {}
            BatchMode::Sequential => {
                for pair in order.windows(2) {
                    waits_for[pair[1]].insert(pair[0]);
                }
            }
            BatchMode::Smart => {
                let mut touched = TouchedPaths::default();
                for place in order {
                    touched.add(place, &touches[place], &mut waits_for);
                }
            }
        }
        Ok(Self { waits_for, needs })
    }

    /// Notes in each result the calls that it had to wait for.
    fn note_waits(&self, results: &mut [ToolResult]) {
        let ids: Vec<Option<String>> = results.iter().map(|result| result.call_id.clone()).collect();
        let name = |place: usize| ids[place].clone().unwrap_or_else(|| format!("#{}", place + 1));
        for (place, result) in results.iter_mut().enumerate() {
            let before = predecessors(&self.waits_for, place, ids.len());
            result.waited_for = before.into_iter().map(name).collect();
        }
    }
}

/// Returns, for each call, the calls whose success or result it needs: those in `after` and those its arguments refer
/// to.
fn needs(calls: &[BatchCall]) -> Result<Vec<BTreeSet<usize>>, BatchError> {
    let mut places = HashMap::with_capacity(calls.len());
    for (place, BatchCall { call, .. }) in calls.iter().enumerate() {
        if let Some(id) = &call.call_id
            && places.insert(id.as_str(), place).is_some()
        {
            return Err(BatchError::DoubleId(id.clone()));
        }
    }
    let mut all = Vec::with_capacity(calls.len());
    for (place, BatchCall { call, after }) in calls.iter().enumerate() {
        let referred = referred_ids(&call.arguments);
        let mut needed = BTreeSet::new();
        for id in after.iter().map(String::as_str).chain(referred) {
            let Some(at) = places.get(id) else {
                let near = crate::name::near_misses(id, places.keys().copied());
                let hint = crate::name::did_you_mean(&near).map(|hint| format!("; {hint}")).unwrap_or_default();
                return Err(BatchError::UnknownId { call: label(calls, place), needs: id.to_owned(), hint });
            };
            needed.insert(*at);
        }
        all.push(needed);
    }
    Ok(all)
}

/// Returns the name of the call at `place` for messages.
fn label(calls: &[BatchCall], place: usize) -> String {
    calls[place].call.call_id.clone().unwrap_or_else(|| format!("#{}", place + 1))
}

/// Sorts the calls so that each follows its dependencies, as close to the given order as possible.
fn topological(calls: &[BatchCall], needs: &[BTreeSet<usize>]) -> Result<Vec<usize>, BatchError> {
    // The usual case: no call depends on another.
    if needs.iter().all(BTreeSet::is_empty) {
        return Ok((0..needs.len()).collect());
    }
    let (mut order, mut queue) = (Vec::with_capacity(needs.len()), ReadyQueue::new(needs, needs.len()));
    while let Some(next) = queue.next() {
        queue.finish(next);
        order.push(next);
    }
    if order.len() == needs.len() {
        return Ok(order);
    }
    let mut open: BTreeSet<usize> = (0..needs.len()).collect();
    order.iter().for_each(|place| _ = open.remove(place));
    Err(BatchError::Cycle(open.into_iter().map(|at| label(calls, at)).collect()))
}

impl Executor {
    /// Runs several calls. The results are in the order of the calls, not in the order of execution.
    pub async fn batch(&self, batch: Batch) -> Result<BatchResult, CallError> {
        let flight = Arc::new(BatchFlight::new(Arc::clone(&batch.caller)));
        let ended = self.run_batch(batch, flight).await;
        for result in ended.iter().flat_map(|batch| &batch.results) {
            self.confirm_notes(&result.notes);
        }
        ended
    }

    pub(crate) async fn run_batch(&self, batch: Batch, flight: Arc<BatchFlight>) -> Result<BatchResult, CallError> {
        let _open = OpenBatch::new(self, &flight);
        let began = Instant::now();
        if let Err(misnamed) = batch.caller.check() {
            return Err(self.refuse_batch(batch, misnamed, &flight).await);
        }
        let allowed = match self.policy().check_batch(&batch.caller, batch.calls.len()) {
            Ok(allowed) => allowed,
            Err(denied) => return Err(self.refuse_batch(batch, denied.into(), &flight).await),
        };
        let mut tools = LimitedTools::default();
        let is_smart =
            allowed.parallel_max.is_none_or(|max| max > 1) && batch.mode.unwrap_or_default() == BatchMode::Smart;
        let mut batch = batch;
        let known = batch.calls.iter_mut().map(|call| self.predict(call, &batch.caller, is_smart, &mut tools));
        let (touches, read_only): (Vec<Touches>, Vec<bool>) = known.unzip();
        let concurrency = Concurrency::settle(&self.inner, &batch, allowed, &tools);
        let Concurrency { mode, running_max: max_concurrency, reduced, .. } = concurrency;
        let (asked, held_by) = reduced.unzip();
        let plan = match BatchPlan::make(&batch.calls, &touches, mode) {
            Ok(plan) => plan,
            Err(senseless) => return Err(self.refuse_batch(batch, senseless.into(), &flight).await),
        };
        let read_only = read_only.into_iter().filter(|read_only| *read_only).count();
        let mutating = batch.calls.len() - read_only;

        let count = batch.calls.len();
        let started = Body::BatchStarted { count, mode, max_concurrency, asked, held_by, read_only, mutating };
        self.record_batch(&flight, started);
        let caller = Arc::clone(&batch.caller);
        let (mut results, skipped) = self.run_plan(&plan, batch, &flight, concurrency.begun_max).await;
        plan.note_waits(&mut results);
        if let Some(last) = results.last_mut() {
            let tool = Arc::clone(&last.tool);
            let point = Point { tool: &tool, call: None, ends_batch: true, ends_task: false };
            self.add_due_notes(last, &caller, &point);
        }
        let succeeded = results.iter().filter(|result| result.is_success()).count();
        let summary = BatchSummary {
            total: count,
            executed: count - skipped,
            skipped,
            succeeded,
            failed: count - skipped - succeeded,
            read_only,
            mutating,
            most_at_once: flight.most_at_once(),
            duration_ms: duration_ms(began.elapsed()),
            max_concurrency,
            asked,
            held_by,
        };
        self.record_batch(&flight, Body::BatchCompleted(summary.clone()));
        Ok(BatchResult { batch_id: flight.id, results, summary })
    }

    /// Records the calls of a batch that is refused as a whole: refusals belong in the history like failures.
    async fn refuse_batch(&self, batch: Batch, why: CallError, flight: &Arc<BatchFlight>) -> CallError {
        let mut last_record = None;
        for BatchCall { call, .. } in batch.calls {
            let (_, record) = self.refuse(call.by(Arc::clone(&batch.caller)), why.clone(), Some(flight));
            last_record = record.or(last_record);
        }
        self.wait_until_stored(last_record).await;
        why
    }

    /// Returns the paths that a call will touch, as far as known before it runs, and true if the call is read-only.
    fn predict(
        &self,
        batch_call: &mut BatchCall,
        caller: &Caller,
        is_smart: bool,
        tools: &mut LimitedTools,
    ) -> (Touches, bool) {
        let call = &mut batch_call.call;
        // A call that will be refused touches nothing. Its own walk reports the reason.
        let Ok(tool) = self.registry().find(&call.tool, caller) else { return (Touches::nothing(), true) };
        let spec = tool.spec();
        tools.count(&tool);
        if !is_smart {
            return (Touches::nothing(), spec.annotations.read_only); // only smart order depends on paths
        }
        let spelled = spell(&tool, &mut call.arguments, &self.inner.confinement);
        let touches = match self.checked(&tool, &call.arguments) {
            _ if spelled.is_err() => Touches::nothing(),
            _ if !referred_ids(&call.arguments).is_empty() => Touches::unknown(spec),
            Ok(Ok(input)) => Touches::by(&tool, input.value(), &self.inner.confinement),
            Ok(Err(_)) => Touches::nothing(),
            Err(Spent) => Touches::unknown(spec),
        };
        (touches, spec.annotations.read_only)
    }

    /// Starts calls as the plan allows, until all are over. Returns the results in order and the number of skipped
    /// calls.
    async fn run_plan(
        &self,
        plan: &BatchPlan,
        batch: Batch,
        flight: &Arc<BatchFlight>,
        max_concurrency: usize,
    ) -> (Vec<ToolResult>, usize) {
        let mut results: Vec<Option<ToolResult>> = batch.calls.iter().map(|_| None).collect();
        let mut queue = ReadyQueue::new(&plan.waits_for, results.len());
        let mut calls = UnstartedCalls::new(batch.calls);
        let (mut running, mut skipped, mut failed) = (FuturesUnordered::new(), 0, None);
        let (mut seat, mut last_refusal, mut references_left) = (Box::pin(None), None, REFERENCES_BYTES_MAX);
        loop {
            let next = if running.len() < max_concurrency { queue.next() } else { None };
            let ended = if let Some(place) = next {
                let mut call = calls.take(place);
                call.caller = Arc::clone(&batch.caller);
                let stopped_by = failed.filter(|_| batch.stop_on_error);
                match bind(&mut call, &plan.needs[place], &results, stopped_by, flight, &mut references_left) {
                    Ok(()) => {
                        seat.set(Some(self.walk(self.open(call, Some(flight), false))));
                        // A call that ends at once needs no place among the running ones, and the next call reuses its
                        // allocation.
                        let Poll::Ready(result) = futures_util::poll!(seated(&mut seat)) else {
                            let mut seat = std::mem::replace(&mut seat, Box::pin(None));
                            running.push(async move { (place, seated(&mut seat).await) });
                            continue;
                        };
                        results[place] = Some(result);
                        place
                    }
                    Err(reason) => {
                        // A call skipped because of another is not a failure itself. A call with a bad reference is.
                        if reason.code == Code::Cancelled {
                            skipped += 1;
                        } else {
                            failed.get_or_insert(place);
                        }
                        // Do not wait for this record here: running calls must be polled meanwhile.
                        let (result, record) = self.refuse(call, *reason, Some(flight));
                        last_refusal = record.or(last_refusal);
                        results[place] = Some(result);
                        queue.finish(place);
                        continue;
                    }
                }
            } else {
                let Some((place, result)) = running.next().await else { break };
                results[place] = Some(result);
                place
            };
            if results[ended].as_ref().is_some_and(|result| !result.is_success()) {
                failed.get_or_insert(ended);
            }
            queue.finish(ended);
        }
        self.wait_until_stored(last_refusal).await;
        (results.into_iter().map(|result| result.expect("every call has ended")).collect(), skipped)
    }

    fn record_batch(&self, flight: &BatchFlight, body: Body) {
        let _ = self.recorder().append(&flight.subject, body, Timestamp::now(), Some(&flight.log));
    }
}

/// Returns the future in the reusable allocation `seat`.
fn seated<F>(seat: &mut Pin<Box<Option<F>>>) -> Pin<&mut F> {
    seat.as_mut().as_pin_mut().expect("the allocation has a future")
}

/// Replaces the call's references by results, or returns the reason why the call is not started.
fn bind(
    call: &mut Call,
    needs: &BTreeSet<usize>,
    results: &[Option<ToolResult>],
    stopped_by: Option<usize>,
    flight: &BatchFlight,
    references_left: &mut usize,
) -> Result<(), Box<CallError>> {
    if let Some(cause) = flight.cancelled() {
        return Err(Box::new(cause.error()));
    }
    // All dependencies have ended, so their results have their names.
    let id = |place: usize| results[place].as_ref().and_then(|result| result.call_id.as_deref());
    let name = |place: usize| id(place).map_or_else(|| format!("#{}", place + 1), str::to_owned);
    let skipped = |why: String, because: usize| {
        let reason = CallError::new(Code::Cancelled, format!("skipped: {why}"))
            .suggest("this call was not started; first find out why the other call failed");
        Box::new(reason.detail("cause", "skipped").detail("because_of", name(because)))
    };
    let unmet = needs.iter().copied().find(|need| results[*need].as_ref().is_none_or(|result| !result.is_success()));
    if let Some(because) = unmet {
        let status = results[because].as_ref().map_or(Status::Pending, |result| result.status);
        return Err(skipped(format!("the call `{}`, which it needs, ended as {status}", name(because)), because));
    }
    if let Some(because) = stopped_by {
        return Err(skipped(format!("the batch stops on errors, and `{}` failed", name(because)), because));
    }
    if needs.is_empty() || referred_ids(&call.arguments).is_empty() {
        return Ok(());
    }
    // Arguments that are too large already are left alone, and the call is refused for them.
    let Ok(size) = check_size(&call.arguments) else { return Ok(()) };
    let of_arguments = ARGUMENTS_BYTES_MAX.saturating_sub(size.bytes);
    let allowed = of_arguments.min(*references_left);
    let mut filler = ReferenceFiller {
        results: needs.iter().filter_map(|need| Some((id(*need)?, results[*need].as_ref()?))).collect(),
        whole: HashMap::new(),
        bytes_left: allowed,
        too_large: if allowed < of_arguments { references_too_large } else { || too_large().into() },
    };
    let arguments = filler.value(&call.arguments)?;
    *references_left -= allowed - filler.bytes_left;
    call.arguments = Arc::new(arguments);
    Ok(())
}

/// Returns the error for references that would make a batch too large.
fn references_too_large() -> CallError {
    let text = format!("the references of this batch are too large: at most {REFERENCES_BYTES_MAX} bytes in all");
    CallError::new(Code::ValidationFailed, text).suggest("refer to less, or make several batches")
}

/// A guard for a running batch. Dropping it ends the streams of the batch's observers.
struct OpenBatch<'a> {
    executor: &'a Executor,
    flight: &'a BatchFlight,
}

impl<'a> OpenBatch<'a> {
    fn new(executor: &'a Executor, flight: &'a Arc<BatchFlight>) -> Self {
        executor.flights().add_batch(Arc::clone(flight));
        Self { executor, flight }
    }
}

impl Drop for OpenBatch<'_> {
    fn drop(&mut self) {
        self.flight.log.close();
        self.executor.flights().finish_batch(self.flight.id);
    }
}

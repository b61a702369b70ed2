//! A call's entry in the journal: opened when the call is accepted, and closed however the call ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use crate::arguments::CheckedArguments;
use crate::call::{Call, Content, ExecutionId, Status, Timing, ToolResult};
use crate::error::{CallError, Code, duration_ms};
use crate::event::{Body, CallState, Closing};
use crate::executor::Executor;
use crate::flight::{BatchFlight, CancelCause, Flight};
use crate::input::check_size;
use crate::journal::Receipt;
use crate::limits::UsedSandbox;
use crate::notes::Point;
use crate::outcome::Outcome;
use crate::present::shown;
use crate::recorded::RecordedResult;
use crate::redact::{Marked, Redacted};
use crate::registry::{NotFound, Registered};
use crate::repeated;
use crate::schema::Measured;
use crate::spelling::spell;
use crate::tool::Provider;

/// The longest that an answer waits for its record to be safe. After that, it is returned anyway.
pub(crate) const CLOSING_PATIENCE: Duration = Duration::from_secs(5);

/// An open entry in the journal. If the caller goes away, the entry is dropped and closes itself as cancelled.
pub(crate) struct Entry {
    executor: Executor,
    pub(crate) call: Call,
    pub(crate) flight: Arc<Flight>,
    /// The tool that the call names, or the error that there is none.
    pub(crate) tool: Result<Arc<Registered>, NotFound>,
    pub(crate) size: Measured,
    pub(crate) refused: Option<Box<CallError>>,
    closed: bool,
}

impl Entry {
    /// Creates the entry of a call that an earlier executor left open.
    pub(crate) fn reopened(
        executor: &Executor,
        call: Call,
        flight: Arc<Flight>,
        tool: Result<Arc<Registered>, NotFound>,
        refused: Option<Box<CallError>>,
    ) -> Box<Self> {
        let (size, too_large) = match check_size(&call.arguments) {
            Ok(size) => (size, None),
            Err(too_large) => (Measured::default(), Some(Box::new(too_large.into()))),
        };
        let refused = refused.or(too_large);
        Box::new(Self { executor: executor.clone(), call, flight, tool, size, refused, closed: false })
    }

    /// Writes the closing event and makes the result. The result is returned even if the event cannot be written.
    pub(crate) fn close(
        mut self: Box<Self>,
        ended: Result<Box<Outcome>, CallError>,
        tally: Tally,
    ) -> (ToolResult, Receipt) {
        // Store nothing under the key of a call that never ran, or of one that can simply run again.
        let is_stored =
            self.flight.keyed.get().is_some() && ended.as_ref().is_ok_and(|outcome| !outcome.is_worth_another_run());
        let outcome = *ended.unwrap_or_else(|error| Box::new(Outcome::default().failed(error)));
        let error = outcome.failure;
        let arguments = match tally.arguments {
            Some(checked) => checked,
            // Arguments that are too large to be checked are not written down.
            None if self.size == Measured::default() => Arc::default(),
            None => Arc::clone(&self.call.arguments),
        };
        let mut content = outcome.content;
        let is_whole = error.is_none() && outcome.artifact.is_none();
        let same_as = if is_whole { self.same_as(&arguments, &content) } else { None };
        content.extend(same_as.map(|earlier| repeated::line(earlier, &content)));
        let mut result = ToolResult {
            execution_id: self.flight.id,
            call_id: self.call.call_id.take(),
            tool: self.tool.as_ref().map_or_else(|_| Arc::clone(&self.call.tool), |tool| tool.name.shared()),
            arguments: CheckedArguments::of_call(arguments, &self.flight.subject.arguments),
            provider: self.tool.as_ref().map(|tool| Arc::clone(&tool.provider)).unwrap_or_default(),
            status: error.as_ref().map_or(Status::Success, |error| error.status()),
            content,
            structured: outcome.structured,
            error,
            attempts: tally.attempts,
            cached: tally.cached,
            same_as,
            partial: outcome.partial,
            artifact: outcome.artifact,
            timing: Timing {
                queued_ms: duration_ms(tally.queued),
                duration_ms: self.flight.elapsed_ms(),
                started_at: self.flight.opened_at,
                completed_at: Timestamp::now(),
            },
            usage: outcome.usage,
            sandbox: outcome.sandbox,
            passed_on: outcome.passed_on,
            labels: std::mem::take(&mut self.call.options.labels),
            parallel: self.flight.ran_in_parallel(),
            waited_for: Vec::new(),
            notes: Vec::new(),
            notes_waiting: 0,
        };
        let closing = Body::closed(Closing {
            status: result.status,
            duration_ms: result.timing.duration_ms,
            queued_ms: result.timing.queued_ms,
            attempts: result.attempts,
            cached: result.cached,
            output_bytes: result.content.iter().map(Content::bytes).sum(),
            artifact: result.artifact,
            usage: result.usage.clone(),
            sandbox: result.sandbox.as_ref().map(UsedSandbox::reference),
            error: result.error.clone(),
            answer: (self.flight.is_task() || is_stored).then(|| Arc::new(result.clone())),
            recorded: self.recorded(&result),
        });
        let closed = self.flight.record_at(closing, result.timing.completed_at);
        self.bring_notes(&mut result);
        self.finish();
        (result, closed)
    }

    /// Adds the notes that are due to the result. That of a task gets them when it is handed out. Stored results have
    /// none.
    fn bring_notes(&self, result: &mut ToolResult) {
        if !self.flight.is_task() {
            let (tool, call) = (Arc::clone(&result.tool), Some(result.execution_id));
            let point = Point { tool: &tool, call, ..Point::default() };
            self.executor.add_due_notes(result, &self.flight.subject.caller, &point);
        }
    }

    /// Returns the earlier call of the same session that got this answer, too. Answers of MCP servers are passed on as
    /// they are.
    fn same_as(&self, arguments: &Value, content: &[Content]) -> Option<ExecutionId> {
        let tool = self.tool.as_ref().ok().filter(|tool| !matches!(tool.spec.provider, Provider::Mcp(_)))?;
        let answers = &self.executor.inner.repeated;
        answers.note(self.flight.id, &self.call.caller, tool.name.as_str(), arguments, content)
    }

    /// Returns the part of the result that the history stores.
    fn recorded(&self, result: &ToolResult) -> Option<Arc<RecordedResult>> {
        let engine = &*self.executor.inner;
        let tool = self.tool.as_ref().ok().filter(|tool| !tool.spec.private_result)?;
        if !engine.recorder.stores_results() {
            return None;
        }
        let recording = engine.results_of_tools.get(tool.name.as_str()).copied().unwrap_or(engine.results);
        RecordedResult::of(result, recording, &self.flight.subject.arguments).map(Arc::new)
    }

    /// Returns the result for later calls with the same idempotency key, if the caller went away during a run that must
    /// not be repeated.
    fn result_left_alone(&self) -> Option<ToolResult> {
        let runs = matches!(self.flight.state(), CallState::Running { .. });
        let tool = self.tool.as_ref().ok().filter(|tool| runs && !tool.spec.annotations.repeatable())?;
        self.flight.keyed.get()?;
        let error = CallError::outcome_unknown();
        Some(ToolResult::failed(self.flight.id, tool.name.shared(), self.flight.opened_at, error))
    }

    /// Returns true if the call cannot change anything: its tool is read-only, or there is no such tool.
    pub(crate) fn is_read_only(&self) -> bool {
        self.tool.as_ref().map_or(true, |tool| tool.spec.annotations.read_only)
    }

    fn finish(&mut self) {
        self.closed = true;
        self.executor.inner.flights.finish_call(self.flight.id);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        let error = CancelCause::CallerGone.error();
        self.flight.cancel(CancelCause::CallerGone);
        let answer = self.result_left_alone().map(Arc::new);
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
            sandbox: None,
            error: Some(Box::new(error)),
            answer,
            recorded: None,
        }));
        self.finish();
    }
}

/// The counts that a call collects on its way.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) arguments: Option<Arc<Value>>,
    pub(crate) attempts: u32,
    pub(crate) queued: Duration,
    pub(crate) cached: bool,
}

impl Tally {
    pub(crate) fn recalled(&mut self, outcome: Box<Outcome>) -> Result<Box<Outcome>, CallError> {
        self.cached = true;
        Ok(outcome)
    }
}

impl Executor {
    /// Records a call that was refused before its arguments could be read, and returns its result.
    pub async fn refuse_unread(&self, call: Call, why: CallError) -> ToolResult {
        let (result, record) = self.refuse(call, why, None);
        self.wait_until_stored(record).await;
        result
    }

    /// Records a refused call of a door's own tool, and returns its result. A registered tool that has this name as its
    /// short name is not meant.
    pub async fn refuse_own(&self, call: Call, why: CallError) -> ToolResult {
        let none = NotFound::Unknown { name: shown(&call.tool), near: Vec::new(), because: None, advice: None };
        let (result, record) = self.close(self.open_as(call, Err(none), None, false), Err(why), Tally::default());
        self.wait_until_stored(record).await;
        result
    }

    /// Opens the call's entry. From here on, the call can be observed and cancelled, and its entry will be closed.
    pub(crate) fn open(&self, call: Call, batch: Option<&Arc<BatchFlight>>, task: bool) -> Box<Entry> {
        // Find the tool before anything is recorded: it knows which arguments are sensitive, and its own name.
        let tool = self.inner.registry.find(&call.tool, &call.caller);
        self.open_as(call, tool, batch, task)
    }

    fn open_as(
        &self,
        mut call: Call,
        tool: Result<Arc<Registered>, NotFound>,
        batch: Option<&Arc<BatchFlight>>,
        task: bool,
    ) -> Box<Entry> {
        let engine = &*self.inner;
        call.settle_context();
        let (name, marked) = match &tool {
            Ok(tool) => (tool.name.shared(), tool.sensitive.clone()),
            Err(_) => (Arc::clone(&call.tool), engine.registry.sensitive(&call.tool)),
        };
        let called_as = (name != call.tool).then(|| Arc::clone(&call.tool));
        // Arguments that are too large to be checked are not recorded either.
        let (size, too_large) = match check_size(&call.arguments) {
            Ok(size) => (size, None),
            Err(too_large) => (Measured::default(), Some(too_large)),
        };
        let misspelled = match &tool {
            Ok(tool) if too_large.is_none() => spell(tool, &mut call.arguments, &engine.confinement).err(),
            _ => None,
        };
        if !tool.as_ref().is_ok_and(|tool| tool.tool.takes_notes()) {
            call.notes = None;
        }
        let not_beside = call.check_beside().err();
        let (arguments, metadata) = redacted(&call, marked, too_large.is_none(), not_beside.is_none());
        let misnamed = call.caller.check().err();
        let caller = if misnamed.is_some() { call.caller.escaped() } else { Arc::clone(&call.caller) };
        let provider = tool.as_ref().ok().map(|tool| Arc::clone(&tool.provider));
        let flight =
            Arc::new(Flight::new(&call, caller, name, provider, arguments.clone(), &engine.recorder, batch, task));
        engine.flights.add(Arc::clone(&flight));
        // Context and notes are not stored, so no later executor has them.
        let may_rerun =
            call.options.may_rerun() && misnamed.is_none() && call.context.is_none() && call.notes.is_none();
        let rerun = may_rerun.then(|| Arc::clone(&call.caller));
        let workspace = engine.workspace.clone();
        let opening = Body::CallPending { arguments, called_as, workspace, metadata, task, rerun };
        let opened = flight.record_at(opening, flight.opened_at);
        let refused = match (opened, too_large) {
            (Receipt::Refused(error), _) => Some(error.into()),
            _ if misnamed.is_some() => misnamed,
            (_, Some(too_large)) => {
                let advice = "write large values to a file in the workspace, and pass its path";
                Some(CallError::new(Code::ValidationFailed, too_large.to_string()).suggest(advice))
            }
            _ if misspelled.is_some() => misspelled.map(|error| *error),
            _ if not_beside.is_some() => not_beside,
            _ if engine.stopping.load(Ordering::Acquire) => Some(CancelCause::Shutdown.error()),
            _ => None,
        };
        let refused = refused.map(Box::new);
        Box::new(Entry { executor: self.clone(), call, flight, tool, size, refused, closed: false })
    }
}

/// Returns the arguments and the metadata of a call without their secrets. The secrets among any of the call's objects
/// are hidden in all of its texts. An object that is refused is left out.
fn redacted(call: &Call, marked: Marked, has_arguments: bool, has_beside: bool) -> (Redacted, Option<Redacted>) {
    let arguments = Some(&call.arguments).filter(|_| has_arguments);
    let [context, metadata, notes] =
        [&call.context, &call.metadata, &call.notes].map(|object| object.as_ref().filter(|_| has_beside));
    let others = |objects: [Option<&Arc<Value>>; 3]| objects.into_iter().flatten().cloned().collect();
    let of_arguments = Redacted::new(arguments.map_or_else(Arc::default, Arc::clone), marked.clone());
    let metadata_shown = metadata
        .filter(|metadata| metadata.as_object().is_some_and(|map| !map.is_empty()))
        .map(|metadata| Redacted::new(Arc::clone(metadata), marked).beside(others([arguments, context, notes])));
    (of_arguments.beside(others([context, metadata, notes])), metadata_shown)
}

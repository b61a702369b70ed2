//! A call in flight: the state shared by the engine, the running tool, observers and cancellers.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::call::{BatchId, Call, Caller, ExecutionId};
use crate::capture::{Capture, Captured};
use crate::error::{CallError, Code, duration_ms};
use crate::event::{Body, CallState, Keyed, Subject};
use crate::journal::{Interrupted, Receipt, Recorder};
use crate::observe::Log;
use crate::program::AgreedProgram;
use crate::redact::{self, Redacted};
use crate::sandbox::Stream;

/// The reason why a call was cancelled, as shown in its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CancelCause {
    /// The call itself was cancelled.
    Caller,
    /// The call's batch was cancelled.
    Batch,
    /// The call's session was cancelled.
    Session,
    /// The calls of its tenant were cancelled.
    Tenant,
    /// The caller went away.
    CallerGone,
    /// The executor is stopping.
    Shutdown,
}

/// The advice for a cancelled call.
const WANTED: &str = "it was cancelled on purpose; call it again only if it is still needed";

impl CancelCause {
    /// Returns the cause as written in `details.cause`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Caller => "caller",
            Self::Batch => "batch",
            Self::Session => "session",
            Self::Tenant => "tenant",
            Self::CallerGone => "caller_gone",
            Self::Shutdown => "shutdown",
        }
    }

    /// Returns the error of a call that ends for this cause.
    pub(crate) fn error(self) -> CallError {
        let (message, advice) = match self {
            Self::Caller => ("the call was cancelled", WANTED),
            Self::Batch => ("the call's batch was cancelled", WANTED),
            Self::Session => ("the call's session was cancelled", WANTED),
            Self::Tenant => ("all calls of the tenant were cancelled", WANTED),
            Self::CallerGone => ("no client waits for the call any more", "wait for it, or begin it as a task"),
            Self::Shutdown => ("the executor is stopping", "call again when it has restarted"),
        };
        CallError::new(Code::Cancelled, message).suggest(advice).detail("cause", self.as_str())
    }
}

/// One call in flight.
pub(crate) struct Flight {
    pub(crate) id: ExecutionId,
    pub(crate) subject: Arc<Subject>,
    pub(crate) opened: Instant,
    pub(crate) opened_at: Timestamp,
    /// True if the caller polls the call instead of waiting for it. A call may become a task later.
    task: AtomicBool,
    /// The idempotency key of the call.
    pub(crate) keyed: OnceLock<Arc<Keyed>>,
    /// The program that a person agreed to, if one was shown.
    pub(crate) agreed: OnceLock<Arc<AgreedProgram>>,
    /// The context of the call. It is in no event.
    pub(crate) context: Option<Arc<Value>>,
    /// The client's notes, if the tool takes them. They are in no event.
    pub(crate) notes: Option<Arc<Value>>,
    recorder: Arc<Recorder>,
    batch: Option<Arc<BatchFlight>>,
    /// True if another call of the batch ran at the same time.
    parallel: AtomicBool,
    log: Log,
    /// Created on first use: most calls end before anything waits for it.
    stop: OnceLock<CancellationToken>,
    cause: OnceLock<CancelCause>,
    /// The time of the last output or progress, in microseconds after `opened`.
    sign_of_life: AtomicU64,
    /// Allocated on first output: few calls print anything.
    capture: Mutex<Option<Box<Capture>>>,
}

impl AsRef<Log> for Flight {
    fn as_ref(&self) -> &Log {
        &self.log
    }
}

impl Flight {
    /// Creates a flight for the caller and the tool of these names, which may differ from the given ones.
    #[expect(clippy::too_many_arguments, reason = "a call in flight is known by all of these")]
    pub(crate) fn new(
        call: &Call,
        caller: Arc<Caller>,
        tool: Arc<str>,
        provider: Option<Arc<str>>,
        arguments: Redacted,
        recorder: &Arc<Recorder>,
        batch: Option<&Arc<BatchFlight>>,
        task: bool,
    ) -> Self {
        let opened_at = Timestamp::now();
        Self::of(
            ExecutionId::next_at(opened_at),
            opened_at,
            call,
            caller,
            tool,
            provider,
            arguments,
            recorder,
            batch,
            task,
        )
    }

    /// Creates a flight for a call that was open when an earlier executor stopped, in the state it had then.
    pub(crate) fn resumed(
        was: &Interrupted,
        call: &Call,
        provider: Option<Arc<str>>,
        recorder: &Arc<Recorder>,
    ) -> Self {
        let (tool, arguments) = (Arc::clone(&call.tool), Redacted::new(Arc::clone(&call.arguments), None));
        let caller = Arc::clone(&call.caller);
        let flight =
            Self::of(was.execution, was.opened_at, call, caller, tool, provider, arguments, recorder, None, was.task);
        flight.log.writer().set_state(was.state);
        flight
    }

    #[expect(clippy::too_many_arguments, reason = "a call in flight is known by all of these")]
    fn of(
        id: ExecutionId,
        opened_at: Timestamp,
        call: &Call,
        caller: Arc<Caller>,
        tool: Arc<str>,
        provider: Option<Arc<str>>,
        arguments: Redacted,
        recorder: &Arc<Recorder>,
        batch: Option<&Arc<BatchFlight>>,
        task: bool,
    ) -> Self {
        let subject = Subject {
            execution: Some(id),
            batch: batch.map(|batch| batch.id),
            call_id: call.call_id.clone(),
            tool: Some(tool),
            provider,
            opened_at: Some(opened_at),
            caller,
            arguments,
        };
        Self {
            id,
            subject: Arc::new(subject),
            opened: Instant::now(),
            opened_at,
            task: AtomicBool::new(task),
            keyed: OnceLock::new(),
            agreed: OnceLock::new(),
            context: call.context.clone(),
            notes: call.notes.clone(),
            recorder: Arc::clone(recorder),
            batch: batch.cloned(),
            parallel: AtomicBool::new(false),
            log: Log::default(),
            stop: OnceLock::new(),
            cause: OnceLock::new(),
            sign_of_life: AtomicU64::new(0),
            capture: Mutex::new(None),
        }
    }

    /// Returns the context without its secrets, to be shown to a person.
    pub(crate) fn redacted_context(&self) -> Option<Value> {
        let context = self.context.as_ref()?;
        let mut shown = redact::value(context).into_owned();
        self.subject.arguments.hide_in(&mut shown);
        Some(shown)
    }

    /// Returns the recorder of the history.
    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Records an event of the call with the current time.
    pub(crate) fn record(&self, body: Body) -> Receipt {
        self.record_at(body, Timestamp::now())
    }

    /// Records an event of the call. An event that is illegal in the current state (late output of a finished run) is
    /// dropped.
    pub(crate) fn record_at(&self, body: Body, at: Timestamp) -> Receipt {
        let mut log = self.log.writer();
        let Ok(next) = log.state().apply(&body) else {
            // A call without an opening gets no closing either, but it is over, so its observers must end.
            if let (CallState::Unknown, Some(closing)) = (log.state(), body.closing()) {
                log.set_state(CallState::Closed { status: closing.status });
                log.close();
            }
            return Receipt::Kept;
        };
        let batch_log = self.batch.as_ref().map(|batch| &batch.log);
        let appended = self.recorder.append(&self.subject, body, at, batch_log);
        let over = matches!(next, CallState::Closed { .. });
        // The call is over even if the history cannot be written.
        if over || appended.is_ok() {
            log.set_state(next);
        }
        let receipt = match appended {
            Ok((event, receipt)) => {
                log.push(event);
                receipt
            }
            Err(refused) => Receipt::Refused(refused),
        };
        if over {
            log.close();
        }
        receipt
    }

    pub(crate) fn state(&self) -> CallState {
        self.log.state()
    }

    pub(crate) fn is_task(&self) -> bool {
        self.task.load(Ordering::Relaxed)
    }

    /// Makes the call a task from now on.
    pub(crate) fn become_task(&self) -> Receipt {
        self.task.store(true, Ordering::Relaxed);
        self.record(Body::CallTask {})
    }

    /// Returns true if another call of the batch ran at the same time as this one; `None` without a batch.
    pub(crate) fn ran_in_parallel(&self) -> Option<bool> {
        self.batch.as_ref().map(|_| self.parallel.load(Ordering::Relaxed))
    }

    /// Counts this call among the running ones of its batch, until the guard is dropped.
    pub(crate) fn run_in_batch(self: &Arc<Self>) -> Option<BatchRun> {
        let mut running = self.batch.as_ref()?.running.lock().expect("no code panics while it holds the count");
        running.now += 1;
        running.most = running.most.max(running.now);
        if running.now == 1 {
            running.alone = Some(Arc::clone(self));
        } else {
            let alone = running.alone.take();
            [Some(self), alone.as_ref()]
                .into_iter()
                .flatten()
                .for_each(|one| one.parallel.store(true, Ordering::Relaxed));
        }
        Some(BatchRun(Arc::clone(self)))
    }

    /// Returns the number of the next run: more than 1 only for a call that an earlier executor left open.
    pub(crate) fn next_attempt(&self) -> u32 {
        match self.state() {
            CallState::Waiting { next_attempt } => next_attempt,
            _ => 1,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state(), CallState::Closed { .. })
    }

    /// Cancels the call. The first cause counts.
    pub(crate) fn cancel(&self, cause: CancelCause) {
        let _ = self.cause.set(cause);
        self.stop().cancel();
    }

    /// Returns the token that is cancelled with the call or with its batch.
    pub(crate) fn stop(&self) -> &CancellationToken {
        self.stop.get_or_init(|| match &self.batch {
            Some(batch) => batch.stop.child_token(),
            None => CancellationToken::new(),
        })
    }

    /// Waits until the call is cancelled, and returns the error that names the cause.
    pub(crate) async fn wait_until_cancelled(&self) -> CallError {
        self.stop().cancelled().await;
        self.cancelled().expect("a cause is set before the token is cancelled").error()
    }

    /// Returns the cause of the cancellation, if the call or its batch was cancelled.
    pub(crate) fn cancelled(&self) -> Option<CancelCause> {
        self.cause.get().copied().or_else(|| self.batch.as_ref()?.cancelled())
    }

    pub(crate) fn elapsed_ms(&self) -> f64 {
        duration_ms(self.opened.elapsed())
    }

    /// Notes that the run has just shown a sign of life.
    pub(crate) fn note_sign_of_life(&self) {
        self.sign_of_life.store(self.opened.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    /// Returns the time of the run's last sign of life.
    pub(crate) fn last_sign_of_life(&self) -> Instant {
        self.opened + Duration::from_micros(self.sign_of_life.load(Ordering::Relaxed))
    }

    /// Drops the output of an earlier attempt.
    pub(crate) fn forget_capture(&self) {
        *self.lock_capture() = None;
    }

    /// Captures output of the current attempt.
    pub(crate) fn capture(&self, stream: Stream, bytes: &[u8], new: impl FnOnce() -> Capture) {
        let mut capture = self.lock_capture();
        let capture = capture.get_or_insert_with(|| Box::new(new()));
        if stream == Stream::Stderr {
            capture.keep_stderr(bytes);
        }
        capture.write(bytes);
    }

    /// Returns the end of what the current attempt printed as errors: on stderr, or else at all. It is `None` if a
    /// secret may be split over both streams, because redaction would not find it.
    pub(crate) fn error_output(&self) -> Option<String> {
        let capture = self.lock_capture();
        capture.as_ref().filter(|_| !self.subject.arguments.is_parted()).map(|capture| capture.error_output())
    }

    /// Returns the output of the run so far, if there is any.
    pub(crate) fn captured(&self) -> Option<Captured> {
        self.lock_capture().as_ref().map(|capture| capture.so_far())
    }

    /// Locks the capture. Artifact stores are foreign code: if one panicked under the lock, the earlier output is still
    /// valid.
    fn lock_capture(&self) -> std::sync::MutexGuard<'_, Option<Box<Capture>>> {
        self.capture.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A run of a call of a batch. Dropping it ends the run.
pub(crate) struct BatchRun(Arc<Flight>);

impl Drop for BatchRun {
    fn drop(&mut self) {
        let Some(batch) = &self.0.batch else { return };
        let mut running = batch.running.lock().expect("no code panics while it holds the count");
        running.now -= 1;
        if running.now == 0 {
            running.alone = None;
        }
    }
}

/// The calls of a batch that run now.
#[derive(Default)]
struct RunningCalls {
    now: usize,
    most: usize,
    /// The only running call, if no other one ran beside it yet.
    alone: Option<Arc<Flight>>,
}

/// A batch in flight.
pub(crate) struct BatchFlight {
    pub(crate) id: BatchId,
    pub(crate) subject: Arc<Subject>,
    pub(crate) log: Log,
    pub(crate) stop: CancellationToken,
    cause: OnceLock<CancelCause>,
    running: Mutex<RunningCalls>,
}

impl AsRef<Log> for BatchFlight {
    fn as_ref(&self) -> &Log {
        &self.log
    }
}

impl BatchFlight {
    pub(crate) fn new(caller: Arc<Caller>) -> Self {
        let caller = if caller.check().is_ok() { caller } else { caller.escaped() };
        let id = BatchId::next();
        let subject = Subject { batch: Some(id), opened_at: Some(Timestamp::now()), ..Subject::of(caller) };
        Self {
            id,
            subject: Arc::new(subject),
            log: Log::default(),
            stop: CancellationToken::new(),
            cause: OnceLock::new(),
            running: Mutex::default(),
        }
    }

    /// Returns the greatest number of calls that ran at once.
    pub(crate) fn most_at_once(&self) -> usize {
        self.running.lock().expect("no code panics while it holds the count").most
    }

    /// Cancels all calls of the batch, including those that have not started.
    pub(crate) fn cancel(&self, cause: CancelCause) {
        let _ = self.cause.set(cause);
        self.stop.cancel();
    }

    /// Returns the cause of the cancellation, if the batch was cancelled.
    pub(crate) fn cancelled(&self) -> Option<CancelCause> {
        self.cause.get().copied()
    }
}

/// The number of batch events that are stored per remembered call: those of a call that succeeds at once, and one
/// spare.
const EVENTS_PER_CALL: usize = 4;

/// The table of all calls and batches in flight, and of the last finished ones, for late observers.
pub(crate) struct Flights {
    table: Mutex<Table>,
    finished_max: usize,
}

#[derive(Default)]
struct Table {
    calls: HashMap<ExecutionId, Arc<Flight>, BuildHasherDefault<IdHasher>>,
    finished_calls: VecDeque<ExecutionId>,
    batches: HashMap<BatchId, Arc<BatchFlight>, BuildHasherDefault<IdHasher>>,
    finished_batches: VecDeque<FinishedBatch>,
    /// The number of events in all finished batches.
    finished_batches_events: usize,
}

impl Table {
    /// Removes the oldest finished batches while there are more than `events_max` events, but never the last `spared`
    /// ones. Returns the removed batches, to be dropped outside the lock.
    fn forget_batches(&mut self, events_max: usize, spared: usize) -> Vec<Arc<BatchFlight>> {
        let mut gone = Vec::new();
        // A batch stores the events of all its calls, so the limit counts events.
        while self.finished_batches_events > events_max
            && self.finished_batches.len() > spared
            && let Some(oldest) = self.finished_batches.pop_front()
        {
            self.finished_batches_events -= oldest.events;
            gone.extend(self.batches.remove(&oldest.id));
        }
        gone
    }
}

struct FinishedBatch {
    id: BatchId,
    events: usize,
}

/// A hasher for ids. They are random already and callers cannot choose them, so mixing them again gains nothing.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        if let Some((_, random)) = bytes.split_last_chunk::<8>() {
            self.0 ^= u64::from_le_bytes(*random);
        }
    }

    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Flights {
    /// Creates a table that remembers the last `finished_max` finished calls, and batches with about as many events.
    pub(crate) fn new(finished_max: usize) -> Self {
        let mut table = Table::default();
        // Spare room, because otherwise the table would rehash every few calls.
        table.calls.reserve(finished_max.min(1 << 16) * 4);
        Self { table: Mutex::new(table), finished_max }
    }

    pub(crate) fn add(&self, flight: Arc<Flight>) {
        self.lock().calls.insert(flight.id, flight);
    }

    /// Adds a batch. If the finished batches exceed the limit, the oldest go now, even the last one, to make room.
    pub(crate) fn add_batch(&self, batch: Arc<BatchFlight>) {
        let mut table = self.lock();
        let gone = table.forget_batches(self.finished_max * EVENTS_PER_CALL, 0);
        table.batches.insert(batch.id, batch);
        drop(table);
        drop(gone);
    }

    /// Moves a call to the finished ones, and removes the oldest of them beyond the limit.
    pub(crate) fn finish_call(&self, id: ExecutionId) {
        let mut table = self.lock();
        table.finished_calls.push_back(id);
        if table.finished_calls.len() > self.finished_max
            && let Some(oldest) = table.finished_calls.pop_front()
        {
            table.calls.remove(&oldest);
        }
    }

    /// Moves a batch to the finished ones, and removes the oldest of them beyond the limit. The last one stays, however
    /// large.
    pub(crate) fn finish_batch(&self, id: BatchId) {
        let mut table = self.lock();
        // A batch without events counts as one, so that the table stays bounded.
        let events = table.batches.get(&id).map_or(0, |batch| batch.log.len()).max(1);
        table.finished_batches.push_back(FinishedBatch { id, events });
        table.finished_batches_events += events;
        let gone = table.forget_batches(self.finished_max * EVENTS_PER_CALL, 1);
        drop(table);
        drop(gone);
    }

    pub(crate) fn call(&self, id: ExecutionId) -> Option<Arc<Flight>> {
        self.lock().calls.get(&id).cloned()
    }

    pub(crate) fn batch(&self, id: BatchId) -> Option<Arc<BatchFlight>> {
        self.lock().batches.get(&id).cloned()
    }

    /// Returns the batches that `wanted` selects.
    pub(crate) fn batches(&self, wanted: impl Fn(&BatchFlight) -> bool) -> Vec<Arc<BatchFlight>> {
        self.lock().batches.values().filter(|batch| wanted(batch)).cloned().collect()
    }

    /// Returns the unfinished calls that `wanted` selects.
    pub(crate) fn unfinished_calls(&self, wanted: impl Fn(&Flight) -> bool) -> Vec<Arc<Flight>> {
        self.lock().calls.values().filter(|flight| !flight.is_over() && wanted(flight)).cloned().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().expect("no code panics while it holds the table")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MemoryJournal;

    /// Adds a finished batch with this number of events.
    fn add_finished_batch(flights: &Flights, events: usize) -> BatchId {
        let batch = Arc::new(BatchFlight::new(Arc::new(Caller::local())));
        let recorder = Recorder::new(Arc::new(MemoryJournal::default()));
        for _ in 0..events {
            let body = Body::CallWarning { message: String::new() };
            recorder.append(&batch.subject, body, Timestamp::now(), Some(&batch.log)).expect("memory takes everything");
        }
        flights.add_batch(Arc::clone(&batch));
        flights.finish_batch(batch.id);
        batch.id
    }

    fn remembered(flights: &Flights, batches: &[BatchId]) -> Vec<bool> {
        batches.iter().map(|id| flights.batch(*id).is_some()).collect()
    }

    #[test]
    fn finished_batches_are_remembered_up_to_a_number_of_events() {
        // Two calls allow eight events.
        let flights = Flights::new(2);
        let batches = [add_finished_batch(&flights, 3), add_finished_batch(&flights, 5)];
        assert_eq!(remembered(&flights, &batches), [true, true], "just as many as may be");
        let batches = [batches[0], batches[1], add_finished_batch(&flights, 1)];
        assert_eq!(remembered(&flights, &batches), [false, true, true], "the oldest goes");
        let batches = [batches[1], batches[2], add_finished_batch(&flights, 7), add_finished_batch(&flights, 1)];
        assert_eq!(remembered(&flights, &batches), [false, false, true, true], "as many go as must");
    }

    #[test]
    fn the_last_batch_is_remembered_however_large_it_is() {
        let flights = Flights::new(2);
        let large = add_finished_batch(&flights, 100);
        assert_eq!(remembered(&flights, &[large]), [true]);
        let next = Arc::new(BatchFlight::new(Arc::new(Caller::local())));
        flights.add_batch(Arc::clone(&next));
        assert_eq!(remembered(&flights, &[large, next.id]), [false, true], "until another begins");
        let small = add_finished_batch(&flights, 0);
        assert_eq!(remembered(&flights, &[large, small]), [false, true]);
        let others: Vec<BatchId> = (0..7).map(|_| add_finished_batch(&flights, 1)).collect();
        assert_eq!(remembered(&flights, &[small]), [true], "what went is not counted any more");
        assert_eq!(remembered(&flights, &others), [true; 7]);
        add_finished_batch(&flights, 0);
        assert_eq!(remembered(&flights, &[small]), [false], "one without events counts too");
    }
}

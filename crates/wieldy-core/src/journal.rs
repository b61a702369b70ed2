//! The journal: the one place that puts events in order.
//!
//! Every event goes through [`Recorder::append`], which numbers it, hands it to the [`Journal`] and only then
//! publishes it to subscribers. So the history and the subscribers have the same events in the same order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc};

use crate::BoxFuture;
use crate::call::{Caller, ExecutionId, ToolResult};
use crate::error::{CallError, Code};
use crate::event::{Body, CallState, Event, Keyed, Subject};
use crate::notes::{DueNotes, Notes, Point};
use crate::observe::Log;

/// A store for the history of all calls: an append-only log of events.
pub trait Journal: Send + Sync + 'static {
    /// Appends the event to the history, after all events before it. Returns at once. A refused event counts as if it
    /// never happened.
    fn append(&self, event: &Arc<Event>) -> Receipt;

    /// Waits until the event of this number, and every event before it, would survive a crash. An error means that
    /// the event cannot be made durable for now: it is accepted, and is written as soon as that is possible again.
    fn wait_until_stored(&self, seq: u64) -> BoxFuture<'_, Result<(), JournalError>> {
        let _ = seq;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Returns true if the journal stores [`Closing::recorded`](crate::Closing::recorded). Otherwise it is not made.
    fn stores_results(&self) -> bool {
        false
    }

    /// Returns the pending notes, if the journal keeps them: it passes each event to [`Notes::apply_event`], also those
    /// of other executors on the same history.
    fn notes(&self) -> Option<&Notes> {
        None
    }

    /// Returns the notes of this caller that are due at this point. They are lent to one result. Called at the end of
    /// every call, so it must be fast: by default it reads one number unless there are notes.
    fn due(&self, caller: &Caller, point: &Point<'_>, now: Timestamp) -> DueNotes {
        self.notes().map(|notes| notes.due(caller, point, now)).unwrap_or_default()
    }

    /// Returns the number of the next event: one more than that of the last accepted event.
    fn next_seq(&self) -> u64;

    /// Claims an idempotency key for a call, before the call runs. The claim ends with the closing event of the call,
    /// or with the process. Returns without waiting for another call that holds the key. A journal of a single executor
    /// grants every claim, because the executor itself lets only one call at a time use a key.
    fn claim(&self, claim: Claim) -> BoxFuture<'_, Result<Claimed, JournalError>> {
        let _ = claim;
        Box::pin(std::future::ready(Ok(Claimed::Granted)))
    }

    /// Returns the results and open calls of earlier executors. Called once, when the executor is built.
    fn remembered(&self) -> Remembered {
        Remembered::default()
    }
}

/// A request to run a call under an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The key, see [`Keyed::key`].
    pub key: String,
    /// The id of the call.
    pub execution: ExecutionId,
}

/// The answer to a [`Claim`].
#[derive(Debug, Clone, PartialEq)]
pub enum Claimed {
    /// No other executor runs a call under the key now, or will before this call is closed.
    Granted,
    /// Another call holds the key and is not closed yet.
    Taken,
    /// An earlier call ran under the key; this is its result.
    Answered(Box<RememberedAnswer>),
}

/// The durability of an event that was appended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Receipt {
    /// The event would survive a crash.
    Kept,
    /// The event is accepted; [`Journal::wait_until_stored`] returns once the event of this number is durable.
    Pending(u64),
    /// Like `Pending`, but the backlog of unwritten events is so long that every call must wait for it (backpressure).
    Behind(u64),
    /// The event is refused and will never be durable: it counts as if it never happened.
    Refused(JournalError),
}

/// The points at which a call waits until its records are durable. A call that may change something always waits for
/// its opening record before it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Every call waits for its opening record before it runs, and for its closing record before it is answered.
    Strict,
    /// The same for calls that may change something; a read-only call does not wait.
    #[default]
    Effects,
    /// No call waits for its closing record.
    Relaxed,
}

impl Durability {
    /// Returns true if a call waits for its opening record before it runs.
    pub(crate) fn waits_to_run(self, opening: &Receipt, read_only: bool) -> bool {
        match opening {
            Receipt::Kept | Receipt::Refused(_) => false,
            Receipt::Behind(_) => true,
            Receipt::Pending(_) => self == Self::Strict || !read_only,
        }
    }

    /// Returns true if a call waits for its closing record before it is answered.
    pub(crate) fn waits_to_answer(self, closing: &Receipt, read_only: bool) -> bool {
        match closing {
            Receipt::Kept | Receipt::Refused(_) => false,
            Receipt::Behind(_) => true,
            Receipt::Pending(_) => self == Self::Strict || self == Self::Effects && !read_only,
        }
    }
}

/// The results and open calls that earlier executors left in the history.
#[derive(Debug, Default)]
pub struct Remembered {
    /// Results that clients may still ask for: of tasks, and of calls with idempotency keys.
    pub answers: Vec<RememberedAnswer>,
    /// Calls that were open when their executor stopped, and whose caller asked to run them again.
    pub interrupted: Vec<Interrupted>,
}

/// A result that a client may still ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct RememberedAnswer {
    /// The result, without its secrets.
    pub result: ToolResult,
    /// The tenant that owns the result: the caller's [`Caller::tenant_hash`].
    pub tenant: Option<String>,
    /// True if clients ask for the result as that of a task.
    pub task: bool,
    /// The idempotency key under which clients ask for the result.
    pub keyed: Option<Keyed>,
}

/// A call whose executor stopped while the call was open.
#[derive(Debug, Clone, PartialEq)]
pub struct Interrupted {
    /// The id of the call, which stays the same.
    pub execution: ExecutionId,
    /// The name of the tool.
    pub tool: String,
    /// The arguments of the call.
    pub arguments: Value,
    /// The caller's own id of the call.
    pub call_id: Option<String>,
    /// The caller, with the permissions and scopes that it held.
    pub caller: Caller,
    /// The time at which the call was accepted.
    pub opened_at: Timestamp,
    /// The state of the call when its executor stopped.
    pub state: CallState,
    /// True if the call is a task.
    pub task: bool,
}

impl Receipt {
    /// Fails if the event was refused, and so never happened.
    pub(crate) fn taken(self) -> Result<(), JournalError> {
        match self {
            Self::Refused(error) => Err(error),
            Self::Kept | Self::Pending(_) | Self::Behind(_) => Ok(()),
        }
    }
}

/// The reason why the history could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot write the journal: {0}")]
pub struct JournalError(pub String);

impl From<JournalError> for CallError {
    fn from(error: JournalError) -> Self {
        CallError::new(Code::JournalFailed, error.to_string())
            .suggest("nothing was run; check the journal's disk or database and try again")
    }
}

/// A journal in memory that forgets the oldest events, for programs that need no history. The default keeps few
/// events, so that they stay in the processor's caches. It keeps the notes of all events.
#[derive(Debug)]
pub struct MemoryJournal {
    events: Mutex<VecDeque<Arc<Event>>>,
    events_max: usize,
    notes: Notes,
}

impl MemoryJournal {
    /// Creates a journal that keeps the last `events_max` events.
    pub fn new(events_max: usize) -> Self {
        Self { events: Mutex::new(VecDeque::new()), events_max, notes: Notes::default() }
    }

    /// Returns the stored events, oldest first.
    pub fn events(&self) -> Vec<Arc<Event>> {
        self.events.lock().expect("no code panics while it holds the events").iter().cloned().collect()
    }
}

impl Default for MemoryJournal {
    fn default() -> Self {
        Self::new(64)
    }
}

impl Journal for MemoryJournal {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        self.notes.apply_event(event);
        let mut events = self.events.lock().expect("no code panics while it holds the events");
        if events.len() >= self.events_max {
            events.pop_front();
        }
        events.push_back(Arc::clone(event));
        Receipt::Kept
    }

    fn notes(&self) -> Option<&Notes> {
        Some(&self.notes)
    }

    fn next_seq(&self) -> u64 {
        self.events.lock().expect("no code panics while it holds the events").back().map_or(1, |last| last.seq + 1)
    }
}

/// The recorder of events: numbers, writes and publishes them, one after the other.
pub(crate) struct Recorder {
    journal: Arc<dyn Journal>,
    bus: Bus,
    next_seq: Mutex<u64>,
}

impl Recorder {
    pub(crate) fn new(journal: Arc<dyn Journal>) -> Self {
        let next_seq = Mutex::new(journal.next_seq());
        Self { journal, bus: Bus::default(), next_seq }
    }

    /// Appends one event to the history and to its batch's log, and publishes it to all subscribers. A refused event
    /// counts as if it never happened.
    pub(crate) fn append(
        &self,
        subject: &Arc<Subject>,
        body: Body,
        at: Timestamp,
        batch: Option<&Log>,
    ) -> Result<(Arc<Event>, Receipt), JournalError> {
        let mut next_seq = self.next_seq.lock().expect("no code panics while it holds the line");
        let event = Arc::new(Event { seq: *next_seq, at, subject: Arc::clone(subject), body });
        // A journal is foreign code: its panic must not poison the lock.
        let receipt = catch_unwind(AssertUnwindSafe(|| self.journal.append(&event)))
            .unwrap_or_else(|_| Receipt::Refused(JournalError("the journal panicked".into())));
        if let Receipt::Refused(error) = receipt {
            return Err(error);
        }
        *next_seq += 1;
        if let Some(log) = batch {
            log.push(Arc::clone(&event));
        }
        self.bus.publish(&event);
        Ok((event, receipt))
    }

    /// Waits until the event of this receipt is durable.
    pub(crate) async fn wait_until_stored(&self, receipt: Receipt) -> Result<(), JournalError> {
        match receipt {
            Receipt::Kept => Ok(()),
            Receipt::Refused(error) => Err(error),
            Receipt::Pending(seq) | Receipt::Behind(seq) => self.journal.wait_until_stored(seq).await,
        }
    }

    /// Claims an idempotency key.
    pub(crate) async fn claim(&self, claim: Claim) -> Result<Claimed, JournalError> {
        self.journal.claim(claim).await
    }

    pub(crate) fn stores_results(&self) -> bool {
        self.journal.stores_results()
    }

    pub(crate) fn journal(&self) -> &dyn Journal {
        &*self.journal
    }

    pub(crate) fn bus(&self) -> &Bus {
        &self.bus
    }
}

/// The events that a subscriber wants. A field that is `None` matches every event.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// The beginning of the event's name, such as `tool.retry`.
    pub name_prefix: Option<String>,
    /// The tool's name.
    pub tool: Option<String>,
    /// The caller's session.
    pub session: Option<String>,
    /// The caller's tenant.
    pub tenant: Option<String>,
    /// The id of one call.
    pub execution: Option<ExecutionId>,
}

impl Filter {
    /// Returns true if the event matches the filter.
    pub fn wants(&self, event: &Event) -> bool {
        let subject = &event.subject;
        let equal = |wanted: &Option<String>, actual: &Option<String>| wanted.is_none() || wanted == actual;
        self.name_prefix.as_ref().is_none_or(|prefix| event.body.name().starts_with(prefix.as_str()))
            && (self.tool.is_none() || self.tool.as_deref() == subject.tool.as_deref())
            && equal(&self.session, &subject.caller.session)
            && equal(&self.tenant, &subject.caller.tenant)
            && (self.execution.is_none() || self.execution == subject.execution)
    }
}

/// An item that a subscriber or observer receives.
#[derive(Debug, Clone, PartialEq)]
pub enum Seen {
    /// An event.
    Event(Arc<Event>),
    /// The number of events that were lost here, because this listener was too slow.
    Missed(u64),
}

/// A bus that publishes events to subscribers. A slow one loses only its own events, and never slows the engine down.
#[derive(Default)]
pub(crate) struct Bus {
    subscribers: Arc<RwLock<Vec<Arc<Subscriber>>>>,
    count: AtomicUsize,
}

struct Subscriber {
    filter: Filter,
    /// Each event with the number of events lost just before it.
    queue: mpsc::Sender<(u64, Arc<Event>)>,
    missed: Arc<AtomicU64>,
}

impl Bus {
    pub(crate) fn subscribe(&self, filter: Filter, capacity: usize) -> Subscription {
        let (queue, events) = mpsc::channel(capacity.clamp(1, Semaphore::MAX_PERMITS));
        let missed = Arc::new(AtomicU64::new(0));
        let subscriber = Arc::new(Subscriber { filter, queue, missed: Arc::clone(&missed) });
        let mut subscribers = self.subscribers.write().expect("no code panics while it holds the list");
        subscribers.retain(|subscriber| !subscriber.queue.is_closed());
        subscribers.push(subscriber);
        self.count.store(subscribers.len(), Ordering::Release);
        Subscription { events, missed, held: None }
    }

    fn publish(&self, event: &Arc<Event>) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let subscribers = self.subscribers.read().expect("no code panics while it holds the list");
        for subscriber in subscribers.iter().filter(|subscriber| subscriber.filter.wants(event)) {
            match subscriber.queue.try_reserve() {
                Ok(place) => place.send((subscriber.missed.swap(0, Ordering::AcqRel), Arc::clone(event))),
                Err(mpsc::error::TrySendError::Full(())) => {
                    subscriber.missed.fetch_add(1, Ordering::AcqRel);
                }
                Err(mpsc::error::TrySendError::Closed(())) => {} // dropped; the next subscription removes it
            }
        }
    }
}

/// One subscriber's end of the bus. Dropping it ends the subscription.
#[derive(Debug)]
pub struct Subscription {
    events: mpsc::Receiver<(u64, Arc<Event>)>,
    missed: Arc<AtomicU64>,
    held: Option<Arc<Event>>,
}

impl Subscription {
    /// Returns the next event, or the number of lost events. Returns `None` once the executor is gone.
    pub async fn next(&mut self) -> Option<Seen> {
        if let Some(event) = self.held.take() {
            return Some(Seen::Event(event));
        }
        if let Some(seen) = self.try_next() {
            return Some(seen);
        }
        let received = self.events.recv().await?;
        Some(self.unpack(received))
    }

    /// Returns the next event that is already there, without waiting.
    pub fn try_next(&mut self) -> Option<Seen> {
        if let Some(event) = self.held.take() {
            return Some(Seen::Event(event));
        }
        match self.events.try_recv() {
            Ok(received) => Some(self.unpack(received)),
            // The queue is empty, so these events were lost after everything that was in it.
            Err(_) => match self.missed.swap(0, Ordering::AcqRel) {
                0 => None,
                missed => Some(Seen::Missed(missed)),
            },
        }
    }

    fn unpack(&mut self, (missed, event): (u64, Arc<Event>)) -> Seen {
        if missed == 0 {
            return Seen::Event(event);
        }
        self.held = Some(event);
        Seen::Missed(missed)
    }
}

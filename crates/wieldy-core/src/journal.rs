//! The journal: the one place that puts what happened in order.
//!
//! Every event goes through [`Recorder::append`], which gives it its number, hands it to the [`Journal`] and
//! only then shows it to whoever listens. So the history and what listeners saw are the same, in the same order.

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
use crate::observe::Log;

/// Keeps the history.
pub trait Journal: Send + Sync + 'static {
    /// Takes the event into the history, after all events before it. Returns at once. An event that is refused
    /// never happened.
    fn append(&self, event: &Arc<Event>) -> Receipt;

    /// Waits until the event of this number, and every one before it, would survive a crash. An error says that it
    /// cannot be made safe for now; it was taken, and is written as soon as that is possible again.
    fn kept(&self, seq: u64) -> BoxFuture<'_, Result<(), JournalError>> {
        let _ = seq;
        Box::pin(std::future::ready(Ok(())))
    }

    /// The number that the next event gets: one more than the last one taken.
    fn next_seq(&self) -> u64;

    /// Claims an idempotency key for a call, before the call runs. The claim ends with the closing event of the call, or
    /// with the process. Returns without waiting for another call that holds the key. A journal that belongs to one executor
    /// grants every claim, because the executor itself lets one call at a time have a key.
    fn claim(&self, claim: Claim) -> BoxFuture<'_, Result<Claimed, JournalError>> {
        let _ = claim;
        Box::pin(std::future::ready(Ok(Claimed::Granted)))
    }

    /// What earlier executors left for this one; asked once, when the executor is built.
    fn remembered(&self) -> Remembered {
        Remembered::default()
    }
}

/// A call that wants to run under an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// [`Keyed::key`].
    pub key: String,
    /// The call.
    pub execution: ExecutionId,
}

/// The answer to a [`Claim`].
#[derive(Debug, Clone, PartialEq)]
pub enum Claimed {
    /// No other executor runs the key now, or will before this call is closed.
    Granted,
    /// Another call holds the key and is not closed yet.
    Taken,
    /// An earlier call ran under the key.
    Answered(Box<RememberedAnswer>),
}

/// Tells how safe an event is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Receipt {
    /// It would survive a crash.
    Kept,
    /// It was taken; [`Journal::kept`] tells when the event of this number is safe.
    Pending(u64),
    /// The same, but so much waits to be written that everybody should wait for it: the history is behind.
    Behind(u64),
    /// It never will be: it did not happen.
    Refused(JournalError),
}

/// When a call waits for its records to be safe. What may change something is always safe in the history before it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Every call runs after its opening is safe, and is answered after its closing is.
    Strict,
    /// The same for calls that may change something; a read-only call waits for nothing.
    #[default]
    Effects,
    /// No answer waits for its closing.
    Relaxed,
}

impl Durability {
    /// Whether a call waits for its opening before it runs.
    pub(crate) fn waits_to_run(self, opening: &Receipt, read_only: bool) -> bool {
        match opening {
            Receipt::Kept | Receipt::Refused(_) => false,
            Receipt::Behind(_) => true,
            Receipt::Pending(_) => self == Self::Strict || !read_only,
        }
    }

    /// Whether a call waits for its closing before it is answered.
    pub(crate) fn waits_to_answer(self, closing: &Receipt, read_only: bool) -> bool {
        match closing {
            Receipt::Kept | Receipt::Refused(_) => false,
            Receipt::Behind(_) => true,
            Receipt::Pending(_) => self == Self::Strict || self == Self::Effects && !read_only,
        }
    }
}

/// What earlier executors left in the history for the one that is being built.
#[derive(Debug, Default)]
pub struct Remembered {
    /// Results that somebody may still ask for: of tasks, and of calls with idempotency keys.
    pub answers: Vec<RememberedAnswer>,
    /// Calls that were open when their executor stopped, and whose caller wanted them to be run again.
    pub interrupted: Vec<Interrupted>,
}

/// A result that somebody may still ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct RememberedAnswer {
    /// The result, as far as it may be written down.
    pub result: ToolResult,
    /// Whose it is: [`Caller::tenant_hash`] of whoever called.
    pub tenant: Option<String>,
    /// Whether it is asked for as a task.
    pub task: bool,
    /// The idempotency key that it is asked for by.
    pub keyed: Option<Keyed>,
}

/// A call whose executor stopped while it was open.
#[derive(Debug, Clone, PartialEq)]
pub struct Interrupted {
    /// Its id, which it keeps.
    pub execution: ExecutionId,
    /// The call.
    pub tool: String,
    /// What it was called with.
    pub arguments: Value,
    /// The caller's own id.
    pub call_id: Option<String>,
    /// On whose behalf, with everything that was held.
    pub caller: Caller,
    /// When it was accepted.
    pub opened_at: Timestamp,
    /// Where it stood.
    pub state: CallState,
    /// Whether it is a task.
    pub task: bool,
}

impl Receipt {
    /// Fails where the event was refused, and so never happened.
    pub(crate) fn taken(self) -> Result<(), JournalError> {
        match self {
            Self::Refused(error) => Err(error),
            Self::Kept | Self::Pending(_) | Self::Behind(_) => Ok(()),
        }
    }
}

/// Why the history could not be written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot write the journal: {0}")]
pub struct JournalError(pub String);

impl From<JournalError> for CallError {
    fn from(error: JournalError) -> Self {
        CallError::new(Code::JournalFailed, error.to_string())
            .suggest("nothing was run; look at the journal's disk or database and try again")
    }
}

/// A journal in memory that forgets the oldest events: for programs that need no history. The default keeps few, so
/// that they stay in the processor's caches.
#[derive(Debug)]
pub struct MemoryJournal {
    events: Mutex<VecDeque<Arc<Event>>>,
    events_max: usize,
}

impl MemoryJournal {
    /// A journal that keeps the last `events_max` events.
    pub fn new(events_max: usize) -> Self {
        Self { events: Mutex::new(VecDeque::new()), events_max }
    }

    /// What is kept, oldest first.
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
        let mut events = self.events.lock().expect("no code panics while it holds the events");
        if events.len() >= self.events_max {
            events.pop_front();
        }
        events.push_back(Arc::clone(event));
        Receipt::Kept
    }

    fn next_seq(&self) -> u64 {
        self.events.lock().expect("no code panics while it holds the events").back().map_or(1, |last| last.seq + 1)
    }
}

/// Numbers events, writes them and shows them, one after the other.
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

    /// Puts one event into the history, its batch's log and before all subscribers. What is refused never happened.
    pub(crate) fn append(
        &self,
        subject: &Arc<Subject>,
        body: Body,
        at: Timestamp,
        batch: Option<&Log>,
    ) -> Result<(Arc<Event>, Receipt), JournalError> {
        let mut next_seq = self.next_seq.lock().expect("no code panics while it holds the line");
        let event = Arc::new(Event { seq: *next_seq, at, subject: Arc::clone(subject), body });
        // A journal is foreign code, and its panic must not take the line with it.
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

    /// Waits until what the receipt stands for is safe.
    pub(crate) async fn kept(&self, receipt: Receipt) -> Result<(), JournalError> {
        match receipt {
            Receipt::Kept => Ok(()),
            Receipt::Refused(error) => Err(error),
            Receipt::Pending(seq) | Receipt::Behind(seq) => self.journal.kept(seq).await,
        }
    }

    /// Claims an idempotency key.
    pub(crate) async fn claim(&self, claim: Claim) -> Result<Claimed, JournalError> {
        self.journal.claim(claim).await
    }

    pub(crate) fn bus(&self) -> &Bus {
        &self.bus
    }
}

/// Which events a subscriber wants; what is not set does not matter.
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
    /// One call.
    pub execution: Option<ExecutionId>,
}

impl Filter {
    /// Whether the event is wanted.
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

/// What a subscriber or observer gets.
#[derive(Debug, Clone, PartialEq)]
pub enum Seen {
    /// Something happened.
    Event(Arc<Event>),
    /// So many events were lost here, because this listener was too slow.
    Missed(u64),
}

/// Shows events to subscribers. A slow one loses its own events, never anybody else's, and never slows the engine.
#[derive(Default)]
pub(crate) struct Bus {
    subscribers: Arc<RwLock<Vec<Arc<Subscriber>>>>,
    count: AtomicUsize,
}

struct Subscriber {
    filter: Filter,
    /// Each event with the number of those lost just before it.
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
                Err(mpsc::error::TrySendError::Closed(())) => {} // dropped; the next subscription sweeps it out
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
    /// The next event, or how many were lost. `None` once the executor is gone.
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

    /// What is there already, without waiting.
    pub fn try_next(&mut self) -> Option<Seen> {
        if let Some(event) = self.held.take() {
            return Some(Seen::Event(event));
        }
        match self.events.try_recv() {
            Ok(received) => Some(self.unpack(received)),
            // The queue is empty: what was lost was lost after everything that was in it.
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

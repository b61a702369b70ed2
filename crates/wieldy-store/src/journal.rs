//! The journal of an executor.
//!
//! The thread that causes an event makes its record and puts it into the queue. If a caller waits for the record, the
//! WAL thread makes it durable in the [write-ahead log](crate::wal) and notifies the caller; one sync of the disk
//! serves all callers that wait. The committer thread ([`crate::committer`]) commits it to the database a little later,
//! together with newer records. Where there is no log (on a server), or the log takes nothing just now, a record is
//! durable when it is committed.
//!
//! Records that cannot be committed are held, in order, and retried until that works. Meanwhile waiting callers get an
//! error, no call is opened, and running calls go on: their records are held too.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use wieldy_core::{Body, BoxFuture, Claim, Claimed, Event, ExecutionId, Journal, JournalError, Receipt, Remembered};

use crate::claim::Claiming;
use crate::committer::{Filer, GROUP_ENOUGH, GROUP_MAX};
use crate::error::StoreError;
use crate::hash_chain::Record;
use crate::wal::Log;

/// The number of uncommitted records from which on callers have to wait (backpressure).
const BEHIND: usize = 8 * GROUP_MAX;
/// Maximum number of bytes of records that are held while they cannot be committed. Later ones are refused.
const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;
/// The longest time that waiting callers wait for others to share a sync.
const TOGETHER: Duration = Duration::from_millis(5);
/// The pause before a log that could not be written is tried again.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// The longest time that a query waits until durable records are committed.
const ASKING: Duration = Duration::from_secs(2);
/// Maximum number of bytes of one call's printed text that are stored. Later text is only counted.
const PRINTED_BYTES_MAX: usize = 64 * 1024;

/// The journal of an executor, stored in a database. Dropping it writes the remaining records and ends the instance.
pub struct StoreJournal {
    shared: Arc<Shared>,
    /// State of the calls that are not closed.
    open: Mutex<Open>,
    remembered: Mutex<Remembered>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// State of the calls that are not closed.
#[derive(Default)]
struct Open {
    /// The bytes of text that each has printed into the trail.
    printed: HashMap<ExecutionId, usize>,
    /// The idempotency key that each has claimed.
    claimed: HashMap<ExecutionId, String>,
}

/// The state that callers share with the threads of the journal.
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    /// Wake the committer thread and the WAL thread.
    pub(crate) filer: Condvar,
    logger: Condvar,
    /// Signals that records were committed.
    filed: Condvar,
    pub(crate) has_log: bool,
}

/// Waiting callers, each with the number of the event that it waits for.
type Waiting = Vec<(u64, oneshot::Sender<Result<(), JournalError>>)>;

/// The queue of records that are not committed yet.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) records: VecDeque<Arc<Record>>,
    /// The approximate size of these records in bytes.
    pub(crate) bytes: usize,
    /// The number of the last event that was accepted.
    taken: u64,
    /// The number of the last event that is durable.
    pub(crate) kept: u64,
    /// The number of the last event that is committed.
    pub(crate) filed: u64,
    /// Callers that wait until an event is durable, and callers that wait until it is committed.
    waiting: Waiting,
    flushing: Waiting,
    /// Claims that are not answered yet.
    pub(crate) claims: Vec<Claiming>,
    /// The number of waiting callers that wakes the thread which makes events durable. It also wakes by itself a little
    /// later.
    pub(crate) worth_waking: usize,
    /// True if the committer thread sleeps and must be woken for any record.
    pub(crate) is_asleep: bool,
    /// True if the log takes nothing just now: it is full, or cannot be written.
    is_stuck: bool,
    /// The reason why nothing can be committed just now.
    pub(crate) trouble: Option<JournalError>,
    /// The reason why records were given up that are not even in the log.
    pub(crate) lost: Option<JournalError>,
    pub(crate) closing: bool,
    pub(crate) forsaken: bool,
}

impl Shared {
    pub(crate) fn new(has_log: bool) -> Self {
        let [filer, logger, filed] = [const { Condvar::new() }; 3];
        Self { queue: Mutex::default(), filer, logger, filed, has_log }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no code panics while it holds the queue")
    }

    /// Sets the number of waiting callers that wakes the committer, if callers wait for the committer.
    pub(crate) fn wake_for(&self, queue: &mut Queue, count: usize) {
        if !self.has_log {
            queue.worth_waking = count;
        }
    }

    /// Returns the number of callers that wait for a commit.
    pub(crate) fn waiting(&self, queue: &Queue) -> usize {
        queue.flushing.len() + if self.has_log && !queue.is_stuck { 0 } else { queue.waiting.len() }
    }

    /// Takes note of committed records and notifies the callers that waited for them. Returns the number of these
    /// callers.
    pub(crate) fn note_filed(&self, count: usize, seq: u64) -> usize {
        let mut queue = self.lock();
        let count = count.min(queue.records.len());
        let bytes = queue.records.drain(..count).map(|record| bytes_of(&record)).sum::<usize>();
        queue.bytes = queue.bytes.saturating_sub(bytes);
        queue.trouble = None;
        queue.filed = seq;
        queue.kept = queue.kept.max(seq);
        let filed: Vec<_> = queue.flushing.extract_if(.., |(wanted, _)| *wanted <= seq).collect();
        if queue.is_stuck {
            self.logger.notify_one();
        }
        self.filed.notify_all();
        tell_kept(queue) + tell(filed)
    }

    /// Reports to waiting and later callers why nothing can be committed.
    pub(crate) fn tell_trouble(&self, error: &StoreError) {
        let trouble = JournalError(error.to_string());
        let mut queue = self.lock();
        queue.tell_all(&trouble);
        queue.trouble = Some(trouble);
        self.filed.notify_all();
    }

    /// Waits until all accepted records are committed, so that a query finds all calls that were answered before,
    /// read-only ones included. Gives up after a while, or while nothing can be committed.
    pub(crate) fn catch_up(&self) {
        let began = Instant::now();
        let mut queue = self.lock();
        let taken = queue.taken;
        if queue.filed < taken {
            queue.flushing.push((taken, oneshot::channel().0));
            self.filer.notify_one();
        }
        while queue.filed < taken && queue.trouble.is_none() && !queue.forsaken && began.elapsed() < ASKING {
            queue = wait(&self.filed, queue, ASKING);
        }
    }
}

/// Waits for a notification, at most for `patience`.
pub(crate) fn wait<'a>(bell: &Condvar, queue: MutexGuard<'a, Queue>, patience: Duration) -> MutexGuard<'a, Queue> {
    bell.wait_timeout(queue, patience).expect("no code panics while it holds the queue").0
}

/// Notifies the callers whose records are durable now, and returns their number.
fn tell_kept(mut queue: MutexGuard<'_, Queue>) -> usize {
    let kept = queue.kept;
    let safe = queue.waiting.extract_if(.., |(seq, _)| *seq <= kept).collect();
    // A notified caller needs the queue at once.
    drop(queue);
    tell(safe)
}

fn tell(those: Waiting) -> usize {
    let count = those.len();
    for (_, tell) in those {
        let _ = tell.send(Ok(()));
    }
    count
}

impl Queue {
    /// Refuses all records from here on, and fails the callers that wait for records which will not be committed.
    pub(crate) fn shut(&mut self, why: &str) {
        let trouble = self.trouble.get_or_insert_with(|| JournalError(why.into())).clone();
        self.records.clear();
        self.bytes = usize::MAX;
        self.tell_all(&trouble);
    }

    fn tell_all(&mut self, trouble: &JournalError) {
        for (_, tell) in self.waiting.drain(..).chain(self.flushing.drain(..)) {
            let _ = tell.send(Err(trouble.clone()));
        }
        for (_, tell) in self.claims.drain(..) {
            let _ = tell.send(Err(trouble.clone()));
        }
    }
}

/// A guard that fails all waiting callers if its thread panics.
pub(crate) struct Going<'a>(pub(crate) &'a Shared);

impl Drop for Going<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.0.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            queue.shut("the journal's writer is gone");
        }
    }
}

/// The size and the duration of the last group.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// The number of callers that were notified.
    pub(crate) told: usize,
    pub(crate) took: Duration,
}

impl Pace {
    /// Returns the time for which waiting callers wait for others. Most callers of the last group come back at once,
    /// and if the first were served alone, the others would wait for its sync.
    pub(crate) fn patience(&self, waiting: usize) -> Duration {
        if waiting < self.told { self.took.mul_f64(0.25).min(TOGETHER) } else { Duration::ZERO }
    }
}

impl StoreJournal {
    pub(crate) fn start(filer: Filer, log: Option<Log>, remembered: Remembered) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared::new(log.is_some()));
        let threads = Mutex::default();
        let journal = Self { shared, open: Mutex::default(), remembered: Mutex::new(remembered), threads };
        journal.spawn("wieldy-journal", move |shared| filer.run(shared))?;
        if let Some(log) = log {
            journal.spawn("wieldy-log", move |shared| Logger { log, pace: Pace::default() }.run(shared))?;
        }
        Ok(journal)
    }

    fn spawn(&self, name: &str, run: impl FnOnce(&Shared) + Send + 'static) -> Result<(), StoreError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            let _going = Going(&shared);
            run(&shared);
        });
        let thread =
            thread.map_err(|error| StoreError::Unavailable(format!("cannot start the journal's thread: {error}")))?;
        self.threads.lock().expect("no code panics while it holds the threads").push(thread);
        Ok(())
    }

    /// Returns the queue state, for readers that wait until their records are committed.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits until all accepted records are committed: durable, and found by queries.
    pub async fn flush(&self) -> Result<(), JournalError> {
        let told = {
            let mut queue = self.shared.lock();
            if queue.filed >= queue.taken {
                return Ok(());
            }
            if let Some(trouble) = &queue.trouble {
                return Err(trouble.clone());
            }
            let (tell, told) = oneshot::channel();
            let taken = queue.taken;
            queue.flushing.push((taken, tell));
            told
        };
        self.shared.filer.notify_one();
        told.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Writes the remaining records and ends the instance, even if the journal is still referenced. It accepts no
    /// records afterwards. Blocks.
    pub fn close(&self) {
        self.shared.lock().closing = true;
        self.join();
    }

    /// Returns why records were lost, if any were. To be called after [`StoreJournal::close`].
    pub fn lost(&self) -> Option<JournalError> {
        self.shared.lock().lost.clone()
    }

    /// Stops writing as if the process had been killed, for tests of recovery.
    #[doc(hidden)]
    pub fn forsake(&self) {
        self.shared.lock().forsaken = true;
        self.join();
    }

    fn join(&self) {
        self.shared.filer.notify_one();
        self.shared.logger.notify_one();
        let threads = std::mem::take(&mut *self.threads.lock().expect("no code panics while it holds the threads"));
        for thread in threads {
            let _ = thread.join();
        }
    }

    /// Returns the record of an event. Of a call's printed text only the beginning is stored.
    fn record(&self, event: &Event) -> Record {
        let mut record = Record::of(event);
        let Some(id) = event.subject.execution else { return record };
        let open = || self.open.lock().expect("no code panics while it holds the open calls");
        match &event.body {
            Body::CallProgress { message: Some(message), .. } => {
                let mut open = open();
                let bytes = open.printed.entry(id).or_default();
                *bytes += message.len();
                if *bytes > PRINTED_BYTES_MAX {
                    let mut data = event.data();
                    data["message"] = serde_json::json!(format!("[{} bytes not kept]", message.len()));
                    record.data = data.to_string();
                }
            }
            body if body.closing().is_some() => {
                let mut open = open();
                open.printed.remove(&id);
                record.released = open.claimed.remove(&id);
            }
            _ => {}
        }
        record
    }

    /// Returns why nothing can be committed just now, if there is a problem.
    pub fn trouble(&self) -> Option<JournalError> {
        self.shared.lock().trouble.clone()
    }
}

impl Journal for StoreJournal {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        let record = Arc::new(self.record(event));
        let mut queue = self.shared.lock();
        // Running calls go on as long as there is space for their records. No call is opened that could not be
        // recorded.
        if let Some(trouble) = &queue.trouble
            && (matches!(event.body, Body::CallPending { .. }) || queue.bytes > HELD_BYTES_MAX)
        {
            return Receipt::Refused(trouble.clone());
        }
        queue.bytes = queue.bytes.saturating_add(bytes_of(&record));
        queue.taken = event.seq;
        queue.records.push_back(record);
        let is_behind = queue.records.len() > BEHIND;
        let wakes = std::mem::take(&mut queue.is_asleep) || queue.records.len() == GROUP_ENOUGH;
        // A woken thread needs the queue at once.
        drop(queue);
        if wakes {
            self.shared.filer.notify_one();
        }
        if is_behind { Receipt::Behind(event.seq) } else { Receipt::Pending(event.seq) }
    }

    fn kept(&self, seq: u64) -> BoxFuture<'_, Result<(), JournalError>> {
        let mut queue = self.shared.lock();
        if queue.kept >= seq {
            return Box::pin(std::future::ready(Ok(())));
        }
        if let Some(trouble) = &queue.trouble {
            return Box::pin(std::future::ready(Err(trouble.clone())));
        }
        let (tell, told) = oneshot::channel();
        queue.waiting.push((seq, tell));
        let wakes = queue.waiting.len() >= queue.worth_waking;
        let bell = if self.shared.has_log && !queue.is_stuck { &self.shared.logger } else { &self.shared.filer };
        drop(queue);
        if wakes {
            bell.notify_one();
        }
        Box::pin(async move { told.await.unwrap_or_else(|_| Err(gone())) })
    }

    fn claim(&self, claim: Claim) -> BoxFuture<'_, Result<Claimed, JournalError>> {
        let (tell, told) = oneshot::channel();
        // Noted before the claim is made, so that a call that is closed meanwhile releases the key.
        let mut open = self.open.lock().expect("no code panics while it holds the open calls");
        open.claimed.insert(claim.execution, claim.key.clone());
        drop(open);
        let mut queue = self.shared.lock();
        if let Some(trouble) = &queue.trouble {
            return Box::pin(std::future::ready(Err(trouble.clone())));
        }
        queue.claims.push((claim, tell));
        drop(queue);
        self.shared.filer.notify_one();
        Box::pin(async move { told.await.unwrap_or_else(|_| Err(gone())) })
    }

    fn next_seq(&self) -> u64 {
        self.shared.lock().taken + 1
    }

    fn remembered(&self) -> Remembered {
        std::mem::take(&mut *self.remembered.lock().expect("no code panics while it holds them"))
    }
}

impl Drop for StoreJournal {
    fn drop(&mut self) {
        self.close();
    }
}

fn gone() -> JournalError {
    JournalError("the journal's writer is gone".into())
}

/// Returns the approximate size of a record in bytes.
fn bytes_of(record: &Record) -> usize {
    512 + record.data.len() + record.answer.as_ref().map_or(0, String::len)
}

/// The WAL thread, which makes records durable for waiting callers.
struct Logger {
    log: Log,
    pace: Pace,
}

impl Logger {
    fn run(mut self, shared: &Shared) {
        while let Some(Work { records, filed, is_behind }) = self.wait_for_work(shared) {
            let began = Instant::now();
            // If the committer cannot keep up, the log must not bypass the backpressure.
            match if is_behind { Ok(false) } else { self.log.append(&records, filed) } {
                Ok(true) => {
                    let mut queue = shared.lock();
                    queue.kept = records.last().map_or(queue.kept, |last| queue.kept.max(last.instance_seq));
                    let told = tell_kept(queue);
                    self.pace = Pace { told, took: began.elapsed() };
                }
                Ok(false) => get_stuck(shared, filed),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        error,
                        "the log of this executor cannot be written; calls wait for the history itself"
                    );
                    get_stuck(shared, u64::MAX);
                }
            }
        }
    }

    /// Waits until callers wait, and as many as last time. Returns `None` when the executor ends: the remaining records
    /// are committed then.
    fn wait_for_work(&self, shared: &Shared) -> Option<Work> {
        let mut queue = shared.lock();
        let mut found = None;
        loop {
            if queue.closing || queue.forsaken {
                return None;
            }
            if queue.waiting.is_empty() {
                queue.worth_waking = 1;
                queue = shared.logger.wait(queue).expect("no code panics while it holds the queue");
                continue;
            }
            let since = found.get_or_insert_with(Instant::now).elapsed();
            let patience = self.pace.patience(queue.waiting.len()).saturating_sub(since);
            if patience.is_zero() {
                let unsafe_from = queue.records.partition_point(|record| record.instance_seq <= queue.kept);
                let records = queue.records.range(unsafe_from..).cloned().collect();
                return Some(Work { records, filed: queue.filed, is_behind: queue.records.len() > BEHIND });
            }
            queue.worth_waking = self.pace.told;
            queue = wait(&shared.logger, queue, patience);
        }
    }
}

/// Records that are to be made durable.
struct Work {
    records: Vec<Arc<Record>>,
    /// The number of the last event that is committed.
    filed: u64,
    /// True if too many records are not committed.
    is_behind: bool,
}

/// Makes waiting callers wait for commits instead of the log, until more than `filed` is committed, or for a while.
fn get_stuck(shared: &Shared, filed: u64) {
    let began = Instant::now();
    let mut queue = shared.lock();
    queue.is_stuck = true;
    shared.filer.notify_one();
    while queue.filed <= filed && began.elapsed() < LOG_PAUSE && !queue.closing && !queue.forsaken {
        queue = wait(&shared.logger, queue, LOG_PAUSE);
    }
    queue.is_stuck = false;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_waits_for_a_writer_that_panicked() {
        let shared = Arc::new(Shared::new(false));
        shared.lock().taken = 1;
        let journal =
            StoreJournal { shared, open: Mutex::default(), remembered: Mutex::default(), threads: Mutex::default() };
        let waits = journal.kept(1);
        let theirs = Arc::clone(&journal.shared);
        let thread = std::thread::spawn(move || {
            let _going = Going(&theirs);
            panic!("told to panic");
        });
        assert!(thread.join().is_err());
        let gone = gone();
        assert_eq!(waits.await, Err(gone.clone()));
        assert_eq!(journal.kept(1).await, Err(gone.clone()));
        assert_eq!(journal.trouble(), Some(gone));
        assert!(journal.shared.lock().bytes > HELD_BYTES_MAX, "nothing more is taken");
    }
}

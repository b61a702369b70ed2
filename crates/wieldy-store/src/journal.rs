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

use crate::claim::PendingClaim;
use crate::committer::{Committer, GROUP_ENOUGH, GROUP_MAX};
use crate::error::StoreError;
use crate::hash_chain::Record;
use crate::wal::Wal;

/// The number of uncommitted records from which on callers have to wait (backpressure).
const BACKLOG_MAX: usize = 8 * GROUP_MAX;
/// Maximum number of bytes of records that are held while they cannot be committed. Later ones are refused.
const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;
/// The longest time that waiting callers wait for others to share a sync.
const GATHER_MAX: Duration = Duration::from_millis(5);
/// The pause before a log that could not be written is tried again.
const WAL_RETRY: Duration = Duration::from_secs(1);
/// The longest time that a query waits until durable records are committed.
const QUERY_WAIT_MAX: Duration = Duration::from_secs(2);
/// Maximum number of bytes of one call's printed text that are stored. Later text is only counted.
const PRINTED_BYTES_MAX: usize = 64 * 1024;

/// The journal of an executor, stored in a database. Dropping it writes the remaining records and ends the instance.
pub struct StoreJournal {
    shared: Arc<JournalQueue>,
    /// State of the calls that are not closed.
    open: Mutex<OpenCalls>,
    remembered: Mutex<Remembered>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// State of the calls that are not closed.
#[derive(Default)]
struct OpenCalls {
    /// The bytes of text that each has printed into the trail.
    printed: HashMap<ExecutionId, usize>,
    /// The idempotency key that each has claimed.
    claimed: HashMap<ExecutionId, String>,
}

/// The state that callers share with the threads of the journal.
pub(crate) struct JournalQueue {
    queue: Mutex<QueueState>,
    /// Wake the committer thread and the WAL thread.
    pub(crate) wake_committer: Condvar,
    wake_wal_writer: Condvar,
    /// Signals that records were committed.
    wake_readers: Condvar,
    pub(crate) has_wal: bool,
}

/// Waiting callers, each with the number of the event that it waits for.
type Waiters = Vec<(u64, oneshot::Sender<Result<(), JournalError>>)>;

/// The queue of records that are not committed yet.
#[derive(Default)]
pub(crate) struct QueueState {
    pub(crate) records: VecDeque<Arc<Record>>,
    /// The approximate size of these records in bytes.
    pub(crate) bytes: usize,
    /// The number of the last event that was accepted.
    accepted: u64,
    /// The number of the last event that is durable.
    pub(crate) durable: u64,
    /// The number of the last event that is committed.
    pub(crate) committed: u64,
    /// Callers that wait until an event is durable, and callers that wait until it is committed.
    durability_waiters: Waiters,
    commit_waiters: Waiters,
    /// Claims that are not answered yet.
    pub(crate) claims: Vec<PendingClaim>,
    /// The number of waiting callers that wakes the thread which makes events durable. It also wakes by itself a little
    /// later.
    pub(crate) wake_threshold: usize,
    /// True if the committer thread sleeps and must be woken for any record.
    pub(crate) is_asleep: bool,
    /// True if the log takes nothing just now: it is full, or cannot be written.
    wal_suspended: bool,
    /// The reason why nothing can be committed just now.
    pub(crate) failure: Option<JournalError>,
    /// The reason why records were given up that are not even in the log.
    pub(crate) lost: Option<JournalError>,
    pub(crate) closing: bool,
    pub(crate) abandoned: bool,
}

impl JournalQueue {
    pub(crate) fn new(has_wal: bool) -> Self {
        let [wake_committer, wake_wal_writer, wake_readers] = [const { Condvar::new() }; 3];
        Self { queue: Mutex::default(), wake_committer, wake_wal_writer, wake_readers, has_wal }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.queue.lock().expect("no code panics while it holds the queue")
    }

    /// Sets the number of waiting callers that wakes the committer, if callers wait for the committer.
    pub(crate) fn set_wake_threshold(&self, queue: &mut QueueState, count: usize) {
        if !self.has_wal {
            queue.wake_threshold = count;
        }
    }

    /// Returns the number of callers that wait for a commit.
    pub(crate) fn commit_waiter_count(&self, queue: &QueueState) -> usize {
        queue.commit_waiters.len()
            + if self.has_wal && !queue.wal_suspended { 0 } else { queue.durability_waiters.len() }
    }

    /// Takes note of committed records and notifies the callers that waited for them. Returns the number of these
    /// callers.
    pub(crate) fn note_committed(&self, count: usize, seq: u64) -> usize {
        let mut queue = self.lock();
        let count = count.min(queue.records.len());
        let bytes = queue.records.drain(..count).map(|record| bytes_of(&record)).sum::<usize>();
        queue.bytes = queue.bytes.saturating_sub(bytes);
        queue.failure = None;
        queue.committed = seq;
        queue.durable = queue.durable.max(seq);
        let committed: Vec<_> = queue.commit_waiters.extract_if(.., |(wanted, _)| *wanted <= seq).collect();
        if queue.wal_suspended {
            self.wake_wal_writer.notify_one();
        }
        self.wake_readers.notify_all();
        notify_durable(queue) + notify(committed)
    }

    /// Reports to waiting and later callers why nothing can be committed.
    pub(crate) fn report_failure(&self, error: &StoreError) {
        let failure = JournalError(error.to_string());
        let mut queue = self.lock();
        queue.fail_all(&failure);
        queue.failure = Some(failure);
        self.wake_readers.notify_all();
    }

    /// Waits until all accepted records are committed, so that a query finds all calls that were answered before,
    /// read-only ones included. Gives up after a while, or while nothing can be committed.
    pub(crate) fn wait_until_committed(&self) {
        let began = Instant::now();
        let mut queue = self.lock();
        let accepted = queue.accepted;
        if queue.committed < accepted {
            queue.commit_waiters.push((accepted, oneshot::channel().0));
            self.wake_committer.notify_one();
        }
        while queue.committed < accepted
            && queue.failure.is_none()
            && !queue.abandoned
            && began.elapsed() < QUERY_WAIT_MAX
        {
            queue = wait(&self.wake_readers, queue, QUERY_WAIT_MAX);
        }
    }
}

/// Waits for a notification, at most for `patience`.
pub(crate) fn wait<'a>(
    condvar: &Condvar,
    queue: MutexGuard<'a, QueueState>,
    patience: Duration,
) -> MutexGuard<'a, QueueState> {
    condvar.wait_timeout(queue, patience).expect("no code panics while it holds the queue").0
}

/// Notifies the callers whose records are durable now, and returns their number.
fn notify_durable(mut queue: MutexGuard<'_, QueueState>) -> usize {
    let durable = queue.durable;
    let safe = queue.durability_waiters.extract_if(.., |(seq, _)| *seq <= durable).collect();
    // A notified caller needs the queue at once.
    drop(queue);
    notify(safe)
}

fn notify(waiters: Waiters) -> usize {
    let count = waiters.len();
    for (_, reply) in waiters {
        let _ = reply.send(Ok(()));
    }
    count
}

impl QueueState {
    /// Refuses all records from here on, and fails the callers that wait for records which will not be committed.
    pub(crate) fn shut_down(&mut self, why: &str) {
        let failure = self.failure.get_or_insert_with(|| JournalError(why.into())).clone();
        self.records.clear();
        self.bytes = usize::MAX;
        self.fail_all(&failure);
    }

    fn fail_all(&mut self, failure: &JournalError) {
        for (_, reply) in self.durability_waiters.drain(..).chain(self.commit_waiters.drain(..)) {
            let _ = reply.send(Err(failure.clone()));
        }
        for (_, reply) in self.claims.drain(..) {
            let _ = reply.send(Err(failure.clone()));
        }
    }
}

/// A guard that fails all waiting callers if its thread panics.
pub(crate) struct PanicGuard<'a>(pub(crate) &'a JournalQueue);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.0.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            queue.shut_down("the journal's writer is gone");
        }
    }
}

/// The size and the duration of the last group.
#[derive(Debug, Default)]
pub(crate) struct LastGroup {
    /// The number of callers that were notified.
    pub(crate) notified: usize,
    pub(crate) took: Duration,
}

impl LastGroup {
    /// Returns the time for which waiting callers wait for others. Most callers of the last group come back at once,
    /// and if the first were served alone, the others would wait for its sync.
    pub(crate) fn gather_time(&self, waiting: usize) -> Duration {
        if waiting < self.notified { self.took.mul_f64(0.25).min(GATHER_MAX) } else { Duration::ZERO }
    }
}

impl StoreJournal {
    pub(crate) fn start(committer: Committer, wal: Option<Wal>, remembered: Remembered) -> Result<Self, StoreError> {
        let shared = Arc::new(JournalQueue::new(wal.is_some()));
        let threads = Mutex::default();
        let journal = Self { shared, open: Mutex::default(), remembered: Mutex::new(remembered), threads };
        journal.spawn("wieldy-journal", move |shared| committer.run(shared))?;
        if let Some(wal) = wal {
            journal
                .spawn("wieldy-log", move |shared| WalWriter { wal, last_group: LastGroup::default() }.run(shared))?;
        }
        Ok(journal)
    }

    fn spawn(&self, name: &str, run: impl FnOnce(&JournalQueue) + Send + 'static) -> Result<(), StoreError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            let _guard = PanicGuard(&shared);
            run(&shared);
        });
        let thread =
            thread.map_err(|error| StoreError::Unavailable(format!("cannot start the journal's thread: {error}")))?;
        self.threads.lock().expect("no code panics while it holds the threads").push(thread);
        Ok(())
    }

    /// Returns the queue state, for readers that wait until their records are committed.
    pub(crate) fn shared(&self) -> &Arc<JournalQueue> {
        &self.shared
    }

    /// Waits until all accepted records are committed: durable, and found by queries.
    pub async fn flush(&self) -> Result<(), JournalError> {
        let answer = {
            let mut queue = self.shared.lock();
            if queue.committed >= queue.accepted {
                return Ok(());
            }
            if let Some(failure) = &queue.failure {
                return Err(failure.clone());
            }
            let (reply, answer) = oneshot::channel();
            let accepted = queue.accepted;
            queue.commit_waiters.push((accepted, reply));
            answer
        };
        self.shared.wake_committer.notify_one();
        answer.await.unwrap_or_else(|_| Err(gone()))
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
    pub fn abandon(&self) {
        self.shared.lock().abandoned = true;
        self.join();
    }

    fn join(&self) {
        self.shared.wake_committer.notify_one();
        self.shared.wake_wal_writer.notify_one();
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
    pub fn failure(&self) -> Option<JournalError> {
        self.shared.lock().failure.clone()
    }
}

impl Journal for StoreJournal {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        let record = Arc::new(self.record(event));
        let mut queue = self.shared.lock();
        // Running calls go on as long as there is space for their records. No call is opened that could not be
        // recorded.
        if let Some(failure) = &queue.failure
            && (matches!(event.body, Body::CallPending { .. }) || queue.bytes > HELD_BYTES_MAX)
        {
            return Receipt::Refused(failure.clone());
        }
        queue.bytes = queue.bytes.saturating_add(bytes_of(&record));
        queue.accepted = event.seq;
        queue.records.push_back(record);
        let is_backlogged = queue.records.len() > BACKLOG_MAX;
        let wakes = std::mem::take(&mut queue.is_asleep) || queue.records.len() == GROUP_ENOUGH;
        // A woken thread needs the queue at once.
        drop(queue);
        if wakes {
            self.shared.wake_committer.notify_one();
        }
        if is_backlogged { Receipt::Behind(event.seq) } else { Receipt::Pending(event.seq) }
    }

    fn kept(&self, seq: u64) -> BoxFuture<'_, Result<(), JournalError>> {
        let mut queue = self.shared.lock();
        if queue.durable >= seq {
            return Box::pin(std::future::ready(Ok(())));
        }
        if let Some(failure) = &queue.failure {
            return Box::pin(std::future::ready(Err(failure.clone())));
        }
        let (reply, answer) = oneshot::channel();
        queue.durability_waiters.push((seq, reply));
        let wakes = queue.durability_waiters.len() >= queue.wake_threshold;
        let condvar = if self.shared.has_wal && !queue.wal_suspended {
            &self.shared.wake_wal_writer
        } else {
            &self.shared.wake_committer
        };
        drop(queue);
        if wakes {
            condvar.notify_one();
        }
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err(gone())) })
    }

    fn claim(&self, claim: Claim) -> BoxFuture<'_, Result<Claimed, JournalError>> {
        let (reply, answer) = oneshot::channel();
        // Noted before the claim is made, so that a call that is closed meanwhile releases the key.
        let mut open = self.open.lock().expect("no code panics while it holds the open calls");
        open.claimed.insert(claim.execution, claim.key.clone());
        drop(open);
        let mut queue = self.shared.lock();
        if let Some(failure) = &queue.failure {
            return Box::pin(std::future::ready(Err(failure.clone())));
        }
        queue.claims.push((claim, reply));
        drop(queue);
        self.shared.wake_committer.notify_one();
        Box::pin(async move { answer.await.unwrap_or_else(|_| Err(gone())) })
    }

    fn next_seq(&self) -> u64 {
        self.shared.lock().accepted + 1
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
struct WalWriter {
    wal: Wal,
    last_group: LastGroup,
}

impl WalWriter {
    fn run(mut self, shared: &JournalQueue) {
        while let Some(UnsyncedRecords { records, committed, is_backlogged }) = self.wait_for_work(shared) {
            let began = Instant::now();
            // If the committer cannot keep up, the log must not bypass the backpressure.
            match if is_backlogged { Ok(false) } else { self.wal.append(&records, committed) } {
                Ok(true) => {
                    let mut queue = shared.lock();
                    queue.durable = records.last().map_or(queue.durable, |last| queue.durable.max(last.instance_seq));
                    let notified = notify_durable(queue);
                    self.last_group = LastGroup { notified, took: began.elapsed() };
                }
                Ok(false) => suspend_wal(shared, committed),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        error,
                        "the log of this executor cannot be written; calls wait for the history itself"
                    );
                    suspend_wal(shared, u64::MAX);
                }
            }
        }
    }

    /// Waits until callers wait, and as many as last time. Returns `None` when the executor ends: the remaining records
    /// are committed then.
    fn wait_for_work(&self, shared: &JournalQueue) -> Option<UnsyncedRecords> {
        let mut queue = shared.lock();
        let mut found = None;
        loop {
            if queue.closing || queue.abandoned {
                return None;
            }
            if queue.durability_waiters.is_empty() {
                queue.wake_threshold = 1;
                queue = shared.wake_wal_writer.wait(queue).expect("no code panics while it holds the queue");
                continue;
            }
            let since = found.get_or_insert_with(Instant::now).elapsed();
            let patience = self.last_group.gather_time(queue.durability_waiters.len()).saturating_sub(since);
            if patience.is_zero() {
                let unsynced_from = queue.records.partition_point(|record| record.instance_seq <= queue.durable);
                let records = queue.records.range(unsynced_from..).cloned().collect();
                return Some(UnsyncedRecords {
                    records,
                    committed: queue.committed,
                    is_backlogged: queue.records.len() > BACKLOG_MAX,
                });
            }
            queue.wake_threshold = self.last_group.notified;
            queue = wait(&shared.wake_wal_writer, queue, patience);
        }
    }
}

/// Records that are to be made durable.
struct UnsyncedRecords {
    records: Vec<Arc<Record>>,
    /// The number of the last event that is committed.
    committed: u64,
    /// True if too many records are not committed.
    is_backlogged: bool,
}

/// Makes waiting callers wait for commits instead of the log, until more than `committed` is committed, or for a while.
fn suspend_wal(shared: &JournalQueue, committed: u64) {
    let began = Instant::now();
    let mut queue = shared.lock();
    queue.wal_suspended = true;
    shared.wake_committer.notify_one();
    while queue.committed <= committed && began.elapsed() < WAL_RETRY && !queue.closing && !queue.abandoned {
        queue = wait(&shared.wake_wal_writer, queue, WAL_RETRY);
    }
    queue.wal_suspended = false;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_do_not_wait_for_a_thread_that_panicked() {
        let shared = Arc::new(JournalQueue::new(false));
        shared.lock().accepted = 1;
        let journal =
            StoreJournal { shared, open: Mutex::default(), remembered: Mutex::default(), threads: Mutex::default() };
        let waits = journal.kept(1);
        let theirs = Arc::clone(&journal.shared);
        let thread = std::thread::spawn(move || {
            let _guard = PanicGuard(&theirs);
            panic!("as the test wants");
        });
        assert!(thread.join().is_err());
        let gone = gone();
        assert_eq!(waits.await, Err(gone.clone()));
        assert_eq!(journal.kept(1).await, Err(gone.clone()));
        assert_eq!(journal.failure(), Some(gone));
        assert!(journal.shared.lock().bytes > HELD_BYTES_MAX, "nothing more is taken");
    }
}

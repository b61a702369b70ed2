//! The queue between the threads that cause events and the threads of the journal: records that are not committed yet,
//! and the callers that wait for them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use wieldy_core::JournalError;

use crate::claim::PendingClaim;
use crate::committer::GROUP_MAX;
use crate::error::StoreError;
use crate::hash_chain::Record;

/// The number of uncommitted records from which on callers have to wait (backpressure).
pub(crate) const BACKLOG_MAX: usize = 8 * GROUP_MAX;
/// The longest time that waiting callers wait for others to share a sync.
const GATHER_MAX: Duration = Duration::from_millis(5);
/// The longest time that a query waits until durable records are committed.
const QUERY_WAIT_MAX: Duration = Duration::from_secs(2);

/// The state that callers share with the threads of the journal.
pub(crate) struct JournalQueue {
    state: Mutex<QueueState>,
    /// Wake the committer thread and the WAL thread.
    pub(crate) wake_committer: Condvar,
    pub(crate) wake_wal_writer: Condvar,
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
    pub(crate) accepted: u64,
    /// The number of the last event that is durable.
    pub(crate) durable: u64,
    /// The number of the last event that is committed.
    pub(crate) committed: u64,
    /// Callers that wait until an event is durable, and callers that wait until it is committed.
    pub(crate) durability_waiters: Waiters,
    pub(crate) commit_waiters: Waiters,
    /// Claims that are not answered yet.
    pub(crate) claims: Vec<PendingClaim>,
    /// The number of waiting callers that wakes the thread which makes events durable. It also wakes by itself a little
    /// later.
    pub(crate) wake_threshold: usize,
    /// True if the committer thread sleeps and must be woken for any record.
    pub(crate) is_asleep: bool,
    /// True if the log takes nothing just now: it is full, or cannot be written.
    pub(crate) wal_suspended: bool,
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
        Self { state: Mutex::default(), wake_committer, wake_wal_writer, wake_readers, has_wal }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("no code panics while it holds the queue")
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
pub(crate) fn notify_durable(mut queue: MutexGuard<'_, QueueState>) -> usize {
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
            let mut queue = self.0.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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

/// Returns the approximate size of a record in bytes.
pub(crate) fn bytes_of(record: &Record) -> usize {
    let result = record.result.as_ref().map_or(0, |result| result.json().len());
    512 + record.data.len() + record.answer.as_ref().map_or(0, String::len) + result
}

//! The WAL thread: makes records durable in the write-ahead log for the callers that wait for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::hash_chain::Record;
use crate::queue::{BACKLOG_MAX, JournalQueue, LastGroup, notify_durable, wait};
use crate::wal::Wal;

/// The pause before a log that could not be written is tried again.
const WAL_RETRY: Duration = Duration::from_secs(1);

/// The state of the WAL thread.
pub(crate) struct WalWriter {
    wal: Wal,
    last_group: LastGroup,
}

impl WalWriter {
    pub(crate) fn new(wal: Wal) -> Self {
        Self { wal, last_group: LastGroup::default() }
    }

    pub(crate) fn run(mut self, shared: &JournalQueue) {
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
                        "cannot write the write-ahead log; calls wait until the history itself is written"
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

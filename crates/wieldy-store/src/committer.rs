//! The committer: a thread that commits records to the database in order and in groups, and maintains the history in
//! between. Without a write-ahead log, callers that wait for an event wait for the commit of its group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use wieldy_core::{Claimed, JournalError, Notes};

use crate::audit::{Signer, SigningState};
use crate::claim::{self, PendingClaim};
use crate::database::{Database, SyncMode, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::{Head, Record};
use crate::projection::Projection;
use crate::queue::{JournalQueue, LastGroup, QueueState, wait};
use crate::result_index;
use crate::retention::Retention;

/// Maximum number of records in a group, and the number at which the thread waits for no more.
pub(crate) const GROUP_MAX: usize = 2048;
pub(crate) const GROUP_ENOUGH: usize = 1024;
/// The longest time that records wait for others to share a commit, if no caller waits for them. A group touches the
/// same index pages, however many records it has.
const GATHER_IDLE: Duration = Duration::from_millis(20);
/// The interval of maintenance, and the longest wait for work.
const MAINTENANCE: Duration = Duration::from_secs(5);
/// The niceness of the thread once there is much to do and callers do not wait for it. Otherwise it would keep a
/// processor from them until the kernel's next tick, several times as long as a sync takes.
const NICE: i32 = 10;
/// The time after a group in which the thread polls for records, so that callers need not wake it.
const POLL: Duration = Duration::from_millis(100);
/// The idle time after which the words of calls are indexed, and the number of records that may wait for that.
const INDEX_AFTER: Duration = Duration::from_millis(200);
const UNINDEXED_MAX: u64 = 15_000;
/// The interval at which dead executors are looked for while a call waits for a key that another executor holds.
const HOLDER_CHECK: Duration = Duration::from_millis(250);

/// The state of the committer thread.
pub(crate) struct Committer {
    pub(crate) database: Box<dyn Database>,
    pub(crate) projection: Projection,
    pub(crate) number: i64,
    pub(crate) id: String,
    pub(crate) signer: Option<Signer>,
    pub(crate) signing: SigningState,
    /// The number of records whose words are not indexed yet.
    pub(crate) unindexed: u64,
    pub(crate) last_group: LastGroup,
    /// The time of the last maintenance.
    pub(crate) maintained: Instant,
    pub(crate) prune_schedule: PruneSchedule,
    /// True if there may be sandboxes of dead executors whose ends are not recorded.
    pub(crate) has_lost_sandboxes: bool,
    /// The pending notes, which the journal shares.
    pub(crate) notes: Arc<Notes>,
    /// The last record whose notes are among them.
    pub(crate) notes_seq: i64,
}

/// The schedule of retention.
#[derive(Debug)]
pub(crate) struct PruneSchedule {
    retention: Retention,
    next: Instant,
}

impl PruneSchedule {
    /// The pause after nothing was left to drop, and the pause while more is left.
    const PAUSE: Duration = Duration::from_secs(600);
    const PAUSE_BETWEEN_PARTS: Duration = Duration::from_secs(2);

    pub(crate) fn new(retention: Retention) -> Self {
        Self { retention, next: Instant::now() + Self::PAUSE }
    }
}

impl Committer {
    pub(crate) fn run(mut self, shared: &JournalQueue) {
        let mut has_low_priority = !shared.has_wal;
        loop {
            let (records, claims, closing) = self.wait_for_work(shared);
            if shared.lock().abandoned {
                return;
            }
            // Claims come first, because one of these records may close a call that claims a key.
            claims.into_iter().for_each(|claim| self.answer_claim(claim));
            // With little to do the priority stays: a short-lived process waits for this thread at its end.
            if !has_low_priority && records.len() >= GROUP_ENOUGH {
                has_low_priority = true;
                // On Linux this is for this thread alone. If it fails, calls are only slower.
                let _ = rustix::process::nice(NICE);
            }
            if !records.is_empty() {
                failpoint::reach("filing.taken");
                self.commit_until_done(shared, &records, closing);
            }
            if closing {
                let mut queue = shared.lock();
                if queue.records.is_empty() {
                    // From here on no record is accepted, because no thread would commit it.
                    queue.shut_down("the journal is closed");
                    // Records that are durable in the log and cannot be committed are left to the next process.
                    if queue.durable > queue.committed {
                        return;
                    }
                    break;
                }
            }
            let is_quiet = records.is_empty();
            if self.maintained.elapsed() >= MAINTENANCE {
                self.maintain();
            } else if is_quiet || self.unindexed >= UNINDEXED_MAX {
                self.index_words(1);
            }
            if self.prune_schedule.next <= Instant::now() {
                self.prune_if_due();
            }
        }
        self.close();
    }

    /// Waits for records that are worth a sync of the disk: as many callers wait as last time, or there are many
    /// records, or they have waited long enough. Returns none after a while, so that the history is maintained.
    fn wait_for_work(&self, shared: &JournalQueue) -> (Vec<Arc<Record>>, Vec<PendingClaim>, bool) {
        let idle = if self.unindexed > 0 { INDEX_AFTER } else { MAINTENANCE };
        let began = Instant::now();
        let mut last_empty = began;
        let mut queue = shared.lock();
        let has_work = |queue: &QueueState| !queue.records.is_empty() || !queue.claims.is_empty();
        while !has_work(&queue) && began.elapsed() < idle && !queue.closing && !queue.abandoned {
            last_empty = Instant::now();
            queue.is_asleep = began.elapsed() >= POLL;
            let patience = if queue.is_asleep { idle.saturating_sub(began.elapsed()) } else { GATHER_IDLE };
            shared.set_wake_threshold(&mut queue, 1);
            queue = wait(&shared.wake_committer, queue, patience);
            if began.elapsed() >= POLL {
                last_empty = Instant::now();
            }
        }
        queue.is_asleep = false;
        let found = Instant::now();
        let is_enough = |queue: &QueueState| queue.records.len() >= GROUP_ENOUGH || !queue.claims.is_empty();
        while !queue.records.is_empty() && !is_enough(&queue) && !queue.closing && !queue.abandoned {
            let (patience, since) = match shared.commit_waiter_count(&queue) {
                0 => (GATHER_IDLE, last_empty),
                waiting => (self.last_group.gather_time(waiting), found),
            };
            let left = patience.saturating_sub(since.elapsed());
            if left.is_zero() {
                break;
            }
            shared.set_wake_threshold(&mut queue, self.last_group.notified.max(1));
            queue = wait(&shared.wake_committer, queue, left);
        }
        // The records stay in the queue until they are committed, so that the log can make them durable before that.
        let count = queue.records.len().min(GROUP_MAX);
        let records = queue.records.range(..count).cloned().collect();
        (records, std::mem::take(&mut queue.claims), queue.closing)
    }

    /// Claims an idempotency key for a waiting call.
    fn answer_claim(&mut self, (claim, reply): PendingClaim) {
        // A call that no longer waits must not hold the key.
        if reply.is_closed() {
            return;
        }
        let mut claimed = claim::claim(&mut *self.database, self.number, &claim);
        if claimed.as_ref().is_err_and(StoreError::is_passing) && self.reconnect().is_ok() {
            claimed = claim::claim(&mut *self.database, self.number, &claim);
        }
        if claimed == Ok(Claimed::Taken) && self.maintained.elapsed() >= HOLDER_CHECK {
            // The executor that holds the key may be dead.
            self.maintain();
        }
        failpoint::reach("claim.made");
        let _ = reply.send(claimed.map_err(|error| JournalError(error.to_string())));
    }

    /// Commits a group and retries until that works. Gives up if the error is permanent, or lasts while the journal is
    /// closing.
    fn commit_until_done(&mut self, shared: &JournalQueue, records: &[Arc<Record>], closing: bool) {
        let mut pause = Duration::from_millis(50);
        let began = Instant::now();
        let mut written = self.commit(records, false);
        let mut warned = None;
        while let Err(error) = written {
            if warned.as_ref() != Some(&error) {
                tracing::warn!(error = &error as &dyn std::error::Error, "the history cannot be written");
                warned = Some(error.clone());
            }
            shared.report_failure(&error);
            if shared.lock().abandoned {
                return;
            }
            // A few seconds at the end of a command do not free a full disk.
            let is_late = began.elapsed() > MAINTENANCE || matches!(error, StoreError::Full(_));
            let ends = closing || shared.lock().closing;
            if !error.is_passing() || ends && is_late {
                self.give_up(shared, &error);
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
            // A write that seems to have failed may have been committed: ask before writing it again.
            written = self.reconnect().and_then(|committed| match records.last() {
                Some(last) if last.instance_seq <= committed => self.confirm_commit(records),
                _ => self.commit(records, false),
            });
        }
        failpoint::reach("filing.committed");
        let seq = records.last().map_or(0, |record| record.instance_seq);
        let notified = shared.note_committed(records.len(), seq);
        self.last_group = LastGroup { notified, took: began.elapsed() };
    }

    /// Commits a group of records, which is the last one if the executor `ends`.
    pub(crate) fn commit(&mut self, records: &[Arc<Record>], ends: bool) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let (projection, signer, signing) = (&self.projection, &self.signer, &self.signing);
        let changeset = self.database.write(self.number, &mut |head| {
            let mut changeset = projection.project(records, head);
            changeset.ends = ends;
            if ends || signing.is_due(changeset.head.seq) {
                changeset.signed = signer.as_ref().map(|signer| signer.sign(&changeset.head, Timestamp::now()));
                failpoint::reach("filing.signed");
            }
            changeset
        })?;
        self.signing.note(changeset.head, changeset.signed.is_some());
        self.follow_notes(changeset.after.seq);
        // The journal has applied this executor's own records already.
        if self.notes_seq == changeset.after.seq {
            self.notes_seq = changeset.head.seq;
        }
        self.projection.confirm(changeset);
        self.unindexed += records.len() as u64;
        Ok(())
    }

    /// Connects again and returns the number of the last event that was committed.
    fn reconnect(&mut self) -> Result<u64, StoreError> {
        self.database.reconnect()?;
        self.database.lock_liveness(&self.id)?;
        let sql = "SELECT last_seq FROM instances WHERE number = ?1";
        let committed = one_int(&mut *self.database, sql, &[self.number.into()])?;
        Ok(committed.unwrap_or_default() as u64)
    }

    /// Takes note of a group that was committed although the confirmation got lost.
    fn confirm_commit(&mut self, records: &[Arc<Record>]) -> Result<(), StoreError> {
        let number_of = |record: Option<&Arc<Record>>| record.map_or(0, |record| record.instance_seq as i64);
        let sql =
            "SELECT seq, hash FROM events WHERE seq > ?1 AND instance = ?2 AND instance_seq IN (?3, ?4) ORDER BY seq";
        let (first, last) = (number_of(records.first()), number_of(records.last()));
        let values = [self.signing.last_known_seq().into(), self.number.into(), first.into(), last.into()];
        let mut found = Vec::new();
        self.database.query(sql, &values, &mut |row| {
            found.push(Head { seq: row.int(0)?, hash: row.bytes(1)?.try_into().unwrap_or_default() });
            Ok(())
        })?;
        let (Some(first), Some(last)) = (found.first(), found.last()) else {
            return Err(StoreError::Damaged("records that were written are missing".into()));
        };
        // The projection needs no more than the position of its records.
        let changeset = self.projection.project(records, &Head { seq: first.seq - 1, hash: [0; 32] });
        self.signing.note(*last, false);
        self.projection.confirm(changeset);
        Ok(())
    }

    /// Shows that the instance is alive, and recovers the calls of dead instances.
    fn maintain(&mut self) {
        self.maintained = Instant::now();
        let done = self.database.heartbeat(self.number);
        // If another process commits the logs of dead executors just now, this one need not wait.
        let done = done.and_then(|()| crate::recovery::commit_orphaned_wals(&mut *self.database, Duration::ZERO));
        let done = done.and_then(|()| crate::recovery::recover(self, false));
        let done = done.and_then(|_| self.look_for_notes());
        let done = done.and_then(|()| self.sign());
        if let Err(error) = done {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot maintain the history");
            let _ = self.reconnect();
        }
    }

    fn prune_if_due(&mut self) {
        let retention = self.prune_schedule.retention;
        if retention == Retention::default() {
            return;
        }
        let more = self.drop_some(&retention).unwrap_or_else(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot drop old records of the history");
            false
        });
        self.prune_schedule.next =
            Instant::now() + if more { PruneSchedule::PAUSE_BETWEEN_PARTS } else { PruneSchedule::PAUSE };
    }

    /// Indexes the words of calls if at least `at_least` records wait for that.
    fn index_words(&mut self, at_least: u64) {
        let left = self.database.index_words(at_least);
        self.unindexed = left.unwrap_or_else(|error| {
            tracing::debug!(error = &error as &dyn std::error::Error, "cannot index the words of calls");
            0 // later processes try again
        });
        if self.unindexed == 0 {
            let left = result_index::fill(&mut *self.database, at_least, result_index::INDEXED_AT_ONCE);
            // What is not indexed now is no reason to look again before there are new records.
            self.unindexed = left.map_or(0, |left| if left >= at_least { left } else { 0 });
        }
    }

    /// Signs the last head if a signature is due and no record has come since.
    fn sign(&mut self) -> Result<(), StoreError> {
        if let (Some(signer), Some(head)) = (&self.signer, self.signing.head())
            && self.signing.is_due(head.seq)
        {
            crate::audit::insert_head(&mut *self.database, &signer.sign(&head, Timestamp::now()))?;
            self.signing.note(head, true);
        }
        Ok(())
    }

    /// Writes the executor's last record and ends the instance.
    pub(crate) fn close(&mut self) {
        failpoint::reach("filing.ending");
        // Short-lived processes never index the words of their calls while they run, so they do it at the end.
        self.index_words(UNINDEXED_MAX);
        self.prune_if_due();
        let now = Timestamp::now().as_microsecond();
        let closed = Arc::new(Record::own("journal.closed", now, None, &serde_json::json!({})));
        // If the machine stops before this is on the disk, the next executor takes this one for dead, without open
        // calls.
        let _ = self.database.set_sync(SyncMode::Deferred);
        if let Err(error) = self.commit(&[closed], true) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "cannot record in the history that this executor ended");
            return;
        }
        self.database.unlock_liveness();
    }

    /// Reports a permanent error to waiting callers, and refuses new records.
    fn give_up(&self, shared: &JournalQueue, error: &StoreError) {
        shared.report_failure(error);
        let mut queue = shared.lock();
        let durable = queue.durable;
        if queue.records.iter().any(|record| record.instance_seq > durable) {
            queue.lost = queue.failure.clone();
        }
        queue.shut_down("the journal gave up");
    }
}

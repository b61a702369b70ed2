//! The committer: a thread that commits records to the database in order and in groups, and maintains the history in
//! between. Without a write-ahead log, callers that wait for an event wait for the commit of its group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use wieldy_core::{Claimed, JournalError};

use crate::audit::{Signer, Unsigned};
use crate::claim::{self, Claiming};
use crate::database::{Database, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::{Head, Record};
use crate::journal::{Pace, Queue, Shared, wait};
use crate::projection::Ledger;
use crate::retention::Retention;

/// Maximum number of records in a group, and the number at which the thread waits for no more.
pub(crate) const GROUP_MAX: usize = 2048;
pub(crate) const GROUP_ENOUGH: usize = 1024;
/// The longest time that records wait for others to share a commit, if no caller waits for them. A group touches the
/// same index pages, however many records it has.
const LINGER: Duration = Duration::from_millis(20);
/// The interval of maintenance, and the longest wait for work.
const IDLE: Duration = Duration::from_secs(5);
/// The niceness of the thread once there is much to do and callers do not wait for it. Otherwise it would keep a
/// processor from them until the kernel's next tick, several times as long as a sync takes.
const NICE: i32 = 10;
/// The time after a group in which the thread polls for records, so that callers need not wake it.
const DOZE: Duration = Duration::from_millis(100);
/// The idle time after which the words of calls are indexed, and the number of records that may wait for that.
const QUIET: Duration = Duration::from_millis(200);
const WORDLESS_MAX: u64 = 15_000;
/// The interval at which dead executors are looked for while a call waits for a key that another executor holds.
const LOOK_FOR_HOLDER: Duration = Duration::from_millis(250);

/// The state of the committer thread.
pub(crate) struct Filer {
    pub(crate) database: Box<dyn Database>,
    pub(crate) ledger: Ledger,
    pub(crate) number: i64,
    pub(crate) id: String,
    pub(crate) signer: Option<Signer>,
    pub(crate) unsigned: Unsigned,
    /// The number of records whose words are not indexed yet.
    pub(crate) wordless: u64,
    pub(crate) pace: Pace,
    /// The time of the last maintenance.
    pub(crate) looked: Instant,
    pub(crate) pruning: Pruning,
}

/// The schedule of retention.
#[derive(Debug)]
pub(crate) struct Pruning {
    retention: Retention,
    next: Instant,
}

impl Pruning {
    /// The pause after nothing was left to drop, and the pause while more is left.
    const PAUSE: Duration = Duration::from_secs(600);
    const BREATH: Duration = Duration::from_secs(2);

    pub(crate) fn new(retention: Retention) -> Self {
        Self { retention, next: Instant::now() + Self::PAUSE }
    }
}

impl Filer {
    pub(crate) fn run(mut self, shared: &Shared) {
        let mut is_back = !shared.has_log;
        loop {
            let (records, claims, closing) = self.wait_for_work(shared);
            if shared.lock().forsaken {
                return;
            }
            // Claims come first, because one of these records may close a call that claims a key.
            claims.into_iter().for_each(|claim| self.answer_claim(claim));
            // With little to do the priority stays: a short-lived process waits for this thread at its end.
            if !is_back && records.len() >= GROUP_ENOUGH {
                is_back = true;
                // On Linux this is for this thread alone. If it fails, calls are only slower.
                let _ = rustix::process::nice(NICE);
            }
            if !records.is_empty() {
                failpoint::reach("filing.taken");
                self.put(shared, &records, closing);
            }
            if closing {
                let mut queue = shared.lock();
                if queue.records.is_empty() {
                    // From here on no record is accepted, because no thread would commit it.
                    queue.shut("the journal is closed");
                    // Records that are durable in the log and cannot be committed are left to the next process.
                    if queue.kept > queue.filed {
                        return;
                    }
                    break;
                }
            }
            let is_quiet = records.is_empty();
            if self.looked.elapsed() >= IDLE {
                self.look_after();
            } else if is_quiet || self.wordless >= WORDLESS_MAX {
                self.take_words(1);
            }
            if self.pruning.next <= Instant::now() {
                self.prune_a_little();
            }
        }
        self.end();
    }

    /// Waits for records that are worth a sync of the disk: as many callers wait as last time, or there are many
    /// records, or they have waited long enough. Returns none after a while, so that the history is maintained.
    fn wait_for_work(&self, shared: &Shared) -> (Vec<Arc<Record>>, Vec<Claiming>, bool) {
        let idle = if self.wordless > 0 { QUIET } else { IDLE };
        let began = Instant::now();
        let mut looked = began;
        let mut queue = shared.lock();
        let has_work = |queue: &Queue| !queue.records.is_empty() || !queue.claims.is_empty();
        while !has_work(&queue) && began.elapsed() < idle && !queue.closing && !queue.forsaken {
            looked = Instant::now();
            queue.is_asleep = began.elapsed() >= DOZE;
            let patience = if queue.is_asleep { idle.saturating_sub(began.elapsed()) } else { LINGER };
            shared.wake_for(&mut queue, 1);
            queue = wait(&shared.filer, queue, patience);
            if began.elapsed() >= DOZE {
                looked = Instant::now();
            }
        }
        queue.is_asleep = false;
        let found = Instant::now();
        let is_enough = |queue: &Queue| queue.records.len() >= GROUP_ENOUGH || !queue.claims.is_empty();
        while !queue.records.is_empty() && !is_enough(&queue) && !queue.closing && !queue.forsaken {
            let (patience, since) = match shared.waiting(&queue) {
                0 => (LINGER, looked),
                waiting => (self.pace.patience(waiting), found),
            };
            let left = patience.saturating_sub(since.elapsed());
            if left.is_zero() {
                break;
            }
            shared.wake_for(&mut queue, self.pace.told.max(1));
            queue = wait(&shared.filer, queue, left);
        }
        // The records stay in the queue until they are committed, so that the log can make them durable before that.
        let count = queue.records.len().min(GROUP_MAX);
        let records = queue.records.range(..count).cloned().collect();
        (records, std::mem::take(&mut queue.claims), queue.closing)
    }

    /// Claims an idempotency key for a waiting call.
    fn answer_claim(&mut self, (claim, tell): Claiming) {
        // A call that no longer waits must not hold the key.
        if tell.is_closed() {
            return;
        }
        let mut claimed = claim::claim(&mut *self.database, self.number, &claim);
        if claimed.as_ref().is_err_and(StoreError::is_passing) && self.reconnect().is_ok() {
            claimed = claim::claim(&mut *self.database, self.number, &claim);
        }
        if claimed == Ok(Claimed::Taken) && self.looked.elapsed() >= LOOK_FOR_HOLDER {
            // The executor that holds the key may be dead.
            self.look_after();
        }
        failpoint::reach("claim.made");
        let _ = tell.send(claimed.map_err(|error| JournalError(error.to_string())));
    }

    /// Commits a group and retries until that works. Gives up if the error is permanent, or lasts while the journal is
    /// closing.
    fn put(&mut self, shared: &Shared, records: &[Arc<Record>], closing: bool) {
        let mut pause = Duration::from_millis(50);
        let began = Instant::now();
        let mut written = self.write(records, false);
        let mut warned = None;
        while let Err(error) = written {
            if warned.as_ref() != Some(&error) {
                tracing::warn!(error = &error as &dyn std::error::Error, "the history cannot be written");
                warned = Some(error.clone());
            }
            shared.tell_trouble(&error);
            if shared.lock().forsaken {
                return;
            }
            // A few seconds at the end of a command do not free a full disk.
            let is_late = began.elapsed() > IDLE || matches!(error, StoreError::Full(_));
            let ends = closing || shared.lock().closing;
            if !error.is_passing() || ends && is_late {
                self.give_up(shared, &error);
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
            // A write that seems to have failed may have been committed: ask before writing it again.
            written = self.reconnect().and_then(|kept| match records.last() {
                Some(last) if last.instance_seq <= kept => self.find_again(records),
                _ => self.write(records, false),
            });
        }
        failpoint::reach("filing.committed");
        let seq = records.last().map_or(0, |record| record.instance_seq);
        let told = shared.note_filed(records.len(), seq);
        self.pace = Pace { told, took: began.elapsed() };
    }

    /// Commits a group of records, which is the last one if the executor `ends`.
    pub(crate) fn write(&mut self, records: &[Arc<Record>], ends: bool) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let (ledger, signer, unsigned) = (&self.ledger, &self.signer, &self.unsigned);
        let draft = self.database.write(self.number, &mut |head| {
            let mut draft = ledger.draft(records, head);
            draft.ends = ends;
            if ends || unsigned.is_due(draft.head.seq) {
                draft.signed = signer.as_ref().map(|signer| signer.sign(&draft.head, Timestamp::now()));
                failpoint::reach("filing.signed");
            }
            draft
        })?;
        self.unsigned.note(draft.head, draft.signed.is_some());
        self.ledger.accept(draft);
        self.wordless += records.len() as u64;
        Ok(())
    }

    /// Connects again and returns the number of the last event that was committed.
    fn reconnect(&mut self) -> Result<u64, StoreError> {
        self.database.reconnect()?;
        self.database.show_life(&self.id)?;
        let sql = "SELECT last_seq FROM instances WHERE number = ?1";
        let kept = one_int(&mut *self.database, sql, &[self.number.into()])?;
        Ok(kept.unwrap_or_default() as u64)
    }

    /// Takes note of a group that was committed although the confirmation got lost.
    fn find_again(&mut self, records: &[Arc<Record>]) -> Result<(), StoreError> {
        let number_of = |record: Option<&Arc<Record>>| record.map_or(0, |record| record.instance_seq as i64);
        let sql =
            "SELECT seq, hash FROM events WHERE seq > ?1 AND instance = ?2 AND instance_seq IN (?3, ?4) ORDER BY seq";
        let (first, last) = (number_of(records.first()), number_of(records.last()));
        let values = [self.unsigned.after().into(), self.number.into(), first.into(), last.into()];
        let mut found = Vec::new();
        self.database.query(sql, &values, &mut |row| {
            found.push(Head { seq: row.int(0)?, hash: row.bytes(1)?.try_into().unwrap_or_default() });
            Ok(())
        })?;
        let (Some(first), Some(last)) = (found.first(), found.last()) else {
            return Err(StoreError::Damaged("records are gone that were written".into()));
        };
        // The ledger needs no more than the position of its records.
        let draft = self.ledger.draft(records, &Head { seq: first.seq - 1, hash: [0; 32] });
        self.unsigned.note(*last, false);
        self.ledger.accept(draft);
        Ok(())
    }

    /// Shows that the instance is alive, and recovers the calls of dead instances.
    fn look_after(&mut self) {
        self.looked = Instant::now();
        let looked = self.database.stay_alive(self.number);
        // If another process commits the logs of dead executors just now, this one need not wait.
        let looked = looked.and_then(|()| crate::recovery::settle(&mut *self.database, Duration::ZERO));
        let looked = looked.and_then(|()| crate::recovery::recover(self, false));
        let looked = looked.and_then(|_| self.sign());
        if let Err(error) = looked {
            tracing::warn!(error = &error as &dyn std::error::Error, "the history cannot be looked after");
            let _ = self.reconnect();
        }
    }

    fn prune_a_little(&mut self) {
        let retention = self.pruning.retention;
        if retention == Retention::default() {
            return;
        }
        let more = self.prune(&retention).unwrap_or_else(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "what is too old in the history is not dropped");
            false
        });
        self.pruning.next = Instant::now() + if more { Pruning::BREATH } else { Pruning::PAUSE };
    }

    /// Indexes the words of calls if at least `at_least` records wait for that.
    fn take_words(&mut self, at_least: u64) {
        let taken = self.database.take_words(at_least);
        self.wordless = taken.unwrap_or_else(|error| {
            tracing::debug!(error = &error as &dyn std::error::Error, "the words of calls are not taken");
            0 // later processes try again
        });
    }

    /// Signs the last head if a signature is due and no record has come since.
    fn sign(&mut self) -> Result<(), StoreError> {
        if let (Some(signer), Some(head)) = (&self.signer, self.unsigned.head())
            && self.unsigned.is_due(head.seq)
        {
            crate::audit::keep(&mut *self.database, &signer.sign(&head, Timestamp::now()))?;
            self.unsigned.note(head, true);
        }
        Ok(())
    }

    /// Writes the executor's last record and ends the instance.
    pub(crate) fn end(&mut self) {
        failpoint::reach("filing.ending");
        // Short-lived processes never index the words of their calls while they run, so they do it at the end.
        self.take_words(WORDLESS_MAX);
        self.prune_a_little();
        let now = Timestamp::now().as_microsecond();
        let closed = Arc::new(Record::own("journal.closed", now, None, &serde_json::json!({})));
        // If the machine stops before this is on the disk, the next executor takes this one for dead, without open
        // calls.
        let _ = self.database.relax(true);
        if let Err(error) = self.write(&[closed], true) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "the history does not know that this executor ended");
            return;
        }
        self.database.end_life();
    }

    /// Reports a permanent error to waiting callers, and refuses new records.
    fn give_up(&self, shared: &Shared, error: &StoreError) {
        shared.tell_trouble(error);
        let mut queue = shared.lock();
        let kept = queue.kept;
        if queue.records.iter().any(|record| record.instance_seq > kept) {
            queue.lost = queue.trouble.clone();
        }
        queue.shut("the journal gave up");
    }
}

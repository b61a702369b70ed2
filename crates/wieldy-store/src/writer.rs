//! The writer: one thread that takes records in the order in which they come and writes them in groups. Whoever waits for
//! an event waits for one sync of the disk, however many others wait for the same one. What is written is made of the event
//! by whoever caused it: they are many, and the writer is one.
//!
//! What cannot be written is held, in order, and tried again until it can be. Meanwhile those who wait are told, no call
//! is opened, and calls that run go on: their records are held too.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::oneshot;
use wieldy_core::{Body, BoxFuture, Event, ExecutionId, Journal, JournalError, Receipt, Remembered};

use crate::audit::{Signer, Unsigned};
use crate::database::{Database, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::ledger::Ledger;
use crate::trail::{Head, Record};
use crate::upkeep::Retention;

/// How many records are written together at most.
const GROUP_MAX: usize = 1024;
/// How many events may wait to be written before those who cause them have to wait too.
const BEHIND: usize = 16 * GROUP_MAX;
/// How long what nobody waits for may wait for others to be written with: a group costs the same pages of the indexes, however
/// many records are in it.
const LINGER: Duration = Duration::from_millis(20);
/// How long those who wait may be kept waiting for others.
const TOGETHER: Duration = Duration::from_millis(5);
/// How many bytes of records are held while they cannot be written; what comes then is refused.
const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How often to look after the history, and how long to wait for something to happen.
const IDLE: Duration = Duration::from_secs(5);
/// For how long after a group the writer looks by itself whether there is more, so that nobody has to wake it.
const DOZE: Duration = Duration::from_millis(100);
/// How long nothing must happen before the words of calls are taken, and how many records may wait for that.
const QUIET: Duration = Duration::from_millis(200);
const WORDLESS_MAX: u64 = 15_000;
/// How much printed text of one call is written down; what comes after it is only counted.
const PRINTED_BYTES_MAX: usize = 64 * 1024;

/// The journal of an executor, kept in a database. Dropping it writes what is left and ends the instance.
pub struct StoreJournal {
    shared: Arc<Shared>,
    /// How much text the calls that run have printed into the trail.
    printed: Mutex<HashMap<ExecutionId, usize>>,
    remembered: Mutex<Remembered>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

/// What waits to be written.
#[derive(Default)]
struct Queue {
    records: VecDeque<Arc<Record>>,
    /// About how many bytes the records hold that are not safe yet.
    bytes: usize,
    /// The number of the last event that was taken.
    taken: u64,
    /// The number of the last event that is safe.
    kept: u64,
    /// Who waits for which event.
    waiting: Vec<(u64, oneshot::Sender<Result<(), JournalError>>)>,
    /// How many must wait before the writer is woken; it wakes by itself a little later.
    worth_waking: usize,
    /// Whether the writer has to be woken for anything at all.
    is_asleep: bool,
    /// Why nothing can be written just now.
    trouble: Option<JournalError>,
    closing: bool,
    forsaken: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("no code panics while it holds the queue")
    }
}

impl Queue {
    /// Takes nothing from here on, and tells so whoever waits for what will not be written any more.
    fn shut(&mut self, why: &str) {
        let trouble = self.trouble.get_or_insert_with(|| JournalError(why.into())).clone();
        self.records.clear();
        self.bytes = usize::MAX;
        for (_, tell) in self.waiting.drain(..) {
            let _ = tell.send(Err(trouble.clone()));
        }
    }
}

/// Sees to it that nobody waits for a writer that is gone, whatever became of it.
struct Going<'a>(&'a Shared);

impl Drop for Going<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !queue.forsaken {
            queue.shut("the journal's writer is gone");
        }
    }
}

impl StoreJournal {
    pub(crate) fn start(writer: Writer, remembered: Remembered) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared { queue: Mutex::default(), wake: Condvar::new() });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("wieldy-journal".into())
            .spawn(move || writer.run(&theirs))
            .map_err(|error| StoreError::Unavailable(format!("cannot start the journal's thread: {error}")))?;
        let (printed, remembered) = (Mutex::default(), Mutex::new(remembered));
        Ok(Self { shared, printed, remembered, thread: Mutex::new(Some(thread)) })
    }

    /// Waits until everything that was taken is safe.
    pub async fn flush(&self) -> Result<(), JournalError> {
        let taken = self.shared.lock().taken;
        self.kept(taken).await
    }

    /// Writes what is left and ends the instance, whoever still holds the journal; it takes nothing more then. Blocks.
    pub fn close(&self) {
        self.shared.lock().closing = true;
        self.shared.wake.notify_one();
        let thread = self.thread.lock().expect("no code panics while it holds the thread").take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// Stops writing as if the process had been killed, for tests of what comes after that.
    #[doc(hidden)]
    pub fn forsake(&self) {
        self.shared.lock().forsaken = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.lock().expect("no code panics while it holds the thread").take() {
            let _ = thread.join();
        }
    }

    /// What is written of an event. Of what a call prints only the beginning is.
    fn record(&self, event: &Event) -> Record {
        let mut record = Record::of(event);
        let Some(id) = event.subject.execution else { return record };
        let printed = || self.printed.lock().expect("no code panics while it holds the numbers");
        match &event.body {
            Body::CallProgress { message: Some(message), .. } => {
                let mut all_printed = printed();
                let bytes = all_printed.entry(id).or_default();
                *bytes += message.len();
                if *bytes > PRINTED_BYTES_MAX {
                    let mut data = event.data();
                    data["message"] = serde_json::json!(format!("[{} bytes not kept]", message.len()));
                    record.data = data.to_string();
                }
            }
            body if body.closing().is_some() => drop(printed().remove(&id)),
            _ => {}
        }
        record
    }

    /// Why nothing can be written just now, if something is wrong.
    pub fn trouble(&self) -> Option<JournalError> {
        self.shared.lock().trouble.clone()
    }
}

impl Journal for StoreJournal {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        let record = Arc::new(self.record(event));
        let mut queue = self.shared.lock();
        // What is under way goes on as long as there is room for it; nothing new begins that could not be recorded.
        if let Some(trouble) = &queue.trouble
            && (matches!(event.body, Body::CallPending { .. }) || queue.bytes > HELD_BYTES_MAX)
        {
            return Receipt::Refused(trouble.clone());
        }
        queue.bytes = queue.bytes.saturating_add(bytes_of(&record));
        queue.taken = event.seq;
        queue.records.push_back(record);
        let is_behind = queue.records.len() > BEHIND;
        let wakes = std::mem::take(&mut queue.is_asleep) || queue.records.len() == GROUP_MAX;
        // Who is woken wants the queue at once.
        drop(queue);
        if wakes {
            self.shared.wake.notify_one();
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
        drop(queue);
        if wakes {
            self.shared.wake.notify_one();
        }
        Box::pin(async move { told.await.unwrap_or_else(|_| Err(JournalError("the journal's writer is gone".into()))) })
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

/// About how many bytes a record holds.
fn bytes_of(record: &Record) -> usize {
    512 + record.data.len() + record.answer.as_ref().map_or(0, String::len)
}

/// What the thread works with.
pub(crate) struct Writer {
    pub(crate) database: Box<dyn Database>,
    pub(crate) ledger: Ledger,
    pub(crate) number: i64,
    pub(crate) id: String,
    pub(crate) signer: Option<Signer>,
    pub(crate) unsigned: Unsigned,
    /// How many records there are whose words were not taken.
    pub(crate) wordless: u64,
    pub(crate) pace: Pace,
    /// When it was last seen to what others left.
    pub(crate) looked: Instant,
    pub(crate) pruning: Pruning,
}

/// When to drop what is too old or too much.
#[derive(Debug)]
pub(crate) struct Pruning {
    retention: Retention,
    next: Instant,
}

impl Pruning {
    /// How long to wait where nothing is left to do, and where something is.
    const PAUSE: Duration = Duration::from_secs(600);
    const BREATH: Duration = Duration::from_secs(2);

    pub(crate) fn new(retention: Retention) -> Self {
        Self { retention, next: Instant::now() + Self::PAUSE }
    }
}

/// How the last group went.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// How many were told that it is safe.
    told: usize,
    took: Duration,
}

impl Writer {
    fn run(mut self, shared: &Shared) {
        let _going = Going(shared);
        loop {
            let (records, closing) = self.wait_for_work(shared);
            if shared.lock().forsaken {
                return;
            }
            if !records.is_empty() {
                failpoint::reach("writer.taken");
                self.put(shared, &records, closing);
            }
            if closing {
                let mut queue = shared.lock();
                if queue.records.is_empty() {
                    // From here on nothing is taken that nobody would write.
                    queue.shut("the journal is closed");
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

    /// Waits until there is something to write that is worth a sync of the disk: all those wait for it who waited together
    /// before, or there is much of it, or it has waited long enough. Nothing for a while means: look after the history.
    fn wait_for_work(&self, shared: &Shared) -> (Vec<Arc<Record>>, bool) {
        let wait = |queue, patience| {
            shared.wake.wait_timeout(queue, patience).expect("no code panics while it holds the queue").0
        };
        let idle = if self.wordless > 0 { QUIET } else { IDLE };
        let began = Instant::now();
        let mut looked = began;
        let mut queue = shared.lock();
        while queue.records.is_empty() && began.elapsed() < idle && !queue.closing && !queue.forsaken {
            looked = Instant::now();
            queue.worth_waking = 1;
            queue.is_asleep = began.elapsed() >= DOZE;
            let patience = if queue.is_asleep { idle.saturating_sub(began.elapsed()) } else { LINGER };
            queue = wait(queue, patience);
            if began.elapsed() >= DOZE {
                looked = Instant::now();
            }
        }
        queue.is_asleep = false;
        let found = Instant::now();
        while !queue.records.is_empty() && queue.records.len() < GROUP_MAX && !queue.closing && !queue.forsaken {
            // Those who were told just now come back at once, most of them: alone, the first would make the others wait.
            let (patience, since) = match queue.waiting.len() {
                0 => (LINGER, looked),
                waiting if waiting < self.pace.told => (self.pace.took.mul_f64(0.25).min(TOGETHER), found),
                _ => break,
            };
            let left = patience.saturating_sub(since.elapsed());
            if left.is_zero() {
                break;
            }
            queue.worth_waking = self.pace.told.max(1);
            queue = wait(queue, left);
        }
        let count = queue.records.len().min(GROUP_MAX);
        (queue.records.drain(..count).collect(), queue.closing)
    }

    /// Writes a group, however long that takes. Gives up only where there is no hope, or nobody is left to wait.
    fn put(&mut self, shared: &Shared, records: &[Arc<Record>], closing: bool) {
        let bytes = records.iter().map(|record| bytes_of(record)).sum::<usize>();
        let mut pause = Duration::from_millis(50);
        let began = Instant::now();
        let mut written = self.write(records, false);
        while let Err(error) = written {
            tracing::warn!(error = &error as &dyn std::error::Error, "the history cannot be written");
            tell_trouble(shared, &error);
            let hopeless = !error.is_passing() || shared.lock().closing && began.elapsed() > IDLE;
            if hopeless || closing && began.elapsed() > IDLE {
                self.give_up(shared, &error);
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_secs(1));
            // What is not known to have failed may have been written: ask before writing it once more.
            written = self.reconnect().and_then(|kept| match records.last() {
                Some(last) if last.instance_seq <= kept => self.find_again(records),
                _ => self.write(records, false),
            });
        }
        failpoint::reach("writer.committed");
        let mut queue = shared.lock();
        queue.trouble = None;
        queue.bytes = queue.bytes.saturating_sub(bytes);
        queue.kept = records.last().map_or(queue.kept, |record| record.instance_seq);
        let kept = queue.kept;
        let safe: Vec<_> = queue.waiting.extract_if(.., |(seq, _)| *seq <= kept).collect();
        drop(queue);
        self.pace = Pace { told: safe.len(), took: began.elapsed() };
        for (_, tell) in safe {
            let _ = tell.send(Ok(()));
        }
    }

    /// Writes a group of records; the last one of all if the executor `ends`.
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
                failpoint::reach("writer.signed");
            }
            draft
        })?;
        self.unsigned.note(draft.head, draft.signed.is_some());
        self.ledger.accept(draft);
        self.wordless += records.len() as u64;
        Ok(())
    }

    /// Connects again; the number of the last event that was written after all.
    fn reconnect(&mut self) -> Result<u64, StoreError> {
        self.database.reconnect()?;
        self.database.show_life(&self.id)?;
        let sql = "SELECT last_seq FROM instances WHERE number = ?1";
        let kept = one_int(&mut *self.database, sql, &[self.number.into()])?;
        Ok(kept.unwrap_or_default() as u64)
    }

    /// Takes note of a group that was written, though nobody could say so.
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
        // Where its records are says all that the ledger needs to know.
        let draft = self.ledger.draft(records, &Head { seq: first.seq - 1, hash: [0; 32] });
        self.unsigned.note(*last, false);
        self.ledger.accept(draft);
        Ok(())
    }

    /// Says that the instance lives, and closes what others left open that do not.
    fn look_after(&mut self) {
        self.looked = Instant::now();
        let looked = self.database.stay_alive(self.number).and_then(|()| crate::recovery::recover(self, false));
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

    /// Takes the words of calls, if so many records wait for that.
    fn take_words(&mut self, at_least: u64) {
        let taken = self.database.take_words(at_least);
        self.wordless = taken.unwrap_or_else(|error| {
            tracing::debug!(error = &error as &dyn std::error::Error, "the words of calls are not taken");
            0 // those who come next try again
        });
    }

    /// Signs what was written a while ago, should nothing have come since.
    fn sign(&mut self) -> Result<(), StoreError> {
        if let (Some(signer), Some(head)) = (&self.signer, self.unsigned.head())
            && self.unsigned.is_due(head.seq)
        {
            crate::audit::keep(&mut *self.database, &signer.sign(&head, Timestamp::now()))?;
            self.unsigned.note(head, true);
        }
        Ok(())
    }

    /// The executor's last word.
    pub(crate) fn end(&mut self) {
        failpoint::reach("writer.ending");
        // Who comes often and stays short leaves more and more of them behind.
        self.take_words(WORDLESS_MAX);
        self.prune_a_little();
        let now = Timestamp::now().as_microsecond();
        let closed = Arc::new(Record::own("journal.closed", now, None, &serde_json::json!({})));
        if let Err(error) = self.write(&[closed], true) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the history does not know that this executor ended"
            );
        }
    }

    /// There is no hope: whoever waits is told, and nothing is taken any more.
    fn give_up(&self, shared: &Shared, error: &StoreError) {
        tell_trouble(shared, error);
        shared.lock().shut("the journal gave up");
    }
}

fn tell_trouble(shared: &Shared, error: &StoreError) {
    let trouble = JournalError(error.to_string());
    let mut queue = shared.lock();
    for (_, tell) in std::mem::take(&mut queue.waiting) {
        let _ = tell.send(Err(trouble.clone()));
    }
    queue.trouble = Some(trouble);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nobody_waits_for_a_writer_that_panicked() {
        let queue = Queue { taken: 1, ..Queue::default() };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), wake: Condvar::new() });
        let journal =
            StoreJournal { shared, printed: Mutex::default(), remembered: Mutex::default(), thread: Mutex::new(None) };
        let waits = journal.kept(1);
        let theirs = Arc::clone(&journal.shared);
        let thread = std::thread::spawn(move || {
            let _going = Going(&theirs);
            panic!("told to panic");
        });
        assert!(thread.join().is_err());
        let gone = JournalError("the journal's writer is gone".into());
        assert_eq!(waits.await, Err(gone.clone()));
        assert_eq!(journal.kept(1).await, Err(gone.clone()));
        assert_eq!(journal.trouble(), Some(gone));
        assert!(journal.shared.lock().bytes > HELD_BYTES_MAX, "nothing more is taken");
    }
}

//! The way of a record. Whoever causes an event makes the record of it, for they are many, and puts it into the queue. Where
//! somebody waits for it, one thread makes it safe in the [log](crate::log) of the executor and tells them: that takes one sync of
//! the disk, however many others wait for the same one. Another thread files it in the database a little later, together with
//! whatever came meanwhile ([`crate::filing`]). Where there is no log, on a server, or it takes nothing just now, a record is safe
//! when it is filed.
//!
//! What cannot be filed is held, in order, and tried again until it can be. Meanwhile those who wait are told, no call
//! is opened, and calls that run go on: their records are held too.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use wieldy_core::{Body, BoxFuture, Claim, Claimed, Event, ExecutionId, Journal, JournalError, Receipt, Remembered};

use crate::claim::Claiming;
use crate::error::StoreError;
use crate::filing::{Filer, GROUP_ENOUGH, GROUP_MAX};
use crate::log::Log;
use crate::trail::Record;

/// How many events may wait to be filed before those who cause them have to wait too.
const BEHIND: usize = 8 * GROUP_MAX;
/// How many bytes of records are held while they cannot be filed; what comes then is refused.
const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long those who wait may be kept waiting for others.
const TOGETHER: Duration = Duration::from_millis(5);
/// How long to wait before a log is tried again that could not be written.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// How long whoever asks the history waits for what is safe to be filed too.
const ASKING: Duration = Duration::from_secs(2);
/// How much printed text of one call is written down; what comes after it is only counted.
const PRINTED_BYTES_MAX: usize = 64 * 1024;

/// The journal of an executor, kept in a database. Dropping it writes what is left and ends the instance.
pub struct StoreJournal {
    shared: Arc<Shared>,
    /// What is remembered of calls that are not closed.
    open: Mutex<Open>,
    remembered: Mutex<Remembered>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What is remembered of calls that are not closed.
#[derive(Default)]
struct Open {
    /// The size of the text that they have printed into the trail.
    printed: HashMap<ExecutionId, usize>,
    /// The idempotency keys that they claimed.
    claimed: HashMap<ExecutionId, String>,
}

/// What those who cause events share with the threads that keep them.
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    /// Wakes the thread that files, and the one that writes the log.
    pub(crate) filer: Condvar,
    logger: Condvar,
    /// Tells that something was filed.
    filed: Condvar,
    pub(crate) has_log: bool,
}

/// Who waits for the event of some number.
type Waiting = Vec<(u64, oneshot::Sender<Result<(), JournalError>>)>;

/// What is not filed yet.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) records: VecDeque<Arc<Record>>,
    /// About how many bytes these hold.
    pub(crate) bytes: usize,
    /// The number of the last event that was taken.
    taken: u64,
    /// The number of the last event that is safe.
    pub(crate) kept: u64,
    /// The number of the last event that is filed.
    pub(crate) filed: u64,
    /// Who waits for an event to be safe, and who waits for it to be filed.
    waiting: Waiting,
    flushing: Waiting,
    /// Claims that are not answered yet.
    pub(crate) claims: Vec<Claiming>,
    /// How many must wait before the thread is woken that makes events safe; it wakes by itself a little later.
    pub(crate) worth_waking: usize,
    /// Whether the thread that files has to be woken for anything at all.
    pub(crate) is_asleep: bool,
    /// Whether the log takes nothing just now: it is full, or cannot be written.
    is_stuck: bool,
    /// Why nothing can be filed just now.
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

    /// Has the thread that files woken for so many who wait, where it is what they wait for.
    pub(crate) fn wake_for(&self, queue: &mut Queue, count: usize) {
        if !self.has_log {
            queue.worth_waking = count;
        }
    }

    /// How many wait for something to be filed.
    pub(crate) fn waiting(&self, queue: &Queue) -> usize {
        queue.flushing.len() + if self.has_log && !queue.is_stuck { 0 } else { queue.waiting.len() }
    }

    /// Takes note of what is filed, and tells those who waited; how many that were.
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

    /// Says why nothing can be filed, to those who wait and to those who come.
    pub(crate) fn tell_trouble(&self, error: &StoreError) {
        let trouble = JournalError(error.to_string());
        let mut queue = self.lock();
        queue.tell_all(&trouble);
        queue.trouble = Some(trouble);
        self.filed.notify_all();
    }

    /// Waits until everything that was taken is filed, so that a question finds all that was answered before, calls that only
    /// read included; not for long, and not while nothing can be filed.
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

/// Waits to be woken, but no longer than that.
pub(crate) fn wait<'a>(bell: &Condvar, queue: MutexGuard<'a, Queue>, patience: Duration) -> MutexGuard<'a, Queue> {
    bell.wait_timeout(queue, patience).expect("no code panics while it holds the queue").0
}

/// Tells those who waited for what is safe now; how many that were.
fn tell_kept(mut queue: MutexGuard<'_, Queue>) -> usize {
    let kept = queue.kept;
    let safe = queue.waiting.extract_if(.., |(seq, _)| *seq <= kept).collect();
    // Who is told wants the queue at once.
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
    /// Takes nothing from here on, and tells so whoever waits for what will not be filed any more.
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

/// Sees to it that nobody waits for a thread that is gone because it panicked.
pub(crate) struct Going<'a>(pub(crate) &'a Shared);

impl Drop for Going<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut queue = self.0.queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            queue.shut("the journal's writer is gone");
        }
    }
}

/// How the last group went.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// How many were told that it is safe.
    pub(crate) told: usize,
    pub(crate) took: Duration,
}

impl Pace {
    /// How long those who wait are kept waiting for others: those who were told just now come back at once, most of them, and
    /// alone the first would make the others wait.
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

    /// What those who ask this history wait with.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits until everything that was taken is filed: safe, and found by whoever asks.
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

    /// Writes what is left and ends the instance, whoever still holds the journal; it takes nothing more then. Blocks.
    pub fn close(&self) {
        self.shared.lock().closing = true;
        self.join();
    }

    /// Returns why records were lost, if any were. Asked after [`StoreJournal::close`].
    pub fn lost(&self) -> Option<JournalError> {
        self.shared.lock().lost.clone()
    }

    /// Stops writing as if the process had been killed, for tests of what comes after that.
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

    /// What is written of an event. Of what a call prints only the beginning is.
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

    /// Why nothing can be filed just now, if something is wrong.
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
        let wakes = std::mem::take(&mut queue.is_asleep) || queue.records.len() == GROUP_ENOUGH;
        // Who is woken wants the queue at once.
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
        // Before the claim itself, so that a call that is closed meanwhile gives the key back.
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

/// About how many bytes a record holds.
fn bytes_of(record: &Record) -> usize {
    512 + record.data.len() + record.answer.as_ref().map_or(0, String::len)
}

/// The thread that makes safe what somebody waits for.
struct Logger {
    log: Log,
    pace: Pace,
}

impl Logger {
    fn run(mut self, shared: &Shared) {
        while let Some(Work { records, filed, is_behind }) = self.wait_for_work(shared) {
            let began = Instant::now();
            // Where filing cannot keep up, the log is no way round that.
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

    /// Waits until somebody waits, and as many as did the last time. There is nothing to do where the executor ends: what is
    /// left is filed then.
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

/// What is to be made safe.
struct Work {
    records: Vec<Arc<Record>>,
    /// The number of the last event that is filed.
    filed: u64,
    /// Whether too much is not.
    is_behind: bool,
}

/// The log takes nothing: whoever waits is told when it is filed, until more than `filed` is, or for a while.
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

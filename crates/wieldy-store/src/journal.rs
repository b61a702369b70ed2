//! The journal of an executor.
//!
//! The thread that causes an event makes its record and puts it into the queue. If a caller waits for the record, the
//! WAL thread ([`crate::wal_writer`]) makes it durable in the [write-ahead log](crate::wal) and notifies the caller;
//! one sync of the disk serves all callers that wait. The committer thread ([`crate::committer`]) commits it to the
//! database a little later, together with newer records. Where there is no log (on a server), or the log takes nothing
//! just now, a record is durable when it is committed.
//!
//! Records that cannot be committed are held, in order, and retried until that works. Meanwhile waiting callers get an
//! error, no call is opened, and running calls go on: their records are held too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use tokio::sync::oneshot;
use wieldy_core::{
    Body, BoxFuture, Claim, Claimed, Event, ExecutionId, Journal, JournalError, Notes, Receipt, Remembered,
};

use crate::committer::{Committer, GROUP_ENOUGH};
use crate::error::StoreError;
use crate::hash_chain::Record;
use crate::queue::{BACKLOG_MAX, JournalQueue, PanicGuard, bytes_of};
use crate::wal::Wal;
use crate::wal_writer::WalWriter;

/// Maximum number of bytes of records that are held while they cannot be committed. Later ones are refused.
const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Maximum number of bytes of one call's printed text that are stored. Later text is only counted.
const PRINTED_BYTES_MAX: usize = 64 * 1024;

/// The journal of an executor, stored in a database. Dropping it writes the remaining records and ends the instance.
pub struct StoreJournal {
    shared: Arc<JournalQueue>,
    /// State of the calls that are not closed.
    open: Mutex<OpenCalls>,
    remembered: Mutex<Remembered>,
    notes: Arc<Notes>,
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

impl StoreJournal {
    pub(crate) fn start(committer: Committer, wal: Option<Wal>, remembered: Remembered) -> Result<Self, StoreError> {
        let shared = Arc::new(JournalQueue::new(wal.is_some()));
        let (threads, notes) = (Mutex::default(), Arc::clone(&committer.notes));
        let journal = Self { shared, open: Mutex::default(), remembered: Mutex::new(remembered), notes, threads };
        journal.spawn("wieldy-journal", move |shared| committer.run(shared))?;
        if let Some(wal) = wal {
            journal.spawn("wieldy-log", move |shared| WalWriter::new(wal).run(shared))?;
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
        self.notes.apply_event(event);
        if wakes {
            self.shared.wake_committer.notify_one();
        }
        if is_backlogged { Receipt::Behind(event.seq) } else { Receipt::Pending(event.seq) }
    }

    fn wait_until_stored(&self, seq: u64) -> BoxFuture<'_, Result<(), JournalError>> {
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

    fn stores_results(&self) -> bool {
        true
    }

    fn notes(&self) -> Option<&Notes> {
        Some(&self.notes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_do_not_wait_for_a_thread_that_panicked() {
        let shared = Arc::new(JournalQueue::new(false));
        shared.lock().accepted = 1;
        let (remembered, notes, threads) = (Mutex::default(), Arc::default(), Mutex::default());
        let journal = StoreJournal { shared, open: Mutex::default(), remembered, notes, threads };
        let waits = journal.wait_until_stored(1);
        let theirs = Arc::clone(&journal.shared);
        let thread = std::thread::spawn(move || {
            let _guard = PanicGuard(&theirs);
            panic!("as the test wants");
        });
        assert!(thread.join().is_err());
        let gone = gone();
        assert_eq!(waits.await, Err(gone.clone()));
        assert_eq!(journal.wait_until_stored(1).await, Err(gone.clone()));
        assert_eq!(journal.failure(), Some(gone));
        assert!(journal.shared.lock().bytes > HELD_BYTES_MAX, "nothing more is taken");
    }
}

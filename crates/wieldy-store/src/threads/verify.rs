//! Verification of the threads: no entry was changed, removed, moved or added behind the program's back.

use serde::Serialize;

use super::chain::{PlacedEntry, end_message, origin, roll_message};
use super::write::hash;
use super::{Threads, connect};
use crate::audit::is_signed_message;
use crate::database::{Database, Row, one_int};
use crate::error::StoreError;
use crate::hash_chain::Hash;

/// The number of threads and of entries that are read together.
const THREADS_AT_ONCE: i64 = 1000;
const ENTRIES_AT_ONCE: i64 = 256;

/// The result of a verification of threads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ThreadVerdict {
    /// The number of threads that were checked.
    pub threads: u64,
    /// The number of their entries.
    pub entries: u64,
    /// The number of threads whose end is signed.
    pub signed: u64,
    /// The first problem, if there is one.
    pub problem: Option<ThreadProblem>,
}

/// A problem and its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ThreadProblem {
    /// The thread, if it is known.
    pub thread_id: Option<String>,
    /// The entry, if it is known.
    pub seq: Option<i64>,
    /// The problem with it.
    pub what: String,
}

/// A row of the table of threads.
struct Thread {
    number: i64,
    owner: String,
    thread_id: String,
    created_at: i64,
    origin: Hash,
    seq: i64,
    at: i64,
    hash: Hash,
    signature: Option<Signature>,
}

/// A signature and the public key that it is made with.
struct Signature {
    key: String,
    signature: Vec<u8>,
}

impl Threads {
    /// Verifies that the threads are whole; `None` if there are none yet. With a `key`, every signature must be there
    /// and by that key. `progress` gets the number of verified entries now and then.
    pub fn verify(
        &self,
        key: Option<&str>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<ThreadVerdict>, StoreError> {
        if !self.exists()? {
            return Ok(None);
        }
        // A connection of its own, because the snapshot may take long.
        let mut database = connect(&self.shared.address)?;
        let mut walk = Walk {
            verdict: ThreadVerdict { threads: 0, entries: 0, signed: 0, problem: None },
            key: key.map(str::to_owned),
            origin: [0; 32],
        };
        // Readers do not block writers, and see nothing of what they write meanwhile.
        database.in_snapshot(&mut |database| walk.all(database, progress))?;
        Ok(Some(walk.verdict))
    }
}

/// The state of a verification.
struct Walk {
    verdict: ThreadVerdict,
    key: Option<String>,
    /// The origin of the last thread.
    origin: Hash,
}

impl Walk {
    fn all(&mut self, database: &mut dyn Database, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let mut last = 0;
        loop {
            let threads = threads_after(database, last)?;
            if threads.is_empty() {
                return self.finish(database, last);
            }
            for thread in threads {
                self.thread(database, &thread, last, progress)?;
                if self.verdict.problem.is_some() {
                    return Ok(());
                }
                last = thread.number;
            }
        }
    }

    /// Checks a thread: its place, its names, its entries and its end.
    fn thread(
        &mut self,
        database: &mut dyn Database,
        thread: &Thread,
        before: i64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StoreError> {
        self.verdict.threads += 1;
        if thread.number != before + 1 {
            let what = format!("thread number {} is missing before it", before + 1);
            self.report(Some(thread), None, what);
            return Ok(());
        }
        let Thread { number, owner, thread_id, created_at, .. } = thread;
        let origin = origin(&self.origin, *number, owner, thread_id, *created_at);
        if origin != thread.origin {
            self.report(Some(thread), None, "its id, its owner or its time was changed, or a thread before it");
            return Ok(());
        }
        self.origin = origin;
        let (mut seq, mut hash, mut at) = (0, origin, thread.created_at);
        loop {
            let sql =
                "SELECT seq, at, reply_to, type, agent, tenant, author_user, title, content, push_key, prev_hash, hash
                       FROM entries WHERE thread = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3";
            let before = seq;
            database.query(sql, &[thread.number.into(), seq.into(), ENTRIES_AT_ONCE.into()], &mut |row| {
                if self.verdict.problem.is_none() {
                    (seq, at, hash) = self.entry(thread, seq, &hash, row)?;
                }
                Ok(())
            })?;
            progress(self.verdict.entries);
            if self.verdict.problem.is_some() {
                return Ok(());
            }
            if seq == before {
                break;
            }
        }
        if seq != thread.seq {
            let what = format!("its last entries are missing: it has {seq} of {}", thread.seq);
            self.report(Some(thread), Some(seq + 1), what);
        } else if (hash, at) != (thread.hash, thread.at) {
            self.report(Some(thread), Some(seq), "its end is not its last entry");
        } else if let Err(what) = self.check_signature(thread.signature.as_ref(), &end_message(&origin, seq, &hash)) {
            self.report(Some(thread), Some(seq), what);
        } else {
            self.verdict.signed += u64::from(thread.signature.is_some());
        }
        Ok(())
    }

    /// Checks an entry after `previous`, and returns its number, time and hash.
    fn entry(
        &mut self,
        thread: &Thread,
        before: i64,
        previous: &Hash,
        row: &dyn Row,
    ) -> Result<(i64, i64, Hash), StoreError> {
        let entry = PlacedEntry {
            seq: row.int(0)?,
            at: row.int(1)?,
            reply_to: row.int_or_none(2)?,
            kind: row.text(3)?,
            agent: row.text(4)?,
            tenant: row.text_or_none(5)?,
            user: row.text_or_none(6)?,
            title: row.text_or_none(7)?,
            content: row.text(8)?,
            push_key: row.text_or_none(9)?,
        };
        let computed = entry.hash(previous);
        self.verdict.entries += 1;
        let (prev_hash, stored) = (hash(row.bytes(10)?)?, hash(row.bytes(11)?)?);
        if entry.seq != before + 1 {
            self.report(Some(thread), Some(before + 1), "it is missing");
        } else if prev_hash != *previous || computed != stored {
            self.report(Some(thread), Some(entry.seq), "it was changed, or is not in its place");
        } else if entry.reply_to.is_some_and(|reply_to| !(1..entry.seq).contains(&reply_to)) {
            self.report(Some(thread), Some(entry.seq), "it answers an entry that is not there");
        }
        Ok((entry.seq, entry.at, computed))
    }

    /// Compares the roll with the threads that were found.
    fn finish(&mut self, database: &mut dyn Database, last: i64) -> Result<(), StoreError> {
        let (mut threads, mut origin, mut signature) = (0, [0; 32], None);
        database.query("SELECT threads, origin, key, signature FROM roll WHERE one = 1", &[], &mut |row| {
            (threads, origin) = (row.int(0)?, hash(row.bytes(1)?)?);
            signature = read_signature(row, 2)?;
            Ok(())
        })?;
        let entries = one_int(database, "SELECT count(*) FROM entries", &[])?.unwrap_or_default();
        if (threads, origin) != (last, self.origin) {
            self.report(None, None, format!("the last threads are missing: there are {last} of {threads}"));
        } else if u64::try_from(entries) != Ok(self.verdict.entries) {
            self.report(None, None, "there are entries that belong to no thread");
        } else if threads > 0
            && let Err(what) = self.check_signature(signature.as_ref(), &roll_message(threads, &origin))
        {
            self.report(None, None, format!("the number of threads: {what}"));
        }
        Ok(())
    }

    /// Checks a signature, which may be missing unless a key is wanted.
    fn check_signature(&self, signature: Option<&Signature>, message: &[u8]) -> Result<(), String> {
        match (signature, &self.key) {
            (None, None) => Ok(()),
            (None, Some(_)) => Err("its end is not signed".into()),
            (Some(signature), Some(key)) if signature.key != *key => Err("its end is signed with another key".into()),
            (Some(Signature { key, signature }), _) => match is_signed_message(key, message, signature) {
                true => Ok(()),
                false => Err("the signature of its end is wrong".into()),
            },
        }
    }

    fn report(&mut self, thread: Option<&Thread>, seq: Option<i64>, what: impl Into<String>) {
        let thread_id = thread.map(|thread| thread.thread_id.clone());
        self.verdict.problem.get_or_insert(ThreadProblem { thread_id, seq, what: what.into() });
    }
}

fn threads_after(database: &mut dyn Database, last: i64) -> Result<Vec<Thread>, StoreError> {
    let sql = "SELECT number, owner, thread_id, created_at, origin, seq, at, hash, key, signature FROM threads
               WHERE number > ?1 ORDER BY number LIMIT ?2";
    let mut threads = Vec::new();
    database.query(sql, &[last.into(), THREADS_AT_ONCE.into()], &mut |row| {
        threads.push(Thread {
            number: row.int(0)?,
            owner: row.text(1)?.to_owned(),
            thread_id: row.text(2)?.to_owned(),
            created_at: row.int(3)?,
            origin: hash(row.bytes(4)?)?,
            seq: row.int(5)?,
            at: row.int(6)?,
            hash: hash(row.bytes(7)?)?,
            signature: read_signature(row, 8)?,
        });
        Ok(())
    })?;
    Ok(threads)
}

/// Reads a public key, and the signature in the column after it.
fn read_signature(row: &dyn Row, column: usize) -> Result<Option<Signature>, StoreError> {
    let Some(key) = row.text_or_none(column)? else { return Ok(None) };
    Ok(Some(Signature { key: key.to_owned(), signature: row.bytes(column + 1)?.to_vec() }))
}

impl std::fmt::Display for ThreadProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.thread_id, self.seq) {
            (Some(thread), Some(seq)) => write!(f, "entry {seq} of the thread `{thread}`: {}", self.what),
            (Some(thread), None) => write!(f, "the thread `{thread}`: {}", self.what),
            (None, _) => self.what.fmt(f),
        }
    }
}

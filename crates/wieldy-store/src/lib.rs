//! The history of wieldy's calls: durable, searchable, tamper-evident, in SQLite or PostgreSQL.
//!
//! [`Store`] is a history at an address. [`Store::journal`] opens the [`Journal`](wieldy_core::Journal) that an
//! executor writes.
//!
//! In reading order: `hash_chain` defines records and how they are chained; `record_to_row`, `projection`, `metadata`
//! and `histogram` project them to table rows. `journal` takes the events of an executor and puts them into the `queue`;
//! `wal` is its write-ahead log, a file of our own beside SQLite's `-wal`, and `wal_writer` the thread that writes it;
//! `committer` is the thread that commits to the database, `claim` has the claims of idempotency keys. `recovery`
//! commits the logs that dead executors left (after `kill -9`; `sqlite/liveness` finds them), closes their calls, and
//! returns the results of tasks and idempotency keys, which clients may still ask for (table `answers`; the table
//! `results` has what the history shows of every result); `sandboxes` records the ends of their sandboxes, `notes` has the
//! notes that agents left for themselves.
//! `query` and `events` read, `result_index` has the words of recorded results, `history_tools` and `log_tools` are the
//! same as tools for agents. `verify` checks that the history is whole, `audit` signs it, `retention` drops old records,
//! `copy` copies a history. `database` is the interface that `sqlite` and `postgres` implement. `threads` is a database
//! of its own with what agents write down for later, and the tools for it.

mod hash_chain;

mod histogram;
mod metadata;
mod notes;
mod projection;
mod record_to_row;

mod failpoint;
mod journal;
mod queue;

mod claim;
mod committer;
mod wal;
mod wal_writer;

mod recovery;
mod sandboxes;

mod cursor;
mod events;
mod history_tools;
mod log_tools;
mod query;
mod result_index;

mod audit;
mod verify;

mod copy;
mod retention;

mod threads;

mod database;
mod error;
mod migrations;
#[cfg(feature = "postgres")]
mod postgres;
mod sqlite;
mod store;

pub use audit::{SignedHead, Signer};
pub use copy::Copied;
pub use error::StoreError;
pub use events::RecordedEvent;
pub use history_tools::history_tools;
pub use journal::StoreJournal;
pub use query::{Cursor, Execution, GroupBy, Page, Query, Stat, TextPlace};
pub use result_index::ResultIndex;
pub use retention::{Pruned, Retention};
pub use store::{Address, JournalOptions, Store};
pub use threads::{
    At, Entry, EntryPage, Found, ListedThread, NewEntry, Order, Owner, PROJECT_DEFAULT, Pushed, Reading, Seeking,
    ThreadError, ThreadPage, ThreadProblem, ThreadStatus, ThreadVerdict, Threads, thread_tools,
};
pub use verify::{Problem, Verdict};

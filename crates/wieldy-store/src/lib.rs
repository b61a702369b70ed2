//! The history of wieldy's calls: durable, searchable, tamper-evident, in SQLite or PostgreSQL.
//!
//! [`Store`] is a history at an address. [`Store::journal`] opens the [`Journal`](wieldy_core::Journal) that an
//! executor writes.
//!
//! In reading order: `trail` defines records and their hash chain; `meaning`, `ledger` and `tally` project them to
//! table rows. `writer` is the journal with its queue, `log` the write-ahead log, `filing` the thread that commits to
//! the database, `claim` the claims of idempotency keys. `recovery` closes the calls of dead executors. `query` and
//! `moments` read, `memory` and `logs` are the same as tools for agents. `verify` checks that the history is whole,
//! `audit` signs it, `upkeep` drops old records and makes copies. `database` is the interface that `sqlite` and
//! `postgres` implement.

mod trail;

mod ledger;
mod meaning;
mod tally;

mod failpoint;
mod writer;

mod claim;
mod filing;
mod log;

mod recovery;

mod logs;
mod memory;
mod moments;
mod query;

mod audit;
mod verify;

mod upkeep;

mod database;
mod error;
mod migrations;
#[cfg(feature = "postgres")]
mod postgres;
mod sqlite;
mod store;

pub use audit::{SignedHead, Signer};
pub use error::StoreError;
pub use memory::history_tools;
pub use moments::Moment;
pub use query::{Cursor, Execution, GroupBy, Page, Query, Stat};
pub use store::{Address, JournalOptions, Store};
pub use upkeep::{Copied, Pruned, Retention};
pub use verify::{Problem, Verdict};
pub use writer::StoreJournal;

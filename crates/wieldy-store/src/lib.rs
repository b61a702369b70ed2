//! The history of wieldy's calls: durable, searchable, tamper-evident, in SQLite or PostgreSQL.
//!
//! [`Store`] is a history at some address; [`Store::journal`] makes the [`Journal`](wieldy_core::Journal) that an executor
//! writes it with. In reading order: `trail` says what a record is and how records are chained, `ledger` what they mean for
//! the tables; `writer` is the way of a record, `log` where it is safe, `filing` how it gets into the tables, `claim` which call may run under an idempotency key; `recovery` says what
//! happens to what was left, `query` how to ask, `moments` what happened in calls, `verify` how to prove it, `upkeep` how it stays in bounds; `database` is what
//! `sqlite` and `postgres` have to be able to do.

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

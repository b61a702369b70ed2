//! Tests of the promises of the history, on both databases.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[macro_use]
mod world;
mod server;

mod both_databases;
mod claims;
mod closing;
mod concurrent_executors;
mod disk_trouble;
mod duplicate_ids;
mod durations;
mod history_tools;
mod index_use;
mod kill;
mod large;
mod lost_confirmations;
mod metadata;
mod notes;
mod notes_kill;
mod outage;
mod paths;
mod recovery;
mod results;
mod retention;
mod round_trip;
mod sandboxes;
mod schema_versions;
mod secrets;
mod tampering;
mod thread_kills;
mod thread_tampering;
mod threads;
mod tls;
mod victim;
mod wal;

//! Tests of the promises of the history, on both databases.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[macro_use]
mod world;
mod server;

mod claims;
mod close;
mod durations;
mod first;
mod forms;
mod kill;
mod large;
mod log;
mod lost;
mod memory;
mod outage;
mod places;
mod recovery;
mod same;
mod scans;
mod secrets;
mod secure;
mod together;
mod trail;
mod trouble;
mod twice;
mod upkeep;
mod victim;

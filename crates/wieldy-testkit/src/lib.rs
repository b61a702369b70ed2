//! A [`World`] for tests: an executor with scripted tools, and a tape of its events.

mod fakes;
mod runs;
mod world;

pub use fakes::{Act, Announcer, FailingJournal, FakeSandbox, HangingJournal, Puppet, Strings};
pub use runs::{count, skip};
pub use world::{World, bounded};

//! A [`World`] for tests: an executor with scripted tools, and a tape of its events.

mod fakes;
mod world;

pub use fakes::{Act, FailingJournal, FakeSandbox, HangingJournal, Puppet, Strings};
pub use world::{World, bounded};

//! One [`World`] to test in: an executor with tools that do as they are told, and a tape of what happened.

mod fakes;
mod world;

pub use fakes::{Act, FailingJournal, FakeSandbox, HangingJournal, Puppet, Strings};
pub use world::{World, bounded};

//! Custody of the processes that wieldy starts.
//!
//! The only crate with `unsafe` code, and of it the only file is `sys.rs`. In reading order: what a backend
//! promises ([`Bare`]); how a command is made ready; how the embedding process follows a supervisor and cleans up
//! after it; what a supervisor says, and how it lives.
#![deny(unsafe_code)]

mod bare;
mod prepare;

#[expect(dead_code, reason = "its parts come one by one")]
mod native;

mod custody;
mod leftovers;
mod report;

mod init;
mod maps;
#[expect(unsafe_code, reason = "the one place for it; every block says why it is sound")]
mod sys;

pub use bare::Bare;

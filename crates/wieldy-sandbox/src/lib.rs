//! Custody of the processes that wieldy starts.
//!
//! The only crate with `unsafe` code, and of it the only file is `sys.rs`. In reading order: what a backend
//! promises ([`Bare`]); how a command is made ready; how the embedding process follows a supervisor and cleans up
//! after it; what a supervisor says, and how it lives.
#![deny(unsafe_code)]

mod bare;
mod prepare;

mod custody;
mod leftovers;
mod report;

#[expect(dead_code, unused_imports, reason = "the native sandbox, which uses it, comes next")]
mod cgroup;

mod init;
mod maps;
#[expect(unsafe_code, reason = "the one place for it; every block says why it is sound")]
mod sys;

pub use bare::Bare;

//! Custody of the processes that wieldy starts.
//!
//! The only crate with `unsafe` code, and of it the only file is `sys.rs`. In reading order: the backends ([`Bare`], [`Native`]); the
//! executor's side of a command; what is said between processes; and then those processes themselves, which are this program
//! once more: the *warden* that makes sandboxes, the *init* of each, the *berths* in which commands run.
#![deny(unsafe_code)]

mod bare;
mod native;

mod custody;
mod link;
mod prepare;
mod wire;

mod berth;
mod tree;
mod warden;
mod watch;
#[expect(unsafe_code, reason = "the one place for it; every block says why it is sound")]
mod sys;

pub use bare::Bare;

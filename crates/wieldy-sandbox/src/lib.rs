//! Starts, confines, measures and ends the processes of calls.
//!
//! The isolation levels are in `levels/`: [`Unconfined`], [`Native`], [`Oci`], with the feature `firecracker` virtual machines, and
//! [`Unavailable`]. Each is put together from the layers, which know nothing of it:
//!
//! - `pool` keeps the sandboxes of sessions, `disk_quota` and `limits` count and judge their use, `state_dir` holds their files.
//! - `view` plans and mounts the file tree that programs see; `filter` has the rules of seccomp and Landlock.
//! - `supervise` runs commands in processes of its own and ends everything that they start; `denials` finds out what they were refused.
//! - `cgroup` limits and measures; [`proxy`] is the way to listed hosts.
//!
//! [`probe`] tries all of it on this machine. This is the only crate with `unsafe` code, which is in `sys.rs` and nowhere else.
#![deny(unsafe_code)]

mod levels;
mod probe;

mod disk_quota;
mod limits;
mod pool;
mod state_dir;

mod denials;
mod filter;
mod supervise;
mod view;

#[cfg_attr(test, allow(dead_code, reason = "`tests/it/cgroup.rs` has it as a module of its own, and uses more of it"))]
mod cgroup;
pub mod proxy;
#[expect(unsafe_code, reason = "the one place for it; every block says why it is sound")]
mod sys;

#[cfg(test)]
mod own_process;

use std::ffi::{CStr, CString};

pub use filter::seccomp::RefusedCall;
#[cfg(feature = "firecracker")]
pub use levels::firecracker::{Firecracker, FirecrackerOptions, FirecrackerProblem};
pub use levels::native::{Native, NativeOptions};
pub use levels::none::Unconfined;
pub use levels::oci::{Oci, OciOptions, OciProblem, OciVersion, Rootfs};
pub use levels::sweep;
pub use levels::unavailable::Unavailable;
pub use pool::IdleLimits;
pub use probe::{Holds, ProbeOptions, ProbeState, Probed, Report, probe};
pub use supervise::socket::{EarlyForkServer, finish};
pub use view::placeholders::is_placeholder;
pub use view::placeholders::sweep::sweep_placeholders;

/// Becomes the helper process that a program was started as, by its name; returns for every other name. `words` are the arguments.
fn become_helper(name: &CStr, words: impl FnOnce() -> Vec<CString>) {
    if name == supervise::fork_server::NAME {
        supervise::fork_server::serve_forever()
    }
    #[cfg(feature = "firecracker")]
    if name.to_bytes().rsplit(|byte| *byte == b'/').next() == Some(levels::firecracker::AGENT_NAME.to_bytes()) {
        levels::firecracker::serve_as_agent(&words())
    }
    let _ = words;
}

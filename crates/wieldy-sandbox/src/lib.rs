//! Custody of the processes that wieldy starts.
//!
//! In reading order: the backends ([`Bare`], [`Native`], [`Oci`], [`Absent`], and with the feature `firecracker` virtual machines); the executor's side of a command; the way out to listed hosts
//! ([`proxy`]) and the tree of limits; what is said between processes; and then those processes themselves, which are this
//! program once more: the *warden* that makes sandboxes, the *init* of each, the *berths* in which commands run.
//!
//! The only crate with `unsafe` code, which is in `sys.rs` and `native/sys_landlock.rs` and nowhere else.
#![deny(unsafe_code)]

mod absent;
mod bare;
#[cfg(feature = "firecracker")]
mod firecracker;
mod native;
mod oci;
mod probe;

mod books;
mod custody;
mod host_program;
mod link;
mod prepare;
mod wire;

#[cfg_attr(test, allow(dead_code, reason = "`tests/it/cgroup.rs` has it as a module of its own, and uses more of it"))]
mod cgroup;
pub mod proxy;

mod berth;
mod memory;
#[expect(unsafe_code, reason = "the one place for it; every block says why it is sound")]
mod sys;
mod tree;
mod warden;
mod watch;

pub use absent::Absent;
pub use bare::Bare;
pub use books::IdleLimits;
#[cfg(feature = "firecracker")]
pub use firecracker::{Firecracker, FirecrackerOptions, FirecrackerProblem};
pub use link::{WardenAhead, finish};
pub use native::held::is_placeholder;
pub use native::left::sweep_placeholders;
pub use native::{Native, NativeOptions};
pub use oci::home::sweep;
pub use oci::{Oci, OciOptions, OciProblem, OciVersion, Rootfs};
pub use probe::{Holds, ProbeOptions, ProbeState, Probed, RefusedCall, Report, probe};

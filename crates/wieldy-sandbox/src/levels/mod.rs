//! The isolation levels, each an implementation of the port `Sandbox`.
//!
//! A level is made of the layers below (`view`, `filter`, `supervise`, `denials`, `cgroup`, `proxy`, `pool`) and
//! imports no other level; `cargo xtask tidy` checks that.

#[cfg(feature = "firecracker")]
pub(crate) mod firecracker;
pub(crate) mod native;
pub(crate) mod none;
pub(crate) mod oci;
pub(crate) mod unavailable;

use std::path::Path;

use crate::cgroup::Hierarchy;
use crate::state_dir;

/// Removes the files that dead executors left below `state`, the folder of executors' own files: those of containers in
/// `oci`, those of guests in `firecracker`. Returns the number of these executors.
pub fn sweep(state: &Path) -> usize {
    let folders = ["oci", "firecracker"].map(|folder| state.join(folder));
    let swept = folders.iter().map(|folder| state_dir::sweep_folder(folder, oci::forget)).sum();
    if swept > 0 {
        // Their cgroups are left behind, too.
        Hierarchy::find().sweep();
    }
    swept
}

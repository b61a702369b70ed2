//! The isolation levels, each an implementation of the port `Sandbox`.
//!
//! A level is made of the layers below (`view`, `filter`, `supervise`, `denials`, `cgroup`, `proxy`, `pool`) and
//! imports no other level; `cargo xtask tidy` checks that.

#[cfg(feature = "firecracker")]
pub(crate) mod firecracker;
pub(crate) mod native;
pub(crate) mod none;
#[cfg(feature = "oci")]
pub(crate) mod oci;
pub(crate) mod unavailable;

use std::path::Path;

use crate::cgroup::Hierarchy;
use crate::state_dir;

/// Removes the files that dead executors left below `state`, the folder of executors' own files: those of containers in
/// `oci`, those of guests in `firecracker`. Returns the number of these executors.
pub fn sweep(state: &Path) -> usize {
    // Without the feature `oci` this program cannot end containers, so it leaves their files to one that can.
    #[cfg(feature = "oci")]
    let swept =
        ["oci", "firecracker"].map(|folder| state_dir::sweep_folder(&state.join(folder), oci::forget)).iter().sum();
    #[cfg(not(feature = "oci"))]
    let swept = state_dir::sweep_folder(&state.join("firecracker"), |_, _| true);
    if swept > 0 {
        // Their cgroups are left behind, too.
        Hierarchy::find().sweep();
    }
    swept
}

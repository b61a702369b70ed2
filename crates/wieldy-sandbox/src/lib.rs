//! Starts, isolates, limits, measures and ends the processes of calls.
//!
//! An isolation level ([`Unconfined`], [`Native`], [`Oci`], `Firecracker`) implements the port `Sandbox`. The levels
//! are built from layers: a level imports layers and never another level, and a layer imports no level. The modules in
//! reading order:
//!
//! | levels | |
//! | --- | --- |
//! | `levels/none.rs` | supervised processes without isolation |
//! | `levels/native/mod.rs` | namespaces, mounts, Landlock, seccomp and cgroups; makes sandboxes and warm inits |
//! | `levels/native/sandbox.rs` | one native sandbox: its init, supervisors, cgroups and proxy; runs its commands |
//! | `levels/native/warm.rs` | inits started before the workspace is known |
//! | `levels/native/rest.rs` | removes the placeholders of idle sandboxes, and restores them before the next command |
//! | `levels/native/{idmap,cgroup_parent,options}.rs` | id-mapped mounts; cgroups above several sandboxes; settings |
//! | `levels/oci/` | containers of runc, crun, youki and gVisor |
//! | `levels/firecracker/` | virtual machines (feature `firecracker`) |
//! | `levels/unavailable.rs` | a level that cannot be used here: returns the reason and a hint |
//! | `probe/` | tries levels, kernel features and cgroups on this machine, for `wieldy doctor` |
//!
//! | sandboxes | |
//! | --- | --- |
//! | `pool.rs` | the sandboxes of a level: each built once by the first call that needs it and announced; idle ones are evicted |
//! | `disk_quota.rs` | bytes and files that all calls of a session may write together |
//! | `usage.rs` | usage of a command, and the limit that it passed |
//! | `machine.rs` | the processors and memory of this machine |
//! | `private_disk.rs` | private folders of sandboxes on a disk: checks, removal |
//! | `state_dir.rs` | the folder of an executor's containers and guests; removes those of dead executors |
//!
//! | file tree of a sandbox | |
//! | --- | --- |
//! | `view/plan.rs` | the mount plan: the steps that build the file tree, as a value |
//! | `view/planner.rs`, `view/planner/protect.rs` | makes the plan of a confinement; the protected paths in it |
//! | `view/plan_cache.rs` | cached plans, used again while the host's files are unchanged |
//! | `view/host.rs` | reads the host's files for the planner |
//! | `view/system_paths.rs`, `view/secret_scan.rs` | system folders and their secrets; secrets deep in workspaces |
//! | `view/placeholders.rs`, `view/placeholders/` | files made on the host to mount over: locks, marks, removal |
//! | `view/masked.rs` | checks that hidden and protected files are still the files that were masked |
//! | `view/mounts.rs` | carries a plan out in a mount namespace |
//! | `view/identity.rs` | uids and gids of a sandbox's processes, inside and outside |
//! | `view/path_lookup.rs` | the access that a plan gives to a path |
//!
//! | kernel filters | |
//! | --- | --- |
//! | `filter/syscalls.rs` | lists of allowed and refused system calls |
//! | `filter/seccomp.rs` | the seccomp filter from these lists, installed by `supervise/init.rs` |
//! | `filter/oci_profile.rs` | the same as an OCI profile, written by `levels/oci/bundle.rs` (gVisor has its own kernel) |
//! | `filter/landlock.rs` | Landlock rules: a second lock on the files |
//!
//! | processes | |
//! | --- | --- |
//! | `supervise/fork_server.rs` | beside the executor: makes inits and supervisors, reaps them, cleans up |
//! | `supervise/init.rs` | process 1 of a native sandbox: mounts, drops privileges, makes supervisors |
//! | `supervise/supervisor.rs` | runs one command at a time, as the subreaper of its process tree |
//! | `supervise/tree.rs` | signals, reaps and kills that tree |
//! | `supervise/watch.rs`, `supervise/memory.rs` | limits that no cgroup enforces: disk, files, memory, processes |
//! | `supervise/protocol.rs`, `supervise/socket.rs` | messages between these processes; the executor's sockets |
//! | `supervise/run.rs`, `supervise/pipes.rs` | the executor's side of one command; its input and output |
//! | `supervise/host_process.rs` | runs programs of OCI runtimes and Firecracker, outside of every sandbox |
//! | `supervise/namespaces.rs` | names the kernel setting that forbids namespaces |
//!
//! | denials, cgroups, network, system calls | |
//! | --- | --- |
//! | `denials/files.rs`, `denials/network.rs` | files and hosts that a command was refused |
//! | `cgroup/limits.rs` | writes the limits of a cgroup, v1 and v2; called through `Group::set` by `levels/native/{sandbox,warm}.rs`, `levels/oci/{cgroup_parent,commands}.rs` and `levels/firecracker/machine.rs` |
//! | `cgroup/` | the rest of the tree of cgroups (v1, v2, hybrid): usage, removal of those of dead executors |
//! | [`proxy`] | the HTTP proxy to listed hosts, the only way out of a sandbox with such a list; `proxy/names.rs` compares the names |
//! | `sys.rs` | system calls that need `unsafe`; no other source file has it |
//!
//! The setting `--network`, and the code that enforces it:
//!
//! | level | |
//! | --- | --- |
//! | none | nothing: it is not enforced |
//! | native | begin at `proxy_hosts` in `levels/native/sandbox.rs`: a network namespace without a network (`supervise/fork_server.rs`), for listed hosts with the proxy's listener in it (`supervise/init.rs`) |
//! | runc, crun, youki, gVisor | a network namespace of the container (`levels/oci/bundle.rs`; gVisor also by `--network` in `levels/oci/runtime.rs`); for listed hosts one with the proxy's listener (`levels/oci/netns.rs`) |
//! | firecracker | no network; anything else is refused (`levels/firecracker/machine.rs`) |
#![deny(unsafe_code)]
#![cfg_attr(not(feature = "oci"), allow(dead_code, reason = "some parts of the layers serve containers only"))]

mod levels;
mod probe;

mod disk_quota;
mod machine;
mod pool;
mod private_disk;
mod state_dir;
mod usage;

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
#[cfg(feature = "oci")]
pub use levels::oci::{Oci, OciOptions, OciProblem, OciVersion, Rootfs};
pub use levels::sweep;
pub use levels::unavailable::Unavailable;
pub use machine::machine;
pub use pool::IdleLimits;
pub use probe::{Holds, ProbeOptions, ProbeState, Probed, Report, probe};
pub use supervise::socket::{EarlyForkServer, finish};
pub use view::placeholders::is_placeholder;
pub use view::placeholders::sweep::sweep_placeholders;

/// Runs as a helper process and never returns, if this program was started by the name of one. `words` returns the
/// arguments.
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

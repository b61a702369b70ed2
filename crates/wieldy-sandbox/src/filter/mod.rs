//! The filters that the kernel applies to sandboxed programs: seccomp for system calls, and Landlock as a second check
//! of files.
//!
//! `syscalls` has the lists of calls; `seccomp` compiles them for the native level, `oci_profile` writes them for OCI
//! runtimes.

pub(crate) mod landlock;
#[cfg(feature = "oci")]
pub(crate) mod oci_profile;
pub(crate) mod seccomp;
pub(crate) mod syscalls;

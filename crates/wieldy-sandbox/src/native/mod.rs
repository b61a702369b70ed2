//! The native sandbox: namespaces, a mount tree of its own, Landlock, seccomp, cgroups.

pub(crate) mod facts;
pub(crate) mod landlock;
pub(crate) mod plan;
pub(crate) mod planner;
pub(crate) mod seccomp;
pub(crate) mod secrets;
#[expect(unsafe_code, reason = "one system call that no crate offers; the block says why it is sound")]
pub(crate) mod sys_landlock;
mod syscalls;

#[cfg(test)]
mod alone;

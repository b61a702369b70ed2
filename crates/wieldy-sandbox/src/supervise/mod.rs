//! Starts processes, watches them, and ends them with all their descendants.
//!
//! Three helper processes run the executor's own program: the fork server makes sandboxes and supervisors, an init is
//! the first process of a native sandbox, and a supervisor runs commands, one at a time. `ARCHITECTURE.md` draws them,
//! and the head of `lib.rs` lists the files.

pub(crate) mod fork_server;
pub(crate) mod host_process;
pub(crate) mod init;
pub(crate) mod memory;
pub(crate) mod namespaces;
pub(crate) mod pipes;
pub(crate) mod protocol;
pub(crate) mod run;
pub(crate) mod socket;
pub(crate) mod supervisor;
pub(crate) mod tree;
pub(crate) mod watch;

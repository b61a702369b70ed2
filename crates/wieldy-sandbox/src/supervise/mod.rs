//! Processes: started, watched and ended, with everything that they start themselves.
//!
//! The executor's program runs three more times beside it, in the roles that `ARCHITECTURE.md` draws: `fork_server` makes sandboxes and
//! supervisors, `init` is the first process of a native sandbox, `supervisor` runs one command after the other. `protocol` has their
//! messages and `socket` the executor's ends of their sockets.
//!
//! `run` is the executor's side of one command and `pipes` its input and output; `host_process` the same for a program outside of every sandbox. A supervisor uses `tree`
//! (all processes of its command), `watch` and `memory` (limits that no control group enforces).

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

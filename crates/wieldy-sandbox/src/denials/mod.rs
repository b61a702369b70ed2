//! Denials: finds out which files and hosts a command was refused, for the result of its call.
//!
//! The kernel reports no denial to the executor. `files` reads the end of a failed command's output and asks the plan about the paths in
//! it; `network` does so for names of hosts where there is no network, and has the refusals of the proxy where there is one.

pub(crate) mod files;
pub(crate) mod network;

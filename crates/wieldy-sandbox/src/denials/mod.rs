//! Finds out which files and hosts a command was refused, for the result of its call.
//!
//! The kernel reports no denial to the executor. `files` reads the end of a failed command's output and looks up its
//! paths in the plan. `network` does so for host names if there is no network, and collects the refusals of the proxy
//! if there is one.

pub(crate) mod files;
pub(crate) mod network;

//! The commands, one file each.

pub(crate) mod audit;
pub(crate) mod batch;
pub(crate) mod call;
pub(crate) mod code;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod doctor;
pub(crate) mod history;
pub(crate) mod init;
pub(crate) mod login;
pub(crate) mod mcp;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod tools;
pub(crate) mod trust;

mod arguments;
mod request;
pub(crate) mod upstreams;
pub(crate) mod vault;

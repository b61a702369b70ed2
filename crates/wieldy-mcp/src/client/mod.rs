//! Turns the tools of other MCP servers into tools of an executor: [`Upstreams`] starts the servers, lists their tools
//! and registers them.
//!
//! Layers, from the executor downwards: `tool` → `upstream` (start, retry, pinning) → `connection` (one MCP session) →
//! `stdio`, or for HTTP `direct` (`tools/call`) and `wire` (everything that the SDK sends) → `exchange` → `line`.

mod answer;
mod connection;
mod copies;
mod definition;
mod direct;
mod events;
mod exchange;
mod failure;
mod http;
pub mod import;
mod line;
mod login;
mod pins;
mod settings;
mod stdio;
mod task;
mod tool;
mod upstream;
mod upstreams;
mod watched;
mod wire;

pub use definition::Definition;
pub use failure::Failure;
pub use login::{Answers, Login, LoginError, LoginState};
pub use pins::{PinnedServer, PinnedTool, Pins, PinsError};
pub use settings::{
    Address, CALLS_MAX_DEFAULT, LoginSettings, OnChange, Program, Reach, START_TIMEOUT_DEFAULT, ServerSettings, Start,
    ToolRule, ToolRules,
};
pub use upstreams::{ServerState, ServerStatus, SettingsError, Upstreams};

//! Turns the tools of other MCP servers into tools of an executor: [`Upstreams`] starts the servers, lists their tools
//! and registers them.
//!
//! Layers, from the executor downwards: `tool` → `upstream` (start, retry, pinning) → `upstream_session` (one MCP
//! session) → `stdio_process`, or for HTTP `http_call` (`tools/call`) and `http_transport` (also for all that the SDK
//! sends) → `http_request` → `http_pool`. `router` sits between the transports and the SDK.

mod answer;
mod failure;
mod header_params;
mod http_call;
mod http_pool;
mod http_request;
mod http_setup;
mod http_transport;
pub mod import;
mod login;
mod pins;
mod router;
mod settings;
mod sse;
mod stdio_process;
mod tool;
mod tool_definition;
mod upstream;
mod upstream_session;
mod upstream_task;
mod upstreams;

pub use failure::Failure;
pub use login::{Login, LoginError, LoginRedirect, LoginState};
pub use pins::{PinnedServer, PinnedTool, Pins, PinsError};
pub use settings::{
    Address, CALLS_MAX_DEFAULT, LoginSettings, OnChange, Program, Reach, START_TIMEOUT_DEFAULT, ServerSettings, Start,
    ToolRule, ToolRules,
};
pub use tool_definition::ToolDefinition;
pub use upstreams::{ServerState, ServerStatus, SettingsError, Upstreams};

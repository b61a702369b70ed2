//! MCP in both directions: [`server`] offers an executor's tools to MCP clients, [`client`] makes the tools of other MCP
//! servers tools of an executor. [`mod@convert`] is the border between MCP's words and ours.

pub mod client;
mod convert;
pub mod server;

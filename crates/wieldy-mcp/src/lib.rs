//! MCP in both directions: [`server`] offers an executor's tools to MCP clients, [`client`] turns the tools of other
//! MCP servers into tools of an executor. [`mod@convert`] converts between MCP's types and ours.

pub mod client;
mod convert;
pub mod server;

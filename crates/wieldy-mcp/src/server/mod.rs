//! An executor as an MCP server.

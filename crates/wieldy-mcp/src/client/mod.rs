//! Other MCP servers as tools.

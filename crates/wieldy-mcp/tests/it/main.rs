//! What `wieldy-mcp` promises, tried.

mod client;

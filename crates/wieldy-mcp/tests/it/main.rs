//! What `wieldy-mcp` promises, tried.

//! What `wieldy-mcp` promises, tried.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod client;
mod server;

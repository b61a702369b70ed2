//! Integration tests of `wieldy-mcp`.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod client;
mod server;

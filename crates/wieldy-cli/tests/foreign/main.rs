//! Tests of wieldy with programs of other projects: MCP servers behind it, MCP clients and agents in front of it.
//!
//! `cargo xtask foreign` installs those programs and runs these tests; without it they skip themselves.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod agents;
mod clients;
mod conformance;
mod own;
mod servers;
mod world;

//! Tests of the library through its public API.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod artifacts;
mod examples;
mod facade;
mod log;

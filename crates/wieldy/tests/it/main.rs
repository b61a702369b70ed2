//! The library as those who embed it see it.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod artifacts;
mod examples;
mod facade;
mod log;

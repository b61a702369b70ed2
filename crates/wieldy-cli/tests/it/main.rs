//! The command as people and scripts use it: each test runs the binary and compares all that it prints.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod audit;
mod bad_input;
mod batch;
mod call;
mod configuration;
mod containers;
mod doctor;
mod encrypted;
mod exit_codes;
mod history;
mod interrupt;
mod logging;
mod login;
mod mcp;
mod serve;
mod terminal;
mod tools;
mod upstreams;
mod world;

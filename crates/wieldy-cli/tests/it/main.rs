//! Tests of the command as people and scripts use it: each test runs the binary and compares its whole output.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod audit;
mod bad_input;
mod batch;
mod call;
mod callers;
mod code;
mod configuration;
mod containers;
mod doctor;
mod documents;
mod encrypted;
mod examples;
mod exit_codes;
mod history;
mod interrupt;
mod logging;
mod login;
mod mcp;
mod names;
mod run;
mod sandboxes;
mod secrets;
mod serve;
mod state;
mod terminal;
mod tool_search;
mod toolchains;
mod tools;
mod trust;
mod upstreams;
mod vault;
mod world;

//! Compiles every Rust snippet of the README and of the guide. It runs none of them, because each needs something of
//! the reader's.
#![allow(
    dead_code,
    unused,
    unreachable_code,
    clippy::all,
    clippy::unwrap_used,
    reason = "snippets show one thing and leave the rest out"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use wieldy::*;

/// The reader's tool.
struct DropTable;
impl Tool for DropTable {
    type Args = Place;
    fn spec(&self) -> ToolSpec {
        ToolSpec::new("drop_table", "Drops a table")
    }
    async fn run(&self, _: Place, _: &Run) -> Result<Outcome, RunError> {
        Ok(Outcome::text(""))
    }
}

/// The reader's arguments.
#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Place {
    name: String,
}

/// The reader's service.
struct Service;
struct Weather {
    degrees: f64,
}
impl Service {
    async fn ask(&self, _: &str) -> Result<Weather, std::io::Error> {
        Ok(Weather { degrees: 0.0 })
    }
}

async fn ask_somehow(_: &str) -> bool {
    false
}
fn send_somewhere(_: serde_json::Value) {}
fn wait_for(_: Option<Duration>) {}
fn tell_the_person() {}
fn give_up() {}

include!(concat!(env!("OUT_DIR"), "/guide.rs"));

#[test]
fn the_snippets_of_the_guide_compile() {}

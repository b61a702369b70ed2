//! MCP clients of other projects, in front of wieldy: each goes through the same steps, and must get the same answers.

use std::process::Command;

use serde_json::{Value, json};

use crate::world::{Served, World};

/// A tool that needs a person's confirmation.
const ASK: &str = r#"
[[tool]]
name = "ask"
description = "Wants to be confirmed"
command = ["echo", "it ran"]
confirm = true
"#;

#[test]
fn the_old_sdk_for_typescript() {
    both_ways("2025-06-18", |world| node(world, "sdk-old"));
}

#[test]
fn the_last_sdk_for_typescript_of_its_first_generation() {
    both_ways("2025-11-25", |world| node(world, "@modelcontextprotocol/sdk"));
}

#[test]
fn the_newest_sdk_for_typescript() {
    both_ways("2026-07-28", |world| node(world, "@modelcontextprotocol/client"));
}

#[test]
fn the_old_sdk_for_python() {
    both_ways("2025-06-18", |world| python(world, "python-old"));
}

#[test]
fn the_newest_sdk_for_python() {
    both_ways("2026-07-28", |world| python(world, "python"));
}

#[test]
fn the_inspector_lists_and_calls() {
    let Some(world) = world() else { return };
    let wieldy = env!("CARGO_BIN_EXE_wieldy");
    let served = Served::new(&world, &[]);
    for target in [vec![wieldy, "mcp"], vec![&*served.url]] {
        let inspect = |arguments: &[&str]| {
            let mut inspector = world.any(&world.program("bin/node"));
            let script = "npm/node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js";
            inspector.arg(world.program(script)).arg("--cli").args(&target).arg("--method").args(arguments);
            world.filtered(&said(&mut inspector))
        };
        let listed = inspect(&["tools/list"]);
        let names: Vec<&str> =
            listed["tools"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
        let ours = world.json(&["tools", "--json"]);
        let mut ours: Vec<&str> = ours.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
        // The tools that the server adds.
        ours.extend(["batch", "result_wait"]);
        ours.sort_unstable();
        assert_eq!(names, ours);
        let echoed = inspect(&["tools/call", "--tool-name", "Bash", "--tool-arg", "command=echo hi"]);
        assert_eq!(
            echoed,
            json!({
                "content": [{"type": "text", "text": "hi\n"}], "isError": false,
                "_meta": {"wieldy/execution": "[id]", "wieldy/structured": {"exit_code": 0}},
            })
        );
        let failed = inspect(&["tools/call", "--tool-name", "Read", "--tool-arg", "path=missing.txt"]);
        assert_eq!((&failed["isError"], &failed["content"]), (&json!(true), &expected("")["missing"]["content"]));
    }
    served.stop();
    world.is_left_empty();
}

fn node(world: &World, release: &str) -> Command {
    let mut command = world.any(&world.program("bin/node"));
    command.arg(world.path("client.mjs")).arg(release);
    command
}

fn python(world: &World, release: &str) -> Command {
    let mut command = world.any(&world.program(release).join("bin/python"));
    command.arg(world.path("client.py"));
    command
}

/// Runs a client of this protocol revision with `wieldy mcp`, and with `wieldy serve`.
fn both_ways(revision: &str, client: impl Fn(&World) -> Command) {
    let Some(world) = world() else { return };
    let wieldy = env!("CARGO_BIN_EXE_wieldy");
    assert_eq!(said(client(&world).arg(wieldy).arg("mcp")), expected(revision), "over standard input and output");
    world.is_left_empty();
    let served = Served::new(&world, &[]);
    assert_eq!(said(client(&world).arg(&served.url)), expected(revision), "over HTTP");
    served.stop();
    world.is_left_empty();
    let history = world.json(&["history", "--json"]);
    let statuses = history["executions"].as_array().unwrap().iter().rev().map(|call| call["status"].as_str().unwrap());
    let each = ["success", "success", "failed", "success", "cancelled", "success", "permission_denied", "success"];
    assert_eq!(statuses.filter(|status| *status != "validation_error").collect::<Vec<_>>(), [each, each].concat());
}

fn world() -> Option<World> {
    let world = World::new("")?.file(".wieldy/tools/ask.toml", ASK).file("note.txt", "hello\n");
    Some(world.file("client.py", include_str!("client.py")).script("client.mjs", include_str!("client.mjs")))
}

fn said(client: &mut Command) -> Value {
    let output = client.output().unwrap();
    let [said, error] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{error}"))
}

/// Returns the answers that every client must get.
fn expected(revision: &str) -> Value {
    let text = |text: &str, is_error: bool| json!({"isError": is_error, "content": [{"type": "text", "text": text}]});
    let question = "May the tool `ask` run (the tool requires it)?";
    json!({
        "server": "wieldy",
        "revision": revision,
        "tools": ["Bash", "Read", "ask"],
        "read": text("hello\n", false),
        "bash": text("hi\n", false),
        "missing": text(
            "Error E3302 FILE_NOT_FOUND: there is no `missing.txt`\n\
             Suggestion: look for it with `Glob`, such as `**/name*`, or with `List`",
            true,
        ),
        "unknown": -32602,
        "progress": {"text": "1\n2\n3\n4\n5\n6\n", "inSteps": true},
        "cancelled": true,
        "confirmed": text("it ran\n", false),
        "declined": text(
            "Error E3005 CONFIRMATION_DENIED: the call was not confirmed\n\
             Suggestion: do it another way, or ask the person why",
            true,
        ),
        "questions": [question, question],
        "artifact": ["1\n2\n3\n4\n5\n6\n7\n8\n9\n10"],
    })
}

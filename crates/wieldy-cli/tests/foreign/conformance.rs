//! The official conformance suite, as a client of `wieldy serve` and as a server for `wieldy call`. As a client it runs
//! twice: with wieldy in front of an MCP server that has the tools which the suite calls, and with these tools as
//! wieldy's own.
//!
//! `conformance.toml` lists the features that wieldy does not offer, with the reason. An unlisted scenario must pass
//! and a listed one must fail, so that the list is neither too short nor too long.

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::own::{Own, PNG, TASK_AFTER, WAV};
use crate::world::{Served, World};

/// A gateway: the tools that the suite calls belong to an MCP server in a sandbox, except for one.
const GATEWAY: &str = r#"
[serve]
listen = "127.0.0.1:0"
[serve.mcp]
task-after = "[task-after]"
[mcp.servers.fixtures]
command = "[programs]/bin/node"
args = ["[root]/work/fixtures.mjs"]
isolation = "native"
mounts = ["[programs]:[programs]"]
[mcp.servers.fixtures.tools]
test_streaming_elicitation = { confirm = true }
test_input_required_result_elicitation = { confirm = true }
test_input_required_result_request_state = { confirm = true }
test_input_required_result_tampered_state = { confirm = true }
confirm_delete = { confirm = true }
test_tool_with_task = { confirm = true }
"#;
/// A tool of wieldy's own, under the name that the suite looks for in the list.
const OWN: &str = include_str!("fixtures.toml");
const FIXTURES: &str = include_str!("fixtures.mjs");
const LIST: &str = include_str!("conformance.toml");

/// The releases of the suite, by the names of their installations.
const OLD: &str = "conformance";
const NEXT: &str = "conformance-next";

#[test]
fn a_gateway_of_2025_11_25_conforms_by_the_old_suite() {
    judge_gateway(OLD, &["--suite", "all"]);
}

#[test]
fn a_gateway_of_2025_11_25_conforms() {
    judge_gateway(NEXT, &["--requirements", "2025-11-25"]);
}

#[test]
fn a_gateway_of_2026_07_28_conforms() {
    judge_gateway(NEXT, &["--requirements", "2026-07-28"]);
}

#[test]
fn a_server_of_2025_11_25_conforms_by_the_old_suite() {
    judge_own(OLD, &["--suite", "all"]);
}

// Shows: E8.4
#[test]
fn a_server_of_2025_11_25_conforms() {
    judge_own(NEXT, &["--requirements", "2025-11-25"]);
}

// Shows: E8.4
#[test]
fn a_server_of_2026_07_28_conforms() {
    judge_own(NEXT, &["--requirements", "2026-07-28"]);
}

#[test]
fn a_client_of_2025_11_25_conforms_by_the_old_suite() {
    judge_client(OLD, &["--suite", "all"]);
}

#[test]
fn a_client_of_2025_11_25_conforms() {
    judge_client(NEXT, &["--requirements", "2025-11-25"]);
}

#[test]
fn a_client_of_2026_07_28_conforms() {
    judge_client(NEXT, &["--requirements", "2026-07-28"]);
}

/// The suite only checks that there is an image; this test checks that it is the right one.
#[test]
fn answers_of_the_fixtures_are_passed_on_unchanged() {
    let Some(world) = gateway() else { return };
    let own = Own::new();
    let config = fs::read_to_string(world.path("wieldy.toml")).unwrap();
    let config = format!("{config}[mcp.servers.own]\nurl = \"{}\"\n", own.url);
    fs::write(world.path("wieldy.toml"), config).unwrap();
    let text = |text: &str| json!({"type": "text", "text": text});
    let image = json!({"type": "image", "data": PNG, "mimeType": "image/png"});
    let resource = |uri: &str, mime: &str, text: &str| json!({"type": "resource", "resource": {"uri": uri, "mimeType": mime, "text": text}});
    let plain = resource("test://embedded-resource", "text/plain", "This is an embedded resource content.");
    let mixed = resource("test://mixed-content-resource", "application/json", r#"{"test":"data","value":123}"#);
    for (tool, content) in [
        ("test_simple_text", json!([text("This is a simple text response for testing.")])),
        ("test_image_content", json!([image])),
        ("test_audio_content", json!([{"type": "audio", "data": WAV, "mimeType": "audio/wav"}])),
        ("test_embedded_resource", json!([plain])),
        ("test_multiple_content_types", json!([text("Multiple content types test:"), image, mixed])),
        ("greet", json!([text("Hello, Ada!")])),
        ("slow_compute", json!([text("computed \"x\"")])),
    ] {
        let told = json!({"status": "success", "content": content});
        for server in ["fixtures", "own"] {
            // The last call becomes a task on its way, which is followed to its end.
            let arguments = json!({"name": "Ada", "seconds": 1, "label": "x"});
            assert_eq!(world.call(&format!("{server}__{tool}"), &arguments), told, "{server}__{tool}");
        }
    }
    world.is_left_empty();
}

/// Makes a workspace with the configuration of the gateway.
fn gateway() -> Option<World> {
    let config = GATEWAY.replace("[task-after]", &format!("{}ms", TASK_AFTER.as_millis()));
    let world = World::new(&config)?;
    Some(world.file(".wieldy/tools/fixtures.toml", OWN).script("fixtures.mjs", FIXTURES))
}

fn judge_gateway(suite: &str, which: &[&str]) {
    let Some(world) = gateway() else { return };
    let served = Served::new(&world, &[]);
    judge(&world, suite, &[&["server", "--url", &served.url], which].concat(), "server");
    served.stop();
    world.is_left_empty();
}

fn judge_own(suite: &str, which: &[&str]) {
    let Some(world) = World::new("") else { return };
    let own = Own::new();
    judge(&world, suite, &[&["server", "--url", &own.url], which].concat(), "server");
}

fn judge_client(suite: &str, which: &[&str]) {
    let Some(world) = World::new("") else { return };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/foreign/judged.mjs");
    let command = format!("{} {script} {}", world.program("bin/node").display(), env!("CARGO_BIN_EXE_wieldy"));
    judge(&world, suite, &[&["client", "--command", &command], which].concat(), "client");
    world.is_left_empty();
}

/// Runs the suite, and compares its failures with the list.
fn judge(world: &World, suite: &str, arguments: &[&str], side: &str) {
    let results = world.root().join("results");
    let mut command = world.any(&world.program("bin/node"));
    command.arg(world.program(&format!("npm/node_modules/{suite}/dist/index.js")));
    command.args(arguments).arg("--output-dir").arg(&results);
    if side == "client" {
        // The suite runs all scenarios at once, each with processes of its own.
        command.args(["--timeout", "120000"]);
    }
    // The exit code says less than the results: the suite does not know the list of missing features.
    assert!(command.stdout(Stdio::null()).status().unwrap().code().is_some());
    let scenarios = read(&results, side);
    assert!(scenarios.len() >= 18, "the suite ran: {scenarios:?}");
    let list: BTreeMap<String, BTreeMap<String, String>> = toml::from_str(LIST).unwrap();
    let (absent, timed) = (&list[&format!("{side}-absent")], &list["timed"]);
    let mut wrong = Vec::new();
    for (scenario, checks) in &scenarios {
        if timed.contains_key(scenario) {
            continue;
        }
        let failed = checks.iter().filter(|(_, status)| matches!(status.as_str(), "FAILURE" | "WARNING"));
        let failed: Vec<&str> = failed.map(|(check, _)| check.as_str()).collect();
        // The form of messages is checked in every scenario, so this check alone shows nothing.
        let is_shown = checks.iter().any(|(check, status)| status == "SUCCESS" && check != "wire-schema-valid");
        if is_listed(absent, scenario) {
            if failed.is_empty() && is_shown {
                wrong.push(format!("{scenario} passes, and is listed"));
            }
            continue;
        }
        // A scenario may pass as a whole while some of its checks do not apply.
        let listed = |check: &str| is_listed(absent, &format!("{scenario}:{check}"));
        wrong.extend(failed.iter().filter(|check| !listed(check)).map(|check| format!("{scenario}:{check} fails")));
        for (check, status) in checks.iter().filter(|(check, _)| listed(check) && !failed.contains(&check.as_str())) {
            wrong.push(format!("{scenario}:{check} is listed, and its status is {status}"));
        }
        if !is_shown {
            wrong.push(format!("{scenario} shows nothing"));
        }
    }
    assert!(wrong.is_empty(), "{suite} {arguments:?}: {wrong:#?}\n{}", said(&results, &wrong));
}

/// Returns the output of clients in the scenarios that went wrong.
fn said(results: &std::path::Path, wrong: &[String]) -> String {
    let mut said = String::new();
    for entry in fs::read_dir(results).unwrap().flatten() {
        let name = entry.file_name().display().to_string();
        if wrong.iter().any(|wrong| name.starts_with(wrong.split([':', ' ']).next().unwrap())) {
            let file = |file| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
            said += &format!("── {name}\n{}{}", file("stdout.txt"), file("stderr.txt"));
        }
    }
    said
}

fn is_listed(list: &BTreeMap<String, String>, name: &str) -> bool {
    list.keys().any(|known| match known.strip_suffix('*') {
        Some(family) => name.starts_with(family),
        None => name == known,
    })
}

/// Reads the checks of each scenario and their status from the files of the suite.
fn read(results: &std::path::Path, side: &str) -> BTreeMap<String, Vec<(String, String)>> {
    let mut scenarios = BTreeMap::new();
    let mut folders = vec![results.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else if entry.file_name() == "checks.json" {
                let name = folder.strip_prefix(results).unwrap().display().to_string();
                // The folder's name ends with the time: 25 characters with the dash before it.
                let name = &name[..name.len() - 25];
                let name = if side == "server" { &name["server-".len()..] } else { name };
                let checks: Vec<Value> = serde_json::from_slice(&fs::read(entry.path()).unwrap()).unwrap();
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let checks = checks.iter().map(|check| (text(&check["id"]), text(&check["status"])));
                scenarios.insert(name.to_owned(), checks.collect());
            }
        }
    }
    scenarios
}

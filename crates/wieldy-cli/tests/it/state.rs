//! Tests of `GetState`, `GetMetrics`, `GetLogs` and `QueryVFS`, on the command line and over MCP.

use serde_json::{Value, json};

use crate::mcp::Client;
use crate::world::World;

fn lines(answer: &Value) -> Vec<String> {
    answer["result"]["content"][0]["text"].as_str().unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn facts_are_listed_and_shown_one_by_one_and_in_groups() {
    let world = World::new();
    let keys = world.json(&["call", "GetState", "--json"]);
    let keys: Vec<&str> = keys["structured"]["keys"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for key in ["calls.running", "limits.memory_bytes", "processes.running", "session.agent", "tasks.running"] {
        assert!(keys.contains(&key), "{key}: {keys:?}");
    }
    insta::assert_snapshot!(world.run(&["call", "GetState", "key=calls"]), @"
    exit: 0
    ----- stdout -----
    calls.running: 1
    calls.waiting: 0
    ----- stderr -----
    ");
    insta::assert_snapshot!(world.run(&["call", "GetState", "key=calls.runing"]), @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3303]: there is no fact `calls.runing`
    hint: did you mean `calls.running` or `calls.waiting`?
    ");
}

#[test]
fn the_index_of_the_code_and_the_vaults_are_facts() {
    let world = World::new()
        .file("a.rs", "fn greet() {}")
        .file("notes/b.md", "B")
        .file("wieldy.toml", "vault.root = \"notes\"");
    let mut ada = Client::start(&world, &["--agent", "ada"]);
    let before = lines(&ada.call(1, "GetState", json!({"key": "vault"})));
    assert_eq!(before, ["vault.projects: [\"default\"]"]);
    ada.call(2, "search_code", json!({"query": "greet"}));
    let index = lines(&ada.call(3, "GetState", json!({"key": "index"})));
    assert_eq!(index, [r#"index.code: {"files":3,"indexed":3,"skipped":{},"complete":true}"#]);
    ada.end();
}

#[test]
fn facts_over_mcp_are_the_callers_own() {
    let world = World::new().file("a.txt", "hi");
    let mut ada = Client::start(&world, &["--agent", "ada", "--session", "s1"]);
    ada.call(1, "Read", json!({"path": "a.txt"}));
    ada.call(2, "Read", json!({"path": "nowhere.txt"}));
    let state = ada.call(3, "GetState", json!({"key": "session"}));
    let told = lines(&state);
    assert!(told.contains(&"session.agent: ada".to_owned()) && told.contains(&"session.id: s1".to_owned()), "{told:?}");
    let metrics = lines(&ada.call(4, "GetMetrics", json!({"tool": "Read"})));
    assert!(metrics[0].starts_with("Read: 2 calls, 1 failed; p50 "), "{metrics:?}");
    assert!(metrics.contains(&"now calls.running: 1".to_owned()), "{metrics:?}");
    let logs = lines(&ada.call(5, "GetLogs", json!({"level": "warn"})));
    assert!(logs.len() == 1 && logs[0].contains(" warn tool.call.failure Read "), "{logs:?}");
    ada.end();

    let mut bob = Client::start(&world, &["--agent", "bob"]);
    let metrics = lines(&bob.call(1, "GetMetrics", json!({"tool": "Read"})));
    assert_eq!(metrics[0], "[no call fits]");
    let logs = lines(&bob.call(2, "GetLogs", json!({"level": "info"})));
    assert!(logs.iter().all(|line| !line.contains(" Read ")), "{logs:?}");
    bob.end();
}

#[test]
fn artifacts_are_found_by_their_own_maker_in_their_own_workspace() {
    let world = World::new().file("large.txt", &"needle\n".repeat(20_000)).file("other/a.txt", "hi");
    let mut ada = Client::start(&world, &["--agent", "ada"]);
    ada.call(1, "Bash", json!({"command": "cat large.txt"}));
    let found = lines(&ada.call(2, "QueryVFS", json!({"kind": "artifact", "text": "needle"})));
    assert!(
        found.len() == 1 && found[0].starts_with("artifact:") && found[0].contains("  140000 bytes  "),
        "{found:?}"
    );
    ada.end();
    // The same agent finds it again in another process.
    for (arguments, count) in
        [(&["--agent", "ada"][..], 1), (&["--agent", "bob"], 0), (&["--agent", "ada", "--workspace", "other"], 0)]
    {
        let mut client = Client::start(&world, arguments);
        let found = lines(&client.call(1, "QueryVFS", json!({"kind": "artifact"})));
        assert_eq!(
            found.iter().filter(|line| line.starts_with("artifact:")).count(),
            count,
            "{arguments:?}: {found:?}"
        );
        client.end();
    }
}

//! On whose behalf calls are made: the names of callers, checked and recorded.

use std::process::Command;

use serde_json::{Value, json};

use crate::mcp::Client;
use crate::world::World;

/// Returns the name of the account that runs the tests.
pub(crate) fn account() -> String {
    let output = Command::new("id").arg("-un").output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Returns the names of the last call's caller.
fn last_caller(world: &World) -> Value {
    let call = world.json(&["history", "--limit", "1", "--json"])["executions"][0].take();
    json!([call["agent"], call["tenant"], call["session"], call["user"], call["error_code"]])
}

#[test]
fn a_call_is_recorded_for_the_account_unless_said_otherwise() {
    let world = World::new().file("a.txt", "one").file("batch.json", r#"[{"tool": "List"}]"#);
    let world = world.variable("USER", "mallory");
    assert_eq!(world.code(&["call", "Read", "path=a.txt"]), Some(0));
    assert_eq!(last_caller(&world), json!(["local", null, null, account(), null]));
    for command in [
        &["call", "Read", "path=a.txt"][..],
        &["batch", "batch.json"],
        &["run", "--isolation", "none", "--network", "open"],
    ] {
        let (user, tenant) = (["--user", "ada"], ["--tenant", "acme"]);
        let program: &[&str] = if command[0] == "run" { &["--", "true"] } else { &[] };
        assert_eq!(world.code(&[command, &user, &tenant, program].concat()), Some(0), "{command:?}");
        assert_eq!(last_caller(&world), json!(["local", "acme", null, "ada", null]), "{command:?}");
    }
    let mut client = Client::start(&world, &[]);
    client.call(1, "Read", json!({"path": "a.txt"}));
    client.end();
    assert_eq!(last_caller(&world)[3], json!(account()));
    let mut client = Client::start(&world, &["--user", "bob", "--tenant", "acme", "--session", "s"]);
    client.call(1, "Read", json!({"path": "a.txt"}));
    client.end();
    assert_eq!(last_caller(&world), json!(["tester", "acme", "s", "bob", null]));
}

#[test]
fn names_that_are_none_are_refused_and_recorded_escaped() {
    let world = World::new().file("a.txt", "one").file("batch.json", r#"[{"tool": "List"}]"#);
    insta::assert_snapshot!(world.run(&["call", "Read", "path=a.txt", "--agent", ""]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the agent of the caller is empty
    hint: agent, tenant, session and user have 1 to 256 characters, none of them a control character or one that changes the direction of text
    ");
    assert_eq!(last_caller(&world), json!(["", null, null, account(), "E3002"]));
    for (option, place) in [("--agent", 0), ("--tenant", 1), ("--session", 2), ("--user", 3)] {
        for command in [&["call", "Read", "path=a.txt"][..], &["batch", "batch.json"]] {
            assert_eq!(world.code(&[command, &[option, "a\u{202e}b"]].concat()), Some(3), "{command:?} {option}");
            let recorded = last_caller(&world);
            assert_eq!((&recorded[place], &recorded[4]), (&json!("a\\u{202e}b"), &json!("E3002")), "{option}");
        }
        let mut client = Client::start(&world, &[option, &"x".repeat(257)]);
        let answer = client.call(1, "Read", json!({"path": "a.txt"}));
        assert_eq!(answer["result"]["_meta"]["wieldy/error"]["code"], "E3002", "{answer}");
        client.end();
        assert_eq!(last_caller(&world)[place], json!("x".repeat(255) + "…"), "{option}");
    }
}

#[test]
fn a_configured_token_with_a_bad_name_ends_the_start() {
    let world = World::new().file("../own.toml", "[serve.tokens.x]\ntoken = \"0123456789abcdef\"\nuser = \"\"");
    let told = world.run(&["serve", "--listen", "127.0.0.1:0", "--config", "../own.toml"]);
    assert!(told.starts_with("exit: 2"), "{told}");
    assert!(told.contains("`serve.tokens.x`: the user of the caller is empty"), "{told}");
}

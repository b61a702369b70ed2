//! Tests of `wieldy run` with a program attached to pipes. `terminal.rs` has the same with a terminal.

use std::process::Stdio;

use crate::world::World;

fn ended(world: &World, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = world.command(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn output_errors_and_exit_code_are_the_programs_own() {
    let world = World::new();
    let told = ended(&world, &["run", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(told, (Some(7), "out\n".into(), "err\n".into()));
    assert_eq!(ended(&world, &["run", "true"]), (Some(0), String::new(), String::new()));
    assert_eq!(ended(&world, &["run", "--", "sh", "-c", "kill -9 $$"]).0, Some(128 + 9));
    let history = world.json(&["history", "--json"]);
    let recorded: Vec<_> = history["executions"].as_array().unwrap().iter().map(|call| &call["tool"]).collect();
    assert_eq!(recorded, ["Run", "Run", "Run"]);
    assert_eq!(history["executions"][1]["parameters"], serde_json::json!({"command": ["true"]}));
}

#[test]
fn standard_input_is_passed_on_to_its_end() {
    let world = World::new();
    let told = world.run_with_input(&["run", "--", "wc", "-c"], &"x".repeat(100_000));
    assert_eq!(told, "exit: 0\n----- stdout -----\n100000\n\n----- stderr -----\n");
}

#[test]
fn ends_that_are_not_the_programs_have_codes_of_their_own() {
    let world = World::new();
    for (arguments, code) in [
        (&["run", "--timeout", "200ms", "--", "sleep", "100"][..], 124),
        (&["run", "--permission", "other", "--", "true"], 125),
        (&["run", "--nonsense", "--", "true"], 125),
        (&["run"], 125),
        (&["run", "--config", "missing.toml", "--", "true"], 125),
        (&["run", "--", "/etc/passwd"], 126),
        (&["run", "--", "no-such-program"], 127),
    ] {
        let (ended, stdout, stderr) = ended(&world, arguments);
        assert_eq!((ended, stdout.as_str()), (Some(code), ""), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("error"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn the_program_is_kept_in_the_sandbox() {
    let world = World::new().file("../outside.txt", "secret\n");
    let outside = world.path("../outside.txt").canonicalize().unwrap();
    let (code, stdout, _) = ended(&world, &["run", "--", "cat", &outside.to_string_lossy()]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    let (code, stdout, _) = ended(&world, &["run", "--", "sh", "-c", "echo x > inside.txt; cat inside.txt"]);
    assert_eq!((code, stdout.as_str()), (Some(0), "x\n"));
}

#[test]
fn a_program_whose_reader_has_gone_is_ended() {
    let world = World::new();
    let mut child = world.command(&["run", "--", "yes"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(141));
}

#[test]
fn with_json_standard_output_has_only_the_result() {
    let world = World::new();
    let output = world.command(&["run", "--json", "--", "sh", "-c", "echo hi; exit 4"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&result["content"][0]["text"], &result["structured"]["exit_code"]), (&"hi\n".into(), &4.into()));
}

//! Tests of nonsensical input: a clear error, nothing run, no panic.

use std::fs::File;
use std::io::{BufWriter, Write};

use crate::world::World;

#[test]
fn absurd_times_and_numbers_are_refused() {
    let world = World::new();
    for value in ["0", "0s", "-1", "-5s", "NaN", "inf", "1e308", "", "soon", "99999999999999999999h", "1d"] {
        let arguments = ["call", "List", "--timeout", value];
        let told = world.run(&arguments);
        assert!(told.starts_with("exit: 2\n"), "{told}");
        assert!(!told.contains("panicked"), "{told}");
    }
    for (flag, value) in [
        ("--retries", "-1"),
        ("--retries", "4294967296"),
        ("--cpu", "0"),
        ("--memory", "0"),
        ("--memory", "18446744073709551615"),
        ("--priority", "999"),
        ("--isolation", "strong"),
        ("--network", "a,,b"),
        ("--log", "loud"),
    ] {
        assert_eq!(world.code(&["call", "List", flag, value]), Some(2), "{flag} {value}");
    }
    assert_eq!(world.code(&["batch", "-", "--max-concurrency", "0"]), Some(2));
    assert_eq!(world.code(&["batch", "-", "--mode", "clever"]), Some(2));
    insta::assert_snapshot!(world.run(&["call", "List", "--timeout", "0"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: invalid value '0' for '--timeout <TIME>': `0` is no time at all; a duration must be more than 0

    For more information, try '--help'.
    ");
}

#[test]
fn malformed_arguments_are_reported_with_their_place() {
    let world = World::new();
    insta::assert_snapshot!(world.run(&["call", "List", "--args", "{\"path\":\n nope}"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the arguments are not JSON: expected ident at line 2 column 3
    hint: correct the arguments to fit the tool's input schema and call again
    ");
    insta::assert_snapshot!(world.run(&["call", "List", "path:=[1,"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the argument `path` is not JSON: EOF while parsing a value at line 1 column 3
    hint: a text is written path=text; after `:=` comes JSON, quoted for the shell
    ");
    insta::assert_snapshot!(world.run(&["call", "List", "path=a", "path=b"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the argument `path` is given twice
    hint: give it once; a list is one argument: path:='[…]'
    ");
    insta::assert_snapshot!(world.run(&["call", "List", "--args", "[1]"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the arguments must be an object, not an array
    hint: `wieldy tools show List` prints its arguments
    ");
    insta::assert_snapshot!(world.run(&["call", "List", "--args", "@missing.json"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: cannot read the arguments from `missing.json`
      caused by: No such file or directory (os error 2)
    hint: name a file that you may read; `--args -` reads standard input
    ");
}

#[test]
fn arguments_ten_thousand_levels_deep_are_refused() {
    let deep = format!("{{\"path\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let world = World::new().file("deep.json", &deep);
    insta::assert_snapshot!(world.run(&["call", "List", "--args", "@deep.json"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the arguments are not JSON: recursion limit exceeded at line 1 column 135
    hint: correct the arguments to fit the tool's input schema and call again
    ");
    let batch = format!("{{\"tool\":\"List\",\"arguments\":{deep}}}");
    insta::assert_snapshot!(world.run_with_input(&["batch", "-"], &batch), @r#"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: standard input:1: recursion limit exceeded
    hint: a batch is a JSON array of such objects, or one per line: {"id": "b", "tool": "Read", "arguments": {"path": "notes.txt"}, "after": ["a"], "idempotency_key": "k"}
    "#);
}

#[test]
fn arguments_of_a_hundred_megabytes_are_refused() {
    let world = World::new();
    let mut file = BufWriter::new(File::create(world.path("big.json")).unwrap());
    file.write_all(b"{\"path\":\"").unwrap();
    for _ in 0..100 {
        file.write_all(&vec![b'x'; 1024 * 1024]).unwrap();
    }
    file.write_all(b"\"}").unwrap();
    drop(file);
    insta::assert_snapshot!(world.run(&["call", "List", "--args", "@big.json"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the arguments are too large: at most 16777216 bytes and 128 levels
    hint: write large values to a file in the workspace, and pass its path
    ");
    // The refused call is recorded like any other, without the arguments.
    let page = world.json(&["history", "--json"]);
    let recorded = &page["executions"][0];
    let facts = ["tool", "status", "error_code", "parameters", "attempts"].map(|fact| recorded[fact].clone());
    assert_eq!(serde_json::json!(facts), serde_json::json!(["List", "validation_error", "E3002", null, 0]));
    insta::assert_snapshot!(world.run(&["batch", "big.json"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: the batch in `big.json` is larger than 67108864 bytes
    hint: make several batches of it, one after the other
    ");
}

#[test]
fn arguments_that_are_not_text_are_refused() {
    let world = World::new();
    std::fs::write(world.path("bytes.json"), b"{\"path\":\"\xff\"}").unwrap();
    insta::assert_snapshot!(world.run(&["call", "List", "--args", "@bytes.json"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the arguments are not UTF-8: invalid utf-8 sequence of 1 bytes from index 9
    hint: arguments are JSON, which is UTF-8 text
    ");
    assert_eq!(world.code(&["batch", "bytes.json"]), Some(2));
    assert_eq!(world.code(&["tools", "check", "bytes.json"]), Some(2));
    assert_eq!(world.code(&["tools", "--config", "bytes.json"]), Some(2));
}

#[test]
fn control_characters_in_names_are_shown_escaped() {
    let world = World::new();
    insta::assert_snapshot!(world.run(&["call", "Re\x1b[31mad\n"]), @r"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3001]: there is no tool `Re\u{1b}[31mad\n`
    hint: `wieldy tools` lists all tools
    ");
    insta::assert_snapshot!(world.run(&["call", "List", "a\x1bb=1"]), @r"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: there is no argument `a\u{1b}b`
    hint: `wieldy tools show List` prints its arguments
    ");
    insta::assert_snapshot!(world.run(&["evil\x1b[2J\u{202e}"]), @r"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: unrecognized subcommand 'evil\u{202e}'

    Usage: wieldy [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(world.run(&["call", "List", "--set", "a\x1b=1"]), @r"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: --set: there is no key `a\u{1b}`
    ");
}

#[test]
fn output_to_a_pipe_has_no_colours() {
    let world = World::new().variable("CLICOLOR", "1").variable("TERM", "xterm-256color");
    for arguments in [&["call", "Nope"][..], &["tools"], &["nope"], &["--help"], &["batch", "missing"]] {
        let output = world.command(arguments).output().unwrap();
        assert!(!output.stdout.contains(&0x1b) && !output.stderr.contains(&0x1b), "{arguments:?}");
    }
}

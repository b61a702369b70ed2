//! Tests of each documented exit code, reached in the way that a script would get it.

use crate::world::World;

#[test]
fn each_end_has_its_exit_code() {
    let world = World::new().file("a.txt", "one\n");
    let bare = ["--isolation", "none"];
    for (code, arguments) in [
        (0, &["call", "Read", "path=a.txt"][..]),
        (1, &["call", "Read", "path=missing.txt"]),
        (1, &["call", "Bash", "command=exit 9", bare[0], bare[1]]),
        (2, &["call", "Read", "path=a.txt", "--no-such-flag"]),
        (2, &["call", "Read", "path"]),
        (2, &["no-such-command"]),
        (2, &[]),
        (2, &["call", "Read", "path=a.txt", "--set", "limits.nope=1"]),
        (3, &["call", "NoSuchTool"]),
        (3, &["call", "Read"]),
        (3, &["call", "Read", "--args", "{"]),
        (3, &["tools", "show", "NoSuchTool"]),
        (4, &["call", "Read", "path=a.txt", "--confirm"]),
        (4, &["call", "Read", "path=a.txt", "--permission", "other"]),
        (5, &["call", "Bash", "command=sleep 10", "--timeout", "200ms", bare[0], bare[1]]),
        (0, &["call", "Bash", "command=echo hi"]),
        (7, &["call", "Bash", "command=echo hi", "--isolation", "firecracker"]),
    ] {
        assert_eq!(world.code(arguments), Some(code), "{}", world.run(arguments));
    }
}

// Shows: A2.3, E4
#[test]
fn a_timeout_says_which_clock_and_keeps_what_was_printed() {
    let world = World::new();
    let arguments = ["call", "Bash", "command=echo begun; sleep 10", "--timeout", "300ms", "--isolation", "none"];
    insta::assert_snapshot!(world.run(&arguments), @"
    exit: 5
    ----- stdout -----
    begun

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    error[E3103]: the run was stopped after [number] s
    hint: give it more time, or ask for less at once; see `--timeout`, `--deadline` and `--silence`
    ");
}

#[test]
fn commands_of_later_versions_are_not_there() {
    let world = World::new();
    for command in ["worker", "task", "cancel", "observe"] {
        assert_eq!(world.code(&[command]), Some(2), "{command}");
    }
}

#[test]
fn help_names_the_commands_the_search_order_and_the_exit_codes() {
    let world = World::new();
    insta::assert_snapshot!(world.run(&["--help"]), @"
    exit: 0
    ----- stdout -----
    Runs tools for AI agents: finds, validates, confirms, sandboxes, times, retries and records calls

    Usage: wieldy [OPTIONS] <COMMAND>

    Commands:
      call         Call a tool and print its answer
      run          Run a program in a sandbox, with this terminal attached
      batch        Run several calls together
      code         Search code, and find definitions and references
      tools        List the available tools, or show one
      mcp          Serve the tools to an MCP client, over standard input and output
      serve        Serve the tools over HTTP, to MCP clients at /mcp
      history      Show past calls and their events
      threads      List, read, search and write threads: the notes that agents leave for later
      vault        Read, write and search the notes of a vault
      audit        Verify that the recorded history was not changed
      doctor       Show which isolation levels and limits work here, and why others do not
      init         Write a commented wieldy.toml into the current folder
      trust        Show the configuration that came with a folder, and trust it
      config       Show the configuration
      completions  Print a script for shell completion
      help         Print this message or the help of the given subcommand(s)

    Options:
      -h, --help     Print help
      -V, --version  Print version

    Options of every command:
          --json             Print JSON for programs instead of text for people
          --config <FILE>    Read the configuration from this file
          --state <DIR>      Store large outputs and the history in this folder [default: the platform's
                             state folder]
          --log <LEVEL>      Log more or less: off, error, warn, info, debug, trace, or TARGET=LEVEL,…
          --set <KEY=VALUE>  Set a key of the configuration; may be repeated

    Example:
      wieldy call List path=.

    Configuration:
      One file is read, the first of:
      --config FILE, $WIELDY_CONFIG, ./wieldy.toml (after `wieldy trust`), ~/.config/wieldy/wieldy.toml.
      Every key can be set by an environment variable, and by --set:
      `limits.queue-timeout` is WIELDY_LIMITS_QUEUE_TIMEOUT.

    Tools of your own:
      The manifests in `tools.manifests` are read, then ./.wieldy/tools (after `wieldy trust`), then
      ~/.config/wieldy/tools.
      Where two tools have the same name, the first one counts.

    Exit codes:
      0 success                                 4 denied, or confirmation missing
      1 the tool failed                         5 timeout
      2 wrong usage or configuration            6 cancelled
      3 unknown tool or invalid arguments       7 sandbox, store or transport failed

    ----- stderr -----
    ");
    assert_eq!(world.code(&["--version"]), Some(0));
}

#[test]
fn with_json_every_failure_is_one_object_on_standard_output() {
    let world = World::new().file("wrong.toml", "[limits]\n\ncalls-runing-max = 3\n").file("a", "");
    let object = |arguments: &[&str]| {
        let arguments = [arguments, &["--json"]].concat();
        format!("{:?} {}\n", world.code(&arguments), world.json(&arguments))
    };
    let failures = [
        &["tools", "--config", "wrong.toml"][..],
        &["tools", "--config", "missing.toml"],
        &["call", "Read", "path"],
        &["call", "Read", "--set", "limits.nope=1"],
        &["batch", "missing.json"],
        &["call", "Read", "--no-such-flag"],
        &["call", "Read", "--timeout", "soon"],
        &["no-such-command"],
        &[],
        &["call", "Read", "path=a", "--state", "a"],
        &["call", "Read", "--args", "{"],
    ];
    insta::assert_snapshot!(failures.map(object).concat(), @r#"
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"wrong.toml:3: there is no key `limits.calls-runing-max`","retryable":false,"suggestion":"did you mean `calls-running-max`, `calls-running-per-agent-max` or `calls-waiting-max`?","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"cannot read the configuration `missing.toml`: No such file or directory (os error 2)","retryable":false,"suggestion":"it must be a text file that you may read; `--config FILE` names another","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"`path` is not an argument","retryable":false,"suggestion":"arguments are written key=value, or key:=json for numbers, lists and objects","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"--set: there is no key `limits.nope`","retryable":false,"suggestion":"did you mean `limits.calls-running-per-agent-max`?","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"cannot read the batch from `missing.json`: No such file or directory (os error 2)","retryable":false,"suggestion":"name a text file that you may read; `-` is standard input","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"unexpected argument '--no-such-flag' found","retryable":false,"suggestion":"`wieldy help` lists the commands","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"invalid value 'soon' for '--timeout <TIME>': `soon` is not a duration such as `500ms`, `30s`, `5m` or `1h`","retryable":false,"suggestion":"`wieldy help` lists the commands","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"unrecognized subcommand 'no-such-command'","retryable":false,"suggestion":"`wieldy help` lists the commands","details":{}}}
    Some(2) {"error":{"code":"E3301","name":"CONFIGURATION","category":"configuration_error","message":"'wieldy' requires a subcommand but one was not provided","retryable":false,"suggestion":"`wieldy help` lists the commands","details":{}}}
    Some(7) {"error":{"code":"E3111","name":"JOURNAL_FAILED","category":"runtime_error","message":"nothing was run, because calls cannot be recorded: cannot use the history `a/history.db`: File exists (os error 17)","retryable":true,"suggestion":"check that it can be reached and written, and that the disk has free space; `--state DIR` names another folder","details":{}}}
    Some(3) {"error":{"code":"E3002","name":"VALIDATION_FAILED","category":"validation_error","message":"the arguments are not JSON: EOF while parsing an object at line 1 column 1","retryable":false,"suggestion":"correct the arguments to fit the tool's input schema and call again","details":{"violations":[{"pointer":"","message":"the arguments are not JSON: EOF while parsing an object at line 1 column 1"}]}}}
    "#);
    assert_eq!(world.json(&["doctor", "--isolation", "firecracker", "--json"])["ok"], false);
    let after_dashes = world.command(&["call", "--no-such-flag", "--", "--json"]).output().unwrap();
    assert_eq!(after_dashes.stdout, b"", "arguments of the tool are not our flags");
}

//! Tests of `wieldy call`.

use serde_json::json;

use crate::world::World;

// Shows: B2
#[test]
fn a_call_prints_the_tools_text() {
    let world = World::new().file("a.txt", "one\ntwo\n");
    insta::assert_snapshot!(world.run(&["call", "Search", "pattern=two"]), @"
    exit: 0
    ----- stdout -----
    a.txt:2:two
    ----- stderr -----
    ");
}

#[test]
fn texts_that_read_as_numbers_are_numbers() {
    let world = World::new().file("a.txt", "one\ntwo\nthree\n");
    let by_text = world.run(&["call", "Read", "path=a.txt", "from_line=2", "lines=1"]);
    let by_json =
        world.run(&["call", "Read", "--args", r#"{"path":"a.txt","from_line":9}"#, "from_line:=2", "lines:=1"]);
    assert_eq!(by_text, by_json);
    assert!(by_text.starts_with("exit: 0") && by_text.contains("two") && !by_text.contains("three"), "{by_text}");
}

// Shows: E3.1, B7.1, B10
#[test]
fn the_whole_result_is_one_line_of_json() {
    let world = World::new();
    let arguments = ["call", "Bash", "command=printf hi", "--isolation", "none", "--json", "--label", "x"];
    insta::assert_snapshot!(world.run(&arguments), @r#"
    exit: 0
    ----- stdout -----
    {"execution_id":"[id]","call_id":null,"tool":"Bash","arguments":{"command":"printf hi","background":false},"provider":"builtin","status":"success","content":[{"type":"text","text":"hi"}],"structured":{"exit_code":0},"error":null,"attempts":1,"cached":false,"partial":false,"artifact":null,"timing":{"queued_ms":[number],"duration_ms":[number],"started_at":"[time]","completed_at":"[time]"},"usage":{"cpu_ms":[number],"memory_peak_bytes":[number],"read_bytes":[number],"written_bytes":[number],"processes_peak":[number],"wall_ms":[number]},"sandbox":{"id":"[sandbox]","level":"none","limits":{"cpu_millicores":500,"memory_bytes":1073741824,"processes":256,"open_files":1024,"disk_bytes":1073741824,"disk_files":250000,"output_bytes":67108864}},"labels":["x"]}

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    "#);
}

// Shows: E3.1
#[test]
fn the_result_of_a_failed_call_is_json_too() {
    let world = World::new();
    insta::assert_snapshot!(world.run(&["call", "Read", "path=missing.txt", "--json"]), @r#"
    exit: 1
    ----- stdout -----
    {"execution_id":"[id]","call_id":null,"tool":"Read","arguments":{"path":"missing.txt"},"provider":"builtin","status":"failed","content":[],"structured":null,"error":{"code":"E3302","name":"FILE_NOT_FOUND","category":"resource_error","message":"there is no `missing.txt`","retryable":false,"suggestion":"look for it with `Glob`, such as `**/name*`, or with `List`","details":{}},"attempts":1,"cached":false,"partial":false,"artifact":null,"timing":{"queued_ms":[number],"duration_ms":[number],"started_at":"[time]","completed_at":"[time]"},"usage":null,"sandbox":null,"labels":[]}

    ----- stderr -----
    error[E3302]: there is no `missing.txt`
    hint: look for it with `Glob`, such as `**/name*`, or with `List`
    "#);
}

#[test]
fn the_output_of_a_failing_program_is_not_lost() {
    let world = World::new();
    let arguments = ["call", "Bash", "command=echo partly; exit 3", "--isolation", "none"];
    insta::assert_snapshot!(world.run(&arguments), @"
    exit: 1
    ----- stdout -----
    partly

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    error[E3108]: `bash` ended with exit code 3
    ");
}

#[test]
fn a_tool_that_says_nothing_prints_nothing() {
    let world = World::new();
    let output = world.command(&["call", "Bash", "command=true", "--isolation", "none"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn bytes_of_a_tool_reach_a_pipe_as_they_are() {
    let world = World::new();
    let output =
        world.command(&["call", "Bash", "command=printf '\\033[31mred'", "--isolation", "none"]).output().unwrap();
    assert_eq!(output.stdout, b"\x1b[31mred");
}

#[test]
fn arguments_come_from_a_file_or_standard_input() {
    let world = World::new().file("a.txt", "one\n").file("arguments.json", r#"{"path":"a.txt"}"#);
    let by_file = world.run(&["call", "Read", "--args", "@arguments.json"]);
    let by_input = world.run_with_input(&["call", "Read", "--args", "-"], r#"{"path":"a.txt"}"#);
    assert_eq!(by_file, by_input);
    assert_eq!(by_file, world.run(&["call", "Read", "path=a.txt"]));
}

#[test]
fn a_near_miss_is_suggested_for_tools_arguments_and_commands() {
    let world = World::new();
    insta::assert_snapshot!(world.run(&["call", "Raed", "path=a"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3001]: there is no tool `Raed`
    hint: did you mean `Read`?
    ");
    insta::assert_snapshot!(world.run(&["call", "Read", "pth=a"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: there is no argument `pth` (did you mean `path`?); `path` is required
    hint: `wieldy tools show Read` prints its arguments
    ");
    insta::assert_snapshot!(world.run(&["cal", "Read"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: unrecognized subcommand 'cal'

      tip: a similar subcommand exists: 'call'

    Usage: wieldy [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
}

#[test]
fn a_call_in_the_background_needs_a_server() {
    insta::assert_snapshot!(World::new().run(&["call", "List", "--async"]), @"
exit: 2
----- stdout -----

----- stderr -----
error: `--async` needs the REST API of a server, which this version does not have
hint: without `--async` the command waits for the result
");
}

// Shows: B6.2
#[test]
fn programs_are_isolated_by_default() {
    let world = World::new();
    insta::assert_snapshot!(world.run(&["call", "Bash", "command=echo hi"]), @"
    exit: 0
    ----- stdout -----
    hi

    ----- stderr -----
    ");
    let refused = world.run(&["call", "Bash", "command=echo hi", "--isolation", "firecracker"]);
    if cfg!(feature = "firecracker") {
        let told = "error[E3101]: the isolation level `firecracker` does not work here: ";
        assert!(refused.contains(told), "{refused}");
    } else {
        insta::assert_snapshot!(refused, @"
        exit: 7
        ----- stdout -----

        ----- stderr -----
        error[E3101]: the isolation level `firecracker` does not work here: this program was built without it
        hint: build wieldy with `--features firecracker`; it also needs `firecracker` itself, /dev/kvm, and a kernel and a root file system for guests; `wieldy doctor` shows which levels work here
        ");
    }
    insta::assert_snapshot!(world.run(&["call", "Bash", "command=echo hi", "--isolation", "none"]), @"
    exit: 0
    ----- stdout -----
    hi

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    ");
}

// Shows: B11.1
#[test]
fn programs_get_only_the_environment_that_is_allowed() {
    let world = World::new().variable("SECRET_TOKEN", "hush").variable("LANG", "C").variable("MINE", "yes");
    let arguments = ["call", "Bash", "command=echo ${SECRET_TOKEN-hidden} $LANG ${MINE-hidden}", "--isolation", "none"];
    assert!(world.run(&arguments).contains("hidden C hidden"));
    let world = world.variable("WIELDY_SHELL_ENVIRONMENT", "PATH,MINE");
    assert!(world.run(&arguments).contains("hidden yes"), "{}", world.run(&arguments));
}

// Shows: D7.3
#[test]
fn a_confirmation_needs_a_person_or_yes() {
    let world = World::new().file("a.txt", "one\n");
    insta::assert_snapshot!(world.run(&["call", "Read", "path=a.txt", "--confirm"]), @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    error[E3004]: a person must agree to this call (the caller wants it), and there is no way to ask
    hint: `--yes` agrees to it
    ");
    assert_eq!(world.code(&["call", "Read", "path=a.txt", "--confirm", "--yes"]), Some(0));
}

// Shows: D4.1
#[test]
fn scopes_and_permissions_restrict() {
    let world = World::new().file("a.txt", "one\n");
    insta::assert_snapshot!(world.run(&["call", "Read", "path=a.txt", "--permission", "other"]), @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    error[E3003]: `Read` requires the permission `files.read`, which this caller does not hold
    hint: use another tool, or ask the operator to grant the permission
    ");
    // A program can write, so the permission to read does not include starting one.
    let bash = ["call", "Bash", "command=echo > b.txt", "--isolation", "none", "--permission"];
    insta::assert_snapshot!(world.run(&[&bash[..], &["files.read"]].concat()), @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    error[E3003]: `Bash` requires the permission `programs.run`, which this caller does not hold
    hint: use another tool, or ask the operator to grant the permission
    ");
    assert!(!world.path("b.txt").exists());
    assert_eq!(world.code(&[&bash[..], &["programs.run"]].concat()), Some(0));
    assert!(world.path("b.txt").exists());
    let agent = ["call", "Read", "path=a.txt", "--agent", "did:example:ada", "--session", "s"];
    assert_eq!(world.code(&agent), Some(0), "an agent's name alone removes no rights");
}

// Shows: B9.1
#[test]
fn the_workspace_is_the_only_folder_there_is() {
    let world = World::new().file("../secret.txt", "secret").file("inner/a.txt", "mine\n");
    assert!(world.run(&["call", "List", "--workspace", "inner"]).contains("a.txt"));
    assert_ne!(world.code(&["call", "Read", "path=../secret.txt"]), Some(0));
    insta::assert_snapshot!(world.run(&["call", "List", "--workspace", "missing"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: cannot open the workspace `missing`
      caused by: No such file or directory (os error 2)
    hint: `--workspace DIR` or the key `workspace` names another folder
    ");
}

// Shows: X5.1
#[test]
fn large_output_is_kept_in_the_state_folder_and_can_be_read_there() {
    let world = World::new();
    let result =
        world.json(&["call", "Bash", "command=seq 1 100000", "--isolation", "none", "--json", "--state", "state"]);
    let artifact = result["artifact"].as_str().unwrap().to_owned();
    let id = format!("id={artifact}");
    let told = world.run(&["call", "GetArtifact", &id, "pattern=^77777$", "--state", "state"]);
    assert!(told.contains("77777"), "{told}");
    let bare = artifact.strip_prefix("artifact:").unwrap();
    assert!(world.path("state/artifacts").join(bare).is_file());
}

#[test]
fn a_state_folder_that_cannot_be_created_is_reported() {
    let world = World::new().file("file", "");
    insta::assert_snapshot!(world.run(&["call", "List", "--state", "file/below"]), @"
    exit: 7
    ----- stdout -----

    ----- stderr -----
    error[E3111]: nothing was run, because calls cannot be recorded: cannot use the history `file/below/history.db`: Not a directory (os error 20)
    hint: check that it can be reached and written, and that the disk has free space; `--state DIR` names another folder
    ");
}

// Shows: D8.1
#[test]
fn without_the_usual_state_folder_nothing_runs_unrecorded() {
    let world = World::new().file("../home/.local/state", "a file in the way").file("a.txt", "one\n");
    let told = world.run(&["call", "Read", "path=a.txt"]);
    assert!(told.starts_with("exit: 7") && told.contains("`--state DIR` names another folder"), "{told}");
    // The key of a history in another place is still in the state folder.
    let told = world.run(&["call", "Read", "path=a.txt", "--set", "history.url=h.db"]);
    assert!(told.starts_with("exit: 7") && told.contains("cannot use the audit key"), "{told}");
}

#[test]
fn looking_at_tools_writes_nothing() {
    let world = World::new();
    assert_eq!(world.code(&["tools"]), Some(0));
    assert!(std::fs::read_dir(world.path("../home")).unwrap().next().is_none());
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let world = World::new();
    let mut child =
        world.command(&["call", "Bash", "command=sleep 0.3; seq 1 10000", "--isolation", "none"]).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let world = World::new().file("a.txt", "one\n");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = world.command(&["call", "Read", "path=a.txt"]).stdout(full).output().unwrap();
    insta::assert_snapshot!(world.told(&output), @"
exit: 7
----- stdout -----

----- stderr -----
error: cannot write to standard output
  caused by: No space left on device (os error 28)
");
}

#[test]
fn an_idempotency_key_and_priority_are_accepted() {
    let world = World::new().file("a.txt", "one\n");
    let arguments = ["call", "Read", "path=a.txt", "--idempotency-key", "k", "--priority", "-3", "--deadline", "5s"];
    assert_eq!(world.code(&arguments), Some(0));
}

#[test]
fn a_background_process_ends_with_the_command_and_a_warning() {
    let world = World::new();
    let told = world.run(&["call", "Bash", "command=sleep 1000", "background:=true", "--session", "s"]);
    insta::assert_snapshot!(told, @"
    exit: 0
    ----- stdout -----
    [p1 runs]

    ----- stderr -----
    note: `--session` marks the records; the session's `/tmp`, `$HOME` and read marks end with this command
    warning: background processes end with this command
    ");
    let told = world.run(&["call", "Bash", "command=sleep 1000", "background:=true"]);
    insta::assert_snapshot!(told, @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3303]: background processes belong to a session, and this call has no session
    hint: make the call in a session, or wait for the command's end
    ");
}

#[test]
fn a_call_by_an_alias_is_on_record_as_one_of_its_tool() {
    let world = World::new().file("a.txt", "one\n");
    for name in ["ReadFile", "Read"] {
        assert_eq!(world.code(&["call", name, "path=a.txt"]), Some(0), "{name}");
    }
    let of = |tool: &str| world.json(&["history", "--tool", tool, "--json"])["executions"].take();
    let found: Vec<_> = of("Read")
        .as_array()
        .unwrap()
        .iter()
        .map(|call| json!([call["tool"], call["metadata"]["called_as"]]))
        .collect();
    assert_eq!(found, [json!(["Read", null]), json!(["Read", "ReadFile"])]);
    assert_eq!(of("ReadFile"), json!([]));
    assert_eq!(world.code(&["audit", "verify"]), Some(0));
}

// Shows: B5.3
#[test]
fn leftovers_of_killed_executors_are_removed_at_the_next_start() {
    let world = World::new();
    let homes = ["oci/gvisor-4000000000-0", "oci/runc-4000000000-1", "firecracker/firecracker-4000000000-0"];
    let homes = homes.map(|home| world.path("state").join(home));
    for home in &homes {
        std::fs::create_dir_all(home.join("containers")).unwrap();
    }
    let of_others = world.path("state/oci/images");
    std::fs::create_dir(&of_others).unwrap();
    world.run(&["call", "Bash", "command=true", "--isolation", "none", "--state", "state"]);
    assert_eq!(homes.map(|home| home.exists()), [false; 3]);
    assert!(of_others.exists());
}

// Shows: A3.3
#[test]
fn a_manifest_with_retries_and_idempotent_repeats_a_failing_program() {
    let tool = |name: &str, more: &str| {
        let command = r#"command = ["sh", "-c", "echo $$ >> runs.txt; exit 1"]"#;
        format!("[[tool]]\nname = \"{name}\"\ndescription = \"fails\"\n{command}\n{more}\n")
    };
    let tools = tool("both", "idempotent = true\nretries = 3")
        + &tool("retries_alone", "retries = 3")
        + &tool("idempotent_alone", "idempotent = true")
        + &tool("reads", "read-only = true\nretries = 3")
        + &tool("reads_and_both", "read-only = true\nidempotent = true\nretries = 1");
    let world = World::new().file(".wieldy/tools/fails.toml", &tools);
    for (name, attempts, retryable) in [
        ("both", 4, true),
        ("retries_alone", 1, false),
        ("idempotent_alone", 1, false),
        ("reads", 1, false),
        ("reads_and_both", 2, true),
    ] {
        let delays = ["--set", "retry.base=2ms", "--set", "retry.backoff=linear"];
        let result = world.json(&[&["call", name, "--isolation", "none", "--json"], delays.as_slice()].concat());
        let error = &result["error"];
        assert_eq!(
            json!([result["attempts"], error["code"], error["retryable"]]),
            json!([attempts, "E3108", retryable]),
            "{name}"
        );
    }
    assert_eq!(std::fs::read_to_string(world.path("runs.txt")).unwrap().lines().count(), 9);
    let id = world.json(&["history", "--tool", "both", "--json"])["executions"][0]["execution_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let shown = world.json(&["history", "show", &id, "--json"]).to_string();
    for delay in [2, 4, 6] {
        assert!(shown.contains(&format!(r#""delay_ms":{delay}"#)), "the delays of `[retry]` hold: {shown}");
    }
}

#[test]
fn the_missing_rights_of_an_ordinary_user_are_named() {
    const NOBODY: u32 = 65534;
    let world = World::new().file("open.txt", "x").file("closed.txt", "x").file("folder/a.txt", "x");
    let mode = |path: &str, mode| {
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(world.path(path), permissions).unwrap();
    };
    let program = world.path("../wieldy");
    std::fs::copy(env!("CARGO_BIN_EXE_wieldy"), &program).unwrap();
    let is_root = rustix::process::geteuid().is_root();
    for path in ["", "../home", "folder", "open.txt", "closed.txt"].into_iter().filter(|_| is_root) {
        std::os::unix::fs::chown(world.path(path), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let user = if is_root { NOBODY } else { rustix::process::geteuid().as_raw() };
    let told = |arguments: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.arg("call").args(arguments).arg("--yes").current_dir(world.path("")).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("HOME", world.path("../home"));
        if is_root {
            std::os::unix::process::CommandExt::gid(&mut command, NOBODY);
            std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    mode("..", 0o755);
    mode("closed.txt", 0o000);
    mode("folder", 0o555);
    let right = format!("hint: do without it, or ask a person for the right: wieldy runs as user {user}");
    let message = "error[E3105]: the operating system does not let us";
    let closed = format!("{message} open `closed.txt`: it belongs to user {user} with mode 000\n{right}\n");
    assert_eq!(told(&["Read", "path=closed.txt"]), (Some(4), closed));
    assert_eq!(told(&["Read", "path=open.txt"]).0, Some(0));
    let folder = format!("{message} write `folder/new`\n{right}, and `ls -ld 'folder'` shows owner and mode\n");
    assert_eq!(told(&["Write", "path=folder/new", "content=x"]), (Some(4), folder));
    // The workspace itself is read-only.
    mode("", 0o555);
    let here = format!("{message} write `new`\n{right}, and `ls -ld '.'` shows owner and mode\n");
    assert_eq!(told(&["Write", "path=new", "content=x"]), (Some(4), here));
    let read_only = "error[E3105]: the command was refused `new`: the workspace is read-only on this machine, so it is read-only in the sandbox too\nhint: do without it, or write to `/tmp`; a person can make the workspace writable\n";
    assert_eq!(told(&["Bash", "command=touch new"]), (Some(4), read_only.to_owned()));
    mode("", 0o755);
    assert_eq!(told(&["Bash", "command=touch new"]).0, Some(0));
}

// Shows: A13
#[test]
fn a_result_is_written_for_a_model() {
    let world = World::new();
    let call = |more: &[&str], command: &str| {
        let command = format!("command={command}");
        world.run(&[&["call", "Bash", &command, "--isolation", "none", "--for-model"], more].concat())
    };
    insta::assert_snapshot!(call(&["--no-header"], "echo hi; exit 3"), @"
    exit: 1
    ----- stdout -----
    Error E3108 NONZERO_EXIT: `bash` ended with exit code 3
    Output so far:
    hi

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    ");
    let headed = call(&[], "echo hi");
    assert!(headed.contains("Tool: Bash\nStatus: success\nDuration: "), "{headed}");
    let cut = call(&["--no-header", "--max-chars", "9"], "printf abcdefghijklmnopqrstuvwxyz");
    assert!(cut.contains("\nabcdef\n… 17 characters left out …\nxyz\n"), "{cut}");
    let cut = call(&["--no-header", "--max-tokens", "3"], "printf abcdefghijklmnopqrstuvwxyz");
    assert!(cut.contains("\nabcdefgh\n… 14 characters left out …\nwxyz\n"), "{cut}");
    for wrong in [&["--json"][..], &["--max-chars", "0"], &["--max-chars", "9", "--max-tokens", "9"]] {
        assert!(call(wrong, "echo hi").starts_with("exit: 2\n"), "{wrong:?}");
    }
    assert_eq!(world.code(&["--json", "call", "List", "--for-model"]), Some(2));
    assert_eq!(world.code(&["call", "List", "--no-header"]), Some(2));
}

// Shows: A3.6
#[test]
fn the_delay_of_retries_is_set_for_a_call_and_in_a_manifest() {
    let tool = |name: &str, more: &str| {
        let command = r#"command = ["sh", "-c", "exit 1"]"#;
        format!(
            "[[tool]]\nname = \"{name}\"\ndescription = \"fails\"\n{command}\nidempotent = true\nretries = 2\n{more}\n"
        )
    };
    let tools = tool("plain", "") + &tool("quick", "retry-delay = \"2ms\"\nretry-backoff = \"linear\"");
    let world = World::new().file(".wieldy/tools/fails.toml", &tools);
    let delays = |name: &str, flags: &[&str]| -> Vec<u64> {
        let result = world.json(&[&["call", name, "--isolation", "none", "--json"], flags].concat());
        let shown = world.json(&["history", "show", result["execution_id"].as_str().unwrap(), "--json"]);
        let events = shown["events"].as_array().unwrap().iter();
        events.filter_map(|event| event["data"]["delay_ms"].as_u64()).collect()
    };
    assert_eq!(delays("plain", &["--retry-delay", "3ms", "--retry-backoff", "linear"]), [3, 6]);
    assert_eq!(delays("quick", &[]), [2, 4]);
    assert_eq!(delays("quick", &["--retry-delay", "1ms"]), [1, 2]);
    assert_eq!(world.code(&["call", "plain", "--retry-backoff", "slow"]), Some(2));
}

// Shows: B8.2
#[test]
fn a_limit_above_its_maximum_is_refused_and_one_below_holds() {
    let world = World::new().file("wieldy.toml", "[resources.max]\nmemory-mb = 1500\n");
    insta::assert_snapshot!(world.run(&["call", "List", "--memory", "1501"]), @"
    exit: 1
    ----- stdout -----

    ----- stderr -----
    error[E3102]: the call asks for 1501.0 MiB (1573912576 bytes) of `memory_bytes`, and the maximum of this executor is 1500.0 MiB (1572864000 bytes)
    hint: ask for at most 1500.0 MiB (1572864000 bytes); a higher maximum is the operator's to give
    ");
    let held = world.json(&["call", "Bash", "command=true", "--memory", "1500", "--isolation", "none", "--json"]);
    assert_eq!(held["sandbox"]["limits"]["memory_bytes"], 1500_u64 << 20);
    assert_eq!(held["sandbox"]["limits"]["cpu_millicores"], 500);
    // Where no maximum is set, the operator's flag counts.
    let held =
        World::new().json(&["call", "Bash", "command=true", "--memory", "9000", "--isolation", "none", "--json"]);
    assert_eq!(held["sandbox"]["limits"]["memory_bytes"], 9000_u64 << 20);
}

#[test]
fn a_plan_and_a_manifest_have_maxima_too() {
    let manifest = "[[tool]]\nname = \"hi\"\ndescription = \"Says hi\"\ncommand = [\"echo\", \"hi\"]\n\
                    limits = { memory-mb = 100 }\nlimits-max = { memory-mb = 200 }\n";
    let settings = "isolation = \"none\"\n[tools]\nmanifests = [\"t.toml\"]\n[plans.Tiny.resources]\nmemory-mb = 150\n";
    let world = World::new().file("wieldy.toml", settings).file("t.toml", manifest);
    let told = |arguments: &[&str]| {
        let told = world.json(&[&["call", "hi", "--json"], arguments].concat());
        match told["error"]["details"].get("held_by") {
            Some(by) => (told["error"]["details"]["allowed"].as_u64().unwrap() >> 20, by.as_str().unwrap().to_owned()),
            None => (told["sandbox"]["limits"]["memory_bytes"].as_u64().unwrap() >> 20, String::new()),
        }
    };
    assert_eq!(told(&[]), (100, String::new()));
    assert_eq!(told(&["--memory", "200"]), (200, String::new()));
    assert_eq!(told(&["--memory", "201"]), (200, "tool_max".into()));
    assert_eq!(told(&["--memory", "151", "--plan", "Tiny"]), (150, "plan".into()));
}

const WHERE: &str = r#"
[[tool]]
name = "where"
description = "Tells the context"
command = ["cat"]
stdin = "{context}"
read-only = true
"#;

// Shows: D11.1, D11.2
#[test]
fn a_call_brings_its_context_and_metadata() {
    let world = World::new()
        .file("where.toml", WHERE)
        .file("wieldy.toml", "tools.manifests = [\"where.toml\"]\n")
        .file("context.json", "{\"room\": \"a\", \"password\": \"canary-4711\"}");
    let state = ["--state", "../state"];
    let run = |arguments: &[&str]| world.run(&[&["call", "where"], arguments, &state].concat());
    let told = run(&["--context", "@context.json", "--metadata", r#"{"run": 5, "token": "canary-0815"}"#]);
    assert!(told.contains("{\"room\":\"a\",\"password\":\"canary-4711\"}"), "{told}");
    let batch = world.run_with_input(
        &["batch", "-", "--context", r#"{"room": "b"}"#, "--metadata", r#"{"run": 6}"#, "--state", "../state"],
        r#"{"tool": "where"}"#,
    );
    assert!(batch.contains(r#"{"room":"b"}"#), "{batch}");
    let found = world.json(&["history", "--metadata", "run=5", "--json", "--state", "../state"]);
    let calls = found["executions"].as_array().unwrap();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0]["metadata"]["caller"], serde_json::json!({"run": 5, "token": "[redacted]"}));
    let id = calls[0]["execution_id"].as_str().unwrap();
    let shown = world.run(&["history", "show", id, "--state", "../state"]);
    assert!(shown.contains(r#"metadata:   {"run":5,"token":"[redacted]"}"#), "{shown}");
    for file in std::fs::read_dir(world.path("../state")).unwrap().filter_map(Result::ok) {
        let bytes = std::fs::read(file.path()).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains("canary"), "a secret is in {:?}", file.path());
        assert!(!text.contains("\"room\""), "the context is in {:?}", file.path());
    }
}

// Shows: D11.3
#[test]
fn context_and_metadata_that_are_no_objects_are_refused() {
    let world =
        World::new().file("a.txt", "one\n").file("large.json", &format!("{{\"k\": \"{}\"}}", "x".repeat(20_000)));
    let run = |option: &str, value: &str| world.run(&["call", "Read", "path=a.txt", option, value]);
    let large = "error[E3002]: the metadata of the call is too large: at most 16384 bytes as JSON and 64 levels";
    let wrong = world.run(&["history", "--metadata", "run"]);
    for (told, exit, message) in [
        (run("--context", "[1]"), 3, "error[E3002]: `--context` is not a JSON object"),
        (
            run("--metadata", "{"),
            3,
            "error[E3002]: `--metadata` is not JSON: EOF while parsing an object at line 1 column 1",
        ),
        (run("--context", "@missing.json"), 2, "error: cannot read `--context` from `missing.json`"),
        (run("--metadata", "@large.json"), 3, large),
        (wrong, 2, "error: `--metadata`: `run` is no entry such as `run=5`"),
    ] {
        assert!(told.starts_with(&format!("exit: {exit}\n")) && told.contains(message), "{told}");
    }
}

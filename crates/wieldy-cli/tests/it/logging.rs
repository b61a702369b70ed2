//! Tests of the log: its lines as text and as JSON, its levels, its file, and secrets that must never be in it.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use regex::Regex;
use serde_json::{Value, json};

use crate::world::World;

/// Returns the standard error of a command, without the parts that change from run to run.
fn told(world: &World, arguments: &[&str]) -> String {
    let text = world.run(arguments);
    let (_, text) = text.split_once("----- stderr -----\n").unwrap();
    without_numbers(&Regex::new(r"\d{4}-\d\d-\d\dT[0-9:.]+Z").unwrap().replace_all(text, "[time]"))
}

fn without_numbers(text: &str) -> String {
    let text = Regex::new("(duration|queued|elapsed)_ms=[0-9.]+").unwrap().replace_all(text, "${1}_ms=[number]");
    Regex::new("execution=[0-9a-f-]{36}").unwrap().replace_all(&text, "execution=[id]").into_owned()
}

/// Parses the lines of a log in JSON, and removes times, ids and durations. Fails for any other line.
fn objects(log: &str) -> Vec<Value> {
    let object = |line: &str| {
        let mut object: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let fields = object.as_object_mut().unwrap();
        for volatile in ["timestamp", "execution", "batch", "duration_ms", "queued_ms"] {
            assert!(fields.remove(volatile).is_some() || volatile != "timestamp", "{line}");
        }
        object
    };
    log.lines().filter(|line| line.starts_with('{')).map(object).collect()
}

// Shows: E6
#[test]
fn a_call_is_logged_from_its_arguments_to_its_end() {
    let world = World::new().file("a.txt", "one\n");
    insta::assert_snapshot!(told(&world, &["call", "Read", "path=a.txt", "--session", "s-1", "--log", "debug"]), @r#"
    note: `--session` marks the records; the session's `/tmp`, `$HOME` and read marks end with this command
    [time] DEBUG wieldy::call: call accepted seq=1 execution=[id] tool="Read" provider="builtin" agent="local" session="s-1" arguments={"path":"a.txt"}
    [time]  INFO wieldy::call: call started seq=2 execution=[id] tool="Read" provider="builtin" agent="local" session="s-1" attempt=1 attempts_max=3 timeout_ms=10000 read_only=true
    [time] DEBUG wieldy::call: call answered seq=3 execution=[id] tool="Read" provider="builtin" agent="local" session="s-1" result="{\"text\":\"one\\n\"}"
    [time]  INFO wieldy::call: call ended seq=3 execution=[id] tool="Read" provider="builtin" agent="local" session="s-1" status="success" duration_ms=[number] queued_ms=[number] attempts=1 cached=false output_bytes=4
    "#);
}

#[test]
fn lines_in_json_are_an_object_each() {
    let world = World::new()
        .file("a.txt", "one\n")
        .file("batch.json", r#"[{"id": "x", "tool": "Read", "arguments": {"path": "b.txt"}}]"#);
    let output =
        world.command(&["batch", "batch.json", "--log", "debug", "--set", "log.format=json"]).output().unwrap();
    let common = |level: &str, message: &str, fields: Value| {
        let mut object = json!({"level": level, "message": message, "agent": "local", "target": "wieldy::call"});
        object.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        object
    };
    let error = "there is no `b.txt`";
    assert_eq!(
        objects(&String::from_utf8(output.stderr).unwrap()),
        [
            common(
                "INFO",
                "batch started",
                json!({
                    "seq": 1, "count": 1, "mode": "smart", "max_concurrency": 4, "read_only": 1, "mutating": 0,
                    "target": "wieldy::batch",
                })
            ),
            common(
                "DEBUG",
                "call accepted",
                json!({
                    "seq": 2, "call_id": "x", "tool": "Read", "provider": "builtin", "arguments": "{\"path\":\"b.txt\"}",
                })
            ),
            common(
                "INFO",
                "call started",
                json!({
                    "seq": 3, "call_id": "x", "tool": "Read", "provider": "builtin", "attempt": 1, "attempts_max": 3, "timeout_ms": 10000, "read_only": true,
                })
            ),
            common(
                "WARN",
                "call failed",
                json!({
                    "seq": 4, "call_id": "x", "tool": "Read", "provider": "builtin", "status": "failed", "attempts": 1, "cached": false,
                    "output_bytes": 0, "code": "E3302", "error": error,
                })
            ),
            common(
                "INFO",
                "batch ended",
                json!({
                    "seq": 5, "total": 1, "executed": 1, "skipped": 0, "succeeded": 0, "failed": 1, "target": "wieldy::batch",
                })
            ),
        ]
    );
}

#[test]
fn a_failure_is_printed_once_by_default() {
    let world = World::new();
    let failing = |log: &[&str]| told(&world, &[&["call", "Read", "path=b.txt"], log].concat());
    let once = "error[E3302]: there is no `b.txt`\nhint: look for it with `Glob`, such as `**/name*`, or with `List`\n";
    assert_eq!(failing(&[]), once);
    assert_eq!(failing(&["--log", "warn"]), once);
    assert_eq!(failing(&["--log", "off"]), once);
    assert!(failing(&["--log", "info"]).contains(" WARN wieldy::call: call failed "));
    let line = r#"[time]  WARN wieldy::call: call failed seq=3 execution=[id] tool="Read" provider="builtin" agent="local" status="failed" duration_ms=[number] queued_ms=[number] attempts=1 cached=false output_bytes=0 code="E3302" error="there is no `b.txt`""#;
    assert_eq!(failing(&["--log", "warn,wieldy::call=warn"]), format!("{line}\n{once}"));
}

// Shows: E6
#[test]
fn a_level_may_hold_for_one_target() {
    let world = World::new().file("batch.json", r#"[{"tool": "Glob", "arguments": {"pattern": "*"}}]"#);
    let messages = |levels: &str| {
        let output =
            world.command(&["batch", "batch.json", "--log", levels, "--set", "log.format=json"]).output().unwrap();
        let objects = objects(&String::from_utf8(output.stderr).unwrap());
        objects.iter().map(|object| object["message"].as_str().unwrap().to_owned()).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(messages("wieldy::batch=info"), "batch started, batch ended");
    assert_eq!(messages("error,wieldy::call=info"), "call started, call ended");
    assert_eq!(messages("debug,wieldy::batch=off,wieldy::call=info"), "call started, call ended");
}

#[test]
fn the_level_can_be_set_in_every_way_that_it_could_before() {
    let shown = |world: &World, arguments: &[&str]| {
        let told = world.run(&[&["config", "show"], arguments].concat());
        told.lines().filter(|line| line.starts_with("log")).collect::<Vec<_>>().join("\n")
    };
    let world = World::new().file("wieldy.toml", "log = \"info\"\n");
    insta::assert_snapshot!(shown(&world, &[]), @r#"
    log.file = ""  # default
    log.format = "text"  # default
    log.keep = 7  # default
    log.level = "info"  # file wieldy.toml
    log.rotate = "never"  # default
    "#);
    let level = |world: &World, arguments: &[&str]| {
        shown(world, arguments).lines().find(|line| line.starts_with("log.level")).unwrap().to_owned()
    };
    assert_eq!(level(&world, &["--log", "debug"]), r#"log.level = "debug"  # flag --log"#);
    assert_eq!(level(&world, &["--set", "log=debug"]), r#"log.level = "debug"  # flag --set"#);
    assert_eq!(level(&world, &["--set", "log.level=a=off,error"]), r#"log.level = "error,a=off"  # flag --set"#);
    let world = world.variable("WIELDY_LOG", "error");
    assert_eq!(level(&world, &[]), r#"log.level = "error"  # environment WIELDY_LOG"#);
    let world = world.variable("WIELDY_LOG_LEVEL", "trace");
    assert_eq!(level(&world, &[]), r#"log.level = "trace"  # environment WIELDY_LOG_LEVEL"#);
}

#[test]
fn a_file_gets_everything_and_is_for_its_owner_only() {
    let world = World::new()
        .file(
            "project/wieldy.toml",
            "[log]\nlevel = \"wieldy::call=info\"\nfile = \"logs/wieldy.log\"\nformat = \"json\"\n",
        )
        .file("a.txt", "one\n");
    for path in ["path=a.txt", "path=b.txt"] {
        let told = told(&world, &["--config", "project/wieldy.toml", "call", "Read", path]);
        assert!(!told.contains("wieldy::call"), "{told}");
    }
    let path = world.path("project/logs/wieldy.log");
    let messages: Vec<Value> =
        objects(&fs::read_to_string(&path).unwrap()).iter().map(|object| object["message"].clone()).collect();
    assert_eq!(messages, ["call started", "call ended", "call started", "call failed"]);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

    let world = world.file("project/wieldy.toml", "[log]\nfile = \"~/wieldy.log\"\n");
    assert_eq!(world.code(&["--config", "project/wieldy.toml", "call", "Read", "path=b.txt"]), Some(1));
    let log = fs::read_to_string(world.path("../home/wieldy.log")).unwrap();
    assert_eq!((log.lines().count(), log.contains(" WARN wieldy::call: call failed ")), (1, true), "{log}");
}

#[test]
fn no_line_is_lost_at_the_end_of_a_command() {
    let calls: Vec<Value> = (0..300).map(|_| json!({"tool": "Glob", "arguments": {"pattern": "*"}})).collect();
    let world = World::new().file("batch.json", &Value::from(calls).to_string());
    assert_eq!(world.code(&["batch", "batch.json", "--log", "info", "--set", "log.file=a.log"]), Some(0));
    let log = fs::read_to_string(world.path("a.log")).unwrap();
    let count = |message: &str| log.lines().filter(|line| line.contains(message)).count();
    assert_eq!([count(": call started "), count(": call ended "), count(": batch ended ")], [300, 300, 1]);
    assert_eq!(log.lines().count(), 602);
}

#[test]
fn a_rotated_log_keeps_as_many_files_as_it_may() {
    let world = World::new()
        .file("logs/wieldy.2020-01-01.log", "old\n")
        .file("logs/wieldy.2020-01-02.log", "old\n")
        .file("logs/wieldy.log", "mine\n")
        .file("wieldy.toml", "[log]\nlevel = \"info\"\nfile = \"logs/wieldy.log\"\nrotate = \"daily\"\nkeep = 2\n");
    for _ in 0..2 {
        assert_eq!(world.code(&["call", "Glob", "pattern=*"]), Some(0));
    }
    let mut names: Vec<String> = fs::read_dir(world.path("logs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    let today = names.remove(1);
    assert_eq!(names, ["wieldy.2020-01-02.log", "wieldy.log"]);
    assert!(Regex::new(r"^wieldy\.20[2-9]\d-\d\d-\d\d\.log$").unwrap().is_match(&today), "{today}");
    let log = fs::read_to_string(world.path("logs").join(today)).unwrap();
    assert_eq!(log.lines().count(), 4, "both commands of the day are in it: {log}");
}

// Shows: E6
#[test]
fn secrets_are_not_logged_at_any_level() {
    let manifest = r#"
        [[tool]]
        name = "sign_in"
        description = "Signs in."
        command = ["echo", "signed in"]
        sensitive = ["mark"]
        [tool.arguments]
        user = { type = "string" }
        password = { type = "string" }
        mark = { type = "string" }
    "#;
    let world = World::new().file(".wieldy/tools/tools.toml", manifest);
    let token = format!("ghp_{}", "canary".repeat(6));
    let command = format!("command=echo begun {token}; echo {token} >&2; exit 3");
    for format in ["text", "json"] {
        let format = format!("log.format={format}");
        let logged = |call: &[&str]| {
            let options = ["--isolation", "none", "--log", "trace", "--set", &format];
            let output = world.command(&[&["call"], call, &options].concat()).output().unwrap();
            String::from_utf8(output.stderr).unwrap()
        };
        for call in [
            &["sign_in", "user=ada", "password=canary", "mark=canary"][..],
            &["sign_in", "user=ada", "password:=[\"canary\"]", "nonsense=1"],
            &["Bash", &command],
            &["NoSuchTool", "api_key=canary"],
        ] {
            let log = logged(call);
            assert!(log.contains("[redacted]") && !log.contains("canary"), "{log}");
        }
    }
}

#[test]
fn wrong_values_are_reported_with_their_line() {
    let told = |text: &str| {
        let world = World::new().file("wieldy.toml", text);
        assert_eq!(world.code(&["tools", "--config", "wieldy.toml"]), Some(2));
        told(&world, &["tools", "--config", "wieldy.toml"])
    };
    let mistakes = [
        "log = \"wran\"",
        "log = 3",
        "[log]\nlevel = \"info,wieldy::call=much\"",
        "[log]\nlevel = \"info,debug\"",
        "[log]\nlevel = \"=info\"",
        "[log]\nlevel = \"\"",
        "[log]\nformat = \"xml\"",
        "[log]\nrotate = \"weekly\"",
        "[log]\nrotate = \"daily\"",
        "[log]\nkeep = -1",
        "[log]\nfiel = \"a\"",
    ];
    insta::assert_snapshot!(mistakes.map(told).concat(), @"
    error: wieldy.toml:1: `log`: `wran` is not one of `off`, `error`, `warn`, `info`, `debug`, `trace`
    hint: did you mean `warn`?
    error: wieldy.toml:1: `log`: must be a level such as `info`, or a section, not the number `3`
    error: wieldy.toml:2: `log.level`: `much` is not one of `off`, `error`, `warn`, `info`, `debug`, `trace`
    error: wieldy.toml:2: `log.level`: `info,debug` has two levels for everything; write LEVEL, TARGET=LEVEL, or both: `warn,wieldy::call=info`
    error: wieldy.toml:2: `log.level`: `=info` names no target; write LEVEL, TARGET=LEVEL, or both: `warn,wieldy::call=info`
    error: wieldy.toml:2: `log.level`: `` has a level missing; write LEVEL, TARGET=LEVEL, or both: `warn,wieldy::call=info`
    error: wieldy.toml:2: `log.format`: `xml` is not `text` or `json`
    error: wieldy.toml:2: `log.rotate`: `weekly` is not one of `never`, `daily`, `hourly`
    error: file wieldy.toml: `log.rotate` needs a file to rotate, and `log.file` names none
    error: wieldy.toml:2: `log.keep`: must be a whole number from 0 to 1000000, not -1
    error: wieldy.toml:2: there is no key `log.fiel`
    hint: did you mean `file`?
    ");
}

#[test]
fn an_unwritable_log_is_reported_before_anything_runs() {
    let world = World::new().file("a", "");
    insta::assert_snapshot!(world.run(&["call", "Write", "path=b", "content=x", "--set", "log.file=a/b.log"]), @"
    exit: 7
    ----- stdout -----

    ----- stderr -----
    error: cannot write the log to `a/b.log`
      caused by: File exists (os error 17)
    hint: the key `log.file` names another file
    ");
    assert!(!world.path("b").exists());
}

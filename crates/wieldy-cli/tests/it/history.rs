//! `wieldy history`: every call is recorded and found again, without its secrets, and a call that cannot be recorded
//! does not run.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;

use regex::Regex;
use serde_json::{Value, json};

use crate::world::World;

const NOBODY: u32 = 65534;

/// Makes a world in the time zone UTC whose default state folder does not exist.
fn world() -> World {
    World::new().file("a.txt", "one\n").variable("TZ", "UTC").variable("XDG_STATE_HOME", "/nowhere/unless/used")
}

/// Runs a command with the state folder `state`. Returns the exit code and the output, without the parts that change.
fn told(world: &World, arguments: &[&str]) -> String {
    let text = world.run(&[arguments, &["--state", "../state"]].concat());
    let filters = [
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \+00:00", "[time]"),
        (r"\d\d-\d\d \d\d:\d\d:\d\d", "[day and time]"),
        (r"\+?\d+(\.\d)? (ms|s)\b", "[took]"),
        (r"(duration|queued)_ms=[0-9.]+", "${1}_ms=[took]"),
        (r"(\S)  +", "$1  "),
        (r"\n {2,}\[took\]", "\n    [took]"),
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}(-[0-9a-f]{0,4}){0,2}(-[0-9a-f]{0,11})?", "[id]"),
        (r"\d{4}-\d\d-\d\d", "[day]"),
    ];
    filters.iter().fold(text, |text, (pattern, by)| Regex::new(pattern).unwrap().replace_all(&text, *by).into_owned())
}

fn json_of(world: &World, arguments: &[&str]) -> Value {
    world.json(&[arguments, &["--state", "../state", "--json"]].concat())
}

/// Replaces the parts of a value that change from run to run.
fn without_chance(mut value: Value) -> Value {
    fn walk(value: &mut Value) {
        match value {
            Value::Object(fields) => fields.iter_mut().for_each(|(name, value)| match name.as_str() {
                "execution_id" | "batch" if !value.is_null() => *value = json!("[id]"),
                "started_at" | "completed_at" | "at" if !value.is_null() => *value = json!("[time]"),
                "duration_ms" | "queued_ms" | "p50_ms" | "p95_ms" | "p99_ms" if value.is_f64() => {
                    *value = json!("[ms]");
                }
                "day" => *value = json!("[day]"),
                "workspace" if !value.is_null() => *value = json!("[folder]"),
                _ => walk(value),
            }),
            Value::Array(items) => items.iter_mut().for_each(walk),
            _ => {}
        }
    }
    walk(&mut value);
    value
}

/// Makes calls of several kinds.
fn some_calls(world: &World) {
    for arguments in [
        &["call", "Read", "path=a.txt", "--session", "s1"][..],
        &["call", "Read", "path=missing.txt", "--agent", "ada"],
        &["call", "Write", "path=b.txt", "content=two words", "--yes"],
        &["call", "NoSuchTool"],
    ] {
        world.command(&[arguments, &["--state", "../state"]].concat()).output().unwrap();
    }
}

#[test]
fn calls_are_listed_with_the_latest_first() {
    let world = world();
    some_calls(&world);
    insta::assert_snapshot!(told(&world, &["history"]), @r#"
    exit: 0
    ----- stdout -----
    TIME  TOOL  STATUS  TOOK  SIZE  ID  ARGUMENTS
    [day and time]  NoSuchTool  validation_error E3001  [took]  0 B  [id]
    [day and time]  Write  success  [took]  28 B  [id]  path=b.txt content="two words"
    [day and time]  Read  failed E3302  [took]  0 B  [id]  path=missing.txt
    [day and time]  Read  success  [took]  4 B  [id]  path=a.txt

    ----- stderr -----
    "#);
    insta::assert_snapshot!(told(&world, &["history", "--limit", "1"]), @"
    exit: 0
    ----- stdout -----
    TIME  TOOL  STATUS  TOOK  SIZE  ID  ARGUMENTS
    [day and time]  NoSuchTool  validation_error E3001  [took]  0 B  [id]

    ----- stderr -----
    more: --cursor 17
    ");
}

#[test]
fn the_json_of_a_list_has_the_documented_form() {
    let world = world();
    some_calls(&world);
    let page = json_of(&world, &["history", "--limit", "2", "--tool", "Read"]);
    assert_eq!(
        without_chance(page),
        json!({
            "executions": [
                {
                    "execution_id": "[id]", "tool": "Read", "status": "failed", "parameters": {"path": "missing.txt"},
                    "error_code": "E3302", "error_message": "there is no `missing.txt`",
                    "started_at": "[time]", "completed_at": "[time]", "duration_ms": "[ms]", "output_bytes": 0,
                    "result_bytes": null, "attempts": 1, "agent": "ada", "tenant": null, "session": null, "user": crate::callers::account(),
                    "workspace": "[folder]", "provider": "builtin", "batch": null,
                    "sandbox": null, "usage": null, "metadata": {"task": true},
                },
                {
                    "execution_id": "[id]", "tool": "Read", "status": "success", "parameters": {"path": "a.txt"},
                    "error_code": null, "error_message": null,
                    "started_at": "[time]", "completed_at": "[time]", "duration_ms": "[ms]", "output_bytes": 4,
                    "result_bytes": 16, "attempts": 1, "agent": "local", "tenant": null, "session": "s1", "user": crate::callers::account(),
                    "workspace": "[folder]", "provider": "builtin", "batch": null,
                    "sandbox": null, "usage": null, "metadata": {"task": true},
                },
            ],
            "next": null,
        })
    );
}

/// Returns the tools and files of the calls that match.
fn found(world: &World, filters: &[&str]) -> Vec<String> {
    let page = json_of(world, &[&["history"], filters].concat());
    let calls = page["executions"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    calls
        .map(|call| format!("{} {}", text(&call["tool"]), text(&call["parameters"]["path"])).trim().to_owned())
        .collect()
}

// Shows: E5.1
#[test]
fn every_filter_filters() {
    let world = world();
    some_calls(&world);
    let batch = "[{\"tool\":\"List\"},{\"id\":\"x\",\"tool\":\"Read\",\"arguments\":{\"path\":\"b.txt\"}}]";
    let result = world.file("batch.json", batch);
    let world = result;
    let batch = world.json(&["batch", "batch.json", "--state", "../state", "--json"]);
    let batch = batch["batch_id"].as_str().unwrap();
    let all = ["Read b.txt", "List", "NoSuchTool", "Write b.txt", "Read missing.txt", "Read a.txt"];
    let mut both = found(&world, &["--batch", batch]);
    both.sort();
    assert_eq!(both, ["List", "Read b.txt"]);
    assert_eq!(found(&world, &[]).len(), all.len());
    for (filters, expected) in [
        (&["--tool", "Write"][..], &["Write b.txt"][..]),
        (&["--status", "validation_error"], &["NoSuchTool"]),
        (&["--session", "s1"], &["Read a.txt"]),
        (&["--agent", "ada"], &["Read missing.txt"]),
        (&["--tenant", "other"], &[]),
        (&["--text", "two wor"], &["Write b.txt"]),
        (&["--text", "missing"], &["Read missing.txt"]),
        (&["--until", "1h"], &[]),
        (&["--since", "2999-01-01"], &[]),
        (&["--since", "1d", "--until", "2999-01-01T00:00:00Z", "--tool", "NoSuchTool"], &["NoSuchTool"]),
    ] {
        assert_eq!(found(&world, filters), expected, "{filters:?}");
    }
}

#[test]
fn pages_follow_each_other_without_gaps() {
    let world = world();
    some_calls(&world);
    let (mut seen, mut cursor) = (Vec::new(), None::<String>);
    loop {
        let at: Vec<String> = cursor.iter().flat_map(|cursor| ["--cursor".to_owned(), cursor.clone()]).collect();
        let at: Vec<&str> = at.iter().map(String::as_str).collect();
        let page = json_of(&world, &[&["history", "--limit", "3"][..], &at].concat());
        seen.extend(
            page["executions"].as_array().unwrap().iter().map(|call| call["tool"].as_str().unwrap().to_owned()),
        );
        match page["next"].as_i64() {
            Some(next) => cursor = Some(next.to_string()),
            None => break,
        }
    }
    assert_eq!(seen, ["NoSuchTool", "Write", "Read", "Read"]);
}

#[test]
fn wrong_filters_are_wrong_usage_with_a_suggestion() {
    let world = world();
    for (arguments, message, hint) in [
        (
            &["--status", "sucess"][..],
            "invalid value 'sucess' for '--status <STATUS>'",
            "a similar value exists: 'success'",
        ),
        (&["--since", "yesterday"], "`--since`: `yesterday` is not a time such as", "`wieldy history --help`"),
        (&["--cursor", "x"], "`--cursor`: `x` is not a cursor", "`wieldy history --help`"),
        (&["--limit", "0"], "0 is not in 1..=10000", ""),
    ] {
        let text = told(&world, &[&["history"], arguments].concat());
        assert!(text.starts_with("exit: 2\n") && text.contains(message) && text.contains(hint), "{text}");
    }
    let text = told(&world, &["history", "stats", "--by", "week"]);
    assert!(text.starts_with("exit: 2\n") && text.contains("`week` is not `tool`, `day` or `tool,day`"), "{text}");
    assert!(text.contains("hint: `wieldy history --help` shows the allowed values"), "{text}");
}

// Shows: E3.3
#[test]
fn a_traceback_is_shown_without_secrets_where_a_failed_call_is_looked_at() {
    let world = World::new().file("fail.sh", FAIL).file(".wieldy/tools/login.toml", LOGIN_TOOL);
    let isolation = ["--isolation", "none"];
    let call = ["call", "login", "secret=rosebud-1941", "--json"];
    let result = world.json(&[&call[..], &isolation].concat());
    let trace =
        "Traceback (most recent call last):\n  File \"login.py\", line 3, in <module>\nLoginError: not [redacted]";
    assert_eq!(result["error"]["trace"], trace);
    assert!(result["content"][0]["text"].as_str().unwrap().ends_with("LoginError: not rosebud-1941\n"));
    let text = world.run(&["history", "show", result["execution_id"].as_str().unwrap()]);
    let indented = trace.lines().map(|line| format!("  {line}\n")).collect::<String>();
    assert!(text.contains(&format!("\n\ntrace\n{indented}\nwhat happened\n")), "{text}");
    assert!(!text.contains("rosebud"), "{text}");
}

// Shows: E5.1
#[test]
fn answers_are_recorded_as_the_configuration_and_the_tool_say() {
    let world = World::new().file(".wieldy/tools/said.toml", SAYING_TOOLS);
    let recorded = |tool: &str, settings: &[&str]| {
        let called = [&["call", tool, "--isolation", "none", "--json"], settings].concat();
        let id = world.json(&called)["execution_id"].as_str().unwrap().to_owned();
        let shown = world.json(&["history", "show", &id, "--json"]);
        let text = shown["execution"]["result"]["text"].as_str().map(str::to_owned);
        assert_eq!(
            world.run(&["history", "show", &id]).contains("\n\nanswered\n  1\n  2\n"),
            text.is_some(),
            "{shown}"
        );
        text
    };
    let whole: String = (1..=2000).map(|number| format!("{number}\n")).collect();
    let head = recorded("loud", &[]).unwrap();
    assert!(head.starts_with("1\n2\n") && head.ends_with("1999\n2000\n") && head.len() <= 4096, "{head}");
    assert!(head.contains(" of 8893 bytes left out …"), "{head}");
    assert_eq!(recorded("loud", &["--set", "history.results=whole"]), Some(whole));
    assert_eq!(recorded("loud", &["--set", "history.results=none"]), None);
    assert_eq!(recorded("loud", &["--set", "history.tools.loud.results=none"]), None);
    assert_eq!(recorded("quiet", &["--set", "history.results=whole"]), None, "its definition says so");
    assert_eq!(recorded("quiet", &["--set", "history.tools.quiet.results=whole"]), None);
    assert!(world.run(&["tools", "show", "quiet"]).contains("not recorded"));
    assert!(world.run(&["audit", "verify"]).starts_with("exit: 0\n"));
}

// Shows: E5.4
#[test]
fn calls_are_found_by_the_words_of_their_answers() {
    let world = World::new().file("a.txt", "the Connection was refused\n").file("b.txt", "nothing\n");
    for file in ["path=a.txt", "path=b.txt"] {
        assert!(world.run(&["call", "Read", file]).starts_with("exit: 0\n"));
    }
    let found = |arguments: &[&str]| -> Vec<Value> {
        let page = world.json(&[&["history", "--json"], arguments].concat());
        page["executions"].as_array().unwrap().iter().map(|call| call["parameters"]["path"].clone()).collect()
    };
    assert_eq!(found(&["--text", "connect refused", "--in", "results"]), ["a.txt"]);
    assert!(found(&["--text", "connect refused"]).is_empty());
    assert!(found(&["--text", "connect refused", "--in", "calls"]).is_empty());
    assert!(found(&["--text", "b.txt", "--in", "results"]).is_empty());
    assert!(world.run(&["history", "--in", "results"]).starts_with("exit: 2\n"));
}

const SAYING_TOOLS: &str = r#"
[[tool]]
name = "loud"
description = "Counts"
command = ["seq", "2000"]

[[tool]]
name = "quiet"
description = "Counts in private"
command = ["seq", "2000"]
results = "none"
"#;

#[test]
fn calls_are_found_by_the_provider_of_their_tool() {
    let world = World::new().file("fail.sh", FAIL).file(".wieldy/tools/login.toml", LOGIN_TOOL);
    world.run(&["call", "login", "secret=rosebud-1941", "--isolation", "none"]);
    world.run(&["call", "List"]);
    let tools = |found: &Value| -> Vec<String> {
        let calls = found["executions"].as_array().unwrap().iter();
        calls.map(|call| format!("{} {}", call["tool"], call["provider"]).replace('"', "")).collect()
    };
    let found = |provider: &str| tools(&world.json(&["history", "--provider", provider, "--json"]));
    assert_eq!(found("command"), ["login command"]);
    assert_eq!(found("builtin"), ["List builtin"]);
    assert_eq!(found("mcp:git"), Vec::<String>::new());
    let own = world.json(&["call", "history_search", "provider=command", "--json"]);
    assert_eq!(tools(&own["structured"]), ["login command"]);
    let stats = world.json(&["history", "stats", "--provider", "command", "--json"]);
    assert_eq!((&stats["stats"][0]["tool"], stats["stats"].as_array().unwrap().len()), (&json!("login"), 1));
    assert!(world.run(&["audit", "verify"]).starts_with("exit: 0\n"));
}

const FAIL: &str = "echo connecting\nprintf 'Traceback (most recent call last):\\n  File \"login.py\", line 3, in <module>\\nLoginError: not %s\\n' \"$1\" >&2\nexit 1\n";

const LOGIN_TOOL: &str = r#"
[[tool]]
name = "login"
description = "logs in"
command = ["sh", "fail.sh", "{secret}"]
sensitive = ["secret"]
[tool.arguments]
secret = { type = "string", required = true }
"#;

#[test]
fn one_call_is_shown_by_its_id_or_the_beginning_of_it() {
    let world = world();
    some_calls(&world);
    let page = json_of(&world, &["history", "--tool", "Read", "--status", "failed"]);
    let id = page["executions"][0]["execution_id"].as_str().unwrap();
    let whole = told(&world, &["history", "show", id]);
    assert_eq!(told(&world, &["history", "show", &id[..20]]), whole);
    let whole = whole.replace(&format!("user:  {}\n", crate::callers::account()), "user:  [account]\n");
    insta::assert_snapshot!(whole, @r#"
    exit: 0
    ----- stdout -----
    call:  [id]
    status:  failed
    tool:  Read
    provider:  builtin
    started:  [time]
    ended:  [time]
    took:  [took]
    returned:  0 B
    attempts:  1
    agent:  ada
    user:  [account]
    workspace:  [root]/work
    task:  true

    arguments
      {
        "path": "missing.txt"
      }

    error[E3302]: there is no `missing.txt`
    hint: look for it with `Glob`, such as `**/name*`, or with `List`

    what happened
        [took]  tool.call.pending task=true
        [took]  tool.call.started attempt=1 attempts_max=3 timeout_ms=10000 read_only=true
        [took]  tool.call.failure duration_ms=[took] queued_ms=[took] attempts=1 cached=false output_bytes=0

    ----- stderr -----
    "#);
    let shown = json_of(&world, &["history", "show", id]);
    assert_eq!(shown["execution"], page["executions"][0]);
    let mut events = without_chance(shown["events"].clone());
    let names: Vec<&Value> = shown["events"].as_array().unwrap().iter().map(|event| &event["name"]).collect();
    assert_eq!(names, ["tool.call.pending", "tool.call.started", "tool.call.failure"]);
    let seq = events[0]["seq"].take();
    assert_eq!(
        events[0],
        json!({"seq": null, "at": "[time]", "name": "tool.call.pending", "severity": "debug",
               "data": {"arguments": {"path": "missing.txt"}, "workspace": "[folder]", "provider": "builtin",
                        "task": true, "message": "call accepted", "elapsed_ms": 0.0}})
    );
    assert_eq!(shown["events"][2]["seq"].as_i64(), seq.as_i64().map(|seq| seq + 2));
}

#[test]
fn an_id_that_is_unknown_short_or_ambiguous_is_exit_3() {
    let world = world();
    insta::assert_snapshot!(told(&world, &["history", "show", "01a1e382-0bee"]), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error: no call has the id `[id]`
    hint: `wieldy history` lists the latest calls with their ids
    ");
    some_calls(&world);
    let id = json_of(&world, &["history"])["executions"][0]["execution_id"].as_str().unwrap().to_owned();
    for (id, message) in [
        ("01a1e382-0bee", "no call has the id `01a1e382-0bee`"),
        ("not-an-id", "no call has the id `not-an-id`"),
        ("01a1e38", "`01a1e38` is too short for an id"),
        (&format!("{id}0"), "no call has the id"),
    ] {
        let text = told(&world, &["history", "show", id]);
        assert!(text.starts_with("exit: 3\n"), "{text}");
        assert!(world.run(&["history", "show", id, "--state", "../state"]).contains(message), "{text}");
    }
    // Ids start with the time, so those of one batch start alike.
    let batch = "{\"tool\":\"List\"}\n".repeat(8);
    let world = world.file("batch", &batch);
    world.code(&["batch", "batch", "--state", "../state"]);
    let id = json_of(&world, &["history"])["executions"][0]["execution_id"].as_str().unwrap().to_owned();
    let text = told(&world, &["history", "show", &id[..8]]);
    assert!(text.starts_with("exit: 3\n") && text.contains("the ids of several calls begin with"), "{text}");
    assert!(text.ends_with(", others\n"), "{text}");
}

// Shows: E5.2
#[test]
fn statistics_count_by_tool_and_day() {
    let world = world();
    some_calls(&world);
    insta::assert_snapshot!(told(&world, &["history", "stats"]), @"
    exit: 0
    ----- stdout -----
    TOOL  CALLS  ERRORS  P50  P95  P99  SIZE  KEPT
    NoSuchTool  1  100 %  [took]  [took]  [took]  0 B  0 B  ████████
    Read  2  50 %  [took]  [took]  [took]  4 B  16 B  ████████████████
    Write  1  0 %  [took]  [took]  [took]  28 B  39 B  ████████

    ----- stderr -----
    ");
    insta::assert_snapshot!(told(&world, &["history", "stats", "--by", "tool,day", "--tool", "Write"]), @"
    exit: 0
    ----- stdout -----
    DAY  TOOL  CALLS  ERRORS  P50  P95  P99  SIZE  KEPT
    [day]  Write  1  0 %  [took]  [took]  [took]  28 B  39 B  ████████████████

    ----- stderr -----
    ");
    let expected = json!({"stats": [{
        "tool": "Read", "count": 2, "errors": 1, "error_rate": 0.5, "p50_ms": "[ms]", "p95_ms": "[ms]", "p99_ms": "[ms]",
        "output_bytes": 4, "result_bytes": 16, "statuses": {"failed": 1, "success": 1},
    }]});
    assert_eq!(without_chance(json_of(&world, &["history", "stats", "--tool", "Read"])), expected);
    let by_session = json_of(&world, &["history", "stats", "--session", "s1"]);
    assert_eq!((&by_session["stats"][0]["tool"], &by_session["stats"][0]["count"]), (&json!("Read"), &json!(1)));
}

#[test]
fn reading_a_missing_history_shows_nothing_and_creates_none() {
    let world = world();
    insta::assert_snapshot!(told(&world, &["history"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    nothing has been recorded yet
    ");
    assert_eq!(json_of(&world, &["history"]), json!({"executions": [], "next": null}));
    assert_eq!(json_of(&world, &["history", "stats"]), json!({"stats": []}));
    assert_eq!(told(&world, &["history", "stats"]), told(&world, &["history"]));
    let text = told(&world, &["history", "backup", "b.db"]);
    assert!(text.starts_with("exit: 7\n") && text.contains("nothing has been recorded yet"), "{text}");
    assert!(!world.path("../state").exists());
    let homeless = World::new();
    let output = homeless.command(&["history"]).env_remove("HOME").output().unwrap();
    insta::assert_snapshot!(homeless.told(&output), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: there is no history: neither a state folder nor `history.url` is known
    hint: `--state DIR` names a folder
    ");
}

#[test]
fn an_idempotency_key_is_known_to_the_next_command_and_other_results_are_not_kept() {
    let world = world();
    let keyed = ["call", "Write", "path=k.txt", "content=x", "--yes", "--idempotency-key", "k", "--state", "../state"];
    for _ in 0..2 {
        let first = world.json(&[&keyed[..], &["--json"]].concat());
        assert_eq!(first["content"][0]["text"], "wrote `k.txt`, 1 bytes (new)");
    }
    some_calls(&world);
    let database = rusqlite::Connection::open(world.path("../state/history.db")).unwrap();
    let count = |sql: &str| database.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM answers WHERE key IS NOT NULL"), 1);
    assert!(count("SELECT count(*) FROM answers WHERE key IS NULL") <= 1, "the next command forgets the last one's");
}

/// A small disk in memory, which is unmounted on drop.
struct Disk(std::path::PathBuf);

impl Disk {
    /// Mounts the disk, or prints why that is impossible.
    fn mount(folder: std::path::PathBuf) -> Option<Self> {
        fs::create_dir_all(&folder).unwrap();
        let mut mount = std::process::Command::new("mount");
        let done = mount.args(["-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs"]).arg(&folder).status();
        if done.is_ok_and(|status| status.success()) {
            return Some(Self(folder));
        }
        assert!(std::env::var("CI").is_err(), "CI must be able to mount a disk");
        wieldy_testkit::skip("tests of disks need root");
        None
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn on_a_full_disk_nothing_runs() {
    let world = world();
    let Some(disk) = Disk::mount(world.path("../state")) else { return };
    let calls = [
        &["call", "Read", "path=a.txt", "--state", "../state"][..],
        &["call", "Write", "path=new.txt", "content=x", "--yes", "--state", "../state"],
    ];
    assert_eq!(world.code(calls[0]), Some(0));
    let filler = disk.0.join("filler");
    let _ = fs::write(&filler, vec![0; 8 << 20]);
    // Test with a disk that is completely full, and with one that has room for a record or two.
    for (call, left) in [(calls[0], 0), (calls[1], 0), (calls[0], 100 << 10), (calls[1], 0)] {
        let file = fs::OpenOptions::new().write(true).open(&filler).unwrap();
        file.set_len(file.metadata().unwrap().len() - left).unwrap();
        insta::allow_duplicates! {
            insta::assert_snapshot!(world.run(call), @"
            exit: 7
            ----- stdout -----

            ----- stderr -----
            error[E3111]: nothing was run, because calls cannot be recorded: cannot use the history `[root]/state/history.db`: the disk is full, and 1048576 bytes must be free
            hint: check that it can be reached and written, and that the disk has free space; `--state DIR` names another folder
            ");
        }
    }
    assert!(!world.path("new.txt").exists());
    // The history can still be read, and calls run again once there is space.
    assert_eq!(world.code(&["history", "--state", "../state"]), Some(0));
    fs::remove_file(&filler).unwrap();
    assert_eq!(calls.map(|call| world.code(call)), [Some(0); 2]);
}

#[test]
fn a_call_whose_record_is_lost_on_a_full_disk_ends_with_an_error() {
    let world = world();
    let Some(disk) = Disk::mount(world.path("../state")) else { return };
    // The pipe makes the call wait until the disk is full.
    let made = std::process::Command::new("mkfifo").arg(world.path("pipe")).status().unwrap();
    assert!(made.success());
    let relaxed = ["--set", "history.durability=relaxed", "--isolation", "none", "--state", "../state"];
    let command = "command=echo x > started; cat pipe";
    let mut call = world.command(&[&["call", "Bash", command][..], &relaxed].concat()).spawn().unwrap();
    while !world.path("started").exists() {
        assert_eq!(call.try_wait().unwrap(), None, "it waits for the pipe");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // The call runs, so its opening is recorded; there is no space for its closing.
    let _ = fs::write(disk.0.join("filler"), vec![0; 8 << 20]);
    fs::write(world.path("pipe"), "seen\n").unwrap();
    let output = call.wait_with_output().unwrap();
    let told = world.told(&output);
    assert_eq!(output.status.code(), Some(7), "{told}");
    assert!(told.contains("seen") && told.contains("error[E3111]: the calls could not be recorded"), "{told}");
    assert_eq!(told.matches("the history cannot be written").count(), 1, "{told}");
}

#[test]
fn an_idempotency_key_belongs_to_one_workspace() {
    let world = world();
    fs::create_dir(world.path("../other")).unwrap();
    let keyed = ["call", "Write", "path=k.txt", "content=x", "--yes", "--idempotency-key", "k", "--state", "../state"];
    for folder in ["", "../other"] {
        let output = world.command(&keyed).current_dir(world.path(folder)).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", world.told(&output));
        assert_eq!(fs::read_to_string(world.path(folder).join("k.txt")).unwrap(), "x");
    }
    let found = |folder: &str| {
        let page = json_of(&world, &["history", "--workspace", folder]);
        let calls = page["executions"].as_array().unwrap();
        calls.iter().map(|call| call["workspace"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let path = |folder: &str| world.path(folder).canonicalize().unwrap().to_str().unwrap().to_owned();
    assert_eq!([found("."), found("../other"), found("../none")], [vec![path("")], vec![path("../other")], vec![]]);
}

// Shows: A12
#[test]
fn two_commands_with_one_key_at_once_run_it_once() {
    let world = world();
    let command = "command=echo ran >> ran.txt; until [ -e go ]; do sleep 0.02; done; echo done";
    let keyed = ["call", "Bash", command, "--isolation", "none", "--idempotency-key", "k", "--state", "../state"];
    let first = world.command(&keyed).spawn().unwrap();
    while !world.path("ran.txt").exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let second = world.command(&keyed).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    fs::write(world.path("go"), "").unwrap();
    for command in [first, second] {
        let output = command.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"done\n"[..]), "{:?}", output.stderr);
    }
    assert_eq!(fs::read_to_string(world.path("ran.txt")).unwrap(), "ran\n");
}

// Shows: A11
#[test]
fn dynamic_timeouts_follow_what_earlier_commands_took() {
    let world = world().file("batch", &"{\"tool\":\"List\"}\n".repeat(25));
    let timeout = |set: &[&str]| {
        assert_eq!(world.code(&[&["call", "List", "--state", "../state"], set].concat()), Some(0));
        let id = json_of(&world, &["history", "--limit", "1"])["executions"][0]["execution_id"].clone();
        let shown = json_of(&world, &["history", "show", id.as_str().unwrap()]);
        shown["events"][1]["data"]["timeout_ms"].as_u64().unwrap()
    };
    assert_eq!(world.code(&["batch", "batch", "--state", "../state"]), Some(0));
    let usual = timeout(&[]);
    let learnt = timeout(&["--set", "timeouts.dynamic=true"]);
    assert!(learnt < usual, "{learnt} ms, and {usual} ms without");
}

#[test]
fn many_commands_at_once_record_all_their_calls() {
    let world = world();
    let commands: Vec<_> = (0..10)
        .map(|number| {
            let label = format!("--session=s{number}");
            world.command(&["call", "Read", "path=a.txt", &label, "--state", "../state"]).spawn().unwrap()
        })
        .collect();
    for command in commands {
        let output = command.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stdout), (Some(0), b"one\n".to_vec()), "{:?}", output.stderr);
    }
    let page = json_of(&world, &["history"]);
    let mut sessions: Vec<&str> =
        page["executions"].as_array().unwrap().iter().map(|call| call["session"].as_str().unwrap()).collect();
    sessions.sort_unstable();
    assert_eq!(sessions, ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9"]);
    assert_eq!(world.code(&["audit", "verify", "--state", "../state"]), Some(0));
    assert_eq!(fs::read_dir(world.path("../state/history.db.instances")).unwrap().count(), 0);
}

/// Collects the bytes of every file below a folder.
fn bytes_below(folder: &Path, bytes: &mut Vec<u8>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            bytes_below(&path, bytes);
        } else {
            bytes.extend(fs::read(&path).unwrap());
        }
    }
}

// Shows: D8.2
#[test]
fn no_secret_is_in_the_state_folder_in_any_spelling() {
    const OF_ENVIRONMENT: &str = "correct-horse-battery-staple";
    const OF_ARGUMENT: &str = "hunter2-and-some-more";
    let world = world().variable("DEPLOY_TOKEN", OF_ENVIRONMENT);
    let base64 = "Y29ycmVjdC1ob3JzZS1iYXR0ZXJ5LXN0YXBsZQ==";
    let hex: String = OF_ENVIRONMENT.bytes().map(|byte| format!("{byte:02x}")).collect();
    let content = format!("content=plain {OF_ENVIRONMENT} and {base64} and {hex}");
    assert_eq!(world.code(&["call", "Write", "path=c.txt", &content, "--yes", "--state", "../state"]), Some(0));
    let password = format!("password={OF_ARGUMENT}");
    world.code(&["call", "Nope", &password, "--state", "../state"]);
    let echo = format!("command=echo {OF_ENVIRONMENT} >&2; cat c.txt; exit 3");
    assert_eq!(world.code(&["call", "Bash", &echo, "--state", "../state"]), Some(1));
    let printed =
        world.json(&["call", "Read", "path=c.txt", "--idempotency-key", "k", "--json", "--state", "../state"]);
    assert!(printed["content"][0]["text"].as_str().unwrap().contains(OF_ENVIRONMENT), "{printed}");
    let mut bytes = Vec::new();
    bytes_below(&world.path("../state"), &mut bytes);
    assert!(bytes.windows(8).any(|window| window == b"redacted"));
    for secret in [OF_ENVIRONMENT, OF_ARGUMENT, base64, &hex, &hex.to_uppercase()] {
        let is_there = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
        assert!(!is_there, "`{secret}` is in the state folder");
    }
}

#[test]
fn the_files_are_their_owners_and_no_program_sees_them() {
    let world = world();
    let in_state = "command=cat state/audit.key state/history.db; ls state; echo x >> state/history.db";
    let beside = "command=cat kept.db; echo x >> kept.db; echo x >> kept.db-wal; rm -f kept.db";
    for (command, state) in
        [(in_state, &["--state", "state"][..]), (beside, &["--state", "../other", "--set", "history.url=kept.db"])]
    {
        let result = world.json(&[&["call", "Bash", command, "--json"], state].concat());
        let text = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"));
        assert!(!text.contains("SQLite format") && !text.contains("audit.key\n"), "{text}");
        let refused = text.matches("Permission denied").count() + text.matches("resource busy").count();
        assert_eq!(refused, 4, "{text}");
        assert_eq!(world.code(&[&["audit", "verify"], state].concat()), Some(0));
    }
    let mode = |path: &str| fs::metadata(world.path(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (mode("state"), mode("state/history.db"), mode("state/audit.key"), mode("kept.db")),
        (0o700, 0o600, 0o600, 0o600)
    );
}

#[test]
fn nothing_runs_where_the_history_cannot_be_used() {
    let world = world().file("../text/history.db", "this is no database, however long one looks at it\n");
    fs::create_dir_all(world.path("../folder/history.db")).unwrap();
    assert_eq!(world.code(&["call", "List", "--state", "../newer"]), Some(0));
    let newer = rusqlite::Connection::open(world.path("../newer/history.db")).unwrap();
    newer.pragma_update(None, "user_version", 99).unwrap();
    drop(newer);
    let mut all = String::new();
    for state in ["text", "folder", "newer"] {
        let folder = format!("../{state}");
        let made = format!("path={state}.txt");
        let refused = world.run(&["call", "Write", &made, "content=x", "--yes", "--state", &folder]);
        let unseen = world.run(&["history", "--state", &folder]);
        assert!(!world.path(&format!("{state}.txt")).exists());
        for told in [refused, unseen] {
            assert!(told.starts_with("exit: 7\n----- stdout -----\n\n----- stderr -----\n"), "{told}");
            all.push_str(told.lines().skip(4).collect::<Vec<_>>().join("\n").as_str());
            all.push('\n');
        }
    }
    insta::assert_snapshot!(all, @"
    error[E3111]: nothing was run, because calls cannot be recorded: cannot use the history `[root]/text/history.db`: file is not a database
    hint: move it away and start a new one, or restore a backup (`wieldy history backup` makes one); `--state DIR` names another folder
    error: cannot use the history `[root]/text/history.db`: file is not a database
    hint: move it away and start a new one, or restore a backup (`wieldy history backup` makes one); `--state DIR` names another folder
    error[E3111]: nothing was run, because calls cannot be recorded: cannot use the history `[root]/folder/history.db`: unable to open database file: [root]/folder/history.db
    hint: check that it can be reached and written, and that the disk has free space; `--state DIR` names another folder
    error: cannot use the history `[root]/folder/history.db`: unable to open database file: [root]/folder/history.db
    hint: check that it can be reached and written, and that the disk has free space; `--state DIR` names another folder
    error[E3111]: nothing was run, because calls cannot be recorded: the history has schema version 99, and this program supports versions up to 9
    hint: use the version of wieldy that wrote it, or a newer one; `--state DIR` names another folder
    error: the history has schema version 99, and this program supports versions up to 9
    hint: use the version of wieldy that wrote it, or a newer one; `--state DIR` names another folder
    ");
}

#[test]
fn nothing_runs_where_the_state_folder_is_read_only() {
    let world = world();
    let (program, state) = (world.path("../wieldy"), world.path("../state"));
    fs::copy(env!("CARGO_BIN_EXE_wieldy"), &program).unwrap();
    fs::set_permissions(world.path(".."), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(world.code(&["call", "List", "--state", "../state"]), Some(0));
    let is_root = rustix::process::geteuid().is_root();
    let run = |state: &Path, file: &str| {
        let mut command = std::process::Command::new(&program);
        command.args(["call", "Write", file, "content=x", "--yes"]).arg("--state").arg(state);
        command.current_dir(world.path("")).env_clear().env("HOME", world.path("../home"));
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        world.told(&command.output().unwrap())
    };
    if is_root {
        chown(world.path(""), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    fs::set_permissions(&state, fs::Permissions::from_mode(0o555)).unwrap();
    fs::set_permissions(state.join("history.db"), fs::Permissions::from_mode(0o444)).unwrap();
    let there = run(&state, "path=one.txt");
    assert!(there.starts_with("exit: 7\n") && there.contains("error[E3111]: nothing was run"), "{there}");
    let missing = run(&state.join("below"), "path=two.txt");
    assert!(missing.starts_with("exit: 7\n") && missing.contains("Permission denied"), "{missing}");
    assert!(!world.path("one.txt").exists() && !world.path("two.txt").exists());
    fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_copy_a_backup_and_the_configured_place_hold_the_same_calls() {
    let world = world();
    some_calls(&world);
    let calls = json_of(&world, &["history"]);
    insta::assert_snapshot!(told(&world, &["history", "backup", "b.db"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    wrote `b.db`
    ");
    insta::assert_snapshot!(told(&world, &["history", "backup", "b.db"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: `b.db` already exists
    hint: name a file that does not exist yet: a backup is never replaced
    ");
    insta::assert_snapshot!(told(&world, &["history", "copy", "sqlite:c.db"]), @"
    exit: 0
    ----- stdout -----

    ----- stderr -----
    copied 19 records of 4 calls to c.db
    ");
    for (place, variable) in [("b.db", false), ("c.db", false), ("sqlite:b.db", true)] {
        let set = format!("history.url={place}");
        let mut command = if variable {
            world.command(&["history", "--json"])
        } else {
            world.command(&["history", "--json", "--set", &set])
        };
        let output = command.env("WIELDY_HISTORY_URL", place).output().unwrap();
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["executions"], calls["executions"], "{place}");
    }
    assert_eq!(world.code(&["audit", "verify", "--set", "history.url=c.db"]), Some(0));
}

#[test]
fn old_records_are_dropped_and_the_rest_stays_verifiable() {
    let world = world();
    some_calls(&world);
    insta::assert_snapshot!(told(&world, &["history", "prune"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: nothing is dropped: neither a flag nor the configuration sets a limit
    hint: `--older-than 90d` or `--larger-than 1GB`; see `history.keep-days` too
    ");
    std::thread::sleep(std::time::Duration::from_millis(5));
    let dry = json_of(&world, &["history", "prune", "--older-than", "1ms", "--dry-run"]);
    assert_eq!((&dry["executions"], found(&world, &[]).len()), (&json!(4), 4));
    let pruned = json_of(&world, &["history", "prune", "--older-than", "1ms"]);
    assert_eq!((&pruned["executions"], &pruned["records"]), (&json!(4), &dry["records"]));
    assert_eq!(found(&world, &[]), Vec::<String>::new());
    let verdict = json_of(&world, &["audit", "verify"]);
    assert_eq!((&verdict["dropped"], &verdict["problem"]), (&pruned["records"], &json!(null)));
    let text = told(&world, &["audit", "verify"]);
    let dropped = format!("; {} records before them dropped by retention\n", pruned["records"]);
    assert!(text.starts_with("exit: 0\n") && text.contains(&dropped), "{text}");
    let text = told(&world, &["history", "prune", "--larger-than", "1KB"]);
    let more = "that is more than 1.0 KB: the rest belongs to open calls or to the tables themselves\n";
    assert!(text.starts_with("exit: 0\n") && text.ends_with(more), "{text}");
    let text = told(&world, &["history", "prune", "--larger-than", "1GB"]);
    assert!(text.starts_with("exit: 0\n") && !text.contains("that is more"), "{text}");
}

#[test]
fn a_password_in_the_address_is_shown_nowhere() {
    let world = world();
    let url = "history.url=postgres://ada:correct%20horse@db.invalid/history";
    let told = world.run(&["config", "show", "--set", url]);
    assert!(!told.contains("horse"), "{told}");
    let told = world.run(&["call", "List", "--set", url]);
    assert!(!told.contains("horse") && !told.starts_with("exit: 0"), "{told}");
}

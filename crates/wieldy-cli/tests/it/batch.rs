//! Tests of `wieldy batch`.

use serde_json::json;

use crate::world::World;

const BATCH: &str = r#"[
    {"id": "write", "tool": "Write", "arguments": {"path": "a.txt", "content": "one\n"}},
    {"id": "search", "tool": "Search", "arguments": {"pattern": "one"}, "after": ["write"]},
    {"tool": "Read", "arguments": {"path": "missing.txt"}}
]"#;

// Shows: A4.1
#[test]
fn a_batch_prints_a_block_per_call_in_input_order() {
    let world = World::new().file("batch.json", BATCH);
    insta::assert_snapshot!(world.run(&["batch", "batch.json"]), @r#"
    exit: 1
    ----- stdout -----
    [write] Write: success
    wrote `a.txt`, 4 bytes (new)
    [search] Search: success
    a.txt:1:one
    batch.json:2:    {"id": "write", "tool": "Write", "arguments": {"path": "a.txt", "content": "one\n"}},
    batch.json:3:    {"id": "search", "tool": "Search", "arguments": {"pattern": "one"}, "after": ["write"]},
    [#3] Read: failed
    error[E3302]: there is no `missing.txt`
    hint: look for it with `Glob`, such as `**/name*`, or with `List`

    ----- stderr -----
    3 calls in [number] s: 2 succeeded, 1 failed, 0 skipped
    "#);
}

#[test]
fn a_batch_of_lines_comes_from_standard_input() {
    let lines = "{\"tool\":\"Glob\",\"arguments\":{\"pattern\":\"*.txt\"}}\n\n{\"id\":\"b\",\"tool\":\"List\"}\n";
    let world = World::new().file("a.txt", "one\n");
    insta::assert_snapshot!(world.run_with_input(&["batch", "-", "--mode", "sequential"], lines), @"
    exit: 0
    ----- stdout -----
    [#1] Glob: success
    a.txt
    [b] List: success
    a.txt  4 B

    ----- stderr -----
    2 calls in [number] s: 2 succeeded, 0 failed, 0 skipped
    ");
}

#[test]
fn a_batch_in_json_has_id_results_and_summary() {
    let world = World::new().file("batch.json", BATCH);
    let batch = world.json(&["batch", "batch.json", "--json"]);
    let keys: Vec<&String> = batch.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["batch_id", "results", "summary"]);
    let statuses: Vec<&str> =
        batch["results"].as_array().unwrap().iter().map(|result| result["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["success", "success", "failed"]);
    assert_eq!(batch["summary"]["total"], 3);
    assert_eq!(batch["results"][0]["call_id"], "write");
}

// Shows: A4.4
#[test]
fn stop_on_error_starts_no_call_after_an_error() {
    let lines = "{\"id\":\"a\",\"tool\":\"Read\",\"arguments\":{\"path\":\"x\"}}\n{\"id\":\"b\",\"tool\":\"List\"}";
    let world = World::new();
    let told = world.run_with_input(&["batch", "-", "--mode", "sequential", "--stop-on-error"], lines);
    insta::assert_snapshot!(told, @"
    exit: 1
    ----- stdout -----
    [a] Read: failed
    error[E3302]: there is no `x`
    hint: look for it with `Glob`, such as `**/name*`, or with `List`
    [b] List: cancelled
    error[E3109]: skipped: the batch stops on errors, and `a` failed
    hint: this call was not started; first find out why the other call failed

    ----- stderr -----
    2 calls in [number] s: 0 succeeded, 1 failed, 1 skipped
    ");
}

#[test]
fn the_exit_code_is_that_of_the_first_failure_in_input_order() {
    let world = World::new();
    let code = |lines: &str| {
        let world = World::new().file("batch", lines);
        world.code(&["batch", "batch"])
    };
    assert_eq!(code("{\"tool\":\"List\"}"), Some(0));
    assert_eq!(
        code("{\"tool\":\"List\"}\n{\"tool\":\"Nope\"}\n{\"tool\":\"Read\",\"arguments\":{\"path\":\"x\"}}"),
        Some(3)
    );
    assert_eq!(code("{\"tool\":\"Read\",\"arguments\":{\"path\":\"x\"}}\n{\"tool\":\"Nope\"}"), Some(1));
    assert_eq!(
        world.run_with_input(&["batch", "-"], "").lines().next(),
        Some("exit: 0"),
        "an empty batch is no failure"
    );
}

#[test]
fn a_batch_that_makes_no_sense_is_refused_whole() {
    let world = World::new();
    let cycle =
        "{\"id\":\"a\",\"tool\":\"List\",\"after\":[\"b\"]}\n{\"id\":\"b\",\"tool\":\"List\",\"after\":[\"a\"]}";
    insta::assert_snapshot!(world.run_with_input(&["batch", "-"], cycle), @"
    exit: 3
    ----- stdout -----

    ----- stderr -----
    error[E3002]: the calls a, b wait for each other
    hint: correct the batch; none of its calls was run
    ");
    let unknown = "{\"id\":\"first\",\"tool\":\"List\"}\n{\"tool\":\"List\",\"after\":[\"frist\"]}";
    insta::assert_snapshot!(world.run_with_input(&["batch", "-", "--json"], unknown), @r#"
    exit: 3
    ----- stdout -----
    {"error":{"code":"E3002","name":"VALIDATION_FAILED","category":"validation_error","message":"the call `#2` needs `frist`, and there is no call with that id; did you mean `first`?","retryable":false,"suggestion":"correct the batch; none of its calls was run","details":{}}}

    ----- stderr -----
    error[E3002]: the call `#2` needs `frist`, and there is no call with that id; did you mean `first`?
    hint: correct the batch; none of its calls was run
    "#);
}

#[test]
fn mistakes_are_reported_with_their_line() {
    let world =
        World::new().file("batch.json", "[\n  {\"tool\": \"List\"},\n  {\"tool\": \"List\", \"argumnts\": {}}\n]");
    insta::assert_snapshot!(world.run(&["batch", "batch.json"]), @r#"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: batch.json:3: unknown field `argumnts`, expected one of `id`, `name`, `tool`, `args`, `arguments`, `after`, `idempotency_key`
    hint: did you mean `arguments` or `args`? a batch is a JSON array of such objects, or one per line: {"id": "b", "tool": "Read", "arguments": {"path": "notes.txt"}, "after": ["a"], "idempotency_key": "k"}
    "#);
    insta::assert_snapshot!(world.run_with_input(&["batch", "-"], "{\"tool\":\"List\"}\n{\"tool\":"), @r#"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: standard input:2: EOF while parsing a value
    hint: a batch is a JSON array of such objects, or one per line: {"id": "b", "tool": "Read", "arguments": {"path": "notes.txt"}, "after": ["a"], "idempotency_key": "k"}
    "#);
    insta::assert_snapshot!(world.run(&["batch", "missing.json"]), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: cannot read the batch from `missing.json`
      caused by: No such file or directory (os error 2)
    hint: name a text file that you may read; `-` is standard input
    ");
}

// Shows: D6.1
#[test]
fn a_plan_limits_a_batch() {
    let world = World::new().file("wieldy.toml", "[plans.Trial]\nbatch-max = 1\n").file("batch.json", BATCH);
    insta::assert_snapshot!(world.run(&["batch", "batch.json", "--plan", "Trial"]), @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    error[E3006]: a batch of 3 calls is over the limit of 1 of the plan `Trial`
    hint: split the batch into parts of at most 1 calls
    ");
}

#[test]
fn the_exit_code_is_that_of_the_call_that_failed_and_not_of_those_that_were_skipped() {
    let lines = r#"{"id":"second","tool":"Glob","arguments":{"pattern":"*"},"after":["first"]}
                   {"id":"first","tool":"Read","arguments":{"path":"missing.txt"}}"#;
    let told = World::new().run_with_input(&["batch", "-"], lines);
    assert!(told.starts_with("exit: 1\n"), "{told}");
}

#[test]
fn a_call_whose_reference_finds_nothing_has_failed_and_was_not_skipped() {
    let lines = r#"{"id":"a","tool":"List"}
{"id":"b","tool":"Read","arguments":{"path":{"$result":"a","pointer":"/nowhere"}}}
{"id":"c","tool":"Read","arguments":{"path":{"$result":"b"}}}"#;
    let told = World::new().run_with_input(&["batch", "-"], lines);
    assert!(told.contains(" s: 1 succeeded, 1 failed, 1 skipped"), "{told}");
}

#[test]
fn an_idempotency_key_in_a_batch_is_that_of_a_call() {
    let world = World::new();
    let append = r#""tool":"Bash","arguments":{"command":"echo x >> runs.txt"}"#;
    let batch =
        format!("{{{append},\"idempotency_key\":\"k\"}}\n{{{append},\"idempotency_key\":\"k\"}}\n{{{append}}}\n");
    let world = world.file("batch.jsonl", &batch);
    let runs = || std::fs::read_to_string(world.path("runs.txt")).unwrap().lines().count();
    let options = ["--isolation", "none", "--state", "../state"];
    for expected in [2, 3] {
        assert_eq!(world.code(&[&["batch", "batch.jsonl"], &options[..]].concat()), Some(0));
        assert_eq!(runs(), expected, "the key has one run, the call without one has its own");
    }
    let call = ["call", "Bash", "command=echo x >> runs.txt", "--idempotency-key", "k"];
    assert_eq!(world.code(&[&call[..], &options[..]].concat()), Some(0));
    assert_eq!(runs(), 3, "the same key is known to the other command");
}

// Shows: D6.3
#[test]
fn a_batch_says_in_one_line_what_held_fewer_calls_at_once() {
    let lines = "{\"tool\":\"List\"}\n{\"tool\":\"List\"}";
    let told = |arguments: &[&str]| {
        let told = World::new().run_with_input(&[&["batch", "-"], arguments].concat(), lines);
        told.split_once("----- stderr -----\n").unwrap().1.lines().next().unwrap().to_owned()
    };
    let summary = "2 calls in [number] s: 2 succeeded, 0 failed, 0 skipped";
    assert_eq!(told(&[]), summary, "the default of five at four slots is no news");
    assert_eq!(told(&["--max-concurrency", "4"]), summary);
    assert_eq!(
        told(&["--max-concurrency", "10"]),
        "note: 4 calls could run at once, not 10: `limits.calls-running-per-agent-max` is 4"
    );
    assert_eq!(told(&["--max-concurrency", "10", "--plan", "Teams"]), summary);
    assert_eq!(
        told(&["--max-concurrency", "20", "--plan", "Teams"]),
        "note: 10 calls could run at once, not 20: `plans.Teams.parallel-max` is 10"
    );
    assert_eq!(
        told(&["--mode", "parallel", "--plan", "Core"]),
        "note: the calls ran one after the other, not 5 at once: `plans.Core.parallel-max` is 1"
    );
    assert_eq!(told(&["--plan", "Core"]), summary);
}

// Shows: A4.5
#[test]
fn the_summary_of_a_batch_names_the_limit_that_held() {
    let world = World::new()
        .file("wieldy.toml", "[plans.Two]\nslots = 2\n")
        .file("batch", "{\"tool\":\"List\"}\n{\"tool\":\"List\"}");
    let summary = |arguments: &[&str]| {
        let told = world.json(&[&["batch", "batch", "--json"], arguments].concat());
        let part = |name: &str| told["summary"][name].clone();
        [part("max_concurrency"), part("asked"), part("held_by")]
    };
    let told = |max: usize, asked: Option<usize>, held_by: Option<&str>| {
        [serde_json::json!(max), serde_json::json!(asked), serde_json::json!(held_by)]
    };
    assert_eq!(summary(&["--plan", "Two"]), told(2, None, None));
    assert_eq!(summary(&["--plan", "Two", "--max-concurrency", "3"]), told(2, Some(3), Some("plan_slots")));
}

#[test]
fn a_key_of_a_shipped_plan_leaves_its_other_keys_as_they_are() {
    let lines = "{\"tool\":\"List\"}\n".repeat(10);
    let world = World::new().file("batch", &lines);
    let summary = |setting: &str, plan: &str| {
        let asked = ["--set", setting, "--plan", plan, "--max-concurrency", "10"];
        let told = world.json(&[&["batch", "batch", "--json"], &asked[..]].concat());
        let part = |name: &str| told["summary"][name].clone();
        [part("total"), part("max_concurrency"), part("held_by")]
    };
    let told = |max: usize, held_by: Option<&str>| [json!(10), json!(max), json!(held_by)];
    assert_eq!(summary("plans.Teams.tools=[\"*\"]", "Teams"), told(10, None));
    assert_eq!(summary("plans.Teams.batch-max=60", "Teams"), told(10, None));
    assert_eq!(summary("plans.Teams.slots=3", "Teams"), told(3, Some("plan_slots")));
    assert_eq!(summary("plans.WriterPro.batch-max=60", "WriterPro"), told(1, Some("plan_parallel_max")));
    assert_eq!(summary("plans.Enterprise.full-events=false", "Enterprise"), told(10, None));
    assert_eq!(summary("plans.Trial.batch-max=60", "Trial"), told(4, Some("calls_running_per_agent_max")));
    insta::assert_snapshot!(
        world.run(&["batch", "batch", "--plan", "Core", "--set", "plans.Core.resources.memory-mb=512"]),
        @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    error[E3006]: a batch of 10 calls is over the limit of 5 of the plan `Core`
    hint: split the batch into parts of at most 5 calls
    "
    );
}

#[test]
fn a_tool_outside_the_plan_is_refused() {
    let world = World::new().file("wieldy.toml", "[plans.Files]\ntools = [\"Read\", \"Li*\"]\n");
    assert_eq!(world.code(&["call", "List", "--plan", "Files"]), Some(0));
    insta::assert_snapshot!(world.run(&["call", "Bash", "command=true", "--plan", "Files"]), @"
    exit: 4
    ----- stdout -----

    ----- stderr -----
    error[E3006]: the plan `Files` does not include `Bash`; the plans `Core`, `Enterprise`, `Teams`, `WriterPro` do
    hint: use another tool, or ask the operator for one of the plans that include it
    ");
}

#[test]
fn a_plan_with_a_name_that_no_tool_has_is_refused() {
    let world = World::new().file("a.txt", "a");
    let call = |tools: &str| {
        let setting = format!("plans.Files.tools={tools}");
        world.run(&["call", "Read", "path=a.txt", "--plan", "Files", "--set", &setting])
    };
    insta::assert_snapshot!(call("[\"Read\", \"R*d\"]"), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: flag --set: `plans.Files.tools`: `R*d` is not the name of a tool
    hint: a name has letters, digits, `_` and `-`; `*` may stand at its end
    ");
    insta::assert_snapshot!(call("[\"ReadFile\"]"), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: flag --set: `plans.Files.tools`: `ReadFile` is another name for `Read`
    hint: write `Read`; plans include tools by their real names
    ");
    insta::assert_snapshot!(call("[\"read_file\", \"\"]"), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: flag --set: `plans.Files.tools`: `` is not the name of a tool
    hint: a name has letters, digits, `_` and `-`; `*` may stand at its end
    ");
    insta::assert_snapshot!(call("[\"read_file\"]"), @"
    exit: 2
    ----- stdout -----

    ----- stderr -----
    error: flag --set: `plans.Files.tools`: `read_file` is another name for `Read`
    hint: write `Read`; plans include tools by their real names
    ");
    insta::assert_snapshot!(call("[\"Re*\", \"tracker__*\", \"elsewhere\"]"), @"
    exit: 0
    ----- stdout -----
    a
    ----- stderr -----
    ");
    let manifest = "[[tool]]\nname = \"read_file\"\ndescription = \"d\"\ncommand = [\"true\"]\n";
    let world = World::new().file(".wieldy/tools/own.toml", manifest);
    let arguments = ["call", "read_file", "--isolation", "none", "--plan", "Files"];
    let own = [&arguments[..], &["--set", "plans.Files.tools=[\"read_file\"]"]].concat();
    assert_eq!(world.code(&own), Some(0), "a tool of one's own may have the name of a weak alias");
}

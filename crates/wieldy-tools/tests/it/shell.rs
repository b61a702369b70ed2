//! The shell tools with real processes, through an executor.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wieldy_core::{Call, Code, Executor, Level, Manifest, Options, Status, ToolResult};
use wieldy_sandbox::Unconfined;
use wieldy_tools::shell::{Bash, CommandTool};

struct World {
    workspace: tempfile::TempDir,
    executor: Executor,
}

fn environment() -> BTreeMap<String, String> {
    BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into()), ("GREETING".into(), "hello".into())])
}

impl World {
    /// Creates an executor with `Bash` and the tools of a manifest.
    fn new(manifest: &str) -> Self {
        let workspace = tempfile::tempdir().unwrap();
        let mut builder = Executor::builder();
        builder.workspace = workspace.path().to_owned();
        builder.isolation = Level::None;
        builder.grace = Duration::from_millis(200);
        let mut builder = builder.sandbox(Unconfined::default()).tool(Bash::new(environment()));
        for tool in Manifest::from_toml(manifest).unwrap().tools {
            builder = builder.tool(CommandTool::new(tool.spec, tool.command.unwrap(), environment()).unwrap());
        }
        Self { workspace, executor: builder.build().unwrap() }
    }

    async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments)).await
    }

    async fn bash(&self, command: &str) -> ToolResult {
        self.call("Bash", json!({ "command": command })).await
    }
}

fn code(result: &ToolResult) -> Option<Code> {
    result.error.as_ref().map(|error| error.code)
}

#[tokio::test]
async fn bash_answers_with_what_was_printed_and_how_it_ended() {
    let result = World::new("").bash("echo hi; echo there >&2").await;
    assert_eq!((result.status, result.text().as_str()), (Status::Success, "hi\nthere\n"));
    assert_eq!(result.structured, Some(json!({"exit_code": 0})));
    assert_eq!((&*result.provider, result.partial), ("builtin", false));
    assert_eq!(result.sandbox.unwrap().level, Level::None);
    assert!(result.usage.unwrap().memory_peak_bytes > 0);
}

#[tokio::test]
async fn stdout_and_stderr_come_in_the_order_of_writing() {
    let result = World::new("").bash("for i in {1..50}; do echo out $i; echo err $i >&2; done").await;
    let expected: String = (1..=50).map(|number| format!("out {number}\nerr {number}\n")).collect();
    assert_eq!(result.text(), expected);
}

#[tokio::test]
async fn an_exit_code_other_than_zero_is_a_failure_with_its_output() {
    let result = World::new("").bash("echo oops; exit 3").await;
    assert_eq!((result.status, result.text().as_str()), (Status::Failed, "oops\n"));
    assert_eq!(result.structured, Some(json!({"exit_code": 3})));
    let error = result.error.unwrap();
    assert_eq!((error.code, error.message.as_str()), (Code::NonzeroExit, "`bash` ended with exit code 3"));
    assert_eq!(Value::Object(*error.details), json!({"exit_code": 3}));
}

#[tokio::test]
async fn a_signal_is_distinguished_from_an_exit_code() {
    let result = World::new("").bash("kill -9 $$").await;
    assert_eq!(result.structured, Some(json!({"exit_code": null, "signal": 9})));
    assert_eq!(result.error.unwrap().message, "`bash` was ended by signal 9");
}

// Shows: B11.1
#[tokio::test]
async fn bash_starts_in_a_folder_of_the_workspace_and_nowhere_else() {
    let world = World::new("");
    std::fs::create_dir(world.workspace.path().join("inner")).unwrap();
    std::os::unix::fs::symlink("/", world.workspace.path().join("out")).unwrap();
    let inner = world.call("Bash", json!({"command": "pwd -P", "folder": "inner"})).await;
    assert!(inner.text().ends_with("/inner\n"), "{inner:?}");
    for folder in ["..", "/", "/etc", "out", "inner/../.."] {
        let result = world.call("Bash", json!({"command": "touch ran", "folder": folder})).await;
        assert_eq!((code(&result), result.attempts), (Some(Code::FilesystemPolicyViolation), 1), "{folder}");
    }
    let result = world.call("Bash", json!({"command": "true", "folder": "none"})).await;
    assert_eq!(code(&result), Some(Code::FileNotFound));
}

// Shows: B11.1
#[tokio::test]
async fn bash_gets_its_input_and_just_the_environment_it_was_made_with() {
    let world = World::new("");
    let result = world.call("Bash", json!({"command": "cat; echo $GREETING ${HOME-none}", "stdin": "in\n"})).await;
    assert_eq!(result.text(), "in\nhello none\n");
    assert_eq!(world.bash("cat; echo end").await.text(), "end\n");
}

#[tokio::test]
async fn a_command_line_that_begins_with_a_dash_is_no_option_of_the_shell() {
    let result = World::new("").bash("-x 2>/dev/null; echo ran").await;
    assert_eq!((result.status, result.text().as_str()), (Status::Success, "ran\n"));
}

#[tokio::test]
async fn impossible_arguments_are_refused_with_advice() {
    let world = World::new("");
    assert_eq!(code(&world.bash("echo a\0b").await), Some(Code::InvalidInput));
    let result = world.bash(&format!("echo {}", "x".repeat(200_000))).await;
    assert_eq!(code(&result), Some(Code::InvalidInput));
    assert_eq!(result.error.unwrap().suggestion.unwrap(), "write it to a file first, and name the file");
}

// Shows: A2.4, E4
#[tokio::test]
async fn a_timeout_keeps_the_output_so_far_and_leaves_no_process() {
    let world = World::new("");
    let marker = world.workspace.path().join("alive");
    let options = Options { timeout: Some(Duration::from_millis(400)), ..Options::default() };
    let script = "trap '' TERM; echo begun; while :; do touch alive; sleep 0.02; done";
    let begun = Instant::now();
    let result = world.executor.call(Call::new("Bash", json!({"command": script})).with(options)).await;
    assert_eq!((result.status, result.text().as_str(), result.partial), (Status::Timeout, "begun\n", true));
    assert!(result.usage.is_some() && result.sandbox.is_some(), "{result:?}");
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    // A process that still ran would make the file again.
    std::fs::remove_file(&marker).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!marker.exists());
}

#[tokio::test]
async fn large_output_is_cut_in_the_answer_and_kept_whole() {
    let world = World::new("");
    let result = world.bash("for i in {1..100000}; do echo line $i; done").await;
    assert!(result.partial && result.text().len() < 70_000, "{}", result.text().len());
    assert!(result.text().starts_with("line 1\n") && result.text().ends_with("line 100000\n"));
    let id = result.artifact.unwrap();
    let whole = world.executor.artifacts().read(id, &wieldy_core::Caller::local(), 0, u64::MAX).unwrap();
    assert_eq!(whole.iter().filter(|byte| **byte == b'\n').count(), 100_000);
}

#[test]
fn bash_is_declared_as_destructive_and_open() {
    let spec = wieldy_core::AnyTool::spec(&Bash::new(environment()));
    let annotations = spec.annotations;
    assert!(!annotations.read_only && annotations.destructive && annotations.open_world && !annotations.idempotent);
    assert_eq!(spec.constraints.timeout, Some(Duration::from_secs(120)));
    assert_eq!(spec.constraints.timeout_max, Some(Duration::from_secs(1800)));
    assert_eq!((spec.category.as_str(), &spec.input_schema["required"]), ("shell", &json!(["command"])));
}

const MANIFEST: &str = r#"
[[tool]]
name = "show"
description = "Prints its words"
command = ["printf", "<%s>", "{first}", "n={count?}", "{more?}"]
environment = { COLOUR = "red" }
[tool.arguments]
first = { type = "string", required = true }
count = { type = "integer" }
more = { type = "array", items = { type = "string" } }

[[tool]]
name = "echo_json"
description = "Answers with its arguments"
command = ["cat"]
stdin = "{args}"
output = "json"
[tool.arguments]
text = { type = "string" }

[[tool]]
name = "noisy_json"
description = "Answers with JSON and complains"
command = ["bash", "-c", "echo watch out >&2; echo '[1]'; echo really >&2"]
output = "json"

[[tool]]
name = "not_json"
description = "Breaks its word"
command = ["echo", "no json"]
output = "json"

[[tool]]
name = "colours"
description = "Prints its environment"
command = ["env"]
environment = { GREETING = "bye", COLOUR = "red" }

[[tool]]
name = "missing"
description = "Is not installed"
command = ["no-such-program"]
"#;

#[tokio::test]
async fn a_command_tool_passes_values_as_words_and_never_through_a_shell() {
    let world = World::new(MANIFEST);
    let arguments = json!({"first": "$(touch ran) `id` ; *", "count": 3, "more": ["a b", "c"]});
    let result = world.call("show", arguments).await;
    assert_eq!(result.text(), "<$(touch ran) `id` ; *><n=3><a b><c>");
    assert_eq!((&*result.provider, result.structured), ("command", Some(json!({"exit_code": 0}))));
    assert!(!world.workspace.path().join("ran").exists());
    assert_eq!(world.call("show", json!({"first": ""})).await.text(), "<>");
}

#[tokio::test]
async fn a_command_tool_refuses_values_that_would_be_options() {
    let result = World::new(MANIFEST).call("show", json!({"first": "--version"})).await;
    assert_eq!((code(&result), result.attempts), (Some(Code::InvalidInput), 1));
    assert!(result.error.unwrap().suggestion.is_some());
}

#[tokio::test]
async fn json_output_becomes_the_structured_answer() {
    let world = World::new(MANIFEST);
    let result = world.call("echo_json", json!({"text": "hi"})).await;
    assert_eq!(result.structured, Some(json!({"text": "hi"})));
    let large = "x".repeat(200_000);
    let result = world.call("echo_json", json!({"text": large})).await;
    assert_eq!(
        (&result.structured, result.partial),
        (&None, true),
        "an output that is too large is stored as an artifact"
    );
    assert!(result.artifact.is_some() && result.text().contains("bytes of structured content left out"));
    let result = world.call("noisy_json", json!({})).await;
    assert_eq!(result.structured, Some(json!([1])), "complaints are no part of it");
    assert!(result.text().contains("watch out"));
    let result = world.call("not_json", json!({})).await;
    assert_eq!((code(&result), result.text().as_str()), (Some(Code::ToolReportedError), "no json\n"));
}

#[tokio::test]
async fn a_manifest_adds_to_the_environment_and_wins() {
    let result = World::new(MANIFEST).call("colours", json!({})).await;
    assert_eq!(result.text(), "COLOUR=red\nGREETING=bye\nPATH=/usr/bin:/bin\n");
}

#[tokio::test]
async fn a_program_that_is_not_installed_is_said_to_be_missing() {
    let result = World::new(MANIFEST).call("missing", json!({})).await;
    let error = result.error.unwrap();
    assert_eq!(error.code, Code::FileNotFound);
    assert_eq!(
        error.message,
        "cannot start `no-such-program`: no program of that name exists on the `PATH` /usr/bin:/bin"
    );
}

// Shows: D11.1
#[tokio::test]
async fn a_command_tool_gets_the_context_where_it_asks_for_it() {
    let world = World::new(
        r#"
        [[tool]]
        name = "where"
        description = ""
        command = ["sh", "-c", "echo \"$CONTEXT $FIXED\"; cat"]
        stdin = "in {context}"
        environment = { CONTEXT = "{context}", FIXED = "{context} in a text" }

        [[tool]]
        name = "own"
        description = ""
        command = ["cat"]
        stdin = "{context}"
        [tool.arguments]
        context = { type = "string", required = true }
        "#,
    );
    let context = || json!({"room": "a b", "n": 1});
    let call = |tool: &str, arguments| world.executor.call(Call::new(tool, arguments).context(context()));
    let told = call("where", json!({})).await;
    let json = r#"{"room":"a b","n":1}"#;
    assert_eq!(told.text(), format!("{json} {{context}} in a text\nin {json}"));
    assert_eq!(world.call("where", json!({})).await.text(), "{} {context} in a text\nin {}");
    assert_eq!(call("own", json!({"context": "mine"})).await.text(), "mine", "an argument of that name comes first");
}

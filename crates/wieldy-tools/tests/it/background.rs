//! Background processes, terminals and builds, with real processes in native sandboxes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    BoxFuture, Call, Caller, Code, Command, Confinement, Ended, Executor, Exit, Level, OutputSink, Sandbox,
    SandboxError, SandboxId, SandboxRef, Status, Stream, ToolResult, Usage,
};
use wieldy_sandbox::{Native, NativeOptions};
use wieldy_tools::shell::{PROCESSES_MAX, UNREAD_BYTES_MAX, shell_tools};

/// The longest time that a step of these tests takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct World {
    workspace: tempfile::TempDir,
    executor: Executor,
    native: Native,
    mark: String,
}

impl World {
    fn new() -> Self {
        let workspace = tempfile::tempdir().unwrap();
        let mark = format!("wieldy-mark-{}-{}", std::process::id(), workspace.path().display());
        let environment = BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into()), ("MARK".into(), mark.clone())]);
        let native = Native::new(NativeOptions { warm_sandboxes: 0, ..NativeOptions::default() });
        let mut builder = Executor::builder().sandbox(native.clone()).tools(shell_tools(environment));
        builder.workspace = workspace.path().canonicalize().unwrap();
        builder.grace = Duration::from_millis(200);
        Self { workspace, executor: builder.build().unwrap(), native, mark }
    }

    async fn by(&self, caller: Caller, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments).by(Arc::new(caller))).await
    }

    async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.by(session("one"), tool, arguments).await
    }

    /// Starts a background command, waits until it runs, and returns its id.
    async fn start(&self, command: &str) -> String {
        let command = format!("echo begun; {command}");
        let result = self.call("Bash", json!({"command": command, "background": true})).await;
        assert!(result.is_success(), "{result:?}");
        let process = result.structured.as_ref().unwrap()["process"].as_str().unwrap().to_owned();
        if !result.text().starts_with("begun\n") {
            self.read_until(&process, "begun\n").await;
        }
        process
    }

    /// Reads until the text appears, and returns everything read, without the note that the process runs.
    async fn read_until(&self, process: &str, text: &str) -> String {
        let (begun, mut read) = (Instant::now(), String::new());
        while !read.contains(text) {
            assert!(begun.elapsed() < PATIENCE, "{read}");
            let result = self.call("ProcessRead", json!({"process": process, "wait": 10})).await;
            assert!(result.is_success(), "{result:?}");
            read.push_str(&result.text().replace(&format!("[{process} runs]\n"), ""));
        }
        read
    }

    /// Counts the processes of this world on the machine.
    fn alive(&self) -> usize {
        let mark = format!("MARK={}", self.mark);
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let environments = processes.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
        environments.filter(|bytes| bytes.split(|byte| *byte == 0).any(|word| word == mark.as_bytes())).count()
    }

    async fn wait_until_nothing_is_alive(&self) {
        let begun = Instant::now();
        while self.alive() > 0 {
            assert!(begun.elapsed() < PATIENCE, "{} processes are left", self.alive());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn session(name: &str) -> Caller {
    Caller { session: Some(name.into()), ..Caller::local() }
}

fn refusal(result: &ToolResult) -> (Code, String) {
    let error = result.error.clone().unwrap_or_else(|| panic!("it went well: {}", result.text()));
    (error.code, error.message)
}

const SERVER: &str = r#"perl -MIO::Socket::INET -e '
    $s = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => 8123, Listen => 5) or die $!;
    $| = 1; print "listening\n";
    while ($c = $s->accept) { print $c "hello\n"; close $c }'"#;
const CLIENT: &str = "exec 3<>/dev/tcp/127.0.0.1/8123 && cat <&3";

#[tokio::test(flavor = "multi_thread")]
async fn a_background_server_is_reachable_only_from_its_session() {
    let world = World::new();
    let begun = world.call("Bash", json!({"command": SERVER, "background": true})).await;
    let process = begun.structured.as_ref().unwrap()["process"].clone();
    if !begun.text().contains("listening") {
        world.read_until("p1", "listening").await;
    }
    let result = world.call("Bash", json!({"command": CLIENT})).await;
    assert_eq!((result.status, result.text().as_str()), (Status::Success, "hello\n"));
    let other = world.by(session("two"), "Bash", json!({"command": CLIENT})).await;
    assert_eq!(other.status, Status::Failed, "{}", other.text());

    let stopped = world.call("ProcessStop", json!({"process": process})).await;
    assert_eq!(
        stopped.structured,
        Some(json!({"process": "p1", "state": "ended", "exit_code": null, "signal": 15, "lost_bytes": 0}))
    );
    assert_eq!(world.call("Bash", json!({"command": CLIENT})).await.status, Status::Failed);
    assert_eq!(world.alive(), 0);
}

// Shows: B11.4
#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_written_to_and_read_in_turns() {
    let world = World::new();
    let process = world.start("while read -r line; do echo \"<$line>\"; done; echo bye; exit 3").await;
    let written = world.call("ProcessWrite", json!({"process": process, "text": "one\n"})).await;
    assert_eq!(written.structured, Some(json!({"process": "p1", "bytes": 4, "end": false})));
    assert_eq!(world.read_until(&process, "<one>\n").await, "<one>\n");
    let nothing = world.call("ProcessRead", json!({"process": process})).await;
    assert_eq!(nothing.text(), "[p1 runs]\n", "output is returned once");
    world.call("ProcessWrite", json!({"process": process, "text": "two\n", "end": true})).await;
    let rest = world.read_until(&process, "[p1 ended with exit code 3]").await;
    assert_eq!(rest, "<two>\nbye\n[p1 ended with exit code 3]\n");
    let late = world.call("ProcessWrite", json!({"process": process, "text": "x"})).await;
    assert_eq!(
        refusal(&late),
        (Code::InvalidInput, "`p1` does not read input any more: it has ended, or its input was closed".into())
    );
}

// Shows: B11.4
#[tokio::test(flavor = "multi_thread")]
async fn other_sessions_do_not_see_a_sessions_processes() {
    let world = World::new();
    let process = world.start("sleep 1000").await;
    let others = [
        session("two"),
        Caller { agent: "another".into(), ..session("one") },
        Caller { tenant: Some("another".into()), ..session("one") },
    ];
    for caller in others {
        let list = world.by(caller.clone(), "ProcessList", json!({})).await;
        assert_eq!(list.structured, Some(json!({"processes": []})));
        for tool in ["ProcessRead", "ProcessWrite", "ProcessStop"] {
            let result = world.by(caller.clone(), tool, json!({"process": process})).await;
            let message = "this session has no process `p1` in the background";
            assert_eq!(refusal(&result), (Code::InvalidInput, message.into()), "{tool}");
        }
    }
    let list = world.call("ProcessList", json!({})).await;
    assert_eq!(
        list.structured,
        Some(json!({"processes": [
            {"process": "p1", "state": "running", "command": "echo begun; sleep 1000", "unread_bytes": 0}
        ]}))
    );
    assert_eq!(list.text(), "p1 runs, 0 bytes to read: echo begun; sleep 1000\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_session_nothing_runs_in_the_background() {
    let world = World::new();
    let result = world.by(Caller::local(), "Bash", json!({"command": "touch ran", "background": true})).await;
    let message = "background processes belong to a session, and this call has no session";
    assert_eq!(refusal(&result), (Code::InvalidInput, message.into()));
    assert_eq!(result.attempts, 1);
    assert!(!world.workspace.path().join("ran").exists());
    let result = world.by(Caller::local(), "ProcessList", json!({})).await;
    assert_eq!(refusal(&result).0, Code::InvalidInput);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_fails_at_once_is_reported_by_the_starting_call() {
    let world = World::new();
    // The sandbox exists already. On a busy machine the process may still end after the call, so its output is then
    // read.
    world.call("Bash", json!({"command": "true"})).await;
    let result = world.call("Bash", json!({"command": "echo no; exit 7", "background": true})).await;
    let ended = "[p1 ended with exit code 7]\n";
    let mut output = result.text().replace("[p1 runs]\n", "");
    if !output.ends_with(ended) {
        output.push_str(&world.read_until("p1", ended).await);
    }
    assert_eq!(output, format!("no\n{ended}"));
    let result = world.call("Bash", json!({"command": "true", "background": true, "folder": "none"})).await;
    assert_eq!(refusal(&result).0, Code::FileNotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_has_only_so_many_processes_and_those_that_ended_make_room() {
    let world = World::new();
    for number in 1..=PROCESSES_MAX {
        assert_eq!(world.start("exec sleep 1000").await, format!("p{number}"));
    }
    let result = world.call("Bash", json!({"command": "sleep 1000", "background": true})).await;
    assert_eq!(refusal(&result).0, Code::ResourceLimitExceeded);
    world.call("ProcessStop", json!({"process": "p3"})).await;
    assert_eq!(world.start("exec sleep 1000").await, format!("p{}", PROCESSES_MAX + 1));
    assert_eq!(refusal(&world.call("ProcessRead", json!({"process": "p3"})).await).0, Code::InvalidInput);
}

// Shows: B11.4
#[tokio::test(flavor = "multi_thread")]
async fn everything_ends_with_the_executor() {
    let world = World::new();
    world.start("sleep 1000 & sleep 1000").await;
    assert!(world.alive() > 0);
    let World { workspace, executor, native, mark } = world;
    drop(executor);
    let world = World { workspace, executor: Executor::builder().build().unwrap(), native, mark };
    world.wait_until_nothing_is_alive().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_lost_with_the_sandbox_of_its_session() {
    let world = World::new();
    let process = world.start("sleep 1000").await;
    let id = world.native.list()[0].sandbox.id.clone();
    assert!(world.native.destroy(&id).await);
    let output = world.read_until(&process, "p1 was lost").await;
    assert!(output.contains("[p1 was lost: the sandbox ended unexpectedly"), "{output}");
    assert_eq!(world.alive(), 0);
    let again = world.call("Bash", json!({"command": "echo again"})).await;
    assert_eq!(again.text(), "again\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_output_is_kept_and_the_loss_is_reported() {
    let world = World::new();
    let process = world.start("read; head -c 3000000 /dev/zero | tr '\\0' x").await;
    world.call("ProcessWrite", json!({"process": process, "text": "go\n"})).await;
    let begun = Instant::now();
    while world.call("ProcessList", json!({})).await.structured.unwrap()["processes"][0]["state"] == "running" {
        assert!(begun.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let result = world.call("ProcessRead", json!({"process": process})).await;
    let lost = 3_000_000 - UNREAD_BYTES_MAX;
    assert_eq!(result.structured.as_ref().unwrap()["lost_bytes"], lost);
    assert!(
        result.text().starts_with(&format!("[{lost} bytes before this are lost: they were not read in time]\nxxx"))
    );
    assert!(result.artifact.is_some(), "what does not fit into a result is kept as an artifact");
}

// Shows: B11.3
#[tokio::test(flavor = "multi_thread")]
async fn a_command_gets_a_terminal_of_the_size_that_was_asked_for() {
    let world = World::new();
    let size = json!({"command": "test -t 0 && test -t 1 && stty size; echo $TERM", "terminal": true});
    assert_eq!(world.call("Bash", size).await.text().replace('\r', ""), "24 80\nxterm\n");
    let size = json!({"command": "stty size", "terminal": {"rows": 5, "columns": 300}});
    assert_eq!(world.call("Bash", size).await.text().replace('\r', ""), "5 300\n");
    let read = json!({"command": "stty -echo; cat; echo end", "terminal": true, "stdin": "typed"});
    let output = world.call("Bash", read).await.text();
    assert!(output.ends_with("end\r\n") && output.contains("typed"), "{output}");
    let none = json!({"command": "test -t 1 || echo none", "terminal": false});
    assert_eq!(world.call("Bash", none).await.text(), "none\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_in_the_background_is_typed_into() {
    let world = World::new();
    let command = "stty -echo; read -r line; echo \"<$line>\"; cat; echo end";
    let arguments = json!({"command": command, "background": true, "terminal": true});
    assert!(world.call("Bash", arguments).await.is_success());
    world.call("ProcessWrite", json!({"process": "p1", "text": "typed\n"})).await;
    world.read_until("p1", "<typed>\r\n").await;
    world.call("ProcessWrite", json!({"process": "p1", "text": "more\n", "end": true})).await;
    let output = world.read_until("p1", "ended with exit code 0").await;
    assert_eq!(output, "more\r\nend\r\n[p1 ended with exit code 0]\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn build_runs_what_the_project_calls_for() {
    let world = World::new();
    let refused = world.call("Build", json!({})).await;
    assert_eq!(refusal(&refused).0, Code::InvalidInput);
    let makefile = "all:\n\t@echo built > out; echo built\ntest:\n\t@echo tested; exit 1\n";
    std::fs::create_dir(world.workspace.path().join("inner")).unwrap();
    std::fs::write(world.workspace.path().join("inner/Makefile"), makefile).unwrap();
    if !std::path::Path::new("/usr/bin/make").exists() {
        let _ = writeln!(std::io::stderr(), "there is no make here: not tried");
        return;
    }
    let built = world.call("Build", json!({"folder": "inner"})).await;
    assert_eq!((built.status, built.text().as_str()), (Status::Success, "built\n"));
    assert_eq!(built.structured, Some(json!({"exit_code": 0, "command": "make"})));
    assert_eq!(std::fs::read_to_string(world.workspace.path().join("inner/out")).unwrap(), "built\n");
    let tested = world.call("Build", json!({"folder": "inner", "target": "test"})).await;
    assert_eq!((tested.status, refusal(&tested).0), (Status::Failed, Code::NonzeroExit));
    assert!(tested.text().starts_with("tested\n"), "{}", tested.text());
    let file = "production:\n\t@echo shipped\n$(shell touch ../hacked):\n";
    std::fs::write(world.workspace.path().join("inner/Makefile"), file).unwrap();
    let unknown = world.call("Build", json!({"folder": "inner", "target": "-n"})).await;
    let message = "there is no target `-n`; there are build, test, check, clean; the targets of Makefile: production";
    assert_eq!(refusal(&unknown), (Code::InvalidInput, message.to_owned()));
    assert!(!world.workspace.path().join("hacked").exists(), "nothing is run to find the names");
    let folder = world.workspace.path().join("inner");
    let named = world.call("Build", json!({"folder": folder, "target": "production"})).await;
    assert_eq!((named.text().as_str(), &named.arguments["folder"]), ("shipped\n", &json!("inner")));
    let own = world.call("Build", json!({"command": "echo my own"})).await;
    assert_eq!(own.text(), "my own\n");
    assert_eq!(refusal(&world.call("Build", json!({"target": "deploy"})).await).0, Code::InvalidInput);
}

/// A sandbox whose program prints half a character and then waits to be stopped.
struct Patient;

impl Sandbox for Patient {
    fn level(&self) -> Level {
        Level::None
    }

    fn execute<'a>(
        &'a self,
        _: &'a Command,
        _: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        Box::pin(async move {
            output.write(Stream::Stdout, b"h\xc3");
            stop.cancelled().await;
            output.write(Stream::Stdout, b"\xa9");
            let sandbox = SandboxRef { id: SandboxId("patient".into()), level: Level::None };
            let (ended, usage) = (Ended::Signal(15), Usage::default());
            Ok(Exit { ended, usage, sandbox, overrun: None, denials: Vec::new() })
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_unused_for_an_hour_is_ended() {
    let mut builder = Executor::builder().sandbox(Patient).tools(shell_tools(BTreeMap::new()));
    builder.isolation = Level::None;
    builder.workspace = std::env::temp_dir();
    let executor = builder.build().unwrap();
    let caller = Arc::new(session("one"));
    let call = |tool: &str, arguments| executor.call(Call::new(tool, arguments).by(Arc::clone(&caller)));
    let begun = call("Bash", json!({"command": "x", "background": true})).await;
    assert_eq!(begun.text(), "h[p1 runs]\n", "half a character waits for its other half");
    tokio::time::sleep(Duration::from_secs(50 * 60)).await;
    assert_eq!(call("ProcessRead", json!({"process": "p1"})).await.text(), "[p1 runs]\n");
    tokio::time::sleep(Duration::from_secs(50 * 60)).await;
    assert_eq!(call("ProcessList", json!({})).await.text(), "p1 runs, 1 bytes to read: x\n");
    tokio::time::sleep(Duration::from_secs(11 * 60)).await;
    assert_eq!(call("ProcessRead", json!({"process": "p1"})).await.text(), "é[p1 was ended by signal 15]\n");
}

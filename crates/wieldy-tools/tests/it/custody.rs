//! Limits, denials and sandboxes as callers see them: results, errors and events of calls with programs in native
//! sandboxes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{
    Body, Call, Caller, Code, Enforcer, Event, Executor, ExecutorBuilder, Held, Level, Limit, Manifest, MemoryJournal,
    Network, Options, ResourceLimits, SandboxId, Seen, Status, ToolResult,
};
use wieldy_sandbox::{Native, NativeOptions};
use wieldy_tools::shell::{CommandTool, shell_tools};

const MIB: u64 = 1 << 20;

struct World {
    workspace: tempfile::TempDir,
    executor: Executor,
    journal: Arc<MemoryJournal>,
}

impl World {
    /// Creates an executor with the shell tools and those of a manifest.
    fn new(manifest: &str, change: impl FnOnce(&mut ExecutorBuilder)) -> Self {
        let workspace = tempfile::tempdir().unwrap();
        let environment = || BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into())]);
        let native = Native::new(NativeOptions { warm_sandboxes: 0, warm_inits: 0, ..NativeOptions::default() });
        let mut builder = Executor::builder().sandbox(native).tools(shell_tools(environment()));
        for tool in Manifest::from_toml(manifest).unwrap().tools {
            builder = builder.tool(CommandTool::new(tool.spec, tool.command.unwrap(), environment()).unwrap());
        }
        let journal = Arc::new(MemoryJournal::default());
        builder.journal = journal.clone();
        builder.workspace = workspace.path().canonicalize().unwrap();
        builder.grace = Duration::from_millis(200);
        change(&mut builder);
        Self { workspace, executor: builder.build().unwrap(), journal }
    }

    async fn by(&self, caller: Caller, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments).by(Arc::new(caller))).await
    }

    async fn bash(&self, command: &str, options: Options) -> ToolResult {
        self.executor.call(Call::new("Bash", json!({"command": command})).with(options)).await
    }

    /// Returns the messages of all `sandbox.violation` events, each with the index of its call in the order of calls.
    fn violations(&self) -> Vec<(Option<usize>, String)> {
        let events = self.journal.events();
        let opened: Vec<_> = events.iter().filter(|event| matches!(event.body, Body::CallPending { .. })).collect();
        let number = |event: &Event| {
            event.subject.execution.and_then(|id| opened.iter().position(|opened| opened.subject.execution == Some(id)))
        };
        let violations = events.iter().filter_map(|event| match &event.body {
            Body::SandboxViolation { message, .. } => Some((number(event), message.clone())),
            _ => None,
        });
        violations.collect()
    }

    /// Returns the names of the events about a sandbox.
    fn life_of(&self, id: &SandboxId) -> Vec<&'static str> {
        let events = self.journal.events();
        let about = events.iter().filter(|event| match &event.body {
            Body::SandboxCreated { sandbox, .. } | Body::SandboxDestroyed { sandbox } => *sandbox == id.0,
            _ => false,
        });
        about.map(|event| event.body.name()).collect()
    }
}

fn session(name: &str) -> Caller {
    Caller { session: Some(name.into()), ..Caller::local() }
}

const MEMORY: &str = "x = bytearray(300 << 20)";
const PROCESSES: &str = "import os, time\ntry:\n  for _ in range(100):\n    if os.fork() == 0: time.sleep(20); os._exit(0)\nexcept OSError: os._exit(1)";
const DISK: &str = "import os\nfile = open('large', 'wb')\nwhile True: file.write(bytes(1 << 20))";

fn assert_passed(result: &ToolResult, limit: Limit, allowed: u64) {
    let error = result.error.as_ref().unwrap_or_else(|| panic!("{result:?}"));
    assert_eq!((result.status, error.code), (Status::Failed, Code::ResourceLimitExceeded), "{result:?}");
    assert_eq!((&error.details["limit"], &error.details["allowed"]), (&json!(limit), &json!(allowed)));
    let used = error.details["used"].as_u64().unwrap();
    assert!(used >= allowed / 2 && used < allowed * 4, "{result:?}");
    let amount = |amount: u64| match limit.is_in_bytes() {
        true => format!("{:.1} MiB ({amount} bytes)", amount as f64 / 1_048_576.0),
        false => amount.to_string(),
    };
    let (used, allowed) = (amount(used), amount(allowed));
    let message = match error.details.get("session_used").and_then(|all| all.as_u64()) {
        None => format!("the run passed its limit `{limit}`: it used {used}, allowed are {allowed}"),
        Some(all) => format!(
            "the session or sandbox passed its limit `{limit}`: its calls used {} together, this one {used}, allowed are {allowed}",
            amount(all)
        ),
    };
    assert_eq!(error.message, message);
    assert_eq!(result.sandbox.as_ref().unwrap().level, Level::Native);
    assert!(result.text().starts_with("begun\n"), "the earlier output is there: {result:?}");
}

/// P-SBX-14.
// Shows: B7.2
#[tokio::test]
async fn an_exceeded_limit_is_named_with_allowance_and_usage() {
    let tool = |name: &str, code: &str, limit: &str| {
        format!(
            "[[tool]]\nname = \"{name}\"\ndescription = \"\"\ncommand = [\"python3\", \"-uc\", {}]\n[tool.limits]\n{limit}\n",
            json!(format!("print('begun')\n{code}"))
        )
    };
    let manifest = [
        tool("memory", MEMORY, "memory-mb = 64"),
        tool("processes", PROCESSES, "processes = 16"),
        tool("disk", DISK, "disk-mb = 16"),
    ];
    let world = World::new(&manifest.concat(), |_| ());
    let none = ResourceLimits::default;
    for (name, code, limits, limit, allowed) in [
        ("memory", MEMORY, ResourceLimits { memory_bytes: Some(64 * MIB), ..none() }, Limit::MemoryBytes, 64 * MIB),
        ("processes", PROCESSES, ResourceLimits { processes: Some(16), ..none() }, Limit::Processes, 16),
        ("disk", DISK, ResourceLimits { disk_bytes: Some(16 * MIB), ..none() }, Limit::DiskBytes, 16 * MIB),
    ] {
        // Limits set by the call, without and with a session, and limits set by the tool's manifest.
        let command = format!("echo begun; python3 -c \"{code}\"");
        for caller in [Caller::local(), session("one")] {
            let call = Call::new("Bash", json!({"command": command})).by(Arc::new(caller));
            let result = world.executor.call(call.with(Options { limits, ..Options::default() })).await;
            assert_passed(&result, limit, allowed);
        }
        let result = world.by(Caller::local(), name, json!({})).await;
        assert_passed(&result, limit, allowed);
        let closed = world.journal.events();
        let closed = closed.iter().rev().find_map(|event| event.body.closing()).unwrap();
        assert_eq!(closed.error.as_ref().map(|error| &error.details), Some(&result.error.unwrap().details));
    }
    let fine = world.bash("python3 -c 'x = bytearray(100 << 20); print(len(x) >> 20)'", Options::default()).await;
    assert_eq!((fine.status, fine.text().as_str()), (Status::Success, "100\n"));
}

// Shows: B7.3
#[tokio::test]
async fn output_beyond_its_limit_is_counted_and_the_call_succeeds() {
    let world = World::new("", |_| ());
    let command = "head -c 300000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero | tr '\\0' y >&2";
    for (output_bytes, kept, phrase) in [
        (600_000, 600_000, "the whole is"),
        (599_999, 599_999, "the first 599999 of 600000 bytes are"),
        (100, 100, "the first 100 of 600000 bytes are"),
    ] {
        let limits = ResourceLimits { output_bytes: Some(output_bytes), ..ResourceLimits::default() };
        let result = world.bash(command, Options { limits, ..Options::default() }).await;
        assert_eq!((result.status, result.partial), (Status::Success, true));
        let id = result.artifact.unwrap();
        let left_out = 600_000 - output_bytes.min(64 * 1024);
        let phrase = format!("\n… {left_out} of 600000 bytes left out; {phrase} {id} …\n");
        assert!(result.text().contains(&phrase), "{phrase}");
        let info = world.executor.artifacts().describe(id, &Caller::local()).unwrap();
        assert_eq!((info.kept_bytes, info.total_bytes), (kept, 600_000));
    }
}

/// P-SBX-17.
#[tokio::test]
async fn floods_of_single_and_invalid_bytes_do_not_disturb_other_calls() {
    let world = World::new("", |_| ());
    let [single, invalid] = [
        (
            "dd if=/dev/zero bs=1 count=100000 status=none | tr '\\0' x & dd if=/dev/zero bs=1 count=100000 status=none >&2; wait",
            200_000,
        ),
        // No line ends and no valid characters; and an incomplete character at the end of the output.
        ("head -c 3000000 /dev/zero | tr '\\0' '\\377'; printf '\\303'", 3_000_001),
    ];
    for (command, bytes) in [single, invalid] {
        let flood = world.by(session("flood"), "Bash", json!({"command": command}));
        let neighbour = world.by(session("neighbour"), "Bash", json!({"command": "echo hi"}));
        let (flood, neighbour) = tokio::join!(flood, neighbour);
        assert_eq!((neighbour.status, neighbour.text().as_str()), (Status::Success, "hi\n"));
        assert_eq!((flood.status, flood.partial), (Status::Success, true), "{:?}", flood.error);
        let info = world.executor.artifacts().describe(flood.artifact.unwrap(), &Caller::local()).unwrap();
        assert_eq!((info.kept_bytes, info.total_bytes), (bytes, bytes));
        // Each invalid byte is shown as a character of three bytes.
        assert!(flood.text().len() < 3 * 64 * 1024 + 200, "{}", flood.text().len());
    }
}

/// Asks the proxy for a host that is not on the list, and prints the answer.
const ASK: &str = r#"proxy=${http_proxy#http://}; exec 7<>/dev/tcp/${proxy%:*}/${proxy#*:}; printf 'CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n' >&7; read -r _ status _ <&7; exec 7<&-; "#;
const REFUSED: &str = "network: example.com:443: not-listed";

fn listed(builder: &mut ExecutorBuilder) {
    builder.network = Network::Hosts(vec!["listed.example".into()]);
}

// Shows: B9.4
#[tokio::test]
async fn denials_are_in_the_result_and_in_the_events_of_the_call() {
    let manifest = format!(
        "[[tool]]\nname = \"json\"\ndescription = \"\"\noutput = \"json\"\ncommand = [\"bash\", \"-c\", {}]\n",
        json!(format!("{ASK} echo $status").replace('{', "{{").replace('}', "}}"))
    );
    let world = World::new(&manifest, listed);
    let fine = world.bash(&format!("{ASK} echo $status"), Options::default()).await;
    assert_eq!((fine.status, fine.text().as_str()), (Status::Success, "403\n"));
    assert_eq!(fine.structured, Some(json!({"exit_code": 0, "refused": [REFUSED]})));

    let failed = world.bash(&format!("{ASK} {ASK} exit 3"), Options::default()).await;
    let error = failed.error.as_ref().unwrap();
    assert_eq!((failed.status, error.code), (Status::PermissionDenied, Code::NetworkPolicyViolation));
    assert_eq!(error.message, "the command was refused `example.com:443`: not-listed");
    assert_eq!((&error.details["host"], &error.details["port"]), (&json!("example.com"), &json!(443)));
    assert_eq!(failed.structured, Some(json!({"exit_code": 3, "refused": [REFUSED, REFUSED]})));

    let parsed = world.by(Caller::local(), "json", json!({})).await;
    assert_eq!((parsed.structured.as_ref(), parsed.status), (Some(&json!(403)), Status::Success));
    assert_eq!(parsed.text(), format!("403\n[refused: [\"{REFUSED}\"]]\n"));

    let nothing = world.bash("exit 3", Options::default()).await;
    assert_eq!(nothing.structured, Some(json!({"exit_code": 3})));
    assert_eq!(nothing.error.unwrap().code, Code::NonzeroExit);
    let events: Vec<_> = [0, 1, 1, 2].map(|call| (Some(call), REFUSED.to_owned())).into();
    assert_eq!(world.violations(), events);
}

/// Returns the error message and the result's line for a denied file.
fn refused(path: &str, reason: &str) -> (String, String) {
    (format!("the command was refused `{path}`: {reason}"), format!("file system: {path}: {reason}"))
}

// Shows: B9.1, B9.4
#[tokio::test]
async fn a_command_that_failed_after_a_denial_ends_with_a_violation() {
    const READ_ONLY: &str =
        "it is read-only in a sandbox, as all of the system is; write to the workspace or to `/tmp`";
    const HIDDEN: &str = "it is hidden, as secrets and the executor's own files are; `sandbox.shown` is where an operator shows a secret";
    let world = World::new("", |_| ());
    std::fs::write(world.workspace.path().join(".env"), "SECRET=1").unwrap();
    let mut expected = Vec::new();
    for (number, (command, path, reason)) in
        [("touch /etc/new", "/etc/new", READ_ONLY), ("cat .env", ".env", HIDDEN)].into_iter().enumerate()
    {
        let result = world.bash(command, Options::default()).await;
        let (message, line) = refused(path, reason);
        let error = result.error.as_ref().unwrap();
        assert_eq!(
            (result.status, error.code),
            (Status::PermissionDenied, Code::FilesystemPolicyViolation),
            "{result:?}"
        );
        assert_eq!((&error.message, json!(error.details)), (&message, json!({"path": path})));
        let suggestion = "do without it, or work in the workspace and in `/tmp`; an operator can allow more";
        assert_eq!(error.suggestion.as_deref(), Some(suggestion));
        assert_eq!(result.structured, Some(json!({"exit_code": 1, "refused": [line]})));
        expected.push((Some(number), line));
    }
    // A program may print false denials: they are recorded for its own call, only a few times, and without known
    // secrets.
    let secret = format!("sk-{}", "a1B2".repeat(8));
    wieldy_core::redact::hide(&secret);
    let lie =
        format!("for n in 1 2 3 4 5 6 7 8; do echo \"cat: /srv/{secret}/$n: Permission denied\" >&2; done; exit 1");
    let liar = world.bash(&lie, Options::default()).await;
    assert_eq!(liar.error.as_ref().unwrap().code, Code::FilesystemPolicyViolation);
    assert_eq!(liar.structured.as_ref().unwrap()["refused"].as_array().unwrap().len(), 4);
    let mut violations = world.violations();
    let lies = violations.split_off(2);
    assert_eq!(violations, expected);
    assert_eq!(lies.iter().map(|(call, _)| *call).collect::<Vec<_>>(), [Some(2); 4]);
    let shown: Vec<_> = world.journal.events().iter().map(|event| event.data().to_string()).collect();
    assert!(shown.iter().any(|event| event.contains("file system: /srv/[")), "{shown:?}");
    assert!(!shown.iter().any(|event| event.contains(&secret)), "{shown:?}");

    // Failures for other reasons, and commands that succeed in the end, are not reported as denials.
    for (command, code) in [
        ("exit 3", Some(Code::NonzeroExit)),
        ("cat none", Some(Code::NonzeroExit)),
        ("echo x > own; chmod 0 own; cat own", Some(Code::NonzeroExit)),
        ("touch /etc/new || true", None),
    ] {
        let result = world.bash(command, Options::default()).await;
        assert_eq!(result.error.map(|error| error.code), code, "{command}");
        assert_eq!(result.structured.unwrap().get("refused"), None, "{command}");
    }
    assert_eq!(world.violations().len(), 6);
}

#[tokio::test]
async fn denials_of_a_background_process_are_events_and_fail_no_other_call() {
    let world = World::new("", listed);
    let mut seen = world.executor.subscribe(wieldy_core::Filter::default(), 1000);
    let mut next_violation = async || {
        let violation = async {
            loop {
                if let Some(Seen::Event(event)) = seen.next().await
                    && let Body::SandboxViolation { message, .. } = &event.body
                {
                    return (event.subject.execution, event.subject.caller.session.clone(), message.clone());
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(20), violation).await.expect("no violation was recorded")
    };
    let command = format!("echo begun; read -r _; {ASK} read -r _; {ASK} read -r _; {ASK} exit 0");
    let started = world.by(session("one"), "Bash", json!({"command": command, "background": true})).await;
    let process = started.structured.unwrap()["process"].clone();
    let go_on = async || {
        let written = world.by(session("one"), "ProcessWrite", json!({"process": process, "text": "\n"})).await;
        assert!(written.is_success(), "{written:?}");
    };

    // While the process runs alone, a denial is recorded at once, without any read.
    go_on().await;
    assert_eq!(next_violation().await, (None, Some("one".into()), REFUSED.into()));

    // A call in the same sandbox fails for its own reason: it lists the denial, and keeps its own error.
    let beside = "touch there; until [ -e asked ]; do sleep 0.02; done; rm asked; exit 3";
    let innocent = world.by(session("one"), "Bash", json!({"command": beside}));
    let asking = async {
        while !world.workspace.path().join("there").exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        go_on().await;
        let reported = [next_violation().await, next_violation().await];
        std::fs::write(world.workspace.path().join("asked"), "").unwrap();
        reported
    };
    let (innocent, reported) = tokio::join!(innocent, asking);
    let shared = format!("{REFUSED} (by this or another command in the same sandbox)");
    assert_eq!(innocent.error.as_ref().unwrap().code, Code::NonzeroExit, "{innocent:?}");
    assert_eq!(innocent.structured, Some(json!({"exit_code": 3, "refused": [shared]})));
    let mut executions = reported.map(|(execution, _, message)| {
        assert_eq!(message, shared);
        execution
    });
    executions.sort();
    assert_eq!(executions, [None, Some(innocent.execution_id)]);

    // A later call does not list the denial.
    let after = world.by(session("one"), "Bash", json!({"command": "exit 4"})).await;
    assert_eq!(after.structured, Some(json!({"exit_code": 4})));
    assert_eq!(after.error.unwrap().code, Code::NonzeroExit);
    go_on().await;
    next_violation().await;
    let ended = loop {
        let read = world.by(session("one"), "ProcessRead", json!({"process": process, "wait": 10})).await;
        let structured = read.structured.unwrap();
        if structured["state"] == "ended" {
            break structured;
        }
    };
    assert_eq!(ended["refused"], json!([REFUSED, shared, REFUSED]));
    assert_eq!(world.violations().len(), 4, "a denial is not reported again");
}

// Shows: B5.1
#[tokio::test]
async fn a_sandbox_made_by_name_is_shared_limited_listed_and_destroyed() {
    let world = World::new("", |builder| {
        builder.sandbox_limits = ResourceLimits { memory_bytes: Some(128 * MIB), ..ResourceLimits::default() };
    });
    let limits = |mib: u64| ResourceLimits { memory_bytes: Some(mib * MIB), ..ResourceLimits::default() };
    let made = world.executor.create_sandbox(&Caller::local(), None, limits(64)).await.unwrap();
    assert_eq!((made.sandbox.level, made.limits, made.running, made.executed), (Level::Native, limits(64), 0, 0));
    let id = made.sandbox.id.clone();
    assert_eq!(world.life_of(&id), ["sandbox.created"]);

    // Its creator runs calls in it by naming it as the parent sandbox, and finds its files. For other callers it does
    // not exist.
    let child = |caller: Caller| Caller { parent_sandbox: Some(id.clone()), ..caller };
    let left = world.by(child(Caller::local()), "Bash", json!({"command": "echo hi > /tmp/left"})).await;
    let found = world.by(child(Caller::local()), "Bash", json!({"command": "cat /tmp/left"})).await;
    assert_eq!((left.sandbox.unwrap().id, found.text().as_str()), (id.clone(), "hi\n"));
    let stranger = Caller { permissions: Held::All, ..Caller::agent("did:b") };
    let other = world.by(child(stranger), "Bash", json!({"command": "cat /tmp/left"})).await;
    assert_eq!((other.text().as_str(), other.error.unwrap().code), ("", Code::SandboxCreationFailed));
    let elsewhere = world.by(Caller::local(), "Bash", json!({"command": "ls /tmp"})).await;
    assert_eq!((elsewhere.text().as_str(), elsewhere.sandbox.unwrap().id == id), ("", false));
    let is_by_kernel = |limit| made.enforcement.iter().any(|one| one.limit == limit && one.by == Enforcer::Kernel);
    if is_by_kernel(Limit::MemoryBytes) {
        let bomb = json!({"command": format!("echo begun; python3 -c '{MEMORY}'")});
        assert_passed(&world.by(child(Caller::local()), "Bash", bomb).await, Limit::MemoryBytes, 64 * MIB);
    }

    // The limits are at most the executor's, and the level is at least the executor's.
    let second = world.executor.create_sandbox(&session("one"), None, limits(1024)).await.unwrap();
    assert_eq!(second.limits, limits(128));
    let weaker = world.executor.create_sandbox(&Caller::local(), Some(Level::None), limits(1)).await.unwrap_err();
    assert_eq!(weaker.code, Code::SandboxCreationFailed);
    let in_session = world.by(session("one"), "Bash", json!({"command": "true"})).await;
    assert_eq!(in_session.sandbox.unwrap().id, second.sandbox.id, "that of a session is the one its calls run in");
    let listed: Vec<_> =
        world.executor.sandboxes().into_iter().map(|one| (one.sandbox.id, one.session.is_some())).collect();
    assert_eq!(listed, [(id.clone(), false), (second.sandbox.id.clone(), true)]);

    assert!(world.executor.destroy_sandbox(&id).await);
    assert!(!world.executor.destroy_sandbox(&id).await);
    assert_eq!(world.life_of(&id), ["sandbox.created", "sandbox.destroyed"]);
    let gone = world.by(child(Caller::local()), "Bash", json!({"command": "true"})).await;
    assert_eq!((gone.status, gone.error.unwrap().code), (Status::Failed, Code::SandboxCreationFailed));
    let left: Vec<_> = world.executor.sandboxes().into_iter().map(|one| one.sandbox.id).collect();
    assert_eq!(left, [second.sandbox.id]);
}

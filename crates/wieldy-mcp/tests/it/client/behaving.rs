//! A correct server: called, followed, cancelled, closed.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{Annotations, Caller, Status};
use wieldy_mcp::client::{Reach, Start, ToolRule};

use super::{Stage, call, in_a_sandbox, processes, settings, until};

// Shows: C2.4
#[tokio::test]
async fn tools_are_named_after_their_server_and_called_by_either_name() {
    let stage = Stage::of("").await;
    assert_eq!(stage.tools(), ["test__act", "test__echo"]);
    for name in ["test__echo", "echo"] {
        let result = stage.call(name, "hello").await;
        assert_eq!((result.status, result.text().as_str(), &*result.provider), (Status::Success, "hello", "mcp:test"));
    }
    assert_eq!(stage.notes(), ["started", "called echo", "called echo"], "one server serves all calls");
    assert_eq!(stage.state(), json!({"is": "ready"}));
    let status = &stage.upstreams.status()[0];
    assert_eq!((status.revision.as_deref(), status.server.as_deref()), (Some("2025-11-25"), Some("test 1.2")));
    stage.upstreams.close().await;
    stage.world.check();
}

#[tokio::test]
async fn annotations_of_an_untrusted_server_change_nothing() {
    let annotations =
        |stage: &Stage| stage.world.executor.registry().find("echo", &Caller::local()).unwrap().spec().annotations;
    assert_eq!(annotations(&Stage::of("").await), Annotations::default());
    let trusted = Stage::with("", |settings| settings.trusted = true).await;
    assert!(annotations(&trusted).read_only);
    let ruled = Stage::with("", |settings| {
        settings.tools.rules.insert("echo".into(), ToolRule { idempotent: Some(true), ..ToolRule::default() });
        settings.tools.deny.push("act".into());
    })
    .await;
    assert_eq!(annotations(&ruled), Annotations { idempotent: true, ..Annotations::default() });
    assert_eq!(ruled.tools(), ["test__echo"]);
}

// Shows: E7.2
#[tokio::test]
async fn every_kind_of_content_and_the_structured_answer_come_through() {
    let stage = Stage::of("rich").await;
    let result = stage.call("echo", "").await;
    assert_eq!(
        json!(result.content),
        json!([
            {"type": "text", "text": "hi"},
            {"type": "image", "data": "aGk=", "mimeType": "image/png"},
            {"type": "resource_link", "uri": "file:///a", "name": "a", "mimeType": "text/plain"},
            {"type": "resource", "resource": {"uri": "test://b", "text": "there"}},
        ])
    );
    assert_eq!(result.structured, Some(json!({"number": 1})));
}

// Shows: E7.2
#[tokio::test]
async fn progress_is_passed_on_and_resets_the_silence_clock() {
    let stage = Stage::of("progress").await;
    let result = stage.call("echo", "done").await;
    assert_eq!(result.text(), "done");
    let events = stage.world.events();
    let progress = events.iter().filter(|event| event.body.name() == "tool.call.progress");
    let told = progress.map(|event| event.cloud_event()["data"].clone());
    let told: Vec<_> = told.map(|data| (data["percent"].clone(), data["message"].clone())).collect();
    let step = |number: u32| (json!(f64::from(number) * 25.0), json!(format!("step {number}")));
    assert_eq!(told, [step(1), step(2), step(3), step(4)]);
}

#[tokio::test]
async fn answers_find_their_calls_in_whatever_order_they_come() {
    let stage = Stage::of("swapped").await;
    let (one, other) = tokio::join!(stage.call("echo", "one"), stage.call("echo", "other"));
    assert_eq!((one.text().as_str(), other.text().as_str()), ("one", "other"));
}

// Shows: E7.2
#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_calls_go_over_one_connection() {
    let stage = Stage::of("").await;
    let answers = futures_util::future::join_all(
        (0..200).map(async |number: u32| stage.call("echo", &number.to_string()).await.text() == number.to_string()),
    );
    assert!(answers.await.into_iter().all(|is_right| is_right));
    assert_eq!(stage.notes().iter().filter(|note| *note == "started").count(), 1);
    stage.world.check();
}

// Shows: A6.3
#[tokio::test]
async fn a_call_that_is_cancelled_is_cancelled_at_the_server() {
    let stage = Stage::of("silent").await;
    let id = stage.world.executor.spawn(call("echo", "never"));
    stage.until_noted("called echo").await;
    assert_eq!(stage.world.executor.cancel(id, &Caller::local()), 1);
    let result = stage.world.executor.wait(id, &Caller::local()).await.unwrap();
    assert_eq!(result.status, Status::Cancelled);
    stage.until_noted("cancelled").await;
}

#[tokio::test]
async fn a_call_that_takes_too_long_is_cancelled_at_the_server() {
    let stage = Stage::with("silent", |settings| settings.timeout = Some(Duration::from_millis(200))).await;
    let error = stage.error("echo").await;
    assert_eq!((error.code.as_str(), error.details["clock"].as_str()), ("E3103", Some("attempt")));
    stage.until_noted("cancelled").await;
}

#[tokio::test]
async fn a_call_that_is_dropped_is_cancelled_at_the_server() {
    let stage = Stage::of("silent").await;
    let dropped = tokio::time::timeout(Duration::from_millis(300), stage.call("echo", "never"));
    assert!(dropped.await.is_err());
    stage.until_noted("cancelled").await;
}

#[tokio::test]
async fn a_known_server_is_started_by_the_first_call_and_one_that_should_always_run_at_once() {
    let folder = Stage::of("").await.folder();
    std::fs::remove_file(folder.path().join("notes")).unwrap();
    let lazy = Stage::in_folder(folder.clone(), "", |_| {});
    assert_eq!(
        (lazy.tools(), lazy.notes().len(), lazy.state()),
        (vec!["test__act".into(), "test__echo".into()], 0, json!({"is": "not_started"}))
    );
    assert_eq!(lazy.call("echo", "hi").await.text(), "hi");
    assert_eq!(lazy.notes(), ["started", "called echo"]);
    let eager = Stage::in_folder(folder, "", |settings| settings.start = Start::Eager);
    until(|| eager.state() == json!({"is": "ready"})).await;
    eager.upstreams.close().await;
    assert_eq!(eager.state(), json!({"is": "closed"}));
    assert_eq!(eager.error("echo").await.message, "the MCP server `test` cannot be reached: wieldy is stopping");
}

// Shows: B1.2
#[tokio::test]
async fn tools_that_come_and_go_are_registered_and_taken_away() {
    let stage = Stage::of("changes").await;
    stage.call("echo", "add late").await;
    until(|| stage.tools() == ["test__act", "test__echo", "test__late"]).await;
    stage.call("echo", "remove act").await;
    until(|| stage.tools() == ["test__echo", "test__late"]).await;
}

// Shows: E7.4
#[tokio::test]
async fn in_a_sandbox_a_server_has_only_what_it_was_given() {
    let stage = Stage::with("environment", in_a_sandbox).await;
    let text = stage.call("echo", "").await.text();
    let names: Vec<&str> = text.lines().filter_map(|line| line.split('=').next()).collect();
    assert!(names.contains(&"WIELDY_TEST_BEHAVIOUR") && !names.contains(&"CARGO_MANIFEST_DIR"), "{text}");
}

#[tokio::test]
async fn closing_ends_the_whole_process_tree_of_a_server() {
    for sandboxed in [false, true] {
        let stage = Stage::with("forks", |settings| {
            if sandboxed {
                in_a_sandbox(settings);
            }
        })
        .await;
        let result = stage.call("echo", "").await;
        assert_eq!(result.status, Status::Success, "{:?}", result.error);
        until(|| processes("7654") >= 2).await;
        stage.upstreams.close().await;
        assert_eq!(processes("7654"), 0, "nothing of the server is left");
    }
    let stage = Stage::of("lingers").await;
    stage.upstreams.close().await;
}

#[tokio::test]
async fn names_of_servers_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let world = wieldy_testkit::World::new([]);
    let refused = |names: &[&str]| {
        let servers = names.iter().map(|name| settings(name, "", folder.path())).collect();
        wieldy_mcp::client::Upstreams::new(&world.executor, servers, Default::default())
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(refused(&["a b"]), "`a b` cannot be the name of an MCP server");
    assert_eq!(
        refused(&["a__b"]),
        "`a__b` cannot be the name of an MCP server: `__` separates the names of a server and a tool"
    );
    assert_eq!(refused(&["a", "a"]), "two MCP servers have the name `a`");
}

#[tokio::test]
async fn a_server_is_not_started_without_a_sandbox_of_its_level() {
    let stage = Stage::with("", |settings| {
        let Reach::Stdio(program) = &mut settings.reach else { panic!("it is a program") };
        program.level = wieldy_core::Level::Gvisor;
    })
    .await;
    assert_eq!(stage.tools(), Vec::<String>::new());
    assert_eq!(
        stage.state()["error"]["message"],
        "the MCP server `test` cannot be reached: there is no sandbox of the level `gvisor` to run it in"
    );
    assert_eq!(stage.notes(), Vec::<String>::new());
}

/// Ten servers, half of them in sandboxes, and 180 agents that call all of them at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_and_eighty_agents_call_ten_servers_and_nothing_is_left() {
    const SERVERS: usize = 10;
    const AGENTS: usize = 180;
    let folders: Vec<tempfile::TempDir> = (0..SERVERS).map(|_| tempfile::tempdir().unwrap()).collect();
    let mark = format!("--skip=none{}", std::process::id());
    let servers = folders.iter().enumerate().map(|(number, folder)| {
        let mut settings = settings(&format!("s{number}"), "", folder.path());
        if number % 2 == 0 {
            in_a_sandbox(&mut settings);
        }
        let Reach::Stdio(program) = &mut settings.reach else { panic!("it is a program") };
        program.command.arguments.push(mark.clone());
        settings
    });
    let stage = Stage::of("").await;
    let executor = &stage.world.executor;
    let upstreams = wieldy_mcp::client::Upstreams::new(executor, servers.collect(), Default::default()).unwrap();
    upstreams.discover(|_| true).await;
    assert_eq!(processes(&mark), SERVERS);
    let calls = (0..AGENTS).flat_map(|agent| (0..SERVERS).map(move |server| (agent, server)));
    let answered = futures_util::future::join_all(calls.map(async |(agent, server)| {
        let text = format!("{agent} to {server}");
        let caller = std::sync::Arc::new(Caller {
            scopes: wieldy_core::Held::All,
            ..Caller::agent(format!("did:agent:{agent}"))
        });
        executor.call(call(&format!("s{server}__echo"), &text).by(caller)).await.text() == text
    }));
    let answered = answered.await;
    assert_eq!(answered.iter().filter(|is_right| **is_right).count(), AGENTS * SERVERS);
    for folder in &folders {
        let notes = std::fs::read_to_string(folder.path().join("notes")).unwrap();
        assert_eq!(notes.lines().filter(|note| *note == "started").count(), 1);
        assert_eq!(notes.lines().filter(|note| *note == "called echo").count(), AGENTS);
    }
    upstreams.close().await;
    assert_eq!(processes(&mark), 0, "no process is left");
    stage.world.check();
}

/// A journal whose records never become durable: waiting for them never ends.
struct NeverKept(wieldy_core::MemoryJournal);

impl wieldy_core::Journal for NeverKept {
    fn append(&self, event: &std::sync::Arc<wieldy_core::Event>) -> wieldy_core::Receipt {
        self.0.append(event);
        wieldy_core::Receipt::Pending(event.seq)
    }

    fn wait_until_stored(&self, _seq: u64) -> wieldy_core::BoxFuture<'_, Result<(), wieldy_core::JournalError>> {
        Box::pin(std::future::pending())
    }

    fn next_seq(&self) -> u64 {
        self.0.next_seq()
    }
}

/// P-MCP-06: a server that claims that its tools only read. Unless it is trusted, a smart batch runs them one after
/// another, and each only after its call is durable in the history.
#[tokio::test]
async fn claims_of_an_untrusted_server_change_neither_the_order_nor_the_durability() {
    for trusted in [false, true] {
        let stage = Stage::with("swapped", |settings| {
            settings.trusted = trusted;
            settings.timeout = Some(Duration::from_millis(500));
        })
        .await;
        let batch = wieldy_core::Batch::new([call("echo", "one"), call("echo", "two")]);
        let result = stage.world.executor.batch(batch).await.unwrap();
        // Each is answered only when the other has arrived, so they succeed only together.
        let succeeded = result.results.iter().filter(|result| result.status == Status::Success).count();
        assert_eq!((result.summary.read_only, succeeded == 2), (if trusted { 2 } else { 0 }, trusted), "{result:?}");
        stage.world.check();

        let folder = tempfile::tempdir().unwrap();
        let world = wieldy_testkit::World::with([], |builder| {
            builder.isolation = wieldy_core::Level::None;
            builder.journal = std::sync::Arc::new(NeverKept(wieldy_core::MemoryJournal::new(1_000)));
            *builder = std::mem::take(builder).sandbox(wieldy_sandbox::Unconfined::default());
        });
        let mut server = settings("test", "", folder.path());
        server.trusted = trusted;
        let upstreams = wieldy_mcp::client::Upstreams::new(&world.executor, vec![server], Default::default()).unwrap();
        upstreams.discover(|_| true).await;
        let called = tokio::time::timeout(Duration::from_secs(1), world.call("echo", json!({"text": "x"}))).await;
        assert_eq!(called.is_ok(), trusted);
        let notes = std::fs::read_to_string(folder.path().join("notes")).unwrap();
        assert_eq!(notes.contains("called echo"), trusted);
        upstreams.close().await;
    }
}

//! Observation, subscription, tasks, shutdown, artifacts.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use wieldy_core::artifact::Grep;
use wieldy_core::{
    Batch, Body, Call, CallError, Caller, Code, Content, Filter, JournalError, Level, MemoryArtifacts, NotFound,
    Options, Outcome, Run, Seen, Status, Stream, Target, ToolSpec, UsedSandbox, artifact,
};
use wieldy_testkit::{Act, FakeSandbox, Puppet, World, bounded};

const SECOND: Duration = Duration::from_secs(1);

async fn names(mut observer: wieldy_core::Observer) -> Vec<&'static str> {
    let mut names = Vec::new();
    while let Some(seen) = bounded(observer.next()).await {
        match seen {
            Seen::Event(event) => names.push(event.body.name()),
            Seen::Missed(_) => names.push("missed"),
        }
    }
    names
}

// Shows: D2.1
#[tokio::test(start_paused = true)]
async fn a_late_observer_sees_all_events() {
    let world = World::new([Puppet::reading("t", Act::Tick(2, SECOND))]);
    let id = world.executor.spawn(Call::new("t", json!({})));
    let early = tokio::spawn(names(world.executor.observe(id, &Caller::local())));
    tokio::time::sleep(SECOND * 3 / 2).await;
    let middle = tokio::spawn(names(world.executor.observe(id, &Caller::local())));
    world.executor.wait(id, &Caller::local()).await.unwrap();
    let all =
        ["tool.call.pending", "tool.call.started", "tool.call.progress", "tool.call.progress", "tool.call.success"];
    assert_eq!(early.await.unwrap(), all);
    assert_eq!(middle.await.unwrap(), all);
    assert_eq!(names(world.executor.observe(id, &Caller::local())).await, all, "even after the end");
}

#[tokio::test(start_paused = true)]
async fn a_call_is_recorded_under_its_tools_own_name() {
    let world = World::new([Puppet::new(ToolSpec::new("Write", "").alias("WriteFile"), [Act::Echo]).0]);
    let wanted = Filter { tool: Some("Write".into()), ..Filter::default() };
    let mut subscription = world.executor.subscribe(wanted, 100);
    for name in ["Write", "WriteFile", "Missing"] {
        world.executor.call(Call::new(name, json!({}))).await;
    }
    let names: Vec<_> = world
        .events()
        .iter()
        .filter_map(|event| match &event.body {
            Body::CallPending { called_as, .. } => Some((event.subject.tool.clone(), called_as.clone())),
            _ => None,
        })
        .collect();
    let pending = |tool: &str, called_as: Option<&str>| (Some(tool.into()), called_as.map(Into::into));
    assert_eq!(names, [pending("Write", None), pending("Write", Some("WriteFile")), pending("Missing", None)]);
    let mut seen = 0;
    while let Some(Some(_)) = subscription.next().now_or_never() {
        seen += 1;
    }
    assert_eq!(seen, 6, "three of each call to the tool");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn calls_of_another_tenant_cannot_be_observed() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let of = |tenant: &str| Caller { tenant: Some(tenant.into()), ..Caller::local() };
    let (me, other) = (of("acme"), of("other"));
    let result = world.executor.call(Call::new("t", json!({})).by(me.clone())).await;
    let mut members = Batch::new([Call::new("t", json!({}))]);
    members.caller = Arc::new(me.clone());
    let batch = world.executor.batch(members).await.unwrap().batch_id;
    let mut seen = Vec::new();
    for asker in [&me, &other, &Caller::local()] {
        let of_call = names(world.executor.observe(result.execution_id, asker)).await.len();
        seen.push((of_call, names(world.executor.observe_batch(batch, asker)).await.len()));
    }
    assert_eq!(seen, [(3, 5), (0, 0), (0, 0)]);
}

// Shows: D6.4
#[tokio::test(start_paused = true)]
async fn an_observer_on_a_basic_plan_sees_the_bare_life_of_a_call() {
    let world = World::new([Puppet::reading("t", Act::Tick(2, SECOND))]);
    let caller = Caller { plan: Some("Core".into()), ..Caller::local() };
    let result = world.executor.call(Call::new("t", json!({})).by(caller)).await;
    let seen = names(world.executor.observe(result.execution_id, &Caller::local())).await;
    assert_eq!(seen, ["tool.call.pending", "tool.call.started", "tool.call.success"]);
}

// Shows: D2.2
#[tokio::test(start_paused = true)]
async fn a_slow_observer_learns_how_many_events_it_missed() {
    let world = World::new([Puppet::reading("t", Act::Tick(5000, Duration::from_millis(1)))]);
    let result = world.call("t", json!({})).await;
    let mut observer = world.executor.observe(result.execution_id, &Caller::local());
    assert_eq!(observer.next().await, Some(Seen::Missed(5003 - 4096)));
    assert!(names(observer).await.ends_with(&["tool.call.success"]));
}

// Shows: D2.2
#[tokio::test(start_paused = true)]
async fn subscribers_get_matching_events_and_the_number_of_lost_ones() {
    let world = World::new([Puppet::reading("a", Act::Echo), Puppet::reading("b", Act::Echo)]);
    let filter = |prefix: &str| Filter { name_prefix: Some(prefix.into()), ..Filter::default() };
    let mut only_b = world.executor.subscribe(Filter { tool: Some("b".into()), ..Filter::default() }, 100);
    let mut ends = world.executor.subscribe(filter("tool.call.success"), 2);
    let session = Filter { session: Some("s".into()), ..Filter::default() };
    let mut none = world.executor.subscribe(session, 100);
    for _ in 0..5 {
        world.call("a", json!({})).await;
    }
    world.call("b", json!({})).await;
    let tools = |subscription: &mut wieldy_core::Subscription| {
        std::iter::from_fn(|| subscription.try_next())
            .map(|seen| match seen {
                Seen::Event(event) => event.subject.tool.as_deref().unwrap().to_owned(),
                Seen::Missed(count) => format!("missed {count}"),
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(tools(&mut only_b), ["b", "b", "b"]);
    assert_eq!(tools(&mut ends), ["a", "a", "missed 4"]);
    assert_eq!(tools(&mut none), Vec::<String>::new());
    world.call("a", json!({})).await;
    assert_eq!(tools(&mut ends), ["a"], "and goes on");
    drop((only_b, ends));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_before_the_next_event() {
    let world = World::new([Puppet::reading("a", Act::Echo)]);
    let filter = Filter { name_prefix: Some("tool.call.success".into()), ..Filter::default() };
    let mut slow = world.executor.subscribe(filter, 1);
    for _ in 0..3 {
        world.call("a", json!({})).await;
    }
    assert!(matches!(slow.next().await, Some(Seen::Event(_))));
    world.call("a", json!({})).await;
    assert_eq!(slow.next().await, Some(Seen::Missed(2)));
    assert!(matches!(slow.next().await, Some(Seen::Event(_))));
    assert_eq!(slow.try_next(), None);
}

// Shows: D3
#[tokio::test(start_paused = true)]
async fn a_call_that_was_begun_may_become_a_task() {
    let world = World::new([Puppet::reading("t", Act::Take(Duration::from_secs(9)))]);
    let mut begun = world.executor.begin(Call::new("t", json!({})));
    let id = begun.id();
    let waited = tokio::time::timeout(Duration::from_secs(1), &mut begun).await;
    assert!(waited.is_err() && world.executor.is_executing(id));
    assert_eq!(world.executor.task(id, &Caller::local()), None, "an awaited call is not a task");
    assert_eq!(begun.into_task().await, id);
    let result = world.executor.wait(id, &Caller::local()).await.unwrap();
    assert_eq!((result.execution_id, result.text()), (id, "{}".to_owned()));
    drop(world.executor.begin(Call::new("t", json!({}))));
    assert_eq!(world.executor.output_so_far(id, &Caller::local()), None);
    let names: Vec<&str> = world.events().iter().map(|event| event.body.name()).collect();
    let as_task = ["tool.call.pending", "tool.call.started", "tool.call.task", "tool.call.success"];
    assert_eq!(names, [&as_task[..], &["tool.call.pending", "tool.call.cancelled"]].concat());
    let answers: Vec<bool> =
        world.events().iter().filter_map(|event| Some(event.body.closing()?.answer.is_some())).collect();
    assert_eq!(answers, [true, false], "the result of a detached call is stored for later readers");
    world.check();
}

#[test]
fn waiting_clients_are_notified_of_tool_changes() {
    let world = World::new([Puppet::reading("one", Act::Echo)]);
    let registry = world.executor.registry();
    let (begin, changes) = (registry.generation(), registry.changes());
    world.executor.register(Puppet::reading("one", Act::Echo)).unwrap();
    assert_eq!((registry.generation(), changes.has_changed().unwrap()), (begin, false), "the same is no change");
    world.executor.register(Puppet::writing("one", Act::Echo)).unwrap();
    world.executor.register(Puppet::reading("two", Act::Echo)).unwrap();
    world.executor.unregister("one");
    world.executor.unregister("one");
    assert_eq!((registry.generation(), changes.has_changed().unwrap()), (begin + 3, true));
}

// Shows: B3.1, D3
#[tokio::test(start_paused = true)]
async fn a_task_can_be_polled_and_its_result_is_kept_for_a_while() {
    let world = World::with([Puppet::reading("t", Act::Take(SECOND))], |builder| builder.task_ttl = 10 * SECOND);
    let (me, stranger) = (Caller::local(), Caller { tenant: Some("other".into()), ..Caller::local() });
    let id = world.executor.spawn(Call::new("t", json!({})));
    let status = || world.executor.task(id, &me).map(|task| task.status);
    assert_eq!(status(), Some(Status::Pending));
    tokio::time::sleep(SECOND / 2).await;
    assert_eq!(status(), Some(Status::Running));
    assert!(world.executor.is_executing(id));
    assert_eq!(world.executor.task(id, &stranger), None, "as if absent");
    assert_eq!(world.executor.tasks(&me).len(), 1);
    assert!(world.executor.wait(id, &me).await.unwrap().is_success());
    assert_eq!(status(), Some(Status::Success));
    assert!(!world.executor.is_executing(id));
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!((status(), world.executor.wait(id, &me).await), (None, None));
}

// Shows: A6.1
#[tokio::test(start_paused = true)]
async fn cancelling_reaches_a_session_or_a_tenant_and_says_so() {
    let world = World::new([Puppet::reading("t", Act::Hang)]);
    let caller = |session: &str, tenant: &str| Caller {
        session: Some(session.into()),
        tenant: Some(tenant.into()),
        ..Caller::local()
    };
    let spawn = |caller: &Caller| world.executor.spawn(Call::new("t", json!({})).by(caller.clone()));
    let (one, two) = (caller("s1", "acme"), caller("s2", "acme"));
    let ids = [spawn(&one), spawn(&one), spawn(&two)];
    tokio::time::sleep(SECOND).await;
    let other = caller("s1", "other");
    for target in [Target::Execution(ids[0]), Target::Session("s1".into()), Target::Tenant("acme".into())] {
        for stranger in [&other, &Caller::local()] {
            assert_eq!(world.executor.cancel(target.clone(), stranger), 0, "another tenant's calls are not known");
        }
    }
    let cause = async |id, caller: &Caller| {
        let result = world.executor.wait(id, caller).await.unwrap();
        assert_eq!(result.status, Status::Cancelled);
        result.error.clone().unwrap().details["cause"].as_str().unwrap().to_owned()
    };
    assert_eq!(world.executor.cancel(Target::Session("s1".into()), &two), 2);
    assert_eq!(cause(ids[0], &one).await, "session");
    assert!(world.executor.is_executing(ids[2]));
    assert_eq!(world.executor.cancel(Target::Tenant("acme".into()), &one), 1);
    assert_eq!(cause(ids[2], &two).await, "tenant");
    assert_eq!(world.executor.cancel(ids[2], &two), 0, "it is over");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_ends_as_cancelled_however_fast_its_tool_stops() {
    let world = World::new([Puppet::reading("t", Act::PrintAndWait("half"))]);
    let id = world.executor.spawn(Call::new("t", json!({})));
    tokio::time::sleep(SECOND).await;
    world.executor.cancel(id, &Caller::local());
    let result = world.executor.wait(id, &Caller::local()).await.unwrap();
    assert_eq!((result.status, result.text().as_str(), result.partial), (Status::Cancelled, "half", true));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_lets_calls_end_and_cancels_the_rest() {
    let world = World::new([Puppet::reading("short", Act::Take(SECOND)), Puppet::reading("long", Act::Hang)]);
    let short = world.executor.spawn(Call::new("short", json!({})));
    let long = world.executor.spawn(Call::new("long", json!({})));
    tokio::task::yield_now().await;
    bounded(world.executor.shutdown(2 * SECOND)).await;
    let me = Caller::local();
    assert!(world.executor.wait(short, &me).await.unwrap().is_success());
    let stopped = world.executor.wait(long, &me).await.unwrap();
    assert_eq!(stopped.error.clone().unwrap().details["cause"], json!("shutdown"));
    let late = world.call("short", json!({})).await;
    let late = late.error.unwrap();
    assert_eq!(late.message, "the executor is stopping");
    assert_eq!(late.suggestion.as_deref(), Some("call again when it has restarted"));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_goes_away_leaves_a_closed_entry() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Hang]);
    let world = World::new([tool]);
    let gone = tokio::time::timeout(SECOND, world.call("t", json!({}))).await;
    assert!(gone.is_err());
    assert_eq!(strings.now(), 0, "the run ended with its caller");
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"t"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"t"}
    tool.call.cancelled {"status":"cancelled","attempts":1,"cached":false,"output_bytes":0,"error":{"code":"E3109","name":"CANCELLED","category":"cancelled","message":"no client waits for the call any more","retryable":false,"suggestion":"wait for it, or begin it as a task","details":{"cause":"caller_gone"}},"tool":"t"}
    "#);
}

// Shows: X5.1
#[tokio::test(start_paused = true)]
async fn large_answers_go_to_an_artifact_and_their_head_and_tail_come_back() {
    let text: String = (0..20_000).map(|number| format!("line {number}\n")).collect();
    let whole = text.clone();
    let tool = wieldy_core::tool(ToolSpec::new("t", "").read_only(), move |_: serde_json::Value, _| {
        let answer = Outcome::text(text.clone());
        async { Ok(answer) }
    });
    let world = World::with([std::sync::Arc::new(tool) as _], |builder| builder.output_bytes_max = 1000);
    let result = world.call("t", json!({})).await;
    let id = result.artifact.unwrap();
    assert!(result.partial && result.text().len() < 1200);
    assert!(result.text().starts_with("line 0\n") && result.text().ends_with("line 19999\n"));
    let (store, me) = (world.executor.artifacts(), Caller::local());
    assert_eq!(store.read(id, &me, 0, u64::MAX).unwrap(), whole.as_bytes());
    let pattern = regex::bytes::Regex::new("^line 1234$").unwrap();
    let stop = &CancellationToken::new();
    let search = Grep { pattern: &pattern, matches_max: 10, line_bytes_max: 1000, stop };
    let (found, more) = artifact::grep(&**store, id, &me, &search).unwrap();
    assert_eq!((found.len(), found[0].line, more), (1, 1235, false));
}

#[tokio::test(start_paused = true)]
async fn output_beyond_its_limit_is_reported_and_the_call_succeeds() {
    // One tool prints its output, the other returns it.
    let print =
        wieldy_core::tool(ToolSpec::new("print", "").read_only(), |_: serde_json::Value, run: Run| async move {
            for _ in 0..10 {
                run.output(Stream::Stdout, &[b'x'; 100]);
            }
            Ok(run.captured())
        });
    let say = wieldy_core::tool(ToolSpec::new("say", "").read_only(), |_: serde_json::Value, _| async {
        Ok(Outcome::text("x".repeat(1000)))
    });
    let world = World::with([Arc::new(print) as _, Arc::new(say) as _], |builder| builder.output_bytes_max = 10);
    let (head, store, me) = ("x".repeat(5), world.executor.artifacts(), Caller::local());
    for tool in ["print", "say"] {
        for (limit, kept, phrase) in [
            (None, 1000, "the whole is"),
            (Some(1000), 1000, "the whole is"),
            (Some(999), 999, "the first 999 of 1000 bytes are"),
            (Some(100), 100, "the first 100 of 1000 bytes are"),
        ] {
            let mut call = Call::new(tool, json!({}));
            call.options.limits.output_bytes = limit;
            let result = world.executor.call(call).await;
            let id = result.artifact.unwrap();
            assert_eq!(
                (result.status, result.partial, result.text()),
                (Status::Success, true, format!("{head}\n… 990 of 1000 bytes left out; {phrase} {id} …\n{head}"))
            );
            let info = store.describe(id, &me).unwrap();
            assert_eq!((info.kept_bytes, info.total_bytes), (kept, 1000));
        }
    }
    world.check();
}

#[tokio::test(start_paused = true)]
async fn structured_content_that_is_too_large_goes_to_an_artifact_as_a_whole() {
    let answer = |bytes: usize| json!({ "text": "a".repeat(bytes - r#"{"text":""}"#.len()) });
    let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
    let spec = ToolSpec { output_schema: Some(schema), ..ToolSpec::new("t", "").read_only() };
    let (tool, _) = Puppet::new(spec, [Act::Give(answer(100)), Act::Give(answer(101))]);
    let world = World::with([tool], |builder| builder.output_bytes_max = 100);
    let fits = world.call("t", json!({})).await;
    assert_eq!((&fits.structured, fits.text().as_str(), fits.partial), (&Some(answer(100)), "", false));

    let result = world.call("t", json!({})).await;
    let id = result.artifact.unwrap();
    assert_eq!(
        (&result.structured, result.text(), result.partial, result.status),
        (&None, format!("… 101 bytes of structured content left out; the whole is {id} …"), true, Status::Success)
    );
    let kept = world.executor.artifacts().read(id, &Caller::local(), 0, u64::MAX).unwrap();
    assert_eq!(kept, answer(101).to_string().as_bytes());
    world.check();
}

#[tokio::test(start_paused = true)]
async fn large_media_go_to_an_artifact_as_a_whole() {
    let picture = |bytes: usize| Content::Image { data: "a".repeat(bytes), mime_type: "image/png".into() };
    let resource = |bytes: usize| Content::Resource { resource: json!({"uri": "a:b", "text": "a".repeat(bytes)}) };
    let large = 4 * 1024 * 1024 + 1;
    let blocks = vec![picture(2000), resource(20), resource(2000), picture(large)];
    let given = blocks.clone();
    let tool = wieldy_core::tool(ToolSpec::new("t", "").read_only(), move |_: serde_json::Value, _| {
        let answer = Outcome { content: given.clone(), ..Outcome::default() };
        async { Ok(answer) }
    });
    let world = World::with([std::sync::Arc::new(tool) as _], |builder| builder.output_bytes_max = 1000);
    let result = world.call("t", json!({})).await;
    let id = result.artifact.unwrap();
    assert_eq!(result.content[..2], blocks[..2], "what fits stays");
    let kept = world.executor.artifacts().read(id, &Caller::local(), 0, u64::MAX).unwrap();
    assert_eq!(kept, serde_json::to_vec(&blocks[2]).unwrap());
    let note = Content::text(format!("… {} bytes of a resource left out; the whole is {id} …", kept.len()));
    assert_eq!((&result.content[2], result.partial), (&note, true));
    let Content::Text { text } = &result.content[3] else { panic!("{:?}", result.content[3]) };
    assert!(text.starts_with("… 4194354 bytes of a picture left out; the whole is artifact:"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn text_and_structured_content_that_are_too_large_get_an_artifact_each() {
    let tool = wieldy_core::tool(ToolSpec::new("t", "").read_only(), |_: serde_json::Value, _| async {
        Ok(Outcome::text("0123456789".repeat(3)).structured(json!("0123456789")))
    });
    let world = World::with([std::sync::Arc::new(tool) as _], |builder| builder.output_bytes_max = 10);
    let result = world.call("t", json!({})).await;
    let ids: Vec<wieldy_core::ArtifactId> = regex::Regex::new("artifact:[0-9a-f]{32}")
        .unwrap()
        .find_iter(&result.text())
        .map(|found| found.as_str().parse().unwrap())
        .collect();
    let read = |id| world.executor.artifacts().read(id, &Caller::local(), 0, u64::MAX).unwrap();
    let whole: Vec<String> = ids.iter().map(|id| String::from_utf8(read(*id)).unwrap()).collect();
    assert_eq!(whole, ["0123456789".repeat(3), r#""0123456789""#.to_owned()]);
    assert_eq!((result.artifact, result.structured), (Some(ids[0]), None), "the result names that of the text");
}

#[tokio::test(start_paused = true)]
async fn a_panicking_artifact_store_fails_only_its_call() {
    struct Panicking;
    impl wieldy_core::Artifacts for Panicking {
        fn create(
            &self,
            _: &Caller,
            _: Option<&str>,
            _: u64,
        ) -> Result<Box<dyn wieldy_core::ArtifactWriter>, artifact::ArtifactError> {
            panic!("told to panic")
        }
        fn describe(
            &self,
            id: wieldy_core::ArtifactId,
            _: &Caller,
        ) -> Result<wieldy_core::ArtifactInfo, artifact::ArtifactError> {
            Err(artifact::ArtifactError::NotFound(id))
        }
        fn read(
            &self,
            id: wieldy_core::ArtifactId,
            _: &Caller,
            _: u64,
            _: u64,
        ) -> Result<Vec<u8>, artifact::ArtifactError> {
            Err(artifact::ArtifactError::NotFound(id))
        }
    }
    let tools = [Puppet::reading("large", Act::Say("0123456789")), Puppet::reading("small", Act::Say("0"))];
    let world = World::with(tools, |builder| {
        builder.output_bytes_max = 5;
        builder.artifacts = std::sync::Arc::new(Panicking);
    });
    let error = world.call("large", json!({})).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::ExecutionError, "the answer is too large for a result, and the artifact store panicked")
    );
    assert!(error.suggestion.is_some_and(|advice| advice.starts_with("ask for less at once")));
    assert!(world.call("small", json!({})).await.is_success());
    world.check();
}

// Shows: B6.2
#[tokio::test(start_paused = true)]
async fn a_process_needs_a_sandbox_of_the_level_asked_for() {
    let tool = || {
        wieldy_core::tool(ToolSpec::new("sh", ""), |_: serde_json::Value, run: wieldy_core::Run| async move {
            let command = wieldy_core::Command {
                program: "echo".into(),
                arguments: vec!["hi".into()],
                environment: Default::default(),
                folder: ".".into(),
                stdin: wieldy_core::Stdin::Nothing,
                terminal: None,
            };
            let exit = run.execute(&command).await?;
            let sandbox = UsedSandbox::new(exit.sandbox, run.confinement().limits);
            Ok(Outcome { usage: Some(Box::new(exit.usage)), sandbox: Some(sandbox), ..run.captured() })
        })
    };
    let native = World::new([std::sync::Arc::new(tool()) as _]);
    let error = native.call("sh", json!({})).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::SandboxCreationFailed, "the isolation level `native` is not available here: this executor has none")
    );
    let suggestion = error.suggestion.unwrap();
    assert!(!suggestion.contains("none"), "a model is not told to do without: {suggestion}");
    let mut builder = wieldy_core::Executor::builder().tool(tool()).sandbox(FakeSandbox);
    builder.isolation = Level::None;
    let executor = builder.build().unwrap();
    let result = executor.call(Call::new("sh", json!({}))).await;
    assert_eq!((result.text().as_str(), result.sandbox.unwrap().level), ("hi", Level::None));
    let mut builder = wieldy_core::Executor::builder().tool(tool()).sandbox(FakeSandbox);
    builder.isolation = Level::Native;
    let weaker = Options { isolation: Some(Level::None), ..Options::default() };
    let error = builder.build().unwrap().call(Call::new("sh", json!({})).with(weaker)).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::PermissionDenied, "the isolation level `none` is weaker than this executor's `native`"),
        "a call cannot lower its own isolation"
    );
}

/// P-POL-04.
#[tokio::test]
async fn a_call_reaches_no_more_than_the_executor_grants() {
    let tool = wieldy_core::tool(
        ToolSpec::new("t", ""),
        |_: serde_json::Map<String, serde_json::Value>, run: Run| async move {
            Ok::<_, wieldy_core::RunError>(Outcome::text(run.confinement().network.to_string()))
        },
    );
    let mut builder = wieldy_core::Executor::builder().tool(tool);
    builder.network = wieldy_core::Network::Hosts(vec!["a.example".into(), "b.example".into()]);
    let executor = builder.build().unwrap();
    let asked = async |network: &str| {
        let options = Options { network: Some(network.parse().unwrap()), ..Options::default() };
        let result = executor.call(Call::new("t", json!({})).with(options)).await;
        result.error.clone().map_or_else(|| result.text(), |error| format!("{}: {}", error.code, error.message))
    };
    assert_eq!(asked("none").await, "none");
    assert_eq!(asked("b.example").await, "b.example");
    for wider in ["open", "c.example", "a.example,c.example"] {
        let message = format!("E3003: the network `{wider}` is wider than this executor's, `a.example,b.example`");
        assert_eq!(asked(wider).await, message);
    }
}

#[test]
fn every_event_name_is_listed_once() {
    let mut names = Body::NAMES.to_vec();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Body::NAMES.len());
}

#[tokio::test(start_paused = true)]
async fn an_event_on_the_wire_is_a_cloud_event() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let caller = Caller { session: Some("s".into()), user: Some("ada".into()), ..Caller::agent("did:a") };
    world.executor.call(Call::new("t", json!({"n": 1})).id("c1").by(caller)).await;
    let mut event = world.events()[0].cloud_event();
    assert!(event["time"].as_str().unwrap().ends_with('Z') && event["subject"].as_str().unwrap().len() == 36);
    (event["time"], event["subject"]) = (json!("…"), json!("…"));
    assert_eq!(
        event,
        json!({
            "specversion": "1.0", "id": "1", "source": "/wieldy", "type": "tool.call.pending", "time": "…",
            "datacontenttype": "application/json", "severity": "debug", "agent": "did:a",
            "data": {"arguments": {"n": 1}, "message": "call accepted", "elapsed_ms": 0.0, "tool": "t"},
            "subject": "…", "callid": "c1", "session": "s", "user": "ada", "provider": "local",
        })
    );
}

#[tokio::test(start_paused = true)]
async fn every_event_on_the_wire_says_how_bad_it_is_and_what_it_means() {
    let tools = [
        Puppet::reading("t", Act::Echo),
        Puppet::reading("late", Act::Hang),
        Puppet::reading("denied", Act::Fail(Code::FilesystemPolicyViolation, false)),
        Puppet::writing("lost", Act::Panic),
        Puppet::reading("ticks", Act::Tick(1, SECOND)),
    ];
    let world = World::new(tools);
    let options = Options { timeout: Some(SECOND), retries: Some(0), ..Options::default() };
    for tool in ["t", "late", "denied", "lost", "ticks"] {
        world.executor.call(Call::new(tool, json!({})).with(options.clone())).await;
    }
    let mut told: Vec<String> = Vec::new();
    for event in world.events() {
        let event = event.cloud_event();
        let data = &event["data"];
        assert!(data["elapsed_ms"].as_f64().is_some_and(|elapsed| elapsed >= 0.0), "{event}");
        let line = format!("{} {} {}", event["severity"], event["type"], data["message"]).replace('"', "");
        if event["type"] == "tool.call.timeout" {
            assert_eq!((&data["clock"], &data["timeout_ms"]), (&json!("attempt"), &json!(1000.0)));
        }
        if !told.contains(&line) {
            told.push(line);
        }
    }
    assert_eq!(
        told,
        [
            "debug tool.call.pending call accepted",
            "debug tool.call.started call started",
            "debug tool.call.success call ended",
            "warning tool.call.timeout call timed out",
            "warning tool.call.failure call failed",
            "error tool.call.failure call failed",
            "debug tool.call.progress tick 1",
        ]
    );
}

#[test]
fn a_message_of_an_events_own_is_kept_and_each_event_has_one() {
    for name in Body::NAMES {
        assert_ne!(wieldy_core::event_message(name, &json!({})), "another event", "{name}");
        let mut data = json!({"message": "its own"});
        wieldy_core::complete_event_data(name, &mut data, 1.5);
        assert_eq!(data, json!({"message": "its own", "elapsed_ms": 1.5}));
    }
    for name in ["source.stale", "sandbox.violation", "tool.call.timeout"] {
        assert_eq!(wieldy_core::Severity::of(name, &json!({})), wieldy_core::Severity::Warning, "{name}");
    }
}

#[test]
fn step_errors_become_call_errors_with_a_suggestion() {
    let unknown = NotFound::Unknown { name: "x".into(), near: vec![], because: None, advice: None };
    assert_eq!(CallError::from(unknown).suggestion.as_deref(), Some("list the tools to see their names"));
    let journal = CallError::from(JournalError("full".into()));
    assert_eq!((journal.code, journal.message.as_str()), (Code::JournalFailed, "cannot write the journal: full"));
    let _ = (MemoryArtifacts::default(), Batch::new([]));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_calls_that_their_callers_drive() {
    let world = World::new([Puppet::writing("t", Act::Hang)]);
    let executor = world.executor.clone();
    tokio::spawn(async move { executor.call(Call::new("t", json!({}))).await });
    tokio::time::sleep(SECOND).await;
    bounded(world.executor.shutdown(SECOND)).await;
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_ever_for_an_abandoned_call() {
    let world = World::new([Puppet::writing("t", Act::Hang)]);
    let mut left = Box::pin(world.call("t", json!({})));
    assert!(futures_util::poll!(&mut left).is_pending());
    bounded(world.executor.shutdown(SECOND)).await;
}

#[tokio::test(start_paused = true)]
async fn endless_output_is_bounded_for_observers() {
    let chatty = wieldy_core::tool(
        ToolSpec::new("t", "").read_only(),
        |_: serde_json::Value, run: wieldy_core::Run| async move {
            for _ in 0..100 {
                run.progress(None, "x".repeat(100_000));
            }
            Ok(Outcome::text("done"))
        },
    );
    let world = World::new([std::sync::Arc::new(chatty) as _]);
    let id = world.executor.spawn(Call::new("t", json!({})));
    world.executor.wait(id, &Caller::local()).await.unwrap();
    let names = names(world.executor.observe(id, &Caller::local())).await;
    assert_eq!((names.len(), names.first(), names.last()), (12, Some(&"missed"), Some(&"tool.call.success")));
}

#[tokio::test(start_paused = true)]
async fn each_denial_is_one_event_whether_reported_at_once_or_at_the_end() {
    struct Refusing;
    impl wieldy_core::Sandbox for Refusing {
        fn level(&self) -> Level {
            Level::None
        }
        fn execute<'a>(
            &'a self,
            _: &'a wieldy_core::Command,
            _: &'a wieldy_core::Confinement,
            output: Arc<dyn wieldy_core::OutputSink>,
            _: tokio_util::sync::CancellationToken,
        ) -> wieldy_core::BoxFuture<'a, Result<wieldy_core::Exit, wieldy_core::SandboxError>> {
            let denial = |path: &str| wieldy_core::Denial::Filesystem { path: path.into(), reason: "hidden".into() };
            let sandbox = wieldy_core::SandboxRef { id: wieldy_core::SandboxId("s".into()), level: Level::None };
            Box::pin(async move {
                output.refused(&sandbox, &denial("at-once"));
                output.write(Stream::Stdout, b"between");
                let (ended, usage) = (wieldy_core::Ended::Code(0), wieldy_core::Usage::default());
                let denials = vec![denial("at-once"), denial("at-the-end")];
                Ok(wieldy_core::Exit { ended, usage, sandbox, overrun: None, denials })
            })
        }
    }
    let tool = wieldy_core::tool(ToolSpec::new("sh", ""), |_: serde_json::Value, run: Run| async move {
        let command = wieldy_core::Command {
            program: "true".into(),
            arguments: Vec::new(),
            environment: Default::default(),
            folder: ".".into(),
            stdin: wieldy_core::Stdin::Nothing,
            terminal: None,
        };
        run.execute(&command).await?;
        Ok(run.captured())
    });
    let world = World::with([Arc::new(tool) as _], |builder| {
        builder.isolation = Level::None;
        *builder = std::mem::take(builder).sandbox(Refusing);
    });
    let result = world.call("sh", json!({})).await;
    assert_eq!((result.status, result.text().as_str()), (Status::Success, "between"));
    let events = world.events();
    let denials = events.iter().filter_map(|event| match &event.body {
        Body::SandboxViolation { sandbox, message } => Some((sandbox.as_str(), message.as_str())),
        Body::CallProgress { message: Some(message), .. } => Some(("", message.as_str())),
        _ => None,
    });
    let denials: Vec<_> = denials.collect();
    let wanted = [("s", "file system: at-once: hidden"), ("s", "file system: at-the-end: hidden"), ("", "between")];
    assert_eq!(denials, wanted);
    world.check();
}

// Shows: C5.2
#[tokio::test]
async fn a_stale_source_names_the_project_of_its_call() {
    let stale = wieldy_core::tool(ToolSpec::new("t", ""), async |_: serde_json::Value, run: Run| {
        run.source_stale("a.md", "1", Some("2"));
        Ok(Outcome::text("read"))
    });
    let world = World::new([Arc::new(stale) as _]);
    world.call("t", json!({"project_id": "default"})).await;
    world.call("t", json!({})).await;
    let events = world.events();
    let stale = events.iter().filter(|event| matches!(event.body, Body::SourceStale { .. }));
    let projects: Vec<_> = stale.map(|event| event.data()["project_id"].clone()).collect();
    assert_eq!(projects, [json!("default"), json!(null)]);
}

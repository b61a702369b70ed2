//! Known mistakes of other executors, each with a test that names it.
//!
//! Two more are tested beside their code: the "exponential" backoff that is linear (`attempt.rs`), and staleness by a
//! weak hash (`wieldy-tools`).

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use wieldy_core::{Batch, BatchCall, BatchMode, Call, Caller, Code, Limits, Options, Status, ToolResult, ToolSpec};
use wieldy_testkit::{Act, Puppet, World, bounded};

const SECOND: Duration = Duration::from_secs(1);

fn one_second() -> Options {
    Options { timeout: Some(SECOND), ..Options::default() }
}

fn cause(result: &ToolResult) -> String {
    result.error.as_ref().unwrap().details["cause"].as_str().unwrap_or_default().to_owned()
}

// Shows: A2.4
#[tokio::test(start_paused = true)]
async fn trap_a_timeout_that_leaves_the_tool_running() {
    for act in [Act::Hang, Act::Take(60 * SECOND), Act::PrintAndWait("x")] {
        let (tool, strings) = Puppet::new(ToolSpec::new("t", ""), [act]);
        let world = World::new([tool]);
        let result = world.executor.call(Call::new("t", json!({})).with(one_second())).await;
        assert_eq!((result.status, strings.now()), (Status::Timeout, 0), "it is gone before the answer is given");
        world.check();
    }
}

// Shows: A4.1
#[tokio::test(start_paused = true)]
async fn trap_parallel_results_out_of_order() {
    let tools = [Puppet::reading("slow", Act::Take(3 * SECOND)), Puppet::reading("fast", Act::Take(SECOND))];
    let world = World::new(tools);
    let calls = ["slow", "fast", "slow", "fast"].iter().enumerate();
    let calls = calls.map(|(number, tool)| Call::new(*tool, json!({})).id(number.to_string()));
    let result = world.executor.batch(Batch { mode: Some(BatchMode::Parallel), ..Batch::new(calls) }).await.unwrap();
    let order: Vec<_> =
        result.results.iter().map(|result| (result.call_id.as_deref().unwrap(), &*result.tool)).collect();
    assert_eq!(order, [("0", "slow"), ("1", "fast"), ("2", "slow"), ("3", "fast")]);
}

#[tokio::test(start_paused = true)]
async fn trap_a_read_that_overtakes_an_earlier_write() {
    let state = Arc::new(std::sync::Mutex::new("old"));
    let (writing, reading) = (Arc::clone(&state), Arc::clone(&state));
    let write = wieldy_core::tool(ToolSpec::new("write", ""), move |_: serde_json::Value, _| {
        let state = Arc::clone(&writing);
        async move {
            tokio::time::sleep(SECOND).await;
            *state.lock().unwrap() = "new";
            Ok(wieldy_core::Outcome::default())
        }
    });
    let read = wieldy_core::tool(ToolSpec::new("read", "").read_only(), move |_: serde_json::Value, _| {
        let text = *reading.lock().unwrap();
        async move { Ok(wieldy_core::Outcome::text(text)) }
    });
    let world = World::new([Arc::new(write) as _, Arc::new(read) as _]);
    let calls = ["write", "read"].map(|tool| Call::new(tool, json!({})));
    let result = world.executor.batch(Batch::new(calls)).await.unwrap();
    assert_eq!(result.results[1].text(), "new");
}

// Shows: A5
#[tokio::test(start_paused = true)]
async fn trap_read_only_by_a_list_of_names() {
    // Every such list contains `ReadFile`, but only the tool's declaration counts.
    let (tool, strings) = Puppet::new(ToolSpec::new("ReadFile", "writes, whatever its name"), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let result = world.executor.batch(Batch::new((0..3).map(|_| Call::new("ReadFile", json!({}))))).await.unwrap();
    assert_eq!((result.summary.read_only, result.summary.mutating, strings.most_at_once()), (0, 3, 1));
}

// Shows: A6.1
#[tokio::test(start_paused = true)]
async fn trap_a_users_cancel_reported_as_a_timeout() {
    let world = World::new([Puppet::reading("t", Act::Hang)]);
    let id = world
        .executor
        .spawn(Call::new("t", json!({})).with(Options { timeout: Some(3 * SECOND), ..Options::default() }));
    tokio::time::sleep(SECOND).await;
    assert_eq!(world.executor.cancel(id, &Caller::local()), 1);
    let result = world.executor.wait(id, &Caller::local()).await.unwrap();
    assert_eq!((result.status, result.error.as_ref().unwrap().code), (Status::Cancelled, Code::Cancelled));
    assert_eq!(cause(&result), "caller");
    let timed_out =
        world.executor.call(Call::new("t", json!({})).with(Options { retries: Some(0), ..one_second() })).await;
    assert_eq!(timed_out.status, Status::Timeout, "and the other way round");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn trap_an_audit_that_the_timeout_cancels_too() {
    let world = World::new([Puppet::writing("t", Act::Hang)]);
    world.executor.call(Call::new("t", json!({})).with(one_second())).await;
    let names: Vec<_> = world.events().iter().map(|event| event.body.name()).collect();
    assert_eq!(names, ["tool.call.pending", "tool.call.started", "tool.call.timeout"]);
}

// Shows: D8.1
#[tokio::test(start_paused = true)]
async fn trap_refusals_that_return_before_the_audit() {
    let (hidden, _) = Puppet::new(ToolSpec::new("denied", "").permission("x"), [Act::Echo]);
    let (asking, _) = Puppet::new(ToolSpec::new("asking", "").confirm(), [Act::Echo]);
    let mut strict = ToolSpec::new("strict", "");
    strict.input_schema = json!({"type": "object", "required": ["n"]});
    let world = World::new([hidden, asking, Puppet::new(strict, [Act::Echo]).0]);
    for tool in ["unknown", "denied", "asking", "strict"] {
        world.executor.call(Call::new(tool, json!({})).by(Caller::agent("a"))).await;
    }
    let names: Vec<_> = world.events().iter().map(|event| event.body.name()).collect();
    assert_eq!(names, ["tool.call.pending", "tool.call.failure"].repeat(4));
    world.check();
}

// Shows: D2.1
#[tokio::test(start_paused = true)]
async fn trap_observers_that_never_end() {
    let world = World::new([Puppet::writing("t", Act::Panic), Puppet::writing("hang", Act::Hang)]);
    let result = world.call("t", json!({})).await;
    let mut after_the_end = world.executor.observe(result.execution_id, &Caller::local());
    while bounded(after_the_end.next()).await.is_some() {}
    let elsewhere = World::new([Puppet::reading("t", Act::Echo)]).call("t", json!({})).await.execution_id;
    assert_eq!(
        bounded(world.executor.observe(elsewhere, &Caller::local()).next()).await,
        None,
        "an unknown id ends at once"
    );
    // When a caller goes away, its observers end too.
    let (found, observed) = tokio::sync::oneshot::channel();
    let executor = world.executor.clone();
    let mut started =
        world.executor.subscribe(wieldy_core::Filter { tool: Some("hang".into()), ..Default::default() }, 9);
    tokio::spawn(async move {
        let Some(wieldy_core::Seen::Event(event)) = started.next().await else { panic!("an event") };
        let mut observer = executor.observe(event.subject.execution.unwrap(), &Caller::local());
        let mut count = 0;
        while observer.next().await.is_some() {
            count += 1;
        }
        let _ = found.send(count);
    });
    assert!(tokio::time::timeout(SECOND, world.call("hang", json!({}))).await.is_err());
    assert_eq!(bounded(observed).await, Ok(3));
}

#[tokio::test(start_paused = true)]
async fn trap_batch_children_that_cannot_be_cancelled() {
    let world = World::new([Puppet::reading("t", Act::Take(10 * SECOND))]);
    let calls = (0..3).map(|number| Call::new("t", json!({})).id(number.to_string()));
    let (batch, result) = world.executor.spawn_batch(Batch::new(calls));
    tokio::time::sleep(SECOND).await;
    let child =
        world.events().iter().find(|event| event.subject.call_id.as_deref() == Some("1")).unwrap().subject.execution;
    assert_eq!(world.executor.cancel(child.unwrap(), &Caller::local()), 1);
    let result = bounded(result).await.unwrap();
    let statuses: Vec<_> = result.results.iter().map(|result| result.status).collect();
    assert_eq!(statuses, [Status::Success, Status::Cancelled, Status::Success]);
    assert_eq!((cause(&result.results[1]).as_str(), result.batch_id), ("caller", batch));
    world.check();
}

// Shows: A4.4
#[tokio::test(start_paused = true)]
async fn trap_stop_on_error_ignored_in_parallel() {
    for mode in [BatchMode::Parallel, BatchMode::Smart, BatchMode::Sequential] {
        let (good, strings) = Puppet::new(ToolSpec::new("good", "").read_only(), [Act::Take(2 * SECOND)]);
        let world = World::new([Puppet::reading("bad", Act::Fail(Code::ToolReportedError, true)), good]);
        let calls = ["good", "bad", "good", "good", "good"].map(|tool| Call::new(tool, json!({})));
        let batch = Batch { mode: Some(mode), max_concurrency: Some(2), stop_on_error: true, ..Batch::new(calls) };
        let result = world.executor.batch(batch).await.unwrap();
        assert_eq!((result.summary.skipped, strings.runs()), (3, 1), "{mode:?}");
        assert_eq!(cause(&result.results[4]), "skipped");
        assert!(result.results[0].is_success(), "running calls may end");
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn trap_a_validator_that_always_says_yes() {
    let mut spec = ToolSpec::new("t", "");
    spec.input_schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let (tool, strings) = Puppet::new(spec, [Act::Echo]);
    let world = World::new([tool]);
    for arguments in [json!({}), json!({"n": "x"}), json!({"n": []}), json!([]), json!("n"), json!(null)] {
        let result = world.call("t", arguments).await;
        assert_eq!((result.status, result.error.unwrap().code), (Status::ValidationError, Code::ValidationFailed));
    }
    assert_eq!(strings.runs(), 0);
    assert!(world.call("t", json!({"n": 1})).await.is_success());
}

// Shows: A3.3
#[tokio::test(start_paused = true)]
async fn trap_a_timeout_called_retryable_though_it_may_have_had_an_effect() {
    for (spec, runs, retryable) in [
        (ToolSpec::new("t", ""), 1, false),
        (ToolSpec::new("t", "").idempotent(), 3, true),
        (ToolSpec::new("t", "").read_only(), 3, true),
    ] {
        let (tool, strings) = Puppet::new(spec, [Act::Hang]);
        let world = World::new([tool]);
        let result = world.executor.call(Call::new("t", json!({})).with(one_second())).await;
        assert_eq!((strings.runs(), result.error.unwrap().retryable), (runs, retryable));
        world.check();
    }
}

// Shows: A2.2
#[tokio::test(start_paused = true)]
async fn trap_a_confirmation_that_waits_for_ever_and_holds_a_slot() {
    struct Nobody;
    impl wieldy_core::Confirmer for Nobody {
        fn confirm<'a>(
            &'a self,
            _: &'a wieldy_core::Confirmation,
        ) -> futures_util::future::BoxFuture<'a, Result<wieldy_core::Answer, String>> {
            Box::pin(std::future::pending())
        }
    }
    let (asking, _) = Puppet::new(ToolSpec::new("asking", "").confirm(), [Act::Echo]);
    let world = World::with([asking, Puppet::reading("t", Act::Echo)], |builder| {
        builder.confirmer = Some(Arc::new(Nobody));
        builder.confirmation_timeout = 60 * SECOND;
        builder.limits = Limits { calls_running_max: 1, calls_running_per_agent_max: 1, ..Limits::default() };
    });
    let waiting = world.executor.spawn(Call::new("asking", json!({})));
    tokio::time::sleep(SECOND).await;
    assert_eq!(world.executor.load().running, 0);
    assert!(world.call("t", json!({})).await.is_success(), "the only slot is free");
    let result = bounded(world.executor.wait(waiting, &Caller::local())).await.unwrap();
    assert_eq!(cause(&result), "expired");
    world.check();
}

// Shows: D1
#[tokio::test(start_paused = true)]
async fn trap_an_execution_id_that_the_caller_chooses() {
    let world = World::new([Puppet::reading("t", Act::Take(SECOND))]);
    // The caller's own id is returned unchanged, may be any text, and identifies nothing.
    let (first, second) = tokio::join!(
        world.executor.call(Call::new("t", json!({})).id("same")),
        world.executor.call(Call::new("t", json!({})).id("same").by(Caller::agent("other"))),
    );
    assert_eq!((first.call_id.as_deref(), second.call_id.as_deref()), (Some("same"), Some("same")));
    assert_ne!(first.execution_id, second.execution_id);
    let _ = BatchCall { call: Call::new("t", json!({})), after: vec![] };
    world.check();
}

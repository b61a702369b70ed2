//! Batches: order, needs, references, stopping, cancelling, counting.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{
    Batch, BatchCall, BatchMode, BatchResult, Body, Call, Caller, Code, ConcurrencyLimit, Executor, Limits, Options,
    Outcome, Plan, Seen, SharedTool, Status, ToolSpec, tool,
};
use wieldy_testkit::{Act, HangingJournal, Puppet, World, bounded};

const SECOND: Duration = Duration::from_secs(1);

/// The starts and ends of runs.
type Notes = Arc<Mutex<Vec<String>>>;

fn noting(spec: ToolSpec, notes: &Notes) -> SharedTool {
    let notes = Arc::clone(notes);
    let name = spec.name.clone();
    Arc::new(tool(spec, move |args: Value, _| {
        let (notes, label) = (Arc::clone(&notes), format!("{name} {}", args["path"].as_str().unwrap_or("-")));
        async move {
            notes.lock().unwrap().push(format!("{label} begins"));
            tokio::time::sleep(SECOND).await;
            notes.lock().unwrap().push(format!("{label} ends"));
            if args["fail"] == json!(true) {
                return Err("told to fail".into());
            }
            Ok(Outcome::text(label).structured(args))
        }
    }))
}

fn world(notes: &Notes) -> World {
    World::new([
        noting(ToolSpec::new("read", "").read_only().reads("path"), notes),
        noting(ToolSpec::new("write", "").writes("path"), notes),
        noting(ToolSpec::new("anything", ""), notes),
    ])
}

fn call(id: &str, tool: &str, arguments: Value) -> BatchCall {
    BatchCall { call: Call::new(tool, arguments).id(id), after: Vec::new() }
}

fn after(mut call: BatchCall, ids: &[&str]) -> BatchCall {
    call.after = ids.iter().map(|id| (*id).to_owned()).collect();
    call
}

fn batch(calls: impl IntoIterator<Item = BatchCall>) -> Batch {
    Batch { calls: calls.into_iter().collect(), ..Batch::new([]) }
}

fn taken(notes: &Notes) -> Vec<String> {
    std::mem::take(&mut notes.lock().unwrap())
}

// Shows: A4.2, A4.5
#[tokio::test(start_paused = true)]
async fn smart_order_runs_at_once_what_does_not_conflict() {
    let notes = Notes::default();
    let world = world(&notes);
    let calls = [
        call("1", "read", json!({"path": "a"})),
        call("2", "write", json!({"path": "a"})),
        call("3", "read", json!({"path": "b"})),
        call("4", "read", json!({"path": "a"})),
        call("5", "write", json!({"path": "c"})),
    ];
    let result = world.executor.batch(batch(calls)).await.unwrap();
    assert_eq!(
        taken(&notes),
        [
            "read a begins",
            "read b begins",
            "write c begins",
            "read a ends",
            "write a begins",
            "read b ends",
            "write c ends",
            "write a ends",
            "read a begins",
            "read a ends",
        ]
    );
    let ids: Vec<_> = result.results.iter().map(|result| result.call_id.clone().unwrap()).collect();
    assert_eq!(ids, ["1", "2", "3", "4", "5"]);
    let summary = &result.summary;
    assert_eq!((summary.total, summary.executed, summary.skipped, summary.succeeded, summary.failed), (5, 5, 0, 5, 0));
    assert_eq!((summary.read_only, summary.mutating), (3, 2));
    world.check();
}

// Shows: A4.2
#[tokio::test(start_paused = true)]
async fn a_mutating_tool_without_a_footprint_waits_for_all_and_all_wait_for_it() {
    let notes = Notes::default();
    let world = world(&notes);
    let calls = [
        call("1", "read", json!({"path": "a"})),
        call("2", "anything", json!({})),
        call("3", "read", json!({"path": "b"})),
    ];
    world.executor.batch(batch(calls)).await.unwrap();
    let order = taken(&notes);
    assert_eq!(
        order,
        ["read a begins", "read a ends", "anything - begins", "anything - ends", "read b begins", "read b ends"]
    );
}

// Shows: A4.1
#[tokio::test(start_paused = true)]
async fn parallel_keeps_to_its_limit_and_sequential_to_its_order() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let calls = || (0..10).map(|number| Call::new("t", json!({ "n": number })));
    let result = world
        .executor
        .batch(Batch { mode: Some(BatchMode::Parallel), max_concurrency: Some(3), ..Batch::new(calls()) })
        .await;
    assert_eq!((result.unwrap().summary.succeeded, strings.most_at_once()), (10, 3));

    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    world.executor.batch(Batch { mode: Some(BatchMode::Sequential), ..Batch::new(calls()) }).await.unwrap();
    assert_eq!(strings.most_at_once(), 1);
}

// Shows: D6.3
#[tokio::test(start_paused = true)]
async fn a_plan_without_parallel_runs_one_after_the_other() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let caller = Caller { plan: Some("WriterPro".into()), ..Caller::local() };
    let calls = (0..4).map(|_| Call::new("t", json!({})).by(caller.clone()));
    world.executor.batch(Batch { mode: Some(BatchMode::Parallel), ..Batch::new(calls) }).await.unwrap();
    assert_eq!(strings.most_at_once(), 1);
}

// Shows: A4.3
#[tokio::test(start_paused = true)]
async fn calls_wait_for_what_they_need_and_use_its_result() {
    let notes = Notes::default();
    let world = world(&notes);
    let calls = [
        call("use", "read", json!({"path": {"$result": "make"}, "n": {"$result": "make", "pointer": "/structured/n"}})),
        call("make", "read", json!({"path": "x", "n": [1, 2]})),
        after(call("late", "read", json!({"path": "z"})), &["use"]),
    ];
    let result = world.executor.batch(batch(calls)).await.unwrap();
    assert_eq!(
        taken(&notes),
        ["read x begins", "read x ends", "read read x begins", "read read x ends", "read z begins", "read z ends"]
    );
    assert_eq!(result.results[0].structured, Some(json!({"path": "read x", "n": [1, 2]})));
    world.check();
}

// Shows: A4.3
#[tokio::test(start_paused = true)]
async fn a_call_that_needs_a_failed_call_is_skipped_with_the_reason() {
    let notes = Notes::default();
    let world = world(&notes);
    let calls = [
        call("a", "read", json!({"path": "a", "fail": true})),
        after(call("b", "read", json!({"path": "b"})), &["a"]),
        call("c", "read", json!({"path": {"$result": "b"}})),
        call("d", "read", json!({"path": {"$result": "e", "pointer": "/nowhere"}})),
        call("e", "read", json!({"path": "e"})),
    ];
    let result = world.executor.batch(batch(calls)).await.unwrap();
    let outcomes: Vec<_> = result
        .results
        .iter()
        .map(|result| (result.status, result.error.as_ref().map(|error| error.message.clone()).unwrap_or_default()))
        .collect();
    assert_eq!(
        outcomes,
        [
            (Status::Failed, "told to fail".to_owned()),
            (Status::Cancelled, "skipped: the call `a`, which it needs, ended as failed".to_owned()),
            (Status::Cancelled, "skipped: the call `b`, which it needs, ended as cancelled".to_owned()),
            (Status::ValidationError, "there is nothing at \"/nowhere\" in the result of `e`".to_owned()),
            (Status::Success, String::new()),
        ]
    );
    assert_eq!((result.summary.executed, result.summary.skipped, result.summary.failed), (3, 2, 2));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn an_invalid_batch_runs_nothing() {
    let notes = Notes::default();
    let world = world(&notes);
    let read = |id: &str| call(id, "read", json!({"path": id}));
    for (calls, message) in [
        (vec![read("a"), read("a")], "two calls have the id `a`"),
        (
            vec![read("first"), after(read("b"), &["frist"])],
            "the call `b` needs `frist`, and there is no call with that id; did you mean `first`?",
        ),
        (vec![after(read("a"), &["b"]), after(read("b"), &["a"]), read("c")], "the calls a, b wait for each other"),
        (vec![after(read("a"), &["a"])], "the calls a wait for each other"),
        (
            vec![call("a", "read", json!({"path": [{"deep": {"$result": "x"}}]}))],
            "the call `a` needs `x`, and there is no call with that id",
        ),
    ] {
        let error = world.executor.batch(batch(calls)).await.unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (Code::ValidationFailed, message));
    }
    assert_eq!(taken(&notes), Vec::<String>::new());
    let empty = world.executor.batch(batch([])).await.unwrap();
    assert_eq!((empty.results.len(), empty.summary.total), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_batch_can_be_observed_and_its_events_are_in_order() {
    let notes = Notes::default();
    let world = world(&notes);
    let (id, result) = world
        .executor
        .spawn_batch(batch([call("1", "write", json!({"path": "a"})), call("2", "read", json!({"path": "a"}))]));
    let mut observer = world.executor.observe_batch(id, &Caller::local());
    let mut seen = Vec::new();
    while let Some(Seen::Event(event)) = bounded(observer.next()).await {
        seen.push(format!("{} {}", event.subject.call_id.as_deref().unwrap_or("batch"), event.body.name()));
    }
    assert_eq!(
        seen,
        [
            "batch tool.batch.started",
            "1 tool.call.pending",
            "1 tool.call.started",
            "1 tool.call.success",
            "2 tool.call.pending",
            "2 tool.call.started",
            "2 tool.call.success",
            "batch tool.batch.completed",
        ]
    );
    assert_eq!(result.await.unwrap().batch_id, id);
    insta::assert_snapshot!(world.tape(), @r#"
    tool.batch.started {"count":2,"mode":"smart","max_concurrency":5,"read_only":1,"mutating":1}
    1 tool.call.pending {"arguments":{"path":"a"},"tool":"write"}
    1 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":false,"tool":"write"}
    1 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":7,"tool":"write"}
    2 tool.call.pending {"arguments":{"path":"a"},"tool":"read"}
    2 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"read"}
    2 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":6,"tool":"read"}
    tool.batch.completed {"total":2,"executed":2,"skipped":0,"succeeded":2,"failed":0,"read_only":1,"mutating":1,"most_at_once":1,"max_concurrency":5}
    "#);
}

// Shows: A6.1
#[tokio::test(start_paused = true)]
async fn cancelling_a_batch_ends_what_runs_and_skips_the_rest() {
    let world = World::new([Puppet::reading("t", Act::Take(10 * SECOND))]);
    let calls = (0..4).map(|number| Call::new("t", json!({})).id(number.to_string()));
    let (id, result) = world.executor.spawn_batch(Batch { max_concurrency: Some(2), ..Batch::new(calls) });
    tokio::time::sleep(SECOND).await;
    let stranger = Caller { tenant: Some("other".into()), ..Caller::local() };
    assert_eq!(world.executor.cancel(id, &stranger), 0);
    assert_eq!(world.executor.cancel(id, &Caller::local()), 2);
    let result = bounded(result).await.unwrap();
    let causes: Vec<_> =
        result.results.iter().map(|result| result.error.as_ref().unwrap().details["cause"].clone()).collect();
    assert_eq!(causes, vec![json!("batch"); 4]);
    assert_eq!((result.summary.executed, result.summary.skipped, result.summary.failed), (2, 2, 2));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn observers_of_a_refused_batch_end() {
    let notes = Notes::default();
    let world = world(&notes);
    let twice = [call("a", "read", json!({"path": "a"})), call("a", "read", json!({"path": "a"}))];
    let (id, result) = world.executor.spawn_batch(batch(twice));
    let mut observer = world.executor.observe_batch(id, &Caller::local());
    let mut closed = 0;
    while let Some(Seen::Event(event)) = bounded(observer.next()).await {
        closed += usize::from(event.body.closing().is_some());
    }
    assert_eq!(closed, 2, "each call is told to be refused");
    assert_eq!(result.await.unwrap_err().message, "two calls have the id `a`");
}

#[tokio::test(start_paused = true)]
async fn cancelling_a_session_or_a_tenant_reaches_calls_of_a_batch_that_have_not_begun() {
    use wieldy_core::Target;
    for (target, cause) in [(Target::Session("s".into()), "session"), (Target::Tenant("acme".into()), "tenant")] {
        let (tool, strings) = Puppet::new(ToolSpec::new("t", ""), [Act::Hang, Act::Echo]);
        let world = World::new([tool]);
        let mut members = batch([call("a", "t", json!({})), call("b", "t", json!({}))]);
        members.caller = Arc::new(Caller { session: Some("s".into()), tenant: Some("acme".into()), ..Caller::local() });
        let caller = Arc::clone(&members.caller);
        let (_, result) = world.executor.spawn_batch(members);
        tokio::time::sleep(SECOND).await;
        world.executor.cancel(target, &caller);
        let result = bounded(result).await.unwrap();
        let causes: Vec<_> =
            result.results.iter().map(|result| &result.error.as_ref().unwrap().details["cause"]).collect();
        assert_eq!((causes, strings.runs()), (vec![&json!(cause), &json!(cause)], 1));
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_stops_on_errors_stops_at_a_reference_to_nothing() {
    let notes = Notes::default();
    let world = world(&notes);
    let lost = json!({"path": {"$result": "a", "pointer": "/structured/nowhere"}});
    let mut calls =
        batch([call("a", "read", json!({"path": "x"})), call("b", "read", lost), call("c", "read", json!({}))]);
    calls.mode = Some(BatchMode::Sequential);
    calls.stop_on_error = true;
    let result = world.executor.batch(calls).await.unwrap();
    let statuses: Vec<Status> = result.results.iter().map(|result| result.status).collect();
    assert_eq!(statuses, [Status::Success, Status::ValidationError, Status::Cancelled]);
    world.check();
}

#[tokio::test(start_paused = true)]
async fn arguments_too_deep_to_be_looked_at_are_refused_in_a_batch_too() {
    let mut deep = json!({"$result": "a"});
    for _ in 0..1_000 {
        deep = json!([deep]);
    }
    let world = world(&Notes::default());
    let members = batch([call("a", "read", json!({})), after(call("b", "read", json!({ "path": deep })), &["a"])]);
    let result = world.executor.batch(members).await.unwrap();
    assert_eq!(result.results[1].error.as_ref().unwrap().code, Code::ValidationFailed);
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_long_batch_one_by_one_costs_no_more_than_its_calls() {
    let world = World::new([Puppet::writing("t", Act::Echo)]);
    for mode in [BatchMode::Sequential, BatchMode::Smart] {
        let mut many = batch((0..10_000).map(|n| call(&n.to_string(), "t", json!({}))));
        many.mode = Some(mode);
        assert_eq!(world.executor.batch(many).await.unwrap().summary.succeeded, 10_000);
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_batch_in_smart_order_costs_no_more_than_its_calls() {
    let (tool, strings) = Puppet::new(ToolSpec::new("write", "").writes("path"), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let at = |path: String| Call::new("write", json!({ "path": path }));
    let result = world.executor.batch(Batch::new((0..20_000).map(|_| at("a".into())))).await.unwrap();
    assert_eq!((result.summary.succeeded, strings.most_at_once()), (20_000, 1));
    let result = world.executor.batch(Batch::new((0..20_000).map(|n| at(format!("some/{n}"))))).await.unwrap();
    assert_eq!((result.summary.succeeded, strings.most_at_once()), (20_000, 5));
}

/// Returns an executor whose journal hangs.
fn executor_that_cannot_write() -> Executor {
    let mut builder = Executor::builder().tools([
        Puppet::reading("fail", Act::Fail(Code::ToolReportedError, false)),
        Puppet::reading("wait", Act::PrintAndWait("so far")),
        Puppet::writing("write", Act::Echo),
    ]);
    builder.journal = Arc::new(HangingJournal);
    builder.build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn running_calls_are_polled_while_others_are_skipped() {
    let mut calls = vec![call("0", "fail", json!({}))];
    calls.extend((1..=100).map(|n| after(call(&n.to_string(), "write", json!({})), &[&(n - 1).to_string()])));
    let mut waiting = call("wait", "wait", json!({}));
    waiting.call.options = Options { timeout: Some(2 * SECOND), retries: Some(0), ..Options::default() };
    calls.push(waiting);
    let began = tokio::time::Instant::now();
    let result =
        executor_that_cannot_write().batch(Batch { mode: Some(BatchMode::Parallel), ..batch(calls) }).await.unwrap();
    assert_eq!((result.summary.executed, result.summary.skipped), (2, 100));
    let waited = &result.results[101];
    assert_eq!((waited.status, waited.text().as_str()), (Status::Timeout, "so far"));
    assert_eq!(waited.timing.duration_ms, 2_000.0, "its clock did not stand still");
    assert_eq!(began.elapsed(), 7 * SECOND, "the records of all who were skipped are waited for once");
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_refused_waits_for_its_records_once() {
    let calls = (0..100).map(|_| call("twice", "write", json!({})));
    let began = tokio::time::Instant::now();
    let refused = executor_that_cannot_write().batch(batch(calls)).await.unwrap_err();
    assert_eq!((refused.code, began.elapsed()), (Code::ValidationFailed, 5 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn arguments_too_deep_to_be_walked_are_refused_in_a_batch_too() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let mut deep = json!(1);
    for _ in 0..1_000 {
        deep = json!([deep]);
    }
    let first = call("a", "t", json!({}));
    let second = call("b", "t", json!({"use": {"$result": "a"}, "deep": deep}));
    let result = world.executor.batch(batch([first, second])).await.unwrap();
    assert_eq!((result.results[0].status, result.results[1].status), (Status::Success, Status::ValidationError));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn references_are_filled_in_no_further_than_arguments_may_be_large() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let made = call("a", "t", json!({"text": "x".repeat(50_000)}));
    let message = "the arguments are too large: at most 16777216 bytes and 128 levels";
    for reference in [
        json!({"$result": "a"}),
        json!({"$result": "a", "pointer": "/content/0/text"}),
        json!({"$result": "a", "pointer": "/content"}),
    ] {
        let often = call("b", "t", json!({"use": vec![reference.clone(); 6000]}));
        let few = call("c", "t", json!({"use": vec![reference.clone(); 3]}));
        let result = world.executor.batch(batch([made.clone(), often, few])).await.unwrap();
        assert_eq!(result.results[1].error.as_ref().map(|error| error.message.as_str()), Some(message), "{reference}");
        assert!(result.results[2].is_success(), "{reference}");
    }
    world.check();
}

#[tokio::test(start_paused = true)]
async fn references_of_a_batch_are_bounded_in_all() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let made = call("a", "t", json!({"text": "x".repeat(50_000)}));
    let often = json!({"use": vec![json!({"$result": "a"}); 300]});
    let many = (0..6).map(|number| call(&format!("b{number}"), "t", often.clone()));
    let calls: Vec<_> = std::iter::once(made).chain(many).collect();
    let result = world.executor.batch(batch(calls)).await.unwrap();
    let message = "the references of this batch are too large: at most 67108864 bytes in all";
    let ends: Vec<_> =
        result.results.iter().map(|result| result.error.as_ref().map(|error| error.message.as_str())).collect();
    assert_eq!(ends, [None, None, None, None, None, Some(message), Some(message)]);
    world.check();
}

// Shows: A4.6
#[tokio::test(start_paused = true)]
async fn each_result_says_what_ran_beside_it_and_what_it_waited_for() {
    let taking = |spec: ToolSpec| Puppet::new(spec, [Act::Take(SECOND)]).0;
    let world = World::new([
        taking(ToolSpec::new("read", "").read_only().reads("path")),
        taking(ToolSpec::new("write", "").writes("path")),
    ]);
    let call = |tool: &str, path: &str| Call::new(tool, json!({ "path": path }));
    let calls = || {
        [call("read", "a").id("one"), call("read", "a"), call("write", "a").id("three"), call("read", "a")].into_iter()
    };
    let told = |result: &BatchResult| -> Vec<(Option<bool>, String)> {
        result.results.iter().map(|result| (result.parallel, result.waited_for.join(" "))).collect()
    };
    let smart = world.executor.batch(Batch::new(calls())).await.unwrap();
    let beside = |waited_for: &str| (Some(true), waited_for.to_owned());
    let alone = |waited_for: &str| (Some(false), waited_for.to_owned());
    assert_eq!(told(&smart), [beside(""), beside(""), alone("one #2"), alone("three")]);
    assert_eq!(smart.summary.most_at_once, 2);
    let sequential = Batch { mode: Some(BatchMode::Sequential), ..Batch::new(calls()) };
    let sequential = world.executor.batch(sequential).await.unwrap();
    assert_eq!(told(&sequential), [alone(""), alone("one"), alone("#2"), alone("three")]);
    assert_eq!(sequential.summary.most_at_once, 1);
    let parallel = Batch { mode: Some(BatchMode::Parallel), ..Batch::new(calls()) };
    let parallel = world.executor.batch(parallel).await.unwrap();
    assert_eq!(told(&parallel), [beside(""), beside(""), beside(""), beside("")]);
    assert_eq!(parallel.summary.most_at_once, 4);
    let alone = world.call("read", json!({"path": "a"})).await;
    assert_eq!((alone.parallel, alone.waited_for), (None, vec![]));
    world.check();
}

/// Runs twenty calls of one second as a batch of this plan. Returns the most that ran at once, and the summary's own
/// words about it.
async fn at_once(plan: Option<&str>, batch: impl FnOnce(Batch) -> Batch) -> (usize, serde_json::Value) {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::with([tool], |builder| builder.limits = Limits::default());
    let caller = Caller { plan: plan.map(str::to_owned), ..Caller::local() };
    let calls = (0..20).map(|number| Call::new("t", json!({ "n": number })).by(caller.clone()));
    let summary = world.executor.batch(batch(Batch::new(calls))).await.unwrap().summary;
    assert_eq!(summary.succeeded, 20);
    let told = json!({"max": summary.max_concurrency, "asked": summary.asked, "held_by": summary.held_by});
    let started = world.events().iter().find_map(|event| match event.body {
        Body::BatchStarted { max_concurrency, asked, held_by, .. } => Some((max_concurrency, asked, held_by)),
        _ => None,
    });
    assert_eq!(started, Some((summary.max_concurrency, summary.asked, summary.held_by)));
    (strings.most_at_once(), told)
}

// Shows: D6.2
#[tokio::test(start_paused = true)]
async fn a_plan_gives_its_agents_the_slots_that_it_promises() {
    let ten = |batch| Batch { max_concurrency: Some(10), ..batch };
    let many = |batch| Batch { max_concurrency: Some(20), ..batch };
    let whole = |max: usize| json!({"max": max, "asked": null, "held_by": null});
    assert_eq!(at_once(Some("Teams"), ten).await, (10, whole(10)));
    assert_eq!(at_once(Some("Teams"), |batch| batch).await, (5, whole(5)), "the default");
    assert_eq!(at_once(Some("Enterprise"), many).await, (20, whole(20)));
    assert_eq!(at_once(None, |batch| batch).await, (4, whole(4)), "a default that is not reached is no news");
}

// Shows: A4.5, D6.3
#[tokio::test(start_paused = true)]
async fn a_batch_says_what_held_fewer_calls_at_once_than_were_asked_for() {
    let ten = |batch| Batch { max_concurrency: Some(10), ..batch };
    let held = |max: usize, asked: usize, by: &str| json!({"max": max, "asked": asked, "held_by": by});
    assert_eq!(at_once(None, ten).await, (4, held(4, 10, "calls_running_per_agent_max")));
    let wide = |batch| Batch { max_concurrency: Some(100), ..batch };
    assert_eq!(at_once(Some("Teams"), wide).await, (10, held(10, 100, "plan_parallel_max")));
    assert_eq!(at_once(Some("Enterprise"), wide).await, (20, held(64, 100, "calls_running_max")));
    let parallel = |batch| Batch { mode: Some(BatchMode::Parallel), ..batch };
    assert_eq!(at_once(Some("WriterPro"), parallel).await, (1, held(1, 5, "plan_parallel_max")));
    assert_eq!(at_once(Some("WriterPro"), ten).await, (1, held(1, 10, "plan_parallel_max")));
    let unheld = json!({"max": 1, "asked": null, "held_by": null});
    assert_eq!(at_once(Some("WriterPro"), |batch| batch).await, (1, unheld.clone()), "the defaults are no wish");
    let sequential = |batch| Batch { mode: Some(BatchMode::Sequential), max_concurrency: Some(10), ..batch };
    assert_eq!(at_once(Some("WriterPro"), sequential).await, (1, unheld), "that is what was asked for");
}

#[tokio::test(start_paused = true)]
async fn a_tool_holds_its_own_calls_of_a_batch() {
    let mut spec = ToolSpec::new("few", "").read_only();
    spec.constraints.concurrency_max = Some(2);
    let world = World::new([Puppet::new(spec, [Act::Take(SECOND)]).0, Puppet::reading("t", Act::Take(SECOND))]);
    let calls = ["few", "few", "few", "few", "t"].map(|tool| Call::new(tool, json!({})));
    let summary = world.executor.batch(Batch { max_concurrency: Some(4), ..Batch::new(calls) }).await.unwrap().summary;
    assert_eq!(
        (summary.max_concurrency, summary.asked, summary.held_by),
        (3, Some(4), Some(ConcurrencyLimit::ToolConcurrencyMax))
    );
}

#[tokio::test(start_paused = true)]
async fn a_plan_without_slots_keeps_those_of_the_executor() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::with([tool], |builder| {
        builder.limits = Limits::default();
        builder.policy = std::mem::take(&mut builder.policy).with_plan("Plain", Plan::UNLIMITED);
    });
    let caller = Caller { plan: Some("Plain".into()), ..Caller::local() };
    let calls = (0..20).map(|_| Call::new("t", json!({})).by(caller.clone()));
    let summary = world.executor.batch(Batch { max_concurrency: Some(9), ..Batch::new(calls) }).await.unwrap().summary;
    assert_eq!((strings.most_at_once(), summary.held_by), (4, Some(ConcurrencyLimit::CallsRunningPerAgentMax)));
}

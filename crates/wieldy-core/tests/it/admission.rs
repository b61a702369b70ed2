//! Slots, queues, rates, breakers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use wieldy_core::{
    BreakerPolicy, Call, Caller, Code, Limits, Options, Outcome, Per, Priority, Rate, RateKind, RetryPolicy, Status,
    ToolSpec,
};
use wieldy_testkit::{Act, Puppet, World, bounded};

const SECOND: Duration = Duration::from_secs(1);

fn limits(agent: u32, overall: u32) -> Limits {
    Limits { calls_running_per_agent_max: agent, calls_running_max: overall, ..Limits::default() }
}

// Shows: B4.1
#[tokio::test(start_paused = true)]
async fn an_agent_runs_four_calls_at_once_and_the_rest_waits() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::with([tool], |builder| builder.limits = Limits { calls_waiting_max: 1000, ..Limits::default() });
    let calls = (0..100).map(|_| world.call("t", json!({})));
    let results = bounded(join_all(calls)).await;
    assert_eq!(results.iter().filter(|result| result.is_success()).count(), 100);
    assert_eq!(strings.most_at_once(), 4);
    assert!(results[99].timing.queued_ms >= 23_000.0);
    world.check();
}

// Shows: B4.1, D6.2
#[tokio::test(start_paused = true)]
async fn a_plan_sets_the_slots_of_its_agents() {
    for (plan, at_once) in [("Core", 4), ("Teams", 10), ("Enterprise", 64)] {
        let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
        let world = World::with([tool], |builder| builder.limits = Limits::default());
        let caller = Caller { plan: Some(plan.into()), ..Caller::local() };
        let calls = (0..70).map(|_| world.executor.call(Call::new("t", json!({})).by(caller.clone())));
        bounded(join_all(calls)).await;
        assert_eq!((plan, strings.most_at_once()), (plan, at_once));
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn one_agents_calls_do_not_hold_up_anothers() {
    let world = World::with([Puppet::reading("t", Act::Take(SECOND))], |builder| builder.limits = limits(1, 10));
    let by = |agent: &str| world.executor.call(Call::new("t", json!({})).by(Caller::agent(agent)));
    let began = tokio::time::Instant::now();
    let (busy, _, other) = tokio::join!(by("busy"), by("busy"), async {
        let result = by("other").await;
        (result, began.elapsed())
    });
    assert!(busy.is_success() && other.0.is_success());
    assert_eq!((other.1, began.elapsed()), (SECOND, 2 * SECOND));
}

// Shows: C1.1
#[tokio::test(start_paused = true)]
async fn a_tool_may_run_less_often_at_once_than_its_callers_may() {
    let mut spec = ToolSpec::new("t", "").read_only();
    spec.constraints.concurrency_max = Some(2);
    let (tool, strings) = Puppet::new(spec, [Act::Take(SECOND)]);
    let world = World::new([tool]);
    bounded(join_all((0..10).map(|_| world.call("t", json!({}))))).await;
    assert_eq!(strings.most_at_once(), 2);
    world.check();
}

// Shows: A2.2, A2.3, B4.2
#[tokio::test(start_paused = true)]
async fn a_call_that_waits_too_long_names_the_limit() {
    let world = World::with([Puppet::reading("t", Act::Take(60 * SECOND))], |builder| builder.limits = limits(1, 10));
    let impatient = Options { queue_timeout: Some(SECOND), ..Options::default() };
    let (_, waited) = tokio::join!(
        world
            .executor
            .call(Call::new("t", json!({})).with(Options { timeout: Some(90 * SECOND), ..Options::default() })),
        world.executor.call(Call::new("t", json!({})).with(impatient)),
    );
    let error = waited.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str(), error.retryable),
        (Code::ConcurrencyLimitExceeded, "all 1 slots of this agent are taken, and none became free in time", true)
    );
    assert_eq!(error.details["limit"], json!("agent"));
    world.check();
}

// Shows: B4.2
#[tokio::test(start_paused = true)]
async fn more_than_may_wait_are_refused_at_once() {
    let world = World::with([Puppet::reading("t", Act::Take(SECOND))], |builder| {
        builder.limits = Limits { calls_waiting_max: 2, ..limits(10, 1) };
    });
    let results = join_all((0..5).map(|_| world.call("t", json!({})))).await;
    let codes: Vec<_> = results.iter().map(|result| result.error.as_ref().map(|error| error.code)).collect();
    assert_eq!(codes, [None, None, None, Some(Code::ConcurrencyLimitExceeded), Some(Code::ConcurrencyLimitExceeded)]);
    assert_eq!(
        results[4].error.as_ref().unwrap().message,
        "all 1 slots of the executor are taken, and the queue is full"
    );
    world.check();
}

// Shows: A7
#[tokio::test(start_paused = true)]
async fn urgent_calls_go_first_and_no_call_waits_for_ever() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&order);
    let tool = wieldy_core::tool(ToolSpec::new("t", "").read_only(), move |args: serde_json::Value, _| {
        seen.lock().unwrap().push(args["who"].as_str().unwrap().to_owned());
        async {
            tokio::time::sleep(SECOND).await;
            Ok(Outcome::text(""))
        }
    });
    let world = World::with([Arc::new(tool) as _], |builder| {
        builder.limits = Limits { ageing: SECOND, queue_timeout: 100 * SECOND, ..limits(100, 1) };
    });
    let call = |who: String, priority| {
        let call = Call::new("t", json!({ "who": who })).with(Options { priority, ..Options::default() });
        world.executor.spawn(call)
    };
    let mut ids = vec![call("first".into(), Priority::NORMAL)];
    tokio::task::yield_now().await;
    ids.push(call("low".into(), Priority::LOW));
    ids.push(call("normal".into(), Priority::NORMAL));
    ids.push(call("high".into(), Priority::HIGH));
    // The queue always has a more urgent call. The low one lets about 20 of them pass and then runs, because waiting
    // raised it.
    for number in 0..40 {
        tokio::time::sleep(SECOND).await;
        ids.push(call(format!("urgent {number}"), Priority::HIGH));
    }
    for id in ids {
        world.executor.wait(id, &Caller::local()).await.unwrap();
    }
    let order = order.lock().unwrap();
    assert_eq!(order[..3], ["first", "high", "urgent 0"]);
    let place = |who: &str| order.iter().position(|name| name == who).unwrap();
    assert!(place("normal") < place("low"));
    assert!((15..30).contains(&place("low")), "{}", place("low"));
    world.check();
}

/// P-QTA-02.
#[tokio::test(start_paused = true)]
async fn slots_come_back_however_calls_end() {
    let tools = [
        Puppet::reading("ok", Act::Take(SECOND)),
        Puppet::writing("fail", Act::Fail(Code::ToolReportedError, true)),
        Puppet::writing("panic", Act::Panic),
        Puppet::writing("hang", Act::Hang),
    ];
    let world = World::with(tools, |builder| {
        builder.limits = Limits { calls_waiting_max: 100_000, queue_timeout: 100_000 * SECOND, ..limits(4, 4) };
        builder.breaker = BreakerPolicy { failures_max: 0, ..BreakerPolicy::default() };
    });
    // Runs each tool, and ends each call in one of four ways: by itself, by timeout, by a cancel, or by a caller that
    // goes away.
    let end = async |number: usize| {
        let (tool, way) = (["ok", "fail", "panic", "hang"][number % 4], number / 4 % 4);
        let timeout = if way == 0 { 2 * SECOND } else { SECOND / 10 };
        let options = Options { timeout: Some(timeout), retries: Some(0), ..Options::default() };
        let call = Call::new(tool, json!({})).with(options);
        let soon = Duration::from_millis(number as u64);
        match way {
            2 => {
                let id = world.executor.spawn(call);
                tokio::time::sleep(soon).await;
                world.executor.cancel(id, &Caller::local());
                Some(world.executor.wait(id, &Caller::local()).await.unwrap().status)
            }
            3 => tokio::time::timeout(soon, world.executor.call(call)).await.ok().map(|result| result.status),
            _ => Some(world.executor.call(call).await.status),
        }
    };
    let ends = bounded(join_all((0..10_000).map(end))).await;
    let count = |status| ends.iter().filter(|end| **end == status).count();
    let ways = [Some(Status::Success), Some(Status::Failed), Some(Status::Timeout), Some(Status::Cancelled), None];
    assert!(ways.iter().all(|way| count(*way) > 100), "{:?}", ways.map(count));
    world.check();
}

/// P-QTA-03.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_more_calls_than_the_limit_run_at_once() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", ""), [Act::Take(Duration::from_millis(1))]);
    let world = World::with([tool], |builder| {
        builder.limits = Limits { queue_timeout: 3600 * SECOND, ..limits(4, 64) };
    });
    let start = Arc::new(tokio::sync::Barrier::new(1_000));
    let call = |_| {
        let (executor, start) = (world.executor.clone(), Arc::clone(&start));
        tokio::spawn(async move {
            start.wait().await;
            executor.call(Call::new("t", json!({}))).await.is_success()
        })
    };
    let succeeded = join_all((0..1_000).map(call)).await;
    assert!(succeeded.into_iter().all(|succeeded| succeeded.unwrap()));
    assert_eq!((strings.runs(), strings.most_at_once()), (1_000, 4));
    world.check();
}

/// P-QTA-04.
#[tokio::test(start_paused = true)]
async fn a_tenant_that_floods_holds_up_no_other_however_many_agents_it_has() {
    let world = World::with([Puppet::reading("t", Act::Take(SECOND))], |builder| {
        builder.limits = Limits { calls_waiting_max: 100, queue_timeout: 3600 * SECOND, ..limits(4, 4) };
    });
    let by = |tenant: &str, agent: u32| {
        let caller = Caller { tenant: Some(tenant.into()), ..Caller::agent(format!("agent {agent}")) };
        world.executor.call(Call::new("t", json!({})).by(caller))
    };
    let quiet = async {
        tokio::time::sleep(SECOND / 2).await;
        let mut slowest = Duration::ZERO;
        for number in 0..20 {
            let began = tokio::time::Instant::now();
            assert!(by("quiet", number % 2).await.is_success(), "there is a place for it");
            slowest = slowest.max(began.elapsed());
        }
        slowest
    };
    let (flood, slowest) = tokio::join!(join_all((0..200).map(|agent| by("loud", agent))), quiet);
    assert!(slowest <= 2 * SECOND, "it waits only for the next slot: {slowest:?}");
    let message_of = |result: &wieldy_core::ToolResult| result.error.as_ref().map(|error| error.message.clone());
    assert_eq!(flood.iter().filter(|result| message_of(result).is_none()).count(), 103, "nor is the flood forgotten");
    assert_eq!(
        message_of(&flood[199]).as_deref(),
        Some("all 4 slots of the executor are taken, and the queue is full")
    );
    let gave_way = "all 4 slots of the executor are taken, and a tenant with fewer waiting calls took its place";
    assert_eq!(message_of(&flood[103]).as_deref(), Some(gave_way), "the last in line");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn tenants_that_flood_alike_share_the_slots_and_the_queue_alike() {
    let world = World::with([Puppet::reading("t", Act::Take(SECOND))], |builder| {
        builder.limits = Limits { calls_waiting_max: 8, ..limits(1, 4) };
    });
    let by = |tenant: &str, agent: u32| {
        let caller = Caller { tenant: Some(tenant.into()), ..Caller::agent(format!("agent {agent}")) };
        world.executor.call(Call::new("t", json!({})).by(caller))
    };
    let began = tokio::time::Instant::now();
    let ends = async |tenant: &str| {
        let ended = async |agent: u32| by(tenant, agent).await.is_success().then(|| began.elapsed().as_secs());
        join_all((0..20).map(ended)).await.into_iter().flatten().collect::<Vec<_>>()
    };
    let (first, second) = tokio::join!(ends("first"), ends("second"));
    assert_eq!((first, second), (vec![1, 1, 1, 1, 2, 2, 3, 3], vec![2, 2, 3, 3]));
    world.check();
}

// Shows: B4.1
#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_its_retry_holds_no_slot() {
    let flaky = [Act::Fail(Code::TransportFailed, true), Act::Echo];
    let spec = ToolSpec::new("flaky", "").read_only().retry(RetryPolicy {
        retries: 1,
        base: 10 * SECOND,
        ..RetryPolicy::default()
    });
    let world = World::with([Puppet::new(spec, flaky).0, Puppet::reading("t", Act::Echo)], |builder| {
        builder.limits = limits(1, 1);
    });
    let id = world.executor.spawn(Call::new("flaky", json!({})));
    tokio::time::sleep(SECOND).await;
    let result = world.call("t", json!({})).await;
    assert!(result.is_success() && result.timing.queued_ms < 1.0);
    assert!(world.executor.wait(id, &Caller::local()).await.unwrap().is_success());
    world.check();
}

// Shows: A10
#[tokio::test(start_paused = true)]
async fn a_rate_limit_refuses_with_the_time_to_wait() {
    let world = World::with([Puppet::reading("t", Act::Echo)], |builder| {
        let calls = std::num::NonZeroU32::new(2).unwrap();
        builder.rates =
            vec![Rate { per: Per::Tool, tool: Some("t".into()), calls, window: 10 * SECOND, kind: RateKind::Rate }];
    });
    for _ in 0..2 {
        assert!(world.call("t", json!({})).await.is_success());
    }
    let error = world.call("t", json!({})).await.error.unwrap();
    assert_eq!((error.code, error.retry_after()), (Code::RateLimited, Some(5 * SECOND)));
    assert_eq!(error.message, "the rate limit of 2 calls of `t` in 10s per tool is used up");
    tokio::time::sleep(5 * SECOND).await;
    assert!(world.call("t", json!({})).await.is_success());
}

// Shows: A8
#[tokio::test(start_paused = true)]
async fn a_tool_that_keeps_failing_is_refused_for_a_while() {
    let mut acts = vec![Act::Fail(Code::TransportFailed, true); 3];
    acts.push(Act::Echo);
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").retry(RetryPolicy::NEVER), acts);
    let world = World::with([tool], |builder| {
        builder.breaker = BreakerPolicy { failures_max: 3, open_for: 30 * SECOND };
    });
    for _ in 0..3 {
        world.call("t", json!({})).await;
    }
    let error = world.call("t", json!({})).await.error.unwrap();
    assert_eq!((error.code, error.retry_after(), strings.runs()), (Code::CircuitOpen, Some(30 * SECOND), 3));
    assert_eq!(world.executor.load().breakers.len(), 1);
    tokio::time::sleep(30 * SECOND).await;
    assert!(world.call("t", json!({})).await.is_success());
    assert_eq!(world.executor.load().breakers, []);
}

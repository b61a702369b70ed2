//! A seeded simulation under paused time: thousands of calls to tools that fail, hang and panic, from callers that
//! cancel and go away. Each call must end exactly once, and no slot may leak.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{
    Batch, BatchMode, BreakerPolicy, Call, Caller, Code, Limits, Options, Priority, RetryPolicy, Target, ToolSpec,
};
use wieldy_testkit::{Act, Puppet, World};

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn world(random: &mut fastrand::Rng) -> World {
    let retry = RetryPolicy { retries: 2, base: ms(50), cap: ms(500), ..RetryPolicy::default() };
    let acts = [
        Act::Echo,
        Act::Take(ms(20)),
        Act::Take(ms(900)),
        Act::Fail(Code::TransportFailed, true),
        Act::Fail(Code::TransportFailed, false),
        Act::Fail(Code::InvalidInput, true),
        Act::Panic,
        Act::Hang,
        Act::PrintAndWait("so far"),
        Act::Tick(5, ms(30)),
        Act::Busy(ms(70)),
    ];
    let specs = [
        ToolSpec::new("plain", ""),
        ToolSpec::new("reads", "").read_only().reads("path"),
        ToolSpec::new("kept", "").read_only().reads("path").cache(ms(300)),
        ToolSpec::new("writes", "").writes("path"),
        ToolSpec::new("again", "").idempotent(),
        ToolSpec::new("asked", "").confirm(),
    ];
    let tools = specs.map(|spec| {
        let acts: Vec<Act> = (0..400).map(|_| acts[random.usize(..acts.len())].clone()).collect();
        Puppet::new(spec.retry(retry), acts).0
    });
    let (agent_max, overall, waiting) = (random.u32(1..5), random.u32(1..8), random.usize(5..60));
    let breaker_failures = random.u32(0..12);
    World::with(tools, |builder| {
        builder.limits = Limits {
            calls_running_per_agent_max: agent_max,
            calls_running_max: overall,
            calls_waiting_max: waiting,
            queue_timeout: ms(400),
            ageing: ms(50),
        };
        builder.breaker = BreakerPolicy { failures_max: breaker_failures, open_for: ms(200) };
        builder.observable_max = 10;
    })
}

fn call(random: &mut fastrand::Rng) -> Call {
    let tool = ["plain", "reads", "kept", "writes", "again", "asked", "nowhere"][random.usize(..7)];
    let caller = Caller { session: Some(random.u32(..4).to_string()), ..Caller::agent(random.u32(..3).to_string()) };
    let some = |random: &mut fastrand::Rng, chance: u32, at_most: u64| {
        (random.u32(..10) < chance).then(|| ms(random.u64(1..at_most)))
    };
    let options = Options {
        timeout: Some(ms(random.u64(1..400))),
        deadline: some(random, 3, 800),
        silence: some(random, 3, 200),
        queue_timeout: some(random, 3, 300),
        retries: (random.u32(..3) == 0).then(|| random.u32(..4)),
        priority: Priority(random.i8(..)),
        idempotency_key: (random.u32(..8) == 0).then(|| random.u32(..5).to_string()),
        ..Options::default()
    };
    Call::new(tool, json!({"path": format!("{}", random.u32(..6))})).by(caller).with(options)
}

async fn simulate(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let world = world(&mut random);
    let mut waiting = tokio::task::JoinSet::new();
    let mut spawned = Vec::new();
    for _ in 0..300 {
        tokio::time::sleep(ms(random.u64(..15))).await;
        let executor = world.executor.clone();
        match random.u32(..10) {
            0..4 => {
                let call = call(&mut random);
                waiting.spawn(async move { drop(executor.call(call).await) });
            }
            4..6 => {
                // A caller that does not wait to the end.
                let (call, patience) = (call(&mut random), ms(random.u64(..300)));
                waiting.spawn(async move { drop(tokio::time::timeout(patience, executor.call(call)).await) });
            }
            6..8 => spawned.push(executor.spawn(call(&mut random))),
            8 => {
                let calls: Vec<Call> = (0..random.usize(..6)).map(|_| call(&mut random)).collect();
                let mode = [BatchMode::Smart, BatchMode::Parallel, BatchMode::Sequential][random.usize(..3)];
                let batch = Batch { mode: Some(mode), stop_on_error: random.bool(), ..Batch::new(calls) };
                waiting.spawn(async move { drop(executor.batch(batch).await) });
            }
            _ => match (random.u32(..4), spawned.pop()) {
                (0, _) => drop(executor.cancel(Target::Session(random.u32(..4).to_string()), &Caller::local())),
                (_, Some(id)) => drop(executor.cancel(id, &Caller::local())),
                _ => {}
            },
        }
    }
    while waiting.join_next().await.is_some() {}
    world.executor.shutdown(Duration::from_secs(60)).await;
    world.check();
    let events = world.events();
    let opened = events.iter().filter(|event| event.body.name() == "tool.call.pending").count();
    let closed = events.iter().filter(|event| event.body.closing().is_some()).count();
    assert!(opened >= 200);
    assert_eq!(opened, closed, "each call ends exactly once");
}

// Shows: A1, D1
#[test]
fn each_call_ends_once_and_no_slot_leaks_under_random_failures() {
    let first: u64 = std::env::var("WIELDY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for seed in first..first + 20 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let simulated = std::panic::catch_unwind(|| runtime.block_on(simulate(seed)));
        assert!(simulated.is_ok(), "to see it again: WIELDY_SEED={seed}");
    }
}

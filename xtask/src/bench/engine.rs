//! Benchmark of the engine: one call through the whole pipeline, batches, subscribers, many tools, memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::runtime::Runtime;
use wieldy_core::{Filter, Subscription};

use super::Memory;
use super::floor::{ByHand, timed};
use super::harness::{Contestant, Effort, Measured, compete};
use super::ours::Ours;
use super::table::{Figure, Goal, Row};

const HAND: &str = "by hand";
const HAND_SPAWNED: &str = "by hand, spawn + timeout";
const HAND_HUNDRED: &str = "by hand, 100 spawns";
const HAND_TOGETHER: &str = "by hand, 100 parsed together";
const CALL: &str = "one call";
const CALL_RESULT: &str = "one call, whole result as JSON";
const CALL_SPAWNED: &str = "one call as a task";
const CALL_OBSERVED: &str = "one call as a task, observed to its end";
const SUBSCRIBED_1: &str = "one call, 1 subscriber";
const SUBSCRIBED_10: &str = "one call, 10 subscribers";
const HUNDRED: &str = "parallel batch of 100 calls";
const TOOLS_10: &str = "one call, 10 tools";
const TOOLS_1000: &str = "one call, 1,000 tools";
const TOOLS_10000: &str = "one call, 10,000 tools";

/// Measures all rows and compares them with the goals.
pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let runtime = one_core()?;
    let effort = Effort::new(quick);
    let calls = calls(effort, &runtime);
    let batches = batches(effort, &runtime);
    let tools = tools(effort, &runtime);
    let per_second = 1e9 / calls.spread(CALL).p50;
    let mut rows = vec![
        Row::timed(&calls, CALL, HAND_SPAWNED, Some(1.7)),
        Row::timed(&calls, CALL, HAND, None),
        Row {
            name: "calls per second, one core".into(),
            ours: Figure::PerSecond(per_second),
            floor: Some((HAND_SPAWNED, Figure::PerSecond(1e9 / calls.spread(HAND_SPAWNED).p50))),
            ratio: None,
            goal: Some(Goal::PerSecondAtLeast(100_000.0)),
        },
        Row::timed(&calls, CALL_RESULT, HAND_SPAWNED, None),
        Row::timed(&calls, SUBSCRIBED_1, CALL, Some(1.1)),
        Row::timed(&calls, SUBSCRIBED_10, CALL, Some(2.0)),
        Row::timed(&calls, CALL_SPAWNED, HAND_SPAWNED, None),
        Row::timed(&calls, CALL_OBSERVED, CALL_SPAWNED, None),
        Row::timed(&batches, HUNDRED, HAND_HUNDRED, Some(2.0)),
        Row::timed(&batches, HUNDRED, HAND_TOGETHER, None),
        Row::timed(&tools, TOOLS_1000, TOOLS_10, Some(1.1)),
        Row::timed(&tools, TOOLS_10000, TOOLS_10, Some(1.1)),
    ];
    rows.extend(memory()?);
    Ok(rows)
}

/// Makes calls without measuring them.
pub(super) fn spin(duration: Duration, batches: bool) -> Result<()> {
    let (runtime, ours, began) = (one_core()?, Ours::new(10), Instant::now());
    while began.elapsed() < duration {
        match batches {
            true => timed(&runtime, 10, || ours.hundred_in_a_batch()),
            false => timed(&runtime, 1000, || ours.call()),
        };
    }
    Ok(())
}

fn calls(effort: Effort, runtime: &Runtime) -> Measured {
    let hand = ByHand::new();
    let [plain, for_result, spawned, observed, one_ear, ten_ears] = std::array::from_fn(|_| Ours::new(10));
    let (hand, plain, for_result) = (&hand, &plain, &for_result);
    let (spawned, observed) = (&spawned, &observed);
    compete(
        effort,
        vec![
            Contestant::new(HAND, |times| timed(runtime, times, || hand.call())),
            Contestant::new(HAND_SPAWNED, |times| timed(runtime, times, || hand.call_spawned())),
            Contestant::new(CALL, |times| timed(runtime, times, || plain.call())),
            Contestant::new(CALL_RESULT, |times| timed(runtime, times, || for_result.call_for_result())),
            Contestant::new(CALL_SPAWNED, |times| timed(runtime, times, || spawned.call_spawned())),
            Contestant::new(CALL_OBSERVED, |times| timed(runtime, times, || observed.call_observed())),
            Contestant::new(SUBSCRIBED_1, listened(runtime, one_ear, 1)),
            Contestant::new(SUBSCRIBED_10, listened(runtime, ten_ears, 10)),
        ],
    )
}

/// Makes calls with subscribers that keep up. The time includes delivering the events, but not reading them.
fn listened(runtime: &Runtime, ours: Ours, subscribers: usize) -> impl FnMut(u64) -> Duration {
    const CAPACITY: usize = 1 << 10;
    const CALLS_BETWEEN_READS: u64 = 16;
    let subscribe = |_| ours.executor.subscribe(Filter::default(), CAPACITY);
    let mut subscriptions: Vec<Subscription> = (0..subscribers).map(subscribe).collect();
    move |times| {
        let mut took = Duration::ZERO;
        for begun in (0..times).step_by(CALLS_BETWEEN_READS as usize) {
            took += timed(runtime, CALLS_BETWEEN_READS.min(times - begun), || ours.call());
            for subscription in &mut subscriptions {
                while subscription.try_next().is_some() {}
            }
        }
        took
    }
}

fn batches(effort: Effort, runtime: &Runtime) -> Measured {
    let (hand, ours) = (ByHand::new(), Ours::new(10));
    compete(
        effort,
        vec![
            Contestant::new(HAND_HUNDRED, |times| timed(runtime, times, || hand.hundred_spawned())),
            Contestant::new(HAND_TOGETHER, |times| timed(runtime, times, || hand.hundred_together())),
            Contestant::new(HUNDRED, |times| timed(runtime, times, || ours.hundred_in_a_batch())),
        ],
    )
}

fn tools(effort: Effort, runtime: &Runtime) -> Measured {
    let [ten, thousand, ten_thousand] = [10, 1_000, 10_000].map(Ours::new);
    compete(
        effort,
        vec![
            Contestant::new(TOOLS_10, |times| timed(runtime, times, || ten.call())),
            Contestant::new(TOOLS_1000, |times| timed(runtime, times, || thousand.call())),
            Contestant::new(TOOLS_10000, |times| timed(runtime, times, || ten_thousand.call())),
        ],
    )
}

fn memory() -> Result<Vec<Row>> {
    let [tool, call, task] = [Memory::Tools, Memory::Calls, Memory::Tasks].map(in_its_own_process);
    let (call, task) = (call?, task?);
    let row = |name: &str, ours| Row { name: name.into(), ours, floor: None, ratio: None, goal: None };
    let in_flight = Row {
        floor: Some(("bare task with timeout", Figure::Bytes(task))),
        ratio: Some(call / task),
        goal: Some(Goal::BytesAtMost(8.0 * 1024.0)),
        ..row("memory per call in flight", Figure::Bytes(call))
    };
    Ok(vec![in_flight, row("memory per registered tool", Figure::Bytes(tool?))])
}

/// Measures the memory in a new process. It has no freed memory to reuse, so its growth is the memory of the items.
fn in_its_own_process(memory: Memory) -> Result<f64> {
    let name = clap::ValueEnum::to_possible_value(&memory).context("every kind has a name")?;
    let program = std::env::current_exe().context("cannot find this program")?;
    let arguments = ["bench-inner", "engine", "--memory", name.get_name()];
    let output = std::process::Command::new(program).args(arguments).output().context("cannot start this program")?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| {
        format!("cannot measure the memory of {}: {}", name.get_name(), String::from_utf8_lossy(&output.stderr).trim())
    })
}

fn one_core() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_time().build()?)
}

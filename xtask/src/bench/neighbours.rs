//! Benchmark of noisy neighbours: how long a call takes alone, and beside another sandbox that runs a bomb under the
//! default limits of a call.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use tokio::runtime::Runtime;
use wieldy_core::{Executor, Options, ResourceLimits};
use wieldy_sandbox::{Native, NativeOptions};

use super::harness::{Spread, spread_of};
use super::sandbox::{call, executor};
use super::table::{Figure, Goal, Row};

const ALONE: &str = "alone";

/// The goal for the 95th percentile of a neighbour's call, as a multiple of the same call alone.
const RATIO_MAX: f64 = 3.0;

const BOMBS: [(&str, &str); 3] = [
    (
        "a call beside a fork bomb, p95",
        "exec python3 -c '
import os, time
first, end = os.getpid(), time.time() + 3
while time.time() < end:
    try: os.fork()
    except OSError: pass
os._exit(1)'",
    ),
    ("a call beside a memory bomb, p95", "exec python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'"),
    ("a call beside a flood of output, p95", "exec timeout 3 cat /dev/zero"),
];

/// Returns a row for each bomb.
pub(super) fn measure(quick: bool, runtime: &Runtime) -> Result<Vec<Row>> {
    let workspace = tempfile::tempdir()?;
    let native = Native::new(NativeOptions { warm_sandboxes: 0, ..NativeOptions::default() });
    let executor = executor(workspace.path(), native)?;
    let samples = if quick { 60 } else { 400 };
    let rows = BOMBS.map(|(name, script)| {
        let (alone, beside) = runtime.block_on(async {
            let alone = sampled(samples, &executor).await?;
            anyhow::Ok((alone, beside(samples, &executor, script).await?))
        })?;
        Ok(Row {
            name: name.to_owned(),
            ours: Figure::Time(beside),
            floor: Some((ALONE, Figure::Time(alone))),
            ratio: Some(beside.p95 / alone.p95),
            goal: Some(Goal::RatioAtMost(RATIO_MAX)),
        })
    });
    rows.into_iter().collect()
}

/// Measures the neighbour's calls while the bomb runs again and again.
async fn beside(samples: usize, executor: &Executor, script: &'static str) -> Result<Spread> {
    let over = Arc::new(AtomicBool::new(false));
    let bombing = tokio::spawn({
        let (executor, over) = (executor.clone(), Arc::clone(&over));
        async move {
            while !over.load(Ordering::Relaxed) {
                let mut bomb = call("Bomb", Some("bomber"));
                bomb.arguments = Arc::new(json!({"script": script}));
                let limits = ResourceLimits::DEFAULT;
                // The outcome does not matter here: the tests check it.
                executor.call(bomb.with(Options { limits, ..Options::default() })).await;
            }
        }
    });
    // Give the bomb time to start.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let sampled = sampled(samples, executor).await;
    over.store(true, Ordering::Relaxed);
    bombing.await?;
    sampled
}

/// Measures how long calls in the neighbour's sandbox take.
async fn sampled(samples: usize, executor: &Executor) -> Result<Spread> {
    let call = call("True", Some("neighbour"));
    executor.call(call.clone()).await;
    let mut took = Vec::with_capacity(samples);
    for _ in 0..samples {
        let began = Instant::now();
        let result = executor.call(call.clone()).await;
        ensure!(result.is_success(), "a neighbour's call failed: {:?}", result.error);
        took.push(began.elapsed().as_secs_f64() * 1e9);
    }
    Ok(spread_of(took))
}

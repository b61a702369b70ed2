//! Memory per item: the growth of resident memory after creating many of them, in a fresh process.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::Memory;
use super::floor::ARGUMENTS;
use super::ours::{NoOp, Ours};

/// The number of items to create, large enough that rounding by the allocator does not matter.
const COUNT: usize = 10_000;

/// Returns the bytes that one more item of this kind takes.
pub(super) fn measure(memory: Memory) -> Result<f64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        match memory {
            Memory::Tools => of_tools().await,
            Memory::Calls => of_calls().await,
            Memory::Tasks => of_tasks().await,
        }
    })
}

async fn of_tools() -> Result<f64> {
    let ours = Ours::new(1);
    ours.call().await;
    let before = resident_bytes()?;
    for number in 1..=COUNT {
        ours.executor.register(Arc::new(NoOp::numbered(number))).context("the tool cannot be registered")?;
    }
    per_thing(before)
}

async fn of_calls() -> Result<f64> {
    let ours = Ours::waiting();
    let _first = tokio::spawn(ours.endless_call());
    all_running(&ours, 1).await;
    let before = resident_bytes()?;
    let held: Vec<_> = (0..COUNT).map(|_| tokio::spawn(ours.endless_call())).collect();
    all_running(&ours, COUNT + 1).await;
    let each = per_thing(before);
    drop(held);
    each
}

async fn all_running(ours: &Ours, count: usize) {
    while (ours.executor.load().running as usize) < count {
        tokio::task::yield_now().await;
    }
}

/// Measures the floor: a task that holds its parsed arguments and a timer.
async fn of_tasks() -> Result<f64> {
    let spawn = |_| {
        tokio::spawn(async {
            let arguments: Value = serde_json::from_str(ARGUMENTS).expect("the arguments are a constant");
            let waited = tokio::time::timeout(Duration::from_secs(30), std::future::pending::<()>()).await;
            (arguments, waited)
        })
    };
    let _first = spawn(0);
    tokio::task::yield_now().await;
    let before = resident_bytes()?;
    let held: Vec<_> = (0..COUNT).map(spawn).collect();
    tokio::task::yield_now().await;
    let each = per_thing(before);
    drop(held);
    each
}

fn per_thing(before: f64) -> Result<f64> {
    Ok((resident_bytes()? - before) / COUNT as f64)
}

fn resident_bytes() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("memory is measured on Linux only")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("there is no VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().context("VmRSS is not a number")?;
    Ok(kib * 1024.0)
}

//! Benchmark of the journal: calls that are durable before they run and before they are answered, compared with the
//! same rows written by hand; queries to a large history; verification of the hash chain.
//!
//! The floor of a strict call writes the same rows by hand: one dedicated thread inserts and syncs the rows of the
//! opening before the call runs and those of the end after it, together with those of all other callers. A plain table
//! without a hash chain is measured for comparison only.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::runtime::Runtime;
use wieldy_core::{
    Call, Caller, Durability, Executor, Limits, Outcome, ResultRecording, SharedTool, Status, ToolSpec, tool,
};
use wieldy_store::{Address, JournalOptions, Query, Store};

use super::floor::{ARGUMENTS, schema};
use super::harness::{Spread, spread_of};
use super::journal_floor::{by_hand, new_database, plain_postgres, plain_table};
use super::journal_questions::questions;
use super::ours::{no_op, waiting};
use super::table::{Figure, Goal, Row};

/// The numbers of concurrent callers.
const CALLERS: [usize; 4] = [1, 16, 64, 256];
/// The sizes of answers that are recorded whole.
const ANSWERS: [usize; 2] = [4 * 1024, 64 * 1024];

pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let rounds = if quick { 3 } else { 9 };
    let span = Duration::from_millis(if quick { 300 } else { 700 });
    let folder = tempfile::tempdir_in(".").context("cannot make a folder to measure in")?;
    let (sync, twice) = sync_times(folder.path())?;
    let of_the_disk = |name: &str, ours, ratio| Row { name: name.into(), ours, floor: None, ratio, goal: None };
    let mut rows = vec![
        of_the_disk("write and sync of 4 KiB", Figure::Time(sync), None),
        // A strict call waits for two syncs at least, so no 99th percentile of calls can be lower.
        of_the_disk("the same twice: 99th percentile", Figure::Time(twice), Some(twice.p50 / sync.p50)),
    ];
    for callers in CALLERS {
        rows.extend(on_sqlite(&runtime, folder.path(), sync, callers, rounds, span)?);
    }
    for bytes in ANSWERS {
        rows.push(with_answers(&runtime, folder.path(), bytes, rounds, span)?);
    }
    rows.extend(on_postgres(&runtime, rounds, span)?);
    rows.push(verify(&runtime, folder.path(), if quick { 30_000 } else { 100_000 })?);
    rows.push(recovery(&runtime, folder.path())?);
    rows.extend(questions(&runtime, folder.path(), if quick { 100_000 } else { 1_000_000 })?);
    Ok(rows)
}

fn on_sqlite(
    runtime: &Runtime,
    folder: &Path,
    sync: Spread,
    callers: usize,
    rounds: usize,
    span: Duration,
) -> Result<Vec<Row>> {
    let [mut floors, mut plain, mut strict, mut relaxed] = [const { Vec::new() }; 4];
    let mut waits = Vec::new();
    for _ in 0..rounds {
        let place = tempfile::tempdir_in(folder)?;
        plain.push(plain_table(&place.path().join("plain.db"), callers, span)?);
        let ours = |name: &str, durability| {
            let address = Address::Sqlite(place.path().join(name));
            runtime.block_on(calls(&address, callers, durability, span, None))
        };
        let told = ours("strict.db", Durability::Strict)?;
        strict.push(told.per_second);
        waits.extend(told.latencies.iter().map(|wait| wait.as_secs_f64() * 1e9));
        relaxed.push(ours("relaxed.db", Durability::Relaxed)?.per_second);
        floors.push(by_hand(&place.path().join("strict.db"), &place.path().join("floor.db"), callers)?);
    }
    let ratio = median(strict.iter().zip(&floors).map(|(ours, floor)| ours / floor).collect());
    let p99 = ninety_ninth(&mut waits);
    Ok(vec![
        Row {
            name: format!("SQLite, strict, {callers} callers"),
            ours: Figure::PerSecond(median(strict)),
            floor: Some(("the same rows by hand", Figure::PerSecond(median(floors)))),
            ratio: Some(ratio),
            goal: match callers {
                1 => Some(Goal::RatioAtLeast(1.0 / 1.3)),
                256 => Some(Goal::RatioAtLeast(0.6)),
                _ => None,
            },
        },
        Row {
            name: format!("SQLite, strict, {callers} callers: how long a call takes, 99th percentile"),
            ours: Figure::Time(Spread { p50: p99, ..spread_of(waits) }),
            floor: Some(("sync", Figure::Time(sync))),
            ratio: Some(p99 / sync.p50),
            goal: (callers == 16).then_some(Goal::RatioAtMost(4.0)),
        },
        Row {
            goal: (callers == 256).then_some(Goal::PerSecondAtLeast(20_000.0)),
            ..rate(format!("SQLite, relaxed, {callers} callers"), relaxed)
        },
        rate(format!("SQLite, a plain table, {callers} callers: insert, sync, update, sync"), plain),
    ])
}

/// Measures calls whose answers have so many bytes, and are recorded whole.
fn with_answers(runtime: &Runtime, folder: &Path, bytes: usize, rounds: usize, span: Duration) -> Result<Row> {
    let (callers, mut ours, mut floors) = (256, Vec::new(), Vec::new());
    for _ in 0..rounds {
        let place = tempfile::tempdir_in(folder)?;
        let path = place.path().join("answers.db");
        let address = Address::Sqlite(path.clone());
        let told = runtime.block_on(calls(&address, callers, Durability::Strict, span, Some(bytes)))?;
        ours.push(told.per_second);
        floors.push(by_hand(&path, &place.path().join("floor.db"), callers)?);
    }
    let ratio = median(ours.iter().zip(&floors).map(|(ours, floor)| ours / floor).collect());
    Ok(Row {
        floor: Some(("the same rows by hand", Figure::PerSecond(median(floors)))),
        ratio: Some(ratio),
        goal: Some(Goal::RatioAtLeast(0.6)),
        ..rate(format!("SQLite, strict, {callers} callers, answers of {} KiB", bytes / 1024), ours)
    })
}

/// Returns a tool that answers with a text of so many bytes.
fn answering(bytes: usize) -> SharedTool {
    let lines =
        (0..).map(|number| format!("{number}: fn step_{number}(&self, call: &Call) -> Result<(), CallError> {{\n"));
    let mut text = String::new();
    for line in lines {
        text.push_str(&line);
        if text.len() >= bytes {
            break;
        }
    }
    text.truncate(bytes);
    let mut spec = ToolSpec::new(no_op_name(), "Answers").read_only();
    spec.input_schema = schema();
    Arc::new(tool(spec, move |_: Value, _run| {
        let answer = Outcome::text(text.clone());
        async { Ok(answer) }
    }))
}

fn rate(name: String, samples: Vec<f64>) -> Row {
    Row { name, ours: Figure::PerSecond(median(samples)), floor: None, ratio: None, goal: None }
}

/// Does the same with a PostgreSQL server.
fn on_postgres(runtime: &Runtime, rounds: usize, span: Duration) -> Result<Vec<Row>> {
    let server = crate::postgres::Server::start().context("cannot start a PostgreSQL server")?;
    let address = server.address();
    let mut rows = Vec::new();
    for callers in CALLERS {
        let [mut plain, mut strict, mut relaxed] = [const { Vec::new() }; 3];
        for _ in 0..rounds.min(5) {
            plain.push(runtime.block_on(plain_postgres(&address, callers, span))?);
            for (durability, samples) in [(Durability::Strict, &mut strict), (Durability::Relaxed, &mut relaxed)] {
                let url = runtime.block_on(new_database(&address))?;
                samples.push(runtime.block_on(calls(&url.parse()?, callers, durability, span, None))?.per_second);
            }
        }
        let ratio = median(strict.iter().zip(&plain).map(|(ours, floor)| ours / floor).collect());
        rows.push(Row {
            floor: Some(("a plain table", Figure::PerSecond(median(plain)))),
            ratio: Some(ratio),
            ..rate(format!("PostgreSQL, strict, {callers} callers"), strict)
        });
        rows.push(rate(format!("PostgreSQL, relaxed, {callers} callers"), relaxed));
    }
    Ok(rows)
}

/// Measures how long it takes to close 500 calls that were left open.
fn recovery(runtime: &Runtime, folder: &Path) -> Result<Row> {
    let mut samples = Vec::new();
    for round in 0..3 {
        let address = Address::Sqlite(folder.join(format!("recovery-{round}.db")));
        let store = Store::open(&address)?;
        let journal = Arc::new(store.journal(&JournalOptions::default())?);
        let mut builder = Executor::builder().tool(waiting());
        builder.limits =
            Limits { calls_running_max: u32::MAX, calls_running_per_agent_max: u32::MAX, ..Limits::default() };
        builder.journal = Arc::clone(&journal) as _;
        let executor = builder.build()?;
        runtime.block_on(async {
            for _ in 0..500 {
                executor.spawn(Call::new(no_op_name(), serde_json::from_str::<Value>(ARGUMENTS)?));
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
            journal.flush().await.map_err(anyhow::Error::from)
        })?;
        journal.abandon();
        let began = Instant::now();
        drop(store.journal(&JournalOptions::default())?);
        samples.push(began.elapsed().as_secs_f64() * 1e9);
        let open = store.search(&Query { status: Some(Status::Failed), ..Query::default() }, 1_000)?;
        anyhow::ensure!(open.executions.len() == 500, "{} calls were closed", open.executions.len());
        std::mem::forget(executor);
    }
    Ok(Row {
        name: "recovery of 500 calls that were left open".into(),
        ours: Figure::Time(spread_of(samples)),
        floor: None,
        ratio: None,
        goal: Some(Goal::TimeAtMost(1e9)),
    })
}

/// Only makes calls, for a profiler.
pub(super) fn spin(duration: Duration, durability: Durability) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let folder = tempfile::tempdir_in(".")?;
    let address = Address::Sqlite(folder.path().join("history.db"));
    let told = runtime.block_on(calls(&address, 256, durability, duration, None))?;
    println!("{:.0} calls per second", told.per_second);
    Ok(())
}

struct Told {
    per_second: f64,
    latencies: Vec<Duration>,
}

/// Has this many callers call a tool that does nothing, each one call after the other. With `answer_bytes` it answers
/// with so many bytes, which are recorded whole.
async fn calls(
    address: &Address,
    callers: usize,
    durability: Durability,
    span: Duration,
    answer_bytes: Option<usize>,
) -> Result<Told> {
    let journal = Arc::new(Store::open(address)?.journal(&JournalOptions::default())?);
    let mut builder = match answer_bytes {
        Some(bytes) => Executor::builder().tools([answering(bytes)]),
        None => Executor::builder().tool(no_op()),
    };
    if answer_bytes.is_some() {
        builder.results = ResultRecording::Whole;
    }
    builder.limits = Limits { calls_running_max: u32::MAX, calls_running_per_agent_max: u32::MAX, ..Limits::default() };
    builder.journal = Arc::clone(&journal) as _;
    builder.durability = durability;
    let executor = builder.build()?;
    let caller = Arc::new(Caller::local());
    let name = no_op_name();
    let began = Instant::now();
    let tasks: Vec<_> = (0..callers)
        .map(|_| {
            let (executor, caller, name) = (executor.clone(), Arc::clone(&caller), name.clone());
            tokio::spawn(async move {
                let mut latencies = Vec::new();
                while began.elapsed() < span {
                    let begun = Instant::now();
                    let arguments: Value = serde_json::from_str(ARGUMENTS).expect("good JSON");
                    let result = executor.call(Call::new(name.as_str(), arguments).by(Arc::clone(&caller))).await;
                    assert!(result.is_success(), "{result:?}");
                    latencies.push(begun.elapsed());
                    // Yield to the other callers, because a relaxed call never waits for the disk.
                    tokio::task::yield_now().await;
                }
                latencies
            })
        })
        .collect();
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await?);
    }
    // Answered calls count only once they are written.
    journal.flush().await?;
    Ok(Told { per_second: latencies.len() as f64 / began.elapsed().as_secs_f64(), latencies })
}

fn no_op_name() -> String {
    use wieldy_core::AnyTool;
    no_op().spec().name
}

fn sync_times(folder: &Path) -> Result<(Spread, Spread)> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(folder.join("sync"))?;
    let mut samples = Vec::new();
    for round in 0..2_000u64 {
        let began = Instant::now();
        file.write_all_at(&[round as u8; 4096], round * 4096)?;
        file.sync_data()?;
        samples.push(began.elapsed().as_secs_f64() * 1e9);
    }
    let mut twice: Vec<f64> = samples.chunks_exact(2).map(|pair| pair.iter().sum()).collect();
    let p99 = ninety_ninth(&mut twice);
    Ok((spread_of(samples), Spread { p50: p99, ..spread_of(twice) }))
}

/// Sorts the samples and returns the 99th percentile.
fn ninety_ninth(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[(samples.len() - 1) * 99 / 100]
}

/// Measures how many records per second are verified.
fn verify(runtime: &Runtime, folder: &Path, calls_wanted: usize) -> Result<Row> {
    let address = Address::Sqlite(folder.join("verify.db"));
    let span = Duration::from_secs_f64(calls_wanted as f64 / 20_000.0);
    runtime.block_on(calls(&address, 256, Durability::Relaxed, span, None))?;
    let store = Store::open(&address)?;
    let rates = (0..3).map(|_| {
        let began = Instant::now();
        let verdict = store.verify(&[], None, &mut |_| {})?;
        anyhow::ensure!(verdict.problem.is_none(), "the trail of the benchmark is not whole: {verdict:?}");
        Ok(verdict.records as f64 / began.elapsed().as_secs_f64())
    });
    Ok(Row {
        name: "audit verify, records per second".into(),
        ours: Figure::PerSecond(median(rates.collect::<Result<Vec<f64>>>()?)),
        floor: None,
        ratio: None,
        goal: Some(Goal::PerSecondAtLeast(200_000.0)),
    })
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

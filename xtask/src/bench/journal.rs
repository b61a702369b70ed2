//! The journal: calls that are on the disk before they run and before they are answered, against the same rows written by
//! hand; questions to a large history; the proof that it is whole.
//!
//! The floor of a strict call is the same rows by hand: those of its opening are inserted and synced before the call runs,
//! those of its end after it, together with those of all other callers, by one thread that does nothing else. Only for
//! comparison stands beside it what a plain table without a trail would cost.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rusqlite::{Connection, params};
use serde_json::Value;
use wieldy_core::{Call, Caller, Durability, Executor, Limits, Status};
use wieldy_store::{Address, GroupBy, JournalOptions, Query, Store};

use super::floor::ARGUMENTS;
use super::harness::{Spread, spread_of};
use super::ours::no_op;
use super::table::{Figure, Goal, Row};

/// How many callers there are at once.
const CALLERS: [usize; 4] = [1, 16, 64, 256];

pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let rounds = if quick { 3 } else { 9 };
    let span = Duration::from_millis(if quick { 300 } else { 700 });
    let folder = tempfile::tempdir_in(".").context("cannot make a folder to measure in")?;
    let sync = sync_time(folder.path())?;
    let mut rows = vec![Row {
        name: "write and sync of 4 KiB".into(),
        ours: Figure::Time(sync),
        floor: None,
        ratio: None,
        goal: None,
    }];
    for callers in CALLERS {
        let [mut floors, mut plain, mut strict, mut relaxed] = [const { Vec::new() }; 4];
        let mut waits = Vec::new();
        for _ in 0..rounds {
            let place = tempfile::tempdir_in(folder.path())?;
            plain.push(plain_table(&place.path().join("plain.db"), callers, span)?);
            let ours = |name: &str, durability| {
                let address = Address::Sqlite(place.path().join(name));
                runtime.block_on(calls(&address, callers, durability, span))
            };
            let told = ours("strict.db", Durability::Strict)?;
            strict.push(told.per_second);
            waits.extend(told.latencies);
            relaxed.push(ours("relaxed.db", Durability::Relaxed)?.per_second);
            floors.push(by_hand(&place.path().join("strict.db"), &place.path().join("floor.db"), callers)?);
        }
        let ratio = median(strict.iter().zip(&floors).map(|(ours, floor)| ours / floor).collect());
        rows.push(Row {
            name: format!("SQLite, strict, {callers} callers"),
            ours: Figure::PerSecond(median(strict)),
            floor: Some(("the same rows by hand", Figure::PerSecond(median(floors)))),
            ratio: Some(ratio),
            goal: match callers {
                1 => Some(Goal::RatioAtLeast(1.0 / 1.3)),
                256 => Some(Goal::RatioAtLeast(0.6)),
                _ => None,
            },
        });
        rows.push(Row {
            name: format!("a plain table, {callers} callers: insert, sync, update, sync"),
            ours: Figure::PerSecond(median(plain)),
            floor: None,
            ratio: None,
            goal: None,
        });
        let mut waits: Vec<f64> = waits.iter().map(|wait| wait.as_secs_f64() * 1e9).collect();
        waits.sort_by(f64::total_cmp);
        let p99 = waits[(waits.len() - 1) * 99 / 100];
        rows.push(Row {
            name: format!("SQLite, strict, {callers} callers: how long a call takes, 99th percentile"),
            ours: Figure::Time(Spread { p50: p99, ..spread_of(waits) }),
            floor: Some(("sync", Figure::Time(sync))),
            ratio: Some(p99 / sync.p50),
            goal: (callers == 16).then_some(Goal::RatioAtMost(4.0)),
        });
        rows.push(Row {
            name: format!("SQLite, relaxed, {callers} callers"),
            ours: Figure::PerSecond(median(relaxed)),
            floor: None,
            ratio: None,
            goal: (callers == 256).then_some(Goal::PerSecondAtLeast(20_000.0)),
        });
    }
    rows.push(verify(&runtime, folder.path(), if quick { 30_000 } else { 100_000 })?);
    rows.extend(questions(folder.path(), if quick { 100_000 } else { 1_000_000 })?);
    Ok(rows)
}

/// Only calls, for a profiler.
pub(super) fn spin(duration: Duration, durability: Durability) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let folder = tempfile::tempdir_in(".")?;
    let address = Address::Sqlite(folder.path().join("history.db"));
    let told = runtime.block_on(calls(&address, 256, durability, duration))?;
    println!("{:.0} calls per second", told.per_second);
    Ok(())
}

struct Told {
    per_second: f64,
    latencies: Vec<Duration>,
}

/// So many callers call a tool that does nothing, one call after the other.
async fn calls(address: &Address, callers: usize, durability: Durability, span: Duration) -> Result<Told> {
    let journal = Arc::new(Store::open(address)?.journal(&JournalOptions::default())?);
    let mut builder = Executor::builder().tool(no_op());
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
                    // Others want to call too, also where nobody has to wait for the disk.
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
    // What is answered and not yet written counts when it is.
    journal.flush().await?;
    Ok(Told { per_second: latencies.len() as f64 / began.elapsed().as_secs_f64(), latencies })
}

fn no_op_name() -> String {
    use wieldy_core::AnyTool;
    no_op().spec().name
}

/// Writes the rows of a history once more, as many calls together as there are callers: first what is known when they begin,
/// then what is known when they end.
fn by_hand(source: &Path, path: &Path, callers: usize) -> Result<f64> {
    drop(Store::open(&Address::Sqlite(path.to_owned()))?);
    let calls = read_calls(&Connection::open(source)?)?;
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "cache_size", -16_384)?;
    connection.pragma_update(None, "wal_autocheckpoint", 4_000)?;
    let began = Instant::now();
    for group in calls.chunks(callers) {
        let transaction = connection.transaction()?;
        for call in group {
            put(&transaction, EVENT, &call.events[0])?;
            put(&transaction, EVENT, &call.events[1])?;
            put(&transaction, OPENING, &call.opening)?;
        }
        transaction.commit()?;
        let transaction = connection.transaction()?;
        for call in group {
            put(&transaction, EVENT, &call.events[2])?;
            put(&transaction, ENDING, &call.ending)?;
        }
        transaction.commit()?;
    }
    Ok(calls.len() as f64 / began.elapsed().as_secs_f64())
}

type Values = Vec<rusqlite::types::Value>;

/// What a call left in a history.
struct Rows {
    events: Vec<Values>,
    opening: Values,
    ending: Values,
}

const EVENT: &str = "INSERT INTO events (seq, instance, instance_seq, at, name, execution, subject, data, hash)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
const OPENING: &str =
    "INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, started_at, agent_id,
    attempts, instance) VALUES (?1, ?2, ?3, ?4, 'running', ?5, ?6, 1, ?7)";
const ENDING: &str =
    "UPDATE tool_executions SET status = ?2, completed_at = ?3, duration_ms = ?4, output_size_bytes = ?5 WHERE id = ?1";

fn put(connection: &Connection, sql: &str, values: &Values) -> Result<()> {
    connection.prepare_cached(sql)?.execute(rusqlite::params_from_iter(values))?;
    Ok(())
}

/// The calls of a history that took three records, up to so many as do not take long.
fn read_calls(connection: &Connection) -> Result<Vec<Rows>> {
    let values = |row: &rusqlite::Row<'_>, from: usize, to: usize| (from..to).map(|column| row.get(column)).collect();
    let mut calls = Vec::new();
    let sql = "SELECT id, execution_id, tool_name, parameters_json, started_at, agent_id, instance,
        id, status, completed_at, duration_ms, output_size_bytes FROM tool_executions ORDER BY id LIMIT 10000";
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query([])?;
    let mut events = connection.prepare(
        "SELECT seq, instance, instance_seq, at, name, execution, subject, data, hash FROM events WHERE execution = ?1 ORDER BY seq",
    )?;
    while let Some(row) = rows.next()? {
        let id: i64 = row.get(0)?;
        let events = events.query_map([id], |row| values(row, 0, 9))?.collect::<rusqlite::Result<Vec<Values>>>()?;
        if events.len() == 3 {
            calls.push(Rows { events, opening: values(row, 0, 7)?, ending: values(row, 7, 12)? });
        }
    }
    Ok(calls)
}

/// A table as others have it, without a trail.
fn plain_table(path: &Path, callers: usize, span: Duration) -> Result<f64> {
    let mut connection = Connection::open(path)?;
    connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "cache_size", -16_384)?;
    connection.pragma_update(None, "wal_autocheckpoint", 4_000)?;
    connection.execute_batch(
        "CREATE TABLE tool_executions (id INTEGER PRIMARY KEY, execution_id TEXT NOT NULL, tool_name TEXT NOT NULL,
           parameters_json TEXT, status TEXT NOT NULL, error_message TEXT, error_code TEXT, started_at INTEGER NOT NULL,
           completed_at INTEGER, duration_ms REAL, output_size_bytes INTEGER, sandbox_id TEXT, agent_id TEXT, user_id TEXT,
           batch_id TEXT, metadata_json TEXT);
         CREATE UNIQUE INDEX e ON tool_executions (execution_id);
         CREATE INDEX t ON tool_executions (tool_name);
         CREATE INDEX s ON tool_executions (started_at DESC);
         CREATE INDEX u ON tool_executions (status);
         CREATE INDEX b ON tool_executions (batch_id);",
    )?;
    let (began, mut calls) = (Instant::now(), 0);
    while began.elapsed() < span {
        let group: Vec<i64> = (calls..calls + callers as i64).collect();
        let transaction = connection.transaction()?;
        {
            let mut insert = transaction.prepare_cached(
                "INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, started_at, agent_id)
                 VALUES (?1, ?2, 'no_op', ?3, 'running', ?4, 'local')",
            )?;
            for id in &group {
                insert.execute(params![id, format!("{id:032x}0000"), ARGUMENTS, 1_700_000_000_000_000 + id])?;
            }
        }
        transaction.commit()?;
        let transaction = connection.transaction()?;
        {
            let mut update = transaction.prepare_cached(
                "UPDATE tool_executions SET status = 'success', completed_at = ?2, duration_ms = 0.1, output_size_bytes = 245
                 WHERE id = ?1",
            )?;
            for id in &group {
                update.execute(params![id, 1_700_000_000_000_100 + id])?;
            }
        }
        transaction.commit()?;
        calls += callers as i64;
    }
    Ok(calls as f64 / began.elapsed().as_secs_f64())
}

fn sync_time(folder: &Path) -> Result<Spread> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(folder.join("sync"))?;
    let mut samples = Vec::new();
    for round in 0..200u64 {
        let began = Instant::now();
        file.write_all_at(&[round as u8; 4096], round * 4096)?;
        file.sync_data()?;
        samples.push(began.elapsed().as_secs_f64() * 1e9);
    }
    Ok(spread_of(samples))
}

/// How many records a second are proved.
fn verify(runtime: &tokio::runtime::Runtime, folder: &Path, calls_wanted: usize) -> Result<Row> {
    let address = Address::Sqlite(folder.join("verify.db"));
    let span = Duration::from_secs_f64(calls_wanted as f64 / 20_000.0);
    runtime.block_on(calls(&address, 256, Durability::Relaxed, span))?;
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

/// How long questions to a large history take.
fn questions(folder: &Path, calls: usize) -> Result<Vec<Row>> {
    let path = folder.join("many.db");
    let store = Store::open(&Address::Sqlite(path.clone()))?;
    eprintln!("making a history of {calls} calls…");
    let sql =
        include_str!("../../../crates/wieldy-store/tests/data/many_calls.sql").replace("CALLS", &calls.to_string());
    Connection::open(&path)?.execute_batch(&sql)?;
    let text = |text: &str| Some(text.to_owned());
    let first = store.search(&Query::default(), 1)?.executions.remove(0);
    let middle = store.search(&Query { tool: text("tool_7"), ..Query::default() }, 1000)?;
    let queries = [
        ("the last 20", Query::default()),
        ("by tool", Query { tool: text("tool_7"), ..Query::default() }),
        ("by status", Query { status: Some(Status::Timeout), ..Query::default() }),
        (
            "by tool and status",
            Query { tool: text("tool_7"), status: Some(Status::PermissionDenied), ..Query::default() },
        ),
        ("by session", Query { session: text("session_17"), ..Query::default() }),
        ("by agent and tenant", Query { agent: text("agent_6"), tenant: text("tenant_6"), ..Query::default() }),
        ("by a word", Query { text: text("word77"), ..Query::default() }),
        ("by common words", Query { text: text("quick fox"), ..Query::default() }),
        ("by word and tool", Query { text: text("file_77"), tool: text("tool_7"), ..Query::default() }),
        ("by something that is not there", Query { text: text("nowhere"), ..Query::default() }),
        ("since a day in the middle", Query { since: Some(middle.executions[999].started_at), ..Query::default() }),
        ("a page in the middle", Query { cursor: middle.next, ..Query::default() }),
    ];
    let mut rows = Vec::new();
    let mut ask = |name: &str, question: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let mut samples = Vec::new();
        for _ in 0..21 {
            let began = Instant::now();
            question()?;
            samples.push(began.elapsed().as_secs_f64() * 1e9);
        }
        rows.push(Row {
            name: format!("{calls} calls: {name}"),
            ours: Figure::Time(spread_of(samples)),
            floor: None,
            ratio: None,
            goal: Some(Goal::TimeAtMost(50e6)),
        });
        Ok(())
    };
    for (name, query) in &queries {
        ask(name, &mut || store.search(query, 20).map(drop).map_err(Into::into))?;
    }
    let id = first.execution_id.parse().context("an id")?;
    ask("one call with its events", &mut || store.show(id).map(drop).map_err(Into::into))?;
    for (name, by) in [("by tool", GroupBy::Tool), ("by day", GroupBy::Day)] {
        ask(&format!("statistics {name}"), &mut || store.stats(&Query::default(), by).map(drop).map_err(Into::into))?;
    }
    Ok(rows)
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

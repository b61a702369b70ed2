//! The floor of the journal: recording calls by hand.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use rusqlite::{Connection, params};
use tokio_postgres::NoTls;
use wieldy_store::{Address, Store};

use super::floor::ARGUMENTS;

/// Writes the rows of a history again, in groups of as many calls as there are callers: first the rows of their
/// opening, then those of their end.
pub(super) fn by_hand(source: &Path, path: &Path, callers: usize) -> Result<f64> {
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
            if let Some(result) = &call.result {
                put(&transaction, RESULT, result)?;
            }
        }
        transaction.commit()?;
    }
    Ok(calls.len() as f64 / began.elapsed().as_secs_f64())
}

type Values = Vec<rusqlite::types::Value>;

/// The rows of one call in a history.
struct Rows {
    events: Vec<Values>,
    opening: Values,
    ending: Values,
    result: Option<Values>,
}

const EVENT: &str = "INSERT INTO events (seq, instance, instance_seq, at, name, execution, subject, data, hash)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
const OPENING: &str =
    "INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, started_at, agent_id,
    attempts, instance) VALUES (?1, ?2, ?3, ?4, 'running', ?5, ?6, 1, ?7)";
const ENDING: &str =
    "UPDATE tool_executions SET status = ?2, completed_at = ?3, duration_ms = ?4, output_size_bytes = ?5 WHERE id = ?1";

const RESULT: &str = "INSERT INTO results (id, result_json) VALUES (?1, ?2)";

fn put(connection: &Connection, sql: &str, values: &Values) -> Result<()> {
    connection.prepare_cached(sql)?.execute(rusqlite::params_from_iter(values))?;
    Ok(())
}

/// Returns the calls of a history that have three records, limited to a number that does not take long.
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
    let mut results = connection.prepare("SELECT id, result_json FROM results WHERE id = ?1")?;
    while let Some(row) = rows.next()? {
        let id: i64 = row.get(0)?;
        let events = events.query_map([id], |row| values(row, 0, 9))?.collect::<rusqlite::Result<Vec<Values>>>()?;
        if events.len() == 3 {
            let result = results.query_map([id], |row| values(row, 0, 2))?.next().transpose()?;
            calls.push(Rows { events, opening: values(row, 0, 7)?, ending: values(row, 7, 12)?, result });
        }
    }
    Ok(calls)
}

/// Measures an ordinary table without a hash chain.
pub(super) fn plain_table(path: &Path, callers: usize, span: Duration) -> Result<f64> {
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

pub(super) async fn connect(url: &str) -> Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Returns the address of a new database on a server.
pub(super) async fn new_database(server: &str) -> Result<String> {
    let name = format!("bench_{}_{}", std::process::id(), next());
    connect(server).await?.batch_execute(&format!("CREATE DATABASE {name}")).await?;
    let (base, _) = server.rsplit_once('/').unwrap_or((server, ""));
    Ok(format!("{base}/{name}"))
}

fn next() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Measures an ordinary table on a server, with one statement for all openings and one for all ends.
pub(super) async fn plain_postgres(server: &str, callers: usize, span: Duration) -> Result<f64> {
    let client = connect(&new_database(server).await?).await?;
    client
        .batch_execute(
            "CREATE TABLE calls (id bigint PRIMARY KEY, execution_id text NOT NULL, tool_name text NOT NULL,
               parameters_json text, status text NOT NULL, error_message text, error_code text,
               started_at timestamptz NOT NULL, completed_at timestamptz, duration_ms double precision,
               output_size_bytes bigint, sandbox_id text, agent_id text, user_id text, batch_id text, metadata_json text);
             CREATE UNIQUE INDEX ON calls (execution_id);
             CREATE INDEX ON calls (tool_name);
             CREATE INDEX ON calls (started_at DESC);
             CREATE INDEX ON calls (status);
             CREATE INDEX ON calls (batch_id);",
        )
        .await?;
    let open = client
        .prepare(
            "INSERT INTO calls (id, execution_id, tool_name, parameters_json, status, started_at, agent_id)
             SELECT id, name, 'no_op', arguments, 'running', now(), 'local'
             FROM unnest($1::bigint[], $2::text[], $3::text[]) AS r (id, name, arguments)",
        )
        .await?;
    let close = client
        .prepare(
            "UPDATE calls SET status = 'success', completed_at = now(), duration_ms = 0.1, output_size_bytes = 245
             WHERE id = ANY($1::bigint[])",
        )
        .await?;
    let (began, mut calls) = (Instant::now(), 0);
    while began.elapsed() < span {
        let ids: Vec<i64> = (calls..calls + callers as i64).collect();
        let names: Vec<String> = ids.iter().map(|id| format!("{id:032x}0000")).collect();
        client.execute(&open, &[&ids, &names, &vec![ARGUMENTS; callers]]).await?;
        client.execute(&close, &[&ids]).await?;
        calls += callers as i64;
    }
    Ok(calls as f64 / began.elapsed().as_secs_f64())
}

//! Questions to a large history, on both databases.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use rusqlite::Connection;
use tokio::runtime::Runtime;
use wieldy_core::Status;
use wieldy_store::{Address, GroupBy, Query, Store};

use super::harness::spread_of;
use super::journal_floor::{connect, new_database};
use super::table::{Figure, Goal, Row};

/// Measures how long queries to a large history take.
pub(super) fn questions(runtime: &Runtime, folder: &Path, calls: usize) -> Result<Vec<Row>> {
    let path = folder.join("many.db");
    let store = Store::open(&Address::Sqlite(path.clone()))?;
    eprintln!("making a history of {calls} calls…");
    let sql =
        include_str!("../../../crates/wieldy-store/tests/data/many_calls.sql").replace("CALLS", &calls.to_string());
    let connection = Connection::open(&path)?;
    connection.execute_batch(&sql)?;
    connection.execute_batch(&entries(|hash| format!("x'{hash}'")))?;
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
        rows.push(asked(format!("{calls} calls: {name}"), question)?);
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
    rows.extend(questions_for_metadata(&store, &format!("{calls} calls"))?);

    let server = crate::postgres::Server::start().context("cannot start a PostgreSQL server")?;
    let url = runtime.block_on(new_database(&server.address()))?;
    let store = Store::open(&url.parse()?)?;
    let sql = include_str!("../../../crates/wieldy-store/tests/data/many_calls_postgres.sql");
    let sql = sql.replace("CALLS", &calls.to_string()) + &entries(|hash| format!("decode('{hash}', 'hex')"));
    runtime.block_on(async {
        connect(&url)
            .await?
            .batch_execute(&format!("SET search_path = agent_tools; {sql}"))
            .await
            .map_err(anyhow::Error::from)
    })?;
    rows.extend(questions_for_metadata(&store, &format!("PostgreSQL, {calls} calls"))?);
    Ok(rows)
}

/// Returns statements that give entries of metadata to the calls: to all of them, to one of a thousand, and to one of a
/// hundred of other tools than `tool_7`.
fn entries(bytes: impl Fn(&str) -> String) -> String {
    let insert = |(name, value, condition): (&str, &str, &str)| {
        let mut text = (name.len() as u64).to_le_bytes().to_vec();
        text.extend([name, value].concat().bytes());
        let hash = bytes(&blake3::hash(&text).to_hex()[..32]);
        format!(
            "INSERT INTO metadata_entries (entry, execution) SELECT {hash}, id FROM tool_executions WHERE {condition};\n"
        )
    };
    let all = [("all", "yes", "true"), ("run", "7", "id % 1000 = 7"), ("branch", "main", "id % 100 = 3")];
    all.map(insert).concat() + "ANALYZE;\n"
}

/// Measures how long queries for metadata take.
fn questions_for_metadata(store: &Store, of: &str) -> Result<Vec<Row>> {
    let text = |text: &str| Some(text.to_owned());
    let with = |entries: &[(&str, &str)]| {
        let entries = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Query { metadata: entries.collect(), ..Query::default() }
    };
    let (all, run) = (("all", "yes"), ("run", "7"));
    let queries = [
        ("on all calls", with(&[all])),
        ("on few calls", with(&[run])),
        ("common and rare", with(&[all, run])),
        ("rare and common", with(&[run, all])),
        ("common and missing", with(&[all, ("run", "8")])),
        ("missing and common", with(&[("run", "8"), all])),
        ("common, by tool", Query { tool: text("tool_7"), ..with(&[all]) }),
        ("common, by a tool that is not there", Query { tool: text("nope"), ..with(&[all]) }),
        ("by a tool that never has it", Query { tool: text("tool_7"), ..with(&[("branch", "main")]) }),
        ("common, by session", Query { session: text("session_17"), ..with(&[all]) }),
    ];
    let ask = |(name, query): &(&str, Query)| {
        let question = &mut || store.search(query, 20).map(drop).map_err(Into::into);
        asked(format!("{of}: by metadata {name}"), question)
    };
    queries.iter().map(ask).collect()
}

/// Measures a question, which may take 50 ms.
fn asked(name: String, question: &mut dyn FnMut() -> Result<()>) -> Result<Row> {
    let mut samples = Vec::new();
    for _ in 0..21 {
        let began = Instant::now();
        question()?;
        samples.push(began.elapsed().as_secs_f64() * 1e9);
    }
    Ok(Row {
        name,
        ours: Figure::Time(spread_of(samples)),
        floor: None,
        ratio: None,
        goal: Some(Goal::TimeAtMost(50e6)),
    })
}

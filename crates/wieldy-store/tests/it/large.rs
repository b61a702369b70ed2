//! Queries of a history with a million calls: the results are right, and none needs a full scan.

use std::collections::HashSet;

use wieldy_core::Status;
use wieldy_store::{GroupBy, Query};

use crate::world::TestHistory;

/// The number of calls in the history: a million, or fewer in a short run.
fn calls() -> usize {
    wieldy_testkit::count(200_000, 1_000_000)
}

/// Returns all calls that a query finds, page by page.
fn all(history: &TestHistory, query: Query) -> Vec<String> {
    let (store, mut query, mut found) = (history.store(), query, Vec::new());
    loop {
        let page = store.search(&query, 1_000).unwrap();
        found.extend(page.executions.into_iter().map(|call| call.execution_id));
        query.cursor = page.next;
        if query.cursor.is_none() {
            return found;
        }
    }
}

#[test]
fn a_million_calls_are_asked_about() {
    let history = TestHistory::sqlite();
    drop(history.store());
    let connection = rusqlite::Connection::open(history.folder.path().join("history.db")).unwrap();
    connection.execute_batch("PRAGMA synchronous = off").unwrap();
    let sql = include_str!("../data/many_calls.sql").replace("CALLS", &calls().to_string());
    connection.execute_batch(&sql).unwrap();
    drop(connection);
    many_calls_are_asked_about(&history, "SCAN tool_executions");
}

#[test]
fn a_million_calls_on_postgres_are_asked_about() {
    let Some(history) = TestHistory::postgres() else { return };
    drop(history.store());
    history.sql(&include_str!("../data/many_calls_postgres.sql").replace("CALLS", &calls().to_string()));
    many_calls_are_asked_about(&history, "Seq Scan on tool_executions");
}

fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

/// Returns a query for calls with these entries of metadata.
fn with(entries: &[(&str, &str)]) -> Query {
    let entries = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Query { metadata: entries.collect(), ..Query::default() }
}

/// Returns the hash of an entry, as the database writes bytes.
fn entry(history: &TestHistory, name: &str, value: &str) -> String {
    let mut bytes = (name.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(name.as_bytes());
    bytes.extend_from_slice(value.as_bytes());
    let hex = &blake3::hash(&bytes).to_hex()[..32];
    if history.is_postgres() { format!("decode('{hex}', 'hex')") } else { format!("x'{hex}'") }
}

/// Checks results and query plans; `scan` is the database's word for a full scan.
fn many_calls_are_asked_about(history: &TestHistory, scan: &str) {
    let (store, calls) = (history.store(), calls());
    let count = |query: Query| {
        let found = all(history, query);
        let different: HashSet<&String> = found.iter().collect();
        assert_eq!(different.len(), found.len(), "no page repeats another");
        found.len()
    };
    let counted = |condition: &str| {
        let sql = format!("SELECT count(*) FROM tool_executions WHERE {condition}");
        let told = history.sql(&sql).remove(0).remove(0);
        told.chars().filter(char::is_ascii_digit).collect::<String>().parse::<usize>().unwrap()
    };
    for (name, value, condition) in [("all", "yes", "1 = 1"), ("run", "7", "id % 1000 = 7")] {
        let entry = entry(history, name, value);
        history.sql(&format!(
            "INSERT INTO metadata_entries (entry, execution) SELECT {entry}, id FROM tool_executions WHERE {condition}"
        ));
    }
    assert_eq!(count(with(&[("run", "7")])), counted("id % 1000 = 7"));
    assert_eq!(count(with(&[("run", "7"), ("all", "yes")])), counted("id % 1000 = 7"));
    assert_eq!(count(with(&[("all", "yes"), ("run", "7")])), counted("id % 1000 = 7"));
    assert_eq!(count(with(&[("run", "8")])), 0);
    let of_tool = Query { tool: some("tool_7"), ..with(&[("run", "7")]) };
    assert_eq!(count(of_tool), counted("tool_name = 'tool_7' AND id % 1000 = 7"));
    let nope = Query { tool: some("nope"), ..with(&[("all", "yes")]) };
    assert_eq!(count(nope.clone()), 0);
    let of_session = Query { session: some("session_17"), ..with(&[("all", "yes")]) };
    assert_eq!(count(of_session.clone()), 500);
    let tools_session = Query { tool: some("tool_7"), ..of_session.clone() };
    assert_eq!(count(tools_session), counted("tool_name = 'tool_7' AND session_id = 'session_17'"));
    let often = Query { tool: some("tool_7"), ..with(&[("all", "yes")]) };
    assert_eq!(count(often.clone()), calls / 50);
    let last = store.search(&Query { cursor: Some("51".parse().unwrap()), ..often.clone() }, 20).unwrap();
    assert_eq!((last.executions.len(), last.next), (1, None));
    let since = store.search(&Query::default(), 10).unwrap().executions[9].started_at;
    assert_eq!(count(Query { since: Some(since), ..with(&[("all", "yes")]) }), 10);
    let both = store.stats(&with(&[("all", "yes"), ("run", "7")]), GroupBy::Tool).unwrap();
    assert_eq!(both.iter().map(|stat| stat.count).sum::<i64>() as usize, counted("id % 1000 = 7"));
    let word = Query { text: some("quick"), ..with(&[("run", "7")]) };
    assert_eq!(count(word), counted("id % 1000 = 7 AND parameters_json LIKE '%quick%'"));
    assert_eq!(store.search(&with(&[("all", "yes")]), 20).unwrap().executions.len(), 20);
    assert_eq!(count(Query { session: some("session_17"), ..Query::default() }), 500);
    assert_eq!(count(Query { tool: some("tool_7"), ..Query::default() }), calls / 50);
    let timeouts = Query { status: Some(Status::Timeout), ..Query::default() };
    assert_eq!(count(timeouts), counted("status = 'timeout'"));
    let both = Query { tool: some("tool_7"), status: Some(Status::Failed), ..Query::default() };
    assert_eq!(count(both), counted("tool_name = 'tool_7' AND status = 'failed'"));
    let theirs = Query { agent: some("agent_6"), tenant: some("tenant_6"), ..Query::default() };
    assert_eq!(count(theirs), counted("agent_id = 'agent_6' AND tenant_id = 'tenant_6'"));
    let nobodys = Query { agent: some("agent_6"), tenant: some(""), ..Query::default() };
    assert_eq!(count(nobodys), counted("agent_id = 'agent_6' AND tenant_id IS NULL"));
    let word = Query { text: some("word77"), ..Query::default() };
    let begins = "parameters_json LIKE '%fn word77\"%' OR parameters_json LIKE '%fn word77_\"%'";
    assert_eq!(count(word), counted(begins), "words that begin so, and no others");
    assert_eq!(count(Query { text: some("nowhere"), ..Query::default() }), 0);
    // A prefix of few words, of many words, and of a word that is almost everywhere.
    let begun = |text: &str| Query { text: some(text), session: some("session_17"), ..Query::default() };
    assert_eq!(count(begun("word7")), counted("session_id = 'session_17' AND parameters_json LIKE '%fn word7%'"));
    let of_tool = Query { text: some("word7"), tool: some("tool_7"), ..Query::default() };
    assert_eq!(count(of_tool), counted("tool_name = 'tool_7' AND parameters_json LIKE '%fn word7%'"));
    let both = Query { text: some("QUIC word77"), ..Query::default() };
    assert_eq!(count(both), counted(&format!("parameters_json LIKE '%quick%' AND ({begins})")));
    let apart = Query { text: some("quick fox"), tool: some("tool_7"), ..Query::default() };
    assert_eq!(count(apart), counted("tool_name = 'tool_7' AND parameters_json LIKE '%quick%fox%'"));
    let last = store.search(&Query { text: some("fo"), ..Query::default() }, 3).unwrap();
    assert_eq!(last.executions.len(), 3);
    let ends = Query { text: some("fo"), cursor: Some("4".parse().unwrap()), ..Query::default() };
    assert_eq!(store.search(&ends, 10).unwrap().executions.len(), 3);

    // The last page ends with the first call.
    let first = Query { cursor: Some("21".parse().unwrap()), ..Query::default() };
    let page = store.search(&first, 20).unwrap();
    assert_eq!((page.executions.len(), page.next), (20, None));
    let since = page.executions[0].started_at;
    let before = Query { until: Some(since), ..Query::default() };
    assert_eq!(count(before), 19);

    let stats = store.stats(&Query::default(), GroupBy::Tool).unwrap();
    assert_eq!((stats.len(), stats.iter().map(|stat| stat.count).sum::<i64>()), (50, calls as i64));
    let errors: i64 = stats.iter().map(|stat| stat.errors).sum();
    assert_eq!(errors as usize, counted("status <> 'success'"));

    // All of them, counted one by one.
    let quick = Query { text: some("quick"), ..Query::default() };
    let stats = store.stats(&quick, GroupBy::Day).unwrap();
    assert_eq!(stats.iter().map(|stat| stat.count).sum::<i64>() as usize, counted("parameters_json LIKE '%quick%'"));
    assert!(stats.iter().map(|stat| stat.count).sum::<i64>() > calls as i64 / 5);

    // No query needs a full scan.
    let questions = [
        Query { session: some("session_17"), ..Query::default() },
        Query { tool: some("tool_7"), ..Query::default() },
        Query { status: Some(Status::Timeout), ..Query::default() },
        Query { agent: some("agent_6"), tenant: some("tenant_6"), ..Query::default() },
        Query { batch: some("batch-7"), ..Query::default() },
        Query { text: some("word77"), ..Query::default() },
        with(&[("all", "yes")]),
        with(&[("run", "7")]),
        with(&[("run", "8")]),
        with(&[("all", "yes"), ("run", "8")]),
        with(&[("run", "8"), ("all", "yes")]),
        nope.clone(),
        of_session.clone(),
        often.clone(),
        Query { since: Some(since), ..with(&[("all", "yes")]) },
        Query { text: some("word7"), tool: some("tool_7"), ..Query::default() },
        Query { text: some("word7"), session: some("session_17"), ..Query::default() },
    ];
    for question in questions {
        for cursor in [None, Some((calls / 2).to_string().parse().unwrap())] {
            let question = Query { cursor, ..question.clone() };
            for plan in store.plans(&question, 20).unwrap() {
                assert!(plan.contains("tool_executions") && !plan.contains(scan), "{question:?}: {plan}");
            }
        }
    }

    // The rarest condition leads: the other entry and the rows of calls are looked up.
    let plan = |query: &Query| store.plans(query, 20).unwrap().concat();
    for (query, index) in [(&nope, "tool_name"), (&of_session, "session_id")] {
        let led = format!("ix_tool_executions_{index}");
        assert!(plan(query).contains(&led), "{query:?}: {}", plan(query));
    }
    let orders = [[("all", "yes"), ("run", "8")], [("run", "8"), ("all", "yes")]].map(|entries| plan(&with(&entries)));
    assert_eq!(orders[0], orders[1], "the order of entries does not matter");
}

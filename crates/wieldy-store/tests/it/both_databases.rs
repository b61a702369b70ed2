//! Both databases give the same answers about the same calls.

use jiff::Timestamp;
use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Code};
use wieldy_store::{GroupBy, Query, Store};
use wieldy_testkit::{Act, Puppet};

use crate::world::{TestHistory, executor};

/// Returns the answers to all queries that depend only on the history's content.
fn everything(store: &Store) -> Value {
    let find = |query: &Query| {
        let page = store.search(query, 3).unwrap();
        let next = Query { cursor: page.next, ..query.clone() };
        json!([page, page.next.map(|_| store.search(&next, 3).unwrap())])
    };
    let text = |text: &str| find(&Query { text: Some(text.into()), ..Query::default() });
    let words = [
        "file",
        "FILE.txt",
        "fi le",
        "some other",
        "Straße",
        "strasse",
        "café",
        "cafe",
        "no_such",
        "a.b/c-d",
        "!",
        "'",
        ":* | x",
        "\\",
        "ünï",
        "42",
        "日本",
        "boom",
    ];
    let of = |query: Query| find(&query);
    let agent = Query { agent: Some("ann".into()), ..Query::default() };
    let named = [
        of(Query::default()),
        of(agent.clone()),
        of(Query { tool: Some("write".into()), ..Query::default() }),
        of(Query { status: Some(wieldy_core::Status::Failed), ..Query::default() }),
        of(Query { tenant: Some(String::new()), ..Query::default() }),
        of(Query { tenant: Some("acme".into()), session: Some("s1".into()), ..Query::default() }),
        of(Query { since: Some(Timestamp::now()), ..Query::default() }),
        of(Query { until: Some(Timestamp::now()), ..Query::default() }),
    ];
    let shown: Vec<_> = store
        .search(&Query::default(), 100)
        .unwrap()
        .executions
        .iter()
        .map(|call| json!(store.show(call.execution_id.parse().unwrap()).unwrap()))
        .collect();
    let stats = [GroupBy::Tool, GroupBy::Day, GroupBy::ToolAndDay]
        .map(|by| json!([store.stats(&Query::default(), by).unwrap(), store.stats(&agent, by).unwrap()]));
    let durations: std::collections::BTreeMap<_, _> = store.durations(5).unwrap().into_iter().collect();
    let verdict = store.verify(&[], None, &mut |_| ()).unwrap();
    json!({"text": words.map(|word| json!([word, text(word)])), "named": named, "shown": shown, "stats": stats,
           "durations": durations, "verdict": verdict})
}

async fn fill(store: &Store) {
    let tools = [
        Puppet::reading("read", Act::Echo),
        Puppet::writing("write", Act::Echo),
        Puppet::reading("break", Act::Fail(Code::ToolReportedError, false)),
    ];
    let (executor, journal) = executor(store, tools);
    let arguments = [
        json!({"path": "some/file.txt", "size": 42}),
        json!({"path": "other_Files/a.b/c-d", "text": "Some 'quoted' \\ text: a|b & c"}),
        json!({"text": "Straße CAFÉ Ünïcode 日本語 \u{0}zero", "long": "x".repeat(5000)}),
        json!({}),
    ];
    for (number, arguments) in arguments.iter().enumerate() {
        for tool in ["read", "write", "break", "no\u{0}such"] {
            let mut call = Call::new(tool, arguments.clone());
            call.caller = match number % 2 {
                0 => Caller::agent("ann").into(),
                _ => Caller { tenant: Some("acme".into()), session: Some("s1".into()), ..Caller::agent("bob") }.into(),
            };
            executor.call(call).await;
        }
    }
    journal.flush().await.unwrap();
}

// Shows: D9.1
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_on_another_database_gives_the_same_answers() {
    let Some(server) = TestHistory::postgres() else { return };
    let (file, back) = (TestHistory::sqlite(), TestHistory::sqlite());
    fill(&file.store()).await;
    let copied = file.store().copy_to(&server.store()).unwrap();
    assert_eq!(server.store().copy_to(&back.store()).unwrap(), copied);
    let expected = everything(&file.store());
    let count = |text: &str| {
        let query = Query { text: Some(text.into()), ..Query::default() };
        file.store().search(&query, 100).unwrap().executions.len()
    };
    let counts = ["file", "FILE.txt", "some other", "Straße", "strasse", "café", "cafe", "日本", "42", "!"].map(count);
    assert_eq!(counts, [8, 4, 4, 4, 0, 4, 0, 4, 4, 0]);
    assert_eq!(expected["verdict"]["problem"], Value::Null);
    assert_eq!(expected["verdict"]["executions"], 16);
    for (history, name) in [(&server, "PostgreSQL"), (&back, "SQLite again")] {
        let found = everything(&history.store());
        for part in ["text", "named", "shown", "stats", "durations", "verdict"] {
            assert_eq!(found[part], expected[part], "{part}, {name}");
        }
    }
    // An executor that writes to a copy continues its numbers.
    fill(&server.store()).await;
    let verdict = server.store().verify(&[], None, &mut |_| ()).unwrap();
    assert_eq!((verdict.problem, verdict.executions), (None, 32));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_postgres_history_gives_the_same_answers() {
    let Some(server) = TestHistory::postgres() else { return };
    fill(&server.store()).await;
    let file = TestHistory::sqlite();
    server.store().copy_to(&file.store()).unwrap();
    assert_eq!(everything(&file.store()), everything(&server.store()));
}

//! The caller's metadata: stored without secrets, and found by its first entries.

use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::Call;
use wieldy_store::{GroupBy, Query, Retention};
use wieldy_testkit::{Act, Puppet};

use crate::world::{LiveExecutor, TestHistory};

on_each_database!(
    metadata_is_stored_under_one_key_and_found,
    the_deepest_metadata_can_be_proven,
    entries_go_with_their_calls,
    a_copy_finds_the_same_calls,
);

fn living(history: &TestHistory) -> LiveExecutor {
    history.executor([Puppet::writing("write", Act::Echo)])
}

async fn write(living: &LiveExecutor, n: usize, metadata: Value) {
    let call = Call::new("write", json!({ "n": n })).metadata(metadata);
    assert!(living.executor.call(call).await.is_success());
}

fn with(entries: &[(&str, &str)]) -> Query {
    let entries = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Query { metadata: entries.collect(), ..Query::default() }
}

/// Returns the numbers of the calls that a query finds, the latest first.
fn found(history: &TestHistory, query: &Query) -> Vec<u64> {
    let page = history.store().search(query, 100).unwrap();
    page.executions.into_iter().map(|call| call.parameters.unwrap()["n"].as_u64().unwrap()).collect()
}

// Shows: D11.2
async fn metadata_is_stored_under_one_key_and_found(history: TestHistory) {
    let living = living(&history);
    write(&living, 1, json!({"run": 5, "who": "ada", "ok": true, "deep": {"run": 6}, "token": "canary-4711"})).await;
    write(&living, 2, json!({"run": "5", "who": "bob"})).await;
    write(&living, 3, json!({"who": "ada", "list": ["x"], "caller": "y", "half": 0.5})).await;
    write(&living, 4, json!({})).await;
    write(&living, 5, json!((0..20).map(|n| (format!("k{n:02}"), json!(n))).collect::<serde_json::Map<_, _>>())).await;
    living.journal.flush().await.unwrap();
    for (entries, numbers) in [
        (&[("run", "5")][..], &[2, 1][..]),
        (&[("run", "5"), ("who", "ada")], &[1]),
        (&[("who", "ada")], &[3, 1]),
        (&[("ok", "true")], &[1]),
        (&[("half", "0.5")], &[3]),
        (&[("run", "6")], &[]),
        (&[("list", "x")], &[]),
        (&[("token", "canary-4711")], &[]),
        (&[("caller", "y")], &[3]),
        (&[("k15", "15")], &[5]),
        (&[("k16", "16")], &[]),
    ] {
        assert_eq!(found(&history, &with(entries)), numbers, "{entries:?}");
    }
    let words = Query { text: Some("write".into()), tool: Some("write".into()), ..with(&[("who", "ada")]) };
    assert_eq!(found(&history, &words), [3, 1]);
    let page = history.store().search(&with(&[("who", "ada")]), 1).unwrap();
    assert_eq!(found(&history, &Query { cursor: page.next, ..with(&[("who", "ada")]) }), [1]);
    let stats = history.store().stats(&with(&[("who", "ada")]), GroupBy::Tool).unwrap();
    assert_eq!(stats[0].count, 2);

    let all = history.store().search(&Query::default(), 100).unwrap().executions;
    let stored: Vec<Value> =
        all.into_iter().rev().map(|call| call.metadata.unwrap_or_default()["caller"].clone()).collect();
    assert_eq!(stored[0], json!({"run": 5, "who": "ada", "ok": true, "deep": {"run": 6}, "token": "[redacted]"}));
    assert_eq!((&stored[3], stored[4]["k19"].as_u64()), (&Value::Null, Some(19)));
    drop(living);
    history.check();
}

/// Readers of JSON have a limit of depth. A record that they could not read would look like a broken trail.
async fn the_deepest_metadata_can_be_proven(history: TestHistory) {
    let living = living(&history);
    let nested = |levels: usize| (1..levels).fold(json!({}), |inner, _| json!({ "a": inner }));
    let mut taken = Vec::new();
    for levels in [1, 64, 65, 100, 126, 127, 128] {
        let call = Call::new("write", json!({ "n": levels })).metadata(nested(levels));
        if living.executor.call(call).await.is_success() {
            taken.push(levels);
        }
    }
    assert_eq!(taken, [1, 64]);
    drop(living);
    history.check();
    let stored = history.store().search(&Query::default(), 100).unwrap().executions;
    let deepest = stored.into_iter().find(|call| call.parameters == Some(json!({"n": 64}))).unwrap();
    assert_eq!(deepest.metadata, Some(json!({ "caller": nested(64) })));
}

async fn entries_go_with_their_calls(history: TestHistory) {
    let living = living(&history);
    for n in 0..5 {
        write(&living, n, json!({"run": 5})).await;
    }
    living.journal.flush().await.unwrap();
    drop(living);
    let everything = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    history.store().prune(&everything, &history.options()).unwrap();
    assert_eq!(found(&history, &with(&[("run", "5")])), [0; 0]);
    let left = history.sql("SELECT entry, execution FROM metadata_entries");
    assert_eq!(left, Vec::<Vec<String>>::new());
    history.check();
}

async fn a_copy_finds_the_same_calls(history: TestHistory) {
    let living = living(&history);
    write(&living, 1, json!({"run": 5})).await;
    living.journal.flush().await.unwrap();
    drop(living);
    let copy = TestHistory::sqlite();
    history.store().copy_to(&copy.store()).unwrap();
    assert_eq!(found(&copy, &with(&[("run", "5")])), [1]);
}

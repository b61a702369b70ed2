//! Retention, and copies of a history.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{Call, Caller, Options, ToolSpec};
use wieldy_store::{Copied, GroupBy, Pruned, Query, Retention, Store};
use wieldy_testkit::{Act, Puppet};

use crate::world::{LiveExecutor, TestHistory, until};

on_each_database!(
    dropped_records_are_recorded_and_the_rest_verifies,
    a_history_that_is_too_large_loses_its_oldest_records,
    a_history_meets_its_size_limit_with_records_of_any_sizes,
    open_calls_keep_their_records_beyond_the_limit,
    a_copy_is_a_snapshot_despite_concurrent_writes,
    an_executor_keeps_the_history_in_bounds_by_itself,
    the_row_of_a_call_whose_opening_was_dropped_is_still_compared,
    a_key_outlives_its_dropped_call,
    a_clock_that_was_wrong_for_a_while_drops_no_young_records,
    a_clock_that_is_far_ahead_loses_nothing,
);

fn living(history: &TestHistory) -> LiveExecutor {
    let (tool, _) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let (waiting, _) = Puppet::new(ToolSpec::new("wait", ""), [Act::PrintAndWait("x")]);
    history.executor([tool, waiting])
}

async fn write(living: &LiveExecutor, count: usize) {
    for n in 0..count {
        living.executor.call(Call::new("write", json!({ "n": n }))).await;
    }
}

async fn dropped_records_are_recorded_and_the_rest_verifies(history: TestHistory) {
    let first = living(&history);
    write(&first, 20).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    write(&first, 10).await;
    // An open call keeps all later records.
    let open = first.executor.spawn(Call::new("wait", json!({})));
    write(&first, 5).await;
    first.journal.flush().await.unwrap();
    let store = history.store();
    let everything = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    let would = store.prunable(&everything).unwrap();
    assert_eq!((would.records, would.executions, would.up_to_seq), (91, 30, 91), "one of opening, 30 calls of three");
    let pruned = store.prune(&everything, &history.options()).unwrap();
    assert_eq!(Pruned { bytes: 0, ..pruned }, Pruned { bytes: 0, ..would });
    let page = store.search(&Query::default(), 100).unwrap();
    assert_eq!(page.executions.len(), 6);
    let verdict = history.check();
    assert_eq!((verdict.dropped, verdict.first_seq, verdict.executions, verdict.open), (91, 92, 6, 1));
    let text = Query { text: Some("write".into()), ..Query::default() };
    assert_eq!(store.search(&text, 100).unwrap().executions.len(), 5, "their words are gone too");

    first.executor.cancel(open, &Caller::local());
    first.executor.wait(open, &Caller::local()).await.unwrap();
    first.journal.flush().await.unwrap();
    drop(first);
    let nothing = store
        .prune(&Retention { age_max: Some(Duration::from_secs(3600)), ..Retention::default() }, &history.options());
    assert_eq!(nothing.unwrap().records, 0);
    // After a second round, the trail is only about itself.
    store.prune(&everything, &history.options()).unwrap();
    let verdict = history.check();
    assert_eq!((verdict.executions, verdict.open), (0, 0));
    assert!(verdict.dropped > 91, "{verdict:?}");
    assert_eq!(store.stats(&Query::default(), GroupBy::Tool).unwrap().len(), 2, "statistics are kept");
}

async fn a_history_that_is_too_large_loses_its_oldest_records(history: TestHistory) {
    let first = living(&history);
    for n in 0..200 {
        first.executor.call(Call::new("write", json!({ "n": n, "text": "x".repeat(4000) }))).await;
    }
    first.journal.flush().await.unwrap();
    drop(first);
    let store = history.store();
    let bytes_max = store.prunable(&Retention::default()).unwrap().bytes / 2;
    let pruned =
        store.prune(&Retention { bytes_max: Some(bytes_max), ..Retention::default() }, &history.options()).unwrap();
    assert!(pruned.executions > 90 && pruned.executions < 150, "{pruned:?}");
    assert!(pruned.bytes <= bytes_max, "{pruned:?} {bytes_max}");
    history.check();
}

async fn a_history_meets_its_size_limit_with_records_of_any_sizes(history: TestHistory) {
    let first = living(&history);
    // Most of the records are small and old, and most of the bytes are in the young ones.
    write(&first, 300).await;
    for n in 0..60 {
        first.executor.call(Call::new("write", json!({ "n": n, "text": "x".repeat(20_000) }))).await;
    }
    first.journal.flush().await.unwrap();
    drop(first);
    let store = history.store();
    let before = store.prunable(&Retention::default()).unwrap().bytes;
    for part in [2, 4, 8] {
        let bytes_max = before / part;
        let pruned =
            store.prune(&Retention { bytes_max: Some(bytes_max), ..Retention::default() }, &history.options()).unwrap();
        assert!(pruned.bytes <= bytes_max, "1/{part} of {before}: {pruned:?}");
        assert_eq!(store.extent().unwrap().1, pruned.bytes);
        assert!(!store.search(&Query::default(), 9).unwrap().executions.is_empty(), "no more is dropped than must be");
        history.check();
    }
}

async fn open_calls_keep_their_records_beyond_the_limit(history: TestHistory) {
    let first = living(&history);
    write(&first, 10).await;
    let open = first.executor.spawn(Call::new("wait", json!({})));
    for n in 0..30 {
        first.executor.call(Call::new("write", json!({ "n": n, "text": "x".repeat(20_000) }))).await;
    }
    first.journal.flush().await.unwrap();
    let small = Retention { bytes_max: Some(1_000), ..Retention::default() };
    let pruned = history.store().prune(&small, &history.options()).unwrap();
    assert_eq!((pruned.executions, pruned.bytes > 1_000), (10, true), "{pruned:?}");
    assert_eq!(history.store().search(&Query::default(), 99).unwrap().executions.len(), 31);
    first.executor.cancel(open, &Caller::local());
    first.executor.wait(open, &Caller::local()).await.unwrap();
    first.journal.flush().await.unwrap();
    drop(first);
    // Even without a call the tables are larger. All that can be dropped is gone then, and no endless rounds follow.
    let pruned = history.store().prune(&small, &history.options()).unwrap();
    assert_eq!(pruned.executions, 31);
    assert_eq!(history.check().executions, 0);
}

async fn a_copy_is_a_snapshot_despite_concurrent_writes(history: TestHistory) {
    let first = living(&history);
    write(&first, 300).await;
    let open = first.executor.spawn(Call::new("wait", json!({})));
    until("it is open", async || history.store().show(open).unwrap().is_some()).await;
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let (executor, stop) = (first.executor.clone(), std::sync::Arc::clone(&stop));
            tokio::spawn(async move {
                while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                    executor.call(Call::new("write", json!({ "text": "some words" }))).await;
                }
            })
        })
        .collect();
    let mut copies = Vec::new();
    for _ in 0..5 {
        let (target, store) = (TestHistory::sqlite(), history.store());
        let copied = tokio::task::spawn_blocking(move || store.copy_to(&target.store()).map(|copied| (target, copied)));
        copies.push(copied.await.unwrap().unwrap());
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    for writer in writers {
        writer.await.unwrap();
    }
    for (target, copied) in &copies {
        let verdict = target.check();
        assert_eq!((verdict.records, verdict.executions), (copied.records, copied.executions));
        assert!(verdict.open > 0, "a call was open when it was copied");
        // The next executor that writes there closes the open calls.
        drop(target.executor([]));
        assert_eq!(target.check().open, 0);
        let (call, _) = target.store().show(open).unwrap().unwrap();
        assert_eq!(call.error_code.as_deref(), Some("E3110"));
    }
    assert!(copies.windows(2).all(|pair| pair[0].1.records < pair[1].1.records), "records were written all the time");
    first.executor.cancel(open, &Caller::local());
    first.executor.wait(open, &Caller::local()).await.unwrap();
    drop(first);
    history.check();
}

#[tokio::test]
async fn a_copy_or_backup_is_the_same_history() {
    let history = TestHistory::sqlite();
    let first = living(&history);
    write(&first, 30).await;
    first.executor.call(Call::new("missing", json!({"path": "x"}))).await;
    first.journal.flush().await.unwrap();
    let store = history.store();
    let backup = history.folder.path().join("backup.db");
    store.backup(&backup).unwrap();
    write(&first, 1).await;
    first.journal.flush().await.unwrap();
    drop(first);
    let backed_up = Store::open(&wieldy_store::Address::Sqlite(backup.clone())).unwrap();
    let all = Query::default();
    assert_eq!(backed_up.search(&all, 100).unwrap().executions, store.search(&all, 100).unwrap().executions[1..]);
    assert_eq!(backed_up.verify(&[], None, &mut |_| {}).unwrap().problem, None);
    assert!(store.backup(&backup).unwrap_err().to_string().ends_with("already exists"));

    let target = TestHistory::sqlite();
    let copied = store.copy_to(&target.store()).unwrap();
    let verdict = history.check();
    assert_eq!(copied, Copied { records: verdict.records, executions: 32 });
    assert_eq!(target.check(), verdict);
    let text = Query { text: Some("missing".into()), ..Query::default() };
    for query in [&all, &text] {
        assert_eq!(target.store().search(query, 100).unwrap(), store.search(query, 100).unwrap());
    }
    assert_eq!(target.store().stats(&all, GroupBy::Day).unwrap(), store.stats(&all, GroupBy::Day).unwrap());
    // An executor continues the copy.
    let next = living(&target);
    write(&next, 1).await;
    next.journal.flush().await.unwrap();
    drop(next);
    assert_eq!(target.check().executions, 33);
    let refused = store.copy_to(&target.store()).unwrap_err();
    assert!(refused.to_string().ends_with("is not empty"), "{refused}");
}

async fn an_executor_keeps_the_history_in_bounds_by_itself(history: TestHistory) {
    let first = living(&history);
    let calls = (0..400).map(|n| first.executor.call(Call::new("write", json!({ "n": n }))));
    futures_util::future::join_all(calls).await;
    first.journal.flush().await.unwrap();
    drop(first);
    assert_eq!(history.check().records, 1202);
    // A short-lived executor drops records when it ends.
    let retention = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    let options = wieldy_store::JournalOptions { retention, ..history.options() };
    let (tool, _) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let second = history.executor_with([tool], &options, |_| {});
    write(&second, 1).await;
    second.journal.flush().await.unwrap();
    drop(second);
    let verdict = history.check();
    assert_eq!((verdict.dropped, verdict.executions), (1205, 0), "{verdict:?}");
    assert_eq!(verdict.records, 3, "its last call's end, what was dropped, and its own end: {verdict:?}");
}

async fn the_row_of_a_call_whose_opening_was_dropped_is_still_compared(history: TestHistory) {
    let first = living(&history);
    let long = first.executor.spawn(Call::new("wait", json!({})));
    write(&first, 20).await;
    let half_way = std::time::Instant::now();
    tokio::time::sleep(Duration::from_millis(500)).await;
    first.executor.cancel(long, &Caller::local());
    first.executor.wait(long, &Caller::local()).await.unwrap();
    write(&first, 20).await;
    first.journal.flush().await.unwrap();
    drop(first);
    let store = history.store();
    // About half of the history is dropped: the long call began before the cut and ended after it.
    let half = Retention { age_max: Some(half_way.elapsed()), ..Retention::default() };
    let pruned = store.prune(&half, &history.options()).unwrap();
    let (call, events) = store.show(long).unwrap().unwrap();
    assert_eq!((call.status.as_str(), events[0].seq > pruned.up_to_seq), ("cancelled", true), "{pruned:?}");
    history.check();
    let found = |change: &str| {
        history.sql(change);
        store.verify(&[], None, &mut |_| {}).unwrap().problem.map(|problem| problem.what)
    };
    let id = "(SELECT min(id) FROM tool_executions)";
    let other = found(&format!("UPDATE tool_executions SET status = 'success' WHERE id = {id}"));
    assert_eq!(other.as_deref(), Some("the row of its call in `tool_executions` differs"));
    let whole = found(&format!("UPDATE tool_executions SET status = 'cancelled' WHERE id = {id}"));
    assert_eq!(whole, None);
    let forged = found(
        "INSERT INTO tool_executions (id, execution_id, tool_name, status, started_at, completed_at, agent_id, attempts, instance)
         SELECT 1, 'x', tool_name, status, started_at, completed_at, agent_id, attempts, instance FROM tool_executions WHERE id
           = (SELECT max(id) FROM tool_executions)",
    );
    assert_eq!(forged.as_deref(), Some("no record opens the call of its row in `tool_executions`"));
}

async fn a_key_outlives_its_dropped_call(history: TestHistory) {
    let first = living(&history);
    // The last one is not stored literally.
    let looks_secret = format!("ghp_{}", "x1Y2".repeat(9));
    let tenants = [None, Some("acme"), Some(looks_secret.as_str())];
    let keyed = |tenant: Option<&str>| {
        let caller = Caller { tenant: tenant.map(str::to_owned), ..Caller::local() };
        let options = Options { idempotency_key: Some("k".into()), ..Options::default() };
        Call::new("write", json!({})).by(caller).with(options)
    };
    for tenant in tenants {
        let result = first.executor.call(keyed(tenant)).await;
        assert!(result.is_success() && !result.cached, "{tenant:?}");
    }
    let task = first.executor.spawn(Call::new("write", json!({})));
    first.executor.wait(task, &Caller::local()).await.unwrap();
    write(&first, 5).await;
    first.journal.flush().await.unwrap();
    drop(first);
    let everything = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    history.store().prune(&everything, &history.options()).unwrap();
    assert_eq!(history.store().search(&Query::default(), 9).unwrap().executions.len(), 0);
    let next = living(&history);
    for tenant in tenants {
        let again = next.executor.call(keyed(tenant)).await;
        assert!(again.is_success() && again.cached, "{tenant:?}: it did not run again: {again:?}");
    }
    let other = next.executor.call(keyed(Some("another"))).await;
    assert!(!other.cached, "their key is theirs");
    assert_eq!(next.executor.task(task, &Caller::local()), None, "a task goes with its call");
    drop(next);
    history.check();
}

async fn a_clock_that_was_wrong_for_a_while_drops_no_young_records(history: TestHistory) {
    let first = living(&history);
    write(&first, 10).await;
    first.journal.flush().await.unwrap();
    drop(first);
    // Half of it was written while the clock said 1970.
    let then = if history.is_postgres() { "to_timestamp(0)" } else { "0" };
    history.sql(&format!("UPDATE events SET at = {then} WHERE seq > 5"));
    let month = Retention { age_max: Some(Duration::from_secs(30 * 86_400)), ..Retention::default() };
    assert_eq!(history.store().prunable(&month).unwrap().records, 0, "the first five are young");
    history.sql(&format!("UPDATE events SET at = {then} WHERE seq <= 3"));
    assert_eq!(history.store().prunable(&month).unwrap().records, 3);
}

async fn a_clock_that_is_far_ahead_loses_nothing(history: TestHistory) {
    let first = living(&history);
    let keyed =
        || Call::new("write", json!({})).with(Options { idempotency_key: Some("k".into()), ..Options::default() });
    assert!(first.executor.call(keyed()).await.is_success());
    let calls = (0..400).map(|n| first.executor.call(Call::new("write", json!({ "n": n }))));
    futures_util::future::join_all(calls).await;
    first.journal.flush().await.unwrap();
    drop(first);
    let before = history.check();
    // A clock ten years ahead is the same as records that are ten years old.
    let last = before.last_seq;
    let shift = |sign: &str| {
        let years = if history.is_postgres() { "interval '3650 days'" } else { "3650 * 86400000000" };
        for (table, columns, id) in [
            ("events", &["at"][..], "seq"),
            ("tool_executions", &["started_at", "completed_at"], "id"),
            ("answers", &["expires_at"], "id"),
        ] {
            let set = columns.iter().map(|column| format!("{column} = {column} {sign} {years}")).collect::<Vec<_>>();
            history.sql(&format!("UPDATE {table} SET {} WHERE {id} <= {last}", set.join(", ")));
        }
    };
    shift("-");
    let month = Retention { age_max: Some(Duration::from_secs(30 * 86_400)), ..Retention::default() };
    let options = wieldy_store::JournalOptions { retention: month, ..history.options() };
    for _ in 0..2 {
        let ahead = history.executor_with([Puppet::writing("write", Act::Echo)], &options, |_| {});
        write(&ahead, 1).await;
        drop(ahead);
    }
    assert_eq!(history.sql("SELECT seq FROM events WHERE seq = 1").len(), 1, "nothing is dropped for a day");
    // A request by hand trusts the clock.
    assert_eq!(history.store().prunable(&month).unwrap().records, before.records);
    shift("+");
    let next = living(&history);
    let again = next.executor.call(keyed()).await;
    assert!(again.is_success() && again.cached, "the key is known again: {again:?}");
    drop(next);
    assert_eq!(history.check().executions, before.executions + 3);
}

#[tokio::test]
async fn dropping_without_the_key_is_detected() {
    let history = TestHistory::sqlite();
    let first = living(&history);
    write(&first, 10).await;
    first.journal.flush().await.unwrap();
    drop(first);
    let everything = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    // The attacker has the database and the program, but not the key.
    let keyless = wieldy_store::JournalOptions { key: None, ..history.options() };
    let signed = rusqlite::Connection::open(history.folder.path().join("history.db")).unwrap();
    let heads: i64 = signed.query_row("SELECT max(seq) FROM heads", [], |row| row.get(0)).unwrap();
    let pruned = history.store().prune(&everything, &keyless).unwrap();
    assert_eq!((pruned.records, heads), (31, 32), "all but the last record, which is signed");
    let problem = history.store().verify(&[], None, &mut |_| {}).unwrap().problem.unwrap();
    assert_eq!((problem.seq, &*problem.what), (34, "it says that records were dropped, but it is not signed"));
    // An executor with the key vouches for it with the next signature.
    drop(living(&history));
    history.check();
}

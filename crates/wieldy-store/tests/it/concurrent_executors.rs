//! Many executors with one history.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use wieldy_core::{Call, Caller, ToolSpec};
use wieldy_store::{JournalOptions, Query, Retention};
use wieldy_testkit::{Act, Puppet};

use crate::world::{TestHistory, executor, until};

on_each_database!(
    executors_that_write_at_once_make_one_trail,
    an_executor_taken_for_dead_stops_writing,
    a_live_executor_is_not_taken_for_dead,
    late_events_of_an_executor_taken_for_dead_do_no_harm,
    verification_succeeds_while_others_write_and_drop,
);

async fn executors_that_write_at_once_make_one_trail(history: TestHistory) {
    const EACH: usize = 100;
    let mut writing = Vec::new();
    for _ in 0..4 {
        let store = history.store();
        writing.push(tokio::spawn(async move {
            let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
            let calls = (0..EACH).map(|number| {
                let executor = executor.clone();
                tokio::spawn(async move { executor.call(Call::new("write", json!({"number": number}))).await })
            });
            for call in calls.collect::<Vec<_>>() {
                assert!(call.await.unwrap().is_success());
            }
            journal.flush().await.unwrap();
        }));
    }
    for one in writing {
        one.await.unwrap();
    }
    let store = history.store();
    let verdict = store.verify(&[], None, &mut |_| ()).unwrap();
    assert_eq!((verdict.problem, verdict.executions, verdict.open), (None, 4 * EACH as u64, 0));
    assert_eq!(store.search(&Query::default(), 1000).unwrap().executions.len(), 4 * EACH);
    let stats = store.stats(&Query::default(), wieldy_store::GroupBy::Tool).unwrap();
    assert_eq!((stats[0].count, stats[0].errors), (4 * EACH as i64, 0));
}

async fn an_executor_taken_for_dead_stops_writing(history: TestHistory) {
    let store = history.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    assert!(executor.call(Call::new("write", json!({}))).await.is_success());
    history.sql("UPDATE instances SET ended_at = seen_at");
    // Until the executor notices, its log still accepts records.
    until("it is refused", async || {
        let told = executor.call(Call::new("write", json!({}))).await;
        told.error.is_some_and(|error| error.code.as_str() == "E3111")
    })
    .await;
    let why =
        "another process considered this executor dead and closed its calls, so this executor cannot write any more";
    assert_eq!(journal.failure().unwrap().0, why);
}

async fn a_live_executor_is_not_taken_for_dead(history: TestHistory) {
    let store = history.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    // Its row looks dead, but its lock is held.
    let long_ago = if history.is_postgres() { "now() - interval '1 hour'" } else { "1" };
    history.sql(&format!("UPDATE instances SET seen_at = {long_ago}, process = 2147483647"));
    store.journal(&JournalOptions::default()).unwrap();
    assert!(executor.call(Call::new("write", json!({}))).await.is_success());
    journal.flush().await.unwrap();
    assert_eq!(store.verify(&[], None, &mut |_| ()).unwrap().problem, None);
}

async fn late_events_of_an_executor_taken_for_dead_do_no_harm(history: TestHistory) {
    let store = history.store();
    let (waiting, strings) = Puppet::new(ToolSpec::new("wait", ""), [Act::PrintAndWait("x")]);
    let (late, journal) = executor(&store, [waiting]);
    let task = late.spawn(Call::new("wait", json!({})));
    while strings.now() == 0 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    journal.flush().await.unwrap();
    history.sql("UPDATE instances SET ended_at = seen_at");
    let (next, _) = executor(&store, [Puppet::writing("wait", Act::Echo)]);
    // The call ends, which can no longer be recorded; its caller still gets the result.
    late.cancel(task, &Caller::local());
    let told = late.wait(task, &Caller::local()).await.unwrap();
    assert_eq!(told.status, wieldy_core::Status::Cancelled);
    assert!(journal.flush().await.is_err() && journal.failure().is_some());
    let refused = late.call(Call::new("wait", json!({}))).await;
    assert_eq!(refused.error.unwrap().code.as_str(), "E3111");
    drop((late, journal));
    assert!(next.call(Call::new("wait", json!({}))).await.is_success());
    let (call, events) = store.show(task).unwrap().unwrap();
    assert_eq!((call.status.as_str(), call.error_code.as_deref()), ("failed", Some("E3110")), "{events:?}");
    drop(next);
    let verdict = history.check();
    assert_eq!((verdict.executions, verdict.open), (2, 0));
}

async fn verification_succeeds_while_others_write_and_drop(history: TestHistory) {
    let done = Arc::new(AtomicBool::new(false));
    let mut busy = Vec::new();
    for _ in 0..2 {
        let (store, done) = (history.store(), Arc::clone(&done));
        busy.push(tokio::spawn(async move {
            let (executor, _) = executor(&store, [Puppet::writing("write", Act::Echo)]);
            while !done.load(Ordering::Relaxed) {
                let calls = (0..8).map(|number| executor.call(Call::new("write", json!({"number": number}))));
                futures_util::future::join_all(calls).await;
            }
        }));
    }
    let (mut pruned, mut last_seq) = (0, 0);
    while pruned < 5 || last_seq < 4_000 {
        let old = Retention { age_max: Some(Duration::from_millis(200)), ..Retention::default() };
        let (store, options) = (history.store(), history.options());
        let dropping = tokio::task::spawn_blocking(move || store.prune(&old, &options).unwrap().records);
        let store = history.store();
        let verdict = tokio::task::spawn_blocking(move || store.verify(&[], None, &mut |_| {})).await.unwrap().unwrap();
        assert_eq!(verdict.problem, None, "{verdict:?}");
        pruned += u64::from(dropping.await.unwrap() > 0);
        last_seq = verdict.last_seq;
    }
    done.store(true, Ordering::Relaxed);
    for one in busy {
        one.await.unwrap();
    }
    history.check();
}

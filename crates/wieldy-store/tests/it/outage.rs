//! PostgreSQL stops, restarts or hangs: no unrecorded call runs, no call is lost or doubled, and all goes on by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use wieldy_core::{Call, Executor, ToolResult};
use wieldy_store::{GroupBy, JournalOptions, Query, Store};
use wieldy_testkit::{Act, Puppet};

use crate::server::Server;
use crate::world::{executor, until};

/// The longest time to recover after the cause is gone.
const RESUMED: Duration = Duration::from_secs(5);

fn write(number: usize) -> Call {
    Call::new("write", json!({"number": number}))
}

/// Waits until calls succeed again and returns how long that took.
async fn resumed(executor: &Executor) -> Duration {
    until("calls go through", || async { executor.call(write(0)).await.is_success() }).await
}

/// Asserts that the results that callers got agree with the history.
pub(crate) fn assert_history_agrees(store: &Store, told: &[ToolResult]) {
    let verdict = store.verify(&[], None, &mut |_| ()).unwrap();
    assert_eq!((verdict.problem, verdict.open), (None, 0));
    let counted: i64 = store.stats(&Query::default(), GroupBy::Tool).unwrap().iter().map(|stat| stat.count).sum();
    assert_eq!(counted as u64, verdict.executions);
    for result in told {
        let found = store.show(result.execution_id).unwrap();
        match &result.error {
            None => assert_eq!(found.unwrap().0.status, "success"),
            // The call was refused before it ran. Its opening may or may not be written.
            Some(error) => {
                assert_eq!(error.code.as_str(), "E3111", "{error:?}");
                assert!(found.is_none_or(|(call, _)| call.status != "success"));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_crashes_under_load_loses_and_doubles_nothing() {
    let Some(mut server) = Server::start() else { return };
    let store = server.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    let stop = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..8)
        .map(|caller| {
            let (executor, stop) = (executor.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut results = Vec::new();
                while !stop.load(Ordering::SeqCst) {
                    let result = executor.call(write(caller)).await;
                    if !result.is_success() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    results.push(result);
                }
                results
            })
        })
        .collect();
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        server.crash();
        server.begin();
        assert!(resumed(&executor).await < RESUMED);
    }
    stop.store(true, Ordering::SeqCst);
    let mut told = Vec::new();
    for caller in callers {
        told.extend(caller.await.unwrap());
    }
    journal.flush().await.unwrap();
    assert!(told.iter().filter(|result| result.is_success()).count() > 50);
    assert_history_agrees(&store, &told);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_server_is_away_new_calls_are_refused_and_running_ones_end() {
    let Some(mut server) = Server::start() else { return };
    let store = server.store();
    let slow = Puppet::writing("slow", Act::Take(Duration::from_secs(2)));
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo), slow]);
    let running = tokio::spawn({
        let executor = executor.clone();
        async move { executor.call(Call::new("slow", json!({"id": 7}))).await }
    });
    until("it runs", || async {
        let found = store.search(&Query::default(), 1).unwrap().executions;
        found.first().is_some_and(|call| call.status == "running")
    })
    .await;
    server.crash();
    let mut told = vec![executor.call(write(1)).await, executor.call(write(2)).await];
    let error = told[1].error.clone().unwrap();
    assert_eq!(error.code.as_str(), "E3111");
    until("the server is asked for again", || async {
        let trouble = journal.failure().unwrap().0;
        trouble.starts_with("cannot use the history `postgres://wieldy@127.0.0.1:") && trouble.contains("refused")
    })
    .await;
    let ran = running.await.unwrap();
    assert!(ran.is_success(), "{ran:?}");
    server.begin();
    assert!(resumed(&executor).await < RESUMED);
    journal.flush().await.unwrap();
    let (call, events) = store.show(ran.execution_id).unwrap().unwrap();
    assert_eq!(call.status, "success");
    let names: Vec<_> = events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names, ["tool.call.pending", "tool.call.started", "tool.call.success"]);
    told.push(ran);
    assert_history_agrees(&store, &told);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hanging_server_is_noticed_and_used_again() {
    let Some(server) = Server::start() else { return };
    let store = server.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    let mut told = vec![executor.call(write(1)).await];
    server.freeze(true);
    let began = Instant::now();
    told.push(executor.call(write(2)).await);
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    told.push(executor.call(write(3)).await);
    assert_eq!(told[2].error.as_ref().unwrap().code.as_str(), "E3111");
    let read = store.search(&Query::default(), 1).unwrap_err().to_string();
    assert!(read.ends_with("the server did not answer within 2 s"), "{read}");
    server.freeze(false);
    assert!(resumed(&executor).await < RESUMED);
    journal.flush().await.unwrap();
    assert_history_agrees(&store, &told);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_server_does_not_close_a_live_executors_calls() {
    let Some(mut server) = Server::start() else { return };
    let store = server.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    assert!(executor.call(write(1)).await.is_success());
    // As after a long outage: the time for which an executor counts as alive is over.
    let url = server.address();
    let wieldy_store::Address::Postgres(url) = &url else { unreachable!() };
    crate::world::sql(url, "UPDATE agent_tools.instances SET seen_at = now() - interval '1 hour'");
    server.crash();
    server.begin();
    // Another executor starts first, while the lock is gone.
    store.journal(&JournalOptions::default()).unwrap();
    assert!(resumed(&executor).await < RESUMED);
    journal.flush().await.unwrap();
    assert_history_agrees(&store, &[]);
}

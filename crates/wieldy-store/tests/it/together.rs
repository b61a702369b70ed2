//! Many executors, one history.

use serde_json::json;
use wieldy_core::Call;
use wieldy_store::{JournalOptions, Query};
use wieldy_testkit::{Act, Puppet};

use crate::world::{Place, executor};

on_each_database!(
    executors_that_write_at_once_make_one_trail,
    who_was_taken_for_dead_writes_no_more,
    who_lives_is_not_taken_for_dead
);

async fn executors_that_write_at_once_make_one_trail(place: Place) {
    const EACH: usize = 100;
    let mut writing = Vec::new();
    for _ in 0..4 {
        let store = place.store();
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
    let store = place.store();
    let verdict = store.verify(&[], None, &mut |_| ()).unwrap();
    assert_eq!((verdict.problem, verdict.executions, verdict.open), (None, 4 * EACH as u64, 0));
    assert_eq!(store.search(&Query::default(), 1000).unwrap().executions.len(), 4 * EACH);
    let stats = store.stats(&Query::default(), wieldy_store::GroupBy::Tool).unwrap();
    assert_eq!((stats[0].count, stats[0].errors), (4 * EACH as i64, 0));
}

async fn who_was_taken_for_dead_writes_no_more(place: Place) {
    let store = place.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    assert!(executor.call(Call::new("write", json!({}))).await.is_success());
    place.sql("UPDATE instances SET ended_at = seen_at");
    let refused = executor.call(Call::new("write", json!({}))).await;
    assert_eq!(refused.error.unwrap().code.as_str(), "E3111");
    let why = "another process took this executor for dead and closed its calls, so it writes no more";
    assert_eq!(journal.trouble().unwrap().0, why);
}

async fn who_lives_is_not_taken_for_dead(place: Place) {
    let store = place.store();
    let (executor, journal) = executor(&store, [Puppet::writing("write", Act::Echo)]);
    // Whatever its row says: its lock is held.
    place.sql(match place.is_postgres() {
        true => "UPDATE instances SET seen_at = now() - interval '1 hour'",
        false => "UPDATE instances SET seen_at = 1",
    });
    store.journal(&JournalOptions::default()).unwrap();
    assert!(executor.call(Call::new("write", json!({}))).await.is_success());
    journal.flush().await.unwrap();
    assert_eq!(store.verify(&[], None, &mut |_| ()).unwrap().problem, None);
}

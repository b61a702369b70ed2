//! Schema versions of the tables.

use wieldy_store::{Address, Query, Store, StoreError};
use wieldy_testkit::{Act, Puppet};

use crate::world::{TestHistory, executor};

on_each_database!(
    tables_go_down_and_up_again,
    a_newer_schema_is_refused,
    programs_that_start_at_once_make_the_tables_once
);

// Shows: D9.2
async fn tables_go_down_and_up_again(history: TestHistory) {
    let store = history.store();
    let (executor, journal) = executor(&store, [Puppet::reading("read", Act::Echo)]);
    executor.call(wieldy_core::Call::new("read", serde_json::json!({}))).await;
    drop((executor, journal));
    assert_eq!(store.search(&Query::default(), 10).unwrap().executions.len(), 1);
    store.migrate(0).unwrap();
    let gone = store.search(&Query::default(), 10).unwrap_err().to_string();
    assert!(gone.contains("tool_executions") && gone.starts_with("cannot read the history"), "{gone}");
    let store = history.store();
    assert_eq!(store.search(&Query::default(), 10).unwrap().executions, []);
    store.journal(&wieldy_store::JournalOptions::default()).unwrap();
    assert_eq!(store.verify(&[], None, &mut |_| ()).unwrap().problem, None);
}

// Shows: D9.2
async fn a_newer_schema_is_refused(history: TestHistory) {
    history.store();
    match history.address {
        Address::Sqlite(_) => history.sql("PRAGMA user_version = 10"),
        _ => history.sql("UPDATE version SET version = 10"),
    };
    assert_eq!(Store::open(&history.address).err(), Some(StoreError::Newer { found: 10, known: 9 }));
}

async fn programs_that_start_at_once_make_the_tables_once(history: TestHistory) {
    let opened = std::thread::scope(|scope| {
        let opening: Vec<_> = (0..8).map(|_| scope.spawn(|| Store::open(&history.address).map(drop))).collect();
        opening.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(opened, vec![Ok(()); 8]);
}

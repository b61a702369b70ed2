//! A closed journal: accepted records are in the history, and nothing runs with the journal any more.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use wieldy_core::{Body, Call, Caller, Code, Event, Executor, Journal, JournalError, Receipt, Subject};
use wieldy_store::{Address, JournalOptions, Query, Store};
use wieldy_testkit::{Act, Puppet};

#[tokio::test]
async fn a_closed_journal_has_all_records_and_no_call_runs() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db"))).unwrap();
    let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
    let mut builder = Executor::builder().tools([Puppet::reading("look", Act::Echo)]);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build().unwrap();
    let done = executor.call(Call::new("look", json!({}))).await;
    assert!(done.is_success());
    // The executor still holds the journal, as a sandbox that is being removed may.
    journal.close();
    journal.close();
    let page = store.search(&Query::default(), 10).unwrap();
    assert_eq!(page.executions[0].execution_id, done.execution_id.to_string());
    assert_eq!(page.executions[0].status, "success");
    assert_eq!(std::fs::read_dir(folder.path().join("history.db.instances")).unwrap().count(), 0);
    let (records, bytes) = store.extent().unwrap();
    assert_eq!(records, 5, "opened, pending, started, success, closed");
    assert!(bytes > 4096);
    let refused = executor.call(Call::new("look", json!({}))).await;
    assert_eq!(refused.error.map(|error| error.code), Some(Code::JournalFailed));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_callers_are_answered_during_closing_and_later_events_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db"))).unwrap();
    for _ in 0..20 {
        let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
        let event = |seq| {
            let subject = Subject::of(Caller::local().into());
            let body = Body::SandboxDestroyed { sandbox: "s".into() };
            Arc::new(Event { seq, at: Timestamp::now(), subject: Arc::new(subject), body })
        };
        // A task goes on appending and waiting, through the closing and after it.
        let theirs = Arc::clone(&journal);
        let telling = tokio::spawn(async move {
            for seq in 1.. {
                match theirs.append(&event(seq)) {
                    Receipt::Refused(error) => return (seq - 1, error),
                    _ if seq % 7 == 0 => drop(theirs.wait_until_stored(seq).await),
                    _ => {}
                }
            }
            unreachable!("it is closed")
        });
        let closing = Arc::clone(&journal);
        tokio::task::spawn_blocking(move || closing.close()).await.unwrap();
        let told = tokio::time::timeout(Duration::from_secs(10), telling).await.expect("the wait ends").unwrap();
        assert_eq!(told.1, JournalError("the journal is closed".into()));
        assert_eq!(journal.wait_until_stored(told.0).await, Ok(()), "the accepted record is there");
    }
    assert_eq!(store.verify(&[], None, &mut |_| {}).unwrap().problem, None);
}

#[tokio::test]
async fn an_id_is_found_by_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db"))).unwrap();
    let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
    let mut builder = Executor::builder().tools([Puppet::reading("look", Act::Echo)]);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build().unwrap();
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(executor.call(Call::new("look", json!({}))).await.execution_id);
    }
    journal.flush().await.unwrap();
    let text = ids[1].to_string();
    for length in [30, 35, 36] {
        assert_eq!(store.find(&text[..length], 9).unwrap(), [ids[1]], "{length}");
    }
    assert_eq!(store.find(&text.to_uppercase(), 9).unwrap(), [ids[1]]);
    assert_eq!((store.find(&text[..4], 9).unwrap(), store.find("", 2).unwrap()), (ids.clone(), ids[..2].to_vec()));
    for wrong in ["zzzzzzzz", "%", "é", "01-", &format!("{text}0")] {
        assert_eq!(store.find(wrong, 9).unwrap(), [], "{wrong}");
    }
}

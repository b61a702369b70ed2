//! A duplicate id: a permanent error, for which no caller waits.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use wieldy_core::{Body, Call, Caller, Code, Event, ExecutionId, Journal, Receipt, Redacted, Subject};
use wieldy_testkit::{Act, Puppet};

use crate::world::TestHistory;

on_each_database!(a_duplicate_id_ends_only_the_journal_that_writes_it);

fn opening(seq: u64, execution: ExecutionId) -> Arc<Event> {
    let (tool, caller) = (Some("write".into()), Caller::local().into());
    let subject = Subject { execution: Some(execution), tool, ..Subject::of(caller) };
    let body = Body::CallPending {
        arguments: Redacted::from(json!({})),
        task: false,
        rerun: None,
        called_as: None,
        workspace: None,
        metadata: None,
    };
    Arc::new(Event { seq, at: Timestamp::now(), subject: Arc::new(subject), body })
}

async fn a_duplicate_id_ends_only_the_journal_that_writes_it(history: TestHistory) {
    let first = history.executor([Puppet::writing("write", Act::Echo)]);
    let done = first.executor.call(Call::new("write", json!({}))).await;
    first.journal.flush().await.unwrap();
    // As on a machine that was copied while it ran.
    let second = history.executor([Puppet::writing("write", Act::Echo)]);
    let seq = second.journal.next_seq();
    assert!(matches!(second.journal.append(&opening(seq, done.execution_id)), Receipt::Pending(_)));
    let told = tokio::time::timeout(Duration::from_secs(5), second.journal.flush()).await.expect("it is given up");
    let why = told.unwrap_err().0.to_lowercase();
    assert!(why.contains("cannot write the history") && why.contains("unique constraint"), "{why}");
    // The numbers of an executor's events have no gaps, so nothing may follow a record that cannot be written. If it
    // were retried, it would be written now.
    let rename = |from: &str, to: &str| {
        history.sql(&format!("UPDATE tool_executions SET execution_id = '{to}' WHERE execution_id = '{from}'"));
    };
    let id = done.execution_id.to_string();
    rename(&id, "elsewhere");
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    rename("elsewhere", &id);
    assert_eq!(second.journal.failure().map(|trouble| trouble.0.to_lowercase()), Some(why), "it is not tried again");
    let refused = second.executor.call(Call::new("write", json!({}))).await;
    assert_eq!(refused.error.map(|error| error.code), Some(Code::JournalFailed));
    assert!(first.executor.call(Call::new("write", json!({}))).await.is_success(), "others go on");
    drop((first, second));
    // A new executor has ids of its own.
    let next = history.executor([Puppet::writing("write", Act::Echo)]);
    assert!(next.executor.call(Call::new("write", json!({}))).await.is_success());
    drop(next);
    assert_eq!(history.check().executions, 3);
}

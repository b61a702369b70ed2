//! The basic promise: a call is found again.

use serde_json::json;
use wieldy_core::{Call, ToolSpec};
use wieldy_store::{GroupBy, Query};
use wieldy_testkit::{Act, Puppet};

use crate::world::{TestHistory, executor};

on_each_database!(a_call_is_found_again);

// Shows: D9.1
async fn a_call_is_found_again(history: TestHistory) {
    let store = history.store();
    let (tool, _) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let (executor, journal) = executor(&store, [tool, Puppet::reading("read", Act::Echo)]);
    let result = executor.call(Call::new("write", json!({"path": "some/file.txt", "password": "hunter2"}))).await;
    assert!(result.is_success());
    executor.call(Call::new("read", json!({"path": "other"}))).await;
    executor.call(Call::new("missing", json!({}))).await;
    journal.flush().await.unwrap();
    let page = store.search(&Query::default(), 10).unwrap();
    let told: Vec<_> =
        page.executions.iter().map(|call| (&*call.tool, &*call.status, call.parameters.clone())).collect();
    let expected = [
        ("missing", "validation_error", Some(json!({}))),
        ("read", "success", Some(json!({"path": "other"}))),
        ("write", "success", Some(json!({"path": "some/file.txt", "password": "[redacted]"}))),
    ];
    assert_eq!(told, expected);
    let text = Query { text: Some("file.txt".into()), ..Query::default() };
    assert_eq!(store.search(&text, 10).unwrap().executions.len(), 1);
    assert_eq!(store.show(result.execution_id).unwrap().unwrap().1.len(), 3);
    assert_eq!(store.stats(&Query::default(), GroupBy::Tool).unwrap().len(), 3);
    assert_eq!(store.verify(&[], None, &mut |_| ()).unwrap().problem, None);
}

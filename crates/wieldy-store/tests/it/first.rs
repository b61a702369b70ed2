use std::sync::Arc;

use serde_json::json;
use wieldy_core::{Call, Executor, ToolSpec};
use wieldy_store::{Address, GroupBy, JournalOptions, Query, Store};
use wieldy_testkit::{Act, Puppet};

#[tokio::test]
async fn what_was_called_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Sqlite(folder.path().join("history.db"));
    let store = Store::open(&address).unwrap();
    let options = JournalOptions { key: Some(folder.path().join("audit.key")), ..JournalOptions::default() };
    let journal = Arc::new(store.journal(&options).unwrap());
    let (tool, _) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let mut builder = Executor::builder().tools([tool, Puppet::reading("read", Act::Echo)]);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build().unwrap();
    let result = executor.call(Call::new("write", json!({"path": "some/file.txt", "password": "hunter2"}))).await;
    assert!(result.is_success());
    executor.call(Call::new("read", json!({"path": "other"}))).await;
    executor.call(Call::new("missing", json!({}))).await;
    journal.flush().await.unwrap();
    let page = store.search(&Query::default(), 10).unwrap();
    assert_eq!(page.executions.len(), 3);
    let text = Query { text: Some("file.txt".into()), ..Query::default() };
    assert_eq!(store.search(&text, 10).unwrap().executions.len(), 1);
    assert_eq!(store.show(result.execution_id).unwrap().unwrap().1.len(), 3);
    assert_eq!(store.stats(&Query::default(), GroupBy::Tool).unwrap().len(), 3);
}

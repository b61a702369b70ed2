//! The tools of memory: an agent sees its own calls and nobody else's.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Code, Executor};
use wieldy_store::{Address, JournalOptions, Store, StoreJournal, history_tools};
use wieldy_testkit::{Act, Puppet};

fn executor(folder: &Path) -> (Executor, Arc<StoreJournal>) {
    let address = Address::Sqlite(folder.join("history.db"));
    let store = Store::open(&address).unwrap();
    let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
    let mut builder = Executor::builder().tools([Puppet::reading("look", Act::Echo)]).tools(history_tools(store));
    builder.journal = Arc::clone(&journal) as _;
    (builder.build().unwrap(), journal)
}

fn caller(agent: &str, tenant: Option<&str>) -> Arc<Caller> {
    Arc::new(Caller { agent: agent.into(), tenant: tenant.map(str::to_owned), ..Caller::local() })
}

async fn asked(executor: &Executor, tool: &str, arguments: Value, by: &Arc<Caller>) -> Value {
    let result = executor.call(Call::new(tool, arguments).by(Arc::clone(by))).await;
    assert_eq!(result.error, None);
    result.structured.unwrap_or_default()
}

/// What was asked for in the calls that were found, without the questions themselves.
fn things(page: &Value) -> Vec<&Value> {
    let calls = page["executions"].as_array().unwrap().iter().filter(|call| call["tool"] == "look");
    calls.map(|call| &call["parameters"]["thing"]).collect()
}

#[tokio::test]
async fn an_agent_finds_its_own_calls_and_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let (executor, journal) = executor(folder.path());
    let callers = [("ada", None), ("bob", None), ("ada", Some("one")), ("ada", Some("two"))];
    let callers = callers.map(|(agent, tenant)| (format!("{agent} {tenant:?}"), caller(agent, tenant)));
    for (thing, by) in &callers {
        asked(&executor, "look", json!({ "thing": thing }), by).await;
    }
    journal.flush().await.unwrap();
    for (thing, by) in &callers {
        let all = asked(&executor, "history_search", json!({}), by).await;
        assert_eq!(things(&all), [thing]);
        let by_text = asked(&executor, "history_search", json!({"text": "ada bob one two"}), by).await;
        assert_eq!(by_text["executions"], json!([]));
        let by_tool = asked(&executor, "history_search", json!({"tool": "look", "status": "success"}), by).await;
        assert_eq!(things(&by_tool), [thing]);
        let stats = asked(&executor, "history_stats", json!({"tool": "look"}), by).await;
        let [stat] = stats["stats"].as_array().unwrap().as_slice() else { panic!("{stats}") };
        assert_eq!((&stat["tool"], &stat["count"], &stat["errors"]), (&json!("look"), &json!(1), &json!(0)));
    }
    let nameless = executor.call(Call::new("history_search", json!({})).by(caller("ada", Some("")))).await;
    assert_eq!(nameless.error.unwrap().code, Code::InvalidInput);
}

#[tokio::test]
async fn a_search_is_read_in_pages_and_refuses_what_makes_no_sense() {
    let folder = tempfile::tempdir().unwrap();
    let (executor, journal) = executor(folder.path());
    let by = caller("ada", None);
    for number in 1..=3 {
        asked(&executor, "look", json!({ "thing": number }), &by).await;
    }
    journal.flush().await.unwrap();
    let first = asked(&executor, "history_search", json!({"tool": "look", "limit": 2}), &by).await;
    assert_eq!(things(&first), [3, 2]);
    let rest = json!({"tool": "look", "limit": 2, "cursor": first["next"], "since": "1h"});
    let rest = asked(&executor, "history_search", rest, &by).await;
    assert_eq!((things(&rest), &rest["next"]), (vec![&json!(1)], &json!(null)));
    let told =
        executor.call(Call::new("history_search", json!({"tool": "look", "limit": 1})).by(Arc::clone(&by))).await;
    let text = told.text();
    assert!(text.contains(" look success ") && text.contains(r#" {"thing":3}"#), "{text}");
    assert!(text.ends_with(&format!("[more: read on with `cursor` {}]", told.structured.unwrap()["next"])), "{text}");
    let counted =
        executor.call(Call::new("history_stats", json!({"tool": "look", "by": "tool"})).by(Arc::clone(&by))).await;
    assert!(counted.text().starts_with("look: 3 calls, 0 failed; p50 "), "{}", counted.text());
    let long = json!({ "thing": "é".repeat(1000) });
    asked(&executor, "look", long, &by).await;
    journal.flush().await.unwrap();
    let cut = executor.call(Call::new("history_search", json!({"tool": "look", "limit": 1})).by(Arc::clone(&by))).await;
    assert!(cut.text().lines().next().unwrap().ends_with("é…"), "{}", cut.text());
    let none = json!({"tool": "look", "since": "2999-01-01T00:00:00Z"});
    assert_eq!(asked(&executor, "history_search", none, &by).await, json!({"executions": [], "next": null}));
    for (arguments, code) in [
        (json!({"limit": 51}), Code::ValidationFailed),
        (json!({"status": "fine"}), Code::ValidationFailed),
        (json!({"agent": "bob"}), Code::ValidationFailed),
        (json!({"since": "yesterday"}), Code::InvalidInput),
    ] {
        let refused = executor.call(Call::new("history_search", arguments.clone()).by(Arc::clone(&by))).await;
        assert_eq!(refused.error.map(|error| error.code), Some(code), "{arguments}");
    }
}

#[tokio::test]
async fn the_tools_open_nothing_before_they_are_asked() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(&Address::Sqlite(folder.path().join("history.db")));
    let executor = Executor::builder().tools(history_tools(store)).build().unwrap();
    assert!(executor.registry().find("history_search", &Caller::local()).is_ok());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

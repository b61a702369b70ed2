//! The history tools: an agent sees its own calls and no others.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Code, Executor};
use wieldy_store::{Address, JournalOptions, Query, Store, StoreJournal, history_tools};
use wieldy_testkit::{Act, Puppet};

fn executor(folder: &Path) -> (Executor, Arc<StoreJournal>) {
    executor_in(folder, folder)
}

fn executor_in(folder: &Path, workspace: &Path) -> (Executor, Arc<StoreJournal>) {
    let address = Address::Sqlite(folder.join("history.db"));
    let store = Store::open(&address).unwrap();
    let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
    let mut builder = Executor::builder().tools([Puppet::reading("look", Act::Echo)]).tools(history_tools(store));
    builder.journal = Arc::clone(&journal) as _;
    builder.workspace = workspace.to_owned();
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

/// Returns the arguments of the calls that were found, without the calls of the history tools themselves.
fn things(page: &Value) -> Vec<&Value> {
    let calls = page["executions"].as_array().unwrap().iter().filter(|call| call["tool"] == "look");
    calls.map(|call| &call["parameters"]["thing"]).collect()
}

// Shows: E5.3
#[tokio::test]
async fn an_agent_finds_its_own_calls_and_no_others() {
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
    assert_eq!(nameless.error.unwrap().code, Code::ValidationFailed);
}

// Shows: E5.3
#[tokio::test]
async fn an_agent_finds_only_calls_of_its_own_user_and_workspace() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    let by = |user: Option<&str>| Arc::new(Caller { user: user.map(str::to_owned), ..Caller::local() });
    let places = [one.as_path(), other.as_path(), Path::new(".")];
    let users = [None, Some("ann"), Some("bob")];
    for history in places {
        let (executor, journal) = executor_in(folder.path(), history);
        for user in users {
            asked(&executor, "look", json!({ "thing": [history, user] }), &by(user)).await;
        }
        journal.close();
    }
    for history in &places[..2] {
        let (executor, _journal) = executor_in(folder.path(), history);
        for user in users {
            let all = asked(&executor, "history_search", json!({"tool": "look"}), &by(user)).await;
            assert_eq!(things(&all), [&json!([history, user])]);
            let in_results = json!({"tool": "look", "text": "thing", "in": "results"});
            let by_result = asked(&executor, "history_search", in_results, &by(user)).await;
            assert_eq!(things(&by_result), [&json!([history, user])]);
            assert_eq!(by_result["results"]["waiting"], 0);
            let stats = asked(&executor, "history_stats", json!({"tool": "look"}), &by(user)).await;
            assert_eq!(stats["stats"][0]["count"], 1);
        }
    }
    // Calls without a known workspace are shown to people only.
    let (executor, _journal) = executor_in(folder.path(), Path::new("."));
    for tool in ["history_search", "history_stats"] {
        let refused = executor.call(Call::new(tool, json!({}))).await;
        assert_eq!(refused.error.map(|error| error.code), Some(Code::InvalidInput));
    }
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db"))).unwrap();
    let seen = |workspace: Option<&str>| {
        let query = Query { tool: Some("look".into()), workspace: workspace.map(str::to_owned), ..Query::default() };
        store.search(&query, 100).unwrap().executions.len()
    };
    assert_eq!([seen(None), seen(Some("")), seen(one.to_str())], [9, 3, 3]);
}

// Shows: E5.1
#[tokio::test]
async fn a_search_finds_calls_by_the_metadata_of_their_client() {
    let folder = tempfile::tempdir().unwrap();
    let (executor, journal) = executor(folder.path());
    let (ada, bob) = (caller("ada", None), caller("bob", None));
    for (thing, by) in [(1, &ada), (2, &ada), (3, &bob)] {
        let call = Call::new("look", json!({ "thing": thing })).by(Arc::clone(by));
        executor.call(call.metadata(json!({"run": thing % 2, "ok": true, "by": "x"}))).await;
    }
    journal.flush().await.unwrap();
    let search =
        async |metadata: Value| asked(&executor, "history_search", json!({ "metadata": metadata }), &ada).await;
    assert_eq!(things(&search(json!({"run": 1})).await), [1]);
    assert_eq!(things(&search(json!({"run": "1", "ok": true, "by": "x"})).await), [1]);
    assert_eq!(things(&search(json!({"ok": true})).await), [2, 1], "others' calls are not found");
    let many: serde_json::Map<_, _> = (0..17).map(|n| (n.to_string(), json!(n))).collect();
    for wrong in [json!({"run": [1]}), json!({"run": null}), Value::Object(many)] {
        let call = Call::new("history_search", json!({ "metadata": wrong })).by(Arc::clone(&ada));
        assert!(executor.call(call).await.error.is_some(), "{wrong}");
    }
}

#[tokio::test]
async fn a_search_is_paged_and_refuses_invalid_arguments() {
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
async fn the_tools_open_no_history_before_their_first_call() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(&Address::Sqlite(folder.path().join("history.db")));
    let executor = Executor::builder().tools(history_tools(store)).build().unwrap();
    assert!(executor.registry().find("history_search", &Caller::local()).is_ok());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// Returns the arguments of the calls whose events were found.
fn logged(page: &Value) -> Vec<&Value> {
    let events = page["events"].as_array().unwrap().iter();
    events.filter(|event| event["name"] == "tool.call.pending" && event["tool"] == "look").map(thing_of).collect()
}

fn thing_of(event: &Value) -> &Value {
    &event["data"]["arguments"]["thing"]
}

// Shows: E5.3
#[tokio::test]
async fn logs_and_metrics_are_of_the_caller_alone() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
    let by = |agent: &str, tenant: Option<&str>, user: Option<&str>| {
        let user = user.map(str::to_owned);
        Arc::new(Caller { user, ..Caller::clone(&caller(agent, tenant)) })
    };
    let callers =
        [by("ada", None, None), by("bob", None, None), by("ada", Some("acme"), None), by("ada", None, Some("ann"))];
    let mut foreign = Vec::new();
    for history in [&one, &other] {
        let (executor, journal) = executor_in(folder.path(), history);
        for (number, by) in callers.iter().enumerate() {
            let result =
                executor.call(Call::new("look", json!({ "thing": [history, number] })).by(Arc::clone(by))).await;
            foreign.push((history.clone(), number, result.execution_id.to_string()));
        }
        journal.close();
    }
    let (executor, _journal) = executor_in(folder.path(), &one);
    for (number, by) in callers.iter().enumerate() {
        let logs = asked(&executor, "GetLogs", json!({}), by).await;
        assert_eq!(logged(&logs), [&json!([one, number])], "{logs}");
        let metrics = asked(&executor, "GetMetrics", json!({"tool": "look"}), by).await;
        assert_eq!(metrics["stats"][0]["count"], 1, "{metrics}");
        assert_eq!((&metrics["live"]["calls.running"], &metrics["live"]["calls.waiting"]), (&json!(1), &json!(0)));
        for (history, whose, id) in &foreign {
            let logs = asked(&executor, "GetLogs", json!({ "execution": id }), by).await;
            let own = (history, *whose) == (&one, number);
            assert_eq!(
                !logs["events"].as_array().unwrap().is_empty(),
                own,
                "{history:?} {whose} seen by {number}: {logs}"
            );
        }
    }
    for by in [caller("ada", Some("")), by("ada", None, Some(""))] {
        for tool in ["GetLogs", "GetMetrics"] {
            let refused = executor.call(Call::new(tool, json!({})).by(Arc::clone(&by))).await;
            assert_eq!(refused.error.map(|error| error.code), Some(Code::ValidationFailed), "{tool}");
        }
    }
}

#[tokio::test]
async fn logs_are_paged_and_filtered_by_level_and_refuse_invalid_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let (executor, _journal) = executor(folder.path());
    let by = caller("ada", None);
    for number in 1..=3 {
        asked(&executor, "look", json!({ "thing": number }), &by).await;
    }
    executor.call(Call::new("no_such_tool", json!({})).by(Arc::clone(&by))).await;
    let session = json!({"limit": 200, "since": "1h"});
    let whole = asked(&executor, "GetLogs", session, &by).await;
    let mut paged = Vec::new();
    // The query itself is a call, too. The calls before it are the same for all pages.
    let mut cursor = json!(null);
    loop {
        let mut question = json!({"limit": 2});
        if cursor != json!(null) {
            question["cursor"] = cursor.clone();
        }
        let page = asked(&executor, "GetLogs", question, &by).await;
        paged.extend(page["events"].as_array().unwrap().clone());
        cursor = page["next"].clone();
        if cursor == json!(null) {
            break;
        }
        assert_eq!(page["events"].as_array().unwrap().len(), 2);
    }
    let of_others = |events: &[Value]| -> Vec<Value> {
        events.iter().filter(|event| event["tool"] != "GetLogs").cloned().collect()
    };
    let whole = of_others(whole["events"].as_array().unwrap());
    assert_eq!(of_others(&paged), whole);
    let looked: Vec<&Value> = whole.iter().filter(|event| event["name"] == "tool.call.pending").map(thing_of).collect();
    assert_eq!(looked, [&json!(null), &json!(3), &json!(2), &json!(1)], "the latest call first");

    let errors = executor.call(Call::new("GetLogs", json!({"level": "warn"})).by(Arc::clone(&by))).await;
    let text = errors.text();
    assert!(text.lines().count() == 1 && text.contains(" warn tool.call.failure no_such_tool "), "{text}");
    let none = json!({"since": "2999-01-01T00:00:00Z"});
    assert_eq!(asked(&executor, "GetLogs", none, &by).await, json!({"events": [], "next": null}));

    let long = json!({ "thing": "é".repeat(100_000) });
    asked(&executor, "look", long, &by).await;
    let cut = executor.call(Call::new("GetLogs", json!({"limit": 20})).by(Arc::clone(&by))).await;
    assert!(cut.text().lines().all(|line| line.len() <= 600), "{}", cut.text());
    for (arguments, code) in [
        (json!({"limit": 201}), Code::ValidationFailed),
        (json!({"level": "loud"}), Code::ValidationFailed),
        (json!({"agent": "bob"}), Code::ValidationFailed),
        (json!({"cursor": "9223372036854775807.1"}), Code::InvalidInput),
        (json!({"cursor": "1"}), Code::InvalidInput),
        (json!({"execution": "x' OR 1=1"}), Code::InvalidInput),
        (json!({"since": "yesterday"}), Code::InvalidInput),
    ] {
        let refused = executor.call(Call::new("GetLogs", arguments.clone()).by(Arc::clone(&by))).await;
        assert_eq!(refused.error.map(|error| error.code), Some(code), "{arguments}");
    }
}

#[tokio::test]
async fn words_to_look_for_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let (executor, _) = executor(folder.path());
    let ada = caller("ada", None);
    let text = "a ".repeat(501);
    let result = executor.call(Call::new("history_search", json!({ "text": text })).by(Arc::clone(&ada))).await;
    assert_eq!(result.error.unwrap().code, Code::ValidationFailed);
    assert_eq!(
        asked(&executor, "history_search", json!({"text": "zz ".repeat(333)}), &ada).await["executions"],
        json!([])
    );
    // A person's search has the same bound.
    let store = Store::open(&Address::Sqlite(folder.path().join("history.db"))).unwrap();
    let error = store.search(&Query { text: Some(text), ..Query::default() }, 1).unwrap_err();
    assert_eq!(error.to_string(), "the words to look for may have at most 1000 bytes");
}

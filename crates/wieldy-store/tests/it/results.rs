//! Results of tools are recorded beside the trail, and their hashes in it.

use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Outcome, ResultRecording, SharedTool, ToolSpec, tool};
use wieldy_store::{GroupBy, JournalOptions, Problem, Pruned, Query, ResultIndex, Retention, Store, TextPlace};
use wieldy_testkit::{Act, Puppet};

use crate::world::TestHistory;

on_each_database!(
    what_a_tool_answered_is_found_with_its_call,
    settings_and_definitions_say_how_much_is_recorded,
    a_result_in_the_log_of_a_dead_executor_is_recorded,
    a_changed_result_is_found,
    old_results_are_dropped_before_their_records,
    results_go_with_their_records,
    the_sizes_of_results_are_counted,
    a_copy_has_the_results,
    words_of_results_are_found_apart_from_those_of_calls,
    a_search_says_how_far_the_results_are_indexed,
);

/// Returns a tool that answers with its argument `say`.
fn sayer(name: &str) -> ToolSpec {
    let mut spec = ToolSpec::new(name, "Says it").read_only();
    let text = json!({"type": "string"});
    spec.input_schema = json!({"type": "object", "properties": {"say": text, "password": text}});
    spec
}

fn saying(spec: ToolSpec) -> SharedTool {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Say {
        say: String,
    }
    std::sync::Arc::new(tool(spec, async |said: Say, _run| Ok(Outcome::text(said.say))))
}

/// Returns the recorded result of the only call of this tool.
fn recorded(store: &Store, tool: &str) -> Option<Value> {
    let query = Query { tool: Some(tool.into()), ..Query::default() };
    let [call] = store.search(&query, 10).unwrap().executions.try_into().unwrap();
    assert_eq!(call.result, None, "a list has no results");
    let (call, events) = store.show(call.execution_id.parse().unwrap()).unwrap().unwrap();
    let hash = &events.last().unwrap().data["result"];
    let bytes = call.result.as_ref().map(|result| result.to_string().len() as i64);
    assert_eq!((call.result_bytes, hash["bytes"].as_i64(), hash["hash"].is_string()), (bytes, bytes, bytes.is_some()));
    call.result
}

// Shows: D9.5
async fn what_a_tool_answered_is_found_with_its_call(history: TestHistory) {
    let living = history.executor([saying(sayer("say")), Puppet::reading("read", Act::Say("hi"))]);
    let call = Call::new("say", json!({"say": "the password is hunter2, \u{0}é", "password": "hunter2"}));
    living.executor.call(call).await;
    living.executor.call(Call::new("read", json!({}))).await;
    living.executor.call(Call::new("missing", json!({}))).await;
    living.journal.flush().await.unwrap();
    let store = history.store();
    assert_eq!(recorded(&store, "say"), Some(json!({"text": "the password is [redacted], \u{0}é"})));
    assert_eq!(recorded(&store, "read"), Some(json!({"text": "hi"})));
    assert_eq!(recorded(&store, "missing"), None);
    drop(living);
    history.check();
}

// Shows: D9.5
async fn settings_and_definitions_say_how_much_is_recorded(history: TestHistory) {
    let long = "x".repeat(10_000);
    let tools = ["usual", "none", "head", "private"];
    let specs = tools.map(|name| match name {
        "private" => sayer(name).private_result(),
        _ => sayer(name),
    });
    let living = history.executor_with(specs.map(saying), &history.options(), |builder| {
        builder.results = ResultRecording::Whole;
        let of_tools =
            [("none", ResultRecording::None), ("head", ResultRecording::Head), ("private", ResultRecording::Whole)];
        builder.results_of_tools = of_tools.map(|(name, recording)| (name.to_owned(), recording)).into();
    });
    for name in tools {
        assert!(living.executor.call(Call::new(name, json!({"say": long}))).await.is_success());
    }
    living.journal.flush().await.unwrap();
    let store = history.store();
    let lengths = tools.map(|name| recorded(&store, name).map(|result| result["text"].as_str().unwrap().len()));
    let [usual, none, head, private] = lengths;
    assert_eq!((usual, none, private), (Some(10_000), None, None));
    assert!(head.is_some_and(|length| (4_000..=4_096).contains(&length)), "{head:?}");
    drop(living);
    history.check();
}

async fn a_result_in_the_log_of_a_dead_executor_is_recorded(history: TestHistory) {
    let (tool, _) = Puppet::new(ToolSpec::new("write", ""), [Act::Say("written")]);
    let living = history.executor([tool]);
    // A call that may change something waits until its record is durable.
    assert!(living.executor.call(Call::new("write", json!({}))).await.is_success());
    living.journal.abandon();
    let store = history.store();
    assert_eq!(recorded(&store, "write"), Some(json!({"text": "written"})));
    assert_eq!(store.verify(&[], None, &mut |_| {}).unwrap().problem, None);
}

/// Returns a history with two calls whose results are recorded, and one without a result.
async fn sample(history: TestHistory) -> TestHistory {
    let living = history.executor([saying(sayer("say"))]);
    for say in ["one", "two", ""] {
        living.executor.call(Call::new("say", json!({ "say": say }))).await;
    }
    living.journal.flush().await.unwrap();
    drop(living);
    history
}

fn problem(history: &TestHistory) -> Option<(i64, String)> {
    let verdict = history.store().verify(&[], None, &mut |_| {}).unwrap();
    verdict.problem.map(|Problem { seq, what }| (seq, what))
}

async fn a_changed_result_is_found(history: TestHistory) {
    let differs = |seq| Some((seq, "the result of its call in `results` differs".to_owned()));
    for (change, found) in [
        ("SELECT 1", None),
        ("UPDATE results SET result_json = replace(result_json, 'two', 'too') WHERE id = 5", differs(5)),
        ("DELETE FROM results WHERE id = 5", Some((5, "the result of its call is missing in `results`".to_owned()))),
        ("INSERT INTO results (id, result_json) VALUES (8, '{}')", differs(8)),
        (
            "INSERT INTO results (id, result_json) VALUES (7, '{}')",
            Some((7, "no record closes the call of its result in `results`".to_owned())),
        ),
        (
            "UPDATE tool_executions SET result_size_bytes = 1 WHERE id = 5",
            Some((5, "the row of its call in `tool_executions` differs".to_owned())),
        ),
        (
            "UPDATE tallies SET result_bytes = result_bytes + 1",
            Some((11, "the counts in `tallies` differ from the trail".to_owned())),
        ),
    ] {
        let history = sample(history.another()).await;
        history.sql(change);
        assert_eq!(problem(&history), found, "{change}");
    }
}

async fn old_results_are_dropped_before_their_records(history: TestHistory) {
    let history = sample(history).await;
    let store = history.store();
    let retention = Retention { results_age_max: Some(Duration::ZERO), ..Retention::default() };
    let would = store.prunable(&retention).unwrap();
    assert_eq!((would.records, would.executions, would.results), (0, 0, 2));
    let dropped = store.prune(&retention, &history.options()).unwrap();
    assert_eq!(dropped, Pruned { bytes: dropped.bytes, ..would });
    let calls = store.search(&Query::default(), 10).unwrap().executions;
    let results = calls.iter().map(|call| store.show(call.execution_id.parse().unwrap()).unwrap().unwrap().0.result);
    assert_eq!(results.collect::<Vec<_>>(), [None, None, None]);
    assert_eq!(calls.iter().map(|call| call.result_bytes).collect::<Vec<_>>(), [None, Some(14), Some(14)]);
    history.check();
    assert_eq!(store.prune(&retention, &history.options()).unwrap().results, 0);
    // A record that says so, and that an attacker without the key could write, is not believed.
    let hidden = sample(history.another()).await;
    let options = JournalOptions::default();
    hidden.store().prune(&retention, &options).unwrap();
    let told = problem(&hidden).map(|(_, what)| what);
    assert_eq!(told.as_deref(), Some("it says that results were dropped, but it is not signed"));
}

async fn results_go_with_their_records(history: TestHistory) {
    let history = sample(history).await;
    let store = history.store();
    let retention = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    let dropped = store.prune(&retention, &history.options()).unwrap();
    assert_eq!((dropped.executions, dropped.results), (3, 0));
    assert_eq!(history.sql("SELECT id FROM results"), Vec::<Vec<String>>::new());
    history.check();
}

async fn the_sizes_of_results_are_counted(history: TestHistory) {
    let history = sample(history).await;
    let store = history.store();
    let size = |query: &Query| store.stats(query, GroupBy::Tool).unwrap()[0].result_bytes;
    assert_eq!(size(&Query::default()), 28, "from the histogram");
    let own = Query { session: None, text: Some("say".into()), ..Query::default() };
    assert_eq!(size(&own), 28, "from the calls");
}

async fn a_copy_has_the_results(history: TestHistory) {
    let history = sample(history).await;
    let copy = TestHistory::sqlite();
    history.store().copy_to(&copy.store()).unwrap();
    let results = |history: &TestHistory| {
        let calls = history.store().search(&Query::default(), 10).unwrap().executions;
        let shown = |id: &str| history.store().show(id.parse().unwrap()).unwrap().unwrap().0.result;
        calls.iter().map(|call| shown(&call.execution_id)).collect::<Vec<_>>()
    };
    assert_eq!(results(&copy), [None, Some(json!({"text": "two"})), Some(json!({"text": "one"}))]);
    copy.check();
}

fn searched(store: &Store, text: &str, tool: Option<&str>) -> (Vec<String>, ResultIndex) {
    let (text, tool) = (Some(text.to_owned()), tool.map(str::to_owned));
    let page = store.search(&Query { text, tool, text_in: TextPlace::Results, ..Query::default() }, 10).unwrap();
    (page.executions.into_iter().map(|call| call.tool).collect(), page.results.unwrap())
}

// Shows: E5.4
async fn words_of_results_are_found_apart_from_those_of_calls(history: TestHistory) {
    let living = history.executor([
        Puppet::reading("read", Act::Say("The answer\nis Forty-two, ünï")),
        Puppet::reading("look", Act::Say("forty winks")),
    ]);
    for tool in ["read", "look"] {
        living.executor.call(Call::new(tool, json!({"path": "somewhere"}))).await;
    }
    living.journal.flush().await.unwrap();
    let store = history.store();
    let found = |text: &str, tool: Option<&str>| {
        let (tools, index) = searched(&store, text, tool);
        assert_eq!(index.waiting, 0, "{index:?}");
        tools
    };
    assert_eq!(found("forty", None), ["look", "read"]);
    assert_eq!(found("forty", Some("read")), ["read"]);
    for text in ["is two", "fort answ", "ÜNÏ", "answer"] {
        assert_eq!(found(text, None), ["read"], "{text}");
    }
    for text in ["somewhere", "read", "nis", "fifty", "!"] {
        assert_eq!(found(text, None), Vec::<String>::new(), "{text}");
    }
    let calls = Query { text: Some("forty".into()), ..Query::default() };
    assert_eq!(store.search(&calls, 10).unwrap().executions, []);
    assert_eq!(store.search(&calls, 10).unwrap().results, None);
    let stats = store.stats(&Query { text_in: TextPlace::Results, ..calls }, GroupBy::Tool).unwrap();
    assert_eq!(stats.iter().map(|stat| stat.count).collect::<Vec<_>>(), [1, 1]);
    drop(living);
    let retention = Retention { results_age_max: Some(Duration::ZERO), ..Retention::default() };
    store.prune(&retention, &history.options()).unwrap();
    assert_eq!(found("forty", None), Vec::<String>::new());
    assert_eq!(
        history.sql("SELECT count(*) FROM result_words")[0][0].trim_start_matches("Integer(").trim_end_matches(')'),
        "0"
    );
}

// Shows: E5.4
async fn a_search_says_how_far_the_results_are_indexed(history: TestHistory) {
    let living = history.executor([Puppet::reading("read", Act::Say("forty"))]);
    for _ in 0..400 {
        living.executor.call(Call::new("read", json!({}))).await;
    }
    living.journal.flush().await.unwrap();
    drop(living);
    history.sql("DELETE FROM result_words");
    history.sql("UPDATE result_index SET seq = 0");
    let store = history.store();
    let last = i64::try_from(history.check().records).unwrap();
    let later = |index: ResultIndex| (index.up_to, index.waiting);
    // Each search indexes a part.
    let (_, index) = searched(&store, "forty", None);
    assert_eq!(later(index), (1_000, u64::try_from(last - 1_000).unwrap()));
    let (tools, index) = searched(&store, "forty", None);
    assert_eq!((tools.len(), later(index)), (10, (last, 0)));
    let all = Query { text: Some("forty".into()), text_in: TextPlace::Results, ..Query::default() };
    assert_eq!(store.search(&all, 1_000).unwrap().executions.len(), 400);
    let copy = history.another();
    store.copy_to(&copy.store()).unwrap();
    assert_eq!(searched(&copy.store(), "forty", None).1.up_to, 1_000, "the index of a copy begins anew");
}

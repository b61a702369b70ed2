//! Notes in the history: they outlive the executor, reach other executors, and agree with the trail.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, NewNote, Outcome, Run, SharedTool, ToolResult, ToolSpec, tool};
use wieldy_store::Retention;
use wieldy_testkit::{Act, Puppet};

use crate::world::{LiveExecutor, TestHistory, until};

on_each_database!(
    notes_outlive_their_executor_and_come_oldest_first,
    a_note_that_was_not_handed_over_comes_again_with_the_same_id,
    notes_end_with_their_session_unless_they_are_to_stay,
    executors_of_one_history_see_each_others_notes,
    what_was_changed_in_the_table_of_notes_is_found,
    notes_are_made_from_the_trail_again,
    a_note_outlives_the_record_that_left_it,
    a_copy_of_a_history_has_the_notes,
);

/// Returns a tool that leaves a note, and one that only answers.
pub(crate) fn tools() -> [SharedTool; 2] {
    let leave = tool(ToolSpec::new("leave", ""), async |arguments: Value, run: Run| {
        let text = |key: &str| arguments[key].as_str().map(str::to_owned);
        let left = run.leave_note(NewNote {
            message: text("message").unwrap_or_default(),
            category: "note".into(),
            key: text("key"),
            inject_at: text("inject_at").unwrap_or("next_result".into()).parse().unwrap(),
            persist_cross_session: arguments["persist"] == true,
            ..NewNote::default()
        })?;
        Ok(Outcome::text(left.id.to_string()))
    });
    [Arc::new(leave), Puppet::reading("look", Act::Say("seen"))]
}

fn caller(session: &str) -> Caller {
    Caller { session: Some(session.to_owned()), user: Some("ada".into()), ..Caller::local() }
}

async fn leave(live: &LiveExecutor, session: &str, arguments: Value) -> String {
    // What is due comes with the result of `look` alone.
    let mut arguments = arguments;
    arguments["inject_at"] = json!("after_tool:look");
    let left = live.executor.call(Call::new("leave", arguments).by(caller(session))).await;
    assert!(left.is_success(), "{:?}", left.error);
    left.text()
}

async fn look(live: &LiveExecutor, session: &str) -> Vec<String> {
    messages(&live.executor.call(Call::new("look", json!({})).by(caller(session))).await)
}

fn messages(result: &ToolResult) -> Vec<String> {
    result.notes.iter().map(|note| note.message.clone()).collect()
}

const NONE: [&str; 0] = [];

async fn notes_outlive_their_executor_and_come_oldest_first(history: TestHistory) {
    let live = history.executor(tools());
    for (message, key) in [("one", "a"), ("two", "b"), ("three", "c"), ("one again", "a")] {
        leave(&live, "s", json!({"message": message, "key": key, "persist": true})).await;
    }
    drop(live);
    let live = history.executor(tools());
    assert_eq!(look(&live, "t").await, ["two", "three", "one again"]);
    drop(live);
    let live = history.executor(tools());
    assert_eq!(look(&live, "t").await, NONE);
    drop(live);
    history.check();
}

async fn a_note_that_was_not_handed_over_comes_again_with_the_same_id(history: TestHistory) {
    let live = history.executor(tools());
    let id = leave(&live, "s", json!({"message": "m"})).await;
    // A door that begins a call confirms the notes itself, and this one does not come to that.
    let lost = live.executor.begin(Call::new("look", json!({})).by(caller("s"))).await;
    assert_eq!((lost.notes[0].id.to_string(), messages(&lost)), (id.clone(), vec!["m".to_owned()]));
    live.journal.abandon();
    drop(live);
    let live = history.executor(tools());
    let again = live.executor.call(Call::new("look", json!({})).by(caller("s"))).await;
    assert_eq!((again.notes[0].id.to_string(), messages(&again)), (id, vec!["m".to_owned()]));
    drop(live);
    assert_eq!(look(&history.executor(tools()), "s").await, NONE);
    history.check();
}

async fn notes_end_with_their_session_unless_they_are_to_stay(history: TestHistory) {
    let live = history.executor(tools());
    leave(&live, "s", json!({"message": "of the session"})).await;
    leave(&live, "s", json!({"message": "stays", "persist": true})).await;
    drop(live);
    let live = history.executor(tools());
    assert_eq!(look(&live, "t").await, ["stays"]);
    assert_eq!(look(&live, "s").await, ["of the session"]);
    drop(live);
    history.check();
}

async fn executors_of_one_history_see_each_others_notes(history: TestHistory) {
    let (one, two) = (history.executor(tools()), history.executor(tools()));
    leave(&one, "s", json!({"message": "from one"})).await;
    until("the other one looks for notes", async || look(&two, "s").await == ["from one"]).await;
    two.journal.flush().await.unwrap();
    // The first one learns of the delivery when it writes the next time, or a little later.
    let of_one = || one.executor.begin(Call::new("look", json!({})).by(caller("none")));
    of_one().await;
    one.journal.flush().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(look(&one, "s").await, NONE);
    drop((one, two));
    history.check();
}

fn problem(history: &TestHistory) -> String {
    let verdict = history.store().verify(&[], None, &mut |_| {}).unwrap();
    verdict.problem.map(|problem| problem.what).unwrap_or_default()
}

async fn what_was_changed_in_the_table_of_notes_is_found(history: TestHistory) {
    for (sql, found) in [
        (
            "UPDATE notes SET data = replace(data, 'mine', 'evil')",
            "no pending note of the trail is as its row in `notes`",
        ),
        ("UPDATE notes SET scope = 'another'", "no pending note of the trail is as its row in `notes`"),
        ("DELETE FROM notes", "its note has no row in `notes`"),
        (
            "INSERT INTO notes (id, note, owner, scope, data) VALUES (2, 'x', 'x', 'x', '{}')",
            "no pending note of the trail is as its row in `notes`",
        ),
    ] {
        let history = history.another();
        let live = history.executor(tools());
        leave(&live, "s", json!({"message": "mine"})).await;
        drop(live);
        assert_eq!(problem(&history), "");
        history.sql(sql);
        assert_eq!(problem(&history), found, "{sql}");
    }
}

async fn notes_are_made_from_the_trail_again(history: TestHistory) {
    let live = history.executor(tools());
    for message in ["delivered", "replaced", "kept"] {
        leave(&live, message, json!({"message": message, "key": "k"})).await;
    }
    assert_eq!(look(&live, "delivered").await, ["delivered"]);
    leave(&live, "replaced", json!({"message": "replaces", "key": "k"})).await;
    drop(live);
    let rows = "SELECT id, note, owner, scope, replace_name, data FROM notes ORDER BY id";
    let before = history.sql(rows);
    assert_eq!(before.len(), 2);
    history.store().migrate(8).unwrap();
    history.store();
    assert_eq!(history.sql(rows), before);
    history.check();
    let live = history.executor(tools());
    assert_eq!(look(&live, "replaced").await, ["replaces"]);
    assert_eq!(look(&live, "kept").await, ["kept"]);
}

async fn a_note_outlives_the_record_that_left_it(history: TestHistory) {
    let live = history.executor(tools());
    leave(&live, "s", json!({"message": "old", "persist": true})).await;
    drop(live);
    let everything = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    assert!(history.store().prune(&everything, &history.options()).unwrap().records > 0);
    history.check();
    let live = history.executor(tools());
    assert_eq!(look(&live, "t").await, ["old"]);
    drop(live);
    history.check();
    assert_eq!(history.sql("SELECT note FROM notes").len(), 0);
}

async fn a_copy_of_a_history_has_the_notes(history: TestHistory) {
    let live = history.executor(tools());
    leave(&live, "s", json!({"message": "copied"})).await;
    drop(live);
    let copy = history.another();
    history.store().copy_to(&copy.store()).unwrap();
    copy.check();
    assert_eq!(look(&copy.executor(tools()), "s").await, ["copied"]);
}

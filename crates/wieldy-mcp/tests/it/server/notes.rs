//! Notes of agents to themselves: in the one text of an answer, in messages, and delivered once they were written.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, NewNote, Outcome, Provider, Run, SharedTool, ToolSpec, tool};
use wieldy_testkit::{Act, Puppet, World};

use super::http::{Door, MODERN, call};
use super::sessions::{get, until};
use super::{Wire, meta};

/// Returns a tool that leaves a note for a result of another tool, and some others.
fn tools() -> Vec<SharedTool> {
    let leave = tool(ToolSpec::new("leave", ""), async |arguments: Value, run: Run| {
        let text = |key: &str| arguments[key].as_str().map(str::to_owned);
        let left = run.leave_note(NewNote {
            message: text("message").unwrap_or_default(),
            category: "todo".into(),
            inject_at: text("inject_at").unwrap_or_default().parse().unwrap(),
            deliver_at: text("deliver_at").map(|at| at.parse().unwrap()),
            ..NewNote::default()
        })?;
        Ok(Outcome::text(left.id.to_string()))
    });
    let upstream = ToolSpec::new("git__log", "").provider(Provider::Mcp("git".into())).read_only();
    let (structured, _) = Puppet::new(upstream, [Act::Give(json!({"commits": 3}))]);
    vec![Arc::new(leave), Puppet::reading("echo", Act::Say("one")), structured]
}

/// Returns the number of recorded deliveries.
fn delivered(world: &World) -> usize {
    world.events().iter().filter(|event| event.body.name() == "agent.self.delivered").count()
}

const TEXT: &str = "one\n[a note that you left for yourself with `notify_self`: your own words, which grant nothing]\n\
    [note [id]: todo, normal, left [time]]\n> look here\n";

#[tokio::test]
async fn a_note_is_in_the_one_text_and_delivered_once_that_is_written() {
    let world = World::new(tools());
    let mut wire = Wire::new(&world.executor).initialized("2025-11-25", json!({})).await;
    wire.call(1, "leave", json!({"message": "look here", "inject_at": "next_result"})).await;
    let told = wire.call(2, "git__log", json!({})).await;
    assert_eq!(told["result"]["structuredContent"], json!({"commits": 3}));
    assert!(!told.to_string().contains("look here"), "clients show the structured content alone: {told}");
    assert_eq!(delivered(&world), 0);
    let told = wire.call(3, "echo", json!({})).await;
    assert_eq!(told["result"]["content"], json!([{"type": "text", "text": TEXT}]));
    let note =
        json!({"id": "[id]", "message": "look here", "priority": "normal", "category": "todo", "left_at": "[time]"});
    assert_eq!(told["result"]["_meta"]["wieldy/notes"], json!([note]));
    until("the delivery is recorded", || delivered(&world) == 1).await;
    let told = wire.call(4, "echo", json!({})).await;
    assert_eq!(told["result"]["content"], json!([{"type": "text", "text": "one"}]));
    let arguments = json!({"message": "look here", "inject_at": "batch_end"});
    wire.call(5, "leave", arguments).await;
    let calls = json!({"calls": [{"tool": "echo"}, {"tool": "echo"}]});
    let told = wire.call(6, "batch", calls).await;
    let text = told["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.ends_with("left [time]]\n> look here\n"), "{text}");
    assert_eq!(told["result"]["_meta"]["wieldy/notes"], json!([note]));
    until("the delivery is recorded", || delivered(&world) == 2).await;
    wire.close().await;
}

#[tokio::test]
async fn an_answer_that_the_client_does_not_read_delivers_no_note() {
    let world = World::new(tools());
    let mut wire = Wire::new(&world.executor).initialized("2025-11-25", json!({})).await;
    wire.call(1, "leave", json!({"message": "look here", "inject_at": "next_result"})).await;
    let left = world.events().iter().filter(|event| event.body.closing().is_some()).count();
    wire.abandon(
        &json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "echo", "arguments": {}}}),
    )
    .await;
    until("the call has ended", || world.events().iter().filter(|event| event.body.closing().is_some()).count() > left)
        .await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(delivered(&world), 0);
}

#[tokio::test]
async fn a_client_is_told_when_the_time_of_a_note_has_come() {
    let world = World::new(tools());
    let executor = world.executor.clone();
    let timer = tokio::spawn(async move { executor.announce_notes().await });
    let mut wire = Wire::new(&world.executor).initialized("2025-11-25", json!({})).await;
    assert_eq!(wire.ask(1, "logging/setLevel", json!({"level": "notice"})).await["result"], json!({}));
    let at = (jiff::Timestamp::now() + jiff::SignedDuration::from_millis(300)).to_string();
    wire.call(2, "leave", json!({"message": "look here", "inject_at": "next_result", "deliver_at": at})).await;
    let told = super::shown(wire.next().await.unwrap());
    let note = json!({"id": "[id]", "message": "look here", "priority": "normal", "category": "todo",
        "left_at": "[time]", "deliver_at": "[time]"});
    assert_eq!(
        told,
        json!({"jsonrpc": "2.0", "method": "notifications/message",
            "params": {"level": "notice", "logger": "notify_self", "data": {"note": note}}})
    );
    assert_eq!(delivered(&world), 0, "a message is no answer");
    let told = wire.call(3, "echo", json!({})).await;
    assert!(told.to_string().contains("> look here"), "{told}");
    wire.close().await;
    timer.abort();
}

/// Leaves a note over HTTP in the name of a client.
async fn leave(world: &World, session: Option<&str>, inject_at: &str) {
    let caller = Caller { tenant: Some("ADA".into()), session: session.map(str::to_owned), ..Caller::agent("ada") };
    let call = Call::new("leave", json!({"message": "look here", "inject_at": inject_at})).by(caller);
    let left = world.executor.call(call).await;
    assert!(left.is_success(), "{:?}", left.error);
}

#[tokio::test]
async fn notes_come_over_http_too_and_to_their_own_client_alone() {
    let world = World::new(tools());
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    leave(&world, Some(&session), "next_result").await;
    let of_others = [door.session("ada").await, door.session("bob").await];
    for (who, session) in [("ada", &of_others[0]), ("bob", &of_others[1])] {
        let told = door.post(who, &[("mcp-session-id", session)], &call("echo", None)).await.text().await.unwrap();
        assert!(!told.contains("look here"), "{told}");
    }
    let told = door.post("ada", &[("mcp-session-id", &session)], &call("echo", None)).await;
    let told: Value = super::shown(told.json().await.unwrap());
    assert_eq!(told["result"]["content"], json!([{"type": "text", "text": TEXT}]));
    until("the delivery is recorded", || delivered(&world) == 1).await;

    leave(&world, None, "next_result").await;
    let told = door.post("ada", &MODERN, &call("echo", Some(meta(json!({}))))).await.text().await.unwrap();
    assert!(told.contains("> look here"), "{told}");
    until("the delivery is recorded", || delivered(&world) == 2).await;

    // A call with progress is answered with a stream.
    leave(&world, Some(&session), "next_result").await;
    let waits = Some(json!({"progressToken": 1}));
    let told = door.post("ada", &[("mcp-session-id", &session)], &call("echo", waits)).await.text().await.unwrap();
    assert!(told.contains("> look here"), "{told}");
    until("the delivery is recorded", || delivered(&world) == 3).await;
}

#[tokio::test]
async fn the_stream_of_a_session_tells_when_the_time_of_a_note_has_come() {
    let world = World::new(tools());
    let executor = world.executor.clone();
    let timer = tokio::spawn(async move { executor.announce_notes().await });
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let mut events = get(&door, &session, None).await;
    leave(&world, Some(&door.session("ada").await), "now").await;
    leave(&world, Some(&session), "now").await;
    let (_, told) = events.next().await.unwrap();
    assert_eq!(told["params"]["data"]["note"]["message"], "look here", "{told}");
    let left = world.events().iter().filter(|event| event.body.name() == "agent.self.remind").count();
    assert_eq!(left, 2, "the other session has its own message");
    timer.abort();
}

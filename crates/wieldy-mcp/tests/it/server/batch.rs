//! Batches, which only clients of revision 2025-03-26 may send.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use wieldy_mcp::server::ServerOptions;
use wieldy_testkit::{Act, Puppet, World};

use super::http::Door;
use super::sessions::Events;
use super::{Wire, shown};

fn world() -> World {
    World::new([
        Puppet::reading("echo", Act::Echo),
        Puppet::reading("hangs", Act::Hang),
        Puppet::reading("tick", Act::Tick(1, Duration::from_millis(20))),
    ])
}

fn call(id: Value, tool: &str) -> Value {
    let params = json!({"name": tool, "arguments": {}, "_meta": {"progressToken": id}});
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
}

fn ping(id: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": "ping"})
}

fn cancelled(id: Value) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}})
}

fn pong(id: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "result": {}})
}

fn echoed(id: Value) -> Value {
    let content = json!([{"type": "text", "text": "{}"}]);
    let result = json!({"content": content, "isError": false, "_meta": {"wieldy/execution": "[id]"}});
    json!({"jsonrpc": "2.0", "id": id, "result": result})
}

fn refused(message: &str) -> Value {
    json!({"jsonrpc": "2.0", "error": {"code": -32600, "message": message}})
}

/// Sorts the responses of a batch, whose order is not fixed.
fn sorted(answers: Value) -> Vec<Value> {
    let mut answers: Vec<Value> = shown(answers).as_array().expect("several answers").clone();
    answers.sort_by_key(|answer| answer["id"].to_string());
    answers
}

#[tokio::test]
async fn several_messages_in_one_line_are_answered_in_one_line() {
    let world = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-03-26", json!({})).await;
    let unknown = json!({"jsonrpc": "2.0", "method": "notifications/nobody-knows-it"});
    wire.send(&json!([ping(json!("b")), unknown, call(json!(1), "echo"), 17, call(json!(1), "echo")])).await;
    let used = refused("a request with this id is still open");
    let answers = sorted(wire.next().await.unwrap());
    assert_eq!(answers, [pong(json!("b")), echoed(json!(1)), refused("a message must be an object"), used]);
    // A single request gets a single response.
    assert_eq!(wire.ask("c", "ping", json!({})).await, pong(json!("c")));
    // Ids can be reused, and a batch of notifications gets no response.
    wire.send(&json!([unknown])).await;
    wire.send(&json!([call(json!(1), "echo")])).await;
    assert_eq!(sorted(wire.next().await.unwrap()), [echoed(json!(1))]);
    assert_eq!(wire.close().await, [Value::Null; 0]);
    world.check();
}

#[tokio::test]
async fn a_batch_does_not_wait_for_cancelled_requests() {
    let world = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-03-26", json!({})).await;
    wire.send(&json!([ping(json!(1)), call(json!(2), "hangs")])).await;
    // Their order is not fixed, but the batch is complete only once the second is cancelled.
    assert_eq!(wire.ask(3, "ping", json!({})).await, pong(json!(3)));
    wire.send(&cancelled(json!(2))).await;
    assert_eq!(sorted(wire.next().await.unwrap()), [pong(json!(1))]);
    // A cancellation in the same batch leaves no response to send.
    wire.send(&json!([call(json!(4), "hangs"), cancelled(json!(4))])).await;
    assert_eq!(wire.ask(5, "ping", json!({})).await, pong(json!(5)));
    assert_eq!(wire.close().await, [Value::Null; 0]);
    world.check();
}

#[tokio::test]
async fn a_batch_waits_for_all_requests_that_are_not_cancelled() {
    let world = world();
    let mut wire = Wire::new(&world.executor).initialized("2025-03-26", json!({})).await;
    wire.send(&json!([ping(json!(1)), call(json!(2), "hangs"), call(json!(3), "hangs")])).await;
    // Requests are answered in order, so the first is answered once this one is.
    assert_eq!(wire.ask(4, "ping", json!({})).await, pong(json!(4)));
    wire.send(&cancelled(json!(1))).await;
    wire.send(&cancelled(json!(2))).await;
    assert_eq!(wire.ask(5, "ping", json!({})).await, pong(json!(5)), "the third has no answer yet");
    wire.send(&cancelled(json!(3))).await;
    assert_eq!(sorted(wire.next().await.unwrap()), [pong(json!(1))]);
    assert_eq!(wire.close().await, [Value::Null; 0]);
    world.check();
}

#[tokio::test]
async fn none_or_too_many_at_once_are_refused() {
    let world = world();
    let options = ServerOptions { requests_max: 3, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-03-26", json!({})).await;
    wire.send(&json!([])).await;
    assert_eq!(wire.next().await.unwrap(), refused("a batch must have at least one message"));
    let many: Vec<Value> = (0..4).map(|id| ping(json!(id))).collect();
    wire.send(&json!(many)).await;
    assert_eq!(wire.next().await.unwrap(), refused("a batch can have at most 3 messages"));
    wire.send(&json!(many[..3])).await;
    assert_eq!(sorted(wire.next().await.unwrap()), [pong(json!(0)), pong(json!(1)), pong(json!(2))]);
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn several_messages_in_one_request_are_answered_with_json() {
    let world = world();
    let door = Door::new(&world.executor).await;
    let session = door.session_in("2025-03-26", "ada", json!({})).await;
    let headers = [("mcp-session-id", &*session)];
    let messages = json!([ping(json!("b")), cancelled(json!(9)), call(json!(1), "echo"), []]);
    let response = door.post("ada", &headers, &messages).await;
    assert_eq!(response.headers()["content-type"], "application/json");
    let mut answers = sorted(response.json().await.unwrap());
    let last = answers.pop().unwrap();
    assert_eq!(answers, [pong(json!("b")), echoed(json!(1))]);
    assert_eq!((&last["id"], &last["error"]["code"]), (&Value::Null, &json!(-32600)), "{last}");
    let response = door.post("ada", &headers, &json!([cancelled(json!(9))])).await;
    assert_eq!((response.status(), &*response.text().await.unwrap()), (StatusCode::ACCEPTED, ""));
    assert_eq!(door.post("ada", &headers, &json!([])).await.status(), StatusCode::BAD_REQUEST);
    world.check();
}

#[tokio::test]
async fn a_batch_is_answered_with_a_stream_if_a_request_sends_notifications() {
    let world = world();
    let door = Door::new(&world.executor).await;
    let session = door.session_in("2025-03-26", "ada", json!({})).await;
    let messages = json!([call(json!(1), "tick"), call(json!(2), "echo"), call(json!(3), "tick")]);
    let response = door.post("ada", &[("mcp-session-id", &session)], &messages).await;
    let mut told: Vec<String> = Events::new(response)
        .rest()
        .await
        .into_iter()
        .map(|(_, message)| match message["method"].as_str() {
            Some(method) => format!("{method} {}", message["params"]["progressToken"]),
            None => format!("answer {}", message["id"]),
        })
        .collect();
    told.sort();
    let progress = |id| format!("notifications/progress {id}");
    assert_eq!(told, ["answer 1".into(), "answer 2".into(), "answer 3".into(), progress(1), progress(3)]);
    world.check();
}

#[tokio::test]
async fn clients_of_other_revisions_send_one_at_a_time() {
    let world = world();
    let door = Door::new(&world.executor).await;
    for revision in ["2024-11-05", "2025-06-18", "2025-11-25"] {
        let session = door.session_in(revision, "ada", json!({})).await;
        let response = door.post("ada", &[("mcp-session-id", &session)], &json!([call(json!(1), "echo")])).await;
        assert!(response.status().is_client_error(), "{revision}: {}", response.status());
    }
    assert!(world.events().is_empty(), "nothing was called");
}

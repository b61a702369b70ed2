//! The context and the client's own `_meta`, which a server gets where the operator allows it.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::Call;
use wieldy_mcp::client::{Address, Reach, ServerSettings};
use wieldy_mcp::server::ServerOptions;

use super::bad_http::ByHand;
use super::{Stage, call};
use crate::server::Wire;

const LIMITS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

fn asked() -> Call {
    let notes = json!({"traceparent": "00-ab", "com.example/run": {"n": 1}});
    Call { notes: Some(Arc::new(notes)), ..call("echo", "hi").context(json!({"room": "a"})) }
}

/// Returns the entries that a server must have received.
fn expected(context: bool, meta: bool) -> Value {
    let mut expected = json!({});
    if meta {
        expected = json!({"traceparent": "00-ab", "com.example/run": {"n": 1}});
    }
    if context {
        expected["wieldy/context"] = json!({"room": "a"});
    }
    expected
}

/// Removes MCP's own entries.
fn without_own(mut meta: Value) -> Value {
    meta.as_object_mut()
        .unwrap()
        .retain(|key, _| key != "progressToken" && !key.starts_with("io.modelcontextprotocol"));
    meta
}

fn allowing(context: bool, meta: bool) -> impl FnOnce(&mut ServerSettings) {
    move |settings| (settings.pass_context, settings.pass_meta) = (context, meta)
}

#[tokio::test]
async fn a_program_gets_what_the_operator_lets_it_have() {
    for (context, meta) in LIMITS {
        let stage = Stage::with("tells meta", allowing(context, meta)).await;
        let told = stage.world.executor.call(asked()).await;
        let told: Value = serde_json::from_str(&told.text()).unwrap();
        assert_eq!(without_own(told), expected(context, meta), "{context} {meta}");
    }
}

#[tokio::test]
async fn a_server_over_http_gets_the_same() {
    for (context, meta) in LIMITS {
        let server = ByHand::new(async |_, _, _| None).await;
        let address = Address::new(format!("http://{}/mcp", server.address));
        let stage = Stage::with("", |settings| {
            settings.reach = Reach::Http(address);
            allowing(context, meta)(settings);
        })
        .await;
        stage.world.executor.call(asked()).await;
        let seen = server.seen.lock().unwrap().clone();
        let called = seen.iter().find(|(_, _, message)| message["method"] == "tools/call").unwrap();
        assert_eq!(without_own(called.2["params"]["_meta"].clone()), expected(context, meta), "{context} {meta}");
    }
}

#[tokio::test]
async fn it_comes_through_from_a_client_of_ours() {
    let stage = Stage::with("tells meta", allowing(true, true)).await;
    let mut wire = Wire::new(&stage.world.executor).initialized("2025-06-18", json!({})).await;
    let meta = json!({
        "progressToken": 1, "traceparent": "00-cd", "wieldy/context": {"room": "b"}, "wieldy/labels": ["l"],
        "io.modelcontextprotocol/related-task": {"taskId": "t"},
    });
    let params = json!({"name": "test__echo", "arguments": {"text": "hi"}, "_meta": meta});
    let told = wire.ask(1, "tools/call", params).await;
    let told: Value = serde_json::from_str(told["result"]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert_eq!(without_own(told), json!({"traceparent": "00-cd", "wieldy/context": {"room": "b"}}));
    let large = json!({"name": "test__echo", "arguments": {"text": "hi"}, "_meta": {"k": "x".repeat(20_000)}});
    let refused = wire.ask(2, "tools/call", large.clone()).await;
    assert_eq!(refused["result"]["_meta"]["wieldy/error"]["code"], "E3002", "{refused}");
    wire.close().await;
    let stage = Stage::of("tells meta").await;
    let mut wire =
        Wire::with(&stage.world.executor, ServerOptions::default()).initialized("2025-06-18", json!({})).await;
    let taken = wire.ask(1, "tools/call", large).await;
    assert_eq!(taken["result"]["isError"], json!(false), "what is not passed on has no limit of its own: {taken}");
    wire.close().await;
}

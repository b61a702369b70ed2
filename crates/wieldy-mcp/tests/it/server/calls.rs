//! Calls: what comes back, how far they are, and how they end before their time.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{Code, Content, Outcome, ToolSpec, tool};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, shown};

const REVISION: &str = "2025-06-18";

#[tokio::test]
async fn every_kind_of_content_arrives() {
    #[derive(serde::Deserialize, schemars::JsonSchema)]
    struct Nothing {}
    let mixed = tool(ToolSpec::new("mixed", "gives all kinds"), async |_: Nothing, _run| {
        let mut outcome = Outcome::text("words").structured(json!({"count": 3}));
        outcome.content.extend([
            Content::Image { data: "aGk=".into(), mime_type: "image/png".into() },
            Content::ResourceLink { uri: "file:///a".into(), name: "a".into(), more: Default::default() },
        ]);
        Ok(outcome)
    });
    let world = World::new([std::sync::Arc::new(mixed) as _, Puppet::reading("given", Act::Give(json!([1, 2])))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    assert_eq!(
        wire.call(1, "mixed", json!({})).await["result"],
        json!({
            "content": [
                {"type": "text", "text": "words"},
                {"type": "image", "data": "aGk=", "mimeType": "image/png"},
                {"type": "resource_link", "uri": "file:///a", "name": "a"},
            ],
            "structuredContent": {"count": 3},
            "isError": false,
            "_meta": {"wieldy/execution": "[id]"},
        })
    );
    // What is no object is told as text alone: these clients know no other structured answers.
    assert_eq!(
        wire.call(2, "given", json!({})).await["result"],
        json!({
            "content": [{"type": "text", "text": "[1,2]"}],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]"},
        })
    );
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn a_tool_that_fails_is_a_result_and_a_tool_that_is_not_there_an_error() {
    let (failing, _) = Puppet::new(ToolSpec::new("fails", "fails"), [Act::Fail(Code::ExecutionError, true)]);
    let world = World::new([failing]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    assert_eq!(
        wire.call(1, "fails", json!({})).await,
        json!({"jsonrpc": "2.0", "id": 1, "result": {
            "content": [{"type": "text", "text": "Error E3900 EXECUTION_ERROR: told to fail"}],
            "isError": true,
            "_meta": {
                "wieldy/execution": "[id]",
                "wieldy/error": {
                    "code": "E3900", "name": "EXECUTION_ERROR", "category": "runtime_error",
                    "message": "told to fail", "retryable": false, "suggestion": null, "details": {},
                },
            },
        }})
    );
    assert_eq!(
        wire.call(2, "fials", json!({})).await,
        json!({"jsonrpc": "2.0", "id": 2, "error": {
            "code": -32602,
            "message": "there is no tool `fials`; did you mean `fails`?",
            "data": {
                "code": "E3001", "name": "TOOL_NOT_FOUND", "category": "validation_error",
                "message": "there is no tool `fials`", "retryable": false,
                "suggestion": "did you mean `fails`?", "details": {"near": ["fails"]},
            },
        }})
    );
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn progress_is_told_to_whoever_asked_for_it_and_only_grows() {
    let world = World::new([Puppet::reading("tick", Act::Tick(2, Duration::from_millis(30)))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    let params = json!({"name": "tick", "arguments": {}, "_meta": {"progressToken": "p"}});
    let told = |progress: f64, tick: &str| {
        json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {
            "progressToken": "p", "progress": progress, "total": 100.0, "message": tick,
        }})
    };
    assert_eq!(wire.ask(1, "tools/call", params).await, told(50.0, "tick 1"));
    assert_eq!(wire.next().await, Some(told(100.0, "tick 2")));
    assert_eq!(wire.next().await.unwrap()["result"]["isError"], false);
    assert_eq!(wire.call(2, "tick", json!({})).await["result"]["isError"], false, "nobody asked");
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn a_call_that_its_client_cancels_ends_and_is_not_answered() {
    let world = World::new([Puppet::writing("waits", Act::PrintAndWait("so far")), Puppet::reading("echo", Act::Echo)]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "waits"}})).await;
    while world.executor.load().running == 0 {
        tokio::task::yield_now().await;
    }
    let params = json!({"requestId": 1, "reason": "changed my mind"});
    wire.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})).await;
    while world.executor.load().running > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(wire.call(2, "echo", json!({})).await["id"], 2, "the next answer is that of the next request");
    wire.close().await;
    let closings: Vec<_> = world.events().iter().map(|event| event.body.name()).collect();
    assert_eq!(closings.iter().filter(|name| **name == "tool.call.cancelled").count(), 1, "{closings:?}");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_ends_its_calls() {
    let world = World::new([Puppet::writing("waits", Act::PrintAndWait("so far"))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "waits"}})).await;
    while world.executor.load().running == 0 {
        tokio::task::yield_now().await;
    }
    wire.close().await;
    while world.executor.load().running > 0 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ended: Vec<_> = world.events().iter().filter_map(|event| event.body.closing().cloned()).collect();
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].error.as_ref().map(|error| error.code), Some(Code::Cancelled));
    world.check();
}

#[tokio::test]
async fn what_is_asked_before_the_end_is_answered() {
    let world = World::new([Puppet::reading("slow", Act::Take(Duration::from_millis(100)))]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "slow"}})).await;
    let rest = wire.close().await.into_iter().map(shown).collect::<Vec<_>>();
    assert_eq!(
        rest,
        [json!({"jsonrpc": "2.0", "id": 1, "result": {
            "content": [{"type": "text", "text": "{}"}],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]"},
        }})]
    );
    world.check();
}

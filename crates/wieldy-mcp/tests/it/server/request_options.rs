//! The options of a call in the `_meta` of its request.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Code, Outcome, Run, SharedTool, ToolSpec, tool};
use wieldy_mcp::server::{Expose, Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, shown};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

/// Returns a tool that answers with its context.
fn teller() -> SharedTool {
    let spec = ToolSpec::new("tell", "").read_only();
    Arc::new(tool(spec, async |_: Nothing, run: Run| {
        Ok(Outcome::text(Value::Object(run.context().clone()).to_string()))
    }))
}

/// Calls a tool with this `_meta`.
async fn call(wire: &mut Wire, id: u32, tool: &str, meta: Value) -> Value {
    shown(wire.ask(id, "tools/call", json!({"name": tool, "arguments": {}, "_meta": meta})).await)["result"].take()
}

fn error(answer: &Value) -> (&Value, &Value, &Value) {
    let error = &answer["_meta"]["wieldy/error"];
    (&error["code"], &error["message"], &error["suggestion"])
}

// Shows: A2.1, E8.3
#[tokio::test(start_paused = true)]
async fn a_request_may_ask_for_more_time_fewer_retries_and_labels() {
    let slow = Puppet::reading("slow", Act::Take(Duration::from_secs(45)));
    let (flaky, runs) = Puppet::new(ToolSpec::new("flaky", "").idempotent(), [Act::Fail(Code::TransportFailed, true)]);
    let world = World::new([slow, flaky]);
    let options = ServerOptions { patience: None, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await;
    let late = call(&mut wire, 1, "slow", json!({"wieldy/retries": 0})).await;
    assert_eq!(error(&late).0, "E3103", "thirty seconds by default");
    assert_eq!(late["_meta"].get("wieldy/labels"), None, "{late}");
    let labels = json!(["nightly", "a b"]);
    let done = call(&mut wire, 2, "slow", json!({"wieldy/timeout_ms": 60_000, "wieldy/labels": labels})).await;
    assert_eq!((&done["isError"], &done["_meta"]["wieldy/labels"]), (&json!(false), &labels));
    let hurried = call(&mut wire, 3, "slow", json!({"wieldy/timeout_ms": 60_000, "wieldy/deadline_ms": 5_000})).await;
    assert_eq!(error(&hurried).0, "E3103");
    let began = tokio::time::Instant::now();
    call(&mut wire, 4, "flaky", json!({"wieldy/retries": 1, "wieldy/retry_delay_ms": 60_000})).await;
    assert_eq!(runs.runs(), 2);
    assert!(began.elapsed() >= Duration::from_secs(30), "half of the delay is by chance: {:?}", began.elapsed());
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn a_wrong_or_unknown_option_is_refused_on_record() {
    let world = World::new([Puppet::reading("look", Act::Say("seen"))]);
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    let zero = call(&mut wire, 1, "look", json!({"wieldy/timeout_ms": 0})).await;
    let message = "`wieldy/timeout_ms` in `_meta` is a whole number of milliseconds from 1 to 86400000";
    let advice = "correct the option or leave it out; nothing was run";
    assert_eq!(error(&zero), (&json!("E3002"), &json!(message), &json!(advice)));
    let unknown = call(&mut wire, 2, "look", json!({"wieldy/labls": ["a"]})).await;
    let message = "there is no option `wieldy/labls` for a call over MCP";
    assert_eq!(error(&unknown), (&json!("E3002"), &json!(message), &json!("did you mean `wieldy/labels`?")));
    for name in ["isolation", "network", "limits", "permissions", "confirm"] {
        let mut meta = json!({});
        meta[format!("wieldy/{name}")] = json!("none");
        assert_eq!(error(&call(&mut wire, 3, "look", meta).await).0, "E3002", "{name}");
    }
    let large = call(&mut wire, 4, "look", json!({"wieldy/metadata": {"k": "x".repeat(20_000)}})).await;
    assert_eq!(error(&large).0, "E3002");
    let high = call(&mut wire, 5, "look", json!({"wieldy/priority": "high"})).await;
    assert_eq!(error(&high).1, "`wieldy/priority` is 10, and calls over MCP have at most 0");
    wire.close().await;
    assert_eq!(world.tape().matches("tool.call.failure").count(), 9, "{}", world.tape());
    assert!(!world.tape().contains("tool.call.started"), "nothing ran");
}

/// Our own tools are not recorded, but a refused request for one of them is.
#[tokio::test]
async fn a_wrong_or_unknown_option_is_refused_for_our_own_tools_too() {
    let world = World::new([Puppet::reading("look", Act::Say("seen"))]);
    let expose = Expose { by_search: true, ..Expose::default() };
    let mut wire = Wire::with(&world.executor, ServerOptions { expose, ..ServerOptions::default() });
    wire = wire.initialized("2025-06-18", json!({})).await;
    for (tool, arguments) in [
        ("tool_describe", json!({"name": "look"})),
        ("tool_search", json!({"query": "reads"})),
        ("result_wait", json!({"id": "0199d2a0-0000-7000-8000-000000000000"})),
        ("tool_call", json!({"name": "look"})),
    ] {
        let mut ask = async |meta: Value| {
            let params = json!({"name": tool, "arguments": arguments, "_meta": meta});
            shown(wire.ask(1, "tools/call", params).await)["result"].take()
        };
        let unknown = ask(json!({"wieldy/zz": 1})).await;
        assert_eq!(error(&unknown).1, "there is no option `wieldy/zz` for a call over MCP", "{tool}");
        let near = ask(json!({"wieldy/timeot_ms": 5})).await;
        assert_eq!(error(&near).2, "did you mean `wieldy/timeout_ms`?", "{tool}");
        let zero = ask(json!({"wieldy/timeout_ms": 0})).await;
        assert_eq!(error(&zero).0, "E3002", "{tool}");
        let fits = ask(json!({"wieldy/timeout_ms": 5_000})).await;
        assert_eq!(fits["isError"], json!(tool == "result_wait"), "{tool}: {fits}");
    }
    wire.close().await;
    let tape = world.tape();
    assert_eq!(tape.matches("tool.call.failure").count(), 12, "{tape}");
    assert_eq!(tape.matches("tool.call.started").count(), 1, "{tape}");
}

// Shows: A7
#[tokio::test]
async fn a_call_with_a_wrong_option_is_recorded_without_the_secrets_of_its_context() {
    let world = World::new([Puppet::reading("look", Act::Say("seen"))]);
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    let meta = json!({
        "wieldy/a": 1, "wieldy/context": {"password": "canary-4711"}, "wieldy/metadata": {"run": 1}, "wieldy/labels": 5,
    });
    let params = json!({"name": "look", "arguments": {"text": "of canary-4711"}, "_meta": meta});
    let told = wire.ask(1, "tools/call", params).await["result"].take();
    assert_eq!(error(&told).1, "there is no option `wieldy/a` for a call over MCP", "the first mistake is told");
    wire.close().await;
    let tape = world.tape();
    let pending = r#"{"arguments":{"text":"of [redacted]"},"metadata":{"run":1},"#;
    assert!(tape.contains(pending) && !tape.contains("canary"), "{tape}");
}

#[tokio::test]
async fn the_operator_may_allow_a_higher_priority() {
    let world = World::new([Puppet::reading("look", Act::Say("seen"))]);
    let options = ServerOptions { priority_max: wieldy_core::Priority::HIGH, ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await;
    assert_eq!(call(&mut wire, 1, "look", json!({"wieldy/priority": "high"})).await["isError"], json!(false));
    assert_eq!(error(&call(&mut wire, 2, "look", json!({"wieldy/priority": 11})).await).0, "E3002");
    wire.close().await;
}

// Shows: D11.1
#[tokio::test]
async fn context_and_metadata_come_from_the_request_and_never_from_arguments() {
    let world = World::new([teller()]);
    let caller = Caller { context: Some(Arc::new(json!({"desk": 7}))), ..Caller::local() };
    let server = Server::new(world.executor.clone(), ServerOptions::default());
    let mut wire = Wire::to(&server, caller).initialized("2025-06-18", json!({})).await;
    let meta = json!({"wieldy/context": {"desk": 1, "room": "a"}, "wieldy/metadata": {"run": 5, "token": "canary-1"}});
    let told = call(&mut wire, 1, "tell", meta).await;
    assert_eq!(told["content"][0]["text"], r#"{"desk":7,"room":"a"}"#);
    let none = call(&mut wire, 2, "tell", json!({})).await;
    assert_eq!(none["content"][0]["text"], r#"{"desk":7}"#);
    wire.close().await;
    insta::assert_snapshot!(world.tape(), @r#"
    #1 tool.call.pending {"metadata":{"run":5,"token":"[redacted]"},"tool":"tell"}
    #1 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"tell"}
    #1 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":21,"tool":"tell"}
    #2 tool.call.pending {"tool":"tell"}
    #2 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"tell"}
    #2 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":10,"tool":"tell"}
    "#);
}

#[tokio::test]
async fn an_idempotency_key_has_two_spellings_and_one_meaning() {
    let (pay, runs) = Puppet::new(ToolSpec::new("pay", ""), [Act::Say("paid")]);
    let world = World::new([pay]);
    let mut wire = Wire::new(&world.executor).initialized("2025-06-18", json!({})).await;
    for (id, key) in [(1, "wieldy/idempotency_key"), (2, "wieldy/idempotency-key")] {
        let mut meta = json!({});
        meta[key] = json!("k");
        assert_eq!(call(&mut wire, id, "pay", meta).await["content"][0]["text"], "paid");
    }
    assert_eq!(runs.runs(), 1);
    wire.close().await;
}

#[tokio::test]
async fn the_call_in_the_library_knows_the_same_options() {
    let world = World::new([teller()]);
    let result = world.executor.call(Call::new("tell", json!({})).context(json!({"room": "b"}))).await;
    assert_eq!(result.text(), r#"{"room":"b"}"#);
}

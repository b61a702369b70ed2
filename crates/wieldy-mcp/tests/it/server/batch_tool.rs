//! The tool `batch`.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Caller, Content, Outcome, Plan, Policy, Provider, Run, SharedTool, ToolSpec, tool};
use wieldy_mcp::server::{BatchCalls, Expose, Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, meta, shown};

const SECOND: Duration = Duration::from_secs(1);

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Said {
    text: String,
}

/// Returns a tool that answers with its argument and its context.
fn say() -> SharedTool {
    let spec = ToolSpec::new("say", "").read_only();
    Arc::new(tool(spec, async |args: Said, run: Run| {
        let context = Value::Object(run.context().clone());
        Ok(Outcome::text(format!("{} in {context}", args.text)))
    }))
}

fn all() -> ServerOptions {
    ServerOptions { batch: BatchCalls::All, ..ServerOptions::default() }
}

/// Waits until the condition holds.
async fn eventually(holds: impl Fn() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        tokio::time::sleep(SECOND / 200).await;
    }
    panic!("it never came to hold");
}

async fn wire(world: &World, options: ServerOptions) -> Wire {
    Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await
}

async fn batch(wire: &mut Wire, id: u32, arguments: Value, meta: Value) -> Value {
    let params = json!({"name": "batch", "arguments": arguments, "_meta": meta});
    shown(wire.ask(id, "tools/call", params).await)["result"].take()
}

fn text(answer: &Value) -> &str {
    answer["content"][0]["text"].as_str().unwrap()
}

/// Returns the text without the first line, which has the duration.
fn results(answer: &Value) -> &str {
    text(answer).split_once('\n').unwrap().1
}

fn error(answer: &Value) -> (&str, &str) {
    let error = &answer["_meta"]["wieldy/error"];
    (error["code"].as_str().unwrap_or_default(), error["message"].as_str().unwrap_or_default())
}

// Shows: A4.1, E8.3
#[tokio::test]
async fn results_come_in_order_in_one_text_with_references_and_options_of_the_request() {
    let world = World::new([say()]);
    let mut wire = wire(&world, ServerOptions::default()).await;
    let calls = json!({"calls": [
        {"id": "b", "tool": "say", "arguments": {"text": {"$result": "a"}}},
        {"id": "a", "name": "say", "args": {"text": "one"}},
        {"tool": "say", "arguments": {"text": 5, "context": {"room": "x"}}},
        {"id": "d", "tool": "say", "arguments": {"text": "never"}, "after": ["missing-no"]},
    ]});
    let wrong = batch(&mut wire, 1, calls.clone(), json!({})).await;
    assert_eq!(error(&wrong).1, "the call `d` needs `missing-no`, and there is no call with that id");
    let mut calls = calls;
    calls["calls"].as_array_mut().unwrap().pop();
    let meta = json!({"wieldy/context": {"room": "a"}, "wieldy/metadata": {"run": 1}, "wieldy/labels": ["l"]});
    let told = batch(&mut wire, 2, calls, meta).await;
    insta::assert_snapshot!(results(&told), @r#"
    === [id] [b] say: success
    one in {"room":"a"} in {"room":"a"}
    === [id] [a] say: success
    one in {"room":"a"}
    === [id] [#3] say: validation_error
    Error E3002 VALIDATION_FAILED: `/text`: the value is not of type "string"; there is no argument `context` (did you mean `text`?)
    Suggestion: correct the arguments to fit the tool's input schema and call again
    "#);
    let facts = &told["_meta"]["wieldy/batch"];
    assert_eq!(facts["summary"]["succeeded"], 2, "{facts}");
    assert_eq!(facts["results"][1]["id"], "a");
    let labels =
        ["wieldy/labels", "labels"].map(|name| [told["_meta"][name].clone(), facts["results"][0][name].clone()]);
    assert_eq!(labels, [[json!(["l"]), Value::Null], [Value::Null, json!(["l"])]]);
    let beside = |place: usize| ["parallel", "waited_for"].map(|name| facts["results"][place][name].clone());
    assert_eq!([beside(0), beside(1)], [[json!(false), json!(["a"])], [json!(false), json!([])]]);
    assert_eq!(facts["results"][2]["error"]["code"], "E3002", "a context among the arguments is one argument too many");
    wire.close().await;
    let tape = world.tape();
    assert_eq!(tape.matches(r#""metadata":{"run":1}"#).count(), 3, "{tape}");
    assert_eq!(tape.matches("tool.batch.started").count(), 1);
}

#[tokio::test]
async fn by_default_only_calls_that_read_are_taken() {
    let (write, writes) = Puppet::new(ToolSpec::new("write", ""), [Act::Say("written")]);
    let world = World::new([Puppet::reading("read", Act::Say("seen")), write]);
    let calls = json!({"calls": [{"tool": "read"}, {"tool": "write"}]});
    let mut first = wire(&world, ServerOptions::default()).await;
    let told = batch(&mut first, 1, calls.clone(), json!({})).await;
    insta::assert_snapshot!(results(&told), @"
    === [id] [#1] read: success
    seen
    === [id] [#2] write: permission_denied
    Error E3003 PERMISSION_DENIED: `write` may change something, and this call may only read
    Suggestion: call it by itself, so that it is judged and shown on its own
    ");
    assert_eq!((writes.runs(), &told["isError"]), (0, &json!(false)));
    first.close().await;
    let mut second = wire(&world, all()).await;
    let told = batch(&mut second, 1, calls, json!({})).await;
    assert_eq!((writes.runs(), &told["_meta"]["wieldy/batch"]["summary"]["succeeded"]), (1, &json!(2)));
    second.close().await;
    world.check();
}

async fn listed(world: &World, options: ServerOptions) -> Option<Value> {
    let mut wire = wire(world, options).await;
    let tools = wire.ask(1, "tools/list", json!({})).await["result"]["tools"].take();
    wire.close().await;
    tools.as_array().unwrap().iter().find(|tool| tool["name"] == "batch").cloned()
}

#[tokio::test]
async fn its_annotations_tell_which_calls_it_takes() {
    let world = World::new([Puppet::reading("read", Act::Say("seen"))]);
    let hints = async |options| listed(&world, options).await.map(|tool| tool["annotations"].clone());
    assert_eq!(
        hints(ServerOptions::default()).await.unwrap(),
        json!({"readOnlyHint": true, "destructiveHint": false, "idempotentHint": true, "openWorldHint": true})
    );
    assert_eq!(
        hints(all()).await.unwrap(),
        json!({"readOnlyHint": false, "destructiveHint": true, "idempotentHint": false, "openWorldHint": true})
    );
    let off = ServerOptions { batch: BatchCalls::Off, ..ServerOptions::default() };
    assert_eq!(hints(off.clone()).await, None);
    let mut wire = wire(&world, off).await;
    let none = wire.call(1, "batch", json!({"calls": [{"tool": "read"}]})).await;
    assert_eq!(none["error"]["data"]["code"], "E3001", "{none}");
    wire.close().await;
}

#[tokio::test]
async fn a_registered_tool_of_that_name_keeps_it() {
    let world = World::new([Puppet::reading("batch", Act::Say("mine"))]);
    assert_eq!(listed(&world, ServerOptions::default()).await.unwrap()["description"], "reads");
    let mut wire = wire(&world, ServerOptions::default()).await;
    assert_eq!(text(&wire.call(1, "batch", json!({})).await["result"]), "mine");
    wire.close().await;
}

/// A server that comes up must not take over the name, and with it the arguments of every later batch.
#[tokio::test]
async fn a_servers_tool_with_that_short_name_does_not_take_it() {
    let servers = ToolSpec::new("up__batch", "").provider(Provider::Mcp("up".into()));
    let (foreign, strings) = Puppet::new(servers, [Act::Echo]);
    let world = World::new([say(), foreign]);
    assert!(listed(&world, ServerOptions::default()).await.is_some());
    let mut wire = wire(&world, ServerOptions::default()).await;
    let calls = json!({"calls": [{"id": "a", "tool": "say", "arguments": {"text": "x"}}]});
    let answer = batch(&mut wire, 2, calls, json!({})).await;
    assert_eq!((results(&answer), strings.runs()), ("=== [id] [a] say: success\nx in {}\n", 0));
    let refused = batch(&mut wire, 3, json!({}), json!({})).await;
    assert_eq!((error(&refused).0, &refused["_meta"]["wieldy/untrusted"]), ("E3002", &Value::Null), "{refused}");
    wire.close().await;
    let tape = world.tape();
    assert!(tape.contains(r#"tool.call.pending {"tool":"batch"}"#) && !tape.contains("up__batch"), "{tape}");
}

#[tokio::test]
async fn senseless_batches_are_refused_before_anything_runs() {
    let (read, reads) = Puppet::new(ToolSpec::new("read", "").read_only(), [Act::Say("seen")]);
    let world = World::new([read]);
    let expose = Expose { by_search: true, ..Expose::default() };
    let mut wire = wire(&world, ServerOptions { expose, batch_calls_max: 3, ..ServerOptions::default() }).await;
    let read = || json!({"tool": "read"});
    for (arguments, message) in [
        (json!({}), "the arguments of `batch` do not fit: missing field `calls`"),
        (json!({"calls": []}), "`batch` has no calls"),
        (
            json!({"calls": [{"tool": "read", "context": {}}]}),
            "the arguments of `batch` do not fit: unknown field `context`",
        ),
        (json!({"calls": [read()], "max_concurrency": 0}), "`max_concurrency` is a number from 1 to 10000"),
        (json!({"calls": [read()], "metadata": {}}), "the arguments of `batch` do not fit: unknown field `metadata`"),
        (json!({"calls": [read(), read(), read(), read()]}), "a batch of 4 calls is too large: at most 3"),
        (json!({"calls": [read(), {"tool": "tool_call"}]}), "`tool_call` cannot be called in a batch"),
        (json!({"calls": [read(), {"tool": "result_wait"}]}), "`result_wait` cannot be called in a batch"),
        (json!({"calls": [read(), {"tool": "batch"}]}), "`batch` cannot be called in a batch"),
    ] {
        let told = batch(&mut wire, 1, arguments, json!({})).await;
        assert_eq!(error(&told).0, "E3002", "{told}");
        assert!(error(&told).1.starts_with(message), "{told}");
    }
    let told = batch(&mut wire, 2, json!({"calls": [read(), read()]}), json!({"wieldy/tmeout_ms": 5})).await;
    assert_eq!(error(&told), ("E3002", "there is no option `wieldy/tmeout_ms` for a call over MCP"));
    let told = batch(&mut wire, 3, json!({"calls": [read()]}), json!({"wieldy/idempotency_key": "k"})).await;
    assert_eq!(error(&told).0, "E3002");
    wire.close().await;
    assert_eq!(reads.runs(), 0);
    let tape = world.tape();
    assert_eq!(tape.matches("tool.call.failure").count(), 15, "{tape}");
    let unread = r#"tool.call.pending {"tool":"batch"}"#;
    let count = tape.matches(unread).count();
    assert_eq!(count, 7, "six unread batches, each recorded as one call, and the call of `batch` within one: {tape}");
}

// Shows: D8.1
#[tokio::test]
async fn a_batch_that_is_not_read_is_recorded_as_one_call_without_its_arguments() {
    let world = World::new([say()]);
    let mut wire = wire(&world, ServerOptions::default()).await;
    let meta = json!({"wieldy/context": {"password": "canary-4711"}, "wieldy/metadata": {"run": 1}});
    let calls = vec![json!({"tool": "say", "arguments": {"text": "of canary-4711"}}); 101];
    let told = batch(&mut wire, 1, json!({ "calls": calls }), meta).await;
    assert_eq!(error(&told), ("E3002", "a batch of 101 calls is too large: at most 100"));
    assert_eq!(told["_meta"]["wieldy/execution"], "[id]", "the record has an id: {told}");
    // Some models write a list as text.
    let text = json!([{"tool": "say", "arguments": {"token": "canary-\" ü", "text": "x".repeat(100_000)}}]).to_string();
    let told = batch(&mut wire, 2, json!({ "calls": text }), json!({})).await;
    let message = "the arguments of `batch` do not fit: invalid type: string, expected a sequence";
    assert_eq!(error(&told), ("E3002", message));
    let told = batch(&mut wire, 3, json!({"calls": [], "x".repeat(100_000): 1}), json!({})).await;
    let cut = error(&told).1;
    assert!(cut.len() < 500 && cut.contains("do not fit: unknown field `xxx") && cut.ends_with('…'), "{cut}");
    wire.close().await;
    let tape = world.tape();
    assert!(tape.len() < 5_000 && !tape.contains("canary"), "{tape}");
    let pending = |metadata: &str| format!(r#"tool.call.pending {{{metadata}"tool":"batch"}}"#);
    assert_eq!(tape.matches(&pending("")).count(), 2, "{tape}");
    assert_eq!(tape.matches(&pending(r#""metadata":{"run":1},"#)).count(), 1, "{tape}");
    assert_eq!(tape.matches(r#""code":"E3002""#).count(), 3, "{tape}");
}

#[tokio::test]
async fn the_calls_of_a_refused_batch_are_recorded_without_the_secrets_of_the_context() {
    let world = World::new([say()]);
    let mut wire = wire(&world, ServerOptions::default()).await;
    let calls = json!({"calls": [{"tool": "say", "arguments": {"text": "of canary-4711"}}]});
    let meta = json!({
        "wieldy/idempotency_key": "k", "wieldy/context": {"password": "canary-4711"}, "wieldy/metadata": {"run": 1},
    });
    let told = batch(&mut wire, 1, calls, meta).await;
    assert_eq!(error(&told).0, "E3002", "there is no id: {told}");
    wire.close().await;
    let tape = world.tape();
    let pending = r#"{"arguments":{"text":"of [redacted]"},"metadata":{"run":1},"#;
    assert!(tape.contains(pending) && !tape.contains("canary"), "{tape}");
}

#[tokio::test]
async fn a_plan_decides_about_the_number_of_calls() {
    let plan = Plan { batch_max: Some(2), ..Plan::UNLIMITED };
    let world = World::with([Puppet::reading("read", Act::Say("seen"))], |builder| {
        builder.policy = Policy::default().with_plan("two", plan).with_plan("many", Plan::UNLIMITED);
    });
    for (plan, code) in [("two", "E3006"), ("many", "")] {
        let server =
            Server::new(world.executor.clone(), ServerOptions { batch_calls_max: 1, ..ServerOptions::default() });
        let caller = Caller { plan: Some(plan.into()), ..Caller::local() };
        let mut wire = Wire::to(&server, caller).initialized("2025-06-18", json!({})).await;
        let calls = json!({"calls": [{"tool": "read"}, {"tool": "read"}, {"tool": "read"}]});
        assert_eq!(error(&batch(&mut wire, 1, calls, json!({})).await).0, code, "{plan}");
        wire.close().await;
    }
}

// Shows: A4.5
#[tokio::test]
async fn the_model_reads_which_limit_holds_fewer_calls_at_once_than_it_asked_for() {
    let two = Plan { slots: Some(2), ..Plan::UNLIMITED };
    let world = World::with([Puppet::reading("read", Act::Say("seen"))], |builder| {
        builder.policy = Policy::default().with_plan("Two", two);
        builder.limits.calls_running_per_agent_max = 4;
    });
    let calls = vec![json!({"tool": "read"}); 3];
    let server = Server::new(world.executor.clone(), ServerOptions::default());
    let head = async |plan: Option<&str>, asked: Option<u32>| {
        let caller = Caller { plan: plan.map(Into::into), ..Caller::local() };
        let mut wire = Wire::to(&server, caller).initialized("2025-06-18", json!({})).await;
        let mut arguments = json!({ "calls": calls });
        if let Some(asked) = asked {
            arguments["max_concurrency"] = json!(asked);
        }
        let told = batch(&mut wire, 1, arguments, json!({})).await;
        wire.close().await;
        let (first, rest) = text(&told).split_once('\n').unwrap();
        assert!(first.contains("3 succeeded"), "{first}");
        rest.split_once("===").unwrap().0.to_owned()
    };
    let note = "note: 4 calls could run at once, not 10: `limits.calls-running-per-agent-max` is 4\n";
    assert_eq!(head(None, Some(10)).await, note);
    assert_eq!(head(Some("Two"), Some(3)).await, "note: 2 calls could run at once, not 3: `plans.Two.slots` is 2\n");
    assert_eq!([head(None, Some(3)).await, head(None, None).await, head(Some("Two"), None).await], [""; 3]);
}

/// Returns a tool that answers with a text and an image.
fn draw() -> SharedTool {
    let spec = ToolSpec::new("draw", "").read_only();
    Arc::new(tool(spec, async |args: Said, _: Run| {
        let image = Content::Image { data: args.text, mime_type: "image/png".into() };
        Ok(Outcome { content: vec![Content::text("drawn"), image], ..Outcome::default() })
    }))
}

#[tokio::test]
async fn images_of_its_results_follow_as_blocks_that_the_text_names() {
    let world = World::new([say(), draw()]);
    let mut wire = wire(&world, ServerOptions::default()).await;
    let calls = json!({"calls": [
        {"tool": "draw", "arguments": {"text": "aGk="}}, {"tool": "say", "arguments": {"text": "x"}},
        {"tool": "draw", "arguments": {"text": "aGU="}},
    ]});
    let told = batch(&mut wire, 1, calls, json!({})).await;
    insta::assert_snapshot!(results(&told), @"
    === [id] [#1] draw: success
    drawn
    [its block follows as number 2]
    === [id] [#2] say: success
    x in {}
    === [id] [#3] draw: success
    drawn
    [its block follows as number 3]
    ");
    let image = |data: &str| json!({"type": "image", "data": data, "mimeType": "image/png"});
    assert_eq!(told["content"].as_array().unwrap()[1..], [image("aGk="), image("aGU=")]);
    wire.close().await;
}

#[tokio::test]
async fn each_call_has_its_own_idempotency_key() {
    let (pay, runs) = Puppet::new(ToolSpec::new("pay", ""), [Act::Echo]);
    let world = World::new([pay]);
    let mut wire = wire(&world, all()).await;
    let calls = json!({"calls": [
        {"id": "a", "tool": "pay", "arguments": {"n": 1}}, {"id": "b", "tool": "pay", "arguments": {"n": 2}},
    ]});
    for id in 1..=2 {
        let told = batch(&mut wire, id, calls.clone(), json!({"wieldy/idempotency_key": "k"})).await;
        assert_eq!(told["_meta"]["wieldy/batch"]["summary"]["succeeded"], 2, "{told}");
    }
    assert_eq!(runs.runs(), 2);
    let alone = json!({"name": "pay", "arguments": {"n": 2}, "_meta": {"wieldy/idempotency_key": "k/b"}});
    assert_eq!(wire.ask(3, "tools/call", alone).await["result"]["isError"], json!(false));
    assert_eq!(runs.runs(), 2, "the key of a call is KEY/ID");
    wire.close().await;
}

#[tokio::test]
async fn questions_are_put_one_at_a_time_while_other_calls_go_on() {
    let (wipe, wipes) = Puppet::new(ToolSpec::new("wipe", "").confirm(), [Act::Echo]);
    let (read, reads) = Puppet::new(ToolSpec::new("read", "").read_only(), [Act::Say("seen")]);
    let world = World::new([wipe, read]);
    let mut wire = Wire::with(&world.executor, all()).initialized("2025-06-18", json!({"elicitation": {}})).await;
    let calls = json!({"mode": "parallel", "calls": [
        {"id": "a", "tool": "wipe", "arguments": {"disk": 1}}, {"id": "b", "tool": "wipe", "arguments": {"disk": 2}},
        {"id": "c", "tool": "read"},
    ]});
    let params = json!({"name": "batch", "arguments": calls});
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})).await;
    for action in ["accept", "decline"] {
        let question = wire.next().await.unwrap();
        assert_eq!(question["method"], "elicitation/create", "{question}");
        eventually(|| reads.runs() == 1).await;
        let nothing = tokio::time::timeout(SECOND / 5, wire.next()).await;
        assert!(nothing.is_err(), "one question at a time: {nothing:?}");
        wire.send(&json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": action, "content": {}}})).await;
    }
    let told = wire.next().await.unwrap()["result"].take();
    assert_eq!((wipes.runs(), &told["_meta"]["wieldy/batch"]["summary"]["succeeded"]), (1, &json!(2)), "{told}");
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn a_client_of_the_newest_revision_comes_back_with_each_answer() {
    let (wipe, wipes) = Puppet::new(ToolSpec::new("wipe", "").confirm(), [Act::Echo]);
    let world = World::new([wipe]);
    let mut wire = Wire::with(&world.executor, all());
    let calls = json!({"mode": "parallel", "calls": [
        {"tool": "wipe", "arguments": {"disk": 1}}, {"tool": "wipe", "arguments": {"disk": 2}},
    ]});
    let mut brings = json!({});
    for id in 1..=2 {
        let mut params = json!({"name": "batch", "arguments": calls, "_meta": meta(json!({"elicitation": {}}))});
        params.as_object_mut().unwrap().extend(brings.as_object().unwrap().clone());
        let told = wire.ask(id, "tools/call", params).await["result"].take();
        assert_eq!(told["resultType"], "input_required", "{told}");
        let answers = json!({"confirm": {"action": "accept"}});
        brings = json!({"requestState": told["requestState"], "inputResponses": answers});
    }
    let mut params = json!({"name": "batch", "arguments": calls, "_meta": meta(json!({"elicitation": {}}))});
    params.as_object_mut().unwrap().extend(brings.as_object().unwrap().clone());
    let told = wire.ask(3, "tools/call", params.clone()).await["result"].take();
    assert_eq!((wipes.runs(), &told["_meta"]["wieldy/batch"]["summary"]["succeeded"]), (2, &json!(2)), "{told}");
    wire.close().await;
    world.check();
}

// Shows: X1.1
#[tokio::test(start_paused = true)]
async fn a_batch_that_outlasts_the_clients_patience_becomes_a_handle() {
    let slow = Puppet::reading("slow", Act::Take(20 * SECOND));
    let world = World::new([slow]);
    let options = ServerOptions { patience: Some(5 * SECOND), ..ServerOptions::default() };
    let mut wire = Wire::with(&world.executor, options).initialized("2025-06-18", json!({})).await;
    let params = json!({"name": "batch", "arguments": {"calls": [{"id": "a", "tool": "slow"}]}});
    let handle = wire.ask(1, "tools/call", params).await["result"].take();
    let id = handle["_meta"]["wieldy/batch"]["batch_id"].as_str().unwrap().to_owned();
    assert!(text(&handle).contains("is still running"), "{handle}");
    let mut told = Value::Null;
    for request in 2..=5 {
        told = wire.call(request, "result_wait", json!({ "id": id })).await["result"].take();
    }
    assert_eq!(told["_meta"]["wieldy/batch"]["summary"]["succeeded"], 1, "{told}");
    let other = Wire::to(&Server::new(world.executor.clone(), ServerOptions::default()), Caller::agent("other"));
    let mut other = other.initialized("2025-06-18", json!({})).await;
    let unknown = other.call(1, "result_wait", json!({ "id": id })).await["result"].take();
    assert_eq!(error(&unknown).0, "E3303", "{unknown}");
    other.close().await;
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn cancelling_the_request_ends_all_of_it() {
    let (hang, runs) = Puppet::new(ToolSpec::new("wait", "").read_only(), [Act::PrintAndWait("x")]);
    let world = World::new([hang]);
    let mut wire = wire(&world, ServerOptions::default()).await;
    let params = json!({"name": "batch", "arguments": {"max_concurrency": 2, "mode": "parallel", "calls": vec![json!({"tool": "wait"}); 4]}});
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})).await;
    eventually(|| runs.now() == 2).await;
    wire.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})).await;
    let cancelled = || world.events().iter().filter(|event| event.body.name() == "tool.call.cancelled").count();
    eventually(|| cancelled() == 4).await;
    assert_eq!(runs.runs(), 2, "the others were not begun");
    wire.close().await;
    world.check();
}

#[tokio::test]
async fn the_results_share_one_budget_and_what_is_cut_is_in_artifacts() {
    let big: &'static str = Box::leak("0123456789".repeat(500).into_boxed_str());
    let world =
        World::with([Puppet::reading("big", Act::Say(big)), Puppet::reading("small", Act::Say("tiny"))], |builder| {
            builder.output_bytes_max = 6_000;
        });
    let mut wire = wire(&world, ServerOptions::default()).await;
    let calls = json!({"calls": [{"tool": "big"}, {"tool": "small"}, {"tool": "big", "arguments": {"thing": 2}}]});
    let told = wire.ask(1, "tools/call", json!({"name": "batch", "arguments": calls})).await["result"].take();
    let whole = text(&told);
    assert!(whole.len() < 8_000 && whole.contains("\ntiny\n"), "{} bytes", whole.len());
    for place in [0, 2] {
        let artifact = told["_meta"]["wieldy/batch"]["results"][place]["artifact"].as_str().unwrap();
        assert!(whole.contains(&format!("[the whole is {artifact}: read it with `GetArtifact`")), "{whole}");
        let uri = artifact.replace("artifact:", "wieldy://artifact/");
        let read = wire.ask(10 + place, "resources/read", json!({ "uri": uri })).await;
        assert_eq!(read["result"]["contents"][0]["text"], big);
    }
    assert_eq!(told["_meta"]["wieldy/batch"]["results"][1]["artifact"], Value::Null);
    wire.close().await;
}

#[tokio::test]
async fn progress_counts_the_calls_that_have_ended() {
    let world = World::new([Puppet::reading("read", Act::Take(SECOND / 20))]);
    let mut wire = wire(&world, ServerOptions::default()).await;
    let calls = json!({"mode": "sequential", "calls": [{"tool": "read"}, {"tool": "read"}]});
    let params = json!({"name": "batch", "arguments": calls, "_meta": {"progressToken": 7}});
    wire.send(&json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})).await;
    for progress in 1..=2 {
        let told = wire.next().await.unwrap();
        let expected =
            json!({"progressToken": 7, "progress": f64::from(progress), "total": 2.0, "message": "read: success"});
        assert_eq!(told["params"], expected, "{told}");
    }
    assert!(wire.next().await.unwrap()["result"].is_object());
    wire.close().await;
}

//! Calls that outlast the client's patience: tasks for clients that know them, handles for the others.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{CallError, Caller, Code, Outcome, Provider, RunError, SharedTool, ToolSpec, tool};
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_testkit::{Act, Puppet, World};

use super::{Wire, meta, shown};

const REVISION: &str = "2025-06-18";
const LONG: Duration = Duration::from_secs(200);

/// Returns a tool that takes this many seconds, within its time limit.
fn slow(seconds: u64) -> SharedTool {
    let spec = ToolSpec::new("slow", "slow").read_only().timeout(LONG);
    Puppet::new(spec, [Act::Take(Duration::from_secs(seconds))]).0
}

/// Returns the execution id in a response.
fn id(answer: &Value) -> String {
    answer["result"]["_meta"]["wieldy/execution"].as_str().unwrap().to_owned()
}

// Shows: X1.1
#[tokio::test(start_paused = true)]
async fn a_call_that_takes_too_long_is_answered_with_a_handle() {
    let world = World::new([slow(100)]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    let answer = wire.ask(1, "tools/call", json!({"name": "slow", "arguments": {"a": 1}})).await;
    let id = id(&answer);
    assert_eq!(
        shown(answer)["result"],
        json!({
            "content": [{"type": "text", "text":
                "`slow` is still running, as [id]. This is not its result: call `result_wait` with {\"id\": \"[id]\"} to get it."}],
            "isError": false,
            "_meta": {"wieldy/execution": "[id]", "wieldy/status": "running"},
        })
    );
    let again = wire.call(2, "result_wait", json!({"id": id, "timeout": 1})).await;
    assert_eq!(again["result"]["_meta"]["wieldy/status"], "running", "{again}");
    let again = wire.call(3, "result_wait", json!({"id": id})).await;
    assert_eq!(again["result"]["_meta"]["wieldy/status"], "running", "45 + 1 + 45 seconds: {again}");
    let done = wire.call(4, "result_wait", json!({"id": id})).await;
    let result = json!({
        "content": [{"type": "text", "text": r#"{"a":1}"#}],
        "isError": false,
        "_meta": {"wieldy/execution": "[id]"},
    });
    assert_eq!(done["result"], result);
    assert_eq!(wire.call(5, "result_wait", json!({"id": id})).await["result"], result, "it is still there");
    wire.close().await;
    world.check();
    let begun = world.events().iter().filter(|event| event.body.name() == "tool.call.pending").count();
    assert_eq!(begun, 1, "waiting is no call");
}

// Shows: B11.2, X1.2
#[tokio::test(start_paused = true)]
async fn a_handle_has_the_output_so_far_and_fits_clients_that_check_answers() {
    let mut spec = ToolSpec::new("prints", "prints").timeout(LONG).provider(Provider::Mcp("git".into()));
    spec.output_schema = Some(json!({"type": "object"}));
    let world = World::new([Puppet::new(spec, [Act::PrintAndWait("line one\nline two\n")]).0]);
    let mut wire = Wire::new(&world.executor).initialized(REVISION, json!({})).await;
    let answer = wire.call(1, "prints", json!({})).await;
    let text = answer["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.ends_with("\nOutput so far:\nline one\nline two\n"), "{text}");
    assert_eq!(answer["result"]["isError"], true, "it has no structured answer, although it has an output schema");
    wire.close().await;
}

#[tokio::test(start_paused = true)]
async fn only_the_caller_of_a_call_gets_its_result() {
    let world = World::new([slow(60)]);
    let server = Server::new(world.executor.clone(), ServerOptions::default());
    let caller = |tenant: &str| Caller { tenant: Some(tenant.into()), ..Caller::local() };
    let mut ada = Wire::to(&server, caller("ada")).initialized(REVISION, json!({})).await;
    let mut bob = Wire::to(&server, caller("bob")).initialized(REVISION, json!({})).await;
    let id = id(&ada.ask(1, "tools/call", json!({"name": "slow"})).await);
    let text = |answer: Value| answer["result"]["content"][0]["text"].as_str().unwrap().to_owned();
    let none = "Error E3303 INVALID_INPUT: there is no call [id] to wait for\nSuggestion: results are stored only for a while, and the result of a batch only until its server ends; the history shows how the calls ended (`history_search`)";
    assert_eq!(text(bob.call(1, "result_wait", json!({"id": id})).await), none);
    assert_eq!(
        text(ada.call(2, "result_wait", json!({"id": "nonsense"})).await),
        "Error E3002 VALIDATION_FAILED: `id` must be the id of a call"
    );
    assert_eq!(
        text(ada.call(3, "result_wait", json!({"id": id, "timeout": -1})).await),
        "Error E3002 VALIDATION_FAILED: `timeout` must be a number of seconds"
    );
    assert_eq!(text(ada.call(4, "result_wait", json!({"id": id})).await), "{}");
    ada.close().await;
    bob.close().await;
}

/// Returns the `_meta` of a client that knows tasks.
fn with_tasks() -> Value {
    meta(json!({"extensions": {"io.modelcontextprotocol/tasks": {}}}))
}

// Shows: B3.1, E8.2
#[tokio::test(start_paused = true)]
async fn a_client_that_knows_tasks_gets_one() {
    let world = World::new([slow(30)]);
    let mut wire = Wire::new(&world.executor);
    let params = json!({"name": "slow", "arguments": {"a": 1}, "_meta": with_tasks()});
    let answer = wire.ask(1, "tools/call", params).await;
    let id = answer["result"]["taskId"].as_str().unwrap().to_owned();
    let task = |more: Value| {
        let mut task = json!({
            "resultType": "complete", "taskId": "[id]", "createdAt": "[time]", "lastUpdatedAt": "[time]",
            "ttlMs": 3_600_000, "pollIntervalMs": 1000,
        });
        task.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        task
    };
    assert_eq!(shown(answer)["result"], task(json!({"resultType": "task", "status": "working"})));
    let get = json!({"taskId": id, "_meta": with_tasks()});
    let told = wire.ask(2, "tasks/get", get.clone()).await;
    assert_eq!(shown(told)["result"], task(json!({"status": "working"})));
    tokio::time::sleep(Duration::from_secs(30)).await;
    let told = wire.ask(3, "tasks/get", get.clone()).await;
    let result = json!({
        "resultType": "complete",
        "content": [{"type": "text", "text": r#"{"a":1}"#}],
        "isError": false,
        "_meta": {"wieldy/execution": "[id]"},
    });
    assert_eq!(shown(told)["result"], task(json!({"status": "completed", "result": result})));
    let unknown = json!({"taskId": "nonsense", "_meta": with_tasks()});
    let told = wire.ask(4, "tasks/get", unknown).await;
    assert_eq!(told["error"], json!({"code": -32602, "message": "there is no such task"}));
    let told = wire.ask(5, "tasks/get", json!({"taskId": id, "_meta": meta(json!({}))})).await;
    assert_eq!(told["error"]["code"], -32021, "a client that asks for tasks must declare the capability: {told}");
    wire.close().await;
    world.check();
}

/// Returns a tool that takes ten seconds and then ends with `end`.
fn failing(name: &str, end: fn() -> Result<Outcome, RunError>) -> SharedTool {
    Arc::new(tool(ToolSpec::new(name, name), move |_: serde_json::Map<String, Value>, _run| async move {
        tokio::time::sleep(Duration::from_secs(10)).await;
        end()
    }))
}

/// Calls the tool as a task and returns the task's end.
async fn task_of(wire: &mut Wire, tool: &str) -> Value {
    let answer = wire.ask(1, "tools/call", json!({"name": tool, "_meta": with_tasks()})).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let get = json!({"taskId": answer["result"]["taskId"], "_meta": with_tasks()});
    let mut told = shown(wire.ask(2, "tasks/get", get).await)["result"].take();
    for name in ["taskId", "createdAt", "lastUpdatedAt", "ttlMs", "pollIntervalMs", "resultType"] {
        assert!(told.as_object_mut().unwrap().remove(name).is_some(), "{name}: {told}");
    }
    told
}

#[tokio::test(start_paused = true)]
async fn a_task_fails_if_its_tool_returned_no_result() {
    let error = |code: Code, message: &str| CallError::new(code, message);
    let world = World::new([
        failing("says", || Ok(Outcome::text("no").failed(CallError::new(Code::ToolReportedError, "it could not")))),
        failing("breaks", || Err("it broke".into())),
        failing("garbles", || Err(CallError::new(Code::UpstreamProtocolError, "nonsense").into())),
    ]);
    let mut wire = Wire::new(&world.executor);
    let said = error(Code::ToolReportedError, "it could not");
    let content = |text: &str| json!({"type": "text", "text": text});
    let reported = "Error E3203 TOOL_REPORTED_ERROR: it could not\nOutput so far:\nno";
    assert_eq!(
        task_of(&mut wire, "says").await,
        json!({"status": "completed", "result": {
            "resultType": "complete", "isError": true, "content": [content(reported)],
            "_meta": {"wieldy/execution": "[id]", "wieldy/error": said},
        }})
    );
    let failed = |code: Code, message: &str| {
        let shown = format!("Error {code} {}: {message}", code.name());
        json!({"status": "failed", "error": {"code": -32603, "message": shown, "data": error(code, message)}})
    };
    assert_eq!(task_of(&mut wire, "breaks").await, failed(Code::ExecutionError, "it broke"));
    assert_eq!(task_of(&mut wire, "garbles").await, failed(Code::UpstreamProtocolError, "nonsense"));
    wire.close().await;
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_confirmed_call_becomes_a_task() {
    let spec = ToolSpec::new("slow", "slow").confirm().timeout(LONG);
    let world = World::new([Puppet::new(spec, [Act::Take(Duration::from_secs(30))]).0]);
    let mut wire = Wire::new(&world.executor);
    let knows = meta(json!({"elicitation": {}, "extensions": {"io.modelcontextprotocol/tasks": {}}}));
    let mut params = json!({"name": "slow", "arguments": {"a": 1}, "_meta": knows});
    let asked = wire.ask(1, "tools/call", params.clone()).await["result"].take();
    assert_eq!((&asked["resultType"], asked.get("taskId")), (&json!("input_required"), None));
    params["requestState"] = asked["requestState"].clone();
    params["inputResponses"] = json!({"confirm": {"action": "accept"}});
    let task = wire.ask(2, "tools/call", params).await["result"].take();
    assert_eq!((&task["resultType"], task.get("requestState")), (&json!("task"), None));
    tokio::time::sleep(Duration::from_secs(30)).await;
    let told = wire.ask(3, "tasks/get", json!({"taskId": task["taskId"], "_meta": with_tasks()})).await;
    assert_eq!(told["result"]["result"]["content"], json!([{"type": "text", "text": r#"{"a":1}"#}]));
    wire.close().await;
    world.check();
}

// Shows: B3.1
#[tokio::test(start_paused = true)]
async fn only_the_caller_of_a_task_can_cancel_it() {
    let world = World::new([Puppet::writing("waits", Act::PrintAndWait("so far"))]);
    let server = Server::new(world.executor.clone(), ServerOptions::default());
    let caller = |tenant: &str| Caller { tenant: Some(tenant.into()), ..Caller::local() };
    let (mut ada, mut bob) = (Wire::to(&server, caller("ada")), Wire::to(&server, caller("bob")));
    let answer = ada.ask(1, "tools/call", json!({"name": "waits", "_meta": with_tasks()})).await;
    let params = json!({"taskId": answer["result"]["taskId"], "_meta": with_tasks()});
    let none = json!({"code": -32602, "message": "there is no such task"});
    assert_eq!(bob.ask(1, "tasks/get", params.clone()).await["error"], none);
    assert_eq!(bob.ask(2, "tasks/cancel", params.clone()).await["error"], none);
    assert_eq!(world.executor.load().running, 1);
    assert_eq!(ada.ask(2, "tasks/cancel", params.clone()).await["result"], json!({"resultType": "complete"}));
    while world.executor.load().running > 0 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(ada.ask(3, "tasks/get", params).await["result"]["status"], "cancelled");
    ada.close().await;
    bob.close().await;
    world.check();
}

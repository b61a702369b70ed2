//! Calls that servers make tasks of: polled to their end, made once, and cancelled when no caller waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::response::Response;
use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Options, RetryIf, Status};
use wieldy_mcp::client::{Address, Reach};

use super::bad_http::{ByHand, json_answer, plain};
use super::over_the_wire::modern;
use super::{Stage, call, until};

/// Starts a server that makes a task of each call. `stands` is its response to each poll, numbered from 1.
async fn server(stands: impl Fn(usize) -> Response + Clone + Send + Sync + 'static) -> ByHand {
    let asked = Arc::new(AtomicUsize::new(0));
    ByHand::new(move |_, _, message: Value| {
        let answer = match message["method"].as_str() {
            Some("tools/call") => Some(task("task", "working", &json!({}))),
            Some("tasks/get") => Some(stands(asked.fetch_add(1, Ordering::Relaxed) + 1)),
            Some("tasks/cancel") => Some(json_answer(200, &json!({"result": {"resultType": "complete"}}))),
            _ => modern(&message),
        };
        let answer = answer.map(|answer| of(answer, message["id"].clone()));
        async move {
            match answer {
                Some(answer) => Some(answer.await),
                None => None,
            }
        }
    })
    .await
}

/// Sets the id of a response.
async fn of(answer: Response, id: Value) -> Response {
    let (head, body) = answer.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    match serde_json::from_slice::<Value>(&body) {
        Ok(mut message) => {
            message["jsonrpc"] = json!("2.0");
            message["id"] = id;
            Response::from_parts(head, message.to_string().into())
        }
        Err(_) => Response::from_parts(head, body.into()),
    }
}

/// Returns a task status, with further fields.
fn task(kind: &str, status: &str, more: &Value) -> Response {
    let now = "2026-07-28T00:00:00Z";
    let mut result = json!({"resultType": kind, "taskId": "t1", "status": status, "createdAt": now,
        "lastUpdatedAt": now, "ttlMs": null, "pollIntervalMs": 10});
    result.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json_answer(200, &json!({ "result": result }))
}

fn working() -> Response {
    task("complete", "working", &json!({"statusMessage": "at it"}))
}

fn completed() -> Response {
    task("complete", "completed", &json!({"result": {"content": [{"type": "text", "text": "done"}]}}))
}

fn busy() -> Response {
    plain(429, "text/plain", "later")
}

fn warnings(stage: &Stage) -> Vec<String> {
    let events = stage.world.events();
    let warnings = events.iter().filter(|event| event.body.name() == "tool.call.warning");
    warnings.map(|event| event.cloud_event()["data"]["message"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn polling_a_task_survives_outages_without_a_second_call() {
    let server = server(|number| match number {
        1 | 4 => working(),
        2 => busy(),
        3 => plain(502, "text/html", "<h1>Bad Gateway</h1>"),
        _ => completed(),
    });
    let mut server = server.await;
    let address = Reach::Http(Address::new(server.url()));
    let stage = Stage::that_retries("", |settings| settings.reach = address).await;
    let id = stage.world.executor.spawn(call("echo", "x"));
    until(|| server.asked("tasks/get") >= 2).await;
    server.end().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.begin().await;
    let result = stage.world.executor.wait(id, &Caller::local()).await.unwrap();
    assert_eq!((result.status, result.text().as_str()), (Status::Success, "done"), "{:?}", result.error);
    assert_eq!((server.calls(), server.asked("tasks/cancel")), (1, 0));
    let warning = "cannot get the state of the task from the server, trying again: ";
    assert_eq!(warnings(&stage), [format!("{warning}it is busy: HTTP 429 (Too Many Requests)")]);
    stage.world.check();
}

/// The server has forgotten its task, and refuses the poll with an error that would make a call safe to repeat.
#[tokio::test]
async fn a_call_with_a_lost_task_is_not_repeated() {
    let error = json!({"error": {"code": -32602, "message": "no such task"}});
    let server = server(move |_| json_answer(200, &error)).await;
    let address = Reach::Http(Address::new(server.url()));
    let stage = Stage::that_retries("", |settings| settings.reach = address).await;
    let anything = RetryIf::new(|_| true);
    let options = Options { retry_if: Some(anything), ..Options::default() };
    let result = stage.world.executor.call(Call { options, ..call("echo", "x") }).await;
    let error = result.error.clone().unwrap();
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("E3202", "the MCP server `test` answered: no such task")
    );
    assert_eq!(server.calls(), 1);
    until(|| server.asked("tasks/cancel") == 1).await;
}

#[tokio::test]
async fn a_call_returns_the_result_of_its_task() {
    let server = server(|number| if number < 3 { working() } else { completed() }).await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "x").await.text(), "done");
    assert_eq!((server.calls(), server.asked("tasks/get"), server.asked("tasks/cancel")), (1, 3, 0));
}

#[tokio::test]
async fn a_task_of_a_call_that_is_cancelled_dropped_or_out_of_time_is_cancelled() {
    let server = server(|_| working()).await;
    let stage = Stage::at(server.url()).await;
    let id = stage.world.executor.spawn(call("echo", "x"));
    until(|| server.asked("tasks/get") >= 1).await;
    assert_eq!(stage.world.executor.cancel(id, &Caller::local()), 1);
    assert_eq!(stage.world.executor.wait(id, &Caller::local()).await.unwrap().status, Status::Cancelled);
    until(|| server.asked("tasks/cancel") == 1).await;
    let asked = server.asked("tasks/get");
    tokio::select! {
        result = stage.call("echo", "x") => panic!("it is never over: {result:?}"),
        () = until(|| server.asked("tasks/get") > asked) => {}
    }
    until(|| server.asked("tasks/cancel") == 2).await;
    let timed = Stage::with("", |settings| {
        settings.reach = Reach::Http(Address::new(server.url()));
        settings.timeout = Some(Duration::from_millis(300));
    })
    .await;
    assert_eq!(timed.error("echo").await.details["clock"], "attempt");
    until(|| server.asked("tasks/cancel") == 3).await;
}

/// A poll is never answered: the end of the call does not wait for it.
#[tokio::test]
async fn a_call_can_end_while_its_task_is_polled() {
    let server = ByHand::new(async |_, _, message: Value| match message["method"].as_str() {
        Some("tools/call") => Some(of(task("task", "working", &json!({})), message["id"].clone()).await),
        Some("tasks/get") => std::future::pending().await,
        Some("tasks/cancel") => {
            Some(of(json_answer(200, &json!({"result": {"resultType": "complete"}})), message["id"].clone()).await)
        }
        _ => modern(&message),
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let id = stage.world.executor.spawn(call("echo", "x"));
    until(|| server.asked("tasks/get") == 1).await;
    let began = std::time::Instant::now();
    assert_eq!(stage.world.executor.cancel(id, &Caller::local()), 1);
    assert_eq!(stage.world.executor.wait(id, &Caller::local()).await.unwrap().status, Status::Cancelled);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    until(|| server.asked("tasks/cancel") == 1).await;
    let id = stage.world.executor.spawn(call("echo", "x"));
    until(|| server.asked("tasks/get") == 2).await;
    stage.upstreams.close().await;
    let result = stage.world.executor.wait(id, &Caller::local()).await.unwrap();
    let error = result.error.clone().unwrap();
    assert_eq!(
        (error.retryable, error.message.as_str()),
        (false, "the MCP server `test` cannot be reached: the connection is closed")
    );
}

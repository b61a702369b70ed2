//! The bytes on the wire of a call over HTTP: the requests, and all that may come back on a call's stream.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::serve::ListenerExt;
use futures_util::StreamExt;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tokio::sync::broadcast;
use wieldy_core::Status;
use wieldy_mcp::client::{Address, Reach};

use super::bad_http::{ByHand, json_answer, plain, well};
use super::{Stage, until};

/// Returns the correct response of a server of the newest revision to everything but calls.
pub(crate) fn modern(message: &Value) -> Option<Response> {
    let result = match message["method"].as_str()? {
        "server/discover" => json!({"resultType": "complete", "supportedVersions": ["2026-07-28"],
            "capabilities": {"tools": {}}, "ttlMs": 0, "cacheScope": "private"}),
        "tools/list" => {
            let properties = json!({
                "region": {"type": "string", "x-mcp-header": "Region"},
                "inner": {"type": "object", "properties": {"count": {"type": "integer", "x-mcp-header": "Count"}}},
            });
            let schema = json!({"type": "object", "properties": properties});
            json!({"resultType": "complete", "ttlMs": 0, "cacheScope": "private",
                "tools": [{"name": "echo", "inputSchema": {"type": "object"}}, {"name": "größe", "inputSchema": schema}]})
        }
        _ => return None,
    };
    Some(json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "result": result})))
}

/// Returns the requests of calls: the headers that are not HTTP's own, and the message with its id replaced.
fn sent(server: &ByHand) -> Vec<(Vec<String>, String)> {
    let seen = server.seen.lock().unwrap();
    let calls = seen.iter().filter(|(_, _, message)| message["method"] == "tools/call");
    let shown = calls.map(|(_, headers, message)| {
        let own = |name: &str| ["host", "content-length"].contains(&name);
        let shown = headers.iter().filter(|(name, _)| !own(name.as_str()));
        let mut shown: Vec<String> =
            shown.map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        shown.sort();
        (shown, message.to_string())
    });
    shown.collect()
}

#[tokio::test]
async fn a_call_has_the_headers_of_the_newest_revision() {
    let server = ByHand::new(async |_, _, message| modern(&message)).await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.tools().len(), 2, "{}", stage.state());
    assert_eq!(stage.call("echo", "hi").await.text(), "hi");
    stage.world.call(&stage.tools()[1], json!({"region": "Zürich", "inner": {"count": 3}})).await;
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "wieldy", "title": "wieldy", "version": env!("CARGO_PKG_VERSION")},
        "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
    });
    let common =
        ["accept: application/json, text/event-stream", "content-type: application/json", "mcp-method: tools/call"];
    let of = |number: i64, headers: &[&str], name: &str, arguments: Value| {
        let mut meta = meta.clone();
        meta["progressToken"] = number.into();
        let params = json!({"_meta": meta, "name": name, "arguments": arguments});
        let message = json!({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params});
        (common.iter().chain(headers).map(|header| (*header).to_owned()).collect(), message.to_string())
    };
    let revision = "mcp-protocol-version: 2026-07-28";
    let calls = [
        of(1_000_000_000, &["mcp-name: echo", revision], "echo", json!({"text": "hi"})),
        of(
            1_000_000_001,
            &[
                "mcp-name: =?base64?Z3LDtsOfZQ==?=",
                "mcp-param-count: 3",
                "mcp-param-region: =?base64?WsO8cmljaA==?=",
                revision,
            ],
            "größe",
            json!({"region": "Zürich", "inner": {"count": 3}}),
        ),
    ];
    assert_eq!(sent(&server), calls);
}

#[tokio::test]
async fn a_call_in_an_older_revision_has_no_newer_fields() {
    let server = ByHand::new(async |_, _, _| None).await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "hi").await.text(), "hi");
    let headers = [
        "accept: application/json, text/event-stream",
        "content-type: application/json",
        "mcp-protocol-version: 2025-11-25",
    ];
    let params = json!({"_meta": {"progressToken": 1_000_000_000}, "name": "echo", "arguments": {"text": "hi"}});
    let message = json!({"jsonrpc": "2.0", "id": 1_000_000_000, "method": "tools/call", "params": params});
    assert_eq!(sent(&server), [(headers.map(str::to_owned).to_vec(), message.to_string())]);
}

/// Returns an SSE stream of these messages.
fn events(messages: &[Value]) -> Response {
    let events: String = messages.iter().map(|message| format!("data: {message}\n\n")).collect();
    plain(200, "text/event-stream", events)
}

fn result(id: &Value, text: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "result": {"content": [{"type": "text", "text": text}]}})
}

fn progress(token: &Value, step: u32) -> Value {
    let params = json!({"progressToken": token, "progress": step, "total": 4, "message": format!("step {step}")});
    json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})
}

/// Returns the progress events of a stage.
fn told(stage: &Stage) -> Vec<Value> {
    let events = stage.world.events();
    let progress = events.iter().filter(|event| event.body.name() == "tool.call.progress");
    progress.map(|event| event.cloud_event()["data"]["message"].clone()).collect()
}

#[tokio::test]
async fn other_messages_on_the_stream_of_a_call_are_handled_in_order() {
    let server = ByHand::that(|call| {
        let token = &call["params"]["_meta"]["progressToken"];
        let ask = |id: &str, method: &str, params: Value| json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
        let schema = json!({"type": "object", "properties": {}});
        events(&[
            progress(token, 1),
            ask("ping", "ping", json!({})),
            progress(&json!(7), 9),
            ask("roots", "roots/list", json!({})),
            ask("elicit", "elicitation/create", json!({"message": "?", "requestedSchema": schema})),
            ask("odd", "odd/thing", json!({})),
            json!({"jsonrpc": "2.0", "method": "notifications/odd"}),
            json!({"no": "message"}),
            result(&json!(12), "somebody else's"),
            progress(token, 2),
            result(&call["id"], "done"),
            progress(token, 3),
        ])
    })
    .await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "x").await.text(), "done");
    assert_eq!(told(&stage), ["step 1", "step 2"], "messages after the answer are too late");
    let replies = || {
        let seen = server.seen.lock().unwrap();
        let replies = seen.iter().filter(|(_, _, message)| message["id"].is_string());
        let mut replies: Vec<Value> = replies.map(|(_, _, message)| message.clone()).collect();
        replies.sort_by_key(|reply| reply["id"].to_string());
        replies
    };
    until(|| replies().len() == 4).await;
    assert_eq!(
        replies(),
        [
            json!({"jsonrpc": "2.0", "id": "elicit", "result": {"action": "decline"}}),
            json!({"jsonrpc": "2.0", "id": "odd", "error": {"code": -32601, "message": "odd/thing"}}),
            json!({"jsonrpc": "2.0", "id": "ping", "result": {}}),
            json!({"jsonrpc": "2.0", "id": "roots", "result": {"roots": []}}),
        ]
    );
}

#[tokio::test]
async fn a_tool_change_on_the_stream_of_a_call_is_noticed() {
    let has_changed = Arc::new(AtomicBool::new(false));
    let server = ByHand::new(move |_, _, message: Value| {
        let answer = match message["method"].as_str() {
            Some("tools/call") => {
                has_changed.store(true, Ordering::Relaxed);
                let changed = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
                Some(events(&[changed, result(&message["id"], "changed")]))
            }
            Some("tools/list") if has_changed.load(Ordering::Relaxed) => {
                let tools = ["echo", "late"].map(|name| json!({"name": name, "inputSchema": {"type": "object"}}));
                Some(json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools}})))
            }
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "x").await.text(), "changed");
    until(|| stage.tools() == ["test__echo", "test__late"]).await;
}

/// Returns the status and the text of a call.
async fn said(answer: impl Fn(&Value) -> Response + Clone + Send + Sync + 'static) -> (Status, String) {
    let server = ByHand::that(answer).await;
    let stage = Stage::at(server.url()).await;
    let result = stage.call("echo", "x").await;
    stage.world.check();
    (result.status, result.error.clone().map_or_else(|| result.text(), |error| error.message))
}

#[tokio::test]
async fn a_stream_that_ends_without_the_answer_is_an_error() {
    let closed = (Status::Failed, "the MCP server `test` cannot be reached: the connection is closed".to_owned());
    assert_eq!(said(|_| events(&[])).await, closed);
    assert_eq!(said(|call| events(&[progress(&call["id"], 1), result(&json!(5), "for another")])).await, closed);
}

#[tokio::test]
async fn errors_and_numbers_made_of_text_find_their_call() {
    let error = |id: Value| json!({"jsonrpc": "2.0", "id": id, "error": {"code": -32000, "message": "out of luck"}});
    let unlucky = (Status::Failed, "the MCP server `test` answered: out of luck".to_owned());
    assert_eq!(said(move |call| events(&[error(call["id"].clone())])).await, unlucky);
    assert_eq!(said(move |_| events(&[error(Value::Null)])).await, unlucky);
    assert_eq!(said(move |_| json_answer(200, &error(json!(5)))).await, unlucky);
    let text = |call: &Value| result(&json!(call["id"].to_string()), "found");
    let found = (Status::Success, "found".to_owned());
    assert_eq!(said(move |call| events(&[text(call)])).await, found);
    assert_eq!(said(move |call| json_answer(200, &text(call))).await, found);
}

#[tokio::test]
async fn each_kind_of_result_is_recognized() {
    let of = |result: Value| {
        said(move |call| json_answer(200, &json!({"jsonrpc": "2.0", "id": call["id"], "result": result})))
    };
    let text = json!([{"type": "text", "text": "x", "annotations": {"audience": ["user"]}}, {"type": "odd"}]);
    let cases = [
        (json!({"content": [], "isError": false}), Status::Success, ""),
        (json!({"structuredContent": {"a": 1}}), Status::Success, ""),
        (json!({"resultType": "complete", "content": [{"text": "a", "type": "text"}]}), Status::Success, "a"),
        (json!({"content": [{"type": "text", "text": "no"}], "isError": true}), Status::Failed, "no"),
        (
            json!({"content": text}),
            Status::Failed,
            "the MCP server `test` answered: a result that is not a tool result",
        ),
        (json!({"content": 5}), Status::Failed, "the MCP server `test` answered: a result that is not a tool result"),
        (json!({}), Status::Failed, "the MCP server `test` answered: a result that is not a tool result"),
        (
            json!({"resultType": "input_required", "content": [], "requestState": "x"}),
            Status::Failed,
            "the MCP server `test` answered: a question to the user, which wieldy cannot pass on",
        ),
    ];
    for (result, status, message) in cases {
        assert_eq!(of(result.clone()).await, (status, message.to_owned()), "{result}");
    }
}

#[tokio::test]
async fn a_stream_is_resumed_until_the_answer_without_repeats() {
    let server = ByHand::new(move |asked, headers: HeaderMap, message: Value| {
        let last = headers.get("last-event-id").map(|last| last.to_str().unwrap().to_owned());
        let part = |id: &str, message: Option<Value>| {
            let data = message.map(|message| message.to_string()).unwrap_or_default();
            Some(plain(200, "text/event-stream", format!("retry: 1\nid: {id}\ndata: {data}\n\n")))
        };
        let call = json!(1_000_000_000);
        let answer = match (asked.as_str(), message["method"].as_str(), last.as_deref()) {
            ("POST /mcp", Some("tools/call"), None) => part("a", Some(progress(&call, 1))),
            ("GET /mcp", _, Some("a")) => part("b", Some(progress(&call, 2))),
            ("GET /mcp", _, Some("b")) => part("c", Some(result(&call, "resumed"))),
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "x").await.text(), "resumed");
    assert_eq!(told(&stage), ["step 1", "step 2"]);
    let revisions = server.headers("mcp-protocol-version");
    assert!(revisions.iter().rev().take(2).all(|revision| revision.as_deref() == Some("2025-11-25")));
}

/// A server with a session, whose stream sends the messages of `answers`. Calls get 202 and no body.
async fn by_the_session(answers: broadcast::Sender<String>) -> ByHand {
    ByHand::new(move |asked, _, message: Value| {
        let answer = if asked.starts_with("GET") {
            let answers = BroadcastStream(answers.subscribe());
            Some(plain(200, "text/event-stream", Body::from_stream(answers.into_stream())))
        } else if message["method"] == "initialize" {
            let mut answer = well(&message);
            answer.headers_mut().insert("mcp-session-id", "s1".parse().unwrap());
            Some(answer)
        } else if message["method"] == "tools/call" {
            let (token, answers) = (message["params"]["_meta"]["progressToken"].clone(), answers.clone());
            for said in [progress(&token, 1), result(&message["id"], "by the session")] {
                answers.send(format!("data: {said}\n\n")).unwrap();
            }
            Some(StatusCode::ACCEPTED.into_response())
        } else {
            None
        };
        async move { answer }
    })
    .await
}

struct BroadcastStream(broadcast::Receiver<String>);

impl BroadcastStream {
    fn into_stream(self) -> impl futures_util::Stream<Item = Result<String, std::io::Error>> {
        futures_util::stream::unfold(self.0, |mut receiver| async {
            let said = receiver.recv().await.ok()?;
            Some((Ok(said), receiver))
        })
    }
}

#[tokio::test]
async fn an_answer_may_come_by_the_stream_of_the_session() {
    let answers = broadcast::Sender::new(16);
    let server = by_the_session(answers.clone()).await;
    let stage = Stage::at(server.url()).await;
    until(|| answers.receiver_count() == 1).await;
    for _ in 0..2 {
        assert_eq!(stage.call("echo", "x").await.text(), "by the session");
    }
    assert_eq!(told(&stage), ["step 1", "step 1"]);
}

#[tokio::test]
async fn a_call_that_is_stopped_or_dropped_is_cancelled_by_its_number() {
    let server = ByHand::new(async |_, _, message: Value| {
        if message["method"] == "tools/call" {
            std::future::pending::<()>().await;
        }
        None
    })
    .await;
    let stage = Stage::with("", |settings| {
        settings.reach = Reach::Http(Address::new(server.url()));
        settings.timeout = Some(Duration::from_secs(1));
    })
    .await;
    let cancelled = || {
        let seen = server.seen.lock().unwrap();
        let told = seen.iter().filter(|(_, _, message)| message["method"] == "notifications/cancelled");
        told.map(|(_, _, message)| message["params"]["requestId"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(stage.error("echo").await.code.as_str(), "E3103");
    until(|| cancelled() == [1_000_000_000]).await;
    let called = || server.seen.lock().unwrap().iter().filter(|(_, _, it)| it["method"] == "tools/call").count();
    tokio::select! {
        result = stage.call("echo", "x") => panic!("there is no answer: {result:?}"),
        () = until(|| called() == 2) => {}
    }
    until(|| cancelled() == [1_000_000_000, 1_000_000_001]).await;
}

#[tokio::test]
async fn concurrent_calls_reopen_a_lost_session_once() {
    let begun = Arc::new(Mutex::new(0));
    let server = ByHand::new(move |asked, headers: HeaderMap, message: Value| {
        let session = headers.get("mcp-session-id").map(|session| session.to_str().unwrap().to_owned());
        let answer = match message["method"].as_str() {
            _ if asked.starts_with("GET") => Some(StatusCode::METHOD_NOT_ALLOWED.into_response()),
            Some("initialize") => {
                let mut begun = begun.lock().unwrap();
                *begun += 1;
                let mut answer = well(&message);
                answer.headers_mut().insert("mcp-session-id", format!("s{begun}").parse().unwrap());
                Some(answer)
            }
            Some("tools/call") if session.as_deref() == Some("s1") => Some(StatusCode::NOT_FOUND.into_response()),
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let calls = (0..20).map(|number: u32| {
        let stage = &stage;
        async move { stage.call("echo", &number.to_string()).await.text() }
    });
    let answers = futures_util::future::join_all(calls).await;
    assert_eq!(answers, (0..20).map(|number: u32| number.to_string()).collect::<Vec<_>>());
    let seen = server.seen.lock().unwrap();
    let of = |method: &str| seen.iter().filter(|(_, _, message)| message["method"] == method).count();
    assert_eq!((of("initialize"), of("tools/call")), (2, 40));
}

/// A server that reuses its session id: after one session was forgotten, the next with that id is valid.
#[tokio::test]
async fn a_new_session_may_have_the_same_id() {
    let is_forgotten = Arc::new(AtomicBool::new(true));
    let server = ByHand::new(move |asked, _, message: Value| {
        let answer = match message["method"].as_str() {
            _ if asked.starts_with("GET") => Some(StatusCode::METHOD_NOT_ALLOWED.into_response()),
            Some("initialize") => {
                let mut answer = well(&message);
                answer.headers_mut().insert("mcp-session-id", "always".parse().unwrap());
                Some(answer)
            }
            Some("tools/call") if is_forgotten.swap(false, Ordering::Relaxed) => {
                Some(StatusCode::NOT_FOUND.into_response())
            }
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "one").await.text(), "one");
    assert_eq!(stage.call("echo", "two").await.text(), "two");
}

/// An error that names the request's id is its response, even if it mentions sessions: the call is not repeated.
#[tokio::test]
async fn an_error_that_mentions_sessions_does_not_reopen_one() {
    let server = ByHand::new(move |asked, _, message: Value| {
        let answer = match message["method"].as_str() {
            _ if asked.starts_with("GET") => Some(StatusCode::METHOD_NOT_ALLOWED.into_response()),
            Some("initialize") => {
                let mut answer = well(&message);
                answer.headers_mut().insert("mcp-session-id", "s1".parse().unwrap());
                Some(answer)
            }
            Some("tools/call") => {
                let error = json!({"code": -32000, "message": "the browser's session crashed"});
                Some(json_answer(400, &json!({"jsonrpc": "2.0", "id": message["id"], "error": error})))
            }
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let result = stage.call("echo", "one").await;
    assert!(result.error.as_ref().unwrap().message.contains("the browser's session crashed"), "{:?}", result.error);
    let seen = server.seen.lock().unwrap();
    assert_eq!(seen.iter().filter(|(_, _, message)| message["method"] == "tools/call").count(), 1);
}

#[tokio::test]
async fn a_session_that_cannot_be_reopened_is_reported() {
    let begun = Arc::new(AtomicBool::new(false));
    let server = ByHand::new(move |asked, _, message: Value| {
        let answer = match message["method"].as_str() {
            _ if asked.starts_with("GET") => Some(StatusCode::METHOD_NOT_ALLOWED.into_response()),
            Some("initialize") if begun.swap(true, Ordering::Relaxed) => {
                let error = json!({"code": -32000, "message": "full"});
                Some(json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "error": error})))
            }
            Some("initialize") => {
                let mut answer = well(&message);
                answer.headers_mut().insert("mcp-session-id", "s1".parse().unwrap());
                Some(answer)
            }
            Some("tools/call") => Some(StatusCode::NOT_FOUND.into_response()),
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let error = stage.error("echo").await;
    assert_eq!(
        (error.retryable, error.message.as_str()),
        (
            true,
            "the MCP server `test` cannot be reached: it does not know the session any more and opens no new one: full"
        )
    );
}

#[tokio::test]
async fn calls_that_are_answered_by_streams_go_over_one_connection() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&accepted);
    let listener = listener.tap_io(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let answer = async |message: axum::Json<Value>| {
        if message["method"] != "tools/call" {
            return well(&message);
        }
        // The end comes a moment after the response.
        let pieces = [(0, format!("data: {}\n\n", result(&message["id"], "hi"))), (5, String::new())];
        let pieces = futures_util::stream::iter(pieces).then(async |(pause, piece)| {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            Ok::<_, std::io::Error>(piece)
        });
        plain(200, "text/event-stream", Body::from_stream(pieces))
    };
    let serving = tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    let stage = Stage::at(format!("http://{address}/mcp")).await;
    let before = accepted.load(Ordering::Relaxed);
    for _ in 0..5 {
        assert_eq!(stage.call("echo", "x").await.text(), "hi");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(accepted.load(Ordering::Relaxed) - before, 0);
    serving.abort();
}

/// A server that closes each connection after one response without saying so: the next request does not use it.
#[tokio::test]
async fn a_connection_that_the_server_closed_is_not_used_again() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(one_answer(stream));
        }
    });
    let stage = Stage::at(format!("http://{address}/mcp")).await;
    for round in 0..5 {
        let text = format!("x{round}");
        assert_eq!(stage.call("echo", &text).await.text(), text);
        // Long enough for the other end to close in one round, and too short in the next.
        tokio::time::sleep(Duration::from_millis(10 * (round % 2))).await;
    }
    drop(stage);
    serving.abort();
}

async fn one_answer(mut stream: tokio::net::TcpStream) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut got = Vec::new();
    let body = loop {
        if stream.read_buf(&mut got).await.unwrap_or_default() == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&got).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length =
            head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        if body.len() >= length.unwrap_or(0) {
            break body.to_owned();
        }
    };
    let message: Value = serde_json::from_str(&body).unwrap_or_default();
    let (head, body) = well(&message).into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let kind = head.headers.get("content-type").map_or("text/plain", |kind| kind.to_str().unwrap());
    let start = format!("HTTP/1.1 {}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n", head.status, body.len());
    let _ = stream.write_all(&[start.as_bytes(), &body].concat()).await;
}

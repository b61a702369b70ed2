//! Servers over HTTP that refuse, lie, flood or hang: the call ends with an error that says so, and nothing piles up.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use wieldy_core::CallError;
use wieldy_mcp::client::Address;

use super::Stage;

/// A handwritten MCP server: it handles everything but calls correctly, and calls as the test says.
pub(crate) struct ByHand {
    pub(crate) address: SocketAddr,
    /// The received requests: HTTP method and path, headers, message.
    pub(crate) seen: Arc<Mutex<Vec<(String, HeaderMap, Value)>>>,
    router: axum::Router,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for ByHand {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ByHand {
    pub(crate) async fn new<F>(answer: impl Fn(String, HeaderMap, Value) -> F + Clone + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Option<Response>> + Send,
    {
        let seen = Arc::<Mutex<Vec<_>>>::default();
        let noted = Arc::clone(&seen);
        let handle = async move |request: Request| {
            let (head, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let message: Value =
                serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body)));
            let asked = format!("{} {}", head.method, head.uri);
            noted.lock().unwrap().push((asked.clone(), head.headers.clone(), message.clone()));
            answer(asked, head.headers, message.clone()).await.unwrap_or_else(|| well(&message))
        };
        let (router, stop) = (axum::Router::new().fallback(handle), CancellationToken::new());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = serving(listener, router.clone(), stop.clone());
        Self { address, seen, router, stop, task }
    }

    /// Ends it with all its connections, after open requests are answered.
    pub(crate) async fn end(&mut self) {
        self.stop.cancel();
        (&mut self.task).await.unwrap();
    }

    /// Starts it again at the same address.
    pub(crate) async fn begin(&mut self) {
        let listener = tokio::net::TcpListener::bind(self.address).await.unwrap();
        self.stop = CancellationToken::new();
        self.task = serving(listener, self.router.clone(), self.stop.clone());
    }

    /// Returns a server that answers calls with `answer`, and everything else correctly.
    pub(crate) async fn that(answer: impl Fn(&Value) -> Response + Clone + Send + Sync + 'static) -> Self {
        Self::new(move |_, _, message| {
            let answer = (message["method"] == "tools/call").then(|| answer(&message));
            async move { answer }
        })
        .await
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    pub(crate) fn calls(&self) -> usize {
        self.asked("tools/call")
    }

    /// Returns the number of requests of this method.
    pub(crate) fn asked(&self, method: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|(_, _, message)| message["method"] == method).count()
    }

    pub(crate) fn headers(&self, name: &str) -> Vec<Option<String>> {
        let seen = self.seen.lock().unwrap();
        seen.iter().map(|(_, headers, _)| Some(headers.get(name)?.to_str().unwrap().to_owned())).collect()
    }
}

fn serving(
    listener: tokio::net::TcpListener,
    router: axum::Router,
    stop: CancellationToken,
) -> tokio::task::JoinHandle<()> {
    let stopped = async move { stop.cancelled().await };
    tokio::spawn(async move { axum::serve(listener, router).with_graceful_shutdown(stopped).await.unwrap() })
}

pub(crate) fn json_answer(status: u16, body: &Value) -> Response {
    let head = (StatusCode::from_u16(status).unwrap(), [("content-type", "application/json")]);
    (head.0, head.1, body.to_string()).into_response()
}

/// Returns the correct response of an old server without sessions.
pub(crate) fn well(message: &Value) -> Response {
    let result = match message["method"].as_str().unwrap_or_default() {
        "initialize" => json!({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
            "serverInfo": {"name": "by hand", "version": "1"}}),
        "tools/list" => json!({"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}),
        "tools/call" => json!({"content": [{"type": "text", "text": message["params"]["arguments"]["text"]}]}),
        _ if message["id"].is_null() => return StatusCode::ACCEPTED.into_response(),
        _ => {
            let error = json!({"code": -32601, "message": "method not found"});
            return json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "error": error}));
        }
    };
    json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))
}

pub(crate) fn plain(status: u16, content_type: &'static str, body: impl Into<Body>) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    (status, [("content-type", content_type)], body.into()).into_response()
}

/// Returns the error of a call that the server answers with `answer`.
async fn told(answer: impl Fn(&Value) -> Response + Clone + Send + Sync + 'static) -> CallError {
    let server = ByHand::that(answer).await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.tools(), ["test__echo"], "{}", stage.state());
    let error = stage.error("echo").await;
    assert_eq!(server.calls(), 1, "nothing is sent twice");
    stage.world.check();
    error
}

fn short(error: &CallError) -> (&str, &str) {
    let message = error.message.strip_prefix("the MCP server `test` ").unwrap_or(&error.message);
    (error.code.as_str(), message)
}

#[tokio::test]
async fn invalid_responses_are_reported() {
    type Answer = fn(&Value) -> Response;
    let cases: [(Answer, &str); 9] = [
        (|_| plain(200, "application/json", "{\"jsonrpc\":"), "answered: a response that is not valid MCP"),
        (|_| plain(200, "application/json", "\u{0}\u{1}"), "answered: a response that is not valid MCP"),
        (|_| plain(200, "text/html", "<h1>Hello</h1>"), "answered: an HTML page"),
        (|_| plain(200, "image/png", "x"), "answered: neither JSON nor an event stream"),
        (|_| plain(200, "text/plain", ""), "answered: nothing"),
        (|_| StatusCode::ACCEPTED.into_response(), "answered: nothing"),
        (
            |_| json_answer(200, &json!({"jsonrpc": "2.0", "id": 999, "result": {"content": []}})),
            "answered: a response to another request",
        ),
        (
            |_| json_answer(200, &json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})),
            "answered: a response of the wrong type",
        ),
        (|_| plain(418, "text/plain", "I am\u{7} a teapot"), "answered: HTTP 418 (I'm a teapot): I am\u{7} a teapot"),
    ];
    for (answer, message) in cases {
        assert_eq!(short(&told(answer).await), ("E3202", message));
    }
}

#[tokio::test]
async fn an_error_without_an_id_answers_the_request() {
    for status in [200, 400, 500] {
        let error = json!({"code": -32603, "message": "out of luck"});
        let body = json!({"jsonrpc": "2.0", "id": null, "error": error});
        assert_eq!(
            short(&told(move |_| json_answer(status, &body)).await),
            ("E3202", "answered: out of luck"),
            "{status}"
        );
    }
}

#[tokio::test]
async fn error_pages_of_gateways_are_not_quoted() {
    let page = format!("<html>{}</html>", "x".repeat(100_000));
    let error = told(move |_| plain(502, "text/html; charset=utf-8", page.clone())).await;
    assert_eq!(short(&error), ("E3201", "cannot be reached: HTTP 502 (Bad Gateway)"));
    assert!(!error.retryable, "it may have taken effect");
    let long = "x".repeat(100_000);
    let error = told(move |_| plain(500, "text/plain", long.clone())).await;
    assert_eq!(error.message.len(), 275);
}

#[tokio::test]
async fn unauthorized_and_forbidden_are_reported_with_advice() {
    let challenge = r#"Bearer error="insufficient_scope", scope="files:read files:write""#;
    let of = |status: u16, challenge: Option<&'static str>| {
        told(move |_| {
            let mut response = plain(status, "text/plain", "no");
            if let Some(challenge) = challenge {
                response.headers_mut().insert("www-authenticate", challenge.parse().unwrap());
            }
            response
        })
    };
    for challenge in [None, Some("Bearer realm=\"x\"")] {
        let error = of(401, challenge).await;
        assert_eq!(short(&error), ("E3301", "wants a login"));
        let suggestion = error.suggestion.unwrap();
        assert_eq!(suggestion, "`wieldy mcp login test`, or give it a token by `headers`");
    }
    let error = of(403, None).await;
    assert_eq!(short(&error), ("E3301", "refuses access"));
    let error = of(403, Some(challenge)).await;
    assert_eq!(error.details["scope"], "files:read files:write");
    assert_eq!(
        error.suggestion.unwrap(),
        "add the scopes in `details.scope` to `mcp.servers.test.oauth.scopes`, then run `wieldy mcp login test`"
    );
}

#[tokio::test]
async fn the_retry_after_of_a_busy_server_is_kept() {
    let of = |status: u16, after: Option<String>| {
        told(move |_| {
            let mut response = plain(status, "text/plain", "later");
            if let Some(after) = &after {
                response.headers_mut().insert("retry-after", after.parse().unwrap());
            }
            response
        })
    };
    let error = of(429, Some("7".into())).await;
    assert_eq!(short(&error), ("E3201", "cannot be reached: it is busy: HTTP 429 (Too Many Requests)"));
    assert_eq!((error.retryable, error.retry_after()), (true, Some(Duration::from_secs(7))));
    let error = of(503, Some("999999999".into())).await;
    assert_eq!(short(&error), ("E3201", "cannot be reached: it is busy: HTTP 503 (Service Unavailable)"));
    assert_eq!((error.retryable, error.retry_after()), (false, Some(Duration::from_secs(3600))));
    let date = jiff::Timestamp::now() + Duration::from_secs(100);
    let date = jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&date).unwrap();
    let wait = of(503, Some(date)).await.retry_after().unwrap();
    assert!((Duration::from_secs(90)..=Duration::from_secs(100)).contains(&wait), "{wait:?}");
    for nonsense in [None, Some("soon".into()), Some("-3".into())] {
        assert_eq!(of(503, nonsense).await.retry_after(), None);
    }
}

#[tokio::test]
async fn a_server_that_is_busy_from_the_start_is_asked_again_when_it_said() {
    let server = ByHand::new(async |_, _, _| {
        let mut response = plain(429, "text/plain", "later");
        response.headers_mut().insert("retry-after", "9".parse().unwrap());
        Some(response)
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let patience = stage.state()["error"]["details"]["retry_after_ms"].as_u64().unwrap();
    assert!((8_000..=9_000).contains(&patience), "{patience}");
}

#[tokio::test]
async fn redirects_are_followed_only_within_the_server() {
    let elsewhere = ByHand::new(async |_, _, _| None).await;
    for status in [301, 302, 303, 307, 308] {
        let away = elsewhere.url();
        let server = ByHand::new(move |asked, _, message: Value| {
            let call = message["method"] == "tools/call";
            let to = match &*asked {
                "POST /mcp" if call => Some("/moved".to_owned()),
                "POST /moved" if message["params"]["arguments"]["text"] == "away" => Some(away.clone()),
                _ => None,
            };
            async move { to.map(|to| (StatusCode::from_u16(status).unwrap(), [("location", to)]).into_response()) }
        })
        .await;
        let secret = "sesame-open-9876";
        let stage = Stage::with("", |settings| {
            let mut address = Address::new(server.url());
            address.headers.insert("X-Key".into(), secret.into());
            address.bearer = Some(secret.into());
            settings.reach = wieldy_mcp::client::Reach::Http(address);
        })
        .await;
        let within = stage.call("echo", "within").await;
        if status < 307 {
            let reason = StatusCode::from_u16(status).unwrap();
            let told = format!(
                "cannot be used: it redirects to itself with HTTP {status} ({}), which wieldy does not follow",
                reason.canonical_reason().unwrap()
            );
            assert_eq!(short(&within.error.unwrap()), ("E3301", &*told));
            continue;
        }
        assert_eq!(within.text(), "within", "{:?}", within.error);
        let error = stage.call("echo", "away").await.error.unwrap();
        assert_eq!(error.code.as_str(), "E3301");
        assert!(error.message.contains(&format!("redirects to `http://{}`", elsewhere.address)), "{}", error.message);
        assert!(server.headers("x-key").iter().all(|key| key.as_deref() == Some(secret)));
        let bearer = format!("Bearer {secret}");
        assert!(server.headers("authorization").iter().all(|header| header.as_ref() == Some(&bearer)));
    }
    assert_eq!(elsewhere.seen.lock().unwrap().len(), 0, "no other server gets a request");
}

#[tokio::test]
async fn a_lost_session_is_reopened_and_the_call_is_made_once() {
    for forgotten in [404, 400] {
        let begun = Arc::new(Mutex::new(0));
        let server = ByHand::new(move |asked, headers: HeaderMap, message: Value| {
            let mut begun = begun.lock().unwrap();
            let answer = if message["method"] == "initialize" {
                *begun += 1;
                let mut answer = well(&message);
                answer.headers_mut().insert("mcp-session-id", format!("s{begun}").parse().unwrap());
                Some(answer)
            } else if asked.starts_with("GET") {
                Some(StatusCode::METHOD_NOT_ALLOWED.into_response())
            } else if message["method"] == "tools/call" && headers["mcp-session-id"] == "s1" {
                let error = json!({"code": -32000, "message": "Bad Request: No valid session ID provided"});
                Some(json_answer(forgotten, &json!({"jsonrpc": "2.0", "id": null, "error": error})))
            } else {
                None
            };
            async move { answer }
        })
        .await;
        let stage = Stage::at(server.url()).await;
        assert_eq!(stage.call("echo", "hi").await.text(), "hi");
        assert_eq!(server.calls(), 2, "once in each session");
        assert_eq!(server.headers("mcp-session-id").last().unwrap().as_deref(), Some("s2"));
    }
}

/// Returns a body that repeats this piece forever.
fn endless(piece: &'static [u8], pause: Duration) -> Body {
    Body::from_stream(futures_util::stream::repeat(()).then(move |()| async move {
        tokio::time::sleep(pause).await;
        Ok::<_, std::io::Error>(Bytes::from_static(piece))
    }))
}

const MEGABYTE: &[u8] = &[b'x'; 1024 * 1024];

#[tokio::test]
async fn answers_of_any_size_cost_little() {
    let flood = || endless(MEGABYTE, Duration::ZERO);
    type Answer = fn(Body) -> Response;
    let cases: [(Answer, &str); 5] = [
        (|body| plain(200, "application/json", body), "cannot be reached: it sent a message of more than 16 MiB"),
        (|body| plain(200, "text/event-stream", body), "cannot be reached: it sent a message of more than 16 MiB"),
        (
            |body| {
                (StatusCode::OK, [("content-type", "application/json"), ("content-length", "1073741824")], body)
                    .into_response()
            },
            "cannot be reached: it sent a message of more than 16 MiB",
        ),
        (|body| plain(500, "text/html", body), "cannot be reached: HTTP 500 (Internal Server Error)"),
        (|body| plain(200, "text/html", body), "answered: an HTML page"),
    ];
    let before = super::misbehaving::resident_bytes();
    for (answer, message) in cases {
        let error = told(move |_| answer(flood())).await;
        assert_eq!(short(&error).1, message);
    }
    let more = super::misbehaving::resident_bytes().saturating_sub(before);
    assert!(more < 96 * 1024 * 1024, "{more} more bytes were resident");
}

#[tokio::test]
async fn an_event_that_is_too_large_is_not_requested_again() {
    let server = ByHand::that(|_| {
        let begin =
            futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"id: 1\ndata:\n\ndata: "))]);
        let flood = futures_util::stream::repeat_with(|| Ok(Bytes::from_static(MEGABYTE)));
        plain(200, "text/event-stream", Body::from_stream(begin.chain(flood)))
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let error = stage.error("echo").await;
    assert_eq!(short(&error), ("E3201", "cannot be reached: it sent a message of more than 16 MiB"));
    let asked: Vec<String> = server.seen.lock().unwrap().iter().map(|(asked, ..)| asked.clone()).collect();
    assert!(asked.iter().all(|asked| asked == "POST /mcp"), "{asked:?}");
}

#[tokio::test]
async fn endless_responses_end_with_the_timeout_of_the_call() {
    let cases: [(&str, &'static [u8]); 4] = [
        ("application/json", b" "),
        ("text/event-stream", b": still there\n\n"),
        ("text/event-stream", b"data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/tools/list_changed\"}\n\n"),
        ("text/event-stream", b"d"),
    ];
    for (content_type, piece) in cases {
        let server = ByHand::that(move |_| plain(200, content_type, endless(piece, Duration::from_millis(5)))).await;
        let stage = Stage::with("", |settings| {
            settings.reach = wieldy_mcp::client::Reach::Http(Address::new(server.url()));
            settings.timeout = Some(Duration::from_millis(500));
        })
        .await;
        let error = stage.error("echo").await;
        assert_eq!((error.code.as_str(), error.details["clock"].as_str()), ("E3103", Some("attempt")));
        stage.world.check();
    }
}

#[tokio::test]
async fn a_broken_stream_is_resumed_if_possible_and_reported_otherwise() {
    let error = told(|_| plain(200, "text/event-stream", "data: {\"jsonrpc\":\"2.0\"}\n\ndata: half")).await;
    assert_eq!(short(&error), ("E3201", "cannot be reached: the connection is closed"));
    let server = ByHand::new(move |asked, headers: HeaderMap, message: Value| {
        let event = |id: &Value| {
            let result = json!({"content": [{"type": "text", "text": "resumed"}]});
            format!("data: {}\n\n", json!({"jsonrpc": "2.0", "id": id, "result": result}))
        };
        let answer = match (asked.as_str(), message["method"].as_str()) {
            ("POST /mcp", Some("tools/call")) => {
                let start = format!("retry: 1\nid: of {}\ndata:\n\n", message["id"]);
                Some(plain(200, "text/event-stream", start))
            }
            ("GET /mcp", _) => {
                let id = headers["last-event-id"].to_str().unwrap().strip_prefix("of ").unwrap().to_owned();
                Some(plain(200, "text/event-stream", event(&serde_json::from_str(&id).unwrap())))
            }
            _ => None,
        };
        async move { answer }
    })
    .await;
    let stage = Stage::at(server.url()).await;
    assert_eq!(stage.call("echo", "x").await.text(), "resumed");
    assert_eq!(server.calls(), 1);
}

#[tokio::test]
async fn invalid_addresses_and_headers_are_reported_without_secrets() {
    let of = async |url: &str, headers: &[(&str, &str)]| {
        let stage = Stage::with("", |settings| {
            let mut address = Address::new(url);
            let owned = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            address.headers = owned.collect();
            settings.reach = wieldy_mcp::client::Reach::Http(address);
        })
        .await;
        stage.state()["error"]["message"].as_str().unwrap().to_owned()
    };
    let begin = "the MCP server `test` cannot be used: ";
    assert_eq!(of("nowhere", &[]).await, format!("{begin}`nowhere` is not a URL: relative URL without a base"));
    assert_eq!(
        of("file:///etc/passwd", &[]).await,
        format!("{begin}`file:///etc/passwd` begins with neither http:// nor https://")
    );
    let url = "http://127.0.0.1:9/mcp";
    assert_eq!(
        of(url, &[("X-Key", "hunter\n2")]).await,
        format!("{begin}the value of the header `X-Key` cannot be sent")
    );
    assert_eq!(
        of(url, &[("Mcp-Session-Id", "x")]).await,
        format!("{begin}the header `Mcp-Session-Id` cannot be set: wieldy sets it itself")
    );
    assert_eq!(
        of("http://no-such-host.invalid/mcp?key=secret", &[]).await.split(": ").take(3).collect::<Vec<_>>(),
        [
            "the MCP server `test` cannot be reached",
            "no connection could be made",
            "failed to lookup address information"
        ]
    );
}

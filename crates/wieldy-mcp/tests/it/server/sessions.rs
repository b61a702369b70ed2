//! Calls over HTTP in sessions: streams, questions, and clients that disconnect or come back.

use std::time::Duration;

use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use wieldy_core::ToolSpec;
use wieldy_mcp::server::ServerOptions;
use wieldy_testkit::{Act, Puppet, World};

use super::http::{Door, MODERN, call};
use super::{meta, shown};

/// Reads the events of a stream one by one.
pub(super) struct Events {
    response: Response,
    text: String,
}

impl Events {
    pub(super) fn new(response: Response) -> Self {
        assert_eq!(
            (response.status(), &response.headers()["content-type"]),
            (StatusCode::OK, &"text/event-stream".parse().unwrap())
        );
        Self { response, text: String::new() }
    }

    /// Returns the id and message of the next event, or `None` at the end.
    pub(super) async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
                let (id, data) = (field("id: ").to_owned(), field("data: "));
                let message = if data.is_empty() { Value::Null } else { shown(serde_json::from_str(data).unwrap()) };
                self.text = rest.to_owned();
                return Some((id, message));
            }
            let piece = tokio::time::timeout(Duration::from_secs(30), self.response.chunk()).await;
            let piece = piece.expect("an event must come").unwrap()?;
            self.text.push_str(std::str::from_utf8(&piece).unwrap());
        }
    }

    pub(super) async fn rest(mut self) -> Vec<(String, Value)> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

/// Opens the stream of a session, after the event `last`.
pub(super) async fn get(door: &Door, session: &str, last: Option<&str>) -> Events {
    let mut request = Client::new().get(door.url()).bearer_auth("token-ada").header("mcp-session-id", session);
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    Events::new(request.header("accept", "text/event-stream").send().await.unwrap())
}

async fn delete(door: &Door, session: &str) {
    let delete = Client::new().delete(door.url()).bearer_auth("token-ada").header("mcp-session-id", session);
    assert_eq!(delete.send().await.unwrap().status(), StatusCode::NO_CONTENT);
}

/// Waits until a condition holds.
pub(super) async fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..2000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}");
}

fn ends(world: &World) -> Vec<&'static str> {
    world.events().iter().filter(|event| event.body.closing().is_some()).map(|event| event.body.name()).collect()
}

fn progress(token: u64) -> Option<Value> {
    Some(json!({"progressToken": token}))
}

fn answer(text: &str) -> Value {
    json!({"jsonrpc": "2.0", "id": 1, "result": {
        "content": [{"type": "text", "text": text}], "isError": false, "_meta": {"wieldy/execution": "[id]"},
    }})
}

#[tokio::test]
async fn a_call_without_notifications_is_answered_with_json() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let response = door.post("ada", &[("mcp-session-id", &session)], &call("echo", progress(7))).await;
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(shown(response.json().await.unwrap()), answer(r#"{"a":1}"#));
    let response = door.post("ada", &[("mcp-session-id", &session)], &call("nonsense", None)).await;
    assert_eq!(response.status(), StatusCode::OK);
    let error = response.json::<Value>().await.unwrap();
    assert_eq!((&error["id"], &error["error"]["code"]), (&json!(1), &json!(-32602)), "{error}");
    world.check();
}

#[tokio::test]
async fn progress_is_sent_before_the_answer() {
    let world = World::new([Puppet::reading("tick", Act::Tick(1, Duration::from_millis(20)))]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let newest = [MODERN[0], MODERN[1], ("mcp-name", "tick")];
    let mut newest_meta = meta(json!({}));
    newest_meta["progressToken"] = json!(7);
    for (headers, meta) in [(vec![("mcp-session-id", &*session)], progress(7)), (newest.to_vec(), Some(newest_meta))] {
        let events = Events::new(door.post("ada", &headers, &call("tick", meta)).await).rest().await;
        let told: Vec<_> = events.iter().map(|(_, message)| (&message["method"], &message["id"])).collect();
        let progress = json!("notifications/progress");
        assert_eq!(told, [(&progress, &Value::Null), (&Value::Null, &json!(1))]);
    }
    world.check();
}

#[tokio::test]
async fn a_client_can_reconnect_for_the_rest_and_the_answer() {
    let world = World::new([Puppet::reading("tick", Act::Tick(4, Duration::from_millis(100)))]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let header = [("mcp-session-id", &*session)];
    let mut events = Events::new(door.post("ada", &header, &call("tick", progress(7))).await);
    let (first, message) = events.next().await.unwrap();
    assert_eq!(message["params"]["progressToken"], 7, "{message}");
    drop(events);
    until("it goes on without its client", || ends(&world) == ["tool.call.success"]).await;
    let rest = get(&door, &session, Some(&first)).await.rest().await;
    let methods: Vec<&Value> = rest.iter().map(|(_, message)| &message["method"]).collect();
    assert_eq!(
        methods,
        [
            &json!("notifications/progress"),
            &json!("notifications/progress"),
            &json!("notifications/progress"),
            &Value::Null
        ]
    );
    let (last, message) = rest.last().unwrap();
    assert_eq!((&message["id"], &message["result"]["isError"]), (&json!(1), &json!(false)), "{message}");
    assert_eq!(get(&door, &session, Some(last)).await.rest().await, [], "it has seen everything");
    world.check();
}

#[tokio::test]
async fn a_resumable_stream_starts_with_an_event_id() {
    let world = World::new([Puppet::reading("tick", Act::Tick(1, Duration::from_millis(20)))]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    for (revision, ids) in
        [("2025-06-18", &["call-0-1", "call-0-2"][..]), ("2025-11-25", &["call-2-0", "call-2-1", "call-2-2"])]
    {
        let headers = [("mcp-session-id", &*session), ("mcp-protocol-version", revision)];
        let mut call = call("tick", progress(7));
        call["id"] = json!(revision);
        let events = Events::new(door.post("ada", &headers, &call).await).rest().await;
        assert_eq!(events.iter().map(|(id, _)| id).collect::<Vec<_>>(), ids, "{revision}");
        let again = get(&door, &session, Some(ids[0])).await.rest().await;
        assert_eq!(again, events[1..], "{revision}");
    }
    world.check();
}

#[tokio::test]
async fn disconnecting_before_the_first_event_does_not_cancel() {
    let world = World::new([Puppet::writing("slow", Act::Take(Duration::from_secs(1)))]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let headers = [("mcp-session-id", &*session)];
    let call = call("slow", None);
    tokio::select! {
        answered = door.post("ada", &headers, &call) => panic!("the call takes its time: {answered:?}"),
        () = until("it runs", || world.executor.load().running == 1) => {}
    }
    until("it goes on without its client", || ends(&world) == ["tool.call.success"]).await;
    world.check();
}

#[tokio::test]
async fn a_call_that_is_cancelled_ends_and_its_answer_is_not_sent() {
    let world = World::new([Puppet::writing("wait", Act::PrintAndWait("so far"))]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let header = [("mcp-session-id", &*session)];
    let cancel = async {
        until("it runs", || world.executor.load().running == 1).await;
        let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}});
        assert_eq!(door.post("ada", &header, &cancelled).await.status(), StatusCode::ACCEPTED);
        // Cancelling again, or cancelling an unknown request, is accepted too.
        assert_eq!(door.post("ada", &header, &cancelled).await.status(), StatusCode::ACCEPTED);
    };
    let call = call("wait", None);
    let (response, ()) = tokio::join!(door.post("ada", &header, &call), cancel);
    assert_eq!(Events::new(response).rest().await, []);
    assert_eq!(ends(&world), ["tool.call.cancelled"]);
    world.check();
}

#[tokio::test]
async fn the_calls_of_a_session_end_with_it() {
    let world = World::new([Puppet::writing("wait", Act::PrintAndWait("so far"))]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let header = [("mcp-session-id", &*session)];
    let end = async {
        until("it runs", || world.executor.load().running == 1).await;
        delete(&door, &session).await;
    };
    let call = call("wait", None);
    let (response, ()) = tokio::join!(door.post("ada", &header, &call), end);
    assert_eq!(Events::new(response).rest().await, []);
    assert_eq!(ends(&world), ["tool.call.cancelled"]);
    assert_eq!(door.post("ada", &header, &call).await.status(), StatusCode::NOT_FOUND);
    world.check();
}

#[tokio::test]
async fn a_question_is_put_on_the_stream_and_answered_by_a_message() {
    let accept = json!({"result": {"action": "accept", "content": {}}});
    let decline = json!({"result": {"action": "decline"}});
    let cannot = json!({"error": {"code": -32601, "message": "no"}});
    for (said, is_error) in [(accept, false), (decline, true), (cannot, true)] {
        let (wipe, strings) = Puppet::new(ToolSpec::new("wipe", "Wipes").confirm(), [Act::Say("wiped")]);
        let world = World::new([wipe]);
        let door = Door::new(&world.executor).await;
        let session = door.session_of("ada", json!({"elicitation": {}})).await;
        let header = [("mcp-session-id", &*session)];
        let mut events = Events::new(door.post("ada", &header, &call("wipe", None)).await);
        let (_, question) = events.next().await.unwrap();
        assert_eq!((&question["id"], &question["method"]), (&json!("wieldy-2"), &json!("elicitation/create")));
        assert_eq!(strings.runs(), 0, "no person has agreed");
        // Responses of another caller, or to another question, are ignored.
        let mut message = said.clone();
        message["jsonrpc"] = json!("2.0");
        message["id"] = json!("wieldy-99");
        assert_eq!(door.post("ada", &header, &message).await.status(), StatusCode::ACCEPTED);
        message["id"] = json!("wieldy-2");
        assert_eq!(door.post("bob", &header, &message).await.status(), StatusCode::NOT_FOUND);
        assert_eq!(strings.runs(), 0, "no person has agreed");
        assert_eq!(door.post("ada", &header, &message).await.status(), StatusCode::ACCEPTED);
        let rest = events.rest().await;
        assert_eq!(rest.len(), 1, "{rest:?}");
        assert_eq!((&rest[0].1["id"], &rest[0].1["result"]["isError"]), (&json!(1), &json!(is_error)), "{rest:?}");
        assert_eq!(strings.runs(), usize::from(!is_error));
        assert_eq!(
            door.post("ada", &header, &message).await.status(),
            StatusCode::ACCEPTED,
            "a late answer does no harm"
        );
        world.check();
    }
}

#[tokio::test]
async fn a_listening_client_is_notified_when_the_tools_change() {
    let world = World::new([Puppet::reading("one", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let mut events = get(&door, &session, None).await;
    world.executor.unregister("one");
    let told = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
    assert_eq!(events.next().await, Some((String::new(), told)));
    delete(&door, &session).await;
    assert_eq!(events.next().await, None, "the session is over");

    let session = door.session("ada").await;
    let request = || Client::new().get(door.url()).bearer_auth("token-ada");
    let status = async |request: reqwest::RequestBuilder| request.send().await.unwrap().status();
    assert_eq!(status(request().header("mcp-session-id", &session)).await, StatusCode::NOT_ACCEPTABLE);
    assert_eq!(status(request().header("accept", "text/event-stream")).await, StatusCode::METHOD_NOT_ALLOWED);
    let gone = request().header("mcp-session-id", &session).header("accept", "text/event-stream");
    assert_eq!(
        status(gone.header("last-event-id", "call-99-0")).await,
        StatusCode::NO_CONTENT,
        "the session is unknown now"
    );
}

#[tokio::test]
async fn a_session_with_several_streams_gets_each_notification_once() {
    let world = World::new([Puppet::reading("one", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let (older, mut newer) = (get(&door, &session, None).await, get(&door, &session, None).await);
    world.executor.unregister("one");
    let told = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
    assert_eq!(newer.next().await, Some((String::new(), told)));
    delete(&door, &session).await;
    assert_eq!((older.rest().await, newer.rest().await), (vec![], vec![]));
}

#[tokio::test]
async fn an_invalid_initialize_starts_no_session() {
    let world = World::new([]);
    let door = Door::new(&world.executor).await;
    let client = json!({"name": "raw", "version": "1"});
    let opening = |params: Value| json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params});
    let whole = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client});
    let header = [("mcp-protocol-version", "2025-11-25")];
    for (headers, params) in [(&header[..0], json!({})), (&[], json!({"capabilities": {}})), (&header, whole.clone())] {
        let response = door.post("ada", headers, &opening(params)).await;
        assert_eq!(response.headers().get("mcp-session-id"), None);
    }
    let response = door.post("ada", &[], &opening(whole)).await;
    let id = response.headers()["mcp-session-id"].to_str().unwrap();
    assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
}

#[tokio::test]
async fn ids_are_used_once_at_a_time_and_calls_are_counted() {
    let world = World::new([Puppet::writing("wait", Act::PrintAndWait("so far"))]);
    let options = ServerOptions { requests_max: 2, ..ServerOptions::default() };
    let door = Door::with(&world.executor, options).await;
    let session = door.session("ada").await;
    let header = [("mcp-session-id", &*session)];
    let message = |id: u64| {
        let mut call = call("wait", None);
        call["id"] = json!(id);
        call
    };
    let (one, two) = (message(1), message(2));
    let others = async {
        until("both run", || world.executor.load().running == 2).await;
        let refused = |message: &str| json!({"code": -32600, "message": message});
        let again = door.post("ada", &header, &one).await.json::<Value>().await.unwrap();
        let three = door.post("ada", &header, &message(3)).await.json::<Value>().await.unwrap();
        assert_eq!(three["error"], refused("too many requests of this session are open"));
        for id in [1, 2] {
            let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}});
            door.post("ada", &header, &cancelled).await;
        }
        again
    };
    let (_, _, again) = tokio::join!(door.post("ada", &header, &one), door.post("ada", &header, &two), others);
    assert_eq!(again["error"]["code"], -32600, "{again}");
    assert_eq!(ends(&world), ["tool.call.cancelled", "tool.call.cancelled"]);
    world.check();
}

#[tokio::test]
async fn a_session_belongs_to_one_caller_and_its_scopes() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let header = [("mcp-session-id", &*session)];
    let response = door.post("lesser-ada", &header, &call("echo", None)).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND, "the same agent with other scopes");
}

#[tokio::test]
async fn malformed_calls_are_refused() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let door = Door::new(&world.executor).await;
    let session = door.session("ada").await;
    let new = call("echo", Some(meta(json!({}))));
    let old = call("echo", None);
    let headers = |change: &[(&'static str, &'static str)]| {
        let mut headers: Vec<_> =
            MODERN.iter().filter(|(name, _)| change.iter().all(|(other, _)| other != name)).copied().collect();
        headers.extend(change.iter().filter(|(_, value)| !value.is_empty()));
        headers
    };
    let mut odd = vec![
        (headers(&[("mcp-name", "other")]), &new),
        (headers(&[("mcp-name", "")]), &new),
        (headers(&[("mcp-method", "tools/list")]), &new),
        (headers(&[("mcp-protocol-version", "2025-11-25")]), &new),
        (headers(&[("mcp-protocol-version", "2030-01-01")]), &new),
        (headers(&[]), &old),
        (vec![], &old),
    ];
    let with = |version: &'static str| vec![("mcp-session-id", &*session), ("mcp-protocol-version", version)];
    odd.push((with("1999-01-01"), &old));
    for (headers, message) in odd {
        let response = door.post("ada", &headers, message).await;
        assert!(response.status().is_client_error(), "{}: {headers:?}", response.status());
    }
    assert_eq!(door.post("ada", &with("2025-06-18"), &old).await.status(), StatusCode::OK);
    assert_eq!(door.post("ada", &MODERN, &new).await.status(), StatusCode::OK);
    world.check();
}

//! Servers over HTTP made with the SDK: of every revision, with and without sessions.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorData, Implementation, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ProtocolVersion, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{RoleServer, ServerHandler};
use serde_json::{Value, json};
use wieldy_core::{Caller, Status};

use super::bad_http::{ByHand, json_answer};
use super::{Stage, call, until};
use crate::server::Wire;

type Notes = Arc<Mutex<Vec<String>>>;

/// The kind of a server of the SDK.
#[derive(Clone, Copy)]
struct Kind {
    is_new: bool,
    has_sessions: bool,
    answers_with_json: bool,
}

const NEW: Kind = Kind { is_new: true, has_sessions: false, answers_with_json: true };
const OLD: Kind = Kind { is_new: false, has_sessions: true, answers_with_json: false };
const KINDS: [Kind; 5] = [
    NEW,
    Kind { answers_with_json: false, ..NEW },
    OLD,
    Kind { has_sessions: false, ..OLD },
    Kind { has_sessions: false, answers_with_json: true, ..OLD },
];

/// A server with a runtime of its own, so that all of it can be ended at once.
struct Running {
    address: SocketAddr,
    runtime: Option<tokio::runtime::Runtime>,
    notes: Notes,
}

impl Running {
    fn new(kind: Kind) -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), kind, Notes::default())
    }

    fn at(address: SocketAddr, kind: Kind, notes: Notes) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let config = StreamableHttpServerConfig::default()
            .with_legacy_session_mode(kind.has_sessions)
            .with_json_response(kind.answers_with_json);
        let noted = Arc::clone(&notes);
        let service = StreamableHttpService::new(
            move || Ok(Server { kind, notes: Arc::clone(&noted) }),
            Arc::new(LocalSessionManager::default()),
            config,
        );
        let router = axum::Router::new().fallback_service(service);
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, router).await
        });
        Self { address, runtime: Some(runtime), notes }
    }

    /// Ends it with all its connections.
    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            let ending = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            ending.join().unwrap();
        }
    }

    /// Ends it, and starts another at the same address.
    fn restart(&mut self, kind: Kind) {
        self.end();
        *self = Self::at(self.address, kind, Arc::clone(&self.notes));
    }

    fn notes(&self) -> Vec<String> {
        self.notes.lock().unwrap().clone()
    }

    async fn stage(&self) -> Stage {
        Stage::at(format!("http://{}/mcp", self.address)).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

struct Server {
    kind: Kind,
    notes: Notes,
}

impl Server {
    fn note(&self, note: impl Into<String>) {
        self.notes.lock().unwrap().push(note.into());
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.server_info = Implementation::new("real", "1");
        info
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        match self.kind.is_new {
            true => Cow::Owned(vec![ProtocolVersion::V_2026_07_28]),
            false => Cow::Owned(vec![ProtocolVersion::V_2025_11_25, ProtocolVersion::V_2025_06_18]),
        }
    }

    async fn list_tools(
        &self,
        _page: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}});
        let schema = Arc::new(schema.as_object().unwrap().clone());
        let tool = |name: &'static str| Tool::new(name, "A tool", Arc::clone(&schema));
        Ok(ListToolsResult::with_all_items(["echo", "steps", "wait"].map(tool).to_vec()))
    }

    async fn call_tool(
        &self,
        call: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.note(format!("called {}", call.name));
        match &*call.name {
            "steps" => {
                let token = context.meta.get_progress_token().unwrap();
                for step in 1..=3 {
                    let progress = ProgressNotificationParam::new(token.clone(), f64::from(step));
                    let progress = progress.with_total(4.0).with_message(format!("step {step}"));
                    context.peer.notify_progress(progress).await.unwrap();
                }
            }
            "wait" => {
                let gone = Gone(Arc::clone(&self.notes));
                context.ct.cancelled().await;
                drop(gone);
            }
            _ => {}
        }
        let text = call.arguments.and_then(|arguments| Some(arguments.get("text")?.as_str()?.to_owned()));
        Ok(CallToolResult::success(vec![ContentBlock::text(text.unwrap_or_default())]).into())
    }
}

/// Notes that a call is over, either cancelled by message or dropped.
struct Gone(Notes);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.lock().unwrap().push("gone".to_owned());
    }
}

/// Waits until our side has noticed closed connections, as it has when a server ended some time ago.
async fn learn_of_it() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

// Shows: E7.1
#[tokio::test]
async fn servers_of_every_kind_are_listed_and_called() {
    for kind in KINDS {
        let server = Running::new(kind);
        let stage = server.stage().await;
        assert_eq!(stage.tools(), ["test__echo", "test__steps", "test__wait"], "{}", stage.state());
        let result = stage.call("echo", "hello").await;
        assert_eq!((result.status, result.text().as_str()), (Status::Success, "hello"), "{:?}", result.error);
        let revision = if kind.is_new { "2026-07-28" } else { "2025-11-25" };
        assert_eq!(stage.upstreams.status()[0].revision.as_deref(), Some(revision));
        stage.upstreams.close().await;
        stage.world.check();
    }
}

#[tokio::test]
async fn progress_comes_by_the_stream_of_the_call() {
    for kind in KINDS {
        let server = Running::new(kind);
        let stage = server.stage().await;
        assert_eq!(stage.call("steps", "done").await.text(), "done");
        let events = stage.world.events();
        let progress = events.iter().filter(|event| event.body.name() == "tool.call.progress");
        let told: Vec<_> = progress.map(|event| event.cloud_event()["data"]["message"].clone()).collect();
        assert_eq!(told, ["step 1", "step 2", "step 3"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_calls_go_at_once_and_each_gets_its_own_answer() {
    for kind in KINDS {
        let server = Running::new(kind);
        let stage = server.stage().await;
        let answers = (0..300).map(async |number: u32| stage.call("echo", &number.to_string()).await.text());
        let answers = futures_util::future::join_all(answers).await;
        assert_eq!(answers, (0..300).map(|number: u32| number.to_string()).collect::<Vec<_>>());
        stage.world.check();
    }
}

#[tokio::test]
async fn a_call_that_is_cancelled_or_dropped_is_over_at_the_server_too() {
    for kind in [NEW, Kind { answers_with_json: false, ..NEW }, OLD] {
        let server = Running::new(kind);
        let stage = server.stage().await;
        let id = stage.world.executor.spawn(call("wait", "x"));
        until(|| server.notes() == ["called wait"]).await;
        assert_eq!(stage.world.executor.cancel(id, &Caller::local()), 1);
        let result = stage.world.executor.wait(id, &Caller::local()).await.unwrap();
        assert_eq!(result.status, Status::Cancelled);
        until(|| server.notes() == ["called wait", "gone"]).await;
        tokio::select! {
            result = stage.call("wait", "x") => panic!("it waits: {result:?}"),
            () = until(|| server.notes().len() == 3) => {}
        }
        until(|| server.notes() == ["called wait", "gone", "called wait", "gone"]).await;
        assert_eq!(stage.call("echo", "still there").await.text(), "still there");
    }
}

#[tokio::test]
async fn after_a_restart_of_the_server_calls_go_on_in_a_new_session() {
    for kind in KINDS {
        let mut server = Running::new(kind);
        let stage = server.stage().await;
        assert_eq!(stage.call("echo", "one").await.text(), "one");
        server.restart(kind);
        learn_of_it().await;
        let result = stage.call("echo", "two").await;
        assert_eq!((result.status, result.text().as_str()), (Status::Success, "two"), "{:?}", result.error);
        assert_eq!(server.notes(), ["called echo", "called echo"]);
    }
}

#[tokio::test]
async fn a_call_that_ran_when_the_server_ended_is_not_made_again() {
    for kind in KINDS {
        let mut server = Running::new(kind);
        let stage = server.stage().await;
        let id = stage.world.executor.spawn(call("wait", "x"));
        until(|| server.notes() == ["called wait"]).await;
        server.restart(kind);
        let result = stage.world.executor.wait(id, &Caller::local()).await.unwrap();
        let error = result.error.clone().unwrap();
        assert_eq!((error.code.as_str(), error.retryable), ("E3201", false), "{error:?}");
        let calls = server.notes().into_iter().filter(|note| note == "called wait").count();
        assert_eq!(calls, 1);
        assert_eq!(stage.call("echo", "on").await.text(), "on");
    }
}

#[tokio::test]
async fn an_unreachable_server_is_reported_and_the_call_is_retryable() {
    for kind in KINDS {
        let mut server = Running::new(kind);
        let stage = server.stage().await;
        server.end();
        learn_of_it().await;
        let error = stage.error("echo").await;
        assert_eq!((error.code.as_str(), error.retryable), ("E3201", true));
        assert_eq!(
            error.message,
            "the MCP server `test` cannot be reached: no connection could be made: Connection refused (os error 111)"
        );
        assert_eq!((&stage.state()["is"], &stage.state()["failures"]), (&json!("degraded"), &json!(1)));
        assert_eq!(stage.state()["error"]["message"], error.message);
        server.restart(kind);
        assert_eq!(stage.call("echo", "again").await.text(), "again");
        assert_eq!(stage.state(), json!({"is": "ready"}));
    }
}

#[tokio::test]
async fn notes_that_a_server_sends_with_its_answer_are_passed_on() {
    for is_error in [false, true] {
        let notes =
            json!({"annotations": {"audience": ["user"], "priority": 0.9}, "_meta": {"a.test/of": "the block"}});
        let with_notes = |mut block: Value| {
            block.as_object_mut().unwrap().extend(notes.as_object().unwrap().clone());
            block
        };
        let content = json!([
            {"type": "text", "text": "plain"},
            with_notes(json!({"type": "text", "text": "noted"})),
            with_notes(json!({"type": "image", "data": "aGk=", "mimeType": "image/png"})),
            with_notes(json!({"type": "audio", "data": "aGk=", "mimeType": "audio/wav"})),
            with_notes(json!({"type": "resource", "resource": {"uri": "test://a", "text": "there"}})),
            with_notes(json!({"type": "resource_link", "uri": "file:///a", "name": "a"})),
        ]);
        let meta = json!({"a.test/of": "the answer", "wieldy/execution": "forged", "wieldy/error": "forged"});
        let result = json!({"content": content, "isError": is_error, "_meta": meta});
        let server = ByHand::that(move |message| {
            json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))
        })
        .await;
        let stage = Stage::at(server.url()).await;
        let mut wire = Wire::new(&stage.world.executor).initialized("2025-11-25", json!({})).await;
        let mut told = wire.call(1, "test__echo", json!({"text": "hi"})).await["result"].take();
        wire.close().await;
        if is_error {
            assert_eq!(told["_meta"].as_object_mut().unwrap().remove("wieldy/error").unwrap()["code"], "E3203");
        }
        let meta = json!({"a.test/of": "the answer", "wieldy/execution": "[id]", "wieldy/untrusted": "mcp:test"});
        assert_eq!(told, json!({"content": content, "isError": is_error, "_meta": meta}));
    }
}

#[tokio::test]
async fn notes_that_are_larger_than_a_result_are_left_out() {
    let server = ByHand::that(|message| {
        let result = json!({"content": [{"type": "text", "text": "hi"}], "_meta": {"a.test/of": "x".repeat(100_000)}});
        json_answer(200, &json!({"jsonrpc": "2.0", "id": message["id"], "result": result}))
    })
    .await;
    let stage = Stage::at(server.url()).await;
    let result = stage.call("test__echo", "hi").await;
    assert_eq!((result.text().as_str(), result.passed_on), ("hi", None));
}

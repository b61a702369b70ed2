//! Routes a server's messages before the SDK sees them. Delivers progress to its run, so that no response overtakes it.
//! Delivers responses to calls that bypassed the SDK. Also makes a late response to `server/discover` count.
//!
//! The SDK asks a server for its revisions (`server/discover`), and after ten seconds without a response goes on with
//! `initialize` on the same connection. A server that takes longer to start reads both. If it answers that it speaks
//! the newest revision, that response is handed to the SDK in place of the one to `initialize`, which such a server
//! refuses.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rmcp::model::{
    ClientNotification, ClientRequest, GetMeta, Implementation, InitializeResult, JsonRpcMessage, JsonRpcNotification,
    JsonRpcRequest, JsonRpcResponse, NumberOrString, ProgressNotification, ProgressToken, RequestId,
    ServerNotification, ServerResult,
};
use rmcp::service::{RoleClient, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use tokio::sync::{mpsc, oneshot};
use wieldy_core::Run;

use super::answer::CallAnswer;
use super::failure::{Failure, first_of};
use super::upstream_session::STATELESS;

/// Maximum number of messages from calls' streams that wait for the SDK.
const FORWARDED_MAX: usize = 16;

type Received = RxJsonRpcMessage<RoleClient>;

/// The calls that wait for a response.
#[derive(Clone)]
pub(super) struct Router {
    /// Calls by progress token.
    calls: Arc<Mutex<HashMap<i64, RoutedCall>>>,
    forwarded: mpsc::Sender<Received>,
}

struct RoutedCall {
    run: Run,
    /// The waiting caller, if the call bypassed the SDK. Its token is also its request id. Gets a response that does
    /// not come on the call's own stream.
    answer: Option<oneshot::Sender<Result<CallAnswer, Failure>>>,
}

impl Router {
    /// Registers a call that bypasses the SDK. The returned receiver gets its response if that comes outside the call's
    /// own HTTP response.
    pub(super) fn register(&self, number: i64, run: &Run) -> oneshot::Receiver<Result<CallAnswer, Failure>> {
        let (answer, response) = oneshot::channel();
        self.calls().insert(number, RoutedCall { run: run.clone(), answer: Some(answer) });
        response
    }

    pub(super) fn forget(&self, token: &ProgressToken) {
        if let Some(token) = id_number(&token.0) {
            self.calls().remove(&token);
        }
    }

    /// Routes a message that came on a call's stream like every other message.
    pub(super) async fn route(&self, message: Received) {
        if let Some(message) = self.deliver(message) {
            // If the SDK is gone, so is the connection.
            let _ = self.forwarded.send(message).await;
        }
    }

    /// Registers the run of a call that the SDK sends. The request carries the run as an extension, which is not
    /// serialized.
    fn register_sent(&self, message: &TxJsonRpcMessage<RoleClient>) {
        if let JsonRpcMessage::Request(JsonRpcRequest {
            request: request @ ClientRequest::CallToolRequest(call), ..
        }) = message
            && let Some(run) = call.extensions.get::<Run>()
            && let Some(token) = request.get_meta().get_progress_token().and_then(|token| id_number(&token.0))
        {
            self.calls().insert(token, RoutedCall { run: run.clone(), answer: None });
        }
    }

    /// Delivers progress and responses of registered calls. Returns every other message.
    fn deliver(&self, message: Received) -> Option<Received> {
        match message {
            JsonRpcMessage::Notification(JsonRpcNotification {
                notification: ServerNotification::ProgressNotification(ProgressNotification { params: told, .. }),
                ..
            }) => {
                let run =
                    id_number(&told.progress_token.0).and_then(|token| Some(self.calls().get(&token)?.run.clone()));
                if let Some(run) = run {
                    let percent = told.total.filter(|total| *total > 0.0).map(|total| told.progress / total * 100.0);
                    run.progress(percent, first_of(told.message.as_deref().unwrap_or_default()));
                }
                None
            }
            JsonRpcMessage::Response(response) => match self.take_caller(&response.id) {
                Some(call) => {
                    let _ = call.send(Ok(response.result.into()));
                    None
                }
                None => Some(JsonRpcMessage::Response(response)),
            },
            JsonRpcMessage::Error(error) => match error.id.as_ref().and_then(|id| self.take_caller(id)) {
                Some(call) => {
                    let _ = call.send(Err(error.error.into()));
                    None
                }
                None => Some(JsonRpcMessage::Error(error)),
            },
            message => Some(message),
        }
    }

    /// Takes the waiting caller of the response with this id.
    fn take_caller(&self, id: &RequestId) -> Option<oneshot::Sender<Result<CallAnswer, Failure>>> {
        self.calls().get_mut(&id_number(id)?)?.answer.take()
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<i64, RoutedCall>> {
        self.calls.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Returns the id as a number. Some servers turn a number into a string.
fn id_number(id: &NumberOrString) -> Option<i64> {
    match id {
        NumberOrString::Number(number) => Some(*number),
        NumberOrString::String(text) => text.parse().ok(),
    }
}

/// An SDK transport whose messages are routed first.
pub(super) struct RoutedTransport<T> {
    inner: T,
    router: Router,
    forwarded: mpsc::Receiver<Received>,
    probe: DiscoverProbe,
    /// The id of a response to drop, because another response has replaced it.
    dropped: Option<RequestId>,
}

/// The state of the `server/discover` request.
enum DiscoverProbe {
    /// It was not sent, or is settled.
    Settled,
    /// It was sent with this id.
    Asked(RequestId),
    /// The SDK went on with `initialize` before the response came.
    GivenUp { discover: RequestId, initialize: RequestId },
    /// The late response has replaced the one to `initialize`. The `initialized` notification that follows is not sent.
    Late,
}

impl<T> RoutedTransport<T> {
    pub(super) fn new(inner: T) -> (Self, Router) {
        let (sender, forwarded) = mpsc::channel(FORWARDED_MAX);
        let router = Router { calls: Arc::default(), forwarded: sender };
        (Self { inner, router: router.clone(), forwarded, probe: DiscoverProbe::Settled, dropped: None }, router)
    }

    /// Tracks `server/discover` in sent messages. Returns false if this message must not be sent.
    fn track_sent(&mut self, message: &TxJsonRpcMessage<RoleClient>) -> bool {
        self.probe = match (std::mem::replace(&mut self.probe, DiscoverProbe::Settled), message) {
            (_, JsonRpcMessage::Request(JsonRpcRequest { request: ClientRequest::DiscoverRequest(_), id, .. })) => {
                DiscoverProbe::Asked(id.clone())
            }
            (
                DiscoverProbe::Asked(discover),
                JsonRpcMessage::Request(JsonRpcRequest { request: ClientRequest::InitializeRequest(_), id, .. }),
            ) => DiscoverProbe::GivenUp { discover, initialize: id.clone() },
            (
                DiscoverProbe::Late,
                JsonRpcMessage::Notification(JsonRpcNotification {
                    notification: ClientNotification::InitializedNotification(_),
                    ..
                }),
            ) => return false,
            (probe, _) => probe,
        };
        true
    }

    /// Tracks `server/discover` in received messages. Returns the message that the SDK gets, if any.
    fn track_received(&mut self, message: Received) -> Option<Received> {
        let answered = match &message {
            JsonRpcMessage::Response(response) => Some(&response.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        let Some(answered) = answered else { return Some(message) };
        if self.dropped.as_ref() == Some(answered) {
            return None;
        }
        let DiscoverProbe::GivenUp { discover, initialize } = &self.probe else { return Some(message) };
        if answered == initialize {
            self.dropped = Some(discover.clone());
            self.probe = DiscoverProbe::Settled;
            return Some(message);
        }
        if answered != discover {
            return Some(message);
        }
        // An old server refuses it, and answers `initialize` next.
        let found = match message {
            JsonRpcMessage::Response(JsonRpcResponse { result: ServerResult::DiscoverResult(found), .. }) => found,
            _ => return None,
        };
        let revision = STATELESS.iter().find(|revision| found.supported_versions.contains(revision))?;
        let named = found.server_info().unwrap_or_else(|| Implementation::new("", ""));
        let mut info =
            InitializeResult::new(found.capabilities).with_protocol_version(revision.clone()).with_server_info(named);
        (info.instructions, info.meta) = (found.instructions, found.meta);
        let answer = JsonRpcMessage::response(ServerResult::InitializeResult(info), initialize.clone());
        self.dropped = Some(initialize.clone());
        self.probe = DiscoverProbe::Late;
        Some(answer)
    }
}

impl<T: Transport<RoleClient>> Transport<RoleClient> for RoutedTransport<T> {
    type Error = T::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), T::Error>> + Send + 'static {
        let sent = self.track_sent(&message).then(|| {
            self.router.register_sent(&message);
            self.inner.send(message)
        });
        async move {
            match sent {
                Some(sent) => sent.await,
                None => Ok(()),
            }
        }
    }

    async fn receive(&mut self) -> Option<Received> {
        loop {
            let message = tokio::select! {
                message = self.inner.receive() => message?,
                Some(message) = self.forwarded.recv() => message,
            };
            if let Some(message) = self.router.deliver(message).and_then(|message| self.track_received(message)) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), T::Error> {
        self.inner.close().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rmcp::model::{ClientConfig, ProtocolVersion};
    use rmcp::service::{ClientLifecycleMode, ClientServiceExt};
    use serde_json::{Value, json};

    use super::*;

    /// A server that sleeps, and then answers everything in order. It records the requested methods.
    struct SlowServer {
        sent: mpsc::UnboundedSender<Value>,
        answers: mpsc::UnboundedReceiver<Value>,
    }

    impl SlowServer {
        fn new(asleep: Duration, answer: fn(&str) -> Option<Value>) -> (Self, Arc<Mutex<Vec<String>>>) {
            let ((sent, mut messages), (tell, answers)) =
                (mpsc::unbounded_channel::<Value>(), mpsc::unbounded_channel());
            let asked = Arc::<Mutex<Vec<String>>>::default();
            let noted = Arc::clone(&asked);
            tokio::spawn(async move {
                tokio::time::sleep(asleep).await;
                while let Some(message) = messages.recv().await {
                    let method = message["method"].as_str().unwrap();
                    noted.lock().unwrap().push(method.to_owned());
                    if let (Some(mut answer), false) = (answer(method), message["id"].is_null()) {
                        answer["jsonrpc"] = json!("2.0");
                        answer["id"] = message["id"].clone();
                        let _ = tell.send(answer);
                    }
                }
            });
            (Self { sent, answers }, asked)
        }
    }

    impl Transport<RoleClient> for SlowServer {
        type Error = std::io::Error;

        fn send(
            &mut self,
            message: TxJsonRpcMessage<RoleClient>,
        ) -> impl Future<Output = std::io::Result<()>> + Send + 'static {
            let _ = self.sent.send(serde_json::to_value(&message).unwrap());
            std::future::ready(Ok(()))
        }

        async fn receive(&mut self) -> Option<Received> {
            self.answers.recv().await.map(|answer| serde_json::from_value(answer).unwrap())
        }

        async fn close(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn refused(code: i32) -> Option<Value> {
        Some(json!({"error": {"code": code, "message": "refused"}}))
    }

    fn tools() -> Option<Value> {
        Some(json!({"result": {"resultType": "complete", "tools": [{"name": "now", "inputSchema": {"type": "object"}}],
            "ttlMs": 0, "cacheScope": "private"}}))
    }

    fn discovered() -> Option<Value> {
        Some(json!({"result": {"resultType": "complete", "supportedVersions": ["2026-07-28"], "ttlMs": 0,
            "capabilities": {"tools": {"listChanged": true}}, "cacheScope": "private", "instructions": "Ask me.",
            "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "clock", "version": "7"}}}}))
    }

    fn initialized() -> Option<Value> {
        Some(json!({"result": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
            "serverInfo": {"name": "clock", "version": "6"}}}))
    }

    /// Returns the negotiated revision, the server's name, its tools, and the requested methods.
    async fn reached(asleep: u64, answer: fn(&str) -> Option<Value>) -> (String, String, Vec<String>, Vec<String>) {
        let (slow, asked) = SlowServer::new(Duration::from_secs(asleep), answer);
        let (transport, _router) = RoutedTransport::new(slow);
        let lifecycle = ClientLifecycleMode::Auto {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
            legacy_version: Some(ProtocolVersion::V_2025_11_25),
        };
        let service = ClientConfig::default().serve_with_lifecycle(transport, lifecycle).await.unwrap();
        let tools = service.list_all_tools().await.unwrap();
        let info = service.peer_info().unwrap();
        let server = info.server_info.as_ref().unwrap();
        let asked = asked.lock().unwrap().clone();
        (
            info.protocol_version.to_string(),
            format!("{} {}", server.name, server.version),
            tools.iter().map(|tool| tool.name.to_string()).collect(),
            asked,
        )
    }

    fn expected(revision: &str, server: &str, asked: &[&str]) -> (String, String, Vec<String>, Vec<String>) {
        let asked = asked.iter().map(|method| (*method).to_owned()).collect();
        (revision.into(), server.into(), vec!["now".into()], asked)
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_of_the_newest_revision_may_start_slowly() {
        let answer = |method: &str| match method {
            "server/discover" => discovered(),
            "tools/list" => tools(),
            // The Python SDK does so after `server/discover`.
            _ => refused(-32022),
        };
        for asleep in [0, 12, 50] {
            let asked: &[&str] = match asleep {
                0 => &["server/discover", "tools/list"],
                _ => &["server/discover", "initialize", "tools/list"],
            };
            assert_eq!(reached(asleep, answer).await, expected("2026-07-28", "clock 7", asked), "{asleep} s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_of_both_eras_that_starts_slowly_is_spoken_to_in_the_newest_revision() {
        let answer = |method: &str| match method {
            "server/discover" => discovered(),
            "initialize" => initialized(),
            "tools/list" => tools(),
            _ => None,
        };
        let asked = ["server/discover", "initialize", "tools/list"];
        assert_eq!(reached(12, answer).await, expected("2026-07-28", "clock 7", &asked));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_of_an_old_revision_may_start_slowly_or_pass_over_unknown_requests() {
        let refuses = |method: &str| match method {
            "initialize" => initialized(),
            "tools/list" => tools(),
            _ => refused(-32601),
        };
        let passes_over = |method: &str| match method {
            "initialize" => initialized(),
            "tools/list" => tools(),
            _ => None,
        };
        let asked = ["server/discover", "initialize", "notifications/initialized", "tools/list"];
        for asleep in [0, 12, 50] {
            assert_eq!(reached(asleep, refuses).await, expected("2025-11-25", "clock 6", &asked), "{asleep} s");
            assert_eq!(reached(asleep, passes_over).await, expected("2025-11-25", "clock 6", &asked), "{asleep} s");
        }
    }
}

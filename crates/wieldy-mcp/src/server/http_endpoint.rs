//! The server side of MCP's streamable HTTP. Clients of revision 2026-07-28 send single requests. Older clients have
//! sessions. The HTTP door authenticates callers: each request has an `Arc<Caller>` in its extensions.
//!
//! Sessions are ours, not the SDK's. `tools/call` is answered by `http_tools_call`: with JSON by the task that reads
//! the request, or with a stream if there is something to send before the response. All other messages, and unusual
//! calls, go to rmcp, one request at a time.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::future::BoxFuture;
use http::header::ACCEPT;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use rmcp::model::{ClientCapabilities, ClientJsonRpcMessage};
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use wieldy_core::Caller;

use super::handler::{CallerSource, ConnectionHandler};
use super::http_tools_call::{self, ClientMessage};
use super::pending::Refused;
use super::scan::Scan;
use super::session::Session;
use super::stream::{EventId, StreamReader, ToolChanges};
use super::{Server, Shared, batch, call, stdio};

/// The header of the session id.
pub(crate) const SESSION: &str = "mcp-session-id";
/// The header of the last event id that a client has seen.
const LAST_EVENT: &str = "last-event-id";
/// The longest time to finish open responses when the server stops.
const ANSWERING_PATIENCE: Duration = Duration::from_secs(5);
/// The number of times that a body is longer than a message can be before it is no longer scanned for its id and tool.
const SCANNED_TIMES: usize = 16;
/// Maximum number of sessions.
const SESSIONS_MAX: usize = 1000;

/// An HTTP endpoint for an executor's tools. Cheap to clone.
#[derive(Clone)]
pub struct HttpEndpoint {
    inner: Arc<Endpoint>,
}

/// The state that all clones share.
pub(crate) struct Endpoint {
    pub(super) shared: Arc<Shared>,
    service: StreamableHttpService<ConnectionHandler, NeverSessionManager>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// Tracks the requests whose responses are not finished.
    pub(super) open_requests: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// The response type.
pub type HttpResponse = Response<BoxBody<Bytes, Infallible>>;

impl Server {
    /// Returns an HTTP endpoint of this server.
    pub fn http(&self) -> HttpEndpoint {
        let stop = CancellationToken::new();
        let config = StreamableHttpServerConfig::default()
            // The door has checked `Host` and `Origin`.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_legacy_session_mode(false)
            .with_json_response(true)
            .with_sse_retry(None)
            .with_max_request_body_bytes(self.shared.options.message_bytes_max)
            .with_cancellation_token(stop.clone());
        let shared = Arc::clone(&self.shared);
        let connect =
            move || Ok(ConnectionHandler::new(Arc::clone(&shared), CallerSource::OfRequest, CancellationToken::new()));
        let service = StreamableHttpService::new(connect, Arc::default(), config);
        let shared = Arc::clone(&self.shared);
        let inner = Endpoint { shared, service, sessions: Mutex::default(), open_requests: TaskTracker::new(), stop };
        HttpEndpoint { inner: Arc::new(inner) }
    }
}

impl HttpEndpoint {
    /// Answers one request.
    pub async fn handle<B>(&self, request: Request<B>) -> HttpResponse
    where
        B: http_body::Body + Send + 'static,
        B::Error: std::fmt::Display,
    {
        self.inner.handle(request).await
    }

    /// Waits a bounded time for open responses, then ends all sessions and streams.
    pub async fn stop(&self) {
        self.inner.stop().await;
    }
}

impl Endpoint {
    async fn handle<B>(&self, request: Request<B>) -> HttpResponse
    where
        B: http_body::Body + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let Some(caller) = request.extensions().get::<Arc<Caller>>().cloned() else {
            return plain_text(StatusCode::INTERNAL_SERVER_ERROR, "the caller of the request is unknown");
        };
        let session = match request.headers().get(SESSION) {
            None => None,
            Some(id) => match id.to_str().ok().and_then(|id| self.session(id, &caller)) {
                Some(session) => {
                    session.touch();
                    Some(session)
                }
                // A session of another caller must look unknown.
                None => return plain_text(StatusCode::NOT_FOUND, "Not Found: Session not found"),
            },
        };
        match *request.method() {
            Method::POST => {
                let token = self.open_requests.token();
                let (parts, body) = request.into_parts();
                let body = match read(body, self.shared.options.message_bytes_max).await {
                    Ok(body) => body,
                    Err(unread) => return Box::pin(self.refuse_unread(&parts, caller, session, unread)).await,
                };
                let answer = match session {
                    Some(session) if session.allows_batches && body.trim_ascii_start().starts_with(b"[") => {
                        Box::pin(batch::answer(self, parts, &body, &caller, &session)).await
                    }
                    session => self.post(parts, body, caller, session).await,
                };
                answer.map(|body| TrackedBody { body, _open_request: token }.boxed())
            }
            Method::GET => match session {
                Some(session) => self.listen(request.headers(), &session),
                None => plain_text(StatusCode::METHOD_NOT_ALLOWED, "there is nothing to listen to without a session"),
            },
            Method::DELETE => match session {
                Some(session) => {
                    self.end_session(&session);
                    plain_text(StatusCode::NO_CONTENT, "")
                }
                None => plain_text(StatusCode::METHOD_NOT_ALLOWED, "there is nothing to end without a session"),
            },
            _ => self.by_rmcp(request).await,
        }
    }

    async fn stop(&self) {
        self.open_requests.close();
        let _ = tokio::time::timeout(ANSWERING_PATIENCE, self.open_requests.wait()).await;
        self.stop.cancel();
        for (_, session) in self.sessions().drain() {
            session.close();
        }
    }

    /// Answers one message.
    pub(super) async fn post(
        &self,
        parts: Parts,
        body: Bytes,
        caller: Arc<Caller>,
        session: Option<Arc<Session>>,
    ) -> HttpResponse {
        match (ClientMessage::read(&body), session) {
            (message, None) if message.is_of_session() && http_tools_call::has_session_revision(&parts.headers) => {
                return plain_text(StatusCode::BAD_REQUEST, "Bad Request: Session ID is required");
            }
            (ClientMessage::Call { id, params }, session) => {
                if let Some(plain) = http_tools_call::DirectCall::of(self, &parts.headers, id, params, caller, session)
                {
                    return plain.answer(self).await;
                }
            }
            (ClientMessage::Cancelled(id), Some(session)) => {
                session.cancel(&id);
                return http_tools_call::accepted();
            }
            (ClientMessage::Answer { id, value }, Some(session)) => {
                session.answer(&id, value);
                return http_tools_call::accepted();
            }
            (ClientMessage::Opening(capabilities), None) => {
                return Box::pin(self.begin_session(parts, body, caller, &capabilities)).await;
            }
            (ClientMessage::Other { .. }, _) => {
                if let Some(refused) = refusal(&body) {
                    return http_tools_call::refusal_response(refused);
                }
            }
            _ => {}
        }
        self.by_rmcp(Request::from_parts(parts, Full::new(body))).await
    }

    /// Answers a request whose body is not parsed. A call that is too large is recorded and gets a result, as over
    /// stdio.
    async fn refuse_unread(
        &self,
        parts: &Parts,
        caller: Arc<Caller>,
        session: Option<Arc<Session>>,
        body: UnreadBody,
    ) -> HttpResponse {
        let scan = match body {
            UnreadBody::TooLarge(scan) => scan,
            UnreadBody::Broken(error) => return plain_text(StatusCode::REQUEST_TIMEOUT, error),
        };
        let needs_session = http_tools_call::has_session_revision(&parts.headers);
        let (Some(tool), true) = (scan.tool(), session.is_some() || !needs_session) else {
            return plain_text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large");
        };
        let caller = session.as_ref().map_or(caller, |session| Arc::clone(&session.caller));
        let told = Scan::complaint(self.shared.options.message_bytes_max);
        let answer = call::refuse_oversized(&self.shared, &caller, tool, &told, session.is_none()).await;
        match scan.id() {
            Some(id) => http_tools_call::call_response(&id, answer, session.is_none()),
            None => plain_text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large"),
        }
    }

    /// Passes a request to rmcp. Boxed to keep the future of calls small.
    fn by_rmcp<B>(&self, request: Request<B>) -> BoxFuture<'_, HttpResponse>
    where
        B: http_body::Body + Send + 'static,
        B::Error: std::fmt::Display,
    {
        Box::pin(self.service.handle(request))
    }

    /// Begins a session.
    async fn begin_session(
        &self,
        parts: Parts,
        body: Bytes,
        caller: Arc<Caller>,
        capabilities: &ClientCapabilities,
    ) -> HttpResponse {
        if !self.make_room() {
            return plain_text(StatusCode::SERVICE_UNAVAILABLE, "too many sessions are open");
        }
        let response = self.by_rmcp(Request::from_parts(parts, Full::new(body))).await;
        let (mut head, body) = response.into_parts();
        let body = body.collect().await.unwrap_or_else(|never| match never {}).to_bytes();
        // A failed handshake begins no session.
        if head.status.is_success()
            && let ClientMessage::Answer { value: Some(told), .. } = ClientMessage::read(&body)
        {
            let session = Session::new(caller, capabilities, told["protocolVersion"].as_str().unwrap_or_default());
            let id = session.id().to_owned();
            if let Ok(id) = HeaderValue::try_from(&id) {
                head.headers.insert(SESSION, id);
            }
            self.sessions().insert(id, Arc::new(session));
        }
        Response::from_parts(head, Full::new(body).boxed())
    }

    /// Answers GET: resumes a stream after an event, or opens the stream of server notifications.
    fn listen(&self, headers: &HeaderMap, session: &Arc<Session>) -> HttpResponse {
        if !headers
            .get(ACCEPT)
            .is_some_and(|taken| taken.to_str().is_ok_and(|taken| taken.contains(http_tools_call::EVENTS)))
        {
            return plain_text(StatusCode::NOT_ACCEPTABLE, "Not Acceptable: Client must accept text/event-stream");
        }
        if let Some(last) = headers.get(LAST_EVENT).and_then(|last| EventId::of(last.to_str().ok()?)) {
            return match session.stream(last) {
                Some(stream) => {
                    http_tools_call::sse_response(StreamReader::new(stream, self.stop.clone(), None).after(last.at))
                }
                // The stream is no longer stored. 204 tells the client not to come back.
                None => plain_text(StatusCode::NO_CONTENT, ""),
            };
        }
        http_tools_call::sse_response(ToolChanges::new(&self.shared, session, self.stop.clone()))
    }

    fn session(&self, id: &str, caller: &Arc<Caller>) -> Option<Arc<Session>> {
        let session = self.sessions().get(id).cloned();
        session.filter(|session| session.is_of(caller))
    }

    /// Ends a session and removes the sandbox of its calls.
    fn end_session(&self, session: &Session) {
        self.sessions().remove(session.id());
        session.close();
        if let Some(key) = session.caller.session_key() {
            let executor = self.shared.executor.clone();
            tokio::spawn(async move { executor.end_session(&key).await });
        }
    }

    /// Ends idle sessions. If there are still too many, ends the longest quiet session of the caller with the most
    /// sessions. Returns true if there is room for a new session.
    fn make_room(&self) -> bool {
        let all: Vec<Arc<Session>> = self.sessions().values().cloned().collect();
        let (idle, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|session| session.is_idle());
        idle.iter().for_each(|session| self.end_session(session));
        if rest.len() < SESSIONS_MAX {
            return true;
        }
        let owner = |session: &Arc<Session>| (session.owner.agent.clone(), session.owner.tenant.clone());
        let mut counts: HashMap<_, usize> = HashMap::new();
        rest.iter().for_each(|session| *counts.entry(owner(session)).or_default() += 1);
        let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(owner, _)| owner);
        let theirs = rest.iter().filter(|session| Some(owner(session)) == most);
        let oldest =
            theirs.filter_map(|session| Some((session.quiet_since()?, session))).min_by_key(|(since, _)| *since);
        oldest.inspect(|(_, session)| self.end_session(session)).is_some()
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.sessions.lock().expect("no code panics while it holds the sessions")
    }
}

/// A request body that is not parsed.
enum UnreadBody {
    /// It is longer than a message can be. The scan may have found the id and the tool of a call.
    TooLarge(Box<Scan>),
    /// It breaks off, or does not arrive in time. Contains the error.
    Broken(String),
}

/// Reads a request's body. A body that is too large is scanned further, up to a bound of its own. The result depends on
/// the bytes and not on how the network cut them.
async fn read<B>(body: B, bytes_max: usize) -> Result<Bytes, UnreadBody>
where
    B: http_body::Body<Error: std::fmt::Display>,
{
    let scanned_max = bytes_max.saturating_mul(SCANNED_TIMES);
    let mut body = std::pin::pin!(body);
    let (mut whole, mut scan, mut scannable) = (BytesMut::new(), None::<Box<Scan>>, scanned_max);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| UnreadBody::Broken(error.to_string()))?;
        let Ok(mut more) = frame.into_data() else { continue };
        let is_too_much = more.remaining() > scannable;
        let more = more.copy_to_bytes(more.remaining().min(scannable));
        scannable -= more.len();
        match &mut scan {
            Some(scan) => scan.push(&more),
            None => whole.extend_from_slice(&more),
        }
        if whole.len() > bytes_max || is_too_much {
            scan.get_or_insert_default().push(&std::mem::take(&mut whole));
        }
        if is_too_much {
            break;
        }
    }
    match scan {
        Some(scan) => Err(UnreadBody::TooLarge(scan)),
        None => Ok(whole.freeze()),
    }
}

/// Returns the refusal of an invalid message. rmcp would mistake an unparsable message for one of another kind.
fn refusal(body: &[u8]) -> Option<Refused> {
    if serde_json::from_slice::<ClientJsonRpcMessage>(body).is_ok() {
        return None;
    }
    match serde_json::from_slice(body) {
        Ok(Value::Array(_)) => {
            let one = "a request must be one message; only revision 2025-03-26 allows batches";
            Some(Refused::invalid(None, one))
        }
        Ok(value) => stdio::parse(value).err(),
        Err(error) => Some(Refused::not_json(&error)),
    }
}

/// A response body that counts as an open request until it is dropped.
struct TrackedBody {
    body: BoxBody<Bytes, Infallible>,
    _open_request: TaskTrackerToken,
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

pub(super) fn plain_text(code: StatusCode, message: impl Into<Bytes>) -> HttpResponse {
    let mut response = Response::new(Full::new(message.into()).boxed());
    *response.status_mut() = code;
    response
}

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;
    use wieldy_core::{
        Command, Confinement, Exit, Level, OutputSink, ResourceLimits, Sandbox, SandboxError, SandboxId, SandboxRef,
        SandboxStatus,
    };

    use super::*;

    async fn opened(endpoint: &HttpEndpoint, caller: &Arc<Caller>) -> (StatusCode, Option<String>) {
        let body = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-06-18",
            "capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;
        let request = Request::post("/mcp").extension(Arc::clone(caller)).header("content-type", "application/json");
        let request = request.header("accept", "application/json, text/event-stream").header("host", "localhost");
        let response = endpoint.handle(request.body(Full::new(Bytes::from(body))).unwrap()).await;
        let id = response.headers().get(SESSION).map(|id| id.to_str().unwrap().to_owned());
        (response.status(), id)
    }

    #[tokio::test(start_paused = true)]
    async fn the_caller_with_the_most_sessions_loses_its_longest_idle_one() {
        let executor = wieldy_core::Executor::builder().build().unwrap();
        let endpoint = Server::new(executor, crate::server::ServerOptions::default()).http();
        let (ada, bob) = (Arc::new(Caller::agent("ada")), Arc::new(Caller::agent("bob")));
        let (_, first) = opened(&endpoint, &bob).await;
        let mut theirs = Vec::new();
        while endpoint.inner.sessions().len() < SESSIONS_MAX {
            tokio::time::advance(Duration::from_millis(1)).await;
            let (status, id) = opened(&endpoint, &ada).await;
            theirs.push(id.unwrap_or_else(|| panic!("{status}")));
        }
        let (status, second) = opened(&endpoint, &bob).await;
        assert_eq!((status, endpoint.inner.sessions().len()), (StatusCode::OK, SESSIONS_MAX));
        let is_there = |id: &str| endpoint.inner.sessions().contains_key(id);
        assert!(is_there(&first.unwrap()) && is_there(&second.unwrap()) && is_there(&theirs[1]));
        assert!(!is_there(&theirs[0]), "her longest idle session is gone");

        tokio::time::advance(Duration::from_secs(2 * 60 * 60)).await;
        opened(&endpoint, &bob).await;
        assert_eq!(endpoint.inner.sessions().len(), 1, "the others were idle for long");
    }

    /// A sandbox that lists its entries and runs nothing.
    #[derive(Clone, Default)]
    struct ListedSandboxes(Arc<Mutex<Vec<SandboxStatus>>>);

    impl Sandbox for ListedSandboxes {
        fn level(&self) -> Level {
            Level::Native
        }

        fn execute<'a>(
            &'a self,
            _: &'a Command,
            _: &'a Confinement,
            _: Arc<dyn OutputSink>,
            _: CancellationToken,
        ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
            Box::pin(async { Err(SandboxError::creation_because("there are no processes here")) })
        }

        fn list(&self) -> Vec<SandboxStatus> {
            self.0.lock().unwrap().clone()
        }

        fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
            Box::pin(async { self.0.lock().unwrap().extract_if(.., |one| one.sandbox.id == *id).next().is_some() })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_its_client_ends_leaves_no_sandbox() {
        let books = ListedSandboxes::default();
        let executor = wieldy_core::Executor::builder().sandbox(books.clone()).build().unwrap();
        let endpoint = Server::new(executor, crate::server::ServerOptions::default()).http();
        let ada = Arc::new(Caller::agent("ada"));
        let mut ids = Vec::new();
        for number in 0..2 {
            let id = opened(&endpoint, &ada).await.1.unwrap();
            let caller = Caller { session: Some(id.clone()), ..Caller::clone(&ada) };
            books.0.lock().unwrap().push(SandboxStatus {
                sandbox: SandboxRef { id: SandboxId(format!("of {number}")), level: Level::Native },
                session: caller.session_key(),
                created_at: jiff::Timestamp::UNIX_EPOCH,
                running: 0,
                executed: 1,
                limits: ResourceLimits::default(),
                enforcement: Vec::new(),
            });
            ids.push(id);
        }
        let request = Request::delete("/mcp").extension(Arc::clone(&ada)).header(SESSION, &ids[0]);
        let response =
            endpoint.handle(request.header("host", "localhost").body(Full::new(Bytes::new())).unwrap()).await;
        assert_eq!(response.status(), StatusCode::NO_CONTENT);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let left: Vec<String> = books.list().into_iter().map(|one| one.sandbox.id.0).collect();
        assert_eq!(left, ["of 1"]);
    }
}

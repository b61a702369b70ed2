//! MCP over streamable HTTP. Clients of revision 2026-07-28 ask one request at a time; older ones have sessions. Who calls is
//! established by the door in front of this: each request brings an `Arc<Caller>` among its extensions.
//!
//! `tools/call` goes the straight way, `direct`: it is answered with JSON by whoever reads the request, or with a stream where
//! there is something to tell before the answer. Everything else, and whatever is odd about a call, goes to rmcp, which knows
//! what to say to it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, Limited};
use rmcp::model::ClientCapabilities;
use rmcp::transport::streamable_http_server::session::SessionManager;
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use wieldy_core::Caller;

use super::connection::{Connection, Who};
use super::direct::{self, Message};
use super::session::Session;
use super::stream::EventId;
use super::{Server, Shared};

/// The header that names a session.
pub(crate) const SESSION: &str = "mcp-session-id";
/// The header that names the last event which a client has seen.
const LAST_EVENT: &str = "last-event-id";
/// How long answers may take to be sent when the server stops.
const ANSWERING_PATIENCE: Duration = Duration::from_secs(5);
/// How many sessions there may be.
const SESSIONS_MAX: usize = 1000;

/// An executor's tools over HTTP. Cheap to clone.
#[derive(Clone)]
pub struct HttpEndpoint {
    pub(super) shared: Arc<Shared>,
    service: StreamableHttpService<Connection, LocalSessionManager>,
    manager: Arc<LocalSessionManager>,
    sessions: Arc<Mutex<HashMap<String, Arc<Session>>>>,
    /// The requests that are not answered to the end.
    pub(super) asked: TaskTracker,
    pub(super) stop: CancellationToken,
}

/// What requests are answered with.
pub type HttpResponse = Response<BoxBody<Bytes, Infallible>>;

impl Server {
    /// The same server for HTTP.
    pub fn http(&self) -> HttpEndpoint {
        let stop = CancellationToken::new();
        let mut session = SessionConfig::default();
        // We know better when one was used last; and what rmcp answers need not be asked for again.
        session.keep_alive = None;
        session.sse_retry = None;
        let mut manager = LocalSessionManager::default();
        manager.session_config = session;
        let manager = Arc::new(manager);
        let config = StreamableHttpServerConfig::default()
            // The door has looked at where requests come from.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_json_response(true)
            .with_sse_retry(None)
            .with_max_request_body_bytes(self.shared.options.message_bytes_max)
            .with_cancellation_token(stop.clone());
        let shared = Arc::clone(&self.shared);
        let connect = move || Ok(Connection::new(Arc::clone(&shared), Who::OfRequest, CancellationToken::new()));
        let service = StreamableHttpService::new(connect, Arc::clone(&manager), config);
        let shared = Arc::clone(&self.shared);
        HttpEndpoint { shared, service, manager, sessions: Arc::default(), asked: TaskTracker::new(), stop }
    }
}

impl HttpEndpoint {
    /// Answers one request.
    pub async fn handle<B>(&self, request: Request<B>) -> HttpResponse
    where
        B: http_body::Body + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let Some(caller) = request.extensions().get::<Arc<Caller>>().cloned() else {
            return told(StatusCode::INTERNAL_SERVER_ERROR, "nobody established who calls");
        };
        let session = match request.headers().get(SESSION) {
            None => None,
            Some(id) => match id.to_str().ok().and_then(|id| self.session(id, &caller)) {
                Some(session) => {
                    session.hear();
                    Some(session)
                }
                // A session of somebody else's looks like none.
                None => return told(StatusCode::NOT_FOUND, "Not Found: Session not found"),
            },
        };
        match *request.method() {
            Method::POST => {
                let token = self.asked.token();
                let (parts, body) = request.into_parts();
                let Some(body) = read(body, self.shared.options.message_bytes_max).await else {
                    return told(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large");
                };
                self.post(parts, body, caller, session).await.map(|body| Answer { body, _asked: token }.boxed())
            }
            Method::GET => match session.as_ref().and_then(|session| self.come_back(&request, session)) {
                Some(rest) => rest,
                None => self.service.handle(request).await,
            },
            _ => {
                let ended = session.filter(|_| request.method() == Method::DELETE);
                let response = self.service.handle(request).await;
                if let Some(session) = ended.filter(|_| response.status().is_success()) {
                    self.forget(&session);
                }
                response
            }
        }
    }

    /// Ends all sessions and streams, once what was asked is answered to the end or has been waited for long enough.
    pub async fn stop(&self) {
        self.asked.close();
        let _ = tokio::time::timeout(ANSWERING_PATIENCE, self.asked.wait()).await;
        self.stop.cancel();
        for (_, session) in self.sessions().drain() {
            session.close();
        }
    }

    /// Answers a message.
    async fn post(
        &self,
        parts: Parts,
        body: Bytes,
        caller: Arc<Caller>,
        session: Option<Arc<Session>>,
    ) -> HttpResponse {
        match (Message::read(&body), session) {
            (Message::Call { id, params }, session) => {
                if let Some(plain) = direct::Plain::of(self, &parts.headers, id, params, caller, session) {
                    return plain.answer(self).await;
                }
            }
            (Message::Cancelled(id), Some(session)) if session.cancel(&id) => return direct::accepted(),
            (Message::Answer { id, value }, Some(session)) if session.answer(&id, value.as_ref()) => {
                return direct::accepted();
            }
            (Message::Opening(capabilities), None) => return self.open(parts, body, caller, &capabilities).await,
            _ => {}
        }
        self.service.handle(Request::from_parts(parts, Full::new(body))).await
    }

    /// Begins a session.
    async fn open(
        &self,
        parts: Parts,
        body: Bytes,
        caller: Arc<Caller>,
        capabilities: &ClientCapabilities,
    ) -> HttpResponse {
        self.forget_idle().await;
        if self.sessions().len() >= SESSIONS_MAX {
            return told(StatusCode::SERVICE_UNAVAILABLE, "too many sessions are open");
        }
        let response = self.service.handle(Request::from_parts(parts, Full::new(body))).await;
        if let Some(id) = response.headers().get(SESSION).and_then(|id| id.to_str().ok()) {
            let session = Session::new(id, caller, capabilities);
            self.sessions().insert(id.to_owned(), Arc::new(session));
        }
        response
    }

    /// What a client has missed of a stream that it comes back to.
    fn come_back<B>(&self, request: &Request<B>, session: &Arc<Session>) -> Option<HttpResponse> {
        let last = request.headers().get(LAST_EVENT)?.to_str().ok().and_then(EventId::of)?;
        let stream = session.stream(last)?;
        Some(direct::events(stream, last.at + 1, self.stop.clone(), None))
    }

    fn session(&self, id: &str, caller: &Arc<Caller>) -> Option<Arc<Session>> {
        let session = self.sessions().get(id).cloned();
        session.filter(|session| session.is_of(caller))
    }

    fn forget(&self, session: &Session) {
        if let Some(id) = &session.caller.session {
            self.sessions().remove(id);
        }
        session.close();
    }

    /// Ends the sessions of which nothing was heard for long.
    async fn forget_idle(&self) {
        let idle: Vec<Arc<Session>> = self.sessions().values().filter(|session| session.is_idle()).cloned().collect();
        for session in idle {
            self.forget(&session);
            let id = session.caller.session.as_deref().unwrap_or_default().into();
            let _ = self.manager.close_session(&id).await;
        }
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.sessions.lock().expect("no code panics while it holds the sessions")
    }
}

/// All of a request's body, unless it is too large or breaks off.
async fn read<B: http_body::Body<Error: std::fmt::Display>>(body: B, bytes_max: usize) -> Option<Bytes> {
    let whole = Limited::new(body.map_err(|error| error.to_string()), bytes_max).collect().await;
    whole.ok().map(http_body_util::Collected::to_bytes)
}

/// The body of an answer, which counts as being asked until it is gone.
struct Answer {
    body: BoxBody<Bytes, Infallible>,
    _asked: TaskTrackerToken,
}

impl Body for Answer {
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

fn told(code: StatusCode, message: &'static str) -> HttpResponse {
    let mut response = Response::new(Full::new(Bytes::from_static(message.as_bytes())).boxed());
    *response.status_mut() = code;
    response
}

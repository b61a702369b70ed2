//! MCP over streamable HTTP. Clients of revision 2026-07-28 ask one request at a time and are answered with JSON, or with a
//! stream where there is progress to tell; older ones have sessions. Who calls is established by the door in front of this:
//! each request brings an `Arc<Caller>` among its extensions.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use rmcp::model::ProtocolVersion;
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use wieldy_core::Caller;

use super::connection::{Connection, Who};
use super::{Server, Shared};

/// The header that names a session.
pub(crate) const SESSION: &str = "mcp-session-id";
/// How long a session is kept of which nothing is heard.
const IDLE_MAX: Duration = Duration::from_secs(60 * 60);
/// How long answers may take to be sent when the server stops.
const ANSWERING_PATIENCE: Duration = Duration::from_secs(5);
/// How many sessions there may be.
const SESSIONS_MAX: usize = 1000;

/// An executor's tools over HTTP. Cheap to clone.
#[derive(Clone)]
pub struct HttpEndpoint {
    service: StreamableHttpService<Connection, LocalSessionManager>,
    sessions: Arc<LocalSessionManager>,
    owners: Arc<Mutex<HashMap<String, Owner>>>,
    /// The requests that are not answered to the end.
    asked: TaskTracker,
    stop: CancellationToken,
}

/// Whose session it is.
#[derive(PartialEq, Eq, Clone)]
struct Owner {
    agent: String,
    tenant: Option<String>,
    user: Option<String>,
}

/// What requests are answered with.
pub type HttpResponse = Response<BoxBody<Bytes, Infallible>>;

impl Server {
    /// The same server for HTTP.
    pub fn http(&self) -> HttpEndpoint {
        let stop = CancellationToken::new();
        let mut session = SessionConfig::default();
        session.keep_alive = Some(IDLE_MAX);
        let mut sessions = LocalSessionManager::default();
        sessions.session_config = session;
        let sessions = Arc::new(sessions);
        let config = StreamableHttpServerConfig::default()
            // The door has looked at where requests come from.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_json_response(true)
            .with_max_request_body_bytes(self.shared.options.message_bytes_max)
            .with_cancellation_token(stop.clone());
        let shared: Arc<Shared> = Arc::clone(&self.shared);
        let connect = move || Ok(Connection::new(Arc::clone(&shared), Who::OfRequest, CancellationToken::new()));
        let service = StreamableHttpService::new(connect, Arc::clone(&sessions), config);
        HttpEndpoint { service, sessions, owners: Arc::default(), asked: TaskTracker::new(), stop }
    }
}

impl HttpEndpoint {
    /// Answers one request.
    pub async fn handle<B>(&self, request: Request<B>) -> HttpResponse
    where
        B: http_body::Body + Send + 'static,
        B::Error: std::fmt::Display,
    {
        let Some(owner) = request.extensions().get::<Arc<Caller>>().map(|caller| Owner::of(caller)) else {
            return told(StatusCode::INTERNAL_SERVER_ERROR, "nobody established who calls");
        };
        match request.headers().get(SESSION).map(|session| session.to_str().unwrap_or_default()) {
            // A session of somebody else's looks like none.
            Some(session) if !self.is_owned(session, &owner) => {
                return told(StatusCode::NOT_FOUND, "Not Found: Session not found");
            }
            None if may_begin(&request) && self.sessions.sessions.read().await.len() >= SESSIONS_MAX => {
                return told(StatusCode::SERVICE_UNAVAILABLE, "too many sessions are open");
            }
            _ => {}
        }
        // A client that only listens is never done.
        let asked = (request.method() == Method::POST).then(|| self.asked.token());
        let response = self.service.handle(request).await;
        if let Some(session) = response.headers().get(SESSION).and_then(|session| session.to_str().ok()) {
            self.own(session.to_owned(), owner).await;
        }
        match asked {
            Some(asked) => response.map(|body| Answer { body, _asked: asked }.boxed()),
            None => response,
        }
    }

    /// Ends all sessions and streams, once what was asked is answered to the end or has been waited for long enough.
    pub async fn stop(&self) {
        self.asked.close();
        let _ = tokio::time::timeout(ANSWERING_PATIENCE, self.asked.wait()).await;
        self.stop.cancel();
    }

    fn is_owned(&self, session: &str, by: &Owner) -> bool {
        self.owners.lock().expect("no code panics while it holds the owners").get(session) == Some(by)
    }

    async fn own(&self, session: String, owner: Owner) {
        let open = self.sessions.sessions.read().await;
        let mut owners = self.owners.lock().expect("no code panics while it holds the owners");
        // Sessions end without a word to us, so those that are gone are looked for now and then.
        if owners.len() > 2 * open.len() + 16 {
            owners.retain(|session, _| open.contains_key(session.as_str()));
        }
        owners.insert(session, owner);
    }
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

impl Owner {
    fn of(caller: &Caller) -> Self {
        Self { agent: caller.agent.clone(), tenant: caller.tenant.clone(), user: caller.user.clone() }
    }
}

/// Whether a request without a session may begin one.
fn may_begin<B>(request: &Request<B>) -> bool {
    let version = request.headers().get("mcp-protocol-version").and_then(|version| version.to_str().ok());
    request.method() == Method::POST && version.is_none_or(|version| version < ProtocolVersion::V_2026_07_28.as_str())
}

fn told(code: StatusCode, message: &'static str) -> HttpResponse {
    let mut response = Response::new(Full::new(Bytes::from_static(message.as_bytes())).boxed());
    *response.status_mut() = code;
    response
}

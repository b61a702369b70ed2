//! The client side of MCP's streamable HTTP: one request per message, answered by JSON or by an SSE stream.
//! [`HttpTransport::call`] sends `tools/call`. The SDK sends all other messages through the same type, as its HTTP
//! client.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream::BoxStream;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use rmcp::ErrorData;
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::{
    AuthRequiredError, InsufficientScopeError, SseError, StreamableHttpClient, StreamableHttpError,
    StreamableHttpPostResponse as SdkResponse,
};
use serde_json::Value;
use sse_stream::Sse;
use tokio::sync::watch;

use super::failure::{Failure, http_status};
use super::http_request::{MESSAGE_BYTES_MAX, Request, Response, Target, pieces, read, read_beginning};
use super::login::Bearer;
use super::sse;

/// Maximum number of bytes of an error response that are quoted.
const COMPLAINT_BYTES_MAX: usize = 200;
/// The pause before a stream is requested, so that a server that ends each stream at once does not keep us busy.
const STREAM_PAUSE: Duration = Duration::from_millis(100);
/// The longest `Retry-After` that is respected.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const REVISION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const BOTH: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream");

type TransportError = StreamableHttpError<Failure>;

/// The HTTP transport to one server.
#[derive(Clone)]
pub(super) struct HttpTransport {
    state: Arc<TransportState>,
}

struct TransportState {
    target: Target,
    /// Headers of every request.
    headers: HeaderMap,
    /// The bearer token of a login.
    bearer: Option<Bearer>,
    negotiated: watch::Sender<Arc<Negotiated>>,
}

/// The session and revision that the SDK negotiated. Calls use them too.
#[derive(Default)]
pub(super) struct Negotiated {
    pub(super) session: Option<Arc<str>>,
    revision: Option<HeaderValue>,
    /// All headers of a message.
    headers: HeaderMap,
    /// True if the server has forgotten the session.
    is_forgotten: AtomicBool,
}

/// A server's response to a posted message.
pub(super) enum PostResponse {
    /// JSON, and the id of the session that it begins.
    Json(Bytes, Option<String>),
    /// An SSE stream.
    Events(Response),
    /// An error status. `error` is MCP's error if the body has one, else `complaint` describes the response.
    Refused { status: StatusCode, error: Option<ErrorData>, complaint: Failure },
    /// No response in the body. `complaint` is the error to report. If `may_follow`, the response may still come on the
    /// session's SSE stream.
    NoAnswer { may_follow: bool, complaint: Failure },
}

impl HttpTransport {
    pub(super) fn new(target: Target, headers: HeaderMap, bearer: Option<Bearer>) -> Self {
        let negotiated = watch::Sender::default();
        Self { state: Arc::new(TransportState { target, headers, bearer, negotiated }) }
    }

    /// Returns the negotiated session and revision.
    pub(super) fn negotiated(&self) -> Arc<Negotiated> {
        Arc::clone(&self.state.negotiated.borrow())
    }

    /// Waits until another session has replaced this one.
    pub(super) async fn wait_for_successor(&self, of: &Arc<Negotiated>) {
        // The sender cannot be dropped while `self` exists.
        let _ = self.state.negotiated.subscribe().wait_for(|now| !Arc::ptr_eq(now, of)).await;
    }

    /// Calls `on_new` whenever a new session has begun.
    pub(super) async fn watch_sessions(&self, on_new: impl Fn()) {
        let mut changes = self.state.negotiated.subscribe();
        // The sender cannot be dropped while `self` exists.
        while changes.changed().await.is_ok() {
            if changes.borrow_and_update().session.is_some() {
                on_new();
            }
        }
    }

    /// Marks the session as forgotten by the server, so that the SDK begins a new one with its next message.
    pub(super) fn mark_forgotten(negotiated: &Negotiated) {
        negotiated.is_forgotten.store(true, Ordering::Relaxed);
    }

    /// Records the session and revision that the SDK uses. Fails if the session was forgotten.
    fn note_negotiated(
        &self,
        session: Option<&Arc<str>>,
        extra: &HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), TransportError> {
        let (known, revision) = (self.negotiated(), extra.get(&REVISION));
        if known.session.as_ref() == session && known.revision.as_ref() == revision {
            return if known.is_forgotten.load(Ordering::Relaxed) {
                Err(TransportError::SessionExpired)
            } else {
                Ok(())
            };
        }
        let mut headers = self.headers(BOTH, session.map(|session| &**session))?;
        headers.insert(header::CONTENT_TYPE, JSON);
        if let Some(revision) = revision {
            headers.insert(REVISION, revision.clone());
        }
        let (session, revision) = (session.cloned(), revision.cloned());
        self.state.negotiated.send_replace(Arc::new(Negotiated {
            session,
            revision,
            headers,
            is_forgotten: AtomicBool::default(),
        }));
        Ok(())
    }

    /// Sends a call's request. A request that the server refuses because of an unknown session was not processed.
    pub(super) async fn call(
        &self,
        negotiated: &Negotiated,
        body: &Bytes,
        extra: &[(HeaderName, HeaderValue)],
    ) -> Result<PostResponse, TransportError> {
        let make = || {
            let mut request = Request::new(body.clone().into());
            *request.method_mut() = Method::POST;
            let headers = request.headers_mut();
            headers.clone_from(&negotiated.headers);
            headers.extend(extra.iter().cloned());
            request
        };
        self.post(make, negotiated.session.is_some()).await
    }

    /// Resumes a broken stream after an event.
    pub(super) async fn resume(&self, negotiated: &Negotiated, last: &str) -> Result<Response, TransportError> {
        let revision = negotiated.revision.iter().map(|revision| (REVISION, revision.clone())).collect();
        self.stream(negotiated.session.as_deref(), Some(last), revision).await
    }

    /// Returns the headers of every request, with this `Accept` and session.
    fn headers(&self, accept: HeaderValue, session: Option<&str>) -> Result<HeaderMap, TransportError> {
        let mut headers = self.state.headers.clone();
        headers.insert(header::ACCEPT, accept);
        if let Some(session) = session {
            let session = HeaderValue::from_str(session).map_err(|_| Failure::protocol("an invalid session id"));
            headers.insert(SESSION, session.map_err(TransportError::Client)?);
        }
        Ok(headers)
    }

    /// Builds a request with the headers of every request and these extra ones.
    fn request(
        &self,
        method: Method,
        accept: HeaderValue,
        session: Option<&str>,
        extra: HashMap<HeaderName, HeaderValue>,
    ) -> Result<Request, TransportError> {
        let mut request = Request::default();
        *request.method_mut() = method;
        let mut headers = self.headers(accept, session)?;
        headers.extend(extra);
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Sends a request with the login's token. A refused token is renewed once.
    async fn send(&self, make: impl Fn() -> Request) -> Result<Response, TransportError> {
        match &self.state.bearer {
            Some(bearer) => Box::pin(self.send_logged_in(make, bearer)).await,
            None => self.send_as(make, None).await,
        }
    }

    async fn send_logged_in(&self, make: impl Fn() -> Request, bearer: &Bearer) -> Result<Response, TransportError> {
        let token = bearer.token().await.map_err(TransportError::Client)?;
        let refused = match self.send_as(&make, token.as_ref()).await {
            Err(refused @ TransportError::AuthRequired(_)) => refused,
            answered => return answered,
        };
        match bearer.renewed(token.as_ref()).await.map_err(TransportError::Client)? {
            Some(token) => self.send_as(make, Some(&token)).await,
            None => Err(refused),
        }
    }

    async fn send_as(
        &self,
        make: impl Fn() -> Request,
        token: Option<&HeaderValue>,
    ) -> Result<Response, TransportError> {
        let make = || {
            let mut request = make();
            if let Some(token) = token {
                request.headers_mut().insert(header::AUTHORIZATION, token.clone());
            }
            request
        };
        let response = self.state.target.send(make).await.map_err(TransportError::Client)?;
        match response.status() {
            StatusCode::UNAUTHORIZED => Err(TransportError::AuthRequired(AuthRequiredError::new(challenge(&response)))),
            StatusCode::FORBIDDEN => {
                let challenge = challenge(&response);
                let scope = scope(&challenge);
                Err(TransportError::InsufficientScope(InsufficientScopeError::new(challenge, scope)))
            }
            status @ (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) => {
                let retry_after = retry_after(response.headers());
                Err(TransportError::Client(Failure::Busy { status: status.as_u16(), retry_after }))
            }
            _ => Ok(response),
        }
    }

    /// Posts a message and classifies the response.
    async fn post(&self, make: impl Fn() -> Request, has_session: bool) -> Result<PostResponse, TransportError> {
        let response = self.send(make).await?;
        let status = response.status();
        let content_type = content_type(&response);
        let is_html = content_type.starts_with(b"text/html");
        if !status.is_success() {
            return Box::pin(classify_error(response, is_html, has_session)).await;
        }
        if content_type.starts_with(b"text/event-stream") {
            return Ok(PostResponse::Events(response));
        }
        if content_type.starts_with(b"application/json") {
            let session = session_of(&response);
            return Ok(PostResponse::Json(read(response).await.map_err(TransportError::Client)?, session));
        }
        let is_empty = matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT);
        // Reading the whole body lets the connection go back to the pool.
        let complaint = match Box::pin(read_beginning(response)).await.as_slice() {
            [] => "nothing",
            _ if is_html => "an HTML page",
            _ => "neither JSON nor an event stream",
        };
        Ok(PostResponse::NoAnswer { may_follow: is_empty && has_session, complaint: Failure::protocol(complaint) })
    }

    /// Opens an SSE stream, or resumes one after an event.
    async fn stream(
        &self,
        session: Option<&str>,
        last_event_id: Option<&str>,
        extra: HashMap<HeaderName, HeaderValue>,
    ) -> Result<Response, TransportError> {
        tokio::time::sleep(STREAM_PAUSE).await;
        let mut request = self.request(Method::GET, EVENTS, session, extra)?;
        if let Some(last) = last_event_id {
            let last = HeaderValue::try_from(last).map_err(|_| TransportError::ServerDoesNotSupportSse)?;
            request.headers_mut().insert(LAST_EVENT, last);
        }
        let response = self.send(|| request.clone()).await?;
        // The server would refuse again.
        if response.status().is_client_error() || !content_type(&response).starts_with(b"text/event-stream") {
            return Err(TransportError::ServerDoesNotSupportSse);
        }
        Ok(response)
    }
}

/// Classifies an error response.
async fn classify_error(response: Response, is_html: bool, has_session: bool) -> Result<PostResponse, TransportError> {
    let status = response.status();
    let body = read_beginning(response).await;
    if has_session && says_forgotten(status, &body) {
        return Err(TransportError::SessionExpired);
    }
    let error = match serde_json::from_slice(&body) {
        Ok(ServerJsonRpcMessage::Error(told)) => Some(told.error),
        _ => None,
    };
    Ok(PostResponse::Refused { status, error, complaint: complaint(status, is_html, &body) })
}

/// Parses the SSE events of a response.
pub(super) fn events(response: Response) -> impl Stream<Item = Result<Sse, SseError>> + Send + 'static {
    sse::events(pieces(response), MESSAGE_BYTES_MAX)
}

/// Parses a body that is one response message.
fn message(body: &[u8], session: Option<String>, asked: &RequestId) -> Result<SdkResponse, TransportError> {
    let failed = |why: &str| Err(TransportError::Client(Failure::protocol(why)));
    match serde_json::from_slice(body) {
        // An error in a response body answers the request, even if it names no id or another one.
        Ok(ServerJsonRpcMessage::Error(told)) => {
            Ok(SdkResponse::Json(ServerJsonRpcMessage::error(told.error, Some(asked.clone())), session))
        }
        Ok(ServerJsonRpcMessage::Response(response)) if response.id.to_string() != asked.to_string() => {
            failed("a response to another request")
        }
        Ok(message @ ServerJsonRpcMessage::Response(_)) => Ok(SdkResponse::Json(message, session)),
        Ok(_) => failed("a response of the wrong type"),
        Err(_) => failed("a response that is not valid MCP"),
    }
}

impl StreamableHttpClient for HttpTransport {
    type Error = Failure;

    async fn post_message(
        &self,
        _uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<SdkResponse, TransportError> {
        let (is_discovery, is_introduction) = match &message {
            ClientJsonRpcMessage::Request(request) => match request.request {
                ClientRequest::DiscoverRequest(_) => (true, true),
                ClientRequest::InitializeRequest(_) => (false, true),
                _ => (false, false),
            },
            _ => (false, false),
        };
        // Session and revision are known only after the handshake.
        if !is_introduction {
            self.note_negotiated(session_id.as_ref(), &custom_headers)?;
        }
        let body = serde_json::to_vec(&message)?;
        let mut request = self.request(Method::POST, BOTH, session_id.as_deref(), custom_headers)?;
        request.headers_mut().insert(header::CONTENT_TYPE, JSON);
        *request.body_mut() = body.into();
        let response = self.post(|| request.clone(), session_id.is_some()).await?;
        let begins_session = match &response {
            PostResponse::Json(_, session) => session.is_some(),
            PostResponse::Events(response) => session_of(response).is_some(),
            _ => false,
        };
        if is_introduction && begins_session {
            // The new session may have the same id as a forgotten one.
            self.state.negotiated.send_replace(Arc::default());
        }
        match (response, id_of(&message)) {
            (PostResponse::Events(response), id) => {
                let session = session_of(&response);
                Ok(SdkResponse::Sse(sse::for_the_sdk(events(response), id.cloned()), session))
            }
            (PostResponse::Refused { complaint, .. }, None) => Err(TransportError::Client(complaint)),
            (PostResponse::Refused { error: Some(error), .. }, Some(id)) => {
                Ok(SdkResponse::Json(ServerJsonRpcMessage::error(error, Some(id.clone())), None))
            }
            // A server that does not know `server/discover` speaks an older revision. Such servers use various error
            // statuses.
            (PostResponse::Refused { status, .. }, Some(id))
                if is_discovery && session_id.is_none() && is_unknown(status) =>
            {
                let error = ErrorData::invalid_request(http_status(status.as_u16()), None);
                Ok(SdkResponse::Json(ServerJsonRpcMessage::error(error, Some(id.clone())), None))
            }
            (PostResponse::Refused { complaint, .. }, Some(_)) => Err(TransportError::Client(complaint)),
            (PostResponse::Json(..) | PostResponse::NoAnswer { .. }, None) => Ok(SdkResponse::Accepted),
            (PostResponse::Json(body, session), Some(id)) => self::message(&body, session, id),
            // The response comes on the session's stream.
            (PostResponse::NoAnswer { may_follow: true, .. }, Some(_)) => Ok(SdkResponse::Accepted),
            (PostResponse::NoAnswer { complaint, .. }, Some(_)) => Err(TransportError::Client(complaint)),
        }
    }

    async fn delete_session(
        &self,
        _uri: Arc<str>,
        session_id: Arc<str>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), TransportError> {
        let request = self.request(Method::DELETE, JSON, Some(&session_id), custom_headers)?;
        let response = self.send(|| request.clone()).await?;
        let status = response.status();
        read_beginning(response).await;
        if status.is_success() { Ok(()) } else { Err(TransportError::ServerDoesNotSupportDeleteSession) }
    }

    async fn get_stream(
        &self,
        _uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, TransportError> {
        let response = self.stream(session_id.as_deref(), last_event_id.as_deref(), custom_headers).await?;
        Ok(sse::for_the_sdk(events(response), None))
    }
}

/// Returns the id of a request. Other messages get no response.
fn id_of(message: &ClientJsonRpcMessage) -> Option<&RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(&request.id),
        _ => None,
    }
}

/// Returns true if a server may use this status for an unknown method.
fn is_unknown(status: StatusCode) -> bool {
    status.is_client_error() || matches!(status, StatusCode::INTERNAL_SERVER_ERROR | StatusCode::NOT_IMPLEMENTED)
}

fn session_of(response: &Response) -> Option<String> {
    response.headers().get(SESSION)?.to_str().ok().map(str::to_owned)
}

fn content_type(response: &Response) -> &[u8] {
    response.headers().get(header::CONTENT_TYPE).map_or(b"", HeaderValue::as_bytes)
}

fn challenge(response: &Response) -> String {
    let all = response.headers().get_all(header::WWW_AUTHENTICATE).iter();
    all.filter_map(|value| value.to_str().ok()).find(|value| value.contains('=')).unwrap_or_default().to_owned()
}

/// Returns the `scope` of a challenge.
fn scope(challenge: &str) -> Option<String> {
    let (_, rest) = challenge.split_once("scope=")?;
    let scope = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split('"').next()?,
        None => rest.split([',', ' ']).next()?,
    };
    Some(scope.to_owned()).filter(|scope| !scope.is_empty())
}

/// Parses `Retry-After`: seconds or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let until = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
            Duration::try_from(until.duration_since(jiff::Timestamp::now())).unwrap_or_default()
        }
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// Returns true if a response says that the session is unknown. Some servers use 400 for that. A body that names the
/// request's id is a real response to the request, not about the session.
fn says_forgotten(status: StatusCode, body: &[u8]) -> bool {
    let names_it = || body.to_ascii_lowercase().windows(7).any(|window| window == b"session");
    let answers = || serde_json::from_slice::<Value>(body).is_ok_and(|answer| !answer["id"].is_null());
    (status == StatusCode::NOT_FOUND || (status == StatusCode::BAD_REQUEST && names_it())) && !answers()
}

/// Returns the failure for an error response without an MCP error.
fn complaint(status: StatusCode, is_html: bool, body: &[u8]) -> Failure {
    let mut message = http_status(status.as_u16());
    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    if !is_html && !text.is_empty() {
        message = format!("{message}: {}", &text[..text.floor_char_boundary(COMPLAINT_BYTES_MAX)]);
    }
    if status.is_server_error() { Failure::transport(message) } else { Failure::protocol(message) }
}

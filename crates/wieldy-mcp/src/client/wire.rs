//! MCP over HTTP as a client sends it: one request for each message, answered by JSON or by a stream of events. Calls are sent by
//! [`Wire::call`], all else by the SDK, for which this is the client of HTTP.

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
    StreamableHttpPostResponse as Answer,
};
use serde_json::Value;
use sse_stream::Sse;
use tokio::sync::watch;

use super::events;
use super::exchange::{MESSAGE_BYTES_MAX, Place, Request, Response, glimpse, pieces, read};
use super::failure::{Failure, http_status};
use super::login::Bearer;

/// How much is told of an answer that is none.
const COMPLAINT_TOLD_BYTES_MAX: usize = 200;
/// What passes before a stream is asked for, so that a server that ends each at once does not keep us busy.
const STREAM_PAUSE: Duration = Duration::from_millis(100);
/// The longest that a server is left alone because it asks so.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const REVISION: HeaderName = HeaderName::from_static("mcp-protocol-version");
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const BOTH: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream");

type WireError = StreamableHttpError<Failure>;

/// The way to one server.
#[derive(Clone)]
pub(super) struct Wire {
    server: Arc<Server>,
}

struct Server {
    place: Place,
    /// What is sent along with every request.
    headers: HeaderMap,
    /// What somebody who logged in sends along too.
    bearer: Option<Bearer>,
    way: watch::Sender<Arc<Way>>,
}

/// What the SDK agreed on with the server, which calls go by too.
#[derive(Default)]
pub(super) struct Way {
    pub(super) session: Option<Arc<str>>,
    revision: Option<HeaderValue>,
    /// All that is sent along with a message.
    headers: HeaderMap,
    /// Whether the server said that it does not know the session any more.
    is_forgotten: AtomicBool,
}

/// What a server answers to a message.
pub(super) enum Heard {
    /// JSON, and the session that it begins.
    Whole(Bytes, Option<String>),
    /// A stream of events.
    Events(Response),
    /// An error instead of an answer; where it is none of MCP's, what is told of it.
    Refused { status: StatusCode, error: Option<ErrorData>, complaint: Failure },
    /// No answer, which is what is told of it to whoever asked; `may_follow` says that it may still come by the stream of the
    /// session.
    Nothing { may_follow: bool, complaint: Failure },
}

impl Wire {
    pub(super) fn new(place: Place, headers: HeaderMap, bearer: Option<Bearer>) -> Self {
        let way = watch::Sender::default();
        Self { server: Arc::new(Server { place, headers, bearer, way }) }
    }

    /// How calls go now.
    pub(super) fn way(&self) -> Arc<Way> {
        Arc::clone(&self.server.way.borrow())
    }

    /// Waits until calls go another way.
    pub(super) async fn left(&self, way: &Arc<Way>) {
        // The sender lives as long as this does.
        let _ = self.server.way.subscribe().wait_for(|now| !Arc::ptr_eq(now, way)).await;
    }

    /// Says whenever calls go on in another session.
    pub(super) async fn sessions(&self, another: impl Fn()) {
        let mut ways = self.server.way.subscribe();
        // The sender lives as long as this does.
        while ways.changed().await.is_ok() {
            if ways.borrow_and_update().session.is_some() {
                another();
            }
        }
    }

    /// Notes that the server does not know the session any more, so that the SDK begins another with whatever it sends next.
    pub(super) fn forget(way: &Way) {
        way.is_forgotten.store(true, Ordering::Relaxed);
    }

    /// Notes how the SDK speaks to the server.
    fn learn(&self, session: Option<&Arc<str>>, extra: &HashMap<HeaderName, HeaderValue>) -> Result<(), WireError> {
        let (way, revision) = (self.way(), extra.get(&REVISION));
        if way.session.as_ref() == session && way.revision.as_ref() == revision {
            return if way.is_forgotten.load(Ordering::Relaxed) { Err(WireError::SessionExpired) } else { Ok(()) };
        }
        let mut headers = self.headers(BOTH, session.map(|session| &**session))?;
        headers.insert(header::CONTENT_TYPE, JSON);
        if let Some(revision) = revision {
            headers.insert(REVISION, revision.clone());
        }
        let (session, revision) = (session.cloned(), revision.cloned());
        self.server.way.send_replace(Arc::new(Way { session, revision, headers, is_forgotten: AtomicBool::default() }));
        Ok(())
    }

    /// Sends a message of our own that wants an answer. One that the server refuses because it does not know the session has
    /// not reached anybody.
    pub(super) async fn call(
        &self,
        way: &Way,
        body: &Bytes,
        extra: &[(HeaderName, HeaderValue)],
    ) -> Result<Heard, WireError> {
        let make = || {
            let mut request = Request::new(body.clone().into());
            *request.method_mut() = Method::POST;
            let headers = request.headers_mut();
            headers.clone_from(&way.headers);
            headers.extend(extra.iter().cloned());
            request
        };
        self.post(make, way.session.is_some()).await
    }

    /// Asks for what followed an event of a stream that broke.
    pub(super) async fn resume(&self, way: &Way, last: &str) -> Result<Response, WireError> {
        let revision = way.revision.iter().map(|revision| (REVISION, revision.clone())).collect();
        self.stream(way.session.as_deref(), Some(last), revision).await
    }

    /// What is sent along with every request that accepts this, in a session or in none.
    fn headers(&self, accept: HeaderValue, session: Option<&str>) -> Result<HeaderMap, WireError> {
        let mut headers = self.server.headers.clone();
        headers.insert(header::ACCEPT, accept);
        if let Some(session) = session {
            let session = HeaderValue::from_str(session).map_err(|_| Failure::protocol("a session that has no name"));
            headers.insert(SESSION, session.map_err(WireError::Client)?);
        }
        Ok(headers)
    }

    /// A request with what is sent along with every one, and with this.
    fn request(
        &self,
        method: Method,
        accept: HeaderValue,
        session: Option<&str>,
        extra: HashMap<HeaderName, HeaderValue>,
    ) -> Result<Request, WireError> {
        let mut request = Request::default();
        *request.method_mut() = method;
        let mut headers = self.headers(accept, session)?;
        headers.extend(extra);
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Sends a request as whoever logged in. A token that is refused is renewed once.
    async fn send(&self, make: impl Fn() -> Request) -> Result<Response, WireError> {
        match &self.server.bearer {
            Some(bearer) => Box::pin(self.send_logged_in(make, bearer)).await,
            None => self.send_as(make, None).await,
        }
    }

    async fn send_logged_in(&self, make: impl Fn() -> Request, bearer: &Bearer) -> Result<Response, WireError> {
        let token = bearer.token().await.map_err(WireError::Client)?;
        let refused = match self.send_as(&make, token.as_ref()).await {
            Err(refused @ WireError::AuthRequired(_)) => refused,
            answered => return answered,
        };
        match bearer.renewed(token.as_ref()).await.map_err(WireError::Client)? {
            Some(token) => self.send_as(make, Some(&token)).await,
            None => Err(refused),
        }
    }

    async fn send_as(&self, make: impl Fn() -> Request, token: Option<&HeaderValue>) -> Result<Response, WireError> {
        let make = || {
            let mut request = make();
            if let Some(token) = token {
                request.headers_mut().insert(header::AUTHORIZATION, token.clone());
            }
            request
        };
        let response = self.server.place.send(make).await.map_err(WireError::Client)?;
        match response.status() {
            StatusCode::UNAUTHORIZED => Err(WireError::AuthRequired(AuthRequiredError::new(challenge(&response)))),
            StatusCode::FORBIDDEN => {
                let challenge = challenge(&response);
                let scope = scope(&challenge);
                Err(WireError::InsufficientScope(InsufficientScopeError::new(challenge, scope)))
            }
            status @ (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) => {
                let retry_after = retry_after(response.headers());
                Err(WireError::Client(Failure::Busy { status: status.as_u16(), retry_after }))
            }
            _ => Ok(response),
        }
    }

    /// Sends a message and hears what the server says to it.
    async fn post(&self, make: impl Fn() -> Request, has_session: bool) -> Result<Heard, WireError> {
        let response = self.send(make).await?;
        let status = response.status();
        let content_type = content_type(&response);
        let is_html = content_type.starts_with(b"text/html");
        if !status.is_success() {
            return Box::pin(refused(response, is_html, has_session)).await;
        }
        if content_type.starts_with(b"text/event-stream") {
            return Ok(Heard::Events(response));
        }
        if content_type.starts_with(b"application/json") {
            let session = session_of(&response);
            return Ok(Heard::Whole(read(response).await.map_err(WireError::Client)?, session));
        }
        let is_empty = matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT);
        // The connection is used again only when all was read.
        let complaint = match Box::pin(glimpse(response)).await.as_slice() {
            [] => "nothing",
            _ if is_html => "a page for people",
            _ => "something that is neither JSON nor a stream of events",
        };
        Ok(Heard::Nothing { may_follow: is_empty && has_session, complaint: Failure::protocol(complaint) })
    }

    /// Asks for a stream, or for what followed an event of one.
    async fn stream(
        &self,
        session: Option<&str>,
        last_event_id: Option<&str>,
        extra: HashMap<HeaderName, HeaderValue>,
    ) -> Result<Response, WireError> {
        tokio::time::sleep(STREAM_PAUSE).await;
        let mut request = self.request(Method::GET, EVENTS, session, extra)?;
        if let Some(last) = last_event_id {
            let last = HeaderValue::try_from(last).map_err(|_| WireError::ServerDoesNotSupportSse)?;
            request.headers_mut().insert(LAST_EVENT, last);
        }
        let response = self.send(|| request.clone()).await?;
        // Asking again would change nothing.
        if response.status().is_client_error() || !content_type(&response).starts_with(b"text/event-stream") {
            return Err(WireError::ServerDoesNotSupportSse);
        }
        Ok(response)
    }
}

/// What a server that does not do what it was asked says instead.
async fn refused(response: Response, is_html: bool, has_session: bool) -> Result<Heard, WireError> {
    let status = response.status();
    let body = glimpse(response).await;
    if has_session && is_forgotten(status, &body) {
        return Err(WireError::SessionExpired);
    }
    let error = match serde_json::from_slice(&body) {
        Ok(ServerJsonRpcMessage::Error(told)) => Some(told.error),
        _ => None,
    };
    Ok(Heard::Refused { status, error, complaint: complaint(status, is_html, &body) })
}

/// The events of an answer.
pub(super) fn events(response: Response) -> impl Stream<Item = Result<Sse, SseError>> + Send + 'static {
    events::of(pieces(response), MESSAGE_BYTES_MAX)
}

/// The message that is the whole of an answer.
fn message(body: &[u8], session: Option<String>, asked: &RequestId) -> Result<Answer, WireError> {
    let failed = |why: &str| Err(WireError::Client(Failure::protocol(why)));
    match serde_json::from_slice(body) {
        // Whatever goes wrong in answering a question is the answer to it.
        Ok(ServerJsonRpcMessage::Error(told)) => {
            Ok(Answer::Json(ServerJsonRpcMessage::error(told.error, Some(asked.clone())), session))
        }
        Ok(ServerJsonRpcMessage::Response(response)) if response.id.to_string() != asked.to_string() => {
            failed("the answer to something else")
        }
        Ok(message @ ServerJsonRpcMessage::Response(_)) => Ok(Answer::Json(message, session)),
        Ok(_) => failed("something that is no answer to what it was asked"),
        Err(_) => failed("the answer is none that MCP knows"),
    }
}

impl StreamableHttpClient for Wire {
    type Error = Failure;

    async fn post_message(
        &self,
        _uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<Answer, WireError> {
        let (is_discovery, is_introduction) = match &message {
            ClientJsonRpcMessage::Request(request) => match request.request {
                ClientRequest::DiscoverRequest(_) => (true, true),
                ClientRequest::InitializeRequest(_) => (false, true),
                _ => (false, false),
            },
            _ => (false, false),
        };
        // What is agreed on is known when both have introduced themselves.
        if !is_introduction {
            self.learn(session_id.as_ref(), &custom_headers)?;
        }
        let body = serde_json::to_vec(&message)?;
        let mut request = self.request(Method::POST, BOTH, session_id.as_deref(), custom_headers)?;
        request.headers_mut().insert(header::CONTENT_TYPE, JSON);
        *request.body_mut() = body.into();
        let heard = self.post(|| request.clone(), session_id.is_some()).await?;
        let begins_session = match &heard {
            Heard::Whole(_, session) => session.is_some(),
            Heard::Events(response) => session_of(response).is_some(),
            _ => false,
        };
        if is_introduction && begins_session {
            // It may have the name of one that was forgotten.
            self.server.way.send_replace(Arc::default());
        }
        match (heard, id_of(&message)) {
            (Heard::Events(response), id) => {
                let session = session_of(&response);
                Ok(Answer::Sse(events::for_the_sdk(events(response), id.cloned()), session))
            }
            (Heard::Refused { complaint, .. }, None) => Err(WireError::Client(complaint)),
            (Heard::Refused { error: Some(error), .. }, Some(id)) => {
                Ok(Answer::Json(ServerJsonRpcMessage::error(error, Some(id.clone())), None))
            }
            // One that does not know the question is one of an older revision, however it says so.
            (Heard::Refused { status, .. }, Some(id)) if is_discovery && session_id.is_none() && is_unknown(status) => {
                let error = ErrorData::invalid_request(http_status(status.as_u16()), None);
                Ok(Answer::Json(ServerJsonRpcMessage::error(error, Some(id.clone())), None))
            }
            (Heard::Refused { complaint, .. }, Some(_)) => Err(WireError::Client(complaint)),
            (Heard::Whole(..) | Heard::Nothing { .. }, None) => Ok(Answer::Accepted),
            (Heard::Whole(body, session), Some(id)) => self::message(&body, session, id),
            // The answer comes by the stream of the session.
            (Heard::Nothing { may_follow: true, .. }, Some(_)) => Ok(Answer::Accepted),
            (Heard::Nothing { complaint, .. }, Some(_)) => Err(WireError::Client(complaint)),
        }
    }

    async fn delete_session(
        &self,
        _uri: Arc<str>,
        session_id: Arc<str>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), WireError> {
        let request = self.request(Method::DELETE, JSON, Some(&session_id), custom_headers)?;
        let response = self.send(|| request.clone()).await?;
        let status = response.status();
        glimpse(response).await;
        if status.is_success() { Ok(()) } else { Err(WireError::ServerDoesNotSupportDeleteSession) }
    }

    async fn get_stream(
        &self,
        _uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        _auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, WireError> {
        let response = self.stream(session_id.as_deref(), last_event_id.as_deref(), custom_headers).await?;
        Ok(events::for_the_sdk(events(response), None))
    }
}

/// The id of a request; other messages have no answer.
fn id_of(message: &ClientJsonRpcMessage) -> Option<&RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(&request.id),
        _ => None,
    }
}

/// Whether this is how a server says that it does not know what it was asked.
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

/// What a login would have to be for.
fn scope(challenge: &str) -> Option<String> {
    let (_, rest) = challenge.split_once("scope=")?;
    let scope = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split('"').next()?,
        None => rest.split([',', ' ']).next()?,
    };
    Some(scope.to_owned()).filter(|scope| !scope.is_empty())
}

/// How long a server asks to be left alone: seconds, or a date.
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

/// Whether a server says that it does not know the session. Some say so by 400. Whoever names the request has looked into it,
/// so that is its answer.
fn is_forgotten(status: StatusCode, body: &[u8]) -> bool {
    let names_it = || body.to_ascii_lowercase().windows(7).any(|window| window == b"session");
    let answers = || serde_json::from_slice::<Value>(body).is_ok_and(|answer| !answer["id"].is_null());
    (status == StatusCode::NOT_FOUND || (status == StatusCode::BAD_REQUEST && names_it())) && !answers()
}

/// What a server says that is none of MCP's errors.
fn complaint(status: StatusCode, is_html: bool, body: &[u8]) -> Failure {
    let mut told = http_status(status.as_u16());
    let text = String::from_utf8_lossy(body);
    let text = text.trim();
    if !is_html && !text.is_empty() {
        told = format!("{told}: {}", &text[..text.floor_char_boundary(COMPLAINT_TOLD_BYTES_MAX)]);
    }
    if status.is_server_error() { Failure::transport(told) } else { Failure::protocol(told) }
}

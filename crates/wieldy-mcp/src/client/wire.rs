//! MCP over HTTP as a client sends it: one request for each message, answered by JSON or by a stream of events. Nothing that a
//! server answers is read without a bound, and what never reached it is told apart from what may have.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::BoxStream;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use reqwest::{Request, Response, Url};
use rmcp::ErrorData;
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_client::{
    AuthRequiredError, InsufficientScopeError, SseError, StreamableHttpClient, StreamableHttpError,
    StreamableHttpPostResponse as Answer,
};
use sse_stream::Sse;

use super::events;
use super::failure::{Failure, http_status};
use super::login::Bearer;

/// How large one message may be.
const MESSAGE_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How much is read of an answer that is only looked at for what went wrong.
const COMPLAINT_BYTES_MAX: usize = 64 * 1024;
/// How much of it is told.
const COMPLAINT_TOLD_BYTES_MAX: usize = 200;
/// What passes before a stream is asked for, so that a server that ends each at once does not keep us busy.
const STREAM_PAUSE: Duration = Duration::from_millis(100);
/// The longest that a server is left alone because it asks so.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const BOTH: HeaderValue = HeaderValue::from_static("application/json, text/event-stream");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream");

type WireError = StreamableHttpError<Failure>;

/// The way to one server.
#[derive(Clone)]
pub(super) struct Wire {
    client: reqwest::Client,
    server: Arc<Server>,
}

struct Server {
    url: Url,
    /// What is sent along with every request.
    headers: HeaderMap,
    /// What somebody who logged in sends along too.
    bearer: Option<Bearer>,
}

impl Wire {
    pub(super) fn new(client: reqwest::Client, url: Url, headers: HeaderMap, bearer: Option<Bearer>) -> Self {
        Self { client, server: Arc::new(Server { url, headers, bearer }) }
    }

    /// A request with what is sent along with every one, and with this.
    fn request(
        &self,
        method: Method,
        accept: HeaderValue,
        session: Option<&str>,
        extra: HashMap<HeaderName, HeaderValue>,
    ) -> Result<Request, WireError> {
        let mut request = Request::new(method, self.server.url.clone());
        let headers = request.headers_mut();
        headers.clone_from(&self.server.headers);
        headers.extend(extra);
        headers.insert(header::ACCEPT, accept);
        if let Some(session) = session {
            let session = HeaderValue::from_str(session).map_err(|_| Failure::protocol("a session that has no name"));
            headers.insert(SESSION, session.map_err(WireError::Client)?);
        }
        Ok(request)
    }

    /// Sends a request as whoever logged in. A token that is refused is renewed once.
    async fn send(&self, mut request: Request) -> Result<Response, WireError> {
        let Some(bearer) = &self.server.bearer else { return self.send_as_it_is(request).await };
        let token = bearer.token().await.map_err(WireError::Client)?;
        if let Some(token) = &token {
            request.headers_mut().insert(header::AUTHORIZATION, token.clone());
        }
        let again = request.try_clone();
        let refused = match self.send_as_it_is(request).await {
            Err(refused @ WireError::AuthRequired(_)) => refused,
            answered => return answered,
        };
        match (bearer.renewed(token.as_ref()).await.map_err(WireError::Client)?, again) {
            (Some(token), Some(mut again)) => {
                again.headers_mut().insert(header::AUTHORIZATION, token);
                self.send_as_it_is(again).await
            }
            _ => Err(refused),
        }
    }

    async fn send_as_it_is(&self, request: Request) -> Result<Response, WireError> {
        let response = self.client.execute(request).await.map_err(|error| WireError::Client(unsent(&error)))?;
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
            status if status.is_redirection() => Err(WireError::Client(redirected(&response))),
            _ => Ok(response),
        }
    }

    /// What a server that does not do what it was asked says instead.
    async fn refused(
        response: Response,
        message: &ClientJsonRpcMessage,
        has_session: bool,
    ) -> Result<Answer, WireError> {
        let status = response.status();
        let is_html = content_type(&response).starts_with(b"text/html");
        let body = glimpse(response).await;
        if has_session && is_forgotten(status, &body) {
            return Err(WireError::SessionExpired);
        }
        let error = match serde_json::from_slice(&body) {
            Ok(ServerJsonRpcMessage::Error(told)) => Some(told.error),
            _ => None,
        };
        let Some(id) = id_of(message) else { return Err(WireError::Client(complaint(status, is_html, &body))) };
        let is_discovery = matches!(message, ClientJsonRpcMessage::Request(request)
            if matches!(request.request, ClientRequest::DiscoverRequest(_)));
        // One that does not know the question is one of an older revision, however it says so.
        let is_old = is_discovery
            && !has_session
            && (status.is_client_error()
                || matches!(status, StatusCode::INTERNAL_SERVER_ERROR | StatusCode::NOT_IMPLEMENTED));
        match error {
            Some(error) => Ok(Answer::Json(ServerJsonRpcMessage::error(error, Some(id.clone())), None)),
            None if is_old => {
                let error = ErrorData::invalid_request(http_status(status.as_u16()), None);
                Ok(Answer::Json(ServerJsonRpcMessage::error(error, Some(id.clone())), None))
            }
            None => Err(WireError::Client(complaint(status, is_html, &body))),
        }
    }

    /// The message that is the whole of an answer.
    async fn message(response: Response, asked: &ClientJsonRpcMessage) -> Result<Answer, WireError> {
        let session = session_of(&response);
        let body = read(response).await.map_err(WireError::Client)?;
        let Some(id) = id_of(asked) else { return Ok(Answer::Accepted) };
        let failed = |why: &str| Err(WireError::Client(Failure::protocol(why)));
        match serde_json::from_slice(&body) {
            // Whatever goes wrong in answering a question is the answer to it.
            Ok(ServerJsonRpcMessage::Error(told)) => {
                Ok(Answer::Json(ServerJsonRpcMessage::error(told.error, Some(id.clone())), session))
            }
            Ok(message @ ServerJsonRpcMessage::Response(_)) => match &message {
                ServerJsonRpcMessage::Response(response) if response.id.to_string() != id.to_string() => {
                    failed("the answer to something else")
                }
                _ => Ok(Answer::Json(message, session)),
            },
            Ok(_) => failed("something that is no answer to what it was asked"),
            Err(_) => failed("the answer is none that MCP knows"),
        }
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
        let body = serde_json::to_vec(&message)?;
        let mut request = self.request(Method::POST, BOTH, session_id.as_deref(), custom_headers)?;
        request.headers_mut().insert(header::CONTENT_TYPE, JSON);
        *request.body_mut() = Some(body.into());
        let response = self.send(request).await?;
        let status = response.status();
        if !status.is_success() {
            return Self::refused(response, &message, session_id.is_some()).await;
        }
        let id = id_of(&message);
        let content_type = content_type(&response);
        if content_type.starts_with(b"text/event-stream") {
            let (session, id) = (session_of(&response), id.cloned());
            return Ok(Answer::Sse(events::of(response.bytes_stream(), MESSAGE_BYTES_MAX, id), session));
        }
        if content_type.starts_with(b"application/json") {
            return Self::message(response, &message).await;
        }
        let is_html = content_type.starts_with(b"text/html");
        let is_empty = matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT);
        // The connection is used again only when all was read.
        let body = glimpse(response).await;
        match id {
            None => Ok(Answer::Accepted),
            // The answer comes by the stream of the session.
            Some(_) if is_empty && session_id.is_some() => Ok(Answer::Accepted),
            Some(_) if body.is_empty() => Err(WireError::Client(Failure::protocol("nothing"))),
            Some(_) if is_html => Err(WireError::Client(Failure::protocol("a page for people"))),
            Some(_) => {
                Err(WireError::Client(Failure::protocol("something that is neither JSON nor a stream of events")))
            }
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
        let response = self.send(request).await?;
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
        tokio::time::sleep(STREAM_PAUSE).await;
        let mut request = self.request(Method::GET, EVENTS, session_id.as_deref(), custom_headers)?;
        if let Some(last) = last_event_id {
            let last = HeaderValue::try_from(last).map_err(|_| WireError::ServerDoesNotSupportSse)?;
            request.headers_mut().insert(LAST_EVENT, last);
        }
        let response = self.send(request).await?;
        // Asking again would change nothing.
        if response.status().is_client_error() || !content_type(&response).starts_with(b"text/event-stream") {
            return Err(WireError::ServerDoesNotSupportSse);
        }
        Ok(events::of(response.bytes_stream(), MESSAGE_BYTES_MAX, None))
    }
}

/// The id of a request; other messages have no answer.
fn id_of(message: &ClientJsonRpcMessage) -> Option<&RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(&request.id),
        _ => None,
    }
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

/// Why a request has no answer, without its address: that may hold a secret.
fn unsent(error: &reqwest::Error) -> Failure {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    if error.is_connect() && error.is_timeout() {
        return Failure::unreached("no connection could be made in time");
    }
    match error.is_connect() {
        true => Failure::unreached(format!("no connection could be made: {innermost}")),
        false => Failure::transport(format!("the connection broke: {innermost}")),
    }
}

fn redirected(response: &Response) -> Failure {
    let location = response.headers().get(header::LOCATION).and_then(|location| location.to_str().ok());
    let elsewhere = location.and_then(|location| response.url().join(location).ok());
    let place = match elsewhere.map(|url| url.origin()) {
        Some(origin) if origin == response.url().origin() => "itself".to_owned(),
        Some(origin) => format!("`{}`", origin.ascii_serialization()),
        None => "nowhere".to_owned(),
    };
    let status = http_status(response.status().as_u16());
    Failure::Configuration(format!("it redirects to {place} by {status}, which is not followed").into())
}

/// Whether a server says that it does not know the session. Some say so by 400.
fn is_forgotten(status: StatusCode, body: &[u8]) -> bool {
    let names_it = || body.to_ascii_lowercase().windows(7).any(|window| window == b"session");
    status == StatusCode::NOT_FOUND || (status == StatusCode::BAD_REQUEST && names_it())
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

/// All of an answer.
async fn read(mut response: Response) -> Result<Bytes, Failure> {
    let too_large = || Failure::transport("it sent a message of more than 16 MiB");
    let length = response.content_length().unwrap_or_default();
    if length > MESSAGE_BYTES_MAX as u64 {
        return Err(too_large());
    }
    let broken = |error: reqwest::Error| unsent(&error);
    let Some(first) = response.chunk().await.map_err(broken)? else { return Ok(Bytes::new()) };
    let Some(mut next) = response.chunk().await.map_err(broken)? else {
        // Most answers come in one piece.
        return Ok(first);
    };
    let mut all = BytesMut::with_capacity((length as usize).max(first.len() + next.len()));
    all.extend_from_slice(&first);
    loop {
        if all.len() + next.len() > MESSAGE_BYTES_MAX {
            return Err(too_large());
        }
        all.extend_from_slice(&next);
        match response.chunk().await.map_err(broken)? {
            Some(piece) => next = piece,
            None => return Ok(all.freeze()),
        }
    }
}

/// As much of an answer as is looked at where it is none. Mostly this is all of it, so that the connection can be used again.
async fn glimpse(mut response: Response) -> Vec<u8> {
    let mut all = Vec::new();
    while let Ok(Some(piece)) = response.chunk().await {
        let room = COMPLAINT_BYTES_MAX - all.len();
        all.extend_from_slice(&piece[..piece.len().min(room)]);
        if piece.len() > room {
            break;
        }
    }
    all
}

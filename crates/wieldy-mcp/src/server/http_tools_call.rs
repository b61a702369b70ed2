//! Answers `tools/call` over HTTP without the SDK. The task that has read the request runs the call and writes the
//! response. Calls over HTTP cost about half of what they did through the SDK's channels (CHANGELOG).
//!
//! The response is JSON if it is the first message to be sent. If a notification or a question comes first, or the call
//! takes long, the response is an SSE stream. A client that disconnects does not cancel its call, except in the newest
//! revision.

use std::borrow::Cow;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use rmcp::ErrorData;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CancelledNotificationParam, ClientCapabilities, ErrorCode,
    ProtocolVersion, RequestId, ServerJsonRpcMessage,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use wieldy_core::{Caller, Executor, NoteId};

use super::call::{self, CallResult};
use super::http_endpoint::{Endpoint, HttpResponse};
use super::peer::{self, AskMode, PeerChannel, PeerClient};
use super::pending::Refused;
use super::request_options::RequestOptions;
use super::session::{OpenCall, Session};
use super::stream::{EndOnDrop, EventSource, EventStream, StreamReader};
use crate::convert;

/// The time after which a client without a response gets a stream, on which keep-alives can be sent.
const STREAM_AFTER: Duration = Duration::from_secs(5);
pub(crate) const JSON: &str = "application/json";
pub(crate) const EVENTS: &str = "text/event-stream";

/// A client's message, parsed as far as we need it.
pub(crate) enum ClientMessage {
    Call {
        id: RequestId,
        params: Box<CallToolRequestParams>,
    },
    /// The client cancels this request.
    Cancelled(RequestId),
    /// The client's response to one of our requests. No value if it answered with an error.
    Answer {
        id: RequestId,
        value: Option<Value>,
    },
    /// The client begins a session.
    Opening(Box<ClientCapabilities>),
    /// Another message. `names_revision` is true if it names its revision itself.
    Other {
        names_revision: bool,
    },
}

/// The envelope of a JSON-RPC message.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    jsonrpc: Cow<'a, str>,
    #[serde(borrow)]
    method: Option<Cow<'a, str>>,
    id: Option<RequestId>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

impl ClientMessage {
    pub(crate) fn read(body: &[u8]) -> Self {
        let other = Self::Other { names_revision: true };
        let Ok(outside) = serde_json::from_slice::<Envelope<'_>>(body) else { return other };
        if outside.jsonrpc != "2.0" {
            return other;
        }
        let params = outside.params.map_or("{}", RawValue::get);
        let read = match (outside.method.as_deref(), outside.id) {
            (Some("tools/call"), Some(id)) => {
                serde_json::from_str(params).ok().map(|params| Self::Call { id, params: Box::new(params) })
            }
            (Some("notifications/cancelled"), None) => {
                let cancelled = serde_json::from_str::<CancelledNotificationParam>(params).ok();
                cancelled.and_then(|cancelled| cancelled.request_id).map(Self::Cancelled)
            }
            (Some("initialize"), Some(_)) => {
                #[derive(Deserialize)]
                struct Opening {
                    capabilities: ClientCapabilities,
                }
                let opening = serde_json::from_str::<Opening>(params).ok();
                opening.map(|opening| Self::Opening(Box::new(opening.capabilities)))
            }
            (None, Some(id)) if outside.result.is_some() || outside.error.is_some() => {
                let value = outside.result.and_then(|result| serde_json::from_str(result.get()).ok());
                Some(Self::Answer { id, value })
            }
            _ => None,
        };
        read.unwrap_or_else(|| {
            let read = serde_json::from_str::<WithMeta>(params);
            let names_revision = read.is_ok_and(|params| params.meta.contains_key(REVISION));
            Self::Other { names_revision: names_revision || outside.method.as_deref() == Some("server/discover") }
        })
    }

    /// Returns true if the message needs a session, unless the headers name a revision without sessions.
    pub(crate) fn is_of_session(&self) -> bool {
        match self {
            Self::Call { params, .. } => params.meta.as_ref().is_none_or(|meta| !meta.0.0.contains_key(REVISION)),
            Self::Cancelled(_) | Self::Answer { .. } => true,
            Self::Opening(_) => false,
            Self::Other { names_revision } => !names_revision,
        }
    }
}

/// The `_meta` of a request.
#[derive(Deserialize)]
struct WithMeta {
    #[serde(rename = "_meta")]
    meta: serde_json::Map<String, Value>,
}

/// A call that can be answered here, without the SDK.
pub(crate) struct DirectCall {
    id: RequestId,
    params: CallToolRequestParams,
    caller: Arc<Caller>,
    session: Option<Arc<Session>>,
    client: PeerClient,
    stream: Arc<EventStream>,
    /// True if the stream begins with an event that has an id but no data. Clients of older revisions take that for a
    /// broken message.
    wants_greeting: bool,
}

impl DirectCall {
    /// Checks a call. Returns `None` if something about it is unusual, so that rmcp must answer it.
    pub(crate) fn of(
        endpoint: &Endpoint,
        headers: &HeaderMap,
        id: RequestId,
        params: Box<CallToolRequestParams>,
        caller: Arc<Caller>,
        session: Option<Arc<Session>>,
    ) -> Option<Self> {
        let takes = |kind: &str| single_header(headers, ACCEPT.as_str()).is_some_and(|taken| taken.contains(kind));
        let is_json = single_header(headers, CONTENT_TYPE.as_str()).is_some_and(|kind| kind.starts_with(JSON));
        if !(is_json && takes(JSON) && takes(EVENTS)) {
            return None;
        }
        let meta = params.meta.as_ref();
        let version = meta.and_then(|meta| meta.0.0.get(REVISION));
        let (asks, knows_tasks) = match &session {
            Some(session) => {
                if version.is_some() || !has_session_revision(headers) {
                    return None;
                }
                (session.can_ask, session.knows_tasks)
            }
            None => {
                let newest = ProtocolVersion::V_2026_07_28;
                let is_newest = version.and_then(Value::as_str) == Some(newest.as_str())
                    && single_header(headers, VERSION) == Some(newest.as_str())
                    && single_header(headers, "mcp-method") == Some("tools/call")
                    && single_header(headers, "mcp-name") == Some(&*params.name);
                // rmcp must compare header copies of arguments.
                let has_copies = headers.keys().any(|name| name.as_str().starts_with("mcp-param-"));
                if !is_newest || has_copies || endpoint.has_header_params(&params.name) {
                    return None;
                }
                let capabilities = meta.and_then(|meta| meta.client_capabilities())?;
                (peer::can_ask(&capabilities), capabilities.supports_tasks())
            }
        };
        let is_modern = session.is_none();
        let stream = Arc::new(EventStream::new(session.clone()));
        let client = PeerClient {
            is_modern,
            ask_mode: AskMode::of(endpoint.shared.options.ask && asks, is_modern),
            knows_tasks,
            token: meta.and_then(|meta| meta.get_progress_token()),
            options: RequestOptions::read(meta, endpoint.shared.options.priority_max),
            gone: CancellationToken::new(),
            channel: PeerChannel::Stream(Arc::clone(&stream)),
        };
        let caller = session.as_ref().map_or(caller, |session| Arc::clone(&session.caller));
        let wants_greeting = session.is_some()
            && single_header(headers, VERSION).is_some_and(|version| version >= ProtocolVersion::V_2025_11_25.as_str());
        Some(Self { id, params: *params, caller, session, client, stream, wants_greeting })
    }

    /// Runs the call and answers it.
    pub(crate) async fn answer(self, endpoint: &Endpoint) -> HttpResponse {
        let Self { id, params, caller, session, client, stream, wants_greeting } = self;
        let gone = client.gone.clone();
        let requests_max = endpoint.shared.options.requests_max;
        let begun = session.as_ref().map(|session| session.begin(id.clone(), gone.clone(), requests_max));
        let open_call = match begun.transpose() {
            Ok(open_call) => open_call,
            Err(why) => return call_response(&id, Err(ErrorData::invalid_request(why, None)), false),
        };
        let shared = Arc::clone(&endpoint.shared);
        let work = async move {
            let answered = call::answer(&shared, &caller, params, &client).await;
            let is_wanted = open_call.is_none_or(OpenCall::end);
            is_wanted.then(|| encode(&id, answered, client.is_modern))
        };
        // In the newest revision a client cancels a call by disconnecting.
        let cancel_on_drop = session.is_none().then(|| gone.drop_guard());
        let mut work =
            AnswerInProgress { work: Some(Box::pin(work)), cancel_on_drop, tracker: &endpoint.open_requests };
        let answer = tokio::select! {
            biased;
            answer = &mut work => Some(answer),
            () = stream.wait_for_event() => None,
            () = tokio::time::sleep(STREAM_AFTER) => None,
        };
        let (stop, executor) = (endpoint.stop.clone(), endpoint.shared.executor.clone());
        let reader = match answer {
            Some(Some(answer)) if !stream.has_events() => return confirming_response(answer, executor),
            // Messages that came before the response are sent first. A cancelled call gets no response.
            Some(answer) => {
                end(&stream, answer, executor);
                StreamReader::new(Arc::clone(&stream), stop, None)
            }
            None => work.continue_in_task(Arc::clone(&stream), stop, executor),
        };
        if let Some(session) = session {
            session.store_stream(&stream);
        }
        sse_response(if wants_greeting { reader.with_greeting() } else { reader })
    }
}

impl Endpoint {
    /// Returns true if arguments of a tool are copied into headers.
    fn has_header_params(&self, tool: &str) -> bool {
        self.shared.catalogue.visible_to(&self.shared, &Caller::local()).with_header_params(tool).is_some()
    }
}

/// The future that produces a response. If it is dropped, it continues in a task of its own.
struct AnswerInProgress<'a> {
    work: Option<BoxFuture<'static, Option<EncodedAnswer>>>,
    /// Cancels the call when it is dropped.
    cancel_on_drop: Option<DropGuard>,
    tracker: &'a TaskTracker,
}

impl AnswerInProgress<'_> {
    /// Moves the work to a task of its own, which sends the response on the stream.
    fn continue_in_task(
        mut self,
        stream: Arc<EventStream>,
        stop: CancellationToken,
        executor: Executor,
    ) -> StreamReader {
        if let Some(work) = self.work.take() {
            let ending = EndOnDrop(Arc::clone(&stream));
            self.tracker.spawn(async move { end(&ending.0, work.await, executor) });
        }
        StreamReader::new(stream, stop, self.cancel_on_drop.take())
    }
}

impl Future for AnswerInProgress<'_> {
    type Output = Option<EncodedAnswer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = &mut self.work else { return Poll::Ready(None) };
        let poll = work.as_mut().poll(context);
        if poll.is_ready() {
            self.work = None;
            self.cancel_on_drop.take().map(DropGuard::disarm);
        }
        poll
    }
}

impl Drop for AnswerInProgress<'_> {
    fn drop(&mut self) {
        if let (Some(work), Ok(_)) = (self.work.take(), Handle::try_current()) {
            self.tracker.spawn(work);
        }
    }
}

/// A serialized response.
struct EncodedAnswer {
    status: StatusCode,
    message: Bytes,
    /// The notes that the agent gets with it.
    notes: Vec<NoteId>,
}

/// Serializes the response to a request.
fn encode(id: &RequestId, answered: CallResult, is_modern: bool) -> EncodedAnswer {
    #[derive(Serialize)]
    struct ResponseEnvelope<'a, R: Serialize> {
        jsonrpc: &'static str,
        id: &'a RequestId,
        #[serde(skip_serializing_if = "Option::is_none")]
        result: Option<R>,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<ErrorData>,
    }
    fn message<R: Serialize>(id: &RequestId, result: Option<R>, error: Option<ErrorData>) -> Bytes {
        let whole = ResponseEnvelope { jsonrpc: "2.0", id, result, error };
        serde_json::to_vec(&whole).expect("what MCP's types hold can be written").into()
    }
    let (mut status, mut notes) = (StatusCode::OK, Vec::new());
    let message = match answered {
        Ok(CallToolResponse::Complete(mut result)) => {
            notes = convert::note_ids(&result);
            if !is_modern {
                result.result_type = None;
            }
            message(id, Some(result), None)
        }
        Ok(CallToolResponse::InputRequired(result)) => message(id, Some(result), None),
        Ok(CallToolResponse::Task(result)) => message(id, Some(result), None),
        Ok(_) => message(id, None::<()>, Some(ErrorData::internal_error("the response has an unknown type", None))),
        Err(error) => {
            if is_modern && error.code == ErrorCode::METHOD_NOT_FOUND {
                status = StatusCode::NOT_FOUND;
            }
            message(id, None::<()>, Some(error))
        }
    };
    EncodedAnswer { status, message, notes }
}

/// Ends a stream with the response, if there is one. Its notes count as delivered once it was read.
fn end(stream: &EventStream, answer: Option<EncodedAnswer>, executor: Executor) {
    match answer {
        Some(EncodedAnswer { message, notes, .. }) if !notes.is_empty() => {
            stream.end_with(&message, move || executor.confirm_note_ids(notes));
        }
        answer => stream.end(answer.map(|answer| answer.message).as_ref()),
    }
}

/// Returns the response to a call. Its notes count as delivered once the connection has taken it.
fn confirming_response(answer: EncodedAnswer, executor: Executor) -> HttpResponse {
    let EncodedAnswer { status, message, mut notes } = answer;
    if notes.is_empty() {
        return json_response(EncodedAnswer { status, message, notes });
    }
    let body = Full::new(message).map_frame(move |frame| {
        executor.confirm_note_ids(std::mem::take(&mut notes));
        frame
    });
    respond(status, JSON, body.boxed())
}

/// Returns the response to a call.
pub(crate) fn call_response(id: &RequestId, answered: CallResult, is_modern: bool) -> HttpResponse {
    json_response(encode(id, answered, is_modern))
}

fn json_response(answer: EncodedAnswer) -> HttpResponse {
    respond(answer.status, JSON, Full::new(answer.message).boxed())
}

/// Returns the response to an invalid message.
pub(crate) fn refusal_response(refused: Refused) -> HttpResponse {
    let refused = ServerJsonRpcMessage::from(refused);
    let message = serde_json::to_vec(&refused).expect("what MCP's types hold can be written").into();
    json_response(EncodedAnswer { status: StatusCode::BAD_REQUEST, message, notes: Vec::new() })
}

/// Returns an SSE response.
pub(crate) fn sse_response(source: impl EventSource) -> HttpResponse {
    let events = futures_util::stream::unfold(source, |mut source| async move {
        let event = source.next().await?;
        Some((Ok::<_, Infallible>(Frame::data(event)), source))
    });
    let mut response = respond(StatusCode::OK, EVENTS, BodyExt::boxed(StreamBody::new(events)));
    // Some proxies would buffer the events.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Returns the response to a message that needs none.
pub(crate) fn accepted() -> HttpResponse {
    let mut response = Response::new(Empty::new().boxed());
    *response.status_mut() = StatusCode::ACCEPTED;
    response
}

pub(crate) fn respond(
    status: StatusCode,
    kind: &'static str,
    body: http_body_util::combinators::BoxBody<Bytes, Infallible>,
) -> HttpResponse {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

const VERSION: &str = "mcp-protocol-version";
const REVISION: &str = "io.modelcontextprotocol/protocolVersion";

/// Returns the value of a header that occurs exactly once.
fn single_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut all = headers.get_all(name).iter();
    let value = all.next()?.to_str().ok()?;
    all.next().is_none().then_some(value)
}

/// Returns true if a request is of a revision with sessions.
pub(crate) fn has_session_revision(headers: &HeaderMap) -> bool {
    let is_known = |version: &str| {
        ProtocolVersion::KNOWN_VERSIONS.iter().any(|known| known.as_str() == version && known.has_initialize())
    };
    !headers.contains_key(VERSION) || single_header(headers, VERSION).is_some_and(is_known)
}

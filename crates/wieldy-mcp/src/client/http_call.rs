//! Sends `tools/call` over HTTP without the SDK. The task that runs the call sends the request and reads the response
//! or its event stream itself.
//!
//! The SDK would pass each call through two tasks, four channels and a general message parser. Without them, calls over
//! HTTP cost about half (CHANGELOG; measure with `--example cost_client`). All other messages go through the SDK. So do
//! messages on a call's stream that belong to other requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use rmcp::model::{
    ClientCapabilities, ClientConfig, ClientRequest, Implementation, PingRequest, ProtocolVersion, Tool,
};
use rmcp::service::{Peer, RoleClient};
use rmcp::transport::common::client_side_sse::SseRetryPolicy;
use rmcp::transport::streamable_http_client::StreamableHttpError;
use serde::Serialize;
use serde_json::{Map, Value};
use sse_stream::Sse;
use wieldy_core::Run;

use super::answer::{CallAnswer, ServerMessage};
use super::failure::{CLOSED, Failure};
use super::header_params::HeaderParams;
use super::http_request::Response;
use super::http_transport::{self, HttpTransport, Negotiated, PostResponse};
use super::router::Router;
use super::{http_setup, sse};

/// The id of the first call. The SDK counts from zero and never gets this far.
const FIRST: i64 = 1_000_000_000;
/// Maximum number of resumptions in a row that bring no event, and the longest pause that a server can demand before
/// one.
const IN_VAIN_MAX: usize = 20;
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Sends the calls to one server.
pub(super) struct HttpCalls {
    wire: HttpTransport,
    waiting: Router,
    next: AtomicI64,
    /// The client info and revision that each request carries if there was no handshake.
    introduction: Option<(ProtocolVersion, ClientConfig)>,
    copies: Option<HeaderParams>,
}

impl HttpCalls {
    pub(super) fn new(
        wire: HttpTransport,
        waiting: Router,
        revision: Option<ProtocolVersion>,
        me: ClientConfig,
    ) -> Self {
        let has_copies = revision.as_ref().is_some_and(|revision| *revision >= ProtocolVersion::STANDARD_HEADERS);
        let introduction = revision.filter(|revision| !revision.has_initialize()).map(|revision| (revision, me));
        Self {
            wire,
            waiting,
            next: AtomicI64::new(FIRST),
            introduction,
            copies: has_copies.then(HeaderParams::default),
        }
    }

    /// Learns which arguments of the server's tools are copied into headers.
    pub(super) fn learn(&self, tools: &[Tool]) {
        if let Some(copies) = &self.copies {
            copies.learn(tools);
        }
    }

    /// Calls `another` whenever the SDK has begun a new session.
    pub(super) async fn sessions(&self, another: impl Fn()) {
        self.wire.sessions(another).await;
    }

    /// Returns an id for a call. It is the call's progress token too.
    pub(super) fn number(&self) -> i64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends the call with this id and waits for its response.
    pub(super) async fn call(
        &self,
        number: i64,
        tool: &str,
        arguments: &Map<String, Value>,
        run: &Run,
        sdk: &Peer<RoleClient>,
    ) -> Result<CallAnswer, Failure> {
        let elsewhere = self.waiting.note(number, run);
        tokio::select! {
            biased;
            answer = self.ask(number, tool, arguments, sdk) => answer,
            Ok(answer) = elsewhere => answer,
        }
    }

    /// Sends a call and returns its response. If the server forgot the session, the SDK begins a new one and the call
    /// is sent once more.
    async fn ask(
        &self,
        number: i64,
        tool: &str,
        arguments: &Map<String, Value>,
        sdk: &Peer<RoleClient>,
    ) -> Result<CallAnswer, Failure> {
        let request = self.request(number, tool, arguments)?;
        let headers = self.copies.as_ref().map(|copies| copies.headers(tool, arguments)).unwrap_or_default();
        let mut way = self.wire.way();
        let mut heard = self.wire.call(&way, &request, &headers).await;
        if matches!(heard, Err(StreamableHttpError::SessionExpired)) {
            way = Box::pin(self.another(way, sdk)).await?;
            heard = Box::pin(self.wire.call(&way, &request, &headers)).await;
        }
        match heard.map_err(|error| Failure::from(&error))? {
            PostResponse::Whole(body, _) => ServerMessage::read(&body, number).answer(),
            PostResponse::Events(response) => Box::pin(self.listen(response, &way, number)).await,
            PostResponse::Refused { error, complaint, .. } => Err(error.map_or(complaint, Failure::from)),
            PostResponse::Nothing { may_follow: false, complaint } => Err(complaint),
            PostResponse::Nothing { may_follow: true, .. } => {
                self.wire.left(&way).await;
                Err(Failure::transport("its session ended before the answer came"))
            }
        }
    }

    fn request(&self, number: i64, tool: &str, arguments: &Map<String, Value>) -> Result<Bytes, Failure> {
        let introduction = self.introduction.as_ref();
        let meta = CallMeta {
            revision: introduction.map(|(revision, _)| revision),
            client: introduction.map(|(_, me)| &me.client_info),
            capabilities: introduction.map(|(_, me)| &me.capabilities),
            progress_token: number,
        };
        let params = CallParams { meta, name: tool, arguments };
        let request = CallMessage { jsonrpc: "2.0", id: number, method: "tools/call", params };
        let request = serde_json::to_vec(&request).map_err(|error| Failure::protocol(error.to_string()))?;
        Ok(request.into())
    }

    /// Has the SDK begin a new session. It does so with its next message, a ping.
    async fn another(&self, forgotten: Arc<Negotiated>, sdk: &Peer<RoleClient>) -> Result<Arc<Negotiated>, Failure> {
        let now = self.wire.way();
        if !Arc::ptr_eq(&now, &forgotten) {
            return Ok(now);
        }
        HttpTransport::forget(&forgotten);
        let ping = PingRequest { method: Default::default(), extensions: Default::default() };
        let pinged = sdk.send_request(ClientRequest::PingRequest(ping)).await;
        let now = self.wire.way();
        // The result of the ping does not matter.
        match (Arc::ptr_eq(&now, &forgotten), pinged) {
            (false, _) => Ok(now),
            (true, Err(error)) => Err(match error.into() {
                // The SDK's error is the server's response to the new handshake. It refused that handshake.
                Failure::Protocol { message, .. } => Failure::Forgotten(message),
                failure => failure,
            }),
            (true, Ok(_)) => Err(Failure::unreached("it has forgotten the session")),
        }
    }

    /// Waits for the response on an event stream. A stream that breaks is resumed if its events have ids.
    async fn listen(&self, response: Response, way: &Negotiated, number: i64) -> Result<CallAnswer, Failure> {
        let (mut enough, mut place) = (response.body().enough(), StreamPosition::default());
        let mut stream = Box::pin(http_transport::events(response));
        loop {
            let event = match stream.next().await {
                Some(Ok(event)) => event,
                Some(Err(error)) if sse::is_too_large(&error) => return Err(Failure::transport(sse::TOO_LARGE)),
                broken => {
                    let response = self.resume(way, &mut place, broken.is_none()).await;
                    let response = response.ok_or_else(|| Failure::transport(CLOSED))?;
                    enough = response.body().enough();
                    stream = Box::pin(http_transport::events(response));
                    continue;
                }
            };
            place.in_vain = 0;
            let Some(data) = place.note(event) else { continue };
            match ServerMessage::read(data.as_bytes(), number) {
                ServerMessage::Answer(answer) => {
                    // The connection goes back to the pool once the server has ended the stream.
                    enough.store(true, Ordering::Relaxed);
                    return answer;
                }
                ServerMessage::Other(message) => self.waiting.overhear(*message).await,
                ServerMessage::Unknown => {}
            }
        }
    }

    /// Resumes a stream that broke or that the server ended for now. Returns `None` if it cannot be resumed.
    async fn resume(&self, way: &Negotiated, place: &mut StreamPosition, has_ended: bool) -> Option<Response> {
        place.in_vain += 1;
        let last = place.last.as_deref().filter(|_| place.in_vain <= IN_VAIN_MAX)?;
        let patience = http_setup::resume();
        let mut wait = if has_ended { place.retry.take().or_else(|| patience.retry(0)) } else { None };
        for times in 1.. {
            tokio::time::sleep(wait.unwrap_or_default()).await;
            match self.wire.resume(way, last).await {
                Ok(response) => return Some(response),
                // The server would refuse again.
                Err(
                    StreamableHttpError::ServerDoesNotSupportSse
                    | StreamableHttpError::AuthRequired(_)
                    | StreamableHttpError::InsufficientScope(_),
                ) => return None,
                Err(_) => wait = patience.retry(times).max(place.retry),
            }
        }
        None
    }
}

/// The position in an event stream.
#[derive(Default)]
struct StreamPosition {
    /// The id of the last event that had one.
    last: Option<String>,
    /// The pause that the server asked for before a resumption.
    retry: Option<Duration>,
    /// The number of resumptions since the last event.
    in_vain: usize,
}

impl StreamPosition {
    /// Records an event. Returns its data if it is a message.
    fn note(&mut self, event: Sse) -> Option<String> {
        self.retry = event.retry.map(|wait| Duration::from_millis(wait).min(RETRY_MAX)).or(self.retry);
        self.last = event.id.or_else(|| self.last.take());
        event.data.filter(|_| matches!(event.event.as_deref(), None | Some("" | "message")))
    }
}

#[derive(Serialize)]
struct CallMessage<'a> {
    jsonrpc: &'static str,
    id: i64,
    method: &'static str,
    params: CallParams<'a>,
}

#[derive(Serialize)]
struct CallParams<'a> {
    #[serde(rename = "_meta")]
    meta: CallMeta<'a>,
    name: &'a str,
    arguments: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct CallMeta<'a> {
    #[serde(rename = "io.modelcontextprotocol/protocolVersion", skip_serializing_if = "Option::is_none")]
    revision: Option<&'a ProtocolVersion>,
    #[serde(rename = "io.modelcontextprotocol/clientInfo", skip_serializing_if = "Option::is_none")]
    client: Option<&'a Implementation>,
    #[serde(rename = "io.modelcontextprotocol/clientCapabilities", skip_serializing_if = "Option::is_none")]
    capabilities: Option<&'a ClientCapabilities>,
    #[serde(rename = "progressToken")]
    progress_token: i64,
}

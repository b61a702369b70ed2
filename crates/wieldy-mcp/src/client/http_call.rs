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
const FIRST_ID: i64 = 1_000_000_000;
/// Maximum number of resumptions in a row that bring no event, and the longest pause that a server can demand before
/// one.
const EMPTY_RESUMES_MAX: usize = 20;
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Sends the calls to one server.
pub(super) struct HttpCalls {
    http: HttpTransport,
    router: Router,
    next: AtomicI64,
    /// The client info and revision that each request carries if there was no handshake.
    introduction: Option<(ProtocolVersion, ClientConfig)>,
    header_params: Option<HeaderParams>,
}

impl HttpCalls {
    pub(super) fn new(
        http: HttpTransport,
        router: Router,
        revision: Option<ProtocolVersion>,
        me: ClientConfig,
    ) -> Self {
        let has_header_params =
            revision.as_ref().is_some_and(|revision| *revision >= ProtocolVersion::STANDARD_HEADERS);
        let introduction = revision.filter(|revision| !revision.has_initialize()).map(|revision| (revision, me));
        Self {
            http,
            router,
            next: AtomicI64::new(FIRST_ID),
            introduction,
            header_params: has_header_params.then(HeaderParams::default),
        }
    }

    /// Learns which arguments of the server's tools are copied into headers.
    pub(super) fn learn(&self, tools: &[Tool]) {
        if let Some(params) = &self.header_params {
            params.learn(tools);
        }
    }

    /// Calls `on_new` whenever the SDK has begun a new session.
    pub(super) async fn watch_sessions(&self, on_new: impl Fn()) {
        self.http.watch_sessions(on_new).await;
    }

    /// Returns an id for a call. It is the call's progress token too.
    pub(super) fn next_id(&self) -> i64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends the call with this id and waits for its response.
    pub(super) async fn call(
        &self,
        id: i64,
        wanted: WantedCall<'_>,
        run: &Run,
        sdk: &Peer<RoleClient>,
    ) -> Result<CallAnswer, Failure> {
        let elsewhere = self.router.register(id, run);
        tokio::select! {
            biased;
            answer = self.send(id, wanted, sdk) => answer,
            Ok(answer) = elsewhere => answer,
        }
    }

    /// Sends a call and returns its response. If the server forgot the session, the SDK begins a new one and the call
    /// is sent once more.
    async fn send(
        &self,
        id: i64,
        wanted @ (tool, arguments, _): WantedCall<'_>,
        sdk: &Peer<RoleClient>,
    ) -> Result<CallAnswer, Failure> {
        let request = self.request(id, wanted)?;
        let headers = self.header_params.as_ref().map(|params| params.headers(tool, arguments)).unwrap_or_default();
        let mut negotiated = self.http.negotiated();
        let mut response = self.http.call(&negotiated, &request, &headers).await;
        if matches!(response, Err(StreamableHttpError::SessionExpired)) {
            negotiated = Box::pin(self.renew_session(negotiated, sdk)).await?;
            response = Box::pin(self.http.call(&negotiated, &request, &headers)).await;
        }
        match response.map_err(|error| Failure::from(&error))? {
            PostResponse::Json(body, _) => ServerMessage::read(&body, id).answer(),
            PostResponse::Events(response) => Box::pin(self.read_stream(response, &negotiated, id)).await,
            PostResponse::Refused { error, complaint, .. } => Err(error.map_or(complaint, Failure::from)),
            PostResponse::NoAnswer { may_follow: false, complaint } => Err(complaint),
            PostResponse::NoAnswer { may_follow: true, .. } => {
                self.http.wait_for_successor(&negotiated).await;
                Err(Failure::transport("its session ended before the answer came"))
            }
        }
    }

    fn request(&self, id: i64, (name, arguments, more): WantedCall<'_>) -> Result<Bytes, Failure> {
        let introduction = self.introduction.as_ref();
        let meta = CallMeta {
            revision: introduction.map(|(revision, _)| revision),
            client: introduction.map(|(_, me)| &me.client_info),
            capabilities: introduction.map(|(_, me)| &me.capabilities),
            progress_token: id,
            more,
        };
        let params = CallParams { meta, name, arguments };
        let request = CallMessage { jsonrpc: "2.0", id, method: "tools/call", params };
        let request = serde_json::to_vec(&request).map_err(|error| Failure::protocol(error.to_string()))?;
        Ok(request.into())
    }

    /// Has the SDK begin a new session. It does so with its next message, a ping.
    async fn renew_session(
        &self,
        forgotten: Arc<Negotiated>,
        sdk: &Peer<RoleClient>,
    ) -> Result<Arc<Negotiated>, Failure> {
        let now = self.http.negotiated();
        if !Arc::ptr_eq(&now, &forgotten) {
            return Ok(now);
        }
        HttpTransport::mark_forgotten(&forgotten);
        let ping = PingRequest { method: Default::default(), extensions: Default::default() };
        let pinged = sdk.send_request(ClientRequest::PingRequest(ping)).await;
        let now = self.http.negotiated();
        // The result of the ping does not matter.
        match (Arc::ptr_eq(&now, &forgotten), pinged) {
            (false, _) => Ok(now),
            (true, Err(error)) => Err(match error.into() {
                // The SDK's error is the server's response to the new handshake. It refused that handshake.
                Failure::Protocol { message, .. } => Failure::Forgotten(message),
                failure => failure,
            }),
            (true, Ok(_)) => Err(Failure::unreached("it does not know the session any more")),
        }
    }

    /// Waits for the response on an event stream. A stream that breaks is resumed if its events have ids.
    async fn read_stream(&self, response: Response, negotiated: &Negotiated, id: i64) -> Result<CallAnswer, Failure> {
        let (mut skip_rest, mut position) = (response.body().skip_rest_flag(), StreamPosition::default());
        let mut stream = Box::pin(http_transport::events(response));
        loop {
            let event = match stream.next().await {
                Some(Ok(event)) => event,
                Some(Err(error)) if sse::is_too_large(&error) => return Err(Failure::transport(sse::TOO_LARGE)),
                broken => {
                    let response = self.resume(negotiated, &mut position, broken.is_none()).await;
                    let response = response.ok_or_else(|| Failure::transport(CLOSED))?;
                    skip_rest = response.body().skip_rest_flag();
                    stream = Box::pin(http_transport::events(response));
                    continue;
                }
            };
            position.empty_resumes = 0;
            let Some(data) = position.record(event) else { continue };
            match ServerMessage::read(data.as_bytes(), id) {
                ServerMessage::Answer(answer) => {
                    // The connection goes back to the pool once the server has ended the stream.
                    skip_rest.store(true, Ordering::Relaxed);
                    return answer;
                }
                ServerMessage::Other(message) => self.router.route(*message).await,
                ServerMessage::Unknown => {}
            }
        }
    }

    /// Resumes a stream that broke or that the server ended for now. Returns `None` if it cannot be resumed.
    async fn resume(
        &self,
        negotiated: &Negotiated,
        position: &mut StreamPosition,
        has_ended: bool,
    ) -> Option<Response> {
        position.empty_resumes += 1;
        let last = position.last.as_deref().filter(|_| position.empty_resumes <= EMPTY_RESUMES_MAX)?;
        let backoff = http_setup::resume_backoff();
        let mut wait = if has_ended { position.retry.take().or_else(|| backoff.retry(0)) } else { None };
        for times in 1.. {
            tokio::time::sleep(wait.unwrap_or_default()).await;
            match self.http.resume(negotiated, last).await {
                Ok(response) => return Some(response),
                // The server would refuse again.
                Err(
                    StreamableHttpError::ServerDoesNotSupportSse
                    | StreamableHttpError::AuthRequired(_)
                    | StreamableHttpError::InsufficientScope(_),
                ) => return None,
                Err(_) => wait = backoff.retry(times).max(position.retry),
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
    empty_resumes: usize,
}

impl StreamPosition {
    /// Records an event. Returns its data if it is a message.
    fn record(&mut self, event: Sse) -> Option<String> {
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
    #[serde(flatten)]
    more: &'a Map<String, Value>,
}

/// A tool's name, the arguments of a call, and further entries of its `_meta`.
type WantedCall<'a> = (&'a str, &'a Map<String, Value>, &'a Map<String, Value>);

//! A call over HTTP, made by whoever needs it: the request, its answer or the stream of its events, and nothing in between. All
//! else that is said to such a server goes through the SDK, and so does all that comes by the stream of a call but is not about it.

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

use super::answer::{Answer, Message};
use super::copies::Copies;
use super::exchange::Response;
use super::failure::{CLOSED, Failure};
use super::watched::Waiting;
use super::wire::{self, Heard, Way, Wire};
use super::{events, http};

/// The number of the first call; the SDK, which begins at zero, never comes so far.
const FIRST: i64 = 1_000_000_000;
/// How often a stream is asked for more that brings nothing, and how long a server can have us wait for that.
const IN_VAIN_MAX: usize = 20;
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The calls to one server.
pub(super) struct Direct {
    wire: Wire,
    waiting: Waiting,
    next: AtomicI64,
    /// What each request says of us where there was no handshake to say it.
    introduction: Option<(ProtocolVersion, ClientConfig)>,
    copies: Option<Copies>,
}

impl Direct {
    pub(super) fn new(wire: Wire, waiting: Waiting, revision: Option<ProtocolVersion>, me: ClientConfig) -> Self {
        let has_copies = revision.as_ref().is_some_and(|revision| *revision >= ProtocolVersion::STANDARD_HEADERS);
        let introduction = revision.filter(|revision| !revision.has_initialize()).map(|revision| (revision, me));
        Self { wire, waiting, next: AtomicI64::new(FIRST), introduction, copies: has_copies.then(Copies::default) }
    }

    /// Learns what the server tells of its tools.
    pub(super) fn learn(&self, tools: &[Tool]) {
        if let Some(copies) = &self.copies {
            copies.learn(tools);
        }
    }

    /// Says whenever another session was begun.
    pub(super) async fn sessions(&self, another: impl Fn()) {
        self.wire.sessions(another).await;
    }

    /// A number for a call; it is the token of its progress too.
    pub(super) fn number(&self) -> i64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes the call of this number and waits for its answer.
    pub(super) async fn call(
        &self,
        number: i64,
        tool: &str,
        arguments: &Map<String, Value>,
        run: &Run,
        sdk: &Peer<RoleClient>,
    ) -> Result<Answer, Failure> {
        let elsewhere = self.waiting.note(number, run);
        tokio::select! {
            biased;
            answer = self.ask(number, tool, arguments, sdk) => answer,
            Ok(answer) = elsewhere => answer,
        }
    }

    /// The answer to the request of a call. In a session that the server forgot it is made once more in another, which the SDK
    /// begins.
    async fn ask(
        &self,
        number: i64,
        tool: &str,
        arguments: &Map<String, Value>,
        sdk: &Peer<RoleClient>,
    ) -> Result<Answer, Failure> {
        let request = self.request(number, tool, arguments)?;
        let headers = self.copies.as_ref().map(|copies| copies.headers(tool, arguments)).unwrap_or_default();
        let mut way = self.wire.way();
        let mut heard = self.wire.call(&way, &request, &headers).await;
        if matches!(heard, Err(StreamableHttpError::SessionExpired)) {
            way = Box::pin(self.another(way, sdk)).await?;
            heard = Box::pin(self.wire.call(&way, &request, &headers)).await;
        }
        match heard.map_err(|error| Failure::from(&error))? {
            Heard::Whole(body, _) => Message::read(&body, number).answer(),
            Heard::Events(response) => Box::pin(self.listen(response, &way, number)).await,
            Heard::Refused { error, complaint, .. } => Err(error.map_or(complaint, Failure::from)),
            Heard::Nothing { may_follow: false, complaint } => Err(complaint),
            Heard::Nothing { may_follow: true, .. } => {
                self.wire.left(&way).await;
                Err(Failure::transport("its session ended before the answer came"))
            }
        }
    }

    fn request(&self, number: i64, tool: &str, arguments: &Map<String, Value>) -> Result<Bytes, Failure> {
        let introduction = self.introduction.as_ref();
        let meta = Meta {
            revision: introduction.map(|(revision, _)| revision),
            client: introduction.map(|(_, me)| &me.client_info),
            capabilities: introduction.map(|(_, me)| &me.capabilities),
            progress_token: number,
        };
        let params = Params { meta, name: tool, arguments };
        let request = Request { jsonrpc: "2.0", id: number, method: "tools/call", params };
        let request = serde_json::to_vec(&request).map_err(|error| Failure::protocol(error.to_string()))?;
        Ok(request.into())
    }

    /// Has the SDK begin another session than the one that was forgotten.
    async fn another(&self, forgotten: Arc<Way>, sdk: &Peer<RoleClient>) -> Result<Arc<Way>, Failure> {
        let now = self.wire.way();
        if !Arc::ptr_eq(&now, &forgotten) {
            return Ok(now);
        }
        Wire::forget(&forgotten);
        let ping = PingRequest { method: Default::default(), extensions: Default::default() };
        let pinged = sdk.send_request(ClientRequest::PingRequest(ping)).await;
        let now = self.wire.way();
        // What the server says to the ping does not matter.
        match (Arc::ptr_eq(&now, &forgotten), pinged) {
            (false, _) => Ok(now),
            (true, Err(error)) => Err(match error.into() {
                // That is what it says to our introduction, of whatever kind.
                Failure::Protocol { message, .. } => Failure::Forgotten(message),
                failure => failure,
            }),
            (true, Ok(_)) => Err(Failure::unreached("it has forgotten the session")),
        }
    }

    /// Waits for the answer among the events of a stream. One that breaks is asked for again where the server said how.
    async fn listen(&self, response: Response, way: &Way, number: i64) -> Result<Answer, Failure> {
        let (mut enough, mut place) = (response.body().enough(), Place::default());
        let mut stream = Box::pin(wire::events(response));
        loop {
            let event = match stream.next().await {
                Some(Ok(event)) => event,
                Some(Err(error)) if events::is_too_large(&error) => return Err(Failure::transport(events::TOO_LARGE)),
                broken => {
                    let response = self.resume(way, &mut place, broken.is_none()).await;
                    let response = response.ok_or_else(|| Failure::transport(CLOSED))?;
                    enough = response.body().enough();
                    stream = Box::pin(wire::events(response));
                    continue;
                }
            };
            place.in_vain = 0;
            let Some(data) = place.note(event) else { continue };
            match Message::read(data.as_bytes(), number) {
                Message::Answer(answer) => {
                    // Its connection can be used again when the server has ended the stream.
                    enough.store(true, Ordering::Relaxed);
                    return answer;
                }
                Message::Other(message) => self.waiting.overhear(*message).await,
                Message::Unknown => {}
            }
        }
    }

    /// What follows on a stream that broke, or that the server ended for now. Nothing where it cannot be had.
    async fn resume(&self, way: &Way, place: &mut Place, has_ended: bool) -> Option<Response> {
        place.in_vain += 1;
        let last = place.last.as_deref().filter(|_| place.in_vain <= IN_VAIN_MAX)?;
        let patience = http::resume();
        let mut wait = if has_ended { place.retry.take().or_else(|| patience.retry(0)) } else { None };
        for times in 1.. {
            tokio::time::sleep(wait.unwrap_or_default()).await;
            match self.wire.resume(way, last).await {
                Ok(response) => return Some(response),
                // Asking again would change nothing.
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

/// Where we are in a stream.
#[derive(Default)]
struct Place {
    /// The last event that had a name.
    last: Option<String>,
    /// How long the server wants to be left alone before it is asked for more.
    retry: Option<Duration>,
    /// How often it was asked for more since anything came.
    in_vain: usize,
}

impl Place {
    /// Notes an event; what it says, if it is a message.
    fn note(&mut self, event: Sse) -> Option<String> {
        self.retry = event.retry.map(|wait| Duration::from_millis(wait).min(RETRY_MAX)).or(self.retry);
        self.last = event.id.or_else(|| self.last.take());
        event.data.filter(|_| matches!(event.event.as_deref(), None | Some("" | "message")))
    }
}

#[derive(Serialize)]
struct Request<'a> {
    jsonrpc: &'static str,
    id: i64,
    method: &'static str,
    params: Params<'a>,
}

#[derive(Serialize)]
struct Params<'a> {
    #[serde(rename = "_meta")]
    meta: Meta<'a>,
    name: &'a str,
    arguments: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct Meta<'a> {
    #[serde(rename = "io.modelcontextprotocol/protocolVersion", skip_serializing_if = "Option::is_none")]
    revision: Option<&'a ProtocolVersion>,
    #[serde(rename = "io.modelcontextprotocol/clientInfo", skip_serializing_if = "Option::is_none")]
    client: Option<&'a Implementation>,
    #[serde(rename = "io.modelcontextprotocol/clientCapabilities", skip_serializing_if = "Option::is_none")]
    capabilities: Option<&'a ClientCapabilities>,
    #[serde(rename = "progressToken")]
    progress_token: i64,
}

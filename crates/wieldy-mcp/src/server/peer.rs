//! The MCP client that a call is made for: its capabilities, its tokens, and the channel to it.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use rmcp::RoleServer;
use rmcp::model::{
    ClientCapabilities, ElicitRequestParams, ElicitResult, ProgressNotificationParam, ProgressToken, ProtocolVersion,
};
use rmcp::service::{Peer, RequestContext};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use wieldy_core::Call;

use super::ServerOptions;
use super::request_options::{RequestOptions, WrongOptions};
use super::stream::EventStream;

/// The way to ask the client's user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskMode {
    /// The user cannot be asked.
    None,
    /// An elicitation request from us.
    Elicitation,
    /// An `input_required` result, after which the client repeats its request.
    InputRequired,
}

/// The MCP client that a call is made for.
pub(crate) struct PeerClient {
    /// True if it speaks revision 2026-07-28 or later.
    pub(crate) is_modern: bool,
    pub(crate) ask_mode: AskMode,
    pub(crate) knows_tasks: bool,
    /// The progress token, if it wants progress.
    pub(crate) token: Option<ProgressToken>,
    /// The options of the request, or the error of its call if one is wrong.
    pub(crate) options: Result<RequestOptions, Box<WrongOptions>>,
    /// Cancelled when the client no longer wants the response.
    pub(crate) gone: CancellationToken,
    pub(crate) channel: PeerChannel,
}

/// The channel for messages before the response.
pub(crate) enum PeerChannel {
    Peer(Peer<RoleServer>),
    Stream(Arc<EventStream>),
}

impl PeerClient {
    /// Returns the client of a request that rmcp received.
    pub(crate) fn of(context: &RequestContext<RoleServer>, options: &ServerOptions) -> Self {
        let is_modern = is_modern(context);
        let capabilities = context.client_capabilities();
        let asks = capabilities.as_ref().is_some_and(can_ask);
        Self {
            is_modern,
            ask_mode: AskMode::of(options.ask && asks, is_modern),
            knows_tasks: capabilities.is_some_and(|client| client.supports_tasks()),
            token: context.meta.get_progress_token(),
            options: RequestOptions::read(Some(&context.meta), options.priority_max),
            gone: context.ct.clone(),
            channel: PeerChannel::Peer(context.peer.clone()),
        }
    }

    /// Adds the objects of the request to a call that is refused.
    pub(crate) fn with_objects(&self, call: Call) -> Call {
        let objects = self.options.as_ref().unwrap_or_else(|wrong| &wrong.objects);
        let RequestOptions { context, metadata, notes, .. } = objects.clone();
        Call { context, metadata, notes, ..call }
    }
}

impl AskMode {
    pub(crate) fn of(asks: bool, is_modern: bool) -> Self {
        match (asks, is_modern) {
            (false, _) => Self::None,
            (true, false) => Self::Elicitation,
            (true, true) => Self::InputRequired,
        }
    }
}

impl PeerChannel {
    /// Sends a progress notification. A client that does not read delays its notifications but not the call.
    pub(crate) fn notify(&self, told: ProgressNotificationParam) -> BoxFuture<'static, ()> {
        match self {
            Self::Peer(peer) => {
                let peer = peer.clone();
                Box::pin(async move {
                    let _ = peer.notify_progress(told).await;
                })
            }
            Self::Stream(stream) => {
                stream.notify("notifications/progress", &told);
                Box::pin(std::future::ready(()))
            }
        }
    }

    /// Asks the client's user. Returns `None` if the user could not be asked.
    pub(crate) fn ask(&self, question: ElicitRequestParams) -> BoxFuture<'static, Option<ElicitResult>> {
        match self {
            Self::Peer(peer) => {
                let peer = peer.clone();
                Box::pin(async move { peer.create_elicitation(question).await.ok() })
            }
            Self::Stream(stream) => {
                let answer = stream.ask("elicitation/create", &question);
                Box::pin(async move { serde_json::from_value(answer.await?).ok() })
            }
        }
    }
}

/// Returns true if a client can show its user a form. An empty elicitation capability means forms. URL mode alone is
/// not enough.
pub(crate) fn can_ask(client: &ClientCapabilities) -> bool {
    client.elicitation.as_ref().is_some_and(|asks| asks.form.is_some() || asks.url.is_none())
}

/// Returns true if the request is of revision 2026-07-28 or later.
pub(crate) fn is_modern(context: &RequestContext<RoleServer>) -> bool {
    let revision = context.meta.0.0.get("io.modelcontextprotocol/protocolVersion").and_then(Value::as_str);
    // Revisions are ISO dates, so comparing the strings compares the dates.
    revision.is_some_and(|revision| revision >= ProtocolVersion::V_2026_07_28.as_str())
}

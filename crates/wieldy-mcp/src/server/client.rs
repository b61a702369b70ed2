//! The client that a call is made for, as far as the call has to know it.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use rmcp::model::{
    ClientCapabilities, ElicitRequestParams, ElicitResult, ProgressNotificationParam, ProgressToken, ProtocolVersion,
    RequestMetaObject,
};
use rmcp::service::{Peer, RequestContext};
use rmcp::{ErrorData, RoleServer};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::stream::Stream;

/// Under this name the `_meta` of a call has its idempotency key.
const META_KEY: &str = "wieldy/idempotency-key";
/// The maximal length of such a key.
const KEY_BYTES_MAX: usize = 512;

/// How the client's user can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Not at all.
    None,
    /// By a request of ours.
    Elicitation,
    /// By an answer that the client comes back from.
    InputRequired,
}

/// The client that a call is made for.
pub(crate) struct Client {
    /// Whether it speaks revision 2026-07-28 or later.
    pub(crate) is_modern: bool,
    pub(crate) way: Way,
    pub(crate) knows_tasks: bool,
    /// Under which token it wants to be told of progress.
    pub(crate) token: Option<ProgressToken>,
    /// The idempotency key that it gave with the request, if it is of the right form.
    pub(crate) key: Result<Option<String>, ErrorData>,
    /// Cancelled when it does not want the answer any more.
    pub(crate) gone: CancellationToken,
    pub(crate) line: Line,
}

/// Where it hears of anything before the answer.
pub(crate) enum Line {
    Peer(Peer<RoleServer>),
    Stream(Arc<Stream>),
}

impl Client {
    /// The client of a request that rmcp took in; its user is asked only if that is wanted here.
    pub(crate) fn of(context: &RequestContext<RoleServer>, may_ask: bool) -> Self {
        let is_modern = is_modern(context);
        let capabilities = context.client_capabilities();
        let asks = capabilities.as_ref().is_some_and(can_ask);
        Self {
            is_modern,
            way: Way::of(may_ask && asks, is_modern),
            knows_tasks: capabilities.is_some_and(|client| client.supports_tasks()),
            token: context.meta.get_progress_token(),
            key: idempotency_key(Some(&context.meta)),
            gone: context.ct.clone(),
            line: Line::Peer(context.peer.clone()),
        }
    }
}

impl Way {
    pub(crate) fn of(asks: bool, is_modern: bool) -> Self {
        match (asks, is_modern) {
            (false, _) => Self::None,
            (true, false) => Self::Elicitation,
            (true, true) => Self::InputRequired,
        }
    }
}

impl Line {
    /// Tells of progress. A client that does not listen holds up what it is told, and not the call.
    pub(crate) fn tell(&self, told: ProgressNotificationParam) -> BoxFuture<'static, ()> {
        match self {
            Self::Peer(peer) => {
                let peer = peer.clone();
                Box::pin(async move {
                    let _ = peer.notify_progress(told).await;
                })
            }
            Self::Stream(stream) => {
                stream.tell("notifications/progress", &told);
                Box::pin(std::future::ready(()))
            }
        }
    }

    /// Puts a question to the client's user. Nothing where nobody could be asked.
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

/// Reads the idempotency key in the `_meta` of a request.
pub(crate) fn idempotency_key(meta: Option<&RequestMetaObject>) -> Result<Option<String>, ErrorData> {
    match meta.and_then(|meta| meta.0.0.get(META_KEY)) {
        None => Ok(None),
        Some(Value::String(key)) if (1..=KEY_BYTES_MAX).contains(&key.len()) => Ok(Some(key.clone())),
        Some(_) => {
            let told = format!("`_meta` has under `{META_KEY}` a text of 1 to {KEY_BYTES_MAX} bytes, or nothing");
            Err(ErrorData::invalid_params(told, None))
        }
    }
}

/// Whether a client can ask its user to agree. One that says no more than that it can ask has forms; pages alone will not do.
pub(crate) fn can_ask(client: &ClientCapabilities) -> bool {
    client.elicitation.as_ref().is_some_and(|asks| asks.form.is_some() || asks.url.is_none())
}

/// Whether the request is of revision 2026-07-28 or later.
pub(crate) fn is_modern(context: &RequestContext<RoleServer>) -> bool {
    let told = context.meta.0.0.get("io.modelcontextprotocol/protocolVersion").and_then(Value::as_str);
    // Revisions are days, and in this form the order of the texts is theirs.
    told.is_some_and(|told| told >= ProtocolVersion::V_2026_07_28.as_str())
}

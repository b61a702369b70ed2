//! An executor as an MCP server: its tools, artifacts and running calls, for clients of every revision of MCP from
//! 2024-11-05 to 2026-07-28.
//!
//! [`Server`] is shared by all connections; `connection` is one of them, and answers what its client asks. `catalogue` has
//! the tools as MCP lists them, `call` makes a call of the executor's from each `tools/call`, `carry` follows it to its end or
//! hands it over, `client` is what it knows of whom it is made for, `ask` puts questions to the client's user, `meta` has the
//! tools that are about tools and calls, `resources` the artifacts. `lines` is the transport over standard input and output
//! (`unanswered` knows what it still owes), `http` the one for the rest of the world, where calls go the straight way (`direct`,
//! with `session` and `stream`; `several` where one request has several messages). No door
//! checks anything: every `tools/call` becomes a [`Call`](wieldy_core::Call), and the executor decides.

mod ask;
mod call;
mod carry;
mod catalogue;
mod client;
mod connection;
mod direct;
mod http;
mod lines;
mod meta;
mod resources;
mod scan;
mod session;
mod several;
mod stream;
mod unanswered;
mod words;

use std::sync::Arc;
use std::time::Duration;

use rmcp::service::{QuitReason, ServerInitializeError, serve_server_with_ct};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use wieldy_core::{Caller, Executor};

use ask::Desk;
use catalogue::Catalogue;
use connection::{Connection, Who};
pub use http::{HttpEndpoint, HttpResponse};
use lines::Lines;
use resources::Recent;

/// Which tools clients are shown. It saves a model's context and protects nothing: what a caller may use is decided by
/// scopes and permissions.
#[derive(Debug, Clone, Default)]
pub struct Expose {
    /// Shows, instead of the tools, three to find, look at and call them.
    pub by_search: bool,
    /// Only tools of these names, where there are any; `*` at the end means all that begin so.
    pub names: Vec<String>,
    /// Only tools of these categories, where there are any.
    pub categories: Vec<String>,
    /// Only tools from these providers, such as `builtin` or `mcp:git`, where there are any.
    pub providers: Vec<String>,
}

/// How an executor is served.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Which tools clients are shown.
    pub expose: Expose,
    /// What clients are told at the beginning, for their model.
    pub instructions: Option<String>,
    /// How long a client waits for an answer: before that, a call that still runs is answered with a handle, and
    /// `result_wait` gives the result later. Never, where absent.
    pub patience: Option<Duration>,
    /// After how long a call becomes a task for a client that knows tasks.
    pub task_after: Duration,
    /// Lists of tools wait until this is cancelled: when the tools of other servers are there, or are no longer waited for.
    pub ready: Option<CancellationToken>,
    /// How many tools or resources are listed at once.
    pub page: usize,
    /// Whether the client's user is asked to confirm calls; otherwise whoever the executor asks.
    pub ask: bool,
    /// How many bytes one message may have.
    pub message_bytes_max: usize,
    /// How many requests of one connection may be open.
    pub requests_max: usize,
    /// How many bytes of an artifact are read at once.
    pub resource_bytes_max: u64,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            expose: Expose::default(),
            instructions: None,
            patience: Some(Duration::from_secs(45)),
            task_after: Duration::from_secs(5),
            ready: None,
            page: 100,
            ask: true,
            message_bytes_max: 16 * 1024 * 1024,
            requests_max: 1024,
            resource_bytes_max: 1024 * 1024,
        }
    }
}

/// Why a connection ended other than by its client's wish.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The client did not begin as MCP wants it.
    #[error("the client did not begin as MCP wants it")]
    Opening(#[source] Box<ServerInitializeError>),
    /// Something in here panicked.
    #[error("the connection's task failed")]
    Task(#[source] tokio::task::JoinError),
}

/// Serves an executor's tools. Cheap to clone; all clones are the same server.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

/// What all connections have in common.
pub(crate) struct Shared {
    pub(crate) executor: Executor,
    pub(crate) options: ServerOptions,
    pub(crate) catalogue: Catalogue,
    pub(crate) desk: Arc<Desk>,
    pub(crate) recent: Recent,
}

impl Server {
    /// Offers what `executor` has.
    pub fn new(executor: Executor, options: ServerOptions) -> Self {
        let shared = Shared {
            executor,
            options,
            catalogue: Catalogue::default(),
            desk: Arc::new(Desk::default()),
            recent: Recent::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Serves one client that writes a message per line, until it closes its end or `stop` is cancelled. The client
    /// calls as `caller`, under the name that it gives itself unless `agent` is told.
    pub async fn serve_lines(
        &self,
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        caller: Caller,
        agent: Option<String>,
        stop: CancellationToken,
    ) -> Result<(), ServeError> {
        let over = CancellationToken::new();
        let lines = Lines::new(reader, writer, &self.shared.options, over.clone());
        let who = Who::Known { caller: Box::new(caller), agent };
        let connection = Connection::new(Arc::clone(&self.shared), who, over);
        let running = match serve_server_with_ct(connection, lines, stop).await {
            Ok(running) => running,
            // A client that leaves before it said anything has not done anything wrong.
            Err(ServerInitializeError::ConnectionClosed(_) | ServerInitializeError::Cancelled) => return Ok(()),
            Err(error) => return Err(ServeError::Opening(Box::new(error))),
        };
        match running.waiting().await {
            Ok(QuitReason::JoinError(error)) | Err(error) => Err(ServeError::Task(error)),
            Ok(_) => Ok(()),
        }
    }
}

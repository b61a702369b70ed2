//! Serves an executor over MCP: its tools, artifacts and running calls, to clients of every revision from 2024-11-05 to
//! 2026-07-28.
//!
//! [`Server`] is shared by all connections, and `handler` handles the requests of one. `catalogue` lists the tools.
//! `call` makes a call of the executor's from each `tools/call`, `follow` follows it to its end or hands it over,
//! `peer` describes the MCP client, `questions` asks that client's user, and `request_options` reads what a
//! request asks for. `batch_tool` makes several calls of one. `meta` has our own tools for tools and
//! calls, `resources` the artifacts, `note_messages` the notes of agents whose time has come. `stdio` is the transport over stdin and stdout, with its pending requests in
//! `pending`. `http_endpoint` is the HTTP transport, where `http_tools_call` answers calls without the SDK, with
//! `session`, `stream` and `batch`. The transports check no permissions: every `tools/call` becomes a
//! [`Call`](wieldy_core::Call), and the executor decides.

mod batch;
mod batch_arguments;
mod batch_tool;
mod call;
mod catalogue;
mod follow;
mod handler;
mod http_endpoint;
mod http_tools_call;
mod meta;
mod note_messages;
mod peer;
mod pending;
mod progress;
mod questions;
mod request_options;
mod resources;
mod scan;
mod session;
mod stdio;
mod stream;
mod words;

use std::sync::Arc;
use std::time::Duration;

use rmcp::service::{QuitReason, ServerInitializeError, serve_server_with_ct};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use wieldy_core::{Caller, Executor, Priority};

use batch_tool::RunningBatches;
use catalogue::Catalogue;
use handler::{CallerSource, ConnectionHandler};
pub use http_endpoint::{HttpEndpoint, HttpResponse};
use questions::PendingQuestions;
use resources::RecentArtifacts;
use stdio::StdioTransport;

/// The tools that clients are shown. This saves a model's context and protects nothing: scopes and permissions decide
/// which tools a caller may use.
#[derive(Debug, Clone, Default)]
pub struct Expose {
    /// True to list three tools that search, describe and call tools, in place of the tools.
    pub by_search: bool,
    /// If not empty, only tools of these names. A name that ends in `*` is a prefix.
    pub names: Vec<String>,
    /// If not empty, only tools of these categories.
    pub categories: Vec<String>,
    /// If not empty, only tools of these providers, such as `builtin` or `mcp:git`.
    pub providers: Vec<String>,
}

/// The calls that the tool `batch` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BatchCalls {
    /// There is no such tool.
    Off,
    /// Only calls that cannot change anything: a client allows and denies a call by its tool's name, and does not see
    /// the calls within a batch.
    #[default]
    ReadOnly,
    /// All calls.
    All,
}

/// The options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The tools that clients are shown.
    pub expose: Expose,
    /// Instructions for the client's model, sent in the handshake.
    pub instructions: Option<String>,
    /// The time after which a running call is answered with a handle, so that the client does not give up.
    /// `result_wait` returns the result later. `None` for never.
    pub patience: Option<Duration>,
    /// The time after which a call becomes a task, for clients that know tasks.
    pub task_after: Duration,
    /// Tool lists wait until this is cancelled: when the tools of other servers are registered, or are no longer waited
    /// for.
    pub ready: Option<CancellationToken>,
    /// The page size of lists.
    pub page: usize,
    /// True to ask the client's user to confirm calls. Otherwise the executor's own confirmer is asked.
    pub ask: bool,
    /// The highest priority that a request may ask for.
    pub priority_max: Priority,
    /// The calls that the tool `batch` takes.
    pub batch: BatchCalls,
    /// Maximum number of calls in one use of the tool `batch` by a caller without a plan.
    pub batch_calls_max: usize,
    /// Maximum size of one message from a client.
    pub message_bytes_max: usize,
    /// Maximum number of open requests of one connection.
    pub requests_max: usize,
    /// Maximum number of bytes of an artifact in one response.
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
            priority_max: Priority::NORMAL,
            batch: BatchCalls::default(),
            batch_calls_max: 100,
            message_bytes_max: 16 * 1024 * 1024,
            requests_max: 1024,
            resource_bytes_max: 1024 * 1024,
        }
    }
}

/// The reason why a connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The client's handshake was invalid.
    #[error("the client's MCP handshake was invalid")]
    Opening(#[source] Box<ServerInitializeError>),
    /// The connection's task panicked.
    #[error("the connection's task failed")]
    Task(#[source] tokio::task::JoinError),
}

/// Serves an executor's tools. Cheap to clone; all clones are the same server.
#[derive(Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

/// The state that all connections share.
pub(crate) struct Shared {
    pub(crate) executor: Executor,
    pub(crate) options: ServerOptions,
    pub(crate) catalogue: Catalogue,
    pub(crate) questions: Arc<PendingQuestions>,
    pub(crate) recent: RecentArtifacts,
    pub(crate) batches: RunningBatches,
}

impl Server {
    /// Serves this executor.
    pub fn new(executor: Executor, options: ServerOptions) -> Self {
        let shared = Shared {
            executor,
            options,
            catalogue: Catalogue::default(),
            questions: Arc::new(PendingQuestions::default()),
            recent: RecentArtifacts::default(),
            batches: RunningBatches::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Serves one client over lines (stdio) until it closes its end or `stop` is cancelled. The client calls as
    /// `caller`, under its own name unless `agent` is set.
    pub async fn serve_lines(
        &self,
        reader: impl AsyncRead + Send + Unpin + 'static,
        writer: impl AsyncWrite + Send + Unpin + 'static,
        caller: Caller,
        agent: Option<String>,
        stop: CancellationToken,
    ) -> Result<(), ServeError> {
        let over = CancellationToken::new();
        let lines = StdioTransport::new(reader, writer, &self.shared, over.clone());
        let who = CallerSource::Known { caller: Box::new(caller), agent };
        let connection = ConnectionHandler::new(Arc::clone(&self.shared), who, over);
        let running = match serve_server_with_ct(connection, lines, stop).await {
            Ok(running) => running,
            // A client that disconnects before the handshake is no error.
            Err(ServerInitializeError::ConnectionClosed(_) | ServerInitializeError::Cancelled) => return Ok(()),
            Err(error) => return Err(ServeError::Opening(Box::new(error))),
        };
        match running.waiting().await {
            Ok(QuitReason::JoinError(error)) | Err(error) => Err(ServeError::Task(error)),
            Ok(_) => Ok(()),
        }
    }
}

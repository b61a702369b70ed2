//! One connection to a server, over which many calls go at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rmcp::ClientHandler;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CallToolResult, CancelTaskParams, ClientCapabilities, ClientConfig,
    ClientRequest, GetTaskParams, Implementation, PaginatedRequestParams, ProtocolVersion, ServerResult,
    SubscriptionFilter, Task, TaskPayload,
};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt, NotificationContext, PeerRequestOptions,
    RequestHandle, RoleClient, RunningService,
};
use serde_json::{Map, Value};
use tokio::sync::Notify;
use wieldy_core::{CallError, Code, Outcome, Run, RunError, Sandbox};

use super::definition::Definition;
use super::failure::{Failure, first_of};
use super::settings::{Reach, ServerSettings};
use super::watched::{Progress, Watched};
use super::{http, stdio};
use crate::convert;

/// How many tools a server may have, and on how many pages: one that goes on and on has none.
const TOOLS_MAX: usize = 4096;
const PAGES_MAX: usize = 1024;
/// How often a task is asked for, where the server does not say.
const POLL_DEFAULT: Duration = Duration::from_millis(500);
/// The revisions that are tried without a handshake.
const STATELESS: [ProtocolVersion; 1] = [ProtocolVersion::V_2026_07_28];

/// A connection to a server that has introduced itself.
pub(super) struct Connection {
    name: String,
    service: RunningService<RoleClient, Handler>,
    process: Option<stdio::Process>,
    progress: Progress,
    /// Whether the last call was refused for want of a login.
    wants_login: AtomicBool,
}

impl Connection {
    /// Reaches the server and introduces ourselves. One that spoke an old revision last time is spoken to in it at once.
    pub(super) async fn open(
        settings: &ServerSettings,
        sandbox: Option<Arc<dyn Sandbox>>,
        revision: Option<&str>,
        changed: Arc<Notify>,
    ) -> Result<Self, Failure> {
        let is_old = revision.is_some_and(|revision| STATELESS.iter().all(|known| known.as_str() != revision));
        if !is_old {
            let newest = Some(ProtocolVersion::V_2025_11_25);
            let auto = ClientLifecycleMode::Auto { preferred_versions: STATELESS.to_vec(), legacy_version: newest };
            match Self::begin(settings, sandbox.clone(), auto, Arc::clone(&changed)).await {
                Err(Unopened::SpeaksOlder) => {}
                opened => return opened.map_err(Unopened::failure),
            }
        }
        Self::begin(settings, sandbox, ClientLifecycleMode::Initialize, changed).await.map_err(Unopened::failure)
    }

    async fn begin(
        settings: &ServerSettings,
        sandbox: Option<Arc<dyn Sandbox>>,
        lifecycle: ClientLifecycleMode,
        changed: Arc<Notify>,
    ) -> Result<Self, Unopened> {
        let progress = Progress::default();
        let handler = Handler { changed };
        let (service, process) = match &settings.reach {
            Reach::Stdio(program) => {
                let level = program.level;
                let sandbox = sandbox.ok_or_else(|| {
                    Failure::transport(format!("there is no sandbox of the level `{level}` to run it in"))
                })?;
                let (process, inner) = stdio::start(program, sandbox);
                let pipe = Watched::new(inner, progress.clone());
                let opened = handler.serve_with_lifecycle(pipe, lifecycle).await;
                let service = match opened.map_err(Unopened::from) {
                    Ok(service) => service,
                    // How the program ended says more than that nobody answered.
                    Err(Unopened::Failed(failure @ Failure::Transport(_))) => {
                        return Err(ended(&process).await.unwrap_or(failure).into());
                    }
                    Err(unopened) => return Err(unopened),
                };
                (service, Some(process))
            }
            Reach::Http(address) => {
                let inner =
                    http::transport(address, settings.calls_max).map_err(|why| Failure::Configuration(why.into()))?;
                let transport = Watched::new(inner, progress.clone());
                (handler.serve_with_lifecycle(transport, lifecycle).await?, None)
            }
            Reach::Unusable(why) => return Err(Failure::Configuration(why.as_str().into()).into()),
        };
        service.set_response_cache_config(rmcp::service::ClientCacheConfig::disabled()).await;
        Ok(Self { name: settings.name.clone(), service, process, progress, wants_login: AtomicBool::default() })
    }

    /// Whether calls can go over it.
    pub(super) fn is_alive(&self) -> bool {
        !self.service.is_transport_closed() && self.process.as_ref().is_none_or(|process| process.end().is_none())
    }

    /// The revision of MCP that the two ends agreed on.
    pub(super) fn revision(&self) -> Option<String> {
        self.service.peer_info().map(|info| info.protocol_version.to_string())
    }

    /// Who the server says that it is.
    pub(super) fn server(&self) -> Option<String> {
        let info = self.service.peer_info()?;
        info.server_info.as_ref().map(|server| format!("{} {}", server.name, server.version))
    }

    /// Whether the server wants a login before it does anything.
    pub(super) fn wants_login(&self) -> bool {
        self.wants_login.load(Ordering::Relaxed)
    }

    /// Waits for the end of the connection and says how it came.
    pub(super) async fn ended(&self) -> Failure {
        let closed = async {
            while !self.service.is_transport_closed() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        match &self.process {
            Some(process) => Failure::Transport(process.ended().await),
            None => {
                closed.await;
                Failure::transport("the connection is closed")
            }
        }
    }

    /// Waits until a server that tells of changes only to those who ask does so.
    pub(super) async fn listen(&self) {
        let wants_to_be_asked = self.service.peer_info().is_some_and(|info| {
            !info.protocol_version.has_initialize()
                && info.capabilities.tools.as_ref().is_some_and(|tools| tools.list_changed == Some(true))
        });
        if !wants_to_be_asked {
            return;
        }
        let filter = SubscriptionFilter::builder().tools_list_changed().build();
        if let Ok(mut subscription) = self.service.listen(filter).await {
            while let Ok(Some(_)) = subscription.next().await {
                self.service.service().changed.notify_one();
            }
        }
    }

    /// All tools that the server tells of.
    pub(super) async fn tools(&self) -> Result<Vec<Definition>, Failure> {
        let (mut tools, mut cursor) = (Vec::new(), None);
        for _ in 0..PAGES_MAX {
            let page = PaginatedRequestParams::default().with_cursor(cursor);
            let page = self.service.list_tools(Some(page)).await?;
            tools.extend(page.tools.into_iter().map(Definition::told));
            if tools.len() > TOOLS_MAX {
                break;
            }
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(tools);
            }
        }
        Err(Failure::protocol(format!("a list of more than {TOOLS_MAX} tools or {PAGES_MAX} pages")))
    }

    /// Calls a tool. Progress is passed on; should the run have to end, the server is told.
    pub(super) async fn call(&self, tool: &str, arguments: Map<String, Value>, run: &Run) -> Result<Outcome, RunError> {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let mut request = CallToolRequest::new(params);
        request.extensions.insert(run.clone());
        let failed = |failure: Failure| {
            self.wants_login.store(failure == Failure::NeedsLogin, Ordering::Relaxed);
            failure.of_a_call(&self.name)
        };
        let options = PeerRequestOptions::no_options();
        let sent = self.service.send_request_with_option(ClientRequest::CallToolRequest(request), options).await;
        let handle = sent.map_err(|error| failed(error.into()))?;
        let mut sent = Sent { handle: Some(handle), progress: &self.progress };
        let answer = tokio::select! {
            answer = sent.answer() => answer,
            () = run.stop().cancelled() => {
                sent.cancel().await;
                return Ok(Outcome::default());
            }
        };
        sent.forget();
        match answer {
            Ok(ServerResult::CallToolResult(result)) => {
                self.wants_login.store(false, Ordering::Relaxed);
                Ok(outcome(result))
            }
            Ok(ServerResult::CreateTaskResult(created)) => self.follow(created.task, run).await,
            Ok(ServerResult::InputRequiredResult(_)) => {
                Err(failed(Failure::protocol("a question to the user, which nobody here can answer")))
            }
            Ok(_) => Err(failed(Failure::protocol("something that is no result of a tool"))),
            Err(failure) => Err(failed(self.reason(failure).await)),
        }
    }

    /// Asks for a task until it is over.
    async fn follow(&self, mut task: Task, run: &Run) -> Result<Outcome, RunError> {
        let failed = |failure: Failure| failure.of_a_call(&self.name);
        loop {
            let poll = task.poll_interval_ms.map_or(POLL_DEFAULT, Duration::from_millis);
            tokio::select! {
                () = tokio::time::sleep(poll.clamp(Duration::from_millis(10), Duration::from_secs(30))) => {}
                () = run.stop().cancelled() => {
                    let _ = self.service.cancel_task(CancelTaskParams::new(task.task_id)).await;
                    return Ok(Outcome::default());
                }
            }
            let known = self.service.get_task(GetTaskParams::new(task.task_id.clone())).await;
            let known = known.map_err(|error| failed(error.into()))?.task;
            match known.payload {
                TaskPayload::Completed { result } => {
                    let result = serde_json::from_value(Value::Object(result));
                    return result.map(outcome).map_err(|_| failed(Failure::protocol("a task whose result is none")));
                }
                TaskPayload::Failed { error } => {
                    let message = error.get("message").and_then(Value::as_str).unwrap_or("its task failed");
                    return Err(failed(Failure::protocol(message)));
                }
                TaskPayload::Cancelled => return Err(failed(Failure::protocol("its task was cancelled"))),
                TaskPayload::InputRequired { .. } => {
                    let _ = self.service.cancel_task(CancelTaskParams::new(task.task_id)).await;
                    return Err(failed(Failure::protocol("a question to the user, which nobody here can answer")));
                }
                _ => run.progress(None, known.task.status_message.clone().unwrap_or_default()),
            }
            task = known.task;
        }
    }

    /// The reason of a failure: that of the program's end, where it has ended.
    async fn reason(&self, failure: Failure) -> Failure {
        match (&failure, &self.process) {
            (Failure::Transport(_), Some(process)) => ended(process).await.unwrap_or(failure),
            _ => failure,
        }
    }

    /// Ends the connection, and with it the server where it is a program of ours.
    pub(super) async fn close(&self) {
        self.service.cancellation_token().cancel();
        if let Some(process) = &self.process {
            process.farewell().await;
        }
    }
}

/// Why there is no connection.
enum Unopened {
    Failed(Failure),
    /// Asked for its revisions it named none that does without a handshake, or answered something else: some old servers have an
    /// answer to everything, be it an empty one.
    SpeaksOlder,
}

impl Unopened {
    fn failure(self) -> Failure {
        match self {
            Self::Failed(failure) => failure,
            Self::SpeaksOlder => Failure::protocol("something that is no introduction"),
        }
    }
}

impl From<Failure> for Unopened {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<ClientInitializeError> for Unopened {
    fn from(error: ClientInitializeError) -> Self {
        match &error {
            ClientInitializeError::NoCompatibleProtocolVersion { server_supported, .. }
                if server_supported
                    .iter()
                    .any(|version| version.has_initialize() && ProtocolVersion::KNOWN_VERSIONS.contains(version)) =>
            {
                Self::SpeaksOlder
            }
            ClientInitializeError::ExpectedInitResult(_) => Self::SpeaksOlder,
            _ => Self::Failed(error.into()),
        }
    }
}

/// How a program has ended, if it has or is about to.
async fn ended(process: &stdio::Process) -> Option<Failure> {
    let moment = Duration::from_millis(500);
    tokio::time::timeout(moment, process.ended()).await.ok().map(Failure::Transport)
}

/// What a tool answered.
fn outcome(result: CallToolResult) -> Outcome {
    let is_error = result.is_error == Some(true);
    let content = result.content.into_iter().filter_map(convert::content).collect();
    let outcome = Outcome { content, structured: result.structured_content, ..Outcome::default() };
    if !is_error {
        return outcome;
    }
    let said = wieldy_core::Content::text_of(&outcome.content);
    let said = said.trim();
    let message = if said.is_empty() { "the tool says that it failed" } else { said };
    outcome.failed(CallError::new(Code::ToolReportedError, first_of(message)))
}

/// A request whose answer is awaited. Dropped before, it tells the server that nobody waits any more.
struct Sent<'a> {
    handle: Option<RequestHandle<RoleClient>>,
    progress: &'a Progress,
}

impl Sent<'_> {
    async fn answer(&mut self) -> Result<ServerResult, Failure> {
        let Some(handle) = &mut self.handle else { return Err(Failure::transport("the connection is closed")) };
        let answer = (&mut handle.rx).await.map_err(|_| Failure::transport("the connection is closed"))?;
        answer.map_err(Failure::from)
    }

    /// It was answered.
    fn forget(mut self) {
        if let Some(handle) = self.handle.take() {
            self.progress.forget(&handle.progress_token);
        }
    }

    async fn cancel(mut self) {
        if let Some(handle) = self.handle.take() {
            self.progress.forget(&handle.progress_token);
            let _ = handle.cancel(Some("the call was stopped".to_owned())).await;
        }
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.progress.forget(&handle.progress_token);
            tokio::spawn(handle.cancel(Some("nobody waits for the answer any more".to_owned())));
        }
    }
}

/// What servers tell without being asked.
struct Handler {
    changed: Arc<Notify>,
}

impl ClientHandler for Handler {
    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        self.changed.notify_one();
    }

    #[expect(deprecated, reason = "servers of older revisions still send it")]
    async fn on_logging_message(
        &self,
        told: rmcp::model::LoggingMessageNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let data = told.data.to_string();
        tracing::debug!(target: "wieldy::mcp", data = &*wieldy_core::redact::text(first_of(&data)), "a server says");
    }

    fn get_info(&self) -> ClientConfig {
        let capabilities = ClientCapabilities::builder().enable_tasks().build();
        let me = Implementation::new("wieldy", env!("CARGO_PKG_VERSION")).with_title("wieldy");
        ClientConfig::new(capabilities, me).with_protocol_version(ProtocolVersion::V_2025_11_25)
    }
}

//! One MCP session with a server, over stdio or HTTP. Many calls run over it at once.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rmcp::ClientHandler;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, CancelledNotificationParam, ClientCapabilities, ClientConfig,
    ClientRequest, GetMeta, Implementation, PaginatedRequestParams, ProgressToken, ProtocolVersion, RequestId,
    SubscriptionFilter, Task,
};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt, NotificationContext, Peer, PeerRequestOptions,
    RoleClient, RunningService,
};
use serde_json::{Map, Value};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Outcome, Run, RunError, Sandbox};

use super::answer::CallAnswer;
use super::failure::{CLOSED, Failure, first_of};
use super::http_call::HttpCalls;
use super::router::{RoutedTransport, Router};
use super::settings::{Reach, ServerSettings};
use super::tool_definition::ToolDefinition;
use super::{http_setup, stdio_process, upstream_task};

/// Maximum number of tools, and of pages, in a server's tool list. A longer list, or one that never ends, is an error.
const TOOLS_MAX: usize = 4096;
const PAGES_MAX: usize = 1024;
/// Maximum size of all tool definitions of a server.
const TOOLS_BYTES_MAX: usize = 4 << 20;
/// The pause before changes are subscribed to again after a server ended the subscription. It doubles from the minimum
/// to the maximum.
const SUBSCRIBE_AGAIN_MIN: Duration = Duration::from_millis(500);
const SUBSCRIBE_AGAIN_MAX: Duration = Duration::from_secs(60);
/// The revisions that need no `initialize` handshake.
pub(super) const STATELESS: [ProtocolVersion; 1] = [ProtocolVersion::V_2026_07_28];

/// An MCP session with a server, after the handshake.
pub(super) struct UpstreamSession {
    name: String,
    service: RunningService<RoleClient, NotificationHandler>,
    process: Option<stdio_process::Process>,
    router: Router,
    /// The `tools/call` path over HTTP, which bypasses the SDK. `None` over stdio.
    http_calls: Option<HttpCalls>,
    closed: CancellationToken,
    /// Cancelled when the server has forgotten our session and the handshake must be repeated.
    lost: CancellationToken,
    failure_streak: FailureStreak,
}

impl UpstreamSession {
    /// Connects to the server and does the handshake. If the server spoke an older revision last time, that handshake
    /// is tried first.
    pub(super) async fn open(
        settings: &ServerSettings,
        sandbox: Option<Arc<dyn Sandbox>>,
        revision: Option<&str>,
        changed: Arc<Notify>,
    ) -> Result<Self, Failure> {
        let is_old = revision.is_some_and(|revision| STATELESS.iter().all(|known| known.as_str() != revision));
        let begin = async |lifecycle| Self::begin(settings, sandbox.clone(), lifecycle, Arc::clone(&changed)).await;
        if is_old {
            match begin(ClientLifecycleMode::Initialize).await.map_err(OpenError::failure) {
                // The server may have dropped the old revision since then.
                Err(Failure::Protocol { .. }) => {}
                opened => return opened,
            }
        }
        let newest = Some(ProtocolVersion::V_2025_11_25);
        let auto = ClientLifecycleMode::Auto { preferred_versions: STATELESS.to_vec(), legacy_version: newest };
        let opened = match begin(auto).await {
            Err(OpenError::SpeaksOlder) if !is_old => begin(ClientLifecycleMode::Initialize).await,
            opened => opened,
        };
        opened.map_err(OpenError::failure)
    }

    async fn begin(
        settings: &ServerSettings,
        sandbox: Option<Arc<dyn Sandbox>>,
        lifecycle: ClientLifecycleMode,
        changed: Arc<Notify>,
    ) -> Result<Self, OpenError> {
        let handler = NotificationHandler { changed };
        let (service, process, router, http) = match &settings.reach {
            Reach::Stdio(program) => {
                let level = program.level;
                let sandbox = sandbox.ok_or_else(|| {
                    Failure::transport(format!("there is no sandbox of the level `{level}` to run it in"))
                })?;
                let (process, inner) = stdio_process::start(program, sandbox);
                let (pipe, router) = RoutedTransport::new(inner);
                let opened = handler.serve_with_lifecycle(pipe, lifecycle).await;
                let service = match opened.map_err(OpenError::from) {
                    Ok(service) => service,
                    // The program's exit status explains more than a closed connection.
                    Err(OpenError::Failed(failure @ Failure::Transport(_))) => {
                        return Err(exit_failure(&process).await.unwrap_or(failure).into());
                    }
                    Err(unopened) => return Err(unopened),
                };
                (service, Some(process), router, None)
            }
            Reach::Http(address) => {
                let opened = http_setup::transport(address, settings.calls_max);
                let (http, inner) = opened.map_err(|why| Failure::Configuration(why.into()))?;
                let (transport, router) = RoutedTransport::new(inner);
                (handler.serve_with_lifecycle(transport, lifecycle).await?, None, router, Some(http))
            }
            Reach::Unusable(why) => return Err(Failure::Configuration(why.as_str().into()).into()),
        };
        service.set_response_cache_config(rmcp::service::ClientCacheConfig::disabled()).await;
        let http_calls = http.map(|http| {
            let revision = service.peer_info().map(|info| info.protocol_version.clone());
            HttpCalls::new(http, router.clone(), revision, service.service().get_info())
        });
        Ok(Self {
            name: settings.name.clone(),
            service,
            process,
            router,
            http_calls,
            closed: CancellationToken::new(),
            lost: CancellationToken::new(),
            failure_streak: FailureStreak::default(),
        })
    }

    /// Returns true if calls can still be sent.
    pub(super) fn is_alive(&self) -> bool {
        let is_open = !self.service.is_transport_closed() && !self.lost.is_cancelled();
        is_open && self.process.as_ref().is_none_or(|process| process.end().is_none())
    }

    /// Returns the negotiated MCP revision.
    pub(super) fn revision(&self) -> Option<String> {
        self.service.peer_info().map(|info| info.protocol_version.to_string())
    }

    /// Returns the server's own name and version.
    pub(super) fn server_version(&self) -> Option<String> {
        let info = self.service.peer_info()?;
        info.server_info.as_ref().map(|server| format!("{} {}", server.name, server.version))
    }

    /// Returns the failure of the last calls that did not reach the server, and how many failed in a row.
    pub(super) fn failure_streak(&self) -> Option<(Failure, u32)> {
        self.failure_streak.lock().clone()
    }

    /// Waits for the end of the session and returns its cause.
    pub(super) async fn ended(&self) -> Failure {
        let closed = async {
            while !self.service.is_transport_closed() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        match &self.process {
            Some(process) => Failure::Transport(process.ended().await),
            None => tokio::select! {
                () = closed => Failure::transport(CLOSED),
                () = self.lost.cancelled() => Failure::transport("it does not know the session any more"),
            },
        }
    }

    /// Notifies `changed` on every event after which the tools may differ: a new HTTP session, a new subscription, or a
    /// change that a subscription reports. Servers of the newest revision report changes only to subscribers. A
    /// subscription that ends is renewed.
    pub(super) async fn watch_changes(&self) {
        let sessions = async {
            match &self.http_calls {
                Some(http_calls) => http_calls.watch_sessions(|| self.notify_changed()).await,
                None => std::future::pending().await,
            }
        };
        tokio::join!(sessions, self.subscribe());
    }

    /// Subscribes to tool list changes and renews the subscription until the server refuses it.
    async fn subscribe(&self) {
        let has_subscriptions = self.service.peer_info().is_some_and(|info| {
            !info.protocol_version.has_initialize()
                && info.capabilities.tools.as_ref().is_some_and(|tools| tools.list_changed == Some(true))
        });
        if !has_subscriptions {
            return;
        }
        let mut patience = SUBSCRIBE_AGAIN_MIN;
        loop {
            let filter = SubscriptionFilter::builder().tools_list_changed().build();
            match self.service.listen(filter).await.map_err(Failure::from) {
                Ok(mut subscription) => {
                    let since = Instant::now();
                    // Changes during the gap were not reported.
                    self.notify_changed();
                    while let Ok(Some(_)) = subscription.next().await {
                        self.notify_changed();
                    }
                    if since.elapsed() > SUBSCRIBE_AGAIN_MAX {
                        patience = SUBSCRIBE_AGAIN_MIN;
                    }
                }
                // The server would refuse again.
                Err(Failure::Protocol { code: Some(_), .. }) => return,
                Err(_) => {}
            }
            tokio::time::sleep(patience).await;
            patience = patience.saturating_mul(2).min(SUBSCRIBE_AGAIN_MAX);
        }
    }

    fn notify_changed(&self) {
        self.service.service().changed.notify_one();
    }

    /// Lists all tools of the server.
    pub(super) async fn tools(&self) -> Result<Vec<ToolDefinition>, Failure> {
        let (mut tools, mut cursor, mut bytes) = (Vec::new(), None, 0);
        for _ in 0..PAGES_MAX {
            let page = PaginatedRequestParams::default().with_cursor(cursor);
            let page = self.service.list_tools(Some(page)).await?;
            // The size is bounded because compiling schemas takes far longer than parsing them.
            bytes += serde_json::to_vec(&page.tools).map_or(0, |text| text.len());
            if bytes > TOOLS_BYTES_MAX {
                let told = format!("tool definitions of more than {} MiB in all", TOOLS_BYTES_MAX >> 20);
                return Err(Failure::protocol(told));
            }
            if let Some(http_calls) = &self.http_calls {
                http_calls.learn(&page.tools);
            }
            tools.extend(page.tools.into_iter().map(ToolDefinition::from_sdk));
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

    /// Calls a tool and passes progress on to the run. If the run is stopped, the server gets a cancellation.
    pub(super) async fn call(
        &self,
        tool: &str,
        arguments: &Map<String, Value>,
        meta: Map<String, Value>,
        run: &Run,
    ) -> Result<Outcome, RunError> {
        let Some(http_calls) = &self.http_calls else {
            return Box::pin(self.call_by_the_sdk(tool, arguments, meta, run)).await;
        };
        let id = http_calls.next_id();
        let sent = self.sent_call(RequestId::Number(id), ProgressToken(RequestId::Number(id)));
        let answer = pin!(http_calls.call(id, (tool, arguments, &meta), run, self.service.peer()));
        self.await_answer(sent, answer, run).await
    }

    async fn call_by_the_sdk(
        &self,
        tool: &str,
        arguments: &Map<String, Value>,
        meta: Map<String, Value>,
        run: &Run,
    ) -> Result<Outcome, RunError> {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments.clone());
        let mut request = CallToolRequest::new(params);
        request.extensions.insert(run.clone());
        let (mut request, options) = (ClientRequest::CallToolRequest(request), PeerRequestOptions::no_options());
        request.get_meta_mut().0.0.extend(meta);
        let sent = self.service.send_request_with_option(request, options).await;
        let handle = sent.map_err(|error| self.call_error(error.into()))?;
        let sent = self.sent_call(handle.id, handle.progress_token);
        let answer = pin!(async {
            match handle.rx.await {
                Ok(Ok(result)) => Ok(result.into()),
                Ok(Err(error)) => Err(self.with_exit_status(error.into()).await),
                Err(_) => Err(self.with_exit_status(Failure::transport(CLOSED)).await),
            }
        });
        self.await_answer(sent, answer, run).await
    }

    /// Waits for the response of a call that was sent, or cancels the call when the run stops.
    async fn await_answer(
        &self,
        sent: SentCall<'_>,
        mut answer: Pin<&mut impl Future<Output = Result<CallAnswer, Failure>>>,
        run: &Run,
    ) -> Result<Outcome, RunError> {
        let answer = tokio::select! {
            answer = &mut answer => answer,
            () = run.stop().cancelled() => {
                // The response stream stays open until the cancellation was sent.
                Box::pin(sent.cancel()).await;
                return Ok(Outcome::default());
            }
            () = self.closed.cancelled() => Err(Failure::transport(CLOSED)),
        };
        sent.disarm();
        match answer {
            Ok(CallAnswer::Outcome(outcome)) => {
                self.failure_streak.clear();
                Ok(outcome)
            }
            // Boxed, like every rare path, to keep the future of common calls small.
            Ok(CallAnswer::Task(task)) => Box::pin(self.poll_task(task, run)).await,
            Ok(CallAnswer::Question) => {
                Err(self.call_error(Failure::protocol("a question to the user, which wieldy cannot pass on")))
            }
            Ok(CallAnswer::Other) => Err(self.call_error(Failure::protocol("a result that is not a tool result"))),
            Err(failure) => Err(self.call_error(failure)),
        }
    }

    fn sent_call(&self, id: RequestId, token: ProgressToken) -> SentCall<'_> {
        SentCall { sdk: self.service.peer(), router: &self.router, call: Some((id, token)) }
    }

    /// Records a failure and returns the error of the call.
    fn call_error(&self, failure: Failure) -> RunError {
        self.record_failure(&failure);
        failure.error_of_sent_call(&self.name)
    }

    /// Records a failure. Marks the session as lost if the failure shows that the server forgot it.
    fn record_failure(&self, failure: &Failure) {
        self.failure_streak.record(failure);
        if failure.ends_the_connection() {
            self.lost.cancel();
        }
    }

    /// Polls the task that the server made of a call until it is over.
    async fn poll_task(&self, task: Task, run: &Run) -> Result<Outcome, RunError> {
        match upstream_task::follow(task, self.service.peer(), run, &self.closed).await {
            Ok(outcome) => {
                self.failure_streak.clear();
                Ok(outcome)
            }
            Err(failure) => {
                let failure = self.with_exit_status(failure).await;
                self.record_failure(&failure);
                Err(failure.of_a_task(&self.name))
            }
        }
    }

    /// Replaces a transport failure by the program's exit status if the program has ended.
    async fn with_exit_status(&self, failure: Failure) -> Failure {
        match (&failure, &self.process) {
            (Failure::Transport(_), Some(process)) => exit_failure(process).await.unwrap_or(failure),
            _ => failure,
        }
    }

    /// Ends the session, and the server too if it is a program that we started.
    pub(super) async fn close(&self) {
        self.closed.cancel();
        self.service.cancellation_token().cancel();
        if let Some(process) = &self.process {
            process.shut_down().await;
        }
    }
}

/// The streak of calls that did not reach a server although the session is open. Over HTTP nothing else reports an
/// outage.
#[derive(Default)]
struct FailureStreak {
    /// True if there is a streak. Successful calls read only this flag and take no lock.
    exists: AtomicBool,
    streak: Mutex<Option<(Failure, u32)>>,
}

impl FailureStreak {
    /// Records how a call failed. A failure that the server itself answered shows that it is reachable, and ends the
    /// streak.
    fn record(&self, failure: &Failure) {
        match failure {
            Failure::Unreached(_) | Failure::Forgotten(_) | Failure::NeedsLogin => {
                let mut streak = self.lock();
                let times = streak.as_ref().map_or(0, |(_, times)| *times);
                *streak = Some((failure.clone(), times.saturating_add(1)));
                self.exists.store(true, Ordering::Release);
            }
            Failure::Protocol { .. } | Failure::Busy { .. } | Failure::Forbidden { .. } => self.clear(),
            Failure::Transport(_) | Failure::Configuration(_) | Failure::Redirected(_) => {}
        }
    }

    /// Ends the streak after a call reached the server.
    fn clear(&self) {
        if self.exists.load(Ordering::Acquire) {
            self.exists.store(false, Ordering::Release);
            *self.lock() = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Failure, u32)>> {
        self.streak.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The reason why a session could not be opened.
enum OpenError {
    Failed(Failure),
    /// The server offers no revision without a handshake, or answered `server/discover` with something else. Some old
    /// servers answer every method, even with an empty result.
    SpeaksOlder,
}

impl OpenError {
    fn failure(self) -> Failure {
        match self {
            Self::Failed(failure) => failure,
            Self::SpeaksOlder => Failure::protocol("an invalid response to the handshake"),
        }
    }
}

impl From<Failure> for OpenError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<ClientInitializeError> for OpenError {
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

/// Returns the exit status of a program that has ended or ends within half a second.
async fn exit_failure(process: &stdio_process::Process) -> Option<Failure> {
    let moment = Duration::from_millis(500);
    tokio::time::timeout(moment, process.ended()).await.ok().map(Failure::Transport)
}

/// A call that was sent. If it is dropped before its response, it sends a cancellation to the server.
struct SentCall<'a> {
    sdk: &'a Peer<RoleClient>,
    router: &'a Router,
    call: Option<(RequestId, ProgressToken)>,
}

impl SentCall<'_> {
    /// Disarms the cancellation after the response came.
    fn disarm(mut self) {
        self.take();
    }

    async fn cancel(mut self) {
        if let Some(id) = self.take() {
            let _ = self.sdk.notify_cancelled(cancelled(id, "the call was stopped")).await;
        }
    }

    fn take(&mut self) -> Option<RequestId> {
        let (id, token) = self.call.take()?;
        self.router.forget(&token);
        Some(id)
    }
}

impl Drop for SentCall<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.take() {
            let sdk = self.sdk.clone();
            let told = cancelled(id, "the caller no longer waits for the response");
            tokio::spawn(async move { sdk.notify_cancelled(told).await });
        }
    }
}

fn cancelled(id: RequestId, reason: &str) -> CancelledNotificationParam {
    CancelledNotificationParam::new(Some(id), Some(reason.to_owned()))
}

/// The handler of a server's notifications.
struct NotificationHandler {
    changed: Arc<Notify>,
}

impl ClientHandler for NotificationHandler {
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

//! The rmcp handler of one client's connection: answers every MCP request.

use std::sync::{Arc, OnceLock};

#[expect(deprecated, reason = "clients of older revisions ask for it")]
use rmcp::model::SetLevelRequestParams;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CancelTaskParams, CompleteRequestMethod, CompleteRequestParams,
    CompleteResult, DetailedTask, GetTaskParams, GetTaskResult, Implementation, ListPromptsRequestMethod,
    ListPromptsResult, ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, ServerCapabilities, ServerConfig, SubscriptionFilter, TaskPayload,
    Tool, UpdateTaskParams,
};
use rmcp::service::{NotificationContext, RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use tokio_util::sync::{CancellationToken, DropGuard};
use wieldy_core::{Caller, ExecutionId, Status};

use super::Shared;
use super::call::{self, CallResult};
use super::http_endpoint::SESSION;
use super::note_messages::{self, LevelWanted};
use super::peer::{PeerClient, is_modern};
use super::stdio::OversizedCall;
use super::{catalogue, follow, resources};
use crate::convert;

/// Maximum length of a client's own name that is used as the agent's name.
const NAME_CHARS_MAX: usize = 64;

/// The source of a connection's caller.
pub(crate) enum CallerSource {
    /// A caller that the door knows. `agent` replaces the name that the client gives itself.
    Known { caller: Box<Caller>, agent: Option<String> },
    /// The caller that the door authenticated for each request: an `Arc<Caller>` in the HTTP request's extensions.
    OfRequest,
}

/// The handler of one client's connection.
pub(crate) struct ConnectionHandler {
    shared: Arc<Shared>,
    source: CallerSource,
    /// The caller, known from the first request on.
    caller: Arc<OnceLock<Arc<Caller>>>,
    /// The messages about notes that the client wants.
    level: LevelWanted,
    /// Cancelled when the client sends no more requests.
    over: CancellationToken,
    _over_at_the_latest: DropGuard,
}

impl ConnectionHandler {
    pub(crate) fn new(shared: Arc<Shared>, source: CallerSource, over: CancellationToken) -> Self {
        let (caller, level, _over_at_the_latest) = (Arc::default(), LevelWanted::default(), over.clone().drop_guard());
        Self { shared, source, caller, level, _over_at_the_latest, over }
    }

    /// Returns the caller of a request.
    fn caller(&self, context: &RequestContext<RoleServer>) -> Result<Arc<Caller>, ErrorData> {
        if let Some(caller) = self.caller.get() {
            return Ok(Arc::clone(caller));
        }
        let caller = match &self.source {
            CallerSource::Known { caller, agent: Some(agent) } => {
                Arc::new(Caller { agent: agent.clone(), ..(**caller).clone() })
            }
            CallerSource::Known { caller, agent: None } => {
                let agent =
                    context.client_info().map(|client| clean_name(&client.name)).filter(|name| !name.is_empty());
                Arc::new(Caller { agent: agent.unwrap_or_else(|| caller.agent.clone()), ..(**caller).clone() })
            }
            CallerSource::OfRequest => {
                let unknown = || ErrorData::internal_error("the caller of the request is unknown", None);
                let parts = context.extensions.get::<::http::request::Parts>().ok_or_else(unknown)?;
                let caller = parts.extensions.get::<Arc<Caller>>().ok_or_else(unknown)?;
                match parts.headers.get(SESSION).and_then(|session| session.to_str().ok()) {
                    Some(session) => Arc::new(Caller { session: Some(session.to_owned()), ..(**caller).clone() }),
                    None => Arc::clone(caller),
                }
            }
        };
        Ok(Arc::clone(self.caller.get_or_init(|| caller)))
    }

    /// Returns a task of the caller by its id.
    fn task(&self, id: &str, context: &RequestContext<RoleServer>) -> Result<wieldy_core::Task, ErrorData> {
        let caller = self.caller(context)?;
        let found = id.parse::<ExecutionId>().ok().and_then(|id| self.shared.executor.task(id, &caller));
        found.ok_or_else(|| ErrorData::invalid_params("there is no such task", None))
    }
}

impl ServerHandler for ConnectionHandler {
    /// rmcp asks for this over HTTP before a call: the headers that a proxy reads must match the call.
    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.shared.catalogue.visible_to(&self.shared, &Caller::local()).with_header_params(name).cloned()
    }

    fn get_info(&self) -> ServerConfig {
        let mut capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_resources()
            .enable_tasks()
            .build();
        // Required for messages about notes.
        capabilities.logging = Some(rmcp::model::JsonObject::new());
        let mut info = ServerConfig::new(capabilities);
        info.server_info =
            Implementation::new("wieldy", env!("CARGO_PKG_VERSION")).with_title("wieldy, the tool executor");
        info.instructions.clone_from(&self.shared.options.instructions);
        info
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let caller = self.caller(&context)?;
        if let Some(ready) = &self.shared.options.ready {
            ready.cancelled().await;
        }
        let seen = self.shared.catalogue.visible_to(&self.shared, &caller);
        catalogue::listed(&seen.listed, request, self.shared.options.page, is_modern(&context))
    }

    async fn call_tool(&self, params: CallToolRequestParams, context: RequestContext<RoleServer>) -> CallResult {
        let caller = self.caller(&context)?;
        let client = PeerClient::of(&context, &self.shared.options);
        if let Some(oversized) = context.extensions.get::<OversizedCall>() {
            let told = &oversized.message;
            return call::refuse_oversized(&self.shared, &caller, &params.name, told, client.is_modern).await;
        }
        let answered = call::answer(&self.shared, &caller, params, &client).await;
        // Of a connection of lines, the transport says what was written.
        if let (CallerSource::OfRequest, Ok(CallToolResponse::Complete(answer))) = (&self.source, &answered) {
            self.shared.executor.confirm_note_ids(convert::note_ids(answer));
        }
        answered
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let mut changes = self.shared.executor.registry().changes();
        let (over, peer) = (self.over.clone(), context.peer);
        let notes = note_messages::send(
            self.shared.executor.clone(),
            peer.clone(),
            Arc::clone(&self.caller),
            self.level.clone(),
        );
        tokio::spawn(over.clone().run_until_cancelled_owned(notes));
        tokio::spawn(over.run_until_cancelled_owned(async move {
            while changes.changed().await.is_ok() {
                if peer.notify_tool_list_changed().await.is_err() {
                    return;
                }
            }
        }));
    }

    /// A session over HTTP has no level: its messages are few.
    #[expect(deprecated, reason = "clients of older revisions ask for it")]
    async fn set_level(
        &self,
        request: SetLevelRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.level.set(request.level);
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        let mut accepted = SubscriptionFilter::new();
        accepted.tools_list_changed = requested.tools_list_changed;
        Some(accepted)
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.shared.executor.registry().changes();
        let is_wanted = context.accepted().tools_list_changed == Some(true);
        loop {
            tokio::select! {
                () = context.cancelled() => return Ok(()),
                () = self.over.cancelled() => return Ok(()),
                changed = changes.changed(), if is_wanted => {
                    if changed.is_err() || context.sink().notify_tool_list_changed().await.is_err() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// There are no prompts, and nothing to complete. The error keeps clients from asking again.
    async fn list_prompts(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        Err(ErrorData::method_not_found::<ListPromptsRequestMethod>())
    }

    async fn complete(
        &self,
        _request: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        Err(ErrorData::method_not_found::<CompleteRequestMethod>())
    }

    async fn list_resources(
        &self,
        request: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        resources::list(&self.shared, &*self.caller(&context)?, request, is_modern(&context))
    }

    async fn list_resource_templates(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(resources::templates())
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let caller = self.caller(&context)?;
        let mut read = resources::read(&self.shared, caller, request.uri).await?;
        if !is_modern(&context) {
            (read.ttl_ms, read.cache_scope) = (None, None);
        }
        Ok(read.into())
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let task = self.task(&request.task_id, &context)?;
        let changed = task.result.as_ref().map_or(task.id.made_at(), |result| result.timing.completed_at);
        let payload = match task.result {
            None => TaskPayload::Working,
            Some(result) if result.status == Status::Cancelled => TaskPayload::Cancelled,
            Some(result) => match convert::broken(&result) {
                Some(error) => TaskPayload::Failed { error: convert::object(&error) },
                None => {
                    let (result, caller) = (Arc::unwrap_or_clone(result), self.caller(&context)?);
                    let answer = follow::answer_of(&self.shared, &task.tool, &caller, result, is_modern(&context));
                    self.shared.executor.confirm_note_ids(convert::note_ids(&answer));
                    TaskPayload::Completed { result: convert::object(&answer) }
                }
            },
        };
        Ok(GetTaskResult::new(DetailedTask::new(follow::describe_task(&self.shared, task.id, changed), payload)))
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        // A call that became a task has no open question, so there is no input to take.
        self.task(&request.task_id, &context).map(|_| ())
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        context: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let task = self.task(&request.task_id, &context)?;
        let caller = self.caller(&context)?;
        self.shared.executor.cancel(task.id, &caller);
        Ok(())
    }
}

/// Cleans a client's own name for display.
fn clean_name(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect::<String>().trim().to_owned()
}

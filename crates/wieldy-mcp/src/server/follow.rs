//! Follows one running call until there is a response: sends progress, cancels it when the client asks for that, asks
//! its question, and returns a task or a handle if the call outlasts the client's patience.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, OptionFuture};
use jiff::Timestamp;
use rmcp::ErrorData;
use rmcp::model::{CallToolResult, ContentBlock, CreateTaskResult, ElicitResult, MetaObject, Task, TaskStatus};
use serde_json::json;
use tokio::time::Instant;
use wieldy_core::{Begun, Caller, Code, Confirmation, ExecutionId, ToolResult};

use super::Shared;
use super::call::CallResult;
use super::peer::{AskMode, PeerClient};
use super::progress::{Progress, next_notification, send_remaining};
use super::questions::{self, AskedCall};
use crate::convert::{self, META_EXECUTION};

/// The poll interval that clients are told for tasks.
const POLL_MS: u64 = 1000;
/// Maximum length of the output that a handle shows, from its end.
const OUTPUT_CHARS_MAX: usize = 4000;
/// The tool that returns the result of a call that was answered with a handle.
pub(crate) const RESULT_WAIT: &str = "result_wait";
/// The advice for a call that the executor does not know.
const GONE: &str = "results are stored only for a while, and the result of a batch only until its server ends; the \
                    history shows how the calls ended (`history_search`)";
/// The `_meta` key of a handle's call status.
const META_STATUS: &str = "wieldy/status";

/// The request that a call is made for.
pub(crate) struct CallRequest<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) client: &'a PeerClient,
    pub(crate) asked: AskedCall<'a>,
}

/// A running call: polled here, or by a task of the executor.
pub(crate) enum RunningCall {
    Own(Begun),
    Task(ExecutionId, BoxFuture<'static, Option<Arc<ToolResult>>>),
}

/// An event at which following a call pauses or ends.
enum CallStep {
    Ended(Box<ToolResult>),
    Asks(Arc<Confirmation>),
    /// The executor no longer knows the call.
    Forgotten,
}

impl RunningCall {
    /// Returns a call that already runs as a task of the executor.
    pub(crate) fn task(shared: &Shared, id: ExecutionId, caller: &Caller) -> Self {
        let (executor, caller) = (shared.executor.clone(), caller.clone());
        Self::Task(id, Box::pin(async move { executor.wait(id, &caller).await }))
    }

    fn id(&self) -> ExecutionId {
        match self {
            Self::Own(begun) => begun.id(),
            Self::Task(id, _) => *id,
        }
    }

    fn poll_step(&mut self, shared: &Shared, context: &mut Context<'_>) -> Poll<CallStep> {
        let ended = match self {
            Self::Own(begun) => begun.poll_unpin(context).map(Some),
            Self::Task(_, wait) => wait.poll_unpin(context).map(|result| result.map(Arc::unwrap_or_clone)),
        };
        match ended {
            Poll::Ready(Some(result)) => Poll::Ready(CallStep::Ended(Box::new(result))),
            Poll::Ready(None) => Poll::Ready(CallStep::Forgotten),
            // Polling the call creates its question, so check after each poll.
            Poll::Pending => match shared.questions.take_new(self.id()) {
                Some(question) => Poll::Ready(CallStep::Asks(question)),
                None => Poll::Pending,
            },
        }
    }

    async fn into_task(self) {
        if let Self::Own(begun) = self {
            begun.into_task().await;
        }
    }
}

impl CallRequest<'_> {
    /// Follows a call until there is a response.
    pub(crate) async fn follow(self, mut work: RunningCall) -> CallResult {
        // Most calls end at the first poll.
        let first = poll_fn(|context| Poll::Ready(work.poll_step(self.shared, context))).await;
        if let Poll::Ready(CallStep::Ended(result)) = first {
            return self.answer(*result);
        }
        Box::pin(self.wait(work, first)).await
    }

    async fn wait(self, mut work: RunningCall, first: Poll<CallStep>) -> CallResult {
        let (shared, client, id) = (self.shared, self.client, work.id());
        let observer = || shared.executor.observe(id, self.asked.caller);
        let mut progress = client.token.clone().map(|token| Progress::of_call(observer(), token));
        let mut sending: Option<BoxFuture<'static, ()>> = None;
        let mut asking: Option<BoxFuture<'static, Option<ElicitResult>>> = None;
        let patience = if client.knows_tasks { Some(shared.options.task_after) } else { shared.options.patience };
        let mut give_up = patience.map(|patience| Instant::now() + patience);
        let mut is_cancelled = false;
        let mut step = first;
        loop {
            match step {
                Poll::Pending => {}
                Poll::Ready(CallStep::Ended(result)) => {
                    if let Some(progress) = progress {
                        send_remaining(progress, sending, &client.channel).await;
                    }
                    return self.answer(*result);
                }
                Poll::Ready(CallStep::Forgotten) => return Ok(unknown_call(id).into()),
                Poll::Ready(CallStep::Asks(question)) if client.ask_mode == AskMode::InputRequired => {
                    work.into_task().await;
                    return Ok(shared.questions.input_required(&question, &self.asked).into());
                }
                Poll::Ready(CallStep::Asks(question)) => {
                    asking = Some(client.channel.ask(questions::form(&question)));
                }
            }
            // The client's patience does not run while a person is asked.
            let waits_until = give_up.filter(|_| asking.is_none());
            step = tokio::select! {
                biased;
                step = poll_fn(|context| work.poll_step(shared, context)) => Poll::Ready(step),
                () = client.gone.cancelled(), if !is_cancelled => {
                    is_cancelled = true;
                    shared.executor.cancel(id, self.asked.caller);
                    Poll::Pending
                }
                Some(said) = OptionFuture::from(asking.as_mut()) => {
                    asking = None;
                    give_up = patience.map(|patience| Instant::now() + patience);
                    // No answer counts as a refusal.
                    shared.questions.answer(id, said.is_some_and(|said| questions::is_accepted(&said)));
                    Poll::Pending
                }
                () = until(waits_until) => {
                    work.into_task().await;
                    return Ok(if client.knows_tasks { self.as_task(id).into() } else { self.handle(id).into() });
                }
                Some(()) = OptionFuture::from(sending.as_mut()) => {
                    sending = None;
                    Poll::Pending
                }
                Some(told) = next_notification(&mut progress), if sending.is_none() => {
                    sending = Some(client.channel.notify(told));
                    Poll::Pending
                }
            };
        }
    }

    /// Returns the response to a call that has ended. An unknown tool is a protocol error in every revision.
    fn answer(&self, result: ToolResult) -> CallResult {
        match &result.error {
            Some(error) if error.code == Code::ToolNotFound => {
                let suggestion = error.suggestion.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default();
                Err(ErrorData::invalid_params(format!("{}{suggestion}", error.message), Some(json!(error))))
            }
            _ => {
                if let Some(artifact) = result.artifact {
                    self.shared.recent.add(artifact, self.asked.caller);
                }
                Ok(answer_of(self.shared, self.asked.tool, self.asked.caller, result, self.client.is_modern).into())
            }
        }
    }

    /// Returns a task for a client that polls tasks.
    fn as_task(&self, id: ExecutionId) -> CreateTaskResult {
        CreateTaskResult::new(describe_task(self.shared, id, Timestamp::now()))
    }

    /// Returns a handle for a client that knows no tasks and would give up waiting.
    fn handle(&self, id: ExecutionId) -> CallToolResult {
        let AskedCall { tool, caller, .. } = self.asked;
        // A client that knows an output schema refuses other results unless they are errors.
        still_running(self.shared, id, tool, caller, has_schema(self.shared, tool, caller))
    }
}

/// Converts a result. Marks it as an error if the client knows an output schema but the structured content was cut.
pub(crate) fn answer_of(
    shared: &Shared,
    tool: &str,
    caller: &Caller,
    result: ToolResult,
    is_modern: bool,
) -> CallToolResult {
    let has_lost = result.error.is_none() && result.partial && result.structured.is_none();
    let answer = convert::call_result(result, is_modern);
    if has_lost && has_schema(shared, tool, caller) { convert::without_promised(answer) } else { answer }
}

/// Returns true if clients are shown an output schema of the tool.
fn has_schema(shared: &Shared, tool: &str, caller: &Caller) -> bool {
    let found = shared.executor.registry().find(tool, caller);
    found.is_ok_and(|tool| convert::output_schema(tool.spec()).is_some())
}

/// Returns a handle: the call still runs, and its result can be fetched by id.
pub(crate) fn still_running(
    shared: &Shared,
    id: ExecutionId,
    tool: &str,
    caller: &Caller,
    as_error: bool,
) -> CallToolResult {
    let mut text = format!(
        "`{tool}` is still running, as {id}. This is not its result: call `{RESULT_WAIT}` with {{\"id\": \"{id}\"}} to get it."
    );
    if let Some(output) = shared.executor.output_so_far(id, caller).filter(|output| !output.is_empty()) {
        text.push_str("\nOutput so far:\n");
        text.push_str(&end_of(&output));
    }
    let content = vec![ContentBlock::text(text)];
    let mut answer = if as_error { CallToolResult::error(content) } else { CallToolResult::success(content) };
    let mut meta = MetaObject::new();
    meta.insert(META_EXECUTION.into(), id.to_string().into());
    meta.insert(META_STATUS.into(), "running".into());
    answer.meta = Some(meta);
    answer
}

/// Returns the error for a call that the executor does not know.
pub(crate) fn unknown_call(id: ExecutionId) -> CallToolResult {
    let error =
        wieldy_core::CallError::new(Code::InvalidInput, format!("there is no call {id} to wait for")).suggest(GONE);
    convert::refusal(&error)
}

/// Describes a running call as an MCP task.
pub(crate) fn describe_task(shared: &Shared, id: ExecutionId, now: Timestamp) -> Task {
    let ttl = u64::try_from(shared.executor.task_ttl().as_millis()).unwrap_or(u64::MAX);
    Task::new(id.to_string(), TaskStatus::Working, id.made_at().to_string(), now.to_string())
        .with_ttl_ms(ttl)
        .with_poll_interval_ms(POLL_MS)
}

/// Returns the end of a text.
fn end_of(text: &str) -> String {
    let skipped = text.chars().count().saturating_sub(OUTPUT_CHARS_MAX);
    match text.char_indices().nth(skipped) {
        Some((start, _)) if skipped > 0 => format!("… {}", &text[start..]),
        _ => text.to_owned(),
    }
}

pub(crate) async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

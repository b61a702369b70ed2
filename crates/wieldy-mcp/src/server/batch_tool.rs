//! The tool `batch`: several calls in one request. It is our own, holds no slot and is not recorded. Each of its calls
//! is judged, confirmed, counted and recorded by itself. A batch whose calls cannot be read is recorded as one call.
//!
//! A batch runs in the background, and the request follows it. If the batch outlasts the client's patience, or its
//! client repeats the request with a person's answer, another request follows it later: [`RunningBatches`] keeps it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::future::{BoxFuture, OptionFuture};
use rmcp::model::{
    CallToolRequestParams, CallToolResult, ContentBlock, ElicitResult, MetaObject, Tool, ToolAnnotations,
};
use serde_json::{Value, json};
use tokio::sync::{OnceCell, mpsc, watch};
use tokio::time::Instant;
use wieldy_core::{
    Answer, Batch, BatchCall, BatchId, BatchResult, BoxFuture as PortFuture, Call, CallError, Caller, Code,
    Confirmation, Confirmer, Content, DueNote, ExecutionId, Executor, Options,
};

use super::batch_arguments::{BatchArguments, CONCURRENCY_MAX, CallArguments, read};
use super::call::{self, CallResult};
use super::follow::{RESULT_WAIT, until};
use super::meta::MetaTool;
use super::peer::{AskMode, PeerClient};
use super::progress::{Progress, next_notification, send_remaining};
use super::questions::{self, AskedCall, PendingQuestions, ReturnedInput};
use super::request_options::RequestOptions;
use super::{BatchCalls, Shared};
use crate::convert::{self, META_LABELS, META_NOTES};

/// The name of the tool.
pub(crate) const BATCH: &str = "batch";
/// The `_meta` key of the facts about a batch and its results.
const META_BATCH: &str = "wieldy/batch";
/// Maximum number of batches that are kept for later requests.
const BATCHES_MAX: usize = 1000;
/// The hint of an error in the arguments.
pub(super) const FORM: &str =
    r#"write it so: {"calls": [{"id": "a", "tool": "Read", "arguments": {"path": "x.txt"}, "after": []}]}"#;

/// Returns the definition of the tool, if it is offered.
pub(crate) fn definition(takes: BatchCalls) -> Option<Tool> {
    let (what, annotations) = match takes {
        BatchCalls::Off => return None,
        BatchCalls::ReadOnly => (
            "Only tools that change nothing may be called: call any other tool by itself.",
            ToolAnnotations::new().read_only(true).destructive(false).idempotent(true),
        ),
        BatchCalls::All => (
            "Conflicting calls keep their order.",
            ToolAnnotations::new().read_only(false).destructive(true).idempotent(false),
        ),
    };
    let description = format!(
        "Makes several calls at once and returns their results in order. In the arguments of a call, \
         {{\"$result\": \"ID\"}} stands for the text of an earlier call's result. {what}"
    );
    let call = json!({
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "tool": {"type": "string"},
            "arguments": {"type": "object"},
            "after": {"type": "array", "items": {"type": "string"}, "description": "Ids of calls that must succeed before"},
        },
        "required": ["tool"],
        "additionalProperties": false,
    });
    let schema = json!({
        "type": "object",
        "properties": {
            "calls": {"type": "array", "items": call, "minItems": 1},
            "mode": {"enum": ["smart", "parallel", "sequential"]},
            "max_concurrency": {"type": "integer", "minimum": 1, "maximum": CONCURRENCY_MAX},
            "stop_on_error": {"type": "boolean"},
        },
        "required": ["calls"],
        "additionalProperties": false,
    });
    Some(Tool::new(BATCH, description, convert::object(&schema)).with_annotations(annotations.open_world(true)))
}

/// Answers a request for the tool.
pub(crate) async fn answer(
    shared: &Shared,
    caller: &Arc<Caller>,
    mut params: CallToolRequestParams,
    client: &PeerClient,
) -> CallResult {
    let arguments = params.arguments.take().map_or(Value::Null, Value::Object);
    let context = client.options.as_ref().ok().and_then(|options| options.context.clone());
    let asked = AskedCall { caller, tool: BATCH, arguments: &arguments, context: context.as_deref() };
    if params.request_state.is_some() {
        return answer_repeated(shared, client, &asked, &params).await;
    }
    let given = match read(shared, caller, &arguments) {
        Ok(given) => given,
        Err(error) => {
            // The arguments are not recorded: only the tools of the calls know all of their secrets.
            return call::refuse_own(shared, caller, BATCH, Value::Null, error, client).await;
        }
    };
    let begun = match &client.options {
        Ok(options) => begin(shared, caller, given, options, client.ask_mode != AskMode::None),
        Err(wrong) => Err(Refusal { error: wrong.error.clone(), calls: given.calls }),
    };
    match begun {
        Ok(batch) => follow(shared, client, &asked, batch).await,
        Err(Refusal { error, calls }) => {
            // Refusals belong in the history like failures.
            for CallArguments { id, tool, arguments, .. } in calls {
                let call = Call { call_id: id, ..Call::new(tool, arguments).by(Arc::clone(caller)) };
                shared.executor.refuse_unread(client.with_objects(call), error.clone()).await;
            }
            Ok(convert::refusal(&error).into())
        }
    }
}

/// The refusal of a whole batch, with the calls to record.
struct Refusal {
    error: CallError,
    calls: Vec<CallArguments>,
}

/// Begins a batch. Its calls take caller, options and objects from the request, and none from their arguments.
fn begin(
    shared: &Shared,
    caller: &Arc<Caller>,
    given: BatchArguments,
    from_request: &RequestOptions,
    may_ask: bool,
) -> Result<RunningBatch, Refusal> {
    let own = given.calls.iter().find(|call| MetaTool::named(&call.tool, shared, caller).is_some());
    if let Some(CallArguments { tool, .. }) = own {
        let message = format!("`{tool}` cannot be called in a batch: it is a tool of this server's own, about calls");
        let error = CallError::new(Code::ValidationFailed, message);
        let error = error.suggest("call it by itself; none of the calls was run");
        return Err(Refusal { error, calls: given.calls });
    }
    let key = from_request.options.idempotency_key.as_deref();
    if key.is_some() && given.calls.iter().any(|call| call.id.is_none()) {
        let message = "a batch with an idempotency key has a call without an `id`, so that call would have no key";
        let error = CallError::new(Code::ValidationFailed, message).suggest(FORM);
        return Err(Refusal { error, calls: given.calls });
    }
    if !shared.batches.has_room(shared) {
        let error = CallError::new(Code::ConcurrencyLimitExceeded, "too many batches run in the background");
        let error = error.suggest("call again when some of them have ended");
        return Err(Refusal { error, calls: given.calls });
    }
    let (asks, asking) = mpsc::unbounded_channel();
    let confirmer = BatchConfirmer { questions: Arc::clone(&shared.questions), asks };
    let confirmer = may_ask.then(|| Arc::new(confirmer) as Arc<dyn Confirmer>);
    let calls = given.calls.into_iter().map(|CallArguments { id, tool, arguments, after }| {
        let idempotency_key = key.zip(id.as_deref()).map(|(key, id)| format!("{key}/{id}"));
        let call = Call {
            tool: tool.into(),
            arguments: Arc::new(arguments),
            call_id: id,
            caller: Arc::clone(caller),
            options: Options {
                idempotency_key,
                confirmer: confirmer.clone(),
                read_only: shared.options.batch != BatchCalls::All,
                ..from_request.options.clone()
            },
            context: from_request.context.clone(),
            metadata: from_request.metadata.clone(),
            notes: from_request.notes.clone(),
        };
        BatchCall { call, after }
    });
    let batch = Batch {
        calls: calls.collect(),
        caller: Arc::clone(caller),
        mode: given.mode,
        max_concurrency: given.max_concurrency.map(|count| count as usize),
        stop_on_error: given.stop_on_error,
    };
    let count = batch.calls.len();
    let (id, work) = shared.executor.spawn_batch(batch);
    let (sender, ended) = watch::channel(None);
    tokio::spawn(async move {
        sender.send_replace(Some(Arc::new(work.await)));
    });
    Ok(RunningBatch {
        id,
        caller: Arc::clone(caller),
        count,
        ended,
        asking: Arc::new(asking.into()),
        response: Arc::default(),
    })
}

/// Passes questions on to the client's questions, and tells the batch of each.
struct BatchConfirmer {
    questions: Arc<PendingQuestions>,
    asks: mpsc::UnboundedSender<ExecutionId>,
}

impl Confirmer for BatchConfirmer {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> PortFuture<'a, Result<Answer, String>> {
        Box::pin(self.questions.wait_for_answer(question, || _ = self.asks.send(question.execution)))
    }
}

/// A batch in the background. All clones are the same batch.
#[derive(Clone)]
pub(crate) struct RunningBatch {
    id: BatchId,
    caller: Arc<Caller>,
    count: usize,
    ended: watch::Receiver<Option<Arc<Result<BatchResult, CallError>>>>,
    /// The calls that ask a person. The request that follows the batch holds the lock.
    asking: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<ExecutionId>>>,
    /// The response, made once: texts that are cut go to artifacts.
    response: Arc<OnceCell<CallToolResult>>,
}

impl RunningBatch {
    /// Waits for the end. Returns `None` if the batch broke.
    async fn end(&self) -> Option<Arc<Result<BatchResult, CallError>>> {
        let mut ended = self.ended.clone();
        ended.wait_for(Option::is_some).await.ok()?.clone()
    }

    /// Waits for the end, and returns the response.
    pub(crate) async fn response(&self, shared: &Shared) -> CallToolResult {
        let ended = self.end().await;
        let made = self.response.get_or_init(|| async {
            match ended.as_deref() {
                Some(Ok(result)) => response(shared, &self.caller, result),
                Some(Err(error)) => convert::refusal(error),
                None => convert::refusal(&CallError::new(Code::ExecutionError, "the batch broke while it ran")),
            }
        });
        made.await.clone()
    }

    /// Returns the handle of a batch that goes on.
    pub(crate) fn handle(&self) -> CallToolResult {
        let id = self.id;
        let text = format!(
            "`{BATCH}` is still running, as {id}. This is not its result: call `{RESULT_WAIT}` with {{\"id\": \"{id}\"}} to get it."
        );
        let mut answer = CallToolResult::success(vec![ContentBlock::text(text)]);
        let mut meta = MetaObject::new();
        meta.insert(META_BATCH.into(), json!({"batch_id": id, "status": "running"}));
        answer.meta = Some(meta);
        answer
    }
}

/// The batches that later requests may follow.
#[derive(Default)]
pub(crate) struct RunningBatches {
    kept: Mutex<HashMap<BatchId, KeptBatch>>,
}

struct KeptBatch {
    batch: RunningBatch,
    /// The call whose question the client was given last.
    asked: Option<ExecutionId>,
    since: Instant,
}

impl RunningBatches {
    fn lock(&self) -> MutexGuard<'_, HashMap<BatchId, KeptBatch>> {
        self.kept.lock().expect("no code panics while it holds the batches")
    }

    /// Drops the results that are too old, and returns true if another batch can be kept.
    fn has_room(&self, shared: &Shared) -> bool {
        let mut kept = self.lock();
        let is_over = |kept: &KeptBatch| kept.batch.ended.borrow().is_some();
        kept.retain(|_, kept| !is_over(kept) || kept.since.elapsed() < shared.executor.task_ttl());
        if kept.len() < BATCHES_MAX {
            return true;
        }
        let oldest = kept.iter().filter(|(_, kept)| is_over(kept)).min_by_key(|(_, kept)| kept.since);
        let oldest = oldest.map(|(id, _)| *id);
        oldest.is_some_and(|id| kept.remove(&id).is_some())
    }

    fn keep(&self, batch: &RunningBatch, asked: Option<ExecutionId>) {
        let kept = KeptBatch { batch: batch.clone(), asked, since: Instant::now() };
        self.lock().insert(batch.id, kept);
    }

    /// Returns a caller's batch.
    pub(crate) fn get(&self, id: BatchId, caller: &Caller) -> Option<RunningBatch> {
        self.lock().get(&id).map(|kept| kept.batch.clone()).filter(|batch| is_same(&batch.caller, caller))
    }

    /// Returns the caller's batch one of whose calls asked this question.
    fn asked(&self, execution: ExecutionId, caller: &Caller) -> Option<RunningBatch> {
        let kept = self.lock();
        let batch = kept.values().find(|kept| kept.asked == Some(execution)).map(|kept| kept.batch.clone());
        batch.filter(|batch| is_same(&batch.caller, caller))
    }
}

/// Returns true if both callers have the same tenant, agent and user.
fn is_same(one: &Caller, other: &Caller) -> bool {
    (&one.tenant, &one.agent, &one.user) == (&other.tenant, &other.agent, &other.user)
}

/// Cancels a batch when the request that follows it is dropped.
struct CancelOnDrop<'a> {
    executor: &'a Executor,
    batch: Option<&'a RunningBatch>,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(batch) = self.batch {
            self.executor.cancel(batch.id, &batch.caller);
        }
    }
}

/// Follows a batch until there is a response. Its questions are put one at a time, while its other calls go on.
async fn follow(shared: &Shared, client: &PeerClient, asked: &AskedCall<'_>, batch: RunningBatch) -> CallResult {
    let mut until_dropped = CancelOnDrop { executor: &shared.executor, batch: Some(&batch) };
    let observer = || shared.executor.observe_batch(batch.id, &batch.caller);
    let mut progress = client.token.clone().map(|token| Progress::of_batch(observer(), token, batch.count));
    let mut sending: Option<BoxFuture<'static, ()>> = None;
    let mut asking: Option<BoxFuture<'static, (ExecutionId, Option<ElicitResult>)>> = None;
    let mut give_up = shared.options.patience.map(|patience| Instant::now() + patience);
    let mut is_cancelled = false;
    let mut questions = batch.asking.lock().await;
    let mut ended = Box::pin(batch.end());
    loop {
        // The client's patience does not run while a person is asked.
        let waits_until = give_up.filter(|_| asking.is_none());
        tokio::select! {
            biased;
            _ = &mut ended => break,
            () = client.gone.cancelled(), if !is_cancelled => {
                is_cancelled = true;
                shared.executor.cancel(batch.id, &batch.caller);
            }
            Some((execution, said)) = OptionFuture::from(asking.as_mut()) => {
                asking = None;
                give_up = shared.options.patience.map(|patience| Instant::now() + patience);
                // No answer counts as a refusal.
                shared.questions.answer(execution, said.is_some_and(|said| questions::is_accepted(&said)));
            }
            Some(execution) = questions.recv(), if asking.is_none() => {
                // A question that is over is not put any more.
                let Some(question) = shared.questions.take_new(execution) else { continue };
                if client.ask_mode == AskMode::InputRequired {
                    until_dropped.batch = None;
                    shared.batches.keep(&batch, Some(execution));
                    return Ok(shared.questions.input_required(&question, asked).into());
                }
                let answer = client.channel.ask(questions::form(&question));
                let answer = tokio::time::timeout(question.expires_in, answer);
                asking = Some(Box::pin(async move { (execution, answer.await.ok().flatten()) }));
            }
            () = until(waits_until) => {
                until_dropped.batch = None;
                shared.batches.keep(&batch, None);
                return Ok(batch.handle().into());
            }
            Some(()) = OptionFuture::from(sending.as_mut()) => sending = None,
            Some(told) = next_notification(&mut progress), if sending.is_none() => {
                sending = Some(client.channel.notify(told));
            }
        }
    }
    until_dropped.batch = None;
    if let Some(progress) = progress {
        send_remaining(progress, sending, &client.channel).await;
    }
    Ok(batch.response(shared).await.into())
}

/// Goes on with a batch after the answer to one of its questions.
async fn answer_repeated(
    shared: &Shared,
    client: &PeerClient,
    asked: &AskedCall<'_>,
    params: &CallToolRequestParams,
) -> CallResult {
    let sealed = params.request_state.as_deref().unwrap_or_default();
    let execution = match shared.questions.open_returned(sealed, asked, params.input_responses.as_ref())? {
        ReturnedInput::Nothing(question) => return Ok(shared.questions.input_required(&question, asked).into()),
        ReturnedInput::Answered(execution) | ReturnedInput::TooLate(execution) => execution,
    };
    match shared.batches.asked(execution, asked.caller) {
        Some(batch) => follow(shared, client, asked, batch).await,
        None => {
            let error = CallError::new(Code::InvalidInput, "the batch of this question is not known any more");
            Ok(convert::refusal(&error.suggest("look into the history for what came of its calls")).into())
        }
    }
}

/// Converts the result of a batch: one block of text in which the results share one budget, then the other blocks.
fn response(shared: &Shared, caller: &Arc<Caller>, batch: &BatchResult) -> CallToolResult {
    let (summary, id) = (&batch.summary, batch.batch_id);
    let mut text = format!(
        "{} calls in {:.3} s: {} succeeded, {} failed, {} skipped. Each result begins with a line `=== {id}`.\n",
        summary.total,
        summary.duration_ms / 1000.0,
        summary.succeeded,
        summary.failed,
        summary.skipped
    );
    if let Some(note) = summary.note_on_concurrency(caller.plan.as_deref()) {
        text.push_str(&format!("{note}\n"));
    }
    let (mut others, mut facts) = (Vec::new(), Vec::new());
    let texts = shared.executor.share_budget(&batch.results, caller);
    for (place, (result, shared_text)) in batch.results.iter().zip(texts).enumerate() {
        let name = result.call_id.clone().unwrap_or_else(|| format!("#{}", place + 1));
        let header = wieldy_core::shown_in_line(&format!("[{name}] {}: {}", result.tool, result.status));
        text.push_str(&format!("=== {id} {header}\n"));
        if let Some(artifact) = shared_text.artifact {
            shared.recent.add(artifact, caller);
            text.push_str(&format!(
                "[the whole is {artifact}: read it with `GetArtifact`, by `offset` or `pattern`]\n"
            ));
        }
        if let Some(error) = &result.error {
            text.push_str(&format!("{}\n", wieldy_core::present_error(error, &shared_text.text)));
        }
        text.push_str(&shared_text.text);
        for block in result.content.iter().filter(|block| !matches!(block, Content::Text { .. })) {
            others.push(convert::block(block.clone()));
            if !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&format!("[its block follows as number {}]\n", others.len() + 1));
        }
        if !text.ends_with('\n') {
            text.push('\n');
        }
        facts.push(json!({
            "id": result.call_id, "execution": result.execution_id, "tool": result.tool, "provider": result.provider,
            "status": result.status, "error": result.error, "artifact": shared_text.artifact,
            "parallel": result.parallel, "waited_for": result.waited_for, "labels": result.labels,
        }));
    }
    let notes: Vec<DueNote> = batch.results.iter().flat_map(|result| result.notes.clone()).collect();
    if !notes.is_empty() {
        let waiting = batch.results.iter().map(|result| result.notes_waiting).max().unwrap_or_default();
        text.push_str(&format!("=== {id} [notes]\n{}", wieldy_core::present_notes(&notes, waiting)));
    }
    let mut blocks = vec![ContentBlock::text(text)];
    blocks.append(&mut others);
    let is_error = summary.succeeded == 0;
    let mut answer = if is_error { CallToolResult::error(blocks) } else { CallToolResult::success(blocks) };
    let mut meta = MetaObject::new();
    // All calls have the labels of the request.
    if let Some(first) = batch.results.first().filter(|first| !first.labels.is_empty()) {
        meta.insert(META_LABELS.into(), json!(first.labels));
    }
    meta.insert(META_BATCH.into(), json!({"batch_id": id, "summary": summary, "results": facts}));
    if !notes.is_empty() {
        meta.insert(META_NOTES.into(), json!(notes));
    }
    answer.meta = Some(meta);
    answer
}

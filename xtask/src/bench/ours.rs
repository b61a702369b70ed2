//! The same call through the executor with all features on: validation, policy, slots, timeouts, events, journal.

use std::cell::Cell;
use std::future::Future;
use std::hint::black_box;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::Value;
use wieldy_core::{
    AnyTool, Batch, BatchMode, Call, Caller, Content, Executor, Input, Limits, Options, Outcome, Run, RunError,
    SharedTool, ToolResult, ToolSpec,
};

use super::floor::{ARGUMENTS, schema};

/// An executor, and the calls to make with it.
pub(super) struct Ours {
    pub(super) executor: Executor,
    caller: Arc<Caller>,
    /// The names of the tools that are called in turn.
    tools: Vec<String>,
    next: Cell<usize>,
}

#[derive(Serialize)]
struct Answer<'a> {
    content: &'a [Content],
}

impl Ours {
    /// Makes an executor with this many tools that do nothing. Ten of them, evenly spread, are called in turn, so that
    /// two executors differ only in the size of the registry and not in what the processor caches.
    pub(super) fn new(count: usize) -> Self {
        Self::with_tools((0..count).map(|number| NoOp { name: tool_name(number), waits: false }))
    }

    /// Makes an executor with one tool that runs until it is stopped.
    pub(super) fn waiting() -> Self {
        Self::with_tools([NoOp { name: tool_name(0), waits: true }])
    }

    fn with_tools(tools: impl IntoIterator<Item = NoOp>) -> Self {
        let tools: Vec<SharedTool> = tools.into_iter().map(|tool| Arc::new(tool) as SharedTool).collect();
        let count = tools.len();
        let mut builder = Executor::builder().tools(tools);
        // The limits are high enough that no call waits: the benchmark measures the machinery, not a queue.
        builder.limits =
            Limits { calls_running_max: u32::MAX, calls_running_per_agent_max: u32::MAX, ..Limits::default() };
        let executor = builder.build().expect("the tools have good names and schemas");
        let called = count.min(10);
        let tools = (0..called).map(|number| tool_name(number * count / called)).collect();
        Self { executor, caller: Arc::new(Caller::local()), tools, next: Cell::new(0) }
    }

    /// Makes one call, from the model's text to the text of the answer.
    pub(super) async fn call(&self) -> String {
        let result = self.executor.call(self.parsed_call()).await;
        answer(&result)
    }

    /// Makes one call and returns its whole result as the command line prints it.
    pub(super) async fn call_for_result(&self) -> String {
        let result = self.executor.call(self.parsed_call()).await;
        serde_json::to_string(&result).expect("plain data")
    }

    /// Makes one call as a task of the executor.
    pub(super) async fn call_spawned(&self) -> String {
        let id = self.executor.spawn(self.parsed_call());
        let result = self.executor.wait(id, &self.caller).await.expect("it was just begun");
        answer(&result)
    }

    /// Makes one call as a task of the executor, with an observer from the first event to the last.
    pub(super) async fn call_observed(&self) -> String {
        let id = self.executor.spawn(self.parsed_call());
        let mut observer = self.executor.observe(id, &self.caller);
        while let Some(seen) = observer.next().await {
            black_box(seen);
        }
        let result = self.executor.wait(id, &self.caller).await.expect("it was just begun");
        answer(&result)
    }

    /// Makes a hundred calls in one parallel batch, and collects all answers.
    pub(super) async fn hundred_in_a_batch(&self) -> usize {
        let mut batch = Batch::new((0..100).map(|_| self.parsed_call()));
        batch.mode = Some(BatchMode::Parallel);
        batch.max_concurrency = Some(100);
        let result = self.executor.batch(batch).await.expect("the batch has no mistake");
        result.results.iter().map(|result| answer(result).len()).sum()
    }

    /// Makes one call that never ends. The caller decides how long to keep it.
    pub(super) fn endless_call(&self) -> impl Future<Output = ToolResult> + Send + 'static {
        let (executor, call) = (self.executor.clone(), self.parsed_call());
        async move { executor.call(call).await }
    }

    fn parsed_call(&self) -> Call {
        let arguments: Value = serde_json::from_str(black_box(ARGUMENTS)).expect("the arguments are a constant");
        let turn = self.next.replace((self.next.get() + 1) % self.tools.len());
        Call {
            tool: self.tools[turn].as_str().into(),
            arguments: Arc::new(arguments),
            call_id: None,
            caller: Arc::clone(&self.caller),
            options: Options::default(),
            context: None,
            metadata: None,
            notes: None,
        }
    }
}

fn answer(result: &ToolResult) -> String {
    assert!(result.is_success(), "{result:?}");
    serde_json::to_string(&Answer { content: &result.content }).expect("plain data")
}

fn tool_name(number: usize) -> String {
    format!("no_op_{number}")
}

/// A tool that ignores its arguments and either returns at once or never ends.
pub(super) struct NoOp {
    name: String,
    waits: bool,
}

impl NoOp {
    /// Returns the tool with this number.
    pub(super) fn numbered(number: usize) -> Self {
        Self { name: tool_name(number), waits: false }
    }
}

impl AnyTool for NoOp {
    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(&self.name, "Does nothing, quickly").read_only();
        spec.input_schema = schema();
        spec
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async move {
            black_box(input.value());
            if self.waits {
                run.stop().cancelled().await;
            }
            Ok(Outcome::text("ok"))
        })
    }
}

/// Returns a tool that runs until it is stopped.
pub(super) fn waiting() -> impl AnyTool {
    NoOp { name: tool_name(0), waits: true }
}

/// Returns a tool that does nothing.
pub(super) fn no_op() -> impl AnyTool {
    NoOp { name: tool_name(0), waits: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_way_to_call_gives_the_floor_s_answer() {
        let ours = Ours::new(25);
        let expected = super::super::floor::ByHand::new().call().await;
        assert_eq!(ours.call().await, expected);
        assert_eq!(ours.call_spawned().await, expected);
        assert_eq!(ours.call_observed().await, expected);
        assert_eq!(ours.hundred_in_a_batch().await, 100 * expected.len());
        assert!(ours.call_for_result().await.contains("\"status\":\"success\""));
    }
}

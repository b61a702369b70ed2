//! The test world: an executor and its journal, which tests read as a tape.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{
    Call, CallState, Event, ExecutionId, Executor, ExecutorBuilder, Limits, MemoryJournal, SharedTool, ToolResult,
    redact,
};

/// An executor with its journal.
pub struct World {
    /// The executor.
    pub executor: Executor,
    journal: Arc<MemoryJournal>,
}

impl World {
    /// Makes a world with these tools and default settings.
    pub fn new(tools: impl IntoIterator<Item = SharedTool>) -> Self {
        Self::with(tools, |_| {})
    }

    /// Makes a world with these tools and some settings changed.
    pub fn with(tools: impl IntoIterator<Item = SharedTool>, change: impl FnOnce(&mut ExecutorBuilder)) -> Self {
        let journal = Arc::new(MemoryJournal::new(10_000_000));
        let mut builder = Executor::builder().tools(tools);
        builder.journal = Arc::clone(&journal) as _;
        builder.limits = Limits { calls_running_per_agent_max: 1_000, calls_running_max: 1_000, ..Limits::default() };
        change(&mut builder);
        Self { executor: builder.build().expect("test tools are well formed"), journal }
    }

    /// Runs one call by the local user.
    pub async fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.executor.call(Call::new(tool, arguments)).await
    }

    /// Returns all events so far.
    pub fn events(&self) -> Vec<Arc<Event>> {
        self.journal.events()
    }

    /// Returns all events, one per line, without times and ids. Checks that the history of each call is legal, that
    /// each call ended exactly once, and that no slot is taken.
    pub fn tape(&self) -> String {
        self.check();
        let mut names = BTreeMap::<ExecutionId, usize>::new();
        let events = self.events();
        for event in &events {
            if let Some(id) = event.subject.execution {
                let next = names.len() + 1;
                names.entry(id).or_insert(next);
            }
        }
        let several = names.len() > 1;
        let line = |event: &Arc<Event>| {
            let mut data = event.data();
            if let Some(tool) = &event.subject.tool {
                data["tool"] = json!(redact::text(tool));
            }
            strip(&mut data);
            let number = event.subject.execution.map(|id| names[&id]).filter(|_| several);
            let who = match (number, &event.subject.call_id) {
                (_, Some(call_id)) => format!("{call_id} "),
                (Some(number), None) => format!("#{number} "),
                _ => String::new(),
            };
            format!("{who}{} {data}\n", event.body.name())
        };
        events.iter().map(line).collect()
    }

    /// Checks what must hold after every test: legal histories, one end per call, no gap, nothing still running.
    pub fn check(&self) {
        let mut states = BTreeMap::<ExecutionId, CallState>::new();
        for (index, event) in self.events().iter().enumerate() {
            assert_eq!(event.seq, index as u64 + 1, "the history has no gaps");
            if let Some(id) = event.subject.execution {
                let state = states.entry(id).or_default();
                *state = state.apply(&event.body).unwrap_or_else(|error| panic!("{error}"));
            }
        }
        for (id, state) in states {
            assert!(matches!(state, CallState::Closed { .. }), "{id} has not ended: {state:?}");
            assert!(!self.executor.is_executing(id));
        }
        let load = self.executor.load();
        assert_eq!((load.running, load.waiting), (0, 0), "no slot is left");
    }
}

/// Removes values that differ from run to run.
fn strip(value: &mut Value) {
    let volatile = [
        "duration_ms",
        "queued_ms",
        "elapsed_ms",
        "confirmation",
        "digest",
        "previous_hash",
        "current_hash",
        "waited_ms",
    ];
    match value {
        Value::Object(map) => {
            map.retain(|key, value| !volatile.contains(&key.as_str()) && *value != Value::Null && *value != json!({}));
            map.values_mut().for_each(strip);
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => {}
    }
}

/// Waits for work that must end soon, by the real clock or the paused one.
pub async fn bounded<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(3600), work).await.expect("it must end")
}

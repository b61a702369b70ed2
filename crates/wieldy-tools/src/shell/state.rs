//! `GetState`: returns facts about the caller's own session, calls, limits, tasks and processes.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::name::{did_you_mean, near_misses};
use wieldy_core::{Outcome, Provider, Run, RunError, Tool, ToolSpec};

use super::process_tools::describe_state;
use super::processes::Processes;
use crate::files::blocking;

/// A tool that returns facts about the caller's own state.
pub struct GetState(Arc<Processes>);

/// A fact to return.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct GetStateArgs {
    /// The fact, such as `calls.running`, or a group, such as `limits`. Without it, the names of all facts are listed.
    #[schemars(length(min = 1, max = 200))]
    key: Option<String>,
}

impl GetState {
    /// Creates the tool, with the background processes that it reports.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self(processes)
    }
}

/// Returns all facts. The facts of tools may take a while where a workspace has many files.
async fn facts(processes: &Arc<Processes>, run: &Run) -> Result<BTreeMap<String, Value>, RunError> {
    let (processes, run) = (processes.clone(), run.clone());
    blocking(move || {
        let mut facts = run.facts();
        let session = run.caller().session_key();
        let processes = session.map(|session| processes.list(&session)).unwrap_or_default();
        let running = processes.iter().filter(|process| process.is_running()).count();
        facts.insert("processes.running".into(), json!(running));
        for process in processes {
            let (_, state) = describe_state(&process, &process.state());
            facts.insert(format!("processes.{}", process.id), state["state"].clone());
        }
        Ok(facts)
    })
    .await
}

impl Tool for GetState {
    type Args = GetStateArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "GetState",
            "Tells the current state: your session, running and waiting calls, limits, tools whose circuit \
             breaker is open, tasks, background processes, pending notes, the index of the code, and your vaults. \
             Without a key it lists the keys.",
        )
        .read_only()
        .category("state")
        .provider(Provider::Builtin);
        spec.annotations.open_world = false;
        spec
    }

    async fn run(&self, args: GetStateArgs, run: &Run) -> Result<Outcome, RunError> {
        let facts = facts(&self.0, run).await?;
        let Some(key) = args.key else {
            let keys: Vec<&str> = facts.keys().map(String::as_str).collect();
            return Ok(Outcome::text(keys.join("\n")).structured(json!({ "keys": keys })));
        };
        let group = format!("{}.", key.trim_end_matches(".*"));
        let selected: BTreeMap<&str, &Value> = facts
            .iter()
            .filter(|(name, _)| **name == key || name.starts_with(&group))
            .map(|(name, value)| (name.as_str(), value))
            .collect();
        if selected.is_empty() {
            let hint = did_you_mean(&near_misses(&key, facts.keys().map(String::as_str)));
            let hint = hint.unwrap_or_else(|| "call it without a key to list all keys".into());
            return Err(RunError::invalid_input(format!("there is no fact `{key}`")).suggest(hint));
        }
        let lines: Vec<String> = selected.iter().map(|(name, value)| format!("{name}: {}", plain(value))).collect();
        Ok(Outcome::text(lines.join("\n")).structured(json!({ "facts": selected })))
    }
}

/// Writes a text without quotes, and everything else as JSON.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

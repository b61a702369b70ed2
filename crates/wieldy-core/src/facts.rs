//! Facts: the executor's state as a running tool may report it to its caller, limited to the caller's own affairs.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::call::Caller;
use crate::event::CallState;
use crate::flight::Flight;
use crate::registry::ToolFilter;
use crate::run::Run;

/// Maximum number of tasks that are listed one by one.
const TASKS_MAX: usize = 100;

impl Run {
    /// Returns facts about the caller's own session, calls, limits and tasks, by name such as `calls.running`, and the
    /// breakers and further facts of tools that the caller sees.
    pub fn facts(&self) -> BTreeMap<String, Value> {
        let caller = self.caller();
        let mut facts = BTreeMap::from([("session.agent".to_owned(), json!(caller.agent))]);
        let workspace = self.confinement().recorded_workspace().map(|workspace| workspace.to_string());
        let known = [
            ("session.id", &caller.session),
            ("session.tenant", &caller.tenant),
            ("session.user", &caller.user),
            ("session.plan", &caller.plan),
            ("session.workspace", &workspace),
        ];
        facts.extend(known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), json!(value.as_ref()?)))));
        facts.insert("session.isolation".into(), json!(self.level().as_str()));
        let limits = json!(self.confinement().limits);
        for (name, limit) in limits.as_object().into_iter().flatten() {
            facts.insert(format!("limits.{name}"), limit.clone());
        }
        facts.insert("notes.pending".into(), json!(self.notes_pending()));
        let Some(engine) = self.engine() else { return facts };

        let own = engine.flights.unfinished_calls(|flight| is_same(&flight.subject.caller, caller));
        let is_running = |flight: &&std::sync::Arc<Flight>| matches!(flight.state(), CallState::Running { .. });
        let running = own.iter().filter(is_running).count();
        facts.insert("calls.running".into(), json!(running));
        facts.insert("calls.waiting".into(), json!(own.len() - running));
        let mut tasks: Vec<_> = own.iter().filter(|flight| flight.is_task()).collect();
        tasks.sort_unstable_by_key(|task| task.id);
        facts.insert("tasks.running".into(), json!(tasks.len()));
        for task in tasks.into_iter().take(TASKS_MAX) {
            facts.insert(format!("tasks.{}", task.id), json!(task.state().status()));
        }
        let limits = engine.admission.limits();
        facts.insert("limits.calls_running".into(), json!(limits.calls_running_max));
        let slots = engine.agent_slots(caller).min(limits.calls_running_max);
        facts.insert("limits.calls_running_per_agent".into(), json!(slots));
        facts.insert("limits.calls_waiting".into(), json!(limits.calls_waiting_max));
        facts.insert("limits.queue_timeout_ms".into(), json!(limits.queue_timeout.as_millis() as u64));
        facts.insert("limits.timeout_ms".into(), json!(engine.clocks.timeout.as_millis() as u64));
        for (tool, state) in engine.breakers.states() {
            if engine
                .registry
                .find(tool.as_str(), caller)
                .is_ok_and(|tool| engine.policy.check_tool(caller, tool.spec()).is_ok())
            {
                facts.insert(format!("breaker.{tool}"), json!(state));
            }
        }
        for tool in engine.registry.list(caller, &ToolFilter::default()) {
            if engine.policy.check_tool(caller, tool.spec()).is_ok() {
                facts.extend(tool.tool.facts(self));
            }
        }
        facts
    }
}

/// Returns true if both callers have the same tenant, agent and user. The workspace needs no check: an executor has
/// one.
fn is_same(one: &Caller, other: &Caller) -> bool {
    (&one.tenant, &one.agent, &one.user) == (&other.tenant, &other.agent, &other.user)
}

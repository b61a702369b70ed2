//! The severity of an event, and the facts of an event that are not stored but made when it is shown.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Category, Code};
use crate::event::{Body, Event};

/// The severity of an event. The table is the same for events and log lines, see [`Severity::of`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A step that is as it should be.
    Debug,
    /// Something that a reader of few lines wants to know.
    Info,
    /// Someone should look at it.
    Warning,
    /// The engine, the history or a sandbox failed.
    Error,
}

impl Severity {
    /// Returns the severity as written in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    /// Returns the severity of an event by its name and, as far as they matter, its facts.
    pub fn of(name: &str, data: &Value) -> Self {
        match name {
            "tool.call.failure" => Self::of_failure(data["error"]["code"].as_str()),
            "tool.call.confirmation.received" if data["approved"] == false => Self::Warning,
            "tool.call.confirmation.requested" | "tool.call.confirmation.received" => Self::Info,
            "tool.call.timeout" | "tool.call.warning" | "tool.retry.attempt" | "tool.retry.exhausted" => Self::Warning,
            "tool.definition.changed" | "sandbox.violation" | "source.stale" => Self::Warning,
            "tool.call.cancelled" | "tool.retry.success" | "tool.batch.started" | "tool.batch.completed" => Self::Info,
            _ => Self::Debug,
        }
    }

    /// Returns the severity of a failure with this code.
    fn of_failure(code: Option<&str>) -> Self {
        let code = code.and_then(|code| Code::ALL.iter().find(|known| known.as_str() == code));
        match code.map(|code| code.category()) {
            Some(Category::RuntimeError | Category::SandboxError) => Self::Error,
            _ => Self::Warning,
        }
    }
}

/// Returns the constant message of an event: that of its log line.
pub fn event_message(name: &str, data: &Value) -> &'static str {
    match name {
        "tool.call.pending" => "call accepted",
        "tool.call.task" => "call is a task from now on",
        "tool.call.started" => "call started",
        "tool.call.progress" => "call goes on",
        "tool.call.warning" => "call has a warning",
        "tool.call.confirmation.requested" => "confirmation requested",
        "tool.call.confirmation.received" if data["approved"] == false => "confirmation not given",
        "tool.call.confirmation.received" => "confirmation given",
        "tool.call.success" => "call ended",
        "tool.call.failure" => "call failed",
        "tool.call.timeout" => "call timed out",
        "tool.call.cancelled" => "call cancelled",
        "tool.retry.attempt" => "attempt failed, another one follows",
        "tool.retry.success" => "attempt succeeded",
        "tool.retry.exhausted" => "attempt failed, none follows",
        "tool.batch.started" => "batch started",
        "tool.batch.completed" => "batch ended",
        "tool.definition.changed" => "definition changed",
        "sandbox.created" => "sandbox created",
        "sandbox.destroyed" => "sandbox destroyed",
        "sandbox.violation" => "sandbox violation",
        "source.stale" => "source changed",
        "agent.self.notify" | "agent.self.remind" => match data["state"].as_str() {
            Some("due") => "note is due",
            Some("cancelled") => "note cancelled",
            Some("expired") => "note expired",
            _ => "agent left a note",
        },
        "agent.self.delivered" => "note delivered",
        _ => "another event",
    }
}

/// Completes an event's data to be shown: adds `message` and `elapsed_ms`, and to a timeout `clock` and `timeout_ms`.
/// Facts of the event's own with these names stay as they are.
pub fn complete_event_data(name: &str, data: &mut Value, elapsed_ms: f64) {
    let message = event_message(name, data);
    let clock = ["clock", "timeout_ms"].into_iter().filter(|_| name == "tool.call.timeout");
    let clock: Vec<_> = clock.filter_map(|key| Some((key, data["error"]["details"].get(key)?.clone()))).collect();
    let Value::Object(facts) = data else { return };
    // A closing says how long the call took by the engine's own clock.
    let elapsed = facts.get("duration_ms").cloned().unwrap_or_else(|| json!(elapsed_ms));
    for (key, value) in [("message", json!(message)), ("elapsed_ms", elapsed)].into_iter().chain(clock) {
        facts.entry(key).or_insert(value);
    }
}

impl Event {
    /// Returns how serious the event is.
    pub fn severity(&self) -> Severity {
        let error = self.body.closing().and_then(|closing| closing.error.as_ref());
        let mut facts = Map::new();
        if let Some(error) = error {
            facts.insert("error".into(), json!({"code": error.code}));
        }
        if let Body::ConfirmationReceived { approved, .. } = &self.body {
            facts.insert("approved".into(), json!(approved));
        }
        Severity::of(self.body.name(), &facts.into())
    }

    /// Returns the time since the call or batch of the event was accepted, in milliseconds; 0 without one.
    pub(crate) fn elapsed_ms(&self) -> f64 {
        let since = self.subject.opened_at.map(|opened_at| self.at.duration_since(opened_at).as_secs_f64() * 1e3);
        (since.unwrap_or_default().max(0.0) * 1e3).round() / 1e3
    }
}

//! The tools `GetMetrics` and `GetLogs`: statistics, live counters and events of the caller's own calls.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wieldy_core::{ExecutionId, Outcome, Run, RunError, Severity, Tool, ToolSpec};

use crate::events::{CallEvent, EventCursor, RecordedEvent};
use crate::history_tools::{StatsArgs, group_by, own_calls, parse_time, run_query, spec, summary, truncate_line};
use crate::query::Query;
use crate::store::Store;

/// The default and the maximum number of events in one answer.
const LIMIT_DEFAULT: usize = 50;
const LIMIT_MAX: usize = 200;

/// The tool that returns statistics and live counters of calls.
pub(crate) struct GetMetrics(pub(crate) Store);

/// The tool that returns events of calls.
pub(crate) struct GetLogs(pub(crate) Store);

/// Filters for events; all are optional.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct LogsArgs {
    /// Only events of the call with this id.
    execution: Option<String>,
    /// Only events of calls of this session.
    session: Option<String>,
    /// Only events that are at least this serious: `debug` (all, by default), `info`, `warn` or `error`.
    level: Option<Level>,
    /// Only events of calls since a time such as `2026-11-16T08:00:00Z`, or a time back from now such as `2h`.
    since: Option<String>,
    /// Maximum number of events: 50 by default, at most 200.
    #[schemars(range(min = 1, max = 200))]
    limit: Option<usize>,
    /// The cursor of the last answer, to read on.
    #[schemars(length(max = 50))]
    cursor: Option<String>,
}

/// The severity of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

impl Level {
    fn of(event: &RecordedEvent) -> Self {
        match event.severity {
            Severity::Debug => Self::Debug,
            Severity::Info => Self::Info,
            Severity::Warning => Self::Warn,
            Severity::Error => Self::Error,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl Tool for GetMetrics {
    type Args = StatsArgs;

    fn spec(&self) -> ToolSpec {
        spec(
            "GetMetrics",
            "Tells performance metrics of your calls: counts, failures and latency percentiles by tool or day, as \
             `history_stats` does, and live counters of running and waiting calls and of tools whose circuit breaker is \
             open.",
        )
    }

    async fn run(&self, args: StatsArgs, run: &Run) -> Result<Outcome, RunError> {
        let query = Query { tool: args.tool.clone(), since: parse_time(args.since.as_deref())?, ..own_calls(run)? };
        let by = group_by(args.by);
        let stats = run_query(&self.0, move |store| store.stats(&query, by)).await?;
        let is_counter = |name: &str| match (name.strip_prefix("breaker."), &args.tool) {
            (Some(tool), Some(wanted)) => tool == wanted,
            (Some(_), None) => true,
            (None, _) => name.starts_with("calls.") || name == "tasks.running",
        };
        let mut live = run.facts();
        live.retain(|name, _| is_counter(name));
        let mut lines: Vec<String> = stats.iter().map(summary).collect();
        if lines.is_empty() {
            lines.push("[no call fits]".into());
        }
        lines.extend(live.iter().map(|(name, value)| format!("now {name}: {value}")));
        Ok(Outcome::text(lines.join("\n")).structured(json!({ "stats": stats, "live": live })))
    }
}

impl Tool for GetLogs {
    type Args = LogsArgs;

    fn spec(&self) -> ToolSpec {
        spec(
            "GetLogs",
            "Gets the log of your calls: the events of each, such as started, progress, warning, retry, failure, with times \
             and facts. By call, session, level or time; the latest call comes first, its events in their order.",
        )
    }

    async fn run(&self, args: LogsArgs, run: &Run) -> Result<Outcome, RunError> {
        let execution = match args.execution.as_deref().map(str::parse::<ExecutionId>) {
            None => None,
            Some(Ok(id)) => Some(id.to_string()),
            Some(Err(_)) => return Err(RunError::invalid_input("`execution` is not the id of a call")),
        };
        let from =
            args.cursor.as_deref().map(str::parse::<EventCursor>).transpose().map_err(RunError::invalid_input)?;
        let query =
            Query { execution, session: args.session, since: parse_time(args.since.as_deref())?, ..own_calls(run)? };
        let least = args.level.unwrap_or(Level::Debug);
        let limit = args.limit.unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX);
        let wanted = move |event: &RecordedEvent| Level::of(event) >= least;
        let (entries, next) = run_query(&self.0, move |store| store.call_events(&query, from, &wanted, limit)).await?;
        let mut lines: Vec<String> = entries.iter().map(line).collect();
        let events: Vec<Value> = entries.iter().map(structured).collect();
        let next = next.map(|next| next.to_string());
        match &next {
            Some(next) => lines.push(format!("[more: read on with `cursor` {next}]")),
            None if lines.is_empty() => lines.push("[no event fits]".into()),
            None => {}
        }
        Ok(Outcome::text(lines.join("\n")).structured(json!({ "events": events, "next": next })))
    }
}

/// Returns an event in one line, for a model.
fn line(entry: &CallEvent) -> String {
    let CallEvent { execution, tool, event } = entry;
    let level = Level::of(event).as_str();
    truncate_line(format!("{} {level} {} {tool} {execution} {}", event.at, event.name, event.data))
}

fn structured(entry: &CallEvent) -> Value {
    let mut fields: BTreeMap<&str, Value> = BTreeMap::new();
    fields.insert("execution_id", json!(entry.execution));
    fields.insert("tool", json!(entry.tool));
    fields.insert("level", json!(Level::of(&entry.event)));
    fields.insert("at", json!(entry.event.at));
    fields.insert("name", json!(entry.event.name));
    fields.insert("data", entry.event.data.clone());
    json!(fields)
}

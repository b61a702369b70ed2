//! The tools by which an agent queries its own earlier calls in the same workspace, and no others.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use wieldy_core::{CallError, Code, Outcome, Provider, Run, RunError, SharedTool, Status, Tool, ToolSpec, parse_since};

use crate::error::StoreError;
use crate::log_tools::{GetLogs, GetMetrics};
use crate::query::{Execution, GroupBy, Query, Stat, TextPlace};
use crate::result_index::ResultIndex;
use crate::store::Store;

/// The default and the maximum number of calls in one answer.
const LIMIT_DEFAULT: usize = 10;
const LIMIT_MAX: usize = 50;
/// Maximum number of entries of metadata in one question.
const METADATA_MAX: usize = 16;
/// Maximum number of bytes of a call's line. The structured result has all of it.
const LINE_BYTES_MAX: usize = 500;

/// Returns `history_search`, `history_stats`, `GetMetrics` and `GetLogs`: read-only tools about the caller's own calls,
/// those of the same tenant, agent, user and workspace. The store need not be open yet: see [`Store::at`].
pub fn history_tools(store: Store) -> Vec<SharedTool> {
    vec![
        Arc::new(HistorySearch(store.clone())),
        Arc::new(HistoryStats(store.clone())),
        Arc::new(GetMetrics(store.clone())),
        Arc::new(GetLogs(store)),
    ]
}

/// The tool that finds earlier calls.
struct HistorySearch(Store);

/// The tool that counts earlier calls.
struct HistoryStats(Store);

/// Filters for calls; all are optional.
#[derive(Debug, Deserialize, JsonSchema)]
struct SearchArgs {
    /// Only calls of this tool.
    tool: Option<String>,
    /// Only calls with this status, such as `success`, `failed` or `timeout`.
    status: Option<Status>,
    /// Only calls of this session.
    session: Option<String>,
    /// Only calls of tools of this provider: `builtin`, `local`, `command`, or `mcp:NAME` of an MCP server.
    provider: Option<String>,
    /// Words that all occur in the tool's name, the arguments or the error.
    #[schemars(length(max = 1000))]
    text: Option<String>,
    /// The place of the words of `text`: in the `calls` (by default), or in the `results`, what the tools answered.
    #[serde(rename = "in", default)]
    place: Place,
    /// Only calls since a time such as `2026-11-16T08:00:00Z`, or a time back from now such as `2h`.
    since: Option<String>,
    /// Entries of the metadata that your client sent with the calls, such as `{"run": 5}`; all must be there.
    metadata: Option<BTreeMap<String, Scalar>>,
    /// Maximum number of calls, the latest first: 10 by default, at most 50.
    #[schemars(range(min = 1, max = 50))]
    limit: Option<usize>,
    /// The cursor of the last answer, to read on.
    cursor: Option<i64>,
}

/// The texts that a search looks in.
#[derive(Debug, Clone, Copy, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Place {
    #[default]
    Calls,
    Results,
}

/// A value in metadata.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Scalar {
    Text(String),
    Number(serde_json::Number),
    Truth(bool),
}

impl std::fmt::Display for Scalar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Number(number) => number.fmt(f),
            Self::Truth(truth) => truth.fmt(f),
        }
    }
}

/// Filters for calls; all are optional.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct StatsArgs {
    /// Only calls of this tool.
    pub(crate) tool: Option<String>,
    /// Only calls since the day of a time such as `2026-11-16T08:00:00Z`, or a time back from now such as `2h`.
    pub(crate) since: Option<String>,
    /// The grouping: `tool` (by default), `day` or `tool,day`.
    pub(crate) by: Option<By>,
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) enum By {
    #[serde(rename = "tool")]
    Tool,
    #[serde(rename = "day")]
    Day,
    #[serde(rename = "tool,day")]
    ToolAndDay,
}

impl Tool for HistorySearch {
    type Args = SearchArgs;

    fn spec(&self) -> ToolSpec {
        spec(
            "history_search",
            "Finds calls that you made before, by tool, words, session, status or time. The latest come first, with their \
             arguments, how they ended and how long they took. With `in` = `results` the words are looked for in what the \
             tools answered.",
        )
    }

    async fn run(&self, args: SearchArgs, run: &Run) -> Result<Outcome, RunError> {
        let query = Query {
            tool: args.tool,
            status: args.status,
            session: args.session,
            provider: args.provider,
            text: args.text,
            text_in: match args.place {
                Place::Calls => TextPlace::Calls,
                Place::Results => TextPlace::Results,
            },
            metadata: entries(args.metadata)?,
            since: parse_time(args.since.as_deref())?,
            cursor: args.cursor.map(crate::query::Cursor),
            ..own_calls(run)?
        };
        let limit = args.limit.unwrap_or(LIMIT_DEFAULT).clamp(1, LIMIT_MAX);
        let page = run_query(&self.0, move |store| store.search(&query, limit)).await?;
        let mut lines: Vec<String> = page.executions.iter().map(line).collect();
        match &page.next {
            Some(next) => lines.push(format!("[more: read on with `cursor` {next}]")),
            None if lines.is_empty() => lines.push("[no call fits]".into()),
            None => {}
        }
        if let Some(index) = page.results {
            lines.push(told(index));
        }
        Ok(Outcome::text(lines.join("\n")).structured(json!(page)))
    }
}

impl Tool for HistoryStats {
    type Args = StatsArgs;

    fn spec(&self) -> ToolSpec {
        spec(
            "history_stats",
            "Summarizes the calls that you made before: how many, how many failed, how long they took (p50, p95, p99). \
             By tool or day, in UTC.",
        )
    }

    async fn run(&self, args: StatsArgs, run: &Run) -> Result<Outcome, RunError> {
        let query = Query { tool: args.tool, since: parse_time(args.since.as_deref())?, ..own_calls(run)? };
        let by = group_by(args.by);
        let stats = run_query(&self.0, move |store| store.stats(&query, by)).await?;
        let lines: Vec<String> = stats.iter().map(summary).collect();
        let text = if lines.is_empty() { "[no call fits]".to_owned() } else { lines.join("\n") };
        Ok(Outcome::text(text).structured(json!({ "stats": stats })))
    }
}

/// Returns a line that says how far the words of results are indexed.
fn told(index: ResultIndex) -> String {
    match index.waiting {
        0 => "[the words of all results are indexed]".into(),
        waiting => {
            format!("[the words of results are indexed up to record {}; {waiting} later records wait]", index.up_to)
        }
    }
}

/// Returns the wanted entries of metadata.
fn entries(wanted: Option<BTreeMap<String, Scalar>>) -> Result<Vec<(String, String)>, RunError> {
    let wanted = wanted.unwrap_or_default();
    if wanted.len() > METADATA_MAX {
        return Err(RunError::invalid_input(format!("`metadata` has at most {METADATA_MAX} entries")));
    }
    Ok(wanted.into_iter().map(|(name, value)| (name, value.to_string())).collect())
}

/// Returns a call in one line, for a model.
fn line(call: &Execution) -> String {
    let took = call.duration_ms.map(|took| format!(" {took:.1} ms")).unwrap_or_default();
    let arguments = call.parameters.as_ref().map(|arguments| format!(" {arguments}")).unwrap_or_default();
    let error = match (&call.error_code, &call.error_message) {
        (Some(code), Some(message)) => format!(" {code}: {}", message.replace('\n', " ")),
        _ => String::new(),
    };
    truncate_line(format!("{} {} {}{took}{arguments}{error}", call.started_at, call.tool, call.status))
}

/// Cuts a line that would be too long to read.
pub(crate) fn truncate_line(mut line: String) -> String {
    if line.len() > LINE_BYTES_MAX {
        line.truncate(line.floor_char_boundary(LINE_BYTES_MAX));
        line.push('…');
    }
    line
}

pub(crate) fn group_by(by: Option<By>) -> GroupBy {
    match by {
        None | Some(By::Tool) => GroupBy::Tool,
        Some(By::Day) => GroupBy::Day,
        Some(By::ToolAndDay) => GroupBy::ToolAndDay,
    }
}

/// Returns statistics in one line, for a model.
pub(crate) fn summary(stat: &Stat) -> String {
    let names = [stat.day.as_deref(), stat.tool.as_deref()];
    let name = names.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let Stat { count, errors, p50_ms, p95_ms, p99_ms, .. } = stat;
    format!("{name}: {count} calls, {errors} failed; p50 {p50_ms:.1} ms, p95 {p95_ms:.1} ms, p99 {p99_ms:.1} ms")
}

pub(crate) fn spec(name: &str, description: &str) -> ToolSpec {
    let spec = ToolSpec::new(name, description).read_only().category("history").provider(Provider::Builtin);
    // The history need not contain itself.
    let mut spec = spec.private_result();
    spec.annotations.open_world = false;
    spec
}

/// Returns a query for the calls of the same tenant, agent, user and workspace.
pub(crate) fn own_calls(run: &Run) -> Result<Query, RunError> {
    let caller = run.caller();
    // An absent name selects calls without a tenant or user. A caller with an empty name must not see those.
    for (what, name) in [("tenant", &caller.tenant), ("user", &caller.user)] {
        if name.as_deref() == Some("") {
            return Err(RunError::invalid_input(format!("a {what} without a name has no history")));
        }
    }
    // Calls that were recorded without a workspace may be of any folder, so no agent sees them.
    let Some(workspace) = run.confinement().recorded_workspace() else {
        return Err(RunError::invalid_input(
            "the history cannot be queried without a workspace that has an absolute path",
        ));
    };
    Ok(Query {
        agent: Some(caller.agent.clone()),
        tenant: Some(caller.tenant.clone().unwrap_or_default()),
        user: Some(caller.user.clone().unwrap_or_default()),
        workspace: Some(workspace.to_string()),
        ..Query::default()
    })
}

pub(crate) fn parse_time(text: Option<&str>) -> Result<Option<Timestamp>, RunError> {
    text.map(parse_since).transpose().map_err(RunError::invalid_input)
}

/// Runs a blocking query on a thread for such work.
pub(crate) async fn run_query<T: Send + 'static>(
    store: &Store,
    question: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, RunError> {
    let store = store.clone();
    let call_error =
        |error: StoreError| CallError::new(Code::ExecutionError, error.to_string()).suggest(error.suggestion());
    match tokio::task::spawn_blocking(move || question(&store)).await {
        Ok(answer) => answer.map_err(|error| RunError::from(call_error(error)).before_effect()),
        Err(_) => Err("the history could not be queried".into()),
    }
}

//! Queries: finds calls, returns one call with its events, and computes statistics.

mod lead;
mod statistics;

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value as Json;
use wieldy_core::{ExecutionId, Status};

pub(crate) use self::statistics::stats;
pub use crate::cursor::Cursor;
pub use crate::database::TextPlace;
use crate::database::{Database, Dialect, Row, Source, TextSearch, Value};
use crate::error::StoreError;
use crate::events::RecordedEvent;
use crate::metadata;
use crate::projection::CallRow;
use crate::result_index::{self, ResultIndex};

/// Conditions for calls; those that are not set do not matter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// The id of the call.
    pub execution: Option<String>,
    /// The tool's name.
    pub tool: Option<String>,
    /// The status.
    pub status: Option<Status>,
    /// The caller's session.
    pub session: Option<String>,
    /// The agent.
    pub agent: Option<String>,
    /// The tenant; `Some("")` means calls without one.
    pub tenant: Option<String>,
    /// The person behind the agent; `Some("")` means calls without one.
    pub user: Option<String>,
    /// The workspace, as an absolute path; `Some("")` means calls without one.
    pub workspace: Option<String>,
    /// The provider of the tool, such as `builtin` or `mcp:NAME`.
    pub provider: Option<String>,
    /// The batch.
    pub batch: Option<String>,
    /// The earliest time at which the call was accepted.
    pub since: Option<Timestamp>,
    /// The time before which the call was accepted.
    pub until: Option<Timestamp>,
    /// Words that all occur in the tool's name, the arguments or the error, or begin a word there.
    pub text: Option<String>,
    /// The texts in which these words are looked for. Recorded results are found once their words are indexed, which
    /// [`Page::results`] tells.
    pub text_in: TextPlace,
    /// Entries of the caller's metadata, by name and value as text, that the call must all have. Only the first 16
    /// texts, numbers and truth values at the top level of a call's metadata count.
    pub metadata: Vec<(String, String)>,
    /// The end of the last page.
    pub cursor: Option<Cursor>,
}

/// A page of calls, the latest first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Page {
    /// The calls.
    pub executions: Vec<Execution>,
    /// The beginning of the next page, if there is one.
    pub next: Option<Cursor>,
    /// The progress of the index of results, for a search in results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub results: Option<ResultIndex>,
}

/// A call in the history.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Execution {
    /// The engine's id.
    pub execution_id: String,
    /// The requested tool.
    pub tool: String,
    /// The status.
    pub status: String,
    /// The arguments, without secrets.
    pub parameters: Option<Json>,
    /// The code of the error.
    pub error_code: Option<String>,
    /// The message of the error.
    pub error_message: Option<String>,
    /// The time when the call was accepted.
    pub started_at: Timestamp,
    /// The time when it ended.
    pub completed_at: Option<Timestamp>,
    /// The duration, all waits included.
    pub duration_ms: Option<f64>,
    /// The bytes of content that were returned.
    pub output_bytes: Option<i64>,
    /// The size of the recorded result, if one was recorded.
    pub result_bytes: Option<i64>,
    /// The recorded result, for a call that was asked for by its id: `text`, `structured`, `blocks` and `artifact`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<Json>,
    /// The number of runs.
    pub attempts: i64,
    /// The agent.
    pub agent: String,
    /// The tenant.
    pub tenant: Option<String>,
    /// The session.
    pub session: Option<String>,
    /// The person behind the agent.
    pub user: Option<String>,
    /// The workspace folder.
    pub workspace: Option<String>,
    /// The provider of the tool.
    pub provider: Option<String>,
    /// The batch that it was part of.
    pub batch: Option<String>,
    /// The sandbox that it ran in.
    pub sandbox: Option<String>,
    /// The resources it used, if they were measured.
    pub usage: Option<Json>,
    /// Further facts: the caller's own id, time in queues, the artifact, the isolation level.
    pub metadata: Option<Json>,
}

/// The grouping of statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupBy {
    /// By tool.
    #[default]
    Tool,
    /// By day, in UTC.
    Day,
    /// By tool and day.
    ToolAndDay,
}

/// Statistics about the calls of one tool or day.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stat {
    /// The day, in UTC, if grouped by day.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub day: Option<String>,
    /// The tool, if grouped by tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// The number of calls that ended.
    pub count: i64,
    /// The number of these that did not succeed.
    pub errors: i64,
    /// The share of errors, from 0 to 1.
    pub error_rate: f64,
    /// The duration that half of the calls did not exceed.
    pub p50_ms: f64,
    /// The duration that 95 of 100 calls did not exceed.
    pub p95_ms: f64,
    /// The duration that 99 of 100 calls did not exceed.
    pub p99_ms: f64,
    /// The bytes of content that were returned.
    pub output_bytes: i64,
    /// The bytes of the results that were recorded.
    pub result_bytes: i64,
    /// The number of calls by status.
    pub statuses: BTreeMap<String, i64>,
}

/// The columns of a call, in the order in which [`parse_row`] reads them.
pub(crate) const COLUMNS: &str = "id, execution_id, tool_name, parameters_json, status, error_message, error_code, started_at,
    completed_at, duration_ms, output_size_bytes, sandbox_id, agent_id, user_id, batch_id, session_id, tenant_id, attempts,
    usage_json, metadata_json, workspace, provider, result_size_bytes";

pub(crate) fn parse_row(row: &dyn Row) -> Result<CallRow, StoreError> {
    let text = |column| row.text(column).map(str::to_owned);
    let optional = |column| row.text_or_none(column).map(|text| text.map(str::to_owned));
    Ok(CallRow {
        id: row.int(0)?,
        execution_id: text(1)?,
        tool: text(2)?,
        parameters: optional(3)?,
        status: text(4)?.into(),
        error_message: optional(5)?,
        error_code: optional(6)?,
        started_at: row.int(7)?,
        completed_at: row.int_or_none(8)?,
        duration_ms: row.real_or_none(9)?,
        output_bytes: row.int_or_none(10)?,
        sandbox: optional(11)?,
        agent: text(12)?,
        user: optional(13)?,
        batch: optional(14)?,
        session: optional(15)?,
        tenant: optional(16)?,
        attempts: row.int(17)?,
        usage: optional(18)?,
        metadata: optional(19)?,
        workspace: optional(20)?,
        provider: optional(21)?,
        result_bytes: row.int_or_none(22)?,
    })
}

impl From<CallRow> for Execution {
    fn from(row: CallRow) -> Self {
        let time = |micros: i64| Timestamp::from_microsecond(micros).unwrap_or_default();
        let json = |text: Option<String>| text.and_then(|text| serde_json::from_str(&text).ok());
        Self {
            execution_id: row.execution_id,
            tool: row.tool,
            status: row.status.into_owned(),
            parameters: json(row.parameters),
            error_code: row.error_code,
            error_message: row.error_message,
            started_at: time(row.started_at),
            completed_at: row.completed_at.map(time),
            duration_ms: row.duration_ms,
            output_bytes: row.output_bytes,
            result_bytes: row.result_bytes,
            result: None,
            attempts: row.attempts,
            agent: row.agent,
            tenant: row.tenant,
            session: row.session,
            user: row.user,
            workspace: row.workspace,
            provider: row.provider,
            batch: row.batch,
            sandbox: row.sandbox,
            usage: json(row.usage),
            metadata: json(row.metadata),
        }
    }
}

/// SQL conditions and their values.
#[derive(Default)]
struct Conditions {
    sql: Vec<String>,
    values: Vec<Value>,
}

impl Conditions {
    fn add(&mut self, sql: &str, value: impl Into<Value>) {
        self.values.push(value.into());
        self.sql.push(sql.replace('?', &format!("?{}", self.values.len())));
    }

    fn text(&self) -> String {
        if self.sql.is_empty() { String::new() } else { format!("WHERE {}", self.sql.join(" AND ")) }
    }
}

/// Runs several queries on one snapshot. On a server the last statement alone gives the whole answer, so it needs none.
fn on_snapshot(
    database: &mut dyn Database,
    ask: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    match database.dialect() {
        Dialect::Sqlite => database.in_snapshot(ask),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => ask(database),
    }
}

/// Returns up to `limit` calls, the latest first.
pub(crate) fn search(database: &mut dyn Database, query: &Query, limit: usize) -> Result<Page, StoreError> {
    if query.text_in == TextPlace::Results
        && let Err(error) =
            database.index_words(1).and_then(|_| result_index::fill(database, 1, result_index::INDEXED_BY_SEARCH))
    {
        // A process that may only read still can.
        tracing::debug!(error = &error as &dyn std::error::Error, "cannot index the words of results");
    }
    let mut page = Page { executions: Vec::new(), next: None, results: None };
    on_snapshot(database, &mut |database| {
        page = find_page(database, query, limit)?;
        Ok(())
    })?;
    Ok(page)
}

fn find_page(database: &mut dyn Database, query: &Query, limit: usize) -> Result<Page, StoreError> {
    let (rows, more) = find_rows(database, query, limit)?;
    let next = rows.last().filter(|_| more).map(|row| Cursor(row.id));
    let results = match query.text_in {
        TextPlace::Calls => None,
        TextPlace::Results => Some(result_index::progress(database)?),
    };
    Ok(Page { executions: rows.into_iter().map(Execution::from).collect(), next, results })
}

/// Maximum size of the words to look for. Each of them is looked for in every text that is not indexed yet.
const TEXT_BYTES_MAX: usize = 1000;

/// Finds up to `limit` calls, the latest first, and returns true if there are more.
pub(crate) fn find_rows(
    database: &mut dyn Database,
    query: &Query,
    limit: usize,
) -> Result<(Vec<CallRow>, bool), StoreError> {
    let wanted = SearchPlan::new(database, query)?;
    let mut rows = Vec::new();
    for sql in wanted.page_statements(limit) {
        rows.clear();
        database.query(&sql, &wanted.conditions.values, &mut |row| {
            rows.push(parse_row(row)?);
            Ok(())
        })?;
        if rows.len() > limit {
            break;
        }
    }
    let more = rows.len() > limit;
    rows.truncate(limit);
    Ok((rows, more))
}

/// Returns the query plans of [`search`], a text for each statement.
pub(crate) fn query_plans(database: &mut dyn Database, query: &Query, limit: usize) -> Result<Vec<String>, StoreError> {
    let wanted = SearchPlan::new(database, query)?;
    let (explain, column) = match database.dialect() {
        Dialect::Sqlite => ("EXPLAIN QUERY PLAN", 3),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => ("EXPLAIN", 0),
    };
    let mut plans = Vec::new();
    for sql in wanted.page_statements(limit) {
        let mut lines = Vec::new();
        database.query(&format!("{explain} {sql}"), &wanted.conditions.values, &mut |row| {
            lines.push(row.text(column)?.to_owned());
            Ok(())
        })?;
        plans.push(lines.join("\n"));
    }
    Ok(plans)
}

/// The conditions of a query, and the tables that it reads.
struct SearchPlan {
    conditions: Conditions,
    /// The placeholder number of the cursor: calls must come before its value.
    before: Option<usize>,
    /// Alternatives, in the order in which they are tried: all but the last may find only the latest calls.
    alternatives: Vec<Vec<Source>>,
}

impl SearchPlan {
    fn new(database: &mut dyn Database, query: &Query) -> Result<Self, StoreError> {
        let mut wanted = Conditions::default();
        let equal = [
            ("execution_id = ?", query.execution.as_deref()),
            ("tool_name = ?", query.tool.as_deref()),
            ("status = ?", query.status.map(Status::as_str)),
            ("session_id = ?", query.session.as_deref()),
            ("agent_id = ?", query.agent.as_deref()),
            ("batch_id = ?", query.batch.as_deref()),
            ("provider = ?", query.provider.as_deref()),
        ];
        for (sql, value) in equal {
            if let Some(value) = value {
                wanted.add(sql, value);
            }
        }
        let equal_or_absent = [("tenant_id", &query.tenant), ("user_id", &query.user), ("workspace", &query.workspace)];
        for (column, value) in equal_or_absent {
            match value.as_deref() {
                Some("") => wanted.sql.push(format!("{column} IS NULL")),
                Some(value) => wanted.add(&format!("{column} = ?"), value),
                None => {}
            }
        }
        if let Some(since) = query.since {
            wanted.add("started_at >= ?", Value::Time(since.as_microsecond()));
        }
        if let Some(until) = query.until {
            wanted.add("started_at < ?", Value::Time(until.as_microsecond()));
        }
        let before = query.cursor.map(|Cursor(id)| {
            wanted.values.push(id.into());
            wanted.values.len()
        });
        let text = query.text.as_deref().filter(|text| !text.trim().is_empty());
        if text.is_some_and(|text| text.len() > TEXT_BYTES_MAX) {
            let why = format!("the words to look for may have at most {TEXT_BYTES_MAX} bytes");
            return Err(StoreError::Query(why));
        }
        let first = wanted.values.len() + 1;
        let (alternatives, values) = match text {
            None if query.metadata.is_empty() => {
                let all = Source { from: "tool_executions".into(), id: "id", condition: "true".into() };
                (vec![vec![all]], Vec::new())
            }
            None => {
                let (source, values) = lead::source(database, query, before, first)?;
                (vec![vec![source]], values)
            }
            Some(text) => {
                let has_entry = metadata::has_entry("tool_executions.id");
                metadata::wanted(&query.metadata).into_iter().for_each(|entry| wanted.add(&has_entry, entry));
                let is_narrow = query.session.is_some() || query.batch.is_some();
                let words = TextSearch { text, tool: query.tool.as_deref(), is_narrow, place: query.text_in, before };
                database.text_sources(&words, wanted.values.len() + 1)?
            }
        };
        wanted.values.extend(values);
        Ok(Self { conditions: wanted, before, alternatives })
    }

    /// Returns the statements that find a page, in the order in which they are tried.
    fn page_statements(&self, limit: usize) -> impl Iterator<Item = String> {
        self.alternatives.iter().map(move |sources| {
            let selects =
                sources.iter().map(|source| self.select(&format!("{COLUMNS}, {} AS place", source.id), source));
            let selects = selects.collect::<Vec<_>>().join(" UNION ALL ");
            format!("{selects} ORDER BY place DESC LIMIT {}", limit + 1)
        })
    }

    /// Returns the statement that finds all closed calls.
    fn closed_calls_statement(&self, columns: &str) -> String {
        let sources = self.alternatives.last().map(Vec::as_slice).unwrap_or_default();
        let selects = sources.iter().map(|source| self.select(columns, source) + " AND completed_at IS NOT NULL");
        selects.collect::<Vec<_>>().join(" UNION ALL ")
    }

    fn select(&self, columns: &str, Source { from, id, condition }: &Source) -> String {
        let before = self.before.map(|place| format!("{id} < ?{place}"));
        let conditions = self.conditions.sql.iter().chain(before.iter()).map(String::as_str);
        let all: Vec<&str> = conditions.chain([condition.as_str()]).collect();
        format!("SELECT {columns} FROM {from} WHERE {}", all.join(" AND "))
    }
}

/// Returns one call with its events.
pub(crate) fn show(
    database: &mut dyn Database,
    id: ExecutionId,
) -> Result<Option<(Execution, Vec<RecordedEvent>)>, StoreError> {
    let sql = format!("SELECT {} FROM tool_executions WHERE execution_id = ?1", COLUMNS);
    let mut found = None;
    database.query(&sql, &[id.to_string().as_str().into()], &mut |row| {
        found = Some(parse_row(row)?);
        Ok(())
    })?;
    let Some(call) = found else { return Ok(None) };
    let sql = "SELECT seq, at, name, data FROM events WHERE execution = ?1 ORDER BY seq";
    let mut recorded = Vec::new();
    database.query(sql, &[call.id.into()], &mut |row| {
        let (seq, at, data) = (row.int(0)?, row.int(1)?, serde_json::from_str(row.text(3)?).unwrap_or_default());
        recorded.push(RecordedEvent::new(seq, at, call.started_at, row.text(2)?, data));
        Ok(())
    })?;
    let mut result = None;
    database.query("SELECT result_json FROM results WHERE id = ?1", &[call.id.into()], &mut |row| {
        result = serde_json::from_str(row.text(0)?).ok();
        Ok(())
    })?;
    Ok(Some((Execution { result, ..call.into() }, recorded)))
}

/// Returns the calls whose ids begin with `begin`, the earliest first.
pub(crate) fn find(database: &mut dyn Database, begin: &str, limit: usize) -> Result<Vec<ExecutionId>, StoreError> {
    const FIRST: &str = "00000000-0000-0000-0000-000000000000";
    let begin = begin.to_lowercase();
    let fits = |(sign, place): (char, char)| if place == '-' { sign == '-' } else { sign.is_ascii_hexdigit() };
    if begin.len() > FIRST.len() || !begin.chars().zip(FIRST.chars()).all(fits) {
        return Ok(Vec::new());
    }
    // All ids have the same form, so every database sorts them like this.
    let first = format!("{begin}{}", &FIRST[begin.len()..]);
    let last = format!("{begin}{}", FIRST[begin.len()..].replace('0', "f"));
    let sql = "SELECT execution_id FROM tool_executions WHERE execution_id BETWEEN ?1 AND ?2 ORDER BY id LIMIT ?3";
    let values = [first.as_str().into(), last.as_str().into(), Value::Int(i64::try_from(limit).unwrap_or(i64::MAX))];
    let mut found = Vec::new();
    database.query(sql, &values, &mut |row| {
        found.extend(row.text(0)?.parse::<ExecutionId>().ok());
        Ok(())
    })?;
    Ok(found)
}

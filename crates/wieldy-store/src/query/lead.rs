//! The lead of a query for metadata: the condition with the fewest calls. Its calls are read, the latest first, and
//! checked against the others.
//!
//! Metadata such as a name of the caller's program is on every call. If it led, a page of a rare session would take
//! a look at all calls.

use super::Query;
use crate::database::{Database, Dialect, Source, Value};
use crate::error::StoreError;
use crate::metadata;

/// Maximum number of calls of a condition that are counted. Conditions with more calls are equally common.
const COUNTED_MAX: i64 = 10_000;

/// A condition whose calls an index gives, the latest first.
#[derive(Debug, Clone, PartialEq)]
struct Condition {
    /// The table, as `c`.
    table: &'static str,
    /// The column with the number of the call.
    id: &'static str,
    /// The index of a condition that mostly has few calls.
    index: Option<&'static str>,
    sql: String,
    values: Vec<Value>,
}

impl Condition {
    fn of_calls(sql: &str, values: Vec<Value>) -> Self {
        Self { table: "tool_executions c", id: "c.id", index: None, sql: sql.to_owned(), values }
    }

    fn of_entry(entry: &Value) -> Self {
        let (sql, values) = ("c.entry = ?".into(), vec![entry.clone()]);
        Self { table: "metadata_entries c", id: "c.execution", index: None, sql, values }
    }

    /// Returns the SQL with the numbers of its placeholders.
    fn numbered(&self, first: usize) -> String {
        let mut parts = self.sql.split('?');
        let mut sql = parts.next().unwrap_or_default().to_owned();
        for (number, part) in (first..).zip(parts) {
            sql += &format!("?{number}{part}");
        }
        sql
    }

    /// Returns true if the index has the calls in their order.
    fn is_in_order(&self) -> bool {
        !self.sql.contains("started_at")
    }

    /// Returns the SQL that checks the condition for the call `id` by an index alone, if there is such a check.
    fn check(&self, dialect: Dialect, id: &str, first: usize) -> Option<String> {
        let sql = self.numbered(first).replace("c.", "o.");
        let (table, number, index) = match (self.table, self.index) {
            ("metadata_entries c", _) => ("metadata_entries o", "o.execution", None),
            (_, Some(index)) => ("tool_executions o", "o.id", Some(index)),
            _ => return None,
        };
        Some(match dialect {
            // Without these words, SQLite would read the row of a call first.
            Dialect::Sqlite => {
                let by = index.map(|index| format!(" INDEXED BY {index}")).unwrap_or_default();
                format!("EXISTS (SELECT 1 FROM {table}{by} WHERE {sql} AND {number} = {id}) IS TRUE")
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => format!("EXISTS (SELECT 1 FROM {table} WHERE {sql} AND {number} = {id})"),
        })
    }

    /// Returns the latest call.
    fn latest(&self, database: &mut dyn Database) -> Result<i64, StoreError> {
        let Self { table, id, values, .. } = self;
        let mut latest = 0;
        let sql = format!("SELECT {id} FROM {table} WHERE {} ORDER BY {id} DESC LIMIT 1", self.numbered(1));
        database.query(&sql, values, &mut |row| {
            latest = row.int(0)?;
            Ok(())
        })?;
        Ok(latest)
    }

    /// Counts the calls, up to `max`.
    fn count(&self, database: &mut dyn Database, max: i64) -> Result<i64, StoreError> {
        let Self { table, values, .. } = self;
        let counted = format!("SELECT 1 FROM {table} WHERE {} LIMIT {max}", self.numbered(1));
        let mut count = 0;
        database.query(&format!("SELECT count(*) FROM ({counted}) AS counted"), values, &mut |row| {
            count = row.int(0)?;
            Ok(())
        })?;
        Ok(count)
    }
}

/// Returns the table that calls with all entries of a query's metadata are read from, and the values for it, whose
/// numbers begin at `first`. `before` is the number of the cursor.
pub(super) fn source(
    database: &mut dyn Database,
    query: &Query,
    before: Option<usize>,
    first: usize,
) -> Result<(Source, Vec<Value>), StoreError> {
    let entries = metadata::wanted(&query.metadata);
    let dialect = database.dialect();
    let mut others = conditions(dialect, query, &entries);
    let lead = others.remove(rarest(database, &others)?);
    let (table, id) = (lead.table, lead.id);
    let mut values = lead.values.clone();
    let mut sql = vec![lead.numbered(first)];
    // These are checked before the row of a call is read, because an index is small.
    for other in others {
        if let Some(check) = other.check(dialect, id, first + values.len()) {
            sql.push(check);
            values.extend(other.values);
        }
    }
    sql.extend(before.map(|place| format!("{id} < ?{place}")));
    let sql = sql.join(" AND ");
    let from = match dialect {
        // Otherwise SQLite may read all calls and look for the condition of each.
        Dialect::Sqlite => format!(
            "(SELECT {id} AS lead FROM {table} WHERE {sql}) AS rarest
             CROSS JOIN tool_executions ON tool_executions.id = lead"
        ),
        // The offset keeps the server from choosing another lead.
        #[cfg(feature = "postgres")]
        Dialect::Postgres => format!(
            "(SELECT {id} AS lead FROM {table} WHERE {sql} ORDER BY {id} DESC OFFSET 0) AS rarest
             JOIN tool_executions ON tool_executions.id = lead"
        ),
    };
    Ok((Source { from: from.into(), id: "lead", condition: "true".into() }, values))
}

/// Returns the index of the condition with the fewest calls. Of equally common ones it is the one whose latest call is
/// the earliest, because later calls cannot meet all conditions.
fn rarest(database: &mut dyn Database, conditions: &[Condition]) -> Result<usize, StoreError> {
    if conditions.len() == 1 {
        return Ok(0);
    }
    let (mut least, mut count) = (None, COUNTED_MAX);
    for (index, condition) in conditions.iter().enumerate() {
        // There is no need to count further than the rarest condition so far.
        let counted = condition.count(database, count)?;
        if counted < count {
            (least, count) = (Some(index), counted);
        }
        if count == 0 {
            break;
        }
    }
    if let Some(least) = least {
        return Ok(least);
    }
    let (mut first, mut latest) = (0, i64::MAX);
    for (index, condition) in conditions.iter().enumerate().filter(|(_, condition)| condition.is_in_order()) {
        let its = condition.latest(database)?;
        if its < latest {
            (first, latest) = (index, its);
        }
    }
    Ok(first)
}

/// Returns the conditions that may lead. Those that mostly have fewer calls come first.
fn conditions(dialect: Dialect, query: &Query, entries: &[Value]) -> Vec<Condition> {
    let equal = |sql, value: &Option<String>| {
        let value = value.as_deref().filter(|value| !value.is_empty());
        value.map(|value| Condition::of_calls(sql, vec![value.into()]))
    };
    let indexed = |index, condition: Option<Condition>| Some(Condition { index: Some(index), ..condition? });
    let narrow = [
        indexed("ix_tool_executions_execution_id", equal("c.execution_id = ?", &query.execution)),
        indexed("ix_tool_executions_batch_id", equal("c.batch_id = ?", &query.batch)),
        indexed("ix_tool_executions_session_id", equal("c.session_id = ?", &query.session)),
        indexed("ix_tool_executions_tool_name", equal("c.tool_name = ?", &query.tool)),
    ];
    let status = query.status.map(|status| status.as_str().to_owned());
    let broad = [
        caller(dialect, query),
        equal("c.provider = ?", &query.provider),
        equal("c.workspace = ?", &query.workspace),
        equal("c.status = ?", &status),
        time(dialect, query),
    ];
    let entries = entries.iter().map(Condition::of_entry);
    narrow.into_iter().flatten().chain(entries).chain(broad.into_iter().flatten()).collect()
}

/// Returns the condition for the agent. In SQLite, the index of agents begins with the tenant.
fn caller(dialect: Dialect, query: &Query) -> Option<Condition> {
    let agent = query.agent.as_deref()?;
    match (dialect, query.tenant.as_deref()) {
        #[cfg(feature = "postgres")]
        (Dialect::Postgres, _) => Some(Condition::of_calls("c.agent_id = ?", vec![agent.into()])),
        (Dialect::Sqlite, None) => None,
        (Dialect::Sqlite, Some("")) => {
            Some(Condition::of_calls("c.tenant_id IS NULL AND c.agent_id = ?", vec![agent.into()]))
        }
        (Dialect::Sqlite, Some(tenant)) => {
            Some(Condition::of_calls("c.tenant_id = ? AND c.agent_id = ?", vec![tenant.into(), agent.into()]))
        }
    }
}

/// Returns the condition for the time.
fn time(dialect: Dialect, query: &Query) -> Option<Condition> {
    let since = query.since.map(|since| ("c.started_at >= ?", since));
    let until = query.until.map(|until| ("c.started_at < ?", until));
    let (sql, values): (Vec<_>, Vec<_>) =
        since.into_iter().chain(until).map(|(sql, at)| (sql, Value::Time(at.as_microsecond()))).unzip();
    // SQLite would rather read all calls, which are in the right order.
    let table = match dialect {
        Dialect::Sqlite => "tool_executions c INDEXED BY ix_tool_executions_started_at",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "tool_executions c",
    };
    (!sql.is_empty()).then(|| Condition { table, ..Condition::of_calls(&sql.join(" AND "), values) })
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::{Address, Store};

    /// Returns the SQL of the condition that leads, with its last value.
    fn lead(store: &Store, query: &Query) -> (String, Value) {
        let entries = metadata::wanted(&query.metadata);
        let find = |database: &mut dyn Database| {
            let mut conditions = conditions(database.dialect(), query, &entries);
            Ok(conditions.remove(rarest(database, &conditions)?))
        };
        let lead = store.with(find).unwrap();
        (lead.sql, lead.values.last().unwrap().clone())
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn with(entries: &[(&str, &str)]) -> Query {
        let entries = entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Query { metadata: entries.collect(), ..Query::default() }
    }

    #[test]
    fn the_rarest_condition_leads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history.db");
        let store = Store::open(&Address::Sqlite(path.clone())).unwrap();
        let connection = rusqlite::Connection::open(path).unwrap();
        let hex = |name, value| metadata::entry(name, value).map(|byte| format!("{byte:02x}")).concat();
        connection
            .execute_batch(&format!(
                "INSERT INTO instances (number, id, version, host, process, started_at, seen_at) VALUES (1, '', '', '', 1, 0, 0);
                 INSERT INTO tool_executions
                     (id, execution_id, tool_name, status, started_at, agent_id, session_id, tenant_id, instance)
                 WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 30000)
                 SELECT n, n, iif(n % 2 = 0, 'even', 'odd'), 'success', n, 'agent_' || (n / 1000), 's' || (n / 100), NULL, 1
                 FROM number;
                 INSERT INTO metadata_entries SELECT x'{}', id FROM tool_executions;
                 INSERT INTO metadata_entries SELECT x'{}', id FROM tool_executions WHERE id % 50 = 0;
                 INSERT INTO metadata_entries SELECT x'{}', id FROM tool_executions WHERE id < 15000;",
                hex("all", "yes"),
                hex("run", "7"),
                hex("early", "1"),
            ))
            .unwrap();
        let is = |sql: &str, value: &str| (sql.to_owned(), Value::from(value));
        let is_entry = |name, value| ("c.entry = ?".to_owned(), Value::Bytes(metadata::entry(name, value).to_vec()));
        let all = with(&[("all", "yes")]);
        assert_eq!(lead(&store, &all), is_entry("all", "yes"));
        assert_eq!(lead(&store, &with(&[("all", "yes"), ("run", "7")])), is_entry("run", "7"));
        assert_eq!(lead(&store, &with(&[("run", "7"), ("all", "yes")])), is_entry("run", "7"));
        assert_eq!(lead(&store, &with(&[("run", "7"), ("run", "8")])), is_entry("run", "8"));
        let session = |query| Query { session: some("s17"), ..query };
        assert_eq!(lead(&store, &session(all.clone())), is("c.session_id = ?", "s17"));
        assert_eq!(lead(&store, &session(with(&[("run", "8")]))), is_entry("run", "8"));
        let nope = Query { tool: some("nope"), ..all.clone() };
        assert_eq!(lead(&store, &nope), is("c.tool_name = ?", "nope"));
        let even = Query { tool: some("even"), ..with(&[("run", "7")]) };
        assert_eq!(lead(&store, &even), is_entry("run", "7"));
        let odd = Query { tool: some("odd"), ..all.clone() };
        assert_eq!(lead(&store, &odd), is("c.tool_name = ?", "odd"), "its latest call is earlier");
        let (early, even) =
            (with(&[("all", "yes"), ("early", "1")]), Query { tool: some("even"), ..with(&[("early", "1")]) });
        assert_eq!(lead(&store, &early), is_entry("early", "1"));
        assert_eq!(lead(&store, &even), is_entry("early", "1"));
        let agent = Query { agent: some("agent_3"), ..all.clone() };
        assert_eq!(lead(&store, &agent), is_entry("all", "yes"), "no index finds the agent alone");
        let sql = "c.tenant_id IS NULL AND c.agent_id = ?";
        assert_eq!(lead(&store, &Query { tenant: some(""), ..agent }), is(sql, "agent_3"));
        let since = Query { since: Some(Timestamp::from_microsecond(29_990).unwrap()), ..all };
        assert_eq!(lead(&store, &since), ("c.started_at >= ?".to_owned(), Value::Time(29_990)));
    }
}

//! Statistics about calls, by tool or day.

use std::collections::BTreeMap;

use jiff::Timestamp;
use wieldy_core::Status;

use super::{Conditions, GroupBy, Query, SearchPlan, Stat, on_snapshot};
use crate::database::{Database, Dialect};
use crate::error::StoreError;
use crate::histogram::{self, BucketCounts};

/// The counts of one group of calls.
#[derive(Default)]
struct GroupCounts {
    buckets: BTreeMap<i64, i64>,
    statuses: BTreeMap<String, i64>,
    output_bytes: i64,
    result_bytes: i64,
}

/// Returns statistics by tool or day: from the histogram for tool, status, agent, tenant and whole days, else from calls.
pub(crate) fn stats(database: &mut dyn Database, query: &Query, by: GroupBy) -> Result<Vec<Stat>, StoreError> {
    let mut counted: BTreeMap<(Option<i64>, Option<String>), GroupCounts> = BTreeMap::new();
    let key = |day: i64, tool: &str| match by {
        GroupBy::Tool => (None, Some(tool.to_owned())),
        GroupBy::Day => (Some(day), None),
        GroupBy::ToolAndDay => (Some(day), Some(tool.to_owned())),
    };
    let mut count = |day, tool: &str, status: &str, bucket, counts: BucketCounts| {
        let group = counted.entry(key(day, tool)).or_default();
        *group.buckets.entry(bucket).or_default() += counts.calls;
        *group.statuses.entry(status.to_owned()).or_default() += counts.calls;
        group.output_bytes += counts.output_bytes;
        group.result_bytes += counts.result_bytes;
    };
    let Query { execution, session, user, workspace, provider, batch, text, .. } = query;
    let has_metadata = !query.metadata.is_empty();
    let narrower = [execution, session, user, workspace, provider, batch, text];
    if has_metadata || narrower.iter().any(|wanted| wanted.is_some()) {
        let columns = "started_at, tool_name, status, duration_ms, output_size_bytes, result_size_bytes";
        on_snapshot(database, &mut |database| {
            let wanted = SearchPlan::new(database, query)?;
            database.query(&wanted.closed_calls_statement(columns), &wanted.conditions.values, &mut |row| {
                let day = row.int(0)?.div_euclid(histogram::DAY);
                let bucket = histogram::bucket(row.real_or_none(3)?.unwrap_or_default());
                let [output_bytes, result_bytes] =
                    [row.int_or_none(4)?, row.int_or_none(5)?].map(Option::unwrap_or_default);
                let counts = BucketCounts { calls: 1, output_bytes, result_bytes };
                count(day, row.text(1)?, row.text(2)?, bucket, counts);
                Ok(())
            })
        })?;
    } else {
        count_in_histogram(database, query, by, &mut count)?;
    }
    Ok(counted.into_iter().map(|((day, tool), group)| stat(day, tool, group)).collect())
}

/// Passes the counts of the histogram to `count`, each with its day, tool, status and bucket.
fn count_in_histogram(
    database: &mut dyn Database,
    query: &Query,
    by: GroupBy,
    count: &mut dyn FnMut(i64, &str, &str, i64, BucketCounts),
) -> Result<(), StoreError> {
    let mut wanted = Conditions::default();
    let day = |micros: i64| micros.div_euclid(histogram::DAY);
    let equal = [
        ("tool_name = ?", query.tool.as_deref()),
        ("status = ?", query.status.map(Status::as_str)),
        ("agent_id = ?", query.agent.as_deref()),
        ("tenant_id = ?", query.tenant.as_deref()),
    ];
    for (sql, value) in equal {
        if let Some(value) = value {
            wanted.add(sql, value);
        }
    }
    if let Some(since) = query.since {
        wanted.add("day >= ?", day(since.as_microsecond()));
    }
    if let Some(until) = query.until {
        wanted.add("day <= ?", day(until.as_microsecond() - 1));
    }
    let day = if by == GroupBy::Tool { "0" } else { "day" };
    let tool = if by == GroupBy::Day { "''" } else { "tool_name" };
    // SQLite would sort the rows to sum them, which takes longer than summing them here.
    let (counts, grouped) = match database.dialect() {
        Dialect::Sqlite => ("calls, output_bytes, result_bytes", ""),
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            ("sum(calls)::bigint, sum(output_bytes)::bigint, sum(result_bytes)::bigint", "GROUP BY 1, 2, 3, 4")
        }
    };
    let sql = format!("SELECT {day}, {tool}, status, bucket, {counts} FROM tallies {} {grouped}", wanted.text());
    database.query(&sql, &wanted.values, &mut |row| {
        let (calls, output_bytes, result_bytes) = (row.int(4)?, row.int(5)?, row.int(6)?);
        let counts = BucketCounts { calls, output_bytes, result_bytes };
        count(row.int(0)?, row.text(1)?, row.text(2)?, row.int(3)?, counts);
        Ok(())
    })
}

fn stat(day: Option<i64>, tool: Option<String>, group: GroupCounts) -> Stat {
    let buckets: Vec<(i64, i64)> = group.buckets.into_iter().collect();
    let count: i64 = group.statuses.values().sum();
    let errors = count - group.statuses.get("success").copied().unwrap_or_default();
    let date =
        |day: i64| Timestamp::from_microsecond(day * histogram::DAY).map(|at| at.strftime("%Y-%m-%d").to_string());
    Stat {
        day: day.and_then(|day| date(day).ok()),
        tool,
        count,
        errors,
        error_rate: if count == 0 { 0.0 } else { errors as f64 / count as f64 },
        p50_ms: histogram::quantile(&buckets, 0.50),
        p95_ms: histogram::quantile(&buckets, 0.95),
        p99_ms: histogram::quantile(&buckets, 0.99),
        output_bytes: group.output_bytes,
        result_bytes: group.result_bytes,
        statuses: group.statuses,
    }
}

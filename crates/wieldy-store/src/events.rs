//! Queries for the events of calls, in pages: those of the latest call first.

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value as Json;
use wieldy_core::{Severity, complete_event_data};

use crate::database::Database;
use crate::error::StoreError;
use crate::projection::CallRow;
use crate::query::{Cursor, Query, find_rows};

/// A recorded event of a call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecordedEvent {
    /// The record's number in the trail.
    pub seq: i64,
    /// The time.
    pub at: Timestamp,
    /// The event's name.
    pub name: String,
    /// The severity of the event.
    pub severity: Severity,
    /// The event's facts.
    pub data: Json,
}

impl RecordedEvent {
    /// Returns an event of a call that was accepted at `started_at`, with the facts that are not stored. Times are in
    /// microseconds.
    pub(crate) fn new(seq: i64, at: i64, started_at: i64, name: &str, mut data: Json) -> Self {
        let severity = Severity::of(name, &data);
        complete_event_data(name, &mut data, (at - started_at).max(0) as f64 / 1000.0);
        let at = Timestamp::from_microsecond(at).unwrap_or_default();
        Self { seq, at, name: name.to_owned(), severity, data }
    }
}

/// An event with the call that it belongs to.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CallEvent {
    pub(crate) execution: String,
    pub(crate) tool: String,
    pub(crate) event: RecordedEvent,
}

/// The last event of a page: its call and its number in the trail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventCursor {
    call: i64,
    seq: i64,
}

impl std::fmt::Display for EventCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.call, self.seq)
    }
}

impl std::str::FromStr for EventCursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || -> Option<Self> {
            let (call, seq) = text.split_once('.')?;
            Some(Self { call: call.parse().ok().filter(|call| *call < i64::MAX)?, seq: seq.parse().ok()? })
        };
        read().ok_or_else(|| format!("`{text}` is not a cursor: use the one at the end of the previous page"))
    }
}

/// Maximum number of calls that are read for one page of events, and in one query.
const PAGE_CALLS_MAX: usize = 500;
const CALLS_AT_ONCE: usize = 50;
/// Maximum number of characters of an event's facts that are returned whole.
const DATA_CHARS_MAX: usize = 16 * 1024;

/// Finds up to `limit` events that are `wanted`, those of the latest call first.
pub(crate) fn find(
    database: &mut dyn Database,
    query: &Query,
    from: Option<EventCursor>,
    wanted: &dyn Fn(&RecordedEvent) -> bool,
    limit: usize,
) -> Result<(Vec<CallEvent>, Option<EventCursor>), StoreError> {
    let (mut entries, mut looked_at) = (Vec::new(), 0);
    // The call in which the last page ended is read again.
    let mut query = Query { cursor: from.map(|from| Cursor(from.call + 1)), ..query.clone() };
    loop {
        let (calls, more) = find_rows(database, &query, CALLS_AT_ONCE)?;
        for call in &calls {
            let after = from.filter(|from| from.call == call.id).map_or(0, |from| from.seq);
            let mut seq = after;
            // One event more than the limit shows that there are more.
            while let Some(recorded) = next_events(database, call, &mut seq, wanted, limit + 1 - entries.len())? {
                entries.extend(recorded.into_iter().map(|event| {
                    let (execution, tool) = (call.execution_id.clone(), call.tool.clone());
                    (call.id, CallEvent { execution, tool, event })
                }));
                if entries.len() > limit {
                    entries.truncate(limit);
                    let next = entries.last().map(|(call, entry)| EventCursor { call: *call, seq: entry.event.seq });
                    return Ok((entries.into_iter().map(|(_, entry)| entry).collect(), next));
                }
            }
        }
        looked_at += calls.len();
        let last = calls.last().filter(|_| more).map(|call| call.id);
        let Some(last) = last.filter(|_| looked_at < PAGE_CALLS_MAX) else {
            let next = last.map(|call| EventCursor { call, seq: i64::MAX });
            return Ok((entries.into_iter().map(|(_, entry)| entry).collect(), next));
        };
        query.cursor = Some(Cursor(last));
    }
}

/// Reads the next events of a call, advances `seq`, and returns the wanted ones; `None` at the end.
fn next_events(
    database: &mut dyn Database,
    call: &CallRow,
    seq: &mut i64,
    wanted: &dyn Fn(&RecordedEvent) -> bool,
    count: usize,
) -> Result<Option<Vec<RecordedEvent>>, StoreError> {
    // Facts can have megabytes, such as the content of a file that was written.
    let sql = format!(
        "SELECT seq, at, name, substr(data, 1, {}) FROM events WHERE execution = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
        DATA_CHARS_MAX + 1
    );
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    let (mut recorded, mut read) = (Vec::new(), 0);
    database.query(&sql, &[call.id.into(), (*seq).into(), count.into()], &mut |row| {
        let data = row.text(3)?;
        (*seq, read) = (row.int(0)?, read + 1);
        let data = serde_json::from_str(data).unwrap_or_else(|_| Json::String(format!("{data}…")));
        let event = RecordedEvent::new(*seq, row.int(1)?, call.started_at, row.text(2)?, data);
        if wanted(&event) {
            recorded.push(event);
        }
        Ok(())
    })?;
    Ok((read > 0).then_some(recorded))
}

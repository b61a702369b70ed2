//! Retention, which drops old records, and copies of a history.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;

use crate::audit::to_hex;
use crate::committer::Committer;
use crate::database::{Database, Value, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Record;
use crate::histogram::DAY;
use crate::projection::{TEXT_BYTES_MAX, opening_text};
use crate::query::{COLUMNS, parse_row};
use crate::store::{JournalOptions, Store};

/// The limits of the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// The greatest age of a record.
    pub age_max: Option<Duration>,
    /// The largest size of the history. Beyond it, the oldest records are dropped.
    pub bytes_max: Option<u64>,
}

/// The records that were dropped, or would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Pruned {
    /// The number of records.
    pub records: u64,
    /// The number of calls.
    pub executions: u64,
    /// The last record that was dropped; 0 if none was.
    pub up_to_seq: i64,
    /// The size of the history now, in bytes.
    pub bytes: u64,
}

/// The result of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Copied {
    /// The number of records.
    pub records: u64,
    /// The number of calls.
    pub executions: u64,
}

impl Store {
    /// Returns what [`Store::prune`] would drop.
    pub fn prunable(&self, retention: &Retention) -> Result<Pruned, StoreError> {
        self.with(|database| prunable(database, retention, i64::MAX))
    }

    /// Drops the oldest records, as the retention says. A new record says what was dropped, so the trail can still be
    /// verified. An open call keeps all records since its opening; `bytes` shows if these are more than allowed.
    pub fn prune(&self, retention: &Retention, options: &JournalOptions) -> Result<Pruned, StoreError> {
        let mut pruned = self.prunable(retention)?;
        if pruned.records == 0 {
            return Ok(pruned);
        }
        let last = self.with(|database| one_int(database, "SELECT seq FROM trail", &[]))?.unwrap_or(0);
        let mut committer = self.committer(options)?;
        committer.record_and_drop(&pruned)?;
        // Records differ in size and empty tables have a size, too, so a share of the records is not the same share of
        // the bytes.
        let rest = Retention { age_max: None, ..*retention };
        for _ in 0..ROUNDS_MAX {
            // Each round adds a record, which stays.
            let more = prunable(&mut *committer.database, &rest, last)?;
            if more.records == 0 {
                break;
            }
            committer.record_and_drop(&more)?;
            pruned.records += more.records;
            pruned.executions += more.executions;
            pruned.up_to_seq = more.up_to_seq;
        }
        committer.close();
        committer.database.release_space()?;
        pruned.bytes = committer.database.size()?;
        Ok(pruned)
    }

    /// Copies the whole history into a new file while others write. The history must be a file itself.
    pub fn backup(&self, target: &Path) -> Result<(), StoreError> {
        self.with(|database| database.backup(target))
    }

    /// Copies a snapshot of the history into another one, which must be new. Open calls are closed there, as *outcome
    /// unknown*, by the first executor that writes there.
    pub fn copy_to(&self, target: &Store) -> Result<Copied, StoreError> {
        self.with(|from| {
            target.with(|to| {
                let mut copied = Copied::default();
                from.in_snapshot(&mut |from| {
                    to.in_transaction(&mut |to| {
                        if one_int(to, "SELECT seq FROM trail", &[])? != Some(0) {
                            return Err(StoreError::Query(format!("the history `{}` is not empty", target.address())));
                        }
                        copied = copy_all(from, to)?;
                        Ok(())
                    })
                })?;
                Ok(copied)
            })
        })
    }
}

impl Committer {
    /// Drops some of the records beyond the limits, if there are enough of them. Returns true if there are more.
    pub(crate) fn drop_some(&mut self, retention: &Retention) -> Result<bool, StoreError> {
        let first = one_int(&mut *self.database, "SELECT min(seq) FROM events", &[])?.unwrap_or(1);
        let now = trusted_now(&mut *self.database)?;
        let last = last_droppable(&mut *self.database, retention, first + PRUNE_AT_ONCE, now)?;
        if last - first < PRUNE_MIN {
            return Ok(false);
        }
        let pruned = pruned_up_to(&mut *self.database, last)?;
        self.record_and_drop(&pruned)?;
        self.database.release_space()?;
        Ok(last == first + PRUNE_AT_ONCE)
    }

    fn record_and_drop(&mut self, pruned: &Pruned) -> Result<(), StoreError> {
        let cut = pruned.up_to_seq;
        let mut hash = String::new();
        self.database.query("SELECT hash FROM events WHERE seq = ?1", &[cut.into()], &mut |row| {
            hash = to_hex(row.bytes(0)?);
            Ok(())
        })?;
        let data = json!({"up_to": cut, "hash": hash, "records": pruned.records, "executions": pruned.executions});
        let dropped = Record::own("journal.dropped", Timestamp::now().as_microsecond(), None, &data);
        // The record comes first: if the process stops in between, nothing is gone without a record.
        self.signing.make_due();
        self.commit(&[Arc::new(dropped)], false)?;
        failpoint::reach("upkeep.recorded");
        self.database.in_transaction(&mut |database| delete_up_to(database, cut))?;
        failpoint::reach("upkeep.dropped");
        self.database.unindex_words(cut)
    }
}

/// The number of records beyond the limits from which an executor drops them by itself, and the number it drops at a
/// time.
const PRUNE_MIN: i64 = 1_000;
const PRUNE_AT_ONCE: i64 = 5_000;

/// Maximum number of rounds until the size is small enough.
const ROUNDS_MAX: usize = 100;

fn prunable(database: &mut dyn Database, retention: &Retention, most: i64) -> Result<Pruned, StoreError> {
    let cut = last_droppable(database, retention, most, Timestamp::now().as_microsecond())?;
    pruned_up_to(database, cut)
}

/// Returns the time, as far as the history confirms it. A clock that is far ahead is not trusted for a day, so that no
/// new records are dropped because of it: until then the result is at most a day after the last call before the jump.
pub(crate) fn trusted_now(database: &mut dyn Database) -> Result<i64, StoreError> {
    let now = Timestamp::now().as_microsecond();
    let sql = "SELECT max(started_at) FROM tool_executions WHERE started_at < ?1";
    let before = one_int(database, sql, &[Value::Time(now.saturating_sub(DAY))])?;
    Ok(before.map_or(now, |before| now.min(before.saturating_add(DAY))))
}

/// Returns the last record that may be dropped at the time `now`, up to `most`.
fn last_droppable(database: &mut dyn Database, retention: &Retention, most: i64, now: i64) -> Result<i64, StoreError> {
    let first = one_int(database, "SELECT min(seq) FROM events", &[])?.unwrap_or(1);
    let last = one_int(database, "SELECT seq FROM trail", &[])?.unwrap_or(0);
    let mut cut = first - 1;
    if let Some(age) = retention.age_max {
        let oldest = now.saturating_sub(i64::try_from(age.as_micros()).unwrap_or(i64::MAX));
        cut = last_before(database, first, last, oldest)?.min(most);
        // If the clock was wrong for a while, young records may come before seemingly old ones.
        let sql = "SELECT min(seq) FROM events WHERE seq <= ?1 AND at BETWEEN ?2 AND ?3";
        if let Some(young) = one_int(database, sql, &[cut.into(), Value::Time(oldest), Value::Time(now)])? {
            cut = young - 1;
        }
    }
    if let Some(bytes_max) = retention.bytes_max {
        let bytes = database.rows_size()?;
        if bytes > bytes_max {
            // Drops a share of the records as large as that of the bytes, and a little more, so that not every call
            // drops some.
            let share = 1.0 - (bytes_max as f64 * 0.9) / bytes as f64;
            cut = cut.max(first - 1 + ((last - first + 1) as f64 * share).ceil() as i64).min(most);
        }
    }
    let open = one_int(database, "SELECT min(id) FROM tool_executions WHERE completed_at IS NULL", &[])?;
    Ok(cut.min(last - 1).min(open.map_or(i64::MAX, |open| open - 1)).max(first - 1))
}

/// Returns the last record that is older than `time`, if times only increase along the trail.
fn last_before(database: &mut dyn Database, first: i64, last: i64, time: i64) -> Result<i64, StoreError> {
    let sql = "SELECT at FROM events WHERE seq = ?1";
    let (mut older, mut newer) = (first - 1, last + 1);
    while newer - older > 1 {
        let middle = older + (newer - older) / 2;
        match one_int(database, sql, &[middle.into()])? {
            Some(at) if at < time => older = middle,
            _ => newer = middle,
        }
    }
    Ok(older)
}

/// The SQL condition for calls that began and ended within the dropped records.
const ENDED_WITHIN: &str = "id <= ?1 AND completed_at IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM events e WHERE e.execution = tool_executions.id AND e.seq > ?1)";

fn pruned_up_to(database: &mut dyn Database, cut: i64) -> Result<Pruned, StoreError> {
    let records = one_int(database, "SELECT count(*) FROM events WHERE seq <= ?1", &[cut.into()])?.unwrap_or(0) as u64;
    let up_to_seq = if records == 0 { 0 } else { cut };
    let executions = match records {
        0 => 0,
        _ => one_int(database, &format!("SELECT count(*) FROM tool_executions WHERE {ENDED_WITHIN}"), &[cut.into()])?
            .unwrap_or(0) as u64,
    };
    Ok(Pruned { records, executions, up_to_seq, bytes: database.size()? })
}

fn delete_up_to(database: &mut dyn Database, cut: i64) -> Result<(), StoreError> {
    let cut = [Value::Int(cut)];
    database.execute(&format!("DELETE FROM tool_executions WHERE {ENDED_WITHIN}"), &cut)?;
    database.execute("DELETE FROM events WHERE seq <= ?1", &cut)?;
    database.execute("DELETE FROM heads WHERE seq <= ?1", &cut)?;
    // Answers with a key stay until they expire, so that no effect is repeated.
    let answers = "DELETE FROM answers WHERE id <= ?1 AND key IS NULL
        AND id NOT IN (SELECT id FROM tool_executions WHERE id <= ?1)";
    database.execute(answers, &cut).map(drop)
}

/// A table and its columns, each with the letter of its type: `i`nteger, `r`eal, `t`ext, point in time (`@`), `b`ytes.
struct Table {
    name: &'static str,
    columns: &'static [(&'static str, char)],
}

const TABLES: &[Table] = &[
    Table {
        name: "instances",
        columns: &[
            ("number", 'i'),
            ("id", 't'),
            ("version", 't'),
            ("host", 't'),
            ("process", 'i'),
            ("started_at", '@'),
            ("seen_at", '@'),
            ("ended_at", '@'),
            ("last_seq", 'i'),
        ],
    },
    Table {
        name: "events",
        columns: &[
            ("seq", 'i'),
            ("instance", 'i'),
            ("instance_seq", 'i'),
            ("at", '@'),
            ("name", 't'),
            ("execution", 'i'),
            ("subject", 't'),
            ("data", 't'),
            ("hash", 'b'),
        ],
    },
    Table {
        name: "tool_executions",
        columns: &[
            ("id", 'i'),
            ("execution_id", 't'),
            ("tool_name", 't'),
            ("parameters_json", 't'),
            ("status", 't'),
            ("error_message", 't'),
            ("error_code", 't'),
            ("started_at", '@'),
            ("completed_at", '@'),
            ("duration_ms", 'r'),
            ("output_size_bytes", 'i'),
            ("sandbox_id", 't'),
            ("agent_id", 't'),
            ("user_id", 't'),
            ("batch_id", 't'),
            ("session_id", 't'),
            ("tenant_id", 't'),
            ("attempts", 'i'),
            ("usage_json", 't'),
            ("metadata_json", 't'),
            ("workspace", 't'),
            ("instance", 'i'),
        ],
    },
    Table {
        name: "answers",
        columns: &[
            ("id", 'i'),
            ("task", 'i'),
            ("tenant", 't'),
            ("key", 't'),
            ("fingerprint", 't'),
            ("result_json", 't'),
            ("expires_at", '@'),
        ],
    },
    Table { name: "heads", columns: &[("seq", 'i'), ("hash", 'b'), ("at", '@'), ("key", 't'), ("signature", 'b')] },
    Table {
        name: "tallies",
        columns: &[
            ("day", 'i'),
            ("tenant_id", 't'),
            ("agent_id", 't'),
            ("tool_name", 't'),
            ("status", 't'),
            ("bucket", 'i'),
            ("calls", 'i'),
            ("output_bytes", 'i'),
        ],
    },
    Table { name: "trail", columns: &[("one", 'i'), ("seq", 'i'), ("hash", 'b')] },
];

fn copy_all(from: &mut dyn Database, to: &mut dyn Database) -> Result<Copied, StoreError> {
    let mut copied = Copied::default();
    for table in TABLES {
        let rows = copy_table(from, to, table)?;
        match table.name {
            "events" => copied.records = rows,
            "tool_executions" => copied.executions = rows,
            _ => {}
        }
    }
    copy_words(from, to)?;
    to.advance_counters()?;
    Ok(copied)
}

/// Maximum number of values in one statement.
const VALUES_MAX: usize = 8_000;

fn copy_table(from: &mut dyn Database, to: &mut dyn Database, table: &Table) -> Result<u64, StoreError> {
    if table.name == "trail" {
        to.execute("DELETE FROM trail", &[])?;
    }
    let names = table.columns.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let sql = format!("SELECT {names} FROM {}", table.name);
    let width = table.columns.len();
    let (mut values, mut copied) = (Vec::new(), 0);
    let mut put = |values: &mut Vec<Value>| {
        let placeholders = (0..values.len()).map(|at| {
            let kind = table.columns[at % width].1;
            to.dialect().placeholder(at + 1, kind)
        });
        let rows = placeholders.collect::<Vec<_>>();
        let rows = rows.chunks(width).map(|row| format!("({})", row.join(", "))).collect::<Vec<_>>().join(", ");
        copied += to.execute(&format!("INSERT INTO {} ({names}) VALUES {rows}", table.name), values)?;
        values.clear();
        Ok::<(), StoreError>(())
    };
    from.query(&sql, &[], &mut |row| {
        for (at, (_, kind)) in table.columns.iter().enumerate() {
            values.push(match kind {
                'i' => row.int_or_none(at)?.into(),
                '@' => row.int_or_none(at)?.map_or(Value::Null, Value::Time),
                'r' => row.real_or_none(at)?.map_or(Value::Null, Value::Real),
                'b' => Value::Bytes(row.bytes(at)?.to_vec()),
                _ => row.text_or_none(at)?.into(),
            });
        }
        if values.len() + width > VALUES_MAX { put(&mut values) } else { Ok(()) }
    })?;
    if !values.is_empty() {
        put(&mut values)?;
    }
    Ok(copied)
}

/// Rebuilds the full-text index from the rows.
fn copy_words(from: &mut dyn Database, to: &mut dyn Database) -> Result<(), StoreError> {
    let sql = format!("SELECT {} FROM tool_executions WHERE completed_at IS NOT NULL", COLUMNS);
    let mut found = Vec::new();
    from.query(&sql, &[], &mut |row| {
        let row = parse_row(row)?;
        let mut text = opening_text(&row);
        if let Some(error) = &row.error_message {
            text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
            text.push(' ');
            text.push_str(error);
        }
        found.push((row.id, text));
        if found.len() >= 1_000 { to.add_words(&std::mem::take(&mut found)) } else { Ok(()) }
    })?;
    to.add_words(&found)
}

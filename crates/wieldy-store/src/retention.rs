//! Retention: drops old records, by age or size.

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
use crate::store::{JournalOptions, Store};

/// The age and the size beyond which the history drops its oldest records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// The greatest age of a record.
    pub age_max: Option<Duration>,
    /// The largest size of the history. Beyond it, the oldest records are dropped.
    pub bytes_max: Option<u64>,
    /// The greatest age of a recorded result. Results that are older are dropped, while their records stay.
    pub results_age_max: Option<Duration>,
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
    /// The number of results that were dropped although the records of their calls stay.
    pub results: u64,
    /// The size of the history now, in bytes.
    pub bytes: u64,
}

impl Store {
    /// Returns what [`Store::prune`] would drop.
    pub fn prunable(&self, retention: &Retention) -> Result<Pruned, StoreError> {
        self.with(|database| {
            let mut pruned = prunable(database, retention, i64::MAX)?;
            let cut = last_droppable_result(database, retention, Timestamp::now().as_microsecond())?;
            pruned.results = results_between(database, pruned.up_to_seq, cut)?;
            Ok(pruned)
        })
    }

    /// Drops the oldest records, as the retention says. A new record says what was dropped, so the trail can still be
    /// verified. An open call keeps all records since its opening; `bytes` shows if these are more than allowed.
    pub fn prune(&self, retention: &Retention, options: &JournalOptions) -> Result<Pruned, StoreError> {
        let mut pruned = self.prunable(retention)?;
        if pruned.records == 0 && pruned.results == 0 {
            return Ok(pruned);
        }
        let last = self.with(|database| one_int(database, "SELECT seq FROM trail", &[]))?.unwrap_or(0);
        let mut committer = self.committer(options)?;
        if pruned.records > 0 {
            committer.record_and_drop(&pruned)?;
        }
        if pruned.results > 0 {
            let now = Timestamp::now().as_microsecond();
            let cut = last_droppable_result(&mut *committer.database, retention, now)?;
            committer.record_and_drop_results(cut)?;
        }
        // Records differ in size and empty tables have a size, too, so a share of the records is not the same share of
        // the bytes.
        let rest = Retention { bytes_max: retention.bytes_max, ..Retention::default() };
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
}

impl Committer {
    /// Drops some of the records beyond the limits, if there are enough of them. Returns true if there are more.
    pub(crate) fn drop_some(&mut self, retention: &Retention) -> Result<bool, StoreError> {
        let first = one_int(&mut *self.database, "SELECT min(seq) FROM events", &[])?.unwrap_or(1);
        let now = trusted_now(&mut *self.database)?;
        self.drop_results(retention, now)?;
        let last = last_droppable(&mut *self.database, retention, first + PRUNE_AT_ONCE, now)?;
        if last - first < PRUNE_MIN {
            return Ok(false);
        }
        let pruned = pruned_up_to(&mut *self.database, last)?;
        self.record_and_drop(&pruned)?;
        self.database.release_space()?;
        Ok(last == first + PRUNE_AT_ONCE)
    }

    /// Drops the results beyond their age, if there are enough of them or they are late.
    fn drop_results(&mut self, retention: &Retention, now: i64) -> Result<(), StoreError> {
        let cut = last_droppable_result(&mut *self.database, retention, now)?;
        let late = last_droppable_result(&mut *self.database, retention, now.saturating_sub(RESULTS_LATENESS))?;
        if results_between(&mut *self.database, 0, cut)? >= PRUNE_MIN as u64
            || results_between(&mut *self.database, 0, late)? > 0
        {
            self.record_and_drop_results(cut)?;
            self.database.release_space()?;
        }
        Ok(())
    }

    /// Drops the results of the calls up to `cut`.
    fn record_and_drop_results(&mut self, cut: i64) -> Result<(), StoreError> {
        let results = results_between(&mut *self.database, 0, cut)?;
        let data = json!({"up_to": cut, "results": results});
        let dropped = Record::own(RESULTS_DROPPED, Timestamp::now().as_microsecond(), None, &data);
        // The record comes first, as for records.
        self.signing.make_due();
        self.commit(&[Arc::new(dropped)], false)?;
        failpoint::reach("upkeep.results_recorded");
        self.database.execute("DELETE FROM results WHERE id <= ?1", &[cut.into()])?;
        self.database.unindex_words(cut)
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

/// The name of the record that says which results were dropped before their records.
pub(crate) const RESULTS_DROPPED: &str = "journal.results.dropped";
/// The time, in microseconds, after which an executor drops even a few results beyond their age.
const RESULTS_LATENESS: i64 = 60 * 60 * 1_000_000;

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
        cut = last_older(database, age, most, now)?;
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

/// Returns the last call whose result may be dropped at the time `now`. Calls count by the time of their opening.
fn last_droppable_result(database: &mut dyn Database, retention: &Retention, now: i64) -> Result<i64, StoreError> {
    let Some(age) = retention.results_age_max else { return Ok(0) };
    last_older(database, age, i64::MAX, now)
}

fn results_between(database: &mut dyn Database, after: i64, up_to: i64) -> Result<u64, StoreError> {
    let sql = "SELECT count(*) FROM results WHERE id > ?1 AND id <= ?2";
    Ok(one_int(database, sql, &[after.into(), up_to.into()])?.unwrap_or_default() as u64)
}

/// Returns the last record up to `most` such that it and all before it are older than `age`.
fn last_older(database: &mut dyn Database, age: Duration, most: i64, now: i64) -> Result<i64, StoreError> {
    let first = one_int(database, "SELECT min(seq) FROM events", &[])?.unwrap_or(1);
    let last = one_int(database, "SELECT seq FROM trail", &[])?.unwrap_or(0);
    let oldest = now.saturating_sub(i64::try_from(age.as_micros()).unwrap_or(i64::MAX));
    let cut = last_before(database, first, last, oldest)?.min(most);
    // If the clock was wrong for a while, young records may come before seemingly old ones.
    let sql = "SELECT min(seq) FROM events WHERE seq <= ?1 AND at BETWEEN ?2 AND ?3";
    let young = one_int(database, sql, &[cut.into(), Value::Time(oldest), Value::Time(now)])?;
    Ok(young.map_or(cut, |young| young - 1))
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
    Ok(Pruned { records, executions, up_to_seq, results: 0, bytes: database.size()? })
}

fn delete_up_to(database: &mut dyn Database, cut: i64) -> Result<(), StoreError> {
    let cut = [Value::Int(cut)];
    database.execute(&format!("DELETE FROM tool_executions WHERE {ENDED_WITHIN}"), &cut)?;
    database.execute("DELETE FROM events WHERE seq <= ?1", &cut)?;
    database.execute("DELETE FROM heads WHERE seq <= ?1", &cut)?;
    database.execute(
        "DELETE FROM results WHERE id <= ?1 AND id NOT IN (SELECT id FROM tool_executions WHERE id <= ?1)",
        &cut,
    )?;
    let entries = "DELETE FROM metadata_entries WHERE execution <= ?1
        AND execution NOT IN (SELECT id FROM tool_executions WHERE id <= ?1)";
    database.execute(entries, &cut)?;
    // Answers with a key stay until they expire, so that no effect is repeated.
    let answers = "DELETE FROM answers WHERE id <= ?1 AND key IS NULL
        AND id NOT IN (SELECT id FROM tool_executions WHERE id <= ?1)";
    database.execute(answers, &cut).map(drop)
}

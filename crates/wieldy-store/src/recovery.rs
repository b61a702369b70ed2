//! Recovery after executors that stopped without closing their journal. Their write-ahead logs are committed, in their
//! name. Then their open calls are closed as *outcome unknown*, or handed to the next executor if their callers wanted
//! a rerun. Results of tasks and idempotency keys that clients may still ask for (table `answers`) are returned to it.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value as Json, json};
use wieldy_core::{
    CallError, CallState, Caller, Code, ExecutionId, Interrupted, Keyed, Remembered, RememberedAnswer, TASK_TTL,
    ToolResult,
};

use crate::committer::{Committer, GROUP_MAX};
use crate::database::{Database, Dialect, Row, Value};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Record;
use crate::histogram::DAY;
use crate::metadata::is_rerun;
use crate::projection::{CallRow, OpenCall, Projection};
use crate::query::{COLUMNS, parse_row};
use crate::retention::trusted_now;
use crate::sandboxes;
use crate::wal::OrphanedWal;

/// Maximum number of rows that one statement takes over.
const ROWS_AT_ONCE_MAX: usize = 500;

/// Maximum number of answers that an executor gets when it starts.
const ANSWERS_MAX: i64 = 10_000;

/// The time for which a call that is to be run again is left to an executor that does so. Then it is closed like all
/// others.
const RERUN_PATIENCE: Duration = TASK_TTL;

/// Commits the write-ahead logs of dead executors and deletes them. Returns without doing so if another process works
/// on them for longer than `patience`.
pub(crate) fn commit_orphaned_wals(database: &mut dyn Database, patience: Duration) -> Result<(), StoreError> {
    for wal in database.take_orphaned_wals(patience)? {
        let path = wal.path.display().to_string();
        match commit_orphaned_wal(database, &wal) {
            Ok(true) => wal.remove(),
            Ok(false) if wal.is_empty() => {} // its executor may be about to start
            Ok(false) => tracing::warn!(path, "a write-ahead log belongs to no executor of this history"),
            Err(error) if error.is_passing() => return Err(error),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(path, error, "cannot apply all of a write-ahead log; it is renamed to `.damaged`");
                wal.rename_damaged()
                    .map_err(|error| StoreError::Unavailable(format!("cannot rename `{path}`: {error}")))?;
            }
        }
    }
    Ok(())
}

/// Commits the records of a log that are not committed yet, in the name of its executor. Returns false if the history
/// does not know the executor.
fn commit_orphaned_wal(database: &mut dyn Database, wal: &OrphanedWal) -> Result<bool, StoreError> {
    let mut instance = None;
    let sql = "SELECT number, last_seq, ended_at IS NOT NULL FROM instances WHERE id = ?1";
    database.query(sql, &[wal.instance.as_str().into()], &mut |row| {
        instance = Some((row.int(0)?, row.int(1)?, row.flag(2)?));
        Ok(())
    })?;
    let Some((number, last_seq, has_ended)) = instance else { return Ok(false) };
    let contents = wal.read().map_err(|error| StoreError::Damaged(error.to_string()))?;
    let indexes_on_write = database.dialect() != Dialect::Sqlite;
    let mut projection = Projection::new(wal.instance.parse().unwrap_or_default(), contents.task_ttl, indexes_on_write);
    let (records, is_all) = contents.records_after(last_seq as u64);
    if has_ended && !records.is_empty() {
        return Err(StoreError::Damaged("its executor was considered dead before".into()));
    }
    failpoint::reach("orphan.read");
    if !records.is_empty() {
        for row in open_calls(database, "instance = ?1 AND completed_at IS NULL", number)? {
            let answer = ExpectedAnswer::load(database, row.id)?;
            if let Ok(id) = row.execution_id.parse() {
                projection.continue_call(id, OpenCall::from_row(row, answer.is_there, answer.is_task));
            }
        }
    }
    for group in records.chunks(GROUP_MAX) {
        let changeset = database.write(number, &mut |head| projection.project(group, head))?;
        projection.confirm(changeset);
        failpoint::reach("orphan.committed");
    }
    if is_all { Ok(true) } else { Err(StoreError::Damaged("records are missing in it".into())) }
}

/// Takes over orphaned calls, and records the ends of lost sandboxes. Returns the calls to be run again, if the new
/// executor does that (`rerun`).
pub(crate) fn recover(committer: &mut Committer, rerun: bool) -> Result<Vec<Interrupted>, StoreError> {
    committer.has_lost_sandboxes |= end_dead_instances(&mut *committer.database, committer.number)?;
    let interrupted = recover_calls(committer, rerun)?;
    if committer.has_lost_sandboxes {
        sandboxes::record_lost(committer)?;
        committer.has_lost_sandboxes = false;
    }
    Ok(interrupted)
}

fn recover_calls(committer: &mut Committer, rerun: bool) -> Result<Vec<Interrupted>, StoreError> {
    let mut interrupted = Vec::new();
    let mut records = Vec::new();
    let mut rows = still_unclosed(committer)?;
    rows.extend(take_over_calls(&mut *committer.database, committer.number, rerun)?);
    for row in rows {
        let found = OrphanedCall::load(&mut *committer.database, &row)?;
        let call = OpenCall::from_row(row.clone(), found.has_answer, found.is_task);
        match found.rerun_call.clone().filter(|_| rerun) {
            Some(rerun_call) => {
                committer.projection.continue_call(rerun_call.execution, call);
                interrupted.push(rerun_call);
            }
            None => {
                committer.projection.take_over(call);
                records.push(Arc::new(found.closing(&row)));
            }
        }
    }
    if !records.is_empty() {
        tracing::warn!(calls = records.len(), "calls of executors that stopped are closed as outcome unknown");
    }
    failpoint::reach("recovery.claimed");
    for group in records.chunks(256) {
        committer.commit(group, false)?;
        failpoint::reach("recovery.closed");
    }
    Ok(interrupted)
}

/// Returns the calls that were taken over to be closed and are still open, because the write failed.
fn still_unclosed(committer: &mut Committer) -> Result<Vec<CallRow>, StoreError> {
    let mut rows = Vec::new();
    for id in committer.projection.orphaned() {
        rows.extend(open_calls(&mut *committer.database, "id = ?1 AND completed_at IS NULL", id)?);
    }
    committer.projection.clear_orphaned();
    Ok(rows)
}

/// Returns the calls that meet a condition.
fn open_calls(database: &mut dyn Database, condition: &str, value: i64) -> Result<Vec<CallRow>, StoreError> {
    let mut rows = Vec::new();
    let sql = format!("SELECT {COLUMNS} FROM tool_executions WHERE {condition}");
    database.query(&sql, &[value.into()], &mut |row| {
        rows.push(parse_row(row)?);
        Ok(())
    })?;
    Ok(rows)
}

/// Marks dead executors as ended. Returns true if there were any.
fn end_dead_instances(database: &mut dyn Database, own: i64) -> Result<bool, StoreError> {
    let mut instances = Vec::new();
    let unended = "SELECT number, id FROM instances WHERE ended_at IS NULL AND number <> ?1";
    database.query(unended, &[own.into()], &mut |row| {
        instances.push((row.int(0)?, row.text(1)?.to_owned()));
        Ok(())
    })?;
    let mut found = false;
    for (number, id) in instances {
        if !database.is_alive(&id)? {
            let sql = "UPDATE instances SET ended_at = seen_at WHERE number = ?1 AND ended_at IS NULL";
            found |= database.execute(sql, &[number.into()])? > 0;
        }
    }
    Ok(found)
}

/// Makes the open calls of dead executors this one's own, so that no other executor closes them. Calls to be run again
/// are left for a while to executors that `rerun` them.
fn take_over_calls(database: &mut dyn Database, own: i64, rerun: bool) -> Result<Vec<CallRow>, StoreError> {
    let now = Timestamp::now().as_microsecond();
    let old = if rerun { i64::MAX } else { now - RERUN_PATIENCE.as_micros() as i64 };
    let orphaned = "completed_at IS NULL AND instance <> ?1
           AND instance IN (SELECT number FROM instances WHERE ended_at IS NOT NULL)";
    // The engine's own key is read, because the metadata also has texts of the caller.
    let sql = format!("SELECT id, started_at, metadata_json FROM tool_executions WHERE {orphaned} ORDER BY id");
    let mut found = Vec::new();
    database.query(&sql, &[own.into()], &mut |row| {
        if row.int(1)? <= old || !is_rerun(row.text_or_none(2)?) {
            found.push(row.int(0)?);
        }
        Ok(())
    })?;
    // Another executor may take over the same calls meanwhile, so the condition is asked again.
    let mut rows = Vec::new();
    for ids in found.chunks(ROWS_AT_ONCE_MAX) {
        let ids = ids.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
        let set = "UPDATE tool_executions SET instance = ?1";
        let sql = format!("{set} WHERE {orphaned} AND id IN ({ids}) RETURNING {COLUMNS}");
        database.query(&sql, &[own.into()], &mut |row| {
            rows.push(parse_row(row)?);
            Ok(())
        })?;
    }
    rows.sort_unstable_by_key(|row| row.id);
    Ok(rows)
}

/// The entry of a call in `answers`, if its result may be asked for.
#[derive(Default)]
struct ExpectedAnswer {
    is_there: bool,
    is_task: bool,
    is_keyed: bool,
}

impl ExpectedAnswer {
    fn load(database: &mut dyn Database, id: i64) -> Result<Self, StoreError> {
        let mut expected = Self::default();
        database.query("SELECT task, key FROM answers WHERE id = ?1", &[id.into()], &mut |row| {
            let (is_task, is_keyed) = (row.int(0)? != 0, row.text_or_none(1)?.is_some());
            expected = Self { is_there: true, is_task, is_keyed };
            Ok(())
        })?;
        Ok(expected)
    }
}

/// The facts about an orphaned call.
struct OrphanedCall {
    has_answer: bool,
    is_task: bool,
    /// True if the call may be run again without harm: it never ran, only reads, or is idempotent.
    is_repeatable: bool,
    /// True if a later call with its idempotency key must get its answer.
    has_key: bool,
    /// The call to run again, if its caller wanted that and no part of it was hidden.
    rerun_call: Option<Interrupted>,
}

impl OrphanedCall {
    fn load(database: &mut dyn Database, row: &CallRow) -> Result<Self, StoreError> {
        let ExpectedAnswer { is_there: has_answer, is_task, is_keyed: has_key } =
            ExpectedAnswer::load(database, row.id)?;
        let (mut state, mut is_repeatable, mut opening) = (CallState::Open, true, None);
        let sql =
            "SELECT name, subject, data FROM events WHERE execution = ?1 AND name <> 'tool.call.progress' ORDER BY seq";
        database.query(sql, &[row.id.into()], &mut |event| {
            let data: Json = serde_json::from_str(event.text(2)?).unwrap_or_default();
            let attempt = data["attempt"].as_u64().unwrap_or(1) as u32;
            match event.text(0)? {
                "tool.call.pending" => {
                    let subject = event.text_or_none(1)?.and_then(|text| serde_json::from_str::<Json>(text).ok());
                    opening = Some((subject.unwrap_or_default(), data));
                }
                "tool.call.started" => {
                    is_repeatable = data["read_only"] == json!(true) || data["idempotent"] == json!(true);
                    state = CallState::Running { attempt };
                }
                "tool.retry.attempt" => state = CallState::Waiting { next_attempt: attempt },
                "tool.call.confirmation.requested" => state = CallState::Asking,
                "tool.call.confirmation.received" => state = CallState::Open,
                _ => {}
            }
            Ok(())
        })?;
        let rerun_call = opening.and_then(|(subject, mut data)| {
            let caller: Caller = serde_json::from_value(data["rerun"].take()).ok()?;
            // A question to a person ends with the process that asked it.
            (state != CallState::Asking && data["hidden"] != json!(true)).then_some(())?;
            Some(Interrupted {
                execution: row.execution_id.parse().ok()?,
                tool: row.tool.clone(),
                arguments: data["arguments"].take(),
                call_id: subject["call_id"].as_str().map(str::to_owned),
                caller,
                opened_at: Timestamp::from_microsecond(row.started_at).ok()?,
                state,
                task: is_task,
            })
        });
        let never_ran = matches!(state, CallState::Open | CallState::Asking);
        Ok(Self { has_answer, is_task, is_repeatable: is_repeatable || never_ran, has_key, rerun_call })
    }

    /// Returns the record that closes the call.
    fn closing(&self, row: &CallRow) -> Record {
        let now = Timestamp::now();
        let error = CallError::interrupted(self.is_repeatable);
        let opened_at = Timestamp::from_microsecond(row.started_at).unwrap_or(now);
        let duration_ms = ((now.as_microsecond() - row.started_at) as f64 / 1000.0).max(0.0);
        let data = json!({
            "status": error.status(), "duration_ms": duration_ms, "queued_ms": 0.0, "attempts": row.attempts,
            "cached": false, "output_bytes": 0, "error": error,
        });
        let mut record = Record::own("tool.call.failure", now.as_microsecond(), Some(row.id), &data);
        let asked_for = self.is_task || self.has_key && !self.is_repeatable;
        if let (true, Ok(id)) = (asked_for, row.execution_id.parse::<ExecutionId>()) {
            let mut result = ToolResult::failed(id, row.tool.as_str().into(), opened_at, error);
            result.attempts = u32::try_from(row.attempts).unwrap_or_default();
            record.answer = Some(json!(result).to_string());
        }
        record
    }
}

/// Returns the answers that may still be asked for, and deletes expired ones. The table `answers` has all that this
/// needs, so a key stays valid for its time even if its call was dropped.
pub(crate) fn load_remembered(
    database: &mut dyn Database,
    interrupted: Vec<Interrupted>,
) -> Result<Remembered, StoreError> {
    let now = Timestamp::now().as_microsecond();
    // Answers are deleted a day late, so that none is lost while the clock is ahead. Pending answers do not expire.
    let long_ago = trusted_now(database)?.saturating_sub(DAY);
    crate::claim::delete_void(database)?;
    let over = "DELETE FROM answers WHERE expires_at <= ?1 AND result_json IS NOT NULL";
    database.execute(over, &[Value::Time(long_ago)])?;
    let sql = "SELECT result_json, tenant, task, key, fingerprint, expires_at FROM answers
         WHERE result_json IS NOT NULL AND expires_at > ?2 ORDER BY id DESC LIMIT ?1";
    let mut answers = Vec::new();
    database.query(sql, &[ANSWERS_MAX.into(), Value::Time(now)], &mut |row| {
        answers.extend(remembered_answer(row)?);
        Ok(())
    })?;
    answers.reverse();
    Ok(Remembered { answers, interrupted })
}

/// Reads an answer. A result that cannot be read, since a newer program wrote it or it is too deep, is skipped; but its
/// idempotency key stays taken, because its call must not run again.
pub(crate) fn remembered_answer(row: &dyn Row) -> Result<Option<RememberedAnswer>, StoreError> {
    let is_keyed = row.text_or_none(3)?.is_some();
    let (result, is_read): (ToolResult, bool) = match serde_json::from_str(row.text(0)?) {
        Ok(result) => (result, true),
        Err(_) if is_keyed => (unreadable(), false),
        Err(_) => return Ok(None),
    };
    let time = |micros: i64| Timestamp::from_microsecond(micros).unwrap_or(Timestamp::MAX);
    // A result that may be retried is not bound to its key.
    let is_final = result.error.as_ref().is_none_or(|error| !error.retryable);
    let keyed = match (row.text_or_none(3)?, row.text_or_none(4)?) {
        (Some(key), Some(fingerprint)) if is_final => {
            Some(Keyed { key: key.to_owned(), fingerprint: fingerprint.to_owned(), expires_at: time(row.int(5)?) })
        }
        _ => None,
    };
    let (tenant, task) = (row.text_or_none(1)?.map(str::to_owned), is_read && row.int(2)? != 0);
    Ok(Some(RememberedAnswer { tenant, task, keyed, result }))
}

/// Returns the result that stands for one that cannot be read.
fn unreadable() -> ToolResult {
    let message = "the stored result of the call with this idempotency key cannot be read, so its outcome is unknown";
    let advice = "check whether it took effect; to run it again, use another key";
    let error = CallError::new(Code::OutcomeUnknown, message).suggest(advice).retryable(false);
    // Only the outcome is given to later calls.
    let id = uuid::Uuid::nil().to_string().parse().expect("it has the form of an id");
    ToolResult::failed(id, Arc::default(), Timestamp::now(), error)
}

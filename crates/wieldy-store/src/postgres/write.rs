//! Writes a group of records: one statement, one round trip, one sync of the server's disk, for any number of calls.
//!
//! The statement is a compare-and-swap: it moves the head of the trail if the head is where this connection expects it,
//! and writes the rest only then. So the groups of writers on many machines have one order. A group that is sent twice,
//! because the result of the first attempt got lost, is written once: the statement checks the executor's event
//! numbers, too.

use futures_util::future::join_all;
use tokio_postgres::types::ToSql;

use super::values::{Time, words};
use super::{Postgres, QueryError, WRITING};
use crate::audit::from_hex;
use crate::claim::RELEASE;
use crate::database::{Database, Value};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::{Head, StoredResult};
use crate::notes::NoteChange;
use crate::projection::{AnswerChange, CallRow, Changeset};

/// The number of lost races after which a writer locks the trail.
const LOST_RACES_MAX: usize = 2;

/// The statement that writes a group. It returns 1 if the head of the trail was where it was expected.
const WRITE: &str = "
WITH own AS (
  SELECT FROM instances WHERE number = $1 AND ended_at IS NULL AND last_seq < $2 FOR UPDATE
), moved AS (
  UPDATE trail SET seq = $7, hash = $8 WHERE one = 1 AND seq = $5 AND hash = $6 AND EXISTS (SELECT FROM own) RETURNING seq
), seen AS (
  UPDATE instances SET seen_at = clock_timestamp(), last_seq = coalesce($3, last_seq),
    ended_at = CASE WHEN $4 THEN clock_timestamp() END
  WHERE number = $1 AND EXISTS (SELECT FROM moved)
), added AS (
  INSERT INTO events (seq, instance, instance_seq, at, name, execution, subject, data, hash)
  SELECT r.seq, $1, r.instance_seq, r.at, r.name, r.execution, r.subject, r.data, r.hash
  FROM unnest($9::bigint[], $10::bigint[], $11::timestamptz[], $12::text[], $13::bigint[], $14::text[], $15::text[],
    $16::bytea[]) AS r (seq, instance_seq, at, name, execution, subject, data, hash)
  WHERE EXISTS (SELECT FROM moved)
), opened AS (
  INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, error_message, error_code,
    started_at, completed_at, duration_ms, output_size_bytes, sandbox_id, agent_id, user_id, batch_id, session_id,
    tenant_id, attempts, usage_json, metadata_json, workspace, provider, result_size_bytes, instance)
  SELECT r.*, $1
  FROM unnest($17::bigint[], $18::text[], $19::text[], $20::text[], $21::text[], $22::text[], $23::text[],
    $24::timestamptz[], $25::timestamptz[], $26::double precision[], $27::bigint[], $28::text[], $29::text[], $30::text[],
    $31::text[], $32::text[], $33::text[], $34::bigint[], $35::text[], $36::text[], $37::text[], $38::text[],
    $60::bigint[]) AS r
  WHERE EXISTS (SELECT FROM moved)
), changed AS (
  UPDATE tool_executions e SET status = r.status, error_message = r.error_message, error_code = r.error_code,
    completed_at = r.completed_at, duration_ms = r.duration_ms, output_size_bytes = r.output_bytes,
    sandbox_id = r.sandbox, attempts = r.attempts, usage_json = r.usage, metadata_json = r.metadata,
    result_size_bytes = r.result_bytes, instance = $1
  FROM unnest($39::bigint[], $40::text[], $41::text[], $42::text[], $43::timestamptz[], $44::double precision[],
    $45::bigint[], $46::text[], $47::bigint[], $48::text[], $49::text[], $61::bigint[]) AS r (id, status, error_message,
    error_code, completed_at, duration_ms, output_bytes, sandbox, attempts, usage, metadata, result_bytes)
  WHERE e.id = r.id AND EXISTS (SELECT FROM moved)
), worded AS (
  INSERT INTO words (id, words)
  SELECT r.id, r.words::tsvector FROM unnest($50::bigint[], $51::text[]) AS r (id, words)
  WHERE EXISTS (SELECT FROM moved)
), tallied AS (
  INSERT INTO tallies AS t (day, tenant_id, agent_id, tool_name, status, bucket, calls, output_bytes, result_bytes)
  SELECT r.* FROM unnest($52::bigint[], $53::text[], $54::text[], $55::text[], $56::text[], $57::bigint[],
    $58::bigint[], $59::bigint[], $62::bigint[]) AS r
  WHERE EXISTS (SELECT FROM moved)
  ON CONFLICT (day, tenant_id, agent_id, tool_name, status, bucket)
  DO UPDATE SET calls = t.calls + excluded.calls, output_bytes = t.output_bytes + excluded.output_bytes,
    result_bytes = t.result_bytes + excluded.result_bytes
), resulted AS (
  INSERT INTO results (id, result_json)
  SELECT r.* FROM unnest($63::bigint[], $64::text[]) AS r
  WHERE EXISTS (SELECT FROM moved)
)
SELECT count(*) FROM moved";

pub(super) fn write(
    database: &mut Postgres,
    instance: i64,
    project: &mut dyn FnMut(&Head) -> Changeset,
) -> Result<Changeset, StoreError> {
    let mut lost_races = 0;
    loop {
        // If this fails, the known head is worth nothing.
        let head = match database.head.take() {
            Some(head) => head,
            None => read_trail_state(database, instance, "")?.head,
        };
        let changeset = project(&head);
        failpoint::reach("write.begun");
        if try_write(database, instance, &changeset)? {
            failpoint::reach("write.put");
            database.head = Some(changeset.head);
            return Ok(changeset);
        }
        lost_races += 1;
        let end = read_trail_state(database, instance, "")?;
        check_can_write(&end, &changeset)?;
        if lost_races >= LOST_RACES_MAX {
            return write_locked(database, instance, project);
        }
        database.head = Some(end.head);
    }
}

/// Writes while the trail is locked.
fn write_locked(
    database: &mut Postgres,
    instance: i64,
    project: &mut dyn FnMut(&Head) -> Changeset,
) -> Result<Changeset, StoreError> {
    // A writer that stops in the middle must not block the others for long.
    database.batch("BEGIN; SET LOCAL idle_in_transaction_session_timeout = '3s'")?;
    let mut write = || {
        let end = read_trail_state(database, instance, "FOR UPDATE OF t")?;
        let changeset = project(&end.head);
        check_can_write(&end, &changeset)?;
        if !send(database, instance, &changeset)? {
            let why = "the end of the trail moved, although this executor has locked it";
            return Err(StoreError::Unavailable(format!("{WRITING}: {why}")));
        }
        database.batch("COMMIT")?;
        database.head = Some(changeset.head);
        Ok(changeset)
    };
    let written = write();
    if written.is_err() {
        let _ = database.batch("ROLLBACK");
    }
    written
}

/// The head of the trail, and the state of the instance that writes.
struct TrailState {
    head: Head,
    has_ended: bool,
    last_seq: i64,
}

fn read_trail_state(database: &mut Postgres, instance: i64, lock: &str) -> Result<TrailState, StoreError> {
    let sql = format!(
        "SELECT t.seq, t.hash, i.ended_at IS NOT NULL, i.last_seq FROM trail t, instances i
         WHERE t.one = 1 AND i.number = ?1 {lock}"
    );
    let mut found = None;
    database.query(&sql, &[instance.into()], &mut |row| {
        let hash = row.bytes(1)?.try_into();
        let hash = hash.map_err(|_| StoreError::Damaged("the end of the trail has no hash".into()))?;
        let head = Head { seq: row.int(0)?, hash };
        found = Some(TrailState { head, has_ended: row.flag(2)?, last_seq: row.int(3)? });
        Ok(())
    })?;
    found.ok_or_else(|| StoreError::Damaged("this executor is no longer in the history".into()))
}

/// Checks that writing still makes sense after the head of the trail has moved.
fn check_can_write(end: &TrailState, changeset: &Changeset) -> Result<(), StoreError> {
    if end.has_ended {
        return Err(StoreError::TakenForDead);
    }
    if end.last_seq >= first_seq(changeset) {
        // A session that we gave up wrote them. The committer notices that when it connects again.
        return Err(StoreError::Unavailable(format!("{WRITING}: some of the records are already stored")));
    }
    Ok(())
}

/// Returns the number of the executor's first event in the group.
fn first_seq(changeset: &Changeset) -> i64 {
    let numbers = changeset.events.iter().map(|event| event.record.instance_seq as i64);
    numbers.filter(|seq| *seq > 0).min().unwrap_or(i64::MAX)
}

/// Writes the group if the trail ends where the changeset says. Returns true if it did.
fn try_write(database: &mut Postgres, instance: i64, changeset: &Changeset) -> Result<bool, StoreError> {
    if changeset.answers.is_empty()
        && changeset.signed.is_none()
        && changeset.released.is_empty()
        && changeset.entries.is_empty()
        && changeset.sandboxes.is_empty()
        && changeset.notes.is_empty()
    {
        return send(database, instance, changeset);
    }
    database.batch("BEGIN; SET LOCAL idle_in_transaction_session_timeout = '3s'")?;
    let sent = send(database, instance, changeset);
    let ended = match sent {
        Ok(true) => database.batch("COMMIT"),
        _ => database.batch("ROLLBACK"),
    };
    sent.and_then(|moved| ended.map(|()| moved))
}

/// Sends all statements of the group, and waits once.
fn send(database: &mut Postgres, instance: i64, changeset: &Changeset) -> Result<bool, StoreError> {
    let failed = |failed: QueryError| failed.into_error(WRITING);
    let statement = database.session.statement(WRITE).map_err(failed)?;
    let mut rest = Vec::new();
    let released =
        changeset.released.iter().map(|(key, call)| (RELEASE, vec![key.as_str().into(), call.as_str().into()]));
    let signed = changeset.signed.iter().map(|head| head_statement(head, changeset));
    // If another writer was faster, its rows may be there already, and this transaction will be rolled back.
    let sql = "INSERT INTO metadata_entries (entry, execution) VALUES (?1, ?2) ON CONFLICT DO NOTHING";
    let entries = changeset.entries.iter().map(|(entry, id)| (sql, vec![Value::Bytes(entry.to_vec()), (*id).into()]));
    let sandboxes = changeset.sandboxes.iter().map(|change| change.statement(instance));
    let notes = changeset.notes.iter().map(NoteChange::statement);
    let answers = changeset.answers.iter().map(answer_statement);
    for (sql, values) in answers.chain(released).chain(signed).chain(entries).chain(sandboxes).chain(notes) {
        rest.push((database.session.statement(sql).map_err(failed)?, values));
    }
    let columns = Columns::of(changeset);
    let first_seq = first_seq(changeset);
    let last_seq = changeset.last_seq.map(|seq| seq as i64);
    let (old, new): (&[u8], &[u8]) = (&changeset.after.hash, &changeset.head.hash);
    let mut values: Vec<&(dyn ToSql + Sync)> = vec![&instance, &first_seq, &last_seq, &changeset.ends];
    values.extend([&changeset.after.seq as &(dyn ToSql + Sync), &old, &changeset.head.seq, &new]);
    values.extend(columns.values());
    let session = &database.session;
    let work = async {
        // Statements are sent in the order in which they are first polled.
        let rest =
            rest.iter().map(|(statement, values)| session.client.execute_raw(statement, super::borrowed(values)));
        let (moved, rest) = tokio::join!(biased; session.client.query_one(&statement, &values), join_all(rest));
        rest.into_iter().collect::<Result<Vec<_>, _>>()?;
        moved?.try_get::<_, i64>(0)
    };
    session.wait(database.timeout, work).map(|moved| moved == 1).map_err(failed)
}

fn answer_statement(change: &AnswerChange) -> (&'static str, Vec<Value>) {
    match change {
        AnswerChange::Expect { id, task, tenant, key, fingerprint, expires_at } => (
            "INSERT INTO answers (id, task, tenant, key, fingerprint, expires_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (id) DO UPDATE SET task = CASE WHEN excluded.task = 1 THEN 1 ELSE answers.task END,
               key = coalesce(excluded.key, answers.key), fingerprint = coalesce(excluded.fingerprint, answers.fingerprint),
               expires_at = CASE WHEN excluded.key IS NULL THEN answers.expires_at ELSE excluded.expires_at END",
            vec![
                (*id).into(),
                i64::from(*task).into(),
                tenant.as_deref().into(),
                key.as_deref().into(),
                fingerprint.as_deref().into(),
                Value::Time(*expires_at),
            ],
        ),
        AnswerChange::Store { id, result, expires_at } => (
            "UPDATE answers SET result_json = ?2, expires_at = CASE WHEN ?3::timestamptz IS NULL THEN expires_at
               WHEN key IS NULL THEN ?3::timestamptz ELSE greatest(expires_at, ?3::timestamptz) END
             WHERE id = ?1",
            vec![(*id).into(), result.as_str().into(), expires_at.map_or(Value::Null, Value::Time)],
        ),
        AnswerChange::Remove { id } => ("DELETE FROM answers WHERE id = ?1", vec![(*id).into()]),
    }
}

fn head_statement(head: &crate::audit::SignedHead, changeset: &Changeset) -> (&'static str, Vec<Value>) {
    let values = vec![
        head.seq.into(),
        Value::Bytes(changeset.head.hash.to_vec()),
        Value::Time(head.at.as_microsecond()),
        head.key.as_str().into(),
        Value::Bytes(from_hex(&head.signature).unwrap_or_default()),
    ];
    // If another writer was faster, its row is there already, and this transaction will be rolled back.
    (
        "INSERT INTO heads (seq, hash, at, key, signature) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (seq) DO NOTHING",
        values,
    )
}

/// The rows of a group, column by column, in the order of the parameters of [`WRITE`] from `$9` on.
struct Columns<'a>(Vec<Box<dyn ToSql + Sync + Send + 'a>>);

impl<'a> Columns<'a> {
    fn of(changeset: &'a Changeset) -> Self {
        let mut columns = Self(Vec::with_capacity(56));
        let events = &changeset.events;
        columns.add(events, |row| row.seq);
        columns.add(events, |row| row.record.instance_seq as i64);
        columns.add(events, |row| Time(row.record.at));
        columns.add(events, |row| row.record.name);
        columns.add(events, |row| row.execution);
        columns.add(events, |row| row.record.subject.as_deref());
        columns.add(events, |row| row.record.data.as_str());
        columns.add(events, |row| &row.hash[..]);
        let opened = &changeset.opened;
        columns.add(opened, |row| row.id);
        columns.add(opened, |row| row.execution_id.as_str());
        columns.add(opened, |row| row.tool.as_str());
        columns.add(opened, |row| row.parameters.as_deref());
        columns.add(opened, |row| &*row.status);
        columns.add(opened, |row| row.error_message.as_deref());
        columns.add(opened, |row| row.error_code.as_deref());
        columns.add(opened, |row| Time(row.started_at));
        columns.add(opened, |row| row.completed_at.map(Time));
        columns.add(opened, |row| row.duration_ms);
        columns.add(opened, |row| row.output_bytes);
        columns.add(opened, |row| row.sandbox.as_deref());
        columns.add(opened, |row| row.agent.as_str());
        columns.add(opened, |row| row.user.as_deref());
        columns.add(opened, |row| row.batch.as_deref());
        columns.add(opened, |row| row.session.as_deref());
        columns.add(opened, |row| row.tenant.as_deref());
        columns.add(opened, |row| row.attempts);
        columns.add(opened, |row| row.usage.as_deref());
        columns.add(opened, |row| row.metadata.as_deref());
        columns.add(opened, |row| row.workspace.as_deref());
        columns.add(opened, |row| row.provider.as_deref());
        let changed: &'a [CallRow] = &changeset.changed;
        columns.add(changed, |row| row.id);
        columns.add(changed, |row| &*row.status);
        columns.add(changed, |row| row.error_message.as_deref());
        columns.add(changed, |row| row.error_code.as_deref());
        columns.add(changed, |row| row.completed_at.map(Time));
        columns.add(changed, |row| row.duration_ms);
        columns.add(changed, |row| row.output_bytes);
        columns.add(changed, |row| row.sandbox.as_deref());
        columns.add(changed, |row| row.attempts);
        columns.add(changed, |row| row.usage.as_deref());
        columns.add(changed, |row| row.metadata.as_deref());
        columns.add(&changeset.words, |(id, _)| *id);
        columns.add(&changeset.words, |(_, text)| words(text).collect::<Vec<_>>().join(" "));
        let histogram: Vec<_> = changeset.histogram.iter().collect();
        columns.add(&histogram, |(key, _)| key.day);
        columns.add(&histogram, |(key, _)| key.tenant.as_str());
        columns.add(&histogram, |(key, _)| key.agent.as_str());
        columns.add(&histogram, |(key, _)| key.tool.as_str());
        columns.add(&histogram, |(key, _)| key.status.as_str());
        columns.add(&histogram, |(key, _)| key.bucket);
        columns.add(&histogram, |(_, counted)| counted.calls);
        columns.add(&histogram, |(_, counted)| counted.output_bytes);
        columns.add(opened, |row| row.result_bytes);
        columns.add(changed, |row| row.result_bytes);
        columns.add(&histogram, |(_, counted)| counted.result_bytes);
        columns.add(&changeset.results, |(call, _)| *call);
        columns.add(&changeset.results, |(_, record)| record.result.as_ref().map(StoredResult::json));
        columns
    }

    fn add<'r, R, T: ToSql + Sync + Send + 'a>(&mut self, rows: &'r [R], value: impl Fn(&'r R) -> T) {
        self.0.push(Box::new(rows.iter().map(value).collect::<Vec<T>>()));
    }

    fn values(&self) -> impl Iterator<Item = &(dyn ToSql + Sync)> {
        self.0.iter().map(|column| &**column as &(dyn ToSql + Sync))
    }
}

//! Writes a group of records: one transaction, one sync of the disk, for any number of calls.

use jiff::Timestamp;
use rusqlite::{Connection, Transaction, TransactionBehavior, params, params_from_iter};

use super::store_error;
use crate::audit::from_hex;
use crate::claim::RELEASE;
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::{Head, StoredResult};
use crate::projection::{AnswerChange, CallRow, Changeset};

pub(super) fn write(
    connection: &mut Connection,
    instance: i64,
    project: &mut dyn FnMut(&Head) -> Changeset,
) -> Result<Changeset, StoreError> {
    let failed = |error: rusqlite::Error| store_error("cannot write the history", &error);
    // From here on no other process can append to the trail.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let (head, has_ended) = {
        let sql = "SELECT seq, hash, ended_at IS NOT NULL FROM trail, instances WHERE number = ?1";
        let mut statement = transaction.prepare_cached(sql).map_err(failed)?;
        let read = |row: &rusqlite::Row<'_>| Ok((Head { seq: row.get(0)?, hash: row.get(1)? }, row.get(2)?));
        statement.query_row([instance], read).map_err(failed)?
    };
    if has_ended {
        return Err(StoreError::TakenForDead);
    }
    failpoint::reach("write.begun");
    let changeset = project(&head);
    put(&transaction, instance, &changeset).map_err(failed)?;
    failpoint::reach("write.put");
    transaction.commit().map_err(failed)?;
    Ok(changeset)
}

fn put(transaction: &Transaction<'_>, instance: i64, changeset: &Changeset) -> rusqlite::Result<()> {
    put_events(transaction, instance, changeset)?;
    put_calls(transaction, instance, changeset)?;
    for (entry, execution) in &changeset.entries {
        let sql = "INSERT INTO metadata_entries (entry, execution) VALUES (?1, ?2)";
        transaction.prepare_cached(sql)?.execute(params![entry, execution])?;
    }
    for change in &changeset.sandboxes {
        let (sql, values) = change.statement(instance);
        transaction.prepare_cached(sql)?.execute(params_from_iter(&values))?;
    }
    for change in &changeset.notes {
        let (sql, values) = change.statement();
        transaction.prepare_cached(sql)?.execute(params_from_iter(&values))?;
    }
    let mut result = transaction.prepare_cached("INSERT INTO results (id, result_json) VALUES (?1, ?2)")?;
    for (call, record) in &changeset.results {
        result.execute(params![call, record.result.as_ref().map(StoredResult::json)])?;
    }
    changeset.answers.iter().try_for_each(|change| put_answer(transaction, change))?;
    for (key, execution) in &changeset.released {
        transaction.prepare_cached(RELEASE)?.execute([key, execution])?;
    }
    put_histogram(transaction, changeset)?;
    put_head(transaction, instance, changeset)
}

fn put_events(transaction: &Transaction<'_>, instance: i64, changeset: &Changeset) -> rusqlite::Result<()> {
    let mut event = transaction.prepare_cached(
        "INSERT INTO events (seq, instance, instance_seq, at, name, execution, subject, data, hash)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
    )?;
    for row in &changeset.events {
        let record = &row.record;
        event.execute(params![
            row.seq,
            instance,
            record.instance_seq as i64,
            record.at,
            record.name,
            row.execution,
            record.subject,
            record.data,
            row.hash,
        ])?;
    }
    Ok(())
}

fn put_calls(transaction: &Transaction<'_>, instance: i64, changeset: &Changeset) -> rusqlite::Result<()> {
    let mut opened = transaction.prepare_cached(
        "INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, error_message, error_code,
           started_at, completed_at, duration_ms, output_size_bytes, sandbox_id, agent_id, user_id, batch_id, session_id,
           tenant_id, attempts, usage_json, metadata_json, workspace, provider, instance, result_size_bytes)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,
           ?23, ?24)",
    )?;
    for row in &changeset.opened {
        let CallRow { id, execution_id, tool, parameters, status, error_message, error_code, .. } = row;
        let CallRow { started_at, completed_at, duration_ms, output_bytes, sandbox, agent, user, batch, .. } = row;
        let CallRow { session, tenant, attempts, usage, metadata, workspace, provider, result_bytes, .. } = row;
        opened.execute(params![
            id,
            execution_id,
            tool,
            parameters,
            status,
            error_message,
            error_code,
            started_at,
            completed_at,
            duration_ms,
            output_bytes,
            sandbox,
            agent,
            user,
            batch,
            session,
            tenant,
            attempts,
            usage,
            metadata,
            workspace,
            provider,
            instance,
            result_bytes,
        ])?;
    }
    let mut changed = transaction.prepare_cached(
        "UPDATE tool_executions SET status = ?2, error_message = ?3, error_code = ?4, completed_at = ?5, duration_ms = ?6,
           output_size_bytes = ?7, sandbox_id = ?8, attempts = ?9, usage_json = ?10, metadata_json = ?11, instance = ?12,
           result_size_bytes = ?13
         WHERE id = ?1",
    )?;
    for row in &changeset.changed {
        let CallRow { id, status, error_message, error_code, completed_at, duration_ms, output_bytes, .. } = row;
        let CallRow { sandbox, attempts, usage, metadata, result_bytes, .. } = row;
        changed.execute(params![
            id,
            status,
            error_message,
            error_code,
            completed_at,
            duration_ms,
            output_bytes,
            sandbox,
            attempts,
            usage,
            metadata,
            instance,
            result_bytes,
        ])?;
    }
    Ok(())
}

fn put_histogram(transaction: &Transaction<'_>, changeset: &Changeset) -> rusqlite::Result<()> {
    let mut bucket = transaction.prepare_cached(
        "INSERT INTO tallies (day, tenant_id, agent_id, tool_name, status, bucket, calls, output_bytes, result_bytes)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
         ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, output_bytes = output_bytes + excluded.output_bytes,
           result_bytes = result_bytes + excluded.result_bytes",
    )?;
    for (key, counted) in &changeset.histogram {
        let (tenant, agent, tool) = (&key.tenant, &key.agent, &key.tool);
        bucket.execute(params![
            key.day,
            tenant,
            agent,
            tool,
            key.status,
            key.bucket,
            counted.calls,
            counted.output_bytes,
            counted.result_bytes,
        ])?;
    }
    Ok(())
}

/// Writes the new head of the trail, and the progress of the executor.
fn put_head(transaction: &Transaction<'_>, instance: i64, changeset: &Changeset) -> rusqlite::Result<()> {
    transaction
        .prepare_cached("UPDATE trail SET seq = ?1, hash = ?2")?
        .execute(params![changeset.head.seq, changeset.head.hash])?;
    transaction
        .prepare_cached(
            "UPDATE instances SET seen_at = ?2, last_seq = coalesce(?3, last_seq), ended_at = iif(?4, ?2, NULL)
             WHERE number = ?1",
        )?
        .execute(params![
            instance,
            Timestamp::now().as_microsecond(),
            changeset.last_seq.map(|seq| seq as i64),
            changeset.ends
        ])?;
    if let Some(head) = &changeset.signed {
        transaction
            .prepare_cached("INSERT INTO heads (seq, hash, at, key, signature) VALUES (?1, ?2, ?3, ?4, ?5)")?
            .execute(params![
                head.seq,
                changeset.head.hash,
                head.at.as_microsecond(),
                head.key,
                from_hex(&head.signature)
            ])?;
    }
    Ok(())
}

fn put_answer(transaction: &Transaction<'_>, change: &AnswerChange) -> rusqlite::Result<()> {
    match change {
        AnswerChange::Expect { id, task, tenant, key, fingerprint, expires_at } => transaction
            .prepare_cached(
                "INSERT INTO answers (id, task, tenant, key, fingerprint, expires_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT DO UPDATE SET task = CASE WHEN excluded.task = 1 THEN 1 ELSE answers.task END,
                   key = coalesce(excluded.key, answers.key), fingerprint = coalesce(excluded.fingerprint, answers.fingerprint),
                   expires_at = CASE WHEN excluded.key IS NULL THEN answers.expires_at ELSE excluded.expires_at END",
            )?
            .execute(params![id, task, tenant, key, fingerprint, expires_at])?,
        AnswerChange::Store { id, result, expires_at } => transaction
            .prepare_cached(
                "UPDATE answers SET result_json = ?2, expires_at =
                   CASE WHEN ?3 IS NULL THEN expires_at WHEN key IS NULL THEN ?3 ELSE max(expires_at, ?3) END
                 WHERE id = ?1",
            )?
            .execute(params![id, result, expires_at])?,
        AnswerChange::Remove { id } => {
            transaction.prepare_cached("DELETE FROM answers WHERE id = ?1")?.execute([id])?
        }
    };
    Ok(())
}

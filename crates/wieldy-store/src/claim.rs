//! Claims of idempotency keys: at most one call runs under a key at a time, across all processes.
//!
//! A claim is a row of `claims`. It is inserted before the call runs, in a commit of its own, and deleted in the commit
//! that closes the call, which also stores the answer. So a call that gets the row sees the answers of all earlier
//! holders. A claim of a dead executor is void once [recovery](crate::recovery) has closed its call.

use jiff::Timestamp;
use tokio::sync::oneshot;
use wieldy_core::{Claim, Claimed, JournalError};

use crate::database::{Database, Value};
use crate::error::StoreError;
use crate::recovery::remembered_answer;

/// A claim, and the channel for its answer.
pub(crate) type PendingClaim = (Claim, oneshot::Sender<Result<Claimed, JournalError>>);

/// The SQL condition for void claims: the executor is dead, and the call is closed or was never written.
const VOID: &str = "claims.instance IN (SELECT number FROM instances WHERE ended_at IS NOT NULL)
    AND NOT EXISTS (SELECT 1 FROM tool_executions t
                    WHERE t.execution_id = claims.execution_id AND t.completed_at IS NULL)";

/// Claims a key for a call of this instance.
pub(crate) fn claim(database: &mut dyn Database, instance: i64, claim: &Claim) -> Result<Claimed, StoreError> {
    let execution = claim.execution.to_string();
    let values = [claim.key.as_str().into(), instance.into(), execution.as_str().into()];
    // The same call may ask again: the connection may be lost after its first claim was committed.
    let sql = format!(
        "INSERT INTO claims (key, instance, execution_id) VALUES (?1, ?2, ?3)
         ON CONFLICT (key) DO UPDATE SET instance = excluded.instance, execution_id = excluded.execution_id
         WHERE claims.execution_id = excluded.execution_id OR {VOID}"
    );
    if database.execute(&sql, &values)? == 0 {
        return Ok(Claimed::Taken);
    }
    // The answer is looked up only now, because it is written in the commit that releases the key.
    let Some(answer) = find_answer(database, &claim.key)? else { return Ok(Claimed::Granted) };
    database.execute(RELEASE, &[values[0].clone(), values[2].clone()])?;
    Ok(Claimed::Answered(Box::new(answer)))
}

/// The SQL statement that releases a key.
pub(crate) const RELEASE: &str = "DELETE FROM claims WHERE key = ?1 AND execution_id = ?2";

/// Deletes void claims.
pub(crate) fn delete_void(database: &mut dyn Database) -> Result<(), StoreError> {
    database.execute(&format!("DELETE FROM claims WHERE {VOID}"), &[]).map(drop)
}

/// Returns the answer of the latest call that ran under the key, unless it has expired or may be retried.
fn find_answer(database: &mut dyn Database, key: &str) -> Result<Option<wieldy_core::RememberedAnswer>, StoreError> {
    let sql = "SELECT result_json, tenant, task, key, fingerprint, expires_at FROM answers
         WHERE key = ?1 AND result_json IS NOT NULL AND expires_at > ?2 ORDER BY id DESC LIMIT 1";
    let now = Value::Time(Timestamp::now().as_microsecond());
    let mut found = None;
    database.query(sql, &[key.into(), now], &mut |row| {
        found = remembered_answer(row)?.filter(|answer| answer.keyed.is_some());
        Ok(())
    })?;
    Ok(found)
}

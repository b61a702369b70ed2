//! Sandboxes whose end is not recorded yet (table `sandboxes`).
//!
//! The commit of `sandbox.created` inserts a row, and the commit of `sandbox.destroyed` deletes it. A row of a dead
//! executor is claimed by another one, which records that the sandbox is gone: a sandbox ends with its executor. If
//! that executor dies before, its claim is void. So the end of each sandbox is recorded once.

use std::sync::Arc;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;

use crate::committer::{Committer, GROUP_MAX};
use crate::database::Value;
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Record;

const CREATED: &str = "sandbox.created";
const DESTROYED: &str = "sandbox.destroyed";

/// A change of `sandboxes`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum SandboxChange {
    /// The executor made a sandbox; the number is that of the record.
    Made { id: i64, sandbox: String },
    /// The executor ended its sandbox.
    Ended { sandbox: String },
    /// The sandbox of a dead executor is gone.
    Lost { id: i64 },
}

/// The facts of a record that are needed here.
#[derive(Deserialize)]
struct Facts {
    sandbox: String,
    created_seq: Option<i64>,
}

impl SandboxChange {
    /// Returns the change that the record with this number makes, if it makes one.
    pub(crate) fn of(seq: i64, record: &Record) -> Option<Self> {
        if ![CREATED, DESTROYED].contains(&record.name) {
            return None;
        }
        let Facts { sandbox, created_seq } = serde_json::from_str(&record.data).ok()?;
        Some(match created_seq {
            _ if record.name == CREATED => Self::Made { id: seq, sandbox },
            Some(id) => Self::Lost { id },
            None => Self::Ended { sandbox },
        })
    }

    /// Returns the statement that makes the change, for both databases.
    pub(crate) fn statement(&self, instance: i64) -> (&'static str, Vec<Value>) {
        match self {
            // If another writer was faster, its row may be there already, and this transaction will be rolled back.
            Self::Made { id, sandbox } => (
                "INSERT INTO sandboxes (id, instance, sandbox) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
                vec![(*id).into(), instance.into(), sandbox.as_str().into()],
            ),
            Self::Ended { sandbox } => (
                "DELETE FROM sandboxes WHERE instance = ?1 AND sandbox = ?2",
                vec![instance.into(), sandbox.as_str().into()],
            ),
            Self::Lost { id } => ("DELETE FROM sandboxes WHERE id = ?1", vec![(*id).into()]),
        }
    }
}

/// Records that the sandboxes of dead executors are gone.
pub(crate) fn record_lost(committer: &mut Committer) -> Result<(), StoreError> {
    const ENDED: &str = "(SELECT number FROM instances WHERE ended_at IS NOT NULL)";
    let claim = format!(
        "UPDATE sandboxes SET closer = ?1
         WHERE instance IN {ENDED} AND (closer IS NULL OR closer = ?1 OR closer IN {ENDED}) RETURNING id, sandbox"
    );
    let mut lost = Vec::new();
    committer.database.query(&claim, &[committer.number.into()], &mut |row| {
        lost.push((row.int(0)?, row.text(1)?.to_owned()));
        Ok(())
    })?;
    failpoint::reach("recovery.sandboxes");
    lost.sort_unstable();
    let now = Timestamp::now().as_microsecond();
    let records = lost.iter().map(|(id, sandbox)| {
        Arc::new(Record::own(DESTROYED, now, None, &json!({"sandbox": sandbox, "created_seq": id})))
    });
    for group in records.collect::<Vec<_>>().chunks(GROUP_MAX) {
        committer.commit(group, false)?;
    }
    Ok(())
}

//! The trail: a hash chain of records. The hash of each record covers the one before, so a record that was changed,
//! removed or moved makes every later hash wrong.

use std::sync::Arc;

use serde_json::{Value, json};
use uuid::Uuid;
use wieldy_core::{Body, Event, ExecutionId, RecordedResult};

use crate::record_to_row::{RowChange, StoredSubject};

/// The hash of a record and of everything before it.
pub(crate) type Hash = [u8; 32];

/// The end of the trail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) seq: i64,
    pub(crate) hash: Hash,
}

/// An event as it is stored: without secrets, and without a position in the trail yet.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    /// The number that the executor gave the event; 0 for the history's own records.
    pub(crate) instance_seq: u64,
    /// The time, in microseconds.
    pub(crate) at: i64,
    pub(crate) name: &'static str,
    /// The call that it belongs to.
    pub(crate) call: Option<CallRef>,
    /// The subject, unless an earlier record of the same call has it.
    pub(crate) subject: Option<String>,
    pub(crate) data: String,
    /// The change that it makes to the row of its call.
    pub(crate) change: RowChange,
    /// The hash of the tenant that may ask for the result later.
    pub(crate) tenant: Option<String>,
    /// The whole result, if it may be asked for later.
    pub(crate) answer: Option<String>,
    /// The part of the result that the table `results` stores. The data of a closing record has its hash.
    pub(crate) result: Option<StoredResult>,
    /// The idempotency key that the call releases by closing. The write-ahead log does not store it, because claims of
    /// dead executors are void.
    pub(crate) released: Option<String>,
}

/// The JSON of a recorded result.
#[derive(Debug, Clone)]
pub(crate) enum StoredResult {
    /// The result of an event.
    Shared(Arc<RecordedResult>),
    /// The result that was read from a write-ahead log.
    Read(String),
}

impl StoredResult {
    pub(crate) fn json(&self) -> &str {
        match self {
            Self::Shared(result) => &result.json,
            Self::Read(json) => json,
        }
    }
}

/// The call that a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallRef {
    /// A call of this executor.
    Own(ExecutionId),
    /// A call that another executor left open, by the number of the record that opened it.
    Orphaned(i64),
}

impl Record {
    /// Returns the record of an event.
    pub(crate) fn of(event: &Event) -> Self {
        let subject = &event.subject;
        // Later records of a call have the call's number instead.
        let has_opening = subject.execution.is_some() && !matches!(event.body, Body::CallPending { .. });
        let (change, data) = RowChange::of_event(event);
        let expects_answer = match &event.body {
            Body::CallPending { task, .. } => *task,
            Body::CallTask {} => true,
            Body::CallStarted { keyed, .. } => keyed.is_some(),
            _ => false,
        };
        Self {
            instance_seq: event.seq,
            at: event.at.as_microsecond(),
            name: event.body.name(),
            call: subject.execution.map(CallRef::Own),
            subject: (!has_opening).then(|| json!(StoredSubject::of(event)).to_string()),
            data,
            change,
            tenant: if expects_answer { subject.caller.tenant_hash() } else { None },
            answer: event.answer().map(|result| result.to_string()),
            result: event.body.closing().and_then(|closing| closing.recorded.clone()).map(StoredResult::Shared),
            released: None,
        }
    }

    /// Returns a record of the history about itself, or about an orphaned call.
    pub(crate) fn own(name: &'static str, at: i64, call: Option<i64>, data: &Value) -> Self {
        let (call, data) = (call.map(CallRef::Orphaned), data.to_string());
        let change = RowChange::parse(name, None, &data);
        Self {
            instance_seq: 0,
            at,
            name,
            call,
            subject: None,
            data,
            change,
            tenant: None,
            answer: None,
            result: None,
            released: None,
        }
    }
}

/// A record in its position. All its fields are hashed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed<'a> {
    pub(crate) seq: i64,
    pub(crate) instance: Uuid,
    pub(crate) instance_seq: i64,
    pub(crate) at: i64,
    pub(crate) name: &'a str,
    pub(crate) execution: Option<i64>,
    pub(crate) subject: Option<&'a str>,
    pub(crate) data: &'a str,
}

impl Placed<'_> {
    /// Returns the hash of the record after `previous`. `scratch` is a buffer for its bytes.
    pub(crate) fn hash(&self, previous: &Hash, scratch: &mut Vec<u8>) -> Hash {
        scratch.clear();
        scratch.extend_from_slice(b"wieldy.trail.1\0");
        scratch.extend_from_slice(previous);
        scratch.extend_from_slice(&self.seq.to_le_bytes());
        scratch.extend_from_slice(self.instance.as_bytes());
        scratch.extend_from_slice(&self.instance_seq.to_le_bytes());
        scratch.extend_from_slice(&self.at.to_le_bytes());
        scratch.extend_from_slice(&self.execution.unwrap_or(0).to_le_bytes());
        // Each text comes after its length, so that no two records have the same bytes.
        for text in [self.name, self.subject.unwrap_or_default(), self.data] {
            scratch.extend_from_slice(&(text.len() as u64).to_le_bytes());
            scratch.extend_from_slice(text.as_bytes());
        }
        *blake3::hash(scratch).as_bytes()
    }
}

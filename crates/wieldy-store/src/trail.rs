//! The trail: records in order, each chained to the one before, so that none can be changed, left out or put elsewhere
//! without every later one giving it away.

use serde_json::{Value, json};
use uuid::Uuid;
use wieldy_core::{Body, Event, ExecutionId};

use crate::meaning::{Meaning, Subject};

/// The hash of a record and of everything before it.
pub(crate) type Hash = [u8; 32];

/// Where the trail ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) seq: i64,
    pub(crate) hash: Hash,
}

/// One thing that happened, as it is written down: without secrets, and not yet in its place.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    /// The number that the executor gave it; 0 for what the history says of itself.
    pub(crate) instance_seq: u64,
    /// In microseconds.
    pub(crate) at: i64,
    pub(crate) name: &'static str,
    /// The call that it happened to.
    pub(crate) call: Option<CallRef>,
    /// What it is about, where no earlier record of the same call says so.
    pub(crate) subject: Option<String>,
    pub(crate) data: String,
    /// What it means for the row of its call.
    pub(crate) meaning: Meaning,
    /// Whose result it will be, where somebody may ask for it later: the hash of a tenant.
    pub(crate) tenant: Option<String>,
    /// The whole result, where somebody may ask for it later.
    pub(crate) answer: Option<String>,
    /// The idempotency key that the call gives back by ending. A log does not keep it: the claims of an executor that is gone
    /// are void.
    pub(crate) released: Option<String>,
}

/// Which call something happened to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallRef {
    /// One of this executor.
    Own(ExecutionId),
    /// One that another executor left open: the seq of its opening.
    Left(i64),
}

impl Record {
    /// The record of an event.
    pub(crate) fn of(event: &Event) -> Self {
        let subject = &event.subject;
        // What happens to a call later is known by the call's number.
        let is_told = subject.execution.is_some() && !matches!(event.body, Body::CallPending { .. });
        let (meaning, data) = Meaning::of(event);
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
            subject: (!is_told).then(|| json!(Subject::of(event)).to_string()),
            data,
            meaning,
            tenant: if expects_answer { subject.caller.tenant_hash() } else { None },
            answer: event.answer().map(|result| result.to_string()),
            released: None,
        }
    }

    /// What the history says of itself, or of a call that another executor left open.
    pub(crate) fn own(name: &'static str, at: i64, call: Option<i64>, data: &Value) -> Self {
        let (call, data) = (call.map(CallRef::Left), data.to_string());
        let meaning = Meaning::read(name, None, &data);
        Self {
            instance_seq: 0,
            at,
            name,
            call,
            subject: None,
            data,
            meaning,
            tenant: None,
            answer: None,
            released: None,
        }
    }
}

/// What a record in its place consists of; everything but the hash is hashed.
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
    /// The hash of the record after `previous`. `scratch` is where its bytes are put together.
    pub(crate) fn hash(&self, previous: &Hash, scratch: &mut Vec<u8>) -> Hash {
        scratch.clear();
        scratch.extend_from_slice(b"wieldy.trail.1\0");
        scratch.extend_from_slice(previous);
        scratch.extend_from_slice(&self.seq.to_le_bytes());
        scratch.extend_from_slice(self.instance.as_bytes());
        scratch.extend_from_slice(&self.instance_seq.to_le_bytes());
        scratch.extend_from_slice(&self.at.to_le_bytes());
        scratch.extend_from_slice(&self.execution.unwrap_or(0).to_le_bytes());
        // Each text after its length, so that no two records have the same bytes.
        for text in [self.name, self.subject.unwrap_or_default(), self.data] {
            scratch.extend_from_slice(&(text.len() as u64).to_le_bytes());
            scratch.extend_from_slice(text.as_bytes());
        }
        *blake3::hash(scratch).as_bytes()
    }
}

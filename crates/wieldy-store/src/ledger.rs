//! The ledger: which calls are open, and what a group of records means for the tables. A row of `tool_executions` is a fold
//! over its call's records and nothing else, so that whoever has the trail can make it again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use uuid::Uuid;
use wieldy_core::ExecutionId;

use crate::audit::SignedHead;
use crate::tally::{self, Tally, TallyKey};
use crate::trail::{CallRef, Hash, Head, Placed, Record};

/// A row of `tool_executions`.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct CallRow {
    /// The seq of its opening.
    pub(crate) id: i64,
    pub(crate) execution_id: String,
    pub(crate) tool: String,
    pub(crate) parameters: Option<String>,
    pub(crate) status: String,
    pub(crate) error_message: Option<String>,
    pub(crate) error_code: Option<String>,
    pub(crate) started_at: i64,
    pub(crate) completed_at: Option<i64>,
    pub(crate) duration_ms: Option<f64>,
    pub(crate) output_bytes: Option<i64>,
    pub(crate) sandbox: Option<String>,
    pub(crate) agent: String,
    pub(crate) user: Option<String>,
    pub(crate) batch: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) attempts: i64,
    pub(crate) usage: Option<String>,
    pub(crate) metadata: Option<String>,
}

impl CallRow {
    /// The row of a call that was just accepted.
    pub(crate) fn open(id: i64, at: i64, subject: &Value, data: &Value) -> Self {
        let fact = |name: &str| text_in(&subject[name]);
        let mut metadata = Map::new();
        if let Some(call_id) = subject.get("call_id") {
            metadata.insert("call_id".into(), call_id.clone());
        }
        for name in ["task", "rerun"] {
            if data.get(name).is_some() {
                metadata.insert(name.into(), Value::Bool(true));
            }
        }
        Self {
            id,
            execution_id: fact("execution_id").unwrap_or_default(),
            tool: fact("tool").unwrap_or_default(),
            parameters: data.get("arguments").map(Value::to_string),
            status: "pending".to_owned(),
            started_at: at,
            agent: fact("agent").unwrap_or_default(),
            user: fact("user"),
            batch: fact("batch_id"),
            session: fact("session"),
            tenant: fact("tenant"),
            metadata: text_of(metadata),
            ..Self::default()
        }
    }

    /// Whether a later record of this name means anything for the row.
    pub(crate) fn is_changed_by(name: &str) -> bool {
        matches!(
            name,
            "tool.call.started"
                | "tool.call.confirmation.requested"
                | "tool.call.confirmation.received"
                | "tool.call.success"
                | "tool.call.failure"
                | "tool.call.timeout"
                | "tool.call.cancelled"
        )
    }

    /// What a later record means for the row.
    pub(crate) fn apply(&mut self, name: &str, at: i64, data: &Value) {
        match name {
            "tool.call.started" => {
                self.status = "running".to_owned();
                self.attempts = data["attempt"].as_i64().unwrap_or_default();
            }
            "tool.call.confirmation.requested" => self.status = "input_required".to_owned(),
            "tool.call.confirmation.received" => self.status = "pending".to_owned(),
            "tool.call.success" | "tool.call.failure" | "tool.call.timeout" | "tool.call.cancelled" => {
                self.close(at, data);
            }
            _ => {}
        }
    }

    fn close(&mut self, at: i64, data: &Value) {
        self.status = text_in(&data["status"]).unwrap_or_default();
        self.error_code = text_in(&data["error"]["code"]);
        self.error_message = text_in(&data["error"]["message"]);
        self.completed_at = Some(at);
        self.duration_ms = data["duration_ms"].as_f64();
        self.output_bytes = data["output_bytes"].as_i64();
        self.attempts = data["attempts"].as_i64().unwrap_or(self.attempts);
        self.sandbox = text_in(&data["sandbox"]["id"]);
        self.usage = data.get("usage").map(Value::to_string);
        let mut metadata: Map<String, Value> =
            self.metadata.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let told = [
            ("queued_ms", data.get("queued_ms").filter(|ms| ms.as_f64() != Some(0.0))),
            ("cached", data.get("cached").filter(|cached| **cached == json!(true))),
            ("artifact", data.get("artifact")),
            ("level", data["sandbox"].get("level")),
        ];
        metadata.extend(told.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.clone()))));
        self.metadata = text_of(metadata);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.completed_at.is_some()
    }

    fn tally(&self) -> (TallyKey, Tally) {
        let key = TallyKey {
            day: self.started_at.div_euclid(tally::DAY),
            tenant: self.tenant.clone().unwrap_or_default(),
            agent: self.agent.clone(),
            tool: self.tool.clone(),
            status: self.status.clone(),
            bucket: tally::bucket(self.duration_ms.unwrap_or_default()),
        };
        (key, Tally { calls: 1, output_bytes: self.output_bytes.unwrap_or_default() })
    }
}

/// A text as a column of it can be. PostgreSQL's cannot hold the sign with the number zero.
fn text_in(value: &Value) -> Option<String> {
    value.as_str().map(|text| text.replace('\0', "\u{fffd}"))
}

fn text_of(metadata: Map<String, Value>) -> Option<String> {
    (!metadata.is_empty()).then(|| Value::Object(metadata).to_string())
}

/// What of a call's words can be searched for.
pub(crate) const WORDS_BYTES_MAX: usize = 16 * 1024;

/// A call that is not over.
#[derive(Debug, Clone)]
pub(crate) struct OpenCall {
    pub(crate) row: CallRow,
    words: String,
    /// Whether its result may be asked for later.
    has_answer: bool,
    is_task: bool,
}

impl OpenCall {
    /// A call that was found open.
    pub(crate) fn found(row: CallRow, has_answer: bool, is_task: bool) -> Self {
        let words = words(&row);
        Self { row, words, has_answer, is_task }
    }
}

pub(crate) fn words(row: &CallRow) -> String {
    let parameters = row.parameters.as_deref().unwrap_or_default();
    let mut text = format!("{} {parameters}", row.tool);
    text.truncate(text.floor_char_boundary(WORDS_BYTES_MAX));
    text
}

/// What changes in `answers`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum AnswerChange {
    /// Somebody may ask for what will come of the call.
    Expect { id: i64, task: bool, key: Option<String>, fingerprint: Option<String>, expires_at: i64 },
    /// It came.
    Give { id: i64, result: String, expires_at: Option<i64> },
    /// Nothing will come.
    Forget { id: i64 },
}

/// A record in its place.
#[derive(Debug, Clone)]
pub(crate) struct EventRow {
    pub(crate) seq: i64,
    pub(crate) record: Arc<Record>,
    pub(crate) execution: Option<i64>,
    pub(crate) hash: Hash,
}

/// What a group of records means for the tables.
#[derive(Debug)]
pub(crate) struct Draft {
    /// Where the trail ended before.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "a file that is locked ends where it was read to")
    )]
    pub(crate) after: Head,
    /// Where it ends then.
    pub(crate) head: Head,
    pub(crate) events: Vec<EventRow>,
    /// Rows that are new; they may be over already.
    pub(crate) opened: Vec<CallRow>,
    /// Rows that are there.
    pub(crate) changed: Vec<CallRow>,
    /// What calls that are over now can be found by.
    pub(crate) words: Vec<(i64, String)>,
    pub(crate) answers: Vec<AnswerChange>,
    pub(crate) tallies: BTreeMap<TallyKey, Tally>,
    /// Where it ends, signed, if it is time for that.
    pub(crate) signed: Option<SignedHead>,
    /// Whether the executor ends with it.
    pub(crate) ends: bool,
    /// The number of the executor's last event in it, if there is one.
    pub(crate) last_seq: Option<u64>,
    touched: HashMap<Handle, OpenCall>,
}

/// What a call is known by while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Handle {
    Own(ExecutionId),
    Left(i64),
}

impl From<CallRef> for Handle {
    fn from(call: CallRef) -> Self {
        match call {
            CallRef::Own(id) => Self::Own(id),
            CallRef::Left(id) => Self::Left(id),
        }
    }
}

/// The calls of one executor that are open, and those of others that it closes.
#[derive(Debug)]
pub(crate) struct Ledger {
    instance: Uuid,
    /// How long the result of a task is kept, in microseconds.
    task_ttl: i64,
    open: HashMap<Handle, OpenCall>,
}

impl Ledger {
    pub(crate) fn new(instance: Uuid, task_ttl: i64) -> Self {
        Self { instance, task_ttl, open: HashMap::new() }
    }

    /// Takes over a call that another executor left open, to close it.
    pub(crate) fn close_for(&mut self, call: OpenCall) {
        self.open.insert(Handle::Left(call.row.id), call);
    }

    /// The calls of others that were to be closed and, as far as is known here, are not.
    pub(crate) fn left(&self) -> Vec<i64> {
        let left = self.open.keys().filter_map(|call| match call {
            Handle::Left(id) => Some(*id),
            Handle::Own(_) => None,
        });
        left.collect()
    }

    pub(crate) fn forget_left(&mut self) {
        self.open.retain(|call, _| matches!(call, Handle::Own(_)));
    }

    /// Takes over a call that another executor left open, to carry it on.
    pub(crate) fn carry_on(&mut self, id: ExecutionId, call: OpenCall) {
        self.open.insert(Handle::Own(id), call);
    }

    /// What the records mean, if the trail ends at `after`. Changes nothing.
    pub(crate) fn draft(&self, records: &[Arc<Record>], after: &Head) -> Draft {
        let mut draft = Draft {
            after: *after,
            head: *after,
            events: Vec::with_capacity(records.len()),
            opened: Vec::new(),
            changed: Vec::new(),
            words: Vec::new(),
            answers: Vec::new(),
            tallies: BTreeMap::new(),
            signed: None,
            ends: false,
            last_seq: records.iter().rev().map(|record| record.instance_seq).find(|seq| *seq > 0),
            touched: HashMap::new(),
        };
        let mut scratch = Vec::new();
        for record in records {
            let seq = draft.head.seq + 1;
            let execution = record.call.and_then(|call| self.enter(&mut draft, seq, call.into(), record));
            let placed = Placed {
                seq,
                instance: self.instance,
                instance_seq: record.instance_seq as i64,
                at: record.at,
                name: record.name,
                execution,
                subject: record.subject.as_ref().map(|subject| subject.text.as_str()),
                data: &record.data.text,
            };
            let hash = placed.hash(&draft.head.hash, &mut scratch);
            draft.events.push(EventRow { seq, record: Arc::clone(record), execution, hash });
            draft.head = Head { seq, hash };
        }
        for call in draft.touched.values_mut() {
            let row = &mut call.row;
            if row.is_over() {
                let (key, one) = row.tally();
                let tally = draft.tallies.entry(key).or_default();
                tally.calls += one.calls;
                tally.output_bytes += one.output_bytes;
                if let Some(error) = &row.error_message {
                    call.words.push(' ');
                    call.words.push_str(error);
                }
                draft.words.push((row.id, std::mem::take(&mut call.words)));
            }
            let is_new = row.id > after.seq;
            let rows = if is_new { &mut draft.opened } else { &mut draft.changed };
            rows.push(row.clone());
            row.parameters = None; // needed once
        }
        draft.opened.sort_unstable_by_key(|row| row.id);
        draft.changed.sort_unstable_by_key(|row| row.id);
        draft
    }

    /// Notes what happened to a call; the call's number. A record of a call that is not open is kept without one.
    fn enter(&self, draft: &mut Draft, seq: i64, call: Handle, record: &Record) -> Option<i64> {
        if let (Some(subject), Handle::Own(_)) = (&record.subject, call) {
            let row = CallRow::open(seq, record.at, &subject.value, &record.data.value);
            let is_task = record.data.value.get("task").is_some();
            if is_task {
                let (key, fingerprint, expires_at) = (None, None, i64::MAX);
                draft.answers.push(AnswerChange::Expect { id: seq, task: true, key, fingerprint, expires_at });
            }
            draft.touched.insert(call, OpenCall { words: words(&row), row, has_answer: is_task, is_task });
            return Some(seq);
        }
        let open = match draft.touched.entry(call) {
            std::collections::hash_map::Entry::Occupied(touched) => touched.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let known = self.open.get(&call)?;
                // Most records of a running call change nothing of its row.
                if !CallRow::is_changed_by(record.name) {
                    return Some(known.row.id);
                }
                vacant.insert(known.clone())
            }
        };
        let id = open.row.id;
        open.row.apply(record.name, record.at, &record.data.value);
        if let Some(keyed) = record.data.value.get("keyed") {
            let text = |name: &str| text_in(&keyed[name]);
            let expires_at = text("expires_at").and_then(|at| at.parse::<jiff::Timestamp>().ok());
            let expires_at = expires_at.map_or(i64::MAX, |at| at.as_microsecond());
            let (key, fingerprint, task) = (text("key"), text("fingerprint"), open.is_task);
            draft.answers.push(AnswerChange::Expect { id, task, key, fingerprint, expires_at });
            open.has_answer = true;
        }
        if open.row.is_over() && open.has_answer {
            draft.answers.push(match &record.answer {
                Some(result) => {
                    let expires_at = open.is_task.then(|| record.at.saturating_add(self.task_ttl));
                    AnswerChange::Give { id, result: result.clone(), expires_at }
                }
                None => AnswerChange::Forget { id },
            });
        }
        Some(id)
    }

    /// Takes note that the draft is in the tables.
    pub(crate) fn accept(&mut self, draft: Draft) {
        for (call, open) in draft.touched {
            if open.row.is_over() {
                self.open.remove(&call);
            } else {
                self.open.insert(call, open);
            }
        }
    }
}

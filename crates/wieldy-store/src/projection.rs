//! The projection of records to table rows: which calls are open, and which rows a group of records adds and changes. A
//! row of `tool_executions` is a fold over its call's records and nothing else, so it can be rebuilt from the trail.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::{Map, Value};
use uuid::Uuid;
use wieldy_core::{ExecutionId, TASK_TTL};

use crate::audit::SignedHead;
use crate::hash_chain::{CallRef, Hash, Head, Placed, Record};
use crate::histogram::{self, BucketCounts, BucketKey};
use crate::metadata::{self, CALLER, EntryHash};
use crate::notes::NoteChange;
use crate::record_to_row::{Closed, Opened, RowChange};
use crate::sandboxes::SandboxChange;

/// A row of `tool_executions`.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct CallRow {
    /// The number of the record that opened the call.
    pub(crate) id: i64,
    pub(crate) execution_id: String,
    pub(crate) tool: String,
    pub(crate) parameters: Option<String>,
    pub(crate) status: Cow<'static, str>,
    pub(crate) error_message: Option<String>,
    pub(crate) error_code: Option<String>,
    pub(crate) started_at: i64,
    pub(crate) completed_at: Option<i64>,
    pub(crate) duration_ms: Option<f64>,
    pub(crate) output_bytes: Option<i64>,
    /// The size of the recorded result.
    pub(crate) result_bytes: Option<i64>,
    pub(crate) sandbox: Option<String>,
    pub(crate) agent: String,
    pub(crate) user: Option<String>,
    pub(crate) batch: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) workspace: Option<String>,
    pub(crate) provider: Option<String>,
    pub(crate) attempts: i64,
    pub(crate) usage: Option<String>,
    pub(crate) metadata: Option<String>,
}

impl CallRow {
    /// Returns the row of a call that was just accepted.
    pub(crate) fn open(id: i64, at: i64, opened: &Opened) -> Self {
        let Opened { subject, parameters, called_as, workspace, provider, metadata: of_caller, is_task, is_rerun } =
            opened;
        let mut metadata = Map::new();
        if let Some(call_id) = &subject.call_id {
            metadata.insert("call_id".into(), Value::String(call_id.clone().into_owned()));
        }
        if let Some(name) = called_as {
            metadata.insert("called_as".into(), Value::String(name.clone()));
        }
        if let Some(of_caller) = of_caller {
            metadata.insert(CALLER.into(), of_caller.clone());
        }
        for (name, is_set) in [("task", *is_task), ("rerun", *is_rerun)] {
            if is_set {
                metadata.insert(name.into(), Value::Bool(true));
            }
        }
        let column = |text: &Option<Cow<'_, str>>| text.as_deref().map(storable);
        Self {
            id,
            execution_id: column(&subject.execution_id).unwrap_or_default(),
            tool: column(&subject.tool).unwrap_or_default(),
            parameters: Some(parameters.clone()),
            status: "pending".into(),
            started_at: at,
            agent: storable(&subject.agent),
            user: column(&subject.user),
            batch: column(&subject.batch_id),
            session: column(&subject.session),
            tenant: column(&subject.tenant),
            workspace: workspace.as_deref().map(storable),
            provider: provider.as_deref().map(storable),
            metadata: metadata_text(metadata),
            ..Self::default()
        }
    }

    /// Applies a later record to the row.
    pub(crate) fn apply(&mut self, at: i64, change: &RowChange) {
        match change {
            RowChange::BecameTask => self.extend_metadata([("task".to_owned(), Value::Bool(true))]),
            RowChange::Started { attempt, .. } => {
                self.status = "running".into();
                self.attempts = *attempt;
            }
            RowChange::InputRequired => self.status = "input_required".into(),
            RowChange::InputReceived => self.status = "pending".into(),
            RowChange::Closed(closed) => self.close(at, closed),
            RowChange::Unchanged | RowChange::Opened(_) => {}
        }
    }

    fn close(&mut self, at: i64, closed: &Closed) {
        self.status = closed.status.clone();
        self.error_code = closed.error_code.as_deref().map(storable);
        self.error_message = closed.error_message.as_deref().map(storable);
        self.completed_at = Some(at);
        self.duration_ms = Some(closed.duration_ms);
        self.output_bytes = Some(closed.output_bytes);
        self.attempts = closed.attempts;
        self.sandbox = closed.sandbox.as_deref().map(storable);
        self.usage = closed.usage.clone();
        self.result_bytes = closed.result.as_ref().map(|result| result.bytes);
        if !closed.rest.is_empty() {
            self.extend_metadata(closed.rest.clone());
        }
    }

    fn extend_metadata(&mut self, more: impl IntoIterator<Item = (String, Value)>) {
        let stored = self.metadata.as_deref().and_then(|text| serde_json::from_str(text).ok());
        let mut metadata: Map<String, Value> = stored.unwrap_or_default();
        metadata.extend(more);
        self.metadata = metadata_text(metadata);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.completed_at.is_some()
    }

    pub(crate) fn histogram_row(&self) -> (BucketKey, BucketCounts) {
        let key = BucketKey {
            day: self.started_at.div_euclid(histogram::DAY),
            tenant: self.tenant.clone().unwrap_or_default(),
            agent: self.agent.clone(),
            tool: self.tool.clone(),
            status: self.status.to_string(),
            bucket: histogram::bucket(self.duration_ms.unwrap_or_default()),
        };
        let (output_bytes, result_bytes) =
            (self.output_bytes.unwrap_or_default(), self.result_bytes.unwrap_or_default());
        (key, BucketCounts { calls: 1, output_bytes, result_bytes })
    }
}

/// Returns the text as a column can hold it: PostgreSQL's text has no NUL character.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn metadata_text(metadata: Map<String, Value>) -> Option<String> {
    (!metadata.is_empty()).then(|| Value::Object(metadata).to_string())
}

/// Maximum number of bytes of a call's searchable text.
pub(crate) const TEXT_BYTES_MAX: usize = 16 * 1024;

/// A call that is not closed.
#[derive(Debug, Clone)]
pub(crate) struct OpenCall {
    pub(crate) row: CallRow,
    words: String,
    /// True if its result may be asked for later.
    has_answer: bool,
    is_task: bool,
    /// True if the changeset that it is part of closes it.
    is_closed: bool,
}

impl OpenCall {
    /// Returns the state of a call that is open in the tables.
    pub(crate) fn from_row(row: CallRow, has_answer: bool, is_task: bool) -> Self {
        let words = opening_text(&row);
        Self { row, words, has_answer, is_task, is_closed: false }
    }
}

/// Returns the searchable text of a call that was just opened.
pub(crate) fn opening_text(row: &CallRow) -> String {
    let parameters = row.parameters.as_deref().unwrap_or_default();
    let mut text = format!("{} {parameters}", row.tool);
    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
    text
}

/// Returns the searchable text of a closed call.
fn closing_text(call: &mut OpenCall) -> String {
    let mut words = std::mem::take(&mut call.words);
    if let Some(error) = &call.row.error_message {
        words.push(' ');
        words.push_str(error);
    }
    words
}

/// A change of `answers`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum AnswerChange {
    /// The result of the call may be asked for later.
    Expect {
        id: i64,
        task: bool,
        tenant: Option<String>,
        key: Option<String>,
        fingerprint: Option<String>,
        expires_at: i64,
    },
    /// The result is there.
    Store { id: i64, result: String, expires_at: Option<i64> },
    /// There will be no result.
    Remove { id: i64 },
}

/// Returns the change for a task, whose result may be asked for later.
fn expect_task(id: i64, record: &Record) -> AnswerChange {
    let tenant = record.tenant.clone();
    AnswerChange::Expect { id, task: true, tenant, key: None, fingerprint: None, expires_at: i64::MAX }
}

/// A record with its position in the trail.
#[derive(Debug, Clone)]
pub(crate) struct EventRow {
    pub(crate) seq: i64,
    pub(crate) record: Arc<Record>,
    pub(crate) execution: Option<i64>,
    pub(crate) hash: Hash,
}

/// The rows that a group of records adds and changes.
#[derive(Debug)]
pub(crate) struct Changeset {
    /// The head of the trail before the group.
    pub(crate) after: Head,
    /// The head of the trail after the group.
    pub(crate) head: Head,
    pub(crate) events: Vec<EventRow>,
    /// New rows, whose calls may be closed already.
    pub(crate) opened: Vec<CallRow>,
    /// Rows that exist already.
    pub(crate) changed: Vec<CallRow>,
    /// The searchable texts of calls that are closed now.
    pub(crate) words: Vec<(i64, String)>,
    pub(crate) answers: Vec<AnswerChange>,
    /// The calls that are closed now with a recorded result, each with its closing record.
    pub(crate) results: Vec<(i64, Arc<Record>)>,
    /// The entries of metadata by which new calls are found.
    pub(crate) entries: Vec<(EntryHash, i64)>,
    pub(crate) sandboxes: Vec<SandboxChange>,
    pub(crate) notes: Vec<NoteChange>,
    /// Idempotency keys that are released, and the calls that held them.
    pub(crate) released: Vec<(String, String)>,
    pub(crate) histogram: BTreeMap<BucketKey, BucketCounts>,
    /// The signed new head, if a signature is due.
    pub(crate) signed: Option<SignedHead>,
    /// True if the executor ends with this group.
    pub(crate) ends: bool,
    /// The number of the executor's last event in the group, if there is one.
    pub(crate) last_seq: Option<u64>,
    touched: HashMap<CallKey, OpenCall>,
}

/// The key of an open call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum CallKey {
    Own(ExecutionId),
    Orphaned(i64),
}

impl From<CallRef> for CallKey {
    fn from(call: CallRef) -> Self {
        match call {
            CallRef::Own(id) => Self::Own(id),
            CallRef::Orphaned(id) => Self::Orphaned(id),
        }
    }
}

/// The shortest time, in microseconds, that results of orphaned tasks are stored: the process that closes such a task
/// may be a command that stores no results of its own tasks.
const ORPHANED_TASK_TTL_MIN: i64 = TASK_TTL.as_micros() as i64;

/// The open calls of one executor, and the orphaned calls that it closes.
#[derive(Debug)]
pub(crate) struct Projection {
    instance: Uuid,
    /// The time that results of tasks are stored, in microseconds.
    task_ttl: i64,
    /// True if the words of calls are written together with their rows.
    indexes_on_write: bool,
    open: HashMap<CallKey, OpenCall>,
}

impl Projection {
    pub(crate) fn new(instance: Uuid, task_ttl: i64, indexes_on_write: bool) -> Self {
        Self { instance, task_ttl, indexes_on_write, open: HashMap::new() }
    }

    /// Takes over an orphaned call, to close it.
    pub(crate) fn take_over(&mut self, call: OpenCall) {
        self.open.insert(CallKey::Orphaned(call.row.id), call);
    }

    /// Returns the orphaned calls that were taken over and are not known to be closed.
    pub(crate) fn orphaned(&self) -> Vec<i64> {
        let orphaned = self.open.keys().filter_map(|call| match call {
            CallKey::Orphaned(id) => Some(*id),
            CallKey::Own(_) => None,
        });
        orphaned.collect()
    }

    pub(crate) fn clear_orphaned(&mut self) {
        self.open.retain(|call, _| matches!(call, CallKey::Own(_)));
    }

    /// Takes over a call that is open in the tables, to continue it.
    pub(crate) fn continue_call(&mut self, id: ExecutionId, call: OpenCall) {
        self.open.insert(CallKey::Own(id), call);
    }

    /// Returns the rows that the records add and change, if the trail ends at `after`. Does not change the projection.
    pub(crate) fn project(&self, records: &[Arc<Record>], after: &Head) -> Changeset {
        let mut changeset = Changeset {
            after: *after,
            head: *after,
            events: Vec::with_capacity(records.len()),
            opened: Vec::new(),
            changed: Vec::new(),
            words: Vec::new(),
            answers: Vec::new(),
            results: Vec::new(),
            entries: Vec::new(),
            sandboxes: Vec::new(),
            notes: Vec::new(),
            released: Vec::new(),
            histogram: BTreeMap::new(),
            signed: None,
            ends: false,
            last_seq: records.iter().rev().map(|record| record.instance_seq).find(|seq| *seq > 0),
            touched: HashMap::new(),
        };
        let mut scratch = Vec::new();
        for record in records {
            if let (Some(key), Some(CallRef::Own(call))) = (&record.released, record.call) {
                changeset.released.push((key.clone(), call.to_string()));
            }
            let seq = changeset.head.seq + 1;
            changeset.sandboxes.extend(SandboxChange::of(seq, record));
            changeset.notes.extend(NoteChange::of(seq, record));
            let execution = record.call.and_then(|call| self.apply_record(&mut changeset, seq, call.into(), record));
            if let (Some(call), Some(_)) = (execution, &record.result) {
                changeset.results.push((call, Arc::clone(record)));
            }
            let placed = Placed {
                seq,
                instance: self.instance,
                instance_seq: record.instance_seq as i64,
                at: record.at,
                name: record.name,
                execution,
                subject: record.subject.as_deref(),
                data: &record.data,
            };
            let hash = placed.hash(&changeset.head.hash, &mut scratch);
            changeset.events.push(EventRow { seq, record: Arc::clone(record), execution, hash });
            changeset.head = Head { seq, hash };
        }
        for call in changeset.touched.values_mut() {
            call.is_closed = call.row.is_closed();
            if call.is_closed {
                let (key, one) = call.row.histogram_row();
                let counts = changeset.histogram.entry(key).or_default();
                counts.add(&one);
                if self.indexes_on_write {
                    changeset.words.push((call.row.id, closing_text(call)));
                }
            }
            let rows = if call.row.id > after.seq { &mut changeset.opened } else { &mut changeset.changed };
            // Of an open call everything but the arguments is needed later.
            let rest =
                if call.is_closed { CallRow::default() } else { CallRow { parameters: None, ..call.row.clone() } };
            rows.push(std::mem::replace(&mut call.row, rest));
        }
        changeset.opened.sort_unstable_by_key(|row| row.id);
        changeset.changed.sort_unstable_by_key(|row| row.id);
        changeset
    }

    /// Applies a record to its call and returns the call's number. A record of a call that is not open is stored
    /// without one.
    fn apply_record(&self, changeset: &mut Changeset, seq: i64, call: CallKey, record: &Record) -> Option<i64> {
        if let RowChange::Opened(opened) = &record.change {
            let row = CallRow::open(seq, record.at, opened);
            let entries = opened.metadata.as_ref().map(metadata::entries).unwrap_or_default();
            changeset.entries.extend(entries.into_iter().map(|entry| (entry, seq)));
            // If results of tasks are not stored, none is expected.
            let is_task = opened.is_task && self.task_ttl > 0;
            if is_task {
                changeset.answers.push(expect_task(seq, record));
            }
            let words = if self.indexes_on_write { opening_text(&row) } else { String::new() };
            changeset.touched.insert(call, OpenCall { words, row, has_answer: is_task, is_task, is_closed: false });
            return Some(seq);
        }
        let open = match changeset.touched.entry(call) {
            std::collections::hash_map::Entry::Occupied(touched) => touched.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let found = self.open.get(&call)?;
                // Most records of a running call do not change its row.
                if matches!(record.change, RowChange::Unchanged) {
                    return Some(found.row.id);
                }
                vacant.insert(found.clone())
            }
        };
        let id = open.row.id;
        open.row.apply(record.at, &record.change);
        if matches!(record.change, RowChange::BecameTask) && self.task_ttl > 0 {
            changeset.answers.push(expect_task(id, record));
            (open.has_answer, open.is_task) = (true, true);
        }
        if let RowChange::Started { keyed: Some(keyed), .. } = &record.change {
            let (key, fingerprint) = (Some(keyed.key.clone()), Some(keyed.fingerprint.clone()));
            let (task, tenant) = (open.is_task, record.tenant.clone());
            let expires_at = keyed.expires_at.as_microsecond();
            changeset.answers.push(AnswerChange::Expect { id, task, tenant, key, fingerprint, expires_at });
            open.has_answer = true;
        }
        if open.row.is_closed() && open.has_answer {
            changeset.answers.push(match &record.answer {
                Some(result) => {
                    let ttl = match call {
                        CallKey::Own(_) => self.task_ttl,
                        CallKey::Orphaned(_) => self.task_ttl.max(ORPHANED_TASK_TTL_MIN),
                    };
                    let expires_at = open.is_task.then(|| record.at.saturating_add(ttl));
                    AnswerChange::Store { id, result: result.clone(), expires_at }
                }
                None => AnswerChange::Remove { id },
            });
        }
        Some(id)
    }

    /// Takes note that the changeset was committed.
    pub(crate) fn confirm(&mut self, changeset: Changeset) {
        for (call, open) in changeset.touched {
            if open.is_closed {
                self.open.remove(&call);
            } else {
                self.open.insert(call, open);
            }
        }
    }
}

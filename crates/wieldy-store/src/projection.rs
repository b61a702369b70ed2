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
use crate::histogram::{self, Tally, TallyKey};
use crate::record_to_row::{Closed, Meaning, Opened};

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
    pub(crate) sandbox: Option<String>,
    pub(crate) agent: String,
    pub(crate) user: Option<String>,
    pub(crate) batch: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) workspace: Option<String>,
    pub(crate) attempts: i64,
    pub(crate) usage: Option<String>,
    pub(crate) metadata: Option<String>,
}

impl CallRow {
    /// Returns the row of a call that was just accepted.
    pub(crate) fn open(id: i64, at: i64, opened: &Opened) -> Self {
        let Opened { subject, parameters, called_as, workspace, is_task, is_rerun } = opened;
        let mut metadata = Map::new();
        if let Some(call_id) = &subject.call_id {
            metadata.insert("call_id".into(), Value::String(call_id.clone().into_owned()));
        }
        if let Some(name) = called_as {
            metadata.insert("called_as".into(), Value::String(name.clone()));
        }
        for (name, told) in [("task", *is_task), ("rerun", *is_rerun)] {
            if told {
                metadata.insert(name.into(), Value::Bool(true));
            }
        }
        let column = |text: &Option<Cow<'_, str>>| text.as_deref().map(column);
        Self {
            id,
            execution_id: column(&subject.execution_id).unwrap_or_default(),
            tool: column(&subject.tool).unwrap_or_default(),
            parameters: Some(parameters.clone()),
            status: "pending".into(),
            started_at: at,
            agent: self::column(&subject.agent),
            user: column(&subject.user),
            batch: column(&subject.batch_id),
            session: column(&subject.session),
            tenant: column(&subject.tenant),
            workspace: workspace.as_deref().map(self::column),
            metadata: text_of(metadata),
            ..Self::default()
        }
    }

    /// Applies a later record to the row.
    pub(crate) fn apply(&mut self, at: i64, meaning: &Meaning) {
        match meaning {
            Meaning::Task => self.extend_metadata([("task".to_owned(), Value::Bool(true))]),
            Meaning::Started { attempt, .. } => {
                self.status = "running".into();
                self.attempts = *attempt;
            }
            Meaning::Asked => self.status = "input_required".into(),
            Meaning::Answered => self.status = "pending".into(),
            Meaning::Closed(closed) => self.close(at, closed),
            Meaning::Nothing | Meaning::Opened(_) => {}
        }
    }

    fn close(&mut self, at: i64, closed: &Closed) {
        self.status = closed.status.clone();
        self.error_code = closed.error_code.as_deref().map(column);
        self.error_message = closed.error_message.as_deref().map(column);
        self.completed_at = Some(at);
        self.duration_ms = Some(closed.duration_ms);
        self.output_bytes = Some(closed.output_bytes);
        self.attempts = closed.attempts;
        self.sandbox = closed.sandbox.as_deref().map(column);
        self.usage = closed.usage.clone();
        if !closed.rest.is_empty() {
            self.extend_metadata(closed.rest.clone());
        }
    }

    fn extend_metadata(&mut self, more: impl IntoIterator<Item = (String, Value)>) {
        let known = self.metadata.as_deref().and_then(|text| serde_json::from_str(text).ok());
        let mut metadata: Map<String, Value> = known.unwrap_or_default();
        metadata.extend(more);
        self.metadata = text_of(metadata);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.completed_at.is_some()
    }

    pub(crate) fn tally(&self) -> (TallyKey, Tally) {
        let key = TallyKey {
            day: self.started_at.div_euclid(histogram::DAY),
            tenant: self.tenant.clone().unwrap_or_default(),
            agent: self.agent.clone(),
            tool: self.tool.clone(),
            status: self.status.to_string(),
            bucket: histogram::bucket(self.duration_ms.unwrap_or_default()),
        };
        (key, Tally { calls: 1, output_bytes: self.output_bytes.unwrap_or_default() })
    }
}

/// Returns the text as a column can hold it: PostgreSQL's text has no NUL character.
fn column(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn text_of(metadata: Map<String, Value>) -> Option<String> {
    (!metadata.is_empty()).then(|| Value::Object(metadata).to_string())
}

/// Maximum number of bytes of a call's searchable text.
pub(crate) const WORDS_BYTES_MAX: usize = 16 * 1024;

/// A call that is not closed.
#[derive(Debug, Clone)]
pub(crate) struct OpenCall {
    pub(crate) row: CallRow,
    words: String,
    /// True if its result may be asked for later.
    has_answer: bool,
    is_task: bool,
    /// True if the draft that it is part of closes it.
    is_over: bool,
}

impl OpenCall {
    /// Returns the state of a call that is open in the tables.
    pub(crate) fn found(row: CallRow, has_answer: bool, is_task: bool) -> Self {
        let words = first_words(&row);
        Self { row, words, has_answer, is_task, is_over: false }
    }
}

/// Returns the searchable text of a call that was just opened.
pub(crate) fn first_words(row: &CallRow) -> String {
    let parameters = row.parameters.as_deref().unwrap_or_default();
    let mut text = format!("{} {parameters}", row.tool);
    text.truncate(text.floor_char_boundary(WORDS_BYTES_MAX));
    text
}

/// Returns the searchable text of a closed call.
fn words(call: &mut OpenCall) -> String {
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
    Give { id: i64, result: String, expires_at: Option<i64> },
    /// There will be no result.
    Forget { id: i64 },
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
pub(crate) struct Draft {
    /// The head of the trail before the group.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "a file that is locked ends where it was read to")
    )]
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
    /// Idempotency keys that are released, and the calls that held them.
    pub(crate) released: Vec<(String, String)>,
    pub(crate) tallies: BTreeMap<TallyKey, Tally>,
    /// The signed new head, if a signature is due.
    pub(crate) signed: Option<SignedHead>,
    /// True if the executor ends with this group.
    pub(crate) ends: bool,
    /// The number of the executor's last event in the group, if there is one.
    pub(crate) last_seq: Option<u64>,
    touched: HashMap<Handle, OpenCall>,
}

/// The key of an open call.
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

/// The shortest time, in microseconds, that results of orphaned tasks are stored: the process that closes such a task
/// may be a command that stores no results of its own tasks.
const LEFT_TASK_TTL: i64 = TASK_TTL.as_micros() as i64;

/// The open calls of one executor, and the orphaned calls that it closes.
#[derive(Debug)]
pub(crate) struct Ledger {
    instance: Uuid,
    /// The time that results of tasks are stored, in microseconds.
    task_ttl: i64,
    /// True if the words of calls are written together with their rows.
    takes_words: bool,
    open: HashMap<Handle, OpenCall>,
}

impl Ledger {
    pub(crate) fn new(instance: Uuid, task_ttl: i64, takes_words: bool) -> Self {
        Self { instance, task_ttl, takes_words, open: HashMap::new() }
    }

    /// Takes over an orphaned call, to close it.
    pub(crate) fn close_for(&mut self, call: OpenCall) {
        self.open.insert(Handle::Left(call.row.id), call);
    }

    /// Returns the orphaned calls that were taken over and are not known to be closed.
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

    /// Takes over a call that is open in the tables, to continue it.
    pub(crate) fn carry_on(&mut self, id: ExecutionId, call: OpenCall) {
        self.open.insert(Handle::Own(id), call);
    }

    /// Returns the rows that the records add and change, if the trail ends at `after`. Does not change the ledger.
    pub(crate) fn draft(&self, records: &[Arc<Record>], after: &Head) -> Draft {
        let mut draft = Draft {
            after: *after,
            head: *after,
            events: Vec::with_capacity(records.len()),
            opened: Vec::new(),
            changed: Vec::new(),
            words: Vec::new(),
            answers: Vec::new(),
            released: Vec::new(),
            tallies: BTreeMap::new(),
            signed: None,
            ends: false,
            last_seq: records.iter().rev().map(|record| record.instance_seq).find(|seq| *seq > 0),
            touched: HashMap::new(),
        };
        let mut scratch = Vec::new();
        for record in records {
            if let (Some(key), Some(CallRef::Own(call))) = (&record.released, record.call) {
                draft.released.push((key.clone(), call.to_string()));
            }
            let seq = draft.head.seq + 1;
            let execution = record.call.and_then(|call| self.enter(&mut draft, seq, call.into(), record));
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
            let hash = placed.hash(&draft.head.hash, &mut scratch);
            draft.events.push(EventRow { seq, record: Arc::clone(record), execution, hash });
            draft.head = Head { seq, hash };
        }
        for call in draft.touched.values_mut() {
            call.is_over = call.row.is_over();
            if call.is_over {
                let (key, one) = call.row.tally();
                let tally = draft.tallies.entry(key).or_default();
                tally.calls += one.calls;
                tally.output_bytes += one.output_bytes;
                if self.takes_words {
                    draft.words.push((call.row.id, words(call)));
                }
            }
            let rows = if call.row.id > after.seq { &mut draft.opened } else { &mut draft.changed };
            // Of an open call everything but the arguments is needed later.
            let later =
                if call.is_over { CallRow::default() } else { CallRow { parameters: None, ..call.row.clone() } };
            rows.push(std::mem::replace(&mut call.row, later));
        }
        draft.opened.sort_unstable_by_key(|row| row.id);
        draft.changed.sort_unstable_by_key(|row| row.id);
        draft
    }

    /// Applies a record to its call and returns the call's number. A record of a call that is not open is stored
    /// without one.
    fn enter(&self, draft: &mut Draft, seq: i64, call: Handle, record: &Record) -> Option<i64> {
        if let Meaning::Opened(opened) = &record.meaning {
            let row = CallRow::open(seq, record.at, opened);
            // If results of tasks are not stored, none is expected.
            let is_task = opened.is_task && self.task_ttl > 0;
            if is_task {
                draft.answers.push(expect_task(seq, record));
            }
            let words = if self.takes_words { first_words(&row) } else { String::new() };
            draft.touched.insert(call, OpenCall { words, row, has_answer: is_task, is_task, is_over: false });
            return Some(seq);
        }
        let open = match draft.touched.entry(call) {
            std::collections::hash_map::Entry::Occupied(touched) => touched.into_mut(),
            std::collections::hash_map::Entry::Vacant(vacant) => {
                let known = self.open.get(&call)?;
                // Most records of a running call do not change its row.
                if matches!(record.meaning, Meaning::Nothing) {
                    return Some(known.row.id);
                }
                vacant.insert(known.clone())
            }
        };
        let id = open.row.id;
        open.row.apply(record.at, &record.meaning);
        if matches!(record.meaning, Meaning::Task) && self.task_ttl > 0 {
            draft.answers.push(expect_task(id, record));
            (open.has_answer, open.is_task) = (true, true);
        }
        if let Meaning::Started { keyed: Some(keyed), .. } = &record.meaning {
            let (key, fingerprint) = (Some(keyed.key.clone()), Some(keyed.fingerprint.clone()));
            let (task, tenant) = (open.is_task, record.tenant.clone());
            let expires_at = keyed.expires_at.as_microsecond();
            draft.answers.push(AnswerChange::Expect { id, task, tenant, key, fingerprint, expires_at });
            open.has_answer = true;
        }
        if open.row.is_over() && open.has_answer {
            draft.answers.push(match &record.answer {
                Some(result) => {
                    let ttl = match call {
                        Handle::Own(_) => self.task_ttl,
                        Handle::Left(_) => self.task_ttl.max(LEFT_TASK_TTL),
                    };
                    let expires_at = open.is_task.then(|| record.at.saturating_add(ttl));
                    AnswerChange::Give { id, result: result.clone(), expires_at }
                }
                None => AnswerChange::Forget { id },
            });
        }
        Some(id)
    }

    /// Takes note that the draft was committed.
    pub(crate) fn accept(&mut self, draft: Draft) {
        for (call, open) in draft.touched {
            if open.is_over {
                self.open.remove(&call);
            } else {
                self.open.insert(call, open);
            }
        }
    }
}

//! Notes that agents leave for themselves: a fold over the events `agent.self.*`.
//!
//! An event with the state `pending` makes a note; one with the state `delivered`, `cancelled` or `expired` ends it. So
//! every journal that keeps events can make its notes again, and a note is as durable as its event. [`Notes`] is the
//! fold in memory: it knows which notes are due for a caller, and lends them to one result at a time.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::call::Caller;
use crate::event::{Body, Event};
use crate::ids::ExecutionId;
pub use crate::ids::NoteId;
use crate::redact;

/// Maximum number of pending notes of one agent.
pub const NOTES_PENDING_MAX: usize = 1000;
/// Maximum number of notes in one result, and of the bytes of their messages. The first note always has room.
pub const NOTES_PER_RESULT_MAX: usize = 20;
const MESSAGES_BYTES_MAX: usize = 8 * 1024;
/// The time without a call after which a session is over, and its notes with it.
pub const NOTES_SESSION_IDLE: SignedDuration = SignedDuration::from_hours(72);
/// The time for which a note that is part of a result is in no other result. After that, the result counts as lost.
const LENT_FOR: Duration = Duration::from_secs(30);
/// Maximum number of sessions whose first calls are remembered.
const SESSIONS_MAX: usize = 10_000;

/// The urgency of a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NotePriority {
    /// It can wait.
    Low,
    /// The usual urgency.
    #[default]
    Normal,
    /// It should be read soon.
    High,
    /// It must not be missed.
    Critical,
}

impl NotePriority {
    /// Returns the priority as written in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
            Self::Critical => "critical",
        }
    }
}

/// The result that a note becomes a part of.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum InjectAt {
    /// The next result. A server also sends the note to the client at once, or at its time.
    Now,
    /// The next result.
    #[default]
    NextResult,
    /// The first result of a session that begins later.
    SessionStart,
    /// The next result of this tool.
    AfterTool(Arc<str>),
    /// The last result of the next batch.
    BatchEnd,
    /// The next result of a call that was a task.
    TaskEnd,
}

impl InjectAt {
    /// The ways to write it.
    pub const FORMS: &'static str = "now, next_result, session_start, after_tool:NAME, batch_end, task_end";
}

impl FromStr for InjectAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "now" => Ok(Self::Now),
            "next_result" => Ok(Self::NextResult),
            "session_start" => Ok(Self::SessionStart),
            "batch_end" => Ok(Self::BatchEnd),
            "task_end" => Ok(Self::TaskEnd),
            _ => match text.strip_prefix("after_tool:").map(str::trim) {
                Some(tool) if !tool.is_empty() && tool.len() <= 200 => Ok(Self::AfterTool(tool.into())),
                _ => Err(format!("`{}` is not one of: {}", crate::present::shown_in_line(text), Self::FORMS)),
            },
        }
    }
}

impl fmt::Display for InjectAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now => f.write_str("now"),
            Self::NextResult => f.write_str("next_result"),
            Self::SessionStart => f.write_str("session_start"),
            Self::AfterTool(tool) => write!(f, "after_tool:{tool}"),
            Self::BatchEnd => f.write_str("batch_end"),
            Self::TaskEnd => f.write_str("task_end"),
        }
    }
}

impl TryFrom<String> for InjectAt {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<InjectAt> for String {
    fn from(inject_at: InjectAt) -> Self {
        inject_at.to_string()
    }
}

/// The state of a note after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoteState {
    /// It was left, and waits.
    Pending,
    /// It waits, and its time has come.
    Due,
    /// It was part of an answer that was handed over.
    Delivered,
    /// Its agent took it back.
    Cancelled,
    /// Its time, or its session, is over.
    Expired,
}

/// A note as an agent leaves it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewNote {
    /// The text.
    pub message: String,
    /// The urgency.
    pub priority: NotePriority,
    /// The kind of note; `reminder` makes the event `agent.self.remind`.
    pub category: String,
    /// The time before which it is not delivered.
    pub deliver_at: Option<Timestamp>,
    /// The result that it becomes a part of.
    pub inject_at: InjectAt,
    /// True if it is delivered in other sessions too. Otherwise it ends with its session.
    pub persist_cross_session: bool,
    /// The time after which it is not delivered any more.
    pub expires_at: Option<Timestamp>,
    /// A name: an undelivered note with the same name is replaced.
    pub key: Option<String>,
}

/// A note of an agent, as its events have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The id of the note.
    pub id: NoteId,
    /// The state after the event.
    pub state: NoteState,
    /// The text.
    pub message: String,
    /// The urgency.
    pub priority: NotePriority,
    /// The kind of note.
    pub category: String,
    /// The time before which it is not delivered.
    pub deliver_at: Option<Timestamp>,
    /// The result that it becomes a part of.
    pub inject_at: InjectAt,
    /// True if it is delivered in other sessions too.
    pub persist_cross_session: bool,
    /// The time after which it is not delivered any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// The name under which a later note replaces it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replace_name: Option<String>,
    /// The time at which it was left.
    pub left_at: Timestamp,
    /// The agent that left it.
    pub agent: String,
    /// The agent's tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The session in which it was left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The person behind the agent.
    pub user: Option<String>,
    /// A hash of agent, tenant and user. Names may be redacted here, so that two could look alike; hashes are not.
    pub owner: String,
    /// The hash that a caller must have to get the note: the owner, or the owner with its session.
    pub scope: String,
}

impl Note {
    pub(crate) fn of(new: NewNote, caller: &Caller, now: Timestamp) -> Self {
        let scopes = NoteScopes::of(caller);
        Self {
            id: NoteId::next(),
            state: NoteState::Pending,
            message: new.message,
            priority: new.priority,
            category: new.category,
            deliver_at: new.deliver_at,
            inject_at: new.inject_at,
            persist_cross_session: new.persist_cross_session,
            expires_at: new.expires_at,
            replace_name: new.key,
            left_at: now,
            agent: caller.agent.clone(),
            tenant: caller.tenant.clone(),
            session: caller.session.clone(),
            user: caller.user.clone(),
            scope: if new.persist_cross_session { scopes.owner.clone() } else { scopes.session },
            owner: scopes.owner,
        }
    }

    /// Returns the caller that left it, without any rights.
    pub(crate) fn caller(&self) -> Caller {
        let (tenant, session, user) = (self.tenant.clone(), self.session.clone(), self.user.clone());
        Caller { tenant, session, user, ..Caller::agent(self.agent.clone()) }
    }

    /// Returns the same note in another state.
    pub(crate) fn now(&self, state: NoteState) -> Box<Self> {
        Box::new(Self { state, ..self.clone() })
    }

    /// Returns the time from which it may be delivered.
    pub fn due_at(&self) -> Timestamp {
        self.deliver_at.unwrap_or(self.left_at)
    }

    /// Returns true if results for this caller may bring it: the caller is the agent that left it, for the same tenant
    /// and user, and in the same session unless it is delivered in all of them.
    pub fn is_for(&self, caller: &Caller) -> bool {
        let scopes = NoteScopes::of(caller);
        self.scope == scopes.owner || self.scope == scopes.session
    }

    /// Returns the time at which a server tells the client about it, if it does.
    fn announced_at(&self) -> Option<Timestamp> {
        match self.inject_at {
            InjectAt::Now => Some(self.due_at()),
            InjectAt::NextResult => self.deliver_at,
            _ => None,
        }
    }
}

/// The delivery of a note.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Delivery {
    /// The note, in the state `delivered`.
    #[serde(flatten)]
    pub note: Note,
    /// The time since the note became due, in milliseconds.
    pub late_ms: u64,
}

/// A note as part of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DueNote {
    /// The id. A note that is delivered again has the same one.
    pub id: NoteId,
    /// The text.
    pub message: String,
    /// The urgency.
    pub priority: NotePriority,
    /// The kind of note.
    pub category: String,
    /// The time at which it was left.
    pub left_at: Timestamp,
    /// The time that it was left for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deliver_at: Option<Timestamp>,
}

impl From<&Note> for DueNote {
    fn from(note: &Note) -> Self {
        Self {
            id: note.id,
            message: note.message.clone(),
            priority: note.priority,
            category: note.category.clone(),
            left_at: note.left_at,
            deliver_at: note.deliver_at,
        }
    }
}

/// The notes that are due at a point.
#[derive(Debug, Default)]
pub struct DueNotes {
    /// The notes, the oldest first, at most [`NOTES_PER_RESULT_MAX`].
    pub notes: Vec<DueNote>,
    /// The number of further notes that are due.
    pub more: usize,
    /// Notes of the caller that are over, so that their end can be recorded.
    pub(crate) expired: Vec<Arc<Note>>,
}

/// A point at which a result is handed over.
#[derive(Debug, Clone, Copy, Default)]
pub struct Point<'a> {
    /// The name of the tool.
    pub tool: &'a str,
    /// The call of the result. A note is no part of the result of the call that left it.
    pub call: Option<ExecutionId>,
    /// True if the result is the last of a batch.
    pub ends_batch: bool,
    /// True if the call was a task.
    pub ends_task: bool,
}

/// The hashes that say which notes belong to a caller.
struct NoteScopes {
    owner: String,
    session: String,
}

impl NoteScopes {
    fn of(caller: &Caller) -> Self {
        let owner = hash([Some("owner"), Some(&caller.agent), caller.tenant.as_deref(), caller.user.as_deref()]);
        Self { session: hash([Some("session"), Some(&owner), caller.session.as_deref()]), owner }
    }
}

fn hash<'a>(texts: impl IntoIterator<Item = Option<&'a str>>) -> String {
    let mut hasher = blake3::Hasher::new();
    for text in texts {
        // Each text comes after its length, so that no two callers have the same bytes.
        let length = text.map_or(u64::MAX, |text| text.len() as u64);
        hasher.update(&length.to_le_bytes()).update(text.unwrap_or_default().as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// The pending notes of all agents, in memory. A journal feeds it with its events.
#[derive(Debug, Default)]
pub struct Notes {
    /// The number of pending notes. Calls read it first, and nothing else while it is 0.
    count: AtomicUsize,
    state: Mutex<NotesState>,
    /// Notified when a note was added or has ended.
    changed: Notify,
    /// Held while a note is left, so that no agent leaves more than it may.
    pub(crate) leaving: Mutex<()>,
}

#[derive(Debug, Default)]
struct NotesState {
    /// The pending notes by their scopes, the oldest first.
    by_scope: HashMap<String, Vec<PendingNote>>,
    scopes: HashMap<NoteId, String>,
    /// The number of pending notes of each owner.
    counts: HashMap<String, usize>,
    /// The first call of each session that this executor has seen.
    sessions: HashMap<String, Timestamp>,
    /// The last caller, who usually calls again.
    last_caller: Option<Arc<Caller>>,
}

#[derive(Debug)]
struct PendingNote {
    note: Arc<Note>,
    /// The call that left it, if this executor made it.
    left_by: Option<ExecutionId>,
    /// The last call of its session.
    session_seen_at: Timestamp,
    /// The time until which it belongs to a result that is on its way.
    lent_until: Option<Instant>,
    is_announced: bool,
}

impl PendingNote {
    fn is_over(&self, now: Timestamp) -> bool {
        let note = &self.note;
        let is_session_over = || now.duration_since(self.session_seen_at) > NOTES_SESSION_IDLE;
        note.expires_at.is_some_and(|end| end <= now) || !note.persist_cross_session && is_session_over()
    }

    fn is_due(&self, point: &Point<'_>, session: Option<Timestamp>, is_own_session: bool, now: Timestamp) -> bool {
        let note = &self.note;
        let is_of_this_call = point.call.is_some() && point.call == self.left_by;
        !is_of_this_call
            && note.due_at() <= now
            && match &note.inject_at {
                InjectAt::Now | InjectAt::NextResult => true,
                InjectAt::SessionStart => !is_own_session && session.is_some_and(|began| began >= note.due_at()),
                InjectAt::AfterTool(tool) => **tool == *point.tool,
                InjectAt::BatchEnd => point.ends_batch,
                InjectAt::TaskEnd => point.ends_task,
            }
    }
}

impl Notes {
    /// Returns true if there is no note at all.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds a pending note, or ends the note if its state says so. An older note of the same name is replaced. `left_by`
    /// is the call that left it, if that is a call of this executor.
    pub fn apply(&self, note: Note, left_by: Option<ExecutionId>) {
        let mut state = self.lock();
        match note.state {
            NoteState::Due => return,
            NoteState::Delivered | NoteState::Cancelled | NoteState::Expired => state.end(note.id),
            NoteState::Pending if state.scopes.contains_key(&note.id) => return,
            NoteState::Pending => {
                if let Some(name) = &note.replace_name {
                    let in_scope = state.by_scope.get(&note.scope).into_iter().flatten();
                    let same = in_scope.filter(|other| other.note.replace_name.as_ref() == Some(name));
                    let replaced: Vec<NoteId> = same.map(|other| other.note.id).collect();
                    replaced.into_iter().for_each(|id| state.end(id));
                }
                state.add(note, left_by);
            }
        }
        self.count.store(state.scopes.len(), Ordering::Release);
        drop(state);
        self.changed.notify_waiters();
    }

    /// Applies an event of this executor. Most events are about no note.
    pub fn apply_event(&self, event: &Event) {
        match &event.body {
            Body::CallPending { .. } => self.note_call(&event.subject.caller, event.at),
            Body::SelfNotify(_) | Body::SelfRemind(_) | Body::SelfDelivered(_) => {
                // The note is the one that is written down: without secrets.
                if let Ok(note) = serde_json::from_value(event.data()) {
                    self.apply(note, event.subject.execution);
                }
            }
            _ => {}
        }
    }

    /// Takes note of a call of a session at this time. Notes without a session of their own live for a while after it.
    pub fn note_call(&self, caller: &Arc<Caller>, at: Timestamp) {
        let mut state = self.lock();
        if state.last_caller.as_ref().is_some_and(|last| Arc::ptr_eq(last, caller)) {
            return;
        }
        state.last_caller = Some(Arc::clone(caller));
        let session = NoteScopes::of(caller).session;
        if state.sessions.len() >= SESSIONS_MAX && !state.sessions.contains_key(&session) {
            let mut times: Vec<Timestamp> = state.sessions.values().copied().collect();
            times.sort_unstable();
            let middle = times[times.len() / 2];
            state.sessions.retain(|_, began| *began > middle);
        }
        state.sessions.entry(session).or_insert(at);
    }

    /// Tells when the session of a note last made a call, as a history knows it.
    pub fn set_session_seen(&self, id: NoteId, at: Timestamp) {
        let mut state = self.lock();
        if let Some(note) = state.get_mut(id) {
            note.session_seen_at = note.session_seen_at.max(at);
        }
    }

    /// Returns the notes of the caller that are due at this point, and lends them to its result.
    pub fn due(&self, caller: &Caller, point: &Point<'_>, now: Timestamp) -> DueNotes {
        let mut due = DueNotes::default();
        if self.is_empty() {
            return due;
        }
        let scopes = NoteScopes::of(caller);
        let mut state = self.lock();
        let began = state.sessions.get(&scopes.session).copied();
        let session = caller.session.as_deref().map(redact::text);
        let mut found = Vec::new();
        for scope in [&scopes.session, &scopes.owner] {
            for pending in state.by_scope.get_mut(scope).into_iter().flatten() {
                if pending.is_over(now) {
                    due.expired.push(Arc::clone(&pending.note));
                    continue;
                }
                pending.session_seen_at = pending.session_seen_at.max(now);
                let is_own_session = session.is_some() && pending.note.session.as_deref() == session.as_deref();
                let is_lent = pending.lent_until.is_some_and(|until| until > Instant::now());
                if !is_lent && pending.is_due(point, began, is_own_session, now) {
                    found.push((pending.note.due_at(), pending.note.id));
                }
            }
        }
        found.sort_unstable();
        let (mut bytes, all) = (0, found.len());
        for (_, id) in found.into_iter().take(NOTES_PER_RESULT_MAX) {
            let Some(pending) = state.get_mut(id) else { continue };
            bytes += pending.note.message.len();
            if bytes > MESSAGES_BYTES_MAX && !due.notes.is_empty() {
                break;
            }
            pending.lent_until = Some(Instant::now() + LENT_FOR);
            due.notes.push(DueNote::from(&*pending.note));
        }
        due.more = all - due.notes.len();
        due
    }

    /// Returns the pending notes that the caller may get, the oldest first.
    pub fn of(&self, caller: &Caller, now: Timestamp) -> Vec<Arc<Note>> {
        if self.is_empty() {
            return Vec::new();
        }
        let (scopes, state) = (NoteScopes::of(caller), self.lock());
        let in_scopes = [&scopes.session, &scopes.owner].map(|scope| state.by_scope.get(scope));
        let alive = in_scopes.into_iter().flatten().flatten().filter(|pending| !pending.is_over(now));
        let mut notes: Vec<Arc<Note>> = alive.map(|pending| Arc::clone(&pending.note)).collect();
        notes.sort_unstable_by_key(|note| note.id);
        notes
    }

    /// Returns the notes of the caller that are over, in all its sessions.
    pub(crate) fn expired(&self, caller: &Caller, now: Timestamp) -> Vec<Arc<Note>> {
        let (owner, state) = (NoteScopes::of(caller).owner, self.lock());
        let over = state.by_scope.values().flatten().filter(|pending| pending.note.owner == owner && pending.is_over(now));
        over.map(|pending| Arc::clone(&pending.note)).collect()
    }

    /// Returns the number of pending notes of the caller, in all its sessions.
    pub fn count_of(&self, caller: &Caller) -> usize {
        if self.is_empty() {
            return 0;
        }
        let owner = NoteScopes::of(caller).owner;
        self.lock().counts.get(&owner).copied().unwrap_or_default()
    }

    /// Returns a pending note by its id.
    pub(crate) fn get(&self, id: NoteId) -> Option<Arc<Note>> {
        let mut state = self.lock();
        state.get_mut(id).map(|pending| Arc::clone(&pending.note))
    }

    /// Returns the notes that clients are to be told about now, each once, and the time of the next one.
    pub(crate) fn announce(&self, now: Timestamp) -> (Vec<Arc<Note>>, Option<Timestamp>) {
        let (mut told, mut next) = (Vec::new(), None::<Timestamp>);
        if self.is_empty() {
            return (told, next);
        }
        let mut state = self.lock();
        for pending in state.by_scope.values_mut().flatten().filter(|pending| !pending.is_announced) {
            match pending.note.announced_at() {
                Some(at) if at <= now && !pending.is_over(now) => {
                    pending.is_announced = true;
                    told.push(Arc::clone(&pending.note));
                }
                Some(at) if at > now => next = Some(next.map_or(at, |next| next.min(at))),
                _ => {}
            }
        }
        told.sort_unstable_by_key(|note| (note.due_at(), note.id));
        (told, next)
    }

    /// Returns a future that ends when a note is added or ends.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    fn lock(&self) -> MutexGuard<'_, NotesState> {
        self.state.lock().expect("no code panics while it holds the notes")
    }
}

impl NotesState {
    fn add(&mut self, note: Note, left_by: Option<ExecutionId>) {
        self.scopes.insert(note.id, note.scope.clone());
        *self.counts.entry(note.owner.clone()).or_default() += 1;
        let session_seen_at = note.left_at;
        let of_scope = self.by_scope.entry(note.scope.clone()).or_default();
        let note = Arc::new(note);
        of_scope.push(PendingNote { note, left_by, session_seen_at, lent_until: None, is_announced: false });
    }

    fn end(&mut self, id: NoteId) {
        let Some(scope) = self.scopes.remove(&id) else { return };
        let Some(of_scope) = self.by_scope.get_mut(&scope) else { return };
        if let Some(at) = of_scope.iter().position(|pending| pending.note.id == id) {
            let ended = of_scope.remove(at);
            if let Some(count) = self.counts.get_mut(&ended.note.owner) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&ended.note.owner);
                }
            }
        }
        if of_scope.is_empty() {
            self.by_scope.remove(&scope);
        }
    }

    fn get_mut(&mut self, id: NoteId) -> Option<&mut PendingNote> {
        let scope = self.scopes.get(&id)?;
        self.by_scope.get_mut(scope)?.iter_mut().find(|pending| pending.note.id == id)
    }
}

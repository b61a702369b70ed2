//! Notes of agents to themselves, as tools leave them, events have them and results bring them.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::call::Caller;
pub use crate::ids::NoteId;

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
    pub(crate) fn announced_at(&self) -> Option<Timestamp> {
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

/// The hashes that say which notes belong to a caller.
pub(crate) struct NoteScopes {
    pub(crate) owner: String,
    pub(crate) session: String,
}

impl NoteScopes {
    pub(crate) fn of(caller: &Caller) -> Self {
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

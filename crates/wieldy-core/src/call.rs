//! What was asked, by whom, how: [`Call`], [`Caller`], [`Options`]; and what comes back: [`ToolResult`].

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::{ContextV7, Uuid};

use crate::artifact::ArtifactId;
use crate::attempt::RetryIf;
use crate::confinement::{Network, ResourceLimits, SessionKey};
use crate::confirm::Confirmer;
use crate::error::CallError;
use crate::outcome::PassedOn;
use crate::sandbox::{Level, SandboxId, Usage};

/// A tool's name with JSON arguments, as the model produced it.
#[derive(Debug, Clone)]
pub struct Call {
    /// The tool's name as it was written; nothing has checked it yet.
    pub tool: Arc<str>,
    /// The arguments; `null` counts as no arguments.
    pub arguments: Arc<Value>,
    /// The caller's own id for this call, handed back untouched.
    pub call_id: Option<String>,
    /// On whose behalf.
    pub caller: Arc<Caller>,
    /// How it should be run.
    pub options: Options,
}

impl Call {
    /// A call by the local user with default options.
    pub fn new(tool: impl Into<Arc<str>>, arguments: Value) -> Self {
        Self {
            tool: tool.into(),
            arguments: Arc::new(arguments),
            call_id: None,
            caller: Arc::new(Caller::local()),
            options: Options::default(),
        }
    }

    /// The same call on behalf of `caller`.
    #[must_use]
    pub fn by(mut self, caller: impl Into<Arc<Caller>>) -> Self {
        self.caller = caller.into();
        self
    }

    /// The same call with the caller's own id.
    #[must_use]
    pub fn id(mut self, call_id: impl Into<String>) -> Self {
        self.call_id = Some(call_id.into());
        self
    }

    /// The same call, run as `options` say.
    #[must_use]
    pub fn with(mut self, options: Options) -> Self {
        self.options = options;
        self
    }
}

/// On whose behalf a call is made. What stands here was established by the door, not claimed by the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The agent's decentralized identifier, or another name that is its own.
    pub agent: String,
    /// The tenant that the agent belongs to.
    pub tenant: Option<String>,
    /// The conversation or run that this call is part of.
    pub session: Option<String>,
    /// The person behind the agent.
    pub user: Option<String>,
    /// Which tools the caller can see at all: those without a scope and those with one of these.
    pub scopes: Held,
    /// What the caller may do; a tool names the permissions that it requires.
    pub permissions: Held,
    /// The caller's plan, where plans are used; none means no limits by plan.
    pub plan: Option<String>,
    /// The sandbox of the agent itself; what the tool gets is nested in it.
    pub parent_sandbox: Option<SandboxId>,
}

impl Caller {
    /// The person at this machine: sees every tool and holds every permission.
    pub fn local() -> Self {
        Self { scopes: Held::All, permissions: Held::All, ..Self::agent("local") }
    }

    /// An agent that sees only tools without a scope and holds no permission yet.
    pub fn agent(agent: impl Into<String>) -> Self {
        Self {
            agent: agent.into(),
            tenant: None,
            session: None,
            user: None,
            scopes: Held::none(),
            permissions: Held::none(),
            plan: None,
            parent_sandbox: None,
        }
    }

    /// A hash of the tenant, where there is one: tells tenants apart in what is kept, and gives nothing away.
    pub fn tenant_hash(&self) -> Option<String> {
        self.tenant_hashed().map(|hash| hash.to_hex().to_string())
    }

    pub(crate) fn tenant_hashed(&self) -> Option<blake3::Hash> {
        self.tenant.as_ref().map(|tenant| blake3::hash(tenant.as_bytes()))
    }

    /// Whose session this is, told apart from those of others; nothing where there is none.
    pub fn session_key(&self) -> Option<SessionKey> {
        let session = self.session.clone()?;
        Some(SessionKey { tenant: self.tenant.clone(), agent: self.agent.clone(), session })
    }
}

/// A set of names somebody holds, or simply all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Held {
    /// Every name there is.
    All,
    /// Just these.
    Only(BTreeSet<String>),
}

impl Held {
    /// Nothing at all.
    pub fn none() -> Self {
        Self::Only(BTreeSet::new())
    }

    /// Just these names.
    pub fn only<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self::Only(names.into_iter().map(Into::into).collect())
    }

    /// Whether `name` is among them.
    pub fn holds(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.contains(name),
        }
    }
}

/// How one call should be run. Every field has a good default; a call may tighten limits, never widen them.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The attempt clock: how long one run may take.
    pub timeout: Option<Duration>,
    /// The queue clock: how long the call may wait for a slot.
    pub queue_timeout: Option<Duration>,
    /// The total clock: when the caller stops waiting, all attempts and waits included.
    pub deadline: Option<Duration>,
    /// The silence clock: how long a run may show no output and no progress.
    pub silence: Option<Duration>,
    /// How often a failed run is tried again; the tool's own policy where this is absent.
    pub retries: Option<u32>,
    /// Which errors are worth another try, asked only about those that are safe to repeat.
    pub retry_if: Option<RetryIf>,
    /// Who goes first when calls wait.
    pub priority: Priority,
    /// Ask for a confirmation even where neither tool nor policy wants one.
    pub require_confirmation: bool,
    /// Whom to ask, instead of the executor's own confirmer.
    pub confirmer: Option<Arc<dyn Confirmer>>,
    /// A repeated key returns the first result instead of running again.
    pub idempotency_key: Option<String>,
    /// Run even where a cached result would do.
    pub fresh: bool,
    /// Tighter limits than the tool's own; one that is higher changes nothing.
    pub limits: ResourceLimits,
    /// A stronger isolation than the executor's default.
    pub isolation: Option<Level>,
    /// Less than what the executor lets processes reach.
    pub network: Option<Network>,
    /// Should the executor stop while the call is open, the next one on the same history runs it again, if its tool may
    /// be run twice and nothing of its arguments had to be hidden. A call with an idempotency key is left to whoever comes
    /// back with the key. These options are not written down, so one that asks for anything but a priority and labels is
    /// not run again: it would run under weaker terms.
    pub rerun: bool,
    /// Free words that come back in the result.
    pub labels: Vec<String>,
}

/// Who goes first when calls wait: higher first, and everybody rises with time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Priority(pub i8);

impl Priority {
    /// Work that nobody waits for.
    pub const LOW: Self = Self(-10);
    /// What a call has that says nothing.
    pub const NORMAL: Self = Self(0);
    /// Somebody is looking at the screen.
    pub const HIGH: Self = Self(10);
}

impl FromStr for Priority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "low" => Ok(Self::LOW),
            "normal" => Ok(Self::NORMAL),
            "high" => Ok(Self::HIGH),
            number => number
                .parse()
                .map(Self)
                .map_err(|_| format!("`{number}` is not `low`, `normal`, `high` or a number from -128 to 127")),
        }
    }
}

/// An id that is later in order than every one made before it, also within the same millisecond.
fn new_id(now: Timestamp) -> Uuid {
    static ORDER: Mutex<ContextV7> = Mutex::new(ContextV7::new());
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let nanos = u32::try_from(now.subsec_nanosecond()).unwrap_or_default();
    Uuid::new_v7(uuid::Timestamp::from_unix(&ORDER, seconds, nanos))
}

macro_rules! ids {
    ($($(#[doc = $doc:literal])+ $name:ident;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// A new id, later in order than every one made before it.
            pub(crate) fn next() -> Self {
                Self::next_at(Timestamp::now())
            }

            /// The same for who knows the time already.
            pub(crate) fn next_at(now: Timestamp) -> Self {
                Self(new_id(now))
            }

            /// When it was made, to the millisecond.
            pub fn made_at(self) -> Timestamp {
                let (seconds, nanos) = self.0.get_timestamp().map(|time| time.to_unix()).unwrap_or_default();
                let seconds = i64::try_from(seconds).unwrap_or_default();
                Timestamp::new(seconds, i32::try_from(nanos).unwrap_or_default()).unwrap_or_default()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0.hyphenated())
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    )+};
}

ids! {
    /// The engine's id of one call going through it; callers cannot choose it, so they cannot collide with others.
    ExecutionId;
    /// The engine's id of calls submitted together.
    BatchId;
    /// The engine's id of one question to a person.
    ConfirmationId;
}

/// What the caller gets, always; its JSON form is part of the stable surface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// The engine's id of this execution.
    pub execution_id: ExecutionId,
    /// The caller's own id, handed back untouched.
    pub call_id: Option<String>,
    /// The tool's full name, or what was asked for where there is no such tool.
    pub tool: Arc<str>,
    /// Where the tool came from; empty where there is no such tool.
    pub provider: Arc<str>,
    /// How it ended.
    pub status: Status,
    /// What the tool answered, in blocks; output so far where the run was cut short.
    pub content: Vec<Content>,
    /// The same for programs, where the tool gives it.
    pub structured: Option<Value>,
    /// Why there is no trustworthy answer.
    pub error: Option<Box<CallError>>,
    /// How many runs it took; 0 where nothing ran.
    pub attempts: u32,
    /// Whether the answer was made for an earlier call.
    pub cached: bool,
    /// Whether the content is only part of what the tool would have said.
    pub partial: bool,
    /// Where the whole output is kept, if it was too large for here.
    pub artifact: Option<ArtifactId>,
    /// When and how long.
    pub timing: Timing,
    /// What the run used, where it was measured.
    pub usage: Option<Box<Usage>>,
    /// The custody it ran in, if a process was started.
    pub sandbox: Option<SandboxRef>,
    /// Notes of a foreign server on its answer, if it sent any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed_on: Option<Box<PassedOn>>,
    /// The words the caller attached.
    pub labels: Vec<String>,
    /// The arguments that were checked and ran; not part of the JSON, which goes to those who sent them.
    #[serde(skip)]
    pub arguments: Arc<Value>,
}

impl ToolResult {
    /// The result of a call that failed and gave nothing.
    pub fn failed(execution_id: ExecutionId, tool: Arc<str>, started_at: Timestamp, error: CallError) -> Self {
        let completed_at = Timestamp::now();
        let took = completed_at.duration_since(started_at).as_secs_f64() * 1000.0;
        Self {
            execution_id,
            call_id: None,
            tool,
            provider: Arc::default(),
            status: error.status(),
            content: Vec::new(),
            structured: None,
            error: Some(Box::new(error)),
            attempts: 0,
            cached: false,
            partial: false,
            artifact: None,
            timing: Timing { queued_ms: 0.0, duration_ms: took.max(0.0), started_at, completed_at },
            usage: None,
            sandbox: None,
            passed_on: None,
            labels: Vec::new(),
            arguments: Arc::default(),
        }
    }

    /// Whether the tool ran and did what it was asked.
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }

    /// All text blocks, one after the other.
    pub fn text(&self) -> String {
        Content::text_of(&self.content)
    }
}

/// How a call stands or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Accepted, not running yet.
    Pending,
    /// An attempt runs, or the next one is waited for.
    Running,
    /// A person is being asked.
    InputRequired,
    /// The tool did what it was asked.
    Success,
    /// The tool could not.
    Failed,
    /// A clock ran out.
    Timeout,
    /// Somebody cancelled it.
    Cancelled,
    /// It was refused.
    PermissionDenied,
    /// The call made no sense.
    ValidationError,
    /// A person must agree and nobody could be asked.
    RequiresConfirmation,
}

impl Status {
    /// Every status, in the order of a call's life.
    pub const ALL: [Self; 10] = [
        Self::Pending,
        Self::Running,
        Self::InputRequired,
        Self::Success,
        Self::Failed,
        Self::Timeout,
        Self::Cancelled,
        Self::PermissionDenied,
        Self::ValidationError,
        Self::RequiresConfirmation,
    ];

    /// Whether nothing more will happen.
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Pending | Self::Running | Self::InputRequired)
    }

    /// The status as written in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::InputRequired => "input_required",
            Self::Success => "success",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::PermissionDenied => "permission_denied",
            Self::ValidationError => "validation_error",
            Self::RequiresConfirmation => "requires_confirmation",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One block of what a tool answered; the kinds are MCP's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Content {
    /// Plain text.
    Text {
        /// The text.
        text: String,
    },
    /// A picture.
    Image {
        /// The picture's bytes in base64.
        data: String,
        /// Such as `image/png`.
        #[serde(rename = "mimeType")]
        mime_type: String,
    },
    /// A sound.
    Audio {
        /// The sound's bytes in base64.
        data: String,
        /// Such as `audio/wav`.
        #[serde(rename = "mimeType")]
        mime_type: String,
    },
    /// A resource with its content, as MCP embeds it.
    Resource {
        /// The resource object.
        resource: Value,
    },
    /// The address of something that can be read.
    ResourceLink {
        /// Its address.
        uri: String,
        /// Its name.
        name: String,
        /// What else is told of it: its title, type, size.
        #[serde(flatten)]
        more: Map<String, Value>,
    },
}

impl Content {
    /// A block of text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into() }
    }

    /// All text blocks, one after the other.
    pub fn text_of(blocks: &[Content]) -> String {
        blocks
            .iter()
            .filter_map(|block| if let Self::Text { text } = block { Some(text.as_str()) } else { None })
            .collect()
    }

    /// How many bytes of content the block holds.
    pub fn bytes(&self) -> u64 {
        let length = match self {
            Self::Text { text } => text.len(),
            Self::Image { data, .. } | Self::Audio { data, .. } => data.len(),
            Self::Resource { resource } => json_bytes(resource),
            Self::ResourceLink { uri, name, more } => uri.len() + name.len() + json_bytes(more),
        };
        length as u64
    }
}

/// How long a value is as JSON.
fn json_bytes(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(0, |json| json.len())
}

/// When a call ran and how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// How long it waited for slots, in milliseconds.
    pub queued_ms: f64,
    /// From acceptance to the end, in milliseconds.
    pub duration_ms: f64,
    /// When it was accepted.
    pub started_at: Timestamp,
    /// When it ended.
    pub completed_at: Timestamp,
}

/// The custody a call ran in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRef {
    /// Which sandbox.
    pub id: SandboxId,
    /// The isolation that was really obtained.
    pub level: Level,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_in_the_order_of_their_making() {
        let ids: Vec<ExecutionId> = (0..1000).map(|_| ExecutionId::next()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b));
        assert_eq!(ids[0].to_string().parse::<ExecutionId>(), Ok(ids[0]));
    }

    #[test]
    fn an_id_knows_when_it_was_made() {
        let milliseconds = |time: Timestamp| time.as_millisecond();
        let before = Timestamp::now();
        let made_at = ExecutionId::next().made_at();
        assert!((milliseconds(before)..=milliseconds(Timestamp::now())).contains(&milliseconds(made_at)));
    }

    #[test]
    fn priorities_are_words_or_numbers() {
        assert_eq!("high".parse(), Ok(Priority::HIGH));
        assert_eq!("-3".parse(), Ok(Priority(-3)));
        assert_eq!(
            "999".parse::<Priority>(),
            Err("`999` is not `low`, `normal`, `high` or a number from -128 to 127".into())
        );
    }

    #[test]
    fn an_agent_holds_nothing_and_the_local_user_everything() {
        assert!(Caller::local().permissions.holds("files.write"));
        assert!(!Caller::agent("did:agent:a").permissions.holds("files.write"));
        assert!(Held::only(["x"]).holds("x"));
    }
}

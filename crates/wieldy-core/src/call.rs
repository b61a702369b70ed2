//! Defines a call ([`Call`], [`Caller`], [`Options`]) and its result ([`ToolResult`]).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::arguments::CheckedArguments;
use crate::artifact::ArtifactId;
use crate::attempt::{Backoff, RetryIf};
use crate::confinement::{Network, ResourceLimits, SessionKey};
use crate::confirm::Confirmer;
use crate::error::CallError;
pub use crate::ids::{BatchId, ConfirmationId, ExecutionId};
use crate::limits::UsedSandbox;
use crate::note::DueNote;
use crate::outcome::PassedOn;
use crate::sandbox::{Level, SandboxId, Usage};

/// A tool's name with JSON arguments, as the model produced it.
#[derive(Debug, Clone)]
pub struct Call {
    /// The tool's name as written by the model, not checked yet.
    pub tool: Arc<str>,
    /// The arguments; `null` counts as no arguments.
    pub arguments: Arc<Value>,
    /// The caller's own id for this call, returned unchanged.
    pub call_id: Option<String>,
    /// The caller of the tool.
    pub caller: Arc<Caller>,
    /// The options of the call.
    pub options: Options,
    /// The context: an object of at most [`BESIDE_BYTES_MAX`](crate::BESIDE_BYTES_MAX) bytes that the tool may read by
    /// [`Run::context`](crate::Run::context). It is a claim of the client, so no right depends on it. A context that is
    /// not empty is part of what a person agrees to and of the keys of stored answers. It is written down nowhere, so
    /// the call is not run again after a crash.
    pub context: Option<Arc<Value>>,
    /// The metadata: an object of at most [`BESIDE_BYTES_MAX`](crate::BESIDE_BYTES_MAX) bytes that the history stores
    /// without its secrets. No tool sees it.
    pub metadata: Option<Arc<Value>>,
    /// The client's own notes on its request, such as ids of a trace: an object for tools that [take
    /// notes](crate::AnyTool::takes_notes). Other tools do not see it.
    pub notes: Option<Arc<Value>>,
}

impl Call {
    /// Creates a call by the local user with default options.
    pub fn new(tool: impl Into<Arc<str>>, arguments: Value) -> Self {
        Self {
            tool: tool.into(),
            arguments: Arc::new(arguments),
            call_id: None,
            caller: Arc::new(Caller::local()),
            options: Options::default(),
            context: None,
            metadata: None,
            notes: None,
        }
    }

    /// Sets the caller.
    #[must_use]
    pub fn by(mut self, caller: impl Into<Arc<Caller>>) -> Self {
        self.caller = caller.into();
        self
    }

    /// Sets the caller's own id of the call.
    #[must_use]
    pub fn id(mut self, call_id: impl Into<String>) -> Self {
        self.call_id = Some(call_id.into());
        self
    }

    /// Sets the options.
    #[must_use]
    pub fn with(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Sets the context.
    #[must_use]
    pub fn context(mut self, context: Value) -> Self {
        self.context = Some(Arc::new(context));
        self
    }

    /// Sets the metadata.
    #[must_use]
    pub fn metadata(mut self, metadata: Value) -> Self {
        self.metadata = Some(Arc::new(metadata));
        self
    }
}

/// The identity and the rights of a call's origin. The door establishes these facts; the model cannot claim them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The agent's decentralized identifier, or another name that is unique to it.
    pub agent: String,
    /// The tenant that the agent belongs to.
    pub tenant: Option<String>,
    /// The conversation or run that this call is part of.
    pub session: Option<String>,
    /// The person behind the agent.
    pub user: Option<String>,
    /// The scopes that decide which tools the caller can see: tools without a scope, and tools with one of these.
    pub scopes: Held,
    /// The permissions of the caller. A tool names the permissions that it requires.
    pub permissions: Held,
    /// The caller's plan, if plans are used; `None` means no limits by plan.
    pub plan: Option<String>,
    /// The sandbox that the agent itself runs in. The tool's sandbox is nested in it.
    pub parent_sandbox: Option<SandboxId>,
    /// The part of every call's context that the operator sets: its keys win over those that a client claims. It is
    /// written down nowhere.
    #[serde(skip)]
    pub context: Option<Arc<Value>>,
}

impl Caller {
    /// Returns the person at this machine, who sees every tool and holds every permission.
    pub fn local() -> Self {
        Self { scopes: Held::All, permissions: Held::All, ..Self::agent("local") }
    }

    /// Returns an agent that sees only tools without a scope and holds no permission yet.
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
            context: None,
        }
    }

    /// Returns a hash of the tenant, if there is one. Stored data uses it to separate tenants without naming them.
    pub fn tenant_hash(&self) -> Option<String> {
        self.tenant_hashed().map(|hash| hash.to_hex().to_string())
    }

    pub(crate) fn tenant_hashed(&self) -> Option<blake3::Hash> {
        self.tenant.as_ref().map(|tenant| blake3::hash(tenant.as_bytes()))
    }

    /// Returns the session's key, unique across tenants and agents, or `None` without a session.
    pub fn session_key(&self) -> Option<SessionKey> {
        let session = self.session.clone()?;
        Some(SessionKey { tenant: self.tenant.clone(), agent: self.agent.clone(), session })
    }
}

/// A set of names, or all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Held {
    /// Every name.
    All,
    /// Only these names.
    Only(BTreeSet<String>),
}

impl Held {
    /// Returns the empty set.
    pub fn none() -> Self {
        Self::Only(BTreeSet::new())
    }

    /// Returns a set of these names.
    pub fn only<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self::Only(names.into_iter().map(Into::into).collect())
    }

    /// Returns true if `name` is in the set.
    pub fn holds(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(names) => names.contains(name),
        }
    }
}

/// The options of one call. Every field has a good default.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The attempt clock: the longest duration of one run.
    pub timeout: Option<Duration>,
    /// The queue clock: the longest wait for a slot.
    pub queue_timeout: Option<Duration>,
    /// The total clock: the time after which the caller stops waiting, including all attempts and waits.
    pub deadline: Option<Duration>,
    /// The silence clock: the longest time that a run may produce no output and no progress.
    pub silence: Option<Duration>,
    /// The number of retries of a failed run; by default that of the tool's policy.
    pub retries: Option<u32>,
    /// The delay before the first retry; by default that of the tool's policy.
    pub retry_delay: Option<Duration>,
    /// The growth of the delays; by default that of the tool's policy.
    pub backoff: Option<Backoff>,
    /// The predicate for errors that are worth a retry, asked only about those that are safe to retry.
    pub retry_if: Option<RetryIf>,
    /// The priority among waiting calls.
    pub priority: Priority,
    /// True to ask for a confirmation even if neither tool nor policy requires one.
    pub require_confirmation: bool,
    /// The confirmer to ask instead of the executor's own.
    pub confirmer: Option<Arc<dyn Confirmer>>,
    /// The idempotency key. A repeated key returns the first result instead of running again.
    pub idempotency_key: Option<String>,
    /// True to run even if there is a cached result.
    pub fresh: bool,
    /// True to refuse the call if its tool may change something.
    pub read_only: bool,
    /// The resource limits that the call asks for. A call that asks for more than its maximum is refused with
    /// [`Code::ResourceLimitExceeded`](crate::Code::ResourceLimitExceeded).
    pub limits: ResourceLimits,
    /// An isolation stronger than the executor's default.
    pub isolation: Option<Level>,
    /// A network smaller than the executor's.
    pub network: Option<Network>,
    /// True if the next executor on the same history should run the call again after this executor stopped during it.
    /// It does so only if the tool may run twice and no argument was redacted. A call with an idempotency key is not
    /// run again: its caller retries it with the key. Nor is a call with options other than priority and labels:
    /// options are not stored, and a rerun must not have weaker terms.
    pub rerun: bool,
    /// Free text labels that are returned in the result.
    pub labels: Vec<String>,
}

/// The priority of a waiting call: higher first, and each call rises with time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Priority(pub i8);

impl Priority {
    /// The priority of background work.
    pub const LOW: Self = Self(-10);
    /// The default priority.
    pub const NORMAL: Self = Self(0);
    /// The priority of a call whose user is watching.
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

/// The result of a call. Every call gets one; its JSON form is part of the stable surface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolResult {
    /// The executor's id of the call.
    pub execution_id: ExecutionId,
    /// The caller's own id, returned unchanged.
    pub call_id: Option<String>,
    /// The tool's full name, or the requested name if there is no such tool.
    pub tool: Arc<str>,
    /// The arguments as checked, or as given if the call ended before that. Their JSON is redacted and at most 16 KiB.
    #[serde(default)]
    pub arguments: CheckedArguments,
    /// The provider of the tool; empty if there is no such tool.
    pub provider: Arc<str>,
    /// The final status.
    pub status: Status,
    /// The tool's answer in blocks, or the output so far if the run was cut short.
    pub content: Vec<Content>,
    /// The answer for programs, if the tool gives one.
    pub structured: Option<Value>,
    /// The reason why there is no trustworthy answer.
    pub error: Option<Box<CallError>>,
    /// The number of runs; 0 if the tool never ran.
    pub attempts: u32,
    /// True if the answer was made for an earlier call.
    pub cached: bool,
    /// True if the content is only part of the answer.
    pub partial: bool,
    /// The artifact with the whole output, if it was too large for the result.
    pub artifact: Option<ArtifactId>,
    /// The times and durations of the call.
    pub timing: Timing,
    /// The resources that the run used, if measured.
    pub usage: Option<Box<Usage>>,
    /// The sandbox that the call ran in, if a process was started.
    pub sandbox: Option<UsedSandbox>,
    /// Notes that a foreign server sent with its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed_on: Option<Box<PassedOn>>,
    /// The labels of the call.
    pub labels: Vec<String>,
    /// Of a call of a batch: true if another call of the batch ran at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<bool>,
    /// The calls of the same batch that this one had to wait for, because of the order or a conflict: their ids, or
    /// `#3` for the third one if it has none. At most 100.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waited_for: Vec<String>,
    /// Notes that the caller left for itself and that are due now. A door that has handed over the result says so by
    /// [`Executor::confirm_notes`](crate::Executor::confirm_notes); without that they come again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<DueNote>,
    /// The number of further notes that are due and come with later results.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub notes_waiting: usize,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl ToolResult {
    /// Returns the result of a call that failed without an answer.
    pub fn failed(execution_id: ExecutionId, tool: Arc<str>, started_at: Timestamp, error: CallError) -> Self {
        let completed_at = Timestamp::now();
        let took = completed_at.duration_since(started_at).as_secs_f64() * 1000.0;
        Self {
            execution_id,
            call_id: None,
            tool,
            arguments: CheckedArguments::default(),
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
            parallel: None,
            waited_for: Vec::new(),
            notes: Vec::new(),
            notes_waiting: 0,
        }
    }

    /// Returns true if the call succeeded.
    pub fn is_success(&self) -> bool {
        self.status == Status::Success
    }

    /// Returns all text blocks, joined.
    pub fn text(&self) -> String {
        Content::text_of(&self.content)
    }
}

/// The current or final state of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Accepted, not running yet.
    Pending,
    /// An attempt runs, or the call waits for its next attempt.
    Running,
    /// A person is being asked.
    InputRequired,
    /// The tool did what it was asked.
    Success,
    /// The tool failed.
    Failed,
    /// A clock ran out.
    Timeout,
    /// The call was cancelled.
    Cancelled,
    /// The call was refused.
    PermissionDenied,
    /// The call was invalid.
    ValidationError,
    /// A person must agree, and there was no way to ask.
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

    /// Returns true if the status is final.
    pub fn is_terminal(self) -> bool {
        !matches!(self, Self::Pending | Self::Running | Self::InputRequired)
    }

    /// Returns the status as written in JSON.
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

/// One block of a tool's answer; the kinds are those of MCP.
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
        /// The type of the picture, such as `image/png`.
        #[serde(rename = "mimeType")]
        mime_type: String,
    },
    /// A sound.
    Audio {
        /// The sound's bytes in base64.
        data: String,
        /// The type of the sound, such as `audio/wav`.
        #[serde(rename = "mimeType")]
        mime_type: String,
    },
    /// A resource with its content, as MCP embeds it.
    Resource {
        /// The resource object.
        resource: Value,
    },
    /// A link to a resource that can be read.
    ResourceLink {
        /// The resource's address.
        uri: String,
        /// The resource's name.
        name: String,
        /// Further facts: title, type, size.
        #[serde(flatten)]
        more: Map<String, Value>,
    },
}

impl Content {
    /// Creates a block of text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text { text: text.into() }
    }

    /// Returns all text blocks, joined.
    pub fn text_of(blocks: &[Content]) -> String {
        blocks
            .iter()
            .filter_map(|block| if let Self::Text { text } = block { Some(text.as_str()) } else { None })
            .collect()
    }

    /// Returns the size of the block's content in bytes.
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

/// Returns the length of a value as JSON.
fn json_bytes(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(0, |json| json.len())
}

/// The times and durations of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// The time that the call waited for slots, in milliseconds.
    pub queued_ms: f64,
    /// The time from acceptance to the end, in milliseconds.
    pub duration_ms: f64,
    /// The time of acceptance.
    pub started_at: Timestamp,
    /// The time of the end.
    pub completed_at: Timestamp,
}

/// A reference to the sandbox that a call ran in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxRef {
    /// The sandbox's id.
    pub id: SandboxId,
    /// The isolation that was really obtained.
    pub level: Level,
}

#[cfg(test)]
mod tests {
    use super::*;

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

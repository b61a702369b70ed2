//! Events: what happened to a call, batch, sandbox, source or agent; and [`CallState`], where a call stands after them.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::artifact::ArtifactId;
use crate::batch::{BatchMode, BatchSummary};
use crate::call::{BatchId, Caller, ConfirmationId, ExecutionId, SandboxRef, Status, ToolResult};
use crate::error::CallError;
use crate::redact::{self, Redacted};
use crate::sandbox::{Stream, Usage};

/// Something that happened. Made only by the recorder, in the order of `seq`.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The place in the history, from 1 without gaps.
    pub seq: u64,
    /// When, by the wall clock.
    pub at: Timestamp,
    /// To what.
    pub subject: Arc<Subject>,
    /// What.
    pub body: Body,
}

/// What an event is about.
#[derive(Debug, Clone, PartialEq)]
pub struct Subject {
    /// The call it happened to, if it happened to one.
    pub execution: Option<ExecutionId>,
    /// The batch it happened in.
    pub batch: Option<BatchId>,
    /// The caller's own id of the call.
    pub call_id: Option<String>,
    /// The tool's own name; where there is no such tool, the name that was asked for.
    pub tool: Option<Arc<str>>,
    /// On whose behalf.
    pub caller: Arc<Caller>,
    /// The arguments of the call: secrets among them are hidden in everything that is recorded of the call.
    pub arguments: Redacted,
}

impl Subject {
    /// Something of a caller that is no call.
    pub fn of(caller: Arc<Caller>) -> Self {
        Self { execution: None, batch: None, call_id: None, tool: None, caller, arguments: Redacted::default() }
    }
}

/// What happened, with the facts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Body {
    /// A call was accepted.
    CallPending {
        /// What it was called with; secrets are taken out.
        arguments: Redacted,
        /// The name that was asked for, where it is not the tool's own: an alias, or a short name.
        #[serde(skip_serializing_if = "Option::is_none")]
        called_as: Option<Arc<str>>,
        /// The folder that it works in, where that has an absolute path.
        #[serde(skip_serializing_if = "Option::is_none")]
        workspace: Option<Arc<str>>,
        /// Whether it is polled instead of waited for.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        task: bool,
        /// Whoever called, with everything that is held, where the call is to be run again should the executor stop.
        #[serde(skip_serializing_if = "Option::is_none")]
        rerun: Option<Arc<Caller>>,
    },
    /// The call takes longer than its caller waits: from now on it is a task, polled instead of waited for.
    CallTask {},
    /// An attempt starts.
    CallStarted {
        /// Which, from 1.
        attempt: u32,
        /// How many there may be.
        attempts_max: u32,
        /// How long it may take.
        timeout_ms: u64,
        /// Whether it can change nothing.
        read_only: bool,
        /// Whether it may change something, but does the same when it is run twice.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        idempotent: bool,
        /// The idempotency key that it runs under.
        #[serde(skip_serializing_if = "Option::is_none")]
        keyed: Option<Arc<Keyed>>,
    },
    /// A run shows how far it is, or what it printed.
    CallProgress {
        /// From 0 to 100, where the tool knows.
        #[serde(skip_serializing_if = "Option::is_none")]
        percent: Option<f64>,
        /// What it is doing.
        #[serde(skip_serializing_if = "Option::is_none")]
        message: Option<String>,
        /// Where the message was printed, if it is output.
        #[serde(skip_serializing_if = "Option::is_none")]
        stream: Option<Stream>,
        /// Since the call was accepted.
        elapsed_ms: f64,
    },
    /// Something is not as it should be, and the call goes on.
    CallWarning {
        /// What.
        message: String,
    },
    /// A person is asked.
    ConfirmationRequested {
        /// Which question.
        confirmation: ConfirmationId,
        /// What exactly is asked about.
        digest: String,
        /// Why.
        reason: String,
        /// For how long the question stands.
        expires_in_ms: u64,
    },
    /// The person answered, or the time to do so is over.
    ConfirmationReceived {
        /// Which question.
        confirmation: ConfirmationId,
        /// What the answer was.
        approved: bool,
        /// Who answered.
        by: Option<String>,
    },
    /// The call ended well.
    CallSuccess(Closing),
    /// The call ended with an error, a refusal included.
    CallFailure(Closing),
    /// A clock ended the call.
    CallTimeout(Closing),
    /// Somebody ended the call.
    CallCancelled(Closing),
    /// An attempt failed and another one will follow.
    RetryAttempt {
        /// Which attempt will follow.
        attempt: u32,
        /// How many there may be.
        attempts_max: u32,
        /// After how long.
        delay_ms: u64,
        /// Why the one before failed.
        error: Box<CallError>,
    },
    /// An attempt after the first one went well.
    RetrySuccess {
        /// How many it took.
        attempts: u32,
    },
    /// No further attempt follows.
    RetryExhausted {
        /// How many there were.
        attempts: u32,
        /// Why the last one failed.
        error: Box<CallError>,
    },
    /// A batch starts.
    BatchStarted {
        /// How many calls.
        count: usize,
        /// In which order.
        mode: BatchMode,
        /// How many at once.
        max_concurrency: usize,
        /// How many of them change nothing.
        read_only: usize,
        /// How many of them may change something.
        mutating: usize,
    },
    /// A batch ended.
    BatchCompleted(BatchSummary),
    /// A tool promises something else than before.
    DefinitionChanged {
        /// The hash of what it promised.
        previous_hash: String,
        /// The hash of what it promises now.
        current_hash: String,
    },
    /// A sandbox was made.
    SandboxCreated {
        /// Which.
        sandbox: String,
        /// How strong.
        level: String,
    },
    /// A sandbox is gone.
    SandboxDestroyed {
        /// Which.
        sandbox: String,
    },
    /// A process tried what it may not.
    SandboxViolation {
        /// Where.
        sandbox: String,
        /// What.
        message: String,
    },
    /// A file changed since the session last read it.
    SourceStale {
        /// Which.
        path: String,
        /// What the session saw.
        previous_hash: String,
        /// What is there now; none where the file is gone.
        current_hash: Option<String>,
        /// The same for people.
        message: String,
    },
    /// An agent leaves itself a note.
    SelfNotify(Note),
    /// An agent reminds itself.
    SelfRemind(Note),
}

/// The idempotency key of a call, in a form that gives nothing away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keyed {
    /// Which key, by whom, for which tool: a hash.
    pub key: String,
    /// What exactly was called: a hash.
    pub fingerprint: String,
    /// Until when the key is remembered.
    pub expires_at: Timestamp,
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Closing {
    /// The terminal status.
    pub status: Status,
    /// From acceptance to the end.
    pub duration_ms: f64,
    /// How long it waited for slots.
    pub queued_ms: f64,
    /// How many runs there were.
    pub attempts: u32,
    /// Whether the answer was made for an earlier call.
    pub cached: bool,
    /// How many bytes of content were returned.
    pub output_bytes: u64,
    /// Where the whole output is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact: Option<ArtifactId>,
    /// What it used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Box<Usage>>,
    /// The custody it ran in, if a process was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxRef>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Box<CallError>>,
    /// The whole result, where somebody may ask for it later: that of a task, or of a call with an idempotency key. No
    /// part of the event as others see it.
    #[serde(skip)]
    pub answer: Option<Arc<ToolResult>>,
}

/// What an agent tells itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Note {
    /// The note.
    pub message: String,
    /// How urgent.
    pub priority: String,
    /// What kind.
    pub category: String,
    /// When it should be shown.
    pub deliver_at: Option<Timestamp>,
}

impl Body {
    /// The event's name; part of the stable surface.
    pub fn name(&self) -> &'static str {
        match self {
            Self::CallPending { .. } => "tool.call.pending",
            Self::CallTask {} => "tool.call.task",
            Self::CallStarted { .. } => "tool.call.started",
            Self::CallProgress { .. } => "tool.call.progress",
            Self::CallWarning { .. } => "tool.call.warning",
            Self::ConfirmationRequested { .. } => "tool.call.confirmation.requested",
            Self::ConfirmationReceived { .. } => "tool.call.confirmation.received",
            Self::CallSuccess(_) => "tool.call.success",
            Self::CallFailure(_) => "tool.call.failure",
            Self::CallTimeout(_) => "tool.call.timeout",
            Self::CallCancelled(_) => "tool.call.cancelled",
            Self::RetryAttempt { .. } => "tool.retry.attempt",
            Self::RetrySuccess { .. } => "tool.retry.success",
            Self::RetryExhausted { .. } => "tool.retry.exhausted",
            Self::BatchStarted { .. } => "tool.batch.started",
            Self::BatchCompleted(_) => "tool.batch.completed",
            Self::DefinitionChanged { .. } => "tool.definition.changed",
            Self::SandboxCreated { .. } => "sandbox.created",
            Self::SandboxDestroyed { .. } => "sandbox.destroyed",
            Self::SandboxViolation { .. } => "sandbox.violation",
            Self::SourceStale { .. } => "source.stale",
            Self::SelfNotify(_) => "agent.self.notify",
            Self::SelfRemind(_) => "agent.self.remind",
        }
    }

    /// The names of all events there are.
    pub const NAMES: [&str; 23] = [
        "tool.call.pending",
        "tool.call.task",
        "tool.call.started",
        "tool.call.progress",
        "tool.call.warning",
        "tool.call.confirmation.requested",
        "tool.call.confirmation.received",
        "tool.call.success",
        "tool.call.failure",
        "tool.call.timeout",
        "tool.call.cancelled",
        "tool.retry.attempt",
        "tool.retry.success",
        "tool.retry.exhausted",
        "tool.batch.started",
        "tool.batch.completed",
        "tool.definition.changed",
        "sandbox.created",
        "sandbox.destroyed",
        "sandbox.violation",
        "source.stale",
        "agent.self.notify",
        "agent.self.remind",
    ];

    /// How the call ended, if this is a terminal event.
    pub fn closing(&self) -> Option<&Closing> {
        match self {
            Self::CallSuccess(closing)
            | Self::CallFailure(closing)
            | Self::CallTimeout(closing)
            | Self::CallCancelled(closing) => Some(closing),
            _ => None,
        }
    }

    /// The terminal event that fits a closing.
    pub(crate) fn closed(closing: Closing) -> Self {
        match closing.status {
            Status::Success => Self::CallSuccess(closing),
            Status::Timeout => Self::CallTimeout(closing),
            Status::Cancelled => Self::CallCancelled(closing),
            _ => Self::CallFailure(closing),
        }
    }

    /// Whether it holds no text that could hold a secret: none at all, or one that looks after itself.
    pub(crate) fn is_clean(&self) -> bool {
        match self {
            Self::CallPending { rerun, .. } => rerun.is_none(),
            Self::CallTask {} | Self::CallStarted { .. } | Self::RetrySuccess { .. } | Self::BatchStarted { .. } => {
                true
            }
            Self::CallSuccess(closing) => closing.error.is_none(),
            _ => false,
        }
    }

    /// Whether observers on a plan with basic events get it too.
    pub(crate) fn is_basic(&self) -> bool {
        !matches!(self, Self::CallProgress { .. } | Self::CallWarning { .. } | Self::RetryAttempt { .. })
    }
}

impl Event {
    /// The event in a CloudEvents 1.0 envelope, as every wire carries it. Secrets are taken out.
    pub fn cloud_event(&self) -> Value {
        let subject = &self.subject;
        let mut data = self.data();
        if let (Value::Object(data), Some(tool)) = (&mut data, &subject.tool) {
            data.insert("tool".into(), json!(redact::text(tool)));
        }
        let mut envelope = json!({
            "specversion": "1.0",
            "id": self.seq.to_string(),
            "source": "/wieldy",
            "type": self.body.name(),
            "time": self.at.to_string(),
            "datacontenttype": "application/json",
            "agent": redact::text(&subject.caller.agent),
            "data": data,
        });
        let optional = [
            ("subject", subject.execution.map(|id| id.to_string()).or(subject.batch.map(|id| id.to_string()))),
            ("batch", subject.batch.map(|id| id.to_string())),
            ("callid", subject.call_id.clone()),
            ("session", subject.caller.session.clone()),
            ("tenant", subject.caller.tenant.clone()),
        ];
        for (key, value) in optional {
            if let Some(value) = value {
                envelope[key] = json!(redact::text(&value));
            }
        }
        envelope
    }
}

/// Where a call stands: a pure fold over its events, the same for store, console and recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CallState {
    /// Nothing is known of it.
    #[default]
    Unknown,
    /// Accepted; being checked or waiting for a slot.
    Open,
    /// A person is being asked.
    Asking,
    /// An attempt runs.
    Running {
        /// Which.
        attempt: u32,
    },
    /// Waiting for the next attempt.
    Waiting {
        /// Which.
        next_attempt: u32,
    },
    /// Over.
    Closed {
        /// How.
        status: Status,
    },
}

/// An event that cannot follow what happened before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{event}` cannot happen to a call that is {state:?}")]
pub struct OutOfOrder {
    /// Where the call stood.
    pub state: CallState,
    /// What is said to have happened.
    pub event: &'static str,
}

impl CallState {
    /// Where the call stands after `event`, or why `event` cannot follow. Events of other things change nothing.
    pub fn apply(self, event: &Body) -> Result<Self, OutOfOrder> {
        use CallState::{Asking, Closed, Open, Running, Unknown, Waiting};
        match (self, event) {
            (Unknown, Body::CallPending { .. }) => Ok(Open),
            (Open, Body::ConfirmationRequested { .. }) => Ok(Asking),
            (Asking, Body::ConfirmationReceived { .. }) => Ok(Open),
            (Open, Body::CallStarted { attempt: 1, .. }) => Ok(Running { attempt: 1 }),
            (Running { attempt }, Body::RetryAttempt { attempt: next, .. }) if *next == attempt + 1 => {
                Ok(Waiting { next_attempt: *next })
            }
            (Waiting { next_attempt }, Body::CallStarted { attempt, .. }) if *attempt == next_attempt => {
                Ok(Running { attempt: *attempt })
            }
            (Running { attempt }, Body::RetrySuccess { attempts }) if *attempts == attempt && attempt > 1 => Ok(self),
            (Running { .. } | Waiting { .. }, Body::RetryExhausted { .. }) => Ok(self),
            (Running { .. }, Body::CallProgress { .. }) => Ok(self),
            (Open | Asking | Running { .. } | Waiting { .. }, Body::CallWarning { .. } | Body::CallTask {}) => Ok(self),
            // A recalled answer ends a call that never ran.
            (Open | Running { .. }, Body::CallSuccess(closing)) => Ok(Closed { status: closing.status }),
            (
                Open | Asking | Running { .. } | Waiting { .. },
                Body::CallFailure(closing) | Body::CallTimeout(closing) | Body::CallCancelled(closing),
            ) => Ok(Closed { status: closing.status }),
            (
                state,
                Body::DefinitionChanged { .. }
                | Body::SandboxCreated { .. }
                | Body::SandboxDestroyed { .. }
                | Body::SandboxViolation { .. }
                | Body::SourceStale { .. }
                | Body::SelfNotify(_)
                | Body::SelfRemind(_),
            ) => Ok(state),
            (state, event) => Err(OutOfOrder { state, event: event.name() }),
        }
    }

    /// The status a caller is shown.
    pub fn status(self) -> Status {
        match self {
            Self::Unknown | Self::Open => Status::Pending,
            Self::Asking => Status::InputRequired,
            Self::Running { .. } | Self::Waiting { .. } => Status::Running,
            Self::Closed { status } => status,
        }
    }
}

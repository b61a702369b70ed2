//! Events: what happened to a call, batch, sandbox, source or agent; [`CallState`]: the state of a call after them.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::artifact::ArtifactId;
use crate::batch::BatchSummary;
use crate::call::{BatchId, Caller, ConfirmationId, ExecutionId, SandboxRef, Status, ToolResult};
use crate::concurrency::{BatchMode, ConcurrencyLimit};
use crate::error::CallError;
use crate::note::{Delivery, Note, NoteState};
use crate::recorded::RecordedResult;
use crate::redact::{self, Redacted};
use crate::sandbox::{Stream, Usage};
use crate::severity::{Severity, complete_event_data};

/// A record of something that happened. Only the recorder makes events, in the order of `seq`.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The position in the history, from 1 without gaps.
    pub seq: u64,
    /// The wall-clock time of the event.
    pub at: Timestamp,
    /// The call, batch or caller that the event is about.
    pub subject: Arc<Subject>,
    /// The kind of event, with its facts.
    pub body: Body,
}

/// The call, batch or caller that an event is about.
#[derive(Debug, Clone, PartialEq)]
pub struct Subject {
    /// The call, if the event is about one.
    pub execution: Option<ExecutionId>,
    /// The batch, if the event is about one or happened in one.
    pub batch: Option<BatchId>,
    /// The caller's own id of the call.
    pub call_id: Option<String>,
    /// The tool's own name, or the requested name if there is no such tool.
    pub tool: Option<Arc<str>>,
    /// The provider of the tool, if there is such a tool.
    pub provider: Option<Arc<str>>,
    /// The time at which the call or batch was accepted.
    pub opened_at: Option<Timestamp>,
    /// The caller.
    pub caller: Arc<Caller>,
    /// The arguments of the call. Their secrets are redacted from all events of the call.
    pub arguments: Redacted,
}

impl Subject {
    /// Returns a subject without a call.
    pub fn of(caller: Arc<Caller>) -> Self {
        let (execution, batch, call_id, tool, provider, opened_at) = (None, None, None, None, None, None);
        Self { execution, batch, call_id, tool, provider, opened_at, caller, arguments: Redacted::default() }
    }
}

/// The kind of an event, with its facts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Body {
    /// A call was accepted.
    CallPending {
        /// The arguments, with secrets redacted.
        arguments: Redacted,
        /// The requested name, if it is not the tool's own but an alias or a short name.
        #[serde(skip_serializing_if = "Option::is_none")]
        called_as: Option<Arc<str>>,
        /// The folder that the call works in, if its path is absolute.
        #[serde(skip_serializing_if = "Option::is_none")]
        workspace: Option<Arc<str>>,
        /// The metadata of the call, with secrets redacted.
        #[serde(skip_serializing_if = "Option::is_none")]
        metadata: Option<Redacted>,
        /// True if the caller polls the call instead of waiting for it.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        task: bool,
        /// The caller with all its scopes and permissions, if the call is to be run again after its executor stops.
        #[serde(skip_serializing_if = "Option::is_none")]
        rerun: Option<Arc<Caller>>,
    },
    /// The call takes longer than its caller waits, and becomes a task that is polled.
    CallTask {},
    /// An attempt starts.
    CallStarted {
        /// The number of the attempt, from 1.
        attempt: u32,
        /// Maximum number of attempts.
        attempts_max: u32,
        /// The longest duration of the attempt, in milliseconds.
        timeout_ms: u64,
        /// True if the call cannot change anything.
        read_only: bool,
        /// True if the call may change something, but has the same effect when it runs twice.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        idempotent: bool,
        /// The idempotency key of the call.
        #[serde(skip_serializing_if = "Option::is_none")]
        keyed: Option<Arc<Keyed>>,
    },
    /// A run reports progress or prints output.
    CallProgress {
        /// The progress from 0 to 100, if the tool knows it.
        #[serde(skip_serializing_if = "Option::is_none")]
        percent: Option<f64>,
        /// The current activity of the tool, or its output.
        #[serde(skip_serializing_if = "Option::is_none")]
        message: Option<String>,
        /// The stream of the message, if it is output.
        #[serde(skip_serializing_if = "Option::is_none")]
        stream: Option<Stream>,
        /// The time since the call was accepted, in milliseconds.
        elapsed_ms: f64,
    },
    /// Something is wrong, but the call goes on.
    CallWarning {
        /// The problem.
        message: String,
    },
    /// A person is asked to confirm the call.
    ConfirmationRequested {
        /// The id of the question.
        confirmation: ConfirmationId,
        /// The digest of what the person is asked to agree to.
        digest: String,
        /// The reason for asking.
        reason: String,
        /// The time until the question expires, in milliseconds.
        expires_in_ms: u64,
    },
    /// The person answered, or the question expired.
    ConfirmationReceived {
        /// The id of the question.
        confirmation: ConfirmationId,
        /// True if the person agreed.
        approved: bool,
        /// The person who answered.
        by: Option<String>,
    },
    /// The call succeeded.
    CallSuccess(Closing),
    /// The call ended with an error, or was refused.
    CallFailure(Closing),
    /// A clock ended the call.
    CallTimeout(Closing),
    /// The call was cancelled.
    CallCancelled(Closing),
    /// An attempt failed, and another one will follow.
    RetryAttempt {
        /// The number of the next attempt.
        attempt: u32,
        /// Maximum number of attempts.
        attempts_max: u32,
        /// The delay before the next attempt, in milliseconds.
        delay_ms: u64,
        /// The error of the failed attempt.
        error: Box<CallError>,
    },
    /// An attempt after the first one succeeded.
    RetrySuccess {
        /// The number of attempts.
        attempts: u32,
    },
    /// The last attempt failed, and no other follows.
    RetryExhausted {
        /// The number of attempts.
        attempts: u32,
        /// The error of the last attempt.
        error: Box<CallError>,
    },
    /// A batch starts.
    BatchStarted {
        /// The number of calls.
        count: usize,
        /// The ordering of the calls.
        mode: BatchMode,
        /// Maximum number of calls that run at once.
        max_concurrency: usize,
        /// The number that was asked for, if it was more.
        #[serde(skip_serializing_if = "Option::is_none")]
        asked: Option<usize>,
        /// The limit that holds fewer calls at once than were asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        held_by: Option<ConcurrencyLimit>,
        /// The number of calls that cannot change anything.
        read_only: usize,
        /// The number of calls that may change something.
        mutating: usize,
    },
    /// A batch ended.
    BatchCompleted(BatchSummary),
    /// The definition of a tool changed.
    DefinitionChanged {
        /// The hash of the earlier definition.
        previous_hash: String,
        /// The hash of the new definition.
        current_hash: String,
    },
    /// A sandbox was made.
    SandboxCreated {
        /// The id of the sandbox.
        sandbox: String,
        /// The isolation level.
        level: String,
    },
    /// A sandbox was destroyed.
    SandboxDestroyed {
        /// The id of the sandbox.
        sandbox: String,
    },
    /// A process tried something that it may not do.
    SandboxViolation {
        /// The id of the sandbox.
        sandbox: String,
        /// The attempted action.
        message: String,
    },
    /// A file changed since the session last read it.
    SourceStale {
        /// The path of the file.
        path: String,
        /// The project of the file: the argument `project_id` of the call, if it has one.
        #[serde(skip_serializing_if = "Option::is_none")]
        project_id: Option<String>,
        /// The hash that the session saw.
        previous_hash: String,
        /// The hash of the file now; none if the file is gone.
        current_hash: Option<String>,
        /// The same as text for people.
        message: String,
    },
    /// An agent leaves itself a note, or the note ends without a delivery.
    SelfNotify(Box<Note>),
    /// The same of a note of the category `reminder`; and the time of a note has come.
    SelfRemind(Box<Note>),
    /// A note was part of an answer that was handed over.
    SelfDelivered(Box<Delivery>),
}

/// The idempotency key of a call, hashed so that it reveals nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keyed {
    /// The hash of the key, its caller and the tool.
    pub key: String,
    /// The hash of the exact call.
    pub fingerprint: String,
    /// The time at which the key expires.
    pub expires_at: Timestamp,
}

/// The facts of a call's end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Closing {
    /// The terminal status.
    pub status: Status,
    /// The time from acceptance to the end, in milliseconds.
    pub duration_ms: f64,
    /// The time that the call waited for slots, in milliseconds.
    pub queued_ms: f64,
    /// The number of runs.
    pub attempts: u32,
    /// True if the answer was made for an earlier call.
    pub cached: bool,
    /// The number of bytes of content that were returned.
    pub output_bytes: u64,
    /// The artifact with the whole output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact: Option<ArtifactId>,
    /// The resources that the call used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Box<Usage>>,
    /// The sandbox that the call ran in, if a process was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxRef>,
    /// The error, if the call failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Box<CallError>>,
    /// The whole result, if a task or an idempotency key may request it later. It is not in the event's public form.
    #[serde(skip)]
    pub answer: Option<Arc<ToolResult>>,
    /// The part of the result that the history stores beside the event. It is not in the event's public form.
    #[serde(skip)]
    pub recorded: Option<Arc<RecordedResult>>,
}

impl Body {
    /// Returns the event's name, which is part of the stable surface.
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
            Self::SelfDelivered(_) => "agent.self.delivered",
        }
    }

    /// The names of all events.
    pub const NAMES: [&str; 24] = [
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
        "agent.self.delivered",
    ];

    /// Returns the facts of the call's end, if this is a terminal event.
    pub fn closing(&self) -> Option<&Closing> {
        match self {
            Self::CallSuccess(closing)
            | Self::CallFailure(closing)
            | Self::CallTimeout(closing)
            | Self::CallCancelled(closing) => Some(closing),
            _ => None,
        }
    }

    /// Returns the terminal event for a closing.
    pub(crate) fn closed(closing: Closing) -> Self {
        match closing.status {
            Status::Success => Self::CallSuccess(closing),
            Status::Timeout => Self::CallTimeout(closing),
            Status::Cancelled => Self::CallCancelled(closing),
            _ => Self::CallFailure(closing),
        }
    }

    /// Returns the event that puts a note in this state: reminders have an event of their own, and so has the time of a
    /// note when it comes.
    pub(crate) fn of_note(note: Box<Note>) -> Self {
        let is_reminder = note.category == "reminder" || note.state == NoteState::Due;
        if is_reminder { Self::SelfRemind(note) } else { Self::SelfNotify(note) }
    }

    /// Returns true if the event has no text that could hold a secret, or only text that redacts itself.
    pub(crate) fn is_clean(&self) -> bool {
        match self {
            Self::CallPending { rerun, .. } => rerun.is_none(),
            Self::CallSuccess(closing) => closing.error.is_none(),
            Self::CallTask {} | Self::CallStarted { .. } => true,
            _ => matches!(self, Self::RetrySuccess { .. } | Self::BatchStarted { .. }),
        }
    }

    /// Returns true if the event is also shown to observers whose plan has only basic events.
    pub(crate) fn is_basic(&self) -> bool {
        !matches!(self, Self::CallProgress { .. } | Self::CallWarning { .. } | Self::RetryAttempt { .. })
    }
}

impl Event {
    /// Returns the event in a CloudEvents 1.0 envelope, as sent by every protocol. Secrets are redacted.
    pub fn cloud_event(&self) -> Value {
        let subject = &self.subject;
        let mut data = self.data();
        let severity = Severity::of(self.body.name(), &data);
        complete_event_data(self.body.name(), &mut data, self.elapsed_ms());
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
            "severity": severity,
            "agent": redact::text(&subject.caller.agent),
            "data": data,
        });
        let optional = [
            ("subject", subject.execution.map(|id| id.to_string()).or(subject.batch.map(|id| id.to_string()))),
            ("batch", subject.batch.map(|id| id.to_string())),
            ("callid", subject.call_id.clone()),
            ("session", subject.caller.session.clone()),
            ("tenant", subject.caller.tenant.clone()),
            ("user", subject.caller.user.clone()),
            ("provider", subject.provider.as_deref().map(str::to_owned)),
        ];
        for (key, value) in optional {
            if let Some(value) = value {
                envelope[key] = json!(redact::text(&value));
            }
        }
        envelope
    }
}

/// The state of a call: a pure fold over its events, the same for store, console and recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CallState {
    /// No event yet.
    #[default]
    Unknown,
    /// Accepted; its checks run, or it waits for a slot.
    Open,
    /// A person is being asked.
    Asking,
    /// An attempt runs.
    Running {
        /// The number of the attempt.
        attempt: u32,
    },
    /// Waiting for its next attempt.
    Waiting {
        /// The number of the next attempt.
        next_attempt: u32,
    },
    /// Over.
    Closed {
        /// The final status.
        status: Status,
    },
}

/// An event that cannot follow what happened before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{event}` cannot happen to a call that is {state:?}")]
pub struct OutOfOrder {
    /// The state of the call.
    pub state: CallState,
    /// The name of the event.
    pub event: &'static str,
}

impl CallState {
    /// Returns the state after `event`, or an error if `event` cannot follow. Events that are not about calls change
    /// nothing.
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
            // A cached answer ends a call that never ran.
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
                | Body::SelfRemind(_)
                | Body::SelfDelivered(_),
            ) => Ok(state),
            (state, event) => Err(OutOfOrder { state, event: event.name() }),
        }
    }

    /// Returns the status that callers see.
    pub fn status(self) -> Status {
        match self {
            Self::Unknown | Self::Open => Status::Pending,
            Self::Asking => Status::InputRequired,
            Self::Running { .. } | Self::Waiting { .. } => Status::Running,
            Self::Closed { status } => status,
        }
    }
}

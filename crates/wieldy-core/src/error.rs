//! Errors of calls: each states why a call has no trustworthy answer.
//!
//! [`CallError`] is the one public error of the executor. A program decides by its [`Code`], a person reads the
//! message, a model follows the suggestion. The errors of single steps are defined beside the code that fails, and are
//! converted into a `CallError` at the end.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::call::Status;

/// The reason why a call ended without a trustworthy answer. Its JSON form is part of the stable surface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallError {
    /// The error code, for programs.
    pub code: Code,
    /// The code's name, for people who do not know the codes by heart.
    pub name: Name,
    /// The category, coarser than the code.
    pub category: Category,
    /// The message for people: a lowercase fragment.
    pub message: String,
    /// True if the same call may succeed later and is safe to retry.
    pub retryable: bool,
    /// Advice for the model or the person.
    pub suggestion: Option<String>,
    /// Facts for programs, such as the clock, the limit or the arguments concerned.
    pub details: Box<Map<String, Value>>,
    /// The place in the tool where the error happened, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}

impl CallError {
    /// Returns the error of a call that was open when its executor stopped.
    pub fn interrupted(repeatable: bool) -> Self {
        let mut error =
            Self::new(Code::OutcomeUnknown, "the executor stopped while the call was open, so its outcome is unknown");
        error.retryable = repeatable;
        error.suggest(if repeatable {
            "call it again: repeating it does no harm"
        } else {
            "check whether it took effect before you call it again"
        })
    }

    /// Returns the error of a call with an idempotency key whose caller went away while it ran.
    pub(crate) fn outcome_unknown() -> Self {
        let message = "the call with this idempotency key was abandoned while it ran, so its outcome is unknown";
        Self::new(Code::OutcomeUnknown, message)
            .suggest("check whether it took effect; to run it again, use another key")
    }

    /// Creates an error with the code's own name, category and default for `retryable`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            name: Name(code),
            category: code.category(),
            message: message.into(),
            retryable: code.retryable_by_default(),
            suggestion: None,
            details: Box::default(),
            trace: None,
        }
    }

    /// Sets the advice.
    #[must_use]
    pub fn suggest(mut self, suggestion: impl Into<String>) -> Self {
        self.suggestion = Some(suggestion.into());
        self
    }

    /// Adds one fact to the details.
    #[must_use]
    pub fn detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.details.insert(key.to_owned(), value.into());
        self
    }

    /// Sets `retryable`: true if a retry may help and is safe.
    #[must_use]
    pub fn retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }

    /// Sets the time to wait before a retry, which [`CallError::retry_after`] returns.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        self.detail("retry_after_ms", json!(duration_ms(wait).ceil() as u64))
    }

    /// Returns the time that the failing side asked to wait before a retry.
    pub fn retry_after(&self) -> Option<Duration> {
        self.details.get("retry_after_ms").and_then(Value::as_u64).map(Duration::from_millis)
    }

    /// Returns the terminal status of a call that ended with this error.
    pub fn status(&self) -> Status {
        self.code.status()
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.code, self.code.name(), self.message)
    }
}

impl std::error::Error for CallError {}

/// Converts a duration to milliseconds with a fraction, as printed in results and events.
pub(crate) fn duration_ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

macro_rules! codes {
    ($($(#[doc = $doc:literal])+ $variant:ident = $code:literal, $name:literal, $category:ident, $status:ident, $retryable:literal;)+) => {
        /// The error code, for programs. Spelling and meaning never change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Code { $($(#[doc = $doc])+ $variant,)+ }

        impl Code {
            /// Every code, in order.
            pub const ALL: &[Code] = &[$(Code::$variant,)+];

            /// Returns the code as written in results: `E3103`.
            pub const fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $code,)+ }
            }

            /// Returns the code's name: `TIMEOUT`.
            pub const fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)+ }
            }

            /// Returns the code's category.
            pub const fn category(self) -> Category {
                match self { $(Code::$variant => Category::$category,)+ }
            }

            /// Returns the terminal status of a call that ends with this code.
            pub const fn status(self) -> Status {
                match self { $(Code::$variant => Status::$status,)+ }
            }

            /// Returns the default for `retryable`.
            pub const fn retryable_by_default(self) -> bool {
                match self { $(Code::$variant => $retryable,)+ }
            }

            /// Returns the meaning of the code in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Code::$variant => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

codes! {
    /// No tool of that name is visible to the caller.
    ToolNotFound = "E3001", "TOOL_NOT_FOUND", ValidationError, ValidationError, false;
    /// The arguments do not fit the tool's schema.
    ValidationFailed = "E3002", "VALIDATION_FAILED", ValidationError, ValidationError, false;
    /// A permission is missing or a rule denies the call.
    PermissionDenied = "E3003", "PERMISSION_DENIED", PermissionError, PermissionDenied, false;
    /// The call needs a confirmation and there is no way to ask for one.
    ConfirmationRequired = "E3004", "CONFIRMATION_REQUIRED", PermissionError, RequiresConfirmation, false;
    /// The confirmation was refused, came too late or did not fit the call.
    ConfirmationDenied = "E3005", "CONFIRMATION_DENIED", PermissionError, PermissionDenied, false;
    /// The caller's plan does not allow this.
    PlanLimitExceeded = "E3006", "PLAN_LIMIT_EXCEEDED", PermissionError, PermissionDenied, false;
    /// Too many calls in too short a time.
    RateLimited = "E3007", "RATE_LIMITED", CapacityError, Failed, true;
    /// The tool failed so often that its calls are refused for a while.
    CircuitOpen = "E3008", "CIRCUIT_OPEN", CapacityError, Failed, true;
    /// No sandbox of the wanted level could be made.
    SandboxCreationFailed = "E3101", "SANDBOX_CREATION_FAILED", SandboxError, Failed, false;
    /// The tool used more resources than it was allowed.
    ResourceLimitExceeded = "E3102", "RESOURCE_LIMIT_EXCEEDED", ResourceError, Failed, false;
    /// One of the four clocks ran out.
    Timeout = "E3103", "TIMEOUT", TimeoutError, Timeout, false;
    /// The tool tried to reach an address that it may not reach.
    NetworkPolicyViolation = "E3104", "NETWORK_POLICY_VIOLATION", PermissionError, PermissionDenied, false;
    /// The tool tried to touch a path that it may not touch.
    FilesystemPolicyViolation = "E3105", "FILESYSTEM_POLICY_VIOLATION", PermissionError, PermissionDenied, false;
    /// No slot came free in time.
    ConcurrencyLimitExceeded = "E3106", "CONCURRENCY_LIMIT_EXCEEDED", CapacityError, Failed, true;
    /// The sandbox ended before the tool did.
    SandboxCrashed = "E3107", "SANDBOX_CRASHED", SandboxError, Failed, false;
    /// The tool's process ended with an exit code other than zero, or by a signal.
    NonzeroExit = "E3108", "NONZERO_EXIT", ToolError, Failed, false;
    /// The call was cancelled.
    Cancelled = "E3109", "CANCELLED", Cancelled, Cancelled, false;
    /// The executor or a worker stopped while the call ran, so its effect is unknown.
    OutcomeUnknown = "E3110", "OUTCOME_UNKNOWN", RuntimeError, Failed, false;
    /// The history could not be written, so nothing was run.
    JournalFailed = "E3111", "JOURNAL_FAILED", RuntimeError, Failed, true;
    /// The connection to the tool's server failed.
    TransportFailed = "E3201", "TRANSPORT_FAILED", NetworkError, Failed, true;
    /// The tool's server broke the protocol.
    UpstreamProtocolError = "E3202", "UPSTREAM_PROTOCOL_ERROR", ApiError, Failed, false;
    /// The tool ran and reported a failure.
    ToolReportedError = "E3203", "TOOL_REPORTED_ERROR", ToolError, Failed, false;
    /// The tool's answer does not fit its own output schema.
    OutputSchemaMismatch = "E3204", "OUTPUT_SCHEMA_MISMATCH", ToolError, Failed, false;
    /// Something the tool needs is not configured.
    Configuration = "E3301", "CONFIGURATION", ConfigurationError, Failed, false;
    /// The file or folder is not there.
    FileNotFound = "E3302", "FILE_NOT_FOUND", ResourceError, Failed, false;
    /// The tool's own check of its arguments failed.
    InvalidInput = "E3303", "INVALID_INPUT", UserInputError, Failed, false;
    /// A service that the tool asked answered with an error.
    UpstreamApi = "E3304", "UPSTREAM_API", ApiError, Failed, false;
    /// Any other error; panics in tools are caught here.
    ExecutionError = "E3900", "EXECUTION_ERROR", RuntimeError, Failed, false;
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Code::ALL
            .iter()
            .copied()
            .find(|code| code.as_str() == text)
            .ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not an error code")))
    }
}

/// A code that is written by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name(Code);

impl Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        let code = Code::ALL.iter().copied().find(|code| code.name() == text);
        code.map(Name).ok_or_else(|| serde::de::Error::custom(format!("`{text}` names no error code")))
    }
}

/// The category of an error, coarser than the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Category {
    ValidationError,
    PermissionError,
    CapacityError,
    SandboxError,
    ResourceError,
    TimeoutError,
    ToolError,
    Cancelled,
    RuntimeError,
    NetworkError,
    ApiError,
    ConfigurationError,
    UserInputError,
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shows: E3.2
    #[test]
    fn an_error_in_json_has_the_documented_keys_and_comes_back_whole() {
        let error =
            CallError::new(Code::RateLimited, "too many calls").suggest("wait").after(Duration::from_millis(1500));
        let text = serde_json::to_string(&error).expect("plain data");
        assert_eq!(
            text,
            r#"{"code":"E3007","name":"RATE_LIMITED","category":"capacity_error","message":"too many calls","retryable":true,"suggestion":"wait","details":{"retry_after_ms":1500}}"#
        );
        assert_eq!(serde_json::from_str::<CallError>(&text).expect("just written"), error);
        assert_eq!(error.retry_after(), Some(Duration::from_millis(1500)));
    }

    // Shows: E3.2
    #[test]
    fn codes_and_names_are_unique() {
        let mut codes: Vec<_> = Code::ALL.iter().flat_map(|code| [code.as_str(), code.name()]).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Code::ALL.len() * 2);
    }
}

//! The answer of a tool ([`Outcome`]), and the error of a run without an answer ([`RunError`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::artifact::ArtifactId;
use crate::call::Content;
use crate::error::{CallError, Code};
use crate::limits::UsedSandbox;
use crate::sandbox::Usage;

/// The answer of a tool, including "I failed".
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// The answer in blocks.
    pub content: Vec<Content>,
    /// The answer for programs.
    pub structured: Option<Value>,
    /// The failure, if the tool ran but could not do what it was asked.
    pub failure: Option<Box<CallError>>,
    /// True if the content is only part of the output.
    pub partial: bool,
    /// The artifact that holds the whole output.
    pub artifact: Option<ArtifactId>,
    /// The resources that the run used, if measured.
    pub usage: Option<Box<Usage>>,
    /// The sandbox that the call ran in, if a process was started.
    pub sandbox: Option<UsedSandbox>,
    /// Notes of a foreign server on its answer, which are passed on.
    pub passed_on: Option<Box<PassedOn>>,
}

/// Notes that a foreign server sends with its answer. They are passed on to clients that know them, and never read
/// here.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PassedOn {
    /// Notes on the whole answer: `_meta` of MCP.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub meta: Map<String, Value>,
    /// Notes on single blocks, by block position: `annotations` and `_meta` of MCP.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub blocks: BTreeMap<usize, Map<String, Value>>,
}

impl PassedOn {
    /// Returns the size of the notes as JSON, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        serde_json::to_vec(self).map_or(u64::MAX, |json| json.len() as u64)
    }
}

impl Outcome {
    /// Creates an answer of one text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { content: vec![Content::text(text)], ..Self::default() }
    }

    /// Creates an answer for programs, with the same as text for models.
    pub fn json(value: Value) -> Self {
        let text = serde_json::to_string_pretty(&value).expect("a JSON value is always writable");
        Self { structured: Some(value), ..Self::text(text) }
    }

    /// Sets the answer for programs.
    #[must_use]
    pub fn structured(mut self, value: Value) -> Self {
        self.structured = Some(value);
        self
    }

    /// Returns true if the tool failed and a retry is safe.
    pub(crate) fn is_worth_another_run(&self) -> bool {
        self.failure.as_ref().is_some_and(|error| error.retryable)
    }

    /// Returns the outcome without its answer, which is too large to store.
    pub(crate) fn in_brief(&self, bytes: u64) -> Self {
        let rest = if self.artifact.is_some() { "; its artifact has the whole" } else { "" };
        let message =
            format!("this call was run before, and its answer of {bytes} bytes was too large to be kept{rest}");
        Self {
            content: vec![Content::text(message)],
            structured: None,
            failure: self.failure.clone(),
            partial: true,
            artifact: self.artifact,
            usage: self.usage.clone(),
            sandbox: self.sandbox.clone(),
            passed_on: None,
        }
    }

    /// Turns the answer into a failure that the tool reports.
    #[must_use]
    pub fn failed(mut self, error: CallError) -> Self {
        self.failure = Some(Box::new(error));
        self
    }
}

/// The error of a run that produced no answer.
#[derive(Debug, Clone, PartialEq)]
pub struct RunError {
    /// The error that the caller gets.
    pub error: Box<CallError>,
    /// True if the run may have changed something before it failed.
    pub effect_possible: bool,
}

impl RunError {
    /// Creates an error for arguments that the tool's own check refused, before anything was changed.
    pub fn invalid_input(message: impl Into<String>) -> Self {
        Self::from(CallError::new(Code::InvalidInput, message)).before_effect()
    }

    /// Creates an error for a missing file or folder.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::from(CallError::new(Code::FileNotFound, message)).before_effect()
    }

    /// Creates an error for a missing setting; `suggestion` names the setting.
    pub fn configuration(message: impl Into<String>, suggestion: impl Into<String>) -> Self {
        Self::from(CallError::new(Code::Configuration, message).suggest(suggestion)).before_effect()
    }

    /// Marks the error as raised before anything was changed, so the call may be retried.
    #[must_use]
    pub fn before_effect(mut self) -> Self {
        self.effect_possible = false;
        self
    }

    /// Sets the advice.
    #[must_use]
    pub fn suggest(mut self, suggestion: impl Into<String>) -> Self {
        self.error.suggestion = Some(suggestion.into());
        self
    }
}

impl From<CallError> for RunError {
    fn from(error: CallError) -> Self {
        Self { error: Box::new(error), effect_possible: true }
    }
}

/// Converts any message into an `EXECUTION_ERROR`: the short way for tools to fail.
impl From<String> for RunError {
    fn from(message: String) -> Self {
        CallError::new(Code::ExecutionError, message).into()
    }
}

impl From<&str> for RunError {
    fn from(message: &str) -> Self {
        message.to_owned().into()
    }
}

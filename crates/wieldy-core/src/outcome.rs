//! The answer of a tool ([`Outcome`]), and the error of a run without an answer ([`RunError`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::artifact::ArtifactId;
use crate::call::{Content, SandboxRef};
use crate::error::{CallError, Code};
use crate::sandbox::Usage;

/// The answer of a tool, including "I failed".
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// The answer in blocks.
    pub content: Vec<Content>,
    /// The answer for programs.
    pub structured: Option<Value>,
    /// Set where the tool ran and could not do what it was asked.
    pub failure: Option<Box<CallError>>,
    /// True if the content is only part of the output.
    pub partial: bool,
    /// The artifact that holds the whole output.
    pub artifact: Option<ArtifactId>,
    /// The resources that the run used, where they were measured.
    pub usage: Option<Box<Usage>>,
    /// The custody it ran in, if a process was started.
    pub sandbox: Option<SandboxRef>,
    /// Notes of a foreign server on its answer, which are handed through.
    pub passed_on: Option<Box<PassedOn>>,
}

/// Notes that a foreign server sends with its answer. They are handed to clients that know them, and never read here.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PassedOn {
    /// Notes on the whole answer: `_meta` of MCP.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub meta: Map<String, Value>,
    /// Notes on blocks, by their places: `annotations` and `_meta` of MCP.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub blocks: BTreeMap<usize, Map<String, Value>>,
}

impl PassedOn {
    /// Returns the room that the notes take as JSON.
    pub(crate) fn bytes(&self) -> u64 {
        serde_json::to_vec(self).map_or(u64::MAX, |json| json.len() as u64)
    }
}

impl Outcome {
    /// An answer of one text.
    pub fn text(text: impl Into<String>) -> Self {
        Self { content: vec![Content::text(text)], ..Self::default() }
    }

    /// An answer for programs, with the same as text for models.
    pub fn json(value: Value) -> Self {
        let text = serde_json::to_string_pretty(&value).expect("a JSON value is always writable");
        Self { structured: Some(value), ..Self::text(text) }
    }

    /// The same answer with a form for programs.
    #[must_use]
    pub fn structured(mut self, value: Value) -> Self {
        self.structured = Some(value);
        self
    }

    /// Returns true if it failed in a way that is safe to repeat.
    pub(crate) fn is_worth_another_run(&self) -> bool {
        self.failure.as_ref().is_some_and(|error| error.retryable)
    }

    /// Returns the outcome without the answer itself, which is too large to be kept.
    pub(crate) fn in_brief(&self, bytes: u64) -> Self {
        let rest = if self.artifact.is_some() { "; its artifact has the whole" } else { "" };
        let told = format!("this call was run before, and its answer of {bytes} bytes was too large to be kept{rest}");
        Self {
            content: vec![Content::text(told)],
            structured: None,
            failure: self.failure.clone(),
            partial: true,
            artifact: self.artifact,
            usage: self.usage.clone(),
            sandbox: self.sandbox.clone(),
            passed_on: None,
        }
    }

    /// The same answer, as a failure that the tool reports.
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
    /// An error of the tool's own check of its arguments, made before anything was changed.
    pub fn invalid_input(message: impl Into<String>) -> Self {
        Self::from(CallError::new(Code::InvalidInput, message)).before_effect()
    }

    /// A file or folder that is not there.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::from(CallError::new(Code::FileNotFound, message)).before_effect()
    }

    /// Something that has to be configured first; `suggestion` says what.
    pub fn configuration(message: impl Into<String>, suggestion: impl Into<String>) -> Self {
        Self::from(CallError::new(Code::Configuration, message).suggest(suggestion)).before_effect()
    }

    /// The same error, made certain that nothing was changed: it may be tried again.
    #[must_use]
    pub fn before_effect(mut self) -> Self {
        self.effect_possible = false;
        self
    }

    /// The same error with what can be done about it.
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

/// The short way for tools to fail: any message becomes `EXECUTION_ERROR`.
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

//! The arguments of the tool `batch`.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use wieldy_core::{BatchMode, CallError, Caller, Code};

use super::Shared;
use super::batch_tool::{BATCH, FORM};

/// The most calls that a batch may ask to run at once.
pub(super) const CONCURRENCY_MAX: u32 = 10_000;
/// Maximum length of the description of a mistake in the arguments.
const MISTAKE_CHARS_MAX: usize = 300;

/// The arguments of the tool.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BatchArguments {
    pub(super) calls: Vec<CallArguments>,
    pub(super) mode: Option<BatchMode>,
    pub(super) max_concurrency: Option<u32>,
    #[serde(default)]
    pub(super) stop_on_error: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CallArguments {
    pub(super) id: Option<String>,
    #[serde(alias = "name")]
    pub(super) tool: String,
    #[serde(default, alias = "args")]
    pub(super) arguments: Value,
    #[serde(default)]
    pub(super) after: Vec<String>,
}

/// Reads the arguments, and refuses a batch that no caller could run.
pub(super) fn read(shared: &Shared, caller: &Arc<Caller>, arguments: &Value) -> Result<BatchArguments, CallError> {
    let wrong = |message: String| Err(CallError::new(Code::ValidationFailed, message).suggest(FORM));
    let given: BatchArguments = match BatchArguments::deserialize(arguments) {
        Ok(given) => given,
        Err(error) => return wrong(format!("the arguments of `{BATCH}` do not fit: {}", without_text(&error))),
    };
    if given.calls.is_empty() {
        return wrong(format!("`{BATCH}` has no calls"));
    }
    if given.max_concurrency.is_some_and(|count| !(1..=CONCURRENCY_MAX).contains(&count)) {
        return wrong(format!("`max_concurrency` is a number from 1 to {CONCURRENCY_MAX}"));
    }
    let (count, count_max) = (given.calls.len(), shared.options.batch_calls_max);
    if caller.plan.is_none() && count > count_max {
        let error = CallError::new(
            Code::ValidationFailed,
            format!("a batch of {count} calls is too large: at most {count_max}"),
        );
        let error = error.suggest("make several batches, one after the other");
        return Err(error
            .detail("limit", "limits.batch-calls-max")
            .detail("asked", count)
            .detail("allowed", count_max));
    }
    Ok(given)
}

/// Returns an error of the arguments without the text that did not fit: it may be large and have secrets in it.
fn without_text(error: &serde_json::Error) -> String {
    let mut message = error.to_string();
    if let (Some(start), Some(end)) = (message.find(" \""), message.rfind('"')) {
        message.replace_range(start..=end, "");
    }
    if let Some((end, _)) = message.char_indices().nth(MISTAKE_CHARS_MAX) {
        message.replace_range(end.., "…");
    }
    message
}

//! The safe list: the keys that a folder's own `wieldy.toml` may set before a person trusts it.
//!
//! Each key is spelled out, so a new key of the configuration needs trust until it is added here.

use std::path::{Component, Path};

use toml::Value;
use wieldy::parse_duration;

/// The maximal number of names that a folder may add to a list without trust.
const NAMES_MAX: usize = 256;

/// The change that a key on the safe list may make to the value of the layers below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Any value.
    Any,
    /// A lower number or a shorter time.
    Lower,
    /// The same, where 0 means no limit.
    LowerOrFirst,
    /// Additional names inside the folder.
    Add,
}

fn rule(key: &[&str]) -> Option<Rule> {
    match key {
        ["timeouts", "tools", _] => Some(Rule::Any),
        ["timeouts", "default"]
        | [
            "limits",
            "calls-running-max"
            | "calls-running-per-agent-max"
            | "calls-waiting-max"
            | "queue-timeout"
            | "batch-calls-max",
        ]
        | [
            "resources",
            "cpu-millicores" | "memory-mb" | "processes" | "open-files" | "disk-mb" | "disk-files" | "output-mb",
        ]
        | ["output", "bytes-max"] => Some(Rule::Lower),
        ["sandbox", "limits", "cpu-millicores" | "memory-mb" | "processes" | "disk-mb" | "disk-files"] => {
            Some(Rule::LowerOrFirst)
        }
        ["sandbox", "hidden" | "protected"] => Some(Rule::Add),
        _ => None,
    }
}

/// Returns true if a mistake at this key, in an untrusted file, could remove a protection that the file requests: the
/// key is on the safe list, or is a section with such keys.
pub(super) fn concerns(key: &str) -> bool {
    let words: Vec<&str> = key.split('.').collect();
    let is_section = matches!(
        words[..],
        [""] | ["timeouts" | "limits" | "resources" | "output" | "sandbox"]
            | ["timeouts", "tools"]
            | ["sandbox", "limits"]
    );
    is_section || rule(&words).is_some()
}

/// Returns the resulting value if an untrusted file sets a key from `held` to `value`, or `None` if that needs trust.
pub(super) fn allowed(key: &[String], held: Option<&Value>, value: &Value) -> Option<Value> {
    let words: Vec<&str> = key.iter().map(String::as_str).collect();
    let is_lower = |held: &Value| amount(value).zip(amount(held)).is_some_and(|(new, old)| new <= old);
    match rule(&words)? {
        Rule::Any => Some(value.clone()),
        Rule::Lower => held.is_some_and(is_lower).then(|| value.clone()),
        Rule::LowerOrFirst => {
            let (none, held) = (Value::Integer(0), held?);
            let is_limit = *value != none || *held == none;
            (is_limit && (*held == none || is_lower(held))).then(|| value.clone())
        }
        Rule::Add => {
            let (held, names) = (held?.as_array()?, value.as_array()?);
            let are_own = names.len() <= NAMES_MAX && names.iter().all(|name| name.as_str().is_some_and(is_own));
            are_own.then(|| Value::Array([held.as_slice(), names.as_slice()].concat()))
        }
    }
}

/// Splits a list that a file adds to: the names inside the folder, and the others if there are any.
pub(super) fn split_names(key: &[String], value: Value) -> (Value, Option<Value>) {
    let words: Vec<&str> = key.iter().map(String::as_str).collect();
    match value {
        Value::Array(names) if rule(&words) == Some(Rule::Add) && names.len() <= NAMES_MAX => {
            let (own, others): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name.as_str().is_some_and(is_own));
            (own.into(), (!others.is_empty()).then(|| others.into()))
        }
        value => (value, None),
    }
}

/// Returns a number, or a time in seconds.
fn amount(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::String(time) => parse_duration(time).ok().map(|time| time.as_secs_f64()),
        _ => None,
    }
}

/// Returns true for a path that stays in the folder.
fn is_own(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('~')
        && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests;

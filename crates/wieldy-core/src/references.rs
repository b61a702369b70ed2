//! References in the arguments of a batch: `{"$result": "id"}` stands for the answer of an earlier call.

use std::collections::HashMap;

use serde_json::Value;

use crate::call::ToolResult;
use crate::error::{CallError, Code};
use crate::input::ARGUMENTS_DEPTH_MAX;
use crate::schema::measure;

/// Returns the ids that arguments refer to: `{"$result": "id"}`, with an optional `"pointer"`.
pub(crate) fn referred_ids(arguments: &Value) -> Vec<&str> {
    let mut found = Vec::new();
    // Deeper arguments will be refused anyway.
    references(arguments, ARGUMENTS_DEPTH_MAX, &mut found);
    found
}

fn references<'a>(value: &'a Value, levels_left: usize, found: &mut Vec<&'a str>) {
    let Some(levels_left) = levels_left.checked_sub(1) else { return };
    match value {
        // The whole map is walked anyway, so comparing the keys is cheaper than hashing one.
        Value::Object(map) => match map.iter().find(|(key, _)| *key == "$result") {
            Some((_, Value::String(id))) => found.push(id),
            _ => map.values().for_each(|value| references(value, levels_left, found)),
        },
        Value::Array(items) => items.iter().for_each(|item| references(item, levels_left, found)),
        _ => {}
    }
}

/// The state for replacing references in arguments: by the text of a result, or by the value at a JSON pointer in the
/// result's JSON.
pub(crate) struct ReferenceFiller<'a> {
    pub(crate) results: HashMap<&'a str, &'a ToolResult>,
    /// The JSON of results that pointers refer to.
    pub(crate) whole: HashMap<&'a str, Value>,
    /// The number of bytes by which the arguments may still grow.
    pub(crate) bytes_left: usize,
    /// The error for arguments that would grow by more.
    pub(crate) too_large: fn() -> CallError,
}

impl<'a> ReferenceFiller<'a> {
    /// Returns the value with its references replaced.
    pub(crate) fn value(&mut self, value: &'a Value) -> Result<Value, CallError> {
        match value {
            Value::Object(map) => match map.get("$result") {
                Some(Value::String(id)) => self.referred(id, map.get("pointer")),
                _ => map.iter().map(|(key, value)| Ok((key.clone(), self.value(value)?))).collect(),
            },
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            plain => Ok(plain.clone()),
        }
    }

    fn referred(&mut self, id: &'a str, pointer: Option<&Value>) -> Result<Value, CallError> {
        let result = self.results[id];
        let Some(pointer) = pointer else {
            let text = result.text();
            self.bytes_left = self.bytes_left.checked_sub(text.len()).ok_or_else(self.too_large)?;
            return Ok(Value::String(text));
        };
        // The arguments of a result are redacted and cut, so they must not become arguments of another call.
        if pointer.as_str().is_some_and(|pointer| pointer.split('/').nth(1) == Some("arguments")) {
            let message = format!("{pointer} of the result of `{id}` cannot be referred to: secrets are cut out of it");
            let advice =
                "write the argument itself; a reference leads to an answer: `/structured/…`, `/content/0/text`";
            return Err(CallError::new(Code::ValidationFailed, message).suggest(advice));
        }
        let whole = self.whole.entry(id).or_insert_with(|| without_arguments(result));
        let found = pointer.as_str().and_then(|pointer| whole.pointer(pointer)).ok_or_else(|| {
            CallError::new(Code::ValidationFailed, format!("there is nothing at {pointer} in the result of `{id}`"))
                .suggest("a pointer starts at the result: `/structured/…`, `/content/0/text`")
        })?;
        let size = measure(found, ARGUMENTS_DEPTH_MAX, self.bytes_left).ok_or_else(self.too_large)?;
        self.bytes_left -= size.bytes;
        Ok(found.clone())
    }
}

fn without_arguments(result: &ToolResult) -> Value {
    let mut whole = serde_json::to_value(result).expect("a result is plain data");
    whole.as_object_mut().map(|whole| whole.shift_remove("arguments"));
    whole
}

//! The objects that go with a call beside its arguments: its context, its metadata and its client's notes.
//!
//! The door or the embedding program sets them, and never the model. The context reaches the tool, so it is part of
//! what a person agrees to and of the keys of stored answers, and it is written down nowhere. The metadata reaches only
//! the history. The notes reach only tools that take them.

use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value};

use crate::call::{Call, Caller};
use crate::error::{CallError, Code};
use crate::schema::measure;

/// Maximum size of a call's context, and of its metadata, as JSON.
pub const BESIDE_BYTES_MAX: usize = 16 * 1024;

/// Maximum depth of a call's context, and of its metadata. Readers of the history have a limit of depth for a record as
/// a whole.
const DEPTH_MAX: usize = 64;

impl Call {
    /// Settles the context: the caller's own keys replace those of the call, and an empty context is none.
    pub(crate) fn settle_context(&mut self) {
        let is_empty = |context: &Arc<Value>| context.as_object().is_some_and(Map::is_empty);
        let own = self.caller.context.as_ref().filter(|own| !is_empty(own));
        self.context = match (self.context.take(), own) {
            (None, own) => own.cloned(),
            (Some(claimed), None) => Some(claimed).filter(|claimed| !is_empty(claimed)),
            (Some(claimed), Some(own)) => Some(merged(claimed, own)),
        };
    }

    /// Refuses a context, metadata or notes that are no object, too large or too deep.
    pub(crate) fn check_beside(&self) -> Result<(), CallError> {
        for (name, value) in [("context", &self.context), ("metadata", &self.metadata), ("notes", &self.notes)] {
            check(name, value.as_deref())?;
        }
        Ok(())
    }
}

impl Caller {
    /// Checks the context that is part of the caller, for a program that configures callers.
    pub fn check_context(&self) -> Result<(), CallError> {
        check("context", self.context.as_deref())
    }
}

/// Puts the caller's keys over those that the client claims.
fn merged(claimed: Arc<Value>, own: &Arc<Value>) -> Arc<Value> {
    let (Some(_), Some(own)) = (claimed.as_object(), own.as_object()) else { return claimed };
    let mut merged = Arc::unwrap_or_clone(claimed);
    if let Value::Object(map) = &mut merged {
        map.extend(own.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    Arc::new(merged)
}

fn check(name: &str, value: Option<&Value>) -> Result<(), CallError> {
    let Some(value) = value else { return Ok(()) };
    let refused = |message: String, advice: &str| Err(CallError::new(Code::ValidationFailed, message).suggest(advice));
    if !value.is_object() {
        return refused(
            format!("the {name} of a call is a JSON object"),
            "send an object, such as {\"key\": \"value\"}",
        );
    }
    // The depth is checked first, because writing a value goes as deep as the value is.
    let is_small = measure(value, DEPTH_MAX, BESIDE_BYTES_MAX).is_some();
    if !is_small || value.to_string().len() > BESIDE_BYTES_MAX {
        let message = format!(
            "the {name} of the call is too large: at most {BESIDE_BYTES_MAX} bytes as JSON and {DEPTH_MAX} levels"
        );
        return refused(message, "send less; what is large goes into a file of the workspace or into an argument");
    }
    Ok(())
}

/// Returns the object, or an empty one.
pub(crate) fn object_or_empty(value: Option<&Value>) -> &Map<String, Value> {
    static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
    value.and_then(Value::as_object).unwrap_or(&EMPTY)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settled(claimed: Option<Value>, own: Option<Value>) -> Option<Value> {
        let caller = Caller { context: own.map(Arc::new), ..Caller::local() };
        let mut call = Call { context: claimed.map(Arc::new), ..Call::new("t", Value::Null).by(caller) };
        call.settle_context();
        call.context.map(Arc::unwrap_or_clone)
    }

    #[test]
    fn the_keys_of_the_caller_win_and_an_empty_context_is_none() {
        assert_eq!(settled(None, None), None);
        assert_eq!(settled(Some(json!({})), Some(json!({}))), None);
        assert_eq!(settled(Some(json!({"a": 1})), None), Some(json!({"a": 1})));
        assert_eq!(settled(None, Some(json!({"a": 2}))), Some(json!({"a": 2})));
        let both = settled(Some(json!({"a": 1, "b": {"c": 1}})), Some(json!({"b": {"d": 2}, "e": null})));
        assert_eq!(both, Some(json!({"a": 1, "b": {"d": 2}, "e": null})));
        assert_eq!(settled(Some(json!(5)), Some(json!({"a": 2}))), Some(json!(5)), "the check refuses it");
    }

    // Shows: D11.3
    #[test]
    fn only_objects_of_a_bounded_size_and_depth_are_taken() {
        let told = |value: Value| check("metadata", Some(&value)).err().map(|error| (error.code, error.message));
        assert_eq!(told(json!({"a": [1, "x"]})), None);
        let no_object = (Code::ValidationFailed, "the metadata of a call is a JSON object".to_owned());
        assert_eq!([told(json!([1])), told(Value::Null)], [Some(no_object.clone()), Some(no_object)]);
        let of = |bytes: usize| json!({"k": "x".repeat(bytes - r#"{"k":""}"#.len())});
        assert_eq!(told(of(BESIDE_BYTES_MAX)), None);
        let large = "the metadata of the call is too large: at most 16384 bytes as JSON and 64 levels".to_owned();
        let deep = (0..100_000).fold(Value::Null, |inner, _| Value::Array(vec![inner]));
        let deep = Value::Object(Map::from_iter([("a".to_owned(), deep)]));
        let nested = |levels: usize| (1..levels).fold(json!({}), |inner, _| json!({ "a": inner }));
        assert_eq!([told(nested(64)), told(nested(65))], [None, Some((Code::ValidationFailed, large.clone()))]);
        // Escapes count: a control character takes six bytes.
        for value in [of(BESIDE_BYTES_MAX + 1), json!({"k": "\u{1}".repeat(3000)})] {
            assert_eq!(told(value), Some((Code::ValidationFailed, large.clone())));
        }
        assert_eq!(check("metadata", Some(&deep)).unwrap_err().message, large);
        // Dropping a value this deep would overflow the stack.
        std::mem::forget(deep);
    }
}

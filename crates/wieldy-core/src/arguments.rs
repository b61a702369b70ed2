//! The arguments of a result: whole for the program that embeds the executor, redacted and bounded as JSON.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use crate::redact::Redacted;
use crate::schema::measure;

/// Maximum size of the arguments in a result's JSON, in bytes.
const JSON_BYTES_MAX: usize = 16 * 1024;

/// Maximum depth of the arguments in a result's JSON.
const DEPTH_MAX: usize = 64;

/// The arguments of a call as they were checked.
///
/// It derefs to the arguments that ran. Its JSON is without their secrets and has at most 16 KiB; longer texts are cut
/// in it, and say their length.
#[derive(Clone, Default, PartialEq)]
pub struct CheckedArguments(Redacted);

impl CheckedArguments {
    /// Returns the checked arguments of a call. They hide the same secrets as its recorded ones.
    pub(crate) fn of_call(arguments: Arc<Value>, recorded: &Redacted) -> Self {
        Self(recorded.with_arguments(arguments))
    }
}

impl Deref for CheckedArguments {
    type Target = Value;

    fn deref(&self) -> &Value {
        self.0.raw()
    }
}

impl fmt::Debug for CheckedArguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for CheckedArguments {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let shown = self.0.value();
        // Readers of the JSON have a limit of depth for the result as a whole.
        if measure(&shown, DEPTH_MAX, usize::MAX).is_none() {
            return serializer.serialize_str(&format!("[left out: more than {DEPTH_MAX} levels]"));
        }
        match size(&shown) {
            bytes if bytes <= JSON_BYTES_MAX => shown.serialize(serializer),
            bytes => bounded(shown.into_owned(), bytes).serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for CheckedArguments {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Redacted::from(Value::deserialize(deserializer)?)))
    }
}

fn size(value: &Value) -> usize {
    serde_json::to_string(value).map_or(0, |json| json.len())
}

/// Cuts the longest texts until the value fits. If it has too many parts for that, only its size is left.
fn bounded(mut value: Value, bytes: usize) -> Value {
    for text_bytes_max in [4096, 1024, 256, 64] {
        cut_texts(&mut value, text_bytes_max);
        if size(&value) <= JSON_BYTES_MAX {
            return value;
        }
    }
    json!(format!("[left out: {bytes} bytes]"))
}

/// Cuts the texts that are longer than this, at every depth.
fn cut_texts(value: &mut Value, bytes_max: usize) {
    match value {
        Value::String(text) if text.len() > bytes_max => {
            // A text that was cut before keeps the note of its whole length.
            let end = text.rfind("… [").filter(|_| text.ends_with(" bytes]"));
            let note = end.map_or_else(|| format!("… [{} bytes]", text.len()), |end| text[end..].to_owned());
            text.truncate(text.floor_char_boundary(bytes_max.saturating_sub(note.len())));
            text.push_str(&note);
        }
        Value::Array(items) => items.iter_mut().for_each(|item| cut_texts(item, bytes_max)),
        Value::Object(map) => map.values_mut().for_each(|value| cut_texts(value, bytes_max)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(arguments: Value) -> Value {
        json!(CheckedArguments(Redacted::new(Arc::new(arguments), crate::redact::marked(vec!["seal".into()]))))
    }

    #[test]
    fn the_json_has_no_secrets_and_the_program_has_the_whole() {
        let arguments = CheckedArguments(json!({"password": "hunter22", "a": "x hunter22"}).into());
        assert_eq!((&arguments["password"], arguments["a"].as_str()), (&json!("hunter22"), Some("x hunter22")));
        assert_eq!(json!(arguments), json!({"password": "[redacted]", "a": "x [redacted]"}));
        assert_eq!(shown(json!({"seal": 12345, "b": 1})), json!({"seal": "[redacted]", "b": 1}));
        assert!(!format!("{arguments:?}").contains("hunter22"));
    }

    #[test]
    fn long_texts_are_cut_and_say_their_length() {
        let whole = json!({"path": "a", "content": "x".repeat(16_000)});
        assert_eq!(shown(whole.clone()), whole, "the bound itself fits");
        let (head, note) = ("é".repeat(2040), "… [40000 bytes]");
        assert_eq!(
            shown(json!({"path": "a", "content": "é".repeat(20_000)})),
            json!({"path": "a", "content": format!("{}{note}", &head[..4096 - note.len() - 1])})
        );
        let many = json!({"texts": vec!["x".repeat(500); 100]});
        assert!(size(&shown(many.clone())) <= JSON_BYTES_MAX);
        assert_eq!(shown(many)["texts"][99], json!(format!("{}… [500 bytes]", "x".repeat(64 - 15))));
        let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
        assert_eq!(shown(deep), json!("[left out: more than 64 levels]"));
        assert_eq!(shown(json!({"numbers": vec![7; 20_000]})), json!("[left out: 40013 bytes]"));
    }
}

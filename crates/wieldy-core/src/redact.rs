//! Redaction: secrets are taken out of arguments before anything is written down or shown.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, LazyLock};

use regex::Regex;
use serde::Serialize;
use serde_json::{Value, json};

use crate::tool::ToolSpec;

/// What stands where a secret was.
pub const REDACTED: &str = "[redacted]";

/// Arguments that show themselves only without their secrets: there is no way to get at the rest.
///
/// They are searched when they are written or shown, not when they are noted: a call does not wait for that.
#[derive(Clone)]
pub struct Redacted {
    raw: Arc<Value>,
    marked: Marked,
}

/// The names of arguments that a tool wants to be hidden; most tools name none.
pub(crate) type Marked = Option<Arc<[String]>>;

impl Redacted {
    pub(crate) fn new(raw: Arc<Value>, marked: Marked) -> Self {
        Self { raw, marked }
    }

    /// The arguments without their secrets.
    pub fn value(&self) -> Cow<'_, Value> {
        let marked = self.marked.as_deref().unwrap_or_default();
        if is_clean(&self.raw, marked, TEXTS_WITHIN_TEXTS_MAX) {
            return Cow::Borrowed(&self.raw);
        }
        let mut copy = Value::clone(&self.raw);
        clean(&mut copy, marked, TEXTS_WITHIN_TEXTS_MAX);
        Cow::Owned(copy)
    }
}

impl Serialize for Redacted {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value().serialize(serializer)
    }
}

impl fmt::Debug for Redacted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value().fmt(f)
    }
}

impl PartialEq for Redacted {
    fn eq(&self, other: &Self) -> bool {
        self.value() == other.value()
    }
}

impl From<Value> for Redacted {
    fn from(value: Value) -> Self {
        Self::new(Arc::new(value), None)
    }
}

/// The names of arguments that the tool names, or that its schema marks as for writing only.
pub(crate) fn sensitive_names(tool: &ToolSpec) -> Marked {
    // What a pointer names is known by its last part: rather too much is hidden than too little.
    let last = |name: &String| name.rsplit('/').next().unwrap_or_default().replace("~1", "/").replace("~0", "~");
    let mut names: Vec<String> = tool.sensitive.iter().map(last).collect();
    marked_names(&tool.input_schema, &mut names);
    marked(names)
}

pub(crate) fn marked(names: Vec<String>) -> Marked {
    if names.is_empty() { None } else { Some(names.into()) }
}

/// The names of all properties that a schema marks, at whatever depth.
fn marked_names(schema: &Value, names: &mut Vec<String>) {
    let is_marked = |schema: &Value| {
        schema.get("writeOnly") == Some(&json!(true)) || schema.get("format") == Some(&json!("password"))
    };
    match schema {
        Value::Object(map) => {
            let properties = map.get("properties").and_then(Value::as_object).into_iter().flatten();
            names.extend(properties.filter(|(_, schema)| is_marked(schema)).map(|(name, _)| name.clone()));
            map.values().for_each(|schema| marked_names(schema, names));
        }
        Value::Array(items) => items.iter().for_each(|item| marked_names(item, names)),
        _ => {}
    }
}

fn is_secret_name(name: &str, marked: &[String]) -> bool {
    marked.iter().any(|marked| marked == name) || SECRET_NAME.is_match(name)
}

static SECRET_NAME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?i)passw(or)?d|passphrase|secret|api[-_]?key|access[-_]?key|private[-_]?key|credential|authorization|cookie|bearer|(^|[-_])(auth|pwd|pin|token)$|(access|auth|refresh|id|session|api)[-_]?token")
        .expect("the pattern is a constant")
});

static SECRET_VALUE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(concat!(
        r"(?i:bearer|basic)\s+[A-Za-z0-9+/_.~=-]{16,}",
        r"|\b(sk|rk|pk)[-_][A-Za-z0-9_-]{16,}",
        r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}",
        r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bxox[abprs]-[A-Za-z0-9-]{10,}",
        r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
        r"|(?i:[a-z][a-z0-9+.-]*)://[^\s/@:]+:[^\s/@]+@",
    ))
    .expect("the pattern is a constant")
});

/// How often JSON may be a text within JSON; what is wrapped once more is hidden whole.
const TEXTS_WITHIN_TEXTS_MAX: u32 = 3;

/// What a text says that is JSON itself, as models write lists and objects, and whole arguments.
fn said_in(text: &str) -> Option<Value> {
    let is_like_it = text.trim_start().starts_with(['{', '[', '"']);
    is_like_it.then(|| serde_json::from_str(text).ok()).flatten()
}

fn is_clean(value: &Value, marked: &[String], texts: u32) -> bool {
    match value {
        Value::String(text) => {
            let within = |said: Value| texts > 0 && is_clean(&said, marked, texts - 1);
            !SECRET_VALUE.is_match(text) && said_in(text).is_none_or(within)
        }
        Value::Array(items) => items.iter().all(|item| is_clean(item, marked, texts)),
        Value::Object(map) => {
            map.iter().all(|(name, value)| !is_secret_name(name, marked) && is_clean(value, marked, texts))
        }
        _ => true,
    }
}

fn clean(value: &mut Value, marked: &[String], texts: u32) {
    match value {
        Value::String(text) => match said_in(text).filter(|said| texts == 0 || !is_clean(said, marked, texts - 1)) {
            Some(_) if texts == 0 => *text = REDACTED.into(),
            Some(mut said) => {
                clean(&mut said, marked, texts - 1);
                *text = said.to_string();
            }
            None => *text = SECRET_VALUE.replace_all(text, REDACTED).into_owned(),
        },
        Value::Array(items) => items.iter_mut().for_each(|item| clean(item, marked, texts)),
        Value::Object(map) => {
            for (name, value) in map {
                if is_secret_name(name, marked) {
                    *value = json!(REDACTED);
                } else {
                    clean(value, marked, texts);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_found_by_name_by_mark_and_by_shape() {
        let mut spec = ToolSpec::new("t", "").sensitive("note");
        spec.input_schema = json!({"properties": {"seal": {"writeOnly": true}, "gate": {"format": "password"}}});
        let given = json!({
            "path": "src/tokenizer.rs", "max_tokens": 5, "note": "x", "seal": "x", "gate": "x", "apiKey": "x",
            "headers": {"Authorization": "x"}, "deep": [{"access_token": {"a": 1}}],
            "text": "use ghp_abcdefghijklmnopqrstuvwxyz0123 now", "url": "https://ada:hunter2@host/x",
        });
        assert_eq!(
            *Redacted::new(Arc::new(given), sensitive_names(&spec)).value(),
            json!({
                "path": "src/tokenizer.rs", "max_tokens": 5, "note": REDACTED, "seal": REDACTED, "gate": REDACTED,
                "apiKey": REDACTED, "headers": {"Authorization": REDACTED}, "deep": [{"access_token": REDACTED}],
                "text": "use [redacted] now", "url": "[redacted]host/x",
            })
        );
    }

    #[test]
    fn secrets_are_found_in_texts_that_are_json() {
        let shown = |given: Value| Redacted::from(given).value().to_string();
        let secret = json!({"user": "ada", "password": "canary"}).to_string();
        assert_eq!(shown(json!(secret)), r#""{\"user\":\"ada\",\"password\":\"[redacted]\"}""#);
        let mut wrapped = secret;
        for _ in 0..8 {
            wrapped = json!({ "nested": wrapped }).to_string();
            assert!(!shown(json!({ "text": wrapped })).contains("canary"), "{wrapped}");
        }
        let plain = json!({"text": "{\"path\": \"a\"}", "code": "{ not json", "quote": "\"a\""});
        assert!(matches!(Redacted::from(plain).value(), Cow::Borrowed(_)));
        let split = json!({"text": "[1] see {\"password\": 1}"});
        assert!(matches!(Redacted::from(split).value(), Cow::Borrowed(_)), "only a text that is JSON as a whole");
    }

    #[test]
    fn arguments_without_secrets_are_not_copied_and_those_with_never_shown() {
        let plain = Redacted::from(json!({"path": "a", "pattern": "fn main"}));
        assert!(matches!(plain.value(), Cow::Borrowed(_)));
        let secret = Redacted::from(json!({"password": "canary"}));
        assert!(!format!("{secret:?} {}", serde_json::to_string(&secret).expect("plain data")).contains("canary"));
    }
}

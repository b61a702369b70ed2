//! Redaction: secrets are taken out of arguments before anything is written down or shown.

use std::sync::{Arc, LazyLock};

use regex::Regex;
use serde_json::{Value, json};

use crate::tool::ToolSpec;

/// What stands where a secret was.
pub const REDACTED: &str = "[redacted]";

/// The arguments without their secrets; the very same ones where there are none.
pub(crate) fn redact(arguments: &Arc<Value>, tool: Option<&ToolSpec>) -> Arc<Value> {
    let marked: Vec<&str> = tool.map(sensitive_names).unwrap_or_default();
    if is_clean(arguments, &marked) {
        return Arc::clone(arguments);
    }
    let mut copy = Value::clone(arguments);
    clean(&mut copy, &marked);
    Arc::new(copy)
}

/// Arguments that the tool names, or that its schema marks as for writing only.
fn sensitive_names(tool: &ToolSpec) -> Vec<&str> {
    let properties = tool.input_schema.get("properties").and_then(Value::as_object);
    let is_marked = |schema: &Value| {
        schema.get("writeOnly") == Some(&json!(true)) || schema.get("format") == Some(&json!("password"))
    };
    let by_schema =
        properties.into_iter().flatten().filter(|(_, schema)| is_marked(schema)).map(|(name, _)| name.as_str());
    tool.sensitive.iter().map(String::as_str).chain(by_schema).collect()
}

fn is_secret_name(name: &str, marked: &[&str]) -> bool {
    marked.contains(&name) || SECRET_NAME.is_match(name)
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

fn is_clean(value: &Value, marked: &[&str]) -> bool {
    match value {
        Value::String(text) => !SECRET_VALUE.is_match(text),
        Value::Array(items) => items.iter().all(|item| is_clean(item, marked)),
        Value::Object(map) => map.iter().all(|(name, value)| !is_secret_name(name, marked) && is_clean(value, marked)),
        _ => true,
    }
}

fn clean(value: &mut Value, marked: &[&str]) {
    match value {
        Value::String(text) => *text = SECRET_VALUE.replace_all(text, REDACTED).into_owned(),
        Value::Array(items) => items.iter_mut().for_each(|item| clean(item, marked)),
        Value::Object(map) => {
            for (name, value) in map {
                if is_secret_name(name, marked) {
                    *value = json!(REDACTED);
                } else {
                    clean(value, marked);
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
            *redact(&Arc::new(given), Some(&spec)),
            json!({
                "path": "src/tokenizer.rs", "max_tokens": 5, "note": REDACTED, "seal": REDACTED, "gate": REDACTED,
                "apiKey": REDACTED, "headers": {"Authorization": REDACTED}, "deep": [{"access_token": REDACTED}],
                "text": "use [redacted] now", "url": "[redacted]host/x",
            })
        );
    }

    #[test]
    fn arguments_without_secrets_are_not_copied() {
        let given = Arc::new(json!({"path": "a", "pattern": "fn main"}));
        assert!(Arc::ptr_eq(&given, &redact(&given, None)));
    }
}

//! Redaction: secrets are taken out before anything is written down or shown.
//!
//! Found are values that the program has named ([`hide`]), tokens of well-known shapes, and values that a name says are
//! secret: of keys, arguments, headers, variables and parameters of addresses. Results are given to callers as they are;
//! this is for what is written down and shown: events, logs and streams.

mod patterns;
mod secrets;
mod stream;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::tool::ToolSpec;

pub use secrets::{hide, unhide};
pub use stream::StreamRedactor;

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

    /// Whether nothing had to be taken out.
    pub fn is_whole(&self) -> bool {
        matches!(self.value(), Cow::Borrowed(_))
    }

    /// The arguments without their secrets.
    pub fn value(&self) -> Cow<'_, Value> {
        cleaned(&self.raw, self.marked.as_deref().unwrap_or_default())
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

/// The text without its secrets; borrowed where it has none.
///
/// ```
/// use wieldy_core::redact::text;
///
/// assert_eq!(text("curl 'https://ada:hunter2@host/?page=1&access_token=abc'"),
///     "curl 'https://[redacted]@host/?page=1&access_token=[redacted]'");
/// assert_eq!(text("fix the password prompt, max_tokens=5"), "fix the password prompt, max_tokens=5");
/// ```
pub fn text(text: &str) -> Cow<'_, str> {
    clean_text(text, &[], TEXTS_WITHIN_TEXTS_MAX)
}

/// The value without its secrets, in keys and at whatever depth; borrowed where it has none.
pub fn value(value: &Value) -> Cow<'_, Value> {
    cleaned(value, &[])
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
    marked.iter().any(|marked| marked == name) || patterns::SECRET_NAME.is_match(name)
}

/// How often JSON may be a text within JSON; what is wrapped once more is hidden whole.
const TEXTS_WITHIN_TEXTS_MAX: u32 = 3;

fn cleaned<'a>(value: &'a Value, marked: &[String]) -> Cow<'a, Value> {
    clean(value, marked, TEXTS_WITHIN_TEXTS_MAX).map_or(Cow::Borrowed(value), Cow::Owned)
}

/// The value without its secrets, if it has any.
fn clean(value: &Value, marked: &[String], texts: u32) -> Option<Value> {
    match value {
        Value::String(text) => match clean_text(text, marked, texts) {
            Cow::Owned(text) => Some(Value::String(text)),
            Cow::Borrowed(_) => None,
        },
        Value::Array(items) => {
            let mut copy = None;
            for (index, item) in items.iter().enumerate() {
                if let Some(item) = clean(item, marked, texts) {
                    copy.get_or_insert_with(|| items.clone())[index] = item;
                }
            }
            copy.map(Value::Array)
        }
        Value::Object(map) => clean_map(map, marked, texts).map(Value::Object),
        Value::Number(number) => {
            let known = secrets::known()?;
            known.is_in(&number.to_string()).then(|| json!(REDACTED))
        }
        Value::Bool(_) | Value::Null => None,
    }
}

fn clean_map(map: &Map<String, Value>, marked: &[String], texts: u32) -> Option<Map<String, Value>> {
    // Names that are shorter hold no secret of a known shape.
    const NAME_BYTES_MIN: usize = 12;
    let mut copy: Option<Map<String, Value>> = None;
    for (index, (name, value)) in map.iter().enumerate() {
        let clean_name = match name.len() < NAME_BYTES_MIN && secrets::known().is_none() {
            true => None,
            false => Some(places(name).0).filter(|places| !places.is_empty()).map(|places| hidden(name, &places)),
        };
        let clean_value = match is_secret_name(name, marked) {
            true => Some(json!(REDACTED)).filter(|hidden| hidden != value),
            false => clean(value, marked, texts),
        };
        if copy.is_none() && (clean_name.is_some() || clean_value.is_some()) {
            copy = Some(map.iter().take(index).map(|(name, value)| (name.clone(), value.clone())).collect());
        }
        if let Some(copy) = &mut copy {
            let mut name = clean_name.unwrap_or_else(|| name.clone());
            // Two hidden names must not become one.
            while copy.contains_key(&name) {
                name.push('\'');
            }
            copy.insert(name, clean_value.unwrap_or_else(|| value.clone()));
        }
    }
    copy
}

fn clean_text<'a>(text: &'a str, marked: &[String], texts: u32) -> Cow<'a, str> {
    let (places, _) = places(text);
    // Without a backslash nothing is hidden from the patterns, so that most texts need not be read as JSON.
    let is_marked = || marked.iter().any(|name| text.contains(name.as_str()));
    if (!places.is_empty() || text.contains('\\') || is_marked())
        && let Some(said) = said_in(text)
    {
        if texts == 0 {
            return Cow::Owned(REDACTED.to_owned());
        }
        if let Some(said) = clean(&said, marked, texts - 1) {
            let text = said.to_string();
            return Cow::Owned(match self::places(&text).0 {
                places if places.is_empty() => text,
                places => hidden(&text, &places),
            });
        }
    }
    if places.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(hidden(text, &places)) }
}

/// What a text says that is JSON itself, as models write lists and objects, and whole arguments.
fn said_in(text: &str) -> Option<Value> {
    let is_like_it = text.trim_start().starts_with(['{', '[', '"']);
    is_like_it.then(|| serde_json::from_str(text).ok()).flatten()
}

/// Where secrets are, in order and apart from each other; and the last one, if it may go on after the text.
fn places(text: &str) -> (Vec<Range<usize>>, Option<patterns::Unfinished>) {
    let patterns::Found { mut places, unfinished } = patterns::find(text);
    if let Some(known) = secrets::known() {
        known.find(text, &mut places);
    }
    (merged(places), unfinished)
}

fn merged(mut places: Vec<Range<usize>>) -> Vec<Range<usize>> {
    places.sort_unstable_by_key(|place| place.start);
    places.dedup_by(|next, place| {
        let touches = next.start <= place.end;
        if touches {
            place.end = place.end.max(next.end);
        }
        touches
    });
    places
}

/// The text with something else in these places.
fn hidden(text: &str, places: &[Range<usize>]) -> String {
    hidden_between(text, places, 0..text.len())
}

/// The same for a part of the text.
fn hidden_between(text: &str, places: &[Range<usize>], part: Range<usize>) -> String {
    let mut shown = String::with_capacity(part.len());
    let mut at = part.start;
    for place in places {
        let (start, end) = (place.start.max(at), place.end.min(part.end));
        if start < end {
            shown.push_str(&text[at..start]);
            shown.push_str(REDACTED);
            at = end;
        }
    }
    shown.push_str(&text[at..part.end]);
    shown
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
                "text": "use [redacted] now", "url": "https://[redacted]@host/x",
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
        let part = json!({"text": "[1] see {\"password\": 1, \"user\": \"ada\"}"});
        assert_eq!(shown(part), r#"{"text":"[1] see {\"password\": [redacted], \"user\": \"ada\"}"}"#);
    }

    #[test]
    fn arguments_without_secrets_are_not_copied_and_those_with_never_shown() {
        let plain = Redacted::from(json!({"path": "a", "pattern": "fn main"}));
        assert!(matches!(plain.value(), Cow::Borrowed(_)));
        let secret = Redacted::from(json!({"password": "canary"}));
        assert!(!format!("{secret:?} {}", serde_json::to_string(&secret).expect("plain data")).contains("canary"));
    }
}

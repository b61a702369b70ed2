//! Redaction: removes secrets before anything is written down or shown.
//!
//! It finds values that the program has named ([`hide`]), tokens of well-known shapes, and values with a secret's name:
//! of keys, arguments, headers, variables and URL parameters. An argument that is secret by its name or by the tool's
//! mark is also found in everything else that is recorded of its call. Callers get results unredacted. Redaction
//! applies to everything that is written down or shown: events, logs and streams.

mod known_secrets;
mod patterns;
mod stream;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use serde::Serialize;
use serde_json::{Map, Value, json};

use self::known_secrets::SecretSet;
use crate::tool::ToolSpec;

pub use known_secrets::{hide, unhide};
pub use patterns::compile;
pub(crate) use patterns::end_of_cut_key;
pub use stream::StreamRedactor;

/// The replacement for a secret.
pub const REDACTED: &str = "[redacted]";

/// Arguments that others can read only without their secrets.
///
/// The secrets are searched when the arguments are written or shown, and not before, so that a call does not wait for
/// it.
#[derive(Clone, Default)]
pub struct Redacted {
    raw: Arc<Value>,
    marked: Marked,
    /// The other objects of the call. Their secrets are hidden, too.
    beside: Vec<Arc<Value>>,
    /// The values that are secret by a mark or by their name, once they have been searched.
    own: OnceLock<Option<Arc<SecretSet>>>,
    /// Set once the call's output may contain a secret in parts.
    parted: OnceLock<()>,
}

/// The names of arguments that a tool marks as secret; most tools mark none.
pub(crate) type Marked = Option<Arc<[String]>>;

impl Redacted {
    pub(crate) fn new(raw: Arc<Value>, marked: Marked) -> Self {
        Self { raw, marked, beside: Vec::new(), own: OnceLock::new(), parted: OnceLock::new() }
    }

    /// Makes the secrets among other objects of the call hidden, too.
    pub(crate) fn beside(self, beside: Vec<Arc<Value>>) -> Self {
        Self { beside, ..self }
    }

    /// Returns the arguments with their secrets, for [`CheckedArguments`](crate::CheckedArguments) alone.
    pub(crate) fn raw(&self) -> &Value {
        &self.raw
    }

    /// Returns other arguments of the same call, such as those that were checked.
    pub(crate) fn with_arguments(&self, raw: Arc<Value>) -> Self {
        Self::new(raw, self.marked.clone()).beside(self.beside.clone())
    }

    /// Returns true if the arguments have no secrets.
    pub fn is_whole(&self) -> bool {
        matches!(self.value(), Cow::Borrowed(_))
    }

    /// Returns the arguments without their secrets.
    pub fn value(&self) -> Cow<'_, Value> {
        let marked = self.marked.as_deref().unwrap_or_default();
        let once = redacted_value(&self.raw, Scope { marked, own: None });
        // A second pass finds the values of secret arguments within the other arguments.
        if matches!(once, Cow::Borrowed(_)) && self.beside.is_empty() {
            return once;
        }
        match self.own() {
            Some(own) => redacted_value(&self.raw, Scope { marked, own: Some(own) }),
            None => once,
        }
    }

    /// Returns a text of the same call without secrets, including those among the arguments.
    pub fn text<'a>(&self, text: &'a str) -> Cow<'a, str> {
        clean_text(text, self.scope(), TEXTS_WITHIN_TEXTS_MAX)
    }

    /// Removes the secrets among the arguments from a value of the same call, at every depth.
    pub(crate) fn hide_in(&self, value: &mut Value) {
        if let Some(clean) = self.own().and_then(|_| clean(value, self.scope(), TEXTS_WITHIN_TEXTS_MAX)) {
            *value = clean;
        }
    }

    /// Returns a redactor for an output stream of the same call.
    pub fn stream(&self) -> StreamRedactor {
        StreamRedactor::of_call(self.own().cloned())
    }

    /// Records that the output may contain a secret in parts, with output of another stream between them.
    pub(crate) fn note_parted(&self) {
        let _ = self.parted.set(());
    }

    /// Returns true if the output may contain a secret in parts, which redaction would not find.
    pub(crate) fn is_parted(&self) -> bool {
        self.parted.get().is_some()
    }

    /// Returns true if an argument is secret by a mark or by its name.
    pub(crate) fn has_secrets(&self) -> bool {
        self.own().is_some()
    }

    fn scope(&self) -> Scope<'_> {
        Scope { marked: &[], own: self.own() }
    }

    fn own(&self) -> Option<&Arc<SecretSet>> {
        let objects = || std::iter::once(&self.raw).chain(&self.beside).map(|object| &**object);
        let look = || named_values(objects(), self.marked.as_deref().unwrap_or_default());
        self.own.get_or_init(look).as_ref()
    }
}

/// The secrets of one call, beyond those of the whole process.
#[derive(Clone, Copy, Default)]
struct Scope<'a> {
    /// The names of arguments.
    marked: &'a [String],
    /// The values of one call's arguments.
    own: Option<&'a Arc<SecretSet>>,
}

/// Maximum total size and number of the secrets of one call. If a call has more, none of its text is shown at all.
const OWN_BYTES_MAX: usize = 8 * 1024;
const OWN_MAX: usize = 64;
/// The shortest value that counts as a secret, in characters. Shorter ones occur in every text.
const OWN_CHARACTERS_MIN: usize = 3;

/// Returns the values that are secret by a mark or by their name.
fn named_values<'a>(objects: impl Iterator<Item = &'a Value>, marked: &[String]) -> Option<Arc<SecretSet>> {
    let mut found = BTreeSet::new();
    objects.for_each(|object| find_named(object, marked, false, TEXTS_WITHIN_TEXTS_MAX, &mut found));
    let is_much = found.len() > OWN_MAX || found.iter().map(String::len).sum::<usize>() > OWN_BYTES_MAX;
    match found.is_empty() {
        true => None,
        false if is_much => Some(Arc::new(SecretSet::hiding_everything())),
        false => Some(Arc::new(SecretSet::of_call(found))),
    }
}

fn find_named(value: &Value, marked: &[String], is_named: bool, texts: u32, found: &mut BTreeSet<String>) {
    let mut keep = |text: &str| {
        let text = text.trim();
        if text.chars().nth(OWN_CHARACTERS_MIN - 1).is_some() && text != REDACTED {
            found.insert(text.to_owned());
        }
    };
    match value {
        Value::String(text) if is_named => keep(text),
        Value::Number(number) if is_named => keep(&number.to_string()),
        Value::String(text) if texts > 0 => {
            if let Some(parsed) = parse_json_text(text) {
                find_named(&parsed, marked, false, texts - 1, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| find_named(item, marked, is_named, texts, found)),
        Value::Object(map) => {
            for (name, value) in map {
                find_named(value, marked, is_named || is_secret_name(name, marked), texts, found);
            }
        }
        _ => {}
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

/// Returns the text without its secrets; borrowed if it has none.
///
/// ```
/// use wieldy_core::redact::text;
///
/// assert_eq!(text("curl 'https://ada:hunter2@host/?page=1&access_token=abc'"),
///     "curl 'https://[redacted]@host/?page=1&access_token=[redacted]'");
/// assert_eq!(text("fix the password prompt, max_tokens=5"), "fix the password prompt, max_tokens=5");
/// ```
pub fn text(text: &str) -> Cow<'_, str> {
    clean_text(text, Scope::default(), TEXTS_WITHIN_TEXTS_MAX)
}

/// Returns the value without its secrets, in keys and at every depth; borrowed if it has none.
pub fn value(value: &Value) -> Cow<'_, Value> {
    redacted_value(value, Scope::default())
}

/// Returns the names of arguments that the tool marks, or that its schema marks as write-only.
pub(crate) fn sensitive_names(tool: &ToolSpec) -> Marked {
    // Only the last part of a pointer is used: it is safer to hide too much than too little.
    let last = |name: &String| name.rsplit('/').next().unwrap_or_default().replace("~1", "/").replace("~0", "~");
    let mut names: Vec<String> = tool.sensitive.iter().map(last).collect();
    marked_names(&tool.input_schema, &mut names);
    let real = marked(names.clone());
    // Arguments that have both an alias and its real name are recorded as they came.
    let is_secret = |name: &&String| is_secret_name(name, real.as_deref().unwrap_or_default());
    let aliases = tool.argument_aliases.iter().filter(|(_, name)| is_secret(name));
    names.extend(aliases.map(|(alias, _)| alias.clone()));
    marked(names)
}

pub(crate) fn marked(names: Vec<String>) -> Marked {
    let names: BTreeSet<String> = names.into_iter().collect();
    if names.is_empty() { None } else { Some(names.into_iter().collect()) }
}

/// Collects the names of all properties that a schema marks, at every depth.
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
    marked.binary_search_by(|marked| marked.as_str().cmp(name)).is_ok() || patterns::SECRET_NAME.is_match(name)
}

/// Maximum number of levels of JSON as text within JSON. A text nested deeper is hidden as a whole.
const TEXTS_WITHIN_TEXTS_MAX: u32 = 3;

fn redacted_value<'a>(value: &'a Value, scope: Scope<'_>) -> Cow<'a, Value> {
    clean(value, scope, TEXTS_WITHIN_TEXTS_MAX).map_or(Cow::Borrowed(value), Cow::Owned)
}

/// Returns the value without its secrets, or `None` if it has none.
fn clean(value: &Value, scope: Scope<'_>, texts: u32) -> Option<Value> {
    match value {
        Value::String(text) => match clean_text(text, scope, texts) {
            Cow::Owned(text) => Some(Value::String(text)),
            Cow::Borrowed(_) => None,
        },
        Value::Array(items) => {
            let mut copy = None;
            for (index, item) in items.iter().enumerate() {
                if let Some(item) = clean(item, scope, texts) {
                    copy.get_or_insert_with(|| items.clone())[index] = item;
                }
            }
            copy.map(Value::Array)
        }
        Value::Object(map) => clean_map(map, scope, texts).map(Value::Object),
        Value::Number(number) => {
            let is_in = |known: &SecretSet| known.is_in(&number.to_string());
            let is_known = known_secrets::of_process().is_some_and(|known| is_in(&known));
            (is_known || scope.own.is_some_and(|own| is_in(own))).then(|| json!(REDACTED))
        }
        Value::Bool(_) | Value::Null => None,
    }
}

fn clean_map(map: &Map<String, Value>, scope: Scope<'_>, texts: u32) -> Option<Map<String, Value>> {
    // Shorter names contain no secret of a known shape.
    const NAME_BYTES_MIN: usize = 12;
    let mut copy: Option<Map<String, Value>> = None;
    for (index, (name, value)) in map.iter().enumerate() {
        let own = scope.own.filter(|own| !own.hides_everything());
        let is_short = name.len() < NAME_BYTES_MIN && known_secrets::of_process().is_none() && own.is_none();
        let clean_name = match is_short {
            true => None,
            false => Some(places(name, own).0).filter(|places| !places.is_empty()).map(|places| hidden(name, &places)),
        };
        let clean_value = match is_secret_name(name, scope.marked) {
            true => Some(json!(REDACTED)).filter(|hidden| hidden != value),
            false => clean(value, scope, texts),
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

fn clean_text<'a>(text: &'a str, scope: Scope<'_>, texts: u32) -> Cow<'a, str> {
    let (places, _) = places(text, scope.own);
    // Without a backslash the patterns see every secret, so most texts need not be parsed as JSON.
    let is_marked = || scope.marked.iter().any(|name| text.contains(name.as_str()));
    if (!places.is_empty() || text.contains('\\') || is_marked())
        && let Some(parsed) = parse_json_text(text)
    {
        if texts == 0 {
            return Cow::Owned(REDACTED.to_owned());
        }
        if let Some(parsed) = clean(&parsed, scope, texts - 1) {
            let text = parsed.to_string();
            return Cow::Owned(match self::places(&text, scope.own).0 {
                places if places.is_empty() => text,
                places => hidden(&text, &places),
            });
        }
    }
    if places.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(hidden(text, &places)) }
}

/// Parses a text that is itself JSON, such as lists, objects and whole arguments that models write.
fn parse_json_text(text: &str) -> Option<Value> {
    let is_like_it = text.trim_start().starts_with(['{', '[', '"']);
    is_like_it.then(|| serde_json::from_str(text).ok()).flatten()
}

/// Finds the places of secrets, in order and not overlapping; and the last one, if it may continue after the text.
fn places(text: &str, own: Option<&Arc<SecretSet>>) -> (Vec<Range<usize>>, Option<patterns::OpenSecret>) {
    let patterns::Suspects { mut places, open_secret } = patterns::find(text);
    if let Some(known) = known_secrets::of_process() {
        known.find(text, &mut places);
    }
    if let Some(own) = own {
        own.find(text, &mut places);
    }
    (merged(places), open_secret)
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

/// Replaces these places of the text.
fn hidden(text: &str, places: &[Range<usize>]) -> String {
    hidden_between(text, places, 0..text.len())
}

/// Replaces these places in a part of the text.
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

    // Shows: D8.2
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
    fn a_secret_argument_is_hidden_in_every_text_of_its_call() {
        let given =
            json!({"seal": "plover-4410", "pin": 4711, "cvv": "123", "flag": "no", "query": "plover-4410 4711"});
        let of_call = |given: &Value| {
            let names = ["seal", "pin", "cvv", "flag"].map(str::to_owned).to_vec();
            Redacted::new(Arc::new(given.clone()), marked(names))
        };
        let redacted = of_call(&given);
        assert_eq!(
            *redacted.value(),
            json!({"seal": REDACTED, "pin": REDACTED, "cvv": REDACTED, "flag": REDACTED, "query": "[redacted] [redacted]"})
        );
        // Six characters and more are found within words and in other spellings, three to five as words, fewer not at
        // all.
        for (text, shown) in [
            ("xplover-4410x 0144-revolp", "x[redacted]x [redacted]"),
            ("4711, (123)", "[redacted], ([redacted])"),
            ("47110 1234 x123", "47110 1234 x123"),
            ("no plove", "no plove"),
        ] {
            assert_eq!(redacted.text(text), shown);
            for size in 1..5 {
                let mut stream = redacted.stream();
                let mut streamed: String = text.as_bytes().chunks(size).map(|bytes| stream.push(bytes)).collect();
                streamed.push_str(&stream.finish());
                assert_eq!(streamed, shown, "in pieces of {size} bytes");
            }
        }
        // A call with more secrets than the maximum shows no text at all.
        let large = of_call(&json!({"seal": "x".repeat(OWN_BYTES_MAX + 1), "note": "hello"}));
        assert_eq!(*large.value(), json!({"seal": REDACTED, "note": REDACTED}));
        let mut stream = large.stream();
        assert_eq!([large.text("hello").into_owned(), stream.push(b"hello") + &stream.finish()], [REDACTED; 2]);
        let plain = of_call(&json!({"query": "plover-4410"}));
        assert!(!plain.has_secrets() && plain.is_whole());
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
    fn arguments_without_secrets_are_borrowed_and_secrets_are_never_shown() {
        let plain = Redacted::from(json!({"path": "a", "pattern": "fn main"}));
        assert!(matches!(plain.value(), Cow::Borrowed(_)));
        let secret = Redacted::from(json!({"password": "canary"}));
        assert!(!format!("{secret:?} {}", serde_json::to_string(&secret).expect("plain data")).contains("canary"));
    }
}

//! Reads the options of a call from the `_meta` of its request. Isolation, network, limits, permissions and
//! confirmations are not among them: only the operator sets those.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::RequestMetaObject;
use serde_json::{Map, Value};
use wieldy_core::name::{did_you_mean, near_misses};
use wieldy_core::{CallError, Code, Options, Priority, TIMEOUT_MAX};

/// The beginning of the keys that are options.
const OURS: &str = "wieldy/";
/// The keys of all options. The last one is the earlier spelling of the idempotency key.
const NAMES: [&str; 10] = [
    "wieldy/timeout_ms",
    "wieldy/deadline_ms",
    "wieldy/retries",
    "wieldy/retry_delay_ms",
    "wieldy/priority",
    "wieldy/idempotency_key",
    "wieldy/labels",
    "wieldy/context",
    "wieldy/metadata",
    "wieldy/idempotency-key",
];

/// Maximum number of retries that a request may ask for.
const RETRIES_MAX: u64 = 10;
/// Maximum delay before the first retry. A call that waits for its next attempt takes no slot, so no other limit counts
/// it.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(60);
/// Maximum length of an idempotency key.
const KEY_BYTES_MAX: usize = 512;
/// Maximum number and length of labels.
const LABELS_MAX: usize = 16;
const LABEL_CHARS_MAX: usize = 64;

/// The options of a request, and the objects that go with its call.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestOptions {
    pub(crate) options: Options,
    pub(crate) context: Option<Arc<Value>>,
    pub(crate) metadata: Option<Arc<Value>>,
    /// The client's own entries, for servers that are allowed to have them.
    pub(crate) notes: Option<Arc<Value>>,
}

/// The options of a request of which one is wrong or unknown.
#[derive(Debug, Clone)]
pub(crate) struct WrongOptions {
    /// The error of the call.
    pub(crate) error: CallError,
    /// The objects that go with the call, without any options. The call is recorded with them.
    pub(crate) objects: RequestOptions,
}

impl RequestOptions {
    /// Reads the options of a request.
    pub(crate) fn read(meta: Option<&RequestMetaObject>, priority_max: Priority) -> Result<Self, Box<WrongOptions>> {
        let (mut read, mut mistake) = (Self::default(), None);
        let mut notes = Map::new();
        for (key, value) in meta.into_iter().flat_map(|meta| meta.0.0.iter()) {
            match key.strip_prefix(OURS) {
                Some(name) => mistake = mistake.or(read.take(name, key, value, priority_max).err()),
                None if is_of_mcp(key) => {}
                None => _ = notes.insert(key.clone(), value.clone()),
            }
        }
        read.notes = (!notes.is_empty()).then(|| Arc::new(Value::Object(notes)));
        match mistake {
            None => Ok(read),
            Some(error) => {
                read.options = Options::default();
                Err(Box::new(WrongOptions { error: *error, objects: read }))
            }
        }
    }

    fn take(&mut self, name: &str, key: &str, value: &Value, priority_max: Priority) -> Result<(), Box<CallError>> {
        let options = &mut self.options;
        match name {
            "timeout_ms" => options.timeout = Some(milliseconds(key, value, TIMEOUT_MAX)?),
            "deadline_ms" => options.deadline = Some(milliseconds(key, value, TIMEOUT_MAX)?),
            "retry_delay_ms" => options.retry_delay = Some(milliseconds(key, value, RETRY_DELAY_MAX)?),
            "retries" => {
                let wanted = || format!("a whole number of retries from 0 to {RETRIES_MAX}");
                let retries = value.as_u64().filter(|retries| *retries <= RETRIES_MAX);
                options.retries = Some(retries.ok_or_else(|| wrong(key, &wanted()))? as u32);
            }
            "priority" => options.priority = priority(key, value, priority_max)?,
            "idempotency_key" | "idempotency-key" => {
                if options.idempotency_key.is_some() {
                    let message = "`_meta` has the idempotency key twice, in both spellings";
                    return Err(refused(message.into(), "send `wieldy/idempotency_key` alone"));
                }
                let text = value.as_str().filter(|text| (1..=KEY_BYTES_MAX).contains(&text.len()));
                let text = text.ok_or_else(|| wrong(key, &format!("a text of 1 to {KEY_BYTES_MAX} bytes")))?;
                options.idempotency_key = Some(text.to_owned());
            }
            "labels" => options.labels = labels(key, value)?,
            // The executor checks both, and records what it refuses.
            "context" => self.context = Some(Arc::new(value.clone())),
            "metadata" => self.metadata = Some(Arc::new(value.clone())),
            _ => return Err(unknown(key)),
        }
        Ok(())
    }
}

/// Returns true if an entry belongs to MCP itself: it is about this connection, and not about the next one.
fn is_of_mcp(key: &str) -> bool {
    let prefix = key.split_once('/').map_or("", |(prefix, _)| prefix);
    key == "progressToken" || prefix.split('.').any(|label| ["modelcontextprotocol", "mcp"].contains(&label))
}

fn milliseconds(key: &str, value: &Value, longest: Duration) -> Result<Duration, Box<CallError>> {
    let longest = longest.as_millis() as u64;
    let milliseconds = value.as_u64().filter(|milliseconds| (1..=longest).contains(milliseconds));
    let wanted = || format!("a whole number of milliseconds from 1 to {longest}");
    milliseconds.map(Duration::from_millis).ok_or_else(|| wrong(key, &wanted()))
}

fn priority(key: &str, value: &Value, priority_max: Priority) -> Result<Priority, Box<CallError>> {
    let number = || value.as_i64().and_then(|number| i8::try_from(number).ok()).map(Priority);
    let priority = value.as_str().and_then(|text| text.parse().ok()).or_else(number);
    let wanted = "`low`, `normal`, `high` or a number from -128 to 127";
    let priority = priority.ok_or_else(|| wrong(key, wanted))?;
    if priority > priority_max {
        let message = format!("`{key}` is {}, and calls over MCP have at most {}", priority.0, priority_max.0);
        return Err(refused(message, "leave it out, or have the operator set `serve.mcp.priority-max`"));
    }
    Ok(priority)
}

fn labels(key: &str, value: &Value) -> Result<Vec<String>, Box<CallError>> {
    let label = |label: &Value| {
        let text = label.as_str().filter(|text| (1..=LABEL_CHARS_MAX).contains(&text.chars().count()))?;
        Some(text.to_owned())
    };
    let labels = value.as_array().filter(|labels| labels.len() <= LABELS_MAX);
    let labels = labels.and_then(|labels| labels.iter().map(label).collect::<Option<Vec<String>>>());
    let wanted = || format!("a list of at most {LABELS_MAX} texts of 1 to {LABEL_CHARS_MAX} characters");
    labels.ok_or_else(|| wrong(key, &wanted()))
}

fn wrong(key: &str, wanted: &str) -> Box<CallError> {
    refused(format!("`{key}` in `_meta` is {wanted}"), "correct the option or leave it out; nothing was run")
}

fn unknown(key: &str) -> Box<CallError> {
    let key: String = key.chars().take(100).collect();
    // The beginning that all keys share would make every name a near miss.
    let bare = |name: &'static str| &name[OURS.len()..];
    let near =
        near_misses(key.strip_prefix(OURS).unwrap_or(&key), NAMES[..NAMES.len() - 1].iter().map(|name| bare(name)));
    let near: Vec<String> = near.into_iter().map(|name| format!("{OURS}{name}")).collect();
    let near = did_you_mean(&near.iter().map(String::as_str).collect::<Vec<_>>());
    let known = NAMES[..NAMES.len() - 1].join("`, `");
    let advice = near.unwrap_or_else(|| format!("a request may have `{known}`"));
    refused(format!("there is no option `{key}` for a call over MCP"), &advice)
}

fn refused(message: String, advice: &str) -> Box<CallError> {
    Box::new(CallError::new(Code::ValidationFailed, message).suggest(advice))
}

#[cfg(test)]
mod tests {
    use rmcp::model::MetaObject;
    use serde_json::json;

    use super::*;

    fn read(meta: Value) -> Result<RequestOptions, (String, Option<String>)> {
        let Value::Object(map) = meta else { panic!("an object") };
        let read = RequestOptions::read(Some(&RequestMetaObject(MetaObject(map))), Priority::NORMAL);
        read.map_err(|wrong| (wrong.error.message, wrong.error.suggestion))
    }

    #[test]
    fn every_option_is_read() {
        let read = read(json!({
            "wieldy/timeout_ms": 60_000, "wieldy/deadline_ms": 1, "wieldy/retries": 10, "wieldy/retry_delay_ms": 200,
            "wieldy/priority": "low", "wieldy/idempotency_key": "k", "wieldy/labels": ["a", "b"],
            "wieldy/context": {"room": "a"}, "wieldy/metadata": {"run": 1}, "progressToken": 5, "other/timeout": 0,
        }))
        .unwrap();
        let expected = Options {
            timeout: Some(Duration::from_secs(60)),
            deadline: Some(Duration::from_millis(1)),
            retries: Some(10),
            retry_delay: Some(Duration::from_millis(200)),
            priority: Priority::LOW,
            idempotency_key: Some("k".into()),
            labels: vec!["a".into(), "b".into()],
            ..Options::default()
        };
        assert_eq!(format!("{:?}", read.options), format!("{expected:?}"));
        assert_eq!(read.notes, Some(json!({"other/timeout": 0}).into()));
        assert_eq!((read.context, read.metadata), (Some(json!({"room": "a"}).into()), Some(json!({"run": 1}).into())));
    }

    #[test]
    fn entries_of_mcp_are_no_notes() {
        let read = read(json!({
            "progressToken": 1, "io.modelcontextprotocol/protocolVersion": "x", "modelcontextprotocol.io/a": 1,
            "tools.mcp.com/a": 1, "traceparent": "00-a", "com.example/a": {"b": 1}, "example.mcps/a": 2,
        }));
        let expected = json!({"traceparent": "00-a", "com.example/a": {"b": 1}, "example.mcps/a": 2});
        assert_eq!(read.unwrap().notes, Some(expected.into()));
    }

    #[test]
    fn wrong_values_and_unknown_names_are_told() {
        let of = |key: &str, value: Value| read(json!({ key: value })).unwrap_err();
        let advice = Some("correct the option or leave it out; nothing was run".to_owned());
        for (name, longest) in [("timeout_ms", 86_400_000), ("deadline_ms", 86_400_000), ("retry_delay_ms", 60_000)] {
            let key = format!("wieldy/{name}");
            let ms = format!("a whole number of milliseconds from 1 to {longest}");
            for value in [json!(0), json!(-1), json!(1.5), json!("1"), json!(longest + 1), json!(null), json!([1])] {
                assert_eq!(of(&key, value), (format!("`{key}` in `_meta` is {ms}"), advice.clone()));
            }
        }
        for (key, value) in [
            ("wieldy/retries", json!(11)),
            ("wieldy/retries", json!("1")),
            ("wieldy/priority", json!("urgent")),
            ("wieldy/priority", json!(128)),
            ("wieldy/priority", json!(true)),
            ("wieldy/idempotency_key", json!("")),
            ("wieldy/idempotency-key", json!("k".repeat(513))),
            ("wieldy/labels", json!("a")),
            ("wieldy/labels", json!([1])),
            ("wieldy/labels", json!([""])),
            ("wieldy/labels", json!(["a".repeat(65)])),
            ("wieldy/labels", json!(vec!["a"; 17])),
        ] {
            assert!(of(key, value.clone()).0.starts_with(&format!("`{key}` in `_meta` is ")), "{key} {value}");
        }
        let (message, advice) = of("wieldy/priority", json!("high"));
        assert_eq!(message, "`wieldy/priority` is 10, and calls over MCP have at most 0");
        assert_eq!(advice.unwrap(), "leave it out, or have the operator set `serve.mcp.priority-max`");
        let (message, advice) = of("wieldy/timeout", json!(5));
        assert_eq!(message, "there is no option `wieldy/timeout` for a call over MCP");
        assert_eq!(advice.unwrap(), "did you mean `wieldy/timeout_ms`?");
        let known = "a request may have `wieldy/timeout_ms`, `wieldy/deadline_ms`, `wieldy/retries`, \
                     `wieldy/retry_delay_ms`, `wieldy/priority`, `wieldy/idempotency_key`, `wieldy/labels`, \
                     `wieldy/context`, `wieldy/metadata`";
        assert_eq!(of("wieldy/isolation", json!("none")).1.unwrap(), known);
        for name in ["isolation", "network", "limits", "permissions", "confirm", "fresh", ""] {
            assert!(of(&format!("wieldy/{name}"), json!(1)).0.starts_with("there is no option"), "{name}");
        }
        let twice = read(json!({"wieldy/idempotency_key": "a", "wieldy/idempotency-key": "a"})).unwrap_err();
        assert_eq!(twice.0, "`_meta` has the idempotency key twice, in both spellings");
    }
}

//! Fills in why a call failed: the trace of its error, and the foreign data of a server.
//!
//! A trace comes from a server's error data, from a Python, Node or Rust traceback at the end of a program's standard
//! error, or from the place of a panic. Traces and data are redacted and bounded before anyone gets them.

mod panics;
mod printed;

use serde_json::Value;

pub use panics::{CaughtPanic, record_panic_places};
pub(crate) use panics::{forget_place, take_place};

use crate::error::CallError;
use crate::redact::{self, Redacted};
use crate::schema::measure;

/// Maximum bytes of a trace, and of a server's error data as JSON.
pub(crate) const TRACE_BYTES_MAX: usize = 16 * 1024;
/// Maximum depth of a server's error data. Readers of a result have a limit of depth for the result as a whole.
const DATA_DEPTH_MAX: usize = 64;
/// The bytes of standard error that are searched for a traceback.
pub(crate) const STDERR_BYTES_MAX: usize = 2 * TRACE_BYTES_MAX;
/// The keys of a server's error data that hold a trace.
pub(crate) const TRACE_KEYS: [&str; 3] = ["traceback", "stack", "trace"];

impl CallError {
    /// Adds the data that a server sent with its error. `server` marks them as that server's words.
    #[must_use]
    pub fn server_data(self, server: &str, data: Value) -> Self {
        self.detail("data", data).detail("data_from", server)
    }
}

/// Completes an error: fills in its trace, and redacts and cuts the trace and the server's data. `output` is the end of
/// what the program printed as errors.
pub(crate) fn complete(error: &mut CallError, output: Option<&str>, arguments: &Redacted) {
    let is_foreign = error.details.contains_key("data_from");
    let data = error.details.get_mut("data").filter(|_| is_foreign);
    if error.trace.is_none() {
        let given = data.as_deref().and_then(trace_in);
        error.trace = given.or_else(|| output.and_then(printed::traceback).map(str::to_owned));
    }
    if let Some(data) = data {
        *data = redact::value(data).into_owned();
        arguments.hide_in(data);
        let json = data.to_string();
        if json.len() > TRACE_BYTES_MAX || measure(data, DATA_DEPTH_MAX, usize::MAX).is_none() {
            *data = cut(&json, TRACE_BYTES_MAX).into();
        }
    }
    if let Some(trace) = &mut error.trace {
        *trace = cut(arguments.text(trace).trim_end(), TRACE_BYTES_MAX);
    }
}

/// Returns the trace in a server's error data: a text or a list of lines.
fn trace_in(data: &Value) -> Option<String> {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(lines) => {
            let lines: Option<Vec<&str>> = lines.iter().map(Value::as_str).collect();
            lines.map(|lines| lines.iter().map(|line| line.trim_end_matches('\n')).collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    };
    let found = TRACE_KEYS.iter().filter_map(|key| data.get(key)).find_map(text);
    found.filter(|trace| !trace.trim().is_empty())
}

/// Cuts a text to this many bytes: its beginning and its end, with a note between them.
pub(crate) fn cut(text: &str, bytes_max: usize) -> String {
    const NOTE_BYTES_MAX: usize = 64;
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let half = bytes_max.saturating_sub(NOTE_BYTES_MAX) / 2;
    let head = &text[..text.floor_char_boundary(half)];
    let tail = &text[text.ceil_char_boundary(text.len() - half)..];
    format!("{head}\n… {} of {} bytes left out …\n{tail}", text.len() - head.len() - tail.len(), text.len())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::error::Code;

    fn completed(data: Value, stderr: Option<&str>) -> CallError {
        let arguments = Redacted::new(Arc::new(json!({"password": "rosebud-1941"})), None);
        let mut error = CallError::new(Code::UpstreamProtocolError, "no").server_data("mcp:s", data);
        complete(&mut error, stderr, &arguments);
        error
    }

    // Shows: E3.3
    #[test]
    fn a_servers_data_give_the_trace() {
        for (data, trace) in [
            (json!({"traceback": "a\nb\n", "stack": "c"}), Some("a\nb")),
            (json!({"stack": ["a\n", "b"]}), Some("a\nb")),
            (json!({"trace": "t"}), Some("t")),
            (json!({"trace": " ", "stack": 7}), None),
            (json!("traceback"), None),
        ] {
            assert_eq!(completed(data.clone(), None).trace.as_deref(), trace, "{data}");
        }
    }

    // Shows: E3.3
    #[test]
    fn a_trace_and_data_show_no_secret_and_are_bounded() {
        let error = completed(json!({"trace": "login(rosebud-1941)", "hint": "not rosebud-1941"}), None);
        assert_eq!(error.trace.as_deref(), Some("login([redacted])"));
        let data = json!({"trace": "login([redacted])", "hint": "not [redacted]"});
        assert_eq!(json!(error.details), json!({"data": data, "data_from": "mcp:s"}));
        let long = "é".repeat(20_000) + "rosebud-1941";
        let error = completed(json!({"trace": long, "hint": "x"}), None);
        let trace = error.trace.expect("it has one");
        assert!(trace.len() <= TRACE_BYTES_MAX && trace.ends_with("é[redacted]"), "{}", trace.len());
        assert!(trace.contains(" of 40010 bytes left out …"));
        let data = error.details["data"].as_str().expect("it is cut").to_owned();
        assert!(data.len() <= TRACE_BYTES_MAX && data.starts_with(r#"{"trace":"éé"#), "{data}");
    }

    #[test]
    fn data_too_deep_for_the_readers_of_a_result_are_a_text() {
        let nested =
            |levels: usize| (1..levels).fold(json!({"hint": "rosebud-1941"}), |inner, _| json!({ "a": inner }));
        let shallow = completed(nested(64), None);
        assert!(shallow.details["data"].is_object());
        let deep = completed(nested(65), None);
        let text = nested(65).to_string().replace("rosebud-1941", "[redacted]");
        assert_eq!(deep.details["data"], json!(text));
    }

    #[test]
    fn only_a_servers_data_are_taken_for_them() {
        let mut error = CallError::new(Code::ExecutionError, "no").detail("data", json!({"trace": "t"}));
        complete(&mut error, None, &Redacted::default());
        assert_eq!(error.trace, None);
    }
}

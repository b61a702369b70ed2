//! Extracts the request id and the tool name from a message that is too long to be stored.

use rmcp::model::RequestId;
use serde_json::Value;

use super::stdio::{ID_BYTES_MAX, request_id};

/// Maximum length of a stored token: an id with every character escaped.
const TOKEN_BYTES_MAX: usize = 6 * ID_BYTES_MAX;

/// The depth up to which keys are read: those of the message and of `params`.
const DEPTH_MAX: usize = 2;

/// A streaming scanner that stores only the few strings that identify a message. Input that is not JSON yields nothing.
#[derive(Default)]
pub(super) struct Scan {
    depth: usize,
    /// The enclosing objects and arrays of the next byte, outermost first.
    levels: [Nesting; DEPTH_MAX],
    /// The current string or number. `None` if it is too long.
    token: Option<Vec<u8>>,
    is_text: bool,
    is_escaped: bool,
    id: Option<Value>,
    method: Option<Value>,
    name: Option<Value>,
}

#[derive(Default)]
struct Nesting {
    is_object: bool,
    /// The key whose value comes next. `None` if a key comes next.
    key: Option<Value>,
    /// The last string, which may turn out to be a key.
    text: Option<Value>,
}

impl Scan {
    /// Returns the error for a message that is longer than `bytes_max`.
    pub(super) fn complaint(bytes_max: usize) -> String {
        format!("a message can have at most {bytes_max} bytes")
    }

    /// Scans the next bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.push_one(*byte);
        }
    }

    /// Returns the id if the message is a request.
    pub(super) fn id(&self) -> Option<RequestId> {
        request_id(self.id.as_ref()?).filter(|_| self.method.is_some())
    }

    /// Returns the tool's name if the message is a call.
    pub(super) fn tool(&self) -> Option<&str> {
        let is_call = self.method.as_ref().is_some_and(|method| method == "tools/call");
        self.name.as_ref().filter(|_| is_call)?.as_str()
    }

    fn push_one(&mut self, byte: u8) {
        if self.is_text {
            self.keep(byte);
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => {
                    self.is_text = false;
                    self.take();
                }
                _ => {}
            }
            return;
        }
        match byte {
            b'"' => {
                self.is_text = true;
                self.token = Some(vec![byte]);
            }
            b'{' | b'[' => {
                self.depth += 1;
                if let Some(level) = self.level() {
                    *level = Nesting { is_object: byte == b'{', ..Nesting::default() };
                }
            }
            b'}' | b']' => {
                self.take();
                self.depth = self.depth.saturating_sub(1);
            }
            b':' => {
                if let Some(level) = self.level().filter(|level| level.is_object) {
                    level.key = level.text.take();
                }
            }
            b',' => {
                self.take();
                if let Some(level) = self.level() {
                    (level.key, level.text) = (None, None);
                }
            }
            _ if byte.is_ascii_whitespace() => self.take(),
            _ => {
                self.token.get_or_insert_default();
                self.keep(byte);
            }
        }
    }

    fn level(&mut self) -> Option<&mut Nesting> {
        self.depth.checked_sub(1).and_then(|at| self.levels.get_mut(at))
    }

    fn keep(&mut self, byte: u8) {
        if let Some(token) = &mut self.token {
            token.push(byte);
            if token.len() > TOKEN_BYTES_MAX {
                self.token = None;
            }
        }
    }

    /// Handles the end of a string or number.
    fn take(&mut self) {
        let Some(token) = self.token.take().filter(|_| self.depth <= DEPTH_MAX) else { return };
        let Ok(value) = serde_json::from_slice::<Value>(&token) else { return };
        let is_params = self.depth == 1 || self.levels[0].key.as_ref().is_some_and(|key| key == "params");
        let depth = self.depth;
        let Some(level) = self.level().filter(|level| level.is_object && is_params) else { return };
        let Some(key) = &level.key else {
            level.text = Some(value);
            return;
        };
        match (depth, key.as_str()) {
            (1, Some("id")) => self.id = Some(value),
            (1, Some("method")) => self.method = Some(value),
            (2, Some("name")) => self.name = Some(value),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn scanned(text: &str, size: usize) -> (Option<RequestId>, Option<String>) {
        let mut scan = Scan::default();
        text.as_bytes().chunks(size).for_each(|bytes| scan.push(bytes));
        (scan.id(), scan.tool().map(str::to_owned))
    }

    #[test]
    fn id_and_tool_are_found_at_any_position() {
        let number = |number| Some(RequestId::Number(number));
        let call = |name: &str| Some(name.to_owned());
        for (text, id, tool) in [
            (
                r#"{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"a","arguments":{"#,
                number(5),
                call("a"),
            ),
            (
                r#"{ "method" : "tools/call", "params" : {"arguments":{"name":"x","id":7,"t":"\"id\":9}"},"name":"a"}, "id" : -3 }"#,
                number(-3),
                call("a"),
            ),
            (
                r#"{"params":{"name":"é\u0041"},"method":"tools/call","id":"x\"y"}"#,
                Some(RequestId::String("x\"y".into())),
                call("éA"),
            ),
            (r#"{"id":1,"method":"tools/list","params":{"name":"a"}}"#, number(1), None),
            (r#"{"id":1,"method":"tools/call","params":[{"name":"a"}]}"#, number(1), None),
            (r#"{"id":1,"method":"tools/call","other":{"name":"a"}}"#, number(1), None),
            (r#"{"id":1.5,"method":"tools/call","params":{"name":5}}"#, None, None),
            (r#"{"id":1,"result":{"name":"a"}}"#, None, None),
            (r#"[{"id":1,"method":"tools/call","params":{"name":"a"}}]"#, None, None),
            ("xxxx", None, None),
            ("", None, None),
        ] {
            for size in [1, 7, 1000] {
                assert_eq!(scanned(text, size), (id.clone(), tool.clone()), "{text}");
            }
        }
    }

    proptest! {
        #[test]
        fn the_scan_finds_the_id_and_tool_of_the_message(
            id in any::<i64>(), name in "\\PC{0,12}", text in "[\\PC\"\\\\:,{}\\[\\]]{0,30}", is_last in any::<bool>(),
        ) {
            let arguments = json!({"name": text, "id": text, "deep": [{"method": text}]});
            let params = json!({"arguments": arguments, "name": name}).to_string();
            let message = match is_last {
                true => format!(r#"{{"method":"tools/call","params":{params},"id":{id}}}"#),
                false => format!(r#"{{"id":{id},"method":"tools/call","params":{params}}}"#),
            };
            prop_assert_eq!(scanned(&message, 5), (Some(RequestId::Number(id)), Some(name)));
        }

        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut scan = Scan::default();
            scan.push(&bytes);
            let _ = (scan.id(), scan.tool());
        }
    }
}

//! Copies arguments into HTTP headers (`x-mcp-header`), which servers of the newest revision ask for. Proxies can then
//! route calls without parsing bodies.

use std::collections::HashMap;
use std::sync::RwLock;

use http::header::{HeaderName, HeaderValue};
use rmcp::model::{JsonObject, Tool};
use serde_json::{Map, Value};

use crate::convert::base64;

const METHOD: HeaderName = HeaderName::from_static("mcp-method");
const NAME: HeaderName = HeaderName::from_static("mcp-name");
const CALL: HeaderValue = HeaderValue::from_static("tools/call");

/// The arguments to copy, by tool.
#[derive(Default)]
pub(super) struct HeaderParams {
    by_tool: RwLock<HashMap<String, Vec<HeaderParam>>>,
}

/// An argument to copy, and its header.
struct HeaderParam {
    path: Vec<String>,
    header: HeaderName,
}

impl HeaderParams {
    /// Learns the header annotations of a server's tools.
    pub(super) fn learn(&self, tools: &[Tool]) {
        let mut by_tool = self.by_tool.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        for tool in tools {
            let mut params = Vec::new();
            collect(&tool.input_schema, &mut Vec::new(), &mut params);
            if params.is_empty() {
                by_tool.remove(&*tool.name);
            } else {
                by_tool.insert(tool.name.to_string(), params);
            }
        }
    }

    /// Returns the headers of a call.
    pub(super) fn headers(&self, tool: &str, arguments: &Map<String, Value>) -> Vec<(HeaderName, HeaderValue)> {
        let mut headers = Vec::with_capacity(2);
        headers.push((METHOD, CALL));
        headers.extend(header_value(tool).map(|name| (NAME, name)));
        let by_tool = self.by_tool.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        for HeaderParam { path, header } in by_tool.get(tool).into_iter().flatten() {
            let argument = path.split_first().and_then(|(first, rest)| {
                rest.iter().try_fold(arguments.get(first)?, |argument, step| argument.get(step))
            });
            let value = match argument {
                Some(Value::String(text)) => header_value(text),
                Some(plain @ (Value::Bool(_) | Value::Number(_))) => header_value(&plain.to_string()),
                _ => None,
            };
            headers.extend(value.map(|value| (header.clone(), value)));
        }
        headers
    }
}

/// Collects the properties that are annotated with a header, at every depth.
fn collect(schema: &JsonObject, path: &mut Vec<String>, params: &mut Vec<HeaderParam>) {
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        let Some(property) = property.as_object() else { continue };
        path.push(name.clone());
        let header = property.get("x-mcp-header").and_then(Value::as_str).filter(|header| !header.is_empty());
        if let Some(Ok(header)) = header.map(|header| HeaderName::try_from(format!("mcp-param-{header}"))) {
            params.push(HeaderParam { path: path.clone(), header });
        }
        collect(property, path, params);
        path.pop();
    }
}

/// Encodes text as a header value: unchanged, or as base64 if a header cannot hold it.
fn header_value(text: &str) -> Option<HeaderValue> {
    let needs_base64 = text.bytes().any(|byte| !(0x20..=0x7e).contains(&byte))
        || text.starts_with(' ')
        || text.ends_with(' ')
        || text.starts_with("=?base64?") && text.ends_with("?=");
    match needs_base64 {
        true => HeaderValue::try_from(format!("=?base64?{}?=", base64(text.as_bytes()))),
        false => HeaderValue::from_str(text),
    }
    .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_a_header_cannot_hold_are_sent_in_base64() {
        let held = |text: &str| header_value(text).unwrap().to_str().unwrap().to_owned();
        let cases = [
            ("plain text", "plain text"),
            ("", ""),
            (" x", "=?base64?IHg=?="),
            ("é", "=?base64?w6k=?="),
            ("a\nb", "=?base64?YQpi?="),
            ("\u{7f}", "=?base64?fw==?="),
            ("=?base64?eA==?=", "=?base64?PT9iYXNlNjQ/ZUE9PT89?="),
        ];
        for (text, header) in cases {
            assert_eq!(held(text), header);
        }
    }
}

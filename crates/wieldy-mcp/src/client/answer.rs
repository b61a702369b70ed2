//! Parses a server's response to a call. A tool result, by far the most common response, is parsed in one pass into our
//! types. The SDK's general message type is built only for all other messages.

use std::borrow::Cow;
use std::fmt;

use rmcp::model::{CallToolResult, ContentBlock, RequestId, ServerJsonRpcMessage, ServerResult, Task};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use wieldy_core::{CallError, Code, Content, Outcome, PassedOn};

use super::failure::{Failure, first_of};
use crate::convert;

/// The response to a call.
pub(super) enum CallAnswer {
    /// The tool's result, successful or not.
    Outcome(Outcome),
    /// A task that the server made of the call. It must be polled.
    Task(Task),
    /// A request for input from the user.
    Question,
    /// A result of a kind that a tool call cannot have.
    Other,
}

impl From<ServerResult> for CallAnswer {
    fn from(result: ServerResult) -> Self {
        match result {
            ServerResult::CallToolResult(result) => Self::Outcome(outcome(result)),
            ServerResult::CreateTaskResult(created) => Self::Task(created.task),
            ServerResult::InputRequiredResult(_) => Self::Question,
            _ => Self::Other,
        }
    }
}

/// One message from a server.
#[expect(clippy::large_enum_variant, reason = "nearly every message is an answer, so a box would only cost")]
pub(super) enum ServerMessage {
    /// The response to the call.
    Answer(Result<CallAnswer, Failure>),
    /// Another valid MCP message.
    Other(Box<ServerJsonRpcMessage>),
    /// Bytes that are not a valid MCP message.
    Unknown,
}

impl ServerMessage {
    /// Parses a message that may be the response to the call with this id.
    pub(super) fn read(message: &[u8], call: i64) -> Self {
        if let Some(outcome) = serde_json::from_slice(message).ok().and_then(|raw: RawResponse| raw.outcome(call)) {
            return Self::Answer(Ok(CallAnswer::Outcome(outcome)));
        }
        match serde_json::from_slice(message) {
            Ok(ServerJsonRpcMessage::Response(told)) if is_of(&told.id, call) => Self::Answer(Ok(told.result.into())),
            // A server that could not parse the request's id cannot repeat it, so an error without an id counts too.
            Ok(ServerJsonRpcMessage::Error(told)) if told.id.as_ref().is_none_or(|id| is_of(id, call)) => {
                Self::Answer(Err(told.error.into()))
            }
            Ok(message) => Self::Other(Box::new(message)),
            Err(_) => Self::Unknown,
        }
    }

    /// Returns the response of a body that is this one message.
    pub(super) fn answer(self) -> Result<CallAnswer, Failure> {
        let told = match self {
            Self::Answer(answer) => return answer,
            Self::Other(message) => match *message {
                // An error in a response body answers the request, even if it names no id or another one.
                ServerJsonRpcMessage::Error(told) => return Err(told.error.into()),
                ServerJsonRpcMessage::Response(_) => "a response to another request",
                _ => "a response of the wrong type",
            },
            Self::Unknown => "a response that is not valid MCP",
        };
        Err(Failure::protocol(told))
    }
}

/// Returns true if this is the id of the call. Some servers turn a number into a string.
pub(super) fn is_of(id: &RequestId, call: i64) -> bool {
    match id {
        RequestId::Number(id) => *id == call,
        RequestId::String(id) => id.parse() == Ok(call),
    }
}

/// Converts a tool result to our type.
pub(super) fn outcome(result: CallToolResult) -> Outcome {
    let noted = |mut block: ContentBlock| {
        let notes = convert::take_notes(&mut block);
        Some((convert::content(block)?, notes))
    };
    let blocks = result.content.into_iter().filter_map(noted).collect();
    let meta = result.meta.map(|meta| meta.0).unwrap_or_default();
    outcome_of(blocks, result.structured_content, result.is_error == Some(true), meta)
}

fn outcome_of(
    blocks: Vec<(Content, Map<String, Value>)>,
    structured: Option<Value>,
    is_error: bool,
    meta: Map<String, Value>,
) -> Outcome {
    let mut passed_on = PassedOn { meta, ..PassedOn::default() };
    let mut content = Vec::with_capacity(blocks.len());
    for (place, (block, notes)) in blocks.into_iter().enumerate() {
        content.push(block);
        if !notes.is_empty() {
            passed_on.blocks.insert(place, notes);
        }
    }
    let passed_on = (passed_on != PassedOn::default()).then(|| Box::new(passed_on));
    let outcome = Outcome { content, structured, passed_on, ..Outcome::default() };
    if !is_error {
        return outcome;
    }
    let said = Content::text_of(&outcome.content);
    let said = said.trim();
    let message = if said.is_empty() { "the tool says that it failed" } else { said };
    outcome.failed(CallError::new(Code::ToolReportedError, first_of(message)))
}

/// A tool result as it is on the wire.
#[derive(serde::Deserialize)]
struct RawResponse<'a> {
    #[serde(borrow)]
    jsonrpc: Cow<'a, str>,
    id: i64,
    #[serde(borrow)]
    result: RawResult<'a>,
    method: Option<IgnoredAny>,
    error: Option<IgnoredAny>,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawResult<'a> {
    #[serde(borrow)]
    result_type: Option<Cow<'a, str>>,
    content: Vec<RawBlock>,
    #[serde(default, deserialize_with = "present")]
    structured_content: Option<Value>,
    is_error: Option<bool>,
    #[serde(rename = "_meta")]
    meta: Option<Map<String, Value>>,
}

impl RawResponse<'_> {
    /// Returns the result if this message is the response to this call and nothing else.
    fn outcome(self, call: i64) -> Option<Outcome> {
        let RawResult { result_type, content, structured_content, is_error, meta } = self.result;
        let is_complete = result_type.is_none_or(|kind| kind == "complete");
        let is_answer = self.jsonrpc == "2.0" && self.id == call && self.method.is_none() && self.error.is_none();
        let blocks = || content.into_iter().filter_map(|RawBlock(content)| content).collect();
        let is_error = is_error == Some(true);
        (is_answer && is_complete).then(|| outcome_of(blocks(), structured_content, is_error, meta.unwrap_or_default()))
    }
}

/// Tells `null` apart from an absent field.
fn present<'a, D: Deserializer<'a>>(value: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(value).map(Some)
}

/// A content block in our form with its annotations and `_meta`. `None` for kinds that we do not know.
struct RawBlock(Option<(Content, Map<String, Value>)>);

/// A key of a content block. Most blocks have only `type` and `text`.
#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum BlockKey {
    Type,
    Text,
    Other(String),
}

impl<'a> Deserialize<'a> for RawBlock {
    fn deserialize<D: Deserializer<'a>>(block: D) -> Result<Self, D::Error> {
        struct BlockVisitor;
        impl<'a> Visitor<'a> for BlockVisitor {
            type Value = RawBlock;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block of an answer")
            }

            fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<RawBlock, A::Error> {
                let (mut kind, mut text, mut more) = (String::new(), None, Map::new());
                while let Some(key) = map.next_key()? {
                    match key {
                        BlockKey::Type => kind = map.next_value()?,
                        BlockKey::Text => text = Some(map.next_value()?),
                        BlockKey::Other(key) => drop(more.insert(key, map.next_value()?)),
                    }
                }
                match (kind.as_str(), text) {
                    ("text", Some(text)) if more.is_empty() => Ok(RawBlock(Some((Content::Text { text }, Map::new())))),
                    (_, text) => {
                        more.insert("type".into(), kind.into());
                        more.extend(text.map(|text| ("text".to_owned(), text.into())));
                        let mut block =
                            serde_json::from_value::<ContentBlock>(more.into()).map_err(A::Error::custom)?;
                        let notes = convert::take_notes(&mut block);
                        Ok(RawBlock(convert::content(block).map(|content| (content, notes))))
                    }
                }
            }
        }
        block.deserialize_map(BlockVisitor)
    }
}

//! The requests of a connection that have no answer yet. Revision 2025-03-26 lets a client put several messages into one line;
//! the answers to those go back in one line too, once the last of them is there.

use std::borrow::Cow;
use std::collections::HashMap;

use rmcp::ErrorData;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ErrorCode, JsonRpcMessage, ProtocolVersion, RequestId,
    ServerJsonRpcMessage, ServerResult,
};
use serde::Serialize;

/// What JSON-RPC leaves to servers.
const TOO_MANY: ErrorCode = ErrorCode(-32000);

/// Why something is no message, or none that is taken.
#[derive(Debug, PartialEq)]
pub(crate) struct Refused {
    pub(crate) id: Option<RequestId>,
    pub(crate) error: ErrorData,
}

impl Refused {
    pub(crate) fn invalid(id: Option<RequestId>, message: impl Into<Cow<'static, str>>) -> Self {
        Self { id, error: ErrorData::invalid_request(message, None) }
    }
}

impl From<Refused> for ServerJsonRpcMessage {
    fn from(refused: Refused) -> Self {
        Self::error(refused.error, refused.id)
    }
}

/// What is written in one line.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Line {
    One(Box<ServerJsonRpcMessage>),
    Several(Vec<ServerJsonRpcMessage>),
}

impl From<Refused> for Line {
    fn from(refused: Refused) -> Self {
        Self::One(Box::new(refused.into()))
    }
}

/// The requests that have no answer yet.
#[derive(Default)]
pub(crate) struct Unanswered {
    /// With the line that they came in, where there were several.
    requests: HashMap<RequestId, Option<Together>>,
    lines: HashMap<Together, Waiting>,
    lines_begun: u64,
    /// Whether this client may write several messages in one line.
    pub(crate) takes_several: bool,
}

/// Messages that came in one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Together(u64);

/// The answers to messages that came in one line, as far as they are there.
#[derive(Default)]
struct Waiting {
    missing: usize,
    answers: Vec<ServerJsonRpcMessage>,
}

impl Unanswered {
    /// Begins a line of several messages, which is open until it is [ended](Self::end).
    pub(crate) fn begin(&mut self) -> Together {
        self.lines_begun += 1;
        let together = Together(self.lines_begun);
        self.lines.insert(together, Waiting { missing: 1, answers: Vec::new() });
        together
    }

    /// The line has no more messages.
    pub(crate) fn end(&mut self, together: Together) -> Option<Line> {
        self.one_less(together)
    }

    /// Notes a message, unless it is a request that cannot be taken. A client that lets go of a request may thereby complete a
    /// line of answers.
    pub(crate) fn note(
        &mut self,
        message: &ClientJsonRpcMessage,
        together: Option<Together>,
        requests_max: usize,
    ) -> Result<Option<Line>, Refused> {
        match message {
            // The answer to the first one must be the only one with this id.
            JsonRpcMessage::Request(request) if self.requests.contains_key(&request.id) => {
                Err(Refused::invalid(None, "the id is that of a request that has no answer yet"))
            }
            JsonRpcMessage::Request(request) if self.requests.len() >= requests_max => {
                let error = ErrorData::new(TOO_MANY, "too many requests have no answer yet", None);
                Err(Refused { id: Some(request.id.clone()), error })
            }
            JsonRpcMessage::Request(request) => {
                self.requests.insert(request.id.clone(), together);
                if let Some(waiting) = together.and_then(|together| self.lines.get_mut(&together)) {
                    waiting.missing += 1;
                }
                Ok(None)
            }
            JsonRpcMessage::Notification(notification) => match &notification.notification {
                ClientNotification::CancelledNotification(cancelled) => {
                    let let_go = cancelled.params.request_id.as_ref().and_then(|id| self.requests.remove(id)).flatten();
                    Ok(let_go.and_then(|together| self.one_less(together)))
                }
                _ => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Answers what was not taken.
    pub(crate) fn refuse(&mut self, refused: Refused, together: Option<Together>) -> Option<Line> {
        match together.and_then(|together| self.lines.get_mut(&together)) {
            Some(waiting) => {
                waiting.answers.push(refused.into());
                None
            }
            None => Some(Line::from(refused)),
        }
    }

    /// What to write now that there is this message.
    pub(crate) fn answer(&mut self, message: ServerJsonRpcMessage) -> Option<Line> {
        if let JsonRpcMessage::Response(response) = &message
            && let ServerResult::InitializeResult(told) = &response.result
        {
            self.takes_several = takes_several(told.protocol_version.as_str());
        }
        let together = answered(&message).and_then(|id| *self.requests.get(id)?);
        let Some(waiting) = together.and_then(|together| self.lines.get_mut(&together)) else {
            return Some(Line::One(Box::new(message)));
        };
        waiting.answers.push(message);
        self.one_less(together?)
    }

    /// A line was written, so that what it answers is not open any more. Until then it counts: whoever reads no answers may not
    /// go on asking.
    pub(crate) fn written(&mut self, line: &Line) {
        let messages = match line {
            Line::One(message) => std::slice::from_ref(&**message),
            Line::Several(messages) => messages,
        };
        for id in messages.iter().filter_map(answered) {
            self.requests.remove(id);
        }
    }

    fn one_less(&mut self, together: Together) -> Option<Line> {
        let waiting = self.lines.get_mut(&together)?;
        waiting.missing -= 1;
        if waiting.missing > 0 {
            return None;
        }
        let answers = self.lines.remove(&together)?.answers;
        (!answers.is_empty()).then_some(Line::Several(answers))
    }
}

/// Which request a message answers.
fn answered(message: &ServerJsonRpcMessage) -> Option<&RequestId> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

/// Whether clients of a revision may send several messages at once: those of one may.
pub(crate) fn takes_several(revision: &str) -> bool {
    revision == ProtocolVersion::V_2025_03_26.as_str()
}

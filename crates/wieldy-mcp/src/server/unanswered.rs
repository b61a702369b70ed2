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

    pub(crate) fn not_json(error: &serde_json::Error) -> Self {
        Self { id: None, error: ErrorData::parse_error(format!("this is not JSON: {error}"), None) }
    }
}

impl From<Refused> for ServerJsonRpcMessage {
    fn from(refused: Refused) -> Self {
        Self::error(refused.error, refused.id)
    }
}

/// What is written in one line.
pub(crate) struct Line {
    pub(crate) messages: Messages,
    /// The requests that it answers.
    answers: Vec<RequestId>,
}

/// One message, or several.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Messages {
    One(Box<ServerJsonRpcMessage>),
    Several(Vec<ServerJsonRpcMessage>),
}

impl Line {
    fn one(message: ServerJsonRpcMessage, answers: Vec<RequestId>) -> Self {
        Self { messages: Messages::One(Box::new(message)), answers }
    }
}

impl From<Refused> for Line {
    // What is refused was never open, even if it has the id of something that is.
    fn from(refused: Refused) -> Self {
        Self::one(refused.into(), Vec::new())
    }
}

/// The requests that have no answer yet.
#[derive(Default)]
pub(crate) struct Unanswered {
    requests: HashMap<RequestId, State>,
    lines: HashMap<Together, Waiting>,
    lines_begun: u64,
    /// Whether this client may write several messages in one line.
    pub(crate) takes_several: bool,
}

/// How a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// It came alone, and is answered alone.
    Alone,
    /// Its answer belongs into the line of these.
    In(Together),
    /// The answer is there, and not written yet: nobody can let go of it any more.
    Answered,
}

/// Messages that came in one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Together(u64);

/// The answers to messages that came in one line, as far as they are there.
#[derive(Default)]
struct Waiting {
    missing: usize,
    messages: Vec<ServerJsonRpcMessage>,
    answers: Vec<RequestId>,
}

impl Unanswered {
    /// Begins a line of several messages, which is open until it is [ended](Self::end).
    pub(crate) fn begin(&mut self) -> Together {
        self.lines_begun += 1;
        let together = Together(self.lines_begun);
        self.lines.insert(together, Waiting { missing: 1, ..Waiting::default() });
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
                self.requests.insert(request.id.clone(), together.map_or(State::Alone, State::In));
                if let Some(waiting) = together.and_then(|together| self.lines.get_mut(&together)) {
                    waiting.missing += 1;
                }
                Ok(None)
            }
            JsonRpcMessage::Notification(notification) => match &notification.notification {
                ClientNotification::CancelledNotification(cancelled) => {
                    Ok(cancelled.params.request_id.as_ref().and_then(|id| self.let_go(id)))
                }
                _ => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// The client does not want an answer any more.
    fn let_go(&mut self, id: &RequestId) -> Option<Line> {
        match self.requests.get(id).copied()? {
            State::Answered => None,
            State::Alone => self.requests.remove(id).and(None),
            State::In(together) => {
                self.requests.remove(id);
                self.one_less(together)
            }
        }
    }

    /// Answers what was not taken.
    pub(crate) fn refuse(&mut self, refused: Refused, together: Option<Together>) -> Option<Line> {
        match together.and_then(|together| self.lines.get_mut(&together)) {
            Some(waiting) => {
                waiting.messages.push(refused.into());
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
        let Some(id) = answered(&message).cloned() else { return Some(Line::one(message, Vec::new())) };
        let state = self.requests.get_mut(&id).map(|state| std::mem::replace(state, State::Answered));
        match state {
            // Nobody waits for it, so that it closes nothing.
            None | Some(State::Answered) => Some(Line::one(message, Vec::new())),
            Some(State::Alone) => Some(Line::one(message, vec![id])),
            Some(State::In(together)) => {
                let waiting = self.lines.get_mut(&together)?;
                waiting.messages.push(message);
                waiting.answers.push(id);
                self.one_less(together)
            }
        }
    }

    /// A line was written, so that what it answers is not open any more. Until then it counts: whoever reads no answers may not
    /// go on asking.
    pub(crate) fn written(&mut self, line: &Line) {
        for id in &line.answers {
            self.requests.remove(id);
        }
    }

    fn one_less(&mut self, together: Together) -> Option<Line> {
        let waiting = self.lines.get_mut(&together)?;
        waiting.missing -= 1;
        if waiting.missing > 0 {
            return None;
        }
        let Waiting { messages, answers, .. } = self.lines.remove(&together)?;
        (!messages.is_empty()).then_some(Line { messages: Messages::Several(messages), answers })
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

#[cfg(test)]
mod tests {
    use rmcp::model::{CancelledNotificationParam, EmptyResult};
    use serde_json::json;

    use super::*;

    fn ping(id: i64) -> ClientJsonRpcMessage {
        serde_json::from_value(json!({"jsonrpc": "2.0", "id": id, "method": "ping"})).unwrap()
    }

    fn let_go(id: i64) -> ClientJsonRpcMessage {
        let params = CancelledNotificationParam::new(Some(RequestId::Number(id)), None);
        serde_json::from_value(json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}))
            .unwrap()
    }

    fn pong(id: i64) -> ServerJsonRpcMessage {
        ServerJsonRpcMessage::response(ServerResult::EmptyResult(EmptyResult {}), RequestId::Number(id))
    }

    /// The ids of what is written, if anything is.
    fn ids(line: Option<Line>) -> Option<Vec<i64>> {
        let shown = serde_json::to_value(line?.messages).unwrap();
        let id = |message: &serde_json::Value| message["id"].as_i64().unwrap();
        Some(shown.as_array().map_or_else(|| vec![id(&shown)], |all| all.iter().map(id).collect()))
    }

    #[test]
    fn nobody_lets_go_of_what_is_answered_already() {
        let mut unanswered = Unanswered::default();
        let together = unanswered.begin();
        for id in 1..=3 {
            assert!(unanswered.note(&ping(id), Some(together), 9).unwrap().is_none());
        }
        assert!(unanswered.end(together).is_none());
        assert_eq!(ids(unanswered.answer(pong(1))), None);
        assert_eq!(ids(unanswered.note(&let_go(1), None, 9).unwrap()), None, "its answer is on its way");
        assert_eq!(ids(unanswered.note(&let_go(2), None, 9).unwrap()), None, "the third is still missing");
        let line = unanswered.answer(pong(3)).unwrap();
        unanswered.written(&line);
        assert_eq!(ids(Some(line)), Some(vec![1, 3]));
        assert!(unanswered.requests.is_empty() && unanswered.lines.is_empty());
    }

    #[test]
    fn whoever_reads_no_answers_and_lets_go_of_them_may_not_go_on_asking() {
        let mut unanswered = Unanswered::default();
        unanswered.note(&ping(1), None, 1).unwrap();
        let line = unanswered.answer(pong(1)).unwrap();
        assert_eq!(ids(unanswered.note(&let_go(1), None, 1).unwrap()), None);
        assert!(unanswered.note(&ping(2), None, 1).is_err(), "the answer is not written");
        unanswered.written(&line);
        assert!(unanswered.note(&ping(1), None, 1).is_ok());
        // What nobody waits for closes nothing of the same id.
        assert!(unanswered.note(&let_go(1), None, 1).unwrap().is_none());
        let late = unanswered.answer(pong(1)).unwrap();
        unanswered.note(&ping(1), None, 1).unwrap();
        unanswered.written(&late);
        assert!(unanswered.note(&ping(2), None, 1).is_err());
    }

    #[test]
    fn a_refusal_does_not_close_what_has_the_same_id() {
        let mut unanswered = Unanswered::default();
        unanswered.note(&ping(1), None, 1).unwrap();
        let refused = unanswered.refuse(Refused::invalid(Some(RequestId::Number(1)), "no"), None).unwrap();
        unanswered.written(&refused);
        let told = "the id is that of a request that has no answer yet";
        assert_eq!(unanswered.note(&ping(1), None, 1).err(), Some(Refused::invalid(None, told)));
        let line = unanswered.answer(pong(1)).unwrap();
        assert!(unanswered.note(&ping(2), None, 1).is_err(), "as long as it is not written");
        unanswered.written(&line);
        assert!(unanswered.note(&ping(2), None, 1).is_ok());
    }
}

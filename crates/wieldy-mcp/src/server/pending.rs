//! Tracks the pending requests of a stdio connection. Revision 2025-03-26 allows several messages in one line (a
//! batch). Their responses go back in one line, once the last is there.

use std::borrow::Cow;
use std::collections::HashMap;

use rmcp::ErrorData;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ErrorCode, JsonRpcMessage, ProtocolVersion, RequestId,
    ServerJsonRpcMessage, ServerResult,
};
use serde::Serialize;

/// A code from JSON-RPC's range for server errors.
const TOO_MANY: ErrorCode = ErrorCode(-32000);

/// The refusal of an invalid or unwanted message.
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

/// One line of output.
pub(crate) struct OutputLine {
    pub(crate) messages: LineMessages,
    /// The requests that this line answers.
    answers: Vec<RequestId>,
}

/// One message, or a batch.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum LineMessages {
    One(Box<ServerJsonRpcMessage>),
    Several(Vec<ServerJsonRpcMessage>),
}

impl OutputLine {
    fn one(message: ServerJsonRpcMessage, answers: Vec<RequestId>) -> Self {
        Self { messages: LineMessages::One(Box::new(message)), answers }
    }
}

impl From<Refused> for OutputLine {
    // A refused request was never pending, even if a pending one has the same id.
    fn from(refused: Refused) -> Self {
        Self::one(refused.into(), Vec::new())
    }
}

/// The pending requests of a connection.
#[derive(Default)]
pub(crate) struct PendingRequests {
    requests: HashMap<RequestId, RequestState>,
    lines: HashMap<BatchId, BatchAnswers>,
    lines_begun: u64,
    /// True if this client may send batches.
    pub(crate) takes_several: bool,
}

/// The state of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestState {
    /// It came alone and is answered alone.
    Alone,
    /// It came in this batch, and its response belongs to the batch's line.
    In(BatchId),
    /// The response exists but is not written yet. The request can no longer be cancelled.
    Answered,
}

/// The number of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct BatchId(u64);

/// The responses of a batch so far.
#[derive(Default)]
struct BatchAnswers {
    missing: usize,
    messages: Vec<ServerJsonRpcMessage>,
    answers: Vec<RequestId>,
}

impl PendingRequests {
    /// Begins a batch, which is open until it is [ended](Self::end).
    pub(crate) fn begin(&mut self) -> BatchId {
        self.lines_begun += 1;
        let together = BatchId(self.lines_begun);
        self.lines.insert(together, BatchAnswers { missing: 1, ..BatchAnswers::default() });
        together
    }

    /// Ends a batch: it has no more messages.
    pub(crate) fn end(&mut self, together: BatchId) -> Option<OutputLine> {
        self.one_less(together)
    }

    /// Registers a message, or refuses a request. A cancellation may complete a batch, whose line is returned.
    pub(crate) fn note(
        &mut self,
        message: &ClientJsonRpcMessage,
        together: Option<BatchId>,
        requests_max: usize,
    ) -> Result<Option<OutputLine>, Refused> {
        match message {
            // Two pending requests with one id would get indistinguishable responses.
            JsonRpcMessage::Request(request) if self.requests.contains_key(&request.id) => {
                Err(Refused::invalid(None, "the id is that of a request that has no answer yet"))
            }
            JsonRpcMessage::Request(request) if self.requests.len() >= requests_max => {
                let error = ErrorData::new(TOO_MANY, "too many requests have no answer yet", None);
                Err(Refused { id: Some(request.id.clone()), error })
            }
            JsonRpcMessage::Request(request) => {
                self.requests.insert(request.id.clone(), together.map_or(RequestState::Alone, RequestState::In));
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

    /// Removes a request that the client cancelled.
    fn let_go(&mut self, id: &RequestId) -> Option<OutputLine> {
        match self.requests.get(id).copied()? {
            RequestState::Answered => None,
            RequestState::Alone => self.requests.remove(id).and(None),
            RequestState::In(together) => {
                self.requests.remove(id);
                self.one_less(together)
            }
        }
    }

    /// Returns the line of a refusal, or adds the refusal to its batch.
    pub(crate) fn refuse(&mut self, refused: Refused, together: Option<BatchId>) -> Option<OutputLine> {
        match together.and_then(|together| self.lines.get_mut(&together)) {
            Some(waiting) => {
                waiting.messages.push(refused.into());
                None
            }
            None => Some(OutputLine::from(refused)),
        }
    }

    /// Takes a response. Returns the line to write now, if any.
    pub(crate) fn answer(&mut self, message: ServerJsonRpcMessage) -> Option<OutputLine> {
        if let JsonRpcMessage::Response(response) = &message
            && let ServerResult::InitializeResult(told) = &response.result
        {
            self.takes_several = takes_several(told.protocol_version.as_str());
        }
        let Some(id) = answered(&message).cloned() else { return Some(OutputLine::one(message, Vec::new())) };
        let state = self.requests.get_mut(&id).map(|state| std::mem::replace(state, RequestState::Answered));
        match state {
            // No request is waiting for it, so it closes none.
            None | Some(RequestState::Answered) => Some(OutputLine::one(message, Vec::new())),
            Some(RequestState::Alone) => Some(OutputLine::one(message, vec![id])),
            Some(RequestState::In(together)) => {
                let waiting = self.lines.get_mut(&together)?;
                waiting.messages.push(message);
                waiting.answers.push(id);
                self.one_less(together)
            }
        }
    }

    /// Removes the requests that a written line answers. They count as pending until then, so a client that reads no
    /// responses cannot send more requests.
    pub(crate) fn written(&mut self, line: &OutputLine) {
        for id in &line.answers {
            self.requests.remove(id);
        }
    }

    fn one_less(&mut self, together: BatchId) -> Option<OutputLine> {
        let waiting = self.lines.get_mut(&together)?;
        waiting.missing -= 1;
        if waiting.missing > 0 {
            return None;
        }
        let BatchAnswers { messages, answers, .. } = self.lines.remove(&together)?;
        (!messages.is_empty()).then_some(OutputLine { messages: LineMessages::Several(messages), answers })
    }
}

/// Returns the id of the request that a message answers.
fn answered(message: &ServerJsonRpcMessage) -> Option<&RequestId> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

/// Returns true if clients of this revision may send batches.
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

    /// Returns the ids of the messages in a line.
    fn ids(line: Option<OutputLine>) -> Option<Vec<i64>> {
        let shown = serde_json::to_value(line?.messages).unwrap();
        let id = |message: &serde_json::Value| message["id"].as_i64().unwrap();
        Some(shown.as_array().map_or_else(|| vec![id(&shown)], |all| all.iter().map(id).collect()))
    }

    #[test]
    fn nobody_lets_go_of_what_is_answered_already() {
        let mut unanswered = PendingRequests::default();
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
        let mut unanswered = PendingRequests::default();
        unanswered.note(&ping(1), None, 1).unwrap();
        let line = unanswered.answer(pong(1)).unwrap();
        assert_eq!(ids(unanswered.note(&let_go(1), None, 1).unwrap()), None);
        assert!(unanswered.note(&ping(2), None, 1).is_err(), "the answer is not written");
        unanswered.written(&line);
        assert!(unanswered.note(&ping(1), None, 1).is_ok());
        // A response without a waiting request does not close a later one with the same id.
        assert!(unanswered.note(&let_go(1), None, 1).unwrap().is_none());
        let late = unanswered.answer(pong(1)).unwrap();
        unanswered.note(&ping(1), None, 1).unwrap();
        unanswered.written(&late);
        assert!(unanswered.note(&ping(2), None, 1).is_err());
    }

    #[test]
    fn a_refusal_does_not_close_what_has_the_same_id() {
        let mut unanswered = PendingRequests::default();
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

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
use wieldy_core::NoteId;

use crate::convert;

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

impl OutputLine {
    /// Returns the ids of the notes that the agent gets with this line.
    pub(crate) fn note_ids(&self) -> Vec<NoteId> {
        let messages = match &self.messages {
            LineMessages::One(message) => std::slice::from_ref(&**message),
            LineMessages::Several(messages) => messages,
        };
        let answers = messages.iter().filter_map(|message| match message {
            JsonRpcMessage::Response(response) => match &response.result {
                ServerResult::CallToolResult(answer) => Some(answer),
                _ => None,
            },
            _ => None,
        });
        answers.flat_map(convert::note_ids).collect()
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
    batches: HashMap<BatchId, BatchAnswers>,
    batches_begun: u64,
    /// True if this client may send batches.
    pub(crate) allows_batches: bool,
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
    /// Begins a batch, which is open until it is [ended](Self::end_batch).
    pub(crate) fn begin_batch(&mut self) -> BatchId {
        self.batches_begun += 1;
        let batch = BatchId(self.batches_begun);
        self.batches.insert(batch, BatchAnswers { missing: 1, ..BatchAnswers::default() });
        batch
    }

    /// Ends a batch: it has no more messages.
    pub(crate) fn end_batch(&mut self, batch: BatchId) -> Option<OutputLine> {
        self.count_down(batch)
    }

    /// Registers a message, or refuses a request. A cancellation may complete a batch, whose line is returned.
    pub(crate) fn register(
        &mut self,
        message: &ClientJsonRpcMessage,
        batch: Option<BatchId>,
        requests_max: usize,
    ) -> Result<Option<OutputLine>, Refused> {
        match message {
            // Two pending requests with one id would get indistinguishable responses.
            JsonRpcMessage::Request(request) if self.requests.contains_key(&request.id) => {
                Err(Refused::invalid(None, "a request with this id is still open"))
            }
            JsonRpcMessage::Request(request) if self.requests.len() >= requests_max => {
                let error = ErrorData::new(TOO_MANY, "too many requests are open", None);
                Err(Refused { id: Some(request.id.clone()), error })
            }
            JsonRpcMessage::Request(request) => {
                self.requests.insert(request.id.clone(), batch.map_or(RequestState::Alone, RequestState::In));
                if let Some(collected) = batch.and_then(|batch| self.batches.get_mut(&batch)) {
                    collected.missing += 1;
                }
                Ok(None)
            }
            JsonRpcMessage::Notification(notification) => match &notification.notification {
                ClientNotification::CancelledNotification(cancelled) => {
                    Ok(cancelled.params.request_id.as_ref().and_then(|id| self.cancel(id)))
                }
                _ => Ok(None),
            },
            _ => Ok(None),
        }
    }

    /// Removes a request that the client cancelled.
    fn cancel(&mut self, id: &RequestId) -> Option<OutputLine> {
        match self.requests.get(id).copied()? {
            RequestState::Answered => None,
            RequestState::Alone => self.requests.remove(id).and(None),
            RequestState::In(batch) => {
                self.requests.remove(id);
                self.count_down(batch)
            }
        }
    }

    /// Returns the line of a refusal, or adds the refusal to its batch.
    pub(crate) fn refuse(&mut self, refused: Refused, batch: Option<BatchId>) -> Option<OutputLine> {
        match batch.and_then(|batch| self.batches.get_mut(&batch)) {
            Some(collected) => {
                collected.messages.push(refused.into());
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
            self.allows_batches = allows_batches(told.protocol_version.as_str());
        }
        let Some(id) = answered_id(&message).cloned() else { return Some(OutputLine::one(message, Vec::new())) };
        let state = self.requests.get_mut(&id).map(|state| std::mem::replace(state, RequestState::Answered));
        match state {
            // No request is waiting for it, so it closes none.
            None | Some(RequestState::Answered) => Some(OutputLine::one(message, Vec::new())),
            Some(RequestState::Alone) => Some(OutputLine::one(message, vec![id])),
            Some(RequestState::In(batch)) => {
                let collected = self.batches.get_mut(&batch)?;
                collected.messages.push(message);
                collected.answers.push(id);
                self.count_down(batch)
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

    fn count_down(&mut self, batch: BatchId) -> Option<OutputLine> {
        let collected = self.batches.get_mut(&batch)?;
        collected.missing -= 1;
        if collected.missing > 0 {
            return None;
        }
        let BatchAnswers { messages, answers, .. } = self.batches.remove(&batch)?;
        (!messages.is_empty()).then_some(OutputLine { messages: LineMessages::Several(messages), answers })
    }
}

/// Returns the id of the request that a message answers.
fn answered_id(message: &ServerJsonRpcMessage) -> Option<&RequestId> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

/// Returns true if clients of this revision may send batches.
pub(crate) fn allows_batches(revision: &str) -> bool {
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

    fn cancelled(id: i64) -> ClientJsonRpcMessage {
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
    fn an_answered_request_cannot_be_cancelled() {
        let mut pending = PendingRequests::default();
        let batch = pending.begin_batch();
        for id in 1..=3 {
            assert!(pending.register(&ping(id), Some(batch), 9).unwrap().is_none());
        }
        assert!(pending.end_batch(batch).is_none());
        assert_eq!(ids(pending.answer(pong(1))), None);
        assert_eq!(ids(pending.register(&cancelled(1), None, 9).unwrap()), None, "its answer is already queued");
        assert_eq!(ids(pending.register(&cancelled(2), None, 9).unwrap()), None, "the third is still missing");
        let line = pending.answer(pong(3)).unwrap();
        pending.written(&line);
        assert_eq!(ids(Some(line)), Some(vec![1, 3]));
        assert!(pending.requests.is_empty() && pending.batches.is_empty());
    }

    #[test]
    fn cancelling_does_not_free_the_slot_of_an_unread_answer() {
        let mut pending = PendingRequests::default();
        pending.register(&ping(1), None, 1).unwrap();
        let line = pending.answer(pong(1)).unwrap();
        assert_eq!(ids(pending.register(&cancelled(1), None, 1).unwrap()), None);
        assert!(pending.register(&ping(2), None, 1).is_err(), "the answer is not written");
        pending.written(&line);
        assert!(pending.register(&ping(1), None, 1).is_ok());
        // A response without a waiting request does not close a later one with the same id.
        assert!(pending.register(&cancelled(1), None, 1).unwrap().is_none());
        let late = pending.answer(pong(1)).unwrap();
        pending.register(&ping(1), None, 1).unwrap();
        pending.written(&late);
        assert!(pending.register(&ping(2), None, 1).is_err());
    }

    #[test]
    fn a_refusal_does_not_close_a_request_with_the_same_id() {
        let mut pending = PendingRequests::default();
        pending.register(&ping(1), None, 1).unwrap();
        let refused = pending.refuse(Refused::invalid(Some(RequestId::Number(1)), "no"), None).unwrap();
        pending.written(&refused);
        let told = "a request with this id is still open";
        assert_eq!(pending.register(&ping(1), None, 1).err(), Some(Refused::invalid(None, told)));
        let line = pending.answer(pong(1)).unwrap();
        assert!(pending.register(&ping(2), None, 1).is_err(), "until the answer is written");
        pending.written(&line);
        assert!(pending.register(&ping(2), None, 1).is_ok());
    }
}

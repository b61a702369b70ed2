//! The stdio transport: one JSON-RPC message per line. Invalid messages get an error response. A line that is too long
//! is skipped while it arrives, and then refused.
//!
//! `tokio_util`'s `LinesCodec` is not used: while this transport skips a long line it finds the request's id, so that
//! it can answer it.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::future::BoxFuture;
use rmcp::model::{
    CallToolRequestParams, ClientJsonRpcMessage, ClientRequest, Extensions, Request, RequestId, RequestMetaObject,
    ServerJsonRpcMessage,
};
use rmcp::transport::Transport;
use rmcp::{ErrorData, RoleServer};
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio_util::sync::CancellationToken;
use wieldy_core::Executor;

use super::Shared;
use super::pending::{OutputLine, PendingRequests, Refused};
use super::scan::Scan;

/// The line buffer shrinks to this size after a large message.
const BUFFER_BYTES_KEPT: usize = 64 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";
/// Maximum length of a request id.
pub(super) const ID_BYTES_MAX: usize = 1024;

/// The stdio transport of one client.
pub(crate) struct StdioTransport<R, W> {
    read: BufReader<R>,
    line: Vec<u8>,
    bytes_max: usize,
    /// The scan of a line that is too long and is being skipped.
    skipping: Option<Box<Scan>>,
    /// Cancelled at the end of input.
    over: CancellationToken,
    write: Arc<tokio::sync::Mutex<Option<W>>>,
    /// Messages that were read and not returned yet. A batch line has several.
    messages: VecDeque<ClientJsonRpcMessage>,
    /// The refusals that are being written. They are stored here because the future of `receive` may be dropped
    /// meanwhile.
    writing_refusals: Option<BoxFuture<'static, io::Result<()>>>,
    pending: Arc<Mutex<PendingRequests>>,
    requests_max: usize,
    /// The executor, which is told what was handed over.
    executor: Executor,
}

/// Marks a call whose message was too long, so that its arguments are unknown.
#[derive(Debug, Clone)]
pub(super) struct OversizedCall {
    /// The error message for the client.
    pub(super) message: String,
}

/// The result of reading a line.
enum ReadLine {
    Line,
    TooLong(Box<Scan>),
    End,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Send + Unpin> StdioTransport<R, W> {
    pub(crate) fn new(read: R, write: W, shared: &Shared, over: CancellationToken) -> Self {
        let options = &shared.options;
        Self {
            read: BufReader::new(read),
            line: Vec::new(),
            bytes_max: options.message_bytes_max,
            skipping: None,
            over,
            write: Arc::new(tokio::sync::Mutex::new(Some(write))),
            messages: VecDeque::new(),
            writing_refusals: None,
            pending: Arc::default(),
            requests_max: options.requests_max,
            executor: shared.executor.clone(),
        }
    }

    /// Reads up to the end of a line. Cancel-safe: the next call continues.
    async fn read_line(&mut self) -> io::Result<ReadLine> {
        loop {
            let available = self.read.fill_buf().await?;
            if available.is_empty() {
                self.over.cancel();
                let has_rest = !self.line.is_empty() && self.skipping.is_none();
                return Ok(if has_rest { ReadLine::Line } else { ReadLine::End });
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(available.len(), |end| end + 1);
            let more = &available[..end.unwrap_or(taken)];
            match &mut self.skipping {
                Some(scan) => scan.push(more),
                None => self.line.extend_from_slice(more),
            }
            self.read.consume(taken);
            if self.line.len() > self.bytes_max {
                self.skipping.get_or_insert_default().push(&std::mem::take(&mut self.line));
            }
            if end.is_some() {
                return Ok(self.skipping.take().map_or(ReadLine::Line, ReadLine::TooLong));
            }
        }
    }

    /// Parses the line and queues its messages. Returns the refusals to write at once.
    fn queue_line(&mut self) -> Vec<OutputLine> {
        let line = self.line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&self.line);
        if line.trim_ascii().is_empty() {
            return Vec::new();
        }
        let mut pending = lock(&self.pending);
        let (values, batch) = match serde_json::from_slice(line) {
            Ok(Value::Array(values)) => match self.refuse_batch(values.len(), pending.allows_batches) {
                Some(refused) => return vec![refused.into()],
                None => (values, Some(pending.begin_batch())),
            },
            Ok(one) => (vec![one], None),
            Err(error) => return vec![Refused::not_json(&error).into()],
        };
        let mut output = Vec::new();
        for value in values {
            let message = parse(value).and_then(|message| {
                let Some(message) = message else { return Ok(None) };
                output.extend(pending.register(&message, batch, self.requests_max)?);
                Ok(Some(message))
            });
            match message {
                Ok(message) => self.messages.extend(message),
                Err(refused) => output.extend(pending.refuse(refused, batch)),
            }
        }
        output.extend(batch.and_then(|batch| pending.end_batch(batch)));
        output
    }

    /// Handles a message that was too long. A call is queued with a mark, so that it is refused and recorded like other
    /// calls.
    fn queue_oversized(&mut self, scan: &Scan) -> Vec<OutputLine> {
        let refusal = Scan::complaint(self.bytes_max);
        let (Some(id), Some(tool)) = (scan.id(), scan.tool()) else {
            return vec![Refused::invalid(scan.id(), refusal).into()];
        };
        let mut request = Request::new(CallToolRequestParams::new(tool.to_owned()));
        request.extensions.insert(OversizedCall { message: refusal });
        let message = ClientJsonRpcMessage::request(ClientRequest::CallToolRequest(request), id);
        let mut pending = lock(&self.pending);
        match pending.register(&message, None, self.requests_max) {
            Ok(output) => {
                self.messages.push_back(message);
                output.into_iter().collect()
            }
            Err(refused) => vec![refused.into()],
        }
    }

    fn write_lines(&self, lines: Vec<OutputLine>) -> impl Future<Output = io::Result<()>> + Send + use<R, W> {
        let (write, pending, executor) = (Arc::clone(&self.write), Arc::clone(&self.pending), self.executor.clone());
        async move {
            for line in &lines {
                let mut bytes = serde_json::to_vec(&line.messages)?;
                bytes.push(b'\n');
                let mut write = write.lock().await;
                let write = write.as_mut().ok_or(io::ErrorKind::NotConnected)?;
                let written = async {
                    write.write_all(&bytes).await?;
                    write.flush().await
                };
                let written = written.await;
                lock(&pending).written(line);
                written?;
                executor.confirm_note_ids(line.note_ids());
            }
            Ok(())
        }
    }

    /// Returns the refusal of a batch that is not allowed or has a wrong size.
    fn refuse_batch(&self, count: usize, allows_batches: bool) -> Option<Refused> {
        let message = match count {
            _ if !allows_batches => "a line must be one message; only revision 2025-03-26 allows batches".into(),
            0 => "a batch must have at least one message".into(),
            _ if count > self.requests_max => format!("a batch can have at most {} messages", self.requests_max),
            _ => return None,
        };
        Some(Refused::invalid(None, message))
    }
}

impl<R, W> Transport<RoleServer> for StdioTransport<R, W>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    type Error = io::Error;

    fn send(&mut self, item: ServerJsonRpcMessage) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let line = lock(&self.pending).answer(item);
        self.write_lines(line.into_iter().collect())
    }

    async fn receive(&mut self) -> Option<ClientJsonRpcMessage> {
        loop {
            if let Some(writing_refusals) = &mut self.writing_refusals {
                let written = writing_refusals.await;
                self.writing_refusals = None;
                // A client that does not read responses gets no more requests read.
                written.ok()?;
            }
            if let Some(message) = self.messages.pop_front() {
                return Some(message);
            }
            if self.over.is_cancelled() {
                return None;
            }
            let read = self.read_line().await.inspect_err(|error| {
                tracing::debug!(error = error as &dyn std::error::Error, "a client's messages cannot be read");
            });
            let output = match read.ok()? {
                ReadLine::End => return None,
                ReadLine::TooLong(scan) => self.queue_oversized(&scan),
                ReadLine::Line => self.queue_line(),
            };
            self.line.clear();
            self.line.shrink_to(BUFFER_BYTES_KEPT);
            if !output.is_empty() {
                self.writing_refusals = Some(Box::pin(self.write_lines(output)));
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        if let Some(mut write) = self.write.lock().await.take() {
            write.shutdown().await?;
        }
        Ok(())
    }
}

fn lock(pending: &Mutex<PendingRequests>) -> MutexGuard<'_, PendingRequests> {
    pending.lock().expect("no code panics while it holds the requests")
}

/// Parses a message. Returns `None` for an unknown notification.
pub(super) fn parse(value: Value) -> Result<Option<ClientJsonRpcMessage>, Refused> {
    let invalid = Refused::invalid;
    let Value::Object(mut message) = value else { return Err(invalid(None, "a message must be an object")) };
    if message.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
        return Err(invalid(None, "a message must have `jsonrpc` with the value \"2.0\""));
    }
    let id = match message.get("id") {
        None => None,
        Some(id) => Some(request_id(id).ok_or_else(|| invalid(None, "an id must be a text or a whole number"))?),
    };
    let Some(method) = message.get("method") else {
        // A response to one of our requests, or an invalid message.
        return match (id, serde_json::from_value(Value::Object(message))) {
            (Some(_), Ok(message)) => Ok(Some(message)),
            (id, _) => Err(invalid(id, "a message must have a `method`, or a `result` or an `error` with an `id`")),
        };
    };
    match (method.as_str(), id) {
        (None, id) => Err(invalid(id, "a `method` must be a text")),
        // `tools/call` is by far the most common, so it skips the SDK's general parser.
        (Some("tools/call"), Some(id)) => tool_call(id, message.remove("params")).map(Some),
        (Some(_), Some(id)) => serde_json::from_value(Value::Object(message))
            .map(Some)
            .map_err(|_| Refused { id: Some(id), error: ErrorData::invalid_params("the params do not fit", None) }),
        (Some(_), None) => Ok(serde_json::from_value(Value::Object(message)).ok()),
    }
}

pub(super) fn request_id(id: &Value) -> Option<RequestId> {
    match id {
        Value::Number(number) => number.as_i64().map(RequestId::Number),
        Value::String(text) if text.len() <= ID_BYTES_MAX => Some(RequestId::String(text.as_str().into())),
        _ => None,
    }
}

/// Parses the params of a `tools/call`.
fn tool_call(id: RequestId, params: Option<Value>) -> Result<ClientJsonRpcMessage, Refused> {
    let wrong =
        |message: &'static str| Refused { id: Some(id.clone()), error: ErrorData::invalid_params(message, None) };
    let mut params = match params {
        Some(Value::Object(params)) => params,
        _ => return Err(wrong("`params` must be an object with the tool's `name`")),
    };
    let Some(Value::String(name)) = params.remove("name") else { return Err(wrong("`name` must be the tool's name")) };
    let mut call = CallToolRequestParams::new(name);
    call.arguments = match params.remove("arguments") {
        None | Some(Value::Null) => None,
        Some(Value::Object(arguments)) => Some(arguments),
        Some(_) => return Err(wrong("`arguments` must be an object")),
    };
    let mut extensions = Extensions::new();
    match params.remove("_meta") {
        None => {}
        Some(Value::Object(meta)) => {
            extensions.insert(RequestMetaObject(meta_object(meta)));
        }
        Some(_) => return Err(wrong("`_meta` must be an object")),
    }
    call.input_responses = match params.remove("inputResponses") {
        None => None,
        Some(Value::Object(responses)) => Some(responses.into_iter().collect()),
        Some(_) => return Err(wrong("`inputResponses` must be an object")),
    };
    call.request_state = match params.remove("requestState") {
        None => None,
        Some(Value::String(state)) => Some(state),
        Some(_) => return Err(wrong("`requestState` must be a text")),
    };
    let mut request = Request::new(call);
    request.extensions = extensions;
    Ok(ClientJsonRpcMessage::request(ClientRequest::CallToolRequest(request), id))
}

fn meta_object(meta: Map<String, Value>) -> rmcp::model::MetaObject {
    rmcp::model::MetaObject(meta)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_call_is_read_as_the_sdk_reads_it() {
        for params in [
            json!({"name": "a"}),
            json!({"name": "a", "arguments": {"b": [1, 2.5, null, {"c": "d"}]}}),
            json!({"name": "a", "arguments": {}, "_meta": {"progressToken": 7, "x/y": {"z": true}}}),
            json!({"name": "a", "inputResponses": {"q": {"action": "accept"}}, "requestState": "sealed"}),
        ] {
            let line = json!({"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": params}).to_string();
            let (ours, theirs) =
                (parse(serde_json::from_str(&line).unwrap()), serde_json::from_str::<ClientJsonRpcMessage>(&line));
            let (ours, theirs) = (ours.expect("a message").expect("no notification"), theirs.expect("a message"));
            assert_eq!(json!(ours), json!(theirs));
            assert_eq!(format!("{ours:?}"), format!("{theirs:?}"), "fields that are not in JSON are equal too");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(value) = serde_json::from_slice(&bytes) {
                let _ = parse(value);
            }
        }

        /// A valid message with some bytes changed stays valid or is refused.
        #[test]
        fn no_broken_message_does_harm(changes in prop::collection::vec((0usize..120, any::<u8>()), 0..4), cut in 0usize..120) {
            let message = br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a","arguments":{"b":1},"_meta":{"progressToken":"p"}}}"#;
            let mut message = message.to_vec();
            for (at, byte) in changes {
                let at = at % message.len();
                message[at] = byte;
            }
            message.truncate(message.len() - cut.min(message.len()) / 8);
            if let Ok(message) = serde_json::from_slice(&message) && let Err(refused) = parse(message) {
                prop_assert!([-32600, -32602].contains(&refused.error.code.0));
            }
        }
    }
}

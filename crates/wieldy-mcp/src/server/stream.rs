//! The SSE stream of one HTTP request: the messages before the response, and the response. Events are stored so that a
//! client whose connection broke can resume after the last event it has seen.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use wieldy_core::Caller;

use super::Shared;
use super::note_messages::DueMessages;
use super::session::{ListeningStream, Session};

/// Maximum number of stored events. The oldest are dropped first, so the response, which is last, stays.
const EVENTS_MAX: usize = 256;
/// The interval of keep-alives on a quiet stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const ALIVE: &[u8] = b":\n\n";
/// The reconnection delay that clients are told (`retry`).
const COME_BACK: Duration = Duration::from_secs(1);

/// The event stream of one request.
pub(crate) struct EventStream {
    /// The session, and the stream's number in it. Only with a session can questions be asked and events be resumed.
    session: Option<(Arc<Session>, u64)>,
    state: Mutex<StreamState>,
    changed: Notify,
}

struct StreamState {
    events: VecDeque<Bytes>,
    /// The number of the first stored event. Numbers begin at 1. 0 means that no event was seen.
    first: u64,
    is_over: bool,
    /// True if the stream was read to its end.
    is_read: bool,
    /// Called once the last event was read.
    on_read: Option<Box<dyn FnOnce() + Send>>,
}

/// The end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// It has not ended.
    Open,
    /// It has ended, and was not read to its end.
    Unread,
    /// It has ended, and was read to its end.
    Read,
}

impl EventStream {
    pub(crate) fn new(session: Option<Arc<Session>>) -> Self {
        let session = session.map(|session| {
            let id = session.number();
            (session, id)
        });
        let state = StreamState { events: VecDeque::new(), first: 1, is_over: false, is_read: false, on_read: None };
        Self { session, state: Mutex::new(state), changed: Notify::new() }
    }

    /// Returns the stream's number in its session.
    pub(crate) fn id(&self) -> Option<u64> {
        self.session.as_ref().map(|(_, id)| *id)
    }

    /// Sends a notification.
    pub(crate) fn notify(&self, method: &str, params: &impl Serialize) {
        self.push(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string());
    }

    /// Sends a request to the client. Returns `None` if the client cannot be asked or answers with an error.
    pub(crate) fn ask(
        &self,
        method: &str,
        params: &impl Serialize,
    ) -> impl Future<Output = Option<Value>> + Send + 'static {
        let asked = self.session.as_ref().map(|(session, _)| session.ask());
        if let Some(asked) = &asked {
            self.push(&json!({"jsonrpc": "2.0", "id": asked.id(), "method": method, "params": params}).to_string());
        }
        async move { asked?.answer().await }
    }

    /// Ends the stream, with the response if it is still wanted.
    pub(crate) fn end(&self, answer: Option<&Bytes>) {
        if let Some(answer) = answer.and_then(|answer| std::str::from_utf8(answer).ok()) {
            self.push(answer);
        }
        self.state().is_over = true;
        self.changed.notify_waiters();
        if let Some((session, _)) = &self.session {
            session.drop_old_streams();
        }
    }

    /// Ends the stream with a response, and calls `on_read` once that was read.
    pub(crate) fn end_with(&self, answer: &Bytes, on_read: impl FnOnce() + Send + 'static) {
        self.state().on_read = Some(Box::new(on_read));
        self.end(Some(answer));
    }

    /// Tells if the stream has ended, and if it was read to its end.
    pub(crate) fn end_state(&self) -> StreamEnd {
        let state = self.state();
        match (state.is_over, state.is_read) {
            (false, _) => StreamEnd::Open,
            (true, false) => StreamEnd::Unread,
            (true, true) => StreamEnd::Read,
        }
    }

    /// Returns true if there was any event.
    pub(crate) fn has_events(&self) -> bool {
        !self.state().events.is_empty()
    }

    /// Waits until there is an event.
    pub(crate) async fn wait_for_event(&self) {
        let mut changed = pin!(self.changed.notified());
        while !self.has_events() {
            changed.as_mut().await;
            changed.set(self.changed.notified());
        }
    }

    /// Appends a message as an event. Serialized JSON has no line breaks.
    fn push(&self, message: &str) {
        let mut state = self.state();
        let at = state.first + state.events.len() as u64;
        state.events.push_back(match &self.session {
            Some((_, id)) => format!("id: {}\ndata: {message}\n\n", EventId { stream: *id, at }).into(),
            None => format!("data: {message}\n\n").into(),
        });
        if state.events.len() > EVENTS_MAX {
            state.events.pop_front();
            state.first += 1;
        }
        drop(state);
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().expect("no code panics while it holds the events")
    }
}

/// Ends a stream when dropped, in case the response never came.
pub(crate) struct EndOnDrop(pub(crate) Arc<EventStream>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if self.0.end_state() == StreamEnd::Open {
            self.0.end(None);
        }
    }
}

/// The id of an event: its stream, and its number in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventId {
    pub(crate) stream: u64,
    pub(crate) at: u64,
}

impl EventId {
    /// Parses an event id of ours.
    pub(crate) fn of(text: &str) -> Option<Self> {
        let (stream, at) = text.strip_prefix("call-")?.split_once('-')?;
        Some(Self { stream: stream.parse().ok()?, at: at.parse().ok()? })
    }
}

impl std::fmt::Display for EventId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "call-{}-{}", self.stream, self.at)
    }
}

/// A source of SSE events for one connection.
pub(crate) trait EventSource: Send + Sync + 'static {
    /// Returns the next event in SSE format, or `None` at the end.
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send + Sync;
}

/// Reads a stream for one connection.
pub(crate) struct StreamReader {
    stream: Arc<EventStream>,
    /// An event that comes before all others.
    greeting: Option<Bytes>,
    next: u64,
    stop: CancellationToken,
    /// Cancels the call when the client disconnects, in revisions where that is how to cancel.
    _until_hung_up: Option<DropGuard>,
}

impl StreamReader {
    /// Reads from the beginning, until `stop`.
    pub(crate) fn new(stream: Arc<EventStream>, stop: CancellationToken, until_hung_up: Option<DropGuard>) -> Self {
        Self { stream, greeting: None, next: 1, stop, _until_hung_up: until_hung_up }
    }

    /// Begins with an event without data that has an id and a `retry` delay, so that the client can resume from the
    /// first moment.
    pub(crate) fn with_greeting(mut self) -> Self {
        self.greeting = self.stream.id().map(|stream| {
            let id = EventId { stream, at: 0 };
            format!("id: {id}\nretry: {}\ndata:\n\n", COME_BACK.as_millis()).into()
        });
        self
    }

    /// Continues after the event with this number.
    pub(crate) fn after(mut self, seen: u64) -> Self {
        self.next = seen.saturating_add(1);
        self
    }
}

impl EventSource for StreamReader {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(greeting) = self.greeting.take() {
            return Some(greeting);
        }
        loop {
            let changed = self.stream.changed.notified();
            {
                let mut state = self.stream.state();
                self.next = self.next.max(state.first);
                if let Some(event) = state.events.get((self.next - state.first) as usize).cloned() {
                    self.next += 1;
                    let is_last = state.is_over && self.next == state.first + state.events.len() as u64;
                    let on_read = if is_last { state.on_read.take() } else { None };
                    drop(state);
                    if let Some(on_read) = on_read {
                        on_read();
                    }
                    return Some(event);
                }
                if state.is_over {
                    state.is_read = true;
                    let on_read = state.on_read.take();
                    drop(state);
                    if let Some(on_read) = on_read {
                        on_read();
                    }
                    return None;
                }
            }
            tokio::select! {
                () = changed => {}
                () = self.stop.cancelled() => return None,
                () = tokio::time::sleep(KEEP_ALIVE) => return Some(Bytes::from_static(ALIVE)),
            }
        }
    }
}

/// The stream of server notifications of a session: changes of the tool list, and notes whose time has come.
pub(crate) struct ToolChanges {
    tools: watch::Receiver<u64>,
    notes: DueMessages,
    caller: Arc<Caller>,
    listening: ListeningStream,
    stop: CancellationToken,
}

impl ToolChanges {
    pub(crate) fn new(shared: &Shared, session: &Arc<Session>, stop: CancellationToken) -> Self {
        let mut tools = shared.executor.registry().changes();
        let listening = session.listen(*tools.borrow_and_update());
        let (notes, caller) = (DueMessages::new(&shared.executor), Arc::clone(&session.caller));
        Self { tools, notes, caller, listening, stop }
    }
}

impl EventSource for ToolChanges {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            // This also covers changes without an open stream, or left unsent by a newer stream.
            let changes = *self.tools.borrow_and_update();
            if self.listening.must_report(changes) {
                let message = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
                return Some(format!("data: {message}\n\n").into());
            }
            tokio::select! {
                changed = self.tools.changed() => changed.ok()?,
                message = self.notes.next(|| Some(Arc::clone(&self.caller))) => {
                    let params = message?.params;
                    // Older streams may belong to broken connections.
                    if self.listening.is_newest() {
                        let message = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params});
                        return Some(format!("data: {message}\n\n").into());
                    }
                }
                () = self.listening.over() => return None,
                () = self.stop.cancelled() => return None,
                () = tokio::time::sleep(KEEP_ALIVE) => return Some(Bytes::from_static(ALIVE)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_events_are_read_as_they_are_written() {
        let id = EventId { stream: 3, at: 14 };
        assert_eq!((id.to_string().as_str(), EventId::of("call-3-14")), ("call-3-14", Some(id)));
        for other in ["0/3", "0", "call-", "call-3", "call-a-1", "call-3-14-1", ""] {
            assert_eq!(EventId::of(other), None, "{other}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_reader_gets_the_last_events_and_the_answer() {
        let stream = Arc::new(EventStream::new(None));
        for n in 0..EVENTS_MAX + 10 {
            stream.notify("n", &n);
        }
        stream.end(Some(&Bytes::from_static(b"{}")));
        let mut reader = StreamReader::new(Arc::clone(&stream), CancellationToken::new(), None);
        let mut seen = Vec::new();
        while let Some(event) = reader.next().await {
            seen.push(String::from_utf8(event.to_vec()).unwrap());
        }
        assert_eq!(seen.len(), EVENTS_MAX);
        assert_eq!(seen[0], "data: {\"jsonrpc\":\"2.0\",\"method\":\"n\",\"params\":11}\n\n");
        assert_eq!(seen[EVENTS_MAX - 1], "data: {}\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_stream_gets_keep_alive_comments() {
        let stream = Arc::new(EventStream::new(None));
        let stop = CancellationToken::new();
        let mut reader = StreamReader::new(Arc::clone(&stream), stop.clone(), None);
        assert_eq!(reader.next().await.as_deref(), Some(&b":\n\n"[..]));
        stop.cancel();
        assert_eq!(reader.next().await, None);
    }
}

//! What the client of one HTTP request hears before and with its answer, as a stream of events. Events are kept for a client
//! whose connection broke: it comes back and names the last one that it has seen.

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

use super::Shared;
use super::session::{Listening, Session};

/// How many events are kept; of more, the client is told the last ones. The answer is the very last.
const EVENTS_MAX: usize = 256;
/// After how long without an event a client is told that we are still there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const ALIVE: &[u8] = b":\n\n";
/// After how long a client whose connection broke may come back.
const COME_BACK: Duration = Duration::from_secs(1);

/// The events of one request.
pub(crate) struct Stream {
    /// Whose request it is, where there are sessions: only then can questions be asked, and events be asked for again.
    session: Option<(Arc<Session>, u64)>,
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    events: VecDeque<Bytes>,
    /// The number of the first event that is kept. They are counted from 1 on: 0 stands for having seen none.
    first: u64,
    is_over: bool,
    /// Whether somebody has read it to its end.
    is_read: bool,
}

impl Stream {
    pub(crate) fn new(session: Option<Arc<Session>>) -> Self {
        let session = session.map(|session| {
            let id = session.number();
            (session, id)
        });
        let state = State { events: VecDeque::new(), first: 1, is_over: false, is_read: false };
        Self { session, state: Mutex::new(state), changed: Notify::new() }
    }

    /// Under which number its session knows it.
    pub(crate) fn id(&self) -> Option<u64> {
        self.session.as_ref().map(|(_, id)| *id)
    }

    /// Tells the client something.
    pub(crate) fn tell(&self, method: &str, params: &impl Serialize) {
        self.push(&json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string());
    }

    /// Asks the client something. Nothing where it cannot be asked, or answers that it could not.
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

    /// The end, with the answer where there is still one wanted.
    pub(crate) fn end(&self, answer: Option<&Bytes>) {
        if let Some(answer) = answer.and_then(|answer| std::str::from_utf8(answer).ok()) {
            self.push(answer);
        }
        self.state().is_over = true;
        self.changed.notify_waiters();
        if let Some((session, _)) = &self.session {
            session.tidy();
        }
    }

    /// Whether somebody has read it to its end; nothing where it has none yet.
    pub(crate) fn end_is_read(&self) -> Option<bool> {
        let state = self.state();
        state.is_over.then_some(state.is_read)
    }

    /// Whether there was anything to tell.
    pub(crate) fn is_begun(&self) -> bool {
        !self.state().events.is_empty()
    }

    /// Waits until there is anything to tell.
    pub(crate) async fn begun(&self) {
        let mut changed = pin!(self.changed.notified());
        while !self.is_begun() {
            changed.as_mut().await;
            changed.set(self.changed.notified());
        }
    }

    /// One message as an event. What is written as JSON has no line breaks in it.
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the events")
    }
}

/// Sees to it that a stream has an end, whatever became of the answer.
pub(crate) struct Ending(pub(crate) Arc<Stream>);

impl Drop for Ending {
    fn drop(&mut self) {
        if self.0.end_is_read().is_none() {
            self.0.end(None);
        }
    }
}

/// Names an event: the stream, and its place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventId {
    pub(crate) stream: u64,
    pub(crate) at: u64,
}

impl EventId {
    /// What a client names, if it is one of ours.
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

/// Where the events of one connection come from.
pub(crate) trait Source: Send + Sync + 'static {
    /// The next event, as it is written; nothing at the end.
    fn next(&mut self) -> impl Future<Output = Option<Bytes>> + Send + Sync;
}

/// Reads a stream for one connection.
pub(crate) struct Reader {
    stream: Arc<Stream>,
    /// What it is told before anything else.
    greeting: Option<Bytes>,
    next: u64,
    stop: CancellationToken,
    /// Cancels the call of a client that hangs up, where that means so.
    _until_hung_up: Option<DropGuard>,
}

impl Reader {
    /// Reads from the beginning, until `stop`.
    pub(crate) fn new(stream: Arc<Stream>, stop: CancellationToken, until_hung_up: Option<DropGuard>) -> Self {
        Self { stream, greeting: None, next: 1, stop, _until_hung_up: until_hung_up }
    }

    /// The same for a client that wants to know from the first moment on what it can come back to, and when.
    pub(crate) fn greeting(mut self) -> Self {
        self.greeting = self.stream.id().map(|stream| {
            let id = EventId { stream, at: 0 };
            format!("id: {id}\nretry: {}\ndata:\n\n", COME_BACK.as_millis()).into()
        });
        self
    }

    /// Reads what comes after the event of this number.
    pub(crate) fn after(mut self, seen: u64) -> Self {
        self.next = seen.saturating_add(1);
        self
    }
}

impl Source for Reader {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(greeting) = self.greeting.take() {
            return Some(greeting);
        }
        loop {
            let changed = self.stream.changed.notified();
            {
                let mut state = self.stream.state();
                self.next = self.next.max(state.first);
                if let Some(event) = state.events.get((self.next - state.first) as usize) {
                    self.next += 1;
                    return Some(event.clone());
                }
                if state.is_over {
                    state.is_read = true;
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

/// What a session is told that asked for nothing in particular: that there are other tools now.
pub(crate) struct Changes {
    tools: watch::Receiver<u64>,
    listening: Listening,
    stop: CancellationToken,
}

impl Changes {
    pub(crate) fn new(shared: &Shared, session: &Arc<Session>, stop: CancellationToken) -> Self {
        let mut tools = shared.executor.registry().changes();
        let listening = session.listen(*tools.borrow_and_update());
        Self { tools, listening, stop }
    }
}

impl Source for Changes {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            // Also what came while there was no stream, or what a newer one left untold.
            let changes = *self.tools.borrow_and_update();
            if self.listening.takes(changes) {
                let message = json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"});
                return Some(format!("data: {message}\n\n").into());
            }
            tokio::select! {
                changed = self.tools.changed() => changed.ok()?,
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
    async fn whoever_comes_late_is_told_the_last_events_and_the_answer() {
        let stream = Arc::new(Stream::new(None));
        for n in 0..EVENTS_MAX + 10 {
            stream.tell("n", &n);
        }
        stream.end(Some(&Bytes::from_static(b"{}")));
        let mut reader = Reader::new(Arc::clone(&stream), CancellationToken::new(), None);
        let mut seen = Vec::new();
        while let Some(event) = reader.next().await {
            seen.push(String::from_utf8(event.to_vec()).unwrap());
        }
        assert_eq!(seen.len(), EVENTS_MAX);
        assert_eq!(seen[0], "data: {\"jsonrpc\":\"2.0\",\"method\":\"n\",\"params\":11}\n\n");
        assert_eq!(seen[EVENTS_MAX - 1], "data: {}\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_hears_nothing_for_long_is_told_that_we_are_there() {
        let stream = Arc::new(Stream::new(None));
        let stop = CancellationToken::new();
        let mut reader = Reader::new(Arc::clone(&stream), stop.clone(), None);
        assert_eq!(reader.next().await.as_deref(), Some(&b":\n\n"[..]));
        stop.cancel();
        assert_eq!(reader.next().await, None);
    }
}

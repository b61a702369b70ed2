//! An HTTP session of a client up to revision 2025-11-25: its owner, the client's capabilities, and its open calls,
//! questions and streams.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rmcp::model::{ClientCapabilities, RequestId};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wieldy_core::Caller;

use super::peer;
use super::stream::{EventId, EventStream, StreamEnd};

/// The longest time that an idle session is stored.
const IDLE_MAX: Duration = Duration::from_secs(60 * 60);
/// Maximum number of ended streams that are stored for clients that come back for the response: of those that were read
/// to the end, and of the others.
const READ_STREAMS_MAX: usize = 4;
const UNREAD_STREAMS_MAX: usize = 64;
/// The prefix of our request ids.
const QUESTION: &str = "wieldy-";

/// An HTTP session.
pub(crate) struct Session {
    /// The caller that began it, as the door knows it.
    pub(crate) owner: Arc<Caller>,
    /// The same caller, with this session's id.
    pub(crate) caller: Arc<Caller>,
    pub(crate) can_ask: bool,
    pub(crate) knows_tasks: bool,
    /// True if one request may carry a batch of messages.
    pub(crate) allows_batches: bool,
    /// Cancelled when the session is over.
    pub(crate) over: CancellationToken,
    state: Mutex<SessionState>,
    numbers: AtomicU64,
}

struct SessionState {
    last_seen: Instant,
    /// The open calls.
    calls: HashMap<RequestId, (u64, CancellationToken)>,
    /// The open questions.
    questions: HashMap<u64, oneshot::Sender<Value>>,
    /// The streams that the client may resume, oldest first.
    streams: VecDeque<Arc<EventStream>>,
    /// The open streams for server notifications, oldest first.
    listening: Vec<u64>,
    /// The number of the last tool list change that was sent. `None` before the first stream.
    changes_sent: Option<u64>,
}

impl Session {
    pub(crate) fn new(owner: Arc<Caller>, capabilities: &ClientCapabilities, revision: &str) -> Self {
        let mut id = [0; 16];
        getrandom::fill(&mut id).expect("a system without randomness cannot run anything safely");
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            caller: Arc::new(Caller { session: Some(id), ..(*owner).clone() }),
            owner,
            over: CancellationToken::new(),
            can_ask: peer::can_ask(capabilities),
            knows_tasks: capabilities.supports_tasks(),
            allows_batches: super::pending::allows_batches(revision),
            state: Mutex::new(SessionState {
                last_seen: Instant::now(),
                calls: HashMap::new(),
                questions: HashMap::new(),
                streams: VecDeque::new(),
                listening: Vec::new(),
                changes_sent: None,
            }),
            numbers: AtomicU64::new(0),
        }
    }

    /// Returns the session id.
    pub(crate) fn id(&self) -> &str {
        self.caller.session.as_deref().unwrap_or_default()
    }

    /// Returns true if this is the caller that began the session, with the same rights.
    pub(crate) fn is_of(&self, caller: &Arc<Caller>) -> bool {
        Arc::ptr_eq(&self.owner, caller) || self.owner == *caller
    }

    /// Records a sign of life.
    pub(crate) fn touch(&self) {
        self.lock().last_seen = Instant::now();
    }

    /// Returns true if the session was idle for too long.
    pub(crate) fn is_idle(&self) -> bool {
        self.quiet_since().is_some_and(|heard| heard.elapsed() > IDLE_MAX)
    }

    /// Registers a call. Fails if the session is over, has too many open calls, or has one with this id.
    pub(crate) fn begin(
        self: &Arc<Self>,
        id: RequestId,
        gone: CancellationToken,
        calls_max: usize,
    ) -> Result<OpenCall, &'static str> {
        let mut state = self.lock();
        if self.over.is_cancelled() {
            return Err("the session is over");
        }
        if state.calls.len() >= calls_max {
            return Err("too many requests of this session are open");
        }
        if state.calls.contains_key(&id) {
            return Err("a request with this id is still open");
        }
        let number = self.number();
        state.calls.insert(id.clone(), (number, gone));
        Ok(OpenCall { session: Arc::clone(self), id, number })
    }

    /// Removes a call. Returns true if its response is still wanted.
    fn end(&self, id: &RequestId, number: u64) -> bool {
        let mut state = self.lock();
        state.last_seen = Instant::now();
        // After a cancellation the client may have reused the id.
        let is_wanted = state.calls.get(id).is_some_and(|(known, _)| *known == number);
        if is_wanted {
            state.calls.remove(id);
        }
        is_wanted
    }

    /// Returns the time of the last sign of life, or `None` while a call is open.
    pub(crate) fn quiet_since(&self) -> Option<Instant> {
        let state = self.lock();
        state.calls.is_empty().then_some(state.last_seen)
    }

    /// Cancels a call at the client's request.
    pub(crate) fn cancel(&self, id: &RequestId) {
        if let Some((_, call)) = self.lock().calls.remove(id) {
            call.cancel();
        }
    }

    /// Returns a number that is unique in the session.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers a question to the client.
    pub(crate) fn ask(self: &Arc<Self>) -> OpenQuestion {
        let (sender, answer) = oneshot::channel();
        let number = self.number();
        self.lock().questions.insert(number, sender);
        OpenQuestion { session: Arc::clone(self), number, answer: Some(answer) }
    }

    /// Delivers the client's response to a question. Without a value the client could not answer.
    pub(crate) fn answer(&self, id: &RequestId, value: Option<Value>) {
        let RequestId::String(id) = id else { return };
        let Some(number) = id.strip_prefix(QUESTION).and_then(|number| number.parse().ok()) else { return };
        let asked = self.lock().questions.remove(&number);
        if let (Some(asked), Some(value)) = (asked, value) {
            let _ = asked.send(value);
        }
    }

    /// Stores a stream that the client may resume.
    pub(crate) fn store_stream(&self, stream: &Arc<EventStream>) {
        let mut state = self.lock();
        if self.over.is_cancelled() {
            return;
        }
        state.streams.push_back(Arc::clone(stream));
        drop(state);
        self.drop_old_streams();
    }

    /// Drops the oldest ended streams if there are too many.
    pub(crate) fn drop_old_streams(&self) {
        let mut state = self.lock();
        let ends: Vec<StreamEnd> = state.streams.iter().map(|stream| stream.end_state()).collect();
        let surplus = |kind, max| ends.iter().filter(|end| **end == kind).count().saturating_sub(max);
        let (mut read, mut unread) =
            (surplus(StreamEnd::Read, READ_STREAMS_MAX), surplus(StreamEnd::Unread, UNREAD_STREAMS_MAX));
        let mut ends = ends.iter();
        state.streams.retain(|_| {
            let surplus = match ends.next() {
                None | Some(StreamEnd::Open) => return true,
                Some(StreamEnd::Read) => &mut read,
                Some(StreamEnd::Unread) => &mut unread,
            };
            let goes = *surplus > 0;
            *surplus -= usize::from(goes);
            !goes
        });
    }

    /// Returns the stream of an event.
    pub(crate) fn stream(&self, event: EventId) -> Option<Arc<EventStream>> {
        let state = self.lock();
        state.streams.iter().find(|stream| stream.id() == Some(event.stream)).cloned()
    }

    /// Registers a stream for server notifications. `changes` is the number of tool list changes so far.
    pub(crate) fn listen(self: &Arc<Self>, changes: u64) -> ListeningStream {
        let number = self.number();
        let mut state = self.lock();
        state.changes_sent.get_or_insert(changes);
        state.listening.push(number);
        ListeningStream { session: Arc::clone(self), number }
    }

    /// Ends all open calls, questions and streams.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        self.over.cancel();
        state.questions.clear();
        state.streams.clear();
        for (_, (_, call)) in state.calls.drain() {
            call.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().expect("no code panics while it holds the session")
    }
}

/// An open call. Dropping it ends it.
pub(crate) struct OpenCall {
    session: Arc<Session>,
    id: RequestId,
    number: u64,
}

impl OpenCall {
    /// Ends the call. Returns true if its response is still wanted.
    pub(crate) fn end(self) -> bool {
        self.session.end(&self.id, self.number)
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.session.end(&self.id, self.number);
    }
}

/// A stream for server notifications, until it is dropped.
pub(crate) struct ListeningStream {
    session: Arc<Session>,
    number: u64,
}

impl ListeningStream {
    /// Returns true if this stream must report this number of changes. Each change is reported once, on the newest
    /// stream: older ones may belong to broken connections.
    pub(crate) fn must_report(&self, changes: u64) -> bool {
        let mut state = self.session.lock();
        let must_report =
            state.listening.last() == Some(&self.number) && state.changes_sent.is_none_or(|sent| sent < changes);
        if must_report {
            state.changes_sent = Some(changes);
        }
        must_report
    }

    /// Returns true if no newer stream is open.
    pub(crate) fn is_newest(&self) -> bool {
        self.session.lock().listening.last() == Some(&self.number)
    }

    /// Waits until the session is over.
    pub(crate) async fn over(&self) {
        self.session.over.cancelled().await;
    }
}

impl Drop for ListeningStream {
    fn drop(&mut self) {
        self.session.lock().listening.retain(|number| *number != self.number);
    }
}

/// An open question.
pub(crate) struct OpenQuestion {
    session: Arc<Session>,
    number: u64,
    answer: Option<oneshot::Receiver<Value>>,
}

impl OpenQuestion {
    pub(crate) fn id(&self) -> String {
        format!("{QUESTION}{}", self.number)
    }

    pub(crate) async fn answer(mut self) -> Option<Value> {
        self.answer.take()?.await.ok()
    }
}

impl Drop for OpenQuestion {
    fn drop(&mut self) {
        self.session.lock().questions.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream::{EventSource, StreamReader};
    use super::*;

    #[tokio::test]
    async fn unread_streams_are_stored_longer_than_read_ones() {
        let session = Arc::new(Session::new(Arc::new(Caller::local()), &ClientCapabilities::default(), "2025-06-18"));
        for number in 0..2 * (READ_STREAMS_MAX + 2) {
            let stream = Arc::new(EventStream::new(Some(Arc::clone(&session))));
            session.store_stream(&stream);
            stream.end(None);
            if number % 2 == 0 {
                assert_eq!(StreamReader::new(stream, CancellationToken::new(), None).next().await, None);
            }
        }
        session.drop_old_streams();
        let ends = || session.lock().streams.iter().map(|stream| stream.end_state()).collect::<Vec<_>>();
        let count = |state| ends().iter().filter(|end| **end == state).count();
        assert_eq!((count(StreamEnd::Read), count(StreamEnd::Unread)), (READ_STREAMS_MAX, READ_STREAMS_MAX + 2));
        for _ in 0..UNREAD_STREAMS_MAX {
            let stream = Arc::new(EventStream::new(Some(Arc::clone(&session))));
            session.store_stream(&stream);
            stream.end(None);
        }
        assert_eq!((count(StreamEnd::Read), count(StreamEnd::Unread)), (READ_STREAMS_MAX, UNREAD_STREAMS_MAX));
        session.close();
        assert_eq!(ends(), []);
    }

    #[test]
    fn a_change_is_announced_once_on_the_newest_stream() {
        let session = Arc::new(Session::new(Arc::new(Caller::local()), &ClientCapabilities::default(), "2025-06-18"));
        let (older, newer) = (session.listen(5), session.listen(5));
        assert_eq!((older.must_report(5), newer.must_report(5)), (false, false), "nothing has changed");
        assert_eq!((older.must_report(6), newer.must_report(6), newer.must_report(6)), (false, true, false));
        drop(newer);
        assert_eq!((older.must_report(6), older.must_report(7)), (false, true));
        drop(older);
        assert!(session.listen(8).must_report(8), "the change that came while there was no stream");
    }

    #[test]
    fn a_client_with_url_elicitation_only_cannot_be_asked() {
        for (capabilities, can_ask) in [
            (r#"{}"#, false),
            (r#"{"elicitation":{}}"#, true),
            (r#"{"elicitation":{"form":{}}}"#, true),
            (r#"{"elicitation":{"url":{}}}"#, false),
            (r#"{"elicitation":{"form":{},"url":{}}}"#, true),
        ] {
            let client: ClientCapabilities = serde_json::from_str(capabilities).unwrap();
            assert_eq!(peer::can_ask(&client), can_ask, "{capabilities}");
        }
    }
}

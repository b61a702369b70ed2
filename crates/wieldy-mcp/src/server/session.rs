//! A session of a client up to revision 2025-11-25: whose it is, what the client can do, and what is open in it.

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

use super::client;
use super::stream::{EventId, Stream};

/// How long a session is kept of which nothing is heard.
const IDLE_MAX: Duration = Duration::from_secs(60 * 60);
/// How many streams are kept after their end, for clients that come back for the answer: of those that were read to their end,
/// and of the others.
const READ_MAX: usize = 4;
const UNREAD_MAX: usize = 64;
/// What the ids of our questions begin with.
const QUESTION: &str = "wieldy-";

/// A session.
pub(crate) struct Session {
    /// Who began it, as the door knows it.
    pub(crate) owner: Arc<Caller>,
    /// The same, calling in this session.
    pub(crate) caller: Arc<Caller>,
    pub(crate) can_ask: bool,
    pub(crate) knows_tasks: bool,
    /// Whether several messages may come in one request.
    pub(crate) takes_several: bool,
    /// Cancelled when it is over.
    pub(crate) over: CancellationToken,
    open: Mutex<Open>,
    numbers: AtomicU64,
}

struct Open {
    heard: Instant,
    /// The calls that are not answered.
    calls: HashMap<RequestId, (u64, CancellationToken)>,
    /// The questions that are not answered.
    questions: HashMap<u64, oneshot::Sender<Value>>,
    /// The streams that clients may come back to, oldest first.
    streams: VecDeque<Arc<Stream>>,
    /// The streams on which it hears what it did not ask for, oldest first.
    listening: Vec<u64>,
    /// Up to which change of the tools it was told, once it has listened.
    told: Option<u64>,
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
            can_ask: client::can_ask(capabilities),
            knows_tasks: capabilities.supports_tasks(),
            takes_several: super::unanswered::takes_several(revision),
            open: Mutex::new(Open {
                heard: Instant::now(),
                calls: HashMap::new(),
                questions: HashMap::new(),
                streams: VecDeque::new(),
                listening: Vec::new(),
                told: None,
            }),
            numbers: AtomicU64::new(0),
        }
    }

    /// Its name.
    pub(crate) fn id(&self) -> &str {
        self.caller.session.as_deref().unwrap_or_default()
    }

    /// Whether this is who began it, with the very rights that he had.
    pub(crate) fn is_of(&self, caller: &Arc<Caller>) -> bool {
        Arc::ptr_eq(&self.owner, caller) || self.owner == *caller
    }

    /// Something was heard of it.
    pub(crate) fn hear(&self) {
        self.open().heard = Instant::now();
    }

    /// Whether nothing was heard of it for too long.
    pub(crate) fn is_idle(&self) -> bool {
        self.quiet_since().is_some_and(|heard| heard.elapsed() > IDLE_MAX)
    }

    /// Notes a call, unless there are too many, one with this id, or nobody wants answers any more.
    pub(crate) fn begin(
        self: &Arc<Self>,
        id: RequestId,
        gone: CancellationToken,
        calls_max: usize,
    ) -> Result<Noted, &'static str> {
        let mut open = self.open();
        if self.over.is_cancelled() {
            return Err("the session is over");
        }
        if open.calls.len() >= calls_max {
            return Err("too many requests of this session are open");
        }
        if open.calls.contains_key(&id) {
            return Err("a request with this id is still open");
        }
        let number = self.number();
        open.calls.insert(id.clone(), (number, gone));
        Ok(Noted { session: Arc::clone(self), id, number })
    }

    /// Takes a call away; says whether its answer is still wanted.
    fn end(&self, id: &RequestId, number: u64) -> bool {
        let mut open = self.open();
        open.heard = Instant::now();
        // After it was cancelled, its client may have used the id for another one.
        let is_wanted = open.calls.get(id).is_some_and(|(known, _)| *known == number);
        if is_wanted {
            open.calls.remove(id);
        }
        is_wanted
    }

    /// When something was heard of it last, if nothing is open in it.
    pub(crate) fn quiet_since(&self) -> Option<Instant> {
        let open = self.open();
        open.calls.is_empty().then_some(open.heard)
    }

    /// Ends a call at its client's wish, if there is one of this id.
    pub(crate) fn cancel(&self, id: &RequestId) {
        if let Some((_, call)) = self.open().calls.remove(id) {
            call.cancel();
        }
    }

    /// A number that is used once.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins a question.
    pub(crate) fn ask(self: &Arc<Self>) -> Question {
        let (sender, answer) = oneshot::channel();
        let number = self.number();
        self.open().questions.insert(number, sender);
        Question { session: Arc::clone(self), number, answer: Some(answer) }
    }

    /// Takes an answer to a question of ours, if it is one; without a value where the client could not answer.
    pub(crate) fn answer(&self, id: &RequestId, value: Option<Value>) {
        let RequestId::String(id) = id else { return };
        let Some(number) = id.strip_prefix(QUESTION).and_then(|number| number.parse().ok()) else { return };
        let asked = self.open().questions.remove(&number);
        if let (Some(asked), Some(value)) = (asked, value) {
            let _ = asked.send(value);
        }
    }

    /// Keeps a stream that its client may come back to.
    pub(crate) fn keep(&self, stream: &Arc<Stream>) {
        let mut open = self.open();
        if self.over.is_cancelled() {
            return;
        }
        open.streams.push_back(Arc::clone(stream));
        drop(open);
        self.tidy();
    }

    /// Lets go of streams that have ended, where there are too many of them: the oldest first.
    pub(crate) fn tidy(&self) {
        let mut open = self.open();
        let ends: Vec<Option<bool>> = open.streams.iter().map(|stream| stream.end_is_read()).collect();
        let surplus = |is_read, max| ends.iter().filter(|end| **end == Some(is_read)).count().saturating_sub(max);
        let (mut read, mut unread) = (surplus(true, READ_MAX), surplus(false, UNREAD_MAX));
        let mut ends = ends.iter();
        open.streams.retain(|_| {
            let surplus = match ends.next().copied().flatten() {
                None => return true,
                Some(true) => &mut read,
                Some(false) => &mut unread,
            };
            let goes = *surplus > 0;
            *surplus -= usize::from(goes);
            !goes
        });
    }

    /// The stream that an event is of.
    pub(crate) fn stream(&self, event: EventId) -> Option<Arc<Stream>> {
        let open = self.open();
        open.streams.iter().find(|stream| stream.id() == Some(event.stream)).cloned()
    }

    /// Begins a stream on which it hears what it did not ask for; the tools have changed so often by now.
    pub(crate) fn listen(self: &Arc<Self>, changes: u64) -> Listening {
        let number = self.number();
        let mut open = self.open();
        open.told.get_or_insert(changes);
        open.listening.push(number);
        Listening { session: Arc::clone(self), number }
    }

    /// Ends everything that is open.
    pub(crate) fn close(&self) {
        let mut open = self.open();
        self.over.cancel();
        open.questions.clear();
        open.streams.clear();
        for (_, (_, call)) in open.calls.drain() {
            call.cancel();
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().expect("no code panics while it holds the session")
    }
}

/// A call that is not answered yet. It is over when this is dropped, whatever became of it.
pub(crate) struct Noted {
    session: Arc<Session>,
    id: RequestId,
    number: u64,
}

impl Noted {
    /// Its end; says whether the answer is still wanted.
    pub(crate) fn end(self) -> bool {
        self.session.end(&self.id, self.number)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.session.end(&self.id, self.number);
    }
}

/// A stream on which a session hears what it did not ask for, until this is dropped.
pub(crate) struct Listening {
    session: Arc<Session>,
    number: u64,
}

impl Listening {
    /// Whether the client is to be told here that the tools have changed so often. Whatever the number of streams it is told once: on
    /// the newest, as older ones may be left over from connections that broke.
    pub(crate) fn takes(&self, changes: u64) -> bool {
        let mut open = self.session.open();
        let takes = open.listening.last() == Some(&self.number) && open.told.is_none_or(|told| told < changes);
        if takes {
            open.told = Some(changes);
        }
        takes
    }

    /// Waits until the session is over.
    pub(crate) async fn over(&self) {
        self.session.over.cancelled().await;
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.session.open().listening.retain(|number| *number != self.number);
    }
}

/// A question whose answer is awaited.
pub(crate) struct Question {
    session: Arc<Session>,
    number: u64,
    answer: Option<oneshot::Receiver<Value>>,
}

impl Question {
    pub(crate) fn id(&self) -> String {
        format!("{QUESTION}{}", self.number)
    }

    pub(crate) async fn answer(mut self) -> Option<Value> {
        self.answer.take()?.await.ok()
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.session.open().questions.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream::{Reader, Source};
    use super::*;

    #[tokio::test]
    async fn of_the_streams_that_ended_those_stay_longest_that_nobody_has_read() {
        let session = Arc::new(Session::new(Arc::new(Caller::local()), &ClientCapabilities::default(), "2025-06-18"));
        for number in 0..2 * (READ_MAX + 2) {
            let stream = Arc::new(Stream::new(Some(Arc::clone(&session))));
            session.keep(&stream);
            stream.end(None);
            if number % 2 == 0 {
                assert_eq!(Reader::new(stream, CancellationToken::new(), None).next().await, None);
            }
        }
        session.tidy();
        let ends = || session.open().streams.iter().map(|stream| stream.end_is_read()).collect::<Vec<_>>();
        let count = |is_read| ends().iter().filter(|end| **end == Some(is_read)).count();
        assert_eq!((count(true), count(false)), (READ_MAX, READ_MAX + 2));
        for _ in 0..UNREAD_MAX {
            let stream = Arc::new(Stream::new(Some(Arc::clone(&session))));
            session.keep(&stream);
            stream.end(None);
        }
        assert_eq!((count(true), count(false)), (READ_MAX, UNREAD_MAX));
        session.close();
        assert_eq!(ends(), []);
    }

    #[test]
    fn a_change_is_told_once_and_on_the_newest_stream() {
        let session = Arc::new(Session::new(Arc::new(Caller::local()), &ClientCapabilities::default(), "2025-06-18"));
        let (older, newer) = (session.listen(5), session.listen(5));
        assert_eq!((older.takes(5), newer.takes(5)), (false, false), "nothing has changed");
        assert_eq!((older.takes(6), newer.takes(6), newer.takes(6)), (false, true, false));
        drop(newer);
        assert_eq!((older.takes(6), older.takes(7)), (false, true));
        drop(older);
        assert!(session.listen(8).takes(8), "what came while there was no stream");
    }

    #[test]
    fn a_client_that_can_only_show_pages_cannot_be_asked() {
        for (capabilities, can_ask) in [
            (r#"{}"#, false),
            (r#"{"elicitation":{}}"#, true),
            (r#"{"elicitation":{"form":{}}}"#, true),
            (r#"{"elicitation":{"url":{}}}"#, false),
            (r#"{"elicitation":{"form":{},"url":{}}}"#, true),
        ] {
            let client: ClientCapabilities = serde_json::from_str(capabilities).unwrap();
            assert_eq!(client::can_ask(&client), can_ask, "{capabilities}");
        }
    }
}

//! Observation: replays the events of one call or batch from its first event on, then follows it live.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::Stream;
use tokio::sync::Notify;

use crate::event::{Body, CallState, Event};
use crate::journal::Seen;

/// Maximum number of events stored per call or batch for observers. Older events are counted as missed.
const EVENTS_MAX: usize = 4096;
/// Maximum bytes of printed text in these events. A run that prints without end must not fill the memory.
const TEXT_BYTES_MAX: usize = 1024 * 1024;

/// The events of one call or batch.
#[derive(Debug, Default)]
pub(crate) struct Log {
    contents: Mutex<LogContents>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct LogContents {
    events: VecDeque<Arc<Event>>,
    text_bytes: usize,
    /// The number of older events that were dropped.
    gone: u64,
    /// The state of the call after these events; a batch has no state of its own.
    state: CallState,
    closed: bool,
    /// True once an observer has waited for an event. Most calls have no observer, and a notification takes time even
    /// without a listener.
    watched: bool,
}

impl Log {
    /// Locks the log for writing: no other thread reads or writes until the writer is dropped.
    pub(crate) fn writer(&self) -> LogWriter<'_> {
        LogWriter { contents: self.lock(), changed: &self.changed }
    }

    pub(crate) fn push(&self, event: Arc<Event>) {
        self.writer().push(event);
    }

    /// Marks the log as complete, so that observers end.
    pub(crate) fn close(&self) {
        self.writer().close();
    }

    pub(crate) fn state(&self) -> CallState {
        self.lock().state
    }

    /// Returns the number of stored events.
    pub(crate) fn len(&self) -> usize {
        self.lock().events.len()
    }

    fn lock(&self) -> MutexGuard<'_, LogContents> {
        self.contents.lock().expect("no code panics while it holds the log")
    }
}

/// A log that is locked for writing.
pub(crate) struct LogWriter<'a> {
    contents: MutexGuard<'a, LogContents>,
    changed: &'a Notify,
}

impl LogWriter<'_> {
    pub(crate) fn push(&mut self, event: Arc<Event>) {
        let contents = &mut *self.contents;
        contents.text_bytes += text_bytes(&event);
        contents.events.push_back(event);
        while (contents.events.len() > EVENTS_MAX || contents.text_bytes > TEXT_BYTES_MAX)
            && let Some(oldest) = contents.events.pop_front()
        {
            contents.text_bytes -= text_bytes(&oldest);
            contents.gone += 1;
        }
        self.notify();
    }

    /// Marks the log as complete, so that observers end.
    pub(crate) fn close(&mut self) {
        self.contents.closed = true;
        self.notify();
    }

    pub(crate) fn state(&self) -> CallState {
        self.contents.state
    }

    pub(crate) fn set_state(&mut self, state: CallState) {
        self.contents.state = state;
    }

    fn notify(&self) {
        if self.contents.watched {
            self.changed.notify_waiters();
        }
    }
}

fn text_bytes(event: &Event) -> usize {
    match &event.body {
        Body::CallProgress { message: Some(message), .. } => message.len(),
        _ => 0,
    }
}

/// A reader of the events of one call or batch: first the past events, then each new one until the call or batch ends.
pub struct Observer {
    source: Option<Source>,
    position: u64,
    basic_only: bool,
}

/// The owner of a log.
type Source = Arc<dyn AsRef<Log> + Send + Sync>;

impl Observer {
    pub(crate) fn new(source: Source, basic_only: bool) -> Self {
        Self { source: Some(source), position: 0, basic_only }
    }

    /// Creates an observer of an unknown call or batch. It ends at once.
    pub(crate) fn of_nothing() -> Self {
        Self { source: None, position: 0, basic_only: false }
    }

    /// Returns the next event, or the number of events lost because this observer was too slow; `None` at the end.
    pub async fn next(&mut self) -> Option<Seen> {
        loop {
            let source = self.source.clone()?;
            let log: &Log = (*source).as_ref();
            let changed = log.changed.notified();
            tokio::pin!(changed);
            // Subscribe before looking: an event between the two cannot be lost.
            changed.as_mut().enable();
            {
                let mut contents = log.lock();
                if self.position < contents.gone {
                    let missed = contents.gone - self.position;
                    self.position = contents.gone;
                    return Some(Seen::Missed(missed));
                }
                if let Some(event) = contents.events.get((self.position - contents.gone) as usize) {
                    self.position += 1;
                    if self.basic_only && !event.body.is_basic() {
                        continue;
                    }
                    return Some(Seen::Event(Arc::clone(event)));
                }
                if contents.closed {
                    return None;
                }
                contents.watched = true;
            }
            changed.await;
        }
    }

    /// Returns the same events as a stream.
    pub fn stream(self) -> impl Stream<Item = Seen> + Send {
        futures_util::stream::unfold(self, async |mut observer| observer.next().await.map(|seen| (seen, observer)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::call::Caller;
    use crate::event::Subject;

    struct LogOwner(Log);

    impl AsRef<Log> for LogOwner {
        fn as_ref(&self) -> &Log {
            &self.0
        }
    }

    fn event(seq: u64) -> Arc<Event> {
        let caller = Arc::new(Caller::local());
        let subject = Arc::new(Subject::of(caller));
        let body = Body::CallWarning { message: String::new() };
        Arc::new(Event { seq, at: jiff::Timestamp::UNIX_EPOCH, subject, body })
    }

    /// Returns the item that a waiting observer gets when `change` happens, and the observer.
    async fn woken_by(mut observer: Observer, change: impl FnOnce()) -> (Option<Seen>, Observer) {
        let waiting = tokio::spawn(async move { (observer.next().await, observer) });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        change();
        let woken = tokio::time::timeout(Duration::from_secs(1), waiting).await;
        woken.expect("it must be reported").expect("it must not panic")
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_observer_is_woken_by_the_next_event() {
        let owner = Arc::new(LogOwner(Log::default()));
        let observer = Observer::new(Arc::clone(&owner) as Source, false);
        let (seen, observer) = woken_by(observer, || owner.0.push(event(1))).await;
        assert_eq!(seen, Some(Seen::Event(event(1))));
        let (seen, _) = woken_by(observer, || owner.0.close()).await;
        assert_eq!(seen, None);
    }

    #[test]
    fn a_log_is_watched_from_the_first_waiting_observer_on() {
        let owner = Arc::new(LogOwner(Log::default()));
        owner.0.push(event(1));
        let mut observer = Observer::new(Arc::clone(&owner) as Source, false);
        assert_eq!(observer.next().now_or_never(), Some(Some(Seen::Event(event(1)))));
        assert!(!owner.0.lock().watched, "a reader that finds an event needs no notification");
        assert_eq!(observer.next().now_or_never(), None);
        assert!(owner.0.lock().watched);
    }
}

//! Observation: the events of one call or batch from the first one on, however late one looks.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use futures_util::Stream;
use tokio::sync::Notify;

use crate::event::{Body, Event};
use crate::journal::Seen;

/// How many events of one call or batch are kept for observers; older ones are counted as missed.
const EVENTS_MAX: usize = 4096;
/// How much printed text they may hold together: a run that prints without end must not fill the memory.
const TEXT_BYTES_MAX: usize = 1024 * 1024;

/// The events of one call or batch.
#[derive(Debug, Default)]
pub(crate) struct Log {
    kept: Mutex<Kept>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Kept {
    events: VecDeque<Arc<Event>>,
    text_bytes: usize,
    /// How many went before those that are kept.
    gone: u64,
    closed: bool,
}

impl Log {
    pub(crate) fn push(&self, event: &Arc<Event>) {
        {
            let mut kept = self.kept.lock().expect("no code panics while it holds the log");
            kept.text_bytes += text_bytes(event);
            kept.events.push_back(Arc::clone(event));
            while (kept.events.len() > EVENTS_MAX || kept.text_bytes > TEXT_BYTES_MAX)
                && let Some(oldest) = kept.events.pop_front()
            {
                kept.text_bytes -= text_bytes(&oldest);
                kept.gone += 1;
            }
        }
        self.changed.notify_waiters();
    }

    /// Says that nothing more will come, so that observers end.
    pub(crate) fn close(&self) {
        self.kept.lock().expect("no code panics while it holds the log").closed = true;
        self.changed.notify_waiters();
    }
}

fn text_bytes(event: &Event) -> usize {
    match &event.body {
        Body::CallProgress { message: Some(message), .. } => message.len(),
        _ => 0,
    }
}

/// Follows one call or batch: first what happened already, then what happens, until it is over.
pub struct Observer {
    source: Option<Source>,
    position: u64,
    basic_only: bool,
}

/// Something that owns a log.
type Source = Arc<dyn AsRef<Log> + Send + Sync>;

impl Observer {
    pub(crate) fn new(source: Source, basic_only: bool) -> Self {
        Self { source: Some(source), position: 0, basic_only }
    }

    /// An observer of something that is not known: it ends at once.
    pub(crate) fn of_nothing() -> Self {
        Self { source: None, position: 0, basic_only: false }
    }

    /// The next event, or how many were lost because this observer was too slow; `None` when it is over.
    pub async fn next(&mut self) -> Option<Seen> {
        loop {
            let source = self.source.clone()?;
            let log: &Log = (*source).as_ref();
            let changed = log.changed.notified();
            tokio::pin!(changed);
            // Listen first and look then: nothing that comes between the two can be lost.
            changed.as_mut().enable();
            {
                let kept = log.kept.lock().expect("no code panics while it holds the log");
                if self.position < kept.gone {
                    let missed = kept.gone - self.position;
                    self.position = kept.gone;
                    return Some(Seen::Missed(missed));
                }
                if let Some(event) = kept.events.get((self.position - kept.gone) as usize) {
                    self.position += 1;
                    if self.basic_only && !event.body.is_basic() {
                        continue;
                    }
                    return Some(Seen::Event(Arc::clone(event)));
                }
                if kept.closed {
                    return None;
                }
            }
            changed.await;
        }
    }

    /// The same as a stream.
    pub fn stream(self) -> impl Stream<Item = Seen> + Send {
        futures_util::stream::unfold(self, async |mut observer| observer.next().await.map(|seen| (seen, observer)))
    }
}

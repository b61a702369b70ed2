//! Tells clients about notes whose time has come, as `notifications/message`. The notes come with the next result all
//! the same: few clients show these messages to their models.

#![expect(deprecated, reason = "MCP gives up log messages, and has no other message to a client without a request")]

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use rmcp::RoleServer;
use rmcp::model::{LoggingLevel, LoggingMessageNotificationParam};
use rmcp::service::Peer;
use serde_json::json;
use wieldy_core::{Body, Caller, DueNote, Executor, Filter, Note, NotePriority, NoteState, Seen, Subscription};

/// The name of our messages.
const LOGGER: &str = "notify_self";
/// Maximum number of notes that wait to be sent to one client.
const WAITING_MAX: usize = 100;

/// The notes of a caller whose time has come, from now on.
pub(crate) struct DueMessages {
    events: Subscription,
}

impl DueMessages {
    pub(crate) fn new(executor: &Executor) -> Self {
        let filter = Filter { name_prefix: Some("agent.self.remind".into()), ..Filter::default() };
        Self { events: executor.subscribe(filter, WAITING_MAX) }
    }

    /// Returns the next message for this caller, or `None` once the executor is gone.
    pub(crate) async fn next(&mut self, caller: impl Fn() -> Option<Arc<Caller>>) -> Option<NoteMessage> {
        loop {
            let Seen::Event(event) = self.events.next().await? else { continue };
            let Body::SelfRemind(note) = &event.body else { continue };
            if note.state == NoteState::Due && caller().is_some_and(|caller| note.is_for(&caller)) {
                return Some(NoteMessage::of(note));
            }
        }
    }
}

/// A message about a note.
pub(crate) struct NoteMessage {
    pub(crate) params: LoggingMessageNotificationParam,
}

impl NoteMessage {
    fn of(note: &Note) -> Self {
        let level = match note.priority {
            NotePriority::Low => LoggingLevel::Info,
            NotePriority::Normal => LoggingLevel::Notice,
            NotePriority::High => LoggingLevel::Warning,
            NotePriority::Critical => LoggingLevel::Critical,
        };
        let data = json!({"note": DueNote::from(note)});
        Self { params: LoggingMessageNotificationParam::new(level, data).with_logger(LOGGER) }
    }
}

/// The lowest level of messages that a client wants.
#[derive(Debug, Clone, Default)]
pub(crate) struct LevelWanted(Arc<AtomicU8>);

impl LevelWanted {
    pub(crate) fn set(&self, level: LoggingLevel) {
        self.0.store(rank(level), Ordering::Relaxed);
    }

    fn takes(&self, message: &NoteMessage) -> bool {
        rank(message.params.level) >= self.0.load(Ordering::Relaxed)
    }
}

fn rank(level: LoggingLevel) -> u8 {
    match level {
        LoggingLevel::Debug => 0,
        LoggingLevel::Info => 1,
        LoggingLevel::Notice => 2,
        LoggingLevel::Warning => 3,
        LoggingLevel::Error => 4,
        LoggingLevel::Critical => 5,
        _ => 6,
    }
}

/// Sends a connection's client its notes, until the connection is over. The caller is known from its first request on.
pub(crate) async fn send(
    executor: Executor,
    peer: Peer<RoleServer>,
    caller: Arc<OnceLock<Arc<Caller>>>,
    wanted: LevelWanted,
) {
    let mut messages = DueMessages::new(&executor);
    // A task that keeps the executor would keep the history open.
    drop(executor);
    while let Some(message) = messages.next(|| caller.get().cloned()).await {
        if wanted.takes(&message) && peer.notify_logging_message(message.params).await.is_err() {
            return;
        }
    }
}

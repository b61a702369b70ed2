//! The log: one subscriber that writes the executor's events as lines of `tracing`.
//!
//! The target of a line names its subject (`wieldy::call`, `wieldy::retry`, …), its message is constant, and everything
//! else is a field. Secrets are removed from texts of tools and models.

use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use wieldy_core::{Body, Closing, ConcurrencyLimit, Event, Executor, Filter, NoteState, Seen, Severity};

/// The targets of the lines that [`log_events`] writes.
pub const LOG_TARGETS: [&str; 8] = [
    "wieldy::call",
    "wieldy::retry",
    "wieldy::batch",
    "wieldy::definition",
    "wieldy::sandbox",
    "wieldy::source",
    "wieldy::agent",
    "wieldy::missed",
];

/// The maximal number of events that wait to be written; further ones are counted as missed.
const EVENTS_WAITING_MAX: usize = 4096;

/// A running log. Dropping it ends it too, without waiting for its last lines.
#[derive(Debug)]
pub struct EventLog {
    stop: oneshot::Sender<()>,
    writer: JoinHandle<()>,
}

/// Starts to write a line of `tracing` for each of the executor's events.
///
/// The start and the success of a call are logged at `info`, its arguments and the recorded part of its result at
/// `debug`, its progress and output at `trace`; failures, timeouts and refusals at `warn`, failures of the engine or a sandbox at `error`. A separate task writes the lines and slows no call. If it cannot
/// keep up, a line says how many events it missed.
///
/// # Panics
///
/// Panics outside of a tokio runtime.
pub fn log_events(executor: &Executor) -> EventLog {
    let mut events = executor.subscribe(Filter::default(), EVENTS_WAITING_MAX);
    let (stop, stopped) = oneshot::channel();
    let writer = tokio::spawn(async move {
        tokio::select! {
            () = async { while let Some(seen) = events.next().await { write(&seen) } } => {}
            _ = stopped => {}
        }
        while let Some(seen) = events.try_next() {
            write(&seen);
        }
    });
    EventLog { stop, writer }
}

impl EventLog {
    /// Ends the log once every event so far is written.
    pub async fn finish(self) {
        // Sending fails only if the executor is gone and the log has ended.
        let _ = self.stop.send(());
        let _ = self.writer.await;
    }
}

/// Writes one line, with the fields that identify its subject.
macro_rules! line {
    ($level:ident, $target:literal, $event:ident, $message:literal $(, $field:ident = $value:expr)* $(,)?) => {
        tracing::event!(
            target: $target,
            tracing::Level::$level,
            seq = $event.seq,
            execution = $event.subject.execution.map(display),
            batch = $event.subject.batch.map(display),
            call_id = $event.subject.call_id.as_deref(),
            tool = $event.subject.tool.as_deref(),
            provider = $event.subject.provider.as_deref(),
            agent = $event.subject.caller.agent.as_str(),
            session = $event.subject.caller.session.as_deref(),
            tenant = $event.subject.caller.tenant.as_deref(),
            $($field = $value,)*
            $message
        )
    };
}

/// Writes the line of a call that ended.
macro_rules! end {
    ($level:ident, $event:ident, $closing:ident, $message:literal) => {
        line!(
            $level,
            "wieldy::call",
            $event,
            $message,
            status = $closing.status.as_str(),
            duration_ms = $closing.duration_ms,
            queued_ms = $closing.queued_ms,
            attempts = $closing.attempts,
            cached = $closing.cached,
            output_bytes = $closing.output_bytes,
            artifact = $closing.artifact.map(display),
            code = code($closing),
            error = text($event, "/error/message"),
        )
    };
}

fn write(seen: &Seen) {
    match seen {
        Seen::Event(event) => {
            if let Some(recorded) = event.body.closing().and_then(|closing| closing.recorded.as_ref()) {
                line!(DEBUG, "wieldy::call", event, "call answered", result = recorded.json.as_str());
            }
            write_event(event);
        }
        Seen::Missed(count) => {
            tracing::warn!(target: "wieldy::missed", count, "events came too fast to be logged");
        }
    }
}

/// Writes one event. Field values are computed only if the line is enabled.
fn write_event(event: &Event) {
    match &event.body {
        Body::CallPending { .. } => {
            line!(DEBUG, "wieldy::call", event, "call accepted", arguments = display(json(event, "/arguments")));
        }
        Body::CallTask {} => line!(DEBUG, "wieldy::call", event, "call is a task from now on"),
        Body::CallStarted { attempt, attempts_max, timeout_ms, read_only, .. } => line!(
            INFO,
            "wieldy::call",
            event,
            "call started",
            attempt = attempt,
            attempts_max = attempts_max,
            timeout_ms = timeout_ms,
            read_only = read_only,
        ),
        Body::CallProgress { percent, elapsed_ms, .. } => line!(
            TRACE,
            "wieldy::call",
            event,
            "call progress",
            percent = percent,
            stream = text(event, "/stream"),
            text = text(event, "/message"),
            elapsed_ms = elapsed_ms,
        ),
        Body::CallWarning { .. } => {
            line!(WARN, "wieldy::call", event, "call has a warning", text = text(event, "/message"));
        }
        Body::ConfirmationRequested { confirmation, expires_in_ms, .. } => line!(
            INFO,
            "wieldy::call",
            event,
            "confirmation requested",
            confirmation = display(confirmation),
            reason = text(event, "/reason"),
            expires_in_ms = expires_in_ms,
        ),
        Body::ConfirmationReceived { confirmation, approved: true, .. } => line!(
            INFO,
            "wieldy::call",
            event,
            "confirmation given",
            confirmation = display(confirmation),
            by = text(event, "/by"),
        ),
        Body::ConfirmationReceived { confirmation, .. } => line!(
            WARN,
            "wieldy::call",
            event,
            "confirmation not given",
            confirmation = display(confirmation),
            by = text(event, "/by"),
        ),
        Body::CallSuccess(closing) => end!(INFO, event, closing, "call ended"),
        Body::CallFailure(closing) if event.severity() == Severity::Error => {
            end!(ERROR, event, closing, "call failed");
        }
        Body::CallFailure(closing) => end!(WARN, event, closing, "call failed"),
        Body::CallTimeout(closing) => end!(WARN, event, closing, "call timed out"),
        Body::CallCancelled(closing) => end!(INFO, event, closing, "call cancelled"),
        _ => write_around(event),
    }
}

/// Writes an event of retries and batches, which surround single runs.
fn write_around(event: &Event) {
    match &event.body {
        Body::RetryAttempt { attempt, attempts_max, delay_ms, error } => line!(
            WARN,
            "wieldy::retry",
            event,
            "attempt failed, another one follows",
            attempt = attempt,
            attempts_max = attempts_max,
            delay_ms = delay_ms,
            code = error.code.as_str(),
            error = text(event, "/error/message"),
        ),
        Body::RetrySuccess { attempts } => {
            line!(INFO, "wieldy::retry", event, "attempt succeeded", attempts = attempts);
        }
        Body::RetryExhausted { attempts, error } => line!(
            WARN,
            "wieldy::retry",
            event,
            "attempt failed, none follows",
            attempts = attempts,
            code = error.code.as_str(),
            error = text(event, "/error/message"),
        ),
        Body::BatchStarted { count, max_concurrency, asked, held_by, read_only, mutating, .. } => line!(
            INFO,
            "wieldy::batch",
            event,
            "batch started",
            count = count,
            mode = text(event, "/mode"),
            max_concurrency = max_concurrency,
            asked = asked,
            held_by = held_by.map(ConcurrencyLimit::as_str),
            read_only = read_only,
            mutating = mutating,
        ),
        Body::BatchCompleted(summary) => line!(
            INFO,
            "wieldy::batch",
            event,
            "batch ended",
            total = summary.total,
            executed = summary.executed,
            skipped = summary.skipped,
            succeeded = summary.succeeded,
            failed = summary.failed,
            duration_ms = summary.duration_ms,
        ),
        _ => write_other(event),
    }
}

/// Writes an event that is no step in the life of a call.
fn write_other(event: &Event) {
    match &event.body {
        Body::DefinitionChanged { previous_hash, current_hash } => line!(
            WARN,
            "wieldy::definition",
            event,
            "definition changed",
            previous_hash = previous_hash.as_str(),
            current_hash = current_hash.as_str(),
        ),
        Body::SandboxCreated { sandbox, level } => line!(
            DEBUG,
            "wieldy::sandbox",
            event,
            "sandbox created",
            sandbox = sandbox.as_str(),
            isolation = level.as_str(),
        ),
        Body::SandboxDestroyed { sandbox } => {
            line!(DEBUG, "wieldy::sandbox", event, "sandbox destroyed", sandbox = sandbox.as_str());
        }
        Body::SandboxViolation { sandbox, .. } => line!(
            WARN,
            "wieldy::sandbox",
            event,
            "sandbox violation",
            sandbox = sandbox.as_str(),
            text = text(event, "/message"),
        ),
        Body::SourceStale { .. } => {
            line!(
                WARN,
                "wieldy::source",
                event,
                "source changed",
                path = text(event, "/path"),
                project_id = text(event, "/project_id"),
            );
        }
        Body::SelfNotify(note) | Body::SelfRemind(note) if note.state == NoteState::Pending => line!(
            DEBUG,
            "wieldy::agent",
            event,
            "agent left a note",
            note = display(note.id),
            priority = text(event, "/priority"),
            category = text(event, "/category"),
            text = text(event, "/message"),
        ),
        Body::SelfNotify(note) | Body::SelfRemind(note) => match note.state {
            NoteState::Due => line!(DEBUG, "wieldy::agent", event, "note is due", note = display(note.id)),
            NoteState::Cancelled => line!(DEBUG, "wieldy::agent", event, "note cancelled", note = display(note.id)),
            _ => line!(DEBUG, "wieldy::agent", event, "note expired", note = display(note.id)),
        },
        Body::SelfDelivered(delivery) => line!(
            DEBUG,
            "wieldy::agent",
            event,
            "note delivered",
            note = display(delivery.note.id),
            late_ms = delivery.late_ms,
        ),
        other => line!(DEBUG, "wieldy::call", event, "another event", event = other.name()),
    }
}

fn code(closing: &Closing) -> Option<&'static str> {
    closing.error.as_ref().map(|error| error.code.as_str())
}

/// Returns a text from the data of an event.
fn text(event: &Event, pointer: &str) -> Option<String> {
    event.data().pointer(pointer)?.as_str().map(str::to_owned)
}

/// Returns a value from the data of an event as JSON on one line. Invisible characters are escaped, because they could
/// control a terminal.
fn json(event: &Event, pointer: &str) -> String {
    let json = event.data().pointer(pointer).unwrap_or(&Value::Null).to_string();
    let mut shown = String::with_capacity(json.len());
    for c in json.chars() {
        // The standard library knows which characters are printable; quotes and backslashes are JSON's own.
        if matches!(c, '"' | '\\' | '\'') || c.escape_debug().len() == 1 {
            shown.push(c);
        } else {
            c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| shown.push_str(&format!("\\u{unit:04x}")));
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;
    use wieldy_core::{Caller, Redacted, Subject};

    use super::*;

    #[test]
    fn arguments_stay_json_and_cannot_steer_a_terminal() {
        let arguments = json!({"text": "it's \"a\" \\ é ✓ 𝄞 \u{9b}31m \u{202e}\u{e0041}\n", "password": "canary"});
        let caller = Arc::new(Caller::local());
        let event = Event {
            seq: 1,
            at: "2026-01-01T00:00:00Z".parse().expect("a time"),
            subject: Arc::new(Subject::of(caller)),
            body: Body::CallPending {
                arguments: Redacted::from(arguments),
                called_as: None,
                workspace: None,
                metadata: None,
                task: false,
                rerun: None,
            },
        };
        let shown = super::json(&event, "/arguments");
        assert_eq!(shown, r#"{"text":"it's \"a\" \\ é ✓ 𝄞 \u009b31m \u202e\udb40\udc41\n","password":"[redacted]"}"#);
        let read: Value = serde_json::from_str(&shown).expect("it is JSON still");
        assert_eq!(read["text"], "it's \"a\" \\ é ✓ 𝄞 \u{9b}31m \u{202e}\u{e0041}\n");
    }
}

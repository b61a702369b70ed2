//! The log on standard error, and the one subscriber that writes a line per event into it.

use std::io;

use tracing::level_filters::LevelFilter;
use wieldy::{Event, Executor, Filter, Seen, Subscription};

use crate::output::Printer;

/// How many events may wait to be written; more are counted as missed.
const EVENTS_WAITING_MAX: usize = 4096;

/// Begins to log whatever is at least as grave as `level`.
pub(crate) fn start(level: LevelFilter, printer: &Printer) {
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(printer.stderr_has_colours())
        .with_writer(io::stderr)
        .finish();
    // It fails only where a log was started before, and then there is one.
    let _ = tracing::subscriber::set_global_default(log);
}

/// Waits for `work` and meanwhile logs the executor's events; those of its last moments too.
pub(crate) async fn with_events<T>(executor: &Executor, work: impl Future<Output = T>) -> T {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return work.await;
    }
    let mut events = executor.subscribe(Filter::default(), EVENTS_WAITING_MAX);
    let result = tokio::select! {
        result = work => result,
        () = follow(&mut events) => unreachable!("the executor is held, so its events do not end"),
    };
    while let Some(seen) = events.try_next() {
        write(&seen);
    }
    result
}

async fn follow(events: &mut Subscription) {
    while let Some(seen) = events.next().await {
        write(&seen);
    }
}

fn write(seen: &Seen) {
    match seen {
        Seen::Missed(count) => tracing::warn!(count, "events came too fast to be logged"),
        Seen::Event(event) => write_event(event),
    }
}

/// Writes one event. Arguments, which are in it without their secrets, and output are shown at `trace` only.
fn write_event(event: &Event) {
    let subject = &event.subject;
    let closing = event.body.closing();
    tracing::debug!(
        seq = event.seq,
        call = subject.execution.map(tracing::field::display),
        batch = subject.batch.map(tracing::field::display),
        tool = subject.tool.as_deref(),
        code = closing.and_then(|closing| closing.error.as_ref()).map(|error| error.code.as_str()),
        duration_ms = closing.map(|closing| closing.duration_ms),
        "{}",
        event.body.name()
    );
    if tracing::enabled!(tracing::Level::TRACE) {
        tracing::trace!(seq = event.seq, event = %event.cloud_event(), "the event whole");
    }
}

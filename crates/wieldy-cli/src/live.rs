//! A running call on a terminal: its output as it comes, and a spinner until there is some.

use std::convert::Infallible;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use wieldy::{Body, Observer, OutputSink, Seen, Stream, ToolResult, visible};

use crate::exit::Failure;
use crate::output::{Printer, shown_in_line};

/// The time before the spinner appears.
const SPINNER_AFTER: Duration = Duration::from_millis(300);
const SPINNER_EVERY: Duration = Duration::from_millis(100);
/// The maximal length of the shown text that is stored for the comparison with the result, whose own limit is far
/// lower.
const KEPT_BYTES_MAX: usize = 4 * 1024 * 1024;

/// The view of a running call.
pub(crate) struct Live {
    printer: Printer,
    spinner: ProgressBar,
    /// True if output is printed as it comes, where a person reads it.
    streams: bool,
    shown: Mutex<Shown>,
}

/// The output that was already printed.
#[derive(Default)]
struct Shown {
    text: String,
    /// Bytes at the end that are not a whole character yet.
    unfinished: Vec<u8>,
    /// True if more was printed than is stored.
    is_cut: bool,
    ends_in_line: bool,
}

impl Shown {
    fn is_empty(&self) -> bool {
        self.text.is_empty() && !self.is_cut
    }
}

impl Live {
    pub(crate) fn new(tool: &str, printer: &Printer, streams: bool) -> Self {
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("the template is a constant");
        let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()).with_style(style);
        spinner.set_message(shown_in_line(tool));
        Self { printer: *printer, spinner, streams, shown: Mutex::default() }
    }

    /// Shows the spinner once the tool has run for a moment, for as long as this is polled and no output comes.
    pub(crate) async fn spin(&self, mut events: Observer) -> Infallible {
        // Before the start of the tool, a person may be asked at the same terminal.
        while let Some(seen) = events.next().await {
            if let Seen::Event(event) = &seen
                && let Body::CallProgress { percent: Some(percent), message, stream: None, .. } = &event.body
            {
                let message = message.as_deref().map(shown_in_line).unwrap_or_default();
                self.spinner.set_message(format!("{percent:.0} % {message}"));
            }
            if matches!(&seen, Seen::Event(event) if matches!(event.body, Body::CallStarted { .. })) {
                tokio::time::sleep(SPINNER_AFTER).await;
                let shown = self.lock();
                if shown.is_empty() && std::io::stderr().is_terminal() {
                    self.spinner.set_draw_target(ProgressDrawTarget::stderr());
                    self.spinner.reset_elapsed();
                    self.spinner.enable_steady_tick(SPINNER_EVERY);
                }
            }
        }
        std::future::pending().await
    }

    /// Removes the spinner.
    pub(crate) fn clear(&self) {
        self.spinner.finish_and_clear();
    }

    /// Prints the part of a result's text that was not printed as it came.
    pub(crate) fn print_rest(&self, result: &ToolResult) -> Result<(), Failure> {
        let mut shown = self.lock();
        let text = result.text();
        if shown.is_empty() && shown.unfinished.is_empty() {
            return self.printer.tool_text(&text);
        }
        let last = String::from_utf8_lossy(&std::mem::take(&mut shown.unfinished)).into_owned();
        self.print(&mut shown, &last)?;
        if !shown.is_cut
            && let Some(rest) = text.strip_prefix(&shown.text)
        {
            let rest = rest.to_owned();
            self.print(&mut shown, &rest)?;
            return self.end_line(&shown);
        }
        self.end_line(&shown)?;
        match result.artifact {
            Some(artifact) => self.printer.tell(&format!("the whole output is {artifact}")),
            None => self.printer.tool_text(&text)?,
        }
        Ok(())
    }

    fn end_line(&self, shown: &Shown) -> Result<(), Failure> {
        if shown.ends_in_line { Ok(()) } else { self.printer.data(b"\n") }
    }

    fn print(&self, shown: &mut Shown, text: &str) -> Result<(), Failure> {
        if text.is_empty() {
            return Ok(());
        }
        if shown.text.len() + text.len() > KEPT_BYTES_MAX {
            shown.text = String::new();
            shown.is_cut = true;
        } else if !shown.is_cut {
            shown.text.push_str(text);
        }
        shown.ends_in_line = text.ends_with('\n');
        self.printer.data(visible(text).as_bytes())
    }

    fn lock(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl OutputSink for Live {
    fn write(&self, _stream: Stream, bytes: &[u8]) {
        if !self.streams || self.printer.json || !self.printer.stdout_is_terminal() {
            return;
        }
        // A terminal paused by Ctrl-S accepts no output, and must not block the runtime's timers.
        tokio::task::block_in_place(|| {
            let mut shown = self.lock();
            self.clear();
            shown.unfinished.extend_from_slice(bytes);
            let whole = shown.unfinished.len() - begun(&shown.unfinished);
            let rest = shown.unfinished.split_off(whole);
            let text = String::from_utf8_lossy(&std::mem::replace(&mut shown.unfinished, rest)).into_owned();
            // Errors are ignored here: printing the result at the end reports a closed standard output.
            let _ = self.print(&mut shown, &text);
        });
    }
}

/// Returns the number of bytes at the end that start a character without completing it.
fn begun(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last();
    let invalid = last.map_or(&[][..], |chunk| chunk.invalid());
    match std::str::from_utf8(invalid) {
        Err(error) if error.error_len().is_none() => invalid.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::begun;

    #[test]
    fn an_incomplete_character_is_held_back() {
        for (bytes, count) in [
            (&b""[..], 0),
            (b"abc", 0),
            ("a\u{e9}".as_bytes(), 0),
            (b"a\xc3", 1),
            (b"a\xf0\x9f\x98", 3),
            (b"a\xff", 0),
            (b"a\xc3b", 0),
        ] {
            assert_eq!(begun(bytes), count, "{bytes:?}");
        }
    }
}

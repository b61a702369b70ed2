//! Search results: collects matching lines of files, within limits, and formats them.

use std::io;
use std::path::Path;

use grep_searcher::{Searcher, Sink, SinkContext, SinkContextKind, SinkFinish, SinkMatch};
use serde_json::{Value, json};
use wieldy_core::Outcome;

use super::{pattern, text};

/// Maximum length of a line. A longer line is cut.
const LINE_BYTES_MAX: usize = 500;
/// Maximum bytes of text that are shown, regardless of the limit of lines.
pub(crate) const TEXT_BYTES_MAX: usize = 64 * 1024;
/// Maximum number of matches that are counted.
pub(crate) const COUNT_MAX: usize = 100_000;

/// All results so far.
pub(crate) struct Matches {
    text: String,
    matches: Vec<Value>,
    /// The number of matching lines, shown or not.
    count: usize,
    /// The number of matches that may still be shown.
    matches_left: usize,
    /// The number of files that could not be searched.
    pub(crate) skipped: usize,
    /// The length of the longest line that can be searched.
    line_bytes_max: usize,
    /// True if some files were not reached.
    pub(crate) unfinished: bool,
    /// The limit that kept the search from some files.
    pub(crate) left_out: Option<String>,
}

impl Matches {
    pub(crate) fn new(limit: usize, line_bytes_max: usize) -> Self {
        Self {
            text: String::new(),
            matches: Vec::new(),
            count: 0,
            matches_left: limit,
            skipped: 0,
            line_bytes_max,
            unfinished: false,
            left_out: None,
        }
    }

    /// Returns true if searching more files would not change the result.
    pub(crate) fn is_full(&mut self) -> bool {
        let is_full = self.count >= COUNT_MAX;
        self.unfinished |= is_full;
        is_full
    }

    /// Adds the results from the file at `path`.
    pub(crate) fn add_file(&mut self, path: &Path, sink: FileSink) {
        if sink.count() == 0 {
            return;
        }
        self.count += sink.count;
        let path = path.to_string_lossy();
        if sink.context && !self.text.is_empty() && !sink.lines.is_empty() {
            self.text.push_str("--\n");
        }
        for line in sink.lines {
            let ResultLine { kind, number, text } = line;
            match kind {
                LineKind::Match => {
                    self.text.push_str(&format!("{path}:{number}:{text}\n"));
                    self.matches.push(json!({ "path": path, "line": number, "text": text }));
                    self.matches_left -= 1;
                }
                LineKind::Context => self.text.push_str(&format!("{path}-{number}-{text}\n")),
                LineKind::Gap => self.text.push_str("--\n"),
            }
        }
        if self.text.len() > TEXT_BYTES_MAX {
            self.matches_left = 0;
        }
    }

    /// Returns the answer.
    pub(crate) fn outcome(self) -> Outcome {
        let shown = self.matches.len();
        let more = shown < self.count || self.unfinished;
        let cut = more || self.left_out.is_some();
        let mut text = if self.count == 0 { "no matches\n".to_owned() } else { self.text };
        if more {
            let least = if self.unfinished { "at least " } else { "" };
            text.push_str(&format!(
                "[{shown} of {least}{} matching lines; narrow the search for the rest]\n",
                self.count
            ));
        }
        if let Some(left_out) = self.left_out {
            text.push_str(&format!("[{left_out}]\n"));
        }
        if self.skipped > 0 {
            let why = match self.line_bytes_max {
                pattern::LINE_BYTES_MAX => String::new(),
                bytes => format!("; with so large a pattern, no line may have more than {bytes} bytes"),
            };
            text.push_str(&format!("[{} files could not be searched{why}]\n", self.skipped));
        }
        text.pop();
        let structured = json!({ "matches": self.matches, "count": self.count, "cut": cut });
        let mut outcome = Outcome::text(text).structured(structured);
        outcome.partial = cut;
        outcome
    }
}

/// The results from one file. They are separate until the end of the file, which may turn out to be binary.
pub(crate) struct FileSink {
    lines: Vec<ResultLine>,
    count: usize,
    count_max: usize,
    matches_left: usize,
    bytes_left: usize,
    context: bool,
    binary: bool,
}

/// A line to show.
pub(crate) struct ResultLine {
    pub(crate) kind: LineKind,
    /// The number of the line in its file, from 1.
    pub(crate) number: u64,
    pub(crate) text: String,
}

/// The kinds of lines to show.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineKind {
    Match,
    Context,
    /// A mark for left-out lines.
    Gap,
}

impl FileSink {
    /// Creates a sink that shows and counts no more than the remaining limits.
    pub(crate) fn new(matches: &Matches) -> Self {
        let count_max = COUNT_MAX - matches.count.min(COUNT_MAX);
        Self::within(count_max, matches.matches_left, TEXT_BYTES_MAX.saturating_sub(matches.text.len()))
    }

    /// Creates a sink that counts and shows so many matches, with so many bytes of text.
    pub(crate) fn within(count_max: usize, matches_left: usize, bytes_left: usize) -> Self {
        Self { lines: Vec::new(), count: 0, count_max, matches_left, bytes_left, context: false, binary: false }
    }

    /// Returns the number of matching lines. A binary file has none.
    pub(crate) fn count(&self) -> usize {
        if self.binary { 0 } else { self.count }
    }

    /// Returns the lines to show, in order.
    pub(crate) fn into_lines(self) -> Vec<ResultLine> {
        self.lines
    }

    fn add(&mut self, kind: LineKind, number: Option<u64>, bytes: &[u8]) {
        let text = shown(bytes);
        self.bytes_left = self.bytes_left.saturating_sub(text.len());
        self.lines.push(ResultLine { kind, number: number.unwrap_or_default(), text });
        if self.bytes_left == 0 {
            self.matches_left = 0;
        }
    }
}

impl Sink for FileSink {
    type Error = io::Error;

    fn matched(&mut self, _searcher: &Searcher, found: &SinkMatch<'_>) -> io::Result<bool> {
        self.count += 1;
        if self.matches_left > 0 {
            self.matches_left -= 1;
            self.add(LineKind::Match, found.line_number(), found.bytes());
        } else {
            // The context lines that follow belong to a match that is not shown.
            self.bytes_left = 0;
        }
        Ok(self.count < self.count_max)
    }

    fn context(&mut self, _searcher: &Searcher, line: &SinkContext<'_>) -> io::Result<bool> {
        let of_shown = self.matches_left > 0 || (matches!(line.kind(), SinkContextKind::After) && self.bytes_left > 0);
        if of_shown {
            self.add(LineKind::Context, line.line_number(), line.bytes());
        }
        Ok(true)
    }

    fn context_break(&mut self, _searcher: &Searcher) -> io::Result<bool> {
        if self.matches_left > 0 {
            self.lines.push(ResultLine { kind: LineKind::Gap, number: 0, text: String::new() });
        }
        Ok(true)
    }

    fn binary_data(&mut self, _searcher: &Searcher, _offset: u64) -> io::Result<bool> {
        self.binary = true;
        Ok(false)
    }

    fn begin(&mut self, searcher: &Searcher) -> io::Result<bool> {
        self.context = searcher.after_context() > 0;
        Ok(true)
    }

    fn finish(&mut self, _searcher: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        self.binary |= finish.binary_byte_offset().is_some();
        Ok(())
    }
}

/// Formats a line for people: without its end, invalid UTF-8 replaced, and cut between characters.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
    // Converts no more than can be shown: a line may have megabytes.
    let line = String::from_utf8_lossy(&bytes[..bytes.len().min(LINE_BYTES_MAX + 4)]);
    match text::cut(&line, LINE_BYTES_MAX) {
        whole if bytes.len() <= LINE_BYTES_MAX => whole.to_owned(),
        part => format!("{part} […]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_shown_without_its_end_and_cut_between_characters() {
        assert_eq!(shown(b"a\r\n"), "a");
        assert_eq!(shown(b"a\xFFb"), "a\u{FFFD}b");
        let long = format!("x{}", "é".repeat(LINE_BYTES_MAX));
        assert_eq!(shown(long.as_bytes()), format!("x{} […]", "é".repeat((LINE_BYTES_MAX - 1) / 2)));
    }
}

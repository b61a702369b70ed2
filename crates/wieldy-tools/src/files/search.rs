//! `Search`: finds lines of files by a regular expression.

use std::io;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cap_std::fs::File;
use grep_matcher::LineTerminator;
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{BinaryDetection, Searcher, SearcherBuilder};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::matches::{FileSink, Matches};
use super::pattern::LINE_BYTES_MAX;
use super::spelling::PatternKind;
use super::walk::WalkOptions;
use super::workspace::Workspace;
use super::{glob, pattern};

/// A tool that searches the files of the workspace.
pub struct Search {
    workspace: Arc<Workspace>,
}

/// A text search.
#[derive(Deserialize, JsonSchema)]
pub struct SearchArgs {
    /// The regular expression, in Rust's syntax. It is matched against each line separately.
    #[schemars(length(min = 1, max = 10_000))]
    pattern: String,
    /// The folder or file to search, relative to the workspace.
    #[serde(default = "super::here")]
    path: String,
    /// Search only files like this: `*.rs` anywhere, or `src/**/*.rs` below `path`.
    #[schemars(length(min = 1, max = 1000))]
    glob: Option<String>,
    /// Case sensitivity; `smart` is sensitive only if the pattern has a capital letter.
    #[serde(default)]
    case: Case,
    /// The pattern is plain text, not a regular expression.
    #[serde(default)]
    literal: bool,
    /// Number of lines to show before and after each match.
    #[serde(default)]
    #[schemars(range(max = 20))]
    context: u8,
    /// Maximum number of matching lines to show.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 10_000))]
    limit: NonZeroU32,
    /// Search files whose names begin with a dot too.
    #[serde(default)]
    hidden: bool,
    /// Search files that `.gitignore` excludes too.
    #[serde(default)]
    ignored: bool,
}

fn limit() -> NonZeroU32 {
    NonZeroU32::new(200).expect("not zero")
}

/// Case sensitivity.
#[derive(Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Case {
    #[default]
    Smart,
    Sensitive,
    Insensitive,
}

impl Search {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for Search {
    type Args = SearchArgs;

    fn spec(&self) -> ToolSpec {
        super::reading(
            "Search",
            "SearchFiles",
            "Searches files for a regular expression and gives the matching lines as `path:line:text`, sorted by \
             path. Binary files, hidden files and those that `.gitignore` excludes are left out unless asked for.",
        )
        .weak_alias("search_files")
        .timeout(Duration::from_secs(30))
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[("glob", PatternKind::Filter)])
    }

    async fn run(&self, args: SearchArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || search(&workspace, &args, &run)).await?)
    }
}

fn search(workspace: &Workspace, args: &SearchArgs, run: &Run) -> Result<Outcome, FileError> {
    let (stop, guard) = (run.stop(), &workspace.guard(&run.confinement().files));
    let mut lines = LineSearch::new(&args.pattern, args.literal, args.case, args.context, stop)?;
    let wanted = args.glob.as_deref().map(glob::filter).transpose()?;
    let given = workspace.given(&args.path)?;
    let mut matches = Matches::new(args.limit.get() as usize, lines.line_bytes_max);
    match workspace.open_file(&given, guard) {
        Ok((file, _)) => add_file(&mut lines, &mut matches, given.relative(), file),
        Err(FileError::Kind { is: "a folder", .. }) => {
            let base = workspace.key(&given)?;
            let options = WalkOptions { depth: u32::MAX, hidden: args.hidden, ignored: args.ignored };
            let mut walk = workspace.walk(&given, options, guard, stop)?;
            for entry in walk.by_ref() {
                let below = entry.path.strip_prefix(&base).unwrap_or(&entry.path);
                if !entry.file_type.is_file() || wanted.as_ref().is_some_and(|wanted| !wanted(below)) {
                    continue;
                }
                match entry.open() {
                    Ok(file) if guard.check_shown(&entry.path).is_ok() => {
                        add_file(&mut lines, &mut matches, &entry.path, file);
                    }
                    _ => matches.skipped += 1,
                }
                if matches.is_full() {
                    break;
                }
            }
            matches.left_out = walk.note_on_limits();
        }
        Err(error) => return Err(error),
    }
    matches.unfinished |= stop.is_cancelled();
    Ok(matches.outcome())
}

fn add_file(lines: &mut LineSearch<'_>, matches: &mut Matches, path: &Path, file: File) {
    let mut sink = FileSink::new(matches);
    match lines.file(file, &mut sink) {
        Ok(()) => matches.add_file(path, sink),
        Err(_) => matches.skipped += 1,
    }
}

/// A search for one pattern in the lines of files.
pub(crate) struct LineSearch<'a> {
    matcher: RegexMatcher,
    searcher: Searcher,
    stop: &'a CancellationToken,
    /// The length of the longest line that can be searched.
    pub(crate) line_bytes_max: usize,
}

impl<'a> LineSearch<'a> {
    /// Compiles the pattern. Each match comes with `context` lines before and after it.
    pub(crate) fn new(
        pattern: &str,
        literal: bool,
        case: Case,
        context: u8,
        stop: &'a CancellationToken,
    ) -> Result<Self, FileError> {
        let mut builder = RegexMatcherBuilder::new();
        builder
            .case_smart(case == Case::Smart)
            .case_insensitive(case == Case::Insensitive)
            .fixed_strings(literal)
            .multi_line(true)
            .crlf(true);
        let matcher = pattern::line_matcher(pattern, &mut builder)?;
        let line_bytes_max = if literal { LINE_BYTES_MAX } else { pattern::line_bytes_max(pattern) };
        Ok(Self { matcher, searcher: searcher(context, line_bytes_max), stop, line_bytes_max })
    }

    /// Searches one file. Fails if it is not a regular file, cannot be read, or has a line that is too long.
    pub(crate) fn file(&mut self, file: File, sink: &mut FileSink) -> io::Result<()> {
        // The file may have been replaced by a pipe since the folder was read.
        if !file.metadata()?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let reader = Stoppable { reader: file, stop: self.stop };
        self.searcher.search_reader(&self.matcher, reader, sink)
    }
}

/// A reader that fails once the run is stopped.
pub(super) struct Stoppable<'a, R> {
    pub(super) reader: R,
    pub(super) stop: &'a CancellationToken,
}

impl<R: io::Read> io::Read for Stoppable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.is_cancelled() {
            return Err(io::Error::other("the run was stopped"));
        }
        self.reader.read(buffer)
    }
}

/// Returns a searcher that shows this many lines before and after each match. It fails at a line that is too long.
pub(super) fn searcher(context: u8, line_bytes_max: usize) -> Searcher {
    let context = usize::from(context.min(20));
    SearcherBuilder::new()
        .line_number(true)
        .line_terminator(LineTerminator::crlf())
        .before_context(context)
        .after_context(context)
        .binary_detection(BinaryDetection::quit(0))
        .heap_limit(Some(line_bytes_max))
        .build()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_search_in_a_file_stops_with_the_run() {
        let stop = CancellationToken::new();
        let mut reader = Stoppable { reader: io::repeat(b'x'), stop: &stop };
        assert!(reader.read(&mut [0; 9]).is_ok());
        stop.cancel();
        assert!(reader.read(&mut [0; 9]).is_err());
    }
}

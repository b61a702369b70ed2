//! Compiles callers' regular expressions within limits: a few characters can stand for gigabytes.

use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use regex::bytes::{Regex, RegexBuilder};
use regex_automata::nfa::thompson::NFA;
use regex_automata::util::syntax;

use super::error::FileError;

/// Maximum memory of a compiled pattern, and the same again for the tables that a search builds.
const COMPILED_BYTES_MAX: usize = 2 * 1024 * 1024;

/// Maximum length of a line that a search matches, which bounds the memory.
pub(super) const LINE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Maximum number of steps in one line. A step is one state of the pattern at one byte. A search cannot be stopped
/// within a line, so this many steps, about six seconds, may follow the end of its time.
const STEPS_MAX: usize = 1 << 30;

/// Minimum length of the lines that any pattern may be matched with.
const LINE_BYTES_MIN: usize = 16 * 1024;

/// The share of a line in the pieces that a long line of an artifact is searched in.
const PIECES: usize = 4;

/// Returns the length of the longest line that may be matched with this pattern. It is shorter for a large pattern.
pub(super) fn line_bytes_max(pattern: &str) -> usize {
    let config = NFA::config().utf8(false).nfa_size_limit(Some(8 * COMPILED_BYTES_MAX));
    let syntax = syntax::Config::new().case_insensitive(true).utf8(false);
    let states =
        NFA::compiler().configure(config).syntax(syntax).build(pattern).map_or(usize::MAX, |nfa| nfa.states().len());
    (STEPS_MAX / states.max(1)).clamp(LINE_BYTES_MIN, LINE_BYTES_MAX)
}

/// Returns the length of the pieces in which a long line is searched that need not be matched as a whole.
pub(super) fn piece_bytes_max(pattern: &str) -> usize {
    line_bytes_max(pattern) / PIECES
}

/// Compiles a pattern, or returns its mistake.
pub(super) fn regex(pattern: &str) -> Result<Regex, FileError> {
    compiled(pattern, "escape special characters with a backslash, such as `\\(`")
}

fn compiled(pattern: &str, advice: &'static str) -> Result<Regex, FileError> {
    let mut builder = RegexBuilder::new(pattern);
    builder.size_limit(COMPILED_BYTES_MAX).dfa_size_limit(COMPILED_BYTES_MAX);
    builder.build().map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => too_large(),
        error => FileError::refused(format!("the pattern is not a regular expression: {error}"), advice),
    })
}

/// Compiles a pattern for searching line by line.
pub(super) fn line_matcher(pattern: &str, builder: &mut RegexMatcherBuilder) -> Result<RegexMatcher, FileError> {
    builder.size_limit(COMPILED_BYTES_MAX).dfa_size_limit(COMPILED_BYTES_MAX);
    builder.build(pattern).map_err(|error| {
        let advice = "escape special characters with a backslash, such as `\\(`, or set `literal`";
        match error.kind() {
            grep_regex::ErrorKind::NotAllowed(_) => FileError::refused(
                "the pattern holds a line break, and each line is searched by itself",
                "search for one of the lines, with `context` to see those around it",
            ),
            // The matcher adds text to the pattern, so a pattern that compiles alone may be too large with it.
            grep_regex::ErrorKind::Regex(text) if text.contains("size limit") => too_large(),
            // This error shows the pattern with the text that the matcher adds, and points to the wrong place.
            _ => match compiled(pattern, advice) {
                Err(plain) => plain,
                Ok(_) => FileError::refused(format!("the pattern cannot be searched for: {error}"), advice),
            },
        }
    })
}

fn too_large() -> FileError {
    FileError::refused(
        format!("the pattern is too large: compiled it takes more than {COMPILED_BYTES_MAX} bytes"),
        "repeat less often: `{900}{1000}` stands for 900,000 copies; `\\w` and `.` are large, `[a-z]` is small",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_large_patterns_shorten_the_lines_that_may_be_matched() {
        for usual in ["fn main", r"\bserde(_json)?::", "TODO|FIXME", "[a-z_]{1,40}", r"^\s*(\d+)"] {
            assert!(line_bytes_max(usual) >= 4 * 1024 * 1024, "{usual}: {}", line_bytes_max(usual));
        }
        assert_eq!(line_bytes_max("fn"), LINE_BYTES_MAX);
        assert_eq!([line_bytes_max(r"\w+\s*=\s*\w+"), line_bytes_max("[ab]*a[ab]{7000}c")], [1_629_350, 153_194]);
        assert_eq!(piece_bytes_max("[ab]*a[ab]{7000}c"), 38_298);
        assert_eq!(line_bytes_max("a{100000}"), LINE_BYTES_MIN);
    }
}

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
/// within a line.
const STEPS_MAX: usize = 1 << 32;

/// Returns the length of the longest line that may be matched with this pattern. It is shorter for a large pattern.
pub(super) fn line_bytes_max(pattern: &str) -> usize {
    let config = NFA::config().utf8(false).nfa_size_limit(Some(8 * COMPILED_BYTES_MAX));
    let syntax = syntax::Config::new().case_insensitive(true).utf8(false);
    let states =
        NFA::compiler().configure(config).syntax(syntax).build(pattern).map_or(usize::MAX, |nfa| nfa.states().len());
    (STEPS_MAX / states.max(1)).clamp(64 * 1024, LINE_BYTES_MAX)
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
            assert_eq!(line_bytes_max(usual), LINE_BYTES_MAX, "{usual}");
        }
        assert_eq!([line_bytes_max(r"\w+\s*=\s*\w+"), line_bytes_max("[ab]*a[ab]{7000}c")], [6_517_401, 612_778]);
        assert_eq!(line_bytes_max("a{100000}"), 64 * 1024);
    }
}

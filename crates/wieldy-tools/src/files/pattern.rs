//! Compiles callers' regular expressions within limits: a few characters can stand for gigabytes.

use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use regex::bytes::{Regex, RegexBuilder};

use super::error::FileError;

/// Maximum memory of a compiled pattern, and the same again for the tables that a search builds.
const COMPILED_BYTES_MAX: usize = 2 * 1024 * 1024;

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

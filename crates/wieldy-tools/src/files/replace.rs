//! Replaces exact text, and finds similar text if the old text does not occur. Pure functions.

use std::ops::ControlFlow;

/// Text with replacements made.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Replacement {
    pub(crate) text: String,
    pub(crate) count: usize,
}

/// The reason why nothing was replaced.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReplaceError {
    /// The text to look for is empty.
    Empty,
    /// The old text and the new one are the same.
    Same,
    /// The text does not occur; `near` is similar text.
    Absent { near: Option<SimilarText> },
    /// The text occurs several times: on these lines, of which only the first are listed.
    Several { count: usize, lines: Vec<usize> },
    /// The result would have this many bytes.
    TooLarge { bytes: usize },
}

/// Text that differs from the old text only in white space.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SimilarText {
    /// Its first line, from 1.
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// Maximum number of line comparisons in a search for similar text.
const NEAR_LOOKS_MAX: usize = 1_000_000;
/// Maximum number of line numbers that are listed if a text occurs several times.
const LINES_SHOWN_MAX: usize = 20;

/// Replaces `old` by `new`: its only occurrence or, with `all`, every one from the left without overlaps.
///
/// If every line of the text ends in CRLF, a bare LF in `old` and `new` stands for CRLF: models drop the CR.
pub(crate) fn replace(
    text: &str,
    old: &str,
    new: &str,
    all: bool,
    bytes_max: usize,
) -> Result<Replacement, ReplaceError> {
    if old.is_empty() {
        return Err(ReplaceError::Empty);
    }
    if uses_crlf(text) {
        replace_exactly(text, &with_crlf(old), &with_crlf(new), all, bytes_max)
    } else {
        replace_exactly(text, old, new, all, bytes_max)
    }
}

fn replace_exactly(text: &str, old: &str, new: &str, all: bool, bytes_max: usize) -> Result<Replacement, ReplaceError> {
    if old == new {
        return Err(ReplaceError::Same);
    }
    let count = text.matches(old).count();
    if count == 0 {
        return Err(ReplaceError::Absent { near: find_similar(text, old) });
    }
    if count > 1 && !all {
        return Err(ReplaceError::Several { count, lines: lines_of(text, old) });
    }
    // Checked before the result is built: a short old text and a long new one could fill the memory.
    let bytes = text.len().saturating_add(count.saturating_mul(new.len())) - count * old.len();
    if bytes > bytes_max {
        return Err(ReplaceError::TooLarge { bytes });
    }
    Ok(Replacement { text: text.replace(old, new), count })
}

fn uses_crlf(text: &str) -> bool {
    let breaks = text.matches('\n').count();
    breaks > 0 && text.matches("\r\n").count() == breaks
}

fn with_crlf(text: &str) -> String {
    text.replace("\r\n", "\n").replace('\n', "\r\n")
}

fn lines_of(text: &str, old: &str) -> Vec<usize> {
    let (mut line, mut counted) = (1, 0);
    let places = text.match_indices(old).take(LINES_SHOWN_MAX);
    places
        .map(|(at, _)| {
            line += text[counted..at].matches('\n').count();
            counted = at;
            line
        })
        .collect()
}

/// Returns the first lines that equal `old` except for white space.
fn find_similar(text: &str, old: &str) -> Option<SimilarText> {
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let wanted: Vec<String> = old.trim().lines().map(squeezed).collect();
    let first = wanted.first().filter(|line| !line.is_empty())?;
    let lines: Vec<&str> = text.lines().collect();
    // The first and the last line of `old` may be parts of lines.
    let fits = |index: usize, line: &str| {
        let line = squeezed(line);
        match (index == 0, index + 1 == wanted.len()) {
            (true, true) => line.contains(first.as_str()),
            (true, false) => line.ends_with(first.as_str()),
            (false, true) => line.starts_with(&wanted[index]),
            (false, false) => line == wanted[index],
        }
    };
    // In a file with many equal lines, each place is compared almost to its end.
    let mut looks_left = NEAR_LOOKS_MAX;
    let mut look = |at: usize, line: &str| {
        looks_left = looks_left.checked_sub(1)?;
        Some(fits(at, line))
    };
    let mut runs = lines.windows(wanted.len());
    let start = runs.try_fold(0, |start, run| {
        for (at, line) in run.iter().enumerate() {
            match look(at, line) {
                Some(true) => {}
                Some(false) => return ControlFlow::Continue(start + 1),
                None => return ControlFlow::Break(None),
            }
        }
        ControlFlow::Break(Some(start))
    });
    let ControlFlow::Break(Some(start)) = start else { return None };
    Some(SimilarText { line: start + 1, text: lines[start..start + wanted.len()].join("\n") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn replaced(text: &str, old: &str, new: &str, all: bool) -> Result<Replacement, ReplaceError> {
        replace(text, old, new, all, 100)
    }

    fn replacement(text: &str, count: usize) -> Result<Replacement, ReplaceError> {
        Ok(Replacement { text: text.into(), count })
    }

    #[test]
    fn one_place_is_replaced_and_several_only_on_demand() {
        assert_eq!(replaced("a b c", "b", "x", false), replacement("a x c", 1));
        assert_eq!(replaced("b\nb a\n\nb", "b", "x", true), replacement("x\nx a\n\nx", 3));
        assert_eq!(
            replaced("b\nb a\n\nb", "b", "x", false),
            Err(ReplaceError::Several { count: 3, lines: vec![1, 2, 4] })
        );
        assert_eq!(replaced("a", "", "x", true), Err(ReplaceError::Empty));
        assert_eq!(replaced("a", "a", "a", true), Err(ReplaceError::Same));
        assert_eq!(replaced(&"a".repeat(50), "a", "xyz", true), Err(ReplaceError::TooLarge { bytes: 150 }));
    }

    #[test]
    fn text_that_differs_only_in_white_space_is_shown_with_its_line() {
        let text = "fn main() {\n\tlet x = 1;\n\tlet y  = 2;\n}\n";
        let near = SimilarText { line: 2, text: "\tlet x = 1;\n\tlet y  = 2;".into() };
        assert_eq!(
            replaced(text, "    let x = 1;\n    let y = 2;\n", "", false),
            Err(ReplaceError::Absent { near: Some(near) })
        );
        assert_eq!(replaced(text, "let z = 3;", "", false), Err(ReplaceError::Absent { near: None }));
        assert_eq!(replaced(text, " \n ", "", false), Err(ReplaceError::Absent { near: None }));
    }

    #[test]
    fn line_ends_stay_what_they_are_in_the_whole_file() {
        assert_eq!(replaced("a\r\nb\r\n", "a\nb", "x\ny", false), replacement("x\r\ny\r\n", 1));
        assert_eq!(replaced("a\r\nb\r\n", "a\r\nb", "x\r\ny", false), replacement("x\r\ny\r\n", 1));
        assert_eq!(replaced("a\r\nb\nc", "b\nc", "x\ny", false), replacement("a\r\nx\ny", 1), "mixed: taken literally");
        assert_eq!(replaced("a\r\n", "\r\n", "\n", false), Err(ReplaceError::Same));
    }

    #[test]
    fn the_search_for_similar_text_is_bounded() {
        let (text, old) = ("a\n".repeat(100_000), format!("{}b", "a\n".repeat(5_000)));
        assert_eq!(replace(&text, &old, "x", false, 100), Err(ReplaceError::Absent { near: None }));
    }

    proptest! {
        #[test]
        fn replacing_all_agrees_with_the_standard_library(
            text in "[ab \r\n]{0,40}", old in "[ab\n]{1,3}", new in "[abé\n]{0,4}",
        ) {
            let (text, old, new) = (text.as_str(), old.as_str(), new.as_str());
            let (plain_old, plain_new) = if uses_crlf(text) { (with_crlf(old), with_crlf(new)) } else { (old.into(), new.into()) };
            match replace(text, old, new, true, usize::MAX) {
                Ok(result) => {
                    prop_assert_eq!(result.text, text.replace(&plain_old, &plain_new));
                    prop_assert!(result.count > 0);
                }
                Err(ReplaceError::Same) => prop_assert_eq!(plain_old, plain_new),
                Err(ReplaceError::Absent { .. }) => prop_assert!(!text.contains(&plain_old)),
                Err(other) => prop_assert!(false, "{:?}", other),
            }
        }
    }
}

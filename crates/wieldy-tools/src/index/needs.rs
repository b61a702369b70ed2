//! The words that a text must have so that a pattern can match in it. They choose the files to search.
//!
//! The choice is exact: a file without them has no match. Where a pattern needs no word, every file is searched.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Hir, HirKind};

use super::words::is_word_char;
use super::{FileId, View};

/// Maximum number of different conditions that are looked up. The others are left out.
const NEEDS_MAX: usize = 32;

/// A condition on the words of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Need {
    /// No condition.
    Nothing,
    /// A word with this text in it. A border says that the word begins, or ends, with the text.
    Word {
        text: String,
        begins: bool,
        ends: bool,
    },
    All(Vec<Need>),
    Any(Vec<Need>),
}

impl Need {
    /// Returns the condition of a plain text.
    pub(crate) fn of_text(text: &str) -> Self {
        let mut needs = Vec::new();
        let mut start = None;
        for (at, character) in text.char_indices().chain([(text.len(), ' ')]) {
            match start {
                None if is_word_char(character) && at < text.len() => start = Some(at),
                Some(from) if !is_word_char(character) || at == text.len() => {
                    let (begins, ends) = (from > 0, at < text.len());
                    needs.push(Self::Word { text: text[from..at].to_owned(), begins, ends });
                    start = None;
                }
                _ => {}
            }
        }
        Self::all(needs)
    }

    /// Returns the condition of a regular expression.
    pub(crate) fn of_pattern(pattern: &str) -> Self {
        let parser = ParserBuilder::new().utf8(false).multi_line(true).crlf(true).build().parse(pattern);
        parser.map_or(Self::Nothing, |hir| Self::of_hir(&hir))
    }

    /// Returns true if a word has a capital letter, so that the pattern is case-sensitive by the rule of smart case.
    pub(crate) fn has_uppercase(&self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Word { text, .. } => text.chars().any(char::is_uppercase),
            Self::All(needs) | Self::Any(needs) => needs.iter().any(Self::has_uppercase),
        }
    }

    // The parser bounds the depth.
    fn of_hir(hir: &Hir) -> Self {
        match hir.kind() {
            HirKind::Empty | HirKind::Class(_) | HirKind::Look(_) => Self::Nothing,
            HirKind::Literal(literal) => std::str::from_utf8(&literal.0).map_or(Self::Nothing, Self::of_text),
            HirKind::Repetition(repetition) if repetition.min > 0 => Self::of_hir(&repetition.sub),
            HirKind::Repetition(_) => Self::Nothing,
            HirKind::Capture(capture) => Self::of_hir(&capture.sub),
            HirKind::Concat(parts) => Self::all(parts.iter().map(Self::of_hir).collect()),
            HirKind::Alternation(ways) => {
                let ways: Vec<Self> = ways.iter().map(Self::of_hir).collect();
                if ways.contains(&Self::Nothing) { Self::Nothing } else { Self::Any(ways) }
            }
        }
    }

    fn all(mut needs: Vec<Self>) -> Self {
        needs.retain(|need| *need != Self::Nothing);
        match needs.len() {
            0 => Self::Nothing,
            1 => needs.remove(0),
            _ => Self::All(needs),
        }
    }
}

/// A look-up of conditions in a view.
pub(crate) struct Candidates<'a, F> {
    view: &'a View<F>,
    ignores_case: bool,
    looked_up: usize,
}

impl<'a, F> Candidates<'a, F> {
    /// Creates a look-up. If `ignores_case`, words match in any case.
    pub(crate) fn new(view: &'a View<F>, ignores_case: bool) -> Self {
        Self { view, ignores_case, looked_up: 0 }
    }

    /// Returns the files that may meet the condition, sorted, or `None` for all files.
    pub(crate) fn find(&mut self, need: &Need) -> Option<Vec<FileId>> {
        match need {
            Need::Nothing => None,
            Need::Word { text, begins, ends } => self.with(text, *begins, *ends),
            Need::All(needs) => {
                let mut found: Option<Vec<FileId>> = None;
                for need in needs {
                    match (&mut found, self.find(need)) {
                        (_, None) => {}
                        (None, more) => found = more,
                        (Some(found), Some(more)) => found.retain(|id| more.binary_search(id).is_ok()),
                    }
                }
                found
            }
            Need::Any(needs) => {
                let mut found = Vec::new();
                for need in needs {
                    found.extend(self.find(need)?);
                }
                found.sort_unstable();
                found.dedup();
                Some(found)
            }
        }
    }

    fn with(&mut self, text: &str, begins: bool, ends: bool) -> Option<Vec<FileId>> {
        // Other letters can match in surprising ways where case is ignored.
        if self.looked_up == NEEDS_MAX || (self.ignores_case && !text.is_ascii()) {
            return None;
        }
        self.looked_up += 1;
        if begins && ends && !self.ignores_case {
            return Some(self.view.with_word(text));
        }
        let case = if self.ignores_case { "(?i)" } else { "" };
        let pattern = regex::Regex::new(&format!("{case}{}", regex::escape(text))).ok()?;
        let vocabulary = self.view.vocabulary();
        let mut numbers = vocabulary.matching(&pattern);
        if !self.ignores_case {
            numbers.retain(|number| {
                let word = vocabulary.word(*number);
                (!begins || word.starts_with(text)) && (!ends || word.ends_with(text))
            });
        }
        // A word that is too long to be listed may hold the text.
        Some(self.view.with_any(&numbers, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(need: &Need) -> String {
        let all = |needs: &[Need]| needs.iter().map(shown).collect::<Vec<_>>();
        match need {
            Need::Nothing => "-".into(),
            Need::Word { text, begins, ends } => {
                format!("{}{text}{}", if *begins { "<" } else { "" }, if *ends { ">" } else { "" })
            }
            Need::All(needs) => all(needs).join(" "),
            Need::Any(needs) => format!("({})", all(needs).join("|")),
        }
    }

    #[test]
    fn a_text_needs_its_words_and_those_inside_as_a_whole() {
        for (text, needs) in [
            ("abc", "abc"),
            ("let abc = f(x)", "let> <abc> <f> <x>"),
            ("(abc", "<abc"),
            ("::", "-"),
            ("", "-"),
            ("na\u{ef}ve\u{3002}x", "na\u{ef}ve> <x"),
        ] {
            assert_eq!(shown(&Need::of_text(text)), needs, "{text}");
        }
    }

    #[test]
    fn a_pattern_needs_the_words_that_are_in_every_match() {
        for (pattern, needs) in [
            ("fn main", "fn> <main"),
            (r"fn\s+main\(", "fn main>"),
            ("(serde)?_json", "_json"),
            ("(foo)+bar*", "foo ba"),
            ("TODO|FIXME", "(TODO|FIXME)"),
            ("TODO|", "-"),
            ("a|b", "-"),
            ("(?i)abc", "-"),
            (r"\bsave\b", "save"),
            ("x{0,3}yz", "yz"),
            ("[", "-"),
        ] {
            assert_eq!(shown(&Need::of_pattern(pattern)), needs, "{pattern}");
        }
    }
}

//! The words of a search: plain words, "phrases", `tag:`, `path:`, `property:value`, and `-` before what must not be.

use serde_json::Value;

use super::markdown::NoteFacts;
use super::names::folded;
use crate::files::FileError;

/// Maximum number of parts of a query.
const PARTS_MAX: usize = 50;

/// A query.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Query {
    /// Words and phrases that are looked for; a phrase has several words.
    pub(crate) wanted: Vec<Vec<String>>,
    /// Words and phrases that must not be in the note.
    pub(crate) unwanted: Vec<Vec<String>>,
    /// Conditions on the note, each with true if it must hold.
    pub(crate) filters: Vec<(Filter, bool)>,
}

/// A condition on a note.
#[derive(Debug, PartialEq)]
pub(crate) enum Filter {
    Tag(String),
    Path(String),
    Property(String, String),
}

impl Query {
    /// Reads a query. Text that is no part of the small language is a word.
    pub(crate) fn of(text: &str) -> Result<Self, FileError> {
        let mut query = Self::default();
        let mut rest = text.trim();
        let mut count = 0;
        while !rest.is_empty() {
            count += 1;
            if count > PARTS_MAX {
                return Err(FileError::refused(
                    format!("the query has more than {PARTS_MAX} parts"),
                    "search for fewer words",
                ));
            }
            let is_wanted = !(rest.starts_with('-') && rest.len() > 1 && !rest[1..].starts_with(char::is_whitespace));
            if !is_wanted {
                rest = &rest[1..];
            }
            let (part, is_quoted, next) = part(rest);
            rest = next.trim_start();
            query.add(&part, is_quoted, is_wanted);
        }
        if query == Self::default() {
            return Err(FileError::refused(
                "the query has no word to look for",
                "give words, \"a phrase\", `tag:name`, `path:folder` or `property:value`; `-` before one leaves notes out",
            ));
        }
        Ok(query)
    }

    fn add(&mut self, part: &str, is_quoted: bool, is_wanted: bool) {
        let filter = part.split_once(':').filter(|_| !is_quoted);
        let filter = filter.and_then(|(key, value)| {
            let value = value.trim_matches('"');
            let is_key = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '-' || c == '_');
            if !is_key || value.is_empty() || value.starts_with("//") {
                return None;
            }
            Some(match key {
                "tag" => Filter::Tag(folded(value.trim_start_matches('#').trim_end_matches('/'))),
                "path" => Filter::Path(folded(value)),
                key => Filter::Property(folded(key), folded(value)),
            })
        });
        if let Some(filter) = filter {
            self.filters.push((filter, is_wanted));
            return;
        }
        let words: Vec<String> = words(part).map(|(word, _)| word).collect();
        if words.is_empty() {
            return;
        }
        let list = if is_wanted { &mut self.wanted } else { &mut self.unwanted };
        list.push(words);
    }
}

impl Filter {
    /// Returns true if the note fits.
    pub(crate) fn holds(&self, path: &str, facts: Option<&NoteFacts>) -> bool {
        match self {
            Self::Path(part) => folded(path).contains(part.as_str()),
            Self::Tag(tag) => facts.is_some_and(|facts| super::has_tag(facts, tag)),
            Self::Property(key, value) => facts.is_some_and(|facts| {
                facts.properties.iter().any(|(own, held)| folded(own) == *key && fits(held, value))
            }),
        }
    }
}

/// Returns true if a property has this value, or holds it.
fn fits(held: &Value, wanted: &str) -> bool {
    match held {
        Value::Array(items) => items.iter().any(|item| fits(item, wanted)),
        Value::String(text) => folded(text).contains(wanted),
        Value::Object(_) => false,
        other => folded(&other.to_string()) == wanted,
    }
}

/// Splits the first part off: up to white space that is not in quotes.
fn part(text: &str) -> (String, bool, &str) {
    if let Some(inner) = text.strip_prefix('"') {
        let close = inner.find('"').unwrap_or(inner.len());
        return (inner[..close].to_owned(), true, inner.get(close + 1..).unwrap_or_default());
    }
    let mut quoted = false;
    let end = text.find(|c: char| {
        if c == '"' {
            quoted = !quoted;
        }
        c.is_whitespace() && !quoted
    });
    let (part, rest) = text.split_at(end.unwrap_or(text.len()));
    (part.to_owned(), false, rest)
}

/// Returns the words of a text, folded, each with its place. Chinese, Japanese and Korean characters are one word each.
pub(crate) fn words(text: &str) -> impl Iterator<Item = (String, usize)> + '_ {
    let mut rest = text.char_indices().peekable();
    std::iter::from_fn(move || {
        while rest.next_if(|(_, c)| !c.is_alphanumeric()).is_some() {}
        let (start, first) = rest.next()?;
        let mut end = start + first.len_utf8();
        if !stands_alone(first) {
            // Marks belong to the letter before them.
            let goes_on = |c: char| (c.is_alphanumeric() || is_mark(c)) && !stands_alone(c);
            while let Some((at, c)) = rest.next_if(|(_, c)| goes_on(*c)) {
                end = at + c.len_utf8();
            }
        }
        Some((folded(&text[start..end]), start))
    })
}

fn is_mark(c: char) -> bool {
    unicode_normalization::char::is_combining_mark(c)
}

/// Returns true for characters of scripts without spaces between words.
pub(crate) fn stands_alone(c: char) -> bool {
    matches!(c, '\u{2E80}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7AF}' | '\u{F900}'..='\u{FAFF}' | '\u{20000}'..='\u{3FFFF}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(parts: &[&[&str]]) -> Vec<Vec<String>> {
        parts.iter().map(|words| words.iter().map(|word| (*word).to_owned()).collect()).collect()
    }

    #[test]
    fn a_query_is_read_part_by_part() {
        let query =
            Query::of("Plan \"green  Tea\" tag:#Work/ path:a/b Status:\"in work\" -old -tag:x -\"not this\"").unwrap();
        assert_eq!(query.wanted, texts(&[&["plan"], &["green", "tea"]]));
        assert_eq!(query.unwanted, texts(&[&["old"], &["not", "this"]]));
        let wanted = [
            (Filter::Tag("work".into()), true),
            (Filter::Path("a/b".into()), true),
            (Filter::Property("status".into(), "in work".into()), true),
            (Filter::Tag("x".into()), false),
        ];
        assert_eq!(query.filters, wanted);
        let query = Query::of("https://a.b/c: \"tag:x\" re-use").unwrap();
        assert_eq!(query.wanted, texts(&[&["https", "a", "b", "c"], &["tag", "x"], &["re", "use"]]));
        assert_eq!(query.filters, []);
    }

    #[test]
    fn words_are_cut_at_what_is_no_letter_and_compared_in_one_form() {
        let found: Vec<String> = words("U\u{308}ber_café, 你好x2").map(|(word, _)| word).collect();
        assert_eq!(found, ["über", "café", "你", "好", "x2"]);
    }

    #[test]
    fn a_query_without_words_or_with_too_many_is_refused() {
        for query in ["", "  ", "-", "\"\"", "!!!", &"a ".repeat(51)] {
            assert!(Query::of(query).is_err(), "{query:?}");
        }
    }

    proptest! {
        #[test]
        fn no_query_makes_it_panic(text in "\\PC{0,60}") {
            let _ = Query::of(&text);
        }
    }
}

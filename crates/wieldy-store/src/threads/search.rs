//! Search in threads: the words of a query, the full-text queries of both databases, snippets and scores.
//!
//! Every word of a query is in quotes, so nothing in it is an operator. The databases find the latest entries that fit;
//! the score of an entry is computed here, so that both give the same answers.

use std::fmt::Write as _;
use std::ops::Range;

use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

use super::ThreadError;

/// Maximum number of words and phrases in a query.
const TERMS_MAX: usize = 32;
/// Maximum length of an indexed word in bytes: PostgreSQL takes words up to 2,046 bytes.
const WORD_BYTES_MAX: usize = 512;
/// The length of a snippet before and after the first match, in bytes.
const BEFORE_BYTES: usize = 60;
const AFTER_BYTES: usize = 140;
/// The length of a text at which repeated words count half, in words.
const USUAL_LENGTH: f64 = 100.0;

/// A word, or the words of a phrase, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    /// As they were typed: SQLite removes the accents itself.
    words: Vec<String>,
    /// In lower case, without accents.
    folded: Vec<String>,
    /// True if the last word may go on.
    is_prefix: bool,
}

/// The words and phrases of a query, which must all occur.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Terms(Vec<Term>);

impl Terms {
    /// Parses words, "phrases" and beginnings of words such as `migrat*`.
    pub(super) fn parse(query: &str) -> Result<Self, ThreadError> {
        let mut terms = Vec::new();
        // Every other part is within quotes. A missing last quote ends the phrase at the end of the query.
        for (number, part) in query.split('"').enumerate() {
            let is_phrase = number % 2 == 1;
            let pieces: Vec<&str> = if is_phrase { vec![part] } else { part.split_whitespace().collect() };
            for piece in pieces {
                let words: Vec<String> = words_in(piece).map(|range| piece[range].to_owned()).collect();
                if words.is_empty() {
                    continue;
                }
                let folded = words.iter().map(|word| fold(word)).collect();
                terms.push(Term { words, folded, is_prefix: !is_phrase && piece.ends_with('*') });
            }
        }
        match terms.len() {
            0 => Err(ThreadError::refused(
                "`query` has no word",
                "give words and \"phrases\" of the entry; `migrat*` finds the words that begin so",
            )),
            1..=TERMS_MAX => Ok(Self(terms)),
            count => Err(ThreadError::refused(
                format!("`query` has {count} words and phrases, more than {TERMS_MAX}"),
                "leave some out: all of them must be in an entry",
            )),
        }
    }

    /// Returns the query for SQLite: all tags and all terms.
    pub(super) fn for_sqlite(&self, tags: &[String]) -> String {
        let tags = tags.iter().map(|tag| format!("scope : \"{tag}\""));
        let terms = self.0.iter().map(|term| {
            let star = if term.is_prefix { "*" } else { "" };
            format!("text : \"{}\"{star}", term.words.join(" "))
        });
        tags.chain(terms).collect::<Vec<_>>().join(" AND ")
    }

    /// Returns the query for PostgreSQL: all tags and all terms.
    #[cfg(feature = "postgres")]
    pub(super) fn for_postgres(&self, tags: &[String]) -> String {
        let tags = tags.iter().map(|tag| format!("'#{tag}'"));
        let terms = self.0.iter().map(|term| {
            let words: Vec<String> = term.folded.iter().map(|word| format!("'{word}'")).collect();
            format!("({}{})", words.join(" <-> "), if term.is_prefix { ":*" } else { "" })
        });
        tags.chain(terms).collect::<Vec<_>>().join(" & ")
    }

    /// Returns how well a text fits: the sum of its matches, of which repeated ones count less, above all in a long
    /// text. A match in the title counts three times.
    pub(super) fn score(&self, title: &str, content: &str) -> f64 {
        let (title, content) = (folded_words(title), folded_words(content));
        let length = content.len() as f64 / USUAL_LENGTH;
        let of_term = |term: &Term| {
            let matches = term.matches(&content).count() as f64 + 3.0 * term.matches(&title).count() as f64;
            matches / (matches + 0.5 + length)
        };
        let sum: f64 = self.0.iter().map(of_term).sum();
        (sum / self.0.len() as f64 * 1000.0).round() / 1000.0
    }

    /// Returns the part of a text around the first match, in one line, with its matches in `**`.
    pub(super) fn snippet(&self, text: &str) -> String {
        let places: Vec<Range<usize>> = words_in(text).collect();
        let folded: Vec<String> = places.iter().map(|place| fold(&text[place.clone()])).collect();
        let mut matches: Vec<Range<usize>> = self
            .0
            .iter()
            .flat_map(|term| {
                let last = term.folded.len() - 1;
                term.matches(&folded).map(move |at| (at, at + last))
            })
            .map(|(first, last)| places[first].start..places[last].end)
            .collect();
        matches.sort_by_key(|place| (place.start, std::cmp::Reverse(place.end)));
        let begin = matches.first().map_or(0, |place| place.start);
        let from = text.floor_char_boundary(begin.saturating_sub(BEFORE_BYTES));
        let to = text.ceil_char_boundary(begin.saturating_add(AFTER_BYTES).min(text.len()));
        let mut marked = String::from(if from > 0 { "…" } else { "" });
        let mut at = from;
        for place in matches.into_iter().filter(|place| place.end <= to) {
            if place.start < at {
                continue; // within the match before
            }
            marked.push_str(&text[at..place.start]);
            let _ = write!(marked, "**{}**", &text[place.clone()]);
            at = place.end;
        }
        marked.push_str(&text[at..to]);
        marked.push_str(if to < text.len() { "…" } else { "" });
        in_one_line(&marked)
    }
}

impl Term {
    /// Returns the places at which the term occurs among folded words.
    fn matches<'a>(&'a self, words: &'a [String]) -> impl Iterator<Item = usize> + 'a {
        let last = self.folded.len() - 1;
        words.windows(self.folded.len()).enumerate().filter_map(move |(at, window)| {
            let is_same = |(place, word): (usize, &String)| match self.is_prefix && place == last {
                true => window[place].starts_with(word.as_str()),
                false => window[place] == *word,
            };
            self.folded.iter().enumerate().all(is_same).then_some(at)
        })
    }
}

/// Returns the text with every run of white space as one space.
pub(super) fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns a tag for the index of words: no word of a text can be one.
pub(super) fn tag(of: char, text: &str) -> String {
    format!("{of}{}", &blake3::hash(text.as_bytes()).to_hex()[..16])
}

/// Returns the words of an entry and its tags, as PostgreSQL's `tsvector`.
#[cfg(feature = "postgres")]
pub(super) fn vector(text: &str, tags: &[String]) -> String {
    /// The largest position of a word that the server can store.
    const POSITION_MAX: usize = 16_383;
    let mut places: std::collections::BTreeMap<String, Vec<String>> = std::collections::BTreeMap::new();
    for (position, word) in folded_words(text).into_iter().enumerate() {
        let position = (position + 1).min(POSITION_MAX).to_string();
        places.entry(word).or_default().push(position);
    }
    let mut vector = String::new();
    for tag in tags {
        let _ = write!(vector, "'#{tag}' ");
    }
    for (word, positions) in places {
        let _ = write!(vector, "'{word}':{} ", positions.join(","));
    }
    vector
}

/// Returns the words of a text in lower case and without accents.
fn folded_words(text: &str) -> Vec<String> {
    words_in(text).map(|place| fold(&text[place])).collect()
}

/// Returns a word in lower case and without accents. Very long words are cut.
fn fold(word: &str) -> String {
    let mut folded: String = word.nfd().filter(|c| !is_combining_mark(*c)).flat_map(char::to_lowercase).collect();
    folded.truncate(folded.floor_char_boundary(WORD_BYTES_MAX));
    folded
}

/// Returns the places of the words of a text: runs of letters and digits with their accents.
fn words_in(text: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    let is_in_word = |c: char| c.is_alphanumeric() || is_combining_mark(c);
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at + text[at..].find(is_in_word)?;
        let end = text[start..].find(|c| !is_in_word(c)).map_or(text.len(), |length| start + length);
        at = end;
        Some(start..end)
    })
    // Accents alone are no word.
    .filter(move |place| text[place.clone()].contains(char::is_alphanumeric))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(query: &str) -> Terms {
        Terms::parse(query).unwrap()
    }

    #[test]
    fn nothing_in_a_query_is_an_operator() {
        let query = "a OR b NOT \"c d\" NEAR(e) x:y -f (g* col : \"h\"";
        let expected = "scope : \"t1\" AND text : \"a\" AND text : \"OR\" AND text : \"b\" AND text : \"NOT\" AND \
                        text : \"c d\" AND text : \"NEAR e\" AND text : \"x y\" AND text : \"f\" AND text : \"g\"* AND \
                        text : \"col\" AND text : \"h\"";
        assert_eq!(terms(query).for_sqlite(&["t1".into()]), expected);
        let sent = terms("it's a|b & !c \\ <-> Zoë*").for_postgres(&["t1".into()]);
        assert_eq!(sent, "'#t1' & ('it' <-> 's') & ('a' <-> 'b') & ('c') & ('zoe':*)");
    }

    #[test]
    fn a_query_without_words_or_with_too_many_is_refused() {
        for query in ["", " ", "\"", "*", "!? \"-\"", "\u{301}"] {
            assert!(Terms::parse(query).is_err(), "{query:?}");
        }
        assert!(Terms::parse(&"a ".repeat(32)).is_ok());
        assert!(Terms::parse(&"a ".repeat(33)).is_err());
    }

    #[test]
    fn a_snippet_is_one_line_around_the_first_match() {
        let text = format!("{} The\nNaïve  migration of tables. {}", "before ".repeat(40), "after ".repeat(40));
        let snippet = terms("\"naive migration\" tables").snippet(&text);
        assert!(snippet.starts_with("…") && snippet.ends_with("…"), "{snippet}");
        assert!(snippet.contains("before The **Naïve migration** of **tables**. after"), "{snippet}");
        assert_eq!(terms("none").snippet("some text"), "some text");
        assert_eq!(terms("a \"a b\"").snippet("a b a"), "**a b** **a**");
    }

    #[test]
    fn more_matches_in_a_shorter_text_score_higher() {
        let score = |content: &str| terms("cache miss").score("", content);
        let long = format!("cache miss {}", "other ".repeat(500));
        let scores = [score("cache miss, cache miss"), score("a cache miss"), score(&long), score("nothing")];
        assert!(scores.is_sorted_by(|a, b| a > b), "{scores:?}");
        assert!(terms("cache").score("cache", "x") > terms("cache").score("", "x cache"));
    }

    proptest::proptest! {
        #[test]
        fn no_query_and_no_text_panics(query in "\\PC{0,40}", text in "\\PC{0,400}") {
            let _ = vector(&text, &[]);
            if let Ok(terms) = Terms::parse(&query) {
                let _ = (terms.snippet(&text), terms.score(&query, &text), terms.for_sqlite(&[]), terms.for_postgres(&[]));
            }
        }
    }
}

//! Rules about prose: the comments of Rust sources, and the lines of Markdown.

use std::collections::BTreeMap;

use super::{File, Problem, Tree};

/// The words that open a clause. A doc paragraph opens with a verb or a noun instead.
const OPENERS: [&str; 14] = [
    "What", "Whatever", "Who", "Whoever", "Whose", "Whom", "How", "Whether", "Where", "Wherever", "Which", "That",
    "Those", "Why",
];

/// The words that stand in a comment for a thing or a person that should be named.
const RIDDLES: [&str; 7] = ["whoever", "nobody", "somebody", "everybody", "anybody", "whatever", "whomever"];

/// The largest shares of a crate's comments, in thousandths. They may only fall.
#[derive(Clone, Copy)]
struct Budget {
    /// The doc paragraphs that open with one of [`OPENERS`].
    openers: usize,
    /// The comment lines with one of [`RIDDLES`].
    riddles: usize,
}

const BUDGET: Budget = Budget { openers: 30, riddles: 5 };

/// The maximal number of places that are reported for one share of a crate.
const PLACES_MAX: usize = 10;

/// The maximal number of characters in a line of Markdown prose.
const LINE_CHARS_MAX: usize = 120;

/// Checks that the comments of every crate are within the budget.
pub(super) fn comments_are_plain(tree: &Tree) -> Vec<Problem> {
    let mut crates: BTreeMap<&str, Measured<'_>> = BTreeMap::new();
    for file in tree.matching("", ".rs") {
        if let Some(name) = crate_of(&file.path) {
            crates.entry(name).or_default().add(file);
        }
    }
    let mut problems = Vec::new();
    for (name, measured) in crates {
        problems.extend(measured.openers.problems(BUDGET.openers, |word, share| {
            format!("a doc paragraph opens with `{word}`: {share} of `{name}` open so; open with a verb or a noun")
        }));
        problems.extend(measured.riddles.problems(BUDGET.riddles, |word, share| {
            format!("a comment says `{word}`: {share} of `{name}` have such a word; name the thing")
        }));
    }
    problems
}

/// Returns the crate of a source file, or `None` for files outside of crates.
fn crate_of(path: &str) -> Option<&str> {
    let mut parts = path.split('/');
    match parts.next()? {
        "crates" => parts.next(),
        "xtask" => Some("xtask"),
        _ => None,
    }
}

/// The comments of one crate.
struct Measured<'a> {
    openers: Share<'a>,
    riddles: Share<'a>,
}

impl Default for Measured<'_> {
    fn default() -> Self {
        Self { openers: Share::of("doc paragraphs"), riddles: Share::of("comment lines") }
    }
}

impl<'a> Measured<'a> {
    fn add(&mut self, file: &'a File) {
        let mut is_within_paragraph = false;
        for (index, line) in file.text.lines().enumerate() {
            let line = line.trim();
            if let Some(comment) = line.strip_prefix("//") {
                let is_riddle = |word: &&str| RIDDLES.iter().any(|riddle| riddle.eq_ignore_ascii_case(word));
                self.riddles.add(file, index + 1, words(comment).find(is_riddle));
            }
            let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim).unwrap_or_default();
            if !doc.is_empty() && !is_within_paragraph {
                let opener = words(doc).next().filter(|word| OPENERS.contains(word) && doc.starts_with(word));
                self.openers.add(file, index + 1, opener);
            }
            is_within_paragraph = !doc.is_empty();
        }
    }
}

/// Returns the words of a text: letters, digits and underscores, as `\w` of regular expressions has them.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The bad items among all items of one kind.
struct Share<'a> {
    kind: &'static str,
    all: usize,
    /// The file, the line and the bad word of each bad item.
    bad: Vec<(&'a str, usize, &'a str)>,
}

impl<'a> Share<'a> {
    fn of(kind: &'static str) -> Self {
        Self { kind, all: 0, bad: Vec::new() }
    }

    fn add(&mut self, file: &'a File, line: usize, bad: Option<&'a str>) {
        self.all += 1;
        self.bad.extend(bad.map(|word| (file.path.as_str(), line, word)));
    }

    fn fits(&self, thousandths: usize) -> bool {
        self.bad.len() * 1000 <= self.all * thousandths
    }

    /// Returns a problem for each of the first bad items, if there are too many of them.
    fn problems(&self, thousandths: usize, message: impl Fn(&str, &str) -> String) -> Vec<Problem> {
        if self.fits(thousandths) {
            return Vec::new();
        }
        let budget = format!("{}.{} %", thousandths / 10, thousandths % 10);
        let share = format!("{} of {} {} (budget {budget})", self.bad.len(), self.all, self.kind);
        let places = self.bad.iter().take(PLACES_MAX);
        places.map(|(path, line, word)| Problem::new(path, *line, message(word, &share))).collect()
    }
}

/// Checks that lines of Markdown prose are not too long. Tables, code and lines that cannot be broken may be longer.
pub(super) fn markdown_lines_fit(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.matching("", ".md") {
        for (number, line) in prose_lines(&file.text) {
            let length = line.chars().count();
            if length > LINE_CHARS_MAX && !is_unbreakable(line) {
                let message = format!("the line has {length} characters, over {LINE_CHARS_MAX}: break it");
                problems.push(Problem::new(&file.path, number, message));
            }
        }
    }
    problems
}

/// Returns the lines of a page, with their numbers, without front matter, code blocks and tables.
fn prose_lines(markdown: &str) -> Vec<(usize, &str)> {
    let mut lines = Vec::new();
    let (mut fence, mut is_front_matter) = (None, false);
    for (index, line) in markdown.lines().enumerate() {
        let text = line.trim_start_matches([' ', '>']);
        let mark = ["```", "~~~"].into_iter().find(|mark| text.starts_with(mark));
        if index == 0 && line == "---" {
            is_front_matter = true;
        } else if is_front_matter {
            is_front_matter = line != "---";
        } else if fence.is_some() {
            fence = fence.filter(|_| mark != fence);
        } else if mark.is_some() {
            fence = mark;
        } else if !text.starts_with('|') {
            lines.push((index + 1, line));
        }
    }
    lines
}

/// Returns true for a line without a place to break it: a single link or code span, a link reference, or a heading
/// with a link.
fn is_unbreakable(line: &str) -> bool {
    let text = line.trim_start_matches([' ', '>']).trim_end();
    let is_reference = text.starts_with('[') && text.contains("]: ");
    let is_heading_with_link = text.starts_with('#') && text.contains("](");
    if is_reference || is_heading_with_link {
        return true;
    }
    // A list item begins with a marker and a space.
    let is_marker = |word: &str| ["-", "*", "+"].contains(&word) || word.ends_with('.') && word.len() < 4;
    let text = text.split_once(' ').filter(|(word, _)| is_marker(word)).map_or(text, |(_, item)| item);
    let (mut is_code, mut depth, mut before) = (false, 0_usize, ' ');
    for c in text.chars() {
        match c {
            '`' => is_code = !is_code,
            _ if is_code => {}
            '[' => depth += 1,
            // In a link's address, and not in prose.
            '(' if before == ']' || depth > 0 => depth += 1,
            ']' | ')' => depth = depth.saturating_sub(1),
            ' ' if depth == 0 => return false,
            _ => {}
        }
        before = c;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::found;
    use super::*;

    #[test]
    fn a_crate_with_plain_comments_passes() {
        let plain =
            "//! A pool.\n//! What comes second opens no paragraph.\n\n/// Returns a pool.\nfn a() {} // nobody\n";
        assert_eq!(found(comments_are_plain, &[("crates/a/src/lib.rs", plain)]), Vec::<String>::new());
    }

    #[test]
    fn openers_and_riddles_are_found_in_each_crate() {
        let bad = "/// Whether it is.\n///\n/// Whoever asks.\nfn a() {}\n// For Nobody, not for nobody_else.\n";
        assert_eq!(
            found(
                comments_are_plain,
                &[("crates/a/src/lib.rs", bad), ("xtask/build.rs", "/// How.\n"), ("b.rs", "/// How.\n")]
            ),
            [
                "crates/a/src/lib.rs:1: a doc paragraph opens with `Whether`: 2 of 2 doc paragraphs (budget 3.0 %) of `a` \
                 open so; open with a verb or a noun",
                "crates/a/src/lib.rs:3: a doc paragraph opens with `Whoever`: 2 of 2 doc paragraphs (budget 3.0 %) of `a` \
                 open so; open with a verb or a noun",
                "crates/a/src/lib.rs:3: a comment says `Whoever`: 2 of 4 comment lines (budget 0.5 %) of `a` have such a \
                 word; name the thing",
                "crates/a/src/lib.rs:5: a comment says `Nobody`: 2 of 4 comment lines (budget 0.5 %) of `a` have such a \
                 word; name the thing",
                "xtask/build.rs:1: a doc paragraph opens with `How`: 1 of 1 doc paragraphs (budget 3.0 %) of `xtask` open \
                 so; open with a verb or a noun",
            ]
        );
    }

    #[test]
    fn a_few_openers_are_within_the_budget() {
        let source = |plain| format!("{}\n/// Which one.\n", "/// Returns it.\n\n".repeat(plain));
        assert_eq!(found(comments_are_plain, &[("crates/a/a.rs", &source(33))]), Vec::<String>::new());
        assert_eq!(found(comments_are_plain, &[("crates/a/a.rs", &source(32))]).len(), 1);
    }

    #[test]
    fn a_long_line_of_prose_is_found() {
        let long = "word ".repeat(25);
        let text = format!("# Title\n\n{long}\n\n- {long}\n> (see {long})\n");
        assert_eq!(
            found(markdown_lines_fit, &[("docs/a.md", &text), ("a.txt", &long)]),
            [
                "docs/a.md:3: the line has 125 characters, over 120: break it",
                "docs/a.md:5: the line has 127 characters, over 120: break it",
                "docs/a.md:6: the line has 133 characters, over 120: break it",
            ]
        );
    }

    #[test]
    fn lines_that_cannot_be_broken_may_be_long() {
        let long = "word ".repeat(25);
        let address = format!("https://example.com/{}", "x".repeat(120));
        let text = format!(
            "---\ntitle: {long}\n---\n| {long} |\n```text\n{long}\n~~~\n```\n- [a link]({address}).\n# On [it]({address})\n\
             [name]: {address}\n1. `{long}`\n{address}\n{}\n",
            "é".repeat(120)
        );
        assert_eq!(found(markdown_lines_fit, &[("a.md", &text)]), Vec::<String>::new());
    }
}

//! The texts in front matter: where strings stand in the YAML, so that links in them can be found and changed.

use std::ops::Range;

/// The notation of a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Style {
    Plain,
    Single,
    Double,
    Block,
}

impl Style {
    /// Returns the text as it is written in this notation, or `None` if it cannot be.
    pub(crate) fn written(self, text: &str) -> Option<String> {
        match self {
            Self::Single => Some(text.replace('\'', "''")),
            Self::Double => Some(text.replace('\\', "\\\\").replace('"', "\\\"")),
            Self::Plain => (!text.contains(": ") && !text.contains(" #")).then(|| text.to_owned()),
            Self::Block => Some(text.to_owned()),
        }
    }

    /// Returns the text that is meant by what is written in this notation.
    pub(crate) fn meant(self, written: &str) -> String {
        match self {
            Self::Single => written.replace("''", "'"),
            // Other escapes than these do not occur in names of files.
            Self::Double => written.replace("\\\"", "\"").replace("\\\\", "\\"),
            Self::Plain | Self::Block => written.to_owned(),
        }
    }
}

/// Returns the strings of the YAML. A string that spans lines is one range, or one range for each line.
pub(crate) fn texts(yaml: &str) -> Vec<(Range<usize>, Style)> {
    let mut scan = Scan { yaml, found: Vec::new(), quoted: None, depth: 0, block: None };
    let mut start = 0;
    for line in yaml.split_inclusive('\n') {
        scan.line(start, line.trim_end_matches(['\r', '\n']));
        start += line.len();
    }
    scan.found
}

/// Returns the start of the comment in a line, with the white space before it, if there is one after `from`.
pub(crate) fn comment_start(line: &str, from: usize) -> Option<usize> {
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices().skip_while(|(at, _)| *at < from) {
        match (quote, c) {
            (None, '"' | '\'') if before.is_whitespace() || "[{,:".contains(before) => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            (None, '#') if before.is_whitespace() => return Some(at),
            _ => {}
        }
        before = c;
    }
    None
}

struct Scan<'a> {
    yaml: &'a str,
    found: Vec<(Range<usize>, Style)>,
    /// An open quoted string: its quote and its start.
    quoted: Option<(char, usize)>,
    /// The depth of open flow collections.
    depth: usize,
    /// The indentation of the line that opened a block scalar.
    block: Option<usize>,
}

impl Scan<'_> {
    fn line(&mut self, start: usize, line: &str) {
        let indent = line.len() - line.trim_start_matches(' ').len();
        if let Some(above) = self.block {
            if line.trim().is_empty() || indent > above {
                self.found.push((start..start + line.len(), Style::Block));
                return;
            }
            self.block = None;
        }
        if self.quoted.is_some() || self.depth > 0 {
            self.flow(start, start + line.len());
            return;
        }
        let (mut at, mut rest) = (indent, &line[indent..]);
        // The marks of list items and the key come before the value.
        loop {
            if let Some(item) = rest.strip_prefix("- ") {
                let item_start = rest.len() - item.trim_start_matches(' ').len();
                at += item_start;
                rest = &line[at..];
            } else if let Some(value) = value_start(rest) {
                at += value;
                rest = &line[at..];
                break;
            } else {
                break;
            }
        }
        let end = comment_start(line, at).unwrap_or(line.len());
        match rest.chars().next() {
            None | Some('#') => {}
            Some('|' | '>') => self.block = Some(indent),
            Some('"' | '\'' | '[' | '{') => self.flow(start + at, start + line.len()),
            Some(_) => self.found.push((start + at..start + end.max(at), Style::Plain)),
        }
    }

    /// Reads quoted strings and flow collections from `at` to the end of the line.
    fn flow(&mut self, at: usize, end: usize) {
        let mut skip = false;
        let text = &self.yaml[at..end];
        let mut before = ' ';
        for (index, c) in text.char_indices() {
            let here = at + index;
            if std::mem::take(&mut skip) {
                continue;
            }
            match (self.quoted, c) {
                (Some(('"', _)), '\\') => skip = true,
                (Some(('\'', _)), '\'') if self.yaml[here + 1..end].starts_with('\'') => skip = true,
                (Some((quote, from)), c) if c == quote => {
                    let style = if quote == '"' { Style::Double } else { Style::Single };
                    self.found.push((from..here, style));
                    self.quoted = None;
                }
                (Some(_), _) => {}
                (None, '"' | '\'') if !before.is_alphanumeric() => self.quoted = Some((c, here + 1)),
                (None, '[' | '{') => self.depth += 1,
                (None, ']' | '}') => self.depth = self.depth.saturating_sub(1),
                (None, '#') if before == ' ' => break,
                (None, _) => {}
            }
            before = c;
        }
    }
}

/// Returns the start of the value if the text begins with a key.
fn value_start(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    let from = match first {
        '"' | '\'' => text[1..].find(first)? + 2,
        '[' | '{' | '#' | '|' | '>' => return None,
        _ => 0,
    };
    let colon = text[from..]
        .match_indices(':')
        .map(|(at, _)| from + at)
        .find(|at| text[at + 1..].chars().next().is_none_or(char::is_whitespace))?;
    // Text before the colon that is quoted must be the whole key.
    if from > 0 && !text[from..colon].trim().is_empty() {
        return None;
    }
    let rest = &text[colon + 1..];
    Some(text.len() - rest.trim_start_matches([' ', '\t']).len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_found_in_every_notation() {
        for (yaml, wanted) in [
            ("a: see [[N]] there # no", &[("see [[N]] there ", Style::Plain)][..]),
            ("a: \"[[N]]\"\nb: '[[M]]'", &[("[[N]]", Style::Double), ("[[M]]", Style::Single)]),
            ("a: [[N]]", &[]),
            ("a: [\"[[N]]\", '[[it''s]]']", &[("[[N]]", Style::Double), ("[[it''s]]", Style::Single)]),
            ("a:\n  - \"[[N]]\"\n  - plain", &[("[[N]]", Style::Double), ("plain", Style::Plain)]),
            ("a:\n- k: \"[[N]]\"", &[("[[N]]", Style::Double)]),
            ("a: |\n  [[N]]\nb: 1", &[("  [[N]]", Style::Block), ("1", Style::Plain)]),
            ("a: [\n  \"[[N]]\"\n]\nb: x", &[("[[N]]", Style::Double), ("x", Style::Plain)]),
            ("a: \"one\n  [[N]]\"", &[("one\n  [[N]]", Style::Double)]),
            ("# \"[[N]]\"", &[]),
            ("\"a b\": \"q\\\"[[N]]\"", &[("q\\\"[[N]]", Style::Double)]),
        ] {
            let found = texts(yaml);
            let found: Vec<_> = found.into_iter().map(|(range, style)| (&yaml[range], style)).collect();
            assert_eq!(found, wanted, "{yaml}");
        }
    }

    #[test]
    fn a_name_is_written_as_its_notation_needs() {
        for style in [Style::Single, Style::Double, Style::Plain, Style::Block] {
            let name = "it's \"so\"";
            assert_eq!(style.written(name).map(|written| style.meant(&written)).as_deref(), Some(name));
        }
        assert_eq!(Style::Plain.written("a: b"), None);
    }
}

//! Links of notes as they are written: the path, the place in the note, and the spelling of a new path.

use serde::{Deserialize, Serialize};

use super::yaml_text::Style;

/// The characters that cannot be in the name of a note, because a link could not name it.
pub(crate) const NOT_IN_NAMES: [char; 6] = ['[', ']', '#', '^', '|', '\\'];

/// A link in a note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(crate) kind: LinkKind,
    /// True for `![[…]]` and `![…](…)`.
    pub(crate) embed: bool,
    /// The bytes of the path as it is written, after a byte order mark.
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// The path that is meant; empty for a place in the same note.
    pub(crate) path: String,
    /// The heading or the block, without the first `#`.
    pub(crate) place: Option<String>,
    /// The line, from 1.
    pub(crate) line: usize,
}

/// The notation of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LinkKind {
    /// `[[path]]` in the body.
    Wiki,
    /// `[text](path)`, or the definition of a reference.
    Markdown,
    /// `[text](<path>)`.
    MarkdownAngle,
    /// `[[path]]` in a property.
    Property(Style),
}

impl LinkKind {
    pub(crate) fn is_markdown(self) -> bool {
        matches!(self, Self::Markdown | Self::MarkdownAngle)
    }

    /// Returns a path in this notation, or `None` if it cannot be written so.
    pub(crate) fn written(self, path: &str) -> Option<String> {
        match self {
            Self::Wiki => (!path.contains(NOT_IN_NAMES)).then(|| path.to_owned()),
            Self::Markdown => Some(encoded(path)),
            Self::MarkdownAngle => {
                let is_plain = !path.contains(['<', '>', '\\', '&', '%', '#']);
                Some(if is_plain { path.to_owned() } else { encoded(path) })
            }
            Self::Property(style) => style.written(path).filter(|_| !path.contains(NOT_IN_NAMES)),
        }
    }
}

/// Splits the target of a link into the path and the place: `a/b#Heading` into `a/b` and `Heading`.
pub(crate) fn split_place(target: &str) -> (&str, Option<&str>) {
    match target.split_once('#') {
        Some((path, place)) => (path, Some(place)),
        None => (target, None),
    }
}

/// Returns true if the destination of a Markdown link leads outside the vault: it has a scheme or a host.
pub(crate) fn is_external(destination: &str) -> bool {
    let scheme = destination.split_once(':').map(|(scheme, _)| scheme);
    let is_scheme = |scheme: &str| {
        scheme.len() > 1
            && scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    };
    destination.starts_with("//") || scheme.is_some_and(is_scheme)
}

/// Replaces `%20` and the like. What is no such escape, or no UTF-8, stays as it is.
pub(crate) fn decoded(text: &str) -> String {
    if !text.contains('%') {
        return text.to_owned();
    }
    let bytes = text.as_bytes();
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let digit = |offset: usize| char::from(*bytes.get(at + offset)?).to_digit(16);
        match (bytes[at], digit(1), digit(2)) {
            (b'%', Some(high), Some(low)) => {
                plain.push((high * 16 + low) as u8);
                at += 3;
            }
            (byte, ..) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8(plain).unwrap_or_else(|_| text.to_owned())
}

/// Writes a path as the destination of a Markdown link. Letters outside ASCII stay readable.
pub(crate) fn encoded(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for c in path.chars() {
        if c.is_ascii_control() || " <>()[]{}\"'\\%#?^|`&*_!~:".contains(c) && !is_harmless(c) {
            text.push_str(&format!("%{:02X}", u32::from(c)));
        } else if c.is_whitespace() {
            let mut buffer = [0; 4];
            text.extend(c.encode_utf8(&mut buffer).bytes().map(|byte| format!("%{byte:02X}")));
        } else {
            text.push(c);
        }
    }
    text
}

/// Returns true for characters that have a meaning in Markdown, but none in a destination.
fn is_harmless(c: char) -> bool {
    "*_!~'{}`^|".contains(c)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn destinations_with_a_scheme_or_a_host_are_external() {
        for external in ["https://a.b/c", "mailto:a@b", "obsidian://open", "//host/a", "file:///a"] {
            assert!(is_external(external), "{external}");
        }
        for own in ["a.md", "a b/c.md", "../x.md", "/x.md", "#heading", "C: a.md", "a%3Ab.md", ""] {
            assert!(!is_external(own), "{own}");
        }
    }

    #[test]
    fn escapes_that_are_none_stay() {
        for (text, plain) in [("a%20b", "a b"), ("100%", "100%"), ("%zz", "%zz"), ("%FF", "%FF"), ("%C3%BC", "ü")] {
            assert_eq!(decoded(text), plain);
        }
        assert_eq!(encoded("a b (c)/ü#1.md"), "a%20b%20%28c%29/ü%231.md");
    }

    proptest! {
        #[test]
        fn an_encoded_path_is_read_back(path in "\\PC{0,40}") {
            prop_assert_eq!(decoded(&encoded(&path)), path);
        }
    }
}

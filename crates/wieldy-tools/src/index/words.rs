//! Words of texts: maximal runs of letters, digits and `_`, and the parts that a word is made of.
//!
//! Every run of a text is a word, so a text that holds a word as a whole run has it in its list: a search by words
//! misses nothing. Parts (`read`, `file` and `2` of `readFile2`) are made from words where they are needed.

/// Maximum length of a word in bytes. Longer runs are left out of the lists of words.
pub(crate) const WORD_BYTES_MAX: usize = 128;

/// Returns true if the character is part of words.
pub(crate) fn is_word_char(character: char) -> bool {
    match character {
        '_' => true,
        _ if character.is_ascii() => character.is_ascii_alphanumeric(),
        _ => character.is_alphanumeric(),
    }
}

/// Returns the words of a text, in order. Runs that are too long are among them.
pub(crate) fn runs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let start = first(rest, true)?;
        let run = &rest[start..];
        let end = first(run, false).unwrap_or(run.len());
        rest = &run[end..];
        Some(&run[..end])
    })
}

/// Returns the position of the first character that is, or is not, part of words.
fn first(text: &str, wanted: bool) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        if byte.is_ascii() {
            if (byte.is_ascii_alphanumeric() || *byte == b'_') == wanted {
                return Some(at);
            }
            at += 1;
        } else {
            let character = text[at..].chars().next().expect("a byte is left");
            if is_word_char(character) == wanted {
                return Some(at);
            }
            at += character.len_utf8();
        }
    }
    None
}

/// Returns the parts of a word in lower case: `HTTPServer_v2` has `http`, `server`, `v` and `2`. Runs of Chinese,
/// Japanese and Korean characters, which are written without spaces, have their pairs of neighbours as parts.
pub(crate) fn parts(word: &str) -> Vec<String> {
    let characters: Vec<char> = word.chars().collect();
    let mut parts = Vec::new();
    let mut start = 0;
    for at in 0..=characters.len() {
        let is_border = at == characters.len() || at > start && is_border(&characters, at);
        if is_border {
            push_part(&characters[start..at], &mut parts);
            start = at;
        }
    }
    parts
}

/// Returns true if a part begins at this place of a word.
fn is_border(characters: &[char], at: usize) -> bool {
    let (before, here) = (class(characters[at - 1]), class(characters[at]));
    match (before, here) {
        (Class::Upper, Class::Lower) => false,
        // The last capital letter before small ones begins a part: `HTTPServer`.
        (Class::Upper, Class::Upper) => characters.get(at + 1).is_some_and(|next| class(*next) == Class::Lower),
        (before, here) => before != here,
    }
}

fn push_part(characters: &[char], parts: &mut Vec<String>) {
    match characters.first().map(|first| class(*first)) {
        None | Some(Class::Joint) => {}
        Some(Class::Unspaced) if characters.len() > 2 => {
            parts.extend(characters.windows(2).map(|pair| pair.iter().collect::<String>()));
        }
        Some(_) => parts.push(characters.iter().flat_map(|character| character.to_lowercase()).collect()),
    }
}

/// The classes of characters between which a word is split.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Upper,
    Lower,
    Digit,
    /// The underscore.
    Joint,
    /// A character of a script that is written without spaces.
    Unspaced,
}

fn class(character: char) -> Class {
    match character {
        '_' => Class::Joint,
        '\u{3040}'..='\u{30ff}'
        | '\u{3400}'..='\u{9fff}'
        | '\u{ac00}'..='\u{d7a3}'
        | '\u{f900}'..='\u{faff}'
        | '\u{20000}'..='\u{3ffff}' => Class::Unspaced,
        _ if character.is_numeric() => Class::Digit,
        _ if character.is_uppercase() => Class::Upper,
        _ => Class::Lower,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_maximal_runs_of_letters_digits_and_underscores() {
        let text = "fn readFile2(x: &str)->\u{4f60}\u{597d}\u{3002}na\u{ef}ve _x\u{fffd}y";
        let found: Vec<&str> = runs(text).collect();
        assert_eq!(found, ["fn", "readFile2", "x", "str", "\u{4f60}\u{597d}", "na\u{ef}ve", "_x", "y"]);
        assert_eq!(runs("").count() + runs(" \u{2014} ").count(), 0);
    }

    #[test]
    fn a_word_is_split_where_its_characters_change() {
        for (word, expected) in [
            ("readFile2", vec!["read", "file", "2"]),
            ("HTTPServer_v2", vec!["http", "server", "v", "2"]),
            ("MAX_LEN", vec!["max", "len"]),
            ("__init__", vec!["init"]),
            ("utf8", vec!["utf", "8"]),
            ("Stra\u{df}eNord", vec!["stra\u{df}e", "nord"]),
            ("\u{4f60}\u{597d}\u{4e16}x", vec!["\u{4f60}\u{597d}", "\u{597d}\u{4e16}", "x"]),
            ("\u{4f60}", vec!["\u{4f60}"]),
            ("_", vec![]),
        ] {
            assert_eq!(parts(word), expected, "{word}");
        }
    }
}

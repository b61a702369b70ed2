//! Known secrets: finds the values that the program has named, in any of their usual encodings.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

use aho_corasick::AhoCorasick;

/// The shortest secret, in characters. Shorter values would match ordinary text.
const CHARACTERS_MIN: usize = 6;
/// The size of the pieces in which longer values are searched, so that a stream never has to hold back more.
const PIECE_BYTES_MAX: usize = 512;

/// True if any secret is known. Most programs name none, and then the lock is never taken.
static ANY: AtomicBool = AtomicBool::new(false);
static SECRETS: RwLock<Option<Arc<SecretSet>>> = RwLock::new(None);

/// Makes a value a secret of this process: from now on it is removed from everything that is written down or shown.
///
/// This applies to all executors of the process on purpose: a secret of one is a secret in the journal, log and stream
/// of the other. The value is trimmed. A value of fewer than six characters is refused (`false`), because hiding it
/// would match ordinary text.
///
/// The value is found as it is and as base64 (alone or within a longer text), hexadecimal, percent-encoded,
/// JSON-escaped and reversed.
///
/// ```
/// use wieldy_core::redact;
///
/// assert!(redact::hide("correct-horse-battery"));
/// assert_eq!(redact::text("it is correct-horse-battery"), "it is [redacted]");
/// assert_eq!(redact::text("it is Y29ycmVjdC1ob3JzZS1iYXR0ZXJ5"), "it is [redacted]");
/// assert!(!redact::hide("horse"));
/// ```
pub fn hide(secret: &str) -> bool {
    let secret = secret.trim();
    if secret.chars().count() < CHARACTERS_MIN {
        return false;
    }
    let mut known = SECRETS.write().expect("no code panics while it holds the secrets");
    let mut secrets = known.as_ref().map(|known| known.secrets.clone()).unwrap_or_default();
    if secrets.insert(secret.to_owned()) {
        *known = Some(Arc::new(SecretSet::new(secrets)));
        ANY.store(true, Ordering::Release);
    }
    true
}

/// Ends the effect of [`hide`] for a value that is not valid any more. For secrets that change often, so that they do
/// not pile up.
///
/// ```
/// use wieldy_core::redact;
///
/// assert!(redact::hide("once-a-token"));
/// redact::unhide("once-a-token");
/// assert_eq!(redact::text("it was once-a-token"), "it was once-a-token");
/// ```
pub fn unhide(secret: &str) {
    let mut known = SECRETS.write().expect("no code panics while it holds the secrets");
    let Some(mut secrets) = known.as_ref().map(|known| known.secrets.clone()) else { return };
    if secrets.remove(secret.trim()) {
        *known = (!secrets.is_empty()).then(|| Arc::new(SecretSet::new(secrets)));
    }
}

/// Returns the known secrets, if there are any.
pub(super) fn of_process() -> Option<Arc<SecretSet>> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    SECRETS.read().expect("no code panics while it holds the secrets").clone()
}

/// All known secrets in all their forms.
pub(super) struct SecretSet {
    secrets: BTreeSet<String>,
    /// The forms, sorted.
    forms: Vec<Form>,
    longest: usize,
    /// The bytes with which forms begin.
    begins: [bool; 256],
    /// Finds the forms by their index.
    finder: AhoCorasick,
    /// True if every text counts as a secret.
    hides_everything: bool,
}

/// One way to write a secret.
type Form = (String, Edges);

/// The neighbours of a form that reveal a part of the secret too, as in base64 with something before or after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Edges {
    before: bool,
    after: bool,
    /// True if the form is hidden only as a whole word: it is so short that it would match parts of ordinary text.
    is_word: bool,
}

impl SecretSet {
    /// Creates the secrets of one call. A secret of fewer than six characters is found only as a word of its own, and
    /// only as it is written.
    pub(super) fn of_call(secrets: BTreeSet<String>) -> Self {
        let (short, long) = secrets.into_iter().partition(|secret| secret.chars().count() < CHARACTERS_MIN);
        let is_word = Edges { is_word: true, ..Edges::default() };
        Self::with(long, BTreeSet::into_iter(short).map(|secret| (secret, is_word)).collect())
    }

    /// Hides every text: for a call with more secrets than can be searched.
    pub(super) fn hiding_everything() -> Self {
        Self { hides_everything: true, ..Self::new(BTreeSet::new()) }
    }

    /// Returns true if every text counts as a secret.
    pub(super) fn hides_everything(&self) -> bool {
        self.hides_everything
    }

    fn new(secrets: BTreeSet<String>) -> Self {
        Self::with(secrets, BTreeSet::new())
    }

    fn with(secrets: BTreeSet<String>, mut forms: BTreeSet<Form>) -> Self {
        secrets.iter().flat_map(|secret| pieces(secret)).for_each(|piece| add_forms(piece, &mut forms));
        let finder = AhoCorasick::new(forms.iter().map(|(text, _)| text)).expect("a few secrets fit into an automaton");
        let longest = forms.iter().map(|(text, _)| text.len()).max().unwrap_or_default();
        let mut begins = [false; 256];
        forms.iter().filter_map(|(text, _)| text.bytes().next()).for_each(|byte| begins[usize::from(byte)] = true);
        Self { secrets, forms: forms.into_iter().collect(), longest, begins, finder, hides_everything: false }
    }

    pub(super) fn is_in(&self, text: &str) -> bool {
        let mut places = Vec::new();
        self.find(text, &mut places);
        !places.is_empty()
    }

    /// Adds the places of all secrets. They may overlap.
    pub(super) fn find(&self, text: &str, places: &mut Vec<Range<usize>>) {
        if self.hides_everything && !text.is_empty() {
            places.push(0..text.len());
            return;
        }
        for found in self.finder.find_overlapping_iter(text) {
            let (mut start, mut end) = (found.start(), found.end());
            let (_, edges) = self.forms[found.pattern().as_usize()];
            let bytes = text.as_bytes();
            if edges.is_word {
                let is_part = |sign: Option<char>| sign.is_some_and(char::is_alphanumeric);
                if !is_part(text[..start].chars().next_back()) && !is_part(text[end..].chars().next()) {
                    places.push(start..end);
                }
                continue;
            }
            if edges.before && start > 0 && is_base64(bytes[start - 1]) {
                start -= 1;
            }
            if edges.after && bytes.get(end).is_some_and(|byte| is_base64(*byte)) {
                end += 1;
            }
            if edges != Edges::default() {
                end += bytes[end..].iter().take(2).take_while(|byte| **byte == b'=').count();
            }
            places.push(start..end);
        }
    }

    /// Returns the place where a secret may begin that the end of the text cuts off, or that the next character may
    /// extend.
    pub(super) fn unfinished(&self, text: &str) -> Option<usize> {
        let start = self.possible_starts(text).find(|at| self.form_beginning_with(&text[*at..]).is_some())?;
        // The character before base64 may reveal a part of the secret.
        let before = start.checked_sub(1).filter(|at| is_base64(text.as_bytes()[*at]));
        Some(before.unwrap_or(start))
    }

    /// Returns the start of a cut-off secret at the end of the text, if at least half of the secret is there.
    pub(super) fn mostly_present(&self, text: &str) -> Option<usize> {
        self.possible_starts(text).find(|at| {
            let end = &text[*at..];
            end.len() >= CHARACTERS_MIN && self.form_beginning_with(end).is_some_and(|form| end.len() * 2 >= form.len())
        })
    }

    /// Returns the places near the end of the text at which a form may begin.
    fn possible_starts<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let from = text.floor_char_boundary(text.len().saturating_sub(self.longest));
        let may_begin = move |at: &usize| self.begins[usize::from(text.as_bytes()[*at])] && text.is_char_boundary(*at);
        (from..text.len()).filter(may_begin)
    }

    /// Returns a form that begins like this.
    fn form_beginning_with(&self, begin: &str) -> Option<&str> {
        let next = self.forms.partition_point(|(form, _)| form.as_str() < begin);
        self.forms.get(next).map(|(form, _)| form.as_str()).filter(|form| form.starts_with(begin))
    }
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_')
}

/// Splits the secret into pieces that are neither too long nor too short.
fn pieces(secret: &str) -> impl Iterator<Item = &str> {
    let count = secret.len().div_ceil(PIECE_BYTES_MAX).max(1);
    let cut = move |number: usize| secret.floor_char_boundary(secret.len() * number / count);
    (0..count).map(move |number| &secret[cut(number)..cut(number + 1)])
}

/// Adds all forms of a secret.
fn add_forms(secret: &str, forms: &mut BTreeSet<Form>) {
    let bytes = secret.as_bytes();
    let json = escaped(secret);
    let ascii: String = json.chars().map(in_ascii).collect();
    let mut plain = vec![
        secret.to_owned(),
        secret.chars().rev().collect(),
        secret.replace('\n', "\r\n"),
        json.replace('/', "\\/"),
        escaped(&json),
        json,
        ascii,
        bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        bytes.iter().map(|byte| format!("{byte:02X}")).collect(),
    ];
    // Programs differ in the characters that they leave unencoded, and in the case of the hexadecimal digits.
    for kept in ["-_.~", "-_.!~*'()", "-_.*", "-_.!~*'();,/?:@&=+$#", "-_.~/", ""] {
        for upper in [false, true] {
            plain.push(percent(bytes, kept, upper));
            plain.push(percent(bytes, kept, upper).replace("%20", "+"));
        }
    }
    plain.retain(|form| form.len() >= CHARACTERS_MIN);
    forms.extend(plain.into_iter().map(|form| (form, Edges::default())));
    for alphabet in [b"+/", b"-_"] {
        forms.extend((0..3).map(|offset| base64(bytes, offset, *alphabet)));
    }
}

/// Returns a text as it is written between quotes in JSON.
fn escaped(text: &str) -> String {
    let quoted = serde_json::to_string(text).expect("a text is plain data");
    quoted[1..quoted.len() - 1].to_owned()
}

fn in_ascii(character: char) -> String {
    if character.is_ascii() {
        return character.into();
    }
    character.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
}

fn percent(bytes: &[u8], kept: &str, upper: bool) -> String {
    let is_kept = |byte: u8| !kept.is_empty() && byte.is_ascii_alphanumeric() || kept.as_bytes().contains(&byte);
    let written = |byte: &u8| match (is_kept(*byte), upper) {
        (true, _) => char::from(*byte).into(),
        (false, true) => format!("%{byte:02X}"),
        (false, false) => format!("%{byte:02x}"),
    };
    bytes.iter().map(written).collect()
}

/// Returns the part of the base64 that does not depend on the text before (`offset` bytes, modulo 3) and after the
/// secret.
fn base64(bytes: &[u8], offset: usize, last_two: [u8; 2]) -> Form {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let bit = |at: usize| match at.checked_sub(offset * 8) {
        Some(at) => bytes.get(at / 8).is_some_and(|byte| byte >> (7 - at % 8) & 1 == 1),
        None => false,
    };
    let digit = |at: usize| {
        let value = (0..6).fold(0, |value, next| value << 1 | usize::from(bit(at * 6 + next)));
        char::from(DIGITS.get(value).copied().unwrap_or_else(|| last_two[value & 1]))
    };
    let (first, bits) = ((offset * 8).div_ceil(6), (offset + bytes.len()) * 8);
    ((first..bits / 6).map(digit).collect(), Edges { before: offset > 0, after: bits % 6 > 0, is_word: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_forms_match_the_standard_encoding() {
        let form = |text: &str, offset| base64(text.as_bytes(), offset, *b"+/");
        assert_eq!(form("foobar", 0), ("Zm9vYmFy".into(), Edges::default()));
        // `xfoobar` is `eGZvb2Jhcg==`, `xxfoobar` is `eHhmb29iYXI=`.
        assert_eq!(form("foobar", 1), ("Zvb2Jhc".into(), Edges { before: true, after: true, is_word: false }));
        assert_eq!(form("foobar", 2), ("mb29iYX".into(), Edges { before: true, after: true, is_word: false }));
        assert_eq!(base64(&[0xfb, 0xff], 0, *b"-_").0, "-_");
    }

    #[test]
    fn the_pieces_of_a_long_secret_add_up_to_it() {
        for length in [6, 511, 512, 513, 1025, 5000] {
            let secret = "é".repeat(length / 2);
            let pieces: Vec<_> = pieces(&secret).collect();
            assert_eq!(pieces.concat(), secret);
            assert!(pieces.iter().all(|piece| piece.len() <= PIECE_BYTES_MAX + 4), "{length}");
            assert!(pieces.len() == 1 || pieces.iter().all(|piece| piece.len() >= PIECE_BYTES_MAX / 2 - 4));
        }
    }
}

//! Redacts text that comes in pieces: no secret is shown because it was cut in two.

use std::ops::Range;
use std::sync::Arc;

use super::known_secrets::SecretSet;
use super::patterns::{self, OpenSecret, ValueKind};
use super::{hidden_between, known_secrets, merged, places};

/// Maximum bytes of text that are held back, plus or minus the length of a known secret.
const HELD_BYTES_MAX: usize = 4 * 1024;
/// Maximum bytes of a word without end that are held back.
const WORD_BYTES_MAX: usize = 1024;
/// Bytes of already shown text that are stored: they decide if the next text is the value of a secret.
const CONTEXT_BYTES: usize = 256;

/// A redactor that removes secrets from one stream of text, such as the output of a program.
///
/// Text that may be the beginning of a secret is held back until that is known: at most a few KiB. A longer secret is
/// dropped until it ends.
///
/// ```
/// use wieldy_core::redact::StreamRedactor;
///
/// let mut stream = StreamRedactor::default();
/// assert_eq!(stream.push(b"login with --pass"), "login with ");
/// assert_eq!(stream.push(b"word hunt"), "--password ");
/// assert_eq!(stream.push(b"er2 done\n"), "[redacted] done\n");
/// assert_eq!(stream.finish(), "");
/// ```
#[derive(Default)]
pub struct StreamRedactor {
    /// The first bytes of an incomplete character.
    bytes: Vec<u8>,
    /// The text shown last, and the text that is held back.
    text: String,
    /// The length of the shown part of `text`.
    shown: usize,
    /// The secrets of the call that prints.
    own: Option<Arc<SecretSet>>,
    /// True if text that only looks like a secret is shown.
    is_exact: bool,
}

impl StreamRedactor {
    pub(super) fn of_call(own: Option<Arc<SecretSet>>) -> Self {
        Self { own, ..Self::default() }
    }

    /// Creates a redactor that removes only values known through [`hide`](super::hide), and no text that only looks
    /// like a secret.
    pub fn exact() -> Self {
        Self { is_exact: true, ..Self::default() }
    }

    /// Returns the places of secrets in the text, and a value that has not ended yet.
    fn places(&self) -> (Vec<Range<usize>>, Option<OpenSecret>) {
        self.places_in(&self.text)
    }

    fn places_in(&self, text: &str) -> (Vec<Range<usize>>, Option<OpenSecret>) {
        if !self.is_exact {
            return places(text, self.own.as_ref());
        }
        let mut found = Vec::new();
        if let Some(known) = known_secrets::of_process() {
            known.find(text, &mut found);
        }
        (merged(found), None)
    }

    /// Returns the end of a part of a long secret that is found as a secret on its own. The rest can be dropped: text
    /// that follows is judged by this part.
    fn enough_of(&self, secret: &Range<usize>) -> Option<usize> {
        [3, 6].into_iter().find_map(|words| {
            let end = self.text.floor_char_boundary(secret.start + words * WORD_BYTES_MAX);
            let (found, _) = self.places_in(&self.text[..end.min(secret.end)]);
            let part = found.into_iter().find(|part| part.start <= secret.start && secret.start < part.end)?;
            (part.end < secret.end).then_some(part.end)
        })
    }

    /// Adds bytes, and returns the text that can be shown now. Bytes that are not text become the replacement
    /// character.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.take(bytes);
        let (places, open_secret) = self.places();
        let unfinished_known = self.first_place(|known| known.unfinished(&self.text));
        let unfinished = patterns::unfinished(&self.text).filter(|_| !self.is_exact);
        let holds = [open_secret.as_ref().map(|value| value.start), unfinished, unfinished_known];
        let end = self.text.len();
        let within_secret = |cut: usize| places.iter().find(|place| place.start < cut && cut < place.end);
        let mut cut = holds.into_iter().flatten().min().unwrap_or(end);
        cut = within_secret(cut).map_or(cut, |place| place.start);
        let mut kept = None;
        if end - cut > HELD_BYTES_MAX {
            match open_secret {
                Some(OpenSecret { start, kind }) => {
                    cut = start;
                    if end - start > HELD_BYTES_MAX / 2 {
                        kept = Some((start, shortened(&self.text[start..], kind)));
                    }
                }
                // A word that is too long to be a token.
                None => {
                    let late = self.text.floor_char_boundary(end - WORD_BYTES_MAX);
                    cut = unfinished_known.map_or(late, |unfinished| unfinished.min(late));
                    if let Some(place) = within_secret(cut) {
                        cut = if place.end < end { place.end } else { place.start };
                        let much = (place.end == end).then(|| self.enough_of(place)).flatten();
                        kept = much.map(|much| (much, String::new()));
                    }
                }
            }
        }
        let cut = cut.max(self.shown);
        let shown = hidden_between(&self.text, &places, self.shown..cut);
        if let Some((at, kept)) = kept {
            self.text.truncate(at);
            self.text.push_str(&kept);
        }
        self.shown = cut.min(self.text.len());
        self.forget(self.shown);
        shown
    }

    /// Returns the text that is held back. More text can come afterwards.
    pub fn finish(&mut self) -> String {
        if !std::mem::take(&mut self.bytes).is_empty() {
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        let (mut found, _) = self.places();
        let end = self.text.len();
        // A secret that is cut off at the end is hidden if most of it is there.
        if let Some(start) = self.first_place(|known| known.mostly_present(&self.text)) {
            found.push(start..end);
            found = merged(found);
        }
        let shown = hidden_between(&self.text, &found, self.shown..end);
        let held = std::mem::replace(&mut self.shown, end);
        self.forget(held);
        shown
    }

    /// Returns the first place that `place` finds for the secrets of the process and those of the call.
    fn first_place(&self, place: impl Fn(&SecretSet) -> Option<usize>) -> Option<usize> {
        let everywhere = known_secrets::of_process().and_then(|known| place(&known));
        let own = self.own.as_deref().and_then(place);
        everywhere.into_iter().chain(own).min()
    }

    /// Returns true if the text may end within a known secret.
    pub(crate) fn is_within_secret(&self) -> bool {
        self.first_place(|known| known.unfinished(&self.text)).is_some()
    }

    /// Returns true if text is held back.
    pub(crate) fn is_holding(&self) -> bool {
        self.shown < self.text.len() || !self.bytes.is_empty()
    }

    /// Adds bytes to the text, except an incomplete character at their end.
    fn take(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.bytes);
        let mut rest = bytes.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, after) = rest.split_at(error.valid_up_to());
            self.text.push_str(&String::from_utf8_lossy(valid));
            let Some(length) = error.error_len() else {
                self.bytes = after.to_vec();
                return;
            };
            self.text.push(char::REPLACEMENT_CHARACTER);
            rest = &after[length..];
        }
        self.text.push_str(&String::from_utf8_lossy(rest));
    }

    /// Drops the text well before a place.
    fn forget(&mut self, before: usize) {
        let start = self.text.floor_char_boundary(before.saturating_sub(CONTEXT_BYTES));
        self.text.drain(..start);
        self.shown -= start;
    }
}

/// Shortens a value without end to the part that decides where it ends.
fn shortened(value: &str, kind: ValueKind) -> String {
    match kind {
        ValueKind::Quoted { backslashes, quote } => {
            let period = 2 * (backslashes + 1);
            let run = value.bytes().rev().take_while(|byte| *byte == b'\\').count();
            let run = if run > 2 * period { run % period + period } else { run };
            format!("{}{}{}", "\\".repeat(backslashes), char::from(quote), "\\".repeat(run))
        }
        ValueKind::Brackets => {
            let open = patterns::brackets(value).err().unwrap_or_default();
            open[open.len().saturating_sub(WORD_BYTES_MAX)..].to_owned()
        }
        ValueKind::Word | ValueKind::Parameter | ValueKind::Line { .. } => "x".into(),
        ValueKind::Pem => {
            let head = value.floor_char_boundary(96);
            let tail = value.floor_char_boundary(value.len().saturating_sub(96)).max(head);
            [&value[..head], &value[tail..]].concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes a text in pieces of some bytes.
    fn pushed(stream: &mut StreamRedactor, text: &str) -> String {
        text.as_bytes().chunks(777).map(|bytes| stream.push(bytes)).collect()
    }

    #[test]
    fn an_exact_stream_removes_known_secrets_only() {
        crate::redact::hide("exactly-this-secret");
        let mut stream = StreamRedactor::exact();
        let pieces = [stream.push(b"--password hunter2 exactly-th"), stream.push(b"is-secret done"), stream.finish()];
        assert_eq!(pieces.concat(), "--password hunter2 [redacted] done");
    }

    #[test]
    fn a_secret_without_end_is_dropped_until_it_ends() {
        let long = "canary{[\\\\".repeat(20_000);
        let blanks = "canary \n".repeat(20_000);
        for (begin, secret, end, shown) in [
            ("password=", &long, " b", "password=[redacted] b"),
            ("password=\"", &blanks, "\" b", "password=\"[redacted]\" b"),
            ("?token=", &long, "&b", "?token=[redacted]&b"),
            ("Cookie: ", &long, "\nb", "Cookie: [redacted]\nb"),
            ("\"secret\": {\"a\": [\"", &blanks, "}\"]} b", "\"secret\": [redacted] b"),
            ("-----BEGIN PRIVATE KEY-----\n", &blanks, "-----END PRIVATE KEY----- b", "[redacted] b"),
            ("sk-1", &"canary".repeat(20_000), " b", "[redacted] b"),
        ] {
            let mut stream = StreamRedactor::default();
            let mut seen = pushed(&mut stream, &format!("a {begin}{secret}"));
            assert!(stream.text.len() < 6 * 1024, "{} bytes are held back after {begin}", stream.text.len());
            seen += &pushed(&mut stream, end);
            seen += &stream.finish();
            assert_eq!(seen, format!("a {shown}"));
        }
    }

    #[test]
    fn text_after_a_finish_still_belongs_to_the_open_secret() {
        let mut stream = StreamRedactor::default();
        assert_eq!(stream.push(b"password='abc "), "password=");
        assert_eq!(stream.finish(), "'[redacted]");
        assert_eq!(stream.push(b"def"), "");
        assert_eq!(stream.push(b"' ghi "), "[redacted]' ghi ");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_known_secret_of_several_words_is_held_back() {
        assert!(known_secrets::hide("correct horse\nbattery staple"));
        let text = "it is: correct horse or correct horse\nbattery staple, and correct horse\nbattery";
        for size in 1..40 {
            let mut stream = StreamRedactor::default();
            let shown: String = text.as_bytes().chunks(size).map(|bytes| stream.push(bytes)).collect();
            assert_eq!(shown + &stream.finish(), "it is: correct horse or [redacted], and [redacted]", "by {size}");
        }
    }

    #[test]
    fn a_long_known_secret_is_not_shown_in_part_when_its_text_is_shortened() {
        let secret: String = (0..1500).map(|at| char::from(b'a' + (at * at % 23 % 26) as u8)).collect();
        assert!(known_secrets::hide(&secret));
        let percent: String = secret.bytes().map(|byte| format!("%{byte:02x}")).collect();
        for end in [" ", "\n", "x"] {
            let mut stream = StreamRedactor::default();
            let shown = [stream.push(format!(" {percent}").as_bytes()), stream.push(end.as_bytes()), stream.finish()];
            let shown = shown.concat();
            assert!(shown.starts_with(" [redacted]") && !shown.contains('%'), "{shown}");
        }
    }

    #[test]
    fn split_and_invalid_characters_are_accepted() {
        let mut stream = StreamRedactor::default();
        let shown: String = "é 漢\n".bytes().chain([0xff, b' ', 0xe6]).map(|byte| stream.push(&[byte])).collect();
        assert_eq!(shown + &stream.finish(), "é 漢\n\u{fffd} \u{fffd}");
    }
}

//! Redaction of text that comes in pieces: no secret comes out because it was cut in two.

use std::ops::Range;
use std::sync::Arc;

use super::patterns::{self, Kind, Unfinished};
use super::secrets::Known;
use super::{hidden_between, merged, places, secrets};

/// How much text is held back at most, give or take a known secret.
const HELD_BYTES_MAX: usize = 4 * 1024;
/// How much of a word without end is held back.
const WORD_BYTES_MAX: usize = 1024;
/// How much of what was shown is remembered, because it tells what the next text is: the value of a secret or not.
const CONTEXT_BYTES: usize = 256;

/// Takes secrets out of one stream of text, such as what a program prints.
///
/// What may be the beginning of a secret is held back until it is known: at most a few KiB. Of a longer secret, what
/// comes is dropped until it ends.
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
    /// The beginning of a character.
    bytes: Vec<u8>,
    /// What was shown last, and what is held back.
    text: String,
    /// Up to where the text was shown.
    shown: usize,
    /// The secrets of the call that prints.
    own: Option<Arc<Known>>,
    /// True if text that only looks like a secret is shown.
    is_exact: bool,
}

impl StreamRedactor {
    pub(super) fn of_call(own: Option<Arc<Known>>) -> Self {
        Self { own, ..Self::default() }
    }

    /// Takes out only what [`hide`](super::hide) was told, and nothing that merely looks like a secret.
    pub fn exact() -> Self {
        Self { is_exact: true, ..Self::default() }
    }

    /// Returns the places of secrets in the text, and a value that is not over.
    fn places(&self) -> (Vec<Range<usize>>, Option<Unfinished>) {
        if !self.is_exact {
            return places(&self.text, self.own.as_ref());
        }
        let mut found = Vec::new();
        if let Some(known) = secrets::known() {
            known.find(&self.text, &mut found);
        }
        (merged(found), None)
    }

    /// Takes what comes next, and gives what can be shown. Bytes that are no text become the replacement character.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.take(bytes);
        let (places, unfinished) = self.places();
        let known_begun = self.known(|known| known.begun(&self.text));
        let begun = patterns::begun(&self.text).filter(|_| !self.is_exact);
        let holds = [unfinished.as_ref().map(|value| value.start), begun, known_begun];
        let end = self.text.len();
        let apart = |cut: usize| places.iter().find(|place| place.start < cut && cut < place.end);
        let mut cut = holds.into_iter().flatten().min().unwrap_or(end);
        cut = apart(cut).map_or(cut, |place| place.start);
        let mut kept = None;
        if end - cut > HELD_BYTES_MAX {
            match unfinished {
                Some(Unfinished { start, kind }) => {
                    cut = start;
                    if end - start > HELD_BYTES_MAX / 2 {
                        kept = Some((start, shortened(&self.text[start..], kind)));
                    }
                }
                // A word that is too long to be one.
                None => {
                    let late = self.text.floor_char_boundary(end - WORD_BYTES_MAX);
                    cut = known_begun.map_or(late, |begun| begun.min(late));
                    if let Some(place) = apart(cut) {
                        cut = if place.end < end { place.end } else { place.start };
                        let much = self.text.floor_char_boundary(place.start + 3 * WORD_BYTES_MAX);
                        kept = (place.end == end && much < end).then(|| (much, String::new()));
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

    /// Gives what is held back. More text can come afterwards.
    pub fn finish(&mut self) -> String {
        if !std::mem::take(&mut self.bytes).is_empty() {
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        let (mut found, _) = self.places();
        let end = self.text.len();
        // What was cut off within a secret is most of a secret.
        if let Some(start) = self.known(|known| known.mostly_begun(&self.text)) {
            found.push(start..end);
            found = merged(found);
        }
        let shown = hidden_between(&self.text, &found, self.shown..end);
        let held = std::mem::replace(&mut self.shown, end);
        self.forget(held);
        shown
    }

    /// Returns the first place that known secrets tell, those of the process and those of the call.
    fn known(&self, place: impl Fn(&Known) -> Option<usize>) -> Option<usize> {
        let everywhere = secrets::known().and_then(|known| place(&known));
        let own = self.own.as_deref().and_then(place);
        everywhere.into_iter().chain(own).min()
    }

    /// Returns true if the text ends within what may be a known secret.
    pub(crate) fn is_within_secret(&self) -> bool {
        self.known(|known| known.begun(&self.text)).is_some()
    }

    /// Whether something is held back.
    pub(crate) fn is_holding(&self) -> bool {
        self.shown < self.text.len() || !self.bytes.is_empty()
    }

    /// Adds bytes to the text, but for a character that is begun at their end.
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

    /// Forgets what stands well before a place.
    fn forget(&mut self, before: usize) {
        let start = self.text.floor_char_boundary(before.saturating_sub(CONTEXT_BYTES));
        self.text.drain(..start);
        self.shown -= start;
    }
}

/// A value that does not end, cut down to what tells where it will.
fn shortened(value: &str, kind: Kind) -> String {
    match kind {
        Kind::Quoted { backslashes, quote } => {
            let period = 2 * (backslashes + 1);
            let run = value.bytes().rev().take_while(|byte| *byte == b'\\').count();
            let run = if run > 2 * period { run % period + period } else { run };
            format!("{}{}{}", "\\".repeat(backslashes), char::from(quote), "\\".repeat(run))
        }
        Kind::Brackets => {
            let open = patterns::brackets(value).err().unwrap_or_default();
            open[open.len().saturating_sub(WORD_BYTES_MAX)..].to_owned()
        }
        Kind::Word | Kind::Parameter | Kind::Line { .. } => "x".into(),
        Kind::Pem => {
            let head = value.floor_char_boundary(96);
            let tail = value.floor_char_boundary(value.len().saturating_sub(96)).max(head);
            [&value[..head], &value[tail..]].concat()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes a text by pieces of some bytes.
    fn pushed(stream: &mut StreamRedactor, text: &str) -> String {
        text.as_bytes().chunks(777).map(|bytes| stream.push(bytes)).collect()
    }

    #[test]
    fn an_exact_stream_takes_out_what_is_hidden_and_leaves_what_only_looks_secret() {
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
    fn what_comes_after_the_rest_still_belongs_to_the_secret() {
        let mut stream = StreamRedactor::default();
        assert_eq!(stream.push(b"password='abc "), "password=");
        assert_eq!(stream.finish(), "'[redacted]");
        assert_eq!(stream.push(b"def"), "");
        assert_eq!(stream.push(b"' ghi "), "[redacted]' ghi ");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn a_known_secret_of_several_words_is_held_back() {
        assert!(secrets::hide("correct horse\nbattery staple"));
        let text = "it is: correct horse or correct horse\nbattery staple, and correct horse\nbattery";
        for size in 1..40 {
            let mut stream = StreamRedactor::default();
            let shown: String = text.as_bytes().chunks(size).map(|bytes| stream.push(bytes)).collect();
            assert_eq!(shown + &stream.finish(), "it is: correct horse or [redacted], and [redacted]", "by {size}");
        }
    }

    #[test]
    fn characters_may_be_cut_and_need_not_be_any() {
        let mut stream = StreamRedactor::default();
        let shown: String = "é 漢\n".bytes().chain([0xff, b' ', 0xe6]).map(|byte| stream.push(&[byte])).collect();
        assert_eq!(shown + &stream.finish(), "é 漢\n\u{fffd} \u{fffd}");
    }
}

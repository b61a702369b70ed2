//! Text in files: detects the encoding, and writes edited text back without changing the rest.

use std::borrow::Cow;

use encoding_rs::{Encoding, UTF_8, UTF_16BE, UTF_16LE};

/// The number of bytes searched for a NUL byte, which marks a file as binary.
const BINARY_LOOK_BYTES: usize = 8 * 1024;

/// A file's content as text.
#[derive(Debug, PartialEq)]
pub(crate) struct Decoded<'a> {
    pub(crate) text: Cow<'a, str>,
    pub(crate) encoding: &'static Encoding,
    /// True if some bytes are not valid in the encoding and are shown as `�`.
    pub(crate) lossy: bool,
}

/// The content is not text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotText;

/// Decodes by byte order mark, else as `wanted`, else as UTF-8.
pub(crate) fn decode<'a>(bytes: &'a [u8], wanted: Option<&'static Encoding>) -> Result<Decoded<'a>, NotText> {
    if wanted.is_none() && is_binary(bytes) {
        return Err(NotText);
    }
    let (text, encoding, lossy) = wanted.unwrap_or(UTF_8).decode(bytes);
    Ok(Decoded { text, encoding, lossy })
}

/// Returns true if the bytes are not text in any encoding that is detected automatically.
pub(crate) fn is_binary(bytes: &[u8]) -> bool {
    let wide = Encoding::for_bom(bytes).is_some_and(|(encoding, _)| encoding == UTF_16LE || encoding == UTF_16BE);
    !wide && bytes[..bytes.len().min(BINARY_LOOK_BYTES)].contains(&0)
}

/// Text from a file that can be written back: unedited parts are written byte for byte.
#[derive(Debug, PartialEq)]
pub(crate) struct Editable {
    pub(crate) text: String,
    pub(crate) form: TextForm,
}

/// The form of text in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextForm {
    Utf8,
    Utf8WithMark,
    Utf16Little,
    Utf16Big,
    /// An unknown encoding: each byte stands for the character of the same number, so that all bytes are written back.
    /// Only ASCII means the same in nearly all encodings.
    Bytes,
}

const MARK_UTF_8: &[u8] = b"\xEF\xBB\xBF";
const MARK_LITTLE: &[u8] = b"\xFF\xFE";
const MARK_BIG: &[u8] = b"\xFE\xFF";

impl Editable {
    /// Returns the content as text that can be edited, or an error if it could not be written back unchanged.
    pub(crate) fn of(bytes: &[u8]) -> Result<Self, NotText> {
        if is_binary(bytes) {
            return Err(NotText);
        }
        if let Some(rest) = bytes.strip_prefix(MARK_LITTLE) {
            return Ok(Self { text: wide(rest, u16::from_le_bytes)?, form: TextForm::Utf16Little });
        }
        if let Some(rest) = bytes.strip_prefix(MARK_BIG) {
            return Ok(Self { text: wide(rest, u16::from_be_bytes)?, form: TextForm::Utf16Big });
        }
        let (rest, form) = match bytes.strip_prefix(MARK_UTF_8) {
            Some(rest) => (rest, TextForm::Utf8WithMark),
            None => (bytes, TextForm::Utf8),
        };
        Ok(match std::str::from_utf8(rest) {
            Ok(text) => Self { text: text.to_owned(), form },
            Err(_) => Self { text: bytes.iter().copied().map(char::from).collect(), form: TextForm::Bytes },
        })
    }

    /// Returns the bytes for the file.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        let text = &self.text;
        match self.form {
            TextForm::Utf8 => self.text.into_bytes(),
            TextForm::Utf8WithMark => [MARK_UTF_8, text.as_bytes()].concat(),
            TextForm::Utf16Little => {
                MARK_LITTLE.iter().copied().chain(text.encode_utf16().flat_map(u16::to_le_bytes)).collect()
            }
            TextForm::Utf16Big => {
                MARK_BIG.iter().copied().chain(text.encode_utf16().flat_map(u16::to_be_bytes)).collect()
            }
            TextForm::Bytes => text
                .chars()
                .map(|character| u8::try_from(character).expect("only ASCII is put into text of this form"))
                .collect(),
        }
    }

    /// Returns true if `text` can be inserted without guessing the encoding.
    pub(crate) fn accepts(&self, text: &str) -> bool {
        self.form != TextForm::Bytes || text.is_ascii()
    }
}

fn wide(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, NotText> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let units: Vec<u16> = pairs.iter().copied().map(unit).collect();
    if rest.is_empty() { String::from_utf16(&units).map_err(|_| NotText) } else { Err(NotText) }
}

/// Returns the first `bytes_max` bytes of the text, without cutting a character.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_is_decoded_by_its_mark_then_by_the_given_encoding_then_as_utf_8() {
        let latin = Encoding::for_label(b"latin1");
        for (bytes, wanted, text, encoding, lossy) in [
            (&b"plain"[..], None, "plain", "UTF-8", false),
            (b"\xEF\xBB\xBFmarked", None, "marked", "UTF-8", false),
            (b"\xFF\xFEh\0\xE4\0", None, "hä", "UTF-16LE", false),
            (b"\xFE\xFF\0h\0\xE4", latin, "hä", "UTF-16BE", false),
            (b"h\xE4", latin, "hä", "windows-1252", false),
            (b"h\xE4", None, "h\u{FFFD}", "UTF-8", true),
            (b"", None, "", "UTF-8", false),
        ] {
            let decoded = decode(bytes, wanted).expect("text");
            assert_eq!((&*decoded.text, decoded.encoding.name(), decoded.lossy), (text, encoding, lossy));
        }
        assert_eq!(decode(b"ELF\0\x01", None), Err(NotText));
        assert!(decode(b"h\0i\0", Encoding::for_label(b"utf-16le")).is_ok(), "the caller knows better");
    }

    #[test]
    fn text_that_could_not_be_put_back_is_not_editable() {
        assert_eq!(Editable::of(b"\xFF\xFE\x00\xD8"), Err(NotText), "half a pair");
        assert_eq!(Editable::of(b"\xFF\xFEa"), Err(NotText), "half a unit");
        let bytes = Editable::of(b"h\xE4").expect("of an unknown encoding");
        assert_eq!((bytes.form, bytes.accepts("ok"), bytes.accepts("ä")), (TextForm::Bytes, true, false));
    }

    #[test]
    fn a_cut_tears_no_character() {
        assert_eq!(["", "a", "a", "aé"].map(str::len), [0, 1, 2, 3].map(|max| cut("aé", max).len()));
    }

    proptest! {
        #[test]
        fn editable_text_is_written_back_byte_for_byte(bytes in proptest::collection::vec(any::<u8>(), 0..64), mark in 0..4_usize) {
            let mark = [&b""[..], MARK_UTF_8, MARK_LITTLE, MARK_BIG][mark];
            let bytes = [mark, bytes.as_slice()].concat();
            if let Ok(editable) = Editable::of(&bytes) {
                prop_assert_eq!(editable.into_bytes(), bytes);
            }
        }
    }
}

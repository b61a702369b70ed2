//! Decodes the text of `$'…'` as bash does.

use std::str::Chars;

/// Decodes text up to its closing quote, and goes on behind the quote. Bytes that are not text become U+FFFD.
pub(super) fn decoded(characters: &mut Chars<'_>) -> String {
    let mut text = String::new();
    while let Some(c) = characters.next().filter(|c| *c != '\'') {
        text.push(c);
        if c == '\\' {
            text.extend(characters.next());
        }
    }
    let (mut bytes, mut rest) = (Vec::new(), text.as_str());
    while let Some((before, escape)) = rest.split_once('\\') {
        bytes.extend_from_slice(before.as_bytes());
        rest = decode_one(escape, &mut bytes);
    }
    bytes.extend_from_slice(rest.as_bytes());
    // The shell drops a zero byte and everything behind it.
    let kept = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(kept).into_owned()
}

/// Decodes the text behind a backslash, and returns the rest of the text.
fn decode_one<'a>(text: &'a str, bytes: &mut Vec<u8>) -> &'a str {
    let mut characters = text.chars();
    let Some(c) = characters.next() else {
        bytes.push(b'\\');
        return text;
    };
    let rest = characters.as_str();
    let byte = match c {
        'a' => 0x07,
        'b' => 0x08,
        'e' | 'E' => 0x1b,
        'f' => 0x0c,
        'n' => b'\n',
        'r' => b'\r',
        't' => b'\t',
        'v' => 0x0b,
        '\\' => b'\\',
        '\'' => b'\'',
        '"' => b'"',
        '?' => b'?',
        '0'..='7' => return numbered(text, 8, 3, bytes).unwrap_or(rest),
        'x' if rest.starts_with('{') => {
            let digits = digits(&rest[1..], 16, usize::MAX);
            // The last byte counts.
            bytes.push(u8::from_str_radix(&digits[digits.len().saturating_sub(2)..], 16).unwrap_or(0));
            let rest = &rest[1 + digits.len()..];
            return rest.strip_prefix('}').unwrap_or(rest);
        }
        'x' if rest.starts_with(|c: char| c.is_ascii_hexdigit()) => {
            return numbered(rest, 16, 2, bytes).unwrap_or(rest);
        }
        'u' | 'U' if rest.starts_with(|c: char| c.is_ascii_hexdigit()) => {
            let digits = digits(rest, 16, if c == 'u' { 4 } else { 8 });
            let character = u32::from_str_radix(digits, 16).ok().and_then(char::from_u32);
            bytes.extend(character.unwrap_or(char::REPLACEMENT_CHARACTER).to_string().bytes());
            return &rest[digits.len()..];
        }
        'c' => return control(rest, bytes),
        _ => {
            bytes.push(b'\\');
            bytes.extend(c.to_string().bytes());
            return rest;
        }
    };
    bytes.push(byte);
    rest
}

/// Adds the byte of a number with some digits, and returns the text behind it, unless there is no digit.
fn numbered<'a>(text: &'a str, base: u32, most: usize, bytes: &mut Vec<u8>) -> Option<&'a str> {
    let digits = digits(text, base, most);
    // Numbers over 255 lose their upper bits.
    bytes.push(u32::from_str_radix(digits, base).ok()?.to_le_bytes()[0]);
    Some(&text[digits.len()..])
}

/// Adds a control character, and returns the text behind its letter.
fn control<'a>(text: &'a str, bytes: &mut Vec<u8>) -> &'a str {
    let text = if text.starts_with("\\\\") { &text[1..] } else { text };
    let mut characters = text.chars();
    match characters.next() {
        Some('?') => bytes.push(0x7f),
        Some(c) if c.is_ascii() => bytes.extend(u8::try_from(c).map(|byte| byte & 0x1f)),
        Some(_) => bytes.push(0xff),
        None => {}
    }
    characters.as_str()
}

/// Returns the digits at the start of a text.
fn digits(text: &str, base: u32, most: usize) -> &str {
    let length = text.bytes().take(most).take_while(|byte| char::from(*byte).is_digit(base)).count();
    &text[..length]
}

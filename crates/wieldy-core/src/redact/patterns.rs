//! Finds text that looks like a secret: tokens by their shape, and values by the name before them.

use std::ops::Range;
use std::sync::LazyLock;

use regex::{Match, Regex};

use super::REDACTED;

/// Names that mark a secret in any text.
macro_rules! strong {
    () => {
        "passw(?:or)?d|passphrase|secret|(?:api|access|account|private)[-_]?key|(?:access|auth|refresh|id|session|api)[-_]?token"
    };
}
/// Names that are also words of ordinary texts.
macro_rules! weak {
    () => {
        "credential|authorization|cookie|bearer"
    };
}

/// Names of arguments and keys whose values are secret.
pub(super) static SECRET_NAME: LazyLock<Regex> =
    LazyLock::new(|| pattern(concat!("(?i-u)", strong!(), "|", weak!(), "|(?:^|[-_])(?:auth|pwd|pin|token)$")));

/// Tokens of well-known shapes. None of them contains white space, except after `Bearer`.
static SHAPE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i-u:\b(?:bearer|basic)[ \t]{1,8}[A-Z0-9+/_.~=-]{16,})",
        r"|(?:(?-u:\b)|\\[nrt])(?:",
        r"(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,}|(?:gsk|hf|r8|whsec|npm|glsa|dckr_pat|lin_api|do[opr]_v1|shp(?:at|ca|pa|ss))_[A-Za-z0-9_]{20,}",
        r"|(?:pypi|xai|pplx|xapp)-[A-Za-z0-9_-]{32,}",
        r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}",
        r"|gl(?:pat|dt|ft|rt|soat|cbt|ptt|imt|agent|oas)-[A-Za-z0-9_-]{16,}",
        r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?-u:\b)",
        r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}|GOCSPX-[A-Za-z0-9_-]{20,}",
        r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/[A-Za-z0-9/]{16,}",
        r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|hvs\.[A-Za-z0-9_-]{20,}|ATATT[A-Za-z0-9_=-]{20,}",
        r"|SK[0-9a-f]{32}(?-u:\b)|AGE-SECRET-KEY-1[A-Z0-9]{20,}|[0-9]{8,10}:AA[A-Za-z0-9_-]{33,}",
        r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,3}",
        r")",
        r"|://(?:[^\s/@:?#]*:[^\s/@]+|[^\s/@:?#]{16,})@",
    ))
});

/// Text after which a secret follows.
static OPENER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        "(?i-u)(?:(?:",
        strong!(),
        "|",
        weak!(),
        r#")[A-Z0-9_-]{0,64}|(?:\b|_|\\[nrt])(?:auth|pwd|pin|token))(?:\\{0,8}["'])?[ \t]{0,8}[:=]"#,
        r"|--[A-Z0-9-]{0,40}?(?:",
        strong!(),
        r"|token|credentials?)[ \t]{1,8}",
        r"|[?&](?:[A-Z-]{0,40}sig(?:nature)?|key)=",
        r"|-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----",
    ))
});

/// Both patterns in one pass, because most texts match neither.
static SUSPECT: LazyLock<Regex> = LazyLock::new(|| pattern(&format!("(?:{})|(?:{})", SHAPE.as_str(), OPENER.as_str())));

static PEM_END: LazyLock<Regex> = LazyLock::new(|| pattern(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"));

/// Values that are not secret: types and constants of programs, references to a value, and already redacted text.
static BENIGN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"^(?:(?i-u:&?str|string|bool|boolean|int|integer|number|any|none|null|nil|true|false|undefined|optional|required|yes|no)",
        r"|(?:Option|Optional|Vec|List)[<\[].*|\$\{?[A-Z_][A-Z0-9_]*\}?|\$\{.*|\$\(.*|%[sdv]|\{[a-z_0-9]*\}|<[A-Za-z_ -]+>|[*.]+",
        r"|(?:self|this|args|config|env|os|process|std)(?:\.|::)[A-Za-z_].*",
        r"|[A-Za-z_][A-Za-z0-9_.:]*\((?:[A-Za-z_&]?[A-Za-z0-9_.:]*\))?",
        r"|\[redacted\].*)[,;)\]}?]*$",
    ))
});

/// Compiles the patterns for redaction, which takes a millisecond. Otherwise the first record pays for that.
pub fn compile() {
    LazyLock::force(&SUSPECT);
    LazyLock::force(&SECRET_NAME);
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the pattern is a constant")
}

/// The suspected secrets of a text.
#[derive(Default)]
pub(super) struct Suspects {
    pub(super) places: Vec<Range<usize>>,
    /// The first secret without an end: it may continue after the text.
    pub(super) open_secret: Option<OpenSecret>,
}

/// A secret that may continue after the text.
pub(super) struct OpenSecret {
    pub(super) start: usize,
    pub(super) kind: ValueKind,
}

/// The kind of a value after an opener, which decides where it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueKind {
    /// After this many backslashes and a quote, until the same sequence comes again.
    Quoted { backslashes: usize, quote: u8 },
    /// An object or a list.
    Brackets,
    /// Until white space or a quote after the word.
    Word,
    /// Until the next parameter of a URL.
    Parameter,
    /// Until the end of the line, or the quote that encloses the line.
    Line { quote: Option<u8> },
    /// Until the line that ends a PEM key.
    Pem,
}

/// Finds text that looks like a secret. Places may overlap.
pub(super) fn find(text: &str) -> Suspects {
    let mut found = Suspects::default();
    if !SUSPECT.is_match(text) {
        return found;
    }
    for shape in SHAPE.find_iter(text).filter(is_token) {
        // The word before a token stays, and so does the rest of a URL.
        let escape = if shape.as_str().starts_with('\\') { 2 } else { 0 };
        let token = shape.start() + shape.as_str().rfind([' ', '\t']).map_or(escape, |space| space + 1);
        found.places.push(match shape.as_str().starts_with("://") {
            true => shape.start() + 3..shape.end() - 1,
            false => token..shape.end(),
        });
    }
    let mut covered = 0;
    for opener in OPENER.find_iter(text) {
        if opener.start() < covered {
            continue;
        }
        let Some((start, kind)) = value_after(text, &opener) else { continue };
        let end = end_of(text, start, kind);
        let place = start..end.unwrap_or(text.len());
        if end.is_none() && found.open_secret.is_none() {
            found.open_secret = Some(OpenSecret { start, kind });
        }
        if matches!(kind, ValueKind::Word | ValueKind::Line { .. }) && BENIGN.is_match(&text[place.clone()]) {
            continue;
        }
        covered = place.end;
        let inner = inside(text, place, kind);
        if !inner.is_empty() && &text[inner.clone()] != REDACTED {
            found.places.push(inner);
        }
    }
    found
}

/// Returns the place where a token may begin that the text cuts off. A token has no white space, and a letter or digit.
pub(super) fn unfinished(text: &str) -> Option<usize> {
    let word = text.trim_end_matches(|character: char| !character.is_whitespace()).len();
    text[word..].contains(char::is_alphanumeric).then_some(word)
}

/// Returns false for words that only look like tokens, such as `basic internationalization`.
fn is_token(shape: &Match<'_>) -> bool {
    let text = shape.as_str();
    let text = text.strip_prefix(['\\']).map_or(text, |escaped| &escaped[1..]);
    let is_wordy = matches!(text.as_bytes(), [b'b' | b'B', ..] | [b's' | b'r' | b'p', b'k', b'-' | b'_', ..]);
    let uppercase = || text.bytes().skip(1).filter(u8::is_ascii_uppercase).count() > 2;
    !is_wordy || text.contains(|c: char| c.is_ascii_digit() || matches!(c, '=' | '+')) || uppercase()
}

/// Returns the start and the kind of the value after an opener, or `None` if no secret follows.
fn value_after(text: &str, opener: &Match<'_>) -> Option<(usize, ValueKind)> {
    let said = opener.as_str();
    let bytes = text.as_bytes();
    if said.starts_with("-----") {
        return Some((opener.start(), ValueKind::Pem));
    }
    if said.starts_with(['?', '&']) {
        return Some((opener.end(), ValueKind::Parameter));
    }
    let mut name_start = opener.start() - count_back(&bytes[..opener.start()], is_name);
    // The letter of an escaped line end is not a part of the name.
    let is_escaped = said.starts_with('\\') || bytes[..name_start].ends_with(b"\\") && name_start < opener.start();
    name_start += usize::from(is_escaped && !said.starts_with('\\'));
    let before = name_start.checked_sub(1).map(|at| bytes[at]);
    let name = said.trim_end_matches([':', '=']).trim_end();
    let quoted_name = name.ends_with(['"', '\'']);
    let mut at = opener.end();
    if !said.starts_with("--") {
        let next = bytes.get(at).copied();
        match (said.ends_with('='), next) {
            // A comparison, a path or an arrow.
            (true, Some(b'=' | b'>' | b'~')) | (false, Some(b':')) => return None,
            (false, Some(b'=')) => at += 1,
            _ => {}
        }
        let is_line = is_escaped || is_line_start(text, name_start);
        if said.ends_with(':') && !quoted_name {
            let header = is_header(name, &text[name_start..opener.start()]);
            if header && (is_line || said.starts_with(|first: char| first.is_ascii_uppercase()) || is_quote(before)) {
                at += count(&bytes[at..], |byte| matches!(byte, b' ' | b'\t'));
                return Some((at, ValueKind::Line { quote: before.filter(|byte| is_quote(Some(*byte))) }));
            }
            let is_listed = matches!(before, Some(b'{' | b'(' | b',' | b';' | b'"' | b'\''));
            if is_weak(name) && !is_line && !is_listed {
                return None;
            }
        }
        if !quoted_name && is_about(name) {
            return None;
        }
    }
    let is_space = |byte: u8| matches!(byte, b' ' | b'\t') || quoted_name && matches!(byte, b'\n' | b'\r');
    at += count(&bytes[at..], is_space);
    let backslashes = count(&bytes[at..], |byte| byte == b'\\').min(64);
    match bytes.get(at + backslashes).copied() {
        Some(quote @ (b'"' | b'\'')) => Some((at, ValueKind::Quoted { backslashes, quote })),
        // The text ends with the backslashes before a quote.
        None if backslashes > 0 => Some((at, ValueKind::Quoted { backslashes, quote: b'"' })),
        Some(b'{' | b'[') if quoted_name => Some((at, ValueKind::Brackets)),
        Some(b'-') if said.starts_with("--") => None,
        _ if matches!(before, Some(b'?' | b'&')) => Some((at, ValueKind::Parameter)),
        _ => Some((at, ValueKind::Word)),
    }
}

/// Returns the end of a value, or `None` if the text ends first.
fn end_of(text: &str, start: usize, kind: ValueKind) -> Option<usize> {
    let bytes = text.as_bytes();
    let until = |is_end: &dyn Fn(u8) -> bool| bytes[start..].iter().position(|byte| is_end(*byte)).map(|at| start + at);
    match kind {
        ValueKind::Quoted { backslashes, quote } => {
            let mut run = 0;
            let opened = start + backslashes + 1;
            for (at, byte) in bytes.iter().enumerate().skip(opened) {
                // A quote inside the value has more backslashes than the opening quote. One with fewer ends the text
                // that contains the value.
                if *byte == quote && (run < backslashes || run % (2 * (backslashes + 1)) == backslashes) {
                    return Some(at + 1);
                }
                run = if *byte == b'\\' { run + 1 } else { 0 };
            }
            None
        }
        ValueKind::Brackets => brackets(&text[start..]).ok().map(|length| start + length),
        ValueKind::Word => {
            // A quote followed by a letter or the like is a part of the word; any other quote ends it.
            let ends = |at: usize| match bytes[at] {
                b'"' | b'\'' | b'`' => bytes.get(at + 1).is_none_or(|next| !is_name(*next) && *next != b'%'),
                byte => byte.is_ascii_whitespace(),
            };
            (start..bytes.len()).find(|at| ends(*at)).filter(|at| at + 1 < bytes.len() || !is_quote(Some(bytes[*at])))
        }
        ValueKind::Parameter => {
            until(&|byte| byte.is_ascii_whitespace() || matches!(byte, b'"' | b'\'' | b'`' | b'&' | b'#' | b'<' | b'>'))
        }
        ValueKind::Line { quote } => until(&|byte| matches!(byte, b'\n' | b'\r') || Some(byte) == quote),
        ValueKind::Pem => PEM_END.find_at(text, start).map(|end| end.end()),
    }
}

/// Returns the length of the rest of a private key whose beginning was cut off, or 0 if the text begins in no key.
pub(crate) fn end_of_cut_key(text: &str) -> usize {
    let end = PEM_END.find(text).filter(|end| !text[..end.start()].contains("-----BEGIN "));
    end.map_or(0, |end| end.end())
}

/// Returns the part of a value to hide: without its quotes, and without the signs that end a sentence or a list.
fn inside(text: &str, place: Range<usize>, kind: ValueKind) -> Range<usize> {
    let value = &text[place.clone()];
    match kind {
        ValueKind::Quoted { backslashes, quote } => {
            let start = (place.start + backslashes + 1).min(place.end);
            let closed = value.len() > backslashes + 1 && value.ends_with(char::from(quote));
            let end = if closed { place.end - 1 } else { place.end };
            let written = count_back(&text.as_bytes()[start..end], |byte| byte == b'\\').min(backslashes);
            start..if closed { end - written } else { end }
        }
        ValueKind::Word => {
            place.start..place.start + value.trim_end_matches([',', ';', ')', ']', '}', '"', '\'', '`']).len()
        }
        ValueKind::Line { .. } => place.start..place.start + value.trim_end().len(),
        ValueKind::Brackets | ValueKind::Parameter | ValueKind::Pem => place,
    }
}

/// Returns the length of the object or list at the start of the text; if it does not end, its open brackets and quote.
pub(super) fn brackets(text: &str) -> Result<usize, String> {
    let (mut open, mut in_text, mut escaped) = (String::new(), false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'{' | b'[' => open.push(char::from(byte)),
            b'}' | b']' => {
                open.pop();
                if open.is_empty() {
                    return Ok(at + 1);
                }
            }
            _ => {}
        }
    }
    open.extend(in_text.then_some('"'));
    open.extend(escaped.then_some('\\'));
    Err(open)
}

/// Returns true for the name of a header whose value is secret up to the end of the line.
fn is_header(name: &str, before: &str) -> bool {
    let name = format!("{before}{name}").to_ascii_lowercase();
    let names = ["authorization", "proxy-authorization", "cookie", "set-cookie"];
    names.contains(&name.as_str()) || name.starts_with("x-") && (name.ends_with("-key") || name.ends_with("-token"))
}

fn is_weak(name: &str) -> bool {
    let name = name.trim_start_matches('_').to_ascii_lowercase();
    let words = ["credential", "authorization", "cookie", "bearer"];
    matches!(name.as_str(), "auth" | "pwd" | "pin" | "token") || words.iter().any(|word| name.starts_with(word))
}

/// Returns true if a name describes something about a secret, and not the secret itself.
fn is_about(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let words = [
        "file", "path", "prompt", "length", "len", "policy", "stdin", "url", "uri", "name", "type", "count", "field",
        "hint", "manager", "store", "less", "ary", "ttl", "expiry", "required", "enabled", "dir",
    ];
    words.iter().any(|word| name.ends_with(word))
}

/// Returns true after the start of a line with only indentation, a list's dash or a quotation mark such as `>`.
fn is_line_start(text: &str, at: usize) -> bool {
    // Deeper indentation does not count as the start of a line.
    let from = text.floor_char_boundary(at.saturating_sub(64));
    let line = text[from..at].rfind(['\n', '\r']).map_or(from, |end| from + end + 1);
    let before = text[line..at].trim_start_matches([' ', '\t', '-', '>', '<', '*', '+', '|', '#']);
    before.is_empty() || before == "export "
}

fn is_quote(byte: Option<u8>) -> bool {
    matches!(byte, Some(b'"' | b'\'' | b'`'))
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

fn count(bytes: &[u8], is_part: impl Fn(u8) -> bool) -> usize {
    bytes.iter().take_while(|byte| is_part(**byte)).count()
}

fn count_back(bytes: &[u8], is_part: impl Fn(u8) -> bool) -> usize {
    bytes.iter().rev().take_while(|byte| is_part(**byte)).count()
}

#[cfg(test)]
mod tests {
    use crate::redact::text;

    #[test]
    fn tokens_are_recognized_by_their_shape() {
        let letters = "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv1Wx2Yz3";
        for begin in [
            "ghp_",
            "gho_",
            "github_pat_",
            "glpat-",
            "sk-",
            "sk-ant-api03-",
            "sk_live_",
            "rk_test_",
            "hf_",
            "npm_",
            "AIza",
            "ya29.",
            "GOCSPX-",
            "xoxb-",
            "pypi-",
            "whsec_",
            "dop_v1_",
            "gsk_",
            "hvs.",
            "ATATT",
            "12345678:AA",
            "eyJhbGciOiJI.",
        ] {
            assert_eq!(text(&format!("got {begin}{letters}, so")), "got [redacted], so", "{begin}");
        }
        assert_eq!(
            text("id AKIAIOSFODNN7EXAMPLE, not AKIAIOSFODNN7EXAMPLEX"),
            "id [redacted], not AKIAIOSFODNN7EXAMPLEX"
        );
        assert_eq!(text("Basic dXNlcjpodW50ZXIyMg== it"), "Basic [redacted] it");
    }

    #[test]
    fn secrets_are_recognized_by_the_name_before_them() {
        for (given, shown) in [
            ("password=hunter2", "password=[redacted]"),
            ("DB_PASSWORD_PROD=hunter2 make", "DB_PASSWORD_PROD=[redacted] make"),
            ("export TOKEN='two words'; ls", "export TOKEN='[redacted]'; ls"),
            ("GITHUB_TOKEN=\"a\\\"b\" x", "GITHUB_TOKEN=\"[redacted]\" x"),
            ("mysql --password hunter2 -u ada", "mysql --password [redacted] -u ada"),
            ("tool --api-key=hunter2 --x", "tool --api-key=[redacted] --x"),
            ("login failed for ada, password: hunter2", "login failed for ada, password: [redacted]"),
            ("user: ada\n  token: hunter2\n", "user: ada\n  token: [redacted]\n"),
            (
                "https://h/?page=1&access_token=ab,c&sig=d%2F#top",
                "https://h/?page=1&access_token=[redacted]&sig=[redacted]#top",
            ),
            ("https://ada:hunter2@h/x", "https://[redacted]@h/x"),
            ("https://0123456789abcdef@h/x", "https://[redacted]@h/x"),
            ("GET /\nAuthorization: Digest a=\"b\", c\nHost: h", "GET /\nAuthorization: [redacted]\nHost: h"),
            ("> x-api-key: a b c\r\n>", "> x-api-key: [redacted]\r\n>"),
            ("curl -H 'Cookie: a=b; c=d' https://h", "curl -H 'Cookie: [redacted]' https://h"),
            ("curl -H \"X-Vault-Token: s.abc\" h", "curl -H \"X-Vault-Token: [redacted]\" h"),
            ("{'api_key': 'a', 'b': 1}", "{'api_key': '[redacted]', 'b': 1}"),
            (
                "log {\"credentials\": {\"a\": [\"}\"]}, \"b\": 1} end",
                "log {\"credentials\": [redacted], \"b\": 1} end",
            ),
            (
                "say \"{\\\"pin\\\": \\\"12\\\\\\\"34\\\", \\\"b\\\": 1}\"",
                "say \"{\\\"pin\\\": \\\"[redacted]\\\", \\\"b\\\": 1}\"",
            ),
            ("password=ab'cd\"ef gh", "password=[redacted] gh"),
            ("{\"log\": \"a\\ntoken=bc\", \"b\": 1} x", "{\"log\": \"a\\ntoken=[redacted]\", \"b\": 1} x"),
            ("log \"a\\nghp_0123456789abcdefghijkl\\n\"", "log \"a\\n[redacted]\\n\""),
            ("log \"GET /\\r\\nX-Vault-Token: bc de\\r\\n\"", "log \"GET /\\r\\nX-Vault-Token: [redacted]"),
            ("token=${A:-password=bc}", "token=${A:-password=[redacted]}"),
            ("password := \"x\"", "password := \"[redacted]\""),
            ("a\n-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nb", "a\n[redacted]\nb"),
            ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl", "[redacted]"),
        ] {
            assert_eq!(text(given), shown);
            assert_eq!(text(shown), shown, "a clean text is not changed");
        }
    }

    #[test]
    fn ordinary_texts_are_not_redacted() {
        for given in [
            "max_tokens=5",
            "\"max_tokens\": 5",
            "src/tokenizer.rs:12:5: unexpected token: `}`",
            "the token is a word: token",
            "git commit -m \"fix password prompt\"",
            "src/secret.rs:12:5: error",
            "error: invalid token: expected `;`",
            "let password: String = Password::new();",
            "fn login(password: &str, token: Option<String>)",
            "if password == other { }",
            "secret => 1",
            "Enter password: \nWelcome",
            "password=$DB_PASSWORD",
            "token = get_token()",
            "docker login --password-stdin registry",
            "password_file=/run/x",
            "https://example.org:8080/a@b",
            "ssh://git@host/x",
            "git@github.com:a/b.git",
            "basic internationalization of everything",
            "sk-estimator-checks-for-all",
            "password: None,",
            "-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----",
            "tokens: 12, pinned: 3",
            "authorize the author: ada",
            "https://example.org/?page=2&sort=key",
            "npm-run-all-versions-of-2024",
            "missing cookie: log in first",
        ] {
            assert_eq!(text(given), given);
        }
    }
}

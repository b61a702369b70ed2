//! Tool names: the characters that models' APIs accept, so that no name can look like another.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A tool's name as models' APIs accept it: 1 to 64 of `A-Z a-z 0-9 _ -`; `server__tool` if qualified.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ToolName(Arc<str>);

/// The reason why a text is not a valid tool name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error("a tool's name cannot be empty")]
    Empty,
    /// The text has more than 64 characters.
    #[error("a tool's name has at most 64 characters, this one has {0}")]
    TooLong(usize),
    /// The text has a character outside the set.
    #[error("a tool's name has only letters A-Z a-z, digits, `_` and `-`, not {character:?} at position {position}")]
    Character {
        /// The first character that is not allowed.
        character: char,
        /// Its position, counted from 1 in characters.
        position: usize,
    },
}

impl ToolName {
    /// The separator between a server and its tool in a qualified name.
    pub const SEPARATOR: &str = "__";

    /// Checks the text. The naming rule is written only here.
    pub fn new(text: &str) -> Result<Self, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if let Some((index, character)) = text.chars().enumerate().find(|(_, c)| !allowed(*c)) {
            return Err(NameError::Character { character, position: index + 1 });
        }
        if text.len() > 64 {
            return Err(NameError::TooLong(text.len()));
        }
        Ok(Self(text.into()))
    }

    /// Builds `server__tool`, checked like any other name.
    pub fn qualified(server: &str, tool: &str) -> Result<Self, NameError> {
        Self::new(&format!("{server}{}{tool}", Self::SEPARATOR))
    }

    /// Returns the part after `server__` of a qualified name.
    pub fn short(&self) -> Option<&str> {
        self.0.split_once(Self::SEPARATOR).map(|(_, tool)| tool).filter(|tool| !tool.is_empty())
    }

    /// Returns the name as shared text.
    pub(crate) fn shared(&self) -> Arc<str> {
        Arc::clone(&self.0)
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ToolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}

impl Borrow<str> for ToolName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for ToolName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Self::new(&text).map_err(serde::de::Error::custom)
    }
}

/// Maximum length of a name that is compared with others.
const NAME_CHARS_MAX: usize = 64;
/// Maximum number of names that are compared.
const NEAR_NAMES_MAX: usize = 1000;

/// Returns up to three of `known` that the author of `wanted` may have meant, best first.
pub fn near_misses<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let fold = |text: &str| text.to_lowercase().replace(['-', '_'], "");
    // Longer texts are never names. Only the first `NEAR_NAMES_MAX` names are compared: more would cost more time than
    // a guess is worth.
    let folded = fold(&wanted.chars().take(NAME_CHARS_MAX).collect::<String>());
    let mut scored: Vec<(f64, &str)> = known
        .into_iter()
        .filter(|name| name.len() <= 4 * NAME_CHARS_MAX)
        .take(NEAR_NAMES_MAX)
        .map(|name| {
            let other = fold(name);
            let contained =
                folded.len() >= 4 && (other.contains(&folded) || (other.len() >= 4 && folded.contains(&other)));
            let score =
                strsim::jaro_winkler(&folded, &other).max(strsim::normalized_damerau_levenshtein(&folded, &other));
            (if contained { score.max(0.85) } else { score }, name)
        })
        .filter(|(score, _)| *score >= 0.78)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    scored.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Returns "did you mean `a` or `b`?", or nothing without names.
pub fn did_you_mean(names: &[&str]) -> Option<String> {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.as_slice() {
        [] => None,
        [one] => Some(format!("did you mean {one}?")),
        [many @ .., last] => Some(format!("did you mean {} or {last}?", many.join(", "))),
    }
}

/// Returns a hint for a message about an unknown key. It reads "unknown field `x`, expected one of `a`, `b`" as
/// the TOML and JSON readers write it.
pub fn hint_for_unknown_key(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("unknown field `").or_else(|| message.split_once("unknown variant `"))?;
    let (unknown, rest) = rest.split_once("`, expected ")?;
    let known = rest.split('`').skip(1).step_by(2);
    did_you_mean(&near_misses(unknown, known))
}

/// Rewrites a message of the TOML and JSON readers in the words of people who write such files.
pub fn in_plain_words(message: &str) -> String {
    if let Some((value, known)) =
        message.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", expected "))
    {
        return match known.strip_prefix("one of ") {
            Some(known) => format!("{value} is not one of {known}"),
            None => format!("{value} is not {known}"),
        };
    }
    if let Some((found, wanted)) =
        message.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected "))
    {
        let wanted = match wanted {
            "a sequence" => "a list",
            "a map" => "a table",
            "a string" => "a text",
            "a boolean" => "`true` or `false`",
            "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => "a whole number",
            "a nonzero u32" => "a whole number above 0",
            wanted => wanted,
        };
        let (kind, value) = found.split_once(' ').unwrap_or((found, ""));
        let kind = match kind {
            "integer" | "floating" => "the number",
            "boolean" => "",
            "string" => "the text",
            "sequence" => "a list",
            "map" => "a table",
            kind => kind,
        };
        let value = value.trim_start_matches("point ");
        let value = value
            .strip_prefix('"')
            .and_then(|text| text.strip_suffix('"'))
            .map_or(value.to_owned(), |text| format!("`{text}`"));
        return format!("must be {wanted}, not {}", format!("{kind} {value}").trim());
    }
    if let Some(field) = message.strip_prefix("missing field ") {
        return format!("{field} is missing");
    }
    message.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_look_like_others_are_refused() {
        for (text, error) in [
            ("", NameError::Empty),
            ("Réad", NameError::Character { character: 'é', position: 2 }),
            ("Rеad", NameError::Character { character: 'е', position: 2 }), // Cyrillic
            ("Read\u{200b}", NameError::Character { character: '\u{200b}', position: 5 }),
            ("a b", NameError::Character { character: ' ', position: 2 }),
            ("a\nb", NameError::Character { character: '\n', position: 2 }),
            ("../x", NameError::Character { character: '.', position: 1 }),
        ] {
            assert_eq!(ToolName::new(text), Err(error), "{text:?}");
        }
        assert_eq!(ToolName::new(&"a".repeat(65)), Err(NameError::TooLong(65)));
        assert_eq!(ToolName::new(&"a".repeat(64)).expect("64 is allowed").as_str().len(), 64);
    }

    #[test]
    fn parser_messages_are_put_into_plain_words() {
        for (message, plain) in [
            ("unknown variant `lou`, expected one of `off`, `warn`", "`lou` is not one of `off`, `warn`"),
            ("unknown variant `xml`, expected `text` or `json`", "`xml` is not `text` or `json`"),
            ("invalid type: integer `5`, expected a sequence", "must be a list, not the number `5`"),
            ("invalid type: floating point `5.5`, expected a string", "must be a text, not the number `5.5`"),
            ("invalid type: boolean `true`, expected a level", "must be a level, not `true`"),
            ("invalid type: string \"a\", expected a map", "must be a table, not the text `a`"),
            ("invalid type: sequence, expected a string", "must be a text, not a list"),
            ("missing field `name`", "`name` is missing"),
            ("anything else", "anything else"),
        ] {
            assert_eq!(in_plain_words(message), plain);
        }
    }

    #[test]
    fn a_qualified_name_knows_its_short_form() {
        let name = ToolName::qualified("git", "status").expect("both parts are plain");
        assert_eq!((name.as_str(), name.short()), ("git__status", Some("status")));
        assert_eq!(ToolName::new("Read").expect("plain").short(), None);
        assert_eq!(ToolName::new("git__").expect("allowed").short(), None);
    }

    #[test]
    fn near_misses_come_best_first() {
        let known = ["Read", "Write", "Search", "ReadFile", "Bash"];
        assert_eq!(near_misses("Raed", known), ["Read"]);
        assert_eq!(near_misses("serach", known), ["Search"]);
        assert_eq!(near_misses("read", known), ["Read", "ReadFile"]);
        assert_eq!(near_misses("quux", known), Vec::<&str>::new());
        let (long, many) = ("Read".repeat(100_000), vec!["Read"; 100_000]);
        assert_eq!(near_misses("Reed", [long.as_str(), "Read"]), ["Read"]);
        assert_eq!(near_misses("Reed", many), ["Read"; 3]);
        assert_eq!(
            hint_for_unknown_key("unknown field `tiemout`, expected one of `name`, `timeout` at line 1").as_deref(),
            Some("did you mean `timeout`?")
        );
        assert_eq!(did_you_mean(&["a", "b", "c"]).as_deref(), Some("did you mean `a`, `b` or `c`?"));
    }
}

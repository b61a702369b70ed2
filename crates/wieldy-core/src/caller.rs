//! The names of a caller: checked by the engine before a call is recorded, whichever door it came through.

use std::sync::Arc;

use crate::call::Caller;
use crate::error::{CallError, Code};

/// Maximum length of an agent, a tenant, a session and a user, in characters.
const NAME_CHARACTERS_MAX: usize = 256;

impl Caller {
    /// Checks the names: agent, tenant, session and user have 1 to 256 characters, and none that controls a terminal or
    /// the direction of text.
    pub fn check(&self) -> Result<(), CallError> {
        let mistake = self.names().find_map(|(which, name)| Some((which, mistake(name)?)));
        let Some((which, mistake)) = mistake else { return Ok(()) };
        let advice = "agent, tenant, session and user have 1 to 256 characters, none of them a control character or one \
                      that changes the direction of text";
        Err(CallError::new(Code::ValidationFailed, format!("the {which} of the caller {mistake}")).suggest(advice))
    }

    /// Returns the caller as it is recorded if its names are wrong: escaped and cut.
    pub(crate) fn escaped(&self) -> Arc<Self> {
        let escaped = |name: &Option<String>| name.as_deref().map(escaped);
        Arc::new(Self {
            agent: self::escaped(&self.agent),
            tenant: escaped(&self.tenant),
            session: escaped(&self.session),
            user: escaped(&self.user),
            ..self.clone()
        })
    }

    fn names(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let Self { agent, tenant, session, user, .. } = self;
        let optional = [("tenant", tenant), ("session", session), ("user", user)];
        let optional = optional.into_iter().filter_map(|(which, name)| Some((which, name.as_deref()?)));
        std::iter::once(("agent", agent.as_str())).chain(optional)
    }
}

/// Returns the reason why a name cannot be used, if there is one.
fn mistake(name: &str) -> Option<String> {
    // The usual case costs one look at the bytes.
    if (1..=NAME_CHARACTERS_MAX).contains(&name.len()) && name.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return None;
    }
    let characters = name.chars().count();
    if !(1..=NAME_CHARACTERS_MAX).contains(&characters) {
        return Some(match characters {
            0 => "is empty".to_owned(),
            _ => format!("has {characters} characters, more than {NAME_CHARACTERS_MAX}"),
        });
    }
    let found = name.chars().enumerate().find(|(_, c)| is_refused(*c));
    found.map(|(index, c)| format!("has the character {} at position {}", c.escape_unicode(), index + 1))
}

/// Returns true for control characters and those that change the direction of text.
fn is_refused(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns a name with its refused characters escaped, cut at the maximal length. A name that is right stays as it is.
fn escaped(name: &str) -> String {
    if mistake(name).is_none() {
        return name.to_owned();
    }
    let escaped = name.chars().take(NAME_CHARACTERS_MAX + 1).map(|c| match is_refused(c) {
        true => c.escape_unicode().to_string(),
        false => c.to_string(),
    });
    let escaped: String = escaped.collect();
    match escaped.char_indices().nth(NAME_CHARACTERS_MAX) {
        None => escaped,
        // The sign at the end keeps the record apart from those of the name that is the beginning of this one.
        Some(_) => escaped.chars().take(NAME_CHARACTERS_MAX - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_up_to_256_characters_that_are_visible_and_in_order() {
        for name in ["a", " ", "did:agent:ada", "Zoë 👩‍🚀", &"ä".repeat(256), &"x".repeat(256)] {
            assert_eq!((mistake(name), escaped(name)), (None, name.to_owned()));
        }
        for (name, reason, recorded) in [
            ("", "is empty", ""),
            ("a\nb", "has the character \\u{a} at position 2", "a\\u{a}b"),
            ("\u{202e}x", "has the character \\u{202e} at position 1", "\\u{202e}x"),
            ("x\u{2069}", "has the character \\u{2069} at position 2", "x\\u{2069}"),
        ] {
            assert_eq!((mistake(name).as_deref(), escaped(name).as_str()), (Some(reason), recorded), "{name:?}");
        }
        let long = "ä".repeat(257);
        assert_eq!(mistake(&long).as_deref(), Some("has 257 characters, more than 256"));
        assert_eq!(escaped(&long), "ä".repeat(255) + "…");
        assert_eq!(escaped(&"\0".repeat(100)).chars().count(), 256);
    }

    #[test]
    fn every_name_of_a_caller_is_checked() {
        let bad = || Some("\r".to_owned());
        let callers = [
            Caller::agent("\r"),
            Caller { tenant: bad(), ..Caller::local() },
            Caller { session: bad(), ..Caller::local() },
            Caller { user: bad(), ..Caller::local() },
        ];
        for (caller, which) in callers.iter().zip(["agent", "tenant", "session", "user"]) {
            let message = format!("the {which} of the caller has the character \\u{{d}} at position 1");
            assert_eq!(caller.check().unwrap_err().message, message);
            assert_eq!(caller.escaped().check().map_err(|error| error.message), Ok(()));
        }
        assert!(Caller::local().check().is_ok());
    }
}

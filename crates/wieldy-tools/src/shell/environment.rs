//! The environment of programs: an allow-list, because an executor's own environment is full of secrets.

use std::collections::BTreeMap;

/// Variables that programs need to find other programs, to choose a language and to place files.
const ALLOWED: [&str; 7] = ["HOME", "LANG", "PATH", "TERM", "TMPDIR", "TZ", "USER"];

/// Returns the part of an environment that programs may have.
///
/// Libraries do not read the environment themselves; the embedding program passes it in:
///
/// ```
/// # use wieldy_tools::shell::allowed;
/// let environment = allowed(std::env::vars());
/// assert!(!environment.contains_key("CARGO_MANIFEST_DIR"));
/// ```
pub fn allowed(environment: impl Iterator<Item = (String, String)>) -> BTreeMap<String, String> {
    environment.filter(|(name, _)| ALLOWED.contains(&name.as_str()) || name.starts_with("LC_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_variables_are_passed_on() {
        let all = ["PATH", "LC_ALL", "LANG", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD", "BASH_ENV", "PATHS", "path"];
        let kept = allowed(all.iter().map(|name| (name.to_string(), "x".to_owned())));
        assert_eq!(kept.into_keys().collect::<Vec<_>>(), ["LANG", "LC_ALL", "PATH"]);
    }
}

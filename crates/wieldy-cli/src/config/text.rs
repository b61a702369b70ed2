//! Texts that may be secrets. Parts of them may come from the environment, or all of it from a file, so that the
//! configuration itself need not contain them.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use serde::{Deserialize, Serialize};
use wieldy::Variable;

use super::Environment;
use super::sandbox::at_home;

/// The maximal size of a file with a text, in bytes.
const BYTES_MAX: u64 = 1024 * 1024;

/// A text with `${NAME}` for environment variables, or the file that contains it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Text {
    Written(String),
    In(PathBuf),
}

/// A text as people write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a text, or a table with the key `file`")]
pub(crate) enum FileText {
    Written(String),
    In(InFile),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InFile {
    pub(crate) file: PathBuf,
}

impl FileText {
    /// Makes a relative path start at this folder.
    pub(super) fn begin_at(&mut self, folder: &Path) {
        if let Self::In(InFile { file }) = self
            && !file.starts_with("~")
        {
            *file = folder.join(&*file);
        }
    }

    pub(super) fn resolve(self, home: Option<&Path>) -> Result<Text, String> {
        match self {
            Self::Written(text) => Ok(Text::Written(text)),
            Self::In(InFile { file }) => at_home(&file, home).map(Text::In),
        }
    }
}

impl Text {
    /// Converts the value of a variable in a manifest. A relative path starts at the manifest's folder.
    pub(crate) fn of_manifest(variable: &Variable, manifest: &Path, home: Option<&Path>) -> Result<Self, String> {
        let mut text = match variable {
            Variable::Text(text) => FileText::Written(text.clone()),
            Variable::InFile(in_file) => FileText::In(InFile { file: in_file.file.clone() }),
        };
        text.begin_at(manifest.parent().unwrap_or(Path::new("")));
        text.resolve(home)
    }

    /// Returns the value without a line end. The value from a file is a secret, and redacted from now on.
    pub(crate) fn value(&self, environment: &Environment) -> anyhow::Result<String> {
        match self {
            Self::Written(text) => filled(text, environment),
            Self::In(path) => {
                let read = bounded(path).with_context(|| format!("`{}` cannot be read", path.display()))?;
                let value = read.trim_end_matches(['\r', '\n']);
                wieldy::redact::hide(value);
                Ok(value.to_owned())
            }
        }
    }

    /// Returns the text if it is written in the configuration itself.
    pub(super) fn written(&self) -> Option<&str> {
        match self {
            Self::Written(text) => Some(text),
            Self::In(_) => None,
        }
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Written(_) => f.write_str("Written(***)"),
            Self::In(path) => write!(f, "In({})", path.display()),
        }
    }
}

/// Replaces each `${NAME}` in a text by that variable. The value of a variable is a secret, and redacted from now on,
/// unless it names an existing file.
pub(crate) fn filled(text: &str, environment: &Environment) -> anyhow::Result<String> {
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        let Some((name, after)) = after.split_once('}') else { break };
        filled.push_str(before);
        let value = environment.0.get(name).ok_or_else(|| anyhow!("the variable `{name}` is not set"))?;
        if !names_files(value) {
            wieldy::redact::hide(value);
        }
        filled.push_str(value);
        rest = after;
    }
    Ok(filled + rest)
}

/// Returns true if the value is the absolute path of an existing file, or a list with one.
pub(crate) fn names_files(value: &str) -> bool {
    value.split(':').map(Path::new).any(|part| part.is_absolute() && part.exists())
}

/// Reads the text of an untrusted file, with a limit.
pub(crate) fn bounded(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(BYTES_MAX + 1).read_to_string(&mut text)?;
    ensure!(text.len() as u64 <= BYTES_MAX, "it is larger than {BYTES_MAX} bytes");
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in_and_a_missing_one_is_reported() {
        let environment = Environment([("TOKEN".to_owned(), "abc".to_owned())].into());
        let value = |text: &str| filled(text, &environment).map_err(|error| error.to_string());
        assert_eq!(value("Bearer ${TOKEN}, ${TOKEN}"), Ok("Bearer abc, abc".into()));
        assert_eq!(value("a $b ${c"), Ok("a $b ${c".into()));
        assert_eq!(value("${NONE}"), Err("the variable `NONE` is not set".into()));
    }

    #[test]
    fn values_of_variables_are_redacted_except_paths() {
        let variables = [("PLACE", "/usr/bin:/nowhere/at/all"), ("WORD", "correct-horse-staple")];
        let environment = Environment(variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        let value = filled("${PLACE} ${WORD} written-here", &environment).unwrap();
        assert_eq!(value, "/usr/bin:/nowhere/at/all correct-horse-staple written-here");
        assert_eq!(wieldy::redact::text(&value), "/usr/bin:/nowhere/at/all [redacted] written-here");
    }
}

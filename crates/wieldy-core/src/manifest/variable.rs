//! Environment variables of a command tool: values, references to variables, and files.

use std::path::PathBuf;

use serde::Deserialize;

/// The value of a variable, as a manifest writes it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a text, or a table with the key `file`")]
pub enum Variable {
    /// A text, in which `${NAME}` stands for a variable of the executor's environment.
    Text(String),
    /// The file that holds the value.
    InFile(VariableFile),
}

impl Variable {
    /// Returns the value, if it needs neither a file nor another variable.
    pub fn literal(&self) -> Option<&str> {
        match self {
            Self::Text(text) if text.split("${").skip(1).all(|after| !after.contains('}')) => Some(text),
            _ => None,
        }
    }

    /// Returns true if the value is the context of each call, as JSON: the text is `{context}`.
    pub fn is_context(&self) -> bool {
        self.literal() == Some("{context}")
    }
}

/// A file that holds the value of a variable.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VariableFile {
    /// Its path, from the folder of the manifest.
    pub file: PathBuf,
}

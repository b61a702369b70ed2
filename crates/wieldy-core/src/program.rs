//! The program that a call would start: shown to the person who confirms the call, and checked again before it starts.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::confinement::Confinement;
use crate::confirm::NoConsent;
use crate::error::CallError;
use crate::tool::SharedTool;

/// The program that a call would start, as its tool describes it beforehand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The command line, for people.
    pub command_line: String,
    /// The folder that it starts in.
    pub folder: PathBuf,
    /// The files of the workspace that the command line names.
    pub files: Vec<NamedFile>,
    /// The number of names in the command line whose files are not hashed, because they are too many or too large.
    pub unchecked: usize,
}

/// A file that a command line names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// The path from the workspace; `name -> path` if a symbolic link leads to the file.
    pub path: String,
    /// The hash of its content.
    pub hash: blake3::Hash,
}

impl Program {
    /// Returns everything that the person agrees to, for the digest.
    pub(crate) fn facts(&self) -> Value {
        let files: Vec<Value> = self.files.iter().map(|file| json!([file.path, file.hash.to_hex().as_str()])).collect();
        json!([self.command_line, self.folder.to_string_lossy(), files, self.unchecked])
    }

    /// Returns the differences from `now` in words, if there are any.
    fn difference(&self, now: &Self) -> Option<String> {
        let differs = |one: &Self, other: &Self| -> Vec<String> {
            one.files.iter().filter(|file| !other.files.contains(file)).map(|file| format!("`{}`", file.path)).collect()
        };
        let mut files = [differs(self, now), differs(now, self)].concat();
        files.sort_unstable();
        files.dedup();
        match files.as_slice() {
            [] if self == now => None,
            [] => Some("the command line".into()),
            files => Some(files.join(", ")),
        }
    }
}

/// The program that a person agreed to, and the call that starts it.
pub(crate) struct AgreedProgram {
    pub(crate) tool: SharedTool,
    pub(crate) arguments: Arc<Value>,
    pub(crate) confinement: Arc<Confinement>,
    pub(crate) program: Program,
}

impl AgreedProgram {
    /// Fails if the program is no longer the one that the person agreed to.
    pub(crate) async fn check(&self) -> Result<(), CallError> {
        let now = self.tool.program(&self.arguments, &self.confinement).await.map_err(|error| *error.error)?;
        let difference = match &now {
            Some(now) => self.program.difference(now),
            None => Some("the command line".into()),
        };
        difference.map_or(Ok(()), |what| Err(NoConsent::Changed(what).into()))
    }
}

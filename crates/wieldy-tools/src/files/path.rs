//! Paths as callers write them: [`GivenPath`], checked as text, not yet looked up.
//!
//! This module does not confine paths to the workspace: the handle from which every lookup starts does that.

use std::fmt;
use std::path::{Path, PathBuf};

/// The longest path that Linux looks up.
const PATH_BYTES_MAX: usize = 4095;
/// The longest file name on the usual filesystems.
const NAME_BYTES_MAX: usize = 255;

/// A path below the workspace's root, as a caller wrote it. It may not exist, or lead outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GivenPath {
    relative: PathBuf,
    /// True if it was written like `folder/`, which cannot be a file.
    names_folder: bool,
}

/// The reason why a text is not a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PathError {
    #[error("the path is empty")]
    Empty,
    #[error("the path holds the character {character:?} at position {position}")]
    Character { character: char, position: usize },
    #[error("the path has {bytes} bytes, more than the {PATH_BYTES_MAX} that can be looked up")]
    TooLong { bytes: usize },
    #[error("the path holds a name of {bytes} bytes, more than the {NAME_BYTES_MAX} that a name can have")]
    NameTooLong { bytes: usize },
    #[error("`{path}` is an absolute path outside the workspace")]
    Elsewhere { path: String },
}

impl GivenPath {
    /// Checks the text. An absolute path below one of `roots` becomes relative to that root.
    pub(crate) fn new(text: &str, roots: &[PathBuf]) -> Result<Self, PathError> {
        if text.trim().is_empty() {
            return Err(PathError::Empty);
        }
        // A line break in a name would forge lines in every list and log that shows it.
        if let Some((index, character)) = text.chars().enumerate().find(|(_, character)| character.is_control()) {
            return Err(PathError::Character { character, position: index + 1 });
        }
        if text.len() > PATH_BYTES_MAX {
            return Err(PathError::TooLong { bytes: text.len() });
        }
        if let Some(name) = text.split('/').find(|name| name.len() > NAME_BYTES_MAX) {
            return Err(PathError::NameTooLong { bytes: name.len() });
        }
        let path = Path::new(text);
        let relative = if path.is_absolute() {
            let below = roots.iter().find_map(|root| path.strip_prefix(root).ok());
            below.ok_or_else(|| PathError::Elsewhere { path: text.to_owned() })?
        } else {
            path
        };
        // Collecting the components drops `.`, doubled and trailing slashes; `..` stays and is looked up.
        let mut relative: PathBuf =
            relative.components().filter(|part| !matches!(part, std::path::Component::CurDir)).collect();
        if relative.as_os_str().is_empty() {
            relative.push(".");
        }
        Ok(Self { relative, names_folder: text.ends_with('/') || text.ends_with("/.") || text == "." })
    }

    /// Returns the path below the root; `.` for the root itself.
    pub(crate) fn relative(&self) -> &Path {
        &self.relative
    }

    /// Returns true if the path was written like `folder/`.
    pub(crate) fn names_folder(&self) -> bool {
        self.names_folder
    }
}

impl fmt::Display for GivenPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.relative.display().fmt(f)
    }
}

/// Returns `folder/name`, or just `name` in the root.
pub(crate) fn joined(folder: &Path, name: &Path) -> PathBuf {
    if folder == Path::new(".") { name.to_owned() } else { folder.join(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(text: &str) -> Result<String, PathError> {
        GivenPath::new(text, &["/ws".into()]).map(|path| path.to_string())
    }

    #[test]
    fn a_path_is_shown_without_redundant_parts() {
        for (text, shown) in [
            ("a.txt", "a.txt"),
            ("./a//b/./c/", "a/b/c"),
            ("/ws/a.txt", "a.txt"),
            ("/ws", "."),
            ("/ws/", "."),
            (".", "."),
            ("a/../b", "a/../b"),
            ("späße.txt", "späße.txt"),
        ] {
            assert_eq!(given(text), Ok(shown.into()), "{text:?}");
        }
        assert!(GivenPath::new("a/", &[]).expect("a path").names_folder());
        assert!(!GivenPath::new("a", &[]).expect("a path").names_folder());
    }

    #[test]
    fn a_text_that_is_no_path_is_refused_with_the_reason() {
        for (text, error) in [
            ("", PathError::Empty),
            (" \t", PathError::Empty),
            ("\n", PathError::Empty),
            ("a\0b", PathError::Character { character: '\0', position: 2 }),
            ("a\nb", PathError::Character { character: '\n', position: 2 }),
            ("/ws-secret/a", PathError::Elsewhere { path: "/ws-secret/a".into() }),
            ("//etc/passwd", PathError::Elsewhere { path: "//etc/passwd".into() }),
        ] {
            assert_eq!(given(text), Err(error), "{text:?}");
        }
        assert_eq!(given(&"x".repeat(256)), Err(PathError::NameTooLong { bytes: 256 }));
        assert_eq!(given(&"x/".repeat(2048)), Err(PathError::TooLong { bytes: 4096 }));
        assert!(given(&"x".repeat(255)).is_ok());
    }
}

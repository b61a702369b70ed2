//! [`FileError`]: the failures of the file tools, with the message and the suggestion for the caller.

use std::io;

use rustix::io::Errno;
use wieldy_core::{CallError, CaughtPanic, Code, RunError};

use super::path::PathError;

/// The reason why a file tool failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("`{path}` leads outside the workspace")]
    Outside { path: String },
    #[error("`{path}` leads through too many symbolic links, or through one that only the kernel can follow")]
    Links { path: String },
    #[error("the operating system does not let us {doing} `{path}`")]
    Denied { doing: &'static str, path: String },
    #[error("the operating system does not let us open `{path}`: it belongs to user {owner} with mode {mode:03o}")]
    Closed { path: String, owner: u32, mode: u32 },
    #[error("cannot {doing} `{path}`: it is on a read-only file system")]
    ReadOnly { doing: &'static str, path: String },
    #[error("`{path}` is hidden, as secrets and the executor's own files are")]
    Hidden { path: String },
    #[error("`{path}` is protected, because programs outside the sandbox execute it or read settings from it")]
    Protected { path: String },
    #[error("there is no `{path}`")]
    Missing { path: String, near: Option<String> },
    #[error("there is no folder for `{path}`")]
    NoFolder { path: String },
    #[error("`{path}` is {is}, not {wanted}")]
    Kind { path: String, is: &'static str, wanted: &'static str },
    #[error("`{path}` is a binary file of {bytes} bytes")]
    Binary { path: String, bytes: usize },
    #[error("`{path}` has {bytes} bytes, more than the {bytes_max} that can be taken at once")]
    TooLarge { path: String, bytes: u64, bytes_max: u64 },
    #[error("`{path}` changed since it was last read")]
    Stale { path: String },
    /// A check of the tool's own, with its own message.
    #[error("{message}")]
    Refused { message: String, suggestion: Option<String> },
    #[error("cannot {doing} `{path}`")]
    Io { doing: &'static str, path: String, source: io::Error },
    #[error("the run was stopped before it was done")]
    Stopped,
}

impl FileError {
    /// Interprets an error of the operating system or of the confined lookup.
    pub(crate) fn io(doing: &'static str, path: impl ToString, source: io::Error) -> Self {
        let path = path.to_string();
        // cap-std makes its own error, without a number, for a path that would leave the folder it starts from.
        let Some(number) = source.raw_os_error() else {
            return match source.kind() {
                io::ErrorKind::PermissionDenied => Self::Outside { path },
                _ => Self::Io { doing, path, source },
            };
        };
        match Errno::from_raw_os_error(number) {
            Errno::NOENT => Self::Missing { path, near: None },
            Errno::LOOP => Self::Links { path },
            Errno::XDEV => Self::Outside { path },
            Errno::ACCESS | Errno::PERM => Self::Denied { doing, path },
            Errno::ROFS => Self::ReadOnly { doing, path },
            Errno::NAMETOOLONG => PathError::TooLong { bytes: path.len() }.into(),
            Errno::NOTDIR => Self::Kind { path, is: "below a file", wanted: "below a folder" },
            Errno::ISDIR => Self::Kind { path, is: "a folder", wanted: "a file" },
            Errno::NXIO => Self::Kind { path, is: "a socket or a pipe", wanted: "a file" },
            _ => Self::Io { doing, path, source },
        }
    }

    /// Creates the error of a tool's own check.
    pub(crate) fn refused(message: impl Into<String>, suggestion: impl Into<String>) -> Self {
        Self::Refused { message: message.into(), suggestion: Some(suggestion.into()) }
    }

    fn code(&self) -> Code {
        match self {
            Self::Path(PathError::Elsewhere { .. })
            | Self::Outside { .. }
            | Self::Links { .. }
            | Self::Hidden { .. }
            | Self::Protected { .. }
            | Self::Denied { .. }
            | Self::Closed { .. }
            | Self::ReadOnly { .. } => Code::FilesystemPolicyViolation,
            Self::Missing { .. } | Self::NoFolder { .. } => Code::FileNotFound,
            Self::Path(_)
            | Self::Kind { .. }
            | Self::Binary { .. }
            | Self::TooLarge { .. }
            | Self::Stale { .. }
            | Self::Refused { .. } => Code::InvalidInput,
            Self::Io { .. } | Self::Stopped => Code::ExecutionError,
        }
    }

    fn suggestion(&self) -> Option<String> {
        let text = match self {
            Self::Path(PathError::Elsewhere { .. }) | Self::Outside { .. } | Self::Links { .. } => {
                "give a path relative to the workspace, such as `src/main.rs`; paths outside it cannot be reached"
            }
            Self::Hidden { .. } => "do without it; an operator can show it with `sandbox.shown`",
            Self::Protected { .. } => "ask a person to change it; you can read it",
            Self::Path(_) => "give the path of a file or folder in the workspace, such as `src/main.rs`",
            Self::Missing { near, .. } => {
                near.as_deref().unwrap_or("look for it with `Glob`, such as `**/name*`, or with `List`")
            }
            Self::NoFolder { .. } => "set `create_folders` to make the folders on the way",
            Self::Kind { is: "a folder", .. } => "show what is in a folder with `List`",
            Self::Kind { is: "a file", .. } => "show what is in a file with `Read`",
            Self::Binary { .. } => "only text can be read; name the `encoding` if it is text after all",
            Self::TooLarge { .. } => "find the part you need with `Search`",
            Self::Stale { .. } => "read it again, then repeat the change on the new content",
            Self::Refused { suggestion, .. } => return suggestion.clone(),
            Self::Closed { .. } => {
                let user = rustix::process::geteuid().as_raw();
                return Some(format!("do without it, or ask a person for the right: wieldy runs as user {user}"));
            }
            Self::Denied { doing, path } => {
                let user = rustix::process::geteuid().as_raw();
                let path = path_without_rights(doing, path);
                return Some(format!(
                    "do without it, or ask a person for the right: wieldy runs as user {user}, and `ls -ld '{path}'` \
                     shows owner and mode"
                ));
            }
            Self::ReadOnly { .. } => {
                "write to another folder; a person can mount this one so that it can be written to"
            }
            Self::Kind { .. } | Self::Io { .. } | Self::Stopped => return None,
        };
        Some(text.to_owned())
    }
}

/// Returns the path that lacks the rights. Writing or deleting a file changes its folder, so then it is the folder.
fn path_without_rights<'a>(doing: &str, path: &'a str) -> &'a str {
    let folder = path.trim_end_matches('/').rsplit_once('/').map_or(".", |(folder, _)| folder);
    match doing {
        "write" | "delete" | "open the folder of" if folder.is_empty() => "/",
        "write" | "delete" | "open the folder of" => folder,
        _ => path,
    }
}

/// Marks the error as one from before any change. `Delete`, which can fail halfway, converts its errors itself.
impl From<FileError> for RunError {
    fn from(error: FileError) -> Self {
        let message = match &error {
            FileError::Io { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        };
        let mut call_error = CallError::new(error.code(), message);
        call_error.suggestion = error.suggestion();
        RunError::from(call_error).before_effect()
    }
}

/// Runs blocking work on a blocking thread, and resumes its panic here.
pub(crate) async fn blocking<T: Send + 'static, E: From<FileError> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    match tokio::task::spawn_blocking(|| CaughtPanic::catch(work)).await {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => panic.resume(),
        // The runtime is shutting down and never began the work.
        Err(_) => Err(FileError::Stopped.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_error(number: Errno) -> (String, Option<String>) {
        let error = FileError::io("write", "a.txt", io::Error::from(number));
        (error.to_string(), error.suggestion())
    }

    #[test]
    fn a_read_only_file_system_is_distinguished_from_missing_rights() {
        let (message, suggestion) = write_error(Errno::ROFS);
        assert_eq!(message, "cannot write `a.txt`: it is on a read-only file system");
        let hint = "write to another folder; a person can mount this one so that it can be written to";
        assert_eq!(suggestion.as_deref(), Some(hint));
        let (message, suggestion) = write_error(Errno::ACCESS);
        assert_eq!(message, "the operating system does not let us write `a.txt`");
        let user = rustix::process::geteuid().as_raw();
        let hint = format!(
            "do without it, or ask a person for the right: wieldy runs as user {user}, and `ls -ld '.'` shows owner and mode"
        );
        assert_eq!(suggestion, Some(hint));
    }

    #[test]
    fn the_hint_names_the_path_that_lacks_the_rights() {
        let found = [("write", "new"), ("write", "a/b/new"), ("delete", "/w/old"), ("delete", "/old"), ("read", "a/b")];
        assert_eq!(found.map(|(doing, path)| path_without_rights(doing, path)), [".", "a/b", "/w", "/", "a/b"]);
    }

    #[test]
    fn an_unreadable_file_is_reported_with_owner_and_mode() {
        let error = FileError::Closed { path: "s".into(), owner: 0, mode: 0o600 };
        let message = "the operating system does not let us open `s`: it belongs to user 0 with mode 600";
        assert_eq!(error.to_string(), message);
        let user = rustix::process::geteuid().as_raw();
        let hint = format!("do without it, or ask a person for the right: wieldy runs as user {user}");
        assert_eq!(error.suggestion(), Some(hint));
    }
}

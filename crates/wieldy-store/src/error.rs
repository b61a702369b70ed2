//! Errors of the history.

use std::path::PathBuf;

/// An error while the history is opened, read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A failure that may pass: another process holds the database, or the server is down.
    #[error("{0}")]
    Unavailable(String),
    /// A full disk. Writing works again once there is space.
    #[error("{0}")]
    Full(String),
    /// A file or database that holds no history, or a damaged one.
    #[error("{0}")]
    Damaged(String),
    /// A history written by a newer version of the program.
    #[error("the history has schema version {found}, and this program supports versions up to {known}")]
    Newer {
        /// The schema version that was found.
        found: u32,
        /// The newest schema version that this program knows.
        known: u32,
    },
    /// Another process took this executor for dead and closed its calls.
    #[error(
        "another process considered this executor dead and closed its calls, so this executor cannot write any more"
    )]
    TakenForDead,
    /// An address that names no history.
    #[error("{0}")]
    Address(String),
    /// A key for signing the trail that cannot be used.
    #[error("cannot use the audit key `{}`: {why}", path.display())]
    Key {
        /// The path of the key.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A query that makes no sense.
    #[error("{0}")]
    Query(String),
}

impl StoreError {
    /// Returns true if waiting may help.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Full(_))
    }

    /// Returns advice for the person who runs the program.
    pub fn suggestion(&self) -> &'static str {
        match self {
            Self::Unavailable(_) | Self::Full(_) => {
                "free disk space, or make sure that the database can be reached; wieldy retries automatically"
            }
            Self::Damaged(_) => {
                "move it away and start a new one, or restore a backup (`wieldy history backup` makes one)"
            }
            Self::Newer { .. } => "use the version of wieldy that wrote it, or a newer one",
            Self::TakenForDead => "start the executor again",
            Self::Address(_) => "name a file, or a server as `postgres://user@host/database`",
            Self::Key { .. } => "restore its owner and its mode (0600), or move it away to start with a new key",
            Self::Query(_) => "`wieldy history --help` lists the filters",
        }
    }
}

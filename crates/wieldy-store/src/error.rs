//! Why the history cannot be read or written.

use std::path::PathBuf;

/// Why the history cannot be read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// It may work later: somebody holds the database, the server is away.
    #[error("{0}")]
    Unavailable(String),
    /// The disk is full. It works again once there is room.
    #[error("{0}")]
    Full(String),
    /// What is there is no history, or a damaged one.
    #[error("{0}")]
    Damaged(String),
    /// A newer version of the program wrote it.
    #[error("the history has the form {found}, and this program knows those up to {known}")]
    Newer {
        /// The form that was found.
        found: u32,
        /// The newest form that is known here.
        known: u32,
    },
    /// Another process decided that this one is gone, and closed its calls.
    #[error("another process took this executor for dead and closed its calls, so it writes no more")]
    TakenForDead,
    /// The address names no history.
    #[error("{0}")]
    Address(String),
    /// The key that the trail is signed with cannot be used.
    #[error("cannot use the audit key `{}`: {why}", path.display())]
    Key {
        /// Where it is.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// What was asked for makes no sense.
    #[error("{0}")]
    Query(String),
}

impl StoreError {
    /// Whether waiting may help.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Full(_))
    }

    /// What whoever runs the program can do.
    pub fn suggestion(&self) -> &'static str {
        match self {
            Self::Unavailable(_) | Self::Full(_) => {
                "free the disk, or see that the database can be reached; it is tried again by itself"
            }
            Self::Damaged(_) => {
                "put it aside and start a new one, or bring back a backup (`wieldy history backup` makes one)"
            }
            Self::Newer { .. } => "use the version of wieldy that wrote it, or a newer one",
            Self::TakenForDead => "start the executor again",
            Self::Address(_) => "name a file, or a server as `postgres://user@host/database`",
            Self::Key { .. } => "give it back its owner and mode (0600), or move it away to begin with a new key",
            Self::Query(_) => "`wieldy history --help` says what can be asked",
        }
    }
}

//! Threads: what agents write down for later, in entries that are never changed.
//!
//! [`Threads`] is a database of its own beside the history. In reading order: `chain` hashes and signs entries, `write`
//! appends them, `read` and `search` find them, `verify` checks that nothing was changed, `tools` are the four tools.
//!
//! A thread belongs to a caller's tenant and user, or to a project that the configuration shares. The `project_id` of a
//! call is never a right: a project that is not shared with the caller is a place of the caller's own.

mod chain;
mod read;
mod search;
mod tools;
mod verify;
mod write;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;
use wieldy_core::{Caller, Owners};

use crate::audit::Signer;
use crate::database::{Database, Tables};
use crate::error::StoreError;
use crate::migrations::{Migration, migrations};
#[cfg(feature = "postgres")]
use crate::postgres::Postgres;
use crate::sqlite::Sqlite;
use crate::store::Address;

pub use read::{Entry, EntryPage, Found, ListedThread, Order, Reading, Seeking, ThreadPage, ThreadStatus};
pub use tools::thread_tools;
pub use verify::{ThreadProblem, ThreadVerdict};
pub use write::{NewEntry, Pushed};

const SQLITE: &[Migration] = migrations!("threads-sqlite": "0001_threads");
#[cfg(feature = "postgres")]
const POSTGRES: &[Migration] = migrations!("threads-postgres": "0001_threads");

const THREADS: &Tables = &Tables {
    application_id: 0x776c_6474, // "wldt"
    schema: "agent_threads",
    sqlite: SQLITE,
    #[cfg(feature = "postgres")]
    postgres: POSTGRES,
    // Less than the time limit of the tools.
    busy_timeout: Duration::from_secs(8),
    cannot_use: "cannot use the threads",
    cannot_read: "cannot read the threads",
    cannot_write: "cannot write the threads",
};

/// The project of a call that names none.
pub const PROJECT_DEFAULT: &str = "default";

/// Maximum number of idle connections.
const IDLE_MAX: usize = 4;

/// The threads at an address. Cheap to clone; the connections are shared. Nothing is opened or created before the first
/// use.
#[derive(Clone)]
pub struct Threads {
    shared: Arc<Shared>,
}

struct Shared {
    address: Address,
    /// The path of the key that signs the ends of threads; without one nothing is signed.
    key: Option<PathBuf>,
    signer: OnceLock<Signer>,
    projects: BTreeMap<String, Owners>,
    idle: Mutex<Vec<Box<dyn Database>>>,
    /// Writers of this process take turns in a SQLite file, because its own lock is not fair.
    writer: Mutex<()>,
}

/// The owner of some threads: a caller's tenant and user with a project of its own, or a shared project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner(String);

/// The reason why threads could not be read or written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ThreadError {
    /// The database failed before anything was written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The database failed while the entry was committed.
    #[error("it is not known whether the entry was written: {0}")]
    Unknown(StoreError),
    /// The owner has no such thread.
    #[error("there is no thread `{thread_id}`")]
    Missing {
        /// The id that was asked for.
        thread_id: String,
        /// The owner's threads with similar ids.
        near: Vec<String>,
    },
    /// Arguments that make no sense together.
    #[error("{message}")]
    Refused {
        /// The reason.
        message: String,
        /// The advice.
        suggestion: String,
    },
}

impl ThreadError {
    fn refused(message: impl Into<String>, suggestion: impl Into<String>) -> Self {
        Self::Refused { message: message.into(), suggestion: suggestion.into() }
    }
}

impl Address {
    /// Returns the address of the threads beside a history: the file `threads.db` in the same folder, or a schema of
    /// their own on the same server.
    #[must_use]
    pub fn of_threads(&self) -> Self {
        match self {
            Self::Sqlite(path) => Self::Sqlite(path.with_file_name("threads.db")),
            #[cfg(feature = "postgres")]
            Self::Postgres(url) => Self::Postgres(url.clone()),
        }
    }
}

impl Threads {
    /// Returns the threads at an address. `key` is the path of the audit key, and `projects` are shared.
    pub fn at(address: Address, key: Option<PathBuf>, projects: BTreeMap<String, Owners>) -> Self {
        let (signer, idle, writer) = (OnceLock::new(), Mutex::default(), Mutex::default());
        Self { shared: Arc::new(Shared { address, key, signer, projects, idle, writer }) }
    }

    /// Returns the address of the threads.
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// Returns the owner of the threads that a caller names by a project: the project itself if it is shared with the
    /// caller, else the caller alone. Callers without a tenant or user share their threads, so one with an empty name
    /// has none.
    pub fn owner(&self, caller: &Caller, project: &str) -> Option<Owner> {
        if [&caller.tenant, &caller.user].into_iter().any(|name| name.as_deref() == Some("")) {
            return None;
        }
        let is_shared = self.shared.projects.get(project).is_some_and(|owners| owners.admits(caller));
        let owner = match is_shared {
            true => json!(["project", project]),
            false => json!(["own", caller.tenant, caller.user, project]),
        };
        Some(Owner(owner.to_string()))
    }

    /// Migrates the tables to another schema version (0: no tables). Entries that it cannot hold are lost.
    pub fn migrate(&self, form: u32) -> Result<(), ThreadError> {
        self.with(|database| Ok(database.migrate(form)?))
    }

    /// Returns true if anything was ever written here.
    fn exists(&self) -> Result<bool, StoreError> {
        if !self.shared.idle.lock().expect("no code panics while it holds the connections").is_empty() {
            return Ok(true);
        }
        match &self.shared.address {
            Address::Sqlite(path) => Ok(path.exists()),
            #[cfg(feature = "postgres")]
            Address::Postgres(url) => Postgres::exists(url, THREADS),
        }
    }

    /// Runs `work` on a connection.
    fn with<T>(&self, work: impl FnOnce(&mut dyn Database) -> Result<T, ThreadError>) -> Result<T, ThreadError> {
        let idle = || self.shared.idle.lock().expect("no code panics while it holds the connections");
        let taken = idle().pop();
        let mut database = match taken.and_then(|mut database| database.is_usable().then_some(database)) {
            Some(database) => database,
            None => connect(&self.shared.address)?,
        };
        let done = work(&mut *database);
        // A connection that failed may be broken, so it is not reused.
        let has_failed = matches!(done, Err(ThreadError::Store(_) | ThreadError::Unknown(_)));
        let mut idle = idle();
        if !has_failed && idle.len() < IDLE_MAX {
            idle.push(database);
        }
        done
    }

    fn signer(&self) -> Result<Option<&Signer>, StoreError> {
        let Some(path) = &self.shared.key else { return Ok(None) };
        if self.shared.signer.get().is_none() {
            let _ = self.shared.signer.set(Signer::open(path)?);
        }
        Ok(self.shared.signer.get())
    }
}

fn connect(address: &Address) -> Result<Box<dyn Database>, StoreError> {
    match address {
        Address::Sqlite(path) => Ok(Box::new(Sqlite::open(path, THREADS)?)),
        #[cfg(feature = "postgres")]
        Address::Postgres(url) => {
            let mut server = Postgres::open(url, THREADS)?;
            server.limit_time()?;
            Ok(Box::new(server))
        }
    }
}

/// A point in time, as answers show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct At(Timestamp);

impl At {
    /// Returns the time.
    pub fn timestamp(self) -> Timestamp {
        self.0
    }

    fn of(micros: i64) -> Self {
        Self(Timestamp::from_microsecond(micros).unwrap_or(Timestamp::MAX))
    }
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

//! The public entry: opens a history at an address, queries it, and opens journals.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::json;
use uuid::Uuid;
use wieldy_core::{ExecutionId, TASK_TTL};

use crate::audit::{SignedHead, Signer, SigningState};
use crate::committer::{Committer, PruneSchedule};
use crate::database::{Database, Dialect, HISTORY, SyncMode, Value, one_int};
use crate::error::StoreError;
use crate::events::{self, CallEvent, EventCursor, RecordedEvent};
use crate::failpoint;
use crate::hash_chain::{Head, Record};
use crate::journal::StoreJournal;
use crate::notes;
#[cfg(feature = "postgres")]
use crate::postgres;
use crate::projection::Projection;
use crate::query::{self, Execution, GroupBy, Page, Query, Stat};
use crate::queue::{JournalQueue, LastGroup};
use crate::recovery;
use crate::retention::Retention;
use crate::sqlite::Sqlite;
use crate::verify::{self, Verdict};

/// The address of a history.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// A file.
    Sqlite(PathBuf),
    /// A server, by its URL. The schema is `agent_tools`. The password is not shown.
    #[cfg(feature = "postgres")]
    Postgres(String),
}

impl FromStr for Address {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        if let Some(path) = text.strip_prefix("sqlite:") {
            return Self::file(path.strip_prefix("//").unwrap_or(path));
        }
        #[cfg(feature = "postgres")]
        if text.starts_with("postgres://") || text.starts_with("postgresql://") {
            return postgres::redacted(text).map(|_| Self::Postgres(text.to_owned()));
        }
        match text.split_once("://") {
            Some((scheme, _)) => Err(StoreError::Address(format!("there are no histories at `{scheme}://`"))),
            None => Self::file(text),
        }
    }
}

impl Address {
    fn file(path: &str) -> Result<Self, StoreError> {
        if path.is_empty() {
            return Err(StoreError::Address("the address of the history is empty".into()));
        }
        Ok(Self::Sqlite(path.into()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => path.display().fmt(f),
            #[cfg(feature = "postgres")]
            Self::Postgres(url) => f.write_str(&postgres::redacted(url).unwrap_or_else(|_| "postgres://***".into())),
        }
    }
}

/// Hides the password of an address.
impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

/// Options for the journal of an executor.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// The path of the key that signs heads of the trail; without one nothing is signed.
    pub key: Option<PathBuf>,
    /// The time that results of tasks are stored.
    pub task_ttl: Duration,
    /// True if the executor will run orphaned calls again, by `Executor::resume`. Executors that do not leave such
    /// calls alone for an hour, so that one that does finds them.
    pub resumes: bool,
    /// The limits of the history. The executor drops older records by itself, now and then.
    pub retention: Retention,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self { key: None, task_ttl: TASK_TTL, resumes: false, retention: Retention::default() }
    }
}

/// Maximum number of idle connections.
const IDLE_MAX: usize = 4;

/// A history. Cheap to clone; the connections are shared.
#[derive(Clone)]
pub struct Store {
    address: Address,
    /// Idle connections.
    idle: Arc<Mutex<Vec<Box<dyn Database>>>>,
    /// The journals that this store and its clones have opened.
    journals: Arc<Mutex<Vec<Weak<JournalQueue>>>>,
}

/// The longest time that opening a history waits for another process that commits the logs of dead executors.
const ORPHANED_WAL_WAIT: Duration = Duration::from_secs(10);

impl Store {
    /// Opens the history and migrates its tables to this program's schema version. Commits the write-ahead logs of dead
    /// executors, so that queries find all calls that were answered.
    pub fn open(address: &Address) -> Result<Self, StoreError> {
        let mut first = connect(address)?;
        // A process that may only read still can.
        if let Err(error) = recovery::commit_orphaned_wals(&mut *first, ORPHANED_WAL_WAIT) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "cannot apply the write-ahead logs of dead executors");
        }
        let (idle, journals) = (Arc::new(Mutex::new(vec![first])), Arc::default());
        Ok(Self { address: address.clone(), idle, journals })
    }

    /// Returns a history that is opened at the first query: nothing is opened or created before.
    pub fn at(address: &Address) -> Self {
        Self { address: address.clone(), idle: Arc::default(), journals: Arc::default() }
    }

    /// Migrates the tables to an older schema version (0: no tables), for a program of that time. Data that it cannot
    /// hold is lost.
    pub fn migrate(&self, form: u32) -> Result<(), StoreError> {
        self.with(|database| database.migrate(form))
    }

    /// Returns the address.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Opens a journal for a new executor, and closes the orphaned calls of dead ones.
    pub fn journal(&self, options: &JournalOptions) -> Result<StoreJournal, StoreError> {
        let mut committer = self.committer(options)?;
        recovery::commit_orphaned_wals(&mut *committer.database, ORPHANED_WAL_WAIT)?;
        let interrupted = recovery::recover(&mut committer, options.resumes)?;
        let remembered = recovery::load_remembered(&mut *committer.database, interrupted)?;
        failpoint::reach("journal.recovered");
        let (notes, seq) = notes::load(&mut *committer.database)?;
        (committer.notes, committer.notes_seq) = (Arc::new(notes), seq);
        let wal = committer.database.open_wal(task_ttl(options))?;
        let journal = StoreJournal::start(committer, wal, remembered)?;
        let mut journals = self.journals();
        journals.retain(|journal| journal.strong_count() > 0);
        journals.push(Arc::downgrade(journal.shared()));
        drop(journals);
        Ok(journal)
    }

    fn journals(&self) -> MutexGuard<'_, Vec<Weak<JournalQueue>>> {
        self.journals.lock().expect("no code panics while it holds the journals")
    }

    /// Returns a committer with an instance of its own.
    pub(crate) fn committer(&self, options: &JournalOptions) -> Result<Committer, StoreError> {
        let mut database = connect(&self.address)?;
        let id = Uuid::now_v7();
        let signer = options.key.as_deref().map(Signer::open).transpose()?;
        // The record below waits for the disk, which makes the row of this executor durable, too.
        database.set_sync(SyncMode::Deferred)?;
        let number = register(&mut *database, id)?;
        database.set_sync(SyncMode::Each)?;
        failpoint::reach("journal.registered");
        let opened_at = one_int(&mut *database, "SELECT seq FROM trail", &[])?.unwrap_or_default();
        let indexes_on_write = database.dialect() != Dialect::Sqlite;
        let mut committer = Committer {
            database,
            projection: Projection::new(id, task_ttl(options), indexes_on_write),
            number,
            id: id.to_string(),
            signer,
            signing: SigningState::since(opened_at),
            unindexed: 0,
            last_group: LastGroup::default(),
            maintained: Instant::now(),
            prune_schedule: PruneSchedule::new(options.retention),
            has_lost_sandboxes: true,
            notes: Arc::default(),
            // Only an executor follows notes.
            notes_seq: i64::MAX,
        };
        let about = json!({"instance": id, "version": env!("CARGO_PKG_VERSION"), "host": host(), "process": std::process::id()});
        let opened = Record::own("journal.opened", Timestamp::now().as_microsecond(), None, &about);
        committer.commit(&[Arc::new(opened)], false)?;
        failpoint::reach("journal.opened");
        Ok(committer)
    }

    /// Returns up to `limit` calls, the latest first.
    pub fn search(&self, query: &Query, limit: usize) -> Result<Page, StoreError> {
        self.with(|database| query::search(database, query, limit))
    }

    /// Finds up to `limit` events of calls whose names are `wanted`, those of the latest call first.
    pub(crate) fn call_events(
        &self,
        query: &Query,
        from: Option<EventCursor>,
        wanted: &dyn Fn(&RecordedEvent) -> bool,
        limit: usize,
    ) -> Result<(Vec<CallEvent>, Option<EventCursor>), StoreError> {
        self.with(|database| events::find(database, query, from, wanted, limit))
    }

    /// Returns the query plans of [`Store::search`], for tests.
    #[doc(hidden)]
    pub fn plans(&self, query: &Query, limit: usize) -> Result<Vec<String>, StoreError> {
        self.with(|database| query::query_plans(database, query, limit))
    }

    /// Returns one call with its events.
    pub fn show(&self, id: ExecutionId) -> Result<Option<(Execution, Vec<RecordedEvent>)>, StoreError> {
        self.with(|database| query::show(database, id))
    }

    /// Returns the calls whose ids begin with `begin`, the earliest first; up to `limit`.
    pub fn find(&self, begin: &str, limit: usize) -> Result<Vec<ExecutionId>, StoreError> {
        self.with(|database| query::find(database, begin, limit))
    }

    /// Returns the number of records in the trail, and the size of the whole history in bytes.
    pub fn extent(&self) -> Result<(u64, u64), StoreError> {
        self.with(|database| {
            let sql = "SELECT (SELECT seq FROM trail) - coalesce((SELECT min(seq) FROM events), 1) + 1";
            let records = one_int(database, sql, &[])?.unwrap_or_default();
            Ok((u64::try_from(records).unwrap_or_default(), database.size()?))
        })
    }

    /// Returns statistics about calls, by tool or day.
    pub fn stats(&self, query: &Query, by: GroupBy) -> Result<Vec<Stat>, StoreError> {
        self.with(|database| query::stats(database, query, by))
    }

    /// Returns the durations of the last successful runs of each tool, for dynamic timeouts. They are those of the runs
    /// alone, without waiting for a slot, a person or the next attempt, and without cached answers.
    pub fn durations(&self, runs_max: usize) -> Result<HashMap<String, Vec<Duration>>, StoreError> {
        let runs_max = Value::Int(i64::try_from(runs_max).unwrap_or(i64::MAX));
        self.with(|database| {
            let mut tools = Vec::new();
            // Only tools that exist or once existed have succeeded, so there are few.
            database.query("SELECT DISTINCT tool_name FROM tallies WHERE status = 'success'", &[], &mut |row| {
                tools.push(row.text(0)?.to_owned());
                Ok(())
            })?;
            let sql = "SELECT t.completed_at,
                 (SELECT max(s.at) FROM events s WHERE s.execution = t.id AND s.name = 'tool.call.started')
               FROM (SELECT id, completed_at FROM tool_executions
                 WHERE tool_name = ?1 AND status = 'success' AND attempts > 0 ORDER BY id DESC LIMIT ?2) t
               ORDER BY t.id";
            let mut durations = HashMap::new();
            for tool in tools {
                let mut took = Vec::new();
                database.query(sql, &[tool.as_str().into(), runs_max.clone()], &mut |row| {
                    if let (Some(ended), Some(started)) = (row.int_or_none(0)?, row.int_or_none(1)?) {
                        took.extend(u64::try_from(ended - started).map(Duration::from_micros));
                    }
                    Ok(())
                })?;
                durations.insert(tool, took);
            }
            Ok(durations)
        })
    }

    /// Verifies that the history is whole. `anchors` are signed heads that were stored elsewhere. With a `key`, every
    /// signature must be by that key. `progress` gets the number of verified records now and then.
    pub fn verify(
        &self,
        anchors: &[SignedHead],
        key: Option<&str>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Verdict, StoreError> {
        self.with(|database| verify::verify(database, anchors, key, progress))
    }

    /// Returns the head of the trail, signed now.
    pub fn sign_head(&self, signer: &Signer) -> Result<SignedHead, StoreError> {
        self.with(|database| {
            let mut head = Head { seq: 0, hash: [0; 32] };
            database.query("SELECT seq, hash FROM trail", &[], &mut |row| {
                let hash = row.bytes(1)?.try_into();
                let hash = hash.map_err(|_| StoreError::Damaged("the end of the trail has no hash".into()))?;
                head = Head { seq: row.int(0)?, hash };
                Ok(())
            })?;
            Ok(signer.sign(&head, Timestamp::now()))
        })
    }

    /// Runs `work` on a connection of its own, after all answered calls were committed.
    pub(crate) fn with<T>(
        &self,
        work: impl FnOnce(&mut dyn Database) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let journals: Vec<_> = self.journals().iter().filter_map(Weak::upgrade).collect();
        journals.iter().for_each(|journal| journal.wait_until_committed());
        let idle = || self.idle.lock().expect("no code panics while it holds the connections");
        let taken = idle().pop();
        let mut database = match taken.and_then(|mut database| database.is_usable().then_some(database)) {
            Some(database) => database,
            None => connect(&self.address)?,
        };
        let done = work(&mut *database);
        // A connection that failed may be broken, so it is not reused.
        let mut idle = idle();
        if done.is_ok() && idle.len() < IDLE_MAX {
            idle.push(database);
        }
        done
    }
}

fn connect(address: &Address) -> Result<Box<dyn Database>, StoreError> {
    match address {
        Address::Sqlite(path) => Ok(Box::new(Sqlite::open(path, HISTORY)?)),
        #[cfg(feature = "postgres")]
        Address::Postgres(url) => Ok(Box::new(postgres::Postgres::open(url, HISTORY)?)),
    }
}

/// Returns the time that results of tasks are stored, in microseconds.
fn task_ttl(options: &JournalOptions) -> i64 {
    i64::try_from(options.task_ttl.as_micros()).unwrap_or(i64::MAX)
}

fn register(database: &mut dyn Database, id: Uuid) -> Result<i64, StoreError> {
    // The liveness lock comes first: a process that sees the row must see a living executor.
    database.lock_liveness(&id.to_string())?;
    let now = Timestamp::now().as_microsecond();
    // Machines that share a server may have different clocks, so the server's clock is used.
    let seen_at = match database.dialect() {
        Dialect::Sqlite => "?5",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => "clock_timestamp()",
    };
    let sql = format!(
        "INSERT INTO instances (id, version, host, process, started_at, seen_at) VALUES (?1, ?2, ?3, ?4, ?5, {seen_at})
         RETURNING number"
    );
    let values = [
        id.to_string().as_str().into(),
        env!("CARGO_PKG_VERSION").into(),
        host().as_str().into(),
        i64::from(std::process::id()).into(),
        Value::Time(now),
    ];
    let number = one_int(database, &sql, &values)?;
    number.ok_or_else(|| StoreError::Damaged("the history assigned no number to this executor".into()))
}

/// Returns the name of this machine, or of this container of it: the scope of a process number.
pub(crate) fn host() -> String {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    match processes.to_str().and_then(|text| text.strip_prefix("pid:[")?.strip_suffix(']')) {
        // The kernel gives this number to the first PID namespace.
        None | Some("4026531836") => name.trim().into(),
        Some(other) => format!("{}#{other}", name.trim()),
    }
}

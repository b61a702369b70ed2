//! A history at some address.

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

use crate::audit::{SignedHead, Signer, Unsigned};
use crate::database::{Database, Dialect, Value, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::filing::{Filer, Pruning};
use crate::ledger::Ledger;
use crate::moments::{self, LogCursor, LogEntry, Moment};
#[cfg(feature = "postgres")]
use crate::postgres;
use crate::query::{self, Execution, GroupBy, Page, Query, Stat};
use crate::recovery;
use crate::sqlite::Sqlite;
use crate::trail::{Head, Record};
use crate::upkeep::Retention;
use crate::verify::{self, Verdict};
use crate::writer::{Pace, Shared, StoreJournal};

/// Where a history is.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// In this file.
    Sqlite(PathBuf),
    /// On the server that this URL names, in the schema `agent_tools`. Its password is not shown.
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
            return postgres::shown(text).map(|_| Self::Postgres(text.to_owned()));
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
            Self::Postgres(url) => f.write_str(&postgres::shown(url).unwrap_or_else(|_| "postgres://***".into())),
        }
    }
}

/// Addresses may hold passwords, which are not shown.
impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

/// How an executor keeps its journal.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// Where the key is that ends of the trail are signed with; without one nothing is signed.
    pub key: Option<PathBuf>,
    /// How long results of tasks are kept.
    pub task_ttl: Duration,
    /// Whether the executor will run again what others left open, by `Executor::resume`. One that does not leaves such calls
    /// alone for an hour, so that one that does finds them.
    pub resumes: bool,
    /// How much is kept; the executor drops what is more by itself, now and then.
    pub retention: Retention,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self { key: None, task_ttl: TASK_TTL, resumes: false, retention: Retention::default() }
    }
}

/// How many connections are kept for those who will ask.
const IDLE_MAX: usize = 4;

/// A history. Cheap to clone; the connections are shared.
#[derive(Clone)]
pub struct Store {
    address: Address,
    /// Connections that nobody uses just now.
    idle: Arc<Mutex<Vec<Box<dyn Database>>>>,
    /// The journals that are written here by this and its clones.
    journals: Arc<Mutex<Vec<Weak<Shared>>>>,
}

/// How long whoever opens a history waits for another process that files what executors left in their logs.
const SETTLING: Duration = Duration::from_secs(10);

impl Store {
    /// Opens the history, and brings its tables into this program's form. What executors that are gone left in their logs is
    /// filed, so that whoever asks finds all that was answered.
    pub fn open(address: &Address) -> Result<Self, StoreError> {
        let mut first = connect(address)?;
        // Whoever may only read still can.
        if let Err(error) = recovery::settle(&mut *first, SETTLING) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "what executors left in their logs is not filed");
        }
        let (idle, journals) = (Arc::new(Mutex::new(vec![first])), Arc::default());
        Ok(Self { address: address.clone(), idle, journals })
    }

    /// The history as it will be found when it is first asked: nothing is opened or made before.
    pub fn at(address: &Address) -> Self {
        Self { address: address.clone(), idle: Arc::default(), journals: Arc::default() }
    }

    /// Goes to an older form of the tables (0: to none at all), as a program of that time needs it; what it cannot hold is lost.
    pub fn migrate(&self, form: u32) -> Result<(), StoreError> {
        self.with(|database| database.migrate(form))
    }

    /// Where it is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Begins to write: from now on an executor lives here. What executors left open that are gone is closed.
    pub fn journal(&self, options: &JournalOptions) -> Result<StoreJournal, StoreError> {
        let mut filer = self.filer(options)?;
        recovery::settle(&mut *filer.database, SETTLING)?;
        let interrupted = recovery::recover(&mut filer, options.resumes)?;
        let remembered = recovery::remembered(&mut *filer.database, interrupted)?;
        failpoint::reach("journal.recovered");
        let log = filer.database.log(task_ttl(options))?;
        let journal = StoreJournal::start(filer, log, remembered)?;
        let mut journals = self.journals();
        journals.retain(|journal| journal.strong_count() > 0);
        journals.push(Arc::downgrade(journal.shared()));
        drop(journals);
        Ok(journal)
    }

    fn journals(&self) -> MutexGuard<'_, Vec<Weak<Shared>>> {
        self.journals.lock().expect("no code panics while it holds the journals")
    }

    /// What writes, with an instance of its own.
    pub(crate) fn filer(&self, options: &JournalOptions) -> Result<Filer, StoreError> {
        let mut database = connect(&self.address)?;
        let id = Uuid::now_v7();
        let signer = options.key.as_deref().map(Signer::open).transpose()?;
        // The record below waits for the disk, and with it the row of this executor gets there.
        database.relax(true)?;
        let number = register(&mut *database, id)?;
        database.relax(false)?;
        failpoint::reach("journal.registered");
        let opened_at = one_int(&mut *database, "SELECT seq FROM trail", &[])?.unwrap_or_default();
        let takes_words = database.dialect() != Dialect::Sqlite;
        let mut filer = Filer {
            database,
            ledger: Ledger::new(id, task_ttl(options), takes_words),
            number,
            id: id.to_string(),
            signer,
            unsigned: Unsigned::since(opened_at),
            wordless: 0,
            pace: Pace::default(),
            looked: Instant::now(),
            pruning: Pruning::new(options.retention),
        };
        let about = json!({"instance": id, "version": env!("CARGO_PKG_VERSION"), "host": host(), "process": std::process::id()});
        let opened = Record::own("journal.opened", Timestamp::now().as_microsecond(), None, &about);
        filer.write(&[Arc::new(opened)], false)?;
        failpoint::reach("journal.opened");
        Ok(filer)
    }

    /// Up to `limit` calls, the latest first.
    pub fn search(&self, query: &Query, limit: usize) -> Result<Page, StoreError> {
        self.with(|database| query::search(database, query, limit))
    }

    /// Finds up to `limit` events of calls, those of the latest call first, whose names are wanted.
    pub(crate) fn logs(
        &self,
        query: &Query,
        from: Option<LogCursor>,
        wanted: &dyn Fn(&str) -> bool,
        limit: usize,
    ) -> Result<(Vec<LogEntry>, Option<LogCursor>), StoreError> {
        self.with(|database| moments::logs(database, query, from, wanted, limit))
    }

    /// How the database looks for what [`Store::search`] asks for, for tests of that.
    #[doc(hidden)]
    pub fn plans(&self, query: &Query, limit: usize) -> Result<Vec<String>, StoreError> {
        self.with(|database| query::plans(database, query, limit))
    }

    /// One call with everything that happened to it.
    pub fn show(&self, id: ExecutionId) -> Result<Option<(Execution, Vec<Moment>)>, StoreError> {
        self.with(|database| query::show(database, id))
    }

    /// The calls whose ids begin with `begin`, the earliest first; up to `limit`.
    pub fn find(&self, begin: &str, limit: usize) -> Result<Vec<ExecutionId>, StoreError> {
        self.with(|database| query::find(database, begin, limit))
    }

    /// How many records the trail has, and how many bytes the whole history takes.
    pub fn extent(&self) -> Result<(u64, u64), StoreError> {
        self.with(|database| {
            let sql = "SELECT (SELECT seq FROM trail) - coalesce((SELECT min(seq) FROM events), 1) + 1";
            let records = one_int(database, sql, &[])?.unwrap_or_default();
            Ok((u64::try_from(records).unwrap_or_default(), database.size()?))
        })
    }

    /// How calls went, by tool or day.
    pub fn stats(&self, query: &Query, by: GroupBy) -> Result<Vec<Stat>, StoreError> {
        self.with(|database| query::stats(database, query, by))
    }

    /// How long the last runs of each tool took that went well, for clocks that follow them: the runs themselves, without
    /// what came before them (waiting for a slot, for a person, for the next attempt), and no answers that were kept.
    pub fn durations(&self, runs_max: usize) -> Result<HashMap<String, Vec<Duration>>, StoreError> {
        let runs_max = Value::Int(i64::try_from(runs_max).unwrap_or(i64::MAX));
        self.with(|database| {
            let mut tools = Vec::new();
            // What went well is a tool that there is, or was: of these there are few.
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

    /// Looks whether the history is whole. `anchors` are ends of the trail that were kept elsewhere; with a `key` everything
    /// signed must be signed by it. `progress` is told now and then how many records were looked at.
    pub fn verify(
        &self,
        anchors: &[SignedHead],
        key: Option<&str>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Verdict, StoreError> {
        self.with(|database| verify::verify(database, anchors, key, progress))
    }

    /// The end of the trail, signed now.
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

    /// Runs `work` on a connection of its own, on everything that was answered before.
    pub(crate) fn with<T>(
        &self,
        work: impl FnOnce(&mut dyn Database) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let journals: Vec<_> = self.journals().iter().filter_map(Weak::upgrade).collect();
        journals.iter().for_each(|journal| journal.catch_up());
        let idle = || self.idle.lock().expect("no code panics while it holds the connections");
        let taken = idle().pop();
        let mut database = match taken.and_then(|mut database| database.is_usable().then_some(database)) {
            Some(database) => database,
            None => connect(&self.address)?,
        };
        let done = work(&mut *database);
        // A connection that failed may be broken; the next one is new.
        let mut idle = idle();
        if done.is_ok() && idle.len() < IDLE_MAX {
            idle.push(database);
        }
        done
    }
}

fn connect(address: &Address) -> Result<Box<dyn Database>, StoreError> {
    match address {
        Address::Sqlite(path) => Ok(Box::new(Sqlite::open(path)?)),
        #[cfg(feature = "postgres")]
        Address::Postgres(url) => Ok(Box::new(postgres::Postgres::open(url)?)),
    }
}

/// How long results of tasks are kept, in microseconds.
fn task_ttl(options: &JournalOptions) -> i64 {
    i64::try_from(options.task_ttl.as_micros()).unwrap_or(i64::MAX)
}

fn register(database: &mut dyn Database, id: Uuid) -> Result<i64, StoreError> {
    // First the sign of life: who sees the row sees a living process.
    database.show_life(&id.to_string())?;
    let now = Timestamp::now().as_microsecond();
    // Machines that share a server may differ about the time, so that is asked who was last seen when.
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
    number.ok_or_else(|| StoreError::Damaged("the history gives no number to this executor".into()))
}

/// This machine, or this container of it: where a process is known by its number.
pub(crate) fn host() -> String {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname")).unwrap_or_default();
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    match processes.to_str().and_then(|text| text.strip_prefix("pid:[")?.strip_suffix(']')) {
        // The kernel gives this number to the first one.
        None | Some("4026531836") => name.trim().into(),
        Some(other) => format!("{}#{other}", name.trim()),
    }
}

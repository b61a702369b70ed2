//! The interface that both databases implement. Shared SQL is written once, with `?1`, `?2`, … for values; [`Dialect`]
//! holds the differences.

use std::borrow::Cow;
use std::path::Path;
use std::time::Duration;

use crate::error::StoreError;
use crate::hash_chain::Head;
use crate::migrations::Migration;
use crate::projection::Changeset;
use crate::wal::{OrphanedWal, Wal};

/// A value in a statement.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Null,
    Int(i64),
    Real(f64),
    Text(String),
    /// A point in time, in microseconds.
    Time(i64),
    Bytes(Vec<u8>),
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A row of a result.
pub(crate) trait Row {
    /// Returns a number; for a point in time, its microseconds.
    fn int(&self, column: usize) -> Result<i64, StoreError>;
    fn int_or_none(&self, column: usize) -> Result<Option<i64>, StoreError>;
    fn real_or_none(&self, column: usize) -> Result<Option<f64>, StoreError>;
    fn text(&self, column: usize) -> Result<&str, StoreError>;
    fn text_or_none(&self, column: usize) -> Result<Option<&str>, StoreError>;
    fn bytes(&self, column: usize) -> Result<&[u8], StoreError>;
    /// Returns a boolean.
    fn flag(&self, column: usize) -> Result<bool, StoreError>;
}

/// The moment at which a commit is on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncMode {
    /// Each commit waits for the disk.
    Each,
    /// Commits do not wait. The next one that does makes them durable, too.
    Deferred,
}

/// The kind of database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    #[cfg(feature = "postgres")]
    Postgres,
}

impl Dialect {
    /// Returns the placeholder of the value `number` for a column of the type `kind`, one of the letters in `copy`.
    pub(crate) fn placeholder(self, number: usize, kind: char) -> String {
        let _ = kind;
        match self {
            Self::Sqlite => format!("?{number}"),
            #[cfg(feature = "postgres")]
            Self::Postgres => {
                let name = match kind {
                    'i' => "bigint",
                    '@' => "timestamptz",
                    'r' => "double precision",
                    'b' => "bytea",
                    _ => "text",
                };
                format!("?{number}::{name}")
            }
        }
    }
}

/// The texts that a search looks in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TextPlace {
    /// The tool's name, the arguments and the error of a call.
    #[default]
    Calls,
    /// The recorded result of a call.
    Results,
}

impl TextPlace {
    /// Returns the table with the words.
    pub(crate) fn table(self) -> &'static str {
        match self {
            Self::Calls => "words",
            Self::Results => "result_words",
        }
    }
}

/// A full-text search for calls.
pub(crate) struct TextSearch<'a> {
    /// Words that must all occur, at least as the beginning of a word.
    pub(crate) text: &'a str,
    /// The tool's name, which is among the words of every call.
    pub(crate) tool: Option<&'a str>,
    /// True if the other conditions leave only few calls.
    pub(crate) is_narrow: bool,
    /// The texts that are searched.
    pub(crate) place: TextPlace,
    /// The placeholder number of the cursor: calls must come before its value.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite goes through words backwards by itself"))]
    pub(crate) before: Option<usize>,
}

/// A table expression that calls are read from.
pub(crate) struct Source {
    pub(crate) from: Cow<'static, str>,
    /// The expression by which calls are ordered there.
    pub(crate) id: &'static str,
    pub(crate) condition: String,
}

/// A set of tables: their place in a database, their schema versions, and their name in messages.
pub(crate) struct Tables {
    /// The application id in the header of a SQLite file.
    pub(crate) application_id: i32,
    /// The schema on a PostgreSQL server.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite has a file instead"))]
    pub(crate) schema: &'static str,
    pub(crate) sqlite: &'static [Migration],
    #[cfg(feature = "postgres")]
    pub(crate) postgres: &'static [Migration],
    /// The longest wait for another process that writes a SQLite file.
    pub(crate) busy_timeout: Duration,
    /// The beginnings of messages.
    pub(crate) cannot_use: &'static str,
    pub(crate) cannot_read: &'static str,
    pub(crate) cannot_write: &'static str,
}

/// The tables of the history.
pub(crate) const HISTORY: &Tables = &Tables {
    application_id: 0x776c_6479, // "wldy"
    schema: "agent_tools",
    sqlite: crate::sqlite::MIGRATIONS,
    #[cfg(feature = "postgres")]
    postgres: crate::postgres::MIGRATIONS,
    busy_timeout: Duration::from_secs(2),
    cannot_use: "cannot use the history",
    cannot_read: "cannot read the history",
    cannot_write: "cannot write the history",
};

/// A callback for each row of a result.
pub(crate) type EachRow<'a> = &'a mut dyn FnMut(&dyn Row) -> Result<(), StoreError>;

/// A connection to a database that holds a history in this program's schema version.
pub(crate) trait Database: Send {
    fn dialect(&self) -> Dialect;

    /// Runs a query and passes its rows to `each`.
    fn query(&mut self, sql: &str, values: &[Value], each: EachRow<'_>) -> Result<(), StoreError>;

    /// Runs a query like `query`, without caching the statement.
    fn query_uncached(&mut self, sql: &str, each: EachRow<'_>) -> Result<(), StoreError>;

    /// Runs a statement and returns the number of rows it changed.
    fn execute(&mut self, sql: &str, values: &[Value]) -> Result<u64, StoreError>;

    /// Runs `work` in one transaction.
    fn in_transaction(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Appends to the trail in one transaction. `project` receives the head of the trail and returns the rows to write.
    /// It is called again if another writer was faster. Fails with [`StoreError::TakenForDead`] if the instance has
    /// ended.
    fn write(&mut self, instance: i64, project: &mut dyn FnMut(&Head) -> Changeset) -> Result<Changeset, StoreError>;

    /// Takes the liveness lock of an instance, which this connection holds as long as it exists.
    fn lock_liveness(&mut self, instance: &str) -> Result<(), StoreError>;

    /// Releases the liveness lock of an instance that has ended and left nothing.
    fn unlock_liveness(&mut self) {}

    /// Returns true if an instance without an end is alive, or its write-ahead log is not committed yet.
    fn is_alive(&mut self, instance: &str) -> Result<bool, StoreError>;

    /// Opens a write-ahead log for the instance whose liveness lock this is, on databases where records become durable
    /// faster that way than by a commit.
    fn open_wal(&mut self, task_ttl: i64) -> Result<Option<Wal>, StoreError> {
        let _ = task_ttl;
        Ok(None)
    }

    /// Sets whether later commits wait for the disk.
    fn set_sync(&mut self, _mode: SyncMode) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns the write-ahead logs of dead instances; none if another process holds them for longer than `patience`.
    fn take_orphaned_wals(&mut self, patience: Duration) -> Result<Vec<OrphanedWal>, StoreError> {
        let _ = patience;
        Ok(Vec::new())
    }

    /// Records that the instance is alive, on databases where the lock alone does not prove it.
    fn heartbeat(&mut self, instance: i64) -> Result<(), StoreError>;

    /// Returns true if a connection that was idle still works.
    fn is_usable(&mut self) -> bool;

    /// Connects again after an error.
    fn reconnect(&mut self) -> Result<(), StoreError>;

    /// Runs `work` on a snapshot of the history.
    fn in_snapshot(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Returns the tables in which calls with these words are found, each call in one table only. Of several
    /// alternatives, all but the last are fast and may find only the latest calls. Placeholders are numbered from
    /// `first` on.
    fn text_sources(
        &mut self,
        words: &TextSearch<'_>,
        first: usize,
    ) -> Result<(Vec<Vec<Source>>, Vec<Value>), StoreError>;

    /// Indexes the words of closed calls if at least `at_least` records wait for it, on databases that do not index
    /// while they write. Returns the number of records that still wait.
    fn index_words(&mut self, at_least: u64) -> Result<u64, StoreError> {
        let _ = at_least;
        Ok(0)
    }

    /// Adds words to the full-text index of a place.
    fn add_words(&mut self, place: TextPlace, words: &[(i64, String)]) -> Result<(), StoreError>;

    /// Deletes the words of the calls and results up to `up_to` that are gone from their tables.
    fn unindex_words(&mut self, up_to: i64) -> Result<(), StoreError>;

    /// Returns the size of the history in bytes.
    fn size(&mut self) -> Result<u64, StoreError>;

    /// Returns the size of the rows in bytes. Free space that will be reused or given back does not count: retention
    /// would drop more and more records to get rid of it.
    fn rows_size(&mut self) -> Result<u64, StoreError>;

    /// Migrates the tables to another schema version.
    fn migrate(&mut self, form: u32) -> Result<(), StoreError>;

    /// Copies everything into a new file, if the history is a file itself.
    fn backup(&mut self, target: &Path) -> Result<(), StoreError>;

    /// Moves counters of row numbers and of indexed words past the rows that were copied.
    fn advance_counters(&mut self) -> Result<(), StoreError>;

    /// Gives unused space back to the system.
    fn release_space(&mut self) -> Result<(), StoreError>;
}

/// Returns the only value of a query's only row, or `None`.
pub(crate) fn one_int(database: &mut dyn Database, sql: &str, values: &[Value]) -> Result<Option<i64>, StoreError> {
    let mut found = None;
    database.query(sql, values, &mut |row| {
        found = row.int_or_none(0)?;
        Ok(())
    })?;
    Ok(found)
}

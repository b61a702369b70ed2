//! What a database must be able to do to hold the history. The SQL that both speak is written once, with `?1`, `?2`, … for
//! values; where they differ, [`Dialect`] says how.

use std::path::Path;
use std::time::Duration;

use crate::error::StoreError;
use crate::ledger::Draft;
use crate::log::{LeftLog, Log};
use crate::trail::Head;

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

/// A row of an answer.
pub(crate) trait Row {
    /// A number; of a point in time, its microseconds.
    fn int(&self, column: usize) -> Result<i64, StoreError>;
    fn int_or_none(&self, column: usize) -> Result<Option<i64>, StoreError>;
    fn real_or_none(&self, column: usize) -> Result<Option<f64>, StoreError>;
    fn text(&self, column: usize) -> Result<&str, StoreError>;
    fn text_or_none(&self, column: usize) -> Result<Option<&str>, StoreError>;
    fn bytes(&self, column: usize) -> Result<&[u8], StoreError>;
    /// A condition.
    fn flag(&self, column: usize) -> Result<bool, StoreError>;
}

/// Where the databases differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    #[cfg(feature = "postgres")]
    Postgres,
}

impl Dialect {
    /// The place of the value `number` in a list of values, of the kind that `upkeep` names.
    pub(crate) fn place(self, number: usize, kind: char) -> String {
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

/// What calls are wanted by.
pub(crate) struct Words<'a> {
    /// All these, or words that begin like them.
    pub(crate) text: &'a str,
    /// The tool's name, which is among the words of every call.
    pub(crate) tool: Option<&'a str>,
    /// Whether little is left of the history by what else is wanted.
    pub(crate) few: bool,
    /// The place of the value that they must come before.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite goes through words backwards by itself"))]
    pub(crate) before: Option<usize>,
}

/// Tables that calls are read from.
pub(crate) struct Source {
    pub(crate) from: &'static str,
    /// What calls are put in order by there.
    pub(crate) id: &'static str,
    pub(crate) condition: String,
}

/// What reads the rows of an answer, one by one.
pub(crate) type EachRow<'a> = &'a mut dyn FnMut(&dyn Row) -> Result<(), StoreError>;

/// A connection to a database that holds a history of this program's form.
pub(crate) trait Database: Send {
    fn dialect(&self) -> Dialect;

    /// Runs a query and hands out its rows, one by one.
    fn query(&mut self, sql: &str, values: &[Value], each: EachRow<'_>) -> Result<(), StoreError>;

    /// The same for a statement that will not come again.
    fn query_once(&mut self, sql: &str, each: EachRow<'_>) -> Result<(), StoreError>;

    /// Runs a statement; how many rows it changed.
    fn execute(&mut self, sql: &str, values: &[Value]) -> Result<u64, StoreError>;

    /// Runs `work` as a whole or not at all.
    fn atomically(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Adds to the trail, as a whole or not at all. `draft` is told where the trail ends and says what to write; it is
    /// asked again if somebody else was quicker. Fails with [`StoreError::TakenForDead`] where the instance has ended.
    fn write(&mut self, instance: i64, draft: &mut dyn FnMut(&Head) -> Draft) -> Result<Draft, StoreError>;

    /// Holds the sign of life of an instance for as long as this connection is there.
    fn show_life(&mut self, instance: &str) -> Result<(), StoreError>;

    /// Takes the sign of life of an instance away that has ended and left nothing.
    fn end_life(&mut self) {}

    /// Whether the process of an instance that has not ended is there, or what it left is not filed yet.
    fn lives(&mut self, instance: &str) -> Result<bool, StoreError>;

    /// A log in which records of the instance whose sign of life this is are safe before they are written, where that is
    /// quicker.
    fn log(&mut self, task_ttl: i64) -> Result<Option<Log>, StoreError> {
        let _ = task_ttl;
        Ok(None)
    }

    /// Commits without waiting for the disk from now on, or waits again. A later commit that waits makes earlier ones safe, too.
    fn relax(&mut self, _relaxed: bool) -> Result<(), StoreError> {
        Ok(())
    }

    /// The logs of instances that are gone; none where somebody else has them for longer than that.
    fn left(&mut self, patience: Duration) -> Result<Vec<LeftLog>, StoreError> {
        let _ = patience;
        Ok(Vec::new())
    }

    /// Says that the instance lives where nobody could see it otherwise.
    fn stay_alive(&mut self, instance: i64) -> Result<(), StoreError>;

    /// Whether a connection that was not used for a while can be.
    fn is_usable(&mut self) -> bool;

    /// Connects again after something went wrong.
    fn reconnect(&mut self) -> Result<(), StoreError>;

    /// Runs `work` on the history as it is now, whatever is written meanwhile.
    fn at_one_moment(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Where the calls are that can be found by these words: each in one place only. Of several ways to look for them all but
    /// the last may find only the latest, quickly. The values are numbered from `first` on.
    fn words(&mut self, words: &Words<'_>, first: usize) -> Result<(Vec<Vec<Source>>, Vec<Value>), StoreError>;

    /// Takes the words of calls that are over, where that is not part of writing and `at_least` so many records wait for
    /// it; how many are left then.
    fn take_words(&mut self, at_least: u64) -> Result<u64, StoreError> {
        let _ = at_least;
        Ok(0)
    }

    /// Adds the words of calls.
    fn add_words(&mut self, words: &[(i64, String)]) -> Result<(), StoreError>;

    /// Forgets the words of the calls up to `id` that are gone from `tool_executions`.
    fn forget_words(&mut self, up_to: i64) -> Result<(), StoreError>;

    /// How many bytes the history takes.
    fn size(&mut self) -> Result<u64, StoreError>;

    /// How many of these it takes for its rows. Room that will be used again, or be given back, does not count: retention
    /// would drop ever more to get rid of it.
    fn size_of_rows(&mut self) -> Result<u64, StoreError>;

    /// Goes to another form of the tables.
    fn migrate(&mut self, form: u32) -> Result<(), StoreError>;

    /// Copies everything into a new file, where the history is one itself.
    fn backup(&mut self, target: &Path) -> Result<(), StoreError>;

    /// Goes on counting after the numbers of rows that were copied.
    fn settle_numbers(&mut self) -> Result<(), StoreError>;

    /// Gives room that is no longer needed back to the system.
    fn shrink(&mut self) -> Result<(), StoreError>;
}

/// The one value of the one row, or nothing.
pub(crate) fn one_int(database: &mut dyn Database, sql: &str, values: &[Value]) -> Result<Option<i64>, StoreError> {
    let mut found = None;
    database.query(sql, values, &mut |row| {
        found = row.int_or_none(0)?;
        Ok(())
    })?;
    Ok(found)
}

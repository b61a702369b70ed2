//! The history in a SQLite file: no server, one writer at a time, any number of readers.

mod checkpoint;
mod liveness;
mod search;
mod write;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, OpenFlags, ToSql, TransactionBehavior};

use checkpoint::Checkpoint;
use liveness::LivenessLock;

use crate::database::{
    Database, Dialect, EachRow, Row, Source, SyncMode, Tables, TextPlace, TextSearch, Value, one_int,
};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Head;
use crate::migrations::{self, Migration, migrations};
use crate::projection::Changeset;
use crate::wal::{OrphanedWal, Wal};

pub(crate) const MIGRATIONS: &[Migration] = migrations!(
    "sqlite":
    "0001_history",
    "0002_answers_tenant",
    "0003_claims_workspace",
    "0004_provider",
    "0005_metadata",
    "0006_sandboxes",
    "0007_results",
    "0008_result_words",
    "0009_notes",
);

/// The calls that closed within a part of the trail; the query adds which part.
const CLOSED_CALLS: &str = "SELECT execution FROM events WHERE name IN
    ('tool.call.success', 'tool.call.failure', 'tool.call.timeout', 'tool.call.cancelled')";
/// The searchable text of a call.
const CALL_TEXT: &str =
    "tool_name || ' ' || substr(coalesce(parameters_json, ''), 1, 16384) || ' ' || coalesce(error_message, '')";
/// The number of records that are indexed together.
const INDEXED_AT_ONCE: i64 = 10_000;

/// A connection to a SQLite file.
pub(crate) struct Sqlite {
    tables: &'static Tables,
    path: PathBuf,
    /// The inode of the file.
    file: u64,
    connection: Connection,
    /// The liveness lock, if this connection belongs to an executor.
    liveness: Option<LivenessLock>,
    checkpoint: Checkpoint,
}

impl Sqlite {
    /// Opens the file. Creates it if there is none, and migrates it to this program's schema version.
    pub(crate) fn open(path: &Path, tables: &'static Tables) -> Result<Self, StoreError> {
        if let Some(folder) = path.parent() {
            let mut maker = fs::DirBuilder::new();
            maker.recursive(true).mode(0o700).create(folder).map_err(|error| io_error(tables, path, &error))?;
        }
        // Links are resolved, so that the files beside the history are found by every path.
        let path = &resolve_links(path).map_err(|error| io_error(tables, path, &error))?;
        let mut connection = connect(path, tables)?;
        let version = version(&connection).map_err(|error| open_error(tables, path, &error))?;
        migrations::check(version, tables.sqlite)?;
        if version < tables.sqlite.len() as u32 {
            let newest = tables.sqlite.len() as u32;
            migrate(&mut connection, newest, tables).map_err(|error| open_error(tables, path, &error))?;
        }
        let file = fs::metadata(path).map_err(|error| io_error(tables, path, &error))?.ino();
        let checkpoint = Checkpoint::default();
        checkpoint.watch(&mut connection).map_err(|error| open_error(tables, path, &error))?;
        Ok(Self { tables, path: path.to_owned(), file, connection, liveness: None, checkpoint })
    }

    /// Fails if the file was removed or replaced: records that were written now would not be found.
    fn check_in_place(&self) -> Result<(), StoreError> {
        match fs::metadata(&self.path) {
            Ok(file) if file.ino() == self.file => Ok(()),
            _ => {
                let (cannot, path) = (self.tables.cannot_use, self.path.display());
                Err(StoreError::Unavailable(format!("{cannot} `{path}`: the file was moved or deleted")))
            }
        }
    }
}

/// Returns the path of the file behind links, also if the file does not exist yet.
fn resolve_links(path: &Path) -> std::io::Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        found => return found,
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = fs::canonicalize(folder)?;
    match fs::read_link(path) {
        Ok(target) => resolve_links(&folder.join(target)),
        Err(_) => Ok(folder.join(path.file_name().unwrap_or_default())),
    }
}

fn connect(path: &Path, tables: &'static Tables) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // The arguments of calls are private; the files that SQLite puts beside the history get its mode. A file that
    // exists must not be opened here: closing it again would release SQLite's own locks on it.
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(io_error(tables, path, &error)),
        _ => {}
    }
    let is_new = fs::metadata(path).is_ok_and(|file| file.len() == 0);
    let connection = Connection::open_with_flags(path, flags).map_err(|error| open_error(tables, path, &error))?;
    let set = || -> rusqlite::Result<()> {
        connection.busy_timeout(tables.busy_timeout)?;
        connection.set_prepared_statement_cache_capacity(64);
        // Only a new file accepts this, which lets retention give free space back. On any other it would be a write.
        if is_new {
            connection.pragma_update(None, "auto_vacuum", "incremental")?;
        }
        connection.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(()))?;
        // Commits are on the disk, also if the machine stops.
        connection.pragma_update(None, "synchronous", "full")?;
        // Writers need the same few pages again: 4 MiB.
        connection.pragma_update(None, "cache_size", -4_096)?;
        // Commits do not wait for checkpoints; see `checkpoint`.
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
        connection.pragma_update(None, "journal_size_limit", 64 * 1024 * 1024)?;
        connection.pragma_update(None, "temp_store", "memory")
    };
    retry_while_busy(tables.busy_timeout, set)
        .and_then(|()| search::register_functions(&connection))
        .map_err(|error| open_error(tables, path, &error))?;
    Ok(connection)
}

/// Retries while another process holds the database. SQLite does not wait by itself when two processes switch a new
/// file to its WAL mode at once.
fn retry_while_busy(timeout: Duration, work: impl Fn() -> rusqlite::Result<()>) -> rusqlite::Result<()> {
    let until = Instant::now() + timeout;
    loop {
        match work() {
            Err(error)
                if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy) && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}

fn version(connection: &Connection) -> rusqlite::Result<u32> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

fn migrate(connection: &mut Connection, target: u32, tables: &Tables) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have migrated while we waited.
    let found = version(&transaction)?;
    for sql in migrations::path(found, target, tables.sqlite) {
        transaction.execute_batch(sql)?;
    }
    transaction.pragma_update(None, "application_id", tables.application_id)?;
    transaction.pragma_update(None, "user_version", target)?;
    failpoint::reach("migrate.changed");
    transaction.commit()
}

fn io_error(tables: &Tables, path: &Path, error: &std::io::Error) -> StoreError {
    StoreError::Unavailable(format!("{} `{}`: {error}", tables.cannot_use, path.display()))
}

fn open_error(tables: &Tables, path: &Path, error: &rusqlite::Error) -> StoreError {
    // On a full disk SQLite fails in several ways, some of which do not say why.
    let full = liveness::check_free_space(path, tables).err();
    full.unwrap_or_else(|| store_error(&format!("{} `{}`", tables.cannot_use, path.display()), error))
}

fn store_error(what: &str, error: &rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode;
    use rusqlite::ffi::{SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_ROWID, SQLITE_CONSTRAINT_UNIQUE};
    let message = format!("{what}: {error}");
    // A violated unique constraint does not go away by waiting.
    let is_there = [SQLITE_CONSTRAINT_PRIMARYKEY, SQLITE_CONSTRAINT_ROWID, SQLITE_CONSTRAINT_UNIQUE];
    match error.sqlite_error() {
        Some(cause) if matches!(cause.code, ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            StoreError::Damaged(message)
        }
        Some(cause) if is_there.contains(&cause.extended_code) => StoreError::Damaged(message),
        Some(cause) if cause.code == ErrorCode::DiskFull => StoreError::Full(message),
        _ => StoreError::Unavailable(message),
    }
}

impl Database for Sqlite {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    fn query(&mut self, sql: &str, values: &[Value], each: EachRow<'_>) -> Result<(), StoreError> {
        let failed = |error: &rusqlite::Error| store_error(self.tables.cannot_read, error);
        let mut statement = self.connection.prepare_cached(sql).map_err(|error| failed(&error))?;
        let mut rows = statement.query(rusqlite::params_from_iter(values)).map_err(|error| failed(&error))?;
        while let Some(row) = rows.next().map_err(|error| failed(&error))? {
            each(row)?;
        }
        Ok(())
    }

    fn query_uncached(&mut self, sql: &str, each: EachRow<'_>) -> Result<(), StoreError> {
        let failed = |error: &rusqlite::Error| store_error(self.tables.cannot_read, error);
        let mut statement = self.connection.prepare(sql).map_err(|error| failed(&error))?;
        let mut rows = statement.query([]).map_err(|error| failed(&error))?;
        while let Some(row) = rows.next().map_err(|error| failed(&error))? {
            each(row)?;
        }
        Ok(())
    }

    fn execute(&mut self, sql: &str, values: &[Value]) -> Result<u64, StoreError> {
        let run = || self.connection.prepare_cached(sql)?.execute(rusqlite::params_from_iter(values));
        run().map(|changed| changed as u64).map_err(|error| store_error(self.tables.cannot_write, &error))
    }

    fn in_transaction(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.execute("BEGIN IMMEDIATE", &[])?;
        let done = work(self).and_then(|()| self.execute("COMMIT", &[]).map(drop));
        match &done {
            Ok(()) => self.checkpoint.after_write(&self.path, &self.connection),
            Err(_) => drop(self.execute("ROLLBACK", &[])),
        }
        done
    }

    fn write(&mut self, instance: i64, project: &mut dyn FnMut(&Head) -> Changeset) -> Result<Changeset, StoreError> {
        self.check_in_place()?;
        let changeset = write::write(&mut self.connection, instance, project)?;
        self.checkpoint.after_write(&self.path, &self.connection);
        Ok(changeset)
    }

    fn lock_liveness(&mut self, instance: &str) -> Result<(), StoreError> {
        // A second lock of the same file would wait for the first.
        if self.liveness.is_none() {
            liveness::check_free_space(&self.path, self.tables)?;
            let lock = LivenessLock::acquire(&self.path, instance)
                .map_err(|error| io_error(self.tables, &self.path, &error))?;
            self.liveness = Some(lock);
        }
        Ok(())
    }

    fn unlock_liveness(&mut self) {
        if let Some(lock) = self.liveness.take() {
            lock.release();
        }
    }

    fn is_alive(&mut self, instance: &str) -> Result<bool, StoreError> {
        liveness::exists(&self.path, instance).map_err(|error| io_error(self.tables, &self.path, &error))
    }

    fn open_wal(&mut self, task_ttl: i64) -> Result<Option<Wal>, StoreError> {
        let wal = self.liveness.as_ref().map(|lock| lock.open_wal(&self.path, task_ttl)).transpose();
        wal.map_err(|error| io_error(self.tables, &self.path, &error))
    }

    fn take_orphaned_wals(&mut self, patience: Duration) -> Result<Vec<OrphanedWal>, StoreError> {
        liveness::take_orphaned_wals(&self.path, patience).map_err(|error| io_error(self.tables, &self.path, &error))
    }

    fn set_sync(&mut self, mode: SyncMode) -> Result<(), StoreError> {
        let level = match mode {
            SyncMode::Each => "full",
            SyncMode::Deferred => "normal",
        };
        let set = self.connection.pragma_update(None, "synchronous", level);
        set.map_err(|error| store_error(self.tables.cannot_write, &error))
    }

    fn heartbeat(&mut self, _: i64) -> Result<(), StoreError> {
        Ok(()) // the lock proves it
    }

    fn is_usable(&mut self) -> bool {
        self.check_in_place().is_ok()
    }

    fn reconnect(&mut self) -> Result<(), StoreError> {
        self.check_in_place()?;
        self.connection = connect(&self.path, self.tables)?;
        self.checkpoint.watch(&mut self.connection).map_err(|error| open_error(self.tables, &self.path, &error))
    }

    fn in_snapshot(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.execute("BEGIN", &[])?;
        let done = work(self);
        // Nothing was written, so there is nothing to lose.
        self.execute("ROLLBACK", &[])?;
        done
    }

    fn text_sources(
        &mut self,
        words: &TextSearch<'_>,
        first: usize,
    ) -> Result<(Vec<Vec<Source>>, Vec<Value>), StoreError> {
        let text = Value::from(words.text);
        if words.place == TextPlace::Results {
            let wanted = search::match_expression(&self.connection, words)
                .map_err(|error| store_error(self.tables.cannot_read, &error))?;
            let indexed = Source {
                from: "result_words CROSS JOIN tool_executions ON id = result_words.rowid".into(),
                id: "result_words.rowid",
                condition: format!("result_words MATCH ?{first}"),
            };
            return Ok((vec![vec![indexed]], vec![Value::Text(wanted)]));
        }
        let scanned = |condition: String| Source { from: "tool_executions".into(), id: "id", condition };
        if words.is_narrow {
            let condition = format!("completed_at IS NOT NULL AND has_words(?{first}, {CALL_TEXT})");
            return Ok((vec![vec![scanned(condition)]], vec![text]));
        }
        let wanted = search::match_expression(&self.connection, words)
            .map_err(|error| store_error(self.tables.cannot_read, &error))?;
        let indexed = Source {
            from: "words CROSS JOIN tool_executions ON id = words.rowid".into(),
            id: "words.rowid",
            condition: format!("words MATCH ?{}", first + 1),
        };
        let unindexed = scanned(format!(
            "id IN ({CLOSED_CALLS} AND seq > (SELECT words_seq FROM trail)) AND has_words(?{first}, {CALL_TEXT})"
        ));
        Ok((vec![vec![indexed, unindexed]], vec![text, Value::Text(wanted)]))
    }

    fn index_words(&mut self, at_least: u64) -> Result<u64, StoreError> {
        let mut left = 0;
        let waiting = one_int(self, "SELECT seq - words_seq FROM trail", &[])?.unwrap_or_default();
        if waiting < i64::try_from(at_least).unwrap_or(i64::MAX) {
            return Ok(left);
        }
        self.in_transaction(&mut |database| {
            let words_seq = one_int(database, "SELECT words_seq FROM trail", &[])?.unwrap_or_default();
            let seq = one_int(database, "SELECT seq FROM trail", &[])?.unwrap_or_default();
            let upto = seq.min(words_seq + INDEXED_AT_ONCE);
            let span = [Value::Int(words_seq), Value::Int(upto)];
            let sql = format!(
                "INSERT INTO words (rowid, text) SELECT id, {CALL_TEXT} FROM tool_executions
                 WHERE id IN ({CLOSED_CALLS} AND seq > ?1 AND seq <= ?2)"
            );
            database.execute(&sql, &span)?;
            database.execute("UPDATE trail SET words_seq = ?1", &span[1..])?;
            left = (seq - upto) as u64;
            Ok(())
        })?;
        Ok(left)
    }

    fn add_words(&mut self, place: TextPlace, words: &[(i64, String)]) -> Result<(), StoreError> {
        let sql = format!("INSERT INTO {} (rowid, text) VALUES (?1, ?2)", place.table());
        words.iter().try_for_each(|(id, text)| self.execute(&sql, &[(*id).into(), text.as_str().into()]).map(drop))
    }

    fn unindex_words(&mut self, up_to: i64) -> Result<(), StoreError> {
        for (words, rows) in [("words", "tool_executions"), ("result_words", "results")] {
            let gone = format!("rowid <= ?1 AND rowid NOT IN (SELECT id FROM {rows} WHERE id <= ?1)");
            self.execute(&format!("DELETE FROM {words} WHERE {gone}"), &[up_to.into()])?;
        }
        Ok(())
    }

    fn size(&mut self) -> Result<u64, StoreError> {
        let length = |path: PathBuf| fs::metadata(path).map_or(0, |file| file.len());
        Ok(length(self.path.clone()) + length(checkpoint::dash_wal_path(&self.path)))
    }

    fn rows_size(&mut self) -> Result<u64, StoreError> {
        let sql = "SELECT (page_count - freelist_count) * page_size
                   FROM pragma_page_count, pragma_freelist_count, pragma_page_size";
        Ok(one_int(self, sql, &[])?.unwrap_or_default() as u64)
    }

    fn migrate(&mut self, form: u32) -> Result<(), StoreError> {
        migrate(&mut self.connection, form, self.tables).map_err(|error| open_error(self.tables, &self.path, &error))
    }

    fn backup(&mut self, target: &Path) -> Result<(), StoreError> {
        let failed =
            |error: rusqlite::Error| StoreError::Unavailable(format!("cannot write `{}`: {error}", target.display()));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(target) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                return Err(StoreError::Query(format!("`{}` already exists", target.display())));
            }
            Err(error) => {
                return Err(StoreError::Unavailable(format!("cannot write `{}`: {error}", target.display())));
            }
            Ok(_) => {}
        }
        let mut copy = Connection::open_with_flags(target, OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(failed)?;
        let backup = rusqlite::backup::Backup::new(&self.connection, &mut copy).map_err(failed)?;
        // All at once: a backup in parts restarts after each write of another process, and no writer waits for a
        // reader.
        backup.run_to_completion(i32::MAX, Duration::ZERO, None).map_err(failed)
    }

    fn advance_counters(&mut self) -> Result<(), StoreError> {
        // SQLite numbers rows after the largest number, and the words came with the copy.
        self.execute("UPDATE trail SET words_seq = seq", &[]).map(drop)
    }

    fn release_space(&mut self) -> Result<(), StoreError> {
        let shrink = || {
            // Each row of the result is a page that was freed.
            self.connection.pragma_query(None, "incremental_vacuum", |_| Ok(()))?;
            self.connection.execute_batch("PRAGMA optimize")?;
            self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
        };
        shrink().map_err(|error| store_error("cannot shrink the history", &error))
    }
}

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Self::Null => ValueRef::Null,
            Self::Int(value) | Self::Time(value) => ValueRef::Integer(*value),
            Self::Real(value) => ValueRef::Real(*value),
            Self::Text(value) => ValueRef::Text(value.as_bytes()),
            Self::Bytes(value) => ValueRef::Blob(value),
        }))
    }
}

impl Row for rusqlite::Row<'_> {
    fn int(&self, column: usize) -> Result<i64, StoreError> {
        self.get(column).map_err(|error| unreadable(&error))
    }

    fn int_or_none(&self, column: usize) -> Result<Option<i64>, StoreError> {
        self.get(column).map_err(|error| unreadable(&error))
    }

    fn real_or_none(&self, column: usize) -> Result<Option<f64>, StoreError> {
        self.get(column).map_err(|error| unreadable(&error))
    }

    fn text(&self, column: usize) -> Result<&str, StoreError> {
        let value = self.get_ref(column).map_err(|error| unreadable(&error))?;
        value.as_str().map_err(|error| StoreError::Damaged(format!("a row of the history is not readable: {error}")))
    }

    fn text_or_none(&self, column: usize) -> Result<Option<&str>, StoreError> {
        let value = self.get_ref(column).map_err(|error| unreadable(&error))?;
        value
            .as_str_or_null()
            .map_err(|error| StoreError::Damaged(format!("a row of the history is not readable: {error}")))
    }

    fn flag(&self, column: usize) -> Result<bool, StoreError> {
        self.get(column).map_err(|error| unreadable(&error))
    }

    fn bytes(&self, column: usize) -> Result<&[u8], StoreError> {
        let value = self.get_ref(column).map_err(|error| unreadable(&error))?;
        value.as_blob().map_err(|error| StoreError::Damaged(format!("a row of the history is not readable: {error}")))
    }
}

fn unreadable(error: &rusqlite::Error) -> StoreError {
    store_error("a row of the history is not readable", error)
}

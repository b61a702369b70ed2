//! The history on a PostgreSQL server, where many machines write one trail.
//!
//! The driver is asynchronous and this crate is not. Each connection has a small runtime of its own, which runs while
//! we wait for an answer, up to a timeout: a server that hangs is treated like one that is gone. Calls from within
//! another runtime are served by a helper thread, because a runtime cannot block within another.

mod query_error;
mod server;
mod values;
mod write;

use std::collections::HashMap;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Statement};

use self::query_error::QueryError;
use self::server::{CONNECT_TIMEOUT, Server, error_text};
use crate::database::{Database, Dialect, EachRow, Source, Tables, TextPlace, TextSearch, Value, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Head;
use crate::migrations::{self, Migration, migrations};
use crate::projection::Changeset;

/// The number of latest records that are scanned for words before the full-text index is used.
const SCANNED_RECORDS: i64 = 50_000;
/// The timeout of a statement that an executor waits for.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(4);
/// The timeout of large operations.
const LONG_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// The time for which an executor counts as alive without its lock.
const ALIVE_WITHOUT_LOCK: Duration = Duration::from_secs(15);
/// The number of rows that are received before they are processed.
const ROWS_AT_ONCE: usize = 512;
/// Maximum number of prepared statements.
const STATEMENTS_MAX: usize = 64;
/// The number of the advisory lock for migrations: "wieldy" in ASCII.
const MIGRATION_LOCK: i64 = 0x7769_656c_6479;

pub(crate) const MIGRATIONS: &[Migration] = migrations!(
    "postgres":
    "0001_history",
    "0002_answers_tenant",
    "0003_claims_workspace",
    "0004_provider",
    "0005_metadata",
    "0006_sandboxes",
    "0007_results",
    "0008_result_words", "0009_notes",
);

/// The settings of every session. A server that would lose commits is told not to. The timeouts keep a stuck session
/// from blocking the others.
const SESSION_SETTINGS: &str = "
    SET client_min_messages = warning;
    SET default_transaction_isolation = 'read committed';
    SET lock_timeout = '3s';
    SET idle_in_transaction_session_timeout = '60s';
    SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
    SET jit = off;
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';";

/// A connection to a PostgreSQL server.
pub(crate) struct Postgres {
    tables: &'static Tables,
    server: Server,
    session: Session,
    /// The head of the trail when this connection last looked.
    head: Option<Head>,
    /// The time of the last reconnect, if there was one.
    reconnected: Option<Instant>,
    /// True if an executor waits for this connection.
    has_executor: bool,
    timeout: Duration,
}

/// Returns the address of a server, without its password.
pub(crate) fn redacted(url: &str) -> Result<String, StoreError> {
    Server::parse(url).map(|server| server.redacted())
}

impl Postgres {
    /// Connects, and migrates the tables to this program's schema version.
    pub(crate) fn open(url: &str, tables: &'static Tables) -> Result<Self, StoreError> {
        let server = Server::parse(url)?;
        let session = Session::open(&server, tables)?;
        let (head, reconnected, has_executor, timeout) = (None, None, false, LONG_TIMEOUT);
        let mut opened = Self { tables, server, session, head, reconnected, has_executor, timeout };
        let version = opened.version()?;
        migrations::check(version, tables.postgres)?;
        if version < tables.postgres.len() as u32 {
            opened.migrate(tables.postgres.len() as u32)?;
        }
        Ok(opened)
    }

    /// Returns true if the server has the tables.
    pub(crate) fn exists(url: &str, tables: &'static Tables) -> Result<bool, StoreError> {
        let server = Server::parse(url)?;
        let session = Session::open(&server, tables)?;
        let (head, reconnected, has_executor, timeout) = (None, None, false, STATEMENT_TIMEOUT);
        let mut opened = Self { tables, server, session, head, reconnected, has_executor, timeout };
        opened.version().map(|version| version > 0)
    }

    /// Limits the time of statements on this connection, for a caller that waits for them. Statements are planned for
    /// the values that they are run with.
    pub(crate) fn limit_time(&mut self) -> Result<(), StoreError> {
        self.batch("SET statement_timeout = '3500ms'; SET plan_cache_mode = force_custom_plan")?;
        self.timeout = STATEMENT_TIMEOUT;
        Ok(())
    }

    /// Returns the schema version of the tables; 0 if there are none.
    fn version(&mut self) -> Result<u32, StoreError> {
        let there = "SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = ?1 AND tablename = 'version'";
        let schema = self.tables.schema.into();
        if one_int(self, there, &[schema])? != Some(1) {
            return Ok(0);
        }
        let version = one_int(self, "SELECT version FROM version", &[])?;
        Ok(u32::try_from(version.unwrap_or_default()).unwrap_or(u32::MAX))
    }

    fn batch(&mut self, sql: &str) -> Result<(), StoreError> {
        let client = &self.session.client;
        let cannot = self.tables.cannot_write;
        self.session.wait(self.timeout, client.batch_execute(sql)).map_err(|failed| failed.into_error(cannot))
    }

    /// Runs `work` without the time limits for statements.
    fn without_time_limits<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if !self.has_executor {
            return work(self);
        }
        self.batch(LONG_SETTINGS)?;
        self.timeout = LONG_TIMEOUT;
        let done = work(self);
        self.timeout = STATEMENT_TIMEOUT;
        let restored = self.batch(SHORT_SETTINGS);
        done.and_then(|done| restored.map(|()| done))
    }
}

/// The settings for statements that an executor waits for. The server times out before we do, and reports it.
/// Statements are planned once, possibly while the tables are empty, when a full scan looks cheapest. So every row is
/// looked up by an index.
const SHORT_SETTINGS: &str =
    "SET statement_timeout = '3500ms'; SET lock_timeout = '3s'; SET plan_cache_mode = force_generic_plan;
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off";
/// The settings for large operations.
const LONG_SETTINGS: &str = "SET statement_timeout = 0; SET lock_timeout = '60s';
    RESET enable_seqscan; RESET enable_hashjoin; RESET enable_mergejoin";

/// The beginning of messages about the trail.
const WRITING: &str = "cannot write the history";

/// A connection and its runtime.
struct Session {
    runtime: Option<Runtime>,
    client: Client,
    /// The message with which the server ended the connection.
    closing_message: Arc<OnceLock<String>>,
    statements: HashMap<String, Statement>,
}

impl Session {
    fn open(server: &Server, tables: &Tables) -> Result<Self, StoreError> {
        let failed =
            |why: String| StoreError::Unavailable(format!("{} `{}`: {why}", tables.cannot_use, server.redacted()));
        let settings = format!("SET search_path = {}; {SESSION_SETTINGS}", tables.schema);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| failed(error.to_string()))?;
        let closing_message = Arc::new(OnceLock::new());
        let heard = Arc::clone(&closing_message);
        let connected = async {
            let connect = server.connect(move |why| drop(heard.set(why)));
            let client = tokio::time::timeout(CONNECT_TIMEOUT, connect)
                .await
                .unwrap_or_else(|_| Err(format!("the server did not answer within {} s", CONNECT_TIMEOUT.as_secs())))?;
            let encoding = tokio::time::timeout(CONNECT_TIMEOUT, async {
                client.batch_execute(&settings).await?;
                let row = client.query_one("SELECT current_setting('server_encoding')", &[]).await?;
                row.try_get::<_, String>(0)
            });
            let encoding = encoding.await.map_err(|_| "the server did not answer in time".to_owned())?;
            Ok((client, encoding.map_err(error_text)?))
        };
        let connected: Result<(Client, String), String> = block_on(&runtime, connected);
        match connected {
            Ok((client, encoding)) if encoding == "UTF8" => {
                Ok(Self { runtime: Some(runtime), client, closing_message, statements: HashMap::new() })
            }
            Ok((_, encoding)) => {
                runtime.shutdown_background();
                Err(failed(format!("the database has the encoding {encoding}, and a history needs UTF8")))
            }
            Err(why) => {
                runtime.shutdown_background();
                Err(failed(why))
            }
        }
    }

    /// Waits for an answer, at most for `timeout`.
    fn wait<T: Send>(
        &self,
        timeout: Duration,
        work: impl Future<Output = Result<T, tokio_postgres::Error>> + Send,
    ) -> Result<T, QueryError> {
        let Some(runtime) = &self.runtime else {
            return Err(QueryError::Disconnected("the connection is closed".into()));
        };
        match block_on(runtime, async { tokio::time::timeout(timeout, work).await }) {
            Ok(Ok(answer)) => Ok(answer),
            // The server's last message explains why the connection is closed.
            Ok(Err(error)) if error.is_closed() => {
                let why = self.closing_message.get().map_or("the server closed the connection", String::as_str);
                Err(QueryError::Disconnected(why.to_owned()))
            }
            Ok(Err(error)) => Err(QueryError::Server(error)),
            Err(_) => Err(QueryError::Timeout(timeout)),
        }
    }

    /// Returns the prepared statement.
    fn statement(&mut self, sql: &str) -> Result<Statement, QueryError> {
        if let Some(statement) = self.statements.get(sql) {
            return Ok(statement.clone());
        }
        if self.statements.len() >= STATEMENTS_MAX {
            self.statements.clear();
        }
        let statement = self.wait(STATEMENT_TIMEOUT, self.client.prepare(&sql.replace('?', "$")))?;
        self.statements.insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.statements.clear();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background(); // does not block, because this may be within another runtime
        }
    }
}

/// Blocks on `work`, also within another runtime.
fn block_on<T: Send>(runtime: &Runtime, work: impl Future<Output = T> + Send) -> T {
    if Handle::try_current().is_err() {
        return runtime.block_on(work);
    }
    let waited = std::thread::scope(|scope| scope.spawn(|| runtime.block_on(work)).join());
    waited.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn borrowed(values: &[Value]) -> Vec<&(dyn ToSql + Sync)> {
    values.iter().map(|value| value as &(dyn ToSql + Sync)).collect()
}

impl Database for Postgres {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    fn query(&mut self, sql: &str, values: &[Value], each: EachRow<'_>) -> Result<(), StoreError> {
        let cannot = self.tables.cannot_read;
        let failed = |failed: QueryError| failed.into_error(cannot);
        let statement = self.session.statement(sql).map_err(failed)?;
        let session = &self.session;
        let rows = session.client.query_raw(&statement, borrowed(values));
        let mut rows = pin!(session.wait(self.timeout, rows).map_err(failed)?);
        loop {
            // Rows are processed outside of the runtime, because the callback may query another database.
            let taken = async {
                let mut taken = Vec::new();
                while taken.len() < ROWS_AT_ONCE {
                    match rows.next().await {
                        Some(row) => taken.push(row?),
                        None => return Ok((taken, true)),
                    }
                }
                Ok((taken, false))
            };
            let (taken, is_last) = session.wait(self.timeout, taken).map_err(failed)?;
            taken.iter().try_for_each(|row| each(row))?;
            if is_last {
                return Ok(());
            }
        }
    }

    fn query_uncached(&mut self, sql: &str, each: EachRow<'_>) -> Result<(), StoreError> {
        let session = &self.session;
        let rows = session.wait(self.timeout, session.client.query(sql, &[]));
        rows.map_err(|failed| failed.into_error(self.tables.cannot_read))?.iter().try_for_each(|row| each(row))
    }

    fn execute(&mut self, sql: &str, values: &[Value]) -> Result<u64, StoreError> {
        let cannot = self.tables.cannot_write;
        let failed = |failed: QueryError| failed.into_error(cannot);
        let statement = self.session.statement(sql).map_err(failed)?;
        let session = &self.session;
        session.wait(self.timeout, session.client.execute_raw(&statement, borrowed(values))).map_err(failed)
    }

    fn in_transaction(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.without_time_limits(|this| {
            this.batch("BEGIN")?;
            let done = work(this).and_then(|()| this.batch("COMMIT"));
            if done.is_err() {
                let _ = this.batch("ROLLBACK");
            }
            done
        })
    }

    fn write(&mut self, instance: i64, project: &mut dyn FnMut(&Head) -> Changeset) -> Result<Changeset, StoreError> {
        write::write(self, instance, project)
    }

    fn lock_liveness(&mut self, instance: &str) -> Result<(), StoreError> {
        // The lock is shared, because a session that this executor lost may hold it for a while.
        self.execute("SELECT pg_advisory_lock_shared(?1)", &[liveness_key(instance).into()])?;
        self.has_executor = true;
        self.timeout = STATEMENT_TIMEOUT;
        self.batch(SHORT_SETTINGS)
    }

    /// Returns true if the instance holds its lock. All locks are gone for a moment when the server restarts, and those
    /// of other machines when a network comes back. So an instance also counts as alive for a while after it was last
    /// seen, after the server started and after this connection was reopened. A process of this machine that has exited
    /// is dead at once.
    fn is_alive(&mut self, instance: &str) -> Result<bool, StoreError> {
        let sql = "SELECT host, process, NOT pg_try_advisory_xact_lock(?2),
                     greatest(seen_at, pg_postmaster_start_time()) > clock_timestamp() - make_interval(secs => ?3)
                   FROM instances WHERE id = ?1";
        let values = [instance.into(), liveness_key(instance).into(), Value::Real(ALIVE_WITHOUT_LOCK.as_secs_f64())];
        let asked = Instant::now();
        loop {
            let (mut is_gone, mut is_held, mut is_recent) = (false, false, false);
            self.query(sql, &values, &mut |row| {
                is_gone = row.text(0)? == crate::store::host() && has_exited(row.int(1)?);
                (is_held, is_recent) = (row.flag(2)?, row.flag(3)?);
                Ok(())
            })?;
            if is_held && is_gone && asked.elapsed() < Duration::from_secs(1) {
                // The server has not noticed it yet.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            let may_return = is_recent || self.reconnected.is_some_and(|since| since.elapsed() < ALIVE_WITHOUT_LOCK);
            return Ok(is_held || may_return && !is_gone);
        }
    }

    fn heartbeat(&mut self, instance: i64) -> Result<(), StoreError> {
        let sql = "UPDATE instances SET seen_at = clock_timestamp() WHERE number = ?1 AND ended_at IS NULL";
        match self.execute(sql, &[instance.into()])? {
            0 => Err(StoreError::TakenForDead),
            _ => Ok(()),
        }
    }

    fn is_usable(&mut self) -> bool {
        self.session.wait(CONNECT_TIMEOUT, self.session.client.simple_query("")).is_ok()
    }

    fn reconnect(&mut self) -> Result<(), StoreError> {
        self.session = Session::open(&self.server, self.tables)?;
        self.head = None;
        self.reconnected = Some(Instant::now());
        let version = self.version()?;
        migrations::check(version, self.tables.postgres)
    }

    fn in_snapshot(
        &mut self,
        work: &mut dyn FnMut(&mut dyn Database) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.without_time_limits(|this| {
            this.batch("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")?;
            let done = work(this);
            // Nothing was written, so there is nothing to lose.
            let ended = this.batch("ROLLBACK");
            done.and(ended)
        })
    }

    fn text_sources(
        &mut self,
        words: &TextSearch<'_>,
        first: usize,
    ) -> Result<(Vec<Vec<Source>>, Vec<Value>), StoreError> {
        // Words have only letters and digits, so nothing in them is an operator. Each may be the beginning of a word.
        let wanted = values::words(words.text).map(|word| format!("{word}:*")).collect::<Vec<_>>().join(" & ");
        let query = format!("?{first}::text::tsquery");
        let place = words.place.table();
        let from = match words.place {
            TextPlace::Calls => "tool_executions JOIN words USING (id)",
            TextPlace::Results => "tool_executions JOIN result_words USING (id)",
        };
        // The server cannot know which words are common. Common ones are found by a scan of the latest calls. For the
        // others all calls are collected, because there is no index in this order.
        let last = match words.before {
            Some(place) => format!("?{place}::bigint"),
            None => "(SELECT max(id) FROM tool_executions)".into(),
        };
        // A subquery is evaluated once, and not for every row.
        let latest = format!("{place}.words @@ (SELECT {query}) AND {place}.id >= {last} - {SCANNED_RECORDS}");
        let latest = Source { from: from.into(), id: "id", condition: latest };
        let all = Source { from: from.into(), id: "id + 0", condition: format!("{place}.words @@ {query}") };
        Ok((vec![vec![latest], vec![all]], vec![Value::Text(wanted)]))
    }

    fn add_words(&mut self, place: TextPlace, words: &[(i64, String)]) -> Result<(), StoreError> {
        let sql = format!("INSERT INTO {} (id, words) VALUES (?1, ?2::text::tsvector)", place.table());
        words.iter().try_for_each(|(id, text)| {
            let text = Value::Text(values::words(text).collect::<Vec<_>>().join(" "));
            self.execute(&sql, &[(*id).into(), text]).map(drop)
        })
    }

    fn unindex_words(&mut self, up_to: i64) -> Result<(), StoreError> {
        let gone = "id <= ?1 AND NOT EXISTS (SELECT FROM";
        self.without_time_limits(|this| {
            for (words, rows) in [("words", "tool_executions"), ("result_words", "results")] {
                let sql = format!("DELETE FROM {words} w WHERE {gone} {rows} r WHERE r.id = w.id)");
                this.execute(&sql, &[up_to.into()])?;
            }
            Ok(())
        })
    }

    /// Returns the size without the free space within the server's files.
    fn size(&mut self) -> Result<u64, StoreError> {
        self.rows_size()
    }

    /// Returns the approximate size of the rows that exist.
    fn rows_size(&mut self) -> Result<u64, StoreError> {
        let files = "SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c
                     WHERE c.relnamespace = 'agent_tools'::regnamespace AND c.relkind = 'r'";
        let files = one_int(self, files, &[])?.unwrap_or_default();
        // A row with its indexes and words takes about twice the size of its columns.
        let rows = "SELECT (2 * (
              (SELECT count(*) FROM events) * (SELECT coalesce(avg(pg_column_size(e.*)), 0) FROM
                (SELECT * FROM events ORDER BY seq DESC LIMIT 1000) e)
            + (SELECT count(*) FROM results) * (SELECT coalesce(avg(pg_column_size(r.*)), 0) FROM
                (SELECT * FROM results ORDER BY id DESC LIMIT 1000) r) / 2
            + (SELECT count(*) FROM tool_executions) * (SELECT coalesce(avg(pg_column_size(t.*)), 0) FROM
                (SELECT * FROM tool_executions ORDER BY id DESC LIMIT 1000) t)))::bigint";
        let rows = one_int(self, rows, &[])?.unwrap_or_default();
        Ok(files.min(rows) as u64)
    }

    fn backup(&mut self, _: &Path) -> Result<(), StoreError> {
        let why = "a history on a server is backed up by the server's own means: `pg_dump --schema=agent_tools`";
        Err(StoreError::Query(why.into()))
    }

    fn advance_counters(&mut self) -> Result<(), StoreError> {
        let sql = "SELECT setval(pg_get_serial_sequence('instances', 'number'), max(number)) FROM instances";
        self.execute(sql, &[]).map(drop)
    }

    fn release_space(&mut self) -> Result<(), StoreError> {
        let tables = ["events", "tool_executions", "results", "words", "result_words", "answers", "heads", "tallies"];
        self.without_time_limits(|this| {
            tables.iter().try_for_each(|table| this.batch(&format!("VACUUM (ANALYZE) {table}")))
        })
    }

    fn migrate(&mut self, target: u32) -> Result<(), StoreError> {
        self.without_time_limits(|this| {
            this.batch("BEGIN; SET LOCAL lock_timeout = '60s'")?;
            let mut change = || {
                // Programs that start at the same time take turns.
                this.batch(&format!("SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))?;
                let found = this.version()?;
                migrations::check(found, this.tables.postgres)?;
                if found == 0 {
                    let schema = this.tables.schema;
                    this.batch(&format!(
                        "CREATE SCHEMA IF NOT EXISTS {schema};
                         CREATE TABLE IF NOT EXISTS version (one bigint PRIMARY KEY CHECK (one = 1), version bigint NOT NULL);
                         INSERT INTO version VALUES (1, 0) ON CONFLICT DO NOTHING"
                    ))?;
                }
                for sql in migrations::path(found, target, this.tables.postgres) {
                    this.batch(sql)?;
                }
                this.batch(&format!("UPDATE version SET version = {target}"))?;
                failpoint::reach("migrate.changed");
                this.batch("COMMIT")
            };
            let done = change();
            if done.is_err() {
                let _ = this.batch("ROLLBACK");
            }
            // Statements that were prepared for the old schema are useless.
            this.session.statements.clear();
            done
        })
    }
}

/// Returns the number of an executor's liveness lock.
fn liveness_key(instance: &str) -> i64 {
    let hash = blake3::hash(format!("wieldy.instance.{instance}").as_bytes());
    let bytes = hash.as_bytes().first_chunk::<8>().copied().unwrap_or_default();
    i64::from_le_bytes(bytes)
}

/// Returns true if a process of this machine has exited.
fn has_exited(process: i64) -> bool {
    let Some(pid) = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw) else { return false };
    if rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
        return true;
    }
    // A zombie has exited, too.
    let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X']))
}

//! A history to test with, in a file or on the server that `cargo xtask test` starts, and an executor that writes it.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use wieldy_core::{Executor, ExecutorBuilder, SharedTool};
use wieldy_store::{Address, JournalOptions, Store, StoreJournal};

/// Makes two tests of each function: one with SQLite, one with PostgreSQL.
macro_rules! on_each_database {
    ($($test:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(crate::world::TestHistory::sqlite()).await;
            })*
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                if let Some(history) = crate::world::TestHistory::postgres() {
                    super::$test(history).await;
                }
            })*
        }
    };
}

/// The address of a history that no other test uses.
pub(crate) struct TestHistory {
    pub(crate) address: Address,
    /// A folder for other files of the test.
    pub(crate) folder: TempDir,
    /// The server's address and the name of the database on it, which is dropped in the end.
    database: Option<(String, String)>,
}

impl TestHistory {
    pub(crate) fn sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Sqlite(folder.path().join("history.db"));
        Self { address, folder, database: None }
    }

    /// Creates a database on the shared server. Returns `None` and prints a message if there is no server.
    pub(crate) fn postgres() -> Option<Self> {
        let server = shared_server()?;
        let name = format!("test_{}", uuid::Uuid::now_v7().simple());
        sql(&server, &format!("CREATE DATABASE {name}"));
        let (base, _) = server.rsplit_once('/').unwrap();
        let address = format!("{base}/{name}").parse().unwrap();
        Some(Self { address, folder: tempfile::tempdir().unwrap(), database: Some((server, name)) })
    }

    pub(crate) fn store(&self) -> Store {
        Store::open(&self.address).unwrap()
    }

    /// Returns a new history of the same kind.
    pub(crate) fn another(&self) -> Self {
        if self.is_postgres() { Self::postgres().unwrap() } else { Self::sqlite() }
    }

    /// Returns the address of the same database through another port of this machine.
    pub(crate) fn through(&self, port: u16) -> Address {
        let url = self.url();
        let (head, rest) = url.split_once("@127.0.0.1:").unwrap();
        let (_, name) = rest.split_once('/').unwrap();
        format!("{head}@127.0.0.1:{port}/{name}").parse().unwrap()
    }

    /// Returns the address as text, for another process.
    pub(crate) fn url(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn is_postgres(&self) -> bool {
        matches!(self.address, Address::Postgres(_))
    }

    pub(crate) fn store_again(&self) -> Result<Store, wieldy_store::StoreError> {
        Store::open(&self.address)
    }

    pub(crate) fn options(&self) -> JournalOptions {
        JournalOptions { key: Some(self.folder.path().join("audit.key")), ..JournalOptions::default() }
    }

    /// Returns an executor that writes here.
    pub(crate) fn executor(&self, tools: impl IntoIterator<Item = SharedTool>) -> LiveExecutor {
        self.executor_with(tools, &self.options(), |_| {})
    }

    pub(crate) fn executor_with(
        &self,
        tools: impl IntoIterator<Item = SharedTool>,
        options: &JournalOptions,
        change: impl FnOnce(&mut ExecutorBuilder),
    ) -> LiveExecutor {
        let journal = Arc::new(self.store().journal(options).unwrap());
        let mut builder = Executor::builder().tools(tools);
        builder.journal = Arc::clone(&journal) as _;
        change(&mut builder);
        LiveExecutor { executor: builder.build().unwrap(), journal }
    }

    /// Asserts that the history is whole.
    pub(crate) fn check(&self) -> wieldy_store::Verdict {
        let verdict = self.store().verify(&[], None, &mut |_| {}).unwrap();
        assert_eq!(verdict.problem, None, "{verdict:?}");
        verdict
    }

    /// Runs statements behind the program's back and returns the rows, as text.
    pub(crate) fn sql(&self, text: &str) -> Vec<Vec<String>> {
        match &self.address {
            Address::Sqlite(path) => sqlite_rows(path, text),
            Address::Postgres(url) => sql(url, &format!("SET search_path = agent_tools; {text}")),
            _ => unreachable!("there are no others"),
        }
    }

    /// Does the same with the threads beside the history.
    pub(crate) fn threads_sql(&self, text: &str) -> Vec<Vec<String>> {
        match self.address.of_threads() {
            Address::Sqlite(path) => sqlite_rows(&path, text),
            Address::Postgres(url) => sql(&url, &format!("SET search_path = agent_threads; {text}")),
            _ => unreachable!("there are no others"),
        }
    }
}

impl Drop for TestHistory {
    fn drop(&mut self) {
        if let Some((server, name)) = &self.database {
            sql(server, &format!("DROP DATABASE {name} WITH (FORCE)"));
        }
    }
}

fn sqlite_rows(path: &Path, text: &str) -> Vec<Vec<String>> {
    let connection = rusqlite::Connection::open(path).unwrap();
    let mut statement = connection.prepare(text).unwrap();
    let width = statement.column_count();
    let mut rows = statement.query([]).unwrap();
    let mut found = Vec::new();
    while let Some(row) = rows.next().unwrap() {
        let value = |at| format!("{:?}", row.get::<_, rusqlite::types::Value>(at).unwrap());
        found.push((0..width).map(value).collect());
    }
    found
}

/// Returns the address of the shared server.
pub(crate) fn shared_server() -> Option<String> {
    let server = std::env::var("WIELDY_TEST_POSTGRES").ok();
    if server.is_none() {
        assert!(std::env::var("CI").is_err(), "CI must have a PostgreSQL server to test with");
        wieldy_testkit::skip("there is no PostgreSQL server; `cargo xtask postgres -- cargo nextest run` starts one");
    }
    server
}

/// Runs statements on a server and returns the rows, as text.
pub(crate) fn sql(url: &str, text: &str) -> Vec<Vec<String>> {
    let (url, text) = (url.to_owned(), text.to_owned());
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            let rows = client.simple_query(&text).await.unwrap();
            let rows = rows.into_iter().filter_map(|message| match message {
                tokio_postgres::SimpleQueryMessage::Row(row) => Some(row),
                _ => None,
            });
            rows.map(|row| (0..row.len()).map(|at| row.get(at).unwrap_or("NULL").to_owned()).collect()).collect()
        })
    };
    std::thread::spawn(run).join().unwrap()
}

/// Returns an executor that keeps its journal in `store`.
pub(crate) fn executor(store: &Store, tools: impl IntoIterator<Item = SharedTool>) -> (Executor, Arc<StoreJournal>) {
    let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
    let mut builder = Executor::builder().tools(tools);
    builder.journal = Arc::clone(&journal) as _;
    (builder.build().unwrap(), journal)
}

/// An executor and its journal.
pub(crate) struct LiveExecutor {
    pub(crate) executor: Executor,
    pub(crate) journal: Arc<StoreJournal>,
}

/// Waits until a condition holds and returns how long that took.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) -> Duration {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < Duration::from_secs(60), "waited for long: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    began.elapsed()
}

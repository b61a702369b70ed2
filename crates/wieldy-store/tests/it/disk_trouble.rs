//! Trouble with the disk: no unrecorded call runs, running calls go on, and the service recovers by itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use wieldy_core::{Call, Caller, Code, Status, ToolSpec};
use wieldy_store::{Address, Query, Store, StoreError};
use wieldy_testkit::{Act, Puppet, Strings};

use crate::world::{LiveExecutor, TestHistory, until};

/// A small file system in memory.
struct SmallDisk {
    folder: PathBuf,
}

impl SmallDisk {
    fn mount(folder: &Path, megabytes: u32) -> Self {
        let disk = Self { folder: folder.to_owned() };
        disk.run(&["mount", "-t", "tmpfs", "-o", &format!("size={megabytes}m,mode=700"), "tmpfs"]);
        disk
    }

    fn run(&self, command: &[&str]) {
        let done = Command::new(command[0]).args(&command[1..]).arg(&self.folder).status().unwrap();
        assert!(done.success(), "{command:?}: tests of disks need root");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        self.run(&["umount", "-l"]);
    }
}

/// Returns an executor with a tool that writes at once and one that waits to be stopped, and a running call of the
/// latter.
async fn busy(history: &TestHistory) -> (LiveExecutor, Arc<Strings>, wieldy_core::ExecutionId) {
    let (write, written) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let (wait, waiting) = Puppet::new(ToolSpec::new("wait", ""), [Act::PrintAndWait("printed")]);
    let living = history.executor([write, wait]);
    let running = living.executor.spawn(Call::new("wait", json!({})));
    while waiting.now() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(living.executor.call(Call::new("write", json!({"n": 1}))).await.is_success());
    living.journal.flush().await.unwrap();
    (living, written, running)
}

/// Asserts the promises during and after any trouble.
async fn check_promises(history: &TestHistory, begin: impl AsyncFnOnce(), what: &str, end: impl AsyncFnOnce()) {
    let (living, written, running) = busy(history).await;
    begin().await;
    // Until the trouble is known, the log may accept records that the history cannot: then the call is durable and may
    // run.
    let first = living.executor.call(Call::new("write", json!({"n": 2, "text": "x".repeat(10_000)}))).await;
    let ran = 1 + usize::from(first.is_success());
    assert_eq!(
        (first.error.map_or(Code::JournalFailed, |error| error.code), written.runs()),
        (Code::JournalFailed, ran)
    );
    until("the trouble is known", async || living.journal.failure().is_some()).await;
    let refused = living.executor.call(Call::new("write", json!({"n": 3}))).await;
    let error = refused.error.expect("nothing runs that cannot be recorded");
    assert_eq!((error.code, written.runs()), (Code::JournalFailed, ran), "{error:?}");
    assert!(error.message.contains(what), "{}", error.message);
    // The running call goes on, and its caller gets the answer.
    living.executor.cancel(running, &Caller::local());
    let told = living.executor.wait(running, &Caller::local()).await.unwrap();
    assert_eq!((told.status, told.text()), (Status::Cancelled, "printed".to_owned()));
    end().await;
    let began = Instant::now();
    while living.journal.failure().is_some() {
        assert!(began.elapsed() < Duration::from_secs(5), "it comes back by itself: {:?}", living.journal.failure());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(living.executor.call(Call::new("write", json!({"n": 4}))).await.is_success());
    living.journal.flush().await.unwrap();
    drop(living);
    let rows = history.store().search(&Query::default(), 99).unwrap().executions;
    let told: Vec<(String, String)> = rows.into_iter().map(|row| (row.tool, row.status)).collect();
    let expected =
        [("write", "success"), ("write", first.status.as_str()), ("write", "success"), ("wait", "cancelled")];
    assert_eq!(told, expected.map(|(tool, status)| (tool.to_owned(), status.to_owned())), "nothing is lost or doubled");
    history.check();
}

fn on_disk() -> (TestHistory, SmallDisk) {
    let history = TestHistory::sqlite();
    let disk = SmallDisk::mount(history.folder.path(), 8);
    (history, disk)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk() {
    let (history, _disk) = on_disk();
    let filler = history.folder.path().join("filler");
    let fill = async || {
        let _ = fs::write(&filler, vec![0; 8 << 20]);
    };
    check_promises(&history, fill, "disk is full", async || fs::remove_file(&filler).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_was_moved_away() {
    let history = TestHistory::sqlite();
    let path = history.folder.path().join("history.db");
    let moved = history.folder.path().join("moved.db");
    let begin = async || {
        for end in ["", "-wal", "-shm"] {
            fs::rename(format!("{}{end}", path.display()), format!("{}{end}", moved.display())).unwrap();
        }
    };
    let end = async || {
        for end in ["", "-wal", "-shm"] {
            fs::rename(format!("{}{end}", moved.display()), format!("{}{end}", path.display())).unwrap();
        }
    };
    check_promises(&history, begin, "was moved or deleted", end).await;
}

/// Immutable files, even for open descriptors, as on a disk with an I/O error. A read-only mount would be closer to
/// that, but a file system with open files cannot be remounted.
struct ImmutableFiles(Vec<PathBuf>);

impl ImmutableFiles {
    /// Makes all files immutable, except the one that SQLite shares between processes in memory.
    fn fix(folder: &Path) -> Self {
        let fixed = Self(["history.db", "history.db-wal", ""].map(|name| folder.join(name)).to_vec());
        fixed.change("+i");
        fixed
    }

    fn change(&self, how: &str) {
        let done = Command::new("chattr").arg(how).args(&self.0).status().unwrap();
        assert!(done.success(), "chattr {how}: tests of disks need root");
    }
}

impl Drop for ImmutableFiles {
    fn drop(&mut self) {
        self.change("-i");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_written_for_a_while() {
    let history = TestHistory::sqlite();
    let fixed: std::cell::RefCell<Option<ImmutableFiles>> = Default::default();
    let begin = async || *fixed.borrow_mut() = Some(ImmutableFiles::fix(history.folder.path()));
    check_promises(&history, begin, "disk I/O error", async || drop(fixed.borrow_mut().take())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_locked() {
    let history = TestHistory::sqlite();
    let path = history.folder.path().join("history.db");
    let held: std::cell::RefCell<Option<rusqlite::Connection>> = Default::default();
    let begin = async || {
        let connection = rusqlite::Connection::open(&path).unwrap();
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        *held.borrow_mut() = Some(connection);
    };
    check_promises(&history, begin, "database is locked", async || drop(held.borrow_mut().take())).await;
}

#[test]
fn other_files_are_reported_and_left_alone() {
    let history = TestHistory::sqlite();
    let path = history.folder.path().join("history.db");
    fs::write(&path, "a letter to grandmother, quite long enough not to be taken for an empty file").unwrap();
    let told = Store::open(&history.address).err().unwrap();
    assert!(matches!(&told, StoreError::Damaged(message) if message.contains("not a database")), "{told:?}");
    assert!(fs::read_to_string(&path).unwrap().starts_with("a letter to grandmother"));

    let folder = history.folder.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let told = Store::open(&Address::Sqlite(folder)).err().unwrap();
    assert!(told.to_string().contains("unable to open database file"), "{told}");
    let under_a_file = path.join("history.db");
    let told = Store::open(&Address::Sqlite(under_a_file)).err().unwrap();
    assert!(told.to_string().starts_with("cannot use the history"), "{told}");
}

#[test]
fn a_newer_schema_is_refused_and_an_older_one_is_migrated() {
    let history = TestHistory::sqlite();
    let path = history.folder.path().join("history.db");
    drop(history.store());
    let set = |version: u32| {
        let connection = rusqlite::Connection::open(&path).unwrap();
        connection.pragma_update(None, "user_version", version).unwrap();
    };
    set(99);
    let told = Store::open(&history.address).err().unwrap();
    assert_eq!(told, StoreError::Newer { found: 99, known: 9 });
    assert_eq!(told.to_string(), "the history has schema version 99, and this program supports versions up to 9");
    set(9);
    history.store().migrate(0).unwrap();
    let tables = || {
        let connection = rusqlite::Connection::open(&path).unwrap();
        let sql = "SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'";
        connection.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(tables(), 0, "nothing is left");
    drop(history.store());
    assert!(tables() > 8);
}

#[tokio::test]
async fn a_damaged_history_is_noticed() {
    let history = TestHistory::sqlite();
    let (living, ..) = busy(&history).await;
    let running = living.executor.call(Call::new("write", json!({"text": "y".repeat(100_000)}))).await;
    assert!(running.is_success());
    living.journal.abandon();
    std::mem::forget(living);
    let path = history.folder.path().join("history.db");
    rusqlite::Connection::open(&path).unwrap().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let page = bytes.len() - 3 * 4096;
    bytes[4096..page].fill(0xa5);
    fs::write(&path, bytes).unwrap();
    let told = history.store_again().and_then(|store| store.verify(&[], None, &mut |_| {}).map(drop)).unwrap_err();
    assert!(matches!(told, StoreError::Damaged(_)), "{told:?}");
}

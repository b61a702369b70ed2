//! The write-ahead log of an executor: calls are answered before they are committed, and found after any interruption.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Notify;
use wieldy_core::{Call, Caller, Durability, Options, Outcome, Run, SharedTool, ToolResult, ToolSpec, tool};
use wieldy_store::{JournalOptions, Query, Store};
use wieldy_testkit::{Act, Puppet};

use crate::world::{LiveExecutor, TestHistory, until};

/// Returns an executor with the durability `Strict`.
fn strict(history: &TestHistory) -> LiveExecutor {
    strict_with(history, &history.options())
}

fn strict_with(history: &TestHistory, options: &JournalOptions) -> LiveExecutor {
    let tools = [Puppet::writing("write", Act::Echo), Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]).0];
    history.executor_with(tools, options, |builder| builder.durability = Durability::Strict)
}

/// Holds the write lock of the database, so that no executor can commit.
fn hold_write_lock(history: &TestHistory) -> rusqlite::Connection {
    let holder = rusqlite::Connection::open(history.folder.path().join("history.db")).unwrap();
    holder.busy_timeout(Duration::from_secs(10)).unwrap();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    holder
}

/// Makes calls that are answered but not committed, and abandons the executor like a killed process.
async fn answer_and_abandon(history: &TestHistory, count: usize) -> Vec<ToolResult> {
    let living = strict(history);
    assert!(living.executor.call(Call::new("write", json!({"n": 0}))).await.is_success());
    living.journal.flush().await.unwrap();
    let holder = hold_write_lock(history);
    let mut told = Vec::new();
    for n in 1..=count {
        told.push(living.executor.call(Call::new("write", json!({"n": n}))).await);
    }
    abandon(living, holder).await;
    assert!(told.iter().all(|result| result.is_success()), "{told:?}");
    assert_eq!(rows(history), 1, "the others are in the log alone");
    told
}

async fn abandon(living: LiveExecutor, holder: rusqlite::Connection) {
    let journal = living.journal.clone();
    tokio::task::spawn_blocking(move || journal.abandon()).await.unwrap();
    std::mem::forget(living);
    drop(holder);
}

/// Returns the number of committed calls.
fn rows(history: &TestHistory) -> i64 {
    let connection = rusqlite::Connection::open(history.folder.path().join("history.db")).unwrap();
    connection.query_row("SELECT count(*) FROM tool_executions", [], |row| row.get(0)).unwrap()
}

/// Returns the files in the folder of the logs.
fn logs(history: &TestHistory) -> Vec<PathBuf> {
    let folder = fs::read_dir(history.folder.path().join("history.db.instances")).unwrap();
    folder.map(|file| file.unwrap().path()).collect()
}

/// Replaces the history with a backup.
fn restore_backup(history: &TestHistory, backup: &Path) {
    for end in ["-wal", "-shm"] {
        let _ = fs::remove_file(history.folder.path().join(format!("history.db{end}")));
    }
    fs::rename(backup, history.folder.path().join("history.db")).unwrap();
}

fn assert_found(store: &Store, told: &[ToolResult]) {
    for result in told {
        let (call, events) = store.show(result.execution_id).unwrap().expect("answered records are there");
        assert_eq!((call.status.as_str(), events.len()), ("success", 3));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answered_calls_are_found_though_their_executor_never_committed_them() {
    let history = TestHistory::sqlite();
    let told = answer_and_abandon(&history, 30).await;
    // Opening the history for a query commits the log, too.
    assert_found(&history.store(), &told);
    assert_eq!(logs(&history), [] as [PathBuf; 0]);
    assert_eq!((rows(&history), history.check().open), (31, 0));
    drop(history.executor([]));
    assert_eq!(history.check().executions, 31);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_open_in_the_log_alone_ends_as_unknown_and_its_key_is_known() {
    let history = TestHistory::sqlite();
    let options = Options { idempotency_key: Some("k1".into()), ..Options::default() };
    let keyed = || Call::new("slow", json!({})).with(options.clone());
    let go = Arc::new(Notify::new());
    let goes = Arc::clone(&go);
    let slow = move |_: Value, _: Run| {
        let goes = Arc::clone(&goes);
        async move {
            goes.notified().await;
            Ok(Outcome::text("done slowly"))
        }
    };
    let tools: [SharedTool; 3] = [
        Arc::new(tool(ToolSpec::new("slow", ""), slow)),
        Puppet::writing("write", Act::Echo),
        Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]).0,
    ];
    let living =
        history.executor_with(tools.clone(), &history.options(), |builder| builder.durability = Durability::Strict);
    let begun = living.executor.spawn(keyed());
    until("it runs", async || living.executor.load().running == 1).await;
    living.journal.flush().await.unwrap();
    // Claiming a key needs the history itself. From here on only the log accepts records.
    let holder = hold_write_lock(&history);
    go.notify_one();
    let done = living.executor.wait(begun, &Caller::local()).await.unwrap();
    let task = living.executor.spawn(Call::new("hang", json!({})));
    until("it runs", async || living.executor.load().running == 1).await;
    let then = living.executor.call(Call::new("write", json!({"n": 2}))).await;
    abandon(living, holder).await;
    assert_eq!(rows(&history), 1, "the first is committed as open");

    let next = history.executor_with(tools, &history.options(), |builder| builder.durability = Durability::Strict);
    let told = next.executor.task(task, &Caller::local()).expect("tasks survive").result.unwrap();
    assert_eq!(told.error.as_ref().map(|error| error.code.as_str()), Some("E3110"));
    let again = next.executor.call(keyed()).await;
    assert_eq!((again.cached, again.text()), (true, done.text()), "it is not done again");
    assert_found(&history.store(), &[ToolResult::clone(&done), then]);
    drop(next);
    let verdict = history.check();
    assert_eq!((verdict.executions, verdict.open), (4, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_stored_as_long_as_its_own_executor_would() {
    let history = TestHistory::sqlite();
    let living = strict_with(&history, &JournalOptions { task_ttl: Duration::ZERO, ..history.options() });
    let holder = hold_write_lock(&history);
    let task = living.executor.spawn(Call::new("write", json!({})));
    living.executor.wait(task, &Caller::local()).await.unwrap();
    abandon(living, holder).await;
    let store = history.store();
    assert_eq!(store.show(task).unwrap().unwrap().0.status, "success");
    assert_eq!(history.sql("SELECT count(*) FROM answers"), [["Integer(0)"]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_of_the_same_process_find_answered_calls() {
    let history = TestHistory::sqlite();
    let store = history.store();
    let journal = std::sync::Arc::new(store.journal(&history.options()).unwrap());
    let mut builder = wieldy_core::Executor::builder().tools([Puppet::writing("write", Act::Echo)]);
    builder.journal = journal.clone();
    builder.durability = Durability::Strict;
    let executor = builder.build().unwrap();
    for n in 1..30 {
        let told = executor.call(Call::new("write", json!({ "n": n }))).await;
        assert_found(&store.clone(), &[told]);
    }
    // Queries wait only for a while: calls that cannot be committed are not found.
    let holder = hold_write_lock(&history);
    let told = executor.call(Call::new("write", json!({}))).await;
    let began = Instant::now();
    assert!(told.is_success() && store.show(told.execution_id).unwrap().is_none());
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    drop(holder);
    until("it is committed", async || journal.flush().await.is_ok()).await;
    assert_found(&store, &[told]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_includes_the_logs_of_this_process_and_of_dead_executors() {
    let history = TestHistory::sqlite();
    let told = answer_and_abandon(&history, 5).await;
    let store = history.store();
    let journal = std::sync::Arc::new(store.journal(&history.options()).unwrap());
    let mut builder = wieldy_core::Executor::builder().tools([Puppet::writing("write", Act::Echo)]);
    builder.journal = journal;
    let executor = builder.build().unwrap();
    let last = executor.call(Call::new("write", json!({}))).await;
    let [backup, copy] = ["backup.db", "copy.db"].map(|name| history.folder.path().join(name));
    store.backup(&backup).unwrap();
    let again = executor.call(Call::new("write", json!({}))).await;
    let target = Store::open(&wieldy_store::Address::Sqlite(copy)).unwrap();
    store.copy_to(&target).unwrap();
    let backup = Store::open(&wieldy_store::Address::Sqlite(backup)).unwrap();
    for copy in [backup, target.clone()] {
        assert_found(&copy, &told);
        assert_found(&copy, std::slice::from_ref(&last));
        assert_eq!(copy.verify(&[], None, &mut |_| {}).unwrap().problem, None);
    }
    assert_found(&target, &[again]);
}

#[tokio::test(flavor = "multi_thread")]
async fn executors_that_start_together_commit_a_log_once() {
    let history = TestHistory::sqlite();
    // A journal waits five seconds for its database, and a busy machine must make these calls within that time.
    let told = answer_and_abandon(&history, 100).await;
    let opened = std::thread::scope(|scope| {
        let open = || {
            let store = history.store();
            assert_found(&store, &told);
            store.journal(&history.options()).unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    drop(opened);
    assert_eq!(history.check().executions, 101);
    assert_eq!(logs(&history), [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_log_is_committed_up_to_the_damage_and_renamed() {
    let history = TestHistory::sqlite();
    let told = answer_and_abandon(&history, 20).await;
    let log = logs(&history).remove(0);
    let mut bytes = fs::read(&log).unwrap();
    // Each call has two groups, each on a block of its own after the first block.
    let blocks = bytes.iter().rposition(|byte| *byte != 0).unwrap() / 4096;
    assert!(blocks > 30, "{blocks}");
    bytes[(blocks - 7) * 4096 + 100] ^= 1;
    fs::write(&log, &bytes).unwrap();
    let store = history.store();
    assert_eq!(logs(&history), [log.with_extension("damaged")]);
    let there = told.iter().take_while(|result| store.show(result.execution_id).unwrap().is_some()).count();
    assert!((15..19).contains(&there), "{there}");
    assert_found(&store, &told[..there - 1]);
    // Later executors go on without the log, and no outcome is guessed.
    drop(history.executor([]));
    assert_eq!(history.check().open, 0);
    let later = store.search(&Query::default(), 99).unwrap().executions;
    let unknown = later.iter().filter(|call| call.error_code.as_deref() == Some("E3110")).count();
    assert!(unknown <= 1 && later.len() == there + 1, "{later:?}");
    assert_eq!(fs::read(log.with_extension("damaged")).unwrap(), bytes, "it is there to be looked at");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_another_history_is_left_alone() {
    let history = TestHistory::sqlite();
    let backup = history.folder.path().join("backup.db");
    history.store().backup(&backup).unwrap();
    answer_and_abandon(&history, 3).await;
    let log = logs(&history).remove(0);
    let bytes = fs::read(&log).unwrap();
    // The restored history is older than the executor.
    restore_backup(&history, &backup);
    drop(history.executor([]));
    assert_eq!((history.check().executions, logs(&history)), (0, vec![log.clone()]));
    assert_eq!(fs::read(&log).unwrap(), bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_with_a_gap_after_the_end_of_the_history_is_not_committed() {
    let history = TestHistory::sqlite();
    let living = strict(&history);
    assert!(living.executor.call(Call::new("write", json!({"n": 1}))).await.is_success());
    living.journal.flush().await.unwrap();
    let backup = history.folder.path().join("backup.db");
    history.store().backup(&backup).unwrap();
    // Records that are committed are overwritten in the log.
    for n in 2..9 {
        assert!(living.executor.call(Call::new("write", json!({ "n": n }))).await.is_success());
        living.journal.flush().await.unwrap();
    }
    let holder = hold_write_lock(&history);
    assert!(living.executor.call(Call::new("write", json!({"n": 9}))).await.is_success());
    abandon(living, holder).await;
    let log = logs(&history).remove(0);
    restore_backup(&history, &backup);
    drop(history.executor([]));
    assert_eq!((history.check().executions, logs(&history)), (1, vec![log.with_extension("damaged")]));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_wait_for_commits_while_the_log_cannot_be_written() {
    let history = TestHistory::sqlite();
    let living = strict(&history);
    assert!(living.executor.call(Call::new("write", json!({"n": 1}))).await.is_success());
    let log = logs(&history).remove(0);
    let aside = log.with_extension("aside");
    fs::rename(&log, &aside).unwrap();
    for n in 2..5 {
        let told = living.executor.call(Call::new("write", json!({ "n": n }))).await;
        assert!(told.is_success(), "{told:?}");
        assert!(history.store().show(told.execution_id).unwrap().is_some(), "it is committed when it is answered");
    }
    fs::rename(&aside, &log).unwrap();
    until("it is used again", async || {
        let before = fs::read(&log).unwrap();
        assert!(living.executor.call(Call::new("write", json!({"n": 5}))).await.is_success());
        fs::read(&log).unwrap() != before
    })
    .await;
    drop(living);
    history.check();
}

#[tokio::test]
async fn only_its_owner_can_read_a_log() {
    use std::os::unix::fs::PermissionsExt;
    let history = TestHistory::sqlite();
    let living = strict(&history);
    assert!(living.executor.call(Call::new("write", json!({}))).await.is_success());
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(logs(&history).into_iter().map(mode).collect::<Vec<_>>(), [0o600]);
    assert_eq!(mode(history.folder.path().join("history.db.instances")), 0o700);
    drop(living);
    assert_eq!(logs(&history), [] as [PathBuf; 0]);
}

//! Every change of threads behind the program's back is detected.

use std::sync::Arc;

use wieldy_core::Caller;
use wieldy_store::{NewEntry, Signer, ThreadProblem, ThreadVerdict, Threads};

use crate::threads::threads;
use crate::world::TestHistory;

on_each_database!(
    untouched_threads_are_whole,
    the_database_itself_refuses_changes,
    every_change_of_an_entry_is_found_where_it_was_made,
    removed_and_swapped_entries_are_found,
    renamed_and_removed_threads_are_found,
    an_end_that_was_cut_off_cannot_be_signed_again,
    with_a_key_every_signature_must_be_by_it,
);

/// Makes two threads with four and two entries.
fn sample(history: &TestHistory) -> Threads {
    let threads = threads(history);
    let caller = Arc::new(Caller { user: Some("ann".into()), ..Caller::local() });
    let owner = threads.owner(&caller, "default").unwrap();
    for (thread, content) in [("a", "one"), ("b", "uno"), ("a", "two"), ("a", "three"), ("b", "due"), ("a", "four")] {
        let entry = NewEntry {
            thread_id: thread.into(),
            kind: "note".into(),
            content: content.into(),
            title: (content == "two").then(|| "title".into()),
            reply_to: (content == "three").then_some(1),
            key: (content == "two").then(|| "key".into()),
        };
        threads.push(&owner, &caller, entry).unwrap();
    }
    threads
}

/// Changes the threads as their owner could, who can drop triggers.
fn change(history: &TestHistory, sql: &str) {
    if history.is_postgres() {
        let sql =
            sql.replace("zeroblob(32)", "decode(repeat('00', 32), 'hex')").replace("at + 1", "at + interval '1 s'");
        // Triggers do not run for a replica.
        history.threads_sql(&format!("SET session_replication_role = replica; {sql}"));
        return;
    }
    let triggers =
        ["entries_are_never_changed", "entries_are_never_deleted", "threads_only_grow", "threads_are_never_deleted"];
    let drops = triggers.map(|trigger| format!("DROP TRIGGER IF EXISTS {trigger}"));
    for sql in drops.iter().map(String::as_str).chain(sql.split(';')).filter(|sql| !sql.trim().is_empty()) {
        history.threads_sql(sql);
    }
}

fn problem(threads: &Threads) -> Option<String> {
    threads.verify(None, &mut |_| {}).unwrap().unwrap().problem.map(|problem| problem.to_string())
}

fn problem_after(history: &TestHistory, sql: &str) -> Option<String> {
    let history = history.another();
    let threads = sample(&history);
    assert_eq!(problem(&threads), None);
    change(&history, sql);
    problem(&threads)
}

async fn untouched_threads_are_whole(history: TestHistory) {
    assert_eq!(threads(&history).verify(None, &mut |_| {}).unwrap(), None, "there are no threads yet");
    if !history.is_postgres() {
        assert!(!history.folder.path().join("threads.db").exists(), "a verification creates nothing");
    }
    let verdict = sample(&history).verify(None, &mut |_| {}).unwrap();
    assert_eq!(verdict, Some(ThreadVerdict { threads: 2, entries: 6, signed: 2, problem: None }));
}

async fn the_database_itself_refuses_changes(history: TestHistory) {
    let threads = sample(&history);
    for sql in [
        "UPDATE entries SET content = 'x' WHERE seq = 1",
        "DELETE FROM entries WHERE seq = 1",
        "UPDATE threads SET thread_id = 'c' WHERE number = 1",
        "UPDATE threads SET seq = seq - 1 WHERE number = 1",
        "DELETE FROM threads WHERE number = 1",
    ] {
        let history = &history;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| history.threads_sql(sql)));
        assert!(done.is_err(), "{sql}");
    }
    assert_eq!(problem(&threads), None);
}

async fn every_change_of_an_entry_is_found_where_it_was_made(history: TestHistory) {
    let changed = Some("entry 2 of the thread `a`: it was changed, or is not in its place".to_owned());
    for set in [
        "content = 'TWO'",
        "type = 'decision'",
        "agent = 'eve'",
        "tenant = 'x'",
        "author_user = NULL",
        "title = NULL",
        "reply_to = 1",
        "push_key = NULL",
        "at = at + 1",
        "prev_hash = zeroblob(32)",
        "hash = zeroblob(32)",
    ] {
        let sql = format!("UPDATE entries SET {set} WHERE thread = 1 AND seq = 2");
        assert_eq!(problem_after(&history, &sql), changed, "{set}");
    }
}

async fn removed_and_swapped_entries_are_found(history: TestHistory) {
    let swap = "UPDATE entries SET seq = -2 WHERE thread = 1 AND seq = 2;
                UPDATE entries SET seq = 2 WHERE thread = 1 AND seq = 3;
                UPDATE entries SET seq = 3 WHERE thread = 1 AND seq = -2";
    for (sql, expected) in [
        ("DELETE FROM entries WHERE thread = 1 AND seq = 2", "entry 2 of the thread `a`: it is missing"),
        ("DELETE FROM entries WHERE thread = 1 AND seq = 1", "entry 1 of the thread `a`: it is missing"),
        (
            "DELETE FROM entries WHERE thread = 1 AND seq = 4",
            "entry 4 of the thread `a`: its last entries are missing: it has 3 of 4",
        ),
        (swap, "entry 2 of the thread `a`: it was changed, or is not in its place"),
        (
            "UPDATE entries SET thread = 2, seq = 3 WHERE thread = 1 AND seq = 4",
            "entry 4 of the thread `a`: its last entries are missing: it has 3 of 4",
        ),
        (
            "UPDATE entries SET thread = 3 WHERE thread = 1",
            "entry 1 of the thread `a`: its last entries are missing: it has 0 of 4",
        ),
    ] {
        assert_eq!(problem_after(&history, sql).as_deref(), Some(expected), "{sql}");
    }
}

async fn renamed_and_removed_threads_are_found(history: TestHistory) {
    let renamed = "its id, its owner or its time was changed, or a thread before it";
    for (sql, expected) in [
        ("UPDATE threads SET thread_id = 'c' WHERE number = 1", format!("the thread `c`: {renamed}")),
        ("UPDATE threads SET owner = '[]' WHERE number = 2", format!("the thread `b`: {renamed}")),
        ("UPDATE threads SET created_at = at WHERE number = 1", format!("the thread `a`: {renamed}")),
        (
            "DELETE FROM entries WHERE thread = 1; DELETE FROM threads WHERE number = 1",
            "the thread `b`: thread number 1 is missing before it".to_owned(),
        ),
        (
            "DELETE FROM entries WHERE thread = 2; DELETE FROM threads WHERE number = 2",
            "the last threads are missing: there are 1 of 2".to_owned(),
        ),
        (
            "DELETE FROM threads WHERE number = 2; UPDATE roll SET threads = 1, origin = (SELECT origin FROM threads)",
            "there are entries that belong to no thread".to_owned(),
        ),
        (
            "DELETE FROM entries WHERE thread = 2; DELETE FROM threads WHERE number = 2;
             UPDATE roll SET threads = 1, origin = (SELECT origin FROM threads)",
            "the number of threads: the signature of its end is wrong".to_owned(),
        ),
    ] {
        assert_eq!(problem_after(&history, sql), Some(expected), "{sql}");
    }
}

async fn an_end_that_was_cut_off_cannot_be_signed_again(history: TestHistory) {
    let cut = "DELETE FROM entries WHERE thread = 1 AND seq = 4;
               UPDATE threads SET seq = 3, hash = (SELECT hash FROM entries WHERE thread = 1 AND seq = 3),
                 at = (SELECT at FROM entries WHERE thread = 1 AND seq = 3) WHERE number = 1";
    let expected = "entry 3 of the thread `a`: the signature of its end is wrong";
    assert_eq!(problem_after(&history, cut).as_deref(), Some(expected));
    // A signature that was removed is missed by those who know the key.
    let threads = sample(&history);
    change(&history, cut);
    change(&history, "UPDATE threads SET key = NULL, signature = NULL WHERE number = 1");
    let key = Signer::open(&history.folder.path().join("audit.key")).unwrap();
    let verdict = threads.verify(Some(key.key()), &mut |_| {}).unwrap().unwrap();
    let what = "its end is not signed".to_owned();
    assert_eq!(verdict.problem, Some(ThreadProblem { thread_id: Some("a".into()), seq: Some(3), what }));
}

async fn with_a_key_every_signature_must_be_by_it(history: TestHistory) {
    let threads = sample(&history);
    let own = Signer::open(&history.folder.path().join("audit.key")).unwrap();
    let other = Signer::open(&history.folder.path().join("other.key")).unwrap();
    let verify = |key: &Signer| threads.verify(Some(key.key()), &mut |_| {}).unwrap().unwrap().problem;
    assert_eq!(verify(&own), None);
    let what = "its end is signed with another key".to_owned();
    assert_eq!(verify(&other), Some(ThreadProblem { thread_id: Some("a".into()), seq: Some(4), what }));
}

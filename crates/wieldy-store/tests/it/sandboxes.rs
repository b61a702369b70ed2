//! Every sandbox that was recorded as made is recorded as gone, once: by its executor, or by the next start if its
//! executor stopped before.

use wieldy_store::JournalOptions;
use wieldy_testkit::Announcer;

use crate::world::{LiveExecutor, TestHistory, until};

on_each_database!(
    sandboxes_of_a_dead_executor_are_recorded_as_gone_by_the_next_start,
    sandboxes_that_a_closed_executor_left_are_recorded_as_gone_by_the_next_start,
    sandboxes_in_a_log_that_was_not_committed_are_recorded_as_gone,
    executors_that_start_at_once_record_each_end_once,
    a_living_executor_records_the_ends_of_another_that_died,
    a_copied_history_records_the_ends,
);

/// Returns an executor and its level.
fn executor(history: &TestHistory) -> (LiveExecutor, Announcer) {
    let announcer = Announcer::default();
    let living = history.executor_with([], &history.options(), |builder| {
        *builder = std::mem::take(builder).sandbox(announcer.clone());
    });
    (living, announcer)
}

/// Stops an executor as if its process had been killed.
fn kill(history: &TestHistory, living: LiveExecutor) {
    living.journal.abandon();
    // No process has this number.
    history.sql("UPDATE instances SET process = 2147483647 WHERE ended_at IS NULL AND number = (SELECT max(number) FROM instances)");
    std::mem::forget(living.executor);
}

/// Returns the records about sandboxes: the event, and its data.
fn records(history: &TestHistory) -> Vec<String> {
    let sql = "SELECT name, data FROM events WHERE name LIKE 'sandbox.%' ORDER BY seq";
    let plain = |text: &String| text.replace("Text(\"", "").replace("\")", "").replace('\\', "");
    history.sql(sql).iter().map(|row| row.iter().map(plain).collect::<Vec<_>>().join(" ")).collect()
}

fn created(id: &str) -> String {
    format!(r#"sandbox.created {{"sandbox":"{id}","level":"native"}}"#)
}

fn destroyed(id: &str) -> String {
    format!(r#"sandbox.destroyed {{"sandbox":"{id}"}}"#)
}

fn lost(id: &str, created_seq: i64) -> String {
    format!(r#"sandbox.destroyed {{"sandbox":"{id}","created_seq":{created_seq}}}"#)
}

/// Returns the number of the record that says that this sandbox was made, the latest first.
fn created_seq(history: &TestHistory, id: &str) -> i64 {
    let sql = format!("SELECT max(seq) FROM events WHERE name = 'sandbox.created' AND data LIKE '%\"{id}\"%'");
    history.sql(&sql)[0][0].trim_start_matches("Integer(").trim_end_matches(')').parse().unwrap()
}

async fn sandboxes_of_a_dead_executor_are_recorded_as_gone_by_the_next_start(history: TestHistory) {
    let (first, level) = executor(&history);
    level.made("native-1-1");
    level.made("native-1-2");
    level.gone("native-1-1");
    first.journal.flush().await.unwrap();
    kill(&history, first);
    let of_first = created_seq(&history, "native-1-2");
    let expected =
        [created("native-1-1"), created("native-1-2"), destroyed("native-1-1"), lost("native-1-2", of_first)];
    // Ids come again: in a container every process has the same number.
    let (second, level) = executor(&history);
    assert_eq!(records(&history), expected);
    level.made("native-1-2");
    second.journal.flush().await.unwrap();
    let (third, _) = executor(&history);
    let with_second = [&expected[..], &[created("native-1-2")]].concat();
    assert_eq!(records(&history), with_second, "it is the sandbox of a living executor");
    level.gone("native-1-2");
    drop((second, level, third));
    let whole = [&with_second[..], &[destroyed("native-1-2")]].concat();
    drop(executor(&history));
    assert_eq!(records(&history), whole);
    history.check();
}

async fn sandboxes_that_a_closed_executor_left_are_recorded_as_gone_by_the_next_start(history: TestHistory) {
    let (first, level) = executor(&history);
    level.made("native-1-1");
    first.journal.close();
    level.gone("native-1-1");
    assert_eq!(records(&history), [created("native-1-1")], "the closed journal takes nothing");
    let left = created_seq(&history, "native-1-1");
    for _ in 0..2 {
        drop(executor(&history));
        assert_eq!(records(&history), [created("native-1-1"), lost("native-1-1", left)]);
    }
    history.check();
}

async fn sandboxes_in_a_log_that_was_not_committed_are_recorded_as_gone(history: TestHistory) {
    let (first, level) = executor(&history);
    level.made("native-1-1");
    first.journal.flush().await.unwrap();
    level.made("native-1-2");
    level.gone("native-1-1");
    let seq = wieldy_core::Journal::next_seq(&*first.journal) - 1;
    wieldy_core::Journal::wait_until_stored(&*first.journal, seq).await.unwrap();
    kill(&history, first);
    drop(executor(&history));
    let left = created_seq(&history, "native-1-2");
    let expected = [created("native-1-1"), created("native-1-2"), destroyed("native-1-1"), lost("native-1-2", left)];
    assert_eq!(records(&history), expected);
    history.check();
}

async fn executors_that_start_at_once_record_each_end_once(history: TestHistory) {
    const EACH: usize = 300;
    for executor_number in 0..2 {
        let (dying, level) = executor(&history);
        (0..EACH).for_each(|number| level.made(&format!("native-{executor_number}-{number}")));
        dying.journal.flush().await.unwrap();
        kill(&history, dying);
    }
    std::thread::scope(|scope| {
        let starting: Vec<_> =
            (0..6).map(|_| scope.spawn(|| history.store().journal(&history.options()).map(drop))).collect();
        starting.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
    // One of the six may have been beaten to the end of an executor, and have started before the ends were written.
    drop(executor(&history));
    let mut gone: Vec<String> =
        records(&history).into_iter().filter(|record| record.starts_with("sandbox.destroyed")).collect();
    assert_eq!(gone.len(), 2 * EACH);
    gone.sort_unstable();
    gone.dedup();
    assert_eq!(gone.len(), 2 * EACH);
    history.check();
}

async fn a_living_executor_records_the_ends_of_another_that_died(history: TestHistory) {
    let (living, _) = executor(&history);
    let (dying, level) = executor(&history);
    level.made("native-1-1");
    dying.journal.flush().await.unwrap();
    kill(&history, dying);
    let expected = [created("native-1-1"), lost("native-1-1", created_seq(&history, "native-1-1"))];
    until("it is recorded", async || records(&history) == expected).await;
    drop(living);
    history.check();
}

async fn a_copied_history_records_the_ends(history: TestHistory) {
    let (living, level) = executor(&history);
    level.made("native-1-1");
    living.journal.flush().await.unwrap();
    let copy = history.another();
    history.store().copy_to(&copy.store()).unwrap();
    if copy.is_postgres() {
        // There its last sign of life would count for a while.
        copy.sql("UPDATE instances SET seen_at = now() - interval '1 hour'");
    }
    drop(copy.store().journal(&JournalOptions::default()).unwrap());
    assert_eq!(records(&copy), [created("native-1-1"), lost("native-1-1", created_seq(&copy, "native-1-1"))]);
    level.gone("native-1-1");
    drop((living, level));
    assert_eq!(records(&history), [created("native-1-1"), destroyed("native-1-1")]);
    copy.check();
}

//! Every change of the history behind the program's back is detected.

use serde_json::json;
use wieldy_core::{Call, ToolSpec};
use wieldy_store::{Problem, SignedHead, Signer, Verdict};
use wieldy_testkit::{Act, Puppet};

use crate::world::TestHistory;

on_each_database!(
    an_untouched_history_is_whole,
    every_change_of_a_record_is_found_where_it_was_made,
    removed_added_and_moved_records_are_found,
    the_tables_made_from_the_trail_are_compared_with_it,
    the_rows_of_open_calls_are_compared_too,
    the_histogram_is_compared_with_the_trail,
    a_rewritten_trail_does_not_lead_through_signed_heads,
);

/// Returns a history of four calls, of which one failed and one named no tool: 12 records, and two of the executor.
async fn sample_history(history: TestHistory) -> TestHistory {
    let (tool, _) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let living = history.executor([tool, Puppet::reading("read", Act::Say("hi"))]);
    for (tool, path) in [("write", "a"), ("read", "b"), ("missing", "c"), ("write", "d")] {
        living.executor.call(Call::new(tool, json!({"path": path}))).await;
    }
    living.journal.flush().await.unwrap();
    drop(living);
    history
}

fn verify(history: &TestHistory) -> Verdict {
    history.store().verify(&[], None, &mut |_| {}).unwrap()
}

/// Changes the history by hand and returns the problem that is found.
async fn problem_after(history: TestHistory, sql: &str) -> Option<(i64, String)> {
    let history = sample_history(history).await;
    change(&history, sql);
    verify(&history).problem.map(|Problem { seq, what }| (seq, what))
}

fn change(history: &TestHistory, sql: &str) {
    let mut sql = sql.to_owned();
    if history.is_postgres() {
        for (ours, theirs) in [
            ("zeroblob(32)", "decode(repeat('00', 32), 'hex')"),
            (" at = at + 1", " at = at + interval '1 microsecond'"),
            ("started_at = 1", "started_at = to_timestamp(1)"),
            ("'success', 1, 2,", "'success', to_timestamp(1), to_timestamp(2),"),
        ] {
            sql = sql.replace(ours, theirs);
        }
    }
    sql.split(';').filter(|sql| !sql.trim().is_empty()).for_each(|sql| drop(history.sql(sql)));
}

async fn an_untouched_history_is_whole(history: TestHistory) {
    let history = sample_history(history).await;
    let verdict = Verdict {
        records: 13,
        executions: 4,
        open: 0,
        heads: 1,
        anchors: 0,
        dropped: 0,
        first_seq: 1,
        last_seq: 13,
        problem: None,
    };
    assert_eq!(verify(&history), verdict);
}

// Shows: D9.4
async fn every_change_of_a_record_is_found_where_it_was_made(history: TestHistory) {
    let changed = "it was changed or moved";
    for (column, value) in [
        ("data", "'{}'"),
        ("data", "replace(data, 'a', 'b')"),
        ("at", "at + 1"),
        ("name", "'tool.call.success'"),
        ("execution", "NULL"),
        ("subject", "replace(subject, 'local', 'other')"),
        ("hash", "zeroblob(32)"),
        ("instance_seq", "instance_seq + 1"),
    ] {
        let found =
            problem_after(history.another(), &format!("UPDATE events SET {column} = {value} WHERE seq = 2")).await;
        assert_eq!(found, Some((2, changed.into())), "{column} = {value}");
    }
}

// Shows: D9.4
async fn removed_added_and_moved_records_are_found(history: TestHistory) {
    let missing = |seq| Some((seq, "it is missing".to_owned()));
    assert_eq!(problem_after(history.another(), "DELETE FROM events WHERE seq = 5").await, missing(5));
    assert_eq!(problem_after(history.another(), "DELETE FROM events WHERE seq BETWEEN 5 AND 7").await, missing(5));
    assert_eq!(
        problem_after(history.another(), "DELETE FROM events WHERE seq = 13").await,
        Some((13, "it is missing at the end of the trail".into()))
    );
    assert_eq!(
        problem_after(history.another(), "DELETE FROM events WHERE seq = 1").await,
        Some((1, "it and all records before the first stored one are missing, and no record explains it".into()))
    );
    let swapped = "UPDATE events SET seq = -1 WHERE seq = 4; UPDATE events SET seq = 4 WHERE seq = 5;
                   UPDATE events SET seq = 5 WHERE seq = -1;";
    assert_eq!(problem_after(history.another(), swapped).await, Some((4, "it was changed or moved".into())));
    let added = "INSERT INTO events SELECT 14, instance, 13, at, name, execution, subject, data, hash FROM events WHERE seq = 13;";
    let beyond = "it is after the end of the trail";
    assert_eq!(problem_after(history.another(), added).await, Some((14, beyond.into())));
    let far = added.replace("SELECT 14", "SELECT 1000000");
    assert_eq!(problem_after(history.another(), &far).await, Some((1_000_000, beyond.into())));
    let cut =
        "DELETE FROM events WHERE seq = 13; UPDATE trail SET seq = 12, hash = (SELECT hash FROM events WHERE seq = 12)";
    assert_eq!(
        problem_after(history.another(), cut).await,
        Some((13, "it is missing: the trail was longer when its end was signed".into()))
    );
    let added = format!("{added} UPDATE trail SET seq = 14");
    assert_eq!(problem_after(history.another(), &added).await, Some((14, "it was changed or moved".into())));
}

async fn the_tables_made_from_the_trail_are_compared_with_it(history: TestHistory) {
    let other = |seq| Some((seq, "the row of its call in `tool_executions` differs".to_owned()));
    for (column, value) in [
        ("status", "'success'"),
        ("error_code", "NULL"),
        ("error_message", "'fine'"),
        ("tool_name", "'read'"),
        ("parameters_json", "'{}'"),
        ("agent_id", "'somebody else'"),
        ("started_at", "1"),
        ("duration_ms", "1"),
        ("session_id", "'s'"),
    ] {
        let found = problem_after(
            history.another(),
            &format!("UPDATE tool_executions SET {column} = {value} WHERE status = 'validation_error'"),
        )
        .await;
        assert_eq!(found, other(8), "{column} = {value}");
    }
    assert_eq!(
        problem_after(history.another(), "DELETE FROM tool_executions WHERE id = 8").await,
        Some((8, "its call has no row in `tool_executions`".into()))
    );
    let forged = "INSERT INTO tool_executions (id, execution_id, tool_name, status, started_at, completed_at, agent_id, instance)
                  VALUES (3, 'x', 'write', 'success', 1, 2, 'a', 1)";
    assert_eq!(
        problem_after(history.another(), forged).await,
        Some((13, "there are rows in `tool_executions` without a record".into()))
    );
    let forged = forged.replace("(3,", "(1000000,");
    assert_eq!(
        problem_after(history.another(), &forged).await,
        Some((1_000_000, "no record opens the call of its row in `tool_executions`".into()))
    );
}

async fn the_rows_of_open_calls_are_compared_too(history: TestHistory) {
    let other = "the row of its call in `tool_executions` differs";
    for (change, found) in [
        ("SELECT 1", None),
        ("UPDATE tool_executions SET status = 'success', completed_at = started_at", Some((2, other))),
        ("UPDATE tool_executions SET tool_name = 'read'", Some((2, other))),
        ("DELETE FROM tool_executions", Some((2, "its call has no row in `tool_executions`"))),
    ] {
        let history = history.another();
        let (tool, strings) = Puppet::new(ToolSpec::new("write", ""), [Act::Hang]);
        let living = history.executor([tool]);
        living.executor.spawn(Call::new("write", json!({})));
        while strings.now() == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        living.journal.flush().await.unwrap();
        history.sql(change);
        let problem = verify(&history).problem;
        assert_eq!(problem, found.map(|(seq, what)| Problem { seq, what: what.into() }), "{change}");
        living.journal.abandon();
        std::mem::forget(living.executor);
    }
}

async fn the_histogram_is_compared_with_the_trail(history: TestHistory) {
    let wrong = Some((13, "the counts in `tallies` differ from the trail".to_owned()));
    for change in [
        "UPDATE tallies SET calls = calls + 1 WHERE status = 'success' AND tool_name = 'read'",
        "UPDATE tallies SET output_bytes = output_bytes + 1 WHERE tool_name = 'read'",
        "UPDATE tallies SET tool_name = 'reed' WHERE tool_name = 'read'",
        "DELETE FROM tallies WHERE tool_name = 'missing'",
        "INSERT INTO tallies SELECT day - 1, tenant_id, agent_id, tool_name, status, bucket, calls, output_bytes, result_bytes FROM tallies
           WHERE tool_name = 'missing'",
    ] {
        assert_eq!(problem_after(history.another(), change).await, wrong, "{change}");
    }
}

async fn a_rewritten_trail_does_not_lead_through_signed_heads(history: TestHistory) {
    // The attacker owns the database but not the key, and all hashes are right again.
    let history = sample_history(history).await;
    let signer = Signer::open(&history.folder.path().join("audit.key")).unwrap();
    let anchor = history.store().sign_head(&signer).unwrap();
    assert!(anchor.is_signed_by(signer.key()));
    let check = |history: &TestHistory, anchors: &[SignedHead], key: Option<&str>| {
        history.store().verify(anchors, key, &mut |_| {}).unwrap()
    };
    let good = check(&history, std::slice::from_ref(&anchor), Some(signer.key()));
    assert_eq!((good.anchors, good.heads, good.problem), (1, 1, None));

    let other = sample_history(history.another()).await;
    let found = check(&other, std::slice::from_ref(&anchor), None);
    assert_eq!(found.problem, Some(Problem { seq: 13, what: "the trail up to it differs from the signed one".into() }));
    change(
        &history,
        "DELETE FROM heads; DELETE FROM events WHERE seq > 8; DELETE FROM tool_executions WHERE id > 5;
                    UPDATE trail SET seq = 8, hash = (SELECT hash FROM events WHERE seq = 8)",
    );
    let found = check(&history, std::slice::from_ref(&anchor), None).problem.unwrap();
    assert_eq!(found, Problem { seq: 9, what: "it is missing: the trail was longer when an anchor was made".into() });
    let forged = SignedHead { seq: 8, ..anchor.clone() };
    assert!(!forged.is_signed_by(signer.key()));
    assert!(!anchor.is_signed_by(&"00".repeat(32)), "another key");
    let found = check(&other, &[], Some(signer.key())).problem.unwrap();
    let what = "its signature is invalid, or was made with another key";
    assert_eq!(found, Problem { seq: 13, what: what.into() }, "its own heads are signed by another key");
}

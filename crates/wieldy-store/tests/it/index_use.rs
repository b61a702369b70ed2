//! On PostgreSQL, every statement of the journal finds its rows by an index, even if it was planned while the tables
//! were empty.

use std::sync::Arc;

use serde_json::json;
use wieldy_core::{Call, Durability, Options};
use wieldy_testkit::{Act, Puppet};

use crate::world::{TestHistory, until};

#[tokio::test(flavor = "multi_thread")]
async fn no_table_of_a_new_history_is_scanned_by_calls() {
    let Some(history) = TestHistory::postgres() else { return };
    // Creating the tables and their indexes scans them, which the server counts a little later.
    drop(history.store());
    let created = "SELECT seq_scan > 0 FROM pg_stat_user_tables WHERE relname = 'tool_executions'";
    until("the scans are counted", async || history.sql(created) == [["t"]]).await;
    history.sql("SELECT pg_stat_reset()");
    let living = history.executor_with([Puppet::writing("write", Act::Echo)], &history.options(), |builder| {
        builder.durability = Durability::Strict;
    });
    let executor = Arc::new(living.executor.clone());
    let callers = (0..8).map(|caller| {
        let executor = Arc::clone(&executor);
        tokio::spawn(async move {
            for number in 0..250 {
                // Some calls have a key, because claims and answers are part of the journal.
                let idempotency_key = (number % 25 == 0).then(|| format!("{caller}-{number}"));
                let options = Options { idempotency_key, ..Options::default() };
                assert!(executor.call(Call::new("write", json!({"number": number})).with(options)).await.is_success());
            }
        })
    });
    for caller in callers.collect::<Vec<_>>() {
        caller.await.unwrap();
    }
    drop((executor, living));
    let rows = "SELECT n_tup_ins FROM pg_stat_user_tables WHERE relname = 'tool_executions'";
    until("the server has counted", async || history.sql(rows) == [["2000"]]).await;
    // Starting an executor scans tables of one row, also to look for notes, and the claims for void ones.
    let scanned = "SELECT relname, seq_scan, seq_tup_read FROM pg_stat_user_tables WHERE seq_scan > 4 ORDER BY relname";
    assert_eq!(history.sql(scanned), Vec::<Vec<String>>::new());
}

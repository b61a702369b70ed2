//! The durations of past runs, for dynamic timeouts.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{Backoff, Call, Code, RetryPolicy, ToolSpec};
use wieldy_testkit::{Act, Puppet};

use crate::world::Place;

on_each_database!(what_comes_before_a_run_is_no_part_of_it_and_kept_answers_are_none);

async fn what_comes_before_a_run_is_no_part_of_it_and_kept_answers_are_none(place: Place) {
    const PAUSE: Duration = Duration::from_secs(2);
    let retry = RetryPolicy { retries: 1, base: PAUSE, cap: PAUSE, backoff: Backoff::Linear };
    let spec = ToolSpec::new("flaky", "").read_only().retry(retry);
    let (flaky, _) = Puppet::new(spec, [Act::Fail(Code::TransportFailed, true), Act::Echo]);
    let (kept, runs) = Puppet::new(ToolSpec::new("kept", "").read_only().cache(PAUSE * 60), [Act::Echo]);
    let (failing, _) = Puppet::new(ToolSpec::new("failing", ""), [Act::Fail(Code::ToolReportedError, false)]);
    let (queued, _) = Puppet::new(ToolSpec::new("queued", "").read_only(), [Act::Take(PAUSE), Act::Echo]);
    let living = place.executor_with([flaky, kept, failing, queued], &place.options(), |builder| {
        builder.limits.calls_running_max = 1;
    });
    let call = |tool: &str| living.executor.call(Call::new(tool, json!({})));
    let (slow, waits) = tokio::join!(call("queued"), call("queued"));
    assert!(slow.is_success() && waits.is_success() && waits.timing.duration_ms > 1000.0, "{waits:?}");
    let flaky = call("flaky").await;
    assert!(flaky.is_success() && flaky.timing.duration_ms > 1000.0, "{flaky:?}");
    for tool in ["kept", "kept", "kept", "failing", "missing"] {
        call(tool).await;
    }
    assert_eq!(runs.runs(), 1);
    living.journal.flush().await.unwrap();
    let told = place.store().durations(9).unwrap();
    let mut told: Vec<(&str, Vec<bool>)> =
        told.iter().map(|(tool, took)| (tool.as_str(), took.iter().map(|took| *took < PAUSE / 2).collect())).collect();
    told.sort_unstable();
    assert_eq!(told, [("flaky", vec![true]), ("kept", vec![true]), ("queued", vec![false, true])]);
    assert_eq!(place.store().durations(1).unwrap()["queued"].len(), 1);
    drop(living);
    place.check();
}

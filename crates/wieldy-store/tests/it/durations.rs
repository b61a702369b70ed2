//! The durations of past runs, for dynamic timeouts.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{Backoff, Call, Code, RetryPolicy, ToolSpec};
use wieldy_testkit::{Act, Puppet};

use crate::world::TestHistory;

on_each_database!(durations_exclude_waits_and_cached_answers);

async fn durations_exclude_waits_and_cached_answers(history: TestHistory) {
    const PAUSE: Duration = Duration::from_secs(2);
    let retry = RetryPolicy { retries: 1, base: PAUSE, cap: PAUSE, backoff: Backoff::Linear };
    let spec = ToolSpec::new("flaky", "").read_only().retry(retry);
    let (flaky, _) = Puppet::new(spec, [Act::Fail(Code::TransportFailed, true), Act::Echo]);
    let (kept, runs) = Puppet::new(ToolSpec::new("kept", "").read_only().cache(PAUSE * 60), [Act::Echo]);
    let (failing, _) = Puppet::new(ToolSpec::new("failing", ""), [Act::Fail(Code::ToolReportedError, false)]);
    let (queued, _) = Puppet::new(ToolSpec::new("queued", "").read_only(), [Act::Take(PAUSE), Act::Echo]);
    let living = history.executor_with([flaky, kept, failing, queued], &history.options(), |builder| {
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
    let told = history.store().durations(9).unwrap();
    let mut told: Vec<(&str, Vec<bool>)> =
        told.iter().map(|(tool, took)| (tool.as_str(), took.iter().map(|took| *took < PAUSE / 2).collect())).collect();
    told.sort_unstable();
    assert_eq!(told, [("flaky", vec![true]), ("kept", vec![true]), ("queued", vec![false, true])]);
    assert_eq!(history.store().durations(1).unwrap()["queued"].len(), 1);
    drop(living);
    history.check();
}

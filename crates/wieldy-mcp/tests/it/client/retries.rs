//! Calls that are retried: those that never arrived, and those that may be repeated. No others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;
use wieldy_core::{Call, Caller, Options, RetryIf, Status};
use wieldy_mcp::client::{Address, Reach, ToolRule};

use super::bad_http::{ByHand, plain};
use super::{Stage, call, until};

fn calls(stage: &Stage) -> usize {
    stage.notes().iter().filter(|note| *note == "called echo").count()
}

// Shows: A3.3
#[tokio::test]
async fn a_call_that_crashes_its_server_is_made_once() {
    let stage = Stage::that_retries("crash before", |_| {}).await;
    let error = stage.error("echo").await;
    assert_eq!((error.code.as_str(), error.retryable, calls(&stage)), ("E3201", false, 1));
    stage.world.check();
}

#[tokio::test]
async fn an_idempotent_call_is_retried() {
    let idempotent = ToolRule { idempotent: Some(true), ..ToolRule::default() };
    let stage =
        Stage::that_retries("crash before", |settings| drop(settings.tools.rules.insert("echo".into(), idempotent)));
    let stage = stage.await;
    let error = stage.error("echo").await;
    assert_eq!((error.code.as_str(), error.retryable, calls(&stage)), ("E3201", true, 3));
    stage.world.check();
}

#[tokio::test]
async fn a_call_that_never_arrived_is_retried() {
    let mut server = ByHand::new(async |_, _, _| None).await;
    let address = Reach::Http(Address::new(server.url()));
    let stage = Stage::that_retries("", |settings| settings.reach = address).await;
    server.end().await;
    let id = stage.world.executor.spawn(call("echo", "hi"));
    until(|| stage.world.events().iter().any(|event| event.body.name() == "tool.retry.attempt")).await;
    server.begin().await;
    let result = stage.world.executor.wait(id, &Caller::local()).await.unwrap();
    assert_eq!((result.status, result.text().as_str(), server.calls()), (Status::Success, "hi", 1));
    stage.world.check();
}

#[tokio::test]
async fn status_429_is_retried_and_a_broken_call_is_not() {
    let cases = [(429, 2, true), (503, 1, false), (502, 1, false), (301, 1, false), (302, 1, false), (303, 1, false)];
    for (status, made, is_success) in cases {
        let refused = Arc::new(AtomicUsize::new(0));
        let server = ByHand::new(move |_, _, message: Value| {
            let is_first = message["method"] == "tools/call" && refused.fetch_add(1, Ordering::Relaxed) == 0;
            async move { is_first.then(|| plain(status, "text/plain", "no")) }
        })
        .await;
        let address = Reach::Http(Address::new(server.url()));
        let stage = Stage::that_retries("", |settings| settings.reach = address).await;
        let options = Options { retry_if: Some(RetryIf::new(|_| true)), ..Options::default() };
        let result = stage.world.executor.call(Call { options, ..call("echo", "hi") }).await;
        assert_eq!((server.calls(), result.status == Status::Success), (made, is_success), "{status}");
        stage.world.check();
    }
}

//! The cache, shared runs and idempotency keys.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use wieldy_core::{Call, Caller, Code, Held, Options, Status, ToolSpec};
use wieldy_testkit::{Act, Puppet, World};

const SECOND: Duration = Duration::from_secs(1);

fn cached_tool() -> ToolSpec {
    ToolSpec::new("read", "").read_only().reads("path").cache(10 * SECOND)
}

fn path(path: &str) -> Value {
    json!({ "path": path })
}

// Shows: A9.1
#[tokio::test(start_paused = true)]
async fn an_answer_is_given_again_until_it_expires() {
    let (tool, strings) = Puppet::new(cached_tool(), [Act::Echo]);
    let world = World::new([tool]);
    let first = world.call("read", path("a")).await;
    let second = world.call("read", json!({"path": "a"})).await;
    assert_eq!((first.cached, second.cached, second.attempts), (false, true, 0));
    assert_eq!((first.content, strings.runs()), (second.content, 1));
    let fresh = Call::new("read", path("a")).with(Options { fresh: true, ..Options::default() });
    assert!(!world.executor.call(fresh).await.cached);
    tokio::time::sleep(10 * SECOND).await;
    assert!(!world.call("read", path("a")).await.cached);
    insta::assert_snapshot!(world.tape(), @r#"
    #1 tool.call.pending {"arguments":{"path":"a"},"tool":"read"}
    #1 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"read"}
    #1 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":12,"tool":"read"}
    #2 tool.call.pending {"arguments":{"path":"a"},"tool":"read"}
    #2 tool.call.success {"status":"success","attempts":0,"cached":true,"output_bytes":12,"tool":"read"}
    #3 tool.call.pending {"arguments":{"path":"a"},"tool":"read"}
    #3 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"read"}
    #3 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":12,"tool":"read"}
    #4 tool.call.pending {"arguments":{"path":"a"},"tool":"read"}
    #4 tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"read"}
    #4 tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":12,"tool":"read"}
    "#);
}

// Shows: A9.1
#[tokio::test(start_paused = true)]
async fn an_answer_is_not_given_to_another_caller() {
    let (tool, strings) = Puppet::new(cached_tool(), [Act::Echo]);
    let world = World::new([tool]);
    let callers = [
        Caller::agent("a"),
        Caller::agent("b"),
        Caller { tenant: Some("acme".into()), ..Caller::agent("a") },
        Caller { permissions: Held::only(["x"]), ..Caller::agent("a") },
    ];
    for caller in callers {
        assert!(!world.executor.call(Call::new("read", path("a")).by(caller)).await.cached);
    }
    assert_eq!(strings.runs(), 4);
}

// Shows: A9.2
#[tokio::test(start_paused = true)]
async fn calls_that_ask_the_same_at_once_share_one_run() {
    let (tool, strings) = Puppet::new(cached_tool(), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let results = join_all((0..50).map(|_| world.call("read", path("a")))).await;
    assert!(results.iter().all(|result| result.is_success()));
    assert_eq!((strings.runs(), results.iter().filter(|result| result.cached).count()), (1, 49));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_call_that_shares_a_run_waits_no_longer_than_for_its_own() {
    let hour = 3600 * SECOND;
    let (read, reads) = Puppet::new(cached_tool(), [Act::Take(hour)]);
    let (pay, pays) = Puppet::new(ToolSpec::new("pay", ""), [Act::Take(hour)]);
    let world = World::new([read, pay]);
    for tool in ["read", "pay"] {
        let call = |timeout: Duration, queue_timeout: Duration| {
            let (timeout, queue_timeout) = (Some(timeout), Some(queue_timeout));
            let options = Options { idempotency_key: Some("k".into()), timeout, queue_timeout, ..Options::default() };
            world.executor.call(Call::new(tool, path("a")).with(options))
        };
        let began = tokio::time::Instant::now();
        let (patient, hurried) = tokio::join!(call(2 * hour, SECOND), async {
            let result = call(SECOND, 2 * SECOND).await;
            (result, began.elapsed())
        });
        assert!(patient.is_success(), "who runs it is not disturbed");
        let (result, waited) = hurried;
        let error = result.error.unwrap();
        assert_eq!((waited, result.status, error.retryable), (3 * SECOND, Status::Timeout, true));
        assert_eq!(error.message, "the same call runs already, and did not end within 3.000 s");
        assert_eq!(error.details["clock"], json!("attempt"));
        assert!(call(SECOND, SECOND).await.cached, "the same call gets its answer again");
    }
    assert_eq!((reads.runs(), pays.runs()), (1, 1));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_shared_run_that_is_cancelled_is_taken_over() {
    let (tool, strings) = Puppet::new(cached_tool(), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let leader = world.executor.spawn(Call::new("read", path("a")));
    tokio::task::yield_now().await;
    let follower = world.executor.spawn(Call::new("read", path("a")));
    tokio::time::sleep(SECOND / 2).await;
    world.executor.cancel(leader, &Caller::local());
    let result = world.executor.wait(follower, &Caller::local()).await.unwrap();
    assert!(result.is_success() && !result.cached, "another's cancellation is not one's own");
    assert_eq!(strings.runs(), 2);
    world.check();
}

// Shows: A9.2
#[tokio::test(start_paused = true)]
async fn a_write_invalidates_only_answers_about_the_same_path() {
    let (read, strings) = Puppet::new(cached_tool(), [Act::Echo]);
    let (write, _) = Puppet::new(ToolSpec::new("write", "").writes("path"), [Act::Echo]);
    let world = World::new([read, write]);
    world.call("read", path("a/x")).await;
    world.call("read", path("b")).await;
    world.call("write", path("a")).await;
    assert!(!world.call("read", path("a/x")).await.cached);
    assert!(world.call("read", path("b")).await.cached);
    assert_eq!(strings.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn failures_are_not_cached() {
    let (tool, strings) = Puppet::new(cached_tool(), [Act::Fail(Code::ToolReportedError, true), Act::Echo]);
    let world = World::new([tool]);
    assert!(!world.call("read", path("a")).await.is_success());
    assert!(world.call("read", path("a")).await.is_success());
    assert_eq!(strings.runs(), 2);
}

// Shows: A12
#[tokio::test(start_paused = true)]
async fn a_repeated_idempotency_key_returns_the_first_result() {
    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Take(SECOND)]);
    let world = World::new([tool]);
    let pay = |amount: u32, key: &str, agent: &str| {
        let options = Options { idempotency_key: Some(key.into()), ..Options::default() };
        world.executor.call(Call::new("pay", json!({ "amount": amount })).with(options).by(Caller::agent(agent)))
    };
    let results = join_all((0..20).map(|_| pay(5, "k", "ada"))).await;
    assert!(results.iter().all(|result| result.text() == r#"{"amount":5}"#));
    assert_eq!((strings.runs(), results.iter().filter(|result| result.cached).count()), (1, 19));
    assert!(!pay(5, "other", "ada").await.cached);
    assert!(!pay(5, "k", "eve").await.cached, "a key belongs to who used it");
    let error = pay(6, "k", "ada").await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str(), error.suggestion.as_deref()),
        (
            Code::ValidationFailed,
            "the idempotency key was used before for another call: with other arguments, in another context, for another user, with other \
             scopes or permissions, or with an earlier definition of the tool",
            Some("use another key, or call it exactly as before to get the first result")
        )
    );
    assert_eq!(strings.runs(), 3);
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_may_have_had_an_effect_is_remembered_under_its_key() {
    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Fail(Code::TransportFailed, true), Act::Echo]);
    let world = World::new([tool]);
    let pay = || {
        let options = Options { idempotency_key: Some("k".into()), ..Options::default() };
        world.executor.call(Call::new("pay", json!({})).with(options))
    };
    let first = pay().await;
    let second = pay().await;
    assert_eq!((first.error, second.cached, strings.runs()), (second.error, true, 1), "never run again by mistake");
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_caller_went_away_in_the_middle_does_not_run_again() {
    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Take(10 * SECOND)]);
    let world = World::new([tool]);
    let pay = || {
        let options = Options { idempotency_key: Some("order 1".into()), ..Options::default() };
        world.executor.call(Call::new("pay", json!({})).with(options))
    };
    assert!(tokio::time::timeout(SECOND, pay()).await.is_err(), "the caller hangs up");
    let again = pay().await;
    assert_eq!((again.error.map(|error| error.code), again.cached), (Some(Code::OutcomeUnknown), true));
    assert_eq!(strings.runs(), 1, "it may have taken effect");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_caller_went_away_before_anything_ran_is_free_again() {
    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Take(10 * SECOND)]);
    let world = World::with([tool], |builder| builder.limits.calls_running_max = 1);
    let pay = |key: &str| {
        let options = Options { idempotency_key: Some(key.into()), ..Options::default() };
        world.executor.call(Call::new("pay", json!({})).with(options))
    };
    let (first, second) = tokio::join!(pay("a"), tokio::time::timeout(SECOND, pay("b")));
    assert!(first.is_success() && second.is_err(), "the second waits for a slot, and its client is gone");
    assert!(pay("b").await.is_success());
    assert_eq!(strings.runs(), 2);
    world.check();
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_write_invalidates_answers_too() {
    let (read, reads) = Puppet::new(cached_tool(), [Act::Take(SECOND)]);
    let (write, _) = Puppet::new(ToolSpec::new("write", "").writes("path"), [Act::Hang]);
    let world = World::new([read, write]);
    let writing = tokio::time::timeout(5 * SECOND, world.call("write", path("a")));
    let reading = async {
        tokio::time::sleep(SECOND).await;
        world.call("read", path("a")).await
    };
    let (gone, read) = tokio::join!(writing, reading);
    assert!(gone.is_err() && read.is_success(), "it read while something was written");
    assert!(!world.call("read", path("a")).await.cached, "so its answer is not worth caching");
    assert_eq!(reads.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn idempotency_keys_work_without_a_cache() {
    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Echo]);
    let world = World::with([tool], |builder| builder.cache_bytes_max = 0);
    for cached in [false, true] {
        let options = Options { idempotency_key: Some("order 1".into()), ..Options::default() };
        assert_eq!(world.executor.call(Call::new("pay", json!({})).with(options)).await.cached, cached);
    }
    assert_eq!(strings.runs(), 1);
}

// Shows: X5.2
#[tokio::test(start_paused = true)]
async fn an_answer_that_equals_an_earlier_one_of_the_session_says_so() {
    let (text, changed): (&str, &str) = ("x".repeat(512).leak(), "y".repeat(512).leak());
    let acts = [text, text, changed, changed, changed].map(Act::Say);
    let (tool, _) = Puppet::new(ToolSpec::new("read", "").read_only().reads("path"), acts);
    let world = World::new([tool]);
    let one = Caller { session: Some("1".into()), ..Caller::agent("a") };
    let two = Caller { session: Some("2".into()), ..Caller::agent("a") };
    let by = async |caller: &Caller| world.executor.call(Call::new("read", path("a")).by(caller.clone())).await;
    let first = by(&one).await;
    assert_eq!((first.same_as, first.text()), (None, text.to_owned()));
    let again = by(&one).await;
    let line = format!("\n[the same answer as that of the earlier call {}]\n", first.execution_id);
    assert_eq!((again.same_as, again.text()), (Some(first.execution_id), format!("{text}{line}")));
    let new = by(&one).await;
    assert_eq!((new.same_as, new.text()), (None, changed.to_owned()));
    assert_eq!(by(&two).await.same_as, None, "another session has not seen it");
    assert_eq!(by(&one).await.same_as, Some(new.execution_id));
}

#[tokio::test(start_paused = true)]
async fn short_answers_and_those_of_other_arguments_are_not_compared() {
    let (short, long): (&str, &str) = ("x".repeat(511).leak(), "x".repeat(512).leak());
    let acts = [short, short, long, long].map(Act::Say);
    let (tool, _) = Puppet::new(ToolSpec::new("read", "").read_only().reads("path"), acts);
    let world = World::new([tool]);
    for argument in ["a", "a", "a", "b"] {
        assert_eq!(world.call("read", path(argument)).await.same_as, None, "{argument}");
    }
}

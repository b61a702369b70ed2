//! Absurd settings: nothing panics, and nothing waits forever.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use wieldy_core::{
    Batch, BreakerPolicy, Call, Caller, Code, DynamicTimeout, Filter, Limits, Options, Per, Plan, Policy, Priority,
    Rate, RateKind, Seen, ToolSpec,
};
use wieldy_testkit::{Act, Puppet, World, bounded};

const SECOND: Duration = Duration::from_secs(1);
const FOR_EVER: Duration = Duration::MAX;

#[tokio::test(start_paused = true)]
async fn clocks_may_be_set_to_for_ever() {
    let world = World::new([Puppet::reading("t", Act::Take(SECOND))]);
    let options = Options {
        timeout: Some(FOR_EVER),
        queue_timeout: Some(FOR_EVER),
        deadline: Some(FOR_EVER),
        silence: Some(FOR_EVER),
        ..Options::default()
    };
    assert!(world.executor.call(Call::new("t", json!({})).with(options)).await.is_success());
    world.check();
}

#[tokio::test(start_paused = true)]
async fn an_endless_retry_delay_ends_the_call() {
    let world = World::new([Puppet::reading("t", Act::Busy(FOR_EVER))]);
    for deadline in [None, Some(60 * SECOND)] {
        let call = Call::new("t", json!({})).with(Options { deadline, ..Options::default() });
        let result = bounded(world.executor.call(call)).await;
        assert_eq!((result.error.unwrap().code, result.attempts), (Code::TransportFailed, 1));
    }
    world.check();
}

#[tokio::test(start_paused = true)]
async fn answers_keys_questions_and_breakers_may_be_kept_for_ever() {
    let (read, reads) = Puppet::new(ToolSpec::new("read", "").read_only().cache(FOR_EVER), [Act::Echo]);
    let (fail, fails) = Puppet::new(ToolSpec::new("fail", ""), [Act::Fail(Code::ExecutionError, true)]);
    let world = World::with([read, fail, Puppet::writing("write", Act::Echo)], |builder| {
        builder.idempotency_ttl = FOR_EVER;
        builder.confirmation_timeout = FOR_EVER;
        builder.breaker = BreakerPolicy { failures_max: 1, open_for: FOR_EVER };
        builder.grace = FOR_EVER;
        builder.task_ttl = FOR_EVER;
        builder.confirmer = Some(Arc::new(Agreeing));
    });
    for cached in [false, true] {
        assert_eq!(world.call("read", json!({})).await.cached, cached);
    }
    for cached in [false, true] {
        let options = Options { idempotency_key: Some("k".into()), require_confirmation: true, ..Options::default() };
        assert_eq!(world.executor.call(Call::new("write", json!({})).with(options)).await.cached, cached);
    }
    for code in [Code::ExecutionError, Code::CircuitOpen] {
        assert_eq!(world.call("fail", json!({})).await.error.unwrap().code, code);
    }
    assert_eq!((reads.runs(), fails.runs()), (1, 1));
    let cut_short = Call::new("write", json!({})).with(Options { timeout: Some(SECOND), ..Options::default() });
    assert!(world.executor.call(cut_short).await.is_success());
    bounded(world.executor.shutdown(FOR_EVER)).await;
    world.check();
}

struct Agreeing;

impl wieldy_core::Confirmer for Agreeing {
    fn confirm<'a>(
        &'a self,
        question: &'a wieldy_core::Confirmation,
    ) -> futures_util::future::BoxFuture<'a, Result<wieldy_core::Answer, String>> {
        Box::pin(async { Ok(question.approve()) })
    }
}

#[tokio::test(start_paused = true)]
async fn rates_and_quotas_may_be_for_ever() {
    for kind in [RateKind::Rate, RateKind::Quota] {
        let world = World::with([Puppet::reading("t", Act::Echo)], |builder| {
            let calls = NonZeroU32::new(2).unwrap();
            builder.rates = vec![Rate { per: Per::Agent, tool: None, calls, window: FOR_EVER, kind }];
        });
        for code in [None, None, Some(Code::RateLimited)] {
            assert_eq!(world.call("t", json!({})).await.error.map(|error| error.code), code);
        }
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn priorities_hold_however_slowly_they_age() {
    let world = World::with([Puppet::reading("t", Act::Take(SECOND))], |builder| {
        builder.limits = Limits { calls_running_max: 1, ageing: FOR_EVER, ..Limits::default() };
    });
    let call = |priority| {
        let options = Options { priority: Priority(priority), ..Options::default() };
        world.executor.call(Call::new("t", json!({"priority": priority})).with(options))
    };
    let (first, low, high) = tokio::join!(call(0), call(-128), call(127));
    assert!(first.is_success() && low.is_success() && high.is_success());
    assert!(high.timing.queued_ms < low.timing.queued_ms);
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_dynamic_timeout_with_mad_bounds_is_still_one() {
    for (factor, at_least, at_most) in
        [(f64::NAN, SECOND, SECOND), (-1.0, SECOND, SECOND), (1e300, SECOND, FOR_EVER), (1.0, 2 * SECOND, SECOND)]
    {
        let world = World::with([Puppet::reading("t", Act::Take(SECOND / 10))], |builder| {
            builder.dynamic_timeout = Some(DynamicTimeout { runs_min: 0, factor, at_least, at_most });
        });
        for _ in 0..3 {
            assert!(world.call("t", json!({})).await.is_success());
        }
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_may_want_room_for_everything() {
    let world = World::with([Puppet::reading("t", Act::Echo)], |builder| builder.observable_max = usize::MAX);
    let mut events = world.executor.subscribe(Filter::default(), usize::MAX);
    world.call("t", json!({})).await;
    assert!(matches!(events.next().await, Some(Seen::Event(_))));
}

#[tokio::test(start_paused = true)]
async fn a_plan_without_any_concurrency_runs_calls_one_by_one() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only(), [Act::Take(SECOND)]);
    let world = World::with([tool], |builder| {
        let none = Plan { parallel_max: Some(0), ..Plan::UNLIMITED };
        builder.policy = Policy::default().with_plan("none", none);
    });
    let mut batch = Batch::new((0..3).map(|_| Call::new("t", json!({}))));
    batch.caller = Arc::new(Caller { plan: Some("none".into()), ..Caller::local() });
    let summary = world.executor.batch(batch).await.unwrap().summary;
    assert_eq!((summary.succeeded, strings.most_at_once()), (3, 1));
    world.check();
}

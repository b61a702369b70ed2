//! Clocks, retries, panics.

use std::time::Duration;

use serde_json::json;
use wieldy_core::{
    Backoff, Call, Caller, Code, Content, DynamicTimeout, Limit, Options, Outcome, ResourceLimits, RetryIf,
    RetryPolicy, Status, ToolResult, ToolSpec,
};
use wieldy_testkit::{Act, Puppet, World};

const SECOND: Duration = Duration::from_secs(1);

/// A backoff of one second, two seconds, and so on, without randomness.
fn linear(retries: u32) -> RetryPolicy {
    RetryPolicy { retries, base: SECOND, cap: 60 * SECOND, backoff: Backoff::Linear }
}

async fn called(world: &World, options: Options) -> ToolResult {
    world.executor.call(Call::new("t", json!({})).with(options)).await
}

fn code(result: &ToolResult) -> Option<Code> {
    result.error.as_ref().map(|error| error.code)
}

// Shows: D1
#[tokio::test(start_paused = true)]
async fn a_call_that_goes_well_leaves_three_events() {
    let world = World::new([Puppet::reading("echo", Act::Echo)]);
    let result = world.call("echo", json!({"text": "hi"})).await;
    assert_eq!((result.status, result.text().as_str(), result.attempts), (Status::Success, r#"{"text":"hi"}"#, 1));
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"arguments":{"text":"hi"},"tool":"echo"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"echo"}
    tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":13,"tool":"echo"}
    "#);
}

// Shows: A3.1
#[tokio::test(start_paused = true)]
async fn a_transient_failure_is_retried_with_growing_delays() {
    let acts = [Act::Fail(Code::TransportFailed, true), Act::Fail(Code::TransportFailed, true), Act::Say("at last")];
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").read_only().retry(linear(2)), acts);
    let world = World::new([tool]);
    let began = tokio::time::Instant::now();
    let result = called(&world, Options::default()).await;
    assert_eq!((result.text().as_str(), result.attempts, strings.runs()), ("at last", 3, 3));
    assert_eq!(began.elapsed(), 3 * SECOND);
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"t"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"t"}
    tool.retry.attempt {"attempt":2,"attempts_max":3,"delay_ms":1000,"error":{"code":"E3201","name":"TRANSPORT_FAILED","category":"network_error","message":"told to fail","retryable":true},"tool":"t"}
    tool.call.started {"attempt":2,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"t"}
    tool.retry.attempt {"attempt":3,"attempts_max":3,"delay_ms":2000,"error":{"code":"E3201","name":"TRANSPORT_FAILED","category":"network_error","message":"told to fail","retryable":true},"tool":"t"}
    tool.call.started {"attempt":3,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"t"}
    tool.retry.success {"attempts":3,"tool":"t"}
    tool.call.success {"status":"success","attempts":3,"cached":false,"output_bytes":7,"tool":"t"}
    "#);
}

#[tokio::test(start_paused = true)]
async fn retries_end_when_they_are_used_up() {
    let (tool, strings) =
        Puppet::new(ToolSpec::new("t", "").read_only().retry(linear(2)), [Act::Fail(Code::TransportFailed, true)]);
    let world = World::new([tool]);
    let result = called(&world, Options { retries: Some(1), ..Options::default() }).await;
    assert_eq!((code(&result), result.attempts, strings.runs()), (Some(Code::TransportFailed), 2, 2));
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"t"}
    tool.call.started {"attempt":1,"attempts_max":2,"timeout_ms":30000,"read_only":true,"tool":"t"}
    tool.retry.attempt {"attempt":2,"attempts_max":2,"delay_ms":1000,"error":{"code":"E3201","name":"TRANSPORT_FAILED","category":"network_error","message":"told to fail","retryable":true},"tool":"t"}
    tool.call.started {"attempt":2,"attempts_max":2,"timeout_ms":30000,"read_only":true,"tool":"t"}
    tool.retry.exhausted {"attempts":2,"error":{"code":"E3201","name":"TRANSPORT_FAILED","category":"network_error","message":"told to fail","retryable":true},"tool":"t"}
    tool.call.failure {"status":"failed","attempts":2,"cached":false,"output_bytes":0,"error":{"code":"E3201","name":"TRANSPORT_FAILED","category":"network_error","message":"told to fail","retryable":true},"tool":"t"}
    "#);
}

// Shows: A3.2
#[tokio::test(start_paused = true)]
async fn a_permanent_error_is_retried_only_if_the_caller_says_so() {
    let (tool, strings) =
        Puppet::new(ToolSpec::new("t", "").read_only().retry(linear(2)), [Act::Fail(Code::InvalidInput, true)]);
    let world = World::new([tool]);
    called(&world, Options::default()).await;
    assert_eq!(strings.runs(), 1);
    let retry_if = RetryIf::new(|error| error.code == Code::InvalidInput);
    called(&world, Options { retry_if: Some(retry_if), ..Options::default() }).await;
    assert_eq!(strings.runs(), 1 + 3);
    let never = RetryIf::new(|_| panic!("a predicate that panics says no"));
    called(&world, Options { retry_if: Some(never), ..Options::default() }).await;
    assert_eq!(strings.runs(), 1 + 3 + 1);
    world.check();
}

// Shows: A3.3
#[tokio::test(start_paused = true)]
async fn a_call_that_may_have_had_an_effect_is_never_repeated() {
    let spec = || ToolSpec::new("t", "").retry(linear(2));
    let always = || Options { retry_if: Some(RetryIf::new(|_| true)), ..Options::default() };
    for (spec, effect_possible, runs) in [
        (spec(), true, 1),
        (spec(), false, 3), // it failed before it had an effect
        (spec().idempotent(), true, 3),
        (spec().read_only(), true, 3),
    ] {
        let (tool, strings) = Puppet::new(spec, [Act::Fail(Code::TransportFailed, effect_possible)]);
        let world = World::new([tool]);
        let result = called(&world, always()).await;
        assert_eq!(strings.runs(), runs);
        assert_eq!(result.error.unwrap().retryable, runs == 3, "what must not be repeated is not called retryable");
    }
}

// Shows: A3.4
#[tokio::test(start_paused = true)]
async fn the_retry_delay_of_a_server_is_honoured() {
    let (tool, _) =
        Puppet::new(ToolSpec::new("t", "").read_only().retry(linear(1)), [Act::Busy(20 * SECOND), Act::Echo]);
    let world = World::new([tool]);
    let began = tokio::time::Instant::now();
    assert!(called(&world, Options::default()).await.is_success());
    assert_eq!(began.elapsed(), 20 * SECOND);
}

// Shows: A3.5
#[tokio::test(start_paused = true)]
async fn retries_never_pass_the_callers_deadline() {
    let (tool, strings) =
        Puppet::new(ToolSpec::new("t", "").read_only().retry(linear(5)), [Act::Fail(Code::TransportFailed, true)]);
    let world = World::new([tool]);
    let began = tokio::time::Instant::now();
    let result = called(&world, Options { deadline: Some(SECOND * 5 / 2), ..Options::default() }).await;
    assert_eq!((code(&result), strings.runs()), (Some(Code::TransportFailed), 2), "the next would come after 3 s");
    assert_eq!(began.elapsed(), SECOND);
    world.check();
}

// Shows: A2.3
#[tokio::test(start_paused = true)]
async fn each_clock_ends_with_its_own_cause() {
    let take = |time| Puppet::reading("t", Act::Take(time));
    let clock = |result: &ToolResult| result.error.as_ref().unwrap().details["clock"].as_str().unwrap().to_owned();
    let once = Options { retries: Some(0), ..Options::default() };

    let world = World::new([take(60 * SECOND)]);
    let result = called(&world, Options { timeout: Some(SECOND), ..once.clone() }).await;
    assert_eq!((result.status, clock(&result).as_str()), (Status::Timeout, "attempt"));
    assert_eq!(result.error.as_ref().unwrap().message, "the run was stopped after 1.000 s");

    let result = called(&world, Options { deadline: Some(2 * SECOND), ..once.clone() }).await;
    assert_eq!(clock(&result), "total");

    let result = called(&world, Options { silence: Some(3 * SECOND), ..once.clone() }).await;
    assert_eq!(clock(&result), "silence");

    let ticking = World::new([Puppet::reading("t", Act::Tick(10, 2 * SECOND))]);
    let result = called(&ticking, Options { silence: Some(3 * SECOND), ..once.clone() }).await;
    assert_eq!(result.status, Status::Success, "progress is a sign of life");
    let result = called(&ticking, Options { silence: Some(3 * SECOND), timeout: Some(9 * SECOND), ..once }).await;
    assert_eq!(clock(&result), "attempt", "but endless progress does not beat the attempt clock");
    world.check();
    ticking.check();
}

// Shows: E4
#[tokio::test(start_paused = true)]
async fn output_before_a_stop_is_returned() {
    let world = World::new([Puppet::writing("t", Act::PrintAndWait("half of it"))]);
    let result = called(&world, Options { timeout: Some(SECOND), ..Options::default() }).await;
    assert_eq!((result.status, result.partial), (Status::Timeout, true));
    assert_eq!(result.content, [Content::text("half of it")]);
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"t"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":1000,"read_only":false,"tool":"t"}
    tool.call.progress {"message":"half of it","stream":"stdout","tool":"t"}
    tool.call.timeout {"status":"timeout","attempts":1,"cached":false,"output_bytes":10,"error":{"code":"E3103","name":"TIMEOUT","category":"timeout_error","message":"the run was stopped after 1.000 s","retryable":false,"suggestion":"give it more time, or ask for less at once","details":{"clock":"attempt","after_ms":1000.0,"timeout_ms":1000.0}},"tool":"t"}
    "#);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_reached_a_limit_before_it_was_stopped_says_so() {
    let spec = ToolSpec::new("t", "").read_only();
    let tool = wieldy_core::tool(spec, |_: serde_json::Value, run: wieldy_core::Run| async move {
        run.stop().cancelled().await;
        let overrun = wieldy_core::Overrun { limit: Limit::Processes, allowed: 40, used: 40, session_used: None };
        Ok(Outcome::text("half").failed(overrun.error()))
    });
    let world = World::new([std::sync::Arc::new(tool) as wieldy_core::SharedTool]);
    let result = called(&world, Options { timeout: Some(SECOND), retries: Some(0), ..Options::default() }).await;
    let error = result.error.unwrap();
    assert_eq!((result.status, error.code), (Status::Timeout, Code::Timeout));
    let message =
        "the run was stopped after 1.000 s, and the run passed its limit `processes`: it used 40, allowed are 40";
    assert_eq!(error.message, message);
    let details = json!({"clock": "attempt", "after_ms": 1000.0, "timeout_ms": 1000.0, "limit": "processes", "allowed": 40, "used": 40});
    assert_eq!(json!(error.details), details);
}

// Shows: A1
#[tokio::test(start_paused = true)]
async fn a_panic_in_a_tool_is_an_error_and_the_executor_goes_on() {
    let world = World::new([Puppet::writing("t", Act::Panic), Puppet::reading("echo", Act::Echo)]);
    let result = called(&world, Options::default()).await;
    let error = result.error.as_ref().unwrap();
    assert_eq!((error.code, &error.details["panic"]), (Code::ExecutionError, &json!("told to panic")));
    assert!(world.call("echo", json!({})).await.is_success());
    world.check();
}

// Shows: A11
#[tokio::test(start_paused = true)]
async fn a_dynamic_timeout_learns_only_from_runs_that_finished() {
    let acts = [Act::Take(SECOND), Act::Take(SECOND), Act::Take(SECOND), Act::Take(20 * SECOND)];
    let (tool, _) = Puppet::new(ToolSpec::new("t", "").retry(RetryPolicy::NEVER), acts);
    let world = World::with([tool], |builder| {
        builder.dynamic_timeout = Some(DynamicTimeout { runs_min: 3, factor: 2.0, ..DynamicTimeout::default() });
    });
    for _ in 0..3 {
        assert!(called(&world, Options::default()).await.is_success());
    }
    for _ in 0..5 {
        let result = called(&world, Options::default()).await;
        assert_eq!(result.error.unwrap().details["after_ms"], json!(2000.0), "a run that was stopped teaches nothing");
    }
}

/// P-QTA-01.
#[tokio::test(start_paused = true)]
async fn absurd_options_are_refused_and_huge_ones_capped() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let zero = called(&world, Options { timeout: Some(Duration::ZERO), ..Options::default() }).await;
    assert_eq!(zero.error.unwrap().message, "the option `timeout` is 0, so nothing could ever run");
    let mut options = Options { timeout: Some(Duration::MAX), ..Options::default() };
    (options.deadline, options.silence, options.queue_timeout) = (options.timeout, options.timeout, options.timeout);
    options.retries = Some(u32::MAX);
    assert!(called(&world, options).await.is_success());
}

// Shows: C1.1
#[tokio::test(start_paused = true)]
async fn an_answer_that_does_not_fit_the_output_schema_is_an_error() {
    let schema = json!({"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]});
    let spec = ToolSpec { output_schema: Some(schema), ..ToolSpec::new("t", "").read_only() };
    let (tool, _) = Puppet::new(spec, [Act::Give(json!({"count": 1})), Act::Give(json!({"count": "x"})), Act::Echo]);
    let world = World::new([tool]);
    assert!(called(&world, Options::default()).await.is_success());
    for message in ["at `/count`: value is not of type \"integer\"", "at ``: value is not of type \"object\""] {
        let error = called(&world, Options::default()).await.error.unwrap();
        assert_eq!(error.code, Code::OutputSchemaMismatch);
        assert_eq!(error.message, format!("the tool's answer does not fit its output schema {message}"));
        assert!(error.suggestion.is_some_and(|advice| advice.starts_with("report it as a bug of the tool")));
    }
}

const MIB: u64 = 1 << 20;

/// Returns a tool that answers with the limits of its run.
fn telling(spec: ToolSpec) -> std::sync::Arc<dyn wieldy_core::AnyTool> {
    std::sync::Arc::new(wieldy_core::tool(spec.read_only(), |_: serde_json::Value, run: wieldy_core::Run| async move {
        Ok(Outcome::default().structured(json!(run.confinement().limits)))
    }))
}

fn memory_and_processes(memory_bytes: Option<u64>, processes: Option<u64>) -> ResourceLimits {
    ResourceLimits { memory_bytes, processes, ..ResourceLimits::NONE }
}

/// Returns the limits that hold for a call, or the details of its refusal.
async fn asked(world: &World, name: &str, by: Caller, limits: ResourceLimits) -> serde_json::Value {
    let call = Call::new(name, json!({})).by(by).with(Options { limits, ..Options::default() });
    let result = world.executor.call(call).await;
    match result.error {
        None => result.structured.unwrap(),
        Some(error) => {
            assert_eq!((error.code, result.attempts), (Code::ResourceLimitExceeded, 0), "{error:?}");
            serde_json::to_value(&error.details).unwrap()
        }
    }
}

// Shows: B8.1
#[tokio::test(start_paused = true)]
async fn a_call_may_ask_for_more_than_the_default_up_to_the_maximum() {
    let limits = memory_and_processes;
    let tool = |name: &str, limits| telling(ToolSpec { limits, ..ToolSpec::new(name, "") });
    let tools = [
        tool("plain", ResourceLimits::NONE),
        tool("small", limits(Some(50), None)),
        tool("large", limits(Some(200), None)),
        tool("huge", limits(Some(2000), None)),
    ];
    let world = World::with(tools, |builder| {
        builder.resource_limits = limits(Some(100), Some(10));
        builder.resource_limits_max = limits(Some(1000), None);
    });
    let held = |memory: u64, processes: u64| json!({"memory_bytes": memory, "processes": processes});
    let refused = |limit: &str, asked: u64, allowed: u64, by: &str| json!({"limit": limit, "asked": asked, "allowed": allowed, "held_by": by});
    for (name, wish, told) in [
        ("plain", limits(None, None), held(100, 10)),
        ("plain", limits(Some(99), Some(9)), held(99, 9)),
        ("plain", limits(Some(101), None), held(101, 10)),
        ("plain", limits(Some(1000), None), held(1000, 10)),
        ("plain", limits(Some(1001), None), refused("memory_bytes", 1001, 1000, "executor_max")),
        ("plain", limits(None, Some(11)), refused("processes", 11, 10, "executor")),
        ("small", limits(None, None), held(50, 10)),
        ("small", limits(Some(49), None), held(49, 10)),
        ("small", limits(Some(100), None), held(100, 10)),
        ("large", limits(None, None), held(200, 10)),
        ("large", limits(Some(201), None), held(201, 10)),
        ("huge", limits(None, None), held(1000, 10)),
        ("huge", limits(Some(1500), None), refused("memory_bytes", 1500, 1000, "executor_max")),
    ] {
        assert_eq!(asked(&world, name, Caller::local(), wish).await, told, "`{name}`, asked for {wish:?}");
    }
    // A call may set a limit that the executor leaves unset.
    let open_files = ResourceLimits { open_files: Some(7), ..ResourceLimits::NONE };
    let told = asked(&world, "plain", Caller::local(), open_files).await;
    assert_eq!(told, json!({"memory_bytes": 100, "processes": 10, "open_files": 7}));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_call_may_ask_for_two_cores_and_four_gibibytes_where_no_maximum_is_set() {
    let tools = || [telling(ToolSpec::new("t", ""))];
    let limits = |cpu: u64, mib: u64| ResourceLimits {
        cpu_millicores: Some(cpu),
        memory_bytes: Some(mib * MIB),
        ..ResourceLimits::NONE
    };
    let told = async |world: &World, cpu, mib| {
        let told = asked(world, "t", Caller::local(), limits(cpu, mib)).await;
        match told.get("held_by") {
            None => format!("{} {}", told["cpu_millicores"], told["memory_bytes"].as_u64().unwrap() / MIB),
            Some(by) => format!("{} {} {by}", told["limit"].as_str().unwrap(), told["allowed"]).replace('"', ""),
        }
    };
    let world = World::new(tools());
    assert_eq!(told(&world, 1000, 2048).await, "1000 2048");
    assert_eq!(told(&world, 2000, 4096).await, "2000 4096");
    assert_eq!(told(&world, 2001, 1).await, "cpu_millicores 2000 built_in");
    assert_eq!(told(&world, 1, 4097).await, format!("memory_bytes {} built_in", 4096 * MIB));
    let small = World::with(tools(), |builder| builder.machine = limits(1000, 2048));
    assert_eq!(told(&small, 1000, 2048).await, "1000 2048");
    assert_eq!(told(&small, 1001, 1).await, "cpu_millicores 1000 machine");
    // An operator's default above that is allowed: it holds for calls that ask for nothing.
    let wide = World::with(tools(), |builder| builder.resource_limits = limits(8000, 9000));
    assert_eq!(told(&wide, 8000, 9000).await, "8000 9000");
    assert_eq!(told(&wide, 8001, 1).await, "cpu_millicores 8000 executor");
}

// Shows: B8.1
#[tokio::test(start_paused = true)]
async fn the_smallest_maximum_of_executor_plan_and_tool_counts() {
    let memory = |bytes| memory_and_processes(Some(bytes), None);
    let tools = [
        telling(ToolSpec::new("plain", "")),
        telling(ToolSpec { limits: memory(100), limits_max: memory(300), ..ToolSpec::new("own", "") }),
        telling(ToolSpec::new("operators", "")),
    ];
    let world = World::with(tools, |builder| {
        builder.resource_limits = memory(100);
        builder.resource_limits_max = memory(1000);
        let limits = wieldy_core::ToolLimits { limits: memory(150), max: memory(400) };
        builder.tool_limits.insert("operators".into(), limits);
        let plan = |bytes| wieldy_core::Plan { resources: memory(bytes), ..wieldy_core::Plan::UNLIMITED };
        let policy = std::mem::take(&mut builder.policy);
        builder.policy = policy.with_plan("Tiny", plan(80)).with_plan("Some", plan(350));
    });
    let by = |plan: &str| Caller { plan: (!plan.is_empty()).then(|| plan.to_owned()), ..Caller::local() };
    for (name, plan, wish, told) in [
        ("plain", "", 1000, json!(1000)),
        ("own", "", 0, json!(100)),
        ("own", "", 300, json!(300)),
        ("own", "", 301, json!([300, "tool_max"])),
        ("operators", "", 0, json!(150)),
        ("operators", "", 400, json!(400)),
        ("operators", "", 401, json!([400, "operator_max_for_tool"])),
        ("operators", "Some", 351, json!([350, "plan"])),
        ("own", "Some", 301, json!([300, "tool_max"])),
        ("plain", "Tiny", 0, json!(80)),
        ("plain", "Tiny", 81, json!([80, "plan"])),
    ] {
        let limits = if wish == 0 { ResourceLimits::NONE } else { memory(wish) };
        let held = asked(&world, name, by(plan), limits).await;
        let held = match held.get("held_by") {
            None => held["memory_bytes"].clone(),
            Some(by) => json!([held["allowed"], by]),
        };
        assert_eq!(held, told, "`{name}` by `{plan}`, asked for {wish}");
    }
    world.check();
}

// Shows: A3.6
#[tokio::test(start_paused = true)]
async fn a_call_and_a_tool_set_delay_and_growth_of_their_retries() {
    let failing = |spec: ToolSpec| {
        let acts =
            [Act::Fail(Code::TransportFailed, true), Act::Fail(Code::TransportFailed, true), Act::Say("at last")];
        Puppet::new(spec, acts).0
    };
    let own = ToolSpec { retry_delay: Some(3 * SECOND), backoff: Some(Backoff::Linear), ..ToolSpec::new("own", "") };
    let world = World::new([failing(ToolSpec::new("t", "").read_only()), failing(own.read_only())]);
    let asked =
        Options { retry_delay: Some(Duration::from_millis(200)), backoff: Some(Backoff::Linear), ..Options::default() };
    for (tool, options, waited) in [("t", asked, 600), ("own", Options::default(), 9_000)] {
        let began = tokio::time::Instant::now();
        let result = world.executor.call(Call::new(tool, json!({})).with(options)).await;
        assert_eq!((result.text().as_str(), result.attempts), ("at last", 3));
        assert_eq!(began.elapsed(), Duration::from_millis(waited), "{tool}");
    }
    // The cap of the policy does not shorten the delay that was asked for.
    let world = World::new([failing(ToolSpec::new("t", "").read_only().retry(linear(1)))]);
    let began = tokio::time::Instant::now();
    let result = called(&world, Options { retry_delay: Some(90 * SECOND), ..Options::default() }).await;
    assert_eq!((result.attempts, began.elapsed()), (2, 90 * SECOND));
}

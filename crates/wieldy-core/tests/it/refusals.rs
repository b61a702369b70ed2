//! Refused calls never run, and each leaves its record.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use wieldy_core::{
    Answer, Batch, Call, Caller, Check, Code, Confirmation, Confirmer, Decision, Durability, Event, Executor, Held,
    Journal, JournalError, MemoryJournal, Options, Plan, Policy, Provider, Question, Receipt, RegisterError,
    Registration, Status, ToolFilter, ToolSpec, Unbound,
};
use wieldy_testkit::{Act, FailingJournal, HangingJournal, Puppet, World};

struct Rule(&'static str, fn(&Question<'_>) -> Result<Decision, String>);

impl Check for Rule {
    fn name(&self) -> &str {
        self.0
    }

    fn check<'a>(&'a self, question: &'a Question<'a>) -> BoxFuture<'a, Result<Decision, String>> {
        Box::pin(async { (self.1)(question) })
    }
}

fn world_with_rules(rules: impl IntoIterator<Item = Rule>) -> World {
    World::with([Puppet::reading("t", Act::Echo)], |builder| {
        for rule in rules {
            let policy = std::mem::take(&mut builder.policy);
            builder.policy = policy.with_check(Arc::new(rule));
        }
    })
}

// Shows: A1
#[tokio::test(start_paused = true)]
async fn an_unknown_tool_is_reported_with_similar_names() {
    let world = World::new([Puppet::reading("search", Act::Echo)]);
    let result = world.call("serach", json!({})).await;
    assert_eq!((result.status, &*result.provider), (Status::ValidationError, ""));
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"serach"}
    tool.call.failure {"status":"validation_error","attempts":0,"cached":false,"output_bytes":0,"error":{"code":"E3001","name":"TOOL_NOT_FOUND","category":"validation_error","message":"there is no tool `serach`","retryable":false,"suggestion":"did you mean `search`?","details":{"near":["search"]}},"tool":"serach"}
    "#);
}

#[tokio::test(start_paused = true)]
async fn names_with_odd_characters_find_nothing_and_break_nothing() {
    let world = World::new([Puppet::reading("read", Act::Echo)]);
    for name in ["", "re\u{200b}ad", "rеad", "read\0", "\u{1b}[31mread", "../read", &"x".repeat(1_000_000)] {
        let error = world.call(name, json!({})).await.error.unwrap();
        assert_eq!(error.code, Code::ToolNotFound);
        assert!(error.message.len() < 500 && !error.message.contains('\u{1b}') && !error.message.contains('\0'));
    }
    world.check();
}

// Shows: B1.1, D4.1
#[tokio::test(start_paused = true)]
async fn a_caller_does_not_even_see_tools_of_other_scopes() {
    let (oracle, _) = Puppet::new(ToolSpec::new("divine", "").scope("oracle"), [Act::Echo]);
    let world = World::new([oracle, Puppet::reading("dividend", Act::Echo)]);
    let agent = Caller { scopes: Held::only(["librarian"]), ..Caller::agent("did:a") };
    let result = world.executor.call(Call::new("divine", json!({})).by(agent.clone())).await;
    let error = result.error.unwrap();
    assert_eq!((error.code, &error.details["near"]), (Code::ToolNotFound, &json!(["dividend"])), "not even as a hint");
    let names = |caller: &Caller| {
        let tools = world.executor.registry().list(caller, &ToolFilter::default());
        tools.iter().map(|tool| tool.spec().name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&agent), ["dividend"]);
    assert_eq!(names(&Caller { scopes: Held::only(["oracle"]), ..agent }), ["dividend", "divine"]);
}

// Shows: D4.1
#[tokio::test(start_paused = true)]
async fn a_missing_permission_is_named() {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").permission("files.write").permission("x"), [Act::Echo]);
    let world = World::new([tool]);
    let agent = Caller { permissions: Held::only(["x"]), ..Caller::agent("did:a") };
    let result = world.executor.call(Call::new("t", json!({})).by(agent)).await;
    assert_eq!((result.status, strings.runs()), (Status::PermissionDenied, 0));
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"t"}
    tool.call.failure {"status":"permission_denied","attempts":0,"cached":false,"output_bytes":0,"error":{"code":"E3003","name":"PERMISSION_DENIED","category":"permission_error","message":"`t` requires the permission `files.write`, which this caller does not hold","retryable":false,"suggestion":"use another tool, or ask the operator to grant the permission","details":{"missing_permissions":["files.write"]}},"tool":"t"}
    "#);
}

// Shows: D4.3
#[tokio::test(start_paused = true)]
async fn the_strictest_check_wins_and_a_failing_one_denies() {
    let allow = || Rule("allow", |_| Ok(Decision::Allow));
    let deny = || Rule("deny", |_| Ok(Decision::Deny { rule: "no-fridays".into(), reason: "it is friday".into() }));
    let ask = || Rule("ask", |_| Ok(Decision::Ask { reason: "it is odd".into() }));
    let broken = || Rule("broken", |_| Err("no policy file".into()));
    let panicking = || Rule("panicking", |_| panic!("oops"));
    for (rules, message) in [
        (vec![allow()], None),
        (vec![allow(), deny(), ask()], Some((Code::PermissionDenied, "denied by `no-fridays`: it is friday"))),
        (
            vec![ask(), allow()],
            Some((
                Code::ConfirmationRequired,
                "a person must agree to this call (it is odd), and there is no way to ask",
            )),
        ),
        (vec![broken()], Some((Code::PermissionDenied, "denied by `broken`: the check failed: no policy file"))),
        (vec![panicking()], Some((Code::PermissionDenied, "denied by `panicking`: the check panicked"))),
    ] {
        let world = world_with_rules(rules);
        let error = world.call("t", json!({})).await.error;
        assert_eq!(error.as_ref().map(|error| (error.code, error.message.as_str())), message);
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_that_never_answers_denies() {
    struct Mute;
    impl Check for Mute {
        fn name(&self) -> &str {
            "mute"
        }
        fn check<'a>(&'a self, _: &'a Question<'a>) -> BoxFuture<'a, Result<Decision, String>> {
            Box::pin(std::future::pending())
        }
    }
    let world = World::with([Puppet::reading("t", Act::Echo)], |builder| {
        builder.policy = Policy::default().with_check(Arc::new(Mute));
    });
    let error = world.call("t", json!({})).await.error.unwrap();
    assert_eq!(error.message, "denied by `mute`: the check did not answer within 5s");
    let second = std::time::Duration::from_secs(1);
    let hurried = Call::new("t", json!({})).with(Options { deadline: Some(second), ..Options::default() });
    let began = tokio::time::Instant::now();
    assert_eq!(world.executor.call(hurried).await.status, Status::Timeout, "the caller's deadline holds");
    let id = world.executor.spawn(Call::new("t", json!({})));
    tokio::time::sleep(second).await;
    world.executor.cancel(id, &Caller::local());
    assert_eq!(world.executor.wait(id, &Caller::local()).await.unwrap().status, Status::Cancelled);
    assert_eq!(began.elapsed(), 2 * second, "and so does a cancel");
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_hanging_journal_holds_up_no_caller_for_ever() {
    let executor = |durability| {
        let (tool, strings) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
        let mut builder = Executor::builder().tools([tool, Puppet::reading("read", Act::Echo)]);
        builder.journal = Arc::new(HangingJournal);
        builder.durability = durability;
        (builder.build().unwrap(), strings)
    };
    let (executor_, strings) = executor(Durability::Effects);
    let second = std::time::Duration::from_secs(1);
    let hurried = Call::new("write", json!({})).with(Options { deadline: Some(second), ..Options::default() });
    let result = executor_.call(hurried.clone()).await;
    assert_eq!((result.status, strings.runs()), (Status::Timeout, 0), "what may change something waits for its record");
    let began = tokio::time::Instant::now();
    assert!(executor_.call(Call::new("read", json!({}))).await.is_success());
    assert_eq!(began.elapsed(), std::time::Duration::ZERO, "a read-only call does not wait");
    let missing = executor_.call(Call::new("none", json!({}))).await;
    assert_eq!((missing.status, began.elapsed()), (Status::ValidationError, std::time::Duration::ZERO));

    let (executor_, strings) = executor(Durability::Relaxed);
    assert_eq!(executor_.call(hurried).await.status, Status::Timeout, "in no mode is this different");
    assert_eq!((strings.runs(), began.elapsed()), (0, second), "only its answer does not wait");

    let (executor_, _) = executor(Durability::Strict);
    let began = tokio::time::Instant::now();
    let patient = Call::new("read", json!({})).with(Options { deadline: Some(2 * second), ..Options::default() });
    assert_eq!(executor_.call(patient).await.status, Status::Timeout, "nothing runs before its record is safe");
    assert_eq!(began.elapsed(), 7 * second, "an answer is given even if its record is never safe");
}

// Shows: D4.3
#[tokio::test(start_paused = true)]
async fn checks_see_exactly_the_arguments_that_will_run() {
    let (tool, _) = Puppet::new(
        ToolSpec {
            input_schema: json!({"type": "object", "properties": {"n": {"type": "integer"}, "deep": {"default": true}}}),
            ..ToolSpec::new("t", "").read_only()
        },
        [Act::Echo],
    );
    let world = World::with([tool], |builder| {
        let policy = std::mem::take(&mut builder.policy);
        builder.policy = policy.with_check(Arc::new(Rule("exact", |question| {
            assert_eq!(*question.arguments, json!({"n": 5, "deep": true}));
            Ok(Decision::Allow)
        })));
    });
    let result = world.call("t", json!({"n": "5"})).await;
    assert_eq!(
        result.text(),
        r#"{"n":5,"deep":true}"#,
        "coerced and completed for the check, and the same for the tool"
    );
    assert_eq!(*result.arguments, json!({"n": 5, "deep": true}));
}

// Shows: D6.1
#[tokio::test(start_paused = true)]
async fn plans_limit_batches_and_unknown_plans_allow_nothing() {
    let world = World::with([Puppet::reading("t", Act::Echo)], |builder| {
        let policy = std::mem::take(&mut builder.policy);
        builder.policy =
            policy.with_plan("Tiny", Plan { batch_max: Some(1), parallel_max: Some(1), ..Plan::UNLIMITED });
    });
    let planned = |plan: &str| Caller { plan: Some(plan.into()), ..Caller::local() };
    let calls = |caller: Caller| wieldy_core::Batch::new((0..2).map(|_| Call::new("t", json!({})).by(caller.clone())));
    let error = world.executor.batch(calls(planned("Tiny"))).await.unwrap_err();
    assert_eq!(
        (error.code, error.message.as_str()),
        (Code::PlanLimitExceeded, "a batch of 2 calls is over the limit of 1 of the plan `Tiny`")
    );
    assert_eq!(world.executor.batch(calls(planned("Core"))).await.unwrap().summary.succeeded, 2);
    let error = world.executor.call(Call::new("t", json!({})).by(planned("Gold"))).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str()),
        (
            Code::PlanLimitExceeded,
            "the plan `Gold` is not configured; there are `Core`, `Enterprise`, `Teams`, `Tiny`, `WriterPro`"
        )
    );
}

// Shows: D6.1
#[tokio::test(start_paused = true)]
async fn a_tool_outside_the_plan_is_refused_with_the_plans_that_have_it() {
    let scoped = |name: &str, scope: &str| Puppet::new(ToolSpec::new(name, "").read_only().scope(scope), [Act::Echo]).0;
    let tools = [Puppet::reading("git__log", Act::Echo), Puppet::reading("t", Act::Echo), scoped("s", "docs")];
    let world = World::with(tools, |builder| {
        let policy = std::mem::take(&mut builder.policy);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        builder.policy = policy
            .with_plan("Git", Plan { tools: names(&["git__*"]), ..Plan::UNLIMITED })
            .with_plan("Other", Plan { scopes: names(&["other"]), ..Plan::UNLIMITED })
            .with_plan("Both", Plan { tools: names(&["t", "s"]), scopes: names(&["other"]), ..Plan::UNLIMITED });
    });
    let refused = async |plan: &str| {
        let caller = Caller { plan: Some(plan.into()), ..Caller::local() };
        let call = |tool: &str| world.executor.call(Call::new(tool, json!({})).by(caller.clone()));
        let mut refused = Vec::new();
        for tool in ["git__log", "t", "s"] {
            refused.extend(call(tool).await.error.map(|error| (tool.to_owned(), error.code)));
        }
        refused
    };
    let no =
        |tools: &[&str]| -> Vec<_> { tools.iter().map(|tool| ((*tool).to_owned(), Code::PlanLimitExceeded)).collect() };
    assert_eq!(refused("Git").await, no(&["t", "s"]));
    assert_eq!(refused("Other").await, no(&["s"]), "a tool without a scope is in every plan");
    assert_eq!(refused("Both").await, no(&["git__log", "s"]), "both must include it");
    assert_eq!(refused("Teams").await, []);
    let caller = Caller { plan: Some("Git".into()), ..Caller::local() };
    let error = world.executor.call(Call::new("s", json!({})).by(caller)).await.error.unwrap();
    assert_eq!(
        error.message,
        "the plan `Git` does not include `s`; the plans `Core`, `Enterprise`, `Teams`, `WriterPro` do"
    );
    assert_eq!(
        serde_json::to_value(&error.details).unwrap(),
        json!({"plan": "Git", "tool": "s", "plans": ["Core", "Enterprise", "Teams", "WriterPro"]})
    );
    world.check();
}

// Shows: D8.1
#[tokio::test(start_paused = true)]
async fn nothing_runs_when_the_journal_cannot_be_written() {
    let journal = Arc::new(FailingJournal::default());
    let (tool, strings) = Puppet::new(ToolSpec::new("t", ""), [Act::Echo]);
    let mut builder = Executor::builder().tools([tool]);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build().unwrap();
    journal.refuse(true);
    let result = executor.call(Call::new("t", json!({}))).await;
    assert_eq!((result.error.unwrap().code, strings.runs()), (Code::JournalFailed, 0));
    assert!(!executor.is_executing(result.execution_id));
    journal.refuse(false);
    assert!(executor.call(Call::new("t", json!({}))).await.is_success(), "it resumes by itself");
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_returned_even_if_its_record_cannot_be_stored() {
    let journal = Arc::new(FailingJournal::default());
    let refusing = Arc::clone(&journal);
    let tool = wieldy_core::tool(ToolSpec::new("t", ""), move |_: Value, _| {
        refusing.refuse(true);
        async { Ok(wieldy_core::Outcome::text("done")) }
    });
    let mut builder = Executor::builder().tool(tool);
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build().unwrap();
    let result = executor.call(Call::new("t", json!({}))).await;
    assert_eq!((result.status, result.text().as_str()), (Status::Success, "done"));
    let names: Vec<_> = journal.events().iter().map(|event| event.body.name()).collect();
    assert_eq!(names, ["tool.call.pending", "tool.call.started"], "recovery will find it open");
}

#[tokio::test(start_paused = true)]
async fn arguments_that_are_too_large_are_refused_and_not_written_down() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let result = world.call("t", json!({"x": "y".repeat(17 * 1024 * 1024)})).await;
    assert_eq!(result.error.unwrap().message, "the arguments are too large: at most 16777216 bytes and 128 levels");
    assert!(world.tape().len() < 1000);
}

// Shows: D8.2
#[tokio::test(start_paused = true)]
async fn secrets_do_not_reach_the_journal() {
    let (tool, _) = Puppet::new(ToolSpec::new("t", "").sensitive("note"), [Act::Say("ok")]);
    let world = World::new([tool]);
    world.call("t", json!({"note": "canary-1", "password": "canary-2", "url": "https://u:canary-3@host/"})).await;
    assert!(!world.tape().contains("canary"), "{}", world.tape());
}

// Shows: E1
#[test]
fn tools_cannot_hide_each_other() {
    let from = |provider: Provider, name: &str| Puppet::new(ToolSpec::new(name, "").provider(provider), [Act::Echo]).0;
    let executor = Executor::builder().build().unwrap();
    let git = || Provider::Mcp("git".into());
    executor.register(from(Provider::Builtin, "read")).unwrap();
    let message = executor.register(from(git(), "read")).unwrap_err().to_string();
    assert_eq!(
        message,
        "`read` of mcp:git would hide the tool of builtin with the same name; give it another or a qualified name"
    );
    executor.register(from(git(), "git__status")).unwrap();
    let caller = Caller::local();
    assert_eq!(executor.registry().find("status", &caller).ok().unwrap().spec().name, "git__status");
    executor.register(from(Provider::Mcp("svn".into()), "svn__status")).unwrap();
    let error = executor.registry().find("status", &caller).err().unwrap();
    assert_eq!(error.to_string(), "`status` could be any of `git__status`, `svn__status`");
    let aliased = Puppet::new(ToolSpec::new("other", "").alias("read"), [Act::Echo]).0;
    assert!(matches!(executor.register(aliased), Err(RegisterError::Shadows { .. })), "nor by an alias");
    assert!(executor.unregister("svn__status"));
    assert!(executor.registry().find("status", &caller).is_ok());
    assert!(!executor.unregister("svn__status"));
}

// Shows: B1.3
#[tokio::test(start_paused = true)]
async fn a_changed_definition_is_an_event() {
    let world = World::new([]);
    let version = |text: &str| Puppet::new(ToolSpec::new("t", text), [Act::Echo]).0;
    assert_eq!(world.executor.register(version("one")).unwrap(), Registration::New);
    assert_eq!(world.executor.register(version("one")).unwrap(), Registration::Same);
    assert!(matches!(world.executor.register(version("two")).unwrap(), Registration::Changed { .. }));
    insta::assert_snapshot!(world.tape(), @r#"tool.definition.changed {"tool":"t"}"#);
}

// Shows: C3
#[tokio::test(start_paused = true)]
async fn a_tool_whose_service_is_missing_says_what_to_configure() {
    let world = World::new([Unbound::tool(ToolSpec::new("github_read", "Reads"), "a GitHub token (`github.token`)")]);
    let error = world.call("github_read", json!({})).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str(), error.suggestion.as_deref()),
        (
            Code::Configuration,
            "`github_read` is defined, but what it needs is not configured",
            Some("configure a GitHub token (`github.token`)")
        )
    );
}

#[tokio::test(start_paused = true)]
async fn secrets_are_known_by_every_name_of_the_tool_and_at_every_depth() {
    let spec = |name: &str| {
        let mut spec = ToolSpec::new(name, "").sensitive("seal").sensitive("/door/gate");
        spec.provider = Provider::Mcp(name.split("__").next().unwrap().into());
        spec.input_schema = json!({
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/deep"}}},
            "$defs": {"deep": {"type": "object", "properties": {"inner": {"type": "string", "writeOnly": true}}}},
        });
        spec
    };
    let secrets = json!({"seal": "canary", "door": {"gate": "canary"}, "list": [{"inner": "canary"}]});
    let world = World::new([Puppet::new(spec("one__open"), [Act::Say("done")]).0]);
    assert!(world.call("open", secrets.clone()).await.is_success());
    world.executor.register(Puppet::new(spec("two__open"), [Act::Say("done")]).0).unwrap();
    assert_eq!(world.call("open", secrets).await.error.unwrap().code, Code::ToolNotFound, "it is ambiguous");
    assert!(!world.tape().contains("canary"), "{}", world.tape());
}

/// A journal that refuses events of one name, or panics on them.
struct Picky {
    kept: MemoryJournal,
    refused: &'static str,
    panics: bool,
}

impl Journal for Picky {
    fn append(&self, event: &Arc<Event>) -> Receipt {
        if event.body.name() == self.refused {
            assert!(!self.panics, "told to panic");
            return Receipt::Refused(JournalError("the disk is full".into()));
        }
        self.kept.append(event)
    }

    fn next_seq(&self) -> u64 {
        self.kept.next_seq()
    }
}

// Shows: D8.1, X2.1
#[tokio::test(start_paused = true)]
async fn a_run_or_a_confirmation_that_cannot_be_recorded_does_not_happen() {
    for panics in [false, true] {
        for (refused, runs) in [
            ("tool.call.pending", 0),
            ("tool.call.confirmation.requested", 0),
            ("tool.call.confirmation.received", 0),
            ("tool.call.started", 0),
            ("tool.retry.attempt", 1),
        ] {
            let journal = Arc::new(Picky { kept: MemoryJournal::default(), refused, panics });
            let failing = Act::Fail(Code::TransportFailed, false);
            let (tool, strings) = Puppet::new(ToolSpec::new("t", "").confirm(), [failing, Act::Echo]);
            let mut builder = Executor::builder().tools([tool]).confirmer(Agreeing);
            builder.journal = Arc::clone(&journal) as _;
            let executor = builder.build().unwrap();
            let result = executor.call(Call::new("t", json!({}))).await;
            assert_eq!(result.error.map(|error| error.code), Some(Code::JournalFailed), "{refused}");
            assert_eq!(strings.runs(), runs, "{refused}");
            let next = executor.call(Call::new("unknown", json!({}))).await;
            assert!(next.error.is_some() && executor.load().running == 0, "{refused} harms no other call");
        }
    }
}

struct Agreeing;

impl Confirmer for Agreeing {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        Box::pin(async { Ok(question.approve()) })
    }
}

#[tokio::test(start_paused = true)]
async fn the_calls_of_a_refused_batch_are_recorded_too() {
    let world = World::new([Puppet::reading("t", Act::Echo)]);
    let core = Caller { plan: Some("Core".into()), ..Caller::local() };
    let calls = (0..6).map(|number| Call::new("t", json!({"n": number})).by(core.clone()).id("same"));
    world.executor.batch(Batch::new(calls)).await.unwrap_err();
    let twice = [Call::new("t", json!({})).id("same"), Call::new("t", json!({})).id("same")];
    world.executor.batch(Batch::new(twice)).await.unwrap_err();
    let closings = world.events();
    let codes: Vec<Code> =
        closings.iter().filter_map(|event| Some(event.body.closing()?.error.as_ref()?.code)).collect();
    assert_eq!(codes, [[Code::PlanLimitExceeded; 6].as_slice(), &[Code::ValidationFailed; 2]].concat());
    world.check();
}

/// Returns a schema whose check doubles its work with each level of the arguments.
fn doubling() -> serde_json::Value {
    let next = json!({"properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["z"]});
    json!({
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/t"}},
        "$defs": {"t": {"type": "object", "allOf": [next, next]}},
    })
}

fn nested(levels: usize) -> serde_json::Value {
    (0..levels).fold(json!({}), |inner, _| json!({ "a": inner }))
}

#[tokio::test(start_paused = true)]
async fn a_schema_that_makes_checking_endless_fails_its_own_call_and_no_other() {
    let spec = ToolSpec { input_schema: doubling(), ..ToolSpec::new("hostile", "").read_only() };
    let (hostile, _) = Puppet::new(spec, [Act::Echo]);
    let world = World::new([hostile, Puppet::reading("t", Act::Echo)]);
    let (large, small) = tokio::join!(
        async { (world.executor.call(Call::new("hostile", nested(100))).await, std::time::Instant::now()) },
        async { (world.executor.call(Call::new("t", json!({}))).await, std::time::Instant::now()) },
    );
    assert_eq!(large.0.error.map(|error| error.code), Some(Code::ValidationFailed));
    assert!(small.0.is_success());
    assert!(small.1 < large.1, "the small call did not wait for the check of the large one");
    let error = world.executor.call(Call::new("hostile", nested(1))).await.error.unwrap();
    assert_eq!(error.message, "`/a`: `z` is required; `/a`: `z` is required");
    assert!(world.executor.call(Call::new("hostile", nested(0))).await.is_success());
    world.check();
}

#[tokio::test(start_paused = true)]
async fn large_arguments_and_large_answers_are_checked_beside_other_calls() {
    let numbers = json!({"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}});
    let spec = ToolSpec {
        input_schema: numbers.clone(),
        output_schema: Some(numbers),
        ..ToolSpec::new("large", "").read_only()
    };
    let many = json!({"n": (0..100_000).collect::<Vec<u32>>()});
    let mut wrong = many.clone();
    wrong["n"][70_000] = json!("x");
    let (large, _) = Puppet::new(spec, [Act::Give(many.clone()), Act::Give(wrong.clone())]);
    let world = World::new([large]);
    let called = async |arguments: &serde_json::Value| {
        let result = world.executor.call(Call::new("large", arguments.clone())).await;
        result.error.map(|error| error.message)
    };
    assert_eq!(called(&many).await, None);
    assert_eq!(
        called(&many).await.as_deref(),
        Some("the tool's answer does not fit its output schema at `/n/70000`: value is not of type \"integer\"")
    );
    assert_eq!(called(&wrong).await.as_deref(), Some("`/n/70000`: the value is not of type \"integer\""));
    world.check();
}

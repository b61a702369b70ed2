//! Calls, tasks and keys of executors that stopped without closing their journal.
//!
//! The tests abandon executors with open calls: the journal stops, and the next executor finds the calls.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{
    Answer, BoxFuture, Call, Caller, Code, Confirmation, Confirmer, ExecutionId, Level, Network, Options, Priority,
    ResourceLimits, RetryIf, Status, ToolSpec,
};
use wieldy_store::{JournalOptions, Query};
use wieldy_testkit::{Act, Puppet};

use crate::world::{TestHistory, until};

on_each_database!(
    calls_that_could_not_be_closed_at_once_are_closed_later,
    orphaned_calls_are_closed_by_an_executor_that_is_never_idle,
    a_call_that_was_open_ends_as_unknown_and_a_task_says_so,
    the_next_executor_returns_the_results_of_tasks_and_keys,
    a_call_that_was_handed_over_is_a_task_for_the_next_executor_too,
    an_executor_that_stores_no_tasks_deletes_none,
    an_executor_without_reruns_leaves_them_to_others,
    metadata_that_looks_like_a_rerun_is_none,
    orphaned_calls_that_are_repeatable_are_retryable,
    the_key_of_an_interrupted_call_never_runs_again_unless_it_is_repeatable,
    an_interrupted_call_is_rerun_if_its_caller_and_its_tool_allow_it,
    a_call_that_asked_for_stricter_terms_is_not_run_again_under_weaker_ones,
    an_interrupted_call_with_a_key_is_rerun_only_by_a_call_with_that_key,
    the_calls_of_an_executor_that_lives_are_left_alone,
    the_key_of_a_task_expires_too,
);

fn with_key(key: &str) -> Options {
    Options { idempotency_key: Some(key.into()), ..Options::default() }
}

/// Waits until a call runs.
async fn running(strings: &wieldy_testkit::Strings) {
    while strings.now() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

// Shows: B3.2, D9.3, X2.1
async fn a_call_that_was_open_ends_as_unknown_and_a_task_says_so(history: TestHistory) {
    let (hanging, strings) = Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]);
    let first = history.executor([hanging]);
    let task = first.executor.spawn(Call::new("hang", json!({"n": 1})));
    running(&strings).await;
    first.journal.flush().await.unwrap();
    let row = || history.store().search(&Query::default(), 9).unwrap().executions.remove(0);
    assert_eq!((row().status.as_str(), row().completed_at, row().attempts), ("running", None, 1));
    // Like a killed process: the calls are never closed, and neither is the journal.
    abandon(&history, first).await;

    let second = history.executor([Puppet::writing("hang", Act::Echo)]);
    let closed = row();
    assert_eq!((closed.status.as_str(), closed.error_code.as_deref()), ("failed", Some("E3110")));
    assert_eq!(closed.execution_id, task.to_string());
    let told = second.executor.task(task, &Caller::local()).expect("tasks survive");
    let error = told.result.unwrap().error.clone().unwrap();
    assert_eq!((told.status, error.code, error.retryable), (Status::Failed, Code::OutcomeUnknown, false));
    drop(second);
    let verdict = history.check();
    assert_eq!((verdict.executions, verdict.open), (1, 0));
}

/// Begins a call, and turns it into a task once it runs.
async fn hand_over(living: &crate::world::LiveExecutor, call: Call) -> ExecutionId {
    let mut begun = living.executor.begin(call);
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut begun).await.is_err(), "it takes longer");
    begun.into_task().await
}

async fn a_call_that_was_handed_over_is_a_task_for_the_next_executor_too(history: TestHistory) {
    let brief = Act::Take(Duration::from_millis(200));
    let (quick, _) = Puppet::new(ToolSpec::new("quick", ""), [brief]);
    let (hanging, _) = Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]);
    let first = history.executor([quick, hanging]);
    let caller = Caller { tenant: Some("acme".into()), ..Caller::local() };
    let call = |tool: &str, options| Call::new(tool, json!({"n": 1})).by(caller.clone()).with(options);
    let done = hand_over(&first, call("quick", with_key("k1"))).await;
    let result = first.executor.wait(done, &caller).await.unwrap();
    assert!(result.is_success());
    let runs = hand_over(&first, call("hang", Options::default())).await;
    // From the moment a caller has a task's id, the process may be killed.
    abandon_at_once(&history, first);

    let second = history.executor([Puppet::new(ToolSpec::new("quick", ""), [Act::Echo]).0]);
    let told = second.executor.task(done, &caller).expect("it was over before").result.unwrap();
    assert_eq!((told.status, &told.content), (Status::Success, &result.content));
    let told = second.executor.wait(runs, &caller).await.expect("it was running");
    assert_eq!(told.error.as_ref().map(|error| error.code), Some(Code::OutcomeUnknown));
    for task in [done, runs] {
        assert_eq!(second.executor.task(task, &Caller::local()), None, "others do not see it");
        let row = history.store().show(task).unwrap().unwrap().0;
        assert_eq!(row.metadata.unwrap()["task"], json!(true));
    }
    let again = second.executor.call(call("quick", with_key("k1"))).await;
    assert!(again.is_success() && again.cached, "its key is known as well: {again:?}");
    second.journal.flush().await.unwrap();
    drop(second);
    history.check();
}

async fn an_executor_that_stores_no_tasks_deletes_none(history: TestHistory) {
    let (hanging, _) = Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]);
    let first = history.executor([hanging]);
    let task = hand_over(&first, Call::new("hang", json!({}))).await;
    abandon(&history, first).await;
    for _ in 0..2 {
        drop(history.executor_with([], &JournalOptions { task_ttl: Duration::ZERO, ..history.options() }, |_| {}));
    }
    let last = history.executor([]);
    let told = last.executor.task(task, &Caller::local()).expect("tasks survive").result.unwrap();
    assert_eq!(told.error.as_ref().map(|error| error.code), Some(Code::OutcomeUnknown));
    drop(last);
    history.check();
}

async fn an_executor_without_reruns_leaves_them_to_others(history: TestHistory) {
    let put = |act: Act| Puppet::new(ToolSpec::new("put", "").idempotent(), [act]);
    let rerun = || Call::new("put", json!({})).with(Options { rerun: true, ..Options::default() });
    let (hanging, strings) = put(Act::Hang);
    let first = history.executor([hanging]);
    let task = first.executor.spawn(rerun());
    running(&strings).await;
    abandon(&history, first).await;
    let status = |id| history.store().show(id).unwrap().unwrap().0.status;
    drop(history.executor([]));
    assert_eq!((status(task).as_str(), history.check().open), ("running", 1));
    let (hanging, strings) = put(Act::Hang);
    let second = history.executor_with([hanging], &JournalOptions { resumes: true, ..history.options() }, |_| {});
    assert_eq!(second.executor.resume(), [task]);
    running(&strings).await;
    abandon(&history, second).await;
    // After two hours, no executor will run the call again.
    let then = if history.is_postgres() { "now() - interval '2 hours'" } else { "(unixepoch() - 7200) * 1000000" };
    history.sql(&format!("UPDATE tool_executions SET started_at = {then}"));
    drop(history.executor([]));
    assert_eq!(status(task), "failed");
}

async fn metadata_that_looks_like_a_rerun_is_none(history: TestHistory) {
    let spec = ToolSpec::new("put", "").idempotent();
    let (hanging, strings) = Puppet::new(spec, [Act::Hang]);
    let first = history.executor([hanging]);
    let looks = || json!({"rerun": true, "task": true, "deep": {"rerun": true}, "n": 0.1, "nul": "\0"});
    let plain = first.executor.spawn(Call::new("put", json!({})).metadata(looks()));
    running(&strings).await;
    // A call with a context is not run again, because its context is stored nowhere.
    let rerun = Options { rerun: true, ..Options::default() };
    let in_context = first.executor.spawn(Call::new("put", json!({})).context(json!({"room": "a"})).with(rerun));
    while strings.now() < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    abandon(&history, first).await;
    let metadata = |id| history.store().show(id).unwrap().unwrap().0.metadata.unwrap();
    assert_eq!(metadata(plain), json!({"caller": looks(), "task": true}));

    let (tool, strings) = Puppet::new(ToolSpec::new("put", "").idempotent(), [Act::Echo]);
    let second = history.executor_with([tool], &JournalOptions { resumes: true, ..history.options() }, |_| {});
    assert_eq!(second.executor.resume(), []);
    assert_eq!(strings.runs(), 0);
    second.journal.flush().await.unwrap();
    for id in [plain, in_context] {
        assert_eq!(history.store().show(id).unwrap().unwrap().0.error_code.as_deref(), Some("E3110"));
    }
    assert_eq!(metadata(plain)["caller"], looks());
    drop(second);
    history.check();
}

async fn orphaned_calls_that_are_repeatable_are_retryable(history: TestHistory) {
    let specs =
        [ToolSpec::new("look", "").read_only(), ToolSpec::new("put", "").idempotent(), ToolSpec::new("pay", "")];
    let (tools, strings): (Vec<_>, Vec<_>) = specs.map(|spec| Puppet::new(spec, [Act::Hang])).into_iter().unzip();
    let first = history.executor(tools);
    let tasks = ["look", "put", "pay"].map(|tool| first.executor.spawn(Call::new(tool, json!({}))));
    for strings in &strings {
        running(strings).await;
    }
    abandon(&history, first).await;

    let second = history.executor([]);
    let told = |task| second.executor.task(task, &Caller::local()).unwrap().result.unwrap().error.clone().unwrap();
    let retryable = tasks.map(told).map(|error| (error.code, error.retryable));
    let unknown = |retryable| (Code::OutcomeUnknown, retryable);
    assert_eq!(retryable, [unknown(true), unknown(true), unknown(false)]);
    drop(second);
    history.check();
}

/// Abandons an executor like a killed process: its calls stay open, and its instance is not alive.
async fn abandon(history: &TestHistory, living: crate::world::LiveExecutor) {
    living.journal.flush().await.unwrap();
    abandon_at_once(history, living);
}

/// Abandons an executor that may have uncommitted records in its log.
fn abandon_at_once(history: &TestHistory, living: crate::world::LiveExecutor) {
    living.journal.abandon();
    // No process has this number.
    history.sql("UPDATE instances SET process = 2147483647 WHERE ended_at IS NULL");
    // The calls that still run there belong to the dead process.
    std::mem::forget(living.executor);
}

async fn the_next_executor_returns_the_results_of_tasks_and_keys(history: TestHistory) {
    let (tool, strings) =
        Puppet::new(ToolSpec::new("pay", ""), [Act::Give(json!({"receipt": 7, "password": "hunter2"}))]);
    let first = history.executor([tool]);
    let caller = Caller { tenant: Some("t1".into()), ..Caller::local() };
    let call = || Call::new("pay", json!({"to": "ada"})).by(caller.clone());
    let task = first.executor.spawn(call());
    let as_task = first.executor.wait(task, &caller).await.unwrap();
    let keyed = first.executor.call(call().with(with_key("k1"))).await;
    assert!(as_task.is_success() && keyed.is_success() && strings.runs() == 2);
    first.journal.flush().await.unwrap();
    drop(first);

    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Echo]);
    let second = history.executor([tool]);
    let told = second.executor.task(task, &caller).expect("tasks survive").result.unwrap();
    assert_eq!(told.structured, Some(json!({"receipt": 7, "password": "[redacted]"})), "without secrets");
    assert_eq!(second.executor.task(task, &Caller::local()), None, "others do not see it");
    let again = second.executor.call(call().with(with_key("k1"))).await;
    assert_eq!((again.cached, strings.runs()), (true, 0), "it did not run again");
    assert_eq!(again.structured, told.structured);
    let other =
        second.executor.call(Call::new("pay", json!({"to": "eve"})).by(caller.clone()).with(with_key("k1"))).await;
    assert_eq!(other.status, Status::ValidationError, "the key is taken");
    second.journal.flush().await.unwrap();
    drop(second);
    history.check();
}

// Shows: X2.2
async fn the_key_of_an_interrupted_call_never_runs_again_unless_it_is_repeatable(history: TestHistory) {
    let (paying, paid) = Puppet::new(ToolSpec::new("pay", ""), [Act::Hang]);
    let look = || ToolSpec::new("look", "").read_only();
    let (looking, looked) = Puppet::new(look(), [Act::Hang]);
    let first = history.executor([paying, looking]);
    for tool in ["pay", "look"] {
        first.executor.spawn(Call::new(tool, json!({})).with(with_key("k1")));
    }
    running(&paid).await;
    running(&looked).await;
    abandon(&history, first).await;

    let (paying, paid) = Puppet::new(ToolSpec::new("pay", ""), [Act::Echo]);
    let second = history.executor([paying, Puppet::new(look(), [Act::Echo]).0]);
    let result = second.executor.call(Call::new("pay", json!({})).with(with_key("k1"))).await;
    assert_eq!(result.error.map(|error| error.code), Some(Code::OutcomeUnknown));
    assert_eq!(paid.runs(), 0);
    let result = second.executor.call(Call::new("look", json!({})).with(with_key("k1"))).await;
    assert!(result.is_success(), "what only reads may simply be read again: {:?}", result.error);
    second.journal.flush().await.unwrap();
    drop(second);
    history.check();
}

// Shows: B3.2
async fn an_interrupted_call_is_rerun_if_its_caller_and_its_tool_allow_it(history: TestHistory) {
    let tools = |act: fn() -> Act| {
        let (idempotent, ran) = Puppet::new(ToolSpec::new("put", "").idempotent(), [act()]);
        let (other, _) = Puppet::new(ToolSpec::new("pay", ""), [act()]);
        ([idempotent, other], ran)
    };
    let (set, ran) = tools(|| Act::Hang);
    let first = history.executor(set);
    let rerun = || Options { rerun: true, ..Options::default() };
    let start = |tool: &str, arguments: Value| first.executor.spawn(Call::new(tool, arguments).with(rerun()));
    let put = start("put", json!({"n": 1}));
    let pay = start("pay", json!({"n": 2}));
    let hidden = start("put", json!({"password": "hunter2"}));
    let unwanted = first.executor.spawn(Call::new("put", json!({"n": 3})));
    while ran.now() < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    abandon(&history, first).await;

    let (set, ran) = tools(|| Act::Echo);
    let options = JournalOptions { resumes: true, ..history.options() };
    let second = history.executor_with(set, &options, |_| {});
    let mut resumed = second.executor.resume();
    resumed.sort_unstable();
    assert_eq!((resumed, second.executor.resume()), (vec![put, pay], vec![]));
    let local = Caller::local();
    let told = second.executor.wait(put, &local).await.unwrap();
    assert_eq!((told.status, told.attempts, told.text()), (Status::Success, 2, json!({"n": 1}).to_string()));
    for id in [pay, hidden, unwanted] {
        let told = second.executor.wait(id, &local).await.unwrap();
        assert_eq!(told.error.as_ref().map(|error| error.code), Some(Code::OutcomeUnknown), "{told:?}");
    }
    assert_eq!(ran.runs(), 1);
    second.journal.flush().await.unwrap();
    let (_, events) = history.store().show(put).unwrap().unwrap();
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "tool.call.pending",
            "tool.call.started",
            "tool.retry.attempt",
            "tool.call.started",
            "tool.retry.success",
            "tool.call.success"
        ]
    );
    drop(second);
    history.check();
}

async fn a_call_that_asked_for_stricter_terms_is_not_run_again_under_weaker_ones(history: TestHistory) {
    let put = |act: Act| Puppet::new(ToolSpec::new("put", "").idempotent(), [act]);
    let (hanging, strings) = put(Act::Hang);
    let first = history.executor_with([hanging], &history.options(), |builder| builder.limits.calls_running_max = 1);
    let start = |options: Options| first.executor.spawn(Call::new("put", json!({})).with(options));
    let plain = || Options { rerun: true, ..Options::default() };
    let runs = start(plain());
    running(&strings).await;
    // There is no slot for the other calls: they are accepted and confirmed, and never start.
    let waits = start(Options { priority: Priority::LOW, labels: vec!["x".into()], ..plain() });
    let (long, limits) = (Some(Duration::from_secs(600)), ResourceLimits { processes: Some(9), ..Default::default() });
    let agreeing = Arc::new(ApproveAll);
    let strict: Vec<_> = [
        Options { timeout: long, ..plain() },
        Options { queue_timeout: long, ..plain() },
        Options { deadline: long, ..plain() },
        Options { silence: long, ..plain() },
        Options { retries: Some(0), ..plain() },
        Options { retry_if: Some(RetryIf::new(|_| false)), ..plain() },
        Options { confirmer: Some(agreeing.clone()), ..plain() },
        Options { require_confirmation: true, confirmer: Some(agreeing), ..plain() },
        Options { fresh: true, ..plain() },
        Options { limits, ..plain() },
        Options { isolation: Some(Level::Firecracker), ..plain() },
        Options { network: Some(Network::None), ..plain() },
    ]
    .into_iter()
    .map(start)
    .collect();
    until("all of them wait", || async { first.executor.load().waiting == 1 + strict.len() }).await;
    abandon(&history, first).await;

    let (putting, ran) = put(Act::Echo);
    let second = history.executor_with([putting], &JournalOptions { resumes: true, ..history.options() }, |_| {});
    let mut resumed = second.executor.resume();
    resumed.sort_unstable();
    assert_eq!(resumed, [runs, waits]);
    for id in resumed {
        assert!(second.executor.wait(id, &Caller::local()).await.unwrap().is_success());
    }
    for id in strict {
        let told = second.executor.wait(id, &Caller::local()).await.unwrap();
        assert_eq!(told.error.as_ref().map(|error| error.code), Some(Code::OutcomeUnknown), "{told:?}");
    }
    assert_eq!(ran.runs(), 2);
    second.journal.flush().await.unwrap();
    drop(second);
    history.check();
}

/// A confirmer that approves everything.
struct ApproveAll;

impl Confirmer for ApproveAll {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        Box::pin(async { Ok(question.approve()) })
    }
}

async fn an_interrupted_call_with_a_key_is_rerun_only_by_a_call_with_that_key(history: TestHistory) {
    let both = |key: &str| Options { rerun: true, ..with_key(key) };
    let (paying, paid) = Puppet::new(ToolSpec::new("pay", ""), [Act::Hang]);
    let first = history.executor_with([paying], &history.options(), |builder| builder.limits.calls_running_max = 1);
    first.executor.spawn(Call::new("pay", json!({})).with(both("runs")));
    running(&paid).await;
    // There is no slot for the second call: it is accepted, and never starts.
    first.executor.spawn(Call::new("pay", json!({})).with(both("waits")));
    until("it is there", || async { history.store().search(&Query::default(), 9).unwrap().executions.len() == 2 })
        .await;
    abandon(&history, first).await;

    // Three executors later, the call that ran is still unknown, and the other one runs once when it is asked for.
    for life in 0..3 {
        let (paying, paid) = Puppet::new(ToolSpec::new("pay", ""), [Act::Echo]);
        let next = history.executor_with([paying], &JournalOptions { resumes: true, ..history.options() }, |_| {});
        for id in next.executor.resume() {
            next.executor.wait(id, &Caller::local()).await;
        }
        let ran = next.executor.call(Call::new("pay", json!({})).with(both("runs"))).await;
        assert_eq!(ran.error.map(|error| error.code), Some(Code::OutcomeUnknown), "life {life}");
        let waited = next.executor.call(Call::new("pay", json!({})).with(both("waits"))).await;
        assert!(waited.is_success());
        assert_eq!(paid.runs(), usize::from(life == 0), "life {life}");
        abandon(&history, next).await;
    }
    drop(history.executor([]));
    history.check();
}

async fn the_calls_of_an_executor_that_lives_are_left_alone(history: TestHistory) {
    let (hanging, strings) = Puppet::new(ToolSpec::new("hang", ""), [Act::PrintAndWait("x")]);
    let first = history.executor([hanging]);
    let task = first.executor.spawn(Call::new("hang", json!({})));
    running(&strings).await;
    first.journal.flush().await.unwrap();
    let second = history.executor([Puppet::reading("read", Act::Echo)]);
    assert!(second.executor.call(Call::new("read", json!({}))).await.is_success());
    second.journal.flush().await.unwrap();
    drop(second);
    let row = history.store().show(task).unwrap().unwrap().0;
    assert_eq!((row.status.as_str(), row.completed_at), ("running", None));
    first.executor.cancel(task, &Caller::local());
    first.executor.wait(task, &Caller::local()).await.unwrap();
    first.journal.flush().await.unwrap();
    drop(first);
    let row = history.store().show(task).unwrap().unwrap().0;
    assert_eq!(row.status, "cancelled");
    history.check();
}

async fn calls_that_could_not_be_closed_at_once_are_closed_later(history: TestHistory) {
    let second = history.executor([]);
    let (hanging, strings) = Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]);
    let first = history.executor([hanging]);
    first.executor.spawn(Call::new("hang", json!({})));
    running(&strings).await;
    let (refuse, refuse_no_more) = match history.is_postgres() {
        true => (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON events FOR EACH ROW WHEN (new.name = 'tool.call.failure')
             EXECUTE FUNCTION refuse()",
            "DROP TRIGGER refuse ON events",
        ),
        false => (
            "CREATE TRIGGER refuse BEFORE INSERT ON events WHEN new.name = 'tool.call.failure'
             BEGIN SELECT raise(abort, 'not now'); END",
            "DROP TRIGGER refuse",
        ),
    };
    history.sql(refuse);
    abandon(&history, first).await;
    let owner = || history.sql("SELECT instance FROM tool_executions").remove(0);
    let before = owner();
    until("another executor takes it over", || async { owner() != before }).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(history.check().open, 1);
    history.sql(refuse_no_more);
    until("it is closed", || async { history.check().open == 0 }).await;
    second.journal.flush().await.unwrap();
    let row = history.store().search(&Query::default(), 9).unwrap().executions.remove(0);
    assert_eq!((row.status.as_str(), row.error_code.as_deref()), ("failed", Some("E3110")));
}

async fn orphaned_calls_are_closed_by_an_executor_that_is_never_idle(history: TestHistory) {
    let (hanging, strings) = Puppet::new(ToolSpec::new("hang", ""), [Act::Hang]);
    let busy = history.executor([Puppet::reading("look", Act::Echo)]);
    let first = history.executor([hanging]);
    let task = first.executor.spawn(Call::new("hang", json!({})));
    running(&strings).await;
    abandon(&history, first).await;
    until("it is closed", || async {
        busy.executor.call(Call::new("look", json!({}))).await;
        history.store().show(task).unwrap().unwrap().0.completed_at.is_some()
    })
    .await;
    drop(busy);
    history.check();
}

async fn the_key_of_a_task_expires_too(history: TestHistory) {
    let first = history.executor([Puppet::writing("pay", Act::Echo)]);
    let task = first.executor.spawn(Call::new("pay", json!({})).with(with_key("k1")));
    first.executor.wait(task, &Caller::local()).await.unwrap();
    first.journal.flush().await.unwrap();
    let week = if history.is_postgres() { "now() + interval '7 days'" } else { "(unixepoch() + 7 * 86400) * 1000000" };
    let kept = history.sql(&format!("SELECT count(*) FROM answers WHERE key IS NOT NULL AND expires_at < {week}"));
    assert!(kept[0][0].contains('1'), "{kept:?}");
    drop(first);
    history.check();
}

#[tokio::test]
async fn results_of_tasks_are_not_stored_without_a_task_ttl() {
    for (task_ttl, kept) in [(Duration::ZERO, 0), (Duration::from_secs(60), 1)] {
        let history = TestHistory::sqlite();
        let options = JournalOptions { task_ttl, ..history.options() };
        let living = history.executor_with([Puppet::reading("read", Act::Say("what was read"))], &options, |_| {});
        let task = living.executor.spawn(Call::new("read", json!({})));
        living.executor.wait(task, &Caller::local()).await.unwrap();
        living.journal.flush().await.unwrap();
        drop(living);
        let connection = rusqlite::Connection::open(history.folder.path().join("history.db")).unwrap();
        let answers: i64 = connection.query_row("SELECT count(*) FROM answers", [], |row| row.get(0)).unwrap();
        assert_eq!(answers, kept, "{task_ttl:?}");
        history.check();
    }
}

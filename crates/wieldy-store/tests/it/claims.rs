//! One idempotency key has one run, however many processes present it at once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{Call, Code, Executor, ExecutorBuilder, Options, Outcome, Run, SharedTool, Status, ToolSpec, tool};
use wieldy_store::{Address, JournalOptions, Query, Store};
use wieldy_testkit::{Act, Puppet};

use crate::world::{LiveExecutor, TestHistory, until};

on_each_database!(
    a_call_waits_for_its_key_in_another_process_and_gets_that_result,
    a_key_of_a_killed_process_is_unknown_or_rerun_if_that_is_safe,
    a_key_that_was_claimed_and_never_ran_is_free_again,
    a_key_with_other_arguments_is_refused_in_every_process,
    a_key_belongs_to_one_workspace,
    a_key_whose_result_cannot_be_read_does_not_run_again,
    many_processes_with_one_key_run_it_once,
);

fn keyed(tool: &str) -> Call {
    let options = Options { idempotency_key: Some("order 1".into()), ..Options::default() };
    Call::new(tool, json!({})).with(options)
}

/// Returns three tools that note each run in the folder: `pay` has an effect, `put` may be repeated, `look` only reads.
/// Each waits for the file `go`.
fn tools(folder: &Path) -> Vec<SharedTool> {
    let specs =
        [ToolSpec::new("pay", ""), ToolSpec::new("put", "").idempotent(), ToolSpec::new("look", "").read_only()];
    let tools = specs.map(|spec| {
        let (folder, name) = (folder.to_owned(), spec.name.clone());
        let run = move |_: Value, run: Run| {
            let (folder, name) = (folder.clone(), name.clone());
            async move {
                fs::write(folder.join(format!("{name}-{}", run.execution_id())), "").unwrap();
                while !folder.join("go").exists() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(Outcome::text(format!("run by {}", std::process::id())))
            }
        };
        Arc::new(tool(spec, run)) as SharedTool
    });
    tools.into()
}

/// Returns the number of runs of a tool.
fn runs(folder: &Path, tool: &str) -> usize {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(&format!("{tool}-"))).count()
}

/// Another process that makes the keyed call. It lives until it is killed or has its answer.
struct OtherProcess(Child);

impl OtherProcess {
    fn start(history: &TestHistory, tool: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "claims::other_process", "--nocapture"])
            .env("WIELDY_CLAIMS", history.url())
            .env("WIELDY_CLAIMS_FOLDER", history.folder.path())
            .env("WIELDY_CLAIMS_TOOL", tool)
            .stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process, which does nothing when it runs as a test.
#[test]
fn other_process() {
    let Ok(address) = std::env::var("WIELDY_CLAIMS") else { return };
    let folder = PathBuf::from(std::env::var("WIELDY_CLAIMS_FOLDER").unwrap());
    let store = Store::open(&address.parse::<Address>().unwrap()).unwrap();
    let journal = Arc::new(store.journal(&JournalOptions::default()).unwrap());
    let mut builder = Executor::builder().tools(tools(&folder));
    builder.journal = Arc::clone(&journal) as _;
    let executor = builder.build().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let result = runtime.block_on(executor.call(keyed(&std::env::var("WIELDY_CLAIMS_TOOL").unwrap())));
    fs::write(folder.join(format!("answer-{}", std::process::id())), result.text()).unwrap();
    drop((executor, runtime));
    journal.close();
}

/// Starts a process and waits until it runs the keyed call.
async fn running(history: &TestHistory, tool: &str) -> OtherProcess {
    let other = OtherProcess::start(history, tool);
    until("the other process runs the call", async || runs(history.folder.path(), tool) == 1).await;
    other
}

async fn a_call_waits_for_its_key_in_another_process_and_gets_that_result(history: TestHistory) {
    let folder = history.folder.path();
    let other = running(&history, "pay").await;
    let here = history.executor(tools(folder));
    let waiting = tokio::spawn({
        let executor = here.executor.clone();
        async move { executor.call(keyed("pay")).await }
    });
    // Without the claim, the call would have run within this time.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    fs::write(folder.join("go"), "").unwrap();
    let result = waiting.await.unwrap();
    assert_eq!((result.status, result.cached, result.attempts), (Status::Success, true, 0));
    assert_eq!(result.text(), format!("run by {}", other.0.id()));
    let again = here.executor.call(keyed("pay")).await;
    assert_eq!((again.text(), again.cached), (result.text(), true));
    assert_eq!(runs(folder, "pay"), 1);
    drop((other, here));
    assert_eq!(history.sql("SELECT count(*) FROM claims").concat(), [none(&history)]);
    assert_eq!(history.check().open, 0);
}

/// Returns the number 0 as the database prints it.
fn none(history: &TestHistory) -> String {
    if history.is_postgres() { "0".into() } else { "Integer(0)".into() }
}

async fn a_key_of_a_killed_process_is_unknown_or_rerun_if_that_is_safe(history: TestHistory) {
    for (tool, expected, runs_expected) in [("pay", Some(Code::OutcomeUnknown), 1), ("put", None, 2), ("look", None, 2)]
    {
        let folder = history.folder.path();
        let mut other = running(&history, tool).await;
        let here = history.executor(tools(folder));
        let waiting = tokio::spawn({
            let executor = here.executor.clone();
            async move { executor.call(keyed(tool)).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!waiting.is_finished() && runs(folder, tool) == 1, "{tool} waits for the process that runs it");
        other.0.kill().unwrap();
        other.0.wait().unwrap();
        fs::write(folder.join("go"), "").unwrap();
        let result = tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap().unwrap();
        assert_eq!(result.error.map(|error| error.code), expected, "{tool}");
        assert_eq!(runs(folder, tool), runs_expected, "{tool}");
        fs::remove_file(folder.join("go")).unwrap();
        drop(here);
    }
    assert_eq!(history.check().open, 0);
}

async fn a_key_that_was_claimed_and_never_ran_is_free_again(history: TestHistory) {
    let (refusing, _) = Puppet::new(ToolSpec::new("pay", "").confirm(), [Act::Echo]);
    let first = history.executor([refusing]);
    let refused = first.executor.call(keyed("pay")).await;
    assert_eq!(refused.status, Status::RequiresConfirmation);
    let second = history.executor([Puppet::writing("pay", Act::Echo)]);
    assert!(second.executor.call(keyed("pay")).await.is_success(), "the refused call left the key");
}

async fn a_key_with_other_arguments_is_refused_in_every_process(history: TestHistory) {
    let [first, second] = [0, 1].map(|_| history.executor([Puppet::writing("pay", Act::Echo)]));
    assert!(first.executor.call(keyed("pay")).await.is_success());
    let other = Call { arguments: Arc::new(json!({"amount": 2})), ..keyed("pay") };
    let refused = second.executor.call(other).await;
    assert_eq!(refused.error.map(|error| error.code), Some(Code::ValidationFailed));
    // The same call, with the same arguments, gets the same answer.
    let same = second.executor.call(keyed("pay")).await;
    assert_eq!((same.status, same.cached), (Status::Success, true));
}

async fn a_key_belongs_to_one_workspace(history: TestHistory) {
    let in_folder = |name: &str| -> LiveExecutor {
        let workspace = history.folder.path().join(name);
        let change = |builder: &mut ExecutorBuilder| builder.workspace = workspace;
        history.executor_with([Puppet::writing("pay", Act::Echo)], &history.options(), change)
    };
    let mut told = Vec::new();
    for name in ["a", "b", "a"] {
        let living = in_folder(name);
        let result = living.executor.call(keyed("pay")).await;
        told.push((result.status, result.cached));
    }
    assert_eq!(told, [(Status::Success, false), (Status::Success, false), (Status::Success, true)]);
}

async fn many_processes_with_one_key_run_it_once(history: TestHistory) {
    let folder = history.folder.path();
    history.store();
    let mut others: Vec<_> = (0..6).map(|_| OtherProcess::start(&history, "pay")).collect();
    until("one of them runs the call", async || runs(folder, "pay") > 0).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    fs::write(folder.join("go"), "").unwrap();
    let answers: Vec<String> = others
        .iter_mut()
        .map(|other| {
            assert!(other.0.wait().unwrap().success());
            fs::read_to_string(folder.join(format!("answer-{}", other.0.id()))).unwrap()
        })
        .collect();
    assert_eq!(runs(folder, "pay"), 1);
    assert_eq!(answers, vec![answers[0].clone(); 6]);
    assert_eq!(history.store().search(&Query::default(), 10).unwrap().executions.len(), 6, "each has its own record");
    assert_eq!(history.check().open, 0);
}

async fn a_key_whose_result_cannot_be_read_does_not_run_again(history: TestHistory) {
    let pay = |act| Puppet::new(ToolSpec::new("pay", ""), [act]);
    let first = history.executor([pay(Act::Say("paid")).0]);
    assert!(first.executor.call(keyed("pay")).await.is_success());
    first.journal.flush().await.unwrap();
    drop(first);
    history.sql("UPDATE answers SET result_json = '{\"of\": \"a newer program\"}'");
    let (tool, strings) = pay(Act::Echo);
    let second = history.executor([tool]);
    let error = second.executor.call(keyed("pay")).await.error.unwrap();
    assert_eq!((error.code, error.retryable, strings.runs()), (Code::OutcomeUnknown, false, 0));
    drop(second);
    history.check();
}

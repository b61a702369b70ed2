//! Confirmations: bound to the exact call, used once, in time, and without holding a slot.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use wieldy_core::{
    Answer, AnyTool, Call, Code, Command, Confinement, Confirmation, Confirmer, Input, Level, NamedFile, Options,
    Outcome, Program, Run, RunError, SharedTool, Status, ToolResult, ToolSpec,
};
use wieldy_testkit::{Act, FakeSandbox, Puppet, Strings, World};

const SECOND: Duration = Duration::from_secs(1);

type Reply = dyn Fn(&Confirmation) -> Result<Answer, String> + Send + Sync;

/// A person who answers after this delay.
struct Person(Duration, Box<Reply>);

impl Confirmer for Person {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        Box::pin(async move {
            tokio::time::sleep(self.0).await;
            (self.1)(question)
        })
    }
}

fn world_asking(
    reply: impl Fn(&Confirmation) -> Result<Answer, String> + Send + Sync + 'static,
    after: Duration,
) -> (World, Arc<Strings>) {
    let (tool, strings) = Puppet::new(ToolSpec::new("t", "").confirm(), [Act::Echo]);
    let world = World::with([tool], |builder| {
        builder.confirmer = Some(Arc::new(Person(after, Box::new(reply))));
        builder.confirmation_timeout = 10 * SECOND;
    });
    (world, strings)
}

fn code_and_cause(result: ToolResult) -> (Code, String) {
    let error = result.error.unwrap();
    (error.code, error.details["cause"].as_str().unwrap().to_owned())
}

// Shows: D7.1
#[tokio::test(start_paused = true)]
async fn a_confirmed_call_runs() {
    let (world, strings) = world_asking(|question| Ok(Answer { by: Some("ada".into()), ..question.approve() }), SECOND);
    assert!(world.call("t", json!({"n": 1})).await.is_success());
    assert_eq!(strings.runs(), 1);
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"arguments":{"n":1},"tool":"t"}
    tool.call.confirmation.requested {"reason":"the tool requires it","expires_in_ms":10000,"tool":"t"}
    tool.call.confirmation.received {"approved":true,"by":"ada","tool":"t"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":false,"tool":"t"}
    tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":7,"tool":"t"}
    "#);
}

#[tokio::test(start_paused = true)]
async fn a_refused_call_does_not_run() {
    let (world, strings) = world_asking(|question| Ok(question.refuse()), SECOND);
    let result = world.call("t", json!({})).await;
    assert_eq!((result.status, strings.runs()), (Status::PermissionDenied, 0));
    assert_eq!(code_and_cause(result), (Code::ConfirmationDenied, "refused".into()));
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"tool":"t"}
    tool.call.confirmation.requested {"reason":"the tool requires it","expires_in_ms":10000,"tool":"t"}
    tool.call.confirmation.received {"approved":false,"tool":"t"}
    tool.call.failure {"status":"permission_denied","attempts":0,"cached":false,"output_bytes":0,"error":{"code":"E3005","name":"CONFIRMATION_DENIED","category":"permission_error","message":"the call was not confirmed","retryable":false,"suggestion":"do it another way, or ask the person why","details":{"cause":"refused"}},"tool":"t"}
    "#);
}

// Shows: D7.2
#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_too_late_is_no_consent() {
    let (world, strings) = world_asking(|question| Ok(question.approve()), 11 * SECOND);
    assert_eq!(code_and_cause(world.call("t", json!({})).await), (Code::ConfirmationDenied, "expired".into()));
    assert_eq!(strings.runs(), 0);
    world.check();
}

// Shows: D7.2
#[tokio::test(start_paused = true)]
async fn an_approval_counts_once_and_only_for_what_was_seen() {
    let first: Mutex<Option<Answer>> = Mutex::new(None);
    let (world, strings) = world_asking(
        move |question| Ok(first.lock().unwrap().get_or_insert_with(|| question.approve()).clone()),
        SECOND,
    );
    assert!(world.call("t", json!({"n": 1})).await.is_success());
    assert_eq!(
        code_and_cause(world.call("t", json!({"n": 1})).await),
        (Code::ConfirmationDenied, "mismatch".into()),
        "replayed"
    );
    assert_eq!(
        code_and_cause(world.call("t", json!({"n": 2})).await),
        (Code::ConfirmationDenied, "mismatch".into()),
        "changed"
    );
    assert_eq!(strings.runs(), 1);
    world.check();
}

// Shows: D7.2
#[tokio::test(start_paused = true)]
async fn the_digest_covers_tool_arguments_and_terms() {
    let digests = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&digests);
    let (world, _) = world_asking(
        move |question| {
            seen.lock().unwrap().push(question.digest.to_string());
            Ok(question.approve())
        },
        SECOND,
    );
    let with = |options| Call::new("t", json!({"n": 1})).with(options);
    let one_minute = Options { timeout: Some(60 * SECOND), ..Options::default() };
    let calls = [
        with(Options::default()),
        with(Options::default()),
        with(one_minute),
        with(Options { network: Some(wieldy_core::Network::None), ..Options::default() }),
        Call::new("t", json!({"n": 2})),
    ];
    for call in calls {
        assert!(world.executor.call(call).await.is_success());
    }
    let digests = digests.lock().unwrap();
    assert_eq!(digests[0], digests[1]);
    let different: std::collections::HashSet<_> = digests.iter().collect();
    assert_eq!(different.len(), 4);
}

// Shows: D7.3
#[tokio::test(start_paused = true)]
async fn without_a_confirmer_the_call_says_that_it_needs_confirmation() {
    let world = World::new([Puppet::new(ToolSpec::new("t", "").confirm(), [Act::Echo]).0]);
    let result = world.call("t", json!({})).await;
    assert_eq!(result.status, Status::RequiresConfirmation);
    assert_eq!(code_and_cause(result), (Code::ConfirmationRequired, "nobody_to_ask".into()));
    let plain = World::new([Puppet::reading("t", Act::Echo)]);
    let call = Call::new("t", json!({})).with(Options { require_confirmation: true, ..Options::default() });
    assert_eq!(plain.executor.call(call).await.status, Status::RequiresConfirmation, "the caller may want it too");
}

#[tokio::test(start_paused = true)]
async fn approving_refusing_and_cancelling_at_once_gives_one_decision() {
    for round in 0..200_u64 {
        let (world, strings) = world_asking(
            move |question| if round % 2 == 0 { Ok(question.approve()) } else { Ok(question.refuse()) },
            Duration::from_millis(100),
        );
        let id = world.executor.spawn(Call::new("t", json!({})));
        tokio::time::sleep(Duration::from_millis(90 + round % 20)).await;
        let cancelled = world.executor.cancel(id, &wieldy_core::Caller::local());
        let result = world.executor.wait(id, &wieldy_core::Caller::local()).await.unwrap();
        let ran = strings.runs();
        match result.status {
            Status::Success => assert_eq!((ran, round % 2), (1, 0)),
            Status::Cancelled => assert!(cancelled == 1 && ran <= 1),
            Status::PermissionDenied => assert_eq!((ran, round % 2), (0, 1)),
            other => panic!("{other}"),
        }
        world.check();
    }
}

#[tokio::test(start_paused = true)]
async fn the_callers_deadline_holds_while_a_person_is_asked() {
    let (world, strings) = world_asking(|question| Ok(question.approve()), 3 * SECOND);
    let call = Call::new("t", json!({})).with(Options { deadline: Some(SECOND), ..Options::default() });
    let result = world.executor.call(call).await;
    assert_eq!((result.status, strings.runs()), (Status::Timeout, 0));
    assert_eq!(result.error.unwrap().details["clock"], json!("total"));
    world.check();
}

#[tokio::test(start_paused = true)]
async fn a_panicking_confirmer_has_not_agreed() {
    let (world, strings) = world_asking(|_| panic!("no idea"), SECOND);
    let result = world.call("t", json!({})).await;
    assert_eq!((code_and_cause(result), strings.runs()), ((Code::ConfirmationDenied, "failed".into()), 0));
    world.check();
}

/// A tool that starts a program `runs` times. Its file changes after it was looked at `same` times.
struct Starter {
    looked: AtomicUsize,
    same: usize,
    runs: usize,
}

impl AnyTool for Starter {
    fn spec(&self) -> ToolSpec {
        ToolSpec { input_schema: json!({"type": "object"}), ..ToolSpec::new("t", "").confirm() }
    }

    fn program<'a>(
        &'a self,
        _: &'a Value,
        confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<Option<Program>, RunError>> {
        let looked = self.looked.fetch_add(1, Ordering::SeqCst);
        let hash = blake3::hash(&looked.saturating_sub(self.same - 1).to_le_bytes());
        let files = vec![NamedFile { path: "run.sh".into(), hash }];
        let folder = confinement.workspace.clone();
        Box::pin(async { Ok(Some(Program { command_line: "sh run.sh".into(), folder, files, unchecked: 0 })) })
    }

    fn run<'a>(&'a self, _: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async move {
            let command = Command {
                program: "sh".into(),
                arguments: vec!["run.sh".into()],
                environment: Default::default(),
                folder: "/".into(),
                stdin: Default::default(),
                terminal: None,
            };
            for _ in 0..self.runs {
                run.execute(&command).await?;
            }
            Ok(run.captured())
        })
    }
}

// Shows: D7.2
#[tokio::test(start_paused = true)]
async fn a_program_that_is_no_longer_the_one_agreed_to_does_not_start() {
    let call = async |same: usize, runs: usize| {
        let tool = Starter { looked: AtomicUsize::new(0), same, runs };
        let world = World::with([Arc::new(tool) as SharedTool], |builder| {
            builder.confirmer = Some(Arc::new(Person(SECOND, Box::new(|question| Ok(question.approve())))));
            builder.isolation = Level::None;
            *builder = std::mem::take(builder).sandbox(FakeSandbox);
        });
        let result = world.call("t", json!({})).await;
        world.check();
        (result.text(), result.error.map(|error| (error.code, error.message)))
    };
    let changed = Some((Code::ConfirmationDenied, "`run.sh` changed after the call was confirmed".into()));
    assert_eq!(call(1, 1).await, (String::new(), changed.clone()));
    assert_eq!(call(2, 2).await, (String::new(), changed), "it is looked at before every start");
    assert_eq!(call(2, 1).await, ("run.sh".into(), None));
    assert_eq!(call(3, 2).await, ("run.shrun.sh".into(), None));
}

//! The context and the metadata of calls: which tools, people, keys and records see them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use wieldy_core::{
    Answer, AnyTool, Backoff, Batch, Call, Caller, Code, Confirmation, Confirmer, Input, Options, Outcome, Run,
    RunError, SharedTool, Status, ToolSpec, tool,
};
use wieldy_testkit::{Act, Puppet, World};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

/// Returns a tool that answers with its context.
fn teller() -> SharedTool {
    let spec = ToolSpec::new("tell", "").read_only();
    Arc::new(tool(spec, async |_: Nothing, run: Run| {
        Ok(Outcome::text(Value::Object(run.context().clone()).to_string()))
    }))
}

fn call(tool: &str, context: Value) -> Call {
    Call::new(tool, json!({})).context(context)
}

/// Returns a caller with a context of the operator's.
fn at_a_desk() -> Caller {
    Caller { context: Some(Arc::new(json!({"desk": 7}))), ..Caller::local() }
}

// Shows: D11.1
#[tokio::test(start_paused = true)]
async fn a_tool_reads_the_context_in_which_the_operators_keys_win() {
    let world = World::new([teller()]);
    let text = async |call: Call| world.executor.call(call).await.text();
    assert_eq!(text(Call::new("tell", json!({}))).await, "{}");
    assert_eq!(text(call("tell", json!({"desk": 1, "room": "a"}))).await, r#"{"desk":1,"room":"a"}"#);
    assert_eq!(text(call("tell", json!({"desk": 1, "room": "a"})).by(at_a_desk())).await, r#"{"desk":7,"room":"a"}"#);
    let batch = Batch { caller: Arc::new(at_a_desk()), ..Batch::new([call("tell", json!({"room": "b"}))]) };
    assert_eq!(world.executor.batch(batch).await.unwrap().results[0].text(), r#"{"room":"b","desk":7}"#);
}

// Shows: D11.3
#[tokio::test(start_paused = true)]
async fn what_is_no_object_or_too_large_is_refused_on_record() {
    let world = World::new([teller()]);
    let large = json!({"k": "x".repeat(16 * 1024)});
    let (no_object, too_large) =
        ("of a call is a JSON object", "is too large: at most 16384 bytes as JSON and 64 levels");
    for (value, message) in [(json!("a"), no_object), (json!([]), no_object), (large, too_large)] {
        for (name, call) in [
            ("context", call("tell", value.clone())),
            ("metadata", Call::new("tell", json!({})).metadata(value.clone())),
        ] {
            let error = world.executor.call(call).await.error.unwrap();
            assert_eq!(error.code, Code::ValidationFailed);
            let between = if message == no_object { "" } else { " of the call" };
            assert_eq!(error.message, format!("the {name}{between} {message}"));
        }
    }
    assert_eq!(world.tape().matches("tool.call.failure").count(), 6);
    assert!(!world.tape().contains("metadata\":"), "what is refused is not stored");
}

// Shows: D11.2
#[tokio::test(start_paused = true)]
async fn the_metadata_is_recorded_without_secrets_and_the_context_is_not() {
    let world = World::new([Puppet::reading("echo", Act::Say("of secret-of-context in room-4711"))]);
    let call = Call::new("echo", json!({"note": "secret-of-context and secret-of-metadata"}))
        .context(json!({"password": "secret-of-context", "room": "room-4711"}))
        .metadata(json!({"run": 5, "token": "secret-of-metadata", "text": "secret-of-context"}));
    let result = world.executor.call(call).await;
    assert_eq!(result.text(), "of secret-of-context in room-4711", "the caller gets all");
    assert_eq!(json!(result)["arguments"], json!({"note": "[redacted] and [redacted]"}), "as on record");
    insta::assert_snapshot!(world.tape(), @r#"
    tool.call.pending {"arguments":{"note":"[redacted] and [redacted]"},"metadata":{"run":5,"token":"[redacted]","text":"[redacted]"},"tool":"echo"}
    tool.call.started {"attempt":1,"attempts_max":3,"timeout_ms":30000,"read_only":true,"tool":"echo"}
    tool.call.success {"status":"success","attempts":1,"cached":false,"output_bytes":33,"tool":"echo"}
    "#);
}

#[tokio::test(start_paused = true)]
async fn answers_are_shared_only_within_one_context_and_metadata_does_not_matter() {
    let spec = ToolSpec::new("look", "").read_only().cache(Duration::from_secs(60));
    let (tool, strings) = Puppet::new(spec, [Act::Take(Duration::from_secs(1))]);
    let world = World::new([tool]);
    let here = || world.executor.call(call("look", json!({"room": "a", "desk": 1})));
    let also_here = world.executor.call(call("look", json!({"desk": 1, "room": "a"})).metadata(json!({"run": 1})));
    let there = world.executor.call(call("look", json!({"room": "b"})));
    let nowhere = world.executor.call(call("look", json!({})));
    let plain = world.call("look", json!({}));
    let ended = tokio::join!(here(), also_here, there, nowhere, plain);
    let cached = [&ended.0, &ended.1, &ended.2, &ended.3, &ended.4].map(|result| result.cached);
    assert_eq!((cached, strings.runs()), ([false, true, false, false, true], 3));
    assert!(here().await.cached);
}

#[tokio::test(start_paused = true)]
async fn an_idempotency_key_is_for_one_context() {
    let (tool, strings) = Puppet::new(ToolSpec::new("pay", ""), [Act::Echo]);
    let world = World::new([tool]);
    let keyed = || Options { idempotency_key: Some("k".into()), ..Options::default() };
    let pay = async |context: Value, metadata: Value| {
        world.executor.call(call("pay", context).metadata(metadata).with(keyed())).await
    };
    assert!(pay(json!({"room": "a"}), json!({"run": 1})).await.is_success());
    assert!(pay(json!({"room": "a"}), json!({"run": 2})).await.cached);
    let other = pay(json!({"room": "b"}), json!({})).await;
    assert_eq!((other.status, other.error.unwrap().code), (Status::ValidationError, Code::ValidationFailed));
    assert_eq!(strings.runs(), 1);
}

/// A person who agrees and keeps the questions.
#[derive(Default)]
struct Person(Mutex<Vec<Confirmation>>);

impl Confirmer for Person {
    fn confirm<'a>(&'a self, question: &'a Confirmation) -> BoxFuture<'a, Result<Answer, String>> {
        self.0.lock().unwrap().push(question.clone());
        Box::pin(async { Ok(question.approve()) })
    }
}

#[tokio::test(start_paused = true)]
async fn a_person_sees_the_context_and_the_digest_covers_it() {
    let person = Arc::new(Person::default());
    let (tool, _) = Puppet::new(ToolSpec::new("pay", "").confirm(), [Act::Echo]);
    let world = World::with([tool], |builder| builder.confirmer = Some(Arc::clone(&person) as _));
    for (context, metadata) in [
        (json!({}), json!({})),
        (json!({}), json!({"run": 1})),
        (json!({"room": "a\u{202e}", "password": "canary"}), json!({})),
        (json!({"room": "b"}), json!({})),
    ] {
        assert!(world.executor.call(call("pay", context).metadata(metadata)).await.is_success());
    }
    let asked = std::mem::take(&mut *person.0.lock().unwrap());
    let digests: Vec<_> = asked.iter().map(|question| question.digest).collect();
    assert_eq!(digests[0], digests[1], "metadata is not part of it");
    assert!(digests[1] != digests[2] && digests[2] != digests[3] && digests[1] != digests[3]);
    insta::assert_snapshot!(asked[2].in_words(), @r#"
    May the tool `pay` run (the tool requires it)?
      {}
      in the context: {"room":"a\u{202e}","password":"[redacted]"}
    "#);
    assert!(!asked[0].in_words().contains("context"));
}

#[tokio::test(start_paused = true)]
async fn a_call_with_a_context_is_not_marked_to_run_again() {
    let world = World::new([teller()]);
    let rerun = || Options { rerun: true, ..Options::default() };
    world.executor.call(call("tell", json!({})).metadata(json!({"run": 1})).with(rerun())).await;
    world.executor.call(call("tell", json!({"room": "a"})).with(rerun())).await;
    world.executor.call(Call::new("tell", json!({})).by(at_a_desk()).with(rerun())).await;
    let events = world.events();
    let data = events.iter().filter(|event| event.body.name() == "tool.call.pending").map(|event| event.data());
    let marked: Vec<bool> = data.map(|data| data.get("rerun").is_some()).collect();
    assert_eq!(marked, [true, false, false]);
    let whole: String = events.iter().map(|event| event.cloud_event().to_string()).collect();
    assert!(!whole.contains("desk") && !whole.contains("room"), "{whole}");
}

/// A cached tool that answers with the client's notes.
struct Relay {
    takes_notes: bool,
}

impl AnyTool for Relay {
    fn spec(&self) -> ToolSpec {
        let name = if self.takes_notes { "relay" } else { "plain" };
        ToolSpec::new(name, "").read_only().cache(Duration::from_secs(60))
    }

    fn takes_notes(&self) -> bool {
        self.takes_notes
    }

    fn run<'a>(&'a self, _: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(async { Ok(Outcome::text(Value::Object(run.notes().clone()).to_string())) })
    }
}

#[tokio::test(start_paused = true)]
async fn notes_reach_only_tools_that_take_them_and_are_part_of_their_keys() {
    let world = World::new([true, false].map(|takes_notes| Arc::new(Relay { takes_notes }) as SharedTool));
    let told = async |tool: &str, notes: Value| {
        let call = Call { notes: Some(Arc::new(notes)), ..Call::new(tool, json!({})) };
        let result = world.executor.call(call).await;
        (result.text(), result.cached)
    };
    let of = |text: &str, cached: bool| (text.to_owned(), cached);
    assert_eq!(told("relay", json!({"trace": "a"})).await, of(r#"{"trace":"a"}"#, false));
    assert_eq!(told("relay", json!({"trace": "a"})).await, of(r#"{"trace":"a"}"#, true));
    assert_eq!(told("relay", json!({"trace": "b"})).await, of(r#"{"trace":"b"}"#, false));
    assert_eq!(told("plain", json!({"trace": "a"})).await, of("{}", false));
    assert_eq!(told("plain", json!({"trace": "b", "k": "x".repeat(20_000)})).await, of("{}", true));
    let large = Call { notes: Some(Arc::new(json!({"k": "x".repeat(20_000)}))), ..Call::new("relay", json!({})) };
    assert_eq!(world.executor.call(large).await.error.unwrap().code, Code::ValidationFailed);
    assert!(!world.tape().contains("trace"), "they are written down nowhere");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_may_only_read_refuses_other_tools() {
    let (write, writes) = Puppet::new(ToolSpec::new("write", ""), [Act::Echo]);
    let world = World::new([write, Puppet::reading("read", Act::Echo)]);
    let call = |tool: &str| Call::new(tool, json!({})).with(Options { read_only: true, ..Options::default() });
    assert!(world.executor.call(call("read")).await.is_success());
    let error = world.executor.call(call("write")).await.error.unwrap();
    assert_eq!(
        (error.code, error.message.as_str(), error.suggestion.as_deref()),
        (
            Code::PermissionDenied,
            "`write` may change something, and this call may only read",
            Some("call it by itself, so that it is judged and shown on its own")
        )
    );
    assert_eq!(writes.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_sets_the_delay_of_its_retries() {
    let (tool, _) = Puppet::new(
        ToolSpec::new("t", "").idempotent(),
        [Act::Fail(Code::TransportFailed, true), Act::Fail(Code::TransportFailed, true), Act::Echo],
    );
    let world = World::with([tool], |builder| builder.retry.backoff = Backoff::Linear);
    let minute = Duration::from_secs(60);
    let options = Options { retry_delay: Some(minute), retries: Some(2), ..Options::default() };
    let began = tokio::time::Instant::now();
    assert!(world.executor.call(Call::new("t", json!({})).with(options)).await.is_success());
    // The cap of the policy grows to the delay, and no further.
    assert_eq!(began.elapsed(), 2 * minute);
}

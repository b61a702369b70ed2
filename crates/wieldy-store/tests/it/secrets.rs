//! No secret gets into the file, from any part of a call.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{
    Call, CallError, Caller, Code, Held, Options, Outcome, RunError, SharedTool, Status, Stream, ToolSpec, redact, tool,
};
use wieldy_store::JournalOptions;

use crate::world::{TestHistory, until};

const CANARY: &str = "kestrel-7731-under-glass";

/// Returns the forms in which the file could hold the canary.
fn forms() -> Vec<Vec<u8>> {
    // The part of the Base64 text that does not depend on its neighbours.
    let base64 = "a2VzdHJlbC03NzMxLXVuZGVyLWdsYXNz";
    [forms_of(CANARY), vec![base64.into()]].concat()
}

fn forms_of(secret: &str) -> Vec<Vec<u8>> {
    let hex = |upper| {
        let digits: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        if upper { digits.to_uppercase() } else { digits }
    };
    let forms = [secret.to_owned(), secret.chars().rev().collect(), hex(false), hex(true)];
    forms.into_iter().map(String::into_bytes).collect()
}

/// Returns a tool that emits the secret in every way that a tool can.
fn talking(name: &'static str, fails: bool) -> SharedTool {
    let run = move |_: Value, run: wieldy_core::Run| async move {
        run.progress(50.0, format!("at {CANARY}"));
        run.warn(format!("beware of {CANARY}"));
        run.output(Stream::Stdout, &CANARY.as_bytes()[..9]);
        run.output(Stream::Stdout, &CANARY.as_bytes()[9..]);
        run.output(Stream::Stderr, format!("error: {CANARY}\n").as_bytes());
        if fails {
            let error = CallError::new(Code::ExecutionError, format!("no {CANARY}")).suggest(CANARY);
            return Err(RunError::from(error.detail("why", CANARY)));
        }
        Ok(Outcome::text(format!("it is {CANARY}")).structured(json!({ CANARY: CANARY, "list": [{"x": CANARY}] })))
    };
    Arc::new(tool(ToolSpec::new(name, ""), run))
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_gets_into_the_file() {
    assert!(redact::hide(CANARY));
    let history = TestHistory::sqlite();
    let living = history.executor_with([talking("say", false), talking("fail", true)], &history.options(), |_| {});
    let caller = Caller {
        agent: format!("agent {CANARY}"),
        tenant: Some(CANARY.into()),
        session: Some(format!("s-{CANARY}")),
        user: Some(CANARY.into()),
        scopes: Held::All,
        permissions: Held::All,
        ..Caller::local()
    };
    let arguments = || json!({ CANARY: CANARY, "deep": [{"url": format!("https://a:{CANARY}@host/?q={CANARY}")}] });
    let call = |tool: &str| {
        let options = Options { labels: vec![CANARY.into()], rerun: true, ..Options::default() };
        Call { call_id: Some(CANARY.into()), ..Call::new(tool, arguments()).by(caller.clone()).with(options) }
    };
    let names = ["say", "fail", "missing", CANARY];
    for name in names {
        living.executor.call(call(name)).await;
        let task = living.executor.spawn(call(name));
        living.executor.wait(task, &caller).await;
        let mut keyed = call(name);
        keyed.options.idempotency_key = Some(CANARY.into());
        let result = living.executor.call(keyed).await;
        assert_eq!(result.status == Status::Success, name == "say", "{result:?}");
    }
    living.journal.flush().await.unwrap();
    search(&history);
    drop(living);
    assert_eq!(history.check().executions, 3 * names.len() as u64);
    drop(history.executor_with([], &JournalOptions::default(), |_| {}));
    history.store().backup(&history.folder.path().join("copy.db")).unwrap();
    search(&history);
}

/// A value that only the call marks as secret.
const MARKED: &str = "plover-4410-over-slate";

/// Returns a tool that emits the marked argument in every way that a tool can.
fn repeating(name: &'static str, spec: ToolSpec, fails: bool) -> SharedTool {
    let run = move |arguments: Value, run: wieldy_core::Run| async move {
        let secret = arguments[name].as_str().unwrap_or_default().to_owned();
        run.progress(50.0, format!("at {secret}"));
        run.warn(format!("beware of {secret}"));
        for byte in secret.as_bytes() {
            run.output(Stream::Stdout, &[*byte]);
        }
        run.output(Stream::Stdout, format!(" {}", secret.chars().rev().collect::<String>()).as_bytes());
        run.output(Stream::Stderr, format!("error: {secret}\n").as_bytes());
        if fails {
            let error = CallError::new(Code::ExecutionError, format!("no {secret}")).suggest(&secret);
            return Err(RunError::from(error.detail("why", secret)));
        }
        Ok(Outcome::text(format!("it is {secret}")).structured(json!({ &*secret: secret, "list": [{"x": secret}] })))
    };
    Arc::new(tool(spec, run))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_marked_sensitive_does_not_get_into_the_file_by_the_output_of_its_call() {
    let history = TestHistory::sqlite();
    let marked = |name| ToolSpec::new(name, "").sensitive("seal");
    let tools = [
        repeating("seal", marked("say"), false),
        repeating("seal", marked("fail"), true),
        repeating("password", ToolSpec::new("login", ""), false),
    ];
    let living = history.executor(tools);
    for (tool, argument) in [("say", "seal"), ("fail", "seal"), ("login", "password")] {
        // The same value in another argument is hidden, too.
        let call = || Call::new(tool, json!({ argument: MARKED, "note": format!("with {MARKED}") }));
        let given = living.executor.call(call()).await;
        assert!(json!(given).to_string().contains(MARKED), "the caller gets the answer as it is");
        let task = living.executor.spawn(call());
        living.executor.wait(task, &Caller::local()).await.unwrap();
        let options = Options { idempotency_key: Some("k".into()), ..Options::default() };
        living.executor.call(call().with(options)).await;
    }
    living.journal.flush().await.unwrap();
    let forms = forms_of(MARKED);
    search_for(&history, &forms);
    drop(living);
    assert_eq!(history.check().executions, 9);
    search_for(&history, &forms);
    // The rest of the output is not hidden.
    let shown = json!(history.store().search(&wieldy_store::Query::default(), 20).unwrap()).to_string();
    assert!(shown.contains("no [redacted]") && shown.contains("with [redacted]"), "{shown}");
    let printed = history.sql("SELECT data FROM events WHERE name = 'tool.call.progress'").concat().concat();
    assert!(printed.contains("at [redacted]") && printed.contains("error: [redacted]"), "{printed}");
}

/// Returns a tool that prints half of an argument, a word on the other stream, and the other half.
fn parting() -> SharedTool {
    let run = |arguments: Value, run: wieldy_core::Run| async move {
        let text = arguments["seal"].as_str().unwrap_or_default().to_owned();
        let (first, rest) = text.split_at(text.len() / 2);
        for (stream, part) in [(Stream::Stdout, first), (Stream::Stderr, "warning\n"), (Stream::Stdout, rest)] {
            run.output(stream, part.as_bytes());
        }
        run.output(Stream::Stdout, b" printed\n");
        run.output(Stream::Stderr, b"done\n");
        Ok(run.captured())
    };
    Arc::new(tool(ToolSpec::new("part", "").sensitive("pin"), run))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_marked_value_that_is_split_over_both_streams_does_not_get_into_the_file() {
    let history = TestHistory::sqlite();
    let living = history.executor([parting()]);
    let keyed = |key: &str, arguments: Value| {
        let options = Options { idempotency_key: Some(key.into()), ..Options::default() };
        Call::new("part", arguments).with(options)
    };
    let secret = keyed("k", json!({"seal": MARKED, "pin": MARKED}));
    let plain = keyed("twin", json!({"seal": "an ordinary text", "pin": MARKED}));
    for (call, parts) in [(&secret, "plover-4410warning\n-over-slate"), (&plain, "an ordinwarning\nary text")] {
        let given = living.executor.call(call.clone()).await;
        assert_eq!(given.text(), format!("{parts} printed\ndone\n"), "the caller gets the answer as it is");
    }
    drop(living);
    let (first, rest) = MARKED.split_at(MARKED.len() / 2);
    search_for(&history, &[first.into(), rest.into()]);
    // Another executor gives the stored answer.
    let living = history.executor([parting()]);
    let kept = living.executor.call(secret).await;
    let told = "[the output is not stored: a secret may be split between stdout and stderr]";
    assert_eq!((kept.status, kept.cached, kept.text()), (Status::Success, true, told.to_owned()));
    let kept = living.executor.call(plain).await;
    assert_eq!((kept.cached, kept.text()), (true, "an ordinwarning\nary text printed\ndone\n".to_owned()));
    drop(living);
    history.check();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_marked_value_hides_none_of_the_engines_own_words() {
    let history = TestHistory::sqlite();
    let marked = || ToolSpec::new("say", "").sensitive("seal").sensitive("pin");
    let living = history.executor([repeating("seal", marked(), true)]);
    for (seal, pin) in [("failed", "1"), ("E3900", "on"), ("EXECUTION_ERROR", "say"), ("type", "text")] {
        let options = Options { idempotency_key: Some(seal.into()), ..Options::default() };
        let call = || Call::new("say", json!({"seal": seal, "pin": pin})).with(options.clone());
        let first = living.executor.call(call()).await;
        assert_eq!((first.status, first.cached), (Status::Failed, false));
    }
    drop(living);
    for call in history.store().search(&wieldy_store::Query::default(), 20).unwrap().executions {
        assert_eq!((call.tool.as_str(), call.status.as_str()), ("say", "failed"));
        assert_eq!(call.error_code.as_deref(), Some("E3900"));
        assert_eq!(call.error_message.as_deref(), Some("no [redacted]"));
    }
    // The stored answer of the key is readable.
    let living = history.executor([repeating("seal", marked(), true)]);
    let options = Options { idempotency_key: Some("type".into()), ..Options::default() };
    let again = living.executor.call(Call::new("say", json!({"seal": "type", "pin": "text"})).with(options)).await;
    assert_eq!((again.status, again.cached), (Status::Failed, true));
    drop(living);
    history.check();
}

/// Searches every file of the folder.
fn search(history: &TestHistory) {
    search_for(history, &forms());
}

fn search_for(history: &TestHistory, forms: &[Vec<u8>]) {
    let mut looked = 0;
    for entry in std::fs::read_dir(history.folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let Ok(bytes) = std::fs::read(&path) else { continue };
        looked += bytes.len();
        for form in forms {
            let seen = bytes.windows(form.len()).position(|part| part.eq_ignore_ascii_case(form));
            let around = seen.map(|at| String::from_utf8_lossy(&bytes[at.saturating_sub(200)..at + 60]).into_owned());
            assert_eq!(around, None, "{} in {}", String::from_utf8_lossy(form), path.display());
        }
    }
    assert!(looked > 10_000, "there is something to look through");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_of_a_redacted_caller_is_not_rerun() {
    assert!(redact::hide(CANARY));
    let history = TestHistory::sqlite();
    let (hanging, strings) =
        wieldy_testkit::Puppet::new(ToolSpec::new("look", "").read_only(), [wieldy_testkit::Act::Hang]);
    let first = history.executor([hanging]);
    let caller = Caller { tenant: Some(format!("tenant {CANARY}")), ..Caller::local() };
    let options = Options { rerun: true, ..Options::default() };
    let task = first.executor.spawn(Call::new("look", json!({})).by(caller).with(options));
    until("it runs", || async { strings.now() == 1 }).await;
    first.journal.flush().await.unwrap();
    first.journal.abandon();
    std::mem::forget(first);
    history.sql("UPDATE instances SET ended_at = seen_at");
    let (again, strings) =
        wieldy_testkit::Puppet::new(ToolSpec::new("look", "").read_only(), [wieldy_testkit::Act::Echo]);
    let next = history.executor_with([again], &JournalOptions { resumes: true, ..history.options() }, |_| {});
    assert_eq!((next.executor.resume(), strings.runs()), (vec![], 0));
    let (call, _) = history.store().show(task).unwrap().unwrap();
    assert_eq!((call.status.as_str(), call.error_code.as_deref()), ("failed", Some("E3110")));
    drop(next);
    history.check();
}

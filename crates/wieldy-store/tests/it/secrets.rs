//! No secret gets into the file, wherever it comes from.

use std::sync::Arc;

use serde_json::{Value, json};
use wieldy_core::{
    Call, CallError, Caller, Code, Held, Options, Outcome, RunError, SharedTool, Status, Stream, ToolSpec, redact, tool,
};
use wieldy_store::JournalOptions;

use crate::world::{Place, until};

const CANARY: &str = "kestrel-7731-under-glass";

/// The canary as it could stand in the file.
fn forms() -> Vec<Vec<u8>> {
    let hex = |upper| {
        let digits: String = CANARY.bytes().map(|byte| format!("{byte:02x}")).collect();
        if upper { digits.to_uppercase() } else { digits }
    };
    // Of Base64 what is the same whatever stands around it.
    let base64 = ["a2VzdHJlbC03NzMxLXVuZGVyLWdsYXNz"];
    let mut forms = vec![CANARY.to_owned(), CANARY.chars().rev().collect(), hex(false), hex(true)];
    forms.extend(base64.map(str::to_owned));
    forms.into_iter().map(String::into_bytes).collect()
}

/// Says the secret in every way that a tool can.
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
    let place = Place::sqlite();
    let living = place.executor_with([talking("say", false), talking("fail", true)], &place.options(), |_| {});
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
    search(&place);
    drop(living);
    assert_eq!(place.check().executions, 3 * names.len() as u64);
    drop(place.executor_with([], &JournalOptions::default(), |_| {}));
    place.store().backup(&place.folder.path().join("copy.db")).unwrap();
    search(&place);
}

/// Looks through every file of the folder.
fn search(place: &Place) {
    let mut looked = 0;
    for entry in std::fs::read_dir(place.folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let Ok(bytes) = std::fs::read(&path) else { continue };
        looked += bytes.len();
        for form in forms() {
            let seen = bytes.windows(form.len()).position(|part| part.eq_ignore_ascii_case(&form));
            let around = seen.map(|at| String::from_utf8_lossy(&bytes[at.saturating_sub(200)..at + 60]).into_owned());
            assert_eq!(around, None, "{} in {}", String::from_utf8_lossy(&form), path.display());
        }
    }
    assert!(looked > 10_000, "there is something to look through");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_acted_for_who_cannot_be_named() {
    assert!(redact::hide(CANARY));
    let place = Place::sqlite();
    let (hanging, strings) =
        wieldy_testkit::Puppet::new(ToolSpec::new("look", "").read_only(), [wieldy_testkit::Act::Hang]);
    let first = place.executor([hanging]);
    let caller = Caller { tenant: Some(format!("tenant {CANARY}")), ..Caller::local() };
    let options = Options { rerun: true, ..Options::default() };
    let task = first.executor.spawn(Call::new("look", json!({})).by(caller).with(options));
    until("it runs", || async { strings.now() == 1 }).await;
    first.journal.flush().await.unwrap();
    first.journal.forsake();
    std::mem::forget(first);
    place.sql("UPDATE instances SET ended_at = seen_at");
    let (again, strings) =
        wieldy_testkit::Puppet::new(ToolSpec::new("look", "").read_only(), [wieldy_testkit::Act::Echo]);
    let next = place.executor_with([again], &JournalOptions { resumes: true, ..place.options() }, |_| {});
    assert_eq!((next.executor.resume(), strings.runs()), (vec![], 0));
    let (call, _) = place.store().show(task).unwrap().unwrap();
    assert_eq!((call.status.as_str(), call.error_code.as_deref()), ("failed", Some("E3110")));
    drop(next);
    place.check();
}

//! Property tests of batches and of the call state.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use wieldy_core::{
    Batch, Body, Call, CallError, CallState, Closing, Code, ConfirmationId, Outcome, SharedTool, Status, ToolSpec, tool,
};
use wieldy_testkit::World;

/// A small file system in memory whose operations take time.
type Files = Arc<Mutex<BTreeMap<String, String>>>;

#[derive(Debug, Clone)]
struct Operation {
    write: bool,
    path: &'static str,
    takes_ms: u64,
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let paths = prop::sample::select(vec!["a", "b", "a/x", "a/y", "c", "."]);
    let operation = (any::<bool>(), paths, 0..50_u64);
    prop::collection::vec(operation.prop_map(|(write, path, takes_ms)| Operation { write, path, takes_ms }), 0..25)
}

/// Returns everything at or below a path.
fn below(files: &BTreeMap<String, String>, path: &str) -> String {
    let inside = |name: &str| path == "." || name == path || name.starts_with(&format!("{path}/"));
    files.iter().filter(|(name, _)| inside(name)).map(|(name, text)| format!("{name}={text};")).collect()
}

/// Appends to everything at or below a path, and to the path itself.
fn append(files: &mut BTreeMap<String, String>, path: &str, text: &str) {
    files.entry(path.to_owned()).or_default();
    let inside = |name: &str| path == "." || name == path || name.starts_with(&format!("{path}/"));
    for (_, content) in files.iter_mut().filter(|(name, _)| inside(name)) {
        content.push_str(text);
    }
}

fn file_tool(write: bool, files: &Files) -> SharedTool {
    let files = Arc::clone(files);
    let spec = if write {
        ToolSpec::new("write", "").writes("path")
    } else {
        ToolSpec::new("read", "").read_only().reads("path")
    };
    Arc::new(tool(spec, move |args: Value, _| {
        let files = Arc::clone(&files);
        async move {
            let path = args["path"].as_str().unwrap().to_owned();
            let half = Duration::from_millis(args["takes_ms"].as_u64().unwrap());
            let before = below(&files.lock().unwrap(), &path);
            tokio::time::sleep(half).await;
            if write {
                append(&mut files.lock().unwrap(), &path, args["text"].as_str().unwrap());
                return Ok(Outcome::default());
            }
            // Torn reads would show here.
            let after = below(&files.lock().unwrap(), &path);
            Ok(Outcome::text(if before == after { after } else { "torn".into() }))
        }
    }))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    // Shows: A4.2
    #[test]
    fn any_batch_of_footprinted_calls_has_the_effect_of_running_them_in_order(operations in operations(), max_concurrency in 1usize..8) {
        let mut model = BTreeMap::new();
        let mut wanted = Vec::new();
        for (number, operation) in operations.iter().enumerate() {
            if operation.write {
                append(&mut model, operation.path, &format!("{number},"));
                wanted.push(String::new());
            } else {
                wanted.push(below(&model, operation.path));
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let (seen, files) = runtime.block_on(async {
            let files = Files::default();
            let world = World::new([file_tool(true, &files), file_tool(false, &files)]);
            let calls = operations.iter().enumerate().map(|(number, operation)| {
                let arguments = json!({"path": operation.path, "takes_ms": operation.takes_ms, "text": format!("{number},")});
                Call::new(if operation.write { "write" } else { "read" }, arguments)
            });
            let result = world.executor.batch(Batch { max_concurrency: Some(max_concurrency), ..Batch::new(calls) }).await.unwrap();
            world.check();
            let seen: Vec<String> = result.results.iter().map(|result| result.text()).collect();
            let files = files.lock().unwrap().clone();
            (seen, files)
        });
        prop_assert_eq!(seen, wanted);
        prop_assert_eq!(files, model);
    }

    #[test]
    fn the_fold_accepts_exactly_the_legal_histories(letters in prop::collection::vec(prop::sample::select(LETTERS.to_vec()), 0..9), rest in "(s1)?(g|w|x|t2|s2|u2|t3|s3|u3|S|F){0,8}", proper: bool) {
        // Random letters are nearly always illegal, so half of the histories start like a legal one.
        let text = if proper { format!("p{rest}") } else { letters.concat() };
        let history: Vec<&str> = tokens(&text);
        let accepted = history.iter().try_fold(CallState::default(), |state, token| state.apply(&event(token))).is_ok();
        prop_assert_eq!(accepted, legal().is_match(&text), "{}", text);
    }
}

/// The events of a call, as letters: pending, question, reply, start, progress, warning, retry, success after retry,
/// exhausted, success, failure.
const LETTERS: [&str; 14] = ["p", "q", "r", "s1", "s2", "s3", "g", "w", "t2", "t3", "u2", "x", "S", "F"];

fn tokens(text: &str) -> Vec<&str> {
    let pattern = regex::Regex::new("[a-zA-Z][0-9]?").unwrap();
    pattern.find_iter(text).map(|found| found.as_str()).collect()
}

/// Returns the language that the fold accepts as a regular expression: every prefix of a legal history.
fn legal() -> regex::Regex {
    let third = "(s3(g|w|x|u3)*(S|F)?|F)?";
    let second = format!("(s2(g|w|x|u2)*(S|F|t3(w|x)*{third})?|F)?");
    let first = format!("s1(g|w|x)*(S|F|t2(w|x)*{second})?");
    regex::Regex::new(&format!("^(p(w|qw*r)*(S|F|qw*F?|{first})?)?$")).unwrap()
}

fn event(token: &str) -> Body {
    let number = token[1..].parse().unwrap_or(0);
    let error = || Box::new(CallError::new(Code::TransportFailed, ""));
    let confirmation: ConfirmationId = "00000000-0000-7000-8000-000000000000".parse().unwrap();
    let closing = |status| Closing {
        status,
        duration_ms: 0.0,
        queued_ms: 0.0,
        attempts: 1,
        cached: false,
        output_bytes: 0,
        artifact: None,
        usage: None,
        sandbox: None,
        error: None,
        answer: None,
        recorded: None,
    };
    match &token[..1] {
        "p" => Body::CallPending {
            arguments: json!({}).into(),
            called_as: None,
            workspace: None,
            metadata: None,
            task: false,
            rerun: None,
        },
        "q" => {
            Body::ConfirmationRequested { confirmation, digest: String::new(), reason: String::new(), expires_in_ms: 1 }
        }
        "r" => Body::ConfirmationReceived { confirmation, approved: true, by: None },
        "s" => {
            let (attempts_max, timeout_ms, read_only, idempotent) = (3, 1, true, false);
            Body::CallStarted { attempt: number, attempts_max, timeout_ms, read_only, idempotent, keyed: None }
        }
        "g" => Body::CallProgress { percent: None, message: None, stream: None, elapsed_ms: 0.0 },
        "w" => Body::CallWarning { message: String::new() },
        "t" => Body::RetryAttempt { attempt: number, attempts_max: 3, delay_ms: 0, error: error() },
        "u" => Body::RetrySuccess { attempts: number },
        "x" => Body::RetryExhausted { attempts: 1, error: error() },
        "S" => Body::CallSuccess(closing(Status::Success)),
        _ => Body::CallFailure(closing(Status::Failed)),
    }
}

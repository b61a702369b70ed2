//! The log of an executor, as a program collects it with a subscriber of its own.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tracing::subscriber::DefaultGuard;
use wieldy::{
    Backoff, Call, CallError, Code, Executor, LOG_TARGETS, Outcome, RetryPolicy, Run, RunError, ToolSpec, log_events,
};

/// The log text so far.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Logged {
    /// Collects the log of this thread, the only one in these tests.
    fn collect() -> (Self, DefaultGuard) {
        let logged = Self::default();
        let writer = logged.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_max_level(tracing::Level::TRACE)
            .with_writer(move || writer.clone())
            .finish();
        (logged, tracing::subscriber::set_default(subscriber))
    }

    fn objects(&self) -> Vec<Value> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn executor<F, T>(spec: ToolSpec, run: F) -> Executor
where
    F: Fn(Value, Run) -> T + Send + Sync + 'static,
    T: Future<Output = Result<Outcome, RunError>> + Send + 'static,
{
    Executor::builder().tool(wieldy::tool(spec, run)).build().unwrap()
}

// Shows: E6
#[tokio::test(start_paused = true)]
async fn each_step_has_a_line_of_its_level_and_target() {
    let (logged, _guard) = Logged::collect();
    let retry =
        RetryPolicy { retries: 1, base: Duration::from_secs(1), cap: Duration::from_secs(1), backoff: Backoff::Linear };
    let executor = executor(ToolSpec::new("t", "").read_only().retry(retry), async |_, run| {
        run.progress(50.0, "half");
        run.warn("odd");
        Err(CallError::new(Code::TransportFailed, "gone").into())
    });
    let log = log_events(&executor);
    executor.call(Call::new("t", json!({}))).await;
    log.finish().await;
    let lines: Vec<String> = logged
        .objects()
        .iter()
        .map(|line| format!("{} {} {}", line["level"], line["target"], line["message"]).replace('"', ""))
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @"
    DEBUG wieldy::call call accepted
    INFO wieldy::call call started
    TRACE wieldy::call call progress
    WARN wieldy::call call has a warning
    WARN wieldy::retry attempt failed, another one follows
    INFO wieldy::call call started
    TRACE wieldy::call call progress
    WARN wieldy::call call has a warning
    WARN wieldy::retry attempt failed, none follows
    WARN wieldy::call call failed
    ");
    let targets = logged.objects().into_iter().map(|line| line["target"].as_str().unwrap().to_owned());
    assert!(targets.into_iter().all(|target| LOG_TARGETS.contains(&target.as_str())));
}

#[tokio::test]
async fn what_the_history_stores_of_an_answer_is_logged_for_debugging() {
    let (logged, _guard) = Logged::collect();
    let folder = tempfile::tempdir().unwrap();
    let store = wieldy::Store::open(&wieldy::Address::Sqlite(folder.path().join("history.db"))).unwrap();
    let spec = ToolSpec::new("t", "").read_only();
    let mut builder =
        Executor::builder().tool(wieldy::tool(spec, async |_: Value, _run| Ok(Outcome::text("hunter2!"))));
    builder.journal = Arc::new(store.journal(&wieldy::JournalOptions::default()).unwrap());
    let executor = builder.build().unwrap();
    let log = log_events(&executor);
    executor.call(Call::new("t", json!({"password": "hunter2"}))).await;
    log.finish().await;
    let objects = logged.objects();
    let lines: Vec<_> = objects.iter().filter(|line| line["message"] == "call answered").collect();
    let [line] = lines[..] else { panic!("{objects:?}") };
    assert_eq!((&line["level"], &line["result"]), (&json!("DEBUG"), &json!(r#"{"text":"[redacted]!"}"#)));
}

#[tokio::test(start_paused = true)]
async fn a_log_that_cannot_follow_says_how_much_it_missed() {
    let (logged, _guard) = Logged::collect();
    let executor = executor(ToolSpec::new("t", "").read_only(), async |_, run| {
        // No other task gets a turn before this loop ends.
        (0..5000).for_each(|_| run.progress(None, "on"));
        Ok(Outcome::text("done"))
    });
    let log = log_events(&executor);
    executor.call(Call::new("t", json!({}))).await;
    log.finish().await;
    let (missed, lines): (Vec<Value>, Vec<Value>) =
        logged.objects().into_iter().partition(|line| line["target"] == "wieldy::missed");
    let told: u64 = missed.iter().map(|line| line["count"].as_u64().unwrap()).sum();
    assert!(told > 0 && missed.iter().all(|line| line["level"] == "WARN"));
    assert_eq!(lines.len() as u64 + told, 5003, "accepted, started, 5000 times progress, ended");
}

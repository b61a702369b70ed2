//! The victim of `kill`: this test program as another process, with tools whose effects are counted outside of it.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wieldy_core::{
    AnyTool, Batch, Call, Caller, Durability, Executor, Options, Outcome, Run, ToolResult, ToolSpec, tool,
};
use wieldy_store::{Address, JournalOptions, Retention, Store};
use wieldy_testkit::Announcer;

use crate::world::TestHistory;

/// The number of calls that the victim makes at a time.
const CALLERS: usize = 16;
/// The number of calls that a hoarding victim leaves open: more than recovery closes in one group.
pub(crate) const HOARD: usize = 600;
/// The number of keys of earlier victims that are used again.
const KEYS: usize = 40;
/// The longest life of a victim that is not killed.
const LIFE_MAX: Duration = Duration::from_secs(20);

/// The id of the next sandbox. Each victim begins with the same.
static NEXT_SANDBOX: AtomicUsize = AtomicUsize::new(1);

/// The number of calls that hang.
static HANGING: AtomicUsize = AtomicUsize::new(0);

/// The life of a victim until it is killed.
#[derive(Clone, Copy)]
pub(crate) struct Victim<'a> {
    pub(crate) does: &'a str,
    pub(crate) durability: Durability,
    /// The failpoint that kills it, with the number of times it is reached.
    pub(crate) failpoint: &'a str,
    /// The error of its clock, in the form of `clock.c`, and the library that causes it.
    pub(crate) clock: Option<(&'a str, &'a Path)>,
}

impl Default for Victim<'_> {
    fn default() -> Self {
        Self { does: "work", durability: Durability::default(), failpoint: "", clock: None }
    }
}

impl Victim<'_> {
    pub(crate) fn start(&self, history: &TestHistory) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "victim::victim", "--nocapture"])
            .env("WIELDY_VICTIM", history.url())
            .env("WIELDY_VICTIM_FOLDER", history.folder.path())
            .env("WIELDY_VICTIM_DOES", self.does)
            .env("WIELDY_VICTIM_DURABILITY", json!(self.durability).as_str().unwrap())
            .env("WIELDY_FAILPOINT", self.failpoint)
            .stdout(Stdio::null())
            .stderr(File::create(history.folder.path().join("stderr")).unwrap());
        if let Some((clock, library)) = self.clock {
            command.env("WIELDY_TEST_CLOCK", clock).env("LD_PRELOAD", library);
        }
        command.spawn().unwrap()
    }
}

/// Appends a whole line to a file.
pub(crate) fn note(path: &Path, line: &str) {
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    // A killed process may leave half a line. So each line begins with a line break, and one without a full stop does
    // not count.
    file.write_all(format!("\n{line} .").as_bytes()).unwrap();
}

pub(crate) fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_suffix(" .")).map(str::to_owned).collect()
}

/// Aborts as if the machine had stopped, if the environment names this failpoint.
fn die_at(failpoint: &str, reached: &AtomicU64) {
    let wanted = std::env::var("WIELDY_FAILPOINT").unwrap_or_default();
    let (name, times) = wanted.split_once(':').unwrap_or((&wanted, "1"));
    if name == failpoint && reached.fetch_add(1, Ordering::SeqCst) + 1 == times.parse::<u64>().unwrap() {
        std::process::abort();
    }
}

/// Returns the tools of the victim: `pay` leaves a mark, once; `put` leaves one per run; `look` leaves none; `hang`
/// hangs.
fn tools(folder: &Path) -> [Arc<dyn AnyTool>; 4] {
    let (before, after) = (AtomicU64::new(0), AtomicU64::new(0));
    let effects = folder.join("effects");
    let pay = tool(ToolSpec::new("pay", ""), move |arguments: Value, _: Run| {
        die_at("tool.before_effect", &before);
        note(&effects, arguments["mark"].as_str().unwrap());
        die_at("tool.after_effect", &after);
        async { Ok(Outcome::text("paid")) }
    });
    let puts = folder.join("puts");
    let put = tool(ToolSpec::new("put", "").idempotent(), move |arguments: Value, _: Run| {
        note(&puts, arguments["mark"].as_str().unwrap());
        async { Ok(Outcome::text("put")) }
    });
    let look = tool(ToolSpec::new("look", "").read_only(), |_: Value, _: Run| async { Ok(Outcome::text("seen")) });
    let hang = tool(ToolSpec::new("hang", ""), |_: Value, _: Run| {
        HANGING.fetch_add(1, Ordering::SeqCst);
        std::future::pending()
    });
    [Arc::new(pay), Arc::new(put), Arc::new(look), Arc::new(hang)]
}

/// The executor of the victim, and how it makes calls.
#[derive(Clone)]
struct VictimExecutor {
    executor: Executor,
    level: Announcer,
    folder: PathBuf,
    durability: String,
    padding: usize,
}

impl VictimExecutor {
    fn call(&self, tool: &str, mark: &str, options: Options) -> Call {
        // A mark begins with its tool, to show its origin.
        let padding = "x".repeat(self.padding);
        Call::new(tool, json!({ "mark": format!("{tool}-{mark}"), "padding": padding }))
            // It looks like a fact of the engine's own, and is none.
            .metadata(json!({"rerun": true, "deep": {"rerun": true}}))
            .with(options)
    }

    fn keyed(&self, mark: &str) -> Options {
        // A claim waits for the history itself, which is too slow for filling the log.
        if self.padding > 0 {
            return Options::default();
        }
        note(&self.folder.join("keys"), mark);
        Options { idempotency_key: Some(mark.to_owned()), ..Options::default() }
    }

    /// Notes an answer outside of the history.
    fn note_answer(&self, result: &ToolResult) {
        let ran = if result.cached { "cached" } else { "ran" };
        let mark = result.arguments["mark"].as_str().unwrap();
        let line = format!("{} {} {} {ran} {mark}", result.execution_id, result.status, self.durability);
        note(&self.folder.join("answers"), &line);
    }

    async fn as_task(&self, call: Call) {
        let id = self.executor.spawn(call);
        let result = self.executor.wait(id, &Caller::local()).await.unwrap();
        self.note_answer(&result);
    }

    /// Makes a call in one of several ways.
    async fn one(&self, way: usize, mark: &str) {
        let rerun = || Options { rerun: true, ..Options::default() };
        let none = Options::default;
        // On a server, the record of a sandbox takes a transaction, so not every call has one.
        let sandbox = (way % 8 == 1).then(|| NEXT_SANDBOX.fetch_add(1, Ordering::Relaxed).to_string());
        sandbox.iter().for_each(|id| self.level.made(id));
        match way % 8 {
            0 => self.note_answer(&self.executor.call(self.call("look", mark, none())).await),
            1 | 2 => self.note_answer(&self.executor.call(self.call("pay", mark, self.keyed(mark))).await),
            3 => self.as_task(self.call("pay", mark, none())).await,
            4 => self.as_task(self.call("pay", mark, self.keyed(mark))).await,
            5 => self.as_task(self.call("put", mark, rerun())).await,
            6 => {
                let calls = ["pay", "look", "put"].map(|tool| self.call(tool, mark, none()));
                let done = self.executor.batch(Batch::new(calls)).await.unwrap();
                done.results.iter().for_each(|result| self.note_answer(result));
            }
            _ => self.note_answer(&self.executor.call(self.call("pay", mark, none())).await),
        }
        sandbox.iter().for_each(|id| self.level.gone(id));
    }

    /// Uses the keys of earlier victims again: their calls are not repeated.
    async fn reuse_keys(&self, keys: &[String]) {
        let again = keys.iter().rev().take(KEYS).map(|mark| {
            let options = Options { idempotency_key: Some(mark.clone()), ..Options::default() };
            self.executor.call(self.call("pay", mark, options))
        });
        for result in futures_util::future::join_all(again).await {
            self.note_answer(&result);
        }
    }

    /// Makes calls, many at a time.
    async fn work(&self, part: &str, rounds: usize) {
        let began = Instant::now();
        let run = format!("{}{part}", std::process::id());
        let callers = (0..CALLERS).map(|caller| {
            let (life, run) = (self.clone(), run.clone());
            tokio::spawn(async move {
                for round in 0..rounds {
                    life.one(caller, &format!("{run}-{caller}-{round}")).await;
                    // Calls that wait for nothing would leave no time for the others.
                    tokio::task::yield_now().await;
                    if began.elapsed() > LIFE_MAX {
                        break;
                    }
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
    }

    /// Leaves many calls open.
    async fn hoard(&self) {
        let run = std::process::id();
        for n in 0..HOARD {
            let options = Options { rerun: n % 3 == 0, ..Options::default() };
            self.executor.spawn(self.call("hang", &format!("{run}-{n}"), options));
        }
    }
}

/// The victim process, which does nothing when it runs as a test.
#[test]
fn victim() {
    let Ok(address) = std::env::var("WIELDY_VICTIM") else { return };
    let told = |name: &str| std::env::var(name).unwrap();
    let (folder, does, durability) =
        (PathBuf::from(told("WIELDY_VICTIM_FOLDER")), told("WIELDY_VICTIM_DOES"), told("WIELDY_VICTIM_DURABILITY"));
    let keys = lines(&folder.join("keys"));
    let store = Store::open(&address.parse::<Address>().unwrap()).unwrap();
    let everything = Retention { age_max: Some(Duration::ZERO), ..Retention::default() };
    let results = Retention { results_age_max: Some(Duration::ZERO), ..Retention::default() };
    let mut options =
        JournalOptions { key: Some(folder.join("audit.key")), resumes: true, ..JournalOptions::default() };
    if does == "prune" {
        note(&folder.join("pruned"), "from here on something may be missing");
        options.retention = everything;
    }
    let journal = Arc::new(store.journal(&options).unwrap());
    let level = Announcer::default();
    let mut builder = Executor::builder().tools(tools(&folder)).sandbox(level.clone());
    builder.journal = Arc::clone(&journal) as _;
    builder.durability = serde_json::from_value(json!(durability)).unwrap();
    builder.limits.calls_running_per_agent_max = 2 * HOARD as u32;
    builder.limits.calls_running_max = 2 * HOARD as u32;
    let executor = builder.build().unwrap();
    let padding = if does == "fill" { 100_000 } else { 0 };
    // This sandbox outlives every victim.
    level.made("0");
    let life = VictimExecutor { executor, level, folder: folder.clone(), durability, padding };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        life.executor.resume();
        if does != "together" {
            life.reuse_keys(&keys).await;
        }
        match does.as_str() {
            "hoard" => {
                life.hoard().await;
                while HANGING.load(Ordering::SeqCst) < HOARD {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                journal.flush().await.unwrap();
                note(&folder.join("hoarded"), "all are open");
                tokio::time::sleep(LIFE_MAX).await;
            }
            "prune" => {
                life.work("a", 30).await;
                journal.flush().await.unwrap();
                store.prune(&results, &options).unwrap();
                store.prune(&everything, &options).unwrap();
                life.work("b", 30).await;
            }
            _ => life.work("", usize::MAX).await,
        }
    });
    drop((life, runtime));
    journal.close();
}

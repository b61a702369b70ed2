//! Killed at any moment, also at the worst ones: nothing that was answered is lost, nothing runs twice, and what nobody
//! knows is said to be unknown.
//!
//! The victim is this test program once more, with a tool whose effects are counted outside of it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wieldy_core::{AnyTool, Call, Durability, Options, Outcome, Run, ToolSpec, tool};
use wieldy_store::{Address, Execution, JournalOptions, Query, Store};

use crate::world::{Place, shared_server};

/// How many calls the victim makes at once.
const CALLERS: usize = 16;

/// Adds a line to a file as a whole.
fn note(path: &Path, line: &str) {
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    // Who is killed may leave half a line: each begins on its own, and one without a full stop was never said.
    file.write_all(format!("\n{line} .").as_bytes()).unwrap();
}

fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_suffix(" .")).map(str::to_owned).collect()
}

/// Dies as if the machine had stopped, where the environment says so.
fn die_at(place: &str, reached: &AtomicU64) {
    let wanted = std::env::var("WIELDY_FAILPOINT").unwrap_or_default();
    let (name, times) = wanted.split_once(':').unwrap_or((&wanted, "1"));
    if name == place && reached.fetch_add(1, Ordering::SeqCst) + 1 == times.parse::<u64>().unwrap() {
        std::process::abort();
    }
}

/// The tools of the victim: `pay` leaves a mark, once; `look` leaves none.
fn tools(folder: PathBuf) -> [Arc<dyn AnyTool>; 2] {
    let (before, after) = (AtomicU64::new(0), AtomicU64::new(0));
    let pay = tool(ToolSpec::new("pay", ""), move |arguments: Value, _: Run| {
        die_at("tool.before_effect", &before);
        note(&folder.join("effects"), arguments["mark"].as_str().unwrap());
        die_at("tool.after_effect", &after);
        async { Ok(Outcome::text("paid")) }
    });
    let look = tool(ToolSpec::new("look", "").read_only(), |_: Value, _: Run| async { Ok(Outcome::text("seen")) });
    [Arc::new(pay), Arc::new(look)]
}

/// The victim of the other tests; on its own it has nothing to do.
#[test]
fn victim() {
    let Ok(address) = std::env::var("WIELDY_VICTIM") else { return };
    let folder = PathBuf::from(std::env::var("WIELDY_VICTIM_FOLDER").unwrap());
    let store = Store::open(&address.parse::<Address>().unwrap()).unwrap();
    let options = JournalOptions { key: Some(folder.join("audit.key")), ..JournalOptions::default() };
    let journal = Arc::new(store.journal(&options).unwrap());
    let mut builder = wieldy_core::Executor::builder().tools(tools(folder.clone()));
    builder.journal = Arc::clone(&journal) as _;
    builder.durability = Durability::Strict;
    builder.limits.calls_running_per_agent_max = CALLERS as u32;
    let executor = builder.build().unwrap();
    let run = std::process::id();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let began = Instant::now();
        let callers = (0..CALLERS).map(|caller| {
            let (executor, folder) = (executor.clone(), folder.clone());
            tokio::spawn(async move {
                for round in 0.. {
                    let mark = format!("{run}-{caller}-{round}");
                    let name = if caller % 4 == 0 { "look" } else { "pay" };
                    let key = (caller % 4 == 1).then(|| mark.clone());
                    let options = Options { idempotency_key: key, ..Options::default() };
                    let result = executor.call(Call::new(name, json!({ "mark": mark })).with(options)).await;
                    note(&folder.join("answers"), &format!("{} {} {mark}", result.execution_id, result.status));
                    // A victim that its killer forgot does not live for ever.
                    if began.elapsed() > Duration::from_secs(20) {
                        break;
                    }
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
    });
}

fn start(place: &Place, failpoint: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::victim", "--nocapture"])
        .env("WIELDY_VICTIM", place.url())
        .env("WIELDY_VICTIM_FOLDER", place.folder.path())
        .env("WIELDY_FAILPOINT", failpoint)
        .stdout(Stdio::null())
        .stderr(File::create(place.folder.path().join("stderr")).unwrap())
        .spawn()
        .unwrap()
}

/// What must be true after every death: the invariants of the history, seen from outside.
fn check(place: &Place) -> usize {
    // The next executor closes what was left open.
    drop(place.store().journal(&place.options()).unwrap());
    let mut rows: HashMap<String, Execution> = HashMap::new();
    let mut query = Query::default();
    loop {
        let page = place.store().search(&query, 5_000).unwrap();
        for row in page.executions {
            assert!(rows.insert(row.execution_id.clone(), row).is_none(), "a call has one row");
        }
        query.cursor = page.next;
        if query.cursor.is_none() {
            break;
        }
    }
    for answer in lines(&place.folder.path().join("answers")) {
        let (id, rest) = answer.split_once(' ').unwrap();
        let (status, mark) = rest.split_once(' ').unwrap();
        let row = rows.get(id).unwrap_or_else(|| panic!("{answer}: an answered call is lost"));
        assert_eq!((row.status.as_str(), &row.parameters), (status, &Some(json!({ "mark": mark }))));
    }
    let mut effects = HashSet::new();
    for mark in lines(&place.folder.path().join("effects")) {
        assert!(effects.insert(mark.clone()), "{mark} was paid twice");
    }
    let mut paid = HashSet::new();
    for row in rows.values() {
        assert!(row.completed_at.is_some(), "{row:?} is still open");
        let mark = row.parameters.as_ref().and_then(|given| given["mark"].as_str()).unwrap().to_owned();
        match (row.status.as_str(), row.error_code.as_deref()) {
            ("success", None) => assert!(row.tool == "look" || effects.contains(&mark), "{row:?} had no effect"),
            ("failed", Some("E3110")) => {}
            _ => panic!("{row:?} ended in a way that nothing explains"),
        }
        paid.insert(mark);
    }
    for mark in &effects {
        assert!(paid.contains(mark), "{mark} was paid and nothing is known of it");
    }
    place.check();
    rows.len()
}

/// Kills at random moments, so many victims in all, of which some live together.
fn kill_at_random(place: impl Fn() -> Place, victims: usize, together: usize) {
    const ROUNDS: usize = 10;
    let mut chance = fastrand(victims as u64);
    let mut calls = 0;
    for _ in 0..victims / ROUNDS / together {
        let place = place();
        for _ in 0..ROUNDS {
            let answers = place.folder.path().join("answers");
            let before = fs::metadata(&answers).map_or(0, |file| file.len());
            let began = Instant::now();
            let victims: Vec<Child> = (0..together).map(|_| start(&place, "")).collect();
            while fs::metadata(&answers).map_or(0, |file| file.len()) == before
                && began.elapsed() < Duration::from_secs(10)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            for mut victim in victims {
                std::thread::sleep(Duration::from_micros(chance() % 30_000));
                victim.kill().unwrap();
                victim.wait().unwrap();
            }
        }
        calls += check(&place);
    }
    assert!(calls > victims, "the victims did something: {calls}");
}

/// Numbers that look random, the same in every run of one day.
fn fastrand(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

#[test]
fn killed_at_random_moments_nothing_is_lost_doubled_or_guessed() {
    kill_at_random(Place::sqlite, 200, 1);
}

#[test]
fn killed_at_random_moments_on_postgres_nothing_is_lost_doubled_or_guessed() {
    if shared_server().is_some() {
        kill_at_random(|| Place::postgres().unwrap(), 200, 4);
    }
}

#[test]
fn killed_at_every_named_place_nothing_is_lost_doubled_or_guessed() {
    killed_at_every_named_place(&Place::sqlite);
}

#[test]
fn killed_at_every_named_place_on_postgres_nothing_is_lost_doubled_or_guessed() {
    if shared_server().is_some() {
        killed_at_every_named_place(&|| Place::postgres().unwrap());
    }
}

fn killed_at_every_named_place(place: &dyn Fn() -> Place) {
    let places = [
        "journal.registered",
        "journal.opened",
        "writer.taken",
        "write.begun",
        "write.put",
        "writer.committed",
        "tool.before_effect",
        "tool.after_effect",
        "recovery.claimed",
        "recovery.closed",
    ];
    for name in places {
        let place = place();
        for times in [1, 3, 20] {
            // What recovers must have something to recover.
            let is_early = name.starts_with("journal") || name.starts_with("recovery");
            if is_early {
                let mut first = start(&place, "tool.before_effect:5");
                assert!(!first.wait().unwrap().success());
            }
            let times = if is_early { 1 } else { times };
            let mut victim = start(&place, &format!("{name}:{times}"));
            let began = Instant::now();
            let status = loop {
                if let Some(status) = victim.try_wait().unwrap() {
                    break status;
                }
                assert!(began.elapsed() < Duration::from_secs(10), "{name} was not reached {times} times");
                std::thread::sleep(Duration::from_millis(5));
            };
            let stderr = fs::read_to_string(place.folder.path().join("stderr")).unwrap();
            assert_eq!(status.code(), None, "{name}: it was not killed: {stderr}");
            check(&place);
        }
    }
}

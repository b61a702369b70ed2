//! Processes that push to threads and are killed at random and at the worst moments: no acknowledged entry is lost, no
//! thread has a gap, and a key writes its entry once.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use wieldy_core::Caller;
use wieldy_store::{Address, NewEntry, Reading, Threads};

use crate::victim::{lines, note};
use crate::world::{TestHistory, shared_server};

/// The threads of a process that push at a time, and the number of threads that they push to.
const WRITERS: usize = 4;
const THREADS: usize = 3;
/// The number of keys of earlier victims that are used again.
const KEYS: usize = 5;
/// The longest life of a victim that is not killed.
const LIFE_MAX: Duration = Duration::from_secs(20);

fn threads(address: &Address, folder: &Path) -> Threads {
    Threads::at(address.of_threads(), Some(folder.join("audit.key")), std::collections::BTreeMap::new())
}

/// Starts a process that pushes `rounds` entries with each of its writers.
fn start(history: &TestHistory, rounds: usize, content: usize, failpoint: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "thread_kills::thread_victim", "--nocapture"])
        .env("WIELDY_THREAD_VICTIM", history.url())
        .env("WIELDY_VICTIM_FOLDER", history.folder.path())
        .env("WIELDY_VICTIM_DOES", format!("{rounds} {content}"))
        .env("WIELDY_FAILPOINT", failpoint)
        .stdout(Stdio::null())
        .stderr(File::create(history.folder.path().join("stderr")).unwrap());
    command.spawn().unwrap()
}

/// The victim process, which does nothing when it runs as a test.
#[test]
fn thread_victim() {
    let Ok(address) = std::env::var("WIELDY_THREAD_VICTIM") else { return };
    let folder = PathBuf::from(std::env::var("WIELDY_VICTIM_FOLDER").unwrap());
    let does = std::env::var("WIELDY_VICTIM_DOES").unwrap();
    let (rounds, content) = does.split_once(' ').unwrap();
    let (rounds, padding): (usize, usize) = (rounds.parse().unwrap(), content.parse().unwrap());
    let threads = threads(&address.parse().unwrap(), &folder);
    // The keys of victims that died before the answer came.
    for mark in lines(&folder.join("tried")).iter().rev().take(KEYS) {
        push_one(&threads, &folder, mark, padding);
    }
    let began = Instant::now();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (threads, folder) = (&threads, &folder);
            scope.spawn(move || {
                for round in 0..rounds {
                    let key = if round % 2 == 0 { "key" } else { "free" };
                    let mark = format!("{key}-{}-{writer}-{round}", std::process::id());
                    if key == "key" {
                        note(&folder.join("tried"), &mark);
                    }
                    push_one(threads, folder, &mark, padding);
                    if began.elapsed() > LIFE_MAX {
                        break;
                    }
                }
            });
        }
    });
}

fn thread_of(mark: &str) -> String {
    format!("t{}", mark.bytes().map(usize::from).sum::<usize>() % THREADS)
}

/// Pushes the entry of a mark, and notes its answer outside of the database.
fn push_one(threads: &Threads, folder: &Path, mark: &str, padding: usize) {
    let caller = Caller::local();
    let owner = threads.owner(&caller, "default").unwrap();
    let entry = NewEntry {
        thread_id: thread_of(mark),
        kind: "note".into(),
        content: format!("{mark} {}", "x".repeat(padding)),
        key: mark.starts_with("key").then(|| mark.to_owned()),
        ..NewEntry::default()
    };
    let pushed = threads.push(&owner, &caller, entry).unwrap();
    note(&folder.join("answers"), &format!("{mark} {} {}", pushed.seq, pushed.hash));
}

/// Checks the promises, and returns the number of entries.
fn check(history: &TestHistory) -> usize {
    let threads = threads(&history.address, history.folder.path());
    let Some(verdict) = threads.verify(None, &mut |_| {}).unwrap() else { return 0 };
    assert_eq!(verdict.problem, None, "{verdict:?}");
    assert_eq!(verdict.signed, verdict.threads);
    let owner = threads.owner(&Caller::local(), "default").unwrap();
    let mut marks = HashMap::new();
    for listed in threads.list(&owner, None, 100, None).unwrap().threads {
        let mut reading = Reading { thread_id: listed.thread_id.clone(), limit: 500, ..Reading::default() };
        let mut last = 0;
        loop {
            let page = threads.read(&owner, &reading).unwrap();
            for entry in page.entries {
                assert_eq!(entry.seq, last + 1, "`{}` has a gap", listed.thread_id);
                last = entry.seq;
                let mark = entry.content.split(' ').next().unwrap().to_owned();
                assert_eq!(thread_of(&mark), listed.thread_id);
                assert_eq!(marks.insert(mark.clone(), entry.seq), None, "{mark} was written twice");
            }
            reading.after = page.cursor;
            if page.cursor.is_none() {
                break;
            }
        }
    }
    let mut hashes = HashSet::new();
    for row in history.threads_sql("SELECT hash FROM entries") {
        hashes.insert(hex(&row[0]));
    }
    for answer in lines(&history.folder.path().join("answers")) {
        let [mark, seq, hash] = answer.split(' ').collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(marks.get(mark).map(ToString::to_string).as_deref(), Some(seq), "{answer}");
        assert!(hashes.contains(hash), "{answer}");
    }
    assert_eq!(marks.len(), hashes.len());
    marks.len()
}

/// Returns the hexadecimal digits of a value as the databases show it.
fn hex(shown: &str) -> String {
    if let Some(digits) = shown.strip_prefix("\\x") {
        return digits.to_owned();
    }
    let bytes = shown.trim_start_matches("Blob([").trim_end_matches("])").split(", ");
    bytes.map(|byte| format!("{:02x}", byte.parse::<u8>().unwrap())).collect()
}

fn kill_at_random(history: &TestHistory, kills: usize, together: usize) {
    let answers = history.folder.path().join("answers");
    let length = || fs::metadata(&answers).map_or(0, |file| file.len());
    let mut chance = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move |max: u64| {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (chance >> 33) % max
    };
    for _ in 0..kills / together {
        // They are killed after some answers, which have about a hundred bytes each.
        let (enough, began) = (length() + 2_000 + next(10_000), Instant::now());
        let victims: Vec<Child> = (0..together).map(|_| start(history, usize::MAX, 0, "")).collect();
        while length() < enough {
            assert!(began.elapsed() < Duration::from_secs(30), "the victims do nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        for mut victim in victims {
            std::thread::sleep(Duration::from_micros(next(10_000)));
            victim.kill().unwrap();
            victim.wait().unwrap();
        }
    }
    let entries = check(history);
    assert!(entries > kills, "the victims did something: {entries}");
}

// Shows: C6.8
#[test]
fn killed_at_random_moments_no_acknowledged_entry_is_lost_or_doubled() {
    kill_at_random(&TestHistory::sqlite(), wieldy_testkit::count(100, 1_000), 4);
}

#[test]
fn killed_at_random_moments_on_postgres_no_acknowledged_entry_is_lost_or_doubled() {
    if shared_server().is_some() {
        kill_at_random(&TestHistory::postgres().unwrap(), wieldy_testkit::count(100, 1_000), 4);
    }
}

/// Failpoints at which victims die, how often they reach them before, and the size of their entries.
pub(crate) const FAILPOINTS: &[(&str, &[u32], usize)] = &[
    ("migrate.changed", &[1], 0),
    ("key.drafted", &[1], 0),
    ("thread.begun", &[1, 2, 9], 0),
    ("thread.put", &[1, 2, 9, 30], 0),
    ("thread.committed", &[1, 2, 9, 30], 0),
    ("checkpoint.begun", &[1, 2], 200_000),
    ("checkpoint.done", &[1, 2], 200_000),
];

fn killed_at_every_failpoint(history: &dyn Fn() -> TestHistory) {
    for (name, times, content) in FAILPOINTS {
        let history = history();
        if history.is_postgres() && name.starts_with("checkpoint") {
            continue;
        }
        for times in *times {
            let mut victim = start(&history, usize::MAX, *content, &format!("{name}:{times}"));
            let began = Instant::now();
            let status = loop {
                if let Some(status) = victim.try_wait().unwrap() {
                    break status;
                }
                assert!(began.elapsed() < Duration::from_secs(30), "{name} was not reached");
                std::thread::sleep(Duration::from_millis(2));
            };
            let stderr = fs::read_to_string(history.folder.path().join("stderr")).unwrap();
            assert_eq!(status.code(), None, "{name}: it was not killed: {stderr}");
            check(&history);
        }
    }
}

#[test]
fn killed_at_every_failpoint_no_acknowledged_entry_is_lost_or_doubled() {
    killed_at_every_failpoint(&TestHistory::sqlite);
}

#[test]
fn killed_at_every_failpoint_on_postgres_no_acknowledged_entry_is_lost_or_doubled() {
    if shared_server().is_some() {
        killed_at_every_failpoint(&|| TestHistory::postgres().unwrap());
    }
}

/// Lets four processes with four writers each push at the same time.
fn sixteen_writers(history: &TestHistory) {
    let rounds = 25;
    let mut writers: Vec<Child> = (0..4).map(|_| start(history, rounds, 10, "")).collect();
    for writer in &mut writers {
        let stderr = || fs::read_to_string(history.folder.path().join("stderr")).unwrap();
        assert!(writer.wait().unwrap().success(), "{}", stderr());
    }
    assert_eq!(check(history), 4 * WRITERS * rounds);
}

// Shows: C6.8
#[test]
fn sixteen_writers_of_four_processes_leave_no_gap() {
    sixteen_writers(&TestHistory::sqlite());
}

#[test]
fn sixteen_writers_of_four_processes_on_postgres_leave_no_gap() {
    if shared_server().is_some() {
        sixteen_writers(&TestHistory::postgres().unwrap());
    }
}

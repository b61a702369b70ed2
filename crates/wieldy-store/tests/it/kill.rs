//! Executors that are killed at random and at the worst moments: no answered call is lost, none runs twice, and an
//! unknown outcome is reported as unknown. The durability of a call says how much of that holds for its answer.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use wieldy_core::Durability;
use wieldy_store::{Execution, Query};

use crate::victim::{HOARD, Victim, lines};
use crate::world::{TestHistory, shared_server};

const DURABILITIES: [Durability; 3] = [Durability::Strict, Durability::Effects, Durability::Relaxed];

/// Returns every call in the history, by its id.
fn rows(history: &TestHistory) -> HashMap<String, Execution> {
    let (store, mut rows, mut query) = (history.store(), HashMap::new(), Query::default());
    loop {
        let page = store.search(&query, 5_000).unwrap();
        for row in page.executions {
            assert!(rows.insert(row.execution_id.clone(), row).is_none(), "a call has one row");
        }
        query.cursor = page.next;
        if query.cursor.is_none() {
            return rows;
        }
    }
}

/// Returns true if the history keeps what was promised for an answer.
fn keeps(answer: &str, rows: &HashMap<String, Execution>) -> bool {
    let [id, status, durability, ran, mark] = answer.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let may_change = !mark.starts_with("look") && ran == "ran" && status == "success";
    let (opening_is_safe, closing_is_safe) = match durability {
        "strict" => (true, true),
        "effects" => (!mark.starts_with("look"), !mark.starts_with("look")),
        _ => (may_change, false),
    };
    match rows.get(id) {
        None => !opening_is_safe,
        Some(row) => {
            let is_unknown = !closing_is_safe && (row.error_code.as_deref() == Some("E3110") || is_left_for_rerun(row));
            mark_of(row) == mark && (row.status == status || is_unknown)
        }
    }
}

/// Returns true if a call is left for a while to an executor that runs it again; none here does.
fn is_left_for_rerun(row: &Execution) -> bool {
    row.completed_at.is_none() && row.metadata.as_ref().is_some_and(|metadata| metadata["rerun"] == true)
}

fn mark_of(row: &Execution) -> &str {
    row.parameters.as_ref().and_then(|given| given["mark"].as_str()).unwrap()
}

/// Checks the invariants of the history, which hold after every kill. Returns the number of calls.
pub(crate) fn check(history: &TestHistory) -> usize {
    // The next executor closes the open calls.
    drop(history.store().journal(&history.options()).unwrap());
    let rows = rows(history);
    let told = |name: &str| lines(&history.folder.path().join(name));
    let was_pruned = !told("pruned").is_empty();
    for answer in told("answers") {
        assert!(was_pruned || keeps(&answer, &rows), "{answer}: {:?}", rows.get(answer.split_once(' ').unwrap().0));
    }
    let mut effects = HashSet::new();
    for mark in told("effects") {
        assert!(effects.insert(mark.clone()), "{mark} was paid twice");
    }
    let puts: HashSet<String> = told("puts").into_iter().collect();
    for row in rows.values() {
        if is_left_for_rerun(row) {
            continue;
        }
        assert!(row.completed_at.is_some(), "{row:?} is still open");
        let had_effect = match row.tool.as_str() {
            "pay" => effects.contains(mark_of(row)),
            "put" => puts.contains(mark_of(row)),
            _ => true,
        };
        match (row.status.as_str(), row.error_code.as_deref()) {
            ("success", None) => assert!(had_effect, "{row:?} had no effect"),
            ("failed", Some("E3110")) => {}
            _ => panic!("{row:?} ended in a way that nothing explains"),
        }
    }
    let known: HashSet<&str> = rows.values().map(mark_of).collect();
    for mark in effects.iter().chain(&puts) {
        assert!(was_pruned || known.contains(mark.as_str()), "{mark} had its effect and nothing is known of it");
    }
    ends_of_sandboxes_are_recorded_once(history);
    history.check();
    rows.len()
}

/// Asserts that each sandbox that was recorded as made is recorded as gone, once.
fn ends_of_sandboxes_are_recorded_once(history: &TestHistory) {
    let sql = "SELECT seq, instance, name, data FROM events WHERE name LIKE 'sandbox.%' ORDER BY seq";
    let number = |text: &str| text.trim_start_matches("Integer(").trim_end_matches(')').parse::<i64>().unwrap();
    let mut open = HashMap::new();
    for row in history.sql(sql) {
        let data = row[3].trim_start_matches("Text(\"").trim_end_matches("\")").replace('\\', "");
        let data: serde_json::Value = serde_json::from_str(&data).unwrap();
        let key = (number(&row[1]), data["sandbox"].as_str().unwrap().to_owned());
        if row[2].contains("created") {
            assert_eq!(open.insert(key, number(&row[0])), None, "{row:?}");
            continue;
        }
        let ended = match data["created_seq"].as_i64() {
            Some(made) => open.iter().find(|(_, seq)| **seq == made).map(|(key, _)| key.clone()),
            None => open.contains_key(&key).then_some(key),
        };
        match ended {
            Some(key) => drop(open.remove(&key)),
            // The record that it was made may be dropped.
            None => assert!(!lines(&history.folder.path().join("pruned")).is_empty(), "{row:?} is no end of a sandbox"),
        }
    }
    assert_eq!(open, HashMap::new(), "sandboxes without an end");
}

/// Kills `victims` processes at random moments, `together` of them living at a time.
fn kill_at_random(history: impl Fn() -> TestHistory, victims: usize, together: usize) {
    const ROUNDS: usize = 10;
    let mut chance = pseudo_random(victims as u64);
    let mut calls = 0;
    for _ in 0..victims / ROUNDS / together {
        let history = history();
        for round in 0..ROUNDS {
            let answers = history.folder.path().join("answers");
            let before = fs::metadata(&answers).map_or(0, |file| file.len());
            let began = Instant::now();
            // Executors learn keys of earlier executors when they start, not those of executors that live beside them.
            let does = if together == 1 { "work" } else { "together" };
            let victim = |n: usize| Victim { does, durability: DURABILITIES[(round + n) % 3], ..Victim::default() };
            let victims: Vec<Child> = (0..together).map(|n| victim(n).start(&history)).collect();
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
        calls += check(&history);
    }
    assert!(calls > victims, "the victims did something: {calls}");
}

/// Returns pseudo-random numbers, the same in every run.
fn pseudo_random(seed: u64) -> impl FnMut() -> u64 {
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
    kill_at_random(TestHistory::sqlite, wieldy_testkit::count(100, 1_000), 1);
}

#[test]
fn killed_at_random_moments_on_postgres_nothing_is_lost_doubled_or_guessed() {
    if shared_server().is_some() {
        kill_at_random(|| TestHistory::postgres().unwrap(), wieldy_testkit::count(120, 1_000), 4);
    }
}

// Shows: D9.3, X2.1
#[test]
fn killed_at_every_failpoint_nothing_is_lost_doubled_or_guessed() {
    killed_at_every_failpoint(&TestHistory::sqlite);
}

#[test]
fn killed_at_every_failpoint_on_postgres_nothing_is_lost_doubled_or_guessed() {
    if shared_server().is_some() {
        killed_at_every_failpoint(&|| TestHistory::postgres().unwrap());
    }
}

/// Failpoints at which victims die, the victims' work, and how often they reach the failpoint before.
const FAILPOINTS: &[(&str, &str, &[u32])] = &[
    ("migrate.changed", "work", &[1]),
    ("key.drafted", "work", &[1]),
    ("journal.registered", "work", &[1]),
    ("journal.opened", "work", &[1]),
    ("recovery.claimed", "work", &[1]),
    ("recovery.closed", "work", &[1, 2]),
    ("recovery.sandboxes", "work", &[1]),
    ("journal.recovered", "work", &[1]),
    ("log.taken", "work", &[1, 3, 20]),
    ("log.begun", "work", &[1, 3, 20]),
    ("log.written", "work", &[1, 3, 20]),
    ("log.synced", "work", &[1, 3, 20, 200]),
    ("log.turned", "fill", &[1, 2, 3]),
    ("filing.taken", "work", &[1, 3, 20]),
    ("write.begun", "work", &[1, 3, 20]),
    ("write.put", "work", &[1, 3, 20]),
    ("filing.committed", "work", &[1, 3, 20]),
    ("claim.made", "work", &[1, 5]),
    ("orphan.read", "work", &[1, 2]),
    ("orphan.committed", "work", &[1, 2]),
    ("tool.before_effect", "work", &[1, 3, 20]),
    ("tool.after_effect", "work", &[1, 3, 20]),
    ("checkpoint.begun", "fill", &[1, 2]),
    ("checkpoint.done", "fill", &[1, 2]),
    ("upkeep.recorded", "prune", &[1, 2]),
    ("upkeep.dropped", "prune", &[1, 2]),
    ("upkeep.results_recorded", "prune", &[1]),
    ("filing.signed", "prune", &[1, 2, 3]),
    ("filing.ending", "prune", &[1, 2]),
];

fn killed_at_every_failpoint(history: &dyn Fn() -> TestHistory) {
    for (name, does, times) in FAILPOINTS {
        let history = history();
        let is_of_files = ["checkpoint", "log", "orphan"].iter().any(|kind| name.starts_with(kind));
        if history.is_postgres() && is_of_files {
            continue;
        }
        for (times, durability) in times.iter().zip(DURABILITIES.iter().cycle()) {
            // Recovery needs open calls, and more than it closes at once.
            if name.starts_with("journal") || name.starts_with("recovery") {
                leave_many_open(&history);
            }
            if name.starts_with("orphan") {
                leave_uncommitted_logs(&history);
            }
            let failpoint = format!("{name}:{times}");
            let victim = Victim { does, durability: *durability, failpoint: &failpoint, ..Victim::default() };
            die(&history, &victim);
            check(&history);
        }
    }
}

/// Lets a victim live until its failpoint kills it.
fn die(history: &TestHistory, victim: &Victim<'_>) {
    let status = wait(victim.start(history), victim.failpoint);
    let stderr = fs::read_to_string(history.folder.path().join("stderr")).unwrap();
    assert_eq!(status.code(), None, "{}: it was not killed: {stderr}", victim.failpoint);
}

/// Kills two victims with uncommitted records in their logs.
fn leave_uncommitted_logs(history: &TestHistory) {
    let victim = Victim { does: "together", durability: Durability::Strict, ..Victim::default() };
    let mut victims = [victim.start(history), victim.start(history)];
    let answers = history.folder.path().join("answers");
    let more = |victims: &[Child]| {
        for victim in victims {
            let of_it = format!("-{}-", victim.id());
            let told = || lines(&answers).iter().filter(|answer| answer.contains(&of_it)).count();
            let (before, began) = (told(), Instant::now());
            while told() < before + 20 {
                assert!(began.elapsed() < Duration::from_secs(15), "it does nothing");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    };
    more(&victims);
    // From here on no other process can commit.
    let holder = rusqlite::Connection::open(history.folder.path().join("history.db")).unwrap();
    holder.busy_timeout(Duration::from_secs(10)).unwrap();
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    more(&victims);
    for victim in &mut victims {
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
}

fn wait(mut victim: Child, what: &str) -> std::process::ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = victim.try_wait().unwrap() {
            return status;
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{what} was not reached");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a victim that has many open calls.
fn leave_many_open(history: &TestHistory) {
    let hoarded = history.folder.path().join("hoarded");
    let _ = fs::remove_file(&hoarded);
    let mut victim = Victim { does: "hoard", ..Victim::default() }.start(history);
    let began = Instant::now();
    while lines(&hoarded).is_empty() {
        assert!(began.elapsed() < Duration::from_secs(15), "the calls were not opened");
        std::thread::sleep(Duration::from_millis(5));
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    let open = rows(history).values().filter(|row| row.completed_at.is_none()).count();
    assert!(open >= HOARD, "{open}");
}

#[test]
fn a_clock_that_jumps_loses_doubles_and_guesses_nothing() {
    with_a_clock_that_jumps(&TestHistory::sqlite);
}

#[test]
fn a_clock_that_jumps_on_postgres_loses_doubles_and_guesses_nothing() {
    if shared_server().is_some() {
        with_a_clock_that_jumps(&|| TestHistory::postgres().unwrap());
    }
}

/// Runs victims whose clock is an hour ahead or behind, from the start or later.
fn with_a_clock_that_jumps(history: &dyn Fn() -> TestHistory) {
    let history = history();
    let library = history.folder.path().join("clock.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/clock.c");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status().unwrap();
    assert!(made.success());
    let (file, answers) = (history.folder.path().join("later"), history.folder.path().join("answers"));
    for (clock, durability) in ["3600,-3600", "-3600,3600", "0,3600", "0,-3600"].iter().zip(DURABILITIES.iter().cycle())
    {
        let _ = fs::remove_file(&file);
        let clock = format!("{clock},{}", file.display());
        let victim = Victim { durability: *durability, clock: Some((&clock, &library)), ..Victim::default() };
        let mut victim = victim.start(&history);
        for _ in 0..2 {
            // These calls are in the history with every durability.
            let paid = || lines(&answers).iter().filter(|answer| answer.contains(" ran pay-")).count();
            let (before, began) = (paid(), Instant::now());
            while paid() < before + 50 {
                assert!(began.elapsed() < Duration::from_secs(15), "{clock}: it does nothing");
                std::thread::sleep(Duration::from_millis(5));
            }
            fs::write(&file, "").unwrap();
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
        check(&history);
    }
    // Calls are in the order of events, not of the clock.
    let calls = history.store().search(&Query::default(), 100_000).unwrap().executions;
    let times: Vec<_> = calls.iter().rev().map(|call| call.started_at).collect();
    let minutes = |pair: &[jiff::Timestamp]| (pair[1].duration_since(pair[0]).as_secs_f64() / 60.0).round() as i64;
    let jumps: Vec<i64> = times.windows(2).map(minutes).filter(|minutes| *minutes != 0).collect();
    for jump in [-120, 120, -60, 60] {
        assert!(jumps.contains(&jump), "{jump}: {jumps:?}");
    }
}

#[test]
fn every_failpoint_of_the_source_has_a_victim() {
    fn find(folder: &Path, found: &mut BTreeSet<String>) {
        for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
            if file.is_dir() {
                find(&file, found);
                continue;
            }
            let text = fs::read_to_string(&file).unwrap();
            let names = text.split("failpoint::reach(\"").skip(1).map(|rest| rest.split_once('"').unwrap().0);
            found.extend(names.map(str::to_owned));
        }
    }
    let mut named = BTreeSet::new();
    find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut named);
    let of_calls = FAILPOINTS.iter().map(|(name, ..)| *name).filter(|name| !name.starts_with("tool."));
    let of_threads = crate::thread_kills::FAILPOINTS.iter().map(|(name, ..)| *name);
    assert_eq!(of_calls.chain(of_threads).map(str::to_owned).collect::<BTreeSet<_>>(), named);
}

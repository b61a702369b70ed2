//! Executors that are killed around the delivery of notes: no note is lost, and one that comes again has the same id.

use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use wieldy_core::{Call, Executor};
use wieldy_store::{Address, JournalOptions, Store};

use crate::notes::tools;
use crate::victim::lines;
use crate::world::{TestHistory, shared_server};

/// The moments at which a victim dies: after an answer was handed over and before that is recorded, or at a failpoint of
/// the history. With none, it dies at any time.
const MOMENTS: [&str; 10] = [
    "handed",
    "",
    "log.written",
    "log.synced",
    "write.put",
    "",
    "filing.taken",
    "filing.committed",
    "handed",
    "journal.recovered",
];

// Shows: C6.9
#[test]
fn killed_around_a_delivery_no_note_is_lost() {
    kill(&TestHistory::sqlite(), wieldy_testkit::count(30, 200));
}

#[test]
fn killed_around_a_delivery_on_postgres_no_note_is_lost() {
    if let Some(history) = shared_server().and_then(|_| TestHistory::postgres()) {
        kill(&history, wieldy_testkit::count(20, 200));
    }
}

fn kill(history: &TestHistory, victims: usize) {
    let folder = history.folder.path();
    for n in 0..victims {
        let moment = MOMENTS[n % MOMENTS.len()];
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "notes_kill::victim", "--nocapture"])
            .env("WIELDY_NOTES_VICTIM", history.url())
            .env("WIELDY_NOTES_FOLDER", folder)
            .env("WIELDY_NOTES_DIE", if moment == "handed" { (n % 5 + 1).to_string() } else { String::new() })
            .env("WIELDY_FAILPOINT", format!("{moment}:{}", if moment.starts_with("journal") { 1 } else { n % 7 + 2 }))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (began, before) = (Instant::now(), lines(&folder.join("left")).len());
        let is_over = |victim: &mut std::process::Child| victim.try_wait().unwrap().is_some();
        while !is_over(&mut victim) && began.elapsed() < Duration::from_secs(20) {
            // Those that die at any time live for a few notes.
            if moment.is_empty() && lines(&folder.join("left")).len() > before + 2 + n % 3 {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = victim.kill();
        victim.wait().unwrap();
    }
    drain(history);
    let left: Vec<String> = lines(&folder.join("left"));
    let handed: Vec<String> = lines(&folder.join("handed"));
    let mut ids: HashMap<&str, &str> = HashMap::new();
    for line in left.iter().chain(&handed) {
        let (id, message) = line.split_once(' ').unwrap();
        assert_eq!(*ids.entry(message).or_insert(id), id, "`{message}` has one id");
    }
    let came: HashSet<&String> = handed.iter().collect();
    let lost: Vec<&String> = left.iter().filter(|note| !came.contains(note)).collect();
    assert_eq!(lost, Vec::<&String>::new(), "of {} notes", left.len());
    assert!(left.len() >= victims, "the victims did something: {}", left.len());
    assert!(handed.len() > came.len(), "some deliveries were repeated");
    history.check();
    assert_eq!(history.sql("SELECT note FROM notes").len(), 0, "all deliveries are recorded");
}

/// Delivers what is left.
fn drain(history: &TestHistory) {
    let (executor, journal) = executor(&history.address, &history.options());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { while hand_over(&executor, history.folder.path()).await > 0 {} });
    drop((executor, journal));
}

fn executor(address: &Address, options: &JournalOptions) -> (Executor, Arc<wieldy_store::StoreJournal>) {
    let journal = Arc::new(Store::open(address).unwrap().journal(options).unwrap());
    let mut builder = Executor::builder().tools(tools());
    builder.journal = Arc::clone(&journal) as _;
    (builder.build().unwrap(), journal)
}

/// Makes a call, writes its notes down outside of the history, as a door writes an answer, and then confirms them.
async fn hand_over(executor: &Executor, folder: &Path) -> usize {
    let result = executor.begin(Call::new("look", json!({}))).await;
    for note in &result.notes {
        write(folder, "handed", &format!("{} {}", note.id, note.message));
        die_if_wanted();
    }
    executor.confirm_notes(&result.notes);
    result.notes.len()
}

/// Aborts this process before the delivery of the n-th note is recorded.
fn die_if_wanted() {
    static HANDED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let handed = HANDED.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
    if std::env::var("WIELDY_NOTES_DIE").is_ok_and(|wanted| wanted == handed.to_string()) {
        std::process::abort();
    }
}

fn write(folder: &Path, name: &str, line: &str) {
    let mut file = OpenOptions::new().append(true).create(true).open(folder.join(name)).unwrap();
    // A line that was cut short has no end mark.
    file.write_all(format!("{line} .\n").as_bytes()).unwrap();
}

/// The victim process, which does nothing when it runs as a test.
#[test]
fn victim() {
    let Ok(address) = std::env::var("WIELDY_NOTES_VICTIM") else { return };
    let folder = PathBuf::from(std::env::var("WIELDY_NOTES_FOLDER").unwrap());
    let options = JournalOptions { key: Some(folder.join("audit.key")), ..JournalOptions::default() };
    let (executor, _journal) = executor(&address.parse().unwrap(), &options);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let began = Instant::now();
        for n in 0.. {
            let message = format!("note {n} of {}", std::process::id());
            let arguments = json!({"message": message, "persist": true, "inject_at": "after_tool:look"});
            let left = executor.begin(Call::new("leave", arguments)).await;
            write(&folder, "left", &format!("{} {message}", left.text()));
            if n % 3 == 2 {
                hand_over(&executor, &folder).await;
            }
            if began.elapsed() > Duration::from_secs(15) {
                break;
            }
        }
    });
}

//! The index against the files themselves: after any change of them, no answer is stale.

use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use wieldy_core::FileRules;

use super::words::runs;
use super::{Ask, FileFacts, Index, IndexOptions, SkipReason, View};
use crate::files::Workspace;

/// Facts that show which content they were made of.
#[derive(Serialize, Deserialize)]
struct Copied(String);

impl FileFacts for Copied {
    const FORM: u32 = 1;

    fn of(_: &Path, content: &[u8], _: &CancellationToken) -> Result<Self, SkipReason> {
        if content.starts_with(b"malformed") {
            return Err(SkipReason::Malformed);
        }
        Ok(Self(String::from_utf8_lossy(content).into_owned()))
    }

    fn bytes(&self) -> usize {
        self.0.len()
    }
}

/// A folder with an index.
struct Indexed {
    folder: tempfile::TempDir,
    rules: FileRules,
    options: IndexOptions,
    index: Index<Copied>,
}

impl Indexed {
    fn new() -> Self {
        Self::with(IndexOptions::new("test"))
    }

    fn with(options: IndexOptions) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(folder.path().join("ws")).expect("a folder");
        let index = index_of(folder.path(), options.clone());
        Self { folder, rules: FileRules::default(), options, index }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join("ws").join(path)
    }

    fn put(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("it is in the folder")).expect("folders");
        fs::write(path, content).expect("a file");
        self
    }

    /// Forgets what is in memory, as another process would.
    fn restart(&mut self) {
        self.index = index_of(self.folder.path(), self.options.clone());
    }

    fn snapshots(&self) -> Vec<PathBuf> {
        let found = fs::read_dir(self.folder.path().join("state/index"));
        found.into_iter().flatten().map(|entry| entry.expect("an entry").path()).collect()
    }

    fn ask<T>(&self, question: impl FnOnce(&Ask<'_>, View<Copied>) -> T) -> T {
        self.ask_as(None, question)
    }

    fn ask_as<T>(&self, tenant: Option<&str>, question: impl FnOnce(&Ask<'_>, View<Copied>) -> T) -> T {
        let workspace = Workspace::open(&self.path("")).expect("the folder is there");
        let (guard, stop) = (workspace.guard(&self.rules), CancellationToken::new());
        let ask = Ask { guard: &guard, tenant, stop: &stop, run: None };
        let view = self.index.refresh(&ask).expect("the folder can be read");
        let answer = question(&ask, view);
        self.index.keep(&ask);
        answer
    }

    /// Returns the paths of the files that may hold a word.
    fn with_word(&self, word: &str) -> Vec<String> {
        self.ask(|_, view| paths(&view, word))
    }

    fn skipped(&self) -> Vec<(&'static str, usize)> {
        self.ask(|_, view| view.state().skipped.into_iter().collect())
    }
}

fn paths(view: &View<Copied>, word: &str) -> Vec<String> {
    view.with_word(word).into_iter().map(|id| view.file(id).path.display().to_string()).collect()
}

fn index_of(folder: &Path, options: IndexOptions) -> Index<Copied> {
    let workspace = Workspace::open(&folder.join("ws")).expect("the folder is there");
    Index::new(Arc::new(workspace), Some(folder.join("state")), options)
}

/// Numbers that look random and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

/// Words of the same length, so that a change of one into another leaves the size.
const WORDS: [&str; 6] = ["alpha", "bravo", "delta", "gamma", "omega", "theta"];
const FOLDERS: [&str; 4] = ["", "a", "a/b", "c.d"];

fn text(numbers: &mut Numbers) -> String {
    (0..8).map(|_| WORDS[numbers.below(WORDS.len())]).collect::<Vec<_>>().join(" ")
}

/// Changes one file in one of the ways in which programs change files.
fn change(root: &Path, numbers: &mut Numbers) {
    let mut name = || {
        let folder = FOLDERS[numbers.below(FOLDERS.len())];
        root.join(folder).join(format!("f{}.txt", numbers.below(6)))
    };
    let (path, other) = (name(), name());
    let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).ok();
    match numbers.below(8) {
        0 => drop(fs::remove_file(&path)),
        1 => drop(fs::rename(&path, &other)),
        // As editors save: a new file takes the place.
        2 => {
            let temporary = root.join(".new");
            fs::write(&temporary, text(numbers)).expect("a file");
            fs::rename(temporary, &path).expect("a file");
        }
        // The time of the last change stays, as after `git checkout` or `touch`.
        3 => {
            fs::write(&path, text(numbers)).expect("a file");
            let times = FileTimes::new().set_modified(modified.unwrap_or(SystemTime::UNIX_EPOCH));
            File::options().write(true).open(&path).and_then(|file| file.set_times(times)).expect("a time");
        }
        4 => {
            let from = root.join(["a", "e"][numbers.below(2)]);
            let to = root.join(["a", "e"][numbers.below(2)]);
            let _ = fs::rename(from, to);
            fs::create_dir_all(root.join("a/b")).expect("a folder");
        }
        5 => fs::write(root.join(".gitignore"), ["", "f1.txt\n", "/a/b\n"][numbers.below(3)]).expect("a file"),
        _ => fs::write(&path, text(numbers)).expect("a file"),
    }
}

/// Returns the files that hold a word, found without the index.
fn truth(root: &Path, word: &str) -> Vec<String> {
    let ignored = fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let mut found = BTreeSet::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).expect("a folder") {
            let entry = entry.expect("an entry");
            let path = folder.join(entry.file_name());
            let is_ignored = match ignored.trim() {
                "" => false,
                "/a/b" => path == Path::new("a/b"),
                name => entry.file_name() == name,
            };
            if is_ignored || entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if entry.file_type().expect("a type").is_dir() {
                folders.push(path);
            } else if runs(&fs::read_to_string(entry.path()).expect("a text")).any(|run| run == word) {
                found.insert(path);
            }
        }
    }
    found.into_iter().map(|path| path.display().to_string()).collect()
}

// Shows: C6.2
#[test]
fn after_any_series_of_changes_no_answer_is_stale() {
    change_and_ask(400, 27);
}

/// Changes files and compares the answers of the index with the files.
fn change_and_ask(count: usize, seed: u64) {
    let mut numbers = Numbers(seed);
    let mut indexed = Indexed::new();
    FOLDERS.iter().for_each(|folder| fs::create_dir_all(indexed.path(folder)).expect("a folder"));
    for step in 0..count {
        for _ in 0..numbers.below(3) {
            change(&indexed.path(""), &mut numbers);
        }
        let word = WORDS[numbers.below(WORDS.len())];
        let expected = truth(&indexed.path(""), word);
        assert_eq!(indexed.with_word(word), expected, "{word} at step {step}");
        if step % 7 == 0 {
            indexed.ask(|ask, view| {
                let ids: Vec<_> = view.files().map(|(id, _)| id).collect();
                for (id, facts) in ids.iter().zip(view.facts(ask, &ids)) {
                    let content = fs::read_to_string(indexed.path("").join(&view.file(*id).path)).expect("a text");
                    assert_eq!(facts.map(|facts| facts.0.clone()), Ok(content), "{step}");
                }
            });
        }
        if step % 50 == 49 {
            indexed.restart();
        }
    }
}

#[test]
fn facts_are_those_of_the_content_even_if_it_changes_after_the_view_was_made() {
    let indexed = Indexed::new();
    indexed.put("a.txt", "one").put("b.txt", "malformed").put("c.txt", "three");
    indexed.ask(|ask, view| {
        indexed.put("a.txt", "two");
        fs::remove_file(indexed.path("c.txt")).expect("it is there");
        let ids: Vec<_> = view.files().map(|(id, _)| id).collect();
        let facts: Vec<_> = view.facts(ask, &ids).into_iter().map(|facts| facts.map(|facts| facts.0.clone())).collect();
        assert_eq!(facts, [Ok("two".into()), Err(SkipReason::Malformed), Err(SkipReason::Gone)]);
        let loaded = view.load(ask, ids[0]).expect("it is there");
        assert_eq!((loaded.content.as_slice(), loaded.facts.0.as_str()), (&b"two"[..], "two"));
    });
    assert_eq!((indexed.with_word("two"), indexed.with_word("one")), (vec!["a.txt".to_owned()], vec![]));
}

#[test]
fn hostile_files_are_left_out_and_counted() {
    let indexed = Indexed::new();
    indexed
        .put("plain.txt", "needle")
        .put("binary.bin", b"needle\0")
        .put("invalid.txt", b"needle \xff\xfe\xe4 h\xe4")
        .put("large.txt", "needle ".repeat(1_500_000))
        .put("long.txt", format!("needle {}\n", "x".repeat(3_000_000)))
        .put("many.txt", (0..60_000).map(|number| format!("w{number}\n")).collect::<String>())
        .put("min.js", format!("needle({})", "a,".repeat(4000)))
        .put("made.rs", "// @generated\nneedle")
        .put("closed.txt", "needle");
    fs::set_permissions(indexed.path("closed.txt"), fs::Permissions::from_mode(0o000)).expect("a mode");
    rustix::fs::mknodat(rustix::fs::CWD, indexed.path("pipe.txt"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .expect("a pipe");
    symlink("loop", indexed.path("loop")).expect("a link");
    symlink("..", indexed.path("up")).expect("a link");
    symlink("/etc/passwd", indexed.path("outside.txt")).expect("a link");
    let is_root = rustix::process::geteuid().is_root();
    let closed = if is_root { vec![] } else { vec![("unreadable", 1)] };
    let expected = [("binary", 1), ("generated", 1), ("many_words", 1), ("minified", 1), ("too_large", 2)];
    assert_eq!(indexed.skipped(), [&expected[..], &closed].concat());
    // Files with unknown words may hold any word; those that are not text hold none.
    let found = indexed.with_word("needle");
    let expected = ["closed.txt", "invalid.txt", "large.txt", "long.txt", "made.rs", "many.txt", "min.js", "plain.txt"];
    assert_eq!(found, expected);
}

#[test]
fn a_file_that_grows_while_it_is_read_is_read_again() {
    let indexed = Indexed::new();
    indexed.put("log.txt", "begin ");
    let path = indexed.path("log.txt");
    let writer = std::thread::spawn(move || {
        let mut file = File::options().append(true).open(path).expect("a file");
        for number in 0..2000 {
            std::io::Write::write_all(&mut file, format!("line{number} ").as_bytes()).expect("it can be written");
        }
    });
    while !writer.is_finished() {
        assert_eq!(indexed.with_word("begin"), ["log.txt"]);
    }
    writer.join().expect("it wrote all");
    assert_eq!(indexed.with_word("line1999"), ["log.txt"]);
}

#[test]
fn hidden_files_are_in_no_index_and_their_words_are_suggested_to_no_caller() {
    let mut indexed = Indexed::new();
    indexed.put("plain.txt", "secretword1").put("keys/k.txt", "secretword2").put("sub/.env.local", "secretword3");
    symlink("conf/real.txt", indexed.path(".env")).expect("a link");
    indexed.put("conf/real.txt", "secretword4");
    assert_eq!(indexed.with_word("secretword4"), [""; 0], "a secret's name leads to it");
    assert_eq!(indexed.with_word("secretword2"), ["keys/k.txt"]);
    // The same index object, asked under other rules, and after a restart with the snapshot of the first.
    indexed.rules.hidden.push("keys".into());
    for _ in 0..2 {
        for word in ["secretword2", "secretword3", "secretword4"] {
            assert_eq!(indexed.with_word(word), [""; 0], "{word}");
        }
        assert_eq!(indexed.ask(|_, view| view.near("secretword").join(" ")), "secretword1");
        indexed.restart();
    }
    // A file that becomes hidden by a link of a secret's name, under the same rules.
    fs::remove_file(indexed.path(".env")).expect("it is there");
    symlink("plain.txt", indexed.path(".env")).expect("a link");
    assert_eq!(indexed.with_word("secretword1"), [""; 0]);
    assert_eq!(indexed.ask(|_, view| view.near("secretword").join(" ")), "secretword4");
}

#[test]
fn tenants_and_rules_share_no_entry() {
    let indexed = Indexed::new();
    indexed.put("a.txt", "one");
    let generation = |tenant| indexed.ask_as(tenant, |_, view| view.generation());
    let first = generation(Some("acme"));
    assert_ne!(generation(Some("other")), first);
    assert_ne!(generation(None), first);
    assert_eq!(generation(Some("acme")), first, "nothing has changed");
}

/// Returns an index with a snapshot of some files that are not read again.
fn with_snapshot() -> Indexed {
    let indexed = Indexed::with(IndexOptions { save_after: Duration::ZERO, ..IndexOptions::new("test") });
    for number in 0..40 {
        let words: String = (0..40).map(|word| format!("word{} ", number * word)).collect();
        indexed.put(&format!("d{}/f{number}.txt", number % 7), words);
    }
    indexed.ask(|ask, view| {
        let ids: Vec<_> = view.files().map(|(id, _)| id).collect();
        view.facts(ask, &ids);
    });
    indexed
}

#[test]
fn a_snapshot_is_private_and_gives_the_same_answers() {
    let mut indexed = with_snapshot();
    let expected = indexed.with_word("word12");
    let snapshots = indexed.snapshots();
    let mode = fs::metadata(&snapshots[0]).expect("it is there").permissions().mode();
    assert_eq!((snapshots.len(), mode & 0o777), (1, 0o600));
    indexed.restart();
    assert_eq!(indexed.with_word("word12"), expected);
    let path = indexed.path("d0/f0.txt");
    fs::write(path, "word12 changed").expect("a file");
    indexed.restart();
    assert_eq!(indexed.with_word("changed"), ["d0/f0.txt"]);
}

#[test]
fn a_damaged_snapshot_is_not_used() {
    let mut indexed = with_snapshot();
    let path = indexed.snapshots().remove(0);
    let whole = fs::read(&path).expect("a snapshot");
    let expected = indexed.with_word("word12");
    let mut numbers = Numbers(1);
    let mut attempts: Vec<Vec<u8>> = vec![vec![], b"foreign".to_vec(), whole[..16].to_vec(), whole[..84].to_vec()];
    attempts.push(vec![b'x'; 10_000]);
    for _ in 0..12 {
        attempts.push(whole[..numbers.below(whole.len())].to_vec());
        let mut flipped = whole.clone();
        let place = numbers.below(flipped.len());
        flipped[place] ^= 1 << numbers.below(8);
        attempts.push(flipped);
    }
    // With a checksum that fits, as a stranger would write it.
    for _ in 0..24 {
        let mut forged = whole.clone();
        for _ in 0..=numbers.below(3) {
            let place = 84 + numbers.below(forged.len() - 84);
            forged[place] = numbers.below(256) as u8;
        }
        let checksum = blake3::hash(&forged[84..]);
        forged[52..84].copy_from_slice(checksum.as_bytes());
        attempts.push(forged);
    }
    for (place, attempt) in attempts.into_iter().enumerate() {
        let is_forged = place > 28;
        fs::write(&path, attempt).expect("a file");
        indexed.restart();
        let found = indexed.with_word("word12");
        // Forged words cannot be told from real ones; they must not bring the index down.
        assert!(is_forged || found == expected, "attempt {place}");
        indexed.ask(|ask, view| {
            let ids: Vec<_> = view.files().map(|(id, _)| id).collect();
            assert_eq!(view.facts(ask, &ids).len(), ids.len());
            view.near("word12x");
        });
    }
}

#[test]
fn indexes_that_write_at_once_leave_a_whole_snapshot() {
    let indexed = with_snapshot();
    let folder = indexed.folder.path().to_owned();
    let (path, options) = (indexed.snapshots().remove(0), indexed.options.clone());
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (folder, path, options) = (folder.clone(), path.clone(), options.clone());
            std::thread::spawn(move || {
                for round in 0..5 {
                    let _ = fs::remove_file(&path);
                    let index = index_of(&folder, options.clone());
                    let workspace = Workspace::open(&folder.join("ws")).expect("the folder is there");
                    let (rules, stop) = (FileRules::default(), CancellationToken::new());
                    let guard = workspace.guard(&rules);
                    let ask = Ask { guard: &guard, tenant: None, stop: &stop, run: None };
                    let view = index.refresh(&ask).expect("the folder can be read");
                    assert_eq!((view.len(), view.state().complete), (40, true), "{writer} {round}");
                    index.keep(&ask);
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().expect("it found all files"));
    let left: Vec<PathBuf> = indexed.snapshots();
    assert_eq!(left, [path]);
}

#[test]
fn words_beyond_the_memory_are_dropped_and_no_file_is_missed() {
    let options = IndexOptions { memory_bytes_max: 100_000, ..IndexOptions::new("test") };
    let indexed = Indexed::with(options);
    for number in 0..200 {
        let words: String = (0..100).map(|word| format!("word{number}x{word} ")).collect();
        indexed.put(&format!("f{number}.txt"), words);
    }
    let (found, bytes) = indexed.ask(|_, view| {
        let bytes: usize = view.entries.iter().map(|entry| entry.bytes()).sum();
        (paths(&view, "word150x7"), bytes + view.vocabulary.bytes())
    });
    assert!(found.contains(&"f150.txt".to_owned()), "{found:?}");
    assert!(found.len() < 200 && bytes <= 100_000, "{} files, {bytes} bytes", found.len());
    assert!(indexed.ask(|_, view| view.state().complete));
}

#[test]
fn a_stopped_question_says_that_it_is_not_complete_and_the_next_goes_on() {
    let indexed = Indexed::with(IndexOptions { reading_max: Duration::ZERO, ..IndexOptions::new("test") });
    indexed.put("a.txt", "one").put("b.txt", "two");
    let (found, state) = indexed.ask(|_, view| (paths(&view, "one"), view.state()));
    assert_eq!(found, ["a.txt", "b.txt"], "an unread file may hold any word");
    assert_eq!((state.files, state.indexed, state.complete, state.skipped["stopped"]), (2, 0, false, 2));
    let mut indexed = indexed;
    indexed.options.reading_max = Duration::from_secs(20);
    indexed.restart();
    let (found, state) = indexed.ask(|_, view| (paths(&view, "one"), view.state()));
    assert_eq!((found.as_slice(), state.complete), (&["a.txt".to_owned()][..], true));
}

#[test]
fn many_files_are_compared_again_only_after_a_while_and_the_answer_says_so() {
    let options = IndexOptions { always_checked_max: 1, fresh: Duration::from_secs(3600), ..IndexOptions::new("test") };
    let indexed = Indexed::with(options);
    indexed.put("a.txt", "one").put("b.txt", "two");
    assert_eq!(indexed.ask(|_, view| view.state().checked_ms_ago), None);
    indexed.put("c.txt", "one");
    let (found, age) = indexed.ask(|_, view| (paths(&view, "one"), view.state().checked_ms_ago));
    assert_eq!((found, age.is_some()), (vec!["a.txt".to_owned()], true));
}

mod large {
    use wieldy_testkit::count;

    use super::*;

    #[test]
    fn after_ten_thousand_changes_no_answer_was_stale() {
        change_and_ask(count(1000, 10_000), 1);
    }

    #[test]
    fn a_million_files_are_indexed_and_one_of_them_is_found() {
        // Within the usual time, a question reads only some of them, and says so.
        let options = IndexOptions { reading_max: Duration::from_secs(900), ..IndexOptions::new("test") };
        let indexed = Indexed::with(options);
        // The walk reads a million entries, and the folders are entries too.
        let folders = count(20, 990);
        for folder in 0..folders {
            fs::create_dir(indexed.path(&format!("d{folder}"))).expect("a folder");
            for file in 0..1000 {
                File::create(indexed.path(&format!("d{folder}/f{file}.txt"))).expect("a file");
            }
        }
        indexed.put("d7/f8.txt", "needle");
        let (found, state) = indexed.ask(|_, view| (paths(&view, "needle"), view.state()));
        assert_eq!((state.files, state.indexed, state.complete), (folders * 1000, folders * 1000, true));
        assert_eq!((found.len(), found.first().map(String::as_str)), (1, Some("d7/f8.txt")));
    }
}

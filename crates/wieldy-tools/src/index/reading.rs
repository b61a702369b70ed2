//! Reading files for the index: content, words, and the reasons to leave files out.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use cap_std::fs::File;
use rustix::fs::fstat;

use super::entry::{Entry, Identity, Words, now};
use super::pass::Found;
use super::words::{WORD_BYTES_MAX, runs};
use super::{Ask, FACTS_BYTES_MAX, FileFacts, SkipReason, Vocabulary, WORDS_BYTES_MAX};
use crate::files::{Guard, decode, open_beneath};

/// Maximum number of different words of a file. Files with more hold data rather than text.
const FILE_WORDS_MAX: usize = 50_000;
/// The mean length of lines above which a file counts as minified, in bytes.
const MEAN_LINE_BYTES_MAX: usize = 400;
/// Smaller files are never minified.
const MINIFIED_BYTES_MIN: usize = 2 * 1024;
/// The number of lines at the beginning of a file in which a program says that it generated the file.
const HEAD_LINES: usize = 10;
/// The number of files from which a second thread helps to read.
const PARALLEL_MIN: usize = 16;

/// A file that is new or has changed, with its entry so far.
pub(super) struct Change<'a, F> {
    pub(super) found: &'a Found,
    pub(super) old: Option<&'a Entry<F>>,
}

/// Reads changed files until the deadline, and returns their new entries by position. Those of unread files are `None`.
pub(super) fn read_changes<F: FileFacts>(
    changes: &[Change<'_, F>],
    vocabulary: &Mutex<Vocabulary>,
    ask: &Ask<'_>,
    deadline: Instant,
) -> Vec<Option<Entry<F>>> {
    let next = AtomicUsize::new(0);
    let entries: Mutex<Vec<Option<Entry<F>>>> = Mutex::new(changes.iter().map(|_| None).collect());
    let work = |reports: bool| {
        let mut counts = HashMap::default();
        while !ask.stop.is_cancelled() && Instant::now() < deadline {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(change) = changes.get(place) else { break };
            let entry = read_change(change, vocabulary, ask.guard, &mut counts);
            entries.lock().unwrap_or_else(PoisonError::into_inner)[place] = Some(entry);
            if reports {
                report(ask, "indexing", place, changes.len());
            }
        }
    };
    on_threads(if changes.len() >= PARALLEL_MIN { 1 } else { 0 }, &work);
    entries.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the same work on this thread and on helpers. Only this thread reports progress.
pub(super) fn on_threads(helpers: usize, work: &(dyn Fn(bool) + Sync)) {
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // Without a second thread this one does it alone.
            let _ = std::thread::Builder::new().name("index".into()).spawn_scoped(scope, || work(false));
        }
        work(true);
    });
}

/// Reports progress, up to some fifty times: each report is an event.
pub(super) fn report(ask: &Ask<'_>, doing: &str, done: usize, total: usize) {
    const EVERY: usize = 256;
    let every = EVERY.max(total / 50);
    // Two threads take the numbers, so this one sees about half of them.
    let is_due = total >= 2 * EVERY && done % every < 2;
    if let Some(run) = ask.run.filter(|_| is_due) {
        run.progress(done as f64 * 100.0 / total as f64, format!("{doing} {total} files"));
    }
}

fn read_change<F: FileFacts>(
    change: &Change<'_, F>,
    vocabulary: &Mutex<Vocabulary>,
    guard: &Guard<'_>,
    counts: &mut HashMap<u32, u32>,
) -> Entry<F> {
    let path = &change.found.path;
    let read_at = now();
    let unread = |identity, reason| {
        let words = if reason == SkipReason::Binary { Words::None } else { Words::Unknown };
        Entry::new(path.clone(), (identity, read_at), None, words, Some(reason))
    };
    let (content, identity) = match open(guard, path) {
        Ok((_, identity)) if identity.size > WORDS_BYTES_MAX => return unread(identity, SkipReason::TooLarge),
        Ok((file, identity)) => match read(file, WORDS_BYTES_MAX) {
            Ok(content) => (content, identity),
            Err(reason) => return unread(identity, reason),
        },
        Err(reason) => return unread(change.found.identity, reason),
    };
    let stamp = (identity, read_at);
    let hash = blake3::hash(&content);
    let is_same = |old: &&Entry<F>| old.hash == Some(hash) && (old.words != Words::Unknown || old.skipped.is_some());
    if let Some(old) = change.old.filter(is_same) {
        return old.read_again(stamp);
    }
    let Ok(decoded) = decode(&content, None) else {
        return Entry::new(path.clone(), stamp, Some(hash), Words::None, Some(SkipReason::Binary));
    };
    let words = {
        let mut vocabulary = vocabulary.lock().unwrap_or_else(PoisonError::into_inner);
        words_of(&decoded.text, &mut vocabulary, counts)
    };
    let too_large = (content.len() as u64 > FACTS_BYTES_MAX).then_some(SkipReason::TooLarge);
    let too_many = (words == Words::Unknown).then_some(SkipReason::ManyWords);
    let skipped = too_large.or(too_many).or_else(|| obstacle::<F>(&content));
    Entry::new(path.clone(), stamp, Some(hash), words, skipped)
}

/// Counts the words of a text.
fn words_of(text: &str, vocabulary: &mut Vocabulary, counts: &mut HashMap<u32, u32>) -> Words {
    counts.clear();
    let mut has_long = false;
    for run in runs(text) {
        if run.len() > WORD_BYTES_MAX {
            has_long = true;
            continue;
        }
        let Some(number) = vocabulary.number(run) else { return Words::Unknown };
        *counts.entry(number).or_default() += 1;
        if counts.len() > FILE_WORDS_MAX {
            return Words::Unknown;
        }
    }
    let mut list: Box<[(u32, u32)]> = counts.iter().map(|(number, count)| (*number, *count)).collect();
    list.sort_unstable();
    if has_long { Words::KnownButLong(list) } else { Words::Known(list) }
}

/// Returns the reason not to make facts of a content, if there is one.
pub(super) fn obstacle<F: FileFacts>(content: &[u8]) -> Option<SkipReason> {
    if crate::files::is_binary(content) {
        return Some(SkipReason::Binary);
    }
    if F::IS_PROSE {
        return None;
    }
    let lines = 1 + content.iter().filter(|byte| **byte == b'\n').count();
    if content.len() >= MINIFIED_BYTES_MIN && content.len() / lines > MEAN_LINE_BYTES_MAX {
        return Some(SkipReason::Minified);
    }
    is_generated(content).then_some(SkipReason::Generated)
}

/// Returns true if a comment at the beginning says that a program generated the file.
fn is_generated(content: &[u8]) -> bool {
    let holds = |line: &[u8], text: &[u8]| line.windows(text.len()).any(|part| part.eq_ignore_ascii_case(text));
    let is_comment = |line: &[u8]| line.first().is_some_and(|first| b"/#*-;<%\"'".contains(first));
    content
        .split(|byte| *byte == b'\n')
        .take(HEAD_LINES)
        .map(<[u8]>::trim_ascii_start)
        .filter(|line| is_comment(line))
        .any(|line| {
            let line = &line[..line.len().min(400)];
            holds(line, b"@generated") || (holds(line, b"generated") && holds(line, b"do not edit"))
        })
}

/// Reads the current content of a file.
pub(super) fn content(guard: &Guard<'_>, path: &Path, bytes_max: u64) -> Result<Vec<u8>, SkipReason> {
    let (file, identity) = open(guard, path)?;
    if identity.size > bytes_max {
        return Err(SkipReason::TooLarge);
    }
    read(file, bytes_max)
}

/// Opens a regular file that is not hidden, and takes its identity before anything is read.
fn open(guard: &Guard<'_>, path: &Path) -> Result<(File, Identity), SkipReason> {
    let file = open_beneath(guard, path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => SkipReason::Gone,
        _ => SkipReason::Unreadable,
    })?;
    let stat = fstat(&file).map_err(|_| SkipReason::Unreadable)?;
    Ok((file, Identity::of(&stat)))
}

/// Reads a file that may grow meanwhile.
fn read(file: File, bytes_max: u64) -> Result<Vec<u8>, SkipReason> {
    let mut content = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut content).map_err(|_| SkipReason::Unreadable)?;
    if content.len() as u64 > bytes_max { Err(SkipReason::TooLarge) } else { Ok(content) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_file_says_so_in_a_comment_at_its_beginning() {
        for head in ["// @generated by x\n", "\n# Code generated by protoc. DO NOT EDIT.\n", "/*\n * @Generated\n */"] {
            assert!(is_generated(head.as_bytes()), "{head}");
        }
        for head in
            ["let mark = \"@generated\";\n", "// generated\n", &format!("{}// @generated", "\n".repeat(HEAD_LINES))]
        {
            assert!(!is_generated(head.as_bytes()), "{head}");
        }
    }

    #[test]
    fn words_are_counted_and_long_ones_are_told() {
        let mut vocabulary = Vocabulary::default();
        let mut counts = HashMap::default();
        let words = words_of("a b a", &mut vocabulary, &mut counts);
        assert_eq!(words, Words::Known([(0, 2), (1, 1)].into()));
        let long = format!("b {}", "x".repeat(WORD_BYTES_MAX + 1));
        assert_eq!(words_of(&long, &mut vocabulary, &mut counts), Words::KnownButLong([(1, 1)].into()));
        let many: String = (0..=FILE_WORDS_MAX).map(|number| format!("w{number} ")).collect();
        assert_eq!(words_of(&many, &mut vocabulary, &mut counts), Words::Unknown);
    }
}

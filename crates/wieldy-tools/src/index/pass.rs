//! The comparison of all files with the index.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::entry::{Entry, Identity, Words, now};
use super::reading::{Change, read_changes};
use super::view::View;
use super::{Ask, FileFacts, IndexOptions, SkipReason, Vocabulary};
use crate::files::{FileError, WalkOptions, Workspace};

/// A file that the walk found.
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
}

/// Compares all files with the old state, reads those that changed, and returns the new state with the time that the
/// reading took.
pub(super) fn refresh<F: FileFacts>(
    workspace: &Workspace,
    options: &IndexOptions,
    old: &View<F>,
    ask: &Ask<'_>,
) -> Result<(View<F>, Duration), FileError> {
    let checked_at = Instant::now();
    let (found, is_whole) = look(workspace, options, ask)?;
    let begun = Instant::now();
    let mut slots = matched(&found, &old.entries, is_whole);
    let changes: Vec<Change<'_, F>> = slots.iter().filter_map(Slot::change).collect();
    let is_same_list = slots.len() == old.entries.len() && slots.iter().all(Slot::is_known);
    let mut is_complete = is_whole;
    let mut is_same = is_same_list;
    let (mut entries, mut vocabulary) = (old.entries.clone(), old.vocabulary.clone());
    if !(changes.is_empty() && is_same_list) {
        let words = Mutex::new(Arc::unwrap_or_clone(vocabulary));
        let read = read_changes(&changes, &words, ask, begun + options.reading_max);
        drop(changes);
        vocabulary = Arc::new(words.into_inner().unwrap_or_else(PoisonError::into_inner));
        let mut read = read.into_iter();
        let next = slots.drain(..).map(|slot| match slot {
            Slot::Kept(entry) => entry,
            Slot::Changed { found, old } => {
                let entry = read.next().flatten();
                is_complete &= entry.is_some();
                let entry = entry.unwrap_or_else(|| unread(&found.path));
                is_same &= old.is_some_and(|old| old.hash.is_some() && old.hash == entry.hash);
                Arc::new(entry)
            }
        });
        entries = next.filter(|entry| entry.skipped != Some(SkipReason::Gone)).collect();
    }
    let work = begun.elapsed();
    let facts_work = old.facts_work().clone();
    let is_grown = facts_work.load(Ordering::Relaxed) > 0 || !is_same;
    if is_grown {
        (entries, vocabulary) = within(options.memory_bytes_max, entries, vocabulary);
    }
    let mut view = View::new(entries, vocabulary, facts_work);
    if is_same && old.checked_at.is_some() {
        view.generation = old.generation;
    }
    (view.is_complete, view.checked_at) = (is_complete, Some(checked_at));
    Ok((view, work))
}

/// Walks through all files. The result says also if nothing was left out.
fn look(workspace: &Workspace, options: &IndexOptions, ask: &Ask<'_>) -> Result<(Vec<Found>, bool), FileError> {
    let given = workspace.given(".")?;
    let walk_options = WalkOptions { depth: u32::MAX, hidden: false, ignored: options.ignored };
    let mut walk = workspace.walk(&given, walk_options, ask.guard, ask.stop)?;
    let mut found = Vec::new();
    for entry in walk.by_ref() {
        if !entry.file_type.is_file() || !(options.wanted)(&entry.path) || ask.guard.check_shown(&entry.path).is_err() {
            continue;
        }
        // A file that is gone by now is not there.
        if let Some(stat) = entry.stat() {
            found.push(Found { path: entry.path, identity: Identity::of(&stat) });
        }
    }
    Ok((found, walk.note_on_limits().is_none()))
}

/// A file of the new state.
enum Slot<'a, F> {
    Kept(Arc<Entry<F>>),
    Changed { found: &'a Found, old: Option<&'a Entry<F>> },
}

impl<'a, F> Slot<'a, F> {
    fn change(&self) -> Option<Change<'a, F>> {
        match self {
            Self::Kept(_) => None,
            Self::Changed { found, old } => Some(Change { found, old: *old }),
        }
    }

    /// Returns true if the file was in the index before.
    fn is_known(&self) -> bool {
        matches!(self, Self::Kept(_) | Self::Changed { old: Some(_), .. })
    }
}

/// Matches the files with their entries; both are sorted by path. Without a whole list of files, entries behind its end
/// stay.
fn matched<'a, F: FileFacts>(found: &'a [Found], old: &'a [Arc<Entry<F>>], is_whole: bool) -> Vec<Slot<'a, F>> {
    let mut slots = Vec::with_capacity(found.len());
    let mut old = old.iter().peekable();
    for found in found {
        while old.next_if(|entry| entry.path < found.path).is_some() {}
        slots.push(match old.next_if(|entry| entry.path == found.path) {
            Some(entry) if entry.is_current(&found.identity) => Slot::Kept(entry.clone()),
            Some(entry) => Slot::Changed { found, old: Some(entry) },
            None => Slot::Changed { found, old: None },
        });
    }
    if !is_whole {
        slots.extend(old.map(|entry| Slot::Kept(entry.clone())));
    }
    slots
}

/// Returns the entry of a file that there was no time to read. It may hold any word, and is never current.
fn unread<F: FileFacts>(path: &Path) -> Entry<F> {
    Entry::new(path.to_owned(), (Identity::NONE, now()), None, Words::Unknown, Some(SkipReason::Stopped))
}

type Contents<F> = (Arc<[Arc<Entry<F>>]>, Arc<Vocabulary>);

/// Drops words and facts of the files that were not asked for the longest, until the rest fits.
fn within<F: FileFacts>(bytes_max: usize, entries: Arc<[Arc<Entry<F>>]>, vocabulary: Arc<Vocabulary>) -> Contents<F> {
    let listed: usize = entries.iter().map(|entry| entry.words.list().len()).sum();
    // The room of a word in the vocabulary is shared by the files that hold it.
    let share = vocabulary.bytes() / listed.max(1);
    let sizes: Vec<usize> = entries.iter().map(|entry| entry.bytes() + share * entry.words.list().len()).collect();
    let mut bytes: usize = sizes.iter().sum();
    if bytes <= bytes_max {
        return (entries, vocabulary);
    }
    let mut coldest: Vec<usize> = (0..entries.len()).filter(|place| sizes[*place] > 0).collect();
    coldest.sort_by_key(|place| entries[*place].used.load(Ordering::Relaxed));
    let mut entries = entries.to_vec();
    // Some room is made at once, so that this does not happen at every change.
    for place in coldest {
        if bytes <= bytes_max / 4 * 3 {
            break;
        }
        entries[place] = Arc::new(entries[place].without_words());
        bytes -= sizes[place];
    }
    renumbered(&entries, &vocabulary).unwrap_or_else(|| (entries.into(), vocabulary))
}

/// Returns the same entries with a vocabulary of only those words that they hold.
pub(super) fn renumbered<F: FileFacts>(entries: &[Arc<Entry<F>>], vocabulary: &Vocabulary) -> Option<Contents<F>> {
    let mut numbers: Vec<Option<u32>> = vec![None; vocabulary.len()];
    let used = entries.iter().flat_map(|entry| entry.words.list());
    used.for_each(|(number, _)| numbers[*number as usize] = Some(0));
    let mut new = Vocabulary::default();
    for (number, place) in numbers.iter_mut().enumerate().filter(|(_, place)| place.is_some()) {
        *place = Some(new.number(vocabulary.word(number as u32))?);
    }
    let renumber = |list: &[(u32, u32)]| -> Box<[(u32, u32)]> {
        // The order of the words that stay is the same, so the lists stay sorted.
        list.iter().filter_map(|(number, count)| Some((numbers[*number as usize]?, *count))).collect()
    };
    let entries = entries.iter().map(|entry| {
        let words = match &entry.words {
            Words::Known(list) => Words::Known(renumber(list)),
            Words::KnownButLong(list) => Words::KnownButLong(renumber(list)),
            Words::Unknown | Words::None => return entry.clone(),
        };
        Arc::new(entry.with_words(words, (entry.identity, entry.read_at)))
    });
    Some((entries.collect(), Arc::new(new)))
}

//! A state of the index to ask: files, words and facts.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blake3::Hash;
use schemars::JsonSchema;
use serde::Serialize;
use wieldy_core::name::near_misses;

use super::entry::{FactsState, Words};
use super::words::WORD_BYTES_MAX;
use super::{
    Ask, Entry, FACTS_BYTES_MAX, FileFacts, FileId, IndexOptions, SkipReason, Vocabulary, WORDS_BYTES_MAX, reading,
};

/// The number of files from which facts are made on two threads.
const PARALLEL_MIN: usize = 8;
/// Maximum number of words that are compared to find near misses.
const NEAR_WORDS_MAX: usize = 1000;

/// The last question's number. Entries hold the number of the question that used them last.
static QUESTIONS: AtomicU64 = AtomicU64::new(1);

/// A state of the index, as one question sees it. Later changes of files are not in it.
pub(crate) struct View<F> {
    pub(super) entries: Arc<[Arc<Entry<F>>]>,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) generation: u64,
    /// False if files were not found or not read.
    pub(super) is_complete: bool,
    /// The time of the last comparison, or `None` before the first.
    pub(super) checked_at: Option<Instant>,
    /// True if this question did not compare the files itself.
    is_reused: bool,
    /// True if facts were not made because the call was stopped.
    was_stopped: AtomicBool,
    question: u64,
    /// The microseconds that were spent on facts, in all views of the shelf.
    facts_work: Arc<AtomicU64>,
}

/// The state of the index, for answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct IndexState {
    /// The number of files.
    pub(crate) files: usize,
    /// The number of files whose words are known.
    pub(crate) indexed: usize,
    /// The number of files that have no words or no facts, by reason.
    pub(crate) skipped: BTreeMap<&'static str, usize>,
    /// False if an answer may lack files that were not found or not read in time.
    pub(crate) complete: bool,
    /// The age of the last comparison in milliseconds, if it was not made for this question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) checked_ms_ago: Option<u64>,
}

/// A file's current content, with the facts of just this content.
pub(crate) struct Loaded<F> {
    pub(crate) content: Vec<u8>,
    pub(crate) hash: Hash,
    pub(crate) facts: Arc<F>,
}

impl<F> View<F> {
    /// Creates the view of an index that has looked at no file yet.
    pub(super) fn empty() -> Self {
        Self::new(Arc::from([]), Arc::default(), Arc::default())
    }

    pub(super) fn new(entries: Arc<[Arc<Entry<F>>]>, vocabulary: Arc<Vocabulary>, facts_work: Arc<AtomicU64>) -> Self {
        let question = QUESTIONS.fetch_add(1, Ordering::Relaxed);
        Self {
            entries,
            vocabulary,
            generation: question,
            is_complete: false,
            checked_at: None,
            is_reused: false,
            was_stopped: AtomicBool::new(false),
            question,
            facts_work,
        }
    }

    /// Returns the same state for another question.
    pub(super) fn again(&self) -> Self {
        Self {
            entries: self.entries.clone(),
            vocabulary: self.vocabulary.clone(),
            generation: self.generation,
            is_complete: self.is_complete,
            checked_at: self.checked_at,
            is_reused: false,
            was_stopped: AtomicBool::new(false),
            question: QUESTIONS.fetch_add(1, Ordering::Relaxed),
            facts_work: self.facts_work.clone(),
        }
    }

    /// Returns the same state for a question that does not compare the files itself.
    pub(super) fn reused(&self) -> Self {
        Self { is_reused: true, ..self.again() }
    }

    /// Returns true if the last comparison is recent enough to answer from, for a folder with many files.
    pub(super) fn is_fresh(&self, options: &IndexOptions) -> bool {
        let is_recent = self.checked_at.is_some_and(|checked_at| checked_at.elapsed() < options.fresh);
        self.is_complete && is_recent && self.entries.len() > options.always_checked_max
    }

    pub(super) fn facts_work(&self) -> &Arc<AtomicU64> {
        &self.facts_work
    }

    /// Returns the time that was spent on facts since the last time that this was asked.
    pub(super) fn take_work(&self) -> Duration {
        Duration::from_micros(self.facts_work.swap(0, Ordering::Relaxed))
    }

    /// Returns the number of files.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns a number that changes when the content of any file changes, or a file comes or goes. It is unique in
    /// this process, so what was derived from all files can be kept under it.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns all files, sorted by path.
    pub(crate) fn files(&self) -> impl Iterator<Item = (FileId, &Entry<F>)> {
        self.entries.iter().enumerate().map(|(id, entry)| (FileId(id as u32), &**entry))
    }

    /// Returns a file of this view.
    pub(crate) fn file(&self, id: FileId) -> &Entry<F> {
        &self.entries[id.0 as usize]
    }

    /// Returns the file at a path from the root, if it is in the index.
    pub(crate) fn find(&self, path: &Path) -> Option<FileId> {
        let place = self.entries.binary_search_by(|entry| entry.path.as_path().cmp(path));
        place.ok().map(|place| FileId(place as u32))
    }

    /// Returns the words of all files. Some may be of files that are gone.
    pub(crate) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Returns the files that hold this word as a whole, and those whose words are not known.
    pub(crate) fn with_word(&self, word: &str) -> Vec<FileId> {
        let number = self.vocabulary.find(word);
        self.with_any(number.as_slice(), word.len() > WORD_BYTES_MAX)
    }

    /// Returns the files that hold one of these words, and those whose words are not known. If `or_long`, also those
    /// with words that are too long to be listed.
    pub(crate) fn with_any(&self, numbers: &[u32], or_long: bool) -> Vec<FileId> {
        let mut set = vec![false; if numbers.len() > 4 { self.vocabulary.len() } else { 0 }];
        numbers.iter().for_each(|number| {
            if let Some(place) = set.get_mut(*number as usize) {
                *place = true;
            }
        });
        let holds = |words: &Words| match set.is_empty() {
            true => numbers.iter().any(|number| words.count(*number) > 0),
            false => words.list().iter().any(|(number, _)| set.get(*number as usize).is_some_and(|is_in| *is_in)),
        };
        let may_hold = |words: &Words| match words {
            Words::Unknown => true,
            Words::None => false,
            Words::Known(_) => holds(words),
            Words::KnownButLong(_) => or_long || holds(words),
        };
        let ids = self.entries.iter().enumerate().filter(|(_, entry)| may_hold(&entry.words));
        ids.map(|(id, _)| FileId(id as u32)).collect()
    }

    /// Returns how often the file holds the word of this number, as far as its words are known.
    pub(crate) fn count(&self, id: FileId, number: u32) -> u32 {
        self.file(id).words.count(number)
    }

    /// Returns the words of a file with their counts, as far as they are known.
    pub(crate) fn words(&self, id: FileId) -> &[(u32, u32)] {
        self.file(id).words.list()
    }

    /// Returns how many words a file has, as far as they are known.
    pub(crate) fn words_of(&self, id: FileId) -> u32 {
        self.file(id).words.list().iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// Returns true if the words of the file are known, so that word look-ups are exact for it.
    pub(crate) fn has_words(&self, id: FileId) -> bool {
        !matches!(self.file(id).words, Words::Unknown)
    }

    /// Returns up to three words of these files that the author of `word` may have meant, best first.
    pub(crate) fn near(&self, word: &str) -> Vec<&str> {
        let first = |text: &str| text.chars().next().map(|first| first.to_ascii_lowercase());
        let wanted = first(word);
        let distance = |other: &str| other.len().abs_diff(word.len());
        let mut close: Vec<(usize, &str)> = self
            .vocabulary
            .words()
            .filter(|(_, other)| distance(other) <= 2 + word.len() / 2 && first(other) == wanted)
            .map(|(_, other)| (distance(other), other))
            .collect();
        close.sort_unstable();
        close.truncate(NEAR_WORDS_MAX);
        let is_there = |other: &str| {
            let number = self.vocabulary.find(other);
            number.is_some_and(|number| self.entries.iter().any(|entry| entry.words.count(number) > 0))
        };
        let mut near = near_misses(word, close.into_iter().map(|(_, other)| other));
        near.retain(|other| *other != word && is_there(other));
        near
    }

    /// Returns the state for an answer. Files whose facts were asked for and could not be made are counted too.
    pub(crate) fn state(&self) -> IndexState
    where
        F: FileFacts,
    {
        let (mut indexed, mut skipped) = (0, BTreeMap::new());
        for entry in self.entries.iter() {
            indexed += usize::from(!matches!(entry.words, Words::Unknown));
            let of_facts = || match &*entry.facts() {
                FactsState::Skipped(reason) if *reason != SkipReason::Language => Some(*reason),
                _ => None,
            };
            if let Some(reason) = entry.skipped.or_else(of_facts) {
                *skipped.entry(reason.as_str()).or_default() += 1;
            }
        }
        let age = self.checked_at.filter(|_| self.is_reused).map(|checked_at| checked_at.elapsed());
        IndexState {
            files: self.entries.len(),
            indexed,
            skipped,
            complete: self.is_complete && !self.was_stopped.load(Ordering::Relaxed),
            checked_ms_ago: age.map(|age| age.as_millis() as u64),
        }
    }
}

impl<F: FileFacts> View<F> {
    /// Returns the facts of these files, in the same order. Those that are missing are made, on up to two threads. They
    /// are of the files' current content, even if it changed since the view was made.
    pub(crate) fn facts(&self, ask: &Ask<'_>, ids: &[FileId]) -> Vec<Result<Arc<F>, SkipReason>> {
        let results: Vec<OnceLock<_>> = ids.iter().map(|_| OnceLock::new()).collect();
        let mut missing = Vec::new();
        for (place, id) in ids.iter().enumerate() {
            let entry = self.file(*id);
            entry.used.store(self.question, Ordering::Relaxed);
            match entry.known_facts() {
                Some(known) => drop(results[place].set(known)),
                None => missing.push(place),
            }
        }
        let begun = Instant::now();
        let next = AtomicUsize::new(0);
        let work = |reports: bool| {
            while let Some(place) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                let made = self.load(ask, ids[*place]).map(|loaded| loaded.facts);
                let _ = results[*place].set(made);
                if reports {
                    reading::report(ask, "reading", next.load(Ordering::Relaxed), missing.len());
                }
            }
        };
        let helpers = if missing.len() >= PARALLEL_MIN { 1 } else { 0 };
        reading::on_threads(helpers, &work);
        if !missing.is_empty() {
            let spent = begun.elapsed() * (1 + helpers as u32);
            self.facts_work.fetch_add(spent.as_micros() as u64, Ordering::Relaxed);
        }
        results.into_iter().map(|result| result.into_inner().unwrap_or(Err(SkipReason::Stopped))).collect()
    }

    /// Reads a file, and returns its content with the facts of just this content.
    pub(crate) fn load(&self, ask: &Ask<'_>, id: FileId) -> Result<Loaded<F>, SkipReason> {
        let (content, hash) = self.content(ask, id, FACTS_BYTES_MAX)?;
        let facts = self.facts_of(ask, id, &content, hash)?;
        Ok(Loaded { content, hash, facts })
    }

    /// Reads a file, and returns its content with its facts, if it has any.
    pub(crate) fn load_any(&self, ask: &Ask<'_>, id: FileId) -> Result<(Vec<u8>, Option<Arc<F>>), SkipReason> {
        let (content, hash) = self.content(ask, id, WORDS_BYTES_MAX)?;
        let is_small = content.len() as u64 <= FACTS_BYTES_MAX;
        let facts = is_small.then(|| self.facts_of(ask, id, &content, hash).ok()).flatten();
        Ok((content, facts))
    }

    fn content(&self, ask: &Ask<'_>, id: FileId, bytes_max: u64) -> Result<(Vec<u8>, Hash), SkipReason> {
        let content = self.read_up_to(ask, id, bytes_max)?;
        let hash = blake3::hash(&content);
        Ok((content, hash))
    }

    /// Returns the facts of the content, which is the file's current one.
    fn facts_of(&self, ask: &Ask<'_>, id: FileId, content: &[u8], hash: Hash) -> Result<Arc<F>, SkipReason> {
        let entry = self.file(id);
        let is_same = entry.hash == Some(hash);
        if is_same && let Some(known) = entry.known_facts() {
            return known;
        }
        if let Some(reason) = reading::obstacle::<F>(content) {
            return Err(reason);
        }
        let made = F::of(&entry.path, content, ask.stop).map(Arc::new);
        match &made {
            Err(SkipReason::Stopped) => return Err(self.stopped()),
            Ok(facts) if is_same => entry.set_facts(FactsState::Made(facts.clone())),
            Err(reason) if is_same => entry.set_facts(FactsState::Skipped(*reason)),
            _ => {}
        }
        made
    }

    /// Reads a file of up to [`WORDS_BYTES_MAX`] bytes. The content may be newer than the view.
    pub(crate) fn read(&self, ask: &Ask<'_>, id: FileId) -> Result<Vec<u8>, SkipReason> {
        self.read_up_to(ask, id, WORDS_BYTES_MAX)
    }

    fn read_up_to(&self, ask: &Ask<'_>, id: FileId, bytes_max: u64) -> Result<Vec<u8>, SkipReason> {
        let entry = self.file(id);
        entry.used.store(self.question, Ordering::Relaxed);
        if ask.stop.is_cancelled() {
            return Err(self.stopped());
        }
        reading::content(ask.guard, &entry.path, bytes_max)
    }

    fn stopped(&self) -> SkipReason {
        self.was_stopped.store(true, Ordering::Relaxed);
        SkipReason::Stopped
    }
}

//! A file in the index: its identity, its hash, its words and its facts.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blake3::Hash;
use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

use super::FileFacts;

/// A file that changed less than this before it was read counts as changed: the clock of a file system may be coarse,
/// so that a later write leaves the same time.
const RACY: Duration = Duration::from_secs(2);

/// The number of a file in one view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId(pub(crate) u32);

/// The reason why a file has no words or no facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum SkipReason {
    /// It is not text.
    Binary,
    /// It is larger than the limit for words, or for facts.
    TooLarge,
    /// It cannot be opened or read.
    Unreadable,
    /// Its lines are too long to be written by people.
    Minified,
    /// It says that a program generated it.
    Generated,
    /// No facts are made of files in its language.
    Language,
    /// Making its facts took too long.
    Slow,
    /// Its facts could not be made of its content.
    Malformed,
    /// It has too many different words.
    ManyWords,
    /// It is gone, or has changed to something else than a readable file.
    Gone,
    /// The call ended before it was read.
    Stopped,
}

impl SkipReason {
    /// Returns the word for answers.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Binary => "binary",
            Self::TooLarge => "too_large",
            Self::Unreadable => "unreadable",
            Self::Minified => "minified",
            Self::Generated => "generated",
            Self::Language => "language",
            Self::Slow => "slow",
            Self::Malformed => "malformed",
            Self::ManyWords => "many_words",
            Self::Gone => "gone",
            Self::Stopped => "stopped",
        }
    }
}

/// The values of the operating system by which a change of a file is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    inode: u64,
    pub(super) size: u64,
    /// The times of the last change of content and of anything, in nanoseconds.
    modified: i128,
    changed: i128,
}

impl Identity {
    /// The identity of no file.
    pub(super) const NONE: Self = Self { inode: 0, size: 0, modified: i128::MIN / 4, changed: i128::MIN / 4 };

    #[allow(clippy::unnecessary_cast, reason = "the types differ between architectures")]
    pub(super) fn of(stat: &Stat) -> Self {
        let time = |seconds: i64, nanoseconds: u64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        Self {
            inode: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            modified: time(stat.st_mtime as i64, stat.st_mtime_nsec as u64),
            changed: time(stat.st_ctime as i64, stat.st_ctime_nsec as u64),
        }
    }
}

/// Returns the current time in nanoseconds, as files have it.
pub(super) fn now() -> i128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_nanos() as i128)
}

/// The words of a file, and their completeness.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Words {
    /// All words but those that are too long, by number, each with its count.
    Known(Box<[(u32, u32)]>),
    /// The same, and the file has words that are too long to be listed.
    KnownButLong(Box<[(u32, u32)]>),
    /// Not known, so that the file may hold any word.
    Unknown,
    /// The file is not text and holds no word.
    None,
}

impl Words {
    /// Returns the list of words, empty if they are not known.
    pub(super) fn list(&self) -> &[(u32, u32)] {
        match self {
            Self::Known(list) | Self::KnownButLong(list) => list,
            Self::Unknown | Self::None => &[],
        }
    }

    /// Returns how often a word is in the file, if its words are known.
    pub(super) fn count(&self, number: u32) -> u32 {
        let list = self.list();
        list.binary_search_by_key(&number, |(number, _)| *number).map_or(0, |place| list[place].1)
    }
}

/// A file in the index.
pub(crate) struct Entry<F> {
    /// The path from the root of the workspace.
    pub(crate) path: PathBuf,
    pub(super) identity: Identity,
    /// The time directly before the identity was taken and the content read.
    pub(super) read_at: i128,
    /// The hash of the content, unless it was not read.
    pub(crate) hash: Option<Hash>,
    pub(super) words: Words,
    /// The reason why it has no words, or will have no facts.
    pub(crate) skipped: Option<SkipReason>,
    facts: Mutex<FactsState<F>>,
    /// The question that used it last.
    pub(super) used: AtomicU64,
}

/// The facts of a file.
pub(super) enum FactsState<F> {
    Unmade,
    /// As they came from a snapshot.
    Stored(Box<[u8]>),
    Made(Arc<F>),
    Skipped(SkipReason),
}

impl<F: FileFacts> Entry<F> {
    /// Creates the entry of a file that was read.
    pub(super) fn new(
        path: PathBuf,
        (identity, read_at): (Identity, i128),
        hash: Option<Hash>,
        words: Words,
        skipped: Option<SkipReason>,
    ) -> Self {
        let facts = Mutex::new(FactsState::Unmade);
        Self { path, identity, read_at, hash, words, skipped, facts, used: AtomicU64::new(0) }
    }

    /// Returns true if the file cannot have changed since it was read.
    pub(super) fn is_current(&self, found: &Identity) -> bool {
        let racy = RACY.as_nanos() as i128;
        let is_racy = found.changed >= self.read_at - racy || (found.modified - self.read_at).abs() <= racy;
        self.identity == *found && !is_racy
    }

    /// Returns the entry of the same content, read again at another time.
    pub(super) fn read_again(&self, (identity, read_at): (Identity, i128)) -> Self {
        self.with_words(self.words.clone(), (identity, read_at))
    }

    /// Returns the entry without its words and facts, which are made again when they are needed.
    pub(super) fn without_words(&self) -> Self {
        let new = self.with_words(Words::Unknown, (self.identity, self.read_at));
        new.set_facts(FactsState::Unmade);
        new
    }

    /// Returns the entry with other words.
    pub(super) fn with_words(&self, words: Words, (identity, read_at): (Identity, i128)) -> Self {
        let facts = match &*self.facts() {
            FactsState::Unmade => FactsState::Unmade,
            FactsState::Stored(bytes) => FactsState::Stored(bytes.clone()),
            FactsState::Made(facts) => FactsState::Made(facts.clone()),
            FactsState::Skipped(reason) => FactsState::Skipped(*reason),
        };
        let used = AtomicU64::new(self.used.load(Ordering::Relaxed));
        let (path, facts) = (self.path.clone(), Mutex::new(facts));
        Self { path, identity, read_at, hash: self.hash, words, skipped: self.skipped, facts, used }
    }

    /// Returns the lock on the facts.
    pub(super) fn facts(&self) -> MutexGuard<'_, FactsState<F>> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_facts(&self, facts: FactsState<F>) {
        *self.facts() = facts;
    }

    /// Returns the facts that the entry has, or the reason why there are none. `None` means that they must be made.
    pub(super) fn known_facts(&self) -> Option<Result<Arc<F>, SkipReason>> {
        if let Some(reason) = self.skipped {
            return Some(Err(reason));
        }
        let mut facts = self.facts();
        if let FactsState::Stored(bytes) = &*facts {
            *facts = match postcard::from_bytes(bytes) {
                Ok(made) => FactsState::Made(Arc::new(made)),
                Err(_) => FactsState::Unmade,
            };
        }
        match &*facts {
            FactsState::Made(made) => Some(Ok(made.clone())),
            FactsState::Skipped(reason) => Some(Err(*reason)),
            FactsState::Unmade | FactsState::Stored(_) => None,
        }
    }

    /// Returns the memory of words and facts, in bytes.
    pub(super) fn bytes(&self) -> usize {
        let facts = match &*self.facts() {
            FactsState::Made(facts) => facts.bytes(),
            FactsState::Stored(bytes) => bytes.len(),
            FactsState::Unmade | FactsState::Skipped(_) => 0,
        };
        facts + 8 * self.words.list().len()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tokio_util::sync::CancellationToken;

    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Nothing;

    impl FileFacts for Nothing {
        const FORM: u32 = 1;

        fn of(_: &Path, _: &[u8], _: &CancellationToken) -> Result<Self, SkipReason> {
            Ok(Self)
        }

        fn bytes(&self) -> usize {
            0
        }
    }

    #[test]
    fn a_file_is_current_if_nothing_of_it_changed_and_the_last_change_was_long_before_it_was_read() {
        const SECOND: i128 = 1_000_000_000;
        let identity = Identity { inode: 7, size: 5, modified: 100 * SECOND, changed: 100 * SECOND };
        let entry = |identity, read_at| Entry::<Nothing>::new("a".into(), (identity, read_at), None, Words::None, None);
        let is_current = |read_at: i128| entry(identity, read_at).is_current(&identity);
        let times = [98, 100, 101, 102, 103, 1000].map(|second| is_current(second * SECOND));
        assert_eq!(times, [false, false, false, false, true, true]);
        let of_future = Identity { modified: 5000 * SECOND, ..identity };
        assert!(entry(of_future, 1000 * SECOND).is_current(&of_future), "the time of the content can be set at will");
        for other in [
            Identity { inode: 8, ..identity },
            Identity { size: 6, ..identity },
            Identity { modified: 99 * SECOND, ..identity },
            Identity { changed: 99 * SECOND, ..identity },
        ] {
            assert!(!entry(identity, 1000 * SECOND).is_current(&other), "{other:?}");
        }
    }
}

//! The index of a folder's files, for code and for vaults: identity, hash, words, and facts that a user of the index
//! makes of a file, such as its syntax tree.
//!
//! Files are the truth and the index is derived from them: [`Index::refresh`] compares every file with its entry
//! before each answer, and the snapshot on disk may be deleted at any time. Words are made of all files at once, facts
//! on demand ([`View::facts`]): a question about a name needs the facts of those files only that hold the name.
//!
//! ```text
//! let guard = workspace.guard(&run.confinement().files);
//! let ask = Ask::of_run(&guard, run);
//! let view = index.refresh(&ask)?;                          // stat pass, changed files are read again
//! let files = view.with_word("Workspace");                  // files that may hold the word
//! for (file, facts) in files.iter().zip(view.facts(&ask, &files)) { … }   // on two threads, kept for the next time
//! let answer = json!({ …, "index": view.state() });         // after the facts, so that it counts skipped files too
//! index.keep(&ask);                                         // writes a snapshot, if it is worth the time
//! ```
//!
//! | module | does |
//! | --- | --- |
//! | `words`, `vocabulary` | words of texts and their parts; a number for each word |
//! | `entry`, `reading` | a file in the index; reading files, on two threads |
//! | `pass`, `view` | comparing all files with the index; a state of the index to ask |
//! | `snapshot` | the file on disk |

mod entry;
pub(crate) mod needs;
mod pass;
mod reading;
mod snapshot;
#[cfg(test)]
mod tests;
mod view;
mod vocabulary;
pub(crate) mod words;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use wieldy_core::{FileRules, Run};

use crate::files::{FileError, Guard, Workspace};

pub(crate) use entry::{Entry, FileId, SkipReason};
#[allow(unused_imports, reason = "tools outside this module name these types")]
pub(crate) use view::{IndexState, Loaded, View};
pub(crate) use vocabulary::Vocabulary;

/// Maximum size of a file whose words are indexed, in bytes.
pub(crate) const WORDS_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Maximum size of a file that facts are made of, in bytes.
pub(crate) const FACTS_BYTES_MAX: u64 = 1024 * 1024;

/// Maximum number of callers' views of one folder that are held: one for each tenant and set of file rules.
const SHELVES_MAX: usize = 8;

/// So much unsaved work is saved before the question is answered, which may be stopped.
const SAVED_AT_ONCE: Duration = Duration::from_secs(1);

/// Facts about a file's content that are stored in the index.
///
/// They are made of the path and the content alone, so that equal files have equal facts. Their type must not nest
/// without a bound, because a snapshot on disk may hold anything.
pub(crate) trait FileFacts: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The version of the facts: of their type, and of the way in which they are made. A snapshot with another version
    /// is not used.
    const FORM: u32;

    /// True for texts that people write with long lines: such files are never left out as minified or generated.
    const IS_PROSE: bool = false;

    /// Makes the facts of a file, or returns the reason why it has none. The content has at most [`FACTS_BYTES_MAX`]
    /// bytes and is not binary; it may be anything else. Must return soon after `stop` is cancelled, with
    /// [`SkipReason::Stopped`].
    fn of(path: &Path, content: &[u8], stop: &CancellationToken) -> Result<Self, SkipReason>;

    /// Returns the memory that the facts take, in bytes, roughly.
    fn bytes(&self) -> usize;
}

/// The options of an index.
#[derive(Debug, Clone)]
pub(crate) struct IndexOptions {
    /// The name in the file names of snapshots, such as `code`.
    pub(crate) name: &'static str,
    /// The files that are indexed, by path from the root.
    pub(crate) wanted: fn(&Path) -> bool,
    /// True to index files that `.gitignore` excludes too.
    pub(crate) ignored: bool,
    /// The time for which a comparison of more than `always_checked_max` files counts.
    pub(crate) fresh: Duration,
    /// Maximum number of files that are compared before every answer.
    pub(crate) always_checked_max: usize,
    /// Maximum time that one question spends on reading files. The answer then says that it is not complete, and the
    /// next question goes on.
    pub(crate) reading_max: Duration,
    /// The time of work that is worth a snapshot.
    pub(crate) save_after: Duration,
    /// Maximum memory of words and facts in bytes. Beyond it, those of the files that were not asked for the longest
    /// are dropped.
    pub(crate) memory_bytes_max: usize,
}

impl IndexOptions {
    /// Returns the usual options for an index of this name.
    pub(crate) fn new(name: &'static str) -> Self {
        Self {
            name,
            wanted: |_| true,
            ignored: false,
            fresh: Duration::from_secs(2),
            always_checked_max: 20_000,
            reading_max: Duration::from_secs(20),
            save_after: Duration::from_millis(20),
            memory_bytes_max: 256 * 1024 * 1024,
        }
    }
}

/// A question to an index: the rights of the caller, and the call to report to.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    /// The guard of the index's workspace, with the rules of the call.
    pub(crate) guard: &'a Guard<'a>,
    /// The tenant of the caller. Tenants share nothing.
    pub(crate) tenant: Option<&'a str>,
    /// Ends the work when it is cancelled. The answer is then not complete.
    pub(crate) stop: &'a CancellationToken,
    /// The run that progress is reported to.
    pub(crate) run: Option<&'a Run>,
}

impl<'a> Ask<'a> {
    /// Returns the question of a run.
    pub(crate) fn of_run(guard: &'a Guard<'a>, run: &'a Run) -> Self {
        Self { guard, tenant: run.caller().tenant.as_deref(), stop: run.stop(), run: Some(run) }
    }
}

/// The index of the files below one workspace's root, shared by all tools that ask it.
pub(crate) struct Index<F: FileFacts> {
    workspace: Arc<Workspace>,
    options: IndexOptions,
    /// The folder for snapshots, if there is one.
    folder: Option<PathBuf>,
    /// One for each tenant and set of rules, the last used first.
    shelves: Mutex<Vec<Arc<Shelf<F>>>>,
}

/// The files that one tenant sees under one set of rules.
struct Shelf<F> {
    /// The hash of root, tenant and options, which names the snapshot.
    place: blake3::Hash,
    /// The hash of these and of the file rules.
    key: blake3::Hash,
    /// The state, or `None` while a thread works on it.
    state: Mutex<Option<ShelfState<F>>>,
    given_back: Condvar,
}

/// The state of a shelf between two questions.
struct ShelfState<F> {
    view: View<F>,
    /// True once the snapshot was looked for.
    is_loaded: bool,
    /// The time that was spent on words and facts which no snapshot has.
    unsaved: Duration,
    /// The time that the last snapshot took.
    last_save: Duration,
}

impl<F: FileFacts> Index<F> {
    /// Creates the index of a workspace. With a state folder, it keeps snapshots there.
    pub(crate) fn new(workspace: Arc<Workspace>, state_folder: Option<PathBuf>, options: IndexOptions) -> Self {
        let folder = state_folder.map(|folder| folder.join("index"));
        Self { workspace, options, folder, shelves: Mutex::default() }
    }

    /// Compares all files with the index, reads those that changed, and returns the new state. It is exact: a change
    /// that ended before this call is in the view, unless its [state](View::state) says otherwise.
    ///
    /// Blocks; must not be called in the asynchronous runtime.
    pub(crate) fn refresh(&self, ask: &Ask<'_>) -> Result<View<F>, FileError> {
        let shelf = self.shelf(ask);
        let mut held = shelf.hold(ask.stop)?;
        let state = held.state.as_mut().expect("it is held");
        if !state.is_loaded {
            state.is_loaded = true;
            state.view = self.load(&shelf);
        }
        let begun = Instant::now();
        if state.view.is_fresh(&self.options) {
            return Ok(state.view.reused());
        }
        let (view, work) = pass::refresh(&self.workspace, &self.options, &state.view, ask)?;
        state.view = view;
        state.unsaved += work + state.view.take_work();
        if state.unsaved > SAVED_AT_ONCE {
            self.save_if_due(&shelf, state);
        }
        tracing::debug!(files = state.view.len(), elapsed_ms = begun.elapsed().as_millis() as u64, "index refreshed");
        Ok(state.view.again())
    }

    /// Writes a snapshot, if what was made since the last one is worth the time. Called when a question was answered.
    pub(crate) fn keep(&self, ask: &Ask<'_>) {
        let shelf = self.shelf(ask);
        let Ok(mut held) = shelf.hold(ask.stop) else { return };
        let state = held.state.as_mut().expect("it is held");
        state.unsaved += state.view.take_work();
        self.save_if_due(&shelf, state);
    }

    /// Returns the state at the last question of this tenant under these rules, if there was one in this process and no
    /// thread works on it now.
    pub(crate) fn known(&self, tenant: Option<&str>, rules: &FileRules) -> Option<IndexState> {
        let (_, key) = self.keys(tenant, rules);
        let shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        let shelf = shelves.iter().find(|shelf| shelf.key == key)?;
        let state = shelf.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.as_ref().filter(|state| state.is_loaded).map(|state| state.view.state())
    }

    /// Returns the shelf of a question, which is made if there is none.
    fn shelf(&self, ask: &Ask<'_>) -> Arc<Shelf<F>> {
        let (place, key) = self.keys(ask.tenant, ask.guard.rules());
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        let shelf = match shelves.iter().position(|shelf| shelf.key == key) {
            Some(place) => shelves.remove(place),
            None => Arc::new(Shelf::new(place, key)),
        };
        shelves.insert(0, shelf.clone());
        shelves.truncate(SHELVES_MAX);
        shelf
    }

    /// Returns the hash of what names the snapshot, and of all that decides which files are in the index.
    fn keys(&self, tenant: Option<&str>, rules: &FileRules) -> (blake3::Hash, blake3::Hash) {
        let hash = |parts: &[Option<&[u8]>]| {
            let mut hasher = blake3::Hasher::new();
            for part in parts {
                hasher.update(&part.map_or(u64::MAX, |part| part.len() as u64).to_le_bytes());
                hasher.update(part.unwrap_or_default());
            }
            hasher.finalize()
        };
        let root = self.workspace.path().as_os_str().as_encoded_bytes();
        let options = format!("{} {}", self.options.name, self.options.ignored);
        let place = hash(&[Some(root), Some(options.as_bytes()), tenant.map(str::as_bytes)]);
        // Protected files are shown, so they decide nothing here. They also depend on the folder a command starts in.
        let rules = format!("{:?}", (&rules.hidden, &rules.shown, &rules.own));
        (place, hash(&[Some(place.as_bytes()), Some(rules.as_bytes())]))
    }
}

impl<F> Shelf<F> {
    fn new(place: blake3::Hash, key: blake3::Hash) -> Self {
        let state =
            ShelfState { view: View::empty(), is_loaded: false, unsaved: Duration::ZERO, last_save: Duration::ZERO };
        Self { place, key, state: Mutex::new(Some(state)), given_back: Condvar::new() }
    }

    /// Takes the state, as soon as no other thread works on it.
    fn hold(&self, stop: &CancellationToken) -> Result<HeldShelf<'_, F>, FileError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(state) = state.take() {
                return Ok(HeldShelf { shelf: self, state: Some(state) });
            }
            if stop.is_cancelled() {
                return Err(FileError::Stopped);
            }
            let wait = self.given_back.wait_timeout(state, Duration::from_millis(20));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A shelf that one thread works on. It is given back on drop, also by a panic.
struct HeldShelf<'a, F> {
    shelf: &'a Shelf<F>,
    state: Option<ShelfState<F>>,
}

impl<F> Drop for HeldShelf<'_, F> {
    fn drop(&mut self) {
        *self.shelf.state.lock().unwrap_or_else(PoisonError::into_inner) = self.state.take();
        self.shelf.given_back.notify_one();
    }
}

//! The snapshot of an index on disk: derived data that may be deleted at any time.
//!
//! A snapshot is written to a temporary file that takes the place of the old one, so readers see a whole one, and of
//! two processes that write at once the last wins. It carries its key and a checksum; one that is torn, older or of
//! another folder is not used. After it is read, every file is compared with it as with the index in memory.

use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use blake3::Hash;
use serde::{Deserialize, Serialize};

use super::entry::{Entry, FactsState, Identity, Words};
use super::pass::renumbered;
use super::vocabulary::StoredVocabulary;
use super::{FileFacts, Index, Shelf, ShelfState, SkipReason, View, Vocabulary};

/// The first bytes of a snapshot. The number is the version of the form below.
const MAGIC: &[u8; 16] = b"wieldy index 01\n";
/// Maximum size of a snapshot that is read, in bytes.
const BYTES_MAX: u64 = 1024 * 1024 * 1024;
/// A snapshot is written when the work since the last one took this many times as long as that one.
const WORK_PER_SAVE: u32 = 4;
/// Snapshots that were not written for so long are removed.
const KEPT: Duration = Duration::from_secs(30 * 24 * 3600);
/// Temporary files of killed processes are removed at this age.
const TEMPORARY_KEPT: Duration = Duration::from_secs(3600);

/// A snapshot without its head.
#[derive(Serialize, Deserialize)]
struct Stored {
    vocabulary: StoredVocabulary,
    entries: Vec<StoredEntry>,
}

/// A file in a snapshot.
#[derive(Serialize, Deserialize)]
struct StoredEntry {
    path: Vec<u8>,
    identity: Identity,
    read_at: i128,
    hash: Option<[u8; 32]>,
    words: Words,
    skipped: Option<SkipReason>,
    facts: StoredFacts,
}

#[derive(Serialize, Deserialize)]
enum StoredFacts {
    Unmade,
    Made(Vec<u8>),
    Skipped(SkipReason),
}

/// The reason not to use a snapshot.
#[derive(Debug, thiserror::Error)]
enum SnapshotError {
    #[error("cannot read it")]
    Io(#[from] io::Error),
    #[error("it is of another version, or no snapshot")]
    Foreign,
    #[error("it is of another folder, tenant or set of file rules")]
    OtherKey,
    #[error("it is torn: its checksum does not fit")]
    Torn,
    #[error("it holds what no index has")]
    Malformed,
}

impl<F: FileFacts> Index<F> {
    /// Returns the state of the snapshot, or an empty one.
    pub(super) fn load(&self, shelf: &Shelf<F>) -> View<F> {
        let Some(path) = self.snapshot_path(shelf) else { return View::empty() };
        match read::<F>(&path, &shelf.key) {
            Ok((entries, vocabulary)) => View::new(entries, Arc::new(vocabulary), Arc::default()),
            Err(SnapshotError::Io(error)) if error.kind() == io::ErrorKind::NotFound => View::empty(),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, path = %path.display(), "a snapshot of an index is not used and made anew");
                View::empty()
            }
        }
    }

    /// Writes a snapshot, if there is enough new in the state to be worth the time.
    pub(super) fn save_if_due(&self, shelf: &Shelf<F>, state: &mut ShelfState<F>) {
        let Some(path) = self.snapshot_path(shelf) else { return };
        if state.unsaved <= self.options.save_after.max(state.last_save * WORK_PER_SAVE) {
            return;
        }
        let begun = Instant::now();
        if let Err(error) = write(&path, &shelf.key, &state.view) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, path = %path.display(), "the snapshot of an index cannot be written");
        }
        (state.unsaved, state.last_save) = (Duration::ZERO, begun.elapsed());
    }

    /// Returns the place of a snapshot: one file for a root and a tenant. Its key has the file rules too, so a snapshot
    /// that was made under other rules is replaced.
    fn snapshot_path(&self, shelf: &Shelf<F>) -> Option<PathBuf> {
        let name = format!("{}-{}-{}.idx", &shelf.place.to_hex()[..32], self.options.name, F::FORM);
        Some(self.folder.as_ref()?.join(name))
    }
}

/// Reads a snapshot and checks everything in it.
fn read<F: FileFacts>(path: &Path, key: &Hash) -> Result<Contents<F>, SnapshotError> {
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(SnapshotError::Foreign);
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(SnapshotError::Foreign);
    }
    let rest = bytes.strip_prefix(MAGIC).ok_or(SnapshotError::Foreign)?;
    let (form, rest) = rest.split_first_chunk().ok_or(SnapshotError::Torn)?;
    let (of_key, rest) = rest.split_first_chunk::<32>().ok_or(SnapshotError::Torn)?;
    let (checksum, body) = rest.split_first_chunk::<32>().ok_or(SnapshotError::Torn)?;
    if u32::from_le_bytes(*form) != F::FORM {
        return Err(SnapshotError::Foreign);
    }
    if of_key != key.as_bytes() {
        return Err(SnapshotError::OtherKey);
    }
    if blake3::hash(body) != Hash::from_bytes(*checksum) {
        return Err(SnapshotError::Torn);
    }
    let stored: Stored = postcard::from_bytes(body).map_err(|_| SnapshotError::Malformed)?;
    contents(stored).ok_or(SnapshotError::Malformed)
}

/// Checks what was read: a checksum shows that a file is whole, and not that it holds what an index has.
fn contents<F: FileFacts>(stored: Stored) -> Option<Contents<F>> {
    let vocabulary = Vocabulary::from_stored(&stored.vocabulary)?;
    let entries: Option<Vec<_>> = stored.entries.into_iter().map(|entry| entry.checked(vocabulary.len())).collect();
    let entries = entries?;
    let is_sorted = entries.windows(2).all(|pair: &[Arc<Entry<F>>]| pair[0].path < pair[1].path);
    is_sorted.then(|| (entries.into(), vocabulary))
}

type Contents<F> = (Arc<[Arc<Entry<F>>]>, Vocabulary);

impl StoredEntry {
    fn of<F: FileFacts>(entry: &Entry<F>) -> Self {
        let facts = match &*entry.facts() {
            FactsState::Unmade => StoredFacts::Unmade,
            FactsState::Stored(bytes) => StoredFacts::Made(bytes.to_vec()),
            FactsState::Made(facts) => postcard::to_allocvec(&**facts).map_or(StoredFacts::Unmade, StoredFacts::Made),
            FactsState::Skipped(reason) => StoredFacts::Skipped(*reason),
        };
        Self {
            path: entry.path.as_os_str().as_bytes().to_owned(),
            identity: entry.identity,
            read_at: entry.read_at,
            hash: entry.hash.map(Into::into),
            words: entry.words.clone(),
            skipped: entry.skipped,
            facts,
        }
    }

    fn checked<F: FileFacts>(self, words_max: usize) -> Option<Arc<Entry<F>>> {
        let path = PathBuf::from(std::ffi::OsString::from_vec(self.path));
        let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)));
        let list = self.words.list();
        let is_sorted = list.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let is_known = list.last().is_none_or(|(number, _)| (*number as usize) < words_max);
        if !(is_plain && is_sorted && is_known) || path.as_os_str().is_empty() {
            return None;
        }
        let hash = self.hash.map(Hash::from_bytes);
        let entry = Entry::new(path, (self.identity, self.read_at), hash, self.words, self.skipped);
        entry.set_facts(match self.facts {
            StoredFacts::Unmade => FactsState::Unmade,
            StoredFacts::Made(bytes) => FactsState::Stored(bytes.into()),
            StoredFacts::Skipped(reason) => FactsState::Skipped(reason),
        });
        Some(Arc::new(entry))
    }
}

/// Writes a snapshot in the place of the old one.
fn write<F: FileFacts>(path: &Path, key: &Hash, view: &View<F>) -> io::Result<()> {
    let folder = path.parent().expect("it is in the folder for snapshots");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    sweep(folder);
    // Words of files that are gone, or hidden by now, are left out.
    let live = renumbered(&view.entries, &view.vocabulary);
    let (entries, vocabulary) = live.unwrap_or_else(|| (view.entries.clone(), view.vocabulary.clone()));
    let entries = entries.iter().map(|entry| StoredEntry::of(entry)).collect();
    let stored = Stored { vocabulary: vocabulary.stored(), entries };
    let body = postcard::to_allocvec(&stored).map_err(io::Error::other)?;
    let temporary = folder.join(format!(".{:016x}.tmp", RandomState::new().hash_one(std::process::id())));
    let written = write_new::<F>(&temporary, key, &body).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn write_new<F: FileFacts>(path: &Path, key: &Hash, body: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let head = [MAGIC.as_slice(), &F::FORM.to_le_bytes(), key.as_bytes(), blake3::hash(body).as_bytes()].concat();
    // It is not synced: after a power cut, the checksum shows that it is torn.
    file.write_all(&head).and_then(|()| file.write_all(body))
}

/// Removes snapshots that are not used any more, and the temporary files of killed processes.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let kept = match name.as_bytes() {
            name if name.ends_with(b".idx") => KEPT,
            name if name.ends_with(b".tmp") => TEMPORARY_KEPT,
            _ => continue,
        };
        let modified = entry.metadata().and_then(|metadata| metadata.modified()).ok();
        let age = modified.and_then(|modified| SystemTime::now().duration_since(modified).ok());
        if age.is_some_and(|age| age > kept) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

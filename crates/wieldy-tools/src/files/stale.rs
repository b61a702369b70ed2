//! Staleness: records the content of files that a session has seen, so that no change is based on an old version.

use std::num::NonZeroUsize;
use std::sync::Mutex;

use blake3::{Hash, Hasher};
use lru::LruCache;
use wieldy_core::{Caller, Run};

use super::error::FileError;
use super::workspace::{FileLocation, Workspace};

/// Maximum number of recorded files. Beyond it, the least recently used ones are dropped, and count as never read.
const FILES_MAX: NonZeroUsize = NonZeroUsize::new(10_000).expect("not zero");

/// The content of files as sessions last saw it, by reading or writing.
pub(crate) struct ReadLog {
    seen: Mutex<LruCache<FileKey, Hash>>,
}

/// A hash of a session and a file, so that an entry has the same size however long the names are.
type FileKey = [u8; 32];

impl ReadLog {
    pub(crate) fn new() -> Self {
        Self { seen: Mutex::new(LruCache::new(FILES_MAX)) }
    }

    /// Returns the content that the caller's session last saw of the file, if any.
    pub(crate) fn seen(&self, caller: &Caller, file: &str) -> Option<Hash> {
        self.with(|seen| seen.get(&key(caller, file)).copied())
    }

    /// Records the content that the caller's session sees now, and returns the one before.
    pub(crate) fn note(&self, caller: &Caller, file: &str, hash: Hash) -> Option<Hash> {
        self.with(|seen| seen.put(key(caller, file), hash))
    }

    /// Removes the record of a deleted file.
    pub(crate) fn forget(&self, caller: &Caller, file: &str) -> Option<Hash> {
        self.with(|seen| seen.pop(&key(caller, file)))
    }

    fn with<T>(&self, look: impl FnOnce(&mut LruCache<FileKey, Hash>) -> T) -> T {
        look(&mut self.seen.lock().expect("no code panics while it holds the log"))
    }
}

/// Returns the key of the caller's session or, without one, of its agent. Sessions of different tenants never mix.
fn key(caller: &Caller, file: &str) -> FileKey {
    let mut hasher = Hasher::new();
    let (kind, name) = match &caller.session {
        Some(session) => ("session", session),
        None => ("agent", &caller.agent),
    };
    let tenant = caller.tenant.as_deref();
    for part in [if tenant.is_some() { "tenant" } else { "none" }, tenant.unwrap_or_default(), kind, name, file] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Refuses to touch a file that has changed since the caller's session last saw it.
pub(crate) fn refuse_stale(
    workspace: &Workspace,
    run: &Run,
    place: &FileLocation,
    current: Hash,
) -> Result<(), FileError> {
    match workspace.reads.seen(run.caller(), &place.key) {
        Some(seen) if seen != current => {
            run.source_stale(&place.key, &seen.to_string(), Some(&current.to_string()));
            Err(FileError::Stale { path: place.key.clone() })
        }
        _ => Ok(()),
    }
}

/// Reports once that a file which the session saw is gone.
pub(crate) fn note_gone(workspace: &Workspace, run: &Run, file: &str) {
    if let Some(seen) = workspace.reads.forget(run.caller(), file) {
        run.source_stale(file, &seen.to_string(), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_have_separate_records_and_the_log_is_bounded() {
        let log = ReadLog::new();
        let ada = Caller { session: Some("1".into()), ..Caller::local() };
        let others = [
            Caller { session: Some("2".into()), ..ada.clone() },
            Caller { session: None, ..ada.clone() },
            Caller { tenant: Some("acme".into()), ..ada.clone() },
            Caller { session: None, ..Caller::agent("1") },
        ];
        let (first, second) = (blake3::hash(b"first"), blake3::hash(b"second"));
        assert_eq!(log.note(&ada, "a.txt", first), None);
        assert_eq!(log.note(&ada, "a.txt", second), Some(first));
        for other in &others {
            assert_eq!(log.seen(other, "a.txt"), None, "{other:?}");
        }
        for number in 0..FILES_MAX.get() {
            log.note(&ada, &number.to_string(), first);
        }
        assert_eq!(log.seen(&ada, "a.txt"), None, "the oldest is forgotten");
        assert_eq!((log.forget(&ada, "9"), log.seen(&ada, "9")), (Some(first), None));
    }
}

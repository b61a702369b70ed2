//! Checks before every command that each masked path is still the file that was masked.
//!
//! A mount masks a file, not a name. Replacing a file changes the folder that it is in, and there are far fewer folders
//! than files, so the folders are checked first.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::placeholders::Placeholder;
use super::placeholders::host_view::{Stamp, is_long_ago, stamp_of};
use super::plan::{self, Step};

/// A masked path, and the device and inode of the file that was masked there, if there was one.
pub(crate) type MaskedPath = (PathBuf, Option<(u64, u64)>);

/// Returns the paths that the steps hide or protect, with the files that are there now.
pub(crate) fn masked_by(steps: &[Step]) -> Vec<MaskedPath> {
    plan::masked(steps).into_iter().map(|path| (path.clone(), file_id(&path))).collect()
}

/// Returns true if every masked path still has the same file. When a file is replaced, as editors do, the mask is lost
/// with the old file and the new one can be read.
pub(crate) fn are_unchanged(masked: &[MaskedPath]) -> bool {
    masked.iter().all(|(path, id)| file_id(path) == *id)
}

pub(crate) fn file_id(path: &Path) -> Option<(u64, u64)> {
    let found = rustix::fs::lstat(path).ok()?;
    Some((found.st_dev, found.st_ino))
}

/// The masked paths of a sandbox, with a cache of checks.
pub(crate) struct Masked {
    all: Vec<MaskedPath>,
    /// The folders that contain the masked paths, each once.
    folders: Vec<PathBuf>,
    /// The stamps of the folders at the last successful check, if any later change would give other stamps.
    seen: Mutex<Option<Vec<Stamp>>>,
}

impl Masked {
    pub(crate) fn new(all: Vec<MaskedPath>) -> Self {
        let mut folders: Vec<_> = all.iter().filter_map(|(path, _)| path.parent().map(Path::to_owned)).collect();
        folders.sort_unstable();
        folders.dedup();
        Self { all, folders, seen: Mutex::default() }
    }

    /// Returns true if every masked path still has the same file.
    pub(crate) fn are_unchanged(&self) -> bool {
        // Read before the files: a file that is replaced meanwhile is found the next time.
        let now: Option<Vec<Stamp>> = self.folders.iter().map(|folder| folder_stamp(folder)).collect();
        if now.is_some() && *self.seen() == now {
            return true;
        }
        let same = are_unchanged(&self.all);
        let settled =
            |now: Vec<Stamp>| self.folders.iter().zip(now).map(|(folder, now)| settled(folder, now)).collect();
        *self.seen() = now.filter(|_| same).and_then(settled);
        same
    }

    /// Returns the first path whose file was replaced.
    pub(crate) fn replaced(&self) -> Option<PathBuf> {
        self.all.iter().find(|(path, id)| file_id(path) != *id).map(|(path, _)| path.clone())
    }

    /// Returns the masked paths with the placeholders as the files that they are now, or without placeholders if these
    /// are removed for the time being.
    pub(crate) fn with_placeholders(&self, placeholders: &[Placeholder], are_there: bool) -> Self {
        let is_placeholder = |path: &Path| placeholders.iter().any(|held| held.path == path);
        let lasting = self.all.iter().filter(|(path, _)| !is_placeholder(path)).cloned();
        let there = placeholders.iter().filter(|_| are_there).map(|held| (held.path.clone(), file_id(&held.path)));
        Self::new(lasting.chain(there).collect())
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Option<Vec<Stamp>>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the stamp of a path's target, unlike [`stamp`](crate::view::placeholders::host_view::stamp): masked paths
/// may be reached through links.
pub(crate) fn folder_stamp(folder: &Path) -> Option<Stamp> {
    fs::metadata(folder).ok().map(|found| stamp_of(&found))
}

/// Returns the stamp of a folder, if any change in the folder from now on gives it another one.
pub(crate) fn settled(folder: &Path, stamp: Stamp) -> Option<Stamp> {
    let (_, (seconds, _)) = stamp;
    (is_long_ago(seconds) && keeps_times(folder)).then_some(stamp)
}

/// Returns true if a folder is on a local file system. On network and FUSE file systems, a folder's content may change
/// without its time.
fn keeps_times(folder: &Path) -> bool {
    const BTRFS: i64 = 0x9123_683e;
    const EXT: i64 = 0xef53;
    const F2FS: i64 = 0xf2f5_2010;
    const OVERLAY: i64 = 0x794c_7630;
    const TMPFS: i64 = 0x0102_1994;
    const XFS: i64 = 0x5846_5342;
    const ZFS: i64 = 0x2fc1_2fc1;
    let known = [BTRFS, EXT, F2FS, OVERLAY, TMPFS, XFS, ZFS];
    rustix::fs::statfs(folder).is_ok_and(|found| known.contains(&found.f_type))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Returns masked paths whose folders were changed so long ago that their stamps are cached.
    fn masked(root: &Path, names: &[&str]) -> Masked {
        let masked =
            Masked::new(names.iter().map(|name| root.join(name)).map(|path| (path.clone(), file_id(&path))).collect());
        while masked.seen().is_none() {
            assert!(masked.are_unchanged());
            std::thread::yield_now();
        }
        masked
    }

    fn replace(path: &Path) {
        let new = path.with_extension("new");
        fs::write(&new, "").unwrap();
        fs::rename(new, path).unwrap();
    }

    #[test]
    fn replaced_files_are_detected_also_if_only_folders_are_checked() {
        let world = tempfile::tempdir().unwrap();
        let root = world.path();
        for folder in ["a/b", "c"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in ["one", "a/two", "a/b/three", "c/four"] {
            fs::write(root.join(file), "").unwrap();
        }
        symlink("c", root.join("link")).unwrap();
        let names = ["one", "a/two", "a/b/three", "link/four", "c/missing"];
        let all = masked(root, &names);
        let stamps = || all.seen().clone();
        let (before, replaced) = (stamps(), Masked::replaced);
        assert!(all.are_unchanged());
        // A change of a file's content is not noticed. A new file beside it only drops the cached stamps.
        fs::write(root.join("one"), "changed").unwrap();
        assert!(all.are_unchanged() && stamps() == before);
        fs::write(root.join("a/beside"), "").unwrap();
        assert!(all.are_unchanged() && stamps().is_none());

        let one = masked(root, &["one"]);
        replace(&root.join("one"));
        assert_eq!((one.are_unchanged(), replaced(&one)), (false, Some(root.join("one"))));
        assert!(!one.are_unchanged(), "nor is it forgotten");

        // A replaced folder on the way, a replaced target of a link on the way, and a file that was missing.
        let three = masked(root, &["a/b/three"]);
        fs::rename(root.join("a/b"), root.join("a/old")).unwrap();
        fs::create_dir(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/three"), "").unwrap();
        assert!(!three.are_unchanged());
        let four = masked(root, &["link/four"]);
        replace(&root.join("c/four"));
        assert!(!four.are_unchanged());
        let missing = masked(root, &["c/missing"]);
        fs::write(root.join("c/missing"), "").unwrap();
        assert!(!missing.are_unchanged());
        fs::remove_file(root.join("c/missing")).unwrap();
        assert!(missing.are_unchanged());
    }

    #[test]
    fn a_folder_that_changed_just_now_is_not_relied_on() {
        let world = tempfile::tempdir().unwrap();
        let path = world.path().join("one");
        fs::write(&path, "").unwrap();
        let one = Masked::new(vec![(path.clone(), file_id(&path))]);
        assert!(one.are_unchanged());
        assert_eq!(*one.seen(), None);
    }

    #[test]
    fn a_file_system_that_may_not_keep_times_is_not_relied_on() {
        let long_ago = ((1, 2), (3, 4));
        let world = tempfile::tempdir().unwrap();
        let folders = [world.path(), Path::new("/proc"), Path::new("/nowhere")];
        assert_eq!(folders.map(|folder| settled(folder, long_ago)), [Some(long_ago), None, None]);
    }
}

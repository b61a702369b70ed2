//! State folders of executors on the host, with the files of their containers and guests, and the removal of those that
//! dead executors left.
//!
//! A folder is locked as long as its executor lives; the kernel releases the lock at any kind of death. An executor
//! that gets the lock of another one's folder knows that this executor is dead.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::mount::{UnmountFlags, unmount};
use wieldy_core::Level;

use crate::private_disk::remove_tree;

/// The state folder of one level of an executor, removed with its content on drop.
pub(crate) struct StateDir {
    folder: PathBuf,
    /// Cgroup folders that only the runtime made, above those of its containers.
    foreign_groups: Mutex<BTreeSet<PathBuf>>,
    _lock: File,
}

impl StateDir {
    /// Makes a state folder below `state` for the sandboxes of `level`.
    pub(crate) fn make(state: &Path, level: &str) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(state)?;
        const TRIES_MAX: usize = 1000;
        for number in 0..TRIES_MAX {
            let folder = state.join(format!("{level}-{}-{number}", std::process::id()));
            match fs::DirBuilder::new().mode(0o700).create(&folder) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            // Between the two calls another executor could take us for dead and remove the folder.
            if let Ok(lock) = locked(&folder) {
                for inner in ["containers", "lent", "runtime"] {
                    fs::DirBuilder::new().mode(0o711).create(folder.join(inner))?;
                }
                return Ok(Self { folder, foreign_groups: Mutex::default(), _lock: lock });
            }
        }
        Err(io::Error::other(format!("all names in `{}` are taken", state.display())))
    }

    /// Returns the state folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder in which the runtime stores the state of its containers.
    pub(crate) fn runtime(&self) -> PathBuf {
        self.folder.join("runtime")
    }

    /// Returns the folder of one container's files.
    pub(crate) fn container(&self, id: &str) -> PathBuf {
        self.folder.join("containers").join(id)
    }

    /// Returns the path to mount a host folder at that a container gets. It is apart from all other files, so that no
    /// removal walks into it.
    pub(crate) fn lent(&self, id: &str, number: usize) -> PathBuf {
        self.folder.join("lent").join(format!("{id}-{number}"))
    }

    /// Notes cgroups that only the runtime made, to remove them at the end.
    pub(crate) fn note_groups(&self, above: impl Iterator<Item = PathBuf>) {
        self.foreign_groups.lock().unwrap_or_else(PoisonError::into_inner).extend(above);
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        let foreign = self.foreign_groups.lock().unwrap_or_else(PoisonError::into_inner);
        foreign.iter().for_each(|folder| drop(fs::remove_dir(folder)));
        clear(&self.folder);
    }
}

/// Removes the folders that dead executors left in `state`, and returns their number. Calls `forget` first, which ends
/// the sandboxes of a folder; if it returns false, the folder stays.
pub(crate) fn sweep_folder(state: &Path, forget: impl Fn(Level, &Path) -> bool) -> usize {
    let entries = fs::read_dir(state).into_iter().flatten().flatten();
    let dirs = entries.filter_map(|entry| Some((entry.path(), level_of(entry.file_name().to_str()?)?)));
    dirs.filter(|(dir, level)| sweep_one(dir, || forget(*level, dir))).count()
}

fn sweep_one(folder: &Path, forget: impl FnOnce() -> bool) -> bool {
    let Ok(_lock) = locked(folder) else { return false };
    if !forget() {
        return false;
    }
    clear(folder);
    !folder.exists()
}

/// Unmounts the host folder at a path, and removes the empty mount point. Never removes content: while mounted, it is a
/// user's workspace.
pub(crate) fn give_back(path: &Path) {
    while unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_ok() {}
    let _ = fs::remove_dir(path).or_else(|_| remove_empty_file(path));
}

fn remove_empty_file(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    if found.is_file() && found.len() == 0 { fs::remove_file(path) } else { Ok(()) }
}

fn clear(folder: &Path) {
    let lent = folder.join("lent");
    fs::read_dir(&lent).into_iter().flatten().flatten().for_each(|entry| give_back(&entry.path()));
    // If something is still mounted, its mount point stays, and the state folder with it.
    if fs::remove_dir(&lent).is_ok() || !lent.exists() {
        let _ = remove_tree(folder);
    }
}

/// Returns the level if this is the name of a state folder: `<level>-<process>-<number>`.
fn level_of(name: &str) -> Option<Level> {
    let mut parts = name.split('-');
    let (level, process, number) = (parts.next()?, parts.next()?, parts.next()?);
    let is_state_dir = process.parse::<u32>().is_ok() && number.parse::<usize>().is_ok() && parts.next().is_none();
    level.parse().ok().filter(|_| is_state_dir)
}

/// Opens and locks a folder; fails if the path has another folder by then.
fn locked(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let (held, named) = (file.metadata()?, fs::metadata(folder)?);
    if (held.dev(), held.ino()) == (named.dev(), named.ino()) {
        return Ok(file);
    }
    Err(io::Error::other("the folder was replaced"))
}

/// Removes a folder as soon as it is empty: what is held in it goes with the container, which is removed in the
/// background.
pub(crate) async fn remove_emptied(folder: &Path) {
    const TRIES: usize = 500;
    for _ in 0..TRIES {
        match std::fs::remove_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            _ => break,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_whose_driver_lives_is_left_alone_and_one_whose_driver_is_gone_is_removed() {
        let state = tempfile::tempdir().unwrap();
        let dir = StateDir::make(state.path(), "runc").unwrap();
        let dead = ["runc-4000000000-0", "gvisor-4000000000-0"].map(|name| state.path().join(name));
        dead.iter().for_each(|dead| fs::create_dir_all(dead.join("containers")).unwrap());
        fs::create_dir(state.path().join("runc-of-somebody")).unwrap();
        assert_eq!(sweep_folder(state.path(), |_, _| true), 2);
        assert!(dir.runtime().exists() && state.path().join("runc-of-somebody").exists());
        assert_eq!(dead.map(|dead| dead.exists()), [false; 2]);
        drop(dir);
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), 1);
    }
}

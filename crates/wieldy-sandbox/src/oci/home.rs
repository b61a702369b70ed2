//! The folder in which a driver keeps its containers' files, and the removal of what dead executors left in theirs.
//!
//! A home is locked as long as its driver lives, and the kernel unlocks it however the driver dies. Whoever comes next and can lock it
//! knows that nobody lives there any more.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, flock};
use wieldy_core::Level;

use super::groups::{above, noted};
use super::owners::give_back;
use super::runtime::installed;
use super::site::let_go;
use crate::cgroup::Hierarchy;

/// A driver's own folder; what is in it goes with it.
pub(crate) struct Home {
    folder: PathBuf,
    /// Folders of control groups that only the runtime has made, above all those of its containers.
    foreign_groups: Mutex<BTreeSet<PathBuf>>,
    _lock: File,
}

impl Home {
    /// Makes a home below `state` for containers of the runtime `level`.
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
            // Between the two calls somebody could take us for dead and remove the folder.
            if let Ok(lock) = locked(&folder) {
                for inner in ["containers", "lent", "runtime"] {
                    fs::DirBuilder::new().mode(0o711).create(folder.join(inner))?;
                }
                return Ok(Self { folder, foreign_groups: Mutex::default(), _lock: lock });
            }
        }
        Err(io::Error::other(format!("all names in `{}` are taken", state.display())))
    }

    /// Where the runtime keeps what it knows of its containers.
    pub(super) fn runtime(&self) -> PathBuf {
        self.folder.join("runtime")
    }

    /// The files of one container.
    pub(crate) fn container(&self, id: &str) -> PathBuf {
        self.folder.join("containers").join(id)
    }

    /// Where something that is lent to a container can be mounted. Apart from all other files, so that no removal ever walks into it.
    pub(super) fn lent(&self, id: &str, number: usize) -> PathBuf {
        self.folder.join("lent").join(format!("{id}-{number}"))
    }

    /// Notes control groups that only the runtime makes, to remove what is above all of them in the end.
    pub(super) fn note_groups(&self, foreign: &[PathBuf]) {
        let above = foreign.iter().filter_map(|group| above(group).pop());
        self.foreign_groups.lock().unwrap_or_else(PoisonError::into_inner).extend(above);
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let foreign = self.foreign_groups.lock().unwrap_or_else(PoisonError::into_inner);
        foreign.iter().for_each(|folder| drop(fs::remove_dir(folder)));
        clear(&self.folder);
    }
}

/// Removes what executors left of their containers and guests that are gone, where `state` is the folder in which executors keep their own
/// files: those of containers in `oci`, those of guests in `firecracker`. Says of how many executors; where nothing is left, this is but a look.
pub fn sweep(state: &Path) -> usize {
    let folders = ["oci", "firecracker"].map(|folder| state.join(folder));
    let swept = folders.iter().map(|folder| sweep_folder(folder, installed)).sum();
    if swept > 0 {
        // Their control groups are left, too.
        Hierarchy::find().sweep();
    }
    swept
}

/// Removes what dead executors left in a folder of containers and guests of all levels; says of how many executors. The runtime
/// of a level must forget its containers, if it has a program.
pub(crate) fn sweep_folder(folder: &Path, program: impl Fn(Level) -> Option<PathBuf>) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let homes = entries.filter_map(|entry| Some((entry.path(), level_of(entry.file_name().to_str()?)?)));
    homes.filter(|(home, level)| sweep_one(home, || program(*level))).count()
}

fn sweep_one(folder: &Path, program: impl FnOnce() -> Option<PathBuf>) -> bool {
    let Ok(_lock) = locked(folder) else { return false };
    let program = program();
    let runtime = folder.join("runtime");
    let containers = fs::read_dir(folder.join("containers")).into_iter().flatten().flatten();
    for id in containers.map(|entry| entry.file_name()) {
        let_go(&folder.join("containers").join(&id));
        let groups = noted(&runtime.join(&id));
        if let Some(program) = &program {
            let mut delete = Command::new(program);
            delete.arg("--root").arg(&runtime).args(["delete", "--force"]).arg(&id);
            let _ = delete.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        // Only those that are empty go, so none that somebody uses.
        groups.iter().flat_map(|(_, group)| above(group)).for_each(|group| drop(fs::remove_dir(group)));
    }
    clear(folder);
    !folder.exists()
}

fn clear(folder: &Path) {
    let lent = folder.join("lent");
    fs::read_dir(&lent).into_iter().flatten().flatten().for_each(|entry| give_back(&entry.path()));
    // Where something is still lent, its place stays, and the home with it.
    if fs::remove_dir(&lent).is_ok() || !lent.exists() {
        let _ = fs::remove_dir_all(folder);
    }
}

/// The level of a home's driver, if this is the name of a home: `<level>-<process>-<number>`.
fn level_of(name: &str) -> Option<Level> {
    let mut parts = name.split('-');
    let (level, process, number) = (parts.next()?, parts.next()?, parts.next()?);
    let is_home = process.parse::<u32>().is_ok() && number.parse::<usize>().is_ok() && parts.next().is_none();
    level.parse().ok().filter(|_| is_home)
}

/// Locks a folder that is still where it was.
fn locked(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    let (held, named) = (file.metadata()?, fs::metadata(folder)?);
    if (held.dev(), held.ino()) == (named.dev(), named.ino()) {
        return Ok(file);
    }
    Err(io::Error::other("the folder was replaced"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_whose_driver_lives_is_left_alone_and_one_whose_driver_is_gone_is_removed() {
        let state = tempfile::tempdir().unwrap();
        let home = Home::make(state.path(), "runc").unwrap();
        let dead = ["runc-4000000000-0", "gvisor-4000000000-0"].map(|name| state.path().join(name));
        dead.iter().for_each(|dead| fs::create_dir_all(dead.join("containers")).unwrap());
        fs::create_dir(state.path().join("runc-of-somebody")).unwrap();
        assert_eq!(sweep_folder(state.path(), |_| Some("/bin/true".into())), 2);
        assert!(home.runtime().exists() && state.path().join("runc-of-somebody").exists());
        assert_eq!(dead.map(|dead| dead.exists()), [false; 2]);
        drop(home);
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), 1);
    }
}

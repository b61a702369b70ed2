//! Makes executors' groups by name, and removes those whose executor is gone.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FlockOperation, flock};

use super::{explained, folder};

/// An executor's folder, with a lock that shows other executors that this one lives.
pub(super) struct Home {
    pub(super) folder: PathBuf,
    pub(super) lock: File,
}

/// Returns a number that no other executor of this process has. So an executor's folders have the same name in every
/// mount, by which container runtimes find them.
pub(super) fn next_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Makes a folder for this executor below `base`, with a unique name: `wieldy-<process>-<its start>-<number>`.
pub(super) fn make_home(base: &Path, first: usize) -> io::Result<Home> {
    let process = std::process::id();
    let start = start_time(process).unwrap_or(0);
    const TRIES_MAX: usize = 1000;
    for number in first..first + TRIES_MAX {
        let folder = base.join(format!("wieldy-{process}-{start}-{number}"));
        match fs::create_dir(&folder) {
            Ok(()) => {}
            // An executor in another process namespace has this name.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(error) => return Err(error),
        }
        // Between the two calls, an executor that cannot see this process could take it for dead and remove the folder.
        if let Ok(lock) = locked(&folder) {
            return Ok(Home { folder, lock });
        }
        let _ = fs::remove_dir(&folder);
    }
    let problem = io::Error::other("all names are taken");
    Err(explained(&problem, format_args!("make a control group in `{}`", base.display())))
}

/// The maximum number of groups in each mount that are searched for groups of dead executors: every start pays for it.
const SEARCHED_MAX: usize = 64;

/// Removes groups that dead executors left below these folders and around them. Returns the number of these executors.
pub(super) fn sweep(bases: &[PathBuf]) -> usize {
    let mut left: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let searched = bases.iter().flat_map(|base| around(base));
    for entry in searched.filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten() {
        if let Some(name) = entry.file_name().to_str().filter(|name| is_of_dead_process(name)) {
            left.entry(name.to_owned()).or_default().push(entry.path());
        }
    }
    left.values().filter(|folders| remove_home(folders)).count()
}

/// Returns the group, those right below it, and the same for each group above it, the nearest first: a dead executor
/// may have run in any of them.
fn around(base: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for group in base.ancestors().take_while(|folder| folder.join("cgroup.procs").exists()) {
        let is_executors = |folder: &PathBuf| folder.file_name().and_then(|name| executor(name.to_str()?)).is_some();
        let below =
            folder::children(group).into_iter().filter(|child| !base.starts_with(child) && !is_executors(child));
        found.extend(std::iter::once(group.to_owned()).chain(below));
        if found.len() >= SEARCHED_MAX {
            found.truncate(SEARCHED_MAX);
            break;
        }
    }
    found
}

/// Removes the folders of one executor, unless it turns out to live in another process namespace, where we cannot see
/// it.
fn remove_home(folders: &[PathBuf]) -> bool {
    let locks: Vec<File> = folders.iter().filter_map(|folder| locked(folder).ok()).collect();
    if locks.len() != folders.len() || folder::kill(folders).is_err() {
        return false;
    }
    folders.iter().filter(|folder| folder::remove(folder).is_ok()).count() == folders.len()
}

fn locked(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

/// Returns true if this is the name of an executor's group and no process here is that executor.
fn is_of_dead_process(name: &str) -> bool {
    let Some((process, start)) = executor(name) else { return false };
    start_time(process) != Some(start)
}

/// Returns the process and its start from the name of an executor's group.
fn executor(name: &str) -> Option<(u32, u64)> {
    let mut parts = name.strip_prefix("wieldy-")?.split('-');
    let (process, start, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?, parts.next()?);
    (number.parse::<usize>().is_ok() && parts.next().is_none()).then_some((process, start))
}

/// Returns the start of a process, in the kernel's ticks since boot.
fn start_time(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command's name comes first, in parentheses, and may contain any characters.
    let (_, after_name) = status.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_executors_are_taken_for_such() {
        assert_eq!(executor("wieldy-12-345-0"), Some((12, 345)));
        for other in ["wieldy-main", "wieldy-12", "wieldy-12-345", "wieldy-a-1-0", "x-12-345-0", "wieldy-12-345-0-1"] {
            assert_eq!(executor(other), None, "{other}");
        }
    }

    #[test]
    fn groups_around_are_searched_up_to_the_mount_and_not_without_end() {
        let mount = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            fs::create_dir_all(mount.path().join(path)).unwrap();
            fs::write(mount.path().join(path).join("cgroup.procs"), "").unwrap();
        };
        for path in ["m", "m/a", "m/a/wieldy-1-2-0", "m/a/x", "m/b", "m/b/y", "other"] {
            make(path);
        }
        let shown = |base: &str| {
            let found = around(&mount.path().join(base)).into_iter();
            let mut shown: Vec<String> =
                found.map(|path| path.strip_prefix(mount.path()).unwrap().display().to_string()).collect();
            shown.sort_unstable();
            shown
        };
        assert_eq!(shown("m/a"), ["m", "m/a", "m/a/x", "m/b"]);
        assert_eq!(shown("m"), ["m", "m/a", "m/b"]);
        (0..100).for_each(|number| make(&format!("m/n{number}")));
        assert_eq!(shown("m/a").len(), SEARCHED_MAX);
        assert!(shown("m/a").contains(&"m/a".to_owned()), "the nearest are searched first");
    }

    #[test]
    fn a_process_that_lives_is_known_by_its_start() {
        let process = std::process::id();
        let start = start_time(process).unwrap();
        assert!(!is_of_dead_process(&format!("wieldy-{process}-{start}-0")));
        assert!(is_of_dead_process(&format!("wieldy-{process}-{}-0", start + 1)));
        assert!(!is_of_dead_process("wieldy-main"));
    }
}

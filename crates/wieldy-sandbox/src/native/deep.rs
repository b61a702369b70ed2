//! Secrets in the deeper folders of a workspace, found by their names in a walk with bounds.
//!
//! Nearer folders come first, and what a folder holds is remembered until it changes: a walk through what is known is a system call for each
//! folder.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::planned::{Stamp, is_long_ago, stamp};
use super::secrets::{is_deep_secret, is_passed_by};

/// How many folders are looked into. Each costs every new sandbox most of a microsecond.
const FOLDERS_MAX: usize = 256;
/// How deep they are.
pub(crate) const DEPTH_MAX: usize = 4;
/// How much of one folder is looked at: nobody keeps more by hand.
const NAMES_MAX: usize = 10_000;
/// How many folders are remembered.
const KNOWN_MAX: usize = 20_000;

/// What matters of a folder.
#[derive(Default)]
struct Inside {
    folders: Vec<OsString>,
    secrets: Vec<OsString>,
}

type Known = HashMap<PathBuf, (Stamp, Arc<Inside>)>;

/// Secrets in the folders of a workspace. Those at its top are looked for by their whole paths.
pub(crate) fn secrets_below(workspace: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = VecDeque::from([(workspace.to_owned(), 0)]);
    for _ in 0..FOLDERS_MAX {
        let Some((folder, depth)) = waiting.pop_front() else { break };
        let inside = inside(&folder);
        if depth > 0 {
            found.extend(inside.secrets.iter().map(|name| folder.join(name)));
        }
        if depth < DEPTH_MAX {
            waiting.extend(inside.folders.iter().map(|name| (folder.join(name), depth + 1)));
        }
    }
    found
}

/// What is in a folder, as it is known or as it is found to be.
fn inside(folder: &Path) -> Arc<Inside> {
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(stamp) = stamp(folder) else { return Arc::default() };
    if let Some((seen, inside)) = known().get(folder)
        && *seen == stamp
    {
        return Arc::clone(inside);
    }
    let inside = Arc::new(look(folder));
    // What changed just now may change again and look the same.
    if is_long_ago(stamp.1.0) {
        let mut known = known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(folder.to_owned(), (stamp, Arc::clone(&inside)));
    }
    inside
}

fn look(folder: &Path) -> Inside {
    let mut inside = Inside::default();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten().take(NAMES_MAX) {
        let name = entry.file_name();
        let Some(text) = name.to_str() else { continue };
        if is_deep_secret(text) {
            inside.secrets.push(name);
        } else if !is_passed_by(text) && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            inside.folders.push(name);
        }
    }
    inside
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn secrets_are_found_some_folders_deep_and_also_when_they_come_later() {
        let world = tempfile::tempdir().unwrap();
        let root = world.path();
        let write = |name: &str| {
            fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            fs::write(root.join(name), "").unwrap();
        };
        let found = || {
            let mut found = secrets_below(root);
            found.sort();
            found.iter().map(|path| path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        for name in [".env", "a/.env", "a/.env.local", "a/.env.example", "a/env", "a/b/c/d/.netrc", "1/2/3/4/5/.env"] {
            write(name);
        }
        for name in ["node_modules/x/.env", "target/.env", ".git/.env", "a/.ssh/id"] {
            write(name);
        }
        symlink(root.join("a"), root.join("link")).unwrap();
        let wanted = ["a/.env", "a/.env.local", "a/.ssh", "a/b/c/d/.netrc"];
        assert_eq!(found(), wanted);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(3);
        while std::time::Instant::now() < deadline && !is_long_ago(stamp(&root.join("a/b")).unwrap().1.0) {
            std::thread::yield_now();
        }
        // Now they are known.
        assert_eq!([found(), found()], [wanted, wanted]);
        write("a/b/.env");
        fs::remove_file(root.join("a/.env.local")).unwrap();
        assert_eq!(found(), ["a/.env", "a/.ssh", "a/b/.env", "a/b/c/d/.netrc"]);
    }

    #[test]
    fn a_walk_has_an_end() {
        let world = tempfile::tempdir().unwrap();
        for number in 0..FOLDERS_MAX * 2 {
            fs::create_dir(world.path().join(number.to_string())).unwrap();
            fs::write(world.path().join(format!("{number}/.env")), "").unwrap();
        }
        assert_eq!(secrets_below(world.path()).len(), FOLDERS_MAX - 1);
        assert_eq!(secrets_below(&world.path().join("missing")), Vec::<PathBuf>::new());
    }
}

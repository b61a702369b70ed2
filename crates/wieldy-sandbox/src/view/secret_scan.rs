//! Finds secrets in the deeper folders of a workspace by their names, in a walk with bounds.
//!
//! Older folders come first, so folders that commands make later cannot displace older ones. Commands cannot move the
//! older ones either, since the folders above a hidden secret stay where they are. The contents of a folder are cached
//! until it changes: a walk through cached folders takes a system call for each.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use wieldy_core::secrets::{is_deep_secret, is_passed_by};

use super::placeholders::host_view::{Stamp, is_long_ago, stamp_of};

/// The maximum number of folders that are searched. Each costs every new sandbox nearly a microsecond.
const FOLDERS_MAX: usize = 1000;
/// The maximum depth of these folders.
pub(crate) const DEPTH_MAX: usize = 4;
/// The maximum number of cached folders.
const KNOWN_MAX: usize = 20_000;

/// The contents of a folder that matter for the search.
#[derive(Default)]
struct Inside {
    /// Its oldest folders, with their creation times. If the file system has none, folders nearer to the top come
    /// first.
    folders: Vec<(SystemTime, OsString)>,
    secrets: Vec<OsString>,
}

type Known = HashMap<PathBuf, (Stamp, Arc<Inside>)>;

/// Returns secrets in the folders of a workspace, and folders that cannot be read but could be opened by a command: it
/// may have closed them for that. Secrets at the top of the workspace are found by the planner, by their whole paths.
pub(crate) fn secrets_below(workspace: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = BinaryHeap::from([Reverse((UNIX_EPOCH, 0, workspace.to_owned()))]);
    for _ in 0..FOLDERS_MAX {
        let Some(Reverse((_, depth, folder))) = waiting.pop() else { break };
        let Ok(inside) = inside(&folder) else {
            found.push(folder);
            continue;
        };
        if depth > 0 {
            found.extend(inside.secrets.iter().map(|name| folder.join(name)));
        }
        if depth < DEPTH_MAX {
            let folders = inside.folders.iter();
            waiting.extend(folders.map(|(made, name)| Reverse((*made, depth + 1, folder.join(name)))));
        }
    }
    found
}

/// Returns the contents of a folder, cached or new. They are empty if the folder is missing or closed to commands as
/// well.
fn inside(folder: &Path) -> io::Result<Arc<Inside>> {
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let Ok(about) = fs::symlink_metadata(folder) else { return Ok(Arc::default()) };
    let stamp = stamp_of(&about);
    if let Some((seen, inside)) = known().get(folder)
        && *seen == stamp
    {
        return Ok(Arc::clone(inside));
    }
    let inside = match look(folder) {
        Ok(inside) => Arc::new(inside),
        Err(error) if is_no_matter(&error, &about) => Arc::default(),
        Err(error) => return Err(error),
    };
    // A folder that changed just now may change again with the same time.
    if is_long_ago(stamp.1.0) {
        let mut known = known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(folder.to_owned(), (stamp, Arc::clone(&inside)));
    }
    Ok(inside)
}

/// Returns true if an unreadable folder is gone or belongs to another user: commands run as the same user as this
/// process.
fn is_no_matter(error: &io::Error, about: &Metadata) -> bool {
    let is_ours = || about.uid() == rustix::process::geteuid().as_raw();
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => true,
        ErrorKind::PermissionDenied => !is_ours(),
        _ => false,
    }
}

fn look(folder: &Path) -> io::Result<Inside> {
    let mut inside = Inside::default();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(text) = name.to_str() else { continue };
        if is_deep_secret(text) {
            inside.secrets.push(name);
        } else if !is_passed_by(text) && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let made = entry.metadata().and_then(|about| about.created()).unwrap_or(UNIX_EPOCH);
            inside.folders.push((made, name));
        }
    }
    inside.folders.sort_unstable();
    inside.folders.truncate(FOLDERS_MAX);
    Ok(inside)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::view::placeholders::host_view::stamp;

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
        // Now the folders are cached.
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
        let first = secrets_below(world.path());
        assert_eq!(first.len(), FOLDERS_MAX - 1);
        // Folders that are made later change nothing.
        let deep = world.path().join("0/a/b");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join(".env"), "").unwrap();
        for number in 0..FOLDERS_MAX {
            fs::create_dir(world.path().join(format!("!{number}"))).unwrap();
            fs::write(world.path().join(format!("!{number}/.env")), "").unwrap();
        }
        assert_eq!(secrets_below(world.path()), first);
        assert_eq!(secrets_below(&world.path().join("missing")), Vec::<PathBuf>::new());
    }
}

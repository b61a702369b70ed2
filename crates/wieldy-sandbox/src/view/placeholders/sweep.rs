//! Removes placeholders that killed executors left in a workspace: they carry the mark, and no executor has a lock on
//! them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};
use wieldy_core::secrets::{BARE_REPOSITORY, COMMON_FOLDER, PROTECTED, PROTECTED_AT_HOME};

use crate::view::placeholders::{Marked, Placeholder, is_marked, mark, open_plain, remove};

/// The names in a repository that get placeholders where they are missing.
const OF_GIT: [&str; 4] = [COMMON_FOLDER, "config", "config.worktree", "hooks"];

/// The maximum depth of the search for modules; `MODULES_MAX` limits the names in each folder.
const MODULES_DEPTH_MAX: usize = 4;
const MODULES_MAX: usize = 1000;

/// Removes the placeholders that killed executors left in a workspace, and returns their number. `more` are further
/// paths, absolute or in the workspace, that may be placeholders. A placeholder that a sandbox still needs is locked,
/// and stays.
pub fn sweep_placeholders(workspace: &Path, more: &[PathBuf]) -> usize {
    let named = PROTECTED.iter().chain(&PROTECTED_AT_HOME).map(|name| name.path);
    let of_top = BARE_REPOSITORY.into_iter().chain([COMMON_FOLDER]);
    let mut places: Vec<PathBuf> = named.chain(of_top).map(|name| workspace.join(name)).collect();
    places.extend(more.iter().map(|path| workspace.join(path)).filter(|path| path.starts_with(workspace)));
    places_of_git(&workspace.join(".git"), &mut places);
    if BARE_REPOSITORY.iter().all(|name| workspace.join(name).exists()) {
        places_of_git(workspace, &mut places);
    }
    let mut seen = BTreeSet::new();
    let mut swept = 0;
    for place in &places {
        // From the top: the folders above a path may be placeholders, too.
        let mut ways: Vec<&Path> = place.ancestors().take_while(|above| *above != workspace).collect();
        ways.reverse();
        let left = ways.into_iter().find(|way| seen.insert(way.to_path_buf()) && is_marked(way) == Marked::Yes);
        // Only the workspace itself may be reached through links.
        if let Some(inner) = left.and_then(|left| left.strip_prefix(workspace).ok())
            && let Ok(root) = workspace.canonicalize()
        {
            swept += sweep_one(&root.join(inner));
        }
    }
    swept
}

/// Adds the paths of possible placeholders in a repository's own folder, and in those of its modules and work trees.
fn places_of_git(folder: &Path, places: &mut Vec<PathBuf>) {
    places.extend(OF_GIT.map(|name| folder.join(name)));
    for tree in folders_in(&folder.join("worktrees")) {
        places.extend(OF_GIT.map(|name| tree.join(name)));
    }
    modules(&folder.join("modules"), MODULES_DEPTH_MAX, places);
}

fn modules(folder: &Path, depth: usize, places: &mut Vec<PathBuf>) {
    for inner in folders_in(folder) {
        if inner.join("HEAD").exists() {
            places_of_git(&inner, places);
        } else if depth > 0 {
            modules(&inner, depth - 1, places);
        }
    }
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MODULES_MAX);
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

/// Removes an unchanged placeholder that no executor has a lock on, and those in it. Returns their number.
fn sweep_one(path: &Path) -> usize {
    let Some(content) = mark(path).and_then(|content| String::from_utf8(content).ok()) else { return 0 };
    let Ok(file) = open_plain(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY).map(File::from) else {
        return 0;
    };
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return 0;
    }
    let Ok(found) = file.metadata() else { return 0 };
    let mut swept = 0;
    if found.is_dir() {
        let inner = fs::read_dir(path).into_iter().flatten().flatten().take(MODULES_MAX);
        swept += inner.map(|entry| sweep_one(&entry.path())).sum::<usize>();
    }
    let place = Placeholder { path: path.to_owned(), content: (!found.is_dir()).then_some(content) };
    // A placeholder that a person has written into stays. This is no error.
    let is_gone = (found.is_dir() || found.is_file()) && remove(&place).is_ok() && path.symlink_metadata().is_err();
    swept + usize::from(is_gone)
}

#[cfg(test)]
mod tests {
    use rustix::fs::XattrFlags;
    use wieldy_core::secrets::PLACEHOLDER_MARK;

    use super::*;
    use crate::view::placeholders::make;

    fn put(root: &Path, path: &str, content: Option<&str>) -> PathBuf {
        let path = root.join(path);
        assert!(make(&Placeholder { path: path.clone(), content: content.map(Into::into) }).unwrap());
        path
    }

    #[test]
    fn unused_placeholders_are_removed_and_everything_else_stays() {
        let world = tempfile::tempdir().unwrap();
        let root = world.path().canonicalize().unwrap();
        let probe = put(&root, "refs", Some(""));
        if is_marked(&probe) != Marked::Yes {
            wieldy_testkit::skip("the file system keeps no extended attributes");
            return;
        }
        fs::create_dir_all(root.join("sub/.git/modules/a/b")).unwrap();
        for (path, content) in [
            (".git", None),
            (".git/hooks", None),
            (".git/commondir", Some(".\n")),
            (".mcp.json", Some("{\"mcpServers\":{}}\n")),
            (".config", None),
            (".config/git", None),
            ("Makefile.toml", Some("")),
        ] {
            put(&root, path, content);
        }
        // A placeholder of a running sandbox, one with a person's content, one with a person's file in it, and a
        // person's own files.
        let locked = File::open(put(&root, ".wieldy", None)).unwrap();
        rustix::fs::flock(&locked, FlockOperation::NonBlockingLockShared).unwrap();
        fs::write(put(&root, "wieldy.toml", Some("")), "mine").unwrap();
        fs::write(put(&root, ".vscode", None).join("settings.json"), "mine").unwrap();
        fs::create_dir(root.join(".idea")).unwrap();
        fs::write(root.join("opencode.json"), "").unwrap();
        assert_eq!(sweep_placeholders(&root, &["Makefile.toml".into(), "/elsewhere".into()]), 8);
        let mut left: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort_unstable();
        assert_eq!(left, [".idea", ".vscode", ".wieldy", "opencode.json", "sub", "wieldy.toml"]);
        assert_eq!(sweep_placeholders(&root, &[]), 0);
        drop(locked);
        assert_eq!(sweep_placeholders(&root, &[]), 1);
    }

    #[test]
    fn no_link_is_followed_to_something_that_looks_like_a_placeholder() {
        let world = tempfile::tempdir().unwrap();
        let root = world.path().canonicalize().unwrap();
        for folder in ["work", "other"] {
            fs::create_dir(root.join(folder)).unwrap();
        }
        let other = put(&root, "other/hooks", None);
        let _ = rustix::fs::setxattr(root.join("other"), PLACEHOLDER_MARK, b"", XattrFlags::CREATE);
        std::os::unix::fs::symlink(root.join("other"), root.join("work/.git")).unwrap();
        assert_eq!(sweep_placeholders(&root.join("work"), &[]), 0);
        assert!(other.exists());
        std::os::unix::fs::symlink(root.join("work"), root.join("linked")).unwrap();
        let expected = usize::from(is_marked(&put(&root, "work/refs", Some(""))) == Marked::Yes);
        assert_eq!(sweep_placeholders(&root.join("linked"), &[]), expected, "the workspace itself may be a link");
    }
}

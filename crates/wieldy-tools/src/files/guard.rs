//! File rules for the file tools: refuses hidden secrets, and protected files that programs outside would execute.

use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use cap_std::fs::Dir;
use rustix::fs::{AtFlags, FileType, fgetxattr, readlink, statat};
use wieldy_core::FileRules;
use wieldy_core::secrets::{HIDDEN, PLACEHOLDER_BYTES_MAX, PLACEHOLDER_MARK, PROTECTED, PROTECTED_WHERE_THERE};

use super::error::FileError;
use super::path::joined;
use super::workspace::{Workspace, open_plain, open_plain_folder};

/// Files through which git executes programs, or finds the settings that name programs, at the top of a repository.
const OF_GIT: [&str; 5] = [".git", ".git/commondir", ".git/config", ".git/config.worktree", ".git/hooks"];

/// Maximum number of symbolic links that are followed; the kernel has the same limit.
const LINKS_MAX: usize = 40;

/// The suffix that the kernel adds to the path of an open file which was deleted or replaced.
const REPLACED: &str = " (deleted)";

/// The paths of a workspace that a call must not show or change.
pub(crate) struct Guard<'a> {
    workspace: &'a Workspace,
    rules: &'a FileRules,
    /// Targets of hidden or protected names that are symbolic links, each with the name.
    behind: Vec<(PathBuf, PathBuf)>,
    /// The symbolic links on the way to these targets.
    links: Vec<PathBuf>,
}

impl Workspace {
    /// Returns the guard for a call under these rules.
    pub(crate) fn guard<'a>(&'a self, rules: &'a FileRules) -> Guard<'a> {
        let mut guard = Guard { workspace: self, rules, behind: Vec::new(), links: Vec::new() };
        let usual = HIDDEN.iter().chain(&PROTECTED_WHERE_THERE).chain(&OF_GIT).copied();
        let usual = usual.chain(PROTECTED.iter().map(|name| name.path)).map(Path::new);
        let by_rule = [&rules.hidden, &rules.protected, &rules.own].into_iter().flatten();
        let by_rule = by_rule.map(|path| path.strip_prefix(self.path()).unwrap_or(path));
        for name in usual.chain(by_rule.filter(|path| path.is_relative())) {
            guard.follow(name);
        }
        guard
    }

    /// Returns the current path of an open file: since the lookup it may have been moved, or its path changed. Returns
    /// `None` if the kernel does not tell.
    pub(crate) fn current_path(&self, opened: impl AsFd) -> Option<PathBuf> {
        let path = |opened: BorrowedFd<'_>| {
            let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
            readlink(link, Vec::new()).ok().map(|path| PathBuf::from(OsString::from_vec(path.into_bytes())))
        };
        path(opened.as_fd())?.strip_prefix(path(self.root().as_fd())?).ok().map(Path::to_owned)
    }
}

impl Guard<'_> {
    /// Returns the rules that it follows.
    pub(crate) fn rules(&self) -> &FileRules {
        self.rules
    }

    /// Returns the workspace that it guards.
    pub(crate) fn workspace(&self) -> &Workspace {
        self.workspace
    }

    /// Refuses to show a hidden path. The path is relative to the root and has no symbolic links.
    pub(crate) fn check_shown(&self, path: &Path) -> Result<(), FileError> {
        match self.names(path).iter().any(|name| self.rules.hides(self.workspace.path(), name)) {
            true => Err(FileError::Hidden { path: path.display().to_string() }),
            false => Ok(()),
        }
    }

    /// Refuses to show an open file, if the name under which it was opened or its current path is hidden.
    pub(crate) fn check_opened(&self, opened: impl AsFd, name: &Path) -> Result<(), FileError> {
        self.check_shown(name)?;
        let Some(real) = self.workspace.current_path(opened) else { return Ok(()) };
        let replaced = real.to_str().and_then(|real| real.strip_suffix(REPLACED)).map(Path::new);
        replaced.into_iter().chain([real.as_path()]).try_for_each(|path| self.check_shown(path))
    }

    /// Refuses to make, change or remove a protected path or an existing secret. The path is relative to the root and
    /// has no symbolic links.
    pub(crate) fn check_changed(&self, path: &Path) -> Result<(), FileError> {
        let root = self.workspace.path();
        let is_there = |path: &Path| self.workspace.root().symlink_metadata(path).is_ok() && !self.is_placeholder(path);
        for name in self.names(path) {
            if self.rules.protects(root, &name, is_there) || self.links.contains(&name) {
                return Err(FileError::Protected { path: path.display().to_string() });
            }
            if name.ancestors().any(|above| self.rules.hides(root, above) && is_there(above)) {
                return Err(FileError::Hidden { path: path.display().to_string() });
            }
        }
        Ok(())
    }

    /// Returns true for an untouched placeholder of a sandbox, which the tools treat as a missing file. The path is
    /// relative to the root and has no symbolic links.
    pub(crate) fn is_placeholder(&self, path: &Path) -> bool {
        self.rules.may_hold(self.workspace.path(), path) && is_unchanged_placeholder(self.workspace.root(), path)
    }

    /// Returns all names of a path: itself, and its name below a hidden or protected symbolic link.
    fn names(&self, path: &Path) -> Vec<PathBuf> {
        let behind =
            self.behind.iter().filter_map(|(real, name)| Some(joined_below(name, path.strip_prefix(real).ok()?)));
        std::iter::once(path.to_owned()).chain(behind).collect()
    }

    /// Records the target of a name, if there is a symbolic link on its path.
    fn follow(&mut self, name: &Path) {
        let Some(Component::Normal(first)) = name.components().next() else { return };
        // Most names do not exist.
        if statat(self.workspace.root(), first, AtFlags::SYMLINK_NOFOLLOW).is_err() {
            return;
        }
        let mut path = name.to_owned();
        for _ in 0..LINKS_MAX {
            let Some((link, next)) = self.next(&path) else { break };
            self.links.push(link);
            let Some(next) = next else { return };
            path = next;
        }
        if path != name {
            self.behind.push((path, name.to_owned()));
        }
    }

    /// Returns the first symbolic link on a path, and the path with that link resolved if it stays in the workspace.
    fn next(&self, path: &Path) -> Option<(PathBuf, Option<PathBuf>)> {
        let root = self.workspace.root();
        let is_link = |path: &Path| {
            statat(root, path, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink)
        };
        let mut above: Vec<_> = path.ancestors().filter(|above| !above.as_os_str().is_empty()).collect();
        above.reverse();
        let link = above.into_iter().find(|above| is_link(above))?;
        let target = root.read_link_contents(link).ok();
        let next = target.and_then(|target| {
            let target = match target.is_absolute() {
                true => target.strip_prefix(self.workspace.path()).ok()?.to_owned(),
                false => link.parent()?.join(target),
            };
            without_dots(&joined_below(&target, path.strip_prefix(link).ok()?))
        });
        Some((link.to_owned(), next))
    }
}

/// Returns true for a marked placeholder with unchanged content: a file with that content, or a folder of placeholders.
fn is_unchanged_placeholder(folder: &Dir, path: &Path) -> bool {
    let Ok(file) = open_plain(folder, path) else { return false };
    let mut content = [0; PLACEHOLDER_BYTES_MAX];
    let Ok(count) = fgetxattr(&file, PLACEHOLDER_MARK, &mut content) else { return false };
    if file.metadata().is_ok_and(|found| found.is_dir()) {
        let inside = open_plain_folder(folder, path).and_then(|inside| Ok((inside.entries()?, inside)));
        return inside.is_ok_and(|(mut entries, inside)| {
            entries
                .all(|entry| entry.is_ok_and(|entry| is_unchanged_placeholder(&inside, Path::new(&entry.file_name()))))
        });
    }
    let mut found = Vec::new();
    let read = file.take(PLACEHOLDER_BYTES_MAX as u64 + 1).read_to_end(&mut found);
    read.is_ok() && content.get(..count) == Some(&found)
}

/// Joins two paths, without a trailing slash if the second is empty.
fn joined_below(folder: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { folder.to_owned() } else { joined(folder, rest) }
}

/// Returns a path without `.` and `..`, or `None` if it leads above its start.
fn without_dots(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !plain.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(plain)
}

//! What the file tools leave alone: the secrets that sandboxes hide, and what they protect since somebody outside would execute it.

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

/// What git executes, or what says where that is, at the top of a repository.
const OF_GIT: [&str; 5] = [".git", ".git/commondir", ".git/config", ".git/config.worktree", ".git/hooks"];

/// As many links as the kernel would follow.
const LINKS_MAX: usize = 40;

/// What the kernel puts behind the path of a file that has another one in its place by now.
const REPLACED: &str = " (deleted)";

/// What a call leaves alone in a workspace.
pub(crate) struct Guard<'a> {
    workspace: &'a Workspace,
    rules: &'a FileRules,
    /// Where names that are hidden or protected lead that are links, and the names.
    behind: Vec<(PathBuf, PathBuf)>,
    /// The links on the way there.
    links: Vec<PathBuf>,
}

impl Workspace {
    /// What a call under these rules leaves alone.
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

    /// Where something really is that was opened: it may have been moved, or its path have changed, since somebody asked. Nothing where the
    /// kernel does not tell.
    pub(crate) fn real(&self, opened: impl AsFd) -> Option<PathBuf> {
        let path = |opened: BorrowedFd<'_>| {
            let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
            readlink(link, Vec::new()).ok().map(|path| PathBuf::from(OsString::from_vec(path.into_bytes())))
        };
        path(opened.as_fd())?.strip_prefix(path(self.root().as_fd())?).ok().map(Path::to_owned)
    }
}

impl Guard<'_> {
    /// Refuses to show what is in a secret. The path begins at the root and leads through no link.
    pub(crate) fn check_shown(&self, path: &Path) -> Result<(), FileError> {
        match self.names(path).iter().any(|name| self.rules.hides(self.workspace.path(), name)) {
            true => Err(FileError::Hidden { path: path.display().to_string() }),
            false => Ok(()),
        }
    }

    /// The same for something that was opened, and was called this when it was.
    pub(crate) fn check_opened(&self, opened: impl AsFd, name: &Path) -> Result<(), FileError> {
        self.check_shown(name)?;
        let Some(real) = self.workspace.real(opened) else { return Ok(()) };
        let replaced = real.to_str().and_then(|real| real.strip_suffix(REPLACED)).map(Path::new);
        replaced.into_iter().chain([real.as_path()]).try_for_each(|path| self.check_shown(path))
    }

    /// Refuses to make, change or remove what is protected, and secrets that are there. The path begins at the root and leads through no link.
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

    /// Returns true if a sandbox put this there to hold the name and nothing was done with it since: for tools there is nothing. The path
    /// begins at the root and leads through no link.
    pub(crate) fn is_placeholder(&self, path: &Path) -> bool {
        self.rules.may_hold(self.workspace.path(), path) && is_as_made(self.workspace.root(), path)
    }

    /// What a path can be called: itself, and what it is behind a name that is a link.
    fn names(&self, path: &Path) -> Vec<PathBuf> {
        let behind =
            self.behind.iter().filter_map(|(real, name)| Some(joined_below(name, path.strip_prefix(real).ok()?)));
        std::iter::once(path.to_owned()).chain(behind).collect()
    }

    /// Takes note of where a name leads, if there is a link on the way.
    fn follow(&mut self, name: &Path) {
        let Some(Component::Normal(first)) = name.components().next() else { return };
        // Most of them are not there.
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

    /// The first link on a path, and the path that it makes of it if that is in the workspace.
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

/// Returns true if something has a placeholder's mark and is as it was made: a file with that content, or a folder of others.
fn is_as_made(folder: &Dir, path: &Path) -> bool {
    let Ok(file) = open_plain(folder, path) else { return false };
    let mut content = [0; PLACEHOLDER_BYTES_MAX];
    let Ok(count) = fgetxattr(&file, PLACEHOLDER_MARK, &mut content) else { return false };
    if file.metadata().is_ok_and(|found| found.is_dir()) {
        let inside = open_plain_folder(folder, path).and_then(|inside| Ok((inside.entries()?, inside)));
        return inside.is_ok_and(|(mut entries, inside)| {
            entries.all(|entry| entry.is_ok_and(|entry| is_as_made(&inside, Path::new(&entry.file_name()))))
        });
    }
    let mut found = Vec::new();
    let read = file.take(PLACEHOLDER_BYTES_MAX as u64 + 1).read_to_end(&mut found);
    read.is_ok() && content.get(..count) == Some(&found)
}

/// Joins without a slash at the end where there is nothing to join.
fn joined_below(folder: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() { folder.to_owned() } else { joined(folder, rest) }
}

/// A path that begins at the root without `.` and `..`; nothing if it leads out of there.
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

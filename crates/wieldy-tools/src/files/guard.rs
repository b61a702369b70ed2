//! What the file tools leave alone: the secrets that sandboxes hide, and what they protect since somebody outside would execute it.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::readlink;
use wieldy_core::FileRules;

use super::error::FileError;
use super::path::joined;
use super::workspace::Workspace;

/// The way to the store of a repository.
const GIT: &str = ".git";

impl Workspace {
    /// Refuses to show what is in a secret. The path begins at the root and leads through no link.
    pub(crate) fn check_shown(&self, rules: &FileRules, path: &Path) -> Result<(), FileError> {
        match rules.hides(self.path(), path) {
            true => Err(FileError::Hidden { path: path.display().to_string() }),
            false => Ok(()),
        }
    }

    /// Refuses to make, change or remove what is protected, and secrets that are there. The path begins at the root and leads through no link.
    pub(crate) fn check_changed(&self, rules: &FileRules, path: &Path) -> Result<(), FileError> {
        let is_there = |path: &Path| self.root().symlink_metadata(path).is_ok();
        let is_protected = |path: &Path| rules.protects(self.path(), path, is_there);
        if is_protected(path) || self.in_git(path).is_some_and(|path| is_protected(&path)) {
            return Err(FileError::Protected { path: path.display().to_string() });
        }
        let secret = path.ancestors().find(|above| rules.hides(self.path(), above) && is_there(above));
        match secret {
            Some(_) => Err(FileError::Hidden { path: path.display().to_string() }),
            None => Ok(()),
        }
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

    /// What a path is called in a repository whose `.git` is a link to a folder that it is in.
    fn in_git(&self, path: &Path) -> Option<PathBuf> {
        let is_link = self.root().symlink_metadata(GIT).is_ok_and(|found| found.is_symlink());
        let store = is_link.then(|| self.root().canonicalize(GIT).ok()).flatten()?;
        Some(joined(Path::new(GIT), path.strip_prefix(store).ok()?))
    }
}

//! Placeholders: files and folders that are made on the host so that there is something to mount on, where a sandbox
//! must not create a file that programs outside would execute.
//!
//! A placeholder is removed after the last sandbox that needs it. Removing a file also removes the mounts on it in
//! every sandbox, so each executor keeps a lock on the placeholders that it needs.
//!
//! Placeholders carry an extended attribute. A file without it belongs to the user and is never removed. Setting the
//! attribute on another file gains nothing: the content must be that of a placeholder, too. Symbolic links in a
//! workspace are never followed here.

pub(crate) mod host_view;
pub(crate) mod sweep;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, ResolveFlags, XattrFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use wieldy_core::secrets::{PLACEHOLDER_BYTES_MAX, PLACEHOLDER_MARK};

/// A file with this content, or an empty folder, that an executor made on the host for a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Placeholder {
    pub(crate) path: PathBuf,
    pub(crate) content: Option<String>,
}

/// The placeholders and protected paths that sandboxes of this executor need now.
#[derive(Default)]
pub(crate) struct Placeholders {
    places: HashMap<PathBuf, Place>,
}

struct Place {
    sandboxes: usize,
    lock: Option<File>,
    /// The placeholder there, if this or another executor made one.
    made: Option<Placeholder>,
}

impl Placeholders {
    /// Locks every path that a sandbox needs and makes the missing placeholders. Adds the paths to `paths`, parents
    /// first.
    pub(crate) fn hold(
        &mut self,
        protected: &[PathBuf],
        placeholders: &[Placeholder],
        paths: &mut Vec<PathBuf>,
    ) -> io::Result<()> {
        let protected = protected.iter().map(|path| (path.as_path(), None));
        let missing = placeholders.iter().map(|held| (held.path.as_path(), Some(held)));
        let places: BTreeMap<_, _> = protected.chain(missing).collect();
        for (path, missing) in places {
            let told = |error: io::Error| io::Error::new(error.kind(), format!("`{}`: {error}", path.display()));
            self.hold_one(path, missing).map_err(told)?;
            paths.push(path.to_owned());
        }
        Ok(())
    }

    fn hold_one(&mut self, path: &Path, missing: Option<&Placeholder>) -> io::Result<()> {
        let (lock, made) = match self.places.get_mut(path) {
            Some(Place { lock, made, .. }) if lock.as_ref().is_some_and(|lock| is_at(lock, path)) => {
                (lock.take(), made.take())
            }
            _ => lock(path, missing)?,
        };
        let place = self.places.entry(path.to_owned()).or_insert(Place { sandboxes: 0, lock: None, made: None });
        place.sandboxes += 1;
        (place.lock, place.made) = (lock, made);
        Ok(())
    }

    /// Releases a path for one sandbox. After the last one, an unchanged placeholder is removed.
    pub(crate) fn release(&mut self, path: &Path) {
        let Some(place) = self.places.get_mut(path) else { return };
        place.sandboxes = place.sandboxes.saturating_sub(1);
        if place.sandboxes > 0 {
            return;
        }
        if let Some(Place { lock: Some(lock), made: Some(made), .. }) = self.places.remove(path)
            && flock(&lock, FlockOperation::NonBlockingLockExclusive)
        {
            let _ = remove(&made);
        }
    }
}

/// Makes a missing placeholder and takes a shared lock on it. Also returns the placeholder that is there, made by this
/// or another executor. A file that cannot be read gets no lock: only its owner removes it.
fn lock(path: &Path, missing: Option<&Placeholder>) -> io::Result<(Option<File>, Option<Placeholder>)> {
    // A command may lock an existing file for as long as it likes, so give up soon: only the owner removes that file.
    let attempts_max = if missing.is_some() { 100 } else { 3 };
    let mut is_ours = false;
    for _ in 0..attempts_max {
        if let Some(missing) = missing {
            is_ours |= make(missing)?;
        }
        match open(path) {
            Ok(file) if missing.is_some() && !is_ours && marked(&file) == Marked::No => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "another program made a file there at the same time; call again",
                ));
            }
            Ok(file) if flock(&file, FlockOperation::NonBlockingLockShared) && is_at(&file, path) => {
                let made = missing.filter(|_| is_ours || marked(&file) == Marked::Yes);
                let made = made.map(|missing| if is_ours { missing.clone() } else { as_found(&file, missing) });
                return Ok((Some(file), made));
            }
            // Another executor is about to remove it.
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) if missing.is_some() && error.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return Ok((None, None)),
        }
    }
    match missing {
        Some(_) => Err(io::Error::other("another process keeps a lock on it; end the process that has it open")),
        None => Ok((None, None)),
    }
}

/// Returns a marked placeholder as it was made, which may differ from the one that this executor would make.
fn as_found(file: &File, wanted: &Placeholder) -> Placeholder {
    let is_folder = file.metadata().is_ok_and(|found| found.is_dir());
    let content = (!is_folder).then(|| {
        let made = mark(&wanted.path).and_then(|content| String::from_utf8(content).ok());
        made.or_else(|| wanted.content.clone()).unwrap_or_default()
    });
    Placeholder { path: wanted.path.clone(), content }
}

/// Returns true if a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> bool {
    let same =
        |one: &rustix::fs::Stat, other: &rustix::fs::Stat| (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino);
    matches!((rustix::fs::fstat(file), rustix::fs::lstat(path)), (Ok(one), Ok(other)) if same(&one, &other))
}

/// Makes a placeholder that the owner of its folder owns, unless the path exists. Returns true if it was made.
pub(crate) fn make(place: &Placeholder) -> io::Result<bool> {
    let (folder, name) = parent(&place.path)?;
    let made = match &place.content {
        None => rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o755)).inspect(|()| {
            let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Ok(made) = rustix::fs::openat(&folder, name, flags, Mode::empty()) {
                set_mark(&made, b"");
            }
        }),
        Some(content) => {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
            match rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o644)) {
                Ok(file) => {
                    set_mark(&file, content.as_bytes());
                    File::from(file).write_all(content.as_bytes())?;
                    Ok(())
                }
                Err(error) => Err(error),
            }
        }
    };
    match made {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    if rustix::process::geteuid().is_root() {
        let owner = rustix::fs::fstat(&folder)?;
        let (user, group) = (rustix::fs::Uid::from_raw(owner.st_uid), rustix::fs::Gid::from_raw(owner.st_gid));
        rustix::fs::chownat(&folder, name, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(true)
}

/// Marks a file as a placeholder with this content. Where the file system has no extended attributes, only this
/// executor knows its placeholders.
fn set_mark(file: &OwnedFd, content: &[u8]) {
    let _ = rustix::fs::fsetxattr(file, PLACEHOLDER_MARK, content, XattrFlags::CREATE);
}

/// Returns the content that a placeholder was made with, from its mark.
pub(crate) fn mark(path: &Path) -> Option<Vec<u8>> {
    let mut content = [0; PLACEHOLDER_BYTES_MAX];
    let count = rustix::fs::lgetxattr(path, PLACEHOLDER_MARK, &mut content).ok()?;
    content.get(..count).map(<[u8]>::to_vec)
}

/// Returns true if a path is a placeholder of a sandbox and is unchanged since it was made.
pub fn is_placeholder(path: &Path) -> bool {
    let Some(content) = mark(path) else { return false };
    let Ok(file) = fs::OpenOptions::new().read(true).custom_flags(PLAIN).open(path) else { return false };
    match file.metadata() {
        Ok(found) if found.is_dir() => {
            let all = fs::read_dir(path);
            all.is_ok_and(|mut all| all.all(|entry| entry.is_ok_and(|entry| is_placeholder(&entry.path()))))
        }
        Ok(found) if found.is_file() => {
            let mut read = Vec::new();
            let done = file.take(PLACEHOLDER_BYTES_MAX as u64 + 1).read_to_end(&mut read);
            done.is_ok() && read == content
        }
        _ => false,
    }
}

/// Flags to open a file itself, not the target of a link, without waiting for the other end of a pipe.
const PLAIN: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// The state of a placeholder's mark.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    Yes,
    No,
    /// The file system has no extended attributes, or the file is gone.
    Unknown,
}

fn marked(file: &File) -> Marked {
    marked_by(rustix::fs::fgetxattr(file, PLACEHOLDER_MARK, &mut [0; PLACEHOLDER_BYTES_MAX]))
}

/// Returns the state of the mark at a path.
pub(crate) fn is_marked(path: &Path) -> Marked {
    marked_by(rustix::fs::lgetxattr(path, PLACEHOLDER_MARK, &mut [0; PLACEHOLDER_BYTES_MAX]))
}

fn marked_by(read: Result<usize, Errno>) -> Marked {
    match read {
        Ok(_) => Marked::Yes,
        Err(Errno::NODATA) => Marked::No,
        Err(_) => Marked::Unknown,
    }
}

pub(crate) fn remove(place: &Placeholder) -> io::Result<()> {
    let (folder, name) = parent(&place.path)?;
    let Some(content) = &place.content else {
        return Ok(rustix::fs::unlinkat(&folder, name, AtFlags::REMOVEDIR)?);
    };
    let mut found = Vec::new();
    open(&place.path)?.take(content.len() as u64 + 1).read_to_end(&mut found)?;
    if found == content.as_bytes() {
        rustix::fs::unlinkat(&folder, name, AtFlags::empty())?;
    }
    Ok(())
}

/// Returns the folder that a path is in, opened, and the name in it.
fn parent(path: &Path) -> io::Result<(OwnedFd, &OsStr)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    Ok((open_plain(folder, OFlags::PATH | OFlags::DIRECTORY)?, name))
}

fn open(path: &Path) -> io::Result<File> {
    // Do not wait for a writer if there is a pipe.
    Ok(open_plain(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?.into())
}

/// Opens a path. Fails if any part of it is a link.
pub(crate) fn open_plain(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(CWD, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)?)
}

fn flock(file: &File, operation: FlockOperation) -> bool {
    rustix::fs::flock(file, operation).is_ok()
}

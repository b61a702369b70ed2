//! The workspace: the one folder that file tools know, and the only way they open anything.
//!
//! [`Workspace`] holds the folder as a handle, and every lookup starts from that handle (cap-std; on Linux
//! `openat2` with `RESOLVE_BENEATH` and `RESOLVE_NO_MAGICLINKS`). Whether a path stays inside is decided by
//! the lookup itself, so nothing can change between a check and the use.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, FileType, FileTypeExt, Metadata, MetadataExt as _, OpenOptions, OpenOptionsExt};
use rustix::fs::OFlags;
use tokio_util::sync::CancellationToken;
use wieldy_core::name::{did_you_mean, near_misses};

use super::error::FileError;
use super::guard::Guard;
use super::path::{GivenPath, joined};
use super::stale::ReadLog;
use super::walk::{Walk, WalkOptions};

/// The largest file that is taken into memory.
pub(crate) const FILE_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// How many neighbours of a missing file are looked at to find the one that was meant.
const NEIGHBOURS_MAX: usize = 1000;
/// The maximal number of links in a row that are followed to a missing file; Linux follows as many.
const LINKS_MAX: usize = 40;
/// How many files can be written at once; those that share a lock by chance wait for each other.
const WRITERS_MAX: usize = 64;

/// The folder that file tools work in, shared by all of them.
pub struct Workspace {
    root: Dir,
    /// The root's own path, links resolved; only to understand absolute paths, never to open anything.
    path: PathBuf,
    roots: Vec<PathBuf>,
    pub(crate) reads: ReadLog,
    writers: [Mutex<()>; WRITERS_MAX],
}

/// Why a folder cannot be the workspace.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the workspace `{}`", path.display())]
pub struct WorkspaceError {
    path: PathBuf,
    source: io::Error,
}

/// A place for a file: the folder as a handle, and a name in it.
pub(crate) struct Place {
    pub(crate) folder: Dir,
    pub(crate) name: OsString,
    /// The path from the root with all links resolved: what the file is known by.
    pub(crate) key: String,
}

/// What to do about folders on the way that are not there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Folders {
    Demanded,
    Made,
}

/// What a path means whose last name is a symbolic link.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastLink {
    /// What the link leads to.
    Target,
    /// The link.
    Itself,
}

/// A file that is there already.
pub(crate) struct Existing {
    pub(crate) hash: Hash,
    /// The content, unless it is too large to be taken into memory.
    pub(crate) content: Option<Vec<u8>>,
    pub(crate) metadata: Metadata,
}

impl Workspace {
    /// Opens the folder. It stays the workspace even if it is moved or something else takes its path.
    pub fn open(root: &Path) -> Result<Workspace, WorkspaceError> {
        let failed = |source| WorkspaceError { path: root.to_owned(), source };
        let path = root.canonicalize().map_err(failed)?;
        let dir = Dir::open_ambient_dir(root, ambient_authority()).map_err(failed)?;
        let given = Some(root.to_owned()).filter(|root| root.is_absolute() && *root != path);
        let roots = given.into_iter().chain([path.clone()]).collect();
        let writers = std::array::from_fn(|_| Mutex::new(()));
        Ok(Self { root: dir, path, roots, reads: ReadLog::new(), writers })
    }

    /// The folder's path, links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks the text of a path.
    pub(crate) fn given(&self, text: &str) -> Result<GivenPath, FileError> {
        Ok(GivenPath::new(text, &self.roots)?)
    }

    pub(crate) fn root(&self) -> &Dir {
        &self.root
    }

    /// Opens a regular file to read that is no secret. Anything else is refused, and not opened if that can be known before.
    pub(crate) fn open_file(&self, given: &GivenPath, guard: &Guard<'_>) -> Result<(File, Metadata), FileError> {
        let failed = |source| self.missing(guard, given, FileError::io("open", given, source));
        self.check_placeholder(given, guard)?;
        let metadata = self.root.metadata(given.relative()).map_err(failed)?;
        let is = kind(metadata.file_type());
        if is != "a file" {
            return Err(FileError::Kind { path: given.to_string(), is, wanted: "a file" });
        }
        // `note.txt/` names a folder, and there is none.
        if given.names_folder() {
            return Err(FileError::Kind { path: given.to_string(), is, wanted: "a folder" });
        }
        let file = self.root.open_with(given.relative(), &read_options()).map_err(|source| match failed(source) {
            FileError::Denied { path, .. } => {
                FileError::Closed { path, owner: metadata.uid(), mode: metadata.mode() & 0o7777 }
            }
            error => error,
        })?;
        let metadata = regular(&file, given)?;
        self.names(given.relative()).iter().try_for_each(|name| guard.check_opened(&file, name))?;
        Ok((file, metadata))
    }

    /// Opens a folder to look into.
    fn open_folder(&self, given: &GivenPath, guard: &Guard<'_>) -> Result<Dir, FileError> {
        self.check_placeholder(given, guard)?;
        self.root.open_dir(given.relative()).map_err(|source| {
            let raw = source.raw_os_error();
            if raw == Some(rustix::io::Errno::NOTDIR.raw_os_error())
                && let Ok(metadata) = self.root.metadata(given.relative())
            {
                return FileError::Kind { path: given.to_string(), is: kind(metadata.file_type()), wanted: "a folder" };
            }
            self.missing(guard, given, FileError::io("open", given, source))
        })
    }

    /// Refuses a placeholder of a sandbox as if nothing were there.
    fn check_placeholder(&self, given: &GivenPath, guard: &Guard<'_>) -> Result<(), FileError> {
        match self.names(given.relative()).iter().any(|name| guard.is_placeholder(name)) {
            true => Err(self.missing(guard, given, FileError::Missing { path: given.to_string(), near: None })),
            false => Ok(()),
        }
    }

    /// Walks through a folder, showing paths from the root with all links resolved, and nothing of what is in hidden folders.
    pub(crate) fn walk<'a>(
        &self,
        given: &GivenPath,
        options: WalkOptions,
        guard: &'a Guard<'_>,
        stop: &'a CancellationToken,
    ) -> Result<Walk<'a>, FileError> {
        let folder = self.open_folder(given, guard)?;
        // A link on the way may have been changed since: what counts is what was opened.
        let path = match self.real(&folder) {
            Some(real) if real.as_os_str().is_empty() => PathBuf::from("."),
            Some(real) => real,
            None => PathBuf::from(self.key(given)?),
        };
        self.names(given.relative()).iter().try_for_each(|name| guard.check_opened(&folder, name))?;
        let walk = Walk::new(&self.root, folder, &path, options, guard, stop);
        walk.map_err(|source| FileError::io("look into", given, source))
    }

    /// What the file is known by: its path from the root with all links resolved.
    pub(crate) fn key(&self, given: &GivenPath) -> Result<String, FileError> {
        let path = self.root.canonicalize(given.relative()).map_err(|source| FileError::io("find", given, source))?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// All names that a path has: itself with the links above it resolved, and what it leads to if it is a link.
    /// What cannot be told may be anything, which the empty path stands for.
    pub(crate) fn names_of(&self, text: &str) -> Vec<String> {
        let Ok(given) = self.given(text) else { return vec![String::new()] };
        self.names(given.relative()).iter().map(|name| name.to_string_lossy().into_owned()).collect()
    }

    fn names(&self, path: &Path) -> Vec<PathBuf> {
        let own = match (path.parent(), path.file_name()) {
            (Some(above), Some(name)) => self.resolved(above).map(|above| joined(&above, Path::new(name))),
            _ => None,
        };
        own.into_iter().chain([self.resolved(path).unwrap_or_default()]).collect()
    }

    /// The path from the root with all links resolved, those to what is not there yet included. What is not there has the
    /// name of what is, and the rest as it was written; what cannot be told is the empty path.
    fn resolved(&self, path: &Path) -> Option<PathBuf> {
        self.followed(path, LINKS_MAX)
    }

    fn followed(&self, path: &Path, links_left: usize) -> Option<PathBuf> {
        path.ancestors().find_map(|above| {
            let found = self.root.canonicalize(if above.as_os_str().is_empty() { Path::new(".") } else { above });
            let rest = path.strip_prefix(above).expect("an ancestor is a prefix");
            match found {
                Ok(found) => Some(joined(&found, rest)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let target = self.root.read_link_contents(above).ok()?;
                    // Joining nothing would add a slash.
                    let next: PathBuf = above.parent()?.join(&target).components().chain(rest.components()).collect();
                    let followed = links_left.checked_sub(1).filter(|_| target.is_relative());
                    Some(followed.and_then(|links_left| self.followed(&next, links_left)).unwrap_or_default())
                }
                // Below a file there is nothing, and a placeholder may be a file.
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => None,
                Err(_) => Some(PathBuf::new()),
            }
        })
    }

    /// Finds the folder and the name that a path stands for, to put something there or take it away, unless the rules protect it.
    pub(crate) fn place(
        &self,
        given: &GivenPath,
        folders: Folders,
        link: LastLink,
        guard: &Guard<'_>,
    ) -> Result<Place, FileError> {
        let mut path = given.relative().to_owned();
        if link == LastLink::Target && self.root.symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink()) {
            self.names(&path).iter().try_for_each(|name| guard.check_changed(name))?;
            path = self.root.canonicalize(&path).map_err(|source| match FileError::io("follow", given, source) {
                FileError::Missing { path, .. } => FileError::refused(
                    format!("`{path}` is a symbolic link to something that is not there"),
                    "name the file that you mean, or delete the link first",
                ),
                other => other,
            })?;
        }
        let Some(name) = path.file_name().map(ToOwned::to_owned) else {
            return Err(FileError::Kind { path: given.to_string(), is: "a folder", wanted: "a file" });
        };
        let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Before folders are made.
        let ahead = self.resolved(above).unwrap_or_default();
        if ahead.components().any(|part| part == Component::ParentDir) {
            return Err(FileError::refused(
                format!("`{given}` leads back from a folder that is not there"),
                "write the path without `..`",
            ));
        }
        guard.check_changed(&joined(&ahead, Path::new(&name)))?;
        let failed = |source| self.missing(guard, given, FileError::io("open the folder of", given, source));
        let folder = match self.root.open_dir(above) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && folders == Folders::Made => {
                self.root.create_dir_all(above).and_then(|()| self.root.open_dir(above))
            }
            folder => folder,
        }
        .map_err(failed)?;
        let above = self.root.canonicalize(above).map_err(failed)?;
        // A link on the way may have been changed since.
        if let Some(real) = self.real(&folder).filter(|real| *real != ahead) {
            guard.check_changed(&joined(&real, Path::new(&name)))?;
        }
        let key = joined(&above, Path::new(&name)).to_string_lossy().into_owned();
        Ok(Place { folder, name, key })
    }

    /// Waits until nobody else in this process writes the file of this key.
    pub(crate) fn writing(&self, key: &str) -> MutexGuard<'_, ()> {
        let index = usize::from(blake3::hash(key.as_bytes()).as_bytes()[0]) % WRITERS_MAX;
        // It guards nothing in memory, so a panic of another writer has broken nothing.
        self.writers[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to "there is no such file" which one may have been meant.
    pub(crate) fn missing(&self, guard: &Guard<'_>, given: &GivenPath, error: FileError) -> FileError {
        match error {
            FileError::Missing { path, .. } => FileError::Missing { path, near: self.near(guard, given.relative()) },
            other => other,
        }
    }

    /// Looks in the deepest folder of the path that exists for names like the one that does not.
    fn near(&self, guard: &Guard<'_>, path: &Path) -> Option<String> {
        let (above, name) = path.ancestors().find_map(|part| {
            let above = part.parent()?;
            let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
            let name = part.file_name()?.to_str()?;
            self.root.read_dir(above).ok().map(|entries| ((above, entries), name))
        })?;
        let (above, entries) = above;
        self.names(above).iter().try_for_each(|name| guard.check_shown(name)).ok()?;
        let names: Vec<String> = entries
            .take(NEIGHBOURS_MAX)
            .filter_map(|entry| Some(joined(above, Path::new(&entry.ok()?.file_name()))))
            .filter(|path| !guard.is_placeholder(path))
            .filter_map(|path| path.to_str().map(str::to_owned))
            .collect();
        let wanted = joined(above, Path::new(name));
        did_you_mean(&near_misses(wanted.to_str()?, names.iter().map(String::as_str)))
    }
}

impl Place {
    /// Reads what is there now; nothing where nothing is.
    pub(crate) fn existing(&self) -> Result<Option<Existing>, FileError> {
        let Some((mut file, metadata)) = self.open()? else { return Ok(None) };
        let failed = |source| FileError::io("read", &self.key, source);
        if metadata.len() <= FILE_BYTES_MAX {
            let content = read_whole(&mut file, &self.key)?;
            return Ok(Some(Existing { hash: blake3::hash(&content), content: Some(content), metadata }));
        }
        let hash = hash_of(file).map_err(failed)?;
        Ok(Some(Existing { hash, content: None, metadata }))
    }

    /// The hash of what is there now; nothing where nothing is.
    pub(crate) fn hash(&self) -> Result<Option<Hash>, FileError> {
        let Some((file, _)) = self.open()? else { return Ok(None) };
        hash_of(file).map(Some).map_err(|source| FileError::io("read", &self.key, source))
    }

    fn open(&self) -> Result<Option<(File, Metadata)>, FileError> {
        match self.folder.symlink_metadata(&self.name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(FileError::io("look at", &self.key, source)),
            Ok(metadata) if metadata.is_file() => {}
            Ok(metadata) => {
                return Err(FileError::Kind {
                    path: self.key.clone(),
                    is: kind(metadata.file_type()),
                    wanted: "a file",
                });
            }
        }
        let file = open_plain(&self.folder, Path::new(&self.name))
            .map_err(|source| FileError::io("open", &self.key, source))?;
        let metadata = regular(&file, &self.key)?;
        Ok(Some((file, metadata)))
    }
}

/// Opens an entry of `folder` to read, unless it is a symbolic link; never waits for another end of a pipe.
pub(crate) fn open_plain(folder: &Dir, name: &Path) -> io::Result<File> {
    folder.open_with(name, &with_flags(OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW))
}

/// Opens a folder in `folder`, unless it is a symbolic link.
pub(crate) fn open_plain_folder(folder: &Dir, name: &Path) -> io::Result<Dir> {
    let file = folder.open_with(name, &with_flags(OFlags::DIRECTORY | OFlags::NOFOLLOW))?;
    Ok(Dir::from_std_file(file.into_std()))
}

/// Reads a file into memory, if it fits.
pub(crate) fn read_whole(file: &mut File, shown: &str) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::io("read", shown, source);
    let mut bytes = file.metadata().map_err(failed)?.len();
    let mut content = Vec::new();
    if bytes <= FILE_BYTES_MAX {
        // A file can grow while it is read, and those of the kernel claim to be empty: the bound is on what comes.
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content).map_err(failed)?;
        bytes = content.len() as u64;
    }
    if bytes > FILE_BYTES_MAX {
        return Err(FileError::TooLarge { path: shown.to_owned(), bytes, bytes_max: FILE_BYTES_MAX });
    }
    Ok(content)
}

/// What a file is, in words.
pub(crate) fn kind(file_type: FileType) -> &'static str {
    match file_type {
        _ if file_type.is_file() => "a file",
        _ if file_type.is_dir() => "a folder",
        _ if file_type.is_symlink() => "a symbolic link",
        _ if file_type.is_fifo() => "a named pipe",
        _ if file_type.is_socket() => "a socket",
        _ if file_type.is_block_device() || file_type.is_char_device() => "a device",
        _ => "something unknown",
    }
}

/// The opened thing itself is asked what it is: the path may have meant something else when it was asked.
fn regular(file: &File, shown: impl ToString) -> Result<Metadata, FileError> {
    let metadata = file.metadata().map_err(|source| FileError::io("look at", shown.to_string(), source))?;
    match kind(metadata.file_type()) {
        "a file" => Ok(metadata),
        is => Err(FileError::Kind { path: shown.to_string(), is, wanted: "a file" }),
    }
}

fn hash_of(file: File) -> io::Result<Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file)?;
    Ok(hasher.finalize())
}

/// Returns the options to open a file for reading; a pipe in its place keeps no reader waiting.
pub(crate) fn read_options() -> OpenOptions {
    with_flags(OFlags::NONBLOCK | OFlags::NOCTTY)
}

fn with_flags(flags: OFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(flags.bits().cast_signed());
    options
}

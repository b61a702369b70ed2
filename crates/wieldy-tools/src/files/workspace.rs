//! The workspace: the folder in which file tools work, and the only way in which they open files.
//!
//! [`Workspace`] holds the folder as a handle, and every lookup starts from that handle (cap-std; on Linux
//! `openat2` with `RESOLVE_BENEATH` and `RESOLVE_NO_MAGICLINKS`). The lookup itself ensures that a path stays
//! inside, so nothing can change between a check and the use.

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use cap_std::ambient_authority;
use cap_std::fs::{Dir, File, FileType, FileTypeExt, Metadata, MetadataExt as _, OpenOptions, OpenOptionsExt};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;
use wieldy_core::name::{did_you_mean, near_misses};

use super::error::FileError;
use super::guard::Guard;
use super::path::{GivenPath, joined};
use super::stale::ReadLog;
use super::walk::{FolderWalk, WalkOptions};

/// Maximum size of a file that is read into memory.
pub(crate) const FILE_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Maximum number of names that are compared with a missing file's name, to suggest the intended one.
const NEIGHBOURS_MAX: usize = 1000;
/// Maximum number of symbolic links in a row that are followed to a missing file; Linux has the same limit.
const LINKS_MAX: usize = 40;
/// The number of write locks. Files that share a lock by chance wait for each other.
const WRITERS_MAX: usize = 64;

/// The folder that file tools work in, shared by all of them.
pub struct Workspace {
    root: Dir,
    /// The root's own path, with symbolic links resolved. Used only to interpret absolute paths, never to open files.
    path: PathBuf,
    roots: Vec<PathBuf>,
    pub(crate) reads: ReadLog,
    writers: [Mutex<()>; WRITERS_MAX],
}

/// The reason why a folder cannot be the workspace.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the workspace `{}`", path.display())]
pub struct WorkspaceError {
    path: PathBuf,
    source: io::Error,
}

/// A place for a file: the folder as a handle, and a name in it.
pub(crate) struct FileLocation {
    pub(crate) folder: Dir,
    pub(crate) name: OsString,
    /// The path from the root with all links resolved, which identifies the file.
    pub(crate) key: String,
}

/// The treatment of missing folders on a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissingFolders {
    Refuse,
    Create,
}

/// The meaning of a path whose last name is a symbolic link.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastLink {
    /// The target of the link.
    Target,
    /// The link itself.
    Itself,
}

/// A file that already exists.
pub(crate) struct ExistingFile {
    pub(crate) hash: Hash,
    /// The content, unless it is too large for memory.
    pub(crate) content: Option<Vec<u8>>,
    pub(crate) metadata: Metadata,
}

impl Workspace {
    /// Opens the folder. It stays the workspace even if it is moved or another folder takes its path.
    pub fn open(root: &Path) -> Result<Workspace, WorkspaceError> {
        let failed = |source| WorkspaceError { path: root.to_owned(), source };
        let path = root.canonicalize().map_err(failed)?;
        let dir = Dir::open_ambient_dir(root, ambient_authority()).map_err(failed)?;
        let given = Some(root.to_owned()).filter(|root| root.is_absolute() && *root != path);
        let roots = given.into_iter().chain([path.clone()]).collect();
        let writers = std::array::from_fn(|_| Mutex::new(()));
        Ok(Self { root: dir, path, roots, reads: ReadLog::new(), writers })
    }

    /// Returns the folder's path, with symbolic links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks the text of a path.
    pub(crate) fn given(&self, text: &str) -> Result<GivenPath, FileError> {
        Ok(GivenPath::new(text, &self.roots)?)
    }

    /// Returns the folder's path as it was given and with symbolic links resolved.
    pub(super) fn roots(&self) -> &[PathBuf] {
        &self.roots
    }

    pub(crate) fn root(&self) -> &Dir {
        &self.root
    }

    /// Opens a regular file that is not hidden for reading. Other kinds of files are refused, if possible before
    /// opening.
    pub(crate) fn open_file(&self, given: &GivenPath, guard: &Guard<'_>) -> Result<(File, Metadata), FileError> {
        let failed = |source| self.suggest_near(guard, given, FileError::io("open", given, source));
        self.check_placeholder(given, guard)?;
        let metadata = self.root.metadata(given.relative()).map_err(failed)?;
        let is = kind(metadata.file_type());
        if is != "a file" {
            return Err(FileError::Kind { path: given.to_string(), is, wanted: "a file" });
        }
        // `note.txt/` names a folder, but this is a file.
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

    /// Opens a folder for listing.
    fn open_folder(&self, given: &GivenPath, guard: &Guard<'_>) -> Result<Dir, FileError> {
        self.check_placeholder(given, guard)?;
        self.root.open_dir(given.relative()).map_err(|source| {
            let raw = source.raw_os_error();
            if raw == Some(rustix::io::Errno::NOTDIR.raw_os_error())
                && let Ok(metadata) = self.root.metadata(given.relative())
            {
                return FileError::Kind { path: given.to_string(), is: kind(metadata.file_type()), wanted: "a folder" };
            }
            self.suggest_near(guard, given, FileError::io("open", given, source))
        })
    }

    /// Reports a sandbox's placeholder as a missing file.
    fn check_placeholder(&self, given: &GivenPath, guard: &Guard<'_>) -> Result<(), FileError> {
        match self.names(given.relative()).iter().any(|name| guard.is_placeholder(name)) {
            true => Err(self.suggest_near(guard, given, FileError::Missing { path: given.to_string(), near: None })),
            false => Ok(()),
        }
    }

    /// Walks through a folder. Shows paths from the root with all links resolved, and nothing in hidden folders.
    pub(crate) fn walk<'a>(
        &self,
        given: &GivenPath,
        options: WalkOptions,
        guard: &'a Guard<'_>,
        stop: &'a CancellationToken,
    ) -> Result<FolderWalk<'a>, FileError> {
        let folder = self.open_folder(given, guard)?;
        // A link on the path may have changed since, so use the path of the folder that was opened.
        let path = match self.current_path(&folder) {
            Some(real) if real.as_os_str().is_empty() => PathBuf::from("."),
            Some(real) => real,
            None => PathBuf::from(self.key(given)?),
        };
        self.names(given.relative()).iter().try_for_each(|name| guard.check_opened(&folder, name))?;
        let walk = FolderWalk::new(&self.root, folder, &path, options, guard, stop);
        walk.map_err(|source| FileError::io("look into", given, source))
    }

    /// Returns the path from the root with all links resolved, which identifies the file.
    pub(crate) fn key(&self, given: &GivenPath) -> Result<String, FileError> {
        let path = self.root.canonicalize(given.relative()).map_err(|source| FileError::io("find", given, source))?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// Returns all names of a path: itself with the links above it resolved and, if it is a link, its target. A path
    /// that cannot be resolved may be anything: it has the empty path as its name.
    pub(crate) fn names_of(&self, text: &str) -> Vec<String> {
        let Ok(given) = self.given(text) else { return vec![String::new()] };
        self.names(given.relative()).iter().map(|name| name.to_string_lossy().into_owned()).collect()
    }

    fn names(&self, path: &Path) -> Vec<PathBuf> {
        let own = match (path.parent(), path.file_name()) {
            (Some(above), Some(name)) => self.resolve_links(above).map(|above| joined(&above, Path::new(name))),
            _ => None,
        };
        own.into_iter().chain([self.resolve_links(path).unwrap_or_default()]).collect()
    }

    /// Resolves all symbolic links of a path, including links to missing files. The missing part of a path is kept as
    /// written. Returns the empty path if the path cannot be resolved.
    fn resolve_links(&self, path: &Path) -> Option<PathBuf> {
        self.follow_links(path, LINKS_MAX)
    }

    fn follow_links(&self, path: &Path, links_left: usize) -> Option<PathBuf> {
        path.ancestors().find_map(|above| {
            let found = self.root.canonicalize(if above.as_os_str().is_empty() { Path::new(".") } else { above });
            let rest = path.strip_prefix(above).expect("an ancestor is a prefix");
            match found {
                Ok(found) => Some(joined(&found, rest)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let target = self.root.read_link_contents(above).ok()?;
                    // Joining an empty path would add a slash.
                    let next: PathBuf = above.parent()?.join(&target).components().chain(rest.components()).collect();
                    let followed = links_left.checked_sub(1).filter(|_| target.is_relative());
                    Some(followed.and_then(|links_left| self.follow_links(&next, links_left)).unwrap_or_default())
                }
                // A file has nothing below it. It may be a placeholder, so go on with its own path.
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => None,
                Err(_) => Some(PathBuf::new()),
            }
        })
    }

    /// Finds the folder and the name of a path, for writing or deleting. Refuses protected paths.
    pub(crate) fn locate(
        &self,
        given: &GivenPath,
        folders: MissingFolders,
        link: LastLink,
        guard: &Guard<'_>,
    ) -> Result<FileLocation, FileError> {
        let mut path = given.relative().to_owned();
        if link == LastLink::Target && self.root.symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink()) {
            self.names(&path).iter().try_for_each(|name| guard.check_changed(name))?;
            path = self.root.canonicalize(&path).map_err(|source| match FileError::io("follow", given, source) {
                FileError::Missing { path, .. } => FileError::refused(
                    format!("`{path}` is a symbolic link to a path that does not exist"),
                    "name the file that you mean, or delete the link first",
                ),
                other => other,
            })?;
        }
        let Some(name) = path.file_name().map(ToOwned::to_owned) else {
            return Err(FileError::Kind { path: given.to_string(), is: "a folder", wanted: "a file" });
        };
        let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // This check comes before folders are made.
        let ahead = self.resolve_links(above).unwrap_or_default();
        if ahead.components().any(|part| part == Component::ParentDir) {
            return Err(FileError::refused(
                format!("`{given}` goes up with `..` from a folder that does not exist"),
                "write the path without `..`",
            ));
        }
        guard.check_changed(&joined(&ahead, Path::new(&name)))?;
        let failed = |source| self.suggest_near(guard, given, FileError::io("open the folder of", given, source));
        let folder = match self.root.open_dir(above) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && folders == MissingFolders::Create => {
                self.root.create_dir_all(above).and_then(|()| self.root.open_dir(above))
            }
            folder => folder,
        }
        .map_err(failed)?;
        let above = self.root.canonicalize(above).map_err(failed)?;
        // A link on the path may have changed since.
        if let Some(real) = self.current_path(&folder).filter(|real| *real != ahead) {
            guard.check_changed(&joined(&real, Path::new(&name)))?;
        }
        let key = joined(&above, Path::new(&name)).to_string_lossy().into_owned();
        Ok(FileLocation { folder, name, key })
    }

    /// Waits until no other thread of this process writes the file of this key.
    pub(crate) fn lock_for_writing(&self, key: &str) -> MutexGuard<'_, ()> {
        self.lock_writer(writer(key))
    }

    /// Waits until no other thread of this process writes one of these files.
    pub(crate) fn lock_all_for_writing<'a>(&self, keys: impl Iterator<Item = &'a str>) -> Vec<MutexGuard<'_, ()>> {
        // In one order, so that two threads with several locks never wait for each other.
        let places: std::collections::BTreeSet<usize> = keys.map(writer).collect();
        places.into_iter().map(|place| self.lock_writer(place)).collect()
    }

    fn lock_writer(&self, place: usize) -> MutexGuard<'_, ()> {
        // The lock guards nothing in memory, so another writer's panic has broken nothing.
        self.writers[place].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a suggestion to the error for a missing file.
    pub(crate) fn suggest_near(&self, guard: &Guard<'_>, given: &GivenPath, error: FileError) -> FileError {
        match error {
            FileError::Missing { path, .. } => FileError::Missing { path, near: self.near(guard, given.relative()) },
            other => other,
        }
    }

    /// Returns names like the missing one from the deepest existing folder of the path.
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

impl FileLocation {
    /// Reads the file at this place, or returns `None` if there is none.
    pub(crate) fn existing(&self) -> Result<Option<ExistingFile>, FileError> {
        let Some((mut file, metadata)) = self.open()? else { return Ok(None) };
        let failed = |source| FileError::io("read", &self.key, source);
        if metadata.len() <= FILE_BYTES_MAX {
            let content = read_whole(&mut file, &self.key)?;
            return Ok(Some(ExistingFile { hash: blake3::hash(&content), content: Some(content), metadata }));
        }
        let hash = hash_of(file).map_err(failed)?;
        Ok(Some(ExistingFile { hash, content: None, metadata }))
    }

    /// Returns the hash of the file at this place, or `None` if there is none.
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

/// Returns the position of a file's write lock.
fn writer(key: &str) -> usize {
    usize::from(blake3::hash(key.as_bytes()).as_bytes()[0]) % WRITERS_MAX
}

/// Opens an entry of `folder` for reading, unless it is a symbolic link. Does not block on a pipe.
pub(crate) fn open_plain(folder: &Dir, name: &Path) -> io::Result<File> {
    folder.open_with(name, &with_flags(OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW))
}

/// Opens a regular file that a walk has shown, unless it has become a symbolic link or is hidden by now.
pub(crate) fn open_beneath(guard: &Guard<'_>, path: &Path) -> io::Result<File> {
    let root = guard.workspace().root();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // Without any link on the way, the file is at just this path, and no other name needs a check.
    let plain = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let (file, is_shown) = match openat2(root, path, flags, Mode::empty(), plain) {
        Ok(file) => (File::from_std(file.into()), guard.check_shown(path).is_ok()),
        Err(Errno::NOSYS | Errno::AGAIN | Errno::PERM) => {
            let file = open_plain(root, path)?;
            let is_shown = guard.check_opened(&file, path).is_ok();
            (file, is_shown)
        }
        Err(error) => return Err(error.into()),
    };
    if is_shown && file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::PermissionDenied.into()) }
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
        // A file can grow while it is read, and kernel files claim to be empty, so the bytes read are bounded.
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut content).map_err(failed)?;
        bytes = content.len() as u64;
    }
    if bytes > FILE_BYTES_MAX {
        return Err(FileError::TooLarge { path: shown.to_owned(), bytes, bytes_max: FILE_BYTES_MAX });
    }
    Ok(content)
}

/// Returns the kind of a file in words.
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

/// Checks that an open file is regular. It asks the handle, because the path may lead to another file by now.
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

/// Returns the options to open a file for reading, which do not block on a pipe.
pub(crate) fn read_options() -> OpenOptions {
    with_flags(OFlags::NONBLOCK | OFlags::NOCTTY)
}

fn with_flags(flags: OFlags) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(flags.bits().cast_signed());
    options
}

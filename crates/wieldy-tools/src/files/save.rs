//! Atomic saving: a file gets its whole new content or keeps the old one, and never overwrites a concurrent change.
//!
//! The content goes to a file without a name (`O_TMPFILE`), which the kernel removes if this process is killed. Once
//! all of it is on disk, the file gets a temporary name, and is renamed over the old file at once. On filesystems
//! without `O_TMPFILE`, the file has a temporary name from the start.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

use blake3::Hash;
use cap_std::fs::{Dir, File, MetadataExt, OpenOptions, Permissions, PermissionsExt};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;

use super::error::FileError;
use super::workspace::{ExistingFile, FileLocation};

/// Writes `content` to `place`, which must still hold the file `replaces`, or nothing if that is `None`.
pub(crate) fn save(place: &FileLocation, content: &[u8], replaces: Option<&ExistingFile>) -> Result<(), FileError> {
    match save_staged(UnnamedFile::stage, place, content, replaces) {
        Err(SaveError::Io(error)) if unsupported(&error) => save_staged(TemporaryFile::stage, place, content, replaces),
        result => result,
    }
    .map_err(|error| match error {
        SaveError::Changed => FileError::Stale { path: place.key.clone() },
        SaveError::ReadBack(error) => error,
        SaveError::Io(source) => FileError::io("write", &place.key, source),
    })
}

enum SaveError {
    /// The file changed after the caller read it.
    Changed,
    ReadBack(FileError),
    Io(io::Error),
}

impl From<io::Error> for SaveError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Written content that is not yet visible at its place.
trait StagedFile<'a>: Sized {
    fn file(&self) -> &File;

    /// Gives the content a temporary name in the folder of its future place.
    fn into_named(self) -> io::Result<TemporaryFile<'a>>;
}

fn save_staged<'a, S: StagedFile<'a>>(
    stage: fn(&'a Dir) -> io::Result<S>,
    place: &'a FileLocation,
    content: &[u8],
    replaces: Option<&ExistingFile>,
) -> Result<(), SaveError> {
    let staged = stage(&place.folder)?;
    let mut file = staged.file();
    file.write_all(content)?;
    if let Some(existing) = replaces {
        copy_owner_and_mode(file, existing)?;
    }
    file.sync_all()?;
    // As late as possible: a change between this check and the rename below is not noticed.
    let expected: Option<Hash> = replaces.map(|existing| existing.hash);
    if place.hash().map_err(SaveError::ReadBack)? != expected {
        return Err(SaveError::Changed);
    }
    let temporary = staged.into_named()?;
    temporary.rename_to(Path::new(&place.name), replaces.is_some())
}

/// Gives the new file the owner and the permissions of the old one.
fn copy_owner_and_mode(file: &File, existing: &ExistingFile) -> io::Result<()> {
    let (ours, theirs) = (file.metadata()?, &existing.metadata);
    if (ours.uid(), ours.gid()) != (theirs.uid(), theirs.gid()) {
        // Only the superuser may give files away. For others the file becomes their own.
        let _ = rustix::fs::fchown(file, Some(Uid::from_raw(theirs.uid())), Some(Gid::from_raw(theirs.gid())));
    }
    // The setuid bits are dropped: new content is not trusted to run as its owner because the old one was.
    file.set_permissions(Permissions::from_mode(theirs.mode() & 0o777))
}

/// A file without a name.
struct UnnamedFile<'a> {
    folder: &'a Dir,
    file: File,
}

impl<'a> UnnamedFile<'a> {
    fn stage(folder: &'a Dir) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::openat(folder, ".", flags, Mode::from_raw_mode(0o666))?;
        Ok(Self { folder, file: File::from_std(file.into()) })
    }
}

impl<'a> StagedFile<'a> for UnnamedFile<'a> {
    fn file(&self) -> &File {
        &self.file
    }

    fn into_named(self) -> io::Result<TemporaryFile<'a>> {
        let name = temporary_name();
        // Older kernels let only the superuser name a file by its handle alone; all let its owner do it through /proc.
        rustix::fs::linkat(&self.file, "", self.folder, &name, AtFlags::EMPTY_PATH).or_else(|_| {
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            rustix::fs::linkat(CWD, own, self.folder, &name, AtFlags::SYMLINK_FOLLOW)
        })?;
        Ok(TemporaryFile { folder: self.folder, file: self.file, name, renamed: false })
    }
}

/// A file with a random temporary name; it is removed on drop.
struct TemporaryFile<'a> {
    folder: &'a Dir,
    file: File,
    name: String,
    renamed: bool,
}

impl<'a> TemporaryFile<'a> {
    fn stage(folder: &'a Dir) -> io::Result<Self> {
        let name = temporary_name();
        let file = folder.open_with(&name, OpenOptions::new().write(true).create_new(true))?;
        Ok(Self { folder, file, name, renamed: false })
    }

    fn rename_to(mut self, name: &Path, replace: bool) -> Result<(), SaveError> {
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        match rustix::fs::renameat_with(self.folder, &self.name, self.folder, name, flags) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(SaveError::Changed),
            // Not every filesystem supports a rename that replaces nothing.
            Err(Errno::INVAL | Errno::NOSYS) => self.folder.rename(&self.name, self.folder, name)?,
            Err(error) => return Err(SaveError::Io(error.into())),
        }
        self.renamed = true;
        // The file is in place. Syncing the folder, so that its entry survives a power cut too, is only an attempt.
        let _ = self.folder.try_clone().and_then(|folder| Dir::reopen_dir(&folder)?.into_std_file().sync_all());
        Ok(())
    }
}

impl<'a> StagedFile<'a> for TemporaryFile<'a> {
    fn file(&self) -> &File {
        &self.file
    }

    fn into_named(self) -> io::Result<TemporaryFile<'a>> {
        Ok(self)
    }
}

impl Drop for TemporaryFile<'_> {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = self.folder.remove_file(&self.name);
        }
    }
}

/// Returns true if the error says that files without a name are not supported here, or cannot be given a name.
fn unsupported(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    number.is_some_and(|number| {
        [Errno::OPNOTSUPP, Errno::ISDIR, Errno::INVAL, Errno::NOENT, Errno::NOSYS, Errno::PERM].contains(&number)
    })
}

fn temporary_name() -> String {
    format!(".wieldy-{:016x}.tmp", RandomState::new().hash_one(std::process::id()))
}

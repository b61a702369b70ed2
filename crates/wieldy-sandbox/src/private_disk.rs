//! Private folders of sandboxes on a disk, below a folder that the operator names: its own folder in there, the checks
//! of that folder, and the removal of what sandboxes leave.
//!
//! `FOLDER/wieldy-sandboxes/native-PID-N/SANDBOX` has the private folders of one sandbox. The fork server makes it and
//! removes it; the next start removes the folders of dead executors.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::io::Errno;
use wieldy_core::{Level, SandboxId};

use crate::state_dir::{StateDir, sweep_folder};
use crate::supervise::socket::finish_before_exit;
use crate::view::placeholders::open_plain;

/// The folder of our own below the operator's folder.
const OWN: &str = "wieldy-sandboxes";

/// The reason why private folders cannot be on a disk.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrivateDiskError {
    #[error("`{0}` cannot hold the private folders of sandboxes: write an absolute path without `.`, `..` and links")]
    NotPlain(PathBuf),
    #[error("`{0}` cannot hold the private folders of sandboxes; make it a folder that this user can write to")]
    Unusable(PathBuf, #[source] io::Error),
    #[error("`{0}` is a link or no folder, so it cannot hold the private folders of sandboxes; remove it")]
    NoFolder(PathBuf),
    #[error(
        "`{path}` belongs to user {owner}, so it cannot hold the private folders of sandboxes; \
         choose a folder of your own or of root"
    )]
    ForeignOwner { path: PathBuf, owner: u32 },
    #[error(
        "other users can change `{path}` (mode {mode:o}), so it cannot hold the private folders of sandboxes; `chmod go-w`, or choose another folder"
    )]
    OpenToOthers { path: PathBuf, mode: u32 },
    #[error("`{path}` has mode {mode:o}, so other users may see the private folders of sandboxes; `chmod 700`")]
    NotPrivate { path: PathBuf, mode: u32 },
    #[error(
        "the private folders of sandboxes are in `{folder}`, which must be apart from the workspace `{workspace}`; \
         choose another folder"
    )]
    InWorkspace { folder: PathBuf, workspace: PathBuf },
}

/// The folder of one executor for the private folders of its sandboxes, removed with everything in it on drop.
pub(crate) struct PrivateDisk {
    own: PathBuf,
    folder: PathBuf,
    /// `None` while it is dropped.
    state: Option<StateDir>,
}

impl PrivateDisk {
    /// Makes the folder of this executor below the operator's folder.
    pub(crate) fn make(folder: &Path, level: Level) -> Result<Self, PrivateDiskError> {
        let own = own_folder(folder)?;
        let state =
            StateDir::make(&own, level.as_str()).map_err(|error| PrivateDiskError::Unusable(own.clone(), error))?;
        Ok(Self { own, folder: state.folder().to_owned(), state: Some(state) })
    }

    /// Returns the folder to make for a sandbox with this workspace.
    pub(crate) fn folder_of(&self, id: &SandboxId) -> PathBuf {
        self.folder.join(&id.0)
    }

    /// Fails if a program in this workspace could reach the private folders, or the workspace is in one.
    pub(crate) fn check_apart(&self, workspace: &Path) -> Result<(), PrivateDiskError> {
        if self.own.starts_with(workspace) || workspace.starts_with(&self.own) {
            let (folder, workspace) = (self.own.clone(), workspace.to_owned());
            return Err(PrivateDiskError::InWorkspace { folder, workspace });
        }
        Ok(())
    }
}

impl Drop for PrivateDisk {
    fn drop(&mut self) {
        const PATIENCE: Duration = Duration::from_secs(3);
        let (folder, state) = (self.folder.clone(), self.state.take());
        // The last sandboxes are ending: the fork server removes their folders when no process is left in them.
        let removing = std::thread::Builder::new().name("wieldy-private-disk".into()).spawn(move || {
            let until = Instant::now() + PATIENCE;
            let has_sandbox = || {
                let mut entries = fs::read_dir(&folder).into_iter().flatten().flatten();
                entries.any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"native-"))
            };
            while has_sandbox() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(2));
            }
            drop(state);
        });
        removing.into_iter().for_each(finish_before_exit);
    }
}

/// Returns the path of our own folder below the operator's.
pub(crate) fn own_path(folder: &Path) -> PathBuf {
    folder.join(OWN)
}

/// Removes the private folders of dead executors below the operator's folder.
pub(crate) fn sweep(folder: &Path) -> usize {
    // If the folder is not safe to use, nothing in it is ours.
    if !own_path(folder).exists() {
        return 0;
    }
    own_folder(folder).map_or(0, |own| sweep_folder(&own, |_, _| true))
}

/// Makes our own folder, if it is missing, and checks it.
fn own_folder(folder: &Path) -> Result<PathBuf, PrivateDiskError> {
    let is_plain = folder.is_absolute() && folder.components().collect::<PathBuf>().as_os_str() == folder.as_os_str();
    if !is_plain || folder.components().any(|part| part.as_os_str() == OsStr::new("..")) {
        return Err(PrivateDiskError::NotPlain(folder.to_owned()));
    }
    let opened =
        open_plain(folder, OFlags::RDONLY | OFlags::DIRECTORY).map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => PrivateDiskError::NotPlain(folder.to_owned()),
            _ => PrivateDiskError::Unusable(folder.to_owned(), error),
        })?;
    // Another user who can change a folder on the way could put another one in our folder's place.
    folder.ancestors().try_for_each(check_kept_by_owner)?;
    let own = own_path(folder);
    match mkdirat(&opened, OWN, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(PrivateDiskError::Unusable(folder.to_owned(), error.into())),
    }
    let made = openat(&opened, OWN, OFlags::RDONLY | FOLDER, Mode::empty());
    let made = made.map_err(|_| PrivateDiskError::NoFolder(own.clone()))?;
    let found = rustix::fs::fstat(&made).map_err(|error| PrivateDiskError::Unusable(own.clone(), error.into()))?;
    if found.st_uid != rustix::process::geteuid().as_raw() {
        return Err(PrivateDiskError::ForeignOwner { path: own, owner: found.st_uid });
    }
    if found.st_mode & 0o077 != 0 {
        return Err(PrivateDiskError::NotPrivate { path: own, mode: found.st_mode & 0o7777 });
    }
    Ok(own)
}

const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Fails if another user, apart from root, can rename what is in a folder.
fn check_kept_by_owner(folder: &Path) -> Result<(), PrivateDiskError> {
    let found = fs::metadata(folder).map_err(|error| PrivateDiskError::Unusable(folder.to_owned(), error))?;
    if ![0, rustix::process::geteuid().as_raw()].contains(&found.uid()) {
        return Err(PrivateDiskError::ForeignOwner { path: folder.to_owned(), owner: found.uid() });
    }
    let (mode, is_sticky) = (found.mode() & 0o7777, found.mode() & libc::S_ISVTX != 0);
    if mode & 0o022 != 0 && !is_sticky {
        return Err(PrivateDiskError::OpenToOthers { path: folder.to_owned(), mode });
    }
    Ok(())
}

/// Removes a folder with everything in it, however deep it is. Follows no link. A folder in it that its owner closed
/// is opened before.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    let (parent, name) = (path.parent().unwrap_or(Path::new("/")), path.file_name().unwrap_or_default());
    let parent = open_plain(parent, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let Some(mut here) = open_to_empty(&parent, name)? else { return Ok(()) };
    let mut left = names(&here)?;
    // For each folder above: the folder, the names that are left in it, and the name of the one below. One descriptor
    // at a time is open, and no path and no stack gets long.
    let mut above = Vec::new();
    loop {
        if let Some(entry) = left.pop() {
            if is_folder_left(&here, &entry)?
                && let Some(inner) = open_to_empty(&here, &entry)?
            {
                above.push((id_of(&here)?, std::mem::replace(&mut left, names(&inner)?), entry));
                here = inner;
            }
        } else if let Some((id, rest, name)) = above.pop() {
            let upper = openat(&here, "..", OFlags::RDONLY | FOLDER, Mode::empty())?;
            if id_of(&upper)? != id {
                return Err(io::Error::other("a folder was moved while it was removed"));
            }
            unlinkat(&upper, name, AtFlags::REMOVEDIR)?;
            (here, left) = (upper, rest);
        } else {
            return Ok(unlinkat(&parent, name, AtFlags::REMOVEDIR)?);
        }
    }
}

fn id_of(folder: &OwnedFd) -> io::Result<(u64, u64)> {
    let found = rustix::fs::fstat(folder)?;
    Ok((found.st_dev, found.st_ino))
}

/// Removes a file or an empty folder. Returns true if it is a folder that is not empty.
fn is_folder_left(folder: &OwnedFd, name: &OsStr) -> io::Result<bool> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(false),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    match unlinkat(folder, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(false),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Opens a folder, after it was made accessible. Returns `None` if there is none.
fn open_to_empty(parent: &OwnedFd, name: &OsStr) -> io::Result<Option<OwnedFd>> {
    // No program is left that could put a link in its place.
    match openat(parent, name, OFlags::PATH | FOLDER, Mode::empty()) {
        Ok(_) => {}
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let _ = rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty());
    Ok(Some(openat(parent, name, OFlags::RDONLY | FOLDER, Mode::empty())?))
}

fn names(folder: &OwnedFd) -> io::Result<Vec<std::ffi::OsString>> {
    use std::os::unix::ffi::OsStrExt;
    let mut names = Vec::new();
    for entry in Dir::read_from(folder.as_fd())? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if ![&b"."[..], b".."].contains(&name) {
            names.push(OsStr::from_bytes(name).to_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct World {
        root: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir(root.path().join("disk")).unwrap();
            Self { root }
        }

        fn disk(&self) -> PathBuf {
            self.root.path().canonicalize().unwrap().join("disk")
        }

        fn refused(&self) -> String {
            let refused = PrivateDisk::make(&self.disk(), Level::Native).err().expect("it is refused").to_string();
            refused.replace(self.disk().to_str().unwrap(), "DISK")
        }
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn the_folder_is_ours_alone_and_is_gone_with_its_executor() {
        let world = World::new();
        let disk = PrivateDisk::make(&world.disk(), Level::Native).unwrap();
        let own = world.disk().join(OWN);
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o7777, 0o700);
        let folder = disk.folder_of(&SandboxId("native-1-1".into()));
        assert_eq!(folder.parent().unwrap().parent().unwrap(), own);
        fs::create_dir_all(folder.parent().unwrap().join("left/in")).unwrap();
        drop(disk);
        crate::finish();
        assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
    }

    #[test]
    fn a_link_in_the_place_is_refused_and_not_followed() {
        let world = World::new();
        let elsewhere = tempfile::tempdir().unwrap();
        symlink(elsewhere.path(), world.disk().join(OWN)).unwrap();
        assert_eq!(
            world.refused(),
            "`DISK/wieldy-sandboxes` is a link or no folder, so it cannot hold the private folders of sandboxes; remove it"
        );
        fs::remove_file(world.disk().join(OWN)).unwrap();
        fs::rename(world.disk(), world.root.path().join("real")).unwrap();
        symlink("real", world.disk()).unwrap();
        let plain = "write an absolute path without `.`, `..` and links";
        assert_eq!(world.refused(), format!("`DISK` cannot hold the private folders of sandboxes: {plain}"));
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(world.root.path().join("real")).unwrap().count(), 0);
        for path in ["relative", "/tmp/../tmp", "/tmp/./x"] {
            let refused = PrivateDisk::make(Path::new(path), Level::Native).err().unwrap();
            assert!(matches!(refused, PrivateDiskError::NotPlain(_)), "{path}: {refused}");
        }
    }

    #[test]
    fn a_folder_that_others_can_enter_or_replace_is_refused() {
        let world = World::new();
        let own = world.disk().join(OWN);
        fs::create_dir(&own).unwrap();
        set_mode(&own, 0o750);
        let told = "`DISK/wieldy-sandboxes` has mode 750, so other users may see the private folders of sandboxes; `chmod 700`";
        assert_eq!(world.refused(), told);
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o7777, 0o750, "it is left as it is");
        fs::remove_dir(&own).unwrap();
        set_mode(&world.disk(), 0o777);
        let told = "other users can change `DISK` (mode 777), so it cannot hold the private folders of sandboxes";
        assert!(world.refused().starts_with(told), "{}", world.refused());
        set_mode(&world.disk(), 0o1777);
        drop(PrivateDisk::make(&world.disk(), Level::Native).unwrap());
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            wieldy_testkit::skip("only root can give a folder to another user");
            return;
        }
        let world = World::new();
        let own = world.disk().join(OWN);
        fs::create_dir(&own).unwrap();
        set_mode(&own, 0o700);
        for (path, name) in [(own, "DISK/wieldy-sandboxes"), (world.disk(), "DISK")] {
            std::os::unix::fs::chown(&path, Some(1234), Some(1234)).unwrap();
            let told = format!("`{name}` belongs to user 1234, so it cannot hold the private folders of sandboxes");
            assert!(world.refused().starts_with(&told), "{}", world.refused());
        }
    }

    #[test]
    fn a_workspace_around_or_inside_is_refused() {
        let world = World::new();
        let disk = PrivateDisk::make(&world.disk(), Level::Native).unwrap();
        for workspace in [world.disk(), world.root.path().into(), world.disk().join(OWN).join("native-1-0/x")] {
            let refused = disk.check_apart(&workspace).unwrap_err().to_string();
            assert!(refused.contains("must be apart from the workspace"), "{refused}");
        }
        disk.check_apart(&world.disk().join("project")).unwrap();
    }

    #[test]
    fn what_a_dead_executor_left_is_removed_and_a_living_ones_is_not() {
        let world = World::new();
        assert_eq!(sweep(&world.disk()), 0, "nothing is made");
        assert!(!world.disk().join(OWN).exists());
        let living = PrivateDisk::make(&world.disk(), Level::Native).unwrap();
        let dead = world.disk().join(OWN).join("native-4000000000-0");
        fs::create_dir_all(dead.join("native-1-1/tmp/deep")).unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("kept"), "").unwrap();
        symlink(outside.path(), dead.join("native-1-1/tmp/link")).unwrap();
        assert_eq!((sweep(&world.disk()), dead.exists()), (1, false));
        assert!(living.folder.exists() && outside.path().join("kept").exists());
    }

    #[test]
    fn a_tree_is_removed_however_deep_wide_or_closed() {
        let world = World::new();
        let tree = world.disk().join("tree");
        fs::create_dir(&tree).unwrap();
        let mut here = open_plain(&tree, OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
        for _ in 0..1_500 {
            mkdirat(&here, "x", Mode::from_raw_mode(0o700)).unwrap();
            rustix::fs::symlinkat("/", &here, "link").unwrap();
            here = openat(&here, "x", OFlags::RDONLY | FOLDER, Mode::empty()).unwrap();
        }
        fs::create_dir_all(tree.join("wide/1/2/3")).unwrap();
        fs::write(tree.join("wide/1/file"), "").unwrap();
        fs::create_dir_all(tree.join("closed/inner/file")).unwrap();
        set_mode(&tree.join("closed/inner"), 0);
        set_mode(&tree.join("closed"), 0);
        remove_tree(&tree).unwrap();
        assert_eq!(fs::read_dir(world.disk()).unwrap().count(), 0);
        remove_tree(&tree).unwrap();
    }
}

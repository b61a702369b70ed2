//! Builds the file tree that the processes of a sandbox see: a new root of mounts, with nothing else of the host.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
};

use super::placeholders::open_plain;
use super::plan::{Kind, Room, Step};
use crate::sys::{self, MountChange};

/// Where the new root stands before we move there. What is in that folder of the old one is only covered, and nobody needs it: nothing of
/// it may ever be shown.
const NEW_ROOT: &str = "/proc";
/// A file system in the new root with the files that we make, to be shown elsewhere, and two folders that others are mounted on. It is
/// gone before the sandbox is ready. Nobody else may have anything mounted in `/dev`.
const WORKSHOP: &str = "/dev/workshop";
/// The old root.
const MACHINE: &str = "/dev/workshop/machine";
/// The folders that are the sandbox's own. They are parts of one file system, since making one takes much longer than showing a part of it.
const PRIVATE: &str = "/dev/workshop/private";
/// What covers that which is hidden.
const NO_FOLDER: &str = "/dev/workshop/no-folder";
const NO_FILE: &str = "/dev/workshop/no-file";

/// Device files that are shown as they are.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

type Failure = (String, io::Error);

/// Whatever is mounted from now on is not seen outside, and the other way round.
pub(crate) fn detach() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Copies of the mounts that the plan shows, by the number of their step.
pub(crate) struct Sources {
    binds: HashMap<usize, OwnedFd>,
    devices: Vec<(&'static str, OwnedFd)>,
}

/// Opens everything that the first steps show, as long as we are still who may see it.
pub(crate) fn open_sources(steps: &[Step]) -> Result<Sources, Failure> {
    open_sources_in(Path::new("/"), steps, HashMap::new())
}

fn open_sources_in(machine: &Path, steps: &[Step], mut binds: HashMap<usize, OwnedFd>) -> Result<Sources, Failure> {
    // Nothing that a plan shows is reached through a link, unless somebody has put one there since.
    let copy = |path: &Path| copy_of(&open_plain(&below(machine, path), OFlags::PATH)?);
    for (number, step) in steps.iter().enumerate() {
        if let Step::Bind { source, optional, .. } = step
            && !binds.contains_key(&number)
        {
            match copy(source) {
                Ok(mount) => drop(binds.insert(number, mount)),
                Err(error) if *optional && error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err((format!("opening `{}`", source.display()), error)),
            }
        }
    }
    let device = |name: &'static str| {
        let path = Path::new("/dev").join(name);
        copy(&path).map(|mount| (name, mount)).map_err(|error| (format!("opening `{}`", path.display()), error))
    };
    let devices = if steps.contains(&Step::Dev) { &DEVICES[..] } else { &[] };
    Ok(Sources { binds, devices: devices.iter().copied().map(device).collect::<Result<_, _>>()? })
}

/// The new root while it is being built.
pub(crate) struct NewRoot {
    mount: OwnedFd,
    root: OwnedFd,
    files_made: Cell<u32>,
}

const READ_ONLY: MountChange<'static> = MountChange { read_only: true, owners: None };

impl NewRoot {
    /// Moves to an empty root, from which the old one can still be seen. Of the steps that will follow, only those that say how large
    /// something is are looked at.
    pub(crate) fn begin(steps: &[Step]) -> io::Result<Self> {
        let no_room = || io::Error::other("the plan has no root");
        let root_room = steps.iter().find_map(Step::room).ok_or_else(no_room)?;
        let private_room = private_room(steps).ok_or_else(no_room)?;
        let mount = memory(root_room, 0o755)?;
        attach(&mount, NEW_ROOT)?;
        rustix::process::chdir(NEW_ROOT)?;
        let inner = |path: &'static str| path.trim_start_matches('/');
        fs::create_dir(inner("/dev"))?;
        fs::set_permissions(inner("/dev"), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(inner(WORKSHOP))?;
        attach(&memory(Room { bytes: 1 << 20, inodes: 256 }, 0o755)?, inner(WORKSHOP))?;
        fs::create_dir(inner(MACHINE))?;
        rustix::process::pivot_root(".", inner(MACHINE))?;
        rustix::process::chdir("/")?;
        fs::create_dir(PRIVATE)?;
        attach(&memory(private_room, 0o755)?, PRIVATE)?;
        fs::create_dir(NO_FOLDER)?;
        fs::set_permissions(NO_FOLDER, fs::Permissions::from_mode(0o000))?;
        write_file(Path::new(NO_FILE), "", 0)?;
        Ok(Self { mount, root: open_folder("/")?, files_made: Cell::new(0) })
    }

    /// Takes the first steps.
    pub(crate) fn add(&self, steps: &[Step], mut sources: Sources) -> Result<(), Failure> {
        for (number, step) in steps.iter().enumerate() {
            self.take(step, number, &mut sources).map_err(|error| (format!("the step `{step}`"), error))?;
        }
        Ok(())
    }

    /// Takes the last steps, to some of which mounts were given; closes the root, and leaves the old one.
    pub(crate) fn finish(self, steps: &[Step], given: HashMap<usize, OwnedFd>) -> Result<(), Failure> {
        self.add(steps, open_sources_in(Path::new(MACHINE), steps, given)?)?;
        let close = || -> io::Result<()> {
            unmount(WORKSHOP, UnmountFlags::DETACH)?;
            fs::remove_dir(WORKSHOP)?;
            sys::change_mount(self.mount.as_fd(), false, READ_ONLY)
        };
        close().map_err(|error| ("leaving the machine's root".into(), error))
    }

    fn take(&self, step: &Step, number: usize, sources: &mut Sources) -> io::Result<()> {
        match step {
            Step::Folder { path } => self.make_folder(path, 0o755),
            Step::Link { path, target } => {
                self.make_folder(path.parent().unwrap_or(path), 0o755)?;
                symlink(target, path)
            }
            Step::File { path, content } => self.show_file(path, content, 0o444),
            // It is there from the beginning.
            Step::Tmpfs { path, .. } if path == Path::new("/") => Ok(()),
            Step::Tmpfs { path, mode, .. } => {
                let name = path.to_string_lossy().replace('/', "-");
                let folder = Path::new(PRIVATE).join(name.trim_start_matches('-'));
                fs::create_dir(&folder)?;
                fs::set_permissions(&folder, fs::Permissions::from_mode(*mode))?;
                self.make_folder(path, 0o755)?;
                self.attach(&copy_of(&open_folder(&folder)?)?, path)
            }
            Step::Bind { target, writable, .. } => {
                let Some(mount) = sources.binds.remove(&number) else { return Ok(()) };
                let is_folder = rustix::fs::fstat(&mount).map(|entry| is_folder(entry.st_mode))?;
                self.make_mount_point(target, is_folder)?;
                sys::change_mount(mount.as_fd(), true, MountChange { read_only: !writable, owners: None })?;
                self.attach(&mount, target)
            }
            Step::Proc => {
                self.make_folder(Path::new("/proc"), 0o555)?;
                let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NODEV;
                let mount = file_system("proc", &[], attributes | MountAttrFlags::MOUNT_ATTR_NOEXEC)?;
                self.attach(&mount, Path::new("/proc"))
            }
            Step::Dev => self.devices(&sources.devices),
            Step::Hide { path, kind } => {
                let nothing = if *kind == Kind::Folder { NO_FOLDER } else { NO_FILE };
                unless_gone(self.show_read_only(nothing, path))
            }
            Step::Protect { path } => self.protect(path),
            // Done when everything else is.
            Step::Seal => Ok(()),
        }
    }

    fn open(&self, path: &Path) -> io::Result<OwnedFd> {
        open_below(&self.root, path)
    }

    fn attach(&self, mount: &OwnedFd, path: &Path) -> io::Result<()> {
        attach_at(mount, &self.open(path)?)
    }

    fn make_folder(&self, path: &Path, mode: u32) -> io::Result<()> {
        if self.open(path).is_ok() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.make_folder(parent, 0o755)?;
        }
        fs::create_dir(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    }

    fn make_mount_point(&self, path: &Path, is_folder: bool) -> io::Result<()> {
        if is_folder {
            return self.make_folder(path, 0o755);
        }
        if self.open(path).is_ok() {
            return Ok(());
        }
        self.make_folder(path.parent().unwrap_or(path), 0o755)?;
        fs::write(path, "")
    }

    /// Shows a file of our own making at a path.
    fn show_file(&self, path: &Path, content: &str, mode: u32) -> io::Result<()> {
        let number = self.files_made.replace(self.files_made.get() + 1);
        let file = Path::new(WORKSHOP).join(number.to_string());
        write_file(&file, content, mode)?;
        self.make_mount_point(path, false)?;
        self.show_read_only(&file, path)
    }

    /// Shows what lies in the workshop at a path of the new root.
    fn show_read_only(&self, what: impl AsRef<Path>, path: &Path) -> io::Result<()> {
        let what = rustix::fs::open(what.as_ref(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let copy = copy_of(&what)?;
        sys::change_mount(copy.as_fd(), false, READ_ONLY)?;
        self.attach(&copy, path)
    }

    fn devices(&self, devices: &[(&'static str, OwnedFd)]) -> io::Result<()> {
        let dev = Path::new("/dev");
        self.make_folder(dev, 0o755)?;
        for (name, mount) in devices {
            let path = dev.join(name);
            fs::write(&path, "")?;
            sys::change_device_mount(mount.as_fd())?;
            self.attach(mount, &path)?;
        }
        let links =
            [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx")];
        for (name, target) in links {
            symlink(target, dev.join(name))?;
        }
        let pts = dev.join("pts");
        self.make_folder(&pts, 0o755)?;
        let options = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620")];
        let terminals = file_system("devpts", &options, MountAttrFlags::MOUNT_ATTR_NOEXEC)?;
        self.attach(&terminals, &pts)?;
        self.make_folder(&dev.join("shm"), 0o755)
    }

    /// Nothing may be written there, nor may it be put aside.
    fn protect(&self, path: &Path) -> io::Result<()> {
        // It was there a moment ago. Should it be gone, somebody plays with us, and could make it again.
        let place = self.open(path)?;
        let copy = copy_of(&place)?;
        sys::change_mount(copy.as_fd(), true, READ_ONLY)?;
        attach_at(&copy, &place)
    }
}

/// Takes steps once more that cover places which were made anew, in the mount namespace that this process has entered. Covers that are
/// still there stay.
pub(crate) fn mask_again(steps: &[Step]) -> io::Result<()> {
    let root = open_folder("/")?;
    for step in steps {
        let place = open_below(&root, step.path())?;
        let found = rustix::fs::statx(&place, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
        // A person has put a link there: it would be protected, but not the file that it leads to.
        if u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFLNK {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            continue;
        }
        let copy = copy_of(&place)?;
        if matches!(step, Step::Protect { .. }) {
            sys::change_mount(copy.as_fd(), true, READ_ONLY)?;
        }
        attach_at(&copy, &place)?;
    }
    Ok(())
}

/// Opens a place in a root without following links, which others may have made in what is mounted there.
fn open_below(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let inner = path.strip_prefix("/").unwrap_or(path);
    let inner = if inner.as_os_str().is_empty() { Path::new(".") } else { inner };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(root, inner, flags, Mode::empty(), resolve)?)
}

/// A path of the machine, wherever that is.
fn below(machine: &Path, path: &Path) -> PathBuf {
    machine.join(path.strip_prefix("/").unwrap_or(path))
}

/// What went away while the plan was made needs no cover.
fn unless_gone(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if is_gone(&error) => Ok(()),
        done => done,
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ELOOP | libc::ENOTDIR))
}

fn write_file(path: &Path, content: &str, mode: u32) -> io::Result<()> {
    let mut file = fs::File::create_new(path)?;
    file.write_all(content.as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn is_folder(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFDIR
}

pub(crate) fn copy_of(place: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    Ok(open_tree(place, "", flags)?)
}

fn open_folder(path: impl AsRef<Path>) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path.as_ref(), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn attach(mount: &OwnedFd, path: &str) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

fn attach_at(mount: &OwnedFd, place: &OwnedFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", place, "", flags)?)
}

/// How much the folders that are the sandbox's own hold together: as much as one of them may. That of `/run` is the same whatever is
/// allowed, and may be more.
fn private_room(steps: &[Step]) -> Option<Room> {
    let is_limited = |step: &&Step| ![Path::new("/"), Path::new("/run")].contains(&step.path());
    steps.iter().filter(is_limited).filter_map(Step::room).max_by_key(|room| room.bytes)
}

fn memory(room: Room, mode: u32) -> io::Result<OwnedFd> {
    // None at all would be no limit.
    let (bytes, inodes, mode) = (room.bytes.max(1).to_string(), room.inodes.max(1).to_string(), format!("{mode:o}"));
    let options = [("size", bytes.as_str()), ("nr_inodes", &inodes), ("mode", &mode)];
    file_system("tmpfs", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
}

/// A new file system that is not yet anywhere.
fn file_system(name: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let made = fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        if value.is_empty() {
            rustix::mount::fsconfig_set_flag(&made, *key)?;
        } else {
            fsconfig_set_string(&made, *key, *value)?;
        }
    }
    fsconfig_create(&made)?;
    let attributes = attributes | MountAttrFlags::MOUNT_ATTR_NOSUID;
    Ok(fsmount(&made, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

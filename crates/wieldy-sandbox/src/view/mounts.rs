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

/// The mount point of the new root until this process moves there. It covers the host's `/proc`, which no plan may ever
/// show.
const NEW_ROOT: &str = "/proc";
/// A file system in the new root. It holds the files that we make to mount them elsewhere, and two mount points. It is
/// unmounted before the sandbox is ready. No rule can mount anything in `/dev`, so the path is free.
const WORKSHOP: &str = "/dev/workshop";
/// The mount point of the old root.
const MACHINE: &str = "/dev/workshop/machine";
/// The mount point of the private folders. They are parts of one file system, since making one takes much longer than
/// mounting a part of it.
const PRIVATE: &str = "/dev/workshop/private";
/// The mount point of a folder on a disk, which has the private folders instead if there is one.
const ON_DISK: &str = "/dev/workshop/disk";
/// An empty folder that is mounted on hidden folders; `NO_FILE` is for hidden files.
const NO_FOLDER: &str = "/dev/workshop/no-folder";
const NO_FILE: &str = "/dev/workshop/no-file";

/// Device files of the host that a sandbox shows.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

type Failure = (String, io::Error);

/// Makes all mounts private: later mounts inside are not seen outside, nor those outside inside.
pub(crate) fn detach() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Copies of the mounts that a plan shows, by the number of their step.
pub(crate) struct Sources {
    binds: HashMap<usize, OwnedFd>,
    devices: Vec<(&'static str, OwnedFd)>,
}

/// Opens everything that the first steps show, while this process still has the rights to see it.
pub(crate) fn open_sources(steps: &[Step]) -> Result<Sources, Failure> {
    open_sources_in(Path::new("/"), steps, HashMap::new())
}

fn open_sources_in(machine: &Path, steps: &[Step], mut binds: HashMap<usize, OwnedFd>) -> Result<Sources, Failure> {
    // A plan never shows a path through a link, so a link was put there after planning.
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

/// Opens a folder on a disk for the private folders, without devices and set-user-id programs.
pub(crate) fn open_private(folder: &Path) -> io::Result<OwnedFd> {
    let mount = copy_of(&open_plain(folder, OFlags::PATH | OFlags::DIRECTORY)?)?;
    sys::change_mount(mount.as_fd(), true, MountChange::default())?;
    Ok(mount)
}

/// Returns true if this private folder need not be in memory. Shared memory and `/run` are small, and programs expect
/// them to be memory.
pub(crate) fn may_be_on_disk(path: &Path) -> bool {
    ![Path::new("/dev/shm"), Path::new("/run")].contains(&path)
}

/// A new root that is being built.
pub(crate) struct NewRoot {
    mount: OwnedFd,
    has_disk: bool,
    root: OwnedFd,
    files_made: Cell<u32>,
}

const READ_ONLY: MountChange<'static> = MountChange { read_only: true, owners: None };

impl NewRoot {
    /// Makes an empty root and moves to it; the old root can still be reached. Of `steps`, it reads only the sizes.
    /// `disk` is the mount for the private folders, if they are not in memory.
    pub(crate) fn begin(steps: &[Step], disk: Option<OwnedFd>) -> io::Result<Self> {
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
        if let Some(disk) = &disk {
            fs::create_dir(ON_DISK)?;
            attach(disk, ON_DISK)?;
        }
        fs::create_dir(NO_FOLDER)?;
        fs::set_permissions(NO_FOLDER, fs::Permissions::from_mode(0o000))?;
        write_file(Path::new(NO_FILE), "", 0)?;
        Ok(Self { mount, has_disk: disk.is_some(), root: open_folder("/")?, files_made: Cell::new(0) })
    }

    /// Carries out the first steps.
    pub(crate) fn add(&self, steps: &[Step], mut sources: Sources) -> Result<(), Failure> {
        for (number, step) in steps.iter().enumerate() {
            self.take(step, number, &mut sources).map_err(|error| (format!("the step `{step}`"), error))?;
        }
        Ok(())
    }

    /// Carries out the last steps, seals the root and unmounts the old one. `given` are mounts for some of the steps.
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
            // `begin` has made it.
            Step::Tmpfs { path, .. } if path == Path::new("/") => Ok(()),
            Step::Tmpfs { path, mode, .. } => {
                let name = path.to_string_lossy().replace('/', "-");
                let base = if self.has_disk && may_be_on_disk(path) { ON_DISK } else { PRIVATE };
                let folder = Path::new(base).join(name.trim_start_matches('-'));
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
            // `finish` does it after everything else.
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

    /// Mounts a new read-only file at a path.
    fn show_file(&self, path: &Path, content: &str, mode: u32) -> io::Result<()> {
        let number = self.files_made.replace(self.files_made.get() + 1);
        let file = Path::new(WORKSHOP).join(number.to_string());
        write_file(&file, content, mode)?;
        self.make_mount_point(path, false)?;
        self.show_read_only(&file, path)
    }

    /// Mounts a file or folder of the workshop read-only at a path of the new root.
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

    /// Mounts a path on itself, so that it can be neither written nor moved.
    fn protect(&self, path: &Path) -> io::Result<()> {
        // The path existed a moment ago. If it is gone, fail: a command may be removing it to make it again.
        let place = self.open(path)?;
        let copy = copy_of(&place)?;
        sys::change_mount(copy.as_fd(), true, READ_ONLY)?;
        attach_at(&copy, &place)
    }
}

/// Repeats steps that mask placeholders which were made again, in the mount namespace that this process has entered.
/// Skips masks that are still there.
pub(crate) fn mask_again(steps: &[Step]) -> io::Result<()> {
    let root = open_folder("/")?;
    for step in steps {
        let place = open_below(&root, step.path())?;
        let found = rustix::fs::statx(&place, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
        // A person has put a link there. A mask would protect the link, but not its target.
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

/// Opens a path below a root without following links, which other processes may have made there.
fn open_below(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let inner = path.strip_prefix("/").unwrap_or(path);
    let inner = if inner.as_os_str().is_empty() { Path::new(".") } else { inner };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(root, inner, flags, Mode::empty(), resolve)?)
}

/// Returns a path of the host, whose root is at `machine`.
fn below(machine: &Path, path: &Path) -> PathBuf {
    machine.join(path.strip_prefix("/").unwrap_or(path))
}

/// Ignores errors about a path that is gone: it disappeared while the plan was made and needs no mask.
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

/// Returns the size that the private folders share: as much as the largest of them may hold. `/run` does not count,
/// since its size is constant and may be larger.
fn private_room(steps: &[Step]) -> Option<Room> {
    let is_limited = |step: &&Step| ![Path::new("/"), Path::new("/run")].contains(&step.path());
    steps.iter().filter(is_limited).filter_map(Step::room).max_by_key(|room| room.bytes)
}

fn memory(room: Room, mode: u32) -> io::Result<OwnedFd> {
    // A size of 0 would mean no limit.
    let (bytes, inodes, mode) = (room.bytes.max(1).to_string(), room.inodes.max(1).to_string(), format!("{mode:o}"));
    let options = [("size", bytes.as_str()), ("nr_inodes", &inodes), ("mode", &mode)];
    file_system("tmpfs", &options, MountAttrFlags::MOUNT_ATTR_NODEV)
}

/// Makes a file system that is not attached yet.
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

//! Building what the processes of a sandbox see: a new root of mounts, and nothing else of the machine.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
};

use super::plan::{Kind, Plan, Step};
use crate::sys::{self, MountChange};

/// Where the new root is put together. Any folder would do; what it holds is only covered.
const SITE: &str = "/tmp";

/// Device files that are shown as they are.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

type Failure = (String, io::Error);

/// Whatever is mounted from now on is not seen outside, and the other way round.
pub(super) fn detach() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Copies of the mounts that the plan shows, by the number of their step.
pub(super) struct Sources {
    binds: HashMap<usize, OwnedFd>,
    devices: Vec<(&'static str, OwnedFd)>,
}

/// Opens everything that the plan shows, as long as we are still who may see it.
pub(super) fn open_sources(plan: &Plan, mut binds: HashMap<usize, OwnedFd>) -> Result<Sources, Failure> {
    let copy = |path: &Path| {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        open_tree(CWD, path, flags).map_err(io::Error::from)
    };
    for (number, step) in plan.steps.iter().enumerate() {
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
    Ok(Sources { binds, devices: DEVICES.into_iter().map(device).collect::<Result<_, _>>()? })
}

/// Builds the new root, moves there and leaves the old one. Returns the file systems that are only the sandbox's own.
pub(super) fn build(plan: &Plan, mut sources: Sources) -> Result<Vec<CString>, Failure> {
    let failed = |what: String| move |error: io::Error| (what, error);
    let root = tmpfs(&[("mode", "0755"), ("size", "1m"), ("nr_inodes", "4096")])
        .and_then(|root| attach(&root, SITE.as_ref()).map(|()| root))
        .map_err(failed("making a new root".into()))?;
    let site = Site { root: open_folder(SITE.as_ref()).map_err(failed("opening the new root".into()))? };
    let mut private = Vec::new();
    for (number, step) in plan.steps.iter().enumerate() {
        site.take(step, number, &mut sources).map_err(failed(format!("building {step}")))?;
        if let Step::Tmpfs { path, .. } = step {
            private.extend(CString::new(path.as_os_str().as_bytes()));
        }
    }
    let read_only = MountChange { read_only: true, ..MountChange::default() };
    sys::change_mount(root.as_fd(), false, read_only).map_err(failed("closing the new root".into()))?;
    rustix::process::fchdir(&site.root)
        .and_then(|()| rustix::process::pivot_root(".", "."))
        .and_then(|()| unmount(".", UnmountFlags::DETACH))
        .and_then(|()| rustix::process::chdir("/"))
        .map_err(|error| ("moving to the new root".into(), error.into()))?;
    Ok(private)
}

/// The new root while it is being built.
struct Site {
    root: OwnedFd,
}

impl Site {
    fn take(&self, step: &Step, number: usize, sources: &mut Sources) -> io::Result<()> {
        match step {
            Step::Folder { path, mode } => self.make_folder(path, *mode),
            Step::Link { path, target } => symlink(target, self.outside(path)),
            Step::File { path, content } => self.write_file(path, content),
            Step::Tmpfs { path, bytes, files, mode } => {
                self.make_folder(path, 0o755)?;
                let (size, files, mode) = (bytes.to_string(), files.to_string(), format!("{mode:o}"));
                let mount = tmpfs(&[("size", &size), ("nr_inodes", &files), ("mode", &mode)])?;
                self.attach(&mount, path)
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
                let mount = file_system("proc", &[], MountAttrFlags::MOUNT_ATTR_RDONLY)?;
                self.attach(&mount, Path::new("/proc"))
            }
            Step::Dev => self.devices(&sources.devices),
            Step::Hide { path, kind } => self.hide(path, *kind),
            Step::Protect { path } => self.protect(path),
            Step::Pin { path } => self.pin(path),
        }
    }

    /// The path as seen from the old root, for places that only we have made.
    fn outside(&self, path: &Path) -> PathBuf {
        Path::new(SITE).join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Opens a place in the new root without following links, which others may have made in what is mounted there.
    fn open(&self, path: &Path) -> io::Result<OwnedFd> {
        let inner = path.strip_prefix("/").unwrap_or(path);
        let inner = if inner.as_os_str().is_empty() { Path::new(".") } else { inner };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        Ok(rustix::fs::openat2(&self.root, inner, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)?)
    }

    fn attach(&self, mount: &OwnedFd, path: &Path) -> io::Result<()> {
        let target = self.open(path)?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(mount, "", &target, "", flags)?)
    }

    fn make_folder(&self, path: &Path, mode: u32) -> io::Result<()> {
        if self.open(path).is_ok() {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.make_folder(parent, 0o755)?;
        }
        fs::DirBuilder::new().mode(mode).create(self.outside(path))
    }

    fn make_mount_point(&self, path: &Path, is_folder: bool) -> io::Result<()> {
        if is_folder {
            return self.make_folder(path, 0o755);
        }
        if self.open(path).is_ok() {
            return Ok(());
        }
        self.write_file(path, "")
    }

    fn write_file(&self, path: &Path, content: &str) -> io::Result<()> {
        if let Some(parent) = path.parent() {
            self.make_folder(parent, 0o755)?;
        }
        let place = self.outside(path);
        fs::write(&place, content)?;
        fs::set_permissions(place, fs::Permissions::from_mode(0o444))
    }

    fn devices(&self, devices: &[(&'static str, OwnedFd)]) -> io::Result<()> {
        let dev = Path::new("/dev");
        self.make_folder(dev, 0o755)?;
        self.attach(&tmpfs(&[("size", "64k"), ("nr_inodes", "64"), ("mode", "0755")])?, dev)?;
        for (name, mount) in devices {
            let path = dev.join(name);
            fs::write(self.outside(&path), "")?;
            sys::change_device_mount(mount.as_fd())?;
            self.attach(mount, &path)?;
        }
        let links = [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx")];
        for (name, target) in links {
            symlink(target, self.outside(&dev.join(name)))?;
        }
        let pts = dev.join("pts");
        self.make_folder(&pts, 0o755)?;
        let options = [("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620")];
        let terminals = file_system("devpts", &options, MountAttrFlags::MOUNT_ATTR_NOEXEC)?;
        self.attach(&terminals, &pts)?;
        self.make_folder(&dev.join("shm"), 0o1777)
    }

    /// Covers a path with something empty that nobody can open.
    fn hide(&self, path: &Path, kind: Kind) -> io::Result<()> {
        let cover = tmpfs(&[("size", "4k"), ("nr_inodes", "2"), ("mode", "0000")])?;
        match kind {
            Kind::Folder => {
                let read_only = MountChange { read_only: true, owners: None };
                sys::change_mount(cover.as_fd(), false, read_only)?;
                self.attach_if_there(&cover, path)
            }
            Kind::File => {
                let nothing = rustix::fs::openat(&cover, "nothing", OFlags::CREATE | OFlags::CLOEXEC, Mode::empty())?;
                let nothing = copy_of(&nothing)?;
                sys::change_mount(nothing.as_fd(), false, MountChange { read_only: true, owners: None })?;
                self.attach_if_there(&nothing, path)
            }
        }
    }

    /// Nothing may be written there, nor may it be put aside.
    fn protect(&self, path: &Path) -> io::Result<()> {
        self.cover_with_itself(path, true)
    }

    /// It may be written to, but not be put aside for another of its name.
    fn pin(&self, path: &Path) -> io::Result<()> {
        self.cover_with_itself(path, false)
    }

    fn cover_with_itself(&self, path: &Path, read_only: bool) -> io::Result<()> {
        let place = match self.open(path) {
            Ok(place) => place,
            // It went away, or somebody put a link there, which leads to what is protected or not by itself.
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let copy = copy_of(&place)?;
        sys::change_mount(copy.as_fd(), true, MountChange { read_only, owners: None })?;
        self.attach(&copy, path)
    }

    fn attach_if_there(&self, mount: &OwnedFd, path: &Path) -> io::Result<()> {
        match self.attach(mount, path) {
            Err(error) if is_gone(&error) => Ok(()),
            attached => attached,
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ELOOP | libc::ENOTDIR))
}

fn is_folder(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFDIR
}

fn copy_of(place: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(place, "", flags)?)
}

fn open_folder(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn attach(mount: &OwnedFd, path: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

fn tmpfs(options: &[(&str, &str)]) -> io::Result<OwnedFd> {
    file_system("tmpfs", options, MountAttrFlags::empty())
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
    let attributes = attributes | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(&made, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

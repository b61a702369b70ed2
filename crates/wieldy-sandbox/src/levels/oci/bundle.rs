//! Makes the bundle of a container: translates the mount plan to the OCI runtime specification.
//!
//! The root is a folder of our own that contains only mount points and links. Everything else is mounted into it inside
//! the container's own mount namespace, so that neither the host nor an image is ever written to.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    LinuxBuilder, LinuxCapabilities, LinuxNamespaceBuilder, LinuxNamespaceType, Mount, MountBuilder,
    PosixRlimitBuilder, PosixRlimitType, Process, ProcessBuilder, RootBuilder, Spec, SpecBuilder, UserBuilder,
};
use wieldy_core::{Level, Network};

use super::idmap::{AGENT, IdmappedMount};
use crate::filter::oci_profile;
use crate::state_dir::StateDir;
use crate::view::plan::{Kind, Room, Step};

/// Parts of `/proc` that reveal the machine or control it.
const MASKED: [&str; 10] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// The settings of a bundle besides its file tree.
pub(super) struct Frame<'a> {
    pub(super) level: Level,
    pub(super) network: &'a Network,
    /// The network namespace to join, if it exists already.
    pub(super) joined: Option<PathBuf>,
    pub(super) groups: Option<PathBuf>,
    pub(super) annotations: Vec<(String, String)>,
}

/// A process to run in a container.
pub(super) struct Doing<'a> {
    pub(super) words: Vec<String>,
    pub(super) environment: Vec<String>,
    pub(super) folder: &'a Path,
    pub(super) user: u32,
    pub(super) open_files: Option<u64>,
    pub(super) has_terminal: bool,
}

/// A container's file tree, ready to be mounted by a runtime.
pub(super) struct Tree {
    root: PathBuf,
    mounts: Vec<Mount>,
    /// Id-mapped mounts, to be dropped once the container runs.
    pub(super) lent: Vec<IdmappedMount>,
}

impl Tree {
    /// Makes the files and mounts that the steps need.
    pub(super) fn make(id: &str, steps: &[Step], level: Level, home: &StateDir) -> io::Result<Self> {
        let folder = home.container(id);
        let root = folder.join("root");
        for (path, mode) in [(&folder, 0o711), (&root, 0o755), (&folder.join("covers"), 0o711)] {
            fs::DirBuilder::new().mode(mode).create(path)?;
            // The umask does not apply here.
            fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        }
        let mut making =
            Making { id, home, level, steps, masked: folder.join("covers"), root, lent: vec![], mounts: vec![] };
        for (number, step) in steps.iter().enumerate() {
            let told = |error: io::Error| io::Error::new(error.kind(), format!("{step}: {error}"));
            making.take(number, step).map_err(told)?;
        }
        let Making { root, mounts, lent, .. } = making;
        let lent = lent.into_iter().map(|(_, lent)| lent).collect();
        Ok(Self { root, mounts, lent })
    }

    /// Returns the `config.json` of a container that runs a process.
    pub(super) fn config(&self, doing: &Doing<'_>, frame: &Frame<'_>) -> Result<Spec, OciSpecError> {
        use LinuxNamespaceType::{Cgroup, Ipc, Mount, Network as Net, Pid, Uts};
        let namespaces = [Pid, Ipc, Uts, Mount, Cgroup].map(|kind| LinuxNamespaceBuilder::default().typ(kind).build());
        let mut namespaces = namespaces.into_iter().collect::<Result<Vec<_>, _>>()?;
        if *frame.network != Network::Open {
            let network = LinuxNamespaceBuilder::default().typ(Net);
            namespaces.push(match &frame.joined {
                Some(path) => network.path(path).build()?,
                None => network.build()?,
            });
        }
        let mut linux = LinuxBuilder::default()
            .namespaces(namespaces)
            .masked_paths(MASKED.map(String::from))
            .readonly_paths(READ_ONLY.map(String::from));
        if let Some(groups) = &frame.groups {
            linux = linux.cgroups_path(groups);
        }
        if frame.level != Level::Gvisor {
            linux = linux.seccomp(oci_profile::profile()?);
        }
        SpecBuilder::default()
            .version("1.0.2")
            .root(RootBuilder::default().path(&self.root).readonly(true).build()?)
            .hostname("sandbox")
            .mounts(self.mounts.clone())
            .process(process(doing)?)
            .annotations(frame.annotations.iter().cloned().collect::<std::collections::HashMap<_, _>>())
            .linux(linux.build()?)
            .build()
    }
}

/// Returns a process for the specification, without capabilities and without a way to gain any.
pub(super) fn process(doing: &Doing<'_>) -> Result<Process, OciSpecError> {
    let none = || std::collections::HashSet::new();
    let mut capabilities = LinuxCapabilities::default();
    capabilities.set_bounding(Some(none())).set_effective(Some(none())).set_inheritable(Some(none()));
    capabilities.set_permitted(Some(none())).set_ambient(Some(none()));
    let limit = |kind, most: u64| PosixRlimitBuilder::default().typ(kind).hard(most).soft(most).build();
    let mut limits = vec![limit(PosixRlimitType::RlimitCore, 0)?];
    if let Some(open_files) = doing.open_files {
        limits.push(limit(PosixRlimitType::RlimitNofile, open_files)?);
    }
    ProcessBuilder::default()
        .terminal(doing.has_terminal)
        .user(UserBuilder::default().uid(doing.user).gid(doing.user).build()?)
        .args(doing.words.clone())
        .env(doing.environment.clone())
        .cwd(doing.folder)
        .capabilities(capabilities)
        .rlimits(limits)
        .no_new_privileges(true)
        .build()
}

/// Returns the mount source of a private folder, by which gVisor recognizes it in another container. It is absolute,
/// since a relative one would be inside the bundle.
pub(super) fn source_of_memory(path: &Path) -> String {
    format!("/tmpfs{}", path.to_string_lossy().replace('/', "-"))
}

struct Making<'a> {
    id: &'a str,
    home: &'a StateDir,
    level: Level,
    steps: &'a [Step],
    /// The folder of our own files that are mounted over other paths.
    masked: PathBuf,
    root: PathBuf,
    /// Id-mapped mounts by the index of their step.
    lent: Vec<(usize, IdmappedMount)>,
    mounts: Vec<Mount>,
}

impl Making<'_> {
    fn take(&mut self, number: usize, step: &Step) -> io::Result<()> {
        match step {
            Step::Folder { path } => self.place(path, Kind::Folder),
            // Inside a mount, the mounted tree decides if there is a link.
            Step::Link { path, .. } if self.is_in_mount(path) => Ok(()),
            Step::Link { path, target } => {
                self.place(path.parent().unwrap_or(path), Kind::Folder)?;
                symlink(target, self.outside(path))
            }
            // The root is a folder of ours, and read-only for the container from the beginning.
            Step::Tmpfs { path, .. } if path == Path::new("/") => Ok(()),
            Step::Seal => Ok(()),
            Step::Tmpfs { path, room, mode } => {
                self.place(path, Kind::Folder)?;
                if self.outside(path).is_dir() {
                    // runc gives a tmpfs the mode of its mount point.
                    fs::set_permissions(self.outside(path), fs::Permissions::from_mode(*mode))?;
                }
                let source = source_of_memory(path);
                self.mount(path, "tmpfs", Path::new(&source), &self.memory(*room, *mode))
            }
            Step::Bind { source, target, writable, optional } => {
                if *optional && !source.exists() {
                    return Ok(());
                }
                let source = if step.is_granted() { self.lend(number, source)? } else { source.clone() };
                self.bind(&source, target, *writable)
            }
            Step::Proc => {
                self.place(Path::new("/proc"), Kind::Folder)?;
                self.mount(Path::new("/proc"), "proc", Path::new("proc"), &["nosuid", "noexec", "nodev"])
            }
            Step::Dev => self.devices(),
            Step::File { path, content } => {
                let cover = self.masked.join(number.to_string());
                fs::write(&cover, content)?;
                fs::set_permissions(&cover, fs::Permissions::from_mode(0o444))?;
                self.bind(&cover, path, false)
            }
            Step::Hide { path, kind } => {
                let cover = self.nothing(*kind)?;
                self.bind(&cover, path, false)
            }
            Step::Protect { path } => self.protect(path),
        }
    }

    fn outside(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns true if a path is inside a mount of the plan.
    fn is_in_mount(&self, path: &Path) -> bool {
        let is_above = |mount: &Path| mount != Path::new("/") && path != mount && path.starts_with(mount);
        self.steps.iter().any(|step| match step {
            Step::Tmpfs { path, .. } | Step::Bind { target: path, .. } => is_above(path),
            Step::Dev => is_above(Path::new("/dev")),
            _ => false,
        })
    }

    /// Makes a mount point in our root. Does nothing for a path inside another mount.
    fn place(&self, path: &Path, kind: Kind) -> io::Result<()> {
        if self.is_in_mount(path) {
            return Ok(());
        }
        let outside = self.outside(path);
        let folder = if kind == Kind::Folder { Some(outside.as_path()) } else { outside.parent() };
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder.unwrap_or(&self.root))?;
        if kind == Kind::File && !outside.exists() {
            fs::write(outside, "")?;
        }
        Ok(())
    }

    fn mount<S: AsRef<str>>(&mut self, path: &Path, kind: &str, source: &Path, options: &[S]) -> io::Result<()> {
        let options: Vec<String> = options.iter().map(|option| option.as_ref().to_owned()).collect();
        let mount = MountBuilder::default().destination(path).typ(kind).source(source).options(options).build();
        self.mounts.push(mount.map_err(io::Error::other)?);
        Ok(())
    }

    fn bind(&mut self, source: &Path, target: &Path, writable: bool) -> io::Result<()> {
        let kind = if fs::metadata(source)?.is_dir() { Kind::Folder } else { Kind::File };
        self.place(target, kind)?;
        let rights = if writable { "rw" } else { "ro" };
        self.mount(target, "bind", source, &["rbind", rights, "nosuid", "nodev"])
    }

    fn lend(&mut self, number: usize, source: &Path) -> io::Result<PathBuf> {
        let lent = IdmappedMount::new(source, self.home.lent(self.id, number))?;
        let path = lent.path().to_owned();
        self.lent.push((number, lent));
        Ok(path)
    }

    fn memory(&self, room: Room, mode: u32) -> Vec<String> {
        let owner = if mode & 0o1000 == 0 && mode & 0o077 == 0 { AGENT } else { 0 };
        let mut options = vec![
            "nosuid".into(),
            "nodev".into(),
            format!("mode={mode:o}"),
            format!("size={}", room.bytes),
            format!("uid={owner}"),
            format!("gid={owner}"),
        ];
        // A tmpfs of gVisor has no such option and does not count inodes.
        if self.level != Level::Gvisor {
            options.push(format!("nr_inodes={}", room.inodes));
        }
        options
    }

    /// Mounts `/dev`. Runtimes put the usual devices into it themselves.
    fn devices(&mut self) -> io::Result<()> {
        self.place(Path::new("/dev"), Kind::Folder)?;
        let memory = ["nosuid", "noexec", "strictatime", "mode=755", "size=65536k"];
        self.mount(Path::new("/dev"), "tmpfs", Path::new("tmpfs"), &memory)?;
        let terminals = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"];
        self.mount(Path::new("/dev/pts"), "devpts", Path::new("devpts"), &terminals)
    }

    /// Makes an empty file or folder that no process may read, and returns its path.
    fn nothing(&self, kind: Kind) -> io::Result<PathBuf> {
        let path = self.masked.join(if kind == Kind::Folder { "no-folder" } else { "no-file" });
        if !path.exists() {
            if kind == Kind::Folder {
                fs::create_dir(&path)?
            } else {
                fs::write(&path, "")?
            };
            fs::set_permissions(&path, fs::Permissions::from_mode(0o000))?;
        }
        Ok(path)
    }

    fn protect(&mut self, path: &Path) -> io::Result<()> {
        let lent = self.lent.iter().filter_map(|(number, lent)| match self.steps.get(*number)? {
            Step::Bind { target, .. } => Some((target, lent.path(), path.strip_prefix(target).ok()?)),
            _ => None,
        });
        let Some((_, source, inner)) = lent.max_by_key(|(target, ..)| target.components().count()) else {
            return Ok(());
        };
        let source = source.join(inner);
        match fs::symlink_metadata(&source) {
            // A path that was removed while the plan was made needs no protection.
            Err(_) => Ok(()),
            Ok(found) if found.is_symlink() => {
                let told = "it is a link, and runtimes can mount only over the target of a link; make it a folder, or use `native`";
                Err(io::Error::new(io::ErrorKind::Unsupported, told))
            }
            Ok(_) => self.bind(&source, path, false),
        }
    }
}

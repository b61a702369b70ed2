//! The plan of a sandbox's file tree, as a value: what is mounted where, in order, so that it can be carried out, shown and
//! tested without touching a disk. [`planner`](crate::view::planner) makes it.
//!
//! Parents come before children, and a later step covers an earlier one.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use wieldy_core::secrets::Held;

use super::placeholders::Placeholder;
use super::system_paths::SYSTEM;

/// How a sandbox's file tree is put together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// What to do, in this order. All paths but sources are as seen inside of the sandbox.
    pub(crate) steps: Vec<Step>,
    /// What to make on the host before the sandbox is built, parents first, so that there is something to mount on; to
    /// be removed afterwards, in the opposite order, where it is still as it was made.
    pub(crate) placeholders: Vec<PlannedPlaceholder>,
    /// Variables that belong to the tree.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// One step of a [`Plan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Makes an empty folder.
    Folder {
        /// Where.
        path: PathBuf,
    },
    /// Makes a symbolic link.
    Link {
        /// Where.
        path: PathBuf,
        /// The text of the link.
        target: PathBuf,
    },
    /// Mounts memory, owned by the sandbox's user, without devices and without set-user-id programs.
    Tmpfs {
        /// Where.
        path: PathBuf,
        /// How much it holds.
        room: Room,
        /// The mode of the folder.
        mode: u32,
    },
    /// Shows a file or folder of the host, with whatever is mounted below it, without devices and set-user-id programs.
    Bind {
        /// On the host.
        source: PathBuf,
        /// In the sandbox.
        target: PathBuf,
        /// Whether it can be changed.
        writable: bool,
        /// Whether the sandbox may do without, should it be gone by now.
        optional: bool,
    },
    /// Mounts the sandbox's own `/proc`, read-only.
    Proc,
    /// Makes a `/dev` with `null`, `zero`, `full`, `random`, `urandom`, `tty`, `ptmx`, a `pts` of its own, an empty folder `shm`, and the
    /// links `fd`, `stdin`, `stdout`, `stderr`.
    Dev,
    /// Makes a file that cannot be changed, or covers the one that is there with it.
    File {
        /// Where.
        path: PathBuf,
        /// What it says.
        content: String,
    },
    /// Covers what is there with nothing, which cannot be read.
    Hide {
        /// Where.
        path: PathBuf,
        /// What is there, and so what must cover it.
        kind: Kind,
    },
    /// Mounts what is there on itself, so that it can be neither changed, nor moved, nor removed; a link itself, not what it leads to.
    Protect {
        /// Where.
        path: PathBuf,
    },
    /// Makes the root itself read-only, without what is mounted in it.
    Seal,
}

/// How much memory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Room {
    /// Bytes of content.
    pub(crate) bytes: u64,
    /// Files and folders.
    pub(crate) inodes: u64,
}

/// What something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// A file, or a device, socket or pipe.
    File,
    /// A folder.
    Folder,
}

/// Something on the host that is there only to be mounted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedPlaceholder {
    /// On the host.
    pub(crate) path: PathBuf,
    /// What to make.
    pub(crate) held: Held,
}

/// What a plan has to know about the host.
pub(crate) struct HostFacts<'a> {
    /// What is where.
    pub(crate) look: &'a dyn Look,
    /// The home folder of whoever runs the executor.
    pub(crate) home: Option<PathBuf>,
    /// The folders in which that user's programs are found.
    pub(crate) programs: Vec<PathBuf>,
    /// Where the executor keeps its own files.
    pub(crate) state: Option<PathBuf>,
    /// The sandbox's user, as seen inside.
    pub(crate) user: u32,
    /// The sandbox's group, as seen inside.
    pub(crate) group: u32,
}

/// Answers what is at a path of the host.
pub(crate) trait Look {
    /// What is there; a link is not followed.
    fn entry(&self, path: &Path) -> Option<Entry>;
    /// What is in a folder, as far as it is `wanted`, in order; nothing where it cannot be read.
    fn names(&self, folder: &Path, wanted: Wanted) -> Vec<String>;
    /// Secrets in the folders of a workspace, by their names.
    fn deep_secrets(&self, workspace: &Path) -> Vec<PathBuf>;
    /// Returns true if something is there only as a placeholder, which [`Look::entry`] does not tell.
    fn is_held(&self, path: &Path) -> bool;
    /// Returns who can make something in a folder.
    fn making(&self, folder: &Path) -> Making;
}

/// The user that can make something in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Making {
    /// This process and the commands.
    Possible,
    /// The commands, once they have opened the folder, which is theirs.
    Refused,
    /// Neither: the file system is read-only, or the folder is another user's.
    Impossible,
}

/// Returns the folders in which this user's programs are found.
pub(crate) fn program_folders() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect()
}

/// Whether a name matters.
pub(crate) type Wanted = fn(&str) -> bool;

/// What is at a path of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A file, or a device, socket or pipe.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link {
        /// Its text.
        target: PathBuf,
        /// Where it leads in the end, without links; also where there is nothing.
        resolved: PathBuf,
    },
}

/// The path with each `..` taken back by the part before it: all there is to go by where nothing exists.
pub(crate) fn without_dots(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(whole.pop()),
            Component::CurDir => {}
            part => whole.push(part),
        }
    }
    whole
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    /// A path that could mean several things.
    #[error("`{0}` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`")]
    NotPlain(PathBuf),
    /// A path in the workspace that could mean several things.
    #[error("`{0}` is not a plain path; write it without `.`, `..` and links")]
    NotPlainInside(PathBuf),
    /// The workspace would be the machine.
    #[error("`{0}` belongs to the system and cannot be a workspace; choose a folder of the project's own")]
    SystemWorkspace(PathBuf),
    /// There is no such workspace.
    #[error("the workspace `{0}` is not a folder; make it, or give the path that its link leads to")]
    NoWorkspace(PathBuf),
    /// There is nothing to mount.
    #[error(
        "`{0}` cannot be mounted: there is no such file or folder; make it, or give the path that its link leads to"
    )]
    NoSource(PathBuf),
    /// Too much would be mounted.
    #[error(
        "`{0}` cannot be mounted: it would show other processes or the executor's own files; mount a smaller folder"
    )]
    ForbiddenSource(PathBuf),
    /// The place is taken by the sandbox itself.
    #[error("nothing can be mounted at `{0}`: the sandbox needs it for itself; choose another place")]
    ForbiddenTarget(PathBuf),
    /// The place is taken.
    #[error("`{0}` is mounted twice; choose another place for one of them")]
    Duplicate(PathBuf),
    /// The place does not exist, and cannot be made.
    #[error(
        "nothing can be mounted at `{target}`: `{host}` does not exist on the host; make it, or choose another place"
    )]
    NoMountPoint {
        /// In the sandbox.
        target: PathBuf,
        /// On the host.
        host: PathBuf,
    },
    /// The place is somewhere else than it seems.
    #[error("nothing can be mounted at `{target}`: `{link}` is a link; use the path that it leads to")]
    ThroughLink {
        /// In the sandbox.
        target: PathBuf,
        /// The link.
        link: PathBuf,
    },
    /// The place cannot be reached.
    #[error("nothing can be mounted at `{target}`: `{hidden}` is hidden; show it, or choose another place")]
    InHidden {
        /// In the sandbox.
        target: PathBuf,
        /// What is hidden.
        hidden: PathBuf,
    },
    /// Two rules that cannot both hold.
    #[error("`{0}` is both mounted and hidden; take one of the rules away")]
    MountedAndHidden(PathBuf),
    /// Two rules that cannot both hold.
    #[error("`{mount}` is mounted writable and `{protected}` is protected; mount it read-only")]
    MountedAndProtected {
        /// What is mounted.
        mount: PathBuf,
        /// What is protected.
        protected: PathBuf,
    },
    /// Somebody filled a folder to make the plan large.
    #[error("`{0}` holds more modules or work trees than a sandbox can cover; remove some")]
    TooMany(PathBuf),
    /// The same with secrets.
    #[error(
        "`{workspace}` and what is mounted hold {count} files with names of secrets, more than a sandbox can cover; remove some, \
         or show those that are none by `sandbox.shown`"
    )]
    TooManySecrets {
        /// Where they are.
        workspace: PathBuf,
        /// How many there are.
        count: usize,
    },
    /// Nobody can tell which secrets a workspace holds.
    #[error(
        "the workspace `{0}` cannot be read, so its secrets cannot be hidden; give its owner the right to read it: `chmod u+rwx`"
    )]
    Closed(PathBuf),
    /// What is protected is not in the workspace.
    #[error(
        "`{0}` cannot be protected: it is not in the workspace; what is mounted is protected by mounting it read-only"
    )]
    NotInWorkspace(PathBuf),
}

/// The paths that processes may write to. Reading needs no list: it is granted for all that is in the tree, and the tree has nothing else.
pub(crate) fn writable(steps: &[Step]) -> Vec<PathBuf> {
    let paths = steps.iter().filter_map(|step| match step {
        Step::Tmpfs { path, .. } if path != Path::new("/") => Some(path),
        Step::Bind { target, writable: true, .. } => Some(target),
        _ => None,
    });
    paths.cloned().collect()
}

/// The paths that are protected.
pub(crate) fn protected(steps: &[Step]) -> Vec<PathBuf> {
    let paths = steps.iter().filter_map(|step| match step {
        Step::Protect { path } => Some(path.clone()),
        _ => None,
    });
    paths.collect()
}

/// The steps that have nothing to do with what was granted: every sandbox on this machine begins with them.
pub(crate) fn of_the_system(steps: &[Step]) -> Vec<Step> {
    let granted: Vec<&Path> = steps.iter().filter(|step| step.is_granted()).map(Step::path).collect();
    let is_of_the_system = |step: &&Step| {
        // A later step may cover no earlier one, so what lies where something was granted comes after that.
        let is_apart = !granted.iter().any(|granted| step.path().starts_with(granted));
        is_apart && !matches!(step, Step::Folder { .. } | Step::Protect { .. } | Step::Seal)
    };
    steps.iter().filter(is_of_the_system).cloned().collect()
}

/// The steps that are left where some of them were taken already, in the same order.
pub(crate) fn left_after(taken: &[Step], steps: &[Step]) -> Vec<Step> {
    // What a step makes it makes with the folders above it; but not everything that may be missing was there.
    let is_sure = |step: &&Step| !matches!(step, Step::Bind { optional: true, .. } | Step::Hide { .. });
    let is_made = |path: &Path| taken.iter().filter(is_sure).any(|made| made.path().starts_with(path));
    let mut taken = taken.iter().peekable();
    let left = steps.iter().filter(|step| taken.next_if_eq(step).is_none());
    left.filter(|step| !matches!(step, Step::Folder { path } if is_made(path))).cloned().collect()
}

/// What is hidden or protected, as paths of the host: a mount covers it, and goes when it is replaced there by another.
pub(crate) fn masked(steps: &[Step]) -> Vec<PathBuf> {
    let masks = steps.iter().filter(|step| matches!(step, Step::Hide { .. } | Step::Protect { .. }));
    masks.filter_map(|step| host(steps, step.path())).collect()
}

/// Returns the steps that cover placeholders. Nothing if one of them carries another mount, which could not be mounted again.
pub(crate) fn masks_of(steps: &[Step], placeholders: &[Placeholder]) -> Option<Vec<Step>> {
    let is_placeholder = |path: &Path| placeholders.iter().any(|held| held.path == path);
    let mut masks = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        match step {
            Step::Bind { source, .. } if is_placeholder(source) => masks.push(step.clone()),
            // The path behind it, without the step itself.
            Step::Bind { target, .. } if host(&steps[..number], target).is_some_and(|path| is_placeholder(&path)) => {
                return None;
            }
            Step::Protect { path } if host(steps, path).is_some_and(|path| is_placeholder(&path)) => {
                masks.push(step.clone());
            }
            _ => {}
        }
    }
    Some(masks)
}

/// The path of the host that a path of the sandbox shows, if it does.
pub(crate) fn host(steps: &[Step], path: &Path) -> Option<PathBuf> {
    let (source, rest) = steps.iter().rev().find_map(|step| match step {
        Step::Bind { source, target, .. } => Some((source, path.strip_prefix(target).ok()?)),
        _ => None,
    })?;
    Some(if rest.as_os_str().is_empty() { source.clone() } else { source.join(rest) })
}

/// The places that only the sandbox has and that can be filled.
pub(crate) fn private(steps: &[Step]) -> Vec<PathBuf> {
    let paths = steps.iter().filter_map(|step| match step {
        Step::Tmpfs { path, .. } if path != Path::new("/") => Some(path.clone()),
        _ => None,
    });
    paths.collect()
}

impl Step {
    /// Whether it shows something that was granted, and does not belong to the system.
    pub(crate) fn is_granted(&self) -> bool {
        let Self::Bind { source, writable, optional, .. } = self else { return false };
        *writable || (!optional && !SYSTEM.iter().any(|system| source.starts_with(system)))
    }

    /// How much it holds, if it is memory.
    pub(crate) fn room(&self) -> Option<Room> {
        match self {
            Self::Tmpfs { room, .. } => Some(*room),
            _ => None,
        }
    }

    /// Where the step takes place.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Folder { path } | Self::Link { path, .. } | Self::Tmpfs { path, .. } | Self::File { path, .. } => {
                path
            }
            Self::Hide { path, .. } | Self::Protect { path } | Self::Bind { target: path, .. } => path,
            Self::Proc => Path::new("/proc"),
            Self::Dev => Path::new("/dev"),
            Self::Seal => Path::new("/"),
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::Folder { .. } => "folder",
            Self::Link { .. } => "link",
            Self::Tmpfs { .. } => "memory",
            Self::Bind { .. } => "mount",
            Self::Proc => "proc",
            Self::Dev => "dev",
            Self::File { .. } => "file",
            Self::Hide { .. } => "hide",
            Self::Protect { .. } => "protect",
            Self::Seal => "seal",
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::Link { target, .. } => format!("to {}", target.display()),
            Self::Tmpfs { room, mode, .. } => {
                let mebibytes = room.bytes.div_ceil(1 << 20);
                format!("{mebibytes} MiB, {} files, mode {mode:o}", room.inodes)
            }
            Self::Bind { source, target, writable, optional } => {
                let rights = if *writable { "read and write" } else { "read" };
                let from = if source == target { String::new() } else { format!(", from {}", source.display()) };
                format!("{rights}{from}{}", if *optional { ", if there" } else { "" })
            }
            Self::Hide { kind: Kind::File, .. } => "file".into(),
            Self::Hide { kind: Kind::Folder, .. } => "folder".into(),
            Self::Proc | Self::Seal => "read".into(),
            Self::File { content, .. } => format!("{} bytes", content.len()),
            Self::Folder { .. } | Self::Dev | Self::Protect { .. } => String::new(),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.word(), self.path().display(), self.detail())
    }
}

impl fmt::Display for Plan {
    /// One line for each step, then for each placeholder and variable, in columns.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps.iter().map(|step| (step.word(), step.path().display().to_string(), step.detail()));
        let placeholders = self.placeholders.iter().map(|PlannedPlaceholder { path, held }| {
            let detail = match held {
                Held::Folder => "empty folder on the host".to_owned(),
                Held::File(content) => format!("file of {} bytes on the host", content.len()),
            };
            ("hold", path.display().to_string(), detail)
        });
        let variables = self.environment.iter().map(|(name, value)| ("set", (*name).to_owned(), value.clone()));
        let lines: Vec<_> = steps.chain(placeholders).chain(variables).collect();
        let width = lines.iter().map(|(_, path, _)| path.chars().count()).max().unwrap_or(0);
        for (word, path, detail) in lines {
            let line = format!("{word:<8} {path:<width$} {detail}");
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

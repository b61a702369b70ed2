//! The plan of a sandbox's file tree as a value: an ordered list of steps that can be carried out, printed, and tested
//! without touching a disk. [`planner`](crate::view::planner) makes it.
//!
//! Parents come before children, and a later step covers an earlier one.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use wieldy_core::secrets::Held;

use super::placeholders::Placeholder;
use super::system_paths::SYSTEM;

/// The steps, placeholders and variables that make a sandbox's file tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The steps, in this order. All paths but sources are paths in the sandbox.
    pub(crate) steps: Vec<Step>,
    /// The placeholders to make on the host before the sandbox is built, parents first, so that there is something to
    /// mount on. Unchanged ones are removed afterwards in the opposite order.
    pub(crate) placeholders: Vec<PlannedPlaceholder>,
    /// Environment variables that belong to the tree.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// One step of a [`Plan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    /// Makes an empty folder.
    Folder {
        /// The path in the sandbox.
        path: PathBuf,
    },
    /// Makes a symbolic link.
    Link {
        /// The path in the sandbox.
        path: PathBuf,
        /// The text of the link.
        target: PathBuf,
    },
    /// Mounts memory that the sandbox's user owns, without devices and set-user-id programs.
    Tmpfs {
        /// The path in the sandbox.
        path: PathBuf,
        /// The size limits.
        room: Room,
        /// The mode of the folder.
        mode: u32,
    },
    /// Mounts a file or folder of the host with all mounts below it, without devices and set-user-id programs.
    Bind {
        /// The path on the host.
        source: PathBuf,
        /// The path in the sandbox.
        target: PathBuf,
        /// True if programs may change it.
        writable: bool,
        /// True if the step is skipped when the source is gone.
        optional: bool,
    },
    /// Mounts the sandbox's own `/proc`, read-only.
    Proc,
    /// Makes a `/dev` with `null`, `zero`, `full`, `random`, `urandom`, `tty`, `ptmx`, a `pts` of its own, an empty
    /// folder `shm`, and the links `fd`, `stdin`, `stdout`, `stderr`.
    Dev,
    /// Mounts a read-only file, over the existing one if there is one.
    File {
        /// The path in the sandbox.
        path: PathBuf,
        /// The content of the file.
        content: String,
    },
    /// Masks a path with an empty file or folder that cannot be read.
    Hide {
        /// The path in the sandbox.
        path: PathBuf,
        /// The kind of the masked entry, which the mask must match.
        kind: Kind,
    },
    /// Mounts a path on itself, so that it can be neither changed, nor moved, nor removed; a link itself, not its
    /// target.
    Protect {
        /// The path in the sandbox.
        path: PathBuf,
    },
    /// Makes the root itself read-only, without the mounts in it.
    Seal,
}

/// The size limits of a file system in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Room {
    /// The maximum number of bytes of content.
    pub(crate) bytes: u64,
    /// The maximum number of files and folders.
    pub(crate) inodes: u64,
}

/// The kind of a masked entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// A file, or a device, socket or pipe.
    File,
    /// A folder.
    Folder,
}

/// A file or folder on the host that exists only to be mounted on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedPlaceholder {
    /// The path on the host.
    pub(crate) path: PathBuf,
    /// The file or folder to make.
    pub(crate) held: Held,
}

/// The facts about the host that a plan depends on.
pub(crate) struct HostFacts<'a> {
    /// The files of the host.
    pub(crate) look: &'a dyn Look,
    /// The home folder of the executor's user.
    pub(crate) home: Option<PathBuf>,
    /// The folders in which that user's programs are found.
    pub(crate) programs: Vec<PathBuf>,
    /// The folder of the executor's own files.
    pub(crate) state: Option<PathBuf>,
    /// The folder on a disk with the private folders of sandboxes.
    pub(crate) private: Option<PathBuf>,
    /// The sandbox's user id inside.
    pub(crate) user: u32,
    /// The sandbox's group id inside.
    pub(crate) group: u32,
}

/// A view of the host's files.
pub(crate) trait Look {
    /// Returns the entry at a path; a link is not followed.
    fn entry(&self, path: &Path) -> Option<Entry>;
    /// Returns the `wanted` names in a folder, sorted; none if the folder cannot be read.
    fn names(&self, folder: &Path, wanted: Wanted) -> Vec<String>;
    /// Returns secrets in the folders of a workspace, found by their names.
    fn deep_secrets(&self, workspace: &Path) -> Vec<PathBuf>;
    /// Returns true if only a placeholder is there, which [`Look::entry`] leaves out.
    fn is_held(&self, path: &Path) -> bool;
    /// Returns who can make files in a folder.
    fn making(&self, folder: &Path) -> Making;
}

/// The processes that can make files in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Making {
    /// This process and the commands.
    Possible,
    /// The commands, once they have made the folder, which is theirs, writable.
    Refused,
    /// Neither: the file system is read-only, or the folder is another user's.
    Impossible,
}

/// Returns the folders in which this user's programs are found.
pub(crate) fn program_folders() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect()
}

/// A filter of names.
pub(crate) type Wanted = fn(&str) -> bool;

/// An entry at a path of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A file, or a device, socket or pipe.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link {
        /// The text of the link.
        target: PathBuf,
        /// The final target without links, which may be missing.
        resolved: PathBuf,
    },
}

/// Removes each `.`, and each `..` with the part before it. Links are not followed, since the path may not exist.
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

/// The reason why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    /// A path that is relative, or has more than one meaning.
    #[error("`{0}` is not a plain absolute path; write it without `.`, `..` and links, beginning with `/`")]
    NotPlain(PathBuf),
    /// A path in the workspace that has more than one meaning.
    #[error("`{0}` is not a plain path; write it without `.`, `..` and links")]
    NotPlainInside(PathBuf),
    /// A workspace that is a folder of the system.
    #[error("`{0}` belongs to the system and cannot be a workspace; choose a folder of the project's own")]
    SystemWorkspace(PathBuf),
    /// A workspace that is missing or no folder.
    #[error("the workspace `{0}` is not a folder; make it, or give the path that its link leads to")]
    NoWorkspace(PathBuf),
    /// A mount whose source is missing.
    #[error(
        "`{0}` cannot be mounted: there is no such file or folder; make it, or give the path that its link leads to"
    )]
    NoSource(PathBuf),
    /// A mount that would show too much.
    #[error(
        "`{0}` cannot be mounted: it would show other processes or the executor's own files; mount a smaller folder"
    )]
    ForbiddenSource(PathBuf),
    /// A mount at a path that the sandbox needs for itself.
    #[error("nothing can be mounted at `{0}`: the sandbox needs it for itself; choose another place")]
    ForbiddenTarget(PathBuf),
    /// Two mounts at one path.
    #[error("`{0}` is mounted twice; choose another place for one of them")]
    Duplicate(PathBuf),
    /// A mount point that does not exist and cannot be made.
    #[error(
        "nothing can be mounted at `{target}`: `{host}` does not exist on the host; make it, or choose another place"
    )]
    NoMountPoint {
        /// The path in the sandbox.
        target: PathBuf,
        /// The path on the host.
        host: PathBuf,
    },
    /// A mount point behind a link.
    #[error("nothing can be mounted at `{target}`: `{link}` is a link; use the path that it leads to")]
    ThroughLink {
        /// The path in the sandbox.
        target: PathBuf,
        /// The link.
        link: PathBuf,
    },
    /// A mount point in a hidden folder.
    #[error("nothing can be mounted at `{target}`: `{hidden}` is hidden; show it, or choose another place")]
    InHidden {
        /// The path in the sandbox.
        target: PathBuf,
        /// The hidden folder.
        hidden: PathBuf,
    },
    /// A path that one rule mounts and another hides.
    #[error("`{0}` is both mounted and hidden; take one of the rules away")]
    MountedAndHidden(PathBuf),
    /// A path that one rule mounts writable and another protects.
    #[error("`{mount}` is mounted writable and `{protected}` is protected; mount it read-only")]
    MountedAndProtected {
        /// The source of the mount.
        mount: PathBuf,
        /// The protected path.
        protected: PathBuf,
    },
    /// A folder with so many entries that they were probably made to enlarge the plan.
    #[error("`{0}` holds more modules or work trees than a sandbox can cover; remove some")]
    TooMany(PathBuf),
    /// Secrets in such numbers that they were probably made to enlarge the plan.
    #[error(
        "`{workspace}` and what is mounted hold {count} files with names of secrets, more than a sandbox can cover; remove some, \
         or show those that are none by `sandbox.shown`"
    )]
    TooManySecrets {
        /// The workspace that holds them.
        workspace: PathBuf,
        /// The number of secrets.
        count: usize,
    },
    /// A workspace that cannot be read, so that its secrets are unknown.
    #[error(
        "the workspace `{0}` cannot be read, so its secrets cannot be hidden; give its owner the right to read it: `chmod u+rwx`"
    )]
    Closed(PathBuf),
    /// A protected path that is not in the workspace.
    #[error("`{0}` cannot be protected: it is not in the workspace; to protect a mounted path, mount it read-only")]
    NotInWorkspace(PathBuf),
}

/// Returns the paths that processes may write to. Reading needs no list: it is granted for the whole tree, which has
/// nothing else.
pub(crate) fn writable(steps: &[Step]) -> Vec<PathBuf> {
    let paths = steps.iter().filter_map(|step| match step {
        Step::Tmpfs { path, .. } if path != Path::new("/") => Some(path),
        Step::Bind { target, writable: true, .. } => Some(target),
        _ => None,
    });
    paths.cloned().collect()
}

/// Returns the protected paths.
pub(crate) fn protected(steps: &[Step]) -> Vec<PathBuf> {
    let paths = steps.iter().filter_map(|step| match step {
        Step::Protect { path } => Some(path.clone()),
        _ => None,
    });
    paths.collect()
}

/// Returns the steps that do not depend on granted paths: every sandbox on this host begins with them.
pub(crate) fn of_the_system(steps: &[Step]) -> Vec<Step> {
    let granted: Vec<&Path> = steps.iter().filter(|step| step.is_granted()).map(Step::path).collect();
    let is_of_the_system = |step: &&Step| {
        // A later step must not cover an earlier one, so steps below a granted path come after its mount.
        let is_apart = !granted.iter().any(|granted| step.path().starts_with(granted));
        is_apart && !matches!(step, Step::Folder { .. } | Step::Protect { .. } | Step::Seal)
    };
    steps.iter().filter(is_of_the_system).cloned().collect()
}

/// Returns the steps that remain after some of them were taken, in the same order.
pub(crate) fn left_after(taken: &[Step], steps: &[Step]) -> Vec<Step> {
    // A step also makes the folders above its path. Steps whose path may be missing prove nothing.
    let is_sure = |step: &&Step| !matches!(step, Step::Bind { optional: true, .. } | Step::Hide { .. });
    let is_made = |path: &Path| taken.iter().filter(is_sure).any(|made| made.path().starts_with(path));
    let mut taken = taken.iter().peekable();
    let left = steps.iter().filter(|step| taken.next_if_eq(step).is_none());
    left.filter(|step| !matches!(step, Step::Folder { path } if is_made(path))).cloned().collect()
}

/// Returns the masked paths, as paths of the host. A mask is a mount on a file, and is lost when another file replaces
/// it.
pub(crate) fn masked(steps: &[Step]) -> Vec<PathBuf> {
    let masks = steps.iter().filter(|step| matches!(step, Step::Hide { .. } | Step::Protect { .. }));
    masks.filter_map(|step| host(steps, step.path())).collect()
}

/// Returns the steps that mask placeholders, or none if one of them carries another mount, which could not be mounted
/// again.
pub(crate) fn masks_of(steps: &[Step], placeholders: &[Placeholder]) -> Option<Vec<Step>> {
    let is_placeholder = |path: &Path| placeholders.iter().any(|held| held.path == path);
    let mut masks = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        match step {
            Step::Bind { source, .. } if is_placeholder(source) => masks.push(step.clone()),
            // The path of the host behind the target, without the step itself.
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

/// Returns the path of the host that a path of the sandbox shows, if any.
pub(crate) fn host(steps: &[Step], path: &Path) -> Option<PathBuf> {
    let (source, rest) = steps.iter().rev().find_map(|step| match step {
        Step::Bind { source, target, .. } => Some((source, path.strip_prefix(target).ok()?)),
        _ => None,
    })?;
    Some(if rest.as_os_str().is_empty() { source.clone() } else { source.join(rest) })
}

/// Returns the private folders, which programs can fill.
pub(crate) fn private(steps: &[Step]) -> Vec<PathBuf> {
    let paths = steps.iter().filter_map(|step| match step {
        Step::Tmpfs { path, .. } if path != Path::new("/") => Some(path.clone()),
        _ => None,
    });
    paths.collect()
}

impl Step {
    /// Returns true if the step shows a granted path that does not belong to the system.
    pub(crate) fn is_granted(&self) -> bool {
        let Self::Bind { source, writable, optional, .. } = self else { return false };
        *writable || (!optional && !SYSTEM.iter().any(|system| source.starts_with(system)))
    }

    /// Returns the size limits of a file system in memory.
    pub(crate) fn room(&self) -> Option<Room> {
        match self {
            Self::Tmpfs { room, .. } => Some(*room),
            _ => None,
        }
    }

    /// Returns the path of the sandbox that the step is about.
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
    /// Writes one line for each step, then for each placeholder and variable, in columns.
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

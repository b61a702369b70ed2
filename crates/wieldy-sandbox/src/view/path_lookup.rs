//! Looks up the access that a plan gives to a path: writable, read-only, hidden, or absent.

use std::path::{Path, PathBuf};

use super::plan::{Step, host, without_dots};
use super::planner::LINKS_MAX;
use super::system_paths::SYSTEM;

/// What is done with a path of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathAccess {
    /// Nothing: who may read and write there is a matter of permissions.
    Open,
    /// Something that stays where it is lies below.
    Held,
    /// It can be read, and what is behind it is this path of the host, if it is one of the host's.
    ReadOnly { why: ReadOnly, host: Option<PathBuf> },
    /// It is covered.
    Hidden,
    /// The kernel's own files: read-only, and permissions say the rest.
    Kernel,
    /// Nothing of the host is shown there, and nothing can be made.
    Outside,
}

/// Why something is read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOnly {
    System,
    Mounted,
    Protected,
}

/// What the plan of these steps does with a path, which need not exist.
pub(crate) fn access_to(steps: &[Step], path: &Path) -> PathAccess {
    let mut path = without_dots(path);
    for _ in 0..LINKS_MAX {
        // The root itself is sealed in the end, and folders are only there for what is in them.
        let contains =
            |step: &&Step| !matches!(step, Step::Folder { .. } | Step::Seal) && path.starts_with(step.path());
        let Some(step) = steps.iter().rev().find(contains) else { return PathAccess::Outside };
        let read_only = |why| PathAccess::ReadOnly { why, host: host(steps, &path) };
        match step {
            Step::Link { path: link, target } => {
                let rest = path.strip_prefix(link).unwrap_or(Path::new(""));
                path = without_dots(&link.parent().unwrap_or(link).join(target).join(rest));
            }
            Step::Tmpfs { path: top, .. } if top == Path::new("/") => {
                // What the system does not have is no more outside than what it has.
                let is_system = SYSTEM.iter().any(|system| path.starts_with(system));
                return if is_system { read_only(ReadOnly::System) } else { PathAccess::Outside };
            }
            Step::Tmpfs { .. } => return PathAccess::Open,
            Step::Bind { writable: true, .. } => {
                let stays = |step: &Step| matches!(step, Step::Hide { .. } | Step::Protect { .. });
                let is_around = |step: &Step| stays(step) && step.path().starts_with(&path);
                return if steps.iter().any(is_around) { PathAccess::Held } else { PathAccess::Open };
            }
            Step::Bind { .. } if step.is_granted() => return read_only(ReadOnly::Mounted),
            Step::Bind { .. } => return read_only(ReadOnly::System),
            Step::File { .. } => return PathAccess::ReadOnly { why: ReadOnly::System, host: None },
            Step::Protect { .. } => return read_only(ReadOnly::Protected),
            Step::Hide { .. } => return PathAccess::Hidden,
            Step::Proc | Step::Dev => return PathAccess::Kernel,
            Step::Folder { .. } | Step::Seal => return PathAccess::Outside,
        }
    }
    PathAccess::Open
}

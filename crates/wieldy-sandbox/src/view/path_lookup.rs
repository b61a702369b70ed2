//! Looks up the access that a plan gives to a path: writable, read-only, hidden, or absent.

use std::path::{Path, PathBuf};

use super::plan::{Step, host, without_dots};
use super::planner::LINKS_MAX;
use super::system_paths::SYSTEM;

/// The access that a plan gives to a path of the sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathAccess {
    /// No restriction by the plan: permissions decide who may read and write.
    Open,
    /// A path that cannot be moved or removed, since a masked path is at or below it.
    Held,
    /// A path that can only be read. `host` is the path of the host behind it, if there is one.
    ReadOnly { why: ReadOnly, host: Option<PathBuf> },
    /// A masked path.
    Hidden,
    /// A file of the kernel: read-only, and permissions decide about the rest.
    Kernel,
    /// A path at which nothing of the host is shown, and nothing can be made.
    Outside,
}

/// The reason why a path is read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadOnly {
    System,
    Mounted,
    Protected,
}

/// Returns the access that these steps give to a path, which need not exist.
pub(crate) fn access_to(steps: &[Step], path: &Path) -> PathAccess {
    let mut path = without_dots(path);
    for _ in 0..LINKS_MAX {
        // `Seal` concerns only the root itself, and `Folder` steps only make the parents of other steps.
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
                // A missing path in a system folder is read-only like an existing one.
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

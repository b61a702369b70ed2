//! Manages the tree of control groups in which the kernel limits and measures executor, sessions and calls.
//!
//! A [`Hierarchy`] describes this machine, probed once: cgroup v2, v1, or both side by side. A [`Group`] is one place
//! in the tree, a folder in each of the mounts in use. A controller that cannot be used is missing from every group,
//! and [`Hierarchy::findings`] has the reason; nothing else fails because of it.
//!
//! In reading order: the group (`group.rs`), its limits and its figures (`limits.rs`, `meter.rs`, both use `kept.rs`),
//! the probing of the machine (`find.rs`, `mounts.rs`), work on plain folders (`folder.rs`), and the removal of groups
//! that dead executors left behind (`sweep.rs`).

mod find;
mod folder;
mod group;
mod kept;
mod limits;
pub(crate) mod meter;
mod mounts;
mod sweep;

use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) use group::{Group, KnownGroup};
pub(crate) use limits::GroupLimits;
#[cfg(feature = "oci")]
pub(crate) use meter::Meter;
pub(crate) use meter::{Peak, Used, Whose};

/// The controllers of this machine, with the reasons for those that cannot be used. Cheap to clone.
///
/// It holds the executor's own group, which is removed when the hierarchy and the last of its groups are gone.
#[derive(Clone)]
pub(crate) struct Hierarchy {
    inner: Arc<Inner>,
}

struct Inner {
    kind: Kind,
    findings: Vec<Finding>,
    /// The folders below which executors make their groups, one for each mount in use.
    bases: Vec<PathBuf>,
    own: Group,
    /// Locks that show other executors that this one lives, see `sweep.rs`.
    _locks: Vec<File>,
}

impl Hierarchy {
    /// Finds the group of this process, and makes the executor's own group in every mount that allows it.
    ///
    /// On cgroup v2 this process may be moved to a group `wieldy-main` below the one it is in, since only a group
    /// without processes can pass controllers on. Never fails: problems are recorded in the findings.
    pub(crate) fn find() -> Self {
        let find::Found { kind, findings, bases, locks, own } = find::find();
        Self { inner: Arc::new(Inner { kind, findings, bases, own, _locks: locks }) }
    }

    /// Returns how control groups are mounted on this machine, whether we may use them or not.
    pub(crate) fn kind(&self) -> Kind {
        self.inner.kind
    }

    /// Returns every controller, in a fixed order: the place where it is used, or the reason why it is not and a
    /// remedy.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.inner.findings.clone()
    }

    /// Returns true if a controller can be used.
    pub(crate) fn can(&self, controller: Controller) -> bool {
        self.inner.findings.iter().any(|finding| finding.controller == controller && finding.usable.is_ok())
    }

    /// Returns the executor's own group.
    pub(crate) fn own(&self) -> &Group {
        &self.inner.own
    }

    /// Makes a group below the executor's own, in every mount in use. `name` is unique and of letters, digits and `-`.
    ///
    /// If no controller can be used, the group limits and measures nothing.
    pub(crate) fn group(&self, name: &str) -> io::Result<Group> {
        self.inner.own.child(name)
    }

    /// Removes the groups of executors that are gone, after killing their processes. Returns the number of these
    /// executors.
    pub(crate) fn sweep(&self) -> usize {
        sweep::sweep(&self.inner.bases)
    }
}

/// The way control groups are mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only cgroup v2, with all controllers.
    V2,
    /// Controllers on cgroup v1, and a v2 tree beside them.
    Hybrid,
    /// Only cgroup v1.
    V1,
    /// No control groups at all.
    None,
}

/// A function of the kernel for groups, found where its controller is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Controller {
    /// Limits processor time.
    Cpu,
    /// Limits and measures memory.
    Memory,
    /// Limits and measures the number of processes.
    Pids,
    /// Measures processor time.
    Cpuacct,
    /// Measures bytes read from and written to disks.
    Io,
    /// Kills, or freezes, a whole group at once. Without it, a group is killed process by process.
    Kill,
}

impl Controller {
    pub(crate) const ALL: [Self; 6] = [Self::Cpu, Self::Memory, Self::Pids, Self::Cpuacct, Self::Io, Self::Kill];

    /// Returns the name to show.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpuacct => "cpuacct",
            Self::Io => "io",
            Self::Kill => "kill",
        }
    }
}

/// The interface of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// One controller, and the place or the reason why it cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) controller: Controller,
    pub(crate) usable: Result<Place, Reason>,
}

/// The place where a controller is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) version: Version,
    /// The folder below which the executor's group is.
    pub(crate) folder: PathBuf,
}

/// The reason why a controller cannot be used, and a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reason {
    pub(crate) problem: String,
    pub(crate) hint: String,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.problem, self.hint)
    }
}

/// Adds to an error what was tried.
fn explained(error: &io::Error, doing: fmt::Arguments<'_>) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {doing}: {error}"))
}

//! The tree of control groups in which the kernel limits and measures what runs: executor, session, call.
//!
//! A [`Hierarchy`] is what this machine has, looked for once: cgroup v2, v1, or both side by side. A [`Group`] is one
//! place in the tree, a folder in each of the mounts in use. What cannot be used is missing from every group and named,
//! with the reason, in [`Hierarchy::findings`]; nothing else fails because of it.
//!
//! In reading order: the group (`group.rs`), its limits and its figures (`limits.rs`, `meter.rs`, both
//! by way of `kept.rs`), how the machine is
//! looked at (`find.rs`, `mounts.rs`), what is done with plain folders (`folder.rs`), and the sweeping of what dead
//! executors left behind (`sweep.rs`).

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
pub(crate) use meter::{Meter, Peak, Used, Whose};

/// Where each controller of this machine is and which of them we may use. Cheap to clone.
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
    /// They say to others that this executor lives, see `sweep.rs`.
    _locks: Vec<File>,
}

impl Hierarchy {
    /// Looks at where this process is and makes the executor's own group wherever that works.
    ///
    /// On cgroup v2 this process may be moved to a group `wieldy-main` below the one it is in, as controllers can be
    /// passed on only by a group without processes. Never fails: what does not work is noted with its reason.
    pub(crate) fn find() -> Self {
        let find::Found { kind, findings, bases, locks, own } = find::find();
        Self { inner: Arc::new(Inner { kind, findings, bases, own, _locks: locks }) }
    }

    /// How control groups are mounted on this machine, whether we may use them or not.
    pub(crate) fn kind(&self) -> Kind {
        self.inner.kind
    }

    /// Every controller, in a fixed order: where it is used, or why it is not and what can be done about it.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.inner.findings.clone()
    }

    /// Whether a controller can be used.
    pub(crate) fn can(&self, controller: Controller) -> bool {
        self.inner.findings.iter().any(|finding| finding.controller == controller && finding.usable.is_ok())
    }

    /// The executor's own group.
    pub(crate) fn own(&self) -> &Group {
        &self.inner.own
    }

    /// Makes a group below the executor's own, in every mount in use. `name` is unique and of letters, digits and `-`.
    ///
    /// Where nothing can be used, the group limits and measures nothing.
    pub(crate) fn group(&self, name: &str) -> io::Result<Group> {
        self.inner.own.child(name)
    }

    /// Removes the groups of executors that are gone, after killing what is in them. Returns of how many executors.
    pub(crate) fn sweep(&self) -> usize {
        sweep::sweep(&self.inner.bases)
    }
}

/// How control groups are mounted.
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

/// What the kernel can do for a group; each is where one controller is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Controller {
    /// Limits processor time.
    Cpu,
    /// Limits and measures memory.
    Memory,
    /// Limits and measures how many processes there are.
    Pids,
    /// Measures processor time.
    Cpuacct,
    /// Measures what is read from and written to disks.
    Io,
    /// Kills, or freezes, a whole group at once. Without it, a group is killed process by process.
    Kill,
}

impl Controller {
    pub(crate) const ALL: [Self; 6] = [Self::Cpu, Self::Memory, Self::Pids, Self::Cpuacct, Self::Io, Self::Kill];

    /// The name by which it is shown.
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

/// Which of the two interfaces a mount has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

/// One controller, and whether it can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) controller: Controller,
    pub(crate) usable: Result<Place, Reason>,
}

/// Where a controller is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) version: Version,
    /// The folder below which the executor's group is.
    pub(crate) folder: PathBuf,
}

/// Why a controller cannot be used, and what can be done about it.
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

/// An error that says what was tried.
fn explained(error: &io::Error, doing: fmt::Arguments<'_>) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {doing}: {error}"))
}

//! The settings of a level with an OCI runtime, and the answers of its probe.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use wieldy_core::{Level, SandboxError};

use crate::pool::IdleLimits;

/// The settings of a level with an OCI runtime.
#[derive(Debug, Clone)]
pub struct OciOptions {
    /// Which runtime: [`Level::Runc`], [`Level::Crun`], [`Level::Youki`] or [`Level::Gvisor`].
    pub level: Level,
    /// The runtime's program, if it is not to be looked for.
    pub program: Option<PathBuf>,
    /// The system that programs come from.
    pub rootfs: Rootfs,
    /// Where containers' files are kept; no container ever sees it.
    pub state: PathBuf,
    /// The home folder of whoever runs the executor; what is secret in it is hidden wherever it is mounted.
    pub home: Option<PathBuf>,
    /// How long a session's container may be idle before it is taken away.
    pub idle_max: Duration,
    /// How many sessions' containers may be idle.
    pub idle_limits: IdleLimits,
}

impl OciOptions {
    /// The machine's own system, in containers of this level that are kept for ten minutes.
    pub fn new(level: Level, state: PathBuf) -> Self {
        let (program, rootfs, home) = (None, Rootfs::Host, std::env::home_dir());
        let (idle_max, idle_limits) = (Duration::from_secs(10 * 60), IdleLimits::default());
        Self { level, program, rootfs, state, home, idle_max, idle_limits }
    }
}

/// The system that a container's programs come from. It is never written to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rootfs {
    /// The machine's own system folders, as the native level shows them.
    Host,
    /// A folder with a system in it.
    Folder(PathBuf),
    /// An OCI image layout on disk, unpacked when it is first needed.
    Layout(PathBuf),
}

/// A runtime that works, as it tells its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciVersion(pub String);

/// Why a runtime does not work, and what can be done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciProblem {
    /// What is wrong, in the runtime's own words where it has any.
    pub problem: String,
    /// What helps.
    pub hint: String,
}

impl OciProblem {
    /// The error of a call that needs this level.
    pub(super) fn at(self, level: Level) -> SandboxError {
        let Self { problem, hint } = self;
        SandboxError::Unavailable { level, problem, hint }
    }
}

impl fmt::Display for OciProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.problem, self.hint)
    }
}

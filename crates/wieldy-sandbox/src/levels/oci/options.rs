//! The settings of a level with an OCI runtime, and the answers of its probe.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use wieldy_core::{Level, SandboxError};

use crate::pool::IdleLimits;

/// The settings of a level with an OCI runtime.
#[derive(Debug, Clone)]
pub struct OciOptions {
    /// The runtime: [`Level::Runc`], [`Level::Crun`], [`Level::Youki`] or [`Level::Gvisor`].
    pub level: Level,
    /// The runtime's program; searched for if absent.
    pub program: Option<PathBuf>,
    /// The system that programs come from.
    pub rootfs: Rootfs,
    /// The folder of containers' files, which no container ever sees.
    pub state: PathBuf,
    /// The home folder of the user who runs the executor; secret files in it are masked wherever it is mounted.
    pub home: Option<PathBuf>,
    /// The idle time after which a session's container is ended.
    pub idle_max: Duration,
    /// The limits of idle containers that are kept for sessions.
    pub idle_limits: IdleLimits,
}

impl OciOptions {
    /// Returns settings for this level: the machine's own system, and containers that may be idle for ten minutes.
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

/// The version of a runtime that works, as the runtime prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciVersion(pub String);

/// The reason why a runtime does not work, and what can be done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OciProblem {
    /// The problem, in the runtime's own words if there are any.
    pub problem: String,
    /// The way to solve it.
    pub hint: String,
}

impl OciProblem {
    /// Returns the error of a call that needs this level.
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

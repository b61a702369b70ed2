//! The custody that a tool's process runs in: the [`Sandbox`] port and the plain data it takes and gives.
//!
//! Core decides *what* a run may read, write, reach and use; a backend in `wieldy-sandbox` sees to it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::call::SandboxRef;
use crate::error::{CallError, Code};

/// A place to run processes in. One per isolation level, given to the executor when it is built.
pub trait Sandbox: Send + Sync + 'static {
    /// The isolation that this backend gives.
    fn level(&self) -> Level;

    /// Runs the command to its end, handing output to `output` as it comes.
    ///
    /// Once `stop` is cancelled, the whole process tree is told to end, given the grace time and then
    /// killed; this returns only when no process of it is left. The same holds when the future is dropped,
    /// except that nobody waits.
    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>>;
}

/// Takes the output of a process as it comes. Called from the reading task: it must not block for long.
pub trait OutputSink: Send + Sync {
    /// Takes the next bytes of one stream.
    fn write(&self, stream: Stream, bytes: &[u8]);
}

/// Which stream bytes came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// What the process printed.
    Stdout,
    /// What the process complained.
    Stderr,
}

/// A program with its arguments and surroundings; never a line for a shell to take apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// The program, looked up on `PATH` where it has no slash.
    pub program: String,
    /// Its arguments, as they are.
    pub arguments: Vec<String>,
    /// Its environment, whole: nothing is inherited.
    pub environment: BTreeMap<String, String>,
    /// Where it starts, inside the workspace.
    pub folder: PathBuf,
    /// What it reads; without it, the end of file at once.
    pub stdin: Option<Vec<u8>>,
}

/// What a run may read, write, reach and use. Plain data.
#[derive(Debug, Clone, PartialEq)]
pub struct Confinement {
    /// The one folder that is writable.
    pub workspace: PathBuf,
    /// What the process may reach.
    pub network: Network,
    /// What it may use.
    pub limits: ResourceLimits,
    /// How long it may take to end after being told to, before it is killed.
    pub grace: Duration,
}

/// How strongly a process is kept apart, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Not at all: a process of this user, on this machine, cleaned up afterwards.
    None,
    /// Namespaces, Landlock, seccomp, cgroups.
    Native,
    /// An OCI runtime.
    Runc,
    /// An OCI runtime.
    Crun,
    /// An OCI runtime.
    Youki,
    /// A kernel of its own in user space.
    Gvisor,
    /// A virtual machine of its own.
    Firecracker,
}

impl Level {
    /// Every level, weakest first.
    pub const ALL: [Level; 7] =
        [Self::None, Self::Native, Self::Runc, Self::Crun, Self::Youki, Self::Gvisor, Self::Firecracker];

    /// The level as written in configuration and results.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Native => "native",
            Self::Runc => "runc",
            Self::Crun => "crun",
            Self::Youki => "youki",
            Self::Gvisor => "gvisor",
            Self::Firecracker => "firecracker",
        }
    }

    /// Whether this level keeps apart at least as strongly as `other`; the OCI runtimes are as strong as native.
    pub fn is_at_least(self, other: Level) -> bool {
        let strength = |level| match level {
            Self::None => 0,
            Self::Native | Self::Runc | Self::Crun | Self::Youki => 1,
            Self::Gvisor => 2,
            Self::Firecracker => 3,
        };
        strength(self) >= strength(other)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|level| level.as_str() == text).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|level| level.as_str()).collect();
            format!("`{text}` is not an isolation level; there are {}", known.join(", "))
        })
    }
}

/// What a process may reach.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Nothing.
    #[default]
    None,
    /// These hosts, through the executor's proxy.
    Hosts(Vec<String>),
    /// Everything.
    Open,
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "open" => Ok(Self::Open),
            list => {
                let hosts: Vec<String> = list.split(',').map(|host| host.trim().to_owned()).collect();
                if hosts.iter().any(String::is_empty) {
                    return Err(format!("`{text}` is not `none`, `open` or a list HOST,HOST,…"));
                }
                Ok(Self::Hosts(hosts))
            }
        }
    }
}

/// What a run may use. An absent field leaves it to the next one in line: request, tool, executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct ResourceLimits {
    /// Processor time per second of wall time, in thousandths of a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_millicores: Option<u64>,
    /// Memory of the whole process tree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Processes and threads at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// Open files in one process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_files: Option<u64>,
    /// Bytes written to the workspace and `/tmp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Bytes of output that are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_bytes: Option<u64>,
}

impl ResourceLimits {
    /// The limits a run gets where nobody says anything.
    pub const DEFAULT: Self = Self {
        cpu_millicores: Some(500),
        memory_bytes: Some(1024 * 1024 * 1024),
        processes: Some(256),
        open_files: Some(1024),
        disk_bytes: Some(1024 * 1024 * 1024),
        output_bytes: Some(64 * 1024 * 1024),
    };

    /// These limits, and those of `other` where nothing is said here.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        self.merge(other, |own, other| own.or(other))
    }

    /// For each limit the smaller of both, so that neither is passed.
    #[must_use]
    pub fn within(self, parent: Self) -> Self {
        self.merge(parent, |own, parent| match (own, parent) {
            (Some(own), Some(parent)) => Some(own.min(parent)),
            (own, parent) => own.or(parent),
        })
    }

    /// The limits that are zero: with them nothing could ever run.
    pub fn zeroes(&self) -> Vec<&'static str> {
        self.named().into_iter().filter(|(_, value)| *value == Some(0)).map(|(name, _)| name).collect()
    }

    fn named(&self) -> [(&'static str, Option<u64>); 6] {
        [
            ("cpu_millicores", self.cpu_millicores),
            ("memory_bytes", self.memory_bytes),
            ("processes", self.processes),
            ("open_files", self.open_files),
            ("disk_bytes", self.disk_bytes),
            ("output_bytes", self.output_bytes),
        ]
    }

    fn merge(self, other: Self, pick: impl Fn(Option<u64>, Option<u64>) -> Option<u64>) -> Self {
        Self {
            cpu_millicores: pick(self.cpu_millicores, other.cpu_millicores),
            memory_bytes: pick(self.memory_bytes, other.memory_bytes),
            processes: pick(self.processes, other.processes),
            open_files: pick(self.open_files, other.open_files),
            disk_bytes: pick(self.disk_bytes, other.disk_bytes),
            output_bytes: pick(self.output_bytes, other.output_bytes),
        }
    }
}

/// How a process tree ended and what it used.
#[derive(Debug, Clone, PartialEq)]
pub struct Exit {
    /// How the first process ended.
    pub ended: Ended,
    /// What the whole tree used.
    pub usage: Usage,
    /// Where it ran.
    pub sandbox: SandboxRef,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// What a run used, measured.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time, user and system.
    pub cpu_ms: f64,
    /// The most memory that was resident.
    pub memory_peak_bytes: u64,
    /// Bytes read from disks.
    pub read_bytes: u64,
    /// Bytes written to disks.
    pub written_bytes: u64,
}

/// The id of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SandboxId(pub String);

/// Why a process could not be run in custody.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The custody itself could not be made.
    #[error("cannot make a sandbox: {reason}")]
    Creation {
        /// What is missing.
        reason: String,
    },
    /// The program could not be started.
    #[error("cannot start `{program}`")]
    Start {
        /// What should have been started.
        program: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The sandbox ended before the process did.
    #[error("the sandbox ended unexpectedly: {reason}")]
    Crashed {
        /// What was seen of it.
        reason: String,
    },
}

impl From<SandboxError> for CallError {
    fn from(error: SandboxError) -> Self {
        match &error {
            SandboxError::Creation { .. } => CallError::new(Code::SandboxCreationFailed, error.to_string()),
            SandboxError::Start { program, source } => {
                let code = match source.kind() {
                    std::io::ErrorKind::NotFound => Code::FileNotFound,
                    _ => Code::SandboxCreationFailed,
                };
                CallError::new(code, format!("{error}: {source}"))
                    .suggest(format!("check that `{program}` is installed and may be executed"))
                    .detail("program", program.as_str())
            }
            SandboxError::Crashed { .. } => CallError::new(Code::SandboxCrashed, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_may_only_tighten() {
        let tool = ResourceLimits { memory_bytes: Some(100), ..ResourceLimits::default() };
        let request = ResourceLimits { memory_bytes: Some(200), processes: Some(5), ..ResourceLimits::default() };
        assert_eq!(
            request.within(tool),
            ResourceLimits { memory_bytes: Some(100), processes: Some(5), ..ResourceLimits::default() }
        );
        assert_eq!(request.or(tool).memory_bytes, Some(200));
        assert_eq!(ResourceLimits { processes: Some(0), ..request }.zeroes(), ["processes"]);
    }

    #[test]
    fn levels_and_networks_are_written_as_they_are_read() {
        for level in Level::ALL {
            assert_eq!(level.as_str().parse(), Ok(level));
        }
        assert_eq!("a.example, b.example".parse(), Ok(Network::Hosts(vec!["a.example".into(), "b.example".into()])));
        assert_eq!("a,,b".parse::<Network>(), Err("`a,,b` is not `none`, `open` or a list HOST,HOST,…".into()));
        assert!(Level::Crun.is_at_least(Level::Native) && !Level::None.is_at_least(Level::Native));
    }
}

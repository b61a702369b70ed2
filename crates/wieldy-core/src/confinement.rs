//! Defines what a run may read, write, reach and use. Core decides these rules; a sandbox enforces them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, mpsc};

use crate::redact;
use crate::sandbox::SandboxId;

/// A program with its arguments and environment. It is never a command line for a shell to split.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    /// The program, looked up on `PATH` if it has no slash.
    pub program: String,
    /// The arguments, unchanged.
    pub arguments: Vec<String>,
    /// The whole environment. Nothing is inherited.
    pub environment: BTreeMap<String, String>,
    /// The folder in the workspace that the program starts in.
    pub folder: PathBuf,
    /// The standard input.
    pub stdin: Stdin,
    /// The size of its terminal. Without a terminal, stdout and stderr are separate pipes.
    pub terminal: Option<Terminal>,
}

/// The standard input of a process.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Stdin {
    /// End of file at once.
    #[default]
    Nothing,
    /// These bytes, then end of file.
    Bytes(Vec<u8>),
    /// Bytes that are written while the process runs.
    Live(Feed),
}

/// The reading end of a channel to a process's standard input.
#[derive(Clone)]
pub struct Feed {
    bytes: Arc<Mutex<mpsc::Receiver<Vec<u8>>>>,
}

impl Feed {
    /// Creates a feed and its writing end. Dropping the writing end is the end of file.
    pub fn new() -> (mpsc::Sender<Vec<u8>>, Self) {
        // A writer that is faster than the process must wait, so that memory stays bounded (backpressure).
        const WAITING_MAX: usize = 16;
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        (sender, Self { bytes: Arc::new(Mutex::new(receiver)) })
    }

    /// Returns the next bytes, or `None` once the writing end is gone.
    pub async fn next(&self) -> Option<Vec<u8>> {
        self.bytes.lock().await.recv().await
    }
}

impl PartialEq for Feed {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.bytes, &other.bytes)
    }
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Feed")
    }
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminal {
    /// The number of lines.
    pub rows: u16,
    /// The number of characters in a line.
    pub columns: u16,
}

/// The rules for one run: what it may read, write, reach and use. Plain data.
#[derive(Debug, Clone, PartialEq)]
pub struct Confinement {
    /// The folder that processes work in and may write to.
    pub workspace: PathBuf,
    /// The rules for further, masked and read-only files.
    pub files: Arc<FileRules>,
    /// The network that processes may reach.
    pub network: Network,
    /// The resource limits of the run.
    pub limits: ResourceLimits,
    /// The sandbox that the run uses.
    pub place: Place,
    /// The limits for all runs in that sandbox together.
    pub place_limits: ResourceLimits,
    /// The time that a process has to end after it is asked to, before it is killed.
    pub grace: Duration,
}

impl Confinement {
    /// Returns the workspace's name in the history, or `None` for a relative path, which would mean nothing to later
    /// readers.
    pub fn recorded_workspace(&self) -> Option<Arc<str>> {
        self.workspace.is_absolute().then(|| redact::text(&self.workspace.to_string_lossy()).into())
    }
}

/// The rules for files outside the system and the workspace, and for masked and read-only files inside them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct FileRules {
    /// Further files and folders that processes see.
    pub mounts: Vec<Mount>,
    /// Masked paths: processes do not see them, although their folder is visible. Secrets are masked without being
    /// listed.
    pub hidden: Vec<PathBuf>,
    /// Secrets that processes see although secrets are masked.
    pub shown: Vec<PathBuf>,
    /// Read-only paths in the workspace, in addition to the paths that are always protected.
    pub protected: Vec<PathBuf>,
    /// The executor's own state and configuration. Processes can neither see nor create these paths, wherever they are.
    pub own: Vec<PathBuf>,
}

/// A file or folder that processes see.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// The path on this machine.
    pub source: PathBuf,
    /// The path inside the sandbox.
    pub target: PathBuf,
    /// True if processes may write to it.
    #[serde(default)]
    pub writable: bool,
}

/// The choice of a command's sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Place {
    /// A sandbox for this command alone, removed afterwards.
    #[default]
    Own,
    /// The sandbox of a session, created on first use and reused by later calls.
    Session(SessionKey),
    /// A sandbox that was created before.
    Sandbox(SandboxId),
}

/// The session that a sandbox belongs to. No other session ever runs in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SessionKey {
    /// The agent's tenant.
    pub tenant: Option<String>,
    /// The agent.
    pub agent: String,
    /// The agent's conversation or run.
    pub session: String,
}

/// The network that a process may reach.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// No network.
    #[default]
    None,
    /// These hosts, through the executor's proxy.
    Hosts(Vec<String>),
    /// The whole network.
    Open,
}

impl Network {
    /// Returns true if this network reaches no host that `granted` does not. Host names are compared as written.
    pub fn is_within(&self, granted: &Self) -> bool {
        match (self, granted) {
            (Self::None, _) | (_, Self::Open) => true,
            (Self::Hosts(asked), Self::Hosts(granted)) => asked.iter().all(|host| granted.contains(host)),
            (Self::Hosts(_) | Self::Open, _) => false,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Hosts(hosts) => f.write_str(&hosts.join(",")),
            Self::Open => f.write_str("open"),
        }
    }
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

/// A resource that a run may use up to a limit, by the name of its field in [`ResourceLimits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Processor time.
    CpuMillicores,
    /// Memory.
    MemoryBytes,
    /// Processes and threads.
    Processes,
    /// Open files.
    OpenFiles,
    /// Bytes written.
    DiskBytes,
    /// Files created.
    DiskFiles,
    /// Output that is stored.
    OutputBytes,
}

impl Limit {
    /// Returns the name, as in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CpuMillicores => "cpu_millicores",
            Self::MemoryBytes => "memory_bytes",
            Self::Processes => "processes",
            Self::OpenFiles => "open_files",
            Self::DiskBytes => "disk_bytes",
            Self::DiskFiles => "disk_files",
            Self::OutputBytes => "output_bytes",
        }
    }

    /// Returns true if the limit is a number of bytes.
    pub fn is_in_bytes(self) -> bool {
        matches!(self, Self::MemoryBytes | Self::DiskBytes | Self::OutputBytes)
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The resource limits of a run. A tool's own limits replace the executor's; a call may ask for others, up to a maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct ResourceLimits {
    /// Processor time per second of wall time, in thousandths of a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_millicores: Option<u64>,
    /// Memory of the whole process tree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Maximum number of processes and threads at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// Maximum number of open files in one process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_files: Option<u64>,
    /// Maximum number of bytes written to the workspace and `/tmp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Maximum number of files and folders created in the workspace and `/tmp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_files: Option<u64>,
    /// Maximum number of bytes of output that are stored. More is no failure: the rest is counted, and the result
    /// reports the total.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_bytes: Option<u64>,
}

impl ResourceLimits {
    /// The limits of a run for which nothing else is set.
    pub const DEFAULT: Self = Self {
        cpu_millicores: Some(500),
        memory_bytes: Some(1024 * 1024 * 1024),
        processes: Some(256),
        open_files: Some(1024),
        disk_bytes: Some(1024 * 1024 * 1024),
        disk_files: Some(250_000),
        output_bytes: Some(64 * 1024 * 1024),
    };

    /// No limits at all.
    pub const NONE: Self = Self::of([None; 7]);

    /// The most that a call may ask for where no maximum is set.
    pub const CALL_MAX: Self =
        Self { cpu_millicores: Some(2000), memory_bytes: Some(4096 * 1024 * 1024), ..Self::NONE };

    /// Returns true if no limit is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::NONE
    }

    /// Returns limits of these values, in the order of [`ResourceLimits::named`].
    pub const fn of(values: [Option<u64>; 7]) -> Self {
        let [cpu_millicores, memory_bytes, processes, open_files, disk_bytes, disk_files, output_bytes] = values;
        Self { cpu_millicores, memory_bytes, processes, open_files, disk_bytes, disk_files, output_bytes }
    }

    /// Returns these limits, with the unset ones taken from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        self.merge(other, |own, other| own.or(other))
    }

    /// Returns the smaller of both values for each limit.
    #[must_use]
    pub fn within(self, parent: Self) -> Self {
        self.merge(parent, |own, parent| match (own, parent) {
            (Some(own), Some(parent)) => Some(own.min(parent)),
            (own, parent) => own.or(parent),
        })
    }

    /// Returns these limits, each no higher than the other value. Unset limits stay unset.
    #[must_use]
    pub fn at_most(self, other: Self) -> Self {
        self.merge(other, |own, other| own.map(|own| other.map_or(own, |other| own.min(other))))
    }

    /// Returns the names of the limits that are zero. With these, nothing could run.
    pub fn zeroes(&self) -> Vec<&'static str> {
        self.named().into_iter().filter(|(_, value)| *value == Some(0)).map(|(name, _)| name).collect()
    }

    /// Returns each limit with its name.
    pub fn named(&self) -> [(&'static str, Option<u64>); 7] {
        [
            (Limit::CpuMillicores.as_str(), self.cpu_millicores),
            (Limit::MemoryBytes.as_str(), self.memory_bytes),
            (Limit::Processes.as_str(), self.processes),
            (Limit::OpenFiles.as_str(), self.open_files),
            (Limit::DiskBytes.as_str(), self.disk_bytes),
            (Limit::DiskFiles.as_str(), self.disk_files),
            (Limit::OutputBytes.as_str(), self.output_bytes),
        ]
    }

    fn merge(self, other: Self, pick: impl Fn(Option<u64>, Option<u64>) -> Option<u64>) -> Self {
        Self {
            cpu_millicores: pick(self.cpu_millicores, other.cpu_millicores),
            memory_bytes: pick(self.memory_bytes, other.memory_bytes),
            processes: pick(self.processes, other.processes),
            open_files: pick(self.open_files, other.open_files),
            disk_bytes: pick(self.disk_bytes, other.disk_bytes),
            disk_files: pick(self.disk_files, other.disk_files),
            output_bytes: pick(self.output_bytes, other.output_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Level;

    #[test]
    fn a_request_may_only_tighten() {
        let tool = ResourceLimits { memory_bytes: Some(100), ..ResourceLimits::default() };
        let request = ResourceLimits { memory_bytes: Some(200), processes: Some(5), ..ResourceLimits::default() };
        assert_eq!(
            request.within(tool),
            ResourceLimits { memory_bytes: Some(100), processes: Some(5), ..ResourceLimits::default() }
        );
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

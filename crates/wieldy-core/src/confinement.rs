//! What a run may read, write, reach and use: plain data that core decides and a sandbox sees to.

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

/// A program with its arguments and surroundings; never a line for a shell to take apart.
#[derive(Debug, Clone, PartialEq)]
pub struct Command {
    /// The program, looked up on `PATH` where it has no slash.
    pub program: String,
    /// Its arguments, as they are.
    pub arguments: Vec<String>,
    /// Its environment, whole: nothing is inherited.
    pub environment: BTreeMap<String, String>,
    /// Where it starts, inside the workspace.
    pub folder: PathBuf,
    /// What it reads.
    pub stdin: Stdin,
    /// The terminal it talks to; without one, its output and complaints come through pipes of their own.
    pub terminal: Option<Terminal>,
}

/// What a process reads.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Stdin {
    /// The end of file at once.
    #[default]
    Nothing,
    /// These bytes, then the end of file.
    Bytes(Vec<u8>),
    /// What somebody writes while it runs.
    Live(Feed),
}

/// The reading end of what is written to a process while it runs.
#[derive(Clone)]
pub struct Feed {
    bytes: Arc<Mutex<mpsc::Receiver<Vec<u8>>>>,
}

impl Feed {
    /// A feed and the end to write to; dropping that is the end of file.
    pub fn new() -> (mpsc::Sender<Vec<u8>>, Self) {
        // Whoever writes faster than the process reads should wait and not fill our memory.
        const WAITING_MAX: usize = 16;
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        (sender, Self { bytes: Arc::new(Mutex::new(receiver)) })
    }

    /// The next bytes, or nothing once the writing end is gone.
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
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// What a run may read, write, reach and use. Plain data.
#[derive(Debug, Clone, PartialEq)]
pub struct Confinement {
    /// The folder that processes work in and may write to.
    pub workspace: PathBuf,
    /// What else they see of the file system, and what they do not.
    pub files: Arc<FileRules>,
    /// What they may reach.
    pub network: Network,
    /// What the run may use.
    pub limits: ResourceLimits,
    /// Which sandbox it runs in.
    pub place: Place,
    /// What all runs in that sandbox may use together.
    pub place_limits: ResourceLimits,
    /// How long a process may take to end after being told to, before it is killed.
    pub grace: Duration,
}

impl Confinement {
    /// Returns the text that the history names the workspace by. A relative path would name no folder to later readers.
    pub fn recorded_workspace(&self) -> Option<Arc<str>> {
        self.workspace.is_absolute().then(|| redact::text(&self.workspace.to_string_lossy()).into())
    }
}

/// What processes see of the file system besides the system itself and the workspace.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct FileRules {
    /// Further files and folders that they see.
    pub mounts: Vec<Mount>,
    /// What they do not see although it lies in something that they do, beyond the secrets that are always hidden.
    pub hidden: Vec<PathBuf>,
    /// Secrets that they see all the same.
    pub shown: Vec<PathBuf>,
    /// What they may not write although it lies in the workspace, beyond what is always protected.
    pub protected: Vec<PathBuf>,
    /// What is the executor's own, its state and its configuration: neither seen nor made, wherever it lies.
    pub own: Vec<PathBuf>,
}

/// A file or folder that processes see.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// Where it is on this machine.
    pub source: PathBuf,
    /// Where processes see it.
    pub target: PathBuf,
    /// Whether they may write to it.
    #[serde(default)]
    pub writable: bool,
}

/// Which sandbox a command runs in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub enum Place {
    /// One of its own, gone afterwards.
    #[default]
    Own,
    /// The one of a session, made when first needed and kept between calls.
    Session(SessionKey),
    /// One that was made before.
    Sandbox(SandboxId),
}

/// Whose session a sandbox belongs to: nobody else ever runs in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SessionKey {
    /// The agent's tenant.
    pub tenant: Option<String>,
    /// The agent.
    pub agent: String,
    /// Its conversation or run.
    pub session: String,
}

/// What a process may reach.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
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

impl Network {
    /// Whether it reaches nobody that the other does not. Hosts must be written as they are granted.
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

/// What a run may use. A tool's limits are its own where it has any, else the executor's; a call may only ask for less.
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
    /// Files and folders made in the workspace and `/tmp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_files: Option<u64>,
    /// Bytes of output that are kept. More is no failure: it is counted, and the result says how much there was.
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
        disk_files: Some(250_000),
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

    /// Each limit with its name.
    pub fn named(&self) -> [(&'static str, Option<u64>); 7] {
        [
            ("cpu_millicores", self.cpu_millicores),
            ("memory_bytes", self.memory_bytes),
            ("processes", self.processes),
            ("open_files", self.open_files),
            ("disk_bytes", self.disk_bytes),
            ("disk_files", self.disk_files),
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

//! The [`Sandbox`] port: runs processes in isolation, and reports how they ended.
//!
//! Core decides *what* a run may read, write, reach and use; a backend in `wieldy-sandbox` enforces it.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::call::SandboxRef;
use crate::confinement::{Command, Confinement, Limit, ResourceLimits, SessionKey};
use crate::error::{CallError, Code};
use crate::limits::amount_of;

/// A backend that runs processes at one isolation level. The executor gets one per level when it is built.
pub trait Sandbox: Send + Sync + 'static {
    /// Returns the isolation level of this backend.
    fn level(&self) -> Level;

    /// Runs the command to its end in the sandbox that the confinement names, and passes its output to `output`.
    ///
    /// Once `stop` is cancelled, the whole process tree is asked to end, given the grace time and then killed. This
    /// returns only when no process of the tree is left. If the future is dropped, the same happens, but no caller
    /// waits for it.
    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>>;

    /// Makes a sandbox that lives until it is destroyed or has been idle for long.
    fn create<'a>(&'a self, _confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        let reason = format!("the isolation level `{}` makes a sandbox for each command and keeps none", self.level());
        Box::pin(async { Err(SandboxError::creation_because(reason)) })
    }

    /// Returns the existing sandboxes.
    fn list(&self) -> Vec<SandboxStatus> {
        Vec::new()
    }

    /// Kills all processes in a sandbox and removes it. Returns false if there is no sandbox with this id.
    fn destroy<'a>(&'a self, _id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async { false })
    }

    /// Sets the listener that is called when a sandbox is made or removed.
    fn listen(&self, _listener: Arc<dyn Fn(SandboxChange) + Send + Sync>) {}
}

/// A change in the list of sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxChange {
    /// The sandbox was made.
    Created(SandboxRef),
    /// The sandbox is gone.
    Destroyed(SandboxRef),
}

/// The state of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SandboxStatus {
    /// The sandbox.
    #[serde(flatten)]
    pub sandbox: SandboxRef,
    /// The session that it belongs to.
    pub session: Option<SessionKey>,
    /// The time at which it was made.
    pub created_at: Timestamp,
    /// The number of commands that run in it now.
    pub running: usize,
    /// The number of commands that it has run.
    pub executed: u64,
    /// The limits that all its commands share.
    pub limits: ResourceLimits,
    /// The enforcer of each limit.
    pub enforcement: Vec<Enforcement>,
}

/// The enforcer of one limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Enforcement {
    /// The limit.
    pub limit: Limit,
    /// The enforcer.
    pub by: Enforcer,
}

/// The component that enforces a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcer {
    /// The kernel, for the whole process tree.
    Kernel,
    /// The kernel, for each process by itself.
    KernelPerProcess,
    /// The kernel, for all that runs in a sandbox: calls that run there at the same time share it.
    KernelPerSandbox,
    /// A watcher that checks usage many times a second, and kills processes above the limit.
    Watcher,
    /// The executor, which stores no output beyond the limit.
    Executor,
    /// The limit is not enforced.
    Nobody,
}

/// A receiver of a process's output and denials, as they come. Called from the reading task: it must not block for
/// long.
pub trait OutputSink: Send + Sync {
    /// Receives the next bytes of one stream.
    fn write(&self, stream: Stream, bytes: &[u8]);

    /// Receives a denial, from backends that notice it when it happens. [`Exit::denials`] lists it too, in this order
    /// and before all denials that are found only at the end.
    fn refused(&self, _sandbox: &SandboxRef, _breach: &Denial) {}
}

/// An output stream of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// The isolation level of a process, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// No isolation: a process of this user, on this machine, cleaned up afterwards.
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

    /// Returns the level as written in configuration and results.
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

    /// Returns true if this level isolates at least as strongly as `other`. The OCI runtimes are as strong as native.
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

/// The end of a process tree, and its resource usage.
#[derive(Debug, Clone, PartialEq)]
pub struct Exit {
    /// The end of the first process.
    pub ended: Ended,
    /// The usage of the whole tree.
    pub usage: Usage,
    /// The sandbox in which it ran.
    pub sandbox: SandboxRef,
    /// The limit that it exceeded, if it did.
    pub overrun: Option<Overrun>,
    /// The denials that could be seen.
    pub denials: Vec<Denial>,
}

/// A limit that a run exceeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overrun {
    /// The limit.
    pub limit: Limit,
    /// The allowed amount.
    pub allowed: u64,
    /// The amount that the run had used when the excess was noticed.
    pub used: u64,
    /// The amount that all calls had used together, if the limit applies to their session or sandbox as a whole.
    pub session_used: Option<u64>,
}

/// A denial: an access that a process tried and was not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    /// A denied connection.
    Network {
        /// The host.
        host: String,
        /// The port, if known.
        port: Option<u16>,
        /// The reason.
        reason: String,
        /// True if other commands ran in the same sandbox at that time: the connection may have been one of theirs.
        shared: bool,
    },
    /// A denied read or write of a file.
    Filesystem {
        /// The path.
        path: String,
        /// The reason.
        reason: String,
    },
}

impl Denial {
    /// The reason of a denied write if the workspace itself is read-only.
    pub const WORKSPACE_IS_READ_ONLY: &'static str =
        "the workspace is read-only on this machine, so it is read-only in the sandbox too";

    /// Returns true if the access may have been another command's.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Network { shared: true, .. })
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network { host, port, reason, shared } => {
                let whose = if *shared { " (by this or another command in the same sandbox)" } else { "" };
                let port = port.map(|port| format!(":{port}")).unwrap_or_default();
                write!(f, "network: {host}{port}: {reason}{whose}")
            }
            Self::Filesystem { path, reason } => write!(f, "file system: {path}: {reason}"),
        }
    }
}

/// The way in which a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

/// The measured resource usage of a run.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time, user and system.
    pub cpu_ms: f64,
    /// The highest amount of resident memory.
    pub memory_peak_bytes: u64,
    /// Bytes read from disks.
    pub read_bytes: u64,
    /// Bytes written to disks.
    pub written_bytes: u64,
    /// The highest number of processes and threads at once, if the level can count them.
    pub processes_peak: Option<u64>,
    /// The time from the start of the first process to the end of the last.
    pub wall_ms: f64,
}

/// The id of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SandboxId(pub String);

/// The reason why a process could not be run in a sandbox. It displays without its cause; [`SandboxError::message`] returns
/// both.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The sandbox could not be made.
    #[error("cannot make a sandbox{}", after_colon(reason))]
    Creation {
        /// The reason, or the step that failed if there is a cause. Empty if the cause says everything.
        reason: String,
        /// The cause.
        #[source]
        source: Option<Cause>,
    },
    /// The level does not work on this machine.
    #[error("the isolation level `{level}` does not work here: {problem}")]
    Unavailable {
        /// The level.
        level: Level,
        /// The problem.
        problem: String,
        /// A hint at the remedy.
        hint: String,
    },
    /// The program could not be started.
    #[error("cannot start `{program}`")]
    Start {
        /// The program.
        program: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The program exists on the machine, but its folder is not visible in the sandbox.
    #[error("cannot start `{program}`: `{}` is on the machine, but the sandbox does not show its folder", path.display())]
    NotShown {
        /// The name of the program.
        program: String,
        /// The file of the program on the machine.
        path: std::path::PathBuf,
    },
    /// The sandbox ended before the process did.
    #[error("the sandbox ended unexpectedly{}", after_colon(reason))]
    Crashed {
        /// The observed symptom, or the step that failed if there is a cause.
        reason: String,
        /// The cause.
        #[source]
        source: Option<Cause>,
    },
}

type Cause = Box<dyn Error + Send + Sync>;

impl SandboxError {
    /// Returns the error for a step of making a sandbox that failed.
    pub fn creation(doing: impl Into<String>, cause: impl Into<Cause>) -> Self {
        Self::Creation { reason: doing.into(), source: Some(cause.into()) }
    }

    /// Returns the error for a sandbox that was not made because of another error, which says everything.
    pub fn creation_from(cause: impl Into<Cause>) -> Self {
        Self::creation("", cause)
    }

    /// Returns the error for a sandbox that was not made for a reason that is no other error.
    pub fn creation_because(reason: impl Into<String>) -> Self {
        Self::Creation { reason: reason.into(), source: None }
    }

    /// Returns the error for a step of a run that failed because the sandbox ended.
    pub fn crashed(doing: impl Into<String>, cause: impl Into<Cause>) -> Self {
        Self::Crashed { reason: doing.into(), source: Some(cause.into()) }
    }

    /// Returns the error for a sandbox that ended for a reason that is no other error.
    pub fn crashed_because(reason: impl Into<String>) -> Self {
        Self::Crashed { reason: reason.into(), source: None }
    }

    /// Returns the error for an unknown sandbox id.
    pub fn missing(id: &SandboxId) -> Self {
        Self::creation_because(format!("there is no sandbox `{}`; it was destroyed, or never made", id.0))
    }

    /// Returns the error and all its causes for a person, such as "cannot make a sandbox: limiting a cgroup: permission
    /// denied".
    pub fn message(&self) -> String {
        with_causes(self.to_string(), self.source())
    }

    /// Returns the message without the words that all errors of its kind begin with, such as "limiting a cgroup: permission
    /// denied".
    pub fn reason(&self) -> String {
        match self {
            Self::Creation { reason, .. } | Self::Crashed { reason, .. } => with_causes(reason.clone(), self.source()),
            Self::Unavailable { .. } | Self::Start { .. } | Self::NotShown { .. } => self.message(),
        }
    }

    /// Returns true if nothing was started.
    pub fn is_before_start(&self) -> bool {
        matches!(self, Self::Creation { .. } | Self::Unavailable { .. } | Self::Start { .. } | Self::NotShown { .. })
    }

    /// Returns true if the sandbox itself was lost.
    pub fn is_crash(&self) -> bool {
        matches!(self, Self::Crashed { .. })
    }
}

/// Appends the texts of a chain of causes.
fn with_causes(mut text: String, mut cause: Option<&(dyn Error + 'static)>) -> String {
    while let Some(error) = cause {
        let separator = if text.is_empty() { "" } else { ": " };
        text = format!("{text}{separator}{error}");
        cause = error.source();
    }
    text
}

/// Returns the text after a colon, or nothing if it is empty.
fn after_colon(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

impl Overrun {
    /// Returns the error with which the call ends.
    pub fn error(&self) -> CallError {
        let Self { limit, allowed, used, session_used } = self;
        let [allowed_text, used_text] = [*allowed, *used].map(|amount| self.amount(amount));
        let message = match session_used {
            None => format!("the run passed its limit `{limit}`: it used {used_text}, allowed are {allowed_text}"),
            Some(all) => format!(
                "the session or sandbox passed its limit `{limit}`: its calls used {} together, this one {used_text}, allowed are {allowed_text}",
                self.amount(*all)
            ),
        };
        let error = CallError::new(Code::ResourceLimitExceeded, message)
            .suggest(format!("use less; only the operator can raise `{limit}`"))
            .detail("limit", limit.as_str())
            .detail("allowed", *allowed)
            .detail("used", *used);
        match session_used {
            None => error,
            Some(all) => error.detail("session_used", *all),
        }
    }

    fn amount(&self, amount: u64) -> String {
        amount_of(self.limit.as_str(), amount)
    }
}

impl From<SandboxError> for CallError {
    fn from(error: SandboxError) -> Self {
        let message = error.message();
        match &error {
            SandboxError::Creation { .. } => CallError::new(Code::SandboxCreationFailed, message),
            SandboxError::Unavailable { level, hint, .. } => CallError::new(Code::SandboxCreationFailed, message)
                .suggest(hint.as_str())
                .detail("level", level.as_str()),
            SandboxError::Start { program, source } => {
                let code = match source.kind() {
                    std::io::ErrorKind::NotFound => Code::FileNotFound,
                    _ => Code::SandboxCreationFailed,
                };
                CallError::new(code, message)
                    .suggest(format!("check that `{program}` is installed and may be executed"))
                    .detail("program", program.as_str())
            }
            SandboxError::NotShown { program, path } => {
                let path = path.display().to_string();
                CallError::new(Code::FilesystemPolicyViolation, message)
                    .suggest(
                        "an operator adds the folder to `sandbox.mounts`, or sets `sandbox.toolchains` for a toolchain in the home folder",
                    )
                    .detail("program", program.as_str())
                    .detail("path", path)
            }
            SandboxError::Crashed { .. } => CallError::new(Code::SandboxCrashed, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_of_an_error_is_its_source_and_part_of_its_message() {
        let denied = || std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        for (error, reason, message) in [
            (
                SandboxError::creation("limiting a cgroup", denied()),
                "limiting a cgroup: permission denied",
                "cannot make a sandbox: limiting a cgroup: permission denied",
            ),
            (SandboxError::creation_from(denied()), "permission denied", "cannot make a sandbox: permission denied"),
            (
                SandboxError::crashed("`ls` was lost", denied()),
                "`ls` was lost: permission denied",
                "the sandbox ended unexpectedly: `ls` was lost: permission denied",
            ),
            (
                SandboxError::Start { program: "ls".into(), source: denied() },
                "cannot start `ls`: permission denied",
                "cannot start `ls`: permission denied",
            ),
        ] {
            let cause = error.source().and_then(|cause| cause.downcast_ref::<std::io::Error>()).unwrap();
            assert_eq!(cause.kind(), std::io::ErrorKind::PermissionDenied);
            assert_eq!((error.reason().as_str(), error.message().as_str()), (reason, message));
            assert_eq!(CallError::from(error).message, message);
        }
        let error = SandboxError::creation_because("it was stopped");
        assert!(error.source().is_none());
        assert_eq!(error.message(), "cannot make a sandbox: it was stopped");
    }

    #[test]
    fn an_exceeded_limit_names_its_owner_and_the_usage() {
        let error_of = |limit, allowed, used, session_used| Overrun { limit, allowed, used, session_used }.error();
        const MIB: u64 = 1 << 20;
        assert_eq!(
            error_of(Limit::MemoryBytes, 96 * MIB, 100 * MIB + 4096, None).message,
            "the run passed its limit `memory_bytes`: it used 100.0 MiB (104861696 bytes), allowed are 96.0 MiB (100663296 bytes)"
        );
        assert_eq!(
            error_of(Limit::MemoryBytes, 120 * MIB, 80 * MIB, Some(120 * MIB)).message,
            "the session or sandbox passed its limit `memory_bytes`: its calls used 120.0 MiB (125829120 bytes) together, this one 80.0 MiB (83886080 bytes), allowed are 120.0 MiB (125829120 bytes)"
        );
        let files = error_of(Limit::DiskFiles, 100, 3, Some(104));
        assert_eq!(
            files.message,
            "the session or sandbox passed its limit `disk_files`: its calls used 104 together, this one 3, allowed are 100"
        );
        let details = serde_json::json!({"limit": "disk_files", "allowed": 100, "used": 3, "session_used": 104});
        assert_eq!(serde_json::to_value(&files.details).unwrap(), details);
    }
}

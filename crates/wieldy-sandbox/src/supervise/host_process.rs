//! Runs the programs that manage sandboxes from outside: an OCI runtime, or Firecracker.
//!
//! They run under a supervisor of the fork server, like the commands of the level `none`. So a program and its
//! descendants end with the executor.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, OutputSink, ResourceLimits, SandboxError, Stdin, Stream};

use super::protocol::{ForkServerOrder, RunLimits, RunOrder};
use super::run::{RunOutcome, SupervisorClient};
use super::socket::{ForkServerClient, Socket, end_child};

/// The `PATH` of such a program; its environment has no other variable.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A supervisor outside of every sandbox, with the fork server that made it. The fork server must not end before it.
pub(crate) struct HostSupervisor {
    supervisor: SupervisorClient,
    fork_server: Arc<ForkServerClient>,
}

impl HostSupervisor {
    pub(crate) async fn new() -> io::Result<Self> {
        let fork_server = ForkServerClient::of_this_process()?;
        let (socket, theirs) = Socket::pair()?;
        fork_server.order(&ForkServerOrder::Supervisor, &theirs)?;
        drop(theirs);
        Ok(Self { supervisor: SupervisorClient::arrive(socket).await?, fork_server })
    }

    /// Runs a command to its end, and returns the supervisor for the next command unless it was lost. If it was lost,
    /// the fork server has ended all processes of the command.
    pub(crate) async fn run(
        mut self,
        command: &Command,
        order: RunOrder,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> (Result<RunOutcome, SandboxError>, Option<Self>) {
        let outcome = self.supervisor.run(command, order, output, stop).await;
        if outcome.as_ref().map_or_else(SandboxError::is_crash, |outcome| outcome.supervisor_lost) {
            let Self { supervisor, fork_server } = self;
            let child = supervisor.pid();
            drop(supervisor);
            let _ = end_child(&fork_server, child, false).await;
            return (outcome, None);
        }
        (outcome, Some(self))
    }
}

/// A program outside of every sandbox, before it starts.
pub(crate) struct HostProcess {
    host: HostSupervisor,
    /// The folder in which the supervisor counts the bytes and files that the program writes.
    workspace: PathBuf,
    limits: RunLimits,
    is_raw: bool,
}

impl HostProcess {
    pub(crate) async fn new() -> io::Result<Self> {
        let host = HostSupervisor::new().await?;
        Ok(Self { host, workspace: PathBuf::from("/"), limits: RunLimits::default(), is_raw: false })
    }

    /// Returns a process that is ended when its program writes more to the workspace than the limits allow.
    pub(crate) fn watching(mut self, confinement: &Confinement) -> Self {
        self.workspace.clone_from(&confinement.workspace);
        self.limits = disk_limits(confinement);
        self
    }

    /// Sets its terminal to raw mode from the start, for a program that makes another terminal further inside. The
    /// program also sets raw mode itself, but only after it has begun to write.
    pub(crate) fn raw(self) -> Self {
        Self { is_raw: true, ..self }
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        self.host.supervisor.pid()
    }

    /// Runs a program to its end, with the input and the terminal of `command`. All its descendants end with it.
    pub(crate) async fn run(
        self,
        program: &Path,
        words: Vec<String>,
        command: &wieldy_core::Command,
        grace: Duration,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<RunOutcome, SandboxError> {
        let order = RunOrder {
            program: program.to_string_lossy().into_owned(),
            arguments: words,
            environment: vec![("PATH".into(), PATH.into())],
            folder: "/".into(),
            workspace: self.workspace.clone(),
            grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
            terminal: command.terminal.map(|terminal| (terminal.rows, terminal.columns)),
            is_raw: self.is_raw,
            limits: self.limits,
        };
        self.host.run(command, order, output, stop).await.0
    }
}

/// Returns the limits of what a command may write, and if its session or sandbox limits the number of files, the order
/// to count them.
pub(crate) fn disk_limits(confinement: &Confinement) -> RunLimits {
    let ResourceLimits { disk_bytes, disk_files, .. } = confinement.limits;
    let counts_files = confinement.place_limits.disk_files.is_some();
    RunLimits { disk_bytes, disk_files, counts_files, ..RunLimits::default() }
}

/// A sink that discards all output.
pub(crate) struct NullSink;

impl OutputSink for NullSink {
    fn write(&self, _stream: Stream, _bytes: &[u8]) {}
}

/// Returns a command without input and terminal, for a program of a runtime that needs neither.
pub(crate) fn idle_command() -> Command {
    let (program, arguments, environment) = ("sleeper".into(), Vec::new(), Default::default());
    Command { program, arguments, environment, folder: PathBuf::new(), stdin: Stdin::Nothing, terminal: None }
}

/// Runs blocking work on a thread of its own, so that it does not block other tasks.
pub(crate) async fn blocking<T: Send + 'static, E: From<io::Error> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(E::from(io::Error::other(error))))
}

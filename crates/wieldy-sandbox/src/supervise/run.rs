//! The executor's side of one command: sends the order to a supervisor, copies input and output, waits for the report.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitStatus;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Ended, Exit, OutputSink, SandboxError, Stdin};

use super::pipes::Pipes;
use super::protocol::{Received, RunLimits, RunOrder, RunReport, StartStep, SupervisorOrder, SupervisorReport};
use super::socket::Socket;
use crate::view::host::on_host;

/// The time between two `SIGCONT` to a supervisor that was ordered to end its command: the command may have stopped it.
const WAKE_EVERY: Duration = Duration::from_millis(50);

/// Longest time after the grace time for a supervisor to end its command. Then it is killed, and its parent kills the
/// command.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Runs a command to its end, even if the future is dropped: then the command is stopped, and a new task waits for its
/// end.
pub(crate) async fn run_to_end<F>(
    stop: CancellationToken,
    run: impl FnOnce(CancellationToken) -> F,
) -> Result<Exit, SandboxError>
where
    F: Future<Output = Result<Exit, SandboxError>> + Send + 'static,
{
    if stop.is_cancelled() {
        return Err(SandboxError::creation_because("the run was stopped before it began"));
    }
    let stop = stop.child_token();
    // A panic leaves the same state as dropping the future at that point.
    let run = AssertUnwindSafe(run(stop.clone())).catch_unwind();
    let ended = Unfinished { run: Some(Box::pin(run)), stop, runtime: Handle::try_current().ok() }.await;
    ended.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
        let reason = format!("the code that runs commands panicked: {}", said.as_deref().unwrap_or("no reason given"));
        Err(SandboxError::crashed_because(reason))
    })
}

/// A run. If it is dropped before its end, it is stopped and goes on in a new task of the runtime that it began in.
struct Unfinished<F: Future<Output: Send> + Send + 'static> {
    run: Option<Pin<Box<F>>>,
    stop: CancellationToken,
    runtime: Option<Handle>,
}

impl<F: Future<Output: Send> + Send + 'static> Future for Unfinished<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(run) = &mut self.run else { return Poll::Pending };
        let poll = run.as_mut().poll(context);
        if poll.is_ready() {
            self.run = None;
        }
        poll
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for Unfinished<F> {
    fn drop(&mut self) {
        if let (Some(run), Some(runtime)) = (self.run.take(), &self.runtime) {
            self.stop.cancel();
            runtime.spawn(run);
        }
    }
}

/// A client of one supervisor. Dropping it ends the supervisor and its command.
pub(crate) struct SupervisorClient {
    socket: Socket,
    pid: Pid,
}

/// The outcome of a command.
pub(crate) struct RunOutcome {
    pub(crate) ended: Ended,
    pub(crate) report: RunReport,
    /// True if the supervisor had to be killed with the command.
    pub(crate) supervisor_lost: bool,
}

impl SupervisorClient {
    /// Returns true if the supervisor is alive.
    pub(crate) fn is_alive(&self) -> bool {
        self.socket.is_alive()
    }

    /// Waits for the first report of a supervisor that was ordered.
    pub(crate) async fn arrive(socket: Socket) -> io::Result<Self> {
        match socket.receive::<SupervisorReport>().await? {
            Some(received) => {
                let pid = received
                    .sender
                    .ok_or_else(|| io::Error::other("the kernel did not report the process id of its supervisor"))?;
                Ok(Self { socket, pid })
            }
            None => {
                Err(io::Error::other("its supervisor ended before it was ready; the limit of processes may be reached"))
            }
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Runs a command until no process of its tree is left. The future must not be dropped: a supervisor runs one
    /// command at a time.
    pub(crate) async fn run(
        &mut self,
        command: &Command,
        order: RunOrder,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<RunOutcome, SandboxError> {
        let grace = Duration::from_millis(order.grace_ms);
        let requested = Requested::of(&order);
        match self.order(command, order, grace, output, stop).await? {
            Some(SupervisorReport::Ended(report)) => {
                Ok(RunOutcome { ended: ended(report.status), report, supervisor_lost: false })
            }
            Some(SupervisorReport::NotStarted { step, errno }) => Err(requested.not_started(command, step, errno)),
            // The command kept its supervisor from working until both were killed.
            _ if stop.is_cancelled() => Ok(RunOutcome {
                ended: Ended::Signal(libc::SIGKILL),
                report: RunReport::default(),
                supervisor_lost: true,
            }),
            _ => Err(supervisor_lost(command)),
        }
    }

    async fn order(
        &mut self,
        command: &Command,
        order: RunOrder,
        grace: Duration,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<Option<SupervisorReport>, SandboxError> {
        let lost = |error: io::Error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => supervisor_lost(command),
            _ => SandboxError::crashed(was_lost(command), error),
        };
        let no_pipes = |error: io::Error| SandboxError::creation("making pipes for its input and output", error);
        let order = SupervisorOrder::Run(Box::new(order));
        let (pipes, _output) = if command.terminal.is_none() {
            let (pipes, [stdin, stdout, stderr]) = Pipes::open(&command.stdin).map_err(no_pipes)?;
            let theirs = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
            self.socket.send(&order, &theirs).await.map_err(lost)?;
            // Keep the command's ends open, so that the end of its last writer causes no wake-up: the supervisor's
            // report follows.
            (pipes, Some([stdout, stderr]))
        } else {
            self.socket.send(&order, &[]).await.map_err(lost)?;
            match self.socket.receive::<SupervisorReport>().await.map_err(lost)? {
                Some(Received { message: SupervisorReport::Terminal, descriptors, .. }) => {
                    (Pipes::terminal(descriptors).map_err(no_pipes)?, None)
                }
                other => return Ok(other.map(|received| received.message)),
            }
        };
        self.follow(&pipes, &command.stdin, grace, output, stop).await.map_err(lost)
    }

    /// Copies bytes until the supervisor reports the end of the command.
    async fn follow(
        &self,
        pipes: &Pipes,
        stdin: &Stdin,
        grace: Duration,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> io::Result<Option<SupervisorReport>> {
        let told = pipes.pump_until(stdin, output, async {
            let hearing = self.socket.receive::<SupervisorReport>();
            tokio::pin!(hearing);
            let mut given_up_at = None;
            loop {
                tokio::select! {
                    biased;
                    told = &mut hearing => break told,
                    () = stop.cancelled(), if given_up_at.is_none() => {
                        given_up_at = Some(Instant::now() + grace.saturating_add(PATIENCE));
                        let _ = self.socket.try_send(&SupervisorOrder::Stop);
                        self.signal(Signal::CONT);
                    }
                    () = tokio::time::sleep(WAKE_EVERY), if given_up_at.is_some() => {
                        let given_up = given_up_at.is_some_and(|at| at <= Instant::now());
                        self.signal(if given_up { Signal::KILL } else { Signal::CONT });
                    }
                }
            }
        });
        Ok(told.await?.map(|received| received.message))
    }

    /// Signals the supervisor. It is not our child, but as long as its socket is open its process id belongs to it.
    fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid, signal);
    }
}

/// The parts of an order that errors about starting it name.
pub(crate) struct Requested {
    path: String,
    folder: PathBuf,
}

impl Requested {
    pub(crate) fn of(order: &RunOrder) -> Self {
        Self { path: path_of(order).to_owned(), folder: order.folder.clone() }
    }

    pub(crate) fn not_started(&self, command: &Command, step: StartStep, errno: i32) -> SandboxError {
        let error = io::Error::from_raw_os_error(errno);
        let source = match step {
            StartStep::Program if !command.program.contains('/') && errno == libc::ENOENT => {
                if let Some(path) = on_host(&command.program, &self.path) {
                    return SandboxError::NotShown { program: command.program.clone(), path };
                }
                let told = format!("no program of that name exists on the `PATH` {}", self.path);
                io::Error::new(io::ErrorKind::NotFound, told)
            }
            StartStep::Program if !command.program.contains('/') && errno == libc::EACCES => {
                let told = format!("no program of that name may be executed on the `PATH` {}", self.path);
                io::Error::new(io::ErrorKind::PermissionDenied, told)
            }
            StartStep::Program => error,
            StartStep::Folder => io::Error::new(error.kind(), format!("{step} `{}`: {error}", self.folder.display())),
            step => return SandboxError::creation(step.to_string(), error),
        };
        SandboxError::Start { program: command.program.clone(), source }
    }
}

fn path_of(order: &RunOrder) -> &str {
    let path = order.environment.iter().find(|(name, _)| name == "PATH");
    path.map_or(crate::supervise::supervisor::DEFAULT_PATH, |(_, path)| path)
}

/// Returns the error for a supervisor that ended before its command did.
fn supervisor_lost(command: &Command) -> SandboxError {
    SandboxError::crashed(was_lost(command), "its supervisor was killed")
}

fn was_lost(command: &Command) -> String {
    format!("`{}` was lost", command.program)
}

/// Returns the order for a command, or an error that names the invalid part.
pub(crate) fn prepare(command: &Command, confinement: &Confinement) -> io::Result<RunOrder> {
    without_nul(&command.program, "the program's path")?;
    for word in &command.arguments {
        without_nul(word, "an argument")?;
    }
    for (name, value) in &command.environment {
        if name.is_empty() || name.contains('=') {
            return Err(invalid(format!("`{name}` cannot be the name of an environment variable")));
        }
        without_nul(name, "an environment variable")?;
        without_nul(value, "an environment variable")?;
    }
    let limits = &confinement.limits;
    Ok(RunOrder {
        program: command.program.clone(),
        arguments: command.arguments.clone(),
        environment: command.environment.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
        workspace: confinement.workspace.clone(),
        folder: confinement.workspace.join(&command.folder),
        grace_ms: u64::try_from(confinement.grace.as_millis()).unwrap_or(u64::MAX),
        terminal: command.terminal.map(|terminal| (terminal.rows, terminal.columns)),
        is_raw: false,
        limits: RunLimits { open_files: limits.open_files, ..RunLimits::default() },
    })
}

fn without_nul(text: &str, what: &str) -> io::Result<()> {
    if text.contains('\0') { Err(invalid(format!("{what} contains a zero byte"))) } else { Ok(()) }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

pub(crate) fn ended(status: i32) -> Ended {
    let status = ExitStatus::from_raw(status);
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Code(code),
        (None, signal) => Ended::Signal(signal.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Arc;

    use tokio::sync::Notify;

    use super::*;

    fn not_started() -> Result<Exit, SandboxError> {
        Err(SandboxError::creation_because("nothing was started"))
    }

    #[tokio::test]
    async fn a_run_stays_in_its_callers_task_and_its_panic_is_reported() {
        let here = tokio::spawn(async {
            let caller = tokio::task::id();
            let run = run_to_end(CancellationToken::new(), |_| async move {
                tokio::task::yield_now().await;
                assert_eq!(tokio::task::id(), caller);
                panic!("as {}", "planned")
            });
            run.await.unwrap_err().to_string()
        });
        let told = "the sandbox ended unexpectedly: the code that runs commands panicked: as planned";
        assert_eq!(here.await.unwrap(), told);
    }

    #[tokio::test]
    async fn a_dropped_run_is_stopped_and_completes_in_the_background() {
        let (go_on, ended) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let stop = CancellationToken::new();
        let mut run = Box::pin(run_to_end(stop.clone(), {
            let (go_on, ended) = (Arc::clone(&go_on), Arc::clone(&ended));
            |stop| async move {
                stop.cancelled().await;
                go_on.notified().await;
                ended.notify_one();
                not_started()
            }
        }));
        poll_fn(|context| {
            assert!(run.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(run);
        go_on.notify_one();
        ended.notified().await;
        assert!(!stop.is_cancelled(), "only this run was to stop");
    }

    /// The error is the same for an order that was never sent, is unread, or was read.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_supervisor_that_ends_is_a_sandbox_that_ended() {
        use crate::supervise::protocol;

        #[derive(Clone, Copy, PartialEq)]
        enum Ends {
            Before,
            WithAnUnreadOrder,
            AfterTheOrder,
        }
        for ends in [Ends::Before, Ends::WithAnUnreadOrder, Ends::AfterTheOrder] {
            let (socket, theirs) = Socket::pair().unwrap();
            let mut theirs = Some(theirs);
            theirs.take_if(|_| ends == Ends::Before);
            let ending = std::thread::spawn(move || {
                let Some(theirs) = theirs else { return };
                let mut polled = [rustix::event::PollFd::new(&theirs, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut polled, None).unwrap();
                if ends == Ends::AfterTheOrder {
                    protocol::receive::<SupervisorOrder>(&theirs).unwrap().unwrap();
                }
            });
            let mut client = SupervisorClient { socket, pid: rustix::process::getpid() };
            let command = Command {
                program: "true".into(),
                arguments: Vec::new(),
                environment: Default::default(),
                folder: PathBuf::new(),
                stdin: Stdin::Nothing,
                terminal: None,
            };
            let (nowhere, stop) = (crate::supervise::host_process::NullSink, CancellationToken::new());
            let error = client.run(&command, RunOrder::default(), &nowhere, &stop).await.err().unwrap();
            let told = "the sandbox ended unexpectedly: `true` was lost: its supervisor was killed";
            assert_eq!((error.message().as_str(), error.is_crash()), (told, true));
            ending.join().unwrap();
        }
    }

    #[tokio::test]
    async fn a_run_that_ended_leaves_no_task() {
        let tasks = Handle::current().metrics();
        let run = run_to_end(CancellationToken::new(), |_| async move {
            assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
            not_started()
        });
        assert_eq!(run.await.unwrap_err().to_string(), "cannot make a sandbox: nothing was started");
        assert_eq!(tasks.num_alive_tasks(), 0);
    }
}

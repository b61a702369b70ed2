//! The executor's side of one supervisor: gives it a command, passes bytes on, hears how it went.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::Mutex;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Ended, Exit, OutputSink, SandboxError, Stdin, Stream, Terminal};

use crate::supervise::protocol::{Received, RunLimits, RunOrder, RunReport, Step, SupervisorOrder, SupervisorReport};
use crate::supervise::socket::Link;
use crate::sys;
use crate::view::host::on_host;

/// How much is read from a pipe at once: as much as a pipe holds unless somebody changes it.
const READ_BYTES: usize = 64 * 1024;

/// For how long what comes through a pipe is handed on before others have their turn.
const TURN: Duration = Duration::from_micros(500);

/// How often a supervisor that should end a command is woken, as long as it has not: a command may have stopped it.
const WAKE_EVERY: Duration = Duration::from_millis(50);

/// How many typed signals wait for somebody to send them on.
const TYPED_MAX: usize = 8;

/// How long after the grace time a supervisor may take before it is killed itself, and the rest left to whoever made it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Runs a command, which must be seen to its end even if nobody waits for it any more: it is then told to stop, and a task of its own
/// does the waiting.
pub(crate) async fn see_through<F>(
    stop: CancellationToken,
    run: impl FnOnce(CancellationToken) -> F,
) -> Result<Exit, SandboxError>
where
    F: Future<Output = Result<Exit, SandboxError>> + Send + 'static,
{
    if stop.is_cancelled() {
        return Err(SandboxError::Creation { reason: "the run was stopped before it began".into() });
    }
    let stop = stop.child_token();
    // Whatever a panic leaves behind is as if the future had been dropped there.
    let run = AssertUnwindSafe(run(stop.clone())).catch_unwind();
    let ended = Unfinished { run: Some(Box::pin(run)), stop, runtime: Handle::try_current().ok() }.await;
    ended.unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
        let reason = format!("the code that runs commands panicked: {}", said.as_deref().unwrap_or("no reason given"));
        Err(SandboxError::Crashed { reason })
    })
}

/// What is left of a run. Dropped before its end, it is told to stop, and goes on in a task of the runtime that it began in.
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

/// A supervisor, waiting for commands. Dropping it ends it and all that is in it.
pub(crate) struct SupervisorClient {
    link: Link,
    pid: Pid,
}

/// How a command went.
pub(crate) struct Went {
    pub(crate) ended: Ended,
    pub(crate) report: RunReport,
    /// Whether the supervisor had to be killed with it.
    pub(crate) supervisor_lost: bool,
}

impl SupervisorClient {
    /// Whether there is still somebody in it.
    pub(crate) fn is_alive(&self) -> bool {
        self.link.is_alive()
    }

    /// Waits for a supervisor that was ordered to say that it is there.
    pub(crate) async fn arrive(link: Link) -> io::Result<Self> {
        match link.receive::<SupervisorReport>().await? {
            Some(received) => {
                let pid = received.sender.ok_or_else(|| io::Error::other("a supervisor did not say who it is"))?;
                Ok(Self { link, pid })
            }
            None => Err(io::Error::other("a supervisor could not be made")),
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Runs a command until no process of its tree is left. Must be waited for to the end: a supervisor does one thing at a time.
    pub(crate) async fn run(
        &mut self,
        command: &Command,
        order: RunOrder,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<Went, SandboxError> {
        let grace = Duration::from_millis(order.grace_ms);
        let asked = Asked::of(&order);
        match self.order(command, order, grace, output, stop).await? {
            Some(SupervisorReport::Ended(report)) => {
                Ok(Went { ended: ended(report.status), report, supervisor_lost: false })
            }
            Some(SupervisorReport::NotStarted { step, errno }) => Err(asked.not_started(command, step, errno)),
            // It kept its supervisor from its work until that was killed with it.
            _ if stop.is_cancelled() => {
                Ok(Went { ended: Ended::Signal(libc::SIGKILL), report: RunReport::default(), supervisor_lost: true })
            }
            _ => Err(crashed(command, "its supervisor was killed")),
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
        let lost = |error: io::Error| crashed(command, &error.to_string());
        let no_ends = |error: io::Error| SandboxError::Creation { reason: format!("cannot make pipes: {error}") };
        let order = SupervisorOrder::Run(Box::new(order));
        let (ends, _output) = if command.terminal.is_none() {
            let (ends, [stdin, stdout, stderr]) = Ends::pipes(&command.stdin).map_err(no_ends)?;
            let theirs = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
            self.link.send(&order, &theirs).await.map_err(lost)?;
            // Kept open: that nobody else writes any more is nothing to wake up for, as the supervisor says so a moment later.
            (ends, Some([stdout, stderr]))
        } else {
            self.link.send(&order, &[]).await.map_err(lost)?;
            match self.link.receive::<SupervisorReport>().await.map_err(lost)? {
                Some(Received { message: SupervisorReport::Terminal, descriptors, .. }) => {
                    (Ends::terminal(descriptors).map_err(no_ends)?, None)
                }
                other => return Ok(other.map(|received| received.message)),
            }
        };
        self.follow(&ends, &command.stdin, grace, output, stop).await.map_err(lost)
    }

    /// Passes bytes on until the supervisor says how the command went.
    async fn follow(
        &self,
        ends: &Ends,
        stdin: &Stdin,
        grace: Duration,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> io::Result<Option<SupervisorReport>> {
        let told = ends.talk_until(stdin, output, async {
            let hearing = self.link.receive::<SupervisorReport>();
            tokio::pin!(hearing);
            let mut given_up_at = None;
            loop {
                tokio::select! {
                    biased;
                    told = &mut hearing => break told,
                    () = stop.cancelled(), if given_up_at.is_none() => {
                        given_up_at = Some(Instant::now() + grace.saturating_add(PATIENCE));
                        let _ = self.link.try_send(&SupervisorOrder::Stop);
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

    /// Signals the supervisor. It was not waited for by us, but as long as its socket is open its number is its own.
    fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid, signal);
    }
}

/// Our ends of a command's input and output.
pub(crate) struct Ends {
    /// Taken by whoever writes to it, since closing it is the end of file.
    stdin: Mutex<Option<AsyncFd<OwnedFd>>>,
    stdout: AsyncFd<OwnedFd>,
    /// Where it is not the same as output.
    stderr: Option<AsyncFd<OwnedFd>>,
    /// Told which signals are typed, where the terminal's own kernel has nobody to send them to.
    typed: Option<mpsc::Sender<Signal>>,
}

impl Ends {
    /// Pipes, and the command's ends of them.
    pub(crate) fn pipes(stdin: &Stdin) -> io::Result<(Self, [OwnedFd; 3])> {
        let (stdin_ours, stdin) = match stdin {
            Stdin::Nothing => (None, std::fs::File::open("/dev/null")?.into()),
            Stdin::Bytes(_) | Stdin::Live(_) => {
                let (theirs, ours) = io::pipe()?;
                (Some(sys::watched(ours.into(), Interest::WRITABLE)?), theirs.into())
            }
        };
        let (stdout_ours, stdout) = io::pipe()?;
        let (stderr_ours, stderr) = io::pipe()?;
        let readable = |end: io::PipeReader| sys::watched(end.into(), Interest::READABLE);
        let (stdout_ours, stderr_ours) = (readable(stdout_ours)?, readable(stderr_ours)?);
        let ends = Self { stdin: Mutex::new(stdin_ours), stdout: stdout_ours, stderr: Some(stderr_ours), typed: None };
        Ok((ends, [stdin, stdout.into(), stderr.into()]))
    }

    /// A terminal, which is input and output in one.
    fn terminal(descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let terminal = descriptors.into_iter().next().ok_or_else(|| io::Error::other("no terminal came"))?;
        let stdin = Some(sys::watched(terminal.try_clone()?, Interest::WRITABLE)?);
        let stdout = sys::watched(terminal, Interest::READABLE)?;
        Ok(Self { stdin: Mutex::new(stdin), stdout, stderr: None, typed: None })
    }

    /// A terminal for a command that another kernel runs, its end of it three times, and what is typed there to signal the command.
    pub(crate) fn terminal_beyond(terminal: Terminal) -> io::Result<(Self, [OwnedFd; 3], mpsc::Receiver<Signal>)> {
        let (ours, theirs) = crate::supervise::supervisor::terminal(terminal.rows, terminal.columns)?;
        let (typed, signals) = mpsc::channel(TYPED_MAX);
        let ends = Self { typed: Some(typed), ..Self::terminal(vec![ours])? };
        Ok((ends, [theirs.try_clone()?, theirs.try_clone()?, theirs], signals))
    }

    /// Passes bytes on until nothing of the command's tree is left, which `over` waits for.
    pub(crate) async fn talk_until<T>(
        &self,
        stdin: &Stdin,
        output: &dyn OutputSink,
        over: impl Future<Output = T>,
    ) -> T {
        let over = {
            let talking = self.talk(stdin, output);
            tokio::pin!(talking, over);
            let mut talked = false;
            loop {
                tokio::select! {
                    biased; // a command that never stops talking must still be heard to end
                    over = &mut over => break over,
                    () = &mut talking, if !talked => talked = true,
                }
            }
        };
        // Nobody of the tree is left to write, so what there is, is in the pipes already. Waiting for their end instead would
        // be waiting for whoever else was handed a descriptor.
        self.pass_on_rest(output);
        over
    }

    async fn talk(&self, stdin: &Stdin, output: &dyn OutputSink) {
        let complaints = async {
            if let Some(stderr) = &self.stderr {
                pass_on(stderr, Stream::Stderr, output).await;
            }
        };
        tokio::join!(
            biased; // where both have something, output before complaints
            pass_on(&self.stdout, Stream::Stdout, output),
            complaints,
            self.feed(stdin)
        );
    }

    /// Writes everything and closes the pipe. A command that does not want all of it is no error.
    async fn feed(&self, stdin: &Stdin) {
        let Some(pipe) = self.stdin.lock().ok().and_then(|mut stdin| stdin.take()) else { return };
        match stdin {
            Stdin::Nothing => {}
            Stdin::Bytes(bytes) => self.enter(&pipe, bytes).await,
            Stdin::Live(feed) => {
                while let Some(bytes) = feed.next().await {
                    self.enter(&pipe, &bytes).await;
                }
            }
        }
    }

    async fn enter(&self, pipe: &AsyncFd<OwnedFd>, bytes: &[u8]) {
        let typed = self.typed.iter();
        // As the terminal is set before: the program may change that when it is signalled.
        let signals: Vec<_> = typed
            .flat_map(|typed| typed_signals(pipe.get_ref(), bytes).into_iter().map(move |signal| (typed, signal)))
            .collect();
        write_all(pipe, bytes).await;
        for (typed, signal) in signals {
            // Who has not heard of so many yet will not miss this one.
            let _ = typed.try_send(signal);
        }
    }

    /// Hands on what is in the pipes, and no more: whoever still writes is none of ours.
    fn pass_on_rest(&self, output: &dyn OutputSink) {
        let stderr = self.stderr.as_ref().map(|stderr| (Stream::Stderr, stderr));
        let mut buffer = Vec::new();
        for (stream, pipe) in std::iter::once((Stream::Stdout, &self.stdout)).chain(stderr) {
            // Of a terminal, some may be under way.
            let in_pipe =
                || rustix::io::ioctl_fionread(pipe.get_ref()).ok().and_then(|count| usize::try_from(count).ok());
            let mut left = if self.stderr.is_some() { in_pipe().unwrap_or(READ_BYTES) } else { READ_BYTES };
            // Read past the runtime, which may not yet have heard that there is something.
            while left > 0
                && let Ok(count @ 1..) = read(pipe, &mut buffer)
            {
                output.write(stream, &buffer);
                left = left.saturating_sub(count);
            }
        }
    }
}

fn read(pipe: &AsyncFd<OwnedFd>, buffer: &mut Vec<u8>) -> Result<usize, Errno> {
    buffer.clear();
    buffer.reserve(READ_BYTES);
    retry_on_intr(|| rustix::io::read(pipe.get_ref(), rustix::buffer::spare_capacity(buffer)))
}

/// Hands on what comes through a pipe, until its end.
async fn pass_on(pipe: &AsyncFd<OwnedFd>, stream: Stream, output: &dyn OutputSink) {
    let (mut buffer, mut began) = (Vec::new(), std::time::Instant::now());
    while let Ok(mut ready) = pipe.readable().await {
        match read(pipe, &mut buffer) {
            Ok(0) => return,
            Ok(_) => output.write(stream, &buffer),
            Err(Errno::AGAIN) => ready.clear_ready(),
            // Of a terminal that nobody has open any more, this is the end.
            Err(_) => return,
        }
        // A pipe that is never empty must not keep us from hearing that the command should stop, nor others of this thread waiting.
        if began.elapsed() >= TURN {
            tokio::task::yield_now().await;
            began = std::time::Instant::now();
        }
        tokio::task::coop::consume_budget().await;
    }
}

async fn write_all(pipe: &AsyncFd<OwnedFd>, mut bytes: &[u8]) {
    while !bytes.is_empty()
        && let Ok(mut ready) = pipe.writable().await
    {
        match retry_on_intr(|| rustix::io::write(pipe.get_ref(), bytes)) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(_) => return,
        }
        tokio::task::coop::consume_budget().await;
    }
}

/// The signals that a terminal makes of these bytes, as it is set now.
fn typed_signals(terminal: &OwnedFd, bytes: &[u8]) -> Vec<Signal> {
    use rustix::termios::{LocalModes, SpecialCodeIndex as Key, tcgetattr};
    let Ok(modes) = tcgetattr(terminal) else { return Vec::new() };
    let keys = [(Key::VINTR, Signal::INT), (Key::VQUIT, Signal::QUIT), (Key::VSUSP, Signal::TSTP)];
    // No key is the zero byte.
    let is_typed = |key: u8| key != 0 && modes.local_modes.contains(LocalModes::ISIG) && bytes.contains(&key);
    keys.into_iter().filter(|(key, _)| is_typed(modes.special_codes[*key])).map(|(_, signal)| signal).collect()
}

/// What was asked for, to say what of it could not be had.
pub(crate) struct Asked {
    path: String,
    folder: PathBuf,
}

impl Asked {
    pub(crate) fn of(order: &RunOrder) -> Self {
        Self { path: path_of(order).to_owned(), folder: order.folder.clone() }
    }

    pub(crate) fn not_started(&self, command: &Command, step: Step, errno: i32) -> SandboxError {
        let error = io::Error::from_raw_os_error(errno);
        let source = match step {
            Step::Program if !command.program.contains('/') && errno == libc::ENOENT => {
                if let Some(path) = on_host(&command.program, &self.path) {
                    return SandboxError::NotShown { program: command.program.clone(), path };
                }
                let told = format!("no program of that name exists on the `PATH` {}", self.path);
                io::Error::new(io::ErrorKind::NotFound, told)
            }
            Step::Program if !command.program.contains('/') && errno == libc::EACCES => {
                let told = format!("no program of that name may be executed on the `PATH` {}", self.path);
                io::Error::new(io::ErrorKind::PermissionDenied, told)
            }
            Step::Program => error,
            Step::Folder => io::Error::new(error.kind(), format!("{step} `{}`: {error}", self.folder.display())),
            step => return SandboxError::Creation { reason: format!("{step}: {error}") },
        };
        SandboxError::Start { program: command.program.clone(), source }
    }
}

fn path_of(order: &RunOrder) -> &str {
    let path = order.environment.iter().find(|(name, _)| name == "PATH");
    path.map_or(crate::supervise::supervisor::DEFAULT_PATH, |(_, path)| path)
}

fn crashed(command: &Command, how: &str) -> SandboxError {
    SandboxError::Crashed { reason: format!("`{}` was lost: {how}", command.program) }
}

/// The order for a command. The error says what is wrong with which thing.
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
        Err(SandboxError::Creation { reason: "nothing was started".into() })
    }

    #[tokio::test]
    async fn a_run_goes_on_where_its_caller_is_and_a_panic_in_it_is_told() {
        let here = tokio::spawn(async {
            let caller = tokio::task::id();
            let run = see_through(CancellationToken::new(), |_| async move {
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
    async fn a_run_that_is_dropped_is_told_to_stop_and_seen_to_its_end() {
        let (go_on, ended) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let stop = CancellationToken::new();
        let mut run = Box::pin(see_through(stop.clone(), {
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

    #[tokio::test]
    async fn a_run_that_ended_leaves_no_task() {
        let tasks = Handle::current().metrics();
        let run = see_through(CancellationToken::new(), |_| async move {
            assert_eq!(Handle::current().metrics().num_alive_tasks(), 0);
            not_started()
        });
        assert_eq!(run.await.unwrap_err().to_string(), "cannot make a sandbox: nothing was started");
        assert_eq!(tasks.num_alive_tasks(), 0);
    }
}

//! The embedding process's side of one command: starts the supervisor, passes bytes on, hears the report.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, OutputSink, SandboxError, Stream};

use crate::init::{self, Plan};
use crate::leftovers;
use crate::prepare::{Prepared, Stdin, explained, prepare};
use crate::report::{RECORD_BYTES, Record, Step, Used};
use crate::sys::{self, Pages};

/// How much is read from a pipe at once: as much as a pipe holds unless somebody changes it.
const READ_BYTES: usize = 64 * 1024;

/// How often a supervisor that should end the tree is woken, as long as it has not.
pub(crate) const WAKE_EVERY: Duration = Duration::from_millis(50);

/// A command that runs under its supervisor. Dropping it ends the whole process tree.
pub(crate) struct Custody<'a> {
    command: &'a Command,
    leash: Leash,
    stdin: Option<pipe::Sender>,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
    report: pipe::Receiver,
}

impl<'a> Custody<'a> {
    /// Starts the command.
    pub(crate) fn start(command: &'a Command, confinement: &Confinement) -> Result<Self, SandboxError> {
        let prepared = prepare(command, confinement).map_err(|source| cannot_start(command, source))?;
        Self::fork(command, confinement, prepared).map_err(|error| SandboxError::Creation { reason: error.to_string() })
    }

    fn fork(command: &'a Command, confinement: &Confinement, prepared: Prepared) -> io::Result<Self> {
        let (stdin_ours, stdin) = match prepared.stdin {
            Stdin::Nothing(theirs) => (None, theirs),
            Stdin::Pipe { ours, theirs } => (Some(pipe::Sender::from_owned_fd(ours)?), theirs),
        };
        let (stdout_ours, stdout) = output_pipe()?;
        let (stderr_ours, stderr) = output_pipe()?;
        let (report_ours, report) = output_pipe()?;
        let (control, control_ours) = io::pipe()?;
        let plan = Plan {
            stdin: stdin.as_raw_fd(),
            stdout: stdout.as_raw_fd(),
            stderr: stderr.as_raw_fd(),
            control: control.as_raw_fd(),
            report: report.as_raw_fd(),
            folder: prepared.folder.as_raw_fd(),
            grace_ms: u64::try_from(confinement.grace.as_millis()).unwrap_or(u64::MAX),
            open_files_max: confinement.limits.open_files,
        };
        let pages = Pages::new(plan, &prepared.program, &prepared.arguments, &prepared.environment)
            .map_err(|error| explained(error, "cannot lay out the command"))?;
        let supervisor =
            sys::fork_apart(pages, init::supervise).map_err(|error| explained(error, "cannot make a process"))?;
        Ok(Self {
            command,
            leash: Leash { supervisor, control: Some(control_ours.into()), reaped: false },
            stdin: stdin_ours,
            stdout: stdout_ours,
            stderr: stderr_ours,
            report: report_ours,
        })
    }

    /// Follows the command until no process of its tree is left.
    pub(crate) async fn follow(
        self,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<(ExitStatus, Used), SandboxError> {
        let Self { command, mut leash, stdin, stdout, stderr, report } = self;
        let fed = command.stdin.as_deref().unwrap_or_default();
        let told = {
            let talking = async {
                tokio::join!(
                    biased; // where both have something, output before complaints
                    pass_on(&stdout, Stream::Stdout, output),
                    pass_on(&stderr, Stream::Stderr, output),
                    feed(stdin, fed)
                )
            };
            let hearing = hear(&report);
            tokio::pin!(talking, hearing);
            let mut talked = false;
            loop {
                tokio::select! {
                    told = &mut hearing => break told,
                    () = stop.cancelled(), if leash.is_held() => leash.release(),
                    () = tokio::time::sleep(WAKE_EVERY), if !leash.is_held() => wake(leash.supervisor),
                    _ = &mut talking, if !talked => talked = true,
                }
            }
        };
        // Nobody of the tree is left to write, so what there is, is in the pipes already. Waiting for their end instead would
        // be waiting for whoever else was handed a descriptor.
        pass_on_rest(&stdout, Stream::Stdout, output);
        pass_on_rest(&stderr, Stream::Stderr, output);
        let supervisor = leash.reap();
        told.settle(command, supervisor)
    }
}

/// A pipe that we read from: our end and theirs.
fn output_pipe() -> io::Result<(pipe::Receiver, OwnedFd)> {
    let (ours, theirs) = io::pipe().map_err(|error| explained(error, "cannot make a pipe"))?;
    Ok((pipe::Receiver::from_owned_fd(ours.into())?, theirs.into()))
}

fn cannot_start(command: &Command, source: io::Error) -> SandboxError {
    SandboxError::Start { program: command.program.clone(), source }
}

/// The hold on a supervisor. Letting go of it, in whatever way, ends the process tree.
struct Leash {
    supervisor: Pid,
    /// Closing it is the message; it cannot fail, and the kernel does it for us should we be killed.
    control: Option<OwnedFd>,
    reaped: bool,
}

impl Leash {
    fn is_held(&self) -> bool {
        self.control.is_some()
    }

    /// Lets the supervisor end the tree: politely first, then not.
    fn release(&mut self) {
        self.control = None;
        wake(self.supervisor);
    }

    /// Reaps the supervisor, which is at its end, and says how it ended, unless somebody else has reaped it.
    fn reap(mut self) -> Option<ExitStatus> {
        self.reaped = true;
        let waited = retry_on_intr(|| waitpid(Some(self.supervisor), WaitOptions::empty()));
        waited.ok().flatten().map(|(_, status)| ExitStatus::from_raw(status.as_raw()))
    }
}

impl Drop for Leash {
    fn drop(&mut self) {
        if !self.reaped {
            self.release();
            leftovers::reap_later(self.supervisor);
        }
    }
}

/// Makes a supervisor go on that its command has stopped. It must not have been reaped: until then its id is its own.
pub(crate) fn wake(supervisor: Pid) {
    let _ = kill_process(supervisor, Signal::CONT);
}

/// Hands on what comes through a pipe, until its end.
async fn pass_on(pipe: &pipe::Receiver, stream: Stream, output: &dyn OutputSink) {
    let mut buffer = vec![0; READ_BYTES];
    while pipe.readable().await.is_ok() {
        match pipe.try_read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => output.write(stream, &buffer[..count]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return,
        }
        // A pipe that is never empty must not keep us from hearing that the command should stop.
        tokio::task::coop::consume_budget().await;
    }
}

/// Hands on what is in a pipe, at most as much as it can hold: whoever still writes is none of ours.
fn pass_on_rest(pipe: &pipe::Receiver, stream: Stream, output: &dyn OutputSink) {
    let mut left = rustix::pipe::fcntl_getpipe_size(pipe).unwrap_or(READ_BYTES);
    let mut buffer = vec![0; READ_BYTES];
    // Read past the runtime, which may not yet have heard that there is something.
    while left > 0
        && let Ok(count @ 1..) = retry_on_intr(|| rustix::io::read(pipe.as_fd(), &mut buffer))
    {
        output.write(stream, &buffer[..count]);
        left = left.saturating_sub(count);
    }
}

/// Writes everything and closes the pipe. A command that does not want all of it is no error.
async fn feed(pipe: Option<pipe::Sender>, mut bytes: &[u8]) {
    let Some(pipe) = pipe else { return };
    while !bytes.is_empty() && pipe.writable().await.is_ok() {
        match pipe.try_write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return,
        }
        tokio::task::coop::consume_budget().await;
    }
}

/// What the supervisor has told.
#[derive(Debug, Default)]
struct Told {
    main: Option<Pid>,
    not_started: Option<(Step, i32)>,
    ended: Option<(i32, Used)>,
}

/// Listens until the supervisor has told the end, or has ended without a word.
async fn hear(report: &pipe::Receiver) -> Told {
    let mut told = Told::default();
    let mut record = [0; RECORD_BYTES];
    let mut filled = 0;
    while told.ended.is_none() && report.readable().await.is_ok() {
        match report.try_read(&mut record[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
        if filled == RECORD_BYTES {
            filled = 0;
            match Record::decode(&record) {
                Some(Record::Started { main }) => told.main = Pid::from_raw(main),
                Some(Record::NotStarted { step, errno }) => told.not_started = Some((step, errno)),
                Some(Record::Ended { status, used }) => told.ended = Some((status, used)),
                None => {}
            }
        }
    }
    told
}

impl Told {
    fn settle(self, command: &Command, supervisor: Option<ExitStatus>) -> Result<(ExitStatus, Used), SandboxError> {
        if let Some((step, errno)) = self.not_started {
            let error = io::Error::from(Errno::from_raw_os_error(errno));
            return Err(match step {
                Step::Program => cannot_start(command, error),
                Step::Folder => {
                    cannot_start(command, explained(error, &format!("{step} `{}`", command.folder.display())))
                }
                step => SandboxError::Creation { reason: format!("{step}: {error}") },
            });
        }
        if let Some((status, used)) = self.ended {
            return Ok((ExitStatus::from_raw(status), used));
        }
        if let Some(main) = self.main {
            leftovers::kill_session(main);
        }
        let how = supervisor.map_or("without a trace".into(), |status| status.to_string());
        Err(SandboxError::Crashed { reason: format!("the supervisor of `{}` ended: {how}", command.program) })
    }
}

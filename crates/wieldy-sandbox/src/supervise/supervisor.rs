//! A supervisor: the process that starts commands, one at a time, and ends everything that they start.
//!
//! It is the *subreaper* of its command: a process that loses its parent becomes a child of the supervisor, no matter
//! how often it forked or which session it opened. So a supervisor without children knows that no process of its
//! command is left.
//!
//! A message orders it to end a command. When its socket is closed, it ends the command and itself. Only the executor
//! has the other end of this socket, so the supervisor notices a dropped and a killed executor in the same way.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};
use rustix::{process, thread};

use super::protocol::{self, RunOrder, RunReport, StartStep, SupervisorOrder, SupervisorReport};
use super::tree::Tree;
use super::watch::{self, Watch};
use crate::sys::{self, Program, Stack};

/// A supervisor process, with the rules of its sandbox.
pub(crate) struct Supervisor {
    /// The socket for orders and reports.
    pub(crate) socket: OwnedFd,
    /// The Landlock ruleset that commands apply to themselves, if there is one.
    pub(crate) landlock: Option<OwnedFd>,
    /// The private folders of the sandbox in memory, which commands may fill.
    pub(crate) private: Vec<CString>,
    /// The private folders of the sandbox on a disk.
    pub(crate) on_disk: Vec<PathBuf>,
}

/// The search path for programs of a command whose environment has no `PATH`.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The time between two checks of a command's limits.
pub(crate) const WATCH_EVERY: Duration = Duration::from_millis(20);

type Failure = (StartStep, i32);

impl Supervisor {
    /// Serves orders until the socket of the executor is closed.
    pub(crate) fn serve_forever(self) -> ! {
        let _ = thread::set_name(c"wieldy-supervisor");
        // A panic must not unwind into the parent's code, of which this process is a fork.
        let lived = std::panic::catch_unwind(AssertUnwindSafe(|| self.serve()));
        sys::exit_now(i32::from(!matches!(lived, Ok(Ok(())))))
    }

    fn serve(mut self) -> io::Result<()> {
        // Detach from the terminal, and from the signals to another process group.
        let _ = process::setsid();
        process::set_child_subreaper(Some(process::getpid()))?;
        thread::set_no_new_privs(true)?;
        // Commands must not read this process's memory and descriptors.
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        let signals = sys::child_signals()?;
        let mut tree = Tree::new(signals)?;
        let mut stack = Stack::new();
        // Once is enough: no process in the sandbox can mount anything on them any more.
        self.private = watch::one_of_each(std::mem::take(&mut self.private));
        protocol::send(&self.socket, &SupervisorReport::Here, &[])?;
        self.rehearse(&mut tree, &mut stack);
        while let Some(received) = protocol::receive::<SupervisorOrder>(&self.socket)? {
            let SupervisorOrder::Run(order) = received.message else { continue };
            let report = match self.run(&order, received.descriptors, &mut tree, &mut stack) {
                Ok(report) => SupervisorReport::Ended(report),
                Err((step, errno)) => SupervisorReport::NotStarted { step, errno },
            };
            protocol::send(&self.socket, &report, &[])?;
        }
        Ok(())
    }

    /// Starts a process that fails at once, so that the first command finds the same memory layout as later ones.
    fn rehearse(&self, tree: &mut Tree, stack: &mut Stack) {
        let nowhere = [0, 1, 2];
        let mut start = Start {
            program: Program::new(Vec::new(), Vec::new(), Vec::new()),
            folder: c"/".into(),
            standard: nowhere,
            has_terminal: false,
            landlock: self.landlock.as_ref().map(AsRawFd::as_raw_fd),
            limits: [(Resource::Core, Some(0)); 5],
            failure: None,
        };
        if let Ok(child) = sys::vfork(stack, &mut start, become_command) {
            tree.begin(child);
            tree.kill();
        }
    }

    fn run(
        &self,
        order: &RunOrder,
        descriptors: Vec<OwnedFd>,
        tree: &mut Tree,
        stack: &mut Stack,
    ) -> Result<RunReport, Failure> {
        let begun = Instant::now();
        let standard = self.standard(order, descriptors)?;
        let mut start = Start {
            program: program(order).map_err(|errno| (StartStep::Program, errno))?,
            folder: text(order.folder.as_os_str().as_bytes()).map_err(|errno| (StartStep::Folder, errno))?,
            standard: standard.each_ref().map(AsRawFd::as_raw_fd),
            has_terminal: order.terminal.is_some(),
            landlock: self.landlock.as_ref().map(AsRawFd::as_raw_fd),
            limits: rlimits(order),
            failure: None,
        };
        let mut watch = Watch::new(&order.limits, &order.workspace, &self.private, &self.on_disk);
        let main =
            sys::vfork(stack, &mut start, become_command).map_err(|error| (StartStep::Fork, errno_of(&error)))?;
        // Close our copies: only the command's tree may keep its pipes open.
        drop(standard);
        tree.begin(main);
        let overrun = self.wait_for_end(tree, &mut watch, order.grace_ms);
        watch.count_left(tree);
        tree.kill();
        if let Some(failure) = start.failure {
            return Err(failure);
        }
        let used = tree.used();
        Ok(RunReport {
            // The status is missing only if the command was reaped by other code.
            status: tree.status().unwrap_or(-1),
            cpu_us: used.cpu_us,
            memory_peak_kib: used.memory_peak_kib,
            blocks_read: used.blocks_read,
            blocks_written: used.blocks_written,
            processes_peak: watch.processes_peak(),
            wall_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            files_made: watch.files_made(),
            overrun: overrun.or_else(|| watch.at_the_end(tree)),
        })
    }

    /// Returns the command's standard input, output and error: from the order's descriptors, or a new terminal.
    fn standard(&self, order: &RunOrder, mut descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; 3], Failure> {
        let Some((rows, columns)) = order.terminal else {
            descriptors.truncate(3);
            return descriptors.try_into().map_err(|_| (StartStep::Order, libc::EBADF));
        };
        let made = || -> io::Result<[OwnedFd; 3]> {
            let (ours, theirs) = terminal(rows, columns)?;
            if order.is_raw {
                let mut modes = rustix::termios::tcgetattr(&theirs)?;
                modes.make_raw();
                rustix::termios::tcsetattr(&theirs, rustix::termios::OptionalActions::Now, &modes)?;
            }
            protocol::send(&self.socket, &SupervisorReport::Terminal, &[ours.as_fd()])?;
            Ok([theirs.try_clone()?, theirs.try_clone()?, theirs])
        };
        made().map_err(|error| (StartStep::Terminal, errno_of(&error)))
    }

    /// Waits until the command ends, its grace time after a stop order is over, or it passes a limit, which is
    /// returned.
    fn wait_for_end(&self, tree: &mut Tree, watch: &mut Watch, grace_ms: u64) -> Option<(protocol::WatchedLimit, u64)> {
        let mut deadline: Option<Instant> = None;
        let mut look_at = watch.is_needed().then(|| Instant::now() + WATCH_EVERY);
        let mut gone = false;
        while tree.reap() && (deadline.is_some() || tree.status().is_none()) {
            let now = Instant::now();
            if look_at.is_some_and(|look_at| look_at <= now) {
                if let Some(overrun) = watch.check(tree) {
                    return Some(overrun);
                }
                look_at = Some(now + WATCH_EVERY);
            }
            if deadline.is_some_and(|deadline| deadline <= now) {
                break;
            }
            let wake_at = deadline.into_iter().chain(look_at).min();
            let patience = wake_at.map(|wake_at| wake_at.saturating_duration_since(now));
            let socket = (!gone).then(|| self.socket.as_fd());
            match poll(socket, tree.signals(), patience) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(_) => break,
            }
            // Any message during a command means that the command should end, and so does the end of the socket.
            gone = !matches!(protocol::receive::<SupervisorOrder>(&self.socket), Ok(Some(_)));
            if deadline.is_none() {
                tree.tell_to_end();
                deadline = Some(Instant::now() + Duration::from_millis(grace_ms));
            }
        }
        None
    }
}

/// Waits for a message or the end of a child. Returns true if there is a message.
fn poll(socket: Option<BorrowedFd<'_>>, signals: BorrowedFd<'_>, patience: Option<Duration>) -> io::Result<bool> {
    let mut polled = vec![PollFd::from_borrowed_fd(signals, PollFlags::IN)];
    polled.extend(socket.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)));
    let timeout = patience.and_then(|patience| Timespec::try_from(patience).ok());
    match rustix::event::poll(&mut polled, timeout.as_ref()) {
        Ok(_) => Ok(polled.get(1).is_some_and(|socket| !socket.revents().is_empty())),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes a terminal. Returns this process's end and the command's.
pub(crate) fn terminal(rows: u16, columns: u16) -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    grantpt(&ours)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, flags)?;
    let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&theirs, size)?;
    Ok((ours, theirs))
}

/// Returns the program with the paths to try. A name with a slash is a path relative to the folder. Any other name is
/// searched on the `PATH` of the command's environment. Only absolute folders of it count: a file in the workspace must
/// not be run as `ls`.
fn program(order: &RunOrder) -> Result<Program, i32> {
    let candidates: Vec<CString> = if order.program.contains('/') {
        vec![text(order.folder.join(&order.program).as_os_str().as_bytes())?]
    } else {
        let path = order.environment.iter().find(|(name, _)| name == "PATH");
        let places = path.map_or(DEFAULT_PATH, |(_, path)| path.as_str()).split(':');
        let places = places.filter(|place| place.starts_with('/') && !order.program.is_empty());
        let candidate = |place: &str| text(Path::new(place).join(&order.program).as_os_str().as_bytes());
        places.map(candidate).collect::<Result<_, _>>()?
    };
    let words = std::iter::once(&order.program).chain(&order.arguments);
    let words = words.map(|word| text(word.as_bytes())).collect::<Result<_, _>>()?;
    let variables = order.environment.iter().map(|(name, value)| text(format!("{name}={value}").as_bytes()));
    Ok(Program::new(candidates, words, variables.collect::<Result<_, _>>()?))
}

fn text(bytes: &[u8]) -> Result<CString, i32> {
    CString::new(bytes).map_err(|_| libc::EINVAL)
}

/// Returns the rlimits of the command's processes.
fn rlimits(order: &RunOrder) -> [(Resource, Option<u64>); 5] {
    // One byte more than the limit: a file that the kernel cut off is then larger than the limit, a file of exactly the
    // limit is not.
    let file_bytes = order.limits.disk_bytes.map(|limit| limit.saturating_add(1));
    let processes = order.limits.processes.map(|limit| limit.saturating_add(order.limits.residents));
    [
        (Resource::Core, Some(0)),
        (Resource::Nofile, order.limits.open_files),
        (Resource::Fsize, file_bytes),
        (Resource::Data, order.limits.memory_bytes),
        (Resource::Nproc, processes),
    ]
}

/// The data needed between `vfork` and `exec`, allocated before.
struct Start {
    program: Program,
    folder: CString,
    standard: [RawFd; 3],
    has_terminal: bool,
    landlock: Option<RawFd>,
    limits: [(Resource, Option<u64>); 5],
    failure: Option<Failure>,
}

/// Runs in the child: becomes the command, or stores the error. Vfork-safe (see `sys.rs`).
fn become_command(start: &mut Start) {
    let failure = match enter(start) {
        Ok(()) => (StartStep::Program, start.program.execute()),
        Err((step, error)) => (step, error.raw_os_error().unwrap_or(libc::EIO)),
    };
    start.failure = Some(failure);
}

fn enter(start: &Start) -> Result<(), (StartStep, io::Error)> {
    const FIRST_UNUSED: RawFd = 3;
    process::setsid().map_err(|error| (StartStep::Session, error.into()))?;
    // If the supervisor is killed, the kernel at least kills the command itself.
    process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| (StartStep::Session, error.into()))?;
    for (number, &fd) in (0..).zip(&start.standard) {
        // `fd` is above 2: the supervisor keeps 0 to 2 open.
        sys::duplicate_to(fd, number).map_err(|error| (StartStep::Descriptors, error))?;
    }
    if start.has_terminal {
        process::ioctl_tiocsctty(rustix::stdio::stdin()).map_err(|error| (StartStep::Terminal, error.into()))?;
    }
    for (resource, limit) in start.limits {
        if let Some(wanted) = limit {
            lower(resource, wanted).map_err(|error| (StartStep::Limits, error))?;
        }
    }
    process::chdir(start.folder.as_c_str()).map_err(|error| (StartStep::Folder, error.into()))?;
    if let Some(ruleset) = start.landlock {
        sys::landlock_restrict(ruleset).map_err(|error| (StartStep::Landlock, error))?;
    }
    sys::close_range(FIRST_UNUSED, RawFd::MAX).map_err(|error| (StartStep::Descriptors, error))?;
    sys::unblock_signals();
    Ok(())
}

fn lower(resource: Resource, wanted: u64) -> io::Result<()> {
    let allowed = process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let limit = Some(wanted.min(allowed));
    Ok(process::setrlimit(resource, Rlimit { current: limit, maximum: limit })?)
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

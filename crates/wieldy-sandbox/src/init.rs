//! The life of a supervisor, from `fork` to its end: the stretch where **nothing may allocate, lock, log or panic**.
//!
//! A supervisor is a fork of the embedding process that never executes a program. Other threads may have held any lock
//! when it was made, and most memory is gone, so it calls nothing but quiet functions of `sys.rs` and plain system calls.
//!
//! It is the *subreaper* of the command: whatever process loses its parent, however often it forked and whatever
//! session it opened, becomes a child of the supervisor. So "no process is left" is something it can know: it has no child.
//! It learns that the command must end by the end of file on the control pipe, whose other end the embedding process holds
//! and nobody else: a stop, a dropped future and `kill -9` of the embedding process all look alike, and none can be missed.

use std::ffi::CStr;
use std::io;
use std::os::fd::RawFd;

use rustix::process::{DumpableBehavior, Pid, Resource, Rlimit, Signal, WaitOptions};
use rustix::{process, thread};

use crate::report::{Record, Step};
use crate::sys::{self, Laid};

/// What a supervisor needs to know. The descriptors are those of the embedding process, valid through the `fork`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) stdin: RawFd,
    pub(crate) stdout: RawFd,
    pub(crate) stderr: RawFd,
    /// Ends when the command must.
    pub(crate) control: RawFd,
    /// Takes records.
    pub(crate) report: RawFd,
    /// Where the command starts.
    pub(crate) folder: RawFd,
    pub(crate) grace_ms: u64,
    pub(crate) open_files_max: Option<u64>,
}

const CONTROL: RawFd = 3;
const REPORT: RawFd = 4;
const FOLDER: RawFd = 5;
const FIRST_UNUSED: RawFd = 6;

type Failure = (Step, io::Error);

/// Runs the command, sees to the end of its whole tree, and says how it went.
pub(crate) fn supervise(laid: &Laid<Plan>) -> ! {
    if let Err(error) = arrange_descriptors(&laid.plan) {
        tell(laid.plan.report, not_started((Step::Descriptors, error)));
        sys::exit_now(1);
    }
    match see_through(laid) {
        Ok(ended) => tell(REPORT, ended),
        Err(failure) => tell(REPORT, not_started(failure)),
    }
    sys::exit_now(0)
}

fn see_through(laid: &Laid<Plan>) -> Result<Record, Failure> {
    let _ = thread::set_name(c"wieldy-init");
    // No terminal, and no signals that were meant for the group of the embedding process.
    process::setsid().map_err(|error| (Step::Session, error.into()))?;
    // A command that stops its supervisor must not outlive the embedding process; to one that runs, this does nothing.
    let _ = process::set_parent_process_death_signal(Some(Signal::CONT));
    process::set_child_subreaper(Some(process::getpid())).map_err(|error| (Step::Reaping, error.into()))?;
    thread::set_no_new_privs(true).map_err(|error| (Step::Session, error.into()))?;
    sys::reset_signal_handlers();
    let signals = sys::child_signals().map_err(|error| (Step::Signals, error))?;
    let children = sys::open_to_read(c"/proc/thread-self/children").map_err(|error| (Step::Children, error))?;

    let start = Start { laid, supervisor: process::getpid() };
    let main = sys::fork_into(&start, become_command).map_err(|error| (Step::Fork, error))?;
    tell(REPORT, Record::Started { main: main.as_raw_pid() });
    for standard in 0..CONTROL {
        sys::close(standard); // only the command's tree may keep its pipes open
    }
    // What is left here of the embedding process's memory is not for others to read.
    let _ = process::set_dumpable_behavior(DumpableBehavior::NotDumpable);

    let mut tree = Tree { main, status: None, children, own_group: process::getpgrp() };
    tree.watch(signals, laid.plan.grace_ms);
    tree.kill();
    // Without a status the command was never waited for, which can only be if somebody else did it.
    Ok(Record::Ended { status: tree.status.unwrap_or(-1), used: sys::used_by_children() })
}

/// Puts the six descriptors where they are expected and closes every other, above all the control pipes of other
/// supervisors: while one is open here, the end of the embedding process would go unnoticed there.
fn arrange_descriptors(plan: &Plan) -> io::Result<()> {
    let mut fds = [plan.stdin, plan.stdout, plan.stderr, plan.control, plan.report, plan.folder];
    for fd in &mut fds {
        *fd = sys::duplicate_above(*fd, FIRST_UNUSED)?;
    }
    for (place, fd) in (0..).zip(fds) {
        sys::duplicate_to(fd, place, place >= CONTROL)?;
    }
    sys::close_from(FIRST_UNUSED)
}

fn tell(report: RawFd, record: Record) {
    // Nobody listens any more when the embedding process is gone.
    let _ = sys::write(report, &record.encode());
}

fn not_started((step, error): Failure) -> Record {
    Record::NotStarted { step, errno: error.raw_os_error().unwrap_or(0) }
}

struct Start<'a> {
    laid: &'a Laid<Plan>,
    supervisor: Pid,
}

/// The other side of the supervisor's own fork: becomes the command, or says why not.
fn become_command(start: &Start<'_>) -> ! {
    let failure = match enter_custody(start) {
        Ok(()) => (Step::Program, start.laid.execute()),
        Err(failure) => failure,
    };
    tell(REPORT, not_started(failure));
    sys::exit_now(127)
}

fn enter_custody(start: &Start<'_>) -> Result<(), Failure> {
    process::setsid().map_err(|error| (Step::Session, error.into()))?;
    // Should somebody kill the supervisor, at least the command itself goes with it.
    process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| (Step::Session, error.into()))?;
    if process::getppid() != Some(start.supervisor) {
        sys::exit_now(127);
    }
    volunteer_when_memory_runs_out();
    set_limits(&start.laid.plan).map_err(|error| (Step::Limits, error))?;
    sys::change_folder(FOLDER).map_err(|error| (Step::Folder, error))?;
    sys::unblock_signals();
    Ok(())
}

/// If the machine runs out of memory, it should be a command that goes and not the embedding process.
fn volunteer_when_memory_runs_out() {
    const ADJUSTMENT: &CStr = c"/proc/self/oom_score_adj";
    if let Ok(file) = sys::open_to_write(ADJUSTMENT) {
        let _ = sys::write(file, b"500");
        sys::close(file);
    }
}

fn set_limits(plan: &Plan) -> io::Result<()> {
    process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    if let Some(wanted) = plan.open_files_max {
        let allowed = process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
        let limit = Some(wanted.min(allowed));
        process::setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit })?;
    }
    Ok(())
}

/// The command and all that came of it.
struct Tree {
    main: Pid,
    /// How the command itself ended, once it has.
    status: Option<i32>,
    /// The kernel's list of our children.
    children: RawFd,
    own_group: Pid,
}

impl Tree {
    /// Waits until the command has ended by itself, or has had its grace time after it was told to.
    fn watch(&mut self, signals: RawFd, grace_ms: u64) {
        let mut deadline_ms = None;
        while self.reap() {
            let (control, timeout_ms) = match deadline_ms {
                None if self.status.is_some() => return,
                None => (CONTROL, None),
                Some(deadline_ms) => match sys::now_ms() {
                    now_ms if now_ms >= deadline_ms => return,
                    now_ms => (-1, Some(deadline_ms - now_ms)),
                },
            };
            let (hung_up, child_ended) = match sys::poll([control, signals], timeout_ms) {
                Ok([hung_up, child_ended]) => (hung_up, child_ended),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return,
            };
            if child_ended {
                let mut ignored = [0; 512];
                let _ = sys::read(signals, &mut ignored);
            }
            if hung_up {
                self.tell_to_end();
                deadline_ms = Some(sys::now_ms().saturating_add(grace_ms));
            }
        }
    }

    /// Takes note of every child that has ended; false once there is none left.
    fn reap(&mut self) -> bool {
        loop {
            match process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.note(pid, status.as_raw()),
                Ok(None) => return true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_no_child) => return false,
            }
        }
    }

    fn note(&mut self, pid: Pid, status: i32) {
        if pid == self.main {
            self.status = Some(status);
        }
    }

    /// Asks the command's group to end, and every process that has lost its parent. Who is stopped could not hear it.
    fn tell_to_end(&self) {
        for signal in [Signal::TERM, Signal::CONT] {
            self.signal_with_group(self.main, signal);
            self.for_each_child(|pid| {
                if process::getpgid(Some(pid)) != Ok(self.main) {
                    self.signal_with_group(pid, signal);
                }
            });
        }
    }

    /// Kills until there is no child left. Every death may bring new children, namely those of the dead.
    fn kill(&mut self) {
        loop {
            self.for_each_child(|pid| {
                self.signal_with_group(pid, Signal::KILL);
                let _ = process::kill_process(pid, Signal::KILL);
            });
            match process::wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) => self.note(pid, status.as_raw()),
                Ok(None) | Err(rustix::io::Errno::INTR) => {}
                Err(_no_child) => return,
            }
            self.reap();
        }
    }

    /// Signals a child's whole group at once, which a process cannot escape by forking. The group is of our tree, since
    /// a process can join groups only within its session, and all sessions but our own were opened within the tree.
    fn signal_with_group(&self, pid: Pid, signal: Signal) {
        let _ = match process::getpgid(Some(pid)) {
            Ok(group) if group != self.own_group => process::kill_process_group(group, signal),
            _ => process::kill_process(pid, signal),
        };
    }

    /// Calls `visit` with every child, the dead that were not yet waited for included, so that no id can be somebody else's.
    fn for_each_child(&self, mut visit: impl FnMut(Pid)) {
        let mut buffer = [0; 4096];
        let mut number = 0_i32;
        let _ = sys::rewind(self.children);
        while let Ok(count @ 1..) = sys::read(self.children, &mut buffer) {
            for byte in buffer.iter().take(count) {
                match byte {
                    b'0'..=b'9' => number = number.saturating_mul(10).saturating_add(i32::from(byte - b'0')),
                    _ => {
                        if let Some(pid) = Pid::from_raw(std::mem::take(&mut number)) {
                            visit(pid);
                        }
                    }
                }
            }
        }
    }
}

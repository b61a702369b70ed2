//! The agent: the first process of a guest. It mounts the file tree of commands, runs them under supervisors as every
//! level does, and synchronizes the workspace.
//!
//! It is this program under the name [`NAME`], which is the init of a guest's root file system. It has one thread. Each
//! command has an *attendant*, a process that copies bytes between the pipes of the command and the executor's
//! connection. A process that loses its parent becomes the agent's child and is killed.
//!
//! If no guest can be booted, the same agent can be tested: it serves a folder of the machine over a Unix socket by
//! `wieldy-guest SOCKET FOLDER [USER]`. It then mounts nothing, and runs commands as `USER` or as its own user.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::{self, Pid};
use rustix::thread;

use super::frames::{self, CONTENT_BYTES_MAX, Frame, Kind, PORT, Prepare, Run};
use super::sync::{self, Manifest, Tree};
use crate::supervise::protocol::{self, SupervisorOrder, SupervisorReport};
use crate::supervise::supervisor::Supervisor;
use crate::supervise::{fork_server, tree};
use crate::sys;
use crate::view::mounts;
use crate::view::plan::{Room, Step};
use crate::view::system_paths::SYSTEM;

/// The name that a program is started by to become an agent.
pub(crate) const NAME: &CStr = c"wieldy-guest";

/// The account that commands run as.
const AGENT: u32 = 1000;

/// The disk of the workspace, and its first mount point, from which it is bound to its final path.
const DISK: &str = "/dev/vdb";
const DISK_MOUNT: &str = "/tmp";

/// Becomes the agent, with the words that it was started with after its name.
pub(crate) fn serve_forever(words: &[CString]) -> ! {
    // A panic would otherwise unwind into the C library's start-up code.
    let lived = std::panic::catch_unwind(|| match words {
        [socket, folder, user @ ..] => {
            Agent::on_machine(&path(socket), path(folder), user.first()).and_then(|mut agent| agent.serve())
        }
        _ => Agent::in_guest().and_then(|mut agent| agent.serve()),
    });
    if let Ok(Err(error)) = &lived {
        complain(&error.to_string());
    }
    // This ends the guest.
    sys::exit_now(i32::from(!matches!(lived, Ok(Ok(())))))
}

fn path(text: &CStr) -> PathBuf {
    std::ffi::OsStr::from_bytes(text.to_bytes()).into()
}

/// The kernel's log, which is shown on the guest's console at once.
static LOG: OnceLock<File> = OnceLock::new();

/// Logs the reason why the agent ends.
fn complain(reason: &str) {
    const CRITICAL: u8 = 2;
    if let Some(mut log) = LOG.get() {
        let _ = log.write_all(format!("<{CRITICAL}>wieldy-guest: {reason}\n").as_bytes());
    }
}

struct Agent {
    listener: OwnedFd,
    tree: tree::Tree,
    /// The workspace, once it is prepared.
    workspace: Option<Workspace>,
    attendants: HashMap<Pid, ()>,
    /// The agent's `/proc`, which commands see read-only.
    kernel: OwnedFd,
}

struct Workspace {
    folder: PathBuf,
    tree: Tree,
    agreed: Manifest,
    /// The account that commands run as, if it is not our own.
    user: Option<u32>,
}

impl Agent {
    /// Starts as the first process of a guest, in which only the root file system is mounted.
    fn in_guest() -> io::Result<Self> {
        let nothing = None::<&CStr>;
        let mount =
            |kind: &str, place: &str| match rustix::mount::mount(kind, place, kind, MountFlags::empty(), nothing) {
                // The kernel may have mounted it already.
                Err(Errno::BUSY) => Ok(()),
                mounted => mounted.map_err(|error| io::Error::other(format!("mounting `{place}`: {error}"))),
            };
        mount("devtmpfs", "/dev")?;
        mount("proc", "/proc")?;
        if let Ok(log) = File::options().write(true).open("/dev/kmsg") {
            let _ = LOG.set(log);
            std::panic::set_hook(Box::new(|panic| complain(&panic.to_string())));
        }
        sys::raise_loopback()?;
        let _ = rustix::system::sethostname(b"sandbox");
        Self::begin(sys::listen_to_host(PORT)?, None)
    }

    /// Starts as a process of the machine that ends with its parent.
    fn on_machine(socket: &Path, folder: PathBuf, user: Option<&CString>) -> io::Result<Self> {
        let user =
            user.map(|user| user.to_str().ok().and_then(|user| user.parse().ok()).ok_or(io::ErrorKind::InvalidInput));
        let user = user.transpose()?;
        fork_server::die_with_parent()?;
        process::set_child_subreaper(Some(process::getpid()))?;
        let listener = std::os::unix::net::UnixListener::bind(socket)?;
        let tree = Tree::copy(&folder, user.map(|user| (user, user)))?;
        Self::begin(listener.into(), Some(Workspace { folder, tree, agreed: BTreeMap::new(), user }))
    }

    fn begin(listener: OwnedFd, workspace: Option<Workspace>) -> io::Result<Self> {
        sys::block_signals();
        sys::reset_signal_handlers();
        let _ = thread::set_name(NAME);
        let _ = process::setsid();
        // All our children inherit `/dev/null` as standard descriptors.
        let listener = rustix::io::fcntl_dupfd_cloexec(listener, 3)?;
        let nowhere = File::options().read(true).write(true).open("/dev/null")?;
        for number in 0..3 {
            sys::duplicate_to(nowhere.as_raw_fd(), number)?;
        }
        let tree = tree::Tree::new(sys::child_signals()?)?;
        let kernel = rustix::fs::open("/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { listener, tree, workspace, attendants: HashMap::new(), kernel })
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut polled = [
                PollFd::new(&self.listener, PollFlags::IN),
                PollFd::from_borrowed_fd(self.tree.signals(), PollFlags::IN),
            ];
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let (called, ended) = (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            if ended {
                for (pid, _) in self.tree.reap_strangers(&self.attendants) {
                    self.attendants.remove(&pid);
                }
            }
            if called
                && let Ok(connection) = rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC)
            {
                let mut connection = File::from(connection);
                if let Err(error) = self.attend(&mut connection) {
                    let _ = frames::send(&mut connection, Kind::Failed, error.to_string().as_bytes());
                }
            }
        }
    }

    /// Serves a connection. The executor is trusted, so this blocks until its order has come.
    fn attend(&mut self, connection: &mut File) -> io::Result<()> {
        let frame = frames::receive(connection)?;
        match (frame.kind, &mut self.workspace) {
            (Kind::Prepare, workspace) => {
                let order: Prepare = frame.message()?;
                if workspace.is_none() {
                    *workspace = Some(prepare(&order)?);
                }
                frames::send(connection, Kind::Ready, env!("CARGO_PKG_VERSION").as_bytes())
            }
            (Kind::Sync, Some(workspace)) => {
                workspace.agreed = sync::answer(&workspace.tree, connection, &workspace.agreed)?;
                Ok(())
            }
            (Kind::Run, Some(_)) => self.run(&frame, connection),
            (Kind::Sync | Kind::Run, None) => Err(io::Error::other("nothing is prepared yet")),
            (kind, _) => Err(frames::invalid(&format!("a frame {kind:?} at the beginning"))),
        }
    }

    /// Makes an attendant that runs a command.
    fn run(&mut self, frame: &Frame, connection: &File) -> io::Result<()> {
        let Some(workspace) = &self.workspace else { return Ok(()) };
        let mut run: Run = frame.message()?;
        // The folders of the order are relative to the workspace.
        run.order.folder = workspace.folder.join(&run.order.folder);
        run.order.workspace.clone_from(&workspace.folder);
        match sys::fork(0)? {
            Some(pid) => drop(self.attendants.insert(pid, ())),
            None => {
                let attended = || -> io::Result<()> {
                    let mut connection = connection.try_clone()?;
                    prefer_for_oom_kill(&self.kernel);
                    sys::close_all_but(&mut [0, 1, 2, connection.as_raw_fd()])?;
                    fork_server::die_with_parent()?;
                    let _ = thread::set_name(c"wieldy-attend");
                    let begun = Attendant::begin(run, workspace);
                    if let Err(error) = begun.and_then(|attendant| attendant.wait_for_end(&mut connection)) {
                        let _ = frames::send(&mut connection, Kind::Failed, error.to_string().as_bytes());
                    }
                    Ok(())
                };
                let attended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attended));
                sys::exit_now(i32::from(!matches!(attended, Ok(Ok(())))))
            }
        }
        Ok(())
    }
}

/// Mounts the file tree of commands and makes it the root: the system folders of the root file system, private folders
/// in memory, and the workspace.
fn prepare(order: &Prepare) -> io::Result<Workspace> {
    let doing = |what: &str, error: io::Error| io::Error::other(format!("{what}: {error}"));
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    rustix::mount::mount(DISK, DISK_MOUNT, "ext4", flags, None::<&CStr>)
        .map_err(|error| doing("mounting the disk for the workspace", error.into()))?;
    let _ = fs::remove_dir(Path::new(DISK_MOUNT).join("lost+found"));
    std::os::unix::fs::chown(DISK_MOUNT, Some(AGENT), Some(AGENT))?;
    mounts::detach().map_err(|error| doing("parting with mounts", error))?;
    let steps = steps(order);
    let build = || {
        let sources = mounts::open_sources(&steps)?;
        let root =
            mounts::NewRoot::begin(&steps, None).map_err(|error| ("moving to the new root".to_owned(), error))?;
        root.add(&steps, sources)?;
        root.finish(&[], HashMap::new())
    };
    build().map_err(|(what, error)| doing(&what, error))?;
    let folder = order.workspace.clone();
    let tree = Tree::copy(&folder, Some((AGENT, AGENT)))?;
    Ok(Workspace { folder, tree, agreed: BTreeMap::new(), user: Some(AGENT) })
}

/// The home folder of commands.
pub(super) const HOME: &str = "/home/agent";

/// Returns the steps that build the file tree of commands, parents first.
fn steps(order: &Prepare) -> Vec<Step> {
    let room = Room { bytes: order.room_bytes, inodes: order.room_files };
    let small = Room { bytes: 16 << 20, inodes: 4096 };
    let mut steps: BTreeMap<PathBuf, Step> = BTreeMap::new();
    let mut add = |step: Step| drop(steps.insert(step.path().to_owned(), step));
    for path in SYSTEM.map(PathBuf::from) {
        match fs::read_link(&path) {
            Ok(target) => add(Step::Link { path, target }),
            Err(_) => add(Step::Bind { source: path.clone(), target: path, writable: false, optional: true }),
        }
    }
    let memory = |path: &str, room, mode| Step::Tmpfs { path: path.into(), room, mode };
    add(memory("/", small, 0o755));
    add(memory("/run", small, 0o755));
    for path in ["/dev/shm", "/tmp", "/var/tmp", HOME] {
        add(memory(path, room, 0o1777));
    }
    add(Step::Proc);
    add(Step::Dev);
    let files = [
        ("/etc/passwd", format!("root:x:0:0:root:/:/bin/false\nagent:x:{AGENT}:{AGENT}:agent:{HOME}:/bin/sh\n")),
        ("/etc/group", format!("root:x:0:\nagent:x:{AGENT}:\n")),
    ];
    for (path, content) in files.into_iter().filter(|(path, _)| Path::new(path).is_file()) {
        add(Step::File { path: path.into(), content });
    }
    let (source, target) = (DISK_MOUNT.into(), order.workspace.clone());
    add(Step::Bind { source, target, writable: true, optional: false });
    steps.into_values().collect()
}

/// A command's supervisor and our ends of its pipes.
struct Attendant {
    supervisor: OwnedFd,
    input: Option<File>,
    /// Input that is not in the pipe of the command yet.
    waiting: Vec<u8>,
    output: Option<File>,
    complaints: Option<File>,
    /// True while the executor may send frames.
    is_heard: bool,
}

/// The source of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Supervisor,
    Connection,
    Input,
    Output,
    Complaints,
}

impl Attendant {
    /// Makes a supervisor and has it start the command.
    fn begin(run: Run, workspace: &Workspace) -> io::Result<Self> {
        let (supervisor, theirs) = protocol::pair()?;
        if sys::fork(0)?.is_none() {
            let begun =
                sys::close_all_but(&mut [0, 1, 2, theirs.as_raw_fd()]).and_then(|()| become_user(workspace.user));
            // The parent-death signal is set after the change of user, which would clear it.
            if begun.and_then(|()| fork_server::die_with_parent()).is_err() {
                sys::exit_now(1);
            }
            let places =
                [workspace.folder.as_path(), Path::new("/tmp")].into_iter().filter(|_| workspace.user.is_some());
            let private = places.filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect();
            Supervisor { socket: theirs, landlock: None, private, on_disk: Vec::new() }.serve_forever()
        }
        drop(theirs);
        protocol::receive::<SupervisorReport>(&supervisor)?.ok_or_else(lost)?;
        let (has_terminal, has_input) = (run.order.terminal.is_some(), run.has_input);
        let order = SupervisorOrder::Run(Box::new(run.order));
        if has_terminal {
            protocol::send(&supervisor, &order, &[])?;
            let received = protocol::receive::<SupervisorReport>(&supervisor)?.ok_or_else(lost)?;
            let terminal = received.descriptors.into_iter().next();
            let terminal = nonblocking(terminal.ok_or_else(|| io::Error::other("no terminal could be made"))?)?;
            let input = Some(terminal.try_clone()?);
            let output = Some(terminal);
            return Ok(Self { supervisor, input, waiting: Vec::new(), output, complaints: None, is_heard: true });
        }
        let (stdin, input) = if has_input {
            let (theirs, ours) = io::pipe()?;
            (OwnedFd::from(theirs), Some(nonblocking(ours.into())?))
        } else {
            (File::open("/dev/null")?.into(), None)
        };
        let ((output, stdout), (complaints, stderr)) = (io::pipe()?, io::pipe()?);
        protocol::send(&supervisor, &order, &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])?;
        let (output, complaints) = (Some(nonblocking(output.into())?), Some(nonblocking(complaints.into())?));
        Ok(Self { supervisor, input, waiting: Vec::new(), output, complaints, is_heard: true })
    }

    /// Copies bytes until the supervisor reports the end of the command. If the executor does not read, the command
    /// cannot print.
    fn wait_for_end(mut self, connection: &mut File) -> io::Result<()> {
        loop {
            let happened = self.wait(connection)?;
            let at = |what| happened.contains(&what);
            if at(At::Connection) {
                self.hear(connection)?;
            }
            if at(At::Input) {
                self.feed(connection)?;
            }
            if at(At::Output) {
                pass_on(&mut self.output, Kind::Output, connection)?;
            }
            if at(At::Complaints) {
                pass_on(&mut self.complaints, Kind::Complaint, connection)?;
            }
            if at(At::Supervisor) {
                return self.finish(connection);
            }
        }
    }

    /// Waits for events and returns their sources.
    fn wait(&self, connection: &File) -> io::Result<Vec<At>> {
        let mut watched = vec![(At::Supervisor, self.supervisor.as_fd(), PollFlags::IN)];
        if self.is_heard {
            watched.push((At::Connection, connection.as_fd(), PollFlags::IN));
        }
        watched.extend(self.output.as_ref().map(|pipe| (At::Output, pipe.as_fd(), PollFlags::IN)));
        watched.extend(self.complaints.as_ref().map(|pipe| (At::Complaints, pipe.as_fd(), PollFlags::IN)));
        let input = self.input.as_ref().filter(|_| !self.waiting.is_empty());
        watched.extend(input.map(|pipe| (At::Input, pipe.as_fd(), PollFlags::OUT)));
        let mut polled: Vec<_> = watched.iter().map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        match rustix::event::poll(&mut polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let happened = watched.iter().zip(&polled).filter(|(_, polled)| !polled.revents().is_empty());
        Ok(happened.map(|((at, ..), _)| *at).collect())
    }

    /// Handles a frame of the executor, which sends input only when none is waiting. So its stop is always received.
    fn hear(&mut self, connection: &mut File) -> io::Result<()> {
        let frame = frames::receive(connection)?;
        match frame.kind {
            Kind::Stop => {
                self.is_heard = false;
                protocol::send(&self.supervisor, &SupervisorOrder::Stop, &[])
            }
            Kind::Input if frame.bytes.is_empty() => {
                self.input = None;
                Ok(())
            }
            Kind::Input if self.waiting.is_empty() => {
                self.waiting = frame.bytes;
                self.feed(connection)
            }
            kind => Err(frames::invalid(&format!("a frame {kind:?} while a command runs"))),
        }
    }

    /// Writes as much input as the pipe has room for, and discards it if the command has closed its end.
    fn feed(&mut self, connection: &mut File) -> io::Result<()> {
        match self.input.as_mut().map(|input| input.write(&self.waiting)) {
            Some(Ok(count)) => drop(self.waiting.drain(..count)),
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Some(Err(_)) | None => self.waiting.clear(),
        }
        if self.waiting.is_empty() { frames::send(connection, Kind::Taken, &[]) } else { Ok(()) }
    }

    /// Sends the bytes that are still in the pipes, and the report. No process of the command is left to write more.
    fn finish(mut self, connection: &mut File) -> io::Result<()> {
        let report = protocol::receive::<SupervisorReport>(&self.supervisor)?.ok_or_else(lost)?.message;
        for (pipe, kind) in [(&mut self.output, Kind::Output), (&mut self.complaints, Kind::Complaint)] {
            // No more than a pipe can hold: a process that still writes does not belong to the command.
            let size = pipe.as_ref().and_then(|pipe| rustix::pipe::fcntl_getpipe_size(pipe).ok());
            let mut left = size.unwrap_or(CONTENT_BYTES_MAX);
            while left > 0
                && let count @ 1.. = pass_on(pipe, kind, connection)?
            {
                left = left.saturating_sub(count);
            }
        }
        frames::tell(connection, Kind::Ended, &report)
    }
}

/// Sends bytes of a pipe as a frame, and closes the pipe at its end. Returns the number of bytes.
fn pass_on(pipe: &mut Option<File>, kind: Kind, connection: &mut File) -> io::Result<usize> {
    let mut buffer = [0; CONTENT_BYTES_MAX];
    let Some(open) = pipe else { return Ok(0) };
    match open.read(&mut buffer) {
        Ok(count @ 1..) => {
            frames::send(connection, kind, buffer.get(..count).unwrap_or_default())?;
            return Ok(count);
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
        // A terminal that no process has open reports its end as an error.
        Ok(_) | Err(_) => *pipe = None,
    }
    Ok(0)
}

fn nonblocking(fd: OwnedFd) -> io::Result<File> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    Ok(fd.into())
}

fn lost() -> io::Error {
    io::Error::other("its supervisor was killed")
}

/// Makes the kernel kill this process before the agent if the guest runs out of memory.
fn prefer_for_oom_kill(kernel: &OwnedFd) {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::openat(kernel, "self/oom_score_adj", flags, Mode::empty()) {
        let _ = File::from(file).write_all(b"500");
    }
}

/// Changes to the account that commands run as, without any other group.
fn become_user(user: Option<u32>) -> io::Result<()> {
    let Some(user) = user else { return Ok(()) };
    let (uid, gid) = (thread::Uid::from_raw(user), thread::Gid::from_raw(user));
    thread::set_thread_groups(&[])?;
    thread::set_thread_res_gid(gid, gid, gid)?;
    thread::set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

#[cfg(test)]
mod tests;

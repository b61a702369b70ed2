//! The fork server: a small process beside the executor that makes sandboxes, waits for their end and cleans up after
//! them.
//!
//! It is the executor's own program, started once more and diverted before `main` (see `sys.rs`). It has one thread and
//! hardly any memory, so forking it is fast and the child may run any code. It ends when the executor ends, even by a
//! crash, and first ends everything that it made.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use rustix::process::{self, Pid, Signal, WaitOptions};
use rustix::thread;
use seccompiler::BpfProgram;

use super::init::Init;
use super::namespaces;
use super::protocol::{self, ForkServerOrder, ForkServerReport, InitReport};
use super::supervisor::Supervisor;
use super::tree::Tree;
use crate::filter::seccomp;
use crate::private_disk::remove_tree;
use crate::sys;
use crate::view::identity::{self, Identity};
use crate::view::mounts;
use crate::view::placeholders::{Marked, Placeholder, Placeholders, is_marked, open_plain};
use crate::view::plan::Step;

/// The name that a program is started by to become a fork server.
pub(crate) const NAME: &CStr = c"wieldy-sandbox-fork-server";

/// The time for which paths stay held after the end of the last sandbox that needed them.
const LINGER: Duration = Duration::from_secs(2);

/// Becomes the fork server of the process that started this one, and ends with it.
pub(crate) fn serve_forever() -> ! {
    // A panic would otherwise unwind into the C library's start-up code.
    let ended = std::panic::catch_unwind(|| ForkServer::begin().and_then(|mut fork_server| fork_server.serve()));
    sys::exit_now(i32::from(!matches!(ended, Ok(Ok(())))))
}

struct ForkServer {
    executor: OwnedFd,
    parent: Option<Pid>,
    tree: Tree,
    held: Placeholders,
    /// Held paths that no sandbox needs, with the time of their release, soonest first.
    lingering: VecDeque<(Instant, PathBuf)>,
    /// The compiled seccomp filter of all sandboxes; `None` until the first sandbox is made.
    filter: Option<BpfProgram>,
    /// Inits and supervisors that the fork server made, with the resources to release at their end.
    children: HashMap<Pid, ChildResources>,
    /// Cgroups of sandboxes whose init was killed without an order. The executor may still read their counters.
    lost: HashMap<Pid, Vec<PathBuf>>,
    /// Children with a pending `End` order, with the sockets that are closed at their end.
    waiting_for_end: Vec<(Pid, OwnedFd)>,
}

impl ForkServer {
    fn begin() -> io::Result<Self> {
        sys::block_signals();
        sys::reset_signal_handlers();
        let _ = thread::set_name(c"wieldy-forkserver");
        // Detach from the terminal, and from the signals to the executor's process group.
        let _ = process::setsid();
        // Standard input is the socket. Move it to a higher number, so that 0 to 2 are `/dev/null` in every child.
        let executor = rustix::io::fcntl_dupfd_cloexec(sys::take_descriptor(0), 3)?;
        // Move `/dev/null` up, too. Opened as 0, 1 or 2 it would be closed there later; the next socket would get that
        // number, and every child would inherit it.
        let nowhere = fs::File::options().read(true).write(true).open("/dev/null")?;
        let nowhere = rustix::io::fcntl_dupfd_cloexec(nowhere, 3)?;
        for number in 0..3 {
            sys::duplicate_to(nowhere.as_raw_fd(), number)?;
        }
        // Descendants of a killed supervisor become children of the fork server.
        process::set_child_subreaper(Some(process::getpid()))?;
        let tree = Tree::new(sys::child_signals()?)?;
        Ok(Self {
            executor,
            parent: process::getppid(),
            tree,
            held: Placeholders::default(),
            lingering: VecDeque::new(),
            filter: None,
            children: HashMap::new(),
            lost: HashMap::new(),
            waiting_for_end: Vec::new(),
        })
    }

    fn serve(&mut self) -> io::Result<()> {
        let served = self.handle_orders();
        // Kill all children. With its init, a sandbox ends. Descendants of killed supervisors become our children and
        // are killed too.
        self.tree.kill();
        for (_, path) in std::mem::take(&mut self.lingering) {
            self.held.release(&path);
        }
        let lost = std::mem::take(&mut self.lost).into_values().flatten().collect();
        let lost = ChildResources { groups: lost, ..ChildResources::default() };
        let children = std::mem::take(&mut self.children);
        // The executor's own cgroup is the parent of its sandboxes' cgroups. A killed executor cannot remove it.
        let was_killed = process::getppid() != self.parent;
        let mut above = BTreeSet::new();
        for mut resources in children.into_values().chain([lost]) {
            // It was killed before it had removed everything.
            resources.is_remover = false;
            above.extend(resources.groups.iter().flat_map(|group| above_it(group)));
            resources.remove(&mut self.held);
        }
        // Inner cgroups before outer ones.
        for group in above.iter().rev().filter(|_| was_killed) {
            let _ = fs::remove_dir(group);
        }
        served
    }

    fn handle_orders(&mut self) -> io::Result<()> {
        loop {
            self.waiting_for_end.retain(|(child, _)| self.children.contains_key(child));
            while let Some((_, path)) = self.lingering.pop_front_if(|(until, _)| *until <= Instant::now()) {
                self.held.release(&path);
            }
            let lingering = self.lingering.front().map(|(until, _)| *until);
            let mut polled = [
                PollFd::new(&self.executor, PollFlags::IN),
                PollFd::from_borrowed_fd(self.tree.signals(), PollFlags::IN),
            ];
            let patience = lingering.map(|until| until.saturating_duration_since(Instant::now()));
            let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
            match rustix::event::poll(&mut polled, patience.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let (ordered, ended) = (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            if ended {
                self.reap();
            }
            if ordered {
                let Some(received) = protocol::receive(&self.executor)? else { return Ok(()) };
                let mut descriptors = received.descriptors;
                let socket = (!descriptors.is_empty()).then(|| descriptors.remove(0));
                self.handle(received.message, socket, descriptors);
            }
        }
    }

    fn handle(&mut self, order: ForkServerOrder, socket: Option<OwnedFd>, mut beside: Vec<OwnedFd>) {
        match (order, socket) {
            (ForkServerOrder::WarmInit { open_network, in_folder, private }, Some(socket)) => {
                let folder = (in_folder && !beside.is_empty()).then(|| beside.remove(0));
                let groups = JoinedGroups { folder, tasks: beside };
                self.make_warm_init(open_network, &socket, &groups, private);
            }
            (ForkServerOrder::Supervisor, Some(socket)) => self.make_supervisor(socket),
            (ForkServerOrder::IdMapNamespace { uid, gid }, Some(socket)) => {
                // If no message can be sent, the socket closes, and the waiting executor sees its end.
                let _ = match identity::namespace(uid, gid) {
                    Ok(made) => protocol::send(&socket, &ForkServerReport { error: None }, &[made.as_fd()]),
                    Err(error) => protocol::send(&socket, &ForkServerReport { error: Some(error.to_string()) }, &[]),
                };
            }
            (ForkServerOrder::Register { child, protected, placeholders, groups }, Some(socket)) => {
                let mut resources = ChildResources { groups, ..ChildResources::default() };
                let held = self.held.hold(&protected, &placeholders, &mut resources.held);
                match Pid::from_raw(child).and_then(|pid| self.children.get_mut(&pid)) {
                    Some(known) => {
                        resources.private = known.private.take();
                        *known = resources;
                    }
                    None => resources.remove(&mut self.held),
                }
                let report = ForkServerReport { error: held.err().map(|error| error.to_string()) };
                let _ = protocol::send(&socket, &report, &[]);
            }
            (ForkServerOrder::Rest { child, places }, Some(socket)) => {
                if let Some(resources) = Pid::from_raw(child).and_then(|pid| self.children.get_mut(&pid)) {
                    let resting = resources.held.extract_if(.., |path| places.contains(path)).collect::<Vec<_>>();
                    // Children before their parents.
                    resting.iter().rev().for_each(|path| self.held.release(path));
                }
                let _ = protocol::send(&socket, &ForkServerReport { error: None }, &[]);
            }
            (ForkServerOrder::Wake { child, placeholders, steps }, Some(socket)) => {
                let error = self.wake(child, placeholders, beside.pop(), &steps).err().map(|error| error.to_string());
                let _ = protocol::send(&socket, &ForkServerReport { error }, &[]);
            }
            (ForkServerOrder::End { child, linger }, Some(socket)) => self.end_child(child, linger, socket),
            (_, None) => {}
        }
    }

    /// Reaps children that ended and releases their resources. Other children are orphans of a killed supervisor, and
    /// are killed.
    fn reap(&mut self) {
        for (pid, was_killed) in self.tree.reap_strangers(&self.children) {
            if let Some(mut resources) = self.children.remove(&pid) {
                if was_killed && self.waiting_for_end.iter().all(|(child, _)| *child != pid) {
                    // Only the counters of its cgroups show whether the kernel killed it for its memory, so they stay
                    // for now.
                    self.lost.insert(pid, std::mem::take(&mut resources.groups));
                }
                if let Some(private) = resources.private.take().filter(|_| !resources.is_remover) {
                    self.start_removal(private);
                }
                resources.remove(&mut self.held);
            }
        }
    }

    /// Removes a folder in a process of its own, because it may hold very many files.
    fn start_removal(&mut self, folder: PathBuf) {
        match sys::fork(0) {
            Ok(None) => {
                let alone = sys::close_all_but(&mut [0, 1, 2]).and_then(|()| die_with_parent());
                sys::exit_now(i32::from(alone.and_then(|()| remove_tree(&folder)).is_err()))
            }
            // If the fork server ends before the removal does, it removes the folder itself.
            Ok(Some(pid)) => {
                let resources = ChildResources { private: Some(folder), is_remover: true, ..ChildResources::default() };
                self.children.insert(pid, resources);
            }
            Err(_) => drop(remove_tree(&folder)),
        }
    }

    /// Adds a child, and removes the cgroups of a lost child that had the same process id.
    fn register(&mut self, pid: Pid) {
        self.remove_groups_of(pid);
        self.children.insert(pid, ChildResources::default());
    }

    fn remove_groups_of(&mut self, pid: Pid) {
        self.lost.remove(&pid).iter().flatten().for_each(|group| remove_group(group));
    }

    /// Holds a child's placeholders again, and masks them again in its mount namespace.
    fn wake(
        &mut self,
        child: i32,
        placeholders: Vec<Placeholder>,
        namespace: Option<OwnedFd>,
        steps: &[Step],
    ) -> io::Result<()> {
        let gone = || io::Error::other("the sandbox has ended; the next call gets a new one");
        let namespace = namespace.ok_or_else(gone)?;
        let resources = Pid::from_raw(child).and_then(|pid| self.children.get_mut(&pid)).ok_or_else(gone)?;
        // The user may have made a file of that name meanwhile: it is masked as it is.
        let (theirs, missing): (Vec<_>, Vec<_>) =
            placeholders.into_iter().partition(|place| is_marked(&place.path) == Marked::No);
        let theirs: Vec<_> = theirs.into_iter().map(|place| place.path).collect();
        self.held.hold(&theirs, &missing, &mut resources.held)?;
        match sys::fork(0)? {
            None => {
                let entered = sys::enter_mounts(&namespace).and_then(|()| mounts::mask_again(steps));
                sys::exit_now(entered.map_or_else(|error| error.raw_os_error().unwrap_or(libc::EIO), |()| 0))
            }
            Some(pid) => {
                match process::waitpid(Some(pid), WaitOptions::empty())?.and_then(|(_, ended)| ended.exit_status()) {
                    Some(0) => Ok(()),
                    Some(code) => Err(io::Error::from_raw_os_error(code)),
                    None => {
                        Err(io::Error::other("the process that mounts was killed; the machine may be out of memory"))
                    }
                }
            }
        }
    }

    fn end_child(&mut self, child: i32, linger: bool, socket: OwnedFd) {
        // Only a child that was not reaped yet: its process id cannot have been given to another process.
        if let Some(pid) = Pid::from_raw(child)
            && let Some(resources) = self.children.get_mut(&pid)
        {
            if linger {
                let until = Instant::now() + LINGER;
                self.lingering.extend(resources.held.drain(..).rev().map(|path| (until, path)));
            }
            let _ = process::kill_process(pid, Signal::KILL);
            self.waiting_for_end.push((pid, socket));
        } else if let Some(pid) = Pid::from_raw(child) {
            self.remove_groups_of(pid);
        }
    }

    fn make_supervisor(&mut self, socket: OwnedFd) {
        match sys::fork(0) {
            Ok(None) => {
                let kept = sys::close_all_but(&mut [0, 1, 2, socket.as_raw_fd()]);
                if kept.is_err() || die_with_parent().is_err() {
                    sys::exit_now(1);
                }
                prefer_for_oom_kill();
                Supervisor { socket, landlock: None, private: Vec::new(), on_disk: Vec::new() }.serve_forever()
            }
            Ok(Some(pid)) => self.register(pid),
            // The socket closes, and the waiting executor sees its end.
            Err(_) => {}
        }
    }

    fn make_warm_init(
        &mut self,
        open_network: bool,
        socket: &OwnedFd,
        groups_to_join: &JoinedGroups,
        private: Option<PathBuf>,
    ) {
        match self.try_make_warm_init(open_network, socket, groups_to_join, private.as_deref()) {
            Ok(pid) => {
                self.register(pid);
                self.children.entry(pid).or_default().private = private;
            }
            Err((doing, error)) => {
                let report = InitReport::Failed { doing: doing.into(), error: error.to_string() };
                let _ = protocol::send(socket, &report, &[]);
            }
        }
    }

    fn try_make_warm_init(
        &mut self,
        open_network: bool,
        socket: &OwnedFd,
        groups_to_join: &JoinedGroups,
        private: Option<&Path>,
    ) -> Result<Pid, (&'static str, io::Error)> {
        let identity = Identity::of_this_process();
        if let Some(private) = private {
            make_private(private, identity).map_err(|error| ("making its private folder on the disk", error))?;
        }
        let filter = match self.filter.take() {
            Some(filter) => filter,
            None => seccomp::filter().map_err(|error| ("compiling the filter", io::Error::other(error)))?,
        };
        let filter = self.filter.insert(filter);
        let (go_ours, go) = io::pipe().map_err(|error| ("making a pipe", error))?;
        let mut flags = libc::CLONE_NEWUSER
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        if !open_network {
            flags |= libc::CLONE_NEWNET;
        }
        match groups_to_join.fork(flags).map_err(|error| ("making namespaces", namespaces::explained(error)))? {
            None => {
                groups_to_join.join();
                let Ok(socket) = socket.try_clone() else { sys::exit_now(1) };
                // `close_all_but` closes this descriptor; dropping it would close that number twice.
                std::mem::forget(go);
                if sys::close_all_but(&mut [0, 1, 2, socket.as_raw_fd(), go_ours.as_raw_fd()]).is_err() {
                    sys::exit_now(1);
                }
                let (filter, private) = (std::mem::take(filter), private.map(Path::to_owned));
                Init { socket, identity, open_network, filter, private }.serve_forever(go_ours.into())
            }
            Some(pid) => {
                if let Err(error) = identity.map(pid) {
                    let _ = process::kill_process(pid, Signal::KILL);
                    return Err(("mapping users", error));
                }
                drop(go); // the end of file lets the init go on
                Ok(pid)
            }
        }
    }
}

/// Makes this process and its descendants, rather than the executor, the first choice of the kernel's OOM killer.
pub(crate) fn prefer_for_oom_kill() {
    let _ = fs::write("/proc/self/oom_score_adj", "500");
}

/// Has the kernel kill this process when its parent ends.
pub(crate) fn die_with_parent() -> io::Result<()> {
    process::set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// The cgroups that the init of a sandbox enters before it does anything else.
///
/// A process enters a cgroup itself at once. When another process moves it, the kernel waits for all processors, for
/// about 10 ms. The executor moves the init only if entering failed.
struct JoinedGroups {
    /// The folder of the cgroup v2 group.
    folder: Option<OwnedFd>,
    /// The files `tasks` of the cgroup v1 groups.
    tasks: Vec<OwnedFd>,
}

impl JoinedGroups {
    /// Forks this process, into the cgroup v2 group if that works.
    fn fork(&self, flags: i32) -> io::Result<Option<Pid>> {
        let within = self.folder.as_ref().map(|folder| sys::fork_into(flags, folder.as_fd()));
        // Without the cgroup the kernel returns the error again, if the cgroup was not its cause.
        within.and_then(Result::ok).map_or_else(|| sys::fork(flags), Ok)
    }

    /// Moves this process, which has one thread, to the cgroup v1 groups.
    fn join(&self) {
        for tasks in &self.tasks {
            let _ = rustix::io::write(tasks, b"0");
        }
    }
}

/// The resources to release when a sandbox ends.
#[derive(Default)]
struct ChildResources {
    groups: Vec<PathBuf>,
    /// The paths that are held for it, parents first.
    held: Vec<PathBuf>,
    /// The folder on a disk with its private folders.
    private: Option<PathBuf>,
    /// True if the child is a process that removes this folder.
    is_remover: bool,
}

impl ChildResources {
    fn remove(self, held: &mut Placeholders) {
        for group in &self.groups {
            remove_group(group);
        }
        // Children before their parents.
        for path in self.held.iter().rev() {
            held.release(path);
        }
        // What cannot be removed is removed by the next start.
        self.private.filter(|_| !self.is_remover).iter().for_each(|folder| drop(remove_tree(folder)));
    }
}

/// Makes the folder for a sandbox's private folders, which belongs to the sandbox's account.
fn make_private(folder: &Path, identity: Identity) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(folder)?;
    let made = open_plain(folder, OFlags::RDONLY | OFlags::DIRECTORY)?;
    identity.give(&made)
}

/// Removes the empty cgroups of a sandbox and of its supervisors. If the cgroup still has those of other sandboxes, it
/// stays, and the executor removes it later.
fn remove_group(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b"supervisor-") {
            let _ = fs::remove_dir(entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

/// Returns the ancestors of a sandbox's cgroup, up to the executor's own.
fn above_it(group: &Path) -> Vec<PathBuf> {
    let is_own = |folder: &Path| folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"wieldy-"));
    let above: Vec<&Path> = group.ancestors().skip(1).collect();
    let own = above.iter().position(|folder| is_own(folder)).unwrap_or(0);
    above.into_iter().take(own + 1).map(Path::to_owned).collect()
}

//! The warden: a small process beside the executor that makes sandboxes, waits for their end and cleans up after them.
//!
//! It is the executor's own program, started once more and stopped before `main` (see `sys.rs`): a process with one thread and hardly
//! any memory, so a copy of it is made quickly and may do whatever it likes. It goes when the executor does, in whatever way that
//! goes, and takes everything with it.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{self, Pid, Signal};
use rustix::thread;

use crate::berth::Berth;
use crate::native::held::Held;
use crate::native::init::Init;
use crate::native::owners::{Identity, Owners};
use crate::sys;
use crate::tree::Tree;
use crate::wire::{self, InitReport, SandboxOrder, WardenOrder};

/// The name that a program is started by to become a warden.
pub(crate) const NAME: &CStr = c"wieldy-sandbox-warden";

/// Becomes the warden of the process that started this one, and ends with it.
pub(crate) fn live() -> ! {
    // A panic would otherwise unwind into the C library's start-up code.
    let ended = std::panic::catch_unwind(|| Warden::begin().and_then(|mut warden| warden.serve()));
    sys::exit_now(i32::from(!matches!(ended, Ok(Ok(())))))
}

struct Warden {
    executor: OwnedFd,
    tree: Tree,
    owners: Owners,
    /// Those that we made, and what must not outlive them.
    children: HashMap<Pid, Belongings>,
    held: Held,
    /// Who waits for which child's end.
    settling: Vec<(Pid, OwnedFd)>,
}

impl Warden {
    fn begin() -> io::Result<Self> {
        sys::block_signals();
        sys::reset_signal_handlers();
        let _ = thread::set_name(c"wieldy-warden");
        // No terminal, and no signals that were meant for the group of the executor.
        let _ = process::setsid();
        // Standard input is the socket. It gets another number, so that the standard ones lead nowhere in everything we make.
        let executor = rustix::io::fcntl_dupfd_cloexec(sys::take_descriptor(0), 3)?;
        let nowhere = fs::File::options().read(true).write(true).open("/dev/null")?;
        for number in 0..3 {
            sys::duplicate_to(nowhere.as_raw_fd(), number)?;
        }
        // What a killed berth leaves behind comes to us.
        process::set_child_subreaper(Some(process::getpid()))?;
        let tree = Tree::new(sys::child_signals()?)?;
        Ok(Self {
            executor,
            tree,
            owners: Owners::default(),
            children: HashMap::new(),
            held: Held::default(),
            settling: Vec::new(),
        })
    }

    fn serve(&mut self) -> io::Result<()> {
        let served = self.take_orders();
        // Killed are those that we made; of a sandbox's init that is enough. The rest follows, as it becomes ours.
        self.tree.kill();
        for (_, belongings) in std::mem::take(&mut self.children) {
            belongings.remove(&mut self.held);
        }
        served
    }

    fn take_orders(&mut self) -> io::Result<()> {
        loop {
            self.settling.retain(|(child, _)| self.children.contains_key(child));
            let mut polled = [
                PollFd::new(&self.executor, PollFlags::IN),
                PollFd::from_borrowed_fd(self.tree.signals(), PollFlags::IN),
            ];
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let (ordered, ended) = (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            if ended {
                self.bury();
            }
            if ordered {
                let Some(received) = wire::receive(&self.executor)? else { return Ok(()) };
                let Some(socket) = received.descriptors.into_iter().next() else { continue };
                match received.message {
                    WardenOrder::Sandbox(order) => self.make_sandbox(*order, socket),
                    WardenOrder::Berth => self.make_berth(socket),
                    WardenOrder::Settle { child } => self.settle(child, socket),
                }
            }
        }
    }

    /// Takes note of who has ended. Nobody is our child but those that we made and those that lost their parent by violence.
    fn bury(&mut self) {
        for pid in self.tree.reap_strangers(&self.children) {
            if let Some(belongings) = self.children.remove(&pid) {
                belongings.remove(&mut self.held);
            }
        }
    }

    fn settle(&mut self, child: i32, socket: OwnedFd) {
        // Only a child that was not waited for: its number is its own.
        if let Some(pid) = Pid::from_raw(child).filter(|pid| self.children.contains_key(pid)) {
            let _ = process::kill_process(pid, Signal::KILL);
            self.settling.push((pid, socket));
        }
    }

    fn make_berth(&mut self, socket: OwnedFd) {
        match sys::fork(0) {
            Ok(None) => {
                let kept = sys::close_all_but(&mut [0, 1, 2, socket.as_raw_fd()]);
                if kept.is_err() || parted().is_err() {
                    sys::exit_now(1);
                }
                Berth { socket, landlock: None, private: Vec::new() }.live()
            }
            Ok(Some(pid)) => {
                self.children.insert(pid, Belongings::default());
            }
            // Whoever waits at the socket's other end sees it end.
            Err(_) => {}
        }
    }

    fn make_sandbox(&mut self, mut order: SandboxOrder, socket: OwnedFd) {
        let mut belongings = Belongings { groups: std::mem::take(&mut order.groups), held: Vec::new() };
        let made = self.held.hold(&order, &mut belongings.held);
        match made.and_then(|()| self.try_make_sandbox(order, &socket)) {
            Ok(pid) => {
                self.children.insert(pid, belongings);
            }
            Err((doing, error)) => {
                belongings.remove(&mut self.held);
                let report = InitReport::Failed { doing: doing.into(), error: error.to_string() };
                let _ = wire::send(&socket, &report, &[]);
            }
        }
    }

    fn try_make_sandbox(&mut self, order: SandboxOrder, socket: &OwnedFd) -> Result<Pid, (&'static str, io::Error)> {
        let identity = Identity::of_this_process();
        let sources = match identity {
            Identity::Root => {
                self.owners.map_sources(&order.steps).map_err(|error| ("mapping the owners of files", error))?
            }
            Identity::User { .. } => HashMap::new(),
        };
        let (go_ours, go) = io::pipe().map_err(|error| ("making a pipe", error))?;
        let mut flags = libc::CLONE_NEWUSER
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS
            | libc::CLONE_NEWCGROUP;
        if !order.open_network {
            flags |= libc::CLONE_NEWNET;
        }
        match sys::fork(flags).map_err(|error| ("making namespaces", error))? {
            None => {
                let Ok(socket) = socket.try_clone() else { sys::exit_now(1) };
                let mut kept = vec![0, 1, 2, socket.as_raw_fd(), go_ours.as_raw_fd()];
                kept.extend(sources.values().map(AsRawFd::as_raw_fd));
                // What was closed there must not be closed again.
                std::mem::forget(go);
                if sys::close_all_but(&mut kept).is_err() {
                    sys::exit_now(1);
                }
                Init { socket, order, identity, sources }.live(go_ours.into())
            }
            Some(pid) => {
                if let Err(error) = identity.map(pid) {
                    let _ = process::kill_process(pid, Signal::KILL);
                    return Err(("mapping users", error));
                }
                drop(go); // the end of file lets it go on
                Ok(pid)
            }
        }
    }
}

/// Makes sure that this process ends with the one that made it.
pub(crate) fn parted() -> io::Result<()> {
    process::set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// What must not outlive a sandbox.
#[derive(Default)]
struct Belongings {
    groups: Vec<PathBuf>,
    held: Vec<PathBuf>,
}

impl Belongings {
    fn remove(self, held: &mut Held) {
        for group in &self.groups {
            remove_group(group);
        }
        // Children before their parents.
        for path in self.held.iter().rev() {
            held.let_go(path);
        }
    }
}

/// Removes a cgroup and those in it; nobody is in them any more.
fn remove_group(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_group(&entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

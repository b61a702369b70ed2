//! The warden: a small process beside the executor that makes sandboxes, waits for their end and cleans up after them.
//!
//! It is the executor's own program, started once more and stopped before `main` (see `sys.rs`): a process with one thread and hardly
//! any memory, so a copy of it is made quickly and may do whatever it likes. It goes when the executor does, in whatever way that
//! goes, and takes everything with it.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{self, Pid, Signal};
use rustix::thread;

use crate::berth::Berth;
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
    /// What must not outlive which sandbox.
    remove_after: HashMap<Pid, Vec<PathBuf>>,
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
        Ok(Self { executor, tree, owners: Owners::default(), remove_after: HashMap::new(), settling: Vec::new() })
    }

    fn serve(&mut self) -> io::Result<()> {
        let served = self.take_orders();
        // Killed are those that we made; of a sandbox's init that is enough. The rest follows, as it becomes ours.
        self.tree.kill();
        for (_, paths) in std::mem::take(&mut self.remove_after) {
            remove(&paths);
        }
        served
    }

    fn take_orders(&mut self) -> io::Result<()> {
        loop {
            self.settling.retain(|(child, _)| self.remove_after.contains_key(child));
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
                    WardenOrder::Settle { child } => self.settling.extend(Pid::from_raw(child).map(|pid| (pid, socket))),
                }
            }
        }
    }

    /// Takes note of who has ended. Nobody is our child but those that we made and those that lost their parent by violence.
    fn bury(&mut self) {
        for pid in self.tree.reap_strangers(&self.remove_after) {
            if let Some(paths) = self.remove_after.remove(&pid) {
                remove(&paths);
            }
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
                self.remove_after.insert(pid, Vec::new());
            }
            // Whoever waits at the socket's other end sees it end.
            Err(_) => {}
        }
    }

    fn make_sandbox(&mut self, mut order: SandboxOrder, socket: OwnedFd) {
        let remove_after = std::mem::take(&mut order.remove_after);
        match self.try_make_sandbox(order, &socket) {
            Ok(pid) => {
                self.remove_after.insert(pid, remove_after);
            }
            Err((doing, error)) => {
                remove(&remove_after);
                let report = InitReport::Failed { doing: doing.into(), error: error.to_string() };
                let _ = wire::send(&socket, &report, &[]);
            }
        }
    }

    fn try_make_sandbox(&mut self, order: SandboxOrder, socket: &OwnedFd) -> Result<Pid, (&'static str, io::Error)> {
        let identity = Identity::of_this_process();
        let sources = match identity {
            Identity::Root => self.owners.map_sources(&order.plan).map_err(|error| ("mapping the owners of files", error))?,
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
                let mut kept = vec![0, 1, 2, socket.as_raw_fd(), go_ours.as_raw_fd()];
                kept.extend(sources.values().map(AsRawFd::as_raw_fd));
                let socket = match socket.as_fd().try_clone_to_owned() {
                    Ok(socket) if sys::close_all_but(&mut { kept.push(socket.as_raw_fd()); kept }).is_ok() => socket,
                    _ => sys::exit_now(1),
                };
                drop(go);
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

/// Removes what is empty; what is not has become somebody's.
fn remove(paths: &[PathBuf]) {
    let is_empty_file = |path: &Path| path.symlink_metadata().is_ok_and(|entry| entry.is_file() && entry.len() == 0);
    // Children before their parents.
    for path in paths.iter().rev() {
        if fs::remove_dir(path).is_err() && is_empty_file(path) {
            let _ = fs::remove_file(path);
        }
    }
}

//! The first process of a native sandbox: mounts the file tree, drops all privileges, and makes supervisors.
//!
//! It does most of this in advance, before the workspace is known: it mounts the system folders and makes the first
//! supervisor, which drops its own privileges and waits. Later it mounts the granted folders and leaves the host's
//! root.
//!
//! Once it reports that it is ready, it has no capabilities and cannot gain privileges, like the commands. The seccomp
//! filter, which takes the kernel a while to prepare, is installed right after that report and before the next order.
//! It ends when the executor closes its socket and when the fork server is gone, and everything in the sandbox ends
//! with it.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{self, DumpableBehavior, Pid};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use seccompiler::BpfProgram;

use super::fork_server;
use super::protocol::{self, BuildOrder, InitOrder, InitReport};
use super::supervisor::Supervisor;
use super::tree::Tree;
use crate::filter::landlock::{Access, LandlockError, Rules};
use crate::filter::{landlock, seccomp};
use crate::sys;
use crate::view::identity::Identity;
use crate::view::mounts;
use crate::view::mounts::NewRoot;
use crate::view::plan::{self, Step};

/// The state of an init before its first order.
pub(crate) struct Init {
    pub(crate) socket: OwnedFd,
    pub(crate) identity: Identity,
    pub(crate) open_network: bool,
    /// The compiled seccomp filter.
    pub(crate) filter: BpfProgram,
    /// The folder on a disk for the private folders; without one they are in memory.
    pub(crate) private: Option<PathBuf>,
}

/// The step that failed, and the error.
type Failure = (String, io::Error);

/// A sandbox whose steps known in advance are done.
struct Prepared {
    root: NewRoot,
    rules: Rules,
    ready: Ready,
}

/// The state of an init that makes supervisors.
struct Ready {
    tree: Tree,
    landlock: OwnedFd,
    private: Vec<CString>,
    on_disk: Vec<PathBuf>,
    supervisors: HashMap<Pid, ()>,
}

impl Init {
    /// Waits to be let go, builds the sandbox when it is told how, serves.
    pub(crate) fn serve_forever(self, go: OwnedFd) -> ! {
        let _ = rustix::io::read(&go, &mut [0_u8; 1]);
        drop(go);
        // A panic must not unwind into the fork server's code, of which this process is a fork.
        let lived = std::panic::catch_unwind(AssertUnwindSafe(|| self.build_and_serve()));
        sys::exit_now(i32::from(!matches!(lived, Ok(Ok(())))))
    }

    fn build_and_serve(self) -> io::Result<()> {
        let _ = thread::set_name(c"wieldy-init");
        process::setsid()?;
        fork_server::die_with_parent()?;
        fork_server::prefer_for_oom_kill();
        protocol::send(&self.socket, &InitReport::Waiting, &[])?;
        let Some((InitOrder::Prepare(steps), beside)) = self.order()? else { return Ok(()) };
        let prepared = match self.prepare(&steps, beside) {
            Ok(prepared) => prepared,
            Err(failure) => return self.report_failure(failure),
        };
        protocol::send(&self.socket, &InitReport::Prepared, &[])?;
        let Some((InitOrder::Build(order), beside)) = self.order()? else { return Ok(()) };
        match self.build(prepared, &order, beside) {
            Ok(mut ready) => {
                // The first command does not wait for this: its supervisor already has the filter. It is only charged
                // the processor time, 0.1 ms. If this fails, the init exits and the sandbox ends.
                seccomp::install(&self.filter)?;
                ready.serve(&self.socket)
            }
            Err(failure) => self.report_failure(failure),
        }
    }

    /// Waits for the next order; `None` if the executor has closed the socket.
    fn order(&self) -> io::Result<Option<(InitOrder, Vec<OwnedFd>)>> {
        Ok(protocol::receive(&self.socket)?.map(|received| (received.message, received.descriptors)))
    }

    fn report_failure(&self, (doing, error): Failure) -> io::Result<()> {
        protocol::send(&self.socket, &InitReport::Failed { doing, error: error.to_string() }, &[])
    }

    /// Does everything that does not depend on the confinement, and makes the first supervisor.
    fn prepare(&self, steps: &[Step], beside: Vec<OwnedFd>) -> Result<Prepared, Failure> {
        mounts::detach().map_err(doing("parting with the machine's mounts"))?;
        let sources = mounts::open_sources(steps)?;
        let disk = self.private.as_deref().map(mounts::open_private).transpose();
        let disk = disk.map_err(doing("opening its private folder on the disk"))?;
        let has_disk = disk.is_some();
        self.identity.assume().map_err(doing("becoming the sandbox's user"))?;
        // Again, since a change of user resets it.
        fork_server::die_with_parent().map_err(doing("tying the sandbox to its fork server"))?;
        let root = NewRoot::begin(steps, disk).map_err(doing("moving to the new root"))?;
        root.add(steps, sources)?;
        let _ = rustix::system::sethostname(b"sandbox");
        if !self.open_network {
            sys::raise_loopback().map_err(doing("raising the loopback interface"))?;
        }
        let writable = plan::writable(steps);
        let writable = writable.iter().map(|path| (path.as_path(), Access::ReadWrite));
        let rules = Rules::new(writable.chain([(Path::new("/"), Access::Read)])).map_err(doing_rules)?;
        let rules = rules.map_err(|absent| ("Landlock".into(), io::Error::other(absent)))?;
        let landlock = rules.descriptor().map_err(doing("keeping Landlock rules"))?;
        let tree = sys::child_signals().and_then(Tree::new).map_err(doing("hearing of children"))?;
        // All private folders in memory are on one file system, so those that later steps add need not be known.
        let (on_disk, private): (Vec<_>, Vec<_>) =
            plan::private(steps).into_iter().partition(|path| has_disk && mounts::may_be_on_disk(path));
        let private = private.iter().filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect();
        bound_rights();
        let mut ready = Ready { tree, landlock, private, on_disk, supervisors: HashMap::new() };
        let first = beside
            .into_iter()
            .next()
            .ok_or_else(|| ("making a supervisor".into(), io::ErrorKind::InvalidData.into()))?;
        let sealed = || give_up_rights().and_then(|()| seccomp::install(&self.filter));
        ready.make_supervisor(first, sealed).map_err(doing("making a supervisor"))?;
        Ok(Prepared { root, rules, ready })
    }

    /// Does the rest, drops all privileges, and reports that the sandbox is ready.
    fn build(&self, prepared: Prepared, order: &BuildOrder, beside: Vec<OwnedFd>) -> Result<Ready, Failure> {
        let Prepared { root, mut rules, ready } = prepared;
        root.finish(&order.steps, order.sources.iter().copied().zip(beside).collect())?;
        for path in plan::writable(&order.steps) {
            rules.grant(&path, Access::ReadWrite).map_err(doing_rules)?;
        }
        let mut listener = None;
        if order.proxied {
            let made = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(doing("listening for the proxy"))?;
            listener = Some(made);
        }
        // Through this the fork server can mask again the placeholders that were away while the sandbox was idle.
        // Commands never get it.
        let namespace = File::open("/proc/self/ns/mnt").map_err(doing("opening its mount namespace"))?;
        give_up_rights().map_err(doing("giving up all rights"))?;
        let proxy_port = listener.as_ref().and_then(|listener| Some(listener.local_addr().ok()?.port()));
        let beside: Vec<BorrowedFd<'_>> =
            std::iter::once(namespace.as_fd()).chain(listener.iter().map(AsFd::as_fd)).collect();
        let report = InitReport::Ready { landlock_abi: landlock::abi(), proxy_port };
        protocol::send(&self.socket, &report, &beside).map_err(doing("reporting"))?;
        Ok(ready)
    }
}

fn doing(what: &'static str) -> impl FnOnce(io::Error) -> Failure {
    move |error| (what.to_owned(), error)
}

fn doing_rules(error: LandlockError) -> Failure {
    ("making Landlock rules".into(), io::Error::other(error))
}

/// Empties the capability bounding set, so that no later `exec` adds capabilities. This process keeps its own.
fn bound_rights() {
    for capability in CapabilitySet::all().iter() {
        // It fails for capabilities that this kernel does not know; no process can have those.
        let _ = thread::remove_capability_from_bounding_set(capability);
    }
}

/// Drops all capabilities that the namespaces gave this process, for good.
fn give_up_rights() -> io::Result<()> {
    let none = CapabilitySet::empty();
    let _ = thread::clear_ambient_capability_set();
    thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    thread::set_no_new_privs(true)?;
    process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

impl Ready {
    /// Makes supervisors as ordered, and reaps dead children, until the executor is gone.
    fn serve(&mut self, socket: &OwnedFd) -> io::Result<()> {
        loop {
            let mut polled =
                [PollFd::new(socket, PollFlags::IN), PollFd::from_borrowed_fd(self.tree.signals(), PollFlags::IN)];
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let (ordered, ended) = (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            if ended {
                for (pid, _) in self.tree.reap_strangers(&self.supervisors) {
                    self.supervisors.remove(&pid);
                }
            }
            if ordered {
                let Some(received) = protocol::receive::<InitOrder>(socket)? else { return Ok(()) };
                if let (InitOrder::Supervisor, Some(socket)) =
                    (received.message, received.descriptors.into_iter().next())
                {
                    self.make_supervisor(socket, || Ok(()))?;
                }
            }
        }
    }

    /// Makes a supervisor, which calls `first` before it serves.
    fn make_supervisor(&mut self, socket: OwnedFd, first: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        match sys::fork(0)? {
            Some(pid) => drop(self.supervisors.insert(pid, ())),
            None => {
                let landlock = self.landlock.try_clone()?;
                let mut kept = [0, 1, 2, socket.as_raw_fd(), landlock.as_raw_fd()];
                if sys::close_all_but(&mut kept).is_err() || first().is_err() || fork_server::die_with_parent().is_err()
                {
                    sys::exit_now(1);
                }
                let (private, on_disk) = (self.private.clone(), self.on_disk.clone());
                Supervisor { socket, landlock: Some(landlock), private, on_disk }.serve_forever()
            }
        }
        Ok(())
    }
}

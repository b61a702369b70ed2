//! The first process of a sandbox: builds what its processes see, gives up every right to change it, and makes berths.
//!
//! From the moment it says that it is ready it can do no more than the commands themselves: no capabilities, no way to new
//! privileges, the same filter of system calls. Its end is the end of everything in the sandbox; it comes when its
//! socket's other end is gone, or when the warden is.

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{self, DumpableBehavior, Pid};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use seccompiler::BpfProgram;

use super::landlock::Access;
use super::owners::Identity;
use super::plan::Step;
use super::walls::Site;
use super::{landlock, seccomp, walls};
use crate::berth::Berth;
use crate::sys;
use crate::tree::Tree;
use crate::warden;
use crate::wire::{self, BuildOrder, InitOrder, InitReport};

/// All that a new sandbox begins with.
pub(crate) struct Init {
    pub(crate) socket: OwnedFd,
    pub(crate) identity: Identity,
    pub(crate) open_network: bool,
    /// What may be called.
    pub(crate) filter: BpfProgram,
}

/// What was being done when it failed, and how.
type Failure = (String, io::Error);

/// What is kept for later.
struct Ready {
    tree: Tree,
    landlock: OwnedFd,
    private: Vec<CString>,
    berths: HashMap<Pid, ()>,
}

impl Init {
    /// Waits to be let go, builds the sandbox when it is told how, serves.
    pub(crate) fn live(self, go: OwnedFd) -> ! {
        let _ = rustix::io::read(&go, &mut [0_u8; 1]);
        drop(go);
        // A panic must not unwind into the warden, whose copy we are.
        let lived = std::panic::catch_unwind(AssertUnwindSafe(|| self.build_and_serve()));
        sys::exit_now(i32::from(!matches!(lived, Ok(Ok(())))))
    }

    fn build_and_serve(self) -> io::Result<()> {
        let _ = thread::set_name(c"wieldy-init");
        process::setsid()?;
        warden::parted()?;
        warden::volunteer();
        wire::send(&self.socket, &InitReport::Blank, &[])?;
        let mut site = None;
        while let Some(received) = wire::receive::<InitOrder>(&self.socket)? {
            let mut beside = received.descriptors.into_iter();
            match received.message {
                InitOrder::Prepare(steps) => match self.extend(&mut site, &steps, HashMap::new()) {
                    Ok(()) => wire::send(&self.socket, &InitReport::Prepared, &[])?,
                    Err(failure) => return self.give_up(failure),
                },
                InitOrder::Build(order) => {
                    let first_berth = beside.next().ok_or(io::ErrorKind::InvalidData)?;
                    let sources = order.sources.iter().copied().zip(beside).collect();
                    let built = self.extend(&mut site, &order.steps, sources).and_then(|()| self.build(&order, site));
                    let mut ready = match built {
                        Ok(ready) => ready,
                        Err(failure) => return self.give_up(failure),
                    };
                    ready.make_berth(first_berth)?;
                    return ready.serve(&self.socket);
                }
                InitOrder::Berth => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        Ok(())
    }

    fn give_up(&self, (doing, error): Failure) -> io::Result<()> {
        wire::send(&self.socket, &InitReport::Failed { doing, error: error.to_string() }, &[])
    }

    /// Takes further steps towards the tree of what processes will see.
    fn extend(&self, site: &mut Option<Site>, steps: &[Step], sources: HashMap<usize, OwnedFd>) -> Result<(), Failure> {
        if site.is_none() {
            walls::detach().map_err(|error| ("parting with the machine's mounts".into(), error))?;
        }
        let sources = walls::open_sources(steps, sources)?;
        let site = match site {
            Some(site) => site,
            None => {
                self.identity.assume().map_err(|error| ("becoming the sandbox's user".into(), error))?;
                // Once more, since a change of user undoes it.
                warden::parted().map_err(|error| ("tying the sandbox to its warden".into(), error))?;
                site.insert(Site::begin(steps).map_err(|error| ("beginning".into(), error))?)
            }
        };
        site.add(steps, sources)
    }

    fn build(&self, order: &BuildOrder, site: Option<Site>) -> Result<Ready, Failure> {
        let doing = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| (what, error)
        };
        let site = site.ok_or_else(|| ("building".into(), io::ErrorKind::InvalidData.into()))?;
        site.finish().map_err(doing("moving to the new root"))?;
        let private = order.private.iter().filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect();
        let _ = rustix::system::sethostname(b"sandbox");
        let mut listener = None;
        if !self.open_network {
            sys::raise_loopback().map_err(doing("raising the loopback interface"))?;
            if order.proxied {
                let made = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(doing("listening for the proxy"))?;
                listener = Some(made);
            }
        }
        let writable = order.writable.iter().map(|path| (path.as_path(), Access::ReadWrite));
        let landlock = landlock::ruleset(writable.chain([(Path::new("/"), Access::Read)]))
            .map_err(|error| ("making Landlock rules".into(), io::Error::other(error)))?
            .map_err(|absent| ("Landlock".into(), io::Error::other(absent)))?;
        let tree = Tree::new(sys::child_signals().map_err(doing("hearing of children"))?)
            .map_err(doing("opening the list of children"))?;
        give_up_rights(&self.filter).map_err(doing("giving up all rights"))?;

        let proxy_port = listener.as_ref().and_then(|listener| Some(listener.local_addr().ok()?.port()));
        let beside: Vec<BorrowedFd<'_>> = listener.iter().map(AsFd::as_fd).collect();
        let report = InitReport::Ready { landlock_abi: landlock::abi(), proxy_port };
        wire::send(&self.socket, &report, &beside).map_err(doing("reporting"))?;
        Ok(Ready { tree, landlock, private, berths: HashMap::new() })
    }
}

/// Gives up every right that the namespaces gave us, for ever.
fn give_up_rights(filter: &BpfProgram) -> io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        // Those that this kernel does not know cannot be had.
        let _ = thread::remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    let _ = thread::clear_ambient_capability_set();
    thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    thread::set_no_new_privs(true)?;
    process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    seccomp::install(filter)
}

impl Ready {
    /// Makes berths as they are ordered, and buries the dead, until the executor is gone.
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
                for pid in self.tree.reap_strangers(&self.berths) {
                    self.berths.remove(&pid);
                }
            }
            if ordered {
                let Some(received) = wire::receive::<InitOrder>(socket)? else { return Ok(()) };
                if let (InitOrder::Berth, Some(socket)) = (received.message, received.descriptors.into_iter().next()) {
                    self.make_berth(socket)?;
                }
            }
        }
    }

    fn make_berth(&mut self, socket: OwnedFd) -> io::Result<()> {
        match sys::fork(0)? {
            Some(pid) => drop(self.berths.insert(pid, ())),
            None => {
                let landlock = self.landlock.try_clone()?;
                let mut kept = [0, 1, 2, socket.as_raw_fd(), landlock.as_raw_fd()];
                if sys::close_all_but(&mut kept).is_err() || warden::parted().is_err() {
                    sys::exit_now(1);
                }
                Berth { socket, landlock: Some(landlock), private: self.private.clone() }.live()
            }
        }
        Ok(())
    }
}

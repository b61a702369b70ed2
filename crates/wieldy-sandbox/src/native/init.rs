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
use std::panic::AssertUnwindSafe;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{self, DumpableBehavior, Pid};
use rustix::thread::{self, CapabilitySet, CapabilitySets};

use super::owners::Identity;
use super::{landlock, plan, seccomp, walls};
use crate::berth::Berth;
use crate::sys;
use crate::tree::Tree;
use crate::warden;
use crate::wire::{self, BerthOrder, InitReport, SandboxOrder};

/// All that a new sandbox begins with.
pub(crate) struct Init {
    pub(crate) socket: OwnedFd,
    pub(crate) order: SandboxOrder,
    pub(crate) identity: Identity,
    /// Mounts that the warden has made for steps of the plan.
    pub(crate) sources: HashMap<usize, OwnedFd>,
}

/// What was being done when it failed, and how.
type Failure = (String, io::Error);

/// What is kept for later.
struct Ready {
    tree: Tree,
    landlock: Option<OwnedFd>,
    private: Vec<CString>,
}

impl Init {
    /// Waits to be let go, builds the sandbox, serves.
    pub(crate) fn live(self, go: OwnedFd) -> ! {
        let _ = rustix::io::read(&go, &mut [0_u8; 1]);
        drop(go);
        // A panic must not unwind into the warden, whose copy we are.
        let lived = std::panic::catch_unwind(AssertUnwindSafe(|| self.build_and_serve()));
        sys::exit_now(i32::from(!matches!(lived, Ok(Ok(())))))
    }

    fn build_and_serve(self) -> io::Result<()> {
        let socket = self.socket.try_clone()?;
        match self.build() {
            Ok(mut ready) => ready.serve(&socket),
            Err((doing, error)) => wire::send(&socket, &InitReport::Failed { doing, error: error.to_string() }, &[]),
        }
    }

    fn build(self) -> Result<Ready, Failure> {
        let doing = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| (what, error)
        };
        let _ = thread::set_name(c"wieldy-init");
        process::setsid().map_err(|error| ("opening a session".into(), error.into()))?;
        walls::detach().map_err(doing("parting with the machine's mounts"))?;
        let sources = walls::open_sources(&self.order.steps, self.sources)?;
        self.identity.assume().map_err(doing("becoming the sandbox's user"))?;
        // Only now, since a change of user would undo it.
        warden::parted().map_err(doing("tying the sandbox to its warden"))?;
        walls::build(&self.order.steps, sources)?;
        let (grants, private) = (plan::grants(&self.order.steps), plan::private(&self.order.steps));
        let _ = rustix::system::sethostname(b"sandbox");
        let mut listener = None;
        if !self.order.open_network {
            sys::raise_loopback().map_err(doing("raising the loopback interface"))?;
            if self.order.proxied {
                let made = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(doing("listening for the proxy"))?;
                listener = Some(made);
            }
        }
        let ruleset = landlock::ruleset(grants)
            .map_err(|error| ("making Landlock rules".into(), io::Error::other(error)))?
            .map_err(|absent| ("Landlock".into(), io::Error::other(absent)))?;
        let tree = Tree::new(sys::child_signals().map_err(doing("hearing of children"))?)
            .map_err(doing("opening the list of children"))?;
        give_up_rights().map_err(doing("giving up all rights"))?;

        let proxy_port = listener.as_ref().and_then(|listener| Some(listener.local_addr().ok()?.port()));
        let beside: Vec<BorrowedFd<'_>> = listener.iter().map(AsFd::as_fd).collect();
        let report = InitReport::Ready { landlock_abi: landlock::abi(), proxy_port };
        wire::send(&self.socket, &report, &beside).map_err(doing("reporting"))?;
        Ok(Ready { tree, landlock: Some(ruleset), private })
    }
}

/// Gives up every right that the namespaces gave us, for ever.
fn give_up_rights() -> io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        // Those that this kernel does not know cannot be had.
        let _ = thread::remove_capability_from_bounding_set(capability);
    }
    let none = CapabilitySet::empty();
    let _ = thread::clear_ambient_capability_set();
    thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    thread::set_no_new_privs(true)?;
    process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let filter = seccomp::filter().map_err(io::Error::other)?;
    seccomp::install(&filter)
}

impl Ready {
    /// Makes berths as they are ordered, and buries the dead, until the executor is gone.
    fn serve(&mut self, socket: &OwnedFd) -> io::Result<()> {
        let mut berths: HashMap<Pid, ()> = HashMap::new();
        loop {
            let mut polled =
                [PollFd::new(socket, PollFlags::IN), PollFd::from_borrowed_fd(self.tree.signals(), PollFlags::IN)];
            match rustix::event::poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let (ordered, ended) = (!polled[0].revents().is_empty(), !polled[1].revents().is_empty());
            if ended {
                for pid in self.tree.reap_strangers(&berths) {
                    berths.remove(&pid);
                }
            }
            if ordered {
                let Some(received) = wire::receive::<BerthOrder>(socket)? else { return Ok(()) };
                if let Some(socket) = received.descriptors.into_iter().next()
                    && let Some(pid) = self.make_berth(socket)?
                {
                    berths.insert(pid, ());
                }
            }
        }
    }

    fn make_berth(&self, socket: OwnedFd) -> io::Result<Option<Pid>> {
        let forked = sys::fork(0)?;
        if forked.is_none() {
            let landlock = self.landlock.as_ref().map(AsFd::as_fd).map(|fd| fd.try_clone_to_owned()).transpose()?;
            let mut kept = vec![0, 1, 2, socket.as_raw_fd()];
            kept.extend(landlock.as_ref().map(AsRawFd::as_raw_fd));
            if sys::close_all_but(&mut kept).is_err() || warden::parted().is_err() {
                sys::exit_now(1);
            }
            Berth { socket, landlock, private: self.private.clone() }.live()
        }
        Ok(forked)
    }
}

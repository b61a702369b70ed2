//! User and group ids of a sandbox's processes, outside and inside, and the id maps of its mounts.
//!
//! Processes of a sandbox are never root. If the executor is an ordinary user, they run as that user. If the executor
//! is root, they run as a user id that exists nowhere on the host and owns nothing. The workspace is then mounted with
//! an id map: its owner's files are shown as theirs, and the files that they make belong to its owner.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::process::{self, Pid, Signal};
use rustix::thread;

use super::mounts;
use super::placeholders::open_plain;
use crate::sys::{self, MountChange};

/// The user and group id outside where the executor is root: so high that no system assigns it.
const NOBODY_OUTSIDE: u32 = 2_000_000_000;
/// The user and group id inside where the executor is root: an ordinary one, since programs behave oddly as a root
/// without rights.
const AGENT_INSIDE: u32 = 1000;

/// The user of the executor, which decides the ids of its sandboxes' processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    Root,
    User { uid: u32, gid: u32 },
}

impl Identity {
    pub(crate) fn of_this_process() -> Self {
        match process::geteuid().as_raw() {
            0 => Self::Root,
            uid => Self::User { uid, gid: process::getegid().as_raw() },
        }
    }

    /// Returns the user and group id inside the sandbox.
    pub(crate) fn inside(self) -> (u32, u32) {
        match self {
            Self::Root => (AGENT_INSIDE, AGENT_INSIDE),
            Self::User { uid, gid } => (uid, gid),
        }
    }

    /// Writes the id map of a process in a new user namespace.
    pub(crate) fn map(self, pid: Pid) -> io::Result<()> {
        let (uid, gid) = self.inside();
        match self {
            Self::Root => write_maps(pid, (uid, NOBODY_OUTSIDE), (gid, NOBODY_OUTSIDE)),
            Self::User { .. } => {
                fs::write(format!("/proc/{}/setgroups", pid.as_raw_pid()), "deny")?;
                write_maps(pid, (uid, uid), (gid, gid))
            }
        }
    }

    /// Gives a new folder to the account of the sandboxes.
    pub(crate) fn give(self, folder: &OwnedFd) -> io::Result<()> {
        if self == Self::Root {
            let (uid, gid) = (thread::Uid::from_raw(NOBODY_OUTSIDE), thread::Gid::from_raw(NOBODY_OUTSIDE));
            rustix::fs::fchown(folder, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// Switches this process to the user and group id inside the sandbox.
    pub(crate) fn assume(self) -> io::Result<()> {
        if self == Self::Root {
            let (uid, gid) = (thread::Uid::from_raw(AGENT_INSIDE), thread::Gid::from_raw(AGENT_INSIDE));
            thread::set_thread_groups(&[])?;
            thread::set_thread_res_gid(gid, gid, gid)?;
            thread::set_thread_res_uid(uid, uid, uid)?;
        }
        Ok(())
    }
}

fn write_maps(pid: Pid, uid: (u32, u32), gid: (u32, u32)) -> io::Result<()> {
    let process = format!("/proc/{}", pid.as_raw_pid());
    fs::write(format!("{process}/uid_map"), format!("{} {} 1", uid.0, uid.1))?;
    fs::write(format!("{process}/gid_map"), format!("{} {} 1", gid.0, gid.1))
}

/// Copies a mount and applies the id map of a user namespace to the copy.
pub(crate) fn mapped(source: &Path, place: &OwnedFd, namespace: &OwnedFd) -> io::Result<OwnedFd> {
    let change = MountChange { owners: Some(namespace.as_fd()), ..MountChange::default() };
    let whole = mounts::copy_of(place).map_err(|error| told(source, &error))?;
    if sys::change_mount(whole.as_fd(), true, change).is_ok() {
        return Ok(whole);
    }
    // A mount below it may not support id maps, so copy the mount without those below.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let single = open_tree(place, "", flags).map_err(|error| told(source, &error.into()))?;
    sys::change_mount(single.as_fd(), false, change).map_err(|error| {
        let hint = "its file system cannot show files under another owner; run wieldy as an ordinary user instead";
        io::Error::new(error.kind(), format!("`{}`: {error} ({hint})", source.display()))
    })?;
    Ok(single)
}

pub(crate) fn told(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
}

/// Returns an error if a folder cannot be mounted with an id map.
pub(crate) fn try_mapping(folder: &Path) -> io::Result<()> {
    let place = open_plain(&folder.canonicalize()?, OFlags::PATH)?;
    let owner = rustix::fs::fstat(&place)?;
    mapped(folder, &place, &namespace(owner.st_uid, owner.st_gid)?).map(drop)
}

/// Makes a user namespace that maps the owner of files to the user id outside. This takes a process of its own, so
/// executors ask the fork server for it.
pub(crate) fn namespace(uid: u32, gid: u32) -> io::Result<OwnedFd> {
    let Some(pid) = sys::fork(libc::CLONE_NEWUSER)? else {
        loop {
            // This process only keeps the namespace open until it is killed.
            std::thread::park();
        }
    };
    let made = write_maps(pid, (uid, NOBODY_OUTSIDE), (gid, NOBODY_OUTSIDE))
        .and_then(|()| fs::File::open(format!("/proc/{}/ns/user", pid.as_raw_pid())));
    let _ = process::kill_process(pid, Signal::KILL);
    let _ = process::waitpid(Some(pid), process::WaitOptions::empty());
    made.map(OwnedFd::from)
}

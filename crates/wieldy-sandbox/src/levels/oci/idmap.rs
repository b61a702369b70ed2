//! Id-mapped mounts that exchange the owner of the workspace and the account of a container's processes.
//!
//! Containers have no user namespace: not every runtime supports id-mapped mounts in one. Their processes run as an
//! account that exists nowhere on the machine and owns nothing, with the same number inside and outside. The runtime
//! gets the workspace, and everything else that was granted, as a mount that exchanges this account and the owner of
//! the files: the agent sees the owner's files as its own, and files that it makes belong to the owner. Files of all
//! other users keep their owner.
//!
//! The owner of the workspace is not used as the account itself: it is often root, and no process in a container is
//! ever root.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::process::{self, Signal};

use crate::state_dir::give_back;
use crate::sys::{self, MountChange};

/// The account of a container's processes, user and group: so high that no system assigns it.
pub(super) const AGENT: u32 = 2_000_000_000;

/// The account of the sleeper, which only keeps a container alive. It is another one, so that no command can kill the
/// sleeper.
pub(super) const SLEEPER: u32 = 2_000_000_001;

/// An id-mapped mount of a granted path, for a runtime. It is removed when this is dropped; containers that mounted it
/// keep it.
pub(super) struct IdmappedMount {
    path: PathBuf,
}

impl IdmappedMount {
    /// Mounts `source` at `path`, which must not exist, so that its owner's files appear as the agent's.
    pub(super) fn new(source: &Path, path: PathBuf) -> io::Result<Self> {
        let told = |error: io::Error| io::Error::new(error.kind(), format!("`{}`: {error}", source.display()));
        let owner = fs::metadata(source).map_err(told)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let exchange = exchange(owner.uid(), owner.gid())?;
        let change = MountChange { owners: Some(exchange.as_fd()), ..MountChange::default() };
        let whole = open_tree(CWD, source, flags | OpenTreeFlags::AT_RECURSIVE).map_err(|error| told(error.into()))?;
        let mount = if sys::change_mount(whole.as_fd(), true, change).is_ok() {
            whole
        } else {
            // A mount below it does not support id maps, so mount it without those below.
            let single = open_tree(CWD, source, flags).map_err(|error| told(error.into()))?;
            let change = MountChange { owners: Some(exchange.as_fd()), ..MountChange::default() };
            sys::change_mount(single.as_fd(), false, change).map_err(|error| {
                let hint =
                    "its file system cannot show files under another owner; use the level `native` as an ordinary user";
                io::Error::new(error.kind(), format!("`{}`: {error} ({hint})", source.display()))
            })?;
            single
        };
        if owner.is_dir() { fs::create_dir(&path) } else { fs::File::create_new(&path).map(drop) }?;
        let lent = Self { path };
        move_mount(&mount, "", CWD, &lent.path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        Ok(lent)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for IdmappedMount {
    fn drop(&mut self) {
        give_back(&self.path);
    }
}

/// Makes a user namespace that exchanges the owner of files and the agent, and keeps all other ids.
fn exchange(uid: u32, gid: u32) -> io::Result<OwnedFd> {
    let Some(pid) = sys::fork(libc::CLONE_NEWUSER)? else {
        loop {
            // This process only holds the namespace until it is killed.
            rustix::event::pause();
        }
    };
    let process = format!("/proc/{}", pid.as_raw_pid());
    let made = fs::write(format!("{process}/uid_map"), map(uid))
        .and_then(|()| fs::write(format!("{process}/gid_map"), map(gid)))
        .and_then(|()| fs::File::open(format!("{process}/ns/user")));
    let _ = process::kill_process(pid, Signal::KILL);
    let _ = process::waitpid(Some(pid), process::WaitOptions::empty());
    Ok(made?.into())
}

/// Returns the id map that exchanges the owner and the agent, in the kernel's format: id on disk, id as seen, count.
fn map(owner: u32) -> String {
    let (low, high) = (owner.min(AGENT), owner.max(AGENT));
    // `u32::MAX` stands for no id and cannot be mapped.
    let ranges = [
        (0, 0, low),
        (low, high, 1),
        (low + 1, low + 1, (high - low).saturating_sub(1)),
        (high, low, u32::from(high > low)),
        (high + 1, high + 1, u32::MAX - high - 1),
    ];
    let lines = ranges.into_iter().filter(|(_, _, count)| *count > 0);
    lines.map(|(inside, outside, count)| format!("{inside} {outside} {count}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_and_the_agent_are_swapped_in_the_id_map() {
        assert_eq!(map(0), "0 2000000000 1\n1 1 1999999999\n2000000000 0 1\n2000000001 2000000001 2294967294\n",);
        assert_eq!(
            map(1000),
            "0 0 1000\n1000 2000000000 1\n1001 1001 1999998999\n2000000000 1000 1\n2000000001 2000000001 2294967294\n",
        );
        assert_eq!(map(AGENT), "0 0 2000000000\n2000000000 2000000000 1\n2000000001 2000000001 2294967294\n");
    }
}

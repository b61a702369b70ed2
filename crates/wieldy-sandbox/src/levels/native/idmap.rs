//! Makes id-mapped mounts of the folders that a sandbox was granted: they show the owner's files as files of the
//! sandboxes' account.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::OFlags;

use crate::supervise::socket::ForkServerClient;
use crate::view::identity::{Identity, mapped, told};
use crate::view::placeholders::open_plain;
use crate::view::plan::Step;

/// The user namespaces for id-mapped mounts, cached by owner. Only an executor that runs as root uses them.
#[derive(Default)]
pub(super) struct IdMaps {
    namespaces: Mutex<HashMap<(u32, u32), OwnedFd>>,
}

impl IdMaps {
    /// Returns an id-mapped mount for each step that shows a granted path, with the step's index. Returns none if the
    /// executor is an ordinary user.
    pub(super) async fn sources(
        &self,
        steps: &[Step],
        fork_server: &ForkServerClient,
    ) -> io::Result<(Vec<usize>, Vec<OwnedFd>)> {
        let (mut numbers, mut mounts) = (Vec::new(), Vec::new());
        if Identity::of_this_process() == Identity::Root {
            for (number, step) in steps.iter().enumerate().filter(|(_, step)| step.is_granted()) {
                let Step::Bind { source, .. } = step else { continue };
                numbers.push(number);
                mounts.push(self.source(source, fork_server).await?);
            }
        }
        Ok((numbers, mounts))
    }

    async fn source(&self, source: &Path, fork_server: &ForkServerClient) -> io::Result<OwnedFd> {
        // Another process in the same folder may have replaced the path by a link since the plan was made.
        let place = open_plain(source, OFlags::PATH).map_err(|error| told(source, &error))?;
        let owner = rustix::fs::fstat(&place).map_err(|error| told(source, &error.into()))?;
        mapped(source, &place, &self.namespace(owner.st_uid, owner.st_gid, fork_server).await?)
    }

    async fn namespace(&self, uid: u32, gid: u32, fork_server: &ForkServerClient) -> io::Result<OwnedFd> {
        let known = || self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(namespace) = known().get(&(uid, gid)) {
            return namespace.try_clone();
        }
        let namespace = fork_server.id_map_namespace(uid, gid).await?;
        known().insert((uid, gid), namespace.try_clone()?);
        Ok(namespace)
    }
}

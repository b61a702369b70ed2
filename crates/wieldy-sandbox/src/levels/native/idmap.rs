//! Id-mapped mounts of the folders that a sandbox was granted, which show their owner's files as those of the sandboxes' account.

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

/// Makes mounts that show their owner's files as those of the account outside, where the executor is root.
#[derive(Default)]
pub(super) struct IdMaps {
    namespaces: Mutex<HashMap<(u32, u32), OwnedFd>>,
}

impl IdMaps {
    /// A mount for each step that shows something granted, with the step's number; none where the executor is an ordinary user.
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
        // What was looked at when the plan was made may have become a link since, by somebody who works in the same folder.
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

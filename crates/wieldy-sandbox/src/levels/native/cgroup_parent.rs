//! Parent cgroups of sandboxes, whose limits hold for several sandboxes together.
//!
//! All sandboxes of a session are below the cgroup of its first one, and a sandbox that was made within another is
//! below the outer sandbox's cgroup.
//!
//! The first sandbox of a session is made of a warm init, which has a cgroup already. Moving a process to another
//! cgroup takes longer than all other steps, so this cgroup becomes the session's, and later sandboxes are made below
//! it. It exists as long as one of them does, even if the first sandbox is gone.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use wieldy_core::{SandboxId, SessionKey};

use crate::cgroup::{Group, KnownGroup};

/// The cgroup of each session.
#[derive(Default)]
pub(super) struct SessionParents {
    sessions: Mutex<HashMap<SessionKey, Arc<SessionParent>>>,
}

/// A session's cgroup, if it has one already. Locked while a sandbox of the session gets its cgroup.
pub(super) type SessionParent = tokio::sync::Mutex<Option<KnownGroup>>;

impl SessionParents {
    pub(super) fn of(&self, session: &SessionKey) -> Arc<SessionParent> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session_parent) = sessions.get(session) {
            return Arc::clone(session_parent);
        }
        if sessions.len().is_power_of_two() {
            // Whenever the map has doubled, drop the sessions that no sandbox is in.
            let is_kept = |session_parent: &Arc<SessionParent>| {
                Arc::strong_count(session_parent) > 1
                    || session_parent.try_lock().is_ok_and(|session_parent| is_in_use(&session_parent))
            };
            sessions.retain(|_, session_parent| is_kept(session_parent));
        }
        Arc::clone(sessions.entry(session.clone()).or_default())
    }
}

fn is_in_use(session_parent: &Option<KnownGroup>) -> bool {
    session_parent.as_ref().and_then(KnownGroup::get).is_some()
}

/// Makes a cgroup for a sandbox below `above`. Returns `None` if `above` was removed, with everything in it.
pub(super) fn below(above: &Group, id: &SandboxId) -> io::Result<Option<Group>> {
    match above.child(&id.0) {
        Ok(group) => Ok(Some(group)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

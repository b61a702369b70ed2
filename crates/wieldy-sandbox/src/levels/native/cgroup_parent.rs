//! Nested control groups: all sandboxes of a session are below the group of its first one, whose limits so hold for all of them together;
//! and a sandbox that was made within another is below that one's.
//!
//! The first sandbox of a session is made of what waits ahead, in a group of its own. To move a process to another group takes
//! longer than all the rest, so that group becomes the session's, and it is those after it that are made for their place. It
//! stays as long as one of them does, also when the first one is gone.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use wieldy_core::{SandboxId, SessionKey};

use crate::cgroup::{Group, KnownGroup};

/// Which group each session has.
#[derive(Default)]
pub(super) struct Nests {
    sessions: Mutex<HashMap<SessionKey, Arc<Nest>>>,
}

/// A session's group, once there is one. Locked while a sandbox finds its place.
pub(super) type Nest = tokio::sync::Mutex<Option<KnownGroup>>;

impl Nests {
    pub(super) fn of(&self, session: &SessionKey) -> Arc<Nest> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nest) = sessions.get(session) {
            return Arc::clone(nest);
        }
        if sessions.len().is_power_of_two() {
            // Now and then, without those that nobody is in any more.
            let is_kept =
                |nest: &Arc<Nest>| Arc::strong_count(nest) > 1 || nest.try_lock().is_ok_and(|nest| is_in_use(&nest));
            sessions.retain(|_, nest| is_kept(nest));
        }
        Arc::clone(sessions.entry(session.clone()).or_default())
    }
}

fn is_in_use(nest: &Option<KnownGroup>) -> bool {
    nest.as_ref().and_then(KnownGroup::get).is_some()
}

/// Makes a group for a sandbox below another; nothing where that one is about to go, with everybody who was in it.
pub(super) fn below(above: &Group, id: &SandboxId) -> io::Result<Option<Group>> {
    match above.child(&id.0) {
        Ok(group) => Ok(Some(group)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

//! Long-lived sandboxes: makes, lists and destroys sandboxes that several calls of an agent share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::call::Caller;
use crate::confinement::{Confinement, ResourceLimits, SessionKey};
use crate::error::CallError;
use crate::executor::Executor;
use crate::run::{place, unavailable};
use crate::sandbox::{Level, Sandbox, SandboxError, SandboxId, SandboxStatus};

/// Maximum number of attempts to remove the sandboxes of an ended session that are in use, one per [`LOOK_EVERY`].
const LOOKS_MAX: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The owners of the sandboxes that were made through the API. A session's sandbox names its session itself.
#[derive(Default)]
pub(crate) struct Owners {
    of: Mutex<HashMap<SandboxId, SandboxOwner>>,
}

#[derive(PartialEq, Eq)]
struct SandboxOwner {
    tenant: Option<String>,
    agent: String,
}

impl SandboxOwner {
    fn of(caller: &Caller) -> Self {
        Self { tenant: caller.tenant.clone(), agent: caller.agent.clone() }
    }
}

impl Owners {
    fn all(&self) -> MutexGuard<'_, HashMap<SandboxId, SandboxOwner>> {
        self.of.lock().expect("no code panics while it holds the owners")
    }

    pub(crate) fn forget(&self, id: &SandboxId) {
        self.all().remove(id);
    }
}

impl Executor {
    /// Makes a sandbox, which lives until it is destroyed or has been idle for long. All its processes together are
    /// held to `limits`, and to the executor's own limits.
    ///
    /// If the caller has a session, this is the sandbox in which its calls run anyway. Otherwise callers of the same
    /// agent and tenant can run their calls in it, by giving its id as their
    /// [`parent_sandbox`](Caller::parent_sandbox). If this caller has a parent sandbox, the new one is made within it,
    /// if the level supports that: both together are held to the parent's limits.
    pub async fn create_sandbox(
        &self,
        caller: &Caller,
        level: Option<Level>,
        limits: ResourceLimits,
    ) -> Result<SandboxStatus, CallError> {
        let engine = &*self.inner;
        let level = level.unwrap_or(engine.isolation);
        let sandbox = engine.sandboxes.get(&level).filter(|_| level.is_at_least(engine.isolation));
        let Some(sandbox) = sandbox else { return Err(unavailable(level)) };
        self.check_parent(caller)?;
        let own = &engine.confinement;
        let place_limits = limits.or(own.place_limits).within(own.place_limits);
        let confinement = Confinement { place: place(caller), place_limits, ..Confinement::clone(own) };
        let made = sandbox.create(&confinement).await?;
        if made.session.is_none() {
            engine.owners.all().insert(made.sandbox.id.clone(), SandboxOwner::of(caller));
        }
        Ok(made)
    }

    /// Refuses a caller whose parent sandbox belongs to another caller. The id of a sandbox is not a secret.
    pub(crate) fn check_parent(&self, caller: &Caller) -> Result<(), CallError> {
        let Some(id) = &caller.parent_sandbox else { return Ok(()) };
        let is_theirs = match self.inner.owners.all().get(id) {
            Some(owner) => *owner == SandboxOwner::of(caller),
            None => {
                let all = self.inner.sandboxes.values().flat_map(|sandbox| sandbox.list());
                let session = all.into_iter().find(|one| one.sandbox.id == *id).and_then(|one| one.session);
                session.is_none_or(|session| caller.session_key() == Some(session))
            }
        };
        // The same error as for a missing sandbox: other callers must not learn that it exists.
        if is_theirs { Ok(()) } else { Err(SandboxError::missing(id).into()) }
    }

    /// Returns the backend for this level, if the executor has it. For providers whose programs outlive a call; a
    /// tool's own programs run in [`Run::execute`](crate::Run::execute).
    pub fn sandbox(&self, level: Level) -> Option<Arc<dyn Sandbox>> {
        self.inner.sandboxes.get(&level).cloned()
    }

    /// Returns all existing sandboxes.
    pub fn sandboxes(&self) -> Vec<SandboxStatus> {
        let mut all: Vec<SandboxStatus> = self.inner.sandboxes.values().flat_map(|sandbox| sandbox.list()).collect();
        all.sort_by(|one, other| one.sandbox.id.cmp(&other.sandbox.id));
        all
    }

    /// Removes the sandboxes of a session whose client is gone. A sandbox in use gets a few seconds. If it is still in
    /// use then, perhaps by a background process, it stays until it has been idle for long.
    pub async fn end_session(&self, session: &SessionKey) {
        for _ in 0..LOOKS_MAX {
            let all = self.sandboxes().into_iter().filter(|one| one.session.as_ref() == Some(session));
            let (idle, busy): (Vec<_>, Vec<_>) = all.partition(|one| one.running == 0);
            for one in idle {
                self.destroy_sandbox(&one.sandbox.id).await;
            }
            if busy.is_empty() {
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Kills all processes in a sandbox and removes it. Returns false if there is no sandbox with this id.
    pub async fn destroy_sandbox(&self, id: &SandboxId) -> bool {
        let backends: Vec<_> = self.inner.sandboxes.values().map(Arc::clone).collect();
        for backend in backends {
            if backend.destroy(id).await {
                return true;
            }
        }
        false
    }
}

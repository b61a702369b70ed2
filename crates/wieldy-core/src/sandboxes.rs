//! Sandboxes that stay: made, listed and destroyed by name, for agents whose calls should share one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::call::Caller;
use crate::confinement::{Confinement, ResourceLimits, SessionKey};
use crate::error::CallError;
use crate::executor::Executor;
use crate::run::{place, unavailable};
use crate::sandbox::{Level, Sandbox, SandboxError, SandboxId, SandboxStatus};

/// The interval at which the sandboxes of an ended session are tried again while they are in use.
const LOOKS_MAX: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Whose each sandbox is that was made by name. Those of sessions say so themselves.
#[derive(Default)]
pub(crate) struct Owners {
    of: Mutex<HashMap<SandboxId, Owner>>,
}

#[derive(PartialEq, Eq)]
struct Owner {
    tenant: Option<String>,
    agent: String,
}

impl Owner {
    fn of(caller: &Caller) -> Self {
        Self { tenant: caller.tenant.clone(), agent: caller.agent.clone() }
    }
}

impl Owners {
    fn all(&self) -> MutexGuard<'_, HashMap<SandboxId, Owner>> {
        self.of.lock().expect("no code panics while it holds the owners")
    }

    pub(crate) fn forget(&self, id: &SandboxId) {
        self.all().remove(id);
    }
}

impl Executor {
    /// Makes a sandbox, which stays until it is destroyed or has been idle for long. All that runs in it together is held to
    /// `limits`, and to what the executor allows.
    ///
    /// That of a caller with a session is the one its calls run in anyway; that of another is named by its id, as the
    /// [`parent_sandbox`](Caller::parent_sandbox) of callers whose calls should run in it: those of the same agent and tenant. That of a
    /// caller with a parent sandbox is made within it, where the level can do that: both together are held to the limits of the parent.
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
            engine.owners.all().insert(made.sandbox.id.clone(), Owner::of(caller));
        }
        Ok(made)
    }

    /// Refuses a caller whose parent sandbox is somebody else's. The name of a sandbox is no secret.
    pub(crate) fn check_parent(&self, caller: &Caller) -> Result<(), CallError> {
        let Some(id) = &caller.parent_sandbox else { return Ok(()) };
        let is_theirs = match self.inner.owners.all().get(id) {
            Some(owner) => *owner == Owner::of(caller),
            None => {
                let all = self.inner.sandboxes.values().flat_map(|sandbox| sandbox.list());
                let session = all.into_iter().find(|one| one.sandbox.id == *id).and_then(|one| one.session);
                session.is_none_or(|session| caller.session_key() == Some(session))
            }
        };
        // As if there were none: whether there is one is nobody else's business.
        if is_theirs { Ok(()) } else { Err(SandboxError::missing(id).into()) }
    }

    /// What runs processes at this level, if the executor has it. For providers whose
    /// programs outlive a call; a tool's own run in [`Run::execute`](crate::Run::execute).
    pub fn sandbox(&self, level: Level) -> Option<Arc<dyn Sandbox>> {
        self.inner.sandboxes.get(&level).cloned()
    }

    /// The sandboxes there are.
    pub fn sandboxes(&self) -> Vec<SandboxStatus> {
        let mut all: Vec<SandboxStatus> = self.inner.sandboxes.values().flat_map(|sandbox| sandbox.list()).collect();
        all.sort_by(|one, other| one.sandbox.id.cmp(&other.sandbox.id));
        all
    }

    /// Takes away the sandboxes of a session whose client is gone. One in which something runs is waited for a little; if it still
    /// does then, perhaps in the background, it stays until it has been idle for long.
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

    /// Ends everything in a sandbox and takes it away; false if there is none of that id.
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

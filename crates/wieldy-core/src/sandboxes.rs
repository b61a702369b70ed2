//! Sandboxes that stay: made, listed and destroyed by name, for agents whose calls should share one.

use std::sync::Arc;

use crate::call::Caller;
use crate::confinement::{Confinement, ResourceLimits};
use crate::error::CallError;
use crate::executor::Executor;
use crate::run::{place, unavailable};
use crate::sandbox::{Level, Sandbox, SandboxId, SandboxStatus};

impl Executor {
    /// Makes a sandbox, which stays until it is destroyed or has been idle for long. All that runs in it together is held to
    /// `limits`, and to what the executor allows.
    ///
    /// That of a caller with a session is the one its calls run in anyway; that of another is named by its id, as the
    /// [`parent_sandbox`](Caller::parent_sandbox) of callers whose calls should run in it.
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
        let own = &engine.confinement;
        let place_limits = limits.or(own.place_limits).within(own.place_limits);
        let confinement = Confinement { place: place(caller), place_limits, ..Confinement::clone(own) };
        Ok(sandbox.create(&confinement).await?)
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

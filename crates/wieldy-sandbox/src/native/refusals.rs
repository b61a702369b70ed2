//! What the proxy of a sandbox refuses, and whom it is told: every command that runs there at that time.
//!
//! The proxy knows a connection and not the process behind it. So a refusal is known to be a command's own only while no other runs;
//! otherwise each of them is told that it may have been another's.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wieldy_core::{Breach, OutputSink, SandboxRef};

use crate::proxy::Refusal;

/// How many refusals a command is told.
const BREACHES_MAX: usize = 64;

/// Those who hear of a sandbox's refusals.
pub(crate) struct Refusals {
    sandbox: SandboxRef,
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    begun: u64,
    commands: BTreeMap<u64, Heard>,
}

struct Heard {
    output: Arc<dyn OutputSink>,
    breaches: Vec<Breach>,
}

/// A command that hears of refusals until this is dropped.
pub(crate) struct Hearing<'a> {
    refusals: &'a Refusals,
    number: u64,
}

impl Refusals {
    pub(crate) fn new(sandbox: SandboxRef) -> Self {
        Self { sandbox, running: Mutex::default() }
    }

    /// A command begins; its `output` hears of what is refused from now on.
    pub(crate) fn hear(&self, output: &Arc<dyn OutputSink>) -> Hearing<'_> {
        let mut running = self.running();
        running.begun += 1;
        let number = running.begun;
        running.commands.insert(number, Heard { output: Arc::clone(output), breaches: Vec::new() });
        Hearing { refusals: self, number }
    }

    /// Tells of a refusal.
    pub(super) fn tell(&self, refusal: Refusal) {
        let mut running = self.running();
        let Refusal { host, port, reason } = refusal;
        let shared = running.commands.len() > 1;
        let breach = Breach::Network { host, port: Some(port), reason: reason.as_str().into(), shared };
        for heard in running.commands.values_mut().filter(|heard| heard.breaches.len() < BREACHES_MAX) {
            heard.output.refused(&self.sandbox, &breach);
            heard.breaches.push(breach.clone());
        }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hearing<'_> {
    /// All that was refused so far.
    pub(crate) fn breaches(&self) -> Vec<Breach> {
        self.refusals.running().commands.get(&self.number).map(|heard| heard.breaches.clone()).unwrap_or_default()
    }
}

impl Drop for Hearing<'_> {
    fn drop(&mut self) {
        self.refusals.running().commands.remove(&self.number);
    }
}

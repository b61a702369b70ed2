//! An isolation level that an executor does not have. A call that asks for it gets the reason and a hint.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Exit, Level, OutputSink, Sandbox, SandboxError, SandboxStatus};

/// A level at which nothing can be run.
#[derive(Debug, Clone)]
pub struct Unavailable {
    level: Level,
    problem: String,
    hint: String,
}

impl Unavailable {
    /// Makes a stand-in for `level`, with the reason why it is unavailable and a hint.
    pub fn new(level: Level, problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { level, problem: problem.into(), hint: hint.into() }
    }

    /// Returns the level `firecracker` of a program that was built without that feature.
    #[cfg(not(feature = "firecracker"))]
    pub fn firecracker() -> Self {
        let hint = "build wieldy with `--features firecracker`; it also needs `firecracker` itself, /dev/kvm, and a kernel and a root file \
                    system for guests";
        Self::new(Level::Firecracker, "this program was built without it", hint)
    }

    /// Returns an OCI level of a program that was built without the feature `oci`.
    #[cfg(not(feature = "oci"))]
    pub fn oci(level: Level) -> Self {
        Self::new(level, "this program was built without it", "build wieldy with the feature `oci`, or use `native`")
    }

    /// Returns the problem and the hint.
    #[cfg(not(all(feature = "firecracker", feature = "oci")))]
    pub(crate) fn reason(&self) -> (&str, &str) {
        (&self.problem, &self.hint)
    }

    fn error(&self) -> SandboxError {
        let Self { level, problem, hint } = self.clone();
        SandboxError::Unavailable { level, problem, hint }
    }
}

impl Sandbox for Unavailable {
    fn level(&self) -> Level {
        self.level
    }

    fn execute<'a>(
        &'a self,
        _command: &'a Command,
        _confinement: &'a Confinement,
        _output: Arc<dyn OutputSink>,
        _stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        Box::pin(async { Err(self.error()) })
    }

    fn create<'a>(&'a self, _confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        Box::pin(async { Err(self.error()) })
    }
}

//! [`DenialRecorder`]: records an event for each denial of a program, while the program runs and after its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio_util::sync::CancellationToken;

use crate::call::SandboxRef;
use crate::confinement::{Command, Confinement};
use crate::event::Body;
use crate::sandbox::{Denial, Exit, OutputSink, Sandbox, SandboxError, Stream};

/// An output sink that also records an event for each denial.
pub(crate) struct DenialRecorder<F> {
    output: Arc<dyn OutputSink>,
    record: F,
    /// The number of recorded denials.
    recorded: AtomicUsize,
}

impl<F: Fn(Body) + Send + Sync + 'static> DenialRecorder<F> {
    pub(crate) fn new(output: Arc<dyn OutputSink>, record: F) -> Arc<Self> {
        Arc::new(Self { output, record, recorded: AtomicUsize::new(0) })
    }

    /// Runs a program, and records the denials that were not recorded while it ran.
    pub(crate) async fn execute(
        self: Arc<Self>,
        sandbox: &dyn Sandbox,
        command: &Command,
        confinement: &Confinement,
        stop: CancellationToken,
    ) -> Result<Exit, SandboxError> {
        let exit = sandbox.execute(command, confinement, Arc::clone(&self) as _, stop).await?;
        // The denials already recorded while the program ran are the first ones of the list.
        for denial in exit.denials.iter().skip(self.recorded.load(Ordering::Acquire)) {
            self.record(&exit.sandbox, denial);
        }
        Ok(exit)
    }

    fn record(&self, sandbox: &SandboxRef, denial: &Denial) {
        (self.record)(Body::SandboxViolation { sandbox: sandbox.id.0.clone(), message: denial.to_string() });
    }
}

impl<F: Fn(Body) + Send + Sync + 'static> OutputSink for DenialRecorder<F> {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        self.output.write(stream, bytes);
    }

    fn refused(&self, sandbox: &SandboxRef, denial: &Denial) {
        self.record(sandbox, denial);
        self.recorded.fetch_add(1, Ordering::AcqRel);
        self.output.refused(sandbox, denial);
    }
}

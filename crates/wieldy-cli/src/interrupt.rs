//! Ctrl-C: the first one cancels what runs and waits for it to end in order, the second one leaves at once.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::{Exit, Failure};
use crate::output::Printer;

/// What is told where calls are cancelled.
pub(crate) const CANCELLING: &str = "cancelling; press Ctrl-C again to leave at once";

/// Listens for the wish to stop. Made before anything runs, so that nothing is ended without being cleaned up.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    /// The terminal was closed.
    hangup: Signal,
}

impl Interrupts {
    pub(crate) fn listen() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind)
                .map_err(|error| Failure::broken(anyhow::Error::new(error).context("cannot listen for signals")))
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }

    /// Waits for `work`. At the first wish to stop calls `cancel`, says so and goes on waiting.
    pub(crate) async fn watch<T>(
        &mut self,
        work: impl Future<Output = T>,
        cancel: impl FnOnce(),
        told: &str,
        printer: &Printer,
    ) -> T {
        tokio::pin!(work);
        tokio::select! {
            result = &mut work => return result,
            () = self.next() => {}
        }
        cancel();
        printer.tell(told);
        tokio::select! {
            result = work => result,
            // Whatever runs is in custody, which ends with this process.
            () = self.next() => std::process::exit(Exit::Cancelled.code().into()),
        }
    }
}

//! Ctrl-C: the first one cancels running calls and waits for their orderly end, the second one exits at once.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::{Exit, Failure};
use crate::output::Printer;

/// The message when calls are cancelled.
pub(crate) const CANCELLING: &str = "cancelling; press Ctrl-C again to leave at once";

/// The signals that stop the command. It is created before any call runs, so that no signal skips the cleanup.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    /// The signal for a closed terminal.
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

    /// Waits for `work`. At the first signal it calls `cancel`, prints `told` and keeps waiting.
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
            // Programs run under supervision that ends them with this process.
            () = self.next() => std::process::exit(Exit::Cancelled.code().into()),
        }
    }
}

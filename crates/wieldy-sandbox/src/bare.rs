//! The isolation level `none`: processes of this user on this machine, but in custody.
//!
//! What it sees to:
//!
//! - The whole process tree is gone when [`execute`](Sandbox::execute) returns, however the command ended and whatever its processes
//!   did: ignored signals, forked twice, opened sessions, stopped themselves, kept pipes open. The same holds when the future is
//!   dropped, and when the embedding process is killed.
//! - The command starts with just the environment, folder, arguments and input it was given, with no other open file, no
//!   terminal, no way to gain privileges (`no_new_privs`), and signals as if freshly booted.
//! - `open_files` is enforced, and no core file is written. When the machine runs out of memory, commands go first.
//! - What was used is measured by the kernel: processor time of all processes that were waited for, the peak of the
//!   *largest* process's memory, blocks read from and written to disks.
//!
//! What it does not: files and network are open to the command as they are to this user, whatever the confinement says.
//! Processor, memory, processes and disk are not limited. The limits that a process can be given for them would be
//! lies: they count one process's address space, all processes of the user, or the size of one file. And a command that sets
//! out to harm its supervisor can: one that kills it dies with its session, but processes that opened a session of their own
//! are then lost. Nor does custody reach what others start on a command's behalf, such as a service manager.

use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use std::os::unix::process::ExitStatusExt;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Ended, Exit, Level, OutputSink, Sandbox, SandboxError, SandboxId, SandboxRef, Usage,
};

use crate::custody::Custody;
use crate::report::Used;

/// Runs commands without isolation, and cleans up after them. Needs a Tokio runtime with I/O.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bare;

impl Sandbox for Bare {
    fn level(&self) -> Level {
        Level::None
    }

    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        Box::pin(async move {
            if stop.is_cancelled() {
                return Err(SandboxError::Creation { reason: "the run was stopped before it began".into() });
            }
            let custody = Custody::start(command, confinement)?;
            let (status, used) = custody.follow(&*output, &stop).await?;
            Ok(Exit { ended: ended(status), usage: usage(used), sandbox: next_sandbox() })
        })
    }
}

/// A name of its own for each command, also among several executors on one machine.
fn next_sandbox() -> SandboxRef {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SandboxRef { id: SandboxId(format!("bare-{}-{number}", std::process::id())), level: Level::None }
}

fn ended(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Code(code),
        (None, signal) => Ended::Signal(signal.unwrap_or_default()),
    }
}

fn usage(used: Used) -> Usage {
    // The kernel counts blocks of this size, whatever the disk's own are.
    const BLOCK_BYTES: u64 = 512;
    let count = |number: i64| u64::try_from(number).unwrap_or_default();
    Usage {
        cpu_ms: used.cpu_us as f64 / 1e3,
        memory_peak_bytes: count(used.memory_peak_kib) * 1024,
        read_bytes: count(used.blocks_read) * BLOCK_BYTES,
        written_bytes: count(used.blocks_written) * BLOCK_BYTES,
    }
}

//! The isolation level `none`: processes of this user on this machine, but supervised.
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
//! out to harm its supervisor can: where it kills its supervisor, the fork server ends what is left; where it kills the fork server as well, processes
//! that opened a session of their own are lost. Nor does supervision reach what others start on a command's behalf, such as a service manager.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Enforcement, Enforcer, Exit, Level, OutputSink, Sandbox, SandboxError, SandboxId, SandboxRef,
};

use crate::limits::measured;
use crate::supervise::host_process::HostSupervisor;
use crate::supervise::run::{RunOutcome, prepare, run_to_end};

/// How many supervisors are kept for later commands.
const IDLE_MAX: usize = 8;

/// Runs commands without isolation, and cleans up after them. Needs a Tokio runtime with I/O.
#[derive(Clone, Default)]
pub struct Unconfined {
    idle: Arc<Mutex<Vec<HostSupervisor>>>,
}

impl Sandbox for Unconfined {
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
        let (bare, command, confinement) = (self.clone(), command.clone(), confinement.clone());
        Box::pin(run_to_end(
            stop,
            |stop| async move { bare.execute_here(&command, &confinement, &*output, &stop).await },
        ))
    }
}

impl Unconfined {
    async fn execute_here(
        &self,
        command: &Command,
        confinement: &Confinement,
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<Exit, SandboxError> {
        let order = prepare(command, confinement)
            .map_err(|source| SandboxError::Start { program: command.program.clone(), source })?;
        let host = self.take().await.map_err(|error| SandboxError::Creation { reason: error.to_string() })?;
        let (outcome, left) = host.run(command, order, output, stop).await;
        if let Some(left) = left {
            put_back(&self.idle, left);
        }
        let RunOutcome { ended, report, .. } = outcome?;
        Ok(Exit { ended, usage: measured(&report), sandbox: next_sandbox(), overrun: None, breaches: Vec::new() })
    }

    async fn take(&self) -> std::io::Result<HostSupervisor> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(host) => Ok(host),
            None => HostSupervisor::new().await,
        }
    }
}

fn put_back(idle: &Mutex<Vec<HostSupervisor>>, host: HostSupervisor) {
    let mut idle = idle.lock().unwrap_or_else(PoisonError::into_inner);
    if idle.len() < IDLE_MAX {
        idle.push(host);
    }
}

/// A name of its own for each command, also among several executors on one machine.
fn next_sandbox() -> SandboxRef {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SandboxRef { id: SandboxId(format!("bare-{}-{number}", std::process::id())), level: Level::None }
}

/// What sees to each limit here.
pub(crate) fn enforcement() -> Vec<Enforcement> {
    let by = [
        ("cpu_millicores", Enforcer::Nobody),
        ("memory_bytes", Enforcer::Nobody),
        ("processes", Enforcer::Nobody),
        ("open_files", Enforcer::KernelPerProcess),
        ("disk_bytes", Enforcer::Nobody),
        ("disk_files", Enforcer::Nobody),
        ("output_bytes", Enforcer::Executor),
    ];
    by.map(|(limit, by)| Enforcement { limit, by }).into()
}

//! The isolation level `none`: processes of this user on this machine, but supervised.
//!
//! Guarantees:
//!
//! - The whole process tree is gone when [`execute`](Sandbox::execute) returns, however the command ended, and even if
//!   its processes ignored signals, forked twice, opened sessions, stopped themselves or kept pipes open. The same
//!   holds when the future is dropped, and when the embedding process is killed.
//! - The command starts with exactly the environment, folder, arguments and input that it was given. It has no other
//!   open file, no terminal of the executor, no way to gain privileges (`no_new_privs`), and default signal handling.
//! - `open_files` is enforced, and no core file is written. When the machine runs out of memory, the kernel kills
//!   commands first.
//! - The kernel measures the usage: processor time of all processes that were waited for, the memory peak of the
//!   *largest* process, blocks read from and written to disks.
//!
//! Limitations: files and network are open to the command as they are to this user; the confinement does not restrict
//! them. Processor, memory, processes and disk are not limited. The kernel's limits per process would be misleading:
//! they count the address space of one process, all processes of the user, or the size of one file. A command can
//! attack its supervisor: if it kills the supervisor, the fork server ends the remaining processes; if it kills the
//! fork server too, processes that opened their own session survive. Processes that another program starts for a
//! command, such as a service manager, are not supervised.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Enforcement, Enforcer, Exit, Level, Limit, OutputSink, Sandbox, SandboxError, SandboxId,
    SandboxRef,
};

use crate::supervise::host_process::HostSupervisor;
use crate::supervise::run::{RunOutcome, prepare, run_to_end};
use crate::usage::measured;

/// Maximum number of idle supervisors that are stored for later commands.
const IDLE_MAX: usize = 8;

/// A sandbox without isolation, which cleans up after its commands. Needs a Tokio runtime with I/O.
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
        let host = self.take().await.map_err(SandboxError::creation_from)?;
        let (outcome, left) = host.run(command, order, output, stop).await;
        if let Some(left) = left {
            put_back(&self.idle, left);
        }
        let RunOutcome { ended, report, .. } = outcome?;
        Ok(Exit { ended, usage: measured(&report), sandbox: next_sandbox(), overrun: None, denials: Vec::new() })
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

/// Returns an id that no other command has, even with several executors on one machine.
fn next_sandbox() -> SandboxRef {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SandboxRef { id: SandboxId(format!("bare-{}-{number}", std::process::id())), level: Level::None }
}

/// Returns the enforcer of each limit at this level.
pub(crate) fn enforcement() -> Vec<Enforcement> {
    let by = [
        (Limit::CpuMillicores, Enforcer::Nobody),
        (Limit::MemoryBytes, Enforcer::Nobody),
        (Limit::Processes, Enforcer::Nobody),
        (Limit::OpenFiles, Enforcer::KernelPerProcess),
        (Limit::DiskBytes, Enforcer::Nobody),
        (Limit::DiskFiles, Enforcer::Nobody),
        (Limit::OutputBytes, Enforcer::Executor),
    ];
    by.map(|(limit, by)| Enforcement { limit, by }).into()
}

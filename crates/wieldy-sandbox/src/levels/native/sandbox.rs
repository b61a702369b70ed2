//! A native sandbox as the executor sees it: its init, supervisors, cgroups and proxy, and the commands that run in it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::Pid;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Ended, Enforcement, Enforcer, Exit, Limit, Network, OutputSink, SandboxError, SandboxId,
    Usage,
};

use super::cgroup_parent;
use super::enforcement;
use super::idmap::IdMaps;
use super::rest::Rests;
use super::warm::{BuildError, WarmInit, idle_command, report};
use crate::cgroup::{Controller, Group, Hierarchy};
use crate::denials::files::FileDenials;
use crate::denials::network::{ProxyDenials, serve};
use crate::disk_quota::Ran;
use crate::pool::{Live, Record};
use crate::proxy::{self, Allowed, Proxy};
use crate::supervise::host_process::NullSink;
use crate::supervise::protocol::{BuildOrder, ForkServerOrder, InitOrder, InitReport, RunOrder};
use crate::supervise::run::{RunOutcome, SupervisorClient, prepare};
use crate::supervise::socket::{ForkServerClient, Socket, end_child};
use crate::usage::{group_limits, is_told, measured, overrun, overrun_of_group, usage};
use crate::view::masked::{Masked, MaskedPath, are_unchanged, file_id, masked_by};
use crate::view::placeholders::Placeholder;
use crate::view::placeholders::host_view::Planned;
use crate::view::plan::{self, Step};
use crate::view::plan_cache::room;

/// Minimum memory peak of a command after which its page cache is dropped.
const SETTLE_BYTES_MIN: u64 = 16 << 20;

/// The reasons why a sandbox is not used after it was built.
const UNEXPECTED: &str = "its first process sent an unexpected report; this is a mistake in wieldy, please report it";
const REPLACED: &str = "a file that it hides or protects was replaced while it was built; call again";

/// Maximum number of idle supervisors that are stored for later commands.
const IDLE_MAX: usize = 8;

/// A native sandbox: its processes, its control group and its proxy.
pub(super) struct NativeSandbox {
    record: Record,
    pub(super) fork_server: Arc<ForkServerClient>,
    init: Socket,
    pub(super) init_pid: Pid,
    group: Group,
    counts_processes: bool,
    pub(super) masked: Mutex<Arc<Masked>>,
    /// The placeholders to remove while it is idle; `None` if they stay.
    pub(super) rests: Option<Rests>,
    environment: Vec<(String, String)>,
    /// The steps that built its file tree.
    steps: Vec<Step>,
    idle: Mutex<Vec<PooledSupervisor>>,
    proxy_denials: Arc<ProxyDenials>,
    _proxy: Option<Proxy>,
    supervisors_made: AtomicU64,
}

/// A supervisor with its part of the cgroup tree.
struct PooledSupervisor {
    supervisor: SupervisorClient,
    group: Group,
    /// The number of processes in the group that do not belong to a command.
    residents: u64,
}

impl NativeSandbox {
    /// Builds a sandbox. Meanwhile asks `holds` if the plan is still valid.
    pub(super) async fn build(
        mut warm_init: WarmInit,
        confinement: &Confinement,
        planned: Planned,
        holds: impl FnOnce() -> bool,
        id_maps: &IdMaps,
        hierarchy: &Hierarchy,
        outer: Option<&Self>,
    ) -> Result<Arc<Self>, BuildError> {
        let Planned { steps, mut environment, placeholders } = planned;
        let prepared = match warm_init.prepared.take() {
            Some(prepared) => prepared,
            None => warm_init.prepare_steps(plan::of_the_system(&steps)).await?,
        };
        let WarmInit { made, fork_server, init, init_pid, group, first, .. } = warm_init;
        let allowed = proxy_hosts(&confinement.network)?;
        let left = plan::left_after(&prepared.steps, &steps);
        let masked = hold(&fork_server, init_pid, &group, &steps, placeholders.clone()).await?;
        let masked = masked.into_iter().map(|cover| prepared.as_masked(cover)).collect::<Vec<_>>();
        let sources = id_maps.sources(&left, &fork_server).await;
        let (sources, mounts) =
            sources.map_err(|error| SandboxError::creation("mapping the owners of files", error))?;
        let beside: Vec<BorrowedFd<'_>> = mounts.iter().map(AsFd::as_fd).collect();
        let order = InitOrder::Build(Box::new(BuildOrder { steps: left, sources, proxied: allowed.is_some() }));
        init.send(&order, &beside)
            .await
            .map_err(|error| SandboxError::creation("sending an order to its first process", error))?;
        drop(mounts);
        // From here on, the init builds the file tree in parallel.
        limit(&group, &first, confinement).map_err(|error| SandboxError::creation("limiting a cgroup", error))?;
        if !holds() {
            return Err(BuildError::Outdated);
        }
        let received = report(&init).await?;
        let InitReport::Ready { proxy_port, .. } = received.message else {
            return Err(SandboxError::creation_because(UNEXPECTED).into());
        };
        let proxy_denials = Arc::new(ProxyDenials::new(made.clone()));
        let mut descriptors = received.descriptors.into_iter();
        let namespace = descriptors.next();
        let proxy = allowed.zip(descriptors.next());
        let proxy = proxy.map(|(allowed, listener)| serve(listener, allowed, &proxy_denials)).transpose();
        let proxy = proxy.map_err(|error| SandboxError::creation("starting the proxy", error))?;
        if !are_unchanged(&masked) {
            return Err(BuildError::Changed(SandboxError::creation_because(REPLACED)));
        }
        environment.extend(proxy_port.into_iter().flat_map(proxy::environment));
        let rests = namespace.and_then(|namespace| Rests::new(placeholders, &steps, namespace));
        let outer = outer.map(|outer| outer.record.id().clone());
        let limits = confinement.place_limits;
        let record = Record::new(made, &confinement.place, outer, limits, enforcement(hierarchy));
        Ok(Arc::new(Self {
            record,
            fork_server,
            init,
            init_pid,
            group,
            counts_processes: hierarchy.can(Controller::Pids),
            masked: Mutex::new(Arc::new(Masked::new(masked))),
            rests,
            environment,
            steps,
            idle: Mutex::new(vec![PooledSupervisor { supervisor: prepared.supervisor, group: first, residents: 2 }]),
            proxy_denials,
            _proxy: proxy,
            supervisors_made: AtomicU64::new(1),
        }))
    }

    /// Makes a group for a sandbox within this one, unless this one is about to go.
    pub(super) fn room_for(&self, id: &SandboxId) -> io::Result<Option<Group>> {
        cgroup_parent::below(&self.group, id)
    }

    /// Returns the order for a command, with the limits that only its supervisor enforces.
    fn order(&self, command: &Command, confinement: &Confinement) -> Result<RunOrder, SandboxError> {
        let mut order = prepare(command, confinement)
            .map_err(|source| SandboxError::Start { program: command.program.clone(), source })?;
        for (name, value) in &self.environment {
            order.environment.retain(|(known, _)| known != name);
            order.environment.push((name.clone(), value.clone()));
        }
        let limits = &confinement.limits;
        order.limits.disk_bytes = limits.disk_bytes;
        order.limits.disk_files = limits.disk_files;
        order.limits.room = Some(room(confinement));
        order.limits.counts_files = confinement.place_limits.disk_files.is_some();
        if self.record.enforcement().contains(&Enforcement { limit: Limit::MemoryBytes, by: Enforcer::Watcher }) {
            order.limits.memory_bytes = limits.memory_bytes;
            order.limits.session_memory_bytes = confinement.place_limits.memory_bytes;
        }
        if !self.counts_processes {
            order.limits.processes = limits.processes;
        }
        Ok(order)
    }

    /// Runs a program that does nothing, so that the kernel has set up everything before the first command.
    pub(super) async fn warm_up(self: &Arc<Self>, confinement: &Confinement) {
        let running = self.record.begin_run();
        let nowhere: Arc<dyn OutputSink> = Arc::new(NullSink);
        // An error is ignored, since the next command would report it.
        let _ = self.run(&idle_command(), confinement, &nowhere, &CancellationToken::new()).await;
        drop(running);
        self.record.forget_runs();
    }

    /// Returns the number of processes of the sandbox's user that belong to no command: the init and the supervisors.
    /// Each running command has one supervisor.
    fn residents(&self) -> u64 {
        let supervisors = self.record.running() + lock(&self.idle).len();
        1 + supervisors as u64
    }

    /// Closes the files of cgroups until the next command, so that an idle sandbox holds few descriptors.
    pub(super) fn close_files(&self) {
        let idle = lock(&self.idle);
        idle.iter().map(|pooled| &pooled.group).chain([&self.group]).for_each(Group::close_files);
    }

    async fn take_supervisor(&self) -> io::Result<PooledSupervisor> {
        let idle = lock(&self.idle).pop();
        match idle {
            Some(pooled) => Ok(pooled),
            None => self.make_supervisor().await,
        }
    }

    async fn make_supervisor(&self) -> io::Result<PooledSupervisor> {
        let (socket, theirs) = Socket::pair()?;
        self.init.send(&InitOrder::Supervisor, &[theirs.as_fd()]).await?;
        drop(theirs);
        let supervisor = SupervisorClient::arrive(socket).await?;
        let number = self.supervisors_made.fetch_add(1, Ordering::Relaxed);
        let group = self.group.child(&format!("supervisor-{number}"))?;
        let pid = supervisor.pid();
        // Moving a process may wait for all processors.
        let joined = tokio::task::spawn_blocking(move || group.add(pid).map(|()| group)).await;
        Ok(PooledSupervisor { supervisor, group: joined.map_err(io::Error::other)??, residents: 1 })
    }

    /// Drops the page cache that a large command has left, which would count for the next one. Then puts the supervisor
    /// back.
    fn settle(self: &Arc<Self>, pooled: PooledSupervisor) {
        let sandbox = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            pooled.group.settle();
            sandbox.put_back(pooled);
        });
    }

    fn put_back(&self, pooled: PooledSupervisor) {
        let surplus = {
            let mut idle = lock(&self.idle);
            idle.push(pooled);
            // The supervisor in the init's cgroup stays: killing that cgroup would kill the init as well.
            let from = if idle.len() > IDLE_MAX { idle.iter().position(|pooled| pooled.residents == 1) } else { None };
            from.map(|at| idle.swap_remove(at))
        };
        if let Some(surplus) = surplus {
            tokio::task::spawn_blocking(move || {
                let PooledSupervisor { supervisor, group, .. } = surplus;
                // The supervisor has no command, so it exits by itself. `kill` waits for that, so that the cgroup can
                // be removed.
                drop(supervisor);
                let _ = group.kill();
            });
        }
    }

    /// Kills the processes that a lost supervisor has left behind.
    async fn end_lost(&self, pooled: PooledSupervisor) {
        let PooledSupervisor { supervisor, group, .. } = pooled;
        drop(supervisor);
        let killed = tokio::task::spawn_blocking(move || group.kill()).await;
        if !matches!(killed, Ok(Ok(()))) {
            // Some processes may be left, so end the whole sandbox.
            let _ = end_child(&self.fork_server, self.init_pid, false).await;
        }
    }
}

impl Live for NativeSandbox {
    fn record(&self) -> &Record {
        &self.record
    }

    fn is_alive(&self) -> bool {
        self.init.is_alive()
    }

    fn is_intact(&self) -> bool {
        let masked = Arc::clone(&lock(&self.masked));
        masked.are_unchanged()
    }

    fn replaced(&self) -> Option<PathBuf> {
        lock(&self.masked).replaced()
    }

    async fn wake(&self) -> io::Result<()> {
        self.put_placeholders_back().await
    }

    async fn run(
        self: &Arc<Self>,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> Result<Ran, SandboxError> {
        self.wake().await.map_err(|error| SandboxError::creation("protecting names in the workspace again", error))?;
        let listener = self.proxy_denials.listen(output);
        let mut order = self.order(command, confinement)?;
        let mut pooled =
            self.take_supervisor().await.map_err(|error| SandboxError::crashed("the sandbox is gone", error))?;
        order.limits.residents = self.residents();
        let limits = &confinement.limits;
        let set = pooled.group.set(&group_limits(limits, pooled.residents));
        set.map_err(|error| SandboxError::creation("limiting a cgroup", error))?;
        let meter = pooled.group.go_on();
        let file_denials = FileDenials::new(&**output);
        let outcome = pooled.supervisor.run(command, order, &file_denials, stop).await;
        let mut used = pooled.group.used(&meter);
        used.leave_out(pooled.residents);
        match &outcome {
            Ok(RunOutcome { supervisor_lost: true, .. }) => self.end_lost(pooled).await,
            Err(error) if error.is_crash() => self.end_lost(pooled).await,
            _ if used.memory_peak_bytes.is_some_and(|peak| peak.least > SETTLE_BYTES_MIN) => self.settle(pooled),
            _ => self.put_back(pooled),
        }
        let RunOutcome { ended, report, .. } = match outcome {
            // What a command leaves in private folders is memory, too: its supervisor may have found none left for
            // itself.
            Err(error) if error.is_crash() => match overrun_of_group(&used, limits, self.record.limits()) {
                Some(overrun) if overrun.limit == Limit::MemoryBytes => {
                    let (ended, usage) = (Ended::Signal(libc::SIGKILL), usage(Usage::default(), &used));
                    let (sandbox, denials) = (self.record.made().clone(), listener.denials());
                    let exit = Exit { ended, usage, sandbox, overrun: Some(overrun), denials };
                    return Ok(Ran { exit, files_made: 0 });
                }
                _ => return Err(error),
            },
            outcome => outcome?,
        };
        let overrun = match report.overrun {
            Some((limit, used)) => Some(overrun(limit, used, limits, &confinement.place_limits)),
            None => overrun_of_group(&used, limits, self.record.limits())
                .filter(|overrun| is_told(overrun, ended, stop.is_cancelled())),
        };
        let mut denials = listener.denials();
        if overrun.is_none() && !stop.is_cancelled() {
            denials.extend(file_denials.denials(ended, command, confinement, &self.steps));
        }
        let usage = usage(measured(&report), &used);
        let exit = Exit { ended, usage, sandbox: self.record.made().clone(), overrun, denials };
        Ok(Ran { exit, files_made: report.files_made })
    }

    async fn end(self: Arc<Self>, linger: bool) {
        let _ = end_child(&self.fork_server, self.init_pid, linger).await;
    }
}

/// Sets the limits of the sandbox as a whole, and those of its first supervisor's cgroup: most likely, the first
/// command has the limits of this call.
fn limit(group: &Group, first: &Group, confinement: &Confinement) -> io::Result<()> {
    group.set(&group_limits(&confinement.place_limits, 0))?;
    // The init is in this cgroup as well as the supervisor.
    first.set(&group_limits(&confinement.limits, 2))
}

/// Has the fork server lock the protected paths and make the placeholders. Returns the masked paths, each with its
/// file.
async fn hold(
    fork_server: &ForkServerClient,
    init_pid: Pid,
    group: &Group,
    steps: &[Step],
    placeholders: Vec<Placeholder>,
) -> Result<Vec<MaskedPath>, BuildError> {
    let kept = ForkServerOrder::Register {
        child: init_pid.as_raw_pid(),
        protected: plan::protected(steps),
        placeholders,
        groups: group.folders().to_vec(),
    };
    let not_held =
        |error: io::Error| BuildError::Changed(SandboxError::creation("protecting names in the workspace", error));
    let holding = fork_server.begin(&kept).map_err(not_held)?;
    // Read while the fork server works, and before any mount masks a path.
    let masked = masked_by(steps);
    holding.wait().await.map_err(not_held)?;
    // Paths that were missing have a placeholder by now.
    Ok(masked.into_iter().map(|(path, id)| (path.clone(), id.or_else(|| file_id(&path)))).collect())
}

/// Returns the hosts that the proxy lets through, if there is a list.
fn proxy_hosts(network: &Network) -> Result<Option<Allowed>, SandboxError> {
    match network {
        Network::Hosts(hosts) => Allowed::new(hosts).map(Some).map_err(SandboxError::creation_from),
        Network::None | Network::Open => Ok(None),
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

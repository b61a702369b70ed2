//! Makes warm inits: first processes of sandboxes with their namespaces, cgroup and system mounts, made before the
//! workspace is known.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, ResourceLimits, SandboxError, SandboxRef, Stdin};

use crate::cgroup::Group;
use crate::private_disk::PrivateDisk;
use crate::supervise::host_process::NullSink;
use crate::supervise::protocol::{ForkServerOrder, InitOrder, InitReport, Received, RunOrder};
use crate::supervise::run::SupervisorClient;
use crate::supervise::socket::{ForkServerClient, Socket};
use crate::usage::group_limits;
use crate::view::masked::{MaskedPath, are_unchanged, masked_by};
use crate::view::plan::Step;

/// The first process of a future sandbox. It is already in its namespaces and its cgroup, which take longest to set up,
/// and waits for the remaining orders. A prepared one has a supervisor, too.
pub(super) struct WarmInit {
    pub(super) made: SandboxRef,
    pub(super) fork_server: Arc<ForkServerClient>,
    pub(super) init: Socket,
    pub(super) init_pid: Pid,
    pub(super) group: Group,
    /// The cgroup of the init and of its first supervisor.
    pub(super) first: Group,
    pub(super) prepared: Option<Prepared>,
    since: Instant,
}

/// The parts of a future sandbox that exist already.
pub(super) struct Prepared {
    /// The steps that the init has carried out.
    pub(super) steps: Vec<Step>,
    /// The paths that these steps mask, each with the file that it was before.
    pub(super) masked: Vec<MaskedPath>,
    pub(super) supervisor: SupervisorClient,
}

impl Prepared {
    /// Returns true if the masked paths are unchanged and the supervisor is alive.
    fn is_good(&self) -> bool {
        self.supervisor.is_alive() && are_unchanged(&self.masked)
    }

    /// Returns the masked path, with the file that it was when these steps masked it, if they did.
    pub(super) fn as_masked(&self, (path, id): MaskedPath) -> MaskedPath {
        let then = self.masked.iter().find(|(known, _)| *known == path);
        (path, then.map_or(id, |(_, id)| *id))
    }
}

impl WarmInit {
    pub(super) async fn make(
        made: SandboxRef,
        open_network: bool,
        private: Option<&PrivateDisk>,
        group: impl FnOnce() -> io::Result<Group>,
    ) -> Result<Self, SandboxError> {
        let fork_server = ForkServerClient::of_this_process()
            .map_err(|error| SandboxError::creation("starting the fork server", error))?;
        let (init, theirs) = Socket::pair().map_err(|error| SandboxError::creation("making a socket", error))?;
        // Made while a new fork server starts.
        let group = group().map_err(|error| SandboxError::creation("making a cgroup", error))?;
        let first = group.child("supervisor-0").map_err(|error| SandboxError::creation("making a cgroup", error))?;
        let ways = first.ways_in();
        let private = private.map(|disk| disk.folder_of(&made.id));
        let order = ForkServerOrder::WarmInit { open_network, in_folder: ways.folder.is_some(), private };
        let beside = std::iter::once(&theirs).chain(&ways.folder).chain(&ways.tasks);
        let beside: Vec<BorrowedFd<'_>> = beside.map(AsFd::as_fd).collect();
        fork_server
            .send(&order, &beside)
            .map_err(|error| SandboxError::creation("sending an order to the fork server", error))?;
        drop((theirs, ways));
        let received = report(&init).await?;
        let init_pid = received.sender.ok_or_else(|| {
            SandboxError::creation_because("the kernel did not report the process id of its first process; call again")
        })?;
        let kept = ForkServerOrder::Register {
            child: init_pid.as_raw_pid(),
            protected: Vec::new(),
            placeholders: Vec::new(),
            groups: group.folders().to_vec(),
        };
        fork_server
            .ask(&kept)
            .await
            .map_err(|error| SandboxError::creation("sending an order to the fork server", error))?;
        // If the process did not start in the cgroup, moving it there may wait for all processors.
        let joined = tokio::task::spawn_blocking(move || first.add(init_pid).map(|()| first)).await;
        let first = joined
            .map_err(io::Error::other)
            .flatten()
            .map_err(|error| SandboxError::creation("moving its first process to a cgroup", error))?;
        Ok(Self { made, fork_server, init, init_pid, group, first, prepared: None, since: Instant::now() })
    }

    /// Carries out the steps that every sandbox begins with, and makes the first supervisor.
    pub(super) async fn prepare(&mut self, steps: Vec<Step>) -> Result<(), SandboxError> {
        self.prepared = Some(self.prepare_steps(steps).await?);
        Ok(())
    }

    pub(super) async fn prepare_steps(&self, steps: Vec<Step>) -> Result<Prepared, SandboxError> {
        let (supervisor, theirs) = Socket::pair().map_err(|error| SandboxError::creation("making a socket", error))?;
        // Read before the mounts are made, so that a file which is replaced meanwhile is noticed.
        let masked = masked_by(&steps);
        let order = InitOrder::Prepare(steps.clone());
        self.init
            .send(&order, &[theirs.as_fd()])
            .await
            .map_err(|error| SandboxError::creation("sending an order to its first process", error))?;
        drop(theirs);
        report(&self.init).await?;
        let supervisor = SupervisorClient::arrive(supervisor)
            .await
            .map_err(|error| SandboxError::creation("making a supervisor", error))?;
        Ok(Prepared { steps, masked, supervisor })
    }

    /// Runs a program that does nothing, so that the kernel has set up everything before the first command.
    pub(super) async fn warm_up(&mut self) -> Result<(), SandboxError> {
        let Some(prepared) = &mut self.prepared else { return Ok(()) };
        self.first.begin();
        let order = RunOrder { program: IDLE.into(), workspace: "/".into(), folder: "/".into(), ..RunOrder::default() };
        let (command, stop) = (idle_command(), CancellationToken::new());
        match tokio::time::timeout(IDLE_MAX, prepared.supervisor.run(&command, order, &NullSink, &stop)).await {
            Ok(Err(error)) if error.is_crash() => Err(error),
            // Not every system has that program.
            Ok(_) => Ok(()),
            Err(_) => Err(SandboxError::creation_because(
                "`/usr/bin/true` did not end within 30 s in it; the machine may be overloaded",
            )),
        }
    }

    /// Limits the usage of all processes in it together.
    pub(super) fn limit(&self, limits: &ResourceLimits) -> Result<(), SandboxError> {
        self.group.set(&group_limits(limits, 0)).map_err(|error| SandboxError::creation("limiting a cgroup", error))
    }

    /// Returns the time when it was made.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Returns true if it can become a sandbox that begins with these steps.
    pub(super) fn suits(&self, system: &[Step]) -> bool {
        self.init.is_alive()
            && self.prepared.as_ref().is_none_or(|prepared| prepared.steps == system && prepared.is_good())
    }
}

/// Receives the next report of a sandbox's first process. Fails if the process reports a failure or has ended.
pub(super) async fn report(init: &Socket) -> Result<Received<InitReport>, SandboxError> {
    let received = init.receive::<InitReport>().await.map_err(SandboxError::creation_from)?;
    match received {
        Some(Received { message: InitReport::Failed { doing, error }, .. }) => {
            Err(SandboxError::creation(doing, error))
        }
        Some(received) => Ok(received),
        None => Err(SandboxError::creation_because(
            "its first process ended before it was ready; `wieldy doctor` tries every step",
        )),
    }
}

/// A program that does nothing. It has a full path: it also runs while the host's files are visible, and must not be a
/// program of the same name in `/usr/local`.
const IDLE: &str = "/usr/bin/true";
/// Longest run of this program, on a busy machine.
const IDLE_MAX: Duration = Duration::from_secs(30);

pub(super) fn idle_command() -> Command {
    Command {
        program: IDLE.into(),
        arguments: Vec::new(),
        environment: BTreeMap::new(),
        folder: PathBuf::new(),
        stdin: Stdin::Nothing,
        terminal: None,
    }
}

/// The reason why a sandbox was not built.
pub(super) enum BuildError {
    /// A failure to make or lock a placeholder, or a masked path that was replaced. A new plan can help: another
    /// executor may just have removed a placeholder.
    Changed(SandboxError),
    /// A plan that is no longer valid.
    Outdated,
    Failed(SandboxError),
}

impl From<SandboxError> for BuildError {
    fn from(error: SandboxError) -> Self {
        Self::Failed(error)
    }
}

impl From<BuildError> for SandboxError {
    fn from(not_built: BuildError) -> Self {
        match not_built {
            BuildError::Changed(error) | BuildError::Failed(error) => error,
            BuildError::Outdated => SandboxError::creation_because(
                "the files that it should show changed again and again while it was built; call again later",
            ),
        }
    }
}

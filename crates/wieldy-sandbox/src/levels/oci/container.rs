//! Starts, checks and removes one container: its sleeper, its cgroups and its files.
//!
//! The first process of a container is the sleeper, a shell that only reaps orphans. Each command comes in by the
//! runtime's `exec`, or in gVisor by its counterpart. Leftover processes of a command are killed in one of two ways:
//!
//! - runc, crun, youki: each command has a cgroup of its own below the container's, and everything in it is killed.
//! - runsc: the host's kernel does not see gVisor's processes. A container runs one command at a time, and then all
//!   processes of the agent's account in it are killed. Commands that come meanwhile get containers of their own inside
//!   the same sandbox, which share its private folders. If a process cannot be killed, the whole sandbox is.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Enforcement, Enforcer, Level, Limit, Network, OutputSink, Place, ResourceLimits,
    SandboxError, SandboxRef,
};

use super::bundle::{Doing, Frame};
use super::cgroup_parent::{self, CgroupParent, Overhead, RaisedLimits, path_from_executor};
use super::container_dir::{ContainerDir, ContainerSetup};
use super::gvisor_control::Control;
use super::idmap::SLEEPER;
use super::netns::ProxiedNetns;
use super::runtime::{Runtime, logged_error, too_little};
use super::{Base, OciProblem, unusable};
use crate::cgroup::{Controller, Group, Hierarchy, Kind};
use crate::disk_quota::Ran;
use crate::pool::{Live, Record};
use crate::supervise::host_process::{HostProcess, NullSink, blocking, idle_command};
use crate::view::masked::Masked;
use crate::view::plan::Step;

/// Longest wait for a container to start.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// The polling interval for changes of which we get no notification.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The search path of our own processes in a container.
pub(super) const PATH: &str = "PATH=/usr/local/bin:/usr/bin:/bin";

/// The program of the sleeper. It also waits for orphans, since it becomes their parent.
const SLEEP: [&str; 3] = ["sh", "-c", "while :; do sleep 2147483 & wait; done"];

/// The number of processes of the sleeper.
const SLEEPER_PROCESSES: u64 = 2;

/// The memory that gVisor itself needs, in addition to the container's limit.
const SENTRY_BYTES: u64 = 64 << 20;

/// The parent of a new container.
pub(super) enum Within<'a> {
    Executor,
    Session(Arc<CgroupParent>),
    Container(&'a Container),
}

/// A running container.
pub(super) struct Container {
    record: Record,
    pub(super) made: SandboxRef,
    pub(super) limits: ResourceLimits,
    pub(super) network: Network,
    /// The network namespace with the proxy, if it may reach listed hosts only.
    pub(super) netns: Option<ProxiedNetns>,
    pub(super) runtime: Runtime,
    /// The cgroup of gVisor itself, since a cgroup with children may have no processes of its own.
    pub(super) sentry: Option<Group>,
    _raised: RaisedLimits,
    /// The cgroup of the whole container.
    pub(super) parent: Arc<CgroupParent>,
    // Dropped after the cgroups, since its `StateDir` removes the cgroups above all of them.
    pub(super) dir: ContainerDir,
    masked: Masked,
    runtime_task: Mutex<Option<JoinHandle<()>>>,
    /// Cancelled to end the container.
    pub(super) stop: CancellationToken,
    /// Cancelled when the container has ended.
    pub(super) gone: CancellationToken,
    /// The control socket of a gVisor sandbox, if it passed the test.
    pub(super) control: Option<Control>,
    /// Locked by the one command that runs in a gVisor container itself.
    pub(super) lane: tokio::sync::Mutex<()>,
    pub(super) calls: AtomicU64,
    is_removed: AtomicBool,
}

impl Drop for Container {
    fn drop(&mut self) {
        // Only has an effect if `end` was not awaited. Takes some tens of milliseconds.
        self.stop.cancel();
        self.remove();
    }
}

impl Container {
    /// Makes a container in which commands can run.
    pub(super) async fn start(
        made: SandboxRef,
        confinement: &Confinement,
        base: &Base,
        within: Within<'_>,
    ) -> Result<Arc<Self>, SandboxError> {
        let netns = match &confinement.network {
            Network::Hosts(hosts) => Some(
                ProxiedNetns::open(&made, hosts)
                    .await
                    .map_err(|error| SandboxError::creation("making a network with a proxy", error))?,
            ),
            Network::None | Network::Open => None,
        };
        let limits = match (made.level, &confinement.place) {
            // The host cannot distinguish the commands in a gVisor sandbox, so all share the limits of the first one.
            (Level::Gvisor, _) | (_, Place::Own) => confinement.place_limits.within(confinement.limits),
            _ => confinement.place_limits,
        };
        let (above, outer, limits) = match within {
            Within::Executor => (None, None, limits),
            Within::Session(parent) => (Some(parent), None, limits),
            Within::Container(outer) => {
                (Some(Arc::clone(&outer.parent)), Some(outer.made.id.clone()), limits.within(outer.limits))
            }
        };
        let parent = CgroupParent::make(&made.id.0, made.level, &limits, above, &base.hierarchy)
            .map_err(|error| SandboxError::creation("making a cgroup", error))?;
        let (raised, sentry) = raise_for_runtime(&parent, made.level)
            .map_err(|error| SandboxError::creation("limiting a cgroup", error))?;
        let dir = make_dir(Arc::clone(&base.setup), made.id.0.clone(), confinement.clone()).await?;
        // Noted before the runtime makes them: a start that fails has made some, too.
        dir.setup.home.note_groups(parent.foreign().iter().filter_map(|group| cgroup_parent::above(group).pop()));
        let enforcement = enforcement(made.level, &base.hierarchy);
        let record = Record::new(made.clone(), &confinement.place, outer, limits, enforcement);
        let container = Self {
            record,
            masked: Masked::new(dir.masked.clone()),
            limits,
            network: confinement.network.clone(),
            netns,
            made,
            runtime: base.runtime.clone(),
            sentry,
            _raised: raised,
            parent,
            dir,
            runtime_task: Mutex::default(),
            stop: CancellationToken::new(),
            gone: CancellationToken::new(),
            control: None,
            lane: tokio::sync::Mutex::default(),
            calls: AtomicU64::new(0),
            is_removed: AtomicBool::new(false),
        };
        match container.start_up(&base.hierarchy).await {
            Ok(container) => Ok(Arc::new(container)),
            Err((container, error)) => {
                Arc::new(container).stop_and_remove().await;
                Err(error)
            }
        }
    }

    async fn start_up(mut self, hierarchy: &Hierarchy) -> Result<Self, (Self, SandboxError)> {
        let started = async {
            let starting = self.parent.raise_for_start().map_err(|error| self.failed(error))?;
            self.write_config(hierarchy)?;
            self.start_runtime().await?;
            self.wait_until_running().await?;
            drop(starting);
            if self.made.level == Level::Gvisor {
                self.control = Control::of(&self.made.id.0, &self.runtime.root).await;
            }
            self.settle_groups(hierarchy)?;
            if self.masked.are_unchanged() {
                return Ok(());
            }
            let reason =
                format!("{}: a file that it hides or protects was replaced meanwhile; try again", self.made.level);
            Err(SandboxError::creation_because(reason))
        };
        match started.await {
            Ok(()) => {
                // The container has mounted them by now.
                self.dir.tree.lent.clear();
                Ok(self)
            }
            Err(error) => Err((self, error)),
        }
    }

    fn write_config(&self, hierarchy: &Hierarchy) -> Result<(), SandboxError> {
        let doing = Doing {
            words: SLEEP.map(String::from).into(),
            environment: vec![PATH.into()],
            folder: Path::new("/"),
            user: SLEEPER,
            // In gVisor, commands have the limit of open files of the first process.
            open_files: self.limits.open_files.filter(|_| self.made.level == Level::Gvisor),
            has_terminal: false,
        };
        let groups = (self.made.level != Level::Gvisor).then(|| groups_path(&self.parent.group, hierarchy)).flatten();
        let annotations = self.annotations("sandbox");
        let joined = self.netns.as_ref().map(ProxiedNetns::path);
        let frame = Frame { level: self.made.level, network: &self.network, joined, groups, annotations };
        let config = self.dir.tree.config(&doing, &frame).map_err(io::Error::other);
        config.and_then(|config| write_json(&self.file("config.json"), &config)).map_err(|error| self.failed(error))
    }

    /// Returns annotations that tell gVisor which containers belong together and which private folders they share.
    pub(super) fn annotations(&self, kind: &str) -> Vec<(String, String)> {
        if self.made.level != Level::Gvisor {
            return Vec::new();
        }
        let mut told = vec![
            ("io.kubernetes.cri.container-type".to_owned(), kind.to_owned()),
            ("io.kubernetes.cri.sandbox-id".to_owned(), self.made.id.0.clone()),
        ];
        let private = self.dir.steps.iter().filter_map(|step| match step {
            Step::Tmpfs { path, .. } if path != Path::new("/") => Some(path),
            _ => None,
        });
        for (number, path) in private.enumerate() {
            let hint = |key: &str, value: &str| (format!("dev.gvisor.spec.mount.m{number}.{key}"), value.to_owned());
            told.extend([hint("share", "pod"), hint("type", "tmpfs"), hint("options", "rw")]);
            told.push(hint("source", &super::bundle::source_of_memory(path)));
        }
        told
    }

    /// Starts the runtime with the sleeper, in a task that runs as long as the container.
    async fn start_runtime(&self) -> Result<(), SandboxError> {
        let process = HostProcess::new().await.map_err(|error| self.failed(error))?;
        if self.made.level == Level::Gvisor {
            self.join(&process).await?;
        }
        let (bundle, pid_file) = (text(&self.dir.folder()), text(&self.file("pid")));
        let words = ["run", "--bundle", &bundle, "--pid-file", &pid_file, &self.made.id.0];
        let words = self.runtime.words(&self.file("log"), &self.network, &words);
        let (runtime, stop, gone) = (self.runtime.clone(), self.stop.clone(), self.gone.clone());
        let runtime_task = tokio::spawn(async move {
            let _ = process.run(&runtime.program, words, &idle_command(), Duration::ZERO, &NullSink, &stop).await;
            gone.cancel();
        });
        *self.runtime_task.lock().unwrap_or_else(PoisonError::into_inner) = Some(runtime_task);
        Ok(())
    }

    /// Moves a supervisor to gVisor's cgroup, so that its children start there.
    pub(super) async fn join(&self, process: &HostProcess) -> Result<(), SandboxError> {
        let group = self.sentry.as_ref().unwrap_or(&self.parent.group);
        let (folders, pid) = (group.folders().to_vec(), process.pid());
        let join = move || {
            let number = pid.as_raw_pid().to_string();
            folders.iter().try_for_each(|folder| fs::write(folder.join("cgroup.procs"), &number))
        };
        blocking(join).await.map_err(|error| self.failed(error))
    }

    /// Waits until commands can run in it.
    async fn wait_until_running(&self) -> Result<(), SandboxError> {
        let standing = async {
            while !self.gone.is_cancelled() {
                if self.file("pid").exists() && self.is_running().await {
                    return Ok(());
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
            Err(logged_error(&self.file("log")).unwrap_or_else(|| "its first process ended at once".into()))
        };
        let stood = tokio::time::timeout(START_PATIENCE, standing).await;
        let stood = stood.unwrap_or_else(|_| Err(format!("it was not ready within {} s", START_PATIENCE.as_secs())));
        let level = self.made.level;
        stood.map_err(|told| match self.limits.memory_bytes {
            // The runtime has already removed the cgroup, whose counters would show more.
            Some(allowed) if told.contains("OOM-killed") => {
                let told = too_little(&told, Limit::MemoryBytes, allowed);
                SandboxError::creation(level.as_str(), told)
            }
            _ => unusable(level, told).at(level),
        })
    }

    /// Returns true if the sleeper runs. Then runc has written the pid file; runsc writes it before, so it is asked.
    async fn is_running(&self) -> bool {
        if self.made.level != Level::Gvisor {
            return true;
        }
        let state = self.ask(&["state", &self.made.id.0]).await.unwrap_or_default();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap_or_default();
        state.get("status").and_then(|status| status.as_str()) == Some("running")
    }

    /// Makes sure that commands can have cgroups below the container's.
    fn settle_groups(&self, hierarchy: &Hierarchy) -> Result<(), SandboxError> {
        if self.made.level == Level::Gvisor {
            return Ok(());
        }
        let pid = fs::read_to_string(self.file("pid")).map_err(|error| self.failed(error))?;
        let is_there = |folder: &PathBuf| {
            let there = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            there.lines().any(|line| line == pid.trim())
        };
        let folders = self.parent.group.folders();
        if folders.is_empty() || !folders.iter().all(is_there) {
            let problem = "the runtime did not put the container where we can limit and end it".into();
            let hint = "let wieldy make control groups, see `wieldy doctor`".into();
            return Err(OciProblem { problem, hint }.at(self.made.level));
        }
        if hierarchy.kind() == Kind::V2 {
            // On cgroup v2, only a cgroup without processes may have limited children.
            for folder in folders {
                let inner = folder.join("sleeper");
                let moved = fs::create_dir(&inner).and_then(|()| fs::write(inner.join("cgroup.procs"), pid.trim()));
                moved.map_err(|error| self.failed(error))?;
            }
        }
        Ok(())
    }

    /// Returns true if the container has ended, even if its end was not reported yet.
    pub(super) fn is_gone(&self) -> bool {
        if self.gone.is_cancelled() || self.stop.is_cancelled() {
            return true;
        }
        let pid = fs::read_to_string(self.file("pid")).unwrap_or_default();
        let stat = fs::read_to_string(Path::new("/proc").join(pid.trim()).join("stat")).unwrap_or_default();
        pid.is_empty() || !is_of_living(&stat)
    }

    /// Ends everything in it and takes it away.
    async fn stop_and_remove(self: Arc<Self>) {
        self.stop.cancel();
        let runtime_task = self.runtime_task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(runtime_task) = runtime_task {
            let _ = runtime_task.await;
        }
        let _ = tokio::task::spawn_blocking(move || self.remove()).await;
    }

    /// Kills the remaining processes, and makes the runtime delete the container. Blocks.
    fn remove(&self) {
        if self.is_removed.swap(true, Ordering::AcqRel) {
            return;
        }
        let _ = self.parent.group.kill();
        let _ = self.runtime.ask(&self.file("asked.log"), &self.network, &["delete", "--force", &self.made.id.0]);
    }

    pub(super) async fn ask(&self, words: &[&str]) -> io::Result<Vec<u8>> {
        let (runtime, network, log) = (self.runtime.clone(), self.network.clone(), self.file("asked.log"));
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        blocking(move || {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            runtime.ask(&log, &network, &words)
        })
        .await
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.folder().join(name)
    }

    pub(super) fn failed(&self, error: io::Error) -> SandboxError {
        SandboxError::creation(self.made.level.as_str(), error)
    }
}

impl Live for Container {
    fn record(&self) -> &Record {
        &self.record
    }

    fn is_alive(&self) -> bool {
        !self.is_gone()
    }

    fn is_intact(&self) -> bool {
        self.masked.are_unchanged()
    }

    fn replaced(&self) -> Option<PathBuf> {
        self.masked.replaced()
    }

    async fn run(
        self: &Arc<Self>,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> Result<Ran, SandboxError> {
        self.run_command(command, confinement, output, stop).await
    }

    async fn end(self: Arc<Self>, _linger: bool) {
        self.stop_and_remove().await;
    }
}

/// Returns true if the `stat` file of a process in `/proc` says that it is alive. The first process of a namespace
/// that is ending stays until all others are gone, and only a flag distinguishes it from a living one.
fn is_of_living(stat: &str) -> bool {
    const ENDING: u64 = 0x4;
    // The name comes before, in parentheses, and may contain any character.
    let Some((_, after_name)) = stat.rsplit_once(')') else { return false };
    let mut fields = after_name.split_whitespace();
    let is_zombie = fields.next().is_none_or(|state| matches!(state, "Z" | "X"));
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    !is_zombie && flags.is_some_and(|flags| flags & ENDING == 0)
}

/// Raises the limits of a container's cgroups for its permanent processes. For gVisor, also makes a cgroup for them.
fn raise_for_runtime(parent: &Arc<CgroupParent>, level: Level) -> io::Result<(RaisedLimits, Option<Group>)> {
    if level == Level::Gvisor {
        let raised = parent.raise(Overhead { memory_bytes: SENTRY_BYTES, processes: 0 })?;
        return Ok((raised, Some(parent.group.child("sentry")?)));
    }
    Ok((parent.raise(Overhead { memory_bytes: 0, processes: SLEEPER_PROCESSES })?, None))
}

/// Returns the enforcer of each limit at this level.
pub(crate) fn enforcement(level: Level, hierarchy: &Hierarchy) -> Vec<Enforcement> {
    let kernel = |controller| if hierarchy.can(controller) { Enforcer::Kernel } else { Enforcer::Nobody };
    let processes = if level == Level::Gvisor { Enforcer::Nobody } else { kernel(Controller::Pids) };
    let by = [
        (Limit::CpuMillicores, kernel(Controller::Cpu)),
        (Limit::MemoryBytes, kernel(Controller::Memory)),
        (Limit::Processes, processes),
        (Limit::OpenFiles, Enforcer::KernelPerProcess),
        // Private folders are limited to this size; a watcher counts what is written to the workspace.
        (Limit::DiskBytes, Enforcer::Watcher),
        (Limit::DiskFiles, Enforcer::Watcher),
        (Limit::OutputBytes, Enforcer::Executor),
    ];
    by.map(|(limit, by)| Enforcement { limit, by }).into()
}

/// Returns the path by which a runtime finds the group. On cgroup v2 it begins at the mount point. On v1 the executor
/// may be in another cgroup for each controller, so it begins there.
fn groups_path(group: &Group, hierarchy: &Hierarchy) -> Option<PathBuf> {
    let folder = group.folders().first()?;
    if hierarchy.kind() == Kind::V2 {
        let mount = mount_point(folder);
        return Some(Path::new("/").join(folder.strip_prefix(mount).ok()?));
    }
    path_from_executor(group, hierarchy).map(Path::to_owned)
}

/// Returns the mount point of a folder's file system.
fn mount_point(folder: &Path) -> &Path {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    folder.ancestors().take_while(|above| device(above) == device(folder)).last().unwrap_or(folder)
}

pub(super) fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<()> {
    fs::write(path, serde_json::to_vec(value)?)
}

pub(super) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Makes the folder of a container on a blocking thread.
pub(super) async fn make_dir(
    setup: Arc<ContainerSetup>,
    id: String,
    confinement: Confinement,
) -> Result<ContainerDir, SandboxError> {
    let made = tokio::task::spawn_blocking(move || ContainerDir::make(setup, &id, &confinement)).await;
    made.unwrap_or_else(|error| Err(SandboxError::creation_from(error)))
}

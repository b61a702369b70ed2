//! Boots, uses and ends one guest: Firecracker's process, the guest's disk, and the commands that run in it.
//!
//! Firecracker runs under a supervisor of the fork server, in a session of its own, without a terminal and with only
//! `PATH` in its environment. So it dies with the executor, and its guest with it. Its files are in a folder below the
//! level's state folder, which is swept if it was left behind.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use wieldy_core::secrets::PROTECTED;
use wieldy_core::{
    Command, Confinement, Denial, Ended, Enforcement, Enforcer, Exit, Limit, Network, OutputSink, Place,
    ResourceLimits, SandboxError, SandboxRef, Stream, Usage,
};

use super::api::Guest;
use super::commands;
use super::frames::{self, Kind, Prepare};
use super::sync::{Ours, Room};
use super::{Base, FirecrackerOptions};
use crate::cgroup::{Controller, Group, GroupLimits, Hierarchy};
use crate::disk_quota::Ran;
use crate::pool::{Live, Record};
use crate::supervise::host_process::{HostProcess, blocking, idle_command};
use crate::supervise::protocol::{RunOrder, RunReport, SupervisorReport};
use crate::supervise::run::{Requested, ended, prepare};
use crate::usage::{measured, overrun};
use crate::view::plan::{Plan, Step};

/// Longest wait for Firecracker to listen, and for a guest to boot.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// The interval between attempts to connect.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Longest synchronization of workspaces, even if the guest keeps sending.
const SYNC_MAX: Duration = Duration::from_secs(600);

/// Defaults for a guest without limits.
const MEMORY_BYTES: u64 = 1 << 30;
const DISK_BYTES: u64 = 1 << 30;
const DISK_FILES: u64 = 250_000;

/// Maximum length of all paths together that a guest sends in one sync.
const PATH_BYTES_MAX: usize = 64 << 20;

/// The memory that the guest's kernel needs, and that Firecracker needs in addition.
const KERNEL_BYTES: u64 = 64 << 20;
const MONITOR_BYTES: u64 = 64 << 20;

/// Maximum number of processors that Firecracker allows.
const PROCESSORS_MAX: u64 = 32;

/// The longest path that a socket can have.
const SOCKET_PATH_BYTES_MAX: usize = 107;

const MIB: u64 = 1 << 20;

/// A running guest.
pub(super) struct Machine {
    record: Record,
    folder: Folder,
    /// The cgroup, until the task that runs Firecracker takes and later removes it.
    group: Mutex<Option<Group>>,
    console: Arc<Console>,
    vmm_task: Mutex<Option<JoinHandle<()>>>,
    /// Cancelled to end the guest.
    stop: CancellationToken,
    /// Cancelled when the guest has ended.
    gone: CancellationToken,
    /// Locked during a sync.
    workspace: Arc<tokio::sync::Mutex<Ours>>,
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Machine {
    /// Boots a guest in which commands can run.
    pub(super) async fn start(
        made: SandboxRef,
        confinement: &Confinement,
        options: &FirecrackerOptions,
        base: &Base,
        plan: &Plan,
    ) -> Result<Arc<Self>, SandboxError> {
        refuse_network_and_mounts(confinement)?;
        let limits = match confinement.place {
            Place::Own => confinement.place_limits.within(confinement.limits),
            // The place's limits come first, since the limits of one call must not restrict other calls.
            _ => confinement.place_limits.or(confinement.limits),
        };
        let group = base.hierarchy.group(&made.id.0).map_err(|error| creation("making a cgroup", error))?;
        group.set(&guest_group_limits(&limits)).map_err(|error| creation("limiting a cgroup", error))?;
        // It contains sockets, whose paths must be short.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let name = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
        let folder = Folder::make(base.home.container(&name)).map_err(|error| creation("making a folder", error))?;
        let workspace = workspace(confinement, plan, &limits)
            .map_err(|error| creation(&format!("the workspace `{}`", confinement.workspace.display()), error))?;
        let machine = Arc::new(Self {
            record: Record::new(made, &confinement.place, None, limits, enforcement(&base.hierarchy)),
            folder,
            group: Mutex::new(Some(group)),
            console: Arc::default(),
            vmm_task: Mutex::default(),
            stop: CancellationToken::new(),
            gone: CancellationToken::new(),
            workspace: Arc::new(tokio::sync::Mutex::new(workspace)),
        });
        match machine.boot(confinement, options, &base.program).await {
            Ok(()) => Ok(machine),
            Err(error) => {
                machine.remove().await;
                Err(error)
            }
        }
    }

    async fn boot(
        &self,
        confinement: &Confinement,
        options: &FirecrackerOptions,
        program: &Path,
    ) -> Result<(), SandboxError> {
        let (disk, mut workspace) = (self.file("disk"), Arc::clone(&self.workspace).lock_owned().await);
        let made = blocking(move || {
            let bytes = workspace.measure()?;
            make_disk(&disk, bytes)
        });
        made.await.map_err(|error: io::Error| creation("the guest's disk", error))?;
        self.start_vmm(program);
        let api = self.file("api");
        self.until(|| tokio::net::UnixStream::connect(api.clone())).await?;
        let guest = guest(self.record.limits(), options, self.file("disk"), self.file("vsock"));
        guest.start(&api).await.map_err(|error| SandboxError::creation("firecracker", error))?;
        let vsock = self.file("vsock");
        let stream = self.until(|| commands::connect(vsock.clone())).await?;
        let order = Prepare {
            workspace: confinement.workspace.clone(),
            room_bytes: self.record.limits().disk_bytes.unwrap_or(DISK_BYTES),
            room_files: self.record.limits().disk_files.unwrap_or(DISK_FILES),
        };
        let prepared = tokio::time::timeout(START_PATIENCE, prepare_guest(stream, &order)).await;
        let prepared = prepared.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        prepared.map_err(|error| self.not_booted(&format!("the guest could not be prepared: {error}")))
    }

    /// Starts a task that runs Firecracker until the guest is ended, and then removes its cgroup.
    fn start_vmm(&self, program: &Path) {
        let words =
            ["--api-sock", &self.file("api").to_string_lossy(), "--id", &self.record.id().0].map(String::from).into();
        let (program, console, group) = (program.to_owned(), Arc::clone(&self.console), lock(&self.group).take());
        let (stop, gone) = (self.stop.clone(), self.gone.clone());
        let folders = group.as_ref().map(|group| group.folders().to_vec()).unwrap_or_default();
        let running = async move {
            let keep = async {
                let process = HostProcess::new().await?;
                let pid = process.pid().as_raw_pid().to_string();
                let join = move || folders.iter().try_for_each(|folder| fs::write(folder.join("cgroup.procs"), &pid));
                blocking(join).await?;
                let ran = process.run(&program, words, &idle_command(), Duration::ZERO, &*console, &stop).await;
                ran.map(drop).map_err(|error| io::Error::other(error.message()))
            };
            if let Err(error) = keep.await {
                let error: io::Error = error;
                console.write(Stream::Stderr, error.to_string().as_bytes());
            }
            let _ = blocking(move || group.map_or(Ok(()), |group| group.kill())).await;
            gone.cancel();
        };
        *lock(&self.vmm_task) = Some(tokio::spawn(running));
    }

    /// Repeats an attempt until it succeeds, Firecracker has ended or [`START_PATIENCE`] is over.
    async fn until<T, F>(&self, attempt: impl Fn() -> F) -> Result<T, SandboxError>
    where
        F: Future<Output = io::Result<T>>,
    {
        let trying = async {
            loop {
                match attempt().await {
                    Ok(done) => return Ok(done),
                    Err(error) if self.gone.is_cancelled() => return Err(format!("it ended at once ({error})")),
                    Err(_) => tokio::time::sleep(LOOK_EVERY).await,
                }
            }
        };
        let tried = tokio::time::timeout(START_PATIENCE, trying).await;
        let tried = tried.unwrap_or_else(|_| Err(format!("it was not ready within {} s", START_PATIENCE.as_secs())));
        tried.map_err(|reason| self.not_booted(&reason))
    }

    /// Returns the error of a guest that does not boot, with the last line of its console.
    fn not_booted(&self, reason: &str) -> SandboxError {
        match self.console.last() {
            Some(said) => creation_because(&format!("{reason}; it last said: {said}")),
            None => creation_because(reason),
        }
    }

    fn exit(&self, ended: Ended, usage: Usage, overrun: Option<wieldy_core::Overrun>, denials: Vec<Denial>) -> Exit {
        Exit { ended, usage, sandbox: self.record.made().clone(), overrun, denials }
    }

    /// Synchronizes the workspaces. If that fails or takes too long, the guest is ended, so that it changes nothing
    /// here after this has returned.
    async fn sync(&self, mut given_up: Pin<&mut impl Future<Output = ()>>) -> Result<Vec<Denial>, SandboxError> {
        let doing = "firecracker: bringing the workspace over";
        let stopped = "the run was stopped, and it was not done in time";
        // The lock comes before the connection: the agent blocks until the client of a connection has sent its order.
        let mut workspace = tokio::select! {
            biased;
            () = given_up.as_mut() => return Err(SandboxError::crashed(doing, stopped)),
            workspace = Arc::clone(&self.workspace).lock_owned() => workspace,
        };
        let vsock = self.file("vsock");
        let work = move || -> io::Result<_> { workspace.sync(&mut commands::connect_blocking(&vsock)?) };
        let mut synced = pin!(blocking(work));
        let error = tokio::select! {
            biased;
            synced = synced.as_mut() => match synced {
                Ok(denials) => return Ok(denials),
                Err(error) => {
                    self.remove().await;
                    return Err(SandboxError::crashed(doing, error));
                }
            },
            () = given_up => stopped.to_owned(),
            () = tokio::time::sleep(SYNC_MAX) => format!("it was not done within {} s", SYNC_MAX.as_secs()),
        };
        self.remove().await;
        // Its connection was closed with the guest.
        let _ = synced.await;
        Err(SandboxError::crashed(doing, error))
    }

    /// Ends Firecracker, and waits until it is gone.
    async fn remove(&self) {
        self.stop.cancel();
        let vmm_task = lock(&self.vmm_task).take();
        if let Some(vmm_task) = vmm_task {
            let _ = vmm_task.await;
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.0.join(name)
    }
}

impl Live for Machine {
    fn record(&self) -> &Record {
        &self.record
    }

    fn is_alive(&self) -> bool {
        !self.gone.is_cancelled() && !self.stop.is_cancelled()
    }

    /// Runs a command to its end. The workspace is as here when it begins, and here as it left it when this returns.
    async fn run(
        self: &Arc<Self>,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> Result<Ran, SandboxError> {
        let (order, requested) = order(command, confinement)?;
        // A guest does not say which command made a change, so changes of commands that run beside this one are
        // reported here, too.
        let mut given_up = pin!(commands::given_up(stop, Duration::from_millis(order.grace_ms)));
        let mut denials = self.sync(given_up.as_mut()).await?;
        let outcome = tokio::select! {
            outcome = commands::run(self.file("vsock"), command, order, &**output, stop, given_up.as_mut()) => outcome,
            () = self.gone.cancelled() => Err(io::Error::other("Firecracker ended")),
        };
        let report = match outcome {
            Ok(SupervisorReport::Ended(report)) => bounded(report),
            Ok(SupervisorReport::NotStarted { step, errno }) => return Err(requested.not_started(command, step, errno)),
            Ok(_) => {
                return Err(SandboxError::crashed_because(
                    "firecracker: the guest sent an unexpected report; copy this `wieldy` to the guest again",
                ));
            }
            // It kept its guest from its work until that was ended with it.
            Err(error) if error.kind() == io::ErrorKind::TimedOut && stop.is_cancelled() => {
                self.remove().await;
                let exit = self.exit(Ended::Signal(libc::SIGKILL), Usage::default(), None, denials);
                return Ok(Ran { exit, files_made: 0 });
            }
            // The agent says why it cannot say how the command went: the guest is there, only the command's supervisor
            // is not.
            Err(error) if error.kind() == io::ErrorKind::Other && !self.gone.is_cancelled() => {
                return Err(SandboxError::crashed(format!("`{}` was lost", command.program), error));
            }
            Err(error) => {
                self.remove().await;
                return Err(SandboxError::crashed("firecracker", error));
            }
        };
        let how = ended(report.status);
        let passed =
            report.overrun.map(|(limit, used)| overrun(limit, used, &confinement.limits, &confinement.place_limits));
        match self.sync(given_up).await {
            Ok(refused) => denials.extend(refused),
            // The limit is the reason, and says more.
            Err(error) if passed.is_some() => {
                let (path, reason) = (confinement.workspace.display().to_string(), error.to_string());
                denials.push(Denial::Filesystem { path, reason });
            }
            Err(error) => return Err(error),
        }
        Ok(Ran { exit: self.exit(how, measured(&report), passed, denials), files_made: report.files_made })
    }

    async fn end(self: Arc<Self>, _linger: bool) {
        self.remove().await;
    }
}

/// A guest's folder, which is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn make(path: PathBuf) -> io::Result<Self> {
        let longest = path.join("vsock");
        if longest.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
            let told =
                format!("`{}` is too long for a socket; use a state folder with a shorter path", longest.display());
            return Err(io::Error::other(told));
        }
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The end of the output of Firecracker and the guest's kernel, for the error of a guest that does not start.
#[derive(Default)]
struct Console(Mutex<Vec<u8>>);

impl Console {
    /// Returns the last line that is not empty.
    fn last(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_owned();
        let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty())?;
        Some(line.chars().filter(|c| !c.is_control()).collect())
    }
}

impl OutputSink for Console {
    fn write(&self, _stream: Stream, bytes: &[u8]) {
        const KEPT_BYTES: usize = 4096;
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.extend_from_slice(bytes);
        let surplus = said.len().saturating_sub(KEPT_BYTES);
        said.drain(..surplus);
    }
}

fn creation(doing: &str, error: io::Error) -> SandboxError {
    SandboxError::creation(format!("firecracker: {doing}"), error)
}

fn creation_because(reason: &str) -> SandboxError {
    SandboxError::creation_because(format!("firecracker: {reason}"))
}

/// Refuses a confinement that this level cannot provide: one with a network or with mounts.
fn refuse_network_and_mounts(confinement: &Confinement) -> Result<(), SandboxError> {
    if confinement.network != Network::None {
        return Err(creation_because("a guest has no network; ask for the network `none`, or use the level `native`"));
    }
    match confinement.files.mounts.first() {
        None => Ok(()),
        Some(mount) => Err(creation_because(&format!(
            "nothing but the workspace is brought into a guest, and so not `{}`; leave the mount out, put it into the root file \
             system, or use the level `native`",
            mount.source.display()
        ))),
    }
}

/// Opens our side of the workspace, with the paths that the native level would hide and protect.
fn workspace(confinement: &Confinement, plan: &Plan, limits: &ResourceLimits) -> io::Result<Ours> {
    let root = confinement.workspace.canonicalize()?;
    let inside =
        |path: &Path| Some(path.strip_prefix(&root).ok()?.to_str()?.to_owned()).filter(|path| !path.is_empty());
    let hidden = plan.steps.iter().filter(|step| matches!(step, Step::Hide { .. }));
    let hidden = hidden.filter_map(|step| inside(step.path())).collect();
    let protected = plan.steps.iter().filter(|step| matches!(step, Step::Protect { .. })).map(Step::path);
    let missing = plan.placeholders.iter().map(|placeholder| placeholder.path.as_path());
    // No placeholder is needed on the host to protect a name, so all are protected, for programs that the user does not
    // have as well.
    let named = PROTECTED.iter().map(|name| name.path.to_owned());
    let protected = protected.chain(missing).filter_map(inside).chain(named).collect();
    let room = Room {
        bytes: limits.disk_bytes.unwrap_or(DISK_BYTES),
        // Doubled: as many may be there already.
        files: usize::try_from(limits.disk_files.unwrap_or(DISK_FILES)).unwrap_or(usize::MAX).saturating_mul(2),
        path_bytes: PATH_BYTES_MAX,
    };
    Ours::new(&root, hidden, protected, room)
}

/// Makes an empty file system of this size, in a sparse file.
fn make_disk(path: &Path, bytes: u64) -> io::Result<()> {
    fs::File::create_new(path)?.set_len(bytes)?;
    let mut mkfs = std::process::Command::new("mkfs.ext4");
    mkfs.args(["-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1"]).arg(path);
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let output = mkfs.env_clear().env("PATH", path).stdin(Stdio::null()).output();
    let output = output.map_err(|error| io::Error::new(error.kind(), format!("`mkfs.ext4`: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("`mkfs.ext4`: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

async fn prepare_guest(mut stream: tokio::net::UnixStream, order: &Prepare) -> io::Result<()> {
    frames::send_to(&mut stream, Kind::Prepare, &serde_json::to_vec(order)?).await?;
    let ready = frames::Incoming::default().next(&mut stream).await?.expect(Kind::Ready)?;
    let (theirs, ours) = (String::from_utf8_lossy(&ready.bytes).into_owned(), env!("CARGO_PKG_VERSION"));
    if theirs == ours {
        return Ok(());
    }
    let told =
        format!("its agent is of version `{}`, not {ours}; build the root file system anew", frames::shown(&theirs));
    Err(io::Error::other(told))
}

/// Returns the order for the agent, and the request by which errors are explained.
fn order(command: &Command, confinement: &Confinement) -> Result<(RunOrder, Requested), SandboxError> {
    let order = prepare(command, confinement);
    let mut order = order.map_err(|source| SandboxError::Start { program: command.program.clone(), source })?;
    for (name, value) in [("HOME", super::agent::HOME), ("USER", "agent"), ("LOGNAME", "agent")] {
        order.environment.retain(|(known, _)| known != name);
        order.environment.push((name.into(), value.into()));
    }
    let (limits, own) = (&mut order.limits, &confinement.limits);
    (limits.disk_bytes, limits.disk_files) = (own.disk_bytes, own.disk_files);
    limits.counts_files = confinement.place_limits.disk_files.is_some();
    (limits.memory_bytes, limits.processes) = (own.memory_bytes, own.processes);
    let requested = Requested::of(&order);
    order.folder.clone_from(&command.folder);
    order.workspace = PathBuf::new();
    Ok((order, requested))
}

/// Limits the figures that a guest reports, so that they can be converted without overflow.
fn bounded(report: RunReport) -> RunReport {
    const MAX: u64 = u64::MAX / 1024;
    RunReport {
        memory_peak_kib: report.memory_peak_kib.min(MAX),
        blocks_read: report.blocks_read.min(MAX),
        blocks_written: report.blocks_written.min(MAX),
        ..report
    }
}

fn guest(limits: &ResourceLimits, options: &FirecrackerOptions, disk: PathBuf, vsock: PathBuf) -> Guest {
    let memory_bytes = limits.memory_bytes.unwrap_or(MEMORY_BYTES).saturating_add(KERNEL_BYTES);
    let processors = limits.cpu_millicores.unwrap_or(1000).div_ceil(1000).clamp(1, PROCESSORS_MAX);
    let (kernel, rootfs) = (options.kernel.clone().unwrap_or_default(), options.rootfs.clone().unwrap_or_default());
    Guest {
        // Firecracker needs one processor or an even number.
        processors: if processors == 1 { 1 } else { processors.next_multiple_of(2) },
        memory_mib: memory_bytes.div_ceil(MIB),
        kernel,
        kernel_arguments: format!("console=ttyS0 loglevel=3 reboot=k panic=1 pci=off init={}", options.init.display()),
        rootfs,
        disk,
        vsock,
    }
}

/// Returns the limits of Firecracker's own process: its threads are the guest's processors, and its memory contains the
/// guest's.
fn guest_group_limits(limits: &ResourceLimits) -> GroupLimits {
    let memory_bytes = limits.memory_bytes.map(|bytes| bytes.saturating_add(KERNEL_BYTES + MONITOR_BYTES));
    GroupLimits { cpu_millicores: limits.cpu_millicores, memory_bytes, processes: None }
}

/// Returns the enforcer of each limit at this level.
pub(crate) fn enforcement(hierarchy: &Hierarchy) -> Vec<Enforcement> {
    let cpu = if hierarchy.can(Controller::Cpu) { Enforcer::Kernel } else { Enforcer::Nobody };
    let by = [
        (Limit::CpuMillicores, cpu),
        // The guest has no more memory, and its agent enforces the limits of single calls.
        (Limit::MemoryBytes, Enforcer::Kernel),
        (Limit::Processes, Enforcer::Kernel),
        (Limit::OpenFiles, Enforcer::KernelPerProcess),
        (Limit::DiskBytes, Enforcer::Watcher),
        (Limit::DiskFiles, Enforcer::Watcher),
        (Limit::OutputBytes, Enforcer::Executor),
    ];
    by.map(|(limit, by)| Enforcement { limit, by }).into()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

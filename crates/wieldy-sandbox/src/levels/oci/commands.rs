//! Runs commands in a container by the runtime's `exec`: follows and measures them, and kills everything that they
//! started.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tokio::io::Interest;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Ended, Exit, Level, Limit, OutputSink, Overrun, ResourceLimits, SandboxError, Usage,
};

use super::bundle::{Doing, process};
use super::cgroup_parent::{RaisedLimits, STARTING, container_group_limits};
use super::container::{Container, text, write_json};
use super::idmap::AGENT;
use super::runtime::{ended, logged_error, not_started, too_little};
use crate::cgroup::{Group, GroupLimits, Meter, Peak, Used, Whose};
use crate::denials::files::FileDenials;
use crate::disk_quota::Ran;
use crate::supervise::host_process::{HostProcess, blocking};
use crate::supervise::protocol::WatchedLimit;
use crate::supervise::run::{RunOutcome, prepare};
use crate::supervise::supervisor::WATCH_EVERY;
use crate::supervise::watch::BLOCK_BYTES;
use crate::sys;
use crate::usage::{is_told, overrun_of_group};

/// The polling interval for changes of which we get no notification.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Longest wait for a runtime to become the command after it has reported the process id.
const BECOME_PATIENCE: Duration = Duration::from_secs(1);

/// A command to run, with its number and its log file.
pub(super) struct Call<'a> {
    pub(super) command: &'a Command,
    pub(super) confinement: &'a Confinement,
    pub(super) output: &'a dyn OutputSink,
    pub(super) stop: &'a CancellationToken,
    pub(super) doing: Doing<'a>,
    pub(super) number: u64,
    pub(super) log: PathBuf,
}

impl Container {
    /// Runs a command to its end.
    pub(super) async fn run_command(
        &self,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> Result<Ran, SandboxError> {
        let refused = |source: io::Error| SandboxError::Start { program: command.program.clone(), source };
        let order = prepare(command, confinement).map_err(refused)?;
        if command.program.is_empty() {
            return Err(refused(io::Error::new(io::ErrorKind::NotFound, "a program needs a name")));
        }
        let mut environment = command.environment.clone();
        environment.extend(self.dir.environment.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        environment.extend(self.netns.iter().flat_map(|netns| netns.environment.clone()));
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let workspace = confinement.workspace.canonicalize().unwrap_or_else(|_| confinement.workspace.clone());
        let folder = workspace.join(&command.folder);
        let doing = Doing {
            words: std::iter::once(&command.program).chain(&command.arguments).cloned().collect(),
            environment: environment.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            folder: &folder,
            user: AGENT,
            open_files: order.limits.open_files,
            has_terminal: command.terminal.is_some(),
        };
        let log = self.file(&format!("{number}.log"));
        let file_denials = FileDenials::new(&**output);
        let call = Call { command, confinement, output: &file_denials, stop, doing, number, log };
        let listener = self.netns.as_ref().map(|netns| netns.proxy_denials.listen(output));
        let began = Instant::now();
        let (outcome, used) = match self.made.level {
            Level::Gvisor => self.run_unseen(&call).await?,
            _ => self.run_in_group(&call).await?,
        };
        let wall_ms = began.elapsed().as_secs_f64() * 1e3;
        // The runtime waits for the command, so the supervisor's figures include those of both.
        let blocks_written = outcome.as_ref().map_or(0, |outcome| outcome.report.blocks_written);
        let files_made = outcome.as_ref().map_or(0, |outcome| outcome.report.files_made);
        let usage = Usage { wall_ms, ..self.usage(&used, blocks_written * BLOCK_BYTES) };
        let of_disk = outcome.as_ref().ok().and_then(|outcome| overrun_of_disk(outcome, &confinement.limits));
        let was_stopped = stop.is_cancelled();
        let of_group = self.overrun(&used, confinement).filter(|it| !was_stopped || it.limit == Limit::Processes);
        let overrun = of_disk.or(of_group);
        let told = logged_error(&call.log);
        self.forget(number);
        let ended = match (outcome, told) {
            // The limit killed the runtime as well.
            (_, _) if overrun.is_some() && self.made.level == Level::Gvisor => Ended::Signal(libc::SIGKILL),
            (Ok(RunOutcome { ended: Ended::Code(code), .. }), Some(told)) if code != 0 && !self.is_gone() => {
                let told = overrun.map_or(told.clone(), |it| too_little(&told, it.limit, it.allowed));
                return Err(not_started(self.made.level, &command.program, &told));
            }
            (Ok(_) | Err(_), told) if self.is_gone() => {
                let reason = told.unwrap_or_else(|| "its first process was ended".into());
                return Err(SandboxError::crashed(self.made.level.as_str(), reason));
            }
            (Ok(RunOutcome { ended, .. }), _) => ended,
            (Err(error), _) => return Err(error),
        };
        let overrun = overrun.filter(|overrun| is_told(overrun, ended, was_stopped));
        let mut denials = listener.map(|listener| listener.denials()).unwrap_or_default();
        if overrun.is_none() && !stop.is_cancelled() {
            denials.extend(file_denials.denials(ended, command, confinement, &self.dir.steps));
        }
        Ok(Ran { exit: Exit { ended, usage, sandbox: self.made.clone(), overrun, denials }, files_made })
    }

    /// Runs a command in a cgroup of its own, where the host's kernel sees its processes.
    async fn run_in_group(&self, call: &Call<'_>) -> Result<(Result<RunOutcome, SandboxError>, Used), SandboxError> {
        let failed = |error: io::Error| self.failed(error);
        let group = &self.parent.group.child(&format!("call-{}", call.number)).map_err(failed)?;
        let limits = container_group_limits(self.made.level, &call.confinement.limits);
        // A lower limit is for the command only: its runtime needs more to start.
        let processes = limits.processes.map(|count| count.max(STARTING));
        group.set(&GroupLimits { processes, ..limits }).map_err(failed)?;
        let pid_file = self.file(&format!("{}.pid", call.number));
        let (pid_text, place) = (text(&pid_file), self.sub_group(call.number));
        let words = self.exec_words(call, &["--pid-file", &pid_text, "--cgroup", &place]).map_err(failed)?;
        let starting = self.parent.raise_for_start().map_err(failed)?;
        let count = Mutex::new(Count::begin(group.clone(), limits));
        let process = self.process(call).await?.raw();
        let running =
            process.run(&self.runtime.program, words, call.command, call.confinement.grace, call.output, call.stop);
        let following = async {
            let first = self.first_process(&pid_file, starting, &count);
            follow(first, group, call.stop, call.confinement.grace).await;
            std::future::pending().await
        };
        let outcome = tokio::select! {
            outcome = running => outcome,
            never = following => never,
        };
        let outcome = outcome.map(|outcome| RunOutcome { ended: ended(outcome.ended), ..outcome });
        let left = group.clone();
        if blocking(move || left.kill()).await.is_err() {
            // Some processes may be left, so end the whole container.
            self.stop.cancel();
            self.gone.cancelled().await;
        }
        let count = count.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok((outcome, count.used()))
    }

    /// Waits until the first process of a command has ended, or until the command has more processes than allowed. Once
    /// the runtime has become that process, drops `starting` and begins to count the processes.
    async fn first_process(&self, pid_file: &Path, starting: RaisedLimits, count: &Mutex<Count>) {
        let pid = loop {
            let known = fs::read_to_string(pid_file).ok().and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
            match known {
                Some(pid) => break pid,
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        };
        // If the process is gone already, the command has ended.
        let handle = pidfd_open(pid, PidfdFlags::NONBLOCK).ok();
        let handle = handle.and_then(|handle| sys::watched(handle, Interest::READABLE).ok());
        let name = self.made.level.as_str();
        let noted_at = Instant::now();
        while is_on_its_way(pid, name) && noted_at.elapsed() < BECOME_PATIENCE {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        drop(starting);
        count.lock().unwrap_or_else(PoisonError::into_inner).begin_command();
        let Some(handle) = handle else { return };
        let looking = async {
            loop {
                tokio::time::sleep(WATCH_EVERY).await;
                if count.lock().unwrap_or_else(PoisonError::into_inner).is_overrun() {
                    return;
                }
            }
        };
        tokio::select! {
            _ = handle.readable() => {}
            () = looking => {}
        }
    }

    /// Makes a supervisor that limits writes to the workspace.
    pub(super) async fn process(&self, call: &Call<'_>) -> Result<HostProcess, SandboxError> {
        let process = HostProcess::new().await.map_err(|error| self.failed(error))?;
        Ok(process.watching(call.confinement))
    }

    /// Returns the name by which the runtime finds the command's cgroup below the container's.
    fn sub_group(&self, number: u64) -> String {
        let name = format!("call-{number}");
        if self.made.level != Level::Runc {
            return name;
        }
        // On cgroup v1, where each controller has a mount of its own, only the controllers that we use have this
        // cgroup.
        let known = super::cgroup_parent::noted(&self.runtime.root.join(&self.made.id.0));
        let ours = known
            .iter()
            .filter(|(controller, path)| !controller.is_empty() && self.parent.group.folders().contains(path));
        let ours: Vec<&str> = ours.map(|(controller, _)| controller.as_str()).collect();
        if ours.is_empty() { name } else { format!("{}:{name}", ours.join(",")) }
    }

    pub(super) fn exec_words(&self, call: &Call<'_>, more: &[&str]) -> io::Result<Vec<String>> {
        let file = self.file(&format!("{}.json", call.number));
        write_json(&file, &process(&call.doing).map_err(io::Error::other)?)?;
        let file = text(&file);
        let mut words = vec!["exec", "--process", &file];
        words.extend(more);
        words.push(&self.made.id.0);
        Ok(self.runtime.words(&call.log, &self.network, &words))
    }

    /// Removes the files of a call.
    fn forget(&self, number: u64) {
        for kind in ["json", "log", "pid"] {
            let _ = fs::remove_file(self.file(&format!("{number}.{kind}")));
        }
    }

    fn usage(&self, used: &Used, seen_written_bytes: u64) -> Usage {
        let processes_peak = match self.made.level {
            // The host's kernel sees gVisor's threads and not the command's processes: not measured.
            Level::Gvisor => None,
            _ => used.processes_peak.map(|peak| peak.least.max(1)),
        };
        Usage {
            cpu_ms: used.cpu_us.map_or(0.0, |us| us as f64 / 1e3),
            memory_peak_bytes: used.memory_peak_bytes.map_or(0, |peak| peak.least),
            read_bytes: used.bytes_read.unwrap_or(0),
            // On cgroup v1 the kernel counts only writes that bypass the page cache.
            written_bytes: used.bytes_written.unwrap_or(0).max(seen_written_bytes),
            processes_peak,
            wall_ms: 0.0,
        }
    }

    /// Returns the limit that the kernel had to enforce, if any. In gVisor the limit of processes does not count, since
    /// the kernel sees gVisor's own processes only.
    fn overrun(&self, used: &Used, confinement: &Confinement) -> Option<Overrun> {
        let overrun = overrun_of_group(used, &confinement.limits, &self.limits);
        overrun.filter(|overrun| self.made.level != Level::Gvisor || overrun.limit != Limit::Processes)
    }
}

/// Returns the disk limit that a command has exceeded, if any.
fn overrun_of_disk(outcome: &RunOutcome, limits: &ResourceLimits) -> Option<Overrun> {
    let overrun =
        |limit, allowed: Option<u64>, used| Some(Overrun { limit, allowed: allowed?, used, session_used: None });
    match outcome.report.overrun {
        Some((WatchedLimit::DiskBytes, used)) => overrun(Limit::DiskBytes, limits.disk_bytes, used),
        Some((WatchedLimit::DiskFiles, used)) => overrun(Limit::DiskFiles, limits.disk_files, used),
        // A single file has reached the size that all files together may have.
        _ if outcome.ended == Ended::Signal(libc::SIGXFSZ) => {
            overrun(Limit::DiskBytes, limits.disk_bytes, limits.disk_bytes?)
        }
        _ => None,
    }
}

/// Waits for the first process of a command to end, and then kills the others: the runtime itself would wait until the
/// last of them has closed its output. If the command is stopped, the others get SIGTERM, too, and the same grace time.
async fn follow(first: impl Future<Output = ()>, group: &Group, stop: &CancellationToken, grace: Duration) {
    tokio::pin!(first);
    let stopped_at = tokio::select! {
        () = &mut first => None,
        () = stop.cancelled() => Some(Instant::now()),
    };
    if let Some(at) = stopped_at {
        let mut told = Vec::new();
        let has_ended = CancellationToken::new();
        let waiting = async {
            first.await;
            has_ended.cancel();
        };
        let telling = async {
            loop {
                tell_orphans(group, &mut told);
                if has_ended.is_cancelled() && (at.elapsed() >= grace || processes(group).is_empty()) {
                    return;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::join!(waiting, telling);
    }
    let left = group.clone();
    let _ = blocking(move || left.kill()).await;
}

/// Sends SIGTERM once to each process that the supervisor does not see because its parent is gone.
fn tell_orphans(group: &Group, told: &mut Vec<Pid>) {
    for pid in processes(group) {
        if !told.contains(&pid) && !is_below_runtime(pid) {
            let _ = kill_process(pid, Signal::TERM);
            told.push(pid);
        }
    }
}

pub(super) fn processes(group: &Group) -> Vec<Pid> {
    let listed =
        group.folders().first().map(|folder| fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default());
    listed.iter().flat_map(|text| text.lines()).filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
}

/// Returns true if a process descends from the runtime on the host. An orphan in the container descends from the
/// sleeper.
fn is_below_runtime(pid: Pid) -> bool {
    let namespace = |pid: &str| fs::read_link(Path::new("/proc").join(pid).join("ns/pid")).ok();
    let own = namespace("self");
    let mut pid = pid.as_raw_pid().to_string();
    loop {
        let status = fs::read_to_string(Path::new("/proc").join(&pid).join("status")).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // The sleeper is process 1 in the container.
        if field("NSpid:").and_then(|numbers| numbers.split_whitespace().last()) == Some("1") {
            return false;
        }
        let Some(parent) = field("PPid:").filter(|parent| *parent != "0") else { return false };
        if namespace(parent) == own {
            return true;
        }
        pid = parent.to_owned();
    }
}

/// Returns true if a process is still the runtime and has not become the command.
fn is_on_its_way(pid: Pid, runtime: &str) -> bool {
    let name = fs::read_to_string(Path::new("/proc").join(pid.as_raw_pid().to_string()).join("comm"));
    // `runc:[2:INIT]`
    name.is_ok_and(|name| name.strip_prefix(runtime).is_some_and(|rest| rest.starts_with(":[")))
}

/// The usage of a command and its peak of processes, without those of its runtime as far as they can be distinguished.
struct Count {
    group: Group,
    limits: GroupLimits,
    meter: Meter,
    /// True once the runtime has become the command.
    has_become: bool,
    seen: u64,
    is_overrun: bool,
}

impl Count {
    fn begin(group: Group, limits: GroupLimits) -> Self {
        let meter = group.begin();
        Self { group, limits, meter, has_become: false, seen: 1, is_overrun: false }
    }

    /// Notes that all processes are the command's from now on, and sets the command's own limits.
    fn begin_command(&mut self) {
        // If this fails, `is_overrun` enforces the limit.
        let _ = self.group.set(&self.limits);
        self.group.count_anew(&mut self.meter);
        self.has_become = true;
    }

    /// Returns true if there are more processes than allowed: the command may have made some before its own limit was
    /// set.
    fn is_overrun(&mut self) -> bool {
        let now = self.group.processes_now().unwrap_or(0);
        self.seen = self.seen.max(now);
        self.is_overrun = self.limits.processes.is_some_and(|allowed| now > allowed);
        self.is_overrun
    }

    fn used(&self) -> Used {
        let mut used = self.group.used(&self.meter);
        if let Some(peak) = &mut used.processes_peak {
            // Before that, the peak is the runtime's.
            peak.least = if self.has_become { peak.with_seen(self.seen) } else { 1 };
        }
        if self.is_overrun {
            (used.process_refusals, used.process_refusals_by) = (Some(1), Some(Whose::Own));
            used.processes_peak = Some(Peak { least: self.seen, most: Some(self.seen) });
        }
        used
    }
}

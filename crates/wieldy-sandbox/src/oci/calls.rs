//! Commands in a container that stands: started by the runtime's `exec`, followed, measured, and ended without a rest.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tokio::io::Interest;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Ended, Exit, Level, OutputSink, Overrun, ResourceLimits, SandboxError, Usage};

use super::bundle::{Doing, Frame, process};
use super::container::{Container, blocking, group_limits, make_site, text, write_json};
use super::owners::AGENT;
use super::runtime::{Hand, complaint, ended, not_started};
use super::{groups, gvisor};
use crate::cgroup::{Group, Peak, Used, Whose};
use crate::custody::Went;
use crate::prepare::prepare;
use crate::sys;
use crate::wire::Limit;

/// How often we look whether something has come about that nobody tells us.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How often what is left in a gVisor container is killed before the container itself is.
const KILLS_MAX: usize = 10;

/// A command on its way.
struct Call<'a> {
    command: &'a Command,
    confinement: &'a Confinement,
    output: &'a dyn OutputSink,
    stop: &'a CancellationToken,
    doing: Doing<'a>,
    number: u64,
    log: PathBuf,
}

impl Container {
    /// Runs a command to its end.
    pub(super) async fn run(
        &self,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> Result<Exit, SandboxError> {
        let _busy = Busy::new(self);
        let refused = |source: io::Error| SandboxError::Start { program: command.program.clone(), source };
        let order = prepare(command, confinement).map_err(refused)?;
        if command.program.is_empty() {
            return Err(refused(io::Error::new(io::ErrorKind::NotFound, "a program needs a name")));
        }
        let mut environment = command.environment.clone();
        environment.extend(self.site.environment.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        environment.extend(self.outlet.iter().flat_map(|outlet| outlet.environment.clone()));
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
        let call = Call { command, confinement, output: &**output, stop, doing, number, log };
        let hearing = self.outlet.as_ref().map(|outlet| outlet.refusals.hear(output));
        let began = Instant::now();
        let (went, used) = match self.made.level {
            Level::Gvisor => self.run_unseen(&call).await?,
            _ => self.run_in_group(&call).await?,
        };
        let wall_ms = began.elapsed().as_secs_f64() * 1e3;
        let of_disk = went.as_ref().ok().and_then(|went| overrun_of_disk(went, &confinement.limits));
        let of_group = || (!stop.is_cancelled()).then(|| self.overrun(&used, confinement)).flatten();
        let overrun = of_disk.or_else(of_group);
        let told = complaint(&call.log);
        self.forget(number);
        let ended = match (went, told) {
            // The limit took the runtime with it.
            (_, _) if overrun.is_some() && self.made.level == Level::Gvisor => Ended::Signal(libc::SIGKILL),
            (Ok(Went { ended: Ended::Code(code), .. }), Some(told)) if code != 0 && !self.is_gone() => {
                return Err(not_started(self.made.level, &command.program, &told));
            }
            (Ok(_) | Err(_), told) if self.is_gone() => {
                let reason = told.unwrap_or_else(|| "its first process was ended".into());
                return Err(SandboxError::Crashed { reason: format!("{}: {reason}", self.made.level) });
            }
            (Ok(Went { ended: how, .. }), _) => ended(how),
            (Err(error), _) => return Err(error),
        };
        let overrun = overrun.filter(|_| ended != Ended::Code(0));
        let breaches = hearing.map(|hearing| hearing.breaches()).unwrap_or_default();
        Ok(Exit { ended, usage: self.usage(&used, wall_ms), sandbox: self.made.clone(), overrun, breaches })
    }

    /// Runs a command whose processes the machine's kernel sees, in a cgroup of its own.
    async fn run_in_group(&self, call: &Call<'_>) -> Result<(Result<Went, SandboxError>, Used), SandboxError> {
        let failed = |error: io::Error| self.failed(&error);
        let group = Arc::new(self.group.child(&format!("call-{}", call.number)).map_err(failed)?);
        group.set(&group_limits(self.made.level, &call.confinement.limits)).map_err(failed)?;
        let pid_file = self.file(&format!("{}.pid", call.number));
        let (pid_text, place) = (text(&pid_file), self.sub_group(call.number));
        let words = self.exec_words(call, &["--pid-file", &pid_text, "--cgroup", &place]).map_err(failed)?;
        let meter = group.begin();
        let hand = self.hand(call).await?.raw();
        let watcher = tokio::spawn(follow(pid_file, Arc::clone(&group), call.stop.clone(), call.confinement.grace));
        let went =
            hand.run(&self.runtime.program, words, call.command, call.confinement.grace, call.output, call.stop).await;
        watcher.abort();
        let left = Arc::clone(&group);
        if blocking(move || left.kill()).await.is_err() {
            // Nobody can tell what is left, so nothing may be.
            self.stop.cancel();
            self.gone.cancelled().await;
        }
        Ok((went, group.used(&meter)))
    }

    /// A berth that watches how much comes into the workspace.
    async fn hand(&self, call: &Call<'_>) -> Result<Hand, SandboxError> {
        let hand = Hand::new().await.map_err(|error| self.failed(&error))?;
        Ok(hand.watching(&call.confinement.workspace, &call.confinement.limits))
    }

    /// How the runtime is told which cgroup below the container's is meant.
    fn sub_group(&self, number: u64) -> String {
        let name = format!("call-{number}");
        if self.made.level != Level::Runc {
            return name;
        }
        // Where each controller has a mount of its own, only those that we use have such a group.
        let known = groups::noted(&self.runtime.root.join(&self.made.id.0));
        let ours =
            known.iter().filter(|(controller, path)| !controller.is_empty() && self.group.folders().contains(path));
        let ours: Vec<&str> = ours.map(|(controller, _)| controller.as_str()).collect();
        if ours.is_empty() { name } else { format!("{}:{name}", ours.join(",")) }
    }

    /// Runs a command in gVisor.
    async fn run_unseen(&self, call: &Call<'_>) -> Result<(Result<Went, SandboxError>, Used), SandboxError> {
        let meter = self.group.begin();
        let went = match self.lane.try_lock() {
            Ok(_lane) => {
                let words = self.exec_words(call, &[]).map_err(|error| self.failed(&error))?;
                let hand = self.hand(call).await?;
                let (went, deadline) = self.run_by_hand(hand, words, call, self.signal_agent(&["TERM", "CONT"])).await;
                self.clear_lane(deadline).await;
                went
            }
            Err(_) => self.run_beside(call).await?,
        };
        Ok((went, self.group.used(&meter)))
    }

    /// Runs a command in a container of its own inside the same gVisor sandbox.
    async fn run_beside(&self, call: &Call<'_>) -> Result<Result<Went, SandboxError>, SandboxError> {
        let failed = |error: io::Error| self.failed(&error);
        let id = format!("{}-{}", self.made.id.0, call.number);
        let site = make_site(Arc::clone(&self.site.ground), id.clone(), call.confinement.clone()).await?;
        let annotations = self.annotations("container");
        // It lives in the sandbox, and so in its network.
        let (level, network) = (self.made.level, &self.network);
        let frame = Frame { level, network, joined: None, groups: None, annotations };
        let config = site.tree.config(&call.doing, &frame).map_err(io::Error::other).map_err(failed)?;
        write_json(&site.folder().join("config.json"), &config).map_err(failed)?;
        let hand = self.hand(call).await?;
        self.join(&hand).await?;
        let bundle = text(&site.folder());
        let words = self.runtime.words(&call.log, &self.network, &["run", "--bundle", &bundle, &id]);
        let telling = async {
            for signal in ["TERM", "CONT"] {
                let _ = self.ask(&["kill", "--all", &id, signal]).await;
            }
        };
        let (went, _) = self.run_by_hand(hand, words, call, telling).await;
        let _ = self.ask(&["delete", "--force", &id]).await;
        Ok(went)
    }

    /// Runs a runtime that does not pass signals on: who stops the command tells it by `telling`, and the runtime is killed after the grace
    /// time. Says until when others may go on, if the command was stopped.
    async fn run_by_hand(
        &self,
        hand: Hand,
        words: Vec<String>,
        call: &Call<'_>,
        telling: impl Future<Output = ()>,
    ) -> (Result<Went, SandboxError>, Option<Instant>) {
        let (done, kill) = (CancellationToken::new(), CancellationToken::new());
        let running = async {
            let mut went =
                hand.run(&self.runtime.program, words, call.command, Duration::ZERO, call.output, &kill).await;
            done.cancel();
            if let (Ok(went), true) = (&mut went, kill.is_cancelled()) {
                // Whatever ended the runtime, its command is killed.
                went.ended = Ended::Signal(libc::SIGKILL);
            }
            went
        };
        let stopping = async {
            tokio::select! {
                () = call.stop.cancelled() => {}
                () = done.cancelled() => return None,
            }
            let deadline = Instant::now() + call.confinement.grace;
            telling.await;
            if tokio::time::timeout_at(deadline.into(), done.cancelled()).await.is_err() {
                kill.cancel();
            }
            Some(deadline)
        };
        tokio::join!(running, stopping)
    }

    fn exec_words(&self, call: &Call<'_>, more: &[&str]) -> io::Result<Vec<String>> {
        let file = self.file(&format!("{}.json", call.number));
        write_json(&file, &process(&call.doing).map_err(io::Error::other)?)?;
        let file = text(&file);
        let mut words = vec!["exec", "--process", &file];
        words.extend(more);
        words.push(&self.made.id.0);
        Ok(self.runtime.words(&call.log, &self.network, &words))
    }

    /// Signals every process of the agent in the container itself. Who is stopped hears it only if told to go on.
    async fn signal_agent(&self, signals: &[&str]) {
        let kill: Vec<String> = signals.iter().map(|signal| format!("kill -s {signal} -- -1")).collect();
        let (user, kill) = (format!("{AGENT}:{AGENT}"), kill.join("; "));
        let _ = self.ask(&["exec", "--user", &user, &self.made.id.0, "sh", "-c", &kill]).await;
    }

    /// Kills what a command has left, at this time if there is one and else at once; should that fail, the whole sandbox.
    async fn clear_lane(&self, deadline: Option<Instant>) {
        let mut kills = 0;
        while kills < KILLS_MAX && !self.gone.is_cancelled() {
            match self.is_clear().await {
                Ok(true) => return,
                Ok(false) => {}
                Err(_) => break,
            }
            if deadline.is_some_and(|at| at > Instant::now()) {
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            }
            kills += 1;
            self.signal_agent(&["KILL"]).await;
        }
        self.stop.cancel();
        self.gone.cancelled().await;
    }

    /// Whether no process of the agent is left in the container itself.
    async fn is_clear(&self) -> io::Result<bool> {
        let id = self.made.id.0.clone();
        if let Ok(Some(is_clear)) = tokio::task::spawn_blocking(move || gvisor::is_clear_of(AGENT, &id)).await {
            return Ok(is_clear);
        }
        Ok(of_agent(&self.ask(&["ps", &self.made.id.0]).await?).is_empty())
    }

    /// Removes the files of a call.
    fn forget(&self, number: u64) {
        for kind in ["json", "log", "pid"] {
            let _ = fs::remove_file(self.file(&format!("{number}.{kind}")));
        }
    }

    fn usage(&self, used: &Used, wall_ms: f64) -> Usage {
        let processes_peak = match self.made.level {
            // The machine's kernel sees threads of gVisor's, not the command's processes: not measured.
            Level::Gvisor => 0,
            _ => used.processes_peak.map_or(0, |peak| peak.least),
        };
        Usage {
            cpu_ms: used.cpu_us.map_or(0.0, |us| us as f64 / 1e3),
            memory_peak_bytes: used.memory_peak_bytes.map_or(0, |peak| peak.least),
            read_bytes: used.bytes_read.unwrap_or(0),
            written_bytes: used.bytes_written.unwrap_or(0),
            processes_peak,
            wall_ms,
        }
    }

    /// The limit that the kernel has seen to, if it had to. Where it does not tell the peak of just this call, it was what is allowed.
    fn overrun(&self, used: &Used, confinement: &Confinement) -> Option<Overrun> {
        let own = &confinement.limits;
        let allowed = |whose: Option<Whose>, own: Option<u64>, above: Option<u64>| match whose {
            Some(Whose::Above) => above.or(own),
            _ => own.or(above),
        };
        if used.oom_kills.is_some_and(|kills| kills > 0) {
            let allowed = allowed(used.oom_kills_by, own.memory_bytes, self.limits.memory_bytes)?;
            let used = used.memory_peak_bytes.and_then(Peak::exact).unwrap_or(allowed);
            return Some(Overrun { limit: "memory_bytes", allowed, used });
        }
        if self.made.level != Level::Gvisor && used.process_refusals.is_some_and(|refusals| refusals > 0) {
            let allowed = allowed(used.process_refusals_by, own.processes, self.limits.processes)?;
            let used = used.processes_peak.and_then(Peak::exact).unwrap_or(allowed);
            return Some(Overrun { limit: "processes", allowed, used });
        }
        None
    }
}

/// The limit of the workspace that a command has passed, if it has.
fn overrun_of_disk(went: &Went, limits: &ResourceLimits) -> Option<Overrun> {
    let overrun = |limit, allowed: Option<u64>, used| Some(Overrun { limit, allowed: allowed?, used });
    match went.report.overrun {
        Some((Limit::DiskBytes, used)) => overrun("disk_bytes", limits.disk_bytes, used),
        Some((Limit::DiskFiles, used)) => overrun("disk_files", limits.disk_files, used),
        // A single file that was as large as all may be.
        _ if ended(went.ended) == Ended::Signal(libc::SIGXFSZ) => {
            overrun("disk_bytes", limits.disk_bytes, limits.disk_bytes?)
        }
        _ => None,
    }
}

/// Waits for the first process of a command to end, and then ends the others: the runtime itself would wait until the last of them has
/// closed its output. Where the command was told to end, all others are told as well and have as long.
async fn follow(pid_file: PathBuf, group: Arc<Group>, stop: CancellationToken, grace: Duration) {
    let first = async {
        let pid = loop {
            let known = fs::read_to_string(&pid_file).ok().and_then(|text| Pid::from_raw(text.trim().parse().ok()?));
            match known {
                Some(pid) => break pid,
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        };
        // One that is gone already has ended.
        let Ok(handle) = pidfd_open(pid, PidfdFlags::NONBLOCK) else { return };
        if let Ok(handle) = sys::watched(handle, Interest::READABLE) {
            let _ = handle.readable().await;
        }
    };
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
                tell_orphans(&group, &mut told);
                if has_ended.is_cancelled() && (at.elapsed() >= grace || processes(&group).is_empty()) {
                    return;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        tokio::join!(waiting, telling);
    }
    let _ = blocking(move || group.kill()).await;
}

/// Tells those processes to end, each once, that the berth does not see, since their parent is gone.
fn tell_orphans(group: &Group, told: &mut Vec<Pid>) {
    for pid in processes(group) {
        if !told.contains(&pid) && !is_below_runtime(pid) {
            let _ = kill_process(pid, Signal::TERM);
            told.push(pid);
        }
    }
}

fn processes(group: &Group) -> Vec<Pid> {
    let listed =
        group.folders().first().map(|folder| fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default());
    listed.iter().flat_map(|text| text.lines()).filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
}

/// Whether a process comes from the runtime that was called for it, and not from an orphan in the container.
fn is_below_runtime(pid: Pid) -> bool {
    let namespace = |pid: &str| fs::read_link(Path::new("/proc").join(pid).join("ns/pid")).ok();
    let own = namespace("self");
    let mut pid = pid.as_raw_pid().to_string();
    loop {
        let status = fs::read_to_string(Path::new("/proc").join(&pid).join("status")).unwrap_or_default();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // The sleeper is number 1 in there.
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

/// The processes of the agent's account in what `runsc ps` lists: in each line the account comes first, and then the number.
fn of_agent(listed: &[u8]) -> Vec<String> {
    let listed = String::from_utf8_lossy(listed);
    let lines = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let agent = AGENT.to_string();
    lines.filter_map(|line| Some((*line.first()? == agent).then(|| line.get(1))??.to_string())).collect()
}

/// Counts a run as long as it lasts.
struct Busy<'a>(&'a Container);

impl<'a> Busy<'a> {
    fn new(container: &'a Container) -> Self {
        container.running.fetch_add(1, Ordering::AcqRel);
        container.executed.fetch_add(1, Ordering::Relaxed);
        Self(container)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        *self.0.used_at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

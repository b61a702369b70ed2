//! Runs commands in gVisor, whose processes the host's kernel does not see.
//!
//! One command at a time runs in the container itself, and then every process of the agent's account in it is killed.
//! The others run in containers of their own inside the same sandbox.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Ended, SandboxError};

use super::bundle::{Doing, Frame};
use super::commands::{Call, LOOK_EVERY, processes};
use super::container::{Container, PATH, make_dir, text, write_json};
use super::gvisor_control::{Control, ControlError};
use super::idmap::AGENT;
use super::runtime::{self, not_started};
use crate::cgroup::{Group, Used};
use crate::supervise::host_process::{HostProcess, disk_limits};
use crate::supervise::pipes::Pipes;
use crate::supervise::protocol::{RunReport, WatchedLimit};
use crate::supervise::run::{RunOutcome, ended};
use crate::supervise::supervisor::WATCH_EVERY;
use crate::supervise::watch::Watch;

/// Maximum number of times that leftover processes in a gVisor container are killed, before the sandbox itself is.
const KILLS_MAX: usize = 10;

impl Container {
    /// Runs a command in gVisor.
    pub(super) async fn run_unseen(
        &self,
        call: &Call<'_>,
    ) -> Result<(Result<RunOutcome, SandboxError>, Used), SandboxError> {
        let group = self.sentry.as_ref().unwrap_or(&self.parent.group);
        let (meter, written_before) = (group.begin(), written_bytes(group));
        let outcome = match (self.lane.try_lock(), &self.control) {
            (Ok(_lane), Some(control)) => self.run_by_control(control, call).await,
            (Ok(_lane), None) => self.run_by_program(call).await?,
            (Err(_), _) => self.run_beside(call).await?,
        };
        let mut used = group.used(&meter);
        // Not all kernels count written bytes for cgroups.
        let written = written_bytes(group).saturating_sub(written_before);
        used.bytes_written = Some(written.max(used.bytes_written.unwrap_or(0)));
        Ok((outcome, used))
    }

    /// Runs a command through the sandbox's control socket.
    async fn run_by_control(&self, control: &Control, call: &Call<'_>) -> Result<RunOutcome, SandboxError> {
        let Call { command: Command { program, stdin, terminal, .. }, confinement, .. } = *call;
        let no_ends = |error: io::Error| SandboxError::creation("making pipes for its input and output", error);
        let (pipes, streams, typed) = match terminal {
            Some(terminal) => {
                Pipes::terminal_beyond(*terminal).map(|(pipes, streams, typed)| (pipes, streams, Some(typed)))
            }
            None => Pipes::open(stdin).map(|(pipes, streams)| (pipes, streams, None)),
        }
        .map_err(no_ends)?;
        let watch = Arc::new(Mutex::new(Watch::new(&disk_limits(confinement), &confinement.workspace, &[], &[])));
        let watching = check_disk(Arc::clone(&watch));
        let pid = match control.start(&call.doing, streams.each_ref().map(AsFd::as_fd)).await {
            Ok(pid) => pid,
            Err(ControlError::Rejected(told)) => return Err(not_started(self.made.level, program, &told)),
            Err(ControlError::Lost(error)) => return Err(self.lose(program, error).await),
        };
        // Our copies of the command's ends stay open until it has ended, so that an early end of its output does not
        // wake us.
        let [_, _stdout, _stderr] = streams;
        let over = async {
            tokio::select! {
                ended = self.wait_for_end(control, pid, typed, call) => ended.map(|ended| (ended, None)),
                overrun = watching => {
                    self.clear_lane(None).await;
                    Ok((Ended::Signal(libc::SIGKILL), Some(overrun)))
                }
            }
        };
        match pipes.pump_until(stdin, call.output, over).await {
            Ok((ended, overrun)) => {
                let count = move || watch.lock().unwrap_or_else(PoisonError::into_inner).files_made();
                let files_made = tokio::task::spawn_blocking(count).await.unwrap_or_default();
                let report = RunReport { overrun, files_made, ..RunReport::default() };
                Ok(RunOutcome { ended, report, supervisor_lost: false })
            }
            Err(error) => Err(self.lose(program, error).await),
        }
    }

    /// Waits until a command has ended, or until its grace time after a stop is over. Then kills its leftover
    /// processes.
    async fn wait_for_end(
        &self,
        control: &Control,
        pid: i32,
        mut typed: Option<mpsc::Receiver<Signal>>,
        call: &Call<'_>,
    ) -> io::Result<Ended> {
        let ending = control.status_of(pid);
        let passing_on = async {
            // The terminal belongs to the host's kernel, which does not know the processes in gVisor.
            while let Some(typed) = &mut typed
                && let Some(signal) = typed.recv().await
            {
                let _ = control.signal_foreground(pid, signal).await;
            }
            std::future::pending().await
        };
        tokio::pin!(ending);
        let (status, deadline) = tokio::select! {
            status = &mut ending => (Some(status), None),
            never = passing_on => never,
            () = call.stop.cancelled() => {
                let deadline = Instant::now() + call.confinement.grace;
                let telling = self.signal_agent(&["TERM", "CONT"]);
                let told = async { tokio::join!(telling, ending).1 };
                (tokio::time::timeout_at(deadline.into(), told).await.ok(), Some(deadline))
            }
        };
        self.clear_lane(deadline).await;
        match status {
            Some(Ok(status)) => Ok(ended(status)),
            Some(Err(silence)) => Err(io::Error::other(silence)),
            // It was killed with its leftover processes.
            None => Ok(Ended::Signal(libc::SIGKILL)),
        }
    }

    /// Ends the sandbox, since its state is unknown.
    async fn lose(&self, program: &str, error: io::Error) -> SandboxError {
        self.stop.cancel();
        self.gone.cancelled().await;
        SandboxError::crashed(format!("{}: `{program}` was lost", self.made.level), error)
    }

    /// Runs a command by a call of `runsc`.
    async fn run_by_program(&self, call: &Call<'_>) -> Result<Result<RunOutcome, SandboxError>, SandboxError> {
        let words = self.exec_words(call, &[]).map_err(|error| self.failed(error))?;
        let process = self.process(call).await?;
        let (outcome, deadline) = self.run_process(process, words, call, self.signal_agent(&["TERM", "CONT"])).await;
        self.clear_lane(deadline).await;
        Ok(outcome)
    }

    /// Runs a command in a container of its own inside the same gVisor sandbox.
    async fn run_beside(&self, call: &Call<'_>) -> Result<Result<RunOutcome, SandboxError>, SandboxError> {
        let failed = |error: io::Error| self.failed(error);
        let id = format!("{}-{}", self.made.id.0, call.number);
        let dir = make_dir(Arc::clone(&self.dir.setup), id.clone(), call.confinement.clone()).await?;
        let annotations = self.annotations("container");
        // It is in the sandbox, and so in its network.
        let (level, network) = (self.made.level, &self.network);
        let frame = Frame { level, network, joined: None, groups: None, annotations };
        let config = dir.tree.config(&call.doing, &frame).map_err(io::Error::other).map_err(failed)?;
        write_json(&dir.folder().join("config.json"), &config).map_err(failed)?;
        let process = self.process(call).await?;
        self.join(&process).await?;
        let bundle = text(&dir.folder());
        let words = self.runtime.words(&call.log, &self.network, &["run", "--bundle", &bundle, &id]);
        let telling = async {
            for signal in ["TERM", "CONT"] {
                let _ = self.ask(&["kill", "--all", &id, signal]).await;
            }
        };
        let (outcome, _) = self.run_process(process, words, call, telling).await;
        let _ = self.ask(&["delete", "--force", &id]).await;
        Ok(outcome)
    }

    /// Runs a runtime that does not pass signals on: `telling` signals a stop to the command, and the runtime is killed
    /// after the grace time. If the command was stopped, also returns the end of the grace time, until which its other
    /// processes may run.
    async fn run_process(
        &self,
        process: HostProcess,
        words: Vec<String>,
        call: &Call<'_>,
        telling: impl Future<Output = ()>,
    ) -> (Result<RunOutcome, SandboxError>, Option<Instant>) {
        let (done, kill) = (CancellationToken::new(), CancellationToken::new());
        let running = async {
            let mut outcome =
                process.run(&self.runtime.program, words, call.command, Duration::ZERO, call.output, &kill).await;
            done.cancel();
            if let Ok(outcome) = &mut outcome {
                // If the runtime had to be killed, its command was killed as well.
                let killed = Ended::Signal(libc::SIGKILL);
                outcome.ended = if kill.is_cancelled() { killed } else { runtime::ended(outcome.ended) };
            }
            outcome
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

    /// Signals every process of the agent in the container itself. A stopped process handles a signal only after
    /// SIGCONT.
    async fn signal_agent(&self, signals: &[&str]) {
        let kill: Vec<String> = signals.iter().map(|signal| format!("kill -s {signal} -- -1")).collect();
        let kill = kill.join("; ");
        match &self.control {
            Some(control) => {
                // One `kill -1` inside: signalled one by one, they could fork faster.
                let doing = Doing {
                    words: vec!["sh".into(), "-c".into(), kill],
                    environment: vec![PATH.into()],
                    folder: Path::new("/"),
                    user: AGENT,
                    open_files: None,
                    has_terminal: false,
                };
                drop(control.run(&doing).await);
            }
            None => {
                let user = format!("{AGENT}:{AGENT}");
                drop(self.ask(&["exec", "--user", &user, &self.made.id.0, "sh", "-c", &kill]).await);
            }
        }
    }

    /// Kills the processes that a command has left, at the deadline if there is one. If that fails, ends the whole
    /// sandbox.
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

    /// Returns true if no process of the agent is left in the container itself.
    async fn is_clear(&self) -> io::Result<bool> {
        match &self.control {
            Some(control) => control.is_clear_of(AGENT).await.map_err(io::Error::other),
            None => Ok(of_agent(&self.ask(&["ps", &self.made.id.0]).await?).is_empty()),
        }
    }
}

/// Returns the bytes that gVisor's own processes have written to disks so far, on behalf of the processes in the
/// sandbox.
fn written_bytes(group: &Group) -> u64 {
    let of = |pid: Pid| {
        let figures = fs::read_to_string(Path::new("/proc").join(pid.as_raw_pid().to_string()).join("io")).ok()?;
        figures.lines().find_map(|line| line.strip_prefix("write_bytes: "))?.parse::<u64>().ok()
    };
    processes(group).into_iter().filter_map(of).sum()
}

/// Checks a workspace until more was written to it than is allowed.
async fn check_disk(watch: Arc<Mutex<Watch<'static>>>) -> (WatchedLimit, u64) {
    if watch.lock().unwrap_or_else(PoisonError::into_inner).is_needed() {
        loop {
            tokio::time::sleep(WATCH_EVERY).await;
            let watch = Arc::clone(&watch);
            let check = move || watch.lock().unwrap_or_else(PoisonError::into_inner).check_disk();
            match tokio::task::spawn_blocking(check).await {
                Ok(Some(overrun)) => return overrun,
                Ok(None) => {}
                Err(_) => break,
            }
        }
    }
    std::future::pending().await
}

/// Returns the agent's processes in the output of `runsc ps`: each line begins with the account, and then the process
/// id.
fn of_agent(listed: &[u8]) -> Vec<String> {
    let listed = String::from_utf8_lossy(listed);
    let lines = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let agent = AGENT.to_string();
    lines.filter_map(|line| Some((*line.first()? == agent).then(|| line.get(1))??.to_string())).collect()
}

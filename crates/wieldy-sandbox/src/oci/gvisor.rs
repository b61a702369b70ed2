//! Commands in gVisor, whose processes the machine's kernel does not see: one at a time in the container itself, after which everybody of the
//! agent's account in it is killed, and the others each in a container of its own inside the same sandbox.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use wieldy_core::{Ended, SandboxError};

use super::bundle::Frame;
use super::calls::{Call, LOOK_EVERY};
use super::container::{Container, make_site, text, write_json};
use super::control;
use super::owners::AGENT;
use super::runtime::Hand;
use crate::cgroup::Used;
use crate::custody::Went;

/// How often what is left in a gVisor container is killed before the container itself is.
const KILLS_MAX: usize = 10;

impl Container {
    /// Runs a command in gVisor.
    pub(super) async fn run_unseen(&self, call: &Call<'_>) -> Result<(Result<Went, SandboxError>, Used), SandboxError> {
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
        if let Ok(Some(is_clear)) = tokio::task::spawn_blocking(move || control::is_clear_of(AGENT, &id)).await {
            return Ok(is_clear);
        }
        Ok(of_agent(&self.ask(&["ps", &self.made.id.0]).await?).is_empty())
    }
}

/// The processes of the agent's account in what `runsc ps` lists: in each line the account comes first, and then the number.
fn of_agent(listed: &[u8]) -> Vec<String> {
    let listed = String::from_utf8_lossy(listed);
    let lines = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let agent = AGENT.to_string();
    lines.filter_map(|line| Some((*line.first()? == agent).then(|| line.get(1))??.to_string())).collect()
}

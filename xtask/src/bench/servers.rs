//! Benchmark of the first start of nine MCP servers that package managers fetch: from the import of a client's file
//! until the tools of all nine are listed, with wieldy and without it. Every round begins with empty caches.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::harness::spread_of;
use super::table::{Figure, Goal, Row};

/// The servers: name, package manager, arguments. `WORKSPACE` is replaced by a folder.
const SERVERS: [(&str, &str, &[&str]); 9] = [
    ("everything", "npx", &["-y", "@modelcontextprotocol/server-everything@2026.8.31", "stdio"]),
    ("files", "npx", &["-y", "@modelcontextprotocol/server-filesystem@2026.8.31", "WORKSPACE"]),
    ("memory", "npx", &["-y", "@modelcontextprotocol/server-memory@2026.8.31"]),
    ("thinking", "npx", &["-y", "@modelcontextprotocol/server-sequential-thinking@2026.8.31"]),
    ("context", "npx", &["-y", "@upstash/context7-mcp@4.1.1"]),
    ("fetch", "uvx", &["mcp-server-fetch@2026.10.24"]),
    ("git", "uvx", &["mcp-server-git@2026.10.19"]),
    ("time", "uvx", &["mcp-server-time@2026.10.19", "--local-timezone=UTC"]),
    ("calculator", "uvx", &["mcp-server-calculator@0.2.1"]),
];

const LIST_CHANGED: &str = "notifications/tools/list_changed";

/// The longest time that one start of all servers may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// Environment variables with which package managers reach their registries on this machine.
const REGISTRY_VARIABLES: [&str; 9] = [
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "NODE_EXTRA_CA_CERTS",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
];

/// Starts all servers from empty caches, without wieldy and with it, several times in turn.
pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    let rounds = if quick { 3 } else { 10 };
    let (mut direct, mut ours) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // The order alternates, so that neither side always finds the network warm.
        for side in [round % 2, 1 - round % 2] {
            let room = Room::new()?;
            let took = if side == 0 { room.start_directly() } else { room.start_by_wieldy() };
            let took = took.with_context(|| format!("round {}", round + 1))?;
            let name = if side == 0 { "without wieldy" } else { "through wieldy" };
            eprintln!("round {} of {rounds}: {name} {:.1} s", round + 1, took.as_secs_f64());
            if side == 0 { &mut direct } else { &mut ours }.push(took.as_secs_f64() * 1e9);
        }
    }
    let ratios = ours.iter().zip(&direct).map(|(ours, direct)| ours / direct).collect();
    Ok(vec![Row {
        name: format!("nine servers, cold caches, {rounds} of {rounds} rounds complete"),
        ours: Figure::Time(spread_of(ours)),
        floor: Some(("started together", Figure::Time(spread_of(direct)))),
        ratio: Some(spread_of(ratios).p50),
        goal: Some(Goal::RatioAtMost(1.2)),
    }])
}

/// A home folder without caches, and a workspace.
struct Room {
    folder: tempfile::TempDir,
    programs: PathBuf,
}

impl Room {
    fn new() -> Result<Self> {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target").canonicalize()?;
        let folder = tempfile::Builder::new().prefix("bench-servers-").tempdir_in(&target)?;
        for name in ["home", "workspace"] {
            std::fs::create_dir(folder.path().join(name))?;
        }
        Ok(Self { folder, programs: target.join("foreign/python/bin") })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, program: &Path) -> Result<Command> {
        let mut command = Command::new(program);
        let path = std::env::var("PATH").context("there is no PATH")?;
        command.env_clear().env("PATH", format!("{}:{path}", self.programs.display())).env("HOME", self.path("home"));
        command.envs(REGISTRY_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.current_dir(self.path("workspace")).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Stored for the error message if a server does not start.
        command.stderr(File::options().create(true).append(true).open(self.path("stderr"))?);
        Ok(command)
    }

    fn arguments(&self, arguments: &[&str]) -> Vec<String> {
        let workspace = self.path("workspace").display().to_string();
        arguments.iter().map(|argument| argument.replace("WORKSPACE", &workspace)).collect()
    }

    /// Starts the nine at once, as a client does, and waits until each has listed its tools.
    fn start_directly(&self) -> Result<Duration> {
        let began = Instant::now();
        let start = |(_, manager, arguments): &(&str, &str, &[&str])| {
            let mut command = self.command(&self.programs.join(manager))?;
            command.args(self.arguments(arguments));
            Peer::start(command)
        };
        let mut peers = SERVERS.iter().map(start).collect::<Result<Vec<_>>>()?;
        for (peer, (name, ..)) in peers.iter_mut().zip(&SERVERS) {
            peer.list_tools(began).with_context(|| format!("the server `{name}`: {}", self.said()))?;
        }
        Ok(began.elapsed())
    }

    /// Imports the file with the nine servers, starts `wieldy mcp`, and lists tools until those of all nine are there.
    fn start_by_wieldy(&self) -> Result<Duration> {
        let server = |(name, manager, arguments): &(&str, &str, &[&str])| {
            let command = self.programs.join(manager);
            (name.to_string(), json!({"command": command, "args": self.arguments(arguments)}))
        };
        let file = json!({"mcpServers": SERVERS.iter().map(server).collect::<serde_json::Map<_, _>>()});
        std::fs::write(self.path("workspace/clients.json"), file.to_string())?;
        let wieldy = self.programs.join("../../../dist/wieldy");
        let began = Instant::now();
        let imported = self.command(&wieldy)?.args(["mcp", "import", "clients.json"]).stdin(Stdio::null()).status()?;
        ensure!(imported.success(), "the import failed: {}", self.said());
        let mut command = self.command(&wieldy)?;
        command.arg("mcp");
        let mut peer = Peer::start(command)?;
        let wanted: BTreeSet<&str> = SERVERS.iter().map(|(name, ..)| *name).collect();
        loop {
            let tools = peer.list_tools(began).with_context(|| self.said())?;
            let names = tools.iter().filter_map(|tool| tool["name"].as_str()?.split_once("__"));
            let listed: BTreeSet<&str> = names.map(|(server, _)| server).collect();
            if wanted.is_subset(&listed) {
                return Ok(began.elapsed());
            }
            let missing: Vec<_> = wanted.difference(&listed).collect();
            peer.wait_for_change(began).with_context(|| format!("missing: {missing:?}: {}", self.said()))?;
        }
    }

    /// Returns the last lines that the programs wrote to standard error.
    fn said(&self) -> String {
        let text = std::fs::read(self.path("stderr")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

/// An MCP server on standard input and output. It is killed with all its children on drop.
struct Peer {
    process: Child,
    write: ChildStdin,
    messages: Receiver<Value>,
    asked: u64,
    /// True if the list of tools changed since it was last requested.
    has_changed: bool,
}

impl Peer {
    /// Starts a server and sends `initialize` without waiting for the answer.
    fn start(mut command: Command) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let mut process = command.process_group(0).spawn().with_context(|| format!("cannot start {command:?}"))?;
        let read = BufReader::new(process.stdout.take().context("standard output is a pipe")?);
        let (send, messages) = channel();
        std::thread::spawn(move || {
            for message in read.lines().map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok()) {
                let _ = send.send(message);
            }
        });
        let write = process.stdin.take().context("standard input is a pipe")?;
        let mut peer = Self { process, write, messages, asked: 0, has_changed: false };
        let client = json!({"name": "bench", "version": "1"});
        let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
        peer.send(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}))?;
        Ok(peer)
    }

    fn send(&mut self, message: &Value) -> Result<()> {
        writeln!(self.write, "{message}").context("the server reads no more")
    }

    /// Requests the list of tools, after the handshake if that is not complete yet.
    fn list_tools(&mut self, began: Instant) -> Result<Vec<Value>> {
        if self.asked == 0 {
            self.wait_for(began, |message| message["id"] == 0)?;
            self.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))?;
        }
        self.asked += 1;
        self.has_changed = false;
        let id = self.asked;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/list"}))?;
        let answer = self.wait_for(began, |message| message["id"] == id)?;
        Ok(answer["result"]["tools"].as_array().cloned().unwrap_or_default())
    }

    fn wait_for_change(&mut self, began: Instant) -> Result<()> {
        if !self.has_changed {
            self.wait_for(began, |message| message["method"] == LIST_CHANGED)?;
        }
        Ok(())
    }

    fn wait_for(&mut self, began: Instant, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            let left = PATIENCE.saturating_sub(began.elapsed());
            match self.messages.recv_timeout(left) {
                Ok(message) => {
                    self.has_changed |= message["method"] == LIST_CHANGED;
                    if is_it(&message) {
                        return Ok(message);
                    }
                }
                Err(RecvTimeoutError::Timeout) => bail!("no answer within {PATIENCE:?}"),
                Err(RecvTimeoutError::Disconnected) => bail!("it ended"),
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // npx and uvx start the server as a child, which is in the same group.
        let group = format!("-{}", self.process.id());
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let _ = self.process.wait();
    }
}

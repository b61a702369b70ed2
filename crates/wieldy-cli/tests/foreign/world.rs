//! A workspace with MCP servers in its configuration, and the `wieldy` command run in it.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use regex::Regex;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The longest time for a step on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the folder of the foreign programs, or prints that the test is skipped and returns `None`.
pub(crate) fn programs() -> Option<PathBuf> {
    let folder = std::env::var_os("WIELDY_TEST_FOREIGN").map(PathBuf::from);
    if folder.is_none() {
        wieldy_testkit::skip("`cargo xtask foreign` installs the programs for this test");
    }
    folder
}

/// A workspace with a home beside it, and the foreign programs.
pub(crate) struct World {
    root: TempDir,
    programs: PathBuf,
    /// The variables of this process that commands get, too.
    handed_on: &'static [&'static str],
}

/// The variables with which package managers reach their registries on this machine.
const WAYS_OUT: [&str; 9] = [
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

impl World {
    /// Makes a world with this configuration, in which `[programs]` stands for the folder of the programs and `[root]`
    /// for the folder around the workspace. Returns `None` if the programs are not installed.
    pub(crate) fn new(config: &str) -> Option<Self> {
        let world = Self { programs: programs()?, root: tempfile::tempdir().unwrap(), handed_on: &[] };
        for folder in ["home", "work"] {
            fs::create_dir(world.root.path().join(folder)).unwrap();
        }
        fs::write(world.path("wieldy.toml"), world.filled(config)).unwrap();
        Some(world)
    }

    /// Returns the same world in which commands can reach package registries.
    pub(crate) fn with_registries(self) -> Self {
        Self { handed_on: &WAYS_OUT, ..self }
    }

    /// Returns the same world with a file in the workspace.
    pub(crate) fn file(self, path: &str, text: &str) -> Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// Returns the same world with a Node script in the workspace, which finds the installed packages.
    pub(crate) fn script(self, name: &str, text: &str) -> Self {
        std::os::unix::fs::symlink(self.program("npm/node_modules"), self.path("node_modules")).unwrap();
        self.file(name, text)
    }

    /// Returns a path in the workspace.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root().join("work").join(path)
    }

    /// Returns the folder around the workspace.
    pub(crate) fn root(&self) -> PathBuf {
        self.root.path().canonicalize().unwrap()
    }

    /// Returns a path below the folder of the foreign programs.
    pub(crate) fn program(&self, path: &str) -> PathBuf {
        self.programs.join(path)
    }

    /// Fills the names of folders into a text.
    pub(crate) fn filled(&self, text: &str) -> String {
        let shown = |path: &Path| path.display().to_string();
        text.replace("[programs]", &shown(&self.programs)).replace("[root]", &shown(&self.root()))
    }

    /// Returns a command for a program, in the workspace and with a clean environment. Trusts the present
    /// configuration.
    pub(crate) fn any(&self, program: &Path) -> Command {
        let trusted = self.plain(Path::new(env!("CARGO_BIN_EXE_wieldy"))).args(["trust", "--yes"]).output().unwrap();
        assert!(trusted.status.success(), "{}", shown(&trusted.stderr));
        self.plain(program)
    }

    fn plain(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(self.path(""))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", self.root.path().join("home"))
            // The mark by which the processes of this world are found.
            .env("WIELDY_TEST_WORLD", self.mark())
            .envs(self.handed_on.iter().filter_map(|name| Some((name, std::env::var_os(name)?))))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn wieldy(&self, arguments: &[&str]) -> Command {
        let mut command = self.any(Path::new(env!("CARGO_BIN_EXE_wieldy")));
        command.args(arguments);
        command
    }

    /// Runs wieldy and returns its JSON output.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let output = self.wieldy(arguments).output().unwrap();
        let said = || format!("{}{}", shown(&output.stdout), shown(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", said()))
    }

    /// Calls a tool through the command, with arguments as JSON, and returns the important parts of the result.
    pub(crate) fn call(&self, tool: &str, arguments: &Value) -> Value {
        let arguments = self.filled(&arguments.to_string());
        let result = self.json(&["call", tool, "--args", &arguments, "--json"]);
        let mut told = json!({"status": result["status"], "content": result["content"]});
        for name in ["structured", "error"] {
            if !result[name].is_null() {
                told[name] = result[name].clone();
            }
        }
        self.filtered(&told)
    }

    /// Replaces the parts of a value that change from run to run.
    pub(crate) fn filtered(&self, value: &Value) -> Value {
        let mut text = value.to_string().replace(&self.root().display().to_string(), "[root]");
        for (pattern, shown) in [
            (r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", "[id]"),
            (r"\d\d\d\d-\d\d-\d\d", "[day]"),
            (r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day", "[weekday]"),
            (r"\d+:\d\d:\d\d [AP]M", "[time]"),
            (r"\b[0-9a-f]{40}\b", "[commit]"),
        ] {
            text = Regex::new(pattern).unwrap().replace_all(&text, shown).into_owned();
        }
        serde_json::from_str(&text).unwrap()
    }

    fn mark(&self) -> String {
        self.root.path().display().to_string()
    }

    /// Returns the running processes of this world.
    pub(crate) fn processes(&self) -> Vec<String> {
        let mark = self.mark();
        let of_this = |process: &Path| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            String::from_utf8_lossy(&environment).contains(&mark)
        };
        let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let command =
            |process: PathBuf| shown(&fs::read(process.join("cmdline")).unwrap_or_default()).replace('\0', " ");
        all.filter(|process| of_this(process)).map(command).filter(|command| !command.is_empty()).collect()
    }

    /// Waits until no process of this world runs any more. Ended processes are reaped by another process.
    pub(crate) fn is_left_empty(&self) {
        let began = Instant::now();
        while !self.processes().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(5), "left over: {:#?}", self.processes());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A `wieldy mcp` process and its line-based connection.
pub(crate) struct Wire {
    process: Child,
    write: Option<ChildStdin>,
    messages: Receiver<Value>,
}

impl Wire {
    /// Starts the process and begins a session.
    pub(crate) fn new(world: &World) -> Self {
        let mut process = world
            .wieldy(&["mcp", "--set", "mcp.list-wait=60s"])
            .stdin(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let read = BufReader::new(process.stdout.take().unwrap());
        let (tell, messages) = channel();
        std::thread::spawn(move || {
            for line in read.lines().map_while(Result::ok) {
                let _ = tell.send(serde_json::from_str(&line).unwrap());
            }
        });
        let mut wire = Self { write: process.stdin.take(), process, messages };
        let client = json!({"name": "wire", "version": "1"});
        let params = json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client});
        wire.send(&json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}));
        assert_eq!(wire.next()["result"]["serverInfo"]["name"], "wieldy");
        wire.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        // Request the tools, as clients do; the answer waits for servers without cached tools.
        wire.send(&json!({"jsonrpc": "2.0", "id": "list", "method": "tools/list"}));
        while wire.next()["id"] != "list" {}
        wire
    }

    pub(crate) fn send(&mut self, message: &Value) {
        writeln!(self.write.as_mut().unwrap(), "{message}").unwrap();
    }

    /// Sends a call of a tool that reports progress.
    pub(crate) fn call(&mut self, id: u32, tool: &str, arguments: &Value) {
        let params = json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": id}});
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}));
    }

    /// Returns the next message.
    pub(crate) fn next(&self) -> Value {
        self.messages.recv_timeout(PATIENCE).expect("a message must come")
    }

    /// Closes the session, waits for its end, and returns the remaining messages.
    pub(crate) fn close(mut self) -> Vec<Value> {
        drop(self.write.take());
        assert!(self.process.wait().unwrap().success());
        self.messages.iter().collect()
    }
}

/// A `wieldy serve` process, until it is stopped.
pub(crate) struct Served {
    process: Child,
    /// The address of the MCP endpoint.
    pub(crate) url: String,
}

impl Served {
    pub(crate) fn new(world: &World, arguments: &[&str]) -> Self {
        let arguments = [&["serve", "--listen", "127.0.0.1:0", "--json"], arguments].concat();
        let mut process = world.wieldy(&arguments).stderr(Stdio::inherit()).spawn().unwrap();
        let mut told = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut told).unwrap();
        let told: Value = serde_json::from_str(&told).unwrap();
        Self { process, url: told["mcp"].as_str().unwrap().to_owned() }
    }

    /// Sends SIGTERM and waits for the end.
    pub(crate) fn stop(mut self) {
        let asked = Command::new("kill").arg(self.process.id().to_string()).status().unwrap();
        assert!(asked.success() && self.process.wait().unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

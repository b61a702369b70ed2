//! MCP servers of other people, correct and incorrect.

pub(crate) mod bad_http;
mod behaving;
mod changes;
mod login;
mod misbehaving;
mod names;
mod over_http;
mod over_the_wire;
mod passed_on;
mod pinning;
mod program;
mod retries;
mod tasks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use wieldy_core::{
    Backoff, Call, CallError, Command, Confinement, FileRules, Level, Limits, Mount, Network, Place, ResourceLimits,
    RetryPolicy, Stdin, ToolResult,
};
use wieldy_mcp::client::{Address, OnChange, Pins, Program, Reach, ServerSettings, Upstreams};
use wieldy_sandbox::{Native, NativeOptions, Unconfined};
use wieldy_testkit::World;

/// An executor with one server behind it, and the server's notes.
pub(crate) struct Stage {
    pub(crate) world: World,
    pub(crate) upstreams: Upstreams,
    folder: Arc<tempfile::TempDir>,
}

impl Stage {
    /// Starts a server of this behaviour, which has listed its tools.
    pub(crate) async fn of(behaviour: &str) -> Self {
        Self::with(behaviour, |_| {}).await
    }

    pub(crate) async fn with(behaviour: &str, change: impl FnOnce(&mut ServerSettings)) -> Self {
        let stage = Self::in_folder(Arc::new(tempfile::tempdir().unwrap()), behaviour, change);
        stage.upstreams.discover(|_| true).await;
        stage
    }

    /// Returns a stage with the server at this address, which has listed its tools if it could.
    pub(crate) async fn at(url: impl Into<String>) -> Self {
        let address = Address::new(url);
        Self::with("", |settings| settings.reach = Reach::Http(address)).await
    }

    /// Starts a server whose failed calls are retried up to two times, if that is safe.
    pub(crate) async fn that_retries(behaviour: &str, change: impl FnOnce(&mut ServerSettings)) -> Self {
        // Longer than the pause after a crash.
        let base = Duration::from_secs(1);
        let retry = RetryPolicy { retries: 2, base, backoff: Backoff::Linear, ..RetryPolicy::default() };
        let stage = Self::retrying(retry, Arc::new(tempfile::tempdir().unwrap()), behaviour, change);
        stage.upstreams.discover(|_| true).await;
        stage
    }

    /// Returns a stage whose folder may hold pins of the server. The server is not started yet.
    pub(crate) fn in_folder(
        folder: Arc<tempfile::TempDir>,
        behaviour: &str,
        change: impl FnOnce(&mut ServerSettings),
    ) -> Self {
        Self::retrying(RetryPolicy::NEVER, folder, behaviour, change)
    }

    fn retrying(
        retry: RetryPolicy,
        folder: Arc<tempfile::TempDir>,
        behaviour: &str,
        change: impl FnOnce(&mut ServerSettings),
    ) -> Self {
        let world = World::with([], |builder| {
            builder.isolation = Level::None;
            builder.limits = Limits {
                calls_running_per_agent_max: 500,
                calls_running_max: 500,
                calls_waiting_max: 2_000,
                ..Limits::default()
            };
            builder.retry = retry;
            *builder =
                std::mem::take(builder).sandbox(Unconfined::default()).sandbox(Native::new(NativeOptions::default()));
        });
        let mut settings = settings("test", behaviour, folder.path());
        change(&mut settings);
        let pins = Arc::new(Pins::open(folder.path().join("pins.json")).unwrap());
        let upstreams = Upstreams::new(&world.executor, vec![settings], pins).unwrap();
        Self { world, upstreams, folder }
    }

    pub(crate) fn folder(&self) -> Arc<tempfile::TempDir> {
        Arc::clone(&self.folder)
    }

    pub(crate) async fn call(&self, tool: &str, text: &str) -> ToolResult {
        self.world.call(tool, json!({ "text": text })).await
    }

    /// Returns the error of a call that must fail, without details that differ from run to run.
    pub(crate) async fn error(&self, tool: &str) -> CallError {
        let result = self.call(tool, "hi").await;
        *result.error.unwrap_or_else(|| panic!("it should have failed: {:?}", result.content))
    }

    /// Returns all notes of the server, in order.
    pub(crate) fn notes(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.path().join("notes")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) async fn until_noted(&self, note: &str) {
        until(|| self.notes().iter().any(|line| line == note)).await;
    }

    /// Returns the names of the registered tools.
    pub(crate) fn tools(&self) -> Vec<String> {
        let tools = self.world.executor.registry().list(&wieldy_core::Caller::local(), &Default::default());
        tools.iter().map(|tool| tool.spec().name.clone()).collect()
    }

    /// Returns the server's state as JSON.
    pub(crate) fn state(&self) -> Value {
        serde_json::to_value(&self.upstreams.status()[0].state).unwrap()
    }
}

/// Waits for a condition that must soon hold.
pub(crate) async fn until(mut is_so: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "it did not come");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns settings that run this test binary as a server, without isolation.
pub(crate) fn settings(name: &str, behaviour: &str, folder: &Path) -> ServerSettings {
    let program = Program {
        command: Command {
            program: std::env::current_exe().unwrap().display().to_string(),
            arguments: program::arguments(),
            environment: environment(behaviour, folder),
            folder: PathBuf::new(),
            stdin: Stdin::Nothing,
            terminal: None,
        },
        level: Level::None,
        confinement: Confinement {
            workspace: folder.to_owned(),
            files: Arc::default(),
            network: Network::None,
            limits: ResourceLimits::default(),
            place: Place::Own,
            place_limits: ResourceLimits::default(),
            grace: Duration::from_millis(500),
        },
    };
    let mut settings = ServerSettings::new(name, Reach::Stdio(Box::new(program)));
    settings.start_timeout = Duration::from_secs(20);
    settings
}

fn environment(behaviour: &str, folder: &Path) -> BTreeMap<String, String> {
    let path = ("PATH".to_owned(), "/usr/bin:/bin".to_owned());
    program::environment(behaviour, &folder.join("notes")).into_iter().chain([path]).collect()
}

/// Puts the server into a native sandbox that shows the program and its folder.
pub(crate) fn in_a_sandbox(settings: &mut ServerSettings) {
    let Reach::Stdio(program) = &mut settings.reach else { panic!("it is a program") };
    program.level = Level::Native;
    let folder = std::env::current_exe().unwrap().parent().unwrap().canonicalize().unwrap();
    let mounts = vec![Mount { source: folder.clone(), target: folder, writable: false }];
    program.confinement.files = Arc::new(FileRules { mounts, ..FileRules::default() });
}

/// Counts the processes with this argument.
pub(crate) fn processes(argument: &str) -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path().join("cmdline")));
    let holds = |path: PathBuf| {
        std::fs::read(path).is_ok_and(|line| line.split(|byte| *byte == 0).any(|word| word == argument.as_bytes()))
    };
    entries.filter(|path| holds(path.clone())).count()
}

/// Returns a call by the local user.
pub(crate) fn call(tool: &str, text: &str) -> Call {
    Call::new(tool, json!({ "text": text }))
}

pub(crate) fn warns(settings: &mut ServerSettings) {
    settings.on_change = OnChange::Warn;
}

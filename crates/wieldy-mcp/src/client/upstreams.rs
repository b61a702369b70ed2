//! All upstream servers of an executor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde::Serialize;
use tokio::time::Instant;
use wieldy_core::{CallError, Executor, NameError, ToolName};

use super::failure::Failure;
use super::login::LoginState;
use super::pins::Pins;
use super::settings::{Reach, ServerSettings, Start};
use super::upstream::{Life, Upstream};

/// The upstream servers of an executor, whose registry has their tools. One that fails never keeps out the others.
///
/// Dropping this leaves the servers running until the executor is gone, with the tools as they are; [`Upstreams::close`] ends them.
pub struct Upstreams {
    servers: Vec<Arc<Upstream>>,
}

/// Why servers cannot be used as they were described.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The name could not be the first part of a tool's name.
    #[error("`{name}` cannot be the name of an MCP server")]
    Name {
        /// What was meant to be the name.
        name: String,
        /// Why not.
        #[source]
        source: NameError,
    },
    /// The name would make the names of its tools ambiguous.
    #[error("`{0}` cannot be the name of an MCP server: `__` stands between the names of a server and a tool")]
    Separator(String),
    /// There are two of that name.
    #[error("there are two MCP servers of the name `{0}`")]
    Twice(String),
}

/// How a server stands.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerStatus {
    /// Its name.
    pub name: String,
    /// How it is reached: `stdio`, `http` or `none`.
    pub transport: &'static str,
    /// Where it stands.
    pub state: ServerState,
    /// What is known of the login to it.
    pub login: Option<LoginState>,
    /// The revision of MCP that it speaks.
    pub revision: Option<String>,
    /// Who it says that it is.
    pub server: Option<String>,
    /// The names of its tools here, by its own names.
    pub tools: BTreeMap<String, String>,
    /// Its tools that are no longer what they were agreed to be, with the difference.
    pub changed: BTreeMap<String, String>,
    /// Its tools that cannot be used, with the reason.
    pub unusable: BTreeMap<String, String>,
}

/// Where a server stands.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ServerState {
    /// It was not needed yet.
    NotStarted,
    /// It is being started.
    Starting,
    /// It answers.
    Ready,
    /// It failed; its tools stay listed.
    Degraded {
        /// What a call to one of its tools would be told.
        error: CallError,
        /// How often it failed in a row.
        failures: u32,
    },
    /// It was ended.
    Closed,
}

impl Upstreams {
    /// Takes servers into use. Those that are known give their tools to the registry at once; those that should always run are
    /// started. Must be called within a tokio runtime.
    pub fn new(executor: &Executor, servers: Vec<ServerSettings>, pins: Arc<Pins>) -> Result<Self, SettingsError> {
        let mut names = BTreeSet::new();
        for settings in &servers {
            let name = &settings.name;
            if name.contains(ToolName::SEPARATOR) {
                return Err(SettingsError::Separator(name.clone()));
            }
            // As long as a tool's name has room beside it.
            let wrong = |source| SettingsError::Name { name: name.clone(), source };
            ToolName::qualified(name, "tool_with_a_name").map_err(wrong)?;
            if !names.insert(name) {
                return Err(SettingsError::Twice(name.clone()));
            }
        }
        let make = |settings| Upstream::new(settings, executor, Arc::clone(&pins));
        let servers: Vec<Arc<Upstream>> = servers.into_iter().map(make).collect();
        for server in &servers {
            server.recall();
            if server.settings.start == Start::Eager {
                server.start();
            }
        }
        Ok(Self { servers })
    }

    /// Starts the servers whose tools are not known, and waits for them at most `within`; not for those that did not come up
    /// the last time. The tools of the others are registered when they come.
    pub async fn introduce(&self, within: Duration) {
        let unknown: Vec<_> = self.servers.iter().filter(|server| !server.is_known()).collect();
        let awaited: Vec<_> = unknown.iter().filter(|server| !server.failed_last_time()).collect();
        unknown.iter().for_each(|server| server.start());
        let all = join_all(awaited.iter().map(|server| server.connection()));
        if tokio::time::timeout(within, all).await.is_err() {
            let late = awaited.iter().filter(|server| matches!(server.life(), Life::Starting));
            late.for_each(|server| server.remember_failed());
        }
    }

    /// Asks servers for their tools that were never asked, all at once: those that `wanted` names.
    pub async fn discover(&self, wanted: impl Fn(&str) -> bool) {
        let unknown = self.servers.iter().filter(|server| wanted(&server.settings.name) && !server.recall());
        join_all(unknown.map(|server| server.connection())).await;
    }

    /// Starts servers, all at once, and says for each what came of it and how long it took: those that `wanted` names.
    pub async fn test(&self, wanted: impl Fn(&str) -> bool) -> Vec<(ServerStatus, Duration)> {
        let wanted = self.servers.iter().filter(|server| wanted(&server.settings.name));
        join_all(wanted.map(async |server| {
            let began = Instant::now();
            let _ = server.connection().await;
            (status(server), began.elapsed())
        }))
        .await
    }

    /// Agrees to the tools of a server as somebody has seen them in its status: what it changed since then is not agreed to.
    /// Nothing if there is no server of that name.
    pub fn agree(&self, seen: &ServerStatus) -> Option<Result<ServerStatus, CallError>> {
        let server = self.servers.iter().find(|server| server.settings.name == seen.name)?;
        Some(server.agree(&seen.changed).map(|()| status(server)))
    }

    /// How the servers stand.
    pub fn status(&self) -> Vec<ServerStatus> {
        self.servers.iter().map(|server| status(server)).collect()
    }

    /// Ends all servers, with their whole process trees.
    pub async fn close(&self) {
        join_all(self.servers.iter().map(|server| server.close())).await;
    }
}

impl Drop for Upstreams {
    fn drop(&mut self) {
        self.servers.iter().for_each(|server| server.let_go());
    }
}

fn status(server: &Upstream) -> ServerStatus {
    let settings = &server.settings;
    let [tools, changed, unusable] = server.known();
    let (mut revision, mut info) = (None, None);
    let state = match server.life() {
        Life::Up(connection) => {
            (revision, info) = (connection.revision(), connection.server());
            match connection.trouble() {
                Some((why, failures)) => ServerState::Degraded { error: server.error(&why, None), failures },
                None => ServerState::Ready,
            }
        }
        Life::Starting => ServerState::Starting,
        Life::Down { failures, .. } if let Reach::Unusable(why) = &settings.reach => {
            let error = Failure::Configuration(why.as_str().into()).error(&settings.name, None);
            ServerState::Degraded { error, failures }
        }
        Life::Closed => ServerState::Closed,
        Life::Down { why: None, .. } => ServerState::NotStarted,
        Life::Down { why: Some(why), failures, until } => {
            let patience = until.map(|until| until.saturating_duration_since(Instant::now()));
            ServerState::Degraded { error: server.error(&why, patience), failures }
        }
    };
    let (transport, login) = match &settings.reach {
        Reach::Stdio(_) => ("stdio", None),
        Reach::Http(address) => ("http", LoginState::of(address)),
        Reach::Unusable(_) => ("none", None),
    };
    let name = settings.name.clone();
    ServerStatus { name, transport, state, login, revision, server: info, tools, changed, unusable }
}

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
use super::upstream::{Upstream, UpstreamState};

/// The upstream servers of an executor, whose registry has their tools. A server that fails never affects the others.
///
/// Dropping this leaves the servers running, and their tools registered, until the executor is gone.
/// [`Upstreams::close`] ends them.
pub struct Upstreams {
    servers: Vec<Arc<Upstream>>,
}

/// The reason why the settings of a server are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The name cannot be the first part of a tool's name.
    #[error("`{name}` cannot be the name of an MCP server")]
    Name {
        /// The invalid name.
        name: String,
        /// The cause.
        #[source]
        source: NameError,
    },
    /// The name contains `__`, which would make tool names ambiguous.
    #[error("`{0}` cannot be the name of an MCP server: `__` separates the names of a server and a tool")]
    Separator(String),
    /// Two servers have this name.
    #[error("two MCP servers have the name `{0}`")]
    Twice(String),
}

/// The status of a server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerStatus {
    /// The name.
    pub name: String,
    /// The transport: `stdio`, `http` or `none`.
    pub transport: &'static str,
    /// The state.
    pub state: ServerState,
    /// The login state.
    pub login: Option<LoginState>,
    /// The negotiated MCP revision.
    pub revision: Option<String>,
    /// The server's own name and version.
    pub server: Option<String>,
    /// The tools' names here, by the server's own names.
    pub tools: BTreeMap<String, String>,
    /// The tools that differ from their pins, with the diff.
    pub changed: BTreeMap<String, String>,
    /// The tools that cannot be used, with the reason.
    pub unusable: BTreeMap<String, String>,
}

/// The state of a server.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ServerState {
    /// It was not needed yet.
    NotStarted,
    /// It is being started.
    Starting,
    /// It is running.
    Ready,
    /// It failed. Its tools stay listed.
    Degraded {
        /// The error that a call to one of its tools would get.
        error: CallError,
        /// The number of failures in a row.
        failures: u32,
    },
    /// It was closed.
    Closed,
}

impl Upstreams {
    /// Takes servers into use. Registers the tools of known servers at once and starts the servers that should always
    /// run. Must be called within a tokio runtime.
    pub fn new(executor: &Executor, servers: Vec<ServerSettings>, pins: Arc<Pins>) -> Result<Self, SettingsError> {
        let mut names = BTreeSet::new();
        for settings in &servers {
            let name = &settings.name;
            if name.contains(ToolName::SEPARATOR) {
                return Err(SettingsError::Separator(name.clone()));
            }
            // The prefix must leave room for a tool's name.
            let wrong = |source| SettingsError::Name { name: name.clone(), source };
            ToolName::qualified(name, "tool_with_a_name").map_err(wrong)?;
            if !names.insert(name) {
                return Err(SettingsError::Twice(name.clone()));
            }
        }
        let make = |settings| Upstream::new(settings, executor, Arc::clone(&pins));
        let servers: Vec<Arc<Upstream>> = servers.into_iter().map(make).collect();
        for server in &servers {
            server.register_pinned();
            if server.settings.start == Start::Eager {
                server.start();
            }
        }
        Ok(Self { servers })
    }

    /// Starts the servers whose tools are not known, and waits at most `within` for them, except for those that did not
    /// come up the last time. Tools of slower servers are registered when they arrive.
    pub async fn introduce(&self, within: Duration) {
        let unknown: Vec<_> = self.servers.iter().filter(|server| !server.is_known()).collect();
        let awaited: Vec<_> = unknown.iter().filter(|server| !server.failed_last_time()).collect();
        unknown.iter().for_each(|server| server.start());
        let all = join_all(awaited.iter().map(|server| server.session()));
        if tokio::time::timeout(within, all).await.is_err() {
            let late = awaited.iter().filter(|server| matches!(server.state(), UpstreamState::Starting));
            late.for_each(|server| server.remember_failed());
        }
    }

    /// Lists the tools of those servers that `wanted` selects and that were never asked, all at once.
    pub async fn discover(&self, wanted: impl Fn(&str) -> bool) {
        let unknown = self.servers.iter().filter(|server| wanted(&server.settings.name) && !server.register_pinned());
        join_all(unknown.map(|server| server.session())).await;
    }

    /// Starts the servers that `wanted` selects, all at once. Returns the status of each and the time it took.
    pub async fn test(&self, wanted: impl Fn(&str) -> bool) -> Vec<(ServerStatus, Duration)> {
        let wanted = self.servers.iter().filter(|server| wanted(&server.settings.name));
        join_all(wanted.map(async |server| {
            let began = Instant::now();
            let _ = server.session().await;
            (status(server), began.elapsed())
        }))
        .await
    }

    /// Pins the tools of a server as its status `seen` showed them. Fails if they have changed since then. Returns
    /// `None` if there is no such server.
    pub fn agree(&self, seen: &ServerStatus) -> Option<Result<ServerStatus, CallError>> {
        let server = self.servers.iter().find(|server| server.settings.name == seen.name)?;
        Some(server.agree(&seen.changed).map(|()| status(server)))
    }

    /// Returns the status of all servers.
    pub fn status(&self) -> Vec<ServerStatus> {
        self.servers.iter().map(|server| status(server)).collect()
    }

    /// Ends all servers with their process trees.
    pub async fn close(&self) {
        join_all(self.servers.iter().map(|server| server.close())).await;
    }
}

impl Drop for Upstreams {
    fn drop(&mut self) {
        self.servers.iter().for_each(|server| server.detach());
    }
}

fn status(server: &Upstream) -> ServerStatus {
    let settings = &server.settings;
    let [tools, changed, unusable] = server.tool_maps();
    let (mut revision, mut info) = (None, None);
    let state = match server.state() {
        UpstreamState::Up(session) => {
            (revision, info) = (session.revision(), session.server_version());
            match session.failure_streak() {
                Some((why, failures)) => ServerState::Degraded { error: server.error(&why, None), failures },
                None => ServerState::Ready,
            }
        }
        UpstreamState::Starting => ServerState::Starting,
        UpstreamState::Down { failures, .. } if let Reach::Unusable(why) = &settings.reach => {
            let error = Failure::Configuration(why.as_str().into()).error(&settings.name, None);
            ServerState::Degraded { error, failures }
        }
        UpstreamState::Closed => ServerState::Closed,
        UpstreamState::Down { why: None, .. } => ServerState::NotStarted,
        UpstreamState::Down { why: Some(why), failures, until } => {
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

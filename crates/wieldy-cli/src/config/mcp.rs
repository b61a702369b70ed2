//! The section `mcp`: other MCP servers whose tools are used.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wieldy::mcp::client::{OnChange, Start, ToolRule, ToolRules};
use wieldy::{Level, Mount, Network};

use super::file::{FileMcp, FileServer, FileToolRule};
use super::kept;
use super::sandbox::at_home;
use super::text::{FileText, Text};
use super::value::Time;

/// The resolved section.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct McpConfig {
    /// Files of other MCP clients whose servers are used, too.
    pub(crate) files: Vec<PathBuf>,
    /// The longest time that a list of tools waits for servers without cached tools.
    pub(crate) list_wait: Duration,
    pub(crate) servers: Vec<ServerConfig>,
}

/// One server. Programs, variables and files of this machine are looked up when the server is opened.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct ServerConfig {
    pub(crate) name: String,
    pub(crate) command: Option<String>,
    pub(crate) args: Vec<String>,
    pub(crate) env: BTreeMap<String, Text>,
    pub(crate) cwd: Option<PathBuf>,
    /// The isolation; by default as strong as for all other programs.
    pub(crate) isolation: Option<Level>,
    pub(crate) network: Option<Network>,
    /// The mounts; by default guessed from the command.
    pub(crate) mounts: Option<Vec<Mount>>,
    pub(crate) url: Option<String>,
    pub(crate) headers: BTreeMap<String, Text>,
    pub(crate) oauth: OauthConfig,
    pub(crate) start: Start,
    pub(crate) start_timeout: Option<Duration>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) silence: Option<Duration>,
    pub(crate) calls_max: Option<usize>,
    pub(crate) trusted: bool,
    pub(crate) pass_context: bool,
    pub(crate) pass_meta: bool,
    pub(crate) on_change: OnChange,
    pub(crate) tools: ToolRules,
}

/// The settings for the login to a server that requires one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct OauthConfig {
    pub(crate) client_id: Option<String>,
    pub(crate) client_secret: Option<Text>,
    pub(crate) scopes: Vec<String>,
    pub(crate) port: Option<u16>,
    pub(crate) private: bool,
}

/// The time to start a server, as people write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileStart {
    Lazy,
    Eager,
}

/// The reaction to a changed tool, as people write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FileOnChange {
    Refuse,
    Warn,
}

impl FileMcp {
    /// Returns the default without servers. Some clients give up a request after five seconds, so a list of tools waits
    /// for less.
    pub(super) fn defaults() -> Self {
        let list_wait = Some(Time(Duration::from_secs(4)));
        Self { files: Some(Vec::new()), list_wait, servers: Some(BTreeMap::new()) }
    }
}

impl McpConfig {
    /// Resolves the section. No server may be isolated more weakly than the floor. The error lists all mistakes with
    /// their keys.
    pub(super) fn resolve(file: FileMcp, home: Option<&Path>, floor: Level) -> Result<Self, Vec<String>> {
        let mut wrong = Vec::new();
        let files = file.files.unwrap_or_default();
        let file_at = |path: &PathBuf| at_home(path, home).map_err(|wrong| Some(format!("`mcp.files`: {wrong}")));
        let files = files.iter().filter_map(|path| kept(file_at(path), &mut wrong)).collect();
        let used = file.servers.unwrap_or_default().into_iter().filter(|(_, server)| server.disabled != Some(true));
        let mut servers = Vec::new();
        for (name, server) in used {
            if let Some(level) = server.isolation.filter(|level| !level.is_at_least(floor)) {
                wrong.push(format!(
                    "`mcp.servers.{name}.isolation` is `{level}`, below `sandbox.floor`, which is `{floor}`"
                ));
            }
            wrong.extend(contradictions(&name, &server));
            let resolved = server_of(name.clone(), server, home);
            servers.extend(kept(resolved.map_err(|wrong| Some(format!("`mcp.servers.{name}`: {wrong}"))), &mut wrong));
        }
        let list_wait = file.list_wait.map(|time| time.0).unwrap_or_default();
        if wrong.is_empty() { Ok(Self { files, list_wait, servers }) } else { Err(wrong) }
    }
}

/// Returns the contradictions between keys of a server.
fn contradictions(name: &str, file: &FileServer) -> Vec<String> {
    let (has_command, has_url) = (file.command.is_some(), file.url.is_some());
    let oauth = file.oauth.as_ref();
    let checks = [
        (!has_command && !has_url, "` has neither a `command` nor a `url`"),
        (has_command && has_url, "` has both a `command` and a `url`"),
        (has_command && !has_url && oauth.is_some(), ".oauth` is for servers that have a `url`"),
        (
            oauth.is_some_and(|oauth| oauth.client_secret.is_some() && oauth.client_id.is_none()),
            ".oauth` has a `client-secret` without a `client-id`",
        ),
    ];
    let wrong = checks.into_iter().filter(|(is_wrong, _)| *is_wrong);
    wrong.map(|(_, message)| format!("`mcp.servers.{name}{message}")).collect()
}

/// Resolves a server.
fn server_of(name: String, file: FileServer, home: Option<&Path>) -> Result<ServerConfig, String> {
    let text = |text: FileText| text.resolve(home);
    let texts = |texts: Option<BTreeMap<String, FileText>>| {
        let texts = texts.unwrap_or_default().into_iter();
        texts.map(|(name, written)| Ok((name, text(written)?))).collect::<Result<BTreeMap<_, _>, String>>()
    };
    let oauth = file.oauth.unwrap_or_default();
    let mounts =
        file.mounts.map(|mounts| mounts.into_iter().map(|mount| mount.resolve(home)).collect::<Result<_, _>>());
    let rules = file.tools.unwrap_or_default().into_iter().map(|(tool, rule)| (tool, rule_of(rule)));
    Ok(ServerConfig {
        name,
        command: file.command,
        args: file.args.unwrap_or_default(),
        env: texts(file.env)?,
        cwd: file.cwd.map(|cwd| at_home(&cwd, home)).transpose()?,
        isolation: file.isolation,
        network: file.network.map(|network| network.0),
        mounts: mounts.transpose()?,
        url: file.url,
        headers: texts(file.headers)?,
        oauth: OauthConfig {
            client_id: oauth.client_id,
            client_secret: oauth.client_secret.map(text).transpose()?,
            scopes: oauth.scopes.unwrap_or_default(),
            port: oauth.port.and_then(|port| u16::try_from(port.0).ok()),
            private: oauth.private.unwrap_or(false),
        },
        start: match file.start {
            None | Some(FileStart::Lazy) => Start::Lazy,
            Some(FileStart::Eager) => Start::Eager,
        },
        start_timeout: file.start_timeout.map(|time| time.0),
        timeout: file.timeout.map(|time| time.0),
        silence: file.silence.map(|time| time.0),
        calls_max: file.calls_max.map(|count| count.0 as usize),
        trusted: file.trusted.unwrap_or(false),
        pass_context: file.pass_context.unwrap_or(false),
        pass_meta: file.pass_meta.unwrap_or(false),
        on_change: match file.on_change {
            None | Some(FileOnChange::Refuse) => OnChange::Refuse,
            Some(FileOnChange::Warn) => OnChange::Warn,
        },
        tools: ToolRules {
            allow: file.allow.unwrap_or_default(),
            deny: file.deny.unwrap_or_default(),
            rules: rules.collect(),
        },
    })
}

fn rule_of(file: FileToolRule) -> ToolRule {
    ToolRule {
        rename: file.rename,
        read_only: file.read_only,
        destructive: file.destructive,
        idempotent: file.idempotent,
        open_world: file.open_world,
        confirm: file.confirm,
        timeout: file.timeout.map(|time| time.0),
        silence: file.silence.map(|time| time.0),
    }
}

/// Makes relative paths start at this folder.
pub(super) fn begin_at(mcp: &mut FileMcp, folder: &Path) {
    if folder.as_os_str().is_empty() {
        return;
    }
    let begin = |path: &mut PathBuf| {
        if path.is_relative() && !path.starts_with("~") {
            *path = folder.join(&*path);
        }
    };
    mcp.files.iter_mut().flatten().for_each(begin);
    for server in mcp.servers.iter_mut().flat_map(BTreeMap::values_mut) {
        server.cwd.iter_mut().for_each(begin);
        server.mounts.iter_mut().flatten().for_each(|mount| mount.begin_at(folder));
        let texts = server.env.iter_mut().chain(&mut server.headers).flat_map(BTreeMap::values_mut);
        let secret = server.oauth.iter_mut().flat_map(|oauth| &mut oauth.client_secret);
        for text in texts.chain(secret) {
            text.begin_at(folder);
        }
    }
}

/// Returns true if the value of a key may be a secret: a value that a server gets, but not the path of a file with it.
pub(super) fn is_secret(key: &str) -> bool {
    let Some(rest) = key.strip_prefix("mcp.servers.").and_then(|rest| rest.split_once('.')) else { return false };
    let is_told = ["env.", "headers.", "oauth.client-secret"].iter().any(|begin| rest.1.starts_with(begin));
    is_told && !rest.1.ends_with(".file")
}

//! An operator's settings for an upstream server. Plain data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wieldy_core::{Annotations, Command, Confinement, Level, Network};

/// The default time for a server to start and list its tools. Several package managers that download at once take a
/// minute and more on a busy machine.
pub const START_TIMEOUT_DEFAULT: Duration = Duration::from_secs(180);
/// The default number of calls that a server runs at once.
pub const CALLS_MAX_DEFAULT: usize = 64;

/// The settings of one upstream server.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerSettings {
    /// The name: the part before `__` in the names of its tools.
    pub name: String,
    /// The transport.
    pub reach: Reach,
    /// The start policy.
    pub start: Start,
    /// The time limit to start and list the tools.
    pub start_timeout: Duration,
    /// The time limit of a call that sets none itself.
    pub timeout: Option<Duration>,
    /// The silence limit of a call that sets none itself: the longest time without progress.
    pub silence: Option<Duration>,
    /// Maximum number of calls at once.
    pub calls_max: usize,
    /// True if the server's hints on its tools (such as read-only) are trusted.
    pub trusted: bool,
    /// The reaction to a tool that differs from its pinned definition.
    pub on_change: OnChange,
    /// True if the server gets the context of each call, in `_meta` as `wieldy/context`.
    pub pass_context: bool,
    /// True if the server gets the client's own entries of `_meta`.
    pub pass_meta: bool,
    /// The rules for the server's tools.
    pub tools: ToolRules,
}

impl ServerSettings {
    /// Returns the default settings of a server.
    pub fn new(name: impl Into<String>, reach: Reach) -> Self {
        Self {
            name: name.into(),
            reach,
            start: Start::default(),
            start_timeout: START_TIMEOUT_DEFAULT,
            timeout: None,
            silence: None,
            calls_max: CALLS_MAX_DEFAULT,
            trusted: false,
            on_change: OnChange::default(),
            pass_context: false,
            pass_meta: false,
            tools: ToolRules::default(),
        }
    }
}

impl ServerSettings {
    /// Returns a hint if these settings explain the failure text `said`.
    pub(crate) fn hint(&self, said: &str) -> Option<String> {
        let name = &self.name;
        match &self.reach {
            Reach::Stdio(program) if program.level != Level::None => {
                let command = Path::new(&program.command.program).file_name().and_then(|name| name.to_str());
                if let Some(command) = command.filter(|command| CONTAINERS.contains(command)) {
                    return Some(format!(
                        "`{command}` needs its daemon, which no sandbox can reach: `isolation = \"none\"` under `[mcp.servers.{name}]` lets it start containers"
                    ));
                }
                let reaches = match &program.confinement.network {
                    Network::Open => return None,
                    Network::None => "no network".to_owned(),
                    Network::Hosts(hosts) => format!("no hosts but `{}`", hosts.join("`, `")),
                };
                let said = said.to_lowercase();
                UNREACHED.iter().any(|sign| said.contains(sign)).then(|| {
                    format!(
                        "wieldy lets this server reach {reaches}: `network = \"open\"` or a list of hosts under `[mcp.servers.{name}]` changes that"
                    )
                })
            }
            Reach::Http(address) if address.is_of_sse() => Some(format!(
                "the address ends like one of the old transport HTTP+SSE, which wieldy does not speak: give the server's address for streamable HTTP as `url` under `[mcp.servers.{name}]`, often `/mcp` instead of `/sse`"
            )),
            Reach::Stdio(_) | Reach::Http(_) | Reach::Unusable(_) => None,
        }
    }
}

/// Programs that ask a daemon to start containers.
pub(super) const CONTAINERS: [&str; 3] = ["docker", "nerdctl", "podman"];
/// Lower-case texts by which programs report that they reach no host. A package manager may just retry until the start
/// times out.
const UNREACHED: [&str; 14] = [
    "wieldy's setting `network`",
    "did not list its tools",
    "eai_again",
    "econnrefused",
    "enetunreach",
    "enotfound",
    "connection refused",
    "could not resolve",
    "dns error",
    "error sending request",
    "getaddrinfo",
    "name resolution",
    "network is unreachable",
    "fetch failed",
];

/// The transport to a server.
#[derive(Debug, Clone, PartialEq)]
pub enum Reach {
    /// A local program in a sandbox of its own, over its stdin and stdout.
    Stdio(Box<Program>),
    /// HTTP.
    Http(Address),
    /// Unusable for this reason: a setting or a secret is missing. The tools stay known.
    Unusable(String),
}

/// A server that is a local program.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// The command. Its stdin is ours.
    pub command: Command,
    /// The isolation level.
    pub level: Level,
    /// The files, network and resources that it may use.
    pub confinement: Confinement,
}

/// The address of a server over HTTP.
#[derive(Clone, PartialEq)]
pub struct Address {
    /// The URL: `http://` or `https://`.
    pub url: String,
    /// Headers of every request. They are often secrets.
    pub headers: BTreeMap<String, String>,
    /// The bearer token, if it is not among the headers.
    pub bearer: Option<String>,
    /// The OAuth login, used if there is no configured token.
    pub login: Option<LoginSettings>,
}

impl Address {
    /// Returns an address without headers or token.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), headers: BTreeMap::new(), bearer: None, login: None }
    }

    /// Returns true if the path ends like those of the HTTP+SSE transport of 2024-11-05.
    fn is_of_sse(&self) -> bool {
        let path = self.url.split(['?', '#']).next().unwrap_or_default();
        path.trim_end_matches('/').ends_with("/sse")
    }
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let headers: Vec<&String> = self.headers.keys().collect();
        f.debug_struct("Address").field("url", &self.url).field("headers", &headers).finish_non_exhaustive()
    }
}

/// The settings of an OAuth login.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct LoginSettings {
    /// The file in which the login is stored.
    pub file: PathBuf,
    /// The client id at the authorization server. Without one, wieldy registers itself.
    pub client_id: Option<String>,
    /// The client secret.
    pub client_secret: Option<String>,
    /// The scopes to ask for. If empty, those that the server names.
    pub scopes: Vec<String>,
    /// The local port of the redirect. `None` for any free port.
    pub port: Option<u16>,
    /// True if the authorization server may have a private address although the server's own is public.
    pub private: bool,
}

impl std::fmt::Debug for LoginSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { file, client_id, client_secret: _, scopes, port, private } = self;
        let mut debug = f.debug_struct("LoginSettings");
        debug.field("file", file).field("client_id", client_id).field("scopes", scopes);
        debug.field("port", port).field("private", private).finish_non_exhaustive()
    }
}

/// The start policy of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// When one of its tools is first called, or when its tools are not known yet.
    #[default]
    Lazy,
    /// At once, and again whenever it ends.
    Eager,
}

/// The reaction to a tool that differs from its pinned definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnChange {
    /// Calls are refused until the new definition is agreed to.
    #[default]
    Refuse,
    /// The new definition is used, with a warning.
    Warn,
}

/// The rules for a server's tools.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolRules {
    /// If not empty, only these tools. A name that ends in `*` is a prefix.
    pub allow: Vec<String>,
    /// Tools that are left out.
    pub deny: Vec<String>,
    /// Rules for single tools, by the server's own names.
    pub rules: BTreeMap<String, ToolRule>,
}

impl ToolRules {
    /// Returns true if a tool of this name is used.
    pub fn takes(&self, name: &str) -> bool {
        let named = |names: &[String]| names.iter().any(|pattern| is_of(pattern, name));
        (self.allow.is_empty() || named(&self.allow)) && !named(&self.deny)
    }
}

/// Returns true if the name equals the pattern or begins with its prefix.
fn is_of(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(family) => name.starts_with(family),
        None => name == pattern,
    }
}

/// The operator's settings for one tool. Unset fields are the server's, as far as it is trusted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ToolRule {
    /// The new name, after `server__`.
    pub rename: Option<String>,
    /// True if it changes nothing.
    pub read_only: Option<bool>,
    /// True if it may destroy something, not only add.
    pub destructive: Option<bool>,
    /// True if doing it twice is the same as doing it once.
    pub idempotent: Option<bool>,
    /// True if it touches things outside this machine.
    pub open_world: Option<bool>,
    /// True if a person must agree to each call.
    pub confirm: Option<bool>,
    /// The time limit of a call.
    pub timeout: Option<Duration>,
    /// The silence limit of a call of this tool: the longest time without progress.
    pub silence: Option<Duration>,
}

impl ToolRule {
    /// Returns the tool's annotations: the operator's if set, else those in `told`.
    pub(crate) fn annotations(&self, told: Annotations) -> Annotations {
        let read_only = self.read_only.unwrap_or(told.read_only);
        Annotations {
            read_only,
            // A tool that the operator calls read-only is not destructive, unless the operator says so too.
            destructive: self.destructive.unwrap_or(told.destructive && !read_only),
            idempotent: self.idempotent.unwrap_or(told.idempotent || read_only),
            open_world: self.open_world.unwrap_or(told.open_world),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_allowed_and_denied_by_name_and_prefix() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let rules = ToolRules { allow: names(&["git_*", "ping"]), deny: names(&["git_push"]), ..ToolRules::default() };
        let taken = ["git_log", "git_push", "ping", "pings", "rm"].map(|name| rules.takes(name));
        assert_eq!(taken, [true, false, true, false, false]);
        assert!(ToolRules::default().takes("anything"));
    }

    #[test]
    fn rules_override_the_annotations_of_the_server() {
        let rule = ToolRule { read_only: Some(true), ..ToolRule::default() };
        let here = rule.annotations(Annotations::default());
        assert_eq!(here, Annotations { read_only: true, destructive: false, idempotent: true, open_world: true });
        let told = Annotations { read_only: true, destructive: false, idempotent: true, open_world: false };
        assert_eq!(ToolRule::default().annotations(told), told);
    }

    #[test]
    fn an_address_does_not_show_its_secrets() {
        let headers = BTreeMap::from([("X-Key".to_owned(), "hunter2".to_owned())]);
        let address =
            Address { url: "https://a.test/mcp".into(), headers, bearer: Some("hunter3".into()), login: None };
        assert_eq!(format!("{address:?}"), r#"Address { url: "https://a.test/mcp", headers: ["X-Key"], .. }"#);
        let login = LoginSettings { client_secret: Some("hunter4".into()), ..LoginSettings::default() };
        assert!(!format!("{login:?}").contains("hunter"));
    }
}

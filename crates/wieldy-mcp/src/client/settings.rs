//! What an operator says of an upstream server. Plain data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wieldy_core::{Annotations, Command, Confinement, Level, Network};

/// The time that a server gets to start and to tell its tools, unless its settings name another. Several that package managers
/// fetch at once take a minute and more on a busy machine.
pub const START_TIMEOUT_DEFAULT: Duration = Duration::from_secs(180);
/// How many calls a server gets at once, where nobody says anything.
pub const CALLS_MAX_DEFAULT: usize = 64;

/// One upstream server.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerSettings {
    /// Its name: the part before `__` in the names of its tools.
    pub name: String,
    /// How it is reached.
    pub reach: Reach,
    /// When it is started.
    pub start: Start,
    /// How long it may take to start and to tell its tools.
    pub start_timeout: Duration,
    /// How long one call may take, where the call does not say.
    pub timeout: Option<Duration>,
    /// How long one call may show no sign of life, where the call does not say.
    pub silence: Option<Duration>,
    /// How many calls it gets at once.
    pub calls_max: usize,
    /// Whether what it says of its tools (that they only read, for instance) is believed.
    pub trusted: bool,
    /// What happens when a tool is no longer what it was when it was first seen.
    pub on_change: OnChange,
    /// Which of its tools are taken, and what is said of them here.
    pub tools: ToolRules,
}

impl ServerSettings {
    /// A server with the usual settings.
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
            tools: ToolRules::default(),
        }
    }
}

impl ServerSettings {
    /// Returns a hint to what is said of a failure, where these settings explain it.
    pub(crate) fn hint(&self, said: &str) -> Option<String> {
        let name = &self.name;
        match &self.reach {
            Reach::Stdio(program) if program.level != Level::None => {
                let command = Path::new(&program.command.program).file_name().and_then(|name| name.to_str());
                if let Some(command) = command.filter(|command| CONTAINERS.contains(command)) {
                    return Some(format!(
                        "`{command}` needs its daemon, which no sandbox shows: `isolation = \"none\"` under `[mcp.servers.{name}]` lets it start containers"
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

/// Programs that let a daemon start containers.
pub(super) const CONTAINERS: [&str; 3] = ["docker", "nerdctl", "podman"];
/// Words of programs that reach nobody, in small letters. A package manager may also just try again for too long.
const UNREACHED: [&str; 14] = [
    "wieldy's setting `network`",
    "did not tell its tools",
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

/// How a server is reached.
#[derive(Debug, Clone, PartialEq)]
pub enum Reach {
    /// As a program of this machine, in a sandbox of its own, by its input and output.
    Stdio(Box<Program>),
    /// By HTTP.
    Http(Address),
    /// Not at all, for this reason: something that it needs is missing. Its tools stay known.
    Unusable(String),
}

/// A program that is a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// What is started; what it reads is up to us.
    pub command: Command,
    /// How strongly it is kept apart.
    pub level: Level,
    /// What it may read, write, reach and use.
    pub confinement: Confinement,
}

/// Where a server listens.
#[derive(Clone, PartialEq)]
pub struct Address {
    /// `http://` or `https://`.
    pub url: String,
    /// What is sent along with each request: often a secret.
    pub headers: BTreeMap<String, String>,
    /// The token that is sent along, where it is not among the headers.
    pub bearer: Option<String>,
    /// How somebody logs in, where neither is there.
    pub login: Option<LoginSettings>,
}

impl Address {
    /// An address where nothing is sent along.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), headers: BTreeMap::new(), bearer: None, login: None }
    }

    /// Returns true if the path ends as those of the transport of 2024-11-05 do.
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

/// How somebody logs in to a server.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct LoginSettings {
    /// The file in which it is kept.
    pub file: PathBuf,
    /// What we are called where logins are made; without it we register there.
    pub client_id: Option<String>,
    /// What proves it.
    pub client_secret: Option<String>,
    /// What the login is for; what the server says, if there are none.
    pub scopes: Vec<String>,
    /// The port of this machine to which the answer comes; any, where it is not said.
    pub port: Option<u16>,
    /// Whether the login may be made at a private address, even though the server's own is none.
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

/// When a server is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// When one of its tools is first called, or when its tools are not known yet.
    #[default]
    Lazy,
    /// At once, and again whenever it ends.
    Eager,
}

/// What happens when a tool is no longer what it was when it was first seen, or last agreed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnChange {
    /// It is not called until somebody has agreed to what it is now.
    #[default]
    Refuse,
    /// It is taken as it is now, with a warning.
    Warn,
}

/// Which tools of a server are taken, and what is said of them here.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolRules {
    /// Only these, where there are any. A name that ends in `*` means a family.
    pub allow: Vec<String>,
    /// Not these.
    pub deny: Vec<String>,
    /// What is said of single tools, by the server's own names.
    pub rules: BTreeMap<String, ToolRule>,
}

impl ToolRules {
    /// Whether a tool of this name is taken.
    pub fn takes(&self, name: &str) -> bool {
        let named = |names: &[String]| names.iter().any(|pattern| is_of(pattern, name));
        (self.allow.is_empty() || named(&self.allow)) && !named(&self.deny)
    }
}

/// Whether the name is the one of the pattern, or of its family.
fn is_of(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(family) => name.starts_with(family),
        None => name == pattern,
    }
}

/// What is said here of one tool; what is not set is left to the server, as far as it is trusted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ToolRule {
    /// The name it has here, after `server__`.
    pub rename: Option<String>,
    /// It changes nothing.
    pub read_only: Option<bool>,
    /// It may destroy something, rather than only add.
    pub destructive: Option<bool>,
    /// Doing it twice is the same as doing it once.
    pub idempotent: Option<bool>,
    /// It touches things outside this machine.
    pub open_world: Option<bool>,
    /// A person must agree each time.
    pub confirm: Option<bool>,
    /// How long one call may take.
    pub timeout: Option<Duration>,
    /// How long one call may show no sign of life.
    pub silence: Option<Duration>,
}

impl ToolRule {
    /// What holds of a tool: what is said here, then what `told` says.
    pub(crate) fn annotations(&self, told: Annotations) -> Annotations {
        let read_only = self.read_only.unwrap_or(told.read_only);
        Annotations {
            read_only,
            // Whoever says here that it changes nothing need not say that it destroys nothing.
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
    fn tools_are_taken_by_name_and_family_and_left_out_likewise() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let rules = ToolRules { allow: names(&["git_*", "ping"]), deny: names(&["git_push"]), ..ToolRules::default() };
        let taken = ["git_log", "git_push", "ping", "pings", "rm"].map(|name| rules.takes(name));
        assert_eq!(taken, [true, false, true, false, false]);
        assert!(ToolRules::default().takes("anything"));
    }

    #[test]
    fn what_is_said_here_wins_over_what_the_server_says() {
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

//! Other MCP servers: opens the servers of the configuration and of the files of other clients.

mod sees;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio_util::sync::CancellationToken;
use wieldy::mcp::client::import::{self, Imported};
use wieldy::mcp::client::{
    Address, CALLS_MAX_DEFAULT, LoginSettings, Pins, Program, Reach, START_TIMEOUT_DEFAULT, ServerSettings,
    ServerState, Start, Upstreams,
};
use wieldy::{
    Caller, Command, Confinement, Executor, Level, Mount, Network, Place, ResourceLimits, Stdin, ToolName, redact,
};

use self::sees::{guessed, is_system, named_by_variables, path_in, seen};
use crate::assemble;
use crate::config::{Config, Environment, ServerConfig, Text, bounded, filled};
use crate::exit::Failure;
use crate::history;
use crate::output::{Printer, counted, shown_in_line};

/// The time that a server has to end after it was asked to.
const GRACE: Duration = Duration::from_secs(2);
/// The home of programs in sandboxes.
const HOME: &str = "/home/agent";
/// Variables that name the certificates with which programs verify servers.
const CERTIFICATES: [&str; 7] = [
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "NODE_EXTRA_CA_CERTS",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
];
/// Variables that name the proxy of this network.
const PROXIES: [&str; 8] =
    ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"];
/// Opens the configured servers: their cached tools are added to the executor's registry.
pub(crate) fn open(config: &Config, environment: &Environment, executor: &Executor) -> Result<Upstreams, Failure> {
    let servers = servers(config, environment)?;
    let settings: Vec<ServerSettings> = servers.iter().map(|server| settings(server, config, environment)).collect();
    use_settings(settings, config, executor)
}

/// Opens the servers for a command that decides itself which of them it starts.
pub(crate) fn open_lazily(
    config: &Config,
    environment: &Environment,
    executor: &Executor,
) -> Result<Upstreams, Failure> {
    let servers = servers(config, environment)?;
    let lazily = |server| ServerSettings { start: Start::Lazy, ..settings(server, config, environment) };
    use_settings(servers.iter().map(lazily).collect(), config, executor)
}

fn use_settings(settings: Vec<ServerSettings>, config: &Config, executor: &Executor) -> Result<Upstreams, Failure> {
    let pins = match pins_path(config).filter(|_| !settings.is_empty()) {
        Some(path) => Pins::open(path).map_err(|error| {
            Failure::broken(error)
                .hint("`--state DIR` names another folder; without the file, a person must agree to the servers again")
        })?,
        None => Pins::default(),
    };
    Upstreams::new(executor, settings, Arc::new(pins))
        .map_err(|error| Failure::usage(error).hint("rename the server in the section `mcp.servers`"))
}

/// Registers the cached tools of servers for a command that runs none, and names the servers without cached tools.
pub(crate) fn recall(
    config: &Config,
    environment: &Environment,
    executor: &Executor,
    printer: &Printer,
) -> Result<(), Failure> {
    let servers = open_lazily(config, environment, executor)?;
    for server in servers.status().iter().filter(|server| server.tools.is_empty()) {
        let name = &server.name;
        printer
            .tell(&format!("the tools of the MCP server `{name}` are not known yet; `wieldy mcp test {name}` asks it"));
    }
    Ok(())
}

/// Opens the servers for calls of these tools. Servers without cached tools are started if they may have one of them.
pub(crate) async fn open_for(
    tools: &[&str],
    config: &Config,
    environment: &Environment,
    executor: &Executor,
) -> Result<Upstreams, Failure> {
    let servers = open_lazily(config, environment, executor)?;
    let registry = executor.registry();
    // A weak alias means another tool, or none, once a server's tool has it as its short name.
    let is_settled = |tool: &str| {
        let found = registry.find(tool, &Caller::local());
        found.is_ok_and(|found| !found.spec().weak_aliases.iter().any(|alias| alias == tool))
    };
    let unknown: Vec<&&str> = tools.iter().filter(|tool| !is_settled(tool)).collect();
    let may_have = |server: &str| {
        unknown.iter().any(|tool| match tool.split_once(ToolName::SEPARATOR) {
            Some((named, _)) => named == server,
            None => true,
        })
    };
    servers.discover(may_have).await;
    Ok(servers)
}

/// Runs a door while servers without cached tools start. `ready` is cancelled when they have listed their tools, or
/// after `within`: lists of tools wait no longer. Each server that fails is reported once.
pub(crate) async fn beside<T>(
    door: impl Future<Output = T>,
    servers: &Upstreams,
    within: Duration,
    ready: &CancellationToken,
    printer: &Printer,
) -> T {
    let mut told = BTreeSet::new();
    let mut warn = || {
        for server in servers.status() {
            if let ServerState::Degraded { error, .. } = &server.state
                && told.insert(server.name)
            {
                printer.tell(&format!("warning: {}", shown_in_line(&error.to_string())));
                printer.hint(error.suggestion.as_deref());
            }
        }
    };
    let introduced = async {
        servers.introduce(within).await;
        ready.cancel();
        warn();
        servers.discover(|_| true).await;
        warn();
        std::future::pending::<std::convert::Infallible>().await
    };
    tokio::select! {
        ended = door => ended,
        never = introduced => match never {},
    }
}

/// Returns the file with the pinned tools of servers.
fn pins_path(config: &Config) -> Option<PathBuf> {
    (!config.state.as_os_str().is_empty()).then(|| config.state.join("mcp/pins.json"))
}

/// Returns the servers of the configuration, then those of the files that it names. Of two with the same name the first
/// counts.
pub(crate) fn servers(config: &Config, environment: &Environment) -> Result<Vec<ServerConfig>, Failure> {
    let mut servers = config.mcp.servers.clone();
    for path in &config.mcp.files {
        for imported in read(path, config)?.into_iter().filter(|imported| !imported.disabled) {
            if servers.iter().all(|server| server.name != imported.name) {
                servers.push(taken(imported, environment));
            }
        }
    }
    Ok(servers)
}

/// Reads the servers in a file of another client.
pub(crate) fn read(path: &Path, config: &Config) -> Result<Vec<Imported>, Failure> {
    let doing = || format!("cannot import MCP servers from `{}`", path.display());
    let read = || -> anyhow::Result<Vec<Imported>> {
        // For a file that came with the folder, the trusted bytes count.
        let text = match config.folder.read.get(path) {
            Some(bytes) => String::from_utf8(bytes.clone())?,
            None => bounded(path)?,
        };
        let file = if path.extension().is_some_and(|extension| extension == "toml") {
            toml::from_str(&text)?
        } else {
            serde_json::from_str(&import::without_comments(&text))?
        };
        Ok(import::servers(&file)?)
    };
    let hint = "name the file in which an MCP client, such as an editor, stores its servers";
    read().with_context(doing).map_err(|error| Failure::usage(error).hint(hint))
}

/// Converts a server of another client's file, with the default settings.
fn taken(imported: Imported, environment: &Environment) -> ServerConfig {
    let written =
        |texts: BTreeMap<String, String>| texts.into_iter().map(|(name, text)| (name, Text::Written(text))).collect();
    // The values are resolved when the server is used; only `~` is replaced here already.
    let at_home = |text: String| match (text.strip_prefix("~/"), environment.home()) {
        (Some(rest), Some(home)) => home.join(rest).display().to_string(),
        _ => text,
    };
    ServerConfig {
        name: imported.name,
        command: imported.command.map(at_home),
        args: imported.args.into_iter().map(at_home).collect(),
        env: written(imported.env),
        cwd: imported.cwd.map(|cwd| at_home(cwd).into()),
        url: imported.url,
        headers: written(imported.headers),
        ..ServerConfig::default()
    }
}

/// Returns the settings of a server. A server that lacks something stays registered, and reports it when it is called.
fn settings(server: &ServerConfig, config: &Config, environment: &Environment) -> ServerSettings {
    let reach = match &server.command {
        Some(command) => program(command, server, config, environment).map(|program| Reach::Stdio(Box::new(program))),
        None => address(server, config, environment).map(Reach::Http),
    };
    let reach = reach.unwrap_or_else(|error| Reach::Unusable(format!("{error:#}")));
    ServerSettings {
        start: server.start,
        start_timeout: server.start_timeout.unwrap_or(START_TIMEOUT_DEFAULT),
        timeout: server.timeout,
        silence: server.silence,
        calls_max: server.calls_max.unwrap_or(CALLS_MAX_DEFAULT),
        trusted: server.trusted,
        pass_context: server.pass_context,
        pass_meta: server.pass_meta,
        on_change: server.on_change,
        tools: server.tools.clone(),
        ..ServerSettings::new(&server.name, reach)
    }
}

fn address(server: &ServerConfig, config: &Config, environment: &Environment) -> anyhow::Result<Address> {
    let url = filled(server.url.as_deref().unwrap_or_default(), environment)?;
    let headers = texts(&server.headers, environment)?;
    headers.values().for_each(|value| hide_header(value));
    let oauth = &server.oauth;
    let secret = oauth.client_secret.as_ref().map(|text| text.value(environment)).transpose()?;
    if let Some(secret) = &secret {
        redact::hide(secret);
    }
    // Without a state folder no login can be stored.
    let login = (!config.state.as_os_str().is_empty()).then(|| LoginSettings {
        file: assemble::whole(&config.state).join("mcp/logins").join(format!("{}.json", server.name)),
        client_id: oauth.client_id.clone(),
        client_secret: secret,
        scopes: oauth.scopes.clone(),
        port: oauth.port,
        private: oauth.private,
    });
    Ok(Address { headers, login, ..Address::new(url) })
}

/// Returns the address of the server with this name, to log in or out.
pub(crate) fn address_of(name: &str, config: &Config, environment: &Environment) -> Result<Option<Address>, Failure> {
    let servers = servers(config, environment)?;
    let Some(server) = servers.iter().find(|server| server.name == name) else { return Ok(None) };
    if server.url.is_none() {
        return Err(Failure::usage(anyhow!("the MCP server `{name}` is a program: give it a token with `env`")));
    }
    address(server, config, environment).map(Some).map_err(Failure::usage)
}

fn program(
    command: &str,
    server: &ServerConfig,
    config: &Config,
    environment: &Environment,
) -> anyhow::Result<Program> {
    let command = filled(command, environment)?;
    let arguments = server.args.iter().map(|text| filled(text, environment)).collect::<anyhow::Result<Vec<_>>>()?;
    let level = server.isolation.unwrap_or(config.isolation);
    let workspace = assemble::whole(&config.workspace);
    let cwd = server.cwd.as_ref().map_or_else(|| workspace.clone(), |cwd| assemble::whole(cwd));
    let mut variables = assemble::program_environment(config, environment);
    let search = variables.get("PATH").cloned().unwrap_or_default();
    let found = find(&command, &search, &cwd).ok_or_else(|| missing(&command, &search, &cwd))?;
    // Most servers need the network for their task.
    let network = server.network.clone().unwrap_or(Network::Open);
    let own = texts(&server.env, environment)?;
    let mut files = assemble::files(config, environment);
    let (ways_out, certificates) = ways_out(&network, environment);
    variables.extend(ways_out);
    if level != Level::None {
        // A writable home of its own, in which package managers cache their downloads.
        if let Some(home) = own_home(server, config)? {
            variables.insert("HOME".into(), HOME.into());
            files.mounts.push(Mount { source: home, target: HOME.into(), writable: true });
        }
        // Paths in the arguments are guessed only if no mounts are configured.
        let named = if server.mounts.is_none() { arguments.as_slice() } else { &[] };
        files.mounts.extend(guessed(&found, named, &cwd, &workspace, environment));
        files.mounts.extend(server.mounts.iter().flatten().cloned());
        let is_new = |path: &Path| !seen(path, &workspace, &files) && !is_system(path);
        let read_only = |path: PathBuf| Mount { source: path.clone(), target: path, writable: false };
        let certificates: Vec<Mount> = certificates.into_iter().filter(|path| is_new(path)).map(read_only).collect();
        files.mounts.extend(certificates);
        let paths = own.iter().filter_map(|(variable, value)| Some((variable.as_str(), path_in(value, &cwd)?)));
        let by_variables = named_by_variables(server, paths, &workspace, &files, environment);
        files.mounts.extend(by_variables);
        if server.cwd.is_some() && !seen(&cwd, &workspace, &files) {
            files.mounts.push(Mount { source: cwd.clone(), target: cwd.clone(), writable: false });
        }
    }
    variables.extend(own);
    Ok(Program {
        command: Command {
            program: found.display().to_string(),
            arguments,
            environment: variables,
            folder: cwd,
            stdin: Stdin::Nothing,
            terminal: None,
        },
        level,
        confinement: Confinement {
            workspace,
            files: Arc::new(files),
            network,
            limits: lasting(config.resources),
            place: Place::Own,
            place_limits: ResourceLimits::default(),
            grace: GRACE,
        },
    })
}

/// Returns the error for a missing program of a server, with advice.
fn missing(command: &str, search: &str, cwd: &Path) -> anyhow::Error {
    if command.contains('/') {
        return anyhow!("there is no program `{}` that can be run", assemble::whole(&cwd.join(command)).display());
    }
    let folders = search.split(':').filter(|folder| !folder.is_empty()).count();
    let folders = counted(folders, "folder");
    anyhow!("there is no program `{command}` in the {folders} of PATH; install it, or set `command` to its full path")
}

/// Returns the limits of one call that also suit a server of many calls: the amount that it reads, writes and computes
/// has no limit.
fn lasting(limits: ResourceLimits) -> ResourceLimits {
    let ResourceLimits { memory_bytes, processes, open_files, .. } = limits;
    ResourceLimits { memory_bytes, processes, open_files, ..ResourceLimits::default() }
}

/// Returns the home of a server in a sandbox, or `None` without a state folder.
fn own_home(server: &ServerConfig, config: &Config) -> anyhow::Result<Option<PathBuf>> {
    use std::os::unix::fs::DirBuilderExt;
    if config.state.as_os_str().is_empty() {
        return Ok(None);
    }
    let home = assemble::whole(&config.state).join("homes").join(&server.name);
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&home);
    made.with_context(|| format!("its home `{}` cannot be made", home.display()))?;
    Ok(Some(home.canonicalize().unwrap_or(home)))
}

/// Finds the program of a command, as a shell would.
pub(crate) fn find(command: &str, search: &str, cwd: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    if command.contains('/') {
        return Some(cwd.join(command)).filter(is_program);
    }
    search.split(':').filter(|folder| !folder.is_empty()).map(|folder| Path::new(folder).join(command)).find(is_program)
}

/// Returns the variables with which a server reaches the network as programs of this machine do, and the certificates
/// that they name. For a server that may reach only some hosts, the sandbox has a proxy of its own.
fn ways_out(network: &Network, environment: &Environment) -> (BTreeMap<String, String>, Vec<PathBuf>) {
    let (mut variables, mut certificates) = (BTreeMap::new(), Vec::new());
    let value = |name: &str| environment.0.get(name).filter(|value| !value.is_empty());
    if *network == Network::None {
        return (variables, certificates);
    }
    for name in CERTIFICATES {
        let Some(value) = value(name) else { continue };
        let real: Vec<PathBuf> = value.split(':').filter_map(|path| Path::new(path).canonicalize().ok()).collect();
        if !real.is_empty() {
            let named: Vec<String> = real.iter().map(|path| path.display().to_string()).collect();
            variables.insert(name.to_owned(), named.join(":"));
            certificates.extend(real);
        }
    }
    certificates.sort_unstable();
    certificates.dedup();
    for name in PROXIES.into_iter().filter(|_| *network == Network::Open) {
        let Some(value) = value(name) else { continue };
        hide_credentials(value);
        variables.insert(name.to_owned(), value.clone());
    }
    (variables, certificates)
}

/// Redacts the name and the password in the address of a proxy from now on.
fn hide_credentials(address: &str) {
    let after = address.split_once("://").map_or(address, |(_, after)| after);
    let Some((credentials, _)) = after.rsplit_once('@') else { return };
    redact::hide(credentials);
    if let Some((_, password)) = credentials.split_once(':') {
        redact::hide(password);
    }
}

/// Resolves texts. Values from files and likely secrets are redacted from now on.
pub(crate) fn texts(
    texts: &BTreeMap<String, Text>,
    environment: &Environment,
) -> anyhow::Result<BTreeMap<String, String>> {
    texts
        .iter()
        .map(|(name, text)| {
            let value = text.value(environment).with_context(|| format!("`{name}`"))?;
            if history::is_secret(name, &value) {
                redact::hide(&value);
            }
            Ok((name.clone(), value))
        })
        .collect()
}

/// Redacts the value of a header from now on, and also the part after a scheme, as in `Bearer …`.
pub(crate) fn hide_header(value: &str) {
    redact::hide(value);
    if let Some((_, secret)) = value.trim().split_once(' ') {
        redact::hide(secret);
    }
}

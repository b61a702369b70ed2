//! `wieldy mcp list|test|pin|login|logout|import`: manages the MCP servers whose tools are used.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use serde_json::json;
use wieldy::mcp::client::import::Imported;
use wieldy::mcp::client::{LoginState, ServerState, ServerStatus, Upstreams};
use wieldy::{Code, name};

use crate::args::McpCommand;
use crate::config::{self, Config, Environment, FILE_NAME, FileServer, FileText, InFile, Records, Trust};
use crate::exit::{Exit, Failure};
use crate::output::{Printer, counted, shown, shown_in_line};
use crate::{assemble, confirm, history, in_runtime, upstreams};

use super::{login, trust};

pub(crate) fn run(
    command: &McpCommand,
    into: Option<&Path>,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    if let McpCommand::Import { file, only, print } = command {
        return import(file, only, *print, into, config, environment, printer);
    }
    if let McpCommand::Login { server, .. } | McpCommand::Logout { server } = command {
        return login::run(command, server, config, environment, printer);
    }
    in_runtime(async {
        let executor = assemble::executor(config, environment, None, None, assemble::Work::default())?;
        let servers = upstreams::open_lazily(config, environment, &executor)?;
        let done = match command {
            McpCommand::List => list(&servers, printer),
            McpCommand::Test { servers: wanted } => test(&servers, wanted, printer).await,
            McpCommand::Pin { servers: wanted, yes } => pin(&servers, wanted, *yes, printer).await,
            McpCommand::Import { .. } | McpCommand::Login { .. } | McpCommand::Logout { .. } => {
                unreachable!("it was dealt with above")
            }
        };
        servers.close().await;
        done
    })
}

/// Prints the cached state of the servers without starting any.
fn list(servers: &Upstreams, printer: &Printer) -> Result<Exit, Failure> {
    let all = servers.status();
    if printer.json {
        printer.json(&all)?;
        return Ok(Exit::Success);
    }
    let widest = all.iter().map(|server| server.name.len()).max().unwrap_or_default();
    for server in &all {
        let mut known = match (&server.state, server.tools.len()) {
            (ServerState::Degraded { error, .. }, _) => shown_in_line(&error.message),
            (_, 0) => "its tools are not known yet".to_owned(),
            (_, count) => counted(count, "tool"),
        };
        known += match server.login {
            None => "",
            Some(LoginState::LoggedIn) => ", logged in",
            Some(LoginState::Wanted) => ", wants a login",
        };
        printer.line(&format!("{:widest$}  {:5}  {known}", server.name, server.transport))?;
    }
    if all.is_empty() {
        printer.tell("no MCP servers are configured; `wieldy mcp import FILE` imports those of another client");
    }
    Ok(Exit::Success)
}

/// Starts servers and prints their state. All of them are tried, even after one has failed.
async fn test(servers: &Upstreams, wanted: &[String], printer: &Printer) -> Result<Exit, Failure> {
    known(servers, wanted)?;
    let tested = servers.test(|name| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name)).await;
    let mut exit = Exit::Success;
    let mut all = Vec::new();
    for (status, took) in &tested {
        // The exit code is that of the first server that fails.
        exit = match &status.state {
            _ if exit != Exit::Success => exit,
            ServerState::Degraded { error, .. } => Exit::of(error),
            _ if !status.changed.is_empty() => Exit::Denied,
            _ => Exit::Success,
        };
        let mut told = json!(status);
        told["took_ms"] = json!(took.as_millis() as u64);
        all.push(told);
        if !printer.json {
            printer.data(report(status, *took).as_bytes())?;
        }
    }
    if printer.json {
        printer.json(&all)?;
    } else if tested.is_empty() {
        printer.tell("no MCP servers are configured; `wieldy mcp import FILE` imports those of another client");
    }
    Ok(exit)
}

/// Formats the state of one server.
fn report(status: &ServerStatus, took: Duration) -> String {
    let mut text = String::new();
    let name = &status.name;
    match &status.state {
        ServerState::Degraded { error, .. } => {
            let _ = writeln!(text, "{name}: {}", shown_in_line(&error.to_string()));
            let hint = match error.code {
                Code::TransportFailed if error.suggestion.as_deref().is_none_or(|hint| hint.contains("mcp test")) => {
                    Some("`--log wieldy::mcp=debug` shows what it prints".to_owned())
                }
                _ => error.suggestion.as_deref().map(shown_in_line),
            };
            if let Some(hint) = hint {
                let _ = writeln!(text, "  hint: {hint}");
            }
        }
        _ => {
            let server = shown_in_line(status.server.as_deref().unwrap_or("a server without a name"));
            let revision = shown_in_line(status.revision.as_deref().unwrap_or("unknown"));
            let _ = writeln!(text, "{name}: {server}, MCP {revision}, {} ms", took.as_millis());
        }
    }
    for registered in status.tools.values() {
        let _ = writeln!(text, "  {}", shown_in_line(registered));
    }
    for (tool, why) in &status.unusable {
        let _ = writeln!(text, "  {} cannot be used: {}", shown_in_line(tool), shown_in_line(why));
    }
    for (tool, diff) in &status.changed {
        let _ = writeln!(text, "  {} changed since it was agreed to:\n{}", shown_in_line(tool), indented(diff));
    }
    if !status.changed.is_empty() {
        let _ = writeln!(text, "  hint: `wieldy mcp pin {name}` agrees to the changes");
    }
    text
}

fn indented(diff: &str) -> String {
    let lines: Vec<String> = diff.lines().map(|line| format!("    {}", shown(line))).collect();
    lines.join("\n")
}

/// Shows the changes, asks, and pins the tools.
async fn pin(servers: &Upstreams, wanted: &[String], yes: bool, printer: &Printer) -> Result<Exit, Failure> {
    known(servers, wanted)?;
    let tested = servers.test(|name| wanted.iter().any(|wanted| wanted == name)).await;
    let mut agreed = Vec::new();
    for (status, _) in tested {
        if let ServerState::Degraded { error, .. } = status.state {
            return Err(Failure::from(error));
        }
        for (tool, diff) in &status.changed {
            printer.tell(&format!("`{}` of `{}` changed:\n{}", shown_in_line(tool), status.name, indented(diff)));
        }
        if !status.changed.is_empty() && !yes {
            if !printer.can_ask() {
                let told =
                    anyhow!("a person must agree to the changes of `{}`, and there is no terminal to ask", status.name);
                return Err(Failure { exit: Exit::Denied, ..Failure::usage(told).hint("`--yes` agrees beforehand") });
            }
            let question = format!("agree to the tools of `{}` as they are now? [y/N] ", status.name);
            let is_agreed = confirm::ask(&question).map_err(|error| Failure::broken(anyhow!(error)))?;
            if !is_agreed {
                return Ok(Exit::Denied);
            }
        }
        let changed = status.changed.len();
        if let Some(Err(error)) = servers.agree(&status) {
            return Err(Failure::from(error));
        }
        printer.tell(&format!(
            "agreed to {} of `{}`, {changed} of them changed",
            counted(status.tools.len(), "tool"),
            status.name
        ));
        agreed.push(json!({ "server": status.name, "tools": status.tools.len(), "changed": changed }));
    }
    if printer.json {
        printer.json(&agreed)?;
    }
    Ok(Exit::Success)
}

/// Refuses names that no server has.
fn known(servers: &Upstreams, wanted: &[String]) -> Result<(), Failure> {
    let all = servers.status();
    match wanted.iter().find(|wanted| all.iter().all(|server| server.name != **wanted)) {
        Some(missing) => Err(unknown(missing, all.iter().map(|server| server.name.as_str()))),
        None => Ok(()),
    }
}

/// Returns the error for an unknown server, with similar names as the hint.
pub(super) fn unknown<'a>(missing: &str, names: impl Iterator<Item = &'a str>) -> Failure {
    let near = name::near_misses(missing, names);
    let hint = name::did_you_mean(&near).unwrap_or_else(|| "`wieldy mcp list` names them".into());
    Failure::usage(anyhow!("there is no MCP server `{}`", shown_in_line(missing))).hint(hint)
}

/// Imports servers from another client's file.
fn import(
    file: &Path,
    only: &[String],
    print: bool,
    into: Option<&Path>,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let found = upstreams::read(file, config)?;
    if let Some(missing) = only.iter().find(|name| found.iter().all(|server| server.name != **name)) {
        let names: Vec<&str> = found.iter().map(|server| server.name.as_str()).collect();
        let told = anyhow!("`{}` names no MCP server `{}`", file.display(), shown_in_line(missing));
        return Err(Failure::usage(told).hint(format!("it names {}", names.join(", "))));
    }
    let (mut section, mut taken) = (toml::Table::new(), Vec::new());
    for server in found {
        let is_wanted = if only.is_empty() { !server.disabled } else { only.contains(&server.name) };
        if !is_wanted {
            printer.tell(&format!("`{}` is left out", server.name));
        } else if config.mcp.servers.iter().any(|known| known.name == server.name) {
            printer.tell(&format!("`{}` is left out: the configuration has a server of this name", server.name));
        } else {
            server.notes.iter().for_each(|note| printer.tell(&format!("`{}`: {}", server.name, shown_in_line(note))));
            taken.push(server.name.clone());
            let (name, server) = written(server, config, print)?;
            section.insert(name, toml::Value::try_from(server).map_err(|error| Failure::broken(anyhow!(error)))?);
        }
    }
    let within = |name: &str, table| toml::Table::from_iter([(name.to_owned(), toml::Value::Table(table))]);
    let whole = within("mcp", within("servers", section));
    let text = if taken.is_empty() {
        String::new()
    } else {
        toml::to_string(&whole).map_err(|error| Failure::broken(anyhow!(error)))?
    };
    let path = into.unwrap_or(Path::new(FILE_NAME));
    let is_trusted = if !print && !taken.is_empty() { append(path, &text, environment, printer)? } else { true };
    match (printer.json, print) {
        (true, _) => printer.json(
            &json!({ "written": (!print && !taken.is_empty()).then_some(path), "servers": taken, "toml": text }),
        )?,
        (false, true) => printer.data(text.as_bytes())?,
        (false, false) if taken.is_empty() => printer.tell("there is nothing to import"),
        (false, false) => printer.tell(&format!(
            "imported {} into `{}`; `wieldy mcp test` tests them",
            counted(taken.len(), "server"),
            path.display()
        )),
    }
    if !is_trusted && into.is_none() {
        let told = "the file was not trusted before, so its servers are ignored until `wieldy trust`";
        printer.tell(&format!("warning: {told}"));
    }
    Ok(Exit::Success)
}

/// Converts an imported server into the form of the configuration. Likely secrets and all headers go to files of their
/// own.
fn written(server: Imported, config: &Config, print: bool) -> Result<(String, FileServer), Failure> {
    let name = server.name.clone();
    server.headers.values().for_each(|value| upstreams::hide_header(value));
    let texts = |texts: std::collections::BTreeMap<String, String>,
                 is_secret: fn(&str, &str) -> bool|
     -> Result<_, Failure> {
        let mut all = std::collections::BTreeMap::new();
        for (key, text) in texts {
            let is_kept_apart = !text.contains("${") && is_secret(&key, &text) && !config.state.as_os_str().is_empty();
            let text = if is_kept_apart {
                FileText::In(InFile { file: secret(&name, &key, &text, config, print)? })
            } else {
                FileText::Written(text)
            };
            all.insert(key, text);
        }
        Ok(Some(all).filter(|all| !all.is_empty()))
    };
    let file = FileServer {
        command: server.command,
        args: Some(server.args).filter(|args| !args.is_empty()),
        env: texts(server.env, is_secret)?,
        cwd: server.cwd.map(PathBuf::from),
        url: server.url,
        headers: texts(server.headers, |_, _| true)?,
        ..FileServer::default()
    };
    Ok((server.name, file))
}

fn is_secret(name: &str, value: &str) -> bool {
    history::is_secret(name, value) || wieldy::redact::text(value) != value
}

/// Returns the file for a secret, and writes it unless `print` is set.
fn secret(server: &str, name: &str, value: &str, config: &Config, print: bool) -> Result<PathBuf, Failure> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    wieldy::redact::hide(value);
    let folder = assemble::whole(&config.state).join("mcp/secrets");
    let safe: String = name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).collect();
    let path = folder.join(format!("{server}.{safe}"));
    if !print {
        let write = || -> std::io::Result<()> {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
            let mut file =
                std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
            file.write_all(value.as_bytes())
        };
        write().with_context(|| format!("cannot store a secret in `{}`", path.display())).map_err(Failure::broken)?;
    }
    Ok(path)
}

/// Appends a section to a configuration and checks that the result is valid. Returns true if the whole of it is
/// trusted: the text before it was, or sets no key that needs trust.
fn append(path: &Path, text: &str, environment: &Environment, printer: &Printer) -> Result<bool, Failure> {
    let doing = || format!("cannot write `{}`", path.display());
    let mut whole = match std::fs::read_to_string(path) {
        Ok(there) => there,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(Failure::broken(anyhow::Error::new(error).context(doing()))),
    };
    let records = Records::of(environment);
    let was_own = records.trust(path, whole.as_bytes()) == Trust::Trusted || config::needs_no_trust(path, &whole);
    if !whole.is_empty() {
        whole.push_str(if whole.ends_with('\n') { "\n" } else { "\n\n" });
    }
    whole.push_str(text);
    if let Err(error) = toml::from_str::<toml::Table>(&whole) {
        let told = anyhow!("the servers do not fit into `{}`: {}", path.display(), error.message());
        return Err(Failure::usage(told).hint("`--print` shows them, so that you can insert them by hand"));
    }
    let write = || -> std::io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let new = folder.join(format!(".{}.new", std::process::id()));
        std::fs::write(&new, &whole)?;
        if let Ok(there) = path.metadata() {
            std::fs::set_permissions(&new, there.permissions())?;
        }
        std::fs::rename(&new, path)
    };
    write().with_context(doing).map_err(Failure::broken)?;
    if was_own {
        trust::remember(path, whole.as_bytes(), environment, printer);
    }
    Ok(was_own)
}

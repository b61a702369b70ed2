//! `wieldy mcp login|logout`: logs a person in to an MCP server.

use std::time::Duration;

use anyhow::anyhow;
use serde_json::json;
use wieldy::mcp::client::{Address, Login, LoginError, LoginRedirect};

use crate::args::McpCommand;
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::interrupt::{CANCELLING, Interrupts};
use crate::output::{Printer, shown_in_line};
use crate::{in_runtime, upstreams};

/// The longest time that a person may take to log in.
const PATIENCE: Duration = Duration::from_secs(10 * 60);
/// The redirect address if no process waits for the answer.
const NOBODY: &str = "http://127.0.0.1:1/callback";
/// The maximal length of an address, in bytes.
const ADDRESS_BYTES_MAX: u64 = 64 * 1024;

pub(crate) fn run(
    command: &McpCommand,
    name: &str,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let Some(address) = upstreams::address_of(name, config, environment)? else {
        let servers = upstreams::servers(config, environment)?;
        return Err(super::upstreams::unknown(name, servers.iter().map(|server| server.name.as_str())));
    };
    if config.state.as_os_str().is_empty() {
        let told = anyhow!("logins are stored in the state folder, and there is none");
        return Err(Failure::usage(told).hint("`--state DIR` names one"));
    }
    match command {
        McpCommand::Login { paste, .. } => in_runtime(log_in(name, &address, *paste, printer)),
        _ => log_out(name, &address, printer),
    }
}

async fn log_in(name: &str, address: &Address, paste: bool, printer: &Printer) -> Result<Exit, Failure> {
    let has_token = address.headers.keys().any(|header| header.eq_ignore_ascii_case("authorization"));
    if has_token {
        let told =
            anyhow!("the MCP server `{name}` already has a header `Authorization`, which would replace the login");
        return Err(Failure::usage(told).hint(format!("remove it from `mcp.servers.{name}.headers`")));
    }
    let failed = |error: LoginError| failure(name, error);
    let port = address.login.as_ref().and_then(|login| login.port);
    if paste {
        let redirect = port.map_or_else(|| NOBODY.to_owned(), |port| format!("http://127.0.0.1:{port}/callback"));
        let login = Login::begin(address, &redirect).await.map_err(failed)?;
        show(&login, printer)?;
        printer.tell(
            "then paste here the address of the page that the browser was sent to, even if the page does not open",
        );
        let answer = typed().await?;
        login.finish(&answer).await.map_err(failed)?;
    } else {
        let answers = LoginRedirect::bind(port).await.map_err(|error| {
            Failure::broken(anyhow::Error::new(error).context("cannot wait for the answer on this machine"))
                .hint("`--paste` works without that")
        })?;
        let login = Login::begin(address, answers.redirect()).await.map_err(failed)?;
        let mut interrupts = Interrupts::listen()?;
        show(&login, printer)?;
        printer.tell("waiting for the answer; if the browser runs on another machine, use `--paste`");
        let stop = tokio_util::sync::CancellationToken::new();
        let waited = async {
            tokio::select! {
                answer = tokio::time::timeout(PATIENCE, answers.wait(&login)) => Some(answer),
                () = stop.cancelled() => None,
            }
        };
        let answer = match interrupts.watch(waited, || stop.cancel(), CANCELLING, printer).await {
            None => return Ok(Exit::Cancelled),
            Some(Err(_)) => {
                let failure = Failure::broken(anyhow!("nobody logged in within ten minutes"));
                return Err(Failure { exit: Exit::Timeout, ..failure });
            }
            Some(Ok(answer)) => answer.map_err(|error| Failure::broken(anyhow!(error)))?,
        };
        login.finish(&answer).await.map_err(failed)?;
    }
    printer.tell(&format!("logged in to `{name}`; `wieldy mcp test {name}` tries it"));
    if printer.json {
        printer.json(&json!({ "server": name, "login": "logged_in" }))?;
    }
    Ok(Exit::Success)
}

/// Prints the page to open, for people and programs. The program never opens it itself, so that the person sees the
/// address first.
fn show(login: &Login, printer: &Printer) -> Result<(), Failure> {
    let page = shown_in_line(login.page());
    if printer.json {
        return printer.json(&json!({ "open": page }));
    }
    printer.tell("open this page in a browser and log in:");
    printer.line(&page)
}

async fn typed() -> Result<String, Failure> {
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _};
    let mut line = String::new();
    let mut input = tokio::io::BufReader::new(tokio::io::stdin().take(ADDRESS_BYTES_MAX));
    input.read_line(&mut line).await.map_err(|error| Failure::broken(anyhow!(error)))?;
    Ok(line)
}

fn log_out(name: &str, address: &Address, printer: &Printer) -> Result<Exit, Failure> {
    let was_there = Login::forget(address).map_err(|error| failure(name, error))?;
    printer.tell(&match was_there {
        true => format!("the login to `{name}` is forgotten here; the server may accept it until it expires"),
        false => format!("nobody is logged in to `{name}`"),
    });
    if printer.json {
        printer.json(&json!({ "server": name, "forgotten": was_there }))?;
    }
    Ok(Exit::Success)
}

/// Converts the error of a login. It may contain text of the server, which is shown as such.
fn failure(name: &str, error: LoginError) -> Failure {
    let is_refused = matches!(error, LoginError::Refused(_));
    let hint = match &error {
        LoginError::Register(_) => Some(format!(
            "ask the operator of the server for a client id, and put it into `mcp.servers.{name}.oauth.client-id`"
        )),
        LoginError::State | LoginError::NoAnswer => Some(format!("`wieldy mcp login {name}` starts again")),
        _ => None,
    };
    let told = anyhow::Error::new(error).context(format!("cannot log in to the MCP server `{name}`"));
    let failure = Failure::broken(told);
    let failure = Failure { exit: if is_refused { Exit::Denied } else { failure.exit }, ..failure };
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

//! `wieldy serve`: serves the tools over HTTP until it is stopped.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::anyhow;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use wieldy::{Caller, Executor};
use wieldy_mcp::server::{Server, ServerOptions};
use wieldy_server::{HttpError, HttpOptions, HttpServer, Token};

use super::request;
use crate::args::ServeArgs;
use crate::config::{Config, Environment, FILE_NAME};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::interrupt::Interrupts;
use crate::output::Printer;
use crate::{assemble, confirm, in_runtime, log, upstreams};

const STOPPING: &str = "stopping: running calls may end; press Ctrl-C again to leave at once";

pub(crate) fn run(
    args: &ServeArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let http = http_options(args, config, environment)?;
    // The history outlives the runtime, so that it gets the last records of running calls.
    let history = History::open(config, Tasks::Kept)?;
    let work = async {
        let server = HttpServer::bind(http).await.map_err(|error| unable(error, args))?;
        let confirmer = confirm::beforehand(args.serving.yes);
        let has_tokens = !config.serve.tokens.is_empty();
        let many = assemble::Work { has_tokens, ..assemble::Work::many_calls() };
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), many)?;
        request::warn_of_no_isolation(config, printer);
        if config.serve.tokens.is_empty() {
            printer.tell("warning: no token is configured, so every program on this machine may call");
        }
        let servers = upstreams::open(config, environment, &executor)?;
        let ready = CancellationToken::new();
        let options = ServerOptions {
            ask: !args.serving.yes,
            ready: Some(ready.clone()),
            message_bytes_max: config.serve.body_bytes_max,
            ..config.serve.mcp.clone()
        };
        let door = serve(options, config, server, &executor, printer);
        let door = upstreams::beside(door, &servers, config.mcp.list_wait, &ready, printer);
        let door = async {
            tokio::select! { ended = door => ended, never = executor.announce_notes() => match never {} }
        };
        let ended = log::with_events(&config.log, &executor, door).await;
        servers.close().await;
        ended
    };
    in_runtime(work)
}

async fn serve(
    options: ServerOptions,
    config: &Config,
    server: HttpServer,
    executor: &Executor,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let endpoint = Server::new(executor.clone(), options).http();
    let mcp = endpoint.clone();
    let server = server.route_with_unread_body("/mcp", move |request| {
        let mcp = mcp.clone();
        async move { mcp.handle(request).await }
    });
    let mut interrupts = Interrupts::listen()?;
    tell_address(server.address(), printer)?;
    let stop = CancellationToken::new();
    let wind_down = async {
        executor.shutdown(config.serve.patience).await;
        endpoint.stop().await;
    };
    let served = server.serve(stop.cancelled(), wind_down);
    interrupts.watch(served, || stop.cancel(), STOPPING, printer).await;
    Ok(Exit::Success)
}

fn http_options(args: &ServeArgs, config: &Config, environment: &Environment) -> Result<HttpOptions, Failure> {
    let serve = &config.serve;
    let are_ignored = config.folder.ignored().iter().any(|shown| shown.key.starts_with("serve.tokens"));
    if serve.tokens.is_empty() && are_ignored {
        // Ignoring an untrusted file must not weaken anything, but without these tokens the server would be open.
        let told = anyhow!(
            "the tokens of `{FILE_NAME}` are ignored because the file is not trusted, and there is no other token"
        );
        return Err(Failure::usage(told).hint("`wieldy trust` shows what the file would do, and asks"));
    }
    let mut options = HttpOptions::new(args.listen.unwrap_or(serve.listen));
    for token in &serve.tokens {
        options.tokens.push(Token::new(&token.secret(environment)?, token.caller.clone()));
    }
    options.open_to = Arc::new(Caller::local());
    options.hosts.clone_from(&serve.hosts);
    options.origins.clone_from(&serve.origins);
    options.body_bytes_max = serve.body_bytes_max;
    options.connections_max = serve.connections_max;
    Ok(options)
}

fn unable(error: HttpError, args: &ServeArgs) -> Failure {
    let hint = match (&error, args.listen) {
        (HttpError::NoToken(_), _) => "configure a token under `[serve.tokens]`, or listen at 127.0.0.1",
        (HttpError::Listen(..), Some(_)) => "choose another address or port",
        (HttpError::Listen(..), None) => "`--listen ADDRESS:PORT` or the key `serve.listen` chooses another one",
    };
    match error {
        HttpError::NoToken(_) => Failure::usage(error),
        HttpError::Listen(..) => Failure::broken(error),
    }
    .hint(hint)
}

/// Prints the address, which matters most if the system chose the port.
fn tell_address(address: SocketAddr, printer: &Printer) -> Result<(), Failure> {
    if printer.json {
        return printer.json(&json!({"address": address.to_string(), "mcp": format!("http://{address}/mcp")}));
    }
    printer.line(&format!("listening at http://{address}, MCP at http://{address}/mcp"))
}

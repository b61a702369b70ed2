//! `wieldy mcp`: serves the tools to one MCP client, over standard input and output.

use std::io::IsTerminal;
use std::time::Duration;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use wieldy::{Caller, Executor, Held};
use wieldy_mcp::server::{Server, ServerOptions};

use super::request;
use crate::args::McpArgs;
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::interrupt::{CANCELLING, Interrupts};
use crate::output::Printer;
use crate::{account, assemble, confirm, in_runtime, log, standard, upstreams};

/// The message for a person who typed the command, which clients are meant to start.
const WAITING: &str = "waiting for an MCP client on standard input; name this command in the client's configuration, or press \
    Ctrl-D to leave";

pub(crate) fn run(
    args: &McpArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    // The history outlives the runtime, so that it gets the last records of running calls.
    let history = History::open(config, Tasks::Kept)?;
    let work = async {
        let confirmer = confirm::beforehand(args.serving.yes);
        let many = assemble::Work::many_calls();
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), many)?;
        request::warn_of_no_isolation(config, printer);
        let ready = CancellationToken::new();
        let options = ServerOptions { ask: !args.serving.yes, ready: Some(ready.clone()), ..config.serve.mcp.clone() };
        let servers = upstreams::open(config, environment, &executor)?;
        if std::io::stdin().is_terminal() {
            printer.tell(WAITING);
        }
        let door = serve(args, options, &executor, printer);
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
    args: &McpArgs,
    options: ServerOptions,
    executor: &Executor,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let server = Server::new(executor.clone(), options);
    let stop = CancellationToken::new();
    let mut interrupts = Interrupts::listen()?;
    let client = async {
        let (input, output) = (standard::input(), standard::output());
        let client = server.serve_lines(input, output, caller(args), args.agent.clone(), stop.clone());
        tokio::pin!(client);
        tokio::select! {
            ended = &mut client => return ended,
            () = standard::nobody_reads() => stop.cancel(),
        }
        client.await
    };
    let ended = interrupts.watch(client, || stop.cancel(), CANCELLING, printer).await;
    // The client is gone and needs no more answers.
    executor.shutdown(Duration::ZERO).await;
    ended.map(|()| Exit::Success).map_err(Failure::broken)
}

/// Returns the caller: the local user, with the scopes and permissions of the flags.
fn caller(args: &McpArgs) -> Caller {
    let held = |names: &[String]| if names.is_empty() { Held::All } else { Held::only(names) };
    let own_session = || format!("mcp-{}-{}", Timestamp::now().as_millisecond(), std::process::id());
    Caller {
        session: Some(args.session.clone().unwrap_or_else(own_session)),
        user: Some(args.user.clone().unwrap_or_else(account::name)),
        tenant: args.tenant.clone(),
        plan: args.plan.clone(),
        scopes: held(&args.scope),
        permissions: held(&args.permission),
        ..Caller::local()
    }
}

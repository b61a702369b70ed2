//! `wieldy call`: makes one call and prints the tool's answer.

use std::sync::Arc;

use anyhow::anyhow;
use indicatif::ProgressBar;
use wieldy::{Budget, Call, Content, Executor, Presentation, ToolResult, present};

use super::arguments::{Beside, arguments};
use super::request;
use crate::args::CallArgs;
use crate::config::{Config, Environment};
use crate::exit::{Exit, Failure};
use crate::history::{History, Tasks};
use crate::interrupt::{CANCELLING, Interrupts};
use crate::live::Live;
use crate::output::{Printer, counted};
use crate::{assemble, confirm, history, in_runtime, log, upstreams};

/// The tool that almost always runs a program. For its calls, the fork server starts while the history is opened.
const BASH: &str = "Bash";

/// Prints a result for people.
pub(crate) type Show<'a> = &'a (dyn Fn(&ToolResult, &Live) -> Result<(), Failure> + Sync);

pub(crate) fn run(
    args: &CallArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
) -> Result<Exit, Failure> {
    run_shown(args, config, environment, printer, &|result, live| live.print_rest(result))
}

/// Makes the call, and prints its result for people by `show`.
pub(crate) fn run_shown(
    args: &CallArgs,
    config: &Config,
    environment: &Environment,
    printer: &Printer,
    show: Show<'_>,
) -> Result<Exit, Failure> {
    if args.in_background {
        let told = anyhow!("`--async` needs the REST API of a server, which this version does not have");
        return Err(Failure::usage(told).hint("without `--async` the command waits for the result"));
    }
    if args.for_model && printer.json {
        let told = anyhow!("the argument '--for-model' cannot be used with '--json'");
        return Err(Failure::usage(told).hint("leave out one of them"));
    }
    let arguments = arguments(args.args.as_deref(), &args.pairs)?;
    let beside = Beside::of(&args.beside)?;
    // The history outlives the runtime, so that it gets the last records of running calls.
    let fork_server = (args.tool == BASH).then(wieldy::EarlyForkServer::start);
    let history = History::open(config, Tasks::Forgotten)?;
    let work = async {
        let _fork_server = fork_server;
        let live = Arc::new(Live::new(&args.tool, printer, !args.for_model));
        let confirmer = confirm::confirmer(args.run.yes, printer, &ProgressBar::hidden());
        let work = assemble::Work { output: Some(Arc::clone(&live) as _), ..assemble::Work::default() };
        let executor = assemble::executor(config, environment, confirmer, history.as_ref(), work)?;
        let servers = upstreams::open_for(&[&args.tool], config, environment, &executor).await?;
        let ended =
            call(args, beside.on(Call::new(args.tool.as_str(), arguments)), config, &executor, (&live, show), printer)
                .await;
        servers.close().await;
        ended
    };
    let ended = in_runtime(work);
    history::close(history, ended)
}

async fn call(
    args: &CallArgs,
    call: Call,
    config: &Config,
    executor: &Executor,
    (live, show): (&Live, Show<'_>),
    printer: &Printer,
) -> Result<Exit, Failure> {
    request::warn_of_no_isolation(config, printer);
    request::tell_of_session(&args.run, printer);

    let mut options = request::options(&args.run);
    options.require_confirmation = args.confirm;
    options.idempotency_key.clone_from(&args.idempotency_key);
    let caller = request::caller(&args.run);
    let call = call.by(Arc::clone(&caller)).with(options);

    let mut interrupts = Interrupts::listen()?;
    let work = async {
        let id = executor.spawn(call);
        let cancel = || {
            live.clear();
            executor.cancel(id, &caller);
        };
        let result = async {
            tokio::select! {
                result = executor.wait(id, &caller) => result,
                never = live.spin(executor.observe(id, &caller)) => match never {},
            }
        };
        interrupts.watch(result, cancel, CANCELLING, printer).await
    };
    let result = log::with_events(&config.log, executor, work).await.expect("a call that was just begun is known");
    live.clear();
    match presentation(args) {
        Some(how) => printer.tool_text(&present(&result, &how))?,
        None => {
            print(&result, live, show, printer)?;
            printer.notes(&result.notes, result.notes_waiting);
        }
    }
    executor.confirm_notes(&result.notes);
    warn_of_background(&result, printer);
    Ok(result.error.as_deref().map_or(Exit::Success, Exit::of))
}

/// Warns if a background program is still running, because it ends with this command.
fn warn_of_background(result: &ToolResult, printer: &Printer) {
    let is = |key: &str, value: &str| result.structured.as_ref().is_some_and(|structured| structured[key] == value);
    if &*result.tool == "Bash" && is("state", "running") {
        printer.tell("warning: background processes end with this command");
    }
}

/// Returns how the result is written for a model's context, if it should be.
fn presentation(args: &CallArgs) -> Option<Presentation> {
    let count = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
    let own = Presentation::default();
    let budget = match (args.max_chars, args.max_tokens) {
        (_, Some(tokens)) => Budget::Tokens(count(tokens)),
        (Some(characters), _) => Budget::Characters(count(characters)),
        (None, None) => own.budget,
    };
    args.for_model.then_some(Presentation { header: !args.no_header, budget })
}

/// Prints the tool's text, even of a failed run, or with `--json` the whole result.
fn print(result: &ToolResult, live: &Live, show: Show<'_>, printer: &Printer) -> Result<(), Failure> {
    if printer.json {
        printer.json(result)?;
    } else {
        show(result, live)?;
        let left_out = result.content.iter().filter(|block| !matches!(block, Content::Text { .. })).count();
        if left_out > 0 {
            printer
                .tell(&format!("left out blocks that are not text: {}; `--json` has it", counted(left_out, "block")));
        }
    }
    printer.call_error(result);
    Ok(())
}

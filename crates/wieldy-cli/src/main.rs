//! The `wieldy` command: reads arguments and configuration, builds an executor, and prints the results.

mod account;
mod args;
mod assemble;
mod commands;
mod config;
mod confirm;
mod exit;
mod history;
mod interrupt;
mod live;
mod log;
mod output;
mod standard;
mod toolchains;
mod upstreams;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use args::{Arguments, Command, ConfigCommand, GlobalArgs, RunArgs};
use config::{Config, Environment, Overrides};
use exit::{Exit, Failure};
use output::Printer;

/// Calls allocate many small values for a short time, which this allocator does fast. A library leaves the choice to
/// its program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    wieldy::record_panic_places();
    commands::completions::answer();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(refusal) => return refused(&refusal),
    };
    let printer = Printer::new(arguments.global.json);
    let is_run = matches!(arguments.command, Command::Run(_));
    let exit = run(arguments, &printer).unwrap_or_else(|failure| {
        printer.failure(&failure);
        if is_run { commands::run::NOT_RUN } else { failure.exit }
    });
    // A command that failed early may have started the fork server.
    wieldy::finish();
    exit.into()
}

/// Loads the configuration and runs the command.
fn run(arguments: Arguments, printer: &Printer) -> Result<Exit, Failure> {
    let Arguments { global, command } = arguments;
    let environment = Environment::of_this_process();
    let load = |overrides: Overrides<'_>| {
        let config = Config::load(&environment, &overrides)?;
        assemble::sweep_placeholders(&config, &environment);
        history::hide_secrets(&config, &environment);
        log::start(&config.log, printer)?;
        config.warnings.iter().for_each(|warning| printer.tell(&format!("warning: {}", output::shown(warning))));
        Ok::<_, Failure>(config)
    };
    match command {
        Command::Call(call) => {
            compile_patterns();
            let config = load(Overrides::of(&global).run(&call.run))?;
            commands::call::run(&call, &config, &environment, printer)
        }
        Command::Batch(batch) => {
            let config = load(Overrides::of(&global).run(&batch.run))?;
            commands::batch::run(&batch, &config, &environment, printer)
        }
        Command::Run(program) => {
            compile_patterns();
            let config = load(Overrides::of(&global).run(&program.run))?;
            commands::run::run(&program, &config, &environment, printer)
        }
        Command::Code(code) => {
            compile_patterns();
            let config = load(Overrides::of(&global).run(code.run()))?;
            commands::code::run(&code, &config, &environment, printer)
        }
        Command::Tools(tools) => commands::tools::run(&tools, &load(Overrides::of(&global))?, &environment, printer),
        Command::Mcp(mcp) => {
            let config = load(Overrides::of(&global).serving(&mcp.serving))?;
            match &mcp.command {
                None => commands::mcp::run(&mcp, &config, &environment, printer),
                Some(other) => {
                    let into = global.config.as_deref();
                    commands::upstreams::run(other, into, &config, &environment, printer)
                }
            }
        }
        Command::Serve(serve) => {
            let config = load(Overrides::of(&global).serving(&serve.serving))?;
            commands::serve::run(&serve, &config, &environment, printer)
        }
        Command::Vault(vault) => {
            compile_patterns();
            let config = load(Overrides::of(&global).run(&vault.command.on().run))?;
            commands::vault::run(vault, &config, &environment, printer)
        }
        Command::History(history) => commands::history::run(&history, &load(Overrides::of(&global))?, printer),
        Command::Threads(threads) => {
            commands::threads::run(&threads, &load(Overrides::of(&global))?, &environment, printer)
        }
        Command::Audit(audit) => commands::audit::run(&audit.command, &load(Overrides::of(&global))?, printer),
        Command::Doctor(doctor) => {
            let (workspace, isolation) = (doctor.workspace.as_deref(), doctor.isolation);
            let config = load(Overrides { workspace, isolation, ..Overrides::of(&global) })?;
            in_runtime(commands::doctor::run(&doctor, &config, &environment, printer))
        }
        Command::Init(init) => commands::init::run(&init, global.config.as_deref(), &environment, printer),
        Command::Trust(trust) => commands::trust::run(&trust, &environment, printer),
        Command::Config(config) => match config.command {
            ConfigCommand::Show => commands::config::show(&load(Overrides::of(&global))?, printer),
        },
        Command::Completions(completions) => commands::completions::run(&completions, printer),
    }
}

/// Compiles the patterns for the first record of a call on a thread, while the configuration is read and the history
/// opened.
fn compile_patterns() {
    // If no thread can be started, the first record compiles them.
    let _ = std::thread::Builder::new().spawn(wieldy::redact::compile);
}

/// Runs an asynchronous command.
pub(crate) fn in_runtime(command: impl Future<Output = Result<Exit, Failure>>) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::broken(anyhow::Error::new(error).context("cannot start the runtime")))?;
    let ended = runtime.block_on(command);
    // A thread that still waits for typed input must not delay the exit.
    runtime.shutdown_timeout(Duration::from_millis(100));
    wieldy::finish();
    ended
}

/// Prints help and version as data; every other parse result of clap is wrong usage.
fn refused(refusal: &clap::Error) -> ExitCode {
    if !refusal.use_stderr() {
        let _ = refusal.print();
        return Exit::Success.into();
    }
    // The message contains what was typed, so it is escaped like all untrusted text.
    let text = refusal.render().to_string();
    let lines: Vec<String> = text.trim_end().split('\n').map(output::shown_in_line).collect();
    // The arguments were not parsed to their end, so look for `--json` here.
    let is_json = std::env::args_os().take_while(|argument| argument != "--").any(|argument| argument == "--json");
    let printer = Printer::new(is_json);
    printer.tell(&lines.join("\n"));
    if is_json {
        let told = lines[0].strip_prefix("error: ").unwrap_or("no command is given");
        let failure = Failure::usage(anyhow::anyhow!("{told}")).hint("`wieldy help` lists the commands");
        let _ = printer.json(&serde_json::json!({ "error": failure.error() }));
    }
    let is_run = std::env::args_os().skip(1).find(|word| !word.as_encoded_bytes().starts_with(b"-"));
    if is_run.is_some_and(|word| word == "run") { commands::run::NOT_RUN.into() } else { Exit::WrongUsage.into() }
}

impl<'a> Overrides<'a> {
    fn of(global: &'a GlobalArgs) -> Self {
        Self {
            file: global.config.as_deref(),
            state: global.state.as_deref(),
            log: global.log.as_deref(),
            set: &global.set,
            workspace: None,
            isolation: None,
            cpu: None,
            network: None,
            memory: None,
        }
    }

    fn run(self, run: &'a RunArgs) -> Self {
        let RunArgs { isolation, cpu, memory, .. } = *run;
        let (workspace, network) = (run.workspace.as_deref(), run.network.as_ref());
        Self { workspace, isolation, cpu, memory, network, ..self }
    }

    fn serving(self, serving: &'a args::ServingArgs) -> Self {
        Self { workspace: serving.workspace.as_deref(), isolation: serving.isolation, ..self }
    }
}

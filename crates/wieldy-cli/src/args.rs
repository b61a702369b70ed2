//! The command line as people type it: raw, and checked only for its syntax. `config` and the commands interpret the
//! values.

mod code;
mod help;
mod history;
mod vault;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueHint};
use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter};
use wieldy::{Backoff, BatchMode, Level, Network, Priority, Status, parse_duration};

use crate::commands::completions;

pub(crate) use code::{CodeArgs, CodeCommand, FindArgs, MapArgs, RefsArgs, SearchArgs};
use help::{
    ARGUMENTS_HELP, CODE_HELP, CONFIGURATION_HELP, HISTORY_HELP, IMPORT_HELP, LOGIN_HELP, RUN_HELP, TRUST_HELP,
};
pub(crate) use history::{AuditArgs, AuditCommand, FilterArgs, HistoryArgs, HistoryCommand, TextIn};
pub(crate) use vault::{VaultArgs, VaultCommand};

/// Returns a parser of isolation levels by their names.
fn levels() -> impl TypedValueParser<Value = Level> {
    PossibleValuesParser::new(Level::ALL.map(|level| level.as_str())).try_map(|name| name.parse::<Level>())
}

/// Returns a parser of batch modes by their names.
fn modes() -> impl TypedValueParser<Value = BatchMode> {
    PossibleValuesParser::new(["smart", "parallel", "sequential"]).try_map(|name| name.parse::<BatchMode>())
}

/// Returns a parser of the growth of retry delays by its names.
fn backoffs() -> impl TypedValueParser<Value = Backoff> {
    PossibleValuesParser::new(["exponential", "linear"]).try_map(|name| name.parse::<Backoff>())
}

/// Returns a parser of the statuses of calls by their names.
fn statuses() -> impl TypedValueParser<Value = Status> {
    let status = |name: String| Status::ALL.into_iter().find(|status| status.as_str() == name);
    PossibleValuesParser::new(Status::ALL.map(Status::as_str)).map(move |name| status(name).expect("one of the names"))
}

const CALLER: &str = "Caller";

/// Runs tools for AI agents: finds, validates, confirms, sandboxes, times, retries and records calls.
#[derive(Debug, Parser)]
#[command(name = "wieldy", version, after_help = CONFIGURATION_HELP, max_term_width = 120)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct GlobalArgs {
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Read the configuration from this file
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Store large outputs and the history in this folder [default: the platform's state folder]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Log more or less: off, error, warn, info, debug, trace, or TARGET=LEVEL,…
    #[arg(long, global = true, value_name = "LEVEL", add = ArgValueCandidates::new(completions::log_levels))]
    pub(crate) log: Option<String>,
    /// Set a key of the configuration; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE", add = ArgValueCandidates::new(completions::keys))]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Call a tool and print its answer
    #[command(after_help = ARGUMENTS_HELP)]
    Call(Box<CallArgs>),
    /// Run a program in a sandbox, with this terminal attached
    #[command(after_help = RUN_HELP)]
    Run(Box<ProgramArgs>),
    /// Run several calls together
    #[command(after_help = "Example:\n  wieldy batch calls.json --max-concurrency 2")]
    Batch(Box<BatchArgs>),
    /// Search code, and find definitions and references
    #[command(after_help = CODE_HELP)]
    Code(Box<CodeArgs>),
    /// List the available tools, or show one
    #[command(after_help = "Example:\n  wieldy tools --category shell")]
    Tools(ToolsArgs),
    /// Serve the tools to an MCP client, over standard input and output
    #[command(after_help = "Example:\n  wieldy mcp --workspace . --scope notes")]
    Mcp(Box<McpArgs>),
    /// Serve the tools over HTTP, to MCP clients at /mcp
    #[command(after_help = "Example:\n  wieldy serve --listen 127.0.0.1:0")]
    Serve(ServeArgs),
    /// Show past calls and their events
    #[command(after_help = HISTORY_HELP)]
    History(Box<HistoryArgs>),
    /// Read, write and search the notes of a vault
    #[command(after_help = "Example:\n  wieldy vault search green tea")]
    Vault(VaultArgs),
    /// Verify that the recorded history was not changed
    #[command(after_help = "Example:\n  wieldy audit verify")]
    Audit(AuditArgs),
    /// Show which isolation levels and limits work here, and why others do not
    #[command(after_help = "Example:\n  wieldy doctor --plan")]
    Doctor(DoctorArgs),
    /// Write a commented wieldy.toml into the current folder
    #[command(after_help = "Example:\n  wieldy init --config my.toml")]
    Init(InitArgs),
    /// Show the configuration that came with a folder, and trust it
    #[command(after_help = TRUST_HELP)]
    Trust(TrustArgs),
    /// Show the configuration
    #[command(after_help = "Example:\n  wieldy config show")]
    Config(ConfigArgs),
    /// Print a script for shell completion
    #[command(
        after_help = "Example:\n  wieldy completions bash > wieldy.bash\n\nIn ~/.bashrc: source <(wieldy completions bash)"
    )]
    Completions(CompletionsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CallArgs {
    /// The tool's name
    #[arg(add = ArgValueCandidates::new(completions::tools))]
    pub(crate) tool: String,
    /// The tool's arguments
    #[arg(value_name = "KEY=VALUE | KEY:=JSON")]
    pub(crate) pairs: Vec<String>,
    /// The tool's arguments as one JSON object
    #[arg(long, value_name = "JSON|@FILE|-")]
    pub(crate) args: Option<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Start the call and return at once (needs the REST API of a server, which this version does not have)
    #[arg(long = "async", hide = true)]
    pub(crate) in_background: bool,
    /// Ask for a confirmation even if neither tool nor policy requires one
    #[arg(long)]
    pub(crate) confirm: bool,
    /// A repeated key returns the first result instead of running again
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    /// Print the result as a model's context would get it, all at once at the end
    #[arg(long, conflicts_with = "json")]
    pub(crate) for_model: bool,
    /// The most characters of output for the model [default: 4000]
    #[arg(long, value_name = "COUNT", requires = "for_model", conflicts_with = "max_tokens",
        value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) max_chars: Option<u32>,
    /// The most tokens of output for the model, by an estimate: four characters of ASCII or one other count as one
    #[arg(long, value_name = "COUNT", requires = "for_model",
        value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) max_tokens: Option<u32>,
    /// Leave out the lines with tool, status and duration
    #[arg(long, requires = "for_model")]
    pub(crate) no_header: bool,
    #[command(flatten)]
    pub(crate) beside: BesideArgs,
}

/// The objects that go with a call beside its arguments.
#[derive(Debug, Args)]
pub(crate) struct BesideArgs {
    /// The context that tools may read; part of what is confirmed and of cache keys, and stored nowhere
    #[arg(long, value_name = "JSON|@FILE")]
    pub(crate) context: Option<String>,
    /// The metadata that the history stores with the call
    #[arg(long, value_name = "JSON|@FILE")]
    pub(crate) metadata: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ProgramArgs {
    /// The program and its arguments, run without a shell
    #[arg(required = true, trailing_var_arg = true, add = ArgValueCompleter::new(completions::program_words))]
    pub(crate) command: Vec<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BatchArgs {
    /// The calls, as a JSON array or JSON lines of {"id","tool","arguments","after"}; - is standard input
    #[arg(value_name = "FILE|-", value_hint = ValueHint::FilePath)]
    pub(crate) file: String,
    /// The order of the calls [default: smart]
    #[arg(long, value_parser = modes())]
    pub(crate) mode: Option<BatchMode>,
    /// The maximal number of calls at once, if plan and slots allow as many [default: 5]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) max_concurrency: Option<u32>,
    /// Start no further call after one has failed
    #[arg(long)]
    pub(crate) stop_on_error: bool,
    #[command(flatten)]
    pub(crate) beside: BesideArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// The options of a call, and its caller.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The time limit for one run, such as 500ms, 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) timeout: Option<Duration>,
    /// The time limit for all attempts and waits together
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) deadline: Option<Duration>,
    /// The time limit for waiting for a slot
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) queue_timeout: Option<Duration>,
    /// The time limit for a run without output and progress
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) silence: Option<Duration>,
    /// The number of retries after a failed run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) retries: Option<u32>,
    /// The delay before the first retry
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) retry_delay: Option<Duration>,
    /// The growth of the delays from one retry to the next
    #[arg(long, value_name = "KIND", value_parser = backoffs())]
    pub(crate) retry_backoff: Option<Backoff>,
    /// The isolation of programs; `wieldy doctor` shows which levels work here
    #[arg(long, value_name = "LEVEL", value_parser = levels())]
    pub(crate) isolation: Option<Level>,
    /// The processor limit of programs in thousandths of a core, up to `resources.max` (not enforced at level none)
    #[arg(long, value_name = "MILLI", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) cpu: Option<u64>,
    /// The memory limit of programs in megabytes, up to `resources.max` (not enforced at level none)
    #[arg(long, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..=16_777_216))]
    pub(crate) memory: Option<u64>,
    /// The folder that tools work in
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
    /// The network access of programs: none, open, or the named hosts (not enforced at level none)
    #[arg(long, value_name = "none|open|HOST,…", add = ArgValueCandidates::new(completions::networks))]
    pub(crate) network: Option<Network>,
    /// Approve everything that has to be confirmed
    #[arg(long)]
    pub(crate) yes: bool,
    /// The priority when calls wait: low, normal, high or a number from -128 to 127
    #[arg(long, value_name = "P", default_value = "normal", allow_hyphen_values = true,
        add = ArgValueCandidates::new(completions::priorities))]
    pub(crate) priority: Priority,
    /// The agent that makes the call
    #[arg(long, value_name = "DID", default_value = "local", help_heading = CALLER)]
    pub(crate) agent: String,
    /// The session that the call is recorded under; its `/tmp`, `$HOME` and read marks end with the command
    #[arg(long, value_name = "ID", help_heading = CALLER)]
    pub(crate) session: Option<String>,
    /// The person behind the agent [default: the name of your account]
    #[arg(long, value_name = "NAME", help_heading = CALLER)]
    pub(crate) user: Option<String>,
    /// The tenant that the agent belongs to
    #[arg(long, value_name = "NAME", help_heading = CALLER)]
    pub(crate) tenant: Option<String>,
    /// See only tools without a scope or with this one; may be repeated [default: every tool]
    #[arg(long, value_name = "SCOPE", help_heading = CALLER)]
    pub(crate) scope: Vec<String>,
    /// Hold only this permission; may be repeated [default: every permission]
    #[arg(long, value_name = "PERMISSION", help_heading = CALLER)]
    pub(crate) permission: Vec<String>,
    /// The plan whose limits apply
    #[arg(long, value_name = "NAME", help_heading = CALLER)]
    pub(crate) plan: Option<String>,
    /// A label to include in the result; may be repeated
    #[arg(long, value_name = "WORD")]
    pub(crate) label: Vec<String>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ToolsArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ToolsCommand>,
    /// Only tools of this category
    #[arg(long)]
    pub(crate) category: Option<String>,
    /// Only tools that an agent with this scope sees
    #[arg(long)]
    pub(crate) scope: Option<String>,
    /// Only tools of this provider, such as builtin or command
    #[arg(long)]
    pub(crate) provider: Option<String>,
    /// Only tools that change nothing
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Only tools with these words in their name, title or description
    #[arg(long)]
    pub(crate) text: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ToolsCommand {
    /// Print a tool's definition with its schema
    #[command(after_help = "Example:\n  wieldy tools show Search")]
    Show {
        /// The tool's name
        #[arg(add = ArgValueCandidates::new(completions::tools))]
        name: String,
    },
    /// Check a manifest and print its mistakes
    #[command(after_help = "Example:\n  wieldy tools check lint.toml")]
    Check {
        /// The manifest, in TOML or JSON
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct McpArgs {
    #[command(subcommand)]
    pub(crate) command: Option<McpCommand>,
    #[command(flatten)]
    pub(crate) serving: ServingArgs,
    /// The agent that makes the calls [default: the name that the client reports]
    #[arg(long, value_name = "DID", help_heading = CALLER)]
    pub(crate) agent: Option<String>,
    /// The session of the calls [default: a new one for each client]
    #[arg(long, value_name = "ID", help_heading = CALLER)]
    pub(crate) session: Option<String>,
    /// The person behind the agent [default: the name of your account]
    #[arg(long, value_name = "NAME", help_heading = CALLER)]
    pub(crate) user: Option<String>,
    /// The tenant that the agent belongs to
    #[arg(long, value_name = "NAME", help_heading = CALLER)]
    pub(crate) tenant: Option<String>,
    /// Show only tools without a scope or with this one; may be repeated [default: every tool]
    #[arg(long, value_name = "SCOPE", help_heading = CALLER)]
    pub(crate) scope: Vec<String>,
    /// Hold only this permission; may be repeated [default: every permission]
    #[arg(long, value_name = "PERMISSION", help_heading = CALLER)]
    pub(crate) permission: Vec<String>,
    /// The plan whose limits apply
    #[arg(long, value_name = "NAME", help_heading = CALLER)]
    pub(crate) plan: Option<String>,
}

/// The subcommands of `wieldy mcp`.
#[derive(Debug, Subcommand)]
pub(crate) enum McpCommand {
    /// List the configured MCP servers and their cached tools, without starting any
    #[command(after_help = "Example:\n  wieldy mcp list")]
    List,
    /// Start MCP servers and show whether they answer, and with which tools
    #[command(after_help = "Example:\n  wieldy mcp test tracker")]
    Test {
        /// The names of the servers [default: all]
        #[arg(value_name = "SERVER")]
        servers: Vec<String>,
    },
    /// Accept the present tools of MCP servers, after showing the changes
    #[command(after_help = "Example:\n  wieldy mcp pin tracker --yes")]
    Pin {
        /// The names of the servers
        #[arg(value_name = "SERVER", required = true)]
        servers: Vec<String>,
        /// Accept without asking
        #[arg(long)]
        yes: bool,
    },
    /// Log in to an MCP server: prints the page to open in a browser, and waits for the answer
    #[command(after_help = LOGIN_HELP)]
    Login {
        /// The name of the server
        server: String,
        /// Do not wait for the answer; read the address that the browser was sent to from standard input
        #[arg(long)]
        paste: bool,
    },
    /// Delete the login to an MCP server
    #[command(after_help = "Example:\n  wieldy mcp logout tracker")]
    Logout {
        /// The name of the server
        server: String,
    },
    /// Import MCP servers from the file of another client into the configuration
    #[command(after_help = IMPORT_HELP)]
    Import {
        /// The file
        file: PathBuf,
        /// Import only this one; may be repeated [default: all that are not disabled]
        #[arg(long, value_name = "SERVER")]
        only: Vec<String>,
        /// Print the new lines of the configuration, and write nothing
        #[arg(long)]
        print: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// The address to listen at; port 0 lets the system choose one [default: `serve.listen`, 127.0.0.1:7300]
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = crate::config::listen_address)]
    pub(crate) listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) serving: ServingArgs,
}

/// The options of commands that serve tools.
#[derive(Debug, Args)]
pub(crate) struct ServingArgs {
    /// The folder that tools work in
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
    /// The isolation of programs; `wieldy doctor` shows which levels work here
    #[arg(long, value_name = "LEVEL", value_parser = levels())]
    pub(crate) isolation: Option<Level>,
    /// Approve everything that has to be confirmed, instead of asking the client's user
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Also show the file system as programs see it
    #[arg(long)]
    pub(crate) plan: bool,
    /// The level that must work for success [default: the configured one]
    #[arg(long, value_name = "LEVEL", value_parser = levels())]
    pub(crate) isolation: Option<Level>,
    /// The folder that tools work in
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Replace an existing wieldy.toml
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TrustArgs {
    /// The folder
    #[arg(default_value = ".")]
    pub(crate) dir: PathBuf,
    /// Trust without asking
    #[arg(long, conflicts_with_all = ["list", "revoke"])]
    pub(crate) yes: bool,
    /// List all trusted files, of every folder
    #[arg(long, conflicts_with_all = ["dir", "revoke"])]
    pub(crate) list: bool,
    /// Revoke the trust in the folder
    #[arg(long)]
    pub(crate) revoke: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every value and its origin
    #[command(after_help = "Example:\n  wieldy config show --set timeouts.default=10s")]
    Show,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Arguments::command().debug_assert();
    }

    /// Collects the words that the reference page must contain for a command: the command as typed, and its long flags.
    fn words(command: &clap::Command, typed: &str, all: &mut Vec<String>) {
        all.push(typed.to_owned());
        let told = command.get_arguments().filter(|flag| !flag.is_hide_set());
        all.extend(told.filter_map(|flag| Some(format!("--{}", flag.get_long()?))));
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            words(inner, &format!("{typed} {}", inner.get_name()), all);
        }
    }

    #[test]
    fn every_command_and_flag_is_on_the_page_of_the_command_line() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/cli.md")).unwrap();
        let is_end = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-');
        let is_there = |word: &str| page.match_indices(word).any(|(at, _)| is_end(&page[at + word.len()..]));
        let mut all = Vec::new();
        words(&super::Arguments::command(), "wieldy", &mut all);
        let missing: Vec<String> = all.into_iter().filter(|word| !is_there(word)).collect();
        assert_eq!(missing, Vec::<String>::new());
    }
}

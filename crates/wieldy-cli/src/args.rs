//! The command line as people write it: raw, checked only for its form. `config` and the commands make sense of it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use wieldy::{BatchMode, Level, Network, Priority, parse_duration};

const CONFIGURATION_HELP: &str = "\
Configuration:
  One file is read, the first of:
  --config FILE, $WIELDY_CONFIG, ./wieldy.toml, ~/.config/wieldy/wieldy.toml.
  Every key can be set by an environment variable, and by --set:
  `limits.queue-timeout` is WIELDY_LIMITS_QUEUE_TIMEOUT.

Tools of your own:
  The manifests in `tools.manifests` are read, then ./.wieldy/tools, then ~/.config/wieldy/tools.
  Where two tools have the same name, the first one counts.

Exit codes:
  0 success                                 4 denied, or confirmation missing
  1 the tool failed                         5 timeout
  2 wrong usage or configuration            6 cancelled
  3 unknown tool or invalid arguments       7 sandbox, store or transport failed";

const HISTORY_HELP: &str = "\
Times:
  2026-11-16             the beginning of that day, here
  2026-11-16T08:30:00Z   that moment
  30m, 2h, 7d, 4w        so long ago

Statuses:
  success, failed, timeout, cancelled, permission_denied, validation_error, requires_confirmation;
  of calls that are not over: pending, running, input_required";

const IMPORT_HELP: &str = "\
Files that are understood:
  `mcpServers` of Claude, Cursor, Windsurf, Cline and Gemini; `servers` and `mcp.servers` of VS Code;
  `context_servers` of Zed; `mcp` of opencode; `mcp_servers` of Codex (TOML).
They are written to --config FILE, or to ./wieldy.toml. Values that look like secrets go to files of their own in the
state folder, which the configuration then names. To follow such a file instead of copying it, name it in `mcp.files`.";

const LOGIN_HELP: &str = "\
The answer comes to a port of this machine. Where the browser runs on another one, the page that it is sent to in the end does
not open; with --paste, its address is what this command reads. The login is kept in the state folder, in a file that only
you can read, and is renewed by itself. How it is made can be said by `oauth` in the section of the server.";

const ON_BEHALF: &str = "On whose behalf";

const ARGUMENTS_HELP: &str = "\
Arguments:
  key=value   the value is a text; where the tool wants a number, a text that reads as one will do
  key:=json   the value is JSON
  --args      the whole object: as JSON, from a file with @FILE, or from standard input with -
Where both are given, key=value and key:=json replace the same key of --args.
A key that is given twice is an error.";

/// Runs tools for AI agents: looked up, validated, confirmed, run in custody, timed, retried, recorded.
#[derive(Debug, Parser)]
#[command(name = "wieldy", version, after_help = CONFIGURATION_HELP, max_term_width = 120)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct GlobalArgs {
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Read the configuration from this file
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Keep large outputs and the history in this folder [default: the platform's state folder]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// Log more or less: off, error, warn, info, debug, trace, or TARGET=LEVEL,…
    #[arg(long, global = true, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
    /// Set a key of the configuration; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Call a tool and print what it answers
    #[command(after_help = ARGUMENTS_HELP)]
    Call(Box<CallArgs>),
    /// Run several calls together
    Batch(Box<BatchArgs>),
    /// List the tools there are, or look at one
    Tools(ToolsArgs),
    /// Serve the tools to an MCP client, over standard input and output
    Mcp(Box<McpArgs>),
    /// Serve the tools over HTTP, to MCP clients at /mcp
    Serve(ServeArgs),
    /// Look up the calls that were made, and what happened in each
    #[command(after_help = HISTORY_HELP)]
    History(Box<HistoryArgs>),
    /// Prove that nobody changed what was recorded
    Audit(AuditArgs),
    /// Find out which isolation levels and limits work here, and why others do not
    Doctor(DoctorArgs),
    /// Write a commented wieldy.toml into the current folder
    Init(InitArgs),
    /// Look at the configuration
    Config(ConfigArgs),
    /// Print a script that completes this command's words in a shell
    Completions(CompletionsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CallArgs {
    /// The tool's name
    pub(crate) tool: String,
    /// The tool's arguments
    #[arg(value_name = "KEY=VALUE | KEY:=JSON")]
    pub(crate) pairs: Vec<String>,
    /// The tool's arguments as one JSON object
    #[arg(long, value_name = "JSON|@FILE|-")]
    pub(crate) args: Option<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Begin the call and return at once (needs the REST API of a server, which this version does not have)
    #[arg(long = "async")]
    pub(crate) in_background: bool,
    /// Ask for a confirmation even where neither tool nor policy wants one
    #[arg(long)]
    pub(crate) confirm: bool,
    /// A repeated key returns the first result instead of running again
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BatchArgs {
    /// The calls, as a JSON array or JSON lines of {"id","tool","arguments","after"}; - is standard input
    #[arg(value_name = "FILE|-")]
    pub(crate) file: String,
    /// How the calls are ordered: smart, parallel or sequential
    #[arg(long, default_value = "smart")]
    pub(crate) mode: BatchMode,
    /// How many calls run at once
    #[arg(long, value_name = "COUNT", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) max_concurrency: u32,
    /// Begin nothing more once a call has failed
    #[arg(long)]
    pub(crate) stop_on_error: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// How calls are run, and on whose behalf.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// How long one run may take, such as 500ms, 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) timeout: Option<Duration>,
    /// How long all attempts and waits together may take
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) deadline: Option<Duration>,
    /// How long the call may wait for a slot
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) queue_timeout: Option<Duration>,
    /// How long a run may show no output and no progress
    #[arg(long, value_name = "TIME", value_parser = parse_duration, allow_hyphen_values = true)]
    pub(crate) silence: Option<Duration>,
    /// How often a failed run is tried again
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) retries: Option<u32>,
    /// How strongly programs are kept apart: none, native, …; `wieldy doctor` tells which work here
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isolation: Option<Level>,
    /// How much of a processor programs may use, in thousandths of a core (not enforced at level none)
    #[arg(long, value_name = "MILLI", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) cpu: Option<u64>,
    /// How much memory programs may use, in megabytes (not enforced at level none)
    #[arg(long, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..=16_777_216))]
    pub(crate) memory: Option<u64>,
    /// The folder that tools work in
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
    /// What programs may reach: none, open, or the named hosts (not enforced at level none)
    #[arg(long, value_name = "none|open|HOST,…")]
    pub(crate) network: Option<Network>,
    /// Agree to whatever has to be confirmed
    #[arg(long)]
    pub(crate) yes: bool,
    /// Who goes first when calls wait: low, normal, high or a number from -128 to 127
    #[arg(long, value_name = "P", default_value = "normal", allow_hyphen_values = true)]
    pub(crate) priority: Priority,
    /// The agent on whose behalf the call is made
    #[arg(long, value_name = "DID", default_value = "local", help_heading = ON_BEHALF)]
    pub(crate) agent: String,
    /// The session that the call is part of
    #[arg(long, value_name = "ID", help_heading = ON_BEHALF)]
    pub(crate) session: Option<String>,
    /// See only tools without a scope or with this one; may be repeated [default: every tool]
    #[arg(long, value_name = "SCOPE", help_heading = ON_BEHALF)]
    pub(crate) scope: Vec<String>,
    /// Hold only this permission; may be repeated [default: every permission]
    #[arg(long, value_name = "PERMISSION", help_heading = ON_BEHALF)]
    pub(crate) permission: Vec<String>,
    /// The plan whose limits hold
    #[arg(long, value_name = "NAME", help_heading = ON_BEHALF)]
    pub(crate) plan: Option<String>,
    /// A word that comes back in the result; may be repeated
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
    /// Only tools from here, such as builtin or command
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
    Show {
        /// The tool's name
        name: String,
    },
    /// Check a manifest and print what is wrong with it
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
    /// The agent on whose behalf calls are made [default: the name that the client gives itself]
    #[arg(long, value_name = "DID", help_heading = ON_BEHALF)]
    pub(crate) agent: Option<String>,
    /// The session that calls are part of [default: one of its own for each client]
    #[arg(long, value_name = "ID", help_heading = ON_BEHALF)]
    pub(crate) session: Option<String>,
    /// Show only tools without a scope or with this one; may be repeated [default: every tool]
    #[arg(long, value_name = "SCOPE", help_heading = ON_BEHALF)]
    pub(crate) scope: Vec<String>,
    /// Hold only this permission; may be repeated [default: every permission]
    #[arg(long, value_name = "PERMISSION", help_heading = ON_BEHALF)]
    pub(crate) permission: Vec<String>,
    /// The plan whose limits hold
    #[arg(long, value_name = "NAME", help_heading = ON_BEHALF)]
    pub(crate) plan: Option<String>,
}

/// What else can be done with MCP.
#[derive(Debug, Subcommand)]
pub(crate) enum McpCommand {
    /// List the MCP servers whose tools are taken, as far as they are known; nothing is started
    List,
    /// Start MCP servers and find out whether they answer, and with which tools
    Test {
        /// Their names [default: all]
        #[arg(value_name = "SERVER")]
        servers: Vec<String>,
    },
    /// Agree to the tools of MCP servers as they are now, after showing what changed
    Pin {
        /// Their names
        #[arg(value_name = "SERVER", required = true)]
        servers: Vec<String>,
        /// Agree without being asked
        #[arg(long)]
        yes: bool,
    },
    /// Log in to an MCP server that wants it: prints the page to open in a browser, and waits for the answer
    #[command(after_help = LOGIN_HELP)]
    Login {
        /// Its name
        server: String,
        /// Wait for no answer; read from standard input the address that the browser was sent to
        #[arg(long)]
        paste: bool,
    },
    /// Forget the login to an MCP server
    Logout {
        /// Its name
        server: String,
    },
    /// Take MCP servers from the file of another client into the configuration
    #[command(after_help = IMPORT_HELP)]
    Import {
        /// The file
        file: PathBuf,
        /// Take only this one; may be repeated [default: all that are not disabled]
        #[arg(long, value_name = "SERVER")]
        only: Vec<String>,
        /// Print what would be written to the configuration, and write nothing
        #[arg(long)]
        print: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Where to listen; port 0 lets the system choose one [default: `serve.listen`, 127.0.0.1:7300]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) serving: ServingArgs,
}

/// How tools are served to others.
#[derive(Debug, Args)]
pub(crate) struct ServingArgs {
    /// The folder that tools work in
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
    /// How strongly programs are kept apart: none, native, …; `wieldy doctor` tells which work here
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isolation: Option<Level>,
    /// Agree to whatever has to be confirmed, instead of asking the client's user
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Which calls are wanted.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// Only calls of this tool
    #[arg(long)]
    pub(crate) tool: Option<String>,
    /// Only calls that stand or ended like this
    #[arg(long)]
    pub(crate) status: Option<String>,
    /// Only calls of this session
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// Only calls on behalf of this agent
    #[arg(long, value_name = "DID")]
    pub(crate) agent: Option<String>,
    /// Only calls of this tenant
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// Only calls of this batch
    #[arg(long, value_name = "ID")]
    pub(crate) batch: Option<String>,
    /// Only calls accepted then or later
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Only calls accepted before then
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// Only calls with these words, or beginnings of words, in the tool's name, the arguments or the error
    #[arg(long, value_name = "WORDS")]
    pub(crate) text: Option<String>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct HistoryArgs {
    #[command(subcommand)]
    pub(crate) command: Option<HistoryCommand>,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// How many calls, the latest first
    #[arg(long, value_name = "COUNT", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) limit: u32,
    /// Where the last page ended
    #[arg(long, value_name = "N")]
    pub(crate) cursor: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum HistoryCommand {
    /// Print everything that is known of one call
    Show {
        /// The call's id, or its first characters: at least eight, and as many as no other call's id has
        id: String,
    },
    /// Count calls, by tool or day
    #[command(after_help = HISTORY_HELP)]
    Stats {
        #[command(flatten)]
        filter: FilterArgs,
        /// What is told apart: tool, day (in UTC), or tool,day
        #[arg(long, value_name = "WHAT", default_value = "tool")]
        by: String,
    },
    /// Copy the history into a new file while others go on writing
    Backup {
        /// The new file
        file: PathBuf,
    },
    /// Copy the history as it is now to another address: a file, or postgres://user@host/database; others may go on writing
    Copy {
        /// The address
        url: String,
    },
    /// Drop old records; what is kept can still be proved [default: as the configuration says]
    Prune {
        /// Drop records that are older than this, such as 90d
        #[arg(long, value_name = "TIME")]
        older_than: Option<String>,
        /// Drop the oldest records until the history is no larger than this, such as 500MB or 1GB; open calls keep theirs
        #[arg(long, value_name = "SIZE")]
        larger_than: Option<String>,
        /// Only tell what would be dropped
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    #[command(subcommand)]
    pub(crate) command: AuditCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// Check that every record follows from the one before, and all signatures
    Verify {
        /// A signed end of the trail that was kept elsewhere, which the trail must lead through; may be repeated
        #[arg(long, value_name = "FILE")]
        anchor: Vec<PathBuf>,
        /// The public key that must have signed [default: any one]
        #[arg(long, value_name = "HEX")]
        key: Option<String>,
    },
    /// Print the end of the trail, signed: kept elsewhere, it is an anchor
    Head {
        /// Write it into this new file instead
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print the public key that the trail is signed with
    Key,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Also show what programs see of the file system
    #[arg(long)]
    pub(crate) plan: bool,
    /// The level that must work for this to be a success [default: the configured one]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isolation: Option<Level>,
    /// The folder that tools work in
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Replace a wieldy.toml that is there already
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every value and where it comes from
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

    /// What the page of the command line should name of a command: the words to type, and its long flags.
    fn words(command: &clap::Command, typed: &str, all: &mut Vec<String>) {
        all.push(typed.to_owned());
        all.extend(command.get_arguments().filter_map(|flag| Some(format!("--{}", flag.get_long()?))));
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

//! Arguments of the commands about the history: `wieldy history`, `stats` and `audit`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use clap_complete::engine::ArgValueCandidates;
use wieldy::Status;

use super::help::HISTORY_HELP;
use super::statuses;
use crate::commands::completions;

/// The filter of calls.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// Only calls of this tool
    #[arg(long, add = ArgValueCandidates::new(completions::tools))]
    pub(crate) tool: Option<String>,
    /// Only calls with this status
    #[arg(long, value_parser = statuses())]
    pub(crate) status: Option<Status>,
    /// Only calls of this session
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// Only calls on behalf of this agent
    #[arg(long, value_name = "DID")]
    pub(crate) agent: Option<String>,
    /// Only calls of this tenant
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// Only calls that worked in this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) workspace: Option<PathBuf>,
    /// Only calls of tools of this provider: builtin, local, command, or mcp:NAME
    #[arg(long)]
    pub(crate) provider: Option<String>,
    /// Only calls of this batch
    #[arg(long, value_name = "ID")]
    pub(crate) batch: Option<String>,
    /// Only calls accepted at this time or later
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Only calls accepted before this time
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// Only calls with these words, or beginnings of words, in the tool's name, the arguments or the error
    #[arg(long, value_name = "WORDS")]
    pub(crate) text: Option<String>,
    /// The place of the words of `--text`: the calls, or what the tools answered [default: calls]
    #[arg(long = "in", value_name = "PLACE", requires = "text")]
    pub(crate) text_in: Option<TextIn>,
    /// Only calls whose metadata has this entry at its top level; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) metadata: Vec<String>,
}

/// A place to look for words.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum TextIn {
    Calls,
    Results,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct HistoryArgs {
    #[command(subcommand)]
    pub(crate) command: Option<HistoryCommand>,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// The maximal number of calls, latest first
    #[arg(long, value_name = "COUNT", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) limit: u32,
    /// The cursor that the last page ended with
    #[arg(long, value_name = "N")]
    pub(crate) cursor: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum HistoryCommand {
    /// Print all details of one call
    #[command(after_help = "Example:\n  wieldy history show 019a8f2c")]
    Show {
        /// The call's id, or its first characters: at least eight, and enough to be unique
        id: String,
    },
    /// Count calls, by tool or day
    #[command(after_help = HISTORY_HELP)]
    Stats {
        #[command(flatten)]
        filter: Box<FilterArgs>,
        /// The grouping: tool, day (in UTC), or tool,day
        #[arg(long, value_name = "WHAT", default_value = "tool")]
        by: String,
    },
    /// Copy the history into a new file while other processes keep writing
    #[command(after_help = "Example:\n  wieldy history backup copy.db")]
    Backup {
        /// The new file
        file: PathBuf,
    },
    /// Copy the present history to another address: a file, or postgres://user@host/database; other processes may keep
    /// writing
    #[command(after_help = "Example:\n  wieldy history copy other.db")]
    Copy {
        /// The address
        url: String,
    },
    /// Drop old records; the rest can still be verified [default: as configured]
    #[command(after_help = "Example:\n  wieldy history prune --older-than 90d --dry-run")]
    Prune {
        /// Drop records that are older than this, such as 90d
        #[arg(long, value_name = "TIME")]
        older_than: Option<String>,
        /// Drop the oldest records until the history is no larger than this, such as 500MB or 1GB; records of open
        /// calls stay
        #[arg(long, value_name = "SIZE")]
        larger_than: Option<String>,
        /// Only print what would be dropped
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
    /// Verify the chain of all records, and all signatures
    #[command(after_help = "Example:\n  wieldy audit verify")]
    Verify {
        /// A signed end of the trail, stored elsewhere, that the trail must contain; may be repeated
        #[arg(long, value_name = "FILE")]
        anchor: Vec<PathBuf>,
        /// The public key that must have signed [default: any]
        #[arg(long, value_name = "HEX")]
        key: Option<String>,
    },
    /// Print the signed end of the trail: stored elsewhere, it is an anchor
    #[command(after_help = "Example:\n  wieldy audit head --output head.json")]
    Head {
        /// Write it to this new file instead
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print the public key that the trail is signed with
    #[command(after_help = "Example:\n  wieldy audit key")]
    Key,
}

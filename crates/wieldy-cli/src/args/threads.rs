//! Arguments of `wieldy threads`.

use clap::{Args, Subcommand, ValueEnum};

use super::CALLER;

#[derive(Debug, Args)]
pub(crate) struct ThreadsArgs {
    #[command(subcommand)]
    pub(crate) command: ThreadsCommand,
    #[command(flatten)]
    pub(crate) caller: ThreadsCaller,
}

/// The owner of the threads.
#[derive(Debug, Args)]
pub(crate) struct ThreadsCaller {
    /// The project [default: default]
    #[arg(long, value_name = "NAME", global = true)]
    pub(crate) project: Option<String>,
    /// The agent that makes the call
    #[arg(long, value_name = "DID", default_value = "local", global = true, help_heading = CALLER)]
    pub(crate) agent: String,
    /// The person whose threads they are [default: the name of your account]
    #[arg(long, value_name = "NAME", global = true, help_heading = CALLER)]
    pub(crate) user: Option<String>,
    /// The tenant whose threads they are
    #[arg(long, value_name = "NAME", global = true, help_heading = CALLER)]
    pub(crate) tenant: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ThreadsCommand {
    /// List threads, the latest first
    #[command(after_help = "Example:\n  wieldy threads list --status all")]
    List {
        /// Only threads with this status
        #[arg(long, default_value = "open")]
        status: ThreadsStatus,
        /// The maximal number of threads
        #[arg(long, value_name = "COUNT", default_value = "50", value_parser = clap::value_parser!(u32).range(1..=200))]
        limit: u32,
        /// The cursor that the last page ended with
        #[arg(long, value_name = "N")]
        cursor: Option<String>,
    },
    /// Print the entries of a thread
    #[command(after_help = "Example:\n  wieldy threads read release-plan --latest --limit 5")]
    Read {
        /// The thread
        thread: String,
        /// The maximal number of entries
        #[arg(long, value_name = "COUNT", default_value = "50", value_parser = clap::value_parser!(u32).range(1..=500))]
        limit: u32,
        /// Begin with the latest entry
        #[arg(long)]
        latest: bool,
        /// Only entries after this number
        #[arg(long, value_name = "N")]
        after: Option<u32>,
        /// Only entries before this number
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        before: Option<u32>,
        /// Only entries of this type
        #[arg(long = "type", value_name = "TYPE")]
        kind: Option<String>,
    },
    /// Find entries by their words
    #[command(after_help = "Example:\n  wieldy threads seek '\"connection pool\" postgres'")]
    Seek {
        /// Words and "phrases" that must all be in an entry; `migrat*` is the beginning of a word
        query: String,
        /// The maximal number of entries
        #[arg(long, value_name = "COUNT", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=100))]
        limit: u32,
        /// Only entries since a time such as 2026-11-16T08:00:00Z, or a time back from now such as 2h
        #[arg(long, value_name = "TIME")]
        since: Option<String>,
        /// Only entries of this type
        #[arg(long = "type", value_name = "TYPE")]
        kind: Option<String>,
        /// Only entries of this thread
        #[arg(long, value_name = "ID")]
        thread: Option<String>,
    },
    /// Append an entry to a thread
    #[command(after_help = "Example:\n  wieldy threads push release-plan 'We ship on Friday.' --type decision")]
    Push {
        /// The thread, which is made if it is new
        thread: String,
        /// The text; - is standard input
        #[arg(value_name = "TEXT|-")]
        content: String,
        /// The type: note, decision, question, result, error, close, reopen or another word
        #[arg(long = "type", value_name = "TYPE", default_value = "note")]
        kind: String,
        /// The new title of the thread
        #[arg(long)]
        title: Option<String>,
        /// The number of the entry that this one answers
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        reply_to: Option<u32>,
        /// A repeated key does not write the entry again
        #[arg(long)]
        key: Option<String>,
    },
}

/// The status of listed threads.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ThreadsStatus {
    Open,
    Closed,
    All,
}

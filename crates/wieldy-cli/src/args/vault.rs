//! The arguments of `wieldy vault`.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use super::RunArgs;

#[derive(Debug, Args)]
pub(crate) struct VaultArgs {
    #[command(subcommand)]
    pub(crate) command: VaultCommand,
}

/// The vault of a command, and its caller.
#[derive(Debug, Args)]
pub(crate) struct VaultOn {
    /// The vault: a name in the section `vault.projects`
    #[arg(long, value_name = "NAME", default_value = wieldy::DEFAULT_PROJECT)]
    pub(crate) project: String,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VaultCommand {
    /// Print a note, or a part of it
    #[command(after_help = "Example:\n  wieldy vault read 'Tea#Brewing' --backlinks")]
    Read {
        /// The note, by its path or as a link names it: Note, Note#Heading, Note^block, an alias
        path: String,
        /// Also print the links from other notes
        #[arg(long)]
        backlinks: bool,
        #[command(flatten)]
        on: Box<VaultOn>,
    },
    /// Write a note, or a part of it
    #[command(after_help = "Example:\n  wieldy vault write Tea --mode append --body 'more water'")]
    Write {
        /// The note
        path: String,
        /// The text; @FILE reads it from a file, - from standard input
        #[arg(long, value_name = "TEXT|@FILE|-", allow_hyphen_values = true)]
        body: String,
        /// The part that is written [default: replace]
        #[arg(long, value_parser = PossibleValuesParser::new(["create", "replace", "append", "prepend", "section"]))]
        mode: Option<String>,
        /// The heading of the section, with --mode section
        #[arg(long)]
        heading: Option<String>,
        /// The title, as a property
        #[arg(long)]
        title: Option<String>,
        /// A property to set; := takes JSON, and null removes it; may be repeated
        #[arg(long, value_name = "KEY=VALUE | KEY:=JSON")]
        property: Vec<String>,
        /// Write only if the note still has this hash
        #[arg(long, value_name = "HASH")]
        if_hash: Option<String>,
        #[command(flatten)]
        on: Box<VaultOn>,
    },
    /// Search the notes
    #[command(after_help = "Example:\n  wieldy vault search '\"green tea\" tag:drink' -- -coffee")]
    Search {
        /// Words, "phrases", tag:NAME, path:TEXT, PROPERTY:VALUE; - before one leaves notes out
        #[arg(required = true, value_name = "WORD")]
        query: Vec<String>,
        /// The most notes to show [default: 20]
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
        limit: Option<u32>,
        /// Only notes in this folder of the vault
        #[arg(long)]
        folder: Option<String>,
        /// Go on where an earlier answer ended
        #[arg(long)]
        cursor: Option<String>,
        #[command(flatten)]
        on: Box<VaultOn>,
    },
    /// List the notes
    #[command(after_help = "Example:\n  wieldy vault list --sort modified")]
    List {
        /// The folder in the vault
        folder: Option<String>,
        /// The number of folder levels
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
        depth: Option<u32>,
        /// The order [default: name]
        #[arg(long, value_parser = PossibleValuesParser::new(["name", "modified"]))]
        sort: Option<String>,
        /// Only notes with this tag
        #[arg(long)]
        tag: Option<String>,
        /// Go on where an earlier answer ended
        #[arg(long)]
        cursor: Option<String>,
        #[command(flatten)]
        on: Box<VaultOn>,
    },
    /// Move a note or folder, and change all links to it
    #[command(after_help = "Example:\n  wieldy vault move Tea drinks/ --dry-run")]
    Move {
        /// The note, file or folder
        path: String,
        /// The new path; one that ends in / is the folder that it moves into
        new_path: String,
        /// Only show what would change
        #[arg(long)]
        dry_run: bool,
        /// Leave the links as they are
        #[arg(long)]
        keep_links: bool,
        #[command(flatten)]
        on: Box<VaultOn>,
    },
    /// Write a page that links to all notes of a folder
    #[command(after_help = "Example:\n  wieldy vault index drinks --style moc")]
    Index {
        /// The folder in the vault
        folder: Option<String>,
        /// The number of folder levels
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
        depth: Option<u32>,
        /// The form of the page [default: list]
        #[arg(long, value_parser = PossibleValuesParser::new(["list", "table", "moc"]))]
        style: Option<String>,
        /// The title of a new page
        #[arg(long)]
        title: Option<String>,
        /// The page [default: index.md in the folder]
        #[arg(long, value_name = "PATH")]
        page: Option<String>,
        #[command(flatten)]
        on: Box<VaultOn>,
    },
}

impl VaultCommand {
    /// Returns the vault and the caller.
    pub(crate) fn on(&self) -> &VaultOn {
        match self {
            Self::Read { on, .. }
            | Self::Write { on, .. }
            | Self::Search { on, .. }
            | Self::List { on, .. }
            | Self::Move { on, .. }
            | Self::Index { on, .. } => on,
        }
    }
}

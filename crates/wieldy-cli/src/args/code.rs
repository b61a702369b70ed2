//! The arguments of `wieldy code`.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use super::RunArgs;

#[derive(Debug, Args)]
pub(crate) struct CodeArgs {
    #[command(subcommand)]
    pub(crate) command: CodeCommand,
}

impl CodeArgs {
    /// Returns the options of the call.
    pub(crate) fn run(&self) -> &RunArgs {
        match &self.command {
            CodeCommand::Search(args) => &args.run,
            CodeCommand::Find(args) => &args.run,
            CodeCommand::Refs(args) => &args.run,
            CodeCommand::Map(args) => &args.run,
        }
    }
}

/// The subcommands of `wieldy code`.
#[derive(Debug, Subcommand)]
pub(crate) enum CodeCommand {
    /// Search for a name, a text, a regular expression or some words
    #[command(after_help = "Example:\n  wieldy code search --language rust 'fn \\w+_max'")]
    Search(SearchArgs),
    /// Find the definition of a symbol, such as `Config::load`
    #[command(after_help = "Example:\n  wieldy code find Config::load")]
    Find(FindArgs),
    /// Find the references to a symbol
    #[command(after_help = "Example:\n  wieldy code refs Config --kind type")]
    Refs(RefsArgs),
    /// Show the most important definitions of a project
    #[command(after_help = "Example:\n  wieldy code map src --max-tokens 2000")]
    Map(MapArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SearchArgs {
    /// A name, a text, a regular expression or some words
    #[arg(required = true, value_name = "QUERY")]
    pub(crate) query: Vec<String>,
    /// The folder or file to search, relative to the workspace
    #[arg(long = "in", value_name = "PATH")]
    pub(crate) path: Option<String>,
    /// Only files in this language, or with this ending
    #[arg(long, value_name = "NAME")]
    pub(crate) language: Option<String>,
    /// The kind of search [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(["auto", "text", "regex", "words"]))]
    pub(crate) mode: Option<String>,
    /// The treatment of tests, foreign and generated code [default: rank_lower]
    #[arg(long, value_parser = PossibleValuesParser::new(["include", "rank_lower", "exclude"]))]
    pub(crate) tests: Option<String>,
    /// The number of lines before and after each find [default: 2]
    #[arg(long, short = 'C', value_name = "LINES")]
    pub(crate) context: Option<u64>,
    /// The maximal number of finds [default: 20]
    #[arg(long, value_name = "COUNT")]
    pub(crate) limit: Option<u64>,
    /// The finds after those of an earlier answer
    #[arg(long, value_name = "CURSOR")]
    pub(crate) cursor: Option<String>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Args)]
pub(crate) struct FindArgs {
    /// The symbol: `name`, `Type::name`, `Class.method` or `module::name`
    pub(crate) symbol: String,
    /// Prefer definitions in this folder or file
    #[arg(long = "in", value_name = "PATH")]
    pub(crate) path: Option<String>,
    /// Only definitions of this kind, such as function or struct
    #[arg(long)]
    pub(crate) kind: Option<String>,
    /// The maximal number of definitions [default: 5]
    #[arg(long, value_name = "COUNT")]
    pub(crate) limit: Option<u64>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RefsArgs {
    /// The symbol: `name`, `Type::name`, `Class.method` or `module::name`
    pub(crate) symbol: String,
    /// Only references in this folder or file
    #[arg(long = "in", value_name = "PATH")]
    pub(crate) path: Option<String>,
    /// Only references of this kind: call, import, type, inherit, read or write; may be repeated
    #[arg(long)]
    pub(crate) kind: Vec<String>,
    /// Only references that are at least so sure: exact, likely or name
    #[arg(long, value_name = "GRADE")]
    pub(crate) confidence: Option<String>,
    /// The maximal number of references [default: 100]
    #[arg(long, value_name = "COUNT")]
    pub(crate) limit: Option<u64>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MapArgs {
    /// The folder to map, relative to the workspace
    #[arg(value_name = "PATH")]
    pub(crate) path: Option<String>,
    /// The maximal number of tokens [default: 4096]
    #[arg(long, value_name = "COUNT")]
    pub(crate) max_tokens: Option<u64>,
    /// A path or a symbol that the map should be about; may be repeated
    #[arg(long, value_name = "PATH|SYMBOL")]
    pub(crate) focus: Vec<String>,
    /// Show tests too
    #[arg(long)]
    pub(crate) tests: bool,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

//! `wieldy completions`: prints a script that completes this command's words in a shell, and returns the candidates.
//!
//! At every Tab the script runs this program with the variable [`VARIABLE`], so the candidates include the tools of
//! manifests and of MCP servers. This starts no server, asks no question and prints nothing else.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, anyhow};
use clap::CommandFactory;
use clap_complete::CompleteEnv;
use clap_complete::engine::{CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::Shells;
use wieldy::{Caller, ToolFilter};

use crate::args::{Arguments, CompletionsArgs};
use crate::config::{Config, Environment, Overrides};
use crate::exit::{Exit, Failure};
use crate::output::Printer;
use crate::{assemble, upstreams};

/// The variable with which scripts request candidates. It has another prefix than variables that set keys of the
/// configuration.
const VARIABLE: &str = "_WIELDY_COMPLETE";

pub(crate) fn run(args: &CompletionsArgs, printer: &Printer) -> Result<Exit, Failure> {
    let (shell, shells) = (args.shell.to_string(), Shells::builtins());
    let completer =
        shells.completer(&shell).ok_or_else(|| Failure::usage(anyhow!("there is no script for {shell}")))?;
    let mut script = Vec::new();
    let written = completer.write_registration(VARIABLE, "wieldy", "wieldy", "wieldy", &mut script);
    written.context("cannot write the script").map_err(Failure::broken)?;
    printer.data(&script)?;
    Ok(Exit::Success)
}

/// Answers a script that requests candidates, and then exits.
pub(crate) fn answer() {
    if std::env::var_os(VARIABLE).is_some() {
        CompleteEnv::with_factory(Arguments::command).var(VARIABLE).complete();
    }
}

/// Returns the names of all tools that are known without contacting a server.
pub(crate) fn tools() -> Vec<CompletionCandidate> {
    let environment = Environment::of_this_process();
    let Ok(config) = Config::load(&environment, &Overrides::default()) else { return Vec::new() };
    let Ok(executor) = assemble::catalogue(&config, &environment) else { return Vec::new() };
    // If the servers cannot be used, the other tools are still offered.
    let _servers = upstreams::open_lazily(&config, &environment, &executor);
    let tools = executor.registry().list(&Caller::local(), &ToolFilter::default());
    tools.iter().map(|tool| CompletionCandidate::new(tool.spec().name.as_str())).collect()
}

/// Returns the keys of the configuration, each with its `=`.
pub(crate) fn keys() -> Vec<CompletionCandidate> {
    let config = Config::load(&Environment::of_this_process(), &Overrides::default());
    let values = config.map(|config| config.values).unwrap_or_default();
    values.iter().map(|shown| CompletionCandidate::new(format!("{}=", shown.key))).collect()
}

pub(crate) fn log_levels() -> Vec<CompletionCandidate> {
    ["off", "error", "warn", "info", "debug", "trace"].map(CompletionCandidate::new).into()
}

pub(crate) fn networks() -> Vec<CompletionCandidate> {
    ["none", "open"].map(CompletionCandidate::new).into()
}

pub(crate) fn priorities() -> Vec<CompletionCandidate> {
    ["low", "normal", "high"].map(CompletionCandidate::new).into()
}

/// Returns the words of a program's command line: a program on the PATH or a path, and paths after it.
pub(crate) fn program_words(current: &OsStr) -> Vec<CompletionCandidate> {
    let mut found = PathCompleter::any().complete(current);
    let words: Vec<OsString> = std::env::args_os().collect();
    if is_program(&words) && !current.as_bytes().contains(&b'/') {
        found.extend(programs(current).into_iter().map(CompletionCandidate::new));
    }
    found
}

/// Returns true if the last of these words of the script is the program of `run`: it follows `run`, `--`, or a flag.
fn is_program(words: &[OsString]) -> bool {
    let Some(run) = words.iter().rposition(|word| word == "run") else { return false };
    let Some((_, before)) = words[run + 1..].split_last() else { return false };
    let is_flag = |word: &OsString| word.as_bytes().starts_with(b"-");
    match before.iter().position(|word| word == "--") {
        Some(end) => end + 1 == before.len(),
        None => before.is_empty() || before.iter().rev().take(2).any(is_flag),
    }
}

/// Returns the names on the PATH that start with this text.
fn programs(begin: &OsStr) -> BTreeSet<OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let entries = std::env::split_paths(&path).filter_map(|folder| folder.read_dir().ok()).flatten().flatten();
    let names = entries.map(|entry| entry.file_name());
    names.filter(|name| name.as_bytes().starts_with(begin.as_bytes())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_word_after_run_is_a_program() {
        let is = |line: &str| is_program(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        for line in ["run gi", "run -- gi", "run --yes gi", "run --timeout 5s gi", "run --yes -- gi"] {
            assert!(is(&format!("wieldy -- wieldy {line}")), "{line}");
        }
        for line in ["run git st", "run -- git st", "run -- git --no-pager st", "call gi"] {
            assert!(!is(&format!("wieldy -- wieldy {line}")), "{line}");
        }
    }
}

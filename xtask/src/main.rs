//! Repository chores: `cargo xtask test`, `tidy`, `bench`, `requirements`, `vm`, `postgres` and `foreign`.

mod bench;
mod foreign;
mod postgres;
mod runtimes;
mod skips;
mod stages;
mod tidy;
mod vm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use stages::Selection;

/// The chores of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Run the checks of CI: format, clippy, tidy, tests, doc tests, docs
    #[command(visible_alias = "check")]
    Test {
        /// Run the long stages instead: series of kills and attacks, programs of other projects, virtual machines
        #[arg(long)]
        long: bool,
        /// Use the short counts of CI in the series
        #[arg(long, requires = "long")]
        short: bool,
    },
    /// Check the rules of this repository that no compiler knows
    Tidy,
    /// Write the table of demands and the tests that show them, `docs/reference/requirements.md`, anew
    Requirements,
    /// Test the sandbox in virtual machines with an older kernel: with only cgroup v2, only v1, none, without Landlock
    Vm {
        /// The machines to boot, such as `cgroup-v2`; all if none is named
        names: Vec<String>,
    },
    /// Test with MCP servers, clients and a conformance suite of other projects
    Foreign,
    /// Run a command with a PostgreSQL server, for the tests of the history
    Postgres {
        /// The command and its arguments
        #[arg(required = true, last = true)]
        command: Vec<String>,
    },
    /// Measure, and print a table of ratios to the floor of the same run
    Bench(bench::Arguments),
    /// Run a benchmark itself, in a release build; `bench` starts it
    #[command(hide = true)]
    BenchInner(bench::InnerArguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().chore {
        Chore::Test { long, short } => stages::run_all(&repository(), Selection::of(long, short)),
        Chore::Tidy => tidy::run(&repository()),
        Chore::Requirements => tidy::write_requirements(&repository()),
        Chore::Vm { names } => vm::run(&repository(), &names),
        Chore::Foreign => stages::run_foreign(&repository()),
        Chore::Postgres { command } => postgres::run(&command),
        Chore::Bench(arguments) => bench::start(&arguments, &repository()),
        Chore::BenchInner(arguments) => bench::run_inner(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the root of the repository, the folder above this crate.
fn repository() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    here.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

//! Benchmarks: wieldy against a floor, the same work done by hand, interleaved in one run on one machine.
//!
//! Times on a shared machine vary, so the result is the ratio to a floor that was measured in the same rounds. `bench`
//! builds itself again with the release profile `dist` and the feature `bench`, and then runs `bench-inner`.
//!
//! Floors and wieldy alike use the allocator of the `wieldy` command: a faster one helps both.

#[cfg(feature = "bench")]
mod cli;
#[cfg(feature = "bench")]
mod containers;
#[cfg(feature = "bench")]
mod engine;
#[cfg(feature = "bench")]
mod floor;
#[cfg(feature = "bench")]
mod harness;
#[cfg(feature = "bench")]
mod journal;
#[cfg(feature = "bench")]
mod journal_floor;
#[cfg(feature = "bench")]
mod journal_questions;
#[cfg(feature = "bench")]
mod mcp;
#[cfg(feature = "bench")]
mod mcp_servers;
#[cfg(feature = "bench")]
mod memory;
#[cfg(feature = "bench")]
mod neighbours;
#[cfg(feature = "bench")]
mod ours;
#[cfg(feature = "bench")]
mod sandbox;
#[cfg(feature = "bench")]
mod servers;
#[cfg(feature = "bench")]
mod table;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

#[cfg(feature = "bench")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The subject to measure
    subject: Subject,
    /// Fewer rounds: for a first look, not for a claim
    #[arg(long)]
    quick: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Subject {
    /// One call through the whole pipeline, batches, observers, many tools, memory
    Engine,
    /// From the start to the end of a program, with and without a sandbox, and in other sandboxes
    Sandbox,
    /// Calls recorded on disk, queries to a large history, verification of the hash chain
    Journal,
    /// Calls over MCP: directly to a server, through wieldy, and through other gateways
    Mcp,
    /// Calls that are processes of their own: `wieldy call`, `wieldy run`
    Cli,
    /// The first start of nine MCP servers that npx and uvx fetch, from empty caches
    Servers,
}

#[derive(clap::Args)]
pub(crate) struct InnerArguments {
    #[command(flatten)]
    arguments: Arguments,
    /// Measure only the memory per item of this kind, in a process of its own
    #[arg(long)]
    memory: Option<Memory>,
    /// Only make calls for this many seconds, for a profiler
    #[arg(long)]
    spin: Option<u64>,
    /// Spin with batches instead of single calls
    #[arg(long, requires = "spin")]
    batches: bool,
    /// Spin with calls that each get a new sandbox
    #[arg(long, requires = "spin")]
    cold: bool,
    /// Spin with calls that wait for the disk
    #[arg(long, requires = "spin")]
    strict: bool,
    /// Be the MCP echo server that receives the calls
    #[arg(long)]
    echo: bool,
    /// Be an MCP server by wieldy with the same tool, and the history in this folder
    #[arg(long)]
    own: Option<std::path::PathBuf>,
}

/// The kinds of items whose memory is measured.
#[derive(Clone, Copy, ValueEnum)]
enum Memory {
    /// Registered tools
    Tools,
    /// Calls in flight
    Calls,
    /// Bare tasks with a timer, the floor of a call in flight
    Tasks,
}

/// Builds the benchmark with the profile `dist` and runs it.
pub(crate) fn start(arguments: &Arguments, root: &Path) -> Result<()> {
    let subject = arguments.subject.to_possible_value().context("the subject has a name")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    if matches!(arguments.subject, Subject::Servers) {
        crate::foreign::install(root)?;
    }
    if matches!(arguments.subject, Subject::Mcp | Subject::Cli | Subject::Servers) {
        eprintln!("building wieldy with the profile `dist`…");
        let built = Command::new(&cargo).current_dir(root).args(["build", "--profile", "dist", "--quiet"]).status();
        if !built.context("cannot start cargo")?.success() {
            bail!("wieldy could not be built");
        }
    }
    let mut command = Command::new(cargo);
    command.current_dir(root).args(["run", "--profile", "dist", "--quiet"]);
    command.args(["--package", "xtask", "--features", "bench"]);
    command.args(["--", "bench-inner", subject.get_name()]);
    command.args(arguments.quick.then_some("--quick")).args(arguments.json.then_some("--json"));
    eprintln!("building the benchmark with the profile `dist`…");
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the benchmark ended with {status}");
    }
    Ok(())
}

/// Runs a benchmark and prints the results.
#[cfg(feature = "bench")]
pub(crate) fn run_inner(inner: &InnerArguments) -> Result<()> {
    if cfg!(debug_assertions) {
        bail!("this is a debug build; use `cargo xtask bench`");
    }
    if inner.echo {
        return mcp_servers::serve_echo();
    }
    if let Some(folder) = &inner.own {
        return mcp_servers::serve_own(folder);
    }
    if let Some(memory) = inner.memory {
        println!("{}", memory::measure(memory)?);
        return Ok(());
    }
    if let Some(seconds) = inner.spin {
        let duration = std::time::Duration::from_secs(seconds);
        return match inner.arguments.subject {
            Subject::Engine => engine::spin(duration, inner.batches),
            Subject::Sandbox => sandbox::spin(duration, inner.cold),
            Subject::Journal if inner.strict => journal::spin(duration, wieldy_core::Durability::Strict),
            Subject::Journal => journal::spin(duration, wieldy_core::Durability::Relaxed),
            Subject::Mcp | Subject::Cli | Subject::Servers => {
                bail!("these calls go through processes of their own: look at those")
            }
        };
    }
    let Arguments { subject, quick, json } = inner.arguments;
    let rows = match subject {
        Subject::Engine => engine::measure(quick)?,
        Subject::Sandbox => sandbox::measure(quick)?,
        Subject::Journal => journal::measure(quick)?,
        Subject::Mcp => mcp::measure(quick)?,
        Subject::Cli => cli::measure(quick)?,
        Subject::Servers => servers::measure(quick)?,
    };
    if json { table::print_json(&rows) } else { table::print(&rows) }
}

#[cfg(not(feature = "bench"))]
pub(crate) fn run_inner(inner: &InnerArguments) -> Result<()> {
    // The arguments are read only by builds with benchmarks.
    let InnerArguments { arguments: _, memory: _, spin: _, batches: _, cold: _, strict: _, echo: _, own: _ } = inner;
    bail!("this build has no benchmarks in it; use `cargo xtask bench`")
}

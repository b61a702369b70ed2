//! The stages of `cargo xtask test`, in order. The first failure ends the run.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{foreign, postgres, runtimes, tidy, vm};

/// Runs every stage, and prints a summary.
pub(crate) fn run_all(root: &Path) -> Result<()> {
    let started = Instant::now();
    require_component("fmt", "rustfmt")?;
    require_component("clippy", "clippy")?;
    runtimes::install();
    let stages = stages(nextest_is_there(), is_ci());
    let mut done: Vec<(&str, Duration)> = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        eprintln!("\n── {}/{} {}: {}", index + 1, stages.len(), stage.name, stage.work);
        let began = Instant::now();
        let outcome = stage.work.run(root);
        let took = began.elapsed();
        if let Err(error) = outcome {
            summarize(&stages, &done, Some(took));
            bail!("stage `{}` failed after {}: {error:#}", stage.name, seconds(took));
        }
        eprintln!("   {} is good ({})", stage.name, seconds(took));
        done.push((stage.name, took));
    }
    summarize(&stages, &done, None);
    eprintln!("all {} stages passed in {}", stages.len(), seconds(started.elapsed()));
    Ok(())
}

/// Runs the stage `foreign` alone.
pub(crate) fn run_foreign(root: &Path) -> Result<()> {
    Work::Foreign { nextest: nextest_is_there(), ci: is_ci() }.run(root)
}

fn is_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

struct Stage {
    name: &'static str,
    work: Work,
}

enum Work {
    Cargo {
        arguments: Vec<&'static str>,
        environment: Option<(&'static str, &'static str)>,
    },
    /// The same, with a PostgreSQL server.
    CargoWithServer {
        arguments: Vec<&'static str>,
    },
    Tidy,
    Vm,
    Foreign {
        nextest: bool,
        ci: bool,
    },
}

impl Work {
    fn run(&self, root: &Path) -> Result<()> {
        let (arguments, environment) = match self {
            Self::Tidy => return tidy::run(root),
            Self::Vm => return vm::run_as_stage(root),
            Self::Foreign { nextest, ci } => return foreign::run(root, *nextest, *ci),
            Self::Cargo { arguments, environment } => (arguments, *environment),
            Self::CargoWithServer { arguments } => (arguments, None),
        };
        let mut command = cargo();
        command.current_dir(root).args(arguments).envs(environment);
        let server = matches!(self, Self::CargoWithServer { .. }).then(postgres::Server::start);
        match &server {
            Some(Ok(server)) => drop(command.env(postgres::ADDRESS, server.address())),
            // Without a server the tests skip themselves, or fail where CI must have one.
            Some(Err(error)) => eprintln!("WARNING: there is no PostgreSQL server to test with: {error:#}"),
            None => {}
        }
        let status = command.status().with_context(|| format!("cannot start `{self}`"))?;
        if !status.success() {
            bail!("`{self}` ended with {status}");
        }
        Ok(())
    }
}

impl std::fmt::Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tidy => f.write_str("cargo xtask tidy"),
            Self::Vm => f.write_str("cargo xtask vm"),
            Self::Foreign { .. } => f.write_str("cargo xtask foreign"),
            Self::Cargo { arguments, environment } => {
                if let Some((key, value)) = environment {
                    write!(f, "{key}='{value}' ")?;
                }
                write!(f, "cargo {}", arguments.join(" "))
            }
            Self::CargoWithServer { arguments } => write!(f, "cargo {}", arguments.join(" ")),
        }
    }
}

/// Warnings are errors, except for links to private items: a doc that names the only maker of a proof is worth more
/// than the link.
const RUSTDOC: &str = "-Dwarnings -Arustdoc::private_intra_doc_links";

/// Returns the stages, cheapest first. The benchmarks are compiled and tested here, but not run.
fn stages(nextest: bool, ci: bool) -> Vec<Stage> {
    // Features that are off by default are compiled and tested, too. The stages that build the docs check that they can
    // be left out.
    const FEATURES: [&str; 2] = ["--features", "xtask/bench,wieldy-cli/firecracker"];
    let cargo = |name, arguments: &[&'static str], extra: &[&'static str], environment| {
        let arguments = arguments.iter().chain(extra).copied().collect();
        Stage { name, work: Work::Cargo { arguments, environment } }
    };
    let mut clippy = vec!["clippy", "--workspace", "--all-targets", "--locked"];
    clippy.extend(FEATURES);
    let mut tests = match nextest {
        true => vec!["nextest", "run", "--workspace", "--locked"],
        false => vec!["test", "--workspace", "--locked", "--lib", "--bins", "--tests", "--examples", "--no-fail-fast"],
    };
    tests.extend(FEATURES);
    if nextest && ci {
        tests.extend(["--profile", "ci"]);
    }
    vec![
        cargo("format", &["fmt", "--all", "--check"], &[], None),
        cargo("clippy", &clippy, &["--", "-D", "warnings"], None),
        Stage { name: "tidy", work: Work::Tidy },
        Stage { name: "tests", work: Work::CargoWithServer { arguments: tests } },
        Stage { name: "foreign", work: Work::Foreign { nextest, ci } },
        Stage { name: "machines", work: Work::Vm },
        cargo("doc tests", &["test", "--doc", "--workspace", "--locked"], &[], None),
        // Libraries only: the binary `wieldy` would overwrite the pages of the library of the same name.
        cargo("docs", &["doc", "--no-deps", "--workspace", "--lib", "--locked"], &[], Some(("RUSTDOCFLAGS", RUSTDOC))),
    ]
}

fn summarize(stages: &[Stage], done: &[(&str, Duration)], failed_after: Option<Duration>) {
    eprintln!("\n── summary");
    for (index, stage) in stages.iter().enumerate() {
        let fate = match (done.get(index), failed_after) {
            (Some((_, took)), _) => format!("passed   {}", seconds(*took)),
            (None, Some(took)) if index == done.len() => format!("FAILED   {}", seconds(took)),
            (None, _) => "not run".into(),
        };
        eprintln!("   {:<10} {fate}", stage.name);
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// Returns the cargo that runs this program, so that a toolchain chosen by `cargo +…` stays chosen.
fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

fn answers(arguments: &[&str]) -> bool {
    let quiet = cargo().args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

/// Adds the rustup component if `cargo <subcommand>` does not work.
fn require_component(subcommand: &str, component: &str) -> Result<()> {
    if answers(&[subcommand, "--version"]) {
        return Ok(());
    }
    eprintln!("`cargo {subcommand}` is missing; adding the component `{component}`");
    let added = Command::new("rustup").args(["component", "add", component]).status();
    if !added.is_ok_and(|status| status.success()) || !answers(&[subcommand, "--version"]) {
        bail!("`cargo {subcommand}` is missing; install it with `rustup component add {component}`");
    }
    Ok(())
}

/// Returns true if cargo-nextest is there, after trying to install it. Without it the tests run under `cargo test`.
fn nextest_is_there() -> bool {
    if answers(&["nextest", "--version"]) {
        return true;
    }
    eprintln!("cargo-nextest is missing; installing it (once, some minutes)");
    let installed = cargo().args(["install", "--locked", "cargo-nextest"]).status();
    let there = installed.is_ok_and(|status| status.success()) && answers(&["nextest", "--version"]);
    if !there {
        eprintln!("WARNING: cargo-nextest could not be installed; the tests run under `cargo test`,");
        eprintln!("WARNING: where no test is ended that hangs and tests of one binary share a process");
    }
    there
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(nextest: bool, ci: bool) -> Vec<String> {
        stages(nextest, ci).iter().map(|stage| format!("{}: {}", stage.name, stage.work)).collect()
    }

    #[test]
    fn the_stages_run_in_the_order_that_the_docs_promise() {
        assert_eq!(
            lines(true, false),
            [
                "format: cargo fmt --all --check",
                "clippy: cargo clippy --workspace --all-targets --locked --features xtask/bench,wieldy-cli/firecracker -- -D warnings",
                "tidy: cargo xtask tidy",
                "tests: cargo nextest run --workspace --locked --features xtask/bench,wieldy-cli/firecracker",
                "foreign: cargo xtask foreign",
                "machines: cargo xtask vm",
                "doc tests: cargo test --doc --workspace --locked",
                "docs: RUSTDOCFLAGS='-Dwarnings -Arustdoc::private_intra_doc_links' \
                 cargo doc --no-deps --workspace --lib --locked",
            ]
        );
    }

    #[test]
    fn ci_uses_its_own_nextest_profile_and_cargo_test_knows_none() {
        assert_eq!(
            lines(true, true)[3],
            "tests: cargo nextest run --workspace --locked --features xtask/bench,wieldy-cli/firecracker --profile ci"
        );
        assert!(lines(false, true)[3].starts_with("tests: cargo test --workspace --locked --lib --bins --tests"));
        assert!(!lines(false, true)[3].contains("--profile"));
    }
}

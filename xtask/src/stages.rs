//! The stages of `cargo xtask test` and of `cargo xtask test --long`, in order. The first failure ends the run.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::skips::Skips;
use crate::{foreign, postgres, runtimes, tidy, vm};

/// The stages to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Selection {
    /// The stages that a change needs: everything but the long ones.
    Usual,
    /// The long stages, with the full counts of kills, calls and rows.
    Long,
    /// The long stages with the short counts that CI uses.
    LongInShort,
}

impl Selection {
    /// Returns the selection for the flags `--long` and `--short`.
    pub(crate) fn of(long: bool, short: bool) -> Self {
        match (long, short) {
            (false, _) => Self::Usual,
            (true, false) => Self::Long,
            (true, true) => Self::LongInShort,
        }
    }
}

/// Runs every stage of the selection, and prints a summary.
pub(crate) fn run_all(root: &Path, selection: Selection) -> Result<()> {
    let started = Instant::now();
    if selection == Selection::Usual {
        require_component("fmt", "rustfmt")?;
        require_component("clippy", "clippy")?;
    }
    runtimes::install();
    let (nextest, ci) = (nextest_is_there(), is_ci());
    let stages = match selection {
        Selection::Usual => usual_stages(nextest, ci),
        Selection::Long | Selection::LongInShort => long_stages(nextest, ci, selection == Selection::Long),
    };
    let skips = Skips::begin(root)?;
    let mut done: Vec<(&str, Duration)> = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        eprintln!("\n── {}/{} {}: {}", index + 1, stages.len(), stage.name, stage.work);
        let began = Instant::now();
        let outcome = stage.work.run(root, &skips);
        let took = began.elapsed();
        if let Err(error) = outcome {
            summarize(&stages, &done, Some(took));
            bail!("stage `{}` failed after {}: {error:#}", stage.name, seconds(took));
        }
        eprintln!("   {} is good ({})", stage.name, seconds(took));
        done.push((stage.name, took));
    }
    summarize(&stages, &done, None);
    skips.report(ci)?;
    eprintln!("all {} stages passed in {}", stages.len(), seconds(started.elapsed()));
    Ok(())
}

/// Runs the stage `foreign` alone.
pub(crate) fn run_foreign(root: &Path) -> Result<()> {
    let (ci, skips) = (is_ci(), Skips::begin(root)?);
    Work::Foreign { nextest: nextest_is_there(), ci }.run(root, &skips)?;
    skips.report(ci)
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
        environment: Option<(&'static str, &'static str)>,
    },
    Tidy,
    Vm,
    Foreign {
        nextest: bool,
        ci: bool,
    },
}

impl Work {
    fn run(&self, root: &Path, skips: &Skips) -> Result<()> {
        let (arguments, environment) = match self {
            Self::Tidy => return tidy::run(root),
            Self::Vm => return vm::run_as_stage(root),
            Self::Foreign { nextest, ci } => return foreign::run(root, *nextest, *ci, skips),
            Self::Cargo { arguments, environment } | Self::CargoWithServer { arguments, environment } => {
                (arguments, *environment)
            }
        };
        let mut command = cargo();
        command.current_dir(root).args(arguments).envs(environment).envs([skips.variable()]);
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
            Self::Cargo { arguments, environment } | Self::CargoWithServer { arguments, environment } => {
                if let Some((key, value)) = environment {
                    write!(f, "{key}='{value}' ")?;
                }
                write!(f, "cargo {}", arguments.join(" "))
            }
        }
    }
}

/// Warnings are errors, except for links to private items: a doc that names the only maker of a proof is worth more
/// than the link.
const RUSTDOC: &str = "-Dwarnings -Arustdoc::private_intra_doc_links";

/// Features that are off by default are compiled and tested, too.
const FEATURES: [&str; 2] = ["--features", "xtask/bench,wieldy-cli/firecracker"];

/// The variable that asks tests for their full counts; see `wieldy_testkit::count`.
const FULL_COUNTS: (&str, &str) = ("WIELDY_TEST_COUNTS", "full");

/// The tests that run long: series of kills, a large history, ten thousand calls, every attack once more as an
/// ordinary user.
const LONG_TESTS: &str = "test(/(^|::)(kill|notes_kill|thread_kills|large)::/) | test(ten_thousand_calls_leave_nothing) | test(/^as_user::/)";
/// All other tests, without those of the stage `foreign`.
const NOT_LONG_TESTS: &str = "not (binary(foreign) | test(/(^|::)(kill|notes_kill|thread_kills|large)::/) | test(ten_thousand_calls_leave_nothing) | test(/^as_user::/))";
/// The same tests for `cargo test`, which knows only parts of names.
const LONG_TEST_NAMES: [&str; 5] = ["kill::", "kills::", "large::", "ten_thousand_calls_leave_nothing", "as_user::"];

fn cargo_stage(
    name: &'static str,
    arguments: &[&[&'static str]],
    environment: Option<(&'static str, &'static str)>,
) -> Stage {
    Stage { name, work: Work::Cargo { arguments: arguments.concat(), environment } }
}

/// Returns the arguments that run the tests of the workspace.
fn test_arguments(nextest: bool, ci: bool) -> Vec<&'static str> {
    let mut tests = match nextest {
        true => vec!["nextest", "run", "--workspace", "--locked"],
        false => vec!["test", "--workspace", "--locked", "--lib", "--bins", "--tests", "--examples", "--no-fail-fast"],
    };
    tests.extend(FEATURES);
    if nextest && ci {
        tests.extend(["--profile", "ci"]);
    }
    tests
}

/// Returns the stages of `cargo xtask test`, cheapest first. The benchmarks are compiled and tested here, but not run.
fn usual_stages(nextest: bool, ci: bool) -> Vec<Stage> {
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked"];
    let mut tests = test_arguments(nextest, ci);
    match nextest {
        true => tests.extend(["-E", NOT_LONG_TESTS]),
        false => {
            tests.push("--");
            tests.extend(LONG_TEST_NAMES.iter().flat_map(|name| ["--skip", name]));
        }
    }
    vec![
        cargo_stage("format", &[&["fmt", "--all", "--check"]], None),
        cargo_stage("clippy", &[&clippy, &FEATURES, &["--", "-D", "warnings"]], None),
        Stage { name: "tidy", work: Work::Tidy },
        Stage { name: "tests", work: Work::CargoWithServer { arguments: tests, environment: None } },
        // The library that people embed, without what they may leave out.
        cargo_stage("engine", &[&["check", "-p", "wieldy", "--no-default-features", "--locked"]], None),
        cargo_stage("doc tests", &[&["test", "--doc", "--workspace", "--locked"]], None),
        // Libraries only: the binary `wieldy` would write over the pages of the library of the same name.
        cargo_stage(
            "docs",
            &[&["doc", "--no-deps", "--workspace", "--lib", "--locked"]],
            Some(("RUSTDOCFLAGS", RUSTDOC)),
        ),
    ]
}

/// Returns the stages of `cargo xtask test --long`.
fn long_stages(nextest: bool, ci: bool, full: bool) -> Vec<Stage> {
    let mut series = test_arguments(nextest, ci);
    match nextest {
        true => series.extend(["-E", LONG_TESTS]),
        false => {
            series.push("--");
            series.extend(LONG_TEST_NAMES);
        }
    }
    vec![
        Stage {
            name: "series",
            work: Work::CargoWithServer { arguments: series, environment: full.then_some(FULL_COUNTS) },
        },
        Stage { name: "foreign", work: Work::Foreign { nextest, ci } },
        Stage { name: "machines", work: Work::Vm },
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

    fn lines(stages: &[Stage]) -> Vec<String> {
        stages.iter().map(|stage| format!("{}: {}", stage.name, stage.work)).collect()
    }

    const TESTS: &str = "tests: cargo nextest run --workspace --locked --features xtask/bench,wieldy-cli/firecracker";

    #[test]
    fn the_stages_run_in_the_order_that_the_docs_promise() {
        assert_eq!(
            lines(&usual_stages(true, false)),
            [
                "format: cargo fmt --all --check",
                "clippy: cargo clippy --workspace --all-targets --locked --features xtask/bench,wieldy-cli/firecracker -- -D warnings",
                "tidy: cargo xtask tidy",
                &format!("{TESTS} -E {NOT_LONG_TESTS}"),
                "engine: cargo check -p wieldy --no-default-features --locked",
                "doc tests: cargo test --doc --workspace --locked",
                "docs: RUSTDOCFLAGS='-Dwarnings -Arustdoc::private_intra_doc_links' \
                 cargo doc --no-deps --workspace --lib --locked",
            ]
        );
        let series = TESTS.replace("tests: ", "");
        assert_eq!(
            lines(&long_stages(true, false, true)),
            [
                format!("series: WIELDY_TEST_COUNTS='full' {series} -E {LONG_TESTS}"),
                "foreign: cargo xtask foreign".into(),
                "machines: cargo xtask vm".into(),
            ]
        );
        assert_eq!(lines(&long_stages(true, false, false))[0], format!("series: {series} -E {LONG_TESTS}"));
    }

    #[test]
    fn each_test_is_in_one_of_the_two_runs() {
        assert_eq!(NOT_LONG_TESTS, format!("not (binary(foreign) | {LONG_TESTS})"));
        let lines = [lines(&usual_stages(false, true)).remove(3), lines(&long_stages(false, true, false)).remove(0)];
        for name in LONG_TEST_NAMES {
            assert!(lines[0].contains(&format!("--skip {name}")) && lines[1].contains(name), "{lines:?}");
        }
    }

    #[test]
    fn ci_uses_its_own_nextest_profile_and_cargo_test_knows_none() {
        assert_eq!(lines(&usual_stages(true, true))[3], format!("{TESTS} --profile ci -E {NOT_LONG_TESTS}"));
        let without = lines(&usual_stages(false, true)).remove(3);
        assert!(without.starts_with("tests: cargo test --workspace --locked --lib --bins --tests"));
        assert!(!without.contains("--profile"));
    }
}

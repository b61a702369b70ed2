//! A folder, and the command run in it with a clean environment.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use regex::Regex;
use tempfile::TempDir;

/// A workspace with a home beside it.
pub(crate) struct World {
    root: TempDir,
    variables: Vec<(String, String)>,
    /// True if the person trusts every configuration in the workspace before each command.
    trusts: bool,
}

impl World {
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("home")).unwrap();
        fs::create_dir(root.path().join("work")).unwrap();
        Self { root, variables: Vec::new(), trusts: true }
    }

    /// Makes a freshly cloned workspace: nothing in it is trusted.
    pub(crate) fn cloned() -> Self {
        Self { trusts: false, ..Self::new() }
    }

    /// Returns the same world with a file in the workspace, or beside it if the path says so.
    pub(crate) fn file(self, path: &str, text: &str) -> Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// Returns the same world with a variable in the environment.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.path().join("work").join(path)
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        if self.trusts && ["wieldy.toml", ".wieldy"].iter().any(|name| self.path(name).exists()) {
            // A file with mistakes cannot be trusted.
            self.plain_command(&["trust", "--yes"]).output().unwrap();
        }
        self.plain_command(arguments)
    }

    fn plain_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_wieldy"));
        command
            .args(arguments)
            .current_dir(self.path(""))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", self.root.path().join("home"))
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs the command. Returns its exit code and output, without the parts that change from run to run.
    pub(crate) fn run(&self, arguments: &[&str]) -> String {
        self.told(&self.command(arguments).output().unwrap())
    }

    /// Does the same with text on standard input.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &str) -> String {
        let mut child = self.command(arguments).stdin(Stdio::piped()).spawn().unwrap();
        // A command that refuses its arguments need not read its input.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        self.told(&child.wait_with_output().unwrap())
    }

    /// Runs the command and returns only its exit code.
    pub(crate) fn code(&self, arguments: &[&str]) -> Option<i32> {
        self.command(arguments).output().unwrap().status.code()
    }

    /// Runs the command and returns its JSON output.
    pub(crate) fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.command(arguments).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.told(&output)))
    }

    pub(crate) fn told(&self, output: &Output) -> String {
        let code = output.status.code().map_or("none".to_owned(), |code| code.to_string());
        let text = |bytes: &[u8]| self.filtered(&String::from_utf8_lossy(bytes));
        format!(
            "exit: {code}\n----- stdout -----\n{}\n----- stderr -----\n{}",
            text(&output.stdout),
            text(&output.stderr)
        )
    }

    fn filtered(&self, text: &str) -> String {
        let root = |path: &Path| path.to_string_lossy().into_owned();
        let mut text = text.replace(&root(&self.root.path().canonicalize().unwrap()), "[root]");
        text = text.replace(&root(self.root.path()), "[root]");
        let filters = [
            (r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", "[id]"),
            (r"artifact:[0-9a-f]{32}", "artifact:[id]"),
            (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "[time]"),
            (r#""(queued_ms|duration_ms|cpu_ms)":[0-9.]+"#, "\"$1\":[number]"),
            (r#""(memory_peak_bytes|read_bytes|written_bytes|processes_peak|wall_ms)":[0-9.]+"#, "\"$1\":[number]"),
            (r"(calls?) in [0-9.]+ s", "$1 in [number] s"),
            (r"after [0-9.]+ s\b", "after [number] s"),
            (r#""id":"bare-[0-9-]+""#, r#""id":"[sandbox]""#),
        ];
        for (pattern, replacement) in filters {
            text = Regex::new(pattern).unwrap().replace_all(&text, replacement).into_owned();
        }
        text
    }
}

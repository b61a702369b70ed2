//! `Build`: builds, tests, checks or cleans a project with the program that its files call for.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Program, Provider, Run, RunError, Tool, ToolSpec};

use super::bash::Shell;
use super::build_targets;
use super::process::{respell_folder, run_command, start_folder};
use super::{Processes, RUN_PROGRAMS, named};

/// A tool that builds a project.
pub struct Build {
    shell: Shell,
    processes: Arc<Processes>,
}

/// A build.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct BuildArgs {
    /// The task: `build`, `test`, `check` or `clean`; or the name of a script of package.json, of a target of the
    /// Makefile or of a Cargo profile.
    #[serde(default = "build")]
    #[schemars(length(min = 1, max = 200))]
    target: String,
    /// The command line to use instead of the one that the project's files call for.
    command: Option<String>,
    /// The project's folder, relative to the workspace.
    folder: Option<String>,
}

/// The usual tasks, in the order of the lines of a [`ProjectKind`].
const TASKS: [&str; 4] = ["build", "test", "check", "clean"];

fn build() -> String {
    TASKS[0].to_owned()
}

/// A kind of project: the file that identifies it, and its command lines to build, test, check and clean.
struct ProjectKind {
    file: &'static str,
    lines: [Option<&'static str>; 4],
}

/// The kinds, the most specific file first: many projects also have a Makefile.
static KINDS: [ProjectKind; 5] = [
    ProjectKind {
        file: "Cargo.toml",
        lines: [Some("cargo build"), Some("cargo test"), Some("cargo check --all-targets"), Some("cargo clean")],
    },
    ProjectKind {
        file: "package.json",
        lines: [Some("npm run build"), Some("npm test"), Some("npm run check"), Some("npm run clean")],
    },
    ProjectKind {
        file: "go.mod",
        lines: [Some("go build ./..."), Some("go test ./..."), Some("go vet ./..."), Some("go clean ./...")],
    },
    ProjectKind {
        file: "pyproject.toml",
        lines: [Some("python3 -m build"), Some("python3 -m pytest"), Some("python3 -m compileall -q ."), None],
    },
    ProjectKind { file: "Makefile", lines: [Some("make"), Some("make test"), Some("make check"), Some("make clean")] },
];

impl Build {
    /// Creates the tool. Its commands get only this environment.
    pub fn new(environment: BTreeMap<String, String>, processes: Arc<Processes>) -> Self {
        Self { shell: Shell::new(environment), processes }
    }
}

impl Tool for Build {
    type Args = BuildArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "Build",
            "Builds, tests, checks or cleans the project in the workspace by the program that its files call for (Cargo.toml, \
             package.json, go.mod, pyproject.toml, Makefile), or by the given command, and returns what it prints.",
        )
        .category("shell")
        .provider(Provider::Builtin)
        .permission(RUN_PROGRAMS)
        .timeout(Duration::from_secs(10 * 60));
        spec.constraints.timeout_max = Some(Duration::from_secs(2 * 60 * 60));
        // A compiler dies of the memory that is enough for other commands.
        spec.limits.cpu_millicores = Some(2000);
        spec.limits.memory_bytes = Some(4096 * 1024 * 1024);
        spec
    }

    fn respell(&self, arguments: &Value, confinement: &Confinement) -> Vec<(String, String)> {
        respell_folder(arguments, confinement)
    }

    async fn program(&self, args: BuildArgs, confinement: &Confinement) -> Result<Option<Program>, RunError> {
        let folder = start_folder(&confinement.workspace, args.folder.as_deref())?;
        let (line, file) = match args.command {
            Some(line) => (line, None),
            None => {
                let (line, file) = line_for(&folder, &args.target)?;
                (line, Some(file.to_owned()))
            }
        };
        // The project's file decides which programs run, although the command line does not name it.
        let words = named::words(&line).into_iter().chain(file).collect();
        named::program(line, words, folder, confinement).await
    }

    async fn run(&self, args: BuildArgs, run: &Run) -> Result<Outcome, RunError> {
        let folder = start_folder(&run.confinement().workspace, args.folder.as_deref())?;
        if let Some(session) = run.caller().session_key() {
            self.processes.touch(&session);
        }
        let line = match args.command {
            Some(line) => line,
            None => line_for(&folder, &args.target)?.0,
        };
        run.progress(None, line.as_str());
        let mut outcome = run_command(&self.shell.command(&line, folder), run).await?;
        if let Some(structured) = &mut outcome.structured {
            structured["command"] = json!(line);
        }
        Ok(outcome)
    }
}

/// Returns the command line for a target, and the project's file that decides.
fn line_for(folder: &Path, target: &str) -> Result<(String, &'static str), RunError> {
    match TASKS.iter().position(|task| *task == target) {
        Some(task) => {
            let kind = kind(folder)?;
            Ok((kind.line(task)?.to_owned(), kind.file))
        }
        None => build_targets::line_for(folder, target),
    }
}

/// Returns the kind of the project in a folder.
fn kind(folder: &Path) -> Result<&'static ProjectKind, RunError> {
    KINDS.iter().find(|kind| folder.join(kind.file).is_file()).ok_or_else(|| {
        let files: Vec<&str> = KINDS.iter().map(|kind| kind.file).collect();
        let message = format!("cannot find out how to build this project: there is none of {}", files.join(", "));
        RunError::invalid_input(message).suggest("name the project's `folder`, or give the `command`")
    })
}

impl ProjectKind {
    /// Returns the command line for one of the usual tasks.
    fn line(&self, task: usize) -> Result<&'static str, RunError> {
        self.lines[task].ok_or_else(|| {
            let message = format!("a project with a {} has no default command for this target", self.file);
            RunError::invalid_input(message).suggest("give the `command`")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_project_file_decides() {
        let folder = tempfile::tempdir().unwrap();
        let line = |target: &str| {
            line_for(folder.path(), target).map(|(line, _)| line).map_err(|error| error.error.message.clone())
        };
        let none = "cannot find out how to build this project: there is none of Cargo.toml, package.json, go.mod, \
                    pyproject.toml, Makefile";
        assert_eq!(line("build"), Err(none.into()));
        for (file, test) in [
            ("Makefile", "make test"),
            ("pyproject.toml", "python3 -m pytest"),
            ("go.mod", "go test ./..."),
            ("package.json", "npm test"),
            ("Cargo.toml", "cargo test"),
        ] {
            std::fs::write(folder.path().join(file), "").unwrap();
            assert_eq!(line("test"), Ok(test.to_owned()));
        }
        assert_eq!(line("clean"), Ok("cargo clean".to_owned()));
        assert_eq!(
            (line("build"), line("check")),
            (Ok("cargo build".to_owned()), Ok("cargo check --all-targets".to_owned()))
        );
    }
}

//! `Bash`: runs any command line in the workspace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use wieldy_core::{Command, Confinement, Outcome, Program, Provider, Run, RunError, Stdin, Terminal, Tool, ToolSpec};

use super::process::{check_words, respell_folder, run_command, start_folder};
use super::process_tools::outcome_of;
use super::processes::{END_OF_TRANSMISSION, ProcessState};
use super::{Processes, RUN_PROGRAMS, named};

/// A script that replaces itself by the same shell, with stderr joined to stdout: read from two pipes, their order
/// would be lost. `--` ends the shell's own options, because a command line may begin with `-`.
const ONE_STREAM: &str = r#"exec "$0" -c -- "$1" 2>&1"#;

/// The time for which a background process is watched before the call returns, so that an early failure is reported.
const WATCHED: Duration = Duration::from_millis(100);

/// A tool that runs a command line with `bash`, or with `sh` if there is no `bash`.
pub struct Bash {
    shell: Shell,
    processes: Arc<Processes>,
}

/// A command.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct BashArgs {
    /// The command line, as one would type it.
    command: String,
    /// The folder to start in, relative to the workspace.
    folder: Option<String>,
    /// The command's purpose, in a few words; shown to observers.
    description: Option<String>,
    /// The command's standard input; without it, the end of file at once.
    stdin: Option<String>,
    /// Run the command in the background, for `ProcessRead`, `ProcessWrite` and `ProcessStop` of the same session.
    #[serde(default)]
    background: bool,
    /// Give the command a terminal, of 24 rows and 80 columns or of the given size.
    terminal: Option<TerminalArg>,
}

/// A request for a terminal.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(untagged)]
pub(super) enum TerminalArg {
    /// The usual one, or none.
    Wanted(bool),
    /// One of this size.
    Size {
        #[schemars(range(min = 1, max = 1000))]
        rows: u16,
        #[schemars(range(min = 1, max = 1000))]
        columns: u16,
    },
}

impl TerminalArg {
    pub(super) fn terminal(self) -> Option<Terminal> {
        match self {
            Self::Wanted(false) => None,
            Self::Wanted(true) => Some(Terminal { rows: 24, columns: 80 }),
            Self::Size { rows, columns } => Some(Terminal { rows, columns }),
        }
    }
}

/// A shell with the environment of its commands.
pub(super) struct Shell {
    environment: BTreeMap<String, String>,
    program: &'static str,
}

impl Shell {
    pub(super) fn new(environment: BTreeMap<String, String>) -> Self {
        let path = environment.get("PATH").map_or("/usr/local/bin:/usr/bin:/bin", String::as_str);
        let has_bash = path.split(':').any(|place| place.starts_with('/') && Path::new(place).join("bash").is_file());
        Self { environment, program: if has_bash { "bash" } else { "sh" } }
    }

    /// Returns the command that runs a command line, without input.
    pub(super) fn command(&self, line: &str, folder: PathBuf) -> Command {
        Command {
            program: self.program.into(),
            arguments: vec!["-c".into(), ONE_STREAM.into(), self.program.into(), line.into()],
            environment: self.environment.clone(),
            folder,
            stdin: Stdin::Nothing,
            terminal: None,
        }
    }
}

impl Bash {
    /// Creates the tool. Its commands get only this environment; [`allowed`](super::allowed) makes one.
    pub fn new(environment: BTreeMap<String, String>) -> Self {
        Self::with(environment, Arc::default())
    }

    /// Creates the same tool, with a list of background processes that it shares with other tools.
    pub fn with(environment: BTreeMap<String, String>, processes: Arc<Processes>) -> Self {
        Self { shell: Shell::new(environment), processes }
    }

    /// Starts a command that continues after the call.
    async fn start(&self, command: Command, line: String, run: &Run) -> Result<Outcome, RunError> {
        check_words(&command)?;
        let process = self.processes.start(run.background()?, command, line)?;
        tokio::select! {
            () = process.wait_until_ended() => {}
            () = tokio::time::sleep(WATCHED) => {}
        }
        match process.state() {
            ProcessState::Lost(error) => Err(RunError::from(*error)),
            ProcessState::Running | ProcessState::Ended(_) => Ok(outcome_of(&process, run)),
        }
    }
}

impl Tool for Bash {
    type Args = BashArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "Bash",
            "Runs a command line in the workspace and returns what it prints. Each call starts afresh: folder and \
             variables are not kept. Everything the command started is ended with it, unless it was started with \
             `background`: then it goes on, and the answer names it for `ProcessRead`, `ProcessWrite` and `ProcessStop`.",
        )
        .category("shell")
        .provider(Provider::Builtin)
        .permission(RUN_PROGRAMS)
        .timeout(Duration::from_secs(120));
        spec.constraints.timeout_max = Some(Duration::from_secs(30 * 60));
        spec
    }

    fn respell(&self, arguments: &Value, confinement: &Confinement) -> Vec<(String, String)> {
        respell_folder(arguments, confinement)
    }

    async fn program(&self, args: BashArgs, confinement: &Confinement) -> Result<Option<Program>, RunError> {
        let folder = start_folder(&confinement.workspace, args.folder.as_deref())?;
        let words = named::words(&args.command);
        named::program(args.command, words, folder, confinement).await
    }

    async fn run(&self, args: BashArgs, run: &Run) -> Result<Outcome, RunError> {
        let folder = start_folder(&run.confinement().workspace, args.folder.as_deref())?;
        if let Some(description) = args.description {
            run.progress(None, description);
        }
        if let Some(session) = run.caller().session_key() {
            self.processes.touch(&session);
        }
        let mut command = self.shell.command(&args.command, folder);
        command.terminal = args.terminal.and_then(TerminalArg::terminal);
        name_terminal(&mut command);
        command.stdin = stdin(args.stdin, args.background, command.terminal.is_some());
        if args.background { self.start(command, args.command, run).await } else { run_command(&command, run).await }
    }
}

/// Sets the terminal type if the environment does not.
pub(super) fn name_terminal(command: &mut Command) {
    if command.terminal.is_some() {
        command.environment.entry("TERM".into()).or_insert_with(|| "xterm".into());
    }
}

/// Returns the command's stdin. At a terminal, an end-of-input character ends it, unless more input may come.
fn stdin(text: Option<String>, background: bool, terminal: bool) -> Stdin {
    match (text, background, terminal) {
        (None, true, _) | (None, _, false) => Stdin::Nothing,
        (Some(text), true, _) | (Some(text), _, false) => Stdin::Bytes(text.into_bytes()),
        (text, false, true) => {
            let mut bytes = text.unwrap_or_default().into_bytes();
            // In the middle of a line, the first one only submits the typed text.
            let ends = if bytes.last().is_none_or(|byte| *byte == b'\n') { 1 } else { 2 };
            bytes.extend(END_OF_TRANSMISSION.repeat(ends));
            Stdin::Bytes(bytes)
        }
    }
}

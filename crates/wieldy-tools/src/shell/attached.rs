//! `Run`: runs a program with the input and output of a person.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use wieldy_core::{Command, Confinement, Outcome, Program, Provider, Run, RunError, Stdin, Tool, ToolSpec};

use super::bash::{TerminalArg, name_terminal};
use super::process::{run_command, start_folder};
use super::{RUN_PROGRAMS, named};

/// The timeout. A person may work in a program for a whole day.
const TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A tool that runs one program with its input attached. Its output goes to the executor's `output` and to the result.
pub struct Attached {
    environment: BTreeMap<String, String>,
    input: Box<dyn Fn() -> Stdin + Send + Sync>,
}

/// The program to run.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct AttachedArgs {
    /// The program and its arguments. No shell reads them.
    #[schemars(length(min = 1))]
    command: Vec<String>,
    /// The size of the terminal that the program gets; without it, its output and its errors come through pipes.
    terminal: Option<TerminalArg>,
}

impl Attached {
    /// Creates the tool. Its programs get only this environment, and the input that `input` returns when a program
    /// starts.
    pub fn new(environment: BTreeMap<String, String>, input: impl Fn() -> Stdin + Send + Sync + 'static) -> Self {
        Self { environment, input: Box::new(input) }
    }
}

impl Tool for Attached {
    type Args = AttachedArgs;

    fn spec(&self) -> ToolSpec {
        ToolSpec::new("Run", "Runs a program in the workspace, with the input and output of a person.")
            .category("shell")
            .provider(Provider::Builtin)
            .permission(RUN_PROGRAMS)
            .timeout(TIMEOUT)
    }

    async fn program(&self, args: AttachedArgs, confinement: &Confinement) -> Result<Option<Program>, RunError> {
        let folder = start_folder(&confinement.workspace, None)?;
        let command_line = named::quoted(args.command.iter().map(String::as_str));
        named::program(command_line, args.command, folder, confinement).await
    }

    async fn run(&self, args: AttachedArgs, run: &Run) -> Result<Outcome, RunError> {
        let mut words = args.command.into_iter();
        let Some(program) = words.next() else { return Err(RunError::invalid_input("there is no program to run")) };
        let mut command = Command {
            program,
            arguments: words.collect(),
            environment: self.environment.clone(),
            folder: start_folder(&run.confinement().workspace, None)?,
            stdin: Stdin::Nothing,
            terminal: args.terminal.and_then(TerminalArg::terminal),
        };
        name_terminal(&mut command);
        command.stdin = (self.input)();
        run_command(&command, run).await
    }
}

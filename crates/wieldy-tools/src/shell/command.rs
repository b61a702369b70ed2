//! `CommandTool`: one program by a manifest. No shell is involved, so values need no quoting and cannot break out.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;
use serde_json::Value;
use wieldy_core::{
    AnyTool, CallError, Code, Command, CommandSpec, Content, Input, Outcome, OutputForm, Provider, Run, RunError,
    ToolSpec,
};

use super::process::{run_command, start_folder};
use super::template::Template;

/// How much of an output is read as JSON; whoever has more should answer with a file.
const JSON_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// A tool that is a program.
pub struct CommandTool {
    spec: ToolSpec,
    command: CommandSpec,
    template: Template,
    environment: BTreeMap<String, String>,
}

impl CommandTool {
    /// The tool with these promises, run by this command. Its program gets `environment`, which [`allowed`](super::allowed)
    /// makes, and what the manifest adds. The error lists everything that is wrong with the command's placeholders.
    pub fn new(
        mut spec: ToolSpec,
        command: CommandSpec,
        mut environment: BTreeMap<String, String>,
    ) -> Result<Self, Vec<String>> {
        let template = Template::new(&command, &spec.input_schema)?;
        environment.extend(command.environment.clone());
        spec.provider = Provider::Command;
        Ok(Self { spec, command, template, environment })
    }

    async fn run_with(&self, arguments: &Value, run: &Run) -> Result<Outcome, RunError> {
        let filled = self.template.fill(arguments)?;
        let command = Command {
            program: self.command.program.clone(),
            arguments: filled.arguments,
            environment: self.environment.clone(),
            folder: start_folder(&run.confinement().workspace, self.command.folder.as_deref())?,
            stdin: filled.stdin.map(String::into_bytes),
        };
        let outcome = run_command(&command, run).await?;
        match self.command.output {
            OutputForm::Json if outcome.failure.is_none() && !run.stop().is_cancelled() => {
                Ok(self.read_json(outcome, run))
            }
            OutputForm::Json | OutputForm::Text => Ok(outcome),
        }
    }

    /// The same answer with the output as its structured form, or as a failure where the output is no JSON.
    fn read_json(&self, outcome: Outcome, run: &Run) -> Outcome {
        let parsed = match outcome.artifact {
            None => serde_json::from_str(&Content::text_of(&outcome.content)).map_err(|error| error.to_string()),
            Some(id) => run
                .artifacts()
                .read(id, run.caller(), 0, JSON_BYTES_MAX)
                .map_err(|error| error.to_string())
                .and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string())),
        };
        match parsed {
            Ok(value) => outcome.structured(value),
            Err(error) => {
                let told = format!("`{}` should have printed JSON and did not: {error}", self.command.program);
                outcome.failed(CallError::new(Code::ToolReportedError, told))
            }
        }
    }
}

impl AnyTool for CommandTool {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(self.run_with(input.value(), run))
    }
}

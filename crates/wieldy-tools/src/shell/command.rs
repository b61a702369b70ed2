//! `CommandTool`: one program by a manifest. No shell is involved, so values need no quoting and cannot break out.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use serde_json::Value;
use wieldy_core::{
    AnyTool, CallError, Code, Command, CommandSpec, Content, Input, Outcome, OutputForm, OutputSink, Provider, Run,
    RunError, Stdin, Stream, ToolSpec,
};

use super::process::{REFUSED, run_command, run_command_into, start_folder};
use super::template::Template;

/// How much of an output is read as JSON; whoever has more should answer with a file.
const JSON_BYTES_MAX: usize = 16 * 1024 * 1024;

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
            stdin: filled.stdin.map_or(Stdin::Nothing, |text| Stdin::Bytes(text.into_bytes())),
            terminal: None,
        };
        match self.command.output {
            OutputForm::Text => run_command(&command, run).await,
            OutputForm::Json => {
                let stdout = Arc::new(Stdout { run: run.clone(), kept: Mutex::default() });
                let outcome = run_command_into(&command, run, stdout.clone()).await?;
                Ok(if outcome.failure.is_none() && !run.stop().is_cancelled() {
                    self.read_json(outcome, &stdout)
                } else {
                    outcome
                })
            }
        }
    }

    /// The same answer with what came on stdout as its structured form, or as a failure where that is no JSON.
    fn read_json(&self, mut outcome: Outcome, stdout: &Stdout) -> Outcome {
        // The structured form will be the program's own, so what it was refused goes to the text.
        if let Some(refused) = outcome.structured.as_ref().and_then(|structured| structured.get(REFUSED)) {
            outcome.content.push(Content::text(format!("[refused: {refused}]\n")));
        }
        let kept = stdout.kept.lock().expect("no code panics while it holds the bytes");
        match serde_json::from_slice(&kept) {
            Ok(value) => outcome.structured(value),
            Err(error) => {
                let told = format!("`{}` should have printed JSON and did not: {error}", self.command.program);
                outcome.failed(CallError::new(Code::ToolReportedError, told))
            }
        }
    }
}

/// Keeps what comes on stdout, apart from complaints, and hands on everything.
struct Stdout {
    run: Run,
    kept: Mutex<Vec<u8>>,
}

impl OutputSink for Stdout {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        if stream == Stream::Stdout {
            let mut kept = self.kept.lock().expect("no code panics while it holds the bytes");
            let room = JSON_BYTES_MAX.saturating_sub(kept.len());
            kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        self.run.output(stream, bytes);
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

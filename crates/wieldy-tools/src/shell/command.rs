//! `CommandTool`: runs one program from a manifest. No shell is involved, so values need no quoting and cannot break
//! out.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use serde_json::Value;
use wieldy_core::redact::StreamRedactor;
use wieldy_core::{
    AnyTool, CallError, Code, Command, CommandSpec, Confinement, Content, Input, Outcome, OutputForm, OutputSink,
    Program, Provider, Run, RunError, Stdin, Stream, ToolSpec, Variable,
};

use super::process::{REFUSED, run_command_into, start_folder};
use super::template::Template;
use super::{RUN_PROGRAMS, named};
use crate::files::Workspace;

/// Maximum bytes of output that are read as JSON. A tool with more should answer with a file.
const JSON_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A tool that runs a program.
pub struct CommandTool {
    spec: ToolSpec,
    command: CommandSpec,
    template: Template,
    environment: BTreeMap<String, String>,
    /// The variables whose value is the call's context.
    context_variables: Vec<String>,
    hides_secrets: bool,
}

impl CommandTool {
    /// Creates the tool with this declaration and command. Its program gets `environment`, which
    /// [`allowed`](super::allowed) makes, and the manifest's variables. A spec without permissions requires
    /// [`RUN_PROGRAMS`]. The error lists all mistakes in the command's placeholders. A variable of the manifest that
    /// needs a file or another variable is an error too, because this crate reads neither: remove it and put its value
    /// into `environment`.
    pub fn new(
        mut spec: ToolSpec,
        command: CommandSpec,
        mut environment: BTreeMap<String, String>,
    ) -> Result<Self, Vec<String>> {
        let template = Template::new(&command, &spec.input_schema)?;
        let mut missing = Vec::new();
        let of_context = |(name, variable): (&String, &Variable)| variable.is_context().then(|| name.clone());
        let context_variables: Vec<String> = command.environment.iter().filter_map(of_context).collect();
        for (name, variable) in command.environment.iter().filter(|(_, variable)| !variable.is_context()) {
            match variable.literal() {
                Some(value) => _ = environment.insert(name.clone(), value.to_owned()),
                None => missing.push(format!("the value of the variable `{name}` is not given")),
            }
        }
        if !missing.is_empty() {
            return Err(missing);
        }
        spec.provider = Provider::Command;
        if spec.required_permissions.is_empty() {
            spec.required_permissions.push(RUN_PROGRAMS.into());
        }
        Ok(Self { spec, command, template, environment, context_variables, hides_secrets: false })
    }

    /// Makes the tool hide secrets in its program's output, for a program that is given secrets: values known through
    /// [`redact::hide`](wieldy_core::redact::hide) are removed from everything that it prints, so callers do not see
    /// them.
    #[must_use]
    pub fn hiding_secrets(self) -> Self {
        Self { hides_secrets: true, ..self }
    }

    async fn run_with(&self, arguments: &Value, run: &Run) -> Result<Outcome, RunError> {
        let filled = self.template.fill(arguments, run.context())?;
        let mut environment = self.environment.clone();
        if !self.context_variables.is_empty() {
            let context = Value::Object(run.context().clone()).to_string();
            environment.extend(self.context_variables.iter().map(|name| (name.clone(), context.clone())));
        }
        let command = Command {
            program: self.command.program.clone(),
            arguments: filled.arguments,
            environment,
            folder: start_folder(&run.confinement().workspace, self.command.folder.as_deref())?,
            stdin: filled.stdin.map_or(Stdin::Nothing, |text| Stdin::Bytes(text.into_bytes())),
            terminal: None,
        };
        let mut outcome = self.run_command(&command, run).await?;
        // A failed program mostly fails again. A manifest that sets both `idempotent` and `retries` says that this one
        // may not.
        if self.command.repeats_failures
            && let Some(failure) = outcome.failure.as_mut().filter(|failure| failure.code == Code::NonzeroExit)
        {
            failure.retryable = true;
        }
        Ok(outcome)
    }

    async fn run_command(&self, command: &Command, run: &Run) -> Result<Outcome, RunError> {
        match self.command.output {
            OutputForm::Text => self.run_into(command, run, Arc::new(run.clone())).await,
            OutputForm::Json => {
                let stdout = Arc::new(StdoutCopy { run: run.clone(), bytes_stored: Mutex::default() });
                let outcome = self.run_into(command, run, stdout.clone()).await?;
                Ok(if outcome.failure.is_none() && !run.stop().is_cancelled() {
                    self.read_json(outcome, &stdout)
                } else {
                    outcome
                })
            }
        }
    }

    async fn run_into(&self, command: &Command, run: &Run, output: Arc<dyn OutputSink>) -> Result<Outcome, RunError> {
        if !self.hides_secrets {
            return run_command_into(command, run, output, || ()).await;
        }
        let hiding = Arc::new(SecretFilter { output, streams: Mutex::new(BTreeMap::new()) });
        run_command_into(command, run, hiding.clone(), || hiding.end()).await
    }

    /// Adds stdout, parsed as JSON, to the answer as its structured content. If it is not JSON, the answer is a
    /// failure.
    fn read_json(&self, mut outcome: Outcome, stdout: &StdoutCopy) -> Outcome {
        // The structured content will be the program's own, so the denials go to the text.
        if let Some(refused) = outcome.structured.as_ref().and_then(|structured| structured.get(REFUSED)) {
            outcome.content.push(Content::text(format!("[refused: {refused}]\n")));
        }
        let bytes_stored = stdout.bytes_stored.lock().expect("no code panics while it holds the bytes");
        match serde_json::from_slice(&bytes_stored) {
            Ok(value) => outcome.structured(value),
            Err(error) => {
                let message = format!("`{}` should have printed JSON and did not: {error}", self.command.program);
                outcome.failed(CallError::new(Code::ToolReportedError, message))
            }
        }
    }
}

/// Returns true if programs take a relative path for a path. They may take `-x` for an option, `@x` for a list of files,
/// `host:x` for a file elsewhere, and `name=x` for a setting, which an absolute path never is.
fn reads_as_path(path: &str) -> bool {
    let begins_plainly = path.starts_with(|sign: char| sign.is_alphanumeric() || "._".contains(sign));
    begins_plainly && !path.contains([':', '='])
}

/// Returns true if the schema of an argument has no rule for its text, which may want an absolute path.
fn takes_any_text(schema: &Value, argument: &str) -> bool {
    let property = schema.get("properties").and_then(|properties| properties.get(argument)).and_then(Value::as_object);
    let is_harmless = |key: &String| ["type", "title", "description", "default", "examples"].contains(&key.as_str());
    property.is_some_and(|property| property.keys().all(is_harmless))
}

/// A sink that stores stdout without stderr, and passes on both.
struct StdoutCopy {
    run: Run,
    bytes_stored: Mutex<Vec<u8>>,
}

impl OutputSink for StdoutCopy {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        if stream == Stream::Stdout {
            let mut bytes_stored = self.bytes_stored.lock().expect("no code panics while it holds the bytes");
            let room = JSON_BYTES_MAX.saturating_sub(bytes_stored.len());
            bytes_stored.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        self.run.output(stream, bytes);
    }
}

/// A sink that removes known secrets from each stream, and passes on the rest.
struct SecretFilter {
    output: Arc<dyn OutputSink>,
    streams: Mutex<BTreeMap<Stream, StreamRedactor>>,
}

impl SecretFilter {
    /// Passes on the text that is held back.
    fn end(&self) {
        let mut streams = self.streams.lock().expect("no code panics while it holds the streams");
        for (stream, redactor) in &mut *streams {
            self.output.write(*stream, redactor.finish().as_bytes());
        }
    }
}

impl OutputSink for SecretFilter {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        let mut streams = self.streams.lock().expect("no code panics while it holds the streams");
        let shown = streams.entry(stream).or_insert_with(StreamRedactor::exact).push(bytes);
        self.output.write(stream, shown.as_bytes());
    }
}

impl AnyTool for CommandTool {
    fn spec(&self) -> ToolSpec {
        self.spec.clone()
    }

    /// Resolves links, as the file tools do. The program takes a path relative to the folder that it starts in. It may
    /// also use the path from the workspace's root, so that name counts too.
    fn names_of(&self, thing: &str, confinement: &Confinement) -> Vec<String> {
        let Ok(workspace) = Workspace::open(&confinement.workspace) else { return vec![String::new()] };
        let mut names = workspace.names_of(thing);
        if let Some(folder) = &self.command.folder {
            names.extend(workspace.names_of(&Path::new(folder).join(thing).to_string_lossy()));
        }
        names
    }

    /// Rewrites the paths that the footprint names, as the file tools do. Leaves all of them as they are if the program
    /// starts in a folder of its own, because there a relative path means another file.
    fn respell(&self, arguments: &Value, confinement: &Confinement) -> Vec<(String, String)> {
        if self.command.folder.is_some() {
            return Vec::new();
        }
        let Ok(workspace) = Workspace::open(&confinement.workspace) else { return Vec::new() };
        let footprint = self.spec.footprint.iter();
        let names = footprint.flat_map(|footprint| footprint.reads.iter().chain(&footprint.writes));
        let respelled = |name: &String| {
            let path = workspace.respelled(arguments.get(name)?.as_str()?)?;
            let is_safe = reads_as_path(&path) && takes_any_text(&self.spec.input_schema, name);
            is_safe.then(|| (name.clone(), path))
        };
        names.filter_map(respelled).collect()
    }

    fn program<'a>(
        &'a self,
        arguments: &'a Value,
        confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<Option<Program>, RunError>> {
        Box::pin(async move {
            let folder = start_folder(&confinement.workspace, self.command.folder.as_deref())?;
            let mut words = vec![self.command.program.clone()];
            words.extend(self.template.fill_words(arguments)?);
            let line = named::quoted(words.iter().map(String::as_str));
            named::program(line, words, folder, confinement).await
        })
    }

    fn run<'a>(&'a self, input: &'a Input, run: &'a Run) -> BoxFuture<'a, Result<Outcome, RunError>> {
        Box::pin(self.run_with(input.value(), run))
    }
}

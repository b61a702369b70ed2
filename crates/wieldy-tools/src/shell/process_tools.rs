//! `ProcessRead`, `ProcessWrite`, `ProcessStop`, `ProcessList`: the tools for a session's background processes.

use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Content, Ended, Outcome, Provider, Run, RunError, SessionKey, Stream, Tool, ToolSpec, UsedSandbox};

use super::RUN_PROGRAMS;
use super::process::REFUSED;
use super::processes::{Process, ProcessState, Processes, UnreadOutput};

/// The longest time for which a read waits for output.
const WAIT_SECONDS_MAX: u64 = 600;

/// A tool that reads the output of a background process.
pub struct ProcessRead(Arc<Processes>);

/// A tool that writes to the input of a background process.
pub struct ProcessWrite(Arc<Processes>);

/// A tool that stops a background process.
pub struct ProcessStop(Arc<Processes>);

/// A tool that lists the background processes.
pub struct ProcessList(Arc<Processes>);

/// A process to read.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct ProcessReadArgs {
    /// The process, as `Bash` or `ProcessList` named it.
    process: String,
    /// Seconds to wait for new output if there is none yet.
    #[serde(default)]
    #[schemars(range(max = WAIT_SECONDS_MAX))]
    wait: u64,
}

/// Text to write.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct ProcessWriteArgs {
    /// The process, as `Bash` or `ProcessList` named it.
    process: String,
    /// The text, as it is; most programs want a line end after each line.
    #[serde(default)]
    text: String,
    /// End the input after the text.
    #[serde(default)]
    end: bool,
}

/// A process to stop.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct ProcessStopArgs {
    /// The process, as `Bash` or `ProcessList` named it.
    process: String,
}

/// No arguments.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct ProcessListArgs {}

fn spec(name: &str, description: &str) -> ToolSpec {
    ToolSpec::new(name, description).category("shell").provider(Provider::Builtin).permission(RUN_PROGRAMS)
}

fn session_of(run: &Run) -> Result<SessionKey, RunError> {
    run.caller().session_key().ok_or_else(|| {
        let message = "background processes belong to a session, and this call has no session";
        RunError::invalid_input(message).suggest("make the call in the session that started them")
    })
}

/// Returns the output of a process since the last read, and its state.
pub(super) fn outcome_of(process: &Process, run: &Run) -> Outcome {
    // The state is read before the output, so that output printed at the very end is not missed.
    let state = process.state();
    let UnreadOutput { bytes, lost } = process.take_unread();
    if lost > 0 {
        run.output(
            Stream::Stdout,
            format!("[{lost} bytes before this are lost: they were not read in time]\n").as_bytes(),
        );
    }
    if !bytes.is_empty() {
        run.output(Stream::Stdout, &Vec::from(bytes));
    }
    let mut outcome = run.captured();
    let (message, mut structured) = describe_state(process, &state);
    structured["lost_bytes"] = lost.into();
    outcome.content.push(Content::text(format!("[{message}]\n")));
    if let ProcessState::Ended(exit) = &state {
        outcome.usage = Some(Box::new(exit.usage));
        outcome.sandbox = Some(UsedSandbox::new(exit.sandbox.clone(), process.limits));
    }
    outcome.structured(structured)
}

/// Describes the state of a process, in words and as data.
pub(super) fn describe_state(process: &Process, state: &ProcessState) -> (String, Value) {
    let id = &process.id;
    match state {
        ProcessState::Running => (format!("{id} runs"), json!({ "process": id, "state": "running" })),
        ProcessState::Lost(error) => {
            (format!("{id} was lost: {}", error.message), json!({ "process": id, "state": "lost", "error": error }))
        }
        ProcessState::Ended(exit) => {
            let (mut message, mut structured) = match exit.ended {
                Ended::Code(code) => (
                    format!("{id} ended with exit code {code}"),
                    json!({ "process": id, "state": "ended", "exit_code": code }),
                ),
                Ended::Signal(signal) => (
                    format!("{id} was ended by signal {signal}"),
                    json!({ "process": id, "state": "ended", "exit_code": null, "signal": signal }),
                ),
            };
            if let Some(overrun) = &exit.overrun {
                let error = overrun.error();
                message = format!("{message}: {}", error.message);
                structured["error"] = json!(error);
            }
            if !exit.denials.is_empty() {
                structured[REFUSED] = exit.denials.iter().map(ToString::to_string).collect();
            }
            (message, structured)
        }
    }
}

impl ProcessRead {
    /// Creates the tool for these processes.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self(processes)
    }
}

impl Tool for ProcessRead {
    type Args = ProcessReadArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Reads what a process in the background has printed since it was last read, and tells whether it \
                           runs or how it ended. Waits for new output if asked to.";
        let mut spec = spec("ProcessRead", description).timeout(Duration::from_secs(WAIT_SECONDS_MAX + 30));
        // A read only changes the result of the next read, but for that reason it must not be repeated.
        spec.annotations.destructive = false;
        spec.annotations.open_world = false;
        spec
    }

    async fn run(&self, args: ProcessReadArgs, run: &Run) -> Result<Outcome, RunError> {
        let process = self.0.find(&session_of(run)?, &args.process)?;
        let wait = Duration::from_secs(args.wait.min(WAIT_SECONDS_MAX));
        tokio::select! {
            () = process.wait_for_output() => {}
            () = tokio::time::sleep(wait) => {}
            () = run.stop().cancelled() => {}
        }
        Ok(outcome_of(&process, run))
    }
}

impl ProcessWrite {
    /// Creates the tool for these processes.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self(processes)
    }
}

impl Tool for ProcessWrite {
    type Args = ProcessWriteArgs;

    fn spec(&self) -> ToolSpec {
        spec("ProcessWrite", "Writes text to the input of a process in the background, and ends the input if asked to.")
    }

    async fn run(&self, args: ProcessWriteArgs, run: &Run) -> Result<Outcome, RunError> {
        let process = self.0.find(&session_of(run)?, &args.process)?;
        let bytes = args.text.len();
        let write = async {
            if !args.text.is_empty() {
                process.write(args.text.into_bytes()).await?;
            }
            if args.end {
                process.end_input().await;
            }
            Ok::<_, RunError>(())
        };
        tokio::select! {
            written = write => written?,
            () = run.stop().cancelled() => {
                let message = format!("`{}` did not read its input", process.id);
                return Err(RunError::invalid_input(message));
            }
        }
        let message = format!("wrote {bytes} bytes to {}{}", process.id, if args.end { ", and the end" } else { "" });
        Ok(Outcome::text(message).structured(json!({ "process": process.id, "bytes": bytes, "end": args.end })))
    }
}

impl ProcessStop {
    /// Creates the tool for these processes.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self(processes)
    }
}

impl Tool for ProcessStop {
    type Args = ProcessStopArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Stops a process in the background with everything that it started, and returns what it had \
                           printed since it was last read. One that has ended already stays as it is.";
        spec("ProcessStop", description).idempotent()
    }

    async fn run(&self, args: ProcessStopArgs, run: &Run) -> Result<Outcome, RunError> {
        let process = self.0.find(&session_of(run)?, &args.process)?;
        process.stop();
        tokio::select! {
            () = process.wait_until_ended() => {}
            () = run.stop().cancelled() => {}
        }
        Ok(outcome_of(&process, run))
    }
}

impl ProcessList {
    /// Creates the tool for these processes.
    pub fn new(processes: Arc<Processes>) -> Self {
        Self(processes)
    }
}

impl Tool for ProcessList {
    type Args = ProcessListArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Lists the processes in the background of this session, and the state of each.";
        spec("ProcessList", description).read_only()
    }

    async fn run(&self, _: ProcessListArgs, run: &Run) -> Result<Outcome, RunError> {
        let processes = self.0.list(&session_of(run)?);
        let (mut lines, mut list) = (Vec::new(), Vec::new());
        for process in &processes {
            let (message, mut structured) = describe_state(process, &process.state());
            let unread = process.unread_bytes();
            lines.push(format!("{message}, {unread} bytes to read: {}\n", process.command));
            structured["command"] = process.command.as_str().into();
            structured["unread_bytes"] = unread.into();
            list.push(structured);
        }
        let text = if lines.is_empty() { "nothing runs in the background\n".to_owned() } else { lines.concat() };
        Ok(Outcome::text(text).structured(json!({ "processes": list })))
    }
}

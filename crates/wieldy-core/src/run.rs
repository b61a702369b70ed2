//! [`Run`]: the interface of a running tool for progress, output, artifacts and programs.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::artifact::{ArtifactId, Artifacts};
use crate::beside::object_or_empty;
use crate::build::Inner;
use crate::call::{Caller, Content, ExecutionId};
use crate::capture::Capture;
use crate::confinement::{Command, Confinement, Place, ResourceLimits, SessionKey};
use crate::denial_recorder::DenialRecorder;
use crate::error::{CallError, Code};
use crate::event::{Body, CallState, Subject};
use crate::flight::Flight;
use crate::journal::Recorder;
use crate::outcome::{Outcome, PassedOn, RunError};
use crate::program::AgreedProgram;
use crate::redact::StreamRedactor;
use crate::sandbox::{Exit, Level, OutputSink, Sandbox, Stream};
use crate::trace;

/// The shortest time between two progress events with output. Output in between is shown together.
const OUTPUT_EVERY: Duration = Duration::from_millis(100);
/// Maximum bytes of output in one progress event.
const PENDING_BYTES_MAX: usize = 8 * 1024;
/// Maximum size of a picture or sound within a result, in base64.
const MEDIA_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// One attempt at running a tool, seen from the tool. Cheap to clone.
#[derive(Clone)]
pub struct Run {
    state: Arc<RunState>,
}

struct RunState {
    flight: Arc<Flight>,
    attempt: u32,
    /// Made on first use: most tools never ask for it.
    stop: OnceLock<CancellationToken>,
    confinement: Arc<Confinement>,
    level: Level,
    sandbox: Option<Arc<dyn Sandbox>>,
    destination: Destination,
    /// A weak pointer, so that a tool that keeps its run does not keep the executor alive.
    engine: Weak<Inner>,
    /// Made on first output: few runs print anything.
    pending: Mutex<Option<Box<PendingOutput>>>,
}

/// The places that output goes to.
pub(crate) struct Destination {
    /// Maximum size of the text of a result.
    pub(crate) inline_max: u64,
    pub(crate) artifacts: Arc<dyn Artifacts>,
    /// A sink that gets all output as it comes.
    pub(crate) live: Option<Arc<dyn OutputSink>>,
}

/// Output that is captured but not yet shown as progress.
struct PendingOutput {
    /// The output that the redactor has not yet seen.
    bytes: Vec<u8>,
    stream: Stream,
    /// The redacted text, ready to be shown.
    text: String,
    stdout: StreamRedactor,
    stderr: StreamRedactor,
    shown: Instant,
}

impl PendingOutput {
    /// Returns the redactor of the stream that was printed to last.
    fn current(&self) -> &StreamRedactor {
        match self.stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        }
    }

    fn new(flight: &Flight) -> Self {
        let arguments = &flight.subject.arguments;
        let (stdout, stderr, shown) = (arguments.stream(), arguments.stream(), flight.opened);
        Self { bytes: Vec::new(), stream: Stream::Stdout, text: String::new(), stdout, stderr, shown }
    }

    /// Redacts the new bytes. At the end of a stream, also the text that the redactor still holds back.
    fn redact(&mut self, ends: bool) {
        let stream = match self.stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        // Most runs print nothing.
        if self.bytes.is_empty() && !(ends && stream.is_holding()) {
            return;
        }
        // The redactor must see all bytes, even those that are dropped below: a secret may begin in them.
        let mut text = stream.push(&self.bytes);
        if ends {
            text.push_str(&stream.finish());
        }
        self.bytes.clear();
        // A progress event shows no more than this, so the rest is dropped.
        let room = PENDING_BYTES_MAX.saturating_sub(self.text.len());
        self.text.push_str(&text[..text.floor_char_boundary(room)]);
    }
}

impl Run {
    pub(crate) fn new(
        flight: Arc<Flight>,
        attempt: u32,
        confinement: Arc<Confinement>,
        level: Level,
        sandbox: Option<Arc<dyn Sandbox>>,
        destination: Destination,
        engine: &Arc<Inner>,
    ) -> Self {
        if attempt > 1 {
            flight.forget_capture();
        }
        let pending = Mutex::new(None);
        let stop = OnceLock::new();
        let engine = Arc::downgrade(engine);
        Self {
            state: Arc::new(RunState {
                flight,
                attempt,
                stop,
                confinement,
                level,
                sandbox,
                destination,
                engine,
                pending,
            }),
        }
    }

    /// Returns the engine's id of this execution.
    pub fn execution_id(&self) -> ExecutionId {
        self.state.flight.id
    }

    /// Returns the number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.state.attempt
    }

    /// Returns the caller of the tool.
    pub fn caller(&self) -> &Caller {
        &self.state.flight.subject.caller
    }

    /// Returns the call's context: an object that the client or the program claims, empty if there is none. No right may
    /// depend on it.
    pub fn context(&self) -> &Map<String, Value> {
        object_or_empty(self.state.flight.context.as_deref())
    }

    /// Returns the client's own notes on its request, empty unless the tool [takes them](crate::AnyTool::takes_notes).
    pub fn notes(&self) -> &Map<String, Value> {
        object_or_empty(self.state.flight.notes.as_deref())
    }

    /// Returns the confinement of the run: its rights to files, the network and resources.
    pub fn confinement(&self) -> &Confinement {
        &self.state.confinement
    }

    /// Returns the store for large outputs.
    pub fn artifacts(&self) -> &Arc<dyn Artifacts> {
        &self.state.destination.artifacts
    }

    pub(crate) fn level(&self) -> Level {
        self.state.level
    }

    /// Returns the executor, unless it has been dropped.
    pub(crate) fn engine(&self) -> Option<Arc<Inner>> {
        self.state.engine.upgrade()
    }

    /// Returns the token that is cancelled when the run must end: on a timeout, a cancellation or the executor's end. A
    /// tool that heeds it can clean up and return a partial result. Another is dropped after the grace time.
    pub fn stop(&self) -> &CancellationToken {
        self.state.stop.get_or_init(|| self.state.flight.stop().child_token())
    }

    /// Reports progress, which also counts as a sign of life. `percent` is from 0 to 100.
    pub fn progress(&self, percent: impl Into<Option<f64>>, message: impl Into<String>) {
        let percent = percent.into().filter(|percent| percent.is_finite()).map(|percent| percent.clamp(0.0, 100.0));
        self.show(percent, message.into(), None);
    }

    /// Reports that something is not as it should be. The run continues.
    pub fn warn(&self, message: impl Into<String>) {
        if self.is_current() {
            self.state.flight.record(Body::CallWarning { message: message.into() });
        }
    }

    /// Adds to the output of the run. It is captured in case the run is cut short, and shown to observers as it comes.
    pub fn output(&self, stream: Stream, bytes: &[u8]) {
        let flight = &self.state.flight;
        if !self.is_current() {
            return;
        }
        flight.note_sign_of_life();
        if let Some(live) = &self.state.destination.live {
            live.write(stream, bytes);
        }
        flight.capture(stream, bytes, || self.new_capture());
        let mut pending = self.state.pending.lock().expect("no code panics while it holds the text");
        let pending = pending.get_or_insert_with(|| Box::new(PendingOutput::new(flight)));
        if pending.stream != stream {
            self.flush(pending);
            // A result joins both streams in one text, so this stream's output may split the secret and redaction would
            // miss it.
            if pending.current().is_within_secret() {
                flight.subject.arguments.note_parted();
            }
            pending.stream = stream;
        }
        pending.bytes.extend_from_slice(bytes);
        if pending.bytes.len() >= PENDING_BYTES_MAX {
            pending.redact(false);
        }
        if pending.shown.elapsed() >= OUTPUT_EVERY {
            self.flush(pending);
        }
    }

    /// Returns everything printed so far as the answer: head and tail within the limit of a result. The whole output,
    /// up to the run's limit `output_bytes`, goes to an artifact.
    pub fn captured(&self) -> Outcome {
        self.show_rest();
        let Some(captured) = self.state.flight.captured() else { return Outcome::default() };
        Outcome {
            content: vec![Content::text(captured.text)],
            artifact: captured.artifact,
            partial: captured.cut,
            ..Outcome::default()
        }
    }

    /// Makes an outcome fit into a result. Text beyond the limit goes to an artifact, and its head and tail are kept.
    /// Structured content and media cannot be cut, so they are moved as a whole.
    pub(crate) fn fit(&self, outcome: &mut Outcome) {
        for block in &mut outcome.content {
            let (what, bytes_max) = match block {
                Content::Text { .. } => continue,
                Content::Image { .. } => ("a picture", MEDIA_BYTES_MAX),
                Content::Audio { .. } => ("a sound", MEDIA_BYTES_MAX),
                Content::Resource { resource } if resource.get("blob").is_some() => ("a resource", MEDIA_BYTES_MAX),
                // A model reads it as it reads text.
                Content::Resource { .. } | Content::ResourceLink { .. } => {
                    ("a resource", self.state.destination.inline_max)
                }
            };
            if block.bytes() <= bytes_max {
                continue;
            }
            let json = serde_json::to_string(block).unwrap_or_default();
            let (artifact, message) = self.store_block(&json, what);
            *block = Content::text(message);
            outcome.artifact = outcome.artifact.or(artifact);
            outcome.partial = true;
        }
        let is_text = |block: &Content| matches!(block, Content::Text { .. });
        let text_bytes: u64 = outcome.content.iter().filter(|block| is_text(block)).map(Content::bytes).sum();
        // Text with an artifact was captured by the tool and is already cut, with a line that says so.
        if text_bytes > self.state.destination.inline_max && outcome.artifact.is_none() {
            let mut capture = self.new_capture();
            capture.write(Content::text_of(&outcome.content).as_bytes());
            let captured = capture.so_far();
            outcome.content.retain(|block| !is_text(block));
            outcome.content.insert(0, Content::text(captured.text));
            outcome.artifact = captured.artifact;
            outcome.partial = true;
        }
        if let Some(structured) =
            outcome.structured.take_if(|value| json_exceeds(value, self.state.destination.inline_max.max(2)))
        {
            let (artifact, message) = self.store_block(&structured.to_string(), "structured content");
            outcome.content.push(Content::text(message));
            // The artifact of the whole text takes precedence in the result; the line above names this one.
            outcome.artifact = outcome.artifact.or(artifact);
            outcome.partial = true;
        }
        // Notes on blocks apply only to the original blocks.
        if let Some(passed_on) = outcome.passed_on.as_mut().filter(|_| outcome.partial) {
            passed_on.blocks.clear();
        }
        let inline_max = self.state.destination.inline_max;
        outcome.passed_on.take_if(|passed_on| **passed_on == PassedOn::default() || passed_on.bytes() > inline_max);
    }

    /// Completes the error of this attempt by its trace, without secrets.
    pub(crate) fn explain(&self, error: &mut CallError) {
        let flight = &self.state.flight;
        let output = if error.trace.is_none() { flight.error_output() } else { None };
        trace::complete(error, output.as_deref(), &flight.subject.arguments);
    }

    /// Stores a content block as an artifact, and returns a line that says so.
    fn store_block(&self, json: &str, what: &str) -> (Option<ArtifactId>, String) {
        let mut capture = self.new_capture();
        capture.write(json.as_bytes());
        let (artifact, phrase) = capture.stored_artifact();
        (artifact, format!("… {} bytes of {what} left out; {phrase} …", json.len()))
    }

    fn new_capture(&self) -> Capture {
        let stored_max = self.state.confinement.limits.output_bytes.unwrap_or(u64::MAX);
        let owner = Arc::clone(&self.state.flight.subject.caller);
        Capture::new(
            self.state.destination.inline_max,
            stored_max,
            Arc::clone(&self.state.destination.artifacts),
            owner,
            self.state.confinement.recorded_workspace(),
        )
    }

    /// Runs a program in the run's sandbox. Its output is captured. On a stop, its whole process tree is gone on
    /// return.
    pub async fn execute(&self, command: &Command) -> Result<Exit, RunError> {
        self.execute_into(command, Arc::new(self.clone())).await
    }

    /// Runs a program like [`Run::execute`], for a tool that must tell the streams apart: `output` gets them, and
    /// passes the output to capture on to [`Run::output`].
    pub async fn execute_into(&self, command: &Command, output: Arc<dyn OutputSink>) -> Result<Exit, RunError> {
        let Some(sandbox) = &self.state.sandbox else {
            return Err(RunError::from(unavailable(self.state.level)).before_effect());
        };
        let flight = Arc::clone(&self.state.flight);
        if let Some(agreed) = flight.agreed.get() {
            agreed.check().await.map_err(|error| RunError::from(error).before_effect())?;
        }
        // A run that was left behind may continue for a moment, but the history of its call is closed.
        let denial_recorder = DenialRecorder::new(output, move |violation| {
            if !flight.is_over() {
                flight.record(violation);
            }
        });
        let exit = denial_recorder.execute(&**sandbox, command, &self.placed_confinement(), self.stop().clone()).await;
        exit.map_err(|error| {
            let unstarted = error.is_before_start();
            let error = RunError::from(CallError::from(error));
            if unstarted { error.before_effect() } else { error }
        })
    }

    /// Returns a [`Background`], which runs programs that outlive this run, in the sandbox of the caller's session.
    pub fn background(&self) -> Result<Background, RunError> {
        let Some(session) = self.caller().session_key() else {
            let message = "background processes belong to a session, and this call has no session";
            return Err(
                RunError::invalid_input(message).suggest("make the call in a session, or wait for the command's end")
            );
        };
        let Some(sandbox) = self.state.sandbox.clone() else {
            return Err(RunError::from(unavailable(self.state.level)).before_effect());
        };
        let flight = &self.state.flight;
        // By the time of a denial the call may be over, so the event belongs to the session.
        let Subject { tool, provider, caller, .. } = (*flight.subject).clone();
        let subject = Arc::new(Subject { tool, provider, ..Subject::of(caller) });
        let recorder = Arc::clone(flight.recorder());
        let agreed = flight.agreed.get().cloned();
        Ok(Background { session, sandbox, confinement: self.placed_confinement(), recorder, subject, agreed })
    }

    /// Returns the confinement with the sandbox that the caller's processes run in.
    fn placed_confinement(&self) -> Confinement {
        Confinement { place: place(self.caller()), ..Confinement::clone(&self.state.confinement) }
    }

    /// Reports that a file changed since the session last read it.
    pub fn source_stale(&self, path: &str, previous_hash: &str, current_hash: Option<&str>) {
        let arguments = self.state.flight.subject.arguments.value();
        let project_id = arguments.get("project_id").and_then(|id| id.as_str());
        self.source_stale_in(project_id, path, previous_hash, current_hash);
    }

    /// Reports that a file of a project changed since the session last read it.
    pub fn source_stale_in(
        &self,
        project_id: Option<&str>,
        path: &str,
        previous_hash: &str,
        current_hash: Option<&str>,
    ) {
        let change = if current_hash.is_some() { "changed" } else { "was removed" };
        self.state.flight.record(Body::SourceStale {
            path: path.to_owned(),
            project_id: project_id.map(str::to_owned),
            previous_hash: previous_hash.to_owned(),
            current_hash: current_hash.map(str::to_owned),
            message: format!("`{path}` {change} since this session last read it"),
        });
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        self.state.flight.recorder()
    }

    /// Records an event of a note. An attempt that was left behind leaves no note.
    pub(crate) fn record_note(&self, body: Body) -> Result<(), RunError> {
        if !self.is_current() {
            return Err(RunError::from(CallError::new(Code::Cancelled, "the run is over")).before_effect());
        }
        let recorded = self.state.flight.record(body).taken();
        recorded.map_err(|error| RunError::from(CallError::from(error)).before_effect())
    }

    /// Returns true if this attempt is the current one. Reports of an earlier attempt that was left behind are ignored.
    fn is_current(&self) -> bool {
        self.state.flight.state() == CallState::Running { attempt: self.state.attempt }
    }

    /// Shows the rest of the output, at the end of the run.
    pub(crate) fn show_rest(&self) {
        let mut pending = self.state.pending.lock().expect("no code panics while it holds the text");
        let Some(pending) = &mut *pending else { return };
        let other = if pending.stream == Stream::Stdout { Stream::Stderr } else { Stream::Stdout };
        for stream in [pending.stream, other] {
            pending.stream = stream;
            pending.redact(true);
            self.flush(pending);
        }
    }

    fn flush(&self, pending: &mut PendingOutput) {
        pending.redact(false);
        if !pending.text.is_empty() {
            self.show(None, std::mem::take(&mut pending.text), Some(pending.stream));
            pending.shown = Instant::now();
        }
    }

    fn show(&self, percent: Option<f64>, message: String, stream: Option<Stream>) {
        let flight = &self.state.flight;
        if self.is_current() {
            flight.note_sign_of_life();
            let message = Some(message).filter(|message| !message.is_empty());
            flight.record(Body::CallProgress { percent, message, stream, elapsed_ms: flight.elapsed_ms() });
        }
    }
}

/// A handle for programs that outlive the run it came from, for as long as its holder wants. The history records only
/// the denials of these programs.
#[derive(Clone)]
pub struct Background {
    session: SessionKey,
    sandbox: Arc<dyn Sandbox>,
    confinement: Confinement,
    recorder: Arc<Recorder>,
    subject: Arc<Subject>,
    agreed: Option<Arc<AgreedProgram>>,
}

impl Background {
    /// Returns the session that owns the programs.
    pub fn session(&self) -> &SessionKey {
        &self.session
    }

    /// Returns the resource limits of the programs.
    pub fn limits(&self) -> ResourceLimits {
        self.confinement.limits
    }

    /// Runs a program to its end, or until it is stopped.
    pub async fn execute(
        &self,
        command: &Command,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> Result<Exit, CallError> {
        if let Some(agreed) = &self.agreed {
            agreed.check().await?;
        }
        let (recorder, subject) = (Arc::clone(&self.recorder), Arc::clone(&self.subject));
        // An error is ignored, because no caller waits: a history that cannot be written stops new calls.
        let denial_recorder = DenialRecorder::new(output, move |violation| {
            let _ = recorder.append(&subject, violation, Timestamp::now(), None);
        });
        Ok(denial_recorder.execute(&*self.sandbox, command, &self.confinement, stop).await?)
    }
}

/// Returns the sandbox for a caller's processes: the caller's own if it has one, else that of its session, else a new
/// one for each process.
pub(crate) fn place(caller: &Caller) -> Place {
    match &caller.parent_sandbox {
        Some(id) => Place::Sandbox(id.clone()),
        None => caller.session_key().map_or(Place::Own, Place::Session),
    }
}

/// Returns the error for a missing isolation level. A weaker level is never used instead: the caller must ask for it.
pub(crate) fn unavailable(level: Level) -> CallError {
    let message = format!("the isolation level `{level}` is not available here: this executor has none");
    CallError::new(Code::SandboxCreationFailed, message)
        .suggest("have the operator add it; tools that start no program still work")
        .detail("level", level.as_str())
}

/// Returns true if a value takes more than this many bytes when written as JSON.
fn json_exceeds(value: &serde_json::Value, bytes_max: u64) -> bool {
    struct ByteBudget(u64);

    impl io::Write for ByteBudget {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len() as u64).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    serde_json::to_writer(ByteBudget(bytes_max), value).is_err()
}

impl OutputSink for Run {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        self.output(stream, bytes);
    }
}

//! What a running tool has in its hands: [`Run`].

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::artifact::{ArtifactId, Artifacts};
use crate::build::Inner;
use crate::call::{Caller, Content, ExecutionId, SandboxRef};
use crate::capture::Capture;
use crate::confinement::{Command, Confinement, Place, SessionKey};
use crate::error::{CallError, Code};
use crate::event::{Body, CallState, Note, Subject};
use crate::flight::Flight;
use crate::journal::Recorder;
use crate::outcome::{Outcome, PassedOn, RunError};
use crate::program::Agreed;
use crate::redact::StreamRedactor;
use crate::sandbox::{Breach, Exit, Level, OutputSink, Sandbox, SandboxError, Stream};

/// Output is shown as progress at most this often, and then together.
const OUTPUT_EVERY: Duration = Duration::from_millis(100);
/// How much of it is shown at once.
const UNSHOWN_MAX: usize = 8 * 1024;
/// How large a picture or sound may be, in base64, to be part of a result.
const MEDIA_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// One attempt at running a tool, seen from the tool. Cheap to clone.
#[derive(Clone)]
pub struct Run {
    shared: Arc<Shared>,
}

struct Shared {
    flight: Arc<Flight>,
    attempt: u32,
    /// Made when somebody asks for it: most tools never do.
    stop: OnceLock<CancellationToken>,
    confinement: Arc<Confinement>,
    level: Level,
    sandbox: Option<Arc<dyn Sandbox>>,
    destination: Destination,
    /// A tool that keeps its run does not keep the executor.
    engine: Weak<Inner>,
    /// Few runs print anything.
    unshown: Mutex<Option<Box<Unshown>>>,
}

/// The places that output goes to.
pub(crate) struct Destination {
    /// The maximal size of the text of a result.
    pub(crate) inline_max: u64,
    pub(crate) artifacts: Arc<dyn Artifacts>,
    /// A sink that gets all output as it comes.
    pub(crate) live: Option<Arc<dyn OutputSink>>,
}

/// Output that was captured and not yet shown as progress.
struct Unshown {
    /// As it came.
    bytes: Vec<u8>,
    stream: Stream,
    /// The same without secrets, as far as it can be shown.
    text: String,
    stdout: StreamRedactor,
    stderr: StreamRedactor,
    shown: Instant,
}

impl Unshown {
    /// The stream that was printed to last.
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

    /// Takes the secrets out of what came; of a stream that ends, out of all that is left.
    fn redact(&mut self, ends: bool) {
        let stream = match self.stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        // Most runs print nothing.
        if self.bytes.is_empty() && !(ends && stream.is_holding()) {
            return;
        }
        // Everything is looked at, or else a secret that begins in what nobody reads would not be known by its end.
        let mut text = stream.push(&self.bytes);
        if ends {
            text.push_str(&stream.finish());
        }
        self.bytes.clear();
        // What an observer could not read anyway need not be carried to it.
        let room = UNSHOWN_MAX.saturating_sub(self.text.len());
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
        let unshown = Mutex::new(None);
        let stop = OnceLock::new();
        let engine = Arc::downgrade(engine);
        Self {
            shared: Arc::new(Shared {
                flight,
                attempt,
                stop,
                confinement,
                level,
                sandbox,
                destination,
                engine,
                unshown,
            }),
        }
    }

    /// The engine's id of this execution.
    pub fn execution_id(&self) -> ExecutionId {
        self.shared.flight.id
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.shared.attempt
    }

    /// On whose behalf the tool runs.
    pub fn caller(&self) -> &Caller {
        &self.shared.flight.subject.caller
    }

    /// What the run may read, write, reach and use.
    pub fn confinement(&self) -> &Confinement {
        &self.shared.confinement
    }

    /// Where large outputs are kept.
    pub fn artifacts(&self) -> &Arc<dyn Artifacts> {
        &self.shared.destination.artifacts
    }

    pub(crate) fn level(&self) -> Level {
        self.shared.level
    }

    /// Returns the executor, unless it is gone.
    pub(crate) fn engine(&self) -> Option<Arc<Inner>> {
        self.shared.engine.upgrade()
    }

    /// Is cancelled when the run must end: by a clock, by somebody, with the executor. A tool that heeds it can
    /// clean up and answer with what it has; one that does not is dropped after the grace time.
    pub fn stop(&self) -> &CancellationToken {
        self.shared.stop.get_or_init(|| self.shared.flight.stop().child_token())
    }

    /// Says how far the run is and counts as a sign of life; `percent` from 0 to 100.
    pub fn progress(&self, percent: impl Into<Option<f64>>, message: impl Into<String>) {
        let percent = percent.into().filter(|percent| percent.is_finite()).map(|percent| percent.clamp(0.0, 100.0));
        self.show(percent, message.into(), None);
    }

    /// Says that something is not as it should be; the run goes on.
    pub fn warn(&self, message: impl Into<String>) {
        if self.is_current() {
            self.shared.flight.record(Body::CallWarning { message: message.into() });
        }
    }

    /// Adds to what the run has printed: kept should the run be cut short, shown to observers as it comes.
    pub fn output(&self, stream: Stream, bytes: &[u8]) {
        let flight = &self.shared.flight;
        if !self.is_current() {
            return;
        }
        flight.live();
        if let Some(live) = &self.shared.destination.live {
            live.write(stream, bytes);
        }
        flight.capture(bytes, || self.new_capture());
        let mut unshown = self.shared.unshown.lock().expect("no code panics while it holds the text");
        let unshown = unshown.get_or_insert_with(|| Box::new(Unshown::new(flight)));
        if unshown.stream != stream {
            self.flush(unshown);
            // A result has both streams in one text, in which the rest of the secret would stand apart.
            if unshown.current().is_within_secret() {
                flight.subject.arguments.note_parted();
            }
            unshown.stream = stream;
        }
        unshown.bytes.extend_from_slice(bytes);
        if unshown.bytes.len() >= UNSHOWN_MAX {
            unshown.redact(false);
        }
        if unshown.shown.elapsed() >= OUTPUT_EVERY {
            self.flush(unshown);
        }
    }

    /// Everything printed so far as the answer: head and tail within the limit of a result, and as much as the run's limit
    /// `output_bytes` lets be kept in an artifact.
    pub fn captured(&self) -> Outcome {
        self.show_rest();
        let Some(captured) = self.shared.flight.captured() else { return Outcome::default() };
        Outcome {
            content: vec![Content::text(captured.text)],
            artifact: captured.artifact,
            partial: captured.cut,
            ..Outcome::default()
        }
    }

    /// Makes an outcome fit into a result: text beyond the limit goes to an artifact, head and tail stay. Structured
    /// content and what is not text cannot be cut, so they go as a whole.
    pub(crate) fn fit(&self, outcome: &mut Outcome) {
        for block in &mut outcome.content {
            let (what, bytes_max) = match block {
                Content::Text { .. } => continue,
                Content::Image { .. } => ("a picture", MEDIA_BYTES_MAX),
                Content::Audio { .. } => ("a sound", MEDIA_BYTES_MAX),
                Content::Resource { resource } if resource.get("blob").is_some() => ("a resource", MEDIA_BYTES_MAX),
                // A model reads it as it reads text.
                Content::Resource { .. } | Content::ResourceLink { .. } => {
                    ("a resource", self.shared.destination.inline_max)
                }
            };
            if block.bytes() <= bytes_max {
                continue;
            }
            let json = serde_json::to_string(block).unwrap_or_default();
            let (artifact, told) = self.left_out(&json, what);
            *block = Content::text(told);
            outcome.artifact = outcome.artifact.or(artifact);
            outcome.partial = true;
        }
        let is_text = |block: &Content| matches!(block, Content::Text { .. });
        let text_bytes: u64 = outcome.content.iter().filter(|block| is_text(block)).map(Content::bytes).sum();
        // What a tool captured is already cut, with a line that says so.
        if text_bytes > self.shared.destination.inline_max && outcome.artifact.is_none() {
            let mut capture = self.new_capture();
            capture.write(Content::text_of(&outcome.content).as_bytes());
            let captured = capture.so_far();
            outcome.content.retain(|block| !is_text(block));
            outcome.content.insert(0, Content::text(captured.text));
            outcome.artifact = captured.artifact;
            outcome.partial = true;
        }
        if let Some(structured) =
            outcome.structured.take_if(|value| json_exceeds(value, self.shared.destination.inline_max.max(2)))
        {
            let (artifact, told) = self.left_out(&structured.to_string(), "structured content");
            outcome.content.push(Content::text(told));
            // The whole text, if it has an artifact, is what the result names; the line above names this one.
            outcome.artifact = outcome.artifact.or(artifact);
            outcome.partial = true;
        }
        // Notes on blocks belong to the blocks as they came.
        if let Some(passed_on) = outcome.passed_on.as_mut().filter(|_| outcome.partial) {
            passed_on.blocks.clear();
        }
        let inline_max = self.shared.destination.inline_max;
        outcome.passed_on.take_if(|passed_on| **passed_on == PassedOn::default() || passed_on.bytes() > inline_max);
    }

    /// Keeps something whole, and says so.
    fn left_out(&self, json: &str, what: &str) -> (Option<ArtifactId>, String) {
        let mut capture = self.new_capture();
        capture.write(json.as_bytes());
        let (artifact, kept) = capture.kept();
        (artifact, format!("… {} bytes of {what} left out; {kept} …", json.len()))
    }

    fn new_capture(&self) -> Capture {
        let kept_max = self.shared.confinement.limits.output_bytes.unwrap_or(u64::MAX);
        let owner = Arc::clone(&self.shared.flight.subject.caller);
        Capture::new(
            self.shared.destination.inline_max,
            kept_max,
            Arc::clone(&self.shared.destination.artifacts),
            owner,
            self.shared.confinement.recorded_workspace(),
        )
    }

    /// Runs a program in the run's sandbox. Its output is captured; on a stop its whole tree is gone before this returns.
    pub async fn execute(&self, command: &Command) -> Result<Exit, RunError> {
        self.execute_into(command, Arc::new(self.clone())).await
    }

    /// Like [`Run::execute`], for a tool that must tell the streams apart: `output` gets them, and hands on to
    /// [`Run::output`] what should be captured.
    pub async fn execute_into(&self, command: &Command, output: Arc<dyn OutputSink>) -> Result<Exit, RunError> {
        let Some(sandbox) = &self.shared.sandbox else {
            return Err(RunError::from(unavailable(self.shared.level)).before_effect());
        };
        let flight = Arc::clone(&self.shared.flight);
        if let Some(agreed) = flight.agreed.get() {
            agreed.check().await.map_err(|error| RunError::from(error).before_effect())?;
        }
        // A run that was left behind may go on for a moment, and its call's history is closed.
        let watched = Watched::new(output, move |violation| {
            if !flight.is_over() {
                flight.record(violation);
            }
        });
        let exit = watched.execute(&**sandbox, command, &self.placed(), self.stop().clone()).await;
        exit.map_err(|error| {
            let unstarted = error.is_before_start();
            let error = RunError::from(CallError::from(error));
            if unstarted { error.before_effect() } else { error }
        })
    }

    /// What it takes to run a program that goes on when this run is over, in the sandbox of the caller's session.
    pub fn background(&self) -> Result<Background, RunError> {
        let Some(session) = self.caller().session_key() else {
            let told = "what runs in the background belongs to a session, and this call is part of none";
            return Err(
                RunError::invalid_input(told).suggest("make the call in a session, or wait for the command's end")
            );
        };
        let Some(sandbox) = self.shared.sandbox.clone() else {
            return Err(RunError::from(unavailable(self.shared.level)).before_effect());
        };
        let flight = &self.shared.flight;
        // When something is refused, the call will be over: it is the session's.
        let (tool, caller) = (flight.subject.tool.clone(), Arc::clone(&flight.subject.caller));
        let subject = Arc::new(Subject { tool, ..Subject::of(caller) });
        let recorder = Arc::clone(flight.recorder());
        let agreed = flight.agreed.get().cloned();
        Ok(Background { session, sandbox, confinement: self.placed(), recorder, subject, agreed })
    }

    /// The confinement with the sandbox that the caller's processes run in.
    fn placed(&self) -> Confinement {
        Confinement { place: place(self.caller()), ..Confinement::clone(&self.shared.confinement) }
    }

    /// Says that a file changed since the session last read it.
    pub fn source_stale(&self, path: &str, previous_hash: &str, current_hash: Option<&str>) {
        let change = if current_hash.is_some() { "changed" } else { "was removed" };
        self.shared.flight.record(Body::SourceStale {
            path: path.to_owned(),
            previous_hash: previous_hash.to_owned(),
            current_hash: current_hash.map(str::to_owned),
            message: format!("`{path}` {change} since this session last read it"),
        });
    }

    /// Leaves the agent a note, now or as a reminder.
    pub fn note(&self, note: Note) {
        let body = if note.category == "reminder" { Body::SelfRemind(note) } else { Body::SelfNotify(note) };
        self.shared.flight.record(body);
    }

    /// Whether this attempt is the one that runs: an earlier one that was left behind has nothing to say any more.
    fn is_current(&self) -> bool {
        self.shared.flight.state() == CallState::Running { attempt: self.shared.attempt }
    }

    /// Shows what is left of the output, at the end of the run.
    pub(crate) fn show_rest(&self) {
        let mut unshown = self.shared.unshown.lock().expect("no code panics while it holds the text");
        let Some(unshown) = &mut *unshown else { return };
        let other = if unshown.stream == Stream::Stdout { Stream::Stderr } else { Stream::Stdout };
        for stream in [unshown.stream, other] {
            unshown.stream = stream;
            unshown.redact(true);
            self.flush(unshown);
        }
    }

    fn flush(&self, unshown: &mut Unshown) {
        unshown.redact(false);
        if !unshown.text.is_empty() {
            self.show(None, std::mem::take(&mut unshown.text), Some(unshown.stream));
            unshown.shown = Instant::now();
        }
    }

    fn show(&self, percent: Option<f64>, message: String, stream: Option<Stream>) {
        let flight = &self.shared.flight;
        if self.is_current() {
            flight.live();
            let message = Some(message).filter(|message| !message.is_empty());
            flight.record(Body::CallProgress { percent, message, stream, elapsed_ms: flight.elapsed_ms() });
        }
    }
}

/// Runs programs beyond the end of the run that it came from, for as long as its holder wants. Of what they do, only that is recorded
/// which they were refused.
#[derive(Clone)]
pub struct Background {
    session: SessionKey,
    sandbox: Arc<dyn Sandbox>,
    confinement: Confinement,
    recorder: Arc<Recorder>,
    subject: Arc<Subject>,
    agreed: Option<Arc<Agreed>>,
}

impl Background {
    /// Whose programs these are.
    pub fn session(&self) -> &SessionKey {
        &self.session
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
        // Nobody waits for it: a history that cannot be written stops new calls.
        let watched = Watched::new(output, move |violation| {
            let _ = recorder.append(&subject, violation, Timestamp::now(), None);
        });
        Ok(watched.execute(&*self.sandbox, command, &self.confinement, stop).await?)
    }
}

/// Where a program's output goes, and an event for each thing that it is refused.
struct Watched<F> {
    output: Arc<dyn OutputSink>,
    record: F,
    /// How many refusals were recorded.
    recorded: AtomicUsize,
}

impl<F: Fn(Body) + Send + Sync + 'static> Watched<F> {
    fn new(output: Arc<dyn OutputSink>, record: F) -> Arc<Self> {
        Arc::new(Self { output, record, recorded: AtomicUsize::new(0) })
    }

    async fn execute(
        self: Arc<Self>,
        sandbox: &dyn Sandbox,
        command: &Command,
        confinement: &Confinement,
        stop: CancellationToken,
    ) -> Result<Exit, SandboxError> {
        let exit = sandbox.execute(command, confinement, Arc::clone(&self) as _, stop).await?;
        // Those that came while it ran are the first ones.
        for breach in exit.breaches.iter().skip(self.recorded.load(Ordering::Acquire)) {
            self.record(&exit.sandbox, breach);
        }
        Ok(exit)
    }

    fn record(&self, sandbox: &SandboxRef, breach: &Breach) {
        (self.record)(Body::SandboxViolation { sandbox: sandbox.id.0.clone(), message: breach.to_string() });
    }
}

impl<F: Fn(Body) + Send + Sync + 'static> OutputSink for Watched<F> {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        self.output.write(stream, bytes);
    }

    fn refused(&self, sandbox: &SandboxRef, breach: &Breach) {
        self.record(sandbox, breach);
        self.recorded.fetch_add(1, Ordering::AcqRel);
        self.output.refused(sandbox, breach);
    }
}

/// Where a caller's processes run: in its own sandbox if it has one, else in that of its session, else each in a new one.
pub(crate) fn place(caller: &Caller) -> Place {
    match &caller.parent_sandbox {
        Some(id) => Place::Sandbox(id.clone()),
        None => caller.session_key().map_or(Place::Own, Place::Session),
    }
}

/// A weaker level is never used instead: whoever wants one must ask for it.
pub(crate) fn unavailable(level: Level) -> CallError {
    let told = format!("the isolation level `{level}` is not available here: this executor has none");
    CallError::new(Code::SandboxCreationFailed, told)
        .suggest("have the operator add it; tools that start no program still work")
        .detail("level", level.as_str())
}

/// Whether a value takes more bytes than this when it is written as JSON.
fn json_exceeds(value: &serde_json::Value, bytes_max: u64) -> bool {
    struct Room(u64);

    impl io::Write for Room {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len() as u64).ok_or(io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    serde_json::to_writer(Room(bytes_max), value).is_err()
}

impl OutputSink for Run {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        self.output(stream, bytes);
    }
}

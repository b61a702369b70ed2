//! The vocabulary, the ports and the call pipeline of wieldy, the tool executor for AI agents.
//!
//! A caller's call is granted, its input checked, consent given, a slot taken; the tool runs; the result is
//! journalled. [`Executor::call`] is that sentence as a function: start reading in `executor.rs`.
//!
//! This crate touches no file, socket, process or database. Other crates do that behind ports (traits):
//! [`AnyTool`], [`Sandbox`], [`Journal`], [`Confirmer`], [`Check`] and [`Artifacts`].
//!
//! # Modules, in reading order
//!
//! | modules | do |
//! | --- | --- |
//! | `executor` | **read this first**: the pipeline, from the first event of a call to the last |
//! | `entry`, `spelling`, `caller`, `terms` | a call's entry in the journal, opened and always closed; usual spellings of arguments; names of callers; its timeouts, retries and confinement |
//! | `call`, `arguments`, `ids`, `name`, `outcome`, `tool` | calls and results (`ToolResult` is the JSON of a result); the checked arguments in it; identifiers; tool names; answers of tools; declarations of tools |
//! | `registry`, `schema` | tools by name, alias and short name; JSON schemas, compiled once and bounded |
//! | `policy`, `input`, `confirm`, `program` | the proofs `Grant`, `Input` and `Consent`; the program that a person agrees to |
//! | `cache`, `footprint` | stored answers and single flight; the paths that a call reads and writes |
//! | `admit`, `concurrency`, `rate`, `breaker` | slots and the priority queue (the proof `Slot`); how many calls of a batch run at once; rate limits; circuit breakers |
//! | `attempt`, `clock`, `run`, `denial_recorder`, `capture` | one attempt under its clocks, and the decision to repeat it; the interface of a running tool; its denials; its output |
//! | `flight`, `batch`, `order`, `references`, `task` | a call in flight; several calls in a safe order; calls in the background |
//! | `resume` | after a restart: results of tasks put back, safe calls run again |
//! | `event`, `journal`, `observe`, `shown`, `severity`, `recorded` | events and the state of a call; their order; live observation; as they are shown; how bad they are; results for the history |
//! | `note`, `notes`, `deliver` | notes of agents to themselves, a fold over events; their delivery with results |
//! | `redact/patterns`, `redact/known_secrets`, `redact/stream` | the patterns of secrets; named values; secrets in text that arrives in pieces |
//! | `artifact`, `present` | large output; text within a model's budget |
//! | `confinement`, `sandbox`, `sandboxes`, `secrets` | rules for a run; the port that enforces them; long-lived sandboxes; hidden and protected files |
//! | `manifest`, `mistakes`, `unbound` | tools defined in files, and all mistakes in one |
//! | `build`, `facts`, `error`, `duration` | executors from their parts; state that tools may report; errors; durations |
//!
//! # Proofs
//!
//! Running a tool takes a [`Grant`], an [`Input`] and a [`Slot`]; a slot takes a [`Consent`]. Each proof is made by
//! exactly one step. Code elsewhere can name them and pass them on:
//!
//! ```
//! fn proofs(_: &wieldy_core::Grant, _: &wieldy_core::Input, _: &wieldy_core::Consent, _: &wieldy_core::Slot) {}
//! ```
//!
//! but it cannot construct one:
//!
//! ```compile_fail,E0451
//! fn eased(real: wieldy_core::Grant) -> wieldy_core::Grant {
//!     wieldy_core::Grant { ask: None, ..real }
//! }
//! ```
//! ```compile_fail,E0451
//! fn forged(real: wieldy_core::Consent) -> wieldy_core::Consent {
//!     wieldy_core::Consent { execution: todo!(), ..real }
//! }
//! ```
//! ```compile_fail,E0451
//! fn changed(real: wieldy_core::Input) -> wieldy_core::Input {
//!     wieldy_core::Input { value: std::sync::Arc::new(serde_json::json!({})), ..real }
//! }
//! ```
//! ```compile_fail,E0451
//! fn uninvited() -> wieldy_core::Slot {
//!     wieldy_core::Slot { execution: todo!(), waited: todo!(), gate: todo!(), requester: todo!() }
//! }
//! ```
//! ```compile_fail,E0599
//! fn twice(slot: &wieldy_core::Slot) -> wieldy_core::Slot {
//!     slot.clone()
//! }
//! ```
//! ```compile_fail,E0624
//! let input = wieldy_core::Input::check(todo!(), todo!(), todo!(), todo!());
//! ```

// In reading order.
mod executor;

mod entry;
mod terms;

mod arguments;
mod beside;
mod call;
mod caller;
mod ids;
#[doc(hidden)]
pub mod mistakes;
pub mod name;
mod outcome;
mod tool;

mod registry;
mod schema;

mod policy;

mod input;
mod spelling;

mod confirm;

mod cache;
mod footprint;

mod admit;
mod breaker;
mod rate;

mod attempt;
mod capture;
mod clock;
mod denial_recorder;
mod flight;
mod run;

mod batch;
mod concurrency;
mod order;
mod references;
mod task;

mod resume;

mod deliver;
mod event;
mod journal;
mod note;
mod notes;
mod observe;
mod recorded;
pub mod redact;
mod severity;
mod shown;

pub mod artifact;
mod confinement;
mod limits;
mod sandbox;
mod sandboxes;
pub mod secrets;

mod error;
mod present;
mod program;
mod share;
mod trace;

mod manifest;
mod unbound;

mod build;
mod duration;
mod facts;

/// The return type of the ports' methods, re-exported so that implementing a port takes no further crate.
pub use futures_util::future::BoxFuture;

pub use admit::{Limits, Slot};
pub use arguments::CheckedArguments;
pub use artifact::{ArtifactId, ArtifactInfo, ArtifactMaker, ArtifactWriter, Artifacts, MemoryArtifacts};
pub use attempt::{Backoff, RetryIf, RetryPolicy};
pub use batch::{Batch, BatchCall, BatchError, BatchResult, BatchSummary};
pub use beside::BESIDE_BYTES_MAX;
pub use breaker::{BreakerPolicy, BreakerState};
pub use build::ExecutorBuilder;
pub use call::{
    BatchId, Call, Caller, ConfirmationId, Content, ExecutionId, Held, Options, Priority, SandboxRef, Status, Timing,
    ToolResult,
};
pub use clock::{DynamicTimeout, TIMEOUT_DEFAULT, TIMEOUT_MAX};
pub use concurrency::{BatchMode, ConcurrencyLimit};
pub use confinement::{
    Command, Confinement, Feed, FileRules, Limit, Mount, Network, Place, ResourceLimits, SessionKey, Stdin, Terminal,
};
pub use confirm::{Answer, Confirmation, Confirmer, Consent, Digest, NoConsent};
pub use duration::{parse_duration, parse_since};
pub use error::{CallError, Category, Code};
pub use event::{Body, CallState, Closing, Event, Keyed, OutOfOrder, Subject};
pub use executor::Executor;
pub use flight::CancelCause;
pub use input::{ARGUMENTS_BYTES_MAX, ARGUMENTS_DEPTH_MAX, Input, Violation, Violations, parse_arguments};
pub use journal::{
    Claim, Claimed, Durability, Filter, Interrupted, Journal, JournalError, MemoryJournal, Receipt, Remembered,
    RememberedAnswer, Seen, Subscription,
};
pub use limits::{CallLimit, LimitOrigin, ToolLimits, UsedSandbox};
pub use manifest::{CommandSpec, Manifest, ManifestError, ManifestTool, OutputForm, Problem, Variable, VariableFile};
pub use name::{NameError, ToolName};
pub use note::{Delivery, DueNote, InjectAt, NewNote, Note, NoteId, NotePriority, NoteState};
pub use notes::{DueNotes, NOTES_PENDING_MAX, NOTES_PER_RESULT_MAX, NOTES_SESSION_IDLE, Notes, Point};
pub use observe::Observer;
pub use outcome::{Outcome, PassedOn, RunError};
pub use policy::{Check, Decision, Denied, Grant, Plan, Policy, Question};
pub use present::{Budget, Presentation, present, present_error, present_notes, shown, shown_in_line, visible};
pub use program::{NamedFile, Program};
pub use rate::{Per, Rate, RateKind};
pub use recorded::{RecordedResult, ResultRecording};
pub use redact::{REDACTED, Redacted};
pub use registry::{Missing, NotFound, RegisterError, Registered, Registration, Registry, ToolFilter};
pub use run::{Background, Run};
pub use sandbox::{
    Denial, Ended, Enforcement, Enforcer, Exit, Level, OutputSink, Overrun, Sandbox, SandboxChange, SandboxError,
    SandboxId, SandboxStatus, Stream, Usage,
};
pub use schema::SchemaError;
pub use severity::{Severity, complete_event_data, event_message};
pub use share::SharedText;
pub use task::{Begun, Load, TASK_TTL, Target, Task};
pub use tool::{
    Annotations, AnyTool, CachePolicy, Constraints, Footprint, Provider, SharedTool, Tool, ToolSpec, schema_of, tool,
};
pub use trace::{CaughtPanic, record_panic_places};
pub use unbound::Unbound;

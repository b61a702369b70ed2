//! Leaves, delivers, announces and ends notes: everything that makes an event of a note.
//!
//! A result gets the notes that are due when it is closed, or, if its call was a task, when it is handed out. The door
//! confirms them once it has handed the result over, and only then `agent.self.delivered` is recorded. If the process
//! ends in between, the notes come again with the same ids.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::call::{Caller, ToolResult};
use crate::error::{CallError, Code};
use crate::event::{Body, Subject};
use crate::executor::Executor;
use crate::journal::Recorder;
use crate::note::{Delivery, DueNote, InjectAt, NewNote, Note, NoteId, NoteState};
use crate::notes::{NOTES_PENDING_MAX, Notes, Point};
use crate::outcome::RunError;
use crate::run::Run;

/// The longest sleep until the next note is due. The clock may be set meanwhile.
const CLOCK_CHECK: Duration = Duration::from_secs(5);

impl Executor {
    /// Records that these notes of a result were handed over. To be called by a door once the result is written or
    /// returned; [`Executor::call`] and [`Executor::batch`] do it themselves. A note that another result brought
    /// meanwhile is recorded once.
    pub fn confirm_notes(&self, notes: &[DueNote]) {
        let ids = notes.iter().map(|note| note.id);
        self.confirm_note_ids(ids);
    }

    /// Does the same by the ids of notes.
    pub fn confirm_note_ids(&self, ids: impl IntoIterator<Item = NoteId>) {
        let recorder = self.recorder();
        let Some(pending) = recorder.journal().notes() else { return };
        for note in ids.into_iter().filter_map(|id| pending.get(id)) {
            let now = Timestamp::now();
            let late_ms = u64::try_from(now.duration_since(note.due_at()).as_millis()).unwrap_or_default();
            let delivery = Delivery { note: *note.now(NoteState::Delivered), late_ms };
            record(recorder, &note, Body::SelfDelivered(Box::new(delivery)));
        }
    }

    /// Adds the notes that are due to a result that this caller is about to get.
    pub(crate) fn add_due_notes(&self, result: &mut ToolResult, caller: &Caller, point: &Point<'_>) {
        let recorder = self.recorder();
        // Without notes, this is all that a call pays for them.
        if recorder.journal().notes().is_some_and(Notes::is_empty) || !may_carry_notes(result) {
            return;
        }
        let due = recorder.journal().due(caller, point, Timestamp::now());
        for note in due.expired {
            record(recorder, &note, Body::of_note(note.now(NoteState::Expired)));
        }
        result.notes.extend(due.notes);
        result.notes_waiting = due.more;
    }

    /// Returns the result of a task as the asker gets it: with the asker's own notes. The stored result has none, since
    /// others may ask for it too.
    pub(crate) fn with_due_notes(&self, result: Arc<ToolResult>, asker: &Caller) -> Arc<ToolResult> {
        if self.recorder().journal().notes().is_none_or(Notes::is_empty) {
            return result;
        }
        let mut handed_out = ToolResult::clone(&result);
        let point = Point { tool: &result.tool, call: Some(result.execution_id), ends_batch: false, ends_task: true };
        self.add_due_notes(&mut handed_out, asker, &point);
        if handed_out.notes.is_empty() { result } else { Arc::new(handed_out) }
    }

    /// Records each note whose time has come, once, as `agent.self.remind` with the state `due`, and sleeps until the
    /// next one. A server runs it as one task beside its door; it never ends by itself.
    pub async fn announce_notes(&self) -> Infallible {
        let recorder = self.recorder();
        let Some(notes) = recorder.journal().notes() else { return std::future::pending().await };
        loop {
            let mut changed = std::pin::pin!(notes.changed());
            // Listen before looking: a note between the two is not missed.
            changed.as_mut().enable();
            let now = Timestamp::now();
            let (due, next) = notes.announce(now);
            for note in due {
                record(recorder, &note, Body::of_note(note.now(NoteState::Due)));
            }
            match next {
                None => changed.await,
                Some(next) => {
                    let wait = Duration::try_from(next.duration_since(Timestamp::now())).unwrap_or_default();
                    tokio::select! {
                        () = changed => {}
                        () = tokio::time::sleep(wait.min(CLOCK_CHECK)) => {}
                    }
                }
            }
        }
    }
}

impl Run {
    /// Leaves the agent a note, and returns it as it is recorded: without secrets. It is as durable as its event.
    pub fn leave_note(&self, mut new: NewNote) -> Result<Arc<Note>, RunError> {
        let (recorder, caller) = (self.recorder(), self.caller());
        if let (InjectAt::AfterTool(tool), Some(engine)) = (&mut new.inject_at, self.engine()) {
            // Results have the tool's own name.
            let found = engine.registry.find(tool, caller).map_err(CallError::from);
            // The call's own tool exists, so this is a wrong argument.
            let wrong = |error: CallError| {
                let advice = error.suggestion.unwrap_or_else(|| "name a tool that you can call".into());
                RunError::invalid_input(format!("`inject_at`: {}", error.message)).suggest(advice)
            };
            *tool = found.map_err(wrong)?.name.shared();
        }
        let notes = recorder.journal().notes().ok_or_else(no_notes)?;
        let _one_at_a_time = notes.leaving.lock().expect("no code panics while it leaves a note");
        let now = Timestamp::now();
        for note in notes.expired(caller, now) {
            record(recorder, &note, Body::of_note(note.now(NoteState::Expired)));
        }
        let note = Note::of(new, caller, now);
        let is_same = |other: &Arc<Note>| other.replace_name.is_some() && other.replace_name == note.replace_name;
        let replaces = notes.of(caller, now).iter().any(|other| other.scope == note.scope && is_same(other));
        if notes.count_of(caller) >= NOTES_PENDING_MAX && !replaces {
            let message = format!("there are {NOTES_PENDING_MAX} pending notes, and no agent may have more");
            let error = CallError::new(Code::InvalidInput, message).detail("pending_max", NOTES_PENDING_MAX);
            let error = error.suggest("`cancel` one by its id, or replace one by its `key`");
            return Err(RunError::from(error).before_effect());
        }
        let id = note.id;
        self.record_note(Body::of_note(Box::new(note)))?;
        notes.get(id).ok_or_else(no_notes)
    }

    /// Takes back a pending note of the caller.
    pub fn cancel_note(&self, id: NoteId) -> Result<Arc<Note>, RunError> {
        let notes = self.recorder().journal().notes().ok_or_else(no_notes)?;
        let own = notes.of(self.caller(), Timestamp::now());
        let Some(note) = own.iter().find(|note| note.id == id) else {
            let known = own.iter().take(5).map(|note| format!("`{}`", note.id)).collect::<Vec<_>>().join(", ");
            let advice =
                if known.is_empty() { "there is no pending note".into() } else { format!("pending are {known}") };
            let message = format!("there is no pending note `{id}`: it was delivered, has ended, or never was");
            return Err(RunError::invalid_input(message).suggest(advice));
        };
        self.record_note(Body::of_note(note.now(NoteState::Cancelled)))?;
        Ok(Arc::clone(note))
    }

    /// Returns the number of pending notes of the caller, in all its sessions.
    pub fn notes_pending(&self) -> usize {
        self.recorder().journal().notes().map_or(0, |notes| notes.count_of(self.caller()))
    }
}

/// Returns the error of an executor whose journal keeps no notes.
fn no_notes() -> RunError {
    RunError::configuration("the journal of this executor keeps no notes", "use a history, or the journal in memory")
}

/// Returns true if the agent will see notes in this result. Clients show the structured content of an MCP server and
/// nothing else, and the answer for an unknown tool is an error of the protocol.
fn may_carry_notes(result: &ToolResult) -> bool {
    let is_structured = result.provider.starts_with("mcp:") && result.structured.is_some();
    let is_unknown = result.error.as_ref().is_some_and(|error| error.code == Code::ToolNotFound);
    !is_structured && !is_unknown
}

/// Records an event of a note that belongs to no call. The receipt is ignored: without the event the note stays, and
/// comes again.
fn record(recorder: &Recorder, note: &Note, body: Body) {
    let subject = Arc::new(Subject::of(Arc::new(note.caller())));
    let _ = recorder.append(&subject, body, Timestamp::now(), None);
}

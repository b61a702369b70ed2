//! Notes that agents leave for themselves: a fold over the events `agent.self.*`.
//!
//! An event with the state `pending` makes a note; one with the state `delivered`, `cancelled` or `expired` ends it. So
//! every journal that keeps events can make its notes again, and a note is as durable as its event. [`Notes`] is the
//! fold in memory: it knows which notes are due for a caller, and lends them to one result at a time.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use foldhash::fast::RandomState;
use jiff::{SignedDuration, Timestamp};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use crate::call::Caller;
use crate::event::{Body, Event};
use crate::ids::ExecutionId;
use crate::note::{DueNote, InjectAt, Note, NoteId, NoteScopes, NoteState};
use crate::redact;

/// Maximum number of pending notes of one agent.
pub const NOTES_PENDING_MAX: usize = 1000;
/// Maximum number of notes in one result, and of the bytes of their messages. The first note always has room.
pub const NOTES_PER_RESULT_MAX: usize = 20;
const MESSAGES_BYTES_MAX: usize = 8 * 1024;
/// The time without a call after which a session is over, and its notes with it.
pub const NOTES_SESSION_IDLE: SignedDuration = SignedDuration::from_hours(72);
/// The time for which a note that is part of a result is in no other result. After that, the result counts as lost.
const LENT_FOR: Duration = Duration::from_secs(30);
/// Maximum number of sessions whose first calls are remembered.
const SESSIONS_MAX: usize = 10_000;

/// The notes that are due at a point.
#[derive(Debug, Default)]
pub struct DueNotes {
    /// The notes, the oldest first, at most [`NOTES_PER_RESULT_MAX`].
    pub notes: Vec<DueNote>,
    /// The number of further notes that are due.
    pub more: usize,
    /// Notes of the caller that are over, so that their end can be recorded.
    pub(crate) expired: Vec<Arc<Note>>,
}

/// A point at which a result is handed over.
#[derive(Debug, Clone, Copy, Default)]
pub struct Point<'a> {
    /// The name of the tool.
    pub tool: &'a str,
    /// The call of the result. A note is no part of the result of the call that left it.
    pub call: Option<ExecutionId>,
    /// True if the result is the last of a batch.
    pub ends_batch: bool,
    /// True if the call was a task.
    pub ends_task: bool,
}

/// The pending notes of all agents, in memory. A journal feeds it with its events.
#[derive(Debug, Default)]
pub struct Notes {
    /// The number of pending notes. Calls read it first, and nothing else while it is 0.
    count: AtomicUsize,
    /// The address of `last_caller`, which usually calls again: then its session is known.
    last_caller_address: AtomicUsize,
    state: Mutex<NotesState>,
    /// Notified when a note was added or has ended.
    changed: Notify,
    /// Held while a note is left, so that no agent leaves more than it may.
    pub(crate) leaving: Mutex<()>,
}

#[derive(Debug, Default)]
struct NotesState {
    /// The pending notes by their scopes, the oldest first.
    by_scope: HashMap<String, Vec<PendingNote>>,
    scopes: HashMap<NoteId, String>,
    /// The number of pending notes of each owner.
    counts: HashMap<String, usize>,
    /// The first call of each session that this executor has seen, by a quick hash: every call looks here.
    sessions: HashMap<u64, Timestamp, RandomState>,
    /// The last caller. It is held, so that no other caller has its address.
    last_caller: Option<Arc<Caller>>,
}

#[derive(Debug)]
struct PendingNote {
    note: Arc<Note>,
    /// The call that left it, if this executor made it.
    left_by: Option<ExecutionId>,
    /// The last call of its session.
    session_seen_at: Timestamp,
    /// The time until which it belongs to a result that is on its way.
    lent_until: Option<Instant>,
    is_announced: bool,
}

impl PendingNote {
    fn is_over(&self, now: Timestamp) -> bool {
        let note = &self.note;
        let is_session_over = || now.duration_since(self.session_seen_at) > NOTES_SESSION_IDLE;
        note.expires_at.is_some_and(|end| end <= now) || !note.persist_cross_session && is_session_over()
    }

    fn is_due(&self, point: &Point<'_>, session: Option<Timestamp>, is_own_session: bool, now: Timestamp) -> bool {
        let note = &self.note;
        let is_of_this_call = point.call.is_some() && point.call == self.left_by;
        !is_of_this_call
            && note.due_at() <= now
            && match &note.inject_at {
                InjectAt::Now | InjectAt::NextResult => true,
                InjectAt::SessionStart => !is_own_session && session.is_some_and(|began| began >= note.due_at()),
                InjectAt::AfterTool(tool) => **tool == *point.tool,
                InjectAt::BatchEnd => point.ends_batch,
                InjectAt::TaskEnd => point.ends_task,
            }
    }
}

impl Notes {
    /// Returns true if there is no note at all.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Adds a pending note, or ends the note if its state says so. An older note of the same name is replaced. `left_by`
    /// is the call that left it, if that is a call of this executor.
    pub fn apply(&self, note: Note, left_by: Option<ExecutionId>) {
        let mut state = self.lock();
        match note.state {
            NoteState::Due => return,
            NoteState::Delivered | NoteState::Cancelled | NoteState::Expired => state.end(note.id),
            NoteState::Pending if state.scopes.contains_key(&note.id) => return,
            NoteState::Pending => {
                if let Some(name) = &note.replace_name {
                    let in_scope = state.by_scope.get(&note.scope).into_iter().flatten();
                    let same = in_scope.filter(|other| other.note.replace_name.as_ref() == Some(name));
                    let replaced: Vec<NoteId> = same.map(|other| other.note.id).collect();
                    replaced.into_iter().for_each(|id| state.end(id));
                }
                state.add(note, left_by);
            }
        }
        self.count.store(state.scopes.len(), Ordering::Release);
        drop(state);
        self.changed.notify_waiters();
    }

    /// Applies an event of this executor. Most events are about no note.
    pub fn apply_event(&self, event: &Event) {
        match &event.body {
            Body::CallPending { .. } => self.note_call(&event.subject.caller, event.at),
            Body::SelfNotify(_) | Body::SelfRemind(_) | Body::SelfDelivered(_) => {
                // The note is the one that is written down: without secrets.
                if let Ok(note) = serde_json::from_value(event.data()) {
                    self.apply(note, event.subject.execution);
                }
            }
            _ => {}
        }
    }

    /// Takes note of a call of a session at this time.
    fn note_call(&self, caller: &Arc<Caller>, at: Timestamp) {
        let address = Arc::as_ptr(caller).addr();
        if self.last_caller_address.load(Ordering::Acquire) == address {
            return;
        }
        let mut state = self.lock();
        state.last_caller = Some(Arc::clone(caller));
        self.last_caller_address.store(address, Ordering::Release);
        let session = state.session_key(caller);
        if state.sessions.len() >= SESSIONS_MAX && !state.sessions.contains_key(&session) {
            let mut times: Vec<Timestamp> = state.sessions.values().copied().collect();
            times.sort_unstable();
            let middle = times[times.len() / 2];
            state.sessions.retain(|_, began| *began > middle);
        }
        state.sessions.entry(session).or_insert(at);
    }

    /// Tells when the session of a note last made a call, as a history knows it.
    pub fn set_session_seen(&self, id: NoteId, at: Timestamp) {
        let mut state = self.lock();
        if let Some(note) = state.get_mut(id) {
            note.session_seen_at = note.session_seen_at.max(at);
        }
    }

    /// Returns the notes of the caller that are due at this point, and lends them to its result.
    pub fn due(&self, caller: &Caller, point: &Point<'_>, now: Timestamp) -> DueNotes {
        let mut due = DueNotes::default();
        if self.is_empty() {
            return due;
        }
        let scopes = NoteScopes::of(caller);
        let mut state = self.lock();
        let began = state.sessions.get(&state.session_key(caller)).copied();
        let session = caller.session.as_deref().map(redact::text);
        let mut found = Vec::new();
        for scope in [&scopes.session, &scopes.owner] {
            for pending in state.by_scope.get_mut(scope).into_iter().flatten() {
                if pending.is_over(now) {
                    due.expired.push(Arc::clone(&pending.note));
                    continue;
                }
                pending.session_seen_at = pending.session_seen_at.max(now);
                let is_own_session = session.is_some() && pending.note.session.as_deref() == session.as_deref();
                let is_lent = pending.lent_until.is_some_and(|until| until > Instant::now());
                if !is_lent && pending.is_due(point, began, is_own_session, now) {
                    found.push((pending.note.due_at(), pending.note.id));
                }
            }
        }
        found.sort_unstable();
        let (mut bytes, all) = (0, found.len());
        for (_, id) in found.into_iter().take(NOTES_PER_RESULT_MAX) {
            let Some(pending) = state.get_mut(id) else { continue };
            bytes += pending.note.message.len();
            if bytes > MESSAGES_BYTES_MAX && !due.notes.is_empty() {
                break;
            }
            pending.lent_until = Some(Instant::now() + LENT_FOR);
            due.notes.push(DueNote::from(&*pending.note));
        }
        due.more = all - due.notes.len();
        due
    }

    /// Returns the pending notes that the caller may get, the oldest first.
    pub fn of(&self, caller: &Caller, now: Timestamp) -> Vec<Arc<Note>> {
        if self.is_empty() {
            return Vec::new();
        }
        let (scopes, state) = (NoteScopes::of(caller), self.lock());
        let in_scopes = [&scopes.session, &scopes.owner].map(|scope| state.by_scope.get(scope));
        let alive = in_scopes.into_iter().flatten().flatten().filter(|pending| !pending.is_over(now));
        let mut notes: Vec<Arc<Note>> = alive.map(|pending| Arc::clone(&pending.note)).collect();
        notes.sort_unstable_by_key(|note| note.id);
        notes
    }

    /// Returns the notes of the caller that are over, in all its sessions.
    pub(crate) fn expired(&self, caller: &Caller, now: Timestamp) -> Vec<Arc<Note>> {
        let (owner, state) = (NoteScopes::of(caller).owner, self.lock());
        let over =
            state.by_scope.values().flatten().filter(|pending| pending.note.owner == owner && pending.is_over(now));
        over.map(|pending| Arc::clone(&pending.note)).collect()
    }

    /// Returns the number of pending notes of the caller, in all its sessions.
    pub fn count_of(&self, caller: &Caller) -> usize {
        if self.is_empty() {
            return 0;
        }
        let owner = NoteScopes::of(caller).owner;
        self.lock().counts.get(&owner).copied().unwrap_or_default()
    }

    /// Returns a pending note by its id.
    pub(crate) fn get(&self, id: NoteId) -> Option<Arc<Note>> {
        let mut state = self.lock();
        state.get_mut(id).map(|pending| Arc::clone(&pending.note))
    }

    /// Returns the notes that clients are to be told about now, each once, and the time of the next one.
    pub(crate) fn announce(&self, now: Timestamp) -> (Vec<Arc<Note>>, Option<Timestamp>) {
        let (mut told, mut next) = (Vec::new(), None::<Timestamp>);
        if self.is_empty() {
            return (told, next);
        }
        let mut state = self.lock();
        for pending in state.by_scope.values_mut().flatten().filter(|pending| !pending.is_announced) {
            match pending.note.announced_at() {
                Some(at) if at <= now && !pending.is_over(now) => {
                    pending.is_announced = true;
                    told.push(Arc::clone(&pending.note));
                }
                Some(at) if at > now => next = Some(next.map_or(at, |next| next.min(at))),
                _ => {}
            }
        }
        told.sort_unstable_by_key(|note| (note.due_at(), note.id));
        (told, next)
    }

    /// Returns a future that ends when a note is added or ends.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    fn lock(&self) -> MutexGuard<'_, NotesState> {
        self.state.lock().expect("no code panics while it holds the notes")
    }
}

impl NotesState {
    fn session_key(&self, caller: &Caller) -> u64 {
        self.sessions.hasher().hash_one((&caller.agent, &caller.tenant, &caller.session, &caller.user))
    }

    fn add(&mut self, note: Note, left_by: Option<ExecutionId>) {
        self.scopes.insert(note.id, note.scope.clone());
        *self.counts.entry(note.owner.clone()).or_default() += 1;
        let session_seen_at = note.left_at;
        let of_scope = self.by_scope.entry(note.scope.clone()).or_default();
        let note = Arc::new(note);
        of_scope.push(PendingNote { note, left_by, session_seen_at, lent_until: None, is_announced: false });
    }

    fn end(&mut self, id: NoteId) {
        let Some(scope) = self.scopes.remove(&id) else { return };
        let Some(of_scope) = self.by_scope.get_mut(&scope) else { return };
        if let Some(at) = of_scope.iter().position(|pending| pending.note.id == id) {
            let ended = of_scope.remove(at);
            if let Some(count) = self.counts.get_mut(&ended.note.owner) {
                *count -= 1;
                if *count == 0 {
                    self.counts.remove(&ended.note.owner);
                }
            }
        }
        if of_scope.is_empty() {
            self.by_scope.remove(&scope);
        }
    }

    fn get_mut(&mut self, id: NoteId) -> Option<&mut PendingNote> {
        let scope = self.scopes.get(&id)?;
        self.by_scope.get_mut(scope)?.iter_mut().find(|pending| pending.note.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::note::NewNote;

    #[test]
    fn a_note_ends_with_its_session_after_72_hours_without_a_call() {
        let caller = Caller { session: Some("s".into()), ..Caller::agent("a") };
        let left_at = Timestamp::now();
        let after = |hours: i64| left_at + SignedDuration::from_hours(hours);
        let (notes, point) = (Notes::default(), Point { tool: "look", ..Point::default() });
        let leave = |persist_cross_session| {
            let inject_at = InjectAt::AfterTool("other".into());
            let new = NewNote { inject_at, persist_cross_session, ..NewNote::default() };
            notes.apply(Note::of(new, &caller, left_at), None);
        };
        leave(false);
        leave(true);
        for hours in [70, 140] {
            assert_eq!(notes.due(&caller, &point, after(hours)).expired, [], "the session made a call since");
            assert_eq!(notes.of(&caller, after(hours)).len(), 2);
        }
        let expired = notes.expired(&caller, after(213));
        assert_eq!(expired.iter().map(|note| note.persist_cross_session).collect::<Vec<_>>(), [false]);
        let due = notes.due(&caller, &Point { tool: "other", ..Point::default() }, after(213));
        assert_eq!((due.notes.len(), due.expired), (1, expired), "the other one stays");
    }

    #[test]
    fn a_clock_that_is_set_back_delays_a_note_and_neither_loses_nor_doubles_it() {
        let caller = Caller::agent("a");
        let now = Timestamp::now();
        let hour = SignedDuration::from_hours(1);
        let (notes, point) = (Notes::default(), Point::default());
        let new = NewNote { deliver_at: Some(now + hour), ..NewNote::default() };
        notes.apply(Note::of(new, &caller, now), None);
        assert_eq!(notes.announce(now), (vec![], Some(now + hour)));
        assert_eq!(notes.announce(now + hour).0.len(), 1);
        assert_eq!(notes.announce(now), (vec![], None), "it is told once");
        assert_eq!(notes.due(&caller, &point, now - hour).notes, []);
        let due = notes.due(&caller, &point, now + hour).notes;
        assert_eq!((due.len(), notes.due(&caller, &point, now + hour).notes), (1, vec![]), "it is lent");
        // Events of an earlier delivery of the same note change nothing more.
        let left = notes.get(due[0].id).expect("not delivered yet");
        notes.apply(*left.now(NoteState::Delivered), None);
        notes.apply(*left.now(NoteState::Delivered), None);
        notes.apply(*left.now(NoteState::Due), None);
        assert!(notes.is_empty());
    }

    #[test]
    fn sessions_are_remembered_up_to_a_number() {
        let notes = Notes::default();
        for n in 0..3 * SESSIONS_MAX {
            let caller = Caller { session: Some(n.to_string()), ..Caller::agent("a") };
            let at = Timestamp::from_second(i64::try_from(n).expect("a small number")).expect("a time");
            notes.note_call(&Arc::new(caller), at);
        }
        assert!(notes.lock().sessions.len() <= SESSIONS_MAX);
    }
}

//! Repeated answers: recognises an answer that equals the one that the same call got earlier in its session.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use blake3::{Hash, Hasher};
use lru::LruCache;
use serde_json::{Value, json};

use crate::call::{Caller, Content, ExecutionId};

/// Maximum number of recorded answers. Beyond it, the least recently given ones are dropped.
const ANSWERS_MAX: NonZeroUsize = NonZeroUsize::new(10_000).expect("not zero");
/// Minimum size of an answer that is recorded: to read a shorter one again costs a model less than the note.
const ANSWER_BYTES_MIN: u64 = 512;

/// The hashes of the latest answers, by session, tool and arguments.
pub(crate) struct RepeatedAnswers {
    seen: Mutex<LruCache<Hash, Seen>>,
}

/// An answer, and the call that got it.
struct Seen {
    answer: Hash,
    execution: ExecutionId,
}

impl RepeatedAnswers {
    pub(crate) fn new() -> Self {
        Self { seen: Mutex::new(LruCache::new(ANSWERS_MAX)) }
    }

    /// Records an answer. Returns the earlier call of the same session, tool and arguments, if its answer was equal.
    pub(crate) fn note(
        &self,
        execution: ExecutionId,
        caller: &Caller,
        tool: &str,
        arguments: &Value,
        content: &[Content],
    ) -> Option<ExecutionId> {
        if content.iter().map(Content::bytes).sum::<u64>() < ANSWER_BYTES_MIN {
            return None;
        }
        let answer = hash_of(content)?;
        let key = key(caller, tool, arguments);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = seen.put(key, Seen { answer, execution })?;
        (earlier.answer == answer).then_some(earlier.execution)
    }
}

/// Returns the line that tells a model of an equal answer. The content is given all the same: the model may have lost it.
pub(crate) fn line(earlier: ExecutionId, content: &[Content]) -> Content {
    // The line begins a line of its own, and other notes follow it.
    let ends_a_line = matches!(content.last(), Some(Content::Text { text }) if text.ends_with('\n'));
    let line = format!("[the same answer as that of the earlier call {earlier}]\n");
    Content::text(if ends_a_line { line } else { format!("\n{line}") })
}

/// Returns the hash of an answer that is only text, as what a model reads twice is text.
fn hash_of(content: &[Content]) -> Option<Hash> {
    let mut hasher = Hasher::new();
    for block in content {
        let Content::Text { text } = block else { return None };
        hasher.update(text.as_bytes());
    }
    Some(hasher.finalize())
}

/// Returns the key of a call: its caller's session or, without one, its agent; its tool and its arguments.
fn key(caller: &Caller, tool: &str, arguments: &Value) -> Hash {
    let (kind, name) = match &caller.session {
        Some(session) => ("session", session),
        None => ("agent", &caller.agent),
    };
    // JSON tells a missing tenant from an empty one, and where a name ends.
    let key = json!([caller.tenant, caller.user, kind, name, tool, arguments]);
    blake3::hash(key.to_string().as_bytes())
}

//! Notes of agents to themselves that are not delivered yet (table `notes`), made from the trail.
//!
//! A record of the state `pending` makes a row, and a later record of the same note, or of its name, deletes it. The
//! journal holds the same notes in memory. It applies its own events when it accepts them, and those of other executors
//! once it notices that they have written.

use std::collections::BTreeMap;

use jiff::Timestamp;
use wieldy_core::{Note, NoteState, Notes};

use crate::committer::Committer;
use crate::database::{Database, Value, one_int};
use crate::error::StoreError;
use crate::hash_chain::Record;

/// The names of the events about notes.
const NAMES: [&str; 3] = ["agent.self.notify", "agent.self.remind", "agent.self.delivered"];
/// The same, in SQL.
pub(crate) const NAMES_SQL: &str = "('agent.self.notify', 'agent.self.remind', 'agent.self.delivered')";

/// A row of `notes`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NoteRow {
    /// The number of the record that left it.
    pub(crate) id: i64,
    pub(crate) note: String,
    pub(crate) owner: String,
    pub(crate) scope: String,
    pub(crate) replace_name: Option<String>,
    pub(crate) data: String,
}

/// A change of `notes`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum NoteChange {
    Left(NoteRow),
    /// Older notes with this name are replaced.
    Replaced {
        id: i64,
        scope: String,
        name: String,
    },
    Ended {
        note: String,
    },
}

impl NoteChange {
    /// Returns the changes that the record with this number makes, in order.
    pub(crate) fn of(seq: i64, record: &Record) -> Vec<Self> {
        Self::parse(seq, record.name, &record.data)
    }

    /// Returns the changes that a stored record makes. A record of an earlier program makes none.
    pub(crate) fn parse(seq: i64, name: &str, data: &str) -> Vec<Self> {
        if !NAMES.contains(&name) {
            return Vec::new();
        }
        let Ok(note) = serde_json::from_str::<Note>(data) else { return Vec::new() };
        match note.state {
            NoteState::Due => Vec::new(),
            NoteState::Delivered | NoteState::Cancelled | NoteState::Expired => {
                vec![Self::Ended { note: note.id.to_string() }]
            }
            NoteState::Pending => {
                let [owner, scope, data] = [&note.owner, &note.scope, data].map(storable);
                let replace_name = note.replace_name.as_deref().map(storable);
                let replaced = replace_name.clone().map(|name| Self::Replaced { id: seq, scope: scope.clone(), name });
                let row = NoteRow { id: seq, note: note.id.to_string(), owner, scope, replace_name, data };
                replaced.into_iter().chain([Self::Left(row)]).collect()
            }
        }
    }

    /// Returns the statement that makes the change, for both databases.
    pub(crate) fn statement(&self) -> (&'static str, Vec<Value>) {
        match self {
            // If another writer was faster, its row may be there already, and this transaction will be rolled back.
            Self::Left(NoteRow { id, note, owner, scope, replace_name, data }) => (
                "INSERT INTO notes (id, note, owner, scope, replace_name, data) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                 ON CONFLICT DO NOTHING",
                vec![
                    (*id).into(),
                    note.as_str().into(),
                    owner.as_str().into(),
                    scope.as_str().into(),
                    replace_name.as_deref().into(),
                    data.as_str().into(),
                ],
            ),
            Self::Replaced { id, scope, name } => (
                "DELETE FROM notes WHERE scope = ?1 AND replace_name = ?2 AND id < ?3",
                vec![scope.as_str().into(), name.as_str().into(), (*id).into()],
            ),
            Self::Ended { note } => ("DELETE FROM notes WHERE note = ?1", vec![note.as_str().into()]),
        }
    }
}

/// Returns the text as a column can hold it: PostgreSQL's text has no NUL character. JSON has none.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Reads the pending notes. Returns them with the number of the last record that they are sure to include.
pub(crate) fn load(database: &mut dyn Database) -> Result<(Notes, i64), StoreError> {
    let seq = one_int(database, "SELECT seq FROM trail", &[])?.unwrap_or_default();
    let (notes, mut found) = (Notes::default(), Vec::new());
    database.query("SELECT data FROM notes ORDER BY id", &[], &mut |row| {
        found.extend(serde_json::from_str::<Note>(row.text(0)?).ok());
        Ok(())
    })?;
    let mut seen = BTreeMap::new();
    for note in found {
        let session = (note.agent.clone(), note.tenant.clone(), note.session.clone());
        let id = note.id;
        let is_of_session = !note.persist_cross_session;
        notes.apply(note, None);
        if is_of_session {
            let seen_at = match seen.get(&session) {
                Some(seen_at) => *seen_at,
                None => last_call(database, &session.0, session.1.as_deref(), session.2.as_deref())?,
            };
            seen.insert(session, seen_at);
            if let Some(Ok(at)) = seen_at.map(Timestamp::from_microsecond) {
                notes.set_session_seen(id, at);
            }
        }
    }
    Ok((notes, seq))
}

/// Returns the time of the last call of an agent in a session.
fn last_call(
    database: &mut dyn Database,
    agent: &str,
    tenant: Option<&str>,
    session: Option<&str>,
) -> Result<Option<i64>, StoreError> {
    let columns = "SELECT max(started_at) FROM tool_executions WHERE agent_id = ?1 AND coalesce(tenant_id, '') = ?2";
    let values = [agent.into(), tenant.unwrap_or_default().into(), session.unwrap_or_default().into()];
    match session {
        Some(_) => one_int(database, &format!("{columns} AND session_id = ?3"), &values),
        None => one_int(database, &format!("{columns} AND session_id IS NULL"), &values[..2]),
    }
}

impl Committer {
    /// Applies what other executors recorded about notes up to this record of the trail. A failure is made up for by
    /// the next time.
    pub(crate) fn follow_notes(&mut self, up_to: i64) {
        if up_to <= self.notes_seq {
            return;
        }
        let sql = format!(
            "SELECT data FROM events WHERE seq > ?1 AND seq <= ?2 AND instance <> ?3 AND name IN {NAMES_SQL} ORDER BY seq"
        );
        let (notes, values) = (&self.notes, [self.notes_seq.into(), up_to.into(), self.number.into()]);
        let read = self.database.query(&sql, &values, &mut |row| {
            if let Ok(note) = serde_json::from_str(row.text(0)?) {
                notes.apply(note, None);
            }
            Ok(())
        });
        match read {
            Ok(()) => self.notes_seq = up_to,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "cannot read the notes of other executors");
            }
        }
    }

    /// Looks for notes that other executors have recorded.
    pub(crate) fn look_for_notes(&mut self) -> Result<(), StoreError> {
        let end = one_int(&mut *self.database, "SELECT seq FROM trail", &[])?.unwrap_or_default();
        self.follow_notes(end);
        Ok(())
    }
}

//! Compares the tables that are made from the trail with it: the rows of calls, recorded results, and counts.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::ChainWalk;
use crate::database::{Database, Value, one_int};
use crate::error::StoreError;
use crate::notes::{NAMES_SQL, NoteChange, NoteRow};
use crate::projection::CallRow;
use crate::query::{COLUMNS, parse_row};
use crate::record_to_row::ResultFacts;

/// The number of calls that are compared with their rows together.
const CALLS_AT_ONCE: usize = 500;

/// The result of comparing a call's records with its row.
enum RowMatch {
    Same,
    Different,
    Missing,
}

impl RowMatch {
    fn of(row: Option<&CallRow>, is_same: impl FnOnce(&CallRow) -> bool) -> Self {
        match row {
            None => Self::Missing,
            Some(row) if is_same(row) => Self::Same,
            Some(_) => Self::Different,
        }
    }
}

/// Returns the rows of calls that meet the condition `more`.
fn load_rows(
    database: &mut dyn Database,
    ids: impl Iterator<Item = i64>,
    more: &str,
) -> Result<HashMap<i64, CallRow>, StoreError> {
    let ids = ids.map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let sql = format!("SELECT {} FROM tool_executions t WHERE id IN ({ids}) {more}", COLUMNS);
    let mut rows = HashMap::new();
    database.query_uncached(&sql, &mut |row| {
        let row = parse_row(row)?;
        rows.insert(row.id, row);
        Ok(())
    })?;
    Ok(rows)
}

impl ChainWalk {
    /// Compares closed calls with their rows.
    pub(super) fn compare(&mut self, database: &mut dyn Database) -> Result<(), StoreError> {
        for calls in std::mem::take(&mut self.closed).chunks(CALLS_AT_ONCE) {
            let rows = load_rows(database, calls.iter().map(|call| call.id), "")?;
            for call in calls {
                self.note_match(call.id, RowMatch::of(rows.get(&call.id), |row| row == call));
            }
        }
        for calls in std::mem::take(&mut self.without_opening).chunks(CALLS_AT_ONCE) {
            let rows = load_rows(database, calls.iter().map(|(id, ..)| *id), "")?;
            for (id, at, ended) in calls {
                // Only the row says how the call began; the trail also says how it ended.
                let found = RowMatch::of(rows.get(id), |row| {
                    let mut rebuilt = row.clone();
                    rebuilt.apply(*at, ended);
                    rebuilt == *row
                });
                self.note_match(*id, found);
            }
        }
        for calls in std::mem::take(&mut self.results).chunks(CALLS_AT_ONCE) {
            self.compare_results(database, calls)?;
        }
        Ok(())
    }

    /// Compares recorded results with the hashes in the closing records of their calls.
    fn compare_results(
        &mut self,
        database: &mut dyn Database,
        calls: &[(i64, Option<ResultFacts>)],
    ) -> Result<(), StoreError> {
        let ids = calls.iter().map(|(id, _)| id.to_string()).collect::<Vec<_>>().join(",");
        let recorded: HashMap<i64, Option<&ResultFacts>> =
            calls.iter().map(|(id, result)| (*id, result.as_ref())).collect();
        let mut there = HashSet::new();
        let mut changed = Vec::new();
        let sql = format!("SELECT id, result_json FROM results WHERE id IN ({ids})");
        database.query_uncached(&sql, &mut |row| {
            let (id, json) = (row.int(0)?, row.text(1)?);
            there.insert(id);
            if !recorded[&id].is_some_and(|result| result.fits(json)) {
                changed.push(id);
            }
            Ok(())
        })?;
        for id in changed {
            self.problem(id, "the result of its call in `results` differs");
        }
        for (id, result) in calls {
            if result.is_some() && !there.contains(id) && *id > self.dropped_seq {
                self.results_missing.push(*id);
            }
        }
        Ok(())
    }

    /// Compares open calls with their rows, except those that have newer records than this walk.
    pub(super) fn compare_open(&mut self, database: &mut dyn Database) -> Result<(), StoreError> {
        let calls: Vec<CallRow> = self.open.values().cloned().collect();
        let since =
            format!("AND NOT EXISTS (SELECT 1 FROM events e WHERE e.execution = t.id AND e.seq > {})", self.end.seq);
        for calls in calls.chunks(CALLS_AT_ONCE) {
            let ids = || calls.iter().map(|call| call.id);
            let unchanged = load_rows(database, ids(), &since)?;
            let rows = load_rows(database, ids(), "")?;
            for call in calls {
                let found = RowMatch::of(rows.get(&call.id), |_| unchanged.get(&call.id).is_none_or(|row| row == call));
                self.note_match(call.id, found);
            }
        }
        Ok(())
    }

    /// Applies a record to the pending notes.
    pub(super) fn apply_to_notes(&mut self, seq: i64, name: &str, data: &str) {
        for change in NoteChange::parse(seq, name, data) {
            match change {
                NoteChange::Left(row) => drop(self.notes.insert(seq, row)),
                NoteChange::Replaced { scope, name, .. } => {
                    let is_same = |row: &NoteRow| row.scope == scope && row.replace_name.as_ref() == Some(&name);
                    let replaced = self.notes.extract_if(.., |_, row| is_same(row));
                    self.notes_ended.extend(replaced.map(|(_, row)| row.note));
                }
                NoteChange::Ended { note } => {
                    self.notes.retain(|_, row| row.note != note);
                    self.notes_ended.insert(note);
                }
            }
        }
    }

    /// Compares the pending notes with the trail. Of a note whose record was dropped, the trail says only if it ended.
    pub(super) fn compare_notes(&mut self, database: &mut dyn Database) -> Result<(), StoreError> {
        let mut rows = BTreeMap::new();
        let sql = "SELECT id, note, owner, scope, replace_name, data FROM notes";
        database.query(sql, &[], &mut |row| {
            let text = |column| row.text(column).map(str::to_owned);
            let (id, note, owner, scope) = (row.int(0)?, text(1)?, text(2)?, text(3)?);
            let replace_name = row.text_or_none(4)?.map(str::to_owned);
            rows.insert(id, NoteRow { id, note, owner, scope, replace_name, data: text(5)? });
            Ok(())
        })?;
        // Records after the end of this walk may have changed the table meanwhile.
        let newer = format!("SELECT count(*) FROM events WHERE seq > ?1 AND name IN {NAMES_SQL}");
        if one_int(database, &newer, &[self.end.seq.into()])? != Some(0) {
            return Ok(());
        }
        let (dropped, later) = (self.dropped_seq, rows.split_off(&(self.dropped_seq + 1)));
        if let Some((id, _)) = rows.iter().find(|(_, row)| self.notes_ended.contains(&row.note)) {
            self.problem((*id).max(dropped + 1), "its note in `notes` has ended");
        }
        let expected = std::mem::take(&mut self.notes);
        for (id, row) in &later {
            if expected.get(id) != Some(row) {
                self.problem(*id, "no pending note of the trail is as its row in `notes`");
            }
        }
        if let Some(id) = expected.keys().find(|id| !later.contains_key(id)).copied() {
            self.problem(id, "its note has no row in `notes`");
        }
        Ok(())
    }

    fn note_match(&mut self, id: i64, found: RowMatch) {
        match found {
            RowMatch::Same => {}
            RowMatch::Different => self.problem(id, "the row of its call in `tool_executions` differs"),
            RowMatch::Missing => self.problem(id, "its call has no row in `tool_executions`"),
        }
    }

    /// Checks that there is nothing outside the trail that would be taken for a part of it.
    pub(super) fn check_strays(&mut self, database: &mut dyn Database) -> Result<(), StoreError> {
        let dropped = [Value::Int(self.dropped_seq)];
        let unopened = "no record opens the call of its row in `tool_executions`";
        for (sql, values, what) in [
            (
                "SELECT min(seq) FROM events WHERE seq > (SELECT seq FROM trail)",
                &[][..],
                "it is after the end of the trail",
            ),
            (
                "SELECT min(seq) FROM heads WHERE seq > (SELECT seq FROM trail)",
                &[],
                "it is missing: the trail was longer when its end was signed",
            ),
            ("SELECT min(id) FROM tool_executions WHERE id > (SELECT seq FROM trail)", &[], unopened),
            (
                "SELECT min(id) FROM tool_executions t WHERE id <= ?1
                   AND NOT EXISTS (SELECT 1 FROM events e WHERE e.execution = t.id AND e.seq > ?1)",
                &dropped,
                unopened,
            ),
            (
                "SELECT min(r.id) FROM results r LEFT JOIN tool_executions t ON t.id = r.id WHERE t.completed_at IS NULL",
                &[],
                "no record closes the call of its result in `results`",
            ),
        ] {
            if let Some(seq) = one_int(database, sql, values)? {
                self.problem(seq, what);
            }
        }
        Ok(())
    }

    /// Compares the stored histogram with the trail. Dropped calls stay in it, so it may count more than the trail,
    /// never less.
    pub(super) fn compare_histogram(&mut self) {
        let stored = &self.end.histogram;
        let is_right = if self.dropped_seq == 0 {
            *stored == self.histogram
        } else {
            self.histogram.iter().all(|(key, counts)| {
                let found = stored.get(key);
                found.is_some_and(|found| {
                    found.calls >= counts.calls
                        && found.output_bytes >= counts.output_bytes
                        && found.result_bytes >= counts.result_bytes
                })
            })
        };
        if !is_right {
            self.problem(self.end.seq, "the counts in `tallies` differ from the trail");
        }
    }
}

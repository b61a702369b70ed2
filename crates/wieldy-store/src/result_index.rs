//! The index of the words of recorded results. It is apart from the index of the words of calls and filled after it, a
//! part at a time: by executors that have nothing else to do, and a little by each search.

use serde::Serialize;
use serde_json::Value as Json;

use crate::database::{Database, Dialect, TextPlace, one_int};
use crate::error::StoreError;

/// Maximum number of records whose results an executor indexes together, and of those that a search indexes. Their
/// texts are in memory meanwhile.
pub(crate) const INDEXED_AT_ONCE: i64 = 2_000;
pub(crate) const INDEXED_BY_SEARCH: i64 = 1_000;
/// Maximum number of bytes of one result whose words are indexed.
const TEXT_BYTES_MAX: usize = 64 * 1024;

/// The progress of the index of recorded results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResultIndex {
    /// The last record of the trail up to which the results of calls are found.
    pub up_to: i64,
    /// The number of later records, of which some may close calls with results.
    pub waiting: u64,
}

/// Returns how far the index is.
pub(crate) fn progress(database: &mut dyn Database) -> Result<ResultIndex, StoreError> {
    let mut progress = ResultIndex { up_to: 0, waiting: 0 };
    let sql = "SELECT r.seq, t.seq FROM result_index r, trail t WHERE r.one = 1 AND t.one = 1";
    database.query(sql, &[], &mut |row| {
        progress.up_to = row.int(0)?;
        progress.waiting = u64::try_from(row.int(1)? - progress.up_to).unwrap_or_default();
        Ok(())
    })?;
    Ok(progress)
}

/// Indexes the words of the results of calls that ended within the next `records_max` records, if the words of the
/// calls themselves are indexed and at least `at_least` records wait. Returns the number of records that still wait.
pub(crate) fn fill(database: &mut dyn Database, at_least: u64, records_max: i64) -> Result<u64, StoreError> {
    let progress = progress(database)?;
    if progress.waiting < at_least.max(1) {
        return Ok(progress.waiting);
    }
    let mut left = 0;
    database.in_transaction(&mut |database| {
        // Of several executors one indexes at a time.
        let (lock, end) = match database.dialect() {
            Dialect::Sqlite => ("", "SELECT words_seq FROM trail"),
            #[cfg(feature = "postgres")]
            Dialect::Postgres => ("FOR UPDATE", "SELECT seq FROM trail"),
        };
        let from = one_int(database, &format!("SELECT seq FROM result_index WHERE one = 1 {lock}"), &[])?;
        let first = one_int(database, "SELECT min(seq) FROM events", &[])?.unwrap_or(1);
        let from = from.unwrap_or_default().max(first - 1);
        let end = one_int(database, end, &[])?.unwrap_or_default();
        let up_to = end.min(from.saturating_add(records_max));
        if up_to <= from {
            return Ok(());
        }
        let sql = "SELECT id, result_json FROM results WHERE id IN (SELECT execution FROM events WHERE name IN
             ('tool.call.success', 'tool.call.failure', 'tool.call.timeout', 'tool.call.cancelled')
             AND seq > ?1 AND seq <= ?2) ORDER BY id";
        let mut found = Vec::new();
        database.query(sql, &[from.into(), up_to.into()], &mut |row| {
            found.push((row.int(0)?, searchable(row.text(1)?)));
            Ok(())
        })?;
        database.add_words(TextPlace::Results, &found)?;
        database.execute("UPDATE result_index SET seq = ?1 WHERE one = 1", &[up_to.into()])?;
        left = u64::try_from(end - up_to).unwrap_or_default();
        Ok(())
    })?;
    Ok(left)
}

/// Returns the searchable text of a recorded result: all of its texts, numbers and names, without the signs of JSON.
fn searchable(json: &str) -> String {
    let mut text = String::new();
    if let Ok(result) = serde_json::from_str::<Json>(json) {
        for part in ["text", "structured"] {
            collect(&result[part], &mut text);
        }
    }
    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
    text
}

fn collect(value: &Json, text: &mut String) {
    if text.len() > TEXT_BYTES_MAX {
        return;
    }
    let mut add = |word: &str| {
        text.push_str(word);
        text.push('\n');
    };
    match value {
        Json::String(word) => add(word),
        Json::Number(number) => add(&number.to_string()),
        Json::Array(items) => items.iter().for_each(|item| collect(item, text)),
        Json::Object(map) => {
            for (name, value) in map {
                text.push_str(name);
                text.push('\n');
                collect(value, text);
            }
        }
        Json::Bool(_) | Json::Null => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_a_result_are_searchable_without_the_signs_of_json() {
        let json =
            r#"{"text":"one\nnext \"two\"","structured":{"name":["x",5,null,true]},"blocks":[{"type":"image"}]}"#;
        assert_eq!(searchable(json), "one\nnext \"two\"\nname\nx\n5\n");
        assert_eq!(searchable("no JSON"), "");
        let long = serde_json::json!({"text": "é".repeat(40_000), "structured": ["y"]}).to_string();
        assert_eq!(searchable(&long).len(), TEXT_BYTES_MAX);
    }
}

//! The caller's metadata of a call, and its first entries, by which calls are found.

use serde_json::Value;

use crate::database;

/// The key of the caller's own metadata in a row. The other keys are facts of the engine.
pub(crate) const CALLER: &str = "caller";

/// Maximum number of entries of a call by which it is found.
const ENTRIES_MAX: usize = 16;

/// The hash of an entry's name and value.
pub(crate) type EntryHash = [u8; 16];

/// Returns true if the engine's own facts in a row's metadata say that the call is to be run again.
pub(crate) fn is_rerun(metadata: Option<&str>) -> bool {
    #[derive(serde::Deserialize)]
    struct Facts {
        #[serde(default)]
        rerun: bool,
    }
    metadata.is_some_and(|text| serde_json::from_str::<Facts>(text).is_ok_and(|facts| facts.rerun))
}

/// Returns the entries by which a call is found: the first texts, numbers and truth values at the top level.
pub(crate) fn entries(metadata: &Value) -> Vec<EntryHash> {
    let map = metadata.as_object().into_iter().flatten();
    let mut entries: Vec<EntryHash> = map
        .filter_map(|(name, value)| match value {
            Value::String(text) => Some(entry(name, text)),
            Value::Number(_) | Value::Bool(_) => Some(entry(name, &value.to_string())),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        })
        .take(ENTRIES_MAX)
        .collect();
    entries.sort_unstable();
    entries.dedup();
    entries
}

/// Returns the hash of an entry. A number or a truth value is the same as the text that is written like it.
pub(crate) fn entry(name: &str, value: &str) -> EntryHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes()).update(value.as_bytes());
    let mut short = EntryHash::default();
    hasher.finalize_xof().fill(&mut short);
    short
}

/// Returns the SQL condition for calls with an entry. `id` is the column with the number of the call.
pub(crate) fn has_entry(id: &str) -> String {
    format!("EXISTS (SELECT 1 FROM metadata_entries o WHERE o.entry = ? AND o.execution = {id})")
}

/// Returns the hashes of the wanted entries, each once.
pub(crate) fn wanted(entries: &[(String, String)]) -> Vec<database::Value> {
    let mut hashes: Vec<EntryHash> = entries.iter().map(|(name, value)| entry(name, value)).collect();
    hashes.sort_unstable();
    hashes.dedup();
    hashes.into_iter().map(|hash| database::Value::Bytes(hash.to_vec())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_engines_own_key_means_a_rerun() {
        for (metadata, expected) in [
            (r#"{"call_id":"x","rerun":true}"#, true),
            (r#"{"caller":{"rerun":true}}"#, false),
            (r#"{"caller":{"deep":{"rerun":true}},"rerun":false}"#, false),
            (r#"{"caller":"\"rerun\":true"}"#, false),
            ("no JSON", false),
        ] {
            assert_eq!(is_rerun(Some(metadata)), expected, "{metadata}");
        }
        assert!(!is_rerun(None));
    }

    #[test]
    fn the_first_texts_numbers_and_truth_values_are_found() {
        let of = |value| entries(&value);
        let mut expected = vec![entry("a", "x"), entry("b", "5"), entry("c", "true"), entry("f", "")];
        expected.sort_unstable();
        assert_eq!(of(json!({"a": "x", "b": 5, "d": [1], "c": true, "e": {"a": "y"}, "n": null, "f": ""})), expected);
        assert_ne!(entry("ab", "c"), entry("a", "bc"));
        let many: serde_json::Map<_, _> = (0..20).map(|n| (format!("k{n:02}"), json!(n))).collect();
        let found = of(Value::Object(many));
        assert_eq!(found.len(), ENTRIES_MAX);
        assert!(found.contains(&entry("k15", "15")) && !found.contains(&entry("k16", "16")));
    }
}

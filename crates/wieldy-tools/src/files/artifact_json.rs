//! Values in stored outputs that are JSON, by JSON pointer (RFC 6901).

use serde_json::{Value, json};
use wieldy_core::artifact::ArtifactId;
use wieldy_core::name::{did_you_mean, near_misses};
use wieldy_core::{Outcome, Run, RunError};

use super::artifact::{all_of, whole_characters};
use super::error::FileError;

/// Maximum size of an output that is parsed. Its values take several times that in memory.
const JSON_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Maximum number of keys that an error lists.
const KEYS_SHOWN_MAX: usize = 20;
/// Maximum length of a key that an error shows.
const KEY_BYTES_MAX: usize = 80;
/// Maximum number of keys that are compared with a missing one.
const KEYS_COMPARED_MAX: usize = 1000;

/// Returns a page of the value at `pointer`. A text is returned as it is, any other value as JSON.
pub(super) fn value(run: &Run, id: ArtifactId, pointer: &str, offset: u64, length: u64) -> Result<Outcome, RunError> {
    let bytes = all_of(run, id, JSON_BYTES_MAX)?;
    let whole: Value = serde_json::from_slice(&bytes).map_err(|error| {
        FileError::refused(format!("`{id}` is not JSON: {error}"), "read it by `offset`, or search it with `pattern`")
    })?;
    let value = look_up(&whole, pointer)?;
    let text = match value {
        Value::String(text) => text.clone(),
        value => serde_json::to_string_pretty(value).expect("a JSON value is always writable"),
    };
    let total = text.len() as u64;
    let from = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
    let rest = &text.as_bytes()[from..];
    let page = &rest[..rest.len().min(usize::try_from(length).unwrap_or(usize::MAX))];
    let page = &page[..whole_characters(page)];
    let next = offset + page.len() as u64;
    let next_offset = (next < total).then_some(next);
    let mut shown = String::from_utf8_lossy(page).into_owned();
    if let Some(next) = next_offset {
        shown.push_str(&format!("\n[bytes {offset} to {next} of {total}; read on with `offset` {next}]"));
    }
    Ok(Outcome::text(shown).structured(json!({
        "id": id,
        "pointer": pointer,
        "kind": kind(value),
        "offset": offset,
        "length": page.len(),
        "next_offset": next_offset,
        "total_bytes": total,
    })))
}

/// Returns the value at a pointer, or an error that says how far the pointer leads and what is there.
fn look_up<'a>(whole: &'a Value, pointer: &str) -> Result<&'a Value, FileError> {
    if let Some(found) = whole.pointer(pointer) {
        return Ok(found);
    }
    if !pointer.starts_with('/') {
        return Err(FileError::refused(
            format!("`{pointer}` is not a JSON pointer"),
            "begin with `/`, such as `/items/0/name`; write `~1` for `/` and `~0` for `~` in a key",
        ));
    }
    let ends = pointer.match_indices('/').map(|(at, _)| at).chain([pointer.len()]);
    let (at, deepest) = ends
        .filter_map(|end| whole.pointer(&pointer[..end]).map(|found| (&pointer[..end], found)))
        .next_back()
        .expect("the empty pointer leads to the whole value");
    let missing = pointer[at.len() + 1..].split('/').next().unwrap_or_default();
    let place = if at.is_empty() { "the output".to_owned() } else { format!("`{at}`") };
    Err(FileError::refused(format!("{place} has no `{missing}`"), advice(deepest, missing)))
}

/// Returns the keys or the length of a value, and the key that was probably meant.
fn advice(value: &Value, missing: &str) -> String {
    match value {
        Value::Object(map) => {
            // A key of a foreign output can be as long as the output.
            let short = |key: &&str| key.len() <= KEY_BYTES_MAX;
            let mut keys: Vec<&str> = map.keys().map(String::as_str).filter(short).take(KEYS_SHOWN_MAX).collect();
            if map.len() > keys.len() {
                keys.push("…");
            }
            let near = map.keys().take(KEYS_COMPARED_MAX).map(String::as_str).filter(short);
            let near = near_misses(missing, near);
            let near = did_you_mean(&near).map(|near| format!("{near} ")).unwrap_or_default();
            format!("{near}it is an object with {} keys: {}", map.len(), keys.join(", "))
        }
        Value::Array(items) => format!("it is a list of {} items, numbered from 0", items.len()),
        other => format!("it is {}, which has nothing in it", kind(other)),
    }
}

/// Returns the kind of a value in words.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

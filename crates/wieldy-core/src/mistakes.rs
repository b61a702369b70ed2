//! Reads a TOML table and collects all its mistakes, although the TOML reader stops at the first.

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue, Deserializer, Error};

/// Maximum number of mistakes reported for one table.
const MISTAKES_MAX: usize = 20;

/// Reads a table and collects every mistake in it. After each mistake, the key or item at fault is removed and the rest
/// is read again. The value is `Some` if the rest could be read; after a mistake, use it only to find more mistakes.
pub fn read_table<T: DeserializeOwned>(mut table: Spanned<DeTable<'_>>) -> (Option<T>, Vec<Error>) {
    let mut mistakes: Vec<Error> = Vec::new();
    // The list items that lack a key because it was removed.
    let mut incomplete: Vec<usize> = Vec::new();
    for _ in 0..MISTAKES_MAX {
        let error = match T::deserialize(Deserializer::from(table.clone())) {
            Ok(value) => return (Some(value), mistakes),
            Err(error) => error,
        };
        let at = error.span().map(|span| span.start);
        // A removed key is not reported as missing.
        let is_missing = error.message().starts_with("missing field");
        if !(is_missing && at.is_some_and(|at| incomplete.contains(&at))) {
            mistakes.push(error);
        }
        if !at.is_some_and(|at| take_out(table.get_mut(), at, &mut incomplete)) {
            break;
        }
    }
    (None, mistakes)
}

/// Returns the dotted name of the key that has this offset in the text, in the key itself or in its value.
pub fn key_at(table: &DeTable<'_>, offset: usize) -> Option<String> {
    table.iter().find_map(|(word, value)| {
        let below = match value.get_ref() {
            DeValue::Table(inner) => key_at(inner, offset),
            DeValue::Array(items) => {
                items.iter().filter_map(|item| item.get_ref().as_table()).find_map(|item| key_at(item, offset))
            }
            _ => None,
        };
        let here = word.span().contains(&offset) || value.span().contains(&offset);
        match below {
            Some(below) => Some(format!("{}.{below}", word.get_ref())),
            None => here.then(|| word.get_ref().to_string()),
        }
    })
}

/// Removes the innermost key, or the list item, that has this offset in the text. Items that lose a key are
/// noted by their start offsets.
fn take_out(table: &mut DeTable<'_>, offset: usize, incomplete: &mut Vec<usize>) -> bool {
    // The span of a table is its header, which may name the tables around it: `[tool.arguments.path]`.
    if let Some(word) = table.keys().find(|word| word.span().contains(&offset)).map(|word| word.get_ref().to_string()) {
        return table.remove(word.as_str()).is_some();
    }
    for (_, value) in table.iter_mut() {
        let is_taken_out = match value.get_mut() {
            DeValue::Table(inner) => take_out(inner, offset, incomplete),
            DeValue::Array(items) => take_out_of_list(items, offset, incomplete),
            _ => false,
        };
        if is_taken_out {
            return true;
        }
    }
    let here = table.iter().find(|(_, value)| value.span().contains(&offset));
    let Some(word) = here.map(|(word, _)| word.get_ref().to_string()) else { return false };
    table.remove(word.as_str()).is_some()
}

/// Does the same in the items of a list. The last text or number is not removed, because an empty list may be another
/// mistake: the caller removes the list's key instead.
fn take_out_of_list(items: &mut DeArray<'_>, offset: usize, incomplete: &mut Vec<usize>) -> bool {
    for item in items.iter_mut() {
        let start = item.span().start;
        if let DeValue::Table(inner) = item.get_mut()
            && take_out(inner, offset, incomplete)
        {
            incomplete.push(start);
            return true;
        }
    }
    let Some(at_fault) = items.iter().position(|item| item.span().contains(&offset)) else { return false };
    if items.len() == 1 && !items[at_fault].get_ref().is_table() {
        return false;
    }
    let others = items.iter().enumerate().filter(|(index, _)| *index != at_fault);
    *items = others.map(|(_, item)| item.clone()).collect();
    true
}

//! Full-text search for calls. For a whole word, SQLite walks through its calls from the last one and stops when there
//! are enough. For a prefix it would first collect all calls, so a prefix is replaced by the words that begin with it.

use rusqlite::functions::FunctionFlags;
use rusqlite::{Connection, OptionalExtension};

use crate::database::{TextPlace, TextSearch};

/// Maximum number of words that replace a prefix. Beyond that, collecting all their calls is faster.
const EXPANSIONS_MAX: usize = 128;

/// Registers the SQL function that searches use.
pub(super) fn register_functions(connection: &Connection) -> rusqlite::Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC;
    // Finds words as the full-text index does, in texts that are not indexed yet.
    connection.create_scalar_function("has_words", 2, flags, |values| {
        let words = |column| values.get_raw(column).as_str().unwrap_or_default();
        let (wanted, there) = (lowercase_words(words(0)), lowercase_words(words(1)));
        Ok(!wanted.is_empty() && wanted.iter().all(|wanted| there.iter().any(|word| word.starts_with(wanted.as_str()))))
    })
}

/// Returns the words of a text: runs of letters and digits.
fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split(|sign: char| !sign.is_alphanumeric()).filter(|word| !word.is_empty())
}

/// Returns the words of a text, in lower case.
fn lowercase_words(text: &str) -> Vec<String> {
    words_of(text).map(str::to_lowercase).collect()
}

/// Returns the full-text query. Every word is in quotes, so nothing in it is an operator.
pub(super) fn match_expression(connection: &Connection, words: &TextSearch<'_>) -> rusqlite::Result<String> {
    let mut wanted = Vec::new();
    for word in words_of(words.text) {
        wanted.push(match words_with_prefix(connection, words.place, word)? {
            Some(whole) if !whole.is_empty() => format!("(\"{}\")", whole.join("\" OR \"")),
            Some(_) => return Ok("\"\"".into()),
            None => format!("\"{word}\"*"),
        });
    }
    if wanted.is_empty() {
        return Ok("\"\"".into()); // punctuation is in no word
    }
    // The name of the tool is not in its results.
    let tool = words.tool.filter(|_| words.place == TextPlace::Calls);
    wanted.extend(words_of(tool.unwrap_or_default()).map(|word| format!("\"{word}\"")));
    Ok(wanted.join(" AND "))
}

/// Returns the indexed words that begin with `word`, unless there are many.
fn words_with_prefix(connection: &Connection, place: TextPlace, word: &str) -> rusqlite::Result<Option<Vec<String>>> {
    // SQLite's own rules apply to letters outside of ASCII.
    if !word.is_ascii() {
        return Ok(None);
    }
    let word = word.to_ascii_lowercase();
    let words = place.table();
    connection.execute_batch(&format!(
        "CREATE VIRTUAL TABLE IF NOT EXISTS temp.{words}_terms USING fts5vocab(main, {words}, instance)"
    ))?;
    let mut next = connection.prepare_cached(&format!("SELECT term FROM {words}_terms WHERE term >= ?1 LIMIT 1"))?;
    let (mut found, mut from) = (Vec::new(), word.clone());
    while let Some(term) = next.query_row([&from], |row| row.get::<_, String>(0)).optional()?
        && term.starts_with(&word)
    {
        if found.len() == EXPANSIONS_MAX {
            return Ok(None);
        }
        // The table has a row for each occurrence, so continue at the first one of the next word.
        from = format!("{term}\u{1}");
        found.push(term);
    }
    Ok(Some(found))
}

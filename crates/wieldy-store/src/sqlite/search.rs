//! Finding calls by their words. SQLite goes through the calls of a whole word from the last one on and stops when there are
//! enough; of the beginning of a word it would first gather all calls. So it is told the words that begin like that.

use rusqlite::functions::FunctionFlags;
use rusqlite::{Connection, OptionalExtension};

use crate::database::Words;

/// How many words a beginning may stand for until gathering all their calls is quicker.
const ENDINGS_MAX: usize = 128;

/// Makes ready what searches need.
pub(super) fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC;
    // Finds words as the table of words does, in texts that are not there yet.
    connection.create_scalar_function("has_words", 2, flags, |values| {
        let words = |column| values.get_raw(column).as_str().unwrap_or_default();
        let (wanted, there) = (lowercase(words(0)), lowercase(words(1)));
        Ok(!wanted.is_empty() && wanted.iter().all(|wanted| there.iter().any(|word| word.starts_with(wanted.as_str()))))
    })
}

/// The words of a text: runs of letters and digits.
fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split(|sign: char| !sign.is_alphanumeric()).filter(|word| !word.is_empty())
}

/// The words of a text, however they are written.
fn lowercase(text: &str) -> Vec<String> {
    words_of(text).map(str::to_lowercase).collect()
}

/// What the table of words is asked for. Every word is in quotes: nothing in it is an operator.
pub(super) fn wanted(connection: &Connection, words: &Words<'_>) -> rusqlite::Result<String> {
    let mut wanted = Vec::new();
    for word in words_of(words.text) {
        wanted.push(match beginning_with(connection, word)? {
            Some(whole) if !whole.is_empty() => format!("(\"{}\")", whole.join("\" OR \"")),
            Some(_) => return Ok("\"\"".into()),
            None => format!("\"{word}\"*"),
        });
    }
    if wanted.is_empty() {
        return Ok("\"\"".into()); // signs alone are in no word
    }
    wanted.extend(words_of(words.tool.unwrap_or_default()).map(|word| format!("\"{word}\"")));
    Ok(wanted.join(" AND "))
}

/// The words in the table that begin like this, unless there are many.
fn beginning_with(connection: &Connection, word: &str) -> rusqlite::Result<Option<Vec<String>>> {
    // How SQLite writes the letters of other languages, it knows best.
    if !word.is_ascii() {
        return Ok(None);
    }
    let word = word.to_ascii_lowercase();
    connection.execute_batch("CREATE VIRTUAL TABLE IF NOT EXISTS temp.terms USING fts5vocab(main, words, instance)")?;
    let mut next = connection.prepare_cached("SELECT term FROM terms WHERE term >= ?1 LIMIT 1")?;
    let (mut found, mut from) = (Vec::new(), word.clone());
    while let Some(term) = next.query_row([&from], |row| row.get::<_, String>(0)).optional()?
        && term.starts_with(&word)
    {
        if found.len() == ENDINGS_MAX {
            return Ok(None);
        }
        // The table has a row for each occurrence: on to the first of the next word.
        from = format!("{term}\u{1}");
        found.push(term);
    }
    Ok(Some(found))
}

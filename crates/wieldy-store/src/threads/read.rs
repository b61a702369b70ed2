//! Reads threads: the entries of one, the threads of an owner, and the entries with some words.

use serde::Serialize;
use wieldy_core::name::near_misses;

use super::search::{Terms, in_one_line};
use super::write::{kind_tag, owner_tag, thread_tag};
use super::{At, Owner, ThreadError, Threads};
use crate::database::{Database, Dialect, Row, Value, one_int};
use crate::error::StoreError;

/// Maximum size of the contents in one answer.
const ANSWER_BYTES_MAX: i64 = 1024 * 1024;
/// The number of latest entries with the words that are ranked, and the part of their content that is looked at.
const RANKED_MAX: i64 = 200;
const RANKED_BYTES: i64 = 8 * 1024;
/// Maximum number of ids that are compared with one that is not found.
const NEAR_MAX: i64 = 1000;
/// Maximum length of the last line in a list, in bytes.
const LINE_BYTES_MAX: usize = 120;

/// The order of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// The earliest first.
    #[default]
    Ascending,
    /// The latest first.
    Descending,
}

/// A question for the entries of a thread.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// The thread.
    pub thread_id: String,
    /// Maximum number of entries.
    pub limit: usize,
    /// Only entries after this number.
    pub after: Option<i64>,
    /// Only entries before this number.
    pub before: Option<i64>,
    /// The order.
    pub order: Order,
    /// Only entries of this type.
    pub kind: Option<String>,
    /// Maximum number of tokens of all contents together, by an estimate.
    pub tokens_max: Option<usize>,
}

/// The state of a thread: a fold of its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ThreadStatus {
    /// No entry, or not the last one that says so, has closed it.
    Open,
    /// The last entry of the types `close` and `reopen` has closed it.
    Closed,
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// The number in the thread, from 1.
    pub seq: i64,
    /// The type.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    pub content: String,
    /// The agent and its user.
    pub author: String,
    /// The time.
    pub at: At,
    /// The number of the entry that it answers.
    pub reply_to: Option<i64>,
}

/// A page of the entries of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EntryPage {
    /// The thread.
    pub thread_id: String,
    /// The title.
    pub title: Option<String>,
    /// The state.
    pub status: ThreadStatus,
    /// The entries.
    pub entries: Vec<Entry>,
    /// The number of entries of the thread, on all pages.
    pub total: i64,
    /// The number to read on after, or before in descending order; `None` at the end.
    pub cursor: Option<i64>,
    /// True if the only entry was cut to the maximum number of tokens.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub cut: bool,
}

/// A thread in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListedThread {
    /// The id.
    pub thread_id: String,
    /// The title.
    pub title: Option<String>,
    /// The state.
    pub status: ThreadStatus,
    /// The number of entries.
    pub entries: i64,
    /// The time of the last entry.
    pub last_at: At,
    /// The first line of the last entry.
    pub last_line: String,
}

/// A page of threads, the latest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ThreadPage {
    /// The threads.
    pub threads: Vec<ListedThread>,
    /// The cursor of the next page.
    pub cursor: Option<String>,
}

/// A search.
#[derive(Debug, Clone, Default)]
pub struct Seeking {
    /// Words and "phrases" that must all occur.
    pub query: String,
    /// Maximum number of entries.
    pub limit: usize,
    /// Only entries since this time.
    pub since: Option<jiff::Timestamp>,
    /// Only entries of this type.
    pub kind: Option<String>,
    /// Only entries of this thread.
    pub thread_id: Option<String>,
}

/// An entry that fits a search.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Found {
    /// The thread.
    pub thread_id: String,
    /// The number of the entry.
    pub seq: i64,
    /// The type.
    #[serde(rename = "type")]
    pub kind: String,
    /// The part around the first match.
    pub snippet: String,
    /// The score of its matches, from 0 to 1.
    pub score: f64,
    /// The time.
    pub at: At,
}

const STATUS: &str =
    "coalesce((SELECT s.type FROM entries s WHERE s.thread = t.number AND s.type IN ('close', 'reopen')
    ORDER BY s.seq DESC LIMIT 1), 'reopen')";
const TITLE: &str = "(SELECT n.title FROM entries n WHERE n.thread = t.number AND n.title IS NOT NULL
    ORDER BY n.seq DESC LIMIT 1)";

impl Threads {
    /// Returns entries of a thread.
    pub fn read(&self, owner: &Owner, reading: &Reading) -> Result<EntryPage, ThreadError> {
        if !self.exists()? {
            return Err(ThreadError::Missing { thread_id: reading.thread_id.clone(), near: Vec::new() });
        }
        self.with(|database| {
            let (mut thread, mut title, mut status, mut total) = (None, None, ThreadStatus::Open, 0);
            let sql = format!(
                "SELECT t.number, t.seq, {TITLE}, {STATUS} FROM threads t WHERE t.owner = ?1 AND t.thread_id = ?2"
            );
            database.query(&sql, &[owner.0.as_str().into(), reading.thread_id.as_str().into()], &mut |row| {
                (thread, total) = (Some(row.int(0)?), row.int(1)?);
                (title, status) = (row.text_or_none(2)?.map(str::to_owned), status_of(row.text(3)?));
                Ok(())
            })?;
            let Some(thread) = thread else { return Err(missing(database, owner, &reading.thread_id)?) };
            if let Some(kind) = &reading.kind {
                let sql = "SELECT count(*) FROM entries WHERE thread = ?1 AND type = ?2";
                total = one_int(database, sql, &[thread.into(), kind.as_str().into()])?.unwrap_or_default();
            }
            let (mut entries, is_more) = page(database, thread, reading)?;
            let (fitting, cut) = fit(&mut entries, reading.tokens_max);
            let is_more = is_more || fitting < entries.len();
            entries.truncate(fitting);
            let cursor = entries.last().filter(|_| is_more).map(|entry| entry.seq);
            Ok(EntryPage { thread_id: reading.thread_id.clone(), title, status, entries, total, cursor, cut })
        })
    }

    /// Returns up to `limit` threads of an owner, the latest first; with a status only those.
    pub fn list(
        &self,
        owner: &Owner,
        status: Option<ThreadStatus>,
        limit: usize,
        cursor: Option<&str>,
    ) -> Result<ThreadPage, ThreadError> {
        let (at, number) = match cursor {
            None => (i64::MAX, i64::MAX),
            Some(cursor) => parse_cursor(cursor)?,
        };
        if !self.exists()? {
            return Ok(ThreadPage { threads: Vec::new(), cursor: None });
        }
        let wanted = match status {
            None => String::new(),
            Some(ThreadStatus::Closed) => format!(" AND {STATUS} = 'close'"),
            Some(ThreadStatus::Open) => format!(" AND {STATUS} <> 'close'"),
        };
        let sql = format!(
            "SELECT t.number, t.at, t.thread_id, {TITLE}, {STATUS}, t.seq,
               (SELECT substr(l.content, 1, 400) FROM entries l WHERE l.thread = t.number AND l.seq = t.seq)
             FROM threads t WHERE t.owner = ?1 AND (t.at < ?2 OR t.at = ?2 AND t.number < ?3){wanted}
             ORDER BY t.at DESC, t.number DESC LIMIT ?4"
        );
        let count = i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1);
        let values = [owner.0.as_str().into(), Value::Time(at), number.into(), count.into()];
        self.with(|database| {
            let mut rows = Vec::new();
            database.query(&sql, &values, &mut |row| {
                let thread = ListedThread {
                    thread_id: row.text(2)?.to_owned(),
                    title: row.text_or_none(3)?.map(str::to_owned),
                    status: status_of(row.text(4)?),
                    entries: row.int(5)?,
                    last_at: At::of(row.int(1)?),
                    last_line: first_line(row.text(6)?),
                };
                rows.push((format!("{}.{}", row.int(1)?, row.int(0)?), thread));
                Ok(())
            })?;
            let is_more = rows.len() > limit;
            rows.truncate(limit);
            let cursor = rows.last().filter(|_| is_more).map(|(cursor, _)| cursor.clone());
            Ok(ThreadPage { threads: rows.into_iter().map(|(_, thread)| thread).collect(), cursor })
        })
    }

    /// Returns entries with the words of a query, those that fit best first.
    pub fn seek(&self, owner: &Owner, seeking: &Seeking) -> Result<Vec<Found>, ThreadError> {
        let terms = Terms::parse(&seeking.query)?;
        if !self.exists()? {
            return match &seeking.thread_id {
                Some(thread_id) => Err(ThreadError::Missing { thread_id: thread_id.clone(), near: Vec::new() }),
                None => Ok(Vec::new()),
            };
        }
        self.with(|database| {
            let mut tags = vec![owner_tag(owner)];
            if let Some(thread_id) = &seeking.thread_id {
                let sql = "SELECT number FROM threads WHERE owner = ?1 AND thread_id = ?2";
                let values = [owner.0.as_str().into(), thread_id.as_str().into()];
                match one_int(database, sql, &values)? {
                    // The tag of the owner would only make the search slower.
                    Some(number) => tags = vec![thread_tag(number)],
                    None => return Err(missing(database, owner, thread_id)?),
                }
            }
            tags.extend(seeking.kind.as_deref().map(kind_tag));
            let mut ranked = rank(database, &terms, &tags, seeking.since)?;
            ranked.truncate(seeking.limit);
            ranked.into_iter().map(|(id, found)| with_snippet(database, &terms, id, found)).collect()
        })
    }
}

/// Returns the latest entries that fit, the best first, each with its id.
fn rank(
    database: &mut dyn Database,
    terms: &Terms,
    tags: &[String],
    since: Option<jiff::Timestamp>,
) -> Result<Vec<(i64, Found)>, ThreadError> {
    let (latest, query) = match database.dialect() {
        Dialect::Sqlite => {
            let latest = "SELECT rowid AS id FROM words WHERE words MATCH ?1 ORDER BY rowid DESC LIMIT ?2";
            (latest, terms.for_sqlite(tags))
        }
        #[cfg(feature = "postgres")]
        Dialect::Postgres => {
            let latest = "SELECT id FROM entries WHERE words @@ ?1::text::tsquery ORDER BY id DESC LIMIT ?2";
            (latest, terms.for_postgres(tags))
        }
    };
    let sql = format!(
        "SELECT e.id, t.thread_id, e.seq, e.type, e.at, e.title, substr(e.content, 1, {RANKED_BYTES})
         FROM ({latest}) AS latest JOIN entries e ON e.id = latest.id JOIN threads t ON t.number = e.thread
         WHERE e.at >= ?3"
    );
    let since = since.map_or(i64::MIN, jiff::Timestamp::as_microsecond);
    let mut ranked = Vec::new();
    database.query(&sql, &[Value::Text(query), RANKED_MAX.into(), Value::Time(since)], &mut |row| {
        let found = Found {
            thread_id: row.text(1)?.to_owned(),
            seq: row.int(2)?,
            kind: row.text(3)?.to_owned(),
            snippet: String::new(),
            score: terms.score(row.text_or_none(5)?.unwrap_or_default(), row.text(6)?),
            at: At::of(row.int(4)?),
        };
        ranked.push((row.int(0)?, found));
        Ok(())
    })?;
    ranked.sort_by(|(a_id, a), (b_id, b)| b.score.total_cmp(&a.score).then(b_id.cmp(a_id)));
    Ok(ranked)
}

fn with_snippet(database: &mut dyn Database, terms: &Terms, id: i64, mut found: Found) -> Result<Found, ThreadError> {
    database.query("SELECT content FROM entries WHERE id = ?1", &[id.into()], &mut |row| {
        found.snippet = terms.snippet(row.text(0)?);
        Ok(())
    })?;
    Ok(found)
}

/// Reads up to `limit` entries that fit into an answer, and returns true if there are more.
fn page(database: &mut dyn Database, thread: i64, reading: &Reading) -> Result<(Vec<Entry>, bool), StoreError> {
    let direction = match reading.order {
        Order::Ascending => "ASC",
        Order::Descending => "DESC",
    };
    let mut wanted = vec![thread.into(), reading.after.unwrap_or(0).into(), reading.before.unwrap_or(i64::MAX).into()];
    let mut condition = "thread = ?1 AND seq > ?2 AND seq < ?3".to_owned();
    if let Some(kind) = &reading.kind {
        condition.push_str(" AND type = ?4");
        wanted.push(kind.as_str().into());
    }
    // First the sizes: all entries together could be larger than the memory.
    let limit = reading.limit;
    let sql = format!(
        "SELECT seq, octet_length(content) FROM entries WHERE {condition} ORDER BY seq {direction} LIMIT {}",
        limit.saturating_add(1)
    );
    let (mut count, mut last, mut bytes, mut is_more) = (0, 0, 0, false);
    database.query(&sql, &wanted, &mut |row| {
        bytes += row.int(1)?;
        is_more |= count == limit || count > 0 && bytes > ANSWER_BYTES_MAX;
        if !is_more {
            (count, last) = (count + 1, row.int(0)?);
        }
        Ok(())
    })?;
    if count == 0 {
        return Ok((Vec::new(), false));
    }
    let sql = format!(
        "SELECT seq, type, content, agent, author_user, at, reply_to FROM entries WHERE {condition}
         ORDER BY seq {direction} LIMIT {count}"
    );
    let mut entries = Vec::with_capacity(count);
    database.query(&sql, &wanted, &mut |row| {
        entries.push(entry(row)?);
        Ok(())
    })?;
    debug_assert!(entries.last().is_none_or(|entry| entry.seq == last));
    Ok((entries, is_more))
}

fn entry(row: &dyn Row) -> Result<Entry, StoreError> {
    let agent = row.text(3)?;
    Ok(Entry {
        seq: row.int(0)?,
        kind: row.text(1)?.to_owned(),
        content: row.text(2)?.to_owned(),
        author: row.text_or_none(4)?.map_or_else(|| agent.to_owned(), |user| format!("{agent} ({user})")),
        at: At::of(row.int(5)?),
        reply_to: row.int_or_none(6)?,
    })
}

/// Returns how many entries fit into a number of tokens. The first one always does: it is cut if it is too long.
fn fit(entries: &mut [Entry], tokens_max: Option<usize>) -> (usize, bool) {
    let Some(tokens_max) = tokens_max else { return (entries.len(), false) };
    // Four characters of ASCII or one other character count as one token.
    let cost = |c: char| if c.is_ascii() { 1 } else { 4 };
    let mut left = tokens_max.saturating_mul(4);
    for (place, entry) in entries.iter_mut().enumerate() {
        let costs: usize = entry.content.chars().map(cost).sum();
        if costs <= left {
            left -= costs;
            continue;
        }
        if place > 0 {
            return (place, false);
        }
        let fits = |c: &char| {
            let fits = cost(*c) <= left;
            left = left.saturating_sub(cost(*c));
            fits
        };
        let bytes: usize = entry.content.chars().take_while(fits).map(char::len_utf8).sum();
        entry.content.truncate(bytes);
        return (1, true);
    }
    (entries.len(), false)
}

/// Returns the error for a thread that the owner does not have.
fn missing(database: &mut dyn Database, owner: &Owner, thread_id: &str) -> Result<ThreadError, ThreadError> {
    let mut known = Vec::new();
    let sql = "SELECT thread_id FROM threads WHERE owner = ?1 ORDER BY at DESC LIMIT ?2";
    database.query(sql, &[owner.0.as_str().into(), NEAR_MAX.into()], &mut |row| {
        known.push(row.text(0)?.to_owned());
        Ok(())
    })?;
    let near = near_misses(thread_id, known.iter().map(String::as_str)).into_iter().map(str::to_owned).collect();
    Ok(ThreadError::Missing { thread_id: thread_id.to_owned(), near })
}

fn status_of(kind: &str) -> ThreadStatus {
    if kind == "close" { ThreadStatus::Closed } else { ThreadStatus::Open }
}

/// Returns the first line of a text that is not empty, cut.
fn first_line(text: &str) -> String {
    let mut line = in_one_line(text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default());
    if line.len() > LINE_BYTES_MAX {
        line.truncate(line.floor_char_boundary(LINE_BYTES_MAX));
        line.push('…');
    }
    line
}

fn parse_cursor(text: &str) -> Result<(i64, i64), ThreadError> {
    let parts = text.split_once('.').and_then(|(at, number)| Some((at.parse().ok()?, number.parse().ok()?)));
    parts.ok_or_else(|| {
        ThreadError::refused(format!("`{text}` is not a cursor"), "take the one at the end of the last page")
    })
}

//! Appends an entry to a thread: one transaction, in which no other process can append to the same thread.

use jiff::Timestamp;
use wieldy_core::{Caller, redact};

use super::chain::{PlacedEntry, end_message, origin, roll_message, signed};
use super::search::tag;
use super::{Owner, ThreadError, Threads};
use crate::audit::{Signer, to_hex};
use crate::database::{Database, Dialect, Value, one_int};
use crate::error::StoreError;
use crate::failpoint;
use crate::hash_chain::Hash;

/// Maximum size of the content of an entry.
pub(super) const CONTENT_BYTES_MAX: usize = 256 * 1024;
/// Maximum length of the id of a thread, of a title and of a key, in characters.
pub(super) const NAME_CHARACTERS_MAX: usize = 200;

/// An entry to append.
#[derive(Debug, Clone, Default)]
pub struct NewEntry {
    /// The id of the thread, which is made if it is new.
    pub thread_id: String,
    /// The type, such as `note`.
    pub kind: String,
    /// The text.
    pub content: String,
    /// The new title of the thread.
    pub title: Option<String>,
    /// The number of the entry that this one answers.
    pub reply_to: Option<i64>,
    /// The idempotency key: an entry with this key is written once.
    pub key: Option<String>,
}

/// An entry that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The number in the thread, from 1.
    pub seq: i64,
    /// True if the thread is new.
    pub created: bool,
    /// True if an earlier push with the same key has written the entry.
    pub repeated: bool,
    /// True if secrets were replaced.
    pub redacted: bool,
    /// The hash of the entry and of all entries before it, in hexadecimal digits.
    pub hash: String,
}

/// An entry without secrets, ready to be written.
struct Prepared<'a> {
    owner: &'a Owner,
    caller: &'a Caller,
    entry: NewEntry,
    push_key: Option<String>,
    redacted: bool,
}

/// The end of the thread that is appended to.
struct End {
    number: i64,
    origin: Hash,
    seq: i64,
    hash: Hash,
}

/// The number of threads, and the origin of the last one.
struct Roll {
    threads: i64,
    origin: Hash,
}

impl Threads {
    /// Appends an entry. When this returns, it is on the disk.
    pub fn push(&self, owner: &Owner, caller: &Caller, entry: NewEntry) -> Result<Pushed, ThreadError> {
        let prepared = Prepared::new(owner, caller, entry)?;
        let signer = self.signer()?;
        let _turn = match self.shared.address {
            crate::store::Address::Sqlite(_) => {
                Some(self.shared.writer.lock().unwrap_or_else(|held| held.into_inner()))
            }
            #[cfg(feature = "postgres")]
            crate::store::Address::Postgres(_) => None,
        };
        self.with(|database| {
            let (mut pushed, mut is_put) = (None, false);
            let done = database.in_transaction(&mut |database| {
                is_put = false;
                failpoint::reach("thread.begun");
                pushed = Some(prepared.append(database, signer)?);
                failpoint::reach("thread.put");
                is_put = true;
                Ok(())
            });
            failpoint::reach("thread.committed");
            match (done, pushed) {
                (Ok(()), Some(pushed)) => pushed,
                // SQLite knows that it wrote nothing if there was no space.
                (Err(error @ StoreError::Unavailable(_)), _) if is_put => Err(ThreadError::Unknown(error)),
                (Err(error), _) => Err(error.into()),
                (Ok(()), None) => Err(StoreError::Unavailable("the entry was not written".into()).into()),
            }
        })
    }
}

impl<'a> Prepared<'a> {
    /// Checks an entry and removes its secrets.
    fn new(owner: &'a Owner, caller: &'a Caller, entry: NewEntry) -> Result<Self, ThreadError> {
        check_name("thread_id", &entry.thread_id)?;
        entry.title.as_deref().map_or(Ok(()), |title| check_name("title", title))?;
        entry.key.as_deref().map_or(Ok(()), |key| check_name("key", key))?;
        let is_kind = |kind: &str| {
            (1..=40).contains(&kind.len()) && kind.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase())
        };
        if !is_kind(&entry.kind) {
            return Err(ThreadError::refused(
                format!("`{}` is no type of an entry", entry.kind),
                "`entry_type` has 1 to 40 of a to z and _, such as note, decision, question, result, error, close or \
                 reopen",
            ));
        }
        if entry.content.trim().is_empty() || entry.content.len() > CONTENT_BYTES_MAX {
            return Err(ThreadError::refused(
                format!("`content` has {} bytes", entry.content.len()),
                format!("give 1 to {CONTENT_BYTES_MAX} bytes of text; put what is longer into a file and name it here"),
            ));
        }
        if redact::text(&entry.thread_id) != entry.thread_id {
            return Err(ThreadError::refused("`thread_id` looks like a secret", "choose another name for the thread"));
        }
        // The tag keeps the key from being read in the database.
        let push_key = entry.key.as_deref().map(|key| blake3::hash(key.as_bytes()).to_hex().to_string());
        let (content, title) = (stored(&entry.content), entry.title.as_deref().map(stored));
        let redacted = content.1 || title.as_ref().is_some_and(|title| title.1);
        let entry = NewEntry { content: content.0, title: title.map(|title| title.0), ..entry };
        Ok(Self { owner, caller, entry, push_key, redacted })
    }

    /// Appends the entry within a transaction. A refusal has written nothing.
    fn append(
        &self,
        database: &mut dyn Database,
        signer: Option<&Signer>,
    ) -> Result<Result<Pushed, ThreadError>, StoreError> {
        let (mut found, mut roll) = (self.find(database)?, None);
        if found.is_none() {
            // On a server, another process may have made the thread while this one waited for its turn.
            roll = Some(lock_roll(database)?);
            found = self.find(database)?;
        }
        if let (Some(end), Some(_)) = (&found, &self.push_key)
            && let Some(earlier) = self.earlier(database, end.number)?
        {
            return Ok(earlier);
        }
        if let Some(reply_to) = self.entry.reply_to {
            let last = found.as_ref().map_or(0, |end| end.seq);
            if !(1..=last).contains(&reply_to) {
                return Ok(Err(no_such_entry(reply_to, last)));
            }
        }
        let now = Timestamp::now().as_microsecond();
        let created = found.is_none();
        let end = match (found, roll) {
            (Some(end), _) => end,
            (None, Some(roll)) => self.begin(database, &roll, signer, now)?,
            (None, None) => unreachable!("the roll is locked before a thread is made"),
        };
        let hash = self.put(database, &end, now)?;
        let seq = end.seq + 1;
        let (key, signature) = signed(signer, &end_message(&end.origin, seq, &hash));
        let sql = "UPDATE threads SET seq = ?2, at = ?3, hash = ?4, key = ?5, signature = ?6 WHERE number = ?1";
        let values = [
            end.number.into(),
            seq.into(),
            Value::Time(now),
            Value::Bytes(hash.to_vec()),
            key.as_deref().into(),
            signature.map_or(Value::Null, Value::Bytes),
        ];
        database.execute(sql, &values)?;
        Ok(Ok(Pushed { seq, created, repeated: false, redacted: self.redacted, hash: to_hex(&hash) }))
    }

    /// Finds the thread, and locks it against other writers.
    fn find(&self, database: &mut dyn Database) -> Result<Option<End>, StoreError> {
        let sql = format!(
            "SELECT number, origin, seq, hash FROM threads WHERE owner = ?1 AND thread_id = ?2{}",
            for_update(database)
        );
        let mut found = None;
        let values = [self.owner.0.as_str().into(), self.entry.thread_id.as_str().into()];
        database.query(&sql, &values, &mut |row| {
            found = Some(End {
                number: row.int(0)?,
                origin: hash(row.bytes(1)?)?,
                seq: row.int(2)?,
                hash: hash(row.bytes(3)?)?,
            });
            Ok(())
        })?;
        Ok(found)
    }

    /// Returns the entry that an earlier push with the same key has written, or why this cannot be the same push.
    fn earlier(
        &self,
        database: &mut dyn Database,
        thread: i64,
    ) -> Result<Option<Result<Pushed, ThreadError>>, StoreError> {
        let sql = "SELECT seq, hash, type, content, reply_to FROM entries WHERE thread = ?1 AND push_key = ?2";
        let mut found = None;
        database.query(sql, &[thread.into(), self.push_key.as_deref().into()], &mut |row| {
            let is_same = row.text(2)? == self.entry.kind
                && row.text(3)? == self.entry.content
                && row.int_or_none(4)? == self.entry.reply_to;
            let (seq, hash) = (row.int(0)?, to_hex(row.bytes(1)?));
            found = Some(match is_same {
                true => Ok(Pushed { seq, created: seq == 1, repeated: true, redacted: self.redacted, hash }),
                false => Err(ThreadError::refused(
                    format!("the key was used before for another entry, number {seq}"),
                    "use a key of its own for each entry",
                )),
            });
            Ok(())
        })?;
        Ok(found)
    }

    /// Makes the thread after the last one.
    fn begin(
        &self,
        database: &mut dyn Database,
        roll: &Roll,
        signer: Option<&Signer>,
        now: i64,
    ) -> Result<End, StoreError> {
        let number = roll.threads + 1;
        let (owner, thread_id) = (self.owner.0.as_str(), self.entry.thread_id.as_str());
        let origin = origin(&roll.origin, number, owner, thread_id, now);
        let sql = "INSERT INTO threads (number, owner, thread_id, created_at, origin, seq, at, hash)
                   VALUES (?1, ?2, ?3, ?4, ?5, 0, ?4, ?5)";
        let bytes = Value::Bytes(origin.to_vec());
        let values = [number.into(), owner.into(), thread_id.into(), Value::Time(now), bytes.clone()];
        database.execute(sql, &values)?;
        let (key, signature) = signed(signer, &roll_message(number, &origin));
        let sql = "UPDATE roll SET threads = ?1, origin = ?2, key = ?3, signature = ?4 WHERE one = 1";
        let signature = signature.map_or(Value::Null, Value::Bytes);
        database.execute(sql, &[number.into(), bytes, key.as_deref().into(), signature])?;
        Ok(End { number, origin, seq: 0, hash: origin })
    }

    /// Inserts the entry and its words, and returns its hash.
    fn put(&self, database: &mut dyn Database, end: &End, now: i64) -> Result<Hash, StoreError> {
        let (entry, caller) = (&self.entry, self.caller);
        let placed = PlacedEntry {
            seq: end.seq + 1,
            at: now,
            reply_to: entry.reply_to,
            kind: &entry.kind,
            agent: &caller.agent,
            tenant: caller.tenant.as_deref(),
            user: caller.user.as_deref(),
            title: entry.title.as_deref(),
            content: &entry.content,
            push_key: self.push_key.as_deref(),
        };
        let hash = placed.hash(&end.hash);
        let mut values = vec![
            end.number.into(),
            placed.seq.into(),
            Value::Time(now),
            placed.kind.into(),
            placed.agent.into(),
            placed.tenant.into(),
            placed.user.into(),
            placed.title.into(),
            placed.content.into(),
            placed.reply_to.into(),
            placed.push_key.into(),
            Value::Bytes(end.hash.to_vec()),
            Value::Bytes(hash.to_vec()),
        ];
        let tags = [owner_tag(self.owner), thread_tag(end.number), kind_tag(placed.kind)];
        let words = format!("{} {}", placed.title.unwrap_or_default(), placed.content);
        let columns =
            "thread, seq, at, type, agent, tenant, author_user, title, content, reply_to, push_key, prev_hash, hash";
        match database.dialect() {
            Dialect::Sqlite => {
                let sql = format!(
                    "INSERT INTO entries ({columns}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)
                     RETURNING id"
                );
                let id = one_int(database, &sql, &values)?;
                let sql = "INSERT INTO words (rowid, text, scope) VALUES (?1, ?2, ?3)";
                database.execute(sql, &[id.into(), words.as_str().into(), tags.join(" ").as_str().into()])?;
            }
            #[cfg(feature = "postgres")]
            Dialect::Postgres => {
                let sql = format!(
                    "INSERT INTO entries ({columns}, words)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14::text::tsvector)"
                );
                values.push(Value::Text(super::search::vector(&words, &tags)));
                database.execute(&sql, &values)?;
            }
        }
        Ok(hash)
    }
}

/// Reads the roll, and locks it: threads are numbered without gaps, so processes that make threads take turns.
fn lock_roll(database: &mut dyn Database) -> Result<Roll, StoreError> {
    let sql = format!("SELECT threads, origin FROM roll WHERE one = 1{}", for_update(database));
    let mut roll = None;
    database.query(&sql, &[], &mut |row| {
        roll = Some(Roll { threads: row.int(0)?, origin: hash(row.bytes(1)?)? });
        Ok(())
    })?;
    roll.ok_or_else(|| StoreError::Damaged("the number of threads is missing".into()))
}

/// Returns the tags of an entry in the index of words.
pub(super) fn owner_tag(owner: &Owner) -> String {
    tag('o', &owner.0)
}

pub(super) fn thread_tag(number: i64) -> String {
    tag('t', &number.to_string())
}

pub(super) fn kind_tag(kind: &str) -> String {
    tag('k', kind)
}

/// Returns the clause that locks rows of a query; in SQLite the transaction has locked everything.
fn for_update(database: &dyn Database) -> &'static str {
    match database.dialect() {
        Dialect::Sqlite => "",
        #[cfg(feature = "postgres")]
        Dialect::Postgres => " FOR UPDATE",
    }
}

pub(super) fn hash(bytes: &[u8]) -> Result<Hash, StoreError> {
    bytes.try_into().map_err(|_| StoreError::Damaged("a hash among the threads does not have 32 bytes".into()))
}

/// Returns the text as it is stored, and true if secrets were replaced. PostgreSQL's text has no NUL character.
fn stored(text: &str) -> (String, bool) {
    let clean = redact::text(text);
    let redacted = clean != text;
    (clean.replace('\0', "\u{fffd}"), redacted)
}

/// Checks the length and the characters of a name.
pub(super) fn check_name(which: &str, name: &str) -> Result<(), ThreadError> {
    let characters = name.chars().count();
    if !(1..=NAME_CHARACTERS_MAX).contains(&characters) || name.trim().is_empty() || name.contains(char::is_control) {
        return Err(ThreadError::refused(
            format!("`{which}` cannot be used"),
            format!("give 1 to {NAME_CHARACTERS_MAX} visible characters in one line"),
        ));
    }
    Ok(())
}

fn no_such_entry(reply_to: i64, last: i64) -> ThreadError {
    let suggestion = match last {
        0 => "leave out `reply_to`: the thread is new".to_owned(),
        last => format!("give the `seq` of an entry of this thread, 1 to {last}"),
    };
    ThreadError::refused(format!("`reply_to` is {reply_to}, and there is no such entry"), suggestion)
}

-- Times are microseconds since 1970 in UTC: datetime(at / 1000000, 'unixepoch') shows them.

-- The number of threads, and the end of the chain of their origins. The signature covers both.
CREATE TABLE roll (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    threads INTEGER NOT NULL,
    origin BLOB NOT NULL,
    key TEXT,
    signature BLOB
);
INSERT INTO roll (one, threads, origin) VALUES (1, 0, zeroblob(32));

-- A row for each thread, with the end of its chain of entries. The signature covers origin, seq and hash.
CREATE TABLE threads (
    -- without gaps, in the order in which threads were made
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    thread_id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- the hash of the columns above and of the origin of the thread before
    origin BLOB NOT NULL,
    -- the last entry
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    hash BLOB NOT NULL,
    key TEXT,
    signature BLOB,
    UNIQUE (owner, thread_id)
);
CREATE INDEX threads_at ON threads (owner, at, number);

-- The entries. Each is chained to the one before; the first to the origin of its thread.
CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    thread INTEGER NOT NULL,
    -- without gaps in its thread
    seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    type TEXT NOT NULL,
    agent TEXT NOT NULL,
    tenant TEXT,
    author_user TEXT,
    title TEXT,
    content TEXT NOT NULL,
    -- the seq of an earlier entry of the thread
    reply_to INTEGER,
    -- the hash of the idempotency key
    push_key TEXT,
    prev_hash BLOB NOT NULL,
    hash BLOB NOT NULL,
    UNIQUE (thread, seq)
);
CREATE UNIQUE INDEX entries_push_key ON entries (thread, push_key) WHERE push_key IS NOT NULL;
CREATE INDEX entries_status ON entries (thread, seq) WHERE type IN ('close', 'reopen');
CREATE INDEX entries_title ON entries (thread, seq) WHERE title IS NOT NULL;

-- The words of entries; a row has the id of its entry. `scope` has tags of the owner, the thread and the type.
CREATE VIRTUAL TABLE words USING fts5 (
    text, scope, content = '', columnsize = 0, tokenize = 'unicode61 remove_diacritics 2'
);

CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'entries of threads are never changed'); END;
CREATE TRIGGER entries_are_never_deleted BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'entries of threads are never deleted'); END;
CREATE TRIGGER threads_only_grow BEFORE UPDATE ON threads
WHEN NEW.seq <> OLD.seq + 1 OR NEW.number <> OLD.number OR NEW.owner <> OLD.owner OR NEW.thread_id <> OLD.thread_id
    OR NEW.created_at <> OLD.created_at OR NEW.origin <> OLD.origin
BEGIN SELECT RAISE(ABORT, 'threads only grow'); END;
CREATE TRIGGER threads_are_never_deleted BEFORE DELETE ON threads
BEGIN SELECT RAISE(ABORT, 'threads are never deleted'); END;

-- The same tables as in SQLite, in the schema `agent_threads`, which is the search path.

-- The number of threads, and the end of the chain of their origins. The signature covers both.
CREATE TABLE roll (
    one bigint PRIMARY KEY CHECK (one = 1),
    threads bigint NOT NULL,
    origin bytea NOT NULL,
    key text,
    signature bytea
);
INSERT INTO roll (one, threads, origin) VALUES (1, 0, decode(repeat('00', 32), 'hex'));

-- A row for each thread, with the end of its chain of entries. The signature covers origin, seq and hash.
CREATE TABLE threads (
    -- without gaps, in the order in which threads were made
    number bigint PRIMARY KEY,
    owner text NOT NULL,
    thread_id text NOT NULL,
    created_at timestamptz NOT NULL,
    -- the hash of the columns above and of the origin of the thread before
    origin bytea NOT NULL,
    -- the last entry
    seq bigint NOT NULL,
    at timestamptz NOT NULL,
    hash bytea NOT NULL,
    key text,
    signature bytea,
    UNIQUE (owner, thread_id)
) WITH (fillfactor = 50);
CREATE INDEX threads_at ON threads (owner, at, number);

-- The entries. Each is chained to the one before; the first to the origin of its thread.
CREATE TABLE entries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    thread bigint NOT NULL,
    -- without gaps in its thread
    seq bigint NOT NULL,
    at timestamptz NOT NULL,
    type text NOT NULL,
    agent text NOT NULL,
    tenant text,
    author_user text,
    title text,
    content text NOT NULL,
    -- the seq of an earlier entry of the thread
    reply_to bigint,
    -- the hash of the idempotency key
    push_key text,
    prev_hash bytea NOT NULL,
    hash bytea NOT NULL,
    -- the words, without accents, and tags of the owner, the thread and the type
    words tsvector NOT NULL,
    UNIQUE (thread, seq)
);
CREATE UNIQUE INDEX entries_push_key ON entries (thread, push_key) WHERE push_key IS NOT NULL;
CREATE INDEX entries_status ON entries (thread, seq) WHERE type IN ('close', 'reopen');
CREATE INDEX entries_title ON entries (thread, seq) WHERE title IS NOT NULL;
CREATE INDEX entries_words ON entries USING gin (words);

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION '% are never changed or deleted', TG_TABLE_NAME; END $$;
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON entries
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE TRIGGER threads_are_never_deleted BEFORE DELETE OR TRUNCATE ON threads
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
CREATE FUNCTION refuse_shrinking() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN
    IF NEW.seq <> OLD.seq + 1 OR (NEW.number, NEW.owner, NEW.thread_id, NEW.created_at, NEW.origin)
        IS DISTINCT FROM (OLD.number, OLD.owner, OLD.thread_id, OLD.created_at, OLD.origin) THEN
        RAISE EXCEPTION 'threads only grow';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER threads_only_grow BEFORE UPDATE ON threads FOR EACH ROW EXECUTE FUNCTION refuse_shrinking();

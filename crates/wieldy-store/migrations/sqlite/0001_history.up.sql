-- Times are microseconds since 1970 in UTC: datetime(started_at / 1000000, 'unixepoch') shows them.

-- Every life of an executor that writes here.
CREATE TABLE instances (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    version TEXT NOT NULL,
    host TEXT NOT NULL,
    process INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at INTEGER NOT NULL,
    ended_at INTEGER,
    -- the number of its last event that is kept
    last_seq INTEGER NOT NULL DEFAULT 0
);

-- The trail: what happened, in order, each record chained to the one before.
CREATE TABLE events (
    seq INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    -- the number that the executor gave it, without gaps; 0 for what the history says of itself
    instance_seq INTEGER NOT NULL,
    at INTEGER NOT NULL,
    name TEXT NOT NULL,
    -- the call that it happened to: the seq of its opening
    execution INTEGER,
    subject TEXT,
    data TEXT NOT NULL,
    hash BLOB NOT NULL
);
CREATE INDEX events_execution ON events (execution) WHERE execution IS NOT NULL;

-- The end of the trail.
CREATE TABLE trail (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL,
    -- how far along it the words of calls were taken
    words_seq INTEGER NOT NULL DEFAULT 0
);
INSERT INTO trail (one, seq, hash) VALUES (1, 0, zeroblob(32));

-- Ends of the trail that were signed.
CREATE TABLE heads (
    seq INTEGER PRIMARY KEY,
    hash BLOB NOT NULL,
    at INTEGER NOT NULL,
    key TEXT NOT NULL,
    signature BLOB NOT NULL
);

-- One row for each call, made from its events.
CREATE TABLE tool_executions (
    -- the seq of its opening
    id INTEGER PRIMARY KEY,
    execution_id TEXT NOT NULL,
    tool_name TEXT NOT NULL,
    parameters_json TEXT,
    status TEXT NOT NULL,
    error_message TEXT,
    error_code TEXT,
    started_at INTEGER NOT NULL,
    completed_at INTEGER,
    duration_ms REAL,
    output_size_bytes INTEGER,
    sandbox_id TEXT,
    agent_id TEXT NOT NULL,
    user_id TEXT,
    batch_id TEXT,
    session_id TEXT,
    tenant_id TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    usage_json TEXT,
    metadata_json TEXT,
    instance INTEGER NOT NULL
);
CREATE UNIQUE INDEX ix_tool_executions_execution_id ON tool_executions (execution_id);
CREATE INDEX ix_tool_executions_tool_name ON tool_executions (tool_name);
CREATE INDEX ix_tool_executions_started_at ON tool_executions (started_at DESC);
CREATE INDEX ix_tool_executions_status ON tool_executions (status);
CREATE INDEX ix_tool_executions_batch_id ON tool_executions (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX ix_tool_executions_session_id ON tool_executions (session_id) WHERE session_id IS NOT NULL;
CREATE INDEX ix_tool_executions_agent_id ON tool_executions (tenant_id, agent_id);
CREATE INDEX ix_tool_executions_open ON tool_executions (instance) WHERE completed_at IS NULL;

-- The words of calls that are over; a row has the id of its call. Many are taken together, a little later: one by one they
-- would take about a sixth of the writer's time.
CREATE VIRTUAL TABLE words USING fts5 (
    text, content = '', contentless_delete = 1, detail = none, tokenize = 'unicode61 remove_diacritics 0'
);

-- Results that somebody may still ask for, by task or by idempotency key.
CREATE TABLE answers (
    id INTEGER PRIMARY KEY,
    task INTEGER NOT NULL,
    key TEXT,
    fingerprint TEXT,
    result_json TEXT,
    expires_at INTEGER NOT NULL
);
CREATE INDEX answers_expires_at ON answers (expires_at);

-- How many calls of a day took about how long.
CREATE TABLE tallies (
    day INTEGER NOT NULL,
    tenant_id TEXT NOT NULL,
    agent_id TEXT NOT NULL,
    tool_name TEXT NOT NULL,
    status TEXT NOT NULL,
    bucket INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL,
    PRIMARY KEY (day, tenant_id, agent_id, tool_name, status, bucket)
) WITHOUT ROWID;

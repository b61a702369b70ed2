-- The folder that a call worked in. Calls of earlier programs have none.
ALTER TABLE tool_executions ADD COLUMN workspace TEXT;
CREATE INDEX ix_tool_executions_workspace ON tool_executions (workspace, id) WHERE workspace IS NOT NULL;

-- Idempotency keys of calls that are not closed yet: an executor runs a key only while it holds the row.
CREATE TABLE claims (
    key TEXT PRIMARY KEY,
    instance INTEGER NOT NULL,
    execution_id TEXT NOT NULL
);
-- The answer to a key is looked up whenever the key is claimed.
CREATE INDEX answers_key ON answers (key) WHERE key IS NOT NULL;

-- Every start, and every few seconds a running executor, looks for executors that have not ended.
CREATE INDEX instances_living ON instances (number) WHERE ended_at IS NULL;

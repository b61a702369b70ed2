-- The provider of the tool. Calls of earlier programs have none.
ALTER TABLE tool_executions ADD COLUMN provider TEXT;
CREATE INDEX ix_tool_executions_provider ON tool_executions (provider, id) WHERE provider IS NOT NULL;

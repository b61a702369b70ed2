DROP INDEX ix_tool_executions_provider;
ALTER TABLE tool_executions DROP COLUMN provider;

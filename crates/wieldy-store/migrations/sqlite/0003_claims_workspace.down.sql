DROP INDEX instances_living;
DROP INDEX answers_key;
DROP TABLE claims;
DROP INDEX ix_tool_executions_workspace;
ALTER TABLE tool_executions DROP COLUMN workspace;

ALTER TABLE tallies DROP COLUMN result_bytes;
ALTER TABLE tool_executions DROP COLUMN result_size_bytes;
DROP TABLE results;

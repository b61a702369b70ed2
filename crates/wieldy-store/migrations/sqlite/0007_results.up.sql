-- The recorded results of calls, apart from the trail, so that they can be dropped before it. The closing record of the
-- call has the hash.
CREATE TABLE results (
    -- the call: the seq of its opening
    id INTEGER PRIMARY KEY,
    result_json TEXT NOT NULL
);

-- The size of the recorded result, also after it was dropped.
ALTER TABLE tool_executions ADD COLUMN result_size_bytes INTEGER;
ALTER TABLE tallies ADD COLUMN result_bytes INTEGER NOT NULL DEFAULT 0;

-- The recorded results of calls, apart from the trail, so that they can be dropped before it. The closing record of the
-- call has the hash.
CREATE TABLE results (
    -- the call: the seq of its opening
    id bigint PRIMARY KEY,
    result_json text NOT NULL
);

-- The size of the recorded result, also after it was dropped.
ALTER TABLE tool_executions ADD COLUMN result_size_bytes bigint;
ALTER TABLE tallies ADD COLUMN result_bytes bigint NOT NULL DEFAULT 0;

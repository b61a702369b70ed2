-- Fills the tables with ?1 calls that never were, after 1970: for questions to a large history, not for proofs.
INSERT INTO instances (number, id, version, host, process, started_at, seen_at, ended_at)
VALUES (1, 'a made-up one', '0', 'nowhere', 1, 0, 0, 0);
INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, error_message, error_code, started_at,
    completed_at, duration_ms, output_size_bytes, sandbox_id, agent_id, user_id, batch_id, session_id, tenant_id, attempts,
    usage_json, metadata_json, instance)
WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < CALLS)
SELECT n,
    printf('%08x-0000-7000-8000-%012x', n, n * 7919 % 1000003),
    'tool_' || (n * 31 % 50),
    printf('{"path":"src/part_%d/file_%d.rs","pattern":"fn word%d","limit":%d,"note":"%s"}', n % 97, n % 9973, n % 1009, n % 13,
        substr('the quick brown fox jumps over the lazy dog and goes on to look at everything that an agent may want to read', 1 + n % 20)),
    CASE WHEN n % 53 = 0 THEN 'failed' WHEN n % 211 = 0 THEN 'timeout' WHEN n % 499 = 0 THEN 'permission_denied' ELSE 'success' END,
    CASE WHEN n % 53 = 0 THEN 'no such file: file_' || (n % 9973) END,
    CASE WHEN n % 53 = 0 THEN 'E3302' END,
    1790000000000000 + n * 2000000,
    1790000000000000 + n * 2000000 + n % 5000,
    (n % 5000) / 1000.0,
    n % 20000,
    NULL,
    'agent_' || (n % 20),
    NULL,
    CASE WHEN n % 10 = 0 THEN printf('batch-%d', n / 100) END,
    'session_' || (n / 500),
    CASE WHEN n % 3 = 0 THEN 'tenant_' || (n % 9) END,
    1, NULL, NULL, 1
FROM number;
INSERT INTO words (rowid, text)
SELECT id, tool_name || ' ' || parameters_json || ' ' || coalesce(error_message, '') FROM tool_executions;
INSERT INTO tallies (day, tenant_id, agent_id, tool_name, status, bucket, calls, output_bytes)
SELECT started_at / 86400000000, coalesce(tenant_id, ''), agent_id, tool_name, status, (id * 17) % 120, count(*), sum(output_size_bytes)
FROM tool_executions GROUP BY 1, 2, 3, 4, 5, 6;
INSERT INTO events (seq, instance, instance_seq, at, name, execution, subject, data, hash)
SELECT id, 1, id, started_at, 'tool.call.pending', id, '{}', '{}', zeroblob(32) FROM tool_executions;
UPDATE trail SET seq = CALLS, words_seq = CALLS;
ANALYZE;

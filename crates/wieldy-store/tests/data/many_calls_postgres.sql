-- The same made-up calls as in many_calls.sql, on a server. Indexes are made when the rows are there, which is quicker.
SET maintenance_work_mem = '256MB';
DO $$
DECLARE
    indexes text[];
    index_name text;
    definition text;
BEGIN
    SELECT array_agg(indexdef) INTO indexes FROM pg_indexes
    WHERE schemaname = 'agent_tools' AND tablename IN ('tool_executions', 'words') AND indexname NOT LIKE '%_pkey';
    FOR index_name IN SELECT indexname FROM pg_indexes
        WHERE schemaname = 'agent_tools' AND tablename IN ('tool_executions', 'words') AND indexname NOT LIKE '%_pkey'
    LOOP
        EXECUTE 'DROP INDEX ' || index_name;
    END LOOP;
    INSERT INTO instances (number, id, version, host, process, started_at, seen_at, ended_at)
    VALUES (1, 'a made-up one', '0', 'nowhere', 1, now(), now(), now());
    INSERT INTO tool_executions (id, execution_id, tool_name, parameters_json, status, error_message, error_code, started_at,
        completed_at, duration_ms, output_size_bytes, sandbox_id, agent_id, user_id, batch_id, session_id, tenant_id, attempts,
        usage_json, metadata_json, instance)
    SELECT n,
        lpad(to_hex(n), 8, '0') || '-0000-7000-8000-' || lpad(to_hex(n * 7919 % 1000003), 12, '0'),
        'tool_' || (n * 31 % 50),
        format('{"path":"src/part_%s/file_%s.rs","pattern":"fn word%s","limit":%s,"note":"%s"}', n % 97, n % 9973, n % 1009, n % 13,
            substr('the quick brown fox jumps over the lazy dog and goes on to look at everything that an agent may want to read',
                (1 + n % 20)::int)),
        CASE WHEN n % 53 = 0 THEN 'failed' WHEN n % 211 = 0 THEN 'timeout' WHEN n % 499 = 0 THEN 'permission_denied' ELSE 'success' END,
        CASE WHEN n % 53 = 0 THEN 'no such file: file_' || (n % 9973) END,
        CASE WHEN n % 53 = 0 THEN 'E3302' END,
        to_timestamp(1790000000 + n * 2),
        to_timestamp(1790000000 + n * 2) + n % 5000 * interval '1 microsecond',
        (n % 5000) / 1000.0,
        n % 20000,
        NULL,
        'agent_' || (n % 20),
        NULL,
        CASE WHEN n % 10 = 0 THEN 'batch-' || n / 100 END,
        'session_' || (n / 500),
        CASE WHEN n % 3 = 0 THEN 'tenant_' || (n % 9) END,
        1, NULL, NULL, 1
    FROM generate_series(1::bigint, CALLS) AS n;
    INSERT INTO words (id, words)
    SELECT id, translate(lower(tool_name || ' ' || parameters_json || ' ' || coalesce(error_message, '')), '{}":,./_', '        ')::tsvector
    FROM tool_executions;
    INSERT INTO tallies (day, tenant_id, agent_id, tool_name, status, bucket, calls, output_bytes)
    SELECT (extract(epoch FROM started_at)::bigint / 86400), coalesce(tenant_id, ''), agent_id, tool_name, status, (id * 17) % 120,
        count(*), sum(output_size_bytes)
    FROM tool_executions GROUP BY 1, 2, 3, 4, 5, 6;
    FOREACH definition IN ARRAY indexes LOOP
        EXECUTE definition;
    END LOOP;
    UPDATE trail SET seq = CALLS;
END $$;
ANALYZE;

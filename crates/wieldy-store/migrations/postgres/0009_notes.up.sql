-- Notes of agents to themselves that are not delivered yet.
CREATE TABLE notes (
    -- the seq of the record that left it
    id bigint PRIMARY KEY,
    note text NOT NULL UNIQUE,
    owner text NOT NULL,
    scope text NOT NULL,
    -- a later note of the scope with the same name replaces it
    replace_name text,
    -- the note as its record has it
    data text NOT NULL
);
CREATE INDEX notes_replace_name ON notes (scope, replace_name) WHERE replace_name IS NOT NULL;

-- A history that was used by an earlier program meanwhile gets its notes back.
INSERT INTO notes (id, note, owner, scope, replace_name, data)
SELECT e.seq, e.data::json ->> 'id', e.data::json ->> 'owner', e.data::json ->> 'scope', e.data::json ->> 'replace_name', e.data
FROM events e
WHERE e.name IN ('agent.self.notify', 'agent.self.remind') AND e.data::json ->> 'state' = 'pending'
    AND NOT EXISTS (
        SELECT 1 FROM events o
        WHERE o.seq > e.seq AND o.name IN ('agent.self.notify', 'agent.self.remind', 'agent.self.delivered')
            AND (o.data::json ->> 'id' = e.data::json ->> 'id' AND o.data::json ->> 'state' IN ('delivered', 'cancelled', 'expired')
                OR o.data::json ->> 'state' = 'pending' AND o.data::json ->> 'scope' = e.data::json ->> 'scope'
                    AND o.data::json ->> 'replace_name' = e.data::json ->> 'replace_name'));

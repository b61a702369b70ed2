-- Notes of agents to themselves that are not delivered yet.
CREATE TABLE notes (
    -- the seq of the record that left it
    id INTEGER PRIMARY KEY,
    note TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    scope TEXT NOT NULL,
    -- a later note of the scope with the same name replaces it
    replace_name TEXT,
    -- the note as its record has it
    data TEXT NOT NULL
);
CREATE INDEX notes_replace_name ON notes (scope, replace_name) WHERE replace_name IS NOT NULL;

-- A history that was used by an earlier program meanwhile gets its notes back.
INSERT INTO notes (id, note, owner, scope, replace_name, data)
SELECT e.seq, e.data ->> 'id', e.data ->> 'owner', e.data ->> 'scope', e.data ->> 'replace_name', e.data
FROM events e
WHERE e.name IN ('agent.self.notify', 'agent.self.remind') AND e.data ->> 'state' = 'pending'
    AND NOT EXISTS (
        SELECT 1 FROM events o
        WHERE o.seq > e.seq AND o.name IN ('agent.self.notify', 'agent.self.remind', 'agent.self.delivered')
            AND (o.data ->> 'id' = e.data ->> 'id' AND o.data ->> 'state' IN ('delivered', 'cancelled', 'expired')
                OR o.data ->> 'state' = 'pending' AND o.data ->> 'scope' = e.data ->> 'scope'
                    AND o.data ->> 'replace_name' = e.data ->> 'replace_name'));

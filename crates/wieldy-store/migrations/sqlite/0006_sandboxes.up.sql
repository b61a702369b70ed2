-- Sandboxes that were made, and whose end is not recorded yet.
CREATE TABLE sandboxes (
    -- the seq of the record that it was made
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL,
    sandbox TEXT NOT NULL,
    -- the executor that records the end, if the one that made it is dead
    closer INTEGER
);
CREATE INDEX sandboxes_sandbox ON sandboxes (instance, sandbox);

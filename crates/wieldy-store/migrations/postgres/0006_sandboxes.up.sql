-- Sandboxes that were made, and whose end is not recorded yet.
CREATE TABLE sandboxes (
    -- the seq of the record that it was made
    id bigint PRIMARY KEY,
    instance bigint NOT NULL,
    sandbox text NOT NULL,
    -- the executor that records the end, if the one that made it is dead
    closer bigint
);
CREATE INDEX sandboxes_sandbox ON sandboxes (instance, sandbox);

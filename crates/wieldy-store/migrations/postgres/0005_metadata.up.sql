-- The first entries of callers' metadata, by which calls are found: the hash of a name and its value.
CREATE TABLE metadata_entries (
    entry bytea NOT NULL,
    execution bigint NOT NULL,
    PRIMARY KEY (entry, execution)
);
-- Retention drops the entries of calls that are gone.
CREATE INDEX metadata_entries_execution ON metadata_entries (execution);

-- The first entries of callers' metadata, by which calls are found: the hash of a name and its value.
CREATE TABLE metadata_entries (
    entry BLOB NOT NULL,
    execution INTEGER NOT NULL,
    PRIMARY KEY (entry, execution)
) WITHOUT ROWID;
-- Retention drops the entries of calls that are gone.
CREATE INDEX metadata_entries_execution ON metadata_entries (execution);

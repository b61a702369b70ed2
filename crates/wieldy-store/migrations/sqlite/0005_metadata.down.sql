DROP TABLE metadata_entries;

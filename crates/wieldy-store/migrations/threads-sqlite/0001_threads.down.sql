DROP TABLE words;
DROP TRIGGER threads_are_never_deleted;
DROP TRIGGER entries_are_never_deleted;
DROP TABLE entries;
DROP TABLE threads;
DROP TABLE roll;

-- The words of recorded results; a row has the id of its call. They are taken after the words of calls.
CREATE VIRTUAL TABLE result_words USING fts5 (
    text, content = '', contentless_delete = 1, detail = none, tokenize = 'unicode61 remove_diacritics 0'
);

-- How far along the trail the words of results were taken.
CREATE TABLE result_index (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seq INTEGER NOT NULL
);
-- Records of earlier programs have no results.
INSERT INTO result_index (one, seq)
    SELECT 1, CASE WHEN EXISTS (SELECT 1 FROM results) THEN 0 ELSE seq END FROM trail;

-- The words of recorded results; a row has the id of its call. They are taken after the words of calls.
CREATE TABLE result_words (
    id bigint PRIMARY KEY,
    words tsvector NOT NULL
);
CREATE INDEX result_words_words ON result_words USING gin (words);

-- How far along the trail the words of results were taken.
CREATE TABLE result_index (
    one bigint PRIMARY KEY CHECK (one = 1),
    seq bigint NOT NULL
);
-- Records of earlier programs have no results.
INSERT INTO result_index (one, seq)
    SELECT 1, CASE WHEN EXISTS (SELECT 1 FROM results) THEN 0 ELSE seq END FROM trail;

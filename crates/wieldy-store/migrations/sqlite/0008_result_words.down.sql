DROP TABLE result_index;
DROP TABLE result_words;

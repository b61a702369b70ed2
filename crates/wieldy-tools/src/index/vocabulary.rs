//! The vocabulary of an index: all its words, each once and with a number.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use serde::{Deserialize, Serialize};

/// The separator of words in the text of a vocabulary. It is part of no word.
const SEPARATOR: u8 = b'\n';

/// A number for each word. Words are only added; [`Vocabulary::of`] makes one without those that are not used any more.
#[derive(Clone, Default)]
pub(crate) struct Vocabulary {
    /// All words, each with a separator behind it.
    text: String,
    /// The end of each word in the text, before its separator.
    ends: Vec<u32>,
    table: HashTable<u32>,
    hasher: foldhash::fast::RandomState,
}

/// A vocabulary as it is stored.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredVocabulary(String);

impl Vocabulary {
    /// Creates a vocabulary of these words, in this order.
    pub(super) fn of<'a>(words: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut new = Self::default();
        for word in words {
            new.number(word)?;
        }
        Some(new)
    }

    /// Returns the number of words.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the memory that it takes, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.text.capacity() + 4 * self.ends.capacity() + 5 * self.table.capacity()
    }

    /// Returns the number of a word, if it is known.
    pub(crate) fn find(&self, word: &str) -> Option<u32> {
        self.table.find(self.hasher.hash_one(word), |number| self.word(*number) == word).copied()
    }

    /// Returns the number of a word, which is added if it is new. Returns `None` if there is no room for it.
    pub(super) fn number(&mut self, word: &str) -> Option<u32> {
        if let Some(number) = self.find(word) {
            return Some(number);
        }
        let end = u32::try_from(self.text.len() + word.len()).ok().filter(|end| *end < u32::MAX)?;
        let number = u32::try_from(self.ends.len()).ok()?;
        self.text.push_str(word);
        self.text.push(char::from(SEPARATOR));
        self.ends.push(end);
        let (text, ends, hasher) = (&self.text, &self.ends, &self.hasher);
        let hash_of = |number: &u32| hasher.hash_one(word_in(text, ends, *number));
        self.table.insert_unique(hasher.hash_one(word), number, hash_of);
        Some(number)
    }

    /// Returns the word of a number of this vocabulary.
    pub(crate) fn word(&self, number: u32) -> &str {
        word_in(&self.text, &self.ends, number)
    }

    /// Returns all words with their numbers.
    pub(crate) fn words(&self) -> impl Iterator<Item = (u32, &str)> {
        (0..self.ends.len() as u32).map(|number| (number, self.word(number)))
    }

    /// Returns the numbers of the words in which a pattern matches. The pattern must match within single lines.
    pub(crate) fn matching(&self, pattern: &regex::Regex) -> Vec<u32> {
        let (mut found, mut from) = (Vec::new(), 0);
        while let Some(place) = pattern.find_at(&self.text, from) {
            let number = self.ends.partition_point(|end| (*end as usize) < place.start());
            let Some(end) = self.ends.get(number) else { break };
            found.push(number as u32);
            from = *end as usize + 1;
        }
        found
    }

    /// Returns the form to store.
    pub(super) fn stored(&self) -> StoredVocabulary {
        StoredVocabulary(self.text.clone())
    }

    /// Reads a stored form. Returns `None` if it is not one.
    pub(super) fn from_stored(stored: &StoredVocabulary) -> Option<Self> {
        let words = stored.0.strip_suffix(char::from(SEPARATOR)).map(|text| text.split(char::from(SEPARATOR)));
        let count = stored.0.bytes().filter(|byte| *byte == SEPARATOR).count();
        if words.is_none() && !stored.0.is_empty() {
            return None;
        }
        let vocabulary = Self::of(words.into_iter().flatten())?;
        // A word that is there twice would shift the numbers of all that follow.
        (vocabulary.len() == count).then_some(vocabulary)
    }
}

fn word_in<'a>(text: &'a str, ends: &[u32], number: u32) -> &'a str {
    let number = number as usize;
    let start = number.checked_sub(1).map_or(0, |before| ends[before] as usize + 1);
    &text[start..ends[number] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(words: &[&str]) -> Vocabulary {
        Vocabulary::of(words.iter().copied()).expect("there is room")
    }

    #[test]
    fn each_word_has_one_number_and_is_found_by_it() {
        let mut vocabulary = of(&["one", "two", "one", "three"]);
        assert_eq!((vocabulary.len(), vocabulary.find("two"), vocabulary.find("tw")), (3, Some(1), None));
        assert_eq!((vocabulary.number("three"), vocabulary.number("four")), (Some(2), Some(3)));
        let words: Vec<(u32, &str)> = vocabulary.words().collect();
        assert_eq!(words, [(0, "one"), (1, "two"), (2, "three"), (3, "four")]);
    }

    #[test]
    fn words_are_found_by_a_part_of_them() {
        let vocabulary = of(&["readFile", "file", "profile", "x", "FileFile"]);
        let found = |pattern: &str| vocabulary.matching(&regex::Regex::new(pattern).expect("a pattern"));
        assert_eq!((found("file"), found("(?i)file"), found("e")), (vec![1, 2], vec![0, 1, 2, 4], vec![0, 1, 2, 4]));
        assert_eq!(found("^x$"), Vec::<u32>::new(), "the text of all words is one line to the pattern");
        assert_eq!(Vocabulary::default().matching(&regex::Regex::new("a").expect("a pattern")), Vec::<u32>::new());
    }

    #[test]
    fn a_stored_vocabulary_comes_back_and_a_damaged_one_does_not() {
        let stored = of(&["one", "two"]).stored();
        let read = Vocabulary::from_stored(&stored).expect("it is whole");
        assert_eq!(read.words().collect::<Vec<_>>(), [(0, "one"), (1, "two")]);
        assert_eq!(Vocabulary::from_stored(&StoredVocabulary(String::new())).map(|empty| empty.len()), Some(0));
        for damaged in ["one", "one\none\n", "one\ntw"] {
            assert!(Vocabulary::from_stored(&StoredVocabulary(damaged.into())).is_none(), "{damaged:?}");
        }
    }
}

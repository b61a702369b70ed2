//! Ranked search for words: BM25 over the pieces of files, joined with the pieces that hold the phrase.

use std::path::Path;

use super::blocks::{Block, Piece, pieces};
use super::search::{Finds, Hit, Question};
use crate::files::{decode, shown};
use crate::index::FileId;
use crate::index::words::{is_word_char, parts, runs};

/// The usual constants of BM25.
const K1: f64 = 1.2;
const B: f64 = 0.75;
/// Shorter pieces count as having so many words: that a one-liner is short says little about it.
const PIECE_WORDS_MIN: u32 = 24;
/// The weight of the length of a file, in the choice of files. A long file may have the one piece that counts.
const FILE_B: f64 = 0.3;
/// The number of files whose pieces are compared.
const FILES_MAX: usize = 150;
/// Maximum number of words of a query. The others are left out.
const TERMS_MAX: usize = 32;
/// The weight of a word in the name of a definition, and in the path of its file.
const NAME_WEIGHT: f64 = 1.5;
const PATH_WEIGHT: f64 = 0.5;
/// The weight of tests, foreign and generated code, and of texts for people.
const LOW_WEIGHT: f64 = 0.6;
const PROSE_WEIGHT: f64 = 0.8;
/// The constant of reciprocal rank fusion.
const FUSION: f64 = 60.0;

/// English words that say nothing about code.
const STOP_WORDS: [&str; 64] = [
    "a", "about", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "code", "could", "did",
    "do", "does", "done", "every", "find", "for", "from", "get", "given", "has", "have", "how", "i", "if", "in",
    "into", "is", "it", "its", "me", "my", "of", "on", "or", "our", "returns", "should", "so", "some", "that", "the",
    "their", "them", "then", "there", "these", "they", "this", "to", "was", "we", "what", "when", "where", "which",
    "will", "with", "you",
];

/// A word of the query.
struct Term {
    text: String,
    stem: String,
    /// True for an identifier of several parts, which is looked for as a whole too.
    is_whole: bool,
    /// The weight by the number of files that hold it.
    weight: f64,
}

/// Returns true if the query has words that can be ranked by.
pub(super) fn has_terms(query: &str) -> bool {
    !terms_of(query).is_empty()
}

/// Returns the pieces of files that fit the query best.
pub(super) fn find(question: &Question<'_>, query: &str) -> Finds {
    let mut terms = terms_of(query);
    let masks = masks(question, &terms);
    let files = best_files(question, &mut terms, &masks);
    let mut scored = Vec::new();
    let mut finds = Finds::default();
    let ids: Vec<FileId> = files.iter().map(|(id, _)| *id).collect();
    // Missing syntax trees are made on two threads.
    question.view.facts(question.ask, &ids);
    let phrase = phrase_of(query);
    for id in ids {
        if question.ask.stop.is_cancelled() {
            finds.is_least = true;
            break;
        }
        match question.view.load_any(question.ask, id) {
            Ok((content, facts)) => {
                let blocks = facts.map(|facts| facts.blocks()).unwrap_or_default();
                score_pieces(question, &terms, &masks, (id, &content, blocks), &phrase, &mut scored);
            }
            Err(_) => finds.unsearched += 1,
        }
    }
    finish(&terms, &mut scored);
    finds.total = scored.len();
    let page = scored.into_iter().skip(question.offset).take(question.limit);
    finds.hits = page.map(|piece| piece.hit(question, &terms)).collect();
    finds
}

fn terms_of(query: &str) -> Vec<Term> {
    let mut terms: Vec<Term> = Vec::new();
    let mut add = |text: String, is_whole: bool| {
        let stem = if is_whole { text.clone() } else { stem(&text).to_owned() };
        let is_new = terms.iter().all(|term| (&term.stem, term.is_whole) != (&stem, is_whole));
        if is_new && terms.len() < TERMS_MAX {
            terms.push(Term { text, stem, is_whole, weight: 0.0 });
        }
    };
    for run in runs(query).take(4 * TERMS_MAX) {
        let parts = parts(run);
        if parts.len() > 1 {
            add(run.to_lowercase(), true);
        }
        for part in parts {
            let is_short = part.len() == 1 && part.is_ascii();
            if !is_short && !STOP_WORDS.contains(&part.as_str()) {
                add(part, false);
            }
        }
    }
    terms
}

/// Returns the beginning of a word that its usual endings leave, so that `parse`, `parsed` and `parsing` are one.
fn stem(word: &str) -> &str {
    const LEFT_MIN: usize = 3;
    if !word.is_ascii() {
        return word;
    }
    let strip = |end: &str| word.strip_suffix(end).filter(|left| left.len() >= LEFT_MIN);
    let plural = match strip("ies").or_else(|| strip("s").filter(|left| !left.ends_with(['s', 'u', 'i']))) {
        Some(left) => left,
        None => word,
    };
    let strip = |end: &str| plural.strip_suffix(end).filter(|left| left.len() >= LEFT_MIN);
    let plain = strip("ing").or_else(|| strip("ed")).or_else(|| strip("er")).unwrap_or(plural);
    let bytes = plain.as_bytes();
    let is_doubled =
        plain.len() > LEFT_MIN && plain.len() < plural.len() && bytes[bytes.len() - 1] == bytes[bytes.len() - 2];
    let plain = if is_doubled && !plain.ends_with(['l', 's']) { &plain[..plain.len() - 1] } else { plain };
    plain.strip_suffix(['e', 'y']).filter(|left| left.len() >= LEFT_MIN).unwrap_or(plain)
}

/// Returns for each word of the vocabulary the terms that it fits, as bits.
fn masks(question: &Question<'_>, terms: &[Term]) -> Vec<u32> {
    let vocabulary = question.view.vocabulary();
    let mut masks = vec![0; vocabulary.len()];
    for (place, term) in terms.iter().enumerate() {
        let Ok(pattern) = regex::Regex::new(&format!("(?i){}", regex::escape(&term.stem))) else { continue };
        for number in vocabulary.matching(&pattern) {
            let word = vocabulary.word(number);
            let fits = match term.is_whole {
                true => word.to_lowercase() == term.text,
                false => parts(word).iter().any(|part| stem(part) == term.stem),
            };
            if fits {
                masks[number as usize] |= 1 << place;
            }
        }
    }
    masks
}

/// Returns the files that fit best with their scores, and sets the weights of the terms.
fn best_files(question: &Question<'_>, terms: &mut [Term], masks: &[u32]) -> Vec<(FileId, f64)> {
    let mut files: Vec<(FileId, f64, Vec<u32>)> = Vec::new();
    let (mut with_term, mut all_words) = (vec![0_usize; terms.len()], 0.0);
    for id in &question.files {
        let mut counts = vec![0; 0];
        for (number, count) in question.view.words(*id) {
            let mask = masks.get(*number as usize).copied().unwrap_or_default();
            if mask != 0 {
                counts.resize(terms.len(), 0_u32);
                each_bit(mask, |term| counts[term] = counts[term].saturating_add(*count));
            }
        }
        let words = f64::from(question.view.words_of(*id));
        all_words += words;
        if !counts.is_empty() {
            counts.iter().enumerate().filter(|(_, count)| **count > 0).for_each(|(term, _)| with_term[term] += 1);
            files.push((*id, words, counts));
        }
    }
    let total = question.files.len() as f64;
    for (term, with) in terms.iter_mut().zip(&with_term) {
        let with = *with as f64;
        term.weight = (1.0 + (total - with + 0.5) / (with + 0.5)).ln();
    }
    let mean = (all_words / total.max(1.0)).max(1.0);
    let mut scored: Vec<(FileId, f64)> = files
        .into_iter()
        .map(|(id, words, counts)| {
            let in_path = mask_of_text(&question.view.file(id).path.to_string_lossy(), terms);
            let score = sum(terms, |term| {
                let path = if in_path & (1 << term) != 0 { PATH_WEIGHT } else { 0.0 };
                saturated(f64::from(counts[term]), words / mean, FILE_B) + path
            });
            (id, score * weight_of(question, id))
        })
        .collect();
    scored.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    scored.truncate(FILES_MAX);
    scored
}

/// A piece of a file with its counts.
struct ScoredPiece {
    id: FileId,
    piece: Piece,
    symbol: Option<Block>,
    /// The number of times that it has each term.
    counts: Vec<u32>,
    words: u32,
    /// The terms in its name and in the path.
    in_name: u32,
    in_path: u32,
    weight: f64,
    has_phrase: bool,
    /// The shown lines, with the number of the first.
    text: String,
    text_line: u32,
    score: f64,
}

fn score_pieces(
    question: &Question<'_>,
    terms: &[Term],
    masks: &[u32],
    (id, content, blocks): (FileId, &[u8], Vec<Block>),
    phrase: &[String],
    scored: &mut Vec<ScoredPiece>,
) {
    let Ok(decoded) = decode(content, None) else { return };
    let lines: Vec<&str> = decoded.text.lines().collect();
    let in_path = mask_of_text(&question.view.file(id).path.to_string_lossy(), terms);
    let vocabulary = question.view.vocabulary();
    for piece in pieces(&blocks, u32::try_from(lines.len()).unwrap_or(u32::MAX)) {
        let (mut counts, mut words) = (vec![0_u32; terms.len()], 0_u32);
        let (mut best, mut best_weight) = (piece.line, 0.0);
        let own = &lines[piece.line as usize - 1..piece.end_line as usize];
        for (line, text) in own.iter().enumerate() {
            let mut seen = 0;
            for run in runs(text) {
                words += 1;
                let number = vocabulary.find(run);
                let mask = number.and_then(|number| masks.get(number as usize)).copied().unwrap_or_default();
                each_bit(mask, |term| counts[term] += 1);
                seen |= mask;
            }
            let weight = sum(terms, |term| if seen & (1 << term) != 0 { 1.0 } else { 0.0 });
            if weight > best_weight {
                (best, best_weight) = (piece.line + line as u32, weight);
            }
        }
        if best_weight == 0.0 {
            continue;
        }
        let symbol = piece.block.map(|place| blocks[place].clone());
        let in_name = symbol.as_ref().map_or(0, |block| mask_of_text(&block.symbol, terms));
        let context = u32::from(question.context);
        let (from, to) = ((best.saturating_sub(context)).max(piece.line), (best + context).min(piece.end_line));
        let text = lines[from as usize - 1..to as usize].iter().map(|line| shown(line.as_bytes()));
        let text = text.collect::<Vec<_>>().join("\n");
        let (has_phrase, weight) = (has_phrase(own, phrase), weight_of(question, id));
        let text_line = from;
        scored.push(ScoredPiece {
            id,
            piece,
            symbol,
            counts,
            words: words.max(PIECE_WORDS_MIN),
            in_name,
            in_path,
            weight,
            has_phrase,
            text,
            text_line,
            score: 0.0,
        });
    }
}

/// Computes the scores and sorts the pieces by them.
fn finish(terms: &[Term], scored: &mut [ScoredPiece]) {
    let mean = scored.iter().map(|piece| f64::from(piece.words)).sum::<f64>() / scored.len().max(1) as f64;
    for piece in scored.iter_mut() {
        let body = sum(terms, |term| {
            let in_name = if piece.in_name & (1 << term) != 0 { NAME_WEIGHT } else { 0.0 };
            let in_path = if piece.in_path & (1 << term) != 0 { PATH_WEIGHT } else { 0.0 };
            saturated(f64::from(piece.counts[term]), f64::from(piece.words) / mean.max(1.0), B) + in_name + in_path
        });
        piece.score = body * piece.weight;
    }
    let order = |one: &ScoredPiece, other: &ScoredPiece| {
        other.score.total_cmp(&one.score).then((one.id, one.piece.line).cmp(&(other.id, other.piece.line)))
    };
    scored.sort_by(order);
    // The second list has the pieces with the phrase, in the same order.
    let (mut with_phrase, best) = (0.0, 2.0 / (FUSION + 1.0));
    for (rank, piece) in scored.iter_mut().enumerate() {
        let mut fused = 1.0 / (FUSION + 1.0 + rank as f64);
        if piece.has_phrase {
            with_phrase += 1.0;
            fused += 1.0 / (FUSION + with_phrase);
        }
        piece.score = fused / best;
    }
    scored.sort_by(order);
}

impl ScoredPiece {
    fn hit(self, question: &Question<'_>, terms: &[Term]) -> Hit {
        let matched = terms.iter().enumerate();
        let matched = matched.filter(|(place, _)| self.counts[*place] > 0 || self.in_name & (1 << place) != 0);
        Hit {
            path: question.view.file(self.id).path.to_string_lossy().into_owned(),
            line: u64::from(self.piece.line),
            end_line: u64::from(self.piece.end_line),
            text: self.text,
            text_line: u64::from(self.text_line),
            kind: self.symbol.as_ref().map(|block| block.kind.to_owned()),
            symbol: self.symbol.map(|block| block.symbol),
            score: (self.score * 1000.0).round() / 1000.0,
            matched: matched.map(|(_, term)| term.text.clone()).collect(),
            id: self.id,
        }
    }
}

/// Returns the weight of a file by its place and kind.
fn weight_of(question: &Question<'_>, id: FileId) -> f64 {
    let ending = question.view.file(id).path.extension().and_then(|ending| ending.to_str());
    match ending {
        _ if question.is_low(id) => LOW_WEIGHT,
        Some("md" | "markdown" | "rst" | "txt" | "adoc") => PROSE_WEIGHT,
        _ => 1.0,
    }
}

/// Returns the terms that a text has in its words, as bits.
fn mask_of_text(text: &str, terms: &[Term]) -> u32 {
    let mut mask = 0;
    for run in runs(text) {
        let parts = parts(run);
        for (place, term) in terms.iter().enumerate() {
            let fits = match term.is_whole {
                true => run.to_lowercase() == term.text,
                false => parts.iter().any(|part| stem(part) == term.stem),
            };
            if fits {
                mask |= 1 << place;
            }
        }
    }
    mask
}

/// Returns the words of a phrase in lower case; none for a single word, which is no phrase.
fn phrase_of(query: &str) -> Vec<String> {
    let words: Vec<String> = runs(query).map(str::to_lowercase).collect();
    if words.len() > 1 { words } else { Vec::new() }
}

/// Returns true if a line has all words of the phrase in a row.
fn has_phrase(lines: &[&str], phrase: &[String]) -> bool {
    let Some(first) = phrase.first() else { return false };
    lines.iter().any(|line| {
        // Most lines do not have the first word.
        let may = line.len() >= first.len() && line.chars().any(is_word_char);
        let words: Vec<String> = if may { runs(line).map(str::to_lowercase).collect() } else { Vec::new() };
        words.windows(phrase.len()).any(|window| window == phrase)
    })
}

fn saturated(count: f64, length: f64, b: f64) -> f64 {
    count * (K1 + 1.0) / (count + K1 * (1.0 - b + b * length))
}

fn sum(terms: &[Term], value: impl Fn(usize) -> f64) -> f64 {
    terms.iter().enumerate().map(|(place, term)| term.weight * value(place)).sum()
}

fn each_bit(mut mask: u32, mut act: impl FnMut(usize)) {
    while mask != 0 {
        act(mask.trailing_zeros() as usize);
        mask &= mask - 1;
    }
}

/// Returns true if the path is in a folder or is a file of tests, or of foreign code.
pub(super) fn is_low_path(path: &Path) -> bool {
    super::places::is_test(path) || super::places::is_foreign(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_a_word_have_the_same_stem() {
        for forms in [
            &["parse", "parsed", "parsing", "parses", "parser"][..],
            &["file", "files"],
            &["query", "queries"],
            &["stop", "stopped", "stopping"],
            &["class"],
            &["status"],
            &["\u{4f60}\u{597d}"],
        ] {
            let stems: Vec<&str> = forms.iter().map(|form| stem(form)).collect();
            assert!(stems.iter().all(|stem| *stem == stems[0]), "{stems:?}");
        }
        assert_eq!((stem("class"), stem("bus"), stem("is"), stem("used")), ("class", "bus", "is", "used"));
    }

    #[test]
    fn a_query_has_the_words_that_say_something() {
        let texts = |query: &str| terms_of(query).into_iter().map(|term| term.text).collect::<Vec<_>>();
        assert_eq!(texts("how do we parse the parsed_config?"), ["parse", "parsed_config", "config"]);
        assert_eq!(texts("where is the"), [""; 0]);
        assert_eq!(
            texts("\u{4f60}\u{597d}\u{4e16}"),
            ["\u{4f60}\u{597d}\u{4e16}", "\u{4f60}\u{597d}", "\u{597d}\u{4e16}"]
        );
        assert_eq!(texts(&"word1x ".repeat(100)), ["word1x", "word"]);
    }
}

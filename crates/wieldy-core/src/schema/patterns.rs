//! Pattern prices: bounds the work of matching a text with a regular expression.
//!
//! A regular expression takes time in proportion to its states and to the length of the text. One with look-around may
//! start again at every character, so it takes time in proportion to the square of the length.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, Hir, HirKind};

/// The highest prices among the patterns of a schema, in states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Price {
    linear: u64,
    square: u64,
}

/// The number of steps of a pattern that cost one unit of work.
const STEPS_PER_UNIT: u64 = 8;

impl Price {
    /// The price without any pattern.
    pub(super) const NONE: Self = Self { linear: 0, square: 0 };

    /// Returns the price of these patterns, each of which may be matched with the same text.
    pub(super) fn of<'a>(patterns: impl Iterator<Item = &'a str>) -> Self {
        patterns.fold(Self::NONE, |price, pattern| {
            let states = states_of(pattern);
            match looks_around(pattern) {
                true => Self { square: price.square.max(states), ..price },
                false => Self { linear: price.linear.max(states), ..price },
            }
        })
    }

    /// Returns the most units of work that one read of a text of this length can cost.
    pub(super) const fn units(self, length: u64) -> u64 {
        let square = length.saturating_mul(length).saturating_mul(self.square);
        length.saturating_mul(self.linear).saturating_add(square) / STEPS_PER_UNIT
    }
}

/// Returns true if a pattern has look-around, back-references or the like, so that it may read the text repeatedly.
fn looks_around(pattern: &str) -> bool {
    let refers = |at: usize| pattern.as_bytes().get(at + 1).is_some_and(|next| next.is_ascii_digit() || *next == b'k');
    ["(?=", "(?!", "(?<=", "(?<!", "(?>"].iter().any(|group| pattern.contains(group))
        || pattern.match_indices('\\').any(|(at, _)| refers(at))
}

/// Returns the rough number of states of a compiled pattern.
fn states_of(pattern: &str) -> u64 {
    match ParserBuilder::new().nest_limit(128).build().parse(pattern) {
        Ok(hir) => states(&hir),
        // `fancy_regex` accepts more syntax than this parser. Every number may be a number of repetitions.
        Err(_) => {
            let numbers = pattern.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse::<u64>().ok());
            numbers.fold(pattern.len() as u64, u64::saturating_add)
        }
    }
}

fn states(hir: &Hir) -> u64 {
    let all = |parts: &[Hir]| parts.iter().map(states).fold(1, u64::saturating_add);
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) | HirKind::Class(Class::Bytes(_)) => 1,
        HirKind::Literal(literal) => literal.0.len() as u64,
        // A character has up to four bytes.
        HirKind::Class(Class::Unicode(class)) if class.is_ascii() => 1,
        HirKind::Class(Class::Unicode(class)) => 4 * class.ranges().len() as u64,
        HirKind::Repetition(repeated) => {
            let times = repeated.max.unwrap_or(repeated.min).max(1);
            states(&repeated.sub).saturating_mul(times.into()).saturating_add(1)
        }
        HirKind::Capture(capture) => states(&capture.sub).saturating_add(2),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => all(parts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_costs_what_the_worst_pattern_may_do_with_it() {
        let units = |pattern: &str, length| Price::of(std::iter::once(pattern)).units(length);
        assert_eq!(units("^[a-z]+$", 80), 50);
        assert_eq!(units("[ab]*a[ab]{7000}c", 8), 7006);
        assert_eq!(units("([ab]{100}){100}", 8), 10_301);
        assert_eq!(units("(?=[ab]*a[ab]{3000}c)x", 80), 80 * 80 * 3022 / 8);
        assert_eq!(units(r"(a)\1", 80), 80 * 80 * 6 / 8);
        assert_eq!(Price::of(std::iter::empty()).units(u64::MAX), 0);
        assert_eq!(units("(?!a{99999999999})", u64::MAX), u64::MAX / 8);
    }
}

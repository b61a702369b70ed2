//! Search for a text or a regular expression, by the engine of the tool `Search`.

use std::collections::HashMap;

use super::blocks::around;
use super::search::{Finds, Hit, Question};
use crate::files::{COUNT_MAX, Case, FileError, FileSink, LineKind, LineSearch, ResultLine, open_beneath};
use crate::index::needs::{Candidates, Need};
use crate::index::{FileId, SkipReason};

/// Returns the lines that match, in the order of the question's files.
pub(super) fn find(question: &Question<'_>, pattern: &str, literal: bool) -> Result<Finds, FileError> {
    let (view, ask) = (question.view, question.ask);
    let mut lines = LineSearch::new(pattern, literal, Case::Smart, question.context, ask.stop)?;
    let need = if literal { Need::of_text(pattern) } else { Need::of_pattern(pattern) };
    let candidates = Candidates::new(view, !need.has_uppercase()).find(&need);
    let is_candidate = |id: &FileId| match &candidates {
        Some(ids) => ids.binary_search(id).is_ok(),
        None => view.file(*id).skipped != Some(SkipReason::Binary),
    };
    let mut finds = Finds::default();
    let end = question.offset + question.limit;
    for id in question.files.iter().filter(|id| is_candidate(id)) {
        if ask.stop.is_cancelled() || finds.total >= COUNT_MAX {
            finds.is_least = true;
            break;
        }
        let path = &view.file(*id).path;
        let mut sink = FileSink::within(COUNT_MAX - finds.total, end.saturating_sub(finds.total), usize::MAX);
        match open_beneath(ask.guard, path).and_then(|file| lines.file(file, &mut sink)) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(_) => {
                finds.unsearched += 1;
                continue;
            }
        }
        let before = finds.total;
        finds.total += sink.count();
        if sink.count() > 0 && before < end {
            let shown = hits(question, *id, &sink.into_lines(), pattern);
            finds.hits.extend(shown.into_iter().skip(question.offset.saturating_sub(before)));
        }
    }
    name_symbols(question, &mut finds.hits);
    Ok(finds)
}

/// Returns the matching lines of a file, each with the lines around it.
fn hits(question: &Question<'_>, id: FileId, lines: &[ResultLine], pattern: &str) -> Vec<Hit> {
    let context = u64::from(question.context);
    let mut hits = Vec::new();
    for (place, line) in lines.iter().enumerate().filter(|(_, line)| line.kind == LineKind::Match) {
        let is_near =
            |other: &&ResultLine| other.kind != LineKind::Gap && other.number.abs_diff(line.number) <= context;
        let before = lines[..place].iter().rev().take_while(is_near).count();
        let after = lines[place..].iter().take_while(is_near).count();
        let shown = &lines[place - before..place + after];
        hits.push(Hit {
            path: question.view.file(id).path.to_string_lossy().into_owned(),
            line: line.number,
            end_line: line.number,
            text: shown.iter().map(|line| line.text.as_str()).collect::<Vec<_>>().join("\n"),
            text_line: shown.first().map_or(line.number, |first| first.number),
            symbol: None,
            kind: None,
            score: if question.is_low(id) { 0.5 } else { 1.0 },
            matched: vec![pattern.to_owned()],
            id,
        });
    }
    hits
}

/// Sets the definitions around the hits, in files that have a syntax tree.
fn name_symbols(question: &Question<'_>, hits: &mut [Hit]) {
    let mut ids: Vec<FileId> = hits.iter().map(|hit| hit.id).collect();
    ids.dedup();
    let facts = question.view.facts(question.ask, &ids);
    let blocks: HashMap<FileId, _> =
        ids.into_iter().zip(facts).filter_map(|(id, facts)| Some((id, facts.ok()?.blocks()))).collect();
    for hit in hits {
        let Some(blocks) = blocks.get(&hit.id) else { continue };
        if let Some(place) = around(blocks, u32::try_from(hit.line).unwrap_or(u32::MAX)) {
            hit.symbol = Some(blocks[place].symbol.clone());
            hit.kind = Some(blocks[place].kind.to_owned());
        }
    }
}

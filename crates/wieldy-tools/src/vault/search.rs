//! `vault_search`: finds notes by words, phrases, tags, paths and properties, best first.
//!
//! The index says which notes may hold a word; phrases, words outside ASCII and everything that is shown are looked up
//! in the notes themselves.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use unicode_normalization::UnicodeNormalization;
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec, shown_in_line};

use super::folder::Vault;
use super::graph::Graph;
use super::markdown::{Lines, NoteFacts};
use super::names::{is_note, stem};
use super::projects::Vaults;
use super::query::{Query, stands_alone, words};
use crate::files::{Editable, FileError, blocking};
use crate::index::{Ask, View};

/// The usual constants of BM25.
const K1: f64 = 1.2;
const B: f64 = 0.75;
/// The number of times that a word in the name or title counts, and in a heading.
const TITLE_WEIGHT: f64 = 5.0;
const HEADING_WEIGHT: f64 = 2.0;
/// Maximum number of notes that are read to check phrases.
const CHECKED_MAX: usize = 3_000;
/// The length of a snippet in characters.
const SNIPPET: usize = 200;

/// A tool that searches notes.
pub(crate) struct VaultSearch {
    vaults: Arc<Vaults>,
}

/// A search in a vault.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct VaultSearchArgs {
    /// Words, "phrases", `tag:name`, `path:text`, `property:value`; `-` before one leaves notes out.
    #[schemars(length(min = 1, max = 1000))]
    query: String,
    /// Maximum number of notes.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 100))]
    limit: NonZeroU32,
    /// The vault.
    #[serde(default = "super::default_project")]
    #[schemars(length(min = 1, max = 100))]
    project_id: String,
    /// The folder in the vault.
    #[serde(default = "super::here")]
    #[schemars(length(min = 1, max = 4096))]
    folder: String,
    /// The `cursor` of the page before.
    #[schemars(length(max = 20))]
    cursor: Option<String>,
}

fn limit() -> NonZeroU32 {
    NonZeroU32::new(20).expect("not zero")
}

impl VaultSearch {
    pub(crate) fn new(vaults: Arc<Vaults>) -> Self {
        Self { vaults }
    }
}

impl Tool for VaultSearch {
    type Args = VaultSearchArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Searches the notes of a vault, best first, with the line that fits best.";
        super::spec("vault_search", description, 15)
            .scope("oracle")
            .read_only()
            .permission("files.read")
            .reads("folder")
    }

    fn names_of(&self, _: &str, _: &Confinement) -> Vec<String> {
        self.vaults.names_of("")
    }

    async fn run(&self, args: VaultSearchArgs, run: &Run) -> Result<Outcome, RunError> {
        let (vaults, run) = (self.vaults.clone(), run.clone());
        blocking(move || {
            let vault = vaults.of(run.caller(), &args.project_id)?;
            super::moving::finish_moves(&vault, &run)?;
            Ok(search(&vault, &args, &run)?)
        })
        .await
    }
}

fn search(vault: &Vault, args: &VaultSearchArgs, run: &Run) -> Result<Outcome, FileError> {
    let query = Query::of(&args.query)?;
    let folder = vault.plain(&args.folder)?;
    let (first, limit) = (super::offset(args.cursor.as_deref())?, args.limit.get() as usize);
    let (found, index) = vault.look(run, |view, graph, ask| {
        let search = Search { view, graph, ask, query: &query };
        let (ranked, mode, cut) = search.ranked(&folder);
        let total = ranked.len();
        let page = ranked.into_iter().skip(first).take(limit);
        let shown: Vec<Value> = page.filter_map(|(file, score)| search.shown(file, score)).collect();
        (shown, total, mode, cut)
    })?;
    let (results, total, mode, cut) = found;
    let next = first + limit;
    let mut lines: Vec<String> = results.iter().map(line).collect();
    if results.is_empty() {
        lines.push("no note fits; try fewer words".to_owned());
    } else if mode == "any" {
        lines.insert(0, "[no note has all of the words; these have some]".to_owned());
    }
    if next < total {
        lines.push(format!("[{} of {total} notes; go on with `cursor` {next}]", results.len()));
    }
    if cut {
        lines.push(format!("[only {CHECKED_MAX} notes were looked at; add words]"));
    }
    lines.extend(super::note_on_index(&index));
    let mut answer =
        json!({"results": results, "total": total, "matched": mode, "project_id": args.project_id, "index": index});
    if next < total {
        answer["cursor"] = json!(next.to_string());
    }
    let mut outcome = Outcome::text(lines.join("\n")).structured(answer);
    outcome.partial = next < total || cut || !index.complete;
    Ok(outcome)
}

fn line(result: &Value) -> String {
    let text = |key: &str| shown_in_line(result[key].as_str().unwrap_or_default());
    let heading = if text("heading").is_empty() { String::new() } else { format!("  [{}]", text("heading")) };
    format!("{}:{}  {}{heading}\n    {}", text("path"), result["line"], text("title"), text("snippet"))
}

/// A search in one state of the vault.
struct Search<'a> {
    view: &'a View<NoteFacts>,
    graph: &'a Graph,
    ask: &'a Ask<'a>,
    query: &'a Query,
}

/// A word of the query, with its numbers in the vocabulary.
struct Term {
    word: String,
    numbers: Vec<u32>,
    /// The number of notes that hold it.
    notes: f64,
}

impl Search<'_> {
    /// Returns the notes that fit, best first; if they have all words or only some; and if some were not looked at.
    fn ranked(&self, folder: &str) -> (Vec<(usize, f64)>, &'static str, bool) {
        let fits = |file: &usize| {
            let path = self.graph.names.path(*file);
            let facts = self.graph.facts[*file].as_deref();
            is_note(path)
                && super::below(folder, path).is_some()
                && self.query.filters.iter().all(|(filter, wanted)| filter.holds(path, facts) == *wanted)
        };
        let files: Vec<usize> = (0..self.graph.names.len()).filter(fits).collect();
        let terms = self.terms(&self.query.wanted);
        let unwanted = self.terms(&self.query.unwanted);
        let all = self.matching(&files, &terms, &unwanted, true);
        if !all.0.is_empty() || self.query.wanted.len() < 2 {
            return (all.0, "all", all.1);
        }
        let any = self.matching(&files, &terms, &unwanted, false);
        (any.0, "any", any.1)
    }

    /// Looks the words up in the vocabulary of the index, all in one pass.
    fn terms(&self, parts: &[Vec<String>]) -> HashMap<String, Term> {
        let mut terms: HashMap<String, Term> = HashMap::new();
        for word in parts.iter().flatten() {
            terms.insert(word.clone(), Term { word: word.clone(), numbers: Vec::new(), notes: 0.0 });
        }
        if terms.is_empty() {
            return terms;
        }
        for (number, known) in self.view.vocabulary().words() {
            for term in terms.values_mut() {
                if holds_word(known, &term.word) {
                    term.numbers.push(number);
                }
            }
        }
        for term in terms.values_mut() {
            term.notes = self.graph.notes().filter(|(file, _)| self.count(*file, term) > 0).count() as f64;
        }
        terms
    }

    fn count(&self, file: usize, term: &Term) -> u32 {
        let id = self.graph.ids[file];
        term.numbers.iter().map(|number| self.view.count(id, *number)).fold(0, u32::saturating_add)
    }

    fn matching(
        &self,
        files: &[usize],
        terms: &HashMap<String, Term>,
        unwanted: &HashMap<String, Term>,
        all: bool,
    ) -> (Vec<(usize, f64)>, bool) {
        let total: u64 = files.iter().map(|file| u64::from(self.view.words_of(self.graph.ids[*file]))).sum();
        let mean = (total as f64 / files.len().max(1) as f64).max(1.0);
        let (mut found, mut checked, mut cut) = (Vec::new(), 0, false);
        for file in files {
            let name: HashSet<String> = words(stem(self.graph.names.path(*file)))
                .chain(words(self.graph.title(*file)))
                .map(|(word, _)| word)
                .collect();
            let may_hold = |part: &Vec<String>, terms: &HashMap<String, Term>| {
                part.iter().all(|word| {
                    name.contains(word)
                        || terms.get(word).is_some_and(|term| self.count(*file, term) > 0)
                        || !self.view.has_words(self.graph.ids[*file])
                })
            };
            let mut held: Vec<&Vec<String>> = self.query.wanted.iter().filter(|part| may_hold(part, terms)).collect();
            if self.query.unwanted.iter().any(|part| !needs_text(part) && may_hold(part, unwanted)) {
                continue;
            }
            let is_unsure = held.iter().any(|part| needs_text(part))
                || self.query.unwanted.iter().any(|part| may_hold(part, unwanted))
                || !self.view.has_words(self.graph.ids[*file]);
            let is_enough = |held: &[&Vec<String>]| match all {
                true => held.len() == self.query.wanted.len(),
                false => !held.is_empty() || self.query.wanted.is_empty(),
            };
            if !is_enough(&held) {
                continue;
            }
            if is_unsure {
                checked += 1;
                if checked > CHECKED_MAX {
                    cut = true;
                    break;
                }
                let Some((text, _)) = self.text(*file) else { continue };
                let text: Vec<String> = words(&text).map(|(word, _)| word).collect();
                let is_in = |part: &Vec<String>| {
                    text.windows(part.len()).any(|window| window == part.as_slice())
                        || part.len() == 1 && name.contains(&part[0])
                };
                held.retain(|part| is_in(part));
                if !is_enough(&held) || self.query.unwanted.iter().any(is_in) {
                    continue;
                }
            }
            found.push((*file, self.score(*file, &held, terms, &name, mean)));
        }
        found.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
        (found, cut)
    }

    fn score(
        &self,
        file: usize,
        held: &[&Vec<String>],
        terms: &HashMap<String, Term>,
        name: &HashSet<String>,
        mean: f64,
    ) -> f64 {
        let headings: HashSet<String> = self.graph.facts[file]
            .iter()
            .flat_map(|facts| &facts.headings)
            .flat_map(|heading| words(&heading.text).map(|(word, _)| word))
            .collect();
        let length = f64::from(self.view.words_of(self.graph.ids[file])) / mean;
        let notes = self.graph.facts.len() as f64;
        let score = |word: &String| {
            let Some(term) = terms.get(word) else { return 0.0 };
            let count = f64::from(self.count(file, term))
                + if name.contains(word) { TITLE_WEIGHT } else { 0.0 }
                + if headings.contains(word) { HEADING_WEIGHT } else { 0.0 };
            let rarity = (1.0 + (notes - term.notes + 0.5).max(0.0) / (term.notes + 0.5)).ln();
            rarity * count * (K1 + 1.0) / (count + K1 * (1.0 - B + B * length))
        };
        held.iter().copied().flatten().map(score).sum()
    }

    /// Reads a note again, with the facts of just this content.
    fn text(&self, file: usize) -> Option<(String, Arc<NoteFacts>)> {
        let loaded = self.view.load(self.ask, self.graph.ids[file]).ok()?;
        Some((Editable::of(&loaded.content).ok()?.text, loaded.facts))
    }

    /// Returns a result with the line that holds most of the words.
    fn shown(&self, file: usize, score: f64) -> Option<Value> {
        let (text, facts) = self.text(file)?;
        let wanted: HashSet<&String> = self.query.wanted.iter().flatten().collect();
        let (mut best, mut start): (Option<(usize, usize, usize, &str)>, _) = (None, facts.body);
        for line in text[facts.body..].split_inclusive('\n') {
            let held: HashMap<String, usize> = words(line).filter(|(word, _)| wanted.contains(word)).collect();
            let is_better = best.as_ref().is_none_or(|(count, ..)| held.len() > *count);
            if is_better && !line.trim().is_empty() {
                let at = held.values().min().copied().unwrap_or_default();
                best = Some((held.len(), start, at, line));
            }
            start += line.len();
        }
        let (_, start, at, line) = best.unwrap_or((0, facts.body, 0, ""));
        let heading = facts.heading_above(start).map(|heading| heading.text.clone());
        Some(json!({
            "path": self.graph.names.path(file),
            "title": self.graph.title(file),
            "score": (score * 1000.0).round() / 1000.0,
            "snippet": snippet(line, at),
            "heading": heading,
            "line": Lines::of(&text).number(start),
            "tags": facts.tags,
        }))
    }
}

/// Returns true if the index alone cannot say that a note holds these words: in this order, or in one Unicode form.
fn needs_text(part: &[String]) -> bool {
    part.len() > 1 || part.iter().any(|word| !word.is_ascii())
}

/// Returns true if a word of the index is, or may hold, this word.
fn holds_word(known: &str, word: &str) -> bool {
    if known.is_ascii() && word.is_ascii() {
        return known.split('_').any(|part| part.eq_ignore_ascii_case(word));
    }
    if word.chars().any(stands_alone) {
        return known.contains(word);
    }
    // In the decomposed form, the marks of letters are no part of words, so the first letters are all there is.
    let first: String = word.nfd().take_while(|c| c.is_alphanumeric()).collect();
    words(known).any(|(own, _)| own == word || own == first)
}

fn snippet(line: &str, at: usize) -> String {
    let line = line.trim_end();
    let count = line.chars().count();
    let before = line[..at.min(line.len())].chars().count();
    let skip = if count <= SNIPPET { 0 } else { before.saturating_sub(SNIPPET / 4) };
    let shown: String = line.chars().skip(skip).take(SNIPPET).collect();
    let (first, last) = (if skip > 0 { "…" } else { "" }, if skip + SNIPPET < count { "…" } else { "" });
    format!("{first}{}{last}", shown.trim())
}

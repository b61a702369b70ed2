//! `get_repo_map`: the most important definitions of a project, within a number of tokens.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::asking::{Question, answer, declared};
use super::facts::Code;
use super::grading::last_name;
use super::rank::{Graph, Node, Ranks, is_listed};
use crate::files::FileError;
use crate::index::FileId;

/// Maximum number of graphs that are kept, of different views of the workspace.
const GRAPHS_MAX: usize = 4;
/// Maximum number of lines whose tokens are remembered.
const COUNTS_MAX: usize = 300_000;
/// Maximum number of files in the list of ranks.
const RANKING_MAX: usize = 50;
/// Candidates are looked at until their lines would fill the map this many times.
const CANDIDATES: usize = 4;

/// A tool that gives an overview of a project.
pub struct GetRepoMap {
    code: Arc<Code>,
}

/// An overview of a project.
#[derive(Deserialize, JsonSchema)]
pub struct GetRepoMapArgs {
    /// The folder or file to map.
    #[serde(default = "super::asking::everywhere")]
    scope: String,
    /// Maximum number of tokens of the map.
    #[serde(default = "tokens")]
    #[schemars(range(min = 256, max = 65_536))]
    max_tokens: u32,
    /// Files, folders and names that matter most.
    #[serde(default)]
    #[schemars(length(max = 100), inner(length(min = 1, max = 1000)))]
    focus: Vec<String>,
    /// Show tests too.
    #[serde(default)]
    tests: bool,
    /// The tokenizer that counts: `o200k` or `cl100k`.
    #[serde(default)]
    tokenizer: Tokenizer,
}

/// A tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Tokenizer {
    #[default]
    O200k,
    Cl100k,
}

impl Tokenizer {
    fn count(self, text: &str) -> usize {
        match self {
            Self::O200k => tiktoken_rs::o200k_base_singleton().count_ordinary(text),
            Self::Cl100k => tiktoken_rs::cl100k_base_singleton().count_ordinary(text),
        }
    }
}

fn tokens() -> u32 {
    4096
}

/// Derived data that is kept between maps: the graphs of views, and the tokens of lines.
#[derive(Default)]
pub(super) struct MapMemory {
    graphs: Mutex<Vec<(u64, Arc<Mapped>)>>,
    counts: Mutex<HashMap<(Tokenizer, Box<str>), u32>>,
}

/// The graph of one view, and the files of its nodes.
struct Mapped {
    graph: Graph,
    files: Vec<FileId>,
}

impl GetRepoMap {
    /// Creates the tool for this code.
    pub fn new(code: Arc<Code>) -> Self {
        Self { code }
    }
}

impl Tool for GetRepoMap {
    type Args = GetRepoMapArgs;

    fn spec(&self) -> ToolSpec {
        declared(
            "get_repo_map",
            "Gives an overview of a project: the signatures of its most used definitions by file, within a number of \
             tokens. `focus` names files or symbols that matter for the task.",
            45,
        )
        .reads("scope")
        .scope("oracle")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.code.workspace.names_of(thing)
    }

    async fn run(&self, args: GetRepoMapArgs, run: &Run) -> Result<Outcome, RunError> {
        Ok(answer(&self.code, run, args, |args| &args.scope, map).await?)
    }
}

fn map(question: &Question<'_>, args: &GetRepoMapArgs) -> Result<Outcome, FileError> {
    let mapped = mapped(question);
    if question.ask.stop.is_cancelled() {
        return Err(FileError::Stopped);
    }
    let (focus_files, focus_names, unknown) = focus(question, &mapped, &args.focus);
    let ranks = mapped.graph.ranks(&focus_files, &focus_names);
    let mut drawing = Drawing::new(question, args, &mapped, &ranks);
    drawing.fill();
    let (text, tokens) = drawing.text();
    let shown: HashSet<usize> = drawing.chosen.keys().copied().collect();
    let mut order: Vec<usize> = (0..mapped.files.len()).filter(|node| drawing.is_wanted(*node)).collect();
    order.sort_by(|one, other| ranks.files[*other].total_cmp(&ranks.files[*one]).then(one.cmp(other)));
    let ranking: Vec<_> = order
        .iter()
        .take(RANKING_MAX)
        .map(|node| {
            let rounded = (ranks.files[*node] * 1e6).round() / 1e6;
            json!({ "path": question.shown(mapped.files[*node]), "rank": rounded })
        })
        .collect();
    let symbols: usize = drawing.chosen.values().map(HashSet::len).sum();
    let total = question.view.files().filter(|(_, entry)| question.covers(&entry.path)).count();
    let mut shown_text = if text.is_empty() { "no code with definitions is here".to_owned() } else { text.clone() };
    for name in &unknown {
        shown_text.push_str(&format!("\n[`{name}` of `focus` is no file and no definition here]"));
    }
    if let Some(note) = question.note_on_state() {
        shown_text.push_str(&format!("\n{note}"));
    }
    Ok(Outcome::text(shown_text).structured(json!({
        "map_text": text, "tokens": tokens, "max_tokens": args.max_tokens, "files_shown": shown.len(),
        "files_total": total, "symbols_shown": symbols, "ranking": ranking, "focus_unknown": unknown,
        "index": question.state(),
    })))
}

/// Returns the graph of the view, made if it is not kept.
fn mapped(question: &Question<'_>) -> Arc<Mapped> {
    let memory = &question.code.memory;
    let generation = question.view.generation();
    let kept = memory.graphs.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, mapped)) = kept.iter().find(|(of, _)| *of == generation) {
        return mapped.clone();
    }
    drop(kept);
    let all: Vec<FileId> = question.view.files().map(|(id, _)| id).collect();
    let trees = question.trees(&all);
    let files = trees.iter().map(|(id, _)| *id).collect();
    let nodes = trees.into_iter().map(|(id, tree)| Node::new(tree, question.path(id))).collect();
    let mapped = Arc::new(Mapped { graph: Graph::new(nodes), files });
    // A graph of a view whose files were not all read would be given for the whole.
    if question.view.state().complete {
        let mut kept = memory.graphs.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(0, (generation, mapped.clone()));
        kept.truncate(GRAPHS_MAX);
    }
    mapped
}

/// Divides what the caller is interested in into files and names.
fn focus<'a>(
    question: &Question<'_>,
    mapped: &Mapped,
    wanted: &'a [String],
) -> (Vec<usize>, Vec<&'a str>, Vec<&'a str>) {
    let (mut files, mut names, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
    let defined =
        |name: &str| mapped.graph.nodes.iter().any(|node| node.tree.definitions.iter().any(|one| &*one.name == name));
    for text in wanted {
        let path = Path::new(text.trim_start_matches("./").trim_end_matches('/'));
        let below = mapped.files.iter().enumerate().filter(|(_, id)| question.path(**id).starts_with(path));
        let below: Vec<usize> = below.map(|(node, _)| node).collect();
        let name = last_name(text);
        if !below.is_empty() {
            files.extend(below);
        } else if defined(name) {
            names.push(name);
        } else {
            unknown.push(text.as_str());
        }
    }
    files.sort_unstable();
    files.dedup();
    (files, names, unknown)
}

/// A map that is being filled.
struct Drawing<'a> {
    question: &'a Question<'a>,
    args: &'a GetRepoMapArgs,
    mapped: &'a Mapped,
    ranks: &'a Ranks,
    /// The definitions that are shown of each file.
    chosen: BTreeMap<usize, HashSet<usize>>,
    /// The tokens of all chosen lines.
    tokens: usize,
    /// The definitions in the order in which they were chosen.
    order: Vec<(usize, usize)>,
}

impl<'a> Drawing<'a> {
    fn new(question: &'a Question<'a>, args: &'a GetRepoMapArgs, mapped: &'a Mapped, ranks: &'a Ranks) -> Self {
        Self { question, args, mapped, ranks, chosen: BTreeMap::new(), tokens: 0, order: Vec::new() }
    }

    fn is_wanted(&self, node: usize) -> bool {
        let is_test = self.mapped.graph.nodes[node].is_test;
        self.question.covers(self.question.path(self.mapped.files[node])) && (self.args.tests || !is_test)
    }

    /// Chooses lines until no other fits.
    fn fill(&mut self) {
        let tokens_max = self.args.max_tokens as usize;
        let candidates = self.candidates(tokens_max * CANDIDATES);
        loop {
            let before = self.order.len();
            let folders = self.folder_tokens();
            for (node, index) in &candidates {
                let room = tokens_max.saturating_sub(self.tokens + folders);
                self.choose(*node, *index, room);
            }
            if self.order.len() == before {
                break;
            }
            // The lines of folders became other ones while files were shown. Take back what is too much.
            while self.tokens + self.folder_tokens() > tokens_max && !self.order.is_empty() {
                self.take_back();
            }
            if self.order.len() <= before {
                break;
            }
        }
        while self.text().1 > tokens_max && !self.order.is_empty() {
            self.take_back();
        }
    }

    /// Returns the definitions with the highest rank for each token, from those with the highest rank.
    fn candidates(&self, tokens_max: usize) -> Vec<(usize, usize)> {
        let mut all: Vec<(usize, usize)> = Vec::new();
        for (node, file) in self.mapped.graph.nodes.iter().enumerate().filter(|(node, _)| self.is_wanted(*node)) {
            all.extend(
                (0..file.tree.definitions.len())
                    .filter(|index| is_listed(&file.tree, *index))
                    .map(|index| (node, index)),
            );
        }
        let rank = |(node, index): &(usize, usize)| self.ranks.definitions[*node][*index];
        all.sort_by(|one, other| rank(other).total_cmp(&rank(one)).then(one.cmp(other)));
        let mut sum = 0;
        let mut scored = Vec::new();
        for (node, index) in all {
            let tokens = self.count(&self.line(node, index));
            scored.push((rank(&(node, index)) / tokens as f64, (node, index)));
            sum += tokens;
            if sum > tokens_max {
                break;
            }
        }
        scored.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
        scored.into_iter().map(|(_, place)| place).collect()
    }

    /// Shows a definition with its file and the definitions around it, if there is room.
    fn choose(&mut self, node: usize, index: usize, room: usize) {
        let shown = self.chosen.get(&node);
        if shown.is_some_and(|shown| shown.contains(&index)) {
            return;
        }
        let mut needed = vec![index];
        while let Some(around) = self.around(node, needed[needed.len() - 1]) {
            if shown.is_some_and(|shown| shown.contains(&around)) || needed.contains(&around) {
                break;
            }
            needed.push(around);
        }
        let header = if shown.is_none() { self.count(&self.header(node)) } else { 0 };
        let cost: usize = header + needed.iter().map(|index| self.count(&self.line(node, *index))).sum::<usize>();
        if cost > room {
            return;
        }
        self.tokens += cost;
        let shown = self.chosen.entry(node).or_default();
        for index in needed.into_iter().rev() {
            shown.insert(index);
            self.order.push((node, index));
        }
    }

    /// Takes the last chosen definition back.
    fn take_back(&mut self) {
        let Some((node, index)) = self.order.pop() else { return };
        self.tokens -= self.count(&self.line(node, index)).min(self.tokens);
        let header = self.count(&self.header(node));
        if let Some(shown) = self.chosen.get_mut(&node) {
            shown.remove(&index);
            if shown.is_empty() {
                self.chosen.remove(&node);
                self.tokens -= header.min(self.tokens);
            }
        }
    }

    /// Returns the definition that a definition is shown below: around it, or its type in the same file.
    fn around(&self, node: usize, index: usize) -> Option<usize> {
        self.mapped.graph.nodes[node].around[index]
    }

    fn header(&self, node: usize) -> String {
        format!("{}\n", self.question.shown(self.mapped.files[node]))
    }

    fn line(&self, node: usize, index: usize) -> String {
        let mut depth = 1;
        let mut place = index;
        while let Some(around) = self.around(node, place).filter(|_| depth < 8) {
            depth += 1;
            place = around;
        }
        format!(
            "{:indent$}{}\n",
            "",
            self.mapped.graph.nodes[node].tree.definitions[index].signature,
            indent = 2 * depth
        )
    }

    /// Returns the tokens of a line. A line break ends every token, so the tokens of lines add up.
    fn count(&self, line: &str) -> usize {
        let counts = &self.question.code.memory.counts;
        let key = (self.args.tokenizer, Box::from(line));
        if let Some(count) = counts.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return *count as usize;
        }
        let count = self.args.tokenizer.count(line);
        let mut counts = counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= COUNTS_MAX {
            counts.clear();
        }
        counts.insert(key, count as u32);
        count
    }

    fn folder_tokens(&self) -> usize {
        self.folders().iter().map(|line| self.count(line)).sum()
    }

    /// Returns a line for each folder with files that are not shown. Where that would be a tenth of the map, only the
    /// upper folders are named.
    fn folders(&self) -> Vec<String> {
        let hidden = (0..self.mapped.files.len()).filter(|node| {
            self.question.covers(self.question.path(self.mapped.files[*node])) && !self.chosen.contains_key(node)
        });
        let hidden: Vec<&Path> = hidden.map(|node| self.question.path(self.mapped.files[node])).collect();
        let room = self.args.max_tokens as usize / 10;
        for depth in [3, 2, 1] {
            let mut counts: BTreeMap<String, usize> = BTreeMap::new();
            for path in &hidden {
                let parts: Vec<_> = path.parent().into_iter().flat_map(Path::components).take(depth).collect();
                let folder: String =
                    parts.iter().map(|part| format!("{}/", part.as_os_str().to_string_lossy())).collect();
                *counts.entry(if folder.is_empty() { "./".to_owned() } else { folder }).or_default() += 1;
            }
            let lines: Vec<String> =
                counts.iter().map(|(folder, count)| format!("{folder} {count} files not shown\n")).collect();
            if lines.iter().map(|line| self.count(line)).sum::<usize>() <= room {
                return lines;
            }
        }
        if hidden.is_empty() { Vec::new() } else { vec![format!("{} files not shown\n", hidden.len())] }
    }

    /// Returns the map and its tokens.
    fn text(&self) -> (String, usize) {
        let mut files: Vec<usize> = self.chosen.keys().copied().collect();
        files.sort_by(|one, other| self.ranks.files[*other].total_cmp(&self.ranks.files[*one]).then(one.cmp(other)));
        let mut text = String::new();
        for node in files {
            text.push_str(&self.header(node));
            let shown = &self.chosen[&node];
            let tree = &self.mapped.graph.nodes[node].tree;
            let mut below: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
            for index in shown {
                below
                    .entry(self.around(node, *index).filter(|around| shown.contains(around)))
                    .or_default()
                    .push(*index);
            }
            for list in below.values_mut() {
                list.sort_by_key(|index| std::cmp::Reverse((tree.definitions[*index].line, *index)));
            }
            let mut todo = below.remove(&None).unwrap_or_default();
            while let Some(index) = todo.pop() {
                text.push_str(&self.line(node, index));
                todo.extend(below.remove(&Some(index)).unwrap_or_default());
            }
        }
        self.folders().iter().for_each(|line| text.push_str(line));
        text.truncate(text.trim_end().len());
        let tokens = self.args.tokenizer.count(&text);
        (text, tokens)
    }
}

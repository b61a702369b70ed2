//! [`Graph`]: which files use the names of which others, and the importance of files and definitions by PageRank.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::language::Language;
use super::places::{is_foreign, is_test};
use super::tree::{Definition, FileTree, Kind, Occurrence, Use, Visibility};

/// The share of importance that is passed on by use; the rest comes from the personalization.
const DAMPING: f64 = 0.85;
const ROUNDS_MAX: usize = 100;
/// The rounds end when all ranks together change by less.
const CHANGE_MIN: f64 = 1e-9;
/// A name that more files define says little about each of them.
const DEFINERS_MANY: usize = 5;
/// The weight of names with many definers, of private names, and of uses in tests.
const LITTLE: f64 = 0.1;
/// The weight of names that the caller is interested in.
const FOCUS: f64 = 10.0;

/// A file of the graph.
pub(super) struct Node {
    pub(super) tree: Arc<FileTree>,
    pub(super) is_test: bool,
    /// True for code that others wrote.
    is_foreign: bool,
    /// The definition that each definition is a member of.
    pub(super) around: Vec<Option<usize>>,
}

impl Node {
    /// Creates the node of a file.
    pub(super) fn new(tree: Arc<FileTree>, path: &Path) -> Self {
        let around = tree.arounds();
        Self { tree, is_test: is_test(path), is_foreign: is_foreign(path), around }
    }
}

/// The uses between files: an edge goes from a file to each file that defines a name which it uses.
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
    /// The edges of node `n` are `edges[starts[n]..starts[n + 1]]`.
    starts: Vec<u32>,
    edges: Vec<Edge>,
    names: Vec<Box<str>>,
}

/// One name that a file uses and another defines.
#[derive(Clone, Copy)]
struct Edge {
    to: u32,
    name: u32,
    weight: f32,
}

/// The uses of a name in a file.
#[derive(Clone, Copy, Default)]
struct Uses {
    /// Uses by the name alone, and imports.
    free: u32,
    /// Uses as a member of something else.
    member: u32,
}

impl Uses {
    fn count(&mut self, one: &Occurrence) {
        match one.member && one.kind != Use::Import {
            true => self.member += 1,
            false => self.free += 1,
        }
    }

    /// Returns the uses that can mean a definition. A member is never used by its name alone. In languages where a
    /// function is seldom reached through its module, a member's name hardly means the function.
    fn of(self, definition: &Definition, language: Language) -> f64 {
        let (free, member) = (f64::from(self.free), f64::from(self.member));
        let has_paths = matches!(language, Language::Rust | Language::Go | Language::Cpp | Language::C);
        match definition.container.is_some() {
            true => member,
            false => free + member * if has_paths { 1.0 } else { LITTLE },
        }
    }
}

/// The importance of files and of their definitions.
pub(super) struct Ranks {
    pub(super) files: Vec<f64>,
    /// The importance of each definition that is listed, by file and index.
    pub(super) definitions: Vec<Vec<f64>>,
}

/// Returns true if a definition can be a line of a map: fields, variants, variables and what is inside functions are
/// not.
pub(super) fn is_listed(tree: &FileTree, index: usize) -> bool {
    let definition = &tree.definitions[index];
    let around = definition.parent.map(|parent| tree.definitions[parent as usize].kind);
    let is_small = matches!(definition.kind, Kind::Field | Kind::Variant | Kind::Variable);
    let is_inner = matches!(around, Some(Kind::Function | Kind::Method | Kind::Const | Kind::Variable));
    let is_elsewhere = definition.declared && definition.kind == Kind::Module;
    !(is_small || is_inner || is_elsewhere || is_in_tests(definition))
}

/// Returns true for a module of tests inside a file, and for what is in it.
fn is_in_tests(definition: &Definition) -> bool {
    let names_tests = |name: &str| name == "tests" || name == "test";
    definition.kind == Kind::Module && names_tests(&definition.name)
        || definition.container.as_ref().is_some_and(|around| around.split("::").any(names_tests))
}

/// Returns the weight of a file's definition for uses in other files: those hardly mean a private one. Members of many
/// types share names such as `len`.
fn reach_of(definition: &Definition, definers: usize) -> f64 {
    let is_member = definition.container.is_some() && matches!(definition.kind, Kind::Method | Kind::Type);
    let is_hidden = definition.visibility == Visibility::Private;
    if is_hidden || is_member && definers > 1 { LITTLE } else { 1.0 }
}

impl Graph {
    /// Makes the graph of files. The order of files decides nothing but the order of equal ranks.
    pub(super) fn new(nodes: Vec<Node>) -> Self {
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let mut definers: Vec<Vec<(u32, u32)>> = Vec::new();
        for (number, node) in nodes.iter().enumerate() {
            for (index, definition) in node.tree.definitions.iter().enumerate() {
                if !is_listed(&node.tree, index) {
                    continue;
                }
                let name = *numbers.entry(&definition.name).or_insert_with(|| {
                    definers.push(Vec::new());
                    definers.len() as u32 - 1
                });
                let files = &mut definers[name as usize];
                if files.last().is_none_or(|(file, _)| *file != number as u32) {
                    files.push((number as u32, index as u32));
                }
            }
        }
        let (mut starts, mut edges) = (vec![0], Vec::new());
        for (number, node) in nodes.iter().enumerate() {
            let mut counts = vec![Uses::default(); node.tree.names.len()];
            node.tree.occurrences.iter().for_each(|one| counts[one.name as usize].count(one));
            for (name, uses) in node.tree.names.iter().zip(counts) {
                let Some(known) = numbers.get(&**name) else { continue };
                // A name of another language is another name.
                let own = family(node.tree.language);
                let same = |(file, _): &&(u32, u32)| family(nodes[*file as usize].tree.language) == own;
                let all = &definers[*known as usize];
                let count_of_definers = all.iter().filter(same).count();
                let weight = weight_of(name, count_of_definers, node.is_test) / count_of_definers.max(1) as f64;
                let files = all.iter().filter(same).filter(|(file, _)| *file != number as u32);
                edges.extend(files.map(|(file, first)| {
                    let node = &nodes[*file as usize];
                    let definition = &node.tree.definitions[*first as usize];
                    let little = if node.is_foreign { LITTLE } else { 1.0 };
                    let reach = reach_of(definition, count_of_definers) * uses.of(definition, own).sqrt();
                    Edge { to: *file, name: *known, weight: (weight * little * reach) as f32 }
                }));
            }
            starts.push(edges.len() as u32);
        }
        let mut names = vec![Box::from(""); definers.len()];
        numbers.iter().for_each(|(name, number)| names[*number as usize] = Box::from(*name));
        Self { nodes, starts, edges, names }
    }

    /// Returns the ranks, where these files and names matter most.
    pub(super) fn ranks(&self, focus_files: &[usize], focus_names: &[&str]) -> Ranks {
        let wanted: Vec<bool> = self.names.iter().map(|name| focus_names.contains(&&**name)).collect();
        let weight = |edge: &Edge| f64::from(edge.weight) * if wanted[edge.name as usize] { FOCUS } else { 1.0 };
        let sums: Vec<f64> = (0..self.nodes.len()).map(|node| self.edges_of(node).iter().map(weight).sum()).collect();
        let start = self.personalization(focus_files);
        let mut files = start.clone();
        for _ in 0..ROUNDS_MAX {
            // The rank of files that use nothing is spread over all.
            let idle: f64 = files.iter().zip(&sums).filter(|(_, sum)| **sum == 0.0).map(|(rank, _)| *rank).sum();
            let mut next: Vec<f64> = start.iter().map(|own| own * (1.0 - DAMPING + DAMPING * idle)).collect();
            for (node, sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
                let share = DAMPING * files[node] / sum;
                self.edges_of(node).iter().for_each(|edge| next[edge.to as usize] += share * weight(edge));
            }
            let change: f64 = files.iter().zip(&next).map(|(one, other)| (one - other).abs()).sum();
            files = next;
            if change < CHANGE_MIN {
                break;
            }
        }
        let definitions = self.of_definitions(&files, &sums, &wanted, weight);
        Ranks { files, definitions }
    }

    /// Gives each definition the rank that flows to its file by its name, and a little of the file's own.
    fn of_definitions(
        &self,
        files: &[f64],
        sums: &[f64],
        wanted: &[bool],
        weight: impl Fn(&Edge) -> f64,
    ) -> Vec<Vec<f64>> {
        let mut by_name: HashMap<(u32, u32), f64> = HashMap::new();
        for (node, sum) in sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            for edge in self.edges_of(node) {
                *by_name.entry((edge.to, edge.name)).or_default() += files[node] * weight(edge) / sum;
            }
        }
        let numbers: HashMap<&str, u32> =
            self.names.iter().enumerate().map(|(at, name)| (&**name, at as u32)).collect();
        let of_node = |(node, file): (usize, &Node)| {
            let count = file.tree.definitions.len().max(1) as f64;
            let of_definition = |(index, definition): (usize, &Definition)| {
                let Some(name) = numbers.get(&*definition.name).filter(|_| is_listed(&file.tree, index)) else {
                    return 0.0;
                };
                let used = by_name.get(&(node as u32, *name)).copied().unwrap_or(0.0);
                let own = 0.1 * files[node] / count;
                (used + own) * if wanted[*name as usize] { FOCUS } else { 1.0 }
            };
            file.tree.definitions.iter().enumerate().map(of_definition).collect()
        };
        self.nodes.iter().enumerate().map(of_node).collect()
    }

    fn personalization(&self, focus: &[usize]) -> Vec<f64> {
        let mut own: Vec<f64> =
            self.nodes.iter().map(|node| if node.is_test || node.is_foreign { LITTLE } else { 1.0 }).collect();
        let boost = self.nodes.len() as f64 / focus.len().max(1) as f64;
        focus.iter().for_each(|node| own[*node] += FOCUS * boost);
        let sum: f64 = own.iter().sum();
        own.iter_mut().for_each(|rank| *rank /= sum.max(f64::MIN_POSITIVE));
        own
    }

    fn edges_of(&self, node: usize) -> &[Edge] {
        &self.edges[self.starts[node] as usize..self.starts[node + 1] as usize]
    }
}

/// Returns one language for all that share their definitions.
fn family(language: Language) -> Language {
    match language {
        Language::Typescript | Language::Tsx => Language::Javascript,
        Language::Cpp => Language::C,
        other => other,
    }
}

fn weight_of(name: &str, definers: usize, in_test: bool) -> f64 {
    let common = if definers > DEFINERS_MANY { LITTLE } else { 1.0 };
    let private = if name.starts_with('_') || name.len() < 3 { LITTLE } else { 1.0 };
    let test = if in_test { LITTLE } else { 1.0 };
    common * private * test
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::code::language::Language;
    use crate::code::parse::extract;

    fn graph(files: &[&str]) -> Graph {
        let node = |text: &&str| {
            let tree = extract(Language::Python, text.as_bytes(), Duration::from_secs(60), &CancellationToken::new());
            Node::new(Arc::new(tree.expect("it is small")), Path::new("a.py"))
        };
        Graph::new(files.iter().map(node).collect())
    }

    #[test]
    fn a_file_that_others_use_ranks_above_them_and_ranks_sum_to_one() {
        let graph = graph(&["def used(): pass\ndef idle(): pass\n", "used()\nused()\n", "used()\ndef other(): pass\n"]);
        let ranks = graph.ranks(&[], &[]);
        assert!(ranks.files[0] > 2.0 * ranks.files[1], "{:?}", ranks.files);
        assert!(ranks.definitions[0][0] > 10.0 * ranks.definitions[0][1], "{:?}", ranks.definitions);
        assert!((ranks.files.iter().sum::<f64>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_file_and_a_name_in_focus_gain_rank() {
        let graph = graph(&["def one(): pass\n", "def two(): pass\n", "one()\ntwo()\n"]);
        let plain = graph.ranks(&[], &[]);
        assert_eq!(plain.files[0], plain.files[1]);
        assert!(graph.ranks(&[1], &[]).files[1] > plain.files[1]);
        let named = graph.ranks(&[], &["two"]);
        assert!(named.definitions[1][0] > named.definitions[0][0]);
    }

    #[test]
    fn no_files_have_no_ranks() {
        assert_eq!(graph(&[]).ranks(&[], &["x"]).files, Vec::<f64>::new());
    }
}

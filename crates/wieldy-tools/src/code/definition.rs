//! `find_definition`: finds where a symbol is defined.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::asking::{Question, Symbol, answer, declared, lines_of, nearness};
use super::facts::Code;
use super::modules::Modules;
use super::places::is_test;
use super::tree::{Definition, FileTree, Kind};
use crate::files::FileError;
use crate::index::FileId;

/// Maximum number of source lines that are shown of the best definition.
const SOURCE_LINES_MAX: u32 = 60;
/// Maximum number of lines of documentation that are shown.
const DOC_LINES_MAX: u32 = 20;
/// Maximum number of lines that are shown where a word occurs that has no definition.
const OCCURRENCES_MAX: usize = 5;
/// Maximum number of re-exports that are shown.
const WAYS_MAX: usize = 5;

/// A tool that finds definitions.
pub struct FindDefinition {
    code: Arc<Code>,
}

/// A search for the definition of a symbol.
#[derive(Deserialize, JsonSchema)]
pub struct FindDefinitionArgs {
    /// The symbol: `name`, `Type::name`, `Class.method` or `module::name`.
    #[schemars(length(min = 1, max = 1000))]
    symbol: String,
    /// The folder or file to look in.
    #[serde(default = "super::asking::everywhere")]
    scope: String,
    /// Only definitions of this kind.
    kind: Option<Kind>,
    /// A place where the symbol is used. Imports of that file decide between definitions of the same name.
    from: Option<Place>,
    /// Maximum number of other definitions to list.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 100))]
    limit: u32,
}

/// A place in a file.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
pub(super) struct Place {
    /// The file.
    #[schemars(length(min = 1, max = 4096))]
    pub(super) path: String,
    /// The line, from 1.
    #[serde(default)]
    pub(super) line: u32,
}

fn limit() -> u32 {
    5
}

impl FindDefinition {
    /// Creates the tool for this code.
    pub fn new(code: Arc<Code>) -> Self {
        Self { code }
    }
}

impl Tool for FindDefinition {
    type Args = FindDefinitionArgs;

    fn spec(&self) -> ToolSpec {
        declared(
            "find_definition",
            "Finds where a function, type, field, constant or module is defined, and shows its source. Several \
             definitions of one name are all listed, the likeliest first.",
            30,
        )
        .reads("scope")
        .scope("oracle")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.code.workspace.names_of(thing)
    }

    async fn run(&self, args: FindDefinitionArgs, run: &Run) -> Result<Outcome, RunError> {
        Ok(answer(&self.code, run, args, |args| &args.scope, find).await?)
    }
}

/// A definition in a file.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) id: FileId,
    pub(super) tree: Arc<FileTree>,
    pub(super) index: usize,
}

impl Found {
    pub(super) fn definition(&self) -> &Definition {
        &self.tree.definitions[self.index]
    }
}

/// Returns all definitions of a symbol's name, in the whole workspace, in the order of paths and lines.
pub(super) fn named(trees: &[(FileId, Arc<FileTree>)], name: &str) -> Vec<Found> {
    let mut found = Vec::new();
    for (id, tree) in trees {
        let places = tree.definitions.iter().enumerate().filter(|(_, definition)| *definition.name == *name);
        found.extend(places.map(|(index, _)| Found { id: *id, tree: tree.clone(), index }));
    }
    found
}

fn find(question: &Question<'_>, args: &FindDefinitionArgs) -> Result<Outcome, FileError> {
    let symbol = Symbol::new(&args.symbol)?;
    let trees = question.trees_with(symbol.word());
    let modules = Modules::new(question);
    let all = named(&trees, &symbol.name);
    let mut ways = Vec::new();
    let mut found: Vec<Found> =
        all.iter().filter(|one| symbol.names(question.path(one.id), one.definition())).cloned().collect();
    if found.is_empty() {
        (found, ways) = renamed(question, &modules, &symbol, &trees);
    }
    let outside = found.len();
    found.retain(|one| question.covers(question.path(one.id)));
    let outside = outside - found.len();
    found.retain(|one| args.kind.is_none_or(|kind| one.definition().kind == kind));
    let from = args.from.as_ref().map(|place| place_of(question, place)).transpose()?;
    rank(question, &modules, &mut found, from, &symbol);
    let Some(best) = found.first() else {
        return Ok(nothing(question, &symbol, args, &all, outside));
    };
    if ways.is_empty() {
        ways = reexports(question, &modules, &trees, &symbol, best.id);
    }
    Ok(shown(question, args, &found, &ways))
}

/// Returns the file of a place that the caller named.
pub(super) fn place_of(question: &Question<'_>, place: &Place) -> Result<FileId, FileError> {
    let workspace = &question.code.workspace;
    let given = workspace.given(&place.path)?;
    let key = workspace.key(&given).map_err(|error| workspace.suggest_near(question.ask.guard, &given, error))?;
    question.ask.guard.check_shown(Path::new(&key))?;
    question.view.find(Path::new(&key)).ok_or_else(|| {
        FileError::refused(
            format!("`{given}` is not in the index of code"),
            "name a file of source code that is not hidden and that `.gitignore` does not exclude",
        )
    })
}

/// Sorts definitions, the likeliest first.
fn rank(question: &Question<'_>, modules: &Modules<'_>, found: &mut [Found], from: Option<FileId>, symbol: &Symbol) {
    let imported: HashSet<FileId> =
        from.map(|from| imported_from(question, modules, from, symbol, found)).unwrap_or_default();
    let near = from.map(|from| question.path(from).to_owned());
    found.sort_by_cached_key(|one| {
        let (path, definition) = (question.path(one.id), one.definition());
        (
            from != Some(one.id) || imported.contains(&one.id),
            !imported.contains(&one.id) && from.is_some() && from != Some(one.id),
            definition.declared,
            matches!(definition.kind, Kind::Variable | Kind::Field),
            is_test(path),
            definition.visibility,
            Reverse(near.as_ref().map_or(0, |near| nearness(near, path))),
            path.components().count(),
            (path.to_owned(), definition.line),
        )
    });
}

/// Returns the files with definitions that the imports of a file lead to.
fn imported_from(
    question: &Question<'_>,
    modules: &Modules<'_>,
    from: FileId,
    symbol: &Symbol,
    found: &[Found],
) -> HashSet<FileId> {
    let mut imported = HashSet::new();
    for (_, tree) in question.trees(&[from]) {
        let names = |import: &&super::tree::Import| {
            *import.local == *symbol.name
                || &*import.local == "*"
                || symbol.owners.iter().any(|owner| **owner == *import.local)
        };
        for import in tree.imports.iter().filter(names) {
            for one in found {
                if modules.leads_to(from, &tree, import, &HashSet::from([one.id])) {
                    imported.insert(one.id);
                }
            }
        }
    }
    imported
}

/// A statement that passes a definition on under some name.
struct Way {
    path: String,
    line: u32,
}

/// Finds the definitions behind a name that a re-export gives: `export { two as second }`.
fn renamed(
    question: &Question<'_>,
    modules: &Modules<'_>,
    symbol: &Symbol,
    trees: &[(FileId, Arc<FileTree>)],
) -> (Vec<Found>, Vec<Way>) {
    let (mut found, mut ways) = (Vec::new(), Vec::new());
    for (id, tree) in trees {
        let renames = tree.imports.iter().filter(|import| {
            *import.local == *symbol.name
                && import.original != import.local
                && !matches!(&*import.original, "" | "*" | "default")
        });
        for import in renames.take(WAYS_MAX) {
            let behind = named(&question.trees_with(&import.original), &import.original);
            for one in behind {
                if modules.leads_to(*id, tree, import, &HashSet::from([one.id])) {
                    ways.push(Way { path: question.shown(*id), line: import.line });
                    found.push(one);
                }
            }
        }
    }
    (found, ways)
}

/// Returns the re-exports of a definition.
fn reexports(
    question: &Question<'_>,
    modules: &Modules<'_>,
    trees: &[(FileId, Arc<FileTree>)],
    symbol: &Symbol,
    target: FileId,
) -> Vec<Way> {
    let targets = HashSet::from([target]);
    let mut ways = Vec::new();
    for (id, tree) in trees.iter().filter(|(id, _)| *id != target) {
        let is_package = question.path(*id).file_stem().is_some_and(|stem| stem == "__init__");
        let passes_on = |import: &&super::tree::Import| {
            let by_language = tree.language != super::language::Language::Python || is_package;
            import.reexport && by_language && *import.original == *symbol.name
        };
        for import in tree.imports.iter().filter(passes_on) {
            if ways.len() < WAYS_MAX && modules.leads_to(*id, tree, import, &targets) {
                ways.push(Way { path: question.shown(*id), line: import.line });
            }
        }
    }
    ways
}

fn shown(question: &Question<'_>, args: &FindDefinitionArgs, found: &[Found], ways: &[Way]) -> Outcome {
    let (best, total) = (&found[0], found.len());
    let others: Vec<&Found> = found.iter().skip(1).take(args.limit as usize).collect();
    let mut value = summary(question, best);
    let mut lines = vec![headline(question, best)];
    let (doc, source) = texts(question, best);
    lines.extend(ways.iter().map(|way| format!("  via {}:{}", way.path, way.line)));
    if !doc.is_empty() && !source.iter().any(|line| doc.contains(line)) {
        lines.extend(doc.iter().take(3).map(|line| format!("  {}", line.trim())));
    }
    let own = best.definition();
    lines.extend(source.iter().enumerate().map(|(at, line)| format!("{:>6}  {line}", own.start_line as usize + at)));
    let rest = (own.end_line + 1 - own.start_line.min(own.end_line)).saturating_sub(SOURCE_LINES_MAX);
    if rest > 0 {
        lines.push(format!("[{rest} more lines: `Read` with `offset` {}]", own.start_line + SOURCE_LINES_MAX));
    }
    if !others.is_empty() {
        lines.push(format!("{} more:", total - 1));
        lines.extend(others.iter().map(|one| headline(question, one)));
    }
    if others.len() + 1 < total {
        lines.push(format!(
            "[only {} of {total} definitions are listed; name the type or module, or raise `limit`]",
            others.len() + 1
        ));
    }
    lines.extend(question.note_on_state());
    value["doc"] = json!((!doc.is_empty()).then(|| doc.join("\n")));
    value["source"] = json!(source.join("\n"));
    value["via"] = ways.iter().map(|way| json!({ "path": way.path, "line": way.line })).collect();
    value["definitions"] = others.iter().map(|one| summary(question, one)).collect();
    value["total"] = json!(total);
    value["more"] = json!(others.len() + 1 < total);
    value["index"] = question.state();
    Outcome::text(lines.join("\n")).structured(value)
}

/// Returns a definition as `path:line:column kind signature`.
fn headline(question: &Question<'_>, one: &Found) -> String {
    let own = one.definition();
    let of = own.container.as_ref().map(|container| format!(" of {container}")).unwrap_or_default();
    let declared = if own.declared { ", declaration" } else { "" };
    let path = question.shown(one.id);
    format!("{path}:{}:{} {}{of}{declared}: {}", own.line, own.column, own.kind.name(), own.signature)
}

/// Returns a definition as data.
pub(super) fn summary(question: &Question<'_>, one: &Found) -> Value {
    let own = one.definition();
    json!({
        "path": question.shown(one.id), "line": own.line, "column": own.column, "end_line": own.end_line,
        "name": own.name, "kind": own.kind, "signature": own.signature, "container": own.container,
        "visibility": own.visibility, "declaration": own.declared,
    })
}

/// Returns the documentation and the source of a definition, from the content that it was found in.
fn texts(question: &Question<'_>, one: &Found) -> (Vec<String>, Vec<String>) {
    let own = one.definition();
    let Ok(loaded) = question.view.load(&question.ask, one.id) else { return (Vec::new(), Vec::new()) };
    // The file may have changed since its tree was made. Then the lines of the tree mean nothing.
    if loaded.facts.definitions.get(one.index) != Some(own) {
        return (Vec::new(), Vec::new());
    }
    let last = own.end_line.min(own.start_line.saturating_add(SOURCE_LINES_MAX - 1));
    let doc = own.doc.map(|(first, last)| lines_of(&loaded.content, first, last.min(first + DOC_LINES_MAX - 1)));
    (doc.unwrap_or_default(), lines_of(&loaded.content, own.start_line, last))
}

/// Returns the answer for a symbol without a definition: names like it, and lines that hold the word.
fn nothing(
    question: &Question<'_>,
    symbol: &Symbol,
    args: &FindDefinitionArgs,
    all: &[Found],
    outside: usize,
) -> Outcome {
    let mut lines = vec![match args.kind {
        Some(kind) => format!("no {} `{}` is defined here", kind.name(), args.symbol),
        None => format!("`{}` is not defined here", args.symbol),
    }];
    if outside > 0 {
        lines.push(format!("outside `{}` there are {outside} definitions of it: leave `scope` out", args.scope));
    }
    let elsewhere: Vec<&Found> = all.iter().take(args.limit as usize).collect();
    if !elsewhere.is_empty() {
        lines.push(format!("`{}` is defined as:", symbol.name));
        lines.extend(elsewhere.iter().map(|one| headline(question, one)));
    }
    let near: Vec<String> = question.view.near(symbol.word()).into_iter().map(str::to_owned).collect();
    if !near.is_empty() && elsewhere.is_empty() {
        let names: Vec<String> = near.iter().map(|name| format!("`{name}`")).collect();
        lines.push(format!("names like it: {}", names.join(", ")));
    }
    let occurrences = occurrences(question, symbol.word());
    if elsewhere.is_empty() && !occurrences.is_empty() {
        lines.push("the word occurs in:".to_owned());
        lines.extend(occurrences.iter().map(|(path, line, text)| format!("{path}:{line}: {}", text.trim())));
    }
    lines.extend(question.note_on_state());
    let occurrences: Vec<Value> =
        occurrences.iter().map(|(path, line, text)| json!({ "path": path, "line": line, "text": text })).collect();
    Outcome::text(lines.join("\n")).structured(json!({
        "path": null, "line": null, "definitions": [], "total": 0, "more": false, "near": near,
        "elsewhere": elsewhere.iter().map(|one| summary(question, one)).collect::<Vec<_>>(),
        "occurrences": occurrences, "index": question.state(),
    }))
}

/// Returns the first lines that hold a word, one for each file.
fn occurrences(question: &Question<'_>, word: &str) -> Vec<(String, u32, String)> {
    let mut found = Vec::new();
    for id in question.view.with_word(word).into_iter().filter(|id| question.covers(question.path(*id))) {
        let Ok(content) = question.view.read(&question.ask, id) else { continue };
        let text = String::from_utf8_lossy(&content);
        let holds = |line: &str| crate::index::words::runs(line).any(|run| run == word);
        if let Some((at, line)) = text.lines().enumerate().find(|(_, line)| holds(line)) {
            found.push((question.shown(id), at as u32 + 1, super::asking::shortened(line, 200)));
        }
        if found.len() >= OCCURRENCES_MAX {
            break;
        }
    }
    found
}

//! `find_references`: finds where a symbol is used, and says how sure it is.

use std::collections::HashSet;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::asking::{Question, Symbol, answer, declared, lines_of};
use super::definition::{Found, Place, named, place_of, summary};
use super::facts::Code;
use super::grading::{Confidence, FileGrades, Targets};
use super::modules::Modules;
use super::tree::{FileTree, Occurrence, Use};
use crate::files::FileError;
use crate::index::{FileId, words};

/// Maximum number of definitions that an answer lists.
const DEFINITIONS_MAX: usize = 10;

/// A tool that finds references.
pub struct FindReferences {
    code: Arc<Code>,
}

/// A search for the uses of a symbol.
#[derive(Deserialize, JsonSchema)]
pub struct FindReferencesArgs {
    /// The symbol: `name`, `Type::name`, `Class.method` or `module::name`.
    #[schemars(length(min = 1, max = 1000))]
    symbol: String,
    /// Maximum number of references to show.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 1000))]
    limit: u32,
    /// The place of the definition that is meant, if several have the name.
    definition: Option<Place>,
    /// The folder or file to look in.
    #[serde(default = "super::asking::everywhere")]
    scope: String,
    /// Only references of these kinds.
    #[serde(default)]
    #[schemars(length(max = 6))]
    kinds: Vec<Use>,
    /// Only references that are at least this sure: `exact` (proven by the text), `likely` (no other definition has
    /// the name) or `name` (only the name is the same).
    #[serde(default = "any")]
    confidence: Confidence,
    /// The layout of the text: by file, or one line for each reference.
    #[serde(default)]
    group: Group,
}

/// A layout of references.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Group {
    #[default]
    File,
    None,
}

fn limit() -> u32 {
    100
}

fn any() -> Confidence {
    Confidence::Name
}

impl FindReferences {
    /// Creates the tool for this code.
    pub fn new(code: Arc<Code>) -> Self {
        Self { code }
    }
}

impl Tool for FindReferences {
    type Args = FindReferencesArgs;

    fn spec(&self) -> ToolSpec {
        declared(
            "find_references",
            "Finds where a symbol is called, imported, inherited from, read or written. Each reference is graded: \
             exact, likely, or only of the same name. Strings, comments, parameters and definitions are left out.",
            30,
        )
        .reads("scope")
        .scope("oracle")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.code.workspace.names_of(thing)
    }

    async fn run(&self, args: FindReferencesArgs, run: &Run) -> Result<Outcome, RunError> {
        Ok(answer(&self.code, run, args, |args| &args.scope, find).await?)
    }
}

/// A reference.
struct Reference {
    file: FileId,
    occurrence: Occurrence,
    within: Option<String>,
    confidence: Confidence,
}

impl Reference {
    fn new(file: FileId, tree: &FileTree, occurrence: Occurrence, confidence: Confidence) -> Self {
        let within = occurrence.within.map(|index| &tree.definitions[index as usize]);
        let within = within.map(|within| match &within.container {
            Some(container) => format!("{container}{}{}", tree.language.separator(), within.name),
            None => within.name.to_string(),
        });
        Self { file, occurrence, within, confidence }
    }
}

fn find(question: &Question<'_>, args: &FindReferencesArgs) -> Result<Outcome, FileError> {
    let symbol = Symbol::new(&args.symbol)?;
    let trees = question.trees_with(symbol.word());
    let all = named(&trees, &symbol.name);
    let wanted = wanted(question, args, &symbol, &all)?;
    let targets = Targets::new(question, &wanted, &all);
    let modules = Modules::new(question);
    let (mut references, mut renamed) = (Vec::new(), HashSet::new());
    for (id, tree) in trees.iter().filter(|(id, _)| question.covers(question.path(*id))) {
        if question.ask.stop.is_cancelled() {
            return Err(FileError::Stopped);
        }
        let grades = FileGrades::new(question, &modules, &targets, &symbol.name, (*id, tree));
        let aliases = grades.aliases(&symbol.name);
        for (at, occurrence) in tree.occurrences.iter().enumerate() {
            let name = &*tree.names[occurrence.name as usize];
            let is_alias = !occurrence.member && aliases.contains(&name);
            if name != symbol.name && !is_alias {
                continue;
            }
            let grade = if is_alias { Some(Confidence::Exact) } else { grades.grade(at, name) };
            if let Some(confidence) = grade {
                references.push(Reference::new(*id, tree, *occurrence, confidence));
            }
        }
        renamed.extend(grades.passed_on(&symbol.name).into_iter().map(str::to_owned));
    }
    renamed.remove(&symbol.name);
    for name in renamed {
        references.extend(under_other_name(question, &modules, &targets, &symbol.name, &name));
    }
    references.sort_by_key(|one| (one.file, one.occurrence.line, one.occurrence.column));
    references.dedup_by_key(|one| (one.file, one.occurrence.line, one.occurrence.column));
    let in_scope = |id: &FileId| question.covers(question.path(*id));
    let holders = question.view.with_word(symbol.word()).into_iter().filter(in_scope).count();
    let skipped = holders.saturating_sub(trees.iter().filter(|(id, _)| in_scope(id)).count());
    Ok(shown(question, args, &symbol, references, &wanted, skipped))
}

/// Returns the references under a name that a re-export gives: `export { Form as Sheet }`. Only those count that an
/// import proves.
fn under_other_name(
    question: &Question<'_>,
    modules: &Modules<'_>,
    targets: &Targets,
    own: &str,
    name: &str,
) -> Vec<Reference> {
    let word = words::runs(name).max_by_key(|word| word.len()).unwrap_or_default();
    let mut references = Vec::new();
    for (id, tree) in question.trees_with(word).iter().filter(|(id, _)| question.covers(question.path(*id))) {
        let grades = FileGrades::new(question, modules, targets, name, (*id, tree));
        let aliases = grades.aliases(name);
        for (at, occurrence) in tree.occurrences.iter().enumerate() {
            let found = &*tree.names[occurrence.name as usize];
            let is_alias = !occurrence.member && aliases.contains(&found) && found != own;
            if is_alias || found == name && grades.grade(at, name) == Some(Confidence::Exact) {
                references.push(Reference::new(*id, tree, *occurrence, Confidence::Exact));
            }
        }
    }
    references
}

/// Returns the definitions that the caller means: at a place, or named with their owners; else all of the name.
fn wanted(
    question: &Question<'_>,
    args: &FindReferencesArgs,
    symbol: &Symbol,
    all: &[Found],
) -> Result<Vec<Found>, FileError> {
    if let Some(place) = &args.definition {
        let id = place_of(question, place)?;
        let around = |one: &&Found| {
            let own = one.definition();
            one.id == id && (place.line == 0 || (own.start_line.min(own.line)..=own.end_line).contains(&place.line))
        };
        // The innermost definition is meant, which begins last.
        let found = all.iter().filter(around).max_by_key(|one| one.definition().start_line);
        return found.map(|one| vec![one.clone()]).ok_or_else(|| {
            let places: Vec<String> = all
                .iter()
                .take(DEFINITIONS_MAX)
                .map(|one| format!("{}:{}", question.shown(one.id), one.definition().line))
                .collect();
            let known = if places.is_empty() { "it has no definition here".to_owned() } else { places.join(", ") };
            FileError::refused(
                format!("`{}` is not defined at {}:{}", symbol.name, place.path, place.line),
                format!("name one of its definitions: {known}"),
            )
        });
    }
    Ok(all.iter().filter(|one| symbol.names(question.path(one.id), one.definition())).cloned().collect())
}

fn shown(
    question: &Question<'_>,
    args: &FindReferencesArgs,
    symbol: &Symbol,
    mut references: Vec<Reference>,
    wanted: &[Found],
    skipped: usize,
) -> Outcome {
    references.retain(|one| one.confidence <= args.confidence);
    references.retain(|one| args.kinds.is_empty() || args.kinds.contains(&one.occurrence.kind));
    let count = |confidence| references.iter().filter(|one| one.confidence == confidence).count();
    let counts = [Confidence::Exact, Confidence::Likely, Confidence::Name].map(count);
    let total = references.len();
    let mut files: Vec<FileId> = references.iter().map(|one| one.file).collect();
    files.dedup();
    let files = files.len();
    // The surest come first, so that a limit cuts the others.
    references.sort_by_key(|one| one.confidence);
    references.truncate(args.limit as usize);
    references.sort_by_key(|one| (one.file, one.occurrence.line, one.occurrence.column));
    let texts = texts(question, &references);
    let mut lines = vec![format!(
        "{total} references of `{}` in {files} files: {} exact, {} likely, {} by name only",
        args.symbol, counts[0], counts[1], counts[2]
    )];
    lines.extend(laid_out(question, args, &references, &texts));
    lines.extend(notes(question, symbol, wanted, (total, references.len(), files), skipped));
    let values: Vec<Value> = references
        .iter()
        .zip(&texts)
        .map(|(one, text)| {
            let own = &one.occurrence;
            json!({
                "path": question.shown(one.file), "line": own.line, "column": own.column, "text": text,
                "kind": own.kind, "in": one.within, "confidence": one.confidence,
            })
        })
        .collect();
    Outcome::text(lines.join("\n")).structured(json!({
        "references": values,
        "counts": { "exact": counts[0], "likely": counts[1], "name": counts[2] },
        "files": files, "total": total, "more": references.len() < total,
        "definitions": wanted.iter().take(DEFINITIONS_MAX).map(|one| summary(question, one)).collect::<Vec<_>>(),
        "without_tree": skipped, "index": question.state(),
    }))
}

/// Returns the line of each reference, read from the files once each.
fn texts(question: &Question<'_>, references: &[Reference]) -> Vec<String> {
    let mut texts = Vec::with_capacity(references.len());
    for group in references.chunk_by(|one, other| one.file == other.file) {
        let content = question.view.read(&question.ask, group[0].file).unwrap_or_default();
        let (mut line, mut rest) = (1, content.as_slice());
        for one in group {
            while line < one.occurrence.line {
                let end = rest.iter().position(|byte| *byte == b'\n').map_or(rest.len(), |end| end + 1);
                rest = &rest[end..];
                line += 1;
            }
            let end = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
            texts.push(lines_of(&rest[..end], 1, 1).pop().unwrap_or_default().trim_start().to_owned());
        }
    }
    texts
}

fn laid_out(
    question: &Question<'_>,
    args: &FindReferencesArgs,
    references: &[Reference],
    texts: &[String],
) -> Vec<String> {
    let mut lines = Vec::new();
    let mut file = None;
    for (one, text) in references.iter().zip(texts) {
        let own = &one.occurrence;
        let grade = match one.confidence {
            Confidence::Exact => String::new(),
            other => format!(" ({})", other.name()),
        };
        let what = format!("{}{grade}", own.kind.name());
        match args.group {
            Group::None => {
                lines.push(format!("{}:{}:{} {what}: {text}", question.shown(one.file), own.line, own.column))
            }
            Group::File => {
                if file != Some(one.file) {
                    lines.push(question.shown(one.file));
                    file = Some(one.file);
                }
                lines.push(format!("  {}:{} {what}: {text}", own.line, own.column));
            }
        }
    }
    lines
}

fn notes(
    question: &Question<'_>,
    symbol: &Symbol,
    wanted: &[Found],
    (total, shown, files): (usize, usize, usize),
    skipped: usize,
) -> Vec<String> {
    let mut lines = Vec::new();
    if shown < total {
        lines.push(format!(
            "[only {shown} of {total} are shown: narrow `scope`, `kinds` or `confidence`, or raise `limit`]"
        ));
    }
    if wanted.len() > 1 {
        let places: Vec<String> = wanted
            .iter()
            .take(DEFINITIONS_MAX)
            .map(|one| format!("{}:{}", question.shown(one.id), one.definition().line))
            .collect();
        let more = if wanted.len() > DEFINITIONS_MAX { ", …" } else { "" };
        lines.push(format!(
            "[{} definitions have this name; choose one by `definition`: {}{more}]",
            wanted.len(),
            places.join(", ")
        ));
    }
    if wanted.is_empty() {
        lines.push(format!("[`{}` has no definition here, so all go by the name]", symbol.name));
    }
    if total == 0 && files == 0 {
        let near = question.view.near(symbol.word());
        let names: Vec<String> = near.iter().map(|name| format!("`{name}`")).collect();
        if !names.is_empty() {
            lines.push(format!("names like it: {}", names.join(", ")));
        }
    }
    if skipped > 0 {
        lines.push(format!("[{skipped} files hold the word but have no syntax tree; `Search` finds it there]"));
    }
    lines.extend(question.note_on_state());
    lines
}

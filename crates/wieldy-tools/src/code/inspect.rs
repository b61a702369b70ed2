//! `InspectModule`: shows the outline of a source file: its symbols, its imports, and the files that import it.

use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::asking::{Question, answer, declared, lines_of, module_names};
use super::facts::Code;
use super::modules::Modules;
use super::tree::{FileTree, Kind};
use crate::files::FileError;
use crate::index::FileId;

/// Maximum number of symbols, and of lines of text, in an answer.
const SYMBOLS_MAX: usize = 2000;
const LINES_MAX: usize = 400;
/// Maximum number of importing files that are listed.
const IMPORTERS_MAX: usize = 100;
/// Maximum number of files that one module name may mean.
const SAME_NAME_MAX: usize = 10;

/// A tool that shows the outline of a module.
pub struct InspectModule {
    code: Arc<Code>,
}

/// A look at a module.
#[derive(Deserialize, JsonSchema)]
pub struct InspectModuleArgs {
    /// The source file, or a folder that is a module.
    #[schemars(length(min = 1, max = 4096))]
    path: Option<String>,
    /// The module's name instead of its path: `package.module` or `crate::module`.
    #[schemars(length(min = 1, max = 1000))]
    module: Option<String>,
    /// Number of levels of symbols: 1 leaves out the members of types.
    #[serde(default = "depth")]
    #[schemars(range(min = 1, max = 20))]
    depth: u32,
}

fn depth() -> u32 {
    2
}

impl InspectModule {
    /// Creates the tool for this code.
    pub fn new(code: Arc<Code>) -> Self {
        Self { code }
    }
}

impl Tool for InspectModule {
    type Args = InspectModuleArgs;

    fn spec(&self) -> ToolSpec {
        declared(
            "InspectModule",
            "Shows the outline of one source file: its symbols with signatures and lines, its imports, and the files \
             that import it.",
            30,
        )
        .alias("inspect_module")
        .argument_alias("file_path", "path")
        .reads("path")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.code.workspace.names_of(thing)
    }

    async fn run(&self, args: InspectModuleArgs, run: &Run) -> Result<Outcome, RunError> {
        Ok(answer(&self.code, run, args, |_| ".", inspect).await?)
    }
}

fn inspect(question: &Question<'_>, args: &InspectModuleArgs) -> Result<Outcome, FileError> {
    let (id, others) = match (&args.path, &args.module) {
        (Some(path), None) => (at_path(question, path)?, Vec::new()),
        (None, Some(module)) => named(question, module)?,
        _ => {
            return Err(FileError::refused(
                "one of `path` and `module` is needed, and not both",
                "give `path`, such as `src/main.rs`, or `module`, such as `package.module`",
            ));
        }
    };
    let loaded = question.view.load(&question.ask, id).map_err(|reason| {
        FileError::refused(
            format!("`{}` has no outline: {}", question.shown(id), reason.as_str()),
            "read it with `Read`, or search it with `Search`",
        )
    })?;
    let outline = Outline::new(&loaded.facts);
    let importers = importers(question, id);
    let tree = &loaded.facts;
    let doc = tree.doc.map(|(first, last)| lines_of(&loaded.content, first, last.min(first + 19)).join("\n"));
    let mut lines = vec![format!("{}: {}, {} lines", question.shown(id), tree.language.name(), tree.lines)];
    if tree.broken {
        lines.push("[the grammar does not understand all of this file]".to_owned());
    }
    lines.extend(doc.iter().flat_map(|doc| doc.lines()).take(3).map(|line| format!("  {}", line.trim())));
    outline.draw(args.depth, &mut lines);
    lines.extend(listed("imports", &import_lines(tree)));
    lines.extend(listed("imported by", &importers));
    lines.extend(listed("other modules of this name", &others));
    lines.extend(question.note_on_state());
    Ok(Outcome::text(lines.join("\n")).structured(json!({
        "path": question.shown(id), "language": tree.language, "lines": tree.lines,
        "hash": loaded.hash.to_hex().to_string(), "doc": doc, "broken": tree.broken,
        "symbols": outline.symbols(args.depth), "cut": outline.is_cut(),
        "imports": tree.imports, "imported_by": importers, "others": others, "index": question.state(),
    })))
}

fn listed(title: &str, items: &[String]) -> Option<String> {
    const SHOWN_MAX: usize = 20;
    if items.is_empty() {
        return None;
    }
    let more = if items.len() > SHOWN_MAX { format!(", and {} more", items.len() - SHOWN_MAX) } else { String::new() };
    Some(format!("{title}: {}{more}", items[..items.len().min(SHOWN_MAX)].join(", ")))
}

fn import_lines(tree: &FileTree) -> Vec<String> {
    let shown = |import: &super::tree::Import| {
        let own = match (&*import.original, &*import.module) {
            ("", module) => module.to_owned(),
            (name, "") => name.to_owned(),
            (name, module) => format!("{name} from {module}"),
        };
        let is_renamed = !import.original.is_empty() && import.local != import.original;
        if is_renamed { format!("{own} as {}", import.local) } else { own }
    };
    tree.imports.iter().map(shown).collect()
}

/// Returns the file at a path, or the file that stands for a folder.
fn at_path(question: &Question<'_>, path: &str) -> Result<FileId, FileError> {
    let workspace = &question.code.workspace;
    let given = workspace.given(path)?;
    let key = workspace.key(&given).map_err(|error| workspace.suggest_near(question.ask.guard, &given, error))?;
    question.ask.guard.check_shown(Path::new(&key))?;
    let folder = Path::new(&key);
    let own = ["", "__init__.py", "mod.rs", "lib.rs", "src/lib.rs", "main.rs", "src/main.rs", "index.ts", "index.js"];
    let found = own.iter().find_map(|name| match *name {
        "" => question.view.find(folder),
        name => question.view.find(&folder.join(name)),
    });
    found.ok_or_else(|| {
        let below = question.view.files().filter(|(_, entry)| entry.path.parent() == Some(folder));
        let names: Vec<String> = below.map(|(id, _)| question.shown(id)).take(SAME_NAME_MAX).collect();
        let suggestion = match names.is_empty() {
            true => "name a file of source code that is not hidden and that `.gitignore` does not exclude".to_owned(),
            false => format!("name one of its files: {}", names.join(", ")),
        };
        FileError::refused(format!("`{given}` is no module in the index of code"), suggestion)
    })
}

/// Returns the file of a module by its name, and other files with the same name.
fn named(question: &Question<'_>, module: &str) -> Result<(FileId, Vec<String>), FileError> {
    let parts: Vec<String> = module
        .split(['.', ':', '/', '\\'])
        .filter(|part| !part.is_empty())
        .map(|part| part.replace('-', "_"))
        .collect();
    let parts: Vec<&String> =
        parts.iter().filter(|part| !matches!(part.as_str(), "crate" | "self" | "super")).collect();
    // Folders between may be missing: `tools::files` is `tools/src/files`.
    let ends = |path: &Path| {
        let names = module_names(path);
        let mut rest = names.iter();
        names.last() == parts.last().copied() && parts.iter().all(|part| rest.any(|name| name == *part))
    };
    let is_code = |path: &Path| super::language::Language::of(path, b"").is_some();
    let found = question.view.files().filter(|(_, entry)| ends(&entry.path) && is_code(&entry.path));
    let mut found: Vec<FileId> = found.map(|(id, _)| id).collect();
    found.sort_by_key(|id| (question.path(*id).components().count(), question.path(*id).to_owned()));
    let Some(best) = found.first().copied() else {
        let mut names = Vec::new();
        for (_, entry) in question.view.files() {
            names.extend(module_names(&entry.path).pop());
        }
        names.sort_unstable();
        names.dedup();
        let wanted = parts.last().map_or(module, |name| name.as_str());
        let near = wieldy_core::name::near_misses(wanted, names.iter().map(String::as_str));
        let suggestion = wieldy_core::name::did_you_mean(&near).unwrap_or_else(|| "give its `path` instead".to_owned());
        return Err(FileError::refused(format!("there is no module `{module}`"), suggestion));
    };
    let others = found.iter().skip(1).take(SAME_NAME_MAX).map(|id| question.shown(*id)).collect();
    Ok((best, others))
}

/// Returns the files whose imports mean this file.
fn importers(question: &Question<'_>, id: FileId) -> Vec<String> {
    let modules = Modules::new(question);
    let path = question.path(id);
    let mut words: Vec<String> =
        path.with_extension("").file_name().into_iter().map(|name| name.to_string_lossy().into_owned()).collect();
    // A module may have the name of its folder, or a crate that of the folder around `src`.
    words.extend(
        path.ancestors().skip(1).take(2).filter_map(Path::file_name).map(|name| name.to_string_lossy().into_owned()),
    );
    let mut candidates: Vec<FileId> = words
        .iter()
        .flat_map(|name| {
            // A name such as `my-crate` is written `my_crate`, and as two words.
            let word = name.replace('-', "_");
            let parts =
                name.split(|letter: char| !crate::index::words::is_word_char(letter)).max_by_key(|part| part.len());
            question.view.with_word(&word).into_iter().chain(question.view.with_word(parts.unwrap_or_default()))
        })
        .filter(|other| *other != id)
        .collect();
    candidates.sort_unstable();
    candidates.dedup();
    let means = |(other, tree): &(FileId, Arc<FileTree>)| {
        tree.imports.iter().any(|import| modules.of(*other, tree, import).contains(&id))
    };
    question
        .trees(&candidates)
        .iter()
        .filter(|pair| means(pair))
        .map(|(other, _)| question.shown(*other))
        .take(IMPORTERS_MAX)
        .collect()
}

/// The symbols of a file as a tree.
struct Outline<'a> {
    tree: &'a FileTree,
    /// The members of each definition, and at the end those at the top.
    members: Vec<Vec<usize>>,
    count: usize,
}

impl<'a> Outline<'a> {
    fn new(tree: &'a FileTree) -> Self {
        let around = tree.arounds();
        let mut members = vec![Vec::new(); tree.definitions.len() + 1];
        let mut count = 0;
        for (index, around) in around.iter().enumerate() {
            let inside =
                around.is_some_and(|around| matches!(tree.definitions[around].kind, Kind::Function | Kind::Method));
            if !inside && count < SYMBOLS_MAX {
                count += 1;
                members[around.unwrap_or(tree.definitions.len())].push(index);
            }
        }
        Self { tree, members, count }
    }

    fn is_cut(&self) -> bool {
        self.count >= SYMBOLS_MAX
    }

    /// Returns the definitions in the order of the outline, each with its level from 1.
    fn walk(&self, depth: u32) -> Vec<(u32, usize)> {
        let mut order = Vec::new();
        let mut todo: Vec<(u32, usize)> =
            self.members[self.tree.definitions.len()].iter().rev().map(|index| (1, *index)).collect();
        while let Some((level, index)) = todo.pop() {
            order.push((level, index));
            if level < depth && order.len() < SYMBOLS_MAX {
                todo.extend(self.members[index].iter().rev().map(|index| (level + 1, *index)));
            }
        }
        order
    }

    fn draw(&self, depth: u32, lines: &mut Vec<String>) {
        let order = self.walk(depth);
        for (level, index) in order.iter().take(LINES_MAX) {
            let one = &self.tree.definitions[*index];
            let indent = 2 * *level as usize;
            lines.push(format!("{:>5}{:indent$}{}", one.line, "", one.signature));
        }
        if order.len() > LINES_MAX {
            lines.push(format!("[{} more symbols: lower `depth`]", order.len() - LINES_MAX));
        }
    }

    fn symbols(&self, depth: u32) -> Vec<Value> {
        // From the end, so that the members of a definition are made before it.
        let order = self.walk(depth);
        let mut made: Vec<Vec<Value>> = vec![Vec::new(); depth as usize + 2];
        for (level, index) in order.iter().rev() {
            let one = &self.tree.definitions[*index];
            let level = *level as usize;
            let mut members = std::mem::take(&mut made[level + 1]);
            members.reverse();
            made[level].push(json!({
                "name": one.name, "kind": one.kind, "signature": one.signature, "line": one.line,
                "end_line": one.end_line, "visibility": one.visibility, "declaration": one.declared, "symbols": members,
            }));
        }
        let mut top = std::mem::take(&mut made[1]);
        top.reverse();
        top
    }
}

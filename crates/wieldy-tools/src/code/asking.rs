//! Asking the code: the common parts of the tools' declarations, the scope of a question, and symbols as callers
//! write them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use wieldy_core::{Outcome, Provider, Run, ToolSpec};

use super::facts::Code;
use super::tree::{Definition, FileTree};
use crate::files::{FileError, blocking};
use crate::index::{Ask, FileId, View, words};

/// Maximum number of parts of a symbol, such as `a::b::c`.
const PARTS_MAX: usize = 16;
/// Maximum length of a line of source in an answer.
const LINE_CHARS_MAX: usize = 200;

/// Returns the common declaration of the tools that ask the code.
pub(super) fn declared(name: &str, description: &str, timeout_seconds: u64) -> ToolSpec {
    let mut spec = ToolSpec::new(name, description)
        .category("code")
        .provider(Provider::Builtin)
        .read_only()
        .idempotent()
        .permission("files.read")
        .timeout(Duration::from_secs(timeout_seconds));
    spec.annotations.open_world = false;
    // Each tool bounds its own answer, and says how to get the rest. A second cut would lose that note.
    spec.constraints.output_bytes_max = Some(1024 * 1024);
    spec
}

/// Returns the default scope: the whole workspace.
pub(super) fn everywhere() -> String {
    ".".to_owned()
}

/// A question with a fresh view of the code.
pub(super) struct Question<'a> {
    pub(super) code: &'a Code,
    pub(super) ask: Ask<'a>,
    pub(super) view: View<FileTree>,
    /// The path that answers are limited to; `None` for the whole workspace.
    pub(super) scope: Option<PathBuf>,
}

/// Answers a question on a blocking thread.
pub(super) async fn answer<A: Send + 'static>(
    code: &Arc<Code>,
    run: &Run,
    args: A,
    scope: fn(&A) -> &str,
    work: fn(&Question<'_>, &A) -> Result<Outcome, FileError>,
) -> Result<Outcome, FileError> {
    let (code, run) = (code.clone(), run.clone());
    blocking(move || {
        let guard = code.workspace.guard(&run.confinement().files);
        let ask = Ask::of_run(&guard, &run);
        let scope = scope_of(&code, &ask, scope(&args))?;
        let view = code.index.refresh(&ask)?;
        let question = Question { code: &code, ask, view, scope };
        let outcome = work(&question, &args);
        code.index.keep(&ask);
        outcome
    })
    .await
}

fn scope_of(code: &Code, ask: &Ask<'_>, text: &str) -> Result<Option<PathBuf>, FileError> {
    let given = code.workspace.given(text)?;
    if given.relative() == Path::new(".") {
        return Ok(None);
    }
    let key = code.workspace.key(&given).map_err(|error| code.workspace.suggest_near(ask.guard, &given, error))?;
    ask.guard.check_shown(Path::new(&key))?;
    Ok(Some(PathBuf::from(key)).filter(|path| !path.as_os_str().is_empty() && path != Path::new(".")))
}

impl Question<'_> {
    /// Returns true if a path is in the scope of the question.
    pub(super) fn covers(&self, path: &Path) -> bool {
        self.scope.as_ref().is_none_or(|scope| path.starts_with(scope))
    }

    /// Returns a file's path.
    pub(super) fn path(&self, id: FileId) -> &Path {
        &self.view.file(id).path
    }

    /// Returns a file's path for answers.
    pub(super) fn shown(&self, id: FileId) -> String {
        self.path(id).to_string_lossy().into_owned()
    }

    /// Returns the trees of the files that hold the word, without those that have none.
    pub(super) fn trees_with(&self, word: &str) -> Vec<(FileId, Arc<FileTree>)> {
        let ids = self.view.with_word(word);
        self.trees(&ids)
    }

    /// Returns the trees of these files, without those that have none.
    pub(super) fn trees(&self, ids: &[FileId]) -> Vec<(FileId, Arc<FileTree>)> {
        let trees = self.view.facts(&self.ask, ids);
        ids.iter().zip(trees).filter_map(|(id, tree)| Some((*id, tree.ok()?))).collect()
    }

    /// Returns the state of the index, for the answer.
    pub(super) fn state(&self) -> Value {
        serde_json::to_value(self.view.state()).unwrap_or_default()
    }

    /// Returns a line that says so if the answer may lack files.
    pub(super) fn note_on_state(&self) -> Option<String> {
        let state = self.view.state();
        (!state.complete).then(|| {
            format!("[not complete: only {} of {} files were read in time; ask again]", state.indexed, state.files)
        })
    }
}

/// A symbol as callers write it: `name`, `Type::name`, `Class.method`, `module::name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) name: String,
    /// The names before it, outermost first.
    pub(super) owners: Vec<String>,
}

impl Symbol {
    /// Reads the text of a symbol.
    pub(super) fn new(text: &str) -> Result<Self, FileError> {
        let refused = || {
            FileError::refused(
                format!("`{}` is not the name of a symbol", text.chars().take(80).collect::<String>()),
                "give a name such as `name`, `Type::name`, `Class.method` or `module::name`; search for text with \
                 `search_code`",
            )
        };
        let text = text.trim().trim_end_matches("()").trim_end_matches('!').trim_start_matches(['&', '@', '$']);
        let mut parts = Vec::new();
        let (mut rest, mut part) = (text, String::new());
        while let Some(first) = rest.chars().next() {
            let mark = ["::", "->", ".", "#", "\\", "/"].into_iter().find(|mark| rest.starts_with(mark));
            match mark {
                // `operator->` and `#private` are names.
                Some(mark) if !part.is_empty() && !part.starts_with("operator") => {
                    parts.push(std::mem::take(&mut part));
                    rest = &rest[mark.len()..];
                }
                _ => {
                    part.push(first);
                    rest = &rest[first.len_utf8()..];
                }
            }
        }
        let marks = ['.', ':', '/', '\\', '-', '>'];
        let strange = |part: &String| {
            part.is_empty()
                || part.starts_with(marks)
                || part.chars().any(|letter| letter.is_whitespace() || letter == '(')
        };
        if part.is_empty() || parts.len() > PARTS_MAX || strange(&part) || parts.iter().any(strange) {
            return Err(refused());
        }
        let symbol = Self { name: part, owners: parts };
        if symbol.word().is_empty() { Err(refused()) } else { Ok(symbol) }
    }

    /// Returns the longest word of the name, by which files are found.
    pub(super) fn word(&self) -> &str {
        words::runs(&self.name).max_by_key(|word| word.len()).unwrap_or_default()
    }

    /// Returns true if a definition has this name and stands in the owners that the symbol names: types and modules
    /// around it, or the folders and the file that it is in.
    pub(super) fn names(&self, path: &Path, definition: &Definition) -> bool {
        *definition.name == *self.name && self.is_owned_by(path, definition.container.as_deref())
    }

    fn is_owned_by(&self, path: &Path, container: Option<&str>) -> bool {
        if self.owners.is_empty() {
            return true;
        }
        let inner = container.into_iter().flat_map(|container| container.split("::").flat_map(|part| part.split('.')));
        let inner: Vec<&str> = inner.collect();
        if inner.ends_with(&self.owners.iter().map(String::as_str).collect::<Vec<_>>()) {
            return true;
        }
        let mut around = module_names(path);
        around.extend(inner.into_iter().map(str::to_owned));
        let owners = self.owners.iter().filter(|owner| !matches!(owner.as_str(), "crate" | "self" | "super"));
        // Names between may be missing: `tools::Read` is `tools::files::Read` by a re-export.
        let mut around = around.iter();
        owners.into_iter().all(|owner| around.any(|name| name == owner))
    }
}

/// Returns the folders and the file of a path as names of modules: `src/code/walk.rs` has `src`, `code`, `walk`.
pub(super) fn module_names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        path.with_extension("").components().map(|part| part.as_os_str().to_string_lossy().replace('-', "_")).collect();
    if matches!(names.last().map(String::as_str), Some("__init__" | "mod" | "index" | "lib" | "main")) {
        names.pop();
    }
    names
}

/// Returns the number of folders that two paths share at their beginning.
pub(super) fn nearness(one: &Path, other: &Path) -> usize {
    one.components().zip(other.components()).take_while(|(one, other)| one == other).count()
}

/// Returns lines of a text, by their numbers from 1, each cut if it is very long.
pub(super) fn lines_of(content: &[u8], first: u32, last: u32) -> Vec<String> {
    let text = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
    let lines = text.split(|byte| *byte == b'\n').skip(first.saturating_sub(1) as usize);
    let lines = lines.take((last + 1).saturating_sub(first) as usize);
    lines.map(|line| shortened(&String::from_utf8_lossy(line), LINE_CHARS_MAX)).collect()
}

/// Returns the text without white space at its end, cut after this number of characters.
pub(super) fn shortened(text: &str, chars_max: usize) -> String {
    let text = text.trim_end();
    match text.char_indices().nth(chars_max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_are_read_in_the_spelling_of_each_language() {
        let read = |text: &str| Symbol::new(text).map(|symbol| (symbol.owners.join(" "), symbol.name)).ok();
        let is = |owners: &str, name: &str| Some((owners.to_owned(), name.to_owned()));
        for (text, expected) in [
            ("name", is("", "name")),
            ("Type::name", is("Type", "name")),
            (" crate::a::f() ", is("crate a", "f")),
            ("Class.method", is("Class", "method")),
            ("Class#method?", is("Class", "method?")),
            ("App\\Models\\Form", is("App Models", "Form")),
            ("a/b.py", is("a b", "py")),
            ("#secret", is("", "#secret")),
            ("println!", is("", "println")),
            ("shapes::Point::operator->", is("shapes Point", "operator->")),
            ("", None),
            ("two words", None),
            ("a..b", None),
            ("::", None),
            ("+", None),
        ] {
            assert_eq!(read(text), expected, "{text:?}");
        }
    }
}

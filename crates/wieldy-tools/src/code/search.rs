//! `search_code`: finds code by a text, a regular expression or words.

use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Provider, Run, RunError, Tool, ToolSpec, schema_of};

use super::places::{endings_of, is_test, languages};
use super::{CodeFacts, CodeIndex, lines, ranked};
use crate::files::{FileError, TEXT_BYTES_MAX, Workspace, blocking};
use crate::index::words::{is_word_char, runs};
use crate::index::{Ask, FileId, IndexState, SkipReason, View};

/// Maximum number of finds that can be turned over.
const OFFSET_MAX: usize = 10_000;
/// Maximum number of words of a query for which near misses are looked up.
const NEAR_QUERY_WORDS_MAX: usize = 4;

/// A tool that searches the code of the workspace.
pub struct SearchCode {
    workspace: Arc<Workspace>,
    index: Arc<CodeIndex>,
}

/// A search for code.
#[derive(Deserialize, JsonSchema)]
pub struct SearchCodeArgs {
    /// A name, a text, a regular expression or some words.
    #[schemars(length(min = 1, max = 10_000))]
    query: String,
    /// Maximum number of finds.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 200))]
    limit: NonZeroU32,
    /// Only files in this language, such as `rust`, or with this ending, such as `toml`.
    #[schemars(length(min = 1, max = 40))]
    language: Option<String>,
    /// `auto` takes a name or a text in quotes as text, several words as words, and the rest as text or as a regular
    /// expression, whichever finds something.
    #[serde(default)]
    mode: Mode,
    /// The folder or file to search, relative to the workspace.
    #[serde(default = "crate::files::here")]
    scope: String,
    /// Number of lines to show before and after each find.
    #[serde(default = "context")]
    #[schemars(range(max = 20))]
    context: u8,
    /// Tests, foreign and generated code: shown last by default.
    #[serde(default)]
    tests: Tests,
    /// The `cursor` of the last answer, for the finds after it.
    #[schemars(length(min = 1, max = 20))]
    cursor: Option<String>,
}

fn limit() -> NonZeroU32 {
    NonZeroU32::new(20).expect("not zero")
}

fn context() -> u8 {
    2
}

/// A kind of search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Mode {
    #[default]
    Auto,
    /// The query itself, in one line.
    Text,
    /// A regular expression, matched against each line.
    Regex,
    /// Words in any order, also as parts of names, the best first.
    Words,
}

/// The place of tests among the finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Tests {
    Include,
    #[default]
    RankLower,
    Exclude,
}

/// The code that was found in one place.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub(super) struct Hit {
    pub(super) path: String,
    /// The lines of the find: the matching line, or the definition.
    pub(super) line: u64,
    pub(super) end_line: u64,
    /// The lines to show.
    pub(super) text: String,
    /// The number of the first of them.
    pub(super) text_line: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) symbol: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<String>,
    pub(super) score: f64,
    pub(super) matched: Vec<String>,
    #[serde(skip)]
    pub(super) id: FileId,
}

/// The answer for programs.
#[derive(Serialize, JsonSchema)]
struct Answer {
    results: Vec<Hit>,
    /// The mode that was taken.
    mode: Mode,
    /// The number of all finds.
    total: usize,
    index: IndexState,
    /// The argument `cursor` for the finds after these.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
    /// Names that are spelled alike, if nothing was found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    near: Vec<String>,
}

/// A question to one of the two engines.
pub(super) struct Question<'a> {
    pub(super) view: &'a View<CodeFacts>,
    pub(super) ask: &'a Ask<'a>,
    /// The files to search, in the order of finds of the same worth.
    pub(super) files: Vec<FileId>,
    pub(super) offset: usize,
    pub(super) limit: usize,
    pub(super) context: u8,
    lowers: bool,
}

impl Question<'_> {
    /// Returns true if finds in this file are worth less.
    pub(super) fn is_low(&self, id: FileId) -> bool {
        let file = self.view.file(id);
        let is_made = matches!(file.skipped, Some(SkipReason::Generated | SkipReason::Minified));
        self.lowers && (is_made || ranked::is_low_path(&file.path))
    }
}

/// The answer of an engine.
#[derive(Default)]
pub(super) struct Finds {
    pub(super) hits: Vec<Hit>,
    /// The number of all finds, shown or not.
    pub(super) total: usize,
    /// True if there may be more finds than that.
    pub(super) is_least: bool,
    /// The number of files that could not be searched.
    pub(super) unsearched: usize,
}

impl SearchCode {
    /// Creates the tool for this workspace and its index.
    pub(crate) fn new(workspace: Arc<Workspace>, index: Arc<CodeIndex>) -> Self {
        Self { workspace, index }
    }
}

impl Tool for SearchCode {
    type Args = SearchCodeArgs;

    fn spec(&self) -> ToolSpec {
        let mut spec = ToolSpec::new(
            "search_code",
            "Searches the workspace's code by a name, a text, a regular expression or several words (ranked, also as \
             parts of names). Gives lines with the definition around them. Never stale: files are compared with the \
             index before each answer.",
        )
        .category("code")
        .provider(Provider::Builtin)
        .read_only()
        .reads("scope")
        .permission("files.read")
        .scope("oracle")
        .scope("librarian")
        .timeout(Duration::from_secs(30));
        spec.output_schema = Some(schema_of::<Answer>());
        spec.annotations.open_world = false;
        spec.constraints.output_bytes_max = Some(1024 * 1024);
        spec
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn facts(&self, run: &Run) -> Vec<(String, Value)> {
        let known = self.index.known(run.caller().tenant.as_deref(), &run.confinement().files);
        known.map(|state| ("index.code".to_owned(), json!(state))).into_iter().collect()
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell_argument(arguments, "scope")
    }

    async fn run(&self, args: SearchCodeArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, index, run) = (self.workspace.clone(), self.index.clone(), run.clone());
        Ok(blocking(move || search(&workspace, &index, &args, &run)).await?)
    }
}

fn search(workspace: &Workspace, index: &CodeIndex, args: &SearchCodeArgs, run: &Run) -> Result<Outcome, FileError> {
    let guard = workspace.guard(&run.confinement().files);
    let ask = Ask::of_run(&guard, run);
    let offset = args.offset()?;
    let scope = workspace.scope(&args.scope, &guard)?;
    let view = index.refresh(&ask)?;
    let mut question = Question {
        view: &view,
        ask: &ask,
        files: files(&view, args, &scope)?,
        offset,
        limit: args.limit.get() as usize,
        context: args.context.min(20),
        lowers: args.tests == Tests::RankLower,
    };
    let mut files = std::mem::take(&mut question.files);
    files.sort_by_cached_key(|id| question.is_low(*id));
    question.files = files;
    let (mode, finds) = find(&question, args)?;
    let outcome = answer(&question, args, mode, finds);
    index.keep(&ask);
    Ok(outcome)
}

impl SearchCodeArgs {
    /// Returns the number of finds to turn over.
    fn offset(&self) -> Result<usize, FileError> {
        let Some(cursor) = &self.cursor else { return Ok(0) };
        cursor.parse().ok().filter(|offset| *offset <= OFFSET_MAX).ok_or_else(|| {
            let advice = "leave it out, or give the `cursor` of the answer before, with the same query";
            FileError::refused(format!("`{cursor}` is not a cursor of this tool"), advice)
        })
    }
}

/// Returns the files of the scope and the language.
fn files(view: &View<CodeFacts>, args: &SearchCodeArgs, scope: &Path) -> Result<Vec<FileId>, FileError> {
    let language = args.language.as_deref().map(str::to_ascii_lowercase);
    let endings: Option<Vec<&str>> = language.as_deref().map(|language| match endings_of(language) {
        Some(endings) => endings.to_vec(),
        None => vec![language.trim_start_matches('.')],
    });
    let has_ending = |path: &Path, endings: &[&str]| {
        let ending = path.extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| endings.iter().any(|known| known.eq_ignore_ascii_case(ending)))
    };
    if let Some(language) = language.as_deref().filter(|language| endings_of(language).is_none())
        && let Some(endings) = &endings
        && !view.files().any(|(_, file)| has_ending(&file.path, endings))
    {
        let known = languages().collect::<Vec<_>>().join(", ");
        return Err(FileError::refused(
            format!("`{language}` is neither a language nor the ending of a file here"),
            format!("give one of {known}, or the ending of a file such as `toml`"),
        ));
    }
    let is_wanted = |path: &Path| {
        (scope == Path::new(".") || path.starts_with(scope))
            && endings.as_deref().is_none_or(|endings| has_ending(path, endings))
            && !(args.tests == Tests::Exclude && is_test(path))
    };
    Ok(view.files().filter(|(_, file)| is_wanted(&file.path)).map(|(id, _)| id).collect())
}

/// Asks the engine that fits the query, and returns the mode that was taken.
fn find(question: &Question<'_>, args: &SearchCodeArgs) -> Result<(Mode, Finds), FileError> {
    let query = args.query.as_str();
    let words = |query: &str| (Mode::Words, ranked::find(question, query));
    Ok(match args.mode {
        Mode::Text => (Mode::Text, lines::find(question, query, true)?),
        Mode::Regex => (Mode::Regex, lines::find(question, query, false)?),
        Mode::Words if ranked::has_terms(query) => words(query),
        // Words that say nothing are looked for as they are.
        Mode::Words => (Mode::Text, lines::find(question, query.trim(), true)?),
        Mode::Auto => match Guess::of(query) {
            Guess::Text(text) => (Mode::Text, lines::find(question, text, true)?),
            Guess::Words if ranked::has_terms(query) => words(query),
            Guess::Words | Guess::Name => match lines::find(question, query.trim(), true)? {
                finds if finds.total == 0 && ranked::has_terms(query) => words(query),
                finds => (Mode::Text, finds),
            },
            Guess::Either => match lines::find(question, query, true)? {
                finds if finds.total > 0 => (Mode::Text, finds),
                // Where the query is no regular expression, it was a text.
                finds => lines::find(question, query, false).map_or((Mode::Text, finds), |finds| (Mode::Regex, finds)),
            },
        },
    })
}

/// The form of a query.
#[derive(Debug, PartialEq, Eq)]
enum Guess<'a> {
    /// A text in quotes.
    Text(&'a str),
    /// One word.
    Name,
    /// Several plain words.
    Words,
    /// A text with other characters, or a regular expression.
    Either,
}

impl<'a> Guess<'a> {
    fn of(query: &'a str) -> Self {
        let trimmed = query.trim();
        let quoted = trimmed.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
        if let Some(text) = quoted.filter(|text| !text.is_empty()) {
            return Self::Text(text);
        }
        let is_end = |character: char| ",.;:!?\u{3002}\u{ff1f}".contains(character);
        let mut words = trimmed.split_whitespace().map(|word| word.trim_end_matches(is_end));
        let is_plain =
            |word: &str| word.chars().all(|character| is_word_char(character) || "-'\u{2019}".contains(character));
        match (words.clone().count(), words.all(is_plain)) {
            (1, true) if trimmed.chars().all(is_word_char) => Self::Name,
            (2.., true) => Self::Words,
            _ => Self::Either,
        }
    }
}

/// Makes the answer.
fn answer(question: &Question<'_>, args: &SearchCodeArgs, mode: Mode, mut finds: Finds) -> Outcome {
    let mut bytes = 0;
    let fits = finds.hits.iter().take_while(|hit| {
        bytes += hit.text.len() + hit.path.len();
        bytes <= TEXT_BYTES_MAX
    });
    let shown = fits.count().max(1).min(finds.hits.len());
    finds.hits.truncate(shown);
    let end = question.offset + shown;
    let has_more = end < finds.total && shown > 0 && end <= OFFSET_MAX;
    let state = question.view.state();
    let mut text = text(&finds.hits);
    if shown == 0 {
        text.push_str(if question.offset > 0 { "no more matches\n" } else { "no matches\n" });
    }
    let near: Vec<&str> = if finds.total == 0 { near(question, &args.query) } else { Vec::new() };
    let mut note = |note: String| writeln!(text, "[{note}]").expect("a text takes everything");
    if !near.is_empty() {
        note(format!("near: {}", near.join(", ")));
    }
    if has_more {
        let least = if finds.is_least { "at least " } else { "" };
        note(format!("{shown} of {least}{} finds; `cursor` \"{end}\" shows the next", finds.total));
    }
    if !state.complete {
        note(format!("not complete: {} of {} files are indexed; ask again", state.indexed, state.files));
    }
    if finds.unsearched > 0 {
        note(format!("{} files could not be searched", finds.unsearched));
    }
    text.pop();
    let cursor = has_more.then(|| end.to_string());
    let partial = !state.complete || finds.is_least;
    let near = near.into_iter().map(str::to_owned).collect();
    let answer = Answer { results: finds.hits, mode, total: finds.total, index: state, cursor, near };
    let answer = serde_json::to_value(answer).expect("an answer is plain data");
    Outcome { partial, ..Outcome::text(text).structured(answer) }
}

/// Returns names that are like those of the query.
fn near<'a>(question: &Question<'a>, query: &str) -> Vec<&'a str> {
    let mut near: Vec<&str> = Vec::new();
    for run in runs(query).filter(|run| run.len() > 2).take(NEAR_QUERY_WORDS_MAX) {
        near.extend(question.view.near(run).into_iter().filter(|word| !near.contains(word)).collect::<Vec<_>>());
    }
    near.truncate(5);
    near
}

/// Writes the finds for a model: each path once, then its lines with their numbers. Lines of the find have a colon.
fn text(hits: &[Hit]) -> String {
    let mut text = String::new();
    let (mut path, mut last) = ("", 0);
    for hit in hits {
        let is_range = hit.end_line > hit.line;
        if hit.path != path || is_range {
            let range = if is_range { format!(":{}-{}", hit.line, hit.end_line) } else { String::new() };
            let symbol = hit.symbol.as_ref().filter(|_| is_range).map(|symbol| format!("  {symbol}"));
            writeln!(text, "{}{range}{}", hit.path, symbol.unwrap_or_default()).expect("a text takes everything");
            (path, last) = (&hit.path, 0);
        } else if hit.text_line > last + 1 {
            text.push_str("--\n");
        }
        let seen = last;
        for (number, line) in
            (hit.text_line..).zip(hit.text.split('\n')).filter(|(number, _)| *number > seen || is_range)
        {
            let mark = if !is_range && number == hit.line { ':' } else { '-' };
            writeln!(text, "{number}{mark}{line}").expect("a text takes everything");
            last = number;
        }
    }
    text
}

impl Workspace {
    /// Returns the path of a scope from the root, with all links resolved.
    pub(crate) fn scope(&self, text: &str, guard: &crate::files::Guard<'_>) -> Result<PathBuf, FileError> {
        let given = self.given(text)?;
        let key = self.key(&given).map_err(|error| self.suggest_near(guard, &given, error))?;
        let path = PathBuf::from(if key.is_empty() { "." } else { &key });
        guard.check_shown(&path)?;
        Ok(path)
    }
}

//! `Glob`: finds files by their names.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

use globset::{GlobBuilder, GlobMatcher};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::spelling::PatternKind;
use super::walk::WalkOptions;
use super::workspace::Workspace;

const LIMIT_DEFAULT: NonZeroU32 = NonZeroU32::new(1000).expect("not zero");

/// A tool that finds files of the workspace by their names.
pub struct Glob {
    workspace: Arc<Workspace>,
}

/// A file search.
#[derive(Deserialize, JsonSchema)]
pub struct GlobArgs {
    /// The pattern for paths below `path`: `*` and `?` within a name, `**` for any folders, `{a,b}`, `[a-z]`.
    #[schemars(length(min = 1, max = 1000))]
    pattern: String,
    /// The folder to look in, relative to the workspace.
    #[serde(default = "super::here")]
    path: String,
    /// Maximum number of files to show.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 10_000))]
    limit: NonZeroU32,
    /// Find names that begin with a dot too.
    #[serde(default)]
    hidden: bool,
    /// Find files that `.gitignore` excludes too.
    #[serde(default)]
    ignored: bool,
}

fn limit() -> NonZeroU32 {
    LIMIT_DEFAULT
}

impl Glob {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for Glob {
    type Args = GlobArgs;

    fn spec(&self) -> ToolSpec {
        super::reading(
            "Glob",
            "FindFiles",
            "Finds files by a pattern such as `src/**/*.rs` and gives their paths, sorted. \
             Hidden files and those that `.gitignore` excludes are left out unless asked for.",
        )
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[("pattern", PatternKind::Path)])
    }

    async fn run(&self, args: GlobArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || glob(&workspace, &args, &run)).await?)
    }
}

fn glob(workspace: &Workspace, args: &GlobArgs, run: &Run) -> Result<Outcome, FileError> {
    let matcher = matcher(&args.pattern)?;
    let given = workspace.given(&args.path)?;
    let options = WalkOptions { depth: u32::MAX, hidden: args.hidden, ignored: args.ignored };
    let guard = &workspace.guard(&run.confinement().files);
    let base = workspace.key(&given).map_err(|error| workspace.suggest_near(guard, &given, error))?;
    let mut walk = workspace.walk(&given, options, guard, run.stop())?;
    let mut found = walk.by_ref().filter(|entry| {
        let below = entry.path.strip_prefix(&base).unwrap_or(&entry.path);
        !entry.file_type.is_dir() && matcher.is_match(below)
    });
    let limit = args.limit.get() as usize;
    let paths: Vec<String> =
        found.by_ref().take(limit).map(|entry| entry.path.to_string_lossy().into_owned()).collect();
    let more = paths.len() == limit && found.next().is_some();
    let left_out = walk.note_on_limits();
    let cut = more || left_out.is_some();
    let mut text = paths.join("\n");
    if paths.is_empty() {
        text.push_str("no matches");
        if !args.pattern.contains('/') {
            text.push_str(&format!("; `**/{}` looks in the folders below too", args.pattern));
        }
    }
    if more {
        text.push_str(&format!("\n[only the first {}]", paths.len()));
    }
    if let Some(left_out) = left_out {
        text.push_str(&format!("\n[{left_out}]"));
    }
    let count = paths.len();
    let mut outcome = Outcome::text(text).structured(json!({ "paths": paths, "count": count, "cut": cut }));
    outcome.partial = cut;
    Ok(outcome)
}

/// Compiles a pattern for paths: `*` stays within one name.
pub(super) fn matcher(pattern: &str) -> Result<GlobMatcher, FileError> {
    if pattern.starts_with('/') {
        let message = format!("`{pattern}` is an absolute pattern for paths outside the folder that is searched");
        return Err(FileError::refused(message, "write it relative to `path`"));
    }
    let pattern = pattern.strip_prefix("./").unwrap_or(pattern);
    let glob = GlobBuilder::new(pattern).literal_separator(true).backslash_escape(true).build();
    glob.map(|glob| glob.compile_matcher()).map_err(|error| {
        FileError::refused(
            format!("`{pattern}` is not a pattern for paths: {}", error.kind()),
            "write it like `src/**/*.rs`, and a special character itself as `[*]`",
        )
    })
}

/// Compiles the pattern of a filter. A pattern without a slash matches names in any folder.
pub(super) fn filter(pattern: &str) -> Result<impl Fn(&Path) -> bool, FileError> {
    let anywhere = if pattern.contains('/') { pattern.to_owned() } else { format!("**/{pattern}") };
    let matcher = matcher(&anywhere)?;
    Ok(move |path: &Path| matcher.is_match(path))
}

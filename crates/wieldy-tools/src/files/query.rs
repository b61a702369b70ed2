//! `QueryVFS`: finds files, folders and the caller's own artifacts, by name, size, time and text.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::sinks::Bytes;
use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wieldy_core::artifact::{Grep, grep};
use wieldy_core::{ArtifactInfo, Confinement, Outcome, Run, RunError, Tool, ToolSpec, parse_since};

use super::error::{FileError, blocking};
use super::pattern::LINE_BYTES_MAX;
use super::search::Stoppable;
use super::spelling::PatternKind;
use super::walk::{WalkEntry, WalkOptions};
use super::workspace::Workspace;
use super::{glob, pattern, search};

/// Maximum number of artifacts that are examined, the latest first.
const ARTIFACTS_MAX: usize = 10_000;

/// A tool that queries the workspace and the caller's artifacts.
pub struct QueryVfs {
    workspace: Arc<Workspace>,
}

/// The conditions; a find meets all that are given.
#[derive(Deserialize, JsonSchema)]
pub struct QueryVfsArgs {
    /// Only paths like this: `*.rs` anywhere, or `src/**/*.rs` below `path`. Artifacts are named `artifact:…`.
    #[schemars(length(min = 1, max = 1000))]
    glob: Option<String>,
    /// Only finds of this kind.
    #[serde(default)]
    kind: Kind,
    /// Minimum size in bytes; folders have no size.
    min_bytes: Option<u64>,
    /// Maximum size in bytes; folders have no size.
    max_bytes: Option<u64>,
    /// Only finds changed since then: a time such as `2026-11-16T08:00:00Z`, or an age such as `2h`.
    changed_since: Option<String>,
    /// Only files and artifacts with this text in a line. Case counts if the text has a capital letter.
    #[schemars(length(min = 1, max = 1000))]
    text: Option<String>,
    /// The folder to look in, relative to the workspace. Artifacts are in none.
    #[serde(default = "super::here")]
    path: String,
    /// Maximum number of finds to show.
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
    NonZeroU32::new(200).expect("not zero")
}

/// A kind of find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Kind {
    #[default]
    Any,
    File,
    Folder,
    Artifact,
}

impl Kind {
    /// Returns true if this kind includes the other.
    fn takes(self, other: Self) -> bool {
        self == Self::Any || self == other
    }
}

/// A file, a folder or an artifact that meets the conditions.
#[derive(Serialize)]
struct QueryHit {
    kind: Kind,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed_at: Option<Timestamp>,
}

impl QueryVfs {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for QueryVfs {
    type Args = QueryVfsArgs;

    fn spec(&self) -> ToolSpec {
        super::reading(
            "QueryVFS",
            "QueryFiles",
            "Queries files and folders of the workspace and your own artifacts (kept large outputs) in one go: by glob, \
             kind, size, time of change and text. Gives a line per find with size and time, files sorted by path, then \
             artifacts, the latest first. Links, hidden files and those that `.gitignore` excludes are left out.",
        )
        .timeout(Duration::from_secs(30))
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[("glob", PatternKind::Filter)])
    }

    async fn run(&self, args: QueryVfsArgs, run: &Run) -> Result<Outcome, RunError> {
        let since = args.changed_since.as_deref().map(parse_since).transpose().map_err(RunError::invalid_input)?;
        let (workspace, run) = (self.workspace.clone(), run.clone());
        blocking(move || query(&workspace, &args, since, &run)).await
    }
}

fn query(workspace: &Workspace, args: &QueryVfsArgs, since: Option<Timestamp>, run: &Run) -> Result<Outcome, RunError> {
    let limit = args.limit.get() as usize;
    let (mut finds, mut notes) = (Vec::new(), Vec::new());
    if args.kind != Kind::Artifact {
        files(workspace, args, since, run, &mut finds, &mut notes)?;
    }
    if args.kind.takes(Kind::Artifact) && args.path == super::here() && finds.len() <= limit {
        artifacts(args, since, run, &mut finds, &mut notes)?;
    }
    if finds.len() > limit {
        finds.truncate(limit);
        notes.push(format!("only the first {limit}"));
    }
    let mut lines: Vec<String> = finds.iter().map(line).collect();
    if lines.is_empty() {
        lines.push("no matches".to_owned());
    }
    lines.extend(notes.iter().map(|note| format!("[{note}]")));
    let (count, cut) = (finds.len(), !notes.is_empty());
    let mut outcome = Outcome::text(lines.join("\n")).structured(json!({ "finds": finds, "count": count, "cut": cut }));
    outcome.partial = cut;
    Ok(outcome)
}

/// Adds the files and folders that meet the conditions, until there is one more than the limit.
fn files(
    workspace: &Workspace,
    args: &QueryVfsArgs,
    since: Option<Timestamp>,
    run: &Run,
    finds: &mut Vec<QueryHit>,
    notes: &mut Vec<String>,
) -> Result<(), FileError> {
    let wanted = args.glob.as_deref().map(glob::filter).transpose()?;
    let matcher = args.text.as_deref().map(matcher).transpose()?;
    let given = workspace.given(&args.path)?;
    let options = WalkOptions { depth: u32::MAX, hidden: args.hidden, ignored: args.ignored };
    let guard = &workspace.guard(&run.confinement().files);
    let base = workspace.key(&given).map_err(|error| workspace.suggest_near(guard, &given, error))?;
    let mut walk = workspace.walk(&given, options, guard, run.stop())?;
    let mut unread = 0;
    for entry in walk.by_ref() {
        let kind = if entry.file_type.is_dir() { Kind::Folder } else { Kind::File };
        let below = entry.path.strip_prefix(&base).unwrap_or(&entry.path);
        let is_other = kind == Kind::File && !entry.file_type.is_file();
        if is_other || !args.kind.takes(kind) || guard.check_shown(&entry.path).is_err() {
            continue;
        }
        if wanted.as_ref().is_some_and(|wanted| !wanted(below)) {
            continue;
        }
        let Some(metadata) = entry.metadata() else { continue };
        let changed_at = metadata.modified().ok().and_then(|time| Timestamp::try_from(time.into_std()).ok());
        let bytes = (kind == Kind::File).then(|| metadata.len());
        if !args.fits(bytes, changed_at, since) {
            continue;
        }
        match &matcher {
            Some(_) if kind == Kind::Folder => continue,
            Some(matcher) => match search_text(&entry, matcher, run) {
                TextSearch::Found => {}
                TextSearch::NotFound => continue,
                TextSearch::Unreadable => {
                    unread += 1;
                    continue;
                }
            },
            None => {}
        }
        finds.push(QueryHit { kind, path: entry.path.to_string_lossy().into_owned(), bytes, changed_at });
        if finds.len() > args.limit.get() as usize {
            return Ok(());
        }
    }
    notes.extend(walk.note_on_limits());
    if unread > 0 {
        notes.push(format!("{unread} files could not be searched"));
    }
    Ok(())
}

/// Adds the caller's artifacts that meet the conditions, the latest first, until there is one more than the limit.
fn artifacts(
    args: &QueryVfsArgs,
    since: Option<Timestamp>,
    run: &Run,
    finds: &mut Vec<QueryHit>,
    notes: &mut Vec<String>,
) -> Result<(), RunError> {
    // Artifacts belong to a workspace with a name, so without one the caller has none.
    let Some(workspace) = run.confinement().recorded_workspace() else { return Ok(()) };
    let wanted = args.glob.as_deref().map(glob::filter).transpose()?;
    let pattern = args.text.as_deref().map(|text| {
        let case = if text.chars().any(char::is_uppercase) { "" } else { "(?i)" };
        pattern::regex(&format!("{case}{}", regex::escape(text)))
    });
    let pattern = pattern.transpose()?;
    let store = &**run.artifacts();
    let own = store.list(run.caller(), &workspace, ARTIFACTS_MAX).map_err(super::artifact::run_error)?;
    if own.len() == ARTIFACTS_MAX {
        notes.push(format!("only the latest {ARTIFACTS_MAX} artifacts were looked at"));
    }
    for ArtifactInfo { id, kept_bytes, .. } in own {
        if run.stop().is_cancelled() {
            notes.push("the call was stopped before all artifacts were looked at".to_owned());
            break;
        }
        let (path, changed_at) = (id.to_string(), id.made_at());
        let is_named = wanted.as_ref().is_none_or(|wanted| wanted(path.as_ref()));
        if !is_named || !args.fits(Some(kept_bytes), changed_at, since) {
            continue;
        }
        if let Some(pattern) = &pattern {
            // The artifact may have been removed meanwhile.
            let search = Grep { pattern, matches_max: 1, line_bytes_max: 4 * 1024 * 1024, stop: run.stop() };
            let found = grep(store, id, run.caller(), &search);
            if found.map_or(true, |(lines, _)| lines.is_empty()) {
                continue;
            }
        }
        finds.push(QueryHit { kind: Kind::Artifact, path, bytes: Some(kept_bytes), changed_at });
        if finds.len() > args.limit.get() as usize {
            break;
        }
    }
    Ok(())
}

impl QueryVfsArgs {
    /// Returns true if size and time meet the conditions. An unknown size or time meets none.
    fn fits(&self, bytes: Option<u64>, changed_at: Option<Timestamp>, since: Option<Timestamp>) -> bool {
        self.min_bytes.is_none_or(|min| bytes.is_some_and(|bytes| bytes >= min))
            && self.max_bytes.is_none_or(|max| bytes.is_some_and(|bytes| bytes <= max))
            && since.is_none_or(|since| changed_at.is_some_and(|changed_at| changed_at >= since))
    }
}

fn matcher(text: &str) -> Result<RegexMatcher, FileError> {
    let mut builder = RegexMatcherBuilder::new();
    builder.case_smart(true).fixed_strings(true).multi_line(true).crlf(true);
    pattern::line_matcher(text, &mut builder)
}

/// The result of a search for the text in one file.
enum TextSearch {
    Found,
    NotFound,
    Unreadable,
}

/// Searches the lines of a file for the text.
fn search_text(entry: &WalkEntry, matcher: &RegexMatcher, run: &Run) -> TextSearch {
    // The file may have been replaced by a pipe meanwhile.
    let is_file = |file: &cap_std::fs::File| file.metadata().is_ok_and(|metadata| metadata.is_file());
    let Some(file) = entry.open().ok().filter(is_file) else { return TextSearch::Unreadable };
    let mut is_found = false;
    let sink = Bytes(|_, _| {
        is_found = true;
        Ok(false)
    });
    let reader = Stoppable { reader: file, stop: run.stop() };
    match search::searcher(0, LINE_BYTES_MAX).search_reader(matcher, reader, sink) {
        Err(_) => TextSearch::Unreadable,
        Ok(()) if is_found => TextSearch::Found,
        Ok(()) => TextSearch::NotFound,
    }
}

fn line(find: &QueryHit) -> String {
    let mut line = find.path.clone();
    if find.kind == Kind::Folder {
        line.push('/');
    }
    if let Some(bytes) = find.bytes {
        line.push_str(&format!("  {bytes} bytes"));
    }
    if let Some(changed_at) = find.changed_at {
        line.push_str(&format!("  {changed_at:.0}"));
    }
    line
}

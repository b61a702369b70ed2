//! `List`: lists the entries of a folder.

use std::num::NonZeroU32;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec};

use super::error::{FileError, blocking};
use super::walk::{WalkEntry, WalkOptions};
use super::workspace::Workspace;

const LIMIT_DEFAULT: NonZeroU32 = NonZeroU32::new(1000).expect("not zero");

/// A tool that lists a folder of the workspace.
pub struct List {
    workspace: Arc<Workspace>,
}

/// A listing.
#[derive(Deserialize, JsonSchema)]
pub struct ListArgs {
    /// The folder, relative to the workspace.
    #[serde(default = "super::here")]
    path: String,
    /// Number of folder levels to show; 1 is only the folder's own entries.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 100))]
    depth: NonZeroU32,
    /// Show names that begin with a dot too.
    #[serde(default)]
    hidden: bool,
    /// Show files that `.gitignore` excludes too.
    #[serde(default)]
    ignored: bool,
    /// Maximum number of entries to show.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 10_000))]
    limit: NonZeroU32,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn limit() -> NonZeroU32 {
    LIMIT_DEFAULT
}

impl List {
    /// Creates the tool for this workspace.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace }
    }
}

impl Tool for List {
    type Args = ListArgs;

    fn spec(&self) -> ToolSpec {
        super::reading(
            "List",
            "ListFiles",
            "Lists what is in a folder, sorted, with sizes; folders end in `/`. \
             Hidden files and those that `.gitignore` excludes are left out unless asked for.",
        )
        .weak_alias("list_files")
    }

    fn names_of(&self, thing: &str, _: &Confinement) -> Vec<String> {
        self.workspace.names_of(thing)
    }

    fn respell(&self, arguments: &Value, _: &Confinement) -> Vec<(String, String)> {
        self.workspace.respell(arguments, &[])
    }

    async fn run(&self, args: ListArgs, run: &Run) -> Result<Outcome, RunError> {
        let (workspace, run) = (self.workspace.clone(), run.clone());
        Ok(blocking(move || list(&workspace, &args, &run)).await?)
    }
}

fn list(workspace: &Workspace, args: &ListArgs, run: &Run) -> Result<Outcome, FileError> {
    let given = workspace.given(&args.path)?;
    let options = WalkOptions { depth: args.depth.get(), hidden: args.hidden, ignored: args.ignored };
    let guard = workspace.guard(&run.confinement().files);
    let mut walk = workspace.walk(&given, options, &guard, run.stop())?;
    let limit = args.limit.get() as usize;
    let (mut lines, mut entries) = (Vec::new(), Vec::new());
    for entry in walk.by_ref().take(limit) {
        let (line, value) = shown(&entry);
        lines.push(line);
        entries.push(value);
    }
    let more = entries.len() == limit && walk.next().is_some();
    let left_out = walk.note_on_limits();
    let cut = more || left_out.is_some();
    if lines.is_empty() {
        lines.push(format!("`{given}` is empty, or all in it is hidden or ignored"));
    }
    if more {
        lines.push(format!("[only the first {} entries]", entries.len()));
    }
    lines.extend(left_out.map(|left_out| format!("[{left_out}]")));
    let count = entries.len();
    let mut outcome = Outcome::text(lines.join("\n"))
        .structured(json!({ "path": given.to_string(), "entries": entries, "count": count, "cut": cut }));
    outcome.partial = cut;
    Ok(outcome)
}

fn shown(entry: &WalkEntry) -> (String, Value) {
    let path = entry.path.to_string_lossy();
    if entry.file_type.is_dir() {
        return (format!("{path}/"), json!({ "path": path, "kind": "folder" }));
    }
    if entry.file_type.is_file() {
        let bytes = entry.bytes();
        let size = bytes.map_or_else(String::new, |bytes| format!("  {}", size(bytes)));
        return (format!("{path}{size}"), json!({ "path": path, "kind": "file", "bytes": bytes }));
    }
    let kind = if entry.file_type.is_symlink() { "link" } else { "special" };
    (format!("{path}  ({kind})"), json!({ "path": path, "kind": kind }))
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut size, mut unit) = (bytes as f64 / 1024.0, 0);
    while size >= 1023.95 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes_are_short() {
        let sizes = [0, 1023, 1024, 1536, 1024 * 1024 - 1, 5 << 30, u64::MAX].map(super::size);
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "16384.0 PiB"]);
    }
}

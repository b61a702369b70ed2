//! `vault_list`: lists the notes of a folder.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wieldy_core::{Confinement, Outcome, Run, RunError, Tool, ToolSpec, shown_in_line};

use super::folder::Vault;
use super::graph::Graph;
use super::markdown::NoteFacts;
use super::names::folded;
use super::projects::Vaults;
use crate::files::{FileError, blocking};

/// The number of notes in one answer.
const PAGE: usize = 200;

/// A tool that lists notes.
pub(crate) struct VaultList {
    vaults: Arc<Vaults>,
}

/// A listing of notes.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct VaultListArgs {
    /// The folder in the vault.
    #[serde(default = "super::here")]
    #[schemars(length(min = 1, max = 4096))]
    folder: String,
    /// The vault.
    #[serde(default = "super::default_project")]
    #[schemars(length(min = 1, max = 100))]
    project_id: String,
    /// Number of folder levels; 1 is only the folder's own notes.
    #[serde(default = "all_levels")]
    #[schemars(range(min = 1, max = 100))]
    depth: NonZeroU32,
    /// The order.
    #[serde(default)]
    sort: Sort,
    /// Only notes with this tag, or one below it.
    #[schemars(length(min = 1, max = 200))]
    tag: Option<String>,
    /// The `cursor` of the page before.
    #[schemars(length(max = 20))]
    cursor: Option<String>,
}

/// The order of a listing.
#[derive(Deserialize, JsonSchema, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sort {
    #[default]
    Name,
    /// The last changed first.
    Modified,
}

fn all_levels() -> NonZeroU32 {
    NonZeroU32::new(100).expect("not zero")
}

impl VaultList {
    pub(crate) fn new(vaults: Arc<Vaults>) -> Self {
        Self { vaults }
    }
}

impl Tool for VaultList {
    type Args = VaultListArgs;

    fn spec(&self) -> ToolSpec {
        let description = "Lists the notes of a vault's folder with titles, tags and numbers of links, 200 at a time.";
        super::spec("vault_list", description, 10).scope("oracle").read_only().permission("files.read").reads("folder")
    }

    fn names_of(&self, _: &str, _: &Confinement) -> Vec<String> {
        self.vaults.names_of("")
    }

    fn facts(&self, run: &Run) -> Vec<(String, Value)> {
        vec![("vault.projects".to_owned(), json!(self.vaults.usable(run.caller())))]
    }

    async fn run(&self, args: VaultListArgs, run: &Run) -> Result<Outcome, RunError> {
        let (vaults, run) = (self.vaults.clone(), run.clone());
        blocking(move || {
            let vault = vaults.of(run.caller(), &args.project_id)?;
            super::moving::finish_moves(&vault, &run)?;
            Ok(list(&vault, &args, &run)?)
        })
        .await
    }
}

/// A note of the listing.
struct Listed {
    file: usize,
    modified: Option<Timestamp>,
    bytes: Option<u64>,
}

fn list(vault: &Vault, args: &VaultListArgs, run: &Run) -> Result<Outcome, FileError> {
    let folder = vault.plain(&args.folder)?;
    let first = super::offset(args.cursor.as_deref())?;
    let (listed, index) = vault.look(run, |_, graph, _| {
        let (notes, folders) = chosen(graph, args, &folder);
        if !folder.is_empty() && !is_folder(graph, &folder) {
            return Err(super::no_folder(graph, &folder));
        }
        let total = notes.len();
        // Only the order by time needs the times of all notes.
        let mut notes: Vec<Listed> = match args.sort {
            Sort::Name => notes.into_iter().skip(first).take(PAGE).map(|file| listed(vault, graph, file)).collect(),
            Sort::Modified => notes.into_iter().map(|file| listed(vault, graph, file)).collect(),
        };
        if args.sort == Sort::Modified {
            notes.sort_by_key(|note| (std::cmp::Reverse(note.modified), note.file));
            notes = notes.into_iter().skip(first).take(PAGE).collect();
        }
        let shown: Vec<Value> = notes.iter().map(|note| shown(graph, note)).collect();
        Ok((shown, folders, total))
    })?;
    let (notes, folders, total) = listed?;
    let next = first + notes.len();
    let mut lines: Vec<String> = folders.iter().map(|folder| format!("{folder}/")).collect();
    lines.extend(notes.iter().map(line));
    if lines.is_empty() {
        lines.push("no notes here".to_owned());
    }
    if next < total {
        lines.push(format!("[{} of {total} notes; go on with `cursor` {next}]", notes.len()));
    }
    lines.extend(super::note_on_index(&index));
    let mut answer = json!({"folder": folder, "project_id": args.project_id, "notes": notes, "folders": folders, "total": total, "index": index});
    if next < total {
        answer["cursor"] = json!(next.to_string());
    }
    let mut outcome = Outcome::text(lines.join("\n")).structured(answer);
    outcome.partial = next < total || !index.complete;
    Ok(outcome)
}

/// Returns the notes of the folder within the depth, and the folders among them.
fn chosen(graph: &Graph, args: &VaultListArgs, folder: &str) -> (Vec<usize>, BTreeSet<String>) {
    let depth = args.depth.get() as usize;
    let tag = args.tag.as_deref().map(|tag| folded(tag.trim_start_matches('#')));
    let (mut notes, mut folders) = (Vec::new(), BTreeSet::new());
    for file in 0..graph.names.len() {
        let path = graph.names.path(file);
        let Some(below) = super::below(folder, path) else { continue };
        let levels: Vec<&str> = below.split('/').collect();
        for level in 1..levels.len().min(depth + 1) {
            folders.insert(levels[..level].join("/"));
        }
        let fits = |facts: &NoteFacts| tag.as_ref().is_none_or(|tag| super::has_tag(facts, tag));
        let is_listed = super::names::is_note(path) && levels.len() <= depth;
        let facts = graph.facts[file].as_deref();
        if is_listed && facts.map_or(tag.is_none(), fits) {
            notes.push(file);
        }
    }
    let prefix = |name: String| super::names::workspace_path(folder, &name);
    (notes, folders.into_iter().map(prefix).collect())
}

/// Returns true if the vault has files in this folder.
fn is_folder(graph: &Graph, folder: &str) -> bool {
    (0..graph.names.len()).any(|file| super::below(folder, graph.names.path(file)).is_some())
}

fn listed(vault: &Vault, graph: &Graph, file: usize) -> Listed {
    let metadata = vault.root.root().symlink_metadata(graph.names.path(file)).ok();
    let modified = metadata.as_ref().and_then(|metadata| metadata.modified().ok());
    let modified = modified.and_then(|time| Timestamp::try_from(time.into_std()).ok());
    Listed { file, modified, bytes: metadata.map(|metadata| metadata.len()) }
}

fn shown(graph: &Graph, note: &Listed) -> Value {
    let facts = graph.facts[note.file].as_ref();
    json!({
        "path": graph.names.path(note.file),
        "title": graph.title(note.file),
        "modified": note.modified.map(|time| time.to_string()),
        "bytes": note.bytes,
        "tags": facts.map(|facts| facts.tags.clone()).unwrap_or_default(),
        "links_in": graph.links_in[note.file].len(),
        "links_out": facts.map_or(0, |facts| facts.links.len()),
    })
}

fn line(note: &Value) -> String {
    let tags: String =
        note["tags"].as_array().into_iter().flatten().filter_map(Value::as_str).map(|tag| format!(" #{tag}")).collect();
    let (path, title) = (note["path"].as_str().unwrap_or_default(), note["title"].as_str().unwrap_or_default());
    let title = match super::names::stem(super::names::last(path)) == title {
        true => String::new(),
        false => format!("  {}", shown_in_line(title)),
    };
    format!("{}{title}{}", shown_in_line(path), shown_in_line(&tags))
}

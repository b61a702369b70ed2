//! The vault tools: notes in Markdown with properties and links, in a folder that people edit too.
//!
//! Files are the truth: the tools change them by byte ranges, and every index is derived and may be deleted.
//!
//! | modules | do |
//! | --- | --- |
//! | `read`, `write`, `search`, `list`, `moving`, `index_page` | one tool each |
//! | `projects`, `folder` | the vaults of the configuration and their owners; opening files |
//! | `markdown`, `front_matter`, `yaml_text`, `link`, `names` | what a note says, and the file that a link means |
//! | `graph`, `query` | the links between all notes; the words of a search |
//! | `plan`, `rewrite` | a move that survives the end of the process; changing links |

mod folder;
mod front_matter;
mod graph;
mod index_page;
mod link;
mod list;
mod markdown;
mod moving;
mod names;
mod plan;
mod projects;
mod query;
mod read;
mod rewrite;
mod search;
mod write;
mod yaml_text;

use std::sync::Arc;
use std::time::Duration;

use wieldy_core::{Provider, SharedTool, ToolSpec};

use self::graph::Graph;
use self::markdown::NoteFacts;
use self::names::folded;
use self::projects::Vaults;
use crate::files::{FileError, Workspace};
use crate::index::IndexState;

pub use projects::{DEFAULT_PROJECT, VaultOptions, VaultProject};

/// Returns the vault tools. Without a project, they say what to configure.
pub fn vault_tools(workspace: Arc<Workspace>, options: VaultOptions) -> Vec<SharedTool> {
    let vaults = Arc::new(Vaults::new(workspace, options));
    vec![
        Arc::new(read::VaultRead::new(vaults.clone())),
        Arc::new(write::VaultWrite::new(vaults.clone())),
        Arc::new(search::VaultSearch::new(vaults.clone())),
        Arc::new(list::VaultList::new(vaults.clone())),
        Arc::new(moving::VaultMove::new(vaults.clone())),
        Arc::new(index_page::VaultCreateIndex::new(vaults)),
    ]
}

/// Returns the common declaration of all vault tools.
fn spec(name: &str, description: &str, seconds: u64) -> ToolSpec {
    let mut spec = ToolSpec::new(name, description)
        .category("vault")
        .provider(Provider::Builtin)
        .timeout(Duration::from_secs(seconds))
        .scope("librarian");
    spec.annotations.open_world = false;
    // Each tool bounds its own answer.
    spec.constraints.output_bytes_max = Some(1024 * 1024);
    spec
}

fn default_project() -> String {
    DEFAULT_PROJECT.to_owned()
}

fn here() -> String {
    ".".to_owned()
}

/// Returns the rest of a path below a folder; the empty folder is the vault itself.
fn below<'a>(folder: &str, path: &'a str) -> Option<&'a str> {
    if folder.is_empty() { Some(path) } else { path.strip_prefix(folder)?.strip_prefix('/') }
}

/// Returns true if a note has the tag, or one below it. The tag is folded.
fn has_tag(facts: &NoteFacts, tag: &str) -> bool {
    facts.tags.iter().any(|own| {
        let own = folded(own);
        own.strip_prefix(tag).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

/// Formats a count with its noun: "1 note", "2 notes".
fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Returns the number in a cursor.
fn offset(cursor: Option<&str>) -> Result<usize, FileError> {
    cursor.map_or(Ok(0), |cursor| {
        let parsed = cursor.parse::<u32>().ok();
        parsed.map(|number| number as usize).ok_or_else(|| {
            FileError::refused(
                format!("`{}` is no cursor", cursor.escape_debug()),
                "give the `cursor` of the answer before, or leave it out for the first page",
            )
        })
    })
}

/// Returns the error for a folder that is not there.
fn no_folder(graph: &Graph, folder: &str) -> FileError {
    let mut folders: Vec<&str> = (0..graph.names.len()).map(|file| names::folder(graph.names.path(file))).collect();
    folders.retain(|other| !other.is_empty());
    folders.dedup();
    let near = wieldy_core::name::near_misses(folder, folders.iter().copied());
    FileError::Missing { path: format!("{folder}/"), near: wieldy_core::name::did_you_mean(&near) }
}

/// Returns a note on files that the index lacks, if there are any.
fn note_on_index(index: &IndexState) -> Option<String> {
    if !index.complete {
        return Some(format!(
            "[not complete: only {} of {} files were read yet; ask again]",
            index.indexed, index.files
        ));
    }
    let is_told = |(reason, _): &(&&str, &usize)| !matches!(**reason, "binary" | "language");
    let skipped: Vec<String> =
        index.skipped.iter().filter(is_told).map(|(reason, count)| format!("{count} {reason}")).collect();
    (!skipped.is_empty()).then(|| format!("[files that were not read: {}]", skipped.join(", ")))
}

#[cfg(test)]
mod tests;

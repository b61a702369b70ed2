//! The built-in tools of wieldy.
//!
//! Authors of tools read this crate first: each tool is one file with its arguments as a type, its
//! declaration and its run. The workspace tools are in [`files`], `Bash` and the tools of manifests in [`shell`].
//!
//! | modules of `files` | do |
//! | --- | --- |
//! | `read`, `write`, `edit`, `delete`, `list`, `search`, `glob`, `query`, `artifact` | one tool each |
//! | `workspace`, `path`, `guard` | the only way to open files; paths as callers write them; hidden and protected files |
//! | `save`, `stale`, `text`, `replace`, `diff` | atomic writes; read marks; encodings; exact replacement; diffs |
//! | `walk`, `pattern`, `matches` | folders in order; bounded regular expressions; matching lines within limits |
//!
//! | modules of `notes` | do |
//! | --- | --- |
//! | `notify_self`, `when` | the tool that leaves notes; points in time as models write them |
//!
//! | modules of `code` | do |
//! | --- | --- |
//! | `search` | the tool `search_code` |
//! | `lines`, `ranked`, `blocks`, `places` | search by text and by words; pieces of files; tests and foreign code |
//! | `definition`, `references`, `map`, `inspect` | the other tools, one each |
//! | `asking`, `modules`, `grading`, `rank` | symbols and scopes; files that imports mean; how sure a reference is; PageRank |
//! | `parse`, `walker`, `rules`, `languages`, `tree` | syntax trees within a budget; one walk; a table of nodes for each language |
//!
//! The module `index` holds words and syntax trees of files, compared with the files before each answer.
//!
//! | modules of `shell` | do |
//! | --- | --- |
//! | `bash`, `build`, `command`, `attached`, `process_tools`, `state` | one tool or a family of tools each |
//! | `process`, `processes` | a command in the foreground; background processes of a session |
//! | `environment`, `template`, `named` | allowed variables; command lines of manifests; files that a command line names |

use std::sync::Arc;

use wieldy_core::SharedTool;

pub mod code;
mod failpoint;
pub mod files;
#[allow(dead_code, reason = "each tool that asks the index uses another part of it")]
mod index;
pub mod notes;
pub mod shell;
pub mod vault;

pub use code::{CodeOptions, code_tools};
pub use files::{Workspace, WorkspaceError};
pub use notes::NotifySelf;
pub use shell::{Bash, CommandTool};
pub use vault::{VaultOptions, VaultProject, vault_tools};

/// Returns the tools for this workspace, and `GetArtifact`.
pub fn file_tools(workspace: Arc<Workspace>) -> Vec<SharedTool> {
    use files::{Delete, Edit, GetArtifact, Glob, List, QueryVfs, Read, Search, Write};
    vec![
        Arc::new(Read::new(workspace.clone())),
        Arc::new(Write::new(workspace.clone())),
        Arc::new(Edit::new(workspace.clone())),
        Arc::new(Delete::new(workspace.clone())),
        Arc::new(List::new(workspace.clone())),
        Arc::new(Search::new(workspace.clone())),
        Arc::new(Glob::new(workspace.clone())),
        Arc::new(QueryVfs::new(workspace)),
        Arc::new(GetArtifact),
    ]
}

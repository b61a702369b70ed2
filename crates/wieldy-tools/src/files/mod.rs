//! The workspace tools: read, write, edit, delete, list, search, find and query files; and read stored outputs.

mod error;
mod guard;
mod path;
mod spelling;
mod stale;
mod text;
mod workspace;

mod diff;
mod matches;
mod pattern;
mod replace;
mod save;
mod walk;

mod artifact;
mod delete;
mod edit;
mod glob;
mod list;
mod query;
mod read;
mod search;
mod write;

pub use artifact::GetArtifact;
pub use delete::Delete;
pub(crate) use diff::unified;
pub use edit::Edit;
pub(crate) use error::{FileError, blocking};
pub use glob::Glob;
pub(crate) use guard::Guard;
pub use list::List;
pub(crate) use matches::{COUNT_MAX, FileSink, LineKind, ResultLine, TEXT_BYTES_MAX, shown};
pub(crate) use path::GivenPath;
pub use query::QueryVfs;
pub use read::Read;
pub(crate) use save::save;
pub use search::Search;
pub(crate) use search::{Case, LineSearch};
pub(crate) use spelling::relative;
pub(crate) use text::{Editable, cut, decode, is_binary};
pub(crate) use walk::WalkOptions;
pub(crate) use workspace::{ExistingFile, FILE_BYTES_MAX, FileLocation, LastLink, MissingFolders};
pub use workspace::{Workspace, WorkspaceError};
pub(crate) use workspace::{open_beneath, read_options, read_whole};
pub use write::Write;

use std::time::Duration;

use wieldy_core::{Provider, ToolSpec};

/// Returns the common declaration of all read-only tools.
fn reading(name: &str, alias: &str, description: &str) -> ToolSpec {
    common(name, alias, description).read_only().reads("path").permission("files.read")
}

/// Returns the common declaration of all tools that change files.
fn changing(name: &str, alias: &str, description: &str) -> ToolSpec {
    common(name, alias, description).writes("path").permission("files.write")
}

fn common(name: &str, alias: &str, description: &str) -> ToolSpec {
    let mut spec = ToolSpec::new(name, description)
        .category("files")
        .provider(Provider::Builtin)
        .alias(alias)
        .argument_alias("file_path", "path")
        .timeout(Duration::from_secs(10));
    spec.annotations.open_world = false;
    // Each tool bounds its own answer, and says how to get the rest. A second cut would lose that note.
    spec.constraints.output_bytes_max = Some(1024 * 1024);
    spec
}

/// Returns the default folder of a tool: the workspace itself.
pub(crate) fn here() -> String {
    ".".to_owned()
}

//! The code tools: questions about the source files of a workspace, answered from an index that is compared with the
//! files before each answer.

mod asking;
mod blocks;
mod definition;
mod facts;
mod grading;
mod inspect;
mod language;
mod languages;
mod lines;
mod map;
mod modules;
mod parse;
mod places;
mod rank;
mod ranked;
mod references;
mod rules;
mod search;
mod tree;
mod walker;

use std::sync::Arc;
use std::time::Duration;

use wieldy_core::SharedTool;

use crate::Workspace;
use crate::index::{Index, IndexOptions};

pub use definition::{FindDefinition, FindDefinitionArgs};
pub use facts::Code;
pub use inspect::{InspectModule, InspectModuleArgs};
pub use map::{GetRepoMap, GetRepoMapArgs};
pub use references::{FindReferences, FindReferencesArgs};
pub use search::SearchCode;

/// The facts of a source file.
pub(crate) type CodeFacts = tree::FileTree;
/// The index that the code tools share.
pub(crate) type CodeIndex = Index<CodeFacts>;

/// The options of the code tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeOptions {
    /// The time for which a comparison of the index with the files counts, in workspaces of more than 20,000 files.
    /// Smaller ones are compared before each answer.
    pub fresh: Duration,
}

impl Default for CodeOptions {
    fn default() -> Self {
        Self { fresh: Duration::from_secs(2) }
    }
}

/// Returns the code tools for this workspace. With a state folder, their index survives the process.
pub fn code_tools(
    workspace: Arc<Workspace>,
    state_folder: Option<std::path::PathBuf>,
    options: CodeOptions,
) -> Vec<SharedTool> {
    let index_options = IndexOptions { fresh: options.fresh, ..IndexOptions::new("code") };
    let index = Arc::new(CodeIndex::new(workspace.clone(), state_folder, index_options));
    let code = Arc::new(Code::new(workspace.clone(), index.clone()));
    vec![
        Arc::new(SearchCode::new(workspace, index)),
        Arc::new(FindDefinition::new(code.clone())),
        Arc::new(FindReferences::new(code.clone())),
        Arc::new(GetRepoMap::new(code.clone())),
        Arc::new(InspectModule::new(code)),
    ]
}

/// Returns the definitions, imports and identifiers of a file, for measurements and for programs that keep no index.
/// Returns `None` if the language has no grammar or parsing takes too long.
pub fn tree_of_file(path: &std::path::Path, content: &[u8]) -> Option<serde_json::Value> {
    let tree = <CodeFacts as crate::index::FileFacts>::of(path, content, &tokio_util::sync::CancellationToken::new());
    serde_json::to_value(tree.ok()?).ok()
}

#[cfg(test)]
mod tests;

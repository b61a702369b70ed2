//! The code tools: questions about the source files of a workspace, answered from an index that is compared with the
//! files before each answer.

mod blocks;
mod lines;
mod places;
mod ranked;
mod search;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use wieldy_core::SharedTool;

use crate::Workspace;
use crate::index::{FileFacts, Index, IndexOptions, SkipReason};

pub use search::SearchCode;

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
    vec![Arc::new(SearchCode::new(workspace, index))]
}

/// The facts of a source file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CodeFacts;

impl FileFacts for CodeFacts {
    const FORM: u32 = 1;

    fn of(_: &Path, _: &[u8], _: &CancellationToken) -> Result<Self, SkipReason> {
        Err(SkipReason::Language)
    }

    fn bytes(&self) -> usize {
        0
    }
}

impl CodeFacts {
    /// Returns the definitions of the file for ranked search and for the places of finds, sorted by their first line.
    pub(crate) fn blocks(&self) -> Vec<blocks::Block> {
        Vec::new()
    }
}

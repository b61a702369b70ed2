//! Trees as facts of the index, and [`Code`], which the code tools share.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::language::Language;
use super::map::MapMemory;
use super::parse::{PARSE_TIME_MAX, extract};
use super::tree::{Definition, FileTree, Import, NoTree, Occurrence};
use crate::files::Workspace;
use crate::index::{FileFacts, Index, IndexOptions, SkipReason};

impl FileFacts for FileTree {
    const FORM: u32 = 1;

    fn of(path: &Path, content: &[u8], stop: &CancellationToken) -> Result<Self, SkipReason> {
        let language = Language::of(path, content).ok_or(SkipReason::Language)?;
        extract(language, content, PARSE_TIME_MAX, stop).map_err(|reason| match reason {
            NoTree::Slow => SkipReason::Slow,
            NoTree::Large => SkipReason::TooLarge,
            NoTree::Stopped => SkipReason::Stopped,
        })
    }

    fn bytes(&self) -> usize {
        let names: usize = self.names.iter().map(|name| name.len() + size_of::<Box<str>>()).sum();
        let definitions =
            self.definitions.iter().map(|one| size_of::<Definition>() + one.name.len() + one.signature.len());
        let imports = self.imports.iter().map(|one| size_of::<Import>() + one.local.len() + one.module.len());
        let occurrences = self.occurrences.len() * size_of::<Occurrence>();
        size_of::<Self>() + names + definitions.sum::<usize>() + imports.sum::<usize>() + occurrences
    }
}

/// The code of a workspace: the index of its files, which all code tools share.
pub struct Code {
    pub(crate) workspace: Arc<Workspace>,
    pub(crate) index: Index<FileTree>,
    pub(super) memory: MapMemory,
}

impl Code {
    /// Creates the index of a workspace's code. With a state folder, it keeps snapshots there.
    pub fn new(workspace: Arc<Workspace>, state_folder: Option<PathBuf>) -> Self {
        let index = Index::new(workspace.clone(), state_folder, IndexOptions::new("code"));
        Self { workspace, index, memory: MapMemory::default() }
    }
}

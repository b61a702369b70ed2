//! Trees as facts of the index, and [`Code`], which the code tools share.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::CodeIndex;
use super::blocks::Block;
use super::grading::last_name;
use super::language::Language;
use super::map::MapMemory;
use super::parse::{PARSE_TIME_MAX, extract};
use super::tree::{Definition, FileTree, Import, Kind, NoTree, Occurrence};
use crate::files::Workspace;
use crate::index::{FileFacts, SkipReason};

/// Maximum number of definitions around each other that an outline shows.
const DEPTH_MAX: usize = 64;

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

impl FileTree {
    /// Returns the definitions of the file for ranked search and for the places of finds, sorted by their first line.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = self.definitions.iter().map(|one| self.block(one)).collect();
        blocks.sort_by_key(|block| (block.line, std::cmp::Reverse(block.end_line)));
        blocks
    }

    /// Returns the definition that each definition is a member of: the one around it, or its type in the same file.
    pub(crate) fn arounds(&self) -> Vec<Option<usize>> {
        let mut types: HashMap<&str, usize> = HashMap::new();
        for (index, one) in self.definitions.iter().enumerate() {
            if matches!(one.kind, Kind::Class | Kind::Struct | Kind::Enum | Kind::Trait | Kind::Type) {
                types.entry(&one.name).or_insert(index);
            }
        }
        let around = |(index, one): (usize, &Definition)| {
            let by_name = || types.get(last_name(one.container.as_deref()?)).copied().filter(|around| *around != index);
            let parent = one.parent.map(|parent| parent as usize).filter(|parent| *parent < index);
            match parent {
                Some(parent) if self.definitions[parent].kind != Kind::Module => Some(parent),
                _ => by_name().or(parent),
            }
        };
        let mut arounds: Vec<Option<usize>> = self.definitions.iter().enumerate().map(around).collect();
        // Two types that claim to be each other's members would be a circle.
        for index in 0..arounds.len() {
            let (mut at, mut steps) = (arounds[index], 0);
            while let Some(next) = at {
                steps += 1;
                if next == index || steps > DEPTH_MAX {
                    arounds[index] = None;
                    break;
                }
                at = arounds[next];
            }
        }
        arounds
    }

    fn block(&self, one: &Definition) -> Block {
        let symbol = match &one.container {
            Some(container) => format!("{container}{}{}", self.language.separator(), one.name),
            None => one.name.to_string(),
        };
        // Documentation belongs to the definition, before it or at the beginning of its body.
        let line = one.doc.map_or(one.start_line, |(first, _)| first.min(one.start_line));
        Block { symbol, kind: one.kind.name(), line, end_line: one.end_line }
    }
}

/// The code of a workspace, which the tools that ask its trees share.
pub struct Code {
    pub(crate) workspace: Arc<Workspace>,
    pub(crate) index: Arc<CodeIndex>,
    pub(super) memory: MapMemory,
}

impl Code {
    /// Creates the code of a workspace.
    pub(crate) fn new(workspace: Arc<Workspace>, index: Arc<CodeIndex>) -> Self {
        Self { workspace, index, memory: MapMemory::default() }
    }
}

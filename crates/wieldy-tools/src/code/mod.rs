//! Code: syntax trees of files, and the tools that answer questions about code.

mod asking;
mod definition;
mod facts;
mod grading;
mod language;
mod languages;
mod map;
mod modules;
mod parse;
mod rank;
mod references;
mod rules;
mod tree;
mod walker;

pub use definition::{FindDefinition, FindDefinitionArgs};
pub use facts::Code;
pub use map::{GetRepoMap, GetRepoMapArgs};
pub use references::{FindReferences, FindReferencesArgs};

#[cfg(test)]
mod tests;

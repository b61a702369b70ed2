//! Code: syntax trees of files, and the tools that answer questions about code.

mod facts;
mod language;
mod languages;
mod parse;
mod rules;
mod tree;
mod walker;

pub use facts::Code;

#[cfg(test)]
mod tests;

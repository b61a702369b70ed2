//! Code: syntax trees of files, and the tools that answer questions about code.

mod language;
mod languages;
mod parse;
mod rules;
mod tree;
mod walker;

#[cfg(test)]
mod tests;

//! The built-in tools, called through a real executor.

mod agreed;
mod artifact;
mod background;
mod code_map;
mod code_search;
mod code_trees;
mod command_lines;
mod confinement;
mod custody;
mod delete;
mod edit;
mod guard;
mod look;
mod names;
mod notes;
mod order;
mod query;
mod read;
mod rights;
mod search;
mod shell;
mod stale;
mod torn;
mod vault;
mod world;
mod write;

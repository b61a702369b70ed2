//! What the history promises, on every database it can be kept in.

mod first;
mod memory;

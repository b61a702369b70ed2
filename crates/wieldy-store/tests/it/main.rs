//! What the history promises, on every database it can be kept in.

mod close;
mod first;
mod kill;
mod memory;
mod recovery;
mod trail;
mod trouble;
mod upkeep;
mod world;

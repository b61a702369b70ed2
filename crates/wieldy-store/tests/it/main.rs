//! What the history promises, on every database it can be kept in.

mod first;
mod kill;
mod recovery;
mod trail;
mod trouble;
mod upkeep;
mod world;

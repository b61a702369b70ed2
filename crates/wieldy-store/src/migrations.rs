//! Schema versions of the tables, and the migrations between them.

use crate::error::StoreError;

/// A step from one schema version to the next, and back.
pub(crate) struct Migration {
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

/// Includes the migrations of a database, in order.
macro_rules! migrations {
    ($database:literal: $($name:literal),+ $(,)?) => {
        &[$(crate::migrations::Migration {
            up: include_str!(concat!("../../migrations/", $database, "/", $name, ".up.sql")),
            down: include_str!(concat!("../../migrations/", $database, "/", $name, ".down.sql")),
        }),+]
    };
}

pub(crate) use migrations;

/// Fails if a newer program made the tables.
pub(crate) fn check(found: u32, known: &[Migration]) -> Result<(), StoreError> {
    let known = known.len() as u32;
    if found > known { Err(StoreError::Newer { found, known }) } else { Ok(()) }
}

/// Returns the statements that lead from one schema version to another, up or down.
pub(crate) fn path(from: u32, to: u32, known: &[Migration]) -> Vec<&str> {
    let (from, to) = (from as usize, (to as usize).min(known.len()));
    if from <= to {
        known[from..to].iter().map(|step| step.up).collect()
    } else {
        known[to..from].iter().rev().map(|step| step.down).collect()
    }
}

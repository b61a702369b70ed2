//! Tests of the engine through its public interface, checked against its journal.
#![expect(clippy::unwrap_used, reason = "in a test, a surprise may end it")]

mod absurd;
mod admission;
mod attempts;
mod batches;
mod beside;
mod confirmation;
mod events;
mod facts;
mod manifests;
mod names;
mod properties;
mod recall;
mod redaction;
mod refusals;
mod sandboxes;
mod simulation;
mod traps;

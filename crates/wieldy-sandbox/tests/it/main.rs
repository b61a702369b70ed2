//! The promises of `Bare`, each tried with real processes that misbehave.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod ending;
mod escape;
mod leaving_nothing;
mod measuring;
mod starting;
mod world;

//! The promises of `Bare`, each tried with real processes that misbehave.

mod ending;
mod leaving_nothing;
mod measuring;
mod starting;
mod world;

//! The promises of `Bare`, each tried with real processes that misbehave.
//! And those of the proxy, tried with real sockets.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod cgroup;
mod ending;
mod escape;
mod leaving_nothing;
mod measuring;
mod oci;
mod proxy;
mod starting;
mod world;

//! Tests the promises of every level with real processes that misbehave, attacks on sandboxes, the proxy with real
//! sockets, and the native level once more as an ordinary user.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod as_user;
mod cgroup;
mod denials;
mod ending;
mod escape;
#[cfg(feature = "firecracker")]
mod firecracker;
mod leaving_nothing;
mod measuring;
mod oci;
mod pool;
mod private_disk;
mod proxy;
mod sessions;
mod starting;
mod world;

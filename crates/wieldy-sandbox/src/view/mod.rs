//! Plans, checks and mounts the file tree that programs in a sandbox see.
//!
//! In reading order: `plan` (the plan as a value), `planner` (makes it from a confinement), `plan_cache`; `host` (the
//! files of this host), `system_paths` and `secret_scan` (the paths that are shown and hidden); `placeholders` (files
//! that are made on the host to be mounted on) and `masked` (the files that a sandbox hides or protects); `mounts`
//! (carries a plan out) and `identity` (user ids inside and outside); `path_lookup` (the access that a plan gives to a
//! path).

pub(crate) mod host;
pub(crate) mod identity;
pub(crate) mod masked;
pub(crate) mod mounts;
pub(crate) mod path_lookup;
pub(crate) mod placeholders;
pub(crate) mod plan;
pub(crate) mod plan_cache;
pub(crate) mod planner;
pub(crate) mod secret_scan;
pub(crate) mod system_paths;

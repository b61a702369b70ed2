//! Tests attacks on the sandbox, one file for each promise of `SECURITY.md`. Each attack has a harmless twin that must
//! work.

pub(crate) mod arena;
mod bare;
mod calls;
mod ending;
mod leaving;
mod limits;
mod limits_in_memory;
mod limits_passed;
mod neighbours;
mod network;
mod privileges;
mod processes;
mod protected;
mod proxied;
mod reading;
mod refusing;
mod writing;

#[expect(unsafe_code, reason = "an attack makes system calls that no library offers")]
pub(crate) mod syscalls;

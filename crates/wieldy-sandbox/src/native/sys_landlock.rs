//! The one system call by which a process puts itself under a Landlock ruleset.
//!
//! The crate's own way takes a value with allocations in it; ours is *quiet*, as `sys.rs` means it: it neither allocates, nor
//! locks, nor panics, and may run between `fork` and `exec`.

use std::io;
use std::os::fd::RawFd;

/// Puts this thread, and all that comes of it, under the ruleset, for good; new privileges must be ruled out already. Quiet.
pub(crate) fn restrict(ruleset: RawFd) -> io::Result<()> {
    // SAFETY: takes plain numbers.
    let status = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The newest version of Landlock that this kernel has, or why it has none.
pub(crate) fn version() -> io::Result<u32> {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the kernel reads no memory; it wants a null pointer and a size of 0.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, VERSION) };
    u32::try_from(version).map_err(|_| io::Error::last_os_error())
}

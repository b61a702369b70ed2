//! Writes the limits of a group, and only those that changed.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use super::folder::{errno, write};
use super::group::Node;
use super::kept::Kept;
use super::{Controller, Version};

/// The limits of a group. `None` means no limit of its own: only the limits above it hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GroupLimits {
    /// Thousandths of one processor, at least 10.
    pub(crate) cpu_millicores: Option<u64>,
    /// Memory and swap together.
    pub(crate) memory_bytes: Option<u64>,
    /// Processes and threads.
    pub(crate) processes: Option<u64>,
}

/// The period in which a group may run for its quota.
const PERIOD_US: u64 = 100_000;

/// The smallest quota that the kernel takes.
const QUOTA_US_MIN: u64 = 1_000;

/// The value for no quota.
const NO_QUOTA: u64 = u64::MAX;

/// The files that limits are written to.
#[derive(Default)]
pub(super) struct Files {
    cpu: Kept,
    memory: Kept,
    swap: Kept,
    processes: Kept,
}

impl Files {
    /// Closes all files until they are needed again.
    pub(super) fn close(&self) {
        let Self { cpu, memory, swap, processes } = self;
        [cpu, memory, swap, processes].into_iter().for_each(Kept::close);
    }
}

/// The quota of a group on v1, in microseconds for each period. It changes only under the layout's lock on all quotas.
pub(super) struct Quota {
    wanted: AtomicU64,
    written: AtomicU64,
}

impl Default for Quota {
    fn default() -> Self {
        Self { wanted: AtomicU64::new(NO_QUOTA), written: AtomicU64::new(NO_QUOTA) }
    }
}

/// Changes the kernel's limits from the last ones to the wanted ones.
pub(super) fn set(node: &Node, wanted: &GroupLimits) -> io::Result<()> {
    let mut applied = node.applied.lock().expect("no code panics while it holds the limits");
    if applied.processes != wanted.processes {
        set_processes(node, wanted.processes)?;
        applied.processes = wanted.processes;
    }
    if applied.memory_bytes != wanted.memory_bytes {
        set_memory(node, applied.memory_bytes, wanted.memory_bytes)?;
        applied.memory_bytes = wanted.memory_bytes;
    }
    if applied.cpu_millicores != wanted.cpu_millicores {
        set_cpu(node, wanted.cpu_millicores)?;
        applied.cpu_millicores = wanted.cpu_millicores;
    }
    Ok(())
}

fn set_processes(node: &Node, processes: Option<u64>) -> io::Result<()> {
    let Some((_, folder)) = node.place(Controller::Pids) else { return Ok(()) };
    node.limit_files.processes.write(folder, "pids.max", &processes.map_or("max".into(), |count| count.to_string()))
}

fn set_memory(node: &Node, before: Option<u64>, bytes: Option<u64>) -> io::Result<()> {
    let Some((version, folder)) = node.place(Controller::Memory) else { return Ok(()) };
    let files = &node.limit_files;
    if version == Version::V2 {
        let swap = if bytes.is_some() { "0" } else { "max" };
        optional(files.swap.write(folder, "memory.swap.max", swap))?;
        return files.memory.write(folder, "memory.max", &bytes.map_or("max".into(), |bytes| bytes.to_string()));
    }
    let value = bytes.map_or("-1".into(), |bytes| bytes.to_string());
    let memory = || match files.memory.write(folder, "memory.limit_in_bytes", &value) {
        // More is in use, but most of it is cache: the kernel gave up too early.
        Err(error) if errno(&error) == Some(Errno::BUSY) => {
            write(folder, "memory.force_empty", "0")?;
            files.memory.write(folder, "memory.limit_in_bytes", &value)
        }
        outcome => outcome,
    };
    // The limit of memory and swap together, which must never be less than that of memory alone.
    let both = || optional(files.swap.write(folder, "memory.memsw.limit_in_bytes", &value));
    if bytes.unwrap_or(u64::MAX) > before.unwrap_or(u64::MAX) {
        both().and_then(|()| memory())
    } else {
        memory().and_then(|()| both())
    }
}

/// Ignores that a file is missing: a kernel that does not account for swap has none.
fn optional(written: io::Result<()>) -> io::Result<()> {
    written.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

fn set_cpu(node: &Node, millicores: Option<u64>) -> io::Result<()> {
    let Some((version, folder)) = node.place(Controller::Cpu) else { return Ok(()) };
    let quota = quota_us(millicores);
    if version == Version::V2 {
        let value = if quota == NO_QUOTA { "max".into() } else { quota.to_string() };
        return node.limit_files.cpu.write(folder, "cpu.max", &format!("{value} {PERIOD_US}"));
    }
    let _all_quotas = node.layout.quotas.lock().expect("no code panics while it holds the quotas");
    let above = quota_above(node);
    node.for_each_child(&mut |child| lower(child, quota.min(above)))?;
    node.quota.wanted.store(quota, Ordering::Relaxed);
    write_wanted(node, above)
}

fn quota_us(millicores: Option<u64>) -> u64 {
    millicores.map_or(NO_QUOTA, |count| (count.saturating_mul(PERIOD_US) / 1000).clamp(QUOTA_US_MIN, NO_QUOTA - 1))
}

/// Returns the smallest quota of the groups above this one.
fn quota_above(node: &Node) -> u64 {
    let above = std::iter::successors(node.parent.as_deref(), |parent| parent.parent.as_deref());
    above.map(|parent| parent.quota.written.load(Ordering::Relaxed)).min().unwrap_or(NO_QUOTA)
}

/// Removes quotas above a parent's future quota, which the kernel would refuse.
fn lower(node: &Node, quota: u64) -> io::Result<()> {
    node.for_each_child(&mut |child| lower(child, quota))?;
    if node.quota.written.load(Ordering::Relaxed) > quota { write_quota(node, NO_QUOTA) } else { Ok(()) }
}

/// Writes the wanted quotas of a group and those below it. A quota above a parent's is not written: the parent's holds
/// anyway, and v1 refuses the higher one.
fn write_wanted(node: &Node, above: u64) -> io::Result<()> {
    let wanted = node.quota.wanted.load(Ordering::Relaxed);
    write_quota(node, if wanted < above { wanted } else { NO_QUOTA })?;
    node.for_each_child(&mut |child| write_wanted(child, wanted.min(above)))
}

fn write_quota(node: &Node, quota: u64) -> io::Result<()> {
    const FILE: &str = "cpu.cfs_quota_us";
    let Some((_, folder)) = node.place(Controller::Cpu) else { return Ok(()) };
    if node.quota.written.load(Ordering::Relaxed) == quota {
        return Ok(());
    }
    let value = if quota == NO_QUOTA { "-1".into() } else { quota.to_string() };
    let written = match node.limit_files.cpu.write(folder, FILE, &value) {
        Ok(()) => quota,
        // A group above the executor's own has a lower quota, which then holds.
        Err(error) if errno(&error) == Some(Errno::INVAL) && quota != NO_QUOTA => {
            node.limit_files.cpu.write(folder, FILE, "-1")?;
            NO_QUOTA
        }
        Err(error) => return Err(error),
    };
    node.quota.written.store(written, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_a_share_of_the_period_and_never_less_than_the_kernel_takes() {
        assert_eq!(
            [Some(500), Some(2000), Some(10), Some(0), None].map(quota_us),
            [50_000, 200_000, 1_000, 1_000, NO_QUOTA]
        );
        assert_eq!(quota_us(Some(u64::MAX)), u64::MAX / 1000);
    }
}

//! Reads how many processors and how much memory this machine has.

use std::fs;

use wieldy_core::ResourceLimits;

/// Returns the processors and the memory of this machine, as far as they can be read.
pub fn machine() -> ResourceLimits {
    let processors = std::thread::available_parallelism().ok();
    let memory = fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_bytes(&text));
    ResourceLimits {
        cpu_millicores: processors.map(|count| count.get() as u64 * 1000),
        memory_bytes: memory,
        ..ResourceLimits::NONE
    }
}

/// Returns the memory that `/proc/meminfo` tells of, in bytes.
fn memory_bytes(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_machine_is_read_in_bytes() {
        assert_eq!(memory_bytes("MemTotal:       16384000 kB\nMemFree: 1 kB\n"), Some(16_384_000 * 1024));
        assert_eq!([memory_bytes(""), memory_bytes("MemTotal: many kB")], [None, None]);
        assert!(machine().cpu_millicores.is_some_and(|millicores| millicores >= 1000));
    }
}

//! Measures the memory of a command's processes without a cgroup: the private memory of each, and shared memory once.
//!
//! Most shared memory is mapped, so the figures of the processes include it. The rest is found in three other ways:
//! memfds (`memfd_create`) by the descriptors of the processes, System V segments in the kernel's list, and the private
//! folders, a file system in memory, by the file system's size.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::watch::BLOCK_BYTES;

/// The prefixes of the kernel's names of memfds and System V segments.
const FILE: &str = "/memfd:";
const SEGMENT: &str = "/SYSV";

/// Sizes in bytes of memfds and System V segments, which need not be mapped, by name prefix and inode or segment
/// number.
type Apart = BTreeMap<(&'static str, u64), u64>;

/// The use of the private folders that are in memory.
#[derive(Clone, Copy)]
pub(crate) struct InFolders<'a> {
    /// The bytes that the call has added to them.
    pub(crate) bytes: u64,
    /// The device numbers of their file systems.
    pub(crate) devices: &'a [u64],
}

/// The processes of a command with memory, at one moment.
#[derive(Default)]
pub(crate) struct Found {
    /// Of each process, a thread that still has its memory, and the size of that memory.
    mapped: Vec<(PathBuf, u64)>,
}

impl Found {
    /// Adds a process with these threads. If the first thread has ended, the figures are read from another one.
    pub(crate) fn add(&mut self, threads: &[PathBuf]) {
        let Some((thread, bytes)) = threads.iter().find_map(|thread| Some((thread, resident_bytes(thread)?))) else {
            return;
        };
        self.mapped.push((thread.clone(), bytes));
    }

    /// Returns the memfds that the processes have open.
    fn files(&self) -> Apart {
        let mut files = Apart::new();
        let opened = self.mapped.iter().filter_map(|(thread, _)| fs::read_dir(thread.join("fd")).ok());
        for descriptor in opened.flatten().flatten() {
            let is_file = fs::read_link(descriptor.path()).is_ok_and(|name| name.to_string_lossy().starts_with(FILE));
            if let (true, Ok(about)) = (is_file, fs::metadata(descriptor.path())) {
                files.insert((FILE, about.ino()), about.blocks() * BLOCK_BYTES);
            }
        }
        files
    }
}

/// A meter of the memory of a command, read again and again.
pub(crate) struct Memory {
    limit: u64,
    /// The System V segments that existed before the command.
    segments_before: Apart,
    /// The memfds found by the last search, and the time of the next one: with many processes a search takes long.
    files: Apart,
    files_again_at: Option<Instant>,
    /// The bytes counted more than once by the last exact measurement, and the latest time of the next one.
    twice_bytes: u64,
    again_at: Option<Instant>,
}

impl Memory {
    pub(crate) fn new(limit: u64) -> Self {
        let (files, files_again_at) = (Apart::new(), None);
        Self { limit, segments_before: segments(), files, files_again_at, twice_bytes: 0, again_at: None }
    }

    /// Returns the bytes of memory in use, exactly enough to decide whether they pass the limit.
    ///
    /// Mapped pages of a file in a private folder are counted twice: in the size of its file system and in the
    /// `RssShmem` of the processes. They are subtracted by the mappings of each process. The larger of the two sums
    /// would be too small if one process maps a file and another only writes one.
    pub(crate) fn bytes(&mut self, found: Found, in_folders: InFolders<'_>) -> u64 {
        let begun = Instant::now();
        if self.files_again_at.is_none_or(|at| at <= begun) {
            self.files = found.files();
            self.files_again_at = Some(Instant::now() + begun.elapsed() * 10);
        }
        let (mapped, mut apart) = (found.mapped, self.files.clone());
        for (segment, bytes) in segments() {
            let before = self.segments_before.get(&segment).copied().unwrap_or(0);
            apart.insert(segment, bytes.saturating_sub(before));
        }
        let apart_bytes = apart.values().sum::<u64>() + in_folders.bytes;
        // An upper bound: pages that several processes map, or that were found in both ways, are counted more than
        // once.
        let most = apart_bytes + mapped.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let begun = Instant::now();
        let is_time = self.again_at.is_some_and(|at| at <= begun);
        if most <= self.limit || (most.saturating_sub(self.twice_bytes) <= self.limit && !is_time) {
            return most.saturating_sub(self.twice_bytes);
        }
        // A process whose mappings cannot be read counts whole; one that has ended meanwhile counts nothing.
        let whole = |thread: &Path| resident_bytes(thread).unwrap_or(0);
        let shares = mapped
            .iter()
            .map(|(thread, _)| share_bytes(thread, &apart, in_folders.devices).unwrap_or_else(|| whole(thread)));
        let exact = apart_bytes + shares.sum::<u64>();
        self.twice_bytes = most.saturating_sub(exact);
        // The kernel needs long for this if there is much memory.
        self.again_at = Some(Instant::now() + (begun.elapsed() * 10).max(Duration::from_millis(100)));
        exact
    }
}

/// Returns the private and shared memory of a process; `None` if it has ended. Programs and libraries are page cache
/// and do not count.
fn resident_bytes(thread: &Path) -> Option<u64> {
    let status = fs::read_to_string(thread.join("status")).ok()?;
    Some(field(&status, "RssAnon:")? + field(&status, "RssShmem:")?)
}

/// Returns the proportional share (PSS) of that memory, without memory in `apart` and on `devices`; `None` if it cannot
/// be read.
fn share_bytes(thread: &Path, apart: &Apart, devices: &[u64]) -> Option<u64> {
    // `smaps` first: memory unmapped between the two reads must not be counted twice.
    let of_apart = if apart.is_empty() && devices.is_empty() {
        0
    } else {
        mapped_apart_bytes(&fs::read_to_string(thread.join("smaps")).ok()?, apart, devices)
    };
    let all = fs::read_to_string(thread.join("smaps_rollup")).ok()?;
    Some((field(&all, "Pss_Anon:")? + field(&all, "Pss_Shmem:")?).saturating_sub(of_apart))
}

/// Returns the share of these mappings in the memfds and segments of `apart` and in files on `devices`. Private copies
/// of pages that the process changed do not count.
fn mapped_apart_bytes(mappings: &str, apart: &Apart, devices: &[u64]) -> u64 {
    let (mut sum, mut is_apart) = (0_u64, false);
    for line in mappings.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if first.ends_with(':') {
            let bytes = |name| if is_apart { field(line, name).unwrap_or(0) } else { 0 };
            sum = (sum + bytes("Pss:")).saturating_sub(bytes("Anonymous:"));
            continue;
        }
        // `7f00-7f01 rw-s 00000000 00:01 1234 /memfd:name (deleted)`
        let is_in_folder = words.nth(2).and_then(device).is_some_and(|device| devices.contains(&device));
        let number = words.next().and_then(|number| number.parse().ok());
        let name = words.next().unwrap_or_default();
        let kind = [FILE, SEGMENT].into_iter().find(|kind| name.starts_with(kind));
        is_apart = is_in_folder || kind.zip(number).is_some_and(|known| apart.contains_key(&known));
    }
    sum
}

/// Returns a device's number, which `/proc` writes as `00:2a`.
fn device(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    let part = |digits| u32::from_str_radix(digits, 16).ok();
    Some(rustix::fs::makedev(part(major)?, part(minor)?))
}

/// Returns the System V segments of this IPC namespace.
fn segments() -> Apart {
    let listed = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let segment = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let number = |index: usize| words.get(index)?.parse::<u64>().ok();
        // The id, and the bytes in memory and in swap space.
        Some(((SEGMENT, number(1)?), number(14)? + number(15)?))
    };
    listed.lines().skip(1).filter_map(segment).collect()
}

/// Returns a field in KiB of a file in `/proc` that has one field per line, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches("kB").trim_end().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_a_known_file_are_matched_by_its_inode() {
        let mappings = "7f00-7f01 rw-s 00000000 00:01 12   /memfd:a b (deleted)\nSize: 90 kB\nPss:    40 kB\nPss_Dirty: 9 kB\nAnonymous: 0 kB\n\
                        7f01-7f02 rw-p 00000000 00:01 12   /memfd:a b (deleted)\nPss: 30 kB\nAnonymous: 10 kB\n\
                        7f02-7f03 rw-s 00000000 00:01 13   /memfd:closed (deleted)\nPss: 100 kB\n\
                        7f03-7f04 rw-s 00000000 00:01 12   /SYSV00000000 (deleted)\nPss: 1000 kB\n\
                        7f04-7f05 rw-p 00000000 00:00 0\nPss: 5000 kB\n\
                        7f05-7f06 rw-p 00000000 00:2a 12   /tmp/a b\nPss: 70000 kB\nAnonymous: 10000 kB\n";
        let of = |apart: &[(&'static str, u64)], devices: &[u64]| {
            mapped_apart_bytes(mappings, &apart.iter().map(|known| (*known, 0)).collect(), devices) / 1024
        };
        assert_eq!(
            [of(&[], &[]), of(&[(FILE, 12)], &[]), of(&[(SEGMENT, 12)], &[]), of(&[(FILE, 99)], &[])],
            [0, 60, 1000, 0]
        );
        assert_eq!([of(&[], &[0x2a]), of(&[(FILE, 12)], &[7, 0x2a])], [60_000, 60_060]);
    }

    #[test]
    fn this_process_has_memory() {
        let thread = PathBuf::from("/proc/self");
        let mut found = Found::default();
        found.add(&["/proc/self/nowhere".into(), thread.clone()]);
        assert!(found.mapped.len() == 1 && found.mapped.iter().all(|(_, bytes)| *bytes > 1 << 16));
        assert!(share_bytes(&thread, &Apart::new(), &[]).is_some_and(|bytes| bytes > 1 << 16));
    }
}

//! Measures the memory of processes where no control group does: the private memory of each, and shared memory once.
//!
//! Most shared memory is mapped and found with the processes that map it. The rest is looked up by itself: files without a name
//! (`memfd_create`) by the descriptors of the processes, segments of System V in the kernel's list, and private folders, which are a file
//! system in memory, as a whole.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::watch::BLOCK_BYTES;

/// As the kernel begins the names of files without a name, and of segments.
const FILE: &str = "/memfd:";
const SEGMENT: &str = "/SYSV";

/// What can be there without being mapped, by the beginning of its name and its number; and how many bytes it holds.
type Apart = BTreeMap<(&'static str, u64), u64>;

/// The private folders that are kept in memory.
#[derive(Clone, Copy)]
pub(crate) struct InFolders<'a> {
    /// The bytes that the call has added to them.
    pub(crate) bytes: u64,
    /// Their file systems' device numbers.
    pub(crate) devices: &'a [u64],
}

/// What a look at processes has found.
#[derive(Default)]
pub(crate) struct Found {
    /// Of each process a thread that still has its memory, and how much that is.
    mapped: Vec<(PathBuf, u64)>,
}

impl Found {
    /// Adds a process with these threads. The first one may have ended before the others: then only they tell.
    pub(crate) fn add(&mut self, threads: &[PathBuf]) {
        let Some((thread, bytes)) = threads.iter().find_map(|thread| Some((thread, resident_bytes(thread)?))) else {
            return;
        };
        self.mapped.push((thread.clone(), bytes));
    }

    /// The files without a name that the processes have open.
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

/// How much memory a command has, look by look.
pub(crate) struct Memory {
    limit: u64,
    /// The segments that others had made before.
    segments_before: Apart,
    /// The files without a name when they were last looked for, and when to do that again: it takes long where there are many processes.
    files: Apart,
    files_again_at: Option<Instant>,
    /// What was counted more than once when that was last found out, and when to find out again at the latest.
    twice_bytes: u64,
    again_at: Option<Instant>,
}

impl Memory {
    pub(crate) fn new(limit: u64) -> Self {
        let (files, files_again_at) = (Apart::new(), None);
        Self { limit, segments_before: segments(), files, files_again_at, twice_bytes: 0, again_at: None }
    }

    /// Returns how much there is, as exactly as it takes to know whether that is more than allowed.
    ///
    /// Pages of a file in a private folder that processes map are in the size of its file system and in their `RssShmem`. They
    /// are subtracted by their mappings: the larger of both sums would miss that one process maps what another one only wrote.
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
        // What several processes map, and what is found in both ways, is counted more than once.
        let most = apart_bytes + mapped.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let begun = Instant::now();
        let is_time = self.again_at.is_some_and(|at| at <= begun);
        if most <= self.limit || (most.saturating_sub(self.twice_bytes) <= self.limit && !is_time) {
            return most.saturating_sub(self.twice_bytes);
        }
        // A process that may not be looked at counts whole; one that has ended meanwhile has nothing any more.
        let whole = |thread: &Path| resident_bytes(thread).unwrap_or(0);
        let shares = mapped
            .iter()
            .map(|(thread, _)| share_bytes(thread, &apart, in_folders.devices).unwrap_or_else(|| whole(thread)));
        let exact = apart_bytes + shares.sum::<u64>();
        self.twice_bytes = most.saturating_sub(exact);
        // It takes the kernel long where there is much of it.
        self.again_at = Some(Instant::now() + (begun.elapsed() * 10).max(Duration::from_millis(100)));
        exact
    }
}

/// What a process has of its own or shares, without programs and libraries, which are the page cache's; nothing if it has no memory any more.
fn resident_bytes(thread: &Path) -> Option<u64> {
    let status = fs::read_to_string(thread.join("status")).ok()?;
    Some(field(&status, "RssAnon:")? + field(&status, "RssShmem:")?)
}

/// A process's share of that, where others have the rest; without what was found apart. Nothing where it may not be looked at.
fn share_bytes(thread: &Path, apart: &Apart, devices: &[u64]) -> Option<u64> {
    // In this order: what is unmapped meanwhile must not look as if it were there twice.
    let of_apart = if apart.is_empty() && devices.is_empty() {
        0
    } else {
        mapped_apart_bytes(&fs::read_to_string(thread.join("smaps")).ok()?, apart, devices)
    };
    let all = fs::read_to_string(thread.join("smaps_rollup")).ok()?;
    Some((field(&all, "Pss_Anon:")? + field(&all, "Pss_Shmem:")?).saturating_sub(of_apart))
}

/// How much of these mappings is of what was found apart. What was changed in a mapping of one's own is not.
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

/// The segments of System V of this sandbox.
fn segments() -> Apart {
    let listed = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    let segment = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let number = |index: usize| words.get(index)?.parse::<u64>().ok();
        // Their number, and what of them is in memory and in swap space.
        Some(((SEGMENT, number(1)?), number(14)? + number(15)?))
    };
    listed.lines().skip(1).filter_map(segment).collect()
}

/// A figure of a file in `/proc`, where each has a line, in KiB.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches("kB").trim_end().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_of_a_file_that_was_found_is_known_by_its_number() {
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

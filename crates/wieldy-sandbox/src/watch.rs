//! What a berth looks at while a command runs, because nobody in the kernel does it for a whole tree: what it has written, how many
//! files it has made and, where there is no cgroup, how much memory and how many processes it has.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

use crate::tree::Tree;
use crate::wire::{Limit, RunLimits};

/// The kernel counts blocks of this size, whatever the disk's own are.
pub(crate) const BLOCK_BYTES: u64 = 512;

/// The limits of one run and where it stood at its beginning.
pub(crate) struct Watch<'a> {
    limits: RunLimits,
    folder: PathBuf,
    files_before: Option<u64>,
    /// File systems that are only the sandbox's own.
    private: &'a [CString],
    processes_peak: u64,
}

/// What living processes have and have done.
#[derive(Default)]
struct Living {
    processes: u64,
    memory_bytes: u64,
    written_bytes: u64,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(limits: &RunLimits, folder: &Path, private: &'a [CString]) -> Self {
        let files_before = limits.disk_files.and_then(|_| files_in_use(folder));
        Self { limits: *limits, folder: folder.to_owned(), files_before, private, processes_peak: 0 }
    }

    /// Whether there is anything to look at.
    pub(crate) fn is_needed(&self) -> bool {
        let RunLimits { disk_bytes, disk_files, memory_bytes, .. } = self.limits;
        disk_bytes.or(disk_files).or(memory_bytes).is_some()
    }

    pub(crate) fn processes_peak(&self) -> u64 {
        self.processes_peak.max(1)
    }

    /// The limit that has been passed, if one has.
    pub(crate) fn check(&mut self, tree: &mut Tree) -> Option<(Limit, u64)> {
        if !self.is_needed() {
            return None;
        }
        let mut living = Living::default();
        for pid in tree.children() {
            living.count(pid);
        }
        self.processes_peak = self.processes_peak.max(living.processes);
        let written = living.written_bytes + tree.used().blocks_written * BLOCK_BYTES;
        let files = self.files_before.and_then(|before| Some(files_in_use(&self.folder)?.saturating_sub(before)));
        let passed = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used > limit);
        if passed(self.limits.disk_bytes, written) {
            return Some((Limit::DiskBytes, written));
        }
        if let Some(files) = files.filter(|files| passed(self.limits.disk_files, *files)) {
            return Some((Limit::DiskFiles, files));
        }
        passed(self.limits.memory_bytes, living.memory_bytes).then_some((Limit::Memory, living.memory_bytes))
    }

    /// The limit that a command has run into which did not end well and left a private file system full, or wrote a file
    /// as large as it might.
    pub(crate) fn at_the_end(&self, tree: &Tree) -> Option<(Limit, u64)> {
        let status = tree.status()?;
        if status == 0 {
            return None;
        }
        let written = tree.used().blocks_written * BLOCK_BYTES;
        if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGXFSZ {
            return Some((Limit::DiskBytes, self.limits.disk_bytes.unwrap_or(written)));
        }
        if self.limits.disk_bytes.is_some_and(|limit| written >= limit) {
            return Some((Limit::DiskBytes, written));
        }
        // A process that is refused more by the kernel is close to its limit, and never above.
        let close = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used >= limit - limit / 10);
        let memory = tree.used().memory_peak_kib * 1024;
        if close(self.limits.memory_bytes, memory) {
            return Some((Limit::Memory, memory));
        }
        if close(self.limits.processes, self.processes_peak) {
            return Some((Limit::Processes, self.processes_peak));
        }
        self.private.iter().find_map(|place| {
            let state = rustix::fs::statvfs(place.as_c_str()).ok()?;
            match (state.f_bavail, state.f_ffree) {
                (0, _) => Some((Limit::DiskBytes, state.f_blocks * state.f_frsize)),
                (_, 0) => Some((Limit::DiskFiles, state.f_files)),
                _ => None,
            }
        })
    }
}

impl Living {
    /// Adds a process and all below it.
    fn count(&mut self, pid: Pid) {
        let process = PathBuf::from(format!("/proc/{}", pid.as_raw_pid()));
        self.memory_bytes += resident_bytes(&process);
        self.written_bytes += written_bytes(&process);
        let Ok(threads) = fs::read_dir(process.join("task")) else { return };
        for thread in threads.flatten() {
            self.processes += 1;
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            for child in children.split_ascii_whitespace().filter_map(|number| Pid::from_raw(number.parse().ok()?)) {
                self.count(child);
            }
        }
    }
}

fn resident_bytes(process: &Path) -> u64 {
    let statm = fs::read_to_string(process.join("statm")).unwrap_or_default();
    let mut fields = statm.split_ascii_whitespace().skip(1).map(|pages| pages.parse().unwrap_or(0_u64));
    let (resident, shared) = (fields.next().unwrap_or(0), fields.next().unwrap_or(0));
    // What is shared, mostly programs and libraries, is counted once by the page cache and not once for each process.
    resident.saturating_sub(shared) * rustix::param::page_size() as u64
}

fn written_bytes(process: &Path) -> u64 {
    let io = fs::read_to_string(process.join("io")).unwrap_or_default();
    let field = |name: &str| {
        let line = io.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0_u64)
    };
    field("write_bytes:").saturating_sub(field("cancelled_write_bytes:"))
}

fn files_in_use(folder: &Path) -> Option<u64> {
    let state = rustix::fs::statvfs(folder).ok()?;
    // Some file systems do not count.
    (state.f_files > 0).then(|| state.f_files - state.f_ffree)
}

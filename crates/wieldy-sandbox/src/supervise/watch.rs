//! Checks the limits that the kernel does not enforce for a whole process tree: bytes written, files made and, without
//! a cgroup, memory and processes. The supervisor calls it while a command runs.

use std::ffi::CString;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::Access;
use rustix::io::Errno;
use rustix::process::Pid;

use super::memory::{Found, InFolders, Memory};
use super::protocol::{RunLimits, WatchedLimit};
use super::tree::Tree;

/// The kernel counts blocks of this size, independent of the disk's own.
pub(crate) const BLOCK_BYTES: u64 = 512;

/// Tolerance for access times: reading a file may update its access time, which the kernel counts as written bytes.
const NOTED_BYTES: u64 = 64 << 10;

/// Longest time between two scans of the workspace, unless scans are slow. Files that other processes remove meanwhile
/// hide new ones from the counters of the file system.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Minimum growth of the file system, in files, before the next scan.
const FILES_FURTHER_MIN: u64 = 64;

/// The limits of one run, and the counters at its start.
pub(crate) struct Watch<'a> {
    limits: RunLimits,
    /// The workspace, and the private folders on a disk.
    scanned: Vec<Scanned>,
    /// One folder of each private file system of the sandbox.
    private: &'a [CString],
    /// The use of the private file systems at the start.
    private_before: Taken,
    /// The memory meter of the call's processes, if no cgroup counts it.
    memory: Option<Memory>,
    /// The devices of the private file systems.
    private_devices: Vec<u64>,
    processes_peak: u64,
}

/// Folders of one file system, in which new files and bytes are counted.
struct Scanned {
    folders: Vec<PathBuf>,
    limits: RunLimits,
    since: SystemTime,
    /// The growth of the whole file system, and the growth from which on the folders are scanned.
    growth: Option<Growth>,
    look_from: Taken,
    /// The time from which on growth above the limits alone causes a scan.
    look_at: Option<Instant>,
}

/// Returns the first folder on each file system.
pub(crate) fn one_of_each(mut folders: Vec<CString>) -> Vec<CString> {
    let mut known = Vec::new();
    folders.retain(|folder| match rustix::fs::stat(folder.as_c_str()) {
        Ok(found) if !known.contains(&found.st_dev) => {
            known.push(found.st_dev);
            true
        }
        _ => false,
    });
    folders
}

/// The living processes of a command.
#[derive(Default)]
struct Living {
    /// Each process with its threads.
    processes: Vec<(PathBuf, Vec<PathBuf>)>,
}

impl<'a> Watch<'a> {
    /// `private` are private folders in memory, `on_disk` those on a disk, which are on one file system.
    pub(crate) fn new(limits: &RunLimits, workspace: &Path, private: &'a [CString], on_disk: &[PathBuf]) -> Self {
        // Files get the time of the last tick, so use the clock with the same resolution.
        let tick = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        let since = UNIX_EPOCH + Duration::new(tick.tv_sec.unsigned_abs(), tick.tv_nsec.unsigned_abs() as u32);
        let groups = [vec![workspace.to_owned()], on_disk.to_vec()];
        let scanned = groups.into_iter().filter(|folders| !folders.is_empty());
        let mut scanned: Vec<_> = scanned.map(|folders| Scanned::new(folders, limits, since)).collect();
        // The workspace is the first.
        scanned.iter_mut().skip(1).for_each(Scanned::keep_to_room);
        let private_before = Taken::of_private(private);
        let session_left = limits.session_memory_bytes.map(|limit| limit.saturating_sub(private_before.bytes));
        let memory_max = limits.memory_bytes.into_iter().chain(session_left).min();
        Self {
            limits: *limits,
            scanned,
            private,
            private_before,
            memory: memory_max.map(Memory::new),
            private_devices: private
                .iter()
                .filter_map(|place| Some(rustix::fs::stat(place.as_c_str()).ok()?.st_dev))
                .collect(),
            processes_peak: 0,
        }
    }

    /// Returns true if there is a limit to check.
    pub(crate) fn is_needed(&self) -> bool {
        let RunLimits { disk_bytes, disk_files, memory_bytes, session_memory_bytes, .. } = self.limits;
        disk_bytes.or(disk_files).or(memory_bytes).or(session_memory_bytes).is_some()
    }

    pub(crate) fn processes_peak(&self) -> u64 {
        self.processes_peak.max(1)
    }

    /// Returns the limit that was passed, if one was, and the use.
    pub(crate) fn check(&mut self, tree: &mut Tree) -> Option<(WatchedLimit, u64)> {
        if !self.is_needed() {
            return None;
        }
        let living = self.count(tree);
        let written = living.written_bytes() + tree.used().blocks_written * BLOCK_BYTES;
        let passed = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used > limit);
        if passed(self.limits.disk_bytes.map(|limit| limit.saturating_add(NOTED_BYTES)), written) {
            return Some((WatchedLimit::DiskBytes, written));
        }
        let in_folders = InFolders { bytes: self.in_private().bytes, devices: &self.private_devices };
        let memory = self.memory.as_mut().map_or(0, |memory| memory.bytes(living.memory(), in_folders));
        self.check_disk().or_else(|| self.passed_in_memory(memory))
    }

    /// Returns the memory limit that a call with this many bytes has passed, if any. The session's limit also counts
    /// files that earlier calls left in private folders.
    fn passed_in_memory(&self, bytes: u64) -> Option<(WatchedLimit, u64)> {
        let RunLimits { memory_bytes, session_memory_bytes, .. } = self.limits;
        if memory_bytes.is_some_and(|limit| bytes > limit) {
            return Some((WatchedLimit::Memory, bytes));
        }
        let of_session = bytes.saturating_add(self.private_before.bytes);
        session_memory_bytes
            .is_some_and(|limit| of_session > limit)
            .then_some((WatchedLimit::SessionMemory { by_call: bytes }, of_session))
    }

    /// Returns the growth of the private folders since the start.
    fn in_private(&self) -> Taken {
        Taken::of_private(self.private).beyond(self.private_before)
    }

    /// Counts the processes that are left when a command ends, before they are killed. On a busy machine a fork bomb
    /// may keep this watcher from running until then.
    pub(crate) fn count_left(&mut self, tree: &mut Tree) {
        if self.limits.processes.is_some() {
            self.count(tree);
        }
    }

    /// Finds all living processes of the tree and raises the peak of their number of threads.
    fn count(&mut self, tree: &mut Tree) -> Living {
        let mut living = Living::default();
        // List all of them before reading more about one: there may be many, and they change quickly.
        for pid in tree.children() {
            living.add(pid);
        }
        let count = living.processes.iter().map(|(_, threads)| threads.len() as u64).sum();
        self.processes_peak = self.processes_peak.max(count);
        living
    }

    /// Returns the disk limit that was passed, if one was.
    pub(crate) fn check_disk(&mut self) -> Option<(WatchedLimit, u64)> {
        let scanned: Vec<_> = self.scanned.iter_mut().filter_map(|one| Some((one.taken()?, one.limits))).collect();
        self.passed_by(scanned)
    }

    /// Returns the disk limit passed by the growth of private folders in memory, or by this growth of scanned folders.
    fn passed_by(&self, scanned: Vec<(Taken, RunLimits)>) -> Option<(WatchedLimit, u64)> {
        let passed = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used > limit);
        let in_private = self.in_private();
        std::iter::once((in_private, self.limits)).chain(scanned).find_map(|(taken, limits)| {
            if passed(limits.disk_files, taken.files) {
                return Some((WatchedLimit::DiskFiles, taken.files));
            }
            passed(limits.disk_bytes, taken.bytes).then_some((WatchedLimit::DiskBytes, taken.bytes))
        })
    }

    /// Returns the growth of the workspace and the private folders in files and folders; 0 unless the order asks for
    /// it.
    pub(crate) fn files_made(&mut self) -> u64 {
        if !self.limits.counts_files {
            return 0;
        }
        let in_private = self.in_private().files;
        self.scanned.iter_mut().map(Scanned::files_made).fold(in_private, u64::saturating_add)
    }

    /// Returns the limit that an ended command ran into, as far as that can be seen. Disk limits that it passed are
    /// reported even if it succeeded; refusals by the kernel only if it failed.
    pub(crate) fn at_the_end(&mut self, tree: &Tree) -> Option<(WatchedLimit, u64)> {
        let status = tree.status()?;
        let written = tree.used().blocks_written * BLOCK_BYTES;
        let all = self.scanned.iter_mut();
        let scanned: Vec<_> = all.filter_map(|one| Some((one.taken_in_the_end(written)?, one.limits))).collect();
        let cut_off = self.passed_by(scanned);
        let cut_off = cut_off.or_else(|| self.full_private().filter(|_| self.has_filled_private()));
        // A short command may have filled private folders between two checks. One that only found them full passed no
        // limit.
        let left = self.in_private().bytes;
        let cut_off = cut_off.or_else(|| self.passed_in_memory(left).filter(|_| left > 0));
        if status == 0 || cut_off.is_some() {
            return cut_off;
        }
        if is_by_file_size(status) {
            return Some((WatchedLimit::DiskBytes, self.limits.disk_bytes.unwrap_or(written)));
        }
        if self.limits.disk_bytes.is_some_and(|limit| written >= limit) {
            return Some((WatchedLimit::DiskBytes, written));
        }
        // A process that the kernel refused more is close to its limit, and never above.
        let close = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used >= limit - limit / 10);
        let memory = tree.used().memory_peak_kib * 1024;
        if close(self.limits.memory_bytes, memory) {
            return Some((WatchedLimit::Memory, memory));
        }
        if close(self.limits.processes, self.processes_peak) {
            return Some((WatchedLimit::Processes, self.processes_peak));
        }
        self.full_private()
    }

    /// Returns the limit of a private file system that is full, if one is, and the command's own part of it. Earlier
    /// commands of its session may have filled the rest.
    fn full_private(&self) -> Option<(WatchedLimit, u64)> {
        let own = self.in_private();
        self.private.iter().find_map(|place| {
            let state = rustix::fs::statvfs(place.as_c_str()).ok()?;
            match (state.f_bavail, state.f_ffree) {
                (0, _) => Some((WatchedLimit::DiskBytes, own.bytes)),
                (_, 0) => Some((WatchedLimit::DiskFiles, own.files)),
                _ => None,
            }
        })
    }

    /// Returns true if the private file systems have grown.
    fn has_filled_private(&self) -> bool {
        let more = self.in_private();
        more.files > 0 || more.bytes > 0
    }
}

impl Scanned {
    fn files_made(&mut self) -> u64 {
        let Some(more) = self.grown().filter(|more| more.files > 0) else { return 0 };
        let seen = self.look(more, false).map_or(0, |seen| seen.files);
        // The scan also finds files made just before the start, within the same tick of the clock.
        seen.min(more.files)
    }

    fn new(folders: Vec<PathBuf>, limits: &RunLimits, since: SystemTime) -> Self {
        let is_watched = limits.disk_files.or(limits.disk_bytes).is_some();
        let first = folders.first().filter(|_| is_watched);
        let growth = first.and_then(Taken::of_file_system).map(Growth::from);
        Self { folders, limits: *limits, since, growth, look_from: Taken::allowed(limits), look_at: None }
    }

    /// Lowers the limits to what the folders have room for beside the files that are there.
    fn keep_to_room(&mut self) {
        let (Some(room), Some(mut look)) = (self.limits.room, self.look_since(UNIX_EPOCH, true)) else { return };
        self.folders.iter().for_each(|folder| look.through(folder));
        // Folders that an earlier call closed are left out. If they counted as full, a session with one could write
        // nothing more.
        let used = look.taken;
        let least = |limit: Option<u64>, room: u64, used: u64| {
            let left = room.saturating_sub(used);
            Some(limit.map_or(left, |limit| limit.min(left)))
        };
        self.limits.disk_bytes = least(self.limits.disk_bytes, room.bytes, used.bytes);
        self.limits.disk_files = least(self.limits.disk_files, room.inodes, used.files);
        self.look_from = Taken::allowed(&self.limits);
    }

    /// Returns a scan of the folders for entries that were made or changed since then.
    fn look_since(&self, since: SystemTime, with_bytes: bool) -> Option<Look> {
        Look::new(since, self.folders.first()?, with_bytes)
    }

    /// Returns the new files and bytes in the folders, if the whole file system grew so much that they may pass a
    /// limit. The growth itself proves nothing, since other processes write there, too. The processes' own write
    /// counters miss those that were never reaped.
    fn taken(&mut self) -> Option<Taken> {
        let more = self.grown()?;
        let begun = Instant::now();
        let is_time = self.look_at.is_some_and(|at| at <= begun);
        let from = if is_time { Taken::allowed(&self.limits) } else { self.look_from };
        if more.files <= from.files && more.bytes <= from.bytes {
            return None;
        }
        let further = |limit: Option<u64>, more: u64, least: u64| {
            limit.map_or(u64::MAX, |limit| more.max(limit).saturating_add((limit / 4).max(least)))
        };
        self.look_from = Taken {
            files: further(self.limits.disk_files, more.files, FILES_FURTHER_MIN),
            bytes: further(self.limits.disk_bytes, more.bytes, 0),
        };
        let taken = self.look(more, true);
        self.look_at = Some(Instant::now() + LOOK_AGAIN.max(begun.elapsed() * 10));
        taken
    }

    /// Returns the new files and bytes in the folders after a command that wrote so many bytes, if they may pass a
    /// limit. Other processes may have removed as much meanwhile, so growth of the file system is not the only
    /// condition.
    fn taken_in_the_end(&mut self, written: u64) -> Option<Taken> {
        let (more, allowed) = (self.grown()?, Taken::allowed(&self.limits));
        let has_grown = more.files > allowed.files || more.bytes > allowed.bytes;
        let has_written = written > 0 && written >= allowed.bytes;
        if has_grown || has_written { self.look(more, true) } else { None }
    }

    /// Returns the growth of the file system since the start.
    fn grown(&mut self) -> Option<Taken> {
        let now = Taken::of_file_system(self.folders.first()?)?;
        Some(self.growth.as_mut()?.note(now))
    }

    /// Scans the folders, whose whole file system has grown by `more`, for new files and bytes. Without bytes the
    /// scan is faster.
    fn look(&self, more: Taken, with_bytes: bool) -> Option<Taken> {
        let mut look = self.look_since(self.since, with_bytes)?;
        self.folders.iter().for_each(|folder| look.through(folder));
        // If a part could not be read that commands can write to, the whole growth may be theirs.
        Some(if look.missed { look.taken.or_more(more) } else { look.taken })
    }
}

/// Returns true if `SIGXFSZ` (file too large) ended the command, or the command is a shell that reports this of its
/// last command.
fn is_by_file_size(status: i32) -> bool {
    const TOLD_BY_SHELL: i32 = 128 + libc::SIGXFSZ;
    (libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGXFSZ)
        || (libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == TOLD_BY_SHELL)
}

impl Living {
    /// Adds a process and its descendants.
    fn add(&mut self, pid: Pid) {
        let process = PathBuf::from(format!("/proc/{}", pid.as_raw_pid()));
        let Ok(threads) = fs::read_dir(process.join("task")) else { return };
        let threads: Vec<PathBuf> = threads.flatten().map(|thread| thread.path()).collect();
        let children = threads.iter().map(|thread| fs::read_to_string(thread.join("children")).unwrap_or_default());
        let children = children.collect::<Vec<_>>().join(" ");
        self.processes.push((process, threads));
        for child in children.split_ascii_whitespace().filter_map(|number| Pid::from_raw(number.parse().ok()?)) {
            self.add(child);
        }
    }

    fn written_bytes(&self) -> u64 {
        self.processes.iter().map(|(process, _)| written_bytes(process)).sum()
    }

    fn memory(&self) -> Found {
        let mut found = Found::default();
        self.processes.iter().for_each(|(_, threads)| found.add(threads));
        found
    }
}

fn written_bytes(process: &Path) -> u64 {
    let io = fs::read_to_string(process.join("io")).unwrap_or_default();
    let field = |name: &str| {
        let line = io.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok()).unwrap_or(0_u64)
    };
    field("write_bytes:").saturating_sub(field("cancelled_write_bytes:"))
}

/// An amount of files and bytes on a disk.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    files: u64,
    bytes: u64,
}

impl Taken {
    fn allowed(limits: &RunLimits) -> Self {
        Self { files: limits.disk_files.unwrap_or(u64::MAX), bytes: limits.disk_bytes.unwrap_or(u64::MAX) }
    }

    fn of_file_system(folder: impl rustix::path::Arg) -> Option<Self> {
        let state = rustix::fs::statvfs(folder).ok()?;
        // Some file systems do not count files; the difference is then 0.
        let files = state.f_files.saturating_sub(state.f_ffree);
        Some(Self { files, bytes: state.f_blocks.saturating_sub(state.f_bfree) * state.f_frsize })
    }

    /// Returns the use of the file systems of these folders together.
    fn of_private(folders: &[CString]) -> Self {
        let all = folders.iter().filter_map(|folder| Self::of_file_system(folder.as_c_str()));
        all.fold(Self::default(), Self::and)
    }

    /// Returns the difference to an earlier amount.
    fn beyond(self, before: Self) -> Self {
        Self { files: self.files.saturating_sub(before.files), bytes: self.bytes.saturating_sub(before.bytes) }
    }

    fn and(self, other: Self) -> Self {
        Self { files: self.files.saturating_add(other.files), bytes: self.bytes.saturating_add(other.bytes) }
    }

    fn or_more(self, other: Self) -> Self {
        Self { files: self.files.max(other.files), bytes: self.bytes.max(other.bytes) }
    }
}

/// The sum of all increases of a file system's use between readings. A decrease does not offset earlier increases.
struct Growth {
    last: Taken,
    sum: Taken,
}

impl From<Taken> for Growth {
    fn from(first: Taken) -> Self {
        Self { last: first, sum: Taken::default() }
    }
}

impl Growth {
    fn note(&mut self, now: Taken) -> Taken {
        self.sum = self.sum.and(now.beyond(self.last));
        self.last = now;
        self.sum
    }
}

/// A scan of a folder for entries that were made or changed since some time.
struct Look {
    since: Duration,
    /// The file system of the folder.
    device: u64,
    /// True if changed files count, too. Then the files of unchanged folders are read as well.
    with_bytes: bool,
    taken: Taken,
    /// True if a part could not be read that commands can write to.
    missed: bool,
}

impl Look {
    fn new(since: SystemTime, folder: &Path, with_bytes: bool) -> Option<Self> {
        let (since, device) = (since.duration_since(UNIX_EPOCH).unwrap_or_default(), fs::metadata(folder).ok()?.dev());
        Some(Self { since, device, with_bytes, taken: Taken::default(), missed: false })
    }

    /// Counts the new entries of a folder and of all folders below it.
    fn through(&mut self, folder: &Path) {
        let Ok(about) = fs::metadata(folder) else { return };
        let mut ahead = vec![(folder.to_owned(), about)];
        while let Some((folder, about)) = ahead.pop() {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                Err(error) => {
                    self.miss(&folder, &about, &error);
                    continue;
                }
            };
            // An unchanged folder has no new entries, but its subfolders may have.
            let is_old = !self.with_bytes && !self.is_new(&about);
            for entry in entries {
                if is_old && entry.as_ref().is_ok_and(|entry| entry.file_type().is_ok_and(|kind| !kind.is_dir())) {
                    continue;
                }
                match entry.and_then(|entry| Ok((entry.metadata()?, entry))) {
                    Ok((found, entry)) => {
                        self.count(&found);
                        if found.is_dir() {
                            ahead.push((entry.path(), found));
                        }
                    }
                    Err(error) => self.miss(&folder, &about, &error),
                }
            }
        }
    }

    fn count(&mut self, found: &Metadata) {
        if !self.is_new(found) {
            return;
        }
        self.taken.bytes += found.blocks() * BLOCK_BYTES;
        // If the file system records no creation time, a changed file counts as new.
        let made = found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
        self.taken.files += u64::from(made.is_none_or(|made| made >= self.since));
    }

    /// Returns true if an entry, or its name, was made or changed since then.
    fn is_new(&self, found: &Metadata) -> bool {
        Duration::new(found.ctime().unsigned_abs(), found.ctime_nsec() as u32) >= self.since
    }

    /// Notes that a folder, or an entry of it, could not be read. It is ignored if it is gone, is on another file
    /// system, or is closed to commands, too. Commands run as this user, so a folder is closed to them only if another
    /// user owns it and it denies entry.
    fn miss(&mut self, folder: &Path, about: &Metadata, error: &io::Error) {
        let is_theirs = about.uid() == rustix::process::geteuid().as_raw();
        let is_closed = || rustix::fs::access(folder, Access::EXEC_OK) == Err(Errno::ACCESS);
        let is_elsewhere = about.dev() != self.device;
        self.missed |= error.kind() != ErrorKind::NotFound && !is_elsewhere && (is_theirs || !is_closed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_folders_of_one_file_system_one_is_counted() {
        let folders = |paths: &[&str]| paths.iter().map(|path| CString::new(*path).unwrap()).collect::<Vec<_>>();
        let all = folders(&["/proc/self", "/nowhere", "/sys/kernel", "/proc", "/sys", "/proc/self"]);
        assert_eq!(one_of_each(all), folders(&["/proc/self", "/sys/kernel"]));
    }
}

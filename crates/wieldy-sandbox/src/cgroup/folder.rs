//! Works on the folder of any group: adds, lists and kills processes, drops caches, removes the folder.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Version, explained};

/// The time after which a killed process hangs in the kernel.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// The maximum time that the kernel takes to notice that a group is empty.
const REMOVE_PATIENCE: Duration = Duration::from_millis(250);

/// The minimum page cache that is worth the milliseconds that dropping it takes.
const SETTLE_BYTES_MIN: u64 = 4 << 20;

/// Writes a value to a file of a group.
pub(super) fn write(folder: &Path, file: &str, value: &str) -> io::Result<()> {
    // Not `fs::write`, which also creates and truncates the file: neither means anything here.
    let opened = fs::OpenOptions::new().write(true).open(folder.join(file));
    let written = opened.and_then(|file| file.write_at(value.as_bytes(), 0));
    written.map(drop).map_err(|error| unwritten(error, folder, file, value))
}

/// Returns the error of a failed write.
pub(super) fn unwritten(error: io::Error, folder: &Path, file: &str, value: &str) -> io::Error {
    let kind = error.kind();
    io::Error::new(kind, Unwritten { error, value: value.to_owned(), path: folder.join(file) })
}

/// A failed write, with the system's error: callers need its number.
#[derive(Debug, thiserror::Error)]
#[error("cannot write `{value}` to `{path}`: {error}", path = path.display())]
struct Unwritten {
    error: io::Error,
    value: String,
    path: PathBuf,
}

/// Returns the system's error number of a failed [`write`].
pub(super) fn errno(error: &io::Error) -> Option<rustix::io::Errno> {
    let unwritten = error.get_ref().and_then(|inner| inner.downcast_ref::<Unwritten>());
    rustix::io::Errno::from_io_error(unwritten.map_or(error, |unwritten| &unwritten.error))
}

/// Reads a whole file of a group.
pub(super) fn read(folder: &Path, file: &str) -> io::Result<String> {
    let path = folder.join(file);
    fs::read_to_string(&path).map_err(|error| explained(&error, format_args!("read `{}`", path.display())))
}

/// Passes a controller of v2 on to the children of this group.
pub(super) fn enable(folder: &Path, controller: &str) -> io::Result<()> {
    const FILE: &str = "cgroup.subtree_control";
    if read(folder, FILE)?.split_whitespace().any(|name| name == controller) {
        return Ok(());
    }
    write(folder, FILE, &format!("+{controller}"))
}

/// Moves a process to this group.
pub(super) fn add(folder: &Path, pid: Pid) -> io::Result<()> {
    write(folder, "cgroup.procs", &pid.as_raw_pid().to_string())
}

/// Returns true if the process is in this group itself.
pub(super) fn holds(folder: &Path, pid: Pid) -> bool {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().any(|line| line.parse() == Ok(pid.as_raw_pid()))
}

/// Returns the processes in this group and below it.
pub(super) fn processes(folder: &Path) -> Vec<Pid> {
    let mut found = Vec::new();
    // A removed group has no processes.
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    // A process without a number in our own namespace is listed as 0.
    found.extend(text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)));
    for child in children(folder) {
        found.extend(processes(&child));
    }
    found
}

/// Returns the folders of the groups right below.
pub(super) fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

/// Kills everything in these folders of one group and below them; returns when all are empty.
pub(super) fn kill(folders: &[PathBuf]) -> io::Result<()> {
    let deadline = Instant::now() + KILL_PATIENCE;
    let mut pause = Duration::from_micros(100);
    // One write kills all processes, including those that they fork meanwhile. If it fails, they are killed below.
    let at_once = folders.iter().any(|folder| write(folder, "cgroup.kill", "1").is_ok());
    for round in 0.. {
        let held = (!at_once || round > 5).then(|| Held::new(folders));
        let left: Vec<&PathBuf> = folders.iter().filter(|folder| !processes(folder).is_empty()).collect();
        if left.is_empty() {
            return Ok(());
        }
        if held.is_some() {
            left.iter().for_each(|folder| kill_one_by_one(folder));
        }
        // Frozen processes die when they are thawed.
        drop(held);
        if Instant::now() > deadline {
            let problem = format!("processes {:?} do not end after SIGKILL", processes(left[0]));
            return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
    Ok(())
}

/// A guard that keeps a group from forking while its processes are killed one by one, by all means that there are.
struct Held<'a> {
    /// The writes that end this: folder, file and value.
    undo: Vec<(&'a PathBuf, &'static str, String)>,
}

impl<'a> Held<'a> {
    fn new(folders: &'a [PathBuf]) -> Self {
        let mut undo = Vec::new();
        for folder in folders {
            if let Ok(before) = read(folder, "pids.max")
                && write(folder, "pids.max", "0").is_ok()
            {
                undo.push((folder, "pids.max", before));
            }
            for (file, freeze, thaw) in [("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0")] {
                if write(folder, file, freeze).is_ok() {
                    undo.push((folder, file, thaw.into()));
                }
            }
        }
        Self { undo }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for (folder, file, value) in &self.undo {
            let _ = write(folder, file, value.trim());
        }
    }
}

/// Kills each process that is in the group now.
fn kill_one_by_one(folder: &Path) {
    let ourselves = rustix::process::getpid();
    for some in processes(folder).chunks(64) {
        let handles: Vec<_> = some.iter().map(|pid| (*pid, pidfd_open(*pid, PidfdFlags::empty()))).collect();
        // A number may belong to another process since before its handle was opened, so kill only processes that are
        // still listed.
        let still = processes(folder);
        for (pid, handle) in handles {
            if let Ok(handle) = handle
                && pid != ourselves
                && still.contains(&pid)
            {
                let _ = pidfd_send_signal(handle, Signal::KILL);
            }
        }
    }
}

/// Drops page cache that is charged to the group, if it is much.
pub(super) fn settle(folder: &Path, version: Version) {
    let (now, stat) = match version {
        Version::V1 => ("memory.usage_in_bytes", ["total_inactive_file ", "total_active_file "]),
        Version::V2 => ("memory.current", ["inactive_file ", "active_file "]),
    };
    let used = read(folder, now).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    if used < SETTLE_BYTES_MIN {
        return;
    }
    let text = read(folder, "memory.stat").unwrap_or_default();
    let field = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.parse::<u64>().ok()).unwrap_or(0);
    let cached = stat.into_iter().map(field).sum::<u64>();
    if cached < SETTLE_BYTES_MIN {
        return;
    }
    // Cache that cannot be dropped now stays and counts for the next call, which is also correct.
    let _ = match version {
        Version::V1 => write(folder, "memory.force_empty", "0"),
        Version::V2 => write(folder, "memory.reclaim", &cached.to_string()),
    };
}

/// Removes a group and all groups below it. Fails if processes run in one of them.
pub(super) fn remove(folder: &Path) -> io::Result<()> {
    if fs::remove_dir(folder).is_ok() {
        return Ok(());
    }
    children(folder).iter().for_each(|child| drop(remove(child)));
    let deadline = Instant::now() + REMOVE_PATIENCE;
    loop {
        let error = match fs::remove_dir(folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => error,
        };
        // The last process may be gone from the list but not yet from the group.
        if Instant::now() > deadline || !processes(folder).is_empty() {
            return Err(explained(&error, format_args!("remove the control group `{}`", folder.display())));
        }
        thread::sleep(Duration::from_micros(500));
    }
}

//! Liveness locks: a file for each executor that writes here, which its process keeps locked. The file is also the
//! executor's write-ahead log, so a process that finds an unlocked one commits its records before it deletes it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::database::Tables;
use crate::error::StoreError;
use crate::wal::{OrphanedWal, Wal};

/// The pause before another attempt to get a lock.
const PAUSE: Duration = Duration::from_millis(5);

/// Returns the folder with the liveness locks of a history.
pub(super) fn folder(history: &Path) -> PathBuf {
    let mut name = history.file_name().unwrap_or_default().to_owned();
    name.push(".instances");
    history.with_file_name(name)
}

/// The liveness lock of an executor of this process.
pub(super) struct LivenessLock {
    instance: String,
    path: PathBuf,
    _file: File,
}

impl LivenessLock {
    pub(super) fn acquire(history: &Path, instance: &str) -> io::Result<Self> {
        let folder = folder(history);
        match fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => File::open(folder.parent().unwrap_or(Path::new(".")))?.sync_all()?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let path = folder.join(instance);
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
        file.lock()?;
        Ok(Self { instance: instance.to_owned(), path, _file: file })
    }

    pub(super) fn open_wal(&self, history: &Path, task_ttl: i64) -> io::Result<Wal> {
        Wal::new(self.path.clone(), history.to_owned(), &self.instance, task_ttl)
    }

    pub(super) fn release(self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The free space that an executor must find on the disk: enough for the records of a call or two.
const FREE_BYTES_MIN: u64 = 1024 * 1024;

/// Refuses to start on a full disk: a read-only call runs before its records are written, and could not be recorded.
pub(super) fn check_free_space(history: &Path, tables: &Tables) -> Result<(), StoreError> {
    let folder = history.parent().unwrap_or(Path::new("."));
    // If the system does not report the free space, the first write fails instead.
    match rustix::fs::statvfs(folder) {
        Ok(disk) if disk.f_bavail.saturating_mul(disk.f_frsize) < FREE_BYTES_MIN => Err(StoreError::Full(format!(
            "{} `{}`: the disk is full, and {FREE_BYTES_MIN} bytes must be free",
            tables.cannot_use,
            history.display()
        ))),
        _ => Ok(()),
    }
}

/// Returns true if an executor is alive, or its write-ahead log is not committed yet.
pub(super) fn exists(history: &Path, instance: &str) -> io::Result<bool> {
    // A history file may come from anywhere, so its instance ids must not lead to other files.
    match uuid::Uuid::try_parse(instance) {
        Ok(_) => folder(history).join(instance).try_exists(),
        Err(_) => Ok(false),
    }
}

/// Returns the write-ahead logs of dead executors. One process at a time gets them. Others wait, up to `patience`, so
/// that they start with all records of these executors.
pub(super) fn take_orphaned_wals(history: &Path, patience: Duration) -> io::Result<Vec<OrphanedWal>> {
    let folder = folder(history);
    let folder_lock = match File::open(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => Arc::new(opened?),
    };
    let began = Instant::now();
    while !try_lock(&folder_lock)? {
        if began.elapsed() >= patience {
            return Ok(Vec::new());
        }
        std::thread::sleep(PAUSE);
    }
    let mut wals = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if uuid::Uuid::try_parse(name).is_err() {
            continue;
        }
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        if try_lock(&file)? {
            wals.push(OrphanedWal { instance: name.to_owned(), path, file, _folder_lock: Arc::clone(&folder_lock) });
        }
    }
    Ok(wals)
}

fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

//! Checkpoints: moves committed pages from SQLite's `-wal` file into the database. A thread moves nearly all of them
//! beside commits, which would have to wait for two more syncs of the disk otherwise. The few pages that are committed
//! meanwhile are moved between two commits, so that the `-wal` file starts over. While it is overwritten, a sync writes
//! data only; while it grows, the file system also writes metadata, which takes several times as long.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::hooks::Wal;
use rusqlite::{Connection, OpenFlags};

use crate::failpoint;

/// The number of pages in the `-wal` file that starts a checkpoint: 8 MiB.
const PAGES_MAX: i32 = 2048;
/// The shortest pause between checkpoints: a long read may keep the `-wal` file from starting over.
const PAUSE: Duration = Duration::from_millis(100);

/// The state of checkpoints.
#[derive(Default)]
pub(super) struct Checkpoint {
    /// The number of pages in the `-wal` file after the last commit.
    pages: Arc<AtomicI32>,
    /// The thread that runs a checkpoint beside commits.
    thread: Option<JoinHandle<()>>,
    last: Option<Instant>,
}

impl Checkpoint {
    /// Makes SQLite report the length of the `-wal` file.
    pub(super) fn watch(&self, connection: &mut Connection) -> rusqlite::Result<()> {
        let pages = Arc::clone(&self.pages);
        connection.wal_hook(Some(move |_: &mut Wal, length| {
            pages.store(length, Ordering::Relaxed);
            Ok(())
        }))
    }

    /// Starts or finishes a checkpoint after a write, if one is due.
    pub(super) fn after_write(&mut self, path: &Path, connection: &Connection) {
        if let Some(thread) = &self.thread {
            if thread.is_finished() {
                self.thread = None;
                run(connection);
                self.last = Some(Instant::now());
            }
            return;
        }
        if self.pages.load(Ordering::Relaxed) < PAGES_MAX || self.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        let path = path.to_owned();
        let work = move || {
            // If the file is gone by now, no new one is created.
            if let Ok(connection) = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
                run(&connection);
            }
        };
        match std::thread::Builder::new().name("wieldy-checkpoint".into()).spawn(work) {
            Ok(thread) => self.thread = Some(thread),
            Err(_) => run(connection),
        }
    }
}

/// Returns the path of SQLite's `-wal` file.
pub(super) fn dash_wal_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

fn run(connection: &Connection) {
    failpoint::reach("checkpoint.begun");
    let done = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    failpoint::reach("checkpoint.done");
    if let Err(error) = done {
        tracing::debug!(error = &error as &dyn std::error::Error, "cannot checkpoint the `-wal` file of the history");
    }
}

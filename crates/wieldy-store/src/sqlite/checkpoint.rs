//! Bringing what was committed from SQLite's `-wal` file into the database. Nearly all of it is brought in beside commits, which
//! would wait for two more syncs of the disk otherwise. What was committed meanwhile is little, and is brought in between two
//! commits, so that the `-wal` file begins anew: where it is written over, a sync is one of data; where it grows, the file system has to write down
//! its own part too, which takes several times as long.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::hooks::Wal;
use rusqlite::{Connection, OpenFlags};

use crate::failpoint;

/// How many pages the `-wal` file may have before it is brought in: 8 MiB.
const LONG: i32 = 2048;
/// How much time there is between two times: somebody who reads for long may keep it from beginning anew.
const PAUSE: Duration = Duration::from_millis(100);

/// How long the `-wal` file is, and who brings it in.
#[derive(Default)]
pub(super) struct Checkpoint {
    /// How many pages it had after the last commit.
    pages: Arc<AtomicI32>,
    /// The thread that brings it in beside commits.
    beside: Option<JoinHandle<()>>,
    last: Option<Instant>,
}

impl Checkpoint {
    /// Has SQLite tell how long it is.
    pub(super) fn watch(&self, connection: &mut Connection) -> rusqlite::Result<()> {
        let pages = Arc::clone(&self.pages);
        connection.wal_hook(Some(move |_: &mut Wal, length| {
            pages.store(length, Ordering::Relaxed);
            Ok(())
        }))
    }

    /// Sees to it after something was written to it.
    pub(super) fn after_write(&mut self, path: &Path, connection: &Connection) {
        if let Some(beside) = &self.beside {
            if beside.is_finished() {
                self.beside = None;
                bring_in(connection);
                self.last = Some(Instant::now());
            }
            return;
        }
        if self.pages.load(Ordering::Relaxed) < LONG || self.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        let path = path.to_owned();
        let work = move || {
            // Should the file be gone by now, none is made in its place.
            if let Ok(connection) = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
                bring_in(&connection);
            }
        };
        match std::thread::Builder::new().name("wieldy-checkpoint".into()).spawn(work) {
            Ok(beside) => self.beside = Some(beside),
            Err(_) => bring_in(connection),
        }
    }
}

/// Where SQLite keeps what was committed to a file and is not in it yet.
pub(super) fn wal(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

fn bring_in(connection: &Connection) {
    failpoint::reach("checkpoint.begun");
    let brought = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    failpoint::reach("checkpoint.done");
    if let Err(error) = brought {
        tracing::debug!(error = &error as &dyn std::error::Error, "the `-wal` file of the history is not brought in");
    }
}

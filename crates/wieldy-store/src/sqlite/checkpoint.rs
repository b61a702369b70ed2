//! Bringing what was committed from the log into the file itself, while commits go on: those would wait for two more syncs
//! of the disk otherwise.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};

use crate::failpoint;

/// How long the log may get before it is brought in, and before commits have to wait for that.
const LONG: u64 = 8 * 1024 * 1024;
const TOO_LONG: u64 = 256 * 1024 * 1024;
/// How much time there is between two times.
const PAUSE: Duration = Duration::from_millis(500);

/// When the log was brought in, and whether that goes on.
#[derive(Default)]
pub(super) struct Checkpoint {
    last: Option<Instant>,
    runs: Arc<AtomicBool>,
}

impl Checkpoint {
    /// Sees to the log after something was written to it.
    pub(super) fn after_write(&mut self, path: &Path, connection: &Connection) {
        if self.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        self.last = Some(Instant::now());
        let length = std::fs::metadata(log(path)).map_or(0, |log| log.len());
        if length > TOO_LONG {
            // The log begins anew only when all of it is brought in, which needs a moment without commits.
            bring_in(connection);
        } else if length > LONG && !self.runs.swap(true, Ordering::AcqRel) {
            let (runs, path) = (Arc::clone(&self.runs), path.to_owned());
            let work = move || {
                // Should the file be gone by now, none is made in its place.
                if let Ok(connection) = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
                    bring_in(&connection);
                }
                runs.store(false, Ordering::Release);
            };
            if std::thread::Builder::new().name("wieldy-checkpoint".into()).spawn(work).is_err() {
                self.runs.store(false, Ordering::Release);
            }
        }
    }
}

/// Where SQLite keeps the log of a file.
pub(super) fn log(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

fn bring_in(connection: &Connection) {
    failpoint::reach("checkpoint.begun");
    let brought = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    failpoint::reach("checkpoint.done");
    if let Err(error) = brought {
        tracing::debug!(error = &error as &dyn std::error::Error, "the log of the history is not brought in");
    }
}

//! Trust: records that a person trusts configuration files of folders, each bound to its path and its bytes.
//!
//! A record is a file in `~/.config/wieldy/trust`, named after the path of the trusted file. No tool can see or change
//! that folder, and a record that another user could have written is ignored.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::Environment;

/// The maximal size of a record.
const RECORD_BYTES_MAX: u64 = 16 * 1024;
/// The maximal number of files of `.wieldy/tools` that are read.
pub(crate) const TOOLS_MAX: usize = 1000;

/// The trust of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Trust {
    New,
    /// The file was trusted with other bytes.
    Changed,
    Trusted,
}

/// The record that a person trusts a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) path: String,
    pub(crate) blake3: String,
    pub(crate) at: Timestamp,
}

/// The records of this user.
#[derive(Debug)]
pub(crate) struct Records {
    /// The folder with the records. `None` without a home folder, so that nothing can be trusted.
    folder: Option<PathBuf>,
}

impl Records {
    pub(crate) fn of(environment: &Environment) -> Self {
        Self { folder: environment.config_folder().map(|folder| folder.join("trust")) }
    }

    /// Returns the trust of a file with these bytes.
    pub(crate) fn trust(&self, path: &Path, bytes: &[u8]) -> Trust {
        match self.find(path) {
            Some(record) if record.blake3 == digest(bytes) => Trust::Trusted,
            Some(_) => Trust::Changed,
            None => Trust::New,
        }
    }

    /// Returns true if there is a record of this path, with any bytes.
    pub(crate) fn knows(&self, path: &Path) -> bool {
        self.find(path).is_some()
    }

    fn find(&self, path: &Path) -> Option<Record> {
        let path = place(path).ok()?;
        let record = read_record(&self.folder.as_ref()?.join(name(&path)))?;
        (record.path == path.to_string_lossy()).then_some(record)
    }

    /// Records that a person trusts these bytes at this path.
    pub(crate) fn add(&self, path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
        let folder = self.folder.as_ref().ok_or_else(|| anyhow!("there is no home folder, as HOME is not set"))?;
        let path = place(path)?;
        let record = Record { path: path.to_string_lossy().into(), blake3: digest(bytes), at: Timestamp::now() };
        let write = || -> io::Result<()> {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            let new = folder.join(format!(".{}.new", std::process::id()));
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&serde_json::to_vec(&record)?)?;
            file.sync_all()?;
            fs::rename(&new, folder.join(name(&path)))
        };
        write().with_context(|| format!("cannot store trust records in `{}`", folder.display()))
    }

    /// Deletes the records of all files in a folder, and returns their paths.
    pub(crate) fn revoke(&self, folder: &Path) -> anyhow::Result<Vec<String>> {
        let folder = folder.canonicalize().or_else(|_| std::path::absolute(folder))?;
        let own = self.folder.as_ref().ok_or_else(|| anyhow!("there is no home folder, as HOME is not set"))?;
        let mut revoked = Vec::new();
        for record in self.all().into_iter().filter(|record| Path::new(&record.path).starts_with(&folder)) {
            let file = own.join(name(Path::new(&record.path)));
            fs::remove_file(&file).with_context(|| format!("cannot remove `{}`", file.display()))?;
            revoked.push(record.path);
        }
        Ok(revoked)
    }

    /// Returns all records, sorted by path.
    pub(crate) fn all(&self) -> Vec<Record> {
        let entries = self.folder.iter().filter_map(|folder| folder.read_dir().ok()).flatten();
        let mut all: Vec<Record> = entries.filter_map(|entry| read_record(&entry.ok()?.path())).collect();
        all.sort_by(|one, other| one.path.cmp(&other.path));
        all
    }
}

/// Reads a record, if only this user or root can have written it.
fn read_record(path: &Path) -> Option<Record> {
    let file = File::open(path).ok()?;
    let found = file.metadata().ok()?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw() || found.uid() == 0;
    if !found.is_file() || !is_own || found.mode() & 0o022 != 0 {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(RECORD_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Returns the file's own name in its folder without links. A link in the folder is itself the file that is trusted.
pub(crate) fn place(path: &Path) -> anyhow::Result<PathBuf> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or_else(|| anyhow!("`{}` names no file", path.display()))?;
    let folder = folder.canonicalize().with_context(|| format!("cannot find `{}`", folder.display()))?;
    Ok(folder.join(name))
}

fn name(path: &Path) -> String {
    format!("{}.json", blake3::hash(path.as_os_str().as_bytes()).to_hex())
}

fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Reads at most this many bytes of an untrusted file. Pipes and devices are refused, because reading them could block.
pub(crate) fn read_regular(path: &Path, bytes_max: u64) -> anyhow::Result<Vec<u8>> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    ensure!(file.metadata()?.is_file(), "it is no file");
    let mut bytes = Vec::new();
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

//! Artifacts in a folder: they outlive the program that made them, and several programs may share the folder.
//!
//! Each artifact is two files, `<id>` with the bytes and `<id>.json` with what is known of it. Nothing is kept in
//! memory, so what one program writes or removes the next one sees.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use wieldy_core::artifact::ArtifactError;
use wieldy_core::{ArtifactId, ArtifactInfo, ArtifactWriter, Artifacts, Caller};

/// The default for the size of all artifacts together, in bytes.
const BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// Keeps artifacts in a folder that only this user can open. The oldest go when the space is used up.
#[derive(Debug, Clone)]
pub struct FolderArtifacts {
    folder: PathBuf,
    bytes_max: u64,
}

/// The reason why a folder cannot keep artifacts.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep artifacts in `{}`", folder.display())]
pub struct FolderError {
    folder: PathBuf,
    source: io::Error,
}

impl FolderArtifacts {
    /// Opens the folder `artifacts` in the folder `state`, making both where they are missing.
    pub fn open(state: &Path) -> Result<Self, FolderError> {
        Self::with_bound(state, BYTES_MAX)
    }

    /// The same with a bound of its own for all artifacts together.
    pub fn with_bound(state: &Path, bytes_max: u64) -> Result<Self, FolderError> {
        let folder = state.join("artifacts");
        let make = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
            // It may have been there before, open to others.
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))
        };
        make().map_err(|source| FolderError { folder: folder.clone(), source })?;
        Ok(Self { folder, bytes_max })
    }

    fn bytes_path(&self, id: ArtifactId) -> PathBuf {
        self.folder.join(id.bare())
    }

    fn info_path(&self, id: ArtifactId) -> PathBuf {
        self.folder.join(format!("{}.json", id.bare()))
    }

    /// Writes what is known of an artifact, whole or not at all.
    fn write_info(&self, info: &ArtifactInfo) -> io::Result<()> {
        let draft = self.folder.join(format!("{}.json.new", info.id.bare()));
        private_file(&draft)?.write_all(&serde_json::to_vec(info)?)?;
        fs::rename(draft, self.info_path(info.id))
    }

    /// Returns the artifacts that are there, with their sizes, in no order.
    fn kept(&self) -> io::Result<Vec<(ArtifactId, u64)>> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.parse::<ArtifactId>().ok().filter(|id| id.bare() == name));
            // An artifact that another process has just removed takes no space.
            if let (Some(id), Ok(metadata)) = (id, entry.metadata()) {
                kept.push((id, metadata.len()));
            }
        }
        Ok(kept)
    }

    /// Removes the oldest artifacts until all fit; the newest always stays. Ids are in the order of their making.
    fn sweep(&self) -> io::Result<()> {
        let mut kept = self.kept()?;
        kept.sort_unstable();
        let mut bytes: u64 = kept.iter().map(|(_, length)| length).sum();
        for (id, length) in kept.iter().take(kept.len().saturating_sub(1)) {
            if bytes <= self.bytes_max {
                break;
            }
            // The record goes first: an artifact without one does not exist any more.
            remove(&self.info_path(*id))?;
            remove(&self.bytes_path(*id))?;
            bytes -= length;
        }
        Ok(())
    }
}

/// Makes a new file that only its owner can read.
fn private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Turns an error of the disk into one that names the artifact; what is not there any more was never there.
fn failed(doing: &'static str, id: ArtifactId) -> impl Fn(io::Error) -> ArtifactError {
    move |source| match source.kind() {
        ErrorKind::NotFound => ArtifactError::NotFound(id),
        _ => ArtifactError::Store { doing, id, source },
    }
}

impl Artifacts for FolderArtifacts {
    fn create(
        &self,
        owner: &Caller,
        workspace: Option<&str>,
        bytes_max: u64,
    ) -> Result<Box<dyn ArtifactWriter>, ArtifactError> {
        let id = ArtifactId::next();
        let info = ArtifactInfo::new(id, owner, workspace);
        let make = || {
            self.sweep()?;
            let file = private_file(&self.bytes_path(id))?;
            self.write_info(&info)?;
            Ok(file)
        };
        // A folder that is gone is an error of the store, not a missing artifact.
        let file = make().map_err(|source| ArtifactError::Store { doing: "make", id, source })?;
        // The newest always stays, so it must not be larger than all may be.
        let bytes_max = bytes_max.min(self.bytes_max);
        Ok(Box::new(FolderWriter { store: self.clone(), info, file, bytes_max }))
    }

    fn describe(&self, id: ArtifactId, reader: &Caller) -> Result<ArtifactInfo, ArtifactError> {
        let look = || -> io::Result<ArtifactInfo> {
            let mut info: ArtifactInfo = serde_json::from_slice(&fs::read(self.info_path(id))?)?;
            // While it is written, and after a crash, only the file itself knows how long it is.
            info.kept_bytes = fs::metadata(self.bytes_path(id))?.len();
            info.total_bytes = info.total_bytes.max(info.kept_bytes);
            Ok(info)
        };
        let info = look().map_err(failed("look at", id))?;
        if info.tenant == reader.tenant { Ok(info) } else { Err(ArtifactError::NotFound(id)) }
    }

    fn read(&self, id: ArtifactId, reader: &Caller, offset: u64, length: u64) -> Result<Vec<u8>, ArtifactError> {
        let kept_bytes = self.describe(id, reader)?.kept_bytes;
        let page = || -> io::Result<Vec<u8>> {
            let mut file = File::open(self.bytes_path(id))?;
            file.seek(SeekFrom::Start(offset.min(kept_bytes)))?;
            let mut page = Vec::new();
            file.take(length).read_to_end(&mut page)?;
            Ok(page)
        };
        page().map_err(failed("read", id))
    }

    fn list(&self, reader: &Caller, workspace: &str, limit: usize) -> Result<Vec<ArtifactInfo>, ArtifactError> {
        // A folder that cannot be read lists nothing, as an artifact that cannot be read is not there.
        let mut ids: Vec<ArtifactId> =
            self.kept().map(|kept| kept.into_iter().map(|(id, _)| id).collect()).unwrap_or_default();
        ids.sort_unstable_by(|one, other| other.cmp(one));
        let own = ids.into_iter().filter_map(|id| self.describe(id, reader).ok());
        Ok(own.filter(|info| info.is_made_by(reader, workspace)).take(limit).collect())
    }
}

struct FolderWriter {
    store: FolderArtifacts,
    info: ArtifactInfo,
    file: File,
    bytes_max: u64,
}

impl ArtifactWriter for FolderWriter {
    fn id(&self) -> ArtifactId {
        self.info.id
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        let room = self.bytes_max.saturating_sub(self.info.kept_bytes);
        let taken = (bytes.len() as u64).min(room);
        self.file.write_all(&bytes[..taken as usize]).map_err(|source| ArtifactError::Store {
            doing: "write",
            id: self.info.id,
            source,
        })?;
        self.info.kept_bytes += taken;
        self.info.total_bytes += bytes.len() as u64;
        Ok(())
    }

    fn kept_bytes(&self) -> u64 {
        self.info.kept_bytes
    }
}

impl Drop for FolderWriter {
    fn drop(&mut self) {
        // An artifact that was swept away meanwhile is not brought back. Should the true size not be written, the
        // size that was kept still stands; and the next one that is made sweeps again.
        if self.store.info_path(self.info.id).exists() {
            let _ = self.store.write_info(&self.info);
        }
        let _ = self.store.sweep();
    }
}

//! Artifacts in a folder: they outlive the program that made them, and several programs may share the folder.
//!
//! Each artifact is two files, `<id>` with the bytes and `<id>.json` with its metadata. Nothing is cached in memory, so
//! each program sees at once what another one writes or removes.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use wieldy_core::artifact::ArtifactError;
use wieldy_core::{ArtifactId, ArtifactInfo, ArtifactWriter, Artifacts, Caller};

/// The default limit for the size of all artifacts together, in bytes.
const BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// A store of artifacts in a folder that only this user can open. It removes the oldest artifacts when its space is
/// used up.
#[derive(Debug, Clone)]
pub struct FolderArtifacts {
    folder: PathBuf,
    bytes_max: u64,
}

/// The reason why a folder cannot store artifacts.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep artifacts in `{}`", folder.display())]
pub struct FolderError {
    folder: PathBuf,
    source: io::Error,
}

impl FolderArtifacts {
    /// Opens the folder `artifacts` in the folder `state`, and creates both if they are missing.
    pub fn open(state: &Path) -> Result<Self, FolderError> {
        Self::with_bound(state, BYTES_MAX)
    }

    /// Does the same with another limit for the size of all artifacts together.
    pub fn with_bound(state: &Path, bytes_max: u64) -> Result<Self, FolderError> {
        let folder = state.join("artifacts");
        let make = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
            // The folder may have existed before, open to other users.
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

    /// Writes the metadata of an artifact atomically.
    fn write_info(&self, info: &ArtifactInfo) -> io::Result<()> {
        let draft = self.folder.join(format!("{}.json.new", info.id.bare()));
        private_file(&draft)?.write_all(&serde_json::to_vec(info)?)?;
        fs::rename(draft, self.info_path(info.id))
    }

    /// Returns the existing artifacts with their sizes, unordered.
    fn kept(&self) -> io::Result<Vec<(ArtifactId, u64)>> {
        let mut kept = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let id = name.to_str().and_then(|name| name.parse::<ArtifactId>().ok().filter(|id| id.bare() == name));
            // Skip an artifact that another process has just removed.
            if let (Some(id), Ok(metadata)) = (id, entry.metadata()) {
                kept.push((id, metadata.len()));
            }
        }
        Ok(kept)
    }

    /// Removes the oldest artifacts until the rest fits; the newest is never removed. Ids sort by creation time.
    fn sweep(&self) -> io::Result<()> {
        let mut kept = self.kept()?;
        kept.sort_unstable();
        let mut bytes: u64 = kept.iter().map(|(_, length)| length).sum();
        for (id, length) in kept.iter().take(kept.len().saturating_sub(1)) {
            if bytes <= self.bytes_max {
                break;
            }
            // The metadata goes first: an artifact without it counts as removed.
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

/// Converts an I/O error into one that names the artifact. A missing file becomes `NotFound`.
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
        // A missing folder is an error of the store, not a missing artifact.
        let file = make().map_err(|source| ArtifactError::Store { doing: "make", id, source })?;
        // The newest artifact is never removed, so it must not exceed the limit for all artifacts.
        let bytes_max = bytes_max.min(self.bytes_max);
        Ok(Box::new(FolderWriter { store: self.clone(), info, file, bytes_max }))
    }

    fn describe(&self, id: ArtifactId, reader: &Caller) -> Result<ArtifactInfo, ArtifactError> {
        let look = || -> io::Result<ArtifactInfo> {
            let mut info: ArtifactInfo = serde_json::from_slice(&fs::read(self.info_path(id))?)?;
            // During writing and after a crash, only the file itself has the right length.
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
        // A folder that cannot be read lists nothing, just as an artifact that cannot be read is not found.
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
        // Do not write the metadata back if another process removed the artifact meanwhile. If the true size cannot be
        // written, the stored size stays valid, and the next new artifact runs the cleanup again.
        if self.store.info_path(self.info.id).exists() {
            let _ = self.store.write_info(&self.info);
        }
        let _ = self.store.sweep();
    }
}

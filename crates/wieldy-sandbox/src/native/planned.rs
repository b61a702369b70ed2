//! From a confinement to a plan for this machine, with what the plan needs on it made.
//!
//! What must not be written but does not exist yet is held by a placeholder: an empty folder, or a small file. All sandboxes on a workspace
//! share them. Each keeps a lock on those it needs, from before it is planned until it ends, and the warden removes only what
//! nobody has locked.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use wieldy_core::{Confinement, SandboxError};

use super::NativeOptions;
use super::facts::Disk;
use super::owners::Identity;
use super::plan::{Entry, Held, HostFacts, Look, Placeholder, Plan, Room, Step};
use super::planner::{Request, plan};
use crate::wire::HeldPlace;

/// How much private folders hold where nobody says.
const ROOM: Room = Room { bytes: 1 << 30, inodes: 250_000 };

/// The placeholders that this process has made and that are still there, in the order of their paths: parents come first.
static OURS: Mutex<BTreeSet<HeldPlace>> = Mutex::new(BTreeSet::new());

/// A plan whose placeholders are there.
pub(super) struct Planned {
    pub(super) steps: Vec<Step>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) placeholders: Vec<HeldPlace>,
    /// To be kept until the sandbox has its own.
    pub(super) locks: Vec<OwnedFd>,
}

impl Planned {
    pub(super) fn new(confinement: &Confinement, options: &NativeOptions) -> Result<Self, SandboxError> {
        let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
        ours.retain(|held| held.path.symlink_metadata().is_ok());
        let Plan { steps, placeholders, environment } = draw(confinement, options, &ours)?;
        let mut held = Vec::new();
        let mut locks = Vec::new();
        for placeholder in placeholders {
            let place = HeldPlace::from(placeholder);
            let told = |error| creation(format!("holding `{}` for protection: {error}", place.path.display()));
            locks.push(hold(&place).map_err(told)?);
            ours.insert(place.clone());
            held.push(place);
        }
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Self { steps, environment, placeholders: held, locks })
    }
}

/// The plan, with nothing done yet.
pub(super) fn draw(
    confinement: &Confinement,
    options: &NativeOptions,
    ours: &BTreeSet<HeldPlace>,
) -> Result<Plan, SandboxError> {
    let workspace = confinement.workspace.canonicalize();
    let workspace =
        workspace.map_err(|error| creation(format!("the workspace `{}`: {error}", confinement.workspace.display())))?;
    let (user, group) = Identity::of_this_process().inside();
    let (home, state) = (options.home.clone(), options.state.clone());
    let limits = confinement.place_limits.or(confinement.limits);
    let request = Request {
        workspace: &workspace,
        rules: &confinement.files,
        network: &confinement.network,
        room: Room { bytes: limits.disk_bytes.unwrap_or(ROOM.bytes), inodes: limits.disk_files.unwrap_or(ROOM.inodes) },
    };
    let facts = HostFacts { look: &WithoutOurs(ours), home, state, user, group };
    plan(&request, &facts).map_err(|error| creation(error.to_string()))
}

fn creation(reason: String) -> SandboxError {
    SandboxError::Creation { reason }
}

/// The files of this machine without our placeholders, as long as these are as they were made: whatever sandboxes there
/// are, the next one is planned alike.
struct WithoutOurs<'a>(&'a BTreeSet<HeldPlace>);

impl WithoutOurs<'_> {
    fn is_ours(&self, path: &Path) -> bool {
        let Some(held) = self.0.iter().find(|held| held.path == path) else { return false };
        match &held.content {
            Some(content) => fs::read_to_string(path).is_ok_and(|found| found == *content),
            None => Disk.names(path).iter().all(|name| self.is_ours(&path.join(name))),
        }
    }
}

impl Look for WithoutOurs<'_> {
    fn entry(&self, path: &Path) -> Option<Entry> {
        if self.is_ours(path) { None } else { Disk.entry(path) }
    }

    fn names(&self, folder: &Path) -> Vec<OsString> {
        Disk.names(folder).into_iter().filter(|name| !self.is_ours(&folder.join(name))).collect()
    }
}

impl From<Placeholder> for HeldPlace {
    fn from(placeholder: Placeholder) -> Self {
        let content = match placeholder.held {
            Held::Folder => None,
            Held::File(content) => Some(content.to_owned()),
        };
        Self { path: placeholder.path, content }
    }
}

/// Makes a placeholder, unless it is there, and locks it against removal.
fn hold(place: &HeldPlace) -> io::Result<OwnedFd> {
    const TRIES: usize = 200;
    for _ in 0..TRIES {
        match make(place) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // Somebody may be about to remove it: then it is locked against us, or gone when we have opened it, or another.
        match lock(&place.path) {
            Some(lock) if is_at(&lock, &place.path) => return Ok(lock),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "somebody keeps removing it"))
}

fn make(place: &HeldPlace) -> io::Result<()> {
    match &place.content {
        None => fs::create_dir(&place.path),
        Some(content) => fs::File::create_new(&place.path)?.write_all(content.as_bytes()),
    }
}

/// A lock on a file or folder that any number of sandboxes may have; nothing for what cannot be opened or is being removed.
pub(super) fn lock(path: &Path) -> Option<OwnedFd> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).ok()?;
    flock(&file, FlockOperation::NonBlockingLockShared).ok()?;
    Some(file)
}

fn is_at(file: &OwnedFd, path: &PathBuf) -> bool {
    let (Ok(opened), Ok(found)) = (rustix::fs::fstat(file), fs::symlink_metadata(path)) else { return false };
    (opened.st_dev, opened.st_ino) == (found.dev(), found.ino())
}

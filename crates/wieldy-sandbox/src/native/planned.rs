//! From a confinement to a plan for this machine.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use wieldy_core::{Confinement, SandboxError};

use super::NativeOptions;
use super::facts::Disk;
use super::owners::Identity;
use super::plan::{Entry, Held, HostFacts, Look, Placeholder, Plan, Room, Step};
use super::planner::{Request, plan};
use crate::wire::HeldPlace;

/// How much private folders hold where nobody says.
const ROOM: Room = Room { bytes: 1 << 30, inodes: 250_000 };

/// A plan, and what the warden must make for it.
pub(super) struct Planned {
    pub(super) steps: Vec<Step>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) placeholders: Vec<HeldPlace>,
}

impl Planned {
    pub(super) fn new(confinement: &Confinement, options: &NativeOptions) -> Result<Self, SandboxError> {
        let Plan { steps, placeholders, environment } = draw(confinement, options)?;
        let placeholders: Vec<HeldPlace> = placeholders.into_iter().map(held_place).collect();
        ours().extend(placeholders.iter().cloned());
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Self { steps, environment, placeholders })
    }
}

/// The plan, with nothing done yet.
pub(super) fn draw(confinement: &Confinement, options: &NativeOptions) -> Result<Plan, SandboxError> {
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
    let facts = HostFacts { look: &WithoutOurs, home, state, user, group };
    plan(&request, &facts).map_err(|error| creation(error.to_string()))
}

fn creation(reason: String) -> SandboxError {
    SandboxError::Creation { reason }
}

fn held_place(Placeholder { path, held }: Placeholder) -> HeldPlace {
    let content = match held {
        Held::Folder => None,
        Held::File(content) => Some(content.to_owned()),
    };
    HeldPlace { path, content }
}

/// Every place that a warden of this process was asked to hold. Not all of them need be there now.
fn ours() -> MutexGuard<'static, BTreeSet<HeldPlace>> {
    /// More than anybody has workspaces in use.
    const OURS_MAX: usize = 20_000;
    static OURS: Mutex<BTreeSet<HeldPlace>> = Mutex::new(BTreeSet::new());
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    if ours.len() > OURS_MAX {
        ours.retain(|held| held.path.symlink_metadata().is_ok());
    }
    ours
}

/// The files of this machine without those that are there only for the sake of other sandboxes of ours, which may go at any time:
/// a new sandbox needs them itself.
struct WithoutOurs;

impl Look for WithoutOurs {
    fn entry(&self, path: &Path) -> Option<Entry> {
        let entry = Disk.entry(path)?;
        let is_only_held = !matches!(entry, Entry::Link { .. }) && is_as_made(path, &ours());
        (!is_only_held).then_some(entry)
    }

    fn names(&self, folder: &Path) -> Vec<OsString> {
        Disk.names(folder)
    }
}

/// Whether something is a place that we hold and nobody has put anything into it. One that has gone meanwhile is, too: its last sandbox
/// has just ended.
fn is_as_made(path: &Path, ours: &BTreeSet<HeldPlace>) -> bool {
    let first = HeldPlace { path: path.to_owned(), content: None };
    let Some(held) = ours.range(first..).next().filter(|held| held.path == path) else { return false };
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match &held.content {
        Some(content) => match fs::read(path) {
            Ok(found) => found == content.as_bytes(),
            Err(error) => is_gone(&error),
        },
        None => match fs::read_dir(path) {
            Ok(mut entries) => entries.all(|entry| entry.is_ok_and(|entry| is_as_made(&entry.path(), ours))),
            Err(error) => is_gone(&error),
        },
    }
}

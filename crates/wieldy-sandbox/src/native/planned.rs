//! From a confinement to a plan for this machine, with what the plan needs on it made.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use wieldy_core::{Confinement, SandboxError};

use super::NativeOptions;
use super::facts::Disk;
use super::owners::Identity;
use super::plan::{Held, HostFacts, Placeholder, Plan, Room, Step};
use super::planner::{Request, plan};
use crate::wire::HeldPlace;

/// How much private folders hold where nobody says.
const ROOM: Room = Room { bytes: 1 << 30, inodes: 250_000 };

/// A plan whose placeholders are there.
pub(super) struct Planned {
    pub(super) steps: Vec<Step>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) placeholders: Vec<HeldPlace>,
}

impl Planned {
    pub(super) fn new(confinement: &Confinement, options: &NativeOptions) -> Result<Self, SandboxError> {
        let Plan { steps, placeholders, environment } = draw(confinement, options)?;
        // A plan names it by the path that links lead to.
        let workspace = confinement.workspace.canonicalize().unwrap_or_else(|_| confinement.workspace.clone());
        let placeholders = place(placeholders, &workspace)
            .map_err(|(path, error)| creation(format!("holding `{}` for protection: {error}", path.display())))?;
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
    let facts = HostFacts { look: &Disk, home, state, user, group };
    plan(&request, &facts).map_err(|error| creation(error.to_string()))
}

fn creation(reason: String) -> SandboxError {
    SandboxError::Creation { reason }
}

/// Makes the placeholders that are not there. Those of other sandboxes of ours are shared: the last one takes them away.
fn place(missing: Vec<Placeholder>, workspace: &Path) -> Result<Vec<HeldPlace>, (PathBuf, io::Error)> {
    static OURS: Mutex<BTreeSet<HeldPlace>> = Mutex::new(BTreeSet::new());
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    for Placeholder { path, held } in missing {
        let (made, content) = match held {
            Held::Folder => (fs::create_dir(&path), None),
            Held::File(content) => (write_new(&path, content), Some(content.to_owned())),
        };
        match made {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err((path, error)),
            _ => drop(ours.insert(HeldPlace { path, content })),
        }
    }
    // In the order of paths, so that parents come first.
    ours.retain(|held| held.path.exists());
    Ok(ours.iter().filter(|held| held.path.starts_with(workspace)).cloned().collect())
}

fn write_new(path: &Path, content: &str) -> io::Result<()> {
    fs::File::create_new(path)?.write_all(content.as_bytes())
}

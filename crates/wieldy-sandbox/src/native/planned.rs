//! From a confinement to a plan for this machine, with what the plan needs on it made.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use wieldy_core::{Confinement, SandboxError};

use super::NativeOptions;
use super::owners::Identity;
use super::plan::{Entry, Held, HostFacts, Look, Placeholder, Plan, Room};
use super::planner::{Request, plan};

/// How much private folders hold where nobody says.
const ROOM: Room = Room { bytes: 1 << 30, inodes: 250_000 };

/// A plan whose placeholders are there.
pub(super) struct Planned {
    pub(super) plan: Plan,
    pub(super) environment: Vec<(String, String)>,
    pub(super) placeholders: Vec<Placeholder>,
}

impl Planned {
    pub(super) fn new(confinement: &Confinement, options: &NativeOptions) -> Result<Self, SandboxError> {
        let mut plan = draw(confinement, options)?;
        let environment = std::mem::take(&mut plan.environment);
        let placeholders = place(std::mem::take(&mut plan.placeholders), &confinement.workspace)
            .map_err(|(path, error)| creation(format!("holding `{}` for protection: {error}", path.display())))?;
        Ok(Self { plan, environment, placeholders })
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
    let facts = HostFacts { look: &ThisMachine, home, state, user, group };
    plan(&request, &facts).map_err(|error| creation(error.to_string()))
}

fn creation(reason: String) -> SandboxError {
    SandboxError::Creation { reason }
}

/// Looks at the real file system.
struct ThisMachine;

impl Look for ThisMachine {
    fn entry(&self, path: &Path) -> Option<Entry> {
        let entry = path.symlink_metadata().ok()?;
        if entry.is_symlink() {
            let target = path.read_link().ok()?;
            let resolved = path.canonicalize().unwrap_or_else(|_| path.parent().unwrap_or(path).join(&target));
            return Some(Entry::Link { target, resolved });
        }
        Some(if entry.is_dir() { Entry::Folder } else { Entry::File })
    }

    fn names(&self, folder: &Path) -> Vec<OsString> {
        let entries = folder.read_dir().into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect()
    }
}

/// Makes the placeholders that are not there. Those of other sandboxes of ours are shared: the last one takes them away.
fn place(missing: Vec<Placeholder>, workspace: &Path) -> Result<Vec<Placeholder>, (PathBuf, std::io::Error)> {
    static OURS: Mutex<BTreeSet<Known>> = Mutex::new(BTreeSet::new());
    let mut ours = OURS.lock().unwrap_or_else(PoisonError::into_inner);
    for placeholder in &missing {
        let Placeholder { path, held } = placeholder;
        let made = match held {
            Held::Folder => fs::create_dir(path),
            Held::File(content) => fs::write(path, content.as_bytes()),
        };
        match made {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err((path.clone(), error)),
            _ => drop(ours.insert(Known(path.clone(), held.clone()))),
        }
    }
    let shared = ours.iter().filter(|Known(path, _)| path.starts_with(workspace) && path.exists());
    Ok(shared.map(|Known(path, held)| Placeholder { path: path.clone(), held: held.clone() }).collect())
}

/// A placeholder that this process has made; in the order of paths, so that parents come first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Known(PathBuf, Held);

//! Everything a container needs on the machine before its runtime is called, and its removal afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use wieldy_core::{Confinement, Level, SandboxError};

use super::bundle::Tree;
use super::home::Home;
use super::image::transplant;
use super::owners::AGENT;
use crate::native::facts::Disk;
use crate::native::plan::{Held, HostFacts, Placeholder, Room, Step};
use crate::native::planner::{Request, plan};
use crate::wire::HeldPlace;

/// How much private folders hold where nobody says.
const ROOM: Room = Room { bytes: 1 << 30, inodes: 250_000 };

/// The file in a container's folder that says what is held for it.
const NOTE: &str = "held.json";

/// What containers of a driver have in common.
pub(super) struct Ground {
    pub(super) level: Level,
    pub(super) home: Home,
    /// Another system than the machine's.
    pub(super) image: Option<PathBuf>,
    /// Where the executor keeps its own files.
    pub(super) state: PathBuf,
    /// The home folder of whoever runs the executor.
    pub(super) user_home: Option<PathBuf>,
}

/// The file tree of a container, planned and made.
pub(super) struct Site {
    pub(super) ground: Arc<Ground>,
    pub(super) id: String,
    pub(super) tree: Tree,
    pub(super) steps: Vec<Step>,
    pub(super) environment: Vec<(&'static str, String)>,
    /// The last to be made comes first.
    held: Vec<Holding>,
}

impl Site {
    /// Plans and makes the tree of a container. Blocks.
    pub(super) fn make(ground: Arc<Ground>, id: &str, confinement: &Confinement) -> Result<Self, SandboxError> {
        let creation = |reason: String| SandboxError::Creation { reason };
        let workspace = confinement.workspace.canonicalize();
        let workspace = workspace
            .map_err(|error| creation(format!("the workspace `{}`: {error}", confinement.workspace.display())))?;
        let limits = confinement.place_limits.or(confinement.limits);
        let room =
            Room { bytes: limits.disk_bytes.unwrap_or(ROOM.bytes), inodes: limits.disk_files.unwrap_or(ROOM.inodes) };
        let (rules, network) = (&confinement.files, &confinement.network);
        let request = Request { workspace: &workspace, rules, network, room };
        let (home, state) = (ground.user_home.clone(), Some(ground.state.clone()));
        let facts = HostFacts { look: &Disk, home, state, user: AGENT, group: AGENT };
        let planned = plan(&request, &facts).map_err(|error| creation(error.to_string()))?;
        let held = hold(planned.placeholders, &workspace)
            .map_err(|error| creation(format!("holding a place for protection: {error}")))?;
        let steps = match &ground.image {
            Some(image) => transplant(planned.steps, image)
                .map_err(|error| creation(format!("the image `{}`: {error}", image.display())))?,
            None => planned.steps,
        };
        let tree = Tree::make(id, &steps, ground.level, &ground.home).map_err(|error| {
            let _ = fs::remove_dir_all(ground.home.container(id));
            creation(error.to_string())
        })?;
        let site = Self { ground, id: id.to_owned(), tree, steps, environment: planned.environment, held };
        site.noteheld().map_err(|error| creation(format!("noting what is held: {error}")))?;
        Ok(site)
    }

    /// Writes down what is to be taken away should nobody be left to do it.
    fn noteheld(&self) -> io::Result<()> {
        let all = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        let note = self.held.iter().filter_map(|holding| {
            let content = match all.get(&holding.path)?.0 {
                Held::Folder => None,
                Held::File(content) => Some(content.to_owned()),
            };
            Some(HeldPlace { path: holding.path.clone(), content })
        });
        fs::write(self.folder().join(NOTE), serde_json::to_vec(&note.collect::<Vec<_>>())?)
    }

    /// The container's own folder.
    pub(super) fn folder(&self) -> PathBuf {
        self.ground.home.container(&self.id)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // What is lent is mounted elsewhere, so there is nothing in here but our own files.
        let _ = fs::remove_dir_all(self.folder());
    }
}

/// Something that was put on the machine only to be mounted on; the last one to let go of it takes it away if it is as it was.
struct Holding {
    path: PathBuf,
}

/// What was put there and how many hold it.
static HELD: Mutex<BTreeMap<PathBuf, (Held, usize)>> = Mutex::new(BTreeMap::new());

/// Holds these places, and those in the workspace that others of ours hold already: they must stay as long as we do, too.
fn hold(missing: Vec<Placeholder>, workspace: &Path) -> io::Result<Vec<Holding>> {
    let mut all = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    for Placeholder { path, held } in missing {
        let made = match held {
            Held::Folder => fs::create_dir(&path),
            Held::File(content) => fs::File::create_new(&path).and_then(|mut file| file.write_all(content.as_bytes())),
        };
        match made {
            Ok(()) => drop(all.insert(path, (held, 0))),
            // Somebody else's, unless it is in the books.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))),
        }
    }
    let ours = all.iter_mut().filter(|(path, _)| path.starts_with(workspace));
    let mut holdings: Vec<Holding> = ours
        .map(|(path, (_, holders))| {
            *holders += 1;
            Holding { path: path.clone() }
        })
        .collect();
    // What lies in another goes before it.
    holdings.reverse();
    Ok(holdings)
}

impl Drop for Holding {
    fn drop(&mut self) {
        let mut all = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((held, holders)) = all.get_mut(&self.path) else { return };
        *holders = holders.saturating_sub(1);
        if *holders == 0 {
            let content = match held {
                Held::Folder => None,
                Held::File(content) => Some(*content),
            };
            remove_unchanged(&self.path, content);
            all.remove(&self.path);
        }
    }
}

/// Takes away what a dead executor held for the container in this folder.
pub(super) fn let_go(container: &Path) {
    let note = fs::read(container.join(NOTE)).unwrap_or_default();
    let held: Vec<HeldPlace> = serde_json::from_slice(&note).unwrap_or_default();
    held.iter().for_each(|HeldPlace { path, content }| remove_unchanged(path, content.as_deref()));
}

/// Removes an empty folder, or a file with just this content.
fn remove_unchanged(path: &Path, content: Option<&str>) {
    match content {
        None => drop(fs::remove_dir(path)),
        Some(content) if fs::read(path).is_ok_and(|found| found == content.as_bytes()) => drop(fs::remove_file(path)),
        Some(_) => {}
    }
}

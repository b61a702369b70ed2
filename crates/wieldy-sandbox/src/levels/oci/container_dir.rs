//! The folder of a container on the host: its planned file tree, bundle and placeholders. It is made before the runtime
//! is called and removed afterwards.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use wieldy_core::{Confinement, Level, SandboxError};

use super::bundle::Tree;
use super::cgroup_parent::{above, noted};
use super::idmap::AGENT;
use super::image::transplant;
use crate::state_dir::StateDir;
use crate::view::masked::{MaskedPath, masked_by};
use crate::view::placeholders::host_view::{HostWithoutPlaceholders, placeholders_for};
use crate::view::placeholders::{Placeholder, Placeholders};
use crate::view::plan::{HostFacts, Step, program_folders, protected};
use crate::view::plan_cache;
use crate::view::planner::{Request, plan};

/// The file in a container's folder that lists its placeholders.
const NOTE: &str = "held.json";

/// The settings that all containers of a driver share.
pub(super) struct ContainerSetup {
    pub(super) level: Level,
    pub(super) home: StateDir,
    /// The root file system of an image, if programs do not get the machine's own system.
    pub(super) image: Option<PathBuf>,
    /// The folder of the executor's own files.
    pub(super) state: PathBuf,
    /// The home folder of the user who runs the executor.
    pub(super) user_home: Option<PathBuf>,
}

/// The file tree of a container, planned and made.
pub(super) struct ContainerDir {
    pub(super) setup: Arc<ContainerSetup>,
    pub(super) id: String,
    pub(super) tree: Tree,
    pub(super) steps: Vec<Step>,
    pub(super) environment: Vec<(&'static str, String)>,
    /// The masked paths, each with the file that it was before.
    pub(super) masked: Vec<MaskedPath>,
    _held: HeldPlaceholders,
}

impl ContainerDir {
    /// Plans and makes the tree of a container. Blocks.
    pub(super) fn make(setup: Arc<ContainerSetup>, id: &str, confinement: &Confinement) -> Result<Self, SandboxError> {
        let (workspace, room) = (plan_cache::workspace(confinement)?, plan_cache::room(confinement));
        let (rules, network) = (&confinement.files, &confinement.network);
        let request = Request { workspace: &workspace, rules, network, room };
        let (home, state) = (setup.user_home.clone(), Some(setup.state.clone()));
        let writable = rules.mounts.iter().filter(|mount| mount.writable).map(|mount| mount.source.as_path());
        let roots = writable.chain([workspace.as_path()]).collect();
        let programs = program_folders();
        let facts = HostFacts {
            look: &HostWithoutPlaceholders { roots },
            home,
            programs,
            state,
            private: None,
            user: AGENT,
            group: AGENT,
        };
        let planned = plan(&request, &facts).map_err(SandboxError::creation_from)?;
        let missing = placeholders_for(planned.placeholders);
        let held = HeldPlaceholders::take(&protected(&planned.steps), &missing)
            .map_err(|error| SandboxError::creation("making a placeholder for a protected path", error))?;
        let steps = match &setup.image {
            // Masked paths of the workspace would be visible through the root.
            Some(image) if workspace.starts_with(image) => {
                let image = image.display();
                let reason = format!("the workspace lies in the root `{image}`; give programs another root");
                return Err(SandboxError::creation_because(reason));
            }
            Some(image) => transplant(planned.steps, image)
                .map_err(|error| SandboxError::creation(format!("the image `{}`", image.display()), error))?,
            None => planned.steps,
        };
        let masked = masked_by(&steps);
        let tree = Tree::make(id, &steps, setup.level, &setup.home).map_err(|error| {
            let _ = fs::remove_dir_all(setup.home.container(id));
            SandboxError::creation_from(error)
        })?;
        let environment = planned.environment;
        let dir = Self { setup, id: id.to_owned(), tree, steps, environment, masked, _held: held };
        // A list of the placeholders to remove if this executor dies.
        let noted = serde_json::to_vec(&missing).map_err(io::Error::from);
        let noted = noted.and_then(|note| fs::write(dir.folder().join(NOTE), note));
        noted.map_err(|error| SandboxError::creation("recording the placeholders", error))?;
        Ok(dir)
    }

    /// Returns the container's own folder.
    pub(super) fn folder(&self) -> PathBuf {
        self.setup.home.container(&self.id)
    }
}

impl Drop for ContainerDir {
    fn drop(&mut self) {
        // Granted paths are mounted elsewhere, so this folder holds only our own files.
        let _ = fs::remove_dir_all(self.folder());
    }
}

/// The paths on the host that are locked for a container, parents first. The last container to release a placeholder
/// removes it, if it is unchanged.
struct HeldPlaceholders(Vec<PathBuf>);

/// The paths that containers of this process need. Other executors see that by the locks on them.
static HELD: LazyLock<Mutex<Placeholders>> = LazyLock::new(Mutex::default);

impl HeldPlaceholders {
    /// Locks the protected paths, and makes the missing placeholders.
    fn take(protected: &[PathBuf], missing: &[Placeholder]) -> io::Result<Self> {
        let mut taken = Self(Vec::new());
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        let result = held.hold(protected, missing, &mut taken.0);
        // Dropping `taken` locks `HELD`, too.
        drop(held);
        result.map(|()| taken)
    }
}

impl Drop for HeldPlaceholders {
    fn drop(&mut self) {
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.iter().rev().for_each(|path| held.release(path));
    }
}

/// Removes the placeholders that a dead executor made for the container in this folder, unless another executor needs
/// them.
fn release_placeholders(container: &Path) {
    let note = fs::read(container.join(NOTE)).unwrap_or_default();
    let mut made: Vec<Placeholder> = serde_json::from_slice(&note).unwrap_or_default();
    made.retain(|place| fs::symlink_metadata(&place.path).is_ok());
    made.sort_by(|one, other| one.path.cmp(&other.path));
    // One at a time: a user may have replaced one by a file of their own, which must not stop the others.
    let mut held: Vec<_> = made.into_iter().filter_map(|place| HeldPlaceholders::take(&[], &[place]).ok()).collect();
    // Inner placeholders are removed before the folders that they are in.
    while held.pop().is_some() {}
}

/// Ends the containers that a dead executor left in its folder, by the runtime's program if there is one.
pub(super) fn forget_containers(home: &Path, program: Option<&Path>) {
    let runtime = home.join("runtime");
    let containers = fs::read_dir(home.join("containers")).into_iter().flatten().flatten();
    for id in containers.map(|entry| entry.file_name()) {
        release_placeholders(&home.join("containers").join(&id));
        let groups = noted(&runtime.join(&id));
        if let Some(program) = program {
            let mut delete = Command::new(program);
            delete.arg("--root").arg(&runtime).args(["delete", "--force"]).arg(&id);
            let _ = delete.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        // Only empty cgroups can be removed, so none that is in use.
        groups.iter().flat_map(|(_, group)| above(group)).for_each(|group| drop(fs::remove_dir(group)));
    }
}

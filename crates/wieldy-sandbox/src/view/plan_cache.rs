//! Cache of plans. A plan depends only on a request and the host's files, so a cached plan is used again as long as
//! these files did not change.
//!
//! Creating, replacing or removing a file changes the folder that it is in: files in an unchanged folder are not looked
//! at again. Always checked is everything that a folder's times do not show: targets of links, content of placeholders,
//! and secrets in deeper folders.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wieldy_core::{Confinement, FileRules, Network, SandboxError};

use super::identity::Identity;
use super::masked::{folder_stamp, settled};
use super::placeholders::host_view::{HostWithoutPlaceholders, Stamp};
use super::plan::{Entry, HostFacts, Look, Making, Plan, PlannedPlaceholder, Room, Wanted, program_folders};
use super::planner::{Request, plan};

/// The maximum number of cached plans.
const KNOWN_MAX: usize = 8;

/// The size of the private folders if no limit is set.
const ROOM: Room = Room { bytes: 1 << 30, inodes: 250_000 };

/// The folders of the executor and its user, which no program may see.
#[derive(Debug, Clone, Default)]
pub(crate) struct OwnFolders {
    /// The home folder of the user; secrets in it are hidden wherever it is mounted.
    pub(crate) home: Option<PathBuf>,
    /// The folder of the executor's own files.
    pub(crate) state: Option<PathBuf>,
    /// The folder on a disk with the private folders of sandboxes.
    pub(crate) private: Option<PathBuf>,
}

/// The last plans, the newest at the end.
#[derive(Default)]
pub(crate) struct PlanCache {
    known: Mutex<Vec<CachedPlan>>,
}

impl PlanCache {
    /// Returns the plan for a confinement; nothing is mounted yet.
    pub(crate) fn plan(&self, confinement: &Confinement, own: &OwnFolders) -> Result<Plan, SandboxError> {
        loop {
            let (plan, unverified) = self.cached_or_new(confinement, own)?;
            if self.is_still_right(unverified) {
                return Ok(plan);
            }
        }
    }

    /// Returns the cached plan, not yet verified (see [`PlanCache::is_still_right`]), or a new one.
    pub(crate) fn cached_or_new(
        &self,
        confinement: &Confinement,
        own: &OwnFolders,
    ) -> Result<(Plan, Option<Unverified>), SandboxError> {
        let asked = Asked::of(confinement)?;
        let known = {
            let mut all = self.known();
            all.iter().position(|known| known.asked == asked).map(|at| all.remove(at))
        };
        if let Some(known) = known {
            return Ok((known.plan.clone(), Some(Unverified(known))));
        }
        let look = asked.look();
        let noting = Observing { look: &look, observed: RefCell::default() };
        let plan = asked.plan(&noting, own)?;
        let mut observed = noting.observed.into_inner();
        observed.will_be_placeholders(&plan);
        drop(look);
        self.remember(CachedPlan { asked, observed, plan: plan.clone() });
        Ok((plan, None))
    }

    /// Returns true if a cached plan is still right; otherwise the plan is dropped. A new plan is always right.
    pub(crate) fn is_still_right(&self, unverified: Option<Unverified>) -> bool {
        let Some(Unverified(mut known)) = unverified else { return true };
        // The plan is out of the cache meanwhile, so that other threads can plan without waiting for the disk.
        let holds = known.observed.is_still_right(&known.asked.look());
        if holds {
            self.remember(known);
        }
        holds
    }

    fn remember(&self, known: CachedPlan) {
        let mut all = self.known();
        all.retain(|other| other.asked != known.asked);
        if all.len() >= KNOWN_MAX {
            all.remove(0);
        }
        all.push(known);
    }

    fn known(&self) -> MutexGuard<'_, Vec<CachedPlan>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A cached plan that may be outdated.
pub(crate) struct Unverified(CachedPlan);

/// The part of a request that differs from call to call, by which plans are cached.
#[derive(Clone, PartialEq, Eq)]
struct Asked {
    workspace: PathBuf,
    rules: Arc<FileRules>,
    network: Network,
    room: Room,
}

impl Asked {
    fn of(confinement: &Confinement) -> Result<Self, SandboxError> {
        let (workspace, room) = (workspace(confinement)?, room(confinement));
        Ok(Self { workspace, rules: Arc::clone(&confinement.files), network: confinement.network.clone(), room })
    }

    fn look(&self) -> HostWithoutPlaceholders<'_> {
        let writable = self.rules.mounts.iter().filter(|mount| mount.writable).map(|mount| mount.source.as_path());
        HostWithoutPlaceholders { roots: writable.chain([self.workspace.as_path()]).collect() }
    }

    fn plan(&self, look: &dyn Look, own: &OwnFolders) -> Result<Plan, SandboxError> {
        let Self { workspace, rules, network, room } = self;
        let (user, group) = Identity::of_this_process().inside();
        let OwnFolders { home, state, private } = own.clone();
        let facts = HostFacts { look, home, programs: program_folders(), state, private, user, group };
        plan(&Request { workspace, rules, network, room: *room }, &facts).map_err(SandboxError::creation_from)
    }
}

/// Returns the workspace of a confinement without links.
pub(crate) fn workspace(confinement: &Confinement) -> Result<PathBuf, SandboxError> {
    let Confinement { workspace, .. } = confinement;
    workspace
        .canonicalize()
        .map_err(|error| SandboxError::creation(format!("the workspace `{}`", workspace.display()), error))
}

/// Returns the size limits of a confinement's private folders.
pub(crate) fn room(confinement: &Confinement) -> Room {
    let limits = confinement.place_limits.or(confinement.limits);
    Room { bytes: limits.disk_bytes.unwrap_or(ROOM.bytes), inodes: limits.disk_files.unwrap_or(ROOM.inodes) }
}

/// A plan, and the facts that it was made from.
struct CachedPlan {
    asked: Asked,
    observed: Observed,
    plan: Plan,
}

/// The facts that were looked up for a plan.
#[derive(Default)]
struct Observed {
    folders: HashMap<PathBuf, Folder>,
    /// Entries that can change without their folder.
    unsure: Vec<(PathBuf, Option<Entry>)>,
    /// The secrets in the folders of a workspace.
    deep: Vec<(PathBuf, Vec<PathBuf>)>,
    /// The processes that can make files in folders.
    making: Vec<(PathBuf, Making)>,
}

/// The facts that were looked up in a folder.
#[derive(Default)]
struct Folder {
    entries: Vec<(PathBuf, Option<Entry>)>,
    /// Filters, and the names that passed them.
    names: Vec<(Wanted, Vec<String>)>,
    /// The stamp of the folder when its entries and names were last checked, if any later change would give another one.
    seen: Option<Stamp>,
}

impl Observed {
    /// Returns true if all facts are the same as before.
    fn is_still_right(&mut self, look: &dyn Look) -> bool {
        let Self { folders, unsure, deep, making } = self;
        folders.iter_mut().all(|(path, folder)| folder.is_still_right(path, look))
            && unsure.iter().all(|(path, entry)| look.entry(path) == *entry)
            && deep.iter().all(|(workspace, found)| look.deep_secrets(workspace) == *found)
            && making.iter().all(|(folder, found)| look.making(folder) == *found)
    }

    /// Notes the paths that are about to become placeholders: these can change without their folder.
    fn will_be_placeholders(&mut self, plan: &Plan) {
        for PlannedPlaceholder { path, .. } in &plan.placeholders {
            if let Some(folder) = path.parent().and_then(|folder| self.folders.get_mut(folder)) {
                self.unsure.extend(folder.entries.extract_if(.., |(entry, _)| entry == path));
            }
        }
    }
}

impl Folder {
    fn is_still_right(&mut self, path: &Path, look: &dyn Look) -> bool {
        // Read before the entries: a change meanwhile is found the next time.
        let Some(now) = folder_stamp(path) else { return self.is_missing() };
        if self.seen == Some(now) {
            return true;
        }
        // A placeholder that was made since then can change without its folder. A new plan notes that.
        let is_as_noted =
            |path: &Path, entry: &Option<Entry>| look.entry(path) == *entry && !(entry.is_none() && is_there(path));
        let holds = self.entries.iter().all(|(path, entry)| is_as_noted(path, entry))
            && self.names.iter().all(|(wanted, names)| look.names(path, *wanted) == *names);
        self.seen = if holds { settled(path, now) } else { None };
        holds
    }

    /// Returns true if nothing was found, as in a folder that does not exist.
    fn is_missing(&self) -> bool {
        self.entries.iter().all(|(_, entry)| entry.is_none()) && self.names.iter().all(|(_, names)| names.is_empty())
    }
}

fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// A view of the host that records every lookup.
struct Observing<'a> {
    look: &'a HostWithoutPlaceholders<'a>,
    observed: RefCell<Observed>,
}

impl Look for Observing<'_> {
    fn entry(&self, path: &Path) -> Option<Entry> {
        let entry = self.look.entry(path);
        let is_held = entry.is_none() && is_there(path);
        let observed = (path.to_owned(), entry.clone());
        match path.parent() {
            Some(folder) if !is_held && !matches!(entry, Some(Entry::Link { .. })) => {
                self.observed.borrow_mut().folders.entry(folder.to_owned()).or_default().entries.push(observed);
            }
            _ => self.observed.borrow_mut().unsure.push(observed),
        }
        entry
    }

    fn names(&self, folder: &Path, wanted: Wanted) -> Vec<String> {
        let names = self.look.names(folder, wanted);
        self.observed.borrow_mut().folders.entry(folder.to_owned()).or_default().names.push((wanted, names.clone()));
        names
    }

    fn deep_secrets(&self, workspace: &Path) -> Vec<PathBuf> {
        let found = self.look.deep_secrets(workspace);
        self.observed.borrow_mut().deep.push((workspace.to_owned(), found.clone()));
        found
    }

    fn is_held(&self, path: &Path) -> bool {
        // `entry` records the lookup.
        self.entry(path).is_none() && is_there(path)
    }

    fn making(&self, folder: &Path) -> Making {
        let found = self.look.making(folder);
        self.observed.borrow_mut().making.push((folder.to_owned(), found));
        found
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use wieldy_core::secrets::Held;
    use wieldy_core::{Mount, Place, ResourceLimits};

    use super::*;
    use crate::view::placeholders::host_view::placeholders_for;
    use crate::view::placeholders::make;
    use crate::view::plan::PlannedPlaceholder;

    struct World {
        root: tempfile::TempDir,
        plan_cache: PlanCache,
        options: OwnFolders,
    }

    impl World {
        /// Makes a workspace, and a home beside it in which a link leads to a folder.
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            for folder in ["workspace/deep", "home/.real", "home/.other", "home/.claude"] {
                fs::create_dir_all(root.path().join(folder)).unwrap();
            }
            symlink(".real", root.path().join("home/.ssh")).unwrap();
            let options = OwnFolders { home: Some(root.path().join("home")), ..OwnFolders::default() };
            Self { root, plan_cache: PlanCache::default(), options }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.root.path().canonicalize().unwrap().join(name)
        }

        fn confinement(&self, bytes: u64) -> Confinement {
            let home = Mount { source: self.at("home"), target: self.at("home"), writable: false };
            Confinement {
                workspace: self.at("workspace"),
                files: Arc::new(FileRules { mounts: vec![home], ..FileRules::default() }),
                network: Network::None,
                limits: ResourceLimits { disk_bytes: Some(bytes), ..ResourceLimits::default() },
                place: Place::Own,
                place_limits: ResourceLimits::default(),
                grace: Duration::ZERO,
            }
        }

        /// Returns the plan, cached or new, and asserts that it equals one made without a cache.
        fn plan(&self) -> Plan {
            let confinement = self.confinement(1);
            let plan = self.plan_cache.plan(&confinement, &self.options).unwrap();
            assert_eq!(plan, PlanCache::default().plan(&confinement, &self.options).unwrap());
            plan
        }

        /// Plans until no folder of the test needs to be read again.
        fn settle(&self) -> Plan {
            let is_settled = || {
                let known = self.plan_cache.known.lock().unwrap();
                let folders = || known.iter().flat_map(|known| &known.observed.folders);
                let own = folders().filter(|(path, _)| path.starts_with(self.at("")) && path.exists());
                own.clone().count() > 0 && own.clone().all(|(_, folder)| folder.seen.is_some())
            };
            loop {
                let plan = self.plan();
                if is_settled() {
                    return plan;
                }
                std::thread::yield_now();
            }
        }

        /// Makes the placeholders of a plan, as the fork server does.
        fn hold(&self, plan: &Plan) {
            for place in placeholders_for(plan.placeholders.clone()) {
                assert!(make(&place).unwrap());
            }
        }
    }

    #[test]
    fn a_cached_plan_equals_a_new_one_after_any_change() {
        let world = World::new();
        let before = world.settle();
        assert_eq!(world.settle(), before, "nothing changed");
        fs::write(world.at("workspace/.env"), "").unwrap();
        let hidden = world.settle();
        assert_ne!(hidden, before);
        fs::write(world.at("workspace/deep/.env"), "").unwrap();
        let deeper = world.settle();
        assert_ne!(deeper, hidden);
        fs::rename(world.at("home/.real"), world.at("home/.was")).unwrap();
        symlink(".other", world.at("home/.real")).unwrap();
        assert_ne!(world.settle(), deeper);
        fs::remove_file(world.at("workspace/.env")).unwrap();
        fs::remove_file(world.at("workspace/deep/.env")).unwrap();
        world.settle();
    }

    #[test]
    fn a_file_in_a_placeholder_changes_the_plan_though_the_parent_is_unchanged() {
        let world = World::new();
        let before = world.settle();
        world.hold(&before);
        assert_eq!(world.settle(), before, "what is held is as if it were missing");
        fs::write(world.at("workspace/.claude/own"), "").unwrap();
        let one = world.plan();
        assert_ne!(one, before);
        assert_eq!(world.settle(), one);
        fs::write(world.at("workspace/.git/HEAD"), "ref: refs/heads/main\n").unwrap();
        fs::write(world.at("workspace/.git/config"), "").unwrap();
        let two = world.plan();
        assert_ne!(two, one);
        assert_eq!(world.settle(), two);
    }

    #[test]
    fn a_plan_is_outdated_once_a_missing_path_has_a_placeholder() {
        let world = World::new();
        let place = PlannedPlaceholder { path: world.at("workspace/deep/place"), held: Held::Folder };
        let asked = Asked::of(&world.confinement(1)).unwrap();
        let look = asked.look();
        let observed = || {
            let noting = Observing { look: &look, observed: RefCell::default() };
            assert_eq!(noting.entry(&place.path), None);
            noting.observed.into_inner()
        };
        let mut missing = observed();
        assert!(missing.is_still_right(&look));
        assert!(make(&placeholders_for(vec![place.clone()])[0]).unwrap());
        assert!(!missing.is_still_right(&look), "what is put into it would not be noticed");
        let mut held = observed();
        assert!(held.is_still_right(&look));
        fs::write(place.path.join("own"), "").unwrap();
        assert!(!held.is_still_right(&look));
    }

    #[test]
    fn a_cached_plan_stays_cached_only_while_it_is_right() {
        let world = World::new();
        let confinement = world.confinement(1);
        let cached_or_new = || world.plan_cache.cached_or_new(&confinement, &world.options).unwrap();
        let (first, unverified) = cached_or_new();
        assert!(unverified.is_none() && world.plan_cache.is_still_right(None));
        // The plan's own placeholders change nothing, since the cache expects them.
        world.hold(&first);
        let (same, unverified) = cached_or_new();
        assert_eq!(same, first);
        assert!(unverified.is_some() && world.plan_cache.is_still_right(unverified));
        // Nor does a file that makes no difference.
        fs::write(world.at("workspace/notes"), "").unwrap();
        assert!(world.plan_cache.is_still_right(cached_or_new().1));
        fs::write(world.at("workspace/.env"), "").unwrap();
        let (outdated, unverified) = cached_or_new();
        assert_eq!(outdated, first, "nobody has looked yet");
        assert!(!world.plan_cache.is_still_right(unverified));
        let (second, unverified) = cached_or_new();
        assert!(second != first && unverified.is_none());
        assert_eq!(second, world.plan());
    }

    #[test]
    fn a_changed_link_chain_outdates_a_plan_though_the_links_folder_is_unchanged() {
        let world = World::new();
        let (elsewhere, link) = (world.at("home/.real/way"), world.at("home/link"));
        symlink("../.other", &elsewhere).unwrap();
        symlink(&elsewhere, &link).unwrap();
        let asked = Asked::of(&world.confinement(1)).unwrap();
        let look = asked.look();
        let noting = Observing { look: &look, observed: RefCell::default() };
        assert_eq!(
            noting.entry(&link),
            Some(Entry::Link { target: elsewhere.clone(), resolved: world.at("home/.other") })
        );
        let mut observed = noting.observed.into_inner();
        while observed.folders.values().any(|folder| folder.seen.is_none()) {
            assert!(observed.is_still_right(&look));
        }
        fs::remove_file(&elsewhere).unwrap();
        symlink("../../workspace", &elsewhere).unwrap();
        assert!(!observed.is_still_right(&look));
    }

    #[test]
    fn other_requests_have_other_plans_and_the_cache_is_bounded() {
        let world = World::new();
        let plan = |bytes| world.plan_cache.plan(&world.confinement(bytes), &world.options).unwrap();
        let all: Vec<Plan> = (1..20).map(plan).collect();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!((1..20).rev().map(plan).collect::<Vec<_>>(), all.into_iter().rev().collect::<Vec<_>>());
        assert_eq!(world.plan_cache.known.lock().unwrap().len(), KNOWN_MAX);
    }
}

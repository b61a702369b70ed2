//! The isolation level `native`: namespaces, a planned tree of mounts, Landlock, seccomp, cgroups.
//!
//! The pool keeps a sandbox for each session. A call without a session gets one of its own, of which a few are built
//! ahead (warm sandboxes); for all others, first processes are made ahead (warm inits).

mod cgroup_parent;
mod idmap;
mod rest;
mod sandbox;
mod warm;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use wieldy_core::{
    Confinement, Enforcement, Enforcer, Level, Limit, Network, Place, SandboxError, SandboxId, SandboxRef, SessionKey,
};

use self::cgroup_parent::SessionParents;
use self::idmap::IdMaps;
use self::sandbox::NativeSandbox;
use self::warm::{BuildError, WarmInit};
use crate::cgroup::{Controller, Hierarchy, KnownGroup};
use crate::pool::{Backend, IdleLimits, Live, Pool, Shape, next_id, sandbox_by_pool};
use crate::private_disk::{self, PrivateDisk};
use crate::view::placeholders::host_view::Planned;
use crate::view::plan::{self, Plan, Step};
use crate::view::plan_cache::{self, OwnFolders, PlanCache};

/// The largest number of shapes that sandboxes are built ahead for.
const SHAPES_MAX: usize = 4;

/// The idle time after which the next look takes a sandbox's placeholders away: within two seconds they are gone.
const REST_AFTER: Duration = Duration::from_millis(900);

/// The settings of the native level.
#[derive(Debug, Clone)]
pub struct NativeOptions {
    /// The folder of the executor's own files, which no sandbox ever sees, except for a folder in its `homes` that is
    /// mounted.
    pub state: Option<PathBuf>,
    /// The home folder of the user who runs the executor; secrets in it are hidden wherever it is mounted.
    pub home: Option<PathBuf>,
    /// The folder on a disk for the private folders `/tmp`, `/var/tmp` and `$HOME` of sandboxes, which are in memory
    /// without it. In it, a folder `wieldy-sandboxes` is made, which only this user may enter. What dead executors left
    /// there is removed when a level with this folder is made.
    pub folder: Option<PathBuf>,
    /// The number of sandboxes that are built ahead for calls without a session.
    pub warm_sandboxes: usize,
    /// The number of first processes that are made ahead, for sandboxes of any plan.
    pub warm_inits: usize,
    /// The idle time after which a session's sandbox, or one that was built ahead, is ended.
    pub idle_max: Duration,
    /// The limits of idle sandboxes that are kept for sessions.
    pub idle_limits: IdleLimits,
}

impl Default for NativeOptions {
    fn default() -> Self {
        Self {
            state: None,
            home: std::env::home_dir(),
            folder: None,
            warm_sandboxes: 1,
            warm_inits: 1,
            idle_max: Duration::from_secs(10 * 60),
            idle_limits: IdleLimits::default(),
        }
    }
}

/// Runs commands in sandboxes made of the kernel's own means. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Native {
    pool: Arc<Pool<NativeBackend>>,
}

sandbox_by_pool!(Native);

impl Native {
    /// Returns the level with these settings. Nothing is made before it is needed.
    pub fn new(options: NativeOptions) -> Self {
        let idle_limits = options.idle_limits;
        if let Some(folder) = options.folder.clone() {
            // There may be much to remove, and nothing waits for it.
            let _ = std::thread::Builder::new().name("wieldy-sweep".into()).spawn(move || private_disk::sweep(&folder));
        }
        let backend = NativeBackend {
            options,
            hierarchy: OnceLock::new(),
            session_parents: SessionParents::default(),
            plan_cache: PlanCache::default(),
            warm_sandboxes: Mutex::default(),
            warm_inits: Mutex::default(),
            system: Mutex::default(),
            id_maps: IdMaps::default(),
            private: Mutex::default(),
        };
        Self { pool: Pool::new(backend, idle_limits) }
    }

    /// Returns the number of first processes that are made ahead at this moment.
    pub fn warm_inits(&self) -> usize {
        lock(&self.pool.backend().warm_inits).len()
    }

    /// Returns the number of sandboxes that are built ahead at this moment.
    pub fn warm_sandboxes(&self) -> usize {
        lock(&self.pool.backend().warm_sandboxes).values().map(Vec::len).sum()
    }

    /// Returns the control groups that its sandboxes use.
    pub(crate) fn hierarchy(&self) -> &Hierarchy {
        self.pool.backend().hierarchy()
    }

    /// Returns the plan of a confinement, and makes nothing.
    pub(crate) fn plan(&self, confinement: &Confinement) -> Result<Plan, SandboxError> {
        let backend = self.pool.backend();
        backend.plan_cache.plan(confinement, &backend.own_folders())
    }
}

/// Builds native sandboxes, some of them ahead.
struct NativeBackend {
    options: NativeOptions,
    hierarchy: OnceLock<Hierarchy>,
    session_parents: SessionParents,
    plan_cache: PlanCache,
    warm_sandboxes: Mutex<HashMap<Shape, Vec<Arc<NativeSandbox>>>>,
    warm_inits: Mutex<Vec<WarmInit>>,
    /// The steps that the last sandbox began with, and the next one most likely will.
    system: Mutex<Vec<Step>>,
    id_maps: IdMaps,
    /// The folder on a disk for private folders, once a sandbox needs it.
    private: Mutex<Option<Arc<PrivateDisk>>>,
}

impl Backend for NativeBackend {
    type Live = NativeSandbox;

    fn level(&self) -> Level {
        Level::Native
    }

    fn idle_max(&self) -> Duration {
        self.options.idle_max
    }

    async fn build(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&NativeSandbox>,
    ) -> Result<Arc<NativeSandbox>, SandboxError> {
        let sandbox = self.build_now(confinement, outer).await?;
        let backend = Arc::clone(self);
        tokio::spawn(async move { backend.refill_warm_inits().await });
        Ok(sandbox)
    }

    async fn build_own(self: &Arc<Self>, confinement: &Confinement) -> Result<Arc<NativeSandbox>, SandboxError> {
        let shape = Shape::of(confinement);
        let pop = || lock(&self.warm_sandboxes).get_mut(&shape).and_then(Vec::pop);
        let warm = std::iter::from_fn(pop).find(|warm| warm.is_alive() && warm.is_intact());
        match warm {
            Some(warm) if warm.wake().await.is_ok() => Ok(warm),
            lost => {
                if let Some(lost) = lost {
                    lost.end(false).await;
                }
                self.build_now(confinement, None).await
            }
        }
    }

    fn lingers(&self) -> bool {
        // With processes built ahead, more calls like the last one are expected.
        self.options.warm_inits > 0
    }

    async fn replenish(self: &Arc<Self>, confinement: &Confinement) {
        self.refill_warm_inits().await;
        self.refill_warm_sandboxes(confinement).await;
    }

    async fn tidy(&self, mut sandboxes: Vec<Arc<NativeSandbox>>) {
        let idle_max = self.options.idle_max;
        let mut stale = Vec::new();
        {
            let mut warm = lock(&self.warm_sandboxes);
            for of_shape in warm.values_mut() {
                stale.extend(of_shape.extract_if(.., |sandbox| sandbox.record().is_idle_for(idle_max)));
            }
            warm.retain(|_, of_shape| !of_shape.is_empty());
            sandboxes.extend(warm.values().flatten().cloned());
        }
        lock(&self.warm_inits).retain(|warm_init| warm_init.since() + idle_max >= Instant::now());
        for sandbox in stale {
            sandbox.end(false).await;
        }
        for sandbox in sandboxes {
            if sandbox.record().is_idle_for(REST_AFTER) {
                sandbox.rest().await;
            }
        }
    }
}

impl NativeBackend {
    async fn refill_warm_sandboxes(self: &Arc<Self>, confinement: &Confinement) {
        let shape = Shape::of(confinement);
        let has_room = || {
            let warm_sandboxes = lock(&self.warm_sandboxes);
            let stored = warm_sandboxes.get(&shape).map_or(0, Vec::len);
            stored < self.options.warm_sandboxes
                && (warm_sandboxes.len() < SHAPES_MAX || warm_sandboxes.contains_key(&shape))
        };
        if has_room() {
            let Ok(sandbox) = self.build_now(confinement, None).await else { return };
            sandbox.warm_up(confinement).await;
            self.refill_warm_inits().await;
            if has_room() {
                lock(&self.warm_sandboxes).entry(shape).or_default().push(sandbox);
            } else {
                sandbox.end(false).await;
            }
        }
    }

    async fn build_now(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&NativeSandbox>,
    ) -> Result<Arc<NativeSandbox>, SandboxError> {
        const ATTEMPTS_MAX: u32 = 5;
        for _ in 1..ATTEMPTS_MAX {
            match self.try_to_build(confinement, outer).await {
                // A file of the plan is gone; look again.
                Err(BuildError::Changed(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(BuildError::Outdated) => {}
                built => return Ok(built?),
            }
        }
        Ok(self.try_to_build(confinement, outer).await?)
    }

    async fn try_to_build(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&NativeSandbox>,
    ) -> Result<Arc<NativeSandbox>, BuildError> {
        let private = self.private()?;
        if let Some(disk) = &private {
            disk.check_apart(&plan_cache::workspace(confinement)?).map_err(SandboxError::creation_from)?;
        }
        let (plan, mut unverified) = self.plan_cache.cached_or_new(confinement, &self.own_folders())?;
        let open_network = confinement.network == Network::Open;
        let warm_init = match &confinement.place {
            Place::Own => self.warm_init(open_network, &plan.steps).await?,
            Place::Session(key) => self.nested(key, confinement, &plan.steps).await?,
            Place::Sandbox(id) => match outer {
                None => self.make_warm_init(id.clone(), open_network).await?,
                Some(outer) => {
                    let group = outer.room_for(id).map_err(|error| SandboxError::creation("making a cgroup", error))?;
                    let group = group.ok_or_else(|| SandboxError::missing(outer.record().id()))?;
                    WarmInit::make(reference(id.clone()), open_network, private.as_deref(), || Ok(group)).await?
                }
            },
        };
        // Checking the plan takes long, so it is done while the sandbox is built.
        let mut holds = || self.plan_cache.is_still_right(unverified.take());
        let (planned, hierarchy) = (Planned::new(plan), self.hierarchy());
        let built =
            NativeSandbox::build(warm_init, confinement, planned, &mut holds, &self.id_maps, hierarchy, outer).await;
        match built {
            Err(_) if !holds() => Err(BuildError::Outdated),
            built => built,
        }
    }

    /// Returns the first process of a session's new sandbox, in a cgroup below the session's.
    async fn nested(
        self: &Arc<Self>,
        session: &SessionKey,
        confinement: &Confinement,
        steps: &[Step],
    ) -> Result<WarmInit, SandboxError> {
        let open_network = confinement.network == Network::Open;
        let session_parent = self.session_parents.of(session);
        let mut session_parent = session_parent.lock().await;
        // Without control groups there is no parent.
        let above = session_parent.as_ref().and_then(KnownGroup::get).filter(|above| !above.folders().is_empty());
        if let Some(above) = above {
            let id = next_id(Level::Native);
            let group =
                cgroup_parent::below(&above, &id).map_err(|error| SandboxError::creation("making a cgroup", error))?;
            if let Some(group) = group {
                let private = self.private()?;
                return WarmInit::make(reference(id), open_network, private.as_deref(), || Ok(group)).await;
            }
        }
        let warm_init = self.warm_init(open_network, steps).await?;
        // Before the session has another sandbox.
        warm_init.limit(&confinement.place_limits)?;
        *session_parent = Some(warm_init.group.known());
        Ok(warm_init)
    }

    /// Returns the first process of a new sandbox: a warm one that fits these steps, or a new one.
    async fn warm_init(self: &Arc<Self>, open_network: bool, steps: &[Step]) -> Result<WarmInit, SandboxError> {
        if open_network {
            return self.make_warm_init(next_id(Level::Native), open_network).await;
        }
        let system = plan::of_the_system(steps);
        let mut waiting = lock(&self.warm_inits).pop();
        while waiting.as_ref().is_some_and(|warm_init| !warm_init.suits(&system)) {
            waiting = lock(&self.warm_inits).pop();
        }
        let warm_init = match waiting {
            Some(warm_init) => Ok(warm_init),
            None => self.make_warm_init(next_id(Level::Native), false).await,
        };
        *lock(&self.system) = system;
        warm_init
    }

    /// Makes warm inits until there are as many as configured.
    async fn refill_warm_inits(self: &Arc<Self>) {
        while lock(&self.warm_inits).len() < self.options.warm_inits {
            let system = lock(&self.system).clone();
            if system.is_empty() {
                // The steps of the system are known only after the first sandbox.
                return;
            }
            let Ok(mut warm_init) = self.make_warm_init(next_id(Level::Native), false).await else { return };
            if warm_init.prepare(system).await.is_err() || warm_init.warm_up().await.is_err() {
                return;
            }
            let mut warm_inits = lock(&self.warm_inits);
            if warm_inits.len() < self.options.warm_inits {
                warm_inits.push(warm_init);
            }
        }
    }

    async fn make_warm_init(&self, id: SandboxId, open_network: bool) -> Result<WarmInit, SandboxError> {
        let name = id.0.clone();
        let private = self.private()?;
        WarmInit::make(reference(id), open_network, private.as_deref(), || self.hierarchy().group(&name)).await
    }

    /// Returns the folder on a disk for private folders, if they are not in memory.
    fn private(&self) -> Result<Option<Arc<PrivateDisk>>, SandboxError> {
        let Some(folder) = &self.options.folder else { return Ok(None) };
        let mut private = lock(&self.private);
        if private.is_none() {
            let disk = PrivateDisk::make(folder, Level::Native).map_err(SandboxError::creation_from)?;
            *private = Some(Arc::new(disk));
        }
        Ok(private.clone())
    }

    fn own_folders(&self) -> OwnFolders {
        let NativeOptions { home, state, folder, .. } = &self.options;
        let private = folder.as_deref().map(private_disk::own_path);
        OwnFolders { home: home.clone(), state: state.clone(), private }
    }

    fn hierarchy(&self) -> &Hierarchy {
        self.hierarchy.get_or_init(|| {
            let hierarchy = Hierarchy::find();
            let of_the_dead = hierarchy.clone();
            let _ = std::thread::Builder::new().name("wieldy-sweep".into()).spawn(move || of_the_dead.sweep());
            hierarchy
        })
    }
}

/// Returns the enforcer of each limit at this level.
pub(crate) fn enforcement(hierarchy: &Hierarchy) -> Vec<Enforcement> {
    let kernel_or = |controller, otherwise| if hierarchy.can(controller) { Enforcer::Kernel } else { otherwise };
    let by = [
        (Limit::CpuMillicores, kernel_or(Controller::Cpu, Enforcer::Nobody)),
        (Limit::MemoryBytes, kernel_or(Controller::Memory, Enforcer::Watcher)),
        // Without the controller, the kernel counts the processes of the sandbox's own user.
        (Limit::Processes, kernel_or(Controller::Pids, Enforcer::KernelPerSandbox)),
        (Limit::OpenFiles, Enforcer::KernelPerProcess),
        (Limit::DiskBytes, Enforcer::Watcher),
        (Limit::DiskFiles, Enforcer::Watcher),
        (Limit::OutputBytes, Enforcer::Executor),
    ];
    by.map(|(limit, by)| Enforcement { limit, by }).into()
}

fn reference(id: SandboxId) -> SandboxRef {
    SandboxRef { id, level: Level::Native }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

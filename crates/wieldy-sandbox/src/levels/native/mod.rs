//! The isolation level `native`: namespaces, a planned tree of mounts, Landlock, seccomp, cgroups.
//!
//! [`Native`] keeps the sandboxes: one for each session, made when it is first needed and gone when it has been idle for long; and for
//! calls without a session one each, of which a few are built ahead.

mod cgroup_parent;
mod idmap;
mod janitor;
mod options;
mod rest;
mod sandbox;
mod warm;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Enforcement, Enforcer, Exit, FileRules, Level, Network, OutputSink, Place, Sandbox,
    SandboxChange, SandboxError, SandboxId, SandboxRef, SandboxStatus, SessionKey,
};

pub use self::options::NativeOptions;

use self::cgroup_parent::SessionParents;
use self::idmap::IdMaps;
use self::sandbox::NativeSandbox;
use self::warm::{BuildError, WarmInit, failed};
use crate::cgroup::{Controller, Hierarchy, KnownGroup};
use crate::disk_quota::DiskQuota;
use crate::disk_quota::Ran;
use crate::pool::{Books, Eviction, kept_or_built, no_longer_intact, of_another_shape};
use crate::supervise::run::run_to_end;
use crate::view::placeholders::host_view::Planned;
use crate::view::plan::{self, Plan, Step};
use crate::view::plan_cache::{OwnFolders, PlanCache};

/// Runs commands in sandboxes made of what the kernel offers. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Native {
    shared: Arc<Shared>,
}

struct Shared {
    options: NativeOptions,
    eviction: Eviction,
    hierarchy: OnceLock<Hierarchy>,
    kept: Books<Key, NativeSandbox>,
    session_parents: SessionParents,
    plan_cache: PlanCache,
    disk_quota: DiskQuota,
    /// Those of calls without a session, while they run.
    in_use: Mutex<Vec<Arc<NativeSandbox>>>,
    warm_sandboxes: Mutex<HashMap<Shape, Vec<Arc<NativeSandbox>>>>,
    warm_inits: Mutex<Vec<WarmInit>>,
    /// The steps that the last sandbox began with, and the next one most likely will.
    system: Mutex<Vec<Step>>,
    id_maps: IdMaps,
    listener: OnceLock<Arc<dyn Fn(SandboxChange) + Send + Sync>>,
    has_janitor: OnceLock<()>,
}

/// What makes two sandboxes interchangeable.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Shape {
    workspace: PathBuf,
    network: Network,
    files: Arc<FileRules>,
}

/// Which sandbox is meant: a session has one for each shape that its calls ask for.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    place: Place,
    shape: Shape,
}

/// How many shapes are built ahead.
const SHAPES_MAX: usize = 4;

impl Native {
    /// The level, set up as the options say. Nothing is made before it is needed.
    pub fn new(options: NativeOptions) -> Self {
        let shared = Shared {
            eviction: Eviction::new(options.idle_limits),
            options,
            hierarchy: OnceLock::new(),
            kept: Mutex::default(),
            session_parents: SessionParents::default(),
            plan_cache: PlanCache::default(),
            disk_quota: DiskQuota::default(),
            in_use: Mutex::default(),
            warm_sandboxes: Mutex::default(),
            warm_inits: Mutex::default(),
            system: Mutex::default(),
            id_maps: IdMaps::default(),
            listener: OnceLock::new(),
            has_janitor: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many processes wait ahead at this moment.
    pub fn warm_inits(&self) -> usize {
        lock(&self.shared.warm_inits).len()
    }

    /// How many sandboxes are built ahead at this moment.
    pub fn warm_sandboxes(&self) -> usize {
        lock(&self.shared.warm_sandboxes).values().map(Vec::len).sum()
    }

    /// The control groups that its sandboxes use.
    pub(crate) fn hierarchy(&self) -> &Hierarchy {
        self.shared.hierarchy()
    }

    /// What programs see under a confinement, with nothing done yet.
    pub(crate) fn plan(&self, confinement: &Confinement) -> Result<Plan, SandboxError> {
        self.shared.plan_cache.plan(confinement, &self.shared.own_folders())
    }
}

impl Sandbox for Native {
    fn level(&self) -> Level {
        Level::Native
    }

    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        let (shared, command, confinement) = (Arc::clone(&self.shared), command.clone(), confinement.clone());
        Box::pin(run_to_end(stop, |stop| async move {
            let left = shared.disk_quota.remaining(&confinement);
            let ran = shared.execute(&command, &left, &output, &stop).await?;
            Ok(shared.disk_quota.charge(&confinement, ran))
        }))
    }

    fn create<'a>(&'a self, confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        Box::pin(async move {
            let mut confinement = confinement.clone();
            let within = match &confinement.place {
                Place::Session(_) => {
                    let status = self.shared.kept(&confinement, None).await?.status();
                    self.shared.end_surplus().await;
                    return Ok(status);
                }
                Place::Sandbox(id) => Some(self.shared.known(id)?.1),
                Place::Own => None,
            };
            // Each has a name of its own, also one that is made within another.
            confinement.place = Place::Sandbox(next_id());
            let made = self.shared.kept(&confinement, within.as_deref()).await?;
            if let Some(outer) = within.filter(|outer| self.shared.known(&outer.made().id).is_err()) {
                // It went while this one was made, which should have gone with it.
                self.destroy(&made.made().id).await;
                return Err(SandboxError::missing(&outer.made().id));
            }
            Ok(made.status())
        })
    }

    fn list(&self) -> Vec<SandboxStatus> {
        let kept = lock(&self.shared.kept);
        kept.values().filter_map(|cell| cell.get()).map(|sandbox| sandbox.status()).collect()
    }

    fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let forgotten = self.shared.forget(|_, sandbox| sandbox.made().id == *id);
            let was_there = !forgotten.is_empty();
            for sandbox in forgotten {
                self.shared.end(sandbox).await;
            }
            was_there
        })
    }

    fn listen(&self, listener: Arc<dyn Fn(SandboxChange) + Send + Sync>) {
        let _ = self.shared.listener.set(listener);
    }
}

impl Shared {
    async fn execute(
        self: &Arc<Self>,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> Result<Ran, SandboxError> {
        if confinement.place == Place::Own {
            let sandbox = self.own(confinement).await?;
            let in_use = InUse::new(&self.in_use, &sandbox);
            let ran = sandbox.run(command, confinement, output, stop).await;
            drop(in_use);
            // No process is left; the rest need not be waited for.
            self.clear_away(sandbox, confinement);
            return ran;
        }
        let sandbox = match &confinement.place {
            Place::Sandbox(id) => self.named(id, confinement)?,
            Place::Own | Place::Session(_) => self.kept(confinement, None).await?,
        };
        let ran = sandbox.run(command, confinement, output, stop).await;
        if ran.as_ref().is_err_and(SandboxError::is_crash) {
            // Whatever has happened to it, the next call gets a new one.
            for lost in self.forget(|_, other| other.made() == sandbox.made()) {
                self.end(lost).await;
            }
        }
        drop(sandbox);
        self.end_surplus().await;
        ran
    }

    /// A sandbox for one call: one that was built ahead, or a new one.
    async fn own(self: &Arc<Self>, confinement: &Confinement) -> Result<Arc<NativeSandbox>, SandboxError> {
        let shape = Shape::of(confinement);
        let pop = || lock(&self.warm_sandboxes).get_mut(&shape).and_then(Vec::pop);
        let warm = std::iter::from_fn(pop).find(|warm| warm.is_alive() && warm.is_intact());
        let sandbox = match warm {
            Some(warm) if warm.wake().await.is_ok() => warm,
            lost => {
                if let Some(lost) = lost {
                    lost.end(false).await;
                }
                self.build(confinement, None).await?
            }
        };
        self.employ_janitor();
        self.tell(SandboxChange::Created(sandbox.made().clone()));
        Ok(sandbox)
    }

    /// Ends a sandbox that was used once, and builds ahead what was taken for it, in the background.
    fn clear_away(self: &Arc<Self>, sandbox: Arc<NativeSandbox>, confinement: &Confinement) {
        let (shared, confinement) = (Arc::clone(self), confinement.clone());
        tokio::spawn(async move {
            // Whoever builds ahead expects more calls like this one.
            shared.end_with(sandbox, shared.options.warm_inits > 0).await;
            shared.refill_warm_inits().await;
            shared.refill_warm_sandboxes(&confinement).await;
        });
    }

    async fn refill_warm_sandboxes(self: &Arc<Self>, confinement: &Confinement) {
        let shape = Shape::of(confinement);
        let has_room = || {
            let warm_sandboxes = lock(&self.warm_sandboxes);
            let stored = warm_sandboxes.get(&shape).map_or(0, Vec::len);
            stored < self.options.warm_sandboxes
                && (warm_sandboxes.len() < SHAPES_MAX || warm_sandboxes.contains_key(&shape))
        };
        if has_room() {
            self.employ_janitor();
            let Ok(sandbox) = self.build(confinement, None).await else { return };
            sandbox.warm_up(confinement).await;
            self.refill_warm_inits().await;
            if has_room() {
                lock(&self.warm_sandboxes).entry(shape).or_default().push(sandbox);
            } else {
                sandbox.end(false).await;
            }
        }
    }

    /// The sandbox of this id, and for whom it was made.
    fn known(&self, id: &SandboxId) -> Result<(Key, Arc<NativeSandbox>), SandboxError> {
        let kept = lock(&self.kept);
        let mut all = kept.iter().filter_map(|(key, cell)| Some((key, cell.get()?)));
        // It is used from now on, so that nobody ends it meanwhile for being idle.
        let found = all.find(|(_, one)| one.made().id == *id).inspect(|(_, one)| one.touch());
        found.map(|(key, one)| (key.clone(), Arc::clone(one))).ok_or_else(|| SandboxError::missing(id))
    }

    /// The sandbox of this id, if it can run what is asked for.
    fn named(&self, id: &SandboxId, confinement: &Confinement) -> Result<Arc<NativeSandbox>, SandboxError> {
        let (key, known) = self.known(id)?;
        // What a call asks for is never less than what it gets.
        if key.shape != Shape::of(confinement) {
            return Err(of_another_shape(id));
        }
        if known.is_intact() { Ok(known) } else { Err(no_longer_intact(id)) }
    }

    /// The sandbox of a session, made if there is none, or a new one with a name, perhaps within another.
    async fn kept(
        self: &Arc<Self>,
        confinement: &Confinement,
        within: Option<&NativeSandbox>,
    ) -> Result<Arc<NativeSandbox>, SandboxError> {
        let key = Key { place: confinement.place.clone(), shape: Shape::of(confinement) };
        // Only this one is looked at: a look costs a system call. It is used from now on, so that nobody ends it meanwhile for being idle.
        let known = lock(&self.kept).get(&key).and_then(|cell| cell.get().cloned()).inspect(|known| known.touch());
        if let Some(known) = known
            && (!known.is_alive() || !known.is_intact() || known.wake().await.is_err())
        {
            self.give_up(known).await;
        }
        let made = kept_or_built(&self.kept, key, async {
            let sandbox = self.build(confinement, within).await?;
            self.tell(SandboxChange::Created(sandbox.made().clone()));
            let shared = Arc::clone(self);
            tokio::spawn(async move { shared.refill_warm_inits().await });
            Ok(sandbox)
        });
        let made = made.await?;
        self.employ_janitor();
        Ok(made)
    }

    async fn build(
        self: &Arc<Self>,
        confinement: &Confinement,
        within: Option<&NativeSandbox>,
    ) -> Result<Arc<NativeSandbox>, SandboxError> {
        const ATTEMPTS_MAX: u32 = 5;
        for _ in 1..ATTEMPTS_MAX {
            match self.try_to_build(confinement, within).await {
                // What was planned for is gone; look again.
                Err(BuildError::Changed(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(BuildError::Outdated) => {}
                built => return Ok(built?),
            }
        }
        Ok(self.try_to_build(confinement, within).await?)
    }

    async fn try_to_build(
        self: &Arc<Self>,
        confinement: &Confinement,
        within: Option<&NativeSandbox>,
    ) -> Result<Arc<NativeSandbox>, BuildError> {
        let (plan, mut unverified) = self.plan_cache.cached_or_new(confinement, &self.own_folders())?;
        let open_network = confinement.network == Network::Open;
        let warm_init = match &confinement.place {
            Place::Own => self.warm_init(open_network, &plan.steps).await?,
            Place::Session(key) => self.nested(key, confinement, &plan.steps).await?,
            Place::Sandbox(id) => match within {
                None => self.make_warm_init(id.clone(), open_network).await?,
                Some(outer) => {
                    let group = outer.room_for(id).map_err(|error| failed("making a cgroup", &error))?;
                    let group = group.ok_or_else(|| SandboxError::missing(&outer.made().id))?;
                    WarmInit::make(reference(id.clone()), open_network, || Ok(group)).await?
                }
            },
        };
        // To look at everything again takes long, so that is done while it is built.
        let mut holds = || self.plan_cache.is_still_right(unverified.take());
        let (planned, hierarchy) = (Planned::new(plan), self.hierarchy());
        let built = NativeSandbox::build(warm_init, confinement, planned, &mut holds, &self.id_maps, hierarchy).await;
        match built {
            Err(_) if !holds() => Err(BuildError::Outdated),
            built => built.inspect(|built| built.is_within(within)),
        }
    }

    /// The first process of a session's new sandbox, whose limits are those of all that it has.
    async fn nested(
        self: &Arc<Self>,
        session: &SessionKey,
        confinement: &Confinement,
        steps: &[Step],
    ) -> Result<WarmInit, SandboxError> {
        let open_network = confinement.network == Network::Open;
        let session_parent = self.session_parents.of(session);
        let mut session_parent = session_parent.lock().await;
        // Where there are no groups, there is nothing to be below of.
        let above = session_parent.as_ref().and_then(KnownGroup::get).filter(|above| !above.folders().is_empty());
        if let Some(above) = above {
            let id = next_id();
            let group = cgroup_parent::below(&above, &id).map_err(|error| failed("making a cgroup", &error))?;
            if let Some(group) = group {
                return WarmInit::make(reference(id), open_network, || Ok(group)).await;
            }
        }
        let warm_init = self.warm_init(open_network, steps).await?;
        // Before anybody else is in it.
        warm_init.limit(&confinement.place_limits)?;
        *session_parent = Some(warm_init.group.known());
        Ok(warm_init)
    }

    /// The first process of a new sandbox: one that waits already and suits, or a new one.
    async fn warm_init(self: &Arc<Self>, open_network: bool, steps: &[Step]) -> Result<WarmInit, SandboxError> {
        if open_network {
            return self.make_warm_init(next_id(), open_network).await;
        }
        let system = plan::of_the_system(steps);
        let mut waiting = lock(&self.warm_inits).pop();
        while waiting.as_ref().is_some_and(|warm_init| !warm_init.suits(&system)) {
            waiting = lock(&self.warm_inits).pop();
        }
        let warm_init = match waiting {
            Some(warm_init) => Ok(warm_init),
            None => self.make_warm_init(next_id(), false).await,
        };
        *lock(&self.system) = system;
        warm_init
    }

    /// Makes what was taken, in the background.
    async fn refill_warm_inits(self: &Arc<Self>) {
        self.employ_janitor();
        while lock(&self.warm_inits).len() < self.options.warm_inits {
            let system = lock(&self.system).clone();
            if system.is_empty() {
                // So far nobody could use one.
                return;
            }
            let Ok(mut warm_init) = self.make_warm_init(next_id(), false).await else { return };
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
        WarmInit::make(reference(id), open_network, || self.hierarchy().group(&name)).await
    }

    fn own_folders(&self) -> OwnFolders {
        OwnFolders { home: self.options.home.clone(), state: self.options.state.clone() }
    }

    fn hierarchy(&self) -> &Hierarchy {
        self.hierarchy.get_or_init(|| {
            let hierarchy = Hierarchy::find();
            let of_the_dead = hierarchy.clone();
            let _ = std::thread::Builder::new().name("wieldy-sweep".into()).spawn(move || of_the_dead.sweep());
            hierarchy
        })
    }

    async fn end(&self, sandbox: Arc<NativeSandbox>) {
        self.end_with(sandbox, false).await;
    }

    async fn end_with(&self, sandbox: Arc<NativeSandbox>, linger: bool) {
        let made = sandbox.made().clone();
        sandbox.end(linger).await;
        self.tell(SandboxChange::Destroyed(made));
    }

    fn tell(&self, change: SandboxChange) {
        if let Some(listener) = self.listener.get() {
            listener(change);
        }
    }
}

/// Keeps a sandbox in the list of those in use as long as it lives.
struct InUse<'a> {
    list: &'a Mutex<Vec<Arc<NativeSandbox>>>,
    sandbox: &'a Arc<NativeSandbox>,
}

impl<'a> InUse<'a> {
    fn new(list: &'a Mutex<Vec<Arc<NativeSandbox>>>, sandbox: &'a Arc<NativeSandbox>) -> Self {
        lock(list).push(Arc::clone(sandbox));
        Self { list, sandbox }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let mut list = lock(self.list);
        if let Some(at) = list.iter().position(|one| Arc::ptr_eq(one, self.sandbox)) {
            list.swap_remove(at);
        }
    }
}

impl Shape {
    fn of(confinement: &Confinement) -> Self {
        let Confinement { workspace, network, files, .. } = confinement;
        Self { workspace: workspace.clone(), network: network.clone(), files: Arc::clone(files) }
    }
}

/// What sees to each limit here.
pub(crate) fn enforcement(hierarchy: &Hierarchy) -> Vec<Enforcement> {
    let kernel_or = |controller, otherwise| if hierarchy.can(controller) { Enforcer::Kernel } else { otherwise };
    let by = [
        ("cpu_millicores", kernel_or(Controller::Cpu, Enforcer::Nobody)),
        ("memory_bytes", kernel_or(Controller::Memory, Enforcer::Watcher)),
        // Without the controller, the kernel counts the processes of the sandbox's own user.
        ("processes", kernel_or(Controller::Pids, Enforcer::KernelPerSandbox)),
        ("open_files", Enforcer::KernelPerProcess),
        ("disk_bytes", Enforcer::Watcher),
        ("disk_files", Enforcer::Watcher),
        ("output_bytes", Enforcer::Executor),
    ];
    by.map(|(limit, by)| Enforcement { limit, by }).into()
}

fn reference(id: SandboxId) -> SandboxRef {
    SandboxRef { id, level: Level::Native }
}

/// A name of its own for each sandbox, also among several executors on one machine.
fn next_id() -> SandboxId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SandboxId(format!("native-{}-{number}", std::process::id()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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

use self::cgroup_parent::Nests;
use self::idmap::Owners;
use self::sandbox::Standing;
use self::warm::{Blank, NotBuilt, failed};
use crate::cgroup::{Controller, Hierarchy, KnownGroup};
use crate::disk_quota::Ledger;
use crate::disk_quota::Ran;
use crate::pool::{Books, Eviction, kept_or_built, no_longer_intact, of_another_shape};
use crate::supervise::run::see_through;
use crate::view::placeholders::host_view::Planned;
use crate::view::plan::{self, Plan, Step};
use crate::view::plan_cache::{OwnFolders, Plans};

/// Runs commands in sandboxes made of what the kernel offers. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Native {
    shared: Arc<Shared>,
}

struct Shared {
    options: NativeOptions,
    eviction: Eviction,
    hierarchy: OnceLock<Hierarchy>,
    kept: Books<Key, Standing>,
    nests: Nests,
    plans: Plans,
    ledger: Ledger,
    /// Those of calls without a session, while they run.
    in_use: Mutex<Vec<Arc<Standing>>>,
    spares: Mutex<HashMap<Shape, Vec<Arc<Standing>>>>,
    blanks: Mutex<Vec<Blank>>,
    /// The steps that the last sandbox began with, and the next one most likely will.
    system: Mutex<Vec<Step>>,
    owners: Owners,
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
            nests: Nests::default(),
            plans: Plans::default(),
            ledger: Ledger::default(),
            in_use: Mutex::default(),
            spares: Mutex::default(),
            blanks: Mutex::default(),
            system: Mutex::default(),
            owners: Owners::default(),
            listener: OnceLock::new(),
            has_janitor: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many processes wait ahead at this moment.
    pub fn blanks(&self) -> usize {
        lock(&self.shared.blanks).len()
    }

    /// How many sandboxes are built ahead at this moment.
    pub fn spares(&self) -> usize {
        lock(&self.shared.spares).values().map(Vec::len).sum()
    }

    /// The control groups that its sandboxes use.
    pub(crate) fn hierarchy(&self) -> &Hierarchy {
        self.shared.hierarchy()
    }

    /// What programs see under a confinement, with nothing done yet.
    pub(crate) fn draw(&self, confinement: &Confinement) -> Result<Plan, SandboxError> {
        self.shared.plans.draw(confinement, &self.shared.own_folders())
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
        Box::pin(see_through(stop, |stop| async move {
            let left = shared.ledger.rest(&confinement);
            let ran = shared.execute(&command, &left, &output, &stop).await?;
            Ok(shared.ledger.enter(&confinement, ran))
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
        kept.values().filter_map(|cell| cell.get()).map(|standing| standing.status()).collect()
    }

    fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let forgotten = self.shared.forget(|_, standing| standing.made().id == *id);
            let was_there = !forgotten.is_empty();
            for standing in forgotten {
                self.shared.end(standing).await;
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
            let standing = self.own(confinement).await?;
            let in_use = InUse::new(&self.in_use, &standing);
            let ran = standing.run(command, confinement, output, stop).await;
            drop(in_use);
            // No process is left; the rest need not be waited for.
            self.clear_away(standing, confinement);
            return ran;
        }
        let standing = match &confinement.place {
            Place::Sandbox(id) => self.named(id, confinement)?,
            Place::Own | Place::Session(_) => self.kept(confinement, None).await?,
        };
        let ran = standing.run(command, confinement, output, stop).await;
        if ran.as_ref().is_err_and(SandboxError::is_crash) {
            // Whatever has happened to it, the next call gets a new one.
            for lost in self.forget(|_, other| other.made() == standing.made()) {
                self.end(lost).await;
            }
        }
        drop(standing);
        self.end_surplus().await;
        ran
    }

    /// A sandbox for one call: one that was built ahead, or a new one.
    async fn own(self: &Arc<Self>, confinement: &Confinement) -> Result<Arc<Standing>, SandboxError> {
        let shape = Shape::of(confinement);
        let pop = || lock(&self.spares).get_mut(&shape).and_then(Vec::pop);
        let spare = std::iter::from_fn(pop).find(|spare| spare.is_alive() && spare.is_intact());
        let standing = match spare {
            Some(spare) if spare.wake().await.is_ok() => spare,
            lost => {
                if let Some(lost) = lost {
                    lost.end(false).await;
                }
                self.build(confinement, None).await?
            }
        };
        self.employ_janitor();
        self.tell(SandboxChange::Created(standing.made().clone()));
        Ok(standing)
    }

    /// Ends a sandbox that was used once, and builds ahead what was taken for it, in the background.
    fn clear_away(self: &Arc<Self>, standing: Arc<Standing>, confinement: &Confinement) {
        let (shared, confinement) = (Arc::clone(self), confinement.clone());
        tokio::spawn(async move {
            // Whoever builds ahead expects more calls like this one.
            shared.end_with(standing, shared.options.blanks > 0).await;
            shared.refill_blanks().await;
            shared.refill_spares(&confinement).await;
        });
    }

    async fn refill_spares(self: &Arc<Self>, confinement: &Confinement) {
        let shape = Shape::of(confinement);
        let has_room = || {
            let spares = lock(&self.spares);
            let stored = spares.get(&shape).map_or(0, Vec::len);
            stored < self.options.spares && (spares.len() < SHAPES_MAX || spares.contains_key(&shape))
        };
        if has_room() {
            self.employ_janitor();
            let Ok(standing) = self.build(confinement, None).await else { return };
            standing.warm_up(confinement).await;
            self.refill_blanks().await;
            if has_room() {
                lock(&self.spares).entry(shape).or_default().push(standing);
            } else {
                standing.end(false).await;
            }
        }
    }

    /// The sandbox of this id, and for whom it was made.
    fn known(&self, id: &SandboxId) -> Result<(Key, Arc<Standing>), SandboxError> {
        let kept = lock(&self.kept);
        let mut all = kept.iter().filter_map(|(key, cell)| Some((key, cell.get()?)));
        // It is used from now on, so that nobody ends it meanwhile for being idle.
        let found = all.find(|(_, one)| one.made().id == *id).inspect(|(_, one)| one.touch());
        found.map(|(key, one)| (key.clone(), Arc::clone(one))).ok_or_else(|| SandboxError::missing(id))
    }

    /// The sandbox of this id, if it can run what is asked for.
    fn named(&self, id: &SandboxId, confinement: &Confinement) -> Result<Arc<Standing>, SandboxError> {
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
        within: Option<&Standing>,
    ) -> Result<Arc<Standing>, SandboxError> {
        let key = Key { place: confinement.place.clone(), shape: Shape::of(confinement) };
        // Only this one is looked at: a look costs a system call. It is used from now on, so that nobody ends it meanwhile for being idle.
        let known = lock(&self.kept).get(&key).and_then(|cell| cell.get().cloned()).inspect(|known| known.touch());
        if let Some(known) = known
            && (!known.is_alive() || !known.is_intact() || known.wake().await.is_err())
        {
            self.give_up(known).await;
        }
        let made = kept_or_built(&self.kept, key, async {
            let standing = self.build(confinement, within).await?;
            self.tell(SandboxChange::Created(standing.made().clone()));
            let shared = Arc::clone(self);
            tokio::spawn(async move { shared.refill_blanks().await });
            Ok(standing)
        });
        let made = made.await?;
        self.employ_janitor();
        Ok(made)
    }

    async fn build(
        self: &Arc<Self>,
        confinement: &Confinement,
        within: Option<&Standing>,
    ) -> Result<Arc<Standing>, SandboxError> {
        const ATTEMPTS_MAX: u32 = 5;
        for _ in 1..ATTEMPTS_MAX {
            match self.try_to_build(confinement, within).await {
                // What was planned for is gone; look again.
                Err(NotBuilt::Changed(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(NotBuilt::Outdated) => {}
                built => return Ok(built?),
            }
        }
        Ok(self.try_to_build(confinement, within).await?)
    }

    async fn try_to_build(
        self: &Arc<Self>,
        confinement: &Confinement,
        within: Option<&Standing>,
    ) -> Result<Arc<Standing>, NotBuilt> {
        let (plan, mut recalled) = self.plans.recall(confinement, &self.own_folders())?;
        let open_network = confinement.network == Network::Open;
        let blank = match &confinement.place {
            Place::Own => self.blank(open_network, &plan.steps).await?,
            Place::Session(key) => self.nested(key, confinement, &plan.steps).await?,
            Place::Sandbox(id) => match within {
                None => self.make_blank(id.clone(), open_network).await?,
                Some(outer) => {
                    let group = outer.room_for(id).map_err(|error| failed("making a cgroup", &error))?;
                    let group = group.ok_or_else(|| SandboxError::missing(&outer.made().id))?;
                    Blank::make(reference(id.clone()), open_network, || Ok(group)).await?
                }
            },
        };
        // To look at everything again takes long, so that is done while it is built.
        let mut holds = || self.plans.still_hold(recalled.take());
        let (planned, hierarchy) = (Planned::new(plan), self.hierarchy());
        let built = Standing::build(blank, confinement, planned, &mut holds, &self.owners, hierarchy).await;
        match built {
            Err(_) if !holds() => Err(NotBuilt::Outdated),
            built => built.inspect(|built| built.is_within(within)),
        }
    }

    /// The first process of a session's new sandbox, whose limits are those of all that it has.
    async fn nested(
        self: &Arc<Self>,
        session: &SessionKey,
        confinement: &Confinement,
        steps: &[Step],
    ) -> Result<Blank, SandboxError> {
        let open_network = confinement.network == Network::Open;
        let nest = self.nests.of(session);
        let mut nest = nest.lock().await;
        // Where there are no groups, there is nothing to be below of.
        let above = nest.as_ref().and_then(KnownGroup::get).filter(|above| !above.folders().is_empty());
        if let Some(above) = above {
            let id = next_id();
            let group = cgroup_parent::below(&above, &id).map_err(|error| failed("making a cgroup", &error))?;
            if let Some(group) = group {
                return Blank::make(reference(id), open_network, || Ok(group)).await;
            }
        }
        let blank = self.blank(open_network, steps).await?;
        // Before anybody else is in it.
        blank.limit(&confinement.place_limits)?;
        *nest = Some(blank.group.known());
        Ok(blank)
    }

    /// The first process of a new sandbox: one that waits already and suits, or a new one.
    async fn blank(self: &Arc<Self>, open_network: bool, steps: &[Step]) -> Result<Blank, SandboxError> {
        if open_network {
            return self.make_blank(next_id(), open_network).await;
        }
        let system = plan::of_the_system(steps);
        let mut waiting = lock(&self.blanks).pop();
        while waiting.as_ref().is_some_and(|blank| !blank.suits(&system)) {
            waiting = lock(&self.blanks).pop();
        }
        let blank = match waiting {
            Some(blank) => Ok(blank),
            None => self.make_blank(next_id(), false).await,
        };
        *lock(&self.system) = system;
        blank
    }

    /// Makes what was taken, in the background.
    async fn refill_blanks(self: &Arc<Self>) {
        self.employ_janitor();
        while lock(&self.blanks).len() < self.options.blanks {
            let system = lock(&self.system).clone();
            if system.is_empty() {
                // So far nobody could use one.
                return;
            }
            let Ok(mut blank) = self.make_blank(next_id(), false).await else { return };
            if blank.prepare(system).await.is_err() || blank.warm_up().await.is_err() {
                return;
            }
            let mut blanks = lock(&self.blanks);
            if blanks.len() < self.options.blanks {
                blanks.push(blank);
            }
        }
    }

    async fn make_blank(&self, id: SandboxId, open_network: bool) -> Result<Blank, SandboxError> {
        let name = id.0.clone();
        Blank::make(reference(id), open_network, || self.hierarchy().group(&name)).await
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

    async fn end(&self, standing: Arc<Standing>) {
        self.end_with(standing, false).await;
    }

    async fn end_with(&self, standing: Arc<Standing>, linger: bool) {
        let made = standing.made().clone();
        standing.end(linger).await;
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
    list: &'a Mutex<Vec<Arc<Standing>>>,
    standing: &'a Arc<Standing>,
}

impl<'a> InUse<'a> {
    fn new(list: &'a Mutex<Vec<Arc<Standing>>>, standing: &'a Arc<Standing>) -> Self {
        lock(list).push(Arc::clone(standing));
        Self { list, standing }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let mut list = lock(self.list);
        if let Some(at) = list.iter().position(|one| Arc::ptr_eq(one, self.standing)) {
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

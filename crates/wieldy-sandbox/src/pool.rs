//! The pool of a level: its sandboxes, each built once by the first call that needs it and kept for the calls of its
//! session.
//!
//! [`Pool`] is the same for every level; a [`Backend`] builds sandboxes, and a [`Live`] one runs commands. A call gets
//! a sandbox as a [`Lease`], made while the pool is locked: as long as one exists the sandbox is in use, and neither
//! the janitor nor the eviction takes it.

mod announcement;
mod eviction;
mod janitor;
mod live;

use std::collections::HashMap;
use std::hash::Hash;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use futures_util::future::BoxFuture;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Ended, Exit, FileRules, Level, Network, OutputSink, Place, SandboxError, SandboxId,
    SandboxStatus,
};

use self::announcement::Listener;
use self::eviction::Eviction;
pub use self::eviction::IdleLimits;
pub(crate) use self::live::{Backend, Lease, Live, Record};
use crate::disk_quota::{DiskQuota, Ran};
use crate::supervise::run::run_to_end;

/// Everything that makes two sandboxes interchangeable.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    workspace: PathBuf,
    network: Network,
    files: Arc<FileRules>,
}

impl Shape {
    pub(crate) fn of(confinement: &Confinement) -> Self {
        let Confinement { workspace, network, files, .. } = confinement;
        Self { workspace: workspace.clone(), network: network.clone(), files: Arc::clone(files) }
    }
}

/// The sandbox that a call means: a session has one for each shape that its calls ask for.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    place: Place,
    shape: Shape,
}

/// The sandboxes of a level.
pub(crate) struct Pool<B: Backend> {
    entries: Entries<Key, B::Live>,
    /// The sandboxes of single calls, while these run.
    own: Mutex<Vec<Arc<B::Live>>>,
    eviction: Eviction,
    disk_quota: DiskQuota,
    listener: OnceLock<Listener>,
    has_janitor: OnceLock<()>,
    // After the sandboxes, whose files are in its folder.
    backend: Arc<B>,
}

impl<B: Backend> Pool<B> {
    pub(crate) fn new(backend: B, idle_limits: IdleLimits) -> Arc<Self> {
        Arc::new(Self {
            entries: Mutex::default(),
            own: Mutex::default(),
            eviction: Eviction::new(idle_limits),
            disk_quota: DiskQuota::default(),
            listener: OnceLock::new(),
            has_janitor: OnceLock::new(),
            backend: Arc::new(backend),
        })
    }

    pub(crate) fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// Runs a command to its end, in the sandbox that its confinement asks for.
    pub(crate) fn execute(
        self: &Arc<Self>,
        command: &Command,
        confinement: &Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'static, Result<Exit, SandboxError>> {
        let (pool, command, confinement) = (Arc::clone(self), command.clone(), confinement.clone());
        Box::pin(run_to_end(stop, |stop| async move {
            let call = Call { command: &command, confinement: &confinement, output: &output, stop: &stop };
            let ran = match confinement.place {
                Place::Own => pool.run_once(&call).await,
                Place::Session(_) | Place::Sandbox(_) => pool.run_kept(&call).await,
            };
            Ok(pool.disk_quota.charge(&confinement, ran?))
        }))
    }

    /// Makes the sandbox of a session, or one with a name of its own, perhaps within another.
    pub(crate) fn create<'a>(
        self: &'a Arc<Self>,
        confinement: &'a Confinement,
    ) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        Box::pin(async move {
            let mut confinement = confinement.clone();
            let outer = match (&confinement.place, B::WITHIN_REFUSED) {
                (Place::Session(_), _) => {
                    let status = self.kept(&confinement, None).await?.record().status();
                    self.end_surplus().await;
                    return Ok(status);
                }
                (Place::Sandbox(_), Some(reason)) => return Err(SandboxError::creation_because(reason)),
                (Place::Sandbox(id), None) => Some(self.find(id)?.1),
                (Place::Own, _) => None,
            };
            confinement.place = Place::Sandbox(next_id(self.backend.level()));
            let made = self.kept(&confinement, outer.as_ref().map(|outer| &***outer)).await?;
            if let Some(outer) = outer.filter(|outer| self.find(outer.record().id()).is_err()) {
                // It was destroyed while this one was made, which should have ended with it.
                self.destroy(made.record().id()).await;
                return Err(SandboxError::missing(outer.record().id()));
            }
            Ok(made.record().status())
        })
    }

    pub(crate) fn list(&self) -> Vec<SandboxStatus> {
        lock(&self.entries).values().filter_map(|cell| cell.get()).map(|live| live.record().status()).collect()
    }

    /// Ends the sandbox of this id with those that were made within it, and returns true if there was one.
    pub(crate) fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let taken = self.take(|live, _| live.record().id() == id);
            let was_there = !taken.is_empty();
            for live in taken {
                end(live, false).await;
            }
            was_there
        })
    }

    pub(crate) fn listen(&self, listener: Listener) {
        let _ = self.listener.set(listener);
    }

    /// Runs a call in a sandbox of its own, which is ended in the background.
    async fn run_once(self: &Arc<Self>, call: &Call<'_>) -> Result<Ran, SandboxError> {
        let live = unless_stopped::<B, _>(call.stop, self.backend.build_own(call.confinement)).await?;
        self.employ_janitor();
        live.record().announce(self.listener.get());
        let listed = Listed::new(&self.own, &live);
        let ran = self.run_in(&live, call).await;
        drop(listed);
        let (pool, confinement) = (Arc::clone(self), call.confinement.clone());
        // No process is left; the rest need not be waited for.
        tokio::spawn(async move {
            end(live, pool.backend.lingers()).await;
            pool.backend.replenish(&confinement).await;
        });
        ran
    }

    /// Runs a call in the sandbox of its session, or in the one that it names.
    async fn run_kept(self: &Arc<Self>, call: &Call<'_>) -> Result<Ran, SandboxError> {
        let lease = match &call.confinement.place {
            Place::Sandbox(id) => self.named(id, call.confinement)?,
            Place::Own | Place::Session(_) => {
                unless_stopped::<B, _>(call.stop, self.kept(call.confinement, None)).await?
            }
        };
        let mut ran = self.run_in(&lease, call).await;
        let is_gone = !lease.is_alive();
        if is_gone {
            ran = ran.map_err(|error| match error {
                SandboxError::Creation { reason, source } => SandboxError::Crashed { reason, source },
                error => error,
            });
        }
        if is_gone || ran.as_ref().is_err_and(SandboxError::is_crash) {
            // The next call gets a new sandbox, whichever way this one was lost.
            for lost in self.take(|live, _| live.record().made() == lease.record().made()) {
                end(lost, false).await;
            }
        }
        drop(lease);
        self.end_surplus().await;
        ran
    }

    async fn run_in(&self, live: &Arc<B::Live>, call: &Call<'_>) -> Result<Ran, SandboxError> {
        let rest = self.disk_quota.remaining(call.confinement);
        let running = live.record().begin_run();
        let ran = live.run(call.command, &rest, call.output, call.stop).await;
        drop(running);
        match live.record().ended_because.get() {
            Some(reason) if !ran.as_ref().is_ok_and(|ran| ran.exit.ended == Ended::Code(0)) => {
                Err(SandboxError::crashed_because(reason))
            }
            _ => ran,
        }
    }

    /// Returns the sandbox of this id, and the shape that it was made for.
    fn find(&self, id: &SandboxId) -> Result<(Shape, Lease<B::Live>), SandboxError> {
        let entries = lock(&self.entries);
        let mut all = entries.iter().filter_map(|(key, cell)| Some((key, cell.get()?)));
        let found = all.find(|(_, live)| live.record().id() == id);
        found
            .map(|(key, live)| (key.shape.clone(), Lease::new(Arc::clone(live))))
            .ok_or_else(|| SandboxError::missing(id))
    }

    /// Returns the sandbox of this id, if it can run what is asked for.
    fn named(&self, id: &SandboxId, confinement: &Confinement) -> Result<Lease<B::Live>, SandboxError> {
        let (shape, lease) = self.find(id)?;
        // What a call asks for is never less than what it gets.
        if shape != Shape::of(confinement) {
            return Err(of_another_shape(id));
        }
        if lease.is_intact() { Ok(lease) } else { Err(no_longer_intact(id)) }
    }

    /// Returns the sandbox of a session, built if there is none, or a new one with a name, perhaps within another.
    async fn kept(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&B::Live>,
    ) -> Result<Lease<B::Live>, SandboxError> {
        let key = Key { place: confinement.place.clone(), shape: Shape::of(confinement) };
        let known = lock(&self.entries).get(&key).and_then(|cell| cell.get().cloned().map(Lease::new));
        if let Some(known) = known {
            if known.is_alive() && known.is_intact() && known.wake().await.is_ok() {
                return Ok(known);
            }
            self.give_up(&known).await;
        }
        let build = async {
            let live = self.backend.build(confinement, outer).await?;
            live.record().touch();
            live.record().announce(self.listener.get());
            Ok(live)
        };
        let lease = kept_or_built(&self.entries, key, build, Lease::new).await?;
        self.employ_janitor();
        Ok(lease)
    }

    /// Takes sandboxes out of the pool, with those that were made within them, which come first. `which` is also told
    /// if a call is about to use the sandbox.
    fn take(&self, which: impl Fn(&B::Live, bool) -> bool) -> Vec<Arc<B::Live>> {
        let mut entries = lock(&self.entries);
        let mut extract = |which: &dyn Fn(&B::Live, bool) -> bool| {
            let taken =
                entries.extract_if(|_, cell| cell.get().is_some_and(|live| which(live, Arc::strong_count(cell) > 1)));
            taken.filter_map(|(_, cell)| cell.get().cloned()).collect::<Vec<_>>()
        };
        let mut taken = Vec::new();
        let mut found = extract(&which);
        while !found.is_empty() {
            let outer: Vec<_> = found.iter().map(|outer| outer.record().id().clone()).collect();
            taken.append(&mut found);
            found = extract(&|live, _| live.record().outer.as_ref().is_some_and(|of| outer.contains(of)));
        }
        taken.reverse();
        taken
    }

    /// Ends idle sandboxes of sessions of which there are too many.
    async fn end_surplus(self: &Arc<Self>) {
        self.eviction.end_surplus(&self.entries, |key| &key.place, |surplus| end(surplus, false)).await;
    }

    fn all(&self) -> Vec<Arc<B::Live>> {
        lock(&self.entries).values().filter_map(|cell| cell.get().cloned()).collect()
    }
}

/// Ends a sandbox, and announces that it is gone.
async fn end<L: Live>(live: Arc<L>, linger: bool) {
    Arc::clone(&live).end(linger).await;
    live.record().announce_end();
}

/// A call on its way through the pool.
struct Call<'a> {
    command: &'a Command,
    confinement: &'a Confinement,
    output: &'a Arc<dyn OutputSink>,
    stop: &'a CancellationToken,
}

/// Keeps a sandbox in a list until this is dropped.
struct Listed<'a, L> {
    list: &'a Mutex<Vec<Arc<L>>>,
    live: &'a Arc<L>,
}

impl<'a, L> Listed<'a, L> {
    fn new(list: &'a Mutex<Vec<Arc<L>>>, live: &'a Arc<L>) -> Self {
        lock(list).push(Arc::clone(live));
        Self { list, live }
    }
}

impl<L> Drop for Listed<'_, L> {
    fn drop(&mut self) {
        let mut list = lock(self.list);
        if let Some(at) = list.iter().position(|one| Arc::ptr_eq(one, self.live)) {
            list.swap_remove(at);
        }
    }
}

/// Waits for a sandbox; where the level allows it, no longer than the call itself would.
async fn unless_stopped<B: Backend, T>(
    stop: &CancellationToken,
    sandbox: impl Future<Output = Result<T, SandboxError>>,
) -> Result<T, SandboxError> {
    let Some(reason) = B::STOPPED_WHILE_BUILT else { return sandbox.await };
    tokio::select! {
        biased;
        () = stop.cancelled() => Err(SandboxError::creation_because(reason)),
        sandbox = sandbox => sandbox,
    }
}

/// Returns the id of a sandbox for this place: the one that it names, or a new one.
pub(crate) fn id_for(place: &Place, level: Level) -> SandboxId {
    match place {
        Place::Sandbox(id) => id.clone(),
        Place::Own | Place::Session(_) => next_id(level),
    }
}

/// Returns a new id, which no other executor on this machine has.
pub(crate) fn next_id(level: Level) -> SandboxId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SandboxId(format!("{level}-{}-{number}", std::process::id()))
}

/// Implements the port `Sandbox` for a level by the pool in its field `pool`.
macro_rules! sandbox_by_pool {
    ($level:ty) => {
        impl wieldy_core::Sandbox for $level {
            fn level(&self) -> wieldy_core::Level {
                $crate::pool::Backend::level(&**self.pool.backend())
            }

            fn execute<'a>(
                &'a self,
                command: &'a wieldy_core::Command,
                confinement: &'a wieldy_core::Confinement,
                output: std::sync::Arc<dyn wieldy_core::OutputSink>,
                stop: tokio_util::sync::CancellationToken,
            ) -> futures_util::future::BoxFuture<'a, Result<wieldy_core::Exit, wieldy_core::SandboxError>> {
                self.pool.execute(command, confinement, output, stop)
            }

            fn create<'a>(
                &'a self,
                confinement: &'a wieldy_core::Confinement,
            ) -> futures_util::future::BoxFuture<'a, Result<wieldy_core::SandboxStatus, wieldy_core::SandboxError>>
            {
                self.pool.create(confinement)
            }

            fn list(&self) -> Vec<wieldy_core::SandboxStatus> {
                self.pool.list()
            }

            fn destroy<'a>(&'a self, id: &'a wieldy_core::SandboxId) -> futures_util::future::BoxFuture<'a, bool> {
                self.pool.destroy(id)
            }

            fn listen(&self, listener: std::sync::Arc<dyn Fn(wieldy_core::SandboxChange) + Send + Sync>) {
                self.pool.listen(listener);
            }
        }
    };
}
pub(crate) use sandbox_by_pool;

/// Sandboxes by the key that they are made for; those without a value are being built.
type Entries<K, V> = Mutex<HashMap<K, Arc<OnceCell<Arc<V>>>>>;

/// Returns the sandbox of this key, which is built if there is none: of calls that need it at once one builds it, and
/// if that fails the next. `take` marks it as used before the pool may take it for idle.
async fn kept_or_built<K: Clone + Eq + Hash, V, T>(
    entries: &Entries<K, V>,
    key: K,
    build: impl Future<Output = Result<Arc<V>, SandboxError>>,
    take: impl FnOnce(Arc<V>) -> T,
) -> Result<T, SandboxError> {
    let cell = Arc::clone(lock(entries).entry(key.clone()).or_default());
    let made = cell.get_or_try_init(|| build).await.cloned();
    let taken = made.map(take);
    if taken.is_err() {
        let mut entries = lock(entries);
        drop(cell);
        // Another call that has the cell is about to build in it, or has done so.
        let is_unused = |cell: &Arc<OnceCell<_>>| Arc::strong_count(cell) == 1 && !cell.initialized();
        if entries.get(&key).is_some_and(is_unused) {
            entries.remove(&key);
        }
    }
    taken
}

fn of_another_shape(id: &SandboxId) -> SandboxError {
    let reason = format!(
        "the sandbox `{}` was made for another workspace, other files or another network than this call asks for",
        id.0
    );
    SandboxError::creation_because(reason)
}

fn no_longer_intact(id: &SandboxId) -> SandboxError {
    let reason = format!(
        "a file that the sandbox `{}` hides or protects was replaced on the machine; destroy the sandbox and make a new one",
        id.0
    );
    SandboxError::creation_because(reason)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wieldy_core::{ResourceLimits, SandboxRef, SessionKey};

    use super::*;

    /// Builds sandboxes in which nothing runs.
    struct Fake;

    struct FakeSandbox(Record);

    impl Backend for Fake {
        type Live = FakeSandbox;

        fn level(&self) -> Level {
            Level::Native
        }

        fn idle_max(&self) -> Duration {
            Duration::from_secs(600)
        }

        async fn build(
            self: &Arc<Self>,
            confinement: &Confinement,
            outer: Option<&FakeSandbox>,
        ) -> Result<Arc<FakeSandbox>, SandboxError> {
            let made = SandboxRef { id: id_for(&confinement.place, Level::Native), level: Level::Native };
            let outer = outer.map(|outer| outer.0.id().clone());
            let record = Record::new(made, &confinement.place, outer, ResourceLimits::default(), Vec::new());
            Ok(Arc::new(FakeSandbox(record)))
        }
    }

    impl Live for FakeSandbox {
        fn record(&self) -> &Record {
            &self.0
        }

        fn is_alive(&self) -> bool {
            true
        }

        async fn run(
            self: &Arc<Self>,
            _command: &Command,
            _confinement: &Confinement,
            _output: &Arc<dyn OutputSink>,
            _stop: &CancellationToken,
        ) -> Result<Ran, SandboxError> {
            Err(failure())
        }

        async fn end(self: Arc<Self>, _linger: bool) {}
    }

    fn confinement(place: Place) -> Confinement {
        Confinement {
            workspace: "/w".into(),
            files: Arc::default(),
            network: Network::None,
            limits: ResourceLimits::default(),
            place,
            place_limits: ResourceLimits::default(),
            grace: Duration::ZERO,
        }
    }

    #[tokio::test]
    async fn a_sandbox_in_use_is_neither_stale_nor_surplus() {
        let pool = Pool::new(Fake, IdleLimits { sandboxes_max: 0, per_tenant_max: 0 });
        let key = SessionKey { tenant: None, agent: "a".into(), session: "s".into() };
        let lease = pool.kept(&confinement(Place::Session(key)), None).await.unwrap();
        pool.end_stale(Duration::ZERO, true).await;
        pool.end_surplus().await;
        assert_eq!(pool.list().len(), 1);
        let second = pool.find(lease.record().id()).unwrap().1;
        drop(lease);
        pool.end_stale(Duration::ZERO, true).await;
        assert_eq!(pool.list().len(), 1, "one lease is left");
        drop(second);
        pool.end_surplus().await;
        assert_eq!(pool.list().len(), 0);
    }

    #[tokio::test]
    async fn a_sandbox_with_another_in_it_is_not_stale_and_takes_it_along() {
        let pool = Pool::new(Fake, IdleLimits::default());
        let outer = pool.create(&confinement(Place::Own)).await.unwrap().sandbox.id;
        let inner = pool.create(&confinement(Place::Sandbox(outer.clone()))).await.unwrap().sandbox.id;
        let lease = pool.find(&inner).unwrap();
        pool.end_stale(Duration::ZERO, false).await;
        assert_eq!(pool.list().len(), 2);
        drop(lease);
        assert!(pool.destroy(&outer).await);
        assert_eq!(pool.list().len(), 0);
    }

    fn failure() -> SandboxError {
        SandboxError::creation_because("no")
    }

    #[tokio::test]
    async fn a_sandbox_built_by_the_next_call_after_a_failure_is_in_the_pool() {
        let (entries, steps) = (Entries::<u32, &str>::default(), tokio::sync::Notify::new());
        let fails = async {
            let build = async {
                steps.notified().await;
                Err(failure())
            };
            let failed = kept_or_built(&entries, 7, build, |built| built).await;
            steps.notify_one();
            failed
        };
        // It takes until the first one has been told.
        let build = async {
            steps.notified().await;
            Ok(Arc::new("a sandbox"))
        };
        let builds = kept_or_built(&entries, 7, build, |built| built);
        let beginning = async {
            tokio::task::yield_now().await;
            steps.notify_one();
        };
        let (failed, built, ()) = tokio::join!(fails, builds, beginning);
        assert_eq!((failed.is_err(), built.unwrap()), (true, Arc::new("a sandbox")));
        let known = entries.lock().unwrap().get(&7).and_then(|cell| cell.get().cloned());
        assert_eq!(known, Some(Arc::new("a sandbox")));
        assert!(kept_or_built(&entries, 8, async { Err(failure()) }, |built| built).await.is_err());
        assert_eq!(entries.lock().unwrap().len(), 1, "of what failed for all, nothing is left");
    }
}

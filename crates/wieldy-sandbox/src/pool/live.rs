//! The parts that a level gives to its pool: a [`Backend`] that builds sandboxes, and a [`Live`] sandbox with its
//! [`Record`].

use std::io;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Enforcement, Level, OutputSink, Place, ResourceLimits, SandboxError, SandboxId, SandboxRef,
    SandboxStatus, SessionKey,
};

use super::announcement::{Announcement, Listener};
use super::lock;
use crate::disk_quota::Ran;

/// Builds the sandboxes of a level.
pub(crate) trait Backend: Sized + Send + Sync + 'static {
    type Live: Live;

    /// The reason why no sandbox of this level is made within another, if none is.
    const WITHIN_REFUSED: Option<&'static str> = None;

    /// The reason given to a call that is stopped while its sandbox is being built, where it need not wait for that.
    const STOPPED_WHILE_BUILT: Option<&'static str> = None;

    fn level(&self) -> Level;

    /// Returns the idle time after which a sandbox is ended.
    fn idle_max(&self) -> Duration;

    /// Builds the sandbox of a session, or one with a name, perhaps within another.
    fn build(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&Self::Live>,
    ) -> impl Future<Output = Result<Arc<Self::Live>, SandboxError>> + Send;

    /// Builds a sandbox for one call, or takes one that was built ahead.
    fn build_own(
        self: &Arc<Self>,
        confinement: &Confinement,
    ) -> impl Future<Output = Result<Arc<Self::Live>, SandboxError>> + Send {
        self.build(confinement, None)
    }

    /// Returns true if placeholders of a sandbox of one call should stay a little longer, for the next call.
    fn lingers(&self) -> bool {
        false
    }

    /// Builds ahead, after the sandbox of one call has ended.
    fn replenish(self: &Arc<Self>, _confinement: &Confinement) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Saves resources of sandboxes that are not in use; called by the janitor.
    fn tidy(&self, _sandboxes: Vec<Arc<Self::Live>>) -> impl Future<Output = ()> + Send {
        async {}
    }
}

/// A sandbox in which commands can run.
pub(crate) trait Live: Send + Sync + 'static {
    fn record(&self) -> &Record;

    /// Returns false if it has ended or was killed.
    fn is_alive(&self) -> bool;

    /// Returns true if everything that it hides or protects is still the same file on the host.
    fn is_intact(&self) -> bool {
        true
    }

    /// Returns the first file that it hides or protects and that was replaced.
    fn replaced(&self) -> Option<PathBuf> {
        None
    }

    /// Prepares it for the next command after it was idle.
    fn wake(&self) -> impl Future<Output = io::Result<()>> + Send {
        async { Ok(()) }
    }

    /// Runs a command to its end.
    fn run(
        self: &Arc<Self>,
        command: &Command,
        confinement: &Confinement,
        output: &Arc<dyn OutputSink>,
        stop: &CancellationToken,
    ) -> impl Future<Output = Result<Ran, SandboxError>> + Send;

    /// Ends everything in it and waits until it is gone; its placeholders may `linger`.
    fn end(self: Arc<Self>, linger: bool) -> impl Future<Output = ()> + Send;
}

/// The part of a sandbox that its pool reads: its name, its owner and its use.
pub(crate) struct Record {
    made: SandboxRef,
    session: Option<SessionKey>,
    /// The sandbox that it was made within, with which it ends.
    pub(super) outer: Option<SandboxId>,
    created_at: Timestamp,
    limits: ResourceLimits,
    enforcement: Vec<Enforcement>,
    leases: AtomicUsize,
    running: AtomicUsize,
    executed: AtomicU64,
    used_at: Mutex<Instant>,
    /// The reason why the pool ended everything in it.
    pub(super) ended_because: OnceLock<String>,
    announcement: Mutex<Option<Announcement>>,
}

impl Record {
    pub(crate) fn new(
        made: SandboxRef,
        place: &Place,
        outer: Option<SandboxId>,
        limits: ResourceLimits,
        enforcement: Vec<Enforcement>,
    ) -> Self {
        let session = match place {
            Place::Session(key) => Some(key.clone()),
            Place::Own | Place::Sandbox(_) => None,
        };
        Self {
            made,
            session,
            outer,
            created_at: Timestamp::now(),
            limits,
            enforcement,
            leases: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            executed: AtomicU64::new(0),
            used_at: Mutex::new(Instant::now()),
            ended_because: OnceLock::new(),
            announcement: Mutex::default(),
        }
    }

    pub(crate) fn made(&self) -> &SandboxRef {
        &self.made
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.made.id
    }

    /// Returns the limits of everything in it together.
    pub(crate) fn limits(&self) -> &ResourceLimits {
        &self.limits
    }

    pub(crate) fn enforcement(&self) -> &[Enforcement] {
        &self.enforcement
    }

    /// Returns the number of commands that run in it.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    /// Counts a command as running until the guard is dropped.
    pub(crate) fn begin_run(&self) -> Running<'_> {
        self.running.fetch_add(1, Ordering::AcqRel);
        self.executed.fetch_add(1, Ordering::Relaxed);
        Running(self)
    }

    /// Forgets the commands that ran in it before its first call.
    pub(crate) fn forget_runs(&self) {
        self.executed.store(0, Ordering::Relaxed);
    }

    /// Returns the time of its last use; nothing while it is in use.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let is_idle = self.leases.load(Ordering::Acquire) == 0 && self.running() == 0;
        is_idle.then(|| *lock(&self.used_at))
    }

    /// Returns true if its last use was longer ago than this.
    pub(crate) fn is_idle_for(&self, time: Duration) -> bool {
        self.idle_since().is_some_and(|since| since + time < Instant::now())
    }

    pub(super) fn touch(&self) {
        *lock(&self.used_at) = Instant::now();
    }

    /// Tells the listener, if there is one, that the sandbox was made.
    pub(super) fn announce(&self, listener: Option<&Listener>) {
        *lock(&self.announcement) = listener.map(|listener| Announcement::new(self.made.clone(), listener));
    }

    /// Tells the listener that the sandbox is gone, if it was announced and that was not told before.
    pub(super) fn announce_end(&self) {
        let announcement = lock(&self.announcement).take();
        // Dropped when the lock is free, because the listener is foreign code.
        drop(announcement);
    }

    pub(super) fn status(&self) -> SandboxStatus {
        SandboxStatus {
            sandbox: self.made.clone(),
            session: self.session.clone(),
            created_at: self.created_at,
            running: self.running(),
            executed: self.executed.load(Ordering::Relaxed),
            limits: self.limits,
            enforcement: self.enforcement.clone(),
        }
    }
}

/// A command that runs, as far as a sandbox's [`Record`] counts it.
pub(crate) struct Running<'a>(&'a Record);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.touch();
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A sandbox in use.
pub(crate) struct Lease<L: Live>(Arc<L>);

impl<L: Live> Lease<L> {
    pub(super) fn new(live: Arc<L>) -> Self {
        live.record().leases.fetch_add(1, Ordering::AcqRel);
        Self(live)
    }
}

impl<L: Live> Deref for Lease<L> {
    type Target = Arc<L>;

    fn deref(&self) -> &Arc<L> {
        &self.0
    }
}

impl<L: Live> Drop for Lease<L> {
    fn drop(&mut self) {
        let record = self.0.record();
        record.touch();
        record.leases.fetch_sub(1, Ordering::AcqRel);
    }
}

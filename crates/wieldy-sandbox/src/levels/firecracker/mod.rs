//! The isolation level `firecracker`: a virtual machine for each sandbox.
//!
//! [`Firecracker`] keeps the guests: one for each session, booted when it is first needed and gone when it has been idle for long, and one
//! for each call without a session. A guest has a kernel of its own, a root file system that is never written to, and a disk with a copy of
//! the workspace; its first process is this program, which takes commands over a virtual socket.
//!
//! The workspace is a copy: before a command, what changed here since the last one is brought to the guest; after it, what it changed is
//! brought back before its result is returned. Of what the guest says nothing is believed: see `sync.rs` for what is checked. So a command
//! sees what others change here meanwhile only when the next one begins.
//!
//! What it does not: a guest has no network, and no mounts beside the workspace; asking for either is refused. Firecracker runs as the
//! executor's own user, without its jailer. What a guest did not bring back when it was lost, is lost.
//!
//! In reading order: the guest (`machine.rs`), Firecracker's API (`api.rs`), the commands in it (`commands.rs`) and the workspace (`sync.rs`);
//! what is said (`frames.rs`) and who answers in the guest (`agent.rs`).

mod agent;
mod api;
mod commands;
mod console;
mod frames;
mod machine;
mod sync;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use rustix::fs::{Access, access};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Exit, FileRules, Level, Network, OutputSink, Place, Sandbox, SandboxChange, SandboxError,
    SandboxId, SandboxRef, SandboxStatus,
};

pub(crate) use self::agent::{NAME as AGENT_NAME, live as live_as_agent};
use self::machine::Machine;
pub(crate) use self::machine::enforcement;
use crate::cgroup::Hierarchy;
use crate::pool::{Books, Eviction, IdleLimits, Kept, kept_or_built, of_another_shape};
use crate::state_dir::{self, StateDir};
use crate::supervise::run::run_to_end;
use crate::view::plan_cache::{OwnFolders, PlanCache};

/// Where programs are looked for.
const FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// How the level is set up.
#[derive(Debug, Clone)]
pub struct FirecrackerOptions {
    /// Firecracker's program, if it is not to be looked for.
    pub program: Option<PathBuf>,
    /// The guest's kernel, not compressed.
    pub kernel: Option<PathBuf>,
    /// The guest's root file system, as an image. It is never written to.
    pub rootfs: Option<PathBuf>,
    /// Where this program is in the root file system; its name there must be `wieldy-guest`.
    pub init: PathBuf,
    /// The device through which the machine makes virtual machines.
    pub kvm: PathBuf,
    /// Where guests' files are kept; no guest ever sees it.
    pub state: PathBuf,
    /// The home folder of whoever runs the executor; what is secret in it is hidden where it is in the workspace.
    pub home: Option<PathBuf>,
    /// How long a session's guest may be idle before it is taken away.
    pub idle_max: Duration,
    /// How many sessions' guests may be idle.
    pub idle_limits: IdleLimits,
}

impl FirecrackerOptions {
    /// Guests that are kept for ten minutes, of a kernel and a root file system that must still be named.
    pub fn new(state: PathBuf) -> Self {
        Self {
            program: None,
            kernel: None,
            rootfs: None,
            init: "/sbin/wieldy-guest".into(),
            kvm: "/dev/kvm".into(),
            state,
            home: std::env::home_dir(),
            idle_max: Duration::from_secs(10 * 60),
            idle_limits: IdleLimits::default(),
        }
    }
}

/// Why no guest can be started, and what can be done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirecrackerProblem {
    /// What is missing.
    pub problem: String,
    /// What helps.
    pub hint: String,
}

/// Runs commands in virtual machines. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Firecracker {
    shared: Arc<Shared>,
}

struct Shared {
    options: FirecrackerOptions,
    kept: Books<Key, Machine>,
    eviction: Eviction,
    // After the guests, which are in it.
    base: OnceCell<Base>,
    listener: OnceLock<Arc<dyn Fn(SandboxChange) + Send + Sync>>,
    has_janitor: OnceLock<()>,
}

/// What is made when it is first needed.
struct Base {
    program: PathBuf,
    home: StateDir,
    hierarchy: Hierarchy,
}

/// Which guest is meant: a session has one for each way in which its calls want it made.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    place: Place,
    workspace: PathBuf,
    network: Network,
    files: Arc<FileRules>,
}

impl Firecracker {
    /// The level, set up as the options say. Nothing is made before it is needed.
    pub fn new(options: FirecrackerOptions) -> Self {
        let shared = Shared {
            eviction: Eviction::new(options.idle_limits),
            options,
            kept: Mutex::default(),
            base: OnceCell::new(),
            listener: OnceLock::new(),
            has_janitor: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// What Firecracker says to `--version`, or the first thing that is missing. That a guest boots is not tried by this.
    pub fn probe(&self) -> Result<String, FirecrackerProblem> {
        self.shared.options.probe().map(|(_, version)| version)
    }
}

impl FirecrackerOptions {
    fn probe(&self) -> Result<(PathBuf, String), FirecrackerProblem> {
        let told = |problem: String, hint: &str| Err(FirecrackerProblem { problem, hint: hint.into() });
        let Some(program) = self.program.clone().or_else(|| find("firecracker")) else {
            let problem = format!("there is no program `firecracker` in {}", FOLDERS.join(", "));
            return told(problem, "install it from its releases: github.com/firecracker-microvm/firecracker");
        };
        let mut asked = std::process::Command::new(&program);
        let version = match asked.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output() {
            Err(error) => return told(format!("`{}`: {error}", program.display()), "see that it can be executed"),
            Ok(output) if !output.status.success() => {
                let problem = format!("`{} --version` ended with {}", program.display(), output.status);
                return told(problem, "install Firecracker anew");
            }
            Ok(output) => String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned(),
        };
        if let Err(error) = access(&self.kvm, Access::READ_OK | Access::WRITE_OK) {
            let problem = format!("`{}` cannot be used: {error}", self.kvm.display());
            return told(
                problem,
                "use a machine with virtualization switched on, and let this user use it (group `kvm`)",
            );
        }
        for (name, key, path) in [("kernel", "kernel", &self.kernel), ("root file system", "rootfs", &self.rootfs)] {
            let hint =
                format!("build one and name it by the key `sandbox.firecracker.{key}`; see docs/guide/12-isolation.md");
            match path {
                Some(path) if path.is_file() => {}
                Some(path) => return told(format!("the guest's {name} `{}` is no file", path.display()), &hint),
                None => return told(format!("no {name} for guests is configured"), &hint),
            }
        }
        if find("mkfs.ext4").is_none() {
            return told(format!("there is no program `mkfs.ext4` in {}", FOLDERS.join(", ")), "install e2fsprogs");
        }
        Ok((program, version))
    }
}

fn find(program: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|folder| Path::new(folder).join(program)).find(|path| path.is_file())
}

impl Sandbox for Firecracker {
    fn level(&self) -> Level {
        Level::Firecracker
    }

    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        let (shared, command, confinement) = (Arc::clone(&self.shared), command.clone(), confinement.clone());
        Box::pin(run_to_end(stop, |stop| async move { shared.execute(&command, &confinement, &*output, &stop).await }))
    }

    fn create<'a>(&'a self, confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        Box::pin(async move {
            let mut confinement = confinement.clone();
            match &confinement.place {
                Place::Session(_) => {}
                Place::Own => confinement.place = Place::Sandbox(next_id()),
                Place::Sandbox(_) => {
                    let reason = "a machine cannot be made within another, whose limits it would not be held to; make one without a parent";
                    return Err(SandboxError::Creation { reason: reason.into() });
                }
            }
            let status = self.shared.kept(&confinement, true).await?.status();
            self.shared.end_surplus().await;
            Ok(status)
        })
    }

    fn list(&self) -> Vec<SandboxStatus> {
        lock(&self.shared.kept).values().filter_map(|cell| cell.get()).map(|machine| machine.status()).collect()
    }

    fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let Some(machine) = self.shared.forget(|one| one.made.id == *id).pop() else { return false };
            self.shared.end(machine).await;
            true
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
        output: &dyn OutputSink,
        stop: &CancellationToken,
    ) -> Result<Exit, SandboxError> {
        if confinement.place == Place::Own {
            let machine = unless_stopped(stop, self.build(confinement, next_id())).await?;
            let exit = machine.run(command, confinement, output, stop).await;
            self.end(machine).await;
            return exit;
        }
        let mut machine = unless_stopped(stop, self.kept(confinement, false)).await?;
        if machine.is_gone() {
            // It was lost while nobody used it.
            self.end_all(|other| other.made == machine.made).await;
            machine = unless_stopped(stop, self.kept(confinement, false)).await?;
        }
        let exit = machine.run(command, confinement, output, stop).await;
        if machine.is_gone() {
            // Whatever has happened to it, the next call gets a new one.
            self.end_all(|other| other.made == machine.made).await;
        }
        drop(machine);
        self.end_surplus().await;
        exit
    }

    /// Ends idle guests of sessions of which there are too many.
    async fn end_surplus(self: &Arc<Self>) {
        let end = |surplus| {
            let shared = Arc::clone(self);
            async move { shared.end(surplus).await }
        };
        self.eviction.end_surplus(&self.kept, |key| &key.place, end).await;
    }

    /// The guest of a session or of an id; made if there is none and it may be.
    async fn kept(self: &Arc<Self>, confinement: &Confinement, create: bool) -> Result<Arc<Machine>, SandboxError> {
        let Confinement { place, workspace, network, files, .. } = confinement.clone();
        let key = Key { place, workspace, network, files };
        let id = match &confinement.place {
            Place::Sandbox(id) if !create => {
                let kept = lock(&self.kept);
                let mut all = kept.iter().filter_map(|(key, cell)| Some((key, cell.get()?)));
                let (made_for, known) =
                    all.find(|(_, one)| one.made.id == *id).ok_or_else(|| SandboxError::missing(id))?;
                // What a call asks for is never less than what it gets.
                let asked = Key { place: made_for.place.clone(), ..key };
                return if *made_for == asked { Ok(Arc::clone(known)) } else { Err(of_another_shape(id)) };
            }
            Place::Sandbox(id) => id.clone(),
            Place::Own | Place::Session(_) => next_id(),
        };
        let made = kept_or_built(&self.kept, key, self.build(confinement, id)).await?;
        self.employ_janitor();
        Ok(made)
    }

    async fn build(&self, confinement: &Confinement, id: SandboxId) -> Result<Arc<Machine>, SandboxError> {
        let base = self.base.get_or_try_init(|| self.make_base()).await?;
        let (home, state) = (self.options.home.clone(), Some(self.options.state.clone()));
        let plan = PlanCache::default().plan(confinement, &OwnFolders { home, state })?;
        let made = SandboxRef { id, level: Level::Firecracker };
        let machine = Machine::start(made, confinement, &self.options, base, &plan).await?;
        self.tell(SandboxChange::Created(machine.made.clone()));
        Ok(machine)
    }

    /// Sees that all is there, makes what all guests need, and removes what dead executors left of theirs.
    async fn make_base(&self) -> Result<Base, SandboxError> {
        let creation = |reason: String| SandboxError::Creation { reason: format!("firecracker: {reason}") };
        let options = self.options.clone();
        let work = move || -> Result<Base, SandboxError> {
            let unavailable = |FirecrackerProblem { problem, hint }| SandboxError::Unavailable {
                level: Level::Firecracker,
                problem,
                hint,
            };
            let (program, _) = options.probe().map_err(unavailable)?;
            let level = Level::Firecracker.as_str();
            let make = || -> std::io::Result<StateDir> {
                std::fs::create_dir_all(&options.state)?;
                let state = options.state.canonicalize()?;
                state_dir::sweep_folder(&state, |level, _| level == Level::Firecracker);
                StateDir::make(&state, level)
            };
            let home = make().map_err(|error| creation(format!("`{}`: {error}", options.state.display())))?;
            let hierarchy = Hierarchy::find();
            hierarchy.sweep();
            Ok(Base { program, home, hierarchy })
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| creation(error.to_string()))?
    }

    /// Takes guests out of the books.
    fn forget(&self, which: impl Fn(&Machine) -> bool) -> Vec<Arc<Machine>> {
        let mut forgotten = Vec::new();
        lock(&self.kept).retain(|_, cell| match cell.get() {
            Some(machine) if which(machine) => {
                forgotten.push(Arc::clone(machine));
                false
            }
            _ => true,
        });
        forgotten
    }

    async fn end_all(&self, which: impl Fn(&Machine) -> bool) {
        for machine in self.forget(which) {
            self.end(machine).await;
        }
    }

    async fn end(&self, machine: Arc<Machine>) {
        let made = machine.made.clone();
        machine.end().await;
        self.tell(SandboxChange::Destroyed(made));
    }

    fn tell(&self, change: SandboxChange) {
        if let Some(listener) = self.listener.get() {
            listener(change);
        }
    }

    /// Lets somebody look from time to time for guests that nobody uses.
    fn employ_janitor(self: &Arc<Self>) {
        if self.has_janitor.set(()).is_err() {
            return;
        }
        let (shared, idle_max) = (Arc::downgrade(self), self.options.idle_max);
        let every = (idle_max / 4).clamp(Duration::from_millis(50), Duration::from_secs(30));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = Weak::upgrade(&shared) else { return };
                let is_stale = |one: &Machine| one.idle_since().is_some_and(|since| since + idle_max < Instant::now());
                shared.end_all(|one| is_stale(one) || one.is_gone()).await;
            }
        });
    }
}

impl Kept for Machine {
    fn id(&self) -> &SandboxId {
        &self.made.id
    }

    /// Returns nothing: no guest is made within another.
    fn outer(&self) -> Option<&SandboxId> {
        None
    }

    fn idle_since(&self) -> Option<Instant> {
        self.idle_since()
    }
}

/// Waits for a guest; nobody waits longer for one than for the command. What there is of it goes when nobody waits.
async fn unless_stopped(
    stop: &CancellationToken,
    machine: impl Future<Output = Result<Arc<Machine>, SandboxError>>,
) -> Result<Arc<Machine>, SandboxError> {
    tokio::select! {
        biased;
        () = stop.cancelled() => {
            Err(SandboxError::Creation { reason: "firecracker: the run was stopped before its guest stood".into() })
        }
        machine = machine => machine,
    }
}

/// A name of its own for each guest, also among several executors on one machine.
fn next_id() -> SandboxId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    SandboxId(format!("firecracker-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_thing_that_is_missing_is_named() {
        let world = tempfile::tempdir().unwrap();
        let file = world.path().join("file");
        std::fs::write(&file, "").unwrap();
        let mut options = FirecrackerOptions::new(world.path().to_owned());
        let problem = |options: &FirecrackerOptions| Firecracker::new(options.clone()).probe().unwrap_err().problem;
        options.program = Some("/no/firecracker".into());
        assert_eq!(problem(&options), "`/no/firecracker`: No such file or directory (os error 2)");
        options.program = Some("/bin/false".into());
        assert_eq!(problem(&options), "`/bin/false --version` ended with exit status: 1");
        options.program = Some("/bin/true".into());
        options.kvm = "/no/kvm".into();
        assert_eq!(problem(&options), "`/no/kvm` cannot be used: No such file or directory (os error 2)");
        options.kvm.clone_from(&file);
        assert_eq!(problem(&options), "no kernel for guests is configured");
        options.kernel = Some("/no/kernel".into());
        assert_eq!(problem(&options), "the guest's kernel `/no/kernel` is no file");
        options.kernel = Some(file.clone());
        assert_eq!(problem(&options), "no root file system for guests is configured");
        options.rootfs = Some(file);
        match find("mkfs.ext4") {
            None => assert!(problem(&options).starts_with("there is no program `mkfs.ext4` in ")),
            Some(_) => assert!(Firecracker::new(options).probe().is_ok()),
        }
    }
}

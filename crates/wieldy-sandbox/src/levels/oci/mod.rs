//! The isolation levels `runc`, `crun`, `youki` and `gvisor`: containers by an OCI runtime, all by one driver.
//!
//! [`Oci`] keeps the containers: one for each session, made when it is first needed and gone when it has been idle for long, and one for
//! each call without a session. What a container sees is what the native level plans, with the machine's own system or that of an image.
//!
//! It needs root: the runtimes make cgroups and devices, and the workspace is mounted under another owner.
//!
//! What it does not: a code above 128 is taken for a signal where a runtime's program says it, which is how they say it; only a gVisor sandbox
//! that is asked itself tells them apart. That a private folder is full, a command sees, and nobody else. The runtime's own words are the
//! reason why a program does not start, and runc has none for a file that is no program: it ends with code 1. runc also passes on to a
//! command the signal for a closed pipe if that closes its input without reading it. In gVisor the limits are those of all commands in a
//! sandbox together and of gVisor's kernel, and so are the figures; processes are neither limited nor counted; what others print after the
//! first process's end is lost where `runsc` itself runs the command.
//!
//! In reading order: the container (`container.rs`, `cgroup_parent.rs`, `netns.rs`) and the commands in it (`commands.rs`, `gvisor.rs`,
//! `gvisor_control.rs`); the runtime's program (`runtime.rs`); the janitor of idle containers (`janitor.rs`); a container's files
//! (`container_dir.rs`, `bundle.rs`, `image.rs`, `layout.rs`) and id-mapped mounts (`idmap.rs`).

mod bundle;
mod cgroup_parent;
mod commands;
mod container;
mod container_dir;
mod gvisor;
mod gvisor_control;
mod idmap;
mod image;
mod janitor;
mod layout;
mod netns;
mod options;
mod runtime;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Ended, Exit, FileRules, Level, Network, OutputSink, Place, ResourceLimits, Sandbox,
    SandboxChange, SandboxError, SandboxId, SandboxRef, SandboxStatus, Stdin,
};

use self::cgroup_parent::SessionParents;
pub(crate) use self::container::enforcement;
use self::container::{Container, Within};
use self::container_dir::ContainerSetup;
pub use self::options::{OciOptions, OciProblem, OciVersion, Rootfs};
use self::runtime::Runtime;
use crate::cgroup::Hierarchy;
use crate::pool::{Books, Eviction, Kept, kept_or_built, no_longer_intact, of_another_shape};
use crate::state_dir::{self, StateDir};
use crate::supervise::host_process::NullSink;
use crate::supervise::run::run_to_end;

/// Runs commands in containers of an OCI runtime. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Oci {
    shared: Arc<Shared>,
}

struct Shared {
    options: OciOptions,
    kept: Books<Key, Container>,
    eviction: Eviction,
    sessions: SessionParents,
    // After the containers, which are in it.
    base: OnceCell<Base>,
    listener: OnceLock<Arc<dyn Fn(SandboxChange) + Send + Sync>>,
    has_janitor: OnceLock<()>,
}

/// What is made when it is first needed.
struct Base {
    runtime: Runtime,
    setup: Arc<ContainerSetup>,
    hierarchy: Hierarchy,
}

/// Which container is meant: a session has one for each way in which its calls want it made.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    place: Place,
    workspace: PathBuf,
    network: Network,
    files: Arc<FileRules>,
}

impl Key {
    fn of(confinement: &Confinement) -> Self {
        let Confinement { place, workspace, network, files, .. } = confinement.clone();
        Self { place, workspace, network, files }
    }
}

impl Oci {
    /// The level, set up as the options say. Nothing is made before it is needed.
    pub fn new(options: OciOptions) -> Self {
        let shared = Shared {
            eviction: Eviction::new(options.idle_limits),
            options,
            kept: Mutex::default(),
            sessions: SessionParents::default(),
            base: OnceCell::new(),
            listener: OnceLock::new(),
            has_janitor: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Asks the runtime for its version and lets it run a container once.
    pub async fn probe(&self) -> Result<OciVersion, OciProblem> {
        let program = self.shared.program()?;
        let asked = std::process::Command::new(&program).arg("--version").stdin(std::process::Stdio::null()).output();
        let hint = || format!("see that `{} --version` works", program.display());
        let output =
            asked.map_err(|error| OciProblem { problem: format!("`{}`: {error}", program.display()), hint: hint() })?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = said.lines().next().filter(|_| output.status.success());
        let Some(version) = version else {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(OciProblem { problem: format!("`{}`: {said}", program.display()), hint: hint() });
        };
        self.try_once().await.map_err(|error| match error {
            SandboxError::Unavailable { problem, hint, .. } => OciProblem { problem, hint },
            SandboxError::Creation { reason } => unusable(self.level(), reason),
            error => unusable(self.level(), error.to_string()),
        })?;
        Ok(OciVersion(version.to_owned()))
    }

    /// Runs `true` in a container.
    async fn try_once(&self) -> Result<(), SandboxError> {
        let failed = |error: std::io::Error| SandboxError::Creation { reason: error.to_string() };
        // A process of the same number may have left one behind.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = format!("wieldy-probe-{}-{now}", next_id(self.shared.options.level).0);
        let workspace = std::env::temp_dir().join(name);
        std::fs::create_dir(&workspace).map_err(failed)?;
        let environment = [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into();
        let (program, arguments, folder) = ("true".into(), Vec::new(), PathBuf::new());
        let command = Command { program, arguments, environment, folder, stdin: Stdin::Nothing, terminal: None };
        let confinement = Confinement {
            workspace: workspace.clone(),
            files: Arc::default(),
            network: Network::None,
            limits: ResourceLimits::default(),
            place: Place::Own,
            place_limits: ResourceLimits::default(),
            grace: Duration::ZERO,
        };
        let ran = self.execute(&command, &confinement, Arc::new(NullSink), CancellationToken::new()).await;
        remove_emptied(&workspace).await;
        match ran?.ended {
            Ended::Code(0) => Ok(()),
            ended => Err(SandboxError::Creation { reason: format!("`true` ended with {ended:?} in a container") }),
        }
    }
}

impl Sandbox for Oci {
    fn level(&self) -> Level {
        self.shared.options.level
    }

    fn execute<'a>(
        &'a self,
        command: &'a Command,
        confinement: &'a Confinement,
        output: Arc<dyn OutputSink>,
        stop: CancellationToken,
    ) -> BoxFuture<'a, Result<Exit, SandboxError>> {
        let (shared, command, confinement) = (Arc::clone(&self.shared), command.clone(), confinement.clone());
        Box::pin(run_to_end(stop, |stop| async move { shared.execute(&command, &confinement, &output, &stop).await }))
    }

    fn create<'a>(&'a self, confinement: &'a Confinement) -> BoxFuture<'a, Result<SandboxStatus, SandboxError>> {
        Box::pin(async move {
            let mut confinement = confinement.clone();
            let outer = match &confinement.place {
                Place::Session(_) => {
                    let status = self.shared.kept(&confinement, None).await?.status();
                    self.shared.end_surplus().await;
                    return Ok(status);
                }
                Place::Sandbox(id) => Some(self.shared.known(id)?.1),
                Place::Own => None,
            };
            // Each has a name of its own, also one that is made within another.
            confinement.place = Place::Sandbox(next_id(self.level()));
            let made = self.shared.kept(&confinement, outer.as_deref()).await?;
            if let Some(outer) = outer.filter(|outer| self.shared.known(&outer.made().id).is_err()) {
                // It went while this one was made, which should have gone with it.
                self.destroy(&made.made().id).await;
                return Err(SandboxError::missing(&outer.made().id));
            }
            Ok(made.status())
        })
    }

    fn list(&self) -> Vec<SandboxStatus> {
        let kept = lock(&self.shared.kept);
        kept.values().filter_map(|cell| cell.get()).map(|container| container.status()).collect()
    }

    fn destroy<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            let forgotten = self.shared.forget(|one| one.made().id == *id);
            let was_there = !forgotten.is_empty();
            for container in forgotten {
                self.shared.end(container).await;
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
    ) -> Result<Exit, SandboxError> {
        if confinement.place == Place::Own {
            let container = self.build(confinement, next_id(self.options.level), None).await?;
            self.tell(SandboxChange::Created(container.made().clone()));
            let exit = container.run(command, confinement, output, stop).await;
            let shared = Arc::clone(self);
            // No process of the command is left; the rest need not be waited for.
            tokio::spawn(async move { shared.end(container).await });
            return exit;
        }
        let container = match &confinement.place {
            Place::Sandbox(id) => self.named(id, confinement)?,
            Place::Own | Place::Session(_) => self.kept(confinement, None).await?,
        };
        let exit = container.run(command, confinement, output, stop).await;
        if container.is_gone() {
            // Whatever has happened to it, the next call gets a new one.
            for lost in self.forget(|other| other.made() == container.made()) {
                self.end(lost).await;
            }
            return exit.map_err(|error| match error {
                SandboxError::Creation { reason } => SandboxError::Crashed { reason },
                error => error,
            });
        }
        drop(container);
        self.end_surplus().await;
        exit
    }

    /// Ends idle containers of sessions of which there are too many.
    async fn end_surplus(self: &Arc<Self>) {
        let end = |surplus| {
            let shared = Arc::clone(self);
            async move { shared.end(surplus).await }
        };
        self.eviction.end_surplus(&self.kept, |key| &key.place, end).await;
    }

    /// The container of this id, and what it was made for.
    fn known(&self, id: &SandboxId) -> Result<(Key, Arc<Container>), SandboxError> {
        let kept = lock(&self.kept);
        let mut all = kept.iter().filter_map(|(key, cell)| Some((key, cell.get()?)));
        let found = all.find(|(_, one)| one.made().id == *id);
        found.map(|(key, one)| (key.clone(), Arc::clone(one))).ok_or_else(|| SandboxError::missing(id))
    }

    /// The container of this id, if it can run what is asked for.
    fn named(&self, id: &SandboxId, confinement: &Confinement) -> Result<Arc<Container>, SandboxError> {
        let (made_for, known) = self.known(id)?;
        // What a call asks for is never less than what it gets.
        if made_for != (Key { place: made_for.place.clone(), ..Key::of(confinement) }) {
            return Err(of_another_shape(id));
        }
        if known.is_intact() { Ok(known) } else { Err(no_longer_intact(id)) }
    }

    /// The container of a session, made if there is none, or a new one with a name, perhaps within another.
    async fn kept(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&Container>,
    ) -> Result<Arc<Container>, SandboxError> {
        let key = Key::of(confinement);
        let id = match &confinement.place {
            Place::Sandbox(id) => id.clone(),
            Place::Own | Place::Session(_) => next_id(self.options.level),
        };
        let known = lock(&self.kept).get(&key).and_then(|cell| cell.get().cloned());
        if let Some(lost) = known.filter(|container| container.is_gone() || !container.is_intact()) {
            self.give_up(lost).await;
        }
        let made = kept_or_built(&self.kept, key, async {
            let container = self.build(confinement, id, outer).await?;
            self.tell(SandboxChange::Created(container.made().clone()));
            Ok(container)
        });
        let made = made.await?;
        self.employ_janitor();
        Ok(made)
    }

    async fn build(
        &self,
        confinement: &Confinement,
        id: SandboxId,
        outer: Option<&Container>,
    ) -> Result<Arc<Container>, SandboxError> {
        let base = self.base.get_or_try_init(|| self.make_base()).await?;
        let level = self.options.level;
        let within = match (&confinement.place, outer) {
            (_, Some(outer)) => Within::Container(outer),
            (Place::Session(key), None) => {
                let parent = self.sessions.parent(key, level, &confinement.place_limits, &base.hierarchy);
                let failed = |error| SandboxError::Creation { reason: format!("{level}: making a cgroup: {error}") };
                Within::Session(parent.map_err(failed)?)
            }
            (Place::Own | Place::Sandbox(_), None) => Within::Executor,
        };
        Container::start(SandboxRef { id, level }, confinement, base, within).await
    }

    /// Takes a container out of the books that is lost, or whose walls no longer hold.
    async fn give_up(&self, lost: Arc<Container>) {
        for one in self.forget(|other| other.made() == lost.made()) {
            if Arc::ptr_eq(&one, &lost) && !lost.is_gone() {
                // What still runs in it goes on; it ends with the last of them.
                self.tell(SandboxChange::Destroyed(lost.made().clone()));
            } else {
                self.end(one).await;
            }
        }
        let _ = tokio::task::spawn_blocking(move || drop(lost)).await;
    }

    /// Makes what all containers need, and removes what dead executors left of theirs.
    async fn make_base(&self) -> Result<Base, SandboxError> {
        let creation = |reason: String| SandboxError::Creation { reason };
        let program = self.program().map_err(|problem| problem.at(self.options.level))?;
        let options = self.options.clone();
        let work = move || -> std::io::Result<Base> {
            let OciOptions { level, rootfs, state, home: user_home, .. } = options;
            std::fs::create_dir_all(&state)?;
            let state = state.canonicalize()?;
            state_dir::sweep_folder(&state, |of, left| {
                let program = if of == level { Some(program.clone()) } else { runtime::installed(of) };
                container_dir::forget_containers(left, program.as_deref());
                true
            });
            let hierarchy = Hierarchy::find();
            hierarchy.sweep();
            let image = match rootfs {
                Rootfs::Host => None,
                Rootfs::Folder(folder) => Some(image::checked(&folder, &state, user_home.as_deref())?),
                Rootfs::Layout(layout) => Some(layout::unpack(&layout, &state)?),
            };
            let home = StateDir::make(&state, level.as_str())?;
            let runtime = Runtime { level, program, root: home.runtime() };
            Ok(Base { runtime, setup: Arc::new(ContainerSetup { level, home, image, state, user_home }), hierarchy })
        };
        let laid = tokio::task::spawn_blocking(work).await.map_err(|error| creation(error.to_string()))?;
        laid.map_err(|error| creation(format!("{}: {error}", self.options.level)))
    }

    /// The runtime's program, if it can be used at all.
    fn program(&self) -> Result<PathBuf, OciProblem> {
        let level = self.options.level;
        let Some(name) = runtime::name(level) else {
            let problem = format!("the level `{level}` has no OCI runtime");
            return Err(OciProblem { problem, hint: "choose `runc`, `crun`, `youki` or `gvisor`".into() });
        };
        if !rustix::process::geteuid().is_root() {
            let problem = format!("the level `{level}` needs root");
            return Err(OciProblem { problem, hint: "run wieldy as root, or use the level `native`".into() });
        }
        let candidates = match &self.options.program {
            Some(program) => vec![program.clone()],
            None => runtime::candidates(level),
        };
        let found = candidates.iter().find(|path| path.is_file());
        found.cloned().ok_or_else(|| {
            let looked: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
            let problem = format!("there is no runtime `{name}`: none of {} is a program", looked.join(", "));
            let package = match level {
                Level::Youki => "see its releases at github.com/youki-dev/youki".to_owned(),
                _ => format!("apt-get install {name}"),
            };
            OciProblem { problem, hint: format!("install it ({package})") }
        })
    }

    /// Takes containers out of the books, with those that were made within them, which come first.
    fn forget(&self, which: impl Fn(&Container) -> bool) -> Vec<Arc<Container>> {
        let mut kept = lock(&self.kept);
        let mut forgotten = Vec::new();
        let mut found = take(&mut kept, which);
        while !found.is_empty() {
            forgotten.extend(found.iter().cloned());
            found = take(&mut kept, |one| found.iter().any(|outer| one.within.as_ref() == Some(&outer.made().id)));
        }
        forgotten.reverse();
        forgotten
    }

    async fn end(&self, container: Arc<Container>) {
        let made = container.made().clone();
        container.end().await;
        self.tell(SandboxChange::Destroyed(made));
    }

    fn tell(&self, change: SandboxChange) {
        if let Some(listener) = self.listener.get() {
            listener(change);
        }
    }
}

/// Ends the containers of a level that a dead executor left in its folder.
pub(crate) fn forget(level: Level, left: &Path) -> bool {
    container_dir::forget_containers(left, runtime::installed(level).as_deref());
    true
}

impl Kept for Container {
    fn id(&self) -> &SandboxId {
        &self.made().id
    }

    fn outer(&self) -> Option<&SandboxId> {
        self.within.as_ref()
    }

    fn idle_since(&self) -> Option<Instant> {
        self.idle_since()
    }
}

/// Takes containers out of the books, and nothing else.
fn take(
    kept: &mut HashMap<Key, Arc<OnceCell<Arc<Container>>>>,
    which: impl Fn(&Container) -> bool,
) -> Vec<Arc<Container>> {
    let taken = kept.extract_if(|_, cell| cell.get().is_some_and(|container| which(container)));
    taken.filter_map(|(_, cell)| cell.get().cloned()).collect()
}

/// What to do about a runtime that complains like this.
fn unusable(level: Level, problem: String) -> OciProblem {
    let hint = if problem.contains("hybrid") {
        "boot with `systemd.unified_cgroup_hierarchy=1` to have cgroup v2 alone, or use the level `runc`".into()
    } else if problem.contains("\"sh\"") {
        "give programs a system with `sh` and `sleep` in it".into()
    } else {
        format!("see that the runtime runs containers by itself, or use another level than `{level}`")
    };
    OciProblem { problem, hint }
}

/// A name of its own for each container, also among several executors on one machine.
fn next_id(level: Level) -> SandboxId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    SandboxId(format!("{level}-{}-{number}", std::process::id()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

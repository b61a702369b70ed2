//! The isolation levels `runc`, `crun`, `youki` and `gvisor`: containers by an OCI runtime, all by one driver.
//!
//! The pool keeps a container for each session; a call without a session gets one of its own. A container has the file
//! tree that `view` plans, with the host's own system or that of an image.
//!
//! It needs root: the runtimes make cgroups and devices, and the workspace is mounted under another owner.
//!
//! Known limits:
//!
//! - An exit code above 128 is taken for a signal, as runtimes report signals so; only gVisor's control socket tells
//!   them apart.
//! - A full private folder is seen by the command alone.
//! - A program that does not start is explained by the runtime's own message. runc has none for a file that is no
//!   program: it ends with
//!   code 1. If a command closes its input without reading it, runc passes the signal for a closed pipe on to it.
//! - In gVisor, limits and figures are those of all commands in a sandbox and of gVisor's kernel together. Processes
//!   are neither limited nor
//!   counted. Output of other processes after the end of the first one is lost where `runsc` itself runs the command.
//!
//! In reading order: the container (`container.rs`, `cgroup_parent.rs`, `netns.rs`) and the commands in it
//! (`commands.rs`, `gvisor.rs`, `gvisor_control.rs`); the runtime's program (`runtime.rs`); a container's files
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
mod layout;
mod netns;
mod options;
mod runtime;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Ended, Level, Network, Place, ResourceLimits, Sandbox, SandboxError, SandboxRef, Stdin,
};

use self::cgroup_parent::SessionParents;
pub(crate) use self::container::enforcement;
use self::container::{Container, Within};
use self::container_dir::ContainerSetup;
pub use self::options::{OciOptions, OciProblem, OciVersion, Rootfs};
use self::runtime::Runtime;
use crate::cgroup::Hierarchy;
use crate::pool::{Backend, Pool, id_for, next_id, sandbox_by_pool};
use crate::state_dir::{self, StateDir, remove_emptied};
use crate::supervise::host_process::NullSink;

/// Runs commands in containers of an OCI runtime. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Oci {
    pool: Arc<Pool<OciBackend>>,
}

sandbox_by_pool!(Oci);

/// Starts containers.
struct OciBackend {
    options: OciOptions,
    session_parents: SessionParents,
    base: OnceCell<Base>,
}

/// The parts that all containers share, made for the first one.
struct Base {
    runtime: Runtime,
    setup: Arc<ContainerSetup>,
    hierarchy: Hierarchy,
}

impl Oci {
    /// Returns the level with these settings. Nothing is made before it is needed.
    pub fn new(options: OciOptions) -> Self {
        let idle_limits = options.idle_limits;
        let backend = OciBackend { options, session_parents: SessionParents::default(), base: OnceCell::new() };
        Self { pool: Pool::new(backend, idle_limits) }
    }

    /// Asks the runtime for its version and lets it run a container once.
    pub async fn probe(&self) -> Result<OciVersion, OciProblem> {
        let program = self.pool.backend().program()?;
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
            error @ SandboxError::Creation { .. } => unusable(self.level(), error.reason()),
            error @ SandboxError::Crashed { .. } => unusable(self.level(), error.message()),
            error => unusable(self.level(), error.to_string()),
        })?;
        Ok(OciVersion(version.to_owned()))
    }

    /// Runs `true` in a container.
    async fn try_once(&self) -> Result<(), SandboxError> {
        // A process with the same id may have left a folder of this name.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let name = format!("wieldy-probe-{}-{now}", next_id(self.level()).0);
        let workspace = std::env::temp_dir().join(name);
        std::fs::create_dir(&workspace).map_err(SandboxError::creation_from)?;
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
            ended => Err(SandboxError::creation_because(format!("`true` ended with {ended:?} in a container"))),
        }
    }
}

impl Backend for OciBackend {
    type Live = Container;

    fn level(&self) -> Level {
        self.options.level
    }

    fn idle_max(&self) -> Duration {
        self.options.idle_max
    }

    async fn build(
        self: &Arc<Self>,
        confinement: &Confinement,
        outer: Option<&Container>,
    ) -> Result<Arc<Container>, SandboxError> {
        let base = self.base.get_or_try_init(|| self.make_base()).await?;
        let level = self.options.level;
        let within = match (&confinement.place, outer) {
            (_, Some(outer)) => Within::Container(outer),
            (Place::Session(key), None) => {
                let parent = self.session_parents.parent(key, level, &confinement.place_limits, &base.hierarchy);
                let failed = |error| SandboxError::creation(format!("{level}: making a cgroup"), error);
                Within::Session(parent.map_err(failed)?)
            }
            (Place::Own | Place::Sandbox(_), None) => Within::Executor,
        };
        let made = SandboxRef { id: id_for(&confinement.place, level), level };
        Container::start(made, confinement, base, within).await
    }
}

impl OciBackend {
    /// Makes the parts that all containers share, and removes containers of dead executors.
    async fn make_base(&self) -> Result<Base, SandboxError> {
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
        let laid = tokio::task::spawn_blocking(work).await.map_err(SandboxError::creation_from)?;
        laid.map_err(|error| SandboxError::creation(self.options.level.as_str(), error))
    }

    /// Returns the runtime's program, if it can be used.
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
}

/// Ends the containers of a level that a dead executor left in its folder.
pub(crate) fn forget(level: Level, left: &Path) -> bool {
    container_dir::forget_containers(left, runtime::installed(level).as_deref());
    true
}

/// Returns the problem of a runtime that reported this error, with a hint.
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

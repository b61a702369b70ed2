//! The isolation level `firecracker`: a virtual machine for each sandbox.
//!
//! The pool keeps a guest for each session; a call without a session gets one of its own. A guest has a kernel of its
//! own, a root file system that is never written to, and a disk with a copy of the workspace; its first process is
//! this program, which takes commands over a virtual socket.
//!
//! The workspace is a copy: before a command, what changed here since the last one is brought to the guest; after it,
//! what it changed is brought back before its result is returned. Nothing from a guest is trusted; `sync.rs` has the
//! checks. So a command sees changes that are made on the host meanwhile only when the next command begins.
//!
//! Not supported: a guest has no network, and no mounts beside the workspace; asking for either is refused.
//! Firecracker runs as the executor's own user, without its jailer. Changes that a lost guest did not bring back are
//! lost.
//!
//! In reading order: the guest (`machine.rs`), Firecracker's API (`api.rs`), the commands in it (`commands.rs`) and
//! the workspace (`sync.rs`); the messages (`frames.rs`) and the agent in the guest (`agent.rs`).

mod agent;
mod api;
mod commands;
mod frames;
mod machine;
mod sync;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Access, access};
use tokio::sync::OnceCell;
use wieldy_core::{Confinement, Level, SandboxError, SandboxRef};

pub(crate) use self::agent::{NAME as AGENT_NAME, serve_forever as serve_as_agent};
use self::machine::Machine;
pub(crate) use self::machine::enforcement;
use crate::cgroup::Hierarchy;
use crate::pool::{Backend, IdleLimits, Pool, id_for, sandbox_by_pool};
use crate::state_dir::{self, StateDir};
use crate::view::plan_cache::{OwnFolders, PlanCache};

/// The folders in which programs are looked for.
const FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The settings of the level `firecracker`.
#[derive(Debug, Clone)]
pub struct FirecrackerOptions {
    /// Firecracker's program; without it, the usual folders are searched.
    pub program: Option<PathBuf>,
    /// The guest's kernel, not compressed.
    pub kernel: Option<PathBuf>,
    /// The guest's root file system, as an image. It is never written to.
    pub rootfs: Option<PathBuf>,
    /// The path of this program in the root file system; its name there must be `wieldy-guest`.
    pub init: PathBuf,
    /// The device of the kernel's virtual machines.
    pub kvm: PathBuf,
    /// The folder of guests' files, which no guest ever sees.
    pub state: PathBuf,
    /// The home folder of the user who runs the executor; secrets in it are hidden where it is in the workspace.
    pub home: Option<PathBuf>,
    /// The idle time after which a session's guest is ended.
    pub idle_max: Duration,
    /// The limits of idle guests that are kept for sessions.
    pub idle_limits: IdleLimits,
}

impl FirecrackerOptions {
    /// Returns settings that keep idle guests for ten minutes; a kernel and a root file system must still be named.
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

/// The reason why no guest can be started, with a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirecrackerProblem {
    /// The first thing that is missing.
    pub problem: String,
    /// The advice for the user.
    pub hint: String,
}

/// Runs commands in virtual machines. Needs a Tokio runtime with I/O and time.
#[derive(Clone)]
pub struct Firecracker {
    pool: Arc<Pool<FirecrackerBackend>>,
}

sandbox_by_pool!(Firecracker);

/// Boots guests.
struct FirecrackerBackend {
    options: FirecrackerOptions,
    base: OnceCell<Base>,
}

/// The parts that all guests share, made for the first one.
struct Base {
    program: PathBuf,
    home: StateDir,
    hierarchy: Hierarchy,
}

impl Firecracker {
    /// Returns the level with these settings. Nothing is made before it is needed.
    pub fn new(options: FirecrackerOptions) -> Self {
        let idle_limits = options.idle_limits;
        Self { pool: Pool::new(FirecrackerBackend { options, base: OnceCell::new() }, idle_limits) }
    }

    /// Returns Firecracker's version, or the first thing that is missing. Boots no guest.
    pub fn probe(&self) -> Result<String, FirecrackerProblem> {
        self.pool.backend().options.probe().map(|(_, version)| version)
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

impl Backend for FirecrackerBackend {
    type Live = Machine;

    const WITHIN_REFUSED: Option<&'static str> = Some(
        "a machine cannot be made within another, whose limits it would not be held to; make one without a parent",
    );

    const STOPPED_WHILE_BUILT: Option<&'static str> =
        Some("firecracker: the run was stopped before its guest was ready");

    fn level(&self) -> Level {
        Level::Firecracker
    }

    fn idle_max(&self) -> Duration {
        self.options.idle_max
    }

    async fn build(
        self: &Arc<Self>,
        confinement: &Confinement,
        _outer: Option<&Machine>,
    ) -> Result<Arc<Machine>, SandboxError> {
        let base = self.base.get_or_try_init(|| self.make_base()).await?;
        let (home, state) = (self.options.home.clone(), Some(self.options.state.clone()));
        let plan = PlanCache::default().plan(confinement, &OwnFolders { home, state, private: None })?;
        let made = SandboxRef { id: id_for(&confinement.place, Level::Firecracker), level: Level::Firecracker };
        Machine::start(made, confinement, &self.options, base, &plan).await
    }
}

impl FirecrackerBackend {
    /// Checks that everything is there, makes the parts that all guests share, and removes guests of dead executors.
    async fn make_base(&self) -> Result<Base, SandboxError> {
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
            let doing = format!("firecracker: `{}`", options.state.display());
            let home = make().map_err(|error| SandboxError::creation(doing, error))?;
            let hierarchy = Hierarchy::find();
            hierarchy.sweep();
            Ok(Base { program, home, hierarchy })
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| SandboxError::creation("firecracker", error))?
    }
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

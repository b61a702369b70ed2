//! The arena of attacks: a workspace with secrets and files to break beside it, and sandboxes for it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use wieldy_core::secrets::PROTECTED;
use wieldy_core::{
    Command, Confinement, Ended, Exit, FileRules, Level, Mount, Network, Place, ResourceLimits, Sandbox, SandboxError,
    SessionKey, Stdin,
};
use wieldy_sandbox::{Native, NativeOptions, Oci, OciOptions};

use crate::world::{PATIENCE, Printed, alive, eventually};

/// A folder with a workspace and, beside it, files that the sandbox must not touch.
pub(crate) struct Arena {
    _root: tempfile::TempDir,
    pub(crate) root: PathBuf,
    pub(crate) workspace: PathBuf,
    /// A text that is in every secret, and in no other file.
    pub(crate) canary: String,
    /// The backend that runs scripts: `native`, unless the attack is on a container.
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) native: Arc<Native>,
    pub(crate) confinement: Confinement,
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) mark: String,
}

/// Makes a test of each function for the native level and for containers of runc.
macro_rules! attacks {
    ($($name:ident)*) => {
        mod native {
            $(#[tokio::test] async fn $name() { super::$name($crate::escape::arena::Arena::new()).await })*
        }
        mod runc {
            $(
                #[tokio::test]
                async fn $name() {
                    if let Some(arena) = $crate::escape::arena::Arena::of(wieldy_core::Level::Runc) {
                        super::$name(arena).await;
                    }
                }
            )*
        }
    };
}
pub(crate) use attacks;

/// The outcome of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) exit: Exit,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Shell functions: `attack` prints an error if its command succeeds, `twin` if its command fails.
const PREAMBLE: &str = r#"
attack() { if "$@" >/tmp/.said 2>&1 </dev/null; then echo "GOT THROUGH: $*"; cat /tmp/.said; fi; }
twin() { if ! "$@" >/tmp/.said 2>&1 </dev/null; then echo "TWIN FAILED: $*"; cat /tmp/.said; fi; }
"#;

impl Arena {
    pub(crate) fn new() -> Self {
        Self::with(0)
    }

    /// Makes an arena with this number of warm sandboxes.
    pub(crate) fn with(warm_sandboxes: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mark = format!("arena-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let temporary = tempfile::tempdir().unwrap();
        let root = temporary.path().canonicalize().unwrap();
        let canary = format!("canary of {mark}");
        for secret in
            ["home/.ssh/id_ed25519", "state/journal.db", "other/workspace/plans.txt", "workspace-2/file", "beside"]
        {
            let file = root.join(secret);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, &canary).unwrap();
        }
        let workspace = root.join("workspace");
        fs::create_dir(&workspace).unwrap();
        // These folders show that this user has every program whose settings are protected.
        for name in &PROTECTED {
            name.settings.iter().for_each(|folder| fs::create_dir_all(root.join("home").join(folder)).unwrap());
        }
        let options = NativeOptions {
            state: Some(root.join("state")),
            home: Some(root.join("home")),
            warm_sandboxes,
            warm_inits: warm_sandboxes,
            idle_max: Duration::from_secs(600),
            ..NativeOptions::default()
        };
        let environment = [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("MARK", &mark)];
        let confinement = Confinement {
            workspace: workspace.clone(),
            files: Arc::new(FileRules::default()),
            network: Network::None,
            limits: ResourceLimits { cpu_millicores: Some(2000), ..ResourceLimits::DEFAULT },
            place: Place::Own,
            place_limits: ResourceLimits::default(),
            grace: Duration::from_millis(300),
        };
        let native = Arc::new(Native::new(options));
        Self {
            _root: temporary,
            root,
            workspace,
            canary,
            sandbox: native.clone(),
            native,
            confinement,
            environment: environment.map(|(name, value)| (name.into(), value.into())).into(),
            mark,
        }
    }

    /// Makes an arena with containers of this level, if its runtime is installed.
    pub(crate) fn of(level: Level) -> Option<Self> {
        if !crate::oci::is_there(level) {
            return None;
        }
        let mut arena = Self::new();
        let (state, home) = (arena.root.join("state"), Some(arena.root.join("home")));
        arena.sandbox = Arc::new(Oci::new(OciOptions { home, ..OciOptions::new(level, state) }));
        Some(arena)
    }

    /// Mounts the attack program, which is this test binary, at `/attack`.
    pub(crate) fn with_program(mut self) -> Self {
        let source = std::env::current_exe().unwrap().canonicalize().unwrap();
        let mount = Mount { source, target: "/attack".into(), writable: false };
        self.confinement.files = Arc::new(FileRules { mounts: vec![mount], ..FileRules::default() });
        self
    }

    /// Waits until no sandbox is being built in advance: meanwhile placeholders are made in the workspace, and it
    /// cannot be removed.
    pub(crate) async fn rest(&self) {
        eventually(PATIENCE, "the next sandbox is built", || self.native.warm_sandboxes() > 0).await;
    }

    pub(crate) fn session(name: &str) -> Place {
        Place::Session(SessionKey { tenant: None, agent: "attacker".into(), session: name.into() })
    }

    pub(crate) fn confinement(&self, place: Place) -> Confinement {
        Confinement { place, ..self.confinement.clone() }
    }

    fn command(&self, script: &str) -> Command {
        Command {
            program: "bash".into(),
            arguments: vec!["-c".into(), format!("{PREAMBLE}{script}")],
            environment: self.environment.clone(),
            folder: PathBuf::new(),
            stdin: Stdin::Nothing,
            terminal: None,
        }
    }

    /// Runs a script to its end, and asserts that none of its processes is left.
    pub(crate) async fn run_in(&self, confinement: &Confinement, script: &str) -> Result<Ran, SandboxError> {
        self.run_stoppable(confinement, script, &Arc::default(), CancellationToken::new()).await
    }

    pub(crate) async fn run_stoppable(
        &self,
        confinement: &Confinement,
        script: &str,
        printed: &Arc<Printed>,
        stop: CancellationToken,
    ) -> Result<Ran, SandboxError> {
        let command = self.command(script);
        let running = self.sandbox.execute(&command, confinement, printed.clone(), stop);
        let exit = tokio::time::timeout(PATIENCE * 2, running).await.expect("the command hangs")?;
        Ok(Ran { exit, stdout: printed.stdout(), stderr: printed.stderr() })
    }

    /// Runs a script in a place, and asserts that it succeeds.
    pub(crate) async fn run(&self, place: Place, script: &str) -> String {
        let ran = self.run_in(&self.confinement(place), script).await.unwrap();
        assert_eq!((ran.exit.ended, ran.stderr.as_str()), (Ended::Code(0), ""), "{}", ran.stdout);
        ran.stdout
    }

    /// Runs a script of attacks and twins once in a sandbox of its own and twice in a session's. Each run must print
    /// `done`, and nothing else.
    pub(crate) async fn attack(&self, script: &str) {
        let script = format!("{script}\necho done");
        for place in [Place::Own, Self::session("one"), Self::session("one")] {
            let ran = self.run_in(&self.confinement(place.clone()), &script).await.unwrap();
            assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("done\n", ""), "{place:?}");
            assert!(!ran.stdout.contains(&self.canary) && !ran.stderr.contains(&self.canary), "{ran:?}");
        }
        assert_eq!(alive(&self.mark), Vec::<String>::new(), "processes are left");
    }

    /// Returns all files below the arena's root, except the workspace and state folders, as text. They must not change.
    pub(crate) fn outside(&self) -> String {
        let mut found = Vec::new();
        collect(&self.root, &self.workspace, &mut found);
        found.retain(|line| !line.contains("/state/runc-"));
        found.sort();
        found.join("\n")
    }
}

fn collect(folder: &Path, but: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        let about = fs::symlink_metadata(&path).unwrap();
        if about.is_dir() && path != but {
            collect(&path, but, found);
        }
        let content = if about.is_file() { fs::read_to_string(&path).unwrap() } else { String::new() };
        found.push(format!("{} {:?} {content}", path.display(), about.permissions()));
    }
}

/// Returns true if the tests run as root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Reports that a part of a test cannot run here.
pub(crate) fn say(line: &str) {
    wieldy_testkit::skip(line);
}

//! Shared by the tests: a command whose processes can be found, its output, and the suite that runs at every level.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use wieldy_core::{
    Command, Confinement, Exit, FileRules, Level, Network, OutputSink, Place, ResourceLimits, Sandbox, SandboxError,
    Stdin, Stream,
};
use wieldy_sandbox::{Native, NativeOptions, Unconfined};

use crate::oci;

/// Longest time that anything in these tests takes unless it hangs, even on an emulated processor (`cargo xtask vm`).
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A command in a workspace of its own. All its processes have its mark in their environment.
pub(crate) struct World {
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) workspace: tempfile::TempDir,
    pub(crate) command: Command,
    pub(crate) confinement: Confinement,
    pub(crate) printed: Arc<Printed>,
    pub(crate) stop: CancellationToken,
    mark: String,
}

impl World {
    pub(crate) fn new(program: &str, arguments: &[&str]) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self::marked(mark, program, arguments)
    }

    pub(crate) fn marked(mark: String, program: &str, arguments: &[&str]) -> Self {
        let workspace = tempfile::tempdir().unwrap();
        let environment = [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("MARK", &mark)]
            .map(|(name, value)| (name.into(), value.into()));
        let command = Command {
            program: program.into(),
            arguments: arguments.iter().map(|&word| word.into()).collect(),
            environment: BTreeMap::from(environment),
            folder: PathBuf::new(),
            stdin: Stdin::Nothing,
            terminal: None,
        };
        let confinement = Confinement {
            workspace: workspace.path().to_owned(),
            files: Arc::new(FileRules::default()),
            network: Network::Open,
            limits: ResourceLimits::DEFAULT,
            place: Place::Own,
            place_limits: ResourceLimits::default(),
            grace: Duration::from_millis(300),
        };
        let sandbox = backend();
        let network = match sandbox.level() {
            Level::None | Level::Native => Network::Open,
            _ => Network::None,
        };
        let confinement = Confinement { network, ..confinement };
        Self { sandbox, workspace, command, confinement, printed: Arc::default(), stop: CancellationToken::new(), mark }
    }

    /// Returns the level under test.
    pub(crate) fn level() -> Level {
        level().0
    }

    pub(crate) fn bash(script: &str) -> Self {
        Self::new("bash", &["-c", script])
    }

    pub(crate) fn stdin(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.command.stdin = Stdin::Bytes(bytes.into());
        self
    }

    pub(crate) fn grace(mut self, grace: Duration) -> Self {
        self.confinement.grace = grace;
        self
    }

    /// Runs the command to its end, and asserts that none of its processes is left.
    pub(crate) async fn run(&self) -> Result<Exit, SandboxError> {
        let running = self.sandbox.execute(&self.command, &self.confinement, self.printed.clone(), self.stop.clone());
        let exit = tokio::time::timeout(PATIENCE, running).await.expect("the command hangs");
        assert_eq!(self.alive(), Vec::<String>::new(), "processes are left");
        exit
    }

    /// Runs the command, which must not fail to run, and returns its standard output.
    pub(crate) async fn output(&self) -> String {
        self.run().await.unwrap();
        self.printed.stdout()
    }

    /// Starts the command in the background.
    pub(crate) fn start(self) -> (Arc<Self>, JoinHandle<Result<Exit, SandboxError>>) {
        let world = Arc::new(self);
        let running = tokio::spawn({
            let world = world.clone();
            async move { world.run().await }
        });
        (world, running)
    }

    /// Returns the living processes of this command, without zombies.
    pub(crate) fn alive(&self) -> Vec<String> {
        alive(&self.mark)
    }
}

/// Returns the living processes with this mark, without zombies.
pub(crate) fn alive(mark: &str) -> Vec<String> {
    let wanted = format!("MARK={mark}").into_bytes();
    let entries = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let marked = entries.filter(|process| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted)
    });
    marked
        .map(|process| {
            format!("{}: {}", process.display(), fs::read_to_string(process.join("comm")).unwrap_or_default())
        })
        .collect()
}

/// Returns the descendants of a process.
pub(crate) fn below(id: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let children: Vec<i32> =
        children.flat_map(|text| text.split_whitespace().map(|id| id.parse().unwrap()).collect::<Vec<_>>()).collect();
    children.into_iter().flat_map(|id| std::iter::once(id).chain(below(id))).collect()
}

/// The captured output of a command.
#[derive(Default)]
pub(crate) struct Printed {
    streams: Mutex<[Vec<u8>; 2]>,
    changed: tokio::sync::Notify,
}

impl Printed {
    pub(crate) fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.streams.lock().unwrap()[0]).into_owned()
    }

    pub(crate) fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.streams.lock().unwrap()[1]).into_owned()
    }

    /// Waits until standard output contains this text.
    pub(crate) async fn contains(&self, text: &str) {
        let waiting = async {
            while !self.stdout().contains(text) {
                self.changed.notified().await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{text:?} never came"));
    }
}

impl OutputSink for Printed {
    fn write(&self, stream: Stream, bytes: &[u8]) {
        self.streams.lock().unwrap()[stream as usize].extend_from_slice(bytes);
        self.changed.notify_one();
    }
}

/// Polls until the condition is true; panics after `patience`.
pub(crate) async fn eventually(patience: Duration, what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < patience, "not within {patience:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Makes a test of each case for every level: one suite that all levels have to pass. A case is a plain function. Cases
/// about their own process are `alone`: each runs in a process of its own.
macro_rules! conformance {
    (together: [$($case:ident)*]; alone: [$($alone:ident)*];) => {
        mod none {
            $crate::world::conformance!(@ wieldy_core::Level::None; $($case)*; $($alone)*);
        }
        mod native {
            $crate::world::conformance!(@ wieldy_core::Level::Native; $($case)*; $($alone)*);
        }
        mod runc {
            $crate::world::conformance!(@ wieldy_core::Level::Runc; $($case)*; $($alone)*);
        }
        mod gvisor {
            $crate::world::conformance!(@ wieldy_core::Level::Gvisor; $($case)*; $($alone)*);
        }
        #[cfg(feature = "firecracker")]
        mod firecracker {
            $crate::world::conformance!(@ wieldy_core::Level::Firecracker; $($case)*; $($alone)*);
        }
    };
    (@ $level:expr; $($case:ident)*; $($alone:ident)*) => {
        $(
            #[tokio::test]
            async fn $case() {
                $crate::world::at($level, stringify!($case), super::$case()).await;
            }
        )*
        $(
            #[test]
            fn $alone() {
                let name = concat!(module_path!(), "::", stringify!($alone)).trim_start_matches("it::");
                if $crate::world::can($level, stringify!($alone)) && $crate::world::in_own_process_at($level, name) {
                    super::$alone();
                }
            }
        )*
    };
}
pub(crate) use conformance;

tokio::task_local! {
    /// The level under test, and the state folder for levels that need one.
    static LEVEL: (Level, PathBuf);
}

/// Runs a case at this level.
pub(crate) async fn at(level: Level, name: &str, case: impl Future<Output = ()>) {
    if !can(level, name) {
        return;
    }
    let state = tempfile::tempdir().unwrap();
    LEVEL.scope((level, state.path().to_owned()), case).await;
    if is_oci(level) {
        oci::nothing_is_left(state.path()).await;
    }
}

/// Returns true if the case can run at this level on this machine; prints the reason if not.
pub(crate) fn can(level: Level, name: &str) -> bool {
    if let Some(reason) = oci::suite::exception(level, name) {
        oci::say(&format!("EXCEPTION: {level} cannot pass `{name}`: {reason}"));
        return false;
    }
    !is_oci(level) || oci::is_there(level)
}

fn is_oci(level: Level) -> bool {
    matches!(level, Level::Runc | Level::Gvisor)
}

const OWN_NAME: &str = "WIELDY_TEST_ALONE";
const OWN_LEVEL: &str = "WIELDY_TEST_LEVEL";
const OWN_STATE: &str = "WIELDY_TEST_STATE";

/// Returns the name of the test that this process runs alone.
pub(crate) fn own_name() -> String {
    std::env::var(OWN_NAME).unwrap()
}

/// Runs the test `name` again in a process of its own. Returns true in that process, where the test should go on.
pub(crate) fn in_own_process(name: &str) -> bool {
    in_own_process_at(Level::None, name)
}

/// Runs the test `name` again in a process of its own at this level; see [`in_own_process`].
pub(crate) fn in_own_process_at(level: Level, name: &str) -> bool {
    if std::env::var(OWN_NAME).as_deref() == Ok(name) {
        return true;
    }
    let state = tempfile::tempdir().unwrap();
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(OWN_NAME, name)
        .env(OWN_LEVEL, level.as_str())
        .env(OWN_STATE, state.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    false
}

/// Returns the level under test, and its state folder.
fn level() -> (Level, PathBuf) {
    let of_process = || {
        let level = std::env::var(OWN_LEVEL).map_or(Level::None, |level| level.parse().unwrap());
        (level, std::env::var_os(OWN_STATE).map(PathBuf::from).unwrap_or_default())
    };
    LEVEL.try_with(Clone::clone).unwrap_or_else(|_| of_process())
}

/// Returns a backend of the level under test.
fn backend() -> Arc<dyn Sandbox> {
    let (level, state) = level();
    match level {
        Level::Native => {
            Arc::new(Native::new(NativeOptions { warm_sandboxes: 0, warm_inits: 0, ..NativeOptions::default() }))
        }
        Level::None => Arc::new(Unconfined::default()),
        Level::Runc | Level::Gvisor => oci::suite::backend(level, &state),
        #[cfg(feature = "firecracker")]
        Level::Firecracker => Arc::new(crate::firecracker::Driver::new()),
        level => panic!("there are no tests of `{level}` yet"),
    }
}

/// Returns true if the file system of a path is in memory, so that the kernel counts no writes to a disk.
pub(crate) fn is_in_memory(path: &std::path::Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let kind = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        path.starts_with(fields[1]).then(|| (fields[1].len(), fields[2].to_owned()))
    };
    let (_, kind) = mounts.lines().filter_map(kind).max().expect("there is a root");
    ["rootfs", "tmpfs", "ramfs"].contains(&kind.as_str())
}

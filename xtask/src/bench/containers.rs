//! Benchmark of containers: a new container started by runc or runsc (gVisor) directly, and a call of ours in the
//! running container of a session. They take tens to hundreds of milliseconds, so they have few samples and a floor
//! measured in the same rounds.

use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use wieldy_core::{Executor, Level};
use wieldy_sandbox::{Oci, OciOptions};

use super::harness::{Contestant, Effort, compete};
use super::sandbox::{self, FORK, PROGRAM};
use super::table::Row;

/// A runtime to measure, with the names of its rows.
struct Kind {
    level: Level,
    program: &'static str,
    /// Options that make it do about the same as our driver does.
    options: &'static [&'static str],
    new: &'static str,
    live: &'static str,
    /// The goal for a call in a live session, as a multiple of fork and exec.
    goal: Option<f64>,
}

const KINDS: [Kind; 2] = [
    Kind {
        level: Level::Runc,
        program: "runc",
        options: &[],
        new: "runc, a new container",
        live: "a call in a session's container, runc",
        goal: None,
    },
    Kind {
        level: Level::Gvisor,
        program: "runsc",
        options: &["--network=none", "--ignore-cgroups"],
        new: "runsc (gVisor), a new container",
        live: "a call in a session's container, gVisor",
        goal: Some(30.0),
    },
];

/// Measures the runtimes that work here, and prints a warning for the others.
pub(super) fn measure(quick: bool, runtime: &Runtime) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let mut subjects = Vec::new();
    for kind in &KINDS {
        match Subject::new(kind, folder.path(), runtime) {
            Ok(subject) => subjects.push(subject),
            Err(problem) => eprintln!("{} does not work here, so it is left out: {problem:#}", kind.program),
        }
    }
    if subjects.is_empty() {
        return Ok(Vec::new());
    }
    let floor = Contestant::new(FORK, |times| sandbox::timed(times, || sandbox::by_hand(PROGRAM, &[])));
    let each = subjects.iter().flat_map(|subject| {
        [
            Contestant::new(subject.kind.new, |times| {
                sandbox::timed(times, || subject.bundle.run().expect("it ran before"))
            }),
            Contestant::new(subject.kind.live, |times| subject.call(times, runtime)),
        ]
    });
    let measured = compete(Effort::containers(quick), std::iter::once(floor).chain(each).collect());
    let rows =
        |kind: &Kind| [Row::timed(&measured, kind.new, FORK, None), Row::timed(&measured, kind.live, FORK, kind.goal)];
    Ok(subjects.iter().flat_map(|subject| rows(subject.kind)).collect())
}

struct Subject {
    kind: &'static Kind,
    bundle: Bundle,
    ours: Executor,
}

impl Subject {
    /// Prepares the measurement of one runtime. The error says why it does not work here.
    fn new(kind: &'static Kind, folder: &Path, runtime: &Runtime) -> Result<Self> {
        let [bundle, state, workspace] =
            ["bundle", "state", "workspace"].map(|part| folder.join(kind.program).join(part));
        std::fs::create_dir_all(&workspace)?;
        let bundle = Bundle::make(kind, bundle)?;
        bundle.run()?;
        let oci = Oci::new(OciOptions::new(kind.level, state));
        runtime.block_on(oci.probe()).map_err(|problem| anyhow::anyhow!("{problem}"))?;
        Ok(Self { kind, bundle, ours: sandbox::executor(&workspace, oci)? })
    }

    fn call(&self, times: u64, runtime: &Runtime) -> Duration {
        let calls = sandbox::repeat(times, self.ours.clone(), sandbox::call("True", Some("bench")));
        runtime.block_on(async { tokio::spawn(calls).await.expect("no call panics") })
    }
}

/// A container with the system's programs that runs one of them, with the configuration of `runc spec`.
struct Bundle {
    kind: &'static Kind,
    folder: PathBuf,
}

impl Bundle {
    fn make(kind: &'static Kind, folder: PathBuf) -> Result<Self> {
        let root = folder.join("rootfs");
        std::fs::create_dir_all(root.join("usr"))?;
        for name in ["bin", "lib", "lib64"] {
            std::os::unix::fs::symlink(Path::new("usr").join(name), root.join(name))?;
        }
        let drawn = Process::new(kind.program).arg("spec").current_dir(&folder).output();
        let drawn = drawn.with_context(|| format!("cannot start `{}`", kind.program))?;
        if !drawn.status.success() {
            bail!("`{} spec`: {}", kind.program, String::from_utf8_lossy(&drawn.stderr).trim());
        }
        let path = folder.join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!([PROGRAM]);
        let system = json!({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]});
        match &mut config["mounts"] {
            Value::Array(mounts) => mounts.insert(0, system),
            none => *none = json!([system]),
        }
        std::fs::write(&path, config.to_string())?;
        Ok(Self { kind, folder })
    }

    /// Creates the container, runs the program, and removes the container.
    fn run(&self) -> Result<()> {
        let Self { kind, folder } = self;
        let mut run = Process::new(kind.program);
        run.arg("--root").arg(folder.join("containers")).args(kind.options).arg("run").arg("--bundle").arg(folder);
        let ran = run.arg("wieldy-bench").stdin(std::process::Stdio::null()).output()?;
        if !ran.status.success() {
            bail!("`{} run`: {}", kind.program, String::from_utf8_lossy(&ran.stderr).trim());
        }
        Ok(())
    }
}

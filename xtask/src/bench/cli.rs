//! Benchmark of the command line: a call that is a process of its own, as in scripts and hooks, compared with `wieldy
//! --version` and bubblewrap.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::harness::{Contestant, Effort, compete};
use super::table::{Figure, Row};

const VERSION: &str = "wieldy --version";
const BUBBLEWRAP: &str = "bwrap --unshare-all";

/// The rows for a state folder: without calls in its history, and with many.
const NEW: [&str; 3] =
    ["wieldy call Read, new history", "wieldy run -- true, new history", "wieldy call Bash, new history"];
const USED: [&str; 3] =
    ["wieldy call Read, 1,000 calls", "wieldy run -- true, 1,000 calls", "wieldy call Bash, 1,000 calls"];

/// The arguments of each row, its goal as a multiple of its floor, and the floor.
const COMMANDS: [(&[&str], Option<f64>, &str); 3] = [
    (&["call", "Read", "path=note.txt"], Some(4.0), VERSION),
    (&["run", "--", "true"], Some(5.0), BUBBLEWRAP),
    (&["call", "Bash", "command=true"], None, BUBBLEWRAP),
];

/// Measures all rows and compares them with the goals.
pub(super) fn measure(quick: bool) -> Result<Vec<Row>> {
    // Not in `/tmp`, which may be in memory: writes to the history must reach a disk.
    let folder = tempfile::Builder::new().prefix("bench-cli-").tempdir_in(target())?;
    let workspace = folder.path().join("workspace");
    std::fs::create_dir(&workspace)?;
    std::fs::write(workspace.join("note.txt"), "a line\n".repeat(40))?;
    let here = Here { wieldy: target().join("dist/wieldy"), workspace };
    let states = [(folder.path().join("new"), NEW, 0), (folder.path().join("used"), USED, 1_000)];
    for (state, _, calls) in &states {
        here.fill(state, *calls)?;
    }
    let bubblewrap = ["--unshare-all", "--dev-bind", "/", "/", "true"];
    let has_bubblewrap = here.command(Path::new("bwrap"), &bubblewrap).status().is_ok_and(|status| status.success());
    if !has_bubblewrap {
        eprintln!("bubblewrap does not work here, so its ratios are left out: `apt-get install bubblewrap`");
    }
    let mut contestants = vec![Contestant::new(VERSION, |times| here.timed(times, &here.wieldy, &["--version"]))];
    if has_bubblewrap {
        contestants.push(Contestant::new(BUBBLEWRAP, |times| here.timed(times, Path::new("bwrap"), &bubblewrap)));
    }
    for (state, names, calls) in &states {
        for (name, (arguments, ..)) in names.iter().zip(COMMANDS) {
            let here = &here;
            contestants.push(Contestant::new(name, move |times| {
                let once = |_| {
                    if *calls == 0 {
                        // Every command starts with a new history.
                        let _ = std::fs::remove_dir_all(state);
                    }
                    here.timed(1, &here.wieldy, &[&["--state", &state.to_string_lossy()], arguments].concat())
                };
                (0..times).map(once).sum()
            }));
        }
    }
    let measured = compete(Effort::processes(quick), contestants);
    let mut rows = vec![Row {
        name: VERSION.into(),
        ours: Figure::Time(measured.spread(VERSION)),
        floor: None,
        ratio: None,
        goal: None,
    }];
    for names in [USED, NEW] {
        for (name, (_, goal, floor)) in names.into_iter().zip(COMMANDS) {
            if floor == VERSION || has_bubblewrap {
                // The goals are for a history that was used before: the tables of a new one are created only once.
                rows.push(Row::timed(&measured, name, floor, goal.filter(|_| names == USED)));
            }
        }
    }
    Ok(rows)
}

/// Returns the build folder, which is on the disk of this repository.
fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")
}

struct Here {
    wieldy: PathBuf,
    workspace: PathBuf,
}

impl Here {
    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.workspace).stdin(Stdio::null()).stdout(Stdio::null());
        // Without cargo's library search path, which every program would search.
        command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", &self.workspace);
        command.stderr(Stdio::null());
        command
    }

    fn timed(&self, times: u64, program: &Path, arguments: &[&str]) -> Duration {
        let mut command = self.command(program, arguments);
        let began = Instant::now();
        for _ in 0..times {
            let status = command.status().expect("the program can be started");
            assert!(status.success(), "{program:?} {arguments:?}: {status}");
        }
        began.elapsed()
    }

    /// Makes a history with this many calls in it.
    fn fill(&self, state: &Path, calls: usize) -> Result<()> {
        let batch = self.workspace.join("batch.jsonl");
        let call = "{\"tool\":\"Read\",\"arguments\":{\"path\":\"note.txt\"}}\n";
        for part in std::iter::repeat_n(100, calls / 100) {
            std::fs::write(&batch, call.repeat(part))?;
            let state = state.to_string_lossy();
            let mut command = self.command(&self.wieldy, &["--state", &state, "batch", "batch.jsonl"]);
            if !command.status().context("cannot start wieldy")?.success() {
                bail!("the history cannot be filled");
            }
        }
        Ok(())
    }
}

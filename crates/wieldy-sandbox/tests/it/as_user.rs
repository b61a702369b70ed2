//! Runs the tests of the native level again as an ordinary user, who owns nothing on this machine.
//!
//! Such a user cannot write to cgroups, so rlimits and the supervisor enforce the limits; the tests of limits take that
//! into account. Tests that need root print so.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::escape::arena::say;

/// A user and group id that own no files.
const NOBODY: u32 = 65534;

/// A copy of this test binary that every user can run, and folders that the ordinary user owns.
struct Stage {
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Stage {
    fn new() -> Self {
        // Not below `TMPDIR`: every user must be able to enter it.
        let folder = tempfile::Builder::new().prefix("wieldy-as-user-").tempdir_in("/tmp").unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = folder.path().join("it");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        for name in ["home", "tmp"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            chown(folder.path().join(name), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        Self { folder, program }
    }

    fn command(&self) -> Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(&self.program);
        command.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin");
        command.env("HOME", path("home")).env("TMPDIR", path("tmp")).current_dir(path("tmp"));
        // As root, `uid` also drops the supplementary groups.
        command.uid(NOBODY).gid(NOBODY);
        command
    }

    /// Returns the names of the tests that contain one of these texts.
    fn tests(&self, filters: &[&str]) -> Vec<String> {
        let listed = self.command().arg("--list").output().unwrap();
        let text = String::from_utf8(listed.stdout).unwrap();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        names.filter(|name| filters.iter().any(|filter| name.contains(filter))).map(str::to_owned).collect()
    }
}

/// Runs the tests whose names contain one of these texts as the ordinary user, each in a process of its own. There must
/// be at least `at_least`.
fn passes(filters: &[&str], at_least: usize) {
    if !rustix::process::geteuid().is_root() {
        return say("as another user: needs root; the tests themselves are run by whoever runs this");
    }
    let stage = Stage::new();
    let names = stage.tests(filters);
    assert!(names.len() >= at_least, "{names:?}");
    let mut failed = Vec::new();
    for name in &names {
        let ran = stage.command().args(["--exact", name, "--nocapture"]).output().unwrap();
        let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
        if !ran.status.success() || !said.contains("1 passed") {
            failed.push(format!("{name}\n{said}"));
        }
        let not_tried = said.lines().filter_map(|line| line.strip_prefix("SKIPPED: "));
        // Most of these need root or a cgroup that only root may write, and run as root beside this.
        not_tried.for_each(|line| crate::oci::say(&format!("as an ordinary user, {name}: {line}")));
    }
    assert!(
        failed.is_empty(),
        "{} of {} failed as an ordinary user\n{}",
        failed.len(),
        names.len(),
        failed.join("\n\n")
    );
    assert_eq!(left_in(&stage.folder.path().join("tmp")), Vec::<PathBuf>::new(), "temporary files are left");
}

fn left_in(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn every_promise_of_starting_and_measuring_holds() {
    passes(&["starting::native::", "measuring::native::", "leaving_nothing::native::"], 20);
}

#[test]
fn every_promise_of_sessions_holds() {
    passes(&["sessions::"], 8);
}

#[test]
fn every_promise_of_ending_holds() {
    passes(&["::ending::", "ending::native::", "escape::leaving"], 15);
}

#[test]
fn every_promise_of_private_folders_on_a_disk_holds() {
    passes(&["private_disk::"], 9);
}

#[test]
fn attacks_on_files_fail() {
    passes(&["escape::reading", "escape::writing", "escape::protected"], 12);
}

#[test]
fn attacks_by_way_of_git_fail() {
    passes(&["escape::bare"], 6);
}

#[test]
fn attacks_on_the_machine_fail() {
    passes(
        &[
            "escape::calls",
            "escape::neighbours",
            "escape::network",
            "escape::privileges",
            "escape::processes",
            "escape::proxied",
            "escape::refusing",
        ],
        15,
    );
}

#[test]
fn denials_are_reported() {
    passes(&["denials::native::"], 3);
}

#[test]
fn bombs_are_contained() {
    passes(&["escape::limits"], 10);
}

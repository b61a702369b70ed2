//! Private folders of native sandboxes on a disk: what programs can do there, and what is left.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use wieldy_core::{Ended, Limit, Mount, Network, Place, ResourceLimits, SessionKey};
use wieldy_sandbox::{Native, NativeOptions};

use crate::world::{PATIENCE, World, eventually};

const MIB: u64 = 1 << 20;

/// A disk for private folders, and a level that uses it.
struct Disk {
    folder: tempfile::TempDir,
    level: Arc<Native>,
}

impl Disk {
    fn new(warm: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = NativeOptions {
            folder: Some(folder.path().canonicalize().unwrap()),
            warm_sandboxes: warm,
            warm_inits: warm,
            ..NativeOptions::default()
        };
        Self { folder, level: Arc::new(Native::new(options)) }
    }

    fn bash(&self, place: Place, script: &str) -> World {
        let mut world = World::bash(script);
        world.sandbox = self.level.clone();
        world.confinement.network = Network::None;
        world.confinement.place = place;
        world
    }

    /// Returns the folders of sandboxes.
    fn sandboxes(&self) -> Vec<PathBuf> {
        let list = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let executors = list(self.folder.path().join("wieldy-sandboxes"));
        let inner = executors.flat_map(list);
        let of_runtimes = ["containers", "lent", "runtime"];
        inner.filter(|path| !of_runtimes.iter().any(|name| path.ends_with(name))).collect()
    }

    async fn is_empty(&self) {
        eventually(PATIENCE, "nothing is left on the disk", || self.sandboxes().is_empty()).await;
    }
}

fn session() -> Place {
    Place::Session(SessionKey { tenant: None, agent: "tester".into(), session: "one".into() })
}

#[tokio::test]
async fn private_folders_are_on_the_disk_until_their_sandbox_ends() {
    let disk = Disk::new(0);
    let write = "for folder in /tmp /var/tmp $HOME; do echo mine > $folder/file || exit 1; done; echo > /dev/shm/file";
    let writer = disk.bash(session(), write);
    writer.run().await.unwrap();
    let [sandbox] = disk.sandboxes().try_into().unwrap();
    let mut found: Vec<_> =
        fs::read_dir(&sandbox).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, ["home-agent", "tmp", "var-tmp"]);
    assert_eq!(fs::read_to_string(sandbox.join("tmp/file")).unwrap(), "mine\n");
    for above in sandbox.ancestors().take(3) {
        assert_eq!(fs::metadata(above).unwrap().mode() & 0o7777, 0o700, "{}", above.display());
    }
    // A later call of the session finds the files, and another sandbox does not.
    let mut first = disk.bash(session(), "cat /tmp/file; grep -E ' (/tmp|/var/tmp|/home/agent) ' /proc/self/mounts");
    first.confinement = writer.confinement.clone();
    let told = first.output().await;
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!((lines[0], lines.len()), ("mine", 4), "{told}");
    for line in &lines[1..] {
        let options: Vec<&str> = line.split(' ').nth(3).unwrap().split(',').collect();
        assert!(["nosuid", "nodev", "rw"].iter().all(|option| options.contains(option)), "{line}");
        assert!(!line.contains(" tmpfs ") || crate::world::is_in_memory(disk.folder.path()), "{line}");
    }
    let look = "cat /tmp/file /var/tmp/file $HOME/file 2>&1 | grep -c 'No such file'";
    assert_eq!(
        disk.bash(Place::Own, look).output().await,
        "3
"
    );
    let id = disk.level_ids().pop().unwrap();
    assert!(wieldy_core::Sandbox::destroy(&*disk.level, &id).await);
    disk.is_empty().await;
    let Disk { folder, level } = disk;
    drop((level, first, writer));
    eventually(PATIENCE, "the executor's folder is gone", || {
        fs::read_dir(folder.path().join("wieldy-sandboxes")).unwrap().next().is_none()
    })
    .await;
}

impl Disk {
    fn level_ids(&self) -> Vec<wieldy_core::SandboxId> {
        wieldy_core::Sandbox::list(&*self.level).into_iter().map(|one| one.sandbox.id).collect()
    }
}

#[tokio::test]
async fn warm_sandboxes_have_folders_of_their_own() {
    let disk = Disk::new(1);
    let first = disk.bash(Place::Own, "true");
    let world = |script: &str| {
        let mut world = disk.bash(Place::Own, script);
        world.confinement = first.confinement.clone();
        world
    };
    for _ in 0..3 {
        assert_eq!(world("test ! -e ~/left || echo there; echo > ~/left").output().await, "");
        eventually(PATIENCE, "one is built ahead", || disk.level.warm_sandboxes() == 1).await;
    }
    let folder = disk.folder.path().join("wieldy-sandboxes");
    drop(first);
    let Disk { folder: _kept, level } = disk;
    drop(level);
    eventually(PATIENCE, "nothing is left", || fs::read_dir(&folder).unwrap().next().is_none()).await;
}

#[tokio::test]
async fn a_call_that_writes_more_than_the_disk_limit_is_ended() {
    let disk = Disk::new(0);
    let limits = |bytes, files| ResourceLimits { disk_bytes: bytes, disk_files: files, ..ResourceLimits::DEFAULT };
    let bytes = (Limit::DiskBytes, limits(Some(16 * MIB), None));
    let files = (Limit::DiskFiles, limits(None, Some(500)));
    let mut told = Vec::new();
    for (place, script, (limit, limits)) in [
        (Place::Own, "while :; do head -c 1M /dev/zero >> /tmp/large; done", bytes),
        (session(), "for n in {1..400}; do head -c 1M /dev/zero > $HOME/$n; done; sleep 600", bytes),
        (
            Place::Own,
            "cd /var/tmp; mkdir closed; cd closed; chmod 0300 .; for n in {1..400}; do head -c 1M /dev/zero > $n; done; sleep 600",
            bytes,
        ),
        (Place::Own, "cd /tmp; n=0; while :; do echo > $((n++)); done", files),
        (session(), "cd; n=0; while :; do mkdir -p $((n++))/a/b/c; done", files),
    ] {
        let mut world = disk.bash(place, script);
        world.confinement.limits = limits;
        let exit = world.run().await.unwrap();
        let overrun = exit.overrun.unwrap_or_else(|| panic!("{script}: {:?}", exit.ended));
        assert_eq!(
            (overrun.limit, Some(overrun.allowed)),
            (limit, limits.disk_bytes.or(limits.disk_files)),
            "{script}"
        );
        // The folders of the sandbox count too, so the command's own files may be a few less than the limit.
        let used = overrun.session_used.unwrap_or(overrun.used);
        assert!(used >= overrun.allowed && overrun.used + 16 >= overrun.allowed, "{script}: {overrun:?}");
        told.push(exit.ended);
    }
    assert!(told.iter().all(|ended| *ended != Ended::Code(0)), "{told:?}");
}

/// The files that calls of a session leave count together, as they do in memory.
#[tokio::test]
async fn what_earlier_calls_left_counts_against_the_disk_limit() {
    let disk = Disk::new(0);
    let mut first = disk.bash(session(), "true");
    first.confinement.limits = ResourceLimits { disk_bytes: Some(16 * MIB), ..ResourceLimits::DEFAULT };
    let run = async |script: &str| {
        let mut world = disk.bash(session(), script);
        world.confinement = first.confinement.clone();
        world.run().await.unwrap()
    };
    let write = "head -c 10M /dev/zero > /tmp/$RANDOM$RANDOM; sync /tmp; sleep 0.2";
    assert_eq!(run(write).await.overrun, None);
    let second = run(write).await.overrun.unwrap();
    assert_eq!((second.limit, second.allowed), (Limit::DiskBytes, 16 * MIB));
    assert!(second.used > 5 * MIB, "only what it had room for: {second:?}");
    assert_eq!(run("rm /tmp/[0-9]*").await.overrun, None);
    assert_eq!(run(write).await.overrun, None);
}

/// This is what the folder is for: in memory, these files would count against the memory limit.
#[tokio::test]
async fn files_on_the_disk_are_not_memory_of_the_call() {
    let disk = Disk::new(0);
    let mut world =
        disk.bash(Place::Own, "for n in {1..12}; do head -c 16M /dev/zero > /tmp/$n; done; du -sm /tmp | cut -f1");
    world.confinement.limits = ResourceLimits { memory_bytes: Some(64 * MIB), ..ResourceLimits::DEFAULT };
    world.confinement.place_limits = ResourceLimits { memory_bytes: Some(96 * MIB), ..ResourceLimits::default() };
    let exit = world.run().await.unwrap();
    if crate::world::is_in_memory(disk.folder.path()) {
        wieldy_testkit::skip("the folder for temporary files is in memory here");
        return;
    }
    assert_eq!((exit.ended, exit.overrun), (Ended::Code(0), None));
    assert!(world.printed.stdout().trim().parse::<u64>().unwrap() >= 192, "{}", world.printed.stdout());
}

#[tokio::test]
async fn a_workspace_that_holds_the_folder_is_refused_and_a_mount_does_not_show_it() {
    let disk = Disk::new(0);
    let mut world = disk.bash(Place::Own, "true");
    world.confinement.workspace = disk.folder.path().canonicalize().unwrap();
    let refused = world.run().await.unwrap_err().message();
    assert!(refused.contains("must be apart from the workspace"), "{refused}");
    let kept = disk.bash(session(), "echo secret > /tmp/file");
    kept.run().await.unwrap();
    let mut world = disk.bash(Place::Own, "ls -A /seen; ls /seen/wieldy-sandboxes; find /seen -name file | wc -l");
    let files = Arc::make_mut(&mut world.confinement.files);
    let source = disk.folder.path().canonicalize().unwrap();
    files.mounts.push(Mount { source, target: "/seen".into(), writable: true });
    world.run().await.unwrap();
    assert_eq!(world.printed.stdout(), "wieldy-sandboxes\n0\n");
    assert!(world.printed.stderr().contains("Permission denied"), "{}", world.printed.stderr());
}

#[tokio::test]
async fn a_link_in_the_place_is_refused() {
    let disk = Disk::new(0);
    let elsewhere = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), disk.folder.path().join("wieldy-sandboxes")).unwrap();
    let refused = disk.bash(Place::Own, "true").run().await.unwrap_err().message();
    assert!(refused.contains("is a link or no folder"), "{refused}");
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn whatever_a_program_leaves_is_removed_with_its_sandbox() {
    let disk = Disk::new(0);
    let script =
        "cd /tmp; mkdir -p closed/in; echo > closed/in/file; chmod 0 closed/in closed; ln -s / link; mkfifo pipe
        python3 -c '
import os
for _ in range(1500):
    os.mkdir(\"x\"); os.chdir(\"x\")
'; echo left";
    let world = disk.bash(Place::Own, script);
    assert_eq!(world.output().await, "left\n");
    disk.is_empty().await;
}

/// The sandbox is emptied by its fork server after the executor was killed, and what a killed fork server left is
/// removed by the next level with this folder.
#[tokio::test]
async fn the_next_start_removes_what_a_killed_executor_left() {
    let disk = Disk::new(0);
    let dead = disk.folder.path().join("wieldy-sandboxes/native-4000000000-0/native-4000000000-1/tmp");
    fs::create_dir_all(&dead).unwrap();
    fs::write(dead.join("left"), "").unwrap();
    let own = disk.folder.path().join("wieldy-sandboxes");
    fs::set_permissions(&own, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let folder = disk.folder.path().canonicalize().unwrap();
    let next = Native::new(NativeOptions { folder: Some(folder), ..NativeOptions::default() });
    eventually(Duration::from_secs(30), "it is removed", || fs::read_dir(&own).unwrap().next().is_none()).await;
    drop(next);
}

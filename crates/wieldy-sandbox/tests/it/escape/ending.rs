//! Tests promise 9: nothing is left after a call, a destroyed sandbox, a killed executor or a killed helper process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio_util::sync::CancellationToken;
use wieldy_core::{Confinement, Ended, Network, Place, Sandbox};

use super::arena::{Arena, is_root};
use crate::world::{PATIENCE, Printed, alive, below, eventually};

const STUBBORN: &str = "trap '' TERM HUP INT; (setsid setsid bash -c 'trap \"\" TERM; exec sleep 1000' <&- >&- 2>&- &); \
                        (sleep 1000 &); echo ready; while :; do sleep 0.1; done";

/// Runs scripts in the background and waits until each is ready.
async fn started(
    arena: &Arc<Arena>,
    place: Place,
    script: &'static str,
) -> (CancellationToken, tokio::task::JoinHandle<Result<super::arena::Ran, wieldy_core::SandboxError>>) {
    let (printed, stop) = (Arc::<Printed>::default(), CancellationToken::new());
    let running = tokio::spawn({
        let (arena, printed, stop) = (arena.clone(), printed.clone(), stop.clone());
        async move { arena.run_stoppable(&arena.confinement(place), script, &printed, stop).await }
    });
    printed.contains("ready").await;
    (stop, running)
}

/// P-SBX-10, P-SBX-11, P-SBX-18.
#[tokio::test]
async fn a_command_that_resists_is_gone_when_its_call_is_over() {
    let arena = Arc::new(Arena::new());
    let scripts = [
        STUBBORN,
        "echo ready; kill -STOP $$; sleep 1000",
        "trap '' TERM; echo ready; kill -STOP $PPID; while :; do kill -STOP $$; done",
        "trap '' TERM; echo ready; prlimit --pid $PPID --cpu=0:0; kill -9 $PPID 1; while :; do :; done",
        "trap '' TERM; python3 -c 'import ctypes; ctypes.CDLL(None).prctl(36, 1)' ; echo ready; (while :; do (sleep 1000 &) ; sleep 0.05; done) & sleep 1000",
    ];
    for place in [Place::Own, Arena::session("one")] {
        for script in scripts {
            let (stop, running) = started(&arena, place.clone(), script).await;
            eventually(PATIENCE, "the test sees the processes it is about", || !alive(&arena.mark).is_empty()).await;
            stop.cancel();
            running.await.unwrap().unwrap();
            assert_eq!(alive(&arena.mark), Vec::<String>::new(), "{script}");
        }
        // A command that ends by itself and leaves processes.
        let left = "(setsid sleep 1000 <&- >&- 2>&- &); (trap '' TERM; sleep 1000) & sleep 1000 & echo bye; exit 3";
        let ran = arena.run_in(&arena.confinement(place.clone()), left).await.unwrap();
        assert_eq!((ran.exit.ended, ran.stdout.as_str()), (Ended::Code(3), "bye\n"));
        assert_eq!(alive(&arena.mark), Vec::<String>::new());
        // A command without input gets the end of file at once.
        assert_eq!(arena.run(place, "cat; read line || echo end").await, "end\n");
    }
}

#[tokio::test]
async fn a_destroyed_sandbox_takes_its_running_commands_with_it() {
    let arena = Arc::new(Arena::new());
    let (_stop, running) = started(&arena, Arena::session("one"), STUBBORN).await;
    let id = arena.native.list()[0].sandbox.id.clone();
    assert!(arena.native.destroy(&id).await);
    assert_eq!(alive(&arena.mark), Vec::<String>::new());
    assert!(running.await.unwrap().unwrap_err().is_crash());
    assert!(!arena.native.destroy(&id).await);
}

/// Returns the descendants of this process with this name.
fn helpers(name: &str) -> Vec<i32> {
    let comm = |id: &i32| fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|comm| comm.trim() == name);
    below(std::process::id() as i32).into_iter().filter(comm).collect()
}

fn kill(id: i32) {
    kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
}

/// The children of a helper inherit its descriptors 0 to 2. If one were a socket, its other end would never see the end
/// of file.
#[tokio::test]
async fn the_standard_streams_of_helpers_lead_nowhere() {
    if !is_root() {
        return super::arena::say("the standard streams of helpers: only root may look at them");
    }
    let arena = Arc::new(Arena::with(1));
    for place in [Arena::session("one"), Place::Own] {
        arena.run(place, "true").await;
    }
    arena.rest().await;
    for name in ["wieldy-forkserv", "wieldy-init", "wieldy-supervis"] {
        let found = helpers(name);
        assert!(!found.is_empty(), "{name}");
        for (id, number) in found.iter().flat_map(|id| [0, 1, 2].map(|number| (id, number))) {
            let leads_to = fs::read_link(format!("/proc/{id}/fd/{number}")).unwrap();
            assert_eq!(leads_to, Path::new("/dev/null"), "{name} {number}");
        }
    }
}

#[tokio::test]
async fn when_a_helper_is_killed_everything_in_its_care_goes_and_the_next_call_works() {
    for name in ["wieldy-supervis", "wieldy-init", "wieldy-forkserv"] {
        for place in [Place::Own, Arena::session("one")] {
            let arena = Arc::new(Arena::new());
            let (_stop, running) = started(&arena, place.clone(), STUBBORN).await;
            // Helpers of the round before may still be ending.
            eventually(Duration::from_secs(5), "one helper is left", || helpers(name).len() == 1).await;
            kill(helpers(name)[0]);
            let lost = running.await.unwrap();
            assert!(lost.as_ref().is_err_and(|error| error.is_crash()), "{name}: {lost:?}");
            eventually(Duration::from_secs(5), "all are gone", || alive(&arena.mark).is_empty()).await;
            assert_eq!(arena.run(place, "echo on").await, "on\n", "{name}");
        }
    }
}

/// P-SBX-20; the tests of `wieldy-store` check the records after a kill.
// Shows: B5.3
#[test]
fn when_the_executor_is_killed_nothing_of_twenty_sandboxes_is_left() {
    const NAME: &str = "escape::ending::when_the_executor_is_killed_nothing_of_twenty_sandboxes_is_left";
    const VARIABLE: &str = "WIELDY_TEST_EXECUTOR";
    if let Ok(words) = std::env::var(VARIABLE) {
        let (mark, workspace) = words.split_once(' ').unwrap();
        return execute(mark, Path::new(workspace));
    }
    let mark = format!("executor-{}", std::process::id());
    let temporary = tempfile::tempdir().unwrap();
    let workspace = temporary.path().canonicalize().unwrap().join("workspace");
    fs::create_dir(&workspace).unwrap();
    let mut executor = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(VARIABLE, format!("{mark} {}", workspace.display()))
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let id = executor.id() as i32;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let named = format!("wieldy-{id}-");
    runtime.block_on(async {
        eventually(Duration::from_secs(40), "all are running", || alive(&mark).len() >= 60).await;
        assert!(workspace.join(".claude").exists(), "the test does not see what is held");
        let helpers = below(id);
        assert!(
            helpers.len() > 40 && (!is_root() || groups().iter().any(|group| group.to_string_lossy().contains(&named)))
        );
        executor.kill().unwrap();
        executor.wait().unwrap();
        eventually(Duration::from_secs(5), "all are gone", || alive(&mark).is_empty()).await;
        let gone = || helpers.iter().all(|id| !Path::new(&format!("/proc/{id}")).exists());
        eventually(Duration::from_secs(5), "the helpers are gone", gone).await;
        let empty = || fs::read_dir(&workspace).unwrap().next().is_none();
        eventually(Duration::from_secs(5), "nothing is held", empty).await;
        // A killed executor cannot remove its own cgroup, so the next executor sweeps it.
        let arena = Arena::new();
        arena.run(Place::Own, "true").await;
        drop(arena);
        let none = || !groups().iter().any(|group| group.to_string_lossy().contains(&named));
        eventually(Duration::from_secs(10), "no groups are left", none).await;
    });
}

/// The next executor may start in another cgroup than the killed one.
#[tokio::test]
async fn cgroups_that_a_dead_executor_left_in_a_sibling_cgroup_are_removed() {
    let memberships = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = memberships.lines().find_map(|line| line.split_once(":memory:")).map(|(_, path)| path.trim_matches('/'));
    let Some(own) = own.map(|path| Path::new("/sys/fs/cgroup/memory").join(path)).filter(|own| own.is_dir()) else {
        return super::arena::say("groups of dead executors: there is no cgroup v1 with memory here");
    };
    let beside = own.join(format!("beside-{}", std::process::id()));
    if !is_root() || fs::create_dir(&beside).is_err() {
        return super::arena::say("groups of dead executors: groups cannot be made here");
    }
    // No process has the id in the first name. The process of the second lives, and the other names are not those of
    // executors.
    let start = fs::read_to_string("/proc/self/stat").unwrap();
    let start = start.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned();
    let living = format!("wieldy-{}-{start}-999", std::process::id());
    let (dead, others) = (beside.join("wieldy-4194999-1-0"), [living.as_str(), "wieldy-main", "other-4194999-1-0"]);
    fs::create_dir_all(dead.join("native-1")).unwrap();
    others.iter().for_each(|name| fs::create_dir(beside.join(name)).unwrap());
    Arena::new().run(Place::Own, "true").await;
    eventually(Duration::from_secs(10), "the group of the dead is gone", || !dead.exists()).await;
    let left = others.map(|name| beside.join(name).exists());
    others.iter().for_each(|name| fs::remove_dir(beside.join(name)).unwrap());
    fs::remove_dir(&beside).unwrap();
    assert_eq!(left, [true; 3]);
}

fn execute(mark: &str, workspace: &Path) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut arena = Arena::new();
        arena.environment.insert("MARK".into(), mark.to_owned());
        arena.confinement.workspace = workspace.to_owned();
        let arena = Arc::new(arena);
        let runs = (0..20).map(|number| {
            let arena = arena.clone();
            // Each session has two sandboxes, one per network.
            let place = if number % 2 == 0 { Place::Own } else { Arena::session(&(number / 4).to_string()) };
            let network = if number % 4 == 3 { Network::Open } else { Network::None };
            tokio::spawn(async move {
                let confinement = Confinement { network, ..arena.confinement(place) };
                let printed = Arc::<Printed>::default();
                let _ = arena.run_stoppable(&confinement, STUBBORN, &printed, CancellationToken::new()).await;
            })
        });
        futures_util::future::join_all(runs.collect::<Vec<_>>()).await;
    });
}

/// Returns the cgroups of executors.
pub(super) fn groups() -> std::collections::BTreeSet<PathBuf> {
    fn find(folder: &Path, depth: usize, found: &mut std::collections::BTreeSet<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if ["native-", "wieldy-"].iter().any(|name| entry.file_name().to_string_lossy().starts_with(name)) {
                    found.insert(entry.path());
                }
                if depth > 0 {
                    find(&entry.path(), depth - 1, found);
                }
            }
        }
    }
    let mut found = Default::default();
    find(Path::new("/sys/fs/cgroup"), 8, &mut found);
    found
}

//! Promises of the pool of sandboxes, which every level with sandboxes that stay must keep. Each case runs with real
//! sandboxes of the native level, of runc and of gVisor, and with the stand-in for Firecracker.

use std::fs;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wieldy_core::{
    Ended, Level, Limit, Network, Overrun, Place, ResourceLimits, Sandbox, SandboxChange, SandboxError, SessionKey,
};
use wieldy_sandbox::{Native, NativeOptions, Oci, OciOptions};

use crate::oci;
use crate::world::{PATIENCE, World, eventually};

/// Makes a test of each case for every level that has a pool.
macro_rules! at_each_level {
    ($($case:ident)*) => {
        mod native {
            $(#[tokio::test(flavor = "multi_thread")] async fn $case() { super::$case(wieldy_core::Level::Native).await })*
        }
        mod runc {
            $(#[tokio::test(flavor = "multi_thread")] async fn $case() { super::$case(wieldy_core::Level::Runc).await })*
        }
        mod gvisor {
            $(#[tokio::test(flavor = "multi_thread")] async fn $case() { super::$case(wieldy_core::Level::Gvisor).await })*
        }
        #[cfg(feature = "firecracker")]
        mod firecracker {
            $(#[tokio::test(flavor = "multi_thread")] async fn $case() { super::$case(wieldy_core::Level::Firecracker).await })*
        }
    };
}

at_each_level! {
    a_sandbox_stays_while_another_is_made_within_it
    a_replaced_secret_is_not_seen_by_what_runs
    calls_of_a_session_share_its_disk_quota
    calls_at_the_end_of_the_idle_time_all_run
    idle_sandboxes_go_and_their_end_is_reported
    each_sandbox_that_was_reported_is_reported_gone_once
    sandboxes_of_a_runtime_that_stops_are_reported_gone
}

/// A level whose idle sandboxes go after this time.
struct Pooled {
    sandbox: Arc<dyn Sandbox>,
    state: tempfile::TempDir,
    level: Level,
}

impl Pooled {
    fn new(level: Level, idle_max: Duration) -> Option<Self> {
        let state = tempfile::tempdir().unwrap();
        let sandbox: Arc<dyn Sandbox> = match level {
            Level::Native => {
                let options = NativeOptions { warm_sandboxes: 0, warm_inits: 0, idle_max, ..NativeOptions::default() };
                Arc::new(Native::new(options))
            }
            #[cfg(feature = "firecracker")]
            Level::Firecracker => Arc::new(crate::firecracker::Driver::with(|mut options| {
                options.idle_max = idle_max;
                options
            })),
            _ if !oci::is_there(level) => return None,
            _ => Arc::new(Oci::new(OciOptions { idle_max, ..OciOptions::new(level, state.path().to_owned()) })),
        };
        Some(Self { sandbox, state, level })
    }

    /// Returns the changes that the level reports from now on.
    fn listen(&self) -> Changes {
        let changes = Changes::default();
        self.sandbox.listen({
            let changes = Arc::clone(&changes);
            Arc::new(move |change| changes.lock().unwrap().push(change))
        });
        changes
    }

    /// A script in a place of this level.
    fn bash(&self, place: Place, script: &str) -> World {
        let mut world = World::bash(script);
        world.sandbox = Arc::clone(&self.sandbox);
        world.confinement.network = Network::None;
        world.confinement.place = place;
        world
    }

    /// A script in the workspace of another one.
    fn beside(&self, first: &World, script: &str) -> World {
        let mut world = self.bash(first.confinement.place.clone(), script);
        world.confinement = first.confinement.clone();
        world
    }

    /// Drops the level, after which nothing of it may be left.
    async fn close(self) {
        let Self { sandbox, state, level } = self;
        drop(sandbox);
        if matches!(level, Level::Runc | Level::Gvisor) {
            oci::nothing_is_left(state.path()).await;
        }
    }
}

/// The reported changes, in order.
type Changes = Arc<Mutex<Vec<SandboxChange>>>;

/// Waits until as many sandboxes are reported gone as were reported, and asserts that each was reported gone once.
/// Returns the number of sandboxes.
async fn all_are_gone(changes: &Changes) -> usize {
    let told = || changes.lock().unwrap().clone();
    let made = || {
        let made = told().into_iter().filter_map(|change| match change {
            SandboxChange::Created(made) => Some(made),
            SandboxChange::Destroyed(_) => None,
        });
        made.collect::<Vec<_>>()
    };
    eventually(PATIENCE, "an end for each", || told().len() == 2 * made().len()).await;
    let told = told();
    let made = made();
    for one in &made {
        let is_about = |change: &&SandboxChange| match change {
            SandboxChange::Created(of) | SandboxChange::Destroyed(of) => of == one,
        };
        let of_one: Vec<_> = told.iter().filter(is_about).cloned().collect();
        assert_eq!(of_one, [SandboxChange::Created(one.clone()), SandboxChange::Destroyed(one.clone())]);
    }
    made.len()
}

const LONG: Duration = Duration::from_secs(600);

fn session(name: &str) -> Place {
    Place::Session(SessionKey { tenant: None, agent: "tester".into(), session: name.into() })
}

/// A sandbox is made in longer than others may be idle; the one that it is made within is in use meanwhile.
async fn a_sandbox_stays_while_another_is_made_within_it(level: Level) {
    let Some(pooled) = Pooled::new(level, Duration::from_millis(50)) else { return };
    for _ in 0..3 {
        let mut world = pooled.bash(Place::Own, ":");
        let outer = pooled.sandbox.create(&world.confinement).await.unwrap().sandbox.id;
        world.confinement.place = Place::Sandbox(outer);
        let inner = pooled.sandbox.create(&world.confinement).await;
        match level {
            Level::Firecracker => assert!(inner.unwrap_err().message().contains("cannot be made within another")),
            _ => drop(inner.unwrap()),
        }
    }
    pooled.close().await;
}

/// A mount covers a file and not a name: where a person replaces a hidden file, the new one lies open in a sandbox
/// that shows the workspace, so what runs there is ended. A guest has a copy without the hidden file, and goes on.
async fn a_replaced_secret_is_not_seen_by_what_runs(level: Level) {
    let Some(pooled) = Pooled::new(level, LONG) else { return };
    for place in [session("one"), Place::Own] {
        let world = pooled.bash(place, "echo ready; sleep 4; cat .env; echo late");
        let secret = world.workspace.path().join(".env");
        fs::write(&secret, "old canary").unwrap();
        let (world, running) = world.start();
        world.printed.contains("ready").await;
        let new = world.workspace.path().join("new");
        fs::write(&new, "new canary").unwrap();
        fs::rename(&new, &secret).unwrap();
        let ran = running.await.unwrap();
        let printed = world.printed.stdout();
        if level == Level::Firecracker {
            assert_eq!((ran.unwrap().ended, printed.as_str()), (Ended::Code(0), "ready\nlate\n"));
        } else {
            assert_eq!(printed, "ready\n", "{ran:?}");
            let Err(SandboxError::Crashed { reason, .. }) = ran else { panic!("{ran:?}") };
            let path = secret.canonicalize().unwrap();
            let expected =
                "was replaced on the machine, and the sandbox hides or protects it, so its commands were ended";
            assert_eq!(reason, format!("`{}` {expected}; call again for a new one", path.display()));
        }
        assert_eq!(pooled.beside(&world, "cat .env 2>/dev/null; echo again").output().await, "again\n");
    }
    pooled.close().await;
}

async fn calls_of_a_session_share_its_disk_quota(level: Level) {
    let Some(pooled) = Pooled::new(level, LONG) else { return };
    let make =
        |folder: &str| format!("mkdir {folder} && cd {folder} && for number in {{1..1200}}; do echo > $number; done");
    let mut world = pooled.bash(session("one"), &make("first"));
    world.confinement.place_limits = ResourceLimits { disk_files: Some(2000), ..ResourceLimits::default() };
    let first = world.run().await.unwrap();
    assert_eq!((first.ended, first.overrun), (Ended::Code(0), None));
    let mut told = None;
    for number in 0..10 {
        // Files of the last tick of the clock would be taken for this call's.
        tokio::time::sleep(Duration::from_millis(100)).await;
        // While other tests remove files from the same file system, it looks as if none had been made.
        told = pooled.beside(&world, &make(&number.to_string())).run().await.unwrap().overrun;
        if told.is_some() {
            break;
        }
    }
    let Some(Overrun { limit: Limit::DiskFiles, allowed: 2000, session_used: Some(all), .. }) = told else {
        panic!("{told:?}")
    };
    assert!(all > 2000, "{all}");
    // Another session has its own quota.
    let mut other = pooled.beside(&world, &make("other"));
    other.confinement.place = session("two");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(other.run().await.unwrap().overrun, None);
    drop((world, other));
    pooled.close().await;
}

async fn calls_at_the_end_of_the_idle_time_all_run(level: Level) {
    let Some(pooled) = Pooled::new(level, Duration::from_millis(60)) else { return };
    let world = pooled.bash(session("one"), "echo fine");
    for round in 0..12 {
        let again = pooled.beside(&world, "echo fine");
        let exit = again.run().await.unwrap();
        assert_eq!((exit.ended, again.printed.stdout().as_str()), (Ended::Code(0), "fine\n"));
        tokio::time::sleep(Duration::from_millis(40 + 5 * (round % 8))).await;
    }
    drop(world);
    pooled.close().await;
}

async fn idle_sandboxes_go_and_their_end_is_reported(level: Level) {
    let Some(pooled) = Pooled::new(level, Duration::from_millis(200)) else { return };
    let changes = pooled.listen();
    let world = pooled.bash(session("one"), ":");
    let session = world.run().await.unwrap().sandbox;
    let mut other = pooled.beside(&world, ":");
    other.confinement.place = Place::Own;
    let own = other.run().await.unwrap().sandbox;
    drop((world, other));
    eventually(PATIENCE, "both are gone", || pooled.sandbox.list().is_empty()).await;
    assert_eq!(all_are_gone(&changes).await, 2);
    assert!([session, own].iter().all(|one| changes.lock().unwrap().contains(&SandboxChange::Destroyed(one.clone()))));
    pooled.close().await;
}

/// The ways in which a sandbox ends while its level lives, and then the end of the level.
async fn each_sandbox_that_was_reported_is_reported_gone_once(level: Level) {
    let Some(pooled) = Pooled::new(level, LONG) else { return };
    let changes = pooled.listen();
    // The end of its only call, a program that does not start, and a call that is stopped.
    pooled.bash(Place::Own, ":").run().await.unwrap();
    let mut missing = pooled.bash(Place::Own, ":");
    missing.command.program = "no-such-program".into();
    missing.run().await.unwrap_err();
    let (stopped, running) = pooled.bash(Place::Own, "echo begun; sleep 600").start();
    stopped.printed.contains("begun").await;
    stopped.stop.cancel();
    running.await.unwrap().unwrap();
    // A call whose future is dropped.
    let (dropped, running) = pooled.bash(Place::Own, "echo begun; sleep 600").start();
    dropped.printed.contains("begun").await;
    running.abort();
    assert_eq!(all_are_gone(&changes).await, 4);
    // One with a name that is destroyed, and one within it where that is possible.
    let mut world = pooled.bash(Place::Own, ":");
    let outer = pooled.sandbox.create(&world.confinement).await.unwrap().sandbox.id;
    world.confinement.place = Place::Sandbox(outer.clone());
    let inner = usize::from(pooled.sandbox.create(&world.confinement).await.is_ok());
    assert!(pooled.sandbox.destroy(&outer).await);
    assert_eq!(all_are_gone(&changes).await, 5 + inner);
    // Idle ones of a session and with a name, when the level is dropped.
    let kept = pooled.bash(session("one"), ":");
    kept.run().await.unwrap();
    pooled.sandbox.create(&pooled.bash(Place::Own, ":").confinement).await.unwrap();
    assert_eq!(pooled.sandbox.list().len(), 2);
    drop((stopped, dropped, world, kept, missing));
    pooled.close().await;
    assert_eq!(all_are_gone(&changes).await, 7 + inner);
}

/// A program that ends stops its runtime while sandboxes are in use, being cleaned up or idle.
async fn sandboxes_of_a_runtime_that_stops_are_reported_gone(level: Level) {
    let Some(pooled) = Pooled::new(level, LONG) else { return };
    let changes = pooled.listen();
    let stopping = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (busy, _) = pooled.bash(Place::Own, "echo begun; sleep 600").start();
            busy.printed.contains("begun").await;
            pooled.bash(session("one"), ":").run().await.unwrap();
            pooled.bash(Place::Own, ":").run().await.unwrap();
        });
        runtime.shutdown_timeout(Duration::from_millis(100));
        pooled
    });
    let pooled = tokio::task::spawn_blocking(|| stopping.join().unwrap()).await.unwrap();
    pooled.close().await;
    assert_eq!(all_are_gone(&changes).await, 3);
}

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
    let changes = Arc::<Mutex<Vec<SandboxChange>>>::default();
    pooled.sandbox.listen({
        let changes = Arc::clone(&changes);
        Arc::new(move |change| changes.lock().unwrap().push(change))
    });
    let world = pooled.bash(session("one"), ":");
    let session = world.run().await.unwrap().sandbox;
    let mut other = pooled.beside(&world, ":");
    other.confinement.place = Place::Own;
    let own = other.run().await.unwrap().sandbox;
    drop((world, other));
    eventually(PATIENCE, "both are gone", || pooled.sandbox.list().is_empty() && changes.lock().unwrap().len() == 4)
        .await;
    let told = changes.lock().unwrap().clone();
    for one in [session, own] {
        let of_one: Vec<_> = told
            .iter()
            .filter(|change| matches!(change, SandboxChange::Created(of) | SandboxChange::Destroyed(of) if *of == one))
            .cloned()
            .collect();
        assert_eq!(of_one, [SandboxChange::Created(one.clone()), SandboxChange::Destroyed(one)]);
    }
    pooled.close().await;
}

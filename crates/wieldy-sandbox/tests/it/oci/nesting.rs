//! Tests limits that hold for several containers together: nested containers, and all containers of a session.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};

use wieldy_core::{
    Confinement, Ended, Level, Network, Place, ResourceLimits, Sandbox, SandboxChange, SandboxId, SandboxStatus,
};

use super::{Driver, session};
use crate::world::World;

with_each_runtime! {
    a_container_that_is_made_within_another_is_one_of_its_own
    a_container_goes_with_the_one_that_it_was_made_within
    all_containers_of_a_session_share_its_memory
}

const MIB: u64 = 1 << 20;

fn memory(mib: u64) -> ResourceLimits {
    ResourceLimits { memory_bytes: Some(mib * MIB), ..ResourceLimits::default() }
}

impl Driver {
    async fn create(&self, world: &World, place: Place, place_limits: ResourceLimits) -> SandboxStatus {
        let confinement = Confinement { place, place_limits, ..world.confinement.clone() };
        self.oci.create(&confinement).await.unwrap()
    }

    async fn said(&self, world: &World, id: &SandboxId, script: &str) -> String {
        let mut inside = self.bash_beside(world, script);
        inside.confinement.place = Place::Sandbox(id.clone());
        inside.output().await
    }

    fn ids(&self) -> BTreeSet<SandboxId> {
        self.oci.list().into_iter().map(|one| one.sandbox.id).collect()
    }
}

/// Returns a command that holds 150 MiB until this file exists.
fn holding(driver: &Driver, until: &str) -> World {
    let wait = format!("select(undef, undef, undef, 0.02) until -e '{until}'");
    let script = format!("my $x = ''; vec($x, 150 << 20, 8) = 1; $| = 1; print 'ready'; {wait}");
    driver.world("perl", &["-e", &script])
}

async fn a_container_that_is_made_within_another_is_one_of_its_own(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let world = driver.bash("");
    let outer = driver.create(&world, Place::Own, memory(512)).await.sandbox.id;
    let within = Place::Sandbox(outer.clone());
    let small = driver.create(&world, within.clone(), memory(256)).await;
    let large = driver.create(&world, within, memory(4096)).await;
    let limits = [&small, &large].map(|made| made.limits.memory_bytes.unwrap() / MIB);
    assert_eq!(limits, [256, 512], "none has more than the one that it is in");
    let (small, large) = (small.sandbox.id, large.sandbox.id);
    assert_eq!(driver.ids(), [&outer, &small, &large].map(Clone::clone).into());
    for inner in [&small, &large] {
        let folders = folders_of(inner);
        let is_inside = |folder: &String| Path::new(folder).parent().unwrap().ends_with(&outer.0);
        assert!(!folders.is_empty() && folders.iter().all(is_inside), "{folders:?}");
    }
    driver.said(&world, &outer, "touch /tmp/note").await;
    let look = "test -e /tmp/note && echo there || echo nowhere";
    assert_eq!(driver.said(&world, &outer, look).await, "there\n");
    assert_eq!(driver.said(&world, &small, look).await, "nowhere\n");
    assert!(driver.oci.destroy(&small).await);
    assert_eq!(driver.ids(), [&outer, &large].map(Clone::clone).into());
    assert_eq!(driver.said(&world, &outer, look).await, "there\n");
    assert_eq!(driver.said(&world, &large, look).await, "nowhere\n");
    drop(world);
    driver.close().await;
}

async fn a_container_goes_with_the_one_that_it_was_made_within(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let changes: Arc<Mutex<Vec<SandboxChange>>> = Arc::default();
    let noted = Arc::clone(&changes);
    driver.oci.listen(Arc::new(move |change| noted.lock().unwrap().push(change)));
    let world = driver.bash("");
    let outer = driver.create(&world, Place::Own, memory(512)).await.sandbox;
    let inner = driver.create(&world, Place::Sandbox(outer.id.clone()), memory(512)).await.sandbox;
    let innermost = driver.create(&world, Place::Sandbox(inner.id.clone()), memory(512)).await.sandbox;
    let other = driver.create(&world, Place::Own, memory(512)).await.sandbox;
    changes.lock().unwrap().clear();
    assert!(driver.oci.destroy(&outer.id).await);
    assert_eq!(driver.ids(), [other.id].into());
    let ended = [&innermost, &inner, &outer].map(|one| SandboxChange::Destroyed(one.clone()));
    assert_eq!(*changes.lock().unwrap(), ended);
    let confinement = Confinement { place: Place::Sandbox(outer.id.clone()), ..world.confinement.clone() };
    let refused = driver.oci.create(&confinement).await.unwrap_err().message();
    assert!(refused.contains(&format!("there is no sandbox `{}`", outer.id.0)), "{refused}");
    drop(world);
    driver.close().await;
}

async fn all_containers_of_a_session_share_its_memory(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    let mut first = holding(&driver, "go");
    first.confinement.place = session("s");
    first.confinement.place_limits = memory(200);
    let mut second = holding(&driver, "/");
    second.confinement = Confinement { network: Network::Open, ..first.confinement.clone() };
    let workspace = first.workspace.path().to_owned();
    let (first, held) = first.start();
    first.printed.contains("ready").await;
    let holds = second.run().await;
    std::fs::write(workspace.join("go"), "").unwrap();
    let well = [held.await.unwrap(), holds].map(|ran| ran.is_ok_and(|exit| exit.ended == Ended::Code(0)));
    assert_ne!(well, [true, true], "both together had more than their session may have");
    drop((first, second));
    driver.close().await;
}

/// Returns the cgroups of a container.
fn folders_of(id: &SandboxId) -> Vec<String> {
    super::cgroups_named(&id.0)
}

//! Tests that the limits and usage of commands do not include the resources that runc itself needs.

use wieldy_core::{Ended, Level, Limit, Overrun, Place, SandboxError};

use super::{Driver, session};

#[tokio::test]
async fn a_limit_of_processes_is_that_of_the_command_and_not_of_its_runtime() {
    let Some(driver) = Driver::new(Level::Runc) else { return };
    for place in [Place::Own, session("s"), session("s")] {
        let mut world = driver.bash("sleep 0.2 & sleep 0.2 & wait; echo done");
        world.confinement.place = place.clone();
        world.confinement.limits.processes = Some(3);
        world.confinement.place_limits.processes = Some(3);
        let exit = world.run().await.unwrap();
        assert_eq!((exit.ended, world.printed.stdout().as_str()), (Ended::Code(0), "done\n"), "{place:?}");
        assert_eq!(exit.usage.processes_peak, Some(3), "{place:?}");
    }
    let mut world = driver.world("true", &[]);
    world.confinement.limits.processes = Some(1);
    let exit = world.run().await.unwrap();
    assert_eq!((exit.ended, exit.usage.processes_peak), (Ended::Code(0), Some(1)));
    drop(world);
    driver.close().await;
}

#[tokio::test]
async fn a_process_more_than_a_small_limit_allows_is_an_overrun() {
    let Some(driver) = Driver::new(Level::Runc) else { return };
    for place in [Place::Own, session("s"), session("s")] {
        let mut world = driver.world("sh", &["-c", "for i in 1 2 3 4 5; do sleep 1000 & done; wait"]);
        world.confinement.place = place.clone();
        world.confinement.limits.processes = Some(3);
        let exit = world.run().await.unwrap();
        let Overrun { limit, allowed, used, .. } = exit.overrun.unwrap();
        assert_eq!((limit, allowed), (Limit::Processes, 3), "{place:?}");
        assert!((3..=6).contains(&used), "{used}");
    }
    driver.close().await;
}

#[tokio::test]
async fn a_limit_that_leaves_no_room_to_the_runtime_is_named() {
    let Some(driver) = Driver::new(Level::Runc) else { return };
    let mut world = driver.world("true", &[]);
    world.confinement.limits.memory_bytes = Some(1 << 20);
    let error = world.run().await.unwrap_err();
    assert!(matches!(error, SandboxError::Creation { .. }), "{error:?}");
    let told = error.message();
    assert!(told.contains("the limit `memory_bytes`, which is 1048576 here, leaves too little"), "{told}");
    drop(world);
    driver.close().await;
}

#[tokio::test]
async fn the_processes_of_a_command_in_gvisor_are_not_measured() {
    let Some(driver) = Driver::new(Level::Gvisor) else { return };
    let world = driver.world("true", &[]);
    let exit = world.run().await.unwrap();
    let usage = serde_json::to_value(exit.usage).unwrap();
    assert_eq!((exit.ended, &usage["processes_peak"]), (Ended::Code(0), &serde_json::Value::Null));
    drop(world);
    driver.close().await;
}

with_each_runtime! {
    bytes_that_a_command_writes_are_measured
}

async fn bytes_that_a_command_writes_are_measured(level: Level) {
    let Some(driver) = Driver::new(level) else { return };
    // Not a folder in memory, where nothing is written to a disk.
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let mut written = Vec::new();
    for script in ["true", "head -c 9000000 /dev/zero >file", "true"] {
        let mut world = driver.bash(script);
        world.workspace = tempfile::tempdir_in(&folder).unwrap();
        world.confinement.workspace = world.workspace.path().to_owned();
        written.push(world.run().await.unwrap().usage.written_bytes);
    }
    let [nothing, much, _] = written[..] else { panic!("{written:?}") };
    assert!(nothing < 64 << 10 && (9_000_000..9_100_000).contains(&much), "{written:?}");
    driver.close().await;
}

//! Tests promise 10 for files in memory: those in `/dev/shm` and `/tmp` count to the memory limit.

use wieldy_core::{Ended, Limit, Place, ResourceLimits};

use super::arena::Arena;
use super::limits::is_by_kernel;

const MIB: u64 = 1 << 20;

/// Returns an arena whose calls have a limit of 96 MiB of memory and a high limit of the disk.
fn arena() -> Arena {
    let mut arena = Arena::new();
    let memory_bytes = Some(96 * MIB);
    arena.confinement.limits = ResourceLimits { memory_bytes, disk_bytes: Some(1 << 30), ..arena.confinement.limits };
    arena
}

/// Returns the limit that a script passed, with the allowed amount. A script that passed none must succeed.
async fn passed(arena: &Arena, place: Place, script: &str) -> Option<(Limit, u64)> {
    let ran = arena.run_in(&arena.confinement(place), script).await.unwrap();
    let overrun = ran.exit.overrun.as_ref().map(|overrun| (overrun.limit, overrun.allowed));
    if overrun.is_none() {
        assert_eq!((ran.exit.ended, ran.stdout.as_str()), (Ended::Code(0), "fine\n"), "{script}: {ran:?}");
    }
    overrun
}

#[tokio::test]
async fn files_in_private_folders_count_to_the_memory() {
    for script in [
        "for i in 1 2 3 4; do head -c 40M /dev/zero > /dev/shm/$i || exit; done; sleep 2; echo fine",
        "for i in 1 2 3 4; do head -c 40M /dev/zero > /tmp/$i || exit; done; sleep 2; echo fine",
        // It ends after only a few checks of the supervisor.
        "head -c 160M /dev/zero > /dev/shm/large && echo fine",
        // A removed file exists as long as it is open.
        "exec 3<> /tmp/open && rm /tmp/open && head -c 160M /dev/zero >&3 && sleep 2 && echo fine",
        // Neither alone passes the limit.
        "head -c 60M /dev/zero > /tmp/half && python3 -c 'x = bytearray(60 << 20); import time; time.sleep(2)' && echo fine",
    ] {
        for place in [Place::Own, Arena::session("bomber")] {
            let passed = passed(&arena(), place.clone(), script).await;
            assert_eq!(passed, Some((Limit::MemoryBytes, 96 * MIB)), "{script}: {place:?}");
        }
    }
}

#[tokio::test]
async fn files_within_the_memory_are_counted_once() {
    let map = "import mmap, os, sys, time
file = open(sys.argv[1], \"r+b\")
mapped = mmap.mmap(file.fileno(), 0)
sum(mapped[at] for at in range(0, len(mapped), 4096))
for _ in range(3):
    if os.fork() == 0:
        sum(mapped[at] for at in range(0, len(mapped), 4096)); time.sleep(0.5); os._exit(0)
for _ in range(3): os.wait()";
    let script = format!(
        "for folder in /dev/shm /tmp; do head -c 50M /dev/zero > $folder/file; python3 -c '{map}' $folder/file; rm $folder/file; done; \
         for i in 1 2 3 4 5 6; do head -c 40M /dev/zero > part-$i; done; cat part-* part-* > /dev/null; sleep 0.2; echo fine"
    );
    for place in [Place::Own, Arena::session("mapper"), Arena::session("mapper")] {
        assert_eq!(passed(&arena(), place.clone(), &script).await, None, "{place:?}");
    }
}

#[tokio::test]
async fn files_that_a_session_leaves_count_to_its_memory() {
    if is_by_kernel(Limit::MemoryBytes).await {
        // There the kernel may kill the init of the sandbox, which is a crash for the call.
        return super::arena::say("files that a session leaves: the kernel counts them here, not the watcher");
    }
    let mut arena = arena();
    arena.confinement.place_limits = ResourceLimits { memory_bytes: Some(120 * MIB), ..ResourceLimits::default() };
    let write = |name: &str| format!("head -c 70M /dev/zero > /tmp/{name} && sleep 0.3 && echo fine");
    let session = || Arena::session("writer");
    assert_eq!(passed(&arena, session(), &write("one")).await, None);
    assert_eq!(passed(&arena, session(), &format!("rm /tmp/one; {}", write("two"))).await, None);
    assert_eq!(passed(&arena, session(), &write("three")).await, Some((Limit::MemoryBytes, 120 * MIB)));
    assert_eq!(passed(&arena, Arena::session("neighbour"), &write("three")).await, None);
}

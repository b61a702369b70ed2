//! Promise 9, counted: after many calls the machine has nothing more than before.

use std::collections::BTreeSet;
use std::fs;

use wieldy_core::{Place, Sandbox};

use super::arena::{Arena, is_root};
use super::ending::groups;
use crate::world::{PATIENCE, eventually, in_own_process};

/// What could pile up.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Counted {
    processes: usize,
    zombies: usize,
    mounts: usize,
    descriptors: usize,
    wardens_descriptors: usize,
    groups: usize,
    temporary: BTreeSet<String>,
    network_namespaces: usize,
}

fn children(id: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let texts = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    texts.flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn all_below(id: &str) -> Vec<String> {
    children(id).into_iter().flat_map(|child| [all_below(&child), vec![child]].concat()).collect()
}

fn count(arena: &Arena) -> Counted {
    let below = all_below("self");
    let state = |id: &String| fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default().contains(") Z ");
    let warden = children("self").pop().unwrap_or_default();
    let namespaces = below.iter().filter_map(|id| fs::read_link(format!("/proc/{id}/ns/net")).ok());
    Counted {
        processes: below.len(),
        zombies: below.iter().filter(|id| state(id)).count(),
        mounts: fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count(),
        descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
        wardens_descriptors: fs::read_dir(format!("/proc/{warden}/fd")).map_or(0, Iterator::count),
        groups: groups()
            .iter()
            .filter(|path| path.to_string_lossy().contains(&format!("native-{}-", std::process::id())))
            .count(),
        temporary: fs::read_dir(&arena.workspace)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect(),
        network_namespaces: namespaces.collect::<BTreeSet<_>>().len(),
    }
}

/// Waits until what is still on its way out is gone.
async fn settled(arena: &Arena, wanted: &Counted) {
    let mut found = count(arena);
    for _ in 0..1000 {
        if found == *wanted {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        found = count(arena);
    }
    assert_eq!(found, *wanted);
}

#[test]
fn three_hundred_calls_of_each_kind_leave_nothing() {
    if !in_own_process("escape::leaving::three_hundred_calls_of_each_kind_leave_nothing") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let arena = Arena::with(0);
        let calls = if is_root() { 300 } else { 50 };
        let script = "(setsid sleep 1000 &) ; echo x > /tmp/x; echo hi";
        // Whoever stays, stays from the first call on: the warden, and the session's sandbox with its berth.
        assert_eq!(arena.run(Place::Own, script).await, "hi\n");
        let is_over = || all_below("self").is_empty();
        eventually(PATIENCE, "the first sandbox is gone, and its warden", is_over).await;
        let nothing = count(&arena);
        assert_eq!(arena.run(Arena::session("one"), script).await, "hi\n");
        let before = count(&arena);
        assert_eq!((before.zombies, before.processes), (0, 3), "warden, init, berth: {before:?}");
        for _ in 0..calls {
            assert_eq!(arena.run(Place::Own, script).await, "hi\n");
        }
        settled(&arena, &before).await;
        for _ in 0..calls {
            assert_eq!(arena.run(Arena::session("one"), script).await, "hi\n");
        }
        settled(&arena, &before).await;
        let status = arena.native.list();
        assert_eq!((status.len(), status[0].executed, status[0].running), (1, calls + 1, 0));
        assert!(arena.native.destroy(&status[0].sandbox.id).await);
        // Without a sandbox there is no warden, and nothing is in the workspace.
        settled(&arena, &nothing).await;
    });
}

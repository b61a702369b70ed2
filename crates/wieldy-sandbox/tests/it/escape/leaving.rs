//! Tests promise 9 by counting: after many calls the machine has no more processes, files, mounts and cgroups than
//! before.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use wieldy_core::{Command, Confinement, Ended, Limit, Place, ResourceLimits, Sandbox, SandboxError, Stdin};

use super::arena::{Arena, is_root};
use super::ending::groups;
use crate::world::{PATIENCE, Printed, eventually, in_own_process};

/// The counts of things that could leak.
#[derive(Debug, PartialEq, Eq, Clone)]
struct Counted {
    processes: usize,
    zombies: usize,
    mounts: usize,
    descriptors: usize,
    /// The descriptors of all descendants of this process.
    their_descriptors: usize,
    groups: usize,
    temporary: BTreeSet<PathBuf>,
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
    let descriptors = |id: &str| fs::read_dir(format!("/proc/{id}/fd")).map_or(0, Iterator::count);
    let mounts = |id: &str| fs::read_to_string(format!("/proc/{id}/mountinfo")).unwrap_or_default().lines().count();
    let namespaces = below.iter().filter_map(|id| fs::read_link(format!("/proc/{id}/ns/net")).ok());
    let mut temporary = BTreeSet::new();
    collect(&arena.root, &mut temporary);
    Counted {
        processes: below.len(),
        zombies: below.iter().filter(|id| state(id)).count(),
        // In the mount namespaces of this process and of its children, among them the fork server.
        mounts: mounts("self") + children("self").iter().map(|id| mounts(id)).sum::<usize>(),
        descriptors: descriptors("self"),
        their_descriptors: below.iter().map(|id| descriptors(id)).sum(),
        groups: groups()
            .iter()
            .filter(|path| path.to_string_lossy().contains(&format!("native-{}-", std::process::id())))
            .count(),
        temporary,
        network_namespaces: namespaces.collect::<BTreeSet<_>>().len(),
    }
}

fn collect(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            collect(&path, found);
        }
        found.insert(path);
    }
}

/// Waits until the counts are as wanted: some things end after their call.
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

/// Waits until the placeholders of idle sandboxes are removed, and the orders to remove them are answered.
async fn resting(arena: &Arena) {
    eventually(PATIENCE, "the sandboxes rest", || fs::read_dir(&arena.workspace).unwrap().next().is_none()).await;
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
}

/// The way in which a call ends.
#[derive(Debug, Clone, Copy)]
enum Ending {
    Well,
    Badly,
    BySignal,
    ByLimit,
    LeavingSomebody,
    Cancelled,
    TimedOut,
    Dropped,
    NotStarted,
}

/// The ends of the calls in a session, in order: most succeed.
const ENDINGS: [Ending; 25] = {
    use Ending::{Badly, ByLimit, BySignal, Cancelled, Dropped, LeavingSomebody, NotStarted, TimedOut, Well};
    [
        Well,
        Well,
        Well,
        BySignal,
        Well,
        Well,
        ByLimit,
        Well,
        Badly,
        Well,
        LeavingSomebody,
        Well,
        Well,
        Cancelled,
        Well,
        Well,
        TimedOut,
        Well,
        Badly,
        Well,
        Dropped,
        Well,
        Well,
        NotStarted,
        Well,
    ]
};

/// Makes a call that ends in this way, and asserts that it did.
async fn call(arena: &Arena, place: Place, ending: Ending) {
    let (program, script) = match ending {
        Ending::Well => ("true", ""),
        Ending::Badly => ("false", ""),
        Ending::BySignal => ("sh", "kill -9 $$"),
        Ending::ByLimit => ("sh", "exec head -c 100000 /dev/zero > /tmp/large"),
        Ending::LeavingSomebody => ("sh", "(setsid sleep 1000 &); : > /tmp/x"),
        Ending::Cancelled | Ending::Dropped => ("sh", "echo ready; sleep 1000"),
        Ending::TimedOut => ("sleep", "1000"),
        Ending::NotStarted => ("no-such-program", ""),
    };
    let arguments = match program {
        "sh" => vec!["-c".to_owned(), script.to_owned()],
        _ => script.split_whitespace().map(str::to_owned).collect(),
    };
    let environment = arena.environment.clone();
    let (program, folder) = (program.to_owned(), PathBuf::new());
    let command = Command { program, arguments, environment, folder, stdin: Stdin::Nothing, terminal: None };
    let limits = match ending {
        Ending::ByLimit => ResourceLimits { disk_bytes: Some(50_000), ..arena.confinement.limits },
        _ => arena.confinement.limits,
    };
    let confinement = Confinement { limits, ..arena.confinement(place.clone()) };
    let (printed, stop) = (Arc::<Printed>::default(), CancellationToken::new());
    let running = arena.native.execute(&command, &confinement, printed.clone(), stop.clone());
    let ended = match ending {
        Ending::Cancelled => {
            tokio::join!(running, async {
                printed.contains("ready").await;
                stop.cancel()
            })
            .0
        }
        Ending::TimedOut => {
            let clock = async {
                tokio::time::sleep(Duration::from_millis(5)).await;
                stop.cancel()
            };
            tokio::join!(running, clock).0
        }
        Ending::Dropped => {
            tokio::select! {
                ended = running => panic!("{ended:?}"),
                () = printed.contains("ready") => {}
            }
            // Wait until the supervisor is free for the next call.
            let is_over = || arena.native.list().iter().all(|one| !is_in(one, &place) || one.running == 0);
            return eventually(PATIENCE, "the command is over", is_over).await;
        }
        _ => tokio::time::timeout(PATIENCE, running).await.expect("the command hangs"),
    };
    let found = ended.map(|exit| (exit.ended, exit.overrun.map(|overrun| overrun.limit)));
    let as_expected = match ending {
        Ending::Well | Ending::LeavingSomebody => matches!(found, Ok((Ended::Code(0), None))),
        Ending::Badly => matches!(found, Ok((Ended::Code(1), None))),
        Ending::BySignal => matches!(found, Ok((Ended::Signal(libc::SIGKILL), None))),
        Ending::ByLimit => matches!(found, Ok((_, Some(Limit::DiskBytes)))),
        Ending::Cancelled => matches!(found, Ok((Ended::Signal(_), None))),
        // If building the sandbox takes longer than the timeout, the command was not started.
        Ending::TimedOut => matches!(found, Ok((Ended::Signal(_), None)) | Err(SandboxError::Creation { .. })),
        Ending::NotStarted => matches!(found, Err(SandboxError::Start { .. })),
        Ending::Dropped => false,
    };
    assert!(as_expected, "{ending:?} in {place:?}: {found:?}");
}

fn is_in(sandbox: &wieldy_core::SandboxStatus, place: &Place) -> bool {
    matches!((&sandbox.session, place), (Some(session), Place::Session(key)) if session == key)
}

/// Makes calls one after the other, with all ways to end.
async fn calls(arena: &Arena, place: &Place, count: usize) {
    for ending in ENDINGS.into_iter().cycle().take(count) {
        call(arena, place.clone(), ending).await;
    }
}

// Shows: B5.2
#[test]
fn ten_thousand_calls_leave_nothing() {
    if !in_own_process("escape::leaving::ten_thousand_calls_leave_nothing") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // An ordinary user's sandboxes differ only in parts that need root.
        let scale = if is_root() { wieldy_testkit::count(5, 1) } else { 20 };
        let (sessions, warm, new, pooled) = (4, 2_350 / scale, 300 / scale, 300 / scale);
        let arena = Arena::with(0);
        call(&arena, Place::Own, Ending::Well).await;
        let is_over = || all_below("self").is_empty();
        eventually(PATIENCE, "the first sandbox is gone, and its fork server", is_over).await;
        let nothing = count(&arena);

        // In sessions. The fork server, and of each session the init and a supervisor, live from the first call on.
        let places: Vec<Place> = (0..sessions).map(|number| Arena::session(&number.to_string())).collect();
        for place in &places {
            call(&arena, place.clone(), Ending::Well).await;
        }
        resting(&arena).await;
        let before = count(&arena);
        assert_eq!((before.zombies, before.processes), (0, 1 + 2 * sessions), "{before:?}");
        futures_util::future::join_all(places.iter().map(|place| calls(&arena, place, warm))).await;
        settled(&arena, &before).await;
        let executed: u64 = arena.native.list().iter().map(|one| one.executed).sum();
        assert_eq!(executed, (sessions * (warm + 1)) as u64);

        // Each in a new sandbox of its own, while those of the sessions live.
        calls(&arena, &Place::Own, new).await;
        settled(&arena, &before).await;
        for one in arena.native.list() {
            assert!(arena.native.destroy(&one.sandbox.id).await);
        }
        // Without a sandbox there is no fork server, and there are no placeholders in the workspace.
        settled(&arena, &nothing).await;

        // Each in a warm sandbox of its own.
        let arena = Arena::with(2);
        // The fork server, and of each warm sandbox the init and a supervisor.
        let is_full =
            || (arena.native.warm_sandboxes(), arena.native.warm_inits(), all_below("self").len()) == (2, 2, 9);
        for _ in 0..2 {
            call(&arena, Place::Own, Ending::Well).await;
        }
        eventually(PATIENCE, "all that is built ahead is there", is_full).await;
        resting(&arena).await;
        let before = count(&arena);
        calls(&arena, &Place::Own, pooled).await;
        eventually(PATIENCE, "all that is built ahead is there again", is_full).await;
        settled(&arena, &before).await;
    });
}

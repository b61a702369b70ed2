//! Tests sandboxes of sessions: the state that the calls of a session share and other calls do not see, and making,
//! listing, losing and destroying sandboxes.

use std::sync::Arc;
use std::time::Duration;

use wieldy_core::{
    Ended, Feed, Level, Place, Sandbox, SandboxChange, SandboxError, SandboxId, SessionKey, Stdin, Terminal,
};
use wieldy_sandbox::{IdleLimits, Native, NativeOptions};

use crate::world::{PATIENCE, World, below, eventually, in_own_process};

fn session(name: &str) -> Place {
    Place::Session(key(name))
}

fn key(name: &str) -> SessionKey {
    SessionKey { tenant: None, agent: "tester".into(), session: name.into() }
}

/// Returns a script that runs at the native level in this place.
fn script(native: &Native, place: Place, text: &str) -> World {
    let mut world = World::bash(text);
    world.sandbox = Arc::new(native.clone());
    world.confinement.place = place;
    world.confinement.network = wieldy_core::Network::None;
    world
}

fn native() -> Native {
    Native::new(NativeOptions { warm_sandboxes: 0, warm_inits: 0, ..NativeOptions::default() })
}

/// Runs a script in the workspace of `like` and returns its output.
async fn said(native: &Native, place: Place, like: &World, text: &str) -> String {
    let mut world = script(native, place, text);
    world.confinement.workspace = like.confinement.workspace.clone();
    world.output().await
}

// Shows: B9.1
#[tokio::test]
async fn private_folders_are_shared_only_by_the_calls_of_a_session() {
    let (native, home) = (native(), World::bash(":"));
    said(&native, session("a"), &home, "echo kept > /tmp/note; echo home > ~/note").await;
    assert_eq!(said(&native, session("a"), &home, "cat /tmp/note ~/note").await, "kept\nhome\n");
    for other in [session("b"), Place::Own] {
        assert_eq!(said(&native, other, &home, "cat /tmp/note ~/note 2>/dev/null || echo nothing").await, "nothing\n");
    }
    assert_eq!(native.list().len(), 2);
}

#[tokio::test]
async fn idle_sandboxes_hold_few_descriptors() {
    if !in_own_process("sessions::idle_sandboxes_hold_few_descriptors") {
        return;
    }
    let (native, home) = (native(), World::bash(":"));
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    said(&native, session("first"), &home, ":").await;
    let before = descriptors();
    for number in 0..10 {
        said(&native, session(&number.to_string()), &home, ":").await;
    }
    let most = before + 10 * 5;
    eventually(PATIENCE, "files of idle sandboxes are closed", || descriptors() <= most).await;
    assert_eq!(said(&native, session("3"), &home, "echo again").await, "again\n");
}

// Shows: B5.1
#[tokio::test]
async fn a_sandbox_is_made_used_listed_and_destroyed() {
    let (native, mut world) = (native(), World::bash(":"));
    world.confinement.network = wieldy_core::Network::None;
    let changes = Arc::new(std::sync::Mutex::new(Vec::new()));
    native.listen({
        let changes = Arc::clone(&changes);
        Arc::new(move |change| changes.lock().unwrap().push(change))
    });
    let made = native.create(&world.confinement).await.unwrap();
    assert_eq!((made.sandbox.level, made.running, made.executed, &made.session), (Level::Native, 0, 0, &None));
    let id = made.sandbox.id.clone();
    assert_eq!(said(&native, Place::Sandbox(id.clone()), &world, "echo here").await, "here\n");
    let listed = native.list();
    assert_eq!(listed.iter().map(|one| (&one.sandbox, one.executed)).collect::<Vec<_>>(), [(&made.sandbox, 1)]);
    // It was made without a network, and a call never gets another network than it asks for.
    let mut other = script(&native, Place::Sandbox(id.clone()), "echo here");
    other.confinement.workspace = world.confinement.workspace.clone();
    other.confinement.network = wieldy_core::Network::Open;
    let told = other.run().await.unwrap_err().message();
    let expected = "was made for another workspace, other files or another network than this call asks for";
    assert_eq!(told, format!("cannot make a sandbox: the sandbox `{}` {expected}", id.0));
    assert!(native.destroy(&id).await);
    assert!(!native.destroy(&id).await);
    assert!(native.list().is_empty());
    let refused = script(&native, Place::Sandbox(id.clone()), "echo here").run().await.unwrap_err().message();
    assert_eq!(
        refused,
        format!("cannot make a sandbox: there is no sandbox `{}`; it was destroyed, or never made", id.0)
    );
    let expected = [SandboxChange::Created(made.sandbox.clone()), SandboxChange::Destroyed(made.sandbox)];
    assert_eq!(*changes.lock().unwrap(), expected);
}

#[tokio::test]
async fn running_commands_end_with_their_sandbox() {
    let native = native();
    let (world, running) = script(&native, session("a"), "echo ready; sleep 1000").start();
    world.printed.contains("ready").await;
    let id = native.list()[0].sandbox.id.clone();
    assert_eq!(native.list()[0].running, 1);
    assert!(native.destroy(&id).await);
    assert!(world.alive().is_empty(), "{:?}", world.alive());
    assert!(matches!(running.await.unwrap(), Err(SandboxError::Crashed { .. })));
}

#[tokio::test]
async fn an_idle_sandbox_goes_by_itself_and_the_next_call_gets_a_new_one() {
    let options = NativeOptions { warm_sandboxes: 0, idle_max: Duration::from_millis(200), ..NativeOptions::default() };
    let (native, home) = (Native::new(options), World::bash(":"));
    said(&native, session("a"), &home, "touch /tmp/note").await;
    let first = native.list()[0].sandbox.id.clone();
    eventually(Duration::from_secs(10), "the sandbox is gone", || native.list().is_empty()).await;
    assert_eq!(said(&native, session("a"), &home, "[ -e /tmp/note ] || echo gone").await, "gone\n");
    assert_ne!(native.list()[0].sandbox.id, first);
}

#[tokio::test]
async fn of_too_many_idle_sandboxes_the_least_recently_used_go_and_busy_ones_stay() {
    let idle_limits = IdleLimits { sandboxes_max: 3, per_tenant_max: 2 };
    let options = NativeOptions { warm_sandboxes: 0, warm_inits: 0, idle_limits, ..NativeOptions::default() };
    let (native, home) = (Native::new(options), World::bash(":"));
    let (busy, running) = {
        let mut world = script(&native, session("busy"), "echo ready; cat /tmp/gate; sleep 1000");
        world.confinement.workspace = home.confinement.workspace.clone();
        world.start()
    };
    busy.printed.contains("ready").await;
    for name in ["a", "b", "a", "c", "d", "e"] {
        said(&native, session(name), &home, &format!("echo {name} > /tmp/note")).await;
    }
    let mut sessions: Vec<_> = native.list().into_iter().filter_map(|one| Some(one.session?.session)).collect();
    sessions.sort();
    assert_eq!(sessions, ["busy", "d", "e"], "the tenant has two that are idle, and one that is not");
    assert_eq!(said(&native, session("e"), &home, "cat /tmp/note").await, "e\n", "kept");
    assert_eq!(
        said(&native, session("a"), &home, "cat /tmp/note 2>/dev/null || echo new").await,
        "new\n",
        "made again"
    );
    let other = Place::Session(SessionKey { tenant: Some("other".into()), ..key("x") });
    said(&native, other.clone(), &home, "echo x > /tmp/note").await;
    assert_eq!(native.list().len(), 4, "another tenant has its own");
    for name in ["f", "g", "h"] {
        said(&native, session(name), &home, ":").await;
    }
    assert_eq!(said(&native, other, &home, "cat /tmp/note").await, "x\n", "no tenant takes away another's");
    busy.stop.cancel();
    let _ = running.await;
}

#[tokio::test]
async fn warm_inits_go_when_no_call_comes_for_long() {
    let options = NativeOptions { warm_sandboxes: 0, idle_max: Duration::from_secs(2), ..NativeOptions::default() };
    let (native, home) = (Native::new(options), World::bash(":"));
    for _ in 0..2 {
        assert_eq!(said(&native, Place::Own, &home, "echo hi").await, "hi\n");
        eventually(Duration::from_secs(30), "one waits", || native.warm_inits() == 1).await;
        eventually(Duration::from_secs(30), "none waits", || native.warm_inits() == 0).await;
    }
}

#[tokio::test]
async fn a_killed_sandbox_is_replaced() {
    let (native, home) = (native(), World::bash(":"));
    // The init of the sandbox is the parent of the supervisor, which is the parent of the command.
    let (world, running) = script(&native, session("a"), "echo ready; sleep 1000").start();
    world.printed.contains("ready").await;
    eventually(Duration::from_secs(10), "the command is there", || !world.alive().is_empty()).await;
    let command: i32 = world.alive()[0].split([':', '/']).find_map(|part| part.parse().ok()).unwrap();
    let parent = |pid: i32| -> i32 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().parse().unwrap()
    };
    let mut init = command;
    while std::fs::read_to_string(format!("/proc/{init}/comm")).unwrap().trim() != "wieldy-init" {
        init = parent(init);
    }
    rustix::process::kill_process(rustix::process::Pid::from_raw(init).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
    assert!(matches!(running.await.unwrap(), Err(SandboxError::Crashed { .. })));
    assert_eq!(said(&native, session("a"), &home, "echo again").await, "again\n");
}

#[tokio::test]
async fn calls_of_a_session_run_at_the_same_time() {
    let (native, home) = (native(), World::bash(":"));
    let meet = "mkfifo /tmp/meet 2>/dev/null; echo hello";
    said(&native, session("a"), &home, meet).await;
    let (reads, writes) = tokio::join!(
        said(&native, session("a"), &home, "cat /tmp/meet"),
        said(&native, session("a"), &home, "echo through > /tmp/meet; echo written"),
    );
    assert_eq!((reads.as_str(), writes.as_str()), ("through\n", "written\n"));
}

#[tokio::test]
async fn a_sandbox_that_is_made_within_another_is_one_of_its_own() {
    let (native, mut world) = (native(), World::bash(":"));
    world.confinement.network = wieldy_core::Network::None;
    let outer = native.create(&world.confinement).await.unwrap().sandbox.id;
    world.confinement.place = Place::Sandbox(outer.clone());
    let same = native.create(&world.confinement).await.unwrap().sandbox.id;
    world.confinement.network = wieldy_core::Network::Open;
    let other = native.create(&world.confinement).await.unwrap().sandbox.id;
    let ids = || native.list().into_iter().map(|one| one.sandbox.id).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(ids(), [&outer, &same, &other].map(Clone::clone).into());
    said(&native, Place::Sandbox(outer.clone()), &world, "touch /tmp/note").await;
    let look = "test -e /tmp/note && echo there || echo nowhere";
    assert_eq!(said(&native, Place::Sandbox(outer.clone()), &world, look).await, "there\n");
    assert_eq!(said(&native, Place::Sandbox(same.clone()), &world, look).await, "nowhere\n");
    world.confinement.place = Place::Sandbox(same.clone());
    let innermost = native.create(&world.confinement).await.unwrap().sandbox.id;
    assert!(native.destroy(&other).await);
    assert_eq!(ids(), [&outer, &same, &innermost].map(Clone::clone).into());
    assert_eq!(said(&native, Place::Sandbox(outer.clone()), &world, look).await, "there\n");
    // The sandboxes within it end with it.
    assert!(native.destroy(&outer).await);
    assert_eq!(ids(), [].into());
    world.confinement.place = Place::Sandbox(outer.clone());
    let refused = native.create(&world.confinement).await.unwrap_err().message();
    assert_eq!(
        refused,
        format!("cannot make a sandbox: there is no sandbox `{}`; it was destroyed, or never made", outer.0)
    );
}

#[tokio::test]
async fn only_some_supervisors_wait_for_later_commands() {
    let (native, home) = (native(), World::bash(":"));
    let meet = "touch here-$$; until [ $(ls here-* | wc -l) = 12 ]; do sleep 0.01; done; echo met";
    let met = futures_util::future::join_all((0..12).map(|_| said(&native, session("a"), &home, meet))).await;
    assert_eq!(met, ["met\n"; 12]);
    let is_supervisor = |id: &i32| {
        std::fs::read_to_string(format!("/proc/{id}/comm")).is_ok_and(|name| name.trim() == "wieldy-supervis")
    };
    let supervisors = || below(std::process::id() as i32).iter().filter(|id| is_supervisor(id)).count();
    eventually(Duration::from_secs(10), "the others are gone", || supervisors() == 8).await;
    assert_eq!(said(&native, session("a"), &home, "echo on").await, "on\n");
    assert_eq!((supervisors(), native.list().len()), (8, 1));
}

#[tokio::test]
async fn bytes_read_by_a_child_without_a_wait_are_measured() {
    let native = native();
    let read = |first: &str| {
        format!(
            r#"head -c 8M /dev/zero > file; sync file; perl -e '{first}
            if (!fork) {{ system("dd if=file of=/dev/null bs=1M iflag=direct status=none"); open(F, ">done"); exit }}
            wait; select(undef, undef, undef, 0.01) until -e "done"'"#
        )
    };
    let waited = script(&native, session("a"), &read("")).run().await.unwrap().usage.read_bytes;
    let controllers = std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let is_counted = controllers.split_whitespace().any(|name| name == "io") && rustix::process::geteuid().is_root();
    if waited < 8 << 20 || !is_counted {
        return crate::escape::arena::say(
            "what a child reads: there is no disk here, or nothing that counts for groups",
        );
    }
    let usage = script(&native, session("b"), &read("$SIG{CHLD} = \"IGNORE\";")).run().await.unwrap().usage;
    assert!(usage.read_bytes >= 8 << 20, "{usage:?}");
}

#[tokio::test]
async fn the_peaks_of_a_call_are_its_own_also_after_a_larger_one() {
    const MIB: u64 = 1 << 20;
    let native = native();
    let hold = |mib: u64| format!("exec python3 -c 'bytearray(b\"x\") * ({mib} << 20)'");
    let mut peaks = Vec::new();
    for text in [hold(90), hold(45), "sleep 0.5 & sleep 0.5 & sleep 0.5 & wait".into()] {
        let usage = script(&native, session("one"), &text).run().await.unwrap().usage;
        peaks.push((usage.memory_peak_bytes / MIB, usage.processes_peak.unwrap()));
    }
    let [(large, _), (small, _), (none, four)] = peaks[..] else { panic!("{peaks:?}") };
    assert!((90..130).contains(&large) && (45..85).contains(&small) && none < 20, "{peaks:?}");
    assert_eq!(four, 4, "{peaks:?}");
}

#[tokio::test]
async fn sandboxes_are_built_ahead_and_used_once() {
    let native = Native::new(NativeOptions { warm_sandboxes: 2, ..NativeOptions::default() });
    let home = World::bash(":");
    let mut used = std::collections::BTreeSet::new();
    for _ in 0..4 {
        let mut world = script(&native, Place::Own, "test ! -e /tmp/note && touch /tmp/note");
        world.confinement.workspace = home.confinement.workspace.clone();
        let exit = world.run().await.unwrap();
        assert_eq!(exit.ended, Ended::Code(0), "a sandbox was used twice");
        assert!(used.insert(exit.sandbox.id));
        eventually(Duration::from_secs(10), "a sandbox is built ahead", || native.warm_sandboxes() > 0).await;
    }
}

#[tokio::test]
async fn a_command_gets_a_terminal_of_the_size_that_is_asked_for() {
    let native = native();
    let mut world = script(&native, Place::Own, "tty; stty size; test -t 0 && test -t 2 && echo terminal");
    world.command.terminal = Some(Terminal { rows: 30, columns: 100 });
    assert_eq!(world.output().await, "/dev/pts/0\r\n30 100\r\nterminal\r\n");
}

#[tokio::test]
async fn a_command_reads_what_is_written_to_it_while_it_runs() {
    let native = native();
    let (feeder, feed) = Feed::new();
    let mut world = script(&native, Place::Own, "while read line; do echo \"got $line\"; done; echo end");
    world.command.stdin = Stdin::Live(feed);
    let (world, running) = world.start();
    feeder.send(b"one\n".to_vec()).await.unwrap();
    world.printed.contains("got one\n").await;
    feeder.send(b"two\n".to_vec()).await.unwrap();
    world.printed.contains("got two\n").await;
    drop(feeder);
    assert_eq!(running.await.unwrap().unwrap().ended, Ended::Code(0));
    assert_eq!(world.printed.stdout(), "got one\ngot two\nend\n");
}

#[tokio::test]
async fn a_workspace_that_is_the_system_is_refused_with_a_reason() {
    let native = native();
    let mut world = script(&native, Place::Own, "true");
    world.confinement.workspace = "/etc".into();
    let told = world.run().await.unwrap_err().message();
    let expected = "`/etc` belongs to the system and cannot be a workspace; choose a folder of the project's own";
    assert_eq!(told, format!("cannot make a sandbox: {expected}"));
    let unknown = SandboxId("native-0-0".into());
    assert!(!native.destroy(&unknown).await);
}

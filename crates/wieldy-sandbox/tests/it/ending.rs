//! Tests that no process of a command is left, for every way to end it and for commands that resist.

use std::time::{Duration, Instant};

use wieldy_core::{Ended, Level};

use crate::world::{PATIENCE, World, conformance, eventually};

conformance! {
    together: [
        a_polite_command_ends_when_it_is_told_and_may_clean_up
        a_command_that_ignores_being_told_is_killed_after_its_grace_time
        a_command_that_stopped_itself_is_ended
        processes_that_forked_twice_and_opened_sessions_are_ended_with_the_command
        all_processes_have_the_grace_time_and_not_just_the_first
        processes_left_by_a_command_that_ends_by_itself_are_killed
        a_background_process_that_keeps_the_pipe_open_does_not_hold_up_the_end
        everything_printed_before_the_end_arrives
        fifty_children_are_ended
        processes_that_keep_forking_away_are_caught
        orphans_do_not_pile_up_as_zombies_while_the_command_runs
        dropping_the_future_ends_the_whole_tree
        a_supervisor_that_was_stopped_still_does_its_work
        a_stopped_supervisor_that_is_left_behind_still_does_its_work
    ];
    alone: [
    ];
}

/// Starts the script, waits for its `ready`, and stops it. Returns the end of the first process and the time it took.
/// `World::run` checks that no process is left.
async fn stopped(world: World) -> (Ended, Duration) {
    let (world, running) = world.start();
    world.printed.contains("ready").await;
    // During `exec` a process has no environment for a moment. gVisor's processes are not visible on the host.
    let sees = || world.sandbox.level() == Level::Gvisor || !world.alive().is_empty();
    eventually(PATIENCE, "the test sees the processes it is about", sees).await;
    let told = Instant::now();
    world.stop.cancel();
    let exit = running.await.unwrap().unwrap();
    (exit.ended, told.elapsed())
}

async fn a_polite_command_ends_when_it_is_told_and_may_clean_up() {
    let world =
        World::bash("trap 'echo cleaned; exit 7' TERM; echo ready; while :; do sleep 0.01; done").grace(PATIENCE);
    let printed = world.printed.clone();
    let (ended, _) = stopped(world).await;
    assert_eq!((ended, printed.stdout().as_str()), (Ended::Code(7), "ready\ncleaned\n"));
}

/// P-SBX-11.
// Shows: A2.4, D5.1
async fn a_command_that_ignores_being_told_is_killed_after_its_grace_time() {
    let grace = Duration::from_millis(200);
    let world = World::bash("trap '' TERM HUP INT; echo ready; while :; do sleep 0.05; done").grace(grace);
    let (ended, took) = stopped(world).await;
    assert_eq!(ended, Ended::Signal(9));
    assert!(took >= grace && took < grace + Duration::from_secs(2), "{took:?}");
}

/// P-SBX-11.
async fn a_command_that_stopped_itself_is_ended() {
    let (ended, _) = stopped(World::bash("echo ready; kill -STOP $$; sleep 1000")).await;
    assert_eq!(ended, Ended::Signal(15));
    let (ended, _) = stopped(World::bash("trap '' TERM; echo ready; while :; do kill -STOP $$; done")).await;
    assert_eq!(ended, Ended::Signal(9));
}

/// P-SBX-10.
async fn processes_that_forked_twice_and_opened_sessions_are_ended_with_the_command() {
    let script = "(trap '' TERM; setsid setsid bash -c 'trap \"\" TERM; (sleep 1000 <&- >&- 2>&- &); exec sleep 1000' &); \
                  sleep 0.1; echo ready; sleep 1000";
    stopped(World::bash(script)).await;
}

async fn all_processes_have_the_grace_time_and_not_just_the_first() {
    let script = "(trap 'sleep 0.1; echo saved; exit' TERM; echo ready; while :; do sleep 0.01; done) & wait";
    let world = World::bash(script).grace(PATIENCE);
    let printed = world.printed.clone();
    stopped(world).await;
    assert_eq!(printed.stdout(), "ready\nsaved\n");
}

async fn processes_left_by_a_command_that_ends_by_itself_are_killed() {
    let world = World::bash("setsid sleep 1000 & (trap '' TERM; sleep 1000) & (sleep 1000 &) ; echo bye");
    let begun = Instant::now();
    assert_eq!(world.output().await, "bye\n");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

/// P-SBX-12.
async fn a_background_process_that_keeps_the_pipe_open_does_not_hold_up_the_end() {
    let world = World::bash("(while :; do sleep 0.01; done) & head -c 50000 /dev/zero | tr '\\0' x; exit 4");
    let exit = world.run().await.unwrap();
    assert_eq!((exit.ended, world.printed.stdout().len()), (Ended::Code(4), 50_000));
}

async fn everything_printed_before_the_end_arrives() {
    // Containers take longer.
    let rounds = if matches!(World::level(), Level::Runc | Level::Gvisor) { 8 } else { 50 };
    for _ in 0..rounds {
        let world = World::bash("printf %60000s x; echo end >&2");
        world.run().await.unwrap();
        assert_eq!((world.printed.stdout().len(), world.printed.stderr().as_str()), (60_000, "end\n"));
    }
}

async fn fifty_children_are_ended() {
    stopped(World::bash("for i in {1..50}; do sleep 1000 & done; echo ready; wait")).await;
    stopped(World::bash("for i in {1..50}; do (trap '' TERM; sleep 1000) & done; sleep 0.2; echo ready; wait")).await;
}

async fn processes_that_keep_forking_away_are_caught() {
    let rabbit = "#!/bin/bash\ntrap '' TERM\nsetsid ./rabbit &\n";
    let world = World::bash("echo ready; ./rabbit; sleep 1000");
    let file = world.workspace.path().join("rabbit");
    std::fs::write(&file, rabbit).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    stopped(world).await;
}

async fn orphans_do_not_pile_up_as_zombies_while_the_command_runs() {
    let script = "for i in {1..40}; do (true &); done; sleep 0.2; grep -h State /proc/[0-9]*/status 2>/dev/null >/dev/null; \
                  cat /proc/$PPID/task/$PPID/children; echo; echo ready; sleep 1000";
    let world = World::bash(script);
    let printed = world.printed.clone();
    stopped(world).await;
    let text = printed.stdout();
    assert_eq!(text.lines().next().unwrap().split_whitespace().count(), 1, "children of the supervisor: {text}");
}

// Shows: D5.1
async fn dropping_the_future_ends_the_whole_tree() {
    let world =
        World::bash("trap '' TERM; setsid sleep 1000 & (sleep 1000 &); echo ready; while :; do sleep 0.01; done");
    let running = world.sandbox.execute(&world.command, &world.confinement, world.printed.clone(), world.stop.clone());
    tokio::select! {
        ended = running => panic!("{ended:?}"),
        () = world.printed.contains("ready") => {}
    }
    eventually(Duration::from_secs(5), "the tree is gone", || world.alive().is_empty()).await;
}

async fn a_supervisor_that_was_stopped_still_does_its_work() {
    stopped(World::bash("kill -STOP $PPID; echo ready; sleep 1000")).await;
    stopped(World::bash("trap '' TERM; echo ready; while :; do kill -STOP $PPID; done")).await;
}

async fn a_stopped_supervisor_that_is_left_behind_still_does_its_work() {
    let world = World::bash("trap '' TERM; echo ready; while :; do kill -STOP $PPID; done");
    let running = world.sandbox.execute(&world.command, &world.confinement, world.printed.clone(), world.stop.clone());
    tokio::select! {
        ended = running => panic!("{ended:?}"),
        () = world.printed.contains("ready") => {}
    }
    eventually(Duration::from_secs(10), "the tree is gone", || world.alive().is_empty()).await;
}

#[tokio::test]
async fn a_command_that_kills_its_supervisor_dies_with_its_session() {
    let world = World::bash("sleep 1000 & (setsid sleep 1000 &); kill -9 $PPID; sleep 1000");
    let error = world.run().await.unwrap_err().message();
    assert_eq!(error, "the sandbox ended unexpectedly: `bash` was lost: its supervisor was killed");
}

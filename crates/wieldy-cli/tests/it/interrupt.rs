//! Tests of Ctrl-C during a call.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::world::World;

fn interrupt(child: &Child) {
    signal(child, "-INT");
}

fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// Waits until the workspace has the file, which shows that the program runs.
fn wait_for(world: &World, file: &str) -> String {
    let began = Instant::now();
    loop {
        if let Ok(text) = std::fs::read_to_string(world.path(file))
            && text.ends_with('\n')
        {
            return text.trim().to_owned();
        }
        assert!(began.elapsed() < Duration::from_secs(20), "it never began");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_there(process: &str) -> bool {
    std::path::Path::new("/proc").join(process).exists()
}

// Shows: A6.2, D5.1
#[test]
fn ctrl_c_cancels_the_call_and_nothing_of_it_is_left() {
    let world = World::new();
    let command = "command=echo begun; sleep 1000 & echo $! > pid; wait";
    let child = world.command(&["call", "Bash", command, "--isolation", "none"]).spawn().unwrap();
    let process = wait_for(&world, "pid");
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    insta::assert_snapshot!(world.told(&output), @"
    exit: 6
    ----- stdout -----
    begun

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    cancelling; press Ctrl-C again to leave at once
    error[E3109]: the call was cancelled
    ");
    assert!(!is_there(&process), "its processes are gone before the answer is given");
}

#[test]
fn ctrl_c_cancels_a_batch_and_what_has_not_begun_is_skipped() {
    let lines = "{\"id\":\"a\",\"tool\":\"Bash\",\"arguments\":{\"command\":\"echo $$ > pid; sleep 1000\"}}\n\
                 {\"id\":\"b\",\"tool\":\"Bash\",\"arguments\":{\"command\":\"echo never\"}}";
    let world = World::new().file("batch", lines);
    let child = world.command(&["batch", "batch", "--mode", "sequential", "--isolation", "none"]).spawn().unwrap();
    wait_for(&world, "pid");
    interrupt(&child);
    insta::assert_snapshot!(world.told(&child.wait_with_output().unwrap()), @"
    exit: 6
    ----- stdout -----
    [a] Bash: cancelled
    error[E3109]: the call's batch was cancelled
    [b] Bash: cancelled
    error[E3109]: the call's batch was cancelled

    ----- stderr -----
    warning: isolation `none` isolates nothing: programs run with your own rights
    cancelling; press Ctrl-C again to leave at once
    2 calls in [number] s: 0 succeeded, 1 failed, 1 skipped
    ");
}

#[test]
fn a_second_ctrl_c_leaves_at_once() {
    let world = World::new();
    let command = "command=trap '' TERM INT; echo $$ > pid; while true; do sleep 1; done";
    let mut child = world.command(&["call", "Bash", command, "--isolation", "none"]).spawn().unwrap();
    let process = wait_for(&world, "pid");
    interrupt(&child);
    // The second Ctrl-C counts once the first one was reported.
    let mut line = String::new();
    loop {
        line.clear();
        BufReader::with_capacity(1, child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        if line.starts_with("cancelling") {
            break;
        }
    }
    let began = Instant::now();
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(6));
    assert!(began.elapsed() < Duration::from_secs(1), "it did not wait for the grace time");
    while is_there(&process) {
        assert!(began.elapsed() < Duration::from_secs(10), "the supervisor ends with the command");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_termination_signal_and_a_closed_terminal_cancel_too() {
    for wish in ["-TERM", "-HUP"] {
        let world = World::new();
        let command = "command=echo begun; echo $$ > pid; sleep 1000";
        let child = world.command(&["call", "Bash", command, "--isolation", "none"]).spawn().unwrap();
        let process = wait_for(&world, "pid");
        signal(&child, wish);
        assert_eq!(child.wait_with_output().unwrap().status.code(), Some(6), "{wish}");
        assert!(!is_there(&process), "{wish}");
    }
}

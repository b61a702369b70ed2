//! The command with a person in front of it: questions, colours, and what tools must not do to a terminal.

use std::fs::File;
use std::io::{Read, Write};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::world::World;

const COLUMNS: u16 = 60;

/// Runs the command in a terminal, types `typed`, and gives the exit code and all that was seen.
fn seen(world: &World, arguments: &[&str], typed: &str) -> (Option<i32>, String) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let mut command = world.command(arguments);
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    let mut child = command.spawn().unwrap();
    // The command holds its own ends; ours would keep the terminal open.
    drop(command);
    let mut terminal = File::from(ours);
    terminal.write_all(typed.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    // A terminal that nobody has open any more ends with an error.
    let _ = terminal.read_to_end(&mut bytes);
    (child.wait().unwrap().code(), String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
}

#[test]
fn a_person_is_asked_and_sees_what_will_run() {
    let world = World::new().file("a.txt", "one\n").variable("NO_COLOR", "1");
    let (code, told) = seen(&world, &["call", "Read", "path=a.txt", "--confirm"], "y\n");
    assert_eq!(code, Some(0), "{told}");
    insta::assert_snapshot!(told.trim_start_matches("y\n"), @r#"
    `Read` wants to run (the caller wants it):
      {
        "path": "a.txt"
      }
    run it? [y/N] one
    "#);
}

#[test]
fn everything_but_yes_is_no() {
    let world = World::new().file("a.txt", "one\n").variable("NO_COLOR", "1");
    for answer in ["n\n", "\n", "yess\n", "\u{4}"] {
        let (code, told) = seen(&world, &["call", "Read", "path=a.txt", "--confirm"], answer);
        assert_eq!(code, Some(4), "{told}");
        assert!(told.contains("error[E3005]"), "{told}");
    }
}

#[test]
fn a_question_cannot_be_made_up_by_an_argument() {
    let world = World::new().variable("NO_COLOR", "1");
    let (_, told) = seen(&world, &["call", "Read", "path=\x1b[2Jx\u{202e}", "--confirm"], "n\n");
    assert!(!told.contains("\x1b[2J") && told.contains("\\u{202e}"), "{told}");
}

#[test]
fn what_a_tool_prints_cannot_steer_the_terminal_and_ends_its_line() {
    let world = World::new();
    let command = "command=printf 'a\\033[2Jb\\tc'";
    let (code, told) = seen(&world, &["call", "Bash", command, "--isolation", "none"], "");
    assert_eq!(code, Some(0));
    assert!(told.ends_with("a\\u{1b}[2Jb\tc\n"), "{told}");
}

#[test]
fn errors_are_coloured_unless_somebody_minds() {
    let world = World::new();
    let (_, told) = seen(&world, &["call", "Nope"], "");
    assert!(told.starts_with("\x1b[1;31merror[E3001]\x1b[0m: "), "{told:?}");
    for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let (_, told) = seen(&World::new().variable(name, value), &["call", "Nope"], "");
        assert!(!told.contains('\x1b'), "{name}: {told:?}");
    }
}

#[test]
fn the_table_of_tools_fits_the_terminal() {
    let (code, told) = seen(&World::new(), &["tools"], "");
    assert_eq!(code, Some(0));
    let longest = told.lines().map(|line| line.chars().count()).max();
    assert_eq!(longest, Some(COLUMNS.into()), "{told}");
}

#[test]
fn the_history_fits_the_terminal_and_is_coloured() {
    let world = World::new().file("a.txt", "one\n").variable("TERM", "xterm").variable("TZ", "UTC");
    let long = format!("path={}", "x".repeat(100));
    assert_eq!(world.code(&["call", "Read", "path=a.txt"]), Some(0));
    assert_eq!(world.code(&["call", "Read", &long]), Some(1));
    let (code, told) = seen(&world, &["history"], "");
    assert_eq!(code, Some(0));
    assert!(told.contains("\x1b[32msuccess\x1b[0m") && told.contains("\x1b[31mfailed E3302\x1b[0m"), "{told:?}");
    let plain = regex::Regex::new("\x1b\\[[0-9;]*m").unwrap().replace_all(&told, "").into_owned();
    assert_eq!(plain.lines().map(|line| line.chars().count()).max(), Some(COLUMNS.into()), "{plain}");
    let (code, told) = seen(&world, &["audit", "verify"], "");
    assert!(code == Some(0) && told.contains("the trail is whole: 10 records"), "{told:?}");
}

#[test]
fn a_batch_shows_how_far_it_is_and_cleans_up() {
    let call = "{\"tool\":\"Bash\",\"arguments\":{\"command\":\"sleep 0.3\"}}\n";
    let world = World::new().file("batch", &call.repeat(3)).variable("TERM", "xterm");
    let arguments = ["batch", "batch", "--mode", "sequential", "--isolation", "none"];
    let (code, told) = seen(&world, &arguments, "");
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("1/3") && told.contains("3 succeeded"), "{told:?}");
}

//! Tests of the command at a terminal: questions, colours, and escape sequences of tools.

use std::fs::File;
use std::io::{Read, Write};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::world::World;

const COLUMNS: u16 = 60;

/// The end of a question.
const ASKED: &str = "[y/N] ";

/// Runs the command in a terminal. Returns the exit code and the text on the terminal.
fn seen(world: &World, arguments: &[&str]) -> (Option<i32>, String) {
    seen_typing(world, arguments, "", "")
}

/// Runs the command in a terminal, types `ahead` before it starts and `answer` after its question.
pub(crate) fn seen_typing(world: &World, arguments: &[&str], ahead: &str, answer: &str) -> (Option<i32>, String) {
    seen_reacting(world, arguments, ahead, ASKED, |terminal| terminal.write_all(answer.as_bytes()).unwrap())
}

/// Does the same, with a reaction to the text `asked`.
fn seen_reacting(
    world: &World,
    arguments: &[&str],
    ahead: &str,
    asked: &str,
    react: impl Fn(&mut File),
) -> (Option<i32>, String) {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let mut terminal = File::from(ours);
    terminal.write_all(ahead.as_bytes()).unwrap();
    let mut command = world.command(arguments);
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap()).stderr(theirs);
    let mut child = command.spawn().unwrap();
    // The command holds its own ends; open ones in this process would keep the terminal open.
    drop(command);
    let (mut bytes, mut piece, mut is_answered) = (Vec::new(), [0; 4096], false);
    // A terminal whose other end is closed returns an error at its end.
    while let Ok(count @ 1..) = terminal.read(&mut piece) {
        bytes.extend_from_slice(&piece[..count]);
        if !is_answered && String::from_utf8_lossy(&bytes).contains(asked) {
            react(&mut terminal);
            is_answered = true;
        }
    }
    (child.wait().unwrap().code(), String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
}

// Shows: D7.1
#[test]
fn a_person_is_asked_and_sees_what_will_run() {
    let world = World::new().file("a.txt", "one\n").variable("NO_COLOR", "1");
    let (code, told) = seen_typing(&world, &["call", "Read", "path=a.txt", "--confirm"], "", "y\n");
    assert_eq!(code, Some(0), "{told}");
    insta::assert_snapshot!(told, @r#"
    May the tool `Read` run (the caller wants it)?
      {
        "path": "a.txt"
      }
    run it? [y/N] y
    one
    "#);
}

#[test]
fn an_answer_that_was_typed_before_the_question_does_not_count() {
    let world = World::new().file("a.txt", "one\n").variable("NO_COLOR", "1");
    // More than the 4,096 characters that the terminal itself stores, and an incomplete line.
    for ahead in ["y\n", "y", &"y\n".repeat(4096), &format!("{}y", "y\n".repeat(4096))] {
        let (code, told) = seen_typing(&world, &["call", "Read", "path=a.txt", "--confirm"], ahead, "\n");
        assert_eq!(code, Some(4), "{told}");
        assert!(told.contains("error[E3005]") && told.matches(ASKED).count() == 1, "{told}");
        let (code, told) = seen_typing(&world, &["call", "Read", "path=a.txt", "--confirm"], ahead, "y\n");
        assert_eq!(code, Some(0), "an answer to the question still counts: {told}");
    }
}

#[test]
fn a_question_about_a_program_shows_where_and_how_it_would_run() {
    let world = World::new().file("run.sh", "echo ran\n").variable("NO_COLOR", "1");
    let arguments = ["call", "Bash", "command=sh run.sh", "--confirm", "--network", "example.com"];
    let (_, told) = seen_typing(&world, &arguments, "", "n\n");
    let folder = world.path("").canonicalize().unwrap();
    insta::assert_snapshot!(told.replace(&*folder.to_string_lossy(), "[folder]"), @r#"
    May the tool `Bash` run (the caller wants it)?
      {
        "command": "sh run.sh",
        "background": false
      }
      command line: sh run.sh
      folder: [folder]
      isolation: native
      network: example.com
      files that must not change until it starts: run.sh
    run it? [y/N] n
    error[E3005]: the call was not confirmed
    hint: do it another way, or ask the person why
    "#);
}

#[test]
fn everything_but_yes_is_no() {
    let world = World::new().file("a.txt", "one\n").variable("NO_COLOR", "1");
    for answer in ["n\n", "\n", "yess\n", "\u{4}"] {
        let (code, told) = seen_typing(&world, &["call", "Read", "path=a.txt", "--confirm"], "", answer);
        assert_eq!(code, Some(4), "{told}");
        assert!(told.contains("error[E3005]"), "{told}");
    }
}

#[test]
fn a_question_cannot_be_made_up_by_an_argument() {
    let world = World::new().variable("NO_COLOR", "1");
    let (_, told) = seen_typing(&world, &["call", "Read", "path=\x1b[2Jx\u{202e}", "--confirm"], "", "n\n");
    assert!(!told.contains("\x1b[2J") && told.contains("\\u{202e}"), "{told}");
}

#[test]
fn the_output_of_a_tool_cannot_steer_the_terminal_and_ends_its_line() {
    let world = World::new();
    let command = "command=printf 'a\\033[2Jb\\tc'";
    let (code, told) = seen(&world, &["call", "Bash", command, "--isolation", "none"]);
    assert_eq!(code, Some(0));
    assert!(told.ends_with("a\\u{1b}[2Jb\tc\n"), "{told}");
}

#[test]
fn errors_are_coloured_unless_disabled() {
    let world = World::new();
    let (_, told) = seen(&world, &["call", "Nope"]);
    assert!(told.starts_with("\x1b[1;31merror[E3001]\x1b[0m: "), "{told:?}");
    for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let (_, told) = seen(&World::new().variable(name, value), &["call", "Nope"]);
        assert!(!told.contains('\x1b'), "{name}: {told:?}");
    }
}

#[test]
fn the_table_of_tools_fits_the_terminal() {
    let (code, told) = seen(&World::new(), &["tools"]);
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
    let (code, told) = seen(&world, &["history"]);
    assert_eq!(code, Some(0));
    assert!(told.contains("\x1b[32msuccess\x1b[0m") && told.contains("\x1b[31mfailed E3302\x1b[0m"), "{told:?}");
    let plain = regex::Regex::new("\x1b\\[[0-9;]*m").unwrap().replace_all(&told, "").into_owned();
    assert_eq!(plain.lines().map(|line| line.chars().count()).max(), Some(COLUMNS.into()), "{plain}");
    let (code, told) = seen(&world, &["audit", "verify"]);
    assert!(code == Some(0) && told.contains("the trail is whole: 10 records"), "{told:?}");
}

#[test]
fn a_batch_shows_how_far_it_is_and_cleans_up() {
    let call = "{\"tool\":\"Bash\",\"arguments\":{\"command\":\"sleep 0.3\"}}\n";
    let world = World::new().file("batch", &call.repeat(3)).variable("TERM", "xterm");
    let arguments = ["batch", "batch", "--mode", "sequential", "--isolation", "none"];
    let (code, told) = seen(&world, &arguments);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("0/3") && told.contains("1/3") && told.contains("3 succeeded"), "{told:?}");
    let first = told.split('\r').find(|drawn| drawn.contains("0/3") && drawn.contains("Bash"));
    assert!(first.is_some(), "the running call is named before one is over: {told:?}");
}

// Shows: B11.3
#[test]
fn a_program_has_the_terminal_and_its_size() {
    let script = "stty size; printf 'name? '; read name; echo \"hi $name\"; exit 3";
    let answer = |terminal: &mut File| terminal.write_all(b"Ada\n").unwrap();
    let (code, told) = seen_reacting(&World::new(), &["run", "--", "sh", "-c", script], "", "name? ", answer);
    assert_eq!((code, told.as_str()), (Some(3), "24 60\nname? Ada\nhi Ada\n"));
}

#[test]
fn ctrl_c_reaches_the_program_in_its_terminal() {
    let script = "trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 0.1; done";
    let press = |terminal: &mut File| terminal.write_all(b"\x03").unwrap();
    let (code, told) = seen_reacting(&World::new(), &["run", "--", "sh", "-c", script], "", "ready", press);
    assert_eq!((code, told.as_str()), (Some(9), "ready\n^Cinterrupted\n"));
}

#[test]
fn wieldy_mcp_on_a_terminal_says_that_it_waits_for_a_client() {
    let leave = |terminal: &mut File| terminal.write_all(b"\x04").unwrap();
    let (code, told) = seen_reacting(&World::new(), &["mcp"], "", "to leave\r\n", leave);
    let line = "waiting for an MCP client on standard input; name this command in the client's configuration, or press Ctrl-D to leave\n";
    assert_eq!((code, told.as_str()), (Some(0), line));
    // The line is printed only at a terminal, not for a client.
    let output = World::new().command(&["mcp"]).stdin(std::process::Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

// Shows: B11.2
#[test]
fn output_is_shown_while_it_comes_and_once() {
    // The command continues only after its first line was seen.
    let wait = "while ! test -e go; do sleep 0.05; done";
    let command =
        format!("command=echo first; {wait}; printf 'a\\303'; sleep 0.2; printf '\\251\\033[2J'; echo; printf last");
    let world = World::new();
    let arguments = ["call", "Bash", &command, "--isolation", "none"];
    let (code, told) =
        seen_reacting(&world, &arguments, "", "first", |_| std::fs::write(world.path("go"), "").unwrap());
    assert_eq!(code, Some(0));
    let told = told.split_once("rights\n").unwrap().1;
    assert_eq!(told, "first\na\u{e9}\\u{1b}[2J\nlast\n");
}

#[test]
fn a_silent_call_shows_that_it_runs() {
    let world = World::new().variable("TERM", "xterm");
    let (code, told) = seen(&world, &["call", "Bash", "command=sleep 1"]);
    assert_eq!(code, Some(0));
    assert!(told.contains("Bash 0s") && told.ends_with("\r\u{1b}[2K"), "{told:?}");
}

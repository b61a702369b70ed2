//! Tests the state in which a command starts, and the errors of commands that cannot start.

use std::error::Error;
use std::io;
use std::os::unix::fs::PermissionsExt;

use wieldy_core::{Ended, Level, SandboxError};

use crate::world::{World, conformance};

conformance! {
    together: [
        a_command_gets_its_arguments_and_says_what_it_says
        the_environment_is_exactly_what_the_command_says
        stdout_and_stderr_are_told_apart
        a_command_without_input_reads_the_end_of_file_at_once
        a_command_reads_the_bytes_it_is_given_and_then_the_end_of_file
        unread_input_is_no_error
        a_command_starts_in_its_folder
        a_command_has_no_terminal_no_foreign_files_and_no_way_to_privileges
        exit_codes_and_signals_are_reported
        a_program_that_is_not_there_is_not_found
        a_file_that_is_no_program_is_refused
        a_program_in_the_workspace_is_not_found_by_its_bare_name
        a_command_goes_before_the_executor_when_memory_runs_out
        a_folder_that_is_not_there_is_named
        zero_bytes_and_impossible_variables_are_refused
        a_command_that_was_stopped_before_it_began_never_runs
    ];
    alone: [
    ];
}

async fn a_command_gets_its_arguments_and_says_what_it_says() {
    let world = World::new("printf", &["%s|", "two words", "", "$HOME", "*", "ä"]);
    let exit = world.run().await.unwrap();
    assert_eq!((exit.ended, world.printed.stdout().as_str()), (Ended::Code(0), "two words||$HOME|*|ä|"));
    assert_eq!(exit.sandbox.level, world.sandbox.level());
    let other = World::new("true", &[]).run().await.unwrap();
    assert_ne!(exit.sandbox.id, other.sandbox.id);
}

async fn the_environment_is_exactly_what_the_command_says() {
    let mut world = World::new("env", &[]);
    world.command.environment.insert("GREETING".into(), "good day\nto you".into());
    let mark = world.command.environment["MARK"].clone();
    let added = match world.sandbox.level() {
        Level::None => "",
        Level::Firecracker => "HOME=/home/agent\nUSER=agent\nLOGNAME=agent\n",
        _ => "HOME=/home/agent\nUSER=agent\nLOGNAME=agent\nGIT_TEMPLATE_DIR=/run/git-templates\n",
    };
    // The order does not matter.
    let sorted = |text: &str| text.lines().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(
        sorted(&world.output().await),
        sorted(&format!("GREETING=good day\nto you\nMARK={mark}\nPATH=/usr/local/bin:/usr/bin:/bin\n{added}"))
    );
}

async fn stdout_and_stderr_are_told_apart() {
    let world = World::bash("echo out; echo err >&2");
    world.run().await.unwrap();
    assert_eq!((world.printed.stdout().as_str(), world.printed.stderr().as_str()), ("out\n", "err\n"));
}

/// P-SBX-18.
async fn a_command_without_input_reads_the_end_of_file_at_once() {
    assert_eq!(World::bash("cat; echo done").output().await, "done\n");
}

async fn a_command_reads_the_bytes_it_is_given_and_then_the_end_of_file() {
    assert_eq!(World::new("cat", &[]).stdin("abc").output().await, "abc");
    assert_eq!(World::new("wc", &["-c"]).stdin(vec![7; 3_000_000]).output().await, "3000000\n");
    assert_eq!(World::new("wc", &["-c"]).stdin("").output().await, "0\n");
}

async fn unread_input_is_no_error() {
    let world = World::bash("exec <&-; echo no thanks").stdin(vec![7; 3_000_000]);
    assert_eq!(world.output().await, "no thanks\n");
}

async fn a_command_starts_in_its_folder() {
    let mut world = World::new("pwd", &["-P"]);
    let folder = world.workspace.path().canonicalize().unwrap().join("inner");
    std::fs::create_dir(&folder).unwrap();
    world.command.folder = "inner".into();
    let output = world.output().await;
    match world.sandbox.level() {
        // The stand-in for a guest mounts nothing, so its workspace is at another path.
        Level::Firecracker => assert!(output.ends_with("/copy/inner\n"), "{output}"),
        _ => assert_eq!(output, format!("{}\n", folder.display())),
    }
}

async fn a_command_has_no_terminal_no_foreign_files_and_no_way_to_privileges() {
    let world = World::bash(
        "ls /proc/self/fd | tr '\\n' ' '; grep -E 'NoNewPrivs|SigBlk|SigIgn' /proc/self/status | tr -d '\\t'; \
         ulimit -c; ulimit -n; (: </dev/tty) 2>/dev/null || echo no terminal",
    );
    // Descriptor 3 is that of `ls` itself. gVisor shows none of this.
    let told = match world.sandbox.level() {
        Level::Gvisor => "",
        _ => "0 1 2 3 SigBlk:0000000000000000\nSigIgn:0000000000000000\nNoNewPrivs:1\n",
    };
    assert_eq!(world.output().await, format!("{told}0\n1024\nno terminal\n"));
}

// Shows: B10
async fn exit_codes_and_signals_are_reported() {
    assert_eq!(World::bash("exit 3").run().await.unwrap().ended, Ended::Code(3));
    assert_eq!(World::bash("kill -9 $$").run().await.unwrap().ended, Ended::Signal(9));
    assert_eq!(World::bash("kill -TERM $$").run().await.unwrap().ended, Ended::Signal(15));
}

/// Returns true if the level reports a start error in the runtime's own words.
fn is_told_by_runtime(world: &World) -> bool {
    matches!(world.sandbox.level(), Level::Runc | Level::Gvisor)
}

/// Returns the kind and the text of a command's start error.
async fn refusal(world: World) -> (io::ErrorKind, String) {
    match world.run().await {
        Err(error @ SandboxError::Start { .. }) => {
            let source = error.source().unwrap().downcast_ref::<io::Error>().unwrap();
            (source.kind(), source.to_string())
        }
        other => panic!("{other:?}"),
    }
}

async fn a_program_that_is_not_there_is_not_found() {
    let mut world = World::new("no-such-program", &[]);
    world.command.environment.insert("PATH".into(), "/usr/bin:/bin".into());
    let is_told_by_runtime = is_told_by_runtime(&world);
    let wanted = "no program of that name exists on the `PATH` /usr/bin:/bin";
    let (kind, text) = refusal(world).await;
    assert!(kind == io::ErrorKind::NotFound && (is_told_by_runtime || text == wanted), "{text}");
    let (kind, text) = refusal(World::new("/no/such/program", &[])).await;
    let wanted = "No such file or directory (os error 2)";
    assert!(kind == io::ErrorKind::NotFound && (is_told_by_runtime || text == wanted), "{text}");
    let (kind, _) = refusal(World::new("", &[])).await;
    assert_eq!(kind, io::ErrorKind::NotFound);
}

async fn a_file_that_is_no_program_is_refused() {
    let world = World::new("./data", &[]);
    let file = world.workspace.path().join("data");
    std::fs::write(&file, "just text").unwrap();
    let (kind, _) = refusal(world).await;
    assert_eq!(kind, io::ErrorKind::PermissionDenied);

    let world = World::new("./data", &[]);
    let file = world.workspace.path().join("data");
    std::fs::write(&file, "just text").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    let (_, text) = refusal(world).await;
    assert!(text == "Exec format error (os error 8)" || text.ends_with(": exec format error"), "{text}");
}

async fn a_program_in_the_workspace_is_not_found_by_its_bare_name() {
    let mut world = World::new("ls", &["-d", "ls"]);
    let file = world.workspace.path().join("ls");
    std::fs::write(&file, "#!/bin/sh\necho mine").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    world.command.environment.insert("PATH".into(), ".::/usr/bin:/bin".into());
    assert_eq!(world.output().await, "ls\n");
    world.command.program = "./ls".into();
    assert!(world.output().await.ends_with("mine\n"));
}

async fn a_folder_that_is_not_there_is_named() {
    let mut world = World::new("true", &[]);
    world.command.folder = "/no/such/folder".into();
    let is_told_by_runtime = is_told_by_runtime(&world);
    let wanted = "cannot enter the folder `/no/such/folder`: No such file or directory (os error 2)";
    let (kind, text) = refusal(world).await;
    assert!(kind == io::ErrorKind::NotFound && (is_told_by_runtime || text == wanted), "{text}");
}

async fn zero_bytes_and_impossible_variables_are_refused() {
    let (kind, text) = refusal(World::new("echo", &["a\0b"])).await;
    assert_eq!((kind, text.as_str()), (io::ErrorKind::InvalidInput, "an argument contains a zero byte"));
    let mut world = World::new("true", &[]);
    world.command.environment.insert("A=B".into(), "c".into());
    let (kind, text) = refusal(world).await;
    assert_eq!(kind, io::ErrorKind::InvalidInput);
    assert_eq!(text, "`A=B` cannot be the name of an environment variable");
}

async fn a_command_that_was_stopped_before_it_began_never_runs() {
    let world = World::bash("touch ran");
    world.stop.cancel();
    assert!(matches!(world.run().await, Err(SandboxError::Creation { .. })));
    assert!(!world.workspace.path().join("ran").exists());
}

async fn a_command_goes_before_the_executor_when_memory_runs_out() {
    assert_eq!(World::new("cat", &["/proc/self/oom_score_adj"]).output().await, "500\n");
}
